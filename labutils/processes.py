"""Processes that outlive those that started them, found by a mark that all of them carry.

A process whose parent died has none that leads to it any more, and may be in a session of its own where torchrun
started it, but what it found in its environment it keeps.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

GONE_WITHIN_S = 5.0
"""How long processes that were killed may take to be gone."""


def end_marked(variable: str, mark: str) -> list[int]:
    """End every other process that has `mark` in its environment under this name, and return when all are gone, with
    the memory and the GPU they held; their numbers."""
    import psutil

    found: dict[int, psutil.Process] = {}
    end = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < end:
        new = [p for p in psutil.process_iter() if p.pid not in found and _carries(p, variable, mark)]
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.kill()
        found |= {process.pid: process for process in new}
        if not new and not any(map(_is_there, found.values())):
            break
        time.sleep(0.02)
    return list(found)


def _carries(process: psutil.Process, variable: str, mark: str) -> bool:
    """Other people's processes and those that have ended don't say."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return process.pid != os.getpid() and process.environ().get(variable) == mark
    return False


def _is_there(process: psutil.Process) -> bool:
    """Whether it hasn't ended; nobody may have asked yet how one that has did."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
