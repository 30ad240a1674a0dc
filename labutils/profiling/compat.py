"""Every use of a library's private interface, in one place.

Each function says what it needs the interface for. tests/training/test_compat.py calls those that
no other test on a CPU holds against something independent: an upgrade that moves one fails by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "tree_leaves"]

# ------------------------------------------------------------------------------ accelerate


def forget_other_precision(precision: str) -> None:
    """Let accelerate take `precision` where it has another one: it holds one a process and refuses
    a second. Trainers of the other precision must have ended.
    """
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()


# ------------------------------------------------------------------------------ PyTorch


def end_workers(loader: Any) -> None:
    """End a loader's persistent workers now. Left to the garbage collector, each of them would hold
    it up for five seconds. accelerate's loader keeps PyTorch's inside.
    """
    getattr(loader, "base_dataloader", loader)._iterator = None


def loss_scale(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """The tensors that an enabled scaler changes in place, once it has scaled something."""
    return [scaler._scale, scaler._growth_tracker]


def variants_limited(limit: int) -> AbstractContextManager:
    """A context in which a function that needs more than `limit` compiled variants raises
    `FailOnRecompileLimitHit` instead of running uncompiled.
    """
    return torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=limit)


def ask_cpp_compiler() -> None:
    """Let Inductor find out what the C++ compiler can do, where a CPU's kernels are wanted.

    This takes ten seconds where its cache has no answers, whatever the model. Called before
    `compile_from_nothing`, it leaves the answers in the machine's own cache, and no first step
    contains the ten seconds.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    with suppress(InvalidCxxCompiler):  # the step that wants one says so
        pick_vec_isa()


def run_backward(loss: Tensor) -> None:
    """`loss.backward()`, past a TorchFunctionMode that watches `Tensor.backward`."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def storage_id(storage: torch.UntypedStorage) -> int:
    """One number a storage, for as long as it lives; also for storages without memory (meta)."""
    return storage._cdata


def record_memory_history() -> None:
    """Have the CUDA allocator keep its events, from nothing on."""
    torch.cuda.memory._record_memory_history(enabled=None)  # forgets an earlier record
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)


def memory_history() -> list[dict[str, Any]]:
    """The events that the allocator of the current device has kept so far."""
    device = torch.cuda.current_device()
    return torch.cuda.memory._snapshot(device)["device_traces"][device]


def stop_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def release_workspaces() -> None:
    """Give back what cuBLAS's handles hold of the allocator's memory; the next product takes it
    anew.
    """
    torch._C._cuda_clearCublasWorkspaces()


def load_machine_code(code: bytes) -> None:
    """Have the driver load a compiled kernel. Raises `RuntimeError`, with the driver's words, where
    it refuses.
    """
    from torch.cuda._utils import _cuda_load_module

    _cuda_load_module(code)


def capability_warning() -> None:
    """Have PyTorch compare this GPU with the architectures it was built for, and warn."""
    torch.cuda._check_capability()


class Dynamo(NamedTuple):
    """Where the compiler calls back, where it keeps `counters` and `graph_break_reasons` of its
    work, and where it says which function it gave up."""

    callback: ModuleType
    utils: ModuleType
    gives_up: logging.Logger


def dynamo() -> Dynamo:
    """Imported for those who count; that takes a second."""
    from torch._dynamo import callback, utils

    return Dynamo(callback, utils, logging.getLogger("torch._dynamo.convert_frame"))


# Operators whose functions in torch.nn.functional don't take what we need: scales a row, documents'
# boundaries, a log-sum-exp to go on from.


scaled_mm = torch._scaled_mm
"""The FP8 product, with scales for a tensor or for each row and column."""
flash_attention_forward = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward


def flash_attention_for_cpu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as a fused kernel, also on meta tensors, where only its shapes count."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


# ------------------------------------------------------------------------------ transformers


def set_block_checkpoint(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Have one of transformers' blocks checkpoint by `function`, after
    `gradient_checkpointing_enable` has turned checkpointing on.
    """
    layer._gradient_checkpointing_func = function


def mark_as_four_bits(model: nn.Module) -> None:
    """Tell PEFT that the model's linear layers are bitsandbytes' 4-bit ones."""
    model.is_loaded_in_4bit = True


def expert_gate(experts: nn.Module, both: Tensor) -> Tensor:
    """GPT-OSS's clamped SwiGLU of gate and up projections, by transformers' own module."""
    return experts._apply_gate(both)
