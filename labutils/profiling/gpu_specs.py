"""Data-sheet facts of the GPUs that the course and its articles name, dense and sparse peaks kept
apart.

A marketing figure "with sparsity" counts multiplications by zeros that were never done; training
has no such zeros, so every ratio in the course (MFU, share of the peak) is against `dense`. Peaks
of 16-bit and 8-bit floats are those with FP32 accumulation, which is what PyTorch's matrix products
use: GeForce cards reach only half their FP16-accumulation figure there. "fp32" is the rate outside
the tensor cores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "fp4")
"""Number formats in the order in which the course shows them."""


@dataclass(frozen=True)
class Spec:
    """One GPU as its data sheet describes it.

    Units: `dense` and `sparse` in TFLOP/s (TOP/s for int8), `bandwidth` in GB/s, `memory_gb` as
    printed by the vendor, `tdp_w` in watts. A format that the card's matrix units lack is absent.
    `note` says which numbers are derived.
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
    note: str = ""

    @property
    def capacity_gb(self) -> float:
        """10^9 bytes that a program finds on it, to about a hundredth.

        What vendors print as GB are 2^30 bytes, of which the driver keeps about one in a hundred:
        an H100 of "80 GB" has 85 x 10^9 bytes, an RTX PRO 6000 of "96 GB" 102.
        """
        return 0.99 * self.memory_gb * 2**30 / 1e9

    def ridge(self, dtype: str = "bf16") -> float | None:
        """FLOP per byte above which the data sheet's dense peak, and not its bandwidth, is the
        limit.
        """
        peak = self.dense.get(dtype)
        return None if peak is None else peak * 1e3 / self.bandwidth


def _peaks(
    fp32: float,
    tf32: float | None = None,
    fp16: float | None = None,
    bf16: float | None = None,
    int8: float | None = None,
    fp8: float | None = None,
    fp4: float | None = None,
    with_sparsity: bool = True,
) -> dict[str, dict[str, float]]:
    """The `dense` and `sparse` fields of a Spec out of dense peaks.

    2:4 sparsity doubles the tensor cores' figure on every card that has it (Ampere and later), and
    leaves the plain fp32 units alone.
    """
    given = dict(zip(DTYPES, (fp32, tf32, fp16, bf16, int8, fp8, fp4), strict=True))
    dense = {dtype: value for dtype, value in given.items() if value is not None}
    sparse = (
        {dtype: 2 * value for dtype, value in dense.items() if dtype != "fp32"}
        if with_sparsity
        else {}
    )
    return {"dense": dense, "sparse": sparse}


HALVED = "The source prints tensor-core peaks with sparsity; dense is half of that."
HOPPER_SXM = _peaks(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, int8=1978.9, fp8=1978.9)

