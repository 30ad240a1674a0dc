"""Predicted gains against measured ones, on the course's own loop: each fix's changes, made one at
a time.

    ablated = ablations(open_workload("sd15-lora"), STOCK)
    ablated.rows                    predicted and measured gain of each fix that is a knob

A start recipe is timed, traced once, and diagnosed. Only then are the recipes with one fix each
built and timed, interleaved with the start in one process. The predictions know nothing of these
measurements. A gain is taken round by round, from the start and the fix of the same round: the
middle of the rounds, of three or more, is the gain, and the least and the most its range. So
neither a drift of the machine nor a round that meets something for the first time decides it.
(Where batches are the same in each round, later rounds have met their lengths: it is the gain
without such first times.)

Where batches differ in length, recipes are timed and traced on the same few batches: one step of
texts may take twice as long as the next. (Where a recipe has workers, all are timed on batches some
steps later than those that were traced: see `Candidate.steps_to_drain`.) How much of the tokens is
padding is an epoch's, for a few batches may have twice as much.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.profiling import hardware
from labutils.profiling.trace import profile
from labutils.recipe import STOCK, Recipe
from labutils.results.records import Run
from labutils.tools.diagnose import Diagnosis, Fix, diagnose, report
from labutils.tools.diagnose.sources import of_recipe
from labutils.tools.diagnose.trace_pieces import PieceTrace
from labutils.training import Benchmark, Trainer
from labutils.training.benchmark import ROUNDS
from labutils.training.memory_run import make_room
from labutils.training.model_edits import with_epoch_rate
from labutils.workloads.base import Workload, open_workload

START = "start"
STARTS: dict[str, tuple[str, Recipe]] = {
    "SD1.5": ("sd15-lora", STOCK),
    "LLaVA": ("llava-lora", A2_BASE.but(checkpointing="blocks")),
    "Qwen3": (
        "qwen3-lora-long",
        A3_BASE.but(checkpointing="blocks", optimizer="adamw", layers="rewritten"),
    ),
    "Qwen3 in fp32": ("qwen3-lora-short", A3_BASE.but(precision="fp32", checkpointing="blocks")),
}
"""Loops to diagnose, by name: workload and recipe. They are the articles' own starting points, but
for choices that those had made already: products in fp32; blocks that compute again, the optimizer
as PyTorch picks it, and layers that can take packed rows as well as padded ones."""
MEASURED: dict[str, tuple[str, ...]] = {
    "SD1.5": ("workers", "batch size", "capture", "caching"),
    "LLaVA": ("workers", "checkpointing", "caching"),
    "Qwen3": ("checkpointing", "padding"),
    "Qwen3 in fp32": ("precision", "checkpointing"),
}
"""The fixes that are measured of each start where time is short, chosen before anything is
predicted. Compiling is left out: it takes longer to build than all others to measure. So are small
matters, whose gain the spread would hide."""
AT_ONCE = 4
"""So many recipes stand side by side with the start, each with a model, its activations and perhaps
a graph.
"""
CLOSE = 0.2
TELLS = 0.05
"""A fix that neither saves so much nor was predicted to is no test of a prediction."""


@dataclass(frozen=True)
class Ablation:
    """One fix: its gain as predicted, and as measured in each round; none where it could not be,
    and then `why`.

    before, after: milliseconds a step in each round (or of an example, or a useful token), without
    the fix and with it.
    """

    start: str
    fix: Fix
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    why: str = ""

    @property
    def predicted(self) -> float:
        return self.fix.gain

    @property
    def rounds(self) -> list[float]:
        """The share of the time saved, round by round."""
        return [1 - fixed / was for was, fixed in zip(self.before, self.after, strict=True)]

    @property
    def measured(self) -> float | None:
        """The middle of the rounds."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def off(self) -> float | None:
        """By how much the predicted step is longer than the measured one; -0.1: a tenth shorter."""
        return None if self.measured is None else (1 - self.predicted) / (1 - self.measured) - 1

    @property
    def close(self) -> bool:
        """Whether the predicted step lies within a fifth of the measured one."""
        return self.off is not None and abs(self.off) <= CLOSE

    @property
    def tells(self) -> bool:
        """Whether it tests anything: there was something to gain, or was said to be."""
        return self.measured is not None and max(self.predicted, self.measured) >= TELLS


@dataclass(frozen=True)
class Ablated:
    """A start's diagnosis, its fixes predicted and measured, and the runs behind them by the fix's
    name ("start").
    """

    name: str
    diagnosis: Diagnosis
    rows: tuple[Ablation, ...]
    runs: Mapping[str, Run] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """For a run on record: how many fixes tell, how many of those were predicted closely, and
        how far off.
        """
        telling = [row for row in self.rows if row.tells]
        offs = [abs(row.off or 0.0) for row in telling]
        return {
            "fixes": len(self.rows),
            "fixes_telling": len(telling),
            "fixes_close": sum(row.close for row in telling),
            **({"median_off": statistics.median(offs)} if offs else {}),
        }


