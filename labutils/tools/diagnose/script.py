"""Runs a training script as it is, with the hooks of `inside` in its Python processes, and reads
what they found.

The hooks travel by the environment: `inside` is put before PYTHONPATH, where Python finds
`sitecustomize` at start. So they reach the script also through `torchrun`, `accelerate launch` or a
shell script that starts Python in the end.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.recorded import Recorded
from labutils.tools.diagnose.sources import of_record, short

INSIDE = Path(__file__).parent / "inside"


FEWEST_TIMED = 3
"""Steps whose median says something."""


class NoDiagnosis(RuntimeError):
    """The script could not be diagnosed; the message says what it did and what to type. `usage`:
    nothing was run.
    """

    def __init__(self, message: str, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


@dataclass(frozen=True)
class Stages:
    """How many optimizer steps are passed over, timed, and profiled. Besides, a few are watched in
    between.
    """

    warmup: int = 4
    timed: int = 10
    profiled: int = 3

    def needed(self, on_gpu: bool) -> int:
        """Optimizer steps that a script must take at least: besides, 2 are watched and 1 warms the
        profiler up, and on a GPU 3 begin with an empty queue."""
        return self.warmup + self.timed + self.profiled + (6 if on_gpu else 3)

    def within(self, steps: int, on_gpu: bool) -> Stages | None:
        """Stages for a script that takes only so many steps; None where they are too few for any."""
        timed = steps - Stages(1, 0, 1).needed(on_gpu)
        return Stages(1, min(timed, self.timed), 1) if timed >= FEWEST_TIMED else None


@dataclass
class Watched:
    """What became of a script: its `exit_code`, and what is known of its steps, None where it
    didn't take enough.
    """

    command: Sequence[str]
    exit_code: int
    evidence: Evidence | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)


def watch(
    command: Sequence[str],
    stages: Stages | None = None,
    keep_going: bool = False,
    folder: Path | None = None,
) -> Watched:
    """Run `command` to the end of its profiled steps; its output passes through. `folder` keeps the
    trace.

    Raises `NoDiagnosis` where it can't be started, or has left no record: then the message says
    why.
    """
    stages = stages or Stages()
    with _room(folder) as room:
        watched = Watched(command, _run(command, _environment(stages, keep_going, room)))
        by_number = sorted(
            room.glob("process-*.json"), key=lambda path: (len(path.name), path.name)
        )
        watched.processes = [_read(path) for path in by_number]
        records = sorted(room.glob("record-*.json"))
        if not records:
            raise NoDiagnosis(_why(watched, stages))
        record = _read(records[0])
        trace = room / records[0].name.replace("record", "trace")
        if not trace.exists():
            raise NoDiagnosis(_no_trace(watched))
        watched.evidence = of_record(record, Recorded.read(trace))
        return watched


@contextmanager
def _room(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*-*.json"):
            if old.name.startswith(("process-", "record-", "trace-")):
                old.unlink()
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(
        prefix="labutils-diagnose-", ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


def _environment(stages: Stages, keep_going: bool, room: Path) -> dict[str, str]:
    settings = vars(stages) | {"folder": str(room), "keep_going": keep_going}
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(INSIDE), *([before] if before else [])])
    found = {"LABUTILS_DIAGNOSE": json.dumps(settings), "PYTHONPATH": path, "PATH": _search_path()}
    return {"KINETO_LOG_LEVEL": "6"} | os.environ | found


def _search_path() -> str:
    """Where commands are looked for: `python` is the one that runs labutils, unless another
    environment is active.
    """
    others = os.environ.get("PATH", os.defpath)
    if os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX"):
        return others
    return os.pathsep.join([str(Path(sys.executable).parent), others])


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except FileNotFoundError:
        raise NoDiagnosis(
            f"There is no command {command[0]!r} here. Type the script as you would run it, after "
            "two dashes: "
            "labutils diagnose -- python train.py",
            usage=True,
        ) from None
    except PermissionError:
        raise NoDiagnosis(
            f"{command[0]} can't be run as a program. A Python script is run by Python: "
            f"labutils diagnose -- python {' '.join(command)}",
            usage=True,
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):  # its process was killed while writing
        return {}


def _why(watched: Watched, stages: Stages) -> str:
    """Why a script left no record."""
    ended = (
        f"ended with exit code {watched.exit_code}"
        if watched.exit_code >= 0
        else f"was killed (signal {-watched.exit_code})"
    )
    said = f"The script {ended}"
    if error := next((p["error"] for p in watched.processes if "error" in p), None):
        return f"{said}, and could not be profiled: {error}."
    if watched.exit_code != 0:
        return _failure(watched, ended)
    if not watched.processes:
        return (
            f"{said}, and no Python process was seen in it, or one that was told to ignore its "
            "environment "
            "(python -I, -E or -S). Type the command that starts the training: labutils diagnose "
            "-- python train.py"
        )
    if not any(process.get("torch") for process in watched.processes):
        return f"{said}, and never imported PyTorch: there is nothing to diagnose in it."
    longest = max(watched.processes, key=lambda process: process.get("steps", 0))
    if "steps" not in longest:
        return f"{said}, and no optimizer of PyTorch's took a step in it. " + (
            _emptiness(watched)
            or "Does it train? (A step that is replayed from a CUDA graph as a whole isn't seen: diagnose the loop "
            "before it was captured.)"
        )
    return f"{said} after {_too_few(longest['steps'], longest.get('on_gpu', False), stages)}"


def _failure(watched: Watched, ended: str) -> str:
    """What is known of a script that failed, with the last line of its error."""
    before = "its steps were profiled" if watched.processes else "a Python process was seen in it"
    told = "What it said of itself is above."
    if failed := [process for process in watched.processes if "failed" in process]:
        error, place = (
            failed[-1]["failed"],
            failed[-1]["failed_at"],
        )  # the last to start: a launcher comes before
        told = f"Its last error: {error}{f' ({short(place)})' if place else ''}."
    cure = f"Cure that first, by running it alone: {shlex.join(watched.command)}"
    return " ".join(
        filter(
            None,
            [f"The script failed: it {ended} before {before}.", told, _emptiness(watched), cure],
        )
    )


def _emptiness(watched: Watched) -> str:
    """Which DataLoader gave no batch; empty where none was seen to."""
    empty = next((process["empty"] for process in watched.processes if "empty" in process), None)
    if empty is None:
        return ""
    rows = f"{empty['examples']} examples" if "examples" in empty else "a stream"
    dropping = ", drop_last=True" if empty["drop_last"] else ""
    return (
        f"A DataLoader gave no batch, at {short(empty['place'])}: its {empty['dataset']} has "
        f"{rows}, "
        f"batch_size={empty['batch_size']}{dropping}. Give it data, or a smaller batch."
    )


def _too_few(steps: int, on_gpu: bool, stages: Stages) -> str:
    """How many steps a script took and how many it must, with options that do with those it takes,
    if any can.
    """
    needed = stages.needed(on_gpu)
    fewer, least = stages.within(steps, on_gpu), Stages(1, FEWEST_TIMED, 1)
    told = (
        f"{steps} optimizer step{'s' if steps != 1 else ''}, and {needed} are needed: "
        f"{stages.warmup} to warm up, "
        f"{stages.timed} to time, {needed - stages.warmup - stages.timed} to watch and profile. "
        "Let it take more"
    )
    if fewer:
        return f"{told}, or give {_options(fewer)}."
    return f"{told}: at the least {least.needed(on_gpu)}, with {_options(least)}."


def _options(stages: Stages) -> str:
    return f"--warmup {stages.warmup} --timed {stages.timed} --steps {stages.profiled}"


def _no_trace(watched: Watched) -> str:
    error = next(
        (process["error"] for process in watched.processes if "error" in process),
        "no trace was written",
    )
    return f"The script ran, and {error}. Turn that off for the diagnosis."
