"""LoRA without LoRA's layers: W' = W + BA is formed once a pass, and the network runs on W' alone.

A LoRA layer computes x W^T + (x A^T) B^T: three products forward and five backward for every
adapted projection, most of them so thin (r columns) that a GPU spends more time launching them than
computing. Yet dL/dA = B^T dL/dW' and dL/dB = dL/dW' A^T exactly. So form W', run plain linear
layers, take the ordinary gradient dL/dW' of each, and project it. That costs one more full product
a layer (dL/dW'), which a tensor core does in less time than the thin ones take, and as layers of
one shape are stacked, forming all W' and projecting all gradients takes a handful of batched
products.

The price: W' is rounded to the frozen weights' dtype, as in every merged adapter, and dL/dW' is
held in memory. In fp32 the gradients equal the plain layers' (tests/equivalence/test_folding.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 8
"""Tensor cores want inner dimensions that are multiples of 8: ranks are padded with zeros, whose
gradients are zero.
"""


class FoldedLinear(nn.Module):
    """A linear layer whose weight is handed to it, W' = W + alpha/r BA [out, in], by
    `form_weights` before each pass.

    The first of several layers that were folded jointly gets the weights of all, [n out, in], and
    gives all their results side by side [..., n out]; the others aren't called.

    It has the anatomy of a LoRA layer (`labutils.layers.lora`): lora_A["default"].weight and
    lora_B["default"].weight are views of the stacked matrices that are trained, so they
    are found and counted as in any other.
    """

    def __init__(self, base: nn.Linear, scaling: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = {"default": scaling}
        self.lora_A: dict[str, Any] = {}
        self.lora_B: dict[str, Any] = {}
        # A plain tensor, no parameter: autograd is to see where each W' comes from.
        self.weight = base.weight.detach()
        self.bias = None if base.bias is None else base.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Stack(nn.Module):
    """All adapted layers of one shape: W [n, out, in] frozen, A [n, r', in] and B [n, out, r']
    trained in float32.
    """

    def __init__(self, layers: list[nn.Module], pieces: list[int]) -> None:
        super().__init__()
        a = torch.stack([layer.lora_A["default"].weight.detach() for layer in layers])
        b = torch.stack([layer.lora_B["default"].weight.detach() for layer in layers])
        rank = a.shape[1]
        padding = -rank % ALIGNMENT
        self.A = nn.Parameter(F.pad(a, (0, 0, 0, padding)))
        self.B = nn.Parameter(F.pad(b, (0, padding)))
        self.scaling = layers[0].scaling["default"]
        self.pieces = pieces  # how many neighbours in the stack are one product
        weights = [layer.base_layer.weight.detach() for layer in layers]
        self.register_buffer("W", torch.stack(weights))
        self.folded = [FoldedLinear(layer.base_layer, self.scaling) for layer in layers]
        for index, layer in enumerate(self.folded):
            layer.lora_A["default"] = SimpleNamespace(weight=self.A.data[index, :rank])
            layer.lora_B["default"] = SimpleNamespace(weight=self.B.data[index, :, :rank])

    def form(self) -> None:
        """Hand each product its W', one batched product for all."""
        dtype = self.W.dtype
        folded = torch.baddbmm(self.W, self.B.to(dtype), self.A.to(dtype), alpha=self.scaling)
        first = 0
        for piece in folded.split(self.pieces):
            self.folded[first].weight = piece.flatten(0, 1)
            first += len(piece)


def fold(
    module: nn.Module, layers: dict[str, nn.Module], joint: Sequence[tuple[str, ...]] = ()
) -> None:
    """Put folded layers in the place of the LoRA `layers` (name -> layer) of `module`, in place.

    The model then has one A and one B for each shape of layer as its trainable parameters, and a
    submodule `folds`. Each tuple of `joint` names layers of one shape, without biases, that are
    given the same input: the first then computes them all.
    """
    first = {name: names[0] for names in joint for name in names}
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        by_shape[layer.base_layer.weight.shape].append(name)
    stacks = []
    for names in by_shape.values():
        groups = itertools.groupby(names, key=lambda name: first.get(name, name))
        pieces = [len(list(group)) for _, group in groups]
        stack = Stack([layers[name] for name in names], pieces)
        for name, folded in zip(names, stack.folded, strict=True):
            module.set_submodule(name, folded)
        stacks.append(stack)
    module.folds = nn.ModuleList(stacks)


def form_weights(module: nn.Module) -> None:
    """Form every W' of a folded model from A and B as they are now; a model that wasn't folded has
    nothing to form. Call it before each forward pass, in autograd's sight.
    """
    module = getattr(module, "module", module)  # what DistributedDataParallel wraps
    if hasattr(module, "folds"):
        with torch.autocast(module.folds[0].W.device.type, enabled=False):
            for stack in module.folds:
                stack.form()
