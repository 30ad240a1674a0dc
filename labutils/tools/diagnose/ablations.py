"""Predicted gains against measured ones, on the course's own loop, one fix at a time.

    run = ablations(open_workload("sd15-lora"), STOCK)
    run.metrics["each"]["workers"]      predicted and measured gain, round by round

A start recipe is timed, traced once, and diagnosed. Only then are the recipes with one fix each
built and timed, interleaved with the start in one process. A gain is the median over rounds of what
the fix saves against the start of the same round. So neither a drift of the machine nor a round
that meets something for the first time decides it.

Where batches differ in length, recipes are timed and traced on the same few batches. How much of
the tokens is padding is an epoch's, for a few batches may have twice as much.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from labutils.profiling import cuda
from labutils.profiling.machine import default_device
from labutils.profiling.trace import profile
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.tools.diagnose import Fix, diagnose, report
from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.sources import of_recipe
from labutils.tools.diagnose.trace_pieces import PieceTrace
from labutils.training import Benchmark, Trainer
from labutils.training.model_edits import with_epoch_rate
from labutils.workloads.base import Workload

START = "start"
AT_ONCE = 4
"""So many recipes stand side by side with the start, each with a model and its activations."""
CLOSE = 0.2
"""A predicted step that is off by no more has come true."""
TESTS = 0.05
"""A fix that neither saves so much nor was predicted to is no test of a prediction."""
TRACED = 2


def ablations(
    workload: Workload,
    start: Recipe,
    steps: int = 5,
    rounds: int | None = None,
    only: Iterable[str] | None = None,
) -> Run:
    """Diagnose `start` on `workload`, then measure every fix that is a knob against it.

    only: names of the fixes to measure (default: all). The run's metrics: `fixes`, `fixes_telling`
    (those that test a prediction), `fixes_close`, `median_off`, the diagnosis in words (`told`),
    and `each` fix's row, see `_row`. Raises `RuntimeError` where the start can't be trained.
    """
    device = workload.device.type
    with Benchmark(workload, same_batches=workload.steps_vary) as bench:
        run = bench.compare({START: start}, max(steps, TRACED + 1), rounds=1)[START]
        if not run.ok:
            raise RuntimeError(f"The start can't be trained here: {run.status}.")
        diagnosis = diagnose(_evidence(bench, with_epoch_rate(run, workload)))
        asked = [f for f in diagnosis.fixes if f.changes and (only is None or f.name in only)]
        recipes, why = recipes_of(start, asked, device)
        names = list(recipes)
        groups = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
        pairs = _measure(bench, start, groups[0], recipes, steps, rounds) if groups else {}
    for group in groups[1:]:
        with Benchmark(workload, same_batches=workload.steps_vary) as bench:
            pairs |= _measure(bench, start, group, recipes, steps, rounds)
    each = {fix.name: _row(fix, pairs.get(fix.name), why.get(fix.name, "")) for fix in asked}
    tests = [row for row in each.values() if is_test(row)]
    offs = [abs(row["off"]) for row in tests]
    metrics = {"fixes": len(each), "fixes_telling": len(tests)}
    metrics["fixes_close"] = sum(off <= CLOSE for off in offs)
    metrics |= {"median_off": statistics.median(offs)} if offs else {}
    return Run("", "", metrics=metrics | {"told": report.text(diagnosis), "each": each})


def _evidence(bench: Benchmark, run: Run) -> Evidence:
    candidate = bench.candidates[START]
    wait, idle_starts = candidate.steps_to_settle, 3
    if bench.same_batches:  # the traced batches are those behind the first, which warms up
        wait, idle_starts = 0, TRACED
        run = _of_steps(run, slice(1, 1 + TRACED))
        candidate.rewind(candidate.steps_to_drain)
        candidate.trainer.step()
    from_idle = None
    if default_device() == "cuda":
        from_idle = _host_ms(candidate.trainer, idle_starts)
    if bench.same_batches:
        candidate.rewind(candidate.steps_to_drain)
    with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
        options = {"with_stack": False, "wait": wait, "with_shapes": True, "kind": PieceTrace}
        trace = profile(candidate.trainer, TRACED, folder, **options)
    return of_recipe(run, trace, from_idle)


def _of_steps(run: Run, steps: slice) -> Run:
    """The run as if it had these of its steps alone, by their mean, as a trace of them has it."""
    samples = {name: run.samples[name][steps] for name in ("step_ms", "data_ms")}
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return replace(run, metrics=run.metrics | means, samples=samples)


def _host_ms(trainer: Trainer, steps: int) -> float:
    """Milliseconds until the host has given a step's work to an idle GPU: the mean of `steps`."""
    times = []
    for _ in range(steps):
        cuda.synchronize()
        began = time.perf_counter()
        trainer.step()
        times.append(1e3 * (time.perf_counter() - began))
    cuda.synchronize()
    return statistics.fmean(times)


