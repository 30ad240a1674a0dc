"""Lab 06's comparisons on a GPU: a method's memory is its own, whoever trains beside it."""

from __future__ import annotations

import pytest

from labutils.labs import lab06_anyres
from labutils.workloads import open_workload


def test_a_method_s_memory_is_its_own_and_less_with_fewer_bits():
    small = open_workload("llava-lora", scale="small", device="cuda")
    runs = lab06_anyres.compared(small, ("bf16", "fp8-frozen", "qlora", "compile"), 1, rounds=1)
    peaks = {name: run.metric("peak_allocated_gb") for name, run in runs.items()}
    # QLoRA's preparation has the embedding in float32, which weighs in so small a model.
    assert max(peaks["qlora b1"], peaks["fp8-frozen b1"]) < peaks["bf16 b1"]
    (alone,) = lab06_anyres.compared(small, ("bf16",), 1, rounds=1).values()
    assert alone.metric("peak_allocated_gb") == pytest.approx(peaks["bf16 b1"], rel=0.05)
    assert runs["compile b1"].metrics["graphs"] > 0


def test_one_shape_is_timed_on_as_computed_tokens():
    varied = open_workload("llava-lora-varied", scale="small", device="cuda")
    runs = lab06_anyres.any_shape(varied, rounds=1)
    assert all(run.ok for run in runs.values()), {n: r.status for n, r in runs.items() if not r.ok}
    useful = {name: runs[name].metric("useful_tokens") for name in ("padded", "blocks compiled")}
    assert useful["padded"] < 1 == useful["blocks compiled"]
