"""What this machine is: its processor, memory and GPU, as facts that stand beside every result."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from labutils.profiling import cuda

ROOT = Path("/")


def default_device() -> str:
    """Where the course computes: "cuda" where PyTorch can use a GPU, "cpu" otherwise."""
    return "cuda" if cuda.available() else "cpu"


def machine_facts() -> dict[str, Any]:
    """Facts about this machine; memory in 10^9 bytes. What does not apply here is absent.

    Keys: gpu, gpu_id, gpu_memory_gb, compute_capability, driver, cuda (the version PyTorch was
    built with), cpu, cores (those this process may use), ram_gb (those it may fill), shm_gb, os.
    """
    return dict(_machine())


@functools.cache
def _machine() -> dict[str, Any]:
    facts = cuda.card() | {
        "driver": driver(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "ram_gb": ram_gb(),
        "shm_gb": shm_gb(),
        "os": os_name(),
    }
    return {name: value for name, value in facts.items() if value is not None}


def driver() -> str | None:
    """Version of the NVIDIA driver, which may be there although PyTorch sees no GPU; None where
    nvidia-smi does not say.
    """
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


NEEDED_GB = {
    "full": {"": 40, "06": 141, "07": 141, "08": 96, "09": 80, "11": 80},
    "small": {"": 8, "11": 24},
}
"""Scale -> lab -> GB of GPU memory that its models take; "" for all other labs."""
SEVERAL_GPUS = ("11",)
"""Labs that use all GPUs there are, and whose larger scales need two or more."""


def scale_for(machine: dict[str, Any], lab: str = "") -> str:
    """The largest scale that fits `machine`: "full", "small" from 8 GB of GPU memory for most labs,
    otherwise "tiny".

    lab: number of the lab that is to fit. Without one, or for an unknown one, it is what most labs
    need.
    """
    if lab in SEVERAL_GPUS and cuda.count() < 2:
        return "tiny"
    has = machine.get("gpu_memory_gb", 0)
    return next((scale for scale in NEEDED_GB if has >= needed_gb(scale, lab)), "tiny")


def needed_gb(scale: str, lab: str) -> int:
    """GB of GPU memory that a lab takes at the scale "full" or "small"."""
    by_lab = NEEDED_GB[scale]
    return by_lab.get(lab, by_lab[""])


def meant_for(scale: str, lab: str = "") -> str:
    """In words, the machine that `lab` needs at `scale`."""
    if scale == "tiny":
        return "any CPU"
    return f"{'two GPUs' if lab in SEVERAL_GPUS else 'a GPU'} of {needed_gb(scale, lab)} GB"


def usable_cores(root: Path = ROOT) -> int:
    """CPU cores this process may use: fewer than the machine has under taskset, a batch system or a
    container limit (control groups version 2).
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for limit in _limits(root, "cpu.max"):
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def ram_gb(root: Path = ROOT) -> float:
    """Memory this process may fill, in 10^9 bytes: the machine's or a container's limit."""
    limits = [int(limit) for limit in _limits(root, "memory.max") if limit != "max"]
    return round(min([psutil.virtual_memory().total, *limits]) / cuda.GB, 1)


def shm_gb() -> float | None:
    """Size of /dev/shm, through which DataLoader workers hand over batches, in 10^9 bytes; None
    where there is none.
    """
    folder = ROOT / "dev/shm"
    return round(shutil.disk_usage(folder).total / cuda.GB, 3) if folder.is_dir() else None


def cpu_name() -> str:
    """The processor's name as it gives it."""
    name = re.search(r"^model name\s*:\s*(.+)$", _text(ROOT / "proc/cpuinfo"), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def os_name() -> str:
    """The operating system and its version."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # macOS, among others
        return platform.platform(terse=True)


def _limits(root: Path, name: str) -> list[str]:
    """A limit as each control group from this process's own up to the root sets it."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    group = next((line[3:] for line in lines if line.startswith("0::")), "/")
    mount = root / "sys/fs/cgroup"
    own = mount / group.lstrip("/")
    folders = [f for f in (own, *own.parents) if f == mount or mount in f.parents]
    return [text for folder in folders if (text := _text(folder / name).strip())]


def _text(path: Path) -> str:
    """What a file says, "" where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
