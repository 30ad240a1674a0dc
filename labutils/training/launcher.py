"""Starting ranks with torchrun from a notebook, and saying plainly what became of them.

    ended = launch([Task("train", "ddp 2", workload=order(workload), recipe=recipe.as_dict())],
    ranks=2, device="cuda") ended.runs["ddp 2"]; ended.message

The notebook's own process never joins a process group, and whatever becomes of the ranks, it goes
on: they are processes of their own, with time limits, and what a rank that was killed leaves behind
is cleared away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Unavailable
from labutils.results.records import REPOSITORY, Run, runs_of
from labutils.training.launch_worker import JOB, RUNS, Job, Task, said_of
from labutils.training.processes import end_marked

TIMEOUT_S = 420.0
PATIENCE_S = {"cuda": 120.0, "cpu": 300.0}
"""How long ranks of a launch wait for each other, if nothing else is said: longer than one of them
builds and times a model by itself. On GPUs that is much less than PyTorch's ten minutes, which a
rank that hangs would cost all others; a CPU may be busy with other things."""
MARK = "LABUTILS_LAUNCH"
SHM = Path("/dev/shm")
_FIRST = re.compile(
    r"first observed failure\):\s*\[\d+\]:.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL
)


@dataclass(frozen=True)
class Ended:
    """What became of a launch: the runs that were finished, and, where it failed, who failed first
    and where each rank was.

    message: "" where all went well, else what happened, rank by rank, in words. first: (rank, exit
    code) by torchrun's account, a negative code being a signal. words: the ranks' own last ones.
    log: what they printed. left: processes and files that had to be cleared away. seconds: from
    start to end.
    """

    runs: dict[str, Run]
    message: str = ""
    first: tuple[int, int] | None = None
    words: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.message

    def or_raise(self) -> Ended:
        """Itself, or a `RuntimeError` (`Unavailable` where a rank said that it lacks something)
        with the message.
        """
        if not self.ok:
            lacking = any("Unavailable" in word.get("message", "") for word in self.words)
            raise (Unavailable if lacking else RuntimeError)(self.message)
        return self


def launch(
    tasks: Sequence[Task],
    ranks: int,
    device: str,
    timeout_s: float = TIMEOUT_S,
    patience_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    each: Callable[[Run], None] = lambda run: None,
) -> Ended:
    """Do `tasks` on that many ranks, one a GPU or, on a CPU, sharing its cores; return when all
    have ended.

    each: called with each run soon after it is there, so that a launch that is cut off loses no
    more than one. patience_s: how long a rank waits for the others (None: `PATIENCE_S`); timeout_s:
    how long all may take. port: where ranks meet; None: one that is free. Raises `Unavailable`
    where there are fewer GPUs than ranks, `ValueError` for what can't be asked.
    """
    _check(tasks, ranks, device, port)
    with tempfile.TemporaryDirectory(prefix="labutils-ranks-", ignore_cleanup_errors=True) as name:
        folder, mark, began = Path(name), uuid.uuid4().hex, time.perf_counter()
        job = Job(tuple(tasks), name, device, patience_s or PATIENCE_S[device])
        (folder / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
        variables = (
            os.environ
            | rank_variables(ranks, device)
            | {MARK: mark, "TMPDIR": name}
            | (environment or {})
        )
        left: list[str] = []
        runs: dict[str, Run] = {}

        def look() -> None:
            for (_, name), run in runs_of(_records(folder / RUNS)).items():
                if name not in runs:
                    runs[name] = run
                    each(run)

        try:
            code, output = _torchrun(ranks, folder, port, variables, timeout_s, look)
        finally:  # after Ctrl-C as well
            left += clear_away(mark)
        look()  # what was written while the ranks were being ended
        words, first = _words(folder), _first(output)
        message = "" if code == 0 else _message(code, first, words, tasks, output, timeout_s)
        seconds = time.perf_counter() - began
        return Ended(runs, message, first, words, output + _printed(folder), left, seconds)


def command(ranks: int, job: str | Path, port: int | None = None, *more: str) -> list[str]:
    """What starts the ranks, here or in a terminal."""
    meet = (
        ["--standalone"]
        if port is None
        else ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    )
    start = [
        "-m",
        "torch.distributed.run",
        *meet,
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
    ]
    return [sys.executable, *start, *more, "-m", "labutils.training.launch_worker", str(job)]


def rank_variables(ranks: int, device: str) -> dict[str, str]:
    """What each rank finds in its environment: the GPUs of the launch, of which it takes the one of
    its local rank, and its share of the cores.

    Left alone, every rank would start a thread a core for each operation. (torchrun sets 1 where
    nothing is set.)
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


def _check(tasks: Sequence[Task], ranks: int, device: str, port: int | None) -> None:
    from labutils.recipe import Recipe
    from labutils.training.distributed import share_of

    if ranks < 1:
        raise ValueError(f"ranks={ranks}: it takes 1 or more.")
    if device == "cuda" and ranks > gpu_count():
        raise Unavailable(
            f"{ranks} ranks need {ranks} GPUs, one each, and this machine shows {gpu_count()}"
        )
    for task in tasks:
        if task.recipe and not task.alone:
            share_of(Recipe(**task.recipe), ranks)
    if port is not None:
        _check_port(port)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"port={port} can't be used ({error}): another torchrun may be meeting there. "
                "Choose another one, or "
                "leave it out: a free one is found."
            ) from None


