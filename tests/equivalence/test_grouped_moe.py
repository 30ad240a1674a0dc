"""Frozen experts in grouped products against transformers' loop over them."""

from __future__ import annotations

import torch
from decoders_at_work import frozen_experts
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.grouped_moe import grouped_experts


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**20))
def test_result_and_gradients_are_the_loops(tokens, choices, seed):
    """Whichever experts are chosen, some by nobody."""
    chance = torch.Generator().manual_seed(seed)
    layer = frozen_experts(16, 24, count=6).double()
    x = torch.randn(tokens, 16, dtype=torch.float64, generator=chance, requires_grad=True)
    chosen = torch.rand(tokens, 6, generator=chance).topk(choices).indices
    shares = torch.rand(tokens, choices, dtype=torch.float64, generator=chance, requires_grad=True)
    slope = torch.randn(tokens, 16, dtype=torch.float64, generator=chance)
    results = []
    for forward in (layer, lambda *given: grouped_experts(layer, *given)):
        out = forward(x, chosen, shares)
        results.append([out, *torch.autograd.grad(out, [x, shares], slope)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
