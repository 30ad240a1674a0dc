"""A background thread that reads something again and again, and can't disturb what it watches.

Readings are dictionaries of numbers with the time "t" in seconds since the sampler began. A reading
that fails ends the sampling and is remembered; it never raises into the program that is being
measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

Reading = dict[str, Any]


class Sampler:
    """`with Sampler(read, interval_s) as s: ...` calls `read()` every `interval_s` and gathers what
    it returns.

    `samples` are the readings so far, `failure` the message of the reading that ended it, else "".
    One reading is taken before the block begins and one when it has ended, so that the shortest
    block lies between two: a busy block can keep the thread from Python's interpreter for longer
    than it lasts.
    """

    def __init__(self, read: Callable[[], Reading], interval_s: float = 0.1) -> None:
        if not interval_s > 0:
            raise ValueError(
                f"interval_s={interval_s!r}: the time between readings must be above 0 seconds."
            )
        self.samples: list[Reading] = []
        self.failure = ""
        self._read = read
        self._interval_s = interval_s
        self._began = time.perf_counter()
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

    @property
    def now(self) -> float:
        """Seconds since the sampler began, as in the readings' "t"."""
        return time.perf_counter() - self._began

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
        if not values:
            return None
        spans = [after - before for before, after in zip(times, times[1:], strict=False)]
        weighted = sum(value * span for value, span in zip(values[1:], spans, strict=True))
        return weighted / sum(spans) if sum(spans) > 0 else values[-1]

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
        self.samples.append({"t": self.now} | reading)
