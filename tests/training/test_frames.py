"""The loop is one page: few frames of labutils between a comparison and the backward pass."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from recipes_at_work import PLAIN, one_thread, sd_workload
from torch import Tensor

import labutils
from labutils.training import Benchmark, benchmark
from labutils.training.step import DRIVERS, GraphStep

HOUSE = str(Path(labutils.__file__).parent)
QUICK = PLAIN.but(cache="latents+text", logging="ring-buffer", optimizer="adamw-fused")
FRAMES = 5


class Eagerly(GraphStep):
    """The graph driver as far as a CPU runs it: the whole step is called, not recorded."""

    def __init__(self, context) -> None:
        context.recipe = context.recipe.but(driver="graph")
        super().__init__(context)

    def _take(self, batches) -> None:
        super()._take(batches)
        self.captured = self._whole_step
        for parameter in self.context.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("driver", ["accelerate", "eager", "graph"])
def test_five_frames_from_compare_to_backward(driver, monkeypatch):
    monkeypatch.setattr(benchmark, "probe_machine", lambda *items: None)
    recipe = QUICK.but(driver="accelerate" if driver == "accelerate" else "eager")
    if driver == "graph":
        monkeypatch.setitem(DRIVERS, "eager", Eagerly)
    depths: list[list[str]] = []
    backward = torch.Tensor.backward

    def watched(self: Tensor, *args: object, **options: object) -> None:
        stack = [frame for frame in inspect.stack() if frame.filename.startswith(HOUSE)]
        depths.append([f"{Path(frame.filename).name}:{frame.function}" for frame in stack])
        backward(self, *args, **options)

    with one_thread(), Benchmark(sd_workload(), warmup=0) as bench:
        bench.prepare({"it": recipe})
        candidate = bench.candidates["it"]
        monkeypatch.setattr(candidate, "settle", lambda: None)
        monkeypatch.setattr(candidate, "report", lambda run, times: None)
        monkeypatch.setattr(torch.Tensor, "backward", watched)
        bench.compare({"it": recipe}, steps=1, rounds=1)
    assert depths
    for stack in depths:
        assert stack[-1] == "benchmark.py:compare" and stack[0].startswith("step.py")
        assert len(stack) <= FRAMES, stack
