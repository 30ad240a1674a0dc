"""The frozen NF4 layers: bitsandbytes' bytes, float32's products of them, and nothing else kept;
compiled or not.
"""

from __future__ import annotations

import copy
import math

import bitsandbytes as bnb
import pytest
import torch
from frozen_layers import passes, random
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from labutils.layers.quantization import nf4_math
from labutils.layers.quantization.convert import MAKERS, convert_base
from labutils.layers.quantization.fp8_linear import INPUTS, MULTIPLE
from labutils.layers.quantization.fp8_math import quantise, relative_error
from labutils.layers.quantization.nf4_linear import FrozenNF4FP8Linear, FrozenNF4Linear

KINDS = (FrozenNF4Linear, FrozenNF4FP8Linear)
TOLERANCE = {FrozenNF4Linear: 0.1, FrozenNF4FP8Linear: 0.11}
"""NF4 costs 9 % of a product's norm, FP8 in both factors another 3.7 %, across it."""
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer_pair(
    kind, k: int = 256, n: int = 128, bias: bool = True, seed: int = 0
) -> tuple[nn.Linear, FrozenNF4Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(k, n, bias=bias).requires_grad_(False)
        linear.weight.copy_(torch.randn(n, k) / k**0.5)
    return linear, kind.from_linear(linear)


@each_kind
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(577, 256), (5, 57, 256), (256,), (2, 3, 4, 256)])
def test_forward_and_gradient_are_float32s_to_within_the_rounding(kind, shape, bias, dtype):
    linear, frozen = layer_pair(kind, bias=bias)
    x, dy = random(*shape).to(dtype), random(*shape[:-1], 128, seed=1).to(dtype)
    y, dx = passes(frozen, x, dy)
    exact_y, exact_dx = passes(linear, x.float(), dy.float())
    assert (y.dtype, dx.dtype, y.shape, dx.shape) == (dtype, dtype, exact_y.shape, x.shape)
    limit = TOLERANCE[kind] * (1.5 if len(shape) == 1 else 1)
    assert relative_error(y, exact_y) < limit
    assert relative_error(dx, exact_dx) < limit


@given(rows=st.integers(0, 40), k=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_it_is_the_product_with_the_weight_that_the_mathematics_restores(rows, k, n, seed):
    """Independent of the layer: the room's own NF4, multiplied in float64. Rows need not be
    multiples of a block.
    """
    k, n = k * MULTIPLE, n * MULTIPLE
    linear, frozen = layer_pair(FrozenNF4Linear, k, n, bias=False, seed=seed)
    w = nf4_math.quantise_nf4(linear.weight)
    weight = nf4_math.NF4(
        w.packed, nf4_math.double_quantise(w.absmax).restored(), w.shape
    ).restored()
    assert torch.equal(frozen.restored(), weight)
    x, dy = random(rows, k, seed=seed), random(rows, n, seed=seed + 1)
    y, dx = passes(frozen, x, dy)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=1e-4, atol=1e-5)


@given(rows=st.integers(0, 40), k=st.integers(1, 6), n=st.integers(1, 6), seed=st.integers(0, 9))
@example(rows=3, k=5, n=3, seed=4)
@settings(max_examples=60, deadline=None)
def test_in_fp8_it_is_the_product_of_the_restored_weight_rounded_once_more(rows, k, n, seed):
    k, n = k * MULTIPLE, n * MULTIPLE
    _, frozen = layer_pair(FrozenNF4FP8Linear, k, n, bias=False, seed=seed)
    x, dy = random(rows, k, seed=seed), random(rows, n, seed=seed + 1)
    y, dx = passes(frozen, x, dy)
    w = quantise(frozen.restored(), "row")
    expected = quantise(x, "row").restored().double() @ w.restored().double().T
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2e-2)
    expected_dx = quantise(dy * w.inverse.t(), "row").restored().double() @ w.values.double()
    # A scaled dy that lies on the border between two codes may get the other one: an eighth of one
    # of n >= 16 numbers.
    assert (dx.double() - expected_dx).norm() <= 0.04 * expected_dx.norm()


# bitsandbytes' bytes


def linear4bit(linear: nn.Linear, **how) -> bnb.nn.Linear4bit:
    if not how:
        model = nn.Sequential(linear)
        convert_base(model, ["0"], "nf4", torch.float32)
        return model[0]
    weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, **how).to("cpu")
    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False)
    layer.weight = weight
    return layer


