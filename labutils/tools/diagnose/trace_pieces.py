"""A trace read for a diagnosis: its pieces of work, with the formats and sizes of matrix products
and how much of the GPU each kernel fills."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from labutils.profiling.call_stacks import Slice, enclosing, own_time
from labutils.profiling.intervals import Lookup, total, union
from labutils.profiling.kernel_categories import category_of
from labutils.profiling.trace import COMPUTES_NOTHING, Trace, Wait, category_of_copy
from labutils.tools.diagnose.step_queue import READ, TO_DEVICE, Piece, Product, Queue

CALLING_MS = 0.002
"""What of an operator's time on a CPU is the calling of it: an addition of one number takes 0.6 us
as it is, and 2 to 3 under the profiler."""
MOST_CALLING_MS = 0.03
"""What calling one operator takes at most, Python around it included. More than that is something
else, such as the system handing out memory, and no fewer calls would save it."""
FORMATS = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "double": "fp64"}
PRODUCTS = ("GEMM", "thin GEMM")
BLOCKS_AT_ONCE = dict.fromkeys((*PRODUCTS, "attention", "convolution"), 1)
"""How many thread blocks a multiprocessor holds at once, roughly: products' take all of its shared
memory.
"""
OTHER_BLOCKS = 8
_TYPED = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|_?convolution\w*|cudnn_convolution\w*|mkldnn_convolution\w*|"
    r"_scaled_dot_product\w+)$"
)
_TF32 = re.compile("tf32|tensorop_s1688")
"""Kernels that say so; inputs of TF32 products are recorded as float32."""
_FORWARD_ONLY = re.compile(r"aten::(linear|conv2d|scaled_dot_product_attention|matmul)$")
_NODE = "autograd::engine::evaluate_function"


class Typed(NamedTuple):
    """An operator of products, with its inputs' shapes and types as they were recorded."""

    start: float
    end: float
    name: str
    shapes: Any
    types: Any

    @property
    def dtype(self) -> str:
        """The format of its first input of floating point; "" where none was recorded."""
        return next((FORMATS[kind] for kind in self.types or () if kind in FORMATS), "")

    @property
    def product(self) -> Product | None:
        """The matrix product that it computes; None where it is none, or its shapes are unknown."""
        matrices = [
            shape
            for shape in self.shapes or ()
            if len(shape) in (2, 3) and all(isinstance(size, int) for size in shape)
        ]
        if not self.name.endswith("mm") or len(matrices) < 2:
            return None
        first, second = matrices[-2:]
        if first[-1] != second[-2]:
            return None
        count = first[0] if len(first) == 3 else 1
        return Product(first[-2], second[-1], first[-1], count, self.dtype or "fp32")


