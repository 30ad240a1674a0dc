"""Evidence from a trace, a watched script's record, a run on record, or a recipe of the course at
work.
"""

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
from labutils.tools.diagnose.rates import Rates
from labutils.tools.diagnose.recorded import Recorded, queue_of
from labutils.tools.diagnose.replay import READ, Piece, Queue, fitted

# ------------------------------------------------------------------------------------------ a trace


def of_trace(path: str | Path) -> Evidence:
    """Evidence of a trace file alone: times are as traced, and the profiler makes the host slower
    than it is.

    Raises `FileNotFoundError`, or `ValueError` where the file is no trace.
    """
    trace = Recorded.read(path)
    assert isinstance(trace, Recorded)
    step_ms = trace.wall_ms / trace.steps
    log_ms = _log_ms(trace)
    queue = fitted(queue_of(trace, log_ms=log_ms), step_ms, untold=1.0)
    note = "Times are the trace's own: the profiler makes the host slower, and its part looks larger than it is."
    return Evidence(
        source=f"the trace {Path(path).name}",
        device="cuda" if trace.on_gpu else "cpu",
        step_ms=step_ms,
        queue=queue,
        budget=_budget(trace, queue, step_ms, None, log_ms),
        rates=Rates(
            "cuda" if trace.on_gpu else "cpu", here=not trace.on_gpu or default_device() == "cuda"
        ),
        data_ms=total(trace.phase_time.get("data", [])) / trace.steps,
        log_ms=log_ms,
        cores=usable_cores(),
        accumulation=_passes(trace),
        reads=_reads_of(trace),
        recomputed=trace.recomputed(),
        steps=trace.steps,
        notes=(note,),
    )


def _log_ms(trace: Trace) -> float:
    """Milliseconds a step in marks "log" less those in which the host waits for the device there."""
    waits = union((wait.start, wait.end) for wait in trace.waits)
    return total(difference(trace.phase_time.get("log", []), waits)) / trace.steps


def _passes(trace: Trace) -> float:
    return max(1.0, trace.calls_of("backward"))


def _reads_of(trace: Trace) -> tuple[Line, ...]:
    """The places that a trace knows of: functions, not lines. On a CPU reading a tensor waits for
    nothing.
    """
    rows = trace.sync_table() if trace.on_gpu else trace.sync_table(trace.host_reads())
    return tuple(
        Line(
            f"{row['where']}" if "line" in row else row.get("phase", "") or "no stack recorded",
            row.get("builtin") or row.get("cause") or row.get("call", ""),
            row["per_step"],
            row["ms_per_step"],
        )
        for row in rows
    )


def _budget(
    trace: Recorded, queue: Queue, step_ms: float, data_ms: float | None, log_ms: float
) -> dict[str, float]:
    if trace.on_gpu:
        return budget.of_gpu(trace, queue, step_ms, data_ms, log_ms)
    return budget.of_cpu(queue, step_ms)


# ----------------------------------------------------------------------------------------- a script


def of_record(record: Mapping[str, Any], trace: Recorded) -> Evidence:
    """Evidence of a script that was watched: what the hooks wrote down, and the trace of its
    profiled steps.
    """
    config, batches = record["config"], record["batches"]
    step_ms, data_ms = statistics.median(record["step_ms"]), statistics.median(record["data_ms"])
    log_ms = min(
        sum(row["ms"] for row in record["calls"] if row["kind"] == "write"),
        max(0.0, step_ms - data_ms),
    )
    from_idle = statistics.median(record["host_step_ms"]) if record["host_step_ms"] else None
    if (
        not trace.on_gpu
    ):  # what the disk took in the steps that were watched, it need not have taken in those timed
        log_ms = min(log_ms, max(0.0, step_ms - data_ms - queue_of(trace, 0.0).device_ms))
    queue = fitted(queue_of(trace, data_ms, log_ms), step_ms, from_idle)
    workers = next((batch["num_workers"] for batch in batches if "num_workers" in batch), 0)
    own_fetch = record["fetch_cpu_ms"] if workers == 0 else None
    return Evidence(
        source="the script",
        device=record["device"],
        step_ms=step_ms,
        queue=queue,
        budget=_budget(trace, queue, step_ms, data_ms, log_ms),
        rates=Rates(record["device"]),
        data_ms=data_ms,
        log_ms=log_ms,
        cores=usable_cores(),
        threads=config["threads"],
        accumulation=max(1.0, record["backwards"]),
        examples=_examples(batches),
        reads=_reads(record),
        writes=_lines(record, "write"),
        loader=_loader(batches, record["batches_per_step"], own_fetch),
        optimizer=_optimizer(record["optimizer"], record["device"]),
        padding=_padding(batches),
        recomputed=trace.recomputed(),
        memory_gb=(config["peak_gb"], config["memory_gb"]) if "peak_gb" in config else None,
        steps=len(record["step_ms"]),
        config=config,
        notes=_notes(record),
    )


