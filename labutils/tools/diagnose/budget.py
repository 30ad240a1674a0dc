"""Where a step's time goes: shares that add up to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from labutils.profiling.trace import Trace
from labutils.tools.diagnose.step_queue import Queue

DATA, COPIES, SYNC, LAUNCH, LOG = (
    "waiting for data",
    "copies alone",
    "waiting for the GPU",
    "launching",
    "logging",
)
OPTIMIZER, HOST, CALLING = "optimizer", "host, other", "calling operators, and Python"
HOW_READ = {
    DATA: "no batch is ready",
    COPIES: "only copies run on the GPU",
    SYNC: "the GPU idles, and the host stands in a synchronisation",
    LAUNCH: "the GPU idles while the host is inside launch calls",
    LOG: "the host writes",
    OPTIMIZER: "the update of the parameters",
    HOST: "the GPU idles while the host does anything else, most of it Python",
    CALLING: "everything about operators but their work",
}


def of_gpu(
    trace: Trace, queue: Queue, step_ms: float, data_ms: float | None, log_ms: float
) -> dict[str, float]:
    """The shares of a trace with GPU work (`Trace.partition`): kernels by kind, those of the
    optimizer apart, and what the host did while none ran. What it wrote meanwhile is taken off its
    own time."""
    traced_data = 0.0 if data_ms is None else data_ms
    shares = trace.partition(step_ms, traced_data) if data_ms is not None else trace.partition()
    factor = step_ms / (sum(shares.values()) or 1.0)
    shares = {name: factor * ms for name, ms in shares.items()}
    log = min(log_ms, shares.get("host", 0.0))
    kinds = kinds_of(queue)
    whole = sum(kinds.values()) or 1.0
    parts = {name: ms / whole * shares.get("kernels", 0.0) for name, ms in kinds.items()}
    rest = {
        DATA: shares.get("data", 0.0),
        COPIES: shares.get("copies", 0.0),
        SYNC: shares.get("sync", 0.0),
        LAUNCH: shares.get("launch", 0.0),
        LOG: log,
        HOST: shares.get("host", 0.0) - log,
    }
    if not kinds:
        rest[HOST] += shares.get("kernels", 0.0)
    return whole_of(parts | rest, step_ms)


def of_cpu(queue: Queue, step_ms: float) -> dict[str, float]:
    """The shares of a step on a CPU: operators by kind, the optimizer apart, and what goes with
    calling them.
    """
    update = sum(p.host_ms for p in queue.pieces if p.phase == "optimizer") / queue.steps
    parts = kinds_of(queue)
    parts[OPTIMIZER] = parts.get(OPTIMIZER, 0.0) + update
    rest = {
        DATA: queue.total("data_ms"),
        LOG: queue.total("log_ms"),
        CALLING: queue.total("host_ms") - update,
    }
    return whole_of(parts | rest, step_ms)


def kinds_of(queue: Queue) -> dict[str, float]:
    """Kind of work -> milliseconds a step on the device, without copies; the optimizer's is a kind
    of its own.
    """
    parts: dict[str, float] = defaultdict(float)
    for piece in queue.pieces:
        if piece.kind != "copy" and piece.ms:
            parts[OPTIMIZER if piece.phase == "optimizer" else piece.kind] += piece.ms / queue.steps
    return dict(parts)


def whole_of(parts: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """The parts that are any, the largest first, scaled so that they add up to `step_ms`."""
    there = {name: ms for name, ms in parts.items() if ms > 0}
    factor = step_ms / sum(there.values()) if there else 1.0
    return {name: factor * ms for name, ms in sorted(there.items(), key=lambda row: -row[1])}
