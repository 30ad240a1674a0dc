"""A loop with Hugging Face's accelerate over pictures that are read as they are needed.

It imports in the order of diffusers' public train_text_to_image_lora.py, PyTorch after all others.

accelerate launch accelerate_script.py --cpu
"""

import argparse
import time

# isort: off
import datasets
from accelerate import Accelerator
from accelerate.logging import get_logger
import transformers
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


logger = get_logger(__name__)
datasets.utils.logging.set_verbosity_error()
transformers.utils.logging.set_verbosity_error()


class Pictures(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.005)
        return {"pixels": torch.full((3, 32, 32), index / 4096), "label": index % 10}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=options.accumulation)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    model(torch.zeros(1, 3, 32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == 60:
            break


if __name__ == "__main__":
    main()
