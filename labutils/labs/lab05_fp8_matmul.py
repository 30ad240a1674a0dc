"""What low-bit layers cost: products in BF16 and FP8 over sizes, and the bytes and time of each
kind of frozen layer.

The products are put through `labutils.profiling.operations.measure_operation`: inputs that no cache
holds, and the GPU's time alone, replayed from a CUDA graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.layers.quantization.convert import convert_base, forward_context
from labutils.layers.quantization.fp8_linear import (
    FAST_ACCUM,
    PRODUCTS,
    product_kind,
    quantise_rows,
)
from labutils.layers.quantization.fp8_math import E4M3, amax, scale_for
from labutils.profiling import compat, cuda
from labutils.profiling.operations import Operation, measure_operation
from labutils.recipe import Unavailable
from labutils.results.records import Run, summarise

BF16 = "BF16"
ONE_SCALE = "FP8, one scale"
ROWWISE = "FP8, a scale a row"
DELAYED = "FP8, one scale, known before"
ON_THE_WAY = "FP8, a scale a row, quantised on the way"
FUSED = "FP8, a scale a row, quantised on the way, compiled"
PRODUCT_KINDS = (BF16, ONE_SCALE, ROWWISE, DELAYED, ON_THE_WAY, FUSED)
"""What is timed: x W^T with x [n, n] and W [n, n]. The first three find both matrices in their
format; the last three begin with x in BF16, as a layer does, and W quantised before."""


def time_products(sizes: Sequence[int]) -> Run:
    """The run of the product of two n x n matrices, for each of `sizes` in each of `PRODUCT_KINDS`:
    samples and summaries named "BF16 512", in milliseconds of the GPU alone.

    Raises `Unavailable` without FP8 tensor cores.
    """
    if not cuda.available() or product_kind(torch.device("cuda")) == "emulated":
        raise Unavailable(
            "FP8 products need an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, "
            "Blackwell)"
        )
    run = Run("05", "gemm-times", tags={"experiment": "gemm-times"})
    for n in sizes:
        for kind in PRODUCT_KINDS:
            dtype, make = ("bf16" if kind == BF16 else "fp8"), functools.partial(product, kind, n)
            least = {BF16: 6, ONE_SCALE: 4, ROWWISE: 4}.get(kind, 5) * n**2  # x, W and the result
            square = Operation(kind, f"{n}x{n} by {n}x{n}", dtype, 2 * n**3, least, make)
            run.samples[f"{kind} {n}"] = measure_operation(square, budget_s=0.05).alone_ms
    run.metrics = {name: summarise(ms) for name, ms in run.samples.items()}
    return run


def product(kind: str, n: int) -> Callable[[], Tensor]:
    """The call that multiplies two new random n x n matrices on the GPU, as `kind` does."""
    x, weight = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    return product_of(kind, x, weight)


def product_of(kind: str, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The call that computes x W^T in BF16, for x [m, k] and W [n, k] in BF16, as `kind` does.
    What `kind` finds in FP8 is quantised here."""
    if kind == BF16:
        return lambda: F.linear(x, weight)
    if kind in (ONE_SCALE, DELAYED):
        x_scale, w_scale = scale_for(amax(x)), scale_for(amax(weight))
        inverses = 1 / x_scale, 1 / w_scale
        ready, values = (x * x_scale).to(E4M3.dtype), (weight * w_scale).to(E4M3.dtype)
        if kind == ONE_SCALE:
            return lambda: _one_scale_product(ready, values, *inverses)
        cast = _compiled(_cast)
        return lambda: _one_scale_product(cast(x, x_scale), values, *inverses)
    values, inverse = quantise_rows(weight)
    multiply = PRODUCTS[product_kind(x.device)]
    if kind == ROWWISE:
        ready, scale = quantise_rows(x)
        return lambda: multiply(ready, values, scale, inverse.t())
    quantise = _compiled(quantise_rows) if kind == FUSED else quantise_rows

    def call() -> Tensor:
        ready, scale = quantise(x)
        return multiply(ready, values, scale, inverse.t())

    return call


def _one_scale_product(x: Tensor, weight: Tensor, *inverses: Tensor) -> Tensor:
    """x [m, k] W^T in BF16 for x and W [n, k] in FP8 with one scale each, whose inverses are given,
    as A2's per-tensor scaling multiplies.
    """
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": FAST_ACCUM}
    return compat.scaled_mm(x, weight.t(), scale_a=inverses[0], scale_b=inverses[1], **how)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).to(E4M3.dtype)


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)


def wins_from(times: Run, kind: str, other: str, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes`, in rising order, from which on `kind` takes less time than `other`
    at every larger size as well; None where it loses at the largest."""
    first = None
    for n in reversed(sizes):
        if times.metric(f"{kind} {n}") >= times.metric(f"{other} {n}"):
            break
        first = n
    return first


# Whole layers


def layer_costs(kind: str, x: Tensor, out: int, compiled: bool = False) -> Run:
    """The run of what one frozen layer of a kind of `labutils.layers.quantization.convert` costs,
    on x [rows, width], on its device and in its format, with `out` outputs.

    Metrics: `bytes_a_parameter` that it holds at rest. On a GPU also `bytes_a_parameter_running`,
    with what it keeps of the weight between forward and backward, and `step_ms`: a forward pass
    and the gradient of its input, as called from Python. Raises `Unavailable` where the kind is.
    """
    run = Run("05", f"layer {kind}", tags={"experiment": "layer", "layer": kind})
    run.tags |= {"compiled": True} if compiled else {}
    width, before = x.shape[-1], _allocated()
    linear = nn.Linear(width, out, bias=False, device=x.device, dtype=x.dtype)
    layer = nn.Sequential(linear.requires_grad_(False))
    del linear
    convert_base(layer, ["0"], kind, x.dtype)
    if x.device.type == "cpu":
        held = sum(tensor.nbytes for tensor in layer.state_dict().values())
        run.metrics = {"bytes_a_parameter": held / (width * out)}
        return run
    held = _allocated() - before
    forward_of = torch.compile(layer, dynamic=False) if compiled else layer
    x = x.detach().requires_grad_()
    dy = torch.randn(len(x), out, device=x.device, dtype=x.dtype)

    def forward() -> Tensor:
        with forward_context(kind):
            return forward_of(x)

    for _ in range(3):  # libraries make their workspaces, delayed scaling its history
        torch.autograd.grad(forward(), x, dy)
    resting = _allocated()
    y = forward()
    kept = _allocated() - resting - y.nbytes
    del y
    samples = cuda.timed(lambda: torch.autograd.grad(forward(), x, dy), budget_s=0.3)
    run.samples = {"step_ms": samples}
    run.metrics = {
        "bytes_a_parameter": held / (width * out),
        "bytes_a_parameter_running": (held + kept) / (width * out),
        "step_ms": summarise(samples),
    }
    return run


def _allocated() -> float:
    """Bytes that tensors hold on the GPU, 0 without one."""
    gc.collect()
    return cuda.GB * (cuda.allocated_memory() or 0)
