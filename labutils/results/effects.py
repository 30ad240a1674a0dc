"""Measured numbers with their intervals: one run's metric, or one run's over another's.

It may import records and recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labutils.recipe import is_number
from labutils.results.records import Run

FEWEST_SAMPLES = 3
"""A time from fewer samples has no interval to speak of."""
STEADY = 0.03
"""A machine is steady if its base, measured twice, differs by at most this share."""
RESAMPLES = 2000
Twice = tuple[Run, Run] | None
"""A base, and the same measured again."""
TIMES = ("_ms", "_s", "utilization", "busy_share", "idle_share", "over_bf16")
"""Endings of metrics that depend on the clock; all others are counted, and exact."""


class NotTestable(Exception):
    """The runs on record can't answer. The message says why, and what would."""


@dataclass(frozen=True)
class Effect:
    """How many times as large a metric is in one run as in another.

    `low` and `high` bound the 95 % interval. `noise` is the same interval of the base measured
    again over the base; where that wasn't measured, the base's own p10 to p90 over its median
    stands in. Where the two runs are of different comparisons, it covers both. `again` says
    whether the base was measured again. `base` and `changed` are the two values themselves.
    """

    value: float
    low: float
    high: float
    noise: tuple[float, float] | None = None
    base: float = math.nan
    changed: float = math.nan
    again: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval, widened by the noise. Noise hides as much on either side: which of the
        base's visits was the slower one is chance.
        """
        low, high = self.noise or (1.0, 1.0)
        floor = max(high, 1 / low) if low > 0 else math.inf
        return self.low / floor, self.high * floor

    @property
    def direction(self) -> int:
        """-1 for surely less, 1 for surely more, 0 where the interval or the noise hides it."""
        low, high = self.bounds
        return (low > 1) - (high < 1)

    @property
    def unsteady(self) -> bool:
        """Whether the machine was too unsteady to say anything about time."""
        return self.again and max(abs(end - 1) for end in self.noise or ()) > STEADY

    @property
    def exact(self) -> bool:
        """Whether the two values were counted and not timed."""
        return self.low == self.high

    def text(self) -> str:
        """The change with its interval: "-43 % (-45 to -40 %)", or "212x (206 to 218x)"."""
        if self.value == math.inf:
            return "from 0"
        ends = (self.value, self.low, self.high)
        unit, told = "x", [f"{x:.3g}" for x in ends]
        if self.value < 3:
            places = 0 if 100 * (self.high - self.low) >= 1 or self.value >= 2 else 1
            unit, told = " %", [f"{100 * (x - 1):+.{places}f}" for x in ends]
        return told[0] + unit + ("" if self.exact else f" ({told[1]} to {told[2]}{unit})")


def named(tags: Mapping[str, Any]) -> str:
    """Tags as a person reads them. A run's name may be anything."""
    return ", ".join(f"{name} {value}" for name, value in tags.items())


def number(value: Any) -> float | None:
    """`value` as a finite float, the median of a summary; None where it is nothing of the kind."""
    value = value.get("median") if isinstance(value, Mapping) else value
    return float(value) if is_number(value) else None


def metric_of(run: Run, metric: str) -> float:
    """One number of a run. Raises `NotTestable` where it recorded none."""
    value = number(run.metrics.get(metric))
    if value is None:
        status = "" if run.ok else f" ({run.status})"
        raise NotTestable(f"The run with {named(run.tags)} recorded no usable {metric}{status}.")
    return value


def effect(base: Run, changed: Run, twice: Twice = None, metric: str = "step_ms") -> Effect:
    """`metric` of `changed` over that of `base`, with a 95 % bootstrap interval.

    Runs that were measured in rounds are compared round by round: the median over rounds of the
    ratio of round medians. Runs that took the same batches, of various lengths, are compared step
    by step, all others by their medians. `twice` is a base that was measured twice in the
    rounds of this comparison, or in those of another beside runs that were timed by hand: there the
    noise is that of its steps. Raises `NotTestable` where a run lacks the metric, or has too few
    samples of a time.
    """
    ratio, pairs = _ratio(base, changed, metric)
    samples = _samples(base, metric)
    # Timed by hand, beside another comparison.
    beside = twice and twice[0].comparison != base.comparison and metric.endswith(TIMES)
    clock = "step_ms" if beside else metric
    again = bool(twice) and all(
        _numbers(run, "round") and len(_samples(run, clock)) >= FEWEST_SAMPLES for run in twice
    )
    noise = _ratio(*twice, clock)[0][1:] if again else None
    apart = base.comparison != changed.comparison  # base again saw nothing of that time
    if not pairs and (apart or not again) and len(samples) >= FEWEST_SAMPLES:
        low, high = map(float, np.quantile(samples, (0.1, 0.9)) / np.median(samples))
        noise = (min(low, noise[0]), max(high, noise[1])) if noise else (low, high)
    return Effect(*ratio, noise, metric_of(base, metric), metric_of(changed, metric), again)


