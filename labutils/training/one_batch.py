"""One batch, trained on again and again: every step has the same work, so that one can be traced
and another timed. A loop over experts has it at learning rate 0 alone, as learning changes routes.

    step = OnOneBatch(trainer, batch)
    trace, step_ms = step.traced(), step.timed(8)
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

from labutils.profiling.timing import StepTimes
from labutils.profiling.trace import Trace, profile
from labutils.training.benchmark import timed
from labutils.training.trainer import Trainer
from labutils.workloads.base import Batch


@dataclass(frozen=True)
class OnOneBatch:
    """A trainer that trains on one batch again and again."""

    trainer: Trainer
    batch: Batch

    def step(self) -> None:
        self.trainer.step(itertools.repeat(self.batch))

    def timed(self, steps: int, warmup: int = 0) -> list[float]:
        """Milliseconds of each of `steps` optimizer steps, after `warmup` more."""
        for _ in range(warmup):
            self.step()
        times = StepTimes()
        for _ in timed(self.trainer, steps, times):
            self.step()
        return times.step_ms

    def traced(self) -> Trace:
        """A trace of an optimizer step; on a GPU with shapes, which tell thin products."""
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            return profile(self, 1, folder, with_shapes=self.trainer.workload.device.type == "cuda")

    def lanes(self) -> dict[str, list[tuple[float, float, str]]]:
        """Host and GPU in one warm step, as `plots.timeline` draws them; nothing without a GPU.

        Calls to CUDA and kernels alone are recorded, which slows a host less than `traced` does.
        """
        lanes: dict[str, list[tuple[float, float, str]]] = {"host": [], "GPU": []}
        if self.trainer.workload.device.type != "cuda":
            return lanes
        torch.cuda.synchronize()  # without a call to CUDA an earlier profiler can't leave
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.step()
            torch.cuda.synchronize()
        for event in profiler.events():
            block = event.time_range.start / 1e3, event.time_range.elapsed_us() / 1e3
            if event.device_type == torch.autograd.DeviceType.CUDA:
                lanes["GPU"].append((*block, "kernel"))
            elif "Synchronize" in event.name:
                lanes["host"].append((*block, "synchronisation"))
            elif "Launch" in event.name or "Async" in event.name:  # copies are launched, too
                lanes["host"].append((*block, "launch call"))
        return lanes
