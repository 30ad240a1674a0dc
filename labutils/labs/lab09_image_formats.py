"""What a training image costs by the form it is kept in: PNG, JPEG, WebP, or pixels; on the disk,
or in memory.

    files = kept_as(paths, folder, form)      the same pictures in another form, written once
    times = read_ms(files, form)              one thread, file to pixels
    cold  = cold_read_ms(files)               the same once the system has dropped them

Everything that a DataLoader worker needs is a class or function of this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from labutils.data.files import whole_file
from labutils.data.images import normalize, random_crop, resize, to_tensor
from labutils.profiling.machine import usable_cores
from labutils.recipe import Unavailable
from labutils.training.child_process import MESSAGE, Child

# ----------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """A form in which a picture is kept: compressed by one of Pillow's codecs, or as pixels.

    codec: options of `Image.save`; {}: pixels, as numpy keeps them. side: pixels are kept at this
    size, 0: as they are. exact: what comes out is what went in.
    """

    name: str
    suffix: str
    codec: Mapping[str, Any]
    exact: bool = True
    side: int = 0

    def encode(self, image: Image.Image, file: Any) -> None:
        """Write an RGB image into a binary file."""
        if self.codec:
            image.save(file, **self.codec)
        else:
            np.save(file, np.asarray(image), allow_pickle=False)

    def decode(self, content: bytes) -> np.ndarray:
        """A file's bytes as uint8 [h, w, 3]."""
        if not self.codec:
            return np.load(io.BytesIO(content), allow_pickle=False)
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))


def formats(resolution: int) -> dict[str, Format]:
    """Name -> format: files as they are found, decoded once, and decoded and resized to the
    training `resolution`.
    """
    every = (
        Format("PNG", ".png", {"format": "PNG"}),
        Format("JPEG", ".jpg", {"format": "JPEG", "quality": 90}, exact=False),
        Format("WebP", ".webp", {"format": "WEBP", "quality": 90, "method": 2}, exact=False),
        Format("pixels", ".npy", {}),
        Format("resized", f"-{resolution}.npy", {}, side=resolution),
    )
    return {one.name: one for one in every}


def kept_as(paths: Sequence[Path], folder: Path, form: Format) -> list[Path]:
    """The pictures of `paths` as files of another form in `folder`, written where missing."""
    folder.mkdir(parents=True, exist_ok=True)

    def kept(path: Path) -> Path:
        file = folder / (path.stem + form.suffix)
        if not file.exists():
            with Image.open(path) as image:
                picture = image.convert("RGB")
            if form.side:
                picture = resize(picture, form.side)
            with whole_file(file) as part, part.open("wb") as out:
                form.encode(picture, out)
        return file

    with ThreadPoolExecutor(usable_cores()) as pool:  # codecs release the interpreter's lock
        return list(pool.map(kept, paths))


def read_ms(files: Sequence[Path], form: Format, passes: int = 1) -> dict[str, list[float]]:
    """Milliseconds of one thread for each file: "read" (its bytes, from the page cache if they are
    there) and "decode" (bytes to pixels)."""
    times: dict[str, list[float]] = {"read": [], "decode": []}
    for file in [*files] * passes:
        began = time.perf_counter()
        content = file.read_bytes()
        between = time.perf_counter()
        form.decode(content)
        times["read"].append(1e3 * (between - began))
        times["decode"].append(1e3 * (time.perf_counter() - between))
    return times


class FormatDataset(Dataset):
    """Training examples whose pictures are kept in a form: {"pixel_values": float32 [3, r, r],
    "input_ids"}.

    in_memory: "nothing"; "files": their bytes, so that decoding is left; "pixels": decoded and
    resized, as uint8.
    """

    def __init__(
        self,
        files: Sequence[Path],
        form: Format,
        resolution: int,
        token_ids: torch.Tensor,
        in_memory: str = "nothing",
    ) -> None:
        self.files, self.form, self.resolution = list(files), form, resolution
        self.token_ids = token_ids
        self.contents = self.pixels = None
        if in_memory == "files":
            self.contents = [file.read_bytes() for file in files]
        if in_memory == "pixels":
            self.pixels = [self._resized(place) for place in range(len(files))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        image = Image.fromarray(self._resized(place) if self.pixels is None else self.pixels[place])
        pixels = normalize(to_tensor(random_crop(image, self.resolution)))
        return {"pixel_values": pixels, "input_ids": self.token_ids[place % len(self.token_ids)]}

    def _resized(self, place: int) -> np.ndarray:
        content = self.files[place].read_bytes() if self.contents is None else self.contents[place]
        pixels = self.form.decode(content)
        if min(pixels.shape[:2]) == self.resolution:
            return pixels
        return np.asarray(resize(Image.fromarray(pixels), self.resolution))


# -------------------------------------------------------------------------------------- page cache


def forget(files: Sequence[Path]) -> None:
    """Ask the operating system to drop what it holds of these files in memory. It may decline: see
    `cached_share`.
    """
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # what isn't written yet can't be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[Path]) -> float:
    """The share of these files' pages that the operating system holds in memory (mincore), 0..1."""
    held = pages = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
        ):
            count = -(-len(mapped) // mmap.PAGESIZE)
            marks = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(mapped)
            done = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), marks
            )
            del start
            if done != 0:
                raise OSError(ctypes.get_errno(), "mincore can't tell which pages are in memory")
            held, pages = held + sum(mark & 1 for mark in marks), pages + count
    return held / pages


