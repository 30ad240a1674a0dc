"""One lab in a kernel of its own, from its first cell to its last, and what became of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labutils.results import records
from labutils.tools.run.arguments import Lab, short
from labutils.training.child_process import end_marked, python_path

GRACE_S = 15.0
"""How long a lab that is stopped may take to remove its temporary files, as unsloth's weights."""
MARK = "LABUTILS_KERNEL"
"""A kernel and all that it starts have its mark in their environment under this name."""

MOSTLY = {
    "SIGKILL": "was killed (SIGKILL). Most often the system ran out of memory: close other "
    "programs, choose a smaller --scale, or give the container more memory. `dmesg` says if so.",
    "SIGBUS": "ended with a bus error (SIGBUS). Most often /dev/shm is too small for DataLoader "
    "workers: start the container with --shm-size=8g. `labutils doctor` says its size.",
}
"""Signal -> why a kernel mostly ends with it, and what to do."""


@dataclass(frozen=True)
class Outcome:
    """`status`: "done", "done before", "failed", "died", "timed out", "stopped" or "not run"."""

    lab: Lab
    status: str
    seconds: float = 0.0
    message: str = ""


class Kernel:
    """The process of one lab: this interpreter, with `variables` in its environment.

    `ended_because`: why it was ended, "" where nobody ended it.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.ended_because = ""
        self._mark = uuid.uuid4().hex
        self._variables = {
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are inline
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "PYTHONPATH": python_path(),
            "TQDM_DISABLE": "1",
            MARK: self._mark,
            **variables,
        }
        self._process: Any = None
        self._late: threading.Timer | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._sockets = tempfile.TemporaryDirectory(prefix="labutils-")

    def stop(self, because: str) -> None:
        """Interrupt the cell that runs, and end the process soon if that does not."""
        if self._process is None:
            return self.end(because)
        self.ended_because = self.ended_because or because
        self._process.send_signal(signal.SIGINT)
        self._late = threading.Timer(GRACE_S, self.end, [because])
        self._late.daemon = True
        self._late.start()

    def end(self, because: str) -> None:
        """End the process, then all that it started. One that is about to start ends at once."""
        if self.exit_code() is None:
            self.ended_because = self.ended_because or because
        if self._process is not None:
            self._process.kill()
            end_marked(MARK, self._mark)

    def close(self) -> None:
        if self._late:
            self._late.cancel()
        self.end("over")
        self._printed.close()
        self._sockets.cleanup()

    def exit_code(self) -> int | None:
        """How the process ended (negative: by that signal); None where it runs or never did."""
        return None if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """The last lines that the process wrote outside of cells: crashes of native code."""
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and "[IPKernelApp]" not in line]
        return "".join(f"\n    {line}" for line in lines[-6:])

    def manager_class(self) -> type:
        """A kernel manager for nbclient that starts this kernel, whatever kernels are installed."""
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager
        from traitlets import default

        kernel = self

        class Manager(AsyncKernelManager):
            shutdown_wait_time = 2 * GRACE_S  # after half of it comes SIGTERM, and files stay

            @default("kernel_spec_manager")
            def _only_this_interpreter(self) -> KernelSpecManager:
                return KernelSpecManager(kernel_dirs=[])

            # Ports are chosen before a kernel binds them: kernels side by side take each other's.
            # Files of its own can't be taken; a path to a socket has at most 107 bytes.
            @default("transport")
            def _files_instead_of_ports(self) -> str:
                return "ipc" if len(os.fsencode(kernel._sockets.name)) < 90 else "tcp"

            @default("ip")
            def _where_the_files_are(self) -> str:
                own = os.path.join(kernel._sockets.name, "kernel")
                return own if self.transport == "ipc" else "127.0.0.1"

            async def _async_launch_kernel(self, kernel_cmd: list[str], **launch: Any) -> None:
                launch["env"] = launch.get("env", dict(os.environ)) | kernel._variables
                launch["stdout"] = launch["stderr"] = kernel._printed
                await super()._async_launch_kernel(kernel_cmd, **launch)
                kernel._process = self.provisioner.process
                if kernel.ended_because:  # meanwhile
                    kernel.end("stopped")

        return Manager


def run_lab(
    lab: Lab, values: Mapping[str, Any], output: Path, limit_s: float, kernel: Kernel
) -> Outcome:
    """Run one lab in `kernel`, whatever comes of it. Its executed notebook is written beside
    `output` as it runs, and replaces an earlier one at the end."""
    part = part_of(output)
    start = time.monotonic()
    clock = threading.Timer(limit_s, kernel.stop, args=["timed out"])
    clock.daemon = True
    with contextlib.closing(kernel):
        clock.start()
        try:
            part.write_bytes(lab.path.read_bytes())
            _execute(lab, values, part, kernel)
            where, is_whole = _last_cell(part)
            status, message = ("done", "") if is_whole else ("failed", f"ended in {where}")
        except Exception as error:
            status, message = _failure(error, kernel, limit_s, part)
        finally:
            clock.cancel()
    seconds = time.monotonic() - start
    stamp = {"status": status, "seconds": round(seconds, 1), "parameters": dict(values)}
    try:
        _put(part, output, stamp | {"code": lab.code})
        kept = f"\n  As far as it came: {short(output)}"
    except Exception as error:  # the disk, mostly: the earlier notebook stays as it was
        status, kept = "failed", ""
        message = message or f"its executed notebook can't be kept: {error}"
    message = records.plain(message)
    return Outcome(lab, status, seconds, f"Lab {lab.number} {message}{kept}" if message else "")


def part_of(output: Path) -> Path:
    """Where a notebook is written while it runs. One that is there says that a run was cut off."""
    return output.with_name(f".{output.stem}.part.ipynb")


def _execute(lab: Lab, values: Mapping[str, Any], part: Path, kernel: Kernel) -> None:
    """Raises what papermill raises. Its own engine writes the notebook at each cell's start and
    end, which takes longer than most cells. Here that is done once a second at most, and at the
    end: what a SIGKILL of this process leaves may lack the last cells."""
    import papermill
    from papermill.engines import NBClientEngine, papermill_engines

    class SavesSeldom(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, notebook: Any, *args: Any, **options: Any) -> None:
            save = notebook.save
            notebook.save = lambda: (notebook.now() - notebook.last_save_time).seconds < 1 or save()
            try:
                super().execute_managed_notebook(notebook, *args, **options)
            finally:
                del notebook.save  # the class's own is left, and papermill calls it once more

    papermill_engines.register("seldom", SavesSeldom)
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # `_failure` says it in full
    bar = {"desc": lab.title, "leave": False, "unit": " cells"}
    papermill.execute_notebook(
        str(lab.path),
        str(part),
        parameters=dict(values),
        engine_name="seldom",
        kernel_name="python3",
        kernel_manager_class=kernel.manager_class(),
        language="python",
        progress_bar=bar if sys.stderr.isatty() else False,
        cwd=str(lab.path.parent),
    )


def _failure(error: Exception, kernel: Kernel, limit_s: float, part: Path) -> tuple[str, str]:
    """(status, message without the lab's name) of a lab that did not run to its end."""
    unexpected = f"could not be run: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and not kernel.ended_because:
        cure = f"`df -h {short(part.parent)} /tmp` says if a disk is full. Another: --results DIR"
        return "failed", f"{unexpected}. {cure}"
    where = _last_cell(part)[0]
    if kernel.ended_because == "timed out":
        return "timed out", (
            f"was ended in {where} after {limit_s:g} s, its limit. A larger limit: --timeout "
            f"{2 * limit_s:g}; a quicker run: a smaller --scale."
        )
    if kernel.ended_because:
        return "stopped", f"was stopped in {where}."
    if hasattr(error, "ename"):  # papermill's own: a cell raised
        lines = "\n".join(error.traceback).splitlines()
        traceback = "".join(f"\n    {line}" for line in lines[-6:])
        return "failed", f"failed in {where}: {error.ename}: {error.evalue}{traceback}"
    code = kernel.exit_code()
    if code is None:
        return "failed", unexpected
    return "died", f"died in {where}: its kernel {_cause_of_death(code)}{kernel.last_words()}"


def _cause_of_death(code: int) -> str:
    """What the exit code of a dead kernel most likely means, and what to do."""
    if code >= 0:
        return f"ended by itself with exit code {code}: something called os._exit."
    name = signal.Signals(-code).name
    crash = f"ended with {name}: native code crashed. `labutils doctor` tries the libraries."
    return MOSTLY.get(name, crash)


def _last_cell(executed: Path) -> tuple[str, bool]:
    """(the code cell that began last, in words; whether all code cells ran)."""
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells
    cells = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    begun = [cell for cell in cells if cell.metadata.get("papermill", {}).get("start_time")]
    where = "its first cell"
    if begun:
        where = f"the cell that begins with `{begun[-1].source.strip().splitlines()[0]}`"
    # Papermill calls cells completed that a dead kernel never ran; those have no number.
    return where, all(cell.execution_count is not None for cell in cells)


def _put(part: Path, output: Path, stamp: Mapping[str, Any]) -> None:
    """Let the executed notebook take its place, with a stamp that says what became of its run, and
    without this machine's folders."""
    import nbformat

    notebook = nbformat.read(part, as_version=4)
    for name in ("input_path", "output_path"):
        notebook.metadata.get("papermill", {}).pop(name, None)
    notebook.metadata["labutils"] = dict(stamp)
    nbformat.write(notebook, part)
    os.replace(part, output)
