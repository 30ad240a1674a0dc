"""What the lines of a training step call: writing, and reading of tensors, each with its source
line and its time.

For one or two steps Python reports every call (`sys.setprofile`). Each report takes time, which is
subtracted; what is inside one C call, such as a flush to the disk, isn't slowed at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

WRITERS = (
    *(
        "torch/utils/tensorboard/",
        "/tensorboard/",
        "/tensorboardX/",
        "/wandb/",
        "/mlflow/",
        "/comet_ml/",
        "/neptune/",
    ),
    *(
        "/tqdm/",
        "/torch/serialization.py",
        "/safetensors/",
        "/rich/",
        "/aim/",
        "/clearml/",
        "/csv.py",
    ),
)
"""Files whose functions write: what is inside one, sleeps and locks included, is writing."""
LOGGING, LOGGED = "/logging/__init__.py", "_log"
"""Python's own logging: a message below the logger's level comes to an end before this function,
and writes nothing.
"""
WRITING = {
    "write",
    "writelines",
    "flush",
    "fsync",
    "fdatasync",
    "print",
    "writerow",
    "writerows",
    "dump",
    "save",
}
COPIES = {"to", "cuda"}
"""Methods that may copy a tensor to the GPU."""
READS = {"item", "tolist", "numpy", "cpu"}
"""Methods of a tensor that bring its values to the host."""
WAITS = {"synchronize", "_cuda_synchronize"}


class Calls:
    """Between `resume()` and `pause()`, gathers `totals`: (kind, "file:line", what) -> [times, ms].

    kind: "write", "read" or "to". The line is the innermost of the script's own code.
    """

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str], list[float]] = {}
        self.events = 0
        self.open: list[tuple[Any, tuple[str, str, str], float, int, float]] = []
        self.reading_ms = 0.0
        self.event_ms = event_cost_ms()

    def resume(self) -> None:
        sys.setprofile(self._on_event)

    def pause(self) -> None:
        if sys.getprofile() == self._on_event:
            sys.setprofile(None)
        self.open.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No call is watched meanwhile. Another profiler, such as cProfile, is left alone."""
        watching = sys.getprofile() == self._on_event
        if watching:
            sys.setprofile(None)
        try:
            yield
        finally:
            if watching:
                sys.setprofile(self._on_event)

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """The totals as rows: `kind`, `place`, `what`, times `per_step` and `ms` a step."""
        names = ("kind", "place", "what", "per_step", "ms")
        return [
            dict(zip(names, (*key, times / steps, ms / steps), strict=True))
            for key, (times, ms) in self.totals.items()
        ]

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        self.events += 1
        if event == "c_call":
            self._c_call(frame, argument)
        elif event in ("c_return", "c_exception"):
            # Equal, not the same: from Python 3.12 on a method is bound anew for each of the two
            # events.
            if self.open and self.open[-1][0] == argument:
                self._close()
        elif event == "call":
            if not self._writing() and _is_writer(frame):
                self._begin(frame, ("write", place_of(frame.f_back), _name_of(frame)))
        elif self.open and self.open[-1][0] is frame:
            self._close()

    def _c_call(self, frame: FrameType, function: Any) -> None:
        name, owner = function.__name__, getattr(function, "__self__", None)
        if (name in READS and hasattr(owner, "untyped_storage")) or name in WAITS:
            self._begin(function, ("read", place_of(frame), f".{name}()"))
        elif name in COPIES and hasattr(owner, "untyped_storage") and owner.device.type == "cpu":
            self._begin(function, ("to", place_of(frame), ".to()"))
        elif name in WRITING and not self._writing() and _writes(name, owner):
            self._begin(function, ("write", place_of(frame), f"{name}()"))

    def _writing(self) -> bool:
        return any(key[0] == "write" for _, key, *_ in self.open)

    def _begin(self, marker: Any, key: tuple[str, str, str]) -> None:
        self.open.append((marker, key, time.perf_counter(), self.events, self.reading_ms))

    def _close(self) -> None:
        _, key, began, events, read_ms = self.open.pop()
        ms = 1e3 * (time.perf_counter() - began) - (self.events - events) * self.event_ms
        if key[0] != "write":
            self.reading_ms += ms
        else:
            ms -= (
                self.reading_ms - read_ms
            )  # a loss read in order to be written is a wait, and no writing
        row = self.totals.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += max(0.0, ms)


def event_cost_ms(calls: int = 2000) -> float:
    """What reporting one event costs, in milliseconds."""

    def nothing() -> None:
        pass

    def timed() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            nothing()
        return 1e3 * (time.perf_counter() - began)

    if sys.getprofile() is not None:
        return 0.0
    plain = min(timed() for _ in range(3))

    def report(frame: object, event: str, argument: object) -> bool:
        return event == "c_call"

    sys.setprofile(report)
    watched = min(timed() for _ in range(3))
    sys.setprofile(None)
    return max(0.0, watched - plain) / (2 * calls)


def _is_writer(frame: FrameType) -> bool:
    """Whether a frame is a Python function that writes."""
    file = frame.f_code.co_filename
    if file.endswith(LOGGING):
        return frame.f_code.co_name == LOGGED
    return any(part in file for part in WRITERS)


def _writes(name: str, owner: Any) -> bool:
    """Whether a C function of that name writes a file: those of files, `print`, and the operating
    system's own.
    """
    if isinstance(owner, io.StringIO | io.BytesIO):
        return False
    return isinstance(owner, io.IOBase) or name in (
        "print",
        "fsync",
        "fdatasync",
        "writerow",
        "writerows",
    )


def place_of(frame: FrameType | None) -> str:
    """ "file:line" of the innermost frame that is the script's own; of the innermost of all where
    none is.
    """
    at, first = frame, frame
    while at is not None and not is_own(at.f_code.co_filename):
        at = at.f_back
    at = at or first
    return f"{at.f_code.co_filename}:{at.f_lineno}" if at is not None else ""


def is_own(file: str) -> bool:
    """Whether a file is the script's own, and no library's."""
    return not (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith(("<", os.path.dirname(os.__file__)))
        or "/labutils_script_hooks/" in file
    )


def _name_of(frame: FrameType) -> str:
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
