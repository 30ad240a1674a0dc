"""The DataLoader of every workload: in which order examples are read, and by how many workers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from labutils.data.images import collate
from labutils.recipe import Recipe

EPOCH = 1221
"""Examples of the real image dataset, and so of an epoch."""


class ResumableOrder(Sampler):
    """An order of an epoch's `length` entries that depends on (`seed`, epoch) alone.

    So a run can resume anywhere: `go_to(epoch, start)` chooses an epoch's order, the first `start`
    entries left out (they were trained on before the interruption). Iterating does not go on to the
    next epoch by itself. (The method is not called set_epoch: the accelerate library calls that by
    itself, with a count of its own and without the start.)
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.go_to(0)

    def go_to(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch and how many of its entries to leave out."""
        self.epoch, self.start = epoch, start

    @property
    def chance(self) -> np.random.Generator:
        """The epoch's random numbers, from the first one on."""
        return np.random.default_rng([self.seed, self.epoch])


class EpochOrder(ResumableOrder):
    """A random order of `length` examples out of `rows`, one epoch. Where the epoch is longer than
    the data, it goes through all rows in one order, then in another, and so on.
    """

    def __init__(self, rows: int, length: int | None = None, seed: int = 0) -> None:
        self.rows = rows
        super().__init__(rows if length is None else length, seed)

    def __iter__(self) -> Iterator[int]:
        chance, passes = self.chance, -(-self.length // self.rows)
        order = np.concatenate([chance.permutation(self.rows) for _ in range(passes)])
        return iter(order[self.start : self.length].tolist())

    def __len__(self) -> int:
        return self.length - self.start


class EveryNth(Sampler[list[int]]):
    """One rank's share of the micro-batches that `batches` chooses: the first, and every `ranks`-th
    from there.

    `order` is what `go_to` and `length` are asked of; `go_to` chooses this rank's first
    micro-batch.
    """

    def __init__(self, batches: Sampler[list[int]], order: Any, ranks: int) -> None:
        self.batches, self.order, self.ranks = batches, order, ranks
        self.length = order.length

    def go_to(self, epoch: int, start: int = 0) -> None:
        self.order.go_to(epoch, start)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batches, 0, None, self.ranks)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.ranks)


def make_loader(
    dataset: Any,
    recipe: Recipe,
    *,
    collate_fn: Callable[[list], Any] = collate,
    epoch_length: int = EPOCH,
    order: Sampler[list[int]] | None = None,
    ranks: int = 1,
) -> DataLoader:
    """The script's DataLoader with the recipe's knobs: shuffled micro-batches, workers started in
    the usual way.

    The order depends on (`recipe.seed`, epoch) alone: `loader.sampler.go_to(epoch, start)` chooses
    the next one. A last micro-batch that would be short is dropped, as every optimizer step is to
    have the same work. An epoch has at least `epoch_length` examples, by default as many as the
    real dataset: workers start anew each epoch, and a stand-in of a few files must not make them do
    so every few steps. The loader draws its workers' seeds from a generator of its own, so that the
    noise drawn in training does not depend on the number of workers.

    `order` chooses the examples of each micro-batch instead, where their number varies; it is
    `loader.batch_sampler`. With several `ranks` each gets every `ranks`-th micro-batch, and
    `loader.batch_sampler` has `go_to`.
    """
    if recipe.num_workers:
        # Each worker is forked, and the tokenizers library warns at every fork after it has used
        # its threads once; one caption at a time leaves them nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = len(dataset)
    if order is not None:
        chosen: dict[str, Any] = {"batch_sampler": order}
    else:
        sampler = EpochOrder(rows, max(rows, epoch_length), recipe.seed)
        chosen = {"batch_size": recipe.micro_batch, "sampler": sampler, "drop_last": True}
    if ranks > 1:
        batches = order or BatchSampler(sampler, recipe.micro_batch, drop_last=True)
        chosen = {"batch_sampler": EveryNth(batches, order or sampler, ranks)}
    return DataLoader(
        dataset,
        collate_fn=collate_fn,
        num_workers=recipe.num_workers,
        persistent_workers=recipe.persistent_workers,
        prefetch_factor=recipe.prefetch_factor if recipe.num_workers else None,
        pin_memory=recipe.pin_memory,
        generator=torch.Generator().manual_seed(recipe.seed),
        **chosen,
    )
