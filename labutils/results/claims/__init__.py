"""What the four articles claim: one YAML file an article. A test holds them to schema.json.

It may import nothing of the package.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Tags = dict[str, Any]


@dataclass(frozen=True)
class Article:
    """A published article: where its numbers come from, and what of it no claim can test."""

    key: str
    title: str
    author: str
    publisher: str
    url: str
    date: str
    language: str
    subject: str
    gpu: str
    untested: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Claim:
    """One published statement and its test.

    A statement has a number or a direction, advice promises neither, a setting is told and not
    judged, and a predicted claim is held against a model: its `kind`.
    `published` holds the article's numbers in `unit`, in the order of the statement; `says`
    replaces how they are written where a word was published. `runs` gives the tags of the run that
    has each role. `how` holds the judge's parameters. `needs` is a "gpu", "any" machine, or a
    card's compute capability; `weights` is "hub" where random weights can't answer. A claim with a
    `reason` is not testable at all, or told.
    """

    id: str
    article: str
    section: str
    kind: str
    statement: str
    lab: str
    judge: str = ""
    runs: Mapping[str, Tags] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    published: Sequence[float] = ()
    unit: str = ""
    says: str = ""
    needs: str = "gpu"
    weights: str = ""
    note: str = ""
    reason: str = ""

    @property
    def predicted(self) -> bool:
        """Whether a model answers, and no measurement."""
        return self.kind == "predicted"

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
    return f"{value / 1e3:g} k" if abs(value) >= 1e4 else f"{value:g}"


def articles() -> dict[str, Article]:
    """Key -> article."""
    return {article.key: article for article, _ in map(_load, _files())}


def load_claims() -> dict[str, Claim]:
    """Id -> claim in the order of the articles."""
    return {claim.id: claim for path in _files() for claim in _load(path)[1]}


def claim(id: str) -> Claim:
    """The claim of that id. Raises `ValueError` that names the nearest ids where there is none."""
    known = load_claims()
    if id not in known:
        near = difflib.get_close_matches(id, known, n=3, cutoff=0.4) or sorted(known)[:3]
        raise ValueError(f"{id!r} is not a claim of the course. Did you mean: {', '.join(near)}?")
    return known[id]


def _files() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.yaml"))


@functools.cache
def _load(path: Path) -> tuple[Article, tuple[Claim, ...]]:
    """The article of a file and its claims."""
    # Where PyYAML has its parser in C, that takes a tenth of the time.
    parts = yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    article = Article(**parts["article"], untested=tuple(parts["untested"]))
    return article, tuple(Claim(article=article.key, **entry) for entry in parts["claims"])
