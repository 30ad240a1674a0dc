"""The script's batches, optimizer and settings as plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any


def tensors_in(batch: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a batch in any of the usual nestings; "" where there is no name."""
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from ((inner or str(name), tensor) for inner, tensor in tensors_in(value))
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)
    elif hasattr(batch, "untyped_storage"):
        yield "", batch


def of_batch(batch: Any) -> dict[str, Any]:
    """`examples` (rows of the first tensor), `bytes`, `pinned`, and, where it holds a mask of
    attention, `tokens` and the `useful` ones of them. {} where it holds no tensor."""
    named = [(name, tensor) for name, tensor in tensors_in(batch) if tensor.dim()]
    if not named:
        return {}
    tensors = [tensor for _, tensor in named]
    facts = {
        "examples": int(tensors[0].shape[0]),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "pinned": any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors),
    }
    for name, tensor in named:  # a mask has ones and zeros
        if "mask" in name and tensor.dim() == 2 and bool(((tensor == 0) | (tensor == 1)).all()):
            return facts | {"tokens": tensor.numel(), "useful": int((tensor != 0).sum())}
    return facts


def of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Its `name`, how many `tensors` it updates, and its `form`: "fused", "foreach" or "loop"; ""
    where its class has no such choice."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    first, form = optimizer.param_groups[0], ""
    if "fused" in first:
        fused, foreach = first["fused"], first.get("foreach")
        by_default = fused is None and foreach is None and any(p.is_cuda for p in parameters)
        form = "fused" if fused else "foreach" if foreach or by_default else "loop"
    return {
        "name": type(optimizer).__name__,
        "tensors": sum(p.requires_grad for p in parameters),
        "form": form,
    }


def of_settings(on_gpu: bool) -> dict[str, Any]:
    """The script's settings of PyTorch, and the GPU's memory. TF32 has two settings. Reading the
    older one raises where the newer was used, and earlier versions of PyTorch have only the older.
    """
    import torch

    backends = torch.backends
    settings = {
        "threads": torch.get_num_threads(),
        "cuda_available": torch.cuda.is_available(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("0", ""),
        "anomaly": torch.is_anomaly_enabled(),
    }
    try:
        settings["matmul_tf32"] = backends.cuda.matmul.allow_tf32
        settings["cudnn_tf32"] = backends.cudnn.allow_tf32
    except RuntimeError:
        settings["matmul_tf32"] = backends.cuda.matmul.fp32_precision == "tf32"
        settings["cudnn_tf32"] = backends.cudnn.conv.fp32_precision == "tf32"
    if on_gpu:
        settings["memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
        settings["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return settings
