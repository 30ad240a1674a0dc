"""The eight judges. Each takes a claim and one host's runs, and gives a verdict made of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labutils.results.claims import Claim
from labutils.results.judges.effects import (
    Effect,
    NotTestable,
    effect,
    interval_of,
    metric_of,
    named,
    number,
)
from labutils.results.records import Run, Runs

CONFIRMED = "confirmed"
REFUTED = "refuted"
INCONCLUSIVE = "inconclusive"
NOT_TESTABLE = "not testable here"
PAYS, NO_DIFFERENCE, COSTS = "pays here", "makes no difference here", "costs here"
AGREES, DISAGREES = "the model agrees", "the model disagrees"
DIFFERS = "differs between hosts"
TOLD = "told"
VERDICTS = (
    *(CONFIRMED, REFUTED, INCONCLUSIVE, PAYS, NO_DIFFERENCE, COSTS, AGREES, DISAGREES),
    *(DIFFERS, TOLD, NOT_TESTABLE),
)

SLIGHTLY = 0.10
"""What the articles call slightly is less than this share. Nothing else that has no number is
read as one."""
NO_CHANGE = 0.03
"""An interval within this share of no change shows that nothing changed."""


@dataclass(frozen=True)
class Finding:
    """A verdict on one host's runs: `here` is what was measured, as text, `why` a sentence."""

    verdict: str
    here: str = ""
    why: str = ""
    effects: Mapping[str, Effect] = field(default_factory=dict)


def run_of(claim: Claim, runs: Runs, role: str = "run") -> Run:
    """The run that has this role in the claim. Raises `NotTestable` where it is not on record."""
    return _one(claim, runs, claim.runs[role])


def _one(claim: Claim, runs: Runs, tags: Mapping[str, Any]) -> Run:
    found = runs.one(claim.lab, **tags)
    if found is None:
        raise NotTestable(f"There is no run with {named(tags)}. Type: labutils run {claim.lab}")
    return found


def effects_of(claim: Claim, runs: Runs, ends: tuple[str, str] = ("base", "changed")) -> dict:
    """Label -> the effect of each pair of runs that the claim names.

    `over` pairs all runs of the two methods by a tag, as the batch; pairs that lack a run or its
    metric are left out. A list of changed runs has one base.
    """
    base, changed = (claim.runs[end] for end in ends)
    pairs: dict[str, tuple[Any, Any]] = {}
    if over := claim.how.get("over"):
        values = {run.tags.get(over) for run in runs.select(claim.lab, **base)} - {None}
        for value in sorted(values):
            pairs[f"{over} {value}"] = (base | {over: value}, changed | {over: value})
    elif isinstance(changed, list):
        for tags in changed:
            own = {name: value for name, value in tags.items() if base.get(name) != value}
            pairs[named(own)] = (base, tags)
    else:
        pairs[""] = (base, changed)
    found, refused = {}, []
    for label, tags in pairs.items():
        try:
            found[label] = _effect(claim, runs, *tags)
        except NotTestable as reason:
            refused.append(reason)
    if not found or (refused and not claim.how.get("over")):
        raise refused[0] if refused else NotTestable(f"Type: labutils run {claim.lab}")
    return found


def _effect(claim: Claim, runs: Runs, base_tags: Any, changed_tags: Any) -> Effect:
    base, changed = _one(claim, runs, base_tags), _one(claim, runs, changed_tags)
    for what in ("scale", "workload", "data"):
        values = [getattr(run, what) for run in (base, changed)]
        if values[0] != values[1]:
            raise NotTestable(f"The runs differ in {what}: {' and '.join(values)}.")
    again = runs.one(claim.lab, **(base_tags | {"again": True}))
    return effect(base, changed, again, claim.how.get("metric", "step_ms"))


def settle(held: Iterable[bool | None]) -> str:
    """One that doesn't hold refutes, all that hold confirm; None is one that can't be told."""
    held = list(held)
    if any(one is False for one in held):
        return REFUTED
    return CONFIRMED if held and all(held) else INCONCLUSIVE


def inside(low: float, high: float, least: float, most: float) -> bool | None:
    """Whether an interval lies in a range: True, False for outside, None across an end."""
    if least <= low and high <= most:
        return True
    return False if high < least or low > most else None


