"""Verdicts: what the runs on record say about a published claim, by one of eight judges.

It may import claims, records and effects. A judge takes a claim and one host's runs, and
makes a verdict and its sentence of numbers with an interval. Hosts are judged one by one, because
the host paces many steps: the verdict is what all of them say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labutils.results import claims, effects
from labutils.results.claims import Claim
from labutils.results.effects import STEADY, Effect, NotTestable, metric_of, named, number
from labutils.results.records import Run, Runs

CONFIRMED, REFUTED, INCONCLUSIVE = "confirmed", "refuted", "inconclusive"
PAYS, NO_DIFFERENCE, COSTS = "pays here", "makes no difference here", "costs here"
AGREES, DISAGREES = "the model agrees", "the model disagrees"
DIFFERS, TOLD, NOT_TESTABLE = "differs between hosts", "told", "not testable here"
VERDICTS = (CONFIRMED, REFUTED, INCONCLUSIVE, PAYS, NO_DIFFERENCE, COSTS, AGREES, DISAGREES)
VERDICTS += (DIFFERS, TOLD, NOT_TESTABLE)

SLIGHTLY = 0.10
"""What the articles call slightly is less than this share. No other word is read as a number."""


@dataclass(frozen=True)
class Judgement:
    """A claim and what runs say about it; `theirs` is what the reference's runs say.

    `here` is what was measured, as text, "" where nothing was; `why` is the reason in a sentence;
    `effects` are the numbers behind both, by label.
    """

    claim: Claim
    verdict: str
    here: str = ""
    why: str = ""
    effects: Mapping[str, Effect] = field(default_factory=dict)
    theirs: Judgement | None = None

    @property
    def unsteady(self) -> bool:
        """Whether the machine was too unsteady to say anything about this claim."""
        return any(one.unsteady and not one.exact for one in self.effects.values())

    @property
    def published(self) -> str:
        return self.claim.published_text

    @property
    def reference(self) -> str:
        return self.theirs.here if self.theirs else ""

    @property
    def reference_verdict(self) -> str:
        return self.theirs.verdict if self.theirs else NOT_TESTABLE

    @property
    def reference_why(self) -> str:
        return self.theirs.why if self.theirs else ""


def judge(claim: Claim, runs: Runs, reference: Runs | None = None) -> Judgement:
    """Judge a claim by runs, and by those of the reference. A missing or broken run never raises:
    it makes the claim not testable here, and `why` says what to run.
    """
    theirs = None if reference is None else judge(claim, reference)
    if claim.reason:
        verdict = TOLD if claim.kind == "setting" else NOT_TESTABLE
        return Judgement(claim, verdict, "", claim.reason, theirs=theirs)
    own = runs.select(claim.lab)
    by_host = [Judgement(claim, NOT_TESTABLE, "", f"No run yet. Type: labutils run {claim.lab}")]
    by_host += [_on_host(claim, there) for there in own.by_host()]
    answers = [one for one in by_host if one.verdict != NOT_TESTABLE]
    if shaky := [one for one in answers if one.unsteady]:  # then who measured no noise has no say
        twice = (a for a in answers if all(e.again or e.exact for e in a.effects.values()))
        answers = [one for one in twice if not one.unsteady] or shaky
    last = (answers or by_host)[-1]
    if len(newest := {one.verdict: one for one in answers}) > 1:
        here = ", ".join(f"{one.here} ({one.verdict})" for one in newest.values())
        why = f"{len(answers)} hosts; of each verdict the newest."
        last = replace(last, verdict=DIFFERS, here=here, why=why)
    return replace(last, theirs=theirs)


def judge_all(
    ids: str | Iterable[str] | None, runs: Runs, reference: Runs | None = None
) -> list[Judgement]:
    """Judge the claims of these `ids`: one, several, or None for all. Raises `ValueError` for an id
    that no article has.
    """
    chosen = [ids] if isinstance(ids, str) else claims.load_claims() if ids is None else ids
    return [judge(claims.claim(id), runs, reference) for id in chosen]


def _on_host(claim: Claim, runs: Runs) -> Judgement:
    """What the runs of one host say."""
    own = [run for tags in claim.runs.values() for run in runs.select(claim.lab, **tags)]
    part = "gpu" if claim.needs in ("gpu", "any") else "compute_capability"
    had = {str(run.machine.get(part)) for run in own or runs} - {"None"}
    try:
        if claim.needs not in ("any", *had) and (claim.needs != "gpu" or not had):
            card = "a GPU" if part == "gpu" else f"a card of compute capability {claim.needs}"
            raise NotTestable(f"It takes {card}.")
        if claim.weights and any(run.weights != claim.weights for run in own):
            raise NotTestable("Random weights can't answer: it takes the pretrained ones.")
        judgement = JUDGES[claim.judge](claim, runs)
    except NotTestable as reason:
        return Judgement(claim, NOT_TESTABLE, "", str(reason))
    counted = claim.needs == "any" or claim.judge not in ("range", "compare")
    changes = judgement.effects.values()
    if all(one.exact for one in changes) and (changes or counted):
        return judgement
    scales = ", ".join(sorted({run.scale for run in own} - {"full"}))
    why = f"{judgement.why} At scale {scales}." if scales else judgement.why
    return replace(judgement, why=why.strip())


# ------------------------------------------------------------------------------ runs and numbers


def _run(claim: Claim, runs: Runs, role: str = "run", **tags: Any) -> Run:
    """The run that has this role, with further tags."""
    wanted = tags | claim.runs[role] if role == "base" else claim.runs[role] | tags
    run = runs.one(claim.lab, **wanted)
    if run is None:
        raise NotTestable(f"There is no run with {named(wanted)}. Type: labutils run {claim.lab}")
    return run


def _effects(claim: Claim, runs: Runs, base: str = "base", changed: str = "changed") -> dict:
    """Label -> the effect of a pair of runs; of one for each value of the tag that `over` names.

    A base with a value of its own keeps it. Of several pairs those that lack a run or its metric
    are left out.
    """
    over = claim.how.get("over", {})
    changes, refused = {}, NotTestable(f"Type: labutils run {claim.lab}")
    for tags in [{tag: value} for tag, values in over.items() for value in values] or [{}]:
        try:
            pair = _run(claim, runs, base, **tags), _run(claim, runs, changed, **tags)
            for what in ("scale", "workload", "data"):
                if getattr(pair[0], what) != getattr(pair[1], what):
                    raise NotTestable(f"The runs differ in {what}.")
            metric = claim.how.get("metric", "step_ms")
            changes[named(tags)] = effects.effect(*pair, _measured_twice(runs, pair[0]), metric)
        except NotTestable as reason:
            refused = reason
    if not changes:
        raise refused
    return changes


def _measured_twice(runs: Runs, base: Run) -> effects.Twice:
    """The base that was visited twice in the rounds of this base's comparison: it says how noisy
    they were. What was timed by hand is of no comparison: the lab's last one says how noisy the
    machine was. None where none was.
    """
    visited = runs.select(base.lab)
    again = [one for one in visited if one.tags.get("again")]
    own = [one for one in again if one.comparison == base.comparison]
    for last in (own or ([] if base.comparison else again))[-1:]:
        first = {name: tag for name, tag in last.tags.items() if name != "again"}
        rounds = (one for one in visited if one.comparison == last.comparison)
        return next(((one, last) for one in rounds if one.tags == first), None)
    return None


def _settle(held: Sequence[bool | None]) -> str:
    """One that doesn't hold refutes, all that hold confirm; None is one that can't be told."""
    return REFUTED if False in held else CONFIRMED if held and all(held) else INCONCLUSIVE


def _inside(low: float, high: float, least: float, most: float) -> bool | None:
    """Whether an interval lies in a range: True, False for outside, None across an end."""
    outside = high < least or low > most
    return (least <= low and high <= most) or (False if outside else None)


def _conclude(claim: Claim, verdict: str, changes: dict[str, Effect], why: str = "") -> Judgement:
    """The judgement of some changes. An unsteady machine says nothing about time."""
    metric = claim.how.get("metric", "step_ms")
    here = []
    for label, one in changes.items():
        values = f"{shown(one.base, metric)} → {shown(one.changed, metric)}, "
        here.append(f"{label}: " * bool(label) + values * (len(changes) == 1) + one.text())
    if noises := [one.noise for one in changes.values() if one.noise]:
        low, high = min(low for low, _ in noises), max(high for _, high in noises)
        why = f"{why} Noise: {100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %.".strip()
    judgement = Judgement(claim, verdict, "; ".join(here), why, changes)
    if judgement.unsteady:
        larger = verdict != INCONCLUSIVE and all(one.direction for one in changes.values())
        though = ", though the change is larger than the noise" * larger
        why = f"Unsteady machine: no time decides{though}. {why}"
        return replace(judgement, verdict=INCONCLUSIVE, why=why)
    return judgement


def shown(value: float, metric: str = "", digits: int = 4) -> str:
    """A number as text: counts whole, shares in percent, else with its metric's unit."""
    if metric.endswith(("share", "utilization", "busy")):
        return f"{100 * value:.2g} %"
    unit = "" if metric.endswith("_per_s") else metric.rpartition("_")[2]
    unit = {"ms": " ms", "s": " s", "gb": " GB"}.get(unit, "")
    digits = 3 if unit else digits
    whole = value == round(value) or abs(float(f"{value:.{digits}g}")) >= 10**digits
    return (f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:,.{digits}g}") + unit


