"""The predicted peak against steps that ran, here and on the reference machine; out of memory."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.labs import lab09_peak_memory as peak_memory
from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.recipe import Recipe
from labutils.results import records
from labutils.results.records import Run
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

PLAIN = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    def opened(name):
        cache = tmp_path_factory.mktemp("cache")
        workload = open_workload(name, "tiny", device="cpu", cache_dir=cache)
        return on_drawn_latents(workload) if name == "sd15-lora" else workload

    return opened


@pytest.fixture(scope="module")
def little(tiny):
    return tiny("sd15-lora")


# -------------------------------------------------------------------------------------- predicted


@pytest.mark.parametrize("mode", ["off", "blocks", "selective"])
@pytest.mark.parametrize("room", peak_memory.GRID)
def test_the_prediction_is_what_a_record_finds_in_the_step(room, mode, tiny):
    """Within 1 % on a CPU, where both count the same shapes and lifetimes."""
    recipe = peak_memory.GRID[room].but(checkpointing=mode)
    run = peak_memory.predicted_and_recorded(tiny(room), recipe, "it")
    assert abs(run.metric("off")) < 0.01
    assert run.tags == {"experiment": "memory", "workload": room, "checkpointing": mode}
    # What stays on record draws the same picture, its peak included.
    kept = Run(**json.loads(json.dumps(vars(run))))
    series, phases = peak_memory.drawn_timeline(kept)
    totals = [sum(levels) for levels in zip(*series.values(), strict=True)]
    assert len(totals) == run.metrics["events"] and phases
    assert max(totals) / 1e9 == pytest.approx(run.metric("peak_gb"), rel=0.01, abs=2e-5)


@pytest.mark.parametrize(
    ("room", "base", "change"),
    [
        ("sd15-lora", PLAIN, {"accumulation": 3}),
        ("sd15-lora", PLAIN, {"adapter": "plain", "memory_format": "channels_last"}),
        ("qwen3-lora-short", A3_BASE, {"layers": "rewritten", "loss": "fused"}),
        ("llava-lora", A2_BASE, {"layers": "rewritten", "shapes": "fixed", "micro_batch": 2}),
    ],
)
def test_other_recipes_are_predicted_as_well(room, base, change, tiny):
    run = peak_memory.predicted_and_recorded(tiny(room), base.but(**change), "it")
    assert abs(run.metric("off")) < 0.03


def reference_peaks(*workloads: str) -> list[Run]:
    """The H200's runs of recipes that nothing compiles, in one process, on these workloads."""
    return [
        run
        for run in records.read_runs(records.REFERENCE)
        if run.ok
        and (run.workload in workloads and run.scale == "full")
        and run.recipe.get("compile") == "off"
        and run.recipe.get("driver") != "graph"
        and run.metrics.get("ranks", 1) == 1
        and run.metric("peak_allocated_gb")
    ]


def test_the_reference_machines_peaks_were_predictable(tmp_path_factory):
    """float32 without TF32 apart: there cuDNN picks convolutions with tens of GB of workspace."""
    cache = tmp_path_factory.mktemp("cache")
    workload = open_workload("sd15-lora", "full", device="cpu", cache_dir=cache)
    drawn = on_drawn_latents(workload)
    example = {"pixel_values": torch.zeros(3, 512, 512), "input_ids": torch.zeros(77).long()}
    workload.dataset = lambda model, recipe: [example] * 8  # no pictures need be drawn
    knobs = ("micro_batch", "accumulation", "precision", "cache", "adapter", "layers", "rank")
    knobs += ("memory_format", "checkpointing", "loss")
    predicted: dict[tuple, float] = {}
    runs = [run for run in reference_peaks("sd15-lora") if run.recipe.get("tf32") != "nothing"]
    assert len(runs) > 5
    for run in runs:
        key = tuple(run.recipe.get(knob) for knob in knobs)
        if key not in predicted:
            recipe = Recipe(**run.recipe)
            ours = workload if recipe.cache == "nothing" else drawn
            predicted[key] = peak_memory.predicted(ours, recipe, on="cuda").peak / 1e9
        assert predicted[key] == pytest.approx(run.metric("peak_allocated_gb"), rel=0.05), run.run


