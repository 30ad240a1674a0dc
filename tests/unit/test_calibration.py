"""Predictions: paired with what was measured, told as factors, and summed up without being fooled."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.course import predictions
from labutils.course.lab import open_lab
from labutils.course.predictions import Score, lean_in_words, scores_of, summaries, summary
from labutils.results.records import read_records


def predicted(topic: str, value: object, unit: str = "x", lab: str = "03") -> dict:
    return {"lab": lab, "status": "prediction", "topic": topic, "value": value, "unit": unit}


def scored(topic: str, value: object, measured: object, unit: str = "x", lab: str = "03") -> dict:
    return {
        "lab": lab,
        "status": "score",
        "topic": topic,
        "value": value,
        "measured": measured,
        "unit": unit,
    }


def score(
    predicted: float, measured: float | None, unit: str = "x", lab: str = "03", topic: str = "t"
) -> Score:
    return Score(lab, topic, unit, predicted, measured)


def test_what_a_lab_keeps_is_what_is_read(results_folder, capsys):
    names = {"scale": "tiny", "weights": "random", "data": "generated", "results_dir": ""}
    lab = open_lab("03", names | {"__annotations__": dict.fromkeys(names, str), "In": [""]})
    lab.predict("time to read one image", 12, "ms")
    lab.predict("fewest workers", 4, "workers")
    lab.predict("not answered", None)
    lab.done({"time to read one image": 24.0, "fewest workers": None})
    found = scores_of(read_records(results_folder))
    kept = {one.topic: (one.predicted, one.measured, one.unit) for one in found}
    assert kept == {
        "fewest workers": (4, None, "workers"),
        "time to read one image": (12, 24, "ms"),
    }
    assert [one.off for one in found if one.measured] == [2]


def test_the_last_prediction_counts_and_forgets_an_older_score():
    records = [predicted("a", 1), scored("a", 1, 4), predicted("b", 5), predicted("a", 3)]
    assert scores_of(records) == [score(5, None, topic="b"), score(3, None, topic="a")]
    assert scores_of([*records, scored("a", 3, 4)])[-1] == score(3, 4, topic="a")


def test_labs_are_in_order_and_their_topics_apart():
    records = [scored("a", 1, 2, lab="07"), scored("a", 3, 4, lab="01")]
    assert [(one.lab, one.predicted) for one in scores_of(records)] == [("01", 3), ("07", 1)]


@pytest.mark.parametrize("odd", [None, "3", True, float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_number_is_passed_over(odd):
    assert scores_of([predicted("a", odd), scored("a", odd, 1), scored("b", 1, odd)]) == []


@pytest.mark.parametrize("missing", ["lab", "topic", "unit", "value"])
def test_a_record_that_lacks_something_is_passed_over(missing):
    assert scores_of([{k: v for k, v in scored("a", 1, 2).items() if k != missing}]) == []


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_twice_and_half_are_equally_far_off(one, other):
    assert score(one, other).off == pytest.approx(score(other, one).off)
    assert score(one, other).off >= 1


@pytest.mark.parametrize(("guess", "truth"), [(0, 1), (-3, 2), (3, 0), (3, -2), (3, None)])
def test_there_is_no_factor_without_two_numbers_above_0(guess, truth):
    assert score(guess, truth).factor is None and score(guess, truth).off is None


def test_a_summary_knows_how_far_which_way_and_how_many_were_near():
    found = summary("all", [score(10, 5), score(4, 8), score(30, 10), score(0, 5)])
    assert (found.count, found.off, found.near) == (3, 2, 2)
    assert found.lean == pytest.approx(2)
    with pytest.raises(ValueError, match="None of 1 predictions"):
        summary("all", [score(0, 5)])


def test_summaries_begin_with_what_is_misjudged_most():
    scores = [
        score(1, 1, "ms"),
        score(2, 1, "us"),
        score(9, 1, "%"),
        score(1, 1, ""),
        score(1, None, "x"),
    ]
    found = summaries(scores, "kind")
    assert [(one.name, one.count) for one in found] == [
        ("shares and changes", 1),
        ("times", 2),
        ("counts and sizes", 1),
    ]
    assert [
        one.name for one in summaries([score(1, 2, lab="01"), score(1, 3, lab="02")], "lab")
    ] == ["02", "01"]


@pytest.mark.parametrize(
    ("lean", "said"),
    [(1.0, "neither way"), (0.95, "neither way"), (1.5, "1.5x too high"), (0.5, "2x too low")],
)
def test_a_lean_is_told_in_words(lean, said):
    assert lean_in_words(lean) == said


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_a_summary_lies_among_its_scores(pairs):
    scores = [score(*pair) for pair in pairs]
    found = summary("all", scores)
    assert min(s.off for s in scores) <= found.off <= max(s.off for s in scores)
    low, high = min(s.factor for s in scores), max(s.factor for s in scores)
    assert low * (1 - 1e-9) <= found.lean <= high * (1 + 1e-9)
    assert found.near == sum(s.off <= predictions.NEAR for s in scores)
    assert math.isfinite(found.lean)
