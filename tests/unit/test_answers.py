"""Exercises that are answered: what is right is told so, what isn't is helped, and no notebook shows its answers."""

from __future__ import annotations

import re

import jupytext
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils import runner
from labutils.answers import ANSWERS
from labutils.exercises import check, solved

ANSWER = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.sets(st.integers() | st.text(max_size=1)),
    max_leaves=5,
)


def asked(tag: str) -> set[str]:
    """Exercises that cells of this tag put to `check`, in all labs."""
    cells = [cell for path in runner.NOTEBOOKS.glob("[0-9]*.ipynb") for cell in jupytext.read(path).cells]
    sources = "\n".join(cell.source for cell in cells if tag in cell.metadata.get("tags", []))
    return set(re.findall(r'\bcheck\("([^"]+)"', sources))


@pytest.mark.parametrize("exercise", ANSWERS)
def test_the_right_answer_is_right_and_slips_are_helped(exercise):
    known = ANSWERS[exercise]
    number = int(exercise[3:])
    assert check(exercise, known.right) == f"Exercise {number}: right. {known.why}"
    solved(check(exercise, known.right))
    for slip, said in known.slips.items():
        given = {slip} if isinstance(known.right, frozenset) else slip
        assert check(exercise, given) == f"Exercise {number}: not yet. {said}"


@pytest.mark.parametrize("exercise", ANSWERS)
def test_the_example_has_the_right_form_and_is_wrong(exercise):
    example = eval(ANSWERS[exercise].example)
    assert (
        check(exercise, None)
        == f"Exercise {exercise[3:]}: no answer yet. Put one in the cell, for example {ANSWERS[exercise].example}."
    )
    assert ": not yet. " in check(exercise, example)
    assert "is asked for" not in check(exercise, example)


@given(st.sampled_from(sorted(ANSWERS)), ANSWER)
def test_whatever_is_answered_is_told_something(exercise, answer):
    said = check(exercise, answer)
    assert re.match(rf"Exercise {exercise[3:]}: (right|not yet|no answer yet)\. ", said)


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        ("07.1", "-32", "A number is asked for, for example -12."),
        ("07.1", True, "A number is asked for"),
        ("08.1", 150, "A tuple of 2 numbers is asked for, for example (200, 100)."),
        ("10.3", "124", "A set is asked for"),
        ("11.1", {"inconclusive"}, "A word is asked for"),
        ("07.1", float("nan"), "The constant is 127"),
    ],
)
def test_an_answer_of_another_form_is_told_which_one_is_asked_for(exercise, answer, said):
    assert said in check(exercise, answer)


def test_every_answer_is_that_of_an_exercise_and_its_solution():
    assert asked("exercise") == asked("solution") == set(ANSWERS)
