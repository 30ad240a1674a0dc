"""An image classifier that decodes its photographs in the training process.

python classifier.py BATCH SIDE
"""

import sys
import tempfile
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import ResNetConfig, ResNetForImageClassification


class Photographs(Dataset):
    def __init__(self, folder, side):
        self.side, noise = side, numpy.random.default_rng(0)
        self.files = [Path(folder) / f"{number}.jpg" for number in range(16)]
        for file in self.files:
            pixels = noise.integers(0, 256, (60, 80, 3), dtype="uint8")
            Image.fromarray(pixels).resize((800, 600)).save(file, quality=90)

    def __len__(self):
        return 8192

    def __getitem__(self, index):
        image = Image.open(self.files[index % len(self.files)]).convert("RGB")
        pixels = numpy.array(image.resize((self.side, self.side)))
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, index % 10


def main():
    batch, side = map(int, sys.argv[1:])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        loader = DataLoader(Photographs(folder, side), batch_size=batch, shuffle=True)
        for step, (images, labels) in zip(range(120), loader, strict=False):
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images).logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
