"""What lab 01 measures of LoRA: the time of a pass beside its floor, and the memory of a step's
phases; and the check of its exercise on convolutions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.course.exercises import difference
from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import bytes_of, tensors_of
from labutils.results.records import Run, summarise

ROUNDS = 9


def pass_runs(
    width: int, passes: Mapping[str, Callable[[], Any]], floors: Mapping[str, float]
) -> list[Run]:
    """A run of each of `passes`, timed in turns over several rounds: `pass_ms`, its `floor_ms`, and
    how many `times` the first one's time it takes. On a GPU ten at a time are replayed from a CUDA
    graph: a single one may be shorter than its launch."""
    count = 10 if cuda.available() else 1

    def several(call: Callable[[], Any]) -> list:
        return [call() for _ in range(count)]

    calls = {name: cuda.graph_of(partial(several, call)) or call for name, call in passes.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            times = cuda.timed(calls[name], budget_s=0.02, warmup=1, at_least=2)
            samples[name].append(summarise(times)["median"] / count)
    base, runs = next(iter(samples.values())), []
    for name, each in samples.items():
        times = [one / other for one, other in zip(each, base, strict=True)]
        run = Run("01", f"{name}, width {width}", samples={"pass_ms": each, "times": times})
        run.tags = {"experiment": "adapter cost", "layer": name, "width": width}
        run.metrics = {"pass_ms": summarise(each), "times": summarise(times)}
        run.metrics["floor_ms"] = floors[name]
        runs.append(run)
    return runs


def phases_runs(
    trained: str, module: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> list[Run]:
    """A run of each of the first two steps of `optimizer` on `loss()`: the GB of `module`'s own
    tensors, and the peak in the forward pass, the backward pass and the update. The optimizer's
    state is made in the first step's update, so that only the second's passes are those of every
    later step. On a GPU the allocator's peaks, elsewhere of what operations return. What else was
    allocated before is left out."""
    gc.collect()  # what an earlier model left must not go away while this one is measured
    known = tensors_of(module)
    weights, record = bytes_of(known) / cuda.GB, TensorRecord(known)
    others = (cuda.allocated_memory() or weights) - weights
    runs = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        cuda.reset_peak_memory()
        record.peak = record.now
        yield
        peak = cuda.peak_memory()
        run.metrics[f"{name}_gb"] = peak[0] - others if peak else weights + record.peak / cuda.GB

    with nullcontext() if cuda.available() else record:
        for step in (1, 2):
            optimizer.zero_grad()
            run = Run("01", f"{trained}, step {step}", metrics={"weights_gb": weights})
            run.tags = {"experiment": "memory by phase", "trained": trained, "step": step}
            with phase("forward"):
                value = loss()
            with phase("backward"):
                value.backward()
            with phase("update"):
                optimizer.step()
            runs.append(run)
    return runs


def check_conv(layer: Callable[[nn.Conv2d, int, float], nn.Module]) -> str:
    """What is to be said of lab 01's exercise 3: `layer(base, r, alpha)` has convolutions `A` and
    `B`, and gives what a convolution with the merged weight W + alpha/r B A gives."""
    torch.manual_seed(0)
    base, x = nn.Conv2d(16, 24, 3, stride=2, padding=1), torch.randn(2, 16, 9, 9)
    ours = layer(base, 4, 8)
    for name, shape in {"A": (4, 16, 3, 3), "B": (24, 4, 1, 1)}.items():
        if (own := getattr(ours, name, None)) is None:
            return "Exercise 3: make the two convolutions A and B first."
        if own.weight.shape != shape:
            return f"Exercise 3: not yet. {name}'s weight should have the shape {shape}."
        nn.init.normal_(own.weight)
    product = torch.einsum("or,rikl->oikl", ours.B.weight[..., 0, 0], ours.A.weight)
    merged = F.conv2d(x, base.weight + 8 / 4 * product, base.bias, base.stride, base.padding)
    off = difference({"the output": merged}, {"the output": ours(x)}, 1e-4)
    said = f"not yet. {off}" if off else "right. The output is that of the merged convolution."
    return f"Exercise 3: {said}"
