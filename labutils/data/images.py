"""Images on their way into training: the datasets, and the public diffusers script's operations at
their cost.

The script builds its transforms from torchvision, which has no wheel that fits a CPU build of
torch. Here the same operations are written with Pillow and torch, in the same order: convert to
RGB, resize the shorter side (Lanczos), crop, uint8 tensor, channels first, / 255 in float32,
subtract and divide. Nothing is fused or skipped: most of a stock step's wait for data is spent in
these lines, and the labs measure it. Where torchvision is installed, a test compares bit by bit.

What a DataLoader worker needs is a class or function of this module: workers that are started
afresh import it, and they could not import what a notebook's cell defines.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from labutils.data import generated_images
from labutils.data.file_cache import rows_of

if TYPE_CHECKING:
    import datasets

CAPTIONED = "lambdalabs/naruto-blip-captions"
LEAVES = "AI-Lab-Makerere/beans"


# -------------------------------------------------------------------------- the datasets


def captioned_images(
    cache_dir: str | Path, count: int, data: str = "generated"
) -> datasets.Dataset:
    """`count` images with captions: columns `image` (decoded when read) and `text`.

    `data="generated"` draws PNG files like the real ones once into `cache_dir`; `data="hub"` loads
    the first `count` of `lambdalabs/naruto-blip-captions`. Raises `ConnectionError` where these
    can't be had.
    """
    import datasets

    if data == "hub":
        return rows_of(CAPTIONED, Path(cache_dir)).select(range(count))
    folder = Path(cache_dir) / "images" / f"drawn-v{generated_images.VERSION}-seed0"
    paths = generated_images.draw_images(folder, count)
    texts = [generated_images.caption(index) for index in range(count)]
    return _rows(paths, "text", texts, datasets.Value("string"))


def leaf_images(
    cache_dir: str | Path, count: int, data: str = "generated", varied_for: int | None = None
) -> datasets.Dataset:
    """`count` photographs with their class: columns `image` (decoded when read) and `labels` (an
    index of `generated_images.LEAF_CLASSES`).

    `data="generated"` draws JPEG files once into `cache_dir`, of 500 x 500 pixels or of varied
    sizes (`varied_for` tiles of so many pixels a side); `data="hub"` loads the first `count` of
    `beans`. Raises `ConnectionError` where these can't be had, `ValueError` for varied sizes of
    them.
    """
    import datasets

    if data == "hub" and varied_for:
        raise ValueError(f"{LEAVES} has images of one size only. Use data='generated' here.")
    if data == "hub":
        return rows_of(LEAVES, Path(cache_dir)).select(range(count))
    kind = f"varied{varied_for}" if varied_for else "beans"
    folder = Path(cache_dir) / "leaves" / f"{kind}-v{generated_images.LEAF_VERSION}"
    paths = generated_images.draw_leaves(folder, count, varied_for)
    classes = datasets.ClassLabel(names=list(generated_images.LEAF_CLASSES))
    labels = [generated_images.leaf_class(index) for index in range(count)]
    return _rows(paths, "labels", labels, classes)


def leaf_sizes(
    cache_dir: str | Path, count: int, data: str = "generated", varied_for: int | None = None
) -> list[tuple[tuple[int, int], int]]:
    """((height, width), class) of each photograph that `leaf_images` gives. Nothing is decoded, and
    nothing is drawn for it."""
    if data == "hub":
        images = leaf_images(cache_dir, count, data, varied_for)
        return list(zip(image_sizes(images), images.with_format(None)["labels"], strict=True))
    sizes = [(generated_images.LEAF_SIDE,) * 2] * count
    if varied_for:
        sizes = [generated_images.varied_size(index, varied_for)[::-1] for index in range(count)]
    return [(size, generated_images.leaf_class(index)) for index, size in enumerate(sizes)]


def _rows(paths: list[Path], name: str, values: list, kind: Any) -> datasets.Dataset:
    """A dataset of image files, and a second column `name` of a `kind` of values."""
    import datasets

    columns = {"image": [str(path) for path in paths], name: values}
    features = datasets.Features({"image": datasets.Image(), name: kind})
    return datasets.Dataset.from_dict(columns, features=features)


# -------------------------------------------------------------------------- the transforms


def resize(image: Image.Image, resolution: int) -> Image.Image:
    """Scale so that the shorter side has `resolution` pixels (Lanczos); the longer side is rounded
    down.
    """
    short, long = sorted(image.size)
    other = int(resolution * long / short)
    size = (resolution, other) if image.width == short else (other, resolution)
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


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
    return pixels.permute((2, 0, 1)).contiguous().to(dtype=torch.float32).div(255)


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

    def __init__(self, tokenizer: Callable[..., Any], resolution: int) -> None:
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


def image_sizes(images: datasets.Dataset) -> list[tuple[int, int]]:
    """(height, width) of every image of the column `image`, read from the files' heads; nothing is
    decoded.
    """
    import datasets

    sizes = []
    for row in images.select_columns("image").cast_column("image", datasets.Image(decode=False)):
        stored = row["image"]
        with Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]) as file:
            sizes.append((file.height, file.width))
    return sizes


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """{"pixel_values": float32 [b, 3, h, w], "input_ids": int64 [b, tokens]} of `b` examples."""
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    pixel_values = pixel_values.to(memory_format=torch.contiguous_format).float()
    input_ids = torch.stack([example["input_ids"] for example in examples])
    return {"pixel_values": pixel_values, "input_ids": input_ids}