LOOK_S = 1.0
"""How often a launch looks for what its ranks have done."""


def _torchrun(
    ranks: int,
    folder: Path,
    port: int | None,
    variables: Mapping[str, str],
    timeout_s: float,
    look: Callable[[], None],
) -> tuple[int | None, str]:
    """torchrun's exit code (None: it took too long and was ended) and what it printed itself;
    meanwhile, and once after, it will `look`."""
    logs = [f"--log-dir={folder / 'logs'}", "--redirects=3"]
    with (folder / "torchrun.log").open("w+", encoding="utf-8", errors="replace") as output:
        agent = subprocess.Popen(
            command(ranks, folder / JOB, port, *logs),
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env=dict(variables),
        )
        code, until = None, time.monotonic() + timeout_s
        try:
            while code is None and time.monotonic() < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = agent.wait(min(LOOK_S, timeout_s))
                look()
            if code is None:
                agent.terminate()  # it ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(10)
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        output.seek(0)
        return code, output.read()


def clear_away(mark: str) -> list[str]:
    """End every process of a launch that is still there, and delete what it left in shared memory;
    what that was.

    A rank that is killed ends none of its DataLoader workers, and they outlive it for some seconds.
    All processes of a launch carry its mark in their environment, wherever the system has hung
    them.
    """
    pids = end_marked(MARK, mark)
    left = [f"process {pid}" for pid in pids]
    for path in _shared_files(pids):
        with contextlib.suppress(OSError):
            path.unlink()
            left.append(str(path))
    return left


def _shared_files(pids: Iterable[int]) -> list[Path]:
    """Files in /dev/shm that carry the number of one of these processes, as PyTorch's do
    ("torch_123_...").
    """
    if not SHM.is_dir():
        return []
    return [path for pid in pids for path in SHM.glob(f"torch_{pid}_*")]


def _records(path: Path) -> list[dict[str, Any]]:
    from labutils.results.records import read_records

    return [{"lab": "", **record} for record in read_records(path)]


def _words(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank*.json"))
    ]


def _printed(folder: Path) -> str:
    """What the ranks printed, each line with its rank."""
    lines = []
    for path in sorted((folder / "logs").rglob("std*.log")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines += [f"[rank {path.parent.name}] {line}" for line in text.splitlines()]
    return "\n".join(lines)


def _first(output: str) -> tuple[int, int] | None:
    """(rank, exit code) of who failed first, by torchrun's own account; None where it gives none."""
    found = _FIRST.search(output)
    return (int(found[1]), int(found[2])) if found else None


def _message(
    ended: int | None,
    first: tuple[int, int] | None,
    words: list[dict[str, Any]],
    tasks: Sequence[Task],
    output: str,
    timeout_s: float,
) -> str:
    """What happened, who began it, where each rank was, what is left, and what to type."""
    if not words:
        last = (output.strip().splitlines() or ["nothing was printed"])[-1]
        how = (
            f"had not ended after {timeout_s:.0f} s"
            if ended is None
            else f"ended with code {ended}"
        )
        return f"torchrun {how} before any rank began: {last}"
    # Of a rank that failed and one that lost it, torchrun may see either end first: the ranks'
    # words decide.
    own = next((word for word in words if word["state"] == "failed"), None)
    if own is not None:
        lines = [said_of(own)]
    elif ended is None:
        lines = [f"The ranks had not ended after {timeout_s:.0f} s, and were stopped."]
    elif first is not None and first[1] < 0:
        lines = [f"Rank {first[0]} {_killed(-first[1])}."]
    else:
        lines = [f"torchrun ended with code {ended}."]
    lines += [said_of(word) for word in words if word is not own and word["state"] != "done"]
    return "\n".join([*lines, *_left_over(tasks, words)])


def _killed(number: int) -> str:
    import signal

    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    why = {
        "SIGKILL": "the system does that when memory runs out, or somebody did",
        "SIGSEGV": "a library crashed",
        "SIGBUS": "/dev/shm may be too small",
    }.get(name, "")
    return f"was killed by {name}" + (f" ({why})" if why else "")


def _left_over(tasks: Sequence[Task], words: list[dict[str, Any]]) -> list[str]:
    """What there is to go on from."""
    from labutils.training.checkpoint import step_of

    doing = {word["doing"] for word in words}
    lines = []
    for task in tasks:
        if task.name in doing and task.checkpoint_every:
            step = step_of(Path(task.folder))
            if step is None:
                lines.append(f"There is no whole checkpoint in {task.folder}: start again.")
                continue
            shared = task.recipe["accumulation"]
            fitting = ", ".join(str(ranks) for ranks in range(1, shared + 1) if shared % ranks == 0)
            lines.append(
                f"The checkpoint of optimizer step {step} is whole: {task.folder}. Go on from it "
                "with resume=True, on "
                f"any number of ranks that shares {shared} micro-batches evenly: {fitting}."
            )
    return lines


def remove(folder: str | Path) -> None:
    """Delete a folder of checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
