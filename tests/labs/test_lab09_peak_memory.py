"""The predicted peak against steps that ran, here and on the reference machine."""

from __future__ import annotations

import pytest
import torch

from labutils.labs.lab09_peak_memory import GRID, predicted_and_recorded
from labutils.labs.ladders import A3_BASE
from labutils.recipe import Recipe
from labutils.results import records
from labutils.training import peak_memory
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

PLAIN = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)


def opened(name, scale="tiny"):
    return open_workload(name, scale, device="cpu")


@pytest.fixture(scope="module")
def little():
    return on_drawn_latents(opened("sd15-lora"))


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
def test_the_prediction_is_what_a_record_finds_in_the_step(room, recipe, little):
    """On a CPU both count the same shapes and lifetimes."""
    run, memory = predicted_and_recorded(little if room == "sd15-lora" else opened(room), recipe)
    assert abs(run.metric("off")) < 0.01
    assert [name for _, name in memory.phases][-3:] == ["forward", "backward", "update"]
    peaks = [run.metric(f"{phase}_peak_gb") for phase in ("forward", "backward", "update")]
    assert max(peaks) == memory.peak / 1e9 == pytest.approx(run.metric("peak_gb"), rel=0.01)


def test_the_reference_machines_peaks_were_predictable():
    """Plain loops on the H200. float32 without TF32 apart: there cuDNN picks convolutions with tens
    of GB of workspace."""
    workload = opened("sd15-lora", "full")
    drawn = on_drawn_latents(workload)
    example = {"pixel_values": torch.zeros(3, 512, 512), "input_ids": torch.zeros(77).long()}
    workload.dataset = lambda model, recipe: [example] * 8  # no pictures need be drawn
    knobs = ("micro_batch", "precision", "cache", "layers", "checkpointing")
    measured: dict[tuple, list[float]] = {}
    for run in records.read_runs(records.REFERENCE):
        if run.ok and run.workload == "sd15-lora" and run.scale == "full" and run.recipe:
            # On record are also forms of AdamW that recipes no longer name; none sets the peak.
            recipe = Recipe(**run.recipe | {"optimizer": "adamw-fused"})
            peak = run.metric("peak_allocated_gb")
            plain = recipe.compile == "off" and recipe.driver != "graph"
            if peak and plain and recipe.tf32 != "nothing" and "ranks" not in run.metrics:
                key = tuple(getattr(recipe, knob) for knob in knobs)
                measured.setdefault(key, [recipe]).append(peak)
    assert len(measured) > 2
    for recipe, *peaks in measured.values():
        ours = workload if recipe.cache == "nothing" else drawn
        predicted = peak_memory.predicted(ours, recipe, on="cuda").peak / 1e9
        assert peaks == pytest.approx([predicted] * len(peaks), rel=0.05), recipe


def test_the_first_reading_of_qwen3_8b_was_predictable(monkeypatch):
    """Four texts of 861 tokens through PEFT's LoRA in BF16 took 50.5 GB on an H200."""
    workload = opened("qwen3-lora-long", "full")
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