SPECS: tuple[Spec, ...] = (
    Spec(
        name="H100 SXM5",
        names=r"H100 80GB HBM3|H100 SXM5?( 80GB)?",
        compute_capability="9.0",
        sms=132,
        memory_gb=80,
        bandwidth=3352,
        tdp_w=700,
        source="NVIDIA H100 Tensor Core GPU data sheet; H100 architecture white paper",
        note="One decimal as the white paper has it; the data sheet rounds (989, 1,979, 3.35 TB/s).",
        **HOPPER_SXM,
    ),
    Spec(
        name="H100 PCIe",
        names=r"H100 PCIe",
        compute_capability="9.0",
        sms=114,
        memory_gb=80,
        bandwidth=2039,
        tdp_w=350,
        source="NVIDIA H100 Tensor Core GPU data sheet; H100 architecture white paper",
        note=HALVED
        + " The data sheet rounds 2039 GB/s to 2 TB/s and gives the power as 300-350 W.",
        **_peaks(fp32=51.2, tf32=378, fp16=756.5, bf16=756.5, int8=1513, fp8=1513),
    ),
    Spec(
        name="H200 SXM",
        names=r"H200( SXM)?( 141GB)?( HBM3e)?",
        compute_capability="9.0",
        sms=132,
        memory_gb=141,
        bandwidth=4800,
        tdp_w=700,
        source="NVIDIA H200 Tensor Core GPU data sheet",
        note="The H100 SXM5's processor: its peaks with one decimal, which the H200 data sheet rounds (989, 1,979).",
        **HOPPER_SXM,
    ),
    Spec(
        name="B200",
        names=r"B200( SXM6)?( 180GB)?",
        compute_capability="10.0",
        sms=148,
        memory_gb=180,
        bandwidth=8000,
        tdp_w=1000,
        source="NVIDIA HGX and DGX B200 data sheets",
        note="The data sheets print the sum of 8 GPUs: an eighth of it here. " + HALVED,
        **_peaks(fp32=75, tf32=1100, fp16=2250, bf16=2250, int8=4500, fp8=4500, fp4=9000),
    ),
    Spec(
        name="RTX PRO 6000 Blackwell Max-Q",
        names=r"RTX PRO 6000 Blackwell Max-Q( Workstation Edition)?",
        compute_capability="12.0",
        sms=188,
        memory_gb=96,
        bandwidth=1792,
        tdp_w=300,
        source="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition data sheet; RTX Blackwell PRO white paper",
        note="The data sheet prints 110 TFLOPS FP32 and 3,511 AI TOPS (FP4 with sparsity). The others follow from FP4 "
        "by the architecture's ratios: FP8 and INT8 half of it, FP16 and BF16 a quarter, TF32 an "
        "eighth.",
        **_peaks(
            fp32=109.7, tf32=219.45, fp16=438.9, bf16=438.9, int8=877.85, fp8=877.85, fp4=1755.7
        ),
    ),
    Spec(
        name="RTX PRO 6000 Blackwell Workstation",
        names=r"RTX PRO 6000 Blackwell( Workstation Edition)?",
        compute_capability="12.0",
        sms=188,
        memory_gb=96,
        bandwidth=1792,
        tdp_w=600,
        source="NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet; RTX Blackwell PRO white paper",
        note="With one decimal as the white paper has it; the data sheet rounds to 125 TFLOPS FP32 and 4,000 AI TOPS.",
        **_peaks(
            fp32=125.95, tf32=251.9, fp16=503.8, bf16=503.8, int8=1007.6, fp8=1007.6, fp4=2015.2
        ),
    ),
    Spec(
        name="A100 80GB SXM",
        names=r"A100-SXM4-80GB|A100 80GB SXM4?",
        compute_capability="8.0",
        sms=108,
        memory_gb=80,
        bandwidth=2039,
        tdp_w=400,
        source="NVIDIA A100 Tensor Core GPU data sheet",
        **_peaks(fp32=19.5, tf32=156, fp16=312, bf16=312, int8=624),
    ),
    Spec(
        name="RTX 4090",
        names=r"GeForce RTX 4090",
        compute_capability="8.9",
        sms=128,
        memory_gb=24,
        bandwidth=1008,
        tdp_w=450,
        source="NVIDIA Ada GPU architecture white paper, appendix A",
        note="FP16 and FP8 with FP32 accumulation; with FP16 accumulation they are twice as high (330.3 and 660.6).",
        **_peaks(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, int8=660.6, fp8=330.3),
    ),
    Spec(
        name="RTX 3080",
        names=r"GeForce RTX 3080",
        compute_capability="8.6",
        sms=68,
        memory_gb=10,
        bandwidth=760,
        tdp_w=320,
        source="NVIDIA Ampere GA102 GPU architecture white paper",
        note="The 10 GB card. FP16 with FP32 accumulation; with FP16 accumulation it is twice as high (119).",
        **_peaks(fp32=29.8, tf32=29.8, fp16=59.5, bf16=59.5, int8=238),
    ),
    Spec(
        name="T4",
        names=r"(Tesla )?T4",
        compute_capability="7.5",
        sms=40,
        memory_gb=16,
        bandwidth=320,
        tdp_w=70,
        source="NVIDIA T4 data sheet; T4 product brief",
        note="No BF16, no TF32, no sparsity before Ampere. 320 GB/s is the product brief's; the data sheet prints 300.",
        **_peaks(fp32=8.1, fp16=65, int8=130, with_sparsity=False),
    ),
    Spec(
        name="A10",
        names=r"A10",
        compute_capability="8.6",
        sms=72,
        memory_gb=24,
        bandwidth=600,
        tdp_w=150,
        source="NVIDIA A10 Tensor Core GPU data sheet",
        **_peaks(fp32=31.2, tf32=62.5, fp16=125, bf16=125, int8=250),
    ),
    Spec(
        name="A30",
        names=r"A30",
        compute_capability="8.0",
        sms=56,
        memory_gb=24,
        bandwidth=933,
        tdp_w=165,
        source="NVIDIA A30 Tensor Core GPU data sheet",
        **_peaks(fp32=10.3, tf32=82, fp16=165, bf16=165, int8=330),
    ),
    Spec(
        name="L4",
        names=r"L4",
        compute_capability="8.9",
        sms=58,
        memory_gb=24,
        bandwidth=300,
        tdp_w=72,
        source="NVIDIA L4 Tensor Core GPU data sheet",
        note=HALVED + " It prints 120 (TF32), 242 (FP16, BF16) and 485 (FP8, INT8).",
        **_peaks(fp32=30.3, tf32=60, fp16=121, bf16=121, int8=242.5, fp8=242.5),
    ),
    Spec(
        name="RTX 6000 Ada",
        names=r"RTX 6000 Ada( Generation)?",
        compute_capability="8.9",
        sms=142,
        memory_gb=48,
        bandwidth=960,
        tdp_w=300,
        source="NVIDIA RTX 6000 Ada Generation data sheet; Ada GPU architecture white paper",
        note="The data sheet prints 91.1 TFLOPS FP32 and 1,457 AI TFLOPS (FP8 with sparsity); 16-bit peaks are half of "
        "FP8's, TF32 a quarter, as on every full-rate Ada card; dense is half of sparse.",
        **_peaks(fp32=91.1, tf32=182.1, fp16=364.2, bf16=364.2, int8=728.5, fp8=728.5),
    ),
)


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
