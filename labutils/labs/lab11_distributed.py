"""Lab 11's trainings on several GPUs: which are launched, and how they compare.

A case is one kind of training: Stable Diffusion's LoRA or all of its UNet, or an 8 B model's LoRA.
One process does what each rank does: so N of them should take N times the examples in the same
time. Runs are told apart by their tags: workload, trained ("lora", "full"), strategy ("one
process", "apart", "ddp", "fsdp"), ranks, and what is changed of the plain strategy.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labutils.labs.ladders import A3_BASE
from labutils.profiling import cuda, ddp_model
from labutils.profiling.collectives import SAY_ALL, SIZES, Link, nccl_transports
from labutils.recipe import STOCK, Unavailable
from labutils.results.records import Run, Runs
from labutils.training.launch_worker import Task, Timed
from labutils.training.launcher import launch, rank_variables

LOOP = {"driver": "eager", "logging": "ring-buffer", "accumulation": 1}
SD_RECIPE = STOCK.but(
    precision="bf16", cache="latents+text", optimizer="adamw-fused", micro_batch=2, **LOOP
)
"""Lab 04's loop, eager, in BF16, from encoded examples: nothing but the UNet, and no file to wait
for. (Channels last would be faster, and `fully_shard` takes no such weights.)"""
SD_BATCH = {"tiny": (2, 2, 2), "small": (4, 4, 4), "full": (32, 24, 8)}
"""Its examples in a micro-batch: with LoRA, with all weights trained, and where a step has several.
With few, a step lasts as long as the host takes to launch it: on an H200 with less than 16."""
ROWS = {"shapes": "padded", "token_budget": 2048, "micro_batch": 2}
QWEN_RECIPE = A3_BASE.but(
    adapter="plain", layers="rewritten", loss="fused", non_blocking=True, **LOOP, **ROWS
)
"""Lab 07's plain loop on rows of one length: else ranks would wait for the longest."""


def plan(opened: Mapping[str, str], ranks: int, steps: int) -> list[Task]:
    """What is launched: the link, then each case by one process, by each rank for itself and by all
    of them, in turns. `opened`: what `open_workload` is told in the ranks, but for the name.

    The whole UNet, whose messages are the largest, is also tried with several micro-batches a rank
    that are sent each or once, in a comparison of its own. At tiny there is Stable Diffusion only.
    """
    scale, together = opened["scale"], {"ranks": ranks, "strategy": "ddp"}
    lora, full, few = (SD_RECIPE.but(micro_batch=batch) for batch in SD_BATCH[scale])
    full, few = full.but(adapter="none"), few.but(adapter="none")
    share = {"accumulation": ranks}
    by = {
        "one process": ("one", {}, {"ranks": 1, "strategy": "one process"}),
        "each for itself": ("each", {}, {"ranks": ranks, "strategy": "apart"}),
        "DDP": ("all", share, together),
        "FSDP": ("all", share | {"parallel": "fsdp"}, together | {"strategy": "fsdp"}),
    }
    several = {"accumulation": ranks * (2 if scale == "tiny" else 4)}
    sent = {
        "sent each": ("all", several | {"synchronise": "each"}, together | {"sync": "sync each"}),
        "no_sync": ("all", several, together | {"sync": "no_sync"}),
    }
    sizes = SIZES[::3] if scale == "tiny" else SIZES
    tasks = [Task("all-reduce", "all-reduce", sizes=sizes, tags={"experiment": "all-reduce"})]
    cases = [
        ("sd15-lora", "lora", lora, by),
        ("sd15-lora", "full", full, by),
        ("sd15-lora", "full", few, sent),
    ]
    if scale != "tiny":  # without FSDP, which saves little where most weights are frozen
        cases.append(("qwen3-lora-long", "lora", QWEN_RECIPE, dict(list(by.items())[:3])))
    for name, trained, recipe, ways in cases:
        tags = {"experiment": "training", "workload": name, "trained": trained}
        timed = [
            asdict(Timed(f"{name}, {trained}: {what}", who, recipe.but(**but).as_dict(), tags | of))
            for what, (who, but, of) in ways.items()
        ]
        task = Task("train", f"{name}, {trained}", {"name": name, **opened}, timed=timed)
        tasks.append(replace(task, steps=steps, warmup=1 if scale == "tiny" else 2))
    return tasks


def measured(lab: Any, device: str, ranks: int, steps: int, into: list[Run]) -> None:
    """Launch the plan. Each run is kept, and added to `into`, as soon as it is there. Raises
    `Unavailable` where there are too few GPUs, and `RuntimeError` where a rank fails.
    """
    if device == "cpu" and lab.scale != "tiny":
        raise Unavailable(f"it takes two GPUs, and here are {cuda.count()}; try --scale tiny")
    opened = {name: str(getattr(lab, name)) for name in ("scale", "weights", "data", "cache_dir")}
    timeout_s = 7200.0 if "hub" in (lab.weights, lab.data) else 900.0  # downloads are in it

    def keep(run: Run) -> None:
        into.append(lab.keep(run, lane="same work"))

    launch(plan(opened, ranks, steps), ranks, device, timeout_s, each=keep).or_raise()


# ------------------------------------------------------------------------------ a learner's script

IMPORTS = """import os, signal, time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

os.chdir(os.path.dirname(__file__))
"""
LAST_LINES = """device = join()
results = [entry(device) for entry in ({},)]
if dist.get_rank() == 0:
    torch.save(results, "results.pt")
dist.destroy_process_group()
if device == "cpu":
    os._exit(0)
"""
"""How a script ends. On a CPU it leaves out Python's own end, in which a thread of gloo's may let
go of a tensor: PyTorch 2.13 then aborts the process."""
TOLD = re.compile(r"^ *(?:rank|exitcode) +: .*|^(?:\[rank\d+\]: )?\w+Error: .*", re.MULTILINE)
"""The lines of torchrun's account that say which rank ended how, and what it raised."""


def torchrun(
    folder: Path, helpers: Sequence[Callable], entries: Sequence[Callable], ranks: int, device: str
) -> list[Any]:
    """What each of `entries` returns on rank 0 of a script, as tensors, numbers and collections.

    The script has the sources of `helpers`, one of which is `join`, and of `entries`, which take
    the device that `join` returns. It lies in `folder` and is started by torchrun. Raises
    `RuntimeError` with what torchrun says of the ranks that failed.
    """
    last = LAST_LINES.format(", ".join(entry.__name__ for entry in entries))
    parts = [IMPORTS, *map(inspect.getsource, (*helpers, *entries)), last]
    script = folder / "script.py"
    script.write_text("\n\n".join(parts), encoding="utf-8")
    how = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    variables = os.environ | rank_variables(ranks, device)
    ended = subprocess.run(
        [sys.executable, "-m", *how], env=variables, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        lines = [line.strip()[:200] for line in TOLD.findall(ended.stderr)]
        raise RuntimeError("\n".join(dict.fromkeys(lines)) or ended.stderr[-500:])
    return torch.load(folder / "results.pt")


# ------------------------------------------------------------------------------ what it comes to

PLAIN = {"sync": False, "again": False}
"""Tags that a plain run doesn't have."""


def against_prediction(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a case: one process's step, that of each rank by itself beside the others, how much
    of DDP's messages nothing hides, the step predicted from these, and DDP's own.
    """
    known, rows = Runs(runs), []
    link = known.one(experiment="all-reduce")
    for ddp in known.select(experiment="training", strategy="ddp", **PLAIN) if link else ():
        case = {key: ddp.tags[key] for key in ("experiment", "workload", "trained")}
        one = known.one(**case, strategy="one process", ranks=1)
        if one is None:
            continue
        apart = known.one(**case, strategy="apart", ranks=ddp.tags["ranks"])
        found, beside = ddp_model.ddp(one, Link.of(link.samples)), apart and apart.metric("step_ms")
        row = {
            "training": f"{ddp.workload}, {ddp.tags['trained']}",
            "gradients, MB": one.metrics["gradient_mb"],
            "exposed, ms": found.exposed_ms,
            "one process, ms": found.compute_ms,
            "predicted, ms": found.step_ms,
            "each for itself, ms": beside,
            "predicted from that, ms": beside and beside + found.exposed_ms,
            "DDP, ms": ddp.metric("step_ms"),
            "efficiency, %": 100 * ddp_model.efficiency(one, ddp),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def truths(runs: Iterable[Run]) -> dict[str, float | None]:
    """Topic of a prediction -> what was measured; None where it wasn't."""
    known = Runs(run for run in runs if run.ok)
    lora, full = ({"workload": "sd15-lora", "trained": of} | PLAIN for of in ("lora", "full"))

    def metric(name: str, **tags: Any) -> float | None:
        run = known.one(**tags)
        return run.metric(name) if run else None

    one, two = (known.one(**lora, strategy=by) for by in ("one process", "ddp"))
    efficiency = ddp_model.efficiency(one, two) if one and two else None
    peak = metric("peak_allocated_gb", **full, strategy="fsdp")
    many = {"experiment": "taken apart", "images": 24}
    alone, coupled = (
        metric("step_ms", **many, way=way) for way in ("each for itself", "one number a step")
    )
    usual = metric("largest_ms", settings="NCCL_DEBUG=INFO")
    forbidden = metric("largest_ms", settings="NCCL_P2P_DISABLE=1")
    return {
        "bus bandwidth of a large all-reduce": metric("bus_gb_per_s", experiment="all-reduce"),
        "efficiency of DDP for LoRA": efficiency and 100 * efficiency,
        "one number a step adds": coupled and coupled - alone,
        "FSDP's peak memory, all weights of the UNet": peak,
        "64 MiB without P2P, slower by": forbidden / usual if usual and forbidden else None,
    }


# ------------------------------------------------------------------------------ NCCL's variables


def nccl_trial(ranks: int, words: str) -> Run:
    """The all-reduce's times with these variables ("NCCL_DEBUG=INFO"), in a launch of its own: NCCL
    reads them once. `metrics` holds what it says of its way as well.
    """
    tags = {"experiment": "nccl", "settings": words}
    task = Task("all-reduce", f"nccl {words}", sizes=(2**10, 2**20, 2**26), tags=tags)
    variables = SAY_ALL | dict(word.split("=") for word in words.split())
    ended = launch([task], ranks, "cuda", 150, variables)
    status = f"error: {' '.join(ended.message.split())}"
    run = ended.runs.get(task.name) or Run("11", task.name, status=status, tags=tags)
    run.metrics["transport"] = ", ".join(nccl_transports(ended.log))
    return run
