"""The stock recipe with different numbers of DataLoader workers, in turns in one process."""

from __future__ import annotations

from collections.abc import Sequence

from labutils.labs.lab03_shared_memory import those_that_fit
from labutils.recipe import STOCK
from labutils.results.records import Run
from labutils.training import Benchmark


def sweep(
    bench: Benchmark, workers: Sequence[int], steps: int = 1, rounds: int | None = None
) -> dict[str, Run]:
    """Name -> run of the stock recipe with so many workers. On a GPU also "3 workers, prefetch 1"
    and "3 workers, pinned", in the same rounds.

    What does not fit into /dev/shm is skipped: it would not fail but hang.
    """
    recipes = {f"workers={n}": STOCK.but(num_workers=n) for n in workers}
    tags = {f"workers={n}": {"experiment": "workers", "workers": n} for n in workers}
    if bench.workload.device.type == "cuda":
        three = STOCK.but(num_workers=3)
        one, pinned = "3 workers, prefetch 1", "3 workers, pinned"
        recipes[one] = three.but(prefetch_factor=1)
        recipes[pinned] = three.but(pin_memory=True, non_blocking=True)
        tags |= {one: {"experiment": "prefetch", "prefetch": 1}}
        tags |= {pinned: {"experiment": "copies", "memory": "pinned", "copy": "async"}}
    fitting = those_that_fit(recipes, bench.workload.size.resolution)
    runs = bench.compare(fitting, steps, rounds, tags)
    why = "skipped: it does not fit in /dev/shm beside the others (docker run --shm-size=1g)"
    for name in recipes.keys() - fitting.keys():
        runs[name] = Run("03", name, status=why, tags=tags[name])
    return runs
