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

from labutils.profiling.collectives import Link
from labutils.results.records import Run

MIB = 2**20


@dataclass(frozen=True)
class PredictedStep:
    """A step's parts in ms: `compute_ms` of one rank's share, and `exposed_ms` of communication."""

    compute_ms: float
    exposed_ms: float

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.exposed_ms


def buckets(lead_bytes: Sequence[float]) -> list[list[int]]:
    """Which gradients (by place, in order of arrival) DDP sends together by default: a bucket is
    closed by the gradient that fills it, the first one at 1 MiB, later ones at 25."""
    groups: list[list[int]] = [[]]
    held = 0.0
    for place, size in enumerate(lead_bytes):
        groups[-1].append(place)
        held += size
        if held >= (MIB if len(groups) == 1 else 25 * MIB):
            groups.append([])
            held = 0.0
    return [group for group in groups if group]


def ddp(alone: Run, link: Link) -> PredictedStep:
    """The least that DDP's step takes, of `alone`: one process's run of one rank's share, with its
    gradients' arrivals."""
    lead, size = alone.samples["lead_ms"], alone.samples["lead_bytes"]
    done = -lead[0]
    for group in buckets(size):  # 0 is the last gradient's arrival
        ms = link.all_reduce_ms(sum(size[place] for place in group))
        done = max(done, -lead[group[-1]]) + ms
    return PredictedStep(alone.metric("step_ms"), max(0.0, done))


def efficiency(alone: Run, together: Run) -> float | None:
    """Examples a second of N ranks over N times one process's; None where either has none."""
    one, all_of_them = alone.metric("examples_per_s"), together.metric("examples_per_s")
    ranks = together.metrics.get("ranks")
    return all_of_them / (ranks * one) if one and all_of_them and ranks else None
