"""Runs side by side: a sweep, a ladder of rungs, speed over memory, utilisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from operator import truediv
from typing import TYPE_CHECKING, Any

from labutils.course.plots import layout
from labutils.course.plots.palette import AMBER, GREY, INK, LANE_MARKS, MIST, NAVY, PAPER, RUST
from labutils.course.tables import cell, heading
from labutils.results.effects import NotTestable, effect
from labutils.results.records import LANES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sweep(
    ax: Axes,
    x: Sequence[float],
    runs: Sequence[Run | None],
    published: Mapping[float, float | None] | None = None,
    model: Mapping[float, float] | None = None,
    xlabel: str = "",
    published_label: str = "article",
) -> Axes:
    """Steps' medians with p10-p90 over a knob's values `x`; None, or a run without them: failed.

    `published` (x -> ms, None: failed) is the article's curve and `model` (x -> ms) a prediction,
    both of an optimizer step.
    """
    spreads = [layout.spread(run, "step_ms") if run else None for run in runs]
    measured = {at: s for at, s in zip(x, spreads, strict=True) if s}
    published, model = published or {}, dict(sorted((model or {}).items()))
    points = {at: ms for at, ms in published.items() if ms is not None}
    if points:
        look = {"color": GREY, "markerfacecolor": PAPER, "label": published_label}
        ax.plot(*layout.xy(points), "s--", **look)
    if model:
        look = {"color": AMBER, "linewidth": 5, "alpha": 0.8, "label": "formula", "zorder": 1}
        ax.plot(*layout.xy(model), "-", **look)
    if measured:
        low, median, high = zip(*measured.values(), strict=True)
        ax.plot(list(measured), median, "o-", color=NAVY, label="measured here, p10-p90", zorder=4)
        ax.vlines(list(measured), low, high, color=NAVY, linewidth=5, alpha=0.35, zorder=3)
    highest = [spread[2] for spread in measured.values()]
    top = max([*highest, *points.values(), *model.values()], default=1.0)
    failed = {
        "here": (NAVY, 1.12 * top, [at for at in x if at not in measured]),
        published_label: (GREY, 1.02 * top, [at for at in published if at not in points]),
    }
    for whose, (color, height, places) in failed.items():
        for at in places:
            ax.plot(at, height, "x", color=color, markersize=8, markeredgewidth=2.2, zorder=4)
            layout.number(ax, f"failed ({whose})", at, height, dots=-8, ha="right")
    ax.set(ylim=(0, 1.18 * top), xticks=sorted({*x, *published}), xlabel=xlabel)
    ax.set_ylabel(layout.axis_label("step_ms"))
    layout.legend(ax, columns=3)
    return ax


def ladder(
    ax: Axes,
    rungs: Iterable[Run],
    metric: str = "step_ms",
    published: Mapping[str, float] | None = None,
    whose: str = "article",
) -> Axes:
    """A ladder from its first rung down: a dot a rung, a line from p10 to p90, a tick at its floor.

    Beside a rung stand its median and how many times as fast it is as the rung above, with the 95 %
    interval where it has one; a hollow grey dot where noise can't tell the two apart. A run that is
    another's measured again is no rung: it says how large the noise is. `published` (rung -> time)
    is `whose` ladder, of which only the same ratios are shown. Runs without the metric are left
    out; raises `ValueError` where none is left.
    """
    runs = [run for run in rungs if layout.spread(run, metric)]
    steps = [run for run in runs if not run.tags.get("again")]
    if not steps:
        raise ValueError(f"No rung of the ladder has a {metric}: there is nothing to draw.")
    lanes = list(dict.fromkeys([*LANES, *(run.lane for run in steps)]))
    steps.sort(key=lambda run: lanes.index(run.lane))
    layout.make_room(ax, len(steps) + len({run.lane for run in steps}), per_row=0.27)
    heights = [y + len({run.lane for run in steps[: y + 1]}) for y in range(len(steps))]
    said = list((published or {}).values())
    ratios = dict(zip(list(published or {})[1:], map(truediv, said, said[1:]), strict=False))
    for at, (run, y) in enumerate(zip(steps, heights, strict=True)):
        factor, apart = _against(steps[at - 1], run, runs, metric) if at else ("", True)
        _draw_rung(
            ax, y, layout.spread(run, metric), LANE_MARKS.get(run.lane, LANE_MARKS["other"]), apart
        )
        _beside(ax, y, cell(run.metric(metric)), factor, ratios.get(run.run))
    _draw_lanes(ax, steps, heights, "floor_ms" if metric == "step_ms" else "")
    _beside(ax, 0, "ms", "against rung above", whose if ratios else None, weight="bold")
    layout.rows(ax, [run.run for run in steps], heights)
    ax.set_ylim(heights[-1] + 0.7, -0.6)
    ax.set_xscale("log", subs=())
    low, high = ax.get_xlim()
    ticks = (1, 3) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
    ax.xaxis.get_major_locator().set_params(subs=ticks)
    ax.xaxis.set_major_formatter("{x:g}")
    marks = "dot: median, line: p10 to p90; hollow and grey: within the noise"
    ax.set_xlabel(f"{layout.axis_label(metric)}, logarithmic\n({marks})")
    return ax


def _against(above: Run, run: Run, runs: Sequence[Run], metric: str) -> tuple[str, bool]:
    """How many times as fast a rung is as the one above, and whether noise can tell them apart."""
    again = next((r for r in runs if r.tags.get("again") and r.comparison == run.comparison), None)
    base = next((r for r in runs if again and r.tags | {"again": True} == again.tags), None)
    try:
        one = effect(above, run, (base, again) if base and again else None, metric)
    except NotTestable:
        return f"{above.metric(metric) / run.metric(metric):.2f}x", True
    ends = "" if one.exact else f" ({1 / one.high:.2f} to {1 / one.low:.2f})"
    return f"{1 / one.value:.2f}x{ends}", one.direction != 0


def _draw_rung(ax: Axes, y: float, spread: layout.Spread, mark: tuple, apart: bool) -> None:
    """A rung's dot over its line, hollow and grey where noise can't tell it from the one above."""
    color, marker = mark if apart else (GREY, mark[1])
    ax.hlines(y, spread[0], spread[2], color=color, linewidth=3, alpha=0.5, zorder=3)
    look = {"markerfacecolor": color if apart else PAPER, "markeredgecolor": INK if apart else GREY}
    ax.plot(spread[1], y, marker, zorder=4, **look)


def _beside(
    ax: Axes, y: float, ms: str, factor: str, ratio: float | str | None, **look: Any
) -> None:
    """The columns to the right of the axes, in points from their edge."""
    published = f"{ratio:.2f}x" if isinstance(ratio, float) else ratio or ""
    for text, dots, side in ((ms, 38, "right"), (factor, 50, "left"), (published, 168, "left")):
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        place |= {"va": "center", "ha": side, "fontsize": 9, "annotation_clip": False}
        ax.annotate(text, (1, y), (dots, 0), **(place | look))


def _draw_lanes(ax: Axes, steps: Sequence[Run], heights: Sequence[float], floor: str) -> None:
    """Each lane's name above its rungs, a line between lanes, and its floors as one dashed line."""
    for lane in dict.fromkeys(run.lane for run in steps):
        own = [(run, y) for run, y in zip(steps, heights, strict=True) if run.lane == lane]
        top = own[0][1] - 1
        if top:
            ax.axhline(top - 0.5, color=GREY, linewidth=0.8, linestyle="-")
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        look = {"weight": "bold", "fontsize": 9, "va": "center", "ha": "right"}
        ax.annotate(lane, (0, top), (-7, 0), annotation_clip=False, **(place | look))
        if floors := [(run.metric(floor), y) for run, y in own if run.metric(floor)]:
            ax.plot(*zip(*floors, strict=True), "|--", color=RUST, linewidth=1, zorder=2)
            layout.number(ax, f"floor {cell(floors[-1][0])} ms", floors[0][0], top, -4, color=RUST)


