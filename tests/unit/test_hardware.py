"""Data sheets, machine facts, the probe, the roofline and the operations drawn on it."""

import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from labutils.profiling import cuda, machine, operations, probe
from labutils.profiling.cuda_architectures import runs_on, try_unlisted_architecture
from labutils.profiling.gpu_specs import DTYPES, SPECS, find_spec, spec_of
from labutils.profiling.machine import default_device, machine_facts, meant_for, scale_for
from labutils.profiling.operations import (
    Operation,
    course_operations,
    measure_operation,
    sweep_sizes,
)
from labutils.profiling.probe import probe_machine, rate_over_time
from labutils.profiling.roofline import Roofline

# data sheets


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_whole_and_consistent(spec):
    assert set(spec.dense) <= set(DTYPES) and spec.source
    assert "fp32" in spec.dense and "fp16" in spec.dense
    assert all(spec.sparse[dtype] == 2 * spec.dense[dtype] for dtype in spec.sparse)
    assert "fp32" not in spec.sparse  # sparsity is a feature of the tensor cores
    assert ("fp8" in spec.dense) == (float(spec.compute_capability) >= 8.9)
    assert ("fp4" in spec.dense) == (float(spec.compute_capability) >= 10)
    assert ("bf16" in spec.dense) == ("tf32" in spec.dense) == (float(spec.compute_capability) >= 8)
    assert spec.dense.get("fp8", 2 * spec.dense["fp16"]) == pytest.approx(
        2 * spec.dense["fp16"], rel=3e-3
    )


def test_fp32_peak_agrees_with_cores_and_clock():
    """FP32 peak = SMs x FP32 lanes x 2 x clock: an independent check of SM count against the rate
    (clock in GHz).
    """
    lanes = {"8.0": 64, "7.5": 64}
    for spec in SPECS:
        clock = spec.dense["fp32"] * 1e3 / (spec.sms * lanes.get(spec.compute_capability, 128) * 2)
        assert 1.4 < clock < 2.7, spec.name


def test_published_peaks_of_the_course():
    h200 = find_spec("NVIDIA H200")
    assert (h200.dense["bf16"], h200.sparse["bf16"]) == (989.4, 1978.8)
    assert (h200.dense["fp8"], h200.dense["tf32"], h200.dense["fp32"]) == (1978.9, 494.7, 66.9)
    assert h200.ridge("bf16") == pytest.approx(206.1, abs=0.1)
    assert h200.ridge("fp4") is None
    blackwell = find_spec("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    printed = {"tf32": 438.9, "bf16": 877.9, "fp8": 1755.7, "fp4": 3511.4}  # article A3's table
    assert {dtype: blackwell.sparse[dtype] for dtype in printed} == pytest.approx(printed, rel=1e-3)


@pytest.mark.parametrize(
    ("driver_name", "memory_gb", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100 SXM5"),
        ("NVIDIA H100 PCIe", 85.0, "H100 PCIe"),
        ("NVIDIA H200", 150.1, "H200 SXM"),
        ("NVIDIA B200", 191.5, "B200"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            102.0,
            "RTX PRO 6000 Blackwell Max-Q",
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            102.0,
            "RTX PRO 6000 Blackwell Workstation",
        ),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100 80GB SXM"),
        ("NVIDIA GeForce RTX 4090", 25.3, "RTX 4090"),
        ("NVIDIA GeForce RTX 3080", 10.5, "RTX 3080"),
        ("Tesla T4", 15.6, "T4"),
        ("NVIDIA A10", 23.8, "A10"),
        ("NVIDIA A30", 25.2, "A30"),
        ("NVIDIA L4", 23.6, "L4"),
        ("NVIDIA RTX 6000 Ada Generation", 51.0, "RTX 6000 Ada"),
        ("H200 SXM", None, "H200 SXM"),
    ],
)
def test_find_spec_by_the_drivers_name(driver_name, memory_gb, name):
    assert find_spec(driver_name, memory_gb).name == name


@pytest.mark.parametrize(
    ("driver_name", "memory_gb"),
    [
        ("NVIDIA GeForce RTX 3080", 12.9),  # the 12 GB card has more SMs and a wider bus
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2),
        ("NVIDIA GeForce RTX 4090 D", 25.3),
        ("NVIDIA A10G", 23.7),
        ("NVIDIA A100-SXM4-40GB", 42.4),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10.0),
        ("NVIDIA H200 NVL", 150.1),
        ("NVIDIA H100 NVL", 100.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102.0),
        ("", None),
    ],
)
def test_a_similar_card_has_no_spec_rather_than_a_wrong_one(driver_name, memory_gb):
    assert find_spec(driver_name, memory_gb) is None


