"""What the pictures share: the style sheet, rows and their room, spreads, fills and legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labutils.course.plots.palette import DARK, INK, PAPER, Fill
from labutils.course.tables import heading
from labutils.results.records import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = Path(__file__).with_name("course.mplstyle")
AXIS_LABELS = {
    "step_ms": "ms an optimizer step",
    "ms_per_1k_useful_tokens": "ms for 1000 useful tokens",
}
Spread = tuple[float, float, float]
"""p10, median, p90."""
SIDES = (
    *((7, -6, "left", "top"), (-9, 0, "right", "center"), (9, 0, "left", "center")),
    *((-7, -6, "right", "top"), (7, 6, "left", "bottom"), (-7, 6, "right", "bottom")),
)
"""Where a name may stand beside its point: points (1/72 inch) right and up, and its alignment."""


def use_style() -> None:
    """Make the course's style sheet the current one, for every figure from here on."""
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)


def spread_of(summary: Mapping[str, float]) -> Spread:
    """The spread that a summary of samples holds."""
    return summary["p10"], summary["median"], summary["p90"]


def spread(run: Run, metric: str) -> Spread | None:
    """A metric's spread, of a single number three times itself; None where it was not measured."""
    value = run.metrics.get(metric)
    if isinstance(value, Mapping):
        return spread_of(value)
    return None if value is None else (value, value, value)


def axis_label(metric: str) -> str:
    """An axis label for a metric in milliseconds."""
    return AXIS_LABELS.get(metric) or heading(metric)


def xy(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    """Two columns of a mapping of points, as matplotlib takes them."""
    return list(points), list(points.values())


def rows(ax: Axes, labels: Sequence[str], heights: Sequence[float] = ()) -> None:
    """Rows from the top down, named on the left; `heights`: 0, 1, 2 ... if not given."""
    ax.set_yticks(heights or range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def make_room(ax: Axes, rows: float, per_row: float) -> None:
    """Set the figure's height, in inches, where these axes are its only ones."""
    if len(ax.figure.axes) == 1:
        ax.figure.set_figheight(1.3 + per_row * rows)


def number(ax: Axes, text: str, x: float, y: float, dots: float = 6, **look: Any) -> None:
    """Write a number so many points to the right of (x, y)."""
    look = {"va": "center", "fontsize": 9} | look
    ax.annotate(text, (x, y), (dots, 0), textcoords="offset points", **look)


def name_points(ax: Axes, points: Mapping[str, tuple[float, float]], fontsize: float = 9) -> None:
    """Write each point's name, the lowest first, on the first of `SIDES` where it covers no other
    point or name and stays inside the axes; where there is none, on the first."""
    from matplotlib.transforms import Bbox

    ax.figure.draw_without_rendering()  # only then it is known where everything lies
    places = (ax.transData.transform(point) for point in points.values())
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in places]
    paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    frame = ax.get_window_extent()
    for name, point in sorted(points.items(), key=lambda item: item[1][1]):
        tried = []
        for *shift, ha, va in (*SIDES, SIDES[0]):
            look = {"fontsize": fontsize, "ha": ha, "va": va, "bbox": paper}
            text = ax.annotate(name, point, shift, textcoords="offset points", **look)
            tried.append(text)
            box = text.get_window_extent()
            inside = frame.containsx(box.x0) and frame.containsx(box.x1) and frame.y0 < box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        for text in tried[:-1]:
            text.remove()


def legend(ax: Axes, columns: int = 2) -> None:
    """The legend above the axes, where there is something to name. Each label stands once."""
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(handles), strict=True))
    if once:
        names = list(dict.fromkeys(labels))
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": columns}
        ax.legend([once[name] for name in names], names, **place)


def look(fill: Fill) -> dict[str, Any]:
    """A fill as matplotlib's keyword arguments; hatches are white on dark colours."""
    color, hatch = fill
    edge = PAPER if color in DARK else INK
    outline = {"edgecolor": INK, "linewidth": 0.7, "zorder": 2}
    return {"facecolor": color, "hatch": hatch, "hatchcolor": edge} | outline


def fill_legend(ax: Axes, fills: Mapping[str, Fill], beside: float | None = None) -> None:
    """The fills' names above the axes; or to their right, centred at the height `beside` (0..1)."""
    from matplotlib.legend import Legend
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **look(fill)) for name, fill in fills.items()]
    if beside is None:
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
        return
    place = {"loc": "center left", "bbox_to_anchor": (1.0, beside)}
    legend = Legend(ax, handles, list(fills), fontsize=8, labelspacing=0.3, **place)
    ax.add_artist(legend)
    legend.set_clip_on(False)
