"""unsloth in a process of its own: importing it patches transformers, PEFT and TRL for whatever
runs beside it.

    jobs = {"unsloth": Job(workload, recipe, warmup=3, steps=1, rounds=5, tags=tags)}
    runs = train_with_unsloth(jobs, load, logs, meanwhile)

The child loads the same weights from a folder by `load`, a function that the notebook shows, and
then goes through the course's own loop: the same batches, the same clock. All jobs are done by one
process, in order, and each is on record as soon as it is done. The process keeps its compiled code
in a folder that goes with it, so that its first step is one; all that it prints is kept in `logs`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from labutils.profiling import cuda
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run
from labutils.training import benchmark, child_process
from labutils.training.benchmark import Benchmark, empty_run
from labutils.training.child_process import Child
from labutils.training.free_memory import make_room
from labutils.training.model_edits import with_costs, with_epoch_rate
from labutils.workloads.base import open_workload
from labutils.workloads.causal_lm import LanguageLora
from labutils.workloads.decoder_workload import Published

TIMEOUT_S = 360
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "TQDM_DISABLE": "1",
    "UNSLOTH_MEGA_CACHE": "0",
}
"""The child's environment: it asks nothing of a network, and brings no compiled code of an earlier
day along.
"""
PRINTED = "unsloth.txt"
"""The file in `logs` that has all that the child printed."""
SHARED_MEMORY = Path("/dev/shm")
"""A folder that is no disk, to which 16 GB of weights would take long. Code can't be loaded from it
everywhere, so that only weights go there."""
ROOM = 40e9
"""Bytes that must be free there: twice the weights, and more."""

Load = Callable[[str], nn.Module]
"""Folder -> model with adapters. Its source is run in the child, and knows nothing around it."""
Meanwhile = Callable[[], object] | None


class Job(NamedTuple):
    """One run: a language workload, a recipe, the steps between the first and those timed, how many
    are timed a round, how many rounds, and the run's `tags`. All jobs train one model, the one that
    was loaded."""

    workload: LanguageLora
    recipe: Recipe
    warmup: int
    steps: int
    rounds: int
    tags: dict[str, Any]


def check_unsloth(device: str) -> None:
    """Raise `Unavailable` where unsloth can't run, with the reason."""
    if device != "cuda":
        raise Unavailable("unsloth's kernels are written for GPUs, and there is none here")
    if importlib.util.find_spec("unsloth") is None:
        raise Unavailable("unsloth is not installed: make unsloth")


def train_with_unsloth(
    jobs: Mapping[str, Job], load: Load, logs: Path, meanwhile: Meanwhile = None
) -> dict[str, Run]:
    """Name -> run of each job.

    meanwhile: is called while the child imports unsloth, loads the model and warms its first job
    up, which takes a minute or two. Its steps are timed when that is done too, so that neither
    disturbs the other.

    `first_step_s` is the first job's alone: its kernels are compiled then, beside whatever
    `meanwhile` compiles. `peak_allocated_gb` is the whole process's. A job that fails has its
    reason as status, and so have those that a process that dies or takes too long didn't get to.
    Raises `Unavailable` where unsloth can't run, `RuntimeError` where the process dies with nothing
    done.
    """
    first = next(iter(jobs.values())).workload
    check_unsloth(first.device.type)
    logs.mkdir(parents=True, exist_ok=True)
    order = {"model": first.size.hub, "load": [load.__name__, inspect.getsource(load)], "jobs": {}}
    for name, job in jobs.items():
        opened_as = job.workload.opened_as() | {"device": first.device.type}
        sent = {"recipe": job.recipe.as_dict(), "workload": opened_as}
        order["jobs"][name] = job._asdict() | sent
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM
    passing = {"prefix": "labutils-unsloth-", "ignore_cleanup_errors": True}
    with (
        tempfile.TemporaryDirectory(**passing) as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY if roomy else None, **passing) as weights,
    ):
        if first.weights == "random":
            order["model"] = weights
        records, failure = _ask(order, first, Path(folder), logs, meanwhile)
    if failure and not records:
        raise RuntimeError(failure)
    runs = {}
    for name, job in jobs.items():
        runs[name] = empty_run(job.workload, job.recipe, name)
        runs[name].status = f"error: {failure}"
        if name in records:
            runs[name] = Run(**records[name])
        runs[name].tags = dict(job.tags)
    return runs


def _ask(
    order: dict[str, Any], first: LanguageLora, folder: Path, logs: Path, meanwhile: Meanwhile
) -> tuple[dict[str, Any], str]:
    """The records of the jobs that the child finished, by name, and why it ended early; "" where it
    didn't.

    The child finds this checkout, and has folders of its own for whatever libraries write. All that
    it printed is kept in `logs`: why a library failed is rarely one line.
    """
    path = child_process.python_path()
    environment = QUIET | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": None}
    # PyTorch keeps compiled code in the temporary folder, unsloth where it runs.
    environment |= dict.fromkeys(("TMPDIR", "TRITON_CACHE_DIR"), str(folder))
    records = {}
    with Child(["-m", __name__], None, TIMEOUT_S, environment, folder) as child:
        if first.weights == "random":  # while the child imports unsloth
            first.publish(Path(order["model"]))
            make_room(first)  # for the child: memory that this process keeps is free for no other
        child.send(order)
        if meanwhile:
            meanwhile()
            cuda.empty_cache()
        child.send("begin")
        while record := child.receive():
            records[record["run"]] = record
        failure = "" if len(records) == len(order["jobs"]) else f"unsloth: {child.failure()}"
        (logs / PRINTED).write_text(child.printed + child.errors(), "utf-8", "replace")
    return records, failure


# -------------------------------------------------------------------------------------------------
# The child's side


def _main() -> None:
    """Does the jobs in order and sends each run's record as soon as there is one."""
    import unsloth  # before transformers, which nothing has imported so far
    from accelerate.utils import extract_model_from_parallel

    order = child_process.order()
    benchmark.LOG.addHandler(logging.StreamHandler())
    benchmark.LOG.setLevel(logging.INFO)
    name, source = order["load"]
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    lm = namespace[name](order["model"])

    def build(recipe: Recipe) -> Published:
        """What `LanguageLora.build` gives, without what accelerate put around it in the job
        before."""
        unsloth.FastLanguageModel.for_training(lm)
        return Published(extract_model_from_parallel(lm, keep_fp32_wrapper=False))

    for place, (name, job) in enumerate(order["jobs"].items()):
        workload, recipe = open_workload(**job["workload"]), Recipe(**job["recipe"])
        with Benchmark(workload, job["warmup"], same_batches=True, build=build) as bench:
            if place == 0:  # warms up beside the parent's `meanwhile`
                bench.prepare({name: recipe})
                child_process.order()  # to begin
            run = bench.compare({name: recipe}, job["steps"], job["rounds"])[name]
            if run.ok and (peak := cuda.peak_memory()):
                run.metrics["peak_allocated_gb"] = peak[0]
        if place > 0:
            run.metrics.pop("first_step_s", None)  # what had to be compiled is compiled
        child_process.send(dataclasses.asdict(with_epoch_rate(with_costs(run), workload)))


if __name__ == "__main__":
    _main()
