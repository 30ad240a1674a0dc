"""What the memory of one training step consists of, allocation by allocation, and when each comes
and goes.

Two recorders write the same kind of record, `StepMemory`:

- `AllocatorRecord`, on a GPU: the caching allocator's own history. Everything is in it, the
  kernels' workspaces too.
- `Ledger`, anywhere: the storages that operations return, for as long as anything holds them. What
  an operation takes for itself while it runs isn't seen. It needs no memory: on the meta device
  tensors have shapes alone.

    with Ledger(model) as recorder:
        loss = forward();   recorder.mark("backward")
        loss.backward();    recorder.mark("update", gradients=[p.grad for p in trained])
    memory = recorder.step(Sorting(...))
    memory.at_peak()                                {"weights": .., "activations": .., ...} in bytes
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labutils.profiling.live_tensors import Storages

KINDS = ("weights", "optimizer", "gradients", "activations", "logits", "temporaries")
"""What memory is for. weights: frozen and trained; activations: what waits for the backward pass;
logits: a language model's, with their gradient; temporaries: gradients of activations, blocks
computed again, workspaces, inputs."""
BLOCK = 512
"""The caching allocator gives memory in multiples of so many bytes."""


@dataclass(frozen=True)
class Allocation:
    """`bytes` from event `born` up to, not including, event `died`; `kind` is one of `KINDS`."""

    born: int
    died: int
    bytes: int
    kind: str = "temporaries"


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
        changes = {kind: [0] * (self.events + 1) for kind in KINDS}
        for one in self.allocations:
            changes[one.kind][one.born] += one.bytes
            changes[one.kind][min(one.died, self.events)] -= one.bytes
        found = {}
        for kind, steps in changes.items():
            level, levels = self.held.get(kind, 0), []
            for change in steps[: self.events]:
                level += change
                levels.append(level)
            if any(levels):
                found[kind] = levels
        return found

    def totals(self) -> list[int]:
        """Bytes in all after each event."""
        return [sum(levels) for levels in zip(*self.series().values(), strict=True)]

    @property
    def peak_event(self) -> int:
        """The event at which most is held."""
        totals = self.totals()
        return totals.index(max(totals))

    @property
    def peak(self) -> int:
        """The most bytes there were at one time."""
        return max(self.totals(), default=0)

    def at_peak(self) -> dict[str, int]:
        """Kind -> bytes at the peak."""
        at = self.peak_event
        return {kind: levels[at] for kind, levels in self.series().items()}

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak lies."""
        return [name for start, name in self.phases if start <= self.peak_event][-1]


@dataclass
class Sorting:
    """By what allocations are told apart: bytes of tensors that are as large as logits; what was
    `held` before.
    """

    held: Mapping[str, int]
    logit_bytes: frozenset[int] = frozenset()


def logit_bytes(rows: Iterable[int], words: int) -> frozenset[int]:
    """The sizes that logits of so many rows have, and their gradients: in 16 bits and in 32."""
    return frozenset(rounded(row * words * itemsize) for row in rows for itemsize in (2, 4))


def rounded(size: int) -> int:
    """`size` as the caching allocator hands it out."""
    return -(-size // BLOCK) * BLOCK


@dataclass
class _Raw:
    """An allocation before it is sorted; `died` None: it is still there."""

    born: int
    bytes: int
    died: int | None = None


@dataclass
class _Marks:
    """What a recorder was told on the way: where phases begin, and which allocations are gradients
    or moments.
    """

    phases: list[tuple[int, str]] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)


def sort_out(raw: list[_Raw], marks: _Marks, events: int, by: Sorting) -> StepMemory:
    """A record's allocations by kind. What is alive when a backward pass begins waits for it: an
    activation.
    """
    starts = [start for start, name in marks.phases if name == "backward"]

    def kind(place: int, one: _Raw) -> str:
        if place in marks.gradients:
            return "gradients"
        if place in marks.optimizer:
            return "optimizer"
        if rounded(one.bytes) in by.logit_bytes:
            return "logits"
        waits = any(one.born < start and (one.died is None or one.died > start) for start in starts)
        return "activations" if waits else "temporaries"

    found = tuple(
        Allocation(one.born, events if one.died is None else one.died, one.bytes, kind(place, one))
        for place, one in enumerate(raw)
    )
    return StepMemory(dict(by.held), found, tuple(marks.phases), events)


