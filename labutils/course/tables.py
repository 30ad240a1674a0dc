"""The course's tables: rows of words and numbers as Markdown.

What does not apply to a machine is `None` in a row, and a row or a column of nothing else is left
out: the same cell of a notebook makes a table for a GPU and one for a CPU, without branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labutils.results.effects import time_effect
from labutils.results.judges import DIFFERS, Judgement
from labutils.results.records import Run, to_frame

if TYPE_CHECKING:
    import pandas as pd

HEADINGS = {
    "gpu_busy": "GPU-busy",
    "gpu_utilization": "utilisation",
    "kernels_per_step": "kernels a step",
    "launches_per_step": "launches a step",
    "syncs_per_step": "synchronisations a step",
    "mfu": "MFU",
}
UNITS = {"ms": "ms", "us": "µs", "s": "s", "gb": "GB", "mb": "MB", "w": "W", "percent": "%"}
SPEED_UP = "speed-up"
"""A column that isn't a metric: the time of the base's step over that of the row's."""


def as_table(head: Sequence[str] | pd.DataFrame, *rows: Sequence[Any]) -> str:
    """A Markdown table, of a DataFrame or of a head and rows; a row's first cell names it.

    `None` and NaN: does not apply. Rows and columns that say nothing about anything, names aside,
    are left out; "" where no row remains.
    """
    if not isinstance(head, Sequence):
        frame = head.astype(object).where(head.notna(), None)
        head, rows = list(frame.columns), tuple(frame.itertuples(index=False, name=None))
    kept = [row for row in rows if any(value is not None for value in row[1:])]
    if not kept:
        return ""
    columns = [at for at in range(len(head)) if at == 0 or any(row[at] is not None for row in kept)]
    lines = [[cell(row[at]) for at in columns] for row in (head, *kept)]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def heading(metric: str) -> str:
    """A column's heading: "step_ms" is "step, ms", "examples_per_s" is "examples/s"."""
    name, _, end = metric.rpartition("_")
    plain = f"{name}, {UNITS[end]}" if end in UNITS else metric
    if name.endswith("_per"):
        plain = f"{name.removesuffix('_per')}/{end}"
    return HEADINGS.get(metric, plain.replace("_", " "))


def columns_of(
    runs: Iterable[Run],
    columns: Sequence[str] | Mapping[str, str] | Callable[[list[Run]], pd.DataFrame],
) -> pd.DataFrame:
    """A DataFrame of those of `runs` that went well, or an empty one where none did.

    columns: metrics, of which the heading is made, behind the run's tags; or metric or tag -> its
    heading; or what makes the DataFrame of the runs.
    """
    runs = [run for run in runs if run.ok]
    frame = to_frame(runs)
    if callable(columns):
        return columns(runs) if runs else frame
    if not isinstance(columns, Mapping):
        columns = {"run": "", **{name: heading(name) for name in columns}}
    if SPEED_UP in columns:
        frame[SPEED_UP] = [speed_up(run, runs) for run in runs]
    return frame.reindex(columns=list(columns)).rename(columns=columns)


def speed_up(run: Run, runs: Sequence[Run]) -> str | None:
    """How many times as fast a step of `run` is as one of its base, which is the first of `runs`
    that was compared with it, with the 95 % interval: "1.42x (1.38 to 1.45x)"; None for the base.
    """
    compared = [other for other in runs if other.comparison == run.comparison]
    twice = next((other for other in compared if other.tags.get("again")), None)
    base = next((other for other in compared if other is not twice), run)
    found = time_effect(base, run, twice) if run is not base else None
    if not found:
        return None
    value, low, high = (f"{1 / x:.2f}x" for x in (found.value, found.high, found.low))
    unsteady = ", unsteady machine" if found.unsteady else ""
    return f"{value} ({low.removesuffix('x')} to {high}{unsteady})"


def verdict_table(judgements: Iterable[Judgement]) -> str:
    """claim | published | ours | here | verdict, with its reason."""
    rows = []
    for j in judgements:
        # Where hosts differ, each number names its verdict.
        form = "{1}: {0}" if j.reference_verdict == DIFFERS else "{0} ({1})"
        ours = form.format(j.reference, j.reference_verdict) if j.reference else "–"
        verdict = f"**{j.verdict}**" + f": {j.why}" * bool(j.why)
        verdict += f" *{j.claim.note}*" * bool(j.claim.note)
        claim = f"**{j.claim.id}** {j.claim.statement}"
        rows.append((claim, j.published, ours, j.here or "–", verdict))
    return as_table(("claim", "published", "ours", "here", "verdict"), *rows)


def cell(value: Any) -> str:
    """Three figures of a number, all of a count, words that can't break out of their cell, a dash
    for None.
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
