"""What lab 12 asks of all results together: which claims, how far off, what to do next.

It works with whatever there is: no run at all, runs of several machines, files edited by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from labutils.course.tables import as_table
from labutils.labs import lab06_advisor
from labutils.results.claims import Claim
from labutils.results.judges import (
    INCONCLUSIVE,
    NOT_TESTABLE,
    VERDICTS,
    Judgement,
)
from labutils.results.records import Run, Runs
from labutils.results.report import claims_table

EVERYTHING = "all"


def scoreboard(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """The report's table of claims, and the factors that this machine and the reference are off
    by."""
    return claims_table(judgements).assign(
        off_by=[off_by(j) or math.nan for j in judgements],
        reference_off_by=[off_by(j.theirs) or math.nan for j in judgements],
    )


def off_by(judgement: Judgement | None) -> float | None:
    """The factor between the published effect and the measured one, 1 or more.

    From a published range it is counted from the nearer end. None where there is no number on both
    sides, or where the two are no quantities of one kind: a message, an order.
    """
    published = _published_ratios(judgement.claim) if judgement else None
    if judgement is None or not judgement.effects or published is None:
        return None
    low, high = published
    return max(max(low / e.value, e.value / high, 1.0) for e in judgement.effects.values())


def _published_ratios(claim: Claim) -> tuple[float, float] | None:
    """The least and the most ratio, changed over base, that the article gives; None for none."""
    numbers, how = claim.published, claim.how
    if claim.judge != "ratio" or how["form"] == "steps" or len(numbers) > 2:
        return None
    if how["form"] != "percent":
        return numbers[1] / numbers[0], numbers[1] / numbers[0]
    sign = 1 if how["direction"] == "more" else -1
    ratios = [1 + sign * percent / 100 for percent in numbers]
    return min(ratios), max(ratios)


def choices(board: pd.DataFrame) -> dict[str, list[str]]:
    """What one can choose by -> its values, "all" first."""
    values = {name: sorted(board[name].unique()) for name in ("article", "lab")}
    values["verdict"] = list(VERDICTS)
    return {name: [EVERYTHING, *of] for name, of in values.items()}


def chosen(board: pd.DataFrame, **words: str) -> pd.DataFrame:
    """The rows of one `article` ("A2"), `lab` ("05") and `verdict` (here). Raises `ValueError` for
    others.
    """
    for name, word in words.items():
        if word not in (known := choices(board)[name]):
            raise ValueError(f"There is no {name} {word!r}. Choose one of: {', '.join(known)}.")
    for name, word in words.items():
        board = board if word == EVERYTHING else board[board[name] == word]
    return board


def tally(board: pd.DataFrame) -> pd.DataFrame:
    """A row for each article: its claims, and how many of them have each of the verdicts that
    occur, on the H200 and here."""
    sides = [
        pd.crosstab(board["article"], board[name]) for name in ("reference_verdict", "verdict")
    ]
    words = [word for word in VERDICTS if any(word in side for side in sides)]
    theirs, ours = (side.reindex(columns=words, fill_value=0).astype(str) for side in sides)
    counts = (theirs + " / " + ours).add_suffix(": H200 / here")
    counts.insert(0, "in all", board["article"].value_counts())
    return counts.rename_axis("claims of").reset_index()


def on_record(runs: Runs, done: Sequence[str], titles: Mapping[str, str]) -> pd.DataFrame:
    """A row for each lab of the course (`titles`: number -> title): what there is of it, and from
    where.
    """
    rows = []
    for number, title in titles.items():
        mine = runs.select(number)
        state = "run to its end" if number in done else "begun" if mine else "not run"
        scales = ", ".join(sorted({run.scale for run in mine if run.scale}))
        latest = max((run.at for run in mine), default="")[:10]
        rows.append((title, state, len(mine) or None, scales, _machines(mine), latest))
    table = pd.DataFrame(rows, columns=["lab", "here", "runs", "scale", "machine", "from"])
    return table.astype(object).where(table.notna() & (table != ""), None)


def _machines(runs: Iterable[Run]) -> str:
    """The machines of runs, each once."""
    names = {str(run.machine.get("gpu") or run.machine.get("cpu") or "unknown") for run in runs}
    return ", ".join(sorted(names))


def next_steps(
    board: pd.DataFrame, done: Sequence[str], titles: Mapping[str, str], on_gpu: bool
) -> list[str]:
    """What to do next, in sentences with commands: labs to run, and noise to get rid of."""
    steps = []
    if missing := [number for number in titles if number not in done]:
        steps.append(
            f"Run the labs that have not ended here: `labutils run {' '.join(missing)}`. "
            f"{int(board['lab'].isin(missing).sum())} of the {len(board)} claims are theirs."
        )
    noisy = board[board["verdict"] == INCONCLUSIVE]
    if len(noisy):
        steps.append(
            f"{len(noisy)} inconclusive: run again with nothing else on the machine: "
            f"`labutils run {' '.join(sorted(noisy['lab'].unique()))} --force`"
        )
    about_a_gpu = (board["verdict"] == NOT_TESTABLE) & (board["needs"] == "gpu")
    if about_a_gpu.any() and not on_gpu:
        steps.append(
            f"{about_a_gpu.sum()} about a GPU: `make course` tests them where there is one."
        )
    return steps or ["Everything is tested here. Change a recipe, and predict what it does."]


def options_at_hand(here: Runs, reference: Runs, batch: int = 1) -> tuple[str, pd.DataFrame]:
    """(whose numbers, methods to choose from): those on record here, else the H200's, else the
    article's own.
    """
    for whose, runs in (("the runs of section 1", here), ("our reference's runs", reference)):
        mine = runs.select(lab06_advisor.LAB)
        try:
            return f"{whose} ({_machines(mine)})", lab06_advisor.options_from(runs, batch)
        except ValueError:  # no method has time and memory on record: a CPU, or lab 06 has not run
            continue
    return "the article's numbers, at batch 1", lab06_advisor.published()


def advice(options: pd.DataFrame, memory_gb: float, steps: int, tolerance: float | None) -> str:
    """The advisor's tables, or why nothing suits and what would."""
    try:
        answer = lab06_advisor.advise(options, memory_gb, steps, tolerance)
        return as_table(lab06_advisor.shown(answer))
    except ValueError as reason:
        return str(reason)
