"""`labutils report`: every claim with published | reference | here | verdict, and the ladder of lab
04.

It works with whatever results there are: none, a run killed while writing, the records of labs it
doesn't know.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils.results import claims as articles
from labutils.results import judges
from labutils.results.judges import Judgement
from labutils.results.records import (
    LANES,
    REFERENCE,
    REPOSITORY,
    Reading,
    Run,
    check_no_folder,
    check_usable,
    files_below,
    named,
    read_file,
    read_records,
    runs_of,
)

LADDER_LAB = "04"
WIDTH = 100
"""Columns of the page where there is no terminal to ask."""
LONGEST_WORD = 16
"""Words up to so many letters are not broken in a table's cells."""

Runs = Mapping[tuple[str, str], Run]


@dataclass(frozen=True)
class Page:
    """What a report says: the judgements, the ladders, and where the numbers come from; all
    `records` as they are. `passed_over`: a sentence for each file that has lines which can't be
    used."""

    judgements: list[Judgement]
    here: Runs
    reference: Runs
    files: list[Path]
    labs_done: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder; what a run didn't record is None. `speedup` is over the rung "stock"
    of the same set.
    """

    rung: str
    lane: str
    step_ms: float
    p10: float | None
    p90: float | None
    speedup: float | None
    gpu_busy: float | None
    floor_ms: float | None


def main(results: Path | None, as_json: bool) -> int:
    """Print the report of `results` (a folder or a results.jsonl; None: each lab's newest). The
    exit code: 0, or 2.

    2 means that `results` was named and holds no results that can be read.
    """
    try:
        readings = [read_file(path) for path in result_files(results)]
        check_usable(readings)
        page = page_of(readings, REFERENCE)
    except (ValueError, OSError) as error:
        print(f"labutils report: {error}", file=sys.stderr)
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
    place = named(results or os.environ.get("LABUTILS_RESULTS") or REPOSITORY / "results")
    if os.path.isfile(place):  # Path.is_file raises OSError for a name that is too long
        return [place]
    check_no_folder(place / "results.jsonl")
    if os.path.isfile(place / "results.jsonl"):
        return [place / "results.jsonl"]
    found = files_below(place) if os.path.isdir(place) else []
    if not found and results is not None:
        problem = "has no results.jsonl" if os.path.isdir(place) else "does not exist"
        if os.path.islink(place) and not os.path.exists(place):
            problem = "is a link that leads nowhere"
        raise ValueError(
            f"{place} {problem}, so there is nothing to report. Name the folder that a lab wrote "
            "to, "
            "as in: labutils report --results results/NAME. To make one: labutils run"
        )
    return found


def files_beside(folder: Path, lab: str) -> list[Path]:
    """What `lab`, kept in `folder`, reads to sum up the others: its own folder where these were
    kept there, too.

    Where it stands alone, each lab's newest under results/ of this checkout.
    """
    own = folder / "results.jsonl"
    if any(record.get("lab") != lab for record in read_records(own)):
        return [own]
    return [path for path in files_below(REPOSITORY / "results") if path.parent.resolve() != folder]


def read_page(files: Iterable[Path], reference: Path) -> Page:
    """Judge every claim by the newest of `files` for each lab: runs of one lab are never mixed from
    two files.
    """
    return page_of([read_file(path) for path in files], reference)


def page_of(readings: Sequence[Reading], reference: Path) -> Page:
    """As `read_page`, of what was read already."""
    by_lab: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
    for reading in readings:
        path = reading.path
        for record in reading.records:
            lab = record["lab"]
            if lab not in by_lab or by_lab[lab][0] != path:
                by_lab[lab] = (path, [])
            by_lab[lab][1].append(record)
    records = [record for _, of_lab in by_lab.values() for record in of_lab]
    here, theirs = runs_of(records), runs_of(read_records(reference))
    return Page(
        judgements=judges.judge_all(None, here, theirs),
        here=here,
        reference=theirs,
        files=list(dict.fromkeys(path for path, _ in by_lab.values())),
        labs_done=sorted({r["lab"] for r in records if r.get("status") == "done"}),
        records=records,
        passed_over=[reading.told() for reading in readings if reading.passed_over],
    )


def ladder(runs: Runs) -> list[Rung]:
    """The rungs that lab 04 climbed, lane by lane in the order in which they were run.

    Failed runs are left out, and those whose optimizer step takes another number of examples than
    the stock one's.
    """
    climbed = [run for (lab, _), run in runs.items() if lab == LADDER_LAB and _is_rung(run)]
    stock = next((run for run in climbed if run.run == "stock"), None)
    same = [run for run in climbed if stock is None or _examples(run) == _examples(stock)]
    first = _number(stock.metric("step_ms")) if stock else None
    return [_rung(run, first) for run in sorted(same, key=lambda run: LANES.index(run.lane))]


def _is_rung(run: Run) -> bool:
    return run.ok and run.lane in LANES and (_number(run.metric("step_ms")) or 0) > 0


def _examples(run: Run) -> float | None:
    """Examples in one optimizer step; None where the recipe doesn't say it in numbers."""
    micro_batch, accumulation = (
        _number(run.recipe.get(name, 1)) for name in ("micro_batch", "accumulation")
    )
    return None if micro_batch is None or accumulation is None else micro_batch * accumulation


def _number(value: Any) -> float | None:
    """`value` where it is a finite number, else None: a results file may hold anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def _rung(run: Run, stock: float | None) -> Rung:
    summary = run.metrics["step_ms"] if isinstance(run.metrics["step_ms"], Mapping) else {}
    step = _number(run.metric("step_ms"))
    return Rung(
        rung=run.run,
        lane=run.lane,
        step_ms=step,
        p10=_number(summary.get("p10")),
        p90=_number(summary.get("p90")),
        speedup=_number(stock / step) if stock else None,
        gpu_busy=_number(run.metric("gpu_busy")),
        floor_ms=_number(run.metric("floor_ms")),
    )


# -------------------------------------------------------------------------------------- machines


def as_data(page: Page) -> dict[str, Any]:
    """The report for machines: plain JSON data. A value that isn't there is null."""
    return {
        "schema": 1,
        "results": [str(path) for path in page.files],
        "passed_over": page.passed_over,
        "labs_done": page.labs_done,
        "verdicts": dict(Counter(j.verdict for j in page.judgements)),
        "reference_verdicts": dict(Counter(j.reference_verdict for j in page.judgements)),
        "claims": [_claim_data(j) for j in page.judgements],
        "ladder": [vars(rung) for rung in ladder(page.here)],
        "reference_ladder": [vars(rung) for rung in ladder(page.reference)],
    }


def _claim_data(j: Judgement) -> dict[str, Any]:
    return {
        "id": j.claim.id,
        "article": j.claim.article,
        "section": j.claim.section,
        "statement": j.claim.statement,
        "lab": j.claim.lab,
        "published": j.published,
        "published_values": list(j.claim.published),
        "unit": j.claim.unit,
        "reference": j.reference or None,
        "reference_verdict": j.reference_verdict,
        "reference_why": j.reference_why,
        "here": j.here or None,
        "verdict": j.verdict,
        "why": j.why,
        "note": j.claim.note,
    }


# ---------------------------------------------------------------------------------------- people


def show(page: Page) -> None:
    """Print the report for people, as wide as the terminal, at `WIDTH` columns where the output
    goes elsewhere.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for key, article in articles.articles().items():
        judgements = [j for j in page.judgements if j.claim.article == key]
        if judgements:
            title = f"{key}: {article.subject} ({article.gpu})"
            _show_article(console, title, judgements, _reference_machine(page.reference))
            _show_reasons(console, judgements, of_reference=not page.here)
    here, theirs = ladder(page.here), ladder(page.reference)
    ladders = (
        ("here", here if here != theirs else [], page.here),
        ("on the reference machine", theirs, page.reference),
    )
    for where, rungs, runs in ladders:  # one where the report is of the reference itself
        if rungs:
            _show_ladder(console, f"The ladder {where}", rungs, _machine(runs))
    _show_sources(console, page)


def _show_article(console: Any, title: str, judgements: list[Judgement], reference: str) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = [
        (
            Text.assemble((j.claim.id, "bold"), "\n", j.claim.statement),
            Text(j.published),
            Text(f"{j.reference}\n{j.reference_verdict}" if j.reference else "–"),
            Text(j.here or "–"),
            Text(j.verdict, style=_STYLES.get(j.verdict, "")),
        )
        for j in judgements
    ]
    table = Table(title=title, title_justify="left", show_lines=True, expand=True, pad_edge=False)
    table.add_column("claim", ratio=1, overflow="fold")
    shares = (("published", 0.14), (reference, 0.14), ("here", 0.14), ("verdict here", 0.1))
    for place, (name, share) in enumerate(shares, start=1):
        longest = max(
            len(word)
            for text in (name, *(str(row[place]) for row in rows))
            for word in text.split()
        )
        width = max(int(share * console.width), min(longest, LONGEST_WORD))
        table.add_column(name, width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _reference_machine(runs: Runs) -> str:
    """The short name of the GPU that all reference runs are of; "reference" where it isn't one."""
    gpus = {gpu for run in runs.values() if (gpu := run.machine.get("gpu"))}
    return str(gpus.pop()).removeprefix("NVIDIA ") if len(gpus) == 1 else "reference"


_STYLES = {
    judges.CONFIRMED: "bold green",
    judges.REFUTED: "bold red",
    judges.INCONCLUSIVE: "bold yellow",
    judges.NOT_TESTABLE: "dim",
}


def _show_reasons(console: Any, judgements: list[Judgement], of_reference: bool) -> None:
    """Why each verdict, gathered: claims with the same reason share a line. The reference's, if no
    other.
    """
    from rich.padding import Padding
    from rich.text import Text

    reasons: dict[tuple[str, str], list[str]] = {}
    for j in judgements:
        reason = (j.reference_verdict, j.reference_why) if of_reference else (j.verdict, j.why)
        reasons.setdefault(reason, []).append(j.claim.id)
    console.print(
        Text(f"Why, {'on the reference machine' if of_reference else 'here'}", style="bold")
    )
    for (verdict, why), ids in reasons.items():
        line = Text.assemble((", ".join(ids), "bold"), f": {verdict}. {why}")
        console.print(Padding(line, (0, 0, 0, 2)))
    console.print()


def _show_ladder(console: Any, title: str, rungs: list[Rung], machine: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{title} ({machine}): one optimizer step", title_justify="left", pad_edge=False
    )
    table.add_column("rung", overflow="fold")
    table.add_column("lane", overflow="fold")
    for name in ("median ms", "p10-p90", "over stock", "GPU busy", "floor ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for before, rung in zip([None, *rungs], rungs, strict=False):
        if before is not None and before.lane != rung.lane:
            table.add_section()
        table.add_row(Text(rung.rung), rung.lane, *_figures(rung))
    console.print(table)
    console.print(
        "Compare within a lane: 'same mathematics' computes less, for gradients of the same distribution.\n"
    )


def _figures(rung: Rung) -> tuple[str, ...]:
    return (
        f"{rung.step_ms:.1f}",
        "–" if rung.p10 is None or rung.p90 is None else f"{rung.p10:.1f}-{rung.p90:.1f}",
        "–" if rung.speedup is None else f"{rung.speedup:.2f}x",
        "–" if rung.gpu_busy is None else f"{100 * rung.gpu_busy:.0f} %",
        "–" if rung.floor_ms is None else f"{rung.floor_ms:.1f}",
    )


def _show_sources(console: Any, page: Page) -> None:
    from rich.text import Text

    tally = Counter(j.verdict for j in page.judgements)
    theirs = Counter(j.reference_verdict for j in page.judgements)
    for name, counts in (("Here", tally), ("Reference", theirs)):
        said = ", ".join(
            f"{counts[verdict]} {verdict}" for verdict in judges.VERDICTS if counts[verdict]
        )
        console.print(Text.assemble((f"{name}: ", "bold"), said))
    if page.files:
        console.print(Text("Read: " + ", ".join(map(str, page.files)), overflow="fold"))
        console.print(Text(f"Labs run to their end: {', '.join(page.labs_done) or 'none'}."))
    else:
        console.print(Text("No results of this machine yet. Type: labutils run"))
    for told in page.passed_over:
        console.print(Text(f"Passed over: {told}", overflow="fold"))


def _machine(runs: Runs) -> str:
    """The machine that the ladder was climbed on, and at what scale."""
    run = next(r for (lab, _), r in runs.items() if lab == LADDER_LAB)
    return f"{run.machine.get('gpu') or run.machine.get('cpu') or 'unknown machine'}, scale {run.scale}"
