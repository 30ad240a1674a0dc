"""Exercises that are answered: what is right is told so, what isn't is helped, and no notebook
shows its answers.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import jupytext
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.course.answers import ANSWERS, Answer
from labutils.course.exercises import check, solved
from labutils.tools import run

HUGE = st.sampled_from([10**400, -(10**400), 2**63, 10**4000])
ONE = st.none() | st.booleans() | st.integers() | HUGE | st.floats() | st.text(max_size=5)
ANSWER = st.recursive(
    ONE,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.sets(ONE, max_size=4),
    max_leaves=5,
)
ODD = [
    np.array([]),
    np.eye(2),
    torch.eye(2),
    torch.empty(2, device="meta"),
    np.ndarray,
    2j,
    b"b",
    {1: 2},
    [[1], {2}],
]


SHARES = (-3, -1.02, -0.98, 0, 0.98, 1.02, 3)
"""Of what a number may be off by: at none of them does it matter how the sum is rounded."""


def nearby(known: Answer) -> list:
    """Answers as Python itself would have them, right ones, nearly right ones and wrong ones."""
    if isinstance(known.right, frozenset):
        among = sorted(known.right | set(known.slips), key=str)
        subsets = [
            set(chosen) for count in range(len(among) + 1) for chosen in combinations(among, count)
        ]
        return [
            *subsets,
            {True if each == 1 else each for each in known.right},
            {10**400, *known.right},
        ]
    if isinstance(known.right, tuple):
        return [*product(*(near(each, known.within) for each in known.right)), *known.slips]
    return [
        known.right,
        *known.slips,
        *([] if isinstance(known.right, str) else near(known.right, known.within)),
    ]


def near(right: float, within: float) -> list[float]:
    return [
        *(right * (1 + share * within) for share in SHARES),
        right + 1,
        right - 1,
        -right,
        bool(right),
        10**400,
    ]


def is_right(known: Answer, answer: Any) -> bool:
    """By exact arithmetic, of an answer as Python itself would have it."""

    def is_number(value: Any) -> bool:
        return type(value) is int or (type(value) is float and math.isfinite(value))

    def close(right: float, value: Any) -> bool:
        return is_number(value) and abs(Fraction(value) - Fraction(right)) <= Fraction(
            known.within
        ) * abs(Fraction(right))

    if isinstance(known.right, tuple):
        same = isinstance(answer, tuple | list) and len(answer) == len(known.right)
        return same and all(map(close, known.right, answer))
    if isinstance(known.right, frozenset):
        if not isinstance(answer, set | tuple | list) or not all(
            is_number(x) or isinstance(x, str) for x in answer
        ):
            return False
        return {folded(x) for x in answer} == {folded(x) for x in known.right}
    return (
        folded(answer) == known.right
        if isinstance(known.right, str)
        else close(known.right, answer)
    )


def folded(word: Any) -> Any:
    return word.strip().casefold() if isinstance(word, str) else word


def forms(answer: Any) -> list:
    """The same answer as a library, or another hand, would put it."""
    if isinstance(answer, set):
        return [{turn(scalars(each), k) for each in answer} for k in range(5)]
    if not isinstance(answer, tuple | list):
        return scalars(answer) + arrays_of_one(answer)
    found = [
        type(answer)(turn(scalars(each) + arrays_of_one(each), k) for each in answer)
        for k in range(6)
    ]
    if len(answer) > 1 and all(type(each) is float for each in answer):
        found += [np.array(answer), torch.tensor(answer, dtype=torch.float64)]
    return found


def turn(choices: list, k: int) -> Any:
    return choices[k % len(choices)]


def scalars(value: Any) -> list:
    """What may stand in a set, too."""
    if isinstance(value, str):
        return [value, f" {value}\n", np.str_(value), *([value.upper()] if value.isascii() else [])]
    if type(value) is bool:
        return [value, np.bool_(value), torch.tensor(value)]
    if type(value) is int:
        forms = (
            [value, np.int64(value), torch.tensor(value)] if -(2**63) <= value < 2**63 else [value]
        )
        return forms + ([float(value)] if abs(value) < 2**53 else [])
    if type(value) is float:
        forms = [value, np.float64(value), torch.tensor(value, dtype=torch.float64)]
        forms += [np.float32(value)] if torch.tensor(value).item() == value else []
        return forms + ([int(value)] if value.is_integer() else [])
    return [value]


def arrays_of_one(value: Any) -> list:
    return (
        [np.array([value]), torch.tensor([[value]], dtype=torch.float64)]
        if type(value) is float
        else []
    )


def asked(tag: str) -> set[str]:
    """Exercises that cells of this tag put to `check`, in all labs."""
    cells = [
        cell for path in run.NOTEBOOKS.glob("[0-9]*.ipynb") for cell in jupytext.read(path).cells
    ]
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


@pytest.mark.parametrize("exercise", ANSWERS)
def test_what_is_right_is_told_so_and_what_is_nearly_right_is_not(exercise):
    """Whoever's numbers they are, NumPy's or PyTorch's, or integers that no float can hold."""
    known = ANSWERS[exercise]
    for answer in nearby(known):
        told = "right" if is_right(known, answer) else "not yet"
        for form in forms(answer):
            assert check(exercise, form).startswith(f"Exercise {exercise[3:]}: {told}. "), form


