"""Predicted gains beside measured ones: which recipes are made of fixes, how rows are judged, and a
start at tiny.
"""

from __future__ import annotations

import json
import statistics

import pytest

from labutils.recipe import STOCK
from labutils.results.records import Run, step_by_step
from labutils.tools.diagnose import Fix
from labutils.tools.diagnose import ablations as ablating
from labutils.tools.diagnose.ablations import (
    HEAD,
    LOOK_HEAD,
    STARTS,
    Ablation,
    ablations,
    look_rows,
    on_record,
    recipes_of,
    round_costs,
    savings,
    table_rows,
)
from labutils.training import Benchmark, Trainer, benchmark
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
        (
            0.0,
            0.01,
            0.0101,
            True,
            False,
        ),  # nothing foretold and nothing there: no test of a prediction
        (0.3, -0.1, -0.3636, False, True),
    ],
)
def test_a_prediction_is_judged_by_the_step_it_foretold(predicted, measured, off, close, tells):
    row = Ablation("x", Fix("f", predicted, ""), (100.0,), (100 * (1 - measured),))
    assert row.off == pytest.approx(off, abs=1e-3)
    assert (row.close, row.tells) == (close, tells)


def test_a_gain_is_the_middle_of_the_rounds():
    """The machine gets slower from round to round, and in the second the fix meets something for
    the first time.
    """
    row = Ablation("x", Fix("f", 0.5, ""), before=(100.0, 120.0, 140.0), after=(52.0, 240.0, 70.0))
    assert row.rounds == pytest.approx([0.48, -1.0, 0.5])
    assert row.measured == pytest.approx(0.48)
    assert Ablation("x", Fix("f", 0.5, ""), why="refused").measured is None


def test_gains_are_of_what_the_fix_is_about():
    recipe = vars(STOCK.but(micro_batch=2, accumulation=4))
    run = Run("", "", recipe=recipe, samples={"wall_ms": [80.0, 120.0]})
    assert round_costs(run) == [80.0, 120.0]
    assert round_costs(run, "example") == [10.0, 15.0]
    texts = {"wall_ms": [80.0, 120.0], "tokens": [100, 300, 400, 800]}
    of_texts = Run("", "", metrics={"useful_tokens": 0.5}, recipe=recipe, samples=texts)
    assert round_costs(of_texts, "useful token") == pytest.approx(
        [80 / 100, 120 / 300]
    )  # half of 200, half of 600


