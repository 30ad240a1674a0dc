"""Runs side by side: their steps, a ladder of rungs, a sweep, losses, utilisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from labutils.course.plots import layout
from labutils.course.plots.layout import Spread
from labutils.course.plots.palette import (
    AMBER,
    GREY,
    INK,
    LANE_FILLS,
    MIST,
    NAVY,
    PAPER,
    RUST,
    Fill,
)
from labutils.results.records import LANES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def steps(ax: Axes, runs: Mapping[str, Run] | Iterable[Run], metric: str = "step_ms") -> Axes:
    """One row a run: every sample as a dot, the p10-p90 range as a bar, the median as a line with
    its number.

    Runs without the metric get an empty row that says why. `metric` is a time in milliseconds.
    """
    named = layout.named(runs)
    layout.make_room(ax, len(named), per_row=0.42)
    widest = max(
        (layout.spread(run, metric)[2] for run in named.values() if layout.spread(run, metric)),
        default=1.0,
    )
    for row, run in enumerate(named.values()):
        spread = layout.spread(run, metric)
        if spread is None:
            ax.text(
                0.02 * widest,
                row,
                layout.status(run),
                va="center",
                fontsize=9,
                color=GREY,
                style="italic",
            )
            continue
        low, median, high = spread
        ax.barh(
            row,
            high - low,
            left=low,
            height=0.55,
            color=MIST,
            edgecolor=INK,
            linewidth=0.8,
            zorder=2,
        )
        samples = run.samples.get(metric, [])
        beside = [row + layout.jitter(i) for i in range(len(samples))]
        ax.scatter(samples, beside, s=9, color=NAVY, alpha=0.6, lw=0, zorder=3)
        ax.plot(
            [median, median],
            [row - 0.34, row + 0.34],
            color=RUST,
            linestyle="-",
            linewidth=2.4,
            zorder=4,
        )
        ax.annotate(
            f"{layout.figure(median)} ms",
            (max([high, *samples]), row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    layout.rows(ax, list(named))
    ax.set_xlim(
        0, 1.22 * max([widest, *(s for run in named.values() for s in run.samples.get(metric, []))])
    )
    ax.set_xlabel(f"{layout.quantity(metric)} (line: median, bar: p10-p90, dots: samples)")
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
    """Medians with p10-p90 over a knob's values `x`; `None`, or a run without the metric, is marked
    as failed.

    `published` (x -> ms, None: failed) is the article's curve and `model` (x -> ms) a prediction,
    both in the units of `metric`: scale what was measured in others before.
    """
    spreads = {
        at: layout.spread(run, metric) if run is not None else None
        for at, run in zip(x, runs, strict=True)
    }
    measured = {at: s for at, s in spreads.items() if s}
    if published:
        points = {at: ms for at, ms in published.items() if ms is not None}
        ax.plot(
            *layout.columns(points),
            color=GREY,
            linestyle="--",
            marker="s",
            markerfacecolor=PAPER,
            label=published_label,
            zorder=2,
        )
    if model:
        ax.plot(
            *layout.columns(dict(sorted(model.items()))),
            color=AMBER,
            linestyle="-",
            linewidth=5,
            alpha=0.8,
            label="model",
            zorder=1,
        )
    if measured:
        low, median, high = zip(*measured.values(), strict=True)
        ax.plot(
            list(measured),
            median,
            color=NAVY,
            linestyle="-",
            marker="o",
            label="measured here, p10-p90",
            zorder=4,
        )
        ax.vlines(list(measured), low, high, color=NAVY, linewidth=5, alpha=0.35, zorder=3)
    top = max(
        [
            *(s[2] for s in measured.values()),
            *(v for v in (published or {}).values() if v),
            *(model or {}).values(),
        ],
        default=1.0,
    )
    ax.set_ylim(0, 1.18 * top)
    _mark_failures(ax, [at for at in x if at not in measured], NAVY, "here", 1.12 * top)
    _mark_failures(
        ax,
        [at for at, ms in (published or {}).items() if ms is None],
        GREY,
        published_label,
        1.02 * top,
    )
    ax.set_xticks(sorted({*x, *(published or {})}))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(layout.quantity(metric))
    if measured or published or model:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def _mark_failures(ax: Axes, at: Sequence[float], color: str, whose: str, height: float) -> None:
    """A cross where a run failed, with the word beside it."""
    ax.plot(
        at,
        [height] * len(at),
        color=color,
        linestyle="",
        marker="x",
        markersize=8,
        markeredgewidth=2.2,
        zorder=4,
    )
    for x in at:
        ax.annotate(
            f"failed ({whose})",
            (x, height),
            (-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
        )


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
    blocks = _published_block(published_label, published or {}) + _lane_blocks(rungs, metric)
    times = [spread[1] for block in blocks for _, spread in block.rows]
    widest = max((spread[2] for block in blocks for _, spread in block.rows), default=0.0)
    if not times:
        raise ValueError(f"No rung of the ladder has a {metric}: there is nothing to draw.")
    layout.make_room(ax, len(times) + 0.7 * len(blocks), per_row=0.27)
    left = 0.6 * min([*times, floor_ms or times[0]]) if log else 0.0
    at, places = 0.0, {}
    for block in blocks:
        if at:
            ax.axhline(at - 0.95, color=GREY, linewidth=0.8, linestyle="-")
        across = ax.get_yaxis_transform()
        ax.text(
            1.0,
            at - 0.55,
            block.title,
            transform=across,
            ha="right",
            va="center",
            fontsize=9,
            weight="bold",
            color=INK,
        )
        for label, spread in block.rows:
            _rung(ax, at, left, spread, block.first, block.fill)
            places[at] = label
            at += 1
        at += 0.7
    ax.set_ylim(at - 0.9, -0.95)
    ax.set_yticks(list(places), list(places.values()))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(left, max((2.6 if log else 1.3) * max(times), (2.2 if log else 1.25) * widest))
    ax.set_xlabel(
        f"{layout.quantity(metric)}{', logarithmic' if log else ''} (bar: median, line: p10-p90)"
    )
    if floor_ms:
        _floor_line(ax, floor_ms)
    return ax


class _Block(NamedTuple):
    """Rungs that belong together in a waterfall; `first` is the time that their speed-ups start
    from.
    """

    title: str
    fill: Fill
    rows: list[tuple[str, Spread]]
    first: float


def _published_block(title: str, published: Mapping[str, float]) -> list[_Block]:
    rows = [(label, (ms, ms, ms)) for label, ms in published.items()]
    return [_Block(title, (PAPER, "\\\\\\"), rows, rows[0][1][1])] if rows else []


def _lane_blocks(rungs: Iterable[Run], metric: str) -> list[_Block]:
    """The measured rungs, a block for each lane in the lanes' order."""
    lanes: dict[str, list[tuple[str, Spread]]] = {lane: [] for lane in LANES}
    for run in rungs:
        if spread := layout.spread(run, metric):
            lanes.setdefault(run.lane, []).append((run.run, spread))
    first = next((rows[0][1][1] for rows in lanes.values() if rows), 0.0)
    return [
        _Block(f"lane: {lane}", LANE_FILLS.get(lane, (GREY, "")), rows, first)
        for lane, rows in lanes.items()
        if rows
    ]


