"""Libraries are imported out of the garbage collector's sight, and stay there.

They are a million objects that live as long as the process does. The collector would look through
them time and again while they are imported, a fifth of that time, and for a third of a second
whenever an ended trainer's cycles of references are to be found.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

_asked_for: set[str] = set()


def import_unseen(*modules: str) -> None:
    """Import modules, unless the first of them was asked for before.

    All that is there by then is hidden from the collector for good. The first time there are no
    models yet, later there may be, and their cycles of references must be found. A module that
    can't be imported is passed over: its error is told where it is used.
    """
    if modules[0] in _asked_for:
        return
    _asked_for.add(modules[0])
    collecting = gc.isenabled()
    gc.disable()
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    if collecting:
        gc.enable()
