"""The memory of one optimizer step, and of a step that doesn't fit.

gb = peak_of_step(trainer, batch)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import bytes_of, tensors_of
from labutils.results.records import is_out_of_memory
from labutils.training.batches import on_device
from labutils.training.trainer import Trainer
from labutils.workloads.base import Batch, Workload


def make_room(*workloads: Workload) -> None:
    """Release the weights that `workloads` share, and the memory of trainers that have ended.
    Reference cycles hold a model until they are collected, and its memory would be read as the next
    one's.
    """
    for workload in workloads:
        workload.release_weights()
    cuda.empty_cache()


def peak_of_step(trainer: Trainer, batch: Batch, record: TensorRecord | None = None) -> float:
    """GB at the peak of one optimizer step on `batch`, which may have any size.

    On a GPU it is the process's, as PyTorch's allocator reports it. Elsewhere it is the model's
    tensors and those that `record` counts (default: all that operations make). Raises what PyTorch
    raises where the step doesn't fit.
    """
    feed = iter([on_device(batch, trainer.workload.device, non_blocking=False)])
    if trainer.workload.device.type == "cuda":
        cuda.reset_peak_memory()
        trainer.step(feed)
        cuda.synchronize()
        return cuda.peak_memory()[0]
    standing = tensors_of(trainer.model)
    record = record or TensorRecord(standing)
    with record:
        trainer.step(feed)
    return (bytes_of(standing) + record.peak) / 1e9


def runs_out_of_memory(trainer: Trainer, step: Callable[[], Any]) -> bool:
    """Whether `step()`, an optimizer step of `trainer`, runs out of memory.

    What a failed step leaves is dropped: gradients, and memory in the allocator's cache.
    """
    try:
        step()
        return False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: inside it the exception still holds the frames, and these the
    # tensors.
    for parameter in trainer.parameters:
        parameter.grad = None
    gc.collect()
    cuda.empty_cache()
    return True
