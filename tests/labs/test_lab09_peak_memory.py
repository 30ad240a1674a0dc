"""The predicted peak against steps that ran, here and on the reference machine; out of memory."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.labs import lab09_peak_memory as peak_memory
from labutils.labs.ladders import A3_BASE
from labutils.recipe import Recipe
from labutils.results import records
from labutils.results.records import Run
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

PLAIN = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)
GRID = peak_memory.GRID


def opened(name, folder, scale="tiny"):
    return open_workload(name, scale, device="cpu", cache_dir=folder)


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    return on_drawn_latents(opened("sd15-lora", tmp_path_factory.mktemp("cache")))


# -------------------------------------------------------------------------------------- predicted


@pytest.mark.parametrize(
    ("room", "recipe"),
    [
        ("sd15-lora", GRID["sd15-lora"].but(checkpointing="blocks")),
        ("sd15-lora", PLAIN.but(accumulation=3, adapter="plain", memory_format="channels_last")),
        ("llava-lora", GRID["llava-lora"]),
        ("qwen3-lora-long", GRID["qwen3-lora-long"].but(checkpointing="selective")),
        ("qwen3-lora-short", A3_BASE.but(layers="rewritten", loss="fused")),
    ],
)
def test_the_prediction_is_what_a_record_finds_in_the_step(room, recipe, little, tmp_path):
    """On a CPU both count the same shapes and lifetimes."""
    workload = little if room == "sd15-lora" else opened(room, tmp_path)
    run = peak_memory.predicted_and_recorded(workload, recipe, "it")
    assert abs(run.metric("off")) < 0.01
    # What stays on record draws the same picture, its peak included.
    kept = Run(**json.loads(json.dumps(vars(run))))
    series, phases = peak_memory.drawn_timeline(kept)
    totals = [sum(levels) for levels in zip(*series.values(), strict=True)]
    assert len(totals) == run.metrics["events"]
    assert [name for _, name in phases][-3:] == ["forward", "backward", "update"]
    assert max(totals) / 1e9 == pytest.approx(run.metric("peak_gb"), rel=0.01, abs=2e-5)


def test_the_reference_machines_peaks_were_predictable(tmp_path):
    """Plain loops on the H200. float32 without TF32 apart: there cuDNN picks convolutions with tens
    of GB of workspace."""
    workload = opened("sd15-lora", tmp_path, "full")
    drawn = on_drawn_latents(workload)
    example = {"pixel_values": torch.zeros(3, 512, 512), "input_ids": torch.zeros(77).long()}
    workload.dataset = lambda model, recipe: [example] * 8  # no pictures need be drawn
    knobs = ("micro_batch", "precision", "cache", "layers", "checkpointing")
    measured: dict[tuple, list[float]] = {}
    for run in records.read_runs(records.REFERENCE):
        if run.ok and run.workload == "sd15-lora" and run.scale == "full" and run.recipe:
            recipe, peak = Recipe(**run.recipe), run.metric("peak_allocated_gb")
            plain = recipe.compile == "off" and recipe.driver != "graph"
            if peak and plain and recipe.tf32 != "nothing" and "ranks" not in run.metrics:
                key = tuple(getattr(recipe, knob) for knob in knobs)
                measured.setdefault(key, [recipe]).append(peak)
    assert len(measured) > 2
    for recipe, *peaks in measured.values():
        ours = workload if recipe.cache == "nothing" else drawn
        predicted = peak_memory.predicted(ours, recipe, on="cuda").peak / 1e9
        assert peaks == pytest.approx([predicted] * len(peaks), rel=0.05), recipe


def test_the_first_reading_of_qwen3_8b_was_predictable(tmp_path, monkeypatch):
    """Four texts of 861 tokens through PEFT's LoRA in BF16 took 50.5 GB on an H200."""
    workload = opened("qwen3-lora-long", tmp_path, "full")
    ids = torch.zeros(4, 861, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    monkeypatch.setattr(peak_memory, "worst_batch", lambda workload, recipe: batch)
    memory = peak_memory.predicted(workload, A3_BASE, on="cuda")
    assert memory.peak / 1e9 == pytest.approx(50.5, rel=0.1)
    assert memory.at_peak()["logits"] == pytest.approx(3 * 4 * 861 * 151936 * 4, rel=0.001)
    assert memory.held["weights"] == pytest.approx(2 * 8.19e9, rel=0.01)


@pytest.mark.parametrize("change", [{"compile": "default"}, {"base_linear": "nf4"}])
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
