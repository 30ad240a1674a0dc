"""What a lab aims at on our H200, and whether a run gets there.

GOALS = {"useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2)}
rows = goal_rows(GOALS, run, lab.reference("targets"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labutils.results.records import Run


@dataclass(frozen=True)
class Goal:
    """What a metric is, and the least or the most it is meant to be; neither: it is shown, and
    nothing is meant.
    """

    what: str
    least: float | None = None
    most: float | None = None

    @property
    def text(self) -> str | None:
        """The goal in words, None where there is none."""
        if self.least is not None:
            return f"at least {self.least:,g}"
        if self.most is not None:
            return f"at most {self.most:,g}" if self.most else "none"
        return None

    def met(self, value: float) -> bool:
        """Whether `value` gets there."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def outcome(self, value: float, low: float, high: float) -> str:
        """Whether `value` gets there, as words to put behind it, and whether its range from `low`
        to `high` leaves that open; "" where nothing is meant."""
        if self.text is None:
            return ""
        open_ = "" if self.met(low) == self.met(high) else ", within the spread"
        return f", {'reached' if self.met(value) else 'missed'}{open_}"


GOAL_HEAD = ("the goal", "here", "H200")
"""The head of a table of `goal_rows`, after the column that says what each is."""


def goal_rows(goals: Mapping[str, Goal], mine: Run, theirs: Run | None) -> list[tuple[Any, ...]]:
    """Rows (what, goal, value of `mine`, value of `theirs`) for each of `goals`, which are named as
    the metrics are.

    The goals are meant for scale "full" on the reference's card: what is `mine` is held against
    them only there.
    """
    alike = theirs is None or mine.machine.get("gpu") == theirs.machine.get("gpu")
    return [
        (goal.what, goal.text, _told(goal, mine, metric, alike), _told(goal, theirs, metric, True))
        for metric, goal in goals.items()
    ]


def _told(goal: Goal, run: Run | None, metric: str, judged: bool) -> str | None:
    """A run's value with its range, and whether it gets there."""
    value = run.metric(metric) if run else None
    if run is None or value is None:
        return None
    summary = run.metrics[metric]
    low, high = (summary["p10"], summary["p90"]) if isinstance(summary, dict) else (value, value)
    between = f" ({_number(low)} to {_number(high)})" if isinstance(summary, dict) else ""
    return f"{_number(value)}{between}{goal.outcome(value, low, high) if judged and run.scale == 'full' else ''}"


def _number(value: float) -> str:
    return (
        f"{value:,d}"
        if isinstance(value, int)
        else f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.3g}"
    )
