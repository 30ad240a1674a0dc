"""What lab 01 measures of LoRA: the time of a pass beside its floor, and the memory of a step's
phases; and the check of its exercise on convolutions.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labutils.course.exercises import difference
from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import bytes_of, tensors_of
from labutils.results.records import Run, summarise

ROUNDS = 9
PARTS = ("the output", "A's gradient", "B's gradient")


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


def phases_runs(
    trained: str, module: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> list[Run]:
    """A run of each of the first two steps of `optimizer` on `loss()`: the GB of `module`'s own
    tensors, and the peak in the forward pass, the backward pass and the update. The optimizer's
    state is made in the first step's update, so that only the second's passes are those of every
    later step. On a GPU the allocator's peaks, elsewhere of what operations return. What else was
    allocated before is left out."""
    gc.collect()  # what an earlier model left must not go away while this one is measured
    known, on_gpu = tensors_of(module), cuda.available()
    weights = bytes_of(known) / cuda.GB
    record = nullcontext() if on_gpu else TensorRecord(known)
    others = (cuda.allocated_memory() or weights) - weights
    runs = []

    def peak_of(work: Callable[[], Any]) -> tuple[float, Any]:
        if on_gpu:
            cuda.reset_peak_memory()
        else:
            record.peak = record.now
        result = work()
        peak = cuda.peak_memory()[0] - others if on_gpu else weights + record.peak / cuda.GB
        return peak, result

    with record:
        for step in (1, 2):
            optimizer.zero_grad()
            run = Run("01", f"{trained}, step {step}", metrics={"weights_gb": weights})
            run.tags = {"experiment": "memory by phase", "trained": trained, "step": step}
            run.metrics["forward_gb"], value = peak_of(loss)
            run.metrics["backward_gb"], _ = peak_of(value.backward)
            del value
            run.metrics["update_gb"], _ = peak_of(optimizer.step)
            runs.append(run)
    return runs


def check_conv(layer: Callable[[nn.Conv2d, int, float], nn.Module]) -> str:
    """What is to be said of lab 01's exercise 3: `layer(base, r, alpha)` has convolutions `A` and
    `B`, and with PEFT's numbers in them gives PEFT's output and gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, x = nn.Conv2d(16, 24, 3, stride=2, padding=1), torch.randn(2, 16, 9, 9)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False)
    peft = get_peft_model(nn.Sequential(copy.deepcopy(base)), config)
    theirs, ours = peft.base_model.model[0], layer(base, 4, 8)
    if getattr(ours, "A", None) is None or getattr(ours, "B", None) is None:
        return "Exercise 3: make the two convolutions A and B first."
    wanted = {"A": theirs.lora_A["default"].weight, "B": theirs.lora_B["default"].weight}
    for name, weight in wanted.items():
        if getattr(ours, name).weight.shape != weight.shape:
            shape = tuple(weight.shape)
            return f"Exercise 3: not yet. {name}'s weight should have the shape {shape}."
        getattr(ours, name).weight.data.copy_(weight.data)
    results = []
    for model, trained in (
        (theirs, list(wanted.values())),
        (ours, [ours.A.weight, ours.B.weight]),
    ):
        y = model(x) + 0 * sum(weight.sum() for weight in trained)  # a gradient in any case
        grads = torch.autograd.grad(y.square().mean(), trained)
        results.append(dict(zip(PARTS, (y, *grads), strict=True)))
    off = difference(*results, 1e-4)
    said = f"not yet. {off}" if off else "right. Output and gradients are PEFT's."
    return f"Exercise 3: {said}"
