"""Captioned images on their way into training, with the operations and at the cost of the public
diffusers script.

That script builds its transforms from torchvision, which has no wheel that fits a CPU build of
torch. Here the same operations are written with Pillow and torch, in the same order: convert to
RGB, resize the shorter side (Lanczos), crop, uint8 tensor, channels first, / 255 in float32,
subtract and divide. Nothing is fused or skipped: most of a stock step's wait for data is spent in
these lines, and the labs measure it. Where torchvision is installed, a test compares bit by bit.

Everything a DataLoader worker needs is a class or function of this module: workers that are started
afresh import it, and they could not import what a notebook's cell defines.
"""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Sampler

from labutils.data.hub import hub_dataset
from labutils.recipe import Recipe

if TYPE_CHECKING:
    import datasets

HUB_DATASET = "lambdalabs/naruto-blip-captions"
EPOCH = 1221
"""Examples of the real dataset, and so of an epoch."""
RESOLUTION = 512


# -------------------------------------------------------------------------- the dataset


def captioned_images(
    cache_dir: str | Path, count: int, data: str = "generated", seed: int = 0
) -> datasets.Dataset:
    """`count` images with captions: columns `image` (decoded when read) and `text`.

    `data="generated"` draws PNG files like the real ones once into `cache_dir`; `data="hub"` loads
    the first `count` of `lambdalabs/naruto-blip-captions`. Raises `ConnectionError` where the hub's
    dataset can't be had, `ValueError` for a source it does not know.
    """
    if count < 1:
        raise ValueError(f"count={count}: a dataset needs at least 1 image.")
    if data == "generated":
        return _generated(Path(cache_dir), count, seed)
    if data == "hub":
        return hub_dataset(HUB_DATASET, count, Path(cache_dir))
    raise ValueError(
        f"data={data!r} is not known. Choose 'generated' (drawn here) or 'hub' (the real dataset)."
    )


def _generated(cache_dir: Path, count: int, seed: int) -> datasets.Dataset:
    import datasets

    from labutils.data import drawings

    folder = cache_dir / "images" / f"drawn-v{drawings.VERSION}-seed{seed}"
    paths = drawings.draw_images(folder, count, seed)
    columns = {
        "image": [str(path) for path in paths],
        "text": [drawings.caption(i, seed) for i in range(count)],
    }
    return datasets.Dataset.from_dict(
        columns,
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )


# -------------------------------------------------------------------------- the transforms


def resize(image: Image.Image, resolution: int) -> Image.Image:
    """Scale so that the shorter side has `resolution` pixels (Lanczos); the longer side is rounded
    down.
    """
    size = _resized(image.size, resolution)
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def _resized(size: tuple[int, int], resolution: int) -> tuple[int, int]:
    """Width and height that `resize` gives an image of that width and height."""
    short, long = sorted(size)
    other = int(resolution * long / short)
    return (resolution, other) if size[0] == short else (other, resolution)


