"""Memory that earlier runs hold is let go before a run whose memory counts."""

from __future__ import annotations

from labutils.profiling import compat, cuda
from labutils.workloads.base import Workload


def make_room(*workloads: Workload) -> None:
    """Release the weights that `workloads` share, and the memory of trainers that have ended.
    Reference cycles hold a model until they are collected, and its memory would be read as the next
    one's. cuBLAS's workspaces go, too: rates were measured on a stream of their own, and each
    stream has one. No CUDA graph that multiplies may be replayed afterwards.
    """
    for workload in workloads:
        workload.release_weights()
    if cuda.available():
        compat.release_workspaces()
    cuda.empty_cache()