@each_kind
def test_it_holds_what_bitsandbytes_would(kind):
    linear, frozen = layer_pair(kind, 1024, 128)
    theirs = linear4bit(linear)
    state = theirs.weight.quant_state
    assert torch.equal(frozen.weight.view(-1), theirs.weight.view(-1))
    assert torch.equal(frozen.scales, state.state2.absmax)
    assert torch.equal(frozen.offset, state.offset)
    apart = frozen.constants.view(-1)[: state.absmax.numel()] != state.absmax
    assert (
        apart.float().mean() < 0.01
    )  # see labutils.layers.quantization.nf4_math on bitsandbytes' look-up on a CPU


@each_kind
def test_a_linear4bit_is_taken_over_byte_for_byte(kind):
    linear, _ = layer_pair(kind, 1024, 128)
    theirs = linear4bit(linear)
    frozen = kind.from_linear4bit(theirs)
    restored = bnb.functional.dequantize_4bit(theirs.weight, theirs.weight.quant_state)
    assert torch.equal(frozen.restored(), restored)
    x, dy = random(9, 1024), random(9, 128, seed=1)
    limit = 1e-6 if kind is FrozenNF4Linear else 0.04
    for mine, other in zip(passes(frozen, x, dy), passes(theirs, x, dy), strict=True):
        assert relative_error(mine, other) < limit


def test_other_forms_of_linear4bit_are_refused():
    linear, _ = layer_pair(FrozenNF4Linear)
    for how, found in [
        ({"quant_type": "fp4", "compress_statistics": True}, "'type': 'fp4'"),
        ({"quant_type": "nf4", "compress_statistics": False}, "'group': None"),
        ({"quant_type": "nf4", "blocksize": 128, "compress_statistics": True}, "'block': 128"),
    ]:
        with pytest.raises(ValueError, match=f"{found}.*can be taken over"):
            FrozenNF4Linear.from_linear4bit(linear4bit(linear, **how))


# Odd inputs


@each_kind
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)])
def test_no_rows(kind, shape):
    _, frozen = layer_pair(kind)
    y, dx = passes(frozen, torch.zeros(shape), torch.zeros(*shape[:-1], 128))
    assert (y.shape, dx.shape) == ((*shape[:-1], 128), shape)


@each_kind
def test_zeros_give_the_bias_exactly(kind):
    linear, frozen = layer_pair(kind)
    y, dx = passes(frozen, torch.zeros(3, 256), torch.zeros(3, 128))
    assert torch.equal(y, linear.bias.expand(3, -1))
    assert torch.equal(dx, torch.zeros(3, 256))


@each_kind
def test_a_weight_of_zeros(kind):
    frozen = kind(torch.zeros(32, 64))
    assert torch.equal(frozen.restored(), torch.zeros(32, 64))
    assert torch.equal(frozen(random(3, 64)), torch.zeros(3, 32))


@each_kind
def test_inputs_and_gradients_that_are_not_contiguous(kind):
    _, frozen = layer_pair(kind, bias=False)
    x, dy = random(256, 20), random(128, 20, seed=1)
    found, expected = (
        passes(frozen, x.t(), dy.t()),
        passes(frozen, x.t().contiguous(), dy.t().contiguous()),
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


@each_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_come_out_as_a_number(kind, bad):
    _, frozen = layer_pair(kind)
    x, dy = random(4, 256), random(4, 128)
    x[2, 7] = dy[1, 5] = bad
    y, dx = passes(frozen, x, dy)
    assert y.isfinite().all(1).tolist() == [True, True, False, True]
    assert dx.isfinite().all(1).tolist() == [True, False, True, True]


# What is held


@each_kind
def test_half_a_byte_a_parameter(kind):
    _, frozen = layer_pair(kind, 1024, 512, bias=False)
    held = sum(t.nbytes for t in [*frozen.parameters(), *frozen.buffers()])
    rows = 4 * 512 if kind is FrozenNF4FP8Linear else 0
    assert held == 1024 * 512 / 2 + 1024 * 512 * nf4_math.doubled_constant_bits() / 8 + 4 + rows


@each_kind
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_kept_for_backward_but_the_packed_weight(kind, compiled):
    """Neither the input nor an unpacked weight, whoever divides the work into forward and backward."""
    torch.compiler.reset()
    _, frozen = layer_pair(kind, bias=False)
    run = torch.compile(frozen, fullgraph=True, dynamic=False) if compiled else frozen
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(random(16, 256).requires_grad_())
    held = {t.data_ptr() for t in [*frozen.parameters(), *frozen.buffers(), *frozen.tables]}
    assert {t.data_ptr() for t in kept} <= held
    assert frozen.weight.data_ptr() in {t.data_ptr() for t in kept}


def test_the_tables_are_one_for_all_layers():
    one, other = (layer_pair(FrozenNF4Linear, seed=seed)[1] for seed in (0, 1))
    assert one.tables is other.tables
    assert not {"tables", "pairs"} & set(one.state_dict())


@each_kind
def test_no_gradient_for_anything_but_the_input(kind):
    _, frozen = layer_pair(kind)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not frozen(random(4, 256)).requires_grad
    x = random(4, 256).requires_grad_()
    frozen(x).sum().backward()
    assert all(p.grad is None for p in frozen.parameters())


@each_kind
@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), nn.Module.half, nn.Module.double])
def test_a_models_cast_leaves_the_constants_in_float32(kind, cast):
    _, frozen = layer_pair(kind)
    before = {name: value.clone() for name, value in frozen.state_dict().items() if name != "bias"}
    cast(nn.Sequential(frozen, nn.Linear(4, 4)))
    for name, value in before.items():
        found = frozen.state_dict()[name]
        assert found.dtype == value.dtype, name
        assert torch.equal(found, value), name
    assert frozen(random(3, 256)).dtype == torch.float32


