"""Lab 07's measurements: article A3's methods, recipes of our own on packed rows, the kernels that
restore 4-bit weights, and Qwen3-32B.

    runs = methods(workload, "long")              LoRA, QLoRA, and what comes with QLoRA
    runs = rungs(workload)                        4-bit and FP8 weights on the same packed rows
    run = dequantising(workload, QLORA, folder)   what restoring 4-bit weights takes, from a trace
    runs = large(workload, folder)                Qwen3-32B, a few steps
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from labutils.labs.ladders import A3_BASE
from labutils.profiling.trace import profile
from labutils.recipe import Recipe
from labutils.results.records import Run, to_frame
from labutils.training import Benchmark, Trainer
from labutils.training.benchmark import empty_run
from labutils.training.free_memory import make_room
from labutils.training.model_edits import prepared_for_kbit, with_costs, with_epoch_rate
from labutils.training.unsloth_run import Job
from labutils.workloads import Workload
from labutils.workloads.decoder_flops import decoder_shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP = 3
"""Steps between the first and those timed, on a GPU. The sixth batch of long texts is then timed,
which has one of full length, as most have."""

QLORA = A3_BASE.but(base_linear="nf4", checkpointing="blocks")
"""PEFT's preparation turns checkpointing on, and casts to float32: `prepared`."""
METHODS: dict[str, dict[str, tuple[Recipe, dict[str, Any]]]] = {
    "long": {
        "lora": (A3_BASE, {}),
        "lora, checkpointed": (
            A3_BASE.but(checkpointing="blocks"),
            {"method": "lora", "checkpointing": "blocks"},
        ),
        "lora, offloaded": (
            A3_BASE.but(checkpointing="offload"),
            {"method": "lora", "offloaded": True},
        ),
        "qlora": (QLORA, {}),
    },
    "short": {
        "qlora": (QLORA, {}),
        "qlora, batch 1": (QLORA.but(micro_batch=1), {"method": "qlora", "batch": 1}),
    },
}
"""Texts -> name -> recipe, and the tags that its run has beside the method's name and the texts."""

LOOP = {"driver": "eager", "logging": "ring-buffer", "non_blocking": True}
ROWS = {"shapes": "packed", "token_budget": 4096, "micro_batch": 1}
PACKED = A3_BASE.but(adapter="plain", layers="rewritten", loss="fused", **LOOP, **ROWS)
COMPILED = PACKED.but(compile="default", compile_scope="blocks", dynamic="static")
LIKE_FOR_LIKE = "4 bits, compiled, checkpointed"
RUNGS = {
    "packed": PACKED,
    "packed, 4 bits": PACKED.but(base_linear="nf4"),
    "blocks compiled": COMPILED,
    LIKE_FOR_LIKE: COMPILED.but(base_linear="nf4-frozen", checkpointing="blocks"),
    "FP8 weights": COMPILED.but(base_linear="fp8-frozen"),
    "4 bits in FP8, checkpointed": COMPILED.but(base_linear="nf4-fp8", checkpointing="blocks"),
}
"""Recipes on the same rows: several texts in one, apart from each other, and nothing padded."""

UNSLOTH = {
    "unsloth": ("long", A3_BASE.but(base_linear="nf4"), {}),
    "unsloth, short texts": ("short", A3_BASE.but(base_linear="nf4"), {}),
    "unsloth, packed": ("long", A3_BASE.but(base_linear="nf4", **LOOP, **ROWS), {"rows": "packed"}),
}
"""Name -> texts, recipe, further tags. It is timed on the batches and rows of the others."""


def prepared(model: nn.Module) -> None:
    """What `prepare_model_for_kbit_training` casts, in a model that holds weights in 4 bits."""
    if model.base_linear == "nf4":
        prepared_for_kbit(model)


def methods(workload: Workload, texts: str) -> dict[str, Run]:
    """Name -> run of `METHODS` on these texts, interleaved; QLoRA's with `memory_share`, its peak
    over LoRA's."""
    recipes = {name: recipe for name, (recipe, _) in METHODS[texts].items()}
    tags = {
        name: {"experiment": "methods", "method": name, "texts": texts} | more
        for name, (_, more) in METHODS[texts].items()
    }
    make_room(workload)
    warmup = WARM_UP if workload.device.type == "cuda" else 1
    with Benchmark(workload, warmup, same_batches=True, on_model=prepared) as bench:
        runs = bench.compare(recipes, 1, tags=tags)
    peaks = [runs[name].metric("peak_allocated_gb") for name in ("qlora", "lora") if name in runs]
    if len(peaks) == 2 and all(peaks):
        runs["qlora"].metrics["memory_share"] = peaks[0] / peaks[1]
    return _rated(runs, workload)


def rungs(workload: Workload) -> dict[str, Run]:
    """Name -> run of `RUNGS`, interleaved. A CPU takes those in 4 bits, and compiles none."""
    recipes = dict(RUNGS)
    if workload.device.type != "cuda":
        few = ("packed", "packed, 4 bits", LIKE_FOR_LIKE)
        recipes = {name: RUNGS[name].but(compile="off", compile_scope="model") for name in few}
    make_room(workload)
    with Benchmark(workload, same_batches=True) as bench:
        tags = {name: {"experiment": "ladder", "rung": name} for name in recipes}
        runs = bench.compare(recipes, 1, tags=tags)
    for run in runs.values():
        run.lane = "same mathematics"
    return _rated(runs, workload)