def conclude(claim: Claim, verdict: str, effects: Mapping[str, Effect], why: str = "") -> Finding:
    """The finding about some effects. An unsteady machine says nothing about time."""
    shown = []
    for label, one in effects.items():
        unit = unit_of(claim.how.get("metric", "step_ms"))
        text = f"{figures(one.base)} → {figures(one.changed)}{unit}, {one.text()}"
        shown.append(f"{label}: {text}" if label else text)
    if noises := [one.noise for one in effects.values() if one.noise]:
        low, high = min(low for low, _ in noises), max(high for _, high in noises)
        why += f" Noise: {100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %."
    if any(one.unsteady and not one.exact for one in effects.values()):
        verdict, why = INCONCLUSIVE, f"Unsteady machine. {why}"
    return Finding(verdict, "; ".join(shown), why.strip(), effects)


def figures(value: float) -> str:
    """All digits of a count up to a million, three figures of another number."""
    if abs(value) < 1e6 and value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


# ------------------------------------------------------------------------------------- statements


def compare(claim: Claim, runs: Runs) -> Finding:
    """`metric` is `direction` less or more in `changed` than in `base`, or at most `as much`.

    `size: slight` takes less than 10 %, `size: marked` more. With `than_base` and `than_changed`
    it changes less than between those two; with `trend` the change grows along `over`. With
    `heavier` and `lighter` two sums of metrics of one run are compared.
    """
    if "heavier" in claim.how:
        return _heavier(claim, run_of(claim, runs))
    effects = effects_of(claim, runs)
    if "than_base" in claim.runs:
        other = effects_of(claim, runs, ("than_base", "than_changed"))
        return _gains_less(claim, effects[""], other[""])
    if claim.how.get("trend"):
        return _grows(claim, effects)
    wanted = {"less": -1, "more": 1, "as much": 0}[claim.how["direction"]]
    verdict = settle(_directed(one, wanted, claim.how.get("size")) for one in effects.values())
    read = {"slight": "Slightly is less than 10 %.", "marked": "More than slightly: 10 %."}
    return conclude(claim, verdict, effects, read.get(claim.how.get("size", ""), ""))


def _directed(one: Effect, wanted: int, size: str | None) -> bool | None:
    if wanted == 0:
        return inside(one.low, one.high, 0, 1 + SLIGHTLY)
    if one.direction != wanted:
        return False if one.direction == -wanted or (one.exact and one.value == 1) else None
    if size is None:
        return True
    bound = 1 + wanted * SLIGHTLY
    within = inside(one.low, one.high, min(1, bound), max(1, bound))
    return within if size == "slight" else None if within is None else not within


def _heavier(claim: Claim, run: Run) -> Finding:
    sums = [
        sum(metric_of(run, metric) for metric in claim.how[side]) for side in ("heavier", "lighter")
    ]
    shown = " against ".join(f"{100 * share:.2g} %" for share in sums)
    return Finding(CONFIRMED if sums[0] > sums[1] else REFUTED, shown, "Shares of the step.")


def _gains_less(claim: Claim, mine: Effect, other: Effect) -> Finding:
    verdict = INCONCLUSIVE
    if mine.low > other.high:
        verdict = CONFIRMED
    elif mine.high < other.low:
        verdict = REFUTED
    return conclude(claim, verdict, {"this": mine, "against": other})


def _grows(claim: Claim, effects: Mapping[str, Effect]) -> Finding:
    if len(effects) < 2:
        raise NotTestable(f"Growth takes two sizes, and one was measured: {''.join(effects)}.")
    first, last = list(effects.values())[0], list(effects.values())[-1]
    rises = {"more": last.low > first.high, "less": last.high < first.low}
    falls = {"more": last.high < first.low, "less": last.low > first.high}
    towards = claim.how["direction"]
    verdict = CONFIRMED if rises[towards] else REFUTED if falls[towards] else INCONCLUSIVE
    return conclude(claim, verdict, effects)


