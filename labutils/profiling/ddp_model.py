"""How long an optimizer step takes on several GPUs, worked out from one GPU and the link between
them.

step(N) = what one process computes for its share + the part of communication that nothing hides.

DistributedDataParallel sends gradients in buckets, each as soon as it is full, while the backward
pass goes on computing earlier layers' gradients. One bucket goes after the other. What is still on
its way after the last gradient is *exposed*. When each gradient is there is measured on one process
(`training.launch_worker`). How long a bucket takes is measured between GPUs that have nothing
else to do (`collectives`). Nothing of the predicted step itself goes into it.

Left out: that sending takes part of the GPU from computing, and that ranks wait for the slowest.
Where a prediction is too short, look there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labutils.profiling.collectives import Link, bus_factor
from labutils.results.records import Run

MIB = 2**20


@dataclass(frozen=True)
class PredictedStep:
    """A step's parts in ms: `compute_ms` of one rank's share, `communication_ms` in all,
    `exposed_ms` of it.
    """

    compute_ms: float
    communication_ms: float
    exposed_ms: float
    messages: int

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.exposed_ms

    @property
    def efficiency(self) -> float:
        """Examples a second of N ranks over N times those of one, where each rank does what the one
        did.
        """
        return self.compute_ms / self.step_ms


def buckets(lead_bytes: Sequence[float], cap_mb: int = 0) -> list[list[int]]:
    """Which gradients (by place, in order of arrival) DDP sends together: a bucket is closed by the
    gradient that fills it. 0 is PyTorch's default, 25 MiB after a first one of 1."""
    caps = [1 * MIB, 25 * MIB] if cap_mb == 0 else [cap_mb * MIB]
    groups: list[list[int]] = [[]]
    held = 0.0
    for place, size in enumerate(lead_bytes):
        groups[-1].append(place)
        held += size
        if held >= caps[min(len(groups), len(caps)) - 1]:
            groups.append([])
            held = 0.0
    return [group for group in groups if group]


def ddp(alone: Run, link: Link, cap_mb: int = 0, each: int = 1) -> PredictedStep:
    """DDP's step, of `alone`: one process's run of one rank's share, with its gradients' arrivals.
    each: how many times a step gradients are sent: 1, or the rank's micro-batches where it
    synchronises after each of them."""
    lead, size = alone.samples["lead_ms"], alone.samples["lead_bytes"]
    done, sent = -lead[0], 0.0
    groups = buckets(size, cap_mb)
    for group in groups:
        ms = link.all_reduce_ms(sum(size[place] for place in group))
        done = max(done, -lead[group[-1]]) + ms  # 0 is the last gradient's arrival
        sent += ms
    return PredictedStep(
        alone.metric("step_ms"), each * sent, each * max(0.0, done), each * len(groups)
    )


def fsdp(alone: Run, link: Link, micro_steps: int = 1) -> PredictedStep:
    """FSDP2's step, roughly: weights are gathered twice a micro-step, unit by unit, one unit ahead
    of the computation, and gradients are scattered once a step. Hidden is what fits beside
    computing; the first unit's gather never is."""
    gathered, gradients = alone.metrics["gathered_mb"] * 1e6, alone.metrics["gradient_mb"] * 1e6
    units = alone.metrics["units"]
    unit_ms = link.gather_ms(gathered / units)
    sent = 2 * micro_steps * units * unit_ms + units * link.gather_ms(gradients / units)
    compute = alone.metric("step_ms")
    return PredictedStep(
        compute, sent, max(0.0, sent - compute) + unit_ms, (2 * micro_steps + 1) * units
    )


def flat_link(ranks: int, gb_per_s: float, latency_us: float = 20.0) -> Link:
    """A link of that bus bandwidth at every size, after a latency: a data sheet's, not a measured
    one.
    """
    sizes = tuple(float(2**power) for power in range(10, 33))
    ms = tuple(latency_us / 1e3 + size * bus_factor(ranks) / gb_per_s / 1e6 for size in sizes)
    return Link(ranks, sizes, ms)


def efficiency(alone: Run, together: Run) -> float | None:
    """Examples a second of N ranks over N times one process's; None where either has none."""
    one, all_of_them = alone.metric("examples_per_s"), together.metric("examples_per_s")
    ranks = together.metrics.get("ranks")
    return all_of_them / (ranks * one) if one and all_of_them and ranks else None
