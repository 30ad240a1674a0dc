"""Labs run in batches: each notebook by papermill in a kernel of this interpreter, and whatever happens said plainly.

    code = run(["00", "03"], Options(scale="tiny"))

Everything a person can get wrong is checked before anything runs (`UsageError`). After that a lab may raise, die, hang
or be stopped with Ctrl-C: the others still run (after Ctrl-C they don't), what was measured is kept, and the executed
notebook shows how far it came. Labs that are done in the results folder are not run again.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from labutils import hardware, parameters, results

NOTEBOOKS = results.REPOSITORY / "notebooks"
OWN_OPTION = {"scale": "--scale", "weights": "--weights", "data": "--data", "results_dir": "--results"}

SUMMING_UP = ("11",)
"""Labs that read what the others keep: they are done only until another lab keeps something more."""

ALL_RAN, A_LAB_FAILED, WRONG_USAGE = 0, 1, 2
STOPPED = 128  # plus the signal's number, as shells have it: 130 after Ctrl-C


class UsageError(Exception):
    """The call can't be carried out as given; the message says what was found and what to type."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: its type's name, its default and its comment."""

    name: str
    kind: str
    default: Any
    help: str


@dataclass(frozen=True)
class Lab:
    """A notebook that can be run: `number` ("03"; the file's stem where it has none), `path`, `parameters` by name."""

    number: str
    path: Path
    parameters: dict[str, Parameter]

    @property
    def title(self) -> str:
        return self.path.stem.replace("_", " ")


@dataclass(frozen=True)
class Options:
    """How labs are to be run. `given`: words of the command line for the labs' own parameters; `timeout`: s per lab."""

    scale: str = "auto"
    weights: str = "random"
    data: str = "generated"
    results: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    timeout: float = 1800.0


@dataclass(frozen=True)
class Outcome:
    """What became of one lab: `status` "done", "done before", "failed", "died", "timed out", "stopped" or "not run"."""

    lab: Lab
    status: str
    seconds: float = 0.0
    message: str = ""


def run(names: Sequence[str], options: Options, say: Callable[[str], None] = print) -> int:
    """Run the labs called `names` (all of them where there is none) and say how it went.

    Returns 0 where all ran, 1 where a lab failed, 128 + the signal's number where it was stopped. Raises `UsageError`
    before anything has run where the labs, parameters, scale or results folder are not usable.
    """
    _check_current_folder()
    labs = find(names)
    scale, note = _scale(options.scale)
    values = {lab.number: _values(lab, options, scale) for lab in labs}
    folder = _results_folder(options.results, labs)
    say(f"Scale {scale}{note}. Results go to {_short(folder)}.")

    outcomes: list[Outcome] = []
    with Kernels(folder) as kernels:
        for place, lab in enumerate(labs, start=1):
            outcome = _run_one(lab, values[lab.number], folder, options, kernels, say, f"[{place}/{len(labs)}]")
            outcomes.append(outcome)
            if outcome.message:
                say(outcome.message)
            if kernels.stopped_by:
                break
    outcomes += [Outcome(lab, "not run") for lab in labs[len(outcomes) :]]
    say(_summary(outcomes, folder))
    if kernels.stopped_by:
        say(f"Stopped. What was measured is kept. To go on: {_same_again(names, options, folder)}")
        return STOPPED + kernels.stopped_by
    return ALL_RAN if all(outcome.status in ("done", "done before") for outcome in outcomes) else A_LAB_FAILED


# What is asked for


def _check_current_folder() -> None:
    """Raises `UsageError` where it was deleted: papermill can neither read nor run a lab from there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "The current folder was deleted, so no lab can be run from it. Nothing was run. "
            f"Go to a folder that exists: cd {shlex.quote(str(results.REPOSITORY))}"
        ) from None


def find(names: Sequence[str] = (), folder: Path = NOTEBOOKS) -> list[Lab]:
    """The labs called `names`: "03", "3", the notebook's name, or a path to a notebook; all of `folder` where none is.

    Raises `UsageError` naming the labs there are.
    """
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not names:
        if not known:
            raise UsageError(f"There are no labs in {folder}. Run this from a checkout of the course.")
        return [_open(path) for path in known]
    paths = [_path(name, known) for name in names]
    return [_open(path) for path in dict.fromkeys(paths)]


def _path(name: str, known: Sequence[Path]) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    for path in known:
        if name in (path.stem, path.name) or (name.isdecimal() and name.zfill(2) == path.stem[:2]):
            return path
    labs = [f"{path.stem[:2]}  {path.stem[3:].replace('_', ' ')}" for path in known]
    raise UsageError(_indented(f"There is no lab {name!r}. A lab is called by number, name or path:", labs))


def _open(path: Path) -> Lab:
    """The lab of a notebook. Raises `UsageError` where the file is no notebook or its parameters cell can't be read."""
    import papermill

    try:
        cells = papermill.inspect_notebook(str(path))
    except Exception as error:  # papermill passes on whatever json, nbformat or the file system raise
        raise UsageError(f"{_short(path)} can't be read as a notebook: {error}") from None
    number = path.stem[:2] if re.match(r"\d\d_", path.stem) else path.stem
    return Lab(number, path, {name: _parameter(path, **cell) for name, cell in cells.items()})


def _parameter(path: Path, name: str, inferred_type_name: str, default: str, help: str) -> Parameter:
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        raise UsageError(f"{_short(path)}: the default of {name} must be a plain value, but it is {default}.") from None
    kind = inferred_type_name if inferred_type_name in parameters.KINDS else type(value).__name__
    if kind not in parameters.KINDS:
        raise UsageError(f"{_short(path)}: {name} is a {kind}; a parameter is one of: {', '.join(parameters.KINDS)}.")
    return Parameter(name, kind, value, help)


def _scale(asked: str) -> tuple[str, str]:
    """(the scale to run at, what to say about it). Raises `UsageError` for a scale that does not exist."""
    try:
        parameters.check("scale", asked, "str")
    except ValueError as error:
        raise UsageError(f"{error} Type --scale with one of them.") from None
    fitting = hardware.scale_for(hardware.machine())
    if asked == "auto":
        return fitting, " (the largest that fits this machine)"
    if parameters.SCALES.index(asked) > parameters.SCALES.index(fitting):
        return asked, f" (this machine fits {fitting}: expect long waits or failures)"
    return asked, ""


def _values(lab: Lab, options: Options, scale: str) -> dict[str, Any]:
    """Every parameter's value for `lab`, results_dir left out. Raises `UsageError` for what the lab does not take."""
    for name in options.given:
        if name in OWN_OPTION:
            raise UsageError(f"-p {name} is set by an option of its own: {OWN_OPTION[name]}.")
        if name not in lab.parameters:
            raise UsageError(f"Lab {lab.number} has no parameter {name!r}. {_takes(lab)}")
    values = {name: parameter.default for name, parameter in lab.parameters.items() if name != "results_dir"}
    common = {"scale": scale, "weights": options.weights, "data": options.data}
    try:
        values |= {name: parameters.check(name, word, "str") for name, word in common.items() if name in values}
        values |= {name: parameters.read(name, word, lab.parameters[name].kind) for name, word in options.given.items()}
    except ValueError as error:
        raise UsageError(f"Lab {lab.number}: {error}") from None
    return values


def _takes(lab: Lab) -> str:
    """The lab's own parameters, one a line, or that it has none."""
    own = [parameter for parameter in lab.parameters.values() if parameter.name not in OWN_OPTION]
    if not own:
        return "It has none of its own: use --scale, --weights, --data and --results."
    return "It takes:" + "".join(f"\n  -p {p.name} {p.default}  ({p.kind}) {p.help}".rstrip() for p in own)


def _results_folder(asked: Path | None, labs: Sequence[Lab]) -> Path:
    """The folder for results.jsonl and notebooks/, made and tried.

    Raises `UsageError` where it can't be written, or where the executed notebooks would replace the labs themselves.
    """
    given = asked or os.environ.get("LABUTILS_RESULTS")
    default = results.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder = Path(os.path.abspath(results.named(given or default)))
    except ValueError as error:
        raise UsageError(f"{error}") from None
    executed = folder / "notebooks"
    folders = [(executed, NOTEBOOKS), *((executed, lab.path.parent) for lab in labs)]
    if any(_is_same(*pair) for pair in [*folders, *((executed / lab.path.name, lab.path) for lab in labs)]):
        raise UsageError(
            f"Results in {folder} would replace the labs in {executed} by their executed copies. Nothing was run. "
            "Choose another folder, as in: --results results/NAME"
        )
    try:
        results.Results(folder)
        (folder / "notebooks").mkdir(exist_ok=True)
        probe = folder / "notebooks" / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"Results can't be kept in {folder}: {_why_unwritable(folder, error)}. Nothing was run. "
            "Choose a folder you may write to with --results DIR."
        ) from None
    return folder


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are there and are one folder or file, by whatever links."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _why_unwritable(folder: Path, error: OSError) -> str:
    for path in (folder / "notebooks", folder, *folder.parents):  # Path.exists raises OSError for a name too long
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link that leads nowhere"
        if os.path.exists(path) and not os.path.isdir(path):
            return f"{path} is a file, not a folder"
    if isinstance(error, FileNotFoundError):
        return "no folder can be made there"
    return (error.strerror or str(error)).lower()


