"""The frozen FP8 layer against float32, on the CPU: its rounding is the hardware's, its product
float32's.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from frozen_layers import passes, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils.layers.quantization.fp8_linear import (
    INPUTS,
    MULTIPLE,
    FrozenFP8Linear,
    product_kind,
    quantise_rows,
)
from labutils.layers.quantization.fp8_math import quantise, relative_error

TOLERANCE = 4e-2
"""Two factors rounded to 3 mantissa bits: 2.6 % each, so 3.7 % of a product's norm."""


def layer_pair(
    k: int = 256, n: int = 128, bias: bool = True, seed: int = 0
) -> tuple[nn.Linear, FrozenFP8Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(k, n, bias=bias).requires_grad_(False)
    return linear, FrozenFP8Linear.from_linear(linear)


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(577, 256), (5, 577, 256), (64, 256), (2, 3, 4, 256)])
def test_forward_and_gradient_are_float32s_to_within_the_rounding(shape, bias, dtype):
    linear, frozen = layer_pair(bias=bias)
    x, dy = random(*shape).to(dtype), random(*shape[:-1], 128, seed=1).to(dtype)
    y, dx = passes(frozen, x, dy)
    exact_y, exact_dx = passes(linear, x.float(), dy.float())
    assert (y.dtype, dx.dtype, y.shape) == (dtype, dtype, exact_y.shape)
    assert relative_error(y, exact_y) < TOLERANCE
    assert relative_error(dx, exact_dx) < TOLERANCE


@given(
    rows=st.integers(0, 40),
    k=st.integers(1, 6),
    n=st.integers(1, 6),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_product_of_the_rounded_matrices(rows, k, n, exponent, seed):
    """Independent of the layer: round both by the room's own mathematics, multiply in float64."""
    k, n = k * MULTIPLE, n * MULTIPLE
    _, frozen = layer_pair(k, n, bias=False, seed=seed)
    x = random(rows, k, seed=seed) * 2.0**exponent
    dy = random(rows, n, seed=seed + 1) * 2.0**exponent
    y, dx = passes(frozen, x, dy)
    weight = frozen.restored().double()
    expected = quantise(x, "row").restored().double() @ weight.T
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2.0**exponent * 1e-4)
    scaled = quantise(dy * frozen.scale.t(), "row").restored().double()
    expected_dx = scaled @ frozen.weight.double()
    torch.testing.assert_close(dx.double(), expected_dx, rtol=2**-8, atol=2.0**exponent * 1e-4)


@given(exponents=st.lists(st.integers(-60, 60), min_size=8, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_rows_are_quantised_as_the_mathematics_says(exponents, seed):
    x = random(8, 32, seed=seed) * torch.exp2(torch.tensor(exponents).float())[:, None]
    values, inverse = quantise_rows(x)
    expected = quantise(x, "row")
    torch.testing.assert_close(inverse, expected.inverse, rtol=1e-6, atol=0)
    assert values.float().abs().amax(1).tolist() == [448] * 8
    apart = (values.float() - expected.values.float()).abs()  # a scale's last bit can tip a tie
    assert (apart <= 32).all()
    assert (apart > 0).float().mean() < 0.02


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)])
def test_no_rows(shape):
    _, frozen = layer_pair()
    y, dx = passes(frozen, torch.zeros(shape), torch.zeros(*shape[:-1], 128))
    assert (y.shape, dx.shape) == ((*shape[:-1], 128), shape)


def test_one_row_and_a_vector():
    linear, frozen = layer_pair(1024, 1024)
    for x in (random(1, 1024), random(1024)):
        y, dx = passes(frozen, x, random(*x.shape, seed=1))
        exact, exact_dx = passes(linear, x, random(*x.shape, seed=1))
        assert relative_error(y, exact) < TOLERANCE
        assert relative_error(dx, exact_dx) < TOLERANCE


def test_zeros_give_the_bias_exactly():
    linear, frozen = layer_pair()
    y, dx = passes(frozen, torch.zeros(3, 256), torch.zeros(3, 128))
    assert torch.equal(y, linear.bias.expand(3, -1))
    assert torch.equal(dx, torch.zeros(3, 256))


