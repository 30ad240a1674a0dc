"""What was going on when: timelines, where a step's time went, what launching costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from labutils.course.plots import layout
from labutils.course.plots.palette import (
    AMBER,
    FILLS,
    GREY,
    KIND_FILLS,
    NAVY,
    PAPER,
    PHASE_FILLS,
    RUST,
    TEAL,
    Fill,
)
from labutils.results.records import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def timeline(
    ax: Axes, lanes: Mapping[str, Iterable[tuple[float, float, str]]], most: int = 6
) -> Axes:
    """A static trace: one row a lane ("host", "GPU"), its intervals (start_ms, duration_ms,
    category) as blocks.

    In lanes that share categories, and so a legend, the `most` that take the longest get a fill of
    their own; the others share one. The phases of a step have the same fill in every picture.
    """
    rows = {lane: sorted(intervals) for lane, intervals in lanes.items()}
    every = [interval for intervals in rows.values() for interval in intervals]
    if not every:
        raise ValueError("The timeline has no interval: there is nothing to draw.")
    layout.make_room(ax, len(rows), per_row=1.1)
    start, end = min(0.0, *(s for s, _, _ in every)), max(s + d for s, d, _ in every)
    layout.rows(ax, list(rows))
    groups = _lanes_that_share(
        {lane: {c for _, _, c in intervals} for lane, intervals in rows.items()}
    )
    for group in groups:
        fills = _category_fills([interval for lane in group for interval in rows[lane]], most)
        for lane in group:
            _lane(ax, list(rows).index(lane), rows[lane], fills, end - start)
        middle = sum(list(rows).index(lane) for lane in group) / len(group)
        layout.fill_legend(ax, fills, beside=1 - (middle + 0.6) / (len(rows) + 0.2))
    ax.set_xlim(start, end)
    ax.set_xlabel("ms")
    return ax


def _lane(
    ax: Axes,
    row: int,
    intervals: Sequence[tuple[float, float, str]],
    fills: Mapping[str, Fill],
    span: float,
) -> None:
    """The blocks of one lane. Blocks too narrow for a hatch or an edge to be seen get neither."""
    for category, fill in fills.items():
        mine = [(s, d) for s, d, c in intervals if (c if c in fills else "other") == category]
        blocks = _merge(mine, span / 2000)
        wide = [block for block in blocks if block[1] > span / 100]
        narrow = [block for block in blocks if block[1] <= span / 100]
        ax.broken_barh(wide, (row - 0.36, 0.72), linewidth=0.5, zorder=2, **layout.look(fill))
        ax.broken_barh(narrow, (row - 0.36, 0.72), linewidth=0, facecolor=fill[0], zorder=2)


def _lanes_that_share(categories: Mapping[str, set[str]]) -> list[list[str]]:
    """Lanes in groups: those with a category in common are together."""
    groups: list[tuple[list[str], set[str]]] = []
    for lane, mine in categories.items():
        joined = [group for group in groups if group[1] & mine]
        groups = [group for group in groups if not group[1] & mine]
        groups.append(
            (
                [*(name for names, _ in joined for name in names), lane],
                mine.union(*(c for _, c in joined)),
            )
        )
    return [names for names, _ in groups]


def _category_fills(intervals: Iterable[tuple[float, float, str]], most: int) -> dict[str, Fill]:
    """Category -> fill for the `most` longest of them, in order of appearance; "other" for the
    rest.
    """
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
    """Sorted (start, duration) pairs with those nearer than `gap` joined: less than a dot lies
    between them.
    """
    merged: list[tuple[float, float]] = []
    for start, duration in intervals:
        if merged and start - sum(merged[-1]) < gap:
            begin = merged[-1][0]
            merged[-1] = (begin, max(sum(merged[-1]), start + duration) - begin)
        else:
            merged.append((start, duration))
    return merged


def breakdown(ax: Axes, parts: Mapping[str, Any], unit: str = "ms") -> Axes:
    """Where each ms (or GB, or another `unit`) goes: stacked bars, one for `parts` (name -> value)
    or several.

    Several bars are given as bar -> (name -> value). A part keeps its fill in every bar, its number
    stands in it where it fits, and the total at the end.
    """
    bars = parts if parts and all(isinstance(v, Mapping) for v in parts.values()) else {"": parts}
    layout.make_room(ax, len(bars), per_row=0.55)
    names = list(dict.fromkeys(name for bar in bars.values() for name in bar))
    fills = dict(zip(names, islice(cycle(FILLS), len(names)), strict=True))
    longest = max((sum(bar.values()) for bar in bars.values()), default=0) or 1.0
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for name, value in bar.items():
            ax.barh(
                row,
                value,
                left=left,
                height=0.66,
                linewidth=0.7,
                zorder=2,
                **layout.look(fills[name]),
            )
            if value > 0.07 * longest:
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
                number = layout.figure(value)
                ax.text(
                    left + value / 2,
                    row,
                    number,
                    ha="center",
                    va="center",
                    fontsize=9,
                    bbox=box,
                    zorder=3,
                )
            left += value
        total = f"{layout.figure(left)} {unit}"
        ax.annotate(total, (left, row), (6, 0), textcoords="offset points", va="center", fontsize=9)
    layout.rows(ax, list(bars))
    ax.set_xlim(0, 1.16 * longest)
    ax.set_xlabel(unit)
    layout.fill_legend(ax, fills)
    return ax


def launch_cost(
    ax: Axes,
    times: Mapping[str, Mapping[int, Sequence[float] | Mapping[str, float]]],
    launch_us: float,
) -> Axes:
    """Microseconds a call of one operation over the count of numbers it works on, a curve for each
    way to call it.

    `times`: way -> count -> samples in milliseconds, or their summary; bands are p10-p90.
    `launch_us`: what a call alone costs the host.
    """
    styles = zip((NAVY, RUST, TEAL), ("o", "s", "^"), ("-", "--", "-."), strict=True)
    for (way, curve), (color, marker, line) in zip(times.items(), styles, strict=False):
        spreads = {
            count: found if isinstance(found, Mapping) else summarise(found)
            for count, found in curve.items()
        }
        low, median, high = (
            [spread[q] * 1e3 for spread in spreads.values()] for q in ("p10", "median", "p90")
        )
        ax.fill_between(list(curve), low, high, color=color, alpha=0.2, linewidth=0, zorder=2)
        ax.plot(
            list(curve), median, color=color, marker=marker, linestyle=line, label=way, zorder=3
        )
    label = f"one call from Python here: {layout.figure(launch_us)} µs"
    ax.axhline(launch_us, color=GREY, linestyle=":", label=label, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("numbers that the operation works on")
    ax.set_ylabel("microseconds a call")
    ax.legend(loc="upper left")
    return ax


def beside(ax: Axes, steps: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Axes:
    """Two bands a step: when it computed and when it communicated; name -> (start, end, start, end,
    ... in ms) twice.

    What of the lower band has nothing above it is exposed.
    """
    from matplotlib.patches import Patch

    layout.make_room(ax, 1.6 * len(steps), per_row=0.42)
    fills = {"computing": (NAVY, ""), "communicating": (AMBER, "///")}
    for row, bands in enumerate(steps.values()):
        for shift, times, fill in zip((-0.2, 0.2), bands, fills.values(), strict=True):
            spans = [
                (start, end - start) for start, end in zip(times[::2], times[1::2], strict=True)
            ]
            ax.broken_barh(
                spans, (row + shift - 0.18, 0.36), linewidth=0.3, zorder=2, **layout.look(fill)
            )
    layout.rows(ax, list(steps))
    ax.set_xlim(left=0)
    ax.set_xlabel("ms from the beginning of the step")
    handles = [
        Patch(label=name, linewidth=0.7, **layout.look(fill)) for name, fill in fills.items()
    ]
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax
