"""Captioned images on their way into training, with the operations and at the cost of the public
diffusers script.

That script builds its transforms from torchvision, which has no wheel that fits a CPU build of
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

from labutils.data import drawings
from labutils.data.files import generated_or_hub

if TYPE_CHECKING:
    import datasets

HUB_DATASET = "lambdalabs/naruto-blip-captions"
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
    import datasets

    def generated() -> datasets.Dataset:
        folder = Path(cache_dir) / "images" / f"drawn-v{drawings.VERSION}-seed{seed}"
        paths = drawings.draw_images(folder, count, seed)
        texts = [drawings.caption(i, seed) for i in range(count)]
        columns = {"image": [str(path) for path in paths], "text": texts}
        features = {"image": datasets.Image(), "text": datasets.Value("string")}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    return generated_or_hub(data, HUB_DATASET, count, Path(cache_dir), generated)


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
    sizes = [(width, height) for height, width in image_sizes(images)]
    several = [size for size in sizes if _resized(size, resolution) != (resolution, resolution)]
    if several:
        width, height = several[0]
        raise ValueError(
            f"{len(several)} of the {len(images)} images aren't square (one has {width}x{height} "
            "pixels). The script crops those anew at random whenever it reads them; encoded once, "
            "each would keep one crop, which is other training. Use cache='nothing' for them, or "
            "crop them to squares beforehand."
        )


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
