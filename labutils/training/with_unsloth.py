"""unsloth in a process of its own: importing it patches transformers, PEFT and TRL for whatever runs beside it.

    runs = train_with_unsloth({"unsloth long": Job(workload, recipe, steps=40)}, logs)

The child loads the same weights from a folder, lets unsloth put in its kernels, adapters and checkpointing, and then
goes through the course's own loop: the same batches, the same clock. All jobs are done by one process, in order.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from labutils.data.texts import LONGEST
from labutils.recipe import Recipe
from labutils.results import REPOSITORY, Run, Unavailable
from labutils.training.following import followed
from labutils.workloads.base import open_workload
from labutils.workloads.decoder import TARGETS
from labutils.workloads.language import LanguageLora, Published

TIMEOUT_S = 420
Runs = dict[str, Run]
QUIET = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TQDM_DISABLE": "1"}
"""The child's environment: it asks nothing of a network."""


@dataclass(frozen=True)
class Job:
    """One run: a language workload of the jobs' common model, with how its base weights are held (4 bits, or as they
    come) in `recipe.base_linear`, and at least `steps` timed optimizer steps."""

    workload: LanguageLora
    recipe: Recipe
    steps: int


def check_unsloth(device: str) -> None:
    """Raise `Unavailable` where unsloth can't run, with the reason."""
    if device != "cuda":
        raise Unavailable("unsloth's kernels are written for GPUs, and there is none here")
    if importlib.util.find_spec("unsloth") is None:
        raise Unavailable("unsloth is not installed: make unsloth")


def train_with_unsloth(jobs: Mapping[str, Job], logs: Path, every: int = 10, timeout_s: float = TIMEOUT_S) -> Runs:
    """Name -> run of each job, its memory in `logs`/name.csv as `following.followed` writes it.

    `first_step_s` is the first job's alone: its kernels are compiled then. A job that fails has its reason as status.
    Raises `Unavailable` where unsloth can't run, `RuntimeError` where the process dies.
    """
    first = next(iter(jobs.values())).workload
    check_unsloth(first.device.type)
    with tempfile.TemporaryDirectory(prefix="labutils-unsloth-", ignore_cleanup_errors=True) as folder:
        if first.weights == "random":
            first.publish(Path(folder))
            first.let_go()
        order = {
            "model": folder if first.weights == "random" else first.size.hub,
            "logs": str(logs.resolve()),
            "every": every,
            "jobs": {name: _order_of(job) for name, job in jobs.items()},
        }
        return {name: Run(**record) for name, record in _ask(order, timeout_s).items()}


def _order_of(job: Job) -> dict[str, Any]:
    workload = job.workload
    where = {"name": workload.name, "scale": workload.scale, "weights": workload.weights, "data": workload.data}
    where |= {"device": workload.device.type, "cache_dir": str(workload.cache_dir)}
    return {"workload": where, "recipe": job.recipe.as_dict(), "steps": job.steps}


def _ask(order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What the child answers: the last line that it prints."""
    command = [sys.executable, "-m", "labutils.training.with_unsloth"]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=REPOSITORY,
            env=os.environ | QUIET,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"unsloth's process did not end within {timeout_s:.0f} s.") from None
    try:
        return json.loads(child.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (child.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        raise RuntimeError(f"unsloth's process ended with code {child.returncode}: {last}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The child's side


def _main() -> None:
    """An order on standard input; the runs' records as the last line of standard output."""
    import unsloth  # before transformers, which nothing has imported so far

    order = json.load(sys.stdin)
    library, records = unsloth.FastLanguageModel, {}
    load = functools.cache(functools.partial(_load, library, order["model"]))  # once for all jobs
    for name, job in order["jobs"].items():
        workload, recipe = open_workload(**job["workload"]), Recipe(**job["recipe"])
        workload.build = functools.partial(_build, library, load)
        log = Path(order["logs"]) / f"{name}.csv"
        run = followed(workload, recipe, job["steps"], name, log, order["every"])
        if records:
            run.metrics.pop("first_step_s", None)  # what had to be compiled is compiled
        records[name] = dataclasses.asdict(run)
    print()
    print(json.dumps(records))


def _load(library: Any, model: str, four_bits: bool, rank: int, seed: int) -> nn.Module:
    lm, _ = library.from_pretrained(model, max_seq_length=LONGEST, load_in_4bit=four_bits, fix_tokenizer=False)
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
    """What `LanguageLora.build` gives, by unsloth; without what accelerate put around it in the job before."""
    from accelerate.utils import extract_model_from_parallel

    lm = load(recipe.base_linear == "nf4", recipe.rank, recipe.seed)
    library.for_training(lm)
    return Published(extract_model_from_parallel(lm, keep_fp32_wrapper=False))


if __name__ == "__main__":
    _main()
