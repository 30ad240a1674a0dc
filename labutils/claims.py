"""Verdicts: what a machine's runs say about a published claim.

A claim (`labutils.articles`) names its judge, one of the small functions below; each looks at the runs the claim needs
and returns a verdict, what was measured as text, and why. Four verdicts are possible:

- `confirmed`: the statement holds here, by more than the spread of the measurement;
- `refuted`: it doesn't hold here;
- `inconclusive`: the noise is larger than the effect;
- `not testable here`: this machine, or the runs on record, can't answer; the reason says what would.

Effects are ratios of medians with an interval: the best and the worst ratio that the p10-p90 ranges of the two runs
allow. Where both runs took the same batches in the same order, whose lengths may differ by more than the effect, each
step is compared with its counterpart, and the ratios have a median and a p10-p90 range of their own. Absolute times of
another machine are printed beside ours and judged by order of magnitude only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from labutils import articles
from labutils.articles import Claim
from labutils.results import Run, summarise

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


@dataclass(frozen=True)
class Judgement:
    """One claim, its published value, and what the reference machine and this one say about it.

    `reference` and `here` are measured values as text, "" where there is none; `why` explains the verdict here,
    `reference_why` the reference's.
    """

    claim: Claim
    published: str
    reference: str
    here: str
    verdict: str
    reference_verdict: str
    why: str
    reference_why: str = ""


def judge(ids: str | Iterable[str] | None, here: Runs, reference: Runs) -> list[Judgement]:
    """Judge the claims of these `ids` (one, several, or None for all) by the runs of this machine and of the reference.

    Raises `ValueError` for an id that no article has. A missing or broken run never raises: it makes the claim
    `not testable here`, with what to run.
    """
    chosen = [ids] if isinstance(ids, str) else articles.claims() if ids is None else ids
    return [_judgement(articles.claim(id), here, reference) for id in chosen]


def assess(claim: Claim, runs: Runs) -> Finding:
    """What one set of runs says about one claim."""
    try:
        evidence = Evidence(claim, runs)
        finding = JUDGES[claim.judge](claim, evidence)
    except NotTestable as reason:
        return Finding(NOT_TESTABLE, "", str(reason))
    if evidence.beside and claim.judge not in UNDISTURBED and finding.verdict in (CONFIRMED, REFUTED):
        finding = finding._replace(verdict=INCONCLUSIVE, why=f"{finding.why} {evidence.disturbance}")
    if evidence.scale == "full" or claim.judge in ANY_SCALE:
        return finding
    return finding._replace(why=f"{finding.why} (At scale {evidence.scale}, not the article's own size.)")


def _judgement(claim: Claim, here: Runs, reference: Runs) -> Judgement:
    ours, theirs = assess(claim, here), assess(claim, reference)
    return Judgement(
        claim=claim,
        published=claim.published_text,
        reference=theirs.shown,
        here=ours.shown,
        verdict=ours.verdict,
        reference_verdict=theirs.verdict,
        why=ours.why,
        reference_why=theirs.why,
    )


# ---------------------------------------------------------------------------------------------------------- evidence


class NotTestable(Exception):
    """The runs on record can't answer; the message says why and what would."""


class Spread(NamedTuple):
    """A measured quantity: its 10th percentile, median and 90th percentile, and how many samples they come from."""

    low: float
    median: float
    high: float
    n: int

    def overlaps(self, other: Spread) -> bool:
        """Whether the two p10-p90 ranges share a point: then the difference doesn't exceed the spread."""
        return self.low <= other.high and other.low <= self.high


