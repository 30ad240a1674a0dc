"""Checks of exercises: what is right is told so, what isn't is helped; results before times, and a
verdict only beyond the noise.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from labutils.course import exercises
from labutils.course.exercises import check, difference, faster_than, smaller_than

ANSWERS = exercises.answers()


def right(exercise: str):
    known = ANSWERS[exercise]
    if "set" in known:
        return set(known["set"])
    return tuple(known["right"]) if isinstance(known["right"], list) else known["right"]


# Answers


@pytest.mark.parametrize("exercise", ANSWERS)
def test_the_right_answer_is_right_and_slips_are_helped(exercise):
    known = ANSWERS[exercise]
    said = check(exercise, right(exercise))
    assert ": right" in said and known["why"] in said
    for slip in known.get("slips", ()):
        wrong = {slip["given"]} if "set" in known else slip["given"]
        assert check(exercise, wrong).endswith(f"not yet. {slip['say']}")


@pytest.mark.parametrize("exercise", ANSWERS)
def test_the_example_has_the_right_form_and_is_wrong(exercise):
    example = ANSWERS[exercise]["example"]
    assert example in check(exercise, None)
    said = check(exercise, eval(example))
    assert ": not yet. " in said and "is asked for" not in said


@pytest.mark.parametrize("exercise", [key for key in ANSWERS if type(right(key)) in (int, float)])
def test_a_number_may_be_off_by_its_share(exercise):
    within, number = ANSWERS[exercise].get("within", 0.005), right(exercise)
    for share, said in ((0.98, "right"), (-0.98, "right"), (1.02, "not yet"), (-1.02, "not yet")):
        if number and within:
            for form in (float, np.float64, torch.tensor, lambda x: np.array([x])):
                assert f": {said}. " in check(exercise, form(number * (1 + share * within)))


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        ("12.2", (torch.tensor(2.0), torch.tensor(2.86))),
        ("11.3", {np.int64(1), np.float32(2), 4}),
        ("04.2", ["batchnorm"]),
    ],
)
def test_right_answers_in_other_forms_are_right(exercise, answer):
    assert ": right" in check(exercise, answer)


@pytest.mark.parametrize("exercise", ["07.1", "08.2", "11.3", "12.1"])
def test_what_is_no_answer_at_all_is_told_so(exercise):
    odd = [np.array([]), np.eye(2), torch.empty(2, device="meta"), np.ndarray, 2j, b"b", {1: 2}]
    for answer in (*odd, [[1], {2}], [{1: 2}], 10**400, float("nan")):
        assert ": not yet. " in check(exercise, answer)


# What is measured


def numbers(seed: int) -> tuple:
    return ([seed + k for k in range(5)],)


def double(values):
    return [2.0 * value for value in values]


def quick(values):
    return [value + value + 0.0 for value in values]


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds that each function is said to take, by its name; a list is drawn from."""
    takes: dict[str, float | list[float]] = {}
    draw = random.Random(0)

    def timed(function, arguments):
        ms = takes[function.__name__]
        return (draw.choice(ms) if isinstance(ms, list) else ms), function(*arguments)

    monkeypatch.setattr(exercises, "_timed", timed)
    return takes


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (8.0, 2.0, "right"),
        (4.0, 2.0, "not yet"),
        (3.0, [0.5, 2.0], "inconclusive"),
        ([8.0, 9.0, 10.0, 10.0, 10.0, 2.0], 2.0, "right"),
    ],
)
def test_a_time_is_judged_beyond_its_noise(clock, before, after, said):
    clock |= {"double": before, "quick": after}
    assert faster_than(4, double, quick, numbers, times=3).startswith(f"Exercise 4: {said}.")


def test_the_time_of_something_wrong_does_not_count(clock):
    clock |= {"double": 8.0, "quick": 2.0}
    remembered = double(*numbers(0))
    for wrong in (lambda values: [1.0], lambda values: remembered, lambda values: None):
        wrong.__name__ = "quick"
        assert "right" not in faster_than(4, double, wrong, numbers, times=3)
        assert "right" not in faster_than(4, double, wrong, numbers, times=0)
    assert faster_than(4, double, double, numbers, times=0).endswith("right. The same results.")


def test_what_changes_its_arguments_gets_its_own(clock):
    def quick(values):
        values[:] = [2.0 * value for value in values]
        return values

    clock |= {"double": 8.0, "quick": 2.0}
    assert "right." in faster_than(4, double, quick, numbers, times=3)


@pytest.mark.parametrize(("n", "k"), [(9, 1), (15, 3), (25, 6), (41, 12)])
def test_the_range_of_a_median_is_the_sign_tests(n, k):
    """Tables of the binomial distribution: P(X < k) <= 0.005 with p = 1/2."""
    assert exercises.range_of_median([*map(float, range(1, n + 1))]) == (k, n + 1 - k)


X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("result", "word"),
    [
        ({"a": X, "b": np.float64(3)}, ""),
        ({"a": X}, "should have"),
        ({"a": X[:1], "b": 3.0}, "shape"),
        ({"a": X.double(), "b": 3.0}, "dtype"),
        ({"a": X + 0.5, "b": 3.0}, "off by up to 0.5"),
        ({"a": X * float("nan"), "b": 3.0}, "off by up to nan"),
        ({"a": X, "b": "3 ms"}, "b is a str"),
    ],
)
def test_a_difference_is_named(result, word):
    said = difference({"a": X, "b": 3.0}, result, 1e-4)
    assert word in said and bool(said) == bool(word)


# What is kept for the backward pass


def rows(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(4, 16, requires_grad=True),)


class Lean(torch.autograd.Function):
    """Keeps the half-precision weight, which is the layer's own, or hangs the restored one on
    `ctx`, where no hook looks."""

    @staticmethod
    def forward(ctx, x, W, hung):
        ctx.W = W.float() if hung else W
        return x @ W.float().T

    @staticmethod
    def backward(ctx, upstream):
        return upstream @ ctx.W.float(), None, None


def test_bytes_are_counted_wherever_they_are_kept():
    layer = torch.nn.Module()
    layer.register_buffer("W", torch.randn(32, 16).half())

    def restoring(x):
        return x @ layer.W.float().T

    def judged(attempt, share: float = 0.1) -> str:
        return smaller_than(4, restoring, attempt, rows, share, layer)

    assert "right" in judged(lambda x: Lean.apply(x, layer.W, False))
    for wasteful in (restoring, lambda x: Lean.apply(x, layer.W, True)):
        assert "right" not in judged(wasteful)
        assert exercises.kept_for_backward(layer, wasteful, rows(0)) == 32 * 16 * 4
    assert "gradient 1" in judged(lambda x: Lean.apply(x.detach(), layer.W, False) + 0 * x.sum())
    assert "returns None" in judged(lambda x: None)