# ------------------------------------------------------------------------------------- the judges


def compare(claim: Claim, runs: Runs) -> Judgement:
    """`metric` is `direction` less or more in `changed` than in `base`, or at most `as much`.

    `size: slight` takes less than 10 %, `size: marked` more. With `than_base` and `than_changed`
    it falls less than between those two; with `trend` the change grows along `over`. With `heavier`
    and `lighter` two sums of metrics of one run are compared.
    """
    how = claim.how
    if "heavier" in how:
        run, sides = _run(claim, runs), (how["heavier"], how["lighter"])
        heavy, light = (sum(metric_of(run, metric) for metric in side) for side in sides)
        # Without its unit a metric's name says what it is of: the host's share is "host".
        names = [" + ".join(metric.rpartition("_")[0] for metric in side) for side in sides]
        sums = [shown(value, side[0]) for value, side in zip((heavy, light), sides, strict=True)]
        here = f"{sums[0]} ({names[0]}) against {sums[1]} ({names[1]})".replace("_", " ")
        return Judgement(claim, CONFIRMED if heavy > light else REFUTED, here)
    changes = _effects(claim, runs)
    if "than_base" in claim.runs:
        other = _effects(claim, runs, "than_base", "than_changed")
        changes = {"this": changes[""], "against": other[""]}
        return _conclude(claim, _ordered(changes["against"], changes["this"]), changes)
    if how.get("trend"):
        if len(changes) < 2:
            raise NotTestable(f"It takes two values of {' and '.join(how['over'])}.")
        ends = list(changes.values())[:: 1 if how["direction"] == "more" else -1]
        return _conclude(claim, _ordered(ends[0], ends[-1]), changes)
    wanted = {"less": -1, "more": 1, "as much": 0}[how["direction"]]
    return _conclude(claim, _settle([_moves(e, wanted, how) for e in changes.values()]), changes)


