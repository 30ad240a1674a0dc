"""Which method for my card and my plans? Article A2's decision chart, computed from runs instead of
drawn.

Every method that was measured at a batch size is an `Option`: the time of its first step
(compilation included) and of a later one, the memory at its peak, and how far its loss lies from
BF16's. Of those that fit the memory and the tolerance, the one that ends first wins: total time =
first step + steps x step time. Over the planned steps these are straight lines, so the winners form
an envelope, and a break-even count is where two neighbours of it cross.

    options = options_from(read_runs("results/mine"), batch=4)
    print(advise(options, vram_gb=24, steps=2000, tolerance=0.05).as_markdown())

What this leaves out: memory is what the allocator held at its peak, and CUDA's own few hundred MB
come on top; a loss after a few steps says little about a model trained to its end.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import FILLS, GREY
from labutils.recipe import is_number
from labutils.results.records import Run

BASELINE = "bf16"
LAB = "06"

Runs = Mapping[tuple[str, str], Run]

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    Raises `ValueError` for numbers that no measurement gives: they would win every comparison, or
    none.
    """

    method: str
    first_step_s: float
    step_s: float
    memory_gb: float
    loss_change: float | None = None

    def __post_init__(self) -> None:
        measured = (self.first_step_s, self.step_s, self.memory_gb)
        known = self.loss_change is None or is_number(self.loss_change)
        if not (known and all(is_number(number) and number >= 0 for number in measured)):
            raise ValueError(
                f"{self} can't have been measured: times and memory are 0 or more, and an unknown "
                "change of "
                "loss is None."
            )

    def total_s(self, steps: float) -> float:
        """Seconds for the first step and `steps` later ones."""
        return self.first_step_s + steps * self.step_s


@dataclass(frozen=True)
class Reach:
    """A stretch of planned steps and the option that ends first there; `until` is infinity for the
    last one.
    """

    start: float
    until: float
    option: Option


