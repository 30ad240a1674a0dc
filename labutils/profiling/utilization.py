"""What a GPU does over time, by its driver: utilisation, power, energy. Without a GPU, what the CPU
does.

What the driver calls utilisation is the share of its last sampling period (between 1/6 and 1 s, by
the card) in which any kernel at all was running. It says nothing about how much of the GPU that
kernel used. For what kernels really took of the time, see `trace`: GPU-busy is exact, for the few
steps that it covers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import psutil

from labutils.profiling.machine import default_device, usable_cores

Reading = dict[str, Any]


class Sampler:
    """`with Sampler(read, interval_s) as s: ...` calls `read()` in a thread every `interval_s`.

    `samples` are the readings so far, with the time "t" in seconds since the block began; `failure`
    is the message of the reading that ended them, else "". It never raises into the program that is
    being measured. One reading is taken before the block begins and one when it has ended, so that
    the shortest block lies between two: a busy block can keep the thread from Python's interpreter
    for longer than it lasts.
    """

    def __init__(self, read: Callable[[], Reading], interval_s: float = 0.1) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s!r}: the interval must be above 0 seconds.")
        self.samples: list[Reading] = []
        self.failure = ""
        self._read, self._interval_s = read, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labutils-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(times in seconds, values) of the readings that hold `name`; two empty lists where none
        does.
        """
        pairs = [(s["t"], s[name]) for s in self.samples if name in s]
        return [t for t, _ in pairs], [value for _, value in pairs]

    def mean(self, name: str) -> float | None:
        """The mean of `name` over time, each reading standing for the time up to it; None where
        nothing was read.
        """
        times, values = self.series(name)
        spans = np.diff(times)
        if not values or spans.sum() <= 0:
            return values[-1] if values else None
        return float(np.average(values[1:], weights=spans))

    def _run(self) -> None:
        while not self.failure and not self._stop.wait(self._interval_s):
            self._take()
        if not self.failure:
            self._take()

    def _take(self) -> None:
        """One reading, or the failure."""
        try:
            reading = self._read()
        # whatever a driver or a vanished process raises must not reach the training loop
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            return
        self.samples.append({"t": time.perf_counter() - self._began} | reading)


class Utilization(Sampler):
    """`with Utilization() as u: ...` samples this process's first GPU, or, without one, the CPU.

    On a GPU a reading has `gpu` (utilisation, 0..1) and `power_w`, each absent where the driver
    doesn't say. Without a GPU it has `cpu`: this process and its children, as a share of the cores
    that it may use.
    """

    def __init__(self, interval_s: float = 0.1) -> None:
        self._device = gpu_device()
        self.what = "gpu" if self._device else "cpu"
        super().__init__(self._read_gpu if self._device else _CpuReader().read, interval_s)

    @property
    def share(self) -> float | None:
        """Mean utilisation over the block, 0..1: of the GPU, or else of the CPU cores."""
        return self.mean(self.what)

    def metrics(self) -> dict[str, float]:
        """{"gpu_utilization"} or {"cpu_utilization"}, "power_w"; what was not read is absent."""
        means = {f"{self.what}_utilization": self.share, "power_w": self.mean("power_w")}
        return {name: value for name, value in means.items() if value is not None}

    def _read_gpu(self) -> Reading:
        device = self._device
        readings = {
            "gpu": (device.gpu_utilization(), 1e-2),
            "power_w": (device.power_usage(), 1e-3),
        }
        # nvitop says "N/A", a string, for what a driver does not support
        numbers = {name: r for name, r in readings.items() if isinstance(r[0], int | float)}
        return {name: value * unit for name, (value, unit) in numbers.items()}


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


def gpu_device() -> Any:
    """nvitop's device behind PyTorch's first GPU, or None.

    nvitop is not even asked where PyTorch sees no GPU: without a driver it prints several lines of
    advice.
    """
    if default_device() != "cuda":
        return None
    try:
        import nvitop

        devices = nvitop.Device.cuda.all()
    except Exception:  # a container may have the GPU and not the driver's management library
        return None
    return devices[0] if devices else None


class Energy:
    """`with Energy() as energy: ...` then `energy.joules`, `energy.seconds` and `energy.watts`.

    NVIDIA's driver counts the energy that a card has used, in millijoules; Volta cards and later
    have the counter. It is the card's: the host's processor and memory come on top. It moves in
    steps of some tens of milliseconds, so watch for a second or more, and wait for the GPU before
    the block ends. `joules` and `watts` are None where the driver doesn't say.
    """

    def __init__(self) -> None:
        self._device = gpu_device()
        self.joules: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._began, self._before = time.perf_counter(), _millijoules(self._device)
        return self

    def __exit__(self, *exception: object) -> None:
        after = _millijoules(self._device)
        self.seconds = time.perf_counter() - self._began
        if self._before is not None and after is not None and after > self._before:
            self.joules = (after - self._before) / 1e3

    @property
    def watts(self) -> float | None:
        """Mean power over the block."""
        return None if self.joules is None else self.joules / self.seconds


def _millijoules(device: Any) -> int | None:
    """What nvitop's `device` has used since its driver was loaded; None where it doesn't say."""
    if device is None:
        return None
    try:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid())
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except Exception:  # not supported by this card or driver, or not allowed in this container
        return None
