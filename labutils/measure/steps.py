"""The time of each optimizer step, on the clock that sees it: CUDA events on a GPU, the host's clock without one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class StepTimes:
    """Milliseconds a step: `step_ms` from the end of one to the end of the next, `data_ms` the host's wait for data in
    it, `wall_ms` the block's wall-clock time over its steps (one number a block)."""

    step_ms: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def extend(self, other: StepTimes) -> None:
        self.step_ms += other.step_ms
        self.data_ms += other.data_ms
        self.wall_ms += other.wall_ms


class StepClock:
    """Times a block of steps without making the host wait inside it: a loop that runs ahead of the GPU may go on to.

    `start()`, then `mark(data_ms)` after each step, then `stop()`, which synchronises. On a GPU a step's time is what
    passed on the GPU between two marks, idle time included.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.device = device
        self.marks: list = []
        self.data_ms: list[float] = []

    def start(self) -> None:
        self._synchronise()
        self.marks = [self._mark()]
        self.data_ms = []
        self.began = time.perf_counter()

    def mark(self, data_ms: float) -> None:
        self.marks.append(self._mark())
        self.data_ms.append(data_ms)

    def stop(self) -> StepTimes:
        self._synchronise()
        wall = (time.perf_counter() - self.began) * 1e3
        pairs = zip(self.marks, self.marks[1:], strict=False)
        steps = [a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3 for a, b in pairs]
        return StepTimes(steps, self.data_ms, [wall / len(steps)] if steps else [])

    def _mark(self) -> torch.cuda.Event | float:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
