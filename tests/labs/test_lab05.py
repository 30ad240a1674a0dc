"""What low-bit layers and products cost, in errors and in bytes."""

from __future__ import annotations

import pytest
import torch

from labutils.labs import lab05_fp8_matmul
from labutils.labs.lab05_layer_errors import layer_errors
from labutils.results.records import Run


def test_errors_of_even_tensors_are_those_of_the_mantissa():
    chance = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*shape, generator=chance) for shape in ((128, 256), (192, 256), (128, 192))
    )
    errors = layer_errors(w, x, dy)
    for kind in ("tensor", "row", "block"):
        assert errors[f"forward {kind}"] == pytest.approx(0.037, abs=0.003)
        assert errors[f"gradient E4M3 {kind}"] == pytest.approx(0.037, abs=0.003)
        assert errors[f"gradient E5M2 {kind}"] == pytest.approx(0.058, abs=0.005)
        assert errors[f"flushed E5M2 {kind}"] == 0
    assert errors["forward int8"] < 0.02


def test_a_token_far_below_the_others_is_flushed_by_one_scale_and_kept_by_its_own():
    dy = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    dy[5] *= 1e-7
    errors = layer_errors(torch.randn(64, 32), torch.randn(64, 32), dy)
    assert errors["flushed E4M3 tensor"] == pytest.approx(1 / 64, rel=0.1)
    assert errors["flushed E4M3 row"] < 1e-3


def test_int8_suffers_from_outliers_where_fp8_does_not():
    x, w = torch.randn(128, 256), torch.randn(64, 256)
    even = layer_errors(w, x.clone(), torch.randn(128, 64))
    x[:, 7] *= 1000
    w[:, 7] = 0  # the outlier's own product would hide the others'
    spoilt = layer_errors(w, x, torch.randn(128, 64))
    assert spoilt["forward int8"] > 10 * even["forward int8"]
    assert spoilt["forward row"] < 2 * even["forward row"]


def test_where_a_challenger_wins_for_good():
    sizes = (1, 2, 4, 8)
    times = Run("05", "", metrics={f"plain {n}": 1.0 for n in sizes})
    for ms, first in (((2, 2, 0.5, 0.5), 4), ((0.5, 2, 0.5, 0.5), 4), ((0.5, 0.5, 0.5, 2), None)):
        times.metrics |= {f"new {n}": each for n, each in zip(sizes, ms, strict=True)}
        assert lab05_fp8_matmul.wins_from(times, "new", "plain", sizes) == first
