"""Pinned memory and copies that don't wait, two by two: what each does for a step, and for how long
the host is held.

A GPU fetches from host memory by itself only where the pages are pinned; from pageable memory the
driver copies into a pinned buffer of its own first, while the host waits. A copy from pinned memory
waits too, unless it is asked not to (`non_blocking`). So there are four ways, and article A1
changes both knobs at once.
"""

from __future__ import annotations

import itertools

from labutils.profiling.timing import CallTimer
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training import Trainer, compare, measure
from labutils.workloads.base import Workload

COPIES = {
    "accelerate": ("accelerate.data_loader", "send_to_device"),
    "eager": ("labutils.training.step", "on_device"),
}
"""Driver -> (module, function) that brings a batch to the device."""


def two_by_two(
    workload: Workload, base: Recipe, steps: int, rounds: int, ahead: bool = False
) -> dict[str, Run]:
    """Way -> the run of `base` in it, with `host_copy_ms` beside the usual metrics.

    `host_copy_ms` is how long the host is inside the function that copies, over an optimizer step.
    `base` copies pageable memory and waits for it; its driver is one of `COPIES` (`KeyError`
    otherwise). ahead: whether the loop of `base` runs ahead of the GPU, for the runs' tags.
    """
    recipes, tags = {}, {}
    run_ahead = {"ahead": True} if ahead else {}
    for memory, copy in itertools.product(("pageable", "pinned"), ("blocking", "async")):
        way = f"{memory}+{copy}"
        recipes[way] = base.but(pin_memory=memory == "pinned", non_blocking=copy == "async")
        tags[way] = {"experiment": "copies", "memory": memory, "copy": copy} | run_ahead
    runs = compare(workload, recipes, steps, rounds, tags)
    for way, recipe in recipes.items():
        samples, run = _host_copy_ms(workload, recipe, steps), runs[way]
        run.samples["host_copy_ms"], run.metrics["host_copy_ms"] = samples, summarise(samples)
    return runs


def _host_copy_ms(workload: Workload, recipe: Recipe, steps: int) -> list[float]:
    with Trainer(workload, recipe) as trainer, CallTimer(*COPIES[recipe.driver]) as copies:
        measure(trainer, 3)
        copies.ms.clear()
        measure(trainer, steps)
        return copies.per(recipe.accumulation)
