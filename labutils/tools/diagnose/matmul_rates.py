"""What matrix products of a step's own sizes take in each format, measured here, or as data sheets
have it.

A product's gain from a format depends on its size: a few rows against a large matrix are bound by
memory in every format. So a step's own products are timed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from labutils.profiling import cuda
from labutils.profiling.measured_rates import probe_machine, products_as
from labutils.tools.diagnose.step_queue import Product

BUDGET_S = 4.0
"""All products together may be timed so long."""
LARGEST = 4e9
"""Numbers of a product's matrices beyond which it isn't tried."""
SHEET = {"fp32": 1.0, "tf32": 6.0, "bf16": 12.0, "fp16": 12.0}
"""How many times as fast as fp32 large products are on a data-centre GPU, for traces of another
machine: on an H200 the data sheet says 67, 495 and 989 TFLOP/s, of which 6 and 12 times were
reached."""


@dataclass
class Rates:
    """Milliseconds of products on `device`; `here`: whether the step ran on this machine."""

    device: str
    here: bool = True
    known: dict[Product, float | None] = field(default_factory=dict)
    spent_s: float = 0.0

    def ratio(self, product: Product, dtype: str) -> float:
        """How many times as long the product takes in `dtype` as in its own format."""
        if self.here and product.dtype in SHEET and product.dtype != dtype:
            own, other = self._ms(product), self._ms(product.in_format(dtype))
            if own is not None and other is not None:
                return other / own
        return self.large(product.dtype, dtype)

    def large(self, one: str, other: str) -> float:
        """The ratio of large products, as the machine's probe measured it; 1 where it lacks one of
        the formats.
        """
        if one not in SHEET or other not in SHEET:
            return 1.0
        if not self.here:
            return SHEET[one] / SHEET[other]
        probed = probe_machine(f"tflops_{one}", f"tflops_{other}")
        rates = probed.rate(one), probed.rate(other)
        return rates[0] / rates[1] if all(rates) else 1.0

    def flops_ms(self, flops: float, dtype: str) -> float:
        """Milliseconds of so many FLOPs at the machine's own rate of large products; 0 where it is
        not known.
        """
        if not self.here or dtype not in SHEET:
            return 0.0
        rate = probe_machine(f"tflops_{dtype}").rate(dtype)
        return flops / (rate * 1e9) if rate else 0.0

    def moved_ms(self, bytes: float) -> float:
        """Milliseconds of so many bytes at the memory's measured rate."""
        rate = probe_machine("copy_gb_per_s").median("copy_gb_per_s") if self.here else None
        return bytes / ((rate or (3000 if self.device == "cuda" else 10)) * 1e6)

    def _ms(self, product: Product) -> float | None:
        if product not in self.known:
            began = time.perf_counter()
            self.known[product] = None if self.spent_s > BUDGET_S else _timed(product, self.device)
            self.spent_s += time.perf_counter() - began
        return self.known[product]


def _timed(product: Product, device: str) -> float | None:
    """Milliseconds of the device: on a GPU in a CUDA graph of several, without launches. None where
    it can't be tried: it has no such format, or no memory for it."""
    import torch

    m, n, k, count = product.m, product.n, product.k, product.count
    if count * (m * k + k * n + m * n) > LARGEST or min(m, n, k, count) < 1:
        return None
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    options = {"device": device, "dtype": kinds.get(product.dtype, torch.float32)}
    several = 10 if device == "cuda" else 1
    try:
        with products_as(product.dtype):
            a, b = torch.randn(count, m, k, **options), torch.randn(count, k, n, **options)
            if count == 1:
                a, b = a[0], b[0]
            out = torch.matmul(a, b)

            def burst() -> None:
                for _ in range(several):
                    torch.matmul(a, b, out=out)

            burst()
            call = (cuda.graph_of(burst) if device == "cuda" else None) or burst
            return statistics.median(cuda.timed(call, budget_s=0.02, at_least=3)) / several
    except (RuntimeError, ValueError):
        return None
