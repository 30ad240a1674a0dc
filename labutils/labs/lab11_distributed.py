"""Lab 11's trainings on several GPUs: which are launched, and how they compare.

A case is one kind of training: Stable Diffusion's LoRA or all of its UNet, an 8 B model's LoRA or a
small one whole. One process does what each rank does: so N of them should take N times the examples
in the same time. Runs are told apart by their tags: workload, trained ("lora", "full"), strategy
("one process", "apart", "ddp", "fsdp"), ranks, and what is changed of the plain strategy.
"""

from __future__ import annotations

import inspect
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labutils.labs.ladders import A3_BASE
from labutils.profiling import cuda, ddp_model
from labutils.profiling.collectives import SAY_ALL, SIZES, Link, read_nccl_log
from labutils.recipe import STOCK, Recipe, Unavailable
from labutils.results.records import Run, Runs
from labutils.training.launch_worker import Task, Timed
from labutils.training.launcher import launch, rank_variables

SD_RECIPE = STOCK.but(
    driver="eager",
    precision="bf16",
    cache="latents+text",
    logging="ring-buffer",
    optimizer="adamw-fused",
    accumulation=1,
)
"""Lab 04's loop, eager, in BF16, from encoded examples: nothing but the UNet, and no file to wait
for. (Channels last would be faster, and `fully_shard` takes no such weights.)"""
SD_BATCH = {"tiny": 2, "small": 4, "full": 16}
"""Its examples in a micro-batch. With few, a step lasts as long as the host takes to launch it."""
WHOLE_BATCH = SD_BATCH | {"full": 8}
"""The same where all weights are trained. With many, what is sharded would be lost among
activations."""
QWEN_RECIPE = A3_BASE.but(
    driver="eager",
    adapter="plain",
    logging="ring-buffer",
    non_blocking=True,
    layers="rewritten",
    loss="fused",
    shapes="padded",
    token_budget=2048,
    micro_batch=2,
    accumulation=1,
)
"""Lab 07's plain loop on rows of one length: else ranks would wait for the longest."""
QWEN_FULL_RECIPE = QWEN_RECIPE.but(adapter="none", layers="published", loss="logits")
ACCUMULATED = 4
"""Micro-batches that a rank accumulates in the runs about `no_sync`."""
TRACED = 2
"""Optimizer steps in a trace: reading one takes a second or two."""


@dataclass(frozen=True)
class Case:
    """One kind of training: its title, what `open_workload` is told in the ranks, the recipe of one
    rank's share, and whether all its weights are trained."""

    title: str
    opened: dict[str, str]
    recipe: Recipe
    trained: str

    @property
    def tags(self) -> dict[str, Any]:
        workload = self.opened["name"]
        return {"experiment": "training", "workload": workload, "trained": self.trained}

    def timed(self, what: str, by: str, recipe: Recipe, **tags: Any) -> dict[str, Any]:
        """What a task is told of one of this case's runs."""
        return asdict(Timed(f"{self.title}: {what}", by, recipe.as_dict(), self.tags | tags))


def cases(lab: Any) -> list[Case]:
    """The lab's cases at its scale: at tiny, where each takes long to build, Stable Diffusion's; at
    small, where 24 GB must hold a case's trainers side by side, all but the largest."""

    def opened(name: str, scale: str) -> dict[str, str]:
        sources = {"weights": lab.weights, "data": lab.data, "cache_dir": str(lab.cache_dir)}
        return {"name": name, "scale": scale} | sources

    sd, qwen = opened("sd15-lora", lab.scale), opened("qwen3-lora-long", lab.scale)
    lora = SD_RECIPE.but(micro_batch=SD_BATCH[lab.scale])
    whole = SD_RECIPE.but(adapter="none", micro_batch=WHOLE_BATCH[lab.scale])
    all_cases = [
        Case("SD 1.5, LoRA", sd, lora, "lora"),
        Case("SD 1.5, whole UNet", sd, whole, "full"),
        Case("Qwen3, LoRA", qwen, QWEN_RECIPE, "lora"),
        Case("small Qwen3, whole", qwen | {"scale": "small"}, QWEN_FULL_RECIPE, "full"),
    ]
    return all_cases[: {"tiny": 2, "small": 3}.get(lab.scale)]


