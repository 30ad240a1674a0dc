"""Traces, synchronisations and utilisation on a real GPU."""

import time
from collections import Counter

import pytest
import torch
from traces import Training

from labutils.profiling.trace import profile
from labutils.profiling.utilization_and_power import Utilization


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return profile(Training("cuda"), steps=4, folder=tmp_path_factory.mktemp("profile"))


def test_every_wait_is_found_and_none_invented(trace):
    found = Counter((wait.phase, wait.cause) for wait in trace.waits)
    assert found == {("to_device", "aten::to"): trace.steps, ("log", "aten::item"): 2 * trace.steps}
    assert trace.metrics()["clip_sync"] == 0


def test_shares_add_up_and_kernels_are_known(trace):
    assert sum(trace.partition().values()) * trace.steps == pytest.approx(trace.wall_ms)
    assert 0 < trace.metrics()["traced_gpu_busy"] < 1
    assert trace.categories()["GEMM"]["count"] >= 2  # forward, and the gradient of the weight
    assert trace.launches()["kernels"] >= trace.launches()["launches"] > 5


def test_a_busy_gpu_reads_busy_and_an_idle_one_idle():
    a = torch.randn(8192, 8192, device="cuda")
    with Utilization(interval_s=0.05) as busy:
        end = time.perf_counter() + 2.5
        while time.perf_counter() < end:
            a @ a
            torch.cuda.synchronize()
    with Utilization(interval_s=0.05) as idle:
        time.sleep(2.5)
    if not busy.samples or "gpu" not in busy.samples[0]:
        pytest.skip("the driver does not tell utilisation here")
    assert busy.share > 0.5 > idle.share
