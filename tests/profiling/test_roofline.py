"""Data sheets, the probe, the roofline and the operations drawn on it."""

import statistics

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labutils.profiling import cuda, measured_rates
from labutils.profiling.gpu_specs import DTYPES, SPECS, find_spec
from labutils.profiling.measured_rates import Probe, probe_machine
from labutils.profiling.operations import (
    COLD_BYTES,
    Operation,
    course_operations,
    measure_operation,
)
from labutils.profiling.step_model import CARDS


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_whole_and_consistent(spec):
    assert set(spec.dense) <= set(DTYPES) and spec.source
    assert all(spec.sparse[dtype] == 2 * spec.dense[dtype] for dtype in spec.sparse)
    assert "fp32" not in spec.sparse  # sparsity is a feature of the tensor cores
    capability = float(spec.compute_capability)
    assert ("fp8" in spec.dense) == (capability >= 8.9)
    assert ("fp4" in spec.dense) == (capability >= 10)
    assert ("bf16" in spec.dense) == ("tf32" in spec.dense) == (capability >= 8)
    twice = pytest.approx(2 * spec.dense["fp16"], rel=3e-3)
    assert spec.dense.get("fp8", 2 * spec.dense["fp16"]) == twice
    # FP32 peak = SMs x FP32 lanes x 2 x clock: the count of SMs against the rate, clock in GHz
    lanes = 64 if spec.compute_capability in ("8.0", "7.5") else 128
    assert 1.4 < spec.dense["fp32"] * 1e3 / (spec.sms * lanes * 2) < 2.7


def test_published_peaks_of_the_course():
    h200 = find_spec("NVIDIA H200")
    assert (h200.dense["bf16"], h200.sparse["bf16"]) == (989.4, 1978.8)
    blackwell = find_spec("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    printed = {"tf32": 438.9, "bf16": 877.9, "fp8": 1755.7, "fp4": 3511.4}  # article A3's table
    assert {dtype: blackwell.sparse[dtype] for dtype in printed} == pytest.approx(printed, rel=1e-3)
    assert all(find_spec(name) for name in CARDS)


@pytest.mark.parametrize(
    ("driver_name", "memory_gb", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100 SXM5"),
        ("NVIDIA H200", 150.1, "H200 SXM"),
        ("NVIDIA GeForce RTX 3080", 10.5, "RTX 3080"),
        # A similar card has no data sheet rather than a wrong one.
        ("NVIDIA GeForce RTX 3080", 12.9, None),  # more SMs and a wider bus
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10.0, None),
        ("NVIDIA H200 NVL", 150.1, None),
        ("", None, None),
    ],
)
def test_find_spec_by_the_drivers_name(driver_name, memory_gb, name):
    spec = find_spec(driver_name, memory_gb)
    assert (spec and spec.name) == name


@pytest.fixture
def on_cpu(monkeypatch):
    """No GPU, and timing without spending the time."""
    real = cuda.timed
    monkeypatch.setattr(cuda, "available", lambda: False)
    monkeypatch.setattr(
        cuda,
        "timed",
        lambda call, *_, **__: real(call, budget_s=0, warmup=1, at_least=3, at_most=3),
    )
    measured_rates._measured.cache_clear()
    yield
    measured_rates._measured.cache_clear()


def test_probe_of_a_cpu(on_cpu):
    probed = probe_machine()
    assert set(probed.samples) == {"tflops_fp32", "tflops_bf16", "copy_gb_per_s", "launch_us"}
    assert set(probed.samples) | set(probed.skipped) == set(measured_rates.ITEMS)
    assert all(len(samples) >= 3 and min(samples) > 0 for samples in probed.samples.values())
    assert probed.rate("fp8") is None and "CPU" in probed.skipped["tflops_fp8"]
    assert probed.roofline("fp32").rate == statistics.median(probed.samples["tflops_fp32"])
    assert probe_machine("launch_us").samples["launch_us"] == probed.samples["launch_us"]
    with pytest.raises(ValueError, match="fp16 roofline.*CPU"):
        probed.roofline("fp16")
    with pytest.raises(ValueError, match="not asked for"):
        Probe("cpu", {"tflops_fp32": [1.0]}, {}).roofline("fp32")
    with pytest.raises(ValueError, match="'tflops_fp5' can't be probed"):
        probe_machine("tflops_fp5")


def test_probe_goes_on_when_an_item_fails(on_cpu, monkeypatch):
    def breaks(device):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setitem(measured_rates.ITEMS, "copy_gb_per_s", breaks)
    probed = probe_machine("copy_gb_per_s", "launch_us")
    assert "no such kernel" in probed.skipped["copy_gb_per_s"]
    assert "launch_us" in probed.samples


def test_operations_count_their_work():
    for operation in course_operations("tiny", "cpu", "fp32"):
        call = operation.make()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        # It counts no element-wise work, and no fused attention on a CPU.
        assert counter.get_total_flops() in (0, operation.flops), operation.name


def test_intensities_are_those_of_the_textbook():
    intensity = {op.name: op.intensity for op in course_operations("full", "cpu", "bf16")}
    assert intensity["LoRA's products"] == pytest.approx(8, rel=0.01)  # the rank, two bytes each
    assert intensity["AdamW update"] == 0.5
    assert intensity["SiLU"] == 1
    assert intensity["Self-attention"] == 2048  # tokens / 2


def test_measured_operation_rotates_cold_inputs(on_cpu):
    made = []

    def make():
        made.append(0)
        return lambda: None

    measure_operation(Operation("nothing", "", "fp32", 1, COLD_BYTES["cpu"] / 3, make))
    assert len(made) == 3
