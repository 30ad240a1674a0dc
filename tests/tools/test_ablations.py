"""Predicted gains beside measured ones, on the course's own loop at tiny."""

from __future__ import annotations

import pytest

from labutils.labs.ladders import A3_BASE
from labutils.recipe import STOCK
from labutils.results.records import Run
from labutils.tools.ablations import (
    _row,
    ablations,
    fix_table,
    predicted_later,
    recipes_of,
    round_costs,
)
from labutils.tools.diagnose import Fix
from labutils.workloads import open_workload


def test_a_fix_that_is_refused_or_changes_nothing_says_so():
    fixes = [
        Fix("fine", 0.2, "", changes={"optimizer": "adamw-fused"}),
        Fix("refused", 0.2, "", changes={"streams": 4}),
        Fix("the same", 0.2, "", changes={"precision": "bf16"}),
    ]
    recipes, why = recipes_of(STOCK.but(precision="fp32"), fixes, "cpu")
    assert list(recipes) == ["fine"] and recipes["fine"].optimizer == "adamw-fused"
    assert "graph" in why["refused"] and "same" in why["the same"]


def test_a_later_prediction_counts_where_it_is_of_what_was_measured():
    four, five = ({"num_workers": count} for count in (4, 5))
    asked = [Fix("workers", 0.5, "", changes=four), Fix("memory", 0.3, "")]
    told = [fix.gain for fix in predicted_later(asked, [Fix("workers", 0.4, "", changes=four)])]
    assert told == [0.4, 0.0]
    told = [fix.gain for fix in predicted_later(asked, [Fix("workers", 0.6, "", changes=five)])]
    assert told == [0.5, 0.0]


def timed(*walls, **metrics):
    recipe = STOCK.but(micro_batch=2, accumulation=4).as_dict()
    return Run("", "", recipe=recipe, samples={"wall_ms": list(walls)}, metrics=metrics)


@pytest.mark.parametrize(
    ("predicted", "measured", "off"),
    [
        (0.5, 0.6, 0.25),  # half of the step was predicted, and it took 40 %
        (0.3, -0.1, -0.3636),
    ],
)
def test_a_prediction_is_judged_by_the_step_that_it_predicted(predicted, measured, off):
    row = _row(Fix("f", predicted, ""), (timed(100), timed(100 * (1 - measured))), "")
    assert row["off"] == pytest.approx(off, abs=1e-3)


def test_a_gain_is_the_median_of_the_rounds():
    """The machine gets slower, and in the second round the fix meets something new."""
    row = _row(Fix("f", 0.5, ""), (timed(100, 120, 140), timed(52, 240, 70)), "")
    assert row["measured"] == pytest.approx(0.48)
    assert _row(Fix("f", 0.5, ""), None, "refused")["why"] == "refused"


def test_gains_are_of_what_the_fix_is_about():
    run = timed(80.0, 120.0, useful_tokens=0.5)
    run.samples["tokens"] = [100, 300, 400, 800]
    assert round_costs(run) == [80.0, 120.0]
    assert round_costs(run, "useful token") == pytest.approx([80 / 100, 120 / 300])


def test_a_start_is_diagnosed_and_its_fixes_are_measured(monkeypatch):
    """On texts, which are traced on the batches that are timed."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    work = open_workload("qwen3-lora-short", "tiny", device="cpu")
    start = A3_BASE.but(micro_batch=1, accumulation=2, optimizer="adamw", checkpointing="blocks")
    run = ablations(work, start, steps=1, rounds=1, only=("batch size", "checkpointing"))
    each = run.metrics["each"]
    assert set(each) == {"batch size", "checkpointing"}
    assert each["batch size"]["changes"] == {"micro_batch": 2, "accumulation": 1}
    for row in each.values():
        assert 0 <= row["predicted"] < 1 and -1 < row["measured"] < 1
    assert list(fix_table({"Qwen3": run})["fix"]) == list(each)
