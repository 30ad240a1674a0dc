"""How DataLoader workers run out of shared memory, tried for real where it can do no harm.

A worker hands a batch over through a file in /dev/shm, which lies in memory. Up to `num_workers *
prefetch_factor` batches wait there, and the training loop holds one more. A container's /dev/shm
has 64 MB unless told otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from labutils.labs import lab03_small_shm
from labutils.labs.lab03_small_shm import SHM
from labutils.recipe import Recipe
from labutils.results.records import Run

PAGE = 4096
"""A batch's token ids take a page."""
LIMIT_S = 180.0
NEW_MOUNTS = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
"""Ways to a process with mounts of its own: as the administrator, or as the root of a user
namespace."""
CURE = "To see the failure, start the container with --shm-size=64m"


def needed_bytes(recipe: Recipe, resolution: int = 512) -> int:
    """Bytes of /dev/shm that the recipe's workers fill at most, 0 without workers."""
    batch = recipe.micro_batch * (3 * resolution * resolution * 4 + PAGE)
    return (recipe.num_workers * recipe.prefetch_factor + 1) * batch if recipe.num_workers else 0


def those_that_fit(
    recipes: Mapping[str, Recipe], resolution: int = 512, free: int | None = None
) -> dict[str, Recipe]:
    """The recipes whose workers can live side by side in the `free` bytes, in order. None: what
    /dev/shm has free now.

    One that would not fit beside those before it is left out: it would not fail, it would hang.
    """
    if free is None:
        free = shutil.disk_usage(SHM).free if os.path.isdir(SHM) else sys.maxsize
    chosen = {}
    for name, recipe in recipes.items():
        if (needed := needed_bytes(recipe, resolution)) <= free:
            chosen[name] = recipe
            free -= needed
    return chosen


def try_workers(workers: int = 12, size: str = "64m") -> dict[str, Run]:
    """Name -> run of `lab03_small_shm` in a process whose /dev/shm has `size` ("tiny"), and then
    1 GiB ("enough"). This process, its /dev/shm and the machine's are not touched.

    Metrics: `outcome` is "ok", "hung" (the loop waited for a batch that never came) or what was
    raised, `failed` 1 for all but "ok", `message` what was printed of it. `batches` of `wanted`
    arrived; `peak_gb` of the `shm_gb` were in use at most. Where nobody may mount a /dev/shm for a
    child, the status says so, and there are no metrics.
    """
    runs = {
        name: Run("03", f"shm={name}", tags={"experiment": "shm", "shm": name})
        for name in ("tiny", "enough")
    }
    mount = f'mount -t tmpfs -o size={size} tmpfs {SHM} && exec "$@"'
    prefixes = ([*way, "sh", "-c", mount, "sh"] for way in NEW_MOUNTS)
    prefix = next((prefix for prefix in prefixes if _works(prefix)), None)
    if prefix is None:
        for run in runs.values():
            run.status = f"skipped: This process may not mount a {SHM} for a child. {CURE}"
        return runs
    command = [*prefix, sys.executable, lab03_small_shm.__file__, str(workers)]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | quiet
    )
    named = [line for line in done.stderr.splitlines() if "shared memory" in line]
    for run, line in zip(runs.values(), done.stdout.splitlines(), strict=False):
        run.metrics = {"workers": workers} | json.loads(line)
        failed = run.metrics["outcome"] != "ok"
        said = [*named, str(run.metrics["outcome"])][0] if failed else ""
        run.metrics |= {"failed": int(failed), "message": said}
    for run in runs.values():
        if not run.metrics:
            run.status = f"error: the child ended with {done.returncode}: {done.stderr[-200:]}"
    return runs


def _works(prefix: list[str]) -> bool:
    """Whether this machine lets us start a process in that way."""
    found = shutil.which(prefix[0]) and os.path.isdir(SHM)
    return bool(found) and not subprocess.run([*prefix, "true"], capture_output=True).returncode
