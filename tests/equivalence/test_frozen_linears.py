"""The frozen low-bit layers against float32, on the CPU: FP8's rounding is the hardware's, NF4's
bytes are bitsandbytes', products are float64's of what they restore, and nothing else is kept."""

from __future__ import annotations

import math

import bitsandbytes.functional as bnb
import pytest
import torch
from frozen_layers import Block, passes, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils.layers.quantization.convert import convert_base
from labutils.layers.quantization.fp8_linear import MULTIPLE, FrozenFP8Linear
from labutils.layers.quantization.fp8_math import quantise, relative_error
from labutils.layers.quantization.nf4_linear import BLOCK, FrozenNF4Linear

TOLERANCE = {FrozenFP8Linear: 0.04, FrozenNF4Linear: 0.1}
"""Two factors in 3 mantissa bits cost 3.7 % of a product's norm, NF4 9 %."""
each_kind = pytest.mark.parametrize("kind", TOLERANCE)


def layer_pair(kind, k=256, n=128, bias=True, seed=0):
    """A linear layer of normal numbers, and its low-bit form."""
    linear = nn.Linear(k, n, bias=bias).requires_grad_(False)
    linear.weight.copy_(random(n, k, seed=seed + 100) / k**0.5)
    return linear, kind.from_linear(linear)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 57, 256), (256,)])
def test_forward_and_gradient_are_float32s_to_within_the_rounding(kind, shape, dtype):
    linear, frozen = layer_pair(kind)
    x, dy = random(*shape).to(dtype), random(*shape[:-1], 128, seed=1).to(dtype)
    y, dx = passes(frozen, x, dy)
    exact_y, exact_dx = passes(linear, x.float(), dy.float())
    assert (y.dtype, dx.dtype, y.shape, dx.shape) == (dtype, dtype, exact_y.shape, x.shape)
    limit = TOLERANCE[kind] * (1.5 if len(shape) == 1 else 1)
    assert relative_error(y, exact_y) < limit
    assert relative_error(dx, exact_dx) < limit


numbers = st.integers(1, 6)


@given(st.integers(0, 40), numbers, numbers, st.integers(-30, 30), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_in_fp8_it_is_the_product_of_the_rounded_matrices(rows, k, n, exponent, seed):
    """Independent of the layer: round both by the mathematics, multiply in float64."""
    k, n = k * MULTIPLE, n * MULTIPLE
    _, frozen = layer_pair(FrozenFP8Linear, k, n, bias=False, seed=seed)
    x, dy = (random(rows, w, seed=seed + w) * 2.0**exponent for w in (k, n))
    y, dx = passes(frozen, x, dy)
    close = {"rtol": 2**-8, "atol": 2.0**exponent * 1e-4}
    expected = quantise(x, "row").restored().double() @ frozen.restored().double().T
    torch.testing.assert_close(y.double(), expected, **close)
    scaled = quantise(dy * frozen.scale.t(), "row").restored().double()
    torch.testing.assert_close(dx.double(), scaled @ frozen.weight.double(), **close)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_in_nf4_it_is_the_product_with_the_restored_weight(rows, k, n, seed):
    """bitsandbytes' own NF4, multiplied in float64. Rows need not be multiples of a block: it is
    given the weight flattened, as its CPU kernel gives the wrong constants to rows that aren't.
    """
    k, n = k * MULTIPLE, n * MULTIPLE
    linear, frozen = layer_pair(FrozenNF4Linear, k, n, bias=False, seed=seed)
    how = {"quant_type": "nf4", "compress_statistics": True, "blocksize": BLOCK}
    weight = bnb.dequantize_4bit(*bnb.quantize_4bit(linear.weight.flatten(), **how)).view(n, k)
    assert torch.equal(frozen.restored(), weight)
    x, dy = random(rows, k, seed=seed), random(rows, n, seed=seed + 1)
    y, dx = passes(frozen, x, dy)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=1e-4, atol=1e-5)


def test_it_holds_what_bitsandbytes_would():
    linear, frozen = layer_pair(FrozenNF4Linear, 1024, 128)
    model = nn.Sequential(linear)
    convert_base(model, ["0"], "nf4", torch.float32)
    state = model[0].weight.quant_state
    assert torch.equal(frozen.weight.view(-1), model[0].weight.view(-1))
    assert torch.equal(frozen.scales, state.state2.absmax)
    assert torch.equal(frozen.offset, state.offset)
    assert torch.equal(frozen.constants.view(-1)[: state.absmax.numel()], state.absmax)
    x, dy = random(9, 1024), random(9, 128, seed=1)
    for mine, theirs in zip(passes(frozen, x, dy), passes(model[0], x, dy), strict=True):
        assert relative_error(mine, theirs) < 1e-6


