"""A trace read for a diagnosis: its pieces of work, with the formats and sizes of matrix products
and how much of the GPU each kernel fills."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labutils.profiling.call_stacks import Slice, enclosing, own_time
from labutils.profiling.intervals import Lookup, difference, total, union
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
BLOCKS_AT_ONCE = {"GEMM": 1, "thin GEMM": 1, "attention": 1, "convolution": 1}
"""How many thread blocks a multiprocessor holds at once, roughly: products' take all of its shared
memory.
"""
OTHER_BLOCKS = 8
_TYPED = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|_?convolution\w*|cudnn_convolution\w*|mkldnn_convolution\w*|"
    r"_scaled_dot_product\w+)$"
)
_FORWARD_ONLY = (
    "aten::linear",
    "aten::conv2d",
    "aten::scaled_dot_product_attention",
    "aten::matmul",
)
_UPDATE = "Optimizer.step#"
_NODE = "autograd::engine::evaluate_function"


class PieceTrace(Trace):
    """A trace that also keeps what a diagnosis needs: products' types, kernels' grids, the GPU's
    name.
    """

    def __init__(self, events: Iterable[dict[str, Any]], path: Path | None = None) -> None:
        self.typed: dict[Any, list[tuple[Slice, Any]]] = defaultdict(list)
        self.blocks: dict[tuple[int | None, float], float] = {}
        self._updates: list[Slice] = []
        super().__init__(events, path)
        for slices in self.typed.values():
            slices.sort(key=lambda pair: (pair[0].start, -pair[0].end))
        if not any(mark.name == "optimizer" for mark in self.annotations):
            self.annotations = sorted(
                [*self.annotations, *self._updates], key=lambda mark: mark[:2]
            )

    def _keep(self, event: dict[str, Any], start: float, end: float) -> None:
        super()._keep(event, start, end)
        kind, name, args = event.get("cat", ""), str(event.get("name", "")), event.get("args") or {}
        if kind == "cpu_op" and _TYPED.match(name):
            dims, types = args.get("Input Dims"), args.get("Input type")
            self.typed[event.get("tid")].append((Slice(start, end, name, dims), types))
        elif kind == "kernel" and "blocks per SM" in args:
            self.blocks[args.get("correlation"), start] = float(args["blocks per SM"])
        elif kind == "user_annotation" and name.startswith(_UPDATE):
            self._updates.append(Slice(start, end, "optimizer"))

    def product_at(self, thread: Any, moments: Sequence[float]) -> list[tuple[Product | None, str]]:
        """(the product that an operator computes, its format) at each of `moments` (ascending) on
        one thread.
        """
        pairs = self.typed.get(thread, [])
        types = {id(operator): kinds for operator, kinds in pairs}
        stacks = enclosing([operator for operator, _ in pairs], moments)
        return [
            _product_of(stack[-1], types[id(stack[-1])]) if stack else (None, "")
            for stack in stacks
        ]

    def recomputed(self) -> float:
        """How much of the forward pass is computed again in the backward pass, from 0 to 1:
        operators that only forward passes call, inside autograd's nodes, over those outside.
        Encoders that are marked as such don't count."""
        inside = outside = 0
        for slices in self.ops.values():
            stack_end = float("-inf")
            for operator in self._inside(slices):
                if operator.name.startswith(_NODE):
                    stack_end = max(stack_end, operator.end)
                elif operator.name in _FORWARD_ONLY:
                    again = operator.start < stack_end
                    inside += again
                    outside += not again and self._phase_at(operator.start) != "encode"
        return min(1.0, inside / outside) if outside else 0.0

    # The pieces of work

    def gpu_pieces(self) -> Iterator[Piece]:
        """A piece for each kernel and copy, in the order in which they were given."""
        works: dict[int | None, list[tuple[str, str, float, float]]] = defaultdict(list)
        for kernel, kind, ms in self._sorted_kernels():
            filled = self.blocks.get((kernel.correlation, kernel.start), 0.0)
            works[kernel.correlation].append(
                (kind, kernel.name, ms, filled / BLOCKS_AT_ONCE.get(kind, OTHER_BLOCKS))
            )
        for copy in self._inside(self.copies):
            kind = category_of_copy(copy.name)
            works[copy.correlation].append((kind, copy.name, copy.end - copy.start, 1.0))
        once = {
            call.correlation: call
            for call in reversed(self._inside(self.calls))
            if call.correlation in works
        }
        calls = sorted(
            (call for key, call in once.items() if key is not None), key=lambda call: call.start
        )
        end = self._end_of_host()
        waits = _waits_after(
            [call.start for call in calls], [wait for wait in self.waits if wait.start < end]
        )
        products = self._products(calls)
        not_own = Lookup(
            union([*((w.start, w.end) for w in self.waits), *self.phase_time.get("data", [])])
        )
        last = self.wall[0]
        for place, call in enumerate(calls):
            host = (
                max(0.0, call.end - last) - total(not_own.within((last, call.end)))
                if call.end > last
                else 0.0
            )
            last = max(last, call.end)
            product, dtype = products[place]
            items = works[call.correlation]
            for index, (kind, name, ms, fill) in enumerate(items):
                waited = waits.get(place) if index == len(items) - 1 else None
                yield Piece(
                    kind,
                    ms,
                    host_ms=host if index == 0 else 0.0,
                    phase=self._phase_at(call.start),
                    waits=_reason(waited, name) if waited else "",
                    product=product if kind in ("GEMM", "thin GEMM") and len(items) == 1 else None,
                    dtype=_format_of(name) or dtype,
                    fill=fill or 1.0,
                )
        left = difference([(last, self.wall[1])], not_own.within((last, self.wall[1])))
        yield Piece("other", 0.0, host_ms=self._until_the_host_ended(left))

    def _until_the_host_ended(self, left: Sequence[tuple[float, float]]) -> float:
        """Of the time after the last launch, what the host took until it had done the last recorded
        step.
        """
        end = self._end_of_host()
        return sum(max(0.0, min(b, end) - a) for a, b in left)

    def _end_of_host(self) -> float:
        """When the host had done the last recorded step; after that the profiler itself waits for
        the GPU.
        """
        return self._windows[-1][2] if self._windows else self.wall[1]

    def _products(self, calls: Sequence[Any]) -> list[tuple[Product | None, str]]:
        found: list[tuple[Product | None, str]] = [(None, "")] * len(calls)
        by_thread: dict[Any, list[int]] = defaultdict(list)
        for place, call in enumerate(calls):
            by_thread[call.thread].append(place)
        for thread, places in by_thread.items():
            at = self.product_at(thread, [calls[place].start for place in places])
            for place, product in zip(places, at, strict=True):
                found[place] = product
        return found

    def cpu_pieces(self) -> Iterator[Piece]:
        """A piece for each operator that computes something. The host's own time of a phase
        (Python, views, calling) is shared out evenly among its pieces, up to what calling can take.
        """
        found: list[tuple[float, Piece]] = []
        for thread, slices in self.ops.items():
            own = [
                (op, ms)
                for op, ms in own_time(self._inside(slices))
                if category_of(op.name) not in COMPUTES_NOTHING
            ]
            own.sort(key=lambda pair: pair[0].start)
            products = self.product_at(thread, [op.start for op, _ in own])
            for (op, ms), (product, dtype) in zip(own, products, strict=True):
                phase = self._phase_at(op.start)
                if phase != "data":
                    kind = category_of(op.name)
                    work = Piece(
                        kind, max(0.0, ms - CALLING_MS), phase=phase, product=product, dtype=dtype
                    )
                    found.append((op.start, work))
        found.sort(key=lambda pair: pair[0])
        pieces = [piece for _, piece in found]
        spans = {
            name: row["ms"] * self.steps
            for name, row in self.host_breakdown().items()
            if name != "data"
        }
        spans[""] = spans.pop("unmarked", 0.0)
        working: dict[str, float] = defaultdict(float)
        count: dict[str, int] = defaultdict(int)
        for piece in pieces:
            working[piece.phase] += piece.ms
            count[piece.phase] += 1
        left = {name: max(0.0, span - working[name]) for name, span in spans.items()}
        calling = {
            name: min(MOST_CALLING_MS, left.get(name, 0.0) / number)
            for name, number in count.items()
        }
        for piece in pieces:
            yield replace(piece, host_ms=calling[piece.phase])
        for name, ms in left.items():
            yield Piece("other", 0.0, host_ms=ms - count[name] * calling.get(name, 0.0), phase=name)


