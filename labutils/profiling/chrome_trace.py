"""Reads the Chrome trace files that `torch.profiler` writes."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace: of an object with "traceEvents", or a bare list; .gz is unpacked.

    Raises `FileNotFoundError`, or `ValueError` where the file is no trace or breaks off.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            content = json.load(file, strict=False)
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole profiler trace: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{path} is no profiler trace: there is no list of traceEvents in it.")
    return events
