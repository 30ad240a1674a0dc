"""What this machine really reaches: its matrix rates, its copy bandwidth, and what a kernel launch
costs the host.

Every item is measured on random data (products of zeros draw less power, so the clock stays higher
than in training), after a warm-up, several times, and once in a process. An item that this machine
can't do is skipped, with the reason.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from labutils.profiling import compat, cuda
from labutils.profiling.operations import TORCH_DTYPES
from labutils.profiling.roofline import Roofline

NEEDED_CAPABILITY = {
    "fp32": (3, 5),
    "tf32": (8, 0),
    "fp16": (5, 3),
    "bf16": (8, 0),
    "fp8": (8, 9),
    "fp8_rowwise": (8, 9),
}
"""Number format of a product -> the compute capability that it takes. fp8 has one scale a matrix,
fp8_rowwise one a row."""
MIB = 2**20


class Unsupported(Exception):
    """This machine can't do what was to be measured; the message says why."""


@dataclass(frozen=True)
class Probe:
    """What was measured: item -> raw samples, and item -> why it was skipped.

    Units are in the names: matrix rates in TFLOP/s; copies in GB/s (10^9 bytes; `copy_gb_per_s`
    counts bytes read plus bytes written); `launch_us` is the host's time for one call of a tiny
    operation that nothing waits for (on a CPU, that call does the work too), `graph_node_us` the
    time of the same operation inside a replayed CUDA graph.
    """

    device: str
    samples: dict[str, list[float]]
    skipped: dict[str, str]

    def median(self, item: str) -> float | None:
        """The item's median, or None where it was skipped."""
        return statistics.median(self.samples[item]) if item in self.samples else None

    def rate(self, dtype: str) -> float | None:
        """Measured matrix rate in TFLOP/s, or None where this machine lacks the format."""
        return self.median(f"tflops_{dtype}")

    def roofline(self, dtype: str) -> Roofline:
        """The measured roofline for `dtype`. Raises `ValueError`, saying why, where one of its
        limits is missing.
        """
        needed = (f"tflops_{dtype}", "copy_gb_per_s")
        for item in needed:
            if item not in self.samples:
                why = self.skipped.get(item, "was not asked for")
                raise ValueError(f"No {dtype} roofline of this machine: {item} {why}.")
        return Roofline(*(self.median(item) for item in needed))


def probe_machine(*items: str) -> Probe:
    """Measure `items` (all of them by default); what this process already measured is not measured
    again.

    Takes at most 15 s on a GPU and 6 s on two CPU cores. Raises `ValueError` for an item that does
    not exist.
    """
    for item in items:
        if item not in ITEMS:
            raise ValueError(f"{item!r} can't be probed. Choose from: {', '.join(ITEMS)}.")
    device = "cuda" if cuda.available() else "cpu"
    samples, skipped = {}, {}
    for item in items or ITEMS:
        measured = _measured(item, device)
        if isinstance(measured, str):
            skipped[item] = measured
        else:
            samples[item] = list(measured)
    return Probe(device, samples, skipped)


def measured_roofline(dtype: str) -> Roofline:
    """This machine's roofline for `dtype`; a second or two, the first time. Raises `ValueError`
    where it has none.
    """
    return probe_machine(f"tflops_{dtype}", "copy_gb_per_s").roofline(dtype)


@functools.cache
def _measured(item: str, device: str) -> tuple[float, ...] | str:
    """The item's samples, or why there are none."""
    try:
        return tuple(float(f"{sample:.5g}") for sample in ITEMS[item](device))
    except Unsupported as error:
        return str(error)
    # an operation that this card or this PyTorch lacks fails in many ways; none may end a lab
    except Exception as error:
        return f"failed with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        cuda.empty_cache()


def _matrix_rate(dtype: str, device: str) -> list[float]:
    """TFLOP/s of square matrix products, of a size that keeps the processor busy long enough to
    time it well.

    On a GPU in bursts of about 10 ms with rests between them: held up for longer, they meet the
    card's power limit, and its clock falls. In a training step products come in bursts, too.
    """
    with products_as(dtype):
        call, size = _timeable_product(dtype, device)
        times = cuda.timed_in_bursts(call) if device == "cuda" else cuda.timed(call, budget_s=0.2)
    return [2 * size**3 / (ms * 1e9) for ms in times]


