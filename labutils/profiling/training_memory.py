"""What training memory is made of: weights, gradients, optimizer state, and what forward passes
keep for backward ones.

`planned` counts the first three from shapes alone and `saved_for_backward` the fourth, both on the
meta device too, where a model of any size has shapes and takes no memory. `measured` takes a real
step and reads all four off it.

Not counted: what lives only inside one pass (the gradients of activations, workspaces of the
kernels), so that the allocator's peak lies above the total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from labutils.profiling import cuda

PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of each part: `weights` (buffers included), `gradients`, `optimizer` state, and saved
    `activations`.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)

    def in_gb(self) -> dict[str, float]:
        """Part -> 10^9 bytes."""
        return {part: getattr(self, part) / 1e9 for part in PARTS}


def planned(module: nn.Module, activations: int = 0, moments: int = 2) -> TrainingMemory:
    """What training `module` as it is (dtypes, frozen parameters) needs with an optimizer of so
    many `moments`.

    AdamW has two, and keeps them in the dtype of the parameter.
    """
    trained = _bytes(p for p in module.parameters() if p.requires_grad)
    return TrainingMemory(
        weights=_bytes([*module.parameters(), *module.buffers()]),
        gradients=trained,
        optimizer=moments * trained,
        activations=activations,
    )


def measured(
    module: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> TrainingMemory:
    """Take the first step of `optimizer` on `loss()` and read what it left in memory.

    On a GPU the activations are the growth of the allocator over a forward pass; on a CPU, whose
    allocator tells nothing, what autograd was seen to keep. The rest is the size of the tensors
    that model and optimizer hold.
    """
    loss().backward()  # the libraries allocate their workspaces in the first pass
    optimizer.zero_grad(set_to_none=True)
    activations = _growth(loss) if cuda.available() else saved_for_backward(module, loss)
    loss().backward()
    optimizer.step()
    state = (value for entry in optimizer.state.values() for value in entry.values())
    return TrainingMemory(
        weights=_bytes([*module.parameters(), *module.buffers()]),
        gradients=_bytes(p.grad for p in module.parameters() if p.grad is not None),
        optimizer=_bytes(value for value in state if isinstance(value, Tensor)),
        activations=activations,
    )


def _growth(forward: Callable[[], Tensor]) -> int:
    """Bytes by which the GPU's allocator grows while the result of `forward()` is alive."""
    before = torch.cuda.memory_allocated()
    loss = forward()
    return torch.cuda.memory_allocated() - before - loss.element_size()


def saved_for_backward(
    module: nn.Module, forward: Callable[[], Any], autocast: torch.dtype | None = None
) -> int:
    """Bytes that `forward()` makes autograd keep for the backward pass, without `module`'s own
    weights.

    `forward` should return the loss, so that nothing of the graph is dropped. What several
    operations share is counted once. On the meta device attention is counted as a fused kernel
    keeps it: queries, keys, values, result and one number a row, not the matrix of tokens by
    tokens. autocast: to which type the meta device casts what goes into products, where
    `torch.autocast`, which knows no such device, does nothing.
    """
    own = {_storage(t)._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that its address isn't used again
        return (
            tensor.detach()
        )  # an output that its own node holds would be a cycle, and the graph would never be freed

    with saved_tensors_hooks(keep, lambda tensor: tensor), OnMeta(autocast):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


_PRODUCTS = (
    F.linear,
    F.conv2d,
    F.scaled_dot_product_attention,
    torch.conv2d,
    torch.matmul,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
)
"""What autocast computes in fewer bits, as far as the course's models use it."""
_EXACT = (F.group_norm, F.layer_norm, F.softmax, F.mse_loss, F.cross_entropy, torch.Tensor.softmax)
"""What autocast computes in float32, likewise."""


class OnMeta(TorchFunctionMode):
    """The meta device as a GPU: with a fused kernel for attention, which PyTorch computes step by
    step there, and with autocast, if it is given a type."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with (
                self
            ):  # what is computed again there is computed as before; so the engine itself is called
                ones = (torch.ones_like(args[0]),)
                Variable._execution_engine.run_backward(
                    args[:1], ones, False, False, (), True, True
                )
            return None
        if self._autocast and func in (*_PRODUCTS, *_EXACT):
            wanted = (
                (torch.float32, self._autocast)
                if func in _PRODUCTS
                else (self._autocast, torch.float32)
            )
            args = tuple(_cast(value, *wanted) for value in args)
            kwargs = {name: _cast(value, *wanted) for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            query, key, value = (*args, *kwargs.values())[:3]
            if query.is_meta:  # the shapes that a fused kernel returns and saves
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value
                )[0]
        return func(*args, **kwargs)


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """A meta tensor of type `old` as one of type `new`; all else as it is."""
    return (
        value.to(new)
        if isinstance(value, Tensor) and value.is_meta and value.dtype == old
        else value
    )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