class Ledger(Storages):
    """Records the storages that operations make while it is entered; those of `known` are left out,
    and so are views.

    Sizes are rounded up as the GPU's allocator would.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.raw: list[_Raw] = []
        self.events = 0
        self.marks = _Marks([(0, "forward")])
        self.places: dict[int, int] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def _count(self, storage: torch.UntypedStorage) -> None:
        where = storage._cdata
        if where in self.known or where in self.places or storage.nbytes() == 0:
            return
        self.places[where] = len(self.raw)
        self.raw.append(_Raw(self._tick(), rounded(storage.nbytes())))
        weakref.finalize(storage, self._forget, where).atexit = False

    def _forget(self, where: int) -> None:
        place = self.places.pop(where, None)
        if place is not None:
            self.raw[place].died = self._tick()

    def _tick(self) -> int:
        self.events += 1
        return self.events - 1

    def mark(
        self, phase: str, gradients: Iterable[Tensor] = (), optimizer: Iterable[Tensor] = ()
    ) -> None:
        """From here on it is `phase` ("forward", "backward", "update"); these tensors are
        gradients, or moments.
        """
        self.marks.phases.append((self.events, phase))
        self.marks.gradients |= self._places_of(gradients)
        self.marks.optimizer |= self._places_of(optimizer)

    def _places_of(self, tensors: Iterable[Tensor]) -> set[int]:
        storages = (tensor.untyped_storage()._cdata for tensor in tensors)
        return {self.places[where] for where in storages if where in self.places}

    def step(self, by: Sorting) -> StepMemory:
        """What was recorded."""
        return sort_out(self.raw, self.marks, self.events, by)


class AllocatorRecord:
    """The caching allocator's own history of one step, while it is entered. CUDA only.

    `allocated_before` are the bytes that were there when it began.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.seen: list[tuple[str, int, list[int], list[int]]] = []
        self.trace: list[Mapping[str, Any]] = []
        self.allocated_before = 0

    def __enter__(self) -> AllocatorRecord:
        torch.cuda.synchronize()
        self.allocated_before = torch.cuda.memory_allocated(self.device)
        torch.cuda.memory._record_memory_history(
            enabled=None
        )  # forgets what an earlier record left
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
        self.mark("forward")
        return self

    def __exit__(self, *exception: object) -> None:
        self.trace = self._history()
        torch.cuda.memory._record_memory_history(enabled=None)

    def _history(self) -> list[Mapping[str, Any]]:
        return torch.cuda.memory._snapshot(self.device)["device_traces"][self.device]

    def mark(
        self, phase: str, gradients: Iterable[Tensor] = (), optimizer: Iterable[Tensor] = ()
    ) -> None:
        """As `Ledger.mark`. The history's length says where in it this is."""
        addresses = [
            [t.untyped_storage().data_ptr() for t in tensors] for tensors in (gradients, optimizer)
        ]
        self.seen.append((phase, len(self._history()), *addresses))

    def step(self, by: Sorting) -> StepMemory:
        """What was recorded; call it after the context is left."""
        return from_trace(self.trace, self.seen, by)


def from_trace(
    trace: Iterable[Mapping[str, Any]],
    seen: Iterable[tuple[str, int, list[int], list[int]]],
    by: Sorting,
) -> StepMemory:
    """A record out of the allocator's history: entries with "action", "addr" and "size", which is
    what was asked for.

    seen: (phase, entries before it, addresses of gradients, addresses of moments). What is freed
    without having been allocated was there before: it is taken out of what was held as temporaries.
    """
    raw: list[_Raw] = []
    open_at: dict[int, int] = {}
    marks, pending, events = _Marks(), sorted(seen, key=lambda mark: mark[1]), 0
    held = dict(by.held)

    def pass_marks(entry: int) -> None:
        while pending and pending[0][1] <= entry:
            phase, _, gradients, optimizer = pending.pop(0)
            marks.phases.append((events, phase))
            marks.gradients |= {open_at[address] for address in gradients if address in open_at}
            marks.optimizer |= {open_at[address] for address in optimizer if address in open_at}

    entry = 0
    for entry, line in enumerate(trace):
        pass_marks(entry)
        if line["action"] == "alloc":
            open_at[line["addr"]] = len(raw)
            raw.append(_Raw(events, rounded(line["size"])))
            events += 1
        elif line["action"] == "free_requested":
            if line["addr"] in open_at:
                raw[open_at.pop(line["addr"])].died = events
            else:
                held["temporaries"] = held.get("temporaries", 0) - rounded(line["size"])
                raw.append(_Raw(0, rounded(line["size"]), events))
            events += 1
    pass_marks(entry + 1)
    return sort_out(raw, marks, events, Sorting(held, by.logit_bytes))


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, and what bitsandbytes holds beside 4-bit parameters."""
    own = [*module.parameters(), *module.buffers()]
    states = [p.quant_state for p in own if getattr(p, "quant_state", None) is not None]
    return own + [
        x
        for s in states
        for x in (s.absmax, s.state2.absmax if s.nested else None)
        if x is not None
    ]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
