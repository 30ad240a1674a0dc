"""Starting ranks from a notebook, and saying plainly what became of them.

    task = Task("train", "ddp 2", workload.opened_as(), recipe.as_dict())
    ended = launch([task], ranks=2, device="cuda")
    ended.runs["ddp 2"]; ended.message

The ranks are started by torchrun's own library, `torch.distributed.elastic`. The notebook's process
never joins their process group. They have a time limit, and what a rank that was killed leaves
behind is cleared away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import REPOSITORY, Run, read_records, runs_of
from labutils.training.checkpoint import step_of
from labutils.training.child_process import end_marked
from labutils.training.distributed import share_of
from labutils.training.launch_worker import RUNS, RankStatus, Task

TIMEOUT_S = 420.0
MARK = "LABUTILS_LAUNCH"
"""All processes of a launch carry its id in their environment under this name."""
SHM = Path("/dev/shm")
LOOK_S = 1.0
"""How often a launch looks for what its ranks have done."""


@dataclass(frozen=True)
class Ended:
    """What became of a launch.

    runs: those that were finished, by name. message: "" where all went well, else what happened,
    rank by rank, in words. first: (rank, exit code) of the rank that failed first, a negative code
    being a signal; None where none failed. ranks: the status that each rank left. checkpoint_step:
    of the whole checkpoint that there is to go on from. log: what the ranks printed. left:
    processes and files that had to be cleared away.
    """

    runs: dict[str, Run]
    message: str = ""
    first: tuple[int, int] | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    checkpoint_step: int | None = None
    log: str = ""
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.message

    def or_raise(self) -> Ended:
        """Itself. Raises `RuntimeError`, or `Unavailable` where a rank lacks something."""
        if not self.ok:
            lacking = any(status.error.startswith("Unavailable") for status in self.ranks)
            raise (Unavailable if lacking else RuntimeError)(self.message)
        return self


def launch(
    tasks: Sequence[Task],
    ranks: int,
    device: str,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    each: Callable[[Run], None] = lambda run: None,
) -> Ended:
    """Do `tasks` on that many ranks, one a GPU or, on a CPU, sharing its cores; return when all
    have ended.

    each: is called with each run soon after it is there, so that a launch that is cut off loses no
    more than one. timeout_s: how long all may take, and a rank waits for the others. Raises
    `Unavailable` where there are fewer GPUs than ranks, `ValueError` for what can't be asked.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: it takes 1 or more.")
    if device == "cuda" and ranks > gpu_count():
        raise Unavailable(
            f"{ranks} ranks need {ranks} GPUs, one each, and this machine shows {gpu_count()}"
        )
    for task in tasks:
        if task.recipe and not task.alone:
            share_of(Recipe(**task.recipe), ranks)
    with tempfile.TemporaryDirectory(prefix="labutils-ranks-", ignore_cleanup_errors=True) as name:
        folder, mark, until = Path(name), uuid.uuid4().hex, time.monotonic() + timeout_s
        todo = [asdict(task) for task in tasks]
        job = {"tasks": todo, "folder": name, "timeout_s": timeout_s}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for rank in range(ranks):  # one that can't even start has a status, too
            RankStatus(rank, name, pid=0).write()
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        variables = rank_variables(ranks, device) | (environment or {})
        variables |= {MARK: mark, "TMPDIR": name, "PYTHONPATH": path}
        runs: dict[str, Run] = {}
        with ThreadPoolExecutor(1) as pool:
            failures = pool.submit(_start, ranks, folder, variables)
            try:
                while not wait([failures], LOOK_S).done and time.monotonic() < until:
                    _look(folder, runs, each)
                in_time = failures.done()
            finally:  # after Ctrl-C as well
                left = _clear_away(mark)
        _look(folder, runs, each)  # what was written while the ranks were being ended
        stopped = "" if in_time else f"The launch had not ended after {timeout_s:.0f} s."
        told = _told(folder, tasks, failures.result() if in_time else {}, stopped)
        return Ended(runs, left=left, **told)


