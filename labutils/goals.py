"""What a lab aims at on our H200, and whether a run gets there.

GOALS = {"useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2)}
rows = goal_rows(GOALS, run, lab.reference("targets"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labutils.results import Run


@dataclass(frozen=True)
class Goal:
    """What a metric is, and the least or the most it is meant to be; neither: it is shown, and nothing is meant."""

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

    def outcome(self, value: float) -> str:
        """Whether `value` gets there, as words to put behind it; "" where nothing is meant."""
        if self.text is None:
            return ""
        low, high = self.least is not None and value < self.least, self.most is not None and value > self.most
        return ", missed" if low or high else ", reached"


GOAL_HEAD = ("the goal", "here", "H200")
"""The head of a table of `goal_rows`, after the column that says what each is."""


def goal_rows(goals: Mapping[str, Goal], mine: Run, theirs: Run | None) -> list[tuple[Any, ...]]:
    """Rows (what, goal, value of `mine`, value of `theirs`) for each of `goals`, which are named as the metrics are."""
    return [
        (goal.what, goal.text, _told(goal, mine, metric), _told(goal, theirs, metric)) for metric, goal in goals.items()
    ]


def _told(goal: Goal, run: Run | None, metric: str) -> str | None:
    """A run's value with its range, and at scale "full", which the goals are meant for, whether it gets there."""
    value = run.metric(metric) if run else None
    if run is None or value is None:
        return None
    summary = run.metrics[metric]
    between = f" ({_number(summary['p10'])} to {_number(summary['p90'])})" if isinstance(summary, dict) else ""
    return f"{_number(value)}{between}{goal.outcome(value) if run.scale == 'full' else ''}"


def _number(value: float) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
