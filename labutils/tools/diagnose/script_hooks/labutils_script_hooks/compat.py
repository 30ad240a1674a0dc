"""Every touch on the inside of PyTorch, and on Python's import: the public hooks don't reach these.

tests/tools/test_script_hooks.py, test_diagnose_scripts.py and test_diagnose_trials.py hold each, so
that an upgrade that moves one fails by name.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence, Set
from types import ModuleType
from typing import Any


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls `action` once, after the module `name` was executed.

    It hooks the loader of every spec that is asked for and stays until one was executed: libraries
    look for a spec without importing it (`importlib.util.find_spec("torch")`).
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def around(owner: ModuleType | type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper`, which gets the original one before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def around_pytorch(watch: Any) -> None:
    """Bring a watch's methods around backward passes, what DataLoaders do, and profilers."""
    import torch
    from torch.utils.data import dataloader

    around(torch.autograd, "backward", watch.backward)
    around(dataloader.DataLoader, "__iter__", watch.new_epoch)
    around(dataloader._BaseDataLoaderIter, "__next__", watch.next_batch)
    around(torch.autograd.profiler.profile, "_prepare_trace", watch.profiler_begins)
    # Else torch.compile would compile the hooks into the script's graphs.
    rules = "torch._dynamo.trace_rules"
    WhenImported(rules, lambda: sys.modules[rules].add(__package__))


def around_training(fixes: Any, asked: Set[str]) -> None:
    """Bring a trial's methods around those of PyTorch that the changes asked for go through."""
    import torch
    from torch.utils.data import DataLoader

    def first_call(original: Callable[..., Any], module: Any, *args: Any, **more: Any) -> Any:
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return original(module, *args, **more)
        torch.nn.Module.__call__ = original
        fixes.model(module)
        return module(*args, **more)

    around(torch.autograd, "backward", fixes.backward)
    if asked & {"num_workers", "pin_memory"}:
        around(DataLoader, "__init__", fixes.loader)
    for name in ("to", "cuda") if "non_blocking" in asked else ():
        around(torch.Tensor, name, fixes.copy)
    for kind in ("Adam", "AdamW", "SGD") if "optimizer" in asked else ():
        around(getattr(torch.optim, kind), "__init__", fixes.optimizer)
    if asked & {"attention", "checkpointing", "precision", "compile"}:
        around(torch.nn.Module, "__call__", first_call)


class OwnOptimizer:
    """Stands for an optimizer that isn't PyTorch's, whose steps are seen by one parameter: it, or
    its gradient, was changed in place or replaced between two backward passes."""

    def __init__(self) -> None:
        self.seen_by: list[Any] = []
        self.param_groups = [{"params": self.seen_by}]
        self.state: list[Any] = []

    def has_stepped(self) -> bool:
        """Whether there was a step since `after_backward`."""
        return self._state() != self.state

    def after_backward(self, losses: Any) -> None:
        self.seen_by[:] = self.seen_by or _parameter_below(losses)
        self.state = self._state()

    def _state(self) -> list[Any]:
        tensors = [t for p in self.seen_by for t in (p, p.grad) if t is not None]
        return [(id(tensor), tensor._version) for tensor in tensors]


def _parameter_below(losses: Any) -> list[Any]:
    """A parameter that the backward pass reaches. What has a gradient has it from an input."""
    node = (losses[0] if isinstance(losses, Sequence) else losses).grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = next((below for below, _ in node.next_functions if below is not None), None)
    return [] if node is None else [node.variable]
