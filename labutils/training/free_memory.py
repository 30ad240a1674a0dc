"""Memory that earlier runs hold is let go before a run whose memory counts."""

from __future__ import annotations

from labutils.profiling import cuda
from labutils.workloads.base import Workload


def make_room(*workloads: Workload) -> None:
    """Release the weights that `workloads` share, and the memory of trainers that have ended.
    Reference cycles hold a model until they are collected, and its memory would be read as the next
    one's.
    """
    for workload in workloads:
        workload.release_weights()
    cuda.empty_cache()
