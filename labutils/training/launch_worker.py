"""What every rank of a launch runs: its tasks, one after the other.

    torchrun --standalone --nproc-per-node=2 -m labutils.training.launch_worker FOLDER/job.json

Every rank does the same tasks. Rank 0 writes what is measured to runs.jsonl, task by task. Each
rank keeps its status in rank<r>.json, so that of one that is killed at least this is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from labutils.profiling import cuda
from labutils.profiling.collectives import time_all_reduce
from labutils.profiling.machine import default_device
from labutils.profiling.timing import StepClock, StepTimes
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.training import distributed
from labutils.training.benchmark import AGAIN, ROUND_MS, Candidate, empty_run
from labutils.training.trainer import Trainer
from labutils.workloads import Workload, open_workload

RUNS = "runs.jsonl"
ROUNDS = {"tiny": 2, "small": 5, "full": 5}


@dataclass(frozen=True)
class Task:
    """One thing that the ranks do. Plain data.

    kind: "train" (the recipes of `timed` are timed in turns) or "all-reduce" (of `sizes` bytes,
    timed). name, tags: of its run. timed: for each recipe a `Timed` as a dict.
    """

    kind: str
    name: str
    workload: dict[str, Any] = field(default_factory=dict)
    timed: tuple[dict[str, Any], ...] = ()
    steps: int = 5
    warmup: int = 2
    sizes: tuple[int, ...] = ()
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """A recipe that is timed, and name and tags of its run.

    by: "all" ranks together; "one", rank 0 by itself while the others wait; "each" rank by itself,
    all at once with nothing between them, of which the slowest counts.
    """

    name: str
    by: str
    recipe: dict[str, Any]
    tags: dict[str, Any] = field(default_factory=dict)

    def company(self) -> AbstractContextManager:
        return nullcontext() if self.by == "all" else distributed.by_itself()


@dataclass
class RankStatus:
    """Where a rank is. Its file in the launch's folder is replaced whole at each change.

    No task: it hasn't begun. error: what it failed with. at: when this changed, in seconds since
    1970.
    """

    rank: int
    task: str = ""
    error: str = ""
    done: bool = False
    at: float = 0.0

    def write(self, folder: str, **changes: Any) -> None:
        vars(self).update(changes, at=time.time())
        new = Path(folder) / f"rank{self.rank}.new"
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(new, new.with_suffix(".json"))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankStatus:
        """What the rank wrote last; one that couldn't even start has written nothing."""
        path = folder / f"rank{rank}.json"
        return cls(**json.loads(path.read_text("utf-8"))) if path.exists() else cls(rank)


