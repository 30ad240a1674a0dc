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


def test_a_method_s_memory_does_not_depend_on_what_ran_before(small):
    first, _, again = (
        lab06_anyres.cell(small, name, 1).metrics["peak_allocated_gb"]
        for name in ("bf16", "nf4", "bf16")
    )
    assert again == pytest.approx(first, rel=0.02)


def test_fewer_bits_take_less_memory(small):
    bf16, fp8, nf4 = (
        lab06_anyres.cell(small, name, 1).metrics["weights_gb"]
        for name in ("bf16", "fp8-frozen", "nf4")
    )
    assert nf4 < fp8 < 0.7 * bf16


def test_what_peft_prepares_takes_more_at_a_larger_batch(small):
    qlora, nf4 = (
        lab06_anyres.cell(small, name, 8).metrics["peak_allocated_gb"] for name in ("qlora", "nf4")
    )
    assert qlora > nf4


def test_replays_report_their_peak_and_compile_nothing_once_warm(small):
    recipe = lab06_anyres.method("compile").but(layers="rewritten", cache="features")
    runs = lab06_anyres.replays(
        open_workload("llava-lora-varied", scale="small", device="cuda"), recipe, 3
    )
    for name, run in runs.items():
        assert run.metrics["peak_allocated_gb"] > 0, name
        assert run.metrics["recompilations"] == 0, name
