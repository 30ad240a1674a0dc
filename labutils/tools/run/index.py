"""The page that leads to everything in a results folder: each executed notebook, what became of it,
and its verdicts.

It is made of what lies there: the notebooks, `results.jsonl`, and the HTML pages beside the
notebooks.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labutils.results import judges
from labutils.results import records as results
from labutils.tools.pages import filled, link, table
from labutils.tools.run import planning
from labutils.tools.run.asking import short
from labutils.tools.run.running import Outcome
from labutils.tools.run.telling import one_line

PageMaker = Callable[[Path, Sequence[Path]], None]
"""Given a results folder and executed notebooks in it, writes a page beside each."""

DASH = "–"
"""Stands in a table for what isn't known, and for none."""


@dataclass(frozen=True)
class Row:
    """One executed notebook. What isn't known is None or ""."""

    path: Path
    title: str
    status: str
    seconds: float | None
    scale: str
    machine: str
    beside: int
    verdicts: Mapping[str, int]

    @property
    def page(self) -> Path:
        return self.path.with_suffix(".html")


def write(
    folder: Path,
    outcomes: Sequence[Outcome],
    make_pages: PageMaker | None,
    say: Callable[[str], None],
) -> Path | None:
    """Write index.html into `folder`, after the pages that are missing or older than their
    notebooks.

    A page that can't be written is no failure of the labs: it is said. None where there is nothing
    to lead to.
    """
    executed = sorted((folder / "notebooks").glob("*.ipynb"))
    if not executed:
        return None
    try:
        if make_pages and (old := [path for path in executed if _is_stale(path)]):
            make_pages(folder, old)
    except (
        Exception
    ) as error:  # the labs have run: whatever it is, how they went must still be said
        say(
            f"No HTML pages of the executed notebooks: {type(error).__name__}: "
            f"{one_line(str(error))}"
        )
    file = folder / "index.html"
    try:
        file.write_text(as_html(folder, rows_of(folder, executed), outcomes), encoding="utf-8")
    except OSError as error:
        say(f"No {short(file)}: {error}")
        return None
    return file


def _is_stale(notebook: Path) -> bool:
    page = notebook.with_suffix(".html")
    return not page.is_file() or page.stat().st_mtime < notebook.stat().st_mtime


def rows_of(folder: Path, executed: Sequence[Path]) -> list[Row]:
    """What there is to say about each notebook; of one that papermill ran without `labutils run`,
    what is on record.
    """
    records = [record for record in results.read_records(folder) if not results.why_unsound(record)]
    runs = results.runs_of(records)
    counts: dict[str, Counter[str]] = {}
    for judgement in judges.judge(None, runs, {}):
        counts.setdefault(judgement.claim.lab, Counter())[judgement.verdict] += 1
    return [_row(path, records, runs, counts) for path in executed]


def _row(
    path: Path, records: Sequence[Mapping[str, Any]], runs: judges.Runs, counts: Mapping[str, Any]
) -> Row:
    number = path.stem[:2] if re.match(r"\d\d_", path.stem) else path.stem
    mine = [run for (lab, _), run in runs.items() if lab == number]
    last = mine[-1] if mine else results.Run(number, "", scale="")
    done = planning.ends_of(records, number)
    title, status, seconds = _read(path)
    machine = ", ".join(
        str(last.machine[key]) for key in ("gpu", "cpu", "cores") if last.machine.get(key)
    )
    return Row(
        path=path,
        title=title or path.stem,
        status=status or ("done" if done else "not done"),
        seconds=seconds
        if seconds is not None
        else _number(done[-1].get("seconds"))
        if done
        else None,
        scale=last.scale,
        machine=f"{machine} cores" if last.machine.get("cores") else machine,
        beside=max((run.beside for run in mine if isinstance(run.beside, int)), default=0),
        verdicts=counts.get(number, {}),
    )


def _read(path: Path) -> tuple[str, str, float | None]:
    """(first heading, what became of the run, seconds), as the notebook says it; "" and None where
    it doesn't.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        texts = [
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
        ]
        stamp = notebook["metadata"].get("labutils", {})
        status, seconds = str(stamp.get("status", "")), stamp.get("seconds")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # cut off, or no notebook at all
        return "", "", None
    title = next(iter(re.findall(r"^# (.+?)\s*$", "\n".join(texts), re.M)), "")
    return title, status, _number(seconds)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def as_html(folder: Path, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """The page: the table, and what was said of the labs that did not run to their end."""
    machines = {row.machine for row in rows if row.machine}
    several = len(machines) > 1
    head = ("lab", "status", "seconds", "scale", *(["machine"] * several), *judges.VERDICTS, "")
    cells = [_cells(row, several) for row in rows]
    numbers = [place for place, name in enumerate(head) if name in ("seconds", *judges.VERDICTS)]
    parts = [
        *(f"<p>Measured on {html.escape(machine)}.</p>" for machine in machines if not several),
        "<p>Verdicts are counted by lab, and come with their reasons from "
        f"<code>{_report(folder)}</code>. "
        f"{link('results.jsonl', 'results.jsonl')} holds every run, one a line.</p>",
        f'<div class="output">{table(head, cells, numbers)}</div>',
    ]
    if beside := max((row.beside for row in rows), default=0):
        labs = "another lab" if beside == 1 else f"{beside} other labs"
        parts.append(
            f"<p>Measured beside up to {labs}: times and memory are disturbed, and judged "
            "inconclusive.</p>"
        )
    troubles = [outcome.message for outcome in outcomes if outcome.message]
    parts += ["<h2>What went wrong</h2>"] * bool(troubles)
    parts += [
        f'<div class="output"><pre>{html.escape(message)}</pre></div>' for message in troubles
    ]
    contents = [(row.title, _address(row)) for row in rows]
    return filled(f"Results: {folder.name}", "Executed notebooks", contents, "\n".join(parts))


def _report(folder: Path) -> str:
    return html.escape(shlex.join(["labutils", "report", "--results", short(folder)]))


def _cells(row: Row, with_machine: bool) -> list[str]:
    plain = [
        row.status,
        DASH if row.seconds is None else f"{row.seconds:.0f}",
        row.scale or DASH,
        *([row.machine or DASH] * with_machine),
        *(str(row.verdicts.get(verdict, 0) or DASH) for verdict in judges.VERDICTS),
    ]
    notebook = link("notebook", f"notebooks/{row.path.name}")
    return [link(row.title, _address(row)), *map(html.escape, plain), notebook]


def _address(row: Row) -> str:
    """The lab's page, its notebook where there is none."""
    return f"notebooks/{row.page.name if row.page.is_file() else row.path.name}"
