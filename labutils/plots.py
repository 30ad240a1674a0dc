"""The course's pictures: static, with units on the axes, the spread shown, and readable in a grey print.

Every function draws on a given matplotlib `Axes` and returns it; one that needs room for many rows makes the figure
taller. Colours are never the only carrier of meaning: lanes and categories differ in lightness and hatch as well.
matplotlib is imported where it is used, so that importing this module stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from math import dist
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labutils.results import LANES, Run, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.advisor import Reach
    from labutils.calibration import Score
    from labutils.hardware import Roofline

STYLE = Path(__file__).with_name("course.mplstyle")

INK, GREY, PAPER = "#222222", "#777777", "#FFFFFF"
NAVY, RUST, TEAL, AMBER = "#0B3954", "#C1440E", "#2A9D8F", "#E9B44C"
PURPLE, MIST, ROSE = "#5E3A87", "#B3C4CF", "#EBA696"

Spread = tuple[float, float, float]
Fill = tuple[str, str]

LANE_FILLS = {"article": (NAVY, ""), "same work": (TEAL, "///"), "same mathematics": (AMBER, "...")}
FILLS = (
    (NAVY, ""),
    (AMBER, "///"),
    (TEAL, ""),
    (MIST, "..."),
    (RUST, "\\\\\\"),
    (ROSE, ""),
    (PURPLE, "---"),
    (GREY, "xxx"),
)
"""Fills of categories in order: neighbours differ in lightness and hatch; none is white, which reads as nothing."""
PHASES = ("data", "encode", "forward", "log", "backward", "optimizer", "clip", "to_device")
PHASE_FILLS = dict(zip(PHASES, FILLS, strict=True))
"""Fills of the phases that the training loop marks, in every timeline the same."""
KIND_FILLS: dict[str, Fill] = {
    "attention": (RUST, "\\\\\\"),
    "convolution": (NAVY, ""),
    "GEMM": (MIST, "..."),
    "thin GEMM": (MIST, ""),
    "normalisation": (TEAL, ""),
    "elementwise": (AMBER, "///"),
    "casts and layout": (ROSE, ""),
    "foreach": (PURPLE, "---"),
    "compiled": (TEAL, "///"),
    "copy": (GREY, ""),
    "other": (GREY, "xxx"),
}
"""Fills of kinds of kernels and operators (`measure.kinds`) that take long, likewise; rarer kinds get what is left."""
DARK = (NAVY, RUST, PURPLE)
"""Fills on which text and hatches are white."""


def use_style() -> None:
    """Make the course's style sheet the current one, for every figure from here on."""
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)


# ------------------------------------------------------------------------------------------------------- comparisons


