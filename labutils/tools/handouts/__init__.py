"""`labutils handouts`: what is given out in a workshop, made of executed notebooks.

    handouts.main(Path("results/course"), out=None)

Each lab becomes a notebook, an HTML page and a PDF, and all of them one PDF of the course, in three
editions: `worksheet/` with the questions, the predictions and the exercises, `student/` with the
results and without the solutions, `instructor/` with both. Nothing is measured and nothing
fetched here: a page says what its notebook says, and its first lines say when, where and with what
that was found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbformat import NotebookNode

from labutils.course.recorded import cells_of_an_older_edition
from labutils.course.solutions import with_solutions
from labutils.results import records, report
from labutils.results.records import Reading
from labutils.tools.handouts import documents, editions, index
from labutils.tools.handouts.documents import Chapter
from labutils.tools.run.arguments import NOTEBOOKS, UsageError, path_of

MADE, A_LAB_LEFT_OUT, WRONG_USAGE = 0, 1, 2
NEVER = datetime.fromtimestamp(0, UTC)
"""Stands for a time that nobody wrote down."""


class Mismatch(RuntimeError):
    """A notebook that is left out, or its records don't belong to it; the message says why."""


def main(results: Path | None, out: Path | None, labs: Sequence[str] = ()) -> int:
    """Make the handouts of `labs`, without names of all there are, and then the course's PDF too.

    results: a results folder; None: LABUTILS_RESULTS, else the newest. out: where they go; None:
    into results/handouts/. Returns `MADE`, `A_LAB_LEFT_OUT`, or `WRONG_USAGE` where nothing could
    be made.
    """
    try:
        known = _results(results)
        records.check_usable([known])
        folder = known.path.parent
        default = records.REPOSITORY / "results" / "handouts" / folder.resolve().name
        target = records.named(out or default)
        there = _notebooks_in(folder)
        paths = sorted({path_of(lab, there) for lab in labs}) or there
        left_out: dict[str, str] = {}
        for edition in editions.EDITIONS:
            chosen = [path for path in paths if path.name not in left_out]
            left_out |= _make(edition, chosen, known, target / edition, not labs)
    except (ValueError, OSError, ImportError, UsageError, RuntimeError) as error:
        cure = ". Disk full? `df -h`. Elsewhere: --out DIR" if isinstance(error, OSError) else ""
        print(f"labutils handouts: {records.plain(str(error))}{cure}", file=sys.stderr)
        return WRONG_USAGE
    for name, why in left_out.items():
        print("Left out:", records.plain(" ".join(f"{name}: {why}".split())))
    if known.passed_over:
        print("Passed over:", records.plain(known.complaint()))
    count = sum(path.name not in left_out for path in paths)
    if not count:
        print(f"labutils handouts: no lab in {folder} can be given out.", file=sys.stderr)
        return WRONG_USAGE
    for edition in editions.EDITIONS:
        print(f"Labs: {count}, {edition}’s edition: {target / edition / 'index.html'}")
    return A_LAB_LEFT_OUT if left_out else MADE


def _results(asked: Path | None) -> Reading:
    """The results meant, which have executed notebooks beside them. Raises `ValueError` that says
    what to type where there are none."""
    files = [file for file in report.result_files(asked) if _notebooks_in(file.parent)]
    if not files:
        raise ValueError(
            "There are no executed notebooks beside the results. Run the labs (labutils run), or "
            "take ours: labutils handouts --results reference/h200"
        )
    return records.read_file(files[-1])


def _notebooks_in(folder: Path) -> list[Path]:
    name = "[0-9][0-9]_*.ipynb"
    return sorted((folder / "notebooks").glob(name)) or sorted(folder.glob(name))


def _make(
    edition: str, paths: Sequence[Path], known: Reading, place: Path, with_course: bool
) -> dict[str, str]:
    """Write one edition of every lab into `place`; (file's name -> why it is left out). Raises
    `OSError`, and `RuntimeError` of the index."""
    place.mkdir(parents=True, exist_ok=True)
    left_out: dict[str, str] = {}
    pages = {path.name for path in paths}
    with TemporaryDirectory() as scratch:
        workshop = documents.workshop(Path(scratch))

        def one(path: Path) -> tuple[Chapter, str]:
            chapter = _chapter(path, known, edition)
            documents.page(chapter, place, pages)
            text = documents.pdf(chapter, workshop, place)
            notebook = nbformat.writes(chapter.notebook).encode(errors="replace")
            (place / path.name).write_bytes(notebook)  # the index lists what has one
            return chapter, text

        chapters = _made(one, paths, left_out)
        if with_course and chapters:
            course = place / "course.pdf"
            _made(lambda _: documents.course(chapters, workshop, place), [course], left_out)
    index.write(place, edition)
    return left_out


