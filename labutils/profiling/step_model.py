"""How long a training step takes, predicted: by this host or another, on this card or another.

The host gives the GPU one piece of work after the other (`Trace.launched`). Each launch takes the
host a while, and its work the GPU a while. The two run side by side, so in short

    step = max(kernel time, launches x the host's time a launch) + exposed copies

which is exact where neither waits for the other in between and all launches are alike.
`replayed_ms` drops both conditions: it goes through the queue in order (`launch_queue.replay`).

The predicted step itself is never timed. Kernel times come from a trace: the profiler slows the
host down and leaves them nearly as they are (a graph's may come out a little longer). The trace
also has the gaps of 1 to 2 microseconds between kernels that wait in the queue, and tells how
launches compare: before some the host is in Python for milliseconds. What a launch takes it on
average is solved for from *another* step of the same model, on so few tokens that the host decides
(`host_of`): that step lasts as long as its host takes. What an operation takes the host is the same
in both steps, what a launch takes it need not be: kernels chosen for few tokens may be fewer.

For another card each category of kernels scales with what bounds it (`scale`): matrix products and
attention with the dense peak, as far as the step's FLOPs a byte suffice, everything else with the
memory's bandwidth. No kernel falls below what an empty one takes. Products that LoRA's rank makes
thin go by bandwidth. A graph's kernels, which no operator calls, can't be told to be thin.
Left out: that other cards reach another share of their peaks; caches; that a host comes back later
from a long wait; that the profiler slows operators more than it slows plain Python; that a delay of
each operation, as `host_delay` makes it, lengthens short launches by more than their share.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from labutils.profiling.gpu_specs import Spec
from labutils.profiling.intervals import Lookup, union
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
QUEUED_MS = 0.02
"""A piece that was launched so long before the one before it was done has been in the queue."""
CARDS = ("H100 SXM5", "H200 SXM", "RTX PRO 6000 Blackwell Max-Q", "B200")
"""The cards for which the course predicts."""


class Launch(NamedTuple):
    """One thing that the host gave the GPU to do: a kernel, a CUDA graph or a copy.

    `host_ms` is what it took the host beside the profiler, waits left out. `work` is what it
    caused: (category, milliseconds, count), with the category "copy" for what crosses a link to the
    host or another GPU. `waits`: the host then waited until the GPU had caught up.
    """

    host_ms: float
    work: tuple[tuple[str, float, int], ...]
    waits: bool


@dataclass(frozen=True)
class Program:
    """What the host gives the GPU in `steps` optimizer steps, in order. After each piece the GPU
    stands still for `gap_ms`, the median between two that were both in the queue."""

    queue: tuple[Launch, ...]
    steps: int
    gap_ms: float = 0.0

    @classmethod
    def of(cls, trace: Trace) -> Program:
        """What a trace's host launched. On a CPU, which does the work itself, it waits for every
        piece, and all pieces take the host as long.
        """
        launched, queue, gaps = trace.launched(), [], []
        usual_ms = statistics.median(call.ms for call, _, _ in launched) if launched else 0.0
        waiting = Lookup(union((wait.start, wait.end) for wait in trace.waits))
        before, done = trace.step_windows[0][0], math.inf
        for call, work, wait in launched:
            times: dict[str, list[float]] = defaultdict(list)
            for _, category, ms in work:
                times[category].append(ms)
            parts = tuple((kind, sum(ms), len(ms)) for kind, ms in times.items())
            if not trace.on_gpu:
                queue.append(Launch(1.0, parts, True))
                continue
            # A longer call may have stood before a full queue.
            host_ms = waiting.outside((before, call.start)) + min(call.ms, usual_ms)
            queue.append(Launch(host_ms, parts, wait is not None))
            begun = min(item.start for item, _, _ in work)
            if call.end + QUEUED_MS < done < begun:
                gaps.append(begun - done)
            done = max(item.end for item, _, _ in work)
            before = max(before, call.end)
        # What follows the last launch comes before the next step's first.
        if queue and trace.on_gpu:
            rest_ms = waiting.outside((before, trace.step_windows[-1][1]))
            queue[0] = queue[0]._replace(host_ms=queue[0].host_ms + rest_ms)
        return cls(tuple(queue), trace.steps, statistics.median(gaps) if gaps else 0.0)

    @functools.cached_property
    def pieces(self) -> list[tuple[float, float, bool]]:
        """Of each launch: the host's time over the mean one, the GPU's milliseconds, gap included,
        and whether the host then waits."""
        mean_ms = sum(launch.host_ms for launch in self.queue) / max(1, len(self.queue)) or 1.0
        return [
            (host_ms / mean_ms, sum(ms for _, ms, _ in work) + self.gap_ms, waits)
            for host_ms, work, waits in self.queue
        ]

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
        return replace(self, queue=tuple(launch._replace(work=work) for launch, work in pairs))


def replayed_ms(program: Program, launch_ms: float) -> float:
    """Milliseconds a step when the queue is gone through in order, once it is filled, beside a host
    that takes `launch_ms` on average for a launch."""
    queue = [(launch_ms * part, ms, waits) for part, ms, waits in program.pieces]
    return steady_ms(queue) / program.steps


def host_of(program: Program, step_ms: float) -> float | None:
    """Milliseconds that a launch takes the host on average, from a step that the host decides.

    program: of that step. step_ms: the same step timed without the profiler, which its replay is to
    last. None where the GPU takes `HOST_DECIDES_BELOW` of it or more: then it doesn't tell. On a
    CPU, where host and device take turns, any share tells: what operators don't take is the host's,
    and nothing where they take more, as other programs took the CPU while they were traced. Raises
    `ValueError` for a trace without a launch.
    """
    if not program.queue:
        raise ValueError("The trace of the step holds no launch: nothing tells what one takes.")
    busy_ms = program.kernel_ms + program.copy_ms
    if not program.takes_turns and busy_ms >= HOST_DECIDES_BELOW * step_ms:
        return None
    most = step_ms / program.launches
    return root(lambda ms: replayed_ms(program, ms) - step_ms, 0.0, most)


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