def cold_read_ms(files: Sequence[Path]) -> tuple[list[float], float]:
    """(milliseconds to read each file once the system has been asked to forget it, the share that
    it still held).
    """
    forget(files)
    still = cached_share(files)
    times = []
    for file in files:
        began = time.perf_counter()
        file.read_bytes()
        times.append(1e3 * (time.perf_counter() - began))
    return times, still


# -------------------------------------------------------------------------------------- the decoder


def gpu_decoder() -> Callable[[bytes], torch.Tensor]:
    """What decodes a JPEG's bytes on the GPU (nvJPEG, by torchvision) into uint8 [3, h, w] there.

    Raises `Unavailable` that says what is missing.
    """
    if not torch.cuda.is_available():
        raise Unavailable("nvJPEG decodes on an NVIDIA GPU, and there is none here")
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except Exception as error:  # a torchvision for another torch fails in several ways
        raise Unavailable(
            f"torchvision, which brings nvJPEG, can't be imported here ({type(error).__name__}). "
            "The course installs "
            "none: no wheel of it fits every torch that the course runs on"
        ) from error

    def decode(content: bytes) -> torch.Tensor:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return decode_jpeg(data, mode=ImageReadMode.RGB, device="cuda")

    return decode


# ------------------------------------------------------------------------------------------ threads

_CHILD = f"""
import sys, time, torch, torch.nn.functional as F
image = torch.rand(1, 3, 1080, 1080)
F.interpolate(image, size=(512, 512), mode="bicubic", antialias=True)
print("{MESSAGE}", torch.get_num_threads(), flush=True)
sys.stdin.readline()
end, count = time.perf_counter() + float(sys.argv[1]), 0
while time.perf_counter() < end:
    F.interpolate(image, size=(512, 512), mode="bicubic", antialias=True)
    count += 1
print("{MESSAGE}", count, flush=True)
"""


def images_per_s(
    processes: int, settings: Mapping[str, int | None], seconds: float = 1.0
) -> dict[str, dict[str, float]]:
    """Name -> pictures of 1080 x 1080 that so many processes resize in a second, each with
    `OMP_NUM_THREADS` as `settings` has it, and the `threads` that each one took.

    None leaves the variable unset: then each process takes as many threads as there are cores. All
    processes of all settings start side by side; those of one setting then work at once, one
    setting after the other.
    """
    with contextlib.ExitStack() as stack:
        children = {
            name: [stack.enter_context(_resizer(threads, seconds)) for _ in range(processes)]
            for name, threads in settings.items()
        }
        taken = {name: [_number(child) for child in group] for name, group in children.items()}
        return {
            name: {"images_per_s": sum(_resized(group)) / seconds, "threads": taken[name][0]}
            for name, group in children.items()
        }


RESIZING_S = 60.0
"""How long a process that resizes pictures may take, and wait for its turn."""


def _resizer(threads: int | None, seconds: float) -> Child:
    environment = dict.fromkeys(THREAD_VARIABLES, None if threads is None else str(threads))
    return Child(["-c", _CHILD, str(seconds)], limit_s=RESIZING_S, environment=environment)


def _resized(children: Sequence[Child]) -> list[int]:
    """How many pictures each child resizes once all are told to go."""
    for child in children:
        child.send("go")
    return [_number(child) for child in children]


def _number(child: Child) -> int:
    if (number := child.receive()) is None:
        raise RuntimeError(f"A process that resizes pictures failed: {child.failure()}")
    return number


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
