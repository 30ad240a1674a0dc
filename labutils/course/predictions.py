"""How far off a learner's predictions were, and which way: out of the records that the labs keep.

    scores = scores_of(read_records("results/mine"))
    summaries(scores, by="kind")

A lab records a prediction when it is made and a score when it ends. What is asked has many units,
so that being off is told as a factor, predicted / measured: 2 is twice too high, 0.5 half of it. A
factor takes two numbers above 0; of others only the difference is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labutils.recipe import is_number

NEAR = 2.0
"""Within this factor a prediction counts as near."""
KINDS = {"x": "factors", "%": "shares and changes", "ms": "times", "us": "times", "s": "times"}
"""What is asked for, by its unit; all else are counts and sizes."""


@dataclass(frozen=True)
class Score:
    """One prediction and what was measured, in `unit`; `measured` is None where the lab has not
    ended, or couldn't.
    """

    lab: str
    topic: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def kind(self) -> str:
        """What was asked for: "factors", "shares and changes", "times", "counts and sizes"."""
        return KINDS.get(self.unit, "counts and sizes")

    @property
    def factor(self) -> float | None:
        """Predicted / measured, None where one isn't above 0 or there is nothing measured."""
        if self.measured is None or self.predicted <= 0 or self.measured <= 0:
            return None
        return self.predicted / self.measured

    @property
    def off(self) -> float | None:
        """The factor by which it is off, whichever way: 1 or more."""
        return None if self.factor is None else max(self.factor, 1 / self.factor)


@dataclass(frozen=True)
class Summary:
    """Predictions of one lab or kind: `count` scored by a factor, the median factor `off`, the
    `lean` (the median of predicted / measured: above 1 too high), and how many were `near`."""

    name: str
    count: int
    off: float
    lean: float
    near: int


def scores_of(records: Iterable[Mapping[str, Any]]) -> list[Score]:
    """One score for each topic of each lab: of the last prediction, with what was measured after
    it.

    Records that hold no numbers are passed over: files are edited by hand, too.
    """
    found: dict[tuple[str, str], Score] = {}
    for record in records:
        lab, topic, unit = (record.get(name) for name in ("lab", "topic", "unit"))
        sound = all(isinstance(word, str) for word in (lab, topic, unit)) and is_number(
            record.get("value")
        )
        if sound and record.get("status") == "prediction":
            found.pop((lab, topic), None)  # so that it takes its place at the end
            found[lab, topic] = Score(lab, topic, unit, float(record["value"]), None)
        elif sound and record.get("status") == "score" and is_number(record.get("measured")):
            found[lab, topic] = Score(
                lab, topic, unit, float(record["value"]), float(record["measured"])
            )
    return sorted(found.values(), key=lambda score: score.lab)


def summaries(scores: Sequence[Score], by: str) -> list[Summary]:
    """A summary for each `lab` or `kind`, the one that is farthest off first; those without a
    factor are left out.
    """
    groups: dict[str, list[Score]] = {}
    for score in scores:
        if score.factor is not None:
            groups.setdefault(getattr(score, by), []).append(score)
    found = [summary(name, of_group) for name, of_group in groups.items()]
    return sorted(found, key=lambda one: -one.off)


def summary(name: str, scores: Sequence[Score]) -> Summary:
    """The summary of scores that have a factor. Raises `ValueError` where there is none."""
    factors = [score.factor for score in scores if score.factor is not None]
    if not factors:
        raise ValueError(f"None of {len(scores)} predictions ({name}) can be told as a factor.")
    offs = [max(factor, 1 / factor) for factor in factors]
    lean = math.exp(median(math.log(factor) for factor in factors))
    return Summary(name, len(factors), median(offs), lean, sum(off <= NEAR for off in offs))


def lean_in_words(lean: float) -> str:
    """Which way predictions lean: "1.4x too high"."""
    if 1 / 1.1 <= lean <= 1.1:
        return "neither way"
    return f"{lean:.2g}x too high" if lean > 1 else f"{1 / lean:.2g}x too low"
