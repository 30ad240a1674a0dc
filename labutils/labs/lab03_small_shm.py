"""The script that lab 03 runs in a process with a /dev/shm of its own: plain PyTorch, to be read.

Twelve workers load batches of 3 MiB. First /dev/shm has the size that it was mounted with, then
1 GiB. After each of the two a line of JSON is printed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

SHM, BATCHES, TIMEOUT_S = "/dev/shm", 36, 5


class Images(Dataset):
    """Images of 512 x 512 in float32, which take no time to read."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 512, 512)


def load(workers: int) -> dict[str, float | str]:
    """How far a loader comes."""
    # torch.stack as the diffusers script has it. PyTorch's own collate function makes the batch in
    # shared memory, and its failure is raised in the training loop: no hang.
    loader = DataLoader(Images(), num_workers=workers, collate_fn=torch.stack, timeout=TIMEOUT_S)
    arrived, most, outcome = 0, 0, "ok"
    try:
        for _batch in loader:
            arrived += 1
            if arrived == 1:
                time.sleep(1)  # a first training step: workers run ahead
            most = max(most, shutil.disk_usage(SHM).used)
    except RuntimeError as error:
        outcome = "hung" if "timed out" in str(error) else f"failed: {error}"
    size = shutil.disk_usage(SHM).total
    sizes = {"shm_gb": size / 1e9, "peak_gb": most / 1e9}
    return {"outcome": outcome, "batches": arrived, "wanted": BATCHES} | sizes


if __name__ == "__main__":
    print(json.dumps(load(int(sys.argv[1]))), flush=True)
    subprocess.run(["mount", "-o", "remount,size=1g", SHM], check=True)  # the cure
    print(json.dumps(load(int(sys.argv[1]))), flush=True)
