"""Verdicts on claims, and how good predictions were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import INK, MIST, NAVY, RUST, VERDICT_MARKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.course.predictions import Score

Pair = tuple[str, str]
"""A claim's verdict on each of two sides."""
PLACES = (0.03, 0.14)
"""Where in its column each side's mark stands."""
MOST_OFF = 30.0
"""Predictions farther off than this factor are drawn at the edge, as arrows."""


def verdicts(
    ax: Axes, judged: Mapping[str, Mapping[str, Pair]], sides: Pair, columns: int = 3
) -> Axes:
    """All verdicts on one page: a line a claim, with one mark a side, in columns.

    judged: group (an article) -> claim's name -> its verdict on each of the `sides` ("H200",
    "here"). A group that goes on in the next column is named there again. The figure gets the size
    of a page.
    """
    lines = _in_columns(judged, columns)
    longest = max(len(column) for column in lines)
    for column, entries in enumerate(lines):
        for row, (name, pair) in enumerate(entries):
            look = {"va": "center", "color": INK}
            if pair is None:
                ax.text(column, row, name, fontsize=8, weight="bold", **look)
                continue
            ax.text(column + 0.2, row, name, fontsize=6.5, **look)
            for place, verdict in zip(PLACES, pair, strict=True):
                mark = {"linestyle": "", "markersize": 5, "clip_on": False}
                ax.plot(column + place, row, **mark, **VERDICT_MARKS[verdict])
        for place, side in zip(PLACES, sides, strict=True):
            look = {"rotation": 60, "ha": "left", "va": "bottom", "fontsize": 7.5, "color": INK}
            ax.text(column + place, -1.3, side, **look)
    ax.set(xlim=(0, len(lines)), ylim=(longest - 0.5, -1.3))
    ax.set_axis_off()
    ax.figure.set_size_inches(7.6, 1.1 + min(0.142 * longest, 10))  # one page of A4 or letter
    pairs = [pair for claims in judged.values() for pair in claims.values()]
    for verdict, mark in VERDICT_MARKS.items():
        counts = [sum(pair[at] == verdict for pair in pairs) for at in (0, 1)]
        if any(counts):
            label = f"{verdict}\n{sides[0]} {counts[0]}, {sides[1]} {counts[1]}"
            ax.plot([], [], linestyle="", markersize=6, label=label, **mark)
    ax.figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return ax


def _in_columns(
    groups: Mapping[str, Mapping[str, Pair]], columns: int
) -> list[list[tuple[str, Pair | None]]]:
    """Columns of lines (name, verdicts) of nearly equal length; a group's name has no verdicts."""
    total = sum(1 + len(claims) for claims in groups.values()) + columns - 1
    longest = max(2, -(-total // columns))
    filled: list[list[tuple[str, Pair | None]]] = [[]]
    for group, claims in groups.items():
        if len(filled[-1]) > longest - 2:  # no name without a claim below it
            filled.append([])
        filled[-1].append((group, None))
        for claim in claims.items():
            if len(filled[-1]) >= longest:
                filled.append([(f"{group}, continued", None)])
            filled[-1].append(claim)
    return filled


def calibration(ax: Axes, scores: Sequence[Score], near: float) -> Axes:
    """Predicted over measured, one row a prediction, on a logarithmic axis.

    The band is within a factor of `near`. Scores without a factor are left out. Each row's numbers
    stand at its right.
    """
    told = [score for score in scores if score.factor is not None]
    layout.make_room(ax, len(told), per_row=0.22)
    ax.axvspan(1 / near, near, color=MIST, label=f"within a factor of {near:g}", zorder=1)
    ax.axvline(1, color=INK, linestyle="-", linewidth=1, zorder=2)
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
    widest = min(MOST_OFF, 1.5 * max([2 * near, *(score.off for score in told)]))
    for row, score in enumerate(told):
        at = min(max(score.factor, 1 / widest), widest)
        marker = "o" if at == score.factor else ">" if at == widest else "<"
        ax.hlines(row, *sorted((1, at)), color=NAVY, linewidth=1.2, zorder=3)
        ax.plot(at, row, marker, color=NAVY if score.off <= near else RUST, zorder=4, clip_on=False)
        numbers = [
            f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
            for value in (score.predicted, score.measured)
        ]
        ax.annotate(f"{' | '.join(numbers)} {score.unit}", (1.02, row), **beside)
    ax.annotate("you | measured", (1.02, -1), weight="bold", **beside)
    layout.rows(ax, [f"{score.lab}  {score.topic}" for score in told])
    ax.tick_params(axis="y", labelsize=8)
    ax.set(xscale="log", xlim=(1 / widest, widest))
    ticks = [t for t in (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20) if 1 / widest <= t <= widest]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("predicted / measured (logarithmic)")
    layout.legend(ax)
    return ax
