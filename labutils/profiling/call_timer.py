"""How long the host is inside one function while a program runs as it is."""

from __future__ import annotations

import functools
import importlib
import time
from types import TracebackType
from typing import Any


class CallTimer:
    """Times every call of `module.name` between `with` and its end, wherever the program makes it.

        with CallTimer("accelerate.data_loader", "send_to_device") as calls:
            measure(trainer, 5)
        calls.per(4)  # milliseconds a step of 4 calls

    Works for a function that its callers look up in `module` when they call it. The clock is the
    host's: what the call leaves to the GPU isn't counted, what it waits for is. Raises
    `AttributeError` where there is no such function.
    """

    def __init__(self, module: str, name: str) -> None:
        self.owner = importlib.import_module(module)
        self.name = name
        self.original = getattr(self.owner, name)
        self.ms: list[float] = []

    def per(self, calls: int) -> list[float]:
        """Milliseconds of each `calls` calls in a row together; an incomplete rest is left out."""
        whole = len(self.ms) // calls * calls
        return [sum(self.ms[i : i + calls]) for i in range(0, whole, calls)]

    def __enter__(self) -> CallTimer:
        @functools.wraps(self.original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return self.original(*args, **kwargs)
            finally:
                self.ms.append(1e3 * (time.perf_counter() - began))

        setattr(self.owner, self.name, timed)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        setattr(self.owner, self.name, self.original)
