"""What matrix products of a step's own sizes take in each format, measured here, or as data sheets
have it.

A product's gain from a format depends on its size: a few rows against a large matrix are bound by
memory in every format. So a step's own products are timed, those first that take most.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from labutils.profiling import cuda
from labutils.profiling.probe import probe_machine
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
    """Milliseconds of products on `device`; `here`: whether this is the machine on which the step
    ran.
    """

    device: str
    here: bool = True
    known: dict[Product, float | None] = field(default_factory=dict)
    spent_s: float = 0.0

    def ratio(self, product: Product, dtype: str) -> float:
        """How many times as long the product takes in `dtype` as in its own format."""
        if product.dtype not in SHEET or product.dtype == dtype:
            return 1.0
        if not self.here:
            return SHEET[product.dtype] / SHEET[dtype]
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
        if not self.here:
            return 0.0
        rate = probe_machine(f"tflops_{dtype}").rate(dtype) if dtype in SHEET else None
        return flops / (rate * 1e9) if rate else 0.0

    def moved_ms(self, bytes: float) -> float:
        """Milliseconds of so many bytes at the memory's measured rate."""
        rate = probe_machine("copy_gb_per_s").median("copy_gb_per_s") if self.here else None
        return bytes / ((rate or (3000 if self.device == "cuda" else 10)) * 1e6)

    def cast_ms(self, numbers: float, written: float) -> float:
        """Milliseconds of a cast that writes so many bytes. On a CPU large results are new memory
        each time, which the system hands out page by page: that takes longer than the copying."""
        if self.device == "cuda" or not self.here:
            return self.moved_ms(6 * numbers)
        return written / _fresh_bytes_per_ms() + self.moved_ms(4 * numbers)

    def _ms(self, product: Product) -> float | None:
        if product not in self.known:
            self.known[product] = self._measured(product)
        return self.known[product]

    def _measured(self, product: Product) -> float | None:
        m, n, k, count = product.m, product.n, product.k, product.count
        if (
            self.spent_s > BUDGET_S
            or count * (m * k + k * n + m * n) > LARGEST
            or min(m, n, k, count) < 1
        ):
            return None
        began = time.perf_counter()
        try:
            return _timed(_product(product, self.device), self.device)
        except (RuntimeError, ValueError):  # no such format here, or no memory for it
            return None
        finally:
            self.spent_s += time.perf_counter() - began


@functools.cache
def _fresh_bytes_per_ms() -> float:
    """Bytes of memory that can be written for the first time in a millisecond."""
    import torch

    numbers = 1 << 23
    times = cuda.timed(lambda: torch.empty(numbers).fill_(1.0), budget_s=0.1, at_least=3)
    return 4 * numbers / statistics.median(times)


def _product(product: Product, device: str) -> Callable[[], None]:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    shape = {"device": device, "dtype": kinds.get(product.dtype, torch.float32)}
    lead = (product.count,) if product.count > 1 else ()
    a, b = (
        torch.randn(*lead, product.m, product.k, **shape),
        torch.randn(*lead, product.k, product.n, **shape),
    )
    out = torch.empty(*lead, product.m, product.n, **shape)
    if device == "cpu" or product.dtype in kinds:
        return lambda: torch.matmul(a, b, out=out)
    precision = "high" if product.dtype == "tf32" else "highest"

    def call() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            torch.matmul(a, b, out=out)
        finally:
            torch.set_float32_matmul_precision(before)

    return call


def _timed(call: Callable[[], None], device: str) -> float:
    """Milliseconds of the device: on a GPU in a CUDA graph of several, without launches."""
    several = 10

    def burst() -> None:
        for _ in range(several):
            call()

    call()
    if device == "cuda":
        burst_once = cuda.graph_of(burst) or burst
        return statistics.median(cuda.timed(burst_once, budget_s=0.02, at_least=3)) / several
    return statistics.median(cuda.timed(call, budget_s=0.02, at_least=3))
