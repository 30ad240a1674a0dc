"""Processes that get ready side by side and work in turns; and those that outlive who started them,
and are to end.

with contextlib.ExitStack() as stack:
    children = [stack.enter_context(Child(["-m", "some.module"], os.environ, limit_s=60)) for _ in
    range(2)] for child in children:
        child.until_ready()
    for child in children:
        child.go()
        child.until_end()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import psutil

READY, GO = "ready", "go"


class Child:
    """A Python process that prints `READY` in a line of its own once it is, reads the line `GO`,
    and says what it found in its last line.

    arguments: Python's. environment: all of it. limit_s: after which it is ended, whatever it does;
    with the `with` block it ends as well. folder: where it runs (None: here).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        limit_s: float,
        folder: str | Path | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  `__exit__` does
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=folder,
            env=dict(environment),
        )
        self._said = ""
        self._timer = threading.Timer(limit_s, self._process.kill)
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def say(self, line: str) -> None:
        """Give it a line to read; one that has ended hears nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def until_ready(self) -> str:
        """Its last line ("": none) before it was ready, or had ended."""
        while (line := self._process.stdout.readline()) not in (READY + "\n", ""):
            self._said = line
        said = self._said
        if line:  # what it said before is no answer to what it is told now
            self._said = ""
        return said

    def go(self) -> None:
        self.say(GO)

    def until_end(self) -> str:
        """Its last line since it was ready, or at all where it never was; "" where it said nothing."""
        for line in self._process.stdout:
            self._said = line
        return self._said

    def failure(self) -> str:
        """How a process that didn't say what was asked of it has ended, with the last line of its
        standard error.
        """
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["nothing was printed"])[-1]
        return f"the process ended with code {code}: {last}"


GONE_WITHIN_S = 5.0
"""How long processes that were killed may take to be gone."""


def end_group(process: subprocess.Popen) -> None:
    """End a process that was started in a trainer of its own, with all that it has started there,
    and return when all are gone. (Where there are no groups of processes, itself alone.)"""
    if not hasattr(os, "killpg"):
        process.kill()
        process.wait()
        return
    end = time.monotonic() + GONE_WITHIN_S
    with contextlib.suppress(OSError):  # there is no such group any more
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    process.wait()


def end_marked(variable: str, mark: str) -> list[int]:
    """End every other process that has `mark` in its environment under this name, and return when
    all are gone, with the memory and the GPU they held; their numbers.

    A process whose parent died has none that leads to it any more, and may be in a trainer of its
    own where torchrun started it, but what it found in its environment it keeps.
    """
    import psutil

    found: dict[int, psutil.Process] = {}
    end = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < end:
        new = [
            p for p in psutil.process_iter() if p.pid not in found and _carries(p, variable, mark)
        ]
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
