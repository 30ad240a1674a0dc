"""Which method for my card and my plans? Article A2's decision chart, computed from runs.

Every method that was measured at a batch size is an `Option`. Of those that fit the memory and the
tolerance, the one that ends first wins: total time = first step + steps x step time. Over the
planned steps these are straight lines. The winners form their lower envelope, and a break-even
count is where two neighbours of it cross.

    options = options_from(read_runs("results/mine"), batch=4)
    print(advise(options, vram_gb=24, steps=2000, tolerance=0.05).as_markdown())

Memory is what the allocator held at its peak; CUDA's own few hundred MB come on top.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import TYPE_CHECKING

import numpy as np

from labutils.course.plots import layout
from labutils.course.plots.palette import FILLS, GREY
from labutils.course.tables import as_table
from labutils.recipe import is_number
from labutils.results.records import Run, Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "bf16"
LAB = "06"
FORMS = ("", "compile", "compile-whole", "fixed", "fixed-whole")
WEIGHTS = ("", "fp8-te", "fp8-frozen", "qlora", "nf4")
METHODS = {"-".join(filter(None, pair)) or BASELINE: pair for pair in product(FORMS, WEIGHTS)}
"""Method -> its form (compiled, one fixed shape) and how it holds the frozen weights."""
UNCOMPILED = {"compile": "", "compile-whole": "", "fixed-whole": "fixed"}
"""Form -> the same computation without the compiler, or as one piece: the loss is the same."""
BATCHES = (1, 2, 4, 8, 16, 24)
"""The batch sizes of the article's table."""
_STEP_S = 0.99
"""The baseline's step, which is in a figure only. Both break-even counts of BF16 give it: compiling
saves (105 - 1.48) / 950 = 0.109 s, which is 11 %; fixed shapes save (106 - 1.48) / 220 = 0.475 s,
which is within 47-53 %."""
_MEMORY_GB = 7.54 / (1 - 0.53)
"""The baseline's memory, from QLoRA's 7.54 GB being 53 % less."""
PUBLISHED = {
    "bf16": (1.48, _STEP_S, _MEMORY_GB, 9.05),
    "fp8-te": (1.41, _STEP_S * (1 - 0.04), _MEMORY_GB, 10.36),
    "compile": (105, _STEP_S - (105 - 1.48) / 950, _MEMORY_GB, 9.05),
    "compile-fp8-te": (61, _STEP_S * (1 - 0.02), _MEMORY_GB, 10.36),
    "fixed": (106, _STEP_S - (106 - 1.48) / 220, _MEMORY_GB * (1 - 0.04), 9.23),
    "fixed-fp8-te": (57, _STEP_S - (57 - 1.48) / 135, _MEMORY_GB * (1 - 0.04), 10.51),
    "qlora": (1.69, _STEP_S * (1 + 0.15), 7.54, 8.88),
}
"""The article's table at batch 1: seconds of the first and of a later step, GB at the peak, loss at
step 10. Of ranges over batch sizes it has the end nearer to no change, where batch 1 lies by the
article's account. Losses of compiled runs are those of the same arithmetic."""
BREAK_EVENS = (135, 220)
"""Steps after which fixed shapes with FP8, and those without, have caught up with the baseline at
batch 1."""


@dataclass(frozen=True)
class Option:
    """One method at one batch size; times in seconds, memory in 10^9 bytes.

    `loss_change` is its loss against the baseline's (0.14: 14 % higher), None where it is unknown.
    Raises `ValueError` for numbers that no measurement gives.
    """

    method: str
    first_step_s: float
    step_s: float
    memory_gb: float
    loss_change: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.first_step_s, self.step_s, self.memory_gb)
        known = self.loss_change is None or is_number(self.loss_change)
        if not (known and all(is_number(number) and number >= 0 for number in numbers)):
            raise ValueError(f"{self}: times and memory must be 0 or more, and finite.")

    def total_s(self, steps: float) -> float:
        """Seconds for the first step and `steps` later ones."""
        return self.first_step_s + steps * self.step_s

    def obstacle(self, vram_gb: float, tolerance: float | None) -> str:
        """Why this option is out of the question; "" where it isn't."""
        if self.memory_gb > vram_gb:
            return f"needs {self.memory_gb:.3g} GB"
        if tolerance is None:
            return ""
        if self.loss_change is None:
            return "loss not measured"
        return f"loss {100 * self.loss_change:+.0f} %" if self.loss_change > tolerance else ""


@dataclass(frozen=True)
class Reach:
    """A stretch of planned steps and the option that ends first there; the last has no end."""

    start: float
    until: float
    option: Option


