"""Bytes of tensors alive, counted as operations make them: a memory profile that needs no GPU.

    with LiveTensors(model.parameters()) as live:
        loss = forward()
        kept = live.now                  what waits for the backward pass
        loss.backward()
    live.peak                            the most there was at one time

It counts what operations return, for as long as anything holds it. What an operation takes for
itself while it runs is not seen, nor what an allocator keeps in reserve: on a GPU the peak that
PyTorch reports is the one to go by.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Shows `_count` the storage of every tensor that an operation returns while it is entered."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        raise NotImplementedError


class LiveTensors(Storages):
    """`now` and `peak` in bytes of the tensors made since it was entered; those of `known` are left
    out, and so are views of them. Tensors that share their memory count once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted = {tensor.untyped_storage()._cdata for tensor in known}

    def _count(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place in self.counted:
            return
        self.counted.add(place)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, place, storage.nbytes()).atexit = False

    def _forget(self, place: int, size: int) -> None:
        self.counted.discard(place)
        self.now -= size
