"""One lab, from its first cell to its last, and what became of it."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labutils.data.files import whole_file
from labutils.results import records
from labutils.tools.run.asking import Lab, Options, indented, short
from labutils.tools.run.kernels import Kernel, Kernels
from labutils.tools.run.planning import done_records

HEADING = re.compile(r"^#{1,3} (.+?)\s*$", re.M)


@dataclass(frozen=True)
class Outcome:
    """What became of one lab: `status` "done", "done before", "failed", "died", "timed out",
    "stopped" or "not run".
    """

    lab: Lab
    status: str
    seconds: float = 0.0
    message: str = ""


Told = Callable[[int, str], None]
"""Called when a lab's cell begins: with the place among the lab's cells of code, from 1 on, and its
section.
"""


def run_lab(
    lab: Lab,
    values: Mapping[str, Any],
    folder: Path,
    options: Options,
    kernels: Kernels,
    variables: Mapping[str, str],
    told: Told,
) -> Outcome:
    """Run one lab, whatever comes of it; its kernel finds `variables` in its environment."""
    output = folder / "notebooks" / lab.path.name
    before = len(records.read_records(folder))
    start = time.monotonic()
    with kernels.one(Kernel(folder, lab.path.parent, variables)) as kernel:
        try:
            _execute(lab, values, output, kernels, kernel, options, told)
            status, message = "done", ""
            if not done_records(records.read_records(folder)[before:], lab):
                status = "failed"
                message = f"Lab {lab.number} ended before its last cell: nothing after its last run marked it as done."
        except Exception as error:
            status, message = _failure(lab, error, kernels, kernel, options, _last_cell(output))
    seconds = time.monotonic() - start
    _stamp(output, status, seconds)
    if message and output.is_file():
        message += f"\n  As far as it came: {short(output)}"
    return Outcome(lab, status, seconds, message)


def _execute(
    lab: Lab,
    values: Mapping[str, Any],
    output: Path,
    kernels: Kernels,
    kernel: Kernel,
    options: Options,
    told: Told,
) -> None:
    """Run the notebook into `output`, written cell by cell. Raises what papermill raises."""
    import papermill

    logging.getLogger("papermill").setLevel(
        logging.CRITICAL
    )  # what it would log, `_failure` says in full
    with _Watch(kernel, options, told) as watch:
        papermill.execute_notebook(
            str(lab.path),
            str(output),
            parameters=dict(values),
            kernel_name="python3",
            kernel_manager_class=kernel.manager_class(kernels),
            language="python",
            progress_bar=False,
            on_cell_start=watch.began,
            on_cell_executed=watch.ended,
        )


class _Watch:
    """Counts the cells as they begin, and ends the kernel where the lab or one of its cells takes
    too long.
    """

    def __init__(self, kernel: Kernel, options: Options, told: Told) -> None:
        self._kernel, self._told = kernel, told
        self._cell_timeout = options.cell_timeout
        self._lab = self._clock(options.timeout, "timed out")
        self._cell: threading.Timer | None = None
        self._count, self._section = 0, ""

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._lab.cancel()
        self.ended()

    def began(self, cell: Any, **_: object) -> None:
        if cell.cell_type == "markdown":
            self._section = _heading(cell.source) or self._section
        elif cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get(
            "tags", []
        ):
            self._count += 1
            self._told(self._count, self._section)
            if self._cell_timeout:
                self._cell = self._clock(self._cell_timeout, "cell timed out")

    def ended(self, **_: object) -> None:
        if self._cell is not None:
            self._cell.cancel()

    def _clock(self, seconds: float, because: str) -> threading.Timer:
        clock = threading.Timer(seconds, self._kernel.kill, args=[because])
        clock.daemon = True
        clock.start()
        return clock


def _heading(markdown: str) -> str:
    """The last heading of a cell, as plain words; "" where it has none."""
    found = HEADING.findall(markdown)
    return re.sub(r"[*`$]", "", found[-1]) if found else ""


def _failure(
    lab: Lab, error: Exception, kernels: Kernels, kernel: Kernel, options: Options, cell: str
) -> tuple[str, str]:
    """(status, message) for a lab that did not run to its end; `cell` says where it was."""
    if kernels.stopped_by:
        name = signal.Signals(kernels.stopped_by).name
        return "stopped", f"Lab {lab.number} was stopped by {name} in {cell}; its kernel is ended."
    if kernel.killed_because == "timed out":
        return "timed out", (
            f"Lab {lab.number} was ended after {options.timeout:g} s, its limit, in {cell}. "
            f"A larger limit: --timeout {2 * options.timeout:g}; a quicker run: a smaller --scale."
        )
    if kernel.killed_because == "cell timed out":
        return "timed out", (
            f"Lab {lab.number} was ended after {options.cell_timeout:g} s, the limit of a cell, in "
            f"{cell}. "
            f"A larger limit: --cell-timeout {2 * options.cell_timeout:g}; a quicker run: a "
            "smaller --scale."
        )
    died_with = kernel.exit_code()
    if died_with is not None and not hasattr(error, "ename"):
        message = f"Lab {lab.number} died in {cell}: its kernel {_cause_of_death(died_with)}"
        return "died", indented(message, kernel.last_words())
    if hasattr(error, "ename"):  # papermill's own: a cell raised
        return "failed", _cell_failure(lab, error)
    return "failed", f"Lab {lab.number} could not be run: {type(error).__name__}: {error}"


def _last_cell(output: Path) -> str:
    """The cell that ran last, by its first line and section: an unfinished cell has no number yet."""
    notebook = _read_output(output)
    if notebook is None:
        return "no cell yet"
    where, section = "no cell yet", ""
    for cell in notebook.cells:
        if cell.metadata.get("papermill", {}).get("start_time"):
            section = (_heading(cell.source) if cell.cell_type == "markdown" else "") or section
            if cell.cell_type == "code" and cell.source.strip():
                where = f"the cell that begins with `{cell.source.strip().splitlines()[0]}`"
                where += f" (section {section})" * bool(section)
    return where


def _read_output(output: Path) -> Any:
    """The executed notebook, or None where there is none that can be read: one cut off while it was
    written, mostly.
    """
    import nbformat

    try:
        return nbformat.read(output, as_version=4)
    except Exception:  # whatever json, nbformat or the file system raise
        return None


def _cell_failure(lab: Lab, error: Any) -> str:
    """The cell, the error, and the last lines of what Python printed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    last = [line for line in text.splitlines() if line.strip(" -")][-6:]
    where = f"cell [{error.exec_count}] of {short(lab.path)}"
    return indented(f"Lab {lab.number} failed in {where}: {error.ename}: {error.evalue}", last)


