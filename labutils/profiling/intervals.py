"""Arithmetic on sets of time: the union, overlap and difference of intervals, and gaps between
them.

An interval is a pair (start, end) in any one unit; a set of time is a list of them. `union` brings
any list into normal form (sorted, disjoint, no empty interval); the other functions take and return
normal form. Every statement of the course about a busy or idle GPU is one of these sums, so they
stand alone and are tested against brute force.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of `intervals` covers, in normal form; touching intervals become
    one.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Length of a set of time in normal form."""
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The time of `whole` that is not in `taken`."""
    left: list[Interval] = []
    j = 0
    for start, end in whole:
        while j < len(taken) and taken[j][1] <= start:
            j += 1
        k = j
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > start:
                left.append((start, taken[k][0]))
            start = max(start, taken[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


class Lookup:
    """Answers about single moments and short stretches of a large set in normal form, in
    logarithmic time.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]

    def within(self, stretch: Interval) -> list[Interval]:
        """The time of the set that lies in `stretch`."""
        first, last = bisect_right(self._ends, stretch[0]), bisect_left(self._starts, stretch[1])
        return overlap(self._intervals[first:last], [stretch])

    def outside(self, stretch: Interval) -> float:
        """Length of `stretch` that isn't in the set; 0 where it ends before it starts."""
        start, end = stretch
        return end - start - total(self.within(stretch)) if end > start else 0.0

    def index(self, moment: float) -> int | None:
        """Position of the interval with start <= moment < end, or None."""
        at = bisect_right(self._starts, moment) - 1
        return at if at >= 0 and moment < self._intervals[at][1] else None
