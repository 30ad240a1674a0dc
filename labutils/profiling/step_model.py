"""How long a training step takes, predicted: by this host or another, on this card or another.

The host gives the GPU one piece of work after the other (`Trace.launched`). Each launch takes the
host a while, and its work the GPU a while. The two run side by side, so in short

    step = max(kernel time, launches x the host's time a launch) + exposed copies

which is exact where neither waits for the other in between and all launches are alike.
`replayed_ms` drops both conditions: it goes through the queue in order (`launch_queue.replay`).

The predicted step itself is never timed. Kernel times come from a trace: the profiler slows the
host down and leaves them nearly as they are (a graph's may come out a little longer). So where
kernels decide, the prediction is hardly more than their sum. The host's time a launch is solved for
from *another* step of the same model, on so few tokens that the host decides (`host_of`): that step
lasts as long as its host takes. What an operation takes the host is the same in both steps, what a
launch takes it need not be: kernels chosen for few tokens may be fewer.

For another card each category of kernels scales with what bounds it (`scale`): matrix products and
attention with the dense peak, as far as the step's FLOPs a byte suffice, everything else with the
memory's bandwidth. No kernel falls below what an empty one takes. Products that LoRA's rank makes
thin go by bandwidth. A graph's kernels, which no operator calls, can't be told to be thin.
Left out: that other cards reach another share of their peaks; caches; gaps of 1 to 3 microseconds
between kernels that wait in the queue; that a host comes back later from a long wait. What the host
does between two steps is spread over all launches, so that it is lost where kernels decide.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from labutils.profiling.gpu_specs import Spec
from labutils.profiling.launch_queue import root, steady_ms
from labutils.profiling.roofline import Roofline
from labutils.profiling.trace import Trace

BY_ARITHMETIC = ("GEMM", "attention", "convolution")
"""Kinds of kernels that matrix units bound. Of all others memory does."""
ELSEWHERE = ("copy", "communication")
"""Kinds that neither bounds: they cross a link, which is taken to be the same everywhere."""
HOST_DECIDES_BELOW = 0.5
"""A step whose work takes the GPU less than this share tells what the host takes. A higher share
may be all that the GPU can do: the gaps between short kernels don't count as work."""
CARDS = ("H100 SXM5", "H200 SXM", "RTX PRO 6000 Blackwell Max-Q", "B200")
"""The cards for which the course predicts."""


class Launch(NamedTuple):
    """One thing that the host gave the GPU to do: a kernel, a CUDA graph or a copy.

    `phase` is the marked range in which it was launched ("" for none). `work` is what it caused:
    (category, milliseconds, count), with the category "copy" for what crosses a link to the host or
    another GPU. `waits`: the host then waited until the GPU had caught up.
    """

    phase: str
    work: tuple[tuple[str, float, int], ...]
    waits: bool


@dataclass(frozen=True)
class Program:
    """What the host gives the GPU in `steps` optimizer steps, in order."""

    queue: tuple[Launch, ...]
    steps: int

    @classmethod
    def of(cls, trace: Trace) -> Program:
        """What a trace's host launched. On a CPU, which does the work itself, it waits for every
        piece.
        """
        queue = []
        for call, work, wait in trace.launched():
            times: dict[str, list[float]] = defaultdict(list)
            for _, category, ms in work:
                times[category].append(ms)
            parts = tuple((kind, sum(ms), len(ms)) for kind, ms in times.items())
            waits = wait is not None or not trace.on_gpu
            queue.append(Launch(trace.phase_at(call.start), parts, waits))
        return cls(tuple(queue), trace.steps)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[str, float, bool], ...]:
        """Of each launch: its phase, milliseconds of the work that it caused, and whether the host
        waits for it."""
        return tuple((phase, sum(ms for _, ms, _ in work), w) for phase, work, w in self.queue)

    @property
    def launches(self) -> float:
        """Launches a step, copies included."""
        return len(self.queue) / self.steps

    @property
    def waits(self) -> float:
        """How often a step the host waits for the GPU."""
        return sum(launch.waits for launch in self.queue) / self.steps

    @functools.cached_property
    def work(self) -> dict[str, tuple[float, int]]:
        """Category of work -> (milliseconds, count) of all steps."""
        ms, counts = Counter(), Counter()
        for kind, lasts, count in (part for launch in self.queue for part in launch.work):
            ms[kind] += lasts
            counts[kind] += count
        return {kind: (ms[kind], counts[kind]) for kind in ms}

    @property
    def takes_turns(self) -> bool:
        """Whether the host waits for every piece, as a CPU does: it is host and device at once."""
        return bool(self.queue) and all(launch.waits for launch in self.queue)

    @property
    def kernel_ms(self) -> float:
        """Milliseconds of kernels a step."""
        return sum(ms for kind, (ms, _) in self.work.items() if kind != "copy") / self.steps

    @property
    def copy_ms(self) -> float:
        """Milliseconds of copies a step."""
        return self.work.get("copy", (0.0, 0))[0] / self.steps

    def on(
        self,
        there: Spec,
        here: Spec,
        dtype: str,
        intensity: float = math.inf,
        empty_ms: float = 0.0,
    ) -> Program:
        """The program of the card `here` as it would be on the card `there`; see `scale`.

        empty_ms: a kernel's least. Only what is beyond it scales. Copies and communication have no
        least.
        """
        ratios = {kind: 1 / scale(kind, there, here, dtype, intensity) for kind in self.work}

        def scaled(kind: str, ms: float, count: int) -> tuple[str, float, int]:
            least = 0.0 if kind in ELSEWHERE else min(ms, count * empty_ms)
            return kind, least + (ms - least) * ratios[kind], count

        works = [tuple(scaled(*part) for part in launch.work) for launch in self.queue]
        pairs = zip(self.queue, works, strict=True)
        return Program(tuple(launch._replace(work=work) for launch, work in pairs), self.steps)


