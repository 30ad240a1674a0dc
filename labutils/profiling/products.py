"""Matrix products of a training step: their sizes as a trace has them, and what they take here in
each format.

A product's gain from a format depends on its size and on how its matrices lie in memory: a few rows
against a large matrix are bound by memory in every format. So a step's own products are timed.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from labutils.profiling import cuda
from labutils.profiling.call_stacks import Slice, enclosing
from labutils.profiling.measured_rates import probe_machine, products_as
from labutils.profiling.trace import Trace

FORMATS = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "double": "fp64"}
_TYPED = re.compile(  # their shapes are in the trace: `trace._HAS_SHAPES`
    r"^aten::(mm|addmm|bmm|baddbmm|_?convolution\w*|cudnn_convolution\w*|mkldnn_convolution\w*|"
    r"_scaled_dot_product\w+|masked_fill_?|where|add_?)$"
)
_FORWARD_ONLY = re.compile(r"aten::(linear|conv2d|scaled_dot_product_attention|matmul)$")
_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Product:
    """`count` matrix products [m, k] x [k, n] side by side, in "fp32", "tf32", "bf16" or "fp16".
    `turned`: which of the two matrices lie in memory column by column. `causal`: an attention's
    scores of which the upper half is masked."""

    m: int
    n: int
    k: int
    count: int = 1
    dtype: str = "fp32"
    turned: tuple[bool, bool] = (False, False)
    causal: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def sides(self) -> tuple[int, ...]:
        """`count` and the sizes in any order: the same for all products of an attention."""
        return self.count, *sorted((self.m, self.n, self.k))

    def in_format(self, dtype: str) -> Product:
        return replace(self, dtype=dtype)


def dtype_of(operator: Slice | None) -> str:
    """The format of an operator's first input of floating point; "" where none was recorded."""
    types = operator.types or () if operator else ()
    return next((FORMATS[kind] for kind in types if kind in FORMATS), "")


def product_of(operator: Slice | None) -> Product | None:
    """The matrix product that an operator computes; None where it is none, or its shapes are
    unknown.
    """
    if operator is None or not operator.name.endswith("mm"):
        return None
    strides = operator.strides or [None] * len(operator.dims or ())
    matrices = [
        (shape, bool(steps) and steps[-1] != 1 and steps[-2] == 1)
        for shape, steps in zip(operator.dims or (), strides, strict=False)
        if len(shape) in (2, 3) and all(isinstance(size, int) for size in shape)
    ]
    if len(matrices) < 2:
        return None
    (first, one), (second, other) = matrices[-2:]
    if first[-1] != second[-2]:
        return None
    count, dtype = first[0] if len(first) == 3 else 1, dtype_of(operator) or "fp32"
    return Product(first[-2], second[-1], first[-1], count, dtype, (one, other))


def masks_queries(operator: Slice | None) -> bool:
    """Whether an operator may mask an attention's scores, with a row for each query and the same
    for all heads. A causal mask does so, and so does any other of that shape, as a trace has no
    values. Padding's mask of one row and a bias of each head's own don't."""
    shapes = [shape for shape in (operator.dims or () if operator else ()) if len(shape or ()) > 1]
    scores = max(shapes, key=len, default=[])
    alike = [s for s in shapes if s != scores and s[-2:] == scores[-2:] and s[-3:-2] in ([], [1])]
    return bool(alike) and scores[-1] == scores[-2]


def operators_at(trace: Trace, moments: Sequence[float]) -> list[Slice | None]:
    """The operator of products, or of masks, that runs at each of `moments` (ascending), on any
    thread: one thread computes at a time.
    """
    typed = [op for ops in trace.ops.values() for op in ops if _TYPED.match(op.name)]
    typed.sort(key=lambda operator: (operator.start, -operator.end))
    return [stack[-1] if stack else None for stack in enclosing(typed, moments)]


def recomputed(trace: Trace) -> float:
    """How much of the forward pass is computed again in the backward pass, from 0 to 1.

    That is operators that only forward passes call, inside autograd's nodes, over those outside.
    Encoders that are marked as such don't count.
    """
    inside = outside = 0
    for slices in trace.ops.values():
        node_end = float("-inf")
        for operator in trace.recorded(slices):
            if operator.name.startswith(_NODE):
                node_end = max(node_end, operator.end)
            elif _FORWARD_ONLY.match(operator.name):
                again = operator.start < node_end
                inside += again
                outside += not again and trace.phase_at(operator.start) != "encode"
    return min(1.0, inside / outside) if outside else 0.0


BUDGET_S = 4.0
"""All products together may be timed so long."""
LARGEST = 4e9
"""Numbers of a product's matrices beyond which it isn't tried."""
SHEET = {"fp32": 1.0, "tf32": 6.0, "bf16": 12.0, "fp16": 12.0}
"""How many times as fast as fp32 large products are on a data-centre GPU, for traces of another
machine: on an H200 the data sheet says 67, 495 and 989 TFLOP/s, of which 6 and 12 times were
reached."""


