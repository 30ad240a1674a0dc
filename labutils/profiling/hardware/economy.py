"""What a card is worth: examples an hour, a night, a kilowatt hour and a yen.

Article A3 compares its two cards by examples an hour and in eight hours of a night, and by the
prices that it found. Prices change and differ by country: every one of them is an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NIGHT_H = 8.0
"""Hours of a night (article A3)."""
PUBLISHED_YEN = {"RTX PRO 6000 Blackwell Max-Q": 1_600_000, "H100 PCIe": 4_700_000}
"""What article A3 found its cards to cost; for its own H100, the SXM5 one, it found no price."""


@dataclass(frozen=True)
class Prices:
    """`card_yen`: card -> yen; `yen_per_kwh` of electricity; a card is written off in `years` of
    `hours_a_day` of work.

    Raises `ValueError` for what is not above 0.
    """

    card_yen: Mapping[str, float] = field(default_factory=lambda: dict(PUBLISHED_YEN))
    yen_per_kwh: float = 31.0
    years: float = 3.0
    hours_a_day: float = NIGHT_H

    def __post_init__(self) -> None:
        given = {
            "yen_per_kwh": self.yen_per_kwh,
            "years": self.years,
            "hours_a_day": self.hours_a_day,
        }
        for name, value in (
            given | {f"the price of {card}": yen for card, yen in self.card_yen.items()}
        ).items():
            if not value > 0:
                raise ValueError(f"{name} is {value!r}, and must be above 0.")

    def told(self) -> str:
        """What goes into a yen, in a sentence."""
        return (
            f"A card is written off in {self.years:g} years of {self.hours_a_day:g} hours a day, "
            "and a kWh costs "
            f"{self.yen_per_kwh:g} yen; the machine around the card is not counted. Prices in yen: "
            + ", ".join(f"{card} {yen:,.0f}" for card, yen in self.card_yen.items())
            + "."
        )

    def yen_an_hour(self, card: str, watts: float) -> float | None:
        """What an hour of work costs: the card's share of its price, and electricity. None without
        a price.
        """
        if card not in self.card_yen:
            return None
        return (
            self.card_yen[card] / (self.years * 365 * self.hours_a_day)
            + watts / 1e3 * self.yen_per_kwh
        )


def worth(
    step_ms: float, examples: float, watts: float | None, card: str, prices: Prices
) -> dict[str, float]:
    """`examples` a step of `step_ms`, as examples an hour, a night of eight hours, a kWh and a yen.

    What can't be said (no power, no price) is absent. Raises `ValueError` for a step that takes no
    time.
    """
    if not step_ms > 0:
        raise ValueError(f"step_ms={step_ms!r}: a step takes more than 0 ms.")
    hourly = examples / step_ms * 3.6e6
    found = {"examples_per_hour": hourly, "examples_per_night": NIGHT_H * hourly}
    if watts:
        found["examples_per_kwh"] = hourly / (watts / 1e3)
        if yen := prices.yen_an_hour(card, watts):
            found["examples_per_yen"] = hourly / yen
    return found
