"""When each gradient of a backward pass is there: what can be sent to other GPUs while the rest is
computed.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from labutils.training.trainer import Trainer


def gradient_arrivals(trainer: Trainer) -> dict[str, list[float]]:
    """{"lead_ms", "lead_bytes"}: how long before the last gradient each one is there, in order of
    time, and its bytes.

    Measured on one more optimizer step, on its last backward pass: on a GPU by events in the
    stream, so that it is the GPU's time and not the host's.
    """
    marks: dict[int, tuple[torch.cuda.Event | float, int]] = {}
    on_gpu = trainer.workload.device.type == "cuda"

    def arrived(parameter: Tensor) -> None:
        marks[id(parameter)] = (_mark(on_gpu), parameter.grad.nbytes)

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trainer.parameters]
    try:
        trainer.step()
    finally:
        for hook in hooks:
            hook.remove()
    if on_gpu:
        torch.cuda.synchronize()
    first = next(iter(marks.values()))[0]
    arrivals = sorted(
        (first.elapsed_time(mark) if on_gpu else (mark - first) * 1e3, size)
        for mark, size in marks.values()
    )
    last = arrivals[-1][0]
    return {
        "lead_ms": [round(last - at, 4) for at, _ in arrivals],
        "lead_bytes": [size for _, size in arrivals],
    }


def _mark(on_gpu: bool) -> torch.cuda.Event | float:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
