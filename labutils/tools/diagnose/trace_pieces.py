"""A trace read for a diagnosis: its pieces of work, with the formats and sizes of matrix products
and how much of the GPU each kernel fills."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from labutils.profiling.intervals import Lookup, union
from labutils.profiling.products import dtype_of, masks_queries, operators_at, product_of
from labutils.profiling.trace import Trace, Wait
from labutils.tools.diagnose.step_queue import GRAPH_GAP_MS, PYTHON, READ, TO_DEVICE, Piece, Queue

CALLING_MS = 0.002
"""What of an operator's time on a CPU is the calling of it: an addition of one number takes 0.6 us
as it is, and 2 to 3 under the profiler."""
MOST_CALLING_MS = 0.03
"""What calling one operator takes at most, Python around it included. More than that is something
else, such as the system handing out memory, and no fewer calls would save it."""
PYTHON_MS = 1.0
"""A stretch of the host's time outside of marked phases is the loop's own from twice this on, and
up to this the model's. In between it is taken for a mixture of both."""
KERNEL_GAP_MS = 0.0015
"""From one kernel to the next, both launched long before: steps of 4,691 and 1,994 kernels lasted
7.5 and 3.0 ms longer than these, on an H100."""
PRODUCTS = ("GEMM", "thin GEMM")
BLOCKS_AT_ONCE = dict.fromkeys((*PRODUCTS, "attention", "convolution"), 1)
"""How many thread blocks a multiprocessor holds at once, roughly: products' take all of its shared
memory.
"""
OTHER_BLOCKS = 8
_TF32 = re.compile("tf32|tensorop_s1688")
"""Kernels that say so; inputs of TF32 products are recorded as float32."""
# ---------------------------------------------------------------------------- the pieces of work


def _gpu_pieces(trace: Trace) -> Iterator[Piece]:
    """A piece for each kernel and copy, in the order in which they were given."""
    launched = trace.launched()
    operators = operators_at(trace, [call.start for call, _, _ in launched])
    host_end = trace.step_windows[-1][1]
    waiting = [(wait.start, wait.end) for wait in trace.waits]
    not_own = Lookup(union(waiting + trace.phase_time.get("data", [])))
    marks = [time for at, time in trace.phase_time.items() if at not in ("log", "to_device")]
    marked, last = Lookup(union(sum(marks, waiting))), trace.wall[0]
    for (call, work, wait), operator in zip(launched, operators, strict=True):
        if loops_ms := _loops_own_ms(last, call.start, marked):
            yield Piece(PYTHON, 0.0, host_ms=loops_ms)
        host_ms, last = not_own.outside((last, call.end)) - loops_ms, max(last, call.end)
        # There are several kernels of a graph, or of one product in parts.
        for number, (kernel, kind, ms) in enumerate(work, 1):
            # What isn't known to fill a part of the GPU fills all of it.
            fill = (kernel.blocks or 0.0) / BLOCKS_AT_ONCE.get(kind, OTHER_BLOCKS) or 1.0
            own_ms, gap_ms = (host_ms, KERNEL_GAP_MS) if number == 1 else (0.0, GRAPH_GAP_MS)
            waits = _reason(wait, kernel.name) if wait and number == len(work) else ""
            dtype = "tf32" if _TF32.search(kernel.name) else dtype_of(operator)
            product = product_of(operator) if kind in PRODUCTS and len(work) == 1 else None
            sizes = {"product": product, "dtype": dtype, "masks": masks_queries(operator)}
            phase = trace.phase_at(call.start)
            yield Piece(kind, ms, own_ms, gap_ms, phase, waits, fill=fill, **sizes)
    yield Piece(PYTHON, 0.0, host_ms=not_own.outside((last, host_end)))


def _cpu_pieces(trace: Trace) -> Iterator[Piece]:
    """A piece for each operator that computes something. But for the loop's own Python, the host's
    time of a phase (views, calling) is shared out evenly among its pieces, up to what calling
    can take.
    """
    launched = [(op, work[0], trace.phase_at(op.start)) for op, work, _ in trace.launched()]
    launched = [row for row in launched if row[2] != "data"]
    operators = operators_at(trace, [operator.start for operator, _, _ in launched])
    pieces, last, loops_ms = [], trace.wall[0], 0.0
    marked = Lookup(union(sum(trace.phase_time.values(), [])))
    for (op, (_, kind, own_ms), phase), operator in zip(launched, operators, strict=True):
        loops_ms, last = loops_ms + _loops_own_ms(last, op.start, marked), max(last, op.end)
        sizes = {"product": product_of(operator), "dtype": dtype_of(operator)}
        sizes["masks"] = masks_queries(operator)
        pieces.append(Piece(kind, max(0.0, own_ms - CALLING_MS), phase=phase, **sizes))
    left = Counter({at: row["ms"] * trace.steps for at, row in trace.host_breakdown().items()})
    left[""] += left.pop("unmarked", 0.0) - loops_ms
    del left["data"]
    for piece in pieces:
        left[piece.phase] -= piece.ms
    count = Counter(piece.phase for piece in pieces)
    for piece in pieces:
        even_ms = max(0.0, left[piece.phase]) / count[piece.phase]
        yield replace(piece, host_ms=min(MOST_CALLING_MS, even_ms))
    for phase, ms in left.items():
        yield Piece(PYTHON, 0.0, max(0.0, ms - count[phase] * MOST_CALLING_MS), phase=phase)
    yield from [Piece(PYTHON, 0.0, host_ms=loops_ms / trace.steps)] * trace.steps


def queue_of(trace: Trace, data_ms: float = 0.0, log_ms: float = 0.0) -> Queue:
    """The traced steps as a queue, the host's time as traced.

    data_ms, log_ms: what a step waits for data and takes to write logs, timed without the profiler;
    they stand in the place of what was traced.
    """
    pieces = list(_gpu_pieces(trace) if trace.on_gpu else _cpu_pieces(trace))
    # The wait for data stands before the first piece of each step; steps have as many pieces as
    # each other.
    for step in range(trace.steps):
        place = step * len(pieces) // trace.steps
        pieces[place] = pieces[place].but(data_ms=pieces[place].data_ms + data_ms)
    # Writing is taken out of the longest stretches of the host's time, one a step.
    longest = sorted(range(len(pieces)), key=lambda place: -pieces[place].host_ms)
    for place in longest[: trace.steps]:
        host_ms = max(0.0, pieces[place].host_ms - log_ms)
        pieces[place] = pieces[place].but(log_ms=log_ms, host_ms=host_ms)
    return Queue(tuple(pieces), trace.steps, not trace.on_gpu)


def _loops_own_ms(start: float, end: float, marked: Lookup) -> float:
    """What of the host's time in between is the loop's own."""
    ms = marked.outside((start, end))
    return max(0.0, min(ms, 2 * (ms - PYTHON_MS)))


def _reason(wait: Wait, work: str) -> str:
    copies = "HtoD" in work and wait.cause.startswith(("aten::to", "aten::_to", "aten::copy"))
    return TO_DEVICE if copies else READ