def recipes_of(
    start: Recipe, fixes: Iterable[Fix], device: str
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Fix -> its recipe, and fix -> why it has none: refused, or the same as the start here."""
    recipes: dict[str, Recipe] = {}
    refused: dict[str, str] = {}
    for fix in fixes:
        try:
            recipe = start.but(**fix.changes)
        except ValueError as error:
            refused[fix.name] = str(error)
            continue
        if recipe.fitted_to(device) == start.fitted_to(device):
            refused[fix.name] = "here it is the same as the start"
        else:
            recipes[fix.name] = recipe
    return recipes, refused


def _measure(
    bench: Benchmark,
    start: Recipe,
    names: Iterable[str],
    recipes: Mapping[str, Recipe],
    steps: int,
    rounds: int | None,
) -> dict[str, tuple[Run, Run]]:
    """Fix -> (the start's run in the same rounds, its own)."""
    chosen = {name: recipes[name] for name in names}
    runs = bench.compare({START: start, **chosen}, steps, rounds)
    runs = {name: with_epoch_rate(run, bench.workload) for name, run in runs.items()}
    return {name: (runs[START], runs[name]) for name in chosen}


def _row(fix: Fix, pair: tuple[Run, Run] | None, why: str) -> dict[str, Any]:
    """A fix on record: `changes`, gains as `predicted` and `measured` (shares of the time), the
    times `before` and `after` in each round, and by how much the predicted step is longer than the
    measured one (`off`); without a measurement `why`."""
    row = {"changes": fix.changes, "per": fix.per, "predicted": fix.gain, "why": why}
    row |= {"measured": None, "off": None, "before": [], "after": []}
    if pair is None:
        return row
    if failed := [run.status for run in pair if not run.ok]:
        return row | {"why": failed[0]}
    before, after = (round_costs(run, fix.per) for run in pair)
    measured = statistics.median(1 - b / a for a, b in zip(before, after, strict=True))
    off = (1 - fix.gain) / (1 - measured) - 1
    return row | {"measured": measured, "off": off, "before": before, "after": after}


def is_test(row: Mapping[str, Any]) -> bool:
    """Whether a fix's row tests a prediction: there was something to gain, or was said to be."""
    measured = row["measured"]
    return measured is not None and max(row["predicted"], measured) >= TESTS


def round_costs(run: Run, per: str = "step") -> list[float]:
    """Milliseconds a step, by the host's clock, in each round of a run.

    per: "example", or "useful token" by the share of an epoch's tokens that are useful, instead.
    """
    walls = run.samples["wall_ms"]
    if per == "step":
        return list(walls)
    if per == "example":
        return [wall / Recipe(**run.recipe).examples_per_step for wall in walls]
    tokens, useful = run.samples["tokens"], run.metrics["useful_tokens"]
    count = len(tokens) // len(walls)
    return [
        wall / (useful * statistics.fmean(tokens[turn * count : (turn + 1) * count]))
        for turn, wall in enumerate(walls)
    ]


def fix_table(loops: Mapping[str, Run]) -> pd.DataFrame:
    """One row a fix of each loop: gains in percent, with the rounds' range."""
    return pd.DataFrame(
        {
            "loop": loop,
            "fix": name,
            "what changes": ", ".join(f"{knob}={new}" for knob, new in row["changes"].items()),
            "predicted": f"{row['predicted']:.0%}"
            + ("" if row["per"] == "step" else f" a {row['per']}"),
            "measured": _with_range(row),
            "step off by": "" if row["off"] is None else f"{row['off']:+.0%}",
        }
        for loop, run in loops.items()
        for name, row in run.metrics.get("each", {}).items()
    )


def _with_range(row: Mapping[str, Any]) -> str:
    """ "48% (46 to 51)": the median of the rounds, the least and the most."""
    if row["measured"] is None:
        return row["why"] or "not here"
    times = zip(row["before"], row["after"], strict=True)
    shown = [round(100 * (1 - after / before)) for before, after in times]
    spread = f" ({min(shown)} to {max(shown)})" if len(set(shown)) > 1 else ""
    return f"{round(100 * row['measured'])}%{spread}"


def look_table(loops: Mapping[str, Run]) -> pd.DataFrame:
    """One row a loop: the measured fix that was ranked first, the best one, and what each saved."""
    rows = []
    for loop, run in loops.items():
        each = run.metrics.get("each", {})
        saved = {name: row["measured"] for name, row in each.items() if row["measured"] is not None}
        if not saved:
            continue
        first = max(saved, key=lambda name, each=each: each[name]["predicted"])
        best = max(saved, key=saved.__getitem__)
        promised = [gain for name, gain in saved.items() if each[name]["predicted"] >= TESTS]
        rows.append(
            {
                "loop": loop,
                "ranked first": first,
                "which saved": f"{saved[first]:.0%}",
                "best": best,
                "which saves": f"{saved[best]:.0%}",
                "said to pay, and paid": f"{sum(g >= TESTS for g in promised)} of {len(promised)}",
            }
        )
    return pd.DataFrame(rows)
