"""What a DataLoader costs: reading a row, handing a batch over, and starting an epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from labutils.data.images import Preprocess, normalize, random_crop, resize, to_tensor
from labutils.data.loader import make_loader
from labutils.recipe import Recipe

if TYPE_CHECKING:
    import datasets

PARTS = ("decode", "convert", "resize", "tensor", "tokenise")
"""What reading a row consists of, in this order."""


def decode_ms(dataset: datasets.Dataset, n: int = 16) -> dict[str, list[float]]:
    """Milliseconds of one thread for each of `n` rows of `dataset` (made by `image_text_dataset`),
    part by part.

    "decode" (open the file, inflate, unfilter), "convert" (to RGB), "resize" (Lanczos, and the
    crop), "tensor" (to float32 in -1..1), "tokenise", and "all". Files that were just drawn come
    from the page cache, not the disk.
    """
    preprocess = dataset.format["format_kwargs"]["transform"]
    rows = dataset.with_format(None)
    samples: dict[str, list[float]] = {name: [] for name in (*PARTS, "all")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a DataLoader worker
    try:
        for index in range(n):
            for name, ms in _row_ms(rows, index % len(rows), preprocess).items():
                samples[name].append(ms)
    finally:
        torch.set_num_threads(threads)
    return samples


def _row_ms(rows: datasets.Dataset, index: int, preprocess: Preprocess) -> dict[str, float]:
    """Milliseconds of each part of reading row `index`."""
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    row = rows[index]
    mark()
    image = row["image"].convert("RGB")
    mark()
    image = random_crop(resize(image, preprocess.resolution), preprocess.resolution)
    mark()
    normalize(to_tensor(image))
    mark()
    preprocess.token_ids([row["text"]])
    mark()
    parts = [1e3 * (after - before) for before, after in zip(marks, marks[1:], strict=False)]
    return dict(zip(PARTS, parts, strict=True)) | {"all": sum(parts)}


def hand_over_ms(dataset: Any, recipe: Recipe, read_ms: float, batches: int = 8) -> list[float]:
    """Milliseconds that taking a batch costs training when a worker has it ready: `batches` - 1
    samples.

    dataset: made by `image_text_dataset`. read_ms: what making one batch takes, to know when all
    are ready.
    """
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