class PieceTrace(Trace):
    """A trace that also keeps what a diagnosis needs: products' types, and kernels' grids."""

    def __init__(self, events: Iterable[dict[str, Any]], path: Path | None = None) -> None:
        self.typed: list[Typed] = []
        self.blocks: dict[tuple[int | None, float], float] = {}
        super().__init__(events, path)
        self.typed.sort(key=lambda operator: (operator.start, -operator.end))
        if not any(mark.name == "optimizer" for mark in self.annotations):
            self.annotations = [self._update_of(mark) for mark in self.annotations]

    def _update_of(self, mark: Slice) -> Slice:
        """PyTorch's own mark of an optimizer's step, as the update that it holds: behind what a
        closure computes in it (PyTorch Lightning trains so), and to the end of the recorded step,
        which may be called from inside of it. Other marks stay as they are."""
        if not mark.name.startswith("Optimizer.step#"):
            return mark
        backward = (other.end for other in self.annotations if other.name == "backward")
        starts = [end for end in backward if mark.start < end < mark.end]
        ends = [end for start, end in self.step_windows if start <= mark.start < end]
        start, end = max([mark.start, *starts]), min([mark.end, *ends])
        return mark._replace(start=start, end=end, name="optimizer")

    def _keep(self, event: dict[str, Any], start: float, end: float) -> None:
        if end < start:  # a damaged event
            return
        super()._keep(event, start, end)
        kind, name, args = event.get("cat", ""), str(event.get("name", "")), event.get("args") or {}
        if kind == "cpu_op" and _TYPED.match(name):
            shapes, types = args.get("Input Dims"), args.get("Input type")
            self.typed.append(Typed(start, end, name, shapes, types))
        elif kind == "kernel" and "blocks per SM" in args:
            self.blocks[args.get("correlation"), start] = float(args["blocks per SM"])

    def typed_at(self, moments: Sequence[float]) -> list[Typed | None]:
        """The operator of products that runs at each of `moments` (ascending), on any thread: one
        thread computes at a time."""
        return [stack[-1] if stack else None for stack in enclosing(self.typed, moments)]

    def recomputed(self) -> float:
        """How much of the forward pass is computed again in the backward pass, from 0 to 1:
        operators that only forward passes call, inside autograd's nodes, over those outside.
        Encoders that are marked as such don't count."""
        inside = outside = 0
        for slices in self.ops.values():
            node_end = float("-inf")
            for operator in self._inside(slices):
                if operator.name.startswith(_NODE):
                    node_end = max(node_end, operator.end)
                elif _FORWARD_ONLY.match(operator.name):
                    again = operator.start < node_end
                    inside += again
                    outside += not again and self._phase_at(operator.start) != "encode"
        return min(1.0, inside / outside) if outside else 0.0

    # The pieces of work

    def gpu_pieces(self) -> Iterator[Piece]:
        """A piece for each kernel and copy, in the order in which they were given."""
        works = self._works()
        launching = [call for call in self._inside(self.calls) if call.correlation in works]
        once = {call.correlation: call for call in reversed(launching)}
        calls = sorted(once.values(), key=lambda call: call.start)
        starts = [call.start for call in calls]
        host_end = self.step_windows[-1][1]  # after that the profiler itself waits for the GPU
        waits = _waits_after(starts, [wait for wait in self.waits if wait.start < host_end])
        waiting = [(wait.start, wait.end) for wait in self.waits]
        not_own = Lookup(union(waiting + self.phase_time.get("data", [])))
        last = self.wall[0]
        for place, (call, operator) in enumerate(zip(calls, self.typed_at(starts), strict=True)):
            host_ms, last = _own_ms(last, call.end, not_own), max(last, call.end)
            kernels = works[call.correlation]  # several of a graph, or of one product in parts
            for number, (kind, name, ms, fill) in enumerate(kernels, 1):
                alone = operator is not None and kind in PRODUCTS and len(kernels) == 1
                wait = waits.get(place) if number == len(kernels) else None
                yield Piece(
                    kind,
                    ms,
                    host_ms=host_ms if number == 1 else 0.0,
                    phase=self._phase_at(call.start),
                    waits=_reason(wait, name) if wait else "",
                    product=operator.product if alone else None,
                    dtype="tf32" if _TF32.search(name) else operator.dtype if operator else "",
                    fill=fill,
                )
        yield Piece("other", 0.0, host_ms=_own_ms(last, host_end, not_own))

    def _works(self) -> dict[int, list[tuple[str, str, float, float]]]:
        """Correlation -> (kind, name, milliseconds, how much of the GPU it fills) of its kernels
        and copies; what isn't known to fill a part fills all."""
        works: dict[Any, list[tuple[str, str, float, float]]] = defaultdict(list)
        for kernel, kind, ms in self._sorted_kernels():
            blocks = self.blocks.get((kernel.correlation, kernel.start), 0.0)
            fill = blocks / BLOCKS_AT_ONCE.get(kind, OTHER_BLOCKS) or 1.0
            works[kernel.correlation].append((kind, kernel.name, ms, fill))
        for copy in self._inside(self.copies):
            kind = category_of_copy(copy.name)
            works[copy.correlation].append((kind, copy.name, copy.end - copy.start, 1.0))
        works.pop(None, None)
        return works

    def cpu_pieces(self) -> Iterator[Piece]:
        """A piece for each operator that computes something. The host's own time of a phase
        (Python, views, calling) is shared out evenly among its pieces, up to what calling can take.
        """
        computing = sorted(
            (op.start, op.name, own_ms)
            for slices in self.ops.values()
            for op, own_ms in own_time(self._inside(slices))
            if category_of(op.name) not in COMPUTES_NOTHING and self._phase_at(op.start) != "data"
        )
        operators = self.typed_at([start for start, *_ in computing])
        pieces = [
            Piece(
                category_of(name),
                max(0.0, own_ms - CALLING_MS),
                phase=self._phase_at(start),
                product=operator.product if operator else None,
                dtype=operator.dtype if operator else "",
            )
            for (start, name, own_ms), operator in zip(computing, operators, strict=True)
        ]
        left: Counter[str] = Counter()
        for phase, row in self.host_breakdown().items():
            left["" if phase == "unmarked" else phase] += row["ms"] * self.steps
        del left["data"]
        for piece in pieces:
            left[piece.phase] -= piece.ms
        count = Counter(piece.phase for piece in pieces)
        for piece in pieces:
            even_ms = max(0.0, left[piece.phase]) / count[piece.phase]
            yield replace(piece, host_ms=min(MOST_CALLING_MS, even_ms))
        for phase, ms in left.items():
            beyond_ms = max(0.0, ms - count[phase] * MOST_CALLING_MS)
            yield Piece("other", 0.0, host_ms=beyond_ms, phase=phase)


def queue_of(trace: PieceTrace, data_ms: float | None = None, log_ms: float = 0.0) -> Queue:
    """The traced steps as a queue, the host's time as traced.

    data_ms, log_ms: what a step waits for data and takes to write logs, timed without the profiler;
    they stand in the place of what was traced. None: as traced.
    """
    pieces = list(trace.gpu_pieces() if trace.on_gpu else trace.cpu_pieces())
    if data_ms is None:
        data_ms = total(trace.phase_time.get("data", [])) / trace.steps
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


def _own_ms(start: float, end: float, not_own: Lookup) -> float:
    """The host's own time in between; 0 where it ends before it starts."""
    return end - start - total(not_own.within((start, end))) if end > start else 0.0


def _waits_after(starts: Sequence[float], waits: Sequence[Wait]) -> dict[int, Wait]:
    """Place of a call -> the wait that follows it before the next."""
    return {place: wait for wait in waits if (place := bisect_right(starts, wait.start) - 1) >= 0}


def _reason(wait: Wait, work: str) -> str:
    copies = "HtoD" in work and wait.cause.startswith(("aten::to", "aten::_to", "aten::copy"))
    return TO_DEVICE if copies else READ
