"""How far off a learner's predictions were, and which way: out of the records that the labs keep.

    scores = scores_of(read_records("results/mine"))
    summaries(scores, by="kind")

A lab records a prediction when it is made and a score when it ends. What is asked has many units,
so being off is given as a factor, predicted / measured: 2 is twice too high, 0.5 half of it. A
factor takes two numbers above 0; of others only the difference is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

NEAR = 2.0
"""Within this factor a prediction counts as near."""
KINDS = {"x": "factors", "%": "shares and changes", "ms": "times", "us": "times", "s": "times"}
"""What is asked for, by its unit; all else are counts and sizes."""


def scores_of(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each topic of each lab: the last prediction, with what was measured after it.

    Columns: lab, topic, unit, predicted, measured (NaN where the lab has not ended, or couldn't),
    `on` (our GPU, where it was scored against ours), the `kind` of what was asked, the `factor`
    predicted / measured (NaN where one isn't above 0), and `off`, the factor by which it is off,
    whichever way: 1 or more.
    """
    scores: dict[tuple[str, str], tuple[str, float, float, str]] = {}
    for record in records:
        if (status := record.get("status")) not in ("prediction", "score"):
            continue
        asked = record["lab"], record["topic"]
        if status == "prediction":
            scores.pop(asked, None)  # so that it takes its place at the end
        numbers = float(record["value"]), float(record.get("measured", np.nan))
        scores[asked] = (record.get("unit", ""), *numbers, record.get("on", ""))
    rows = [(*asked, *score) for asked, score in scores.items()]
    frame = pd.DataFrame(rows, columns=["lab", "topic", "unit", "predicted", "measured", "on"])
    above_0 = (frame["predicted"] > 0) & (frame["measured"] > 0)
    frame["kind"] = frame["unit"].map(KINDS).fillna("counts and sizes")
    frame["factor"] = (frame["predicted"] / frame["measured"]).where(above_0)
    frame["off"] = np.maximum(frame["factor"], 1 / frame["factor"])
    return frame.sort_values("lab", kind="stable", ignore_index=True)


def summaries(scores: pd.DataFrame, by: str = "") -> pd.DataFrame:
    """A row for each `lab` or `kind` (without `by`: for all), the one that is farthest off first:
    how many predictions were scored by a factor, the median factor `off`, the `lean` (the median of
    predicted / measured: above 1 too high), and how many were `near`."""
    scored = scores.dropna(subset="factor").assign(all="all", near=scores["off"] <= NEAR)
    table = scored.groupby(by or "all", sort=False).agg(
        predictions=("off", "size"),
        off=("off", "median"),
        lean=("factor", "median"),
        near=("near", "sum"),
    )
    return table.sort_values("off", ascending=False, kind="stable").reset_index()


def lean_in_words(lean: float) -> str:
    """Which way predictions lean: "1.4x too high"."""
    if 1 / 1.1 <= lean <= 1.1:
        return "neither way"
    return f"{lean:.2g}x too high" if lean > 1 else f"{1 / lean:.2g}x too low"
