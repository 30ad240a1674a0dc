"""The language models' own layers on a GPU: sinks in flash attention, grouped experts, offloaded
inputs.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from decoders_at_work import frozen_experts
from torch import nn

from labutils.layers.activation_checkpoint import Parking, offloading
from labutils.layers.grouped_moe import grouped_experts
from labutils.layers.packed_attention import _with_sinks, document_attention


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "no sinks"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("lengths", [[128], [300, 1, 211]])
def test_flash_attention_with_sinks_is_the_masked_one(lengths, window, sinks):
    torch.manual_seed(0)
    n = sum(lengths)
    given = [torch.randn(1, heads, n, 64, device="cuda").bfloat16() for heads in (8, 2, 2)]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    marks = torch.tensor([0, *ends, n, n], dtype=torch.int32, device="cuda")
    slope = torch.randn(1, n, 8, 64, device="cuda")
    s_aux = 2 * torch.randn(8, device="cuda") if sinks else None
    extra = {"sliding_window": window, "s_aux": s_aux}
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # the second one by a mask
        inputs = [x.to(dtype).requires_grad_() for x in given]
        out, _ = document_attention(None, *inputs, None, 0.125, boundaries=marks, **extra)
        results.append([out, *torch.autograd.grad(out, inputs, slope.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).norm() < 2e-2 * expected.norm()


def test_the_operator_with_sinks_is_a_proper_one():
    """PyTorch's own checks: its shapes when traced, its gradient's registration."""
    given = [torch.randn(40, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    marks = torch.tensor([0, 15, 40], dtype=torch.int32, device="cuda")
    sinks = torch.randn(8, device="cuda")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(_with_sinks, (*given, sinks, marks, 40, 0.125, 16), test_utils=tests)


@pytest.mark.parametrize("count", [4, 32])
def test_grouped_experts_are_the_loop(count):
    layer = frozen_experts(64, 96, count, std=0.2).cuda()
    x = torch.randn(300, 64, device="cuda")
    chosen = torch.rand(300, count, device="cuda").topk(3).indices
    shares, slope = torch.rand(300, 3, device="cuda"), torch.randn(300, 64, device="cuda")
    results = []
    for dtype, forward in (
        (torch.float32, layer),
        (torch.bfloat16, lambda *given: grouped_experts(layer, *given)),
    ):
        layer.to(dtype)
        given = [x.to(dtype).requires_grad_(), shares.to(dtype).requires_grad_()]
        out = forward(given[0], chosen, given[1])
        results.append([out, *torch.autograd.grad(out, given, slope.to(dtype))])
    for expected, found in zip(*results, strict=True):
        assert (found.float() - expected).norm() < 3e-2 * expected.norm()


def test_parked_inputs_leave_the_gpu():
    """Twelve inputs of 64 MB each: the GPU never holds more than a few of them."""
    blocks = [nn.Sequential(nn.Linear(4096, 4096), nn.Tanh()).cuda() for _ in range(12)]
    nn.ModuleList(blocks).requires_grad_(False)  # Tanh keeps what it gives
    parking, x = Parking(), torch.randn(4096, 4096, device="cuda", requires_grad=True)
    peaks = []
    for call in (lambda block: block, lambda block: partial(offloading(block, parking), block)):
        for _ in range(2):  # the first time takes the page-locked memory
            torch.cuda.reset_peak_memory_stats()
            h, before = x, torch.cuda.memory_allocated()
            for block in blocks:
                h = call(block)(h)
            h.square().mean().backward()
            x.grad = None
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] - peaks[1] > 5 * x.nbytes