@dataclass(frozen=True)
class Host:
    """What one piece of work takes the host, in milliseconds, by marked phase; `other` for phases
    that are not named.

    A forward pass goes through Python layer by layer, a backward pass is called from C++: their
    launches differ.
    """

    other: float
    by_phase: Mapping[str, float] = field(default_factory=dict)

    def of(self, phase: str) -> float:
        return self.by_phase.get(phase, self.other)

    def times(self, factor: float) -> Host:
        """A host that takes `factor` times as long."""
        return Host(factor * self.other, {at: factor * ms for at, ms in self.by_phase.items()})

    def plus(self, added_ms: float) -> Host:
        """A host that takes so much longer for each piece."""
        return Host(self.other + added_ms, {at: ms + added_ms for at, ms in self.by_phase.items()})

    def mean_ms(self, program: Program) -> float:
        """Milliseconds a piece of `program`, on average."""
        return statistics.fmean(self.of(launch.phase) for launch in program.queue)


def replayed_ms(program: Program, host: Host) -> float:
    """Milliseconds a step when the queue is gone through in order, once it is filled."""
    host_ms = {phase: host.of(phase) for phase, _, _ in program.pieces}
    queue = [(host_ms[phase], ms, waits) for phase, ms, waits in program.pieces]
    return steady_ms(queue) / program.steps


def host_of(
    program: Program, phases: Mapping[str, Mapping[str, float]], step_ms: float
) -> Host | None:
    """What a launch takes the host, from a step that the host decides.

    program: of that step. phases: what its trace's `host_breakdown` says. step_ms: the same step
    timed without the profiler. How the phases compare is the trace's; one factor for all of them is
    solved for, so that the step's replay lasts `step_ms`. None where the GPU takes
    `HOST_DECIDES_BELOW` of it or more: then it doesn't tell. On a CPU, where host and device take
    turns, any share tells: what operators don't take is the host's, and nothing where they take
    more, as other programs took the CPU while they were traced. Raises `ValueError` for a trace
    without a launch.
    """
    counts = Counter(launch.phase for launch in program.queue)
    if not counts:
        raise ValueError("The trace of the step holds no launch: nothing tells what one takes.")
    busy_ms = program.kernel_ms + program.copy_ms
    if not program.takes_turns and busy_ms >= HOST_DECIDES_BELOW * step_ms:
        return None
    spent = {phase: row["ms"] * program.steps for phase, row in phases.items()}
    spent[""] = spent.pop("unmarked", 0.0)
    idle = sum(ms for phase, ms in spent.items() if phase not in counts)
    shared = idle / len(program.queue)  # phases without launches are shared by all launches
    shape = Host(
        shared, {phase: shared + spent.get(phase, 0.0) / count for phase, count in counts.items()}
    )
    high = 1.0
    while replayed_ms(program, shape.times(high)) < step_ms:
        high *= 2
    factor = root(lambda factor: replayed_ms(program, shape.times(factor)) - step_ms, 0.0, high)
    return shape.times(factor)


def scale(kind: str, there: Spec, here: Spec, dtype: str, intensity: float = math.inf) -> float:
    """How many times as fast a kind of kernel is on the card `there` as on `here`, by their data
    sheets.

    intensity: FLOP per byte of the matrix products, which decides whether the dense peak or the
    bandwidth bounds them on each card. Raises `ValueError` for a `dtype` that a card's matrix units
    lack.
    """
    if kind in ELSEWHERE:
        return 1.0
    if kind not in BY_ARITHMETIC:
        return there.bandwidth / here.bandwidth
    return attainable(there, dtype, intensity) / attainable(here, dtype, intensity)


def attainable(card: Spec, dtype: str, intensity: float = math.inf) -> float:
    """TFLOP/s at most of a product of so many FLOP per byte, by the data sheet's dense peak and
    bandwidth.
    """
    if dtype not in card.dense:
        raise ValueError(f"{card.name} has no {dtype} peak. It has: {', '.join(card.dense)}.")
    return Roofline(card.dense[dtype], card.bandwidth).attainable(intensity)