def test_spec_of_a_machine():
    assert spec_of({}) is None
    assert spec_of({"gpu": "NVIDIA H200", "gpu_memory_gb": 150.1}).name == "H200 SXM"
    assert spec_of({"gpu": "NVIDIA GeForce RTX 3080", "gpu_memory_gb": 12.9}) is None


# roofline


def test_roofline_floor_and_ridge():
    roof = Roofline(rate=100.0, bandwidth=1000.0)  # 100 TFLOP/s, 1 TB/s
    assert roof.ridge == 100
    assert (
        roof.attainable(10) == 10 and roof.attainable(100) == 100 and roof.attainable(1000) == 100
    )
    assert roof.floor_ms(flops=1e12, bytes=1e9) == pytest.approx(10)  # arithmetic
    assert roof.floor_ms(flops=1e9, bytes=1e10) == pytest.approx(10)  # memory
    assert roof.floor_ms(flops=0, bytes=0) == 0


@pytest.mark.parametrize(("rate", "bandwidth"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_roofline_refuses_what_is_none(rate, bandwidth):
    with pytest.raises(ValueError, match="above 0"):
        Roofline(rate, bandwidth)


# which code runs on which card


@pytest.mark.parametrize(
    ("architectures", "capability", "how"),
    [
        (["sm_50", "sm_60", "sm_70", "sm_80", "sm_90"], (12, 0), "no"),  # article A1
        (["sm_80", "sm_90", "sm_100", "sm_120"], (12, 0), "native"),
        (["sm_120"], (12, 1), "native"),
        (["sm_80"], (8, 9), "native"),
        (["sm_86"], (8, 0), "no"),
        (["sm_90", "compute_90"], (12, 0), "ptx"),
        (["sm_100", "compute_100"], (9, 0), "no"),
        (["sm_90a"], (9, 0), "native"),
        (["sm_90a", "compute_90a"], (10, 0), "no"),
        (["sm_100f"], (10, 3), "native"),
        (["sm_100f"], (12, 0), "no"),
        (["gfx90a"], (9, 0), "no"),
        ([], (9, 0), "no"),
    ],
)
def test_runs_on(architectures, capability, how):
    assert runs_on(architectures, capability) == how


def test_the_unlisted_architecture_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    with pytest.raises(RuntimeError, match="no GPU"):
        try_unlisted_architecture()


# the machine


def test_scale_for():
    assert scale_for({}) == "tiny"
    assert scale_for({"gpu": "old", "gpu_memory_gb": 4.0}) == "tiny"
    assert scale_for({"gpu": "RTX 3080", "gpu_memory_gb": 10.5}) == "small"
    assert scale_for({"gpu": "H200", "gpu_memory_gb": 150.1}) == "full"


@pytest.mark.parametrize(
    ("gigabytes", "small"),
    [
        (47.8, ["06", "07", "08", "09"]),
        (85.0, ["06", "07", "08"]),
        (102.0, ["06", "07"]),
        (150.1, []),
    ],
)
def test_each_lab_asks_for_the_memory_that_it_needs(gigabytes, small):
    """On cards of 48, 80, 96 and 141 GB by their names, one each."""
    labs = [f"{number:02}" for number in range(12)]
    scales = {lab: scale_for({"gpu": "one", "gpu_memory_gb": gigabytes}, lab) for lab in labs}
    assert scales.pop("10") == "tiny"  # it takes two GPUs
    assert scales.pop("11") == scales["00"]
    assert [lab for lab, scale in scales.items() if scale == "small"] == small
    assert set(scales.values()) == ({"small", "full"} if small else {"full"})


def test_several_gpus_are_asked_for_where_a_lab_takes_them(monkeypatch):
    monkeypatch.setattr(cuda, "count", lambda: 2)
    assert scale_for({"gpu": "H200", "gpu_memory_gb": 150.1}, "10") == "full"
    assert scale_for({"gpu": "A40", "gpu_memory_gb": 47.8}, "10") == "small"
    assert [meant_for(scale, "10") for scale in ("tiny", "full")] == [
        "any CPU",
        "two GPUs of 80 GB",
    ]
    assert meant_for("full", "06") == "a GPU of 141 GB"


def test_machine_leaves_out_what_does_not_apply():
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["ram_gb"] > 0 and facts["os"] and facts["cpu"]
    assert None not in facts.values()
    assert ("gpu" in facts) == (default_device() == "cuda")
    facts["cores"] = -1
    assert machine_facts()["cores"] >= 1  # a caller's change stays the caller's


def write(root, **files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/cgroup.controllers": "cpu",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            3,
        ),
    ],
    ids=["no limit", "v2 max", "v2 2.5 cores", "v2 half a core", "v2 parent's limit", "v1"],
)
def test_cores_within_a_container_limit(tmp_path, eight_cores, files, cores):
    write(tmp_path, **files)
    assert machine.usable_cores(tmp_path) == cores


