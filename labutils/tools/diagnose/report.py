"""A diagnosis in words: where the step's time goes, what to change first and why, and what isn't
worth changing. `record` has all of it as plain data; the templates text.j2 and page.j2 show it.
"""

from __future__ import annotations

import base64
import io
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from labutils.tools.diagnose import WORTH, Diagnosis
from labutils.tools.diagnose.edits import edits
from labutils.tools.pages import MARKDOWN, as_html, literal

WIDTH = 80
SMALL = 0.005
"""Shares of the step below this are gathered in one row."""
FACTS = ("name", "gain", "per", "reason", "do", "sources", "changes")


def record(diagnosis: Diagnosis, exit_code: int | None = None) -> dict[str, Any]:
    """The diagnosis for machines."""
    e = diagnosis.evidence
    facts = {name: getattr(e, name) for name in ("source", "device", "step_ms", "accumulation")}
    facts |= {"budget_ms": dict(e.budget), "notes": list(e.notes), "threads": e.threads}
    facts["fixes"] = [_row(diagnosis, fix) for fix in diagnosis.fixes]
    facts["together"] = [_row(diagnosis, fix) for fix in (diagnosis.together,) if fix]
    return facts if exit_code is None else facts | {"exit_code": exit_code}


def _row(diagnosis: Diagnosis, fix: Any) -> dict[str, Any]:
    row = {name: getattr(fix, name) for name in FACTS} | {"worth_it": fix.gain >= WORTH}
    row["edits"] = [edit._asdict() for edit in edits(fix, diagnosis.evidence.files)]
    tried = diagnosis.tries.get(fix.name)
    saves = fix.gain if tried is None or tried.measured is None else tried.measured * tried.holds
    return row | {"tried": tried and asdict(tried), "saves": saves}


def text(diagnosis: Diagnosis) -> str:
    """What `labutils diagnose` prints."""
    return _filled("text.j2", diagnosis)


def page(diagnosis: Diagnosis) -> str:
    """One page of HTML that loads nothing."""
    return as_html(_filled("page.j2", diagnosis), MARKDOWN, "Where a step's time goes", "diagnosis")


def _filled(template: str, diagnosis: Diagnosis) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    words = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    words.filters |= {"wrap": _wrapped, "plain": literal}
    words.globals |= {"picture": lambda what: _picture(diagnosis, what), "worth": WORTH}
    return words.get_template(template).render(record(diagnosis), rows=_rows(diagnosis)).strip()


def _rows(diagnosis: Diagnosis) -> dict[str, float]:
    """Share -> milliseconds, small ones together."""
    e = diagnosis.evidence
    large = {name: ms for name, ms in e.budget.items() if ms >= SMALL * e.step_ms}
    rest = sum(e.budget.values()) - sum(large.values())
    return large | ({"smaller ones": rest} if rest > 0 else {})


def _wrapped(words: str, first: str = "     ", others: str = "     ") -> str:
    options = {"initial_indent": first, "subsequent_indent": others, "break_long_words": False}
    return "\n".join(textwrap.wrap(words, WIDTH, break_on_hyphens=False, **options))


def _picture(diagnosis: Diagnosis, what: str) -> str:
    """A picture as an address that holds it: the "timeline", or the "shares"."""
    from matplotlib.figure import Figure

    from labutils.course import plots

    ax = Figure(figsize=(9, 2.6), layout="constrained").subplots()
    if what == "timeline":
        plots.timeline(ax, diagnosis.evidence.timeline)
    else:
        plots.breakdown(ax, {"a step": _rows(diagnosis)})
    file = io.BytesIO()
    ax.figure.savefig(file, dpi=150, bbox_inches="tight")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
