"""Frozen experts in grouped products against transformers' loop over them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.grouped_moe import grouped_experts


def experts(dtype=torch.float32, count=6):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(num_local_experts=count, hidden_size=16, intermediate_size=24)
    config._experts_implementation = "eager"
    made = GptOssExperts(config).to(dtype)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.requires_grad_(False)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**20))
def test_result_and_gradients_are_the_loops(tokens, choices, seed):
    """Whichever experts are chosen, some by nobody."""
    chance = torch.Generator().manual_seed(seed)
    layer = experts(torch.float64)
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
