"""How long a training step takes, foretold: by this host or another, on this card or another.

The host gives the GPU one piece of work after the other (`Trace.queue`). Each takes the host a
while to give, and the GPU a while to do. The two work side by side, so in short

    step = max(kernel time, launches x the host's time a launch) + exposed copies              `bound_ms`

which is exact where nothing makes one wait for the other in between and all launches are alike.
`replayed_ms` drops both conditions: it goes through the queue in order. A piece begins when it was
given and the one before is done; where the host waits for the GPU it goes on when all is done; and
it runs ahead by `QUEUE` pieces at most.

What goes in is learnt without timing the step that is foretold. Kernel times are a trace's: the
profiler slows the host down and leaves them nearly as they are (a graph's may come out a little
longer). So where kernels decide, the prediction is hardly more than their sum. The host's time a
launch is solved for from *another* step, of a thin model of the same layers on so few tokens that
the GPU has next to nothing to do (`host_of`): what that step lasts is the host's doing.

For another card each kind of kernel scales with what bounds it (`scale`): matrix products and
attention with the dense peak, as far as the step's FLOPs a byte suffice, everything else with the
memory's bandwidth, and no kernel falls below what an empty one takes. Products that LoRA's rank
makes thin go by bandwidth; a graph's kernels, which no operator calls, can't be told to be any.
Left out: that other cards reach another share of their peaks, caches, and gaps of about a
microsecond between kernels that wait in the queue.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from labutils.profiling.gpu_specs import Spec
from labutils.profiling.roofline import Roofline
from labutils.profiling.trace import Given, Trace

QUEUE = 1024
"""Pieces of work that CUDA holds ready for a GPU; a host that is farther ahead waits."""
BY_ARITHMETIC = ("GEMM", "attention", "convolution")
"""Kinds of kernels that matrix units bound. Of all others memory does."""
ELSEWHERE = ("copy", "communication")
"""Kinds that neither bounds: they cross a link, which is taken to be the same everywhere."""
LIGHT = 0.5
"""A light step's kernels take less than this share of it. Where they take more, it would last
nearly as long beside other hosts, so that it tells little about this one."""
CARDS = ("H100 SXM5", "H200 SXM", "RTX PRO 6000 Blackwell Max-Q", "B200")
"""For which cards the course foretells."""


@dataclass(frozen=True)
class Program:
    """What the host gives the GPU in `steps` optimizer steps, in order."""

    given: tuple[Given, ...]
    steps: int

    @classmethod
    def of(cls, trace: Trace) -> Program:
        return cls(tuple(trace.queue()), trace.steps)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[str, float, float, bool], ...]:
        """Of each piece: its phase, milliseconds of kernels, milliseconds that go by a link
        (`ELSEWHERE`), and whether the host waits for it."""
        found = []
        for piece in self.given:
            elsewhere = sum(ms for kind, ms, _ in piece.work if kind in ELSEWHERE)
            found.append(
                (
                    piece.phase,
                    sum(ms for _, ms, _ in piece.work) - elsewhere,
                    elsewhere,
                    piece.waits,
                )
            )
        return tuple(found)

    @functools.cached_property
    def phases(self) -> frozenset[str]:
        """The marked phases in which the host gives something."""
        return frozenset(piece.phase for piece in self.given)

    @property
    def launches(self) -> float:
        """Pieces of work a step, copies included."""
        return len(self.given) / self.steps

    @property
    def waits(self) -> float:
        """How often a step the host waits for the GPU."""
        return sum(piece.waits for piece in self.given) / self.steps

    def gpu_ms(self) -> dict[str, float]:
        """Kind of work -> milliseconds a step, the most first."""
        found: dict[str, float] = {}
        for piece in self.given:
            for kind, ms, _ in piece.work:
                found[kind] = found.get(kind, 0.0) + ms / self.steps
        return dict(sorted(found.items(), key=lambda row: -row[1]))

    @property
    def takes_turns(self) -> bool:
        """Whether the host waits for every piece, as a CPU does, which is host and device at once."""
        return bool(self.given) and all(piece.waits for piece in self.given)

    @property
    def kernel_ms(self) -> float:
        """Milliseconds of kernels a step."""
        return sum(ms for kind, ms in self.gpu_ms().items() if kind != "copy")

    @property
    def copy_ms(self) -> float:
        """Milliseconds of copies a step."""
        return self.gpu_ms().get("copy", 0.0)

    def captured(self) -> Program:
        """The same work in one launch a step, as a CUDA graph would give it."""
        work: dict[str, tuple[float, int]] = {}
        for piece in self.given:
            for kind, ms, count in piece.work:
                before = work.get(kind, (0.0, 0.0))
                work[kind] = before[0] + ms / self.steps, before[1] + count
        whole = tuple((kind, ms, round(count / self.steps)) for kind, (ms, count) in work.items())
        return Program((Given("", whole, False),), 1)

    def scaled(self, ratio: Callable[[str], float], empty_ms: float = 0.0) -> Program:
        """The same program where a kind of work takes `ratio(kind)` times as long beyond
        `empty_ms`, a kernel's least.

        Copies and communication have no least.
        """

        ratios = {kind: ratio(kind) for kind in self.gpu_ms()}

        def longer(kind: str, ms: float, count: int) -> tuple[str, float, int]:
            least = 0.0 if kind in ELSEWHERE else min(ms, count * empty_ms)
            return kind, least + (ms - least) * ratios[kind], count

        given = (
            piece._replace(work=tuple(longer(*part) for part in piece.work)) for piece in self.given
        )
        return Program(tuple(given), self.steps)

    def on(
        self,
        there: Spec,
        here: Spec,
        dtype: str,
        intensity: float = math.inf,
        empty_ms: float = 0.0,
    ) -> Program:
        """The program of the card `here` as it would be on the card `there`; see `scale`."""
        return self.scaled(lambda kind: 1 / scale(kind, there, here, dtype, intensity), empty_ms)


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
        return Host(
            factor * self.other, {phase: factor * ms for phase, ms in self.by_phase.items()}
        )

    def plus(self, ms: float) -> Host:
        """A host that takes `ms` longer for each piece."""
        return Host(
            self.other + ms, {phase: before + ms for phase, before in self.by_phase.items()}
        )

    def halfway_to(self, other: Host) -> Host:
        """The host halfway between this reading and an `other` one of it, phase by phase."""
        phases = {*self.by_phase, *other.by_phase}
        return Host(
            (self.other + other.other) / 2,
            {phase: (self.of(phase) + other.of(phase)) / 2 for phase in phases},
        )

    def mean_ms(self, program: Program) -> float:
        """Milliseconds a piece of `program`, on average."""
        return (
            statistics.fmean(self.of(piece.phase) for piece in program.given)
            if program.given
            else self.other
        )


def bound_ms(program: Program, host: Host) -> float:
    """The short form: max(kernels, launches x the host's time a launch) + copies, milliseconds a
    step.

    Where host and device take turns, it is their sum.
    """
    launching = program.launches * host.mean_ms(program)
    if program.takes_turns:
        return launching + program.kernel_ms + program.copy_ms
    return max(program.kernel_ms, launching) + program.copy_ms


def replayed_ms(program: Program, host: Host, stretch: float = 1.0) -> float:
    """Milliseconds a step when the queue is gone through in order, from the second round on: the
    first starts empty.

    stretch: kernels take so many times as long, copies what they took.
    """
    ends = _ends(program, host, stretch, rounds=2)
    return (ends[1] - ends[0]) / program.steps


def idle_ms(program: Program, host: Host) -> float:
    """Milliseconds a step in which the GPU has nothing to do."""
    return max(0.0, replayed_ms(program, host) - program.kernel_ms - program.copy_ms)


def decided_by(program: Program, host: Host) -> str:
    """Which clock a step goes by: "kernels", or "host" where it lasts a tenth longer than they do
    or more; "both" where host and device take turns."""
    if program.takes_turns:
        return "both"
    return "host" if replayed_ms(program, host) > 1.1 * program.kernel_ms else "kernels"


def _ends(program: Program, host: Host, stretch: float, rounds: int) -> list[float]:
    """When the GPU has done each of several rounds of the program, in milliseconds.

    Tens of thousands of pieces are gone through for each point of a curve: hence the plain loop.
    """
    giving = {phase: host.of(phase) for phase in program.phases}
    now = done = 0.0
    begun: list[float] = []
    ends = []
    for _ in range(rounds):
        for phase, here, elsewhere, waits in program.pieces:
            now += giving[phase]
            if len(begun) >= QUEUE and begun[-QUEUE] > now:
                now = begun[-QUEUE]
            start = now if now > done else done
            begun.append(start)
            done = start + stretch * here + elsewhere
            if waits and done > now:
                now = done
        ends.append(done)
    return ends


def interrupted(program: Program, step_ms: float) -> bool:
    """Whether a trace of a CPU's step counts more milliseconds of operators than the step takes
    without the profiler: what other programs took of the CPU in the middle of an operator is
    counted as the operator's."""
    return program.takes_turns and program.kernel_ms + program.copy_ms >= step_ms


def host_of(program: Program, phases: Mapping[str, Mapping[str, float]], step_ms: float) -> Host:
    """What a launch takes the host, from a *light* step: one with so little to compute that the GPU
    mostly waits.

    program: of that step. phases: what its trace's `host_breakdown` says. step_ms: the same step
    timed without the profiler. How the phases compare is the trace's; one factor for all of them is
    solved for, so that the replay of the light step lasts `step_ms`. Raises `ValueError` where the
    GPU takes `LIGHT` of it or more: then it was not light. (Where host and device take turns, the
    time that is not the one's is the other's, whatever the share, unless the traced step was
    `interrupted`.)
    """
    counts: dict[str, int] = {}
    for piece in program.given:
        counts[piece.phase] = counts.get(piece.phase, 0) + 1
    if not counts:
        raise ValueError(
            "The trace of the light step holds no launch, so that nothing says what one takes the "
            "host."
        )
    busy_ms = program.kernel_ms + program.copy_ms
    if interrupted(program, step_ms):
        raise ValueError(
            f"The operators of a traced light step take {busy_ms:.1f} ms together, a whole step "
            "without the profiler "
            f"{step_ms:.1f} ms: other programs took the CPU while it was traced. Run this again "
            "when they are done."
        )
    if not program.takes_turns and busy_ms >= LIGHT * step_ms:
        raise ValueError(
            f"The GPU takes {busy_ms:.1f} ms of a light step's {step_ms:.1f} ms, so that this step "
            "doesn't "
            "tell what the host takes. Use fewer tokens, or a thinner model."
        )
    spent = {
        "" if phase == "unmarked" else phase: row["ms"] * program.steps
        for phase, row in phases.items()
    }
    idle = sum(ms for phase, ms in spent.items() if phase not in counts) / len(
        program.given
    )  # shared by all launches
    shape = Host(
        idle, {phase: idle + spent.get(phase, 0.0) / count for phase, count in counts.items()}
    )
    return shape.times(_factor(lambda factor: replayed_ms(program, shape.times(factor)), step_ms))


def _factor(step_ms: Callable[[float], float], wanted: float) -> float:
    """The factor at which a growing function that begins below `wanted` reaches it."""
    high = 1.0
    while step_ms(high) < wanted:
        high *= 2
    return _bisected(lambda factor: step_ms(factor) - wanted, 0.0, high)


HALVINGS = 28
"""How often an interval is halved to find a place in it: to a part in 10^8."""


def crossing(
    one: Callable[[float], float],
    other: Callable[[float], float],
    low: float,
    high: float,
    halvings: int = HALVINGS,
) -> float | None:
    """Where two curves change places between `low` and `high`; None where one is below the other at
    both ends.
    """
    ahead = [one(at) - other(at) for at in (low, high)]
    if (ahead[0] < 0) == (ahead[1] < 0):
        return None
    return _bisected(
        lambda at: (one(at) - other(at)) * (1 if ahead[0] < 0 else -1), low, high, halvings
    )


def _bisected(
    rising: Callable[[float], float], low: float, high: float, halvings: int = HALVINGS
) -> float:
    """Where a function that is below 0 at `low` and not at `high` reaches it."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


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


# ----------------------------------------------------------------------------------- larger models


@dataclass(frozen=True)
class Bulk:
    """A step in bulk: `flops` and `intensity` (FLOP per byte) of its products, `launches`,
    `examples`.

    For a model that is not here to be traced.
    """

    flops: float
    intensity: float
    launches: float
    examples: int

    def kernel_ms(self, card: Spec, dtype: str, reached: float) -> float:
        """Milliseconds of kernels on `card` where they reach a share `reached` of what the data
        sheet allows.
        """
        return self.flops / (attainable(card, dtype, self.intensity) * reached * 1e9)

    def bound_ms(self, kernel_ms: float, host_ms: float) -> float:
        """The short form, with `host_ms` a launch."""
        return max(kernel_ms, self.launches * host_ms)

    def like_ms(self, program: Program, kernel_ms: float, host: Host) -> float:
        """The replay of a `program` of the same kind, its kernels as long and its launches as many
        as this step's.
        """
        times = self.launches / program.launches
        return times * replayed_ms(program, host, kernel_ms / (times * program.kernel_ms))


@dataclass(frozen=True)
class Law:
    """Launches of a step as a sum: `constant`, `layer` for each layer, and `expert` for each expert
    of each layer.
    """

    constant: float
    layer: float
    expert: float = 0.0

    def launches(self, layers: int, experts: int = 0) -> float:
        return self.constant + layers * (self.layer + experts * self.expert)
