"""A plain PyTorch loop over images, as one finds them: a dataset, a DataLoader, a network, an
optimizer.

python plain_loop.py --steps 100 --device cpu
"""

import argparse
import csv
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Random pictures with a label each; reading one takes `decode_ms`."""

    def __init__(self, rows, width, decode_ms):
        self.rows, self.width, self.decode_ms = rows, width, decode_ms

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        time.sleep(self.decode_ms / 1e3)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.width, generator=generator), index % 10


class Scales(nn.Module):
    """A long chain of operations that each do next to nothing."""

    def __init__(self, width, length):
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(length))

    def forward(self, x):
        for factor in self.factors:
            x = torch.tanh(x * factor + 0.1) - 0.1
        return x


def network(options):
    if options.tiny_kernels:
        body = [nn.Linear(options.width, 64), Scales(64, 100)]
        return nn.Sequential(*body, nn.Linear(64, 10))
    layers = [nn.Linear(options.width, options.hidden), nn.ReLU()]
    for _ in range(options.depth):
        layers += [nn.Linear(options.hidden, options.hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(options.hidden, 10))


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--decode-ms", type=float, default=0.0)
    parser.add_argument("--keep-batches", action="store_true")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--tiny-kernels", action="store_true")
    parser.add_argument("--item-each-parameter", action="store_true")
    parser.add_argument("--log", choices=["seldom", "flush"], default="seldom")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main():
    options = parsed()
    torch.manual_seed(0)
    if options.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    model = network(options).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pictures = Pictures(1024, options.width, options.decode_ms)
    loader = DataLoader(
        pictures, options.batch, shuffle=True, drop_last=True, pin_memory=options.pin
    )
    loader = list(loader) if options.keep_batches else loader
    folder = tempfile.mkdtemp()
    log = open(os.path.join(folder, "log.csv"), "w", newline="")  # noqa: SIM115
    writer = csv.writer(log)
    step = 0
    while step < options.steps:
        for pictures, labels in loader:
            pictures = pictures.to(options.device, non_blocking=options.pin)
            labels = labels.to(options.device, non_blocking=options.pin)
            with torch.autocast(
                options.device, torch.bfloat16, enabled=options.precision == "bf16"
            ):
                loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            if options.item_each_parameter:
                norms = [parameter.grad.norm().item() for parameter in model.parameters()]
                assert all(norm >= 0 for norm in norms)
            optimizer.step()
            optimizer.zero_grad()
            if options.log == "flush":
                started = time.perf_counter()
                while time.perf_counter() - started < 0.004:  # as slow on a fast disk
                    writer.writerow([step, time.time(), "x" * 200])
                    log.flush()
                    os.fsync(log.fileno())
            elif step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            step += 1
            if step == options.steps:
                break
    print("the script's own last line")


if __name__ == "__main__":
    main()
