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


class ProcessNote:
    """One process: whether it imported PyTorch, its steps, its error. `facts` are written at its
    end, or before."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.write()
        atexit.register(self._write_the_end)

    def write(self, **facts: Any) -> None:
        """Add facts and write all of them. A process may outlive the diagnosis and its folder."""
        self.facts |= facts
        path = os.path.join(self.folder, f"process-{os.getpid()}.json")
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(self.facts, file, default=str)

    def _write_the_end(self) -> None:
        """The error that ended the script, and the script's own line that raised it.

        Python keeps the error in `sys.last_value`, whichever hook the script has set to show it.
        """
        error = getattr(sys, "last_value", None)
        if error is not None:
            lines = traceback.format_exception_only(type(error), error)
            words = lines[-1] if isinstance(error, SyntaxError) else lines[0]
            stack = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in stack if calls.is_own(frame.filename)]
            place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
            self.facts |= {"failed": " ".join(words.split())[:300], "failed_at": place}
        self.write()
