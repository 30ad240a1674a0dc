"""The other side of test_distributed.py: what each rank does, and what one process does that is
held against it.

python -m torch.distributed.run --standalone --nproc-per-node=2 ranks_at_work.py FOLDER
    every case of CASES on 2 ranks; rank 0 leaves what it saw in FOLDER/<case>.pt
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from recipes_at_work import PLAIN, perturb, watching
from torch import Tensor, nn

from labutils.labs.ladders import A3_BASE
from labutils.layers.lora import lora_layers
from labutils.recipe import Recipe
from labutils.training import Trainer, distributed
from labutils.training.launch_worker import encoded_once
from labutils.workloads import open_workload

STEPS = 2
SD = PLAIN.but(cache="latents+text", logging="ring-buffer", micro_batch=2, accumulation=2)
QWEN = A3_BASE.but(precision="fp32", driver="eager", adapter="plain", logging="ring-buffer")
QWEN = QWEN.but(layers="rewritten", loss="fused", micro_batch=2, accumulation=2, token_budget=1024)
WHOLE = {"adapter": "none"}
FSDP = {"parallel": "fsdp"}
FOUR = {"accumulation": 4}
CASES: dict[str, tuple[str, Recipe]] = {
    "ddp": ("sd15-lora", SD),
    "ddp, read at once": ("sd15-lora", SD.but(logging="synchronous")),
    "ddp, no_sync": ("sd15-lora", SD.but(**FOUR)),
    "ddp, each": ("sd15-lora", SD.but(synchronise="each", **FOUR)),
    "ddp, buckets": ("sd15-lora", SD.but(bucket_cap_mb=1, **WHOLE)),
    "ddp, workers": ("sd15-lora", SD.but(cache="nothing", num_workers=1, persistent_workers=True)),
    "ddp, folded": ("sd15-lora", SD.but(adapter="folded")),
    "fsdp": ("sd15-lora", SD.but(**FSDP)),
    "fsdp, no_sync": ("sd15-lora", SD.but(**FSDP, **FOUR)),
    "whole, fsdp": ("sd15-lora", SD.but(**WHOLE, **FSDP)),
    "qwen": ("qwen3-lora-short", QWEN),
    "qwen, fsdp": ("qwen3-lora-short", QWEN.but(**FSDP)),
    "qwen, packed": ("qwen3-lora-short", QWEN.but(shapes="packed", micro_batch=1)),
}
EPOCH = 10
"""Examples of an epoch: five micro-batches of two, so that ranks and steps cross its end in the
midst.
"""


def opened(name: str) -> Any:
    """The workload at tiny, with short epochs."""
    workload = open_workload(name, scale="tiny", device="cpu")
    workload.epoch_length = EPOCH
    return workload


def perturbed(model: nn.Module) -> None:
    """Adapters that aren't zero: where B is, A has no gradient."""
    if lora_layers(model):
        perturb(model)


def train(
    workload: Any, recipe: Recipe, steps: int = STEPS, seen: list | None = None
) -> dict[str, Any]:
    """What came of `steps` optimizer steps: gradients of each, losses, weights before and after.
    seen: is filled with the micro-batches and their random numbers."""
    gradients: list[list[Tensor]] = []
    keep = lambda parameters: gradients.append(copied([p.grad for p in parameters]))
    with (
        watching(workload, keep, [] if seen is None else seen),
        Trainer(workload, recipe, on_model=perturbed, dataset=encoded_once(workload)) as running,
    ):
        before = copied(running.parameters)
        running.run(steps)
        running.driver.log.flush()
        after = copied(running.parameters)
        return {
            "gradients": gradients,
            "losses": list(running.losses),
            "before": before,
            "after": after,
        }


def copied(parameters: list[Tensor]) -> list[Tensor]:
    """Whole, where they are cut among ranks."""
    return [tensor.clone() for tensor in distributed.whole_parameters(parameters)]


def break_off_twice(workload: Any, folder: Path) -> None:
    """Two steps and a checkpoint, and both once more from there: weights are cut all the time."""
    for steps in (2, 4):
        hooks = {"on_model": perturbed, "dataset": encoded_once(workload)}
        with Trainer(workload, SD.but(**FSDP), folder, resume=steps > 2, **hooks) as running:
            running.run(steps, checkpoint_every=2)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    me = distributed.here()
    workloads: dict[str, Any] = {}
    for case, (name, recipe) in CASES.items():
        workload = workloads.setdefault(name, opened(name))
        found = train(workload, recipe)
        if me.rank == 0:
            torch.save(found, folder / f"{case}.pt")
    break_off_twice(workloads["sd15-lora"], folder)
    distributed.leave()
    os._exit(0)  # as `launch_worker` does


if __name__ == "__main__":
    main(Path(sys.argv[1]))
