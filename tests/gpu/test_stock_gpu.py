"""The stock recipe is honest: as fast and as slow as the public script.

tests/scripts/lora_images.py is that script. Here it has the networks and the pictures of the stock
recipe (whose transforms are torchvision's bit by bit: test_data), and no code of labutils.training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diagnosis_table import CLOCK

from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.workloads import open_workload

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "lora_images.py"
STEPS = 12
TOLERANCE = 0.15
SAME_WORK = {
    "import argparse\n": """
import argparse
from labutils.data.images import Preprocess, captioned_images, collate
from labutils.data.tokenizers import clip_tokenizer
from labutils.workloads.stable_diffusion import SIZES, _networks
""",
    "    frozen = networks(options.tiny)\n": """
    made = _networks(SIZES["full"], torch.device("cuda"))
    frozen = made.unet, made.vae, made.text_encoder
""",
    "pictures = Pictures(folder, 32 if options.tiny else 512)": (
        "pictures = captioned_images(CACHE, 256).with_transform(Preprocess(clip_tokenizer(), 512))"
    ),
    "num_workers=0": "num_workers=WORKERS, collate_fn=collate",
    'batch["pixels"]': 'batch["pixel_values"]',
    'batch["ids"]': 'batch["input_ids"]',
    # The public script reads every micro-step's loss twice, for its mean and for its bar.
    "accelerator.backward(loss)": """accelerator.gather(loss.repeat(1)).mean().item()
                accelerator.backward(loss)""",
    "            done +=": """            loss.item()
            done +=""",
}
"""Text of the script -> what stands there instead."""


def script_ms(workers: int, cache: Path, path: Path) -> list[float]:
    """Milliseconds of the script's steps, in a process of its own."""
    text = SCRIPT.read_text("utf-8")
    for was, now in SAME_WORK.items():
        assert text.count(was) == 1, was
        text = text.replace(was, now)
    path.write_text(text.replace("WORKERS", str(workers)).replace("CACHE", repr(str(cache))))
    warmup = warm_up(workers)
    command = [sys.executable, "-c", CLOCK, str(warmup + STEPS + 1), str(path)]
    said = subprocess.check_output(command, text=True)
    marks = json.loads(said.splitlines()[-1])[warmup:]
    return [late - early for early, late in pairwise(marks)]


def stock_ms(trainer: Trainer, workers: int) -> list[float]:
    """Milliseconds of the stock recipe's steps."""
    marks = []
    for _ in range(warm_up(workers) + STEPS + 1):
        trainer.step()
        torch.cuda.synchronize()
        marks.append(1e3 * time.perf_counter())
    return [late - early for early, late in pairwise(marks[-STEPS - 1 :])]


def warm_up(workers: int) -> int:
    """Steps until kernels are chosen and what the workers held ready is used up."""
    return 3 + 2 * workers // STOCK.accumulation


@pytest.mark.parametrize("workers", [0, 3])
def test_the_stock_recipe_takes_as_long_as_the_script(workers, tmp_path):
    if torch.cuda.get_device_properties(0).total_memory < 20e9:
        pytest.skip("two models of full size don't fit this GPU")
    workload = open_workload("sd15-lora", scale="full", device="cuda")
    script = script_ms(workers, workload.cache_dir, tmp_path / "script.py")
    with Trainer(workload, STOCK.but(num_workers=workers)) as trainer:
        stock = stock_ms(trainer, workers)
    medians = {"script": statistics.median(script), "stock": statistics.median(stock)}
    print(f"{workers} workers:", {name: f"{ms:.0f} ms" for name, ms in medians.items()})
    assert medians["stock"] == pytest.approx(medians["script"], rel=TOLERANCE), medians
