"""Who called whom at a moment: slices of time on one thread nest like the calls they stand for.

The profiler records PyTorch's operators as slices (start, end, name). The slices of one thread that
hold a moment, from the longest to the shortest, are the call stack of that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Slice(NamedTuple):
    """Something that took time, in ms: on a host thread, or on a GPU stream (`thread` either way).

    `correlation` ties a CUDA call to the GPU work that it caused. `blocks` are a kernel's thread
    blocks for each multiprocessor. `dims`, `types` and `strides` are an operator's inputs'. Each is
    None where it was not recorded.
    """

    start: float
    end: float
    name: str
    thread: Any = None
    correlation: int | None = None
    blocks: float | None = None
    dims: Any = None
    types: Any = None
    strides: Any = None

    @property
    def ms(self) -> float:
        return self.end - self.start


def enclosing(slices: Sequence[Slice], moments: Sequence[float]) -> list[tuple[Slice, ...]]:
    """For each of `moments` (ascending), the slices that hold it, the outermost first.

    `slices` are of one thread, sorted by start and, for equal starts, the longest first.
    """
    stacks, stack, at = [], [], 0
    for moment in moments:
        while at < len(slices) and slices[at].start <= moment:
            while stack and stack[-1].end <= slices[at].start:
                stack.pop()
            stack.append(slices[at])
            at += 1
        stack = [s for s in stack if s.end > moment]
        stacks.append(tuple(stack))
    return stacks


def own_time(slices: Sequence[Slice]) -> Iterator[tuple[Slice, float]]:
    """(slice, its duration less that of the slices directly inside it), the innermost first;
    `slices` as for `enclosing`.
    """
    stack: list[tuple[Slice, list[float]]] = []
    ends = float("inf")
    for item in [*slices, Slice(ends, ends, "")]:
        while stack and stack[-1][0].end <= item.start:
            done, inside = stack.pop()
            yield done, done.end - done.start - sum(inside)
        if stack:
            stack[-1][1].append(item.end - item.start)
        stack.append((item, []))


def blamed_operator(ops: Sequence[Slice]) -> str:
    """The operator to blame for what happens inside `ops` (outermost first); "" outside any.

    That is the outermost of the aten operators that end the stack: "aten::item", not the
    "aten::_local_scalar_dense" that it calls.
    """
    blamed = ""
    for op in reversed(ops):
        if blamed and not op.name.startswith("aten::"):
            break
        blamed = op.name
    return blamed
