"""How long a training step takes with so many DataLoader workers, predicted from what can be
measured without them.

With no worker, reading a micro-batch and computing on it follow one another: read + compute. With
`w` workers they overlap, and the slower one sets the pace: max(compute, read / w). So workers
beyond read / compute bring nothing. Where cores are few, workers and training take time from each
other as well: no step can be shorter than all the processor time in it, shared out among the cores.

`Pipeline.step_ms` is this law. `Pipeline.simulated_ms` plays the queue out, with batches prefetched
and handed over in order and every running thread getting its share of the cores; it shows what the
law leaves out, near the bend.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pipeline:
    """What the prediction needs; times are of one micro-batch, in ms.

    read_ms: one thread's time to make it (decode, resize, tokenise ...). compute_ms: what training
    does with it once it has it. hand_over_ms: what it costs training to take it from a worker.
    cores: threads that can run at once. threads: how many of them training keeps busy while it
    computes: one that launches work on a GPU, all on a CPU.
    """

    read_ms: float
    compute_ms: float
    cores: int
    hand_over_ms: float = 0.0
    threads: int = 1
    accumulation: int = 4
    prefetch_factor: int = 2

    @property
    def busy_ms(self) -> float:
        """What training does for each micro-batch that a worker made."""
        return self.hand_over_ms + self.compute_ms

    @property
    def enough_workers(self) -> int:
        """The fewest workers that keep up with the computation where cores are plenty."""
        return max(1, math.ceil(self.read_ms / self.busy_ms))

    def step_ms(self, workers: int) -> float:
        """The law: milliseconds of one optimizer step with so many workers."""
        if workers == 0:
            return self.accumulation * (self.read_ms + self.compute_ms)
        shared_out = (self.read_ms + self.busy_ms * self.threads) / self.cores
        return self.accumulation * max(self.busy_ms, self.read_ms / workers, shared_out)

    def simulated_ms(self, workers: int, steps: int = 30) -> float:
        """Mean milliseconds of an optimizer step of the simulated queue, once it runs steadily."""
        if workers == 0:
            return self.step_ms(0)
        filled = 2 * workers * self.prefetch_factor
        times = _Queue(self, workers).take_times(filled + steps * self.accumulation)
        return self.accumulation * (times[-1] - times[filled - 1]) / (len(times) - filled)


class _Queue:
    """Workers, training, and the batches between them, from event to event."""

    def __init__(self, pipeline: Pipeline, workers: int) -> None:
        self.pipeline = pipeline
        self.clock = 0.0
        self.given = 0
        self.tasks: list[deque[int]] = [deque() for _ in range(workers)]
        self.left = [0.0] * workers  # processor time until each worker's first task is done
        self.training = 0.0  # the same for training's current micro-batch
        self.ready: set[int] = set()
        for _ in range(workers * pipeline.prefetch_factor):
            self._give()

    def take_times(self, batches: int) -> list[float]:
        """When training took each of the first `batches` batches. They are taken in order, as
        DataLoader does.
        """
        times: list[float] = []
        while len(times) < batches:
            if self.training <= 0 and len(times) in self.ready:
                times.append(self.clock)
                self._give()
                self.training = self.pipeline.busy_ms
            else:
                self._pass_time()
        return times

    def _give(self) -> None:
        """The next batch is asked of the next worker."""
        worker = self.given % len(self.tasks)
        if not self.tasks[worker]:
            self.left[worker] = self.pipeline.read_ms
        self.tasks[worker].append(self.given)
        self.given += 1

    def _pass_time(self) -> None:
        """To the next moment at which somebody finishes. Threads that run share the cores evenly."""
        reading = [worker for worker, tasks in enumerate(self.tasks) if tasks]
        running = len(reading) + self.pipeline.threads * (self.training > 0)
        speed = min(1.0, self.pipeline.cores / running)
        work = min([self.left[w] for w in reading] + [self.training] * (self.training > 0))
        self.clock += work / speed
        self.training -= work
        for worker in reading:
            self.left[worker] -= work
            if self.left[worker] <= 1e-9:
                self.ready.add(self.tasks[worker].popleft())
                self.left[worker] = self.pipeline.read_ms


def off_the_model(
    measured: Mapping[int, Mapping[str, float]], model: Mapping[int, float]
) -> dict[str, list[int]]:
    """The workers whose step lies off the model by more than its spread: {"above": slower, "below":
    faster}.

    measured: workers -> {"p10", "p90", ..} in ms. model: workers -> ms.
    """
    return {
        "above": [workers for workers, step in measured.items() if step["p10"] > model[workers]],
        "below": [workers for workers, step in measured.items() if step["p90"] < model[workers]],
    }