def _product_of(operator: Slice, types: Any) -> tuple[Product | None, str]:
    named = [FORMATS[kind] for kind in types or () if kind in FORMATS]
    dtype = named[0] if named else ""
    matrices = [
        d
        for d in operator.dims or ()
        if len(d) in (2, 3) and all(isinstance(size, int) for size in d)
    ]
    if not operator.name.endswith("mm") or len(matrices) < 2:
        return None, dtype
    first, second = matrices[-2:]
    if first[-1] != second[-2]:
        return None, dtype
    return Product(
        first[-2], second[-1], first[-1], first[0] if len(first) == 3 else 1, dtype or "fp32"
    ), dtype


def queue_of(trace: PieceTrace, data_ms: float | None = None, log_ms: float = 0.0) -> Queue:
    """The traced steps as a queue, the host's time as traced.

    data_ms, log_ms: what a step waits for data and takes to write logs, timed without the profiler;
    they stand in the place of what was traced. None: as traced.
    """
    pieces = list(trace.gpu_pieces() if trace.on_gpu else trace.cpu_pieces())
    lumps = trace.phase_time.get("data", [])
    traced = total(lumps) / trace.steps
    pieces = _with_data(pieces, trace.steps, traced if data_ms is None else data_ms)
    return Queue(
        tuple(_with_log(pieces, log_ms * trace.steps, trace.steps)), trace.steps, not trace.on_gpu
    )


