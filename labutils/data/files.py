"""Files of a cache that several processes write at once, and that no crash or full disk leaves
half-written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ABANDONED_S = 3600
"""A temporary file older than this was left behind by a process that died."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write what `path` is to hold: it appears there when the block ends well, and
    leaves nothing else.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds either all of it or what it held before."""
    with whole_file(path) as part:
        part.write_bytes(content)


@contextlib.contextmanager
def cache_folder(folder: Path, what: str) -> Iterator[None]:
    """Make `folder` and clear it of what died half-written. Raises `OSError` that says what to type
    where `what` can't be kept there: no permission, no room, a file in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        yield
    except OSError as error:
        raise OSError(
            f"{what} can't be kept in {folder} ({error.strerror or error}). Make room or put right "
            "what is in the way "
            "there, or choose a folder that you may write to: export LABUTILS_CACHE=FOLDER"
        ) from error


def _sweep(folder: Path) -> None:
    """Remove what interrupted processes left half-written."""
    for part in folder.glob(".*.part"):
        try:
            if time.time() - part.stat().st_mtime > ABANDONED_S:
                part.unlink()
        except OSError:  # another process was quicker, or the folder is read-only
            continue
