"""The operations that the course's training runs consist of, with their work counted by hand, to be
put on a roofline.

Counts are of the least that any implementation must do: a multiplication and an addition are two
FLOPs, each input is read once and each output written once. What an operation really moves can only
be more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labutils.profiling import cuda

COLD_BYTES = {"cuda": 256 * 2**20, "cpu": 128 * 2**20}
"""Inputs are rotated through this much memory, so that no operation finds its data in a cache from
the last time.
"""


@dataclass(frozen=True)
class Operation:
    """One operation: `flops` and `bytes` of one execution, and `make()`, which builds inputs and
    returns the call.

    `dtype` names the matrix units it can use ("fp32" for those that use none).
    """

    name: str
    shape: str
    dtype: str
    flops: float
    bytes: float
    make: Callable[[], Callable[[], Any]]

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory traffic."""
        return self.flops / self.bytes


def course_operations(scale: str, device: str, dtype: str) -> list[Operation]:
    """Six operations of the course's workloads, at SD1.5's and a 4096-wide language model's sizes;
    smaller at "tiny".

    `dtype` is that of activations and weights: "fp32", "fp16" or "bf16". The optimizer's state is
    always fp32.
    """
    tiny = scale == "tiny"
    batch, channels, tokens, width = (1, 128, 512, 1024) if tiny else (4, 320, 4096, 4096)
    return [
        _convolution(device, dtype, batch, channels, side=64),
        _attention(device, dtype, batch, heads=8, tokens=2 * tokens if tiny else tokens, width=40),
        _linear(device, dtype, tokens, width),
        _thin_products(device, dtype, 4 * tokens, width, rank=8),
        _adamw(device, parameters=2**21 if tiny else 2**24),
        _silu(device, dtype, elements=2**22 if tiny else 2**26),
    ]


def measure_operation(operation: Operation, budget_s: float = 0.1) -> list[float]:
    """Milliseconds of an execution without the host, several times: replayed from a CUDA graph; on
    a CPU, simply called. Its data is not in the caches, and it is brief enough for the clock to
    stay up.
    """
    cold_bytes = COLD_BYTES["cuda" if cuda.available() else "cpu"]
    copies = max(1, min(24, math.ceil(cold_bytes / operation.bytes)))
    calls = [operation.make() for _ in range(copies)]
    in_turn = functools.partial(_call_all, calls)
    with torch.no_grad():
        if replay := cuda.graph_of(in_turn):
            alone = _of_one(cuda.timed_in_bursts(replay, burst_s=budget_s / 10), copies)
        else:  # call by call: one that another program held up would spoil a whole round
            turns = itertools.cycle(calls)
            alone = _of_one(cuda.timed(lambda: next(turns)(), budget_s, copies, at_least=7), 1)
    del calls, in_turn, replay
    cuda.empty_cache()
    return alone


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _of_one(times_ms: Sequence[float], calls: int) -> list[float]:
    """Milliseconds of one call out of those of `calls`: at most 60 samples in five figures, enough
    for a record.
    """
    return [float(f"{ms / calls:.5g}") for ms in times_ms[:60]]


TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _random(shape: tuple[int, ...], device: str, dtype: str) -> Tensor:
    return torch.randn(shape, device=device).to(TORCH_DTYPES[dtype])


def _convolution(device: str, dtype: str, batch: int, channels: int, side: int) -> Operation:
    """A 3x3 convolution of SD1.5's UNet at its highest resolution (512 px images are 64x64 there),
    channels last.
    """

    def make() -> Callable[[], Any]:
        shapes = (batch, channels, side, side), (channels, channels, 3, 3)
        tensors = (_random(shape, device, dtype) for shape in shapes)
        image, weight = (t.to(memory_format=torch.channels_last) for t in tensors)
        return lambda: F.conv2d(image, weight, padding=1)

    pixels, size = batch * side * side, TORCH_DTYPES[dtype].itemsize
    flops = 2 * pixels * channels * channels * 9
    moved = (2 * pixels * channels + 9 * channels * channels) * size
    shape = f"{batch}x{channels}x{side}x{side}, 3x3"
    return Operation("UNet convolution", shape, dtype, flops, moved, make)


def _attention(
    device: str, dtype: str, batch: int, heads: int, tokens: int, width: int
) -> Operation:
    """Self-attention; its score matrix need never reach memory, so it does not count as traffic."""

    def make() -> Callable[[], Any]:
        q, k, v = (_random((batch, heads, tokens, width), device, dtype) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v)

    flops = 4 * batch * heads * tokens * tokens * width
    moved = 4 * batch * heads * tokens * width * TORCH_DTYPES[dtype].itemsize
    shape = f"{batch}x{heads} heads, {tokens}x{width}"
    return Operation("Self-attention", shape, dtype, flops, moved, make)


def _linear(device: str, dtype: str, tokens: int, width: int) -> Operation:
    """A frozen projection of a language model."""

    def make() -> Callable[[], Any]:
        x, weight = _random((tokens, width), device, dtype), _random((width, width), device, dtype)
        return lambda: F.linear(x, weight)

    moved = (2 * tokens * width + width * width) * TORCH_DTYPES[dtype].itemsize
    shape, flops = f"{tokens}x{width} by {width}x{width}", 2 * tokens * width * width
    return Operation("Frozen projection", shape, dtype, flops, moved, make)


def _thin_products(device: str, dtype: str, tokens: int, width: int, rank: int) -> Operation:
    """What LoRA adds to a projection: (x A^T) B^T with matrices of `rank` rows and columns."""

    def make() -> Callable[[], Any]:
        shapes = (tokens, width), (rank, width), (width, rank)
        x, a, b = (_random(shape, device, dtype) for shape in shapes)
        return lambda: F.linear(F.linear(x, a), b)

    numbers = 2 * tokens * width + 2 * tokens * rank + 2 * rank * width
    moved = numbers * TORCH_DTYPES[dtype].itemsize
    shape, flops = f"{tokens}x{width}, r={rank}", 4 * tokens * width * rank
    return Operation("LoRA's products", shape, dtype, flops, moved, make)


def _adamw(device: str, parameters: int) -> Operation:
    """One AdamW update in fp32, fused: reads weight, gradient and two moments, writes all but the
    gradient.

    About 14 FLOPs a parameter: 3 for each moment's average and the square, 2 for the weight decay,
    5 for the division.
    """

    def make() -> Callable[[], Any]:
        weight = torch.nn.Parameter(torch.randn(parameters, device=device))
        weight.grad = torch.randn_like(weight)
        return torch.optim.AdamW([weight], fused=True, capturable=device == "cuda").step

    shape = f"{parameters / 1e6:.1f} M parameters"
    return Operation("AdamW update", shape, "fp32", 14 * parameters, 28 * parameters, make)


def _silu(device: str, dtype: str, elements: int) -> Operation:
    """An activation function by itself: exponential, addition, division, product."""

    def make() -> Callable[[], Any]:
        x = _random((elements,), device, dtype)
        return lambda: F.silu(x)

    moved = 2 * elements * TORCH_DTYPES[dtype].itemsize
    return Operation("SiLU", f"{elements / 1e6:.1f} M elements", dtype, 4 * elements, moved, make)
