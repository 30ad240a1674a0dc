"""What a DataLoader costs: reading a row, handing a batch over, and starting an epoch."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from labutils.data.images import Preprocess, normalize, random_crop, resize, to_tensor
from labutils.data.loader import make_loader
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise

if TYPE_CHECKING:
    import datasets

PARTS = ("decode", "convert", "resize", "tensor", "tokenise")
"""What reading a row consists of, in this order."""


def decode_ms(dataset: datasets.Dataset, n: int = 16) -> Run:
    """The run of `n` rows of `dataset` (made by `image_text_dataset`) read by one thread, in
    milliseconds a row and part: "decode_ms" (open the file, inflate, unfilter), "convert_ms" (to
    RGB), "resize_ms" (Lanczos, and the crop), "tensor_ms" (to float32 in -1..1), "tokenise_ms", and
    "all_ms". Files that were just drawn come from the page cache, not the disk.
    """
    preprocess = dataset.format["format_kwargs"]["transform"]
    rows = dataset.with_format(None)
    run = Run("03", "reading", tags={"experiment": "reading"})
    run.samples = {f"{part}_ms": [] for part in (*PARTS, "all")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a DataLoader worker
    try:
        for index in range(n):
            parts = _row_ms(rows, index % len(rows), preprocess)
            for series, ms in zip(run.samples.values(), (*parts, sum(parts)), strict=True):
                series.append(ms)
    finally:
        torch.set_num_threads(threads)
    run.metrics = {part: summarise(samples) for part, samples in run.samples.items()}
    return run


def _row_ms(rows: datasets.Dataset, index: int, preprocess: Preprocess) -> list[float]:
    """Milliseconds of each part of reading row `index`, in the order of `PARTS`."""
    marks = [time.perf_counter()]
    row = rows[index]
    marks.append(time.perf_counter())
    image = row["image"].convert("RGB")
    marks.append(time.perf_counter())
    image = random_crop(resize(image, preprocess.resolution), preprocess.resolution)
    marks.append(time.perf_counter())
    normalize(to_tensor(image))
    marks.append(time.perf_counter())
    preprocess.token_ids([row["text"]])
    marks.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]


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
    # A micro-batch for each worker, and none after the start.
    rows = max(1, recipe.num_workers) * recipe.micro_batch
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
