"""What a lab aims at on our H200, and whether a run gets there.

GOALS = {"useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2)}
rows = goal_rows(GOALS, run, lab.reference("targets"))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labutils.course.tables import cell
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
        return None if self.most is None else f"at most {self.most:,g}"

    def met(self, value: float) -> bool:
        """Whether `value` gets there."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        return least <= value <= most


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
    summary = run.metrics[metric] if isinstance(run.metrics[metric], dict) else {}
    low, high = summary.get("p10", value), summary.get("p90", value)
    said = f"{cell(value)} ({cell(low)} to {cell(high)})" if summary else cell(value)
    if judged and goal.text and run.scale == "full":
        said += ", reached" if goal.met(value) else ", missed"
        said += "" if goal.met(low) == goal.met(high) else ", within the spread"
    return said
