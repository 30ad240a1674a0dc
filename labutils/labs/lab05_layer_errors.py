"""What quantising costs one linear layer, on the tensors that really pass through it."""

from __future__ import annotations

import torch
from torch import Tensor

from labutils.layers.quantization.fp8_math import (
    E4M3,
    E5M2,
    SCALES,
    lost,
    product_error,
    quantise,
    relative_error,
)


def layer_errors(weight: Tensor, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors (norms) of a layer's two products with both factors in FP8, and of INT8 for
    comparison. `weight` [out, in], its input `x` [n, in], its output's gradient `dy` [n, out].

    "forward tensor|row|block" and "forward int8" of y = x W^T; "gradient E4M3|E5M2
    tensor|row|block" of dX = dY W, the format being dY's (W is in E4M3). One scale a tensor, a row,
    a block of 32; INT8 with one a tensor. "flushed E4M3|E5M2 tensor|row|block" is the share of
    dY's nonzero numbers that become zero.
    """
    errors = {f"forward {kind}": product_error(x, weight, kind) for kind in SCALES}
    exact = x.double() @ weight.double().T
    errors["forward int8"] = relative_error(_int8(x).double() @ _int8(weight).double().T, exact)
    for fmt in (E4M3, E5M2):
        for kind in SCALES:
            errors[f"gradient {fmt.name} {kind}"] = product_error(dy, weight.t(), kind, fmt)
            losses = lost(dy, quantise(dy, kind, fmt), fmt)
            errors[f"flushed {fmt.name} {kind}"] = losses["flushed"]
    return errors


def _int8(x: Tensor) -> Tensor:
    """x rounded to 255 even steps between its largest magnitudes (absmax), in float32."""
    step = x.float().abs().max() / 127
    return torch.round(x.float() / step) * step
