"""One batch, trained on again and again: every step has the same work, so that one can be traced
and another timed.

    step = OnOneBatch(trainer, batch)
    trace, step_ms = step.traced(), step.timed(8)
"""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import dataclass

from labutils.profiling.timing import StepTimes
from labutils.profiling.trace import Trace, profile
from labutils.profiling.utilization_and_power import Energy
from labutils.results.effects import FEWEST_SAMPLES
from labutils.training.benchmark import timed
from labutils.training.trainer import Trainer
from labutils.workloads.base import Batch

TIMED_MS = {"cuda": 1500, "cpu": 300}
"""A step is repeated at least this long before it is traced, so that a GPU is warm, and as its
energy meter is slow. It is timed for as long again."""


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

    def warm_up(self, steps: int) -> tuple[int, float | None]:
        """How many steps, `steps` or more, take `TIMED_MS`, after warming up for as long, and the
        GPU's mean watts in that. `FEWEST_SAMPLES` at least."""
        some_ms = min(self.timed(3)[1:])  # the first may compile
        device = self.trainer.workload.device.type
        enough = max(FEWEST_SAMPLES, math.ceil(TIMED_MS[device] / some_ms))
        with Energy() as energy:
            self.timed(enough)
        return max(steps, enough), energy.watts

    def traced(self) -> Trace:
        """A trace of an optimizer step; on a GPU with shapes, which tell thin products."""
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            return profile(self, 1, folder, with_shapes=self.trainer.workload.device.type == "cuda")
