"""Numbers with their intervals, against numpy and against runs whose effect is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.results.effects import STEADY, Effect, NotTestable, effect, interval, time_effect
from labutils.results.records import Run, summarise


def run_of(steps, rounds=None, tokens=None, metric="step_ms", **metrics) -> Run:
    samples = {metric: list(steps)}
    samples |= {"round": list(rounds)} if rounds is not None else {}
    samples |= {"useful_tokens": list(tokens)} if tokens is not None else {}
    tags = {"experiment": "x"}
    return Run("03", "x", tags=tags, metrics={metric: summarise(steps)} | metrics, samples=samples)


def in_rounds(factor: float, noise: float, seed: int) -> Run:
    """Eight rounds of three steps around 100 ms times `factor`."""
    draws = np.random.default_rng(seed)
    rounds = [one for one in range(8) for _ in range(3)]
    return run_of([100 * factor * (1 + noise * draws.normal()) for _ in rounds], rounds)


def test_the_effect_is_the_median_of_the_ratios_of_round_medians():
    base, changed = in_rounds(1, 0.1, 3), in_rounds(1.2, 0.1, 4)
    medians = [
        np.median(np.reshape(run.samples["step_ms"], (8, 3)), axis=1) for run in (base, changed)
    ]
    assert effect(base, changed).value == pytest.approx(np.median(medians[1] / medians[0]))


def test_an_interval_covers_the_truth_95_times_of_100_or_more():
    """A bootstrap over eight rounds is a little narrow; it must still cover nine times of ten."""
    truth = 1.1
    hits = [
        found.low <= truth <= found.high
        for seed in range(100)
        for found in [effect(in_rounds(1, 0.03, 2 * seed), in_rounds(truth, 0.03, 2 * seed + 1))]
    ]
    assert sum(hits) >= 90


def test_the_base_again_is_the_noise_floor():
    base, again = in_rounds(1, 0.001, 7), in_rounds(1.02, 0.001, 8)
    floor = effect(base, in_rounds(1.01, 0.001, 9), (base, again))
    assert floor.again and floor.noise[1] == pytest.approx(1.02, abs=0.002)
    assert floor.low > 1 and floor.direction == 0 and not floor.unsteady
    assert effect(base, in_rounds(1.2, 0.001, 9), (base, again)).direction == 1
    assert effect(base, in_rounds(1.5, 0.001, 9), (base, in_rounds(1.05, 0.001, 8))).unsteady
    assert time_effect(base, in_rounds(1.5, 0.001, 9), in_rounds(1.05, 0.001, 8)).unsteady


def test_rounds_of_different_comparisons_are_no_pairs():
    """A machine that slows down from round to round: the n-th rounds were not at the same time."""
    drift = [100.0 * 1.1**n for n in range(8)]
    base, same, other = (
        run_of(drift, rounds=range(8)),
        run_of([1.2 * ms for ms in drift], rounds=range(8)),
        run_of([1.2 * ms for ms in drift], rounds=range(8)),
    )
    base.comparison, same.comparison, other.comparison = "a", "a", "b"
    assert effect(base, same).low == pytest.approx(1.2) == effect(base, same).high
    assert effect(base, other).low < 1 < effect(base, other).high
    steady, later = in_rounds(1, 0.01, 11), in_rounds(1.012, 0.001, 2)
    later.comparison = "b"  # the base again saw nothing of that time
    assert effect(steady, later, (steady, in_rounds(1, 0.0001, 3))).direction == 0
    base.comparison = other.comparison = ""  # a record from before comparisons had an id
    assert effect(base, other).high == pytest.approx(1.2)


def test_without_rounds_the_base_s_own_spread_is_the_noise():
    base = run_of([100, 90, 110, 95, 105, 100])
    found = effect(base, run_of([93, 94, 95, 96, 97, 98]))
    assert not found.again and found.noise == pytest.approx(
        tuple(np.quantile(base.samples["step_ms"], (0.1, 0.9)) / 100)
    )
    assert found.direction == 0 and effect(base, run_of([70, 71, 72, 70])).direction == -1


@pytest.mark.parametrize("rounds", [None, [0] * 8])
def test_steps_on_the_same_batches_are_compared_one_by_one(rounds):
    """`train` keeps a round for each sample, too: all of them are of round 0."""
    tokens = [1000, 2400, 1300, 2100, 1700, 1100, 2300, 1600]
    base = run_of([0.2 * t for t in tokens], rounds, tokens)
    slow = run_of([0.26 * t for t in (*tokens, 900)], rounds and [0] * 9, [*tokens, 900])
    found = effect(base, slow, (base, base))
    assert found.value == found.low == pytest.approx(1.3) and found.direction == 1
    assert found.noise == (rounds and (1, 1))  # one round of the base again tells enough
    other = run_of([0.26 * t for t in reversed(tokens)], rounds, tokens[::-1])
    assert effect(base, other).direction == 0


def test_counts_are_exact_and_single_times_are_not():
    runs = [Run("03", "x", metrics={"peak_gb": gb, "first_step_s": gb}) for gb in (10, 12)]
    memory, start = effect(*runs, metric="peak_gb"), effect(*runs, metric="first_step_s")
    assert memory.exact and memory.value == 1.2 and memory.direction == 1
    assert (start.low, start.high) == pytest.approx((1.2 * (1 - STEADY), 1.2 * (1 + STEADY)))
    none = Run("03", "x", metrics={"lost": 0})
    assert effect(none, Run("03", "x", metrics={"lost": 3}), metric="lost").value == math.inf
    with pytest.raises(NotTestable):
        effect(none, none, metric="lost")


@pytest.mark.parametrize("steps", [[], [1, 2], [0, 0, 0], [-1, -1, -1]])
def test_what_is_no_time_is_no_effect(steps):
    broken = Run("03", "x", metrics={"step_ms": summarise(steps) if steps else None})
    broken.samples["step_ms"] = steps
    assert time_effect(run_of([1, 2, 3]), broken) is None
    assert time_effect(broken, run_of([1, 2, 3])) is None


def test_an_interval_of_one_run_is_the_bootstrap_of_its_median():
    low, high = interval(run_of([10, 11, 12, 13, 14]), "step_ms")[1:]
    assert 10 <= low < 12 < high <= 14
    assert interval(Run("03", "x", metrics={"share": 0.5}), "share") == (0.5, 0.5, 0.5)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 1e6), min_size=3, max_size=9), st.floats(0.1, 10))
def test_an_interval_holds_its_value_and_text_has_its_sign(steps, factor):
    found = effect(run_of(steps), run_of([factor * step for step in steps]))
    assert found.low <= found.high and found.value > 0
    if found.direction:
        assert (found.value > 1) == (found.direction > 0)
        assert found.value >= 3 or found.text().startswith("+" if found.value >= 1 else "-")


def test_text_has_no_more_digits_than_the_interval():
    assert Effect(0.57, 0.55, 0.6).text() == "-43 % (-45 to -40 %)"
    assert Effect(0.9961, 0.9960, 0.9962).text() == "-0.4 % (-0.4 to -0.4 %)"
    assert Effect(212.3, 206, 218).text() == "212x (206 to 218x)"
    assert Effect(1.2, 1.2, 1.2).text() == "+20.0 %"


@pytest.mark.parametrize("of_the_base", [True, False])
def test_a_base_measured_twice_is_a_noise_floor_of_what_was_sampled_only(of_the_base):
    base, changed = in_rounds(1, 0.01, 1), in_rounds(1.5, 0.01, 2)
    base.metrics["first_step_s"], changed.metrics["first_step_s"] = 1.0, 70.0
    again = in_rounds(1, 0.01, 3)
    again.metrics |= {"first_step_s": 1.0} if of_the_base else {}
    compared = effect(base, changed, (base, again), "first_step_s")
    assert compared.value == pytest.approx(70) and not compared.unsteady
