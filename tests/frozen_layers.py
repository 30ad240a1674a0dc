"""What the tests of the frozen low-bit layers share, on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal numbers, the same ones on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def passes(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad
