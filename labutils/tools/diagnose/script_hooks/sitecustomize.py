"""Python runs this file when it starts, because `labutils diagnose` puts this folder on PYTHONPATH.

The folder leaves `sys.path` at once, so that the script sees its own modules only. The site's own
sitecustomize, which this one hides, runs as well.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("LABUTILS_DIAGNOSE"):
    from labutils_script_hooks import watch

    watch.prepare(os.environ["LABUTILS_DIAGNOSE"])
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
_other = PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None and _other.origin != __file__:
    _other.loader.exec_module(module_from_spec(_other))
