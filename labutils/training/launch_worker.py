"""What every rank runs when `launching.launch` (or a person, with torchrun) starts a job: its
tasks, one after the other.

    torchrun --standalone --nproc-per-node=2 -m labutils.training.launch_worker FOLDER/job.json [--resume]

Every rank does the same tasks. What is measured rank 0 writes to runs.jsonl, task by task. Each
rank leaves word of where it is in rank<r>.json, so that of one that is killed at least this is
known: the last word of a rank that died is how far it had come.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

JOB, RUNS = "job.json", "runs.jsonl"
GONE = (
    "connection closed by peer",
    "connection reset",
    "timed out",
    "timeout",
    "broken pipe",
    "nccl",
    "socket",
)
"""What gloo and NCCL say, in small letters, on a rank whose partner is gone."""
_PLACE = re.compile(r"\[/\S+\] ")  # where in their source


@dataclass(frozen=True)
class Task:
    """One thing that the ranks do. Plain data.

    kind: "train" (a recipe is timed), "run" (it trains `steps` steps, with checkpoints),
    "all-reduce" (of `sizes` bytes, timed). alone: rank 0 does it by itself and the others wait.
    traced: optimizer steps recorded by the profiler after the timing. arrivals: when each gradient
    is there is measured, too. fail: "raise" or "kill" of `fails` (rank, step). turn: a file; of
    launches side by side that name the same one, one at a time does its "all-reduce".
    """

    kind: str
    name: str
    workload: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    warmup: int = 2
    rounds: int = 1
    alone: bool = False
    traced: int = 0
    arrivals: bool = False
    sizes: tuple[int, ...] = ()
    folder: str = ""
    checkpoint_every: int = 0
    resume: bool = False
    fail: str = ""
    fails: tuple[int, int] = (0, 0)
    turn: str = ""


@dataclass(frozen=True)
class Job:
    """What is launched: tasks, the device ("cuda" or "cpu"), how long ranks wait for each other,
    and what beside of the environment they are given."""

    tasks: tuple[Task, ...]
    folder: str
    device: str
    patience_s: float

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Raises `ValueError` where the file holds no job."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            tasks = tuple(
                Task(**(t | {k: tuple(t[k]) for k in ("sizes", "fails")}))
                for t in found.pop("tasks")
            )
            return cls(tasks, **found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no job ({type(error).__name__}: {error}).") from None


class RankStatus:
    """A rank's last word: a small file, replaced whole. `state` is "starting", "training",
    "failed", "lost" (its error was another's doing), "ended" (by torchrun) or "done"; `doing` and
    `step` say where."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.path = Path(folder) / f"rank{rank}.json"
        self.said: dict[str, Any] = {"rank": rank, "pid": os.getpid()}
        self.say(state="starting", doing="", step=0, message="")

    def say(self, **what: Any) -> None:
        self.said |= what
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self.said), encoding="utf-8")
        os.replace(beside, self.path)


def main(arguments: list[str]) -> None:
    """One rank, from its first word to its last."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    job = Job.read(arguments[0])
    resume = "--resume" in arguments[1:]
    word = RankStatus(job.folder, int(os.environ["RANK"]))
    when_terminated(
        lambda: word.say(state="ended", message="torchrun ended it, as another rank had failed")
    )
    handler = get_error_handler()
    handler.initialize()
    try:
        do(job, word, resume)
    except Exception as error:
        lost, message = is_others_doing(error), " ".join(f"{type(error).__name__}: {error}".split())
        message = _PLACE.sub("", message.partition(". ")[0]) if lost else message[:600]
        word.say(state="lost" if lost else "failed", message=message)
        print(said_of(word.said), file=sys.stderr, flush=True)
        handler.record_exception(error)
        sys.stderr.flush()
        os._exit(1)  # at once: taking a process group down waits for ranks that are gone
    word.say(state="done")


def is_others_doing(error: BaseException) -> bool:
    """Whether an exception is what a rank gets when another one is gone."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError) and any(words in text for words in GONE)


def said_of(said: dict[str, Any]) -> str:
    """A rank's last word as a sentence."""
    where = (
        f"in optimizer step {said['step'] + 1} of *{said['doing']}*"
        if said["doing"]
        else "before its first task"
    )
    if said["state"] == "failed":
        return f"Rank {said['rank']} failed {where}: {said['message']}"
    if said["state"] == "lost":
        return f"Rank {said['rank']} lost the others {where}: one of them is gone or too far behind ({said['message']})"
    if said["state"] == "ended":
        return f"Rank {said['rank']} was {where}; {said['message']}."
    return f"Rank {said['rank']} was {where} and left no other word."


