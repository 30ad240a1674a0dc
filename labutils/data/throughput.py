"""How long a training step takes with so many DataLoader workers, predicted from what can be measured without them.

With no worker, reading a micro-batch and computing on it follow one another: read + compute. With `w` workers they
overlap, and the slower one sets the pace: max(compute, read / w). So workers beyond read / compute bring nothing. Where
cores are few, workers and training take time from each other as well: no step can be shorter than all the processor
time in it, shared out among the cores.

`Pipeline.step_ms` is this law. `Pipeline.simulated_ms` plays the queue out, with batches prefetched and handed over in
order and every running thread getting its share of the cores; it shows what the law leaves out, near the bend.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labutils.recipe import Recipe


@dataclass(frozen=True)
class Pipeline:
    """What the prediction needs; times are of one micro-batch, in ms.

    read_ms: one thread's time to make it (decode, resize, tokenise ...). compute_ms: what training does with it once it
    has it. hand_over_ms: what it costs training to take it from a worker. cores: threads that can run at once.
    threads: how many of them training keeps busy while it computes: one that launches work on a GPU, all on a CPU.
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
        """When training took each of the first `batches` batches. They are taken in order, as DataLoader does."""
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


def off_the_model(measured: Mapping[int, Mapping[str, float]], model: Mapping[int, float]) -> dict[str, list[int]]:
    """The workers whose step lies off the model by more than its spread: {"above": slower, "below": faster}.

    measured: workers -> {"p10", "p90", ..} in ms. model: workers -> ms.
    """
    return {
        "above": [workers for workers, step in measured.items() if step["p10"] > model[workers]],
        "below": [workers for workers, step in measured.items() if step["p90"] < model[workers]],
    }


def hand_over_ms(dataset: Any, recipe: Recipe, read_ms: float, batches: int = 8) -> list[float]:
    """Milliseconds that taking a batch costs training when a worker has it ready: `batches` - 1 samples.

    dataset: made by `image_text_dataset`. read_ms: what making one batch takes, to know when all are ready.
    """
    from labutils.data.images import make_loader

    one = recipe.but(num_workers=1, prefetch_factor=batches)
    ready = iter(make_loader(dataset, one, epoch_length=batches * recipe.micro_batch))
    next(ready)
    time.sleep(2 * batches * read_ms / 1e3)
    samples = []
    for _ in range(batches - 1):
        began = time.perf_counter()
        next(ready)
        samples.append(1e3 * (time.perf_counter() - began))
    return samples


def epoch_start_ms(dataset: Any, recipe: Recipe, epochs: int = 4) -> list[float]:
    """Milliseconds from the start of an epoch to its first batch, for each epoch but the first.

    Workers that do not persist are started anew each time, and then read the first batch while training waits.
    """
    from torch.utils.data import Subset

    from labutils.data.images import make_loader

    rows = max(1, recipe.num_workers) * recipe.micro_batch  # a micro-batch for each worker, and none after the start
    loader = make_loader(Subset(dataset, range(rows)), recipe, epoch_length=rows)
    samples = []
    for _ in range(epochs):
        began = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        samples.append(1e3 * (time.perf_counter() - began))
        for _ in iterator:
            pass
    return samples[1:]
