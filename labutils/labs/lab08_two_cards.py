"""What article A3's two cards are judged by in lab 08, from the model's steps on them."""

from __future__ import annotations

import numpy as np
import pandas as pd

BLACKWELL, H100 = "RTX PRO 6000 Blackwell Max-Q", "H100 SXM5"


def two_cards(steps: pd.DataFrame, end: str = "") -> dict[str, float]:
    """What article A3's claims about its two cards are judged by, under one reading of batches and
    host, whose name is the `end` of every metric's.

    steps: a row for each "model" ("dense", "moe"), "texts" ("short", "long") and "card", with
    "kernels, s" and "step, s", and "examples/h" of the model and of the "article". `.._off` is by
    which factor the worse of the two cards' counts differs from the article's.
    """
    by = steps.set_index(["model", "texts", "card"])
    factor = by["examples/h"] / by["article"]
    off = np.maximum(factor, 1 / factor).groupby(["model", "texts"]).max()
    metrics = {f"{model}_{kind}_off": value for (model, kind), value in off.items()}
    rate, idle = by["examples/h"], by["step, s"] - by["kernels, s"]
    metrics |= {
        "dense_long_ratio": rate["dense", "long", H100] / rate["dense", "long", BLACKWELL],
        "moe_long_blackwell_ratio": rate["moe", "long", BLACKWELL] / rate["moe", "long", H100],
        "moe_long_blackwell_hourly": rate["moe", "long", BLACKWELL],
        "moe_over_dense_long": rate["moe", "long", BLACKWELL] / rate["dense", "long", BLACKWELL],
        "h100_gaps_longer": idle["moe", "long", H100] > idle["moe", "long", BLACKWELL],
    }
    return {f"{name}{end}": float(value) for name, value in metrics.items()}
