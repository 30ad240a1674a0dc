"""The roofline model: what a processor's arithmetic rate and memory bandwidth allow an operation at
best.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roofline:
    """`rate` in TFLOP/s, `bandwidth` in GB/s."""

    rate: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP per byte at which the two limits meet: below it memory is the limit, above it
        arithmetic.
        """
        return self.rate * 1e3 / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """TFLOP/s at best for an operation of `intensity` FLOP per byte of memory traffic."""
        return min(self.rate, intensity * self.bandwidth / 1e3)

    def floor_ms(self, flops: float, bytes: float) -> float:
        """Milliseconds below which `flops` FLOPs on `bytes` of traffic can't be done: the larger of
        the two times.
        """
        return max(flops / (self.rate * 1e9), bytes / (self.bandwidth * 1e6))
