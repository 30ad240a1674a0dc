"""Imports that the garbage collector passes over.

The libraries are a million objects that live as long as the process does. The collector would look
through them again and again while they are imported, which takes a fifth of that time. Later it
would take a third of a second whenever an ended trainer's cycles of references are to be found.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

_asked_for: set[str] = set()


def import_unseen(*modules: str) -> None:
    """Import modules, unless the first of them was asked for before.

    Every object that exists afterwards is hidden from the collector for good. That is done once for
    a list of modules: later there may be models, whose cycles of references must be found. A module
    that can't be imported is skipped: its error is raised where it is used.
    """
    if modules[0] in _asked_for:
        return
    _asked_for.add(modules[0])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.freeze()
    finally:
        if collecting:
            gc.enable()
