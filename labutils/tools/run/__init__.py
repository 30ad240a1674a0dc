"""`labutils run`: labs from first cell to last, one after the other, each by papermill in a kernel
of its own.

    code = run(["00", "03"], Options(scale="tiny"))

What a person can get wrong is checked before anything runs (`arguments`). After that a lab may
raise, die or hang, and the others still run; Ctrl-C ends the run. Finished runs are kept, and
the executed notebook shows how far it came (`execute_lab`). A lab whose executed notebook says that
it is done is not run again (`labs_in_order`). index.html leads to all of it (`index`).
"""

from labutils.tools.run.arguments import NOTEBOOKS, Options, UsageError, find
from labutils.tools.run.labs_in_order import ALL_RAN, STOPPED, run

__all__ = ["ALL_RAN", "NOTEBOOKS", "STOPPED", "Options", "UsageError", "find", "run"]
