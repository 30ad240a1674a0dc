"""How far off a learner's predictions were, and which way: out of the records that the labs keep.

    scores = scores_of(read_records("results/mine"))
    summaries(scores, by="kind")

A lab records a prediction when it is made and a score when it ends. What is asked has many units,
so that being off is told as a factor, predicted / measured: 2 is twice too high, 0.5 half of it. A
factor takes two numbers above 0; of others only the difference is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labutils.recipe import is_number

if TYPE_CHECKING:
    import pandas as pd

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


def scores_of(records: Iterable[Mapping[str, Any]]) -> list[Score]:
    """One score for each topic of each lab: of the last prediction, with what was measured after
    it.

    Records that hold no numbers are passed over: files are edited by hand, too.
    """
    scores: dict[tuple[str, str], Score] = {}
    for record in records:
        lab, topic, unit = (record.get(name) for name in ("lab", "topic", "unit"))
        status, value, measured = (record.get(name) for name in ("status", "value", "measured"))
        if not all(isinstance(word, str) for word in (lab, topic, unit)) or not is_number(value):
            continue
        if status == "prediction":
            scores.pop((lab, topic), None)  # so that it takes its place at the end
            scores[lab, topic] = Score(lab, topic, unit, float(value), None)
        elif status == "score" and is_number(measured):
            scores[lab, topic] = Score(lab, topic, unit, float(value), float(measured))
    return sorted(scores.values(), key=lambda score: score.lab)


def summaries(scores: Sequence[Score], by: str = "") -> pd.DataFrame:
    """A row for each `lab` or `kind` (without `by`: for all), the one that is farthest off first:
    how many predictions were scored by a factor, the median factor `off`, the `lean` (the median of
    predicted / measured: above 1 too high), and how many were `near`."""
    import pandas as pd

    told = [score for score in scores if score.factor is not None]
    frame = pd.DataFrame(
        {
            by or "of": [getattr(score, by) if by else "all" for score in told],
            "factor": np.log([score.factor for score in told]),
            "off": [score.off for score in told],
        }
    )
    grouped = frame.groupby(by or "of", sort=False)
    table = pd.DataFrame(
        {
            "predictions": grouped.size(),
            "off": grouped["off"].median(),
            "lean": np.exp(grouped["factor"].median()),
            "near": grouped["off"].agg(lambda off: int((off <= NEAR).sum())),
        }
    )
    return table.sort_values("off", ascending=False, kind="stable").reset_index()


def lean_in_words(lean: float) -> str:
    """Which way predictions lean: "1.4x too high"."""
    if 1 / 1.1 <= lean <= 1.1:
        return "neither way"
    return f"{lean:.2g}x too high" if lean > 1 else f"{1 / lean:.2g}x too low"
