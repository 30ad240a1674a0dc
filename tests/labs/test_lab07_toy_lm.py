"""The small model that a lab trains: its articles, its questions, its adapters."""

from __future__ import annotations

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab07_toy_lm
from labutils.labs.lab07_toy_lm import Reader, articles


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


def test_questions_are_about_what_was_never_trained_on():
    told = articles(2000, kept=False, seed=1)
    asked = articles(100, kept=True, seed=0)
    pairs, questions = ({(a.place, a.thing) for a in those} for those in (told, asked))
    assert len(questions) == lab07_toy_lm.KEPT and not pairs & questions
    assert {place for place, _ in questions} <= {place for place, _ in pairs}
    for article in told[:200]:
        assert article.place + article.thing == article.answer("title")
        assert article.answer("title") in article.body


def test_adapters_change_answers_and_are_swapped():
    """A few steps teach no reading, but they do teach forms."""
    reader = Reader("cpu", questions=8)
    reader.learn_to_explain(40)
    frozen = {name: p.clone() for name, p in reader.lm.named_parameters()}
    plain = reader.answers(None)
    assert all(answer.endswith("についての紹介。") for answer in plain)
    reader.fine_tune("title", 30)
    titles = reader.answers("title")
    reader.fine_tune("place", 15)
    assert (reader.answers(None), reader.answers("title")) == (plain, titles)
    assert not any("紹介" in answer for answer in titles + reader.answers("place"))
    assert sum(map(len, reader.answers("place"))) < sum(map(len, titles))
    for name, parameter in reader.lm.named_parameters():
        before = frozen.get(name.replace(".base_layer", ""))
        assert before is None or torch.equal(parameter, before), name
