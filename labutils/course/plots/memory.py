"""What peak memory consists of, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labutils.course.plots import layout
from labutils.course.plots.palette import GREY, INK, MIST, NAVY, RUST, Fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def stacked_memory(
    ax: Axes,
    series: Mapping[str, Sequence[float]],
    phases: Sequence[tuple[int, str]],
    fills: Mapping[str, Fill],
    most: int = 600,
) -> Axes:
    """What is held over one step as stacked areas: kind -> bytes after each event; `phases` are
    (event, name).

    Of more than `most` events each few are shown by the one at which most is held, so that no peak
    is lost.
    """
    totals = [sum(levels) for levels in zip(*series.values(), strict=True)]
    width = max(1, -(-len(totals) // most))
    chosen = [
        max(range(at, min(at + width, len(totals))), key=totals.__getitem__)
        for at in range(0, len(totals), width)
    ]
    unit, scale = ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)
    low = [0.0] * len(chosen)
    for kind, levels in series.items():
        high = [base + levels[at] / scale for base, at in zip(low, chosen, strict=True)]
        look = {
            "facecolor": fills[kind][0],
            "hatch": fills[kind][1],
            "edgecolor": INK,
            "linewidth": 0.4,
        }
        ax.fill_between(chosen, low, high, step="post", label=kind, zorder=2, **look)
        low = high
    peak = max(range(len(totals)), key=totals.__getitem__)
    top = totals[peak] / scale
    ax.plot([peak], [top], marker="v", color=RUST, markersize=8, zorder=4)
    side = "right" if peak > 0.5 * len(totals) else "left"
    note = {"textcoords": "offset points", "ha": side, "fontsize": 9}
    ax.annotate(
        f"peak {layout.figure(top)} {unit}", (peak, top), (-8 if side == "right" else 8, 6), **note
    )
    shown = [(at, name) for at, name in phases if at < len(totals)]
    for place, (at, name) in enumerate(shown):
        end = shown[place + 1][0] if place + 1 < len(shown) else len(totals)
        ax.axvline(at, color=GREY, linestyle=":", linewidth=1, zorder=3)
        if end - at > 0.06 * len(totals):
            ax.text(
                (at + end) / 2, 1.13 * top, name, ha="center", va="center", fontsize=9, color=INK
            )
    ax.set_xlim(0, len(totals) - 1)
    ax.set_ylim(0, 1.2 * top)
    ax.set_xlabel("allocations and frees, in order")
    ax.set_ylabel(unit)
    ax.grid(axis="x", visible=False)
    layout.fill_legend(ax, {kind: fills[kind] for kind in series}, beside=0.5)
    return ax


def predicted_peaks(ax: Axes, pairs: Mapping[str, tuple[float, float]]) -> Axes:
    """One row a step: `pairs` is name -> (predicted, measured) GB, drawn over the measured one,
    with 10 % each way.
    """
    layout.make_room(ax, len(pairs), per_row=0.36)
    ax.axvspan(-10, 10, color=MIST, alpha=0.5, label="within 10 %", zorder=1)
    ax.axvline(0, color=INK, linestyle="-", linewidth=0.8, zorder=2)
    off = [100 * (predicted / measured - 1) for predicted, measured in pairs.values()]
    ax.plot(
        off,
        range(len(off)),
        linestyle="",
        marker="o",
        color=NAVY,
        markersize=8,
        label="prediction",
        zorder=3,
    )
    for row, (share, (_, measured)) in enumerate(zip(off, pairs.values(), strict=True)):
        text = (
            f"{layout.figure(measured)} GB"
            if measured >= 1
            else f"{layout.figure(1e3 * measured)} MB"
        )
        ax.annotate(
            text, (max(share, 0), row), (10, 0), textcoords="offset points", va="center", fontsize=9
        )
    reach = max(15.0, *(1.3 * abs(share) for share in off)) if off else 15.0
    ax.set_xlim(-reach, reach)
    layout.rows(ax, list(pairs))
    ax.set_xlabel("prediction over measured peak, % off (number: the measured peak)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    return ax
