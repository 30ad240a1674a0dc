"""Lab 00's runs: operations beside their floors, and the second constant of the host."""

import pytest

from labutils.labs import lab00_machine
from labutils.labs.lab00_machine import module_factor, operation_runs
from labutils.profiling.measured_rates import Probe
from labutils.profiling.operations import Timing
from labutils.results.records import Run


def test_an_operation_stands_beside_its_floor(monkeypatch):
    rates = {"tflops_fp32": [1.0], "copy_gb_per_s": [100.0]}
    monkeypatch.setattr(lab00_machine, "probe_machine", lambda: Probe("cpu", rates, {}))
    monkeypatch.setattr(lab00_machine, "measure_operation", lambda one: Timing([2.0], [3.0]))
    runs = operation_runs("tiny", "cpu", "fp32")
    assert len(runs) == 6 and runs["SiLU"].tags["operation"] == "SiLU"
    for run in runs.values():
        floor = max(run.metrics["flops"] / 1e9, run.metrics["bytes"] / 1e8)  # ms
        assert run.metrics["floor_ms"] == pytest.approx(floor)
        assert run.metrics["reached"] == pytest.approx(floor / 2)


def test_a_modules_launch_against_a_bare_one():
    bare, module = ({"median": us, "p10": us, "p90": us, "n": 1} for us in (4.0, 12.0))
    run = Run("00", "machine", metrics={"launch_us": bare})
    assert module_factor(run) is module_factor(None) is None
    run.metrics["module_launch_us"] = module
    assert module_factor(run) == 3
