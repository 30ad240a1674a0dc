"""What the articles claim, as plain data: every published statement with its number, and how the
course tests it.

Floor 0: this package knows nothing of torch and nothing of how a verdict is reached. A claim names
its judge; the judges themselves are in `labutils.results.judges`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREDICTED = "Predicted, not measured"
"""How the note of a claim begins that is judged by a prediction, as of a card that isn't here."""


@dataclass(frozen=True)
class Article:
    """A published article: where its numbers come from."""

    key: str
    author: str
    publisher: str
    language: str
    subject: str
    gpu: str


@dataclass(frozen=True)
class Claim:
    """One published statement and its test.

    `published` holds the article's numbers in `unit`, in the order in which the statement names
    them; `says` replaces their usual rendering where a word is what was published. `runs` are the
    names of the runs of `lab` that the judge needs, `how` are the judge's named settings (metric,
    run names, limits), `tolerance` its slack, whose meaning the judge documents. `needs` is "any"
    machine or one with a "gpu". `note` says what the test can't show. Without `runs` nothing can
    test it, and the note says why.
    """

    id: str
    article: str
    section: str
    statement: str
    lab: str
    runs: tuple[str, ...]
    judge: str
    published: tuple[float, ...] = ()
    unit: str = ""
    says: str = ""
    how: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    needs: str = "gpu"
    note: str = ""

    @property
    def predicted(self) -> bool:
        """Whether it is judged by a prediction and not by a measurement: what is shown of it says
        so.
        """
        return self.note.startswith(PREDICTED)

    @property
    def published_text(self) -> str:
        """What was published, for a table: "141 → 102 ms"."""
        if self.says:
            return self.says
        joiner = " → " if len(self.published) == 2 else ", "
        return (joiner.join(map(magnitude, self.published)) + f" {self.unit}").strip()


def magnitude(value: float) -> str:
    """A number as an article prints it: 16.7 M, 65 k, 290."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g} k"
    return f"{value:g}"


def articles() -> dict[str, Article]:
    """Key -> article."""
    from labutils.results.claims import a1, a2, a3, a4

    return {article.key: article for article in (a1.ARTICLE, a2.ARTICLE, a3.ARTICLE, a4.ARTICLE)}


def claims(article: str | None = None, lab: str | None = None) -> dict[str, Claim]:
    """Id -> claim in the order of the articles, all of them or those of one `article` ("A1") or one
    `lab` ("03").
    """
    from labutils.results.claims import a1, a2, a3, a4

    every = a1.CLAIMS + a2.CLAIMS + a3.CLAIMS + a4.CLAIMS
    return {c.id: c for c in every if article in (None, c.article) and lab in (None, c.lab)}


def claim(id: str) -> Claim:
    """The claim of that id. Raises `ValueError` that names the nearest ids where there is none."""
    known = claims()
    if id not in known:
        near = difflib.get_close_matches(id, known, n=3, cutoff=0.4) or sorted(known)[:3]
        raise ValueError(f"{id!r} is not a claim of the course. Did you mean: {', '.join(near)}?")
    return known[id]