def _rated(runs: Mapping[str, Run], workload: Workload) -> dict[str, Run]:
    return {name: with_epoch_rate(with_costs(run), workload) for name, run in runs.items()}


def unsloth_jobs(workloads: Mapping[str, Workload]) -> dict[str, Job]:
    """Name -> job of each of `UNSLOTH`."""
    shared = {"experiment": "methods", "method": "unsloth"}
    return {
        name: Job(workloads[texts], recipe, WARM_UP, shared | {"texts": texts} | more)
        for name, (texts, recipe, more) in UNSLOTH.items()
    }


def frozen_weights(workload: Workload) -> int:
    """How many numbers the adapted matrices of all blocks hold."""
    shapes = decoder_shapes(workload.size).adapted.values()
    return workload.size.layers * sum(inputs * outputs for inputs, outputs in shapes)


def dequantising(workload: Workload, recipe: Recipe, folder: Path) -> Run:
    """What restoring 4-bit weights takes in a traced step: `dequantise_ms` of kernels (without a
    GPU, of operators), and how many of them, `dequantise_calls`."""
    make_room(workload)
    with Trainer(workload, recipe, on_model=prepared) as trainer:
        trace = profile(trainer, 1, folder, with_stack=False)
    operators = (one for thread in trace.ops.values() for one in thread)
    work = trace.recorded(trace.kernels if trace.on_gpu else operators)
    restoring = [one.ms for one in work if "equantize" in one.name]
    run = empty_run(workload, recipe, f"dequantising, {workload.name}")
    run.tags = {"experiment": "dequantising", "model": workload.name}
    run.metrics = {
        "dequantise_ms": sum(restoring) / trace.steps,
        "dequantise_calls": len(restoring) / trace.steps,
    }
    return run


def large(workload: Workload, folder: Path) -> dict[str, Run]:
    """Name -> run of LoRA with checkpointing and QLoRA on a large model, two steps timed of each.

    The first step, which sets the peak of memory, has a text of full length. `traced_gpu_busy` is
    of one more step, under the profiler; `examples_per_h` counts those of the timed steps.
    """
    runs = {}
    for name, recipe in {"qlora": QLORA, "lora": A3_BASE.but(checkpointing="blocks")}.items():
        make_room(workload)
        with Benchmark(workload, warmup=0, on_model=prepared) as bench:
            run = runs[name] = bench.compare({name: recipe}, steps=2, rounds=1)[name]
            run.tags = {"experiment": "qwen3-32b", "method": name, "checkpointing": "blocks"}
            if run.ok:
                trace = bench.profile(name, folder / name, steps=1)
                busy = trace.metrics().get("traced_gpu_busy")
                run.metrics |= {} if busy is None else {"traced_gpu_busy": busy}
                run.metrics["examples_per_h"] = 3600 * run.metric("examples_per_s")
    return runs


def frontier(ax: Axes, runs: Iterable[Run]) -> Axes:
    """Useful tokens/s over peak memory: a line for compiled recipes that multiply in BF16, one for
    those in FP8, and single points for the others."""
    runs = [run for run in runs if run.ok and (run.tags.get("rung") in RUNGS or _is_method(run))]
    frame = to_frame(runs).assign(name=[run.run for run in runs], kind=list(map(_kind, runs)))
    frame = frame.dropna(subset=["peak_allocated_gb", "useful_tokens_per_s"])
    frame = frame.sort_values("peak_allocated_gb", ascending=False)
    for (kind, those), mark in zip(frame.groupby("kind"), "sDov^", strict=False):
        line = "-" if "products" in kind else ""
        ax.plot(those.peak_allocated_gb, those.useful_tokens_per_s, mark + line, label=kind)
    for at, below in zip(frame.itertuples(), itertools.cycle((4, -11, 13))):
        place = at.peak_allocated_gb, at.useful_tokens_per_s
        ax.annotate(at.name, place, (6, below), textcoords="offset points", fontsize=7)
    ax.set(xscale="log", xlim=(5, 200), ylim=(0, None), ylabel="useful tokens/s")
    ticks = (5, 10, 20, 50, 100)
    ax.set_xticks(ticks, map(str, ticks))
    ax.set_xlabel("peak memory, GB")
    ax.legend(loc="upper right", fontsize=8)
    return ax


def _is_method(run: Run) -> bool:
    """Whether a run is one of `METHODS` or `UNSLOTH` on long texts, for the first time."""
    named = [*METHODS["long"].items(), *((n, (r, more)) for n, (_, r, more) in UNSLOTH.items())]
    each = [
        {"experiment": "methods", "method": name.split(",")[0], "texts": "long"} | more
        for name, (_, more) in named
    ]
    return run.tags in each


def _kind(run: Run) -> str:
    if run.tags["experiment"] == "methods":
        return "unsloth" if run.tags["method"] == "unsloth" else "as published"
    if run.recipe["compile"] == "off":
        return "packed, not compiled"
    return f"compiled, {'FP8' if 'fp8' in run.recipe['base_linear'] else 'BF16'} products"
