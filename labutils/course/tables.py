"""The course's tables: rows of words and numbers as Markdown.

What does not apply to a machine is `None` in a row, and a row or a column of nothing else is left
out: the same cell of a notebook makes a table for a GPU and one for a CPU, without branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labutils.results.judges import Judgement
from labutils.results.records import Run, to_frame

if TYPE_CHECKING:
    import pandas as pd


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


def columns_of(
    runs: Iterable[Run], columns: Mapping[str, str] | Callable[[list[Run]], pd.DataFrame]
) -> pd.DataFrame:
    """A DataFrame of those of `runs` that went well, or an empty one where none did.

    columns: metric or tag -> its heading; or what makes the DataFrame of the runs.
    """
    runs = [run for run in runs if run.ok]
    frame = to_frame(runs)
    if callable(columns):
        return columns(runs) if runs else frame
    return frame.reindex(columns=list(columns)).rename(columns=columns)


def verdict_table(judgements: Iterable[Judgement]) -> str:
    """claim | published | H200 | here | verdict, with its reason."""
    rows = []
    for j in judgements:
        h200 = f"{j.reference} ({j.reference_verdict})" if j.reference else "–"
        verdict = f"**{j.verdict}**" + f": {j.why}" * bool(j.why)
        verdict += f" *{j.claim.note}*" * bool(j.claim.note)
        claim = f"**{j.claim.id}** {j.claim.statement}"
        rows.append((claim, j.published, h200, j.here or "–", verdict))
    return as_table(("claim", "published", "H200", "here", "verdict"), *rows)


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
