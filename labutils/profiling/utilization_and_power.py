"""What a GPU does over time, by its driver: utilisation, power. Without a GPU, what the CPU does.

The course shows two figures:

- *Utilisation* (`Utilization.share`): what the driver says. It is the share of the driver's last
  sampling period (between 1/6 and 1 s, by the card) in which any kernel at all was running.
- *GPU-busy* (`gpu_busy`, which `trace` calls for the traced steps): the union of kernel intervals
  over wall time. It is exact for the few steps that it covers.

Neither says how much of the GPU a kernel used.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import numpy as np
import psutil

from labutils.profiling.cuda import gpu_device
from labutils.profiling.intervals import Interval, total, union
from labutils.profiling.machine import usable_cores

Reading = dict[str, float]


def gpu_busy(kernels: Iterable[Interval], wall_ms: float) -> float:
    """GPU-busy, 0..1: the time in which at least one of `kernels` (start and end in ms) ran, over
    `wall_ms`.
    """
    return total(union(kernels)) / wall_ms


class Utilization:
    """`with Utilization() as u: ...` reads what this process's first GPU does, or, without one, the
    CPU, in a thread every `interval_s`.

    On a GPU a reading has `gpu` (utilisation, 0..1) and `power_w`, each absent where the driver
    doesn't say. Without a GPU it has `cpu`: this process and its children, as a share of the cores
    that it may use. `samples` are the readings so far, with the time "t" in seconds since the block
    began. A reading that fails is the last one: nothing is raised into the program that is being
    measured. One reading is taken before the block begins and one when it
    has ended, so that the shortest block lies between two: a busy block can keep the thread from
    Python's interpreter for longer than it lasts.
    """

    def __init__(self, interval_s: float = 0.1) -> None:
        device = gpu_device()
        self.what = "gpu" if device else "cpu"
        self.samples: list[Reading] = []
        self._read = partial(_gpu_reading, device) if device else _CpuReader().read
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labutils-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self._takes():
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join(timeout=5)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(times in seconds, values) of the readings that hold `name`; two empty lists where none
        does.
        """
        held = [sample for sample in self.samples if name in sample]
        return [sample["t"] for sample in held], [sample[name] for sample in held]

    def mean(self, name: str) -> float | None:
        """The mean of `name` over time, each reading standing for the time up to it; None where
        nothing was read.
        """
        times, values = self.series(name)
        spans = np.diff(times)
        if not values or spans.sum() <= 0:
            return values[-1] if values else None
        return float(np.average(values[1:], weights=spans))

    @property
    def share(self) -> float | None:
        """Mean utilisation over the block, 0..1: of the GPU, or else of the CPU cores."""
        return self.mean(self.what)

    def metrics(self) -> dict[str, float]:
        """{"gpu_utilization"} or {"cpu_utilization"}, "power_w"; what was not read is absent."""
        means = {f"{self.what}_utilization": self.share, "power_w": self.mean("power_w")}
        return {name: value for name, value in means.items() if value is not None}

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._interval_s)
            if not self._takes():
                return

    def _takes(self) -> bool:
        """Take one reading; False where it fails."""
        try:
            reading = self._read()
        except Exception:  # whatever a driver or a vanished process raises
            return False
        self.samples.append({"t": time.perf_counter() - self._began} | reading)
        return True


def _gpu_reading(device: Any) -> Reading:
    """What the driver tells of a GPU, nvitop's `device`."""
    percent, milliwatts = device.gpu_utilization(), device.power_usage()
    readings = {"gpu": (percent, 1e-2), "power_w": (milliwatts, 1e-3)}
    # nvitop says "N/A", a string, for what a driver does not support
    return {name: n * unit for name, (n, unit) in readings.items() if isinstance(n, int)}


class _CpuReader:
    """Reads what this process and its children did with the CPU since the reading before."""

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._processes = {os.getpid(): psutil.Process()}
        self.read()  # psutil counts from the first call on, which itself returns 0

    def read(self) -> Reading:
        for child in self._processes[os.getpid()].children(recursive=True):
            self._processes.setdefault(child.pid, child)
        percent = 0.0
        for pid, process in list(self._processes.items()):
            try:
                percent += process.cpu_percent()
            except psutil.Error:  # a DataLoader worker that has ended
                del self._processes[pid]
        return {"cpu": percent / 100 / self._cores}
