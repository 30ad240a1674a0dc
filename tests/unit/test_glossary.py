"""The glossary: in order, complete as far as the house's own words go, about what the labs say, and
found from them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
GLOSSARY = HOUSE / "docs" / "glossary.md"
LABS = {
    path.name[:2]: path for path in sorted((HOUSE / "notebooks" / "py").glob("[0-9][0-9]_*.py"))
}
ENTRY = re.compile(r"^\*\*(.+?)\*\* \((.+?)\)\. \S", re.MULTILINE)
HOUSE_WORDS = {
    "recipe",
    "workload",
    "run",
    "claim",
    "lane",
    "optimizer step",
    "GPU-busy",
    "graph break",
    "MFU",
}
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def entries() -> list[tuple[str, str]]:
    """(words, where they are explained) of each entry."""
    return ENTRY.findall(GLOSSARY.read_text("utf-8"))


def test_every_paragraph_is_an_entry_and_they_are_in_order():
    paragraphs = GLOSSARY.read_text("utf-8").split("\n\n")[2:]
    words = [word.lower() for word, _ in entries()]
    assert len(words) == len(paragraphs) > 60
    assert words == sorted(words)
    assert len(set(words)) == len(words)


def test_the_house_words_are_in_it():
    assert {word for words, _ in entries() for word in words.split(", ")} >= HOUSE_WORDS


@pytest.mark.parametrize(("words", "where"), entries(), ids=lambda value: value)
def test_a_word_is_used_in_the_lab_that_is_said_to_explain_it(words: str, where: str):
    if where == "the course's":
        return
    first = words.split(", ")[0].lower()
    for number in where.split(", "):
        said = re.sub(r"\n# ?", " ", LABS[number].read_text("utf-8")).replace("*", "").lower()
        assert first.removesuffix("s").split(" memory")[0] in said, (
            f"lab {number} doesn't say {first!r}"
        )


@pytest.mark.parametrize("number", LABS)
def test_a_lab_links_to_the_glossary_and_says_where_it_comes_from(number: str):
    said = LABS[number].read_text("utf-8")
    assert "](../docs/glossary.md)" in said
    assert "## Where this comes from" in said


@pytest.mark.parametrize("path", LABS.values(), ids=LABS)
def test_links_into_the_repository_lead_somewhere(path: Path):
    text = "".join(line for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
    missing = [
        target for target in LINK.findall(text) if not (HOUSE / "notebooks" / target).exists()
    ]
    assert not missing
