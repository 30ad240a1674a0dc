"""How DataLoader workers run out of shared memory, tried for real where it can do no harm.

A worker hands a batch over through a file in /dev/shm, which lives in memory. Up to `num_workers *
prefetch_factor` batches wait there, and the training loop holds one more. A container's /dev/shm
has 64 MB unless told otherwise: with batches of 3.1 MB it is full at 21 of them, and 12 workers
with a prefetch factor of 2 want 25.

`try_workers` runs a real DataLoader in a process of its own that sees a /dev/shm of the given size,
watches it, and ends it if it hangs: recent PyTorch doesn't crash here. The worker that can't get
memory reports it from a background thread and drops the batch, and the training loop waits for that
batch forever.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labutils.recipe import STOCK, Recipe
from labutils.training.child_process import end_group

CONTAINER_DEFAULT = 64 * 2**20
"""Bytes of /dev/shm that Docker and Kubernetes give a container."""

PAGE = 4096
HELD_BY_TRAINING = 1
"""Batches that the training loop holds: the one in use. (accelerate fetches the next one early, and
so holds two.)
"""

SEMAPHORES, SEMAPHORES_EACH = 8, 3
"""Pages of /dev/shm that multiprocessing's locks take: those of the loader, and those of each
worker's queue.
"""

FILES = 8
"""Distinct images that the child loads, over and over."""

SHM = Path("/dev/shm")
NEW_MOUNTS = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
"""Ways to a process with mounts of its own: as the administrator, or as the root of a user
namespace.
"""


def batch_bytes(micro_batch: int = 1, resolution: int = 512, tokens: int = 77) -> int:
    """Bytes of shared memory that one batch takes: float32 pixels and int64 ids, each rounded up to
    whole pages.
    """
    tensors = (micro_batch * 3 * resolution * resolution * 4, micro_batch * tokens * 8)
    return sum(-(-size // PAGE) * PAGE for size in tensors)


def needed_bytes(recipe: Recipe, resolution: int = 512) -> int:
    """Bytes of /dev/shm that the recipe's workers fill at most, 0 without workers."""
    if recipe.num_workers == 0:
        return 0
    batches = recipe.num_workers * recipe.prefetch_factor + HELD_BY_TRAINING
    locks = (SEMAPHORES + recipe.num_workers * SEMAPHORES_EACH) * PAGE
    return batches * batch_bytes(recipe.micro_batch, resolution) + locks


def most_workers(shm_bytes: int, recipe: Recipe, resolution: int = 512) -> int:
    """The largest number of workers whose batches fit into `shm_bytes`."""
    workers = 0
    while needed_bytes(recipe.but(num_workers=workers + 1), resolution) <= shm_bytes:
        workers += 1
    return workers


def those_that_fit(
    recipes: Mapping[str, Recipe], resolution: int = 512, free: int | None = None
) -> dict[str, Recipe]:
    """The recipes whose workers can live side by side in the `free` bytes, in order. None: what
    /dev/shm has free now.

    One that would not fit beside those before it is left out: it would not fail, it would hang.
    """
    if free is None:
        free = shutil.disk_usage(SHM).free if SHM.is_dir() else sys.maxsize
    chosen = {}
    for name, recipe in recipes.items():
        needed = needed_bytes(recipe, resolution)
        if needed <= free:
            chosen[name] = recipe
            free -= needed
    return chosen


@dataclass(frozen=True)
class Trial:
    """What became of a DataLoader with `workers` workers and a /dev/shm of `shm_bytes`.

    `outcome`: "ok", "hung" (the loop waited for a batch that never came), "crashed", or "not
    possible" (this machine doesn't let us give a process a /dev/shm of its own); `message` says why
    in what PyTorch or the system printed. `batches` of `wanted` arrived; `peak_bytes` of /dev/shm
    were in use at most, as the training loop saw it.
    """

    workers: int
    shm_bytes: int
    outcome: str
    message: str = ""
    batches: int = 0
    wanted: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, Any]:
        """The numbers of a Run: `failed` is 1 if the loop got stuck or died. Empty where nothing
        could be tried.
        """
        if self.outcome == "not possible":
            return {}
        facts = asdict(self)
        facts["shm_gb"], facts["peak_gb"] = (
            facts.pop("shm_bytes") / 1e9,
            facts.pop("peak_bytes") / 1e9,
        )
        return {"failed": int(self.outcome != "ok")} | facts


class Task(NamedTuple):
    """What the child process is to do."""

    cache_dir: str
    workers: int
    shm_bytes: int
    resolution: int
    head_start_s: float


