"""What low-bit layers cost: products in BF16 and FP8 over sizes, and the bytes and time of each
kind of frozen layer.

The products are put through `labutils.profiling.operations.measure_operation`: inputs that no cache
holds, the GPU's time alone (replayed from a CUDA graph) beside the time as called from Python.
"""

from __future__ import annotations

import gc
import statistics
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
from labutils.profiling.operations import Operation, Timing, measure_operation
from labutils.recipe import Unavailable

BF16 = "BF16"
ONE_SCALE = "FP8, one scale"
ROWWISE = "FP8, a scale a row"
DELAYED = "FP8, one scale, known before"
ON_THE_WAY = "FP8, a scale a row, quantised on the way"
FUSED = "FP8, a scale a row, quantised on the way, compiled"
PRODUCT_KINDS = (BF16, ONE_SCALE, ROWWISE, DELAYED, ON_THE_WAY, FUSED)
"""What is timed: x W^T with x [n, n] and W [n, n]. The first three find both matrices in their
format; the last three begin with x in BF16, as a layer does, and W quantised before."""


def require_fp8() -> None:
    """Raise `Unavailable` on a machine without an FP8 product that is worth timing."""
    if (
        not cuda.available()
        or product_kind(torch.device("cuda", torch.cuda.current_device())) == "emulated"
    ):
        raise Unavailable(
            "FP8 products need an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, "
            "Blackwell)"
        )


def products(rows: int, width: int, out: int) -> list[Operation]:
    """The kinds of `PRODUCT_KINDS` for x [rows, width] and W [out, width] on the GPU, FLOPs and
    least bytes counted.
    """
    flops = 2 * rows * width * out
    half, eighth = 2 * (rows * width + out * width), rows * width + out * width
    read = {BF16: half, ONE_SCALE: eighth, ROWWISE: eighth}
    shape = f"{rows}x{width} by {width}x{out}"
    makers = {kind: _maker(kind, rows, width, out) for kind in PRODUCT_KINDS}
    return [
        Operation(
            kind,
            shape,
            "bf16" if kind == BF16 else "fp8",
            flops,
            read.get(kind, 2 * rows * width + out * width) + 2 * rows * out,
            makers[kind],
        )
        for kind in PRODUCT_KINDS
    ]


def _maker(kind: str, rows: int, width: int, out: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        x, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (rows, out))
        return _call(kind, x, weight)

    return make


def _call(kind: str, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    if kind == BF16:
        return lambda: F.linear(x, weight)
    if kind in (ONE_SCALE, DELAYED):
        x_scale, w_scale = scale_for(amax(x)), scale_for(amax(weight))
        inverses = 1 / x_scale, 1 / w_scale
        ready, values = (x * x_scale).to(E4M3.dtype), (weight * w_scale).to(E4M3.dtype)
        if kind == ONE_SCALE:
            return lambda: one_scale_product(ready, values, *inverses)
        cast = _compiled(_cast)
        return lambda: one_scale_product(cast(x, x_scale), values, *inverses)
    values, inverse = quantise_rows(weight)
    product = PRODUCTS[product_kind(x.device)]
    if kind == ROWWISE:
        ready, scale = quantise_rows(x)
        return lambda: product(ready, values, scale, inverse.t())
    quantise = _compiled(quantise_rows) if kind == FUSED else quantise_rows

    def call() -> Tensor:
        ready, scale = quantise(x)
        return product(ready, values, scale, inverse.t())

    return call


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).to(E4M3.dtype)


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)


def one_scale_product(
    x: Tensor, weight: Tensor, x_inverse: Tensor, weight_inverse: Tensor
) -> Tensor:
    """x [m, k] W^T in BF16 for x and W [n, k] in FP8 with one scale each, as A2's per-tensor
    scaling multiplies.
    """
    return compat.scaled_mm(
        x,
        weight.t(),
        scale_a=x_inverse,
        scale_b=weight_inverse,
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUM,
    )


def sweep_products(sizes: Sequence[int]) -> dict[str, dict[int, Timing]]:
    """Kind -> n -> times of the product of two n x n matrices. Raises `Unavailable` without FP8
    tensor cores.
    """
    require_fp8()
    found: dict[str, dict[int, Timing]] = {kind: {} for kind in PRODUCT_KINDS}
    for n in sizes:
        for operation in products(n, n, n):
            found[operation.name][n] = measure_operation(operation, budget_s=0.05)
    return found


def wins_from(challenger: dict[int, Timing], other: dict[int, Timing]) -> int | None:
    """The smallest size from which on the challenger takes less of the GPU's time at every larger
    size as well.
    """
    wins = {n: _median(challenger[n]) < _median(other[n]) for n in sorted(challenger)}
    return next((n for n in wins if all(won for m, won in wins.items() if m >= n)), None)


def _median(timing: Timing) -> float:
    return statistics.median(timing.alone_ms)


# -------------------------------------------------------------------------------------------------
# Whole layers


def layer_costs(
    kind: str,
    rows: int,
    width: int,
    out: int,
    device: str,
    dtype: torch.dtype,
    compiled: bool = False,
) -> dict[str, Any]:
    """What one frozen layer width -> out of a kind of `labutils.layers.quantization.convert` costs.

    `bytes_a_parameter` that it holds at rest. On a GPU also `bytes_a_parameter_running`, with what
    it keeps of the weight between forward and backward, and `step_ms`: samples of a forward pass
    and the gradient of its input, as called from Python. Raises `Unavailable` where the kind is.
    """
    before = _allocated(device)
    layer = nn.Sequential(
        nn.Linear(width, out, bias=False, device=device, dtype=dtype)
    ).requires_grad_(False)
    convert_base(layer, ["0"], kind, dtype)
    if device == "cpu":
        held = sum(
            t.nbytes
            for t in [*layer.parameters(), *layer.buffers(), *_quantisation_state(layer[0])]
        )
        return {"bytes_a_parameter": held / (width * out)}
    held = _allocated(device) - before
    run = torch.compile(layer, dynamic=False) if compiled else layer
    x = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
    dy = torch.randn(rows, out, device=device, dtype=dtype)

    def forward() -> Tensor:
        with forward_context(kind):
            return run(x)

    for _ in range(3):  # libraries make their workspaces, delayed scaling its history
        torch.autograd.grad(forward(), x, dy)
    resting = _allocated(device)
    y = forward()
    kept = _allocated(device) - resting - y.nbytes
    del y
    return {
        "bytes_a_parameter": held / (width * out),
        "bytes_a_parameter_running": (held + kept) / (width * out),
        "step_ms": cuda.timed(lambda: torch.autograd.grad(forward(), x, dy), budget_s=0.3),
    }


def _quantisation_state(layer: nn.Module) -> list[Tensor]:
    """What bitsandbytes keeps beside a 4-bit weight, outside the module's parameters: block scales
    and their scales.
    """
    state = getattr(layer.weight, "quant_state", None)
    return (
        [value for value in state.as_dict().values() if isinstance(value, Tensor)] if state else []
    )


def _allocated(device: str) -> int:
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
