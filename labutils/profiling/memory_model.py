"""What training memory is made of, predicted: weights, gradients, optimizer state, and what forward
passes keep for backward ones.

`planned` counts the first three from shapes alone and `saved_for_backward` the fourth. Both work on
the meta device too, where a model of any size has shapes and takes no memory.

Not counted: what lives only inside one pass (the gradients of activations, workspaces of the
kernels), so that the allocator's peak lies above their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from labutils.profiling import compat


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of `weights`, buffers included, `gradients`, `optimizer` state, kept `activations`."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def in_gb(self) -> dict[str, float]:
        """Part -> 10^9 bytes."""
        return {part: size / 1e9 for part, size in asdict(self).items()}


def planned(module: nn.Module, activations: int = 0) -> TrainingMemory:
    """What training `module` as it is (dtypes, frozen parameters) needs with AdamW, which keeps two
    moments in the dtype of the parameter.
    """
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    return TrainingMemory(weights, trained, 2 * trained, activations)


def saved_for_backward(
    module: nn.Module, forward: Callable[[], Any], autocast: torch.dtype | None = None
) -> int:
    """Bytes that `forward()` makes autograd keep for the backward pass, without `module`'s own
    weights.

    `forward` should return the loss, so that nothing of the graph is dropped. What several
    operations share is counted once. On the meta device attention is counted as a fused kernel
    keeps it: queries, keys, values, result and one number a row, not the matrix of tokens by
    tokens. autocast: the type to which the inputs of products are cast on the meta device.
    `torch.autocast` does nothing there.
    """
    own = {
        compat.storage_id(t.untyped_storage()) for t in (*module.parameters(), *module.buffers())
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if compat.storage_id(storage) not in own:
            kept[compat.storage_id(storage)] = storage  # held, so that its address isn't used again
        # Detached: an output that its own node holds would be a cycle that is never freed.
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda tensor: tensor), OnMeta(autocast):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


_PRODUCTS = (
    *(F.linear, F.conv2d, F.scaled_dot_product_attention, torch.conv2d, torch.matmul, torch.bmm),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__),
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
            # Checkpointed code is computed again there, and must be computed as before. So the
            # engine itself is called, inside this mode.
            with self:
                compat.run_backward(args[0])
            return None
        if self._autocast and func in (*_PRODUCTS, *_EXACT):
            types = torch.float32, self._autocast
            old, new = types if func in _PRODUCTS else types[::-1]
            args = tuple(_cast(value, old, new) for value in args)
            kwargs = {name: _cast(value, old, new) for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            inputs = (*args, *kwargs.values())[:3]
            if inputs[0].is_meta:  # the shapes that a fused kernel returns and saves
                return compat.flash_attention_for_cpu(*inputs)
        return func(*args, **kwargs)


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """A meta tensor of type `old` as one of type `new`; all else as it is."""
    meta = isinstance(value, Tensor) and value.is_meta
    return value.to(new) if meta and value.dtype == old else value


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({compat.storage_id(storage): storage.nbytes() for storage in storages}.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, and what bitsandbytes holds beside 4-bit parameters."""
    tensors = [*module.parameters(), *module.buffers()]
    for state in [p.quant_state for p in tensors if getattr(p, "quant_state", None) is not None]:
        tensors += [state.absmax, state.state2.absmax] if state.nested else [state.absmax]
    return [tensor for tensor in tensors if tensor is not None]