def time_effect(base: Run, changed: Run, again: Run | None = None) -> Effect | None:
    """The effect on the time of a step; None where either wasn't timed often enough."""
    try:
        return effect(base, changed, (base, again) if again else None)
    except NotTestable:
        return None


def interval(run: Run, metric: str) -> tuple[float, float, float]:
    """A metric's median and its interval. A time without samples is sure to `STEADY` only."""
    samples = _samples(run, metric)
    if len(samples) >= FEWEST_SAMPLES:
        return (float(np.median(samples)), *_bootstrap(samples))
    value = metric_of(run, metric)
    margin = STEADY * abs(value) if metric.endswith(TIMES) else 0.0
    return value, value - margin, value + margin


def _ratio(base: Run, changed: Run, metric: str) -> tuple[tuple[float, float, float], bool]:
    """The ratio with its interval, and whether it is one of pairs."""
    early, late = metric_of(base, metric), metric_of(changed, metric)
    samples = [_samples(run, metric) for run in (base, changed)]
    timed = metric.endswith(TIMES)
    if min(early, late, *samples[0], *samples[1]) <= 0 and (timed or late <= early == 0):
        raise NotTestable(f"{metric} is 0 or less, of which nothing can be a share.")
    value = late / early if early > 0 else math.inf
    if not all(samples):
        margin = STEADY if timed else 0.0
        return (value, value * (1 - margin), value * (1 + margin)), False
    if (fewest := min(map(len, samples))) < FEWEST_SAMPLES:
        raise NotTestable(f"{fewest} sample(s) of {metric}; an interval takes {FEWEST_SAMPLES}.")
    if pairs := _pairs((base, changed), samples):
        ratios = [late / early for early, late in pairs]
        return (float(np.median(ratios)), *_bootstrap(ratios)), True
    return (float(np.median(samples[1]) / np.median(samples[0])), *_bootstrap(*samples)), False


def _samples(run: Run, metric: str) -> list[float]:
    """The samples behind a time or a summary. A count has none, whatever its parts."""
    timed = isinstance(run.metrics.get(metric), Mapping) or metric.endswith(TIMES)
    return _numbers(run, metric) if timed else []


def _numbers(run: Run, name: str) -> list[float]:
    """A run's samples of that name; [] where one of them is no number."""
    samples = run.samples.get(name)
    values = [number(one) for one in samples] if isinstance(samples, list | tuple) else []
    return [] if None in values else values


def _pairs(runs: Sequence[Run], samples: Sequence[list[float]]) -> list[tuple[float, float]]:
    """The values of two runs that belong together: of a round of one comparison, or of a batch
    where batches differ in their tokens. [] where too few do.
    """
    rounds = [_numbers(run, "round") for run in runs]
    taken = [_numbers(run, "useful_tokens") for run in runs]
    pairs = []
    # Records from before there was such an id have "": they are paired as they always were.
    interleaved = runs[0].comparison == runs[1].comparison
    if interleaved and all(
        len(of) == len(those) for of, those in zip(rounds, samples, strict=True)
    ):
        first, second = map(_by_round, samples, rounds)
        pairs = [(first[one], second[one]) for one in first if one in second]
    if len(pairs) < FEWEST_SAMPLES and all(taken) and max(taken[0]) > (1 + STEADY) * min(taken[0]):
        steps = min(map(len, (*samples, *taken)))
        alike = taken[0][:steps] == taken[1][:steps]
        pairs = list(zip(*(those[:steps] for those in samples), strict=True)) if alike else []
    return pairs if len(pairs) >= FEWEST_SAMPLES else []


def _by_round(samples: Sequence[float], rounds: Sequence[float]) -> dict[float, float]:
    """Round -> the median of its samples."""
    values, of = np.asarray(samples), np.asarray(rounds)
    return {one: float(np.median(values[of == one])) for one in rounds}


def saved(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """The share of a step that is saved, the median over rounds, and its 95 % interval.

    before, after: milliseconds of the steps of each round. Rounds are drawn anew, and the steps in
    them: what differs from round to round counts as well as what differs from step to step.
    """
    draw = np.random.default_rng(0)

    def medians(samples: Sequence[float]) -> np.ndarray:
        return np.median(draw.choice(samples, (RESAMPLES, len(samples))), axis=1)

    rounds = list(zip(before, after, strict=True))
    gains = np.array([1 - medians(late) / medians(early) for early, late in rounds])
    chosen = draw.integers(0, len(rounds), gains.shape)
    drawn = np.median(np.take_along_axis(gains, chosen, axis=0), axis=0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    gain = np.median([1 - np.median(late) / np.median(early) for early, late in rounds])
    return float(gain), float(low), float(high)


def _bootstrap(*series: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of a series, or of the second's median over the first's.

    The draws are the same ones each time, so that a verdict says the same tomorrow.
    """
    medians = []
    for seed, values in enumerate(series):
        draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
        medians.append(np.median(np.asarray(values, dtype=float)[draws], axis=1))
    spread = medians[-1] / medians[0] if len(medians) > 1 else medians[0]
    low, high = np.quantile(spread, (0.025, 0.975))
    return float(low), float(high)
