"""unsloth in a process of its own: importing it patches transformers, PEFT and TRL for whatever
runs beside it.

    runs = train_with_unsloth({"unsloth long": Job(workload, recipe, steps=40)}, logs)

The child loads the same weights from a folder, lets unsloth put in its kernels, adapters and
checkpointing, and then goes through the course's own loop: the same batches, the same clock. All
jobs are done by one process, in order, and each is on record as soon as it is done. The process
keeps its compiled code in a folder that goes with it, so that its first step is one; all that it
prints is kept beside the logs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from labutils.data.texts import LONGEST
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import REPOSITORY, Run
from labutils.training import benchmark, child_process
from labutils.training.benchmark import empty_run
from labutils.training.child_process import Child
from labutils.training.memory_run import followed, make_room
from labutils.training.trainer import Trainer
from labutils.workloads.base import Batch, open_workload
from labutils.workloads.causal_lm import LanguageLora
from labutils.workloads.decoder import TARGETS, Published

TIMEOUT_S = 240
Runs = dict[str, Run]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "TQDM_DISABLE": "1",
    "UNSLOTH_MEGA_CACHE": "0",
}
"""The child's environment: it asks nothing of a network, and brings no compiled code of an earlier
day along.
"""
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "UNSLOTH_COMPILE_LOCATION": "unsloth_compiled_cache",
    "TMPDIR": "temporary",
}
"""Variable -> folder of the child's own. (unsloth unsets the second one; PyTorch then takes a
folder in the last.)
"""
PRINTED = "unsloth.txt"
"""The file beside the logs that has all that the child printed."""


@dataclass(frozen=True)
class Job:
    """One run: a language workload of the jobs' common model, with how its base weights are held (4
    bits, or as they come) in `recipe.base_linear`, and at least `steps` timed optimizer steps."""

    workload: LanguageLora
    recipe: Recipe
    steps: int


def check_unsloth(device: str) -> None:
    """Raise `Unavailable` where unsloth can't run, with the reason."""
    if device != "cuda":
        raise Unavailable("unsloth's kernels are written for GPUs, and there is none here")
    if importlib.util.find_spec("unsloth") is None:
        raise Unavailable("unsloth is not installed: make unsloth")


def train_with_unsloth(
    jobs: Mapping[str, Job], logs: Path, every: int = 10, timeout_s: float = TIMEOUT_S
) -> Runs:
    """Name -> run of each job, its memory in `logs`/name.csv as `memory_run.followed` writes it.

    `first_step_s` is the first job's alone: its kernels are compiled then. A job that fails has its
    reason as status, and so have those that a process that dies or takes too long didn't get to.
    Raises `Unavailable` where unsloth can't run, `RuntimeError` where the process dies with nothing
    done.
    """
    first = next(iter(jobs.values())).workload
    check_unsloth(first.device.type)
    with tempfile.TemporaryDirectory(
        prefix="labutils-unsloth-", ignore_cleanup_errors=True
    ) as place:
        folder = Path(place)
        if first.weights == "random":
            first.publish(folder / "model")
            make_room(first)  # for the child: memory that this process keeps is free for no other
        order = {
            "model": str(folder / "model") if first.weights == "random" else first.size.hub,
            "logs": str(logs.resolve()),
            "every": every,
            "jobs": {
                name: {
                    "workload": job.workload.opened_as() | {"device": first.device.type},
                    "recipe": job.recipe.as_dict(),
                    "steps": job.steps,
                }
                for name, job in jobs.items()
            },
        }
        records, failure = _ask(order, timeout_s, folder)
    if failure and not records:
        raise RuntimeError(failure)
    runs = {name: empty_run(job.workload, job.recipe, name) for name, job in jobs.items()}
    for name, run in runs.items():
        run.status = f"error: {failure}"
        if name in records:
            runs[name] = Run(**records[name])
    return runs


def _ask(order: dict[str, Any], timeout_s: float, folder: Path) -> tuple[dict[str, Any], str]:
    """The records of the jobs that the child finished, by name, and why it ended early; "" where it
    didn't. All that it printed is kept beside the logs: why a library failed is rarely one line.
    """
    environment, place = _environment(folder), folder / CACHES["TMPDIR"]
    records = {}
    with Child(["-m", __name__], order, timeout_s, environment, place) as child:
        while record := child.receive():
            records[record["run"]] = record
        failure = "" if len(records) == len(order["jobs"]) else f"unsloth: {child.failure()}"
        logs = Path(order["logs"])
        logs.mkdir(parents=True, exist_ok=True)
        printed = child.printed + child.errors()
        (logs / PRINTED).write_text(printed, encoding="utf-8", errors="replace")
    return records, failure