def frontier(ax: Axes, runs: Iterable[Run], kind: Callable[[Run], str]) -> Axes:
    """Useful tokens a second over peak memory: a named point a run, with a mark for each `kind`.
    The x axis is logarithmic; runs without both metrics are left out."""
    metrics = ("peak_allocated_gb", "useful_tokens_per_s")
    by_kind: dict[str, list[tuple[float, float, str]]] = {}
    for run in runs:
        if run.ok and all(map(run.metric, metrics)):
            by_kind.setdefault(kind(run), []).append((*map(run.metric, metrics), run.run))
    for (name, points), mark in zip(by_kind.items(), cycle("sDov^"), strict=False):
        x, y, _ = zip(*sorted(points), strict=True)
        ax.plot(x, y, mark, label=name)
    ax.set(ylim=(0, None), xlabel=heading(metrics[0]), ylabel=heading(metrics[1]))
    ax.set_xscale("log", subs=())
    ax.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.xaxis.set_major_formatter("{x:g}")
    layout.legend(ax)
    named = {name: (x, y) for points in by_kind.values() for x, y, name in points}
    layout.name_points(ax, named, fontsize=7)
    return ax


def utilisation(
    ax: Axes, t: Sequence[float], values: Sequence[float], label: str = "GPU utilisation"
) -> Axes:
    """Utilisation over time: `t` in seconds, `values` in 0..1 from each `t` on, and the mean."""
    percent = [100 * v for v in values]
    ax.fill_between(t, percent, step="post", color=MIST, zorder=1)
    ax.step(t, percent, "-", where="post", color=NAVY, linewidth=1.4, label=label, zorder=2)
    if percent:
        mean = sum(percent) / len(percent)
        ax.axhline(mean, color=RUST, linestyle="--", label=f"mean {mean:.0f} %", zorder=3)
    ax.set(ylim=(0, 105), xlabel="s", ylabel="% of the time")
    layout.legend(ax, columns=3)
    return ax
