"""Labs run in batches: each notebook by papermill in a kernel of this interpreter, and whatever
happens said plainly.

    code = run(["00", "03"], Options(scale="tiny"))

Everything a person can get wrong is checked before anything runs (`UsageError`). After that a lab
may raise, die, hang or be stopped with Ctrl-C: the others still run (after Ctrl-C they don't), what
was measured is kept, and the executed notebook shows how far it came. Labs that are done in the
results folder are not run again.

`asking` checks what is asked for, `planning` says which labs are done and which may run at once,
`running` runs one, `kernels` starts and ends its process, `telling` says how it goes, and `index`
makes the page that leads to all of it.
"""

from labutils.tools.run.asking import NOTEBOOKS, Lab, Options, Parameter, UsageError, find
from labutils.tools.run.batch import A_LAB_FAILED, ALL_RAN, STOPPED, WRONG_USAGE, run
from labutils.tools.run.kernels import Kernel, Kernels
from labutils.tools.run.planning import SUMMING_UP
from labutils.tools.run.running import Outcome

__all__ = [
    "ALL_RAN",
    "A_LAB_FAILED",
    "NOTEBOOKS",
    "STOPPED",
    "SUMMING_UP",
    "WRONG_USAGE",
    "Kernel",
    "Kernels",
    "Lab",
    "Options",
    "Outcome",
    "Parameter",
    "UsageError",
    "find",
    "run",
]
