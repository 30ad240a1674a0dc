"""Time of each optimizer step, measured without disturbing it.

A step is timed on the clock that sees it: CUDA events on a GPU, the host's clock without one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepTimes:
    """Milliseconds a step: `step_ms` from the end of one to the end of the next, `data_ms` the
    host's wait for data in it, `wall_ms` the block's wall-clock time over its steps (one number a
    block), `work` what each step took in, where the loop says so, `round`
    the index of the round that each step was timed in."""

    step_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    work: list[Any] = field(default_factory=list)
    round: list[int] = field(default_factory=list)

    def extend(self, other: StepTimes, turn: int = 0) -> None:
        """Add another block's times, as those of round `turn`."""
        self.step_ms += other.step_ms
        self.data_ms += other.data_ms
        self.wall_ms += other.wall_ms
        self.work += other.work
        self.round += [turn] * len(other.step_ms)


class StepClock:
    """Times a block of steps without making the host wait inside it: a loop that runs ahead of the
    GPU may go on to.

    `start()`, then `mark(data_ms, work)` after each step, then `stop()`, which synchronises. On a
    GPU a step's time is what passed on the GPU between two marks, idle time included.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.device = device

    def start(self) -> None:
        self._synchronise()
        self.marks = [self._mark()]
        self.data_ms: list[float] = []
        self.work: list[Any] = []
        self.began = time.perf_counter()

    def mark(self, data_ms: float, work: Any = None) -> None:
        self.marks.append(self._mark())
        self.data_ms.append(data_ms)
        if work is not None:
            self.work.append(work)

    def stop(self) -> StepTimes:
        self._synchronise()
        wall = (time.perf_counter() - self.began) * 1e3
        pairs = zip(self.marks, self.marks[1:], strict=False)
        steps = [a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3 for a, b in pairs]
        return StepTimes(steps, self.data_ms, [wall / len(steps)] if steps else [], self.work)

    def _mark(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
