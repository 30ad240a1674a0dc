"""Causal attention over rows that hold several documents, for transformers' decoder layers.

Two things can be added to it. A sliding window: a token sees only the last few. A sink (gpt-oss): a
trained number for each head that takes part in the softmax and has no value, so that a head can
attend to nothing. A fused kernel knows nothing of sinks, but it returns each row's log-sum-exp L,
and with the sink s the sum grows to L' = log(e^L + e^s): every probability, and with it the result,
shrinks by e^(L - L'). The backward kernel computes probabilities from the log-sum-exp that it is
given, and the sink's own value is zero; given L' and the shrunken result, it is exact.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from labutils.profiling import compat


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    boundaries: Tensor | None = None,
    longest: int | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a transformers' layer; with `boundaries`, within each document of the
    flattened rows.

    query is [rows, heads, n, d], key and value [rows, kv_heads, n, d], boundaries int32 [documents
    + 1]; returns [rows, n, heads, d]. longest: tokens that no document exceeds, the row's length if
    not given: kernels start blocks for so many of each document, and most find nothing to do where
    it is too large. sliding_window: tokens that a token sees, itself included. s_aux: the sinks
    [heads], which get no gradient. No mask is formed on a GPU in half precision, so flash attention
    is taken; elsewhere documents are kept apart by a dense mask.
    """
    plain = sliding_window is None and s_aux is None
    if boundaries is None and plain:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    rows, heads, length, width = query.shape
    if boundaries is None:
        ends = (rows + 1) * length
        boundaries = torch.arange(0, ends, length, dtype=torch.int32, device=query.device)
        longest = None
    flat = [x.transpose(1, 2).reshape(rows * length, -1, width) for x in (query, key, value)]
    if not (query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)):
        out = _masked(*flat, boundaries, scaling, sliding_window, s_aux)
    elif plain:
        out = _varlen(*flat, boundaries, longest or length, scaling)
    else:
        if s_aux is None:
            s_aux = torch.full((heads,), -torch.inf, device=query.device)
        sinks = s_aux.detach().float()
        window = sliding_window or 0
        out, _ = _with_sinks(*flat, sinks, boundaries, longest or length, scaling, window)
    return out.view(rows, length, heads, width), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scaling: float
) -> Tensor:
    """Flash attention over documents of varying length; all [tokens, heads, d]."""
    if "enable_gqa" not in VARLEN_OPTIONS:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return varlen_attn(
        query, key, value, boundaries, boundaries, longest, longest, scale=scaling, **VARLEN_OPTIONS
    )


_KNOWN = inspect.signature(varlen_attn).parameters
VARLEN_OPTIONS: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in _KNOWN else {"is_causal": True}
) | ({"enable_gqa": True} if "enable_gqa" in _KNOWN else {})
"""How this PyTorch is told "causal", and that keys have fewer heads than queries; without
"enable_gqa" it can't be told that. Looked up here and not in the pass, which is compiled."""


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same with a mask of [tokens, tokens]; a sink is one key more, whose products are the
    sinks themselves.
    """
    tokens = torch.arange(len(query), device=query.device, dtype=boundaries.dtype)
    document = torch.bucketize(tokens, boundaries[1:], right=True)
    mask = (document[:, None] == document) & (tokens[:, None] >= tokens)
    if window is not None:
        mask &= tokens[:, None] - tokens < window
    if sinks is not None:
        key, value = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
        hidden = torch.where(mask, 0.0, -torch.inf).to(query.dtype).expand(len(sinks), -1, -1)
        column = sinks.detach().to(query.dtype)[:, None, None].expand(-1, len(query), 1)
        mask = torch.cat([hidden, column], dim=-1)
    heads_first = [x.transpose(0, 1)[None] for x in (query, key, value)]
    out = F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


# -------------------------------------------------------------------------- flash with sinks


@torch.library.custom_op("labutils::attention_with_sinks", mutates_args=())
def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Flash attention over documents; all [tokens, heads, d], sinks float32 [heads] (-inf: none),
    `window` 0: all.

    Returns the result and the log-sum-exp [heads, tokens] with the sink in it.
    """
    lengths = (boundaries, boundaries, longest, longest)
    causal, no_dropout, no_mask = window == 0, 0.0, False
    out, log_sum, _, _, _ = compat.flash_attention_forward(
        query, key, value, *lengths, no_dropout, causal, no_mask, **_seen(window, scaling)
    )
    grown = torch.logaddexp(log_sum, sinks[:, None])
    shrink = (log_sum - grown).exp().t().unsqueeze(-1)
    return (out * shrink).to(out.dtype).contiguous(), grown.contiguous()


@_with_sinks.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    log_sum = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return query.new_empty(query.shape), log_sum


@torch.library.custom_op("labutils::attention_with_sinks_backward", mutates_args=())
def _with_sinks_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    no_random_numbers = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    forward = (slope.contiguous(), query, key, value, out, log_sum)
    lengths = (boundaries, boundaries, longest, longest)
    causal, no_dropout = window == 0, 0.0
    gradients = compat.flash_attention_backward(
        *forward,
        *lengths,
        no_dropout,
        causal,
        no_random_numbers,
        unused,
        **_seen(window, scaling),
    )
    return tuple(gradient.contiguous() for gradient in gradients)


@_with_sinks_backward.register_fake
def _(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _seen(window: int, scaling: float) -> dict[str, Any]:
    """How far the kernel looks back and ahead; a window counts the token itself. (With one,
    is_causal is false: the window's right end excludes what lies ahead.)"""
    return {
        "scale": scaling,
        "window_size_left": window - 1 if window else -1,
        "window_size_right": 0,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _, boundaries, ctx.longest, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, boundaries)


def _gradients(ctx: Any, slope: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, options = ctx.saved_tensors, (ctx.longest, ctx.scaling, ctx.window)
    return (*_with_sinks_backward(slope, *saved, *options), *(None,) * 5)


_with_sinks.register_autograd(_gradients, setup_context=_keep)


@functools.cache
def register_attention() -> None:
    """Make `document_attention` known to transformers as the implementation "documents"."""
    from transformers import AttentionInterface

    AttentionInterface.register("documents", document_attention)
