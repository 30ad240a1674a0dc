"""Evidence from a trace, a watched script's record, or a recipe of the course at work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labutils.profiling.intervals import difference, total, union
from labutils.profiling.machine import default_device, machine_facts, usable_cores
from labutils.profiling.trace import Trace
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.tools.diagnose import budget
from labutils.tools.diagnose.evidence import Evidence, Line, Loader, Optimizer
from labutils.tools.diagnose.product_rates import Rates
from labutils.tools.diagnose.step_queue import Queue, fitted
from labutils.tools.diagnose.trace_pieces import PieceTrace, queue_of


def of_trace(path: str | Path) -> Evidence:
    """Evidence of a trace file alone: times are as traced.

    Raises `FileNotFoundError`, or `ValueError` where the file is no trace.
    """
    trace = PieceTrace.read(path)
    step_ms, log_ms = trace.wall_ms / trace.steps, _log_ms(trace)
    queue = fitted(queue_of(trace, log_ms=log_ms), step_ms, untold=1.0)
    evidence = _of(f"the trace {Path(path).name}", trace, step_ms, queue, None, log_ms)
    note = "Times are the trace's own: the profiler makes the host slower than it is."
    return replace(
        evidence,
        rates=Rates(evidence.device, here=not trace.on_gpu or default_device() == "cuda"),
        data_ms=total(trace.phase_time.get("data", [])) / trace.steps,
        accumulation=max(1.0, trace.calls_of("backward")),
        recomputed=trace.recomputed(),
        notes=(note,),
    )


def of_record(record: Mapping[str, Any], trace: PieceTrace) -> Evidence:
    """Evidence of a watched script: what the hooks wrote down, and its profiled steps' trace."""
    config, batches = record["config"], record["batches"]
    step_ms, data_ms = statistics.median(record["step_ms"]), statistics.median(record["data_ms"])
    writing = sum(row["ms"] for row in record["calls"] if row["kind"] == "write")
    log_ms = min(writing, max(0.0, step_ms - data_ms))
    from_idle = statistics.median(record["host_step_ms"]) if record["host_step_ms"] else None
    if not trace.on_gpu:  # the disk may have taken longer in the watched steps than in those timed
        log_ms = min(log_ms, max(0.0, step_ms - data_ms - queue_of(trace, 0.0).device_ms))
    queue = fitted(queue_of(trace, data_ms, log_ms), step_ms, from_idle)
    examples = [batch["examples"] for batch in batches if "examples" in batch]
    counted = [batch for batch in batches if batch.get("tokens")]
    useful, tokens = (sum(batch[key] for batch in counted) for key in ("useful", "tokens"))
    return replace(
        _of("the script", trace, step_ms, queue, data_ms, log_ms),
        threads=config["threads"],
        accumulation=max(1.0, record["backwards"]),
        examples=round(statistics.median(examples)) if examples else None,
        reads=_reads(record),
        writes=_lines(record, "write"),
        loader=_loader(record),
        optimizer=_optimizer(record["optimizer"], record["device"]),
        padding=1 - useful / tokens if counted else None,
        recomputed=trace.recomputed(),
        memory_gb=(config["peak_gb"], config["memory_gb"]) if "peak_gb" in config else None,
        config=config,
        notes=_notes(record),
    )


def of_recipe(run: Run, trace: PieceTrace, from_idle_ms: float | None = None) -> Evidence:
    """Evidence of a recipe at work: its run, timed without the profiler, and a trace of some steps.

    from_idle_ms: the host's time for a step that begins with an idle GPU.
    """
    recipe, machine = Recipe(**run.recipe), run.machine or machine_facts()
    step_ms = run.metric("step_ms") or 0.0
    data_ms = min(run.metric("data_ms") or 0.0, 0.999 * step_ms)
    log_ms = 0.0
    if recipe.logging == "synchronous":
        slowed = max(1.0, trace.wall_ms / trace.steps / step_ms)  # by the profiler
        log_ms = min(_log_ms(trace) / slowed, step_ms - data_ms)
    queue = fitted(queue_of(trace, data_ms, log_ms), step_ms, from_idle_ms)
    useful, peak_gb = run.metric("useful_tokens"), run.metric("peak_allocated_gb")
    config = _settings()
    return replace(
        _of(f'the recipe "{run.run}"', trace, step_ms, queue, data_ms, log_ms),
        threads=config["threads"],
        accumulation=recipe.accumulation,
        examples=recipe.micro_batch,
        loader=Loader(
            num_workers=recipe.num_workers,
            batches=recipe.accumulation,
            pin_memory=recipe.pin_memory,
        ),
        optimizer=Optimizer(
            "AdamW", "fused" if recipe.optimizer == "adamw-fused" else "foreach", 0
        ),
        padding=None if useful is None else 1 - useful,
        recomputed=trace.recomputed() if recipe.checkpointing != "off" else 0.0,
        memory_gb=(peak_gb, machine["gpu_memory_gb"]) if peak_gb else None,
        recipe=recipe,
        workload=run.workload,
        config=config,
    )