def test_a_loop_of_texts_is_looked_at_on_the_batches_that_are_timed(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    name, start = STARTS["Qwen3"]
    workload = open_workload(name, "tiny", device="cpu")
    begun: dict[str, list[int]] = {"timed": [], "traced": [], "behind": []}
    part = ["timed"]
    step, trace = Trainer.step, ablating.profile

    def noted(trainer, *args, **kwargs):
        begun[part[0]].append(trainer.batches.taken)
        step(trainer, *args, **kwargs)

    def traced(*args, **kwargs):
        part[0] = "traced"
        try:
            return trace(*args, **kwargs)
        finally:
            part[0] = "behind"

    monkeypatch.setattr(Trainer, "step", noted)
    monkeypatch.setattr(ablating, "profile", traced)
    ablated = ablations(workload, start, steps=3, only=())
    before = ablated.runs["start"]
    first = begun["timed"][
        4 : 4 + len(before.samples["step_ms"])
    ]  # behind the first, two to warm up, one rewound
    assert begun["traced"][1:] == first[1:3]  # behind one that warms the profiler up
    assert ablated.diagnosis.evidence.step_ms == pytest.approx(
        statistics.fmean(before.samples["step_ms"][1:3])
    )
    assert ablated.diagnosis.evidence.padding == pytest.approx(1 - before.metrics["useful_tokens"])
    epoch = workload.work(start)
    assert before.metrics["useful_tokens"] == pytest.approx(epoch.useful_tokens / epoch.tokens)


def test_rounds_of_the_same_batches_have_as_many_steps_for_all(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    name, start = STARTS["Qwen3"]
    with Benchmark(open_workload(name, "tiny", device="cpu"), same_batches=True) as bench:
        runs = bench.compare(
            {"slow": start, "fast": start.but(checkpointing="off")}, steps=2, rounds=2
        )
    taken = [run.samples["useful_tokens"] for run in runs.values()]
    assert taken[0] == taken[1]
    half = len(taken[0]) // 2
    assert taken[0][:half] == taken[0][half:]
    assert len(step_by_step(*runs.values())) == 2 * half


def test_workers_that_made_batches_ready_shift_the_rounds_of_all(monkeypatch):
    """Two workers hold four batches: the first step and those that find them ready aren't timed, of
    neither recipe.
    """
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(benchmark, "ROUND_MS", 1)
    name, start = STARTS["Qwen3"]
    helped = start.but(num_workers=2, prefetch_factor=2, pin_memory=False)
    with Benchmark(open_workload(name, "tiny", device="cpu"), warmup=1, same_batches=True) as bench:
        alone = bench.compare({"alone": start}, steps=8, rounds=1)["alone"]
        both = bench.compare({"beside": start, "workers": helped}, steps=3, rounds=2)
        with pytest.raises(ValueError, match="at least 5"):
            bench.candidates["workers"].rewind(1)
    expected = alone.samples["useful_tokens"][4:7]
    assert len(set(expected)) > 1
    assert [run.samples["useful_tokens"] for run in both.values()] == [2 * expected] * 2


def fix_on_record(predicted, *rounds):
    return {
        "changes": {"streams": 2},
        "per": "step",
        "predicted": predicted,
        "measured": statistics.median(rounds) if rounds else None,
        "off": None,
        "why": "" if rounds else "refused",
        "before": [100.0] * len(rounds),
        "after": [100 * (1 - gain) for gain in rounds],
    }


def test_what_a_look_was_worth_is_told_by_loop():
    each = {
        "batch size": fix_on_record(0.5, 0.52, 0.55, 0.6),
        "capture": fix_on_record(0.4, 0.72),
        "workers": fix_on_record(0.3, -0.1),
        "caching": fix_on_record(0.01, 0.2),
        "refused": fix_on_record(0.9),
    }
    runs = {
        "diagnosis: SD1.5": Run("09", "", metrics={"each": each}),
        "LLaVA": Run("09", "", metrics={"each": {"refused": each["refused"]}}),
        "diagnosis: Qwen3": Run("09", "", status="oom"),
    }
    assert look_rows(runs) == [("SD1.5", "batch size", "55%", "capture", "72%", "2 of 3")]
    assert len(LOOK_HEAD) == 6
    rows = table_rows(runs)
    assert [row[0] for row in rows] == ["SD1.5"] * 5 + ["LLaVA"]
    assert [row[4] for row in rows] == [
        "55% (52 to 60)",
        "72%",
        "-10%",
        "20%",
        "refused",
        "refused",
    ]


def test_every_start_is_a_workload_and_a_recipe():
    for name, recipe in STARTS.values():
        assert open_workload(name, "tiny", device="cpu").name == name
        assert recipe.fitted_to("cpu").examples_per_step == recipe.examples_per_step


def test_a_start_is_diagnosed_and_its_fixes_are_measured(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    only = ("batch size", "optimizer", "compile that is not there")
    ablated = ablations(
        open_workload("sd15-lora", "tiny", device="cpu"), STOCK, steps=1, rounds=1, only=only
    )
    assert [row.fix.name for row in ablated.rows] == [
        f.name for f in ablated.diagnosis.fixes if f.name in only
    ]
    merged = next(row for row in ablated.rows if row.fix.name == "batch size")
    assert merged.fix.changes == {"micro_batch": 4, "accumulation": 1}
    assert 0 < merged.predicted < 1
    assert -1 < merged.measured < 1
    assert sum(ablated.diagnosis.budget.values()) == pytest.approx(
        ablated.diagnosis.evidence.step_ms
    )
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
