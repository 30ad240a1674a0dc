"""Judges of times and rates: which is faster, by how much, how a curve runs, what a limit allows.
"""

from __future__ import annotations

from labutils.results.claims import Claim
from labutils.results.judges.evidence import CONFIRMED, Evidence, Finding, INCONCLUSIVE, NotTestable, REFUTED
from labutils.results.judges.words import percents, rounded, unit_of


def speedup(claim: Claim, evidence: Evidence) -> Finding:
    """Ratio of `step_ms`, `before` / `after`, is the published one less `tolerance` (a share of its
    gain).

    A ratio that can't be told from 1 is never confirmed. Refuted if even the best one in its range
    falls short.
    """
    before, after = evidence.duration(claim.how["before"]), evidence.duration(claim.how["after"])
    published = claim.published[0] / claim.published[1]
    needed = 1 + (published - 1) * (1 - claim.tolerance)
    shrunk = evidence.ratio(claim.how["before"], claim.how["after"])
    ratio, best = 1 / shrunk.middle, 1 / shrunk.low
    shown = f"{rounded(before.median)} → {rounded(after.median)} ms ({ratio:.2f}x)"
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
    shown = (
        f"{rounded(spreads[before].median)} → {rounded(spreads[after].median)} ms "
        f"({100 * (ratio.middle - 1):+.0f} %)"
    )
    if ratio.unsure:
        return Finding(INCONCLUSIVE, shown, ratio.why_unsure)
    held = (ratio.middle < 1) == (quick == after)
    return Finding(CONFIRMED if held else REFUTED, shown, f"{quick!r} is {'the faster' if held else 'the slower'}.")


def shape(claim: Claim, evidence: Evidence) -> Finding:
    """Each run of `how["sweep"]` as a share of the first lies within `tolerance` (absolute) of the
    published share.
    """
    spreads = [evidence.duration(name) for name in claim.how["sweep"]]
    first, published_first = spreads[0], claim.published[0]
    shown = ", ".join(rounded(s.median) for s in spreads) + " ms"
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
    """`how["best"]` takes the least time of `how["sweep"]`, told apart from all others. Runs that
    failed don't compete.

    Inconclusive where it can't be told from the fastest, or the fastest (it) not from others.
    """
    present = [name for name in claim.how["sweep"] if evidence.has(name, "step_ms")]
    spreads = {name: evidence.duration(name) for name in present}
    wanted = claim.how["best"]
    if wanted not in spreads or len(spreads) < 3:
        raise NotTestable(
            f"{wanted!r} and at least two other runs of the sweep are needed, and {len(spreads)} "
            "are usable. "
            f"Type: labutils run {claim.lab}"
        )
    best = min(spreads, key=lambda name: spreads[name].median)
    equals = [name for name in spreads if name != best and spreads[name].overlaps(spreads[best])]
    shown = f"{best.partition('=')[2]} ({rounded(spreads[best].median)} ms)"
    if wanted not in (best, *equals):
        return Finding(
            REFUTED,
            shown,
            f"{best!r} is the fastest here, {wanted!r} takes {rounded(spreads[wanted].median)} ms.",
        )
    if equals:
        return Finding(INCONCLUSIVE, shown, f"The spread doesn't tell {best!r} from {', '.join(map(repr, equals))}.")
    return Finding(CONFIRMED, shown, f"{best!r} is the fastest by more than the spread.")


def falls(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` falls from `before` to `after` by `how["at_least"]`, or the published % less
    `tolerance`.

    Overlapping p10-p90 ranges are inconclusive.
    """
    metric = claim.how["metric"]
    before, after = evidence.spread(claim.how["before"], metric), evidence.spread(claim.how["after"], metric)
    if before.median <= 0:
        raise NotTestable(f"{metric} of {claim.how['before']!r} is {before.median:g}: nothing that could fall.")
    fall = 1 - after.median / before.median
    needed = claim.how["at_least"] if "at_least" in claim.how else claim.published[0] / 100 - claim.tolerance
    shown = f"{rounded(before.median)} → {rounded(after.median)} ({-100 * fall:+.0f} %)"
    noisy = before.overlaps(after) and max(before.n, after.n) > 1
    verdict = INCONCLUSIVE if noisy else CONFIRMED if fall >= needed else REFUTED
    return Finding(
        verdict,
        shown,
        f"{metric} {'falls' if fall > 0 else 'rises'} by {abs(100 * fall):.0f} %; "
        f"{100 * needed:.0f} % were needed.",
    )


def rises(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` (0..1) rises from `before` to `after` by the published points less
    `tolerance` (a share of them).

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
    """The sum of `how["metrics"]` is `at_most` or `at_least` a limit; nearer to it than `tolerance`
    is inconclusive.

    So is a prediction that misses it by less than the share of it by which it may be `off`.
    """
    how = claim.how
    value = sum(evidence.number(how["run"], metric) for metric in how["metrics"])
    words, bound = ("at least", how["at_least"]) if "at_least" in how else ("at most", how["at_most"])
    margin = value - bound if words == "at least" else bound - value
    text = {"_ms": "{:.2f} ms".format, "_ratio": "{:.2f}x".format, "_gb": "{:.0f} GB".format}.get(
        unit_of(how["metrics"][0]), percents
    )
    unsure = abs(margin) < claim.tolerance or -how.get("off", 0.0) * bound < margin < 0
    verdict = INCONCLUSIVE if unsure else CONFIRMED if margin >= 0 else REFUTED
    found = "is predicted" if claim.predicted else "was found"
    return Finding(verdict, text(value), f"{text(value)} {found}, where {words} {text(bound)} is meant.")


def outweighs(claim: Claim, evidence: Evidence) -> Finding:
    """The sum of the shares `how["heavier"]` exceeds that of `how["lighter"]`. Within `tolerance`:
    inconclusive.
    """
    run = claim.how["run"]
    heavy, light = (sum(evidence.number(run, m) for m in claim.how[side]) for side in ("heavier", "lighter"))
    verdict = INCONCLUSIVE if abs(heavy - light) < claim.tolerance else CONFIRMED if heavy > light else REFUTED
    sides = (" + ".join(m.removesuffix("_share") for m in claim.how[side]) for side in ("heavier", "lighter"))
    return Finding(
        verdict, f"{percents(heavy)} against {percents(light)}", "{} against {}, as shares of the step.".format(*sides)
    )


JUDGES = (speedup, faster, slower, shape, optimum, falls, rises, limit, outweighs)
