"""Stand-ins for two image datasets: drawings that cost as much to read as the real files.

What the labs need of a training image is not its content but its cost. A flat drawing compresses to
a few kB and decodes in no time, pure noise to several MB. So each file is a composition of flat
shapes, outlines and a gradient, under the kind of fine grain that a camera or a video compression
leaves. The grain's strength sets the file's size.

- `lambdalabs/naruto-blip-captions` holds captioned PNGs of 1080 x 1080 pixels and 1.27 MB on
  average: inflating and unfiltering one is most of what a DataLoader does.
- `beans` (Makerere AI Lab, 2020) holds 1034 photographs of bean leaves in three classes: JPEG, all
  of 500 x 500 pixels, 139 kB on average. Their size in pixels decides how many image tokens a model
  sees. "varied" files have a spread of aspect ratios and sizes, as images have that weren't cut to
  one size: from them AnyRes makes varying numbers of tiles and tokens.

A drawing is a function of its index, its size and its grain alone.
"""

from __future__ import annotations

import io
import math
import tomllib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from labutils.data.file_cache import drawn_files

SIDE = 1080
"""Pixels along each side of a captioned image."""
MEAN_BYTES = 1_270_000
"""Size of a captioned image's file on average, as in the dataset that is stood in for."""
GRAIN = 0.65
"""Mean standard deviation of the grain, in levels of 256: chosen so that files have `MEAN_BYTES` on
average.
"""
VERSION = 1
"""Changes when the same index gives another picture, so that a cache never mixes the two."""

LEAF_SIDE = 500
"""Pixels along each side of a `beans` photograph."""
LEAF_BYTES = 139_000
"""Size of a `beans` file on average: 171.69 MiB of 1295 files (TensorFlow Datasets' catalogue)."""
LEAF_GRAIN = 12.0
"""As `GRAIN`, for `LEAF_BYTES`."""
LEAF_QUALITY = 94
LEAF_VERSION = 2
LEAF_CLASSES = ("angular_leaf_spot", "bean_rust", "healthy")

WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))["caption"]


def caption(index: int) -> str:
    """A caption in the manner of BLIP, 4 to 20 words long, that depends on `index` alone."""
    rng = np.random.default_rng([0, index, 1])
    words = f"{rng.choice(WORDS['subjects'])} with {rng.choice(WORDS['looks'])}"
    if rng.random() < 0.35:
        words += f" and {rng.choice(WORDS['looks'])}"
    if rng.random() < 0.3:
        words += f" {rng.choice(WORDS['doing'])}"
    if rng.random() < 0.3:
        words += f" {rng.choice(WORDS['places'])}"
    return words


def leaf_class(index: int) -> int:
    """The class of photograph `index`; the three are about equally frequent, as in the dataset."""
    return int(np.random.default_rng([0, index, 1]).integers(len(LEAF_CLASSES)))


def varied_size(index: int, tile: int) -> tuple[int, int]:
    """(width, height) of photograph `index` of varied ones: from 1:3 to 3:1, and from 0.9 to 5.3
    times the pixels of a tile of `tile` x `tile`.
    """
    rng = np.random.default_rng([0, index, 2])
    aspect = 3 ** rng.uniform(-1, 1)
    pixels = tile * tile * 2.2 * 2.4 ** rng.uniform(-1, 1)
    return round((pixels * aspect) ** 0.5), round((pixels / aspect) ** 0.5)


def drawing(index: int, size: tuple[int, int] = (SIDE, SIDE), grain: float = GRAIN) -> Image.Image:
    """The RGB picture of `index`, (width, height) pixels: a gradient, outlined shapes, and grain.

    The grain's strength varies from picture to picture, as the sizes of real files do.
    """
    rng = np.random.default_rng([0, index])
    picture = Image.fromarray(_gradient(rng))
    _shapes(ImageDraw.Draw(picture), rng)
    blurred = picture.filter(ImageFilter.GaussianBlur(0.8)).resize(size)
    pixels = np.asarray(blurred).astype(np.float32)
    strength = np.float32(grain * rng.uniform(0.5, 1.5))
    pixels += rng.standard_normal(pixels.shape, dtype=np.float32) * strength
    np.clip(pixels, 0, 255, out=pixels)
    return Image.fromarray(pixels.astype(np.uint8))


def _gradient(rng: np.random.Generator) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: one colour at the top that becomes another at the bottom."""
    top, bottom = rng.integers(60, 240, (2, 1, 1, 3))
    down = np.linspace(0, 1, SIDE, dtype=np.float32).reshape(SIDE, 1, 1)
    return np.broadcast_to(top * (1 - down) + bottom * down, (SIDE, SIDE, 3)).astype(np.uint8)


def _shapes(draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    """Outlined ellipses and polygons of one colour each, drawn over one another."""
    for _ in range(24):
        x, y = (int(v) for v in rng.integers(0, SIDE, 2))
        radius, stretch = int(rng.integers(30, 260)), rng.uniform(0.4, 1.6)
        corners = int(rng.integers(2, 9))
        fill = tuple(int(v) for v in rng.integers(20, 250, 3))
        if corners == 2:
            box = (x - radius, y - radius * stretch, x + radius, y + radius * stretch)
            draw.ellipse(box, fill=fill, outline=(15, 12, 20), width=4)
            continue
        angles = np.sort(rng.uniform(0, 2 * math.pi, corners))
        points = [(x + radius * math.cos(a), y + radius * stretch * math.sin(a)) for a in angles]
        draw.polygon(points, fill=fill, outline=(15, 12, 20), width=4)


def draw_images(folder: Path, count: int) -> list[Path]:
    """Captioned images 0 .. `count` - 1 as PNG files under `folder`, as `drawn_files` keeps them
    (zlib level 6, Pillow's own); their paths in order."""
    return drawn_files(folder, ".png", count, lambda index: _encoded(drawing(index), "PNG"))


def draw_leaves(folder: Path, count: int, varied_for: int | None = None) -> list[Path]:
    """Photographs 0 .. `count` - 1 as JPEG files under `folder`, as `drawn_files` keeps them; their
    paths in order. varied_for: draw them of varied sizes, for tiles of so many pixels a side."""

    def leaf(index: int) -> bytes:
        size = varied_size(index, varied_for) if varied_for else (LEAF_SIDE, LEAF_SIDE)
        return _encoded(drawing(index, size, LEAF_GRAIN), "JPEG", quality=LEAF_QUALITY)

    return drawn_files(folder, ".jpg", count, leaf)


def _encoded(picture: Image.Image, form: str, **how: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **how)
    return buffer.getvalue()
