"""The advisor: the winner is who ends first; and article A2's guide against its own table."""

from __future__ import annotations

import math
from itertools import product

import pandas as pd
import pytest

from labutils.labs.lab06_advisor import advise, guide, options_from, published
from labutils.results.records import Run, Runs

OPTIONS = pd.DataFrame(
    {
        "bf16": (1.0, 1.0, 20.0, 0.0),
        "compile": (101.0, 0.5, 22.0, 0.0),
        "qlora": (1.5, 1.3, 8.0, -0.02),
        "fp8-te": (1.2, 0.9, 20.0, 0.14),
        "nf4": (1.0, 1.1, 7.0, math.nan),
    },
    index=["first_step_s", "step_s", "memory_gb", "loss_change"],
).T


def cell(method: str, batch: int, step_ms: float, status: str = "ok", **tags: object) -> Run:
    metrics = {"first_step_s": 1.0, "step_ms": step_ms, "peak_allocated_gb": 20.0}
    kept = {"experiment": "methods", "method": method, "batch": batch} | tags
    return Run("06", "", tags=kept, status=status, metrics=metrics)


def test_the_first_of_what_is_allowed_wins():
    for vram, steps, tolerance in product((6.9, 8, 21, 100), (1, 150, 1e5), (None, 0.0, 0.2)):
        allowed = OPTIONS[OPTIONS["memory_gb"] <= vram]
        if tolerance is not None:
            allowed = allowed[allowed["loss_change"] <= tolerance]
        if allowed.empty:
            with pytest.raises(ValueError, match="leanest"):
                advise(OPTIONS, vram, steps, tolerance)
            continue
        advice = advise(OPTIONS, vram, steps, tolerance)
        first = (allowed["first_step_s"] + steps * allowed["step_s"]).min()
        assert advice["total_s"].iloc[0] == first
        assert set(advice.index[advice["left_out"] == ""]) == set(allowed.index)


def test_why_a_method_is_left_out():
    advice = advise(OPTIONS, vram_gb=21, steps=100, tolerance=0.05)
    reasons = ["does not fit", "loss too high", "loss not measured"]
    assert advice["left_out"][["compile", "fp8-te", "nf4"]].tolist() == reasons
    assert list(advice.index[:2]) == ["bf16", "qlora"]
    with pytest.raises(ValueError, match="above 0"):
        advise(OPTIONS, vram_gb=math.nan, steps=10)


def test_options_are_the_measured_cells_of_a_batch_size():
    cells = [cell("bf16", 1, 1000), cell("bf16", 1, 900, again=True), cell("compile", 1, 500)]
    cells += [cell("nf4", 1, 600), cell("bf16", 4, 4000), cell("qlora", 1, 800, status="oom")]
    options = options_from(runs := Runs(cells), 1)
    assert options["step_s"].to_dict() == {"bf16": 1.0, "compile": 0.5, "nf4": 0.6}
    assert options["loss_change"]["compile"] == 0 and math.isnan(options["loss_change"]["nf4"])
    with pytest.raises(ValueError, match="batch size 2"):
        options_from(runs, 2)


def test_the_article_s_guide_follows_from_its_own_table():
    expected = {"few_steps": "fp8-te", "between": "fixed-fp8-te", "many_steps": "fixed"}
    assert guide(published()) == expected | {"short_of_memory": "qlora"}
    assert guide(published().loc[["bf16", "compile"]]) == {}
