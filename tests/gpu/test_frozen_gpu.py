"""All frozen low-bit layers on the hardware alike: the CPU's numbers, one compiled graph, captured,
and nothing kept but the output.
"""

from __future__ import annotations

import functools
import gc

import frozen_layers
import pytest
import torch
from frozen_layers import Block, passes
from torch import nn

from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.layers.quantization.fp8_math import relative_error
from labutils.layers.quantization.nf4_linear import FrozenNF4Linear
from labutils.profiling import cuda

pytestmark = [
    pytest.mark.usefixtures("full_float32"),
    pytest.mark.parametrize("kind", [FrozenFP8Linear, FrozenNF4Linear]),
]
random = functools.partial(frozen_layers.random, device="cuda")


def layer_of(kind, k: int, n: int, dtype=torch.bfloat16, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=bias, device="cuda", dtype=dtype)
    return kind.from_linear(linear.requires_grad_(False))


def block_of(kind) -> nn.Module:
    return Block(layer_of(kind, 512, 1024), layer_of(kind, 1024, 512))


@pytest.mark.parametrize("rows", [0, 15, 577])
def test_the_gpu_computes_what_the_cpu_does(kind, rows):
    """FP8's product is the hardware's here, and emulated there."""
    layer = layer_of(kind, 256, 128, torch.float32, bias=True)
    x, dy = random(rows, 256), random(rows, 128, seed=1)
    ours = passes(layer, x, dy)
    for mine, theirs in zip(ours, passes(layer.cpu(), x.cpu(), dy.cpu()), strict=True):
        assert mine.shape == theirs.shape
        if rows:
            assert relative_error(mine.cpu(), theirs) < 5e-3


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_it_is_one_graph_with_the_same_numbers(kind, autocast):
    torch.compiler.reset()
    block, x, dy = block_of(kind), random(577, 512).bfloat16(), random(577, 512, seed=1).bfloat16()
    x = x.float() if autocast else x
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected = passes(block, x, dy)
        found = passes(torch.compile(block, fullgraph=True, dynamic=False), x, dy)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 2e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_captured_in_a_cuda_graph(kind, compiled):
    torch.compiler.reset()
    block = block_of(kind)
    run = torch.compile(block, fullgraph=True, dynamic=False) if compiled else block
    x, dy = random(64, 512).bfloat16().requires_grad_(), random(64, 512, seed=1).bfloat16()
    x.grad = torch.zeros_like(x)

    def step() -> None:
        x.grad.zero_()
        run(x).backward(dy)

    replay = cuda.graph_of(step)
    step()
    expected = x.grad.clone()
    x.grad.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(x.grad, expected)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("compiled", [False, True])
def test_between_forward_and_backward_nothing_of_the_weights_size_is_kept(kind, compiled):
    """No input and no transposed weight is saved: what is alive is the output alone."""
    torch.compiler.reset()
    layer = layer_of(kind, 4096, 4096)
    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    x = random(32, 4096).bfloat16().requires_grad_()
    run(x).sum().backward()  # compiles, and makes the libraries' workspaces
    x.grad = None
    before = allocated()
    y = run(x)
    assert allocated() - before < 4096 * 4096 / 4
    y.sum().backward()
