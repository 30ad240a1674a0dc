"""Article A1's ladder in one comparison, and the modes of torch.compile that make graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labutils.labs.ladders import A1_LADDER, climb, distinct_on, in_lanes
from labutils.profiling.machine import usable_cores
from labutils.recipe import STOCK, Recipe
from labutils.results.records import Run
from labutils.training import Benchmark, try_isolated

AHEAD = "folded LoRA"
"""The rung whose kernels another process puts into the cache, while this one compiles those of the
rungs before."""
WATCHED = ("stock", "workers", "pinned")
TRACED = ("workers", "compile", "whole-step graph", "folded LoRA")
MODES = ("reduce-overhead", "max-autotune")
LIBRARY_KERNELS = {
    f"TORCHINDUCTOR_MAX_AUTOTUNE_{kind}_BACKENDS": "ATEN" for kind in ("GEMM", "CONV")
}
"""max-autotune would time dozens of kernels for each product, which takes minutes."""


def rungs_on(device: str) -> dict[str, Recipe]:
    """The rungs' recipes that a `device` can tell apart. On a CPU nothing is compiled: it takes
    half a minute on two cores, and workers beyond the cores would only be in the way."""
    recipes = climb(A1_LADDER)
    if device == "cuda":
        return recipes
    plain = {"compile": "off", "compile_scope": "model", "persistent_workers": False}
    few = {name: min(recipe.num_workers, usable_cores()) for name, recipe in recipes.items()}
    plainer = {name: r.but(num_workers=few[name], **plain) for name, r in recipes.items()}
    return distinct_on(device, plainer)


def climbed(bench: Benchmark, rounds: int, folder: Path) -> dict[str, Run]:
    """Name -> run of every rung, the stock loop twice, and on a GPU of every mode.

    What this machine lacks is a skipped run. Traces, which go to `folder`, come last: what the
    profiler leaves behind lengthens steps.
    """
    recipes, tags = rungs_on(bench.workload.device.type), A1_LADDER.tags()
    tried, on_gpu = {}, bench.workload.device.type == "cuda"
    with ThreadPoolExecutor() as pool:
        if on_gpu:
            pool.submit(try_isolated, bench.workload, recipes[AHEAD], 1)
            tried = {mode: pool.submit(_try_mode, bench, mode) for mode in MODES}
            bench.prepare({name: recipe for name, recipe in recipes.items() if name != AHEAD})
    bench.prepare(recipes)  # once no other process is at work
    why = "skipped: on a CPU this rung is no different from one above it"
    runs = {name: Run("04", name, status=why, tags=tags[name]) for name in tags}
    runs |= bench.compare(recipes, max(1, 4 // rounds), rounds, tags)  # 4 samples or more
    for name in WATCHED:
        if on_gpu and runs[name].ok:
            runs[name].metrics |= bench.watch(name, steps=3)
    for name in TRACED if on_gpu else TRACED[-1:]:
        if (run := runs[name]).ok:
            trace = bench.trace_into(run, folder, steps=1)
            regions = trace.calls_of("Torch-Compiled Region") / run.recipe["accumulation"]
            run.metrics |= {"compiled_regions": regions} if name == "compile" else {}
    return in_lanes(runs, A1_LADDER) | {name: run.result() for name, run in tried.items()}


def _try_mode(bench: Benchmark, mode: str) -> Run:
    recipe = STOCK.but(compile=mode)
    run = try_isolated(bench.workload, recipe, 6, "tiny", environment=LIBRARY_KERNELS)
    run.tags = {"experiment": "compile mode", "mode": mode}
    return run
