"""A diagnosis in words: where the step's time goes, what to change first and why, and what isn't
worth changing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from labutils.tools.diagnose import WORTH, Diagnosis

WIDTH = 110
BAR = 24
SMALL = 0.005
"""Shares of the step below this are gathered in one row."""


def text(diagnosis: Diagnosis) -> str:
    """What `labutils diagnose` prints."""
    parts = _head(diagnosis), _budget(diagnosis), _fixes(diagnosis), _small_fixes(diagnosis)
    notes = ("\n".join(_wrapped(f"Note: {note}", "", "  ")) for note in diagnosis.evidence.notes)
    return "\n\n".join([*filter(None, map("\n".join, parts)), *notes])


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    e = diagnosis.evidence
    passes = f", {e.accumulation:.3g} backward passes in it" if e.accumulation >= 1.5 else ""
    on = "a GPU" if e.on_gpu else f"a CPU, {e.threads} thread{'s' if e.threads != 1 else ''}"
    source = e.source[0].upper() + e.source[1:]
    yield f"{source}: {e.step_ms:.2f} ms an optimizer step{passes}, on {on}."


def _budget(diagnosis: Diagnosis) -> Iterator[str]:
    step_ms, budget = diagnosis.evidence.step_ms, diagnosis.budget
    large = {name: ms for name, ms in budget.items() if ms >= SMALL * step_ms}
    rest = sum(budget.values()) - sum(large.values())
    yield "Where it goes"
    for name, ms in (large | ({"smaller ones": rest} if rest > 0 else {})).items():
        share = ms / step_ms
        yield f"  {name:<30} {ms:9.2f} ms {share:5.0%}  {'#' * round(BAR * share)}".rstrip()


def _fixes(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.worth_it:
        yield f"No fix is predicted to save {WORTH:.0%} or more of the step."
        return
    yield "What to change first (each gain by itself; they don't add up)"
    for place, fix in enumerate(diagnosis.worth_it, 1):
        yield f"  {place}. {fix.name}: saves {fix.gain:.0%} of the time per {fix.per}, as predicted"
        yield from _wrapped(fix.reason)
        yield from _wrapped(f"-> {fix.do}")
        if fix.sources:
            yield from _wrapped(f"at {', '.join(fix.sources)}")


def _small_fixes(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.not_worth_it:
        yield f"Looked at, and predicted to save less than {WORTH:.0%}"
    for fix in diagnosis.not_worth_it:
        places = f" ({', '.join(fix.sources)})" if fix.sources else ""
        yield from _wrapped(f"{fix.name} ({fix.gain:.1%}): {fix.reason}{places}", "  ", "    ")


def _wrapped(words: str, first: str = "     ", others: str = "     ") -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False
    )


def record(diagnosis: Diagnosis, exit_code: int | None = None) -> dict[str, Any]:
    """The diagnosis for machines."""
    e = diagnosis.evidence
    facts = {
        "source": e.source,
        "device": e.device,
        "step_ms": e.step_ms,
        "accumulation": e.accumulation,
        "budget_ms": dict(diagnosis.budget),
        "fixes": [asdict(fix) for fix in diagnosis.fixes],
        "notes": list(e.notes),
    }
    return facts if exit_code is None else facts | {"exit_code": exit_code}
