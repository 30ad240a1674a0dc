"""Attention with sinks and windows against transformers' own, and the mathematics of the fused
form.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.packed_attention import document_attention


def eager(query, key, value, sinks, window, scaling):
    """transformers' gpt-oss attention of one document."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    tokens = torch.arange(query.shape[2])
    seen = (tokens[:, None] >= tokens) & (tokens[:, None] - tokens < window)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    module = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1], sinks=sinks, training=False
    )
    return eager_attention_forward(module, query, key, value, mask, scaling)[0]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 2))
def test_sinks_and_windows_are_transformers(lengths, window, rows):
    torch.manual_seed(0)
    n = sum(lengths)
    given = [torch.randn(rows, heads, n, 8, requires_grad=True) for heads in (4, 2, 2)]
    sinks, slope = torch.randn(4), torch.randn(rows, n, 4, 8)
    marks = [0, *torch.tensor(lengths * rows).cumsum(0).tolist()]
    boundaries = torch.tensor([*marks, marks[-1]], dtype=torch.int32)
    found, _ = document_attention(
        None, *given, None, 0.3, boundaries=boundaries, sliding_window=window, s_aux=sinks
    )
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [
        eager(*(x[:, :, a : a + k] for x in given), sinks, window, 0.3)
        for a, k in zip(starts, lengths, strict=True)
    ]
    expected = torch.cat(parts, dim=1)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(out, given, slope) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_without_boundaries_a_row_is_one_document(rows):
    torch.manual_seed(0)
    given = [torch.randn(rows, heads, 20, 8) for heads in (4, 2, 2)]
    sinks = torch.randn(4)
    found, _ = document_attention(None, *given, None, 0.3, sliding_window=5, s_aux=sinks)
    torch.testing.assert_close(found, eager(*given, sinks, 5, 0.3))
