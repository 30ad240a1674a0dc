"""Verdicts: what a machine's runs say about a published claim.

A claim (`labutils.results.claims`) names its judge, one of the small functions of `counts`,
`failures`, `shares` and `times`; each looks at the runs the claim needs (`evidence`) and returns a
verdict, what was measured as text, and why. Four verdicts are possible:

- `confirmed`: the statement holds here, by more than the spread of the measurement;
- `refuted`: it doesn't hold here;
- `inconclusive`: the noise is larger than the effect;
- `not testable here`: this machine, or the runs on record, can't answer; the reason says what
  would.

Effects are ratios of medians with an interval: the best and the worst ratio that the p10-p90 ranges
of the two runs allow. Where both runs took the same batches in the same order, whose lengths may
differ by more than the effect, each step is compared with its counterpart, and the ratios have a
median and a p10-p90 range of their own. Absolute times of another machine are printed beside ours
and judged by order of magnitude only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from labutils.results import claims
from labutils.results.claims import Claim
from labutils.results.judges import counts, failures, shares, times
from labutils.results.judges.evidence import CONFIRMED, Evidence, Finding, INCONCLUSIVE, NOT_TESTABLE, NotTestable, REFUTED, Runs, VERDICTS

__all__ = [
    "ANY_SCALE",
    "CONFIRMED",
    "INCONCLUSIVE",
    "JUDGES",
    "NOT_TESTABLE",
    "REFUTED",
    "UNDISTURBED",
    "VERDICTS",
    "Evidence",
    "Finding",
    "Judgement",
    "NotTestable",
    "Runs",
    "as_markdown",
    "assess",
    "judge",
]


@dataclass(frozen=True)
class Judgement:
    """One claim, its published value, and what the reference machine and this one say about it.

    `reference` and `here` are measured values as text, "" where there is none; `why` explains the
    verdict here, `reference_why` the reference's.
    """

    claim: Claim
    published: str
    reference: str
    here: str
    verdict: str
    reference_verdict: str
    why: str
    reference_why: str = ""


def judge(ids: str | Iterable[str] | None, here: Runs, reference: Runs) -> list[Judgement]:
    """Judge the claims of these `ids` (one, several, or None for all) by the runs of this machine
    and of the reference.

    Raises `ValueError` for an id that no article has. A missing or broken run never raises: it
    makes the claim `not testable here`, with what to run.
    """
    chosen = [ids] if isinstance(ids, str) else claims.claims() if ids is None else ids
    return [_judgement(claims.claim(id), here, reference) for id in chosen]


def assess(claim: Claim, runs: Runs) -> Finding:
    """What one set of runs says about one claim."""
    try:
        evidence = Evidence(claim, runs)
        finding = JUDGES[claim.judge](claim, evidence)
    except NotTestable as reason:
        return Finding(NOT_TESTABLE, "", str(reason))
    if claim.predicted:
        finding = finding._replace(shown=f"{finding.shown} predicted")
    if evidence.beside and claim.judge not in UNDISTURBED and finding.verdict in (CONFIRMED, REFUTED):
        finding = finding._replace(verdict=INCONCLUSIVE, why=f"{finding.why} {evidence.disturbance}")
    if evidence.scale == "full" or claim.judge in ANY_SCALE:
        return finding
    return finding._replace(why=f"{finding.why} (At scale {evidence.scale}, not the article's own size.)")


def _judgement(claim: Claim, here: Runs, reference: Runs) -> Judgement:
    ours, theirs = assess(claim, here), assess(claim, reference)
    return Judgement(
        claim=claim,
        published=claim.published_text,
        reference=theirs.shown,
        here=ours.shown,
        verdict=ours.verdict,
        reference_verdict=theirs.verdict,
        why=ours.why,
        reference_why=theirs.why,
    )


JUDGES: dict[str, Callable[[Claim, Evidence], Finding]] = {
    judge.__name__: judge for module in (counts, failures, shares, times) for judge in module.JUDGES
}

ANY_SCALE = {"becomes", "count", "fails_on_capability", "lists", "predicts", "unchanged", "warns_then_fails", "within"}
"""Judges of what doesn't depend on the model's size."""

UNDISTURBED = {
    *("all_present", "becomes", "brings_back", "count", "fails_on_capability", "lists", "loss_moves", "more_with"),
    *("occurs", "unchanged", "warns_then_fails", "within"),
}
"""Judges of what is counted or computed, and the same however busy the machine is; the rest is
about time or memory.
"""


def as_markdown(judgements: Iterable[Judgement]) -> str:
    """A table for a notebook: claim | published | H200 | here | verdict, each claim followed by
    why.

    Why several claims can't be tested here is said once, below the table.
    """
    judgements = list(judgements)
    reasons = Counter(j.why for j in judgements if j.verdict == NOT_TESTABLE)
    marks = {why: f"({n})" for n, why in enumerate((why for why, count in reasons.items() if count > 1), 1)}
    rows = ["| claim | published | H200 | here | verdict |", "|:--|:--|:--|:--|:--|"]
    for j in judgements:
        what = f"**{j.claim.id}** {j.claim.statement}"
        reference = f"{j.reference or '–'} ({j.reference_verdict})" if j.reference else "–"
        why = f" {marks[j.why]}" if j.verdict == NOT_TESTABLE and j.why in marks else f": {j.why}"
        verdict = f"**{j.verdict}**{why}" + (f" *{j.claim.note}*" if j.claim.note and j.claim.runs else "")
        rows.append("| " + " | ".join(map(_cell, (what, j.published, reference, j.here or "–", verdict))) + " |")
    return "\n\n".join(["\n".join(rows), *(f"{mark} {why}" for why, mark in marks.items())])


def _cell(text: str) -> str:
    """Text that can't break out of its table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