def _lines(record: Mapping[str, Any], kind: str) -> tuple[Line, ...]:
    rows = [row for row in record["calls"] if row["kind"] == kind]
    found = [Line(short(row["place"]), row["what"], row["per_step"], row["ms"]) for row in rows]
    return tuple(sorted(found, key=lambda line: (-line.ms, -line.per_step)))


def _reads(record: Mapping[str, Any]) -> tuple[Line, ...]:
    """The lines that read tensors or wait; on a GPU PyTorch's own warnings know of more, copies to
    it among them.
    """
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


def _examples(batches: Sequence[Mapping[str, Any]]) -> int | None:
    counts = [batch["examples"] for batch in batches if "examples" in batch]
    return round(statistics.median(counts)) if counts else None


def _loader(
    batches: Sequence[Mapping[str, Any]], per_step: float, fetch_cpu_ms: float | None
) -> Loader | None:
    set_ = next((batch for batch in batches if "num_workers" in batch), None)
    if set_ is None:
        return None
    return Loader(
        num_workers=set_["num_workers"],
        batches=per_step,
        pin_memory=set_["pin_memory"] or any(batch.get("pinned") for batch in batches),
        persistent_workers=set_["persistent_workers"],
        batch_size=set_["batch_size"],
        bytes=statistics.fmean(batch.get("bytes", 0) for batch in batches),
        fetch_cpu_ms=fetch_cpu_ms,
    )


def _optimizer(facts: Mapping[str, Any], device: str) -> Optimizer:
    form = ""
    if facts["takes_fused"]:
        default = facts["fused"] is None and facts["foreach"] is None
        grouped = facts["foreach"] or (default and device == "cuda")
        form = "fused" if facts["fused"] else "foreach" if grouped else "loop"
    return Optimizer(facts["name"], form, facts["tensors"], facts["bytes"])


def _padding(batches: Sequence[Mapping[str, Any]]) -> float | None:
    """The part of the tokens that is padding, over all batches that were looked into."""
    counted = [batch for batch in batches if batch.get("tokens")]
    if not counted:
        return None
    return 1 - sum(batch["useful"] for batch in counted) / sum(batch["tokens"] for batch in counted)


def _notes(record: Mapping[str, Any]) -> tuple[str, ...]:
    config, found = record["config"], []
    if config["cuda_available"] and record["device"] == "cpu":
        found.append(
            "There is a GPU here, and the script trains on the CPU: move the model and the batches "
            "to it."
        )
    if config["launch_blocking"]:
        found.append(
            "CUDA_LAUNCH_BLOCKING=1 is set: every launch waits for its kernel. Unset it outside of "
            "debugging."
        )
    if config["anomaly"]:
        found.append(
            "Anomaly detection is on: it records a stack for every operator. Turn it off outside "
            "of debugging."
        )
    if config["world_size"] > 1:
        found.append(f"One of {config['world_size']} processes was watched, the one of rank 0.")
    if record["closures"] >= 1.5:
        name, times = record["optimizer"]["name"], f"{record['closures']:.3g}"
        found.append(
            f"{name} calls its closure {times} times a step: these passes are its own, and no "
            "micro-batches."
        )
    if not record["batches"]:
        found.append("No DataLoader was seen: time that reading data takes counts as the host's.")
    return tuple(found)


# -------------------------------------------------------------------------------------------- a run


def of_run(run: Run) -> Evidence:
    """Evidence of a run on record: its shares where it was profiled, or else its step and its wait
    for data.

    Raises `ValueError` for a run that has no step time.
    """
    step_ms = run.metric("step_ms")
    if not run.ok or not step_ms:
        raise ValueError(
            f'The run "{run.run}" has no step time to explain: its status is "{run.status}".'
        )
    device = "cuda" if "gpu" in run.machine or run.metric("kernels_ms") else "cpu"
    recipe = _recipe_of(run)
    data_ms = min(run.metric("data_ms") or 0.0, step_ms)
    queue = fitted(_queue_of_run(run, data_ms, device), step_ms)
    profiled = run.metric("kernels_share") is not None or run.metric("host_share") is not None
    notes = (
        ()
        if profiled
        else ("The run was not profiled: only its wait for data can be told from the rest.",)
    )
    return Evidence(
        source=f'the run "{run.run}" of lab {run.lab}',
        device=device,
        step_ms=step_ms,
        queue=queue,
        budget=_budget_of_run(run, step_ms, data_ms),
        rates=Rates(device, here=False),
        data_ms=data_ms,
        cores=run.machine.get("cores", usable_cores()),
        accumulation=recipe.accumulation if recipe else 1,
        examples=recipe.micro_batch if recipe else None,
        loader=_loader_of(recipe) if recipe else None,
        padding=_padding_of(run),
        memory_gb=_memory_of(run),
        steps=len(run.samples.get("step_ms", ())),
        recipe=recipe,
        workload=run.workload,
        notes=notes,
    )


