"""NF4 on the hardware: the frozen layer against bitsandbytes' own."""

from __future__ import annotations

import functools

import bitsandbytes.functional as bnb
import frozen_layers
import pytest
import torch
from frozen_layers import passes
from torch import nn

from labutils.layers.quantization.convert import convert_base
from labutils.layers.quantization.fp8_math import relative_error
from labutils.layers.quantization.nf4_linear import FrozenNF4Linear

pytestmark = pytest.mark.usefixtures("full_float32")

random = functools.partial(frozen_layers.random, device="cuda")


def test_it_is_bitsandbytes_linear4bit():
    torch.manual_seed(0)
    linear = nn.Linear(1024, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    frozen, model = FrozenNF4Linear.from_linear(linear.requires_grad_(False)), nn.Sequential(linear)
    convert_base(model, ["0"], "nf4", torch.bfloat16)
    restored = bnb.dequantize_4bit(model[0].weight, model[0].weight.quant_state)
    assert relative_error(frozen.restored().bfloat16(), restored) < 5e-3
    x, dy = random(577, 1024).bfloat16(), random(577, 512, seed=1).bfloat16()
    for mine, theirs in zip(passes(frozen, x, dy), passes(model[0], x, dy), strict=True):
        assert relative_error(mine, theirs) < 1e-2
