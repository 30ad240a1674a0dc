"""A loop with Hugging Face's accelerate over PNG pictures that are decoded as they are needed.

accelerate launch accelerate_script.py --cpu
"""

import argparse
import io

import numpy
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, rows, side, shown):
        generator = numpy.random.default_rng(0)
        self.files = []
        for _ in range(32):
            file = io.BytesIO()
            Image.fromarray(generator.integers(0, 255, (side, side, 3), dtype=numpy.uint8)).save(
                file, "PNG"
            )
            self.files.append(file.getvalue())
        self.rows, self.shown = rows, shown

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        pixels = numpy.asarray(image.resize((self.shown, self.shown)), dtype=numpy.float32) / 255
        return {"pixels": torch.from_numpy(pixels).permute(2, 0, 1), "label": index % 10}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=options.accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(4096, side=256, shown=32), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == options.steps:
            break
    accelerator.print("the loop is done")


if __name__ == "__main__":
    main()
