"""Pinned memory and copies that don't wait, two by two: what each does for a step, and for how long
the host is held.

A GPU fetches from host memory by itself only where the pages are pinned; from pageable memory the
driver copies into a pinned buffer of its own first, while the host waits. A copy from pinned memory
waits too, unless it is asked not to (`non_blocking`). So there are four ways, and article A1
changes both knobs at once.
"""

from __future__ import annotations

from labutils.profiling.timing import CallTimer
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training import Trainer, compare, measure
from labutils.workloads.base import Workload

WAYS = {
    "pageable+blocking": {},
    "pageable+async": {"non_blocking": True},
    "pinned+blocking": {"pin_memory": True},
    "pinned+async": {"pin_memory": True, "non_blocking": True},
}

COPIES = {
    "accelerate": ("accelerate.data_loader", "send_to_device"),
    "eager": ("labutils.training.step", "on_device"),
}
"""Driver -> (module, function) that brings a batch to the device."""


def two_by_two(
    workload: Workload, base: Recipe, steps: int, rounds: int, prefix: str = ""
) -> dict[str, Run]:
    """`base` in the four ways: `prefix` + way -> its run, with `host_copy_ms` beside the usual
    metrics.

    `host_copy_ms` is how long the host is inside the function that copies, over an optimizer step.
    `base` copies pageable memory and waits for it; its driver is one of `COPIES` (`KeyError`
    otherwise).
    """
    recipes = {way: base.but(**knobs) for way, knobs in WAYS.items()}
    found = compare(
        workload, {prefix + way: recipe for way, recipe in recipes.items()}, steps, rounds
    )
    for way, recipe in recipes.items():
        samples = _host_copy_ms(workload, recipe, steps)
        run = found[prefix + way]
        run.samples["host_copy_ms"], run.metrics["host_copy_ms"] = samples, summarise(samples)
    return found


def _host_copy_ms(workload: Workload, recipe: Recipe, steps: int) -> list[float]:
    with Trainer(workload, recipe) as trainer, CallTimer(*COPIES[recipe.driver]) as copies:
        measure(trainer, 3)
        copies.ms.clear()
        measure(trainer, steps)
        return copies.per(recipe.accumulation)