def _ordered(lower: Effect, higher: Effect) -> str:
    """Whether one effect is less than the other by more than both intervals and the noise."""
    (least, low), (high, most) = lower.bounds, higher.bounds
    return _settle([low < high or (None if least <= most else False)])


def _moves(one: Effect, wanted: int, how: Mapping[str, Any]) -> bool | None:
    """Whether an effect has the wanted direction and size; 0 wants no more than slightly more."""
    if wanted == 0:
        return _inside(*one.bounds, 0, 1 + SLIGHTLY)
    if one.direction != wanted:
        return False if one.direction == -wanted or (one.exact and one.value == 1) else None
    bound, far = 1 + wanted * SLIGHTLY, math.inf if wanted > 0 else 0.0
    ends = {"slight": (1.0, bound), "marked": (bound, far)}.get(how.get("size", ""), (1.0, far))
    return _inside(*one.bounds, min(ends), max(ends))


def ratio(claim: Claim, runs: Runs) -> Judgement:
    """The ratio of `changed` to `base` is the published one, by `form`.

    gain: less `tolerance` as a share of the gain, or anything better. times: within a factor of
    `tolerance`. percent: `tolerance` more or less in percentage points, with `at_least` open
    towards a larger effect. steps: a slower start has paid after the published number of steps,
    within a factor of `tolerance`. With more than two numbers each run of `over` has its own. An
    effect of the other sign never confirms.
    """
    changes = _effects(claim, runs)
    if claim.how["form"] == "steps":
        return _break_even(claim, runs, changes[""])
    over = claim.how.get("over", {})
    order = [named({tag: value}) for tag in over for value in over[tag]]
    held, bands = [], []
    for label, one in changes.items():
        place = order.index(label) + 1 if len(claim.published) > 2 else -1
        least, most = _band((claim.published[0], claim.published[place]), claim.how)
        within = _inside(*one.bounds, least, most)
        wanted = 1 if least >= 1 else -1 if most <= 1 else 0
        if claim.how["form"] == "times" and claim.published[place] != claim.published[0]:
            wanted = 1 if claim.published[place] > claim.published[0] else -1
        held.append(None if within and wanted and one.direction != wanted else within)
        ends = [f"at least {least:.2f}"] * (least > 0) + [f"at most {most:.2f}"] * (most < math.inf)
        bands.append(" and ".join(ends))
    why = f"Asked: a ratio of {', '.join(dict.fromkeys(bands))}."
    return _conclude(claim, _settle(held), changes, why)


