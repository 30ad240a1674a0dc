"""Frozen linear layers whose weight is stored as QLoRA stores it, in operations that a compiler
sees through.

The bytes are bitsandbytes' own: NF4 codes two a byte, a constant a block of 64 in 8 bits, a
constant of those a group of 256, and their mean: 0.516 bytes a parameter. What differs from its
Linear4bit is how they are used. There, unpacking is a kernel of the library, called with an object
that holds the constants: nothing that torch.compile could look into. Here it is two table look-ups
and two products written in PyTorch, which the compiler turns into one kernel.

    y = x W^T        W is unpacked to x's dtype, multiplied with, and let go
    dX = dY W        W is unpacked once more: between the two nothing is kept but the packed bytes

Each unpacking reads half a byte a parameter, writes two, and the product reads them again, against
2 rows FLOP a parameter. `FrozenNF4FP8Linear` unpacks to E4M3 with one scale a row and multiplies as
`labutils.layers.quantization.fp8_linear` does: one byte is written instead of two, and the tensor
cores run at twice the rate. NF4 costs 9 % of a product's norm, and rounding both factors to FP8
another 3.7 %, together 10 % (tests/equivalence/test_frozen_linears).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.layers.quantization.fp8_linear import (
    FrozenLinear,
    product_kind,
    quantise_rows,
    scaled_product,
)
from labutils.layers.quantization.fp8_math import E4M3
from labutils.layers.quantization.nf4_math import (
    BLOCK,
    double_quantise,
    dynamic_levels,
    nf4_levels,
    quantise_nf4,
    unpack,
)


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
    codes = unpack(torch.arange(256, dtype=torch.uint8, device="cpu")).view(256, 2)
    return Tables(nf4_levels()[codes.int()].to(device), dynamic_levels().to(device))


def unpacked(w: Packed) -> Tensor:
    """The weight, flattened, in float32; plain operations, one fused kernel where compiled."""
    constants = w.tables.constants[w.constants.int()] * w.scales[:, None] + w.offset
    constants = constants.view(-1)[: 2 * w.codes.numel() // BLOCK]
    return (w.tables.pairs[w.codes.int()].view(-1, BLOCK) * constants[:, None]).view(-1)


class FrozenNF4Linear(FrozenLinear):
    """W stored in NF4, doubly quantised, and multiplied in x's dtype."""

    kept = ("scales", "offset")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        torch.compiler.allow_in_graph(_unpacked_product)
        nf4 = quantise_nf4(weight)
        doubled = double_quantise(nf4.absmax)
        self.weight = nn.Parameter(nf4.packed.view(self.out_features, -1), requires_grad=False)
        self.register_buffer("constants", doubled.differences.codes)
        self.register_buffer("scales", doubled.differences.absmax)
        self.register_buffer("offset", doubled.offset)
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


class FrozenNF4FP8Linear(FrozenNF4Linear):
    """The same, multiplied in FP8: W unpacked to E4M3 with one scale a row, x's rows quantised as
    they come. A row's largest magnitude is taken once, when the layer is made: `row_scale` [out, 1]
    in float32."""

    kept = ("scales", "offset", "row_scale")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        torch.compiler.allow_in_graph(_unpacked_fp8_product)
        self.register_buffer("row_scale", quantise_rows(self.restored())[1])

    def place(self, device: torch.device) -> None:
        super().place(device)
        self.kind = product_kind(device)

    def product(self, x: Tensor) -> Tensor:
        return _unpacked_fp8_product(x, self.row_scale, self.kind, *self.packed())


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


class _UnpackedFP8Product(torch.autograd.Function):
    """The same on FP8 tensor cores; the scales of W's rows go into dY before it is quantised, as
    in `fp8_linear`."""

    @staticmethod
    def forward(
        ctx, x: Tensor, row_scale: Tensor, kind: str, codes: Tensor, *others: Any
    ) -> Tensor:
        *constants, ctx.tables = others
        ctx.save_for_backward(row_scale, codes, *constants)
        ctx.kind = kind
        weight = unpacked(Packed(codes, *others)).view(-1, x.shape[-1])
        return scaled_product(x, (weight / row_scale).to(E4M3.dtype), row_scale.t(), kind, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        row_scale, codes, *constants = ctx.saved_tensors
        weight = unpacked(Packed(codes.view(-1), *constants, ctx.tables)).view(dy.shape[-1], -1)
        transposed = (weight / row_scale).to(E4M3.dtype).t().contiguous()
        ones = torch.ones_like(transposed[:, 0], dtype=torch.float32)[None]
        scaled = dy * row_scale.t()  # in float32, as the scale is
        return scaled_product(scaled, transposed, ones, ctx.kind, dy.dtype), *(None,) * 7


def _unpacked_fp8_product(x: Tensor, row_scale: Tensor, kind: str, *packed: Any) -> Tensor:
    """The function above, passed on by the compiler's front end as it is and taken apart by its
    back end: the front end (PyTorch 2.13) fails on several such layers in one block of any length.
    """
    return _UnpackedFP8Product.apply(x, row_scale, kind, *packed)
