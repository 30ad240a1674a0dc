"""`labutils handouts`: what is given out in a workshop, made from executed notebooks and the
results beside them.

    handouts.main(Path("results/course"), out=None)

Each lab becomes a notebook, an HTML page and a PDF, and all of them one PDF of the whole course, in
two editions: `student/` without the solutions, `instructor/` with them; index.html leads to all of
it. Nothing is measured and nothing is fetched here: what a page says is what its notebook says, and
its first page tells from results.jsonl when, where and with what that was found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat

from labutils.results import records as results
from labutils.tools.handouts import documents, editions, index
from labutils.tools.handouts.facts import Facts, Mismatch, facts_of, facts_of_unfinished

MADE, A_LAB_LEFT_OUT, WRONG_USAGE = 0, 1, 2


class UsageError(Exception):
    """Nothing can be made of what was named; the message says what was found and what to type."""


@dataclass(frozen=True)
class Executed:
    """An executed notebook and what results.jsonl says about its run."""

    path: Path
    notebook: nbformat.NotebookNode
    facts: Facts

    @property
    def number(self) -> str:
        return self.path.stem[:2]


def main(
    found_in: Path | None,
    out: Path | None,
    labs: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Make the handouts of `labs` (all there are, and the course's PDF, where none is named).

    found_in: a results folder; None: LABUTILS_RESULTS, else the newest. out: where the editions go;
    None: into results/handouts/, under the results folder's name. Returns 0, 1 where a lab had to
    be left out, 2 where nothing could be made.
    """
    began = time.perf_counter()
    try:
        folder = results_folder(found_in)
        reading = results.read_file(folder / "results.jsonl")
        results.check_usable([reading])
        executed, left_out = read(chosen(notebooks_in(folder), labs), reading.records)
        notes = [*left_out, *([f"Passed over: {reading.told()}"] if reading.passed_over else [])]
        if not executed:
            raise UsageError(
                "\n".join([f"No handouts: no lab in {folder} was run to its end.", *notes])
            )
        target = (
            results.named(out)
            if out
            else results.REPOSITORY / "results" / "handouts" / folder.resolve().name
        )
        files = make(executed, target, with_course=not labs)
    except ImportError as error:
        print(
            f"labutils handouts: {error}. To install what it takes: make install", file=sys.stderr
        )
        return WRONG_USAGE
    except (UsageError, ValueError, OSError) as error:
        print(f"labutils handouts: {error}", file=sys.stderr)
        return WRONG_USAGE
    for line in notes:
        say(line)
    size = sum(file.stat().st_size for file in files) / 1e6
    say(
        f"{len(files)} files of {len(executed)} labs, {size:.0f} MB, in "
        f"{time.perf_counter() - began:.0f} s: {target}"
    )
    for edition in editions.EDITIONS:
        say(f"  {edition + '/':12} notebooks, HTML, PDF{'' if labs else ', and course.pdf'}")
    say(f"  {index.NAME:12} leads to all of it")
    return A_LAB_LEFT_OUT if left_out else MADE


# What there is


def results_folder(named: Path | None) -> Path:
    """The folder meant: `named` (or the results.jsonl in it), else LABUTILS_RESULTS, else the
    newest in results/.

    Raises `UsageError` or `ValueError`, with what to type, where there is none."""
    if given := named or os.environ.get("LABUTILS_RESULTS"):
        folder = results.named(given)
        folder = (
            folder.parent if folder.name == "results.jsonl" and os.path.isfile(folder) else folder
        )
        if not os.path.isfile(folder / "results.jsonl"):
            raise UsageError(
                f"{folder} has no results.jsonl. Name the folder that a run wrote to, as in: "
                "labutils handouts --results results/NAME. Our own is reference/h200."
            )
        return folder
    files = results.files_below(results.REPOSITORY / "results")
    there = [file.parent for file in files if notebooks_in(file.parent)]
    if not there:
        raise UsageError(
            "There are no executed notebooks in results/ yet. Run the labs (labutils run), or take "
            "ours: "
            "labutils handouts --results reference/h200"
        )
    return there[-1]


