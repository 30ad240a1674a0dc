"""Data sheets of the GPUs that the course and its articles name, dense and sparse peaks kept apart.

The sheets themselves are in gpu_specs.toml.

A marketing figure "with sparsity" counts multiplications by zeros that were never done; training
has no such zeros, so every ratio in the course (MFU, share of the peak) is against `dense`. Peaks
of 16-bit and 8-bit floats are those with FP32 accumulation, which is what PyTorch's matrix products
use: GeForce cards reach only half their FP16-accumulation figure there. "fp32" is the rate outside
the tensor cores.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "fp4")
"""Number formats in the order in which the course shows them."""


@dataclass(frozen=True)
class Spec:
    """One GPU as its data sheet describes it.

    Units: `dense` and `sparse` in TFLOP/s (TOP/s for int8), `bandwidth` in GB/s, `memory_gb` as
    printed by the vendor, `tdp_w` in watts. A format that the card's matrix units lack is absent.
    `plain`: peaks of FP64 and INT32, which like FP32's are not the matrix units'. `note` says which
    numbers are derived.
    """

    name: str
    names: str
    compute_capability: str
    sms: int
    memory_gb: float
    bandwidth: float
    tdp_w: int
    dense: dict[str, float]
    source: str
    sparse: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    note: str = ""


def _read_specs() -> tuple[Spec, ...]:
    """The sheets of gpu_specs.toml. 2:4 sparsity doubles the tensor cores' peaks on each card that
    has it (Ampere and later), and leaves the plain fp32 units alone.
    """
    sheets = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["gpu"]
    specs = []
    for sheet in sheets:
        sparsity, dense = sheet.pop("sparsity", True), sheet["dense"]
        sparse = {dtype: 2 * peak for dtype, peak in dense.items() if sparsity and dtype != "fp32"}
        specs.append(Spec(**sheet, sparse=sparse))
    return tuple(specs)


SPECS = _read_specs()


def spec_of(machine: Mapping[str, Any]) -> Spec | None:
    """The data sheet of the GPU in `machine` (facts as `machine_facts()` gives them), or None."""
    return find_spec(machine.get("gpu", ""), machine.get("gpu_memory_gb"))


def find_spec(gpu_name: str, memory_gb: float | None = None) -> Spec | None:
    """The data sheet of the card that the driver calls `gpu_name`, or None: a wrong data sheet is
    worse than none.

    `memory_gb` (10^9 bytes, as the driver reports it) tells apart cards sold under one name, such
    as the RTX 3080 of 10 and 12 GB. A vendor's "80 GB" is up to 80 x 2^30 bytes, hence the
    tolerance. MIG slices and laptop versions have longer names and match nothing.
    """
    bare = re.sub(r"^NVIDIA\s+", "", gpu_name.strip())
    for spec in SPECS:
        named = bare == spec.name or re.fullmatch(spec.names, bare, flags=re.IGNORECASE)
        if named and (memory_gb is None or 0.9 <= memory_gb / spec.memory_gb <= 1.12):
            return spec
    return None
