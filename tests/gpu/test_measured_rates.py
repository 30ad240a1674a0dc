"""The probe on a real GPU: sane against the data sheet, and done in time."""

import statistics
import time

import pytest
import torch

from labutils.profiling import cuda, measured_rates
from labutils.profiling.cuda_architectures import try_unlisted_architecture
from labutils.profiling.gpu_specs import spec_of
from labutils.profiling.machine import machine_facts
from labutils.profiling.measured_rates import measured_roofline, probe_machine
from labutils.profiling.operations import course_operations, measure_operation


@pytest.fixture(scope="module")
def probed():
    start = time.perf_counter()
    probe = probe_machine()
    assert time.perf_counter() - start < 15
    return probe


def test_what_the_card_can_do_was_measured(probed):
    capability = cuda.capability()
    always = {"tflops_fp32", "tflops_fp16", "copy_gb_per_s", "launch_us", "graph_node_us"}
    assert always <= set(probed.samples)
    assert (probed.rate("bf16") is not None) == (capability >= (8, 0))
    assert (probed.rate("fp8") is not None) == (capability >= (8, 9)), probed.skipped
    assert probed.rate("fp16") > probed.rate("fp32")
    assert probed.median("graph_node_us") < probed.median("launch_us")


def test_rates_lie_below_the_data_sheet_and_not_far(probed):
    spec = spec_of(machine_facts())
    if spec is None:
        pytest.skip("no data sheet of this card")
    for dtype, peak in spec.dense.items():
        rate = probed.rate(dtype)
        if rate is not None:
            assert 0.4 * peak < rate < 1.05 * peak, dtype
    assert 0.6 * spec.bandwidth < probed.median("copy_gb_per_s") < 1.02 * spec.bandwidth


def test_fp8_products_are_right():
    if cuda.capability() < (8, 9):
        pytest.skip("no FP8 matrix units")
    torch.manual_seed(0)
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    for rowwise in (False, True):
        product = measured_rates._fp8_product(a, b, rowwise)().float()
        error = (product - a @ b.t()).norm() / (a @ b.t()).norm()
        # E4M3 rounds each number by up to 6 %, and errors cancel in the sum
        assert error < 0.06, rowwise


def test_operations_run_no_faster_than_their_floor():
    dtype = "bf16" if cuda.capability() >= (8, 0) else "fp16"
    roofs = {name: measured_roofline(name) for name in ("fp32", dtype)}
    for operation in course_operations("small", "cuda", dtype):
        measured = statistics.median(measure_operation(operation))
        floor = roofs[operation.dtype].floor_ms(operation.flops, operation.bytes)
        assert measured > 0.85 * floor, operation.name  # the probe's own spread


def test_a_kernel_for_another_card_warns_and_fails():
    facts = try_unlisted_architecture()
    assert (facts["warned"], facts["failed"]) == (1, 1)
    assert "no kernel image" in facts["message"]
    assert torch.cuda.get_arch_list() == cuda.architectures()  # PyTorch's list is as it was
