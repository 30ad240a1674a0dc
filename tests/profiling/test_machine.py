"""What this machine is, and which code runs on which card."""

import sys

import pytest

from labutils.profiling import cuda, machine
from labutils.profiling.cuda_architectures import runs_on
from labutils.profiling.machine import default_device, machine_facts


@pytest.mark.parametrize(
    ("architectures", "capability", "how"),
    [
        (["sm_80"], (8, 9), "native"),
        (["sm_86"], (8, 0), "no"),
        (["sm_90a"], (9, 0), "native"),
        (["sm_90a", "compute_90a"], (10, 0), "no"),
        (["sm_100f"], (10, 3), "native"),
        (["gfx90a"], (9, 0), "no"),
    ],
)
def test_runs_on(architectures, capability, how):
    assert runs_on(architectures, capability) == how


def test_machine_leaves_out_what_does_not_apply():
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["ram_gb"] > 0 and facts["os"] and facts["cpu"]
    assert None not in facts.values()
    assert ("gpu" in facts) == (default_device() == "cuda")
    facts["cores"] = -1
    assert machine_facts()["cores"] >= 1  # a caller's change stays the caller's


def write(root, files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


BOX = {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/cpu.max": "400000 100000",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (BOX, 4),
    ],
    ids=["no limit", "2.5 cores", "half a core", "parent's limit"],
)
def test_cores_within_a_container_limit(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path, files)
    assert machine.usable_cores(tmp_path) == cores


def test_ram_is_the_containers_limit(tmp_path):
    all_of_it = machine.ram_gb(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/memory.max": "800000000\n"})
    assert machine.ram_gb(tmp_path) == 0.8 < all_of_it
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert machine.ram_gb(tmp_path) == all_of_it


def test_a_broken_torch_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cuda.available() is False
