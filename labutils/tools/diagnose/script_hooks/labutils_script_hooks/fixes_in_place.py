"""Puts fixes in place in a script's process, for `labutils diagnose --try`: nothing is edited.

What is changed are PyTorch's own classes before the script uses them, by `compat.around_training`,
and the first module that it trains. The losses of the first backward passes are written down.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from labutils_script_hooks import compat
from labutils_script_hooks.process_note import save

FIRST_LOSSES = 4


class Fixes:
    """changes: what `Fix.changes` says. `done`: those of them that were put in place."""

    def __init__(self, changes: dict[str, Any], folder: str) -> None:
        self.changes, self.path = changes, os.path.join(folder, f"tried-{os.getpid()}.json")
        self.done: set[str] = set()
        self.losses: list[float] = []

    def put(self) -> None:
        import torch

        self.torch = torch
        if self.changes.get("precision") == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
            self.done.add("precision")
        if "logging" in self.changes:
            self._silence()
        compat.around_training(self, self.changes.keys() - self.done)

    def backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **more: Any) -> Any:
        loss = tensors if self.torch.is_tensor(tensors) else tensors[0]
        if len(self.losses) < FIRST_LOSSES and loss.numel() == 1:
            self.losses.append(float(loss.detach()))
            save(self.path, {"losses": self.losses, "done": sorted(self.done)})
        return original(tensors, *args, **more)

    def loader(self, original: Callable[..., Any], *args: Any, **more: Any) -> None:
        bound = inspect.signature(original).bind(*args, **more)
        streams = isinstance(bound.arguments["dataset"], self.torch.utils.data.IterableDataset)
        for name in ("num_workers", "persistent_workers", "pin_memory"):
            if name in self.changes and not (streams and "workers" in name):
                bound.arguments[name] = self.changes[name]
                self.done.add(name)
        original(*bound.args, **bound.kwargs)

    def copy(self, original: Callable[..., Any], tensor: Any, *args: Any, **more: Any) -> Any:
        if tensor.device.type == "cpu" and tensor.is_pinned():
            more["non_blocking"] = True
        return original(tensor, *args, **more)

    def optimizer(self, original: Callable[..., Any], *args: Any, **more: Any) -> None:
        bound = inspect.signature(original).bind(*args, **more)
        bound.arguments |= {"fused": True, "foreach": None}
        try:
            original(*bound.args, **bound.kwargs)
            self.done.add("optimizer")
        except RuntimeError:  # parameters for which there is no fused form
            original(*args, **more)

    def _silence(self) -> None:
        builtins.print = os.fsync = os.fdatasync = lambda *args, **more: None  # type: ignore
        logging.disable()
        os.environ |= {"TQDM_DISABLE": "1", "WANDB_MODE": "disabled"}
        self.done.add("logging")

    def model(self, module: Any) -> None:
        methods = {"attention": "set_attn_implementation"}
        methods |= {"checkpointing": "gradient_checkpointing_disable"}
        for name in methods.keys() & self.changes.keys():
            for part in module.modules():
                if method := getattr(part, methods[name], None):
                    method(*(["sdpa"] if name == "attention" else []))
                    self.done.add(name)
                    break
        if self.changes.get("precision") == "bf16":
            device = next(module.parameters()).device.type
            forward = self.torch.autocast(device, self.torch.bfloat16)(module.forward)
            module.forward = functools.wraps(module.forward)(
                lambda *args, **more: self._in_float32(forward(*args, **more))
            )
            self.done.add("precision")
        if "compile" in self.changes:
            module.compile()
            self.done.add("compile")

    def _in_float32(self, output: Any) -> Any:
        half = self.torch.is_tensor(output) and output.dtype is self.torch.bfloat16
        return output.float() if half else output
