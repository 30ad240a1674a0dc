"""Runs side by side: their steps, a sweep, a ladder of rungs, differences, utilisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import AMBER, GREY, INK, LANE_FILLS, MIST, NAVY, PAPER, RUST
from labutils.course.tables import cell
from labutils.results.records import LANES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def steps(ax: Axes, runs: Mapping[str, Run], metric: str = "step_ms") -> Axes:
    """One row a run: a dot a sample, a bar from p10 to p90, a line at the median with its number.

    A run without the metric gets a row that says why. `metric` is a time in milliseconds.
    """
    layout.make_room(ax, len(runs), per_row=0.42)
    spreads = [layout.spread(run, metric) for run in runs.values()]
    samples = [run.samples.get(metric, []) for run in runs.values()]
    ends = [
        max([spread[2], *dots]) for spread, dots in zip(spreads, samples, strict=True) if spread
    ]
    widest = max(ends, default=1.0)
    for row, run in enumerate(runs.values()):
        if spreads[row] is None:
            look = {"color": GREY, "style": "italic"}
            layout.number(ax, layout.status(run), 0.02 * widest, row, dots=0, **look)
            continue
        low, median, high = spreads[row]
        ax.barh(row, high - low, 0.55, left=low, color=MIST, edgecolor=INK, linewidth=0.8, zorder=2)
        heights = [row + offset for offset in layout.jitter(len(samples[row]))]
        ax.scatter(samples[row], heights, s=9, color=NAVY, alpha=0.6, linewidth=0, zorder=3)
        ax.vlines(median, row - 0.34, row + 0.34, color=RUST, linewidth=2.4, zorder=4)
        end = max([high, *samples[row]])
        layout.number(ax, f"{cell(median)} ms", end, row)
    layout.rows(ax, list(runs))
    ax.set_xlim(0, 1.22 * widest)
    ax.set_xlabel(f"{layout.axis_label(metric)} (line: median, bar: p10-p90, dots: samples)")
    return ax


def sweep(
    ax: Axes,
    x: Sequence[float],
    runs: Sequence[Run | None],
    published: Mapping[float, float | None] | None = None,
    model: Mapping[float, float] | None = None,
    xlabel: str = "",
    metric: str = "step_ms",
    published_label: str = "article",
) -> Axes:
    """Medians with p10-p90 over a knob's values `x`; None, or a run without the metric: failed.

    `published` (x -> ms, None: failed) is the article's curve and `model` (x -> ms) a prediction,
    both in the units of `metric`.
    """
    spreads = [layout.spread(run, metric) if run else None for run in runs]
    measured = {at: s for at, s in zip(x, spreads, strict=True) if s}
    published, model = published or {}, dict(sorted((model or {}).items()))
    points = {at: ms for at, ms in published.items() if ms is not None}
    if points:
        look = {"color": GREY, "markerfacecolor": PAPER, "label": published_label}
        ax.plot(*layout.xy(points), "s--", **look)
    if model:
        ax.plot(
            *layout.xy(model), "-", color=AMBER, linewidth=5, alpha=0.8, label="model", zorder=1
        )
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
    ax.set_ylabel(layout.axis_label(metric))
    layout.legend(ax, columns=3)
    return ax


def waterfall(
    ax: Axes,
    rungs: Iterable[Run],
    floor_ms: float | None,
    published: Mapping[str, float] | None = None,
    log: bool = True,
    published_label: str = "published, another machine",
    metric: str = "step_ms",
) -> Axes:
    """The ladder as horizontal bars, from the stock loop down to the floor, the lanes set apart.

    Each bar is a rung's median step (or another time, `metric`) with its p10-p90 range, its number,
    and its speed-up over the first rung. `published` (rung -> ms) comes first, in a block of its
    own, with speed-ups over its own first rung. `floor_ms` is what the hardware allows. Runs
    without the metric are left out; raises `ValueError` where none is left. On a logarithmic axis
    read the ends of the bars: their lengths mean nothing.
    """
    blocks = {published_label: {name: (ms, ms, ms) for name, ms in (published or {}).items()}}
    blocks |= {f"lane: {lane}": {} for lane in LANES}
    for run in rungs:
        if spread := layout.spread(run, metric):
            blocks.setdefault(f"lane: {run.lane}", {})[run.run] = spread
    blocks = {title: spreads for title, spreads in blocks.items() if spreads}
    every = [spread for spreads in blocks.values() for spread in spreads.values()]
    if not every:
        raise ValueError(f"No rung of the ladder has a {metric}: there is nothing to draw.")
    layout.make_room(ax, len(every) + 0.7 * len(blocks), per_row=0.27)
    times = [median for _, median, _ in every]
    left = 0.6 * min([*times, floor_ms or times[0]]) if log else 0.0
    labels = _draw_blocks(ax, blocks, published_label, left)
    ax.set_yticks(list(labels), list(labels.values()))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    widest = max(high for _, _, high in every)
    ax.set_xlim(left, max((2.6 if log else 1.3) * max(times), (2.2 if log else 1.25) * widest))
    scale = ", logarithmic" if log else ""
    ax.set_xlabel(f"{layout.axis_label(metric)}{scale} (bar: median, line: p10-p90)")
    if floor_ms:
        ax.axvline(floor_ms, color=RUST, linestyle="--", path_effects=layout.white_edge(), zorder=5)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        text = f"floor {cell(floor_ms)} ms"
        ax.annotate(text, (floor_ms, 1), (3, 3), color=RUST, fontsize=9, **place)
    return ax


def _draw_blocks(
    ax: Axes, blocks: Mapping[str, Mapping[str, layout.Spread]], published: str, left: float
) -> dict[float, str]:
    """Draw a waterfall's blocks from the top down; height -> name of each bar."""
    at, labels = 0.0, {}
    measured = [spreads for title, spreads in blocks.items() if title != published]
    stock = next(iter(measured[0].values()))[1] if measured else 0.0
    for title, spreads in blocks.items():
        if at:
            ax.axhline(at - 0.95, color=GREY, linewidth=0.8, linestyle="-")
        place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center"}
        ax.text(1.0, at - 0.55, title, fontsize=9, weight="bold", color=INK, **place)
        first = next(iter(spreads.values()))[1] if title == published else stock
        lane = title.removeprefix("lane: ")
        fill = (PAPER, "\\\\\\") if title == published else LANE_FILLS.get(lane, (GREY, ""))
        for name, (low, median, high) in spreads.items():
            ax.barh(at, median - left, 0.72, left=left, **layout.look(fill))
            if high > low:
                edge = layout.white_edge(2)
                ax.hlines(at, low, high, color=RUST, linewidth=2, path_effects=edge, zorder=4)
            speedup = "" if median == first else f"   {first / median:.2f}x"
            layout.number(ax, f"{cell(median)}{speedup}", max(high, median), at)
            labels[at] = name
            at += 1
        at += 0.7
    ax.set_ylim(at - 0.9, -0.95)
    return labels


def differences(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    band: tuple[float, float],
    band_label: str,
    xlabel: str,
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> Axes:
    """One row a name, a dot a difference, and behind them the `band` that they are held against.

    ranges: label -> name -> the ends of a line through the name's dots, where there is one.
    """
    layout.make_room(ax, len(series), per_row=0.36)
    ax.axvspan(*band, color=MIST, label=band_label, zorder=1)
    ax.axvline(0, color=INK, linestyle="-", linewidth=0.8, zorder=2)
    for row, values in enumerate(series.values()):
        heights = [row + 0.4 * offset for offset in layout.jitter(len(values))]
        ax.scatter(values, heights, s=26, color=NAVY, linewidth=0, zorder=3)
    for label, lines in (ranges or {}).items():
        heights = [list(series).index(name) + 0.4 * layout.jitter(1)[0] for name in lines]
        if lines:
            lows, highs = zip(*lines.values(), strict=True)
            ax.hlines(heights, lows, highs, color=RUST, linewidth=2.2, label=label, zorder=2.5)
    layout.rows(ax, list(series))
    ax.set_xlabel(xlabel)
    layout.legend(ax)
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
