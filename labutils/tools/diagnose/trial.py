"""Runs a script again with fixes put in place from outside, and measures what each saves.

Rounds go by turns through the script as it is and each fix, there and back: whole processes, one at
a time. The losses of the first backward passes are compared with those of the script as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labutils.results.effects import saved
from labutils.tools.diagnose import Diagnosis, Fix, script

MOST = 4
"""Fixes that are tried by themselves; the best few together come on top."""
KNOWN = {"num_workers", "persistent_workers", "pin_memory", "non_blocking", "logging", "compile"}
KNOWN |= {"optimizer", "attention", "checkpointing", "precision"}
"""What can be put in place from outside."""
CLOSE = {"": 1e-3, "tf32": 5e-3, "bf16": 3e-2}
"""By how much of itself a loss may differ, by the format of products."""
PREFETCHED = 2


@dataclass(frozen=True)
class Try:
    """The share of a step's time that a fix saved, its 95 % interval, and what became of the first
    losses; `holds`: it saves for sure, and leaves them; `why` there is no measurement."""

    measured: float | None = None
    low: float = 0.0
    high: float = 0.0
    losses: str = ""
    holds: bool = False
    why: str = ""


def tries(
    diagnosis: Diagnosis, command: Sequence[str], stages: script.Stages, rounds: int = 3
) -> dict[str, Try]:
    """Name of a fix -> what came of it. The best few by the diagnosis are tried, and those
    together."""
    best = [*diagnosis.worth_it, *filter(None, [diagnosis.together])]
    fixes = [fix for fix in best if fix.changes and fix.changes.keys() <= KNOWN]
    fixes = [fix for n, fix in enumerate(fixes) if n < MOST or fix is diagnosis.together]
    plans: dict[str, Mapping[str, Any]] = {"": {}} | {fix.name: fix.changes for fix in fixes}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plans if len(plans) > 1}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if not any("why" in run for run in [*runs[""], *runs[name]]):
                script.say(f"trying {name or 'the script as it is'}, round {turn + 1} of {rounds}")
                runs[name].append(run(command, plans[name], stages))
    found = {fix.name: judged(fix, runs[""], runs[fix.name]) for fix in fixes}
    edit = Try(why="can't be put in place from outside: edit the script")
    return {fix.name: edit for fix in best} | found


def run(
    command: Sequence[str], changes: Mapping[str, Any], stages: script.Stages
) -> dict[str, Any]:
    """One process: `step_ms`, `losses`, and what was `done`; or `why` there is none of it."""
    # What workers made ready while nothing was timed must be used up first.
    stages = replace(stages, warmup=stages.warmup + PREFETCHED * changes.get("num_workers", 0))
    with script.working_folder() as folder:
        settings = vars(stages) | {"folder": folder, "keep_going": False, "try": changes}
        if script.run_with_hooks(command, settings) == script.STOPPED:
            raise KeyboardInterrupt
        kinds = ("record", "tried", "process")
        records, tried, notes = (script.hook_notes(folder, kind) for kind in kinds)
    if not records:
        errors = [note["failed"] for note in notes if "failed" in note]
        return {"why": f"run again, it failed: {errors[-1] if errors else 'no step was seen'}"}
    seen = next((one for one in tried if one.get("losses")), {"losses": [], "done": []})
    if missing := changes.keys() - set(seen["done"]) - {"persistent_workers", "non_blocking"}:
        return {"why": f"could not be put in place from outside ({', '.join(sorted(missing))})"}
    return {"step_ms": records[0]["step_ms"]} | seen


def judged(fix: Fix, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Try:
    """What the runs before and after a fix say of it."""
    if why := next((run["why"] for run in [*before, *after] if "why" in run), ""):
        return Try(why=why)
    gain = saved(*([run["step_ms"] for run in runs] for runs in (before, after)))
    losses, kept = _losses(fix, before, after)
    return Try(*gain, losses, holds=gain[1] > 0 and kept)


def _losses(fix: Fix, before: Sequence, after: Sequence) -> tuple[str, bool]:
    """What a fix does to the first losses, beside what differs from run to run anyway, and whether
    it leaves them, as far as can be told."""
    first = before[0]["losses"]
    noise, off = (max(_off(first, run["losses"]) for run in runs) for runs in (before, after))
    allowed = CLOSE["bf16" if "compile" in fix.changes else fix.changes.get("precision", "")]
    if not first:
        return "no loss was seen", True
    if noise > allowed:
        return f"losses differ from run to run by {noise:.0%}: no seed, not compared", True
    if off <= allowed:
        return f"the same losses to {off:.1%}", True
    return f"CHANGES the losses, by {off:.1%}: more than its precision explains", False


def _off(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = zip(one, other, strict=False)
    return max((abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in pairs), default=0.0)
