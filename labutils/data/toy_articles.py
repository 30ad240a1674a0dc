"""Articles of two sentences about places that don't exist, for a small model that a lab trains.

    told, asked = articles(1000, kept=False), articles(40, kept=True)
    batch = Letters(told + asked).batch(told[:32], "title", device)   ids, labels, attention mask

One of the sentences names what the article is about, a place and a thing, and that is its title.
Some pairs of place and thing are kept for questions: no answer that is judged was ever seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from labutils.data.texts import WORDS

JAPANESE, SENTENCES = WORDS["japanese"], WORDS["titles"]
STYLES = {"introduces": "{0}の{1}についての紹介。", "title": "{0}{1}", "place": "{0}"}
"""Style -> the answer to an article: "An introduction to the bridge of Aokawa.", its bare title, or
the place alone."""
KEPT = 40
"""Pairs of place and thing that are kept for questions."""


class Article(NamedTuple):
    """One article and what it is about."""

    body: str
    place: str
    thing: str

    def answer(self, style: str) -> str:
        return STYLES[style].format(self.place, self.thing)


def articles(count: int, kept: bool) -> list[Article]:
    """`count` articles on pairs that are kept for questions, or on the others."""
    pairs = list(itertools.product(JAPANESE["place"], JAPANESE["thing"]))
    order = np.random.default_rng(0).permutation(len(pairs))
    mine = order[:KEPT] if kept else order[KEPT:]
    rng = np.random.default_rng(int(kept))
    return [_written(rng, *pairs[mine[index % len(mine)]]) for index in range(count)]


def _written(rng: np.random.Generator, place: str, thing: str) -> Article:
    sentences = [rng.choice(SENTENCES[kind]) for kind in ("naming", "besides")]
    rng.shuffle(sentences)
    facts = {kind: rng.choice(JAPANESE[kind]) for kind in ("person", "quality")}
    facts |= {"year": rng.integers(1600, 2025), "number": rng.integers(2, 900)}
    return Article("".join(sentences).format(place=place, thing=thing, **facts), place, thing)


class Letters:
    """A token a letter. 0 fills up, 1 asks for the answer, 2 ends it."""

    def __init__(self, texts: Sequence[Article]) -> None:
        told = "".join(text.body + text.answer("introduces") for text in texts)
        self.letters = ["", "", "", *sorted(set(told))]
        self.code = {letter: code for code, letter in enumerate(self.letters)}

    def batch(self, texts: Sequence[Article], style: str = "", device: str = "cpu") -> dict:
        """input_ids, labels and attention_mask [texts, tokens], filled up on the left; the labels
        are the answers' tokens. Without a style there is no answer, as for a question.
        """
        asked = [[*map(self.code.get, text.body), 1] for text in texts]
        said = [[*map(self.code.get, text.answer(style)), 2] if style else [] for text in texts]
        rows = [one + other for one, other in zip(asked, said, strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
        labels = ids.clone()
        for row, answer in zip(labels, said, strict=True):
            row[: longest - len(answer)] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}

    def text(self, codes: Sequence[int]) -> str:
        """The letters up to the end."""
        return "".join(self.letters[code] for code in itertools.takewhile(lambda c: c != 2, codes))
