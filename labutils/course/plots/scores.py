"""Verdicts on claims, and how good predictions were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import INK, MIST, NAVY, RUST, VERDICT_MARKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.course.predictions import Score


def verdicts(
    ax: Axes,
    judged: Mapping[str, Mapping[str, tuple[str, str]]],
    sides: tuple[str, str],
    columns: int = 3,
) -> Axes:
    """All verdicts on one page: a line a claim, with one mark a side, in `columns` from top to
    bottom.

    judged: group (an article) -> claim's name -> its verdict on each of the `sides` ("H200",
    "here"). A group that goes on in the next column is named there again. The figure gets the size
    of a page.
    """
    lines = _in_columns(judged, columns)
    longest = max(len(column) for column in lines)
    for column, entries in enumerate(lines):
        for row, (name, pair) in enumerate(entries):
            if pair is None:
                ax.text(column, row, name, va="center", fontsize=8, weight="bold", color=INK)
                continue
            for place, verdict in zip((0.03, 0.14), pair, strict=True):
                ax.plot(
                    column + place,
                    row,
                    linestyle="",
                    markersize=5,
                    clip_on=False,
                    **VERDICT_MARKS[verdict],
                )
            ax.text(column + 0.2, row, name, va="center", fontsize=6.5, color=INK)
    for column in range(len(lines)):
        for place, side in zip((0.03, 0.14), sides, strict=True):
            ax.text(
                column + place,
                -1.3,
                side,
                rotation=60,
                ha="left",
                va="bottom",
                fontsize=7.5,
                color=INK,
            )
    ax.set(xlim=(0, len(lines)), ylim=(longest - 0.5, -1.3))
    ax.set_axis_off()
    ax.figure.set_size_inches(
        7.6, 1.1 + min(0.142 * longest, 10)
    )  # one page of A4 or letter, if need be closer
    _verdict_legend(ax, [pair for claims in judged.values() for pair in claims.values()], sides)
    return ax


def _in_columns(
    groups: Mapping[str, Mapping[str, tuple[str, str]]], columns: int
) -> list[list[tuple[str, tuple[str, str] | None]]]:
    """Columns of lines (name, verdicts), as equal in length as can be; a line without verdicts is a
    group's name.
    """
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
    given = {verdict for pair in pairs for verdict in pair}
    for verdict, mark in VERDICT_MARKS.items():
        if verdict not in given:
            continue
        counts = ", ".join(
            f"{side} {sum(pair[at] == verdict for pair in pairs)}" for at, side in enumerate(sides)
        )
        ax.plot([], [], linestyle="", markersize=6, label=f"{verdict}\n{counts}", **mark)
    ax.figure.legend(loc="outside lower center", ncols=4, fontsize=8)


MOST_OFF = 30.0
"""Predictions farther off than this factor are drawn at the edge, as arrows."""


def calibration(ax: Axes, scores: Sequence[Score], near: float) -> Axes:
    """Predicted over measured, one row a prediction, on a logarithmic axis; the band: within a
    factor of `near`.

    Scores without a factor are left out. Each row's numbers stand at its right.
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
        ax.plot([1, at], [row, row], color=NAVY, linestyle="-", linewidth=1.2, zorder=3)
        look = {"color": NAVY if score.off <= near else RUST, "marker": marker, "linestyle": ""}
        ax.plot(at, row, zorder=4, clip_on=False, **look)
        numbers = f"{layout.three_figures(score.predicted)} | {layout.three_figures(score.measured)} {score.unit}"
        ax.annotate(numbers, (1.02, row), **beside)
    ax.annotate("you | measured", (1.02, -1), weight="bold", **beside)
    layout.rows(ax, [f"{score.lab}  {score.topic}" for score in told])
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xscale("log")
    ax.set_xlim(1 / widest, widest)
    ticks = [
        tick for tick in (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20) if 1 / widest <= tick <= widest
    ]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("predicted / measured (logarithmic)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0))
    return ax