class Ratio(NamedTuple):
    """How many times as large a quantity is: least, by the medians (or the median, step by step), most."""

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
    """The runs that one claim needs, asked for by name. Raises `NotTestable` where a run or a metric isn't there.

    It also refuses what can't be compared: GPU claims on a CPU, and runs of different scales, machines or workloads.
    """

    def __init__(self, claim: Claim, runs: Runs) -> None:
        self.lab = claim.lab
        self.runs = {name: runs[claim.lab, name] for name in claim.runs if (claim.lab, name) in runs}
        if claim.runs and not self.runs:
            raise NotTestable(_nothing_on_record(claim, runs))
        if claim.needs == "gpu" and not all(_mapping(run.machine).get("gpu") for run in self.runs.values()):
            raise NotTestable("It is a statement about a GPU, and these runs were made without one.")
        self._check_comparable()

    def _check_comparable(self) -> None:
        for what, value_of in _MUST_AGREE.items():
            values = sorted({str(value_of(run)) for run in self.runs.values()})
            if len(values) > 1:
                raise NotTestable(
                    f"The runs on record differ in {what} ({', '.join(values)}) and can't be compared. "
                    f"Type: labutils run {self.lab}"
                )

    @property
    def scale(self) -> str:
        """The scale at which the runs were made."""
        return next(iter(self.runs.values())).scale

    @property
    def beside(self) -> int:
        """How many other labs may have been running while these runs were measured."""
        return int(max((_number(run.beside) or 0 for run in self.runs.values()), default=0))

    @property
    def disturbance(self) -> str:
        """What that means. The spread doesn't tell of it: a neighbour that begins or ends shifts all that follows."""
        labs = "another lab" if self.beside == 1 else f"{self.beside} other labs"
        return f"But {labs} ran beside it, which may have shifted it. Alone: labutils run {self.lab} --force"

    def run(self, name: str) -> Run:
        """The run of that name."""
        if name not in self.runs:
            raise NotTestable(f"The run {name!r} is not on record. Type: labutils run {self.lab}")
        return self.runs[name]

    def has(self, name: str, metric: str) -> bool:
        """Whether that run is there and has a usable number under that name."""
        return name in self.runs and _number(_mapping(self.runs[name].metrics).get(metric)) is not None

    def number(self, name: str, metric: str) -> float:
        """One number of a run, the median where it is a summary."""
        found = _number(_mapping(self.run(name).metrics).get(metric))
        if found is None:
            raise NotTestable(self.nothing(name, metric))
        return found

    def spread(self, name: str, metric: str) -> Spread:
        """A metric with its spread: from its summary, else from its samples, else the bare number."""
        run = self.run(name)
        summary = _mapping(run.metrics).get(metric)
        if not isinstance(summary, Mapping):
            samples = [s for s in map(_number, _list(_mapping(run.samples).get(metric))) if s is not None]
            summary = summarise(samples) if samples else None
        if summary is not None:
            parts = [_number(summary.get(part)) for part in ("p10", "median", "p90", "n")]
            if None not in parts and parts[0] <= parts[1] <= parts[2]:
                return Spread(parts[0], parts[1], parts[2], int(parts[3]))
        value = self.number(name, metric)
        return Spread(value, value, value, 1)

    def duration(self, name: str, metric: str = "step_ms") -> Spread:
        """The spread of a time above 0 that was sampled often enough."""
        spread = self.spread(name, metric)
        if spread.low <= 0:
            raise NotTestable(f"The run {name!r} recorded {metric} = {spread.low:g}, which is no duration.")
        if spread.n < FEWEST_SAMPLES:
            raise NotTestable(
                f"The run {name!r} has {spread.n} sample(s) of {metric}; a spread takes at least {FEWEST_SAMPLES}. "
                f"Type: labutils run {self.lab} --force -p steps {FEWEST_SAMPLES}"
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
        """The times of two runs step by step; [] unless both took in the same, as far as the shorter one goes."""
        samples = [_mapping(self.run(name).samples) for name in (before, after)]
        taken, times = ([_list(of.get(key)) for of in samples] for key in ("useful_tokens", metric))
        steps = min(map(len, (*taken, *times)))
        known = all(_number(x) for x in (*times[0][:steps], *times[1][:steps]))
        alike = taken[0][:steps] == taken[1][:steps]
        return list(zip(times[0][:steps], times[1][:steps], strict=True)) if known and alike else []

    def failure(self, name: str) -> str | None:
        """What the run failed with, or None where it succeeded.

        A lab that provokes a failure records the metrics `failed` (0 or 1) and `message`; else the status decides.
        """
        run = self.run(name)
        failed = _number(_mapping(run.metrics).get("failed"))
        if failed is None:
            if str(run.status).startswith("skipped"):
                raise NotTestable(self.nothing(name, "outcome"))
            failed = 0 if run.ok else 1
        return str(_mapping(run.metrics).get("message") or run.status) if failed else None

    def nothing(self, name: str, metric: str) -> str:
        """The sentence that says that a run lacks a metric."""
        status = "" if self.runs[name].ok else f" ({self.runs[name].status})"
        return f"The run {name!r} recorded no usable {metric}{status}."


_MUST_AGREE: dict[str, Callable[[Run], Any]] = {
    "scale": lambda run: run.scale,
    "GPU": lambda run: _mapping(run.machine).get("gpu", "none"),
    "workload": lambda run: run.workload,
    "data": lambda run: run.data,
}


def _number(value: Any) -> float | None:
    """`value` as a finite float (a summary's median), or None where it is nothing of the kind."""
    if isinstance(value, Mapping):
        value = value.get("median")
    if not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _nothing_on_record(claim: Claim, runs: Runs) -> str:
    """Why none of the claim's runs is on record, where its lab may have been run without them."""
    others = [run for (lab, _), run in runs.items() if lab == claim.lab]
    if not others:
        return f"No run on record. Type: labutils run {claim.lab}"
    if claim.needs == "gpu" and not any(_mapping(run.machine).get("gpu") for run in others):
        return "It is a statement about a GPU, and these runs were made without one."
    return (
        f"Lab {claim.lab} has made none of the runs that it takes ({', '.join(claim.runs)}): they need another "
        "machine, a larger scale or one of the lab's options, which its parameters cell lists."
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object of JSON; a record edited by hand may hold anything."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _figures(value: float) -> str:
    """All of a count up to a million, four figures or a decimal of another number."""
    if abs(value) < 1e6:
        return f"{value:,.0f}" if value == int(value) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------ judges


def count(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metrics"]` of `how["run"]` equal the published numbers, within `tolerance` (relative). Exact: no spread."""
    values = [evidence.number(claim.how["run"], metric) for metric in claim.how["metrics"]]
    pairs = list(zip(values, claim.published, strict=True))
    right = all(abs(value - published) <= claim.tolerance * abs(published) for value, published in pairs)
    shown = " → ".join(map(_figures, values))
    return Finding(
        CONFIRMED if right else REFUTED, shown, "Counted here." if right else f"Published: {claim.published_text}."
    )


def unchanged(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]`, a largest change, is exactly 0."""
    change = abs(evidence.number(claim.how["run"], claim.how["metric"]))
    if change == 0:
        return Finding(CONFIRMED, "change: 0", "Not one of the frozen weights moved.")
    return Finding(REFUTED, f"change: {change:.3g}", "Frozen weights moved.")


def speedup(claim: Claim, evidence: Evidence) -> Finding:
    """Ratio of `step_ms`, `before` / `after`, is the published one less `tolerance` (a share of its gain).

    A ratio that can't be told from 1 is never confirmed. Refuted if even the best one in its range falls short.
    """
    before, after = evidence.duration(claim.how["before"]), evidence.duration(claim.how["after"])
    published = claim.published[0] / claim.published[1]
    needed = 1 + (published - 1) * (1 - claim.tolerance)
    shrunk = evidence.ratio(claim.how["before"], claim.how["after"])
    ratio, best = 1 / shrunk.middle, 1 / shrunk.low
    shown = f"{_ms(before.median)} → {_ms(after.median)} ms ({ratio:.2f}x)"
    against = f"{ratio:.2f}x here against {published:.2f}x published"
    if best < needed:
        word = "slower, not faster" if shrunk.low > 1 else "less than was claimed"
        return Finding(REFUTED, shown, f"{against}: {word}.")
    if shrunk.unsure:
        return Finding(INCONCLUSIVE, shown, f"{against}. {shrunk.why_unsure}")
    if ratio >= needed:
        return Finding(CONFIRMED, shown, f"{against}.")
    return Finding(INCONCLUSIVE, shown, f"{against}; {needed:.2f}x would do, and the spread reaches {best:.2f}x.")


def faster(claim: Claim, evidence: Evidence) -> Finding:
    """`after` takes less time than `before`, by more than the spread."""
    return _ordered(evidence, claim.how["after"], claim.how["before"], claim.how["before"], claim.how["after"])


def slower(claim: Claim, evidence: Evidence) -> Finding:
    """`after` takes more time than `before`, by more than the spread."""
    return _ordered(evidence, claim.how["before"], claim.how["after"], claim.how["before"], claim.how["after"])


def _ordered(evidence: Evidence, quick: str, slow: str, before: str, after: str) -> Finding:
    """Confirmed if `quick` takes less time than `slow`; shown in the order `before`, `after`."""
    spreads = {name: evidence.duration(name) for name in (quick, slow)}
    ratio = evidence.ratio(before, after)
    shown = f"{_ms(spreads[before].median)} → {_ms(spreads[after].median)} ms ({100 * (ratio.middle - 1):+.0f} %)"
    if ratio.unsure:
        return Finding(INCONCLUSIVE, shown, ratio.why_unsure)
    held = (ratio.middle < 1) == (quick == after)
    return Finding(CONFIRMED if held else REFUTED, shown, f"{quick!r} is {'the faster' if held else 'the slower'}.")


def shape(claim: Claim, evidence: Evidence) -> Finding:
    """Each run of `how["sweep"]` as a share of the first lies within `tolerance` (absolute) of the published share."""
    spreads = [evidence.duration(name) for name in claim.how["sweep"]]
    first, published_first = spreads[0], claim.published[0]
    shown = ", ".join(_ms(s.median) for s in spreads) + " ms"
    verdict, widest = CONFIRMED, 0.0
    for spread, published in zip(spreads, claim.published, strict=True):
        share, wanted = spread.median / first.median, published / published_first
        widest = max(widest, abs(share - wanted))
        if abs(share - wanted) > claim.tolerance:
            within = spread.low / first.high - claim.tolerance <= wanted <= spread.high / first.low + claim.tolerance
            verdict = INCONCLUSIVE if within and verdict != REFUTED else REFUTED
    why = f"As shares of the first, the times are off by up to {widest:.2f}; {claim.tolerance:g} is allowed."
    return Finding(verdict, shown, why)


def optimum(claim: Claim, evidence: Evidence) -> Finding:
    """`how["best"]` takes the least time of `how["sweep"]`, told apart from all others. Runs that failed don't compete.

    Inconclusive where it can't be told from the fastest, or the fastest (it) not from others.
    """
    present = [name for name in claim.how["sweep"] if evidence.has(name, "step_ms")]
    spreads = {name: evidence.duration(name) for name in present}
    wanted = claim.how["best"]
    if wanted not in spreads or len(spreads) < 3:
        raise NotTestable(
            f"{wanted!r} and at least two other runs of the sweep are needed, and {len(spreads)} are usable. "
            f"Type: labutils run {claim.lab}"
        )
    best = min(spreads, key=lambda name: spreads[name].median)
    equals = [name for name in spreads if name != best and spreads[name].overlaps(spreads[best])]
    shown = f"{best.partition('=')[2]} ({_ms(spreads[best].median)} ms)"
    if wanted not in (best, *equals):
        return Finding(
            REFUTED, shown, f"{best!r} is the fastest here, {wanted!r} takes {_ms(spreads[wanted].median)} ms."
        )
    if equals:
        return Finding(INCONCLUSIVE, shown, f"The spread doesn't tell {best!r} from {', '.join(map(repr, equals))}.")
    return Finding(CONFIRMED, shown, f"{best!r} is the fastest by more than the spread.")


def falls(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` falls from `before` to `after` by `how["at_least"]`, or the published % less `tolerance`.

    Overlapping p10-p90 ranges are inconclusive.
    """
    metric = claim.how["metric"]
    before, after = evidence.spread(claim.how["before"], metric), evidence.spread(claim.how["after"], metric)
    if before.median <= 0:
        raise NotTestable(f"{metric} of {claim.how['before']!r} is {before.median:g}: nothing that could fall.")
    fall = 1 - after.median / before.median
    needed = claim.how["at_least"] if "at_least" in claim.how else claim.published[0] / 100 - claim.tolerance
    shown = f"{_ms(before.median)} → {_ms(after.median)} ({-100 * fall:+.0f} %)"
    noisy = before.overlaps(after) and max(before.n, after.n) > 1
    verdict = INCONCLUSIVE if noisy else CONFIRMED if fall >= needed else REFUTED
    return Finding(
        verdict,
        shown,
        f"{metric} {'falls' if fall > 0 else 'rises'} by {abs(100 * fall):.0f} %; {100 * needed:.0f} % were needed.",
    )


def rises(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` (0..1) rises from `before` to `after` by the published points less `tolerance` (a share of them).

    Utilisation is sampled coarsely: within five points below what was needed it is inconclusive.
    """
    metric = claim.how["metric"]
    before, after = (100 * evidence.number(claim.how[end], metric) for end in ("before", "after"))
    needed = (claim.published[1] - claim.published[0]) * (1 - claim.tolerance)
    rise = after - before
    shown = f"{before:.0f} → {after:.0f} %"
    verdict = CONFIRMED if rise >= needed else INCONCLUSIVE if rise >= needed - 5 else REFUTED
    return Finding(verdict, shown, f"It rises by {rise:.0f} points; {needed:.0f} were needed.")


def limit(claim: Claim, evidence: Evidence) -> Finding:
    """The sum of `how["metrics"]` is `at_most` or `at_least` a limit; nearer to it than `tolerance` is inconclusive."""
    how = claim.how
    value = sum(evidence.number(how["run"], metric) for metric in how["metrics"])
    words, bound = ("at least", how["at_least"]) if "at_least" in how else ("at most", how["at_most"])
    margin = value - bound if words == "at least" else bound - value
    text = {"_ms": "{:.2f} ms".format, "_ratio": "{:.2f}x".format, "_gb": "{:.0f} GB".format}.get(
        _suffix(how["metrics"][0]), _percent
    )
    verdict = INCONCLUSIVE if abs(margin) < claim.tolerance else CONFIRMED if margin >= 0 else REFUTED
    return Finding(verdict, text(value), f"{text(value)} was found, where {words} {text(bound)} is meant.")


def outweighs(claim: Claim, evidence: Evidence) -> Finding:
    """The sum of the shares `how["heavier"]` exceeds that of `how["lighter"]`. Within `tolerance`: inconclusive."""
    run = claim.how["run"]
    heavy, light = (sum(evidence.number(run, m) for m in claim.how[side]) for side in ("heavier", "lighter"))
    verdict = INCONCLUSIVE if abs(heavy - light) < claim.tolerance else CONFIRMED if heavy > light else REFUTED
    sides = (" + ".join(m.removesuffix("_share") for m in claim.how[side]) for side in ("heavier", "lighter"))
    return Finding(
        verdict, f"{_percent(heavy)} against {_percent(light)}", "{} against {}, as shares of the step.".format(*sides)
    )


def all_present(claim: Claim, evidence: Evidence) -> Finding:
    """Every one of the shares `how["metrics"]` is above 0. Exact: no spread."""
    run = claim.how["run"]
    parts = {metric.removesuffix("_share"): evidence.number(run, metric) for metric in claim.how["metrics"]}
    absent = [name for name, value in parts.items() if value <= 0]
    shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in parts.items())
    if absent:
        return Finding(REFUTED, shown, f"No time goes to: {', '.join(absent)}.")
    return Finding(CONFIRMED, shown, f"Each is seen; the largest is {max(parts, key=parts.__getitem__)}.")


def same_magnitude(claim: Claim, evidence: Evidence) -> Finding:
    """The published time fits a micro-step or an optimizer step of this machine within a factor of `tolerance`.

    Ten times off in both readings is refuted: that would not be the same work.
    """
    run = evidence.run(claim.how["run"])
    step = evidence.duration(claim.how["run"], claim.how["metric"]).median
    accumulation = _number(_mapping(run.recipe).get("accumulation")) or 1
    readings = {"an optimizer step": step, "a micro-step": step / accumulation}
    factors = {name: max(ms / claim.published[0], claim.published[0] / ms) for name, ms in readings.items()}
    nearest = min(factors, key=factors.__getitem__)
    shown = f"{_ms(step)} ms, {_ms(step / accumulation)} a micro-step" if accumulation > 1 else f"{_ms(step)} ms"
    verdict = CONFIRMED if factors[nearest] <= claim.tolerance else REFUTED if factors[nearest] >= 10 else INCONCLUSIVE
    return Finding(
        verdict,
        shown,
        f"{claim.published_text} is nearest to {nearest} here, off by a factor of {factors[nearest]:.1f}.",
    )


def flag(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is 1 (the statement holds), 0 (it doesn't), or in between where steps differ (inconclusive)."""
    value = evidence.number(claim.how["run"], claim.how["metric"])
    verdict = {1.0: CONFIRMED, 0.0: REFUTED}.get(value, INCONCLUSIVE)
    told = {1.0: "Checked here, and it holds.", 0.0: "Checked here, and it doesn't hold."}
    partly = f"It holds in {value:.0%} of the steps."
    return Finding(verdict, {1.0: "yes", 0.0: "no"}.get(value, f"{value:g}"), told.get(value, partly))


def fails(claim: Claim, evidence: Evidence) -> Finding:
    """The run failed with one of `how["words"]` in its message. Another failure is inconclusive, success refutes."""
    message = evidence.failure(claim.how["run"])
    if message is None:
        return Finding(REFUTED, "no failure", "It runs without failing.")
    if any(word.lower() in message.lower() for word in claim.how["words"]):
        return Finding(CONFIRMED, "fails", _short(message))
    return Finding(INCONCLUSIVE, "fails otherwise", f"It fails, but with: {_short(message)}")


def cured(claim: Claim, evidence: Evidence) -> Finding:
    """`how["failing"]` fails and `how["working"]` doesn't; where nothing fails there is nothing to cure."""
    ill, well = evidence.failure(claim.how["failing"]), evidence.failure(claim.how["working"])
    if ill is None:
        return Finding(INCONCLUSIVE, "no failure", "Nothing failed that could be cured.")
    if well is None:
        return Finding(CONFIRMED, "cured", "The same run without the shortage goes through.")
    return Finding(REFUTED, "still fails", _short(well))


def fails_only_with(claim: Claim, evidence: Evidence) -> Finding:
    """`how["failing"]` fails and `how["control"]`, without the blamed cause, doesn't. If both fail, it isn't the cause.

    Refuted as well where nothing fails although the blamed cause is there.
    """
    blamed, control = evidence.failure(claim.how["failing"]), evidence.failure(claim.how["control"])
    if blamed and not control:
        return Finding(CONFIRMED, "fails only with it", _short(blamed))
    if blamed and control:
        return Finding(REFUTED, "fails without it too", _short(control))
    if control:
        return Finding(INCONCLUSIVE, "fails only without it", _short(control))
    return Finding(REFUTED, "no failure with it", "The blamed cause is there, and nothing fails.")


def needs_both(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is lower with `both` than with `neither`, and with neither of `alone`, each beyond the spread.

    Inconclusive where not even both together help by more than the spread.
    """
    how, metric = claim.how, claim.how["metric"]
    neither, both = evidence.duration(how["neither"], metric), evidence.duration(how["both"], metric)
    alone = {name: evidence.duration(name, metric) for name in how["alone"]}
    shown = f"{_ms(neither.median)} | {' | '.join(_ms(s.median) for s in alone.values())} | {_ms(both.median)} ms"
    helpful = [name for name, s in alone.items() if s.median < neither.median and not s.overlaps(neither)]
    if helpful:
        return Finding(REFUTED, shown, f"{' and '.join(map(repr, helpful))} helps by itself.")
    if both.median > neither.median and not both.overlaps(neither):
        return Finding(REFUTED, shown, "Both together make it slower.")
    if both.overlaps(neither):
        return Finding(INCONCLUSIVE, shown, "Not even both together help by more than the spread.")
    return Finding(CONFIRMED, shown, "Only both together help.")


def warns_then_fails(claim: Claim, evidence: Evidence) -> Finding:
    """Metrics `how["warned"]` and `how["failed"]` are both 1; one of the two is inconclusive."""
    warned, failed = (evidence.number(claim.how["run"], claim.how[part]) > 0 for part in ("warned", "failed"))
    shown = f"{'warns' if warned else 'no warning'}, {'fails' if failed else 'no failure'}"
    message = _mapping(evidence.run(claim.how["run"]).metrics).get("message")
    why = _short(str(message)) if message else "The mechanism was tried on this card."
    return Finding(CONFIRMED if warned and failed else INCONCLUSIVE if warned or failed else REFUTED, shown, why)


def lists(claim: Claim, evidence: Evidence) -> Finding:
    """`how["item"]` is in the list `how["metric"]`. An empty list says nothing. Exact: no spread."""
    run, metric = claim.how["run"], claim.how["metric"]
    recorded = _mapping(evidence.run(run).metrics).get(metric)
    if not isinstance(recorded, list | tuple):
        raise NotTestable(evidence.nothing(run, metric))
    if not recorded:
        raise NotTestable(f"The {metric} of the run {run!r} are none: a CPU build of PyTorch, which knows no GPU.")
    found = [str(item) for item in recorded]
    shown = f"{found[0]} .. {found[-1]}" if len(found) > 1 else found[0]
    has = claim.how["item"] in found
    return Finding(
        CONFIRMED if has else REFUTED, shown, f"The installed PyTorch {'has' if has else 'lacks'} {claim.how['item']}."
    )


def fails_on_capability(claim: Claim, evidence: Evidence) -> Finding:
    """As `fails`; only a card of compute capability `how["capability"]` can tell (the run `how["machine"]` knows)."""
    capability = str(_mapping(evidence.run(claim.how["machine"]).machine).get("compute_capability", "unknown"))
    if capability != claim.how["capability"]:
        raise NotTestable(
            f"It takes a card of compute capability {claim.how['capability']}; this one has {capability}."
        )
    return fails(claim, evidence)


def becomes(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metrics"]` equal the published numbers exactly. What a run left out was not finite, and refutes."""
    values = _finite_or_none(claim, evidence)
    right = values == list(claim.published)
    published = ", ".join(f"{value:g}" for value in claim.published)
    return Finding(CONFIRMED if right else REFUTED, _or_nan(values), f"Published: {published}.")


def within(claim: Claim, evidence: Evidence) -> Finding:
    """No number of `how["metrics"]` is beyond the published one, whichever its sign; those that aren't finite don't
    count."""
    values = _finite_or_none(claim, evidence)
    bound = claim.published[0]
    inside = all(abs(value) <= bound for value in values if value is not None)
    return Finding(CONFIRMED if inside else REFUTED, _or_nan(values), f"No number is to lie beyond ±{bound:g}.")


def _finite_or_none(claim: Claim, evidence: Evidence) -> list[float | None]:
    """Numbers of a run; None for one that a successful run left out: JSON has neither NaN nor infinity."""
    run, metrics = claim.how["run"], claim.how["metrics"]
    recorded = evidence.run(run)
    if not recorded.ok or not _mapping(recorded.metrics):
        raise NotTestable(evidence.nothing(run, metrics[0]))
    return [_number(recorded.metrics.get(metric)) for metric in metrics]


def _or_nan(values: Iterable[float | None]) -> str:
    return ", ".join("not finite" if value is None else f"{value:g}" for value in values)


def reaches(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` reaches the published number less `tolerance` (a share of it), its whole p10-p90 range.

    A number without a spread is taken to be sure to 3 %.
    """
    value = evidence.spread(claim.how["run"], claim.how["metric"])
    low, high = (value.low, value.high) if value.n > 1 else (0.97 * value.median, 1.03 * value.median)
    needed = claim.published[0] * (1 - claim.tolerance)
    verdict = CONFIRMED if low >= needed else REFUTED if high < needed else INCONCLUSIVE
    return Finding(verdict, f"{value.median:.2f}{claim.unit}", f"At least {needed:.2f}{claim.unit} would do.")


class Change(NamedTuple):
    """How much less (or more) a metric is in one run than in another, in %: least, by the medians, most."""

    low: float
    middle: float
    high: float


def _change(before: Spread, after: Spread, towards: str) -> Change:
    return _in_percent(after.low / before.high, after.median / before.median, after.high / before.low, towards)


def _change_of_time(evidence: Evidence, before: str, after: str, towards: str, metric: str = "step_ms") -> Change:
    ratio = evidence.ratio(before, after, metric)
    return _in_percent(ratio.low, ratio.middle, ratio.high, towards)


def _in_percent(low: float, middle: float, high: float, towards: str) -> Change:
    sign = -1 if towards == "less" else 1
    return Change(*sorted(100 * sign * (ratio - 1) for ratio in (low, middle, high)))


def _changes(claim: Claim, evidence: Evidence) -> dict[str, Change]:
    """For each pair of runs of which both recorded `how["metric"]`: the batch size (or the run's name), the change.

    Raises `NotTestable` where there is no such pair.
    """
    how, metric = claim.how, claim.how["metric"]
    pairs = list(zip(how["before"], how["after"], strict=True))
    present = [pair for pair in pairs if all(evidence.has(name, metric) for name in pair)]
    if metric.endswith("_ms"):  # a batch that was timed too seldom leaves the others' verdict alone
        enough = [pair for pair in present if all(evidence.spread(n, metric).n >= FEWEST_SAMPLES for n in pair)]
        present = enough or present
    if not present:
        raise NotTestable(
            f"No pair of runs recorded {metric}, e.g. {pairs[0][0]!r} and {pairs[0][1]!r}. "
            f"Type: labutils run {claim.lab}"
        )
    if metric.endswith("_ms"):
        return {after: _change_of_time(evidence, before, after, how["towards"], metric) for before, after in present}
    return {
        after: _change(_positive(evidence, before, metric), _positive(evidence, after, metric), how["towards"])
        for before, after in present
    }


def _positive(evidence: Evidence, name: str, metric: str) -> Spread:
    """A time with its spread, or another quantity above 0."""
    spread = evidence.duration(name, metric) if metric.endswith("_ms") else evidence.spread(name, metric)
    if spread.low <= 0:
        raise NotTestable(f"The run {name!r} recorded {metric} = {spread.low:g}, of which nothing can be a share.")
    return spread


def _listed(changes: Mapping[str, Change], towards: str) -> str:
    """ "b1: -5 %, b4: -7 %"; the batch size is left out where there is one pair only."""
    sign = -1 if towards == "less" else 1
    shown = {name.rpartition(" ")[2]: f"{sign * change.middle:+.0f} %" for name, change in changes.items()}
    return (
        ", ".join(f"{name}: {value}" for name, value in shown.items()) if len(shown) > 1 else next(iter(shown.values()))
    )


def changes(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is less (or more) by the published % in each measured pair, give or take `tolerance` (a share).

    Published is one number or a range; `towards` says which way. Runs are paired in the order of `before` and `after`;
    pairs that were not measured (out of memory) are left out. One pair beyond it by more than its spread refutes.
    """
    found = _changes(claim, evidence)
    low, high = claim.published[0] - 100 * claim.tolerance, claim.published[-1] + 100 * claim.tolerance
    shown = _listed(found, claim.how["towards"])
    against = f"{low:.0f} to {high:.0f} % {claim.how['towards']} is meant"
    if any(change.high < low for change in found.values()):
        return Finding(REFUTED, shown, f"Less of a change than that: {against}.")
    if any(change.low > high for change in found.values()):
        return Finding(REFUTED, shown, f"More of a change than that: {against}.")
    if all(low <= change.middle <= high for change in found.values()):
        return Finding(CONFIRMED, shown, f"{against[0].upper()}{against[1:]}.")
    return Finding(INCONCLUSIVE, shown, f"Beyond it, but within the spread: {against}.")


def grows(claim: Claim, evidence: Evidence) -> Finding:
    """The change (see `changes`) is larger in the last measured pair than in the first, by more than `tolerance`
    (a share) and than the spread. It takes two pairs."""
    found = _changes(claim, evidence)
    if len(found) < 2:
        raise NotTestable(f"One batch size was measured; growth takes two. Type: labutils run {claim.lab}")
    first, last = list(found.values())[0], list(found.values())[-1]
    shown = _listed(found, claim.how["towards"])
    rise, margin = last.middle - first.middle, 100 * claim.tolerance
    if abs(rise) <= margin or (last.low <= first.high and first.low <= last.high):
        return Finding(INCONCLUSIVE, shown, f"First and last differ by {abs(rise):.1f} points, within the spread.")
    return Finding(
        CONFIRMED if rise > 0 else REFUTED, shown, f"From first to last it {'grows' if rise > 0 else 'shrinks'}."
    )


def multiple(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` of `after` over that of `before` is the published multiple within a factor of `tolerance`.

    Within the square of that factor it is inconclusive: one sample of a first step is not to be trusted further.
    """
    metric = claim.how["metric"]
    before, after = (_positive(evidence, claim.how[end], metric).median for end in ("before", "after"))
    here, published = after / before, claim.published[1] / claim.published[0]
    off = max(here / published, published / here)
    verdict = CONFIRMED if off <= claim.tolerance else INCONCLUSIVE if off <= claim.tolerance**2 else REFUTED
    unit = metric.rpartition("_")[2]
    return Finding(
        verdict,
        f"{before:.3g} → {after:.3g} {unit} ({here:.2g}x)",
        f"{here:.3g}x here against {published:.3g}x published.",
    )


def breaks_even(claim: Claim, evidence: Evidence) -> Finding:
    """`after` has caught up with `before` after the published number of steps, within a factor of `tolerance`.

    That is the extra time of its first step over what each later one saves. Never, where its steps are no shorter.
    """
    before = evidence.duration(claim.how["before"])
    ratio = evidence.ratio(claim.how["before"], claim.how["after"])
    extra = evidence.number(claim.how["after"], "first_step_s") - evidence.number(claim.how["before"], "first_step_s")
    if ratio.unsure:
        return Finding(INCONCLUSIVE, "unknown", f"{ratio.why_unsure} Nothing is surely saved.")
    if ratio.middle > 1:
        return Finding(REFUTED, "never", "The later steps are no shorter.")
    saved_ms = before.median * (1 - ratio.middle)
    steps = 1e3 * extra / saved_ms
    wanted = claim.published[0]
    shown = f"{max(0, steps):,.0f} steps"
    within = steps > 0 and max(steps / wanted, wanted / steps) <= claim.tolerance
    saved = f"{extra:.1f} s more at first, {saved_ms:.0f} ms less a step."
    return Finding(CONFIRMED if within else REFUTED, shown, saved)


def gains_less(claim: Claim, evidence: Evidence) -> Finding:
    """From `before` to `after` the step shrinks by a smaller share than from `than_before` to `than_after`."""
    asked = [claim.how[end] for end in ("before", "after", "than_before", "than_after")]
    mine, other = (_change_of_time(evidence, *pair, "less") for pair in (asked[:2], asked[2:]))
    shown = f"{-mine.middle:+.0f} % against {-other.middle:+.0f} %"
    if mine.low <= other.high and other.low <= mine.high:
        return Finding(INCONCLUSIVE, shown, "The spread doesn't tell the two changes apart.")
    held = mine.middle < other.middle
    return Finding(
        CONFIRMED if held else REFUTED, shown, f"{asked[1]!r} gains {'less' if held else 'more'} than {asked[3]!r}."
    )


def more_with(claim: Claim, evidence: Evidence) -> Finding:
    """The count `how["metric"]` is larger in the run `with` what is blamed than in the one `without`. Exact."""
    more, fewer = (evidence.number(claim.how[side], claim.how["metric"]) for side in ("with", "without"))
    name = claim.how["metric"].replace("_", " ")
    held = more > fewer
    return Finding(
        CONFIRMED if held else REFUTED,
        f"{_figures(more)} against {_figures(fewer)}",
        f"There are {'more' if held else 'no more'} {name} with it.",
    )


def occurs(claim: Claim, evidence: Evidence) -> Finding:
    """The count `how["metric"]` is at least 1. Exact."""
    value = evidence.number(claim.how["run"], claim.how["metric"])
    name = claim.how["metric"].replace("_", " ")
    return Finding(CONFIRMED if value >= 1 else REFUTED, f"{value:g}", f"Counted: {value:g} ({name}).")


def names(claim: Claim, evidence: Evidence) -> Finding:
    """The text `how["metric"]` is among `how["items"]`. Exact."""
    run, metric = claim.how["run"], claim.how["metric"]
    answer = _mapping(evidence.run(run).metrics).get(metric)
    if not isinstance(answer, str) or not answer:
        raise NotTestable(evidence.nothing(run, metric))
    wanted = " or ".join(claim.how["items"])
    return Finding(CONFIRMED if answer in claim.how["items"] else REFUTED, answer, f"Published: {wanted}.")


def keeps_up(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]`, a cost, is at most `tolerance` (a share) higher in `after` than in `before`.

    Up to twice the tolerance it is inconclusive, and so it is where the spread reaches as far from the other side.
    """
    metric, most = claim.how["metric"], 100 * claim.tolerance
    before, after = (_positive(evidence, claim.how[end], metric) for end in ("before", "after"))
    excess = _change(before, after, "more")
    verdict = INCONCLUSIVE
    if excess.middle <= most and excess.high <= 2 * most:
        verdict = CONFIRMED
    if excess.middle > 2 * most and excess.low > most:
        verdict = REFUTED
    why = f"{excess.middle:+.0f} %, where {most:.0f} % more would do."
    return Finding(verdict, f"{before.median:.3g} → {after.median:.3g}", why)


def helps(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is `towards` less (or more) from `before` to `after`, by `at_least` so many percent and surely.

    Or from the first to the second of the `metrics` of one `run`. Refuted if even the best of its range falls short.
    """
    how = claim.how
    if "run" in how:
        change = _change(*(_positive(evidence, how["run"], metric) for metric in how["metrics"]), how["towards"])
    elif how["metric"].endswith("_ms"):
        change = _change_of_time(evidence, how["before"], how["after"], how["towards"], how["metric"])
    else:
        ends = (_positive(evidence, how[end], how["metric"]) for end in ("before", "after"))
        change = _change(*ends, how["towards"])
    shown = f"{(-1 if how['towards'] == 'less' else 1) * change.middle:+.0f} %"
    why = f"At least {how['at_least']:g} % {how['towards']} is meant."
    if change.high < how["at_least"]:
        return Finding(REFUTED, shown, why)
    if change.low <= 0 or change.middle < how["at_least"]:
        return Finding(INCONCLUSIVE, shown, f"{why} The spread reaches from {change.low:.0f} to {change.high:.0f} %.")
    return Finding(CONFIRMED, shown, why)


def beyond(claim: Claim, evidence: Evidence) -> Finding:
    """No run can test it: the claim's note says why."""
    raise NotTestable(claim.note)


def predicts(claim: Claim, evidence: Evidence) -> Finding:
    """A model's prediction `how["metric"]`, a ratio, is the published one (second number over first) within a factor of
    `tolerance`; within the square of that factor it is inconclusive. What it shows says that nothing was measured."""
    ratio = evidence.number(claim.how["run"], claim.how["metric"])
    if ratio <= 0:
        raise NotTestable(
            f"The run {claim.how['run']!r} recorded {claim.how['metric']} = {ratio:g}, which is no ratio."
        )
    published = claim.published[1] / claim.published[0]
    off = max(ratio / published, published / ratio)
    verdict = CONFIRMED if off <= claim.tolerance else INCONCLUSIVE if off <= claim.tolerance**2 else REFUTED
    return Finding(verdict, f"{ratio:.2f}x predicted", f"{published:.2f}x published; predicted, not measured.")


def amdahl(claim: Claim, evidence: Evidence) -> Finding:
    """What is left untouched explains the gain: if a part `share` of the step keeps its time and the rest runs `rate`
    times as fast, the step shrinks by as much as it does from `before` to `after`, give or take `tolerance` (a share).

    A step that shrinks by less has been held up by something else.
    """
    how = claim.how
    untouched = evidence.number(how["before"], how["share"])
    expected = 100 * (1 - untouched) * (1 - 1 / how["rate"])
    found = _change_of_time(evidence, how["before"], how["after"], "less")
    shown = f"{-found.middle:+.0f} %, {-expected:+.0f} % expected"
    within = abs(found.middle - expected) <= 100 * claim.tolerance
    near = found.low - 100 * claim.tolerance <= expected <= found.high + 100 * claim.tolerance
    why = f"What stays as it is takes {_percent(untouched)} of the step."
    return Finding(CONFIRMED if within else INCONCLUSIVE if near else REFUTED, shown, why)


def loss_moves(claim: Claim, evidence: Evidence) -> Finding:
    """The loss moves from `before` to `after` as published less `tolerance` (a share), and farther than seeds apart.

    Seeds are the samples of `how["metric"]`. An effect of the published size that the seeds' spread would hide is
    inconclusive; one that would have shown and didn't is refuted, unless the weights that were trained on are random:
    such a model has nothing to lose.
    """
    before, after, spread = _losses(claim, evidence, "after")
    moved, published = after.median / before.median - 1, claim.published[1] / claim.published[0] - 1
    needed = abs(published) * (1 - claim.tolerance)
    shown = f"{before.median:.3g} → {after.median:.3g} ({100 * moved:+.1f} %)"
    why = f"{100 * published:+.0f} % published; seeds alone spread the loss over {100 * spread:.1f} %."
    if abs(moved) > spread and moved * published > 0 and abs(moved) >= needed:
        return Finding(CONFIRMED, shown, why)
    if spread >= needed and abs(moved) <= spread:
        return Finding(INCONCLUSIVE, shown, why)
    if any(run.weights == "random" for run in evidence.runs.values()):
        return Finding(INCONCLUSIVE, shown, f"{why} It didn't show, but a model with random weights can't refute it.")
    return Finding(REFUTED, shown, why)


def brings_back(claim: Claim, evidence: Evidence) -> Finding:
    """The loss lies outside the seeds' spread in `after`, inside it again in `cured`. Never outside: inconclusive."""
    before, ill, spread = _losses(claim, evidence, "after")
    well = _losses(claim, evidence, "cured")[1]
    moved, left = (abs(s.median / before.median - 1) for s in (ill, well))
    shown = f"{100 * moved:.1f} % → {100 * left:.1f} %"
    why = f"As changes of the loss; seeds alone spread it over {100 * spread:.1f} %."
    if moved <= spread:
        return Finding(INCONCLUSIVE, shown, f"There is nothing to bring back. {why}")
    return Finding(CONFIRMED if left <= spread else REFUTED, shown, why)


def _losses(claim: Claim, evidence: Evidence, end: str) -> tuple[Spread, Spread, float]:
    """Losses over seeds of `before` and of `end`, and the wider of their two spreads as a share of the median."""
    both = [_positive(evidence, claim.how[side], claim.how["metric"]) for side in ("before", end)]
    for side, losses in zip(("before", end), both, strict=True):
        if losses.n < FEWEST_SAMPLES:
            raise NotTestable(
                f"The run {claim.how[side]!r} has the losses of {losses.n} seed(s); a spread takes {FEWEST_SAMPLES}."
            )
    return both[0], both[1], max((losses.high - losses.low) / losses.median for losses in both)


JUDGES: dict[str, Callable[[Claim, Evidence], Finding]] = {
    function.__name__: function
    for function in (
        all_present,
        amdahl,
        becomes,
        beyond,
        breaks_even,
        brings_back,
        changes,
        count,
        cured,
        fails,
        fails_on_capability,
        fails_only_with,
        falls,
        faster,
        flag,
        gains_less,
        grows,
        helps,
        keeps_up,
        limit,
        lists,
        loss_moves,
        more_with,
        multiple,
        names,
        needs_both,
        occurs,
        optimum,
        outweighs,
        predicts,
        reaches,
        rises,
        same_magnitude,
        shape,
        slower,
        speedup,
        unchanged,
        warns_then_fails,
        within,
    )
}

ANY_SCALE = {"becomes", "count", "fails_on_capability", "lists", "predicts", "unchanged", "warns_then_fails", "within"}
"""Judges of what doesn't depend on the model's size."""

UNDISTURBED = {
    *("all_present", "becomes", "brings_back", "count", "fails_on_capability", "lists", "loss_moves", "more_with"),
    *("occurs", "unchanged", "warns_then_fails", "within"),
}
"""Judges of what is counted or computed, and the same however busy the machine is; the rest is about time or memory."""


def _ms(value: float) -> str:
    """A time or count, to three figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _suffix(metric: str) -> str:
    """What a metric's name ends with: its unit."""
    return "_" + metric.rpartition("_")[2]


def _percent(share: float) -> str:
    """A share of 0..1 as text."""
    return f"{100 * share:.0f} %"


def _short(message: str, width: int = 160) -> str:
    """The first line of a message, cut at `width`."""
    line = (message.strip().splitlines() or [""])[0]
    return line if len(line) <= width else line[: width - 1] + "…"


# --------------------------------------------------------------------------------------------------------- rendering


def as_markdown(judgements: Iterable[Judgement]) -> str:
    """A table for a notebook: claim | published | H200 | here | verdict, each claim followed by why.

    Why several claims can't be tested here is said once, below the table.
    """
    judgements = list(judgements)
    reasons = Counter(j.why for j in judgements if j.verdict == NOT_TESTABLE)
    marks = {why: f"({n})" for n, why in enumerate((why for why, count in reasons.items() if count > 1), 1)}
    rows = ["| claim | published | H200 | here | verdict |", "|:--|:--|:--|:--|:--|"]
    for j in judgements:
        what = f"**{j.claim.id}** {j.claim.statement}"
        reference = f"{j.reference or '–'} ({j.reference_verdict})" if j.reference else "–"
        why = f" {marks[j.why]}" if j.verdict == NOT_TESTABLE and j.why in marks else f": {j.why}"
        verdict = f"**{j.verdict}**{why}" + (f" *{j.claim.note}*" if j.claim.note and j.claim.runs else "")
        rows.append("| " + " | ".join(map(_cell, (what, j.published, reference, j.here or "–", verdict))) + " |")
    return "\n\n".join(["\n".join(rows), *(f"{mark} {why}" for why, mark in marks.items())])


def _cell(text: str) -> str:
    """Text that can't break out of its table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
