"""Measured numbers with their intervals: one run's metric, or one run's over another's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labutils.results.records import Run

FEWEST_SAMPLES = 3
"""A time from fewer samples has no interval to speak of."""
STEADY = 0.03
"""A machine is steady if its base, measured twice, differs by at most this share."""
RESAMPLES = 2000
TIMES = ("_ms", "_s", "utilization", "busy_share", "idle_share", "over_bf16")
"""Endings of metrics that depend on the clock; all others are counted, and exact."""


class NotTestable(Exception):
    """The runs on record can't answer. The message says why, and what would."""


@dataclass(frozen=True)
class Effect:
    """How many times as large a metric is in one run as in another.

    `low` and `high` bound the 95 % interval. `noise` is the same interval of the base measured
    again over the base; where that wasn't measured, the base's own p10 to p90 over its median
    stands in. `again` says which. `base` and `changed` are the two values themselves.
    """

    value: float
    low: float
    high: float
    noise: tuple[float, float] | None = None
    base: float = math.nan
    changed: float = math.nan
    again: bool = False

    @property
    def direction(self) -> int:
        """-1 for surely less, 1 for surely more, 0 where the interval or the noise hides it."""
        floor_low, floor_high = self.noise or (1.0, 1.0)
        return (self.low > max(1.0, floor_high)) - (self.high < min(1.0, floor_low))

    @property
    def unsteady(self) -> bool:
        """Whether the machine was too unsteady to say anything about time."""
        low, high = self.noise or (1.0, 1.0)
        return self.again and not (low >= 1 - STEADY and high <= 1 + STEADY)

    @property
    def exact(self) -> bool:
        """Whether the two values were counted and not timed."""
        return self.low == self.high

    def sentence(self) -> str:
        """The change with its interval, and whether the noise hides it."""
        return self.text() + ("" if self.direction else ", within the noise")

    def text(self) -> str:
        """The change with its interval: "-43 % (-45 to -40)", or "212x (206 to 218)"."""
        if self.value == math.inf:
            return "from nothing"
        if self.value >= 3:
            low, value, high = self.low, self.value, self.high
        else:
            low, value, high = (100 * (x - 1) for x in (self.low, self.value, self.high))
        width = high - low
        places = 0 if width >= 1 or abs(value) >= 100 else 1
        unit, sign = ("x", "") if self.value >= 3 else (" %", "+")
        told = f"{value:{sign}.{places}f}{unit}"
        return told if self.exact else f"{told} ({low:{sign}.{places}f} to {high:{sign}.{places}f})"


def number(value: Any) -> float | None:
    """`value` as a finite float, the median of a summary; None where it is nothing of the kind."""
    if isinstance(value, Mapping):
        value = value.get("median")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def named(tags: Mapping[str, Any]) -> str:
    """Tags as a person reads them. A run's name may be anything."""
    return ", ".join(f"{name} {value}" for name, value in tags.items())


def metric_of(run: Run, metric: str) -> float:
    """One number of a run. Raises `NotTestable` where it recorded none."""
    value = number(run.metrics.get(metric))
    if value is None:
        status = "" if run.ok else f" ({run.status})"
        raise NotTestable(f"The run with {named(run.tags)} recorded no usable {metric}{status}.")
    return value


def samples_of(run: Run, metric: str) -> list[float]:
    """The samples behind a metric; of a rate those of its steps. [] where it was not sampled."""
    if not isinstance(run.metrics.get(metric), Mapping) and not metric.endswith(TIMES):
        return []  # a count, whatever its parts
    if metric == "examples_per_s" and metric not in run.samples and "tokens" not in run.samples:
        rate, step = number(run.metrics.get(metric)), number(run.metrics.get("step_ms"))
        return [rate * step / ms for ms in _numbers(run, "step_ms")] if rate and step else []
    return _numbers(run, metric)


def _numbers(run: Run, name: str) -> list[float]:
    """A run's samples of that name; [] where one of them is no number."""
    samples = run.samples.get(name)
    values = [number(one) for one in samples] if isinstance(samples, list | tuple) else []
    return [] if None in values else values