def published_band(claim: Claim) -> tuple[float, float]:
    """The ratios, changed over base, that agree with the published numbers, by `form`.

    gain: the published ratio, less `tolerance` as a share of its gain, or anything better.
    percent: the published % or range, `tolerance` more or less in percentage points, with
    `at_least` open towards a larger effect, and never beyond 0. times: within a factor of
    `tolerance`.
    """
    numbers, how = claim.published, claim.how
    tolerance = how["tolerance"]
    if how["form"] == "gain":
        ratio = numbers[1] / numbers[0]
        needed = 1 + (max(ratio, 1 / ratio) - 1) * (1 - tolerance)
        return (0.0, 1 / needed) if ratio < 1 else (needed, math.inf)
    if how["form"] == "times":
        ratio = numbers[1] / numbers[0]
        return ratio / tolerance, ratio * tolerance
    low, high = numbers[0] - tolerance, numbers[-1] + tolerance
    if numbers == (0,):
        return 1 + low / 100, 1 + high / 100
    low, high = max(low, 0.0), math.inf if how.get("at_least") else high
    if how["direction"] == "more":
        return 1 + low / 100, 1 + high / 100
    return max(0.0, 1 - high / 100), 1 - low / 100


def published_ratios(claim: Claim) -> tuple[float, float] | None:
    """The least and the most ratio, changed over base, that the article gives; None for none."""
    form, numbers = claim.how.get("form"), claim.published
    if claim.judge != "ratio" or form in ("steps", "shares"):
        return None
    if form in ("gain", "times"):
        return numbers[1] / numbers[0], numbers[1] / numbers[0]
    sign = 1 if claim.how["direction"] == "more" else -1
    ratios = [1 + sign * percent / 100 for percent in numbers]
    return min(ratios), max(ratios)


def ratio(claim: Claim, runs: Runs) -> Finding:
    """The change from `base` to `changed` is the published one; see `published_band` for `form`.

    Two more forms: shares, where each of a list of changed runs is the published share of the
    base, `tolerance` more or less; and steps, where a slower start has paid after the published
    number of steps, within a factor of `tolerance`. An effect of the other sign never confirms.
    """
    effects = effects_of(claim, runs)
    form, tolerance = claim.how["form"], claim.how["tolerance"]
    if form == "steps":
        return _break_even(claim, runs, effects[""])
    if form == "shares":
        shares = [value / claim.published[0] for value in claim.published[1:]]
        pairs = zip(effects.values(), shares, strict=True)
        held = [inside(e.low, e.high, s - tolerance, s + tolerance) for e, s in pairs]
        why = f"Published shares of the first: {', '.join(f'{share:.2f}' for share in shares)}."
        return conclude(claim, settle(held), effects, why)
    least, most = published_band(claim)
    held = [_published(one, least, most, claim.published == (0,)) for one in effects.values()]
    if form == "times":
        wide = [
            inside(e.low, e.high, least / tolerance, most * tolerance) for e in effects.values()
        ]
        held = [h if h or w is False else None for h, w in zip(held, wide, strict=True)]
    band = f"{least:.2f} to {most:.2f}" if most < math.inf else f"{least:.2f} or more"
    return conclude(claim, settle(held), effects, f"A ratio of {band} agrees with the article.")


def _published(one: Effect, least: float, most: float, unchanged: bool) -> bool | None:
    within = inside(one.low, one.high, least, most)
    if unchanged:
        return within
    wanted = 1 if least >= 1 else -1 if most <= 1 else 0
    if wanted and one.direction == -wanted:
        return False
    return None if within and wanted and one.direction != wanted else within


def _break_even(claim: Claim, runs: Runs, step: Effect) -> Finding:
    base, changed = run_of(claim, runs, "base"), run_of(claim, runs, "changed")
    extra = metric_of(changed, "first_step_s") - metric_of(base, "first_step_s")
    if step.direction >= 0:
        verdict = REFUTED if step.direction > 0 else INCONCLUSIVE
        return conclude(claim, verdict, {"": step}, "No step is surely saved.")
    steps = [1e3 * extra / (step.base * (1 - x)) for x in (step.low, step.value, step.high)]
    wanted, factor = claim.published[0], claim.how["tolerance"]
    verdict = settle([inside(steps[0], steps[2], wanted / factor, wanted * factor)])
    shown = f"{steps[1]:,.0f} steps ({steps[0]:,.0f} to {steps[2]:,.0f})"
    why = f"{extra:.1f} s more at first, {step.base * (1 - step.value):.0f} ms less a step."
    done = conclude(claim, verdict, {"": step}, why)
    return Finding(done.verdict, shown, done.why, done.effects)


