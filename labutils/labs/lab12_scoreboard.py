"""What lab 12 asks of all results together: which claims, how far off, what to do next.

It works with whatever there is: no run at all, runs of several machines, files edited by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from labutils.course.tables import as_table
from labutils.results import judges
from labutils.results.effects import effect
from labutils.results.records import Run, Runs, summarise
from labutils.results.report import claims_table


def scoreboard(judgements: Sequence[judges.Judgement]) -> pd.DataFrame:
    """The report's table of claims, each one's kind, and the factors that this machine and the
    reference are off by."""
    return claims_table(judgements).assign(
        kind=[j.claim.kind for j in judgements],
        off_by=[off_by(j) for j in judgements],
        reference_off_by=[off_by(j.theirs) for j in judgements],
    )


ALLOWED = {"slight": (1.0, 1 + judges.SLIGHTLY), "as much": (0.0, 1 + judges.SLIGHTLY)}
"""The ratios that a word of the articles allows, as its judge reads it."""


def off_by(judgement: judges.Judgement | None) -> float:
    """The factor between the published effect and the measured one, 1 or more.

    From a published range, or a word that stands for one, it is counted from the nearer end. NaN
    where there is no ratio on both sides: a message, a count, steps.
    """
    if judgement is None or not judgement.effects:
        return math.nan
    numbers, how = judgement.claim.published, judgement.claim.how
    if judgement.claim.judge == "compare":
        ratios = ALLOWED.get(how.get("size") or how.get("direction"), ())
    elif judgement.claim.judge != "ratio" or how["form"] == "steps" or len(numbers) > 2:
        ratios = ()
    elif how["form"] == "percent":
        sign = 1 if how.get("direction") == "more" else -1
        ratios = [1 + sign * percent / 100 for percent in numbers]
    else:
        ratios = [numbers[1] / numbers[0]]
    if not ratios:
        return math.nan
    found = [one.value for one in judgement.effects.values()]
    return max(max(min(ratios) / value, value / max(ratios), 1.0) for value in found)


def chosen(board: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    """The rows whose columns have these values; "all": any."""
    for column, word in wanted.items():
        board = board if word == "all" else board[board[column] == word]
    return board


def tallies(board: pd.DataFrame) -> str:
    """For each kind of claim a table: how many an article has, and how many of them have each of
    the verdicts that occur, on our GPUs and here."""
    words = []
    for kind in ("statement", "advice", "predicted", "setting"):
        mine = board[board["kind"] == kind]
        sides = [pd.crosstab(mine["article"], mine[f"{p}verdict"]) for p in ("reference_", "")]
        found = [word for word in judges.VERDICTS if any(word in side for side in sides)]
        theirs, ours = (side.reindex(columns=found, fill_value=0).astype(str) for side in sides)
        counts = theirs + " / " + ours
        counts.insert(0, "in all", mine["article"].value_counts())
        table = as_table(counts.rename_axis("claims of").reset_index())
        words.append(f"**{kind.capitalize()}**: ours / here\n\n{table}")
    return "\n\n".join(words)


def confirmed(board: pd.DataFrame) -> tuple[int, int]:
    """How many statements the reference confirmed, and how many it could test."""
    mine = board[(board["kind"] == "statement") & board["reference"].notna()]
    return int((mine["reference_verdict"] == judges.CONFIRMED).sum()), len(mine)


def farthest_off(board: pd.DataFrame) -> pd.DataFrame:
    """The statements that the reference or this machine refuted, the farthest off first."""
    sides = board[["reference_verdict", "verdict"]] == judges.REFUTED
    off = board[["reference_off_by", "off_by"]].where(sides.to_numpy()).max(axis=1)
    found = board.assign(off=off)[sides.any(axis=1)].sort_values("off", ascending=False)
    return found.rename(columns=HEADINGS)[list(HEADINGS.values())[:6]]


def disagreements(board: pd.DataFrame) -> pd.DataFrame:
    """The claims that both decided, with different verdicts."""
    undecided = [judges.NOT_TESTABLE, judges.INCONCLUSIVE, judges.DIFFERS]
    both = board[~board[["reference_verdict", "verdict"]].isin(undecided).any(axis=1)]
    columns = ["id", "published", "reference", "reference_verdict", "here", "verdict"]
    return both.query("reference_verdict != verdict")[columns].rename(columns=HEADINGS)


HEADINGS = {
    "id": "claim",
    "statement": "statement",
    "published": "published",
    "reference": "ours",
    "here": "here",
    "off": "off by a factor of",
    "reference_verdict": "verdict there",
    "verdict": "verdict here",
}


def on_record(runs: Runs, done: Sequence[str], titles: Mapping[str, str]) -> pd.DataFrame:
    """A row for each lab of the course (`titles`: number -> title): what there is of it, and since
    when.
    """
    rows = []
    for number, title in titles.items():
        mine = runs.select(number)
        here = "run to its end" if number in done else "begun" if mine else "not run"
        scales = ", ".join(sorted({run.scale for run in mine})) or None
        newest = max((run.at for run in mine), default="")[:10] or None
        rows.append((title, here, len(mine) or None, scales, newest))
    return pd.DataFrame(rows, columns=["lab", "here", "runs", "scale", "from"])


def still_open(
    judgements: Sequence[judges.Judgement], done: Sequence[str], has_gpu: bool
) -> pd.DataFrame:
    """A row for each lab: how many of its claims this machine hasn't tested, and which of them a
    run of it here may settle. None where the lab is `done`, a card or pretrained weights are
    missing or no run can tell.
    """
    rows = []
    for j in judgements:
        if j.verdict == judges.NOT_TESTABLE:
            may = j.claim.needs == "any" or (has_gpu and j.claim.needs == "gpu")
            may = may and not (j.claim.reason or j.claim.weights) and j.claim.lab not in done
            rows.append((j.claim.lab, may, j.claim.id if may else None))
    table = pd.DataFrame(rows, columns=["lab", "may", "id"]).groupby("lab", as_index=False)
    which = {"for example": ("id", lambda ids: ", ".join(ids.dropna()[:3]))}
    counts = {"claims open": ("may", "size"), "a run here may settle": ("may", "sum")}
    return table.agg(**counts, **which).sort_values("a run here may settle", ascending=False)


def next_steps(board: pd.DataFrame, worth: Sequence[str]) -> list[str]:
    """What to do next, in sentences with commands: labs that are `worth` a run, and noise to get
    rid of."""
    noisy = board[(board["verdict"] == judges.INCONCLUSIVE) & (board["kind"] != "predicted")]
    steps = []
    if worth:
        steps.append(
            f"Run the labs that may settle something here: `labutils run {' '.join(worth)}`."
        )
    if len(noisy):
        steps.append(
            f"{len(noisy)} inconclusive: run again with nothing else on the machine: "
            f"`labutils run {' '.join(sorted(noisy['lab'].unique()))} --force`"
        )
    return steps or ["What can be tested here is. Change a recipe, and predict what it does."]


def check_rule(rule: Callable[..., str | None], machines: int = 200) -> str:
    """Whether `rule(A, again, B)` gives the verdicts of the course's own, on machines of various
    noise; those whose interval ends at a limit may differ.
    """
    dice, wrong = np.random.default_rng(0), []
    verdicts = {0: judges.INCONCLUSIVE, 1: judges.REFUTED, -1: judges.CONFIRMED}
    for _ in range(machines):
        noise = dice.choice([0.003, 0.01, 0.03])
        share = dice.choice([0.9, 0.98, 0.99, 1.0, 1.01, 1.02, 1.1])
        drift = 1 + dice.uniform(0, 0.3) * np.arange(8) / 8
        times = [ms * drift * dice.normal(1, noise, 8) for ms in (100, 100, 100 * share)]
        base, twice, other = map(as_run, times)
        found = effect(base, other, (base, twice))
        expected = verdicts[0 if found.unsteady else found.direction]
        if (given := rule(*times)) is None:
            return "Exercise 3: no answer yet. Return one of the three words."
        if given != expected:
            wrong.append(f"{found.text()} is {expected}, not {given}; noise {found.noise}")
    if len(wrong) > machines // 25:
        return f"Exercise 3: not yet. {len(wrong)} of {machines} differ, for example: {wrong[0]}."
    return f"Exercise 3: right. {machines - len(wrong)} of {machines} verdicts are the course's."


def as_run(ms: Sequence[float]) -> Run:
    """A run that took `ms` in each of its rounds."""
    samples = {"step_ms": [*ms], "round": [*range(len(ms))]}
    return Run("12", "", metrics={"step_ms": summarise(ms)}, samples=samples)