def test_ram_is_the_containers_limit(tmp_path):
    write(tmp_path, **{"proc/meminfo": "MemTotal:       32000000 kB\nMemFree: 1 kB\n"})
    assert machine.ram_gb(tmp_path) == 32.8
    write(
        tmp_path,
        **{
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/memory.max": "8000000000\n",
        },
    )
    assert machine.ram_gb(tmp_path) == 8.0
    write(tmp_path, **{"sys/fs/cgroup/memory.max": "max\n"})
    assert machine.ram_gb(tmp_path) == 32.8
    assert machine.ram_gb(tmp_path / "nowhere") is None


def test_names_of_cpu_and_system(tmp_path):
    write(
        tmp_path,
        **{
            "proc/cpuinfo": "processor: 0\nmodel name\t: A Processor\n",
            "etc/os-release": 'PRETTY_NAME="A System 12"\n',
        },
    )
    assert machine.cpu_name(tmp_path) == "A Processor"
    assert machine.os_name(tmp_path) == "A System 12"
    assert machine.shm_gb(tmp_path) is None


def test_no_driver_is_none(monkeypatch):
    monkeypatch.setattr(
        machine.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError())
    )
    assert machine.driver() is None


def test_importing_hardware_imports_no_torch():
    code = "import labutils.profiling.machine, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# the facade


def test_facade_without_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    assert cuda.card() == {} and cuda.capability() is None and cuda.architectures() == []
    assert (
        cuda.peak_memory() is None
        and cuda.free_memory() is None
        and cuda.allocated_memory() is None
    )
    assert cuda.graph_of(lambda: None) is None
    for harmless in (cuda.synchronize, cuda.empty_cache, cuda.reset_peak_memory):
        harmless()


def test_a_broken_torch_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cuda.available() is False


def test_timed_warms_up_and_repeats(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    calls = []
    times = cuda.timed(lambda: calls.append(0), budget_s=0, warmup=4, at_least=6)
    assert len(times) == 6 and len(calls) == 4 + 1 + 6
    assert min(times) >= 0


def test_bursts_without_a_gpu_are_plain_repeats(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    monkeypatch.setattr(cuda.time, "sleep", lambda seconds: pytest.fail("a CPU needs no rest"))
    assert len(cuda.timed_in_bursts(lambda: None, burst_s=0)) == 7


# the probe


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    probe._measured.cache_clear()
    yield
    probe._measured.cache_clear()


@pytest.fixture
def briefly(monkeypatch):
    """Timing without spending the time."""
    real = cuda.timed
    monkeypatch.setattr(
        cuda, "timed", lambda call, **_: real(call, budget_s=0, warmup=1, at_least=3, at_most=3)
    )


def test_probe_of_a_cpu(on_cpu, briefly):
    found = probe_machine()
    assert set(found.samples) == {"tflops_fp32", "tflops_bf16", "copy_gb_per_s", "launch_us"}
    assert set(found.samples) | set(found.skipped) == set(probe.ITEMS)
    assert all(len(samples) >= 3 and min(samples) > 0 for samples in found.samples.values())
    assert found.rate("fp8") is None and "CPU" in found.skipped["tflops_fp8"]
    roof = found.roofline("fp32")
    assert roof.rate == found.rate("fp32") == statistics.median(found.samples["tflops_fp32"])
    with pytest.raises(ValueError, match="fp16 roofline.*CPU"):
        found.roofline("fp16")


def test_probe_measures_an_item_once(on_cpu, briefly, monkeypatch):
    count = []
    monkeypatch.setitem(
        probe._MEASURERS, "launch_us", lambda device: count.append(device) or [1.0, 2.0, 3.0]
    )
    assert probe_machine("launch_us").median("launch_us") == 2.0
    assert probe_machine("launch_us").samples == {"launch_us": [1.0, 2.0, 3.0]}
    assert count == ["cpu"]
    with pytest.raises(ValueError, match="copy_gb_per_s was not asked for"):
        probe.Probe("cpu", {"tflops_fp32": [1.0]}, {}).roofline("fp32")


def test_probe_goes_on_when_an_item_fails(on_cpu, briefly, monkeypatch):
    def breaks(device):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setitem(probe._MEASURERS, "copy_gb_per_s", breaks)
    found = probe_machine("copy_gb_per_s", "launch_us")
    assert found.skipped == {"copy_gb_per_s": "failed with RuntimeError: no such kernel"}
    assert "launch_us" in found.samples


def test_probe_refuses_an_unknown_item():
    with pytest.raises(ValueError, match="'tflops_fp5' can't be probed"):
        probe_machine("tflops_fp5")


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((7, 5), {"tf32", "bf16", "fp8"}), ((8, 6), {"fp8"}), ((9, 0), set())],
)
def test_formats_a_card_lacks_are_skipped(monkeypatch, capability, missing):
    monkeypatch.setattr(cuda, "capability", lambda: capability)
    refused = set()
    for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8"):
        try:
            probe._require(dtype, "cuda")
        except probe.Unsupported as error:
            assert f"{capability[0]}.{capability[1]}" in str(error)
            refused.add(dtype)
    assert refused == missing


