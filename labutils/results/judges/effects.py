"""What one change did to a time, in percent, with the range that both runs' spreads allow."""

from __future__ import annotations

from typing import NamedTuple

from labutils.results.claims import Claim
from labutils.results.judges.evidence import Evidence, NotTestable
from labutils.results.records import Run


class Effect(NamedTuple):
    """A change in percent, negative where it is less: least, middle and most. `sure`: none of them
    is 0 or across.
    """

    low: float
    middle: float
    high: float

    @property
    def sure(self) -> bool:
        return not self.low <= 0 <= self.high


def time_effect(base: Run, run: Run) -> Effect | None:
    """By how many percent a run's step is longer than the base's, with the range that both spreads
    allow (as claims judge it); None where either wasn't measured."""
    claim = Claim("", "", "", "", run.lab, ("base", "run"), "", needs="any")
    try:
        ratio = Evidence(claim, {(run.lab, "base"): base, (run.lab, "run"): run}).ratio("base", "run")
    except NotTestable:
        return None
    return Effect(*(100 * (x - 1) for x in (ratio.low, ratio.middle, ratio.high)))


def in_words(effect: Effect | None) -> str | None:
    """ "-43 %", or that the spread hides it."""
    if effect is None:
        return None
    return f"{effect.middle:+.0f} %" if effect.sure else f"{effect.middle:+.0f} %, within the spread"
