"""Cross-entropy of a language model without its logits.

Logits are the largest tensor of a language model's training step: one number for each token and
each word of the vocabulary, in float32, and once more as their gradient. Their gradient is known in
closed form, softmax(logits) minus the one-hot target, so it can be formed chunk by chunk in the
forward pass, turned into the gradient of the hidden states at once, and thrown away. What is kept
is one tensor as large as the hidden states. (The same idea is in Liger Kernel, Hsu et al. 2024, and
Cut Cross-Entropy, Wijmans et al. 2024.)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
CHUNK = 1024
"""Tokens whose logits exist at one time: 131 MB of float32 at a vocabulary of 32 k."""


class ChunkLoss(nn.Module):
    """A chunk of tokens' part of the loss, and the gradient of its hidden states.

    A module without weights, so that it can be compiled as a decoder's block is: nothing as large
    as the logits is then written in float32.
    """

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of -log softmax(hidden @ weight^T)[target] over targets that aren't -100, and its
        gradient.

        hidden [n, width], weight [vocabulary, width], targets int64 [n]; the sum is a scalar in
        float32 (float64 for float64), the gradient [n, width] in weight's dtype.
        """
        logits = (hidden @ weight.t()).to(_exact(hidden))
        kept = (targets != IGNORED).unsqueeze(1)
        # Another negative target is out of range, and fails.
        place = targets.unsqueeze(1).masked_fill(~kept, 0)
        log_sum = logits.logsumexp(-1, keepdim=True)
        missed = log_sum - logits.gather(1, place)  # -log of the target's probability
        # Softmax, in place of the logits.
        slope = logits.sub_(log_sum).exp_().mul_(kept).to(weight.dtype)
        slope.scatter_(1, place, (torch.expm1(-missed) * kept).to(weight.dtype))
        return (missed * kept).sum(), slope @ weight


def _exact(hidden: Tensor) -> torch.dtype:
    """What all but the products is computed in."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = CHUNK,
    chunk_loss: nn.Module | None = None,
) -> Tensor:
    """The mean of -log softmax(hidden @ weight^T)[target] over targets that aren't -100, a float32
    scalar (NaN: none).

    hidden [n, width] and weight [vocabulary, width] of one dtype, targets int64 [n]. Products are
    computed in that dtype and everything else in float32 (float64 for float64). The weight is
    frozen: it gets no gradient. chunk_loss: a `ChunkLoss`, compiled or not. Raises `ValueError`
    where the weight is trained.
    """
    if weight.requires_grad:
        raise ValueError(
            "The head's weight is trained, and this loss gives it no gradient. Use loss='logits', "
            "or freeze it."
        )
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk, chunk_loss or ChunkLoss())


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradient as well; backward scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, chunk_loss: nn.Module
    ) -> Tensor:
        # The meta device knows no autocast to be switched off.
        with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
            gradient = torch.empty_like(hidden)
            total = torch.zeros((), dtype=_exact(hidden), device=hidden.device)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                added, gradient[part] = chunk_loss(hidden[part], weight, targets[part])
                total += added
            share = 1 / (targets != IGNORED).sum().to(total.dtype)
        # Of no targets at all the gradient is 0, as PyTorch's.
        ctx.save_for_backward(gradient, share.clamp(max=1))
        return total * share

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, share = ctx.saved_tensors
        # One target's share of the mean is next to nothing in float16 until the loss's scale is in
        # it.
        scaled = gradient.to(share.dtype) * (slopes[0] * share)
        return scaled.to(gradient.dtype), None, None, None, None


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same from whole logits, as the library computes it: in float32, all tokens at once."""
    return F.cross_entropy(F.linear(hidden, weight).to(_exact(hidden)), targets)
