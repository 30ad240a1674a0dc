"""What a learner writes after lab 10: formats timed, a memory map, and a loop fed from either."""

import io
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

COUNT, SIDE = 8, 600


def draw(seed):
    """Smooth, under some grain, as a photograph is."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((SIDE, SIDE))) + chance.integers(-3, 4, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def decode(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


class Pictures(Dataset):
    """Out of PNG files, or out of a memory map."""

    def __init__(self, mapped=None):
        self.map = None if mapped is None else np.load(mapped, mmap_mode="r")

    def __len__(self):
        return COUNT

    def __getitem__(self, place):
        content = Path(f"{place}.png").read_bytes() if self.map is None else None
        pixels = decode(content) if content else self.map[place]
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1) / 127.5 - 1


def epoch(dataset):
    """Milliseconds of an epoch, and the sum of what it brought."""
    began, total = time.perf_counter(), 0.0
    for batch in DataLoader(dataset):
        time.sleep(0.005)  # the GPU's work
        total += batch.double().sum().item()
    return 1e3 * (time.perf_counter() - began), total


if __name__ == "__main__":
    images, took = [draw(seed) for seed in range(COUNT)], {}
    for suffix in ("png", "jpg", "webp"):
        times = []
        for place, image in enumerate(images):
            image.save(path := Path(f"{place}.{suffix}"), quality=90)
            content, began = path.read_bytes(), time.perf_counter()
            pixels = decode(content)
            times.append(1e3 * (time.perf_counter() - began))
            assert suffix != "png" or (pixels == np.asarray(image)).all()
        took[suffix] = median(times)
        print(f"{suffix}: {len(content) / 1e3:.0f} kB, {took[suffix]:.1f} ms to decode")
    np.save("all.npy", np.stack(images))

    files, mapped = Pictures(), Pictures("all.npy")
    epoch(files), epoch(mapped)  # warms up
    turns = [(epoch(files), epoch(mapped)) for _ in range(3)]
    assert all(a[1] == b[1] for a, b in turns), "the same examples"
    saved, decoding = median(a[0] - b[0] for a, b in turns), COUNT * took["png"]
    print(f"the map saves {saved:.0f} ms an epoch; decoding takes {decoding:.0f}")
    assert saved > 0.3 * decoding
