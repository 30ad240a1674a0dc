"""What quantising costs a model layer by layer, judged on the tensors that really pass through it
in training.

seen = watch_linears(model, lambda: loss(model))
errors = {name: layer_errors(layer) for name, layer in seen.items()}
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labutils.layers.quantization.fp8_math import (
    E4M3,
    E5M2,
    SCALES,
    lost,
    product_error,
    quantise,
    relative_error,
)


class Seen(NamedTuple):
    """One linear layer in one pass: its weight [out, in], its input `x` [n, in] and its output's
    gradient `dy` [n, out].
    """

    weight: Tensor
    x: Tensor
    dy: Tensor


def watch_linears(
    model: nn.Module, loss: Callable[[], Tensor], most: int = 1024
) -> dict[str, Seen]:
    """Name -> what every nn.Linear of `model` saw while `loss()` was computed and went backward; at
    most `most` rows of its last call.

    The model's parameters must take gradients, or no gradient reaches its first layers. Their
    `.grad` is cleared.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    seen: dict[str, Seen] = {}

    def watch(name: str, x: Tensor, y: Tensor) -> None:
        weight, x = layers[name].weight.detach(), x.detach().flatten(0, -2)[:most]
        y.register_hook(lambda dy: seen.update({name: Seen(weight, x, dy.flatten(0, -2)[:most])}))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(
                lambda _, args, y, name=name: watch(name, args[0], y)
            )
            hooks.callback(handle.remove)
        loss().backward()
    model.zero_grad()
    return {name: seen[name] for name in layers if name in seen}


def layer_errors(seen: Seen) -> dict[str, float]:
    """Relative errors (norms) of one layer's two products with both factors in FP8, and of INT8 for
    comparison.

    "forward tensor|row|block" and "forward int8" of y = x W^T; "gradient E4M3|E5M2
    tensor|row|block" of dX = dY W, the format being dY's (W is in E4M3). One scale a tensor, a row,
    a block of 32; INT8 with one a tensor. "flushed E4M3|E5M2 tensor|row|block" is the share of
    dY's nonzero numbers that become zero.
    """
    weight, x, dy = seen
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
