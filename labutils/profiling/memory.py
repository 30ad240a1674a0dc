"""The memory of a real training step, measured: its parts, its peak, and when each allocation comes
and goes.

Two recorders write the same record, `StepMemory`:

- `AllocatorRecord`, on a GPU: the caching allocator's own history. Everything is in it, the
  kernels' workspaces too.
- `TensorRecord`, anywhere: the storages that operations return, for as long as anything holds them.
  It does not see what an operation takes for itself while it runs. On the meta device tensors have
  shapes alone, so that the step of a model of any size can be recorded.

    with TensorRecord(model.parameters()) as record:
        loss = forward()
        record.mark("backward")
        loss.backward()
        record.mark("update", gradients=[p.grad for p in trained])
    memory = record.step(held={"weights": ...})
    memory.at_peak()                                {"weights": .., "activations": .., ...} in bytes
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labutils.profiling import compat
from labutils.profiling.compat import TorchDispatchMode, tree_leaves

KINDS = ("weights", "optimizer", "gradients", "activations", "logits", "temporaries")
"""What memory is for. weights: frozen and trained; activations: what waits for the backward pass;
logits: a language model's, with their gradient; temporaries: gradients of activations, blocks
computed again, workspaces, inputs."""
Entry = Mapping[str, Any]
"""A line of the allocator's history: its "action", "addr" and "size", which is what was asked
for."""
Mark = tuple[str, int, list[int]]
"""(phase, entries of the history before it, addresses of gradients)."""
BLOCK = 512
"""The caching allocator gives memory in multiples of so many bytes."""


@dataclass
class Allocation:
    """`bytes` from event `born` up to, not including, event `died` (None: it is still there);
    `kind` is one of `KINDS`.
    """

    born: int
    bytes: int
    died: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step. `held`: kind -> bytes that were there all the time. `phases`: (event,
    name), in order.

    Time is counted in events: allocations and frees.
    """

    held: Mapping[str, int]
    allocations: tuple[Allocation, ...]
    phases: tuple[tuple[int, str], ...]
    events: int

    def series(self) -> dict[str, list[int]]:
        """Kind -> its bytes after each event; kinds that never had any are left out."""
        changes = {kind: np.zeros(self.events + 1, dtype=np.int64) for kind in KINDS}
        for one in self.allocations:
            changes[one.kind][one.born] += one.bytes
            if one.died is not None:
                changes[one.kind][one.died] -= one.bytes
        levels = {
            kind: self.held.get(kind, 0) + change[: self.events].cumsum()
            for kind, change in changes.items()
        }
        return {kind: level.tolist() for kind, level in levels.items() if level.any()}

    def totals(self) -> list[int]:
        """Bytes in all after each event."""
        return [sum(levels) for levels in zip(*self.series().values(), strict=True)]

    @property
    def peak(self) -> int:
        """The most bytes there were at one time."""
        return max(self.totals(), default=0)

    def phase_peaks(self) -> dict[str, int]:
        """Phase -> the most bytes there were in it, in its last pass."""
        totals, ends = self.totals(), [start for start, _ in self.phases[1:]] + [self.events]
        return {
            phase: max(totals[start:end])
            for (start, phase), end in zip(self.phases, ends, strict=True)
            if end > start
        }

    def at_peak(self) -> dict[str, int]:
        """Kind -> bytes at the first event at which most is held."""
        at = self.totals().index(self.peak)
        return {kind: levels[at] for kind, levels in self.series().items()}


