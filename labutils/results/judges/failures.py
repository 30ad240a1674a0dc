"""Judges of what breaks: which run failed, with what, and what cured it."""

from __future__ import annotations

from labutils.results.claims import Claim
from labutils.results.judges.evidence import CONFIRMED, Evidence, Finding, INCONCLUSIVE, NotTestable, REFUTED, as_mapping
from labutils.results.judges.words import first_line, rounded


def fails(claim: Claim, evidence: Evidence) -> Finding:
    """The run failed with one of `how["words"]` in its message. Another failure is inconclusive,
    success refutes.
    """
    message = evidence.failure(claim.how["run"])
    if message is None:
        return Finding(REFUTED, "no failure", "It runs without failing.")
    if any(word.lower() in message.lower() for word in claim.how["words"]):
        return Finding(CONFIRMED, "fails", first_line(message))
    return Finding(INCONCLUSIVE, "fails otherwise", f"It fails, but with: {first_line(message)}")


def cured(claim: Claim, evidence: Evidence) -> Finding:
    """`how["failing"]` fails and `how["working"]` doesn't; where nothing fails there is nothing to
    cure.
    """
    ill, well = evidence.failure(claim.how["failing"]), evidence.failure(claim.how["working"])
    if ill is None:
        return Finding(INCONCLUSIVE, "no failure", "Nothing failed that could be cured.")
    if well is None:
        return Finding(CONFIRMED, "cured", "The same run without the shortage goes through.")
    return Finding(REFUTED, "still fails", first_line(well))


def fails_only_with(claim: Claim, evidence: Evidence) -> Finding:
    """`how["failing"]` fails and `how["control"]`, without the blamed cause, doesn't. If both fail,
    it isn't the cause.

    Refuted as well where nothing fails although the blamed cause is there.
    """
    blamed, control = evidence.failure(claim.how["failing"]), evidence.failure(claim.how["control"])
    if blamed and not control:
        return Finding(CONFIRMED, "fails only with it", first_line(blamed))
    if blamed and control:
        return Finding(REFUTED, "fails without it too", first_line(control))
    if control:
        return Finding(INCONCLUSIVE, "fails only without it", first_line(control))
    return Finding(REFUTED, "no failure with it", "The blamed cause is there, and nothing fails.")


def needs_both(claim: Claim, evidence: Evidence) -> Finding:
    """`how["metric"]` is lower with `both` than with `neither`, and with neither of `alone`, each
    beyond the spread.

    Inconclusive where not even both together help by more than the spread.
    """
    how, metric = claim.how, claim.how["metric"]
    neither, both = evidence.duration(how["neither"], metric), evidence.duration(how["both"], metric)
    alone = {name: evidence.duration(name, metric) for name in how["alone"]}
    shown = " | ".join(rounded(found.median) for found in (neither, *alone.values(), both)) + " ms"
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
    message = as_mapping(evidence.run(claim.how["run"]).metrics).get("message")
    why = first_line(str(message)) if message else "The mechanism was tried on this card."
    return Finding(CONFIRMED if warned and failed else INCONCLUSIVE if warned or failed else REFUTED, shown, why)


def fails_on_capability(claim: Claim, evidence: Evidence) -> Finding:
    """As `fails`; only a card of compute capability `how["capability"]` can tell (the run
    `how["machine"]` knows).
    """
    capability = str(as_mapping(evidence.run(claim.how["machine"]).machine).get("compute_capability", "unknown"))
    if capability != claim.how["capability"]:
        raise NotTestable(
            f"It takes a card of compute capability {claim.how['capability']}; this one has "
            f"{capability}."
        )
    return fails(claim, evidence)


JUDGES = (fails, cured, fails_only_with, needs_both, warns_then_fails, fails_on_capability)
