"""Draws PNG files that cost as much to read as the frames of a real image-caption dataset.

What the labs need of a training image is not its content but its cost:
`lambdalabs/naruto-blip-captions` holds PNGs of 1080 x 1080 pixels and 1.27 MB on average, and
inflating and unfiltering one is most of what a DataLoader does. A flat drawing compresses to a few
kB and decodes in no time, pure noise to 3.5 MB. So each file is a composition of flat shapes,
outlines and a gradient, under the kind of fine grain that video compression leaves; its strength
sets the size.

Drawing is a function of (seed, index) alone. It runs in threads, because numpy, Pillow and zlib
release the interpreter lock: a process that holds a CUDA context can't be forked safely, and
spawned ones would cost more than they save.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from labutils.data.files import cache_folder, whole_file, write_whole
from labutils.profiling.machine import usable_cores

SIDE = 1080
"""Pixels along each side of a drawn image."""

MEAN_BYTES = 1_270_000
"""Size of a file on average, as in the dataset that is stood in for."""

VERSION = 1
"""Changes when the same (seed, index) gives another picture, so that a cache never mixes the two.
"""

SUBJECTS = (
    "a man",
    "a woman",
    "a boy",
    "a girl",
    "a person",
    "a young man",
    "an old man",
    "a group of people",
)
LOOKS = (
    "red hair",
    "blue eyes",
    "black hair",
    "a beard",
    "a scarf around his neck",
    "glasses",
    "a black outfit",
)
DOING = (
    "holding a sword",
    "standing in the rain",
    "sitting on a rock",
    "looking at the camera",
    "pointing up",
)
PLACES = (
    "in front of a tree",
    "in a forest",
    "with a mountain in the background",
    "next to a man",
    "on a street",
)


def caption(index: int, seed: int = 0) -> str:
    """A caption in the manner of BLIP, 4 to 20 words long, that depends on `seed` and `index`
    alone.
    """
    rng = np.random.default_rng([seed, index, 1])
    words = f"{rng.choice(SUBJECTS)} with {rng.choice(LOOKS)}"
    if rng.random() < 0.35:
        words += f" and {rng.choice(LOOKS)}"
    if rng.random() < 0.3:
        words += f" {rng.choice(DOING)}"
    if rng.random() < 0.3:
        words += f" {rng.choice(PLACES)}"
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
        radius, stretch, corners = (
            int(rng.integers(30, 260)),
            rng.uniform(0.4, 1.6),
            int(rng.integers(2, 9)),
        )
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
    """Files 0 .. `count` - 1 of `seed` under `folder`, drawn where they are missing or damaged;
    their paths in order.

    Safe to interrupt and safe to run twice at once: a file appears under its name only when it is
    whole, and every process would write the same bytes. What exists is trusted only after the
    checksums that PNG carries were read. Last comes metadata.jsonl (file_name, text), which makes
    the folder one that `datasets` knows as an "imagefolder": the public script trains on it with
    --train_data_dir. Raises `OSError` that says what to type where the folder can't be written.
    """
    with cache_folder(folder, "Drawn images"):
        return _drawn(folder, count, seed)


def _drawn(folder: Path, count: int, seed: int) -> list[Path]:
    paths = [folder / f"{index:05d}.png" for index in range(count)]
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        whole = list(pool.map(is_whole, paths))
        missing = [index for index, ok in enumerate(whole) if not ok]
        if missing:
            _draw_missing(pool, folder, paths, missing, seed)
    # Other names are someone else's: "00001 (copy).png".
    there = sorted(path for path in folder.glob("[0-9]*.png") if _is_ours(path))
    lines = (
        json.dumps({"file_name": path.name, "text": caption(int(path.stem), seed)}) + "\n"
        for path in there
    )
    _keep(folder / "metadata.jsonl", "".join(lines).encode())
    return paths


def _draw_missing(
    pool: ThreadPoolExecutor, folder: Path, paths: list[Path], missing: list[int], seed: int
) -> None:
    """Draw the `missing` indices in the threads of `pool`, with a progress bar: a full set takes a
    minute.
    """
    from tqdm import tqdm

    def draw(index: int) -> None:
        if not is_whole(paths[index]):  # another process may have drawn it since
            _save(drawing(index, seed), paths[index])

    for _ in tqdm(
        pool.map(draw, missing),
        total=len(missing),
        desc=f"drawing images into {folder}",
        unit="image",
    ):
        pass


def is_whole(path: Path) -> bool:
    """Whether `path` is a PNG of the right size whose checksums are right up to its end. Decodes
    nothing.
    """
    try:
        with Image.open(path, formats=("PNG",)) as image:
            right_size = image.size == (SIDE, SIDE)
            image.verify()
            return right_size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False


def _save(image: Image.Image, path: Path) -> None:
    """Write `image` as a PNG (zlib level 6, Pillow's own) that appears under `path` only when it is
    whole.
    """
    with whole_file(path) as part, part.open("wb") as file:
        image.save(file, format="PNG")


def _is_ours(path: Path) -> bool:
    number = path.stem
    return number.isascii() and number.isdigit() and number == f"{int(number):05d}"


def _keep(path: Path, content: bytes) -> None:
    """Have `path` hold `content`; one that does is not written, so that a cache may be read-only."""
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)
