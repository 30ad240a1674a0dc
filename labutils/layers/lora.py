"""LoRA: W' = W + (alpha / r) B A with W frozen, written out for reading and as PEFT builds it,
behind one call.

    parameters = attach_lora(unet, ("to_q", "to_out.0"), rank=4, alpha=4, kind="plain", seed=0)

Whatever the kind, an adapted layer has the same anatomy, that of PEFT's layers with one adapter:
`base_layer`, `lora_A["default"].weight` (r x in), `lora_B["default"].weight` (out x r) and
`scaling["default"]`. So parameters have the same names in every kind, and initialising is written
once.

LoRA weights are float32 whatever the base weights are: they are small, and in half precision a
small step of the optimizer would round to nothing. The products are computed in the dtype of the
layer's input.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.recipe import check_choice

KINDS = ("peft", "plain")
NAME = "default"
"""PEFT's name for the first adapter of a model, which is the only one here."""


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank update: y = base(x) + alpha/r (x A^T) B^T.

    `base` is the nn.Linear (in -> out) that is wrapped, and stays as it is. x is (..., in), y is
    (..., out). Called under autocast or without: A and B are cast to x's dtype, and their gradients
    come back in float32. The update is zero at first (B = 0).
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        dtype = torch.float64 if base.weight.dtype == torch.float64 else torch.float32
        where: dict[str, Any] = {"device": base.weight.device, "dtype": dtype}
        A = nn.Linear(base.in_features, rank, bias=False, **where)
        B = nn.Linear(rank, base.out_features, bias=False, **where)
        nn.init.zeros_(B.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({NAME: A}), nn.ModuleDict({NAME: B})
        self.scaling = {NAME: alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        A, B = (products[NAME].weight.to(x.dtype) for products in (self.lora_A, self.lora_B))
        scaling = self.scaling[NAME]
        h = F.linear(x, A)  # (..., r)
        h = h if scaling == 1 else h * scaling  # scaled where it has r columns and not `out`
        return self.base_layer(x) + F.linear(h, B)


# -------------------------------------------------------------------------------------------------
# Attaching


def attach_lora(
    module: nn.Module,
    targets: tuple[str, ...],
    rank: int,
    alpha: float,
    kind: str,
    seed: int = 0,
) -> list[nn.Parameter]:
    """Adapt the layers of `module` that `targets` name, freeze everything else, and return the new
    parameters.

    A target matches as in PEFT: the layer's whole name, or its end after a dot ("to_out.0" matches
    "mid_block.attn1.to_out.0"). kind: "plain" (`LoRALinear`) or "peft".

    Each A is drawn from `seed` and the layer's name alone, on the CPU, with PEFT's "gaussian"
    distribution (normal, deviation 1/r): the kind, the device and the order of attaching don't
    matter. B is zero, so that training starts from the base model.

    Raises `ValueError` for a rank below 1, an unknown kind, a model that has adapters, or targets
    that match no layer.
    """
    check_choice("kind", kind, KINDS)
    if rank < 1:
        raise ValueError(f"rank={rank}: a low-rank update needs a rank of 1 or more.")
    if lora_layers(module):
        raise ValueError("This model already has an adapter. Build a new one.")
    names = matching_layers(module, targets)
    attach = _attach_peft if kind == "peft" else _attach_plain
    with torch.random.fork_rng(devices=[]):  # new layers draw weights, which are thrown away
        attach(module, names, rank, alpha)
    module.requires_grad_(False)
    trained = []
    for name, layer in lora_layers(module).items():
        A, B = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        trained += [A.requires_grad_(), B.requires_grad_()]
        if not A.is_meta:
            digest = hashlib.blake2s(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            A.data.copy_(torch.randn(A.shape, generator=generator) / len(A))
    return trained


def matching_layers(module: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the layers that `targets` match by PEFT's rule, in the model's order. `ValueError`
    if none does."""
    named = dict(module.named_modules())
    names = [n for n in named if any(n == t or n.endswith("." + t) for t in targets)]
    if not names:
        linear = [n for n, layer in named.items() if isinstance(layer, nn.Linear)]
        ends = sorted({n.rpartition(".")[2] for n in linear})
        raise ValueError(
            f"No layer of this {type(module).__name__} is named like "
            f"{', '.join(map(repr, targets))}. Its linear layers end in: {', '.join(ends)}."
        )
    return names


def _attach_plain(module: nn.Module, names: list[str], rank: int, alpha: float) -> None:
    """Put a LoRALinear in the place of each named nn.Linear."""
    for name in names:
        module.set_submodule(name, LoRALinear(module.get_submodule(name), rank, alpha))


def _attach_peft(module: nn.Module, names: list[str], rank: int, alpha: float) -> None:
    """Have PEFT do it, through the model's own `add_adapter` where it is a diffusers or
    transformers model."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)
    if hasattr(module, "add_adapter"):
        module.add_adapter(config, NAME)
    else:
        inject_adapter_in_model(config, module, NAME)
    for layer in lora_layers(module).values():  # PEFT made them in the base weights' dtype
        for weight in (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight):
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))


# -------------------------------------------------------------------------------------------------
# What is attached


def lora_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> adapted layer, of whatever kind, in the model's order."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def count_parameters(module: nn.Module) -> int:
    """All parameters of the model; a model on the meta device, which has shapes and no memory,
    counts the same."""
    return sum(p.numel() for p in module.parameters())


def count_trainable(module: nn.Module) -> int:
    """The parameters that get a gradient; on the meta device too."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
