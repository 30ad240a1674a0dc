"""Lab 08's two cards: what article A3 is judged by."""

from __future__ import annotations

import pandas as pd
import pytest

from labutils.data.texts import LONG, expected_longest
from labutils.labs.lab08_two_cards import BLACKWELL, H100, two_cards
from labutils.profiling.gpu_specs import find_spec
from labutils.results import claims
from labutils.workloads.causal_lm import QWEN3_32B
from labutils.workloads.decoder_flops import attended_pairs, count_flops, decoder_shapes


def test_two_cards_by_their_counts():
    """Twice as many examples an hour as published, and half as many: both are off by 2."""
    steps = [
        {"model": model, "texts": texts, "card": card, "article": 100.0, "examples/h": count}
        | {"kernels, s": 1.0, "step, s": 2.0 if card == H100 else 1.5}
        for model in ("dense", "moe")
        for texts in ("short", "long")
        for card, count in ((BLACKWELL, 200.0), (H100, 50.0))
    ]
    two = two_cards(pd.DataFrame(steps), "_mean")
    assert two["dense_short_off_mean"] == two["moe_long_off_mean"] == pytest.approx(2)
    assert (two["dense_long_ratio_mean"], two["moe_long_blackwell_ratio_mean"]) == (0.25, 4)
    assert two["h100_gaps_longer_mean"] == 1
    runs = [(one.how, one.runs.get("run", {})) for one in claims.load_claims().values()]
    judged = [how for how, run in runs if run.get("experiment") == "two cards beside one host"]
    keys = {key for how in judged for key in how.get("readings", {}).values()}
    assert {key for key in keys if key.endswith("_mean")} == two.keys()
    again = {key.replace("_again", "_mean") for key in keys if key.endswith("_again")}
    assert again == two.keys()


def test_the_bounds_of_the_claims_are_the_dense_peaks():
    length = expected_longest(LONG, 32)
    pairs, size = attended_pairs(QWEN3_32B, [length]), QWEN3_32B
    shapes = decoder_shapes(size)
    weights = sum(a * b + 8 * (a + b) for a, b in shapes.adapted.values()) - size.width * size.inner
    # Computed again is each block, but for its last product, whose result nobody needs.
    again = 2 * length * size.layers * weights + 4 * pairs * shapes.attended
    flops = count_flops(size, 8, length, pairs, length) + again
    bounds = [3600 * find_spec(name).dense["bf16"] * 1e12 / flops for name in (BLACKWELL, H100)]
    assert claims.claim("A3.32b.h100-long").how["fastest"] == pytest.approx(bounds, rel=1e-3)
