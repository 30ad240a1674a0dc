"""Several series of numbers: as curves, as bars side by side, as points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.layout import Spread
from labutils.course.plots.palette import AMBER, DARK, FILLS, INK, NAVY, PAPER, TEAL, Fill
from labutils.results.records import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curves(ax: Axes, series: Mapping[str, Mapping[float, float]], xlabel: str, ylabel: str) -> Axes:
    """One line a name through its points (x -> y), with ticks at the points' x; names without
    points are left out.
    """
    drawn = {name: points for name, points in series.items() if points}
    for (name, points), marker, (color, _) in zip(
        drawn.items(), cycle("os^Dv*"), cycle(FILLS), strict=False
    ):
        ax.plot(*layout.columns(points), color=color, marker=marker, label=name)
    ax.set_ylim(bottom=0)
    ax.set_xticks(sorted({x for points in drawn.values() for x in points}))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if drawn:
        wide = (
            sum(map(len, list(drawn)[:4])) > 44
        )  # characters of a row of four, beside their lines
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2 if wide else 4)
    return ax


def panels(
    axes: Sequence[Axes],
    series: Mapping[str, Mapping[str, Mapping[float, float]]],
    xlabel: str,
    ylabel: str,
) -> Sequence[Axes]:
    """`curves` side by side, panel -> name -> points: the same names in each, one y axis, one
    legend below all.
    """
    for ax, (title, lines) in zip(axes, series.items(), strict=True):
        curves(ax, lines, xlabel, ylabel if ax is axes[0] else "")
        ax.set_title(title)
        if legend := ax.get_legend():
            legend.remove()
    every = [y for lines in series.values() for points in lines.values() for y in points.values()]
    for ax in axes:
        ax.set_ylim(0, 1.08 * max(every, default=1.0))
    handles, labels = max(
        (ax.get_legend_handles_labels() for ax in axes), key=lambda found: len(found[1])
    )
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    return axes


def counts(ax: Axes, series: Mapping[str, Sequence[int]], xlabel: str, ylabel: str) -> Axes:
    """Bars side by side: one fill a name, one group for each of its counts, numbered from 1."""
    width = 0.8 / max(1, len(series))
    longest = max((len(values) for values in series.values()), default=0)
    for place, ((name, values), fill) in enumerate(zip(series.items(), cycle(FILLS), strict=False)):
        at = [
            group + width * (place - (len(series) - 1) / 2) for group in range(1, len(values) + 1)
        ]
        ax.bar(at, values, width, linewidth=0.6, label=name, zorder=2, **layout.look(fill))
    ax.set_xticks(range(1, longest + 1))
    ax.grid(axis="x", visible=False)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if series:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def magnitudes(ax: Axes, rows: Mapping[str, Mapping[str, float]], xlabel: str = "") -> Axes:
    """Counts of very different size on a logarithmic axis: for each row, a bar for each of its
    names.

    Every row has the same names. Read the numbers at the bars' ends: the lengths are logarithms.
    """
    names = list(next(iter(rows.values())))
    layout.make_room(ax, len(rows), per_row=0.5)
    height = 0.8 / len(names)
    for row, counts in enumerate(rows.values()):
        for place, (name, count) in enumerate(counts.items()):
            at = row + (place - (len(names) - 1) / 2) * height
            ax.barh(
                at,
                count,
                height=0.94 * height,
                linewidth=0.7,
                zorder=2,
                **layout.look(FILLS[names.index(name)]),
            )
            text = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            ax.annotate(_in_words(count), (count, at), (4, 0), **text)
    ax.set_xscale("log")
    every = [count for counts in rows.values() for count in counts.values()]
    ax.set_xlim(min(every) / 8, max(every) * 30)
    layout.rows(ax, list(rows))
    ax.set_xlabel(f"{xlabel} (each mark of the axis is a factor of ten)")
    layout.fill_legend(ax, dict(zip(names, FILLS, strict=False)))
    return ax


def _in_words(count: float) -> str:
    """A count as it is said: 65.5 thousand, 8.19 billion."""
    for unit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= unit:
            return f"{count / unit:.3g} {word}"
    return f"{count:g}"


def grouped(
    ax: Axes, times: Mapping[str, Mapping[str, Sequence[float]]], fills: Sequence[Fill] = FILLS
) -> Axes:
    """Upright bars in groups: `times` is name -> group -> samples in ms; the median with its
    p10-p90 range.

    A name has the same fill in every group. Every name has the same groups.
    """
    groups = list(next(iter(times.values())))
    width = 0.8 / len(times)
    for place, (name, by_group) in enumerate(times.items()):
        spreads = [summarise(by_group[group]) for group in groups]
        at = [number + (place - (len(times) - 1) / 2) * width for number in range(len(groups))]
        medians = [spread["median"] for spread in spreads]
        error = [
            [s["median"] - s["p10"] for s in spreads],
            [s["p90"] - s["median"] for s in spreads],
        ]
        look = layout.look(fills[place]) | {"linewidth": 0.7, "capsize": 3}
        ax.bar(at, medians, 0.92 * width, yerr=error, label=name, zorder=2, **look)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel("ms (median, p10-p90)")
    ax.grid(axis="x", visible=False)
    return ax


def over_decoding(
    ax: Axes,
    model: Mapping[int, Mapping[float, float]],
    measured: Mapping[int, Mapping[str, tuple[float, Spread]]],
    xlabel: str,
) -> Axes:
    """Step time over the time to make one example: a line of the `model` for each number of
    workers, and `measured` points: workers -> name -> (ms an example, p10-median-p90 of a step)."""
    lines, markers = cycle(("-", "--", "-.", ":")), cycle("os^Dv")
    looks = {
        workers: (color, next(lines), next(markers))
        for workers, color in zip(model, cycle(DARK + (TEAL,)), strict=False)
    }
    for workers, points in model.items():
        color, line, _ = looks[workers]
        label = "no workers" if workers == 0 else f"{workers} worker{'s' if workers > 1 else ''}"
        ax.plot(
            *layout.columns(points),
            color=color,
            linestyle=line,
            label=f"{label}, predicted",
            zorder=2,
        )
    for workers, points in measured.items():
        color, _, marker = looks[workers]
        at = [x for x, _ in points.values()]
        spreads = [spread for _, spread in points.values()]
        ax.vlines(
            at,
            [s[0] for s in spreads],
            [s[2] for s in spreads],
            color=color,
            linewidth=4,
            alpha=0.35,
            zorder=3,
        )
        look = {"linestyle": "", "marker": marker, "markersize": 8, "markeredgecolor": PAPER}
        label = "no workers" if workers == 0 else f"{workers} workers"
        ax.plot(
            at, [s[1] for s in spreads], color=color, label=f"{label}, measured", zorder=4, **look
        )
    ax.margins(y=0.15)  # for the topmost name
    _name_points(ax, measured.get(0, {}))
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("ms an optimizer step")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


NEIGHBOURS = 0.06
"""Points nearer to each other than this share of the axis have their names one above the other."""


def _name_points(ax: Axes, points: Mapping[str, tuple[float, Spread]]) -> None:
    """Each point's name beside it, on paper of its own: lines and other points are all around."""
    width = max((x for x, _ in points.values()), default=0.0)
    stack: list[tuple[float, float]] = []
    for name, (x, spread) in sorted(points.items(), key=lambda item: item[1][0]):
        if stack and x - stack[0][0] > NEIGHBOURS * width:
            stack = []
        stack.append((x, spread[2]))
        ax.annotate(
            name,
            (x, max(top for _, top in stack)),
            (6, 4 + 14 * (len(stack) - 1)),
            textcoords="offset points",
            fontsize=8,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.85},
            zorder=5,
        )


def errors(ax: Axes, found: Mapping[str, Mapping[str, float]]) -> Axes:
    """One row a form, on a logarithmic axis: what is off (a mark each) by which share."""
    layout.make_room(ax, len(found), per_row=0.42)
    kinds = list(dict.fromkeys(what for row in found.values() for what in row))
    for what, marker, color in zip(kinds, "osD^", cycle((NAVY, AMBER, TEAL)), strict=False):
        at = [(row[what], place) for place, row in enumerate(found.values()) if row.get(what)]
        look = {"markeredgecolor": INK, "markersize": 9, "linestyle": "", "zorder": 3}
        ax.plot(*zip(*at, strict=True), marker=marker, color=color, label=f"{what} off by", **look)
    ax.set_xscale("log")
    layout.rows(ax, list(found))
    ax.set_xlabel("share, against float32 (each mark of the axis is a factor of ten)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax
