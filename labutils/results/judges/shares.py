"""Judges of changes in percent: time, memory and loss saved or added, and what that makes of a
plan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from labutils.results.claims import Claim
from labutils.results.judges.evidence import CONFIRMED, Evidence, FEWEST_SAMPLES, Finding, INCONCLUSIVE, NotTestable, REFUTED, Spread
from labutils.results.judges.words import percents


class Change(NamedTuple):
    """How much less (or more) a metric is in one run than in another, in %: least, by the medians,
    most.
    """

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
    """For each pair of runs of which both recorded `how["metric"]`: the batch size (or the run's
    name), the change.

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
        after: _change(positive(evidence, before, metric), positive(evidence, after, metric), how["towards"])
        for before, after in present
    }


def positive(evidence: Evidence, name: str, metric: str) -> Spread:
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
    """`how["metric"]` is less (or more) by the published % in each measured pair, give or take
    `tolerance` (a share).

    Published is one number or a range; `towards` says which way. Runs are paired in the order of
    `before` and `after`; pairs that were not measured (out of memory) are left out. One pair beyond
    it by more than its spread refutes.
    """
    found = _changes(claim, evidence)
    low, high = claim.published[0] - 100 * claim.tolerance, claim.published[-1] + 100 * claim.tolerance
    shown = _listed(found, claim.how["towards"])
    sign = -1 if claim.how["towards"] == "less" else 1
    lowest, highest = sorted((sign * low, sign * high))
    against = f"{lowest:+.0f} to {highest:+.0f} % is meant, the tolerance included"
    beyond = {name: change for name, change in found.items() if change.high < low or change.low > high}
    if beyond:
        return Finding(REFUTED, shown, f"{_missed(claim, beyond, found)}, by more than the spread: {against}.")
    outside = {name: change for name, change in found.items() if not low <= change.middle <= high}
    if not outside:
        return Finding(CONFIRMED, shown, f"{against}.")
    return Finding(INCONCLUSIVE, shown, f"{_missed(claim, outside, found)}, but within the spread: {against}.")


def _missed(claim: Claim, some: Mapping[str, Change], of: Mapping[str, Change]) -> str:
    """How some of the pairs miss what was published: "Smaller than published at b1, larger than
    published at b4".
    """
    most = max(claim.published)
    ways: dict[str, dict[str, Change]] = {}
    for name, change in some.items():
        if most == 0:
            way = "changed, where no change was published"
        elif change.middle < 0 < most:
            way = "the opposite of what was published"
        else:
            way = "larger than published" if abs(change.middle) > most else "smaller than published"
        ways.setdefault(way, {})[name] = change
    told = ", ".join(f"{way}{_where(pairs, of)}" for way, pairs in ways.items())
    return told[0].upper() + told[1:]


def _where(some: Mapping[str, Change], of: Mapping[str, Change]) -> str:
    """ " at b1" where only some of several pairs are meant."""
    return "" if len(some) == len(of) else f" at {', '.join(name.rpartition(' ')[2] for name in some)}"


def grows(claim: Claim, evidence: Evidence) -> Finding:
    """The change (see `changes`) is larger in the last measured pair than in the first, by more
    than `tolerance` (a share) and than the spread. It takes two pairs."""
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
    """`how["metric"]` of `after` over that of `before` is the published multiple within a factor of
    `tolerance`.

    Within the square of that factor it is inconclusive: one sample of a first step is not to be
    trusted further.
    """
    metric = claim.how["metric"]
    before, after = (positive(evidence, claim.how[end], metric).median for end in ("before", "after"))
    here, published = after / before, claim.published[1] / claim.published[0]
    off = max(here / published, published / here)
    verdict = CONFIRMED if off <= claim.tolerance else INCONCLUSIVE if off <= claim.tolerance**2 else REFUTED
    unit = metric.rpartition("_")[2]
    return Finding(
        verdict,
        f"{before:.3g} → {after:.3g} {unit} ({here:.3g}x)",
        f"{here:.3g}x here against {published:.3g}x published.",
    )


def breaks_even(claim: Claim, evidence: Evidence) -> Finding:
    """`after` has caught up with `before` after the published number of steps, within a factor of
    `tolerance`.

    That is the extra time of its first step over what each later one saves. Never, where its steps
    are no shorter. The few percent that two runs differ by, one after the other, may be the
    machine's drift: they must lie apart as wholes.
    """
    before, after = (evidence.duration(claim.how[end]) for end in ("before", "after"))
    ratio = evidence.ratio(claim.how["before"], claim.how["after"])
    extra = evidence.number(claim.how["after"], "first_step_s") - evidence.number(claim.how["before"], "first_step_s")
    if ratio.unsure:
        return Finding(INCONCLUSIVE, "unknown", f"{ratio.why_unsure} Nothing is surely saved.")
    if ratio.middle > 1:
        return Finding(REFUTED, "never", "The later steps are no shorter.")
    if after.high >= before.low:
        return Finding(INCONCLUSIVE, "unknown", "The ranges of the two runs' steps overlap. Nothing is surely saved.")
    saved_ms = before.median * (1 - ratio.middle)
    steps = 1e3 * extra / saved_ms
    wanted = claim.published[0]
    shown = f"{max(0, steps):,.0f} steps"
    within = steps > 0 and max(steps / wanted, wanted / steps) <= claim.tolerance
    saved = f"{extra:.1f} s more at first, {saved_ms:.0f} ms less a step."
    return Finding(CONFIRMED if within else REFUTED, shown, saved)


def gains_less(claim: Claim, evidence: Evidence) -> Finding:
    """From `before` to `after` the step shrinks by a smaller share than from `than_before` to
    `than_after`.
    """
    asked = [claim.how[end] for end in ("before", "after", "than_before", "than_after")]
    mine, other = (_change_of_time(evidence, *pair, "less") for pair in (asked[:2], asked[2:]))
    shown = f"{-mine.middle:+.0f} % against {-other.middle:+.0f} %"
    if mine.low <= other.high and other.low <= mine.high:
        return Finding(INCONCLUSIVE, shown, "The spread doesn't tell the two changes apart.")
    held = mine.middle < other.middle
    return Finding(
        CONFIRMED if held else REFUTED, shown, f"{asked[1]!r} gains {'less' if held else 'more'} than {asked[3]!r}."
    )


def helps(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is `towards` less (or more) from `before` to `after`, by `at_least` so many
    percent and surely.

    Or from the first to the second of the `metrics` of one `run`. Refuted if even the best of its
    range falls short.
    """
    how = claim.how
    if "run" in how:
        change = _change(*(positive(evidence, how["run"], metric) for metric in how["metrics"]), how["towards"])
    elif how["metric"].endswith("_ms"):
        change = _change_of_time(evidence, how["before"], how["after"], how["towards"], how["metric"])
    else:
        ends = (positive(evidence, how[end], how["metric"]) for end in ("before", "after"))
        change = _change(*ends, how["towards"])
    places = _places_apart(change.middle, how["at_least"])
    shown = f"{(-1 if how['towards'] == 'less' else 1) * change.middle:+.{places}f} %"
    why = f"At least {how['at_least']:g} % {how['towards']} is meant."
    if change.high < how["at_least"]:
        return Finding(REFUTED, shown, why)
    if change.low <= 0 or change.middle < how["at_least"]:
        return Finding(INCONCLUSIVE, shown, f"{why} The spread reaches from {change.low:.0f} to {change.high:.0f} %.")
    return Finding(CONFIRMED, shown, why)


def _places_apart(value: float, bound: float) -> int:
    """Decimals with which a value below a bound isn't rounded up to it."""
    return next((places for places in range(6) if (round(value, places) < bound) == (value < bound)), 6)


def beyond(claim: Claim, evidence: Evidence) -> Finding:
    """No run can test it: the claim's note says why."""
    raise NotTestable(claim.note)


TRAINED = 0.85
"""A model with random weights has been trained if its loss has come down to this share of what it
was.
"""


def loss_moves(claim: Claim, evidence: Evidence) -> Finding:
    """The loss moves from `before` to `after` as published less `tolerance` (a share), on every
    seed the same way.

    Seeds are the samples of `how["metric"]`, compared one by one where both runs have the same. An
    effect of the published size that their spread could hide is inconclusive; one that would have
    shown and didn't is refuted, unless the weights are random and were hardly trained: such a model
    has nothing to lose.
    """
    before, after, moved, spread = _losses(claim, evidence, "after")
    published = 100 * (claim.published[1] / claim.published[0] - 1)
    needed = abs(published) * (1 - claim.tolerance)
    low, middle, high = sorted(math.copysign(1, published) * change for change in moved)
    shown = f"{before.median:.3g} → {after.median:.3g} ({moved.middle:+.{_places(moved)}f} %)"
    why = f"{published:+.0f} % published; {_told(moved, spread)}"
    if middle >= needed and low > 0:
        return Finding(CONFIRMED, shown, why)
    if high >= needed:
        return Finding(INCONCLUSIVE, shown, f"{why} That could hide it.")
    if any(run.weights == "random" for run in evidence.runs.values()) and not _has_trained(claim, evidence, before):
        return Finding(INCONCLUSIVE, shown, f"{why} But the model's random weights have hardly been trained.")
    return Finding(REFUTED, shown, why)


def brings_back(claim: Claim, evidence: Evidence) -> Finding:
    """The loss lies outside the seeds' spread in `after`, inside it again in `cured`. Never
    outside: inconclusive.
    """
    _, _, ill, spread = _losses(claim, evidence, "after")
    _, _, well, _ = _losses(claim, evidence, "cured")
    shown = f"{ill.middle:+.{_places(ill)}f} % → {well.middle:+.{_places(well)}f} %"
    why = f"Changes of the loss; {_told(ill, spread)}"
    if abs(ill.middle) <= spread:
        return Finding(INCONCLUSIVE, shown, f"{claim.how['after']!r} has lost nothing to bring back. {why}")
    return Finding(CONFIRMED if abs(well.middle) <= spread else REFUTED, shown, why)


def _losses(claim: Claim, evidence: Evidence, end: str) -> tuple[Spread, Spread, Change, float]:
    """Losses over seeds of `before` and of `end`; their change in %, seed by seed where both have
    the same number of seeds; and by how many % of the median the seeds of `before` alone spread the
    loss."""
    metric, names = claim.how["metric"], (claim.how["before"], claim.how[end])
    before, after = (positive(evidence, name, metric) for name in names)
    for name, losses in zip(names, (before, after), strict=True):
        if losses.n < FEWEST_SAMPLES:
            raise NotTestable(
                f"The run {name!r} has the losses of {losses.n} seed(s); a spread takes "
                f"{FEWEST_SAMPLES}."
            )
    seeds = [evidence.samples(name, metric) for name in names]
    low, high = (min(seeds[0]), max(seeds[0])) if seeds[0] else (before.low, before.high)
    spread = 100 * (high - low) / before.median
    if len(seeds[0]) != len(seeds[1]) or len(seeds[0]) < FEWEST_SAMPLES or min(*seeds[0], *seeds[1]) <= 0:
        return before, after, _change(before, after, "more"), spread
    ratios = [mine / other for other, mine in zip(*seeds, strict=True)]
    return before, after, _in_percent(min(ratios), statistics.median(ratios), max(ratios), "more"), spread


def _has_trained(claim: Claim, evidence: Evidence, before: Spread) -> bool:
    """Whether the training of `before` brought the loss down."""
    name = claim.how["before"]
    return evidence.has(name, "start_loss") and before.median <= TRAINED * evidence.number(name, "start_loss")


def _places(change: Change) -> int:
    """Decimals that a change in % is told with."""
    return 1 if abs(change.middle) >= 1 else 2


def _told(change: Change, spread: float) -> str:
    """How far the change reaches over seeds, and by how many % they spread one method's loss."""
    reach = f"{change.low:+.{_places(change)}f} to {change.high:+.{_places(change)}f} %"
    return (
        f"by seed the change is {reach}, and seeds alone spread the loss over "
        f"{spread:.{1 if spread >= 1 else 2}f} %."
    )


def keeps_up(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]`, a cost, is at most `tolerance` (a share) higher in `after` than in `before`.

    Up to twice the tolerance it is inconclusive, and so it is where the spread reaches as far from
    the other side.
    """
    metric, most = claim.how["metric"], 100 * claim.tolerance
    before, after = (positive(evidence, claim.how[end], metric) for end in ("before", "after"))
    excess = _change(before, after, "more")
    verdict = INCONCLUSIVE
    if excess.middle <= most and excess.high <= 2 * most:
        verdict = CONFIRMED
    if excess.middle > 2 * most and excess.low > most:
        verdict = REFUTED
    why = f"{excess.middle:+.0f} %, where {most:.0f} % more would do."
    if verdict == INCONCLUSIVE and excess.middle <= most:
        why += f" But the spread reaches {excess.high:+.0f} %."
    elif verdict == INCONCLUSIVE:
        why += " More than that, but not surely twice as much."
    return Finding(verdict, f"{before.median:.3g} → {after.median:.3g}", why)


def amdahl(claim: Claim, evidence: Evidence) -> Finding:
    """What is left untouched explains the gain: if a part `share` of the step keeps its time and
    the rest runs `rate` times as fast, the step shrinks by as much as it does from `before` to
    `after`, give or take `tolerance` (a share).

    A step that shrinks by less has been held up by something else.
    """
    how = claim.how
    untouched = evidence.number(how["before"], how["share"])
    expected = 100 * (1 - untouched) * (1 - 1 / how["rate"])
    found = _change_of_time(evidence, how["before"], how["after"], "less")
    shown = f"{-found.middle:+.0f} %, {-expected:+.0f} % expected"
    within = abs(found.middle - expected) <= 100 * claim.tolerance
    near = found.low - 100 * claim.tolerance <= expected <= found.high + 100 * claim.tolerance
    why = f"What stays as it is takes {percents(untouched)} of the step."
    return Finding(CONFIRMED if within else INCONCLUSIVE if near else REFUTED, shown, why)


JUDGES = (changes, grows, multiple, breaks_even, gains_less, helps, beyond, loss_moves, brings_back, keeps_up, amdahl)
