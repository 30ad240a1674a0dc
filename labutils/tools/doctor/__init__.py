"""`labutils doctor`: what this machine can and can't do in the course, said before a lab finds out.

`examine()` looks and judges; each finding says what was found, why it matters and what to type.
Nothing here ever raises: a check that fails is a finding too.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from labutils.tools.doctor.checks import CHECKS, FAIL, INFO, OK, WARN, Finding
from labutils.tools.doctor.facts import Facts, collect, this_machine
from labutils.tools.doctor.seats import all_ready, read_seats, render_seats

__all__ = [
    "FAIL",
    "INFO",
    "OK",
    "WARN",
    "Facts",
    "Finding",
    "collect",
    "examine",
    "main",
    "render",
    "this_machine",
]


def examine(facts: Facts | None = None) -> list[Finding]:
    """All findings about `facts` (this machine's, looked at once in a process, where none are
    given).
    """
    facts = this_machine() if facts is None else facts
    findings: list[Finding] = []
    for name, check, needed in CHECKS:
        findings += _checked(name, check, needed, facts)
    return findings


def _checked(name, check, needed, facts: Facts) -> list[Finding]:
    """The check's findings; where it could not look, or fails itself, a finding that says so."""
    unknown = [facts.problems[collector] for collector in needed if collector in facts.problems]
    if unknown:
        why = "The other findings stand; this one is unknown."
        return [
            Finding(
                name,
                WARN,
                f"could not be examined: {unknown[0]}",
                why,
                "labutils doctor --json    (to report it)",
            )
        ]
    try:
        return list(check(facts))
    except Exception as error:  # a finding that can't be made must not cost the person the others
        found = f"the check failed: {type(error).__name__}: {error}"
        return [
            Finding(
                name,
                WARN,
                found,
                "This is a fault of the doctor.",
                "labutils doctor --json    (to report it)",
            )
        ]


def render(findings: Iterable[Finding], width: int = 110) -> str:
    """The findings as a table of text, with reasons and commands where needed, and a last line that
    sums up.
    """
    findings = list(findings)
    column = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        head = f"{finding.status:<4}  {finding.check:<{column}}  "
        lines += textwrap.wrap(
            finding.found,
            width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        ) or [head.rstrip()]
        if finding.status != OK and finding.why:
            indent = " " * len(head)
            lines += textwrap.wrap(
                finding.why, width, initial_indent=indent, subsequent_indent=indent
            )
        if finding.status != OK and finding.do:
            lines.append(
                " " * len(head) + "-> " + finding.do
            )  # a command is never broken over lines
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Iterable[Finding]) -> str:
    """One sentence: ready, ready with limits, or not."""
    counts = {
        status: sum(finding.status == status for finding in findings)
        for status in (OK, INFO, WARN, FAIL)
    }
    if counts[FAIL]:
        must = f"{counts[FAIL]} thing(s) must be put right before the labs run here (fail)"
        return must + (
            f", {counts[WARN]} more would be better put right (warn)." if counts[WARN] else "."
        )
    if counts[WARN]:
        return f"The labs run here; {counts[WARN]} thing(s) would be better put right (warn)."
    return "Everything the labs need is here."


def main(json: bool = False) -> int:
    """Print the findings, as JSON on request. Returns 0 where nothing fails, 1 otherwise."""
    findings = examine()
    if json:
        print(
            json_format.dumps(
                [dataclasses.asdict(finding) for finding in findings], indent=2, ensure_ascii=False
            )
        )
    else:
        print(render(findings))
    return int(any(finding.status == FAIL for finding in findings))


def show_seats(folder: Path) -> int:
    """Print what the doctor said on each seat of a room. Returns 0 where nothing fails on any, 1
    otherwise, 2 for a folder without findings."""
    try:
        seats = read_seats(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(render_seats(seats))
    return int(not all_ready(seats))
