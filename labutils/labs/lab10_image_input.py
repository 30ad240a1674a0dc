"""What a training image costs by the form it is kept in: PNG, JPEG, WebP, or pixels; on the disk,
or in memory; and what that costs the step.

    pictures = Pictures(workload, 32)                the same pictures in every form
    runs = pictures.decoding()                       one thread, file to pixels
    runs = trained_from(pictures, {"PNG": ("PNG", recipe), "JPEG": ("JPEG", recipe)}, steps, rounds)

`FormatDataset` is a class of this module, so that a DataLoader's workers find it.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from labutils.data import generated_images
from labutils.data.file_cache import whole_file
from labutils.data.images import Preprocess, resize
from labutils.data.tokenizers import clip_tokenizer
from labutils.profiling.cuda import timed
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, summarise
from labutils.training import Benchmark
from labutils.workloads import Workload

# ----------------------------------------------------------------------------------------- formats


class Format(NamedTuple):
    """A form in which a picture is kept: compressed by one of Pillow's codecs, or as pixels.

    codec: options of `Image.save`; {}: pixels, as numpy keeps them. side: pixels are kept at this
    size, 0: as they are.
    """

    suffix: str
    codec: Mapping[str, Any]
    side: int = 0

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
    return {
        "PNG": Format(".png", {"format": "PNG"}),
        "JPEG": Format(".jpg", {"format": "JPEG", "quality": 90}),
        "WebP": Format(".webp", {"format": "WEBP", "quality": 90, "method": 2}),
        "pixels": Format(".npy", {}),
        "resized": Format(f"-{resolution}.npy", {}, side=resolution),
    }


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
                if form.codec:
                    picture.save(out, **form.codec)
                else:
                    np.save(out, np.asarray(picture), allow_pickle=False)
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


def cached_share(files: Sequence[Path]) -> float:
    """The share of these files' pages that the operating system holds in memory (mincore), 0..1."""
    libc = ctypes.CDLL(None, use_errno=True)
    marks = []
    for file in files:
        content = np.memmap(file, mode="r")
        pages = np.empty(-(-content.size // mmap.PAGESIZE), np.uint8)
        start, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.size)
        if libc.mincore(start, size, ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore can't tell which pages are in memory")
        marks.append(pages & 1)
    return float(np.concatenate(marks).mean())


def forget(files: Sequence[Path]) -> None:
    """Ask the operating system to drop what it holds of these files in memory. It may decline: see
    `cached_share`.
    """
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # what isn't written yet can't be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class FormatDataset(Dataset):
    """Training examples whose pictures are kept in a form: {"pixel_values": float32 [3, r, r],
    "input_ids"}; in_memory: decoded once, and held as uint8."""

    def __init__(
        self,
        files: Sequence[Path],
        form: Format,
        preprocess: Preprocess,
        token_ids: torch.Tensor,
        in_memory: bool = False,
    ) -> None:
        self.files, self.form, self.preprocess = list(files), form, preprocess
        self.token_ids = token_ids
        self.held = [form.decode(file.read_bytes()) for file in files] if in_memory else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if self.held is None:
            pixels = self.form.decode(self.files[place].read_bytes())
        else:
            pixels = self.held[place]
        return {
            "pixel_values": self.preprocess.pixels(Image.fromarray(pixels)),
            "input_ids": self.token_ids[place],
        }


IN_MEMORY = " in memory"
"""Ends the name of a form whose pictures are held in memory."""


class Pictures:
    """The same pictures in every form, in a folder of the cache."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload = workload
        self.formats = formats(workload.size.resolution)
        self.images = workload.cache_dir / "images"
        folder = self.images / f"drawn-v{generated_images.VERSION}-seed0"
        self.drawn = generated_images.draw_images(folder, count)

    def files(self, name: str) -> list[Path]:
        """The pictures as files of a format."""
        folder = self.images / f"formats-v{generated_images.VERSION}"
        return self.drawn if name == "PNG" else kept_as(self.drawn, folder, self.formats[name])

    def dataset(self, form: str) -> FormatDataset:
        """Training examples of a format, or of one held in memory ("resized in memory")."""
        name = form.removesuffix(IN_MEMORY)
        tokenizer = clip_tokenizer(self.workload.weights, self.workload.cache_dir / "hub")
        preprocess = Preprocess(tokenizer, self.workload.size.resolution)
        ids = preprocess.token_ids([generated_images.caption(n) for n in range(len(self.drawn))])
        return FormatDataset(self.files(name), self.formats[name], preprocess, ids, name != form)

    def decoding(self, passes: int = 2) -> dict[str, Run]:
        """ "decode: NAME" -> one thread's `read_ms` and `decode_ms`; `mb` a file."""
        runs = {}
        for name, form in self.formats.items():
            files = self.files(name)
            samples = {f"{part}_ms": ms for part, ms in read_ms(files, form, passes).items()}
            run = _timed({"experiment": "decode", "format": name}, samples)
            run.metrics["mb"] = sum(file.stat().st_size for file in files) / len(files) / 1e6
            runs[f"decode: {name}"] = run
        return runs

    def decoding_on_gpu(self) -> Run:
        """The same for JPEG files that the GPU decodes (nvJPEG, by torchvision), one by one. Raises
        `Unavailable` that says what is missing."""
        if not torch.cuda.is_available():
            raise Unavailable("nvJPEG decodes on an NVIDIA GPU, and there is none here")
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except Exception as error:  # a torchvision for another torch fails in several ways
            raise Unavailable(
                f"torchvision, which brings nvJPEG, can't be imported ({type(error).__name__}). "
                "The course installs none: no wheel of it fits every torch that the course runs on"
            ) from error

        def decode(content: bytes) -> torch.Tensor:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            return decode_jpeg(data, mode=ImageReadMode.RGB, device="cuda")

        samples = []
        for file in self.files("JPEG"):
            content = file.read_bytes()
            times = timed(lambda content=content: decode(content), budget_s=0.02, at_least=3)
            samples.append(times[0])
        tags = {"experiment": "decode", "format": "JPEG", "on_gpu": True}
        return _timed(tags, {"decode_ms": samples})

    def examples_ms(self, forms: Iterable[str]) -> dict[str, float]:
        """Form -> the median of what one thread takes to make an example.

        Example by example one of each, so that a slow host is slow for all of them.
        """
        datasets = {name: self.dataset(name) for name in forms}
        times: dict[str, list[float]] = {name: [] for name in datasets}
        for place in range(len(self.drawn)):
            for name, dataset in datasets.items():
                began = time.perf_counter()
                dataset[place]
                times[name].append(1e3 * (time.perf_counter() - began))
        return {name: median(samples) for name, samples in times.items()}

    def storage(self, rounds: int = 3) -> dict[str, Run]:
        """ "files: cold" and "files: warm": a PNG read by one thread from the disk or from the
        operating system's page cache (`read_ms`), and decoded (`example_ms`); `still_cached`, what
        the system didn't drop."""
        files, form = self.files("PNG"), self.formats["PNG"]
        reads: dict[str, list[float]] = {"cold": [], "warm": []}
        still_cached = {"cold": 0.0, "warm": 1.0}
        for _ in range(rounds):
            forget(files)
            still_cached["cold"] = max(still_cached["cold"], cached_share(files))
            for state in reads:
                times = read_ms(files, form)
                reads[state] += times["read"]
        decode = median(times["decode"])
        runs = {}
        for state, times in reads.items():
            samples = {"read_ms": times, "example_ms": [read + decode for read in times]}
            run = _timed({"experiment": "files", "cache": state}, samples)
            run.metrics["still_cached"] = still_cached[state]
            runs[f"files: {state}"] = run
        return runs


def _timed(tags: dict[str, Any], samples: dict[str, list[float]]) -> Run:
    metrics = {name: summarise(times) for name, times in samples.items()}
    return Run("10", "", tags=tags, samples=samples, metrics=metrics)


# ---------------------------------------------------------------------------------------- training


def trained_from(
    pictures: Pictures, ways: Mapping[str, tuple[str, Recipe]], steps: int, rounds: int
) -> dict[str, Run]:
    """Name -> run of the recipe of each of `ways` on the pictures in its form, interleaved by
    rounds. The first is the base, and measured twice."""
    form = ""

    def dataset(model: nn.Module, recipe: Recipe) -> FormatDataset:
        return pictures.dataset(form)  # of the trainer that is being built

    tags = {}
    with Benchmark(pictures.workload, warmup=1, dataset=dataset) as bench:
        for name, (form, recipe) in ways.items():
            bench.prepare({name: recipe})
            kept = form.removesuffix(IN_MEMORY)
            tags[name] = {"experiment": "image input", "format": kept}
            tags[name] |= {"in_memory": True} if kept != form else {}
            tags[name] |= {"workers": recipe.num_workers} if recipe.num_workers else {}
        recipes = {name: recipe for name, (_, recipe) in ways.items()}
        return bench.compare(recipes, steps, rounds, tags)