def _waits_after(starts: Sequence[float], waits: Sequence[Wait]) -> dict[int, Wait]:
    """Place of a call -> the wait that follows it before the next."""
    return {place: wait for wait in waits if (place := bisect_right(starts, wait.start) - 1) >= 0}


def _reason(wait: Wait, work: str) -> str:
    return (
        TO_DEVICE
        if "HtoD" in work and wait.cause.startswith(("aten::to", "aten::_to", "aten::copy"))
        else READ
    )


def _format_of(kernel: str) -> str:
    """ "tf32" or "fp32" where a product's kernel says so in its name; "" where the operator's
    inputs have to tell.
    """
    name = kernel.lower()
    if "tf32" in name or ("s1688" in name and not any(half in name for half in ("f16", "fp16"))):
        return "tf32"
    return (
        "fp32" if any(sign in name for sign in ("sgemm", "simt", "f32f32_f32f32", "ffma")) else ""
    )


def _with_data(pieces: list[Piece], steps: int, data_ms: float) -> list[Piece]:
    """`data_ms` a step stands before the first piece of each; steps have as many pieces as each
    other.
    """
    if not pieces or data_ms <= 0:
        return pieces
    count = min(len(pieces), steps)
    places = {step * len(pieces) // count for step in range(count)}
    return [
        replace(p, data_ms=data_ms * steps / count) if place in places else p
        for place, p in enumerate(pieces)
    ]


def _with_log(pieces: list[Piece], log_ms: float, steps: int) -> list[Piece]:
    """Writing is taken out of the longest stretches of the host's time, one a step, and stands
    there as `log_ms`.
    """
    if log_ms <= 0 or not pieces:
        return pieces
    longest = sorted(range(len(pieces)), key=lambda place: -pieces[place].host_ms)[:steps]
    each_ms = log_ms / len(longest)
    found = list(pieces)
    for place in longest:
        piece = found[place]
        found[place] = replace(piece, log_ms=each_ms, host_ms=max(0.0, piece.host_ms - each_ms))
    return found
