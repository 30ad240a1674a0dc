"""Numbers and messages as verdicts put them."""

from __future__ import annotations


def rounded(value: float) -> str:
    """A time or count, to three figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def figures(value: float) -> str:
    """All of a count up to a million, four figures or a decimal of another number."""
    if abs(value) < 1e6:
        return f"{value:,.0f}" if value == int(value) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:.3g}"


def percents(share: float) -> str:
    """A share of 0..1 as text, a small one to two figures: "1 % was found, where at most 1 % is
    meant" says nothing.
    """
    return f"{100 * share:.2g} %" if abs(share) < 0.095 else f"{100 * share:.0f} %"


def unit_of(metric: str) -> str:
    """What a metric's name ends with: its unit."""
    return "_" + metric.rpartition("_")[2]


def first_line(message: str, width: int = 160) -> str:
    """The first line of a message, cut at `width`."""
    line = (message.strip().splitlines() or [""])[0]
    return line if len(line) <= width else line[: width - 1] + "…"
