"""What several pictures are made of: the style sheet, rows and their room, numbers, fills and
legends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labutils.course.plots.palette import DARK, INK, PAPER, Fill
from labutils.results.records import Run, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = Path(__file__).with_name("course.mplstyle")
Spread = tuple[float, float, float]
"""p10, median, p90."""


def use_style() -> None:
    """Make the course's style sheet the current one, for every figure from here on."""
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)


def named(runs: Mapping[str, Run] | Iterable[Run]) -> dict[str, Run]:
    """Name -> run, in the given order."""
    return dict(runs) if isinstance(runs, Mapping) else {run.run: run for run in runs}


def spread(run: Run, metric: str) -> Spread | None:
    """(p10, median, p90) of a metric: from its summary, its samples or the bare number; None where
    there is none.
    """
    summary = run.metrics.get(metric)
    if not isinstance(summary, Mapping):
        samples = run.samples.get(metric)
        if not samples:
            return None if summary is None else (summary, summary, summary)
        summary = summarise(samples)
    median = summary["median"]
    return summary.get("p10", median), median, summary.get("p90", median)


def status(run: Run) -> str:
    """Why a run has nothing to draw, on one short line."""
    text = "not measured" if run.ok else run.status
    return text if len(text) <= 60 else text[:59] + "…"


def figure(value: float) -> str:
    """Three figures, and never an exponent."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2g}"
    )


def three_figures(value: float) -> str:
    """All of a count, three figures of another number, and an exponent only of what is tiny."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def quantity(metric: str) -> str:
    """An axis label for a metric in milliseconds."""
    known = {
        "step_ms": "ms an optimizer step",
        "data_ms": "ms waiting for data, an optimizer step",
        "ms_per_1k_useful_tokens": "ms for 1000 useful tokens",
    }
    return known.get(metric, f"{metric.removesuffix('_ms').replace('_', ' ')}, ms")


def columns(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    return list(points), list(points.values())


def jitter(i: int) -> float:
    """A small vertical offset that spreads dots out, the same each time."""
    return 0.22 * ((i * 0.618034) % 1 * 2 - 1)


def rows(ax: Axes, labels: Sequence[str]) -> None:
    """Rows from the top down, named on the left."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def make_room(ax: Axes, rows: float, per_row: float) -> None:
    """Set the figure's height to its rows', in inches, where the axes have the figure to
    themselves.
    """
    if len(ax.figure.axes) == 1:
        ax.figure.set_figheight(1.3 + per_row * rows)


def look(fill: Fill) -> dict[str, str]:
    """A fill as matplotlib's keyword arguments; hatches are white on dark colours."""
    color, hatch = fill
    return {
        "facecolor": color,
        "hatch": hatch,
        "edgecolor": INK,
        "hatchcolor": PAPER if color in DARK else INK,
    }


def fill_legend(ax: Axes, fills: Mapping[str, Fill], beside: float | None = None) -> None:
    """The fills' names above the axes; or to their right, centred at the height `beside` (0..1)."""
    from matplotlib.legend import Legend
    from matplotlib.patches import Patch

    handles = [Patch(label=name, linewidth=0.7, **look(fill)) for name, fill in fills.items()]
    if beside is None:
        one_row = (
            sum(0.5 + 0.065 * len(name) for name in fills) < 0.8 * ax.figure.get_figwidth()
        )  # inches, nearly
        ncols = len(handles) if one_row else min(4, len(handles))
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=max(1, ncols))
        return
    place = {"loc": "center left", "bbox_to_anchor": (1.0, beside)}
    legend = Legend(ax, handles, list(fills), fontsize=8, labelspacing=0.3, **place)
    ax.add_artist(legend)
    legend.set_clip_on(False)


def white_edge(width: float = 1.5) -> list[Any]:
    """Path effects that keep a line visible on dark and light fills."""
    from matplotlib import patheffects

    return [patheffects.Stroke(linewidth=width * 2.2, foreground=PAPER), patheffects.Normal()]


def named_ticks(ax: Axes, places: Mapping[str, float]) -> Axes:
    """A logarithmic x axis whose ticks are named places."""
    from matplotlib.ticker import NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks(
        list(places.values()), [f"{name}\n{value:g}" for name, value in places.items()], fontsize=8
    )
    return ax
