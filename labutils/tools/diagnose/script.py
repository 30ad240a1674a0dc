"""Runs a training script as it is, with hooks in its Python processes, and reads their record.

The hooks travel by the environment: `script_hooks` is put before PYTHONPATH, where Python finds
`sitecustomize` when it starts. So they reach the script also through `torchrun`, `accelerate
launch` or a shell script that starts Python in the end. A notebook's cells run as a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labutils.profiling.trace import Trace
from labutils.results.records import plain
from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.sources import of_record
from labutils.training.child_process import Command

HOOKS = Path(__file__).parent / "script_hooks"
RUN_NOTEBOOK = HOOKS / "labutils_script_hooks" / "run_notebook.py"
SAY_AFTER_S = 60.0
"""A script that took no step after this time is said to have taken none, and why that may be."""
STOPPED = 130
"""Exit code of a script that was stopped by Ctrl-C."""
END_WITHIN_S = 15.0
"""How long a script may go on once its steps are measured, and again once it was told to end."""
MARK = "LABUTILS_DIAGNOSE"
"""All that a script starts has the hooks' settings in its environment under this name. They name
the run's folder, so no other run has the same."""


class NoDiagnosis(RuntimeError):
    """The script could not be diagnosed; the message says why and what to type.

    exit_code: of the command: 1, or 2 where nothing was run, or `STOPPED`.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Stages:
    """How many optimizer steps are skipped, timed, and profiled; a few are watched in between."""

    warmup: int = 4
    timed: int = 10
    profiled: int = 3

    def needed(self, on_gpu: bool) -> int:
        """Optimizer steps that a script must take at least.

        2 are watched and 1 warms the profiler up; on a GPU 3 begin with an empty queue.
        """
        return self.warmup + self.timed + self.profiled + (6 if on_gpu else 3)


class Watched(NamedTuple):
    """A script's exit code, and what is known of its steps."""

    exit_code: int
    evidence: Evidence


def watch(
    command: Sequence[str], stages: Stages | None = None, keep_going: bool = False
) -> Watched:
    """Run `command` to the end of its profiled steps; its output passes through.

    Raises `NoDiagnosis` where the command can't be started, or has left no record.
    """
    stages = stages or Stages()
    with working_folder() as folder:
        code = run_with_hooks(command, vars(stages) | {"folder": folder, "keep_going": keep_going})
        for record in hook_files(folder, "record"):
            trace = record.with_name(record.name.replace("record", "trace"))
            if trace.exists():
                try:
                    facts = json.loads(record.read_text("utf-8"))
                    return Watched(code, of_record(facts, Trace.read(trace)))
                except ValueError as error:  # a full disk cuts it off
                    raise NoDiagnosis(str(error)) from None
        why = _why(command, code, hook_notes(folder, "process"), stages)
        raise NoDiagnosis(why, STOPPED if code == STOPPED else 1)


def hook_files(folder: str, kind: str) -> list[Path]:
    """The hooks' files of one kind, the oldest first."""
    return sorted(Path(folder).glob(f"{kind}-*.json"), key=os.path.getmtime)


def hook_notes(folder: str, kind: str) -> list[dict[str, Any]]:
    """What these files say."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in hook_files(folder, kind)]


def working_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for what the hooks write, which is removed afterwards."""
    return tempfile.TemporaryDirectory(prefix="labutils-diagnose-", ignore_cleanup_errors=True)