# Running one lab


def _run_one(
    lab: Lab,
    values: dict[str, Any],
    folder: Path,
    options: Options,
    kernels: Kernels,
    say: Callable[[str], None],
    place: str,
) -> Outcome:
    """Run one lab unless it is done in `folder` with the same parameters."""
    before = _done_records(folder, lab)
    if not options.force and is_done(_parameters_of(before), values):
        say(f"{place} {lab.title}: done before in {_short(folder)} (--force runs it again)")
        return Outcome(lab, "done before")
    say(f"{place} {lab.title}: running")
    output = folder / "notebooks" / lab.path.name
    start = time.monotonic()
    try:
        _execute(lab, values, output, kernels, options.timeout)
        status, message = "done", ""
        if len(_done_records(folder, lab)) == len(before):
            status, message = (
                "failed",
                f"Lab {lab.number} ended before its last cell: nothing in it marked the lab as done.",
            )
    except Exception as error:
        status, message = _failure(lab, error, kernels, options.timeout, _last_cell(output))
    finally:
        _forget_paths(output)
    seconds = time.monotonic() - start
    if message and output.is_file():
        message += f"\n  As far as it came: {_short(output)}"
    if status == "done":
        say(f"{place} {lab.title}: done in {seconds:.0f} s")
    return Outcome(lab, status, seconds, message)


