"""What the DataLoader's batches hold: bytes, examples, and how much of their tokens is padding."""

from __future__ import annotations

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


def facts(batch: Any) -> dict[str, Any]:
    """`examples` (rows of the first tensor), `bytes`, `pinned`, and `tokens` with `useful` of them
    where a mask tells, or else a filler at the rows' ends."""
    named = [(name, tensor) for name, tensor in tensors_in(batch) if tensor.dim()]
    if not named:
        return {}
    counts = {
        "examples": int(named[0][1].shape[0]),
        "bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in named),
        "tensors": len(named),
        "pinned": any(tensor.device.type == "cpu" and tensor.is_pinned() for _, tensor in named),
    }
    return counts | tokens_of(named)


def tokens_of(named: list[tuple[str, Any]]) -> dict[str, int]:
    """`tokens` and `useful` ones, from an attention mask of ones and zeros, or from integer rows
    that end alike.
    """
    for name, tensor in named:
        if "mask" in name and tensor.dim() == 2 and _is_mask(tensor):
            return {"tokens": tensor.numel(), "useful": int((tensor != 0).sum())}
    for name, tensor in named:
        if (
            tensor.dim() == 2
            and not tensor.is_floating_point()
            and name in ("", "input_ids", "ids", "tokens")
        ):
            return {"tokens": tensor.numel(), "useful": tensor.numel() - _filled(tensor)}
    return {}


def _is_mask(tensor: Any) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _filled(ids: Any) -> int:
    """How many numbers of integer rows [rows, length] are the filler at their ends: the number that
    most rows end with more than once. One that ends a row once may be its end-of-text sign."""
    if ids.shape[1] < 2 or ids.shape[0] < 2:
        return 0
    repeated = ids[ids[:, -1] == ids[:, -2], -1]
    if repeated.numel() * 2 < ids.shape[0] - 1:  # the longest row has no filler
        return 0
    filler = repeated.mode().values
    return int(((ids == filler).flip(1).cumprod(1)).sum())