@each_kind
def test_copying_and_saving(kind, tmp_path):
    _, frozen = layer_pair(kind)
    x = random(3, 256)
    assert torch.equal(copy.deepcopy(frozen)(x), frozen(x))
    torch.save(frozen.state_dict(), tmp_path / "layer.pt")
    _, other = layer_pair(kind, seed=1)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x), frozen(x))


@each_kind
def test_shapes_without_memory(kind):
    with torch.device("meta"):
        frozen = kind(torch.empty(64, 32))
        assert frozen(torch.empty(5, 32)).shape == (5, 64)


# Autocast and the compiler


@each_kind
def test_autocast_is_followed_as_nn_linear_does(kind):
    linear, frozen = layer_pair(kind)
    with torch.autocast("cpu", torch.bfloat16):
        x = random(32, 256).requires_grad_()
        y = frozen(x)
        assert y.dtype == linear(x).dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


class Block(nn.Module):
    """Two frozen layers with an activation between them."""

    def __init__(self, make) -> None:
        super().__init__()
        self.up, self.down = (make(k, n) for k, n in ((64, 128), (128, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@each_kind
def test_compiled_it_is_one_graph_with_the_same_numbers(kind):
    torch.compiler.reset()
    block, x, dy = (
        Block(lambda k, n: layer_pair(kind, k, n)[1]),
        random(33, 64),
        random(33, 64, seed=1),
    )
    expected = passes(block, x, dy)
    assert torch._dynamo.explain(block)(x.requires_grad_()).graph_break_count == 0
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True)
    for found, eager in zip(passes(compiled, x, dy), expected, strict=True):
        assert relative_error(found, eager) < (1e-5 if kind is FrozenNF4Linear else 2e-2)


@each_kind
def test_one_compiled_graph_serves_any_count_of_rows(kind):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    block = Block(lambda k, n: layer_pair(kind, k, n)[1])
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (33, 65, 577):
        x, dy = random(rows, 64), random(rows, 64, seed=1)
        for mine, theirs in zip(passes(compiled, x, dy), passes(block, x, dy), strict=True):
            assert relative_error(mine, theirs) < (1e-5 if kind is FrozenNF4Linear else 2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Refusals


@each_kind
def test_what_it_refuses(kind):
    with pytest.raises(
        ValueError, match="24 -> 32 features can't be converted to NF4.*multiples of 16"
    ):
        kind(torch.zeros(32, 24))
    with pytest.raises(
        ValueError, match="a frozen NF4 layer has no gradient for them. Freeze them first"
    ):
        kind.from_linear(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="held in NF4: it takes a matrix of floating-point"):
        kind(torch.zeros(32, 32, dtype=torch.int8))
    with pytest.raises(ValueError, match="NaN or infinity"):
        kind(torch.full((32, 32), math.inf))
    _, frozen = layer_pair(kind)
    with pytest.raises(ValueError, match=r"shape is \(4, 128\); this layer takes \(\.\.\., 256\)"):
        frozen(torch.zeros(4, 128))
    with pytest.raises(ValueError, match="a frozen NF4 layer takes float16, bfloat16 or float32"):
        frozen(torch.zeros(4, 256, dtype=torch.float64))


def test_they_are_kinds_of_base_layer():
    for kind, made in (("nf4-frozen", FrozenNF4Linear), ("nf4-fp8", FrozenNF4FP8Linear)):
        linear, _ = layer_pair(FrozenNF4Linear)
        assert type(MAKERS[kind](torch.float32)(linear)) is made
