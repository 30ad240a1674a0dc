"""Activation checkpointing: a block's input is kept, and the block is computed again in the
backward pass. Three forms beside PyTorch's own:

    keeping_products(block, x)           keeps the results of products, computes the rest again
    forward = recomputing_within(block)  is compiled, and skips what the backward pass won't need
    run = offloading(layer, Parking())   keeps the block's input on the host

Offloading: what is kept is one tensor as large as the hidden states for each block. It leaves the
GPU as soon as the block has run. It comes back while the block behind it is computed again, on a
stream of its own both times. (unsloth's "gradient checkpointing" does this; article A3, appendix.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Run = Callable[[Tensor], Tensor]

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default)
"""Beside attention, what takes nearly all of a block's time. Their results are worth keeping."""
THIN = 32
"""Products over fewer numbers are a low-rank adapter's: the result is as large as a wide one's, and
takes next to no time.
"""


def keeping_products(block: Callable[..., Any], *inputs: Any) -> Any:
    """`block` on `inputs`, checkpointed selectively: its input and the results of `PRODUCTS` and
    attention are kept. Elementwise operations and norms are computed again in the backward pass."""
    kept = functools.partial(create_selective_checkpoint_contexts, _products_and_attention)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=kept)


def recomputing_within(block: Callable[..., Any]) -> Callable[..., Any]:
    """`block` checkpointed, as a function that is to be compiled: the second computation is then
    part of the code of its backward pass.

    A checkpoint around a compiled block runs all of that block's code once more. Within, the
    compiler sees what the backward pass needs, and leaves out the rest: a decoder's block ends with
    the product of its MLP, a quarter of its arithmetic, whose result nothing but the next block
    reads. The block must draw no random numbers.
    """

    def forward(*inputs: Any, **named: Any) -> Any:
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **named)

    return forward


def _products_and_attention(
    context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Operators that attend are known by their names: which one it is depends on the device and the
    PyTorch version. Attention of packed rows (`torch_attn::_varlen_attn`) and attention with sinks
    (`labutils::attention_with_sinks`) are operators of their own. On a CPU with a mask, PyTorch
    computes attention by plain products, and no operator has the name."""
    attends = "attention" in str(operation) or "attn" in str(operation)
    thin = operation in (aten.mm.default, aten.addmm.default) and args[-1].shape[0] < THIN
    kept = attends or (operation in PRODUCTS and not thin)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Parked:
    """A tensor that waits on the host. `before` is the one parked before it, which is wanted after
    it.
    """

    def __init__(self, lot: Parking, tensor: Tensor) -> None:
        self.lot, self.device = lot, tensor.device
        self.before = lot.last() if lot.last else None
        self.arriving: Tensor | None = None
        self.room = lot.room_for(tensor)
        self.host = self.room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if lot.side is not None:
            lot.side.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(lot.side)  # its memory is given to others after it has been read
        with torch.cuda.stream(lot.side):
            self.host.copy_(tensor, non_blocking=True)

    def start_back(self) -> None:
        """Start the way back to the device."""
        if self.arriving is None:
            with torch.cuda.stream(self.lot.side):
                self.arriving = self.host.to(self.device, non_blocking=True, copy=True)

    def back(self) -> Tensor:
        """The tensor on its device; the one that is wanted next starts its way back."""
        self.start_back()
        tensor, self.arriving = self.arriving, None
        if self.lot.side is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.lot.side)
            tensor.record_stream(here)
        if self.before is not None:
            self.before.start_back()
        return tensor


class Parking:
    """Page-locked host memory that one model's kept inputs share, pass after pass.

    Rooms are plain bytes, at least `room_bytes` each: page-locking takes longer than a block does,
    so that a room for the largest tensor that is expected serves all others as well. All copies
    run on one stream in the order in which they were asked for, so that memory can be taken again
    while its last copy is still under way.
    """

    def __init__(self, room_bytes: int = 0) -> None:
        self.room_bytes = room_bytes
        self.free: list[Tensor] = []
        self.side: torch.cuda.Stream | None = None  # copies from and to a GPU
        self.last: weakref.ref[Parked] | None = None

    def park(self, tensor: Tensor) -> Parked:
        """Send `tensor` to the host. Its room is free again when nobody holds what this returns."""
        if tensor.is_cuda and self.side is None:
            self.side = torch.cuda.Stream(tensor.device)
        parked = Parked(self, tensor)
        self.last = weakref.ref(parked)
        weakref.finalize(parked, self.free.append, parked.room).atexit = False
        return parked

    def room_for(self, tensor: Tensor) -> Tensor:
        """The smallest free room that holds `tensor`, or a new one, uint8 [bytes]."""
        fitting = [place for place, room in enumerate(self.free) if room.nbytes >= tensor.nbytes]
        if fitting:
            return self.free.pop(min(fitting, key=lambda place: self.free[place].nbytes))
        size = max(self.room_bytes, tensor.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)


def offloading(block: nn.Module, parking: Parking) -> Callable[[Run, Tensor], Tensor]:
    """What runs `block` on a tensor now and once more in the backward pass, and parks the tensor in
    between.

    Returns a function of (run, x), `run` being the block with everything but its first input filled
    in. Gradients reach `x` and those of the block's parameters that are trained. The block must
    draw no random numbers.
    """

    def forward(run: Run, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return run(x)
        return _Offloaded.apply(
            run, parking, x, *(p for p in block.parameters() if p.requires_grad)
        )

    return forward


class _Offloaded(torch.autograd.Function):
    """Trained parameters are inputs of the function, so that the result needs a gradient even where
    `x` does not.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, parking: Parking, x: Tensor, *trained: Tensor) -> Tensor:
        kind = x.device.type
        ctx.run, ctx.parked, ctx.trained = run, parking.park(x), trained
        ctx.wanted = x.requires_grad
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        with torch.enable_grad():  # so that a compiled block has one form for both passes
            return run(x.detach().requires_grad_(ctx.wanted)).detach()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        kind, dtype, enabled = ctx.autocast
        x = ctx.parked.back().requires_grad_(ctx.wanted)
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled=enabled):
            out = ctx.run(x)
        inputs = ([x] if ctx.wanted else []) + list(ctx.trained)
        gradients = torch.autograd.grad(out, inputs, slopes)
        ctx.parked = None
        return (None, None, *(gradients if ctx.wanted else (None, *gradients)))