def effect(base: Run, changed: Run, again: Run | None = None, metric: str = "step_ms") -> Effect:
    """`metric` of `changed` over that of `base`, with a 95 % bootstrap interval.

    Runs that were measured in rounds are compared round by round: the median over rounds of the
    ratio of round medians. Runs that took the same batches are compared step by step, all others
    by their medians. `again` is the base, measured a second time in the same rounds. Raises
    `NotTestable` where a run lacks the metric, or has too few samples of a time.
    """
    value, low, high = _ratio(base, changed, metric)
    values = metric_of(base, metric), metric_of(changed, metric)
    samples = samples_of(base, metric)
    if again is not None and _numbers(base, "round") and _numbers(again, "round"):
        return Effect(value, low, high, _ratio(base, again, metric)[1:], *values, again=True)
    if len(samples) < FEWEST_SAMPLES or _pairs((base, changed), metric):
        return Effect(value, low, high, None, *values)
    spread = np.quantile(samples, (0.1, 0.9)) / np.median(samples)
    return Effect(value, low, high, (float(spread[0]), float(spread[1])), *values)


def time_effect(base: Run, changed: Run, again: Run | None = None) -> Effect | None:
    """The effect on the time of a step; None where either wasn't timed often enough."""
    try:
        return effect(base, changed, again)
    except NotTestable:
        return None


def interval_of(run: Run, metric: str) -> tuple[float, float, float]:
    """The metric's median and its interval. A time without samples is sure to `STEADY` only."""
    samples = samples_of(run, metric)
    if len(samples) >= FEWEST_SAMPLES:
        medians = np.median(_resampled(samples), axis=1)
        return (float(np.median(samples)), *_middle_95(medians))
    value = metric_of(run, metric)
    margin = STEADY * abs(value) if metric.endswith(TIMES) else 0.0
    return value, value - margin, value + margin


def _ratio(base: Run, changed: Run, metric: str) -> tuple[float, float, float]:
    values = [metric_of(run, metric) for run in (base, changed)]
    if values[0] == 0 and not metric.endswith(TIMES):
        value = math.inf if values[1] > 0 else 1.0
        return value, value, value
    if min(values) <= 0:
        raise NotTestable(f"{metric} is {min(values):g}, of which nothing can be a share.")
    samples = [samples_of(run, metric) for run in (base, changed)]
    if not all(samples):
        margin = STEADY if metric.endswith(TIMES) else 0.0
        value = values[1] / values[0]
        return value, value * (1 - margin), value * (1 + margin)
    for run, those in zip((base, changed), samples, strict=True):
        if len(those) < FEWEST_SAMPLES:
            raise NotTestable(
                f"The run with {named(run.tags)} has {len(those)} sample(s) of {metric}; an interval takes "
                f"{FEWEST_SAMPLES}. Type: labutils run {run.lab} --force"
            )
    if pairs := _pairs((base, changed), metric):
        ratios = [late / early for early, late in pairs]
        medians = np.median(_resampled(ratios), axis=1)
        return (float(np.median(ratios)), *_middle_95(medians))
    early, late = (np.median(_resampled(those, seed), axis=1) for seed, those in enumerate(samples))
    return (float(np.median(samples[1]) / np.median(samples[0])), *_middle_95(late / early))


def _pairs(runs: Sequence[Run], metric: str) -> list[tuple[float, float]]:
    """The values of two runs that belong together: of a round, or of a batch where batches differ
    in their tokens. [] where too few do.
    """
    samples = [samples_of(run, metric) for run in runs]
    rounds = [_numbers(run, "round") for run in runs]
    taken = [_numbers(run, "useful_tokens") for run in runs]
    pairs = []
    if all(len(of) == len(those) > 0 for of, those in zip(rounds, samples, strict=True)):
        first, second = (_by_round(those, of) for those, of in zip(samples, rounds, strict=True))
        pairs = [(first[one], second[one]) for one in first if one in second]
    elif all(taken) and max(taken[0]) > (1 + STEADY) * min(taken[0]):
        steps = min(map(len, (*samples, *taken)))
        if taken[0][:steps] == taken[1][:steps]:
            pairs = list(zip(samples[0][:steps], samples[1][:steps], strict=True))
    return pairs if len(pairs) >= FEWEST_SAMPLES else []


def _by_round(samples: Sequence[float], rounds: Sequence[float]) -> dict[float, float]:
    """Round -> the median of its samples."""
    return {
        one: float(np.median([v for v, of in zip(samples, rounds, strict=True) if of == one]))
        for one in rounds
    }


def _resampled(values: Sequence[float], seed: int = 0) -> np.ndarray:
    """`RESAMPLES` draws of as many values with replacement, the same ones each time."""
    chosen = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return np.asarray(values, dtype=float)[chosen]


def _middle_95(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
