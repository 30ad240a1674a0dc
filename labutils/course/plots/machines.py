"""What the hardware allows: matrix rates, rooflines, links between GPUs, slower hosts, several GPUs
foretold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import dist
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import AMBER, GREY, INK, MIST, NAVY, PAPER, PURPLE, RUST, TEAL
from labutils.results.records import Run, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.profiling.roofline import Roofline


def peaks(
    ax: Axes,
    measured: Mapping[str, Sequence[float]],
    dense: Mapping[str, float] | None = None,
    sparse: Mapping[str, float] | None = None,
) -> Axes:
    """One row a number format: measured matrix rate (median, p10-p90) against the data sheet's
    dense and sparse peaks.

    All in TFLOP/s; `measured` holds samples. Formats that the data sheet lacks have no mark.
    """
    dense, sparse = dense or {}, sparse or {}
    layout.make_room(ax, len(measured), per_row=0.42)
    for row, (dtype, samples) in enumerate(measured.items()):
        spread = summarise(samples)
        median, low, high = spread["median"], spread["p10"], spread["p90"]
        ax.barh(row, median, height=0.5, color=NAVY, zorder=2)
        ax.plot(
            [low, high],
            [row, row],
            color=AMBER,
            linestyle="-",
            linewidth=4,
            solid_capstyle="butt",
            zorder=3,
        )
        share = (
            f", {100 * median / dense[dtype]:.0f} % of {layout.figure(dense[dtype])}"
            if dtype in dense
            else ""
        )
        right = max(high, dense.get(dtype, 0), sparse.get(dtype, 0))
        text = f"{layout.figure(median)}{share}"
        ax.annotate(text, (right, row), (7, 0), textcoords="offset points", va="center", fontsize=9)
    for sheet, style, label in (
        (dense, "-", "data sheet, dense"),
        (sparse, ":", "data sheet, with sparsity"),
    ):
        marks = [(row, sheet[dtype]) for row, dtype in enumerate(measured) if dtype in sheet]
        for row, peak in marks:
            ends = [row - 0.38, row + 0.38]
            ax.plot(
                [peak, peak],
                ends,
                color=RUST,
                linestyle=style,
                linewidth=2.4,
                label=label,
                zorder=4,
            )
            label = None
    layout.rows(ax, list(measured))
    widest = max(
        [*(max(samples) for samples in measured.values()), *dense.values(), *sparse.values()],
        default=1.0,
    )
    shown = {dtype for dtype in measured if dtype in dense or dtype in sparse}
    ax.set_xlim(0, (1.35 if shown else 1.2) * widest)
    ax.set_xlabel("TFLOP/s of a large matrix product (bar: median, line at its end: p10-p90)")
    if shown:
        ax.legend(loc="upper right")  # the first rows, fp32 and tf32, have the shortest bars
    return ax


def slower_hosts(
    ax: Axes,
    model: Mapping[str, Mapping[float, float]],
    measured: Mapping[str, Mapping[float, float]],
    rivals: Mapping[str, float],
) -> Axes:
    """Steps over what the host takes longer for a launch: `model` curves, `measured` points,
    `rivals` as levels.

    model and measured: name -> microseconds -> ms; a name has the same colour in both. rivals:
    label -> ms.
    """
    colors = dict(zip(model, cycle((NAVY, RUST, TEAL, PURPLE)), strict=False))
    markers, lines = cycle("os^D"), cycle(("-", "--", "-.", ":"))
    for (name, points), line in zip(model.items(), lines, strict=False):
        ax.plot(
            *layout.columns(points),
            color=colors[name],
            linestyle=line,
            label=f"{name}, predicted",
            zorder=2,
        )
    for (name, points), marker in zip(measured.items(), markers, strict=False):
        look = {"linestyle": "", "marker": marker, "markersize": 7, "markeredgecolor": PAPER}
        ax.plot(
            *layout.columns(points),
            color=colors.get(name, INK),
            label=f"{name}, measured",
            zorder=4,
            **look,
        )
    for (label, ms), line in zip(rivals.items(), cycle((":", (0, (5, 5)))), strict=False):
        ax.axhline(ms, color=GREY, linestyle=line, linewidth=1.8, label=label, zorder=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("what the host takes longer for a launch, µs")
    ax.set_ylabel("ms an optimizer step")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax


def roofline(
    ax: Axes, roofline: Roofline | Mapping[str, Roofline], points: Mapping[str, tuple[float, float]]
) -> Axes:
    """One roofline, or several by name, and numbered `points` (name -> (FLOP per byte, TFLOP/s))
    under them.

    Both axes are logarithmic. The legend beside the picture names the points.
    """
    roofs = roofline if isinstance(roofline, Mapping) else {"roofline": roofline}
    places = [p[0] for p in points.values()] + [roof.ridge for roof in roofs.values()]
    low, high = min(places) / 8, max(places) * 8
    for (name, roof), style in zip(roofs.items(), cycle(("-", "--", "-.", ":")), strict=False):
        knees = [low, roof.ridge, high]
        label = f"{name}: {layout.figure(roof.rate)} TFLOP/s, {layout.figure(roof.bandwidth)} GB/s"
        ax.plot(
            knees,
            [roof.attainable(k) for k in knees],
            color=INK,
            linestyle=style,
            label=label,
            zorder=2,
        )
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
    """Write 1, 2, .. beside the points, each on the side that is farthest from every point and
    number so far.
    """
    taken = [tuple(place) for place in ax.transData.transform(points)] if points else []
    sides = ((0, -1), (1, 0), (0, 1), (-1, 0), (0.7, -0.7), (-0.7, -0.7), (0.7, 0.7), (-0.7, 0.7))
    pixels = distance * ax.figure.dpi / 72
    for number, (x, y) in enumerate(list(taken), 1):
        spots = [(x + pixels * dx, y + pixels * dy) for dx, dy in sides]
        best = max(
            range(len(sides)),
            key=lambda i: min(pixels * 1.4, *(dist(spots[i], other) for other in taken)),
        )
        taken.append(spots[best])
        offset = tuple(distance * side for side in sides[best])
        look = {
            "ha": "center",
            "va": "center",
            "fontsize": 8,
            "weight": "bold",
            "path_effects": layout.white_edge(1),
        }
        ax.annotate(
            str(number), points[number - 1], offset, textcoords="offset points", zorder=4, **look
        )


def link(ax: Axes, samples: Mapping[str, Sequence[float]], marks: Mapping[str, float]) -> Axes:
    """Bus bandwidth of an all-reduce over the message's bytes, and where messages of interest lie
    (name -> bytes).
    """
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
    """One row a run: the measured step as a bar with p10-p90, what was foretold as a diamond, one
    process's as a line.

    Runs need `predicted_step_ms`; `alone` has one process's step (ms) by run's name. Steps are
    shown in parts of that.
    """
    drawn = {
        name: run for name, run in runs.items() if layout.spread(run, "step_ms") and name in alone
    }
    layout.make_room(ax, len(drawn), per_row=0.42)
    farthest = 1.0
    for row, (name, run) in enumerate(drawn.items()):
        low, median, high = (100 * value / alone[name] for value in layout.spread(run, "step_ms"))
        ax.barh(
            row,
            median,
            height=0.6,
            color=MIST,
            edgecolor=INK,
            linewidth=0.8,
            label="measured, p10-p90",
            zorder=2,
        )
        ax.plot([low, high], [row, row], color=NAVY, linestyle="-", linewidth=2, zorder=3)
        predicted = run.metric("predicted_step_ms")
        if predicted:
            look = {
                "color": RUST,
                "marker": "D",
                "linestyle": "",
                "markersize": 7,
                "markeredgecolor": PAPER,
            }
            ax.plot([100 * predicted / alone[name]], [row], label="predicted", zorder=4, **look)
        right = max(high, 100 * (predicted or 0) / alone[name])
        farthest = max(farthest, right)
        text = f"{layout.figure(run.metric('step_ms'))} ms"
        ax.annotate(text, (right, row), (9, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(
        100, color=INK, linestyle="--", linewidth=1.2, label="one process, a rank's share", zorder=3
    )
    layout.rows(ax, list(drawn))
    ax.set_xlim(0, 1.2 * max(farthest, 100))
    ax.set_xlabel("optimizer step, % of one process's")
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(handles.values(), handles.keys(), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return ax
