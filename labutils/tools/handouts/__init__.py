"""`labutils handouts`: what is given out in a workshop, made of executed notebooks.

    handouts.main(Path("results/course"), out=None)

Each lab becomes a notebook, an HTML page and a PDF, and all of them one PDF of the course, in two
editions: `student/` without the solutions, `instructor/` with them. Nothing is measured and nothing
fetched here: a page says what its notebook says, and its first lines say when, where and with what
that was found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat

from labutils.results import records
from labutils.tools.handouts import documents, editions, index
from labutils.tools.handouts.documents import Chapter, ConversionError, moment

MADE, A_LAB_LEFT_OUT, WRONG_USAGE = 0, 1, 2
NEVER = datetime.fromtimestamp(0, UTC)
"""Stands for a time that nobody wrote down."""


class Mismatch(Exception):
    """A notebook that is left out, or its records don't belong to it; the message says why."""


def main(
    results: Path | None,
    out: Path | None,
    labs: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Make the handouts of `labs`, without names of all there are, and then the course's PDF too.

    results: a results folder; None: LABUTILS_RESULTS, else the newest. out: where they go; None:
    into results/handouts/. Returns `MADE`, `A_LAB_LEFT_OUT`, or `WRONG_USAGE` where nothing could
    be made.
    """
    try:
        folder = _folder(results)
        reading = records.read_file(folder / "results.jsonl")
        records.check_usable([reading])
        default = records.REPOSITORY / "results" / "handouts" / folder.resolve().name
        target = records.named(out) if out else default
        paths = _chosen(_notebooks_in(folder), labs)
        made, left_out = _make(paths, reading.records, target, with_course=not labs)
    except (ValueError, OSError, ImportError) as error:
        print(f"labutils handouts: {error}", file=sys.stderr)
        return WRONG_USAGE
    for line in left_out:
        say(f"Left out: {line}")
    if reading.passed_over:
        say(f"Passed over: {reading.told()}")
    if not made:
        print(f"labutils handouts: no lab in {folder} can be given out.", file=sys.stderr)
        return WRONG_USAGE
    say(f"{made} labs, in two editions: {target / 'index.html'}")
    return A_LAB_LEFT_OUT if left_out else MADE


def _folder(named: Path | None) -> Path:
    """The results folder meant. Raises `ValueError` that says what to type where there is none."""
    if given := named or os.environ.get("LABUTILS_RESULTS"):
        folder = records.named(given)
        folder = folder.parent if folder.name == "results.jsonl" else folder
        if not os.path.isfile(folder / "results.jsonl"):
            raise ValueError(
                f"{folder} has no results.jsonl. Name the folder that a run wrote to, as in: "
                "labutils handouts --results results/NAME. Our own is reference/h200."
            )
        return folder
    files = records.files_below(records.REPOSITORY / "results")
    folders = [file.parent for file in files if _notebooks_in(file.parent)]
    if not folders:
        raise ValueError(
            "There are no executed notebooks in results/ yet. Run the labs (labutils run), or take "
            "ours: labutils handouts --results reference/h200"
        )
    return folders[-1]


def _notebooks_in(folder: Path) -> list[Path]:
    name = "[0-9][0-9]_*.ipynb"
    return sorted((folder / "notebooks").glob(name)) or sorted(folder.glob(name))


def _chosen(paths: Sequence[Path], labs: Sequence[str]) -> list[Path]:
    """Those of `paths` that `labs` call by number or name; all without names."""
    chosen = []
    for lab in labs:
        named = [p for p in paths if lab in (p.stem, p.name) or lab.zfill(2) == p.stem[:2]]
        if not named:
            there = ", ".join(path.stem for path in paths) or "none"
            raise ValueError(f"There is no executed notebook of lab {lab!r}. There are: {there}.")
        chosen += named
    return sorted(set(chosen)) if labs else list(paths)


def _make(
    paths: Sequence[Path], known: Sequence[dict[str, Any]], target: Path, with_course: bool
) -> tuple[int, list[str]]:
    """Write every edition of every lab below `target`, and what leads to them; (labs made, why
    others are left out). Raises `OSError`."""
    left_out: dict[str, str] = {}
    pages = {path.name for path in paths}
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as workers:
        for edition in editions.EDITIONS:
            place = target / edition
            place.mkdir(parents=True, exist_ok=True)
            workshop = documents.workshop(Path(scratch) / edition)

            def one(path: Path) -> tuple[Chapter, str] | None:
                try:
                    chapter = _chapter(path, known, edition)  # noqa: B023  used before the next
                    nbformat.write(chapter.notebook, place / path.name)  # noqa: B023
                    documents.page(chapter, place, pages)  # noqa: B023
                    return chapter, documents.pdf(chapter, workshop, place)[1]  # noqa: B023
                except (Mismatch, ConversionError) as error:
                    left_out[path.stem] = f"lab {path.stem[:2]}: {error}"
                    return None

            chapters = [made for made in workers.map(one, paths) if made]
            if with_course and chapters:
                documents.course(chapters, workshop, place)
    index.write(target)
    return len(paths) - len(left_out), list(left_out.values())


def pages_of(folder: Path, executed: Sequence[Path]) -> None:
    """Write an HTML page beside each of these notebooks of a results folder, whatever became of its
    run. Raises `OSError`, `ImportError` or `ConversionError`."""
    known = records.read_records(folder)
    pages = {path.name for path in _notebooks_in(folder)}

    def one(path: Path) -> None:
        documents.page(_chapter(path, known, editions.EXECUTED), path.parent, pages)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(one, executed))


def _chapter(path: Path, known: Sequence[dict[str, Any]], edition: str) -> Chapter:
    """Raises `Mismatch` where the file is no notebook; and, for an edition that is given out, where
    it was not run to its end, or its records are of another run."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat passes on what json and its schema raise
        raise Mismatch(f"{path} can't be read as a notebook: {error}") from None
    try:
        facts, at = _facts(path.stem[:2], notebook, known)
    except Mismatch as mismatch:
        if edition != editions.EXECUTED:
            raise
        facts, at = {"mind": str(mismatch)}, NEVER
    return Chapter(path.stem, edition, editions.edition_of(notebook, edition), facts, at)


def _facts(
    number: str, notebook: nbformat.NotebookNode, known: Sequence[dict[str, Any]]
) -> tuple[dict[str, str], datetime]:
    """(what results.jsonl says about the run that `notebook` shows, when it ended)."""
    again = f"To run it: labutils run {number} --force with the same --results"
    if notebook.metadata.get("labutils", {}).get("status", "done") != "done":
        raise Mismatch(f"its notebook was not run to its end. {again}")
    mine = [record for record in known if record.get("lab") == number]
    times = notebook.metadata.get("papermill", {})
    first = moment(times["start_time"]) if times.get("end_time") else NEVER
    last = moment(times["end_time"]) if times.get("end_time") else datetime.now(UTC)
    done, at = None, NEVER
    for record in mine:
        try:
            ended = moment(record["at"])
        except (KeyError, TypeError, ValueError):  # edited by hand
            continue
        if record.get("status") == "done" and first <= ended <= last + timedelta(seconds=5):
            done, at = record, ended
    if done is None:
        raise Mismatch(f"results.jsonl has no run that ended when its notebook did. {again}")
    runs = [r for r in mine if r.get("machine") and r.get("commit") == done.get("commit")]
    machines = dict.fromkeys(_machine(run["machine"]) for run in runs)
    versions = runs[-1].get("versions", {}) if runs else {}
    parameters = done.get("parameters", {})
    facts = {
        "executed": f"{at:%Y-%m-%d %H:%M} UTC, in {done.get('seconds')} s",
        "machine": "; ".join(machines),
        "beside": "other labs at once: times are disturbed" if done.get("beside") else "",
        "parameters": _listed({k: v for k, v in parameters.items() if k != "results_dir"}),
        "versions": _listed(versions),
        "commit": str(done.get("commit", "")),
    }
    return facts, at


def _listed(words: dict[str, Any]) -> str:
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _machine(facts: dict[str, Any]) -> str:
    """A machine in one line: "NVIDIA H200 (150 GB); Intel Xeon, 16 cores, 135 GB, Debian 12"."""
    parts = [str(facts.get("cpu", "unknown CPU")).replace("(R)", "").replace("(TM)", "")]
    parts += [f"{facts['cores']} cores"] if "cores" in facts else []
    parts += [f"{facts['ram_gb']:.0f} GB"] if isinstance(facts.get("ram_gb"), float) else []
    parts += [str(facts["os"])] if "os" in facts else []
    gpu = f"{facts['gpu']} ({facts.get('gpu_memory_gb', '?')} GB); " if facts.get("gpu") else ""
    return gpu + ", ".join(parts)
