"""FP8 by hand: every code, every rounding and every scale against PyTorch's own casts and against
plain arithmetic.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.quantization import fp8_math
from labutils.layers.quantization.fp8_math import E4M3, E5M2, DelayedScaling, quantise

FORMATS = {"E4M3": E4M3, "E5M2": E5M2}
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))


@formats
def test_the_end_of_the_range(fmt):
    assert fmt.largest == torch.finfo(fmt.dtype).max


# Scaling


def test_the_articles_scale():
    x = torch.tensor([-1000.0, 10000.0])
    assert fp8_math.scale_for(fp8_math.amax(x)).item() == pytest.approx(0.0448)
    assert (x * fp8_math.scale_for(fp8_math.amax(x))).tolist() == pytest.approx([-44.8, 448])
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
    error, info = (q.restored() - x).abs(), torch.finfo(fmt.dtype)
    smallest = info.smallest_normal * info.eps
    half_step = x.abs() * info.eps / 2
    subnormal = (q.inverse * smallest / 2).expand_as(q.values).reshape(x.shape)
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
    for largest, scale in {2.0: 1.0, 8.0: 224.0, 4.0: 56.0, 1.0: 56.0, 0.5: 112.0}.items():
        assert scaling.scale.item() == scale
        scaling(torch.tensor([largest, -largest / 2]))
    assert scaling.scale.item() == 448
