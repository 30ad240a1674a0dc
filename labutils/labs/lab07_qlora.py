"""Lab 07's measurements: article A3's methods, recipes of our own on packed rows, Qwen3-32B.

runs = methods(workload, "long", folder)  LoRA, QLoRA, and what comes with QLoRA
with Benchmark(workload, WARM_UP, same_batches=True) as bench:
    runs = rungs(bench, PACKED)           weights in 16 and in 4 bits on the same packed rows
runs = large(workload, folder)            Qwen3-32B, a few steps
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from labutils.labs.ladders import A3_BASE
from labutils.profiling.trace import Trace
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.training import Benchmark
from labutils.training.free_memory import make_room
from labutils.training.model_edits import prepared_for_kbit, with_costs, with_epoch_rate
from labutils.training.unsloth_run import Job
from labutils.workloads import Workload
from labutils.workloads.decoder_flops import decoder_shapes

WARM_UP = 3
"""Steps between the first and those timed. The sixth batch of long texts is then timed, which has
one of full length, as most have."""

CHECKPOINTED = A3_BASE.but(checkpointing="blocks")
QLORA = CHECKPOINTED.but(base_linear="nf4")
"""PEFT's preparation turns checkpointing on, and casts to float32: `prepared_for_kbit`."""
METHODS: dict[str, dict[str, tuple[Recipe, dict[str, Any]]]] = {
    "long": {
        "lora": (A3_BASE, {"method": "lora"}),
        "lora, checkpointed": (CHECKPOINTED, {"method": "lora", "checkpointing": "blocks"}),
        "lora, offloaded": (
            A3_BASE.but(checkpointing="offload"),
            {"method": "lora", "offloaded": True},
        ),
        "qlora": (QLORA, {"method": "qlora"}),
    },
    "short": {"qlora": (QLORA, {"method": "qlora"})},
}
"""Texts -> name -> recipe, and the tags that its run has beside the texts."""
TRACED = {"long": ("lora, checkpointed", "qlora"), "short": ("qlora",)}
"""Texts -> the methods that are traced on a GPU: what kernels take tells what the host does."""
FEW_ROUNDS = {"tiny": 2, "small": 5, "full": 5}
"""Rounds where a visit takes half a second or longer."""

LOOP = {"driver": "eager", "logging": "ring-buffer", "non_blocking": True}
ROWS = {"shapes": "packed", "token_budget": 4096, "micro_batch": 1}
ON_ROWS = A3_BASE.but(adapter="plain", layers="rewritten", loss="fused", **LOOP, **ROWS)
COMPILED_BLOCKS = ON_ROWS.but(compile="default", compile_scope="blocks", dynamic="static")
LIKE_FOR_LIKE = "4 bits, compiled, checkpointed"
PACKED = {"packed": ON_ROWS, "packed, 4 bits": ON_ROWS.but(base_linear="nf4")}
COMPILED = {
    "blocks compiled": COMPILED_BLOCKS,
    LIKE_FOR_LIKE: COMPILED_BLOCKS.but(base_linear="nf4-frozen", checkpointing="blocks"),
    "FP8 weights": COMPILED_BLOCKS.but(base_linear="fp8-frozen"),
}
"""Recipes on the same rows: several texts in one, apart from each other, and nothing padded."""
ON_A_CPU = {LIKE_FOR_LIKE: COMPILED[LIKE_FOR_LIKE].but(compile="off", compile_scope="model")}
UNSLOTH = {
    "unsloth": ("long", A3_BASE.but(base_linear="nf4"), {}),
    "unsloth, short texts": ("short", A3_BASE.but(base_linear="nf4"), {}),
    "unsloth, packed": ("long", A3_BASE.but(base_linear="nf4", **LOOP, **ROWS), {"rows": "packed"}),
}
"""Name -> texts, recipe, further tags. It is timed on the batches and rows of the others."""
STEPS = {"long": 1, "short": 2, "packed": 3}
"""Texts, or rows -> batches timed a round: so many that a benchmark adds none to fill the round,
which it would for a fast recipe of one process and not for a slow one of another."""


