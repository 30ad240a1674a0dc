"""The predicted peak against the allocator's on a GPU: three workloads, three recipes each, within
10 %.
"""

from __future__ import annotations

import gc

import pytest
import torch

from labutils.labs import lab09_peak_memory
from labutils.layers.lora import attach_lora
from labutils.profiling import cuda
from labutils.profiling.machine import machine_facts, scale_for
from labutils.profiling.memory import KINDS, AllocatorRecord, measured, rounded
from labutils.profiling.memory_model import saved_for_backward
from labutils.recipe import Recipe
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

SCALE = scale_for(machine_facts())
WORKLOADS: dict[str, object] = {}


def work(room: str) -> object:
    """The workload, one at a time: two of 8 billion parameters would fill the card."""
    if room not in WORKLOADS:
        for other in WORKLOADS.values():
            other.release_weights()
        WORKLOADS.clear()
        gc.collect()
        cuda.empty_cache()
        found = open_workload(room, SCALE)
        WORKLOADS[room] = on_drawn_latents(found) if room == "sd15-lora" else found
    return WORKLOADS[room]


@pytest.mark.parametrize("mode", lab09_peak_memory.CHECKPOINTING)
@pytest.mark.parametrize("room", lab09_peak_memory.GRID)
def test_the_peak_is_predicted_within_a_tenth(room, mode):
    recipe = lab09_peak_memory.GRID[room].but(checkpointing=mode)
    run = lab09_peak_memory.predicted_and_recorded(work(room), recipe, f"{room}, {mode}")
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in run.metrics.items()}
    assert abs(run.metric("off")) < 0.1, shown
    # The record is the allocator's own: its peak is the counter's.
    peak = sum(run.metrics.get(f"{kind}_gb", 0.0) for kind in KINDS)
    assert peak == pytest.approx(run.metric("peak_gb"), rel=0.02)
    assert run.metric("peak_reserved_gb") >= run.metric("peak_gb")


def test_the_history_is_read_as_the_allocator_writes_it():
    kept = torch.empty(1000, device="cuda")
    with AllocatorRecord() as record:
        waits = torch.empty(10 * 2**20, device="cuda")
        passing = torch.empty(2**20, device="cuda")
        del passing
        record.mark("backward")
        gradient = torch.empty(3 * 2**20, device="cuda")
        record.mark("update", gradients=[gradient])
        del waits
    memory = record.step({"weights": record.allocated_before})
    kinds = {one.kind: one.bytes for one in memory.allocations}
    assert kinds["activations"] == 4 * 10 * 2**20 and kinds["gradients"] == 4 * 3 * 2**20
    assert kinds["temporaries"] == rounded(4 * 2**20)
    assert [name for _, name in memory.phases] == ["forward", "backward", "update"]
    assert memory.peak >= rounded(kept.nbytes) + 4 * 13 * 2**20


def test_a_limited_process_runs_out_and_comes_back():
    recipe = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)
    workload = work("sd15-lora")
    with lab09_peak_memory.LimitedTrainer(workload, recipe) as trainer:
        room = lab09_peak_memory.predicted(workload, recipe.but(micro_batch=4)).peak / 1e9
        trainer.limit(1.15 * room)
        held = trainer.run_out(40)
        assert "out of memory" in held["message"].lower()
        assert held["in_except_gb"] > 1.1 * held["before_gb"]
        assert held["cleaned_gb"] == pytest.approx(held["before_gb"], rel=0.05)
        assert held["runs_again"] == 1
        start = lab09_peak_memory.predicted_largest(workload, recipe, room)
        assert 2 <= lab09_peak_memory.largest_batch(trainer.fits, start) <= 8
        assert sum(not fits for fits in trainer.tries.values()) <= 3


@pytest.mark.parametrize("lora", [False, True])
def test_the_allocator_grows_by_what_was_counted(lora):
    """Within the rounding to 512 bytes a tensor, and the seeds that attention kernels keep."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, dropout=0.0, batch_first=True).to("cuda")
    if lora:
        attach_lora(layer, ("linear1", "linear2"), 4, 4, "plain")
    x = torch.randn(4, 256, 512, device="cuda")
    loss = lambda: layer(x).square().mean()
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad])
    grown = measured(layer, loss, optimizer).activations
    assert grown == pytest.approx(saved_for_backward(layer, loss), rel=0.1)