def in_range(claim: Claim, runs: Runs) -> Finding:
    """The sum of `metrics` lies from `min` to `max`; NaN lies nowhere.

    With `over_noise_of` it must exceed what the interval of that metric hides.
    """
    run, how = run_of(claim, runs), claim.how
    parts = [interval_of(run, metric) for metric in how["metrics"]]
    value, low, high = (sum(part[place] for part in parts) for place in range(3))
    least, most = how.get("min", -math.inf), how.get("max", math.inf)
    if "over_noise_of" in how:
        _, *ends = interval_of(run, how["over_noise_of"])
        least = (ends[1] - ends[0]) / 2
    shown = with_unit(value, how["metrics"][0])
    band = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
    if least == -math.inf:
        band = f"{most:g} or less"
    if "over_noise_of" in how and value < least:
        return Finding(INCONCLUSIVE, shown, f"The noise of {how['over_noise_of']} is {least:.2g}.")
    return Finding(settle([inside(low, high, least, most)]), shown, f"The range: {band}.")


def unit_of(metric: str) -> str:
    """ " ms", " s" or " GB" where a metric's name ends so, "" for another."""
    if metric.endswith("_per_s"):
        return ""
    return {"ms": " ms", "s": " s", "gb": " GB"}.get(metric.rpartition("_")[2], "")


def with_unit(value: float, metric: str) -> str:
    """A value with its unit; shares are written in percent."""
    if metric.endswith(("share", "utilization", "busy")):
        return f"{100 * value:.2g} %"
    return f"{value:.3g}{unit_of(metric)}"


def equals(claim: Claim, runs: Runs) -> Finding:
    """`metrics` are the published numbers, or `values`, within `tolerance`, a share.

    A metric that the run lacks is NaN where `absent` says so; NaN equals nothing. Where 1 is meant
    and a share of the steps has it, nothing can be told.
    """
    run, how = run_of(claim, runs), claim.how
    wanted = how.get("values", claim.published)
    if how.get("absent") == "NaN" and run.ok and run.metrics:
        values = [number(run.metrics.get(metric, math.nan)) for metric in how["metrics"]]
        values = [math.nan if value is None else value for value in values]
    else:
        values = [metric_of(run, metric) for metric in how["metrics"]]
    tolerance = how.get("tolerance", 0.0)
    pairs = list(zip(values, wanted, strict=True))
    held: list[bool | None] = [abs(value - want) <= tolerance * abs(want) for value, want in pairs]
    if wanted == [1] and 0 < values[0] < 1:
        held = [None]
    return Finding(settle(held), ", ".join(map(_digits, values)), "Counted, not timed.")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"


def fails(claim: Claim, runs: Runs) -> Finding:
    """The run fails with one of `words` in its message; another failure says nothing.

    A `control` run, without the cause that is blamed, must not fail. `capability` is the only one
    that can tell. `warned` is a metric that must be above 0.
    """
    how = claim.how
    if "capability" in how:
        own = str(run_of(claim, runs, "machine").machine.get("compute_capability", "unknown"))
        if own != how["capability"]:
            needed = f"It takes a card of compute capability {how['capability']}"
            raise NotTestable(f"{needed}; this one has {own}.")
    run = run_of(claim, runs)
    message = failure(run)
    if message is None:
        verdict = INCONCLUSIVE if "control" in claim.runs else REFUTED
        return Finding(verdict, "no failure", "It runs without failing.")
    first = (message.strip().splitlines() or [""])[0][:160]
    if not any(word.lower() in message.lower() for word in how.get("words", [""])):
        return Finding(INCONCLUSIVE, "fails otherwise", first)
    if "warned" in how and not metric_of(run, how["warned"]):
        return Finding(INCONCLUSIVE, "fails without a warning", first)
    if "control" in claim.runs and failure(run_of(claim, runs, "control")) is not None:
        return Finding(REFUTED, "fails without the cause too", first)
    return Finding(
        CONFIRMED, "fails" if "control" not in claim.runs else "fails only with it", first
    )


def failure(run: Run) -> str | None:
    """What a run failed with, None where it succeeded. A provoked failure is in the metrics."""
    failed = number(run.metrics.get("failed"))
    if failed is None:
        if run.status.startswith("skipped"):
            raise NotTestable(f"The run with {named(run.tags)} was not made: {run.status}.")
        failed = 0 if run.ok else 1
    return str(run.metrics.get("message") or run.status) if failed else None