@dataclass(frozen=True)
class Advice:
    """The answer for one card and one plan.

    `ranking` holds what fits, the quickest first; `excluded` the rest, with why; `reaches` who
    would win at other numbers of steps.
    """

    steps: int
    ranking: tuple[Option, ...]
    excluded: tuple[tuple[Option, str], ...]
    reaches: tuple[Reach, ...]

    @property
    def winner(self) -> Option:
        return self.ranking[0]

    def as_markdown(self) -> str:
        """The ranking, what was left out and why, and the break-even counts."""
        head = ("method", "first step, s", "step, s", "memory, GB", "loss", "in all, min")
        fits = [(option, option.total_s(self.steps) / 60) for option in self.ranking]
        rows = []
        for option, outcome in (*fits, *self.excluded):
            loss = None if option.loss_change is None else f"{100 * option.loss_change:+.1f} %"
            name = f"**{option.method}**" if option == self.winner else option.method
            numbers = (option.first_step_s, option.step_s, option.memory_gb)
            rows.append((name, *numbers, loss, outcome))
        ends = ["" if math.isinf(r.until) else f" up to {r.until:,.0f}" for r in self.reaches]
        shown = [r.option.method + end for r, end in zip(self.reaches, ends, strict=True)]
        return f"{as_table(head, *rows)}\n\nOver the planned steps: {', then '.join(shown)}."


def options_from(runs: Runs, batch: int) -> list[Option]:
    """The options that lab 06 measured at this batch size; failed runs are passed over.

    Raises `ValueError` where there is none.
    """
    cells = runs.select(LAB, experiment="methods", batch=batch, again=False)
    losses = {run.tags["method"]: run for run in runs.select(LAB, experiment="loss")}
    options = [option for run in cells if (option := _option(run, losses))]
    if not options:
        sizes = {run.tags["batch"] for run in runs.select(LAB, experiment="methods") if run.ok}
        there = f" There are batch sizes {', '.join(map(str, sorted(sizes)))}." if sizes else ""
        raise ValueError(
            f"No method has time and memory on record at batch={batch!r}.{there} Measure them on a "
            f"GPU: labutils run {LAB}"
        )
    return options


def _option(run: Run, losses: dict[str, Run]) -> Option | None:
    """The run as an option, None where it failed or lacks a number."""
    numbers = [run.metric(metric) for metric in ("first_step_s", "step_ms", "peak_allocated_gb")]
    if not run.ok or not all(is_number(number) and number > 0 for number in numbers):
        return None
    first_step_s, step_ms, memory_gb = numbers
    method = run.tags["method"]
    form, weights = METHODS.get(method, (method, ""))
    same = "-".join(filter(None, (UNCOMPILED.get(form, form), weights))) or BASELINE
    change = 0.0 if same == BASELINE else _loss_change(losses.get(same), losses.get(BASELINE))
    return Option(method, first_step_s, step_ms / 1e3, memory_gb, change)


def _loss_change(run: Run | None, base: Run | None) -> float | None:
    """The loss against the baseline's: the median over seeds of the ratio, less 1."""
    seeds = [one.samples.get("final_loss", []) if one else [] for one in (run, base)]
    if not seeds[0] or len(seeds[0]) != len(seeds[1]):
        return None
    change = float(np.median(np.divide(*seeds))) - 1
    return change if math.isfinite(change) else None


def published() -> list[Option]:
    """The article's own table at batch 1 as options."""
    base = PUBLISHED[BASELINE][-1]
    return [Option(method, *row, loss / base - 1) for method, (*row, loss) in PUBLISHED.items()]


def advise(
    options: Iterable[Option], vram_gb: float, steps: int, tolerance: float | None = None
) -> Advice:
    """The option that ends first among those that fit into `vram_gb` and whose loss is at most
    `tolerance` higher.

    tolerance: a share (0.05), or None where any loss will do; with one, options whose loss is
    unknown are left out. Raises `ValueError` where `vram_gb`, `steps` or `tolerance` can't be, and
    where nothing is left.
    """
    options = list(options)
    if not all(is_number(given) and given > 0 for given in (vram_gb, steps)):
        raise ValueError(f"vram_gb={vram_gb!r}, steps={steps!r}: both must be numbers above 0.")
    if tolerance is not None and not is_number(tolerance):
        raise ValueError(f"tolerance={tolerance!r} is no share. Write 0.05 for 5 %, or None.")
    why = {option: option.obstacle(vram_gb, tolerance) for option in options}
    fitting = [option for option in options if not why[option]]
    if not fitting:
        reasons = "; ".join(f"{option.method}: {reason}" for option, reason in why.items())
        raise ValueError(
            f"No measured method fits into {vram_gb:g} GB within this tolerance ({reasons}). "
            "Choose a smaller batch size or model, or allow a larger loss."
        )
    ranking = sorted(fitting, key=lambda option: option.total_s(steps))
    excluded = tuple((option, reason) for option, reason in why.items() if reason)
    return Advice(steps, tuple(ranking), excluded, tuple(envelope(fitting)))


