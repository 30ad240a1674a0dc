"""What a diagnosis is based on, made from a watched script, a recipe at work, or a trace.

What is not known is None or empty, and a rule that needs it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labutils.profiling.products import Rates
from labutils.tools.diagnose.step_queue import Queue


@dataclass(frozen=True)
class Line:
    """A source line, or where none is known a function: `place` "file:line", what it calls, how
    often and for how many milliseconds a step."""

    place: str
    what: str
    per_step: float
    ms: float = 0.0


@dataclass(frozen=True)
class Loader:
    """The DataLoader's settings, how many `batches` a step takes, and the `bytes` of one.

    fetch_cpu_ms: processor time of making a step's batches, where the training process makes them.
    """

    num_workers: int
    batches: float
    pin_memory: bool = False
    bytes: float = 0.0
    fetch_cpu_ms: float | None = None


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's `name`, its `form` (`fused`, `foreach`, `loop`, or "" where it has but one),
    and how many tensors it updates."""

    name: str
    form: str
    tensors: int = 0


@dataclass(frozen=True)
class Evidence:
    """A step's facts, in milliseconds of an optimizer step, timed without the profiler if possible.

    queue: its pieces of work, the host's time already fitted to `step_ms`. budget: share of time ->
    milliseconds; they add up to `step_ms`. padding: part of the tokens. recomputed: part of the
    forward pass. memory_gb: (peak, all). held_in_format: another precision would be the model's own
    and no autocast's. timeline: a traced step, see `Trace.timeline`. files: the script's own.
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
    held_in_format: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"
