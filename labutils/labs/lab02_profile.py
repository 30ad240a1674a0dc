"""Lab 02's own: what a kernel costs the host on this machine, and the checks of two exercises,
whose answers are computed from the traces they are about.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from torch import nn
from torch.profiler import record_function

from labutils.profiling import cuda
from labutils.profiling.intervals import difference
from labutils.profiling.trace import Trace, profile
from labutils.results.records import read_runs


def host_us_per_kernel(results: Path, machine: dict) -> float:
    """What a kernel costs the host in a module under autograd and autocast, in microseconds: as
    lab 00 measured it on this machine, else measured now. On a CPU, an operator.
    """
    runs = read_runs(results).select("00", experiment="machine")
    same = [run for run in runs if run.machine.get("gpu") == machine.get("gpu")]
    known = [run.metric("module_launch_us") for run in same]
    return next((us for us in known if us), None) or _measured_host_us()


def _measured_host_us() -> float:
    device = "cuda" if cuda.available() else "cpu"
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()) for _ in range(16)]
    model, x = nn.Sequential(*layers).to(device), torch.randn(8, 64, device=device)

    def step() -> None:
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = model(x).square().mean()
        loss.backward()

    with tempfile.TemporaryDirectory() as folder:
        trace = profile(SimpleNamespace(step=step), steps=1, folder=folder, with_stack=False)
    seconds = []
    for _ in range(20):
        cuda.synchronize()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return 1e6 * median(seconds) / len(trace.launched())


def answers_in(trace: Trace) -> dict[str, float]:
    """The three answers of exercise 1. Without a GPU in the trace, operators stand for kernels and
    for launches."""
    (forward,) = (mark for mark in trace.annotations if mark.name == "forward")
    operators = list(chain(*trace.ops.values()))
    launches = [call for call in trace.calls if re.match("cu(da)?Launch", call.name)]
    idle = trace.idle_time if trace.on_gpu else difference([trace.wall], trace.time_of(operators))
    inside = [c for c in launches or operators if forward.start <= c.start < forward.end]
    return {
        "kernels": len(trace.kernels or operators),
        "longest_gap_ms": max(end - start for start, end in idle),
        "us_a_launch": 1e3 * forward.ms / len(inside),
    }


_WHERE = {
    "kernels": "Count the slices of the GPU's streams, copies aside",
    "longest_gap_ms": "Begin at the left edge, where the host reads an image",
    "us_a_launch": "Divide the length of `forward` by the launches that begin in it",
}


def check_reading(trace: Trace, **given: float | None) -> str:
    """What is to be said of the answers to exercise 1, 2 % off at most."""
    if None in given.values():
        return "Exercise 1: no answer yet. Open the file in Perfetto, and put in three numbers."
    for name, right in answers_in(trace).items():
        if not abs(given[name] - right) <= 0.02 * right:
            return f"Exercise 1: not yet: {name}. {_WHERE[name]}."
    return "Exercise 1: right. The profiler is in these microseconds: without it, they are fewer."


def check_profiled(profiled: Callable[[Callable[[], None], Path], dict[str, float]]) -> str:
    """Whether `profiled(step, folder)` of exercise 2 runs five steps of a step with planted times,
    and returns what the last three took, by mark.
    """
    taken: dict[str, list[float]] = {"read": [], "compute": []}

    def step() -> None:
        for name, ms in (("read", 6), ("compute", 2), ("compute", 2)):
            with record_function(name):
                began = time.perf_counter()
                time.sleep(ms / 1e3)
                taken[name].append(1e3 * (time.perf_counter() - began))

    with tempfile.TemporaryDirectory() as folder:
        said = profiled(step, Path(folder))
    if said is None:
        return "Exercise 2: fill in profiled first; it returns None."
    steps = len(taken["read"])
    if steps != 5:
        return f"Exercise 2: not yet. It ran {steps} steps; 1 is passed over, 1 warms up, 3 count."
    right = {"read": sum(taken["read"][2:]) / 3, "compute": sum(taken["compute"][4:]) / 3}
    for name, ms in right.items():
        if not abs(said.get(name, 0) - ms) <= 0.15 * ms + 0.3:
            return (
                f"Exercise 2: not yet. {name!r} took {ms:.2f} ms a step, by the clock; your trace "
                f"says {said.get(name)}."
            )
    return "Exercise 2: right. " + ", ".join(f"{n}: {ms:.2f} ms" for n, ms in right.items()) + "."
