"""A training step as the queue that it is, and what it would last if something about it were
different.

A step is a list of pieces: what the host gives the device, in order. The host takes a while to give
each (`host_ms`), before some of them waits for data (`data_ms`) or writes a log (`log_ms`), and
after some of them waits until the device has caught up (`waits`). `Queue.step_ms` goes through it
in order (`labutils.profiling.launch_queue`). On a CPU the host does the work itself, so that
everything adds up.

A fix is a function from pieces to pieces. Its predicted gain is 1 - (step after) / (step before),
both replayed: what the replay leaves out, it leaves out of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from labutils.profiling.launch_queue import Queued, replay, root, steady_ms

READ, TO_DEVICE = "read", "to device"
"""Why the host waits for the device: to read something (or for no reason but a call), or with a
copy to the device that it can't leave alone."""
COPY = "copy"


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] x [k, n], `count` of them side by side, in a format ("fp32", "tf32",
    "bf16", "fp16").
    """

    m: int
    n: int
    k: int
    count: int = 1
    dtype: str = "fp32"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Piece:
    """One piece of work: `kind` as `measure.kinds` sorts it ("copy" for what crosses to the
    device), `ms` of the device, and the host's part in it, in milliseconds.

    `product` where it is known to be one; `fill`: how much of the GPU it fills (1 and more: all of
    it); `dtype`: what an attention or convolution computes in, where it is known.
    """

    kind: str
    ms: float
    host_ms: float = 0.0
    phase: str = ""
    waits: str = ""
    data_ms: float = 0.0
    log_ms: float = 0.0
    product: Product | None = None
    dtype: str = ""
    fill: float = 1.0


Pieces = Sequence[Piece]
Change = Callable[[Pieces], list[Piece]]


@dataclass(frozen=True)
class Queue:
    """The pieces of `steps` optimizer steps. `takes_turns`: host and device are one, as on a CPU."""

    pieces: tuple[Piece, ...]
    steps: int = 1
    takes_turns: bool = False

    def changed(self, change: Change) -> Queue:
        return replace(self, pieces=tuple(change(self.pieces)))

    @property
    def step_ms(self) -> float:
        """Milliseconds an optimizer step, replayed."""
        return self.lasts_ms()

    def lasts_ms(self, host: float = 1.0) -> float:
        """Milliseconds an optimizer step where the host takes `host` times as long for what is its
        own; on a GPU from the second round on, as the first starts empty."""
        queue = self._queued(host)
        if self.takes_turns:
            return sum(launch.host_ms + launch.gpu_ms for launch in queue) / self.steps
        return steady_ms(queue) / self.steps

    def from_idle_ms(self, host: float = 1.0) -> float:
        """Milliseconds until the host has given a step's work, beginning with an idle device."""
        ((ended, _),) = replay(self._queued(host), rounds=1)
        return ended / self.steps

    def _queued(self, host: float) -> list[Queued]:
        return [
            Queued(p.data_ms + p.log_ms + host * p.host_ms, p.ms, bool(p.waits))
            for p in self.pieces
        ]

    def total(self, part: str) -> float:
        """Milliseconds a step of one of the pieces' parts ("ms", "host_ms", "data_ms", "log_ms")."""
        return sum(getattr(piece, part) for piece in self.pieces) / self.steps

    @property
    def device_ms(self) -> float:
        return self.total("ms")

    def of_phase(self, *phases: str) -> float:
        """Milliseconds a step that the device works on what was given in these phases."""
        return sum(piece.ms for piece in self.pieces if piece.phase in phases) / self.steps


def gain(before: Queue, after: Queue) -> float:
    """The share of a step that is saved, from 0 to 1; 0 where it would last longer."""
    was = before.step_ms
    return min(1.0, max(0.0, 1.0 - after.step_ms / was)) if was > 0 else 0.0


# ------------------------------------------------------------------------- fitting the host's part

