"""Folded LoRA: the weights, and the gradients of the plain layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes_at_work import adapter_gradients, perturb
from torch import Tensor, nn

from labutils.layers.lora import attach_lora, lora_layers
from labutils.layers.lora_folded import ALIGNMENT, fold, form_weights


class Net(nn.Module):
    """Two layers of one input, `q` and `k`, one of another shape, and one of the same shape
    elsewhere.
    """

    def __init__(self, inner: int = 6, outer: int = 10) -> None:
        super().__init__()
        self.q = nn.Linear(inner, outer, bias=False)
        self.k = nn.Linear(inner, outer, bias=False)
        self.o = nn.Linear(outer, inner)
        self.later = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.projections(x)
        return self.later(torch.tanh(self.o(q * torch.tanh(k))))

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x)
        joint = q.shape[-1] == 2 * self.k.base_layer.out_features
        return q.chunk(2, dim=-1) if joint else (q, self.k(x))


NAMES = ("q", "k", "o", "later")


def adapted(rank: int, alpha: float, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    net = Net().to(dtype)
    attach_lora(net, NAMES, rank, alpha, "plain", seed=1)
    perturb(net, 0.3)
    return net


def folded(rank: int, alpha: float, joint: tuple = (), dtype: torch.dtype = torch.float32) -> Net:
    net = adapted(rank, alpha, dtype)
    fold(net, lora_layers(net), joint)
    return net


@settings(deadline=None, max_examples=25)
@given(
    rank=st.integers(1, 20),
    alpha=st.sampled_from([1, 4, 7.5, 16]),
    joint=st.booleans(),
    batch=st.integers(1, 5),
)
def test_folded_is_plain(rank, alpha, joint, batch):
    """In float64, where nothing hides behind rounding: outputs, and gradients by A, by B and by the
    input.
    """
    plain = adapted(rank, alpha, torch.float64)
    other = folded(rank, alpha, (("q", "k"),) if joint else (), torch.float64)
    results = []
    for net in (plain, other):
        x = torch.randn(
            batch, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        ).requires_grad_()
        form_weights(net)
        y = net(x)
        y.square().sum().backward()
        results.append((y, x.grad, adapter_gradients(net)))
    (y, x_grad, gradients), (other_y, other_x_grad, other_gradients) = results
    torch.testing.assert_close(other_y, y)
    torch.testing.assert_close(other_x_grad, x_grad)
    assert list(gradients) == list(other_gradients)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(other_gradients[name], gradient)


@pytest.mark.parametrize("rank", [8, 9])
def test_padding_never_moves(rank):
    net = folded(rank, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        form_weights(net)
        net(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    for stack in net.folds:
        assert stack.A.shape[1] % ALIGNMENT == stack.B.shape[2] % ALIGNMENT == 0
        assert not stack.A[:, rank:].any() and not stack.B[:, :, rank:].any()
        assert stack.A[:, :rank].all() and stack.B[:, :, :rank].all()
