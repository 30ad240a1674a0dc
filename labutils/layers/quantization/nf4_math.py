"""The mathematics of 4-bit weights: blocks, NF4, packing, and double quantisation (QLoRA).

Written out for reading and checking, on any device. `labutils.layers.quantization.nf4_linear` is
where it is made fast.

    w = quantise_nf4(x)            16 levels at a normal distribution's quantiles, two codes a byte
    double_quantise(w.absmax)      the blocks' constants in 8 bits: 0.127 bit a parameter, not 0.5

NF4: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs". The 8-bit format of the
constants: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Levels, packed
bytes, constants and restored weights are bitsandbytes' own, bit for bit, except that

- bitsandbytes on a CPU looks 8-bit codes up in a table of 2^16 evenly spaced numbers: what lies
  within 2^-16 of the middle between two levels may get the farther one (0.1 % of constants), and
  the seven levels nearest to zero are never used. Here and in its CUDA kernels the nearest level is
  taken.
- on a CPU it divides the last block by its absmax where that block is not full, and multiplies all
  others by 1 / absmax, as is done here throughout: a number on the very edge between two levels can
  fall to either side.
- a block of zeros has the code of 0 here and on a CPU, that of -1 on CUDA: times an absmax of 0,
  both are 0.
- on a CPU with AVX-512, bitsandbytes 0.50 restores a matrix with the wrong constants where its rows
  are no multiple of the block (32 or 96 wide): it counts blocks from each row's start. Given the
  same bytes flattened, it doesn't.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Neighbours (in the flattened weight) that share one constant in NF4."""
GROUP = 256
"""Constants that share one constant of their own in double quantisation."""
COVERED = 0.9677083
"""Probability up to which NF4's levels reach: halfway between 1 - 1/32 and 1 - 1/30, the middles of
the outermost of 16 equal shares and of 15. bitsandbytes' table was made with these seven digits."""
ZERO = 7
"""NF4's code of 0."""
SMALLEST_ABSMAX = 1e-38
"""Blocks below this are divided by it: the inverse of their absmax would overflow float32."""


# -------------------------------------------------------------------------------------------------
# Blocks


def blocks_of(x: Tensor, block: int | None) -> Tensor:
    """x flattened, in float32, as [blocks, block]; zeros fill up the last one. None makes one block
    of it all.
    """
    flat = x.detach().reshape(-1).float()
    size = max(1, flat.numel()) if block is None else block
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    """What `blocks_of` took apart: the first numbers of `blocks`, as many as `shape` holds."""
    return blocks.reshape(-1)[: math.prod(shape)].view(shape)


# -------------------------------------------------------------------------------------------------
# Levels of one's choice


@functools.cache
def nf4_levels() -> Tensor:
    """The 16 numbers (float32, sorted, -1 to 1) that NF4 knows: quantiles of a normal distribution,
    and an exact zero.

    Eight quantiles from one end to the middle and seven from the other, evenly spaced in
    probability, divided by the largest; the middle itself is zero and shared. So there is one level
    more above zero than below.
    """
    above, below = (
        torch.linspace(COVERED, 0.5, count + 1, device="cpu")[:-1].double() for count in (8, 7)
    )
    quantiles = _around_zero(torch.special.ndtri(below), torch.special.ndtri(above).flip(0)).float()
    return quantiles / quantiles[-1]


@functools.cache
def dynamic_levels() -> Tensor:
    """The 256 numbers (float32, sorted) of the 8-bit format in which double quantisation holds
    constants.

    A decimal exponent from 1e-6 to 1 in unary, and what bits it leaves for a fraction: 2^i evenly
    spaced numbers between 10^(i-7) and 10^(i-6), for i from 0 to 6, with both signs; then 0, and 1
    without its negative.
    """
    decades = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, device="cpu")
        decades.append(10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2))
    positive = torch.cat(decades)
    return torch.cat([_around_zero(positive.flip(0), positive), torch.ones_like(positive[:1])])


def _around_zero(below: Tensor, above: Tensor) -> Tensor:
    """Sorted levels from the magnitudes of those below zero, largest first, and of those above,
    smallest first.
    """
    return torch.cat([-below, torch.zeros_like(above[:1]), above])


@dataclass(frozen=True)
class Coded:
    """A tensor as places in a table of levels: x is about levels[code] * absmax of its block.

    `codes` are uint8 [blocks, block], `absmax` is float32 [blocks], `levels` float32, sorted.
    """

    codes: Tensor
    absmax: Tensor
    levels: Tensor
    shape: torch.Size

    def restored(self) -> Tensor:
        """The tensor in float32."""
        return joined(self.levels[self.codes.int()] * self.absmax[:, None], self.shape)


def quantise_to(levels: Tensor, x: Tensor, block: int | None) -> Coded:
    """Each number of x, divided by its block's largest magnitude, as the place of the nearest of
    the sorted `levels`.

    In the middle between two it is the lower. A block with NaN or infinity in it is restored as NaN
    (and infinity).
    """
    levels = levels.to(x.device)
    parts = blocks_of(x, block)
    absmax = parts.abs().amax(dim=1)
    middles = (levels[1:] + levels[:-1]) / 2
    inverse = absmax.clamp(min=SMALLEST_ABSMAX).reciprocal()[:, None]
    codes = torch.bucketize(parts * inverse, middles, out_int32=True)
    return Coded(codes.to(torch.uint8), absmax, levels, x.shape)


# -------------------------------------------------------------------------------------------------
# NF4


@dataclass(frozen=True)
class NF4:
    """A tensor in NF4: `packed` holds two codes a byte (uint8 [ceil(n / 2)]), `absmax` a constant a
    block (float32).
    """

    packed: Tensor
    absmax: Tensor
    shape: torch.Size
    block: int = BLOCK

    def restored(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor, multiplied out in float32 and rounded to `dtype` once."""
        codes = blocks_of(unpack(self.packed)[: math.prod(self.shape)], self.block)
        levels = nf4_levels().to(codes.device)
        return joined(levels[codes.int()] * self.absmax[:, None], self.shape).to(dtype)


def quantise_nf4(x: Tensor, block: int = BLOCK) -> NF4:
    """x in NF4, any shape; blocks are neighbours in the flattened x."""
    coded = quantise_to(nf4_levels(), x, block)
    return NF4(pack(joined(coded.codes, x.shape)), coded.absmax, x.shape, block)


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes (uint8, below 16) a byte, the first in the upper half; an odd last one is
    followed by `ZERO`.
    """
    flat = codes.reshape(-1)
    pairs = F.pad(flat, (0, flat.numel() % 2), value=ZERO).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def unpack(packed: Tensor) -> Tensor:
    """The codes (uint8 [2 n]) of n bytes, in order."""
    return torch.stack([packed >> 4, packed & 0b1111], dim=-1).reshape(-1)


# -------------------------------------------------------------------------------------------------
# Double quantisation


@dataclass(frozen=True)
class DoublyQuantised:
    """The constants of blocks in 8 bits: their mean `offset` (float32, a scalar) and what they
    differ from it by.
    """

    differences: Coded
    offset: Tensor

    def restored(self) -> Tensor:
        """The constants, float32 [blocks]."""
        return self.differences.restored() + self.offset


def double_quantise(absmax: Tensor) -> DoublyQuantised:
    """Constants (float32 [blocks]) in the dynamic 8-bit format, less their mean: so its signs are
    made use of.
    """
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
    return DoublyQuantised(quantise_to(dynamic_levels(), absmax - offset, GROUP), offset)
