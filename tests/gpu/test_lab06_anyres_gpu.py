"""Lab 06's cells on a GPU: every method of article A2 runs at a small size, and its memory is its
own.
"""

from __future__ import annotations

import pytest
import torch

from labutils.labs import lab06_advisor, lab06_anyres
from labutils.workloads import open_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def small():
    return open_workload("llava-lora", scale="small", device="cuda")


@pytest.mark.parametrize(
    "name", [*lab06_advisor.PUBLISHED, "nf4", "fp8-frozen", "compile-fp8-frozen", "compile-whole"]
)
def test_every_method_runs(small, name):
    run = lab06_anyres.cell(small, name, 1)
    if run.status.startswith("skipped"):
        pytest.skip(run.status)
    assert run.ok, run.status
    assert run.metrics["peak_allocated_gb"] > run.metrics["weights_gb"] > 0
    assert ("graphs" in run.metrics) is name.startswith(("compile", "fixed"))


def test_a_method_s_memory_is_its_own_and_less_with_fewer_bits(small):
    first, fp8, nf4, again = (
        lab06_anyres.cell(small, name, 1).metrics for name in ("bf16", "fp8-frozen", "nf4", "bf16")
    )
    assert again["peak_allocated_gb"] == pytest.approx(first["peak_allocated_gb"], rel=0.02)
    assert nf4["weights_gb"] < fp8["weights_gb"] < 0.7 * first["weights_gb"]


def test_what_peft_prepares_takes_more_at_a_larger_batch(small):
    qlora, nf4 = (
        lab06_anyres.cell(small, name, 8).metrics["peak_allocated_gb"] for name in ("qlora", "nf4")
    )
    assert qlora > nf4


def test_replays_report_their_peak_and_compile_nothing_once_warm():
    varied = open_workload("llava-lora-varied", scale="small", device="cuda")
    recipe = lab06_anyres.method("compile").but(layers="rewritten", cache="features")
    for name, run in lab06_anyres.replays(varied, recipe, 3).items():
        assert run.metrics["peak_allocated_gb"] > 0, name
        assert run.metrics["recompilations"] == 0, name
