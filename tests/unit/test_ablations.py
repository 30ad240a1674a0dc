"""Predicted gains beside measured ones: which recipes are made of fixes, how rows are judged, and a start at tiny."""

from __future__ import annotations

import json
import statistics

import pytest

from labutils.diagnosis import Fix
from labutils.diagnosis.ablations import (
    HEAD,
    STARTS,
    Ablation,
    ablations,
    measured_gain,
    on_record,
    recipes_of,
    savings,
    table_rows,
)
from labutils.recipe import STOCK
from labutils.results import Run
from labutils.workloads import open_workload


def test_a_fix_that_is_refused_or_changes_nothing_says_so():
    found = [
        Fix("fine", 0.2, "", changes={"optimizer": "adamw-fused"}),
        Fix("refused", 0.2, "", changes={"streams": 4}),
        Fix("the same", 0.2, "", changes={"precision": "bf16"}),
    ]
    recipes, refused = recipes_of(STOCK.but(precision="fp32"), found, "cpu")
    assert list(recipes) == ["fine"]
    assert recipes["fine"].optimizer == "adamw-fused"
    assert "driver='graph'" in refused["refused"]
    assert refused["the same"] == "here it is the same as the start"


@pytest.mark.parametrize(
    ("predicted", "measured", "off", "close", "tells"),
    [
        (0.5, 0.5, 0.0, True, True),
        (0.5, 0.6, 0.25, False, True),  # half of the step was foretold, and it took 40 %
        (0.0, 0.01, 0.0101, True, False),  # nothing foretold and nothing there: no test of a prediction
        (0.3, -0.1, -0.3636, False, True),
    ],
)
def test_a_prediction_is_judged_by_the_step_it_foretold(predicted, measured, off, close, tells):
    row = Ablation("x", Fix("f", predicted, ""), measured)
    assert row.off == pytest.approx(off, abs=1e-3)
    assert (row.close, row.tells) == (close, tells)


def test_gains_are_of_what_the_fix_is_about():
    slow = Run("", "start", metrics={"step_ms": 10.0, "useful_tokens_per_s": 100.0, "examples_per_s": 4.0})
    fast = Run("", "fix", metrics={"step_ms": 8.0, "useful_tokens_per_s": 200.0, "examples_per_s": 16.0})
    gains = {per: measured_gain(slow, fast, per) for per in ("step", "useful token", "example")}
    assert gains == pytest.approx({"step": 0.2, "useful token": 0.5, "example": 0.75})
    assert measured_gain(slow, Run("", "fix", metrics={"step_ms": 8.0}), "useful token") is None


def test_texts_of_different_lengths_are_compared_one_by_one():
    def run(ms, tokens):
        samples = {"step_ms": ms, "useful_tokens": tokens}
        return Run("", "", metrics={"step_ms": statistics.median(ms)}, samples=samples)

    slow, fast = run([10.0, 30.0, 20.0], [1, 3, 2]), run([8.0, 24.0, 16.0], [1, 3, 2])
    assert measured_gain(slow, fast) == pytest.approx(0.2)
    assert measured_gain(slow, run([8.0, 8.0, 24.0], [9, 1, 3])) == pytest.approx(0.6)  # no step of the same: medians


def test_a_loop_of_texts_is_looked_at_on_the_batches_that_are_timed(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    name, start = STARTS["Qwen3"]
    ablated = ablations(
        open_workload(name, "tiny", device="cpu"), start, steps=3, rounds=1, only=("checkpointing",), traced=1
    )
    before, after = ablated.runs["start"], ablated.runs["checkpointing"]
    steps = min(len(run.samples["useful_tokens"]) for run in (before, after))
    assert before.samples["useful_tokens"][:steps] == after.samples["useful_tokens"][:steps]
    assert ablated.diagnosis.evidence.step_ms == pytest.approx(before.samples["step_ms"][1], rel=1e-4)
    tokens = before.samples["tokens"][1]
    assert ablated.diagnosis.evidence.padding == pytest.approx(1 - before.samples["useful_tokens"][1] / tokens)


def test_every_start_is_a_workload_and_a_recipe():
    for name, recipe in STARTS.values():
        assert open_workload(name, "tiny", device="cpu").name == name
        assert recipe.fitted_to("cpu").examples_per_step == recipe.examples_per_step


def test_a_start_is_diagnosed_and_its_fixes_are_measured(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    only = ("batch size", "optimizer", "compile that is not there")
    ablated = ablations(open_workload("sd15-lora", "tiny", device="cpu"), STOCK, steps=1, rounds=1, only=only)
    assert [row.fix.name for row in ablated.rows] == [f.name for f in ablated.diagnosis.fixes if f.name in only]
    merged = next(row for row in ablated.rows if row.fix.name == "batch size")
    assert merged.fix.changes == {"micro_batch": 4, "accumulation": 1}
    assert 0 < merged.predicted < 1
    assert -1 < merged.measured < 1
    assert sum(ablated.diagnosis.budget.values()) == pytest.approx(ablated.diagnosis.evidence.step_ms)
    assert set(ablated.runs) == {"start", "batch size", "optimizer"}
    assert ablated.metrics()["fixes"] == 2
    kept = Run(**json.loads(json.dumps(vars(on_record(ablated)))))
    rows = table_rows({"SD1.5": kept})
    assert [row[:3] for row in rows if row[1] == "batch size"] == [
        ("SD1.5", "batch size", "micro_batch=4, accumulation=1")
    ]
    assert all(len(row) == len(HEAD) for row in rows) and len(rows) == 2
    assert "Where it goes" in kept.metrics["told"]
    assert savings(kept) == [row.measured for row in ablated.rows if row.tells]