def test_the_first_reading_of_qwen3_8b_was_predictable(tmp_path_factory, monkeypatch):
    """Four texts of 861 tokens through PEFT's LoRA in BF16 took 50.5 GB on an H200."""
    cache = tmp_path_factory.mktemp("cache")
    workload = open_workload("qwen3-lora-long", "full", device="cpu", cache_dir=cache)
    ids = torch.zeros(4, 861, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    monkeypatch.setattr(peak_memory, "worst_batch", lambda workload, recipe: batch)
    memory = peak_memory.predicted(workload, A3_BASE, on="cuda")
    assert memory.peak / 1e9 == pytest.approx(50.5, rel=0.1)
    assert memory.at_peak()["logits"] == pytest.approx(3 * 4 * 861 * 151936 * 4, rel=0.001)
    assert memory.held["weights"] == pytest.approx(2 * 8.19e9, rel=0.01)


def test_a_gpu_takes_half_the_bytes_and_its_libraries_workspaces(little):
    here, there = (peak_memory.predicted(little, PLAIN, on) for on in ("cpu", "cuda"))
    assert there.held["weights"] < 0.55 * here.held["weights"]
    assert there.held["temporaries"] == peak_memory.WORKSPACES


@pytest.mark.parametrize(
    "change", [{"compile": "default"}, {"base_linear": "nf4"}, {"checkpointing": "offload"}]
)
def test_what_is_not_known_is_refused(little, change):
    with pytest.raises(ValueError, match="prediction"):
        peak_memory.predicted(little, PLAIN.but(**change))


# ------------------------------------------------------------------------- running out of memory


def test_memory_runs_out_and_comes_back(little):
    with peak_memory.LimitedTrainer(little, PLAIN) as trainer:
        limit = peak_memory.predicted(little, PLAIN.but(micro_batch=3)).peak / 1e9
        trainer.limit(limit)
        held = trainer.run_out(12)
        assert "out of memory" in held["message"] and "artificial" in held["message"]
        assert held["in_except_gb"] > 1.2 * held["before_gb"]
        assert held["cleaned_gb"] <= held["after_except_gb"] < held["in_except_gb"] <= 1.05 * limit
        assert held["cleaned_gb"] == pytest.approx(held["before_gb"], rel=0.05)
        assert held["runs_again"] == 1
        assert trainer.fits(3) and not trainer.fits(4)
        with pytest.raises(RuntimeError, match="nothing ran out"):
            trainer.run_out(1)


def test_the_predicted_batch_is_the_largest_one(little):
    room = peak_memory.predicted(little, PLAIN.but(micro_batch=5)).peak / 1e9
    assert peak_memory.predicted_largest(little, PLAIN, 1.001 * room) == 5
    assert peak_memory.predicted_largest(little, PLAIN, 0.1 * room) == 0


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_search_finds_the_largest_from_anywhere(largest, start):
    tried: list[int] = []
    fits = lambda batch: tried.append(batch) or batch <= largest
    assert peak_memory.largest_batch(fits, start) == largest
    assert len(tried) == len(set(tried)) and min(tried) >= 1
    assert len(tried) <= 2 + 2 * math.ceil(math.log2(2 + abs(max(1, start) - largest)))
    if start == largest > 0:
        assert tried == [start, start + 1]


@pytest.mark.parametrize(("largest", "start"), [(7, 16), (100, 128), (1, 5)])
def test_accelerates_search_stops_at_or_below_it(largest, start):
    tried: list[int] = []
    fits = lambda batch: tried.append(batch) or batch <= largest
    assert 0.85 * largest <= peak_memory.largest_by_accelerate(fits, start) <= largest
    assert tried == sorted(tried, reverse=True)
