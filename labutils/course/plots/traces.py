"""What was going on when: timelines, and where a step's time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from labutils.course.plots import layout
from labutils.course.plots.palette import FILLS, KIND_FILLS, PAPER, PHASE_FILLS, SHARE_FILLS, Fill
from labutils.course.tables import cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Interval = tuple[float, float, str]
"""Start and duration in ms, and category."""


def timeline(ax: Axes, lanes: Mapping[str, Iterable[Interval]], most: int = 6) -> Axes:
    """A static trace: one row a lane ("host", "GPU"), its intervals as blocks.

    The `most` categories of a lane that take the longest get a fill of their own; the others share
    one. The phases of a step, and the kinds of kernels, have the same fill in every picture. Blocks
    of a category too short to be seen stick out of the lane, a little wider than they are.
    Raises `ValueError` where there is nothing to draw.
    """
    rows = {lane: sorted(intervals) for lane, intervals in lanes.items()}
    every = [interval for intervals in rows.values() for interval in intervals]
    if not every:
        raise ValueError("The timeline has no interval: there is nothing to draw.")
    layout.make_room(ax, len(rows), per_row=1.1)
    start, end = min(0.0, *(s for s, _, _ in every)), max(s + d for s, d, _ in every)
    layout.rows(ax, list(rows))
    for place, intervals in enumerate(rows.values()):
        fills = _category_fills(intervals, most)
        _draw_lane(ax, place, intervals, fills, end - start)
        layout.fill_legend(ax, fills, beside=1 - (place + 0.6) / (len(rows) + 0.2))
    ax.set(xlim=(start, end), xlabel="ms")
    ax.label_outer()  # another picture below it, of the same time, names the axis for both
    return ax


def typical(lanes: Mapping[str, Iterable[Interval]], wide: float) -> dict[str, list[Interval]]:
    """The `wide` milliseconds that are the most like the whole: each category fills its lane as
    much as on average, and counts by that. One that is missing counts as much as one of ten times
    its share. They begin in the middle four fifths, as a step's first and last calls are unlike the
    others. Blocks are cut."""
    blocks = [(s, s + ms, lane, kind) for lane, of in lanes.items() for s, ms, kind in of]
    first, last = min(blocks, default=(0.0,))[0], max((end for _, end, *_ in blocks), default=wide)
    edges, off = np.arange(first, last + 2 * wide, wide), 0.0
    for what in {block[2:] for block in blocks}:
        at = np.array(sorted(block[:2] for block in blocks if block[2:] == what))
        ms = at[:, 1] - at[:, 0]
        ended = np.cumsum(ms)  # milliseconds of blocks until each one's end
        filled = np.diff(np.interp(edges, at.ravel(), np.stack([ended - ms, ended], 1).ravel()))
        off += filled.mean() * np.abs(np.log((filled / (filled.mean() or 1.0) + 0.1) / 1.1))
    inside = np.abs(edges[:-1] - (first + last) / 2) <= 0.4 * (last - first)
    begin = edges[np.argmin(np.where(inside, off, np.inf))]
    cut = [(lane, max(s, begin), min(end, begin + wide), kind) for s, end, lane, kind in blocks]
    return {
        lane: [(s - begin, end - s, kind) for one, s, end, kind in cut if one == lane and s < end]
        for lane in lanes
    }


def _draw_lane(
    ax: Axes, row: int, intervals: Sequence[Interval], fills: Mapping[str, Fill], span: float
) -> None:
    """The blocks of one lane. Blocks too narrow for a hatch or an edge to be seen get neither."""
    for category, fill in fills.items():
        blocks = [(s, d) for s, d, c in intervals if (c if c in fills else "other") == category]
        if sum(duration for _, duration in blocks) < span / 100:
            flags = [(s, max(d, span / 200)) for s, d in blocks]
            ax.broken_barh(flags, (row - 0.46, 0.92), linewidth=0, facecolor=fill[0], zorder=3)
            continue
        wide = [block for block in blocks if block[1] > span / 100]
        narrow = [block for block in blocks if block[1] <= span / 100]
        ax.broken_barh(wide, (row - 0.36, 0.72), **layout.look(fill))
        ax.broken_barh(narrow, (row - 0.36, 0.72), linewidth=0, facecolor=fill[0], zorder=2)


def _category_fills(intervals: Iterable[Interval], most: int) -> dict[str, Fill]:
    """Category -> fill for the `most` longest, in order of appearance; "other" for the rest."""
    totals: dict[str, float] = {}
    for _, duration, category in sorted(intervals):
        totals[category] = totals.get(category, 0.0) + duration
    longest = sorted(totals, key=totals.__getitem__, reverse=True)[:most]
    known = PHASE_FILLS if set(longest) <= PHASE_FILLS.keys() else KIND_FILLS
    taken = {known[category] for category in longest if category in known}
    free = cycle([fill for fill in FILLS if fill not in taken] or FILLS)
    fills = {c: known[c] if c in known else next(free) for c in totals if c in longest}
    return fills if len(totals) <= most else fills | {"other": FILLS[-1]}


def breakdown(ax: Axes, bars: Mapping[str, Mapping[str, float]], unit: str = "ms") -> Axes:
    """Where each ms (or GB, or another `unit`) goes: stacked bars, bar -> part -> value.

    A part keeps its fill in every bar, and its number stands in it where it fits. The total stands
    at the end. Shares in % need no total, and those below 0.5 in every bar are left out.
    """
    layout.make_room(ax, len(bars), per_row=0.55)
    longest = max((sum(bar.values()) for bar in bars.values()), default=0) or 1.0
    least = 0.5 if unit == "%" else 0.0
    names = dict.fromkeys(n for bar in bars.values() for n, value in bar.items() if value >= least)
    fills = dict(zip(names, cycle(FILLS), strict=False))
    if names.keys() <= SHARE_FILLS.keys():
        fills = {name: SHARE_FILLS[name] for name in names}
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for name in [name for name in bar if name in names]:
            value = bar[name]
            ax.barh(row, value, 0.66, left=left, **layout.look(fills[name]))
            if value > 0.06 * longest:
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
                middle = left + value / 2
                layout.number(ax, cell(value), middle, row, dots=0, ha="center", bbox=box)
            left += value
        if unit != "%":
            layout.number(ax, f"{cell(left)} {unit}", left, row)
    layout.rows(ax, list(bars))
    ax.set(xlim=(0, (1 if unit == "%" else 1.16) * longest), xlabel=unit)
    layout.fill_legend(ax, fills)
    return ax