def _band(numbers: Sequence[float], how: Mapping[str, Any]) -> tuple[float, float]:
    """The ratios, changed over base, that agree with published numbers; see `ratio`."""
    tolerance, form = how["tolerance"], how["form"]
    if form == "percent":
        low, high = numbers[0] - tolerance, numbers[-1] + tolerance
        if numbers[-1]:
            low, high = max(low, 0.0), math.inf if how.get("at_least") else high
        ends = [1 + (1 if how["direction"] == "more" else -1) * x / 100 for x in (low, high)]
        return max(0.0, min(ends)), max(ends)
    factor = numbers[1] / numbers[0]
    if form == "times":
        return factor / tolerance, factor * tolerance
    needed = 1 + (max(factor, 1 / factor) - 1) * (1 - tolerance)
    return (0.0, 1 / needed) if factor < 1 else (needed, math.inf)


def _break_even(claim: Claim, runs: Runs, step: Effect) -> Judgement:
    """After how many steps the milliseconds that each saves have paid for the slower start."""
    starts = [metric_of(_run(claim, runs, role), "first_step_s") for role in ("base", "changed")]
    if step.direction >= 0:
        verdict = REFUTED if step.direction > 0 else INCONCLUSIVE
        return _conclude(claim, verdict, {"": step}, "No step is surely saved.")
    extra = 1e3 * (starts[1] - starts[0])
    saved = (step.base * (1 - x) for x in (step.low, step.value, step.high))
    low, steps, high = (extra / ms if ms > 0 else math.inf for ms in saved)
    wanted, factor = claim.published[0], claim.how["tolerance"]
    verdict = _settle([_inside(low, high, wanted / factor, wanted * factor)])
    judgement = _conclude(claim, verdict, {"": step}, f"{shown(extra)} ms more at first.")
    return replace(judgement, here=f"{steps:,.0f} steps ({low:,.0f} to {high:,.0f})")


def in_range(claim: Claim, runs: Runs) -> Judgement:
    """The sum of `metrics` lies from `min` to `max`; NaN lies nowhere."""
    run, how = _run(claim, runs), claim.how
    parts = [effects.interval(run, metric) for metric in how["metrics"]]
    value, low, high = (sum(part[place] for part in parts) for place in range(3))
    least, most = how.get("min", -math.inf), how.get("max", math.inf)
    verdict = _settle([_inside(low, high, least, most)])
    ends = {"at least": least, "at most": most}
    asked = [f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end)]
    why = f"Asked: {' and '.join(asked)}."
    return Judgement(claim, verdict, shown(value, how["metrics"][0]), why)


def equals(claim: Claim, runs: Runs) -> Judgement:
    """`metrics` are the published numbers, or `values`, within `tolerance`, a share.

    A metric that the run lacks is NaN where `absent` says so; NaN equals nothing.
    """
    run, how = _run(claim, runs), claim.how
    values = [number(run.metrics.get(metric)) for metric in how["metrics"]]
    if how.get("absent") != "NaN" or not run.metrics:
        values = [metric_of(run, metric) for metric in how["metrics"]]
    values = [math.nan if value is None else value for value in values]
    wanted, tolerance = how.get("values", claim.published), how.get("tolerance", 0.0)
    pairs = zip(values, wanted, strict=True)
    held = [abs(value - want) <= tolerance * abs(want) for value, want in pairs]
    here = [
        "NaN" if math.isnan(value) else shown(value, metric, digits=6)
        for value, metric in zip(values, how["metrics"], strict=True)
    ]
    return Judgement(claim, _settle(held), ", ".join(here), "Counted, not timed.")


def fails(claim: Claim, runs: Runs) -> Judgement:
    """The run fails with one of `words` in its message; another failure says nothing. A `control`
    run, without the cause that is blamed, must not fail; `cure` says that it is the claim's cure.
    """
    message = _failure(_run(claim, runs))
    controlled, cure = "control" in claim.runs, claim.how.get("cure")
    if message is None:
        return Judgement(claim, INCONCLUSIVE if controlled else REFUTED, "no failure")
    first = (message.strip().splitlines() or [""])[0][:160]
    if not any(word.lower() in message.lower() for word in claim.how.get("words", [""])):
        return Judgement(claim, INCONCLUSIVE, "fails otherwise", first)
    if controlled and _failure(_run(claim, runs, "control")) is not None:
        here = "not cured" if cure else "fails without the cause too"
        return Judgement(claim, REFUTED, here, first)
    here = "cured" if cure else "fails only with it" if controlled else "fails"
    return Judgement(claim, CONFIRMED, here, "" if cure else first)


