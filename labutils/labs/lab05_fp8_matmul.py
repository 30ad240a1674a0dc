"""What FP8 costs and gains: products in BF16 and FP8 over sizes, and the bytes and time of each
kind of frozen layer.

The products are put through `labutils.profiling.operations.measure_operation`: inputs that no cache
holds, and the GPU's time alone, replayed from a CUDA graph.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

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
from labutils.results.records import Run, summarise

BF16 = "BF16"
ONE_SCALE = "FP8, one scale"
DELAYED = "FP8, one scale, known before"
EAGER = "FP8, a scale a row, quantised on the way"
FUSED = "FP8, a scale a row, quantised on the way, compiled"
PRODUCT_KINDS = (BF16, ONE_SCALE, DELAYED, EAGER, FUSED)
"""What is timed: x W^T with x [n, n] and W [n, n]. The first two find both matrices in their
format; the others begin with x in BF16, as a layer does, and W quantised before."""


def time_products(sizes: Sequence[int]) -> tuple[Run, Run]:
    """Two runs of the product of n x n matrices, for each of `sizes`, rising, and `PRODUCT_KINDS`.

    The first has samples and summaries named "BF16 512", in milliseconds of the GPU alone; the
    second `fp8_over_bf16`, the rate of the largest size over BF16's, and `fp8_wins_from_n`, the
    smallest size from which on `FUSED` wins, if it does.
    """
    run = Run("05", "gemm-times", tags={"experiment": "gemm-times"})
    for n in sizes:
        for kind in PRODUCT_KINDS:
            dtype, make = ("bf16" if kind == BF16 else "fp8"), functools.partial(product, kind, n)
            least = {BF16: 6, ONE_SCALE: 4}.get(kind, 5) * n**2  # x, W and the result
            square = Operation(kind, f"{n}x{n} by {n}x{n}", dtype, 2 * n**3, least, make)
            run.samples[f"{kind} {n}"] = measure_operation(square, budget_s=0.05)
    run.metrics = {name: summarise(ms) for name, ms in run.samples.items()}
    gemm = Run("05", "gemm", tags={"experiment": "gemm"})
    pairs = zip(*(run.samples[f"{kind} {sizes[-1]}"] for kind in (BF16, ONE_SCALE)), strict=False)
    gemm.metrics = {"fp8_over_bf16": summarise([bf16 / fp8 for bf16, fp8 in pairs])}
    lost = [n for n in sizes if run.metric(f"{FUSED} {n}") >= run.metric(f"{BF16} {n}")]
    if won := [n for n in sizes if n > max(lost, default=0)]:
        gemm.metrics["fp8_wins_from_n"] = won[0]
    return run, gemm


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
        ready, values = _cast(x, x_scale), _cast(weight, w_scale)
        how = {"scale_a": 1 / x_scale, "scale_b": 1 / w_scale, "out_dtype": torch.bfloat16}
        multiply = functools.partial(compat.scaled_mm, use_fast_accum=FAST_ACCUM, **how)
        if kind == ONE_SCALE:
            return lambda: multiply(ready, values.t())
        cast = torch.compile(_cast, fullgraph=True, dynamic=False)
        return lambda: multiply(cast(x, x_scale), values.t())
    values, inverse = quantise_rows(weight)
    fused = torch.compile(quantise_rows, fullgraph=True, dynamic=False)
    quantise = fused if kind == FUSED else quantise_rows

    def call() -> Tensor:
        ready, scale = quantise(x)
        return PRODUCTS[product_kind(x.device)](ready, values, scale, inverse.t())

    return call


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).to(E4M3.dtype)


def layer_costs(kind: str, x: Tensor, out: int, compiled: bool = False) -> Run:
    """The run of what one frozen layer of a kind of `labutils.layers.quantization.convert` costs,
    on x [rows, width], on its device and in its format, with `out` outputs.

    Metrics: `bytes_a_parameter` that it holds at rest. On a GPU also `bytes_a_parameter_running`,
    with what it keeps of the weight between forward and backward; `step_ms`: a forward pass and the
    gradient of its input, as called from Python; `workspace_mb`: what stays allocated after a first
    such layer is gone, once for all layers. Raises `Unavailable` where the kind is.
    """
    tags = {"experiment": "layer", "layer": kind} | ({"compiled": True} if compiled else {})
    run = Run("05", f"layer {kind}" + ", compiled" * compiled, tags=tags)
    before = _allocated()
    run.metrics, ms = _costs(kind, x, out, compiled)
    if ms:
        workspace = _allocated() - before  # the first layer of a kind leaves it behind
        run.metrics, ms = _costs(kind, x, out, compiled)
        run.samples, run.metrics["step_ms"] = {"step_ms": ms}, summarise(ms)
        run.metrics |= {} if compiled else {"workspace_mb": workspace / 1e6}
    return run


def _costs(kind: str, x: Tensor, out: int, compiled: bool) -> tuple[dict[str, Any], list[float]]:
    """(metrics, milliseconds of both passes) of a new layer; no times on a CPU."""
    before, width = _allocated(), x.shape[-1]
    linear = nn.Linear(width, out, bias=False, device=x.device, dtype=x.dtype)
    layer = nn.Sequential(linear.requires_grad_(False))
    del linear
    convert_base(layer, ["0"], kind, x.dtype)
    if x.device.type == "cpu":
        held = sum(tensor.nbytes for tensor in layer.state_dict().values())
        return {"bytes_a_parameter": held / (width * out)}, []
    held = _allocated() - before
    forward_of = torch.compile(layer, dynamic=False) if compiled else layer
    x = x.detach().requires_grad_()
    dy = torch.randn(len(x), out, device=x.device, dtype=x.dtype)

    def forward() -> Tensor:
        with forward_context(kind):
            return forward_of(x)

    for _ in range(3):  # delayed scaling makes its history
        torch.autograd.grad(forward(), x, dy)
    resting = _allocated()
    y = forward()
    kept = _allocated() - resting - y.nbytes
    del y
    ms = cuda.timed(lambda: torch.autograd.grad(forward(), x, dy), budget_s=0.3)
    shares = {"": held, "_running": held + kept}
    return {f"bytes_a_parameter{name}": n / (width * out) for name, n in shares.items()}, ms


def _allocated() -> float:
    """Bytes that tensors hold on the GPU, 0 without one."""
    gc.collect()
    return cuda.GB * (cuda.allocated_memory() or 0)
