"""How DataLoader workers run out of shared memory, tried for real where it can do no harm.

A worker hands a batch over through a file in /dev/shm, which lives in memory. Up to `num_workers *
prefetch_factor` batches wait there, and the training loop holds one more. A container's /dev/shm
has 64 MB unless told otherwise: with batches of 3.1 MB it is full at 21 of them, and 12 workers
with a prefetch factor of 2 want 25.

`try_workers` runs a real DataLoader in a process of its own that sees a /dev/shm of the given size.
Recent PyTorch doesn't crash there. The worker that can't get memory reports it from a background
thread and drops the batch, and the training loop would wait for that batch forever. The loader's
`timeout` ends the wait.

    run = try_workers(lab.cache_dir, 12, 64 * 2**20)
    run.metrics["outcome"]   # "hung"
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from labutils.recipe import STOCK, Recipe
from labutils.results.records import Run
from labutils.training import child_process
from labutils.training.child_process import Child

PAGE = 4096
PATIENCE_S = 8
"""Seconds without a batch after which a loader counts as hung."""
QUIET_S = 5
"""Seconds in which /dev/shm hasn't grown, after which no more batches are expected in it."""
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


def try_workers(cache_dir: str | Path, workers: int, shm_bytes: int, limit_s: float = 60.0) -> Run:
    """Load batches of the generated images with `workers` workers in a child process whose /dev/shm
    has `shm_bytes`. The child is ended after `limit_s`. This process, its /dev/shm and the
    machine's are not touched, whatever happens.

    Metrics: `outcome` is "ok", "hung" (the loop waited for a batch that never came) or "crashed",
    `failed` 1 for the latter two, and `message` what PyTorch or the system printed about it.
    `batches` of `wanted` arrived; `peak_gb` of the `shm_gb` of /dev/shm were in use at most, as the
    training loop saw it. Where this machine doesn't let us give a process a /dev/shm of its own,
    the status says so, and there are no metrics.
    """
    run = Run("03", "", tags={"experiment": "shm"})
    prefix = _own_shm(shm_bytes, needed_bytes(STOCK.but(num_workers=workers)))
    if prefix is None:
        size = shutil.disk_usage(SHM).total / 2**20 if SHM.is_dir() else 0
        run.status = (
            f"skipped: This process may not mount a small {SHM} for a child, and its own has "
            f"{size:,.0f} MiB. To see the failure, start the container with --shm-size=64m."
        )
        return run
    quiet = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ["-m", __name__, str(cache_dir), str(workers)]
    run.metrics = {"workers": workers, "shm_gb": shm_bytes / 1e9}
    with Child(arguments, limit_s=limit_s, environment=quiet, prefix=prefix) as child:
        while progress := child.receive():
            run.metrics |= progress
        outcome = "ok" if child.process.wait() == 0 else "crashed"
        outcome = run.metrics.setdefault("outcome", "hung" if child.timed_out else outcome)
        errors = [line.strip() for line in child.errors().splitlines() if line.strip()]
    words = ("shared memory", "Bus error", "No space left")
    named = [line for line in errors if any(word in line for word in words)]
    message = "" if outcome == "ok" else [*named, *errors[-1:], "No message."][0]
    run.metrics |= {"failed": int(outcome != "ok"), "message": message}
    return run


def _own_shm(shm_bytes: int, needed: int) -> list[str] | None:
    """The command prefix that gives a process a /dev/shm of `shm_bytes`, None where nothing can.

    [] where this machine's own has that size, or where both are larger than what is `needed`.
    """
    if not SHM.is_dir():
        return None
    mount = f'mount -t tmpfs -o size={shm_bytes} tmpfs {SHM} && exec "$@"'
    for way in NEW_MOUNTS:
        prefix = [*way, "sh", "-c", mount, "sh"]
        if (
            shutil.which(way[0])
            and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
        ):
            return prefix
    own = shutil.disk_usage(SHM).free
    return [] if abs(own - shm_bytes) < PAGE or min(own, shm_bytes) >= needed else None


def _load(cache_dir: str, workers: int) -> None:
    """The child: one pass of a DataLoader, a line of progress for each batch."""
    import warnings

    from labutils.data.images import captioned_images, image_text_dataset
    from labutils.data.loader import make_loader
    from labutils.data.tokenizers import clip_tokenizer

    # More workers than cores: on purpose.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    recipe = STOCK.but(num_workers=workers)
    ready = workers * recipe.prefetch_factor
    wanted = ready + workers
    images = captioned_images(cache_dir, FILES)
    examples = image_text_dataset(images, clip_tokenizer(), 512)
    loader = make_loader(examples, recipe, epoch_length=wanted)
    loader.timeout = PATIENCE_S
    report = {"batches": 0, "wanted": wanted, "peak_gb": 0.0}
    batches = iter(loader)
    try:
        while report["batches"] < wanted:
            # A name that held this batch while the next one is fetched would be a batch more: a
            # worker begins another as soon as one is taken.
            next(batches)
            report["batches"] += 1
            if report["batches"] == 1:
                _let_workers_run_ahead(ready * batch_bytes())  # as in a first training step
            report["peak_gb"] = max(report["peak_gb"], shutil.disk_usage(SHM).used / 1e9)
            child_process.send(report)
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        child_process.send(report | {"outcome": "hung"})
        os._exit(0)  # its workers end with it; joining those that hang would take a while


def _let_workers_run_ahead(full: int) -> None:
    """Wait until batches of `full` bytes are ready in /dev/shm, or until it hasn't grown for
    `QUIET_S`, as where no more fit: workers on busy cores still read."""
    most, grew = 0, time.monotonic()
    while most < full and time.monotonic() < grew + QUIET_S:
        time.sleep(0.1)
        if (used := shutil.disk_usage(SHM).used) > most:
            most, grew = used, time.monotonic()


if __name__ == "__main__":
    _load(sys.argv[1], int(sys.argv[2]))
