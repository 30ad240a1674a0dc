"""Starting ranks from a notebook, and saying plainly what became of them.

    task = Task("train", "ddp 2", workload.opened_as(), recipe.as_dict())
    ended = launch([task], ranks=2, device="cuda")
    ended.runs["ddp 2"]; ended.message

The notebook's own process never joins a process group. The ranks are processes of their own, with
time limits, and what a rank that was killed leaves behind is cleared away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, read_records, runs_of
from labutils.training.checkpoint import step_of
from labutils.training.child_process import Child, end_marked
from labutils.training.distributed import share_of
from labutils.training.launch_worker import JOB, RUNS, RankStatus, Task

TIMEOUT_S = 420.0
PATIENCE_S = {"cuda": 120.0, "cpu": 300.0}
"""How long ranks of a launch wait for each other, if nothing else is said: longer than one of them
builds and times a model by itself. On GPUs that is much less than PyTorch's ten minutes, which a
rank that hangs would cost all others; a CPU may be busy with other things."""
MARK = "LABUTILS_LAUNCH"
SHM = Path("/dev/shm")
AGENT = Path(__file__).with_name("elastic_agent.py")
LOOK_S = 1.0
"""How often a launch looks for what its ranks have done."""


@dataclass(frozen=True)
class Ended:
    """What became of a launch.

    runs: those that were finished, by name. message: "" where all went well, else what happened,
    rank by rank, in words. first: (rank, exit code) of who failed first, a negative code being a
    signal; None where nobody did or it is unknown. ranks: the status that each rank left.
    checkpoint_step: of the whole checkpoint that there is to go on from. log: what the ranks
    printed. left: processes and files that had to be cleared away. seconds: from start to end.
    """

    runs: dict[str, Run]
    message: str = ""
    first: tuple[int, int] | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    checkpoint_step: int | None = None
    log: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

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
    patience_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    each: Callable[[Run], None] = lambda run: None,
) -> Ended:
    """Do `tasks` on that many ranks, one a GPU or, on a CPU, sharing its cores; return when all
    have ended.

    each: is called with each run soon after it is there, so that a launch that is cut off loses no
    more than one. patience_s: how long a rank waits for the others (None: `PATIENCE_S`); timeout_s:
    how long all may take. Raises `Unavailable` where there are fewer GPUs than ranks, `ValueError`
    for what can't be asked.
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
        folder, mark, began = Path(name), uuid.uuid4().hex, time.perf_counter()
        job = {
            "tasks": [asdict(task) for task in tasks],
            "folder": name,
            "device": device,
            "patience_s": patience_s or PATIENCE_S[device],
        }
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        variables = rank_variables(ranks, device) | {MARK: mark, "TMPDIR": name}
        runs: dict[str, Run] = {}
        try:
            answer, log = _agent(
                ranks, folder, variables | (environment or {}), timeout_s, runs, each
            )
        finally:  # after Ctrl-C as well
            left = _clear_away(mark)
        _look(folder, runs, each)  # what was written while the ranks were being ended
        paths = sorted(folder.glob("rank*.json"))
        statuses = [RankStatus(**json.loads(path.read_text("utf-8"))) for path in paths]
        first = _first(answer["failures"], statuses)
        step = _checkpoint_step(tasks, statuses)
        message = ""
        if answer["failures"] or answer.get("ended"):
            message = _message(answer.get("ended", ""), first, statuses, step)
        seconds = time.perf_counter() - began
        return Ended(runs, message, first, statuses, step, log + _printed(folder), left, seconds)


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


def _agent(
    ranks: int,
    folder: Path,
    variables: Mapping[str, str],
    timeout_s: float,
    runs: dict[str, Run],
    each: Callable[[Run], None],
) -> tuple[dict[str, Any], str]:
    """The agent's answer, with how it `ended` where it gave none, and what it printed. Meanwhile
    new runs are looked for.
    """
    command = ["-m", "labutils.training.launch_worker", str(folder / JOB)]
    order = {"ranks": ranks, "command": command, "logs": str(folder / "logs")}
    # By its own limit, behind ours, it would leave its ranks.
    with Child([str(AGENT)], order, timeout_s + 60, variables) as agent:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                answer = agent.receive(timeout_s=min(LOOK_S, timeout_s))
                answer = answer or {"failures": {}, "ended": agent.failure()}
                return answer, agent.printed + agent.errors()
            _look(folder, runs, each)
        agent.process.terminate()  # it ends its ranks
        with contextlib.suppress(TimeoutError):
            agent.receive(timeout_s=10)
        ended = f"it had not ended after {timeout_s:.0f} s, and was stopped"
        return {"failures": {}, "ended": ended}, agent.printed + agent.errors()


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


def _printed(folder: Path) -> str:
    """What the ranks printed, each line with its rank."""
    lines = []
    for path in sorted((folder / "logs").rglob("std*.log")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines += [f"[rank {path.parent.name}] {line}" for line in text.splitlines()]
    return "\n".join(lines)


def _first(failures: Mapping[str, int], statuses: Iterable[RankStatus]) -> tuple[int, int] | None:
    """(rank, exit code) of who failed first: one that was killed, or whose status says so first.
    (Of a rank that failed and one that lost it, elastic may see either end first.)
    """
    killed = [rank for rank, code in failures.items() if code < 0 and -code != signal.SIGTERM]
    failed = sorted((s for s in statuses if s.state == "failed"), key=lambda status: status.at)
    rank = killed[0] if killed else str(failed[0].rank) if failed else next(iter(failures), None)
    return None if rank is None else (int(rank), failures.get(rank, 1))


def _checkpoint_step(tasks: Sequence[Task], statuses: Iterable[RankStatus]) -> int | None:
    """The step of the checkpoint of the task that the ranks were in; None where there is none."""
    doing = {status.task for status in statuses}
    folders = [task.folder for task in tasks if task.name in doing and task.checkpoint_every]
    return step_of(folders[0]) if folders else None


def _message(
    ended: str, first: tuple[int, int] | None, statuses: Iterable[RankStatus], step: int | None
) -> str:
    """What happened, who began it, where each rank was, and what there is to go on from."""
    lines = [f"The launch failed: {ended}."] if ended else []
    if first and first[1] < 0:
        lines.append(f"Rank {first[0]} was killed by {signal.Signals(-first[1]).name}.")
    for status in sorted(statuses, key=lambda status: not first or status.rank != first[0]):
        at = (
            f"in optimizer step {status.step + 1} of *{status.task}*" if status.task else "at start"
        )
        if status.state == "failed":
            lines.append(f"Rank {status.rank} failed {at}: {status.error}")
        elif status.state != "done":
            lines.append(f"Rank {status.rank} was {at}.")
    if step is not None:
        lines.append(
            f"The checkpoint of optimizer step {step} is whole. Go on from it with resume=True, on "
            "any number of ranks that shares the micro-batches evenly."
        )
    return "\n".join(lines)