def test_inputs_and_gradients_that_are_not_contiguous():
    _, frozen = layer_pair(bias=False)
    x, dy = random(256, 20), random(128, 20, seed=1)
    found, expected = (
        passes(frozen, x.t(), dy.t()),
        passes(frozen, x.t().contiguous(), dy.t().contiguous()),
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    x = random(4, 256).requires_grad_()
    frozen(x).sum().backward()  # its gradient is one number, expanded
    assert relative_error(x.grad, frozen.restored().sum(0).expand(4, -1)) < TOLERANCE


def test_a_row_does_not_depend_on_its_neighbours():
    """Scales are a row's own, so a batch's rows come out as they would alone, outliers beside them
    or not.
    """
    _, frozen = layer_pair()
    x = random(5, 256)
    x[3] *= 1e6
    assert torch.equal(frozen(x)[0], frozen(x[:1])[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_come_out_as_a_number(bad):
    _, frozen = layer_pair()
    x, dy = random(4, 256), random(4, 128)
    x[2, 7] = dy[1, 5] = bad
    y, dx = passes(frozen, x, dy)
    assert y.isnan().all(1).tolist() == [False, False, True, False]
    assert dx.isnan().all(1).tolist() == [False, True, False, False]


# The calls that the hardware gets, which PyTorch also answers on a CPU


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "limit"), [("rowwise", 1e-3), ("separate", 5e-3)])
def test_the_hardwares_products_are_the_emulated_one(kind, limit, compiled):
    """Scales on the right sides, layouts as the kernels want them, forward and backward."""
    torch.compiler.reset()
    _, frozen = layer_pair()
    x, dy = random(577, 256), random(577, 128, seed=1)
    expected = passes(frozen, x, dy)
    frozen.product = kind
    try:
        found = passes(
            torch.compile(frozen, fullgraph=True, dynamic=False) if compiled else frozen, x, dy
        )
    except (RuntimeError, NotImplementedError) as error:
        if "_scaled_mm" not in str(error):
            raise
        pytest.skip(f"this PyTorch has no such product on a CPU: {error}")
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < limit


# What is held


def test_one_byte_a_parameter():
    _, frozen = layer_pair(1024, 512, bias=False)
    held = sum(t.nbytes for t in [*frozen.parameters(), *frozen.buffers()])
    assert held == 1024 * 512 + 4 * 512


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_kept_for_backward_but_the_weight(compiled):
    """Neither the input nor a transposed or widened weight, whoever divides the work into forward
    and backward.
    """
    torch.compiler.reset()
    _, frozen = layer_pair(bias=False)
    run = torch.compile(frozen, fullgraph=True, dynamic=False) if compiled else frozen
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(random(16, 256).requires_grad_())
    assert {t.data_ptr() for t in kept} == {frozen.weight.data_ptr(), frozen.scale.data_ptr()}


def test_no_gradient_for_anything_but_the_input():
    _, frozen = layer_pair()
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not frozen(random(4, 256)).requires_grad
    x = random(4, 256).requires_grad_()
    frozen(x).sum().backward()
    assert all(p.grad is None for p in frozen.parameters())


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), nn.Module.half, nn.Module.double])
def test_a_models_cast_leaves_the_weight_in_fp8(cast):
    _, frozen = layer_pair()
    weight, scale = frozen.weight.view(torch.uint8).clone(), frozen.scale.clone()
    cast(nn.Sequential(frozen, nn.Linear(4, 4)))
    assert frozen.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(frozen.weight.view(torch.uint8), weight)
    assert torch.equal(frozen.scale, scale)
    assert frozen(random(3, 256)).dtype == torch.float32


def test_copying_and_saving(tmp_path):
    _, frozen = layer_pair()
    x = random(3, 256)
    assert torch.equal(copy.deepcopy(frozen)(x), frozen(x))
    torch.save(frozen.state_dict(), tmp_path / "layer.pt")
    _, other = layer_pair(seed=1)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x), frozen(x))


def test_the_linear_layer_it_came_from_is_left_alone():
    linear, frozen = layer_pair()
    before = linear.weight.clone()
    frozen(random(3, 256))
    assert torch.equal(linear.weight, before)
    assert frozen.bias.data_ptr() != linear.bias.data_ptr()


# Autocast and the compiler


def test_autocast_is_followed_as_nn_linear_does():
    linear, frozen = layer_pair()
    with torch.autocast("cpu", torch.bfloat16):
        x = random(32, 256).requires_grad_()
        y = frozen(x)
        assert y.dtype == linear(x).dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


