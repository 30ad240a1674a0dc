"""Lab 00's runs: operations beside their floors."""

import pytest

from labutils.labs import lab00_machine
from labutils.labs.lab00_machine import operation_runs
from labutils.profiling.measured_rates import Probe
from labutils.profiling.operations import Timing


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
