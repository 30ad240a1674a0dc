"""What peak memory consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labutils.course.plots import layout
from labutils.course.plots.palette import GREY, INK, RUST, Fill
from labutils.course.tables import cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def stacked_memory(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    phases: Sequence[tuple[int, str]],
    fills: Mapping[str, Fill],
    most: int = 600,
) -> Axes:
    """What is held over one step as stacked areas: kind -> bytes after each event.

    `phases` are (event, name). Of more than `most` events, each few are shown by the one at which
    most is held, so that no peak is lost.
    """
    levels = np.array(list(series.values()))
    totals = levels.sum(axis=0)
    count, width = len(totals), -(-len(totals) // most)
    chosen = [at + totals[at : at + width].argmax() for at in range(0, count, width)]
    unit, scale = ("GB", 1e9) if totals.max() >= 1e9 else ("MB", 1e6)
    tops = levels[:, chosen].cumsum(axis=0) / scale
    for kind, low, high in zip(series, [0 * tops[0], *tops], tops, strict=False):
        ax.fill_between(chosen, low, high, step="post", **layout.look(fills[kind]))
    peak = totals.argmax()
    top = totals[peak] / scale
    ax.plot(peak, top, "v", color=RUST, markersize=8, zorder=4)
    side = {"ha": "right", "dots": -8} if peak > 0.5 * count else {"ha": "left", "dots": 8}
    layout.number(ax, f"peak {cell(top)} {unit}", peak, top, va="bottom", **side)
    shown = [(at, name) for at, name in phases if at < count]
    ends = [at for at, _ in shown[1:]] + [count]
    for (at, name), end in zip(shown, ends, strict=True):
        ax.axvline(at, color=GREY, linestyle=":", linewidth=1, zorder=3)
        if end - at > 0.06 * count:
            place = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}
            ax.text((at + end) / 2, 1.13 * top, name, **place)
    ax.set(xlim=(0, count - 1), ylim=(0, 1.2 * top), ylabel=unit)
    ax.set_xlabel("allocations and frees, in order")
    ax.grid(axis="x", visible=False)
    layout.fill_legend(ax, {kind: fills[kind] for kind in series}, beside=0.5)
    return ax
