"""A mixture of experts as two grouped products, for gpt-oss layers whose experts are frozen.

transformers' plain loop asks the device which experts were chosen and multiplies for one after the
other: a wait and some ten launches each. Sorted by expert, all tokens' rows lie in one matrix whose
stretches belong to one expert each; one grouped product multiplies every stretch with its own
weights, and nothing has to be known on the host. (As transformers' own "grouped_mm" does; here
moving rows there and back is a gather both forward and backward, where the gradient of an index
would sort again or add row by row.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.profiling import compat


def grouped_experts(experts: nn.Module, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """transformers' GptOssExperts: x [tokens, width], chosen experts and their shares [tokens, k]
    to [tokens, width].

    Gradients reach `x` and `shares`; the experts' weights get none.
    """
    tokens, choices = chosen.shape
    expert, order = chosen.flatten().sort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    every = torch.arange(len(experts.gate_up_proj), device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)
    repeated = x.to(experts.gate_up_proj.dtype).unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
    rows = _Moved.apply(repeated, order, back)
    both = _GroupedProduct.apply(rows, experts.gate_up_proj, ends)
    hidden = compat.expert_gate(experts, both + experts.gate_up_proj_bias[expert])
    out = _GroupedProduct.apply(hidden, experts.down_proj, ends) + experts.down_proj_bias[expert]
    weighed = out * _Moved.apply(shares.flatten(), order, back).unsqueeze(-1)
    return _Moved.apply(weighed, back, order).view(tokens, choices, -1).sum(1).to(x.dtype)


class _GroupedProduct(torch.autograd.Function):
    """rows [n, a], sorted by expert, times each one's own weight [experts, a, b]; `ends`: where
    each one's rows end.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ends)
        return _product(rows.to(weight.dtype), weight, ends)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        weight, ends = ctx.saved_tensors
        slope = slopes[0].to(weight.dtype).contiguous()
        return _product(slope, weight.transpose(1, 2), ends), None, None


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch.nn.functional.grouped_mm, which the compiler knows for bfloat16 alone."""
    if rows.dtype != torch.bfloat16:
        return _one_by_one(rows, weight, ends)
    return F.grouped_mm(rows, weight, offs=ends)


@torch.library.custom_op("labutils::products_one_by_one", mutates_args=())
def _one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same in any dtype, one product after the other; on a GPU it waits for `ends`."""
    out = rows.new_empty(len(rows), weight.shape[-1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end], weight[expert], out=out[start:end])
        start = end
    return out


@_one_by_one.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[-1])


class _Moved(torch.autograd.Function):
    """rows[order], and for the gradient slope[back]; `back` undoes the permutation `order`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return slopes[0][back], None, None


@functools.cache
def register_experts() -> None:
    """Make `grouped_experts` known to transformers as the experts implementation "frozen"."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("frozen", grouped_experts)
