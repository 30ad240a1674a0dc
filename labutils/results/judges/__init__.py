"""Verdicts: what the runs on record say about a published claim.

It may import claims and records. A judge returns numbers with an interval, and the sentence of a
verdict is made of them. Hosts are judged one by one, because the host paces many steps: the verdict
is what all of them say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labutils.results.claims import Claim, load_claims
from labutils.results.claims import claim as claim_of
from labutils.results.judges.effects import Effect, NotTestable, effect, time_effect
from labutils.results.judges.rules import (
    CONFIRMED,
    DIFFERS,
    INCONCLUSIVE,
    JUDGES,
    NOT_TESTABLE,
    REFUTED,
    TOLD,
    VERDICTS,
    Finding,
    published_ratios,
)
from labutils.results.records import Run, Runs

__all__ = [
    "CONFIRMED",
    "DIFFERS",
    "Effect",
    "INCONCLUSIVE",
    "Judgement",
    "NOT_TESTABLE",
    "NotTestable",
    "REFUTED",
    "TOLD",
    "VERDICTS",
    "as_markdown",
    "effect",
    "judge",
    "judge_all",
    "published_ratios",
    "time_effect",
]


@dataclass(frozen=True)
class Judgement:
    """A claim and what runs say about it: those of this machine, and those of the reference.

    `here` is what was measured, as text, "" where nothing was; `effects` are the numbers behind it,
    by label; `why` is the reason in a sentence. `theirs` is the reference's judgement.
    """

    claim: Claim
    verdict: str
    here: str
    why: str
    effects: Mapping[str, Effect] = field(default_factory=dict)
    theirs: Judgement | None = None

    @property
    def effect(self) -> Effect | None:
        """The first of the effects."""
        return next(iter(self.effects.values()), None)

    @property
    def published(self) -> str:
        return self.claim.published_text

    @property
    def reference(self) -> str:
        return self.theirs.here if self.theirs else ""

    @property
    def reference_verdict(self) -> str:
        return self.theirs.verdict if self.theirs else NOT_TESTABLE

    @property
    def reference_why(self) -> str:
        return self.theirs.why if self.theirs else ""


def judge(claim: Claim, runs: Runs, reference: Runs | None = None) -> Judgement:
    """Judge a claim by runs, and by those of the reference. A missing or broken run never raises:
    it makes the claim not testable here, and `why` says what to run.
    """
    theirs = None if reference is None else judge(claim, reference)
    if claim.kind == "setting":
        return Judgement(claim, TOLD, "", claim.note, theirs=theirs)
    if claim.reason:
        return Judgement(claim, NOT_TESTABLE, "", claim.reason, theirs=theirs)
    hosts: dict[Any, list[Run]] = {}
    for run in runs:
        if run.lab == claim.lab:
            hosts.setdefault(run.host, []).append(run)
    found = [_on_host(claim, Runs(own)) for own in hosts.values()]
    answers = [one for one in found if one.verdict != NOT_TESTABLE] or found
    if not answers:
        answers = [Finding(NOT_TESTABLE, "", f"No run on record. Type: labutils run {claim.lab}")]
    last = answers[-1]
    if len({one.verdict for one in answers}) > 1:
        here = " | ".join(f"{one.here}: {one.verdict}" for one in answers)
        last = Finding(DIFFERS, here, f"{len(answers)} hosts were measured.", last.effects)
    return Judgement(claim, last.verdict, last.here, last.why, last.effects, theirs)


def _on_host(claim: Claim, runs: Runs) -> Finding:
    """What the runs of one host say."""
    named = [
        tags
        for role in claim.runs.values()
        for tags in (role if isinstance(role, list) else [role])
    ]
    own = [run for tags in named for run in runs.select(claim.lab, **tags)]
    try:
        if claim.needs == "gpu" and not any(run.machine.get("gpu") for run in own or runs):
            raise NotTestable("It is a statement about a GPU, and there was none.")
        if claim.weights and any(run.weights != claim.weights for run in own):
            raise NotTestable("Random weights can't answer: it takes the pretrained ones.")
        finding = JUDGES[claim.judge](claim, runs)
    except NotTestable as reason:
        return Finding(NOT_TESTABLE, "", str(reason))
    timed = any(not one.exact for one in finding.effects.values())
    if timed and any(run.beside for run in own):
        why = f"Other labs ran beside it. Alone: labutils run {claim.lab} --force"
        return replace(finding, verdict=INCONCLUSIVE, why=why)
    scales = sorted({run.scale for run in own} - {"full"})
    if timed and scales:
        finding = replace(finding, why=f"{finding.why} At scale {', '.join(scales)}.".strip())
    return finding


def judge_all(
    ids: str | Iterable[str] | None, runs: Runs, reference: Runs | None = None
) -> list[Judgement]:
    """Judge the claims of these `ids`: one, several, or None for all. Raises `ValueError` for an id
    that no article has.
    """
    chosen = [ids] if isinstance(ids, str) else load_claims() if ids is None else ids
    return [judge(claim_of(id), runs, reference) for id in chosen]


def as_markdown(judgements: Iterable[Judgement]) -> str:
    """A table for a notebook: claim | published | H200 | here | verdict and why.

    Why several claims can't be tested here is said once, below the table.
    """
    judgements = list(judgements)
    reasons = Counter(j.why for j in judgements if j.verdict == NOT_TESTABLE)
    marks = {
        why: f"({n})"
        for n, why in enumerate((why for why, count in reasons.items() if count > 1), 1)
    }
    rows = ["| claim | published | H200 | here | verdict |", "|:--|:--|:--|:--|:--|"]
    for j in judgements:
        h200 = f"{j.reference} ({j.reference_verdict})" if j.reference else "–"
        why = f" {marks[j.why]}" if j.why in marks else f": {j.why}" if j.why else ""
        note = f" *{j.claim.note}*" if j.claim.note and j.claim.judge else ""
        cells = (
            *(f"**{j.claim.id}** {j.claim.statement}", j.published, h200),
            *(j.here or "–", f"**{j.verdict}**{why}{note}"),
        )
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(["\n".join(rows), *(f"{mark} {why}" for why, mark in marks.items())])
