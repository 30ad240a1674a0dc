"""The articles that lab 07's small model reads, and their letters."""

from __future__ import annotations

from labutils.data.toy_articles import KEPT, Letters, articles


def test_questions_are_about_what_was_never_trained_on():
    told, asked = articles(2000, kept=False), articles(100, kept=True)
    pairs, questions = ({(a.place, a.thing) for a in those} for those in (told, asked))
    assert len(questions) == KEPT and not pairs & questions
    assert {place for place, _ in questions} <= {place for place, _ in pairs}
    assert all(article.answer("title") in article.body for article in told[:200])


def test_answers_alone_are_learnt():
    told = articles(5, kept=False)
    letters = Letters(told)
    batch, questions = letters.batch(told, "title"), letters.batch(told)
    for ids, labels, article in zip(batch["input_ids"], batch["labels"], told, strict=True):
        answer = labels[labels != -100].tolist()
        assert answer[-1] == 2 and letters.text(answer) == article.answer("title")
        assert letters.text(ids[ids > 2].tolist()) == article.body + article.answer("title")
    assert (questions["input_ids"][:, -1] == 1).all() and (questions["labels"] == -100).all()
