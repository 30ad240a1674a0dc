"""What a change did to a time, with the range that both spreads allow."""

from __future__ import annotations

import pytest
from claim_runs import timed
from hypothesis import given
from hypothesis import strategies as st

from labutils.results.judges.effects import in_words, time_effect
from labutils.results.records import Run


def test_effects_are_told_with_their_spread():
    base, fast, same = (
        timed("09", "base", 100),
        timed("09", "a", 60),
        timed("09", "b", 99, spread=0.05),
    )
    assert in_words(time_effect(base, fast)) == "-40 %"
    assert in_words(time_effect(base, same)) == "-1 %, within the spread"
    assert time_effect(base, Run("09", "c")) is None and in_words(None) is None


@given(st.floats(1, 1000), st.floats(1, 1000), st.floats(0.0001, 0.2))
def test_a_sure_effect_is_one_whose_ranges_lie_apart(one, other, spread):
    found = time_effect(timed("09", "base", one, spread), timed("09", "x", other, spread))
    assert found.low <= found.middle <= found.high
    assert found.middle == pytest.approx(100 * (other / one - 1), abs=0.01)
    apart = other * (1 + 0.8 * spread) < one * (1 - 0.8 * spread) or other * (
        1 - 0.8 * spread
    ) > one * (1 + 0.8 * spread)
    assert found.sure or not apart
    across = other * (1 + 0.7 * spread) > one * (1 - 0.7 * spread) and other * (
        1 - 0.7 * spread
    ) < one * (1 + 0.7 * spread)
    assert not (found.sure and across)
