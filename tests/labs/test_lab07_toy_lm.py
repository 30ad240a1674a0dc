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
    told = {(a.place, a.thing) for a in articles(2000, kept=False, seed=1)}
    asked = {(a.place, a.thing) for a in articles(100, kept=True, seed=0)}
    assert len(asked) == lab07_toy_lm.KEPT
    assert not told & asked
    assert {place for place, _ in asked} <= {place for place, _ in told}


def test_an_article_names_what_it_is_about():
    for article in articles(200, kept=False, seed=3):
        assert article.place + article.thing in article.body
        assert article.answer("title") == article.place + article.thing
        assert article.answer("place") == article.place


def test_articles_are_the_same_again():
    assert articles(20, True, 5) == articles(20, True, 5) != articles(20, True, 6)


def test_adapters_change_answers_and_are_swapped():
    """A few steps teach no reading, but they do teach forms."""
    reader = Reader("cpu", questions=8)
    reader.learn_to_explain(40)
    frozen = {name: p.clone() for name, p in reader.lm.named_parameters()}
    plain = reader.answers(None)
    assert all(answer.endswith("についての紹介。") for answer in plain)
    assert reader.matches(None, "title") == 0
    reader.fine_tune("title", 30)
    named = reader.answers("title")
    reader.fine_tune("place", 15)
    assert reader.answers("title") == named
    assert reader.answers(None) == plain
    assert not any("紹介" in answer for answer in named + reader.answers("place"))
    assert sum(map(len, reader.answers("place"))) < sum(map(len, named))
    for name, parameter in reader.lm.named_parameters():
        before = frozen.get(name.replace(".base_layer", ""))
        assert before is None or torch.equal(parameter, before), name