def _timeable_product(dtype: str, device: str) -> tuple[Callable[[], Any], int]:
    """(product, its matrices' size): one that takes about 8 ms on a GPU or 25 on a CPU. Raises
    `Unsupported`.
    """
    if device == "cpu" and dtype not in ("fp32", "bf16"):
        raise Unsupported("is not for a CPU: the course trains in fp32 there")
    if device == "cuda" and cuda.capability() < NEEDED_CAPABILITY[dtype]:
        needed, has = (".".join(map(str, c)) for c in (NEEDED_CAPABILITY[dtype], cuda.capability()))
        raise Unsupported(f"needs compute capability {needed}, and this GPU has {has}")
    first, largest, target_s = (2048, 8192, 8e-3) if device == "cuda" else (256, 2048, 25e-3)
    if device == "cpu" and dtype == "fp32":  # smaller, a busy CPU's threads mostly wait for others
        first = 1024
    if (free_gb := cuda.free_memory()) is not None:  # three fp32 matrices in a quarter of it
        largest = min(largest, max(256, int((free_gb * 1e9 / 4 / 12) ** 0.5) // 256 * 256))
    times = cuda.timed(_product(dtype, first, device), budget_s=0.02, at_least=3, at_most=20)
    seconds = min(times) / 1e3
    fitting = first * (target_s / seconds) ** (1 / 3)
    size = int(min(largest, max(first, fitting // 256 * 256)))
    return _product(dtype, size, device), size


def products_as(dtype: str) -> AbstractContextManager:
    """A context in which PyTorch multiplies fp32 matrices as such, or, for "tf32", rounds their
    inputs to TF32.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return cuda.float32_products(backends, "tf32" if dtype == "tf32" else "ieee")


def _product(dtype: str, size: int, device: str) -> Callable[[], Any]:
    """A product of two random `size` x `size` matrices, ready to be called."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype.startswith("fp8"):
        return _fp8_product(a, b, rowwise=dtype == "fp8_rowwise")
    if dtype != "tf32":
        a, b = a.to(TORCH_DTYPES[dtype]), b.to(TORCH_DTYPES[dtype])
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _fp8_product(a: Any, b: Any, rowwise: bool) -> Callable[[], Any]:
    """An FP8 (E4M3) product with one scale a matrix, or one a row of the first and a column of the
    second.
    """

    def scaled(matrix: Any) -> tuple[Any, Any]:
        largest = matrix.abs().amax(dim=1, keepdim=True) if rowwise else matrix.abs().amax()
        scale = largest.float() / torch.finfo(torch.float8_e4m3fn).max
        return (matrix / scale).to(torch.float8_e4m3fn), scale

    (a8, scale_a), (b8, scale_b) = scaled(a), scaled(b)
    scale_b = scale_b.t() if rowwise else scale_b
    return lambda: compat.scaled_mm(
        a8, b8.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _copy_bandwidth(device: str) -> list[float]:
    """GB/s read plus written while a buffer far larger than any cache is copied within the device's
    memory.

    On a CPU the buffer is copied onto itself (every number negated in place): a CPU reads a cache
    line before it writes to it, so a copy to elsewhere moves half as much again as it says, and
    would understate the memory.
    """
    count, budget_s = 256 * MIB, 0.2
    if device == "cuda":
        count, budget_s = int(min(1024 * MIB, cuda.free_memory() * 1e9 / 4)) // MIB * MIB, 0.5
    source = torch.randint(2**62, (count // 8,), device=device)  # drawn eight bytes at a time
    if device == "cuda":
        copy = functools.partial(source.clone().copy_, source)
    else:
        copy = source.view(torch.float32).neg_
    return [2 * count / (ms * 1e6) for ms in cuda.timed(copy, budget_s=budget_s)]


def _launch(device: str) -> list[float]:
    """Host microseconds a call of a one-element operation takes, in bursts short enough not to fill
    the GPU's queue.
    """
    x, burst, samples = torch.rand(1, device=device), 200, []
    for _ in range(55):
        cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            x.neg_()
        samples.append((time.perf_counter() - start) / burst * 1e6)
    return samples[5:]


def _graph_node(device: str) -> list[float]:
    """GPU microseconds a one-element operation takes as one of 1,000 in a replayed CUDA graph."""
    if device == "cpu":
        raise Unsupported("is not for a CPU: there are no CUDA graphs")
    x, nodes = torch.rand(1, device=device), 1000

    def work() -> None:
        for _ in range(nodes):
            x.neg_()

    return [ms * 1e3 / nodes for ms in cuda.timed(cuda.graph_of(work), budget_s=0.2, at_least=20)]


ITEMS: dict[str, Callable[[str], list[float]]] = {
    **{f"tflops_{dtype}": functools.partial(_matrix_rate, dtype) for dtype in NEEDED_CAPABILITY},
    "copy_gb_per_s": _copy_bandwidth,
    "launch_us": _launch,
    "graph_node_us": _graph_node,
}
"""What can be probed -> what measures it, on a device."""
