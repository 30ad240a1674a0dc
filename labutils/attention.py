"""Causal attention over rows that hold several documents, for transformers' decoder layers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    boundaries: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a transformers' layer; with `boundaries`, within each document of the flattened rows.

    query is [rows, heads, n, d], key and value [rows, kv_heads, n, d], boundaries int32 [documents + 1]; returns
    [rows, n, heads, d]. No mask is formed on a GPU in half precision, so flash attention is taken; elsewhere documents
    are kept apart by a dense mask.
    """
    if boundaries is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    rows, heads, length, width = query.shape
    flat = [x.transpose(1, 2).reshape(rows * length, -1, width) for x in (query, key, value)]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        out = _varlen(*flat, boundaries, length, scaling)
    else:
        out = _masked(*flat, boundaries, scaling)
    return out.view(rows, length, heads, width), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scaling: float) -> Tensor:
    """Flash attention over documents of varying length; all [tokens, heads, d]."""
    from torch.nn.attention.varlen import varlen_attn

    causal, grouped = _varlen_options()
    if not grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return varlen_attn(query, key, value, boundaries, boundaries, longest, longest, scale=scaling, **causal, **grouped)


@functools.cache
def _varlen_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """How this PyTorch is told "causal", and that keys have fewer heads than queries ({}: it can't be told)."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal, {"enable_gqa": True} if "enable_gqa" in known else {}


def _masked(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float) -> Tensor:
    """The same with a mask of [tokens, tokens]."""
    tokens = torch.arange(len(query), device=query.device, dtype=boundaries.dtype)
    document = torch.bucketize(tokens, boundaries[1:], right=True)
    mask = (document[:, None] == document) & (tokens[:, None] >= tokens)
    heads_first = [x.transpose(0, 1)[None] for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


@functools.cache
def register_attention() -> None:
    """Make `document_attention` known to transformers as the attention implementation "documents"."""
    from transformers import AttentionInterface

    AttentionInterface.register("documents", document_attention)