def _recipe_of(run: Run) -> Recipe | None:
    try:
        return Recipe(**run.recipe) if run.recipe else None
    except (TypeError, ValueError):  # of another version of the course
        return None


def _queue_of_run(run: Run, data_ms: float, device: str) -> Queue:
    """As many equal pieces as were launched, with as many waits; a run holds no queue."""
    kernels_ms = run.metric("kernels_ms")
    if kernels_ms is None:
        rest = (run.metric("step_ms") or 0.0) - data_ms
        return Queue((Piece("other", rest, data_ms=data_ms, phase="forward"),), 1, takes_turns=True)
    count = max(
        1,
        round(
            (run.metric("launches_per_step") or 0) + (run.metric("graph_launches_per_step") or 0)
        ),
    )
    waits = round(run.metric("syncs_per_step") or 0)
    waiting = {round((place + 1) * count / waits) - 1 for place in range(waits)} if waits else set()
    left = max(1e-3, (run.metric("step_ms") or 0.0) - data_ms)
    pieces = [
        Piece(
            "other", kernels_ms / count, left / count, "forward", READ if place in waiting else ""
        )
        for place in range(count)
    ]
    return Queue((replace(pieces[0], data_ms=data_ms), *pieces[1:]))


def _budget_of_run(run: Run, step_ms: float, data_ms: float) -> dict[str, float]:
    names = {
        "data": budget.DATA,
        "copies": budget.COPIES,
        "sync": budget.SYNC,
        "launch": budget.LAUNCH,
    }
    names |= {"kernels": "kernels", "host": budget.HOST}
    shares = {name: step_ms * (run.metric(f"{key}_share") or 0.0) for key, name in names.items()}
    if not any(shares.values()):
        return budget.whole_of(
            {budget.DATA: data_ms, "everything else": step_ms - data_ms}, step_ms
        )
    return budget.whole_of(shares, step_ms)


def _padding_of(run: Run) -> float | None:
    useful = run.metric("useful_tokens")
    return None if useful is None else 1 - useful


def _memory_of(run: Run) -> tuple[float, float] | None:
    peak, total_gb = run.metric("peak_allocated_gb"), run.machine.get("gpu_memory_gb")
    return (peak, total_gb) if peak and total_gb else None


def _loader_of(recipe: Recipe, bytes: float = 0.0, fetch_cpu_ms: float | None = None) -> Loader:
    return Loader(
        num_workers=recipe.num_workers,
        batches=recipe.accumulation,
        pin_memory=recipe.pin_memory,
        persistent_workers=recipe.persistent_workers,
        batch_size=recipe.micro_batch,
        bytes=bytes,
        fetch_cpu_ms=fetch_cpu_ms,
    )


# --------------------------------------------------------------------------- a recipe of the course


def of_recipe(run: Run, trace: Recorded, from_idle_ms: float | None = None) -> Evidence:
    """Evidence of a recipe at work: its run, timed without the profiler, and a trace of a few steps
    of its trainer.

    from_idle_ms: the host's time for a step that begins with an idle GPU.
    """
    recipe = _recipe_of(run)
    if recipe is None:
        raise ValueError(f'The run "{run.run}" holds no recipe of this version of the course.')
    step_ms, data_ms = run.metric("step_ms") or 0.0, run.metric("data_ms") or 0.0
    data_ms = min(data_ms, 0.999 * step_ms)
    slowed = max(1.0, trace.wall_ms / trace.steps / step_ms)  # by the profiler
    log_ms = (
        min(_log_ms(trace) / slowed, step_ms - data_ms) if recipe.logging == "synchronous" else 0.0
    )
    queue = fitted(queue_of(trace, data_ms, log_ms), step_ms, from_idle_ms)
    device = "cuda" if trace.on_gpu else "cpu"
    return Evidence(
        source=f'the recipe "{run.run}"',
        device=device,
        step_ms=step_ms,
        queue=queue,
        budget=_budget(trace, queue, step_ms, data_ms, log_ms),
        rates=Rates(device),
        data_ms=data_ms,
        log_ms=log_ms,
        cores=usable_cores(),
        threads=_settings()["threads"],
        accumulation=recipe.accumulation,
        examples=recipe.micro_batch,
        reads=_reads_of(trace),
        loader=_loader_of(recipe),
        optimizer=Optimizer(
            "AdamW", "fused" if recipe.optimizer == "adamw-fused" else "foreach", 0, 0.0
        ),
        padding=_padding_of(run),
        recomputed=trace.recomputed() if recipe.checkpointing != "off" else 0.0,
        memory_gb=_memory_of(replace(run, machine=run.machine or machine_facts())),
        steps=len(run.samples.get("step_ms", ())),
        recipe=recipe,
        workload=run.workload,
        config=_settings(),
    )


def _settings() -> dict[str, Any]:
    import torch

    return {
        # Not `allow_tf32`, which raises where the newer of the two settings was used.
        "matmul_tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "cudnn_tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "threads": torch.get_num_threads(),
    }
