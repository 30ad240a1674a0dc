"""A room of machines at a glance: what `labutils doctor --json` said on each seat, as one table.

labutils doctor --json > seats/$(hostname).json      on each seat, into a folder that all share
labutils doctor --seats seats                        on one of them
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from labutils.tools.doctor.checks import FAIL, WARN, Finding

Seats = Mapping[str, list[Finding] | str]
"""Seat -> its findings; a sentence where its file can't be read."""


def read_seats(folder: Path) -> dict[str, list[Finding] | str]:
    """The findings in `folder`, named like their files. Raises `ValueError` where there is no file
    of findings.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise ValueError(
            f"There is no .json file in {folder}. On each seat: labutils doctor --json > "
            f"{folder}/$(hostname).json"
        )
    return {path.stem: _read(path) for path in paths}


def _read(path: Path) -> list[Finding] | str:
    try:
        findings = [Finding(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:  # cut off, empty, no findings
        return f"{path.name} holds no findings ({type(error).__name__}): run the doctor there again"
    return findings or f"{path.name} holds no findings: run the doctor there again"


def render_seats(seats: Seats, width: int = 110) -> str:
    """A line a seat (ready or not, its GPU), what differs from seat to seat with its cure, and the
    count.
    """
    column = max(len(name) for name in seats)
    lines = [
        f"{name:<{column}}  {_state(found):<7}  {_gpu(found)}" for name, found in seats.items()
    ]
    for (check, status, do), names in _troubles(seats).items():
        head = f"{status:<4}  {check}, {len(names)} of {len(seats)}: "
        lines += ["", *textwrap.wrap(head + ", ".join(names), width, subsequent_indent=" " * 6)]
        lines += ["      -> " + do] if do else []
    ready = sum(_state(found) in ("ready", "limited") for found in seats.values())
    return "\n".join([*lines, "", f"{ready} of {len(seats)} seats can run the labs."])


def all_ready(seats: Seats) -> bool:
    """Whether every seat was examined and nothing fails on any."""
    return all(_state(found) in ("ready", "limited") for found in seats.values())


def _state(found: list[Finding] | str) -> str:
    """ "ready", "limited" (warnings), "fails" or "unknown"."""
    if isinstance(found, str):
        return "unknown"
    statuses = {finding.status for finding in found}
    return "fails" if FAIL in statuses else "limited" if WARN in statuses else "ready"


def _gpu(found: list[Finding] | str) -> str:
    if isinstance(found, str):
        return found
    return next((finding.found for finding in found if finding.check == "GPU"), "not examined")


def _troubles(seats: Seats) -> dict[tuple[str, str, str], list[str]]:
    """(check, status, what to type) -> the seats it is said on: what fails first, then what most
    seats share.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, findings in seats.items():
        for finding in _bad(findings):
            found.setdefault((finding.check, finding.status, finding.do), []).append(name)
    return dict(sorted(found.items(), key=lambda item: (item[0][1] != FAIL, -len(item[1]))))


def _bad(findings: list[Finding] | str) -> Iterable[Finding]:
    return () if isinstance(findings, str) else (f for f in findings if f.status in (FAIL, WARN))