def try_workers(
    cache_dir: str | Path,
    workers: int,
    shm_bytes: int,
    resolution: int = 512,
    head_start_s: float = 1.5,
    patience_s: float = 2.0,
    limit_s: float = 60.0,
) -> Trial:
    """Load batches of the generated images with `workers` workers in a child process whose /dev/shm
    has `shm_bytes`.

    The child takes one batch, waits (as in a first training step) until nothing has come for
    `head_start_s`, and then takes the others. It counts as hung when a worker reported a failure
    and nothing came for `patience_s`, or after `limit_s`. This process, its /dev/shm and the
    machine's are not touched, whatever happens.
    """
    command = _in_own_shm(shm_bytes, needed_bytes(STOCK.but(num_workers=workers), resolution))
    if command is None:
        return Trial(workers, shm_bytes, "not possible", _why_not())
    task = Task(str(cache_dir), workers, shm_bytes, resolution, head_start_s)
    child = subprocess.Popen(
        [*command, sys.executable, "-m", __name__, json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ
        | {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        return _watch(child, task, patience_s, limit_s)
    finally:
        _end(child)


# ----------------------------------------------------------------------------------- the parent


def _in_own_shm(shm_bytes: int, needed: int) -> list[str] | None:
    """The command prefix that gives a process a /dev/shm of `shm_bytes`, None where nothing can.

    [] (none needed) where this machine's own has that size, or where both are larger than what is
    `needed`.
    """
    if not SHM.is_dir():
        return None
    mount = f'mount -t tmpfs -o size={shm_bytes} tmpfs {SHM} && exec "$@"'
    for way in NEW_MOUNTS:
        prefix = [*way, "sh", "-c", mount, "sh"]
        if shutil.which(way[0]) and _works([*prefix, "true"]):
            return prefix
    own = shutil.disk_usage(SHM).free
    return [] if abs(own - shm_bytes) < PAGE or min(own, shm_bytes) >= needed else None


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _why_not() -> str:
    if not SHM.is_dir():
        return f"{SHM} does not exist on this system: only Linux hands batches over that way."
    size = shutil.disk_usage(SHM).total / 2**20
    return (
        f"This process may not mount a small {SHM} for a child (`unshare --mount` is refused, as "
        "in most containers), "
        f"and its own has {size:,.0f} MiB. To see the failure, start the container with "
        "--shm-size=64m."
    )


def _watch(child: subprocess.Popen, task: Task, patience_s: float, limit_s: float) -> Trial:
    """Read the child's progress and complaints until it ends, hangs, or runs out of time."""
    started = last = time.monotonic()
    progress: dict[str, int] = {}
    complaints = b""
    outcome = ""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while selector.get_map() and not outcome:
            for key, _ in selector.select(timeout=0.2):
                text = os.read(key.fd, 65536)
                if not text:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stdout:
                    last = time.monotonic()
                    progress |= _last_report(text)
                else:
                    complaints += text
                    last = time.monotonic() if b"Error" in text else last
            patience = patience_s + (task.head_start_s if progress.get("batches", 0) <= 1 else 0)
            stuck = b"Error" in complaints and time.monotonic() - last > patience
            if stuck or time.monotonic() - started > limit_s:
                outcome = "hung"
    if not outcome:
        outcome = "ok" if child.wait() == 0 else "crashed"
    message = (
        ""
        if outcome == "ok"
        else _essence(complaints.decode(errors="replace"), child.returncode, limit_s)
    )
    seconds = round(time.monotonic() - started, 1)
    return Trial(task.workers, task.shm_bytes, outcome, message, seconds=seconds, **progress)


def _last_report(text: bytes) -> dict[str, int]:
    """The last whole line of the child's reports that is one."""
    for line in reversed(text.decode(errors="replace").splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    return {}


def _essence(complaints: str, code: int | None, limit_s: float) -> str:
    """The line of a traceback that says what happened; of several workers' lines, the first."""
    telling = ("shared memory", "Bus error", "No space left")
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    named = [line for line in lines if any(word in line for word in telling) and "Error" in line]
    if named:
        return named[0]
    if code is not None and code < 0:
        return f"Killed by signal {signal.Signals(-code).name}."
    return lines[-1] if lines else f"No batch for {limit_s:.0f} s, and no message."


def _end(child: subprocess.Popen) -> None:
    """End the child and its workers: they are one process group, started for this alone."""
    end_group(child)
    child.stdout.close()
    child.stderr.close()


# ------------------------------------------------------------------------------------ the child


def _let_workers_run_ahead(quiet_s: float) -> None:
    """Wait until /dev/shm hasn't grown for `quiet_s`, as it does while workers on slow or busy
    cores still read.
    """
    used, grew, end = 0, time.monotonic(), time.monotonic() + 10 * quiet_s
    while time.monotonic() < min(grew + quiet_s, end):
        time.sleep(0.1)
        if (now_used := shutil.disk_usage(SHM).used) > used:
            used, grew = now_used, time.monotonic()


def _load(task: Task) -> None:
    """The child: one DataLoader pass, a line of progress for each batch."""
    import warnings

    from labutils.data.images import captioned_images, image_text_dataset
    from labutils.data.loader import make_loader
    from labutils.data.tokenizers import clip_tokenizer

    warnings.filterwarnings(
        "ignore", message="This DataLoader will create"
    )  # more workers than cores: on purpose
    recipe = STOCK.but(num_workers=task.workers)
    wanted = task.workers * recipe.prefetch_factor + task.workers
    images = captioned_images(task.cache_dir, FILES)
    examples = image_text_dataset(images, clip_tokenizer(), task.resolution)
    loader = make_loader(examples, recipe, epoch_length=wanted)
    peak = 0
    for number, _ in enumerate(loader, start=1):
        print(json.dumps({"batches": number, "wanted": wanted, "peak_bytes": peak}), flush=True)
        if number == 1:
            _let_workers_run_ahead(task.head_start_s)
        peak = max(peak, shutil.disk_usage(SHM).used)
    print(json.dumps({"batches": number, "wanted": wanted, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    _load(Task(*json.loads(sys.argv[1])))