def _failure(run: Run) -> str | None:
    """What a run failed with, None where it succeeded. A provoked failure is in the metrics."""
    failed = number(run.metrics.get("failed"))
    if failed is None and run.status.startswith("skipped"):
        raise NotTestable(f"The run with {named(run.tags)} was not made: {run.status}.")
    message = str(run.metrics.get("message") or run.status)
    return message if (not run.ok if failed is None else failed) else None


def contains(claim: Claim, runs: Runs) -> Judgement:
    """The list `metric` has one of `items`, or the text `metric` is one of them.

    Where times chose it, `base` and `changed` are one recipe measured twice, and tell the noise.
    """
    run, items = _run(claim, runs), claim.how["items"]
    value = run.metrics.get(claim.how["metric"])
    held = list(map(str, value)) if isinstance(value, list | tuple) else [value] if value else []
    if not held:
        raise NotTestable(f"The run with {named(run.tags)} recorded no {claim.how['metric']}.")
    here = " .. ".join(dict.fromkeys((str(held[0]), str(held[-1]))))
    verdict = CONFIRMED if any(item in held for item in items) else REFUTED
    # Of the steps' times: this claim's own metric is the list.
    changes = _effects(replace(claim, how={}), runs) if "base" in claim.runs else {}
    judgement = _conclude(claim, verdict, changes, f"Looked for: {' or '.join(items)}.")
    return replace(judgement, here=here)


def predicts(claim: Claim, runs: Runs) -> Judgement:
    """The model's numbers, one for each of `readings` of what it assumes, agree with the article.

    They agree from `min` to `max`, with the share `margin` by which the model may be off. Texts
    show them in `unit`. Readings that differ leave it to the `assumption`. So does a published
    number beyond `fastest`, the most that the data sheets allow under the assumption. A run without
    a reading is of an older model.
    """
    run, how = _run(claim, runs), claim.how
    values = {name: number(run.metrics.get(metric)) for name, metric in how["readings"].items()}
    if lacks := [name for name, value in values.items() if value is None]:
        raise NotTestable(f"The run with {named(run.tags)} recorded no number {lacks[0]}.")
    metric, unit = next(iter(how["readings"].values())), how.get("unit", "")
    text = {one: shown(value, metric, digits=3) + unit for one, value in values.items()}
    ends = dict.fromkeys(text[find(values, key=values.get)] for find in (min, max))
    between = " to ".join(ends)
    each = ", ".join(f"{value} {one}" for one, value in text.items())
    if len(ends) == 1 < len(text):
        each = f"{between} by each reading"
    least, most = how.get("min", -math.inf), how.get("max", math.inf)
    low, high = 1 - how.get("margin", 0.0), 1 + how.get("margin", 0.0)
    held = {_inside(low * value, high * value, least, most) for value in values.values()}
    assumption = how.get("assumption", "")
    bounds = zip(claim.published, how.get("fastest", ()), strict=False)
    verdict, why = INCONCLUSIVE, f"It hangs on what is assumed: {assumption}."
    if beaten := [f"{number:g} against {bound:g}" for number, bound in bounds if number > bound]:
        why = f"A published number beats our bound ({beaten[0]}). Then it is wrong {assumption}."
    elif held == {None}:
        why = f"The model may be off by {how['margin']:.0%}, which decides."
    elif len(held) == 1:
        verdict = AGREES if True in held else DISAGREES
        why = f"Published: {claim.published_text}."
    return Judgement(claim, verdict, f"predicted: {between}", f"{each}. {why}")


def advice(claim: Claim, runs: Runs) -> Judgement:
    """Whether advice without a number pays here: `metric` moves in `direction`, or against it."""
    (one,) = _effects(claim, runs).values()
    wanted = -1 if claim.how["direction"] == "less" else 1
    low, high = one.noise or (1.0, 1.0)
    level = _inside(one.low, one.high, min(low, 1 - STEADY), max(high, 1 + STEADY))
    verdict = {wanted: PAYS, -wanted: COSTS, 0: NO_DIFFERENCE if level else INCONCLUSIVE}
    return _conclude(claim, verdict[one.direction], {"": one})


JUDGES = {judge.__name__: judge for judge in (compare, ratio, equals, fails, contains, predicts)}
JUDGES |= {"range": in_range, "advice": advice}