TRACED_HOST = 0.62
"""What a host takes untraced of what it takes under the profiler, at most: the stock loop of
article A1 took 588 ms, and 993 traced (0.59), on one host, 533 and 861 (0.62) on another; both
decided the step."""
HOST_TELLS = 0.9
"""A time tells of the host where a host that took none would need less than this part of it; the
rest is waiting, for the device or for data."""
SPREAD = 0.01
"""By so much times differ from one to the next: the replay may last so much longer than was timed.
"""


def fitted(
    queue: Queue, step_ms: float, from_idle_ms: float | None = None, untold: float = TRACED_HOST
) -> Queue:
    """The traced queue as it is without the profiler, which slows the host and leaves the device
    nearly as it is.

    All of the host's own time is scaled by one factor, so that the replay lasts as long as the step
    was timed, and, on a GPU, so that the host has given a step's work after `from_idle_ms`. Where
    the device or the data decide a step, its time says nothing about the host, and neither does the
    other where the host waits within the step: if neither tells, the factor is `untold`, or less
    where the step would last longer with it. Device work is scaled down only where it alone exceeds
    the step.
    """
    lumps = queue.total("data_ms") + queue.total("log_ms")
    most = max(1e-9, step_ms - (lumps if queue.takes_turns else 0.0))
    if queue.takes_turns and lumps >= step_ms:
        queue = _scaled(queue, "data_ms", 0.999 * step_ms / lumps, also="log_ms")
        most = 0.001 * step_ms
    if queue.device_ms > most:
        queue = _scaled(queue, "ms", most / queue.device_ms)
    if queue.takes_turns:
        return _scaled(queue, "host_ms", _factor(queue.lasts_ms, step_ms))
    clocks = [
        (queue.lasts_ms, step_ms),
        *([(queue.from_idle_ms, from_idle_ms)] if from_idle_ms is not None else []),
    ]
    told = [_factor(clock, wanted) for clock, wanted in clocks if clock(0.0) < HOST_TELLS * wanted]
    longest = max(step_ms, (1 + SPREAD) * queue.lasts_ms(0.0))
    return _scaled(
        queue, "host_ms", min(*told, *([] if told else [untold]), _factor(queue.lasts_ms, longest))
    )


def _factor(clock: Callable[[float], float], wanted: float) -> float:
    """The factor on the host's time at which `clock` shows `wanted`: between 0 and 4."""
    return root(lambda factor: clock(factor) - wanted, 0.0, 4.0)


def _scaled(queue: Queue, part: str, factor: float, also: str = "") -> Queue:
    names = (part, also) if also else (part,)
    return queue.changed(
        lambda pieces: [replace(p, **{n: factor * getattr(p, n) for n in names}) for p in pieces]
    )


# --------------------------------------------------------------------------------------- changes


def each(change: Callable[[Piece], Piece]) -> Change:
    """A change of every piece by itself."""
    return lambda pieces: [change(piece) for piece in pieces]


def in_turn(*changes: Change) -> Change:
    """Several changes one after the other."""

    def change(pieces: Pieces) -> list[Piece]:
        found = list(pieces)
        for one in changes:
            found = one(found)
        return found

    return change


def without_waits(*reasons: str) -> Change:
    return each(lambda piece: replace(piece, waits="") if piece.waits in reasons else piece)


def without(part: str) -> Change:
    """Without the pieces' `data_ms` or `log_ms`."""
    return each(lambda piece: replace(piece, **{part: 0.0}))


def without_phases(*phases: str) -> Change:
    """Without what was given in these phases; waits for data and logs that stood before it stay."""

    def gone(piece: Piece) -> Piece:
        return replace(piece, ms=0.0, host_ms=0.0, waits="", kind="other", product=None)

    return each(lambda piece: gone(piece) if piece.phase in phases else piece)


def of_kinds(kinds: Iterable[str], factor: float) -> Change:
    """The device takes `factor` times as long for pieces of these kinds."""
    chosen = set(kinds)
    return each(
        lambda piece: replace(piece, ms=factor * piece.ms) if piece.kind in chosen else piece
    )
