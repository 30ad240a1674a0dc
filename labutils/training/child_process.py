"""Runs something in another process. Everybody who does so uses this protocol.

    with Child(["-m", "some.module"], order={"steps": 3}, limit_s=60) as child:
        result = child.receive()            # None: it ended without one, see child.failure()

Parent and child exchange JSON values, one a line. The child reads lines from standard input. What
it writes to standard output is a message where the line begins with `MESSAGE`, and a print
otherwise. The child's side is `order()` and `send()`, or two lines of its own in a program that
shall not import this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from labutils.results.records import REPOSITORY

if TYPE_CHECKING:
    import psutil

MESSAGE = "\x1e"
"""Begins a line that is a message: ASCII's record separator, as in RFC 7464."""
POLL_S = 0.5
"""How often a parent that waits for a message looks whether the child still runs."""


class Child:
    """A Python process that takes `order` (JSON) on its first line of input.

    arguments: Python's. environment: variables beside this process's own; None: unset. limit_s: it
    is killed after so long. folder: where it runs; default: the repository. `printed` has its
    output that was no message; `timed_out` says whether the limit ended it. At the end of the
    `with` block it is killed, with all that it started in its session.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        order: Any = None,
        limit_s: float = 240.0,
        environment: Mapping[str, str | None] | None = None,
        folder: str | Path = REPOSITORY,
    ) -> None:
        variables = os.environ | dict(environment or {})
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            cwd=folder,
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,
        )
        self.printed = ""
        self.limit_s, self.timed_out = limit_s, False
        self._messages: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._timer = threading.Timer(limit_s, self._kill_late)
        self._timer.start()
        if order is not None:
            self.send(order)

    def send(self, message: Any) -> None:
        """Give it a line to read. One that has ended hears nothing."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        """The child's next message; None where it ended without one."""
        while True:
            # What the child started may outlive it and hold its output open: so ask for its end.
            ended = self.process.poll() is not None
            try:
                message = self._messages.get(timeout=POLL_S)
            except queue.Empty:
                if ended:
                    return None
                continue
            if message is None:
                self._messages.put(None)  # for the next call
            return message

    def failure(self) -> str:
        """How a child ended that gave no answer, with the last line of its errors."""
        code = self.process.wait()
        if self.timed_out:
            return f"the process did not end within {self.limit_s:.0f} s"
        last = (self.errors().strip().splitlines() or ["nothing was printed"])[-1]
        return f"the process ended with code {code}: {last}"

    def errors(self) -> str:
        """Its standard error so far."""
        # Not by seeking: a child that still runs shares the file's offset.
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def _read(self) -> None:
        with self.process.stdout as output:
            for line in output:
                before, mark, message = line.partition(MESSAGE)
                self.printed += before
                if mark:
                    with contextlib.suppress(json.JSONDecodeError):  # it died within the line
                        self._messages.put(json.loads(message))
        self._messages.put(None)

    def _kill_late(self) -> None:
        self.timed_out = True
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        end_group(self.process)
        self._reader.join(POLL_S)
        self._errors.close()
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def order() -> Any:
    """The child's side: the next message of the parent. Raises `EOFError` where it is gone."""
    if not (line := sys.stdin.readline()):
        raise EOFError("whoever started this process is gone")
    return json.loads(line)


def send(message: Any) -> None:
    """The child's side: a message to the parent."""
    print(f"\n{MESSAGE}{json.dumps(message)}", flush=True)


# ------------------------------------------------------------------------------ orphans

GONE_WITHIN_S = 5.0
"""How long processes that were killed may take to be gone."""


def end_group(process: subprocess.Popen) -> None:
    """End a process that was started in a session of its own, with all that it has started there,
    and return when all are gone.
    """
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

    A process whose parent died has none that leads to it any more, and may be in a session of its
    own, but it keeps its environment.
    """
    import psutil

    ended: dict[int, psutil.Process] = {}
    end = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < end:
        new = [
            p for p in psutil.process_iter() if p.pid not in ended and _carries(p, variable, mark)
        ]
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.kill()
        ended |= {process.pid: process for process in new}
        if not new and not any(map(_is_there, ended.values())):
            break
        time.sleep(0.02)
    return list(ended)


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
