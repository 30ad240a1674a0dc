"""GPU memory as PyTorch's allocator counts it: the peak of a region, and its course over time.

*Allocated* is what tensors take, *reserved* what the allocator holds from the driver to serve them: the process needs
the larger. Without a GPU the peak is absent, and the timeline shows the process's resident memory instead.
"""

from __future__ import annotations

import os
from typing import Self

from labutils import hardware
from labutils.measure.sampling import Reading, Sampler

GB = 10**9


class PeakMemory:
    """`with PeakMemory() as peak: ...`; then `peak.metrics()`. PyTorch keeps one peak: blocks must not be nested."""

    def __init__(self) -> None:
        self._peak: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        hardware.cuda.reset_peak_memory()
        return self

    def __exit__(self, *exception: object) -> None:
        self._peak = hardware.cuda.peak_memory()

    def metrics(self) -> dict[str, float]:
        """{"peak_allocated_gb", "peak_reserved_gb"}, in 10^9 bytes; {} without a GPU."""
        return (
            {} if self._peak is None else dict(zip(("peak_allocated_gb", "peak_reserved_gb"), self._peak, strict=True))
        )


class MemoryTimeline(Sampler):
    """`with MemoryTimeline() as memory: ...; memory.mark("forward")` reads memory over time, and at each mark.

    A reading has `allocated_gb` and `reserved_gb` on a GPU, `resident_gb` without one, in 10^9 bytes; at a mark also
    `label`. Readings don't wait for the GPU: PyTorch counts when it plans an operation, not when the GPU runs it.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        super().__init__(_read_gpu if hardware.device() == "cuda" else _read_process, interval_s)

    def mark(self, label: str) -> None:
        """Read now, in the calling thread, under the name `label`."""
        self.samples.append({"t": self.now, "label": label} | self._read())

    @property
    def marks(self) -> list[Reading]:
        """The readings taken at marks, in order of time."""
        return [sample for sample in self.samples if "label" in sample]


def _read_gpu() -> Reading:
    import torch

    return {"allocated_gb": torch.cuda.memory_allocated() / GB, "reserved_gb": torch.cuda.memory_reserved() / GB}


def _read_process() -> Reading:
    import psutil

    return {"resident_gb": psutil.Process(os.getpid()).memory_info().rss / GB}
