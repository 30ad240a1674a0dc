"""unsloth in a process of its own: importing it patches transformers, PEFT and TRL for whatever
runs beside it.

    runs = train_with_unsloth({"unsloth long": Job(workload, recipe, steps=40, tags=tags)}, logs)

The child loads the same weights from a folder, lets unsloth put in its kernels, adapters and
checkpointing, and then goes through the course's own loop: the same batches, the same clock. All
jobs are done by one process, in order, and each is on record as soon as it is done. The process
keeps its compiled code in a folder that goes with it, so that its first step is one; all that it
prints is kept beside the logs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from labutils.data.texts import LONGEST
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import REPOSITORY, Run
from labutils.training import benchmark, child_process
from labutils.training.benchmark import empty_run
from labutils.training.child_process import Child
from labutils.training.memory_log import followed, make_room
from labutils.workloads.base import open_workload
from labutils.workloads.causal_lm import LanguageLora
from labutils.workloads.decoder_workload import TARGETS, Published

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
"""The file beside the logs that has all that the child printed."""


class Job(NamedTuple):
    """One run: a language workload, a recipe, at least `steps` timed optimizer steps, and the run's
    `tags`.

    All jobs train one model, loaded as the first one's recipe says: its base weights (in 4 bits, or
    as they come: `base_linear`), rank and seed.
    """

    workload: LanguageLora
    recipe: Recipe
    steps: int
    tags: dict[str, Any]


def check_unsloth(device: str) -> None:
    """Raise `Unavailable` where unsloth can't run, with the reason."""
    if device != "cuda":
        raise Unavailable("unsloth's kernels are written for GPUs, and there is none here")
    if importlib.util.find_spec("unsloth") is None:
        raise Unavailable("unsloth is not installed: make unsloth")


def train_with_unsloth(jobs: Mapping[str, Job], logs: Path, every: int = 10) -> dict[str, Run]:
    """Name -> run of each job, its memory in `logs`/name.csv as `memory_log.followed` writes it.

    `first_step_s` is the first job's alone: its kernels are compiled then. A job that fails has its
    reason as status, and so have those that a process that dies or takes too long didn't get to.
    Raises `Unavailable` where unsloth can't run, `RuntimeError` where the process dies with nothing
    done.
    """
    first = next(iter(jobs.values())).workload
    check_unsloth(first.device.type)
    logs.mkdir(parents=True, exist_ok=True)
    order = {"model": first.size.hub, "logs": str(logs.resolve()), "every": every, "jobs": {}}
    for name, job in jobs.items():
        opened_as = job.workload.opened_as() | {"device": first.device.type}
        recipe = job.recipe.as_dict()
        order["jobs"][name] = {"workload": opened_as, "recipe": recipe, "steps": job.steps}
    with tempfile.TemporaryDirectory(
        prefix="labutils-unsloth-", ignore_cleanup_errors=True
    ) as folder:
        if first.weights == "random":
            order["model"] = f"{folder}/model"
            first.publish(Path(order["model"]))
            make_room(first)  # for the child: memory that this process keeps is free for no other
        records, failure = _ask(order, Path(folder))
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


def _ask(order: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The records of the jobs that the child finished, by name, and why it ended early; "" where it
    didn't.

    The child finds this checkout, and has folders of its own for whatever libraries write. All that
    it printed is kept beside the logs: why a library failed is rarely one line.
    """
    path = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
    environment = QUIET | {"PYTHONPATH": os.pathsep.join(path)}
    # PyTorch keeps compiled code in the temporary folder, unsloth where it runs.
    environment |= dict.fromkeys(("TMPDIR", "TRITON_CACHE_DIR"), str(folder))
    environment["TORCHINDUCTOR_CACHE_DIR"] = None
    records = {}
    with Child(["-m", __name__], order, TIMEOUT_S, environment, folder) as child:
        while record := child.receive():
            records[record["run"]] = record
        failure = "" if len(records) == len(order["jobs"]) else f"unsloth: {child.failure()}"
        printed = child.printed + child.errors()
    (Path(order["logs"]) / PRINTED).write_text(printed, encoding="utf-8", errors="replace")
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
    library, jobs = unsloth.FastLanguageModel, order["jobs"]
    recipes = {name: Recipe(**job["recipe"]) for name, job in jobs.items()}
    lm = _load(library, order["model"], next(iter(recipes.values())))

    def build(recipe: Recipe) -> Published:
        """What `LanguageLora.build` gives, without what accelerate put around it in the job
        before."""
        library.for_training(lm)
        return Published(extract_model_from_parallel(lm, keep_fp32_wrapper=False))

    for place, (name, job) in enumerate(jobs.items()):
        workload, log = open_workload(**job["workload"]), Path(order["logs"]) / f"{name}.csv"
        steps, every = job["steps"], order["every"]
        run = followed(workload, recipes[name], steps, name, log, every, build=build)
        if place > 0:
            run.metrics.pop("first_step_s", None)  # what had to be compiled is compiled
        child_process.send(dataclasses.asdict(run))


def _load(library: Any, model: str, recipe: Recipe) -> nn.Module:
    """The model with its adapters, by unsloth (`library`)."""
    lm, _ = library.from_pretrained(
        model,
        max_seq_length=LONGEST,
        load_in_4bit=recipe.base_linear == "nf4",
        fix_tokenizer=False,
        use_exact_model_name=True,
    )
    return library.get_peft_model(
        lm,
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=list(TARGETS),
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=recipe.seed,
        max_seq_length=LONGEST,
    )


if __name__ == "__main__":
    _main()
