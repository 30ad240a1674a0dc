"""4-bit weights by hand: levels, codes, bytes and constants against bitsandbytes."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import torch
from frozen_layers import random
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.quantization import nf4_math
from labutils.layers.quantization.nf4_math import (
    BLOCK,
    GROUP,
    NF4,
    double_quantise,
    quantise_nf4,
    quantise_to,
)

EDGE = 2.0**-22
"""How near to the edge between two levels a number must lie for a rounding of its scaling to tip it
over.
"""
GRID = 2.0**-16
"""The same for bitsandbytes' 8-bit codes on a CPU, which it looks up in a table of 2^16 evenly
spaced numbers.
"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

sizes = st.integers(1, 700)
seeds = st.integers(0, 999)


def with_traits(n: int, seed: int, zeros: bool, outlier: bool, exponent: int) -> torch.Tensor:
    """Normal numbers; half of them 0, or one of them huge, where asked."""
    x = random(n, seed=seed)
    if zeros:
        x[: n // 2] = 0
    if outlier:
        x[seed % n] = 1e6
    return x * 2.0**exponent


traits = {
    "n": sizes,
    "seed": seeds,
    "zeros": st.booleans(),
    "outlier": st.booleans(),
    "exponent": st.integers(-60, 60),
}


def restored_by_bitsandbytes(packed: torch.Tensor, state: bnb.QuantState) -> torch.Tensor:
    """Flattened first: see the module on rows that are no multiple of the block."""
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])
    return bnb.dequantize_4bit(packed, state).view(shape)


def near_an_edge(x: torch.Tensor, coded: nf4_math.Coded, margin: float) -> torch.Tensor:
    """Which numbers of x, scaled, lie within `margin` of the middle between two neighbouring
    levels.
    """
    scaled = (
        nf4_math.blocks_of(x, coded.codes.shape[1]).double()
        / coded.absmax.double().clamp(min=1e-300)[:, None]
    )
    middles = ((coded.levels[1:] + coded.levels[:-1]) / 2).double()
    nearest = middles[torch.bucketize(scaled, middles).clamp(max=len(middles) - 1)]
    before = middles[(torch.bucketize(scaled, middles) - 1).clamp(min=0)]
    distance = torch.minimum((scaled - nearest).abs(), (scaled - before).abs())
    return nf4_math.joined(distance <= margin, x.shape)


# Levels


def test_the_levels_are_bitsandbytes_own():
    assert torch.equal(nf4_math.nf4_levels(), bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(nf4_math.dynamic_levels(), bnb.create_dynamic_map())


# NF4 against bitsandbytes


@given(**traits, block=st.sampled_from([32, 64, 128]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_bytes_and_constants_are_bitsandbytes_own(n, seed, zeros, outlier, exponent, block, dtype):
    x = with_traits(
        n, seed, zeros, outlier, exponent // 8 if dtype == torch.float16 else exponent
    ).to(dtype)
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
    ours = quantise_nf4(x, block)
    assert ours.packed.dtype == packed.dtype == torch.uint8
    torch.testing.assert_close(
        ours.absmax, state.absmax, rtol=0, atol=1.1e-38
    )  # theirs is never below 1e-38
    apart = ours.packed != packed.flatten()
    full = n // block * block // 2
    assert not apart[:full].any()
    edges = near_an_edge(x, quantise_to(nf4_math.nf4_levels(), x, block), EDGE)
    assert apart.sum() <= edges.sum()  # the last block, divided instead of multiplied


@given(**traits, block=st.sampled_from([32, 64, 128]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_restored_weights_are_bitsandbytes_own(n, seed, zeros, outlier, exponent, block, dtype):
    x = with_traits(2 * n, seed, zeros, outlier, exponent).clamp(-6e4, 6e4)
    packed, state = bnb.quantize_4bit(x.to(dtype), blocksize=block, quant_type="nf4")
    ours = NF4(packed.flatten(), state.absmax, x.shape, block)
    assert torch.equal(ours.restored(dtype), restored_by_bitsandbytes(packed, state))


# Double quantisation


def constants(n: int, seed: int) -> torch.Tensor:
    """Absmax values as a weight's blocks have them."""
    return random(n, BLOCK, seed=seed).abs().amax(1)


@given(n=sizes, seed=seeds)
@settings(max_examples=30, deadline=None)
def test_constants_are_quantised_as_bitsandbytes_does(n, seed):
    absmax = constants(n, seed)
    differences = absmax - absmax.mean()
    codes, state = bnb.quantize_blockwise(differences, blocksize=GROUP)
    ours = double_quantise(absmax)
    assert ours.offset == absmax.mean()
    assert torch.equal(ours.differences.absmax, state.absmax)
    apart = nf4_math.joined(ours.differences.codes, absmax.shape) != codes
    seldom_used = differences.abs() < 2e-6 * state.absmax.repeat_interleave(GROUP)[:n]
    allowed = near_an_edge(differences, ours.differences, GRID) | seldom_used
    assert not (apart & ~allowed).any()
    theirs = bnb.dequantize_blockwise(codes, state) + absmax.mean()
    assert torch.equal(ours.restored()[~apart], theirs[~apart])