def _cause_of_death(code: int) -> str:
    """What the exit code of a dead kernel most likely means, and what to do."""
    if code == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Most often that is the system running out of memory: close "
            "other programs, choose a "
            "smaller --scale, or give the container more memory. `dmesg` says if it was."
        )
    if code == -signal.SIGBUS:
        return (
            "ended with a bus error (SIGBUS). Most often /dev/shm is too small for the DataLoader "
            "workers: start the "
            "container with --shm-size=8g. `labutils doctor` says how much there is."
        )
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended with {name}: native code crashed. `labutils doctor` checks that the libraries fit together."
    return (
        f"ended by itself with exit code {code}: something called os._exit, or a library gave up."
    )


def _stamp(output: Path, status: str, seconds: float) -> None:
    """Write into an executed notebook what became of its run, and take this machine's folders out
    of its metadata: it is kept, shown and compared elsewhere."""
    import nbformat

    notebook = _read_output(output)
    if notebook is None:
        return
    record = notebook.metadata.get("papermill", {})
    for name in ("input_path", "output_path"):
        if record.get(name):
            record[name] = Path(record[name]).name
    notebook.metadata["labutils"] = {"status": status, "seconds": round(seconds, 1)}
    # A full disk leaves the notebook as it was: without the stamp, but whole.
    with contextlib.suppress(OSError), whole_file(output) as part:
        nbformat.write(notebook, part)
