"""Leaf photographs that cost as much to read as those of the `beans` dataset, and the same in
varied sizes.

`beans` (Makerere AI Lab, 2020) holds 1034 training photographs of bean leaves taken with
smartphones: JPEG, all of 500 x 500 pixels, 139 kB on average, in three classes. What the labs need
of them is their size in pixels, which decides how many image tokens a model sees, and their cost.
So each file here is a blurred background, some leaves with veins and spots, and a sensor's grain,
whose strength sets the file's size.

`BEANS` files are all 500 x 500, as the dataset's are. `VARIED` ones have a spread of aspect ratios
and sizes, as images have that weren't cut to one size: from them AnyRes makes varying numbers of
tiles and tokens.

Drawing is a function of (sizes, seed, index, tile) alone.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from labutils.data.files import drawn_files, generated_or_hub

if TYPE_CHECKING:
    import datasets

HUB_DATASET = "AI-Lab-Makerere/beans"
CLASSES = ("angular_leaf_spot", "bean_rust", "healthy")
SIDE = 500
"""Pixels along each side of a `beans` photograph."""
TILE = 336
"""Pixels along each side of a tile of LLaVA-NeXT's: what varied sizes are chosen for."""
MEAN_BYTES = 139_000
"""Size of a `beans` file on average: 171.69 MiB of 1295 files (TensorFlow Datasets' catalogue)."""
BEANS, VARIED = "beans", "varied"
VERSION = 1
"""Changes when the same (sizes, seed, index) gives another picture, so that a cache never mixes the
two.
"""
GRAIN = 13.5
"""Mean standard deviation of the grain, in levels of 256: chosen so that files have `MEAN_BYTES` on
average.
"""
QUALITY = 94


def leaf_images(
    cache_dir: str | Path, count: int, data: str = "generated", sizes: str = BEANS, tile: int = TILE
) -> datasets.Dataset:
    """`count` photographs with their class: columns `image` (decoded when read) and `labels` (an
    index of `CLASSES`).

    `data="generated"` draws JPEG files of the given `sizes` once into `cache_dir`, varied ones for
    a model with tiles of so many pixels a side; `data="hub"` loads the first `count` of `beans`.
    Raises `ConnectionError` where the hub's dataset can't be had, `ValueError` for what it does not
    know.
    """
    import datasets

    if sizes not in (BEANS, VARIED):
        raise ValueError(
            f"sizes={sizes!r} is not known. Choose {BEANS!r} (all 500 x 500) or {VARIED!r}."
        )
    if data == "hub" and sizes != BEANS:
        raise ValueError(
            f"{HUB_DATASET} has images of one size only. Use data='generated' for sizes={sizes!r}."
        )

    def generated() -> datasets.Dataset:
        kind = sizes if sizes == BEANS else f"{sizes}{tile}"
        folder = Path(cache_dir) / "leaves" / f"{kind}-v{VERSION}-seed0"
        paths = draw_leaves(folder, count, sizes, tile=tile)
        labels = [leaf_class(i) for i in range(count)]
        columns = {"image": [str(path) for path in paths], "labels": labels}
        features = {"image": datasets.Image(), "labels": datasets.ClassLabel(names=list(CLASSES))}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    return generated_or_hub(data, HUB_DATASET, count, Path(cache_dir), generated)


# -------------------------------------------------------------------------- one photograph


def leaf_class(index: int, seed: int = 0) -> int:
    """The class of photograph `index`; the three are about equally frequent, as in the dataset."""
    return int(np.random.default_rng([seed, index, 1]).integers(len(CLASSES)))


def leaf_size(index: int, sizes: str, seed: int = 0, tile: int = TILE) -> tuple[int, int]:
    """(width, height) of photograph `index`: 500 x 500, or from 1:3 to 3:1 and from 0.9 to 5.3
    tiles' pixels.
    """
    if sizes == BEANS:
        return SIDE, SIDE
    rng = np.random.default_rng([seed, index, 2])
    aspect = 3 ** rng.uniform(-1, 1)
    pixels = tile * tile * 2.2 * 2.4 ** rng.uniform(-1, 1)
    return round((pixels * aspect) ** 0.5), round((pixels / aspect) ** 0.5)


def leaf(index: int, sizes: str = BEANS, seed: int = 0, tile: int = TILE) -> Image.Image:
    """The RGB photograph of `index`."""
    rng = np.random.default_rng([seed, index])
    size = leaf_size(index, sizes, seed, tile)
    picture = _background(rng, size)
    draw = ImageDraw.Draw(picture)
    for _ in range(9):
        _leaf(draw, rng, size)
    if CLASSES[leaf_class(index, seed)] != "healthy":
        _spots(draw, rng, size)
    pixels = np.asarray(picture.filter(ImageFilter.GaussianBlur(1))).astype(np.float32)
    strength = np.float32(GRAIN * rng.uniform(0.5, 1.5))
    pixels += rng.standard_normal((size[1], size[0], 1), dtype=np.float32) * strength
    np.clip(pixels, 0, 255, out=pixels)
    return Image.fromarray(pixels.astype(np.uint8))


def _background(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """Blurred greens and browns: a few random colours, enlarged."""
    width, height = size
    coarse = rng.normal(0, 1, (max(2, height // 40), max(2, width // 40), 3)).astype(np.float32)
    colours = np.clip(np.array([125, 128, 80], np.float32) + 40 * coarse, 0, 255)
    return Image.fromarray(colours.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)


def _leaf(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: tuple[int, int]) -> None:
    """An ellipse with an outline and a vein."""
    x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
    long = rng.uniform(0.15, 0.5) * min(size)
    short = long * rng.uniform(0.4, 0.9)
    colour = tuple(int(v) for v in np.clip(rng.normal([125, 140, 80], [40, 40, 30]), 0, 255))
    edge, vein = tuple(v // 2 for v in colour), tuple(min(255, v + 40) for v in colour)
    draw.ellipse((x - long, y - short, x + long, y + short), fill=colour, outline=edge, width=2)
    draw.line((x - long, y, x + long, y), fill=vein, width=3)


def _spots(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: tuple[int, int]) -> None:
    """Brown spots: the disease."""
    for _ in range(int(rng.integers(10, 60))):
        x, y, radius = rng.uniform(0, size[0]), rng.uniform(0, size[1]), rng.uniform(2, 12)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(95, 65, 35))


# -------------------------------------------------------------------------- the files


def draw_leaves(
    folder: Path, count: int, sizes: str, seed: int = 0, tile: int = TILE
) -> list[Path]:
    """Files 0 .. `count` - 1 under `folder`, as `drawn_files` keeps them; their paths in order."""

    def jpeg(index: int) -> bytes:
        buffer = io.BytesIO()
        leaf(index, sizes, seed, tile).save(buffer, format="JPEG", quality=QUALITY)
        return buffer.getvalue()

    return drawn_files(folder, "Drawn photographs", ".jpg", count, jpeg)
