"""Judges of what is counted, listed or computed: the same however fast the machine is."""

from __future__ import annotations

from collections.abc import Iterable

from labutils.results.claims import Claim
from labutils.results.judges.evidence import CONFIRMED, Evidence, Finding, INCONCLUSIVE, NotTestable, REFUTED, as_mapping, as_number
from labutils.results.judges.words import figures, rounded, unit_of


def count(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metrics"]` of `how["run"]` equal the published numbers, within `tolerance` (relative).
    Exact: no spread.
    """
    values = [evidence.number(claim.how["run"], metric) for metric in claim.how["metrics"]]
    pairs = list(zip(values, claim.published, strict=True))
    right = all(abs(value - published) <= claim.tolerance * abs(published) for value, published in pairs)
    shown = " → ".join(map(figures, values))
    return Finding(
        CONFIRMED if right else REFUTED, shown, "Counted here." if right else f"Published: {claim.published_text}."
    )


def unchanged(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]`, a largest change, is exactly 0."""
    change = abs(evidence.number(claim.how["run"], claim.how["metric"]))
    if change == 0:
        return Finding(CONFIRMED, "change: 0", "Not one of the frozen weights moved.")
    return Finding(REFUTED, f"change: {change:.3g}", "Frozen weights moved.")


def occurs(claim: Claim, evidence: Evidence) -> Finding:
    """The count `how["metric"]` is at least 1. Exact."""
    value = evidence.number(claim.how["run"], claim.how["metric"])
    name = claim.how["metric"].replace("_", " ")
    return Finding(CONFIRMED if value >= 1 else REFUTED, f"{value:g}", f"Counted: {value:g} ({name}).")


def flag(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is 1 (the statement holds), 0 (it doesn't), or in between where steps differ
    (inconclusive).
    """
    value = evidence.number(claim.how["run"], claim.how["metric"])
    verdict = {1.0: CONFIRMED, 0.0: REFUTED}.get(value, INCONCLUSIVE)
    checked = f"By the model of lab {claim.lab}" if claim.predicted else "Checked here, and"
    told = {1.0: f"{checked} it holds.", 0.0: f"{checked} it doesn't hold."}
    partly = f"It holds in {value:.0%} of the steps."
    return Finding(verdict, {1.0: "yes", 0.0: "no"}.get(value, f"{value:g}"), told.get(value, partly))


def lists(claim: Claim, evidence: Evidence) -> Finding:
    """`how["item"]` is in the list `how["metric"]`. An empty list says nothing. Exact: no spread.
    """
    run, metric = claim.how["run"], claim.how["metric"]
    recorded = as_mapping(evidence.run(run).metrics).get(metric)
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


def names(claim: Claim, evidence: Evidence) -> Finding:
    """The text `how["metric"]` is among `how["items"]`. Exact."""
    run, metric = claim.how["run"], claim.how["metric"]
    answer = as_mapping(evidence.run(run).metrics).get(metric)
    if not isinstance(answer, str) or not answer:
        raise NotTestable(evidence.nothing(run, metric))
    wanted = " or ".join(claim.how["items"])
    return Finding(CONFIRMED if answer in claim.how["items"] else REFUTED, answer, f"Published: {wanted}.")


def all_present(claim: Claim, evidence: Evidence) -> Finding:
    """Every one of the shares `how["metrics"]` is above 0. Exact: no spread."""
    run = claim.how["run"]
    parts = {metric.removesuffix("_share"): evidence.number(run, metric) for metric in claim.how["metrics"]}
    absent = [name for name, value in parts.items() if value <= 0]
    shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in parts.items())
    if absent:
        return Finding(REFUTED, shown, f"No time goes to: {', '.join(absent)}.")
    return Finding(CONFIRMED, shown, f"Each is seen; the largest is {max(parts, key=parts.__getitem__)}.")


def becomes(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metrics"]` equal the published numbers exactly. What a run left out was not finite, and
    refutes.
    """
    values = _finite_or_none(claim, evidence)
    right = values == list(claim.published)
    published = ", ".join(f"{value:g}" for value in claim.published)
    return Finding(CONFIRMED if right else REFUTED, _or_nan(values), f"Published: {published}.")


def within(claim: Claim, evidence: Evidence) -> Finding:
    """No number of `how["metrics"]` is beyond the published one, whichever its sign; those that
    aren't finite don't count."""
    values = _finite_or_none(claim, evidence)
    bound = claim.published[0]
    inside = all(abs(value) <= bound for value in values if value is not None)
    return Finding(CONFIRMED if inside else REFUTED, _or_nan(values), f"No number is to lie beyond ±{bound:g}.")


def _finite_or_none(claim: Claim, evidence: Evidence) -> list[float | None]:
    """Numbers of a run; None for one that a successful run left out: JSON has neither NaN nor
    infinity.
    """
    run, metrics = claim.how["run"], claim.how["metrics"]
    recorded = evidence.run(run)
    if not recorded.ok or not as_mapping(recorded.metrics):
        raise NotTestable(evidence.nothing(run, metrics[0]))
    return [as_number(recorded.metrics.get(metric)) for metric in metrics]


def _or_nan(values: Iterable[float | None]) -> str:
    return ", ".join("not finite" if value is None else f"{value:g}" for value in values)


def reaches(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` reaches `how["at_least"]`, or the published number less `tolerance` (a share
    of it), its whole p10-p90 range.

    A number without a spread is taken to be sure to 3 %.
    """
    value = evidence.spread(claim.how["run"], claim.how["metric"])
    low, high = (value.low, value.high) if value.n > 1 else (0.97 * value.median, 1.03 * value.median)
    needed = claim.how["at_least"] if "at_least" in claim.how else claim.published[0] * (1 - claim.tolerance)
    verdict = CONFIRMED if low >= needed else REFUTED if high < needed else INCONCLUSIVE
    return Finding(verdict, f"{value.median:.2f}{claim.unit}", f"At least {needed:.2f}{claim.unit} would do.")


def more_with(claim: Claim, evidence: Evidence) -> Finding:
    """The count or share `how["metric"]` (or the seconds) is larger in the run `with` what is
    blamed than in the one `without`. Exact.
    """
    blamed, other = claim.how["with"], claim.how["without"]
    more, fewer = (evidence.number(name, claim.how["metric"]) for name in (blamed, other))
    name = claim.how["metric"].replace("_", " ")
    held = more > fewer
    shown, why = (
        f"{figures(more)} against {figures(fewer)}",
        f"{name.capitalize()}: {'a' if held else 'no'} higher number in {blamed!r} than in "
        f"{other!r}.",
    )
    if unit_of(claim.how["metric"]) == "_s":
        shown, why = f"{shown} s", f"The {name.removesuffix(' s')} takes {'longer' if held else 'no longer'} with it."
    return Finding(CONFIRMED if held else REFUTED, shown, why)


def predicts(claim: Claim, evidence: Evidence) -> Finding:
    """A model's prediction `how["metric"]`, a ratio, is the published one (second number over
    first) within a factor of `tolerance`; within the square of that factor it is inconclusive."""
    ratio = evidence.number(claim.how["run"], claim.how["metric"])
    if ratio <= 0:
        raise NotTestable(
            f"The run {claim.how['run']!r} recorded {claim.how['metric']} = {ratio:g}, which is no "
            "ratio."
        )
    published = claim.published[1] / claim.published[0]
    off = max(ratio / published, published / ratio)
    verdict = CONFIRMED if off <= claim.tolerance else INCONCLUSIVE if off <= claim.tolerance**2 else REFUTED
    return Finding(verdict, f"{ratio:.2f}x", f"{published:.2f}x published; predicted, not measured.")


def same_magnitude(claim: Claim, evidence: Evidence) -> Finding:
    """The published time fits a micro-step or an optimizer step of this machine within a factor of
    `tolerance`.

    Ten times off in both readings is refuted: that would not be the same work.
    """
    run = evidence.run(claim.how["run"])
    step = evidence.duration(claim.how["run"], claim.how["metric"]).median
    accumulation = as_number(as_mapping(run.recipe).get("accumulation")) or 1
    readings = {"an optimizer step": step, "a micro-step": step / accumulation}
    factors = {name: max(ms / claim.published[0], claim.published[0] / ms) for name, ms in readings.items()}
    nearest = min(factors, key=factors.__getitem__)
    shown = (
        f"{rounded(step)} ms, {rounded(step / accumulation)} a micro-step"
        if accumulation > 1
        else f"{rounded(step)} ms"
    )
    verdict = CONFIRMED if factors[nearest] <= claim.tolerance else REFUTED if factors[nearest] >= 10 else INCONCLUSIVE
    return Finding(
        verdict,
        shown,
        f"{claim.published_text} is nearest to {nearest} here, off by a factor of "
        f"{factors[nearest]:.1f}.",
    )


JUDGES = (
    count,
    unchanged,
    occurs,
    flag,
    lists,
    names,
    all_present,
    becomes,
    within,
    reaches,
    more_with,
    predicts,
    same_magnitude,
)
