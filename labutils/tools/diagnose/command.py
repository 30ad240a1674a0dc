"""The command `labutils diagnose`: which evidence is asked for, and what is printed of it.

Exit codes: 0 a diagnosis was made; 1 the script failed, or there was nothing to diagnose; 2 wrong
usage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from labutils.results.records import check_usable, read_file, runs_of
from labutils.tools.diagnose import diagnose, sources, telling
from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.script import NoDiagnosis, Stages, watch

FAILED, WRONG_USAGE = 1, 2


def main(
    command: Sequence[str] = (),
    trace: Path | None = None,
    run: str | None = None,
    results: Sequence[Path] = (),
    stages: Stages | None = None,
    keep_going: bool = False,
    folder: Path | None = None,
    as_json: bool = False,
) -> int:
    """Diagnose one of a script, a trace and a run; returns the exit code. results: files that the
    run may lie in, the newest last."""
    if sum((bool(command), trace is not None, run is not None)) != 1:
        return _wrong(
            "give one of: a script after two dashes (-- python train.py), --trace FILE, or --run "
            "NAME"
        )
    exit_code = None
    try:
        if command:
            watched = watch(command, stages, keep_going, folder)
            evidence, exit_code = watched.evidence, watched.exit_code
        else:
            evidence = (
                sources.of_trace(trace) if trace is not None else _of_named_run(run or "", results)
            )
    except NoDiagnosis as error:
        print(f"labutils diagnose: {error}", file=sys.stderr)
        return WRONG_USAGE if error.usage else FAILED
    except ValueError as error:
        return _wrong(str(error))
    except OSError as error:
        return _wrong(f"{error.filename} can't be read: {(error.strerror or str(error)).lower()}")
    assert evidence is not None
    diagnosis = diagnose(evidence)
    if as_json:
        print(json.dumps(telling.record(diagnosis, exit_code), ensure_ascii=False))
    else:
        print("", telling.text(diagnosis), sep="\n")
    return _after(exit_code)


def _after(exit_code: int | None) -> int:
    """A script that was diagnosed and failed after that has failed."""
    if not exit_code:
        return 0
    print(
        f"labutils diagnose: the script ended with exit code {exit_code} after its steps were "
        "profiled.",
        file=sys.stderr,
    )
    return FAILED


def _of_named_run(name: str, files: Sequence[Path]) -> Evidence:
    """Evidence of the run of that name, "04/stock" or "stock". Raises `ValueError` where there is
    none, or several.
    """
    lab, _, own = name.rpartition("/")
    readings = [read_file(file) for file in files]
    check_usable(readings)
    runs = {key: run for reading in readings for key, run in runs_of(reading.records).items()}
    found = {key: run for key, run in runs.items() if key[1] == own and lab in ("", key[0])}
    if not found:
        timed = [key for key, run in sorted(runs.items()) if run.metric("step_ms")]
        there = [f"{a}/{b}" for a, b in timed if lab in ("", a)] or [f"{a}/{b}" for a, b in timed]
        shown = ", ".join(there[:12]) + (" ..." if len(there) > 12 else "")
        where = (
            f"in {', '.join(map(str, files))}"
            if files
            else "as there are no results yet (labutils run makes some)"
        )
        raise ValueError(
            f'there is no run "{name}" {where}.'
            + (f" Runs with a step time there: {shown}" if shown else "")
        )
    if len(found) > 1:
        raise ValueError(
            f'several labs have a run "{name}". Name one: {", ".join(f"{a}/{b}" for a, b in found)}'
        )
    return sources.of_run(next(iter(found.values())))


def _wrong(words: str) -> int:
    print(f"labutils diagnose: {words}", file=sys.stderr)
    return WRONG_USAGE
