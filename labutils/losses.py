"""Cross-entropy of a language model without its logits.

Logits are the largest tensor of a language model's training step: one number for each token and each word of the
vocabulary, in float32, and once more as their gradient. Their gradient is known in closed form, softmax(logits) minus
the one-hot target, so it can be formed chunk by chunk in the forward pass, turned into the gradient of the hidden
states at once, and thrown away. What is kept is one tensor as large as the hidden states. (The same idea is in Liger
Kernel, Hsu et al. 2024, and Cut Cross-Entropy, Wijmans et al. 2024.)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
CHUNK = 1024
"""Tokens whose logits exist at one time: 131 MB of float32 at a vocabulary of 32 k."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """The mean of -log softmax(hidden @ weight^T)[target] over targets that aren't -100, a float32 scalar (NaN: none).

    hidden [n, width] and weight [vocabulary, width] of one dtype, targets int64 [n]. Products are computed in that
    dtype and everything else in float32 (float64 for float64). The weight is frozen: it gets no gradient. Raises
    `ValueError` where it is trained, and for shapes and chunks that can't be.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} and targets {tuple(targets.shape)}; they must be [n, width] and [n]: "
            "flatten rows of tokens first."
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: a chunk has 1 token or more.")
    if weight.requires_grad:
        raise ValueError(
            "The head's weight is trained, and this loss gives it no gradient. Use loss='logits', or freeze it."
        )
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradient as well; backward scales it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # The meta device knows no autocast to be switched off.
        with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
            counted = (targets != IGNORED).sum().to(exact)
            gradient = torch.empty_like(hidden)
            total = torch.zeros((), dtype=exact, device=hidden.device)
            for start in range(0, len(hidden), chunk):
                part, wanted = hidden[start : start + chunk], targets[start : start + chunk]
                logits = (part @ weight.t()).to(exact)
                kept = wanted != IGNORED
                log_sum = logits.logsumexp(-1, keepdim=True)
                place = wanted.masked_fill(~kept, 0).unsqueeze(1)  # another negative target is out of range, and fails
                total += ((log_sum - logits.gather(1, place)).squeeze(1) * kept).sum()
                slope = logits.sub_(log_sum).exp_()  # softmax, in place of the logits
                slope.scatter_add_(1, place, torch.full_like(place, -1, dtype=exact))
                slope *= (kept / counted).unsqueeze(1)
                gradient[start : start + chunk] = slope.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        return total / counted

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0].to(gradient.dtype), None, None, None


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same from whole logits, as the library computes it: in float32, all tokens at once."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.double() if hidden.dtype == torch.float64 else logits.float(), targets)