def plan(chosen: Sequence[Case], ranks: int, steps: int, tiny: bool) -> list[Task]:
    """What is launched: the link, then each case by one process, by each rank for itself and by all
    of them, in turns.

    The whole UNet, whose messages are the largest, is also tried with small buckets and, in a
    comparison of its own, with four micro-batches a rank that are sent each or once.
    """
    sizes = SIZES[::3] if tiny else SIZES
    tasks = [Task("all-reduce", "all-reduce", sizes=sizes, tags={"experiment": "all-reduce"})]
    options = {"steps": steps, "warmup": 1 if tiny else 2}
    ddp = {"strategy": "ddp", "ranks": ranks}
    for case in chosen:
        shared = case.recipe.but(accumulation=ranks)
        largest = case.opened["name"] == "sd15-lora" and case.trained == "full"
        timed = [
            case.timed("one process", "one", case.recipe, strategy="one process", ranks=1),
            case.timed("each for itself", "each", case.recipe, strategy="apart", ranks=ranks),
            case.timed("DDP", "all", shared, **ddp),
        ]
        if largest:
            small = shared.but(bucket_cap_mb=1)
            timed.append(case.timed("DDP, buckets of 1 MiB", "all", small, **ddp, bucket_mb=1))
        if largest or not tiny:
            cut = shared.but(parallel="fsdp")
            timed.append(case.timed("FSDP", "all", cut, strategy="fsdp", ranks=ranks))
        traced = 0 if tiny else TRACED
        tasks.append(Task("train", case.title, case.opened, timed=timed, traced=traced, **options))
        if largest:
            several = case.recipe.but(accumulation=ranks * (2 if tiny else ACCUMULATED))
            each = several.but(synchronise="each")
            timed = [
                case.timed("sent each", "all", each, **ddp, sync="sync each"),
                case.timed("no_sync", "all", several, **ddp, sync="no_sync"),
            ]
            tasks.append(Task("train", "no_sync", case.opened, timed=timed, **options))
    return tasks


TIMEOUT_S = {"random": 900.0, "hub": 7200.0}
"""How long a launch may take, by where weights or data are from: the hub's are downloaded in it."""


def measured(lab: Any, device: str, ranks: int, steps: int, into: list[Run]) -> None:
    """Launch the plan. Each run is kept, and added to `into`, as soon as it is there. Raises
    `Unavailable` where there are too few GPUs, and `RuntimeError` where a rank fails.
    """
    if device == "cpu" and lab.scale != "tiny":
        raise Unavailable(f"it takes two GPUs, and here are {cuda.count()}; try --scale tiny")
    tasks = plan(cases(lab), ranks, steps, lab.scale == "tiny")
    timeout_s = TIMEOUT_S["hub" if "hub" in (lab.weights, lab.data) else "random"]

    def keep(run: Run) -> None:
        into.append(lab.keep(run, lane="same work"))

    launch(tasks, ranks, device, timeout_s, each=keep).or_raise()


# ------------------------------------------------------------------------------ a learner's script

IMPORTS = """import os
import signal
import time
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
"""


