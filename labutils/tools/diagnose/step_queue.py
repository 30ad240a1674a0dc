"""A training step as a queue of work, and what it would last if something about it were different.

A step is a list of pieces: what the host gives the device, in order. The host takes a while to give
each (`host_ms`), before some of them waits for data (`data_ms`) or writes a log (`log_ms`), and
after some of them waits until the device has caught up (`waits`). `Queue.step_ms` replays it
(`labutils.profiling.launch_queue`). On a CPU the host does the work itself: it waits for every
piece, and everything adds up.

A fix changes the pieces. Its predicted gain is 1 - (step after) / (step before), both replayed:
what the replay leaves out, it leaves out of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from labutils.profiling.launch_queue import Launch, replay, root, steady_ms
from labutils.profiling.products import Product

READ, TO_DEVICE = "read", "to device"
"""Why the host waits for the device: to read something, or with a copy to the device."""
COPY, PYTHON = "copy", "python"
GRAPH_GAP_MS = 0.00025
"""Between two kernels of a CUDA graph, rounded up: lab 04's step of 17,214 kernels lasts 135.8 ms
on our H200, its kernels 132.1."""


@dataclass(frozen=True)
class Piece:
    """One piece of work: its `kind` (`profiling.kernel_categories`; "copy" for what crosses to the
    device, "python" for what the loop does besides, which no change to the model takes away), `ms`
    of the device, `gap_ms` from the piece before to it, and the host's part in it, in milliseconds.

    `product` where it is known to be one; `fill`: how much of the GPU it fills (1 and more: all of
    it); `dtype`: what an attention or convolution computes in, where it is known; `masks`: whether
    it may be an attention's causal mask.
    """

    kind: str
    ms: float
    host_ms: float = 0.0
    gap_ms: float = 0.0
    phase: str = ""
    waits: str = ""
    data_ms: float = 0.0
    log_ms: float = 0.0
    product: Product | None = None
    dtype: str = ""
    fill: float = 1.0
    masks: bool = False

    @property
    def in_model(self) -> bool:
        """Whether it belongs to the passes through the model that is trained."""
        return self.kind not in (COPY, PYTHON) and self.phase in ("", "forward", "backward")

    def but(self, **changes: Any) -> Piece:
        return replace(self, **changes)

    def scaled(self, device: float, count: float = 1.0) -> Piece:
        """The device takes so many times as long for it, and there are so many times as many."""
        host_ms, gap_ms = count * self.host_ms, count * self.gap_ms
        return self.but(ms=device * self.ms, host_ms=host_ms, gap_ms=gap_ms)


@dataclass(frozen=True)
class Queue:
    """The pieces of `steps` optimizer steps. `takes_turns`: one does host's and device's work."""

    pieces: tuple[Piece, ...]
    steps: int = 1
    takes_turns: bool = False

    def having(self, pieces: Iterable[Piece]) -> Queue:
        """The same steps with other pieces."""
        return replace(self, pieces=tuple(pieces))

    def each(self, change: Callable[[Piece], Piece]) -> Queue:
        """The same steps with every piece changed."""
        return self.having(map(change, self.pieces))

    @cached_property
    def step_ms(self) -> float:
        """Milliseconds an optimizer step, replayed."""
        return self.lasts_ms()

    def lasts_ms(self, host: float = 1.0) -> float:
        """Milliseconds an optimizer step where the host takes `host` times as long for its part.

        On a GPU from the second round on, as the first starts empty.
        """
        return steady_ms(self._queued(host)) / self.steps

    def from_idle_ms(self, host: float = 1.0) -> float:
        """Milliseconds until the host has given a step's work, beginning with an idle device."""
        clocks = replay(self._queued(host), rounds=1)
        return clocks[-1][0] / self.steps if clocks else 0.0

    def _queued(self, host: float) -> list[Launch]:
        return [(apart + host * own, ms, waits) for apart, own, ms, waits in self._parts]

    @cached_property
    def _parts(self) -> list[tuple[float, float, float, bool]]:
        """Of each piece: what the host waits for or writes, its own milliseconds, the device's, and
        whether it then waits. Read once, as a search replays them many times."""
        return [
            (p.data_ms + p.log_ms, p.host_ms, p.gap_ms + p.ms, self.takes_turns or bool(p.waits))
            for p in self.pieces
        ]

    def total(self, part: str, *phases: str) -> float:
        """Milliseconds a step of one of the pieces' parts ("ms", "gap_ms", "host_ms", "data_ms",
        "log_ms").

        phases: only of pieces given in these.
        """
        chosen = (piece for piece in self.pieces if not phases or piece.phase in phases)
        return sum(getattr(piece, part) for piece in chosen) / self.steps

    @property
    def device_ms(self) -> float:
        return self.total("ms")

    @cached_property
    def calling_ms(self) -> float:
        """What the host takes to give one piece of the model's work: the median, as Python in
        between isn't calling."""
        return median([p.host_ms for p in self.pieces if p.in_model and p.host_ms] or [0.0])

    def gain(self, after: Queue) -> float:
        """The share of a step that is saved by `after`, from 0 to 1; 0 where it lasts longer."""
        was = self.step_ms
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
"""Times differ by so much: the replay may last so much longer than was timed."""


def fitted(queue: Queue, step_ms: float, from_idle_ms: float | None = None) -> Queue:
    """The traced queue as it is without the profiler, which slows the host.

    All of the host's own time is scaled by one factor, so that the replay lasts as long as the step
    was timed, and, on a GPU, so that the host has given a step's work after `from_idle_ms`. Where
    the device or the data decide a step, its time says nothing about the host, and neither does the
    other where the host waits within the step: if neither tells, the factor is `TRACED_HOST`, or
    less where the step would last longer with it. Gaps on the device, and then its work, are
    scaled down only where they alone exceed the step.
    """
    apart_ms = queue.total("data_ms") + queue.total("log_ms")
    most = max(1e-9, step_ms - (apart_ms if queue.takes_turns else 0.0))
    if queue.takes_turns and apart_ms >= step_ms:
        share = 0.999 * step_ms / apart_ms
        queue = queue.each(lambda p: p.but(data_ms=share * p.data_ms, log_ms=share * p.log_ms))
        most = 0.001 * step_ms
    device = min(1.0, most / max(queue.device_ms, 1e-9))
    gap = min(1.0, max(0.0, most - queue.device_ms) / max(queue.total("gap_ms"), 1e-9))
    queue = queue.each(lambda p: p.but(ms=device * p.ms, gap_ms=gap * p.gap_ms))
    if queue.takes_turns:
        host = _factor(queue.lasts_ms, step_ms)
    else:
        clocks = [(queue.lasts_ms, step_ms)]
        if from_idle_ms is not None:
            clocks.append((queue.from_idle_ms, from_idle_ms))
        told = [_factor(clock, ms) for clock, ms in clocks if clock(0.0) < HOST_TELLS * ms]
        longest = max(step_ms, (1 + SPREAD) * queue.lasts_ms(0.0))
        host = min([*(told or [TRACED_HOST]), _factor(queue.lasts_ms, longest)])
    return queue.each(lambda p: p.but(host_ms=host * p.host_ms))


def _factor(clock: Callable[[float], float], wanted: float) -> float:
    """The factor on the host's time at which `clock` shows `wanted`: between 0 and 4."""
    return root(lambda factor: clock(factor) - wanted, 0.0, 4.0)
