"""NF4 on the hardware: our mathematics against bitsandbytes' CUDA kernels, and the frozen
layers against its own.
"""

from __future__ import annotations

import functools

import bitsandbytes.functional as bnb
import frozen_layers
import pytest
import torch
from frozen_layers import passes
from torch import nn

from labutils.layers.quantization import nf4_math
from labutils.layers.quantization.convert import convert_base
from labutils.layers.quantization.fp8_math import relative_error
from labutils.layers.quantization.nf4_linear import FrozenNF4FP8Linear, FrozenNF4Linear

pytestmark = pytest.mark.usefixtures("full_float32")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIPPED = 1e-4
"""Share of codes that may differ: numbers on the edge between two levels, where a scaling's last
bit decides.
"""


random = functools.partial(frozen_layers.random, device="cuda")


# bitsandbytes' kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 1024), (7, 9), (65,)])
def test_bytes_and_constants_are_the_kernels_own(shape, dtype):
    x = random(*shape).to(dtype)
    packed, state = bnb.quantize_4bit(x, quant_type="nf4")
    ours = nf4_math.quantise_nf4(x)
    assert torch.equal(ours.absmax, state.absmax)
    mine, theirs = (
        nf4_math.unpack(bytes_)[: x.numel()].int() for bytes_ in (ours.packed, packed.flatten())
    )
    assert ((mine - theirs).abs() <= 1).all()
    assert (mine != theirs).float().mean() <= TIPPED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 1024), (7, 9), (65,)])
def test_restored_weights_are_the_kernels_own(shape, dtype):
    packed, state = bnb.quantize_4bit(random(*shape).to(dtype), quant_type="nf4")
    ours = nf4_math.NF4(packed.flatten(), state.absmax, torch.Size(shape))
    assert torch.equal(ours.restored(dtype), bnb.dequantize_4bit(packed, state).view(shape))


@pytest.mark.parametrize("n", [257, 100_000])
def test_8_bit_constants_are_the_kernels_own(n):
    absmax = random(n, 64).abs().amax(1)
    codes, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
    ours = nf4_math.double_quantise(absmax)
    assert torch.equal(ours.differences.levels, state.code)
    torch.testing.assert_close(ours.differences.absmax, state.absmax, rtol=1e-6, atol=0)
    mine = nf4_math.joined(ours.differences.codes, absmax.shape)
    nonzero = absmax != absmax.mean()
    assert ((mine.int() - codes.int()).abs() <= 1)[nonzero].all()
    assert ((mine != codes) & nonzero).float().mean() <= 20 * TIPPED  # one alone is its own mean
    theirs = bnb.dequantize_blockwise(codes, state) + absmax.mean()
    same = mine == codes
    torch.testing.assert_close(ours.restored()[same], theirs[same], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [FrozenNF4Linear, FrozenNF4FP8Linear])
def test_it_is_bitsandbytes_linear4bit(kind):
    torch.manual_seed(0)
    linear = nn.Linear(1024, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    frozen, model = kind.from_linear(linear.requires_grad_(False)), nn.Sequential(linear)
    convert_base(model, ["0"], "nf4", torch.bfloat16)
    restored = bnb.dequantize_4bit(model[0].weight, model[0].weight.quant_state)
    assert relative_error(frozen.restored().bfloat16(), restored) < 5e-3
    x, dy = random(577, 1024).bfloat16(), random(577, 512, seed=1).bfloat16()
    limit = 1e-2 if kind is FrozenNF4Linear else 0.05
    for mine, theirs in zip(passes(frozen, x, dy), passes(model[0], x, dy), strict=True):
        assert relative_error(mine, theirs) < limit