def contains(claim: Claim, runs: Runs) -> Finding:
    """The list `metric` has one of `items`, or the text `metric` is one of them."""
    run, metric = run_of(claim, runs), claim.how["metric"]
    value = run.metrics.get(metric)
    found = list(map(str, value)) if isinstance(value, list | tuple) else [value] if value else []
    if not found:
        raise NotTestable(f"The run with {named(run.tags)} recorded no {metric}.")
    items = claim.how["items"]
    shown = f"{found[0]} .. {found[-1]}" if len(found) > 1 else str(found[0])
    has = any(item in found for item in items)
    return Finding(CONFIRMED if has else REFUTED, shown, f"Looked for: {' or '.join(items)}.")


# --------------------------------------------------------------------------- predictions, advice


def predicts(claim: Claim, runs: Runs) -> Finding:
    """The model's numbers, one for each of `readings` of what it assumes, agree with the article.

    They agree from `min` to `max`, a miss by a share `margin` telling nothing; or within `factor` of
    the ratio of the published numbers; or where they are 1. With `rises` each reading exceeds the
    one before. Readings that differ, or that the run lacks, leave it to the `assumption`. So does a
    published number beyond `fastest`, the most that the data sheets allow under the assumption.
    """
    run, how = run_of(claim, runs), claim.how
    values = {name: number(run.metrics.get(metric)) for name, metric in how["readings"].items()}
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        raise NotTestable(
            f"The run with {named(run.tags)} recorded none of {', '.join(how['readings'].values())}."
        )
    shown = ", ".join(
        f"{name}: {figures(v)}" if len(known) > 1 else figures(v) for name, v in known.items()
    )
    assumption = how.get("assumption", "")
    pairs = zip(claim.published, how.get("fastest", ()), strict=False)
    if beaten := [f"{a:g} against {b:g}" for a, b in pairs if a > b]:
        why = f"A published number beats our bound ({beaten[0]}). Then it is wrong {assumption}."
        return Finding(INCONCLUSIVE, f"{shown} predicted", why)
    held = [_agrees(claim, value) for value in known.values()]
    if how.get("rises"):
        ordered = list(known.values())
        held = [ordered == sorted(ordered)]
    if len(known) < len(values) or len(set(held)) > 1:
        return Finding(
            INCONCLUSIVE, f"{shown} predicted", f"It hangs on one assumption: {assumption}."
        )
    verdict = {True: AGREES, False: DISAGREES, None: INCONCLUSIVE}[held[0]]
    return Finding(verdict, f"{shown} predicted", f"Published: {claim.published_text}.")


def _agrees(claim: Claim, value: float) -> bool | None:
    how = claim.how
    if "factor" in how:
        published = claim.published[1] / claim.published[0]
        off = max(value / published, published / value)
        return True if off <= how["factor"] else None if off <= how["factor"] ** 2 else False
    least, most = how.get("min", -math.inf), how.get("max", math.inf)
    if "min" not in how and "max" not in how:
        return value == 1
    if least <= value <= most:
        return True
    margin = how.get("margin", 0.0)
    return None if least * (1 - margin) <= value <= most * (1 + margin) else False


def advice(claim: Claim, runs: Runs) -> Finding:
    """Whether advice without a number pays here: `metric` moves in `direction`, or against it."""
    effects = effects_of(claim, runs)
    one = effects[""]
    wanted = -1 if claim.how["direction"] == "less" else 1
    if one.direction:
        verdict = PAYS if one.direction == wanted else COSTS
    else:
        low, high = one.noise or (1.0, 1.0)
        least, most = min(low, 1 - NO_CHANGE), max(high, 1 + NO_CHANGE)
        verdict = NO_DIFFERENCE if inside(one.low, one.high, least, most) else INCONCLUSIVE
    return conclude(claim, verdict, effects)


JUDGES: dict[str, Callable[[Claim, Runs], Finding]] = {
    "compare": compare,
    "ratio": ratio,
    "range": in_range,
    "equals": equals,
    "fails": fails,
    "contains": contains,
    "predicts": predicts,
    "advice": advice,
}
