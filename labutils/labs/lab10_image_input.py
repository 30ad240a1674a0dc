"""What a training image costs by the form it is kept in: PNG, JPEG, WebP, or pixels in one file,
mapped or held in memory; and what that costs the step.

    pictures = Pictures(workload, 32)                the same pictures in every form
    runs = pictures.decoding()                       one thread, file to pixels
    runs = trained_from(pictures, {"PNG": ("PNG", recipe), "JPEG": ("JPEG", recipe)}, steps, rounds)

`FormDataset` is a class of this module, so that a DataLoader's workers find it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from labutils.data import generated_images
from labutils.data.file_cache import whole_file
from labutils.data.images import Preprocess, resize
from labutils.data.tokenizers import clip_tokenizer
from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training import Benchmark
from labutils.workloads import Workload

CODECS: dict[str, dict[str, Any]] = {
    "PNG": {"format": "PNG"},
    "JPEG": {"format": "JPEG", "quality": 90},
    "WebP": {"format": "WEBP", "quality": 90, "method": 2},
}
"""Form -> options of Pillow's `Image.save`."""
MAPPED, HELD = "memory map", "resized in memory"
"""Forms whose pictures are decoded and resized already: in a file that is mapped, or in memory."""


def decoded(content: bytes) -> np.ndarray:
    """A file's bytes as uint8 [h, w, 3]."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


class FormDataset(Dataset):
    """Training examples, {"pixel_values": float32 [3, r, r], "input_ids"}, out of `files`, or where
    given out of `pixels`, uint8 [n, r, r, 3]."""

    def __init__(
        self,
        files: Sequence[Path],
        preprocess: Preprocess,
        token_ids: torch.Tensor,
        pixels: np.ndarray | None = None,
    ) -> None:
        self.files, self.preprocess, self.token_ids = list(files), preprocess, token_ids
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if self.pixels is None:
            pixels = decoded(self.files[place].read_bytes())
        else:
            pixels = self.pixels[place]
        image = self.preprocess.pixels(Image.fromarray(pixels))
        return {"pixel_values": image, "input_ids": self.token_ids[place]}


class Pictures:
    """The same pictures in every form, in a folder of the cache."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.side = workload, workload.size.resolution
        images = workload.cache_dir / "images"
        self.folder = images / f"formats-v{generated_images.VERSION}"
        self.folder.mkdir(parents=True, exist_ok=True)
        drawn = images / f"drawn-v{generated_images.VERSION}-seed0"
        self.drawn = generated_images.draw_images(drawn, count)

    def files(self, form: str) -> list[Path]:
        """The pictures as files of one of `CODECS`, written where missing."""

        def kept(path: Path) -> Path:
            file = self.folder / f"{path.stem}.{form.lower()}"
            if not file.exists():
                with Image.open(path) as image, whole_file(file) as part, part.open("wb") as out:
                    image.convert("RGB").save(out, **CODECS[form])
            return file

        with ThreadPoolExecutor(usable_cores()) as pool:  # codecs release the interpreter's lock
            return self.drawn if form == "PNG" else list(pool.map(kept, self.drawn))

    def mapped(self) -> np.ndarray:
        """All pictures at the training resolution, uint8 [n, r, r, 3], as a memory map."""
        file = self.folder / f"{len(self.drawn)}-{self.side}.npy"
        if not file.exists():
            pictures = (Image.fromarray(decoded(path.read_bytes())) for path in self.drawn)
            pixels = np.stack([np.asarray(resize(picture, self.side)) for picture in pictures])
            with whole_file(file) as part, part.open("wb") as out:
                np.save(out, pixels, allow_pickle=False)
        return np.load(file, mmap_mode="r")

    def dataset(self, form: str) -> FormDataset:
        """Training examples of one of `CODECS`, `MAPPED` or `HELD`."""
        tokenizer = clip_tokenizer(self.workload.weights)
        preprocess = Preprocess(tokenizer, self.side)
        ids = preprocess.token_ids([generated_images.caption(n) for n in range(len(self.drawn))])
        if form in CODECS:
            return FormDataset(self.files(form), preprocess, ids)
        pixels = self.mapped() if form == MAPPED else np.array(self.mapped())
        return FormDataset(self.drawn, preprocess, ids, pixels)

    def decoding(self) -> dict[str, Run]:
        """ "decode: FORM" -> one thread's `decode_ms` (`read_ms` apart), and `mb` a file."""
        return {f"decode: {form}": self.decoded_by(decoded, form) for form in CODECS}

    def decoded_by(self, decode: Callable[[bytes], Any], form: str, **tags: Any) -> Run:
        """The run of all files of a form, decoded one by one."""
        files = self.files(form)
        times: dict[str, list[float]] = {"read_ms": [], "decode_ms": []}
        decode(files[0].read_bytes())
        for file in files:
            began = time.perf_counter()
            content = file.read_bytes()
            read = time.perf_counter()
            decode(content)
            cuda.synchronize()
            ended = time.perf_counter()
            times["read_ms"].append(1e3 * (read - began))
            times["decode_ms"].append(1e3 * (ended - read))
        metrics = {name: summarise(samples) for name, samples in times.items()}
        metrics["mb"] = sum(file.stat().st_size for file in files) / len(files) / 1e6
        tags = {"experiment": "decode", "format": form} | tags
        return Run("10", f"decode: {form}", tags=tags, samples=times, metrics=metrics)


def trained_from(
    pictures: Pictures,
    ways: Mapping[str, tuple[str, Recipe]],
    steps: int,
    rounds: int | None = None,
) -> dict[str, Run]:
    """Name -> run of the recipe of each of `ways` on the pictures in its form, interleaved by
    rounds. The first is the base, and measured twice."""
    form = ""

    def dataset(model: nn.Module, recipe: Recipe) -> FormDataset:
        return pictures.dataset(form)  # of the trainer that is being built

    tags = {}
    with Benchmark(pictures.workload, warmup=1, dataset=dataset) as bench:
        for name, (form, recipe) in ways.items():
            bench.prepare({name: recipe})
            kept = {"format": "resized", "in_memory": True} if form == HELD else {"format": form}
            tags[name] = {"experiment": "image input"} | kept
            tags[name] |= {"workers": recipe.num_workers} if recipe.num_workers else {}
        recipes = {name: recipe for name, (_, recipe) in ways.items()}
        return bench.compare(recipes, steps, rounds, tags)