def steps(ax: Axes, runs: Mapping[str, Run] | Iterable[Run], metric: str = "step_ms") -> Axes:
    """One row a run: every sample as a dot, the p10-p90 range as a bar, the median as a line with its number.

    Runs without the metric get an empty row that says why. `metric` is a time in milliseconds.
    """
    named = _named(runs)
    _make_room(ax, len(named), per_row=0.42)
    widest = max((_spread(run, metric)[2] for run in named.values() if _spread(run, metric)), default=1.0)
    for row, run in enumerate(named.values()):
        spread = _spread(run, metric)
        if spread is None:
            ax.text(0.02 * widest, row, _status(run), va="center", fontsize=9, color=GREY, style="italic")
            continue
        low, median, high = spread
        ax.barh(row, high - low, left=low, height=0.55, color=MIST, edgecolor=INK, linewidth=0.8, zorder=2)
        samples = run.samples.get(metric, [])
        ax.scatter(samples, [row + _jitter(i) for i in range(len(samples))], s=9, color=NAVY, alpha=0.6, lw=0, zorder=3)
        ax.plot([median, median], [row - 0.34, row + 0.34], color=RUST, linestyle="-", linewidth=2.4, zorder=4)
        ax.annotate(
            f"{_figure(median)} ms",
            (max([high, *samples]), row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    _rows(ax, list(named))
    ax.set_xlim(0, 1.22 * max([widest, *(s for run in named.values() for s in run.samples.get(metric, []))]))
    ax.set_xlabel(f"{_quantity(metric)} (line: median, bar: p10-p90, dots: samples)")
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
    """Medians with p10-p90 over a knob's values `x`; `None`, or a run without the metric, is marked as failed.

    `published` (x -> ms, None: failed) is the article's curve and `model` (x -> ms) a prediction, both in the units of
    `metric`: scale what was measured in others before.
    """
    spreads = {at: _spread(run, metric) if run is not None else None for at, run in zip(x, runs, strict=True)}
    measured = {at: s for at, s in spreads.items() if s}
    if published:
        points = {at: ms for at, ms in published.items() if ms is not None}
        ax.plot(
            *_columns(points),
            color=GREY,
            linestyle="--",
            marker="s",
            markerfacecolor=PAPER,
            label=published_label,
            zorder=2,
        )
    if model:
        ax.plot(
            *_columns(dict(sorted(model.items()))),
            color=AMBER,
            linestyle="-",
            linewidth=5,
            alpha=0.8,
            label="model",
            zorder=1,
        )
    if measured:
        low, median, high = zip(*measured.values(), strict=True)
        ax.plot(list(measured), median, color=NAVY, linestyle="-", marker="o", label="measured here, p10-p90", zorder=4)
        ax.vlines(list(measured), low, high, color=NAVY, linewidth=5, alpha=0.35, zorder=3)
    top = max(
        [*(s[2] for s in measured.values()), *(v for v in (published or {}).values() if v), *(model or {}).values()],
        default=1.0,
    )
    ax.set_ylim(0, 1.18 * top)
    _mark_failures(ax, [at for at in x if at not in measured], NAVY, "here", 1.12 * top)
    _mark_failures(ax, [at for at, ms in (published or {}).items() if ms is None], GREY, published_label, 1.02 * top)
    ax.set_xticks(sorted({*x, *(published or {})}))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(_quantity(metric))
    if measured or published or model:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def _mark_failures(ax: Axes, at: Sequence[float], color: str, whose: str, height: float) -> None:
    """A cross where a run failed, with the word beside it."""
    ax.plot(at, [height] * len(at), color=color, linestyle="", marker="x", markersize=8, markeredgewidth=2.2, zorder=4)
    for x in at:
        ax.annotate(
            f"failed ({whose})", (x, height), (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=9
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

    Each bar is a rung's median step (or another time, `metric`) with its p10-p90 range, its number, and its speed-up
    over the first rung.
    `published` (rung -> ms) comes first, in a block of its own, with speed-ups over its own first rung. `floor_ms` is
    what the hardware allows. Runs without the metric are left out; raises `ValueError` where none is left. On a
    logarithmic axis read the ends of the bars: their lengths mean nothing.
    """
    blocks = _published_block(published_label, published or {}) + _lane_blocks(rungs, metric)
    times = [spread[1] for block in blocks for _, spread in block.rows]
    widest = max((spread[2] for block in blocks for _, spread in block.rows), default=0.0)
    if not times:
        raise ValueError(f"No rung of the ladder has a {metric}: there is nothing to draw.")
    _make_room(ax, len(times) + 0.7 * len(blocks), per_row=0.27)
    left = 0.6 * min([*times, floor_ms or times[0]]) if log else 0.0
    at, places = 0.0, {}
    for block in blocks:
        if at:
            ax.axhline(at - 0.95, color=GREY, linewidth=0.8, linestyle="-")
        across = ax.get_yaxis_transform()
        ax.text(
            1.0, at - 0.55, block.title, transform=across, ha="right", va="center", fontsize=9, weight="bold", color=INK
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
    ax.set_xlabel(f"{_quantity(metric)}{', logarithmic' if log else ''} (bar: median, line: p10-p90)")
    if floor_ms:
        _floor_line(ax, floor_ms)
    return ax


class _Block(NamedTuple):
    """Rungs that belong together in a waterfall; `first` is the time that their speed-ups start from."""

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
        if spread := _spread(run, metric):
            lanes.setdefault(run.lane, []).append((run.run, spread))
    first = next((rows[0][1][1] for rows in lanes.values() if rows), 0.0)
    return [
        _Block(f"lane: {lane}", LANE_FILLS.get(lane, (GREY, "")), rows, first) for lane, rows in lanes.items() if rows
    ]


def _floor_line(ax: Axes, floor_ms: float) -> None:
    ax.axvline(floor_ms, color=RUST, linestyle="--", linewidth=1.6, path_effects=_white_edge(), zorder=5)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    ax.annotate(f"floor {_figure(floor_ms)} ms", (floor_ms, 1), (3, 3), color=RUST, fontsize=9, **place)


def _rung(ax: Axes, at: float, left: float, spread: Spread, first: float, fill: Fill) -> None:
    """One bar of the waterfall with its whisker, its number and its speed-up."""
    low, median, high = spread
    ax.barh(at, median - left, left=left, height=0.72, linewidth=0.7, zorder=2, **_look(fill))
    if high > low:
        ax.plot([low, high], [at, at], color=RUST, linestyle="-", linewidth=2, path_effects=_white_edge(2), zorder=4)
    speedup = "" if median == first else f"   {first / median:.2f}x"
    label = f"{_figure(median)}{speedup}"
    ax.annotate(label, (max(high, median), at), (5, 0), textcoords="offset points", va="center", fontsize=9)


def curves(ax: Axes, series: Mapping[str, Mapping[float, float]], xlabel: str, ylabel: str) -> Axes:
    """One line a name through its points (x -> y), with ticks at the points' x; names without points are left out."""
    drawn = {name: points for name, points in series.items() if points}
    for (name, points), marker, (color, _) in zip(drawn.items(), cycle("os^Dv*"), cycle(FILLS), strict=False):
        ax.plot(*_columns(points), color=color, marker=marker, label=name)
    ax.set_ylim(bottom=0)
    ax.set_xticks(sorted({x for points in drawn.values() for x in points}))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if drawn:
        wide = sum(map(len, list(drawn)[:4])) > 44  # characters of a row of four, beside their lines
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2 if wide else 4)
    return ax


def slower_hosts(
    ax: Axes,
    model: Mapping[str, Mapping[float, float]],
    measured: Mapping[str, Mapping[float, float]],
    rivals: Mapping[str, float],
) -> Axes:
    """Steps over what the host takes longer for a launch: `model` curves, `measured` points, `rivals` as levels.

    model and measured: name -> microseconds -> ms; a name has the same colour in both. rivals: label -> ms.
    """
    colors = dict(zip(model, cycle((NAVY, RUST, TEAL, PURPLE)), strict=False))
    markers, lines = cycle("os^D"), cycle(("-", "--", "-.", ":"))
    for (name, points), line in zip(model.items(), lines, strict=False):
        ax.plot(*_columns(points), color=colors[name], linestyle=line, label=f"{name}, predicted", zorder=2)
    for (name, points), marker in zip(measured.items(), markers, strict=False):
        look = {"linestyle": "", "marker": marker, "markersize": 7, "markeredgecolor": PAPER}
        ax.plot(*_columns(points), color=colors.get(name, INK), label=f"{name}, measured", zorder=4, **look)
    for (label, ms), line in zip(rivals.items(), cycle((":", (0, (5, 5)))), strict=False):
        ax.axhline(ms, color=GREY, linestyle=line, linewidth=1.8, label=label, zorder=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("what the host takes longer for a launch, µs")
    ax.set_ylabel("ms an optimizer step")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def panels(
    axes: Sequence[Axes], series: Mapping[str, Mapping[str, Mapping[float, float]]], xlabel: str, ylabel: str
) -> Sequence[Axes]:
    """`curves` side by side, panel -> name -> points: the same names in each, one y axis, one legend below all."""
    for ax, (title, lines) in zip(axes, series.items(), strict=True):
        curves(ax, lines, xlabel, ylabel if ax is axes[0] else "")
        ax.set_title(title)
        if legend := ax.get_legend():
            legend.remove()
    every = [y for lines in series.values() for points in lines.values() for y in points.values()]
    for ax in axes:
        ax.set_ylim(0, 1.08 * max(every, default=1.0))
    handles, labels = max((ax.get_legend_handles_labels() for ax in axes), key=lambda found: len(found[1]))
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    return axes


def counts(ax: Axes, series: Mapping[str, Sequence[int]], xlabel: str, ylabel: str) -> Axes:
    """Bars side by side: one fill a name, one group for each of its counts, numbered from 1."""
    width = 0.8 / max(1, len(series))
    longest = max((len(values) for values in series.values()), default=0)
    for place, ((name, values), fill) in enumerate(zip(series.items(), cycle(FILLS), strict=False)):
        at = [group + width * (place - (len(series) - 1) / 2) for group in range(1, len(values) + 1)]
        ax.bar(at, values, width, linewidth=0.6, label=name, zorder=2, **_look(fill))
    ax.set_xticks(range(1, longest + 1))
    ax.grid(axis="x", visible=False)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if series:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def differences(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    band: tuple[float, float],
    band_label: str,
    xlabel: str,
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> Axes:
    """One row a name, a dot for each difference, and behind them the `band` that they are judged against.

    ranges: label -> name -> the ends of a line through the name's dots, where there is one.
    """
    _make_room(ax, len(series), per_row=0.36)
    ax.axvspan(*band, color=MIST, label=band_label, zorder=1)
    ax.axvline(0, color=INK, linestyle="-", linewidth=0.8, zorder=2)
    for row, values in enumerate(series.values()):
        ax.scatter(values, [row + 0.4 * _jitter(i) for i in range(len(values))], s=26, color=NAVY, lw=0, zorder=3)
    for label, lines in (ranges or {}).items():
        rows = [list(series).index(name) + 0.4 * _jitter(0) for name in lines]
        lows, highs = ([ends[at] for ends in lines.values()] for at in (0, 1))
        if lines:
            ax.hlines(rows, lows, highs, color=RUST, lw=2.2, label=label, zorder=2.5)
    _rows(ax, list(series))
    ax.set_xlabel(xlabel)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def choices(
    ax: Axes,
    bands: Sequence[tuple[float, float, Sequence[Reach]]],
    most_steps: float = 1e5,
    most_gb: float | None = None,
) -> Axes:
    """Who ends first, over planned steps (logarithmic) and memory: the `bands` of `advisor.chart` as fields.

    Below the first band nothing fits. Raises `ValueError` where there is no band.
    """
    if not bands:
        raise ValueError("There is no band of memory in which anything fits: there is nothing to draw.")
    methods = list(dict.fromkeys(reach.option.method for _, _, reaches in bands for reach in reaches))
    fills = dict(zip(methods, islice(cycle(FILLS), len(methods)), strict=True))
    top = most_gb or 1.35 * bands[-1][0]
    for low, high, reaches in bands:
        for reach in reaches:
            start, until = max(1.0, reach.start), min(reach.until, most_steps)
            if until > start:
                height = min(high, top) - low
                ax.barh(
                    low,
                    until - start,
                    left=start,
                    height=height,
                    align="edge",
                    lw=0.7,
                    **_look(fills[reach.option.method]),
                )
    ax.text(1.3, bands[0][0] / 2, "nothing fits", va="center", fontsize=9, color=GREY, style="italic")
    ax.set_xscale("log")
    ax.set_xlim(1, most_steps)
    ax.set_ylim(0, top)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(visible=False)
    ax.set_xlabel("planned optimizer steps, logarithmic")
    ax.set_ylabel("memory, GB")
    _fill_legend(ax, fills)
    return ax


# --------------------------------------------------------------------------------------------------- inside one step


def timeline(ax: Axes, lanes: Mapping[str, Iterable[tuple[float, float, str]]], most: int = 6) -> Axes:
    """A static trace: one row a lane ("host", "GPU"), its intervals (start_ms, duration_ms, category) as blocks.

    In lanes that share categories, and so a legend, the `most` that take the longest get a fill of their own; the
    others share one. The phases of a step have the same fill in every picture.
    """
    rows = {lane: sorted(intervals) for lane, intervals in lanes.items()}
    every = [interval for intervals in rows.values() for interval in intervals]
    if not every:
        raise ValueError("The timeline has no interval: there is nothing to draw.")
    _make_room(ax, len(rows), per_row=1.1)
    start, end = min(0.0, *(s for s, _, _ in every)), max(s + d for s, d, _ in every)
    _rows(ax, list(rows))
    groups = _lanes_that_share({lane: {c for _, _, c in intervals} for lane, intervals in rows.items()})
    for group in groups:
        fills = _category_fills([interval for lane in group for interval in rows[lane]], most)
        for lane in group:
            _lane(ax, list(rows).index(lane), rows[lane], fills, end - start)
        middle = sum(list(rows).index(lane) for lane in group) / len(group)
        _fill_legend(ax, fills, beside=1 - (middle + 0.6) / (len(rows) + 0.2))
    ax.set_xlim(start, end)
    ax.set_xlabel("ms")
    return ax


def _lane(
    ax: Axes, row: int, intervals: Sequence[tuple[float, float, str]], fills: Mapping[str, Fill], span: float
) -> None:
    """The blocks of one lane. Blocks too narrow for a hatch or an edge to be seen get neither."""
    for category, fill in fills.items():
        mine = [(s, d) for s, d, c in intervals if (c if c in fills else "other") == category]
        blocks = _merge(mine, span / 2000)
        wide = [block for block in blocks if block[1] > span / 100]
        narrow = [block for block in blocks if block[1] <= span / 100]
        ax.broken_barh(wide, (row - 0.36, 0.72), linewidth=0.5, zorder=2, **_look(fill))
        ax.broken_barh(narrow, (row - 0.36, 0.72), linewidth=0, facecolor=fill[0], zorder=2)


def _lanes_that_share(categories: Mapping[str, set[str]]) -> list[list[str]]:
    """Lanes in groups: those with a category in common are together."""
    groups: list[tuple[list[str], set[str]]] = []
    for lane, mine in categories.items():
        joined = [group for group in groups if group[1] & mine]
        groups = [group for group in groups if not group[1] & mine]
        groups.append(([*(name for names, _ in joined for name in names), lane], mine.union(*(c for _, c in joined))))
    return [names for names, _ in groups]


def breakdown(ax: Axes, parts: Mapping[str, Any], unit: str = "ms") -> Axes:
    """Where each ms (or GB, or another `unit`) goes: stacked bars, one for `parts` (name -> value) or several.

    Several bars are given as bar -> (name -> value). A part keeps its fill in every bar, its number stands in it where
    it fits, and the total at the end.
    """
    bars = parts if parts and all(isinstance(v, Mapping) for v in parts.values()) else {"": parts}
    _make_room(ax, len(bars), per_row=0.55)
    names = list(dict.fromkeys(name for bar in bars.values() for name in bar))
    fills = dict(zip(names, islice(cycle(FILLS), len(names)), strict=True))
    longest = max((sum(bar.values()) for bar in bars.values()), default=0) or 1.0
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for name, value in bar.items():
            ax.barh(row, value, left=left, height=0.66, linewidth=0.7, zorder=2, **_look(fills[name]))
            if value > 0.07 * longest:
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
                ax.text(left + value / 2, row, _figure(value), ha="center", va="center", fontsize=9, bbox=box, zorder=3)
            left += value
        ax.annotate(f"{_figure(left)} {unit}", (left, row), (6, 0), textcoords="offset points", va="center", fontsize=9)
    _rows(ax, list(bars))
    ax.set_xlim(0, 1.16 * longest)
    ax.set_xlabel(unit)
    _fill_legend(ax, fills)
    return ax


def utilisation(
    ax: Axes,
    t: Sequence[float],
    values: Sequence[float],
    label: str = "GPU utilisation",
    driver: Sequence[tuple[float, float]] = (),
) -> Axes:
    """Utilisation over time: `t` in seconds, `values` in 0..1, each from its `t` on, drawn in % with their mean.

    `driver`: (seconds, value) of samples from the driver's own buffer, drawn as dots.
    """
    percent = [100 * v for v in values]
    ax.fill_between(t, percent, step="post", color=MIST, zorder=1)
    ax.step(t, percent, where="post", color=NAVY, linestyle="-", linewidth=1.4, label=label, zorder=2)
    if percent:
        mean = sum(percent) / len(percent)
        ax.axhline(mean, color=RUST, linestyle="--", linewidth=1.8, label=f"mean {mean:.0f} %", zorder=3)
    if driver:
        times, samples = zip(*driver, strict=True)
        ax.plot(times, [100 * v for v in samples], "o", color=INK, markersize=3, label="driver's samples", zorder=4)
    ax.set_ylim(0, 105)
    ax.set_xlabel("s")
    ax.set_ylabel("% of the time")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def loss(ax: Axes, runs: Mapping[str, Run] | Iterable[Run]) -> Axes:
    """The loss of each run over optimizer steps (`metrics["loss"]`); runs without one are left out."""
    named = {name: run for name, run in _named(runs).items() if run.metrics.get("loss")}
    markers = cycle("os^Dv*")
    for name, run in named.items():
        values = run.metrics["loss"]
        every = max(1, len(values) // 10)
        ax.plot(range(1, len(values) + 1), values, marker=next(markers), markevery=every, markersize=5, label=name)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("loss (random weights)" if any(r.weights == "random" for r in named.values()) else "loss")
    if named:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(3, len(named)))
    return ax


def magnitudes(ax: Axes, rows: Mapping[str, Mapping[str, float]], xlabel: str = "") -> Axes:
    """Counts of very different size on a logarithmic axis: for each row, a bar for each of its names.

    Every row has the same names. Read the numbers at the bars' ends: the lengths are logarithms.
    """
    names = list(next(iter(rows.values())))
    _make_room(ax, len(rows), per_row=0.5)
    height = 0.8 / len(names)
    for row, counts in enumerate(rows.values()):
        for place, (name, count) in enumerate(counts.items()):
            at = row + (place - (len(names) - 1) / 2) * height
            ax.barh(at, count, height=0.94 * height, linewidth=0.7, zorder=2, **_look(FILLS[names.index(name)]))
            text = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            ax.annotate(_in_words(count), (count, at), (4, 0), **text)
    ax.set_xscale("log")
    every = [count for counts in rows.values() for count in counts.values()]
    ax.set_xlim(min(every) / 8, max(every) * 30)
    _rows(ax, list(rows))
    ax.set_xlabel(f"{xlabel} (each mark of the axis is a factor of ten)")
    _fill_legend(ax, dict(zip(names, FILLS, strict=False)))
    return ax


def _in_words(count: float) -> str:
    """A count as it is said: 65.5 thousand, 8.19 billion."""
    for unit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= unit:
            return f"{count / unit:.3g} {word}"
    return f"{count:g}"


def grouped(ax: Axes, times: Mapping[str, Mapping[str, Sequence[float]]], fills: Sequence[Fill] = FILLS) -> Axes:
    """Upright bars in groups: `times` is name -> group -> samples in ms; the median with its p10-p90 range.

    A name has the same fill in every group. Every name has the same groups.
    """
    groups = list(next(iter(times.values())))
    width = 0.8 / len(times)
    for place, (name, by_group) in enumerate(times.items()):
        spreads = [summarise(by_group[group]) for group in groups]
        at = [number + (place - (len(times) - 1) / 2) * width for number in range(len(groups))]
        medians = [spread["median"] for spread in spreads]
        error = [[s["median"] - s["p10"] for s in spreads], [s["p90"] - s["median"] for s in spreads]]
        look = _look(fills[place]) | {"linewidth": 0.7, "capsize": 3}
        ax.bar(at, medians, 0.92 * width, yerr=error, label=name, zorder=2, **look)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel("ms (median, p10-p90)")
    ax.grid(axis="x", visible=False)
    return ax


def roofline(ax: Axes, roofline: Roofline | Mapping[str, Roofline], points: Mapping[str, tuple[float, float]]) -> Axes:
    """One roofline, or several by name, and numbered `points` (name -> (FLOP per byte, TFLOP/s)) under them.

    Both axes are logarithmic. The legend beside the picture names the points.
    """
    roofs = roofline if isinstance(roofline, Mapping) else {"roofline": roofline}
    places = [p[0] for p in points.values()] + [roof.ridge for roof in roofs.values()]
    low, high = min(places) / 8, max(places) * 8
    for (name, roof), style in zip(roofs.items(), cycle(("-", "--", "-.", ":")), strict=False):
        knees = [low, roof.ridge, high]
        label = f"{name}: {_figure(roof.rate)} TFLOP/s, {_figure(roof.bandwidth)} GB/s"
        ax.plot(knees, [roof.attainable(k) for k in knees], color=INK, linestyle=style, label=label, zorder=2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    for number, (name, (intensity, rate)) in enumerate(points.items(), 1):
        ax.plot(
            intensity,
            rate,
            color=RUST,
            marker="o",
            linestyle="",
            markeredgecolor=PAPER,
            label=f"{number}  {name}",
            zorder=3,
        )
    _number_points(ax, list(points.values()))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlabel("FLOP per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return ax


def _number_points(ax: Axes, points: Sequence[tuple[float, float]], distance: float = 11) -> None:
    """Write 1, 2, .. beside the points, each on the side that is farthest from every point and number so far."""
    taken = [tuple(place) for place in ax.transData.transform(points)] if points else []
    sides = ((0, -1), (1, 0), (0, 1), (-1, 0), (0.7, -0.7), (-0.7, -0.7), (0.7, 0.7), (-0.7, 0.7))
    pixels = distance * ax.figure.dpi / 72
    for number, (x, y) in enumerate(list(taken), 1):
        spots = [(x + pixels * dx, y + pixels * dy) for dx, dy in sides]
        best = max(range(len(sides)), key=lambda i: min(pixels * 1.4, *(dist(spots[i], other) for other in taken)))
        taken.append(spots[best])
        offset = tuple(distance * side for side in sides[best])
        look = {"ha": "center", "va": "center", "fontsize": 8, "weight": "bold", "path_effects": _white_edge(1)}
        ax.annotate(str(number), points[number - 1], offset, textcoords="offset points", zorder=4, **look)


def peaks(
    ax: Axes,
    measured: Mapping[str, Sequence[float]],
    dense: Mapping[str, float] | None = None,
    sparse: Mapping[str, float] | None = None,
) -> Axes:
    """One row a number format: measured matrix rate (median, p10-p90) against the data sheet's dense and sparse peaks.

    All in TFLOP/s; `measured` holds samples. Formats that the data sheet lacks have no mark.
    """
    dense, sparse = dense or {}, sparse or {}
    _make_room(ax, len(measured), per_row=0.42)
    for row, (dtype, samples) in enumerate(measured.items()):
        spread = summarise(samples)
        median, low, high = spread["median"], spread["p10"], spread["p90"]
        ax.barh(row, median, height=0.5, color=NAVY, zorder=2)
        ax.plot([low, high], [row, row], color=AMBER, linestyle="-", linewidth=4, solid_capstyle="butt", zorder=3)
        share = f", {100 * median / dense[dtype]:.0f} % of {_figure(dense[dtype])}" if dtype in dense else ""
        right = max(high, dense.get(dtype, 0), sparse.get(dtype, 0))
        text = f"{_figure(median)}{share}"
        ax.annotate(text, (right, row), (7, 0), textcoords="offset points", va="center", fontsize=9)
    for sheet, style, label in ((dense, "-", "data sheet, dense"), (sparse, ":", "data sheet, with sparsity")):
        marks = [(row, sheet[dtype]) for row, dtype in enumerate(measured) if dtype in sheet]
        for row, peak in marks:
            ends = [row - 0.38, row + 0.38]
            ax.plot([peak, peak], ends, color=RUST, linestyle=style, linewidth=2.4, label=label, zorder=4)
            label = None
    _rows(ax, list(measured))
    widest = max([*(max(samples) for samples in measured.values()), *dense.values(), *sparse.values()], default=1.0)
    shown = {dtype for dtype in measured if dtype in dense or dtype in sparse}
    ax.set_xlim(0, (1.35 if shown else 1.2) * widest)
    ax.set_xlabel("TFLOP/s of a large matrix product (bar: median, line at its end: p10-p90)")
    if shown:
        ax.legend(loc="upper right")  # the first rows, fp32 and tf32, have the shortest bars
    return ax


def launch_cost(
    ax: Axes, times: Mapping[str, Mapping[int, Sequence[float] | Mapping[str, float]]], launch_us: float
) -> Axes:
    """Microseconds a call of one operation over the count of numbers it works on, a curve for each way to call it.

    `times`: way -> count -> samples in milliseconds, or their summary; bands are p10-p90. `launch_us`: what a call
    alone costs the host.
    """
    styles = zip((NAVY, RUST, TEAL), ("o", "s", "^"), ("-", "--", "-."), strict=True)
    for (way, curve), (color, marker, line) in zip(times.items(), styles, strict=False):
        spreads = {count: found if isinstance(found, Mapping) else summarise(found) for count, found in curve.items()}
        low, median, high = ([spread[q] * 1e3 for spread in spreads.values()] for q in ("p10", "median", "p90"))
        ax.fill_between(list(curve), low, high, color=color, alpha=0.2, linewidth=0, zorder=2)
        ax.plot(list(curve), median, color=color, marker=marker, linestyle=line, label=way, zorder=3)
    ax.axhline(
        launch_us, color=GREY, linestyle=":", label=f"one call from Python here: {_figure(launch_us)} µs", zorder=1
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("numbers that the operation works on")
    ax.set_ylabel("microseconds a call")
    ax.legend(loc="upper left")
    return ax


# -------------------------------------------------------------------------------------------------------- scoreboard


VERDICT_MARKS: dict[str, dict[str, Any]] = {
    "confirmed": {"marker": "o", "color": NAVY},
    "refuted": {"marker": "X", "color": RUST},
    "inconclusive": {"marker": "D", "color": AMBER, "markeredgecolor": INK, "markeredgewidth": 0.9},
    "not testable here": {"marker": "_", "color": GREY},
}
"""A shape for each verdict: colour only repeats what the shape says."""


def verdicts(
    ax: Axes, judged: Mapping[str, Mapping[str, tuple[str, str]]], sides: tuple[str, str], columns: int = 3
) -> Axes:
    """All verdicts on one page: a line a claim, with one mark a side, in `columns` from top to bottom.

    judged: group (an article) -> claim's name -> its verdict on each of the `sides` ("H200", "here"). A group that goes
    on in the next column is named there again. The figure gets the size of a page.
    """
    lines = _in_columns(judged, columns)
    longest = max(len(column) for column in lines)
    for column, entries in enumerate(lines):
        for row, (name, pair) in enumerate(entries):
            if pair is None:
                ax.text(column, row, name, va="center", fontsize=8, weight="bold", color=INK)
                continue
            for place, verdict in zip((0.03, 0.14), pair, strict=True):
                ax.plot(column + place, row, linestyle="", markersize=5, clip_on=False, **VERDICT_MARKS[verdict])
            ax.text(column + 0.2, row, name, va="center", fontsize=6.5, color=INK)
    for column in range(len(lines)):
        for place, side in zip((0.03, 0.14), sides, strict=True):
            ax.text(column + place, -1.3, side, rotation=60, ha="left", va="bottom", fontsize=7.5, color=INK)
    ax.set(xlim=(0, len(lines)), ylim=(longest - 0.5, -1.3))
    ax.set_axis_off()
    ax.figure.set_size_inches(7.6, 1.1 + min(0.142 * longest, 10))  # one page of A4 or letter, if need be closer
    _verdict_legend(ax, [pair for claims in judged.values() for pair in claims.values()], sides)
    return ax


def _in_columns(
    groups: Mapping[str, Mapping[str, tuple[str, str]]], columns: int
) -> list[list[tuple[str, tuple[str, str] | None]]]:
    """Columns of lines (name, verdicts), as equal in length as can be; a line without verdicts is a group's name."""
    total = sum(1 + len(claims) for claims in groups.values()) + columns - 1
    longest = max(2, -(-total // columns))
    found: list[list[tuple[str, tuple[str, str] | None]]] = [[]]
    for group, claims in groups.items():
        if len(found[-1]) > longest - 2:  # no name without a claim below it
            found.append([])
        found[-1].append((group, None))
        for claim in claims.items():
            if len(found[-1]) >= longest:
                found.append([(f"{group}, continued", None)])
            found[-1].append(claim)
    return found


def _verdict_legend(ax: Axes, pairs: Sequence[tuple[str, str]], sides: tuple[str, str]) -> None:
    """The marks with the number of their verdicts on each side, below the picture."""
    for verdict, mark in VERDICT_MARKS.items():
        counts = ", ".join(f"{side} {sum(pair[at] == verdict for pair in pairs)}" for at, side in enumerate(sides))
        ax.plot([], [], linestyle="", markersize=6, label=f"{verdict}\n{counts}", **mark)
    ax.figure.legend(loc="outside lower center", ncols=len(VERDICT_MARKS), fontsize=8)


MOST_OFF = 30.0
"""Predictions farther off than this factor are drawn at the edge, as arrows."""


def calibration(ax: Axes, scores: Sequence[Score], near: float) -> Axes:
    """Predicted over measured, one row a prediction, on a logarithmic axis; the band: within a factor of `near`.

    Scores without a factor are left out. Each row's numbers stand at its right.
    """
    told = [score for score in scores if score.factor is not None]
    _make_room(ax, len(told), per_row=0.22)
    ax.axvspan(1 / near, near, color=MIST, label=f"within a factor of {near:g}", zorder=1)
    ax.axvline(1, color=INK, linestyle="-", linewidth=1, zorder=2)
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
    widest = min(MOST_OFF, 1.5 * max([2 * near, *(score.off for score in told)]))
    for row, score in enumerate(told):
        at = min(max(score.factor, 1 / widest), widest)
        marker = "o" if at == score.factor else ">" if at == widest else "<"
        ax.plot([1, at], [row, row], color=NAVY, linestyle="-", linewidth=1.2, zorder=3)
        look = {"color": NAVY if score.off <= near else RUST, "marker": marker, "linestyle": ""}
        ax.plot(at, row, zorder=4, clip_on=False, **look)
        numbers = f"{_three_figures(score.predicted)} | {_three_figures(score.measured)} {score.unit}"
        ax.annotate(numbers, (1.02, row), **beside)
    ax.annotate("you | measured", (1.02, -1), weight="bold", **beside)
    _rows(ax, [f"{score.lab}  {score.topic}" for score in told])
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xscale("log")
    ax.set_xlim(1 / widest, widest)
    ticks = [tick for tick in (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20) if 1 / widest <= tick <= widest]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("predicted / measured (logarithmic)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0))
    return ax


# ----------------------------------------------------------------------------------------------------------- helpers


def _named(runs: Mapping[str, Run] | Iterable[Run]) -> dict[str, Run]:
    """Name -> run, in the given order."""
    return dict(runs) if isinstance(runs, Mapping) else {run.run: run for run in runs}


def _spread(run: Run, metric: str) -> Spread | None:
    """(p10, median, p90) of a metric: from its summary, its samples or the bare number; None where there is none."""
    summary = run.metrics.get(metric)
    if not isinstance(summary, Mapping):
        samples = run.samples.get(metric)
        if not samples:
            return None if summary is None else (summary, summary, summary)
        summary = summarise(samples)
    median = summary["median"]
    return summary.get("p10", median), median, summary.get("p90", median)


def _status(run: Run) -> str:
    """Why a run has nothing to draw, on one short line."""
    text = "not measured" if run.ok else run.status
    return text if len(text) <= 60 else text[:59] + "…"


def _figure(value: float) -> str:
    """Three figures, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}"


def _three_figures(value: float) -> str:
    """All of a count, three figures of another number, and an exponent only of what is tiny."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _quantity(metric: str) -> str:
    """An axis label for a metric in milliseconds."""
    known = {
        "step_ms": "ms an optimizer step",
        "data_ms": "ms waiting for data, an optimizer step",
        "ms_per_1k_useful_tokens": "ms for 1000 useful tokens",
    }
    return known.get(metric, f"{metric.removesuffix('_ms').replace('_', ' ')}, ms")


def _columns(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    return list(points), list(points.values())


def _jitter(i: int) -> float:
    """A small vertical offset that spreads dots out, the same each time."""
    return 0.22 * ((i * 0.618034) % 1 * 2 - 1)


def _rows(ax: Axes, labels: Sequence[str]) -> None:
    """Rows from the top down, named on the left."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def _make_room(ax: Axes, rows: float, per_row: float) -> None:
    """Set the figure's height to its rows', in inches, where the axes have the figure to themselves."""
    if len(ax.figure.axes) == 1:
        ax.figure.set_figheight(1.3 + per_row * rows)


def _category_fills(intervals: Iterable[tuple[float, float, str]], most: int) -> dict[str, Fill]:
    """Category -> fill for the `most` longest of them, in order of appearance; "other" for the rest."""
    totals: dict[str, float] = {}
    for _, duration, category in sorted(intervals):
        totals[category] = totals.get(category, 0.0) + duration
    longest = sorted(totals, key=totals.__getitem__, reverse=True)[:most]
    chosen = [category for category in totals if category in longest]
    fills = dict(zip(chosen, islice(cycle(FILLS), len(chosen)), strict=True))
    if fills.keys() <= PHASE_FILLS.keys():
        fills = {phase: PHASE_FILLS[phase] for phase in chosen}
    elif fills.keys() & KIND_FILLS.keys():
        known = {KIND_FILLS[kind] for kind in chosen if kind in KIND_FILLS}
        left = cycle([fill for fill in FILLS if fill not in known] or FILLS)
        fills = {kind: KIND_FILLS[kind] if kind in KIND_FILLS else next(left) for kind in chosen}
    return fills if len(totals) <= most else fills | {"other": FILLS[-1]}


def _merge(intervals: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Sorted (start, duration) pairs with those nearer than `gap` joined: less than a dot lies between them."""
    merged: list[tuple[float, float]] = []
    for start, duration in intervals:
        if merged and start - sum(merged[-1]) < gap:
            begin = merged[-1][0]
            merged[-1] = (begin, max(sum(merged[-1]), start + duration) - begin)
        else:
            merged.append((start, duration))
    return merged


def _look(fill: Fill) -> dict[str, str]:
    """A fill as matplotlib's keyword arguments; hatches are white on dark colours."""
    color, hatch = fill
    return {"facecolor": color, "hatch": hatch, "edgecolor": INK, "hatchcolor": PAPER if color in DARK else INK}


def _fill_legend(ax: Axes, fills: Mapping[str, Fill], beside: float | None = None) -> None:
    """The fills' names above the axes; or to their right, centred at the height `beside` (0..1)."""
    from matplotlib.legend import Legend
    from matplotlib.patches import Patch

    handles = [Patch(label=name, linewidth=0.7, **_look(fill)) for name, fill in fills.items()]
    if beside is None:
        one_row = sum(0.5 + 0.065 * len(name) for name in fills) < 0.8 * ax.figure.get_figwidth()  # inches, nearly
        ncols = len(handles) if one_row else min(4, len(handles))
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=max(1, ncols))
        return
    place = {"loc": "center left", "bbox_to_anchor": (1.0, beside)}
    legend = Legend(ax, handles, list(fills), fontsize=8, labelspacing=0.3, **place)
    ax.add_artist(legend)
    legend.set_clip_on(False)


def _white_edge(width: float = 1.5) -> list[Any]:
    """Path effects that keep a line visible on dark and light fills."""
    from matplotlib import patheffects

    return [patheffects.Stroke(linewidth=width * 2.2, foreground=PAPER), patheffects.Normal()]


# ---------------------------------------------------------------------------------------------------- several GPUs


def link(ax: Axes, samples: Mapping[str, Sequence[float]], marks: Mapping[str, float]) -> Axes:
    """Bus bandwidth of an all-reduce over the message's bytes, and where messages of interest lie (name -> bytes)."""
    sizes, rates = samples["bytes"], samples["bus_gb_per_s"]
    ax.plot(sizes, rates, color=NAVY, marker="o", label="measured, median", zorder=3)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lines = cycle((":", "--", "-.", (0, (1, 3))))
    colors = cycle((RUST, TEAL, PURPLE, GREY))
    for (name, size), line, color in zip(marks.items(), lines, colors, strict=False):
        ax.axvline(size, color=color, linestyle=line, linewidth=1.8, label=name, zorder=2)
    every = [*sizes, *marks.values()]
    ticks = [2.0**power for power in range(10, 36, 4) if min(every) <= 2.0**power <= 2 * max(every)]
    ax.set_xticks(ticks, [_bytes(tick) for tick in ticks])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("bytes of the message")
    ax.set_ylabel("bus bandwidth, GB/s")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def _bytes(size: float) -> str:
    for unit, whole in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= whole:
            return f"{size / whole:g} {unit}"
    return f"{size:g} B"


def foretold(ax: Axes, runs: Mapping[str, Run], alone: Mapping[str, float]) -> Axes:
    """One row a run: the measured step as a bar with p10-p90, what was foretold as a diamond, one process's as a line.

    Runs need `predicted_step_ms`; `alone` has one process's step (ms) by run's name. Steps are shown in parts of that.
    """
    drawn = {name: run for name, run in runs.items() if _spread(run, "step_ms") and name in alone}
    _make_room(ax, len(drawn), per_row=0.42)
    farthest = 1.0
    for row, (name, run) in enumerate(drawn.items()):
        low, median, high = (100 * value / alone[name] for value in _spread(run, "step_ms"))
        ax.barh(row, median, height=0.6, color=MIST, edgecolor=INK, linewidth=0.8, label="measured, p10-p90", zorder=2)
        ax.plot([low, high], [row, row], color=NAVY, linestyle="-", linewidth=2, zorder=3)
        predicted = run.metric("predicted_step_ms")
        if predicted:
            look = {"color": RUST, "marker": "D", "linestyle": "", "markersize": 7, "markeredgecolor": PAPER}
            ax.plot([100 * predicted / alone[name]], [row], label="predicted", zorder=4, **look)
        right = max(high, 100 * (predicted or 0) / alone[name])
        farthest = max(farthest, right)
        text = f"{_figure(run.metric('step_ms'))} ms"
        ax.annotate(text, (right, row), (9, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(100, color=INK, linestyle="--", linewidth=1.2, label="one process, a rank's share", zorder=3)
    _rows(ax, list(drawn))
    ax.set_xlim(0, 1.2 * max(farthest, 100))
    ax.set_xlabel("optimizer step, % of one process's")
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(handles.values(), handles.keys(), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def beside(ax: Axes, steps: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Axes:
    """Two bands a step: when it computed and when it communicated; name -> (start, end, start, end, ... in ms) twice.

    What of the lower band has nothing above it is exposed.
    """
    from matplotlib.patches import Patch

    _make_room(ax, 1.6 * len(steps), per_row=0.42)
    fills = {"computing": (NAVY, ""), "communicating": (AMBER, "///")}
    for row, bands in enumerate(steps.values()):
        for shift, times, fill in zip((-0.2, 0.2), bands, fills.values(), strict=True):
            spans = [(start, end - start) for start, end in zip(times[::2], times[1::2], strict=True)]
            ax.broken_barh(spans, (row + shift - 0.18, 0.36), linewidth=0.3, zorder=2, **_look(fill))
    _rows(ax, list(steps))
    ax.set_xlim(left=0)
    ax.set_xlabel("ms from the beginning of the step")
    handles = [Patch(label=name, linewidth=0.7, **_look(fill)) for name, fill in fills.items()]
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def named_ticks(ax: Axes, places: Mapping[str, float]) -> Axes:
    """A logarithmic x axis whose ticks are named places."""
    from matplotlib.ticker import NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks(list(places.values()), [f"{name}\n{value:g}" for name, value in places.items()], fontsize=8)
    return ax


# --------------------------------------------------------------------------------------------------- memory and data


def stacked_memory(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    phases: Sequence[tuple[int, str]],
    fills: Mapping[str, Fill],
    most: int = 600,
) -> Axes:
    """What is held over one step as stacked areas: kind -> bytes after each event; `phases` are (event, name).

    Of more than `most` events each few are shown by the one at which most is held, so that no peak is lost.
    """
    totals = [sum(levels) for levels in zip(*series.values(), strict=True)]
    width = max(1, -(-len(totals) // most))
    chosen = [
        max(range(at, min(at + width, len(totals))), key=totals.__getitem__) for at in range(0, len(totals), width)
    ]
    unit, scale = ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)
    low = [0.0] * len(chosen)
    for kind, levels in series.items():
        high = [base + levels[at] / scale for base, at in zip(low, chosen, strict=True)]
        look = {"facecolor": fills[kind][0], "hatch": fills[kind][1], "edgecolor": INK, "linewidth": 0.4}
        ax.fill_between(chosen, low, high, step="post", label=kind, zorder=2, **look)
        low = high
    peak = max(range(len(totals)), key=totals.__getitem__)
    top = totals[peak] / scale
    ax.plot([peak], [top], marker="v", color=RUST, markersize=8, zorder=4)
    side = "right" if peak > 0.5 * len(totals) else "left"
    note = {"textcoords": "offset points", "ha": side, "fontsize": 9}
    ax.annotate(f"peak {_figure(top)} {unit}", (peak, top), (-8 if side == "right" else 8, 6), **note)
    shown = [(at, name) for at, name in phases if at < len(totals)]
    for place, (at, name) in enumerate(shown):
        end = shown[place + 1][0] if place + 1 < len(shown) else len(totals)
        ax.axvline(at, color=GREY, linestyle=":", linewidth=1, zorder=3)
        if end - at > 0.06 * len(totals):
            ax.text((at + end) / 2, 1.13 * top, name, ha="center", va="center", fontsize=9, color=INK)
    ax.set_xlim(0, len(totals) - 1)
    ax.set_ylim(0, 1.2 * top)
    ax.set_xlabel("allocations and frees, in order")
    ax.set_ylabel(unit)
    ax.grid(axis="x", visible=False)
    _fill_legend(ax, {kind: fills[kind] for kind in series}, beside=0.5)
    return ax


def over_decoding(
    ax: Axes,
    model: Mapping[int, Mapping[float, float]],
    measured: Mapping[int, Mapping[str, tuple[float, Spread]]],
    xlabel: str,
) -> Axes:
    """Step time over the time to make one example: a line of the `model` for each number of workers, and `measured`
    points: workers -> name -> (ms an example, p10-median-p90 of a step)."""
    lines, markers = cycle(("-", "--", "-.", ":")), cycle("os^Dv")
    looks = {
        workers: (color, next(lines), next(markers))
        for workers, color in zip(model, cycle(DARK + (TEAL,)), strict=False)
    }
    for workers, points in model.items():
        color, line, _ = looks[workers]
        label = "no workers" if workers == 0 else f"{workers} worker{'s' if workers > 1 else ''}"
        ax.plot(*_columns(points), color=color, linestyle=line, label=f"{label}, predicted", zorder=2)
    for workers, points in measured.items():
        color, _, marker = looks[workers]
        at = [x for x, _ in points.values()]
        spreads = [spread for _, spread in points.values()]
        ax.vlines(at, [s[0] for s in spreads], [s[2] for s in spreads], color=color, linewidth=4, alpha=0.35, zorder=3)
        look = {"linestyle": "", "marker": marker, "markersize": 8, "markeredgecolor": PAPER}
        label = "no workers" if workers == 0 else f"{workers} workers"
        ax.plot(at, [s[1] for s in spreads], color=color, label=f"{label}, measured", zorder=4, **look)
    for place, (name, (x, spread)) in enumerate(sorted(measured.get(0, {}).items(), key=lambda item: item[1][0])):
        ax.annotate(
            name,
            (x, spread[1]),
            (6, 12 + 11 * (place % 2)),
            textcoords="offset points",
            fontsize=8,
            ha="left",
            zorder=5,
        )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("ms an optimizer step")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def errors(ax: Axes, found: Mapping[str, Mapping[str, float]]) -> Axes:
    """One row a form, on a logarithmic axis: what is off (a mark each) by which share."""
    _make_room(ax, len(found), per_row=0.42)
    kinds = list(dict.fromkeys(what for row in found.values() for what in row))
    for what, marker, color in zip(kinds, "osD^", cycle((NAVY, AMBER, TEAL)), strict=False):
        at = [(row[what], place) for place, row in enumerate(found.values()) if row.get(what)]
        look = {"markeredgecolor": INK, "markersize": 9, "linestyle": "", "zorder": 3}
        ax.plot(*zip(*at, strict=True), marker=marker, color=color, label=f"{what} off by", **look)
    ax.set_xscale("log")
    _rows(ax, list(found))
    ax.set_xlabel("share, against float32 (each mark of the axis is a factor of ten)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax


def predicted_peaks(ax: Axes, pairs: Mapping[str, tuple[float, float]]) -> Axes:
    """One row a step: `pairs` is name -> (predicted, measured) GB, drawn over the measured one, with 10 % each way."""
    _make_room(ax, len(pairs), per_row=0.36)
    ax.axvspan(-10, 10, color=MIST, alpha=0.5, label="within 10 %", zorder=1)
    ax.axvline(0, color=INK, linestyle="-", linewidth=0.8, zorder=2)
    off = [100 * (predicted / measured - 1) for predicted, measured in pairs.values()]
    ax.plot(off, range(len(off)), linestyle="", marker="o", color=NAVY, markersize=8, label="prediction", zorder=3)
    for row, (share, (_, measured)) in enumerate(zip(off, pairs.values(), strict=True)):
        text = f"{_figure(measured)} GB" if measured >= 1 else f"{_figure(1e3 * measured)} MB"
        ax.annotate(text, (max(share, 0), row), (10, 0), textcoords="offset points", va="center", fontsize=9)
    reach = max(15.0, *(1.3 * abs(share) for share in off)) if off else 15.0
    ax.set_xlim(-reach, reach)
    _rows(ax, list(pairs))
    ax.set_xlabel("prediction over measured peak, % off (number: the measured peak)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


MEMORY_FILLS: dict[str, Fill] = {
    "weights": (NAVY, ""),
    "optimizer": (AMBER, "///"),
    "gradients": (RUST, ""),
    "activations": (MIST, "..."),
    "logits": (TEAL, "---"),
    "temporaries": (ROSE, ""),
}
"""Fills of what memory is for (`measure.ledger.KINDS`), in every picture the same; neighbours differ in lightness."""