def _of(
    source: str,
    trace: PieceTrace,
    step_ms: float,
    queue: Queue,
    data_ms: float | None,
    log_ms: float,
) -> Evidence:
    """What a trace tells of every source. data_ms: None where only the trace knows it."""
    device = "cuda" if trace.on_gpu else "cpu"
    shares = budget.of_cpu(queue, step_ms)
    if trace.on_gpu:
        shares = budget.of_gpu(trace, queue, step_ms, data_ms, log_ms)
    # On a CPU reading a tensor waits for nothing.
    rows = trace.sync_table() if trace.on_gpu else trace.sync_table(trace.host_reads())
    reads = tuple(
        Line(
            f"{row['where']}" if "line" in row else row.get("phase", "") or "no stack recorded",
            row.get("builtin") or row.get("cause") or row.get("call", ""),
            row["per_step"],
            row["ms_per_step"],
        )
        for row in rows
    )
    return Evidence(
        source=source,
        device=device,
        step_ms=step_ms,
        queue=queue,
        budget=shares,
        rates=Rates(device),
        data_ms=data_ms or 0.0,
        log_ms=log_ms,
        cores=usable_cores(),
        reads=reads,
    )


def _log_ms(trace: Trace) -> float:
    """Milliseconds a step in marks "log", without the host's waits for the device there."""
    waits = union((wait.start, wait.end) for wait in trace.waits)
    return total(difference(trace.phase_time.get("log", []), waits)) / trace.steps


def _lines(record: Mapping[str, Any], kind: str) -> tuple[Line, ...]:
    rows = [row for row in record["calls"] if row["kind"] == kind]
    lines = [Line(short(row["place"]), row["what"], row["per_step"], row["ms"]) for row in rows]
    return tuple(sorted(lines, key=lambda line: (-line.ms, -line.per_step)))


def _reads(record: Mapping[str, Any]) -> tuple[Line, ...]:
    """The lines that read tensors or wait. On a GPU PyTorch's own warnings know of more."""
    seen = _lines(record, "read")
    reading, copying = ({line.place for line in lines} for lines in (seen, _lines(record, "to")))
    warned = [(short(place), count) for place, count in record["sync_lines"].items()]
    return seen + tuple(
        Line(place, ".to()" if place in copying else "", count)
        for place, count in warned
        if place not in reading
    )


def short(place: str) -> str:
    """ "file:line" with the file as seen from the current folder, where it is inside it."""
    file, _, line = place.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except (ValueError, OSError):
        return place


def _loader(record: Mapping[str, Any]) -> Loader | None:
    batches: Sequence[Mapping[str, Any]] = record["batches"]
    settings = next((batch for batch in batches if "num_workers" in batch), None)
    if settings is None:
        return None
    return Loader(
        num_workers=settings["num_workers"],
        batches=record["batches_per_step"],
        pin_memory=settings["pin_memory"] or any(batch.get("pinned") for batch in batches),
        bytes=statistics.fmean(batch.get("bytes", 0) for batch in batches),
        fetch_cpu_ms=record["fetch_cpu_ms"] if settings["num_workers"] == 0 else None,
    )


def _optimizer(facts: Mapping[str, Any], device: str) -> Optimizer:
    form = ""
    if facts["takes_fused"]:
        default = facts["fused"] is None and facts["foreach"] is None
        grouped = facts["foreach"] or (default and device == "cuda")
        form = "fused" if facts["fused"] else "foreach" if grouped else "loop"
    return Optimizer(facts["name"], form, facts["tensors"])


def _notes(record: Mapping[str, Any]) -> tuple[str, ...]:
    config, name, closures = record["config"], record["optimizer"]["name"], record["closures"]
    notes = {
        "There is a GPU here, and the script trains on the CPU: move model and batches to it.": (
            config["cuda_available"] and record["device"] == "cpu"
        ),
        "CUDA_LAUNCH_BLOCKING=1 is set: every launch waits for its kernel. Unset it.": config[
            "launch_blocking"
        ],
        "Anomaly detection is on: it records a stack for every operator. Turn it off.": config[
            "anomaly"
        ],
        f"One of {config['world_size']} processes was watched, the one of rank 0.": (
            config["world_size"] > 1
        ),
        f"{name} calls its closure {closures:.3g} times a step: these passes are its own, and no "
        "micro-batches.": closures >= 1.5,
        "No DataLoader was seen: time that reading data takes counts as the host's.": (
            not record["batches"]
        ),
    }
    return tuple(words for words, applies in notes.items() if applies)


def _settings() -> dict[str, Any]:
    import torch

    return {
        # Not `allow_tf32`, which raises where the newer of the two settings was used.
        "matmul_tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "cudnn_tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "threads": torch.get_num_threads(),
    }
