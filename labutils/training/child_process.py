"""Runs something in another process. Everybody who does so uses this protocol.

    with Child(["-m", "some.module"], order={"steps": 3}, limit_s=60) as child:
        result = child.receive()            # None: it ended without one, see child.failure()

Parent and child exchange JSON values, one a line. The child reads lines from standard input. What
it writes to standard output is a message where the line begins with `MESSAGE`, and a print
otherwise. The child's side is `order()` and `send()`, or two lines of its own in a program that
shall not import this package. A program that knows nothing of it is a `Command`.
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
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from labutils.results.records import REPOSITORY

MARK = "LABUTILS_CHILD"
"""A child and all that it starts have its mark in their environment under this name."""
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
        self._mark = uuid.uuid4().hex
        variables = os.environ | dict(environment or {}) | {MARK: self._mark}
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
        if self.process.returncode is None:  # else its number may be a stranger's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a titled process has no mark
        self.process.wait()
        end_marked(MARK, self._mark)
        self._reader.join(POLL_S)
        self._errors.close()
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def python_path() -> str:
    """PYTHONPATH of a process that is to find this checkout, wherever it runs."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def order() -> Any:
    """The child's side: the next message of the parent. Raises `EOFError` where it is gone."""
    if not (line := sys.stdin.readline()):
        raise EOFError("whoever started this process is gone")
    return json.loads(line)


def send(message: Any) -> None:
    """The child's side: a message to the parent."""
    print(f"\n{MESSAGE}{json.dumps(message)}", flush=True)


# ------------------------------------------------------------------ other people's programs


class Command(subprocess.Popen):
    """A command in this process's group. `variable` of its environment (`env`) marks it, and all
    that it starts: no other has the same value."""

    def __init__(self, words: Sequence[str], variable: str, **options: Any) -> None:
        # In the same group: a signal to all of it ends this one, too.
        self.witness = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        super().__init__(words, **options)
        self.mark = variable, options["env"][variable]

    def end(self, number: int, within_s: float) -> None:
        """End the command, and all that it has started.

        number: of a signal that comes first, 0 for none. SIGINT goes to the whole group, as in a
        terminal, any other to the command alone: its DataLoader workers would die of it while it
        cleans up. None is sent where the group has got it already: a second one would break the
        clean-up. within_s: how long the group may take to end, or, without a signal, whatever the
        command has left.
        """
        started: set[psutil.Process] = set()
        with contextlib.suppress(KeyboardInterrupt):  # pressed again: at once
            started, awaited = self._started(), self._started(beside=number > 0)
            time.sleep(POLL_S if number else 0)
            reached = self._started(beside=True) if number == signal.SIGINT else {self}
            for one in reached if number and self.witness.poll() is None else ():
                with contextlib.suppress(psutil.Error):
                    one.send_signal(number)
            until = time.monotonic() + within_s
            while any(map(_is_there, awaited)) and time.monotonic() < until:
                time.sleep(0.05)
                awaited |= self._started(beside=number > 0)
            started |= awaited
        for one in {self, *started}:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self.wait()
        end_marked(*self.mark)

    def _started(self, beside: bool = False) -> set[psutil.Process]:
        """The command and what it has started, as far as it runs. beside: itself, and what is of
        this process's group. One that gave itself a title has lost its environment: its parent
        tells of it. Once the command has been waited for, its number may be a stranger's."""
        found, mine = {*marked(*self.mark, beside)}, []
        with contextlib.suppress(psutil.Error):
            own = [psutil.Process(self.pid)] if self.poll() is None else []
            mine = own + [child for one in own for child in one.children(recursive=True)]
        for one in mine:
            with contextlib.suppress(OSError):
                if one in own or not beside or os.getpgid(one.pid) == os.getpgrp():
                    found.add(one)
        return found


# ------------------------------------------------------------------------------ orphans

GONE_WITHIN_S = 5.0
"""How long processes that were killed may take to be gone."""


def end_marked(variable: str, mark: str) -> list[int]:
    """End every other process that has `mark` in its environment under this name, and return when
    all are gone, with the memory and the GPU they held; their numbers.

    A process whose parent died has none that leads to it any more, and may be in a session of its
    own, but it keeps its environment.
    """
    ended: dict[int, psutil.Process] = {}
    end = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < end:
        new = [process for process in marked(variable, mark) if process.pid not in ended]
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.kill()
        ended |= {process.pid: process for process in new}
        if not new and not any(map(_is_there, ended.values())):
            break
        time.sleep(0.02)
    return list(ended)


def marked(variable: str, mark: str, beside: bool = False) -> list[psutil.Process]:
    """Every other process that runs and has `mark` in its environment under this name. Other
    people's processes and those that have ended don't say. beside: only of this process's group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            here = not beside or os.getpgid(process.pid) == os.getpgrp()
            if here and process.pid != os.getpid() and process.environ().get(variable) == mark:
                found.append(process)
    return found


def _is_there(process: psutil.Process) -> bool:
    """Whether it hasn't ended; nobody may have asked yet how one that has did."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