def _done_records(folder: Path, lab: Lab) -> list[dict[str, Any]]:
    """The records that say `lab` ran to its end; of one that sums up the others, since the last of those was kept."""
    records = results.read_records(folder)
    if lab.number in SUMMING_UP:
        others = [place for place, record in enumerate(records, 1) if record.get("lab") != lab.number]
        records = records[max(others, default=0) :]
    return [record for record in records if record.get("lab") == lab.number and record.get("status") == "done"]


def _parameters_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each run recorded as its parameters; a record that was edited into something else doesn't count."""
    recorded = [record.get("parameters", {}) for record in records]
    return [one for one in recorded if isinstance(one, dict)]


def is_done(recorded: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> bool:
    """Whether one of the runs that ended well had the parameters `values`, as far as it recorded its own."""
    return any(all(values.get(name) == value for name, value in one.items()) for one in recorded)


def _execute(lab: Lab, values: dict[str, Any], output: Path, kernels: Kernels, timeout: float) -> None:
    """Run the notebook into `output`, written cell by cell. Raises what papermill raises."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it would log, `_failure` says in full
    clock = threading.Timer(timeout, kernels.kill, args=["timed out"])
    clock.daemon = True
    clock.start()
    try:
        papermill.execute_notebook(
            str(lab.path),
            str(output),
            parameters=values,
            kernel_name="python3",
            kernel_manager_class=kernels.manager_class(),
            language="python",
            progress_bar=sys.stderr.isatty(),
            cwd=str(lab.path.parent),
        )
    finally:
        clock.cancel()


def _failure(lab: Lab, error: Exception, kernels: Kernels, timeout: float, cell: str) -> tuple[str, str]:
    """(status, message) for a lab that did not run to its end; `cell` says where it was."""
    if kernels.stopped_by:
        name = signal.Signals(kernels.stopped_by).name
        return "stopped", f"Lab {lab.number} was stopped by {name} in {cell}; its kernel is ended."
    if kernels.killed_because == "timed out":
        return "timed out", (
            f"Lab {lab.number} was ended after {timeout:g} s, its limit, in {cell}. "
            f"A larger limit: --timeout {2 * timeout:g}; a quicker run: a smaller --scale."
        )
    died_with = kernels.exit_code()
    if died_with is not None and not hasattr(error, "ename"):
        message = f"Lab {lab.number} died in {cell}: its kernel {_cause_of_death(died_with)}"
        return "died", _indented(message, kernels.last_words())
    if hasattr(error, "ename"):  # papermill's own: a cell raised
        return "failed", _cell_failure(lab, error)
    return "failed", f"Lab {lab.number} could not be run: {type(error).__name__}: {error}"


def _last_cell(output: Path) -> str:
    """The cell that ran last, by its first line: an unfinished cell has no number yet."""
    notebook = _read_output(output)
    if notebook is None:
        return "no cell yet"
    begun = [cell for cell in notebook.cells if cell.metadata.get("papermill", {}).get("start_time")]
    code = [cell.source.strip().splitlines()[0] for cell in begun if cell.cell_type == "code" and cell.source.strip()]
    return f"the cell that begins with `{code[-1]}`" if code else "no cell yet"


def _read_output(output: Path) -> Any:
    """The executed notebook, or None where there is none that can be read: one cut off while it was written, mostly."""
    import nbformat

    try:
        return nbformat.read(output, as_version=4)
    except Exception:  # whatever json, nbformat or the file system raise
        return None


def _cell_failure(lab: Lab, error: Any) -> str:
    """The cell, the error, and the last lines of what Python printed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    last = [line for line in text.splitlines() if line.strip(" -")][-6:]
    where = f"cell [{error.exec_count}] of {_short(lab.path)}"
    return _indented(f"Lab {lab.number} failed in {where}: {error.ename}: {error.evalue}", last)


def _indented(message: str, lines: Sequence[str]) -> str:
    return "\n    ".join([message, *lines])


def _cause_of_death(code: int) -> str:
    """What the exit code of a dead kernel most likely means, and what to do."""
    if code == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Most often that is the system running out of memory: close other programs, choose a "
            "smaller --scale, or give the container more memory. `dmesg` says if it was."
        )
    if code == -signal.SIGBUS:
        return (
            "ended with a bus error (SIGBUS). Most often /dev/shm is too small for the DataLoader workers: start the "
            "container with --shm-size=8g. `labutils doctor` says how much there is."
        )
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended with {name}: native code crashed. `labutils doctor` checks that the libraries fit together."
    return f"ended by itself with exit code {code}: something called os._exit, or a library gave up."


