"""What a diagnosis goes by, whatever it was made from: a script that was watched, a trace, a run on
record, or a recipe of the course at work.

What is not known is None or empty, and a rule that needs it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labutils.recipe import Recipe
from labutils.tools.diagnose.rates import Rates
from labutils.tools.diagnose.replay import Queue


@dataclass(frozen=True)
class Line:
    """A source line, or where none is known a function: `place` "file:line", what it calls, how
    often and for how many milliseconds a step."""

    place: str
    what: str
    per_step: float
    ms: float = 0.0

    def __str__(self) -> str:
        often = "" if 0.95 < self.per_step < 1.05 else f", {self.per_step:.3g} times a step"
        return f"{self.place} ({self.what}{often})" if self.what else f"{self.place}{often}"


@dataclass(frozen=True)
class Loader:
    """The DataLoader, as it was set. `fetch_cpu_ms`: processor time of making a step's batches,
    where the training process makes them itself; `batches` it took a step; `bytes` of one."""

    num_workers: int
    batches: float
    pin_memory: bool = False
    persistent_workers: bool = False
    batch_size: int | None = None
    bytes: float = 0.0
    fetch_cpu_ms: float | None = None


@dataclass(frozen=True)
class Optimizer:
    """The optimizer: its `name`, the form it takes (`fused`, `foreach`, `loop`, or "" where it has
    but one), how many tensors it updates and how many bytes of them."""

    name: str
    form: str
    tensors: int
    bytes: float


@dataclass(frozen=True)
class Evidence:
    """A step's facts. Times are milliseconds an optimizer step, without the profiler where they
    could be timed without.

    queue: its pieces of work, the host's time already fitted to `step_ms`. budget: share of time ->
    milliseconds; they add up to `step_ms`. padding, recomputed: parts of the tokens, and of the
    forward pass. memory_gb: (peak, all).
    """

    source: str
    device: str
    step_ms: float
    queue: Queue
    budget: Mapping[str, float]
    rates: Rates
    data_ms: float = 0.0
    log_ms: float = 0.0
    cores: int = 1
    threads: int = 1
    accumulation: float = 1.0
    examples: int | None = None
    reads: tuple[Line, ...] = ()
    writes: tuple[Line, ...] = ()
    loader: Loader | None = None
    optimizer: Optimizer | None = None
    padding: float | None = None
    recomputed: float = 0.0
    memory_gb: tuple[float, float] | None = None
    steps: int = 0
    recipe: Recipe | None = None
    workload: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"
