"""The published claims as data: complete, unique, and not a number that the article doesn't state."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labutils.results import claims as articles
from labutils.results import judges
from labutils.results.claims import magnitude

DIGESTS = {
    key: (Path(__file__).parent / f"digest_{key.lower()}.md").read_text("utf-8")
    for key in articles.articles()
}
CLAIMS = articles.claims()
each_claim = pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
SCALES = {"M": 1e6, "k": 1e3}


def numbers(text: str) -> set[float]:
    """The numbers in `text` without their signs, "16.7 M" being one; names like BF16 hold none."""
    found = re.findall(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?(?:e\d+)?)(?: ([Mk])\b)?", text)
    return {float(digits) * SCALES.get(unit, 1) for digits, unit in found}


def test_the_key_is_the_ids_first_part_and_ids_are_unique():
    from labutils.results.claims import a1, a2, a3, a4

    every = a1.CLAIMS + a2.CLAIMS + a3.CLAIMS + a4.CLAIMS
    assert len({claim.id for claim in every}) == len(every) == len(CLAIMS)
    for claim in CLAIMS.values():
        assert re.fullmatch(rf"{claim.article}\.[a-z0-9]+\.[a-z0-9-]+", claim.id)
        assert claim.article in articles.articles()


@each_claim
def test_a_claim_can_be_judged(claim):
    assert claim.judge in judges.JUDGES
    assert re.fullmatch(r"\d\d", claim.lab)
    assert bool(claim.runs) is (claim.judge != "beyond")
    assert claim.runs or claim.note.endswith(".")
    assert claim.needs in ("any", "gpu")
    assert claim.published_text
    assert claim.statement.endswith(".")


@each_claim
def test_a_claim_names_only_runs_that_it_declares(claim):
    named = {
        v
        for key, value in claim.how.items()
        if key not in NOT_RUNS
        for v in (value if isinstance(value, tuple) else (value,))
    }
    assert named == set() if claim.judge == "beyond" else named and named <= set(claim.runs)


NOT_RUNS = {
    "off",
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
    "towards",
    "share",
    "rate",
    "items",
}


@each_claim
def test_every_number_is_in_the_digest(claim):
    stated = (
        {abs(n) for n in claim.published} | numbers(claim.published_text) | numbers(claim.statement)
    )
    assert stated <= numbers(DIGESTS[claim.article])


@each_claim
def test_words_that_replace_the_numbers_keep_them(claim):
    """`says` may add words to the published numbers, but shows no other ones."""
    if claim.says:
        assert numbers(claim.says) <= set(claim.published)


FACTS = {
    "A1": [
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
    "A2": [
        (448, 448),
        (0,),
        (0.0448, -44.8, 448),
        (2,),
        (4, 7),
        (1.48, 1.41),
        (9.05, 10.36),
        (577, 8),
        (11, 20),
        (1.48, 105),
        (950,),
        (2, 6),
        (1.48, 61),
        (105, 61),
        (47, 53),
        (4, 29),
        (1.48, 106),
        (9.05, 9.23),
        (220,),
        (40, 43),
        (4, 24),
        (1.48, 57),
        (9.05, 10.51),
        (135,),
        (15, 19),
        (53,),
        (20,),
        (1.48, 1.69),
        (9.05, 8.88),
        (135, 220),
    ],
    "A3": [
        (0.25,),
        (50.8,),
        (127, -36, 6, 24),
        (2.5, -0.7087, 0.1181, 0.4724),
        (0.5,),
        (0.127,),
        (2, 1),
        (70,),
        (1.9,),
        (30,),
        (96,),
        (80,),
        (2500,),
        (109.7, 66.9),
        (877.9, 1978.9),
        (1755.7, 3957.8),
        (3511.4,),
        (1792, 3352),
        (96, 80),
        (300, 700),
        (11000, 27000),
        (3600, 9200),
        (9400, 9200),
        (7300, 5200),
        (3600, 7300),
        (2.5,),
        (1.3,),
    ],
}


@pytest.mark.parametrize(
    ("article", "fact"), [(key, fact) for key, facts in FACTS.items() for fact in facts]
)
def test_every_published_number_has_a_claim(article, fact):
    assert fact in {claim.published for claim in articles.claims(article).values()}


@pytest.mark.parametrize(
    ("article", "labs"),
    [
        ("A1", {"00", "01", "02", "03", "04"}),
        ("A2", {"05", "06"}),
        ("A3", {"07", "08"}),
        ("A4", {"02", "03", "04", "07", "09", "10"}),
    ],
)
def test_claims_can_be_chosen_by_lab(article, labs):
    mine = articles.claims(article)
    assert {claim.lab for claim in mine.values()} == labs
    assert sum(len(articles.claims(article, lab)) for lab in labs) == len(mine)
    assert articles.claims("A9") == {}


def test_every_piece_of_a4_s_advice_has_a_claim():
    """Each line of its digest names the claims that stand for it, and no claim stands for nothing."""
    lines = re.findall(r"^- .*?(?=^- |^#|\Z)", DIGESTS["A4"], re.M | re.S)
    named = [re.findall(r"A4\.[a-z.-]+[a-z]", line) for line in lines]
    assert len(lines) > 30 and all(named)
    assert sorted(id for ids in named for id in ids) == sorted(articles.claims("A4"))


def test_advice_is_read_as_at_least_so_much():
    for claim in articles.claims("A4").values():
        if claim.judge == "helps":
            assert 0 < claim.how["at_least"] < 100 and claim.how["towards"] in ("less", "more")


def test_claims_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        next(iter(CLAIMS.values())).published = (1,)


def test_an_unknown_id_is_told_with_its_neighbours():
    with pytest.raises(ValueError, match=r"'A1.workers.optimun'.*A1\.workers\.optimum"):
        articles.claim("A1.workers.optimun")


@pytest.mark.parametrize(
    ("value", "text"),
    [(16.7e6, "16.7 M"), (65e3, "65 k"), (4096, "4096"), (2.96, "2.96"), (0, "0")],
)
def test_magnitude(value, text):
    assert magnitude(value) == text


def test_the_data_needs_no_heavy_library():
    code = "import sys, labutils.results.claims as a; a.claims(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
