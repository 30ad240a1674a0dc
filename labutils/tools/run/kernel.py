"""One lab in a kernel of its own, from its first cell to its last, and what became of it."""

from __future__ import annotations

import logging
import os
import re
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
from labutils.tools.run.validation import Lab, Options, short
from labutils.training.child_process import end_marked

MARK = "LABUTILS_KERNEL"
"""A kernel and all that it starts have its mark in their environment under this name."""


@dataclass(frozen=True)
class Outcome:
    """`status`: "done", "done before", "failed", "died", "timed out", "stopped" or "not run"."""

    lab: Lab
    status: str
    seconds: float = 0.0
    message: str = ""


class Kernel:
    """The process of one lab: this interpreter, in the lab's folder, with `variables` in its
    environment. As a context it ends with all that it started.

    `ended_because`: why it was ended, "" where nobody ended it.
    """

    def __init__(self, cwd: Path, variables: Mapping[str, str]) -> None:
        self.cwd, self.variables, self.ended_because = cwd, variables, ""
        self._mark = uuid.uuid4().hex
        self._process: Any = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.end("over")
        self._said.close()

    def end(self, because: str) -> None:
        """End the process, then all that it started. One that is about to start ends at once."""
        if self.exit_code() is None:
            self.ended_because = self.ended_because or because
        if self._process is not None:
            self._process.kill()
            end_marked(MARK, self._mark)

    def exit_code(self) -> int | None:
        """How the process ended (negative: by that signal); None where it runs or never did."""
        return None if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """The last lines that the process wrote outside of cells: crashes of native code."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and "[IPKernelApp]" not in line]
        return "".join(f"\n    {line}" for line in lines[-6:])

    def environment(self) -> dict[str, str]:
        """Figures are inline, nobody watches progress bars, and labutils need not be installed."""
        path = [str(records.REPOSITORY), os.environ.get("PYTHONPATH")]
        mine = {
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TQDM_DISABLE": "1",
            MARK: self._mark,
        }
        return mine | dict(self.variables)

    def manager_class(self) -> type:
        """A kernel manager that starts `sys.executable`, whatever kernels are installed."""
        from ipykernel.kernelspec import get_kernel_dict
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        kernel = self
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

        class Manager(AsyncKernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                return KernelSpec(name="python3", **get_kernel_dict() | {"argv": argv})

            async def _async_launch_kernel(self, kernel_cmd: list[str], **launch: Any) -> None:
                if kernel.ended_because:
                    raise RuntimeError("ended before its kernel was started")
                launch["env"] = launch.get("env", dict(os.environ)) | kernel.environment()
                launch["stdout"] = launch["stderr"] = kernel._said
                launch["cwd"] = str(kernel.cwd)
                await super()._async_launch_kernel(kernel_cmd, **launch)
                kernel._process = self.provisioner.process
                if kernel.ended_because:  # meanwhile
                    kernel.end("stopped")

        return Manager


def run_lab(
    lab: Lab, values: Mapping[str, Any], folder: Path, options: Options, kernel: Kernel
) -> Outcome:
    """Run one lab in `kernel`, whatever comes of it. Its executed notebook is written beside, cell
    by cell, and replaces an earlier one at the end."""
    output = folder / "notebooks" / lab.path.name
    part = part_of(output)
    start = time.monotonic()
    clock = threading.Timer(options.timeout, kernel.end, args=["timed out"])
    clock.daemon = True
    with kernel:
        clock.start()
        try:
            part.write_bytes(lab.path.read_bytes())
            _execute(lab, values, part, kernel, options)
            where, whole = _last_cell(part)
            status, message = ("done", "") if whole else ("failed", f"ended in {where}")
        except Exception as error:
            status, message = _failure(error, kernel, options, part)
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
    return Outcome(lab, status, seconds, f"Lab {lab.number} {message}{kept}" if message else "")


def part_of(output: Path) -> Path:
    """Where a notebook is written while it runs. One that is there says that a run was cut off."""
    return output.with_name(f".{output.stem}.part.ipynb")


def _execute(
    lab: Lab, values: Mapping[str, Any], part: Path, kernel: Kernel, options: Options
) -> None:
    """Raises what papermill raises."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # `_failure` says it in full
    bar = {"desc": lab.title, "leave": False, "unit": " cells"}
    papermill.execute_notebook(
        str(lab.path),
        str(part),
        parameters=dict(values),
        kernel_name="python3",
        kernel_manager_class=kernel.manager_class(),
        language="python",
        progress_bar=bar if sys.stderr.isatty() and options.jobs == 1 else False,
    )


def _failure(error: Exception, kernel: Kernel, options: Options, part: Path) -> tuple[str, str]:
    """(status, message without the lab's name) of a lab that did not run to its end."""
    if isinstance(error, OSError) and not kernel.ended_because:
        return "failed", f"could not be run: {type(error).__name__}: {error}"
    where = _last_cell(part)[0]
    if kernel.ended_because == "timed out":
        return "timed out", (
            f"was ended in {where} after {options.timeout:g} s, its limit. A larger limit: "
            f"--timeout {2 * options.timeout:g}; a quicker run: a smaller --scale."
        )
    if kernel.ended_because:
        return "stopped", f"was stopped in {where}."
    if hasattr(error, "ename"):  # papermill's own: a cell raised
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        lines = [line for line in text.splitlines() if line.strip(" -")][-6:]
        traceback = "".join(f"\n    {line}" for line in lines)
        return "failed", f"failed in {where}: {error.ename}: {error.evalue}{traceback}"
    code = kernel.exit_code()
    if code is not None:
        return "died", f"died in {where}: its kernel {_cause_of_death(code)}{kernel.last_words()}"
    return "failed", f"could not be run: {type(error).__name__}: {error}"


def _cause_of_death(code: int) -> str:
    """What the exit code of a dead kernel most likely means, and what to do."""
    if code == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Most often the system ran out of memory: close other programs, "
            "choose a smaller --scale, or give the container more memory. `dmesg` says if so."
        )
    if code == -signal.SIGBUS:
        return (
            "ended with a bus error (SIGBUS). Most often /dev/shm is too small for the DataLoader "
            "workers: start the container with --shm-size=8g. `labutils doctor` says its size."
        )
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended with {name}: native code crashed. `labutils doctor` tries the libraries."
    return f"ended by itself with exit code {code}: something called os._exit."


def _last_cell(executed: Path) -> tuple[str, bool]:
    """(the cell of code that began last, in words; whether it and all others ran to their end)."""
    import nbformat

    words, section, whole = "its first cell", "", True
    for cell in nbformat.read(executed, as_version=4).cells:
        if cell.cell_type == "markdown":
            section = (re.findall(r"^#+ (.+)$", cell.source, re.M) or [section])[-1]
            continue
        stamp = cell.metadata.get("papermill", {})
        if cell.source.strip() and stamp.get("start_time"):
            words = f"the cell that begins with `{cell.source.strip().splitlines()[0]}`"
            words += f" (section {section})" * bool(section)
        # Papermill calls cells completed that a dead kernel never ran; those have no number.
        ran = stamp.get("exception") is False and cell.execution_count is not None
        whole = whole and (ran or not cell.source.strip())
    return words, whole


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
