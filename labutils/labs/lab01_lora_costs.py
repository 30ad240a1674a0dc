"""What lab 01 measures of LoRA: the time of a pass beside its floor, and the memory of a step's
phases.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import bytes_of, tensors_of
from labutils.results.records import Run, summarise

ROUNDS = 9


def pass_runs(
    width: int, passes: Mapping[str, Callable[[], Any]], floors: Mapping[str, float]
) -> list[Run]:
    """A run of each of `passes`, timed in turns over several rounds: `pass_ms`, its `floor_ms`, and
    how many `times` the first one's time it takes. On a GPU replayed from a CUDA graph."""
    calls = {name: cuda.graph_of(call) or call for name, call in passes.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            times = cuda.timed(calls[name], budget_s=0.02, warmup=1, at_least=2)
            samples[name].append(summarise(times)["median"])
    base, runs = next(iter(samples.values())), []
    for name, each in samples.items():
        times = [one / other for one, other in zip(each, base, strict=True)]
        run = Run("01", f"{name}, width {width}", samples={"pass_ms": each, "times": times})
        run.tags = {"experiment": "adapter cost", "layer": name, "width": width}
        run.metrics = {"pass_ms": summarise(each), "times": summarise(times)}
        run.metrics["floor_ms"] = floors[name]
        runs.append(run)
    return runs


def phases_run(
    trained: str, module: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> Run:
    """The first step of `optimizer` on `loss()`: the GB of `module`'s own tensors, and the peak in
    the forward pass, the backward pass and the update. On a GPU the allocator's, elsewhere of what
    operations return. What else was allocated before is left out."""
    gc.collect()  # what an earlier model left must not go away while this one is measured
    known, on_gpu = tensors_of(module), cuda.available()
    weights = bytes_of(known) / cuda.GB
    record = nullcontext() if on_gpu else TensorRecord(known)
    others = (cuda.allocated_memory() or weights) - weights
    run = Run("01", trained, tags={"experiment": "memory by phase", "trained": trained})
    run.metrics = {"weights_gb": weights}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        if on_gpu:
            cuda.reset_peak_memory()
        else:
            record.peak = record.now
        result = work()
        peak = cuda.peak_memory()[0] - others if on_gpu else weights + record.peak / cuda.GB
        run.metrics[name] = peak
        return result

    with record:
        value = phase("forward_gb", loss)
        phase("backward_gb", value.backward)
        phase("update_gb", optimizer.step)
    return run