def _made(make: Callable, paths: Sequence[Path], left_out: dict[str, str]) -> list[Any]:
    """What `make` makes of each path. One that fails costs no other: its name is `left_out`, with
    the reason."""

    def one(path: Path) -> Any:
        try:
            return make(path)
        except Exception as error:
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            left_out[path.name] = f"{kind}{error}"

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return [made for made in workers.map(one, paths) if made]


def pages_of(folder: Path, executed: Sequence[Path]) -> dict[str, str]:
    """Write an HTML page beside each of these notebooks of a results folder, whatever became of its
    run; (notebook's name -> why it has none). Raises `OSError` or `ImportError`."""
    left_out: dict[str, str] = {}
    path = folder / "results.jsonl"
    known = records.read_file(path) if path.exists() else Reading(path, [], [])
    pages = {path.name for path in _notebooks_in(folder)}
    chapter = partial(_chapter, known=known, edition=editions.EXECUTED)
    _made(lambda path: documents.page(chapter(path), path.parent, pages), executed, left_out)
    return left_out


def _chapter(path: Path, known: Reading, edition: str) -> Chapter:
    """Raises `Mismatch` where the file is no notebook; and, for an edition that is given out, where
    it was not run to its end, or its records are of another run."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat passes on what json and its schema raise
        raise Mismatch(f"{path} can't be read as a notebook: {error}") from None
    if edition == editions.INSTRUCTOR:
        try:
            notebook = with_solutions(notebook, path.stem[:2])
        except ValueError as error:
            raise Mismatch(f"{error} It is another edition of the lab.") from None
    try:
        facts, at = _facts(path.stem[:2], notebook, known)
    except Mismatch as mismatch:
        if edition != editions.EXECUTED:
            raise
        facts, at = {"mind": str(mismatch)}, NEVER
    lab = NOTEBOOKS / path.name
    if lab.is_file() and (count := cells_of_an_older_edition(notebook, nbformat.read(lab, 4))):
        older = f"an older edition: {count} cells of the lab as it stands are not in it"
        facts.setdefault("mind", older)
    facts = {} if edition == editions.WORKSHEET else facts  # it shows no result
    return Chapter(path.stem, edition, editions.edition_of(notebook, edition), facts, at)


def _facts(number: str, notebook: NotebookNode, known: Reading) -> tuple[dict[str, str], datetime]:
    """(what results.jsonl says about the run that `notebook` shows, when it ended)."""
    again = f"To run it: labutils run {number} --force with the same --results"
    if notebook.metadata.get("labutils", {}).get("status", "done") != "done":
        raise Mismatch(f"its notebook was not run to its end. {again}")
    mine = [record for record in known.records if record["lab"] == number]
    times = notebook.metadata.get("papermill", {})
    first = _moment(times.get("start_time"))
    last = _moment(times.get("end_time", datetime.now(UTC).isoformat()))
    ends = {_moment(r.get("at")): r for r in mine if r.get("status") == "done"}
    ends = {at: record for at, record in ends.items() if first < at <= last}
    if not ends:
        if known.passed_over:
            again = "Why some lines can't be used: labutils report with the same --results"
        raise Mismatch(f"results.jsonl has no usable line that says when its run ended. {again}")
    at, done = max(ends.items(), key=lambda pair: pair[0])
    runs = [r for r in mine if r.get("machine") and r.get("commit") == done.get("commit")]
    run = runs[-1] if runs else {}
    given = {k: v for k, v in done.get("parameters", {}).items() if k != "results_dir"}
    took = f", in {done['seconds']} s" if "seconds" in done else ""
    facts = {
        "executed": f"{at:%Y-%m-%d %H:%M} UTC{took}",
        "machine": _machine(run["machine"]) if run else "",
        "parameters": _listed(given),
        "versions": _listed(run.get("versions", {})),
        "commit": str(done.get("commit", "")),
    }
    return facts, at


def _moment(text: Any) -> datetime:
    """The time that ISO 8601 gives, in UTC; `NEVER` where somebody edited it by hand."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError):
        return NEVER


def _listed(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _machine(facts: Mapping[str, Any]) -> str:
    """A machine in one line: "NVIDIA H200, Intel Xeon, 16 cores, 135.1 GB, Debian 12"."""
    size = f"{facts.get('cores', '?')} cores, {facts.get('ram_gb', '?')} GB"
    parts = [facts.get("gpu"), facts.get("cpu"), size, facts.get("os")]
    return ", ".join(str(part) for part in parts if part)
