"""What a learner writes after lab 10: formats timed, a memory map, and a loop fed from either."""

import io
import time
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

COUNT, SIDE, COMPUTE_S = 8, 600, 0.005


def ms(function, *inputs):
    began = time.perf_counter()
    function(*inputs)
    return 1e3 * (time.perf_counter() - began)


def draw(chance):
    """Smooth, under some grain, as a photograph is."""
    coarse = chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((SIDE, SIDE)), np.int16)
    grain = chance.integers(-3, 4, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def decode(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


class Files(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def pixels(self, place):
        with open(self.paths[place], "rb") as file:
            return decode(file.read())

    def __getitem__(self, place):
        return torch.from_numpy(np.array(self.pixels(place))).permute(2, 0, 1) / 127.5 - 1


class Mapped(Files):
    def __init__(self, path):
        self.map = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.map)

    def pixels(self, place):
        return self.map[place]


def epoch(dataset):
    """Milliseconds of an epoch, and the sum of what it brought."""
    began, total = time.perf_counter(), 0.0
    for batch in DataLoader(dataset):
        time.sleep(COMPUTE_S)  # the GPU's work
        total += batch.double().sum().item()
    return 1e3 * (time.perf_counter() - began), total


if __name__ == "__main__":
    images = [draw(np.random.default_rng(seed)) for seed in range(COUNT)]
    took, paths = {}, {}
    for suffix, options in {"png": {}, "jpg": {"quality": 90}, "webp": {"quality": 90}}.items():
        paths[suffix] = [f"{place}.{suffix}" for place in range(COUNT)]
        for image, path in zip(images, paths[suffix], strict=True):
            image.save(path, **options)
        contents = [open(path, "rb").read() for path in paths[suffix]]  # noqa: SIM115
        took[suffix] = median(ms(decode, content) for content in contents)
        print(f"{suffix}: {len(contents[0]) / 1e3:.0f} kB, {took[suffix]:.1f} ms to decode")
    assert all((decode(open(p, "rb").read()) == np.asarray(i)).all()  # noqa: SIM115
               for p, i in zip(paths["png"], images, strict=True))  # fmt: skip

    pixels = np.lib.format.open_memmap("all.npy", "w+", np.uint8, (COUNT, SIDE, SIDE, 3))
    for row, image in zip(pixels, images, strict=True):
        row[:] = image
    pixels.flush()

    files, mapped = Files(paths["png"]), Mapped("all.npy")
    epoch(files), epoch(mapped)  # warms up
    turns = [(epoch(files), epoch(mapped)) for _ in range(3)]
    assert all(a[1] == b[1] for a, b in turns), "the same examples"
    saved = median(a[0] - b[0] for a, b in turns)
    print(f"the map saves {saved:.0f} ms an epoch; decoding takes {COUNT * took['png']:.0f}")
    assert 0.5 * COUNT * took["png"] < saved < 2 * COUNT * took["png"]