def when_terminated(act: Callable[[], None]) -> None:
    """Do this on SIGTERM, which torchrun sends to those that are left, and end.

    A rank that waits for a dead one sits inside a library, where Python's handlers don't run. The
    system's own handler writes to a pipe in any case, and a thread that reads it needs nobody.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        while os.read(reader, 1)[0] != signal.SIGTERM:
            continue
        act()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def do(job: Job, word: RankStatus, resume: bool = False) -> None:
    """Meet the others, do all tasks, leave."""
    from labutils.profiling import cuda
    from labutils.training import distributed

    if int(os.environ["WORLD_SIZE"]) > 1:
        distributed.join(job.patience_s, job.device)
    me = distributed.here()
    for task in job.tasks:
        word.say(state="training", doing=task.name, step=0)
        task = replace(task, resume=task.resume or resume)
        gc.collect()  # a trainer that has ended goes at once, not somewhere in the next one's steps
        cuda.empty_cache()
        if task.alone:
            if me.rank == 0:
                with distributed.by_itself():
                    found = TASKS[task.kind](job, task, word)
            me.all(None)  # the others wait here, at no cost to the device
        else:
            found = TASKS[task.kind](job, task, word)
        if me.rank == 0:
            with (Path(job.folder) / RUNS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.record()) + "\n")
    distributed.leave()


# -------------------------------------------------------------------------------------------------
# Tasks


_workloads: dict[str, Any] = {}


def _workload(job: Job, task: Task) -> Any:
    """One a kind, so that trainers share its frozen weights, texts and encoded examples; only one
    kind has weights.
    """
    from labutils.workloads import open_workload

    key = json.dumps(task.workload, sort_keys=True)
    for other, workload in _workloads.items():
        if other != key:
            workload.release_weights()
    if key not in _workloads:
        _workloads[key] = open_workload(**task.workload, device=job.device)
    return _workloads[key]


ENCODED_BY = ("cache", "precision", "memory_format", "layers", "seed")
"""Knobs that encoded examples depend on."""


@functools.cache
def encoded_once(workload: Any) -> Callable[[Any, Any], Any]:
    """A trainer's `dataset` hook: the workload's examples, encoded once for all tasks."""
    known: dict[tuple[Any, ...], Any] = {}

    def dataset(model: Any, recipe: Any) -> Any:
        key = tuple(getattr(recipe, knob) for knob in ENCODED_BY)
        if recipe.cache == "nothing" or key not in known:
            known[key] = workload.dataset(model, recipe)
        return known[key]

    return dataset


def _train(job: Job, task: Task, word: RankStatus) -> Any:
    """Time a recipe: first step, warm-up, rounds of steps; then a trace, where one is asked for."""
    from labutils.profiling.collectives import communication
    from labutils.profiling.timing import StepTimes
    from labutils.profiling.trace import profile
    from labutils.recipe import Recipe
    from labutils.training.benchmark import Candidate, empty_run
    from labutils.training.gradient_timing import gradient_arrivals

    workload, recipe = _workload(job, task), Recipe(**task.recipe)
    run = empty_run(workload, recipe, task.name)
    candidate = Candidate(workload, recipe, task.warmup, dataset=encoded_once(workload))
    try:
        trainer, times = candidate.trainer, StepTimes()
        for turn in range(task.rounds):
            times.extend(candidate.measure(task.steps), turn)
        candidate.report_times(run, times)
        run.metrics["gradient_mb"] = (
            sum(p.numel() * p.element_size() for p in trainer.parameters) / 1e6
        )
        run.metrics["ranks"] = trainer.ranks.count
        if task.arrivals:
            run.samples |= gradient_arrivals(trainer)
            run.metrics |= _to_gather(trainer)
        if task.traced:
            folder = Path(job.folder) / f"traces-{trainer.ranks.rank}"
            trace = profile(
                trainer, task.traced, folder, with_stack=False, wait=candidate.steps_to_settle
            )
            metrics, run.samples["computing_ms"], run.samples["communicating_ms"] = communication(
                trace
            )
            run.metrics |= metrics
        peaks = trainer.ranks.all(candidate.memory)
        run.metrics |= {name: max(peak[name] for peak in peaks) for name in candidate.memory}
    finally:
        candidate.close()
    return run


def _to_gather(trainer: Any) -> dict[str, float]:
    """What FSDP would have to gather for one pass: `gathered_mb`, in so many `units`."""
    workload, recipe = trainer.workload, trainer.recipe
    trained = workload.trained(trainer.model)[1]
    lower = 0.5 if recipe.adapter == "none" and recipe.precision == "bf16" else 1.0
    return {
        "gathered_mb": lower * sum(p.nbytes for p in trained.parameters()) / 1e6,
        "units": len(workload.units(trainer.model)) + 1,
    }


def _run(job: Job, task: Task, word: RankStatus) -> Any:
    """Train with checkpoints, and fail where the task says so."""
    from labutils.recipe import Recipe
    from labutils.training import Trainer
    from labutils.training.benchmark import empty_run

    workload, recipe = _workload(job, task), Recipe(**task.recipe)
    run = empty_run(workload, recipe, task.name)

    def after_step(trainer: Trainer) -> None:
        word.say(step=trainer.step_count)
        if task.fail and (trainer.ranks.rank, trainer.step_count) == task.fails:
            _fail(task.fail)

    hook = encoded_once(workload)
    with Trainer(workload, recipe, task.folder, task.resume, dataset=hook) as trainer:
        begun_at = trainer.step_count
        began = time.perf_counter()
        trainer.run(task.steps, task.checkpoint_every, after_step)
        trainer.driver.log.flush()
        run.metrics = {
            "loss": trainer.losses,
            "resumed_at": begun_at,
            "ranks": trainer.ranks.count,
            "seconds": time.perf_counter() - began,
        }
    return run


def _fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("provoked: this rank was asked to fail here")


def _all_reduce(job: Job, task: Task, word: RankStatus) -> Any:
    from labutils.profiling.collectives import time_all_reduce
    from labutils.results.records import Run
    from labutils.training import distributed

    with _turn(task.turn, distributed.here()):
        return Run(
            "", task.name, **time_all_reduce(task.sizes, job.device, distributed.here().count)
        )


@contextmanager
def _turn(path: str, me: Any) -> Iterator[None]:
    """A context in which no other launch is that names this file; all ranks of one enter and leave
    it together.
    """
    if not path:
        yield
        return
    import fcntl

    with open(path, "a") as file:
        if me.rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        me.all(None)
        yield
        me.all(None)


TASKS: dict[str, Callable[[Job, Task, RankStatus], Any]] = {
    "train": _train,
    "run": _run,
    "all-reduce": _all_reduce,
}

if __name__ == "__main__":
    main(sys.argv[1:])
