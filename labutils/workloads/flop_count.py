"""Floating-point operations counted from shapes: one pass of the real code on the meta device,
nothing computed.

PyTorch's FlopCounterMode counts what it sees dispatched, and so counts 0 for fused attention on a
CPU and for 4-bit layers. This counts a step earlier, at the functions that models call, by the
textbook formula for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FlopCount(TorchFunctionMode):
    """Counts forward FLOPs by function, and what the backward pass of the same calls will need.

    A product's backward is one product of the same size for each factor that needs a gradient;
    attention's is two for each of its two products (what a fused kernel recomputes isn't useful
    work and isn't counted). `with FlopCount() as count: loss = model(x)`; then `count.forward`,
    `count.backward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_function: Counter[str] = Counter()
        self.forward = 0
        self.backward = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func)
        if formula and torch.is_tensor(out):
            flops = formula(out, *args)
            # Attention's gradient takes two products for each of the forward pass's two, whichever
            # factor needs it.
            needed = 2 if func in ATTENTION else _needing_gradient(args[:2])
            self.by_function[func.__name__] += flops
            self.forward += flops
            self.backward += flops * needed if out.requires_grad else 0
        return out


def _needing_gradient(factors: Iterable[Any]) -> int:
    return sum(torch.is_tensor(f) and f.requires_grad for f in factors)


def _linear(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * out.numel() * x.shape[-1]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * out.numel() * weight[0].numel()


def _product(out: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return 2 * out.numel() * a.shape[-1]


def _attention(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


FORMULAS: dict[Callable, Callable[..., int]] = {
    F.linear: _linear,
    F.conv2d: _convolution,
    torch.conv2d: _convolution,
    torch.matmul: _product,
    torch.bmm: _product,
    torch.mm: _product,
    Tensor.matmul: _product,
    Tensor.__matmul__: _product,
    F.scaled_dot_product_attention: _attention,
}
ATTENTION = (F.scaled_dot_product_attention,)


def weight_bytes(*modules: torch.nn.Module, itemsize: int) -> int:
    """Bytes of the modules' parameters at `itemsize` bytes each."""
    return sum(p.numel() for module in modules for p in module.parameters()) * itemsize
