"""What lab 11 asks of all results together: which claims, how far off, what would be needed, what
to do next.

It works with whatever there is: no run at all, runs of several machines, files edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labutils.labs import lab06_advisor
from labutils.labs.lab06_advisor import Option
from labutils.recipe import is_number
from labutils.results import claims as articles
from labutils.results.judges import (
    INCONCLUSIVE,
    NOT_TESTABLE,
    REFUTED,
    VERDICTS,
    Judgement,
)
from labutils.results.records import Run

LAB = "11"
EVERYTHING = "all"

Runs = Mapping[tuple[str, str], Run]


def chosen(
    judgements: Iterable[Judgement],
    article: str = EVERYTHING,
    lab: str = EVERYTHING,
    verdict: str = EVERYTHING,
) -> list[Judgement]:
    """The judgements of one `article` ("A2"), `lab` ("05") and `verdict` (here). Raises
    `ValueError` for others.
    """
    for word, (name, known) in zip((article, lab, verdict), filters().items(), strict=True):
        if word not in known:
            raise ValueError(
                f"There is no {name} {word!r} to choose by. Choose one of: {', '.join(known)}."
            )
    return [
        j
        for j in judgements
        if article in (EVERYTHING, j.claim.article)
        and lab in (EVERYTHING, j.claim.lab)
        and verdict in (EVERYTHING, j.verdict)
    ]


def filters() -> dict[str, list[str]]:
    """What one can choose by -> its values, "all" first."""
    every = articles.load_claims().values()
    return {
        "article": [EVERYTHING, *sorted({claim.article for claim in every})],
        "lab": [EVERYTHING, *sorted({claim.lab for claim in every})],
        "verdict": [EVERYTHING, *VERDICTS],
    }


def words(judgements: Sequence[Judgement]) -> list[str]:
    """The verdicts that occur, in their order."""
    given = {word for j in judgements for word in (j.verdict, j.reference_verdict)}
    return [word for word in VERDICTS if word in given]


def tally(judgements: Sequence[Judgement]) -> list[tuple[Any, ...]]:
    """Rows for a table: an article, its claims, and how many of them have each of the verdicts that
    occur, on the H200 and here.
    """
    rows = []
    for key in dict.fromkeys(j.claim.article for j in judgements):
        mine = [j for j in judgements if j.claim.article == key]
        counts = [
            f"{sum(j.reference_verdict == verdict for j in mine)} / "
            f"{sum(j.verdict == verdict for j in mine)}"
            for verdict in words(judgements)
        ]
        rows.append((key, len(mine), *counts))
    return rows


def on_record(runs: Runs, done: Sequence[str], titles: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """Rows for a table: each lab of the course (`titles`: number -> title), what there is of it,
    and from where.
    """
    rows = []
    for number, title in titles.items():
        mine = [run for (lab, _), run in runs.items() if lab == number]
        state = "run to its end" if number in done else "begun" if mine else "not run"
        machines = {
            str(run.machine.get("gpu") or run.machine.get("cpu") or "unknown") for run in mine
        }
        scales = {run.scale for run in mine if run.scale}
        latest = max((str(run.at) for run in mine), default="")[:10]
        where = (", ".join(sorted(found)) or None for found in (scales, machines))
        rows.append((title, state, len(mine) or None, *where, latest or None))
    return rows


# --------------------------------------------------------------------------------------- how far


def off_by(judgement: Judgement, where: str = "here") -> float | None:
    """The factor between the published effect and the measured one (`where`: "here" or
    "reference"), 1 or more.

    From a published range it is counted from the nearer end. None where there is no number on both
    sides, or where the two are no quantities of one kind: a message, an order.
    """
    judged = judgement if where == "here" else judgement.theirs
    published = _published_ratios(judgement.claim)
    if judged is None or not judged.effects or published is None:
        return None
    low, high = published
    return max(max(low / e.value, e.value / high, 1.0) for e in judged.effects.values())


def _published_ratios(claim: articles.Claim) -> tuple[float, float] | None:
    """The least and the most ratio, changed over base, that the article gives; None for none."""
    numbers, how = claim.published, claim.how
    if claim.judge != "ratio" or how["form"] == "steps" or len(numbers) > 2:
        return None
    if how["form"] != "percent":
        return numbers[1] / numbers[0], numbers[1] / numbers[0]
    sign = 1 if how["direction"] == "more" else -1
    ratios = [1 + sign * percent / 100 for percent in numbers]
    return min(ratios), max(ratios)


def surprises(
    judgements: Iterable[Judgement], where: str = "here"
) -> list[tuple[float | None, Judgement]]:
    """(factor, judgement) of what is refuted here or by the "reference", the farthest off first."""
    verdict = "verdict" if where == "here" else "reference_verdict"
    refuted = [(off_by(j, where), j) for j in judgements if getattr(j, verdict) == REFUTED]
    return sorted(refuted, key=lambda pair: -(pair[0] or 0))


def disagreements(judgements: Iterable[Judgement]) -> list[Judgement]:
    """The claims that the H200 and this machine both could test, and of which they say different
    things.
    """
    return [
        j
        for j in judgements
        if NOT_TESTABLE not in (j.verdict, j.reference_verdict) and j.verdict != j.reference_verdict
    ]


# ------------------------------------------------------------------------------------------ next


def needs(judgements: Iterable[Judgement]) -> list[tuple[str, list[str]]]:
    """(what is needed, ids of the claims) of what is not testable here, what would settle most of
    them first.
    """
    reasons: dict[str, list[str]] = {}
    for j in judgements:
        if j.verdict == NOT_TESTABLE:
            reasons.setdefault(j.why, []).append(j.claim.id)
    return sorted(reasons.items(), key=lambda pair: -len(pair[1]))


def next_steps(
    judgements: Sequence[Judgement], done: Sequence[str], titles: Mapping[str, str]
) -> list[str]:
    """What to do next, in sentences with commands: labs to run, noise to get rid of, the largest
    surprise to study.
    """
    steps = []
    if missing := [number for number in titles if number not in done and number != LAB]:
        claims = sum(j.claim.lab in missing and bool(j.claim.runs) for j in judgements)
        steps.append(
            f"Run the labs that have not ended here: `labutils run {' '.join(missing)}`. They test "
            f"up to {claims} of "
            f"the {len(judgements)} claims."
        )
    if noisy := sorted({j.claim.lab for j in judgements if j.verdict == INCONCLUSIVE}):
        count = sum(j.verdict == INCONCLUSIVE for j in judgements)
        many = "1 claim is" if count == 1 else f"{count} claims are"
        steps.append(
            f"{many} inconclusive: run again with nothing else on the machine: `labutils run "
            f"{' '.join(noisy)} --force`"
        )
    if found := [pair for pair in surprises(judgements) if pair[0]]:
        factor, j = found[0]
        steps.append(
            f"Find out why *{j.claim.id}* is {factor:.3g} times off here (published {j.published}, "
            f"found {j.here}): "
            f"lab {j.claim.lab}, section *{j.claim.section}* of the article."
        )
    return steps or ["Everything is tested here. Change a recipe, and predict what it does."]


# ----------------------------------------------------------------------------------------- advice


def options_at_hand(here: Runs, reference: Runs, batch: int = 1) -> tuple[str, list[Option]]:
    """(whose numbers, methods to choose from): those on record here, else the H200's, else the
    article's own.
    """
    for whose, runs in (("the runs of section 1", here), ("our reference's runs", reference)):
        try:
            return f"{whose} ({_machine(runs)})", lab06_advisor.options_from(runs, batch)
        except ValueError:  # no method has time and memory on record: a CPU, or lab 06 has not run
            continue
    return "the article's numbers, at batch 1", lab06_advisor.published()


def _machine(runs: Runs) -> str:
    """The machines and scales of lab 06's runs."""
    mine = [run for (lab, _), run in runs.items() if lab == lab06_advisor.LAB]
    machines = {str(run.machine.get("gpu") or run.machine.get("cpu") or "unknown") for run in mine}
    return ", ".join(
        [
            *sorted(machines),
            *(f"scale {scale}" for scale in sorted({run.scale for run in mine} - {""})),
        ]
    )


def advice(options: Sequence[Option], memory_gb: float, steps: int, tolerance: float | None) -> str:
    """The advisor's tables, or why nothing suits and what would."""
    try:
        return lab06_advisor.advise(options, memory_gb, steps, tolerance).as_markdown()
    except ValueError as reason:
        return str(reason)


def card_gb(machine: Mapping[str, Any], asked: float, otherwise: float = 24.0) -> float:
    """The memory to advise for, in GB: what was `asked` for, else this machine's GPU's, else that
    of a common card.
    """
    found = asked or machine.get("gpu_memory_gb")
    return float(found) if is_number(found) and found > 0 else otherwise
