"""Waits until the script imports PyTorch, and leaves word of each Python process that the hook
reached.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from labutils_inside import calls


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls `action` once, when the module `name` has been imported; it finds nothing itself."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_act(module: ModuleType) -> None:
            execute(module)
            self.action()

        spec.loader.exec_module = then_act  # type: ignore[method-assign]
        return spec


def prepare(settings: str) -> None:
    """Leave word that a Python process is here, and hook PyTorch when it comes. settings: JSON, see
    `watch.Watch`.
    """
    given = json.loads(settings)
    word = Word(given["folder"])

    def hook() -> None:
        from labutils_inside.watch import Watch

        word.say(torch=True)
        Watch(given, word).install()

    sys.meta_path.insert(0, WhenImported("torch", hook))


class Word:
    """A small file of what this process has come to, for `labutils diagnose` to explain an end
    without a record.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, f"process-{os.getpid()}.json")
        self.pid = os.getpid()
        self.said: dict[str, Any] = {"argv": list(getattr(sys, "orig_argv", sys.argv))}
        self.say()
        atexit.register(self._say_how_it_ended)

    def _say_how_it_ended(self) -> None:
        """With the error that ended the script, where one did, and the script's own line that it
        came by. Python keeps it for us, whichever hook the script has set to show it."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            lines = traceback.format_exception_only(type(error), error)
            words = lines[-1] if isinstance(error, SyntaxError) else lines[0]
            frames = [
                frame
                for frame in traceback.extract_tb(error.__traceback__)
                if calls.is_own(frame.filename)
            ]
            place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            self.note(failed=" ".join(words.split())[:300], failed_at=place)
        self.say()

    def note(self, **news: Any) -> None:
        """Add to what will be said at the process's end, or before."""
        self.said |= news

    def say(self, **news: Any) -> None:
        """Add to what was said. A process that was forked from this one stays silent."""
        self.note(**news)
        if os.getpid() == self.pid:
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump(self.said, file, default=str)
