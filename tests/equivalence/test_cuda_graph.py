"""Layers in forms for the compiler: the same functions, in the same memory, and nothing else
touched.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.models.activations import GEGLU
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.backends import cudnn

from labutils.layers.cuda_graph import CHANNELS_LAST_FORMS, rewrite_layers, timed_convolutions
from labutils.workloads.stable_diffusion import SplitGEGLU

FORMS = CHANNELS_LAST_FORMS | {GEGLU: SplitGEGLU}


@pytest.fixture(autouse=True)
def as_when_compiling(monkeypatch):
    """The compiled form, run line by line."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def rewritten(layer: nn.Module) -> nn.Module:
    whole = nn.Sequential(layer)
    rewrite_layers(whole, FORMS)
    return whole[0]


def same_function(layer: nn.Module, x: Tensor) -> Tensor:
    """Output and gradients, of the input and of every parameter, before and after rewriting;
    returns the output.
    """
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    results = []
    for rewrite in (False, True):
        if rewrite:
            before = type(layer)
            layer = rewritten(layer)
            assert type(layer) is FORMS[before]
        layer.zero_grad()
        mine = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(mine)
        (y * weights.repeat(y.numel() // 1000 + 1)[: y.numel()].view(y.shape)).sum().backward()
        results.append([y, mine.grad, *(p.grad.clone() for p in layer.parameters())])
    for found, expected in zip(*reversed(results), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )
    return results[1][0]


def image(n: int, channels: int, side: int) -> Tensor:
    x = torch.randn(n, channels, side, side + 1, generator=torch.Generator().manual_seed(n))
    return (3 * x + 1).to(memory_format=torch.channels_last)


sizes = {"n": st.integers(1, 3), "side": st.integers(1, 6)}


@settings(deadline=None, max_examples=30)
@given(
    groups=st.integers(1, 4),
    each=st.integers(2, 5),
    eps=st.sampled_from([1e-5, 1e-6, 1e-2]),
    **sizes,
)
def test_group_norm(groups, each, eps, n, side):
    layer = nn.GroupNorm(groups, groups * each, eps=eps)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    y = same_function(layer, image(n, groups * each, side))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_group_norm_of_half_precision_sums_in_float32():
    x = 1000 + image(1, 8, 16).half()
    layer = rewritten(nn.GroupNorm(2, 8).half())
    expected = nn.functional.group_norm(x.double(), 2)
    assert layer(x).dtype == torch.float16
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-3, atol=2e-3)


@settings(deadline=None, max_examples=20)
@given(inner=st.integers(1, 6), outer=st.integers(1, 6), bias=st.booleans(), **sizes)
def test_pointwise_convolution(inner, outer, bias, n, side):
    y = same_function(nn.Conv2d(inner, outer, 1, bias=bias), image(n, inner, side))
    assert y.is_contiguous(memory_format=torch.channels_last)


@settings(deadline=None, max_examples=20)
@given(width=st.integers(1, 7), outer=st.integers(1, 7), n=st.integers(1, 3))
def test_geglu(width, outer, n):
    same_function(GEGLU(width, outer), torch.randn(n, 5, width))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.GroupNorm(2, 4, affine=False),
        nn.Linear(5, 4),
    ],
    ids=str,
)
def test_other_layers_compute_what_they_did(layer):
    x = image(2, 4, 4)
    assert torch.equal(rewritten(layer)(x), layer(x))


def test_timed_convolutions_leave_the_other_settings_as_they_were(monkeypatch):
    monkeypatch.setattr(cudnn, "benchmark", False)
    monkeypatch.setattr(cudnn, "allow_tf32", False)
    with pytest.raises(ArithmeticError), timed_convolutions(True):
        assert cudnn.benchmark and not cudnn.allow_tf32
        raise ArithmeticError
    assert not cudnn.benchmark
