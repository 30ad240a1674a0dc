"""The loop is one page: few frames of labutils between a comparison and the backward pass."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from recipes_at_work import PLAIN, sd_workload

import labutils
from labutils.training import Benchmark, benchmark

HOUSE = str(Path(labutils.__file__).parent)
QUICK = PLAIN.but(cache="latents+text", logging="ring-buffer")
FRAMES = 5


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("driver", ["accelerate", "eager"])
def test_five_frames_from_compare_to_backward(driver, monkeypatch):
    monkeypatch.setattr(benchmark, "probe_machine", lambda *items: None)
    depths, backward = [], torch.Tensor.backward

    def watched(self: torch.Tensor, *args: object, **options: object) -> None:
        stack = [frame for frame in inspect.stack() if frame.filename.startswith(HOUSE)]
        depths.append([f"{Path(frame.filename).name}:{frame.function}" for frame in stack])
        backward(self, *args, **options)

    with Benchmark(sd_workload(), warmup=0) as bench:
        bench.prepare({"it": QUICK.but(driver=driver)})
        candidate = bench.candidates["it"]
        candidate.settle = candidate.report = lambda *args: None
        monkeypatch.setattr(torch.Tensor, "backward", watched)
        bench.compare({"it": QUICK.but(driver=driver)}, steps=1, rounds=1)
    assert depths
    for stack in depths:
        assert stack[-1] == "benchmark.py:compare" and stack[0].startswith("step.py")
        assert len(stack) <= FRAMES, stack
