"""Several series of numbers: as curves and points, as bars side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from labutils.course.plots import layout
from labutils.course.plots.layout import Spread
from labutils.course.plots.palette import FILLS, NAVY, PAPER, PURPLE, RUST, TEAL
from labutils.results.records import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS, LINES = "os^Dv*", ("-", "--", "-.", ":")
COLORS = (NAVY, RUST, PURPLE, TEAL)


def curves(ax: Axes, series: Mapping[str, Mapping[float, float]], xlabel: str, ylabel: str) -> Axes:
    """One line a name through its points (x -> y), with ticks at the points' x."""
    drawn = {name: points for name, points in series.items() if points}
    styles = zip(cycle(MARKERS), cycle(FILLS))
    for (name, points), (marker, (color, _)) in zip(drawn.items(), styles, strict=False):
        ax.plot(*layout.xy(points), color=color, marker=marker, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_ylim(bottom=0)
    ax.set_xticks(sorted({x for points in drawn.values() for x in points}))
    ax.xaxis.set_major_formatter("{x:g}")
    layout.legend(ax, columns=2 if sum(len(name) for name in list(drawn)[:4]) > 44 else 4)
    return ax


def panels(
    axes: Sequence[Axes],
    series: Mapping[str, Mapping[str, Mapping[float, float]]],
    xlabel: str,
    ylabel: str,
) -> Sequence[Axes]:
    """`curves` side by side in axes that share y, panel -> name -> points: one legend below all."""
    for ax, (title, lines) in zip(axes, series.items(), strict=True):
        curves(ax, lines, xlabel, ylabel if ax is axes[0] else "")
        ax.set_title(title)
        if legend := ax.get_legend():
            legend.remove()
    named = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    place = {"loc": "outside lower center", "ncols": max(1, len(named))}
    axes[0].figure.legend(named.values(), named.keys(), **place)
    return axes


def over_decoding(
    ax: Axes,
    model: Mapping[int, Mapping[float, float]],
    measured: Mapping[int, Mapping[str, tuple[float, Spread]]],
    xlabel: str,
) -> Axes:
    """Step time over the time to make one example, for each number of workers: a line of the model,
    and measured points with p10-p90. Both have the same colour.

    measured: workers -> name -> (ms an example, p10-median-p90 of a step). The names stand beside
    the points without workers.
    """
    titles = {0: "no workers", 1: "1 worker"}
    lines = {titles.get(n, f"{n} workers"): points for n, points in model.items()}
    points = {titles.get(n, f"{n} workers"): dict(of.values()) for n, of in measured.items()}
    ax.margins(y=0.15)  # for the topmost name
    colors = dict(zip([*lines, *points], cycle(COLORS), strict=False))
    for (name, line), style in zip(lines.items(), cycle(LINES), strict=False):
        ax.plot(*layout.xy(line), style, color=colors[name], label=f"{name}, predicted", zorder=2)
    for (name, spreads), marker in zip(points.items(), cycle(MARKERS), strict=False):
        low, median, high = zip(*spreads.values(), strict=True) if spreads else ((), (), ())
        ax.vlines(list(spreads), low, high, color=colors[name], linewidth=4, alpha=0.35, zorder=3)
        look = {"markersize": 8, "markeredgecolor": PAPER, "label": f"{name}, measured"}
        ax.plot(list(spreads), median, marker, color=colors[name], zorder=4, **look)
    ax.set(xlabel=xlabel, ylabel="ms an optimizer step", ylim=(0, None))
    layout.legend(ax)
    ax.set_xlim(left=0)
    alone = sorted(measured.get(0, {}).items(), key=lambda item: item[1][0])
    near = 0.06 * max((x for _, (x, _) in alone), default=0.0)
    stack: list[tuple[float, float]] = []
    for name, (x, spread) in alone:
        # Names of points near each other stand one above the other.
        stack = [*stack, (x, spread[2])] if stack and x - stack[0][0] <= near else [(x, spread[2])]
        place = (x, max(top for _, top in stack)), (6, 4 + 14 * (len(stack) - 1))
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.85}
        ax.annotate(name, *place, textcoords="offset points", fontsize=8, bbox=box, zorder=5)
    return ax


def grouped(
    ax: Axes, values: Mapping[str, Mapping[Any, float | Sequence[float]]], ylabel: str
) -> Axes:
    """Upright bars in groups: name -> group -> a number, or samples (median and p10-p90).

    A name has the same fill in every group. Every name has the same groups.
    """
    groups = list(next(iter(values.values())))
    for place, (name, by_group) in enumerate(values.items()):
        shift = (place - (len(values) - 1) / 2) * 0.8 / len(values)  # from the group's middle
        at = [group + shift for group in range(len(groups))]
        spreads = [layout.spread_of(summarise(np.atleast_1d(by_group[group]))) for group in groups]
        low, median, high = np.transpose(spreads)
        ax.bar(at, median, 0.74 / len(values), label=name, **layout.look(FILLS[place]))
        ax.vlines(at, low, high, color=RUST, linewidth=2, zorder=3)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(ylabel)
    ax.grid(axis="x", visible=False)
    return ax