def torchrun(
    folder: Path, helpers: Sequence[Callable], entries: Sequence[Callable], ranks: int, device: str
) -> list[Any]:
    """What each of `entries` returns on rank 0 of a script, as tensors, numbers and collections.

    The script has the sources of `helpers`, one of which is `join`, and of `entries`, which take
    the device that `join` returns. It lies in `folder` and is started by torchrun. Raises
    `RuntimeError` with the exit codes and the last words of ranks that failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    last = LAST_LINES.format(", ".join(entry.__name__ for entry in entries))
    parts = [IMPORTS, *map(inspect.getsource, (*helpers, *entries)), last]
    script, logs = folder / "script.py", Path(tempfile.mkdtemp(prefix="logs-", dir=folder))
    script.write_text("\n\n".join(parts), encoding="utf-8")
    how = ["--standalone", f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={logs}"]
    settings = [f"{name}={value}" for name, value in rank_variables(ranks, device).items()]
    command = [*how, "--no-python", "env", *settings, sys.executable, str(script)]
    for name in ("torch.distributed", "torch.distributed.run"):  # what is raised says it
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with ThreadPoolExecutor(1) as pool:  # in the main thread it would take the kernel's signals
        try:
            pool.submit(main, command).result()
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            words = [f"Exit codes of the ranks that failed: {codes}."]
            for path in sorted(logs.rglob("stderr.log")):
                words += path.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            raise RuntimeError("\n".join(word[:200] for word in words)) from None
    return torch.load(folder / "results.pt")


def check_by_hand(by_hand: Callable, judged: Callable[[], list]) -> str:
    """Whether `by_hand`, on several ranks, leaves the whole batch's gradients with one message.

    judged: starts the ranks; one (messages, share by which a gradient is off).
    """
    if "all_reduce" not in inspect.getsource(by_hand):
        return "Exercise 4: no answer yet. It takes backward passes, and one dist.all_reduce."
    try:
        ((messages, off),) = judged()
    except RuntimeError as error:
        return f"Exercise 4: not yet. {error}"
    if messages == 1 and off < 1e-3:
        return "Exercise 4: right. The whole batch's gradients, in one message. DDP sends parts."
    return f"Exercise 4: not yet. {messages} messages, and a gradient is {off:.0%} off."


# ------------------------------------------------------------------------------ what it comes to

CHANGED = ("sync", "bucket_mb", "bucket_view", "rows", "same_batch", "again")
PLAIN = dict.fromkeys(CHANGED, False)
"""Tags that a plain run doesn't have."""


def against_prediction(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a case: one process's step, that of each rank by itself beside the others, what DDP
    has to send and how much of that nothing hides, the step predicted from these, and DDP's own.
    """
    known, rows = Runs(runs), []
    link = known.one(experiment="all-reduce")
    for ddp in known.select(experiment="training", strategy="ddp", **PLAIN) if link else ():
        case = {key: ddp.tags[key] for key in ("experiment", "workload", "trained")}
        ranks = ddp.tags["ranks"]
        one = known.one(**case, strategy="one process", ranks=1)
        if one is None:
            continue
        found = ddp_model.ddp(one, Link.of(link.samples))
        apart = known.one(**case, strategy="apart", ranks=ranks)
        beside = apart.metric("step_ms") if apart else None
        row = {
            "training": f"{ddp.workload}, {ddp.tags['trained']}",
            "gradients, MB": one.metrics["gradient_mb"],
            "sent for, ms": found.communication_ms,
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
    exposed = metric("exposed_communication_share", **full, strategy="ddp")
    usual = metric("largest_ms", settings="NCCL_DEBUG=INFO")
    forbidden = metric("largest_ms", settings="NCCL_P2P_DISABLE=1")
    return {
        "bus bandwidth of a large all-reduce": metric("bus_gb_per_s", experiment="all-reduce"),
        "efficiency of DDP for LoRA": efficiency and 100 * efficiency,
        "exposed communication, all weights": exposed and 100 * exposed,
        "FSDP's peak memory, all weights of the UNet": peak,
        "64 MiB without P2P, slower by": forbidden / usual if usual and forbidden else None,
    }


# ------------------------------------------------------------------------------ NCCL's variables

TRIED_SIZES = (2**10, 2**20, 2**26)


def nccl_trial(ranks: int, settings: Mapping[str, str]) -> Run:
    """The all-reduce's times with these variables, in a launch of its own: NCCL reads them once.

    `metrics` holds what it says of its ways as well.
    """
    words = " ".join(f"{variable}={value}" for variable, value in settings.items())
    tags = {"experiment": "nccl", "settings": words}
    task = Task("all-reduce", f"nccl {words}", sizes=TRIED_SIZES, tags=tags)
    ended = launch([task], ranks, "cuda", 150, SAY_ALL | dict(settings))
    status = f"error: {' '.join(ended.message.split())}"
    run = ended.runs.get(task.name) or Run("11", task.name, status=status, tags=tags)
    said = read_nccl_log(ended.log)
    said["transport"] = ", ".join(said.pop("transports", {}))
    said["chosen"] = said.pop("chosen", {}).get(max(TRIED_SIZES))
    run.metrics |= {name: value for name, value in said.items() if value}
    return run