@dataclass
class Rates:
    """Milliseconds of products on `device`; `here`: whether the step ran on this machine."""

    device: str
    here: bool = True
    known: dict[tuple[str, Product], float | None] = field(default_factory=dict)
    spent_s: float = 0.0

    def ratio(self, product: Product, dtype: str) -> float:
        """How many times as long the product takes in `dtype` as in its own format."""
        if self.here and product.dtype in SHEET and product.dtype != dtype:
            own, other = self._ms(product), self._ms(product.in_format(dtype))
            if own is not None and other is not None:
                return other / own
        return self.large(product.dtype, dtype)

    def large(self, one: str, other: str) -> float:
        """The ratio of large products, as the machine's probe measured it; 1 where it lacks one of
        the formats.
        """
        if one not in SHEET or other not in SHEET:
            return 1.0
        if not self.here:
            return SHEET[one] / SHEET[other]
        probed = probe_machine(f"tflops_{one}", f"tflops_{other}")
        rates = probed.rate(one), probed.rate(other)
        return rates[0] / rates[1] if all(rates) else 1.0

    def flops_ms(self, flops: float, dtype: str) -> float:
        """Milliseconds of so many FLOPs at the machine's own rate of large products; 0 where it is
        not known.
        """
        if not self.here or dtype not in SHEET:
            return 0.0
        rate = probe_machine(f"tflops_{dtype}").rate(dtype)
        return flops / (rate * 1e9) if rate else 0.0

    def moved_ms(self, bytes: float) -> float:
        """Milliseconds of so many bytes at the memory's measured rate."""
        rate = probe_machine("copy_gb_per_s").median("copy_gb_per_s") if self.here else None
        return bytes / ((rate or (3000 if self.device == "cuda" else 10)) * 1e6)

    def attention_ms(self, shape: Product, backward: bool) -> float | None:
        """Milliseconds of PyTorch's attention of `count` heads: m queries, n keys, k wide."""
        forward = self._ms(shape, "forward pass") if self.here else None
        if forward is None or not backward:
            return forward
        both = self._ms(shape, "both passes")
        return both - forward if both and both > forward else None

    def _ms(self, product: Product, what: str = "product") -> float | None:
        if (what, product) not in self.known:
            began, ms = time.perf_counter(), None
            if self.spent_s < BUDGET_S:
                ms = _timed(product, what, self.device)
            self.known[what, product] = ms
            self.spent_s += time.perf_counter() - began
        return self.known[what, product]


SHORT = 2e10
"""FLOPs up to which a product is timed ten at once."""


def _timed(product: Product, what: str, device: str) -> float | None:
    """Milliseconds of the device: on a GPU in a CUDA graph, without launches. None where it can't
    be tried: it has no such format, or no memory for it."""
    m, n, k, count = product.m, product.n, product.k, product.count
    if count * (m * k + k * n + m * n) > LARGEST or min(m, n, k, count) < 1:
        return None
    several = 10 if device == "cuda" and product.flops < SHORT else 1
    try:
        with products_as(product.dtype):
            if what == "product":
                call = _several(product, several, device)
            else:
                call = _attention(product, several, device, backward=what == "both passes")
            call()
            replay = cuda.graph_of(call) if device == "cuda" else None  # `call` holds its tensors
            return statistics.median(cuda.timed(replay or call, 0.02, at_least=3)) / several
    except (RuntimeError, ValueError):
        return None


def _several(product: Product, several: int, device: str) -> Callable[[], Any]:
    """So many of the products, in the layout that the step has them in: rows that begin at odd
    places are much slower, and which side has the rows depends on it."""
    sides = ((product.m, product.k), (product.k, product.n))
    a, b = (
        _random(device, product.dtype, product.count, *(side[::-1] if turned else side))
        for side, turned in zip(sides, product.turned, strict=True)
    )
    a, b = (x.mT if turned else x for x, turned in zip((a, b), product.turned, strict=True))
    if product.count == 1:
        a, b = a[0], b[0]
    out = torch.matmul(a, b)

    def call() -> None:
        for _ in range(several):
            torch.matmul(a, b, out=out)

    return call


def _attention(shape: Product, several: int, device: str, backward: bool) -> Callable[[], Any]:
    sides = (shape.m, shape.n, shape.n)
    q, k, v = (_random(device, shape.dtype, 1, shape.count, side, shape.k) for side in sides)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def call() -> None:
        for _ in range(several):
            out = scaled_dot_product_attention(*inputs, is_causal=shape.causal)
            if backward:
                torch.autograd.grad(out, inputs, q.detach())

    return call


def _random(device: str, dtype: str, *shape: int) -> torch.Tensor:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.randn(*shape, device=device, dtype=kinds.get(dtype, torch.float32))
