"""What a learner writes after lab 10: formats timed, a memory map, and a loop fed from either."""

import time
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

COUNT, SIDE = 8, 600


def decode(path):
    return np.asarray(Image.open(path).convert("RGB"))


def ms(function, *inputs):
    began = time.perf_counter()
    function(*inputs)
    return 1e3 * (time.perf_counter() - began)


class Pictures(Dataset):
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return COUNT

    def __getitem__(self, place):
        return torch.from_numpy(np.array(self.read(place))).permute(2, 0, 1) / 127.5 - 1


def epoch(dataset):
    time.sleep(0.005 * COUNT)  # the GPU's work
    return sum(batch.double().sum().item() for batch in DataLoader(dataset))


chance, pictures, took = np.random.default_rng(0), [], {}
for place in range(COUNT):  # smooth, under some grain, as photographs are
    coarse = Image.fromarray(chance.integers(3, 253, (9, 9, 3), dtype=np.uint8))
    grain = chance.integers(-3, 4, (SIDE, SIDE, 3))
    pictures.append((np.asarray(coarse.resize((SIDE, SIDE))) + grain).astype(np.uint8))
    for suffix in ("png", "jpg", "webp"):
        Image.fromarray(pictures[-1]).save(f"{place}.{suffix}", quality=90)
    assert (decode(f"{place}.png") == pictures[-1]).all()
for suffix in ("png", "jpg", "webp"):
    took[suffix] = median(ms(decode, f"{place}.{suffix}") for place in range(COUNT))
    print(f"{suffix}: {took[suffix]:.1f} ms to decode")
np.save("all.npy", np.stack(pictures))

files = Pictures(lambda place: decode(f"{place}.png"))
mapped = Pictures(np.load("all.npy", mmap_mode="r").__getitem__)
assert epoch(files) == epoch(mapped), "the same examples"
saved = median(ms(epoch, files) - ms(epoch, mapped) for _ in range(3))
print(f"the map saves {saved:.0f} ms an epoch; decoding takes {COUNT * took['png']:.0f}")
assert saved > 0.3 * COUNT * took["png"]
