"""What a training image costs by the form it is kept in: PNG, JPEG, WebP, or pixels in an array,
mapped or held in memory; and what that costs the step.

    files = pictures(workload, 32, "JPEG")           the same pictures in every form
    run = decoding("JPEG", files, decoded)           one thread, file to pixels

`FormDataset` is a class of this module, so that a DataLoader's workers find it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from labutils.data import generated_images
from labutils.data.file_cache import whole_file
from labutils.data.images import Preprocess
from labutils.data.tokenizers import clip_tokenizer
from labutils.profiling import cuda
from labutils.results.records import Run, summarise
from labutils.workloads import Workload

Kept = Sequence[Path] | np.ndarray
"""Files, or pixels: uint8 [n, r, r, 3]."""


def pictures(workload: Workload, count: int, form: str = "PNG") -> list[Path]:
    """`count` pictures as files of a form that Pillow writes, in the cache's folder."""
    folder = workload.cache_dir / "images" / f"drawn-v{generated_images.VERSION}-seed0"
    drawn = generated_images.draw_images(folder, count)
    files = [path.with_suffix(f".{form.lower()}") for path in drawn]
    for path, file in zip(drawn, files, strict=True):
        if not file.exists():
            with Image.open(path) as image, whole_file(file) as part, part.open("wb") as out:
                image.convert("RGB").save(out, form, quality=90)
    return files


def decoded(content: bytes) -> np.ndarray:
    """A file's bytes as uint8 [h, w, 3]."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def decoding(form: str, files: Sequence[Path], decode: Callable[[bytes], Any], **tags: Any) -> Run:
    """The run of files that are decoded one by one: `read_ms`, `decode_ms` and of it `cpu_ms`, the
    time that this process kept a CPU busy, and `mb` a file."""
    samples: dict[str, list[float]] = {"read_ms": [], "decode_ms": [], "cpu_ms": []}
    decode(files[0].read_bytes())
    for file in files:
        began = time.perf_counter()
        content = file.read_bytes()
        read, worked = time.perf_counter(), time.process_time()
        decode(content)
        cuda.synchronize()
        samples["cpu_ms"].append(1e3 * (time.process_time() - worked))
        samples["read_ms"].append(1e3 * (read - began))
        samples["decode_ms"].append(1e3 * (time.perf_counter() - read))
    metrics = {name: summarise(times) for name, times in samples.items()}
    metrics["mb"] = sum(file.stat().st_size for file in files) / len(files) / 1e6
    samples["round"] = list(range(len(files)))  # a file is compared with itself
    name = ", ".join([form, *tags]).replace("_", " ")
    tags = {"experiment": "decode", "format": form} | tags
    return Run("10", name, tags=tags, samples=samples, metrics=metrics)


class FormDataset(Dataset):
    """Training examples out of what is kept, {"pixel_values": float32 [3, r, r], "input_ids"}."""

    def __init__(self, kept: Kept, workload: Workload) -> None:
        tokenizer = clip_tokenizer(workload.weights)
        self.kept, self.preprocess = kept, Preprocess(tokenizer, workload.size.resolution)
        captions = [generated_images.caption(place) for place in range(len(kept))]
        self.token_ids = self.preprocess.token_ids(captions)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        one = self.kept[place]
        pixels = decoded(one.read_bytes()) if isinstance(one, Path) else one
        image = self.preprocess.pixels(Image.fromarray(pixels))
        return {"pixel_values": image, "input_ids": self.token_ids[place]}
