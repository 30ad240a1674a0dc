"""What a lab aims at: the words of a goal, and whether a value gets there."""

from __future__ import annotations

import pytest

from labutils.course.goals import GOAL_HEAD, Goal, goal_rows
from labutils.results.records import Run

RATES = {"median": 15_207.4, "p10": 14_579.0, "p90": 15_587.1, "n": 12}


@pytest.mark.parametrize(
    ("goal", "value", "text", "outcome"),
    [
        (Goal("a", least=17_000), 16_999.9, "at least 17,000", ", missed"),
        (Goal("a", least=1.9), 1.9, "at least 1.9", ", reached"),
        (Goal("a", most=0.75), 0.76, "at most 0.75", ", missed"),
        (Goal("a", most=10), 10, "at most 10", ", reached"),
        (Goal("a", most=0), 1, "none", ", missed"),
        (Goal("a", most=0), 0, "none", ", reached"),
        (Goal("a"), 5, None, ""),
    ],
)
def test_whether_a_value_gets_there(goal, value, text, outcome):
    assert (goal.text, goal.outcome(value, value, value)) == (text, outcome)


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(19_741, ", missed, within the spread"), (20_053, ", reached, within the spread")],
)
def test_a_range_around_the_goal_leaves_it_open(value, outcome):
    assert Goal("a", least=20_000).outcome(value, 0.96 * value, 1.04 * value) == outcome
    assert Goal("a", least=17_000).outcome(value, 0.96 * value, 1.04 * value) == ", reached"


def test_another_card_is_not_held_against_the_goals():
    theirs = Run("07", "", scale="full", metrics={"x": 2.0}, machine={"gpu": "H200"})
    for card, said in (("H200", "1.00, missed"), ("H100", "1.00")):
        mine = Run("07", "", scale="full", metrics={"x": 1.0}, machine={"gpu": card})
        assert goal_rows({"x": Goal("x", least=1.5)}, mine, theirs)[0][2:] == (
            said.replace("1.00", "1"),
            "2, reached",
        )


def test_rows_have_ranges_and_say_at_full_what_was_missed():
    goals = {
        "rate": Goal("tokens/s", least=17_000),
        "graphs": Goal("graphs", most=10),
        "share": Goal("share", least=0.4),
    }
    theirs = Run("07", "targets", scale="full", metrics={"rate": RATES, "graphs": 2})
    mine = Run("07", "targets", scale="tiny", metrics={"rate": 31.25, "share": 0.617})
    rows = goal_rows(goals, mine, theirs)
    assert rows == [
        ("tokens/s", "at least 17,000", "31.2", "15,207 (14,579 to 15,587), missed"),
        ("graphs", "at most 10", None, "2, reached"),
        ("share", "at least 0.4", "0.617", None),
    ]
    assert {len(row) for row in rows} == {len(GOAL_HEAD) + 1}
    assert [row[-1] for row in goal_rows(goals, mine, None)] == [None] * 3


def test_a_ratio_s_range_has_its_digits():
    times = {"median": 2.0, "p10": 1.5, "p90": 8 / 3, "n": 6}
    (row,) = goal_rows(
        {"x": Goal("times", least=1.9)}, Run("07", "", scale="full", metrics={"x": times}), None
    )
    assert row[2] == "2 (1.5 to 2.67), reached, within the spread"
