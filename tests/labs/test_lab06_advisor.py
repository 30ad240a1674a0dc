"""The advisor: the winner is who ends first; and article A2's guide against its own table."""

from __future__ import annotations

from itertools import product

import pandas as pd
import pytest

from labutils.labs.lab06_advisor import PUBLISHED, advise, guide, options_from
from labutils.results.records import Run, Runs

OPTIONS = pd.DataFrame(
    {
        "bf16": (1.0, 1.0, 20.0),
        "compile": (101.0, 0.5, 22.0),
        "qlora": (1.5, 1.3, 8.0),
        "fp8-te": (1.2, 0.9, 20.0),
        "nf4": (1.0, 1.1, 7.0),
    },
    index=["first_step_s", "step_s", "memory_gb"],
).T


def cell(method: str, batch: int, step_ms: float, status: str = "ok", **tags: object) -> Run:
    metrics = {"first_step_s": 1.0, "step_ms": step_ms, "peak_allocated_gb": 20.0}
    kept = {"experiment": "methods", "method": method, "batch": batch} | tags
    return Run("06", "", tags=kept, status=status, metrics=metrics)


def test_the_first_of_what_fits_wins():
    for vram, steps in product((6.9, 8, 21, 100), (1, 150, 1e5)):
        fitting = OPTIONS[OPTIONS["memory_gb"] <= vram]
        if fitting.empty:
            with pytest.raises(ValueError, match="Of 5 methods .* none fits 6.9 GB"):
                advise(OPTIONS, vram, steps)
            continue
        advice = advise(OPTIONS, vram, steps)
        first = (fitting["first_step_s"] + steps * fitting["step_s"]).min()
        assert advice["total_s"].iloc[0] == first and set(advice.index) == set(fitting.index)


def test_options_are_the_measured_cells_of_a_batch_size():
    cells = [cell("bf16", 1, 1000), cell("bf16", 1, 900, again=True), cell("compile", 1, 500)]
    cells += [cell("nf4", 1, 600), cell("bf16", 4, 4000), cell("qlora", 1, 800, status="oom")]
    options = options_from(runs := Runs(cells), 1)
    assert options["step_s"].to_dict() == {"bf16": 1.0, "compile": 0.5, "nf4": 0.6}
    assert list(options.columns) == list(PUBLISHED.columns)
    with pytest.raises(ValueError, match="Of 0 methods"):
        advise(options_from(runs, 2), 24, 1000)


def test_the_article_s_guide_follows_from_its_own_table():
    expected = {"few_steps": "fp8-te", "between": "fixed-fp8-te", "many_steps": "fixed"}
    assert guide(PUBLISHED) == expected | {"short_of_memory": "qlora"}
    assert guide(PUBLISHED.loc[["bf16", "compile"]]) == {}
