"""Micro-batches without end, in an order that depends on the seed alone, so that a run can be taken
up anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader

from labutils.profiling import compat
from labutils.workloads.base import Batch, Work

Weigh = Callable[[Batch], Work | None]


class Batches:
    """Epoch after epoch of `loader`, in the order of its `sampler`, which offers `go_to(epoch,
    start)`.

    `taken` counts the micro-batches that all ranks together were given. With the seed it is the
    data's whole state. Rank r of n gets micro-batches r, r + n, r + 2n and so on of those that one
    process would take, so an optimizer step has the same micro-batches, whoever computes them.

    `reset()` gives the host's wait for them since the last call, and the work in them by `weigh`,
    None where all have the same. The loader drops a last micro-batch that would be short: every
    optimizer step has the same work.
    """

    def __init__(
        self,
        loader: DataLoader,
        micro_batch: int,
        sampler: object,
        taken: int = 0,
        weigh: Weigh = lambda batch: None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.loader = loader
        self.weigh = weigh
        self.work: Work | None = None
        self.sampler = sampler
        self.per_epoch = sampler.length // micro_batch
        self.micro_batch = micro_batch
        self.taken = taken
        self.wait_ms = 0.0
        if self.per_epoch < 1:
            raise ValueError(
                f"The dataset has {sampler.length} examples: too few for micro-batches of "
                f"{micro_batch}."
            )
        self.iterator = self._endless()

    def __next__(self) -> Batch:
        began = time.perf_counter()
        with record_function("data"):
            batch = next(self.iterator)
        self.wait_ms += (time.perf_counter() - began) * 1e3
        self.taken += self.ranks
        if work := self.weigh(batch):
            self.work = work if self.work is None else self.work + work
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def reset(self) -> tuple[float, Work | None]:
        """Milliseconds waited since the last call, and what the micro-batches since then took."""
        since = self.wait_ms, self.work
        self.wait_ms, self.work = 0.0, None
        return since

    def close(self) -> None:
        """End the workers now. Left to the garbage collector, each of them would hold it up for
        five seconds.
        """
        self.iterator.close()
        compat.end_workers(self.loader)

    def _endless(self) -> Iterator[Batch]:
        while True:
            epoch, within = divmod(self.taken + self.rank, self.per_epoch)
            self.sampler.go_to(epoch, within * self.micro_batch)
            yield from self.loader


def on_device(batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
    """The micro-batch on the device."""
    with record_function("to_device"):
        return {
            name: tensor.to(device, non_blocking=non_blocking) for name, tensor in batch.items()
        }
