"""How good predictions were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import INK, MIST, NAVY, RUST
from labutils.course.tables import cell

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_OFF = 30.0
"""Predictions farther off than this factor are drawn at the edge, as arrows."""


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
