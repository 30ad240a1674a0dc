"""The checks of two of lab 02's exercises, whose answers are computed from the traces that they are
about.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from torch.profiler import record_function

from labutils.profiling.intervals import difference
from labutils.profiling.trace import Trace


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
