"""`labutils report`: every claim with published | reference | here | verdict.

It works with whatever results there are: none, a run killed while writing, the records of labs it
doesn't know.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labutils.results import claims as articles
from labutils.results import judges, records
from labutils.results.judges import Judgement
from labutils.results.records import REPOSITORY, Runs

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 100
"""Columns of the page where there is no terminal to ask."""
HEAD = ("claim, and why the verdict", "published", "ours", "here", "verdict here")
"""Of the report's tables; the first column, of statements, is the widest."""


@dataclass(frozen=True)
class Page:
    """What a report says: the judgements, the runs, and where the numbers come from; all `records`
    as they are. `passed_over`: a sentence for each file that has lines which can't be used."""

    judgements: list[Judgement]
    here: Runs
    files: list[Path]
    labs_done: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    migrated: int = 0


def main(results: Path | None, as_json: bool) -> int:
    """Print the report of `results` (a folder or a results.jsonl; None: each lab's newest). The
    exit code: 0, or 2.

    2 means that `results` was named and holds no results that can be read.
    """
    try:
        files = result_files(results)
        records.check_usable([records.read_file(path) for path in files])
        page = read_page(files)
    except (ValueError, OSError) as error:
        print(f"labutils report: {records.plain(str(error))}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(as_data(page), indent=2))
    else:
        show(page)
    return 0


def result_files(results: Path | None) -> list[Path]:
    """The results.jsonl files meant, the oldest first. Raises `ValueError`, with what to type,
    where there is none.

    A folder may hold one results.jsonl or several folders that each do. Without a name it is
    LABUTILS_RESULTS, else results/ of this checkout, where having none is no error: then there is
    only the reference.
    """
    place = records.named(results or os.environ.get("LABUTILS_RESULTS") or REPOSITORY / "results")
    in_folder = os.path.isdir(place)  # Path.is_dir raises OSError for a name that is too long
    own = place / "results.jsonl" if in_folder else place
    files = [own] if os.path.isfile(own) else records.files_below(place) if in_folder else []
    if not files and (results is not None or os.path.lexists(own)):
        records.read_file(own)  # raises, and says what is there instead
    return files


def files_beside(folder: Path, lab: str) -> list[Path]:
    """The results files that `lab`, kept in `folder`, sums up.

    If other labs are kept in the same folder, it is that folder's file. Else it is all files under
    results/ of this checkout, and that folder's file where it has lines that can't be used.
    """
    own = records.read_file(folder / "results.jsonl")
    if any(record["lab"] != lab for record in own.records):
        return [own.path]
    others = records.files_below(REPOSITORY / "results")
    others = [path for path in others if path.parent.resolve() != folder]
    return others + [own.path] * bool(own.passed_over)


def read_page(files: Iterable[Path]) -> Page:
    """Judge every claim by the newest of `files` for each lab in which it ran to its end, else the
    newest: runs of one lab are never mixed from two files.
    """
    readings = [records.read_file(path) for path in files]
    rows = [(record, reading) for reading in readings for record in reading.records]
    newest = {r["lab"]: reading for r, reading in rows}
    newest |= {r["lab"]: reading for r, reading in rows if r.get("status") == "done"}
    kept = [r for r, reading in rows if newest[r["lab"]] is reading]
    here = records.runs_of(kept)
    references = [records.read_file(path) for path in records.reference_files()]
    ours = records.runs_of(record for reading in references for record in reading.records)
    return Page(
        judgements=judges.judge_all(None, here, ours),
        here=here,
        files=[reading.path for reading in readings if reading in newest.values()],
        labs_done=sorted({r["lab"] for r in kept if r.get("status") == "done"}),
        records=kept,
        passed_over=[r.complaint() for r in (*readings, *references) if r.passed_over],
        migrated=sum(reading.migrated for reading in readings),
    )


# -------------------------------------------------------------------------------------- machines


def as_data(page: Page) -> dict[str, Any]:
    """The report for machines: plain JSON data. A value that isn't there is null."""
    table = claims_table(page.judgements)
    return {
        "schema": 1,
        "results": [str(path) for path in page.files],
        "passed_over": page.passed_over,
        "labs_done": page.labs_done,
        "verdicts": dict(Counter(j.verdict for j in page.judgements)),
        "reference_verdicts": dict(Counter(j.reference_verdict for j in page.judgements)),
        "claims": table.where(table.notna(), None).to_dict("records"),
    }


def claims_table(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """A row for each judgement, in their order: the claim, what was measured on the reference
    machine and here, and the verdicts."""
    import pandas as pd

    of_claim = ["id", "article", "section", "statement", "lab", "needs", "predicted", "unit"]
    judged = ["published", "reference", "reference_verdict", "reference_why", "here", "verdict"]
    rows = [
        [getattr(j.claim, name) for name in (*of_claim, "note")]
        + [list(j.claim.published)]
        + [getattr(j, name) for name in (*judged, "why")]
        for j in judgements
    ]
    columns = [*of_claim, "note", "published_values", *judged, "why"]
    table = pd.DataFrame(rows, columns=columns, dtype=object)
    return table.replace({"reference": {"": None}, "here": {"": None}})


# ---------------------------------------------------------------------------------------- people


def show(page: Page) -> None:
    """Print the report for people, as wide as the terminal, at `WIDTH` columns where the output
    goes elsewhere.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = {"highlight": False, "markup": False, "emoji": False}
    console = Console(width=None if sys.stdout.isatty() else WIDTH, **plain)
    look = {"title_justify": "left", "show_lines": True, "expand": True, "pad_edge": False}
    for key, article in articles.articles().items():
        table = Table(title=f"{key}: {article.subject} ({article.gpu})", **look)
        for at, name in enumerate(HEAD):
            table.add_column(name, ratio=1 if at else 3, min_width=15, overflow="fold")
        for j in page.judgements:
            if j.claim.article == key:
                why = j.why if page.here else j.reference_why
                claim = f"{j.claim.id}\n{j.claim.statement}\n{why}"
                ours = f"{j.reference}\n{j.reference_verdict}" if j.reference else "–"
                cells = (claim, j.published, ours, j.here or "–", j.verdict)
                table.add_row(*map(Text, cells))
        console.print(table)
    _print_summary(console, page)


def _print_summary(console: Any, page: Page) -> None:
    """The verdicts by article and in all, what was refuted here, and where the numbers come from:
    less than 40 lines."""
    console.print("Summary. The tables above say why; lab 12 draws them. For machines: --json")
    for key in articles.articles():
        of = [j for j in page.judgements if j.claim.article == key]
        refuted = ", ".join(j.claim.id for j in of if j.verdict == judges.REFUTED)
        words = [f"{n} {word}" for word, n in Counter(j.verdict for j in of).items()]
        console.print(f"{key}, here: {', '.join(words)}. Refuted: {refuted or 'none'}")
    for name, side in (("Here", "verdict"), ("Reference", "reference_verdict")):
        for how, predicted in (("measured", False), ("predicted, not measured", True)):
            those = [j for j in page.judgements if j.claim.predicted is predicted]
            counts = Counter(getattr(j, side) for j in those)
            words = [f"{counts[word]} {word}" for word in judges.VERDICTS if counts[word]]
            console.print(f"{name}, {how}: {', '.join(words)}")
    if page.files:
        console.print(f"Read: {', '.join(map(str, page.files))}", soft_wrap=True)
        done = records.plain(", ".join(page.labs_done))
        console.print(f"Labs run to their end: {done or 'none'}.")
    else:
        console.print("No results of this machine yet. Type: labutils run")
    if page.migrated:
        console.print(f"{page.migrated} records have schema 1: their names gave them their tags.")
    for complaint in page.passed_over:
        console.print(f"Passed over: {complaint}", soft_wrap=True)
