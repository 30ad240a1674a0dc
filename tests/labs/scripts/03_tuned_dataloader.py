"""A DataLoader tuned by two measured times: read r, compute c, then r / c workers, rounded up."""

import math
import shutil
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

FILES, RESOLUTION, COMPUTE_S = 16, 128, 0.03


class Images(Dataset):
    """PNG files, made into tensors when somebody asks for one."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        image = image.resize((RESOLUTION, RESOLUTION), Image.Resampling.LANCZOS)
        time.sleep(0.02)  # a slow disk
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels / 127.5 - 1


def draw(count):
    chance = np.random.default_rng(0)
    for index in range(count):
        pixels = chance.integers(0, 256, (400, 400, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path := f"{index}.png")
        yield path


def epoch(loader):
    """Seconds of one epoch, and the sum of what it brought."""
    began, total = time.perf_counter(), 0.0
    for batch in loader:
        time.sleep(COMPUTE_S)  # the GPU's work
        total += batch.double().sum().item()
    return time.perf_counter() - began, total


if __name__ == "__main__":
    images = Images(list(draw(FILES)))
    began = time.perf_counter()
    for index in range(FILES):
        images[index]
    read_s = (time.perf_counter() - began) / FILES
    workers = math.ceil(read_s / COMPUTE_S)

    waiting = (2 * workers + 1) * 3 * RESOLUTION**2 * 4  # bytes in /dev/shm, prefetch factor 2
    assert waiting < shutil.disk_usage("/dev/shm").free

    plain = DataLoader(images)
    tuned = DataLoader(
        images, num_workers=workers, persistent_workers=True, pin_memory=torch.cuda.is_available()
    )
    epoch(tuned)  # here the workers start
    (plain_s, expected), (tuned_s, total) = epoch(plain), epoch(tuned)
    formula_s = FILES * max(COMPUTE_S, read_s / workers)
    print(f"r = {1e3 * read_s:.0f} ms, {workers} workers")
    print(f"plain {plain_s:.2f} s, tuned {tuned_s:.2f} s, formula {formula_s:.2f} s")
    assert math.isclose(total, expected), "the same examples"
    assert tuned_s < plain_s / 1.15, "and less waiting"
