"""The processes that labs run in: of this very interpreter, and ended, if they must be, with all
that they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from labutils.results import records
from labutils.training.processes import end_marked

MARK = "LABUTILS_KERNEL"
"""The name under which a kernel, and every process that comes of it, has the kernel's mark in its
environment.
"""


class Kernels:
    """The kernels that run now.

    As a context it takes SIGINT and SIGTERM: the first ends all kernels and lets none start any
    more, the second interrupts whatever goes on. Either way the context ends in order, no kernel
    outlives it, and `stopped_by` is the signal's number.
    """

    def __init__(self) -> None:
        self.stopped_by = 0
        self._running: list[Kernel] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Kernels:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._stop)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is not None:
            self.stopped_by = self.stopped_by or signal.SIGINT  # no kernel may start any more
        self._end_all("over")
        return kind is KeyboardInterrupt

    def _stop(self, number: int, _frame: object) -> None:
        again, self.stopped_by = self.stopped_by, number
        self._end_all("stopped")
        if again:
            raise KeyboardInterrupt

    def _end_all(self, because: str) -> None:
        for kernel in list(self._running):
            kernel.kill(because)

    @contextlib.contextmanager
    def one(self, kernel: Kernel) -> Any:
        """`kernel` among those that are ended with all others."""
        self._running.append(kernel)
        try:
            with kernel:
                yield kernel
        finally:
            self._running.remove(kernel)


class Kernel:
    """One lab's process: it keeps results in `folder`, starts in `cwd`, and finds `variables` in
    its environment.

    `killed_because` is why it was ended, "" where nobody ended it.
    """

    def __init__(self, folder: Path, cwd: Path, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.cwd = cwd
        self.variables = dict(variables or {})
        self.killed_because = ""
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill("over")
        self._said.close()

    def kill(self, because: str) -> None:
        """End the process, so that it starts nothing more, and then all that it started; where it
        ended by itself, what it left behind. One that is about to start is told, and ends at once.
        """
        if self.exit_code() is None:
            self.killed_because = self.killed_because or because
        if self._process is not None:  # asked after that was noted: it is told, or seen here
            self._process.kill()
            end_marked(MARK, self._mark)

    def exit_code(self) -> int | None:
        """How the process ended (negative: by that signal); None where it still runs or never did."""
        return None if self._process is None else self._process.poll()

    def manager_class(self, kernels: Kernels) -> type:
        """A kernel manager that starts `sys.executable`, whatever kernels are installed, and tells
        its process.

        It starts none where `kernels` were stopped, or this one was.
        """
        from ipykernel.kernelspec import get_kernel_dict
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        mine = self
        spec = get_kernel_dict() | {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        }

        class Manager(AsyncKernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                return KernelSpec(name="python3", **spec)

            async def _async_launch_kernel(self, kernel_cmd: list[str], **launch: Any) -> None:
                if kernels.stopped_by or mine.killed_because:
                    raise RuntimeError("Stopped before its kernel was started.")
                launch["env"] = launch.get("env", dict(os.environ)) | mine.environment()
                launch["stdout"] = launch["stderr"] = mine._said
                launch["cwd"] = str(
                    mine.cwd
                )  # papermill's own way would change this process's folder, under all labs
                await super()._async_launch_kernel(kernel_cmd, **launch)
                mine._process = self.provisioner.process
                if kernels.stopped_by or mine.killed_because:  # meanwhile
                    mine.kill("stopped")

        return Manager

    def last_words(self, lines: int = 6) -> list[str]:
        """The last of what the process wrote outside of any cell: crashes of native code, mostly."""
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and "[IPKernelApp]" not in line][
            -lines:
        ]

    def environment(self) -> dict[str, str]:
        """What a lab's kernel is told: where results go, where this labutils is when it is not
        installed, and that nobody watches progress bars."""
        path = os.pathsep.join(
            filter(None, [str(records.REPOSITORY), os.environ.get("PYTHONPATH")])
        )
        quiet = {"TQDM_DISABLE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        mine = {"LABUTILS_RESULTS": str(self.folder), "PYTHONPATH": path, MARK: self._mark}
        return mine | quiet | self.variables