@each_kind
def test_odd_inputs(kind):
    linear, frozen = layer_pair(kind)
    y, dx = passes(frozen, torch.zeros(2, 0, 256), torch.zeros(2, 0, 128))
    assert (y.shape, dx.shape) == ((2, 0, 128), (2, 0, 256))
    y, dx = passes(frozen, torch.zeros(3, 256), torch.zeros(3, 128))
    assert torch.equal(y, linear.bias.expand(3, -1)) and not dx.any()
    x, dy = random(256, 20), random(128, 20, seed=1)
    turned = passes(frozen, x.t(), dy.t())
    torch.testing.assert_close(turned, passes(frozen, x.t().contiguous(), dy.t().contiguous()))
    assert not kind(torch.zeros(32, 64))(random(3, 64)).any()


@each_kind
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_does_not_come_out_as_a_number(kind, bad):
    _, frozen = layer_pair(kind)
    x, dy = random(4, 256), random(4, 128)
    x[2, 7] = dy[1, 5] = bad
    y, dx = passes(frozen, x, dy)
    assert y.isfinite().all(1).tolist() == [True, True, False, True]
    assert dx.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_hardwares_product_is_the_emulated_one(compiled):
    """Scales on the right sides, layouts as the kernels want them, forward and backward."""
    torch.compiler.reset()
    _, frozen = layer_pair(FrozenFP8Linear)
    x, dy = random(577, 256), random(577, 128, seed=1)
    expected = passes(frozen, x, dy)
    frozen.kind = "rowwise"
    run = torch.compile(frozen, fullgraph=True, dynamic=False) if compiled else frozen
    try:
        ours = passes(run, x, dy)
    except (RuntimeError, NotImplementedError) as error:
        if "_scaled_mm" not in str(error):
            raise
        pytest.skip(f"this PyTorch has no such product on a CPU: {error}")
    for mine, theirs in zip(ours, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-3


NF4_BYTES = 1024 * 512 * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 4
BYTES = {FrozenFP8Linear: 1024 * 512 + 4 * 512, FrozenNF4Linear: NF4_BYTES}


@pytest.mark.parametrize(("kind", "held"), BYTES.items())
def test_what_is_held(kind, held):
    _, frozen = layer_pair(kind, 1024, 512, bias=False)
    assert sum(t.nbytes for t in [*frozen.parameters(), *frozen.buffers()]) == held


@each_kind
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_kept_for_backward_but_the_weight(kind, compiled):
    """Neither the input nor a widened weight, whoever divides the work into two passes."""
    torch.compiler.reset()
    _, frozen = layer_pair(kind, bias=False)
    run = torch.compile(frozen, fullgraph=True, dynamic=False) if compiled else frozen
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(random(16, 256).requires_grad_())
    tables = getattr(frozen, "tables", ())
    held = {t.data_ptr() for t in [*frozen.parameters(), *frozen.buffers(), *tables]}
    assert {t.data_ptr() for t in kept} <= held
    assert frozen.weight.data_ptr() in {t.data_ptr() for t in kept}


@each_kind
def test_a_models_cast_leaves_the_weight_in_its_format(kind):
    _, frozen = layer_pair(kind)
    before = {name: value.clone() for name, value in frozen.state_dict().items() if name != "bias"}
    nn.Sequential(frozen, nn.Linear(4, 4)).to(torch.bfloat16)
    for name, value in before.items():
        after = frozen.state_dict()[name]
        assert after.dtype == value.dtype, name
        same = [tensor.reshape(-1).view(torch.uint8) for tensor in (after, value)]
        assert torch.equal(*same), name
    assert frozen(random(3, 256)).dtype == torch.float32


@each_kind
def test_autocast_is_followed_as_nn_linear_does(kind):
    linear, frozen = layer_pair(kind)
    with torch.autocast("cpu", torch.bfloat16):
        x = random(32, 256).requires_grad_()
        y = frozen(x)
        assert y.dtype == linear(x).dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())


@each_kind
def test_one_compiled_graph_serves_any_count_of_rows(kind):
    """Of FP8 for multiples of 16, which layouts for it see to: others take a second graph."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    block = Block(layer_pair(kind, 64, 128)[1], layer_pair(kind, 128, 64)[1])
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    limit = 1e-5 if kind is FrozenNF4Linear else 2e-2  # bfloat16's rounding, and ties that tip
    for rows in (32, 64, 592) if kind is FrozenFP8Linear else (33, 65, 577):
        x, dy = random(rows, 64), random(rows, 64, seed=1)
        for mine, theirs in zip(passes(compiled, x, dy), passes(block, x, dy), strict=True):
            assert relative_error(mine, theirs) < limit
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_transposed_weight_is_held_row_after_row():
    """The FP8 product takes no other order of its second factor."""
    assert FrozenFP8Linear(random(48, 32).t()).weight.is_contiguous()