def _floor_line(ax: Axes, floor_ms: float) -> None:
    ax.axvline(
        floor_ms,
        color=RUST,
        linestyle="--",
        linewidth=1.6,
        path_effects=layout.white_edge(),
        zorder=5,
    )
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    ax.annotate(
        f"floor {layout.figure(floor_ms)} ms",
        (floor_ms, 1),
        (3, 3),
        color=RUST,
        fontsize=9,
        **place,
    )


def _rung(ax: Axes, at: float, left: float, spread: Spread, first: float, fill: Fill) -> None:
    """One bar of the waterfall with its whisker, its number and its speed-up."""
    low, median, high = spread
    ax.barh(at, median - left, left=left, height=0.72, linewidth=0.7, zorder=2, **layout.look(fill))
    if high > low:
        edge = layout.white_edge(2)
        ax.plot(
            [low, high],
            [at, at],
            color=RUST,
            linestyle="-",
            linewidth=2,
            path_effects=edge,
            zorder=4,
        )
    speedup = "" if median == first else f"   {first / median:.2f}x"
    label = f"{layout.figure(median)}{speedup}"
    ax.annotate(
        label, (max(high, median), at), (5, 0), textcoords="offset points", va="center", fontsize=9
    )


def differences(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    band: tuple[float, float],
    band_label: str,
    xlabel: str,
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> Axes:
    """One row a name, a dot for each difference, and behind them the `band` that they are judged
    against.

    ranges: label -> name -> the ends of a line through the name's dots, where there is one.
    """
    layout.make_room(ax, len(series), per_row=0.36)
    ax.axvspan(*band, color=MIST, label=band_label, zorder=1)
    ax.axvline(0, color=INK, linestyle="-", linewidth=0.8, zorder=2)
    for row, values in enumerate(series.values()):
        ax.scatter(
            values,
            [row + 0.4 * layout.jitter(i) for i in range(len(values))],
            s=26,
            color=NAVY,
            lw=0,
            zorder=3,
        )
    for label, lines in (ranges or {}).items():
        rows = [list(series).index(name) + 0.4 * layout.jitter(0) for name in lines]
        lows, highs = ([ends[at] for ends in lines.values()] for at in (0, 1))
        if lines:
            ax.hlines(rows, lows, highs, color=RUST, lw=2.2, label=label, zorder=2.5)
    layout.rows(ax, list(series))
    ax.set_xlabel(xlabel)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def utilisation(
    ax: Axes,
    t: Sequence[float],
    values: Sequence[float],
    label: str = "GPU utilisation",
    driver: Sequence[tuple[float, float]] = (),
) -> Axes:
    """Utilisation over time: `t` in seconds, `values` in 0..1, each from its `t` on, drawn in %
    with their mean.

    `driver`: (seconds, value) of samples from the driver's own buffer, drawn as dots.
    """
    percent = [100 * v for v in values]
    ax.fill_between(t, percent, step="post", color=MIST, zorder=1)
    ax.step(
        t, percent, where="post", color=NAVY, linestyle="-", linewidth=1.4, label=label, zorder=2
    )
    if percent:
        mean = sum(percent) / len(percent)
        ax.axhline(
            mean, color=RUST, linestyle="--", linewidth=1.8, label=f"mean {mean:.0f} %", zorder=3
        )
    if driver:
        times, samples = zip(*driver, strict=True)
        ax.plot(
            times,
            [100 * v for v in samples],
            "o",
            color=INK,
            markersize=3,
            label="driver's samples",
            zorder=4,
        )
    ax.set_ylim(0, 105)
    ax.set_xlabel("s")
    ax.set_ylabel("% of the time")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def loss(ax: Axes, runs: Mapping[str, Run] | Iterable[Run]) -> Axes:
    """The loss of each run over optimizer steps (`metrics["loss"]`); runs without one are left out."""
    named = {name: run for name, run in layout.named(runs).items() if run.metrics.get("loss")}
    markers = cycle("os^Dv*")
    for name, run in named.items():
        values = run.metrics["loss"]
        every = max(1, len(values) // 10)
        ax.plot(
            range(1, len(values) + 1),
            values,
            marker=next(markers),
            markevery=every,
            markersize=5,
            label=name,
        )
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(
        "loss (random weights)" if any(r.weights == "random" for r in named.values()) else "loss"
    )
    if named:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(3, len(named)))
    return ax