def test_matrices_fit_beside_what_is_on_the_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "free_memory", lambda: 1.0)
    size = probe._largest_in_memory()
    assert size % 256 == 0 and 4000 < size < 5000
    monkeypatch.setattr(cuda, "free_memory", lambda: None)
    assert probe._largest_in_memory() > 8192  # a CPU's memory is no limit here


def test_probed_data_is_random():
    data = probe.random_bytes(4 * probe.MIB, "cpu")
    assert data.numel() == 4 * probe.MIB
    assert len(data.unique()) == 256
    a = probe._product("fp32", 16, "cpu")()
    assert a.abs().min() > 0


def test_rate_over_time(on_cpu):
    found = rate_over_time("fp32", seconds=0.2, points=5)
    seconds, rates = zip(*found, strict=True)
    assert len(found) == 5 and list(seconds) == sorted(seconds) and min(rates) > 0
    with pytest.raises(ValueError, match="fp8 is not for a CPU"):
        rate_over_time("fp8")


def test_matrix_precision_is_set_back():
    import torch

    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    settings = lambda: [
        torch.get_float32_matmul_precision(),
        *(backend.fp32_precision for backend in backends),
    ]
    before = settings()
    with pytest.raises(ArithmeticError), probe._fp32_products_as("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise ArithmeticError
    assert (
        settings() == before
    )  # else what other processes compiled is not found in the compiler's cache


# operations


def test_operations_count_their_work():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    for operation in course_operations("tiny", "cpu", "fp32"):
        call = operation.make()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        counted = counter.get_total_flops()
        if counted:  # it counts no element-wise work, and no fused attention on a CPU
            assert counted == operation.flops, operation.name
        assert operation.intensity == operation.flops / operation.bytes


def test_intensities_are_those_of_the_textbook():
    found = {operation.name: operation for operation in course_operations("full", "cpu", "bf16")}
    assert found["LoRA's products"].intensity == pytest.approx(
        8, rel=0.01
    )  # the rank, at two bytes a number
    assert found["AdamW update"].intensity == 0.5
    assert found["SiLU"].intensity == 1
    assert found["Self-attention"].intensity == 2048  # tokens / 2
    assert found["Frozen projection"].flops == 2 * 4096**3
    assert found["UNet convolution"].flops == 2 * 4 * 64 * 64 * 320 * 320 * 9


def test_measured_operation_rotates_cold_inputs(on_cpu):
    made = []

    def make():
        made.append(0)
        return lambda: None

    operation = Operation("nothing", "", "fp32", 1, operations.COLD_BYTES["cpu"] / 3, make)
    timing = measure_operation(operation, budget_s=0)
    assert len(made) == 3
    assert timing.alone_ms == timing.called_ms and len(timing.called_ms) >= 5


def test_sweep_of_sizes(on_cpu):
    found = sweep_sizes("cpu", exponents=(0, 18))
    assert list(found) == [1, 2**18]
    assert statistics.median(found[1].called_ms) < statistics.median(found[2**18].called_ms)


def test_card_facts_come_from_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_100_000_000, major=9, minor=0)
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    facts = cuda.card()
    assert (
        facts["gpu"] == "NVIDIA H200"
        and facts["gpu_memory_gb"] == 150.1
        and facts["compute_capability"] == "9.0"
    )
    assert cuda.capability() == (9, 0)