class Block(nn.Module):
    """Two frozen layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (layer_pair(k, n, bias=n > k)[1] for k, n in ((64, 128), (128, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def test_compiled_it_is_one_graph_with_the_same_numbers():
    torch.compiler.reset()
    block, x, dy = Block(), random(33, 64), random(33, 64, seed=1)
    expected = passes(block, x, dy)
    assert torch._dynamo.explain(block)(x.requires_grad_()).graph_break_count == 0
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True)
    for found, eager in zip(passes(compiled, x, dy), expected, strict=True):
        assert relative_error(found, eager) < 5e-3  # bfloat16's rounding, and ties that tip


def test_one_compiled_graph_serves_any_count_of_rows():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    _, frozen = layer_pair(64, 32)
    compiled = torch.compile(frozen, fullgraph=True, dynamic=True)
    for rows in (
        32,
        64,
        592,
    ):  # multiples of 16, which layouts for FP8 see to: others take a second graph
        x = random(rows, 64)
        assert relative_error(compiled(x), frozen(x)) < 5e-3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Refusals


@pytest.mark.parametrize(
    ("k", "n", "message"),
    [(24, 32, "24 -> 32 features"), (32, 8, "multiples of 16"), (577, 64, "577 -> 64")],
)
def test_widths_that_the_product_does_not_take(k, n, message):
    with pytest.raises(ValueError, match=message):
        FrozenFP8Linear(torch.zeros(n, k))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="Freeze them first"):
        FrozenFP8Linear.from_linear(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="Freeze them first"):
        FrozenFP8Linear(torch.zeros(32, 32), torch.zeros(32, requires_grad=True))
    with pytest.raises(ValueError, match="floating-point"):
        FrozenFP8Linear(torch.zeros(32, 32, dtype=torch.int8))
    with pytest.raises(ValueError, match="takes a matrix"):
        FrozenFP8Linear(torch.zeros(32))
    with pytest.raises(ValueError, match="NaN or infinity"):
        FrozenFP8Linear(torch.full((32, 32), math.inf))
    _, frozen = layer_pair()
    with pytest.raises(ValueError, match=r"shape is \(4, 128\); this layer takes \(\.\.\., 256\)"):
        frozen(torch.zeros(4, 128))
    for dtype in (torch.int64, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="takes float16, bfloat16 or float32"):
            frozen(torch.zeros(4, 256).to(dtype))


def test_shapes_without_memory():
    with torch.device("meta"):
        frozen = FrozenFP8Linear(torch.empty(64, 32))
        assert frozen(torch.empty(5, 32)).shape == (5, 64)


def test_a_cpu_emulates():
    assert product_kind(torch.device("cpu")) == "emulated"


def test_a_float64_weight_is_held_as_its_float32_is():
    weight = random(32, 48).double()
    assert torch.equal(
        FrozenFP8Linear(weight).restored(), FrozenFP8Linear(weight.float()).restored()
    )
    with pytest.raises(ValueError, match="infinity .as float32."):
        FrozenFP8Linear(torch.full((16, 16), 1e300, dtype=torch.float64))


def test_a_transposed_weight_is_held_row_after_row():
    """The FP8 product takes no other order of its second factor."""
    frozen = FrozenFP8Linear(random(48, 32).t())
    assert frozen.weight.is_contiguous()
    assert torch.equal(
        frozen.restored(), FrozenFP8Linear(random(48, 32).t().contiguous()).restored()
    )


@pytest.mark.parametrize("shape", [(1,), (3,), (16, 1)])
def test_a_bias_has_one_number_an_output(shape):
    with pytest.raises(ValueError, match="16 outputs"):
        FrozenFP8Linear(torch.zeros(16, 32), torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_autocast_makes_no_input_right(dtype):
    _, frozen = layer_pair()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="takes float16, bfloat16 or float32"),
    ):
        frozen(torch.ones(2, 256).to(dtype))


@pytest.mark.parametrize("strict", [True, False])
def test_an_ordinary_weight_is_not_loaded_without_a_scale(strict):
    linear, frozen = layer_pair()
    before = frozen.restored()
    model = nn.Sequential(frozen)
    state = {f"0.{name}": tensor + 1 for name, tensor in linear.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match="0.weight is torch.float32.*Load the state into the model before convert_base",
    ):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(frozen.restored(), before)
    model.load_state_dict({}, strict=False)  # adapters alone, for instance
