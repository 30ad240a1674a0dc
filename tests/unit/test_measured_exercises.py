"""Exercises that are measured: results first, then the time, and a verdict only beyond the noise."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.course import exercises
from labutils.course.exercises import (
    difference,
    faster_than,
    kept_for_backward,
    range_of_median,
    smaller_than,
    solved,
)


def numbers(seed: int) -> tuple:
    return ([seed + k for k in range(5)],)


def double(values):
    return [2.0 * value for value in values]


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


def quick(values):
    return [value + value + 0.0 for value in values]


def test_what_is_faster_by_enough_is_right(clock):
    clock |= {"double": 8.0, "quick": 2.0}
    said = faster_than(4, double, quick, numbers, times=3)
    assert said == (
        "Exercise 4: right. The same results, 4.00 times as fast (4.00 to 4.00, 9 rounds); 3 times "
        "was asked for."
    )


def test_what_is_not_faster_by_enough_is_said_with_its_number(clock):
    clock |= {"double": 4.0, "quick": 2.0}
    said = faster_than(4, double, quick, numbers, times=3)
    assert said.startswith("Exercise 4: not yet. The results are the same, but 2.00 times as fast")


def test_noise_that_straddles_the_threshold_is_inconclusive(clock):
    clock |= {"double": 3.0, "quick": [0.5, 2.0]}
    said = faster_than(4, double, quick, numbers, times=3)
    assert said.startswith("Exercise 4: inconclusive.") and "41 rounds" in said


def test_noise_on_one_side_of_the_threshold_is_decided_by_more_rounds(clock):
    clock |= {"double": [8.0, 9.0, 10.0, 10.0, 10.0, 2.0], "quick": 2.0}
    assert faster_than(4, double, quick, numbers, times=3).startswith("Exercise 4: right.")


def test_the_time_of_something_wrong_is_not_taken(clock):
    def quick(values):
        return [2.0 * value + (value == 4) for value in values]

    said = faster_than(
        4, double, quick, numbers, times=3
    )  # the clock knows neither: it would raise
    assert said == (
        "Exercise 4: not yet. It has to give the same first, and value 5 of the result is off by "
        "1, "
        "where numbers go up to 8."
    )


def test_what_is_right_once_only_is_found(clock):
    clock |= {"double": 8.0, "quick": 2.0}
    remembered = double(*numbers(0))

    def quick(values):
        return remembered

    assert "not yet. On other inputs value 1 of the result is off by 2" in faster_than(
        4, double, quick, numbers, 3
    )


def test_what_changes_its_arguments_gets_its_own(clock):
    clock |= {"double": 8.0, "quick": 2.0}

    def quick(values):
        values[:] = [2.0 * value for value in values]
        return values

    assert "right." in faster_than(4, double, quick, numbers, times=3)


def test_an_empty_answer_is_no_answer():
    def unfinished(values):
        return None

    assert (
        faster_than(2, double, unfinished, numbers, 3)
        == "Exercise 2: fill in unfinished first; it returns None."
    )
    assert "fill in unfinished first" in smaller_than(
        2, double, unfinished, numbers, 0.5, torch.nn.Identity()
    )


def test_the_same_function_is_not_faster_than_itself():
    def work(x):
        return x @ x

    said = faster_than(1, work, work, lambda seed: (torch.full((128, 128), 1.0),), times=20)
    assert "right" not in said


def test_a_real_difference_is_measured():
    def slow(x):
        return sum((x[k : k + 1] for k in range(1, len(x))), x[:1])

    said = faster_than(
        1, slow, lambda x: x.sum(0, keepdim=True), lambda seed: (torch.ones(2000, 2),), times=2
    )
    assert said.startswith("Exercise 1: right.")


# The range of a median


@pytest.mark.parametrize(("n", "k"), [(9, 1), (15, 3), (25, 6), (41, 12)])
def test_the_range_is_the_sign_test_s(n, k):
    """Tables of the binomial distribution: P(X < k) <= 0.005 with p = 1/2."""
    values = [float(value) for value in range(1, n + 1)]
    assert range_of_median(values) == (k, n + 1 - k)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_the_range_holds_the_true_median_nearly_always(seed):
    draw = random.Random(seed)
    missed = 0
    for _ in range(200):
        low, high = range_of_median([draw.expovariate(1) for _ in range(15)])
        missed += not low <= 0.6931 <= high
    assert missed <= 12  # 2 are expected; more than 12 of 200 comes less than once in 10^6


@given(st.lists(st.floats(0.1, 10), min_size=9, max_size=41))
def test_the_median_lies_in_its_range(values):
    low, high = range_of_median(values)
    assert min(values) <= low <= median(values) <= high <= max(values)


# Differences

X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": X, "b": 3.0}, ""),
        ({"a": X + 1e-6, "b": 3.0}, ""),
        ({"b": 3.0, "a": X}, ""),
        ({"a": X}, "the result should have a, b."),
        ([X, 3.0], "the result should have a, b."),
        ({"a": X[:1], "b": 3.0}, "a has the shape [1], where [2] is expected."),
        ({"a": X.double(), "b": 3.0}, "a is torch.float64, where torch.float32 is expected."),
        ({"a": X + 0.5, "b": 3.0}, "a is off by 0.5, where numbers go up to 2."),
        ({"a": X * float("nan"), "b": 3.0}, "a holds numbers that are not finite."),
        ({"a": [1.0, 2.0], "b": 3.0}, "a is a list, where a Tensor is expected."),
        ({"a": X, "b": 3.5}, "b is off by 0.5, where numbers go up to 3."),
        ({"a": X.to("meta"), "b": 3.0}, "a is on meta, where cpu is expected."),
    ],
)
def test_a_difference_is_named(found, said):
    assert difference({"a": X, "b": 3.0}, found, 1e-4) == said


# Memory


@pytest.fixture
def layer():
    layer = torch.nn.Module()
    layer.register_buffer("W", torch.randn(32, 16).half())
    return layer


def rows(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(4, 16, requires_grad=True),)


def restoring(layer):
    return lambda x: x @ layer.W.float().T


class Hung(torch.autograd.Function):
    """Keeps the restored weight where no hook looks."""

    @staticmethod
    def forward(ctx, x, W):
        ctx.restored = W.float()
        return x @ ctx.restored.T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.restored, None


class Saved(Hung):
    """Keeps what the layer holds anyway."""

    @staticmethod
    def forward(ctx, x, W):
        ctx.save_for_backward(W)
        return x @ W.float().T

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].float(), None


def test_bytes_are_counted_wherever_they_are_kept(layer):
    restored = 32 * 16 * 4
    assert kept_for_backward(layer, restoring(layer), rows(0)) == restored
    assert kept_for_backward(layer, lambda x: Hung.apply(x, layer.W), rows(0)) == restored
    assert kept_for_backward(layer, lambda x: Saved.apply(x, layer.W), rows(0)) == 0


def test_smaller_is_right_only_with_the_same_gradients(layer):
    def ask(attempt):
        return smaller_than(4, restoring(layer), attempt, rows, 0.1, layer)

    assert ask(lambda x: Saved.apply(x, layer.W)).startswith(
        "Exercise 4: right. The same result and gradients, and 0 MB"
    )
    assert ask(lambda x: Hung.apply(x, layer.W)).startswith(
        "Exercise 4: not yet. Result and gradients are the same"
    )
    assert "gradient 1 is off by" in ask(lambda x: restoring(layer)(x).detach())
    assert "the result is off by" in ask(lambda x: 2 * restoring(layer)(x))


def test_a_wrong_solution_ends_the_lab_and_an_undecided_one_does_not(capsys):
    for said in ("Exercise 1: right. So it is.", "Exercise 1: inconclusive. Noise."):
        solved(said)
        assert capsys.readouterr().out == f"{said}\n"
    for said in ("Exercise 1: not yet. All right otherwise.", "right"):
        with pytest.raises(AssertionError, match=said.split(".")[0]):
            solved(said)
