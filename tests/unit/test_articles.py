"""The published claims as data: complete, unique, and not a number that the article doesn't state."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labutils import articles, claims
from labutils.articles import magnitude

DIGEST = (Path(__file__).parent / "digest_a1.md").read_text(encoding="utf-8")
A1 = articles.claims("A1")
SCALES = {"M": 1e6, "k": 1e3}


def numbers(text: str) -> set[float]:
    """The numbers in `text`, "16.7 M" being one."""
    found = re.findall(r"(?<![\d.])(\d+(?:\.\d+)?)(?: ([Mk])\b)?", text)
    return {float(digits) * SCALES.get(unit, 1) for digits, unit in found}


def test_the_key_is_the_ids_first_part_and_ids_are_unique():
    from labutils.articles import a1

    assert len({claim.id for claim in a1.CLAIMS}) == len(a1.CLAIMS) == len(A1)
    for claim in A1.values():
        assert re.fullmatch(r"A1\.[a-z]+\.[a-z0-9-]+", claim.id)
        assert claim.article in articles.articles()


@pytest.mark.parametrize("claim", A1.values(), ids=lambda claim: claim.id)
def test_a_claim_can_be_judged(claim):
    assert claim.judge in claims.JUDGES
    assert re.fullmatch(r"\d\d", claim.lab)
    assert claim.runs
    assert claim.needs in ("any", "gpu")
    assert claim.published_text
    assert claim.statement.endswith(".")


@pytest.mark.parametrize("claim", A1.values(), ids=lambda claim: claim.id)
def test_a_claim_names_only_runs_that_it_declares(claim):
    named = {
        v
        for key, value in claim.how.items()
        if key not in NOT_RUNS
        for v in (value if isinstance(value, tuple) else (value,))
    }
    assert named and named <= set(claim.runs)


NOT_RUNS = {
    "metric",
    "metrics",
    "heavier",
    "lighter",
    "words",
    "at_least",
    "at_most",
    "warned",
    "failed",
    "item",
    "capability",
}


@pytest.mark.parametrize("claim", A1.values(), ids=lambda claim: claim.id)
def test_every_number_is_in_the_digest(claim):
    stated = set(claim.published) | numbers(claim.published_text) | numbers(claim.statement)
    assert stated <= numbers(DIGEST)


@pytest.mark.parametrize("claim", A1.values(), ids=lambda claim: claim.id)
def test_words_that_replace_the_numbers_keep_them(claim):
    """`says` may add words to the published numbers, but shows no other ones."""
    if claim.says:
        assert numbers(claim.says) <= set(claim.published)


@pytest.mark.parametrize(
    "fact",
    [
        (16.7e6, 65e3),
        (44,),
        (290,),
        (5,),
        (290, 156, 144, 141, 148, 178),
        (3,),
        (90,),
        (12, 64),
        (44, 65),
        (141, 102),
        (102, 98),
        (290, 98),
        (44, 85),
        (2.3, 120),
        (12, 0),
    ],
)
def test_every_published_number_has_a_claim(fact):
    assert fact in {claim.published for claim in A1.values()}


def test_claims_can_be_chosen_by_lab():
    labs = {claim.lab for claim in A1.values()}
    assert labs == {"00", "01", "02", "03", "04"}
    assert sum(len(articles.claims(lab=lab)) for lab in labs) == len(A1)
    assert articles.claims("A9") == {}


def test_claims_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        next(iter(A1.values())).published = (1,)


def test_an_unknown_id_is_told_with_its_neighbours():
    with pytest.raises(ValueError, match=r"'A1.workers.optimun'.*A1\.workers\.optimum"):
        articles.claim("A1.workers.optimun")


@pytest.mark.parametrize(
    ("value", "text"), [(16.7e6, "16.7 M"), (65e3, "65 k"), (4096, "4096"), (2.96, "2.96"), (0, "0")]
)
def test_magnitude(value, text):
    assert magnitude(value) == text


def test_the_data_needs_no_heavy_library():
    code = "import sys, labutils.articles as a; a.claims(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
