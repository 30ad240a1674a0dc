"""Cross-entropy without logits against PyTorch's own, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.chunked_cross_entropy import cross_entropy, linear_cross_entropy


def problem(
    tokens: int, width: int, words: int, dtype: torch.dtype, seed: int, ignored: float = 0.4
):
    chance = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=chance, dtype=torch.float64)
    weight = torch.randn(words, width, generator=chance, dtype=torch.float64)
    targets = torch.randint(words, (tokens,), generator=chance)
    targets[torch.rand(tokens, generator=chance) < ignored] = -100
    targets[0] = 0
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), targets


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(2, 30),
    st.integers(1, 50),
    st.integers(0, 1000),
)
def test_loss_and_gradient_are_pytorchs(tokens, width, words, chunk, seed):
    hidden, weight, targets = problem(tokens, width, words, torch.float64, seed)
    expected = F.cross_entropy(F.linear(hidden, weight), targets)
    (slope,) = torch.autograd.grad(3 * expected, hidden)
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    (our_slope,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(our_slope, slope, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("loss", [linear_cross_entropy, cross_entropy])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_near_as_bfloat16_products_allow(loss, autocast):
    hidden, weight, targets = problem(64, 32, 100, torch.bfloat16, seed=2)
    exact = hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(exact, weight.double()), targets)
    (slope,) = torch.autograd.grad(expected, exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = loss(hidden, weight, targets)
    (found_slope,) = torch.autograd.grad(found, hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    assert found_slope.dtype == torch.bfloat16
    assert (found_slope.double() - slope).norm() < 2e-2 * slope.norm()


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_float16_keeps_small_slopes_and_takes_a_scaled_loss(scale):
    """A target's share of the mean is 1 in 1024 here, and 65536 is more than float16 holds: a
    scaler starts there.
    """
    hidden, weight, targets = problem(1024, 32, 1024, torch.float16, seed=7, ignored=0)
    weight = weight / 32
    exact = hidden.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(
        scale * F.cross_entropy(F.linear(exact, weight.double()), targets), exact
    )
    (found,) = torch.autograd.grad(scale * linear_cross_entropy(hidden, weight, targets), hidden)
    assert found.isfinite().all()
    assert (found.double() - slope).norm() < (2e-3 if scale > 1 else 2e-2) * slope.norm()


def test_logits_are_never_all_there():
    """The largest tensor that the fused loss makes, against the whole logits."""
    made = []

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append(out.numel() if torch.is_tensor(out) else 0)
            return out

    hidden, weight, targets = problem(256, 4, 500, torch.float32, seed=3)
    with Largest():
        linear_cross_entropy(hidden, weight, targets, 32).backward()
    assert max(made) == 32 * 500


def test_a_trained_head_and_words_that_are_not_there_are_refused():
    hidden, weight, targets = problem(7, 4, 9, torch.float32, seed=5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, torch.full_like(targets, 9))
    with pytest.raises(ValueError, match="trained"):
        linear_cross_entropy(hidden, weight.requires_grad_(), targets)


@pytest.mark.parametrize("loss", [linear_cross_entropy, cross_entropy])
def test_without_targets_nothing_is_learnt(loss):
    """Such a batch must not turn the weights into NaN."""
    hidden, weight, targets = problem(7, 4, 9, torch.float32, seed=5)
    (slope,) = torch.autograd.grad(loss(hidden, weight, torch.full_like(targets, -100)), hidden)
    assert (slope == 0).all()
