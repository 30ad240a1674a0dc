"""Lab 00's runs: what this machine reaches, and six operations of training beside their floors."""

from __future__ import annotations

from statistics import median

from labutils.profiling import cuda
from labutils.profiling.measured_rates import probe_machine
from labutils.profiling.operations import course_operations, measure_operation
from labutils.results.records import Run, summarise


def machine_run() -> Run:
    """All that the probe measures, and what this PyTorch was compiled for."""
    run = Run("00", "machine", tags={"experiment": "machine"}, samples=probe_machine().samples)
    run.metrics = {item: summarise(values) for item, values in run.samples.items()}
    if architectures := cuda.architectures():
        run.metrics["torch_architectures"] = architectures
    return run


def operation_runs(scale: str, device: str, dtype: str) -> dict[str, Run]:
    """Name -> run of each of the course's operations: its time, its floor on this machine, and
    `reached`, the floor's share of the time."""
    probe, runs = probe_machine(), {}
    for one in course_operations(scale, device, dtype):
        alone = measure_operation(one)
        floor = probe.roofline(one.dtype).floor_ms(one.flops, one.bytes)
        run = Run("00", one.name, samples={"alone_ms": alone})
        run.tags = {"experiment": "operation", "operation": one.name}
        run.metrics = {
            "alone_ms": summarise(alone),
            "flops": one.flops,
            "bytes": one.bytes,
            "intensity": one.intensity,
            "floor_ms": floor,
            "reached": floor / median(alone),
        }
        runs[one.name] = run
    return runs
