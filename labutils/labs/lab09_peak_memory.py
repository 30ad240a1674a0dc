"""Lab 09's trials of the predicted peak memory: three workloads, each with its checkpointing."""

from __future__ import annotations

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.profiling.memory import StepMemory
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.training.benchmark import empty_run
from labutils.training.peak_memory import GB, predicted, recorded
from labutils.workloads import Workload

GRID: dict[str, Recipe] = {
    "sd15-lora": Recipe(
        driver="eager", logging="ring-buffer", cache="latents+text", micro_batch=4, accumulation=1
    ),
    "llava-lora": A2_BASE.but(layers="rewritten"),
    "qwen3-lora-long": A3_BASE.but(driver="eager", micro_batch=2),
}
"""Workload -> the recipe that the prediction is tried on."""


def predicted_and_recorded(workload: Workload, recipe: Recipe) -> tuple[Run, StepMemory]:
    """A recipe's run with what its step takes, predicted before it is recorded; and the record.

    The run's metrics: `predicted_gb`, `peak_gb` (of tensors), `off` (the prediction's error as a
    share), GB of each kind at the peak, and the peak of each phase (`forward_peak_gb`).
    """
    prediction = predicted(workload, recipe).peak / GB
    memory, peak = recorded(workload, recipe)
    run = empty_run(workload, recipe, f"memory: {workload.name}, {recipe.checkpointing}")
    run.tags = {"experiment": "memory", "workload": workload.name}
    run.tags["checkpointing"] = recipe.checkpointing
    run.metrics = {"predicted_gb": prediction, "peak_gb": peak, "off": prediction / peak - 1}
    run.metrics |= {f"{kind}_gb": size / GB for kind, size in memory.at_peak().items()}
    run.metrics |= {f"{phase}_peak_gb": size / GB for phase, size in memory.phase_peaks().items()}
    return run, memory