def rounded(size: int) -> int:
    """`size` as the caching allocator hands it out."""
    return -(-size // BLOCK) * BLOCK


def logit_bytes(rows: Iterable[int], words: int) -> frozenset[int]:
    """The sizes that logits of so many rows have, and their gradients: in 16 bits and in 32."""
    return frozenset(rounded(row * words * itemsize) for row in rows for itemsize in (2, 4))


class _Record:
    """What both recorders have: a trace in the allocator's own form, and marks in it."""

    def __init__(self) -> None:
        self.trace: list[Entry] = []
        self.seen: list[Mark] = []

    def mark(self, phase: str, gradients: Iterable[Tensor] = ()) -> None:
        """From here on it is `phase` ("forward", "backward", "update"); these are gradients."""
        self.seen.append((phase, len(self._entries()), [*map(self._address, gradients)]))

    def step(
        self, held: Mapping[str, int], logit_bytes: frozenset[int] = frozenset()
    ) -> StepMemory:
        """What was recorded, beside what was `held`; `logit_bytes` are the sizes of logits."""
        return step_memory(self.trace, self.seen, held, logit_bytes)

    def _entries(self) -> list[Entry]:
        return self.trace


class TensorRecord(_Record, TorchDispatchMode):
    """Records the storages that operations make while it is entered, without views and those of
    `known` tensors. Sizes are rounded up as the GPU's allocator would.

    `now` and `peak` are bytes of the storages that it has recorded.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        _Record.__init__(self)
        self.mark("forward")
        self.known = {self._address(tensor) for tensor in known}
        self.alive: dict[int, int] = {}  # address -> bytes
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = compat.storage_id(storage), rounded(storage.nbytes())
        if address in self.known or address in self.alive or size == 0:
            return
        self.trace.append({"action": "alloc", "addr": address, "size": size})
        self.alive[address] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        size = self.alive.pop(address)
        self.trace.append({"action": "free_requested", "addr": address, "size": size})
        self.now -= size

    def _address(self, tensor: Tensor) -> int:
        return compat.storage_id(tensor.untyped_storage())


class AllocatorRecord(_Record):
    """The caching allocator's own history of one step, while it is entered. CUDA only.

    `allocated_before` are the bytes that were there when it began. `mark` and `step` are as in
    `TensorRecord`; `step` after the context is left.
    """

    def __enter__(self) -> AllocatorRecord:
        torch.cuda.synchronize()
        self.allocated_before = torch.cuda.memory_allocated()
        compat.record_memory_history()
        self.mark("forward")
        return self

    def __exit__(self, *exception: object) -> None:
        self.trace = self._entries()
        compat.stop_memory_history()

    def _entries(self) -> list[Entry]:
        return compat.memory_history()

    def _address(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()


def step_memory(
    trace: Sequence[Entry],
    seen: Sequence[Mark],
    held: Mapping[str, int],
    logit_bytes: frozenset[int] = frozenset(),
) -> StepMemory:
    """The allocator's history by kinds. `seen`: the marks in order, the first of them before any
    entry. What is alive when a backward pass begins waits for it: an activation. What is freed and
    was not seen to be allocated was there before: `held` as temporaries.
    """
    history: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    phases: list[tuple[int, str]] = []
    events = freed_before = 0
    places = [place for _, place, *_ in seen] + [len(trace)]
    for (phase, begin, gradients), end in zip(seen, places[1:], strict=True):
        phases.append((events, phase))
        for address in alive.keys() & set(gradients):
            alive[address].kind = "gradients"
        for entry in trace[begin:end]:
            address, size = entry["addr"], rounded(entry["size"])
            if entry["action"] == "alloc":
                alive[address] = Allocation(events, size)
                history.append(alive[address])
            elif entry["action"] == "free_requested":
                if address not in alive:
                    alive[address] = Allocation(0, size)
                    history.append(alive[address])
                    freed_before += size
                alive.pop(address).died = events
            else:
                continue
            events += 1
    backward = [start for start, name in phases if name == "backward"]
    for one in history:
        died = events if one.died is None else one.died
        waits = any(one.born < start < died for start in backward)
        kind = "logits" if one.bytes in logit_bytes else "activations" if waits else "temporaries"
        one.kind = one.kind or kind
    held = dict(held) | {"temporaries": held.get("temporaries", 0) - freed_before}
    return StepMemory(held, tuple(history), tuple(phases), events)