@settings(deadline=None)
@given(st.sampled_from(sorted(ANSWERS)), ANSWER, st.data())
def test_whatever_is_answered_is_told_what_it_is(exercise, answer, data):
    told = (
        "no answer yet"
        if answer is None
        else "right"
        if is_right(ANSWERS[exercise], answer)
        else "not yet"
    )
    form = data.draw(st.sampled_from(forms(answer)))
    assert check(exercise, form).startswith(f"Exercise {exercise[3:]}: {told}. ")


@pytest.mark.parametrize("exercise", ANSWERS)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_what_is_no_answer_at_all_is_told_so(exercise, odd):
    assert check(exercise, odd).startswith(f"Exercise {exercise[3:]}: not yet. ")


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        ("07.3", np.int64(11)),
        ("07.3", torch.tensor([11])),
        ("07.2", np.float32(8 / 32 + 32 / (32 * 128))),
        ("08.3", torch.tensor(13.75)),
        ("11.2", (torch.tensor(2.0), torch.tensor(2.0))),
        ("11.2", torch.tensor([2.0, 2.0])),
        ("11.2", np.array([2, 2])),
        ("10.3", {1.0, 2.0, 4.0}),
        ("10.3", {np.int64(1), np.float32(2), 4}),
        ("10.3", {torch.tensor(1), torch.tensor(2), torch.tensor(4)}),
        ("10.3", np.array([4, 2, 1])),
        ("11.1", " Inconclusive"),
        ("06.3", {"B"}),
        ("04.3", ["batchnorm"]),
    ],
)
def test_right_answers_in_other_words_are_right(exercise, answer):
    solved(check(exercise, answer))


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        ("07.1", "-32", "A number is asked for, for example -12."),
        ("07.1", True, "A number is asked for"),
        ("08.1", 150, "A tuple of 2 numbers is asked for, for example (200, 100)."),
        ("10.3", "124", "A set is asked for"),
        ("10.3", {True, 2, 4}, "A set is asked for"),
        ("10.3", {np.bool_(True), 2, 4}, "A set is asked for"),
        ("07.1", torch.tensor(True), "A number is asked for"),
        ("07.1", 10**400, "The constant is 127"),
        ("11.1", {"inconclusive"}, "A word is asked for"),
        ("07.1", float("nan"), "The constant is 127"),
    ],
)
def test_an_answer_of_another_form_is_told_which_one_is_asked_for(exercise, answer, said):
    assert said in check(exercise, answer)


def test_every_answer_is_that_of_an_exercise_and_its_solution():
    assert asked("exercise") == asked("solution") == set(ANSWERS)