def _environment(folder: Path) -> dict[str, str]:
    """The child's: folders of its own, made here, for whatever libraries write, and the way to this
    checkout.
    """
    for name in CACHES.values():
        (folder / name).mkdir()
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    own = {variable: str(folder / name) for variable, name in CACHES.items()}
    return {"PYTHONPATH": path} | own | QUIET


# -------------------------------------------------------------------------------------------------
# The child's side


def _main() -> None:
    """Does the jobs in order and sends each run's record as soon as there is one."""
    import unsloth  # before transformers, which nothing has imported so far

    order = child_process.order()
    benchmark.LOG.addHandler(logging.StreamHandler())
    benchmark.LOG.setLevel(logging.INFO)
    library = unsloth.FastLanguageModel
    load = functools.cache(functools.partial(_load, library, order["model"]))  # once for all jobs
    for place, (name, job) in enumerate(order["jobs"].items()):
        workload, recipe = open_workload(**job["workload"]), Recipe(**job["recipe"])
        load(*_held_as(recipe))  # where it can't be loaded, the process ends: once is enough
        build = functools.partial(_build, library, load)
        log = Path(order["logs"]) / f"{name}.csv"
        meet = functools.partial(_meet_other_lengths, workload)
        run = followed(
            workload, recipe, job["steps"], name, log, order["every"], meet=meet, build=build
        )
        if place > 0:
            run.metrics.pop("first_step_s", None)  # what had to be compiled is compiled
        child_process.send(dataclasses.asdict(run))


def _meet_other_lengths(workload: LanguageLora, trainer: Trainer) -> None:
    """A step each on batches of other lengths, where lengths differ: unsloth compiles every block,
    for one length, for any, and for what doesn't divide evenly, and would do it in a step that is
    timed."""
    for batch in _of_other_lengths(workload, trainer.recipe):
        trainer.driver.step(
            iter([{name: tensor.to(workload.device) for name, tensor in batch.items()}])
        )


def _of_other_lengths(workload: LanguageLora, recipe: Recipe) -> list[Batch]:
    """The longest batch, a shorter one of an odd length, and the shortest; none where all have one
    length.
    """
    if recipe.shapes != "as-they-come":
        return []
    rows, collate = workload.dataset(None, recipe), workload.collate(recipe)
    ascending = sorted(rows, key=lambda row: len(row["input_ids"]))
    half, last = len(ascending) // 2, len(ascending) - 1
    odd = next(
        (place for place in range(half, last) if len(ascending[place]["input_ids"]) % 2), half
    )
    ends = (last, max(odd, recipe.micro_batch - 1), recipe.micro_batch - 1)
    return [collate(ascending[end + 1 - recipe.micro_batch : end + 1]) for end in ends]


def _held_as(recipe: Recipe) -> tuple[bool, int, int]:
    """What of a recipe the model depends on that is loaded: whether in 4 bits, the adapters' rank
    and seed.
    """
    return recipe.base_linear == "nf4", recipe.rank, recipe.seed


def _load(library: Any, model: str, four_bits: bool, rank: int, seed: int) -> nn.Module:
    lm, _ = library.from_pretrained(
        model,
        max_seq_length=LONGEST,
        load_in_4bit=four_bits,
        fix_tokenizer=False,
        use_exact_model_name=True,
    )
    return library.get_peft_model(
        lm,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(TARGETS),
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=seed,
        max_seq_length=LONGEST,
    )


def _build(library: Any, load: Callable[[bool, int, int], nn.Module], recipe: Recipe) -> Published:
    """What `LanguageLora.build` gives, by unsloth; without what accelerate put around it in the job
    before.
    """
    from accelerate.utils import extract_model_from_parallel

    lm = load(*_held_as(recipe))
    library.for_training(lm)
    return Published(extract_model_from_parallel(lm, keep_fp32_wrapper=False))


if __name__ == "__main__":
    _main()