def environment_for(settings: Mapping[str, Any]) -> dict[str, str]:
    """The script's environment: the hooks' settings, their folder, and where `python` is found.

    `python` is the one that runs labutils, unless another environment is active.
    """
    before = {"PYTHONPATH": HOOKS}
    if not (os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")):
        before["PATH"] = Path(sys.executable).parent
    environment = {"KINETO_LOG_LEVEL": "6", "PATH": os.defpath} | os.environ
    environment[MARK] = json.dumps(settings)
    for name, folder in before.items():
        environment[name] = os.pathsep.join([str(folder), *filter(None, [environment.get(name)])])
    return environment


def run_with_hooks(command: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Its exit code; 0 where it was ended because its steps had been measured. What it prints is
    shown, unless fixes are tried in it: then it gets no input, either. What it leaves running is
    ended, unless it may keep going and has come to its own end.
    """
    out, environment = subprocess.DEVNULL if "try" in settings else None, environment_for(settings)
    try:
        process = Command(_words(command), MARK, env=environment, stdin=out, stdout=out, stderr=out)
    except OSError as error:
        raise NoDiagnosis(
            f"There is no command {command[0]!r} here ({error.strerror}). Type the script as you "
            "would run it, after two dashes; a Python script is run by Python: labutils diagnose "
            f"-- python {shlex.join(command) if command[0].endswith('.py') else 'train.py'}",
            exit_code=2,
        ) from None
    say_at, number = time.monotonic() + SAY_AFTER_S, 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.5)
            measured = [] if settings["keep_going"] else hook_files(settings["folder"], "record")
            if measured and time.time() - measured[0].stat().st_mtime > END_WITHIN_S:
                number = signal.SIGINT  # a parent may wait for the process that trained
                say(
                    f"the script's steps were measured {END_WITHIN_S:g} s ago, and it still runs. "
                    "It is ended now, as by Ctrl-C. To let it run on, add --keep-going before --."
                )
                return 0
            if time.monotonic() > say_at:
                say_at = float("inf")
                if why := _unseen(hook_notes(settings["folder"], "process")):
                    say(f"no step yet after {SAY_AFTER_S:.0f} s: {why} If it loads, wait.")
    except KeyboardInterrupt as told:  # what was measured counts
        number = (*told.args, signal.SIGINT)[0]
        return STOPPED
    finally:
        if number or process.poll() is None or not settings["keep_going"]:
            # At its own end, too, what it started may still remove shared memory.
            process.end(number, END_WITHIN_S if number else 1.0)
        process.witness.communicate()


def say(words: str, exit_code: int = 0) -> int:
    print(f"labutils diagnose: {plain(words)}", file=sys.stderr, flush=True)
    return exit_code


def _words(command: Sequence[str]) -> list[str]:
    """`train.ipynb` and `python train.ipynb` run the notebook's cells."""
    words = ["python"] * command[0].endswith(".ipynb") + [*command]
    runs = [at for at, word in enumerate(words) if re.search(r"\.py$|\.ipynb$|^-[mc]$", word)]
    if runs and words[runs[0]].endswith(".ipynb") and Path(words[0]).name.startswith("python"):
        words.insert(runs[0], str(RUN_NOTEBOOK))
    return words


def _why(
    command: Sequence[str], exit_code: int, notes: Sequence[Mapping[str, Any]], stages: Stages
) -> str:
    """Why a script left no record."""
    ended = "was stopped" if exit_code == STOPPED else f"ended with exit code {exit_code}"
    if exit_code < 0:
        ended = f"was killed (signal {-exit_code})"
    if exit_code not in (0, STOPPED) and not any("error" in note for note in notes):
        errors = [f"Its last error: {note['failed']}." for note in notes if "failed" in note]
        # A launcher's own error comes before that of what it launched.
        said = ["What it said of itself is above.", *errors][-1].replace(f"{Path.cwd()}/", "")
        if str(RUN_NOTEBOOK) in _words(command):
            command = ["jupyter", "execute", next(w for w in command if w.endswith(".ipynb"))]
        return (
            f"The script failed: it {ended} before its steps were profiled. {said} "
            f"Cure that first, by running it alone: {shlex.join(command)}"
        )
    if why := _unseen(notes):
        return f"The script {ended}: {why}"
    longest = max(notes, key=lambda note: note.get("steps", 0))
    needed, least = (own.needed(longest["on_gpu"]) for own in (stages, Stages(1, 3, 1)))
    return (
        f"The script {ended} after {longest['steps']} optimizer steps, and {needed} are needed. "
        f"Let it take more, or give --warmup 1 --timed 3 --steps 1, which needs {least}."
    )


def _unseen(notes: Sequence[Mapping[str, Any]]) -> str:
    """Why no step of the script's is seen, and what to do; "" where one was."""
    if error := next((note["error"] for note in notes if "error" in note), None):
        return f"it could not be profiled: {error}."
    if not notes:
        return (
            "no Python process was seen, or one that ignores its environment (python -I, -E, -S, "
            "sudo, a container). Type the command that starts the training, where it runs."
        )
    if not any(note.get("torch") for note in notes):
        return "it has not imported PyTorch. Type the command that starts the training."
    if not any(note.get("steps") for note in notes):
        return (
            "PyTorch was imported, and no optimizer took a step. Does it train? A step replayed "
            "from a CUDA graph isn't seen, nor one without backward(): diagnose the plain loop."
        )
    return ""
