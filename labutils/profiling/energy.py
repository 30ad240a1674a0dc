"""What a stretch of training drew from the wall, as the GPU's own meter has it.

NVIDIA's driver (NVML) counts the energy that a card has used since the driver was loaded, in
millijoules; Volta cards and later have the counter. It is the card's: the host's processor and
memory come on top, and a machine without such a card gives nothing. The counter moves in steps of
some tens of milliseconds, so watch for a second or more.
"""

from __future__ import annotations

import time
from typing import Any, Self

from labutils.profiling.utilization import gpu_device


class Energy:
    """`with Energy() as energy: ...` then `energy.joules`, `energy.seconds` and `energy.watts`.

    `joules` and `watts` are None where the driver doesn't say. Wait for the GPU before the block
    ends.
    """

    def __init__(self) -> None:
        self._device = gpu_device()
        self.joules: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._began, self._before = time.perf_counter(), millijoules(self._device)
        return self

    def __exit__(self, *exception: object) -> None:
        after = millijoules(self._device)
        self.seconds = time.perf_counter() - self._began
        if self._before is not None and after is not None and after > self._before:
            self.joules = (after - self._before) / 1e3

    @property
    def watts(self) -> float | None:
        """Mean power over the block."""
        return None if self.joules is None else self.joules / self.seconds


def millijoules(device: Any) -> int | None:
    """What nvitop's `device` has used since its driver was loaded; None where there is none or it
    doesn't say.
    """
    if device is None:
        return None
    try:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid())
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except Exception:  # not supported by this card or driver, or not allowed in this container
        return None