def notebooks_in(folder: Path) -> list[Path]:
    """A results folder's executed notebooks, in the course's order; `labutils run` puts them into
    notebooks/.
    """
    return sorted((folder / "notebooks").glob("[0-9][0-9]_*.ipynb")) or sorted(
        folder.glob("[0-9][0-9]_*.ipynb")
    )


def chosen(paths: Sequence[Path], labs: Sequence[str]) -> list[Path]:
    """Those of `paths` that `labs` call by number ("03", "3") or name; all where there is none."""
    found = []
    for lab in labs:
        named = [
            path for path in paths if lab in (path.stem, path.name) or lab.zfill(2) == path.stem[:2]
        ]
        if not named:
            there = ", ".join(path.stem for path in paths) or "none"
            raise UsageError(f"There is no executed notebook of lab {lab!r}. There are: {there}.")
        found += named
    return sorted(set(found)) if labs else list(paths)


def read(paths: Sequence[Path], records: Sequence[dict]) -> tuple[list[Executed], list[str]]:
    """(the notebooks with their facts, a sentence for each that is left out): unfinished, or of
    another run.
    """
    executed, left_out = [], []
    for path in paths:
        try:
            notebook = _notebook(path)
            executed.append(Executed(path, notebook, facts_of(path.stem[:2], notebook, records)))
        except Mismatch as mismatch:
            left_out.append(f"Left out, lab {path.stem[:2]}: {mismatch}")
    return executed, left_out


def _notebook(path: Path) -> nbformat.NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except (
        Exception
    ) as error:  # nbformat passes on whatever json, its schema or the file's structure raise
        raise Mismatch(f"{path} can't be read as a notebook: {error}") from None


# What is made of it


def make(executed: Sequence[Executed], target: Path, with_course: bool) -> list[Path]:
    """Write every edition of every lab below `target`, of the course, and what leads to them; the
    editions' files.

    Raises `OSError`.
    """
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as workers:
        jobs = [(lab, edition) for edition in editions.EDITIONS for lab in executed]
        folders = {
            edition: documents.workshop(Path(scratch) / edition) for edition in editions.EDITIONS
        }
        made = list(
            workers.map(lambda job: _lab(*job, folders[job[1]], target / job[1], executed), jobs)
        )
        files = [file for files, _ in made for file in files]

        def course(edition: str) -> Path:
            chapters = [
                chapter for (_, of), (_, chapter) in zip(jobs, made, strict=True) if of == edition
            ]
            return documents.course(chapters, edition, folders[edition], target / edition)

        courses = list(workers.map(course, editions.EDITIONS)) if with_course else []
    index.write(target)
    return files + courses


def _lab(
    lab: Executed, edition: str, scratch: Path, target: Path, others: Sequence[Executed]
) -> tuple[list[Path], documents.Chapter]:
    """One edition of one lab: (its notebook, page and PDF; the chapter for the course's PDF)."""
    target.mkdir(parents=True, exist_ok=True)
    notebook = editions.edition_of(lab.notebook, edition)
    file = target / lab.path.name
    nbformat.write(notebook, file)
    chapter = documents.chapter(notebook, lab.path.stem, lab.facts, edition, scratch)
    pages = {other.path.name for other in others}
    return [
        file,
        documents.page(chapter, target, pages),
        documents.pdf(chapter, scratch, target),
    ], chapter


def pages_of(folder: Path, executed: Sequence[Path]) -> None:
    """Write an HTML page beside each of these notebooks of a results folder, whatever became of its
    run.

    Raises `OSError` or `ImportError` where one can't be made; a file that is no notebook has none.
    """
    records = results.read_records(folder)
    names = {path.name for path in notebooks_in(folder)}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(lambda path: _page_of(path, records, names), executed))


def _page_of(path: Path, records: Sequence[dict], names: set[str]) -> None:
    try:
        notebook = _notebook(path)
    except Mismatch:
        return
    try:
        facts = facts_of(path.stem[:2], notebook, records)
    except Mismatch as mismatch:
        facts = facts_of_unfinished(path.stem[:2], notebook, f"{mismatch}.")
    edition = editions.edition_of(notebook, editions.EXECUTED)
    documents.page(documents.read(edition, path.stem, facts, editions.EXECUTED), path.parent, names)
