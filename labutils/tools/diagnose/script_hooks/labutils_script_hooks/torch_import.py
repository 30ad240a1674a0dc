"""Waits until the script has imported PyTorch, and then starts the watch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from labutils_script_hooks import fixes_in_place
from labutils_script_hooks.process_note import ProcessNote


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls `action` once, after the module `name` was executed.

    It hooks the loader of every spec that is asked for and stays until one was executed: libraries
    look for a spec without importing it (`importlib.util.find_spec("torch")`).
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def prepare(settings: str) -> None:
    """Write a note that a Python process is here, and watch PyTorch's steps once it is imported.

    settings: JSON, see `watch.Watch`.
    """
    given = json.loads(settings)
    note = ProcessNote(given["folder"])

    def start_watch() -> None:
        note.write(torch=True)
        fixes_in_place.watch(given, note).install()

    sys.meta_path.insert(0, WhenImported("torch", start_watch))