@dataclass(frozen=True)
class Advice:
    """The answer for one card and one plan. `ranking` holds what fits, the quickest first;
    `excluded` the rest, with why; `reaches` who would win at other numbers of steps."""

    steps: int
    ranking: tuple[Option, ...]
    excluded: tuple[tuple[Option, str], ...]
    reaches: tuple[Reach, ...]

    @property
    def winner(self) -> Option:
        return self.ranking[0]

    def as_markdown(self) -> str:
        """The ranking, what was left out and why, and the break-even counts, as tables."""
        rows = [
            "| method | first step, s | step, s | memory, GB | loss | in all |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for option in self.ranking:
            name = f"**{option.method}**" if option == self.winner else option.method
            rows.append(f"| {name} | {_cells(option)} | {_clock(option.total_s(self.steps))} |")
        rows += [
            f"| {option.method} | {_cells(option)} | – ({why}) |" for option, why in self.excluded
        ]
        shown = ", then ".join(_stretch(reach) for reach in self.reaches)
        return "\n".join([*rows, "", f"Over the planned steps: {shown}."])


def options_from(runs: Runs, batch: int, methods: Iterable[str] | None = None) -> list[Option]:
    """The options that lab 06 measured at this batch size, all or those of `methods`; failed runs
    are passed over.

    Raises `ValueError` where there is none, naming the batch sizes that there are, and for what is
    no batch size.
    """
    if not is_number(batch) or batch < 1 or batch != int(batch):
        raise ValueError(f"batch={batch!r} is no batch size. Write a whole number, for example 1.")
    named = {
        found[1]: run
        for (lab, name), run in runs.items()
        if lab == LAB and (found := _cell(name, batch))
    }
    wanted = None if methods is None else set(methods)
    options = [
        _option(method, run, runs)
        for method, run in named.items()
        if wanted is None or method in wanted
    ]
    found = [option for option in options if option is not None]
    if not found:
        cells = {key: cell for key, _ in runs.items() if key[0] == LAB and (cell := _cell(key[1]))}
        known = sorted(
            {int(cell[2]) for key, cell in cells.items() if _option(cell[1], runs[key], runs)}
        )
        there = (
            f"There are runs of batch sizes {', '.join(map(str, known))}: choose one of those, or m"
            if known
            else "M"
        )
        raise ValueError(
            f"No method has time and memory on record at batch size {batch}, so there is nothing "
            "to choose from. "
            f"{there}easure it on a GPU: labutils run {LAB}"
        )
    return found


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
    unknown are left out. Raises `ValueError` where `vram_gb` or `steps` can't be, and where nothing
    is left, saying what would be.
    """
    options = list(options)
    if not all(is_number(given) and given > 0 for given in (vram_gb, steps)):
        raise ValueError(
            f"vram_gb={vram_gb!r} and steps={steps!r}: both must be numbers above 0. For example: "
            "24 and 1000."
        )
    if tolerance is not None and not is_number(tolerance):
        raise ValueError(
            f"tolerance={tolerance!r} is no share. Write 0.05 for 5 %, or None where any loss will "
            "do."
        )
    excluded = [
        (option, why) for option in options if (why := _obstacle(option, vram_gb, tolerance))
    ]
    fitting = [option for option in options if option not in [left_out for left_out, _ in excluded]]
    if not fitting:
        raise ValueError(_nothing_fits(options, vram_gb, tolerance))
    ranking = sorted(fitting, key=lambda option: option.total_s(steps))
    return Advice(steps, tuple(ranking), tuple(excluded), tuple(envelope(fitting)))


def guide(options: Iterable[Option]) -> dict[str, str]:
    """Whom the article's decision chart names, asked of `options` of its methods: winners by name.

    "short_of_memory": with as much memory as the leanest needs; "few_steps": 100; "many_steps": 10
    000; "between": halfway between the steps after which fixed shapes with FP8 and those without
    have caught up with BF16, or where one of them never has, between the article's own counts. What
    can't be asked, as the method that the article names was not measured, is absent.
    """
    known = {option.method: option for option in options if option.method in PUBLISHED}
    found = {}
    if "qlora" in known:
        found["short_of_memory"] = min(known.values(), key=lambda option: option.memory_gb).method
    if "fp8-te" in known:
        found["few_steps"] = advise(known.values(), 1e6, 100).winner.method
    if "fixed" in known:
        found["many_steps"] = advise(known.values(), 1e6, 10_000).winner.method
    if {BASELINE, "fixed", "fixed-fp8-te"} <= known.keys():
        evens = [break_even(known[BASELINE], known[name]) for name in ("fixed-fp8-te", "fixed")]
        pay = all(even is not None and even > 0 for even in evens)
        found["between"] = advise(
            known.values(), 1e6, sum(evens if pay else BREAK_EVENS) / 2
        ).winner.method
    return found


def envelope(options: Iterable[Option]) -> list[Reach]:
    """Who ends first from no step to infinitely many: the lower envelope of the lines of total
    time.

    Of options that are alike in both times the first one stands for all. [] where there are none.
    """
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


def break_even(quick_start: Option, quick_step: Option) -> float | None:
    """Steps after which `quick_step` has caught up; None where its steps are no shorter, so that it
    never does.
    """
    saved_s = quick_start.step_s - quick_step.step_s
    return (quick_step.first_step_s - quick_start.first_step_s) / saved_s if saved_s > 0 else None


def chart(
    options: Iterable[Option], tolerance: float | None = None
) -> list[tuple[float, float, list[Reach]]]:
    """Who wins over memory and steps: bands of memory (from, to, in GB) and in each the winners
    over the steps.

    A band begins where one more option fits; the last one has no end. [] where nothing is within
    the tolerance.
    """
    able = [option for option in options if not _obstacle(option, math.inf, tolerance)]
    needs = sorted({option.memory_gb for option in able})
    bands = []
    for low, high in itertools.pairwise([*needs, math.inf]):
        reaches = envelope(option for option in able if option.memory_gb <= low)
        if bands and [r.option for r in bands[-1][2]] == [r.option for r in reaches]:
            low = bands.pop()[0]
        bands.append((low, high, reaches))
    return bands


# ---------------------------------------------------------------------------------------- helpers


def _cell(name: str, batch: int | None = None) -> re.Match[str] | None:
    """A run's name as (method, batch size), where it is a cell of the article's table."""
    found = re.fullmatch(r"([a-z0-9-]+) b(\d{1,9})", name)
    return found if found and batch in (None, int(found[2])) else None


def _option(method: str, run: Run, runs: Runs) -> Option | None:
    """The run as an option, None where it failed or lacks a number."""
    numbers = [run.metric(metric) for metric in ("first_step_s", "step_ms", "peak_allocated_gb")]
    if not run.ok or not all(is_number(number) and number > 0 for number in numbers):
        return None
    first_step_s, step_ms, memory_gb = numbers
    return Option(method, first_step_s, step_ms / 1e3, memory_gb, _loss_change(method, runs))


def _loss_change(method: str, runs: Runs) -> float | None:
    """The method's loss against the baseline's, seed by seed where seeds are on record. Compiling
    changes no arithmetic, so it inherits the loss."""
    same = method.replace("-whole", "")
    same = BASELINE if same == "compile" else same.removeprefix("compile-")
    trained = [run for name in (same, BASELINE) if (run := runs.get((LAB, f"loss {name}")))]
    losses = [run.metric("final_loss") for run in trained]
    if len(losses) < 2 or not all(is_number(loss) and loss > 0 for loss in losses):
        return 0.0 if same == BASELINE else None
    seeds = [run.samples.get("final_loss", []) for run in trained]
    if len(seeds[0]) != len(seeds[1]) or not seeds[0]:
        return losses[0] / losses[1] - 1
    return statistics.median(mine / theirs for mine, theirs in zip(*seeds, strict=True)) - 1


def _obstacle(option: Option, vram_gb: float, tolerance: float | None) -> str:
    """Why an option is out of the question; "" where it isn't."""
    if option.memory_gb > vram_gb:
        return f"needs {option.memory_gb:.3g} GB"
    if tolerance is None:
        return ""
    if option.loss_change is None:
        return "loss not measured"
    return f"loss {100 * option.loss_change:+.0f} %" if option.loss_change > tolerance else ""


def _nothing_fits(options: list[Option], vram_gb: float, tolerance: float | None) -> str:
    """What was found, what it means and what to do, where no option is left."""
    if not options:
        return "There are no options to choose from: measure some, labutils run 06."
    leanest = min(options, key=lambda option: option.memory_gb)
    if leanest.memory_gb > vram_gb:
        return (
            f"None of the {len(options)} measured methods fits into {vram_gb:g} GB: even "
            f"{leanest.method} needs "
            f"{leanest.memory_gb:.3g} GB. Choose a smaller batch size, fewer tokens an image or a "
            "smaller model."
        )
    within = [option for option in options if not _obstacle(option, math.inf, tolerance)]
    if not within:
        return (
            f"No measured method keeps its loss within {100 * tolerance:g} % of {BASELINE}'s. "
            "Allow more, or measure "
            "the losses of those whose loss is unknown: labutils run 06"
        )
    least = min(within, key=lambda option: option.memory_gb)
    return (
        f"Within {100 * tolerance:g} % of {BASELINE}'s loss nothing fits into {vram_gb:g} GB: "
        f"{least.method} comes "
        f"nearest and needs {least.memory_gb:.3g} GB. Allow a larger loss, or choose a smaller "
        "batch size."
    )


def _cells(option: Option) -> str:
    change = "?" if option.loss_change is None else f"{100 * option.loss_change:+.1f} %"
    return f"{option.first_step_s:.3g} | {option.step_s:.3g} | {option.memory_gb:.3g} | {change}"


def _clock(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _stretch(reach: Reach) -> str:
    return reach.option.method + ("" if math.isinf(reach.until) else f" up to {reach.until:,.0f}")


def choices(
    ax: Axes,
    bands: Sequence[tuple[float, float, Sequence[Reach]]],
    most_steps: float = 1e5,
    most_gb: float | None = None,
) -> Axes:
    """Who ends first, over planned steps (logarithmic) and memory: the `bands` of `advisor.chart`
    as fields.

    Below the first band nothing fits. Raises `ValueError` where there is no band.
    """
    if not bands:
        raise ValueError(
            "There is no band of memory in which anything fits: there is nothing to draw."
        )
    methods = list(
        dict.fromkeys(reach.option.method for _, _, reaches in bands for reach in reaches)
    )
    fills = dict(zip(methods, islice(cycle(FILLS), len(methods)), strict=True))
    top = most_gb or 1.35 * bands[-1][0]
    for low, high, reaches in bands:
        for reach in reaches:
            start, until = max(1.0, reach.start), min(reach.until, most_steps)
            if until > start:
                height, look = min(high, top) - low, layout.look(fills[reach.option.method])
                ax.barh(low, until - start, left=start, height=height, align="edge", lw=0.7, **look)
    ax.text(
        1.3, bands[0][0] / 2, "nothing fits", va="center", fontsize=9, color=GREY, style="italic"
    )
    ax.set_xscale("log")
    ax.set_xlim(1, most_steps)
    ax.set_ylim(0, top)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(visible=False)
    ax.set_xlabel("planned optimizer steps, logarithmic")
    ax.set_ylabel("memory, GB")
    layout.fill_legend(ax, fills)
    return ax