def random_crop(image: Image.Image, resolution: int) -> Image.Image:
    """A `resolution` x `resolution` window at a random place. Draws no random number where the
    image is that size.
    """
    width, height = image.size
    top = left = 0
    if (width, height) != (resolution, resolution):
        top = int(torch.randint(0, height - resolution + 1, size=(1,)).item())
        left = int(torch.randint(0, width - resolution + 1, size=(1,)).item())
    return image.crop((left, top, left + resolution, top + resolution))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB image as float32 [3, height, width] in 0..1."""
    pixels = torch.from_numpy(np.array(image, np.uint8, copy=True))
    pixels = pixels.permute((2, 0, 1)).contiguous()
    return pixels.to(dtype=torch.float32).div(255)


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """From 0..1 to -1..1: the mean 0.5 subtracted, then divided by the deviation 0.5, channel by
    channel.
    """
    pixels = pixels.clone()
    mean = torch.as_tensor([0.5, 0.5, 0.5], dtype=pixels.dtype).view(-1, 1, 1)
    deviation = torch.as_tensor([0.5, 0.5, 0.5], dtype=pixels.dtype).view(-1, 1, 1)
    return pixels.sub_(mean).div_(deviation)


class Preprocess:
    """What the script does to a batch of rows when it is read: images to tensors, captions to token
    ids.

    Called by `datasets` with {"image": [PIL], "text": [str]}; adds "pixel_values" (float32 [3,
    resolution, resolution] in -1..1, one each) and "input_ids" (int64 [n, tokens]).
    """

    def __init__(self, tokenizer: Callable[..., Any], resolution: int = RESOLUTION) -> None:
        self.tokenizer = tokenizer
        self.resolution = resolution

    def __call__(self, rows: dict[str, list]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        rows["pixel_values"] = [self.pixels(image) for image in images]
        rows["input_ids"] = self.token_ids(list(rows["text"]))
        return rows

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """float32 [3, resolution, resolution] in -1..1 of an RGB image."""
        return normalize(to_tensor(random_crop(resize(image, self.resolution), self.resolution)))

    def token_ids(self, captions: list[str]) -> torch.Tensor:
        """int64 [captions, model_max_length], padded and cut to the length that the text encoder
        takes.
        """
        length = self.tokenizer.model_max_length
        return self.tokenizer(
            captions, max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids


def image_text_dataset(
    images: datasets.Dataset, tokenizer: Callable[..., Any], resolution: int = RESOLUTION
) -> datasets.Dataset:
    """`images` (columns image, text) that decode, transform and tokenise whenever a row is read."""
    return images.with_transform(Preprocess(tokenizer, resolution))


def check_one_crop(images: datasets.Dataset, resolution: int) -> None:
    """Raise `ValueError` where an image of `images` (columns image, text) is cropped at random,
    naming its size.

    Encoded once, it would stay cropped as it happened to be that time.
    """
    import datasets

    files = images.cast_column("image", datasets.Image(decode=False))
    sizes = [_size(file) for file in files["image"]]
    several = [size for size in sizes if _resized(size, resolution) != (resolution, resolution)]
    if several:
        width, height = several[0]
        raise ValueError(
            f"{len(several)} of the {len(images)} images aren't square (one has {width}x{height} "
            "pixels). "
            "The script crops those anew at random whenever it reads them; encoded once, each "
            "would keep one crop, "
            "which is other training. Use cache='nothing' for them, or crop them to squares "
            "beforehand."
        )


def _size(file: dict[str, Any]) -> tuple[int, int]:
    """Width and height out of an image file's first bytes."""
    with Image.open(io.BytesIO(file["bytes"]) if file["bytes"] else file["path"]) as image:
        return image.size


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """{"pixel_values": float32 [b, 3, h, w], "input_ids": int64 [b, tokens]} of `b` examples."""
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    pixel_values = pixel_values.to(memory_format=torch.contiguous_format).float()
    input_ids = torch.stack([example["input_ids"] for example in examples])
    return {"pixel_values": pixel_values, "input_ids": input_ids}


# -------------------------------------------------------------------------- the loader


class EpochOrder(Sampler[int]):
    """A random order of `length` examples out of `rows`, one epoch, that depends on (`seed`, epoch)
    alone.

    So a run can resume anywhere: `go_to(epoch, start)` chooses an epoch's order, the first `start`
    examples left out (they were trained on before the interruption). Where the epoch is longer than
    the data, it goes through all rows in one order, then in another, and so on. Iterating does not
    go on to the next epoch by itself. (The method is not called set_epoch: the accelerate library
    calls that by itself, with a count of its own and without the start.)
    """

    def __init__(self, rows: int, length: int | None = None, seed: int = 0) -> None:
        self.rows = rows
        self.length = rows if length is None else length
        self.seed = seed
        self.go_to(0)

    def go_to(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch and how many of its examples to leave out. Raises `ValueError` where
        none would be left.
        """
        if not 0 <= start < self.length:
            raise ValueError(
                f"start={start}: an epoch of {self.length} examples can start at 0 to "
                f"{self.length - 1}."
            )
        self.epoch = epoch
        self.start = start

    def __iter__(self) -> Iterator[int]:
        chance = np.random.default_rng([self.seed, self.epoch])
        passes = -(-self.length // self.rows)
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
    `loader.batch_sampler`. With several `ranks` the loader hands out every so manieth micro-batch,
    and `loader.batch_sampler` has `go_to`.
    """
    workers: dict[str, Any] = {}
    if recipe.num_workers:
        # Each worker is forked, and the tokenizers library warns at every fork after it has used
        # its threads once; one caption at a time leaves them nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        workers = {
            "persistent_workers": recipe.persistent_workers,
            "prefetch_factor": recipe.prefetch_factor,
        }
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
        pin_memory=recipe.pin_memory,
        generator=torch.Generator().manual_seed(recipe.seed),
        **chosen,
        **workers,
    )


# -------------------------------------------------------------------------- what a row costs


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
