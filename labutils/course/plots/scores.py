"""Verdicts on claims, and how good predictions were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import INK, MIST, NAVY, RUST, VERDICT_MARKS
from labutils.course.tables import cell

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Pair = tuple[str, str]
"""A claim's verdict on each of two sides."""
PLACES = (0.03, 0.14)
"""Where in its column each side's mark stands."""
COLUMNS = 5
"""Of all verdicts."""
MOST_OFF = 30.0
"""Predictions farther off than this factor are drawn at the edge, as arrows."""


def verdicts(ax: Axes, judged: Mapping[str, Mapping[str, Pair]], sides: Pair) -> Axes:
    """All verdicts on less than a page: article by article, a line a claim, with one mark a side.

    judged: article -> claim's name -> its verdict on each of the `sides` ("ours", "here"). The
    figure gets the size of a page.
    """
    lines = [line for key, claims in judged.items() for line in ((key, None), *claims.items())]
    longest = -(-len(lines) // COLUMNS)
    look = {"va": "center", "color": INK}
    for at, (name, pair) in enumerate(lines):
        column, row = divmod(at, longest)
        if pair is None:
            ax.text(column, row, name, fontsize=8, weight="bold", **look)
            continue
        ax.text(column + 0.2, row, name, fontsize=min(6.5, 140 / len(name)), **look)
        for place, verdict in zip(PLACES, pair, strict=True):
            mark = {"linestyle": "", "markersize": 5, "clip_on": False}
            ax.plot(column + place, row, **mark, **VERDICT_MARKS[verdict])
    for column in range(COLUMNS):
        for place, side in zip(PLACES, sides, strict=True):
            above = {"rotation": 90, "ha": "left", "va": "bottom", "fontsize": 7.5, "color": INK}
            ax.text(column + place, -1.3, side, **above)
    ax.set(xlim=(0, COLUMNS), ylim=(longest - 0.5, -1.3))
    ax.set_axis_off()
    ax.figure.set_size_inches(7.6, 1.1 + 0.142 * longest)
    pairs = [pair for claims in judged.values() for pair in claims.values()]
    for verdict, mark in VERDICT_MARKS.items():
        counts = [sum(pair[at] == verdict for pair in pairs) for at in (0, 1)]
        if any(counts):
            label = f"{verdict}\n{sides[0]} {counts[0]}, {sides[1]} {counts[1]}"
            ax.plot([], [], linestyle="", markersize=6, label=label, **mark)
    ax.figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return ax


def calibration(ax: Axes, scores: pd.DataFrame, near: float) -> Axes:
    """Predicted over measured, one row a prediction (of `scores_of`), on a logarithmic axis.

    The band is within a factor of `near`. Scores without a factor are left out. Each row's numbers
    stand at its right.
    """
    scored = scores.dropna(subset="factor")
    layout.make_room(ax, len(scored), per_row=0.22)
    ax.axvspan(1 / near, near, color=MIST, label=f"within a factor of {near:g}", zorder=1)
    ax.axvline(1, color=INK, linestyle="-", linewidth=1, zorder=2)
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
    widest = min(MOST_OFF, 1.5 * max(2 * near, scored["off"].max()))
    for row, score in enumerate(scored.itertuples()):
        at = min(max(score.factor, 1 / widest), widest)
        marker = "o" if at == score.factor else ">" if at == widest else "<"
        ax.hlines(row, *sorted((1, at)), color=NAVY, linewidth=1.2, zorder=3)
        ax.plot(at, row, marker, color=NAVY if score.off <= near else RUST, zorder=4, clip_on=False)
        numbers = f"{cell(score.predicted)} | {cell(score.measured)} {score.unit}"
        ax.annotate(numbers, (1.02, row), **beside)
    ax.annotate("you | measured", (1.02, -1), weight="bold", **beside)
    layout.rows(ax, list(scored["lab"] + "  " + scored["topic"]))
    ax.tick_params(axis="y", labelsize=8)
    ax.set(xscale="log", xlim=(1 / widest, widest))
    ticks = [t for t in (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20) if 1 / widest <= t <= widest]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("predicted / measured (logarithmic)")
    layout.legend(ax)
    return ax
