"""One cuDNN in a process, whoever was first: Transformer Engine would bring the system's along."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

CHILD = """
import sys
import labutils
import torch
convolution, images = torch.nn.Conv2d(8, 8, 3).cuda(), torch.rand(1, 8, 9, 9, device="cuda")
if sys.argv[1] == "cudnn first":
    convolution(images)
import transformer_engine.pytorch
import peft
convolution(images)
with open("/proc/self/maps") as maps:
    folders = {line.split()[-1].rpartition("/")[0] for line in maps if "libcudnn" in line}
print(len(folders), *folders)
"""


@pytest.mark.parametrize("order", ["cudnn first", "transformer engine first"])
def test_all_parts_of_cudnn_come_from_one_folder(order):
    """Two versions don't link, or PyTorch computes with the older one: its attention falls back."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    command = [sys.executable, "-c", CHILD, order]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    count, *folders = ran.stdout.splitlines()[-1].split()
    assert count == "1", folders
