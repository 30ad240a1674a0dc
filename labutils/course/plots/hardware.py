"""What the hardware allows: matrix rates, rooflines, links between GPUs, predicted ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import AMBER, INK, NAVY, PAPER, RUST
from labutils.course.tables import cell
from labutils.profiling.gpu_specs import DTYPES, Spec
from labutils.results.records import Run, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labutils.profiling.roofline import Roofline


def peaks(ax: Axes, run: Run, sheet: Spec) -> Axes:
    """One row a number format: the measured matrix rate against the data sheet's peaks.

    `run` holds the probe's samples, drawn as median with p10-p90; formats that the sheet lacks have
    no mark.
    """
    measured = {dtype: run.samples.get(f"tflops_{dtype}") for dtype in DTYPES}
    measured = {dtype: samples for dtype, samples in measured.items() if samples}
    layout.make_room(ax, len(measured), per_row=0.42)
    for row, (dtype, samples) in enumerate(measured.items()):
        low, median, high = layout.spread_of(summarise(samples))
        ax.barh(row, median, height=0.5, color=NAVY, zorder=2)
        ax.hlines(row, low, high, color=AMBER, linewidth=4, zorder=3)
        text, peaks = cell(median), [kind.get(dtype, 0) for kind in (sheet.dense, sheet.sparse)]
        if peaks[0]:
            text += f", {100 * median / peaks[0]:.0f} % of {cell(peaks[0])}"
        layout.number(ax, text, max(high, *peaks), row)
    for kind, style, label in ((sheet.dense, "-", "dense"), (sheet.sparse, ":", "with sparsity")):
        listed = [(row, kind[dtype]) for row, dtype in enumerate(measured) if dtype in kind]
        for row, peak in listed:
            look = {"linestyle": style, "linewidth": 2.4, "label": f"data sheet, {label}"}
            ax.plot([peak, peak], [row - 0.38, row + 0.38], color=RUST, zorder=4, **look)
    layout.rows(ax, list(measured))
    rates = [max(samples) for samples in measured.values()]
    listed = [kind[d] for kind in (sheet.dense, sheet.sparse) for d in measured if d in kind]
    ax.set_xlim(0, 1.35 * max([*rates, *listed], default=1.0))
    ax.set_xlabel("TFLOP/s of a large matrix product (bar: median, line at its end: p10-p90)")
    layout.legend(ax)
    return ax


def roofline(ax: Axes, roofs: Mapping[str, Roofline], runs: Mapping[str, Run]) -> Axes:
    """Rooflines by name, and under them operations by name, as `operation_runs` measures them.

    Both axes are logarithmic. Each name stands at its point, on the side where there is room.
    """
    points = {
        name: (run.metric("intensity"), run.metric("flops") / run.metric("alone_ms") / 1e9)
        for name, run in runs.items()
    }
    places = [x for x, _ in points.values()] + [roof.ridge for roof in roofs.values()]
    low, high = min(places) / 4, max(places) * 12
    for (name, roof), style in zip(roofs.items(), cycle(("-", "--", "-.", ":")), strict=False):
        knees = [low, roof.ridge, high]
        label = f"{name}: {cell(roof.rate)} TFLOP/s, {cell(roof.bandwidth)} GB/s"
        ax.plot(knees, [*map(roof.attainable, knees)], style, color=INK, label=label, zorder=2)
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    for point in points.values():
        ax.plot(*point, "o", color=RUST, markeredgecolor=PAPER, zorder=3)
    lowest = min(y for _, y in points.values())
    ax.set_ylim(bottom=lowest / 4)  # after the points: one may lie above the roof
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set(xlabel="FLOP per byte of memory traffic", ylabel="TFLOP/s")
    layout.legend(ax)
    layout.name_points(ax, points)
    return ax