def methods(workload: Workload, texts: str, folder: Path) -> dict[str, Run]:
    """Name -> run of `METHODS` on these texts, interleaved; QLoRA's with `memory_share`, its peak
    over LoRA's. Traces go to `folder`."""
    recipes = {name: recipe for name, (recipe, _) in METHODS[texts].items()}
    shared = {"experiment": "methods", "texts": texts}
    tags = {name: shared | more for name, (_, more) in METHODS[texts].items()}
    make_room(workload)
    with Benchmark(workload, WARM_UP, same_batches=True, on_model=prepared_for_kbit) as bench:
        runs = bench.compare(recipes, STEPS[texts], FEW_ROUNDS[workload.scale], tags)
        for name in TRACED[texts] if workload.device.type == "cuda" else ():
            try_trace(runs[name], bench, folder / texts, steps=1)
    peaks = {name: run.metric("peak_allocated_gb") for name, run in runs.items()}
    if peaks.get("lora") and peaks["qlora"]:
        runs["qlora"].metrics["memory_share"] = peaks["qlora"] / peaks["lora"]
    return _rated(runs, workload)


def try_trace(run: Run, bench: Benchmark, folder: Path, steps: int) -> None:
    """Trace the steps that were timed of a run once more. Where that fails, for lack of memory for
    example, the run stays as it was timed."""
    with suppress(RuntimeError, OSError, ValueError):
        bench.trace_into(run, folder, steps)


def rungs(bench: Benchmark, recipes: Mapping[str, Recipe]) -> dict[str, Run]:
    """Name -> run of recipes on packed rows, interleaved. Their first steps are not on record:
    unsloth loads meanwhile."""
    tags = {name: {"experiment": "ladder", "rung": name} for name in recipes}
    runs = bench.compare(recipes, STEPS["packed"], FEW_ROUNDS[bench.workload.scale], tags)
    for run in runs.values():
        run.metrics.pop("first_step_s", None)
    return _rated(runs, bench.workload)


def _rated(runs: Mapping[str, Run], workload: Workload) -> dict[str, Run]:
    return {name: with_epoch_rate(with_costs(run), workload) for name, run in runs.items()}


def unsloth_jobs(workloads: Mapping[str, Workload]) -> dict[str, Job]:
    """Name -> job of each of `UNSLOTH`."""
    jobs = {}
    for name, (texts, recipe, more) in UNSLOTH.items():
        workload, steps = workloads[texts], STEPS[more.get("rows", texts)]
        tags = {"experiment": "methods", "method": "unsloth", "texts": texts} | more
        jobs[name] = Job(workload, recipe, WARM_UP, steps, FEW_ROUNDS[workload.scale], tags)
    return jobs


def frozen_weights(workload: Workload) -> int:
    """How many numbers the adapted matrices of all blocks hold."""
    shapes = decoder_shapes(workload.size).adapted.values()
    return workload.size.layers * sum(inputs * outputs for inputs, outputs in shapes)


def restoring_kernels_ms(trace: Trace) -> float:
    """What restoring 4-bit weights takes in a traced step: of kernels, or without a GPU of
    operators."""
    operators = (one for thread in trace.ops.values() for one in thread)
    work = trace.recorded(trace.kernels if trace.on_gpu else operators)
    return sum(one.ms for one in work if "equantize" in one.name) / trace.steps


def large(workload: Workload, folder: Path) -> dict[str, Run]:
    """Name -> run of QLoRA and LoRA with checkpointing on a large model, the same two batches timed
    of each, twice.

    The first step, which sets the peak of memory, has a text of full length. The two steps are
    taken once more under the profiler; `examples_per_h` counts those of the timed steps.
    """
    runs = {}
    for name, recipe in {"qlora": QLORA, "lora": CHECKPOINTED}.items():
        make_room(workload)
        with Benchmark(workload, 0, same_batches=True, on_model=prepared_for_kbit) as bench:
            run = runs[name] = bench.compare({name: recipe}, steps=2, rounds=2)[name]
            run.tags = {"experiment": "qwen3-32b", "method": name, "checkpointing": "blocks"}
            if run.ok:
                run.metrics["examples_per_h"] = 3600 * run.metric("examples_per_s")
            try_trace(run, bench, folder, steps=2)
    return runs


def kind_of(run: Run) -> str:
    """How a run's point is marked where speed is drawn over memory."""
    if run.tags["experiment"] == "methods":
        return "unsloth" if run.tags["method"] == "unsloth" else "as published"
    if run.recipe["compile"] == "off":
        return "packed, not compiled"
    return f"compiled, {'FP8' if 'fp8' in run.recipe['base_linear'] else 'BF16'} products"
