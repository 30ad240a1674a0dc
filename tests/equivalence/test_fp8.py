"""FP8 by hand: every code, every rounding and every scale against PyTorch's own casts and against
plain arithmetic.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.quantization import fp8_math
from labutils.layers.quantization.fp8_math import (
    E4M3,
    E5M2,
    DelayedScaling,
    decode,
    encode,
    quantise,
)

ALL_CODES = torch.arange(256, dtype=torch.uint8)
FORMATS = {"E4M3": E4M3, "E5M2": E5M2}
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


# Bits


@formats
def test_every_code_means_what_pytorch_says(fmt):
    theirs = ALL_CODES.view(fmt.dtype).float()
    torch.testing.assert_close(decode(ALL_CODES, fmt), theirs, rtol=0, atol=0, equal_nan=True)


@formats
def test_ties_go_to_the_even_code(fmt):
    numbers = fp8_math.numbers(fmt).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    codes = encode(middles, fmt)
    assert (codes % 2 == 0).all()
    assert torch.equal(codes, bits_of(middles.float().to(fmt.dtype)))


@formats
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_float_in_range_is_rounded_as_pytorch_does(fmt, data):
    values = data.draw(
        st.lists(st.floats(-fmt.largest, fmt.largest, width=32), min_size=1, max_size=20)
    )
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(encode(x, fmt), bits_of(x.to(fmt.dtype)))


@formats
@given(value=st.floats(width=32))
@settings(max_examples=100, deadline=None)
def test_the_nearest_number_is_found_for_any_float(fmt, value):
    x = torch.tensor([value], dtype=torch.float32)
    number = decode(encode(x, fmt), fmt).item()
    if math.isnan(value):
        assert math.isnan(number)
        return
    numbers = fp8_math.numbers(fmt)
    clipped = min(max(value, -fmt.largest), fmt.largest)
    assert abs(number - clipped) == (numbers - clipped).abs().min().item()
    assert math.copysign(1, number) == math.copysign(1, value)


def test_the_ends_of_the_ranges():
    assert (E4M3.smallest, E4M3.smallest_normal, E4M3.largest) == (2**-9, 2**-6, 448)
    assert (E5M2.smallest, E5M2.smallest_normal, E5M2.largest) == (2**-16, 2**-14, 57344)
    for fmt in FORMATS.values():
        info = torch.finfo(fmt.dtype)
        assert (fmt.largest, fmt.smallest_normal) == (info.max, info.smallest_normal)
        assert fp8_math.numbers(fmt)[-1] == fmt.largest
    assert fp8_math.numbers(E4M3).numel() == 253  # 256 less two NaN and the second zero
    assert fp8_math.numbers(E5M2).numel() == 247


def test_beyond_the_range():
    x = torch.tensor([1e3, -1e6, math.inf, -math.inf])
    assert decode(encode(x)).tolist() == [448, -448, 448, -448]
    assert decode(encode(x, saturate=False)).isnan().all()
    beyond = decode(encode(x * 100, E5M2, saturate=False), E5M2)
    assert torch.equal(beyond, x.sign() * math.inf)


# Casting: article A2's words


# Scaling


def test_the_articles_scale():
    x = torch.tensor([-1000.0, 10000.0])
    assert fp8_math.scale_for(fp8_math.amax(x)).item() == pytest.approx(0.0448)
    assert (x * fp8_math.scale_for(fp8_math.amax(x))).tolist() == pytest.approx([-44.8, 448])
    assert fp8_math.scale_for(fp8_math.amax(x), margin=2).item() == pytest.approx(0.0112)
    assert quantise(x).restored().tolist() == pytest.approx([-1000, 10000], rel=2**-4)


@pytest.mark.parametrize("granularity", fp8_math.SCALES)
@formats
@given(exponent=st.integers(-40, 60), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_each_group_fills_the_range_and_is_restored_to_within_its_rounding(
    fmt, granularity, exponent, seed
):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q = quantise(x, granularity, fmt)
    assert q.values.dtype == fmt.dtype
    largest = fp8_math.amax(q.values, granularity)
    reached = fmt.largest if granularity != "block" else fmt.largest / 2
    assert ((largest >= reached * 0.99) & (largest <= fmt.largest)).all()
    error = (q.restored() - x).abs()
    half_step = x.abs() * 2.0 ** -(fmt.mantissa_bits + 1)
    subnormal = (q.inverse * fmt.smallest / 2).expand_as(q.values).reshape(x.shape)
    assert (error <= torch.maximum(half_step, subnormal) * 1.001).all()


def test_what_is_lost_is_counted():
    x = torch.tensor([0.0, 1e-7, 1.0, 448.0])
    assert fp8_math.lost(x, quantise(x)) == {"flushed": 1 / 3, "saturated": 0}
    delayed = DelayedScaling()
    assert (
        fp8_math.lost(torch.tensor([1.0, 1e4]), delayed(torch.tensor([1.0, 1e4])))["saturated"]
        == 0.5
    )


# Delayed scaling


def test_delayed_scaling_step_by_step():
    """By hand: the first step's scale is 1, each later one's comes from the amaxes before it."""
    scaling = DelayedScaling(history_length=2)
    expected = {2.0: 1.0, 8.0: 224.0, 4.0: 56.0, 1.0: 56.0, 0.5: 112.0}
    for largest, scale in expected.items():
        assert scaling.scale.item() == scale
        scaling(torch.tensor([largest, -largest / 2]))
    assert scaling.scale.item() == 448
