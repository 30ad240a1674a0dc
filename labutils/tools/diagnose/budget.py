"""Where a step's time goes: shares that add up to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from labutils.profiling.trace import Trace
from labutils.tools.diagnose.step_queue import COPY, Queue

DATA, LOG, OPTIMIZER = "waiting for data", "logging", "optimizer"
COPIES, SYNC, LAUNCH = "only copies run", "waiting for the GPU", "launching"
HOST, CALLING = "host, most of it Python", "calling operators, and Python"


def of_gpu(
    trace: Trace, queue: Queue, step_ms: float, data_ms: float, log_ms: float
) -> dict[str, float]:
    """The shares of a trace with GPU work (`Trace.partition`): kernels by kind, those of the
    optimizer apart, and what the host did while none ran. What it wrote meanwhile is taken off its
    own time."""
    shares = trace.partition(step_ms, data_ms)
    kinds = kinds_of(queue)
    busy, log = shares["kernels"] / (sum(kinds.values()) or 1.0), min(log_ms, shares["host"])
    parts = {name: busy * ms for name, ms in kinds.items()}
    parts |= {DATA: shares["data"], COPIES: shares["copies"], SYNC: shares["sync"]}
    parts |= {LAUNCH: shares["launch"], LOG: log, HOST: shares["host"] - log}
    return whole_of(parts, step_ms)


def of_cpu(queue: Queue, step_ms: float) -> dict[str, float]:
    """The shares of a step on a CPU: operators by kind, the optimizer apart, and what goes with
    calling them.
    """
    update = sum(p.host_ms for p in queue.pieces if p.phase == "optimizer") / queue.steps
    parts = kinds_of(queue)
    parts[OPTIMIZER] += update
    parts[DATA], parts[LOG] = queue.total("data_ms"), queue.total("log_ms")
    parts[CALLING] = queue.total("host_ms") - update
    return whole_of(parts, step_ms)


def kinds_of(queue: Queue) -> Counter[str]:
    """Kind of work -> milliseconds a step on the device, without copies; the optimizer's is a kind
    of its own.
    """
    parts: Counter[str] = Counter()
    for piece in queue.pieces:
        if piece.kind != COPY:
            parts[OPTIMIZER if piece.phase == "optimizer" else piece.kind] += piece.ms / queue.steps
    return parts


def whole_of(parts: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """The parts that are any, the largest first, scaled so that they add up to `step_ms`."""
    positive = {name: ms for name, ms in parts.items() if ms > 0}
    factor = step_ms / sum(positive.values()) if positive else 1.0
    return {name: factor * ms for name, ms in sorted(positive.items(), key=lambda row: -row[1])}
