"""What a DataLoader costs beside its work: handing a batch over, and starting an epoch."""

from __future__ import annotations

import time
from typing import Any

from labutils.recipe import Recipe


def hand_over_ms(dataset: Any, recipe: Recipe, read_ms: float, batches: int = 8) -> list[float]:
    """Milliseconds that taking a batch costs training when a worker has it ready: `batches` - 1
    samples.

    dataset: made by `image_text_dataset`. read_ms: what making one batch takes, to know when all
    are ready.
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

    Workers that do not persist are started anew each time, and then read the first batch while
    training waits.
    """
    from torch.utils.data import Subset

    from labutils.data.images import make_loader

    rows = (
        max(1, recipe.num_workers) * recipe.micro_batch
    )  # a micro-batch for each worker, and none after the start
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
