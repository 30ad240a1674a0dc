"""What judges go by: the runs that a claim needs, asked for by name, and numbers with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from labutils.results.claims import Claim
from labutils.results.records import Run, summarise

CONFIRMED = "confirmed"

REFUTED = "refuted"

INCONCLUSIVE = "inconclusive"

NOT_TESTABLE = "not testable here"

VERDICTS = (CONFIRMED, REFUTED, INCONCLUSIVE, NOT_TESTABLE)

FEWEST_SAMPLES = 3
"""Below this many samples a run has no spread to speak of."""

Runs = Mapping[tuple[str, str], Run]


class Finding(NamedTuple):
    """What a judge found: the verdict, the measured value as text, and the reason in a sentence."""

    verdict: str
    shown: str
    why: str


class NotTestable(Exception):
    """The runs on record can't answer; the message says why and what would."""


class Spread(NamedTuple):
    """A measured quantity: its 10th percentile, median and 90th percentile, and how many samples
    they come from.
    """

    low: float
    median: float
    high: float
    n: int

    def overlaps(self, other: Spread) -> bool:
        """Whether the two p10-p90 ranges share a point: then the difference doesn't exceed the
        spread.
        """
        return self.low <= other.high and other.low <= self.high


class Ratio(NamedTuple):
    """How many times as large a quantity is: least, by the medians (or the median, step by step),
    most.
    """

    low: float
    middle: float
    high: float
    paired: bool

    @property
    def unsure(self) -> bool:
        """Whether the range has 1 in it: then the two can't be told apart."""
        return self.low <= 1 <= self.high

    @property
    def why_unsure(self) -> str:
        if self.paired:
            return f"Step by step, the ratio is {self.low:.2f} to {self.high:.2f}."
        return "The p10-p90 ranges overlap."