def main(path: str) -> None:
    """All tasks of one rank, and how it ends."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    status = RankStatus(int(os.environ["RANK"]))
    faulthandler.register(signal.SIGUSR1)  # a launch that is ended has in its log where it stood
    try:
        if int(os.environ["WORLD_SIZE"]) > 1:
            distributed.join(job["timeout_s"])
        for task in job["tasks"]:
            _do(Task(**task), status, job["folder"])
        distributed.leave()
        status.write(job["folder"], done=True)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        status.write(job["folder"], error=said)
        traceback.print_exc()
    # Without Python's own end. Taking a process group down waits for ranks that are gone, and on a
    # CPU a thread of gloo's may abort it.
    if status.error or not cuda.available():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads, or the disk is full
                stream.flush()
        os._exit(1 if status.error else 0)


def _do(task: Task, status: RankStatus, folder: str) -> None:
    status.write(folder, task=task.name)
    gc.collect()  # a trainer that has ended goes at once, not somewhere in the next one's steps
    cuda.empty_cache()
    runs = TASKS[task.kind](task)
    if distributed.here().rank == 0:
        with (Path(folder) / RUNS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(run.record()) + "\n" for run in runs)


# ------------------------------------------------------------------------------ tasks

_workloads: dict[str, Workload] = {}


def _workload(task: Task) -> Workload:
    """One a kind, whose trainers share frozen weights and texts; only one kind has weights."""
    key = json.dumps(task.workload, sort_keys=True)
    for other, workload in _workloads.items():
        if other != key:
            workload.release_weights()
    if key not in _workloads:
        _workloads[key] = open_workload(**task.workload)
    return _workloads[key]


ENCODED_BY = ("cache", "precision", "memory_format", "layers", "seed")
"""Knobs that encoded examples depend on."""


@functools.cache
def encoded_once(workload: Workload) -> Callable[[Any, Recipe], Any]:
    """A trainer's `dataset` hook: the workload's examples, encoded once for all tasks."""
    known: dict[tuple[Any, ...], Any] = {}

    def dataset(model: Any, recipe: Recipe) -> Any:
        key = tuple(getattr(recipe, knob) for knob in ENCODED_BY)
        if recipe.cache == "nothing" or key not in known:
            known[key] = workload.dataset(model, recipe)
        return known[key]

    return dataset


def _train(task: Task) -> list[Run]:
    """Time recipes in turns: every round visits all of them, there and back by turns, and the first
    at both ends."""
    workload, me = _workload(task), distributed.here()
    hook = encoded_once(workload)
    visits = {each["name"]: Timed(**each) for each in task.timed}
    base = next(iter(visits.values()))
    visits[base.name + AGAIN] = replace(base, tags=base.tags | {"again": True})
    candidates: dict[str, Candidate] = {}
    runs = {}
    try:
        for each in visits.values():
            if _key(each) not in candidates:
                recipe = Recipe(**each.recipe)
                with each.company():
                    made = Candidate(workload, recipe, task.warmup, dataset=hook)
                candidates[_key(each)] = made
        gc.collect()
        times = _in_turns({n: (each, candidates[_key(each)]) for n, each in visits.items()}, task)
        comparison = uuid.uuid4().hex[:12]
        for name, each in visits.items():
            run = runs[name] = empty_run(workload, Recipe(**each.recipe), name)
            run.tags, run.comparison = each.tags, comparison
            if each.by != "one" or me.rank == 0:
                with each.company():
                    _report(run, each, candidates[_key(each)], times[name])
            me.all(None)
    finally:
        for candidate in candidates.values():
            candidate.close()
    return list(runs.values())


def _key(each: Timed) -> str:
    """What those that one trainer can do have in common."""
    return json.dumps([each.by == "all", each.recipe], sort_keys=True)


def _in_turns(visits: Mapping[str, tuple[Timed, Candidate]], task: Task) -> dict[str, StepTimes]:
    """The times of each visit; of one that each rank makes by itself, the slowest rank's."""
    me, times = distributed.here(), {name: StepTimes() for name in visits}
    scale = task.workload["scale"]
    for turn in range(ROUNDS[scale]):
        for name in list(visits)[:: -1 if turn % 2 else 1]:
            each, candidate = visits[name]
            if each.by != "one" or me.rank == 0:
                steps = max(task.steps, math.ceil(ROUND_MS[scale] / candidate.step_ms))
                if each.by == "each":  # so that none is done while others still run
                    steps = max(me.all(steps))
                with each.company():
                    times[name].extend(candidate.measure(steps), turn)
            me.all(None)  # the others wait here, at no cost to the device
    for name, (each, _) in visits.items():
        if each.by == "each":
            times[name] = max(me.all(times[name]), key=lambda those: median(those.step_ms))
    return times


def _report(run: Run, each: Timed, candidate: Candidate, times: StepTimes) -> None:
    """Fill in what was measured and, of one process, when gradients are ready."""
    trainer = candidate.trainer
    candidate.report_times(run, times)
    gradients = sum(p.numel() * p.element_size() for p in trainer.parameters)
    run.metrics |= {"gradient_mb": gradients / 1e6, "ranks": trainer.ranks.count}
    if each.by == "one" and "again" not in each.tags:
        run.samples |= gradient_arrivals(trainer)
    peaks = trainer.ranks.all(candidate.memory)
    run.metrics |= {name: max(peak[name] for peak in peaks) for name in candidate.memory}


def gradient_arrivals(trainer: Trainer) -> dict[str, list[float]]:
    """{"lead_ms", "lead_bytes"}: how long before the last gradient each one is there, in order of
    time, and its bytes.

    Measured on one more optimizer step, on its last backward pass: on a GPU by events in the
    stream, so that it is the GPU's time and not the host's.
    """
    clock, sizes = StepClock(trainer.workload.device), []

    def arrived(parameter: Tensor) -> None:
        clock.mark(data_ms=0.0)
        sizes.append(parameter.grad.nbytes)

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trainer.parameters]
    clock.start()
    try:
        trainer.step()
    finally:
        for hook in hooks:
            hook.remove()
    last = len(sizes) // trainer.recipe.accumulation
    apart = clock.stop().step_ms[-last:]
    leads = [round(sum(apart[place + 1 :]), 4) for place in range(last)]
    return {"lead_ms": leads, "lead_bytes": sizes[-last:]}


def _all_reduce(task: Task) -> list[Run]:
    timed = time_all_reduce(task.sizes, default_device(), distributed.here().count)
    return [Run("", task.name, tags=task.tags, **timed)]


TASKS = {"train": _train, "all-reduce": _all_reduce}

if __name__ == "__main__":
    main(sys.argv[1])
