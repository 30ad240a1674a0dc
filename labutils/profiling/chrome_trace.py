"""Reads the Chrome trace files that `torch.profiler` writes, event by event.

A profile of a few training steps with Python stacks easily holds a million events. The file is read
in pieces and never held whole, so memory is only what the reader of the events keeps.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PIECE = 1 << 18  # bytes read at a time
_BETWEEN = re.compile(r"[\s,]*")
_LIST_KEY = re.compile(r'"traceEvents"\s*:\s*\[')


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a trace one by one: of an object with "traceEvents", or a bare list; .gz is
    unpacked on the way.

    A file that breaks off (a run was killed while writing) ends with its last whole event. Raises
    `FileNotFoundError`, or `ValueError` where the file is no trace.
    """
    pieces, text = _pieces(Path(path)), ""
    while (at := _list_start(text)) is None:
        piece = next(pieces, "")
        if not piece:
            raise ValueError(f"{path} is no profiler trace: there is no list of traceEvents in it.")
        text += piece
    yield from _objects(text, at, pieces)


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file, piece by piece; a gzip stream that breaks off ends where it does."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    unpack = zlib.decompressobj(wbits=31).decompress if path.suffix == ".gz" else bytes
    with path.open("rb") as file:
        while raw := file.read(_PIECE):
            if text := decode(unpack(raw)):
                yield text


def _list_start(text: str) -> int | None:
    """Position after the bracket that opens the list of events, or None while it has not been read."""
    if text.lstrip().startswith("["):
        return text.index("[") + 1
    found = _LIST_KEY.search(text)
    return found.end() if found else None


def _objects(text: str, at: int, pieces: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects from `text[at:]` and on through `pieces`, to the end of the list or of the
    file.
    """
    decoder = json.JSONDecoder(strict=False)
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            piece = next(pieces, "")
            if not piece:
                return
            text, at = text[at:] + piece, 0
        else:
            yield event
