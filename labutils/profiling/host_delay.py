"""A slower host on purpose: a known delay before each operation that launches work.

    with SlowerHost(20) as host:      # microseconds
        trainer.step()
    host.delayed                      # operations that were delayed

PyTorch hands every operation, forward and backward, to a dispatch mode on its way to the kernel;
this one looks at the clock until the delay is over, as a host does that is busy with something
else, and then passes it on. Views and allocations launch nothing and are not delayed. Going through
Python costs every operation a few microseconds even without a delay: measure with a delay of 0 as
well, so that what a step was slowed down by is known and not guessed. The replay of a CUDA graph
calls no operation and is not delayed, which is what a graph is for. Not for compiled code: what a
compiler has fused is no operation any more.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from labutils.profiling.compat import TorchDispatchMode

_NO_WORK = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "profiler::")


class SlowerHost(TorchDispatchMode):
    """A context in which each operation that computes begins `delay_us` microseconds later.

    `delayed` counts those that were held up. Raises `ValueError` for a negative delay.
    """

    def __init__(self, delay_us: float = 0.0) -> None:
        if not delay_us >= 0:
            raise ValueError(f"delay_us={delay_us!r}: a delay is 0 microseconds or more.")
        super().__init__()
        self.delay_us = delay_us
        self.delayed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if _launches(func):
            self.delayed += 1
            until = time.perf_counter_ns() + int(self.delay_us * 1e3)
            while self.delay_us and time.perf_counter_ns() < until:
                pass
        return func(*args, **(kwargs or {}))


@functools.cache  # a step calls some hundred operations, each of them thousands of times
def _launches(func: Any) -> bool:
    """Whether an operation computes: it is no view, no mere allocation, no mark of the profiler."""
    return not (getattr(func, "is_view", False) or func.name().startswith(_NO_WORK))