def ablations(
    workload: Workload,
    start: Recipe,
    name: str = "",
    steps: int = 5,
    rounds: int = ROUNDS,
    only: Iterable[str] | None = None,
    traced: int = 2,
    folder: Path | None = None,
) -> Ablated:
    """Diagnose `start` on `workload`, then measure every fix that is a knob against it.

    only: names of the fixes to be measured (default: all). folder: where the trace is kept. Raises
    `RuntimeError` where the start itself can't be trained.
    """
    name = name or workload.name
    chosen = None if only is None else set(only)
    vary = workload.steps_vary
    with Benchmark(workload, same_batches=vary) as bench:
        runs = {START: _start(bench, start, max(steps, traced + 1))}
        diagnosis = diagnose(_evidence(bench, runs[START], traced, folder))
        fixes = [
            fix for fix in diagnosis.fixes if fix.changes and (chosen is None or fix.name in chosen)
        ]
        recipes, refused = recipes_of(start, fixes, workload.device.type)
        groups = list(_in_groups(recipes, AT_ONCE))
        measured = _measure(bench, start, groups[0], steps, rounds) if groups else {}
    for group in groups[1:]:
        with Benchmark(workload, same_batches=vary) as bench:
            measured |= _measure(bench, start, group, steps, rounds)
    rows = [_row(name, fix, measured.get(fix.name), refused.get(fix.name, "")) for fix in fixes]
    return Ablated(
        name, diagnosis, tuple(rows), runs | {fix: pair[1] for fix, pair in measured.items()}
    )


def _start(bench: Benchmark, start: Recipe, steps: int) -> Run:
    run = bench.compare({START: start}, steps, rounds=1)[START]
    if not run.ok:
        raise RuntimeError(
            f"The start can't be trained here ({run.status}), so that there is nothing to diagnose."
        )
    return with_epoch_rate(run, bench.workload)


def _evidence(bench: Benchmark, run: Run, traced: int, folder: Path | None) -> Any:
    candidate = bench.candidates[START]
    wait, starts = candidate.steps_to_settle, 3
    if bench.same_batches:
        wait, starts, run = (
            0,
            traced,
            _of_steps(run, slice(1, 1 + traced)),
        )  # the first of them warms the profiler up
        candidate.rewind(candidate.steps_to_drain)
        candidate.trainer.step()
    from_idle = host_ms(candidate.trainer, starts) if hardware.device() == "cuda" else None
    if bench.same_batches:
        candidate.rewind(candidate.steps_to_drain)
    with tempfile.TemporaryDirectory(prefix="labutils-") as temporary:
        trace = profile(
            candidate.trainer,
            traced,
            folder or temporary,
            with_stack=False,
            wait=wait,
            with_shapes=True,
            kind=PieceTrace,
        )
    assert isinstance(trace, PieceTrace)
    return of_recipe(run, trace, from_idle)


def _of_steps(run: Run, steps: slice) -> Run:
    """The run as if it had these of its steps alone, by their mean, as a trace of them has it."""
    samples = {
        name: values[steps] for name, values in run.samples.items() if name != "wall_ms"
    }  # that is of a round
    found = {name: statistics.fmean(samples[name]) for name in ("step_ms", "data_ms")}
    return replace(run, metrics=run.metrics | found, samples=samples)


def host_ms(trainer: Trainer, steps: int) -> float:
    """Milliseconds until the host has given a step's work to an idle GPU: the mean of `steps`."""
    times = []
    for _ in range(steps):
        hardware.cuda.synchronize()
        began = time.perf_counter()
        trainer.step()
        times.append(1e3 * (time.perf_counter() - began))
    hardware.cuda.synchronize()
    return statistics.fmean(times)