def _start(ranks: int, folder: Path, variables: Mapping[str, str]) -> dict[int, int]:
    """Start the ranks, as torchrun does, and wait for them; the exit codes of those that failed.

    They are those that elastic saw fail before it stopped the others; a negative one is a signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet = logging.getLogger("torch.distributed.elastic")  # what it says, `Ended.message` says
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=variables[MARK],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    settings = [f"{name}={value}" for name, value in variables.items()]
    worker = [sys.executable, "-m", "labutils.training.launch_worker", str(folder / "job.json")]
    try:
        # `env` sets variables for these ranks alone: other launches may start beside this one.
        elastic_launch(config, "env")(*settings, *worker)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def rank_variables(ranks: int, device: str) -> dict[str, str]:
    """What each rank has in its environment: the GPUs of the launch, of which it takes the one of
    its local rank, and its share of the cores. Left alone, every rank would start a thread a core.
    """
    threads = str(max(1, usable_cores() // ranks))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    gpus = ",".join(shown.split(",")[:ranks]) if device == "cuda" else ""
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": gpus,
        "TQDM_DISABLE": "1",
    }


def gpu_count() -> int:
    """GPUs that a launch may use."""
    return cuda.count()


def _look(folder: Path, runs: dict[str, Run], each: Callable[[Run], None]) -> None:
    """Add the runs that were written since, and call `each` with them."""
    records = [{"lab": "", **record} for record in read_records(folder / RUNS)]
    for run in runs_of(records):
        if run.run not in runs:
            runs[run.run] = run
            each(run)


def _clear_away(mark: str) -> list[str]:
    """End every process of a launch that is still there, and delete what it left in shared memory;
    what that was.

    A rank that is killed ends none of its DataLoader workers, and they outlive it for some seconds.
    All processes of a launch carry its mark in their environment. PyTorch's files in /dev/shm carry
    their process's number ("torch_123_...").
    """
    pids = end_marked(MARK, mark)
    left = [f"process {pid}" for pid in pids]
    for path in (path for pid in pids for path in SHM.glob(f"torch_{pid}_*")):
        with contextlib.suppress(OSError):
            path.unlink()
            left.append(str(path))
    return left


def _told(
    folder: Path, tasks: Sequence[Task], failures: Mapping[int, int], stopped: str
) -> dict[str, Any]:
    """Fields of `Ended`: what the ranks left in the launch's folder, and what it means.

    The message says what happened, which rank began it, where each rank was, and what there is to
    go on from.
    """
    paths = sorted(folder.glob("rank*.json"))
    statuses = [RankStatus(**json.loads(path.read_text("utf-8"))) for path in paths]
    log = [
        f"[rank {path.parent.name}] {line}"
        for path in sorted((folder / "logs").rglob("std*.log"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    doing = {status.task for status in statuses}
    folders = [task.folder for task in tasks if task.name in doing and task.checkpoint_every]
    step = step_of(folders[0]) if folders else None
    first = _first(failures, statuses)
    lines = [stopped] if stopped else []
    for status in sorted(statuses, key=lambda status: not first or status.rank != first[0]):
        code = failures.get(status.rank, 0)
        at = "at start"
        if status.task:
            at = f"in optimizer step {status.step + 1} of *{status.task}*"
        if status.state == "failed":
            lines.append(f"Rank {status.rank} failed {at}: {status.error}")
        elif code < 0 and code != -signal.SIGTERM:
            lines.append(f"Rank {status.rank} was killed by {signal.Signals(-code).name} {at}.")
        elif code > 0:
            said = [line for line in log if line.startswith(f"[rank {status.rank}]")]
            lines.append(f"Rank {status.rank} ended with code {code} {at}. {''.join(said[-1:])}")
        elif status.state != "done":
            lines.append(f"Rank {status.rank} was {at}.")
    if step is not None:
        lines.append(
            f"The checkpoint of optimizer step {step} is whole. Go on from it with resume=True, on "
            "any number of ranks that shares the micro-batches evenly."
        )
    message = "\n".join(lines) if stopped or failures else ""
    ended = {"message": message, "first": first, "ranks": statuses, "checkpoint_step": step}
    return ended | {"log": "\n".join(log)}


def _first(failures: Mapping[int, int], statuses: Sequence[RankStatus]) -> tuple[int, int] | None:
    """(rank, exit code) of the rank that failed first: one that was killed, or whose status says so
    first. A rank that elastic stopped ended by SIGTERM.
    """
    killed = [rank for rank, code in failures.items() if code < 0 and code != -signal.SIGTERM]
    failed = sorted((s for s in statuses if s.state == "failed"), key=lambda status: status.at)
    rank = next(iter([*killed, *(status.rank for status in failed), *failures]), None)
    return None if rank is None else (rank, failures.get(rank, 1))
