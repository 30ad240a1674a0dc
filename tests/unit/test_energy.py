"""Energy from the driver's meter, and what a card is worth by it."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.labs.lab08_large_models import PUBLISHED_YEN, Prices, worth
from labutils.profiling import energy
from labutils.profiling.energy import Energy, millijoules

CARD = SimpleNamespace(uuid=lambda: "GPU-1")


@pytest.fixture
def meter(monkeypatch):
    """A card whose meter gives these readings, in millijoules, one after the other; an exception is
    raised.
    """

    def install(*readings):
        pending = itertools.chain(readings, itertools.repeat(readings[-1]))

        def read(handle):
            value = next(pending)
            if isinstance(value, Exception):
                raise value
            return value

        module = SimpleNamespace(
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetTotalEnergyConsumption=read
        )
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(energy, "gpu_device", lambda: CARD)

    return install


def test_the_meters_difference_is_what_the_block_drew(meter):
    meter(5_000, 12_000)
    with Energy() as found:
        pass
    assert found.joules == 7
    assert found.watts == pytest.approx(7 / found.seconds)


@pytest.mark.parametrize(
    "readings", [(RuntimeError("not supported"),), (5_000, 5_000), (5_000, RuntimeError("gone"))]
)
def test_a_driver_that_does_not_say_leaves_it_open(meter, readings):
    meter(*readings)
    with Energy() as found:
        pass
    assert found.joules is None
    assert found.watts is None
    assert found.seconds > 0


def test_without_a_gpu_there_is_nothing_to_read(monkeypatch):
    monkeypatch.setattr(energy, "gpu_device", lambda: None)
    with Energy() as found:
        pass
    assert (millijoules(None), found.joules) == (None, None)


# Worth


def test_worth_by_hand():
    """8 examples in 2 s: 14,400 an hour. 500 W: 0.5 kWh an hour, at 40 yen. A year has 8,760 hours,
    at 100 yen.
    """
    prices = Prices({"card": 876_000}, yen_per_kwh=40, years=1, hours_a_day=24)
    found = worth(2000, 8, 500, "card", prices)
    assert found == {
        "examples_per_hour": pytest.approx(14_400),
        "examples_per_night": pytest.approx(115_200),
        "examples_per_kwh": pytest.approx(28_800),
        "examples_per_yen": pytest.approx(14_400 / (100 + 20)),
    }


def test_what_is_not_known_is_absent():
    assert set(worth(1000, 1, None, "card", Prices())) == {
        "examples_per_hour",
        "examples_per_night",
    }
    assert set(worth(1000, 1, 300, "another card", Prices())) == {
        "examples_per_hour",
        "examples_per_night",
        "examples_per_kwh",
    }


def test_the_articles_hours_and_prices():
    """Of 9200 examples an hour, a night of 8 hours takes 73,600."""
    assert worth(3.6e6 / 9200, 1, None, "", Prices())["examples_per_night"] == pytest.approx(73_600)
    assert (
        Prices().card_yen
        == PUBLISHED_YEN
        == {"RTX PRO 6000 Blackwell Max-Q": 1_600_000, "H100 PCIe": 4_700_000}
    )


@given(st.floats(1, 1e6), st.floats(1, 1e4))
def test_a_card_that_takes_half_the_time_gives_twice_as_much(step_ms, watts):
    slow, fast = (worth(ms, 4, watts, "H100 PCIe", Prices()) for ms in (step_ms, step_ms / 2))
    assert all(fast[unit] == pytest.approx(2 * slow[unit]) for unit in slow)


@pytest.mark.parametrize(
    "changes", [{"years": 0}, {"yen_per_kwh": -1}, {"card_yen": {"a": 0}}, {"hours_a_day": 0}]
)
def test_prices_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match="must be above 0"):
        Prices(**changes)


def test_a_step_takes_time():
    with pytest.raises(ValueError, match="more than 0 ms"):
        worth(0, 1, None, "", Prices())
