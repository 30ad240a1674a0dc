"""Python runs this when it starts, where this folder is on PYTHONPATH: `labutils diagnose` puts it
there for a script.

The folder leaves the path at once, so that the script sees its own modules only, and the site's own
sitecustomize, which this one stands before, is run.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("LABUTILS_DIAGNOSE"):
    from labutils_inside import arrival

    arrival.prepare(os.environ["LABUTILS_DIAGNOSE"])
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
_other = PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None and _other.origin != __file__:
    _other.loader.exec_module(module_from_spec(_other))
