"""What a card is worth in examples, by hand."""

import pytest

from labutils.labs.lab08_large_models import Prices, worth


def test_worth_by_hand():
    """8 examples in 2 s: 14,400 an hour. 500 W: 0.5 kWh an hour, at 40 yen. A year has 8,760 hours,
    so that a card of 876,000 yen costs 100 an hour."""
    prices = Prices({"card": 876_000}, yen_per_kwh=40, years=1, hours_a_day=24)
    assert worth(2000, 8, 500, "card", prices) == {
        "examples_per_hour": 14_400,
        "examples_per_night": 8 * 14_400,
        "examples_per_kwh": 28_800,
        "examples_per_yen": pytest.approx(14_400 / (100 + 20)),
    }
    assert set(worth(1000, 1, 300, "another", prices)) == {
        "examples_per_hour",
        "examples_per_night",
        "examples_per_kwh",
    }
    with pytest.raises(ValueError, match="above 0"):
        Prices(yen_per_kwh=0)