def recipes_of(
    start: Recipe, fixes: Sequence[Fix], device: str
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Fix -> its recipe, and fix -> why it has none: refused, or the same as the start on this
    `device`.
    """
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


def _in_groups(recipes: Mapping[str, Recipe], size: int) -> Iterator[dict[str, Recipe]]:
    names = list(recipes)
    for first in range(0, len(names), size):
        yield {name: recipes[name] for name in names[first : first + size]}


def _measure(
    bench: Benchmark, start: Recipe, recipes: Mapping[str, Recipe], steps: int, rounds: int
) -> dict[str, tuple[Run, Run]]:
    """Fix -> (the start's run in the same rounds, its own)."""
    runs = bench.compare({START: start, **recipes}, steps, rounds)
    runs = {name: with_epoch_rate(run, bench.workload) for name, run in runs.items()}
    return {name: (runs[START], runs[name]) for name in recipes}


def _row(name: str, fix: Fix, pair: tuple[Run, Run] | None, why: str) -> Ablation:
    if pair is None:
        return Ablation(name, fix, why=why)
    if failed := next((run.status for run in pair if not run.ok), None):
        return Ablation(name, fix, why=failed)
    return Ablation(name, fix, *(tuple(round_costs(run, fix.per)) for run in pair))


def round_costs(run: Run, per: str = "step") -> list[float]:
    """Milliseconds a step, by the host's clock, in each round of a run; or those of an example, or
    of a useful token (by the share of an epoch's tokens that are useful: see `with_epoch_rate`)."""
    walls = run.samples["wall_ms"]
    if per == "step":
        return list(walls)
    if per == "example":
        return [wall / Recipe(**run.recipe).examples_per_step for wall in walls]
    tokens, useful = run.samples["tokens"], run.metrics["useful_tokens"]
    each = len(tokens) // len(walls)
    taken = [
        statistics.fmean(tokens[first : first + each]) for first in range(0, len(tokens), each)
    ]
    return [wall / (useful * count) for wall, count in zip(walls, taken, strict=True)]


def of_start(
    name: str,
    scale: str = "auto",
    steps: int = 3,
    rounds: int = ROUNDS,
    everything: bool = False,
    data: str = "generated",
    weights: str = "random",
) -> Run:
    """`ablations` of one of `STARTS`, as a run that holds all of it: see `on_record`. Raises
    `RuntimeError` where it can't be trained.

    everything: every fix that is a knob, and not those of `MEASURED` alone.
    """
    room, start = STARTS[name]
    workload = open_workload(room, scale, weights=weights, data=data)
    try:
        return on_record(
            ablations(workload, start, name, steps, rounds, None if everything else MEASURED[name])
        )
    finally:
        make_room(workload)


def on_record(ablated: Ablated) -> Run:
    """The counts of `Ablated.metrics`, what the diagnosis `told`, and of `each` fix what it
    changes, its gain as predicted and measured, `per` what, how far `off` the step was, None and
    `why` where it has none; and the times behind it, round by round, `before` and `after`."""
    each = {
        row.fix.name: {
            "changes": row.fix.changes,
            "per": row.fix.per,
            "predicted": row.predicted,
            "measured": row.measured,
            "off": row.off,
            "why": row.why,
            "before": row.before,
            "after": row.after,
        }
        for row in ablated.rows
    }
    return Run(
        "", "", metrics=ablated.metrics() | {"told": report.text(ablated.diagnosis), "each": each}
    )


def savings(run: Run) -> list[float]:
    """The measured gains of a step, of those fixes that tell."""
    each = run.metrics["each"].values()
    return [
        fix["measured"]
        for fix in each
        if fix["per"] == "step"
        and fix["measured"] is not None
        and max(fix["predicted"], fix["measured"]) >= TELLS
    ]


NAMED = "diagnosis: "
"""What the name of a loop's run begins with in a results file."""
HEAD = ("loop", "fix", "what changes", "predicted", "measured", "step off by")
"""The head of a table of `table_rows`."""


def table_rows(diagnosed: Mapping[str, Run]) -> list[tuple[str, ...]]:
    """Rows for `HEAD` of the loops' runs (`on_record`), named as the loops or `NAMED` and the loop:
    gains in percent of a step (or of a useful token) with the rounds' range, and why where there is
    none."""
    return [
        (
            start.removeprefix(NAMED),
            name,
            ", ".join(f"{knob}={value}" for knob, value in fix["changes"].items()),
            f"{fix['predicted']:.0%}" + ("" if fix["per"] == "step" else f" a {fix['per']}"),
            fix["why"] or "not here" if fix["measured"] is None else _with_range(fix),
            "" if fix["off"] is None else f"{fix['off']:+.0%}",
        )
        for start, run in diagnosed.items()
        for name, fix in run.metrics.get("each", {}).items()
    ]


def _with_range(fix: Mapping[str, Any]) -> str:
    """The gain with the rounds' range where they differ in what is shown: "48% (46 to 51)". (A
    record made before rounds were kept has none.)"""
    times = zip(fix.get("before") or (), fix.get("after") or (), strict=False)
    shown = [round(100 * (1 - after / before)) for before, after in times]  # whole numbers: no "-0"
    spread = f" ({min(shown)} to {max(shown)})" if len(set(shown)) > 1 else ""
    return f"{round(100 * fix['measured'])}%{spread}"


LOOK_HEAD = ("loop", "ranked first", "which saved", "best", "which saves", "said to pay, and paid")
"""The head of a table of `look_rows`."""


def look_rows(diagnosed: Mapping[str, Run]) -> list[tuple[str, ...]]:
    """Rows for `LOOK_HEAD` of the loops' runs, as `table_rows`: the fix that the look ranked first,
    the one that was best once all were measured, what each saved; how many were said to save
    `TELLS` or more, and how many of them did.

    Of the fixes that were measured; a loop where none was is left out.
    """
    rows = []
    for start, run in diagnosed.items():
        each = {
            name: fix
            for name, fix in run.metrics.get("each", {}).items()
            if fix["measured"] is not None
        }
        if not each:
            continue
        first, best = (
            max(each, key=lambda name, by=by: each[name][by]) for by in ("predicted", "measured")
        )
        saved = {name: f"{fix['measured']:.0%}" for name, fix in each.items()}
        promised = [fix["measured"] for fix in each.values() if fix["predicted"] >= TELLS]
        kept = f"{sum(gain >= TELLS for gain in promised)} of {len(promised)}"
        rows.append((start.removeprefix(NAMED), first, saved[first], best, saved[best], kept))
    return rows
