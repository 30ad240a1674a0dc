"""Frozen linear layers whose weight is stored as QLoRA stores it, in operations that a compiler
sees through.

bitsandbytes makes the bytes: NF4 codes two a byte, a constant a block of 64 in 8 bits, a constant
of those a group of 256, and their mean: 0.516 bytes a parameter. What differs from its Linear4bit
is how they are used. There, unpacking is a kernel of the library, called with an object that holds
the constants: nothing that torch.compile could look into. Here it is two table look-ups and two
products written in PyTorch, which the compiler turns into one kernel.

    y = x W^T        W is unpacked to x's dtype, multiplied with, and let go
    dX = dY W        W is unpacked once more: between the two nothing is kept but the packed bytes

Each unpacking reads half a byte a parameter, writes two, and the product reads them again, against
2 rows FLOP a parameter. NF4 costs 9 % of a product's norm (tests/equivalence/test_frozen_linears).

NF4: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs". The 8-bit format of the
constants: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.layers.quantization.fp8_linear import FrozenLinear

BLOCK = 64
"""Neighbours (in the flattened weight) that share one constant."""
GROUP = 256
"""Constants that share one constant of their own."""


class Tables(NamedTuple):
    """What codes stand for: `pairs` [256, 2], the two numbers packed in a byte; `constants` [256],
    those of 8 bits.
    """

    pairs: Tensor
    constants: Tensor


class Packed(NamedTuple):
    """A weight [out, in] as bitsandbytes holds it, and the tables to read it by.

    `codes` uint8 [out, in / 2], or flattened; `constants` uint8 [groups, 256], the last group
    filled up; `scales` float32 [groups] and `offset` float32, a scalar, are what the constants'
    codes are multiplied with and added to.
    """

    codes: Tensor
    constants: Tensor
    scales: Tensor
    offset: Tensor
    tables: Tables


@functools.cache
def tables_on(device: torch.device) -> Tables:
    """The tables, once for all layers on a device."""
    from bitsandbytes import functional as bnb

    with torch.device("cpu"):
        byte, levels = torch.arange(256), bnb.get_4bit_type("nf4", device="cpu")
        pairs = levels[torch.stack([byte >> 4, byte & 0b1111], dim=1)]
        return Tables(pairs.to(device), bnb.create_dynamic_map().to(device))


def unpacked(w: Packed) -> Tensor:
    """The weight, flattened, in float32; plain operations, one fused kernel where compiled."""
    constants = w.tables.constants[w.constants.int()] * w.scales[:, None] + w.offset
    constants = constants.view(-1)[: 2 * w.codes.numel() // BLOCK]
    return (w.tables.pairs[w.codes.int()].view(-1, BLOCK) * constants[:, None]).view(-1)


class FrozenNF4Linear(FrozenLinear):
    """W stored in NF4, doubly quantised, and multiplied in x's dtype."""

    kept = ("scales", "offset")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__(weight, bias)
        torch.compiler.allow_in_graph(_unpacked_product)
        how = {"quant_type": "nf4", "blocksize": BLOCK, "compress_statistics": True}
        codes, state = quantize_4bit(weight.detach().contiguous(), **how)
        self.weight = nn.Parameter(codes.view(self.out_features, -1), requires_grad=False)
        filled_up = F.pad(state.absmax, (0, -len(state.absmax) % GROUP))
        self.register_buffer("constants", filled_up.view(-1, GROUP))
        self.register_buffer("scales", state.state2.absmax)
        self.register_buffer("offset", state.offset)
        self.place(weight.device)

    def place(self, device: torch.device) -> None:
        self.tables = tables_on(device)

    def product(self, x: Tensor) -> Tensor:
        return _unpacked_product(x, *self.packed())

    def packed(self) -> Packed:
        """What `unpacked` reads."""
        return Packed(self.weight, self.constants, self.scales, self.offset, self.tables)

    def restored(self) -> Tensor:
        return unpacked(self.packed()).view(self.out_features, self.in_features)


class _UnpackedProduct(torch.autograd.Function):
    """x W^T, and for the gradient of x alone; what is kept for it are W's packed bytes."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, *others: Any) -> Tensor:
        *constants, ctx.tables = others
        ctx.save_for_backward(codes, *constants)
        weight = unpacked(Packed(codes, *others)).view(-1, x.shape[-1])
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, dy: Tensor):
        codes, *others = ctx.saved_tensors
        # The same bytes in another shape: a compiler that saw the forward pass's expression once
        # more would compute it once, and keep two bytes a parameter until here.
        weight = unpacked(Packed(codes.view(-1), *others, ctx.tables)).view(dy.shape[-1], -1)
        return dy @ weight.to(dy.dtype), *(None,) * 5


def _unpacked_product(x: Tensor, *packed: Any) -> Tensor:
    """The function above, passed on by the compiler's front end as it is and taken apart by its
    back end: taken apart by the front end (PyTorch 2.11), its product would no longer be known as
    one that a checkpoint computes again, and what it gives would be kept."""
    return _UnpackedProduct.apply(x, *packed)
