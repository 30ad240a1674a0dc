"""The course's pictures: static, with units on the axes, the spread shown, and readable in a grey print.

Every function draws on a given matplotlib `Axes` and returns it. Colours are never the only carrier of meaning: lanes
and categories differ in lightness and hatch as well. matplotlib is imported where it is used, so that importing this
module stays cheap.
"""

from __future__ import annotations

from pathlib import Path

STYLE = Path(__file__).with_name("course.mplstyle")


def use_style() -> None:
    """Make the course's style sheet the current one, for every figure from here on."""
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)
