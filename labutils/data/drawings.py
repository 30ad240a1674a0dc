"""Draws PNG files that cost as much to read as the frames of a real image-caption dataset.

What the labs need of a training image is not its content but its cost:
`lambdalabs/naruto-blip-captions` holds PNGs of 1080 x 1080 pixels and 1.27 MB on average, and
inflating and unfiltering one is most of what a DataLoader does. A flat drawing compresses to a few
kB and decodes in no time, pure noise to 3.5 MB. So each file is a composition of flat shapes,
outlines and a gradient, under the kind of fine grain that video compression leaves; its strength
sets the size.

Drawing is a function of (seed, index) alone.
"""

from __future__ import annotations

import io
import json
import math
import tomllib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from labutils.data.files import drawn_files, write_whole

SIDE = 1080
"""Pixels along each side of a drawn image."""

MEAN_BYTES = 1_270_000
"""Size of a file on average, as in the dataset that is stood in for."""

VERSION = 1
"""Changes when the same (seed, index) gives another picture, so that a cache never mixes the two.
"""

WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))["caption"]


def caption(index: int, seed: int = 0) -> str:
    """A caption in the manner of BLIP, 4 to 20 words long, that depends on `seed` and `index`
    alone.
    """
    rng = np.random.default_rng([seed, index, 1])
    words = f"{rng.choice(WORDS['subjects'])} with {rng.choice(WORDS['looks'])}"
    if rng.random() < 0.35:
        words += f" and {rng.choice(WORDS['looks'])}"
    if rng.random() < 0.3:
        words += f" {rng.choice(WORDS['doing'])}"
    if rng.random() < 0.3:
        words += f" {rng.choice(WORDS['places'])}"
    return words


def drawing(index: int, seed: int = 0) -> Image.Image:
    """The RGB picture of `index`: a gradient, outlined shapes, and grain. Depends on `seed` and
    `index` alone.
    """
    rng = np.random.default_rng([seed, index])
    picture = Image.fromarray(_gradient(rng))
    _shapes(ImageDraw.Draw(picture), rng)
    pixels = np.asarray(picture.filter(ImageFilter.GaussianBlur(0.8))).astype(np.float32)
    pixels += _grain(rng)
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


def _grain(rng: np.random.Generator) -> np.ndarray:
    """float32 [SIDE, SIDE, 3]: noise whose strength varies from picture to picture, as the sizes of
    real files do.
    """
    strength = np.float32(GRAIN * rng.uniform(0.5, 1.5))
    return rng.standard_normal((SIDE, SIDE, 3), dtype=np.float32) * strength


GRAIN = 0.65
"""Mean standard deviation of the grain, in levels of 256: chosen so that files have `MEAN_BYTES` on
average.
"""


def draw_images(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Files 0 .. `count` - 1 of `seed` under `folder`, as `drawn_files` keeps them; their paths.

    Beside them is metadata.jsonl (file_name, text), which makes the folder one that `datasets`
    knows as an "imagefolder": the public script trains on it with --train_data_dir.
    """
    paths = drawn_files(folder, "Drawn images", ".png", count, lambda index: _png(index, seed))
    there = sorted(folder.glob("[0-9][0-9][0-9][0-9][0-9].png"))
    rows = ({"file_name": path.name, "text": caption(int(path.stem), seed)} for path in there)
    listed = "".join(json.dumps(row) + "\n" for row in rows).encode()
    target = folder / "metadata.jsonl"
    if not target.is_file() or target.read_bytes() != listed:  # a cache may be read-only
        write_whole(target, listed)
    return paths


def _png(index: int, seed: int) -> bytes:
    """The picture as a PNG (zlib level 6, Pillow's own)."""
    buffer = io.BytesIO()
    drawing(index, seed).save(buffer, format="PNG")
    return buffer.getvalue()
