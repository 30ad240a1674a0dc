"""A small file about each Python process that the hooks reached.

`labutils diagnose` explains with it why nothing is seen yet, and an end without a record.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import traceback
from typing import Any

from labutils_script_hooks import calls


def save(path: str, facts: dict[str, Any]) -> None:
    """A file of the hooks. It is there when it is whole: the process may be killed meanwhile. The
    process may also outlive the diagnosis, which takes the folder away."""
    with contextlib.suppress(FileNotFoundError):
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(facts, file, default=str)
        os.replace(path + ".new", path)


class ProcessNote:
    """One process: whether it imported PyTorch, its steps, its error. `facts` are written at its
    end, or before."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.write()
        atexit.register(self._write_the_end)

    def write(self, **facts: Any) -> None:
        """Add facts and write all of them."""
        self.facts |= facts
        with contextlib.suppress(OSError):
            save(os.path.join(self.folder, f"process-{os.getpid()}.json"), self.facts)

    def _write_the_end(self) -> None:
        """The error that ended the script, and the script's own line that raised it, or that Python
        could not read.

        Python keeps the error in `sys.last_value`, whichever hook the script has set to show it.
        """
        error = getattr(sys, "last_value", None)
        if error is not None:
            words = traceback.format_exception_only(type(error), error)[0]
            places = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)]
            if isinstance(error, SyntaxError):
                words = f"{type(error).__name__}: {error.msg}"
                places.append((error.filename or "<string>", error.lineno))
            own = [f" ({file}:{line})" for file, line in places if calls.is_own(file)]
            self.facts["failed"] = " ".join(words.split())[:300] + "".join(own[-1:])
        self.write()
