"""Evidence from a watched script's record and trace."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labutils.profiling.intervals import difference, total, union
from labutils.profiling.machine import usable_cores
from labutils.profiling.products import Rates, recomputed
from labutils.profiling.trace import Trace
from labutils.tools.diagnose import budget
from labutils.tools.diagnose.evidence import Evidence, Line, Loader, Optimizer
from labutils.tools.diagnose.step_queue import fitted
from labutils.tools.diagnose.trace_pieces import queue_of


def of_record(record: Mapping[str, Any], trace: Trace) -> Evidence:
    """Evidence of a watched script: what the hooks wrote down, and its profiled steps' trace."""
    config, batches = record["config"], record["batch_facts"]
    step_ms = statistics.median(record["step_ms"])
    data_ms = statistics.median(record["data_ms"])
    fetched_ms = own_ms_of(trace, "data")
    if fetched_ms < 0.99 * total(trace.phase_time.get("data", [])) / trace.steps:
        # A loader that moves batches to the GPU itself (accelerate's) waits there until all that
        # was launched is done, whoever makes the batch. That is no data. What fetching takes is
        # the trace's, as the profiler records hardly anything in it.
        data_ms = min(data_ms, fetched_ms)
    writes = _lines(record, "write")
    log_ms = min(sum(line.ms for line in writes), max(0.0, step_ms - data_ms))
    from_idle = statistics.median(record["host_step_ms"]) if record["host_step_ms"] else None
    if not trace.on_gpu:  # the disk may have taken longer in the watched steps than in those timed
        log_ms = min(log_ms, max(0.0, step_ms - data_ms - queue_of(trace, 0.0).device_ms))
    queue = fitted(queue_of(trace, data_ms, log_ms), step_ms, from_idle)
    examples = [batch["examples"] for batch in batches if "examples" in batch]
    useful, tokens = (sum(batch.get(key, 0) for batch in batches) for key in ("useful", "tokens"))
    device, shares = "cpu", budget.of_cpu(queue, step_ms)
    if trace.on_gpu:
        device, shares = "cuda", budget.of_gpu(trace, queue, step_ms, data_ms, log_ms)
    return Evidence(
        source="the script",
        device=device,
        step_ms=step_ms,
        queue=queue,
        budget=shares,
        rates=Rates(device),
        data_ms=data_ms,
        log_ms=log_ms,
        cores=usable_cores(),
        threads=config["threads"],
        accumulation=max(1.0, record["backwards"]),
        examples=round(statistics.median(examples)) if examples else None,
        reads=_reads(record),
        writes=writes,
        loader=_loader(record),
        optimizer=Optimizer(**record["optimizer"]),
        padding=1 - useful / tokens if tokens else None,
        recomputed=recomputed(trace),
        memory_gb=(config["peak_gb"], config["memory_gb"]) if "peak_gb" in config else None,
        config=config,
        notes=_notes(record, (trace.wall_ms / trace.steps - fetched_ms + data_ms) / step_ms),
        timeline=trace.timeline(),
        files=tuple({short(row["place"]).rpartition(":")[0] for row in record["calls"]}),
    )


def own_ms_of(trace: Trace, phase: str = "log") -> float:
    """Milliseconds a step in a phase, without the host's waits for the device there."""
    waits = union((wait.start, wait.end) for wait in trace.waits)
    return total(difference(trace.phase_time.get(phase, []), waits)) / trace.steps


def _lines(record: Mapping[str, Any], kind: str) -> tuple[Line, ...]:
    rows = [row for row in record["calls"] if row["kind"] == kind]
    lines = [Line(short(row["place"]), row["what"], row["per_step"], row["ms"]) for row in rows]
    return tuple(sorted(lines, key=lambda line: (-line.ms, -line.per_step)))


def _reads(record: Mapping[str, Any]) -> tuple[Line, ...]:
    """The lines that read tensors or wait. On a GPU PyTorch's own warnings know of more."""
    reads = _lines(record, "read")
    reading, copying = ({line.place for line in lines} for lines in (reads, _lines(record, "to")))
    warned = {short(place): count for place, count in record["sync_lines"].items()}
    return reads + tuple(
        Line(place, "to()" if place in copying else "", count)
        for place, count in warned.items()
        if place not in reading
    )


def short(place: str) -> str:
    """ "file:line" with the file as seen from the current folder, where it is inside it."""
    return place.removeprefix(f"{Path.cwd()}/")


def _loader(record: Mapping[str, Any]) -> Loader | None:
    """The last DataLoader that gave a batch; None where none did."""
    batches, settings = record["batch_facts"], record["loader"]
    if not settings or not batches:
        return None
    return Loader(
        num_workers=settings["num_workers"],
        batches=record["batches"],
        pin_memory=settings["pin_memory"] or any(batch.get("pinned") for batch in batches),
        bytes=statistics.fmean(batch.get("bytes", 0) for batch in batches),
        fetch_cpu_ms=record["fetch_cpu_ms"] if settings["num_workers"] == 0 else None,
    )


def _notes(record: Mapping[str, Any], longer: float) -> tuple[str, ...]:
    """What is odd about the script, or not known of it. longer: profiled steps against timed ones;
    the profiler itself made them up to three times as long."""
    config, notes = record["config"], []
    if not 0.5 < longer < 5:
        notes += [f"Profiled steps took {longer:.1f} times as long as timed ones. If steps differ, "
                  "no prediction holds: choose others (--warmup, --steps)."]  # fmt: skip
    if config.get("cuda_available") and record["device"] == "cpu":
        notes += ["There is a GPU here, and the script trains on the CPU: move model and batches."]
    if config.get("launch_blocking"):
        notes += ["CUDA_LAUNCH_BLOCKING=1 is set: every launch waits for its kernel. Unset it."]
    if config.get("anomaly"):
        notes += ["Anomaly detection is on: it records a stack for every operator. Turn it off."]
    if (processes := config.get("world_size", 1)) > 1:
        notes += [f"One of {processes} processes was watched, the one of rank 0."]
    if not record["batch_facts"]:
        notes += ["No DataLoader was seen: time that reading data takes counts as the host's."]
    return tuple(notes)