def _forget_paths(output: Path) -> None:
    """Take this machine's folders out of an executed notebook's metadata: it is kept, shown and compared elsewhere."""
    import nbformat

    notebook = _read_output(output)
    if notebook is None:
        return
    record = notebook.metadata.get("papermill", {})
    for name in ("input_path", "output_path"):
        if record.get(name):
            record[name] = Path(record[name]).name
    with contextlib.suppress(OSError):
        nbformat.write(notebook, output)


class Kernels:
    """The kernel that runs now: of this very interpreter, and ended with everything it started when it must be.

    As a context it takes SIGINT and SIGTERM: the first ends the kernel; the second, or one while no kernel runs,
    interrupts whatever goes on. Either way the context ends in order, and `stopped_by` is the signal's number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopped_by = 0
        self.killed_because = ""
        self._process: subprocess.Popen | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Kernels:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.kill("over")
        self._said.close()
        if kind is not KeyboardInterrupt:
            return False
        self.stopped_by = self.stopped_by or signal.SIGINT
        return True

    def _stop(self, number: int, _frame: object) -> None:
        again, self.stopped_by = self.stopped_by, number
        if again or not self.kill("stopped"):
            raise KeyboardInterrupt

    def kill(self, because: str) -> bool:
        """End the kernel and all its children. False where none was running."""
        if self._process is None or self._process.poll() is not None:
            return False
        import psutil

        self.killed_because = because
        with contextlib.suppress(psutil.NoSuchProcess):
            kernel = psutil.Process(self._process.pid)
            for process in [*kernel.children(recursive=True), kernel]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return True

    def exit_code(self) -> int | None:
        """How the last kernel ended (negative: by that signal); None where it still runs or never did."""
        return None if self._process is None else self._process.poll()

    def manager_class(self) -> type:
        """A kernel manager that starts `sys.executable`, whatever kernels are installed, and tells its process."""
        from ipykernel.kernelspec import get_kernel_dict
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        self._process, self.killed_because = None, ""
        self._said.seek(0)
        self._said.truncate()
        kernels = self
        spec = get_kernel_dict() | {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}

        class Manager(AsyncKernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                return KernelSpec(name="python3", **spec)

            async def _async_launch_kernel(self, kernel_cmd: list[str], **launch: Any) -> None:
                launch["env"] = launch.get("env", dict(os.environ)) | kernels.environment()
                launch["stdout"] = launch["stderr"] = kernels._said
                await super()._async_launch_kernel(kernel_cmd, **launch)
                kernels._process = self.provisioner.process

        return Manager

    def last_words(self, lines: int = 6) -> list[str]:
        """The last of what the kernel's process wrote outside of any cell: crashes of native code, mostly."""
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and "[IPKernelApp]" not in line][-lines:]

    def environment(self) -> dict[str, str]:
        """What a lab's kernel is told: where results go, where this labutils is when it is not installed, and that
        nobody watches progress bars."""
        path = os.pathsep.join(filter(None, [str(results.REPOSITORY), os.environ.get("PYTHONPATH")]))
        quiet = {"TQDM_DISABLE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        return {"LABUTILS_RESULTS": str(self.folder), "PYTHONPATH": path} | quiet


# What is said at the end


def _summary(outcomes: Sequence[Outcome], folder: Path) -> str:
    width = max(len(outcome.lab.title) for outcome in outcomes)
    lines = ["", f"{'lab':{width}}  {'status':11}  seconds"]
    for outcome in outcomes:
        seconds = f"{outcome.seconds:7.0f}" if outcome.seconds else ""
        lines.append(f"{outcome.lab.title:{width}}  {outcome.status:11}  {seconds}".rstrip())
    lines += [
        "",
        f"Executed notebooks: {shlex.quote(_short(folder / 'notebooks'))}",
        f"Verdicts: {shlex.join(['labutils', 'report', '--results', _short(folder)])}",
    ]
    return "\n".join(lines)


def _same_again(names: Sequence[str], options: Options, folder: Path) -> str:
    """The command line that goes on where this run stopped."""
    words = ["labutils", "run", *names, "--scale", options.scale, "--results", _short(folder)]
    words += ["--weights", options.weights] * (options.weights != "random")
    words += ["--data", options.data] * (options.data != "generated")
    for name, word in options.given.items():
        words += ["-p", name, word]
    return shlex.join(words)


def _short(path: Path) -> str:
    """A path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