class Evidence:
    """The runs that one claim needs, asked for by name. Raises `NotTestable` where a run or a
    metric isn't there.

    It also refuses what can't be compared: GPU claims on a CPU, and runs of different scales,
    machines or workloads. Where a claim compares one change with another ("than_before" to
    "than_after"), each may be on its own workload.
    """

    def __init__(self, claim: Claim, runs: Runs) -> None:
        self.lab, self.how = claim.lab, claim.how
        self.runs = {name: runs[claim.lab, name] for name in claim.runs if (claim.lab, name) in runs}
        if claim.runs and not self.runs:
            raise NotTestable(_nothing_on_record(claim, runs))
        if claim.needs == "gpu" and not all(as_mapping(run.machine).get("gpu") for run in self.runs.values()):
            raise NotTestable("It is a statement about a GPU, and these runs were made without one.")
        self._check_comparable()

    def _check_comparable(self) -> None:
        for what, value_of in _MUST_AGREE.items():
            for compared in self._changes() if what == "workload" else [self.runs]:
                values = sorted({str(value_of(self.runs[name])) for name in compared if name in self.runs})
                if len(values) > 1:
                    raise NotTestable(
                        f"The runs on record differ in {what} ({', '.join(values)}) and can't be "
                        "compared. "
                        f"Type: labutils run {self.lab}"
                    )

    def _changes(self) -> list[Iterable[str]]:
        """The names of the runs that are compared with each other: all, or those of each of two
        changes.
        """
        if "than_before" not in self.how:
            return [self.runs]
        return [[self.how[end] for end in ends] for ends in (("before", "after"), ("than_before", "than_after"))]

    @property
    def scale(self) -> str:
        """The scale at which the runs were made."""
        return next(iter(self.runs.values())).scale

    @property
    def beside(self) -> int:
        """How many other labs may have been running while these runs were measured."""
        return int(max((as_number(run.beside) or 0 for run in self.runs.values()), default=0))

    @property
    def disturbance(self) -> str:
        """What that means. The spread doesn't tell of it: a neighbour that begins or ends shifts
        all that follows.
        """
        labs = "another lab" if self.beside == 1 else f"{self.beside} other labs"
        return f"But {labs} ran beside it, which may have shifted it. Alone: labutils run {self.lab} --force"

    def run(self, name: str) -> Run:
        """The run of that name."""
        if name not in self.runs:
            raise NotTestable(f"The run {name!r} is not on record. Type: labutils run {self.lab}")
        return self.runs[name]

    def has(self, name: str, metric: str) -> bool:
        """Whether that run is there and has a usable number under that name."""
        return name in self.runs and as_number(as_mapping(self.runs[name].metrics).get(metric)) is not None

    def number(self, name: str, metric: str) -> float:
        """One number of a run, the median where it is a summary."""
        found = as_number(as_mapping(self.run(name).metrics).get(metric))
        if found is None:
            raise NotTestable(self.nothing(name, metric))
        return found

    def samples(self, name: str, metric: str) -> list[float]:
        """The numbers among a run's samples of a metric, in their order."""
        return [s for s in map(as_number, as_list(as_mapping(self.run(name).samples).get(metric))) if s is not None]

    def spread(self, name: str, metric: str) -> Spread:
        """A metric with its spread: from its summary, else from its samples, else the bare number.
        """
        run = self.run(name)
        summary = as_mapping(run.metrics).get(metric)
        if not isinstance(summary, Mapping):
            samples = self.samples(name, metric)
            summary = summarise(samples) if samples else self._rate(run, metric)
        if summary is not None:
            parts = [as_number(summary.get(part)) for part in ("p10", "median", "p90", "n")]
            if None not in parts and parts[0] <= parts[1] <= parts[2]:
                return Spread(parts[0], parts[1], parts[2], int(parts[3]))
        value = self.number(name, metric)
        return Spread(value, value, value, 1)

    def _rate(self, run: Run, metric: str) -> dict[str, float] | None:
        """The spread of the examples a second of steps that all take in as many: that of their
        times.
        """
        step, value = as_mapping(as_mapping(run.metrics).get("step_ms")), as_mapping(run.metrics).get(metric)
        parts = [as_number(step.get(part)) for part in ("p10", "median", "p90", "n")]
        alike = "tokens" not in as_mapping(run.samples) and all(parts)
        if metric != "examples_per_s" or not alike or not (rate := as_number(value)):
            return None
        p10, median, p90, n = parts
        return {"p10": rate * median / p90, "median": rate, "p90": rate * median / p10, "n": n}

    def duration(self, name: str, metric: str = "step_ms") -> Spread:
        """The spread of a time above 0 that was sampled often enough."""
        spread = self.spread(name, metric)
        if spread.low <= 0:
            raise NotTestable(f"The run {name!r} recorded {metric} = {spread.low:g}, which is no duration.")
        if spread.n < FEWEST_SAMPLES:
            raise NotTestable(
                f"The run {name!r} has {spread.n} sample(s) of {metric}; a spread takes at least "
                f"{FEWEST_SAMPLES}. "
                f"Type: labutils run {self.lab} --force"
                + (f" -p steps {FEWEST_SAMPLES}" if metric == "step_ms" else "")
            )
        return spread

    def ratio(self, before: str, after: str, metric: str = "step_ms") -> Ratio:
        """How many times `before`'s time `after` takes."""
        first, second = self.duration(before, metric), self.duration(after, metric)
        pairs = self._pairs(before, after, metric)
        if len(pairs) >= FEWEST_SAMPLES:
            found = summarise([late / early for early, late in pairs])
            return Ratio(found["p10"], found["median"], found["p90"], paired=True)
        return Ratio(second.low / first.high, second.median / first.median, second.high / first.low, paired=False)

    def _pairs(self, before: str, after: str, metric: str) -> list[tuple[float, float]]:
        """The times of two runs step by step; [] unless both took in the same, as far as the
        shorter one goes.
        """
        samples = [as_mapping(self.run(name).samples) for name in (before, after)]
        taken, times = ([as_list(of.get(key)) for of in samples] for key in ("useful_tokens", metric))
        steps = min(map(len, (*taken, *times)))
        known = all(as_number(x) for x in (*times[0][:steps], *times[1][:steps]))
        alike = taken[0][:steps] == taken[1][:steps]
        return list(zip(times[0][:steps], times[1][:steps], strict=True)) if known and alike else []

    def failure(self, name: str) -> str | None:
        """What the run failed with, or None where it succeeded.

        A lab that provokes a failure records the metrics `failed` (0 or 1) and `message`; else the
        status decides.
        """
        run = self.run(name)
        failed = as_number(as_mapping(run.metrics).get("failed"))
        if failed is None:
            if str(run.status).startswith("skipped"):
                raise NotTestable(self.nothing(name, "outcome"))
            failed = 0 if run.ok else 1
        return str(as_mapping(run.metrics).get("message") or run.status) if failed else None

    def nothing(self, name: str, metric: str) -> str:
        """The sentence that says that a run lacks a metric."""
        status = "" if self.runs[name].ok else f" ({self.runs[name].status})"
        return f"The run {name!r} recorded no usable {metric}{status}."


_MUST_AGREE: dict[str, Callable[[Run], Any]] = {
    "scale": lambda run: run.scale,
    "GPU": lambda run: as_mapping(run.machine).get("gpu", "none"),
    "workload": lambda run: run.workload,
    "data": lambda run: run.data,
}


def _nothing_on_record(claim: Claim, runs: Runs) -> str:
    """Why none of the claim's runs is on record, where its lab may have been run without them."""
    others = [run for (lab, _), run in runs.items() if lab == claim.lab]
    if not others:
        return f"No run on record. Type: labutils run {claim.lab}"
    if claim.needs == "gpu" and not any(as_mapping(run.machine).get("gpu") for run in others):
        return "It is a statement about a GPU, and these runs were made without one."
    return (
        f"Lab {claim.lab} has made none of the runs that it takes ({', '.join(claim.runs)}): they "
        "need another "
        "machine, a larger scale or one of the lab's options, which its parameters cell lists."
    )


def as_number(value: Any) -> float | None:
    """`value` as a finite float (a summary's median), or None where it is nothing of the kind."""
    if isinstance(value, Mapping):
        value = value.get("median")
    if not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object of JSON; a record edited by hand may hold anything."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
