"""Starting ranks from a notebook, and saying plainly what became of them.

    timed = Timed("ddp 2", "all", recipe.as_dict())
    task = Task("train", "ddp", workload.opened_as(), timed=[asdict(timed)])
    ended = launch([task], ranks=2, device="cuda")
    ended.runs["ddp 2"]; ended.message

The ranks are started by torchrun's own library, `torch.distributed.elastic`. The notebook's process
never joins their process group. They have a time limit, and processes that a killed rank leaves
behind are ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Unavailable
from labutils.results.records import Run, read_records, runs_of
from labutils.training.child_process import end_marked, marked, python_path
from labutils.training.launch_worker import RUNS, RankStatus, Task

TIMEOUT_S = 420.0
MARK = "LABUTILS_LAUNCH"
"""All processes of a launch carry its id in their environment under this name."""
LOOK_S = 1.0
"""How often a launch looks for what its ranks have done."""


@dataclass(frozen=True)
class Ended:
    """What became of a launch.

    runs: those that were finished, by name. message: "" where all went well, else what happened,
    rank by rank, in words, the one that failed first before the others. log: what the ranks
    printed. left: numbers of the processes that outlived it and were ended.
    """

    runs: dict[str, Run]
    message: str = ""
    log: str = ""
    left: Sequence[int] = ()

    def or_raise(self) -> Ended:
        """Itself. Raises `RuntimeError` where not all went well."""
        if self.message:
            raise RuntimeError(self.message)
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
    have ended. A task in which a rank fails ends the launch, and those behind it are not done.

    each: is called with each run soon after it is there, so that a launch that is cut off loses no
    more than one. timeout_s: how long all may take, and a rank waits for the others. Raises
    `Unavailable` where there are fewer GPUs than ranks, `ValueError` for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: it takes 1 or more.")
    if device == "cuda" and ranks > cuda.count():
        raise Unavailable(
            f"{ranks} ranks need {ranks} GPUs, one each, and this machine shows {cuda.count()}"
        )
    with tempfile.TemporaryDirectory(prefix="labutils-ranks-", ignore_cleanup_errors=True) as name:
        folder, mark, until = Path(name), uuid.uuid4().hex, time.monotonic() + timeout_s
        job = {"tasks": [*map(asdict, tasks)], "folder": name, "timeout_s": timeout_s}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        variables = rank_variables(ranks, device) | (environment or {})
        variables |= {MARK: mark, "TMPDIR": name, "PYTHONPATH": python_path()}
        runs: dict[str, Run] = {}
        with ThreadPoolExecutor(1) as pool:
            failures = pool.submit(_start, ranks, folder, variables)
            try:
                while not wait([failures], LOOK_S).done and time.monotonic() < until:
                    _look(folder, runs, each)
                in_time = failures.done()
                for rank in [] if in_time else marked(MARK, mark):  # they print where they stand
                    with contextlib.suppress(psutil.Error):
                        rank.send_signal(signal.SIGUSR1)
                time.sleep(0.0 if in_time else LOOK_S)
            finally:  # after Ctrl-C as well
                # A rank that is killed ends none of its DataLoader workers.
                left = end_marked(MARK, mark)
                while not wait([failures], LOOK_S).done:  # ranks that were only being started
                    left += end_marked(MARK, mark)
        _look(folder, runs, each)  # what was written while the ranks were being ended
        log = _log(folder)
        message = ""
        if not in_time or failures.result():
            codes = failures.result() if in_time else {}
            message = _account(folder, ranks, codes, log)
            if not in_time:
                message = f"The launch had not ended after {timeout_s:.0f} s.\n{message}"
        return Ended(runs, message, log, left)


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
        elastic_launch(config, "env")(*settings, *worker)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def rank_variables(ranks: int, device: str) -> dict[str, str]:
    """What each rank has in its environment beside this process's own: its share of the cores. Left
    alone, every rank would start a thread a core.
    """
    variables = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), "TQDM_DISABLE": "1"}
    return variables | ({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})


def _look(folder: Path, runs: dict[str, Run], each: Callable[[Run], None]) -> None:
    """Add the runs that were written since, and call `each` with them."""
    for run in runs_of(read_records(folder / RUNS)):
        if run.run not in runs:
            runs[run.run] = run
            each(run)


def _log(folder: Path) -> str:
    """What the ranks printed, each line behind the number of its rank."""
    return "\n".join(
        f"[rank {path.parent.name}] {line}"
        for path in sorted((folder / "logs").rglob("std*.log"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    )


def _account(folder: Path, ranks: int, codes: Mapping[int, int], log: str) -> str:
    """What became of each rank that isn't done, in a line each, the one that failed first on top.

    codes: exit codes of the ranks that failed. That one is killed comes before what others raise
    when they lose it. A rank that elastic stopped ended by SIGTERM.
    """
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    statuses = [RankStatus.read(folder, rank) for rank in range(ranks)]
    raised = sorted((s for s in statuses if s.error), key=lambda status: status.at)
    first = next(iter([*killed, *(status.rank for status in raised), *codes]), None)
    lines = []
    for status in sorted(statuses, key=lambda status: status.rank != first):
        rank, at = status.rank, f"in *{status.task}*" if status.task else "at start"
        if status.error:
            lines.append(f"Rank {rank} failed {at}: {status.error}")
        elif rank in killed:
            lines.append(f"Rank {rank} was killed by {signal.Signals(-codes[rank]).name} {at}.")
        elif codes.get(rank, 0) > 0:
            said = [line for line in log.splitlines() if line.startswith(f"[rank {rank}]")]
            lines.append(f"Rank {rank} ended with code {codes[rank]} {at}. {''.join(said[-1:])}")
        elif not status.done:
            lines.append(f"Rank {rank} was {at}.")
    return "\n".join(lines)
