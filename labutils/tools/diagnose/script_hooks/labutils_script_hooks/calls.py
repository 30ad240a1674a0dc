"""What the lines of a training step call: writing, and reading of tensors, each with its source
line and its time.

For two steps Python reports every call (`sys.setprofile`). Each report takes time, which is
subtracted. What is inside one C call, such as a flush to the disk, isn't slowed at all.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from types import FrameType
from typing import Any

WRITERS = re.compile(
    r"/(tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune|aim|clearml|tqdm|rich|safetensors)/"
    r"|/torch/serialization\.py$|/csv\.py$"
)
"""Files whose functions write: what is inside one, sleeps and locks included, is writing."""
LOGGING, LOGGED = "/logging/__init__.py", "_log"
"""Python's own logging writes in this function; a message below the logger's level ends before."""
FILE_METHODS = {"write", "writelines", "flush"}
WRITING = {"print", "fsync", "fdatasync", "writerow", "writerows"}
COPIES = {"to", "cuda"}
"""Methods that may copy a tensor to the GPU."""
READS = {"item", "tolist", "numpy", "cpu"}
"""Methods of a tensor that bring its values to the host."""
WAITS = {"synchronize", "_cuda_synchronize"}

Key = tuple[str, str, str]
"""(kind, "file:line", what). The kind is "write", "read" or "to". The line is the innermost of the
script's own code."""


class Calls:
    """Between `resume()` and `pause()`, gathers `totals`: key -> [times, milliseconds]."""

    def __init__(self) -> None:
        self.totals: dict[Key, list[float]] = {}
        self.open: list[tuple[Any, Key, float, float]] = []
        self.apart_s = 0.0
        """Seconds that no writing may be charged with: of the reports themselves, and of reading.
        A loss that is read in order to be written is a wait, and no writing."""

    def resume(self) -> None:
        sys.setprofile(self._on_event)

    def pause(self) -> bool:
        """Whether calls were watched. Another profiler, such as cProfile, is left alone."""
        watching = sys.getprofile() == self._on_event
        if watching:
            sys.setprofile(None)
            self.open.clear()
        return watching

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """The totals as rows: `kind`, `place`, `what`, times `per_step` and `ms` a step."""
        names = ("kind", "place", "what", "per_step", "ms")
        return [
            dict(zip(names, (*key, times / steps, ms / steps), strict=True))
            for key, (times, ms) in self.totals.items()
        ]

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        began = time.perf_counter()
        if event == "c_call":
            self._c_call(frame, argument)
        elif event == "call":
            if not self._writing() and _is_writer(frame):
                # Python 3.10 has no qualified name.
                what = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
                self._begin(frame, "write", frame.f_back, what)
        elif self.open:
            # Equal, not the same: from Python 3.12 on a method is bound anew for its return.
            ended = frame if event == "return" else argument
            if self.open[-1][0] == ended:
                self._close(began)
        self.apart_s += time.perf_counter() - began

    def _c_call(self, frame: FrameType, function: Any) -> None:
        name, owner = function.__name__, getattr(function, "__self__", None)
        of_tensor = hasattr(owner, "untyped_storage")
        if (of_tensor and name in READS) or name in WAITS:
            self._begin(function, "read", frame, f"{name}()")
        elif of_tensor and name in COPIES and owner.device.type == "cpu":
            self._begin(function, "to", frame, f"{name}()")
        elif _writes(name, owner) and not self._writing():
            self._begin(function, "write", frame, f"{name}()")

    def _writing(self) -> bool:
        return any(key[0] == "write" for _, key, *_ in self.open)

    def _begin(self, marker: Any, kind: str, caller: FrameType | None, what: str) -> None:
        key = (kind, place_of(caller), what)
        self.open.append((marker, key, time.perf_counter(), self.apart_s))

    def _close(self, ended: float) -> None:
        _, key, began, apart_s = self.open.pop()
        took_s = max(0.0, ended - began - (self.apart_s - apart_s))
        if key[0] != "write":
            self.apart_s += took_s
        row = self.totals.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += 1e3 * took_s


def _is_writer(frame: FrameType) -> bool:
    """Whether a frame is a Python function that writes."""
    file = frame.f_code.co_filename
    if file.endswith(LOGGING):
        return frame.f_code.co_name == LOGGED
    return WRITERS.search(file) is not None


def _writes(name: str, owner: Any) -> bool:
    """Whether a C function writes: `print`, the operating system's own, or the method of a file."""
    if name in FILE_METHODS:
        return isinstance(owner, io.IOBase) and not isinstance(owner, io.StringIO | io.BytesIO)
    return name in WRITING


def place_of(frame: FrameType | None) -> str:
    """ "file:line" of the innermost frame that is the script's own, or else of the innermost."""
    at = frame
    while at is not None and not is_own(at.f_code.co_filename):
        at = at.f_back
    at = at or frame
    return f"{at.f_code.co_filename}:{at.f_lineno}" if at is not None else ""


def is_own(file: str) -> bool:
    """Whether a file is the script's own, and no library's."""
    return not (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith(("<", os.path.dirname(os.__file__)))
        or "/labutils_script_hooks/" in file
    )
