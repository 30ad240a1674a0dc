"""What quantising costs a model layer by layer, judged on the tensors that really pass through it
in training.

seen = watch_linears(model, lambda: loss(model))
errors = {name: layer_errors(layer) for name, layer in seen.items()}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

OUTLIERS = (7, 77, 177)
"""Channels that `plant_outliers` makes large."""


def language_model(width: int, depth: int, seed: int = 0) -> nn.Module:
    """A small causal language model of Mistral's architecture, random weights: `depth` blocks of
    `width` channels.
    """
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    sizes = {
        "hidden_size": width,
        "intermediate_size": 7 * width // 2,
        "num_hidden_layers": depth,
        "vocab_size": 2048,
    }
    return MistralForCausalLM(MistralConfig(**sizes, **heads))


def plant_outliers(model: nn.Module, factor: float = 60) -> nn.Module:
    """The `language_model` with a few channels whose activations are `factor` times larger, as
    trained ones have them.

    Its norms' weights are scaled in `OUTLIERS`: a model of the phenomenon (Dettmers et al. 2022,
    "LLM.int8()").
    """
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.data[list(OUTLIERS)] *= factor
    return model


@dataclass
class Seen:
    """One linear layer in one pass: its weight [out, in], its inputs [n, in] and its outputs'
    gradients [n, out].
    """

    weight: Tensor
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def x(self) -> Tensor:
        return torch.cat(self.inputs)

    @property
    def dy(self) -> Tensor:
        return torch.cat(self.gradients)


def watch_linears(
    model: nn.Module, loss: Callable[[], Tensor], most: int = 1024
) -> dict[str, Seen]:
    """Name -> what every nn.Linear of `model` saw while `loss()` was computed and went backward; at
    most `most` rows.

    The model's parameters must take gradients, or no gradient reaches its first layers. Their
    `.grad` is cleared.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    seen = {name: Seen(layer.weight.detach()) for name, layer in layers.items()}

    def watch(name: str, x: Tensor, y: Tensor) -> None:
        seen[name].inputs.append(x.detach().reshape(-1, x.shape[-1])[:most])
        y.register_hook(lambda dy: seen[name].gradients.append(dy.reshape(-1, dy.shape[-1])[:most]))

    handles = [
        layer.register_forward_hook(lambda _, args, y, name=name: watch(name, args[0], y))
        for name, layer in layers.items()
    ]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return {name: one for name, one in seen.items() if one.gradients}


def layer_errors(seen: Seen) -> dict[str, float]:
    """Relative errors (norms) of one layer's two products with both factors in FP8, and of INT8 for
    comparison.

    "forward tensor|row|block" and "forward int8" of y = x W^T; "gradient E4M3|E5M2
    tensor|row|block" of dX = dY W, the format being dY's (W is in E4M3). One scale a tensor, a row,
    a block of 32; INT8 with one a tensor. "flushed E4M3| E5M2 tensor|row|block" is the share of
    dY's nonzero numbers that become zero.
    """
    found = {f"forward {kind}": product_error(seen.x, seen.weight, kind) for kind in SCALES}
    exact = seen.x.double() @ seen.weight.double().T
    found["forward int8"] = relative_error(
        _int8(seen.x).double() @ _int8(seen.weight).double().T, exact
    )
    for fmt in (E4M3, E5M2):
        for kind in SCALES:
            found[f"gradient {fmt.name} {kind}"] = product_error(
                seen.dy, seen.weight.t(), kind, fmt
            )
            found[f"flushed {fmt.name} {kind}"] = lost(seen.dy, quantise(seen.dy, kind, fmt), fmt)[
                "flushed"
            ]
    return found


def _int8(x: Tensor) -> Tensor:
    """x rounded to 255 even steps between its largest magnitudes (absmax), in float32."""
    step = x.float().abs().max() / 127
    return torch.round(x.float() / step) * step
