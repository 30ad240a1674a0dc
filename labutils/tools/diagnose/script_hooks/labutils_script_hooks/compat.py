"""Every touch on the inside of PyTorch, and on Python's import: the public hooks don't reach these.

tests/tools/test_script_hooks.py and test_diagnose_scripts.py hold each, so that an upgrade that
moves one fails by name.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable, Sequence
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


def around_batches(new_epoch: Callable[..., Any], next_batch: Callable[..., Any]) -> None:
    """Wrap what every DataLoader calls to begin an epoch, and to bring a batch."""
    from torch.utils.data import dataloader

    around(dataloader.DataLoader, "__iter__", new_epoch)
    around(dataloader._BaseDataLoaderIter, "__next__", next_batch)


def around_profilers(begins: Callable[..., Any]) -> None:
    """Wrap the start of every profiler of PyTorch's; the script may have one of its own."""
    from torch.autograd.profiler import profile

    if hasattr(profile, "_prepare_trace"):
        around(profile, "_prepare_trace", begins)


def keep_from_compiler() -> None:
    """Have torch.compile leave this package's code alone: it would compile the hooks into the
    script's graphs."""

    def skip() -> None:
        from torch._dynamo import trace_rules

        trace_rules.add(__package__)

    WhenImported("torch._dynamo.trace_rules", skip)


class OwnUpdates:
    """Sees the updates of an optimizer that isn't PyTorch's by one parameter: it, or its gradient,
    was changed in place or replaced between two backward passes."""

    def __init__(self) -> None:
        self.parameter: Callable[[], Any] = lambda: None  # weak: it is the script's
        self.state: tuple[Any, ...] = ()

    def updated(self) -> Any:
        """The parameter, where it was updated since `after_backward`; else None."""
        parameter = self.parameter()
        return parameter if self._state_of(parameter) != self.state else None

    def after_backward(self, losses: Any) -> None:
        if self.parameter() is None and (found := _parameter_below(losses)) is not None:
            self.parameter = weakref.ref(found)
        self.state = self._state_of(self.parameter())

    @staticmethod
    def _state_of(parameter: Any) -> tuple[Any, ...]:
        gradient = getattr(parameter, "grad", None)
        return (id(gradient), *(t._version for t in (parameter, gradient) if t is not None))


def _parameter_below(losses: Any) -> Any:
    """A parameter that the backward pass from these losses reaches; None where there is none."""
    losses = losses if isinstance(losses, Sequence) else [losses]
    nodes, seen = [loss.grad_fn for loss in losses], set()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            return node.variable
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    return None