def guide(options: Iterable[Option]) -> dict[str, str]:
    """Whom the article's decision chart names, asked of `options` of its methods: winners by name.

    "short_of_memory": with as much memory as the leanest needs; "few_steps": 100; "many_steps":
    10,000; "between": halfway between the steps after which fixed shapes with FP8 and those without
    have caught up with BF16, or where one of them never has, between the article's own counts. What
    can't be asked, as the method that the article names was not measured, is absent.
    """
    known = {option.method: option for option in options if option.method in PUBLISHED}
    winners = {}
    if "qlora" in known:
        leanest = min(known.values(), key=lambda option: option.memory_gb)
        winners["short_of_memory"] = leanest.method
    plans = {"few_steps": ("fp8-te", 100.0), "many_steps": ("fixed", 10_000.0)}
    if {BASELINE, "fixed", "fixed-fp8-te"} <= known.keys():
        evens = [break_even(known[BASELINE], known[name]) for name in ("fixed-fp8-te", "fixed")]
        pay = all(even is not None and even > 0 for even in evens)
        plans["between"] = ("fixed", sum(evens if pay else BREAK_EVENS) / 2)
    for question, (named, steps) in plans.items():
        if named in known:
            first = min(known.values(), key=lambda option: option.total_s(steps))
            winners[question] = first.method
    return winners


def envelope(options: Iterable[Option]) -> list[Reach]:
    """Who ends first from no step to infinitely many: the lower envelope of the total times."""
    options = list(options)
    if not options:
        return []
    current = min(options, key=lambda option: (option.first_step_s, option.step_s))
    start, reaches = 0.0, []
    while quicker := [option for option in options if option.step_s < current.step_s]:
        following = min(quicker, key=lambda option: (break_even(current, option), option.step_s))
        until = break_even(current, following)
        if until > start:
            reaches.append(Reach(start, until, current))
        start, current = until, following
    return [*reaches, Reach(start, math.inf, current)]


def paid_after(base: Run, run: Run) -> float | None:
    """Steps after which `run` has caught up with `base`, first steps counted in; None where it
    never does or one failed."""
    if not (base.ok and run.ok):
        return None
    times = [(each.metric("first_step_s"), each.metric("step_ms") / 1e3) for each in (base, run)]
    return break_even(*(Option("", *time, 0) for time in times))


def break_even(quick_start: Option, quick_step: Option) -> float | None:
    """Steps after which `quick_step` has caught up; None where its steps are no shorter."""
    saved_s = quick_start.step_s - quick_step.step_s
    return (quick_step.first_step_s - quick_start.first_step_s) / saved_s if saved_s > 0 else None


def chart(options: Iterable[Option]) -> list[tuple[float, float, list[Reach]]]:
    """Who wins over memory and steps: bands of memory (from, to, in GB), in each the winners.

    A band begins where one more option fits; the last one has no end.
    """
    able = list(options)
    bands: list[tuple[float, float, list[Reach]]] = []
    for low, high in itertools.pairwise([*sorted({o.memory_gb for o in able}), math.inf]):
        reaches = envelope(option for option in able if option.memory_gb <= low)
        if bands and [r.option for r in bands[-1][2]] == [r.option for r in reaches]:
            low = bands.pop()[0]
        bands.append((low, high, reaches))
    return bands


def choices(
    ax: Axes,
    bands: Sequence[tuple[float, float, Sequence[Reach]]],
    most_steps: float = 1e5,
    most_gb: float | None = None,
) -> Axes:
    """Who ends first, over planned steps and memory: the `bands` of `chart` as fields.

    Below the first band nothing fits. Raises `ValueError` where there is no band.
    """
    if not bands:
        raise ValueError("There is no band of memory in which anything fits: nothing to draw.")
    methods = dict.fromkeys(reach.option.method for _, _, reaches in bands for reach in reaches)
    fills = dict(zip(methods, cycle(FILLS), strict=False))
    top = most_gb or 1.35 * bands[-1][0]
    for low, high, reaches in bands:
        for reach in reaches:
            start, until = max(1.0, reach.start), min(reach.until, most_steps)
            if until > start:
                look = layout.look(fills[reach.option.method]) | {"left": start, "align": "edge"}
                ax.barh(low, until - start, height=min(high, top) - low, **look)
    look = {"va": "center", "fontsize": 9, "color": GREY, "style": "italic"}
    ax.text(1.3, bands[0][0] / 2, "nothing fits", **look)
    ax.set(xscale="log", xlim=(1, most_steps), ylim=(0, top), ylabel="memory, GB")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(visible=False)
    ax.set_xlabel("planned optimizer steps, logarithmic")
    layout.fill_legend(ax, fills)
    return ax
