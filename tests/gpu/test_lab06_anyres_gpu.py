"""Lab 06's cells on a GPU: a method's memory is its own, and replays compile nothing once warm."""

from __future__ import annotations

import pytest

from labutils.labs import lab06_anyres
from labutils.workloads import open_workload

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def small():
    return open_workload("llava-lora", scale="small", device="cuda")


def test_a_method_s_memory_is_its_own_and_less_with_fewer_bits(small):
    first, fp8, nf4, again = (
        lab06_anyres.cell(small, name, 1).metrics for name in ("bf16", "fp8-frozen", "nf4", "bf16")
    )
    assert again["peak_allocated_gb"] == pytest.approx(first["peak_allocated_gb"], rel=0.02)
    assert nf4["weights_gb"] < fp8["weights_gb"] < 0.7 * first["weights_gb"]


def test_replays_report_their_peak_and_compile_nothing_once_warm():
    varied = open_workload("llava-lora-varied", scale="small", device="cuda")
    recipe = lab06_anyres.method("compile").but(layers="rewritten", cache="features")
    for name, run in lab06_anyres.replays(varied, recipe, 3).items():
        assert run.metrics["peak_allocated_gb"] > 0, name
        assert run.metrics["recompilations"] == 0, name
