"""GPU utilisation over time, as nvitop and `nvidia-smi` show it; on a machine without a GPU, the
CPU's.

What the driver calls utilisation is the share of its last sampling period (between 1/6 and 1 s, by
the card) in which any kernel at all was running. Two things follow. It says nothing about how much
of the GPU that kernel used. And asking more often than the counter is renewed returns the same
number again: the driver's own buffer of samples (`driver_samples`, nvmlDeviceGetSamples) holds each
of them once, with its time.

For what kernels really took of the time, see `trace`: GPU-busy is exact, for the few steps that it
covers.
"""

from __future__ import annotations

import os
from typing import Any, Self

from labutils.profiling.machine import default_device, usable_cores
from labutils.profiling.sampling import Reading, Sampler

GB = 10**9


class Utilization(Sampler):
    """`with Utilization() as u: ...` samples this process's first GPU, or, without one, this
    process and the machine.

    On a GPU a reading has `gpu` (utilisation, 0..1), `memory_gb` (of all processes), `power_w` and
    `sm_clock_mhz`, each absent where the driver doesn't say. Without a GPU it has `cpu` (this
    process and its children, as a share of the cores it may use), `machine_cpu` (everybody's, of
    all cores) and `memory_gb` (resident, children included).
    """

    def __init__(self, interval_s: float = 0.1) -> None:
        self._device = gpu_device()
        self._driver: list[tuple[float, float]] = []
        self._since_us = 0
        super().__init__(self._read_gpu if self._device else _CpuReader().read, interval_s)

    @property
    def what(self) -> str:
        """The name of the reading that `share` gives: "gpu" or "cpu"."""
        return "gpu" if self._device else "cpu"

    @property
    def share(self) -> float | None:
        """Mean utilisation over the block, 0..1: of the GPU, or of the CPU cores where there is
        none.
        """
        return self.mean(self.what)

    @property
    def driver_samples(self) -> list[tuple[float, float]]:
        """(seconds since the block began, utilisation in 0..1) from the driver's own buffer; []
        where it has none.
        """
        return self._driver

    def metrics(self) -> dict[str, float]:
        """{"gpu_utilization"} or {"cpu_utilization"}, and what else was read; {} where nothing was."""
        means = {f"{self.what}_utilization": self.share, "power_w": self.mean("power_w")}
        return {name: value for name, value in means.items() if value is not None}

    def __enter__(self) -> Self:
        self._since_us = _newest_driver_sample(self._device)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._driver = _driver_samples(self._device, self._since_us, self.now)

    def _read_gpu(self) -> Reading:
        device = self._device
        raw = {
            "gpu": (device.gpu_utilization(), 1e-2),
            "memory_gb": (device.memory_used(), 1 / GB),
            "power_w": (device.power_usage(), 1e-3),
            "sm_clock_mhz": (device.sm_clock(), 1),
        }
        # nvitop says "N/A", a string, for what a driver does not support
        return {
            name: value * unit
            for name, (value, unit) in raw.items()
            if isinstance(value, int | float)
        }


class _CpuReader:
    """Reads what this process, its children and the whole machine did with the CPU since the
    reading before.
    """

    def __init__(self) -> None:
        import psutil

        self._cores = usable_cores()
        self._processes = {os.getpid(): psutil.Process()}
        self.read()  # psutil counts from the first call on, which itself returns 0

    def read(self) -> Reading:
        import psutil

        me = self._processes[os.getpid()]
        for child in me.children(recursive=True):
            self._processes.setdefault(child.pid, child)
        percent, resident = 0.0, 0
        for pid, process in list(self._processes.items()):
            try:
                percent += process.cpu_percent()
                resident += process.memory_info().rss
            except psutil.Error:  # a DataLoader worker that has ended
                del self._processes[pid]
        return {
            "cpu": percent / 100 / self._cores,
            "machine_cpu": psutil.cpu_percent() / 100,
            "memory_gb": resident / GB,
        }


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


def _driver_buffer(device: Any, since_us: int) -> list[tuple[int, float]]:
    """(microseconds on the driver's clock, utilisation in 0..1) of the driver's samples; [] where
    it has none.
    """
    try:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid())
        _, samples = pynvml.nvmlDeviceGetSamples(
            handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since_us
        )
        return sorted(
            (s.timeStamp, s.sampleValue.uiVal / 100) for s in samples if s.timeStamp > since_us
        )
    except Exception:  # not supported by this card or driver
        return []


def _newest_driver_sample(device: Any) -> int:
    """Time of the driver's newest sample, in microseconds on its clock; 0 where it has none."""
    samples = _driver_buffer(device, 0) if device else []
    return samples[-1][0] if samples else 0


def _driver_samples(device: Any, since_us: int, now_s: float) -> list[tuple[float, float]]:
    """The driver's samples after `since_us`, with the newest taken to be of this moment, `now_s`."""
    samples = _driver_buffer(device, since_us) if device and since_us else []
    return [(now_s - (samples[-1][0] - stamp) / 1e6, value) for stamp, value in samples]
