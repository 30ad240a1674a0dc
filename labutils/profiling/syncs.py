"""The lines that make the host wait for the GPU, without a profiler.

`torch.cuda.set_sync_debug_mode("warn")` makes PyTorch warn whenever one of its operators
synchronises. Each warning is raised on the very line at fault, so the Python stack of that moment
is the answer: a second witness beside the trace, which knows how long each wait took but only the
function that it happened in. PyTorch's mode does not see synchronisations made outside its
operators, such as `torch.cuda.synchronize()`.
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labutils.profiling.call_stacks import Frame, blamed_frames

_SIGN = "synchronizing CUDA operation"


@dataclass(frozen=True)
class SyncSite:
    """A line that synchronised.

    `frame` is the innermost of one's own code, `library` the library line that did it (None where
    it was one's own), `source` the text of `frame`'s line, `count` how often.
    """

    frame: Frame
    library: Frame | None
    source: str
    count: float


@contextlib.contextmanager
def watch_syncs() -> Iterator[list[tuple[Frame, ...]]]:
    """Inside the block, every synchronisation of a PyTorch operator adds its stack (outermost
    first) to the list.

    Does nothing, and yields a list that stays empty, without a GPU.
    """
    import torch

    seen: list[tuple[Frame, ...]] = []
    if not torch.cuda.is_available():
        yield seen
        return

    def note(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if _SIGN in str(message):
            seen.append(live_stack())
        else:
            before(message, category, filename, lineno, file, line)

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def live_stack() -> tuple[Frame, ...]:
    """The Python stack of the caller's caller, outermost first, without the frames of the
    `warnings` module.
    """
    stack = traceback.extract_stack()[:-2]
    frames = (Frame(entry.filename, entry.lineno or 0, entry.name) for entry in stack)
    return tuple(frame for frame in frames if not frame.file.endswith("/warnings.py"))


def find_syncs(trainer: Any, steps: int = 1) -> list[SyncSite]:
    """Run `steps` steps of `trainer`: the lines that synchronised, with counts per step, the most
    often first.

    [] without a GPU.
    """
    with watch_syncs() as seen:
        for _ in range(steps):
            trainer.step()
    return [replace(site, count=site.count / steps) for site in sites_of(seen)]


def sites_of(stacks: Sequence[Sequence[Frame]]) -> list[SyncSite]:
    """The lines in `stacks` that are to blame, each once with its count, the most often first."""
    counts = Counter(blamed_frames(stack) for stack in stacks if stack)
    return [
        SyncSite(frame, library, linecache.getline(frame.file, frame.line).strip(), count)
        for (frame, library), count in counts.most_common()
    ]


def with_lines(rows: Sequence[dict[str, Any]], sites: Sequence[SyncSite]) -> list[dict[str, Any]]:
    """The rows of a trace's `sync_table`, each with the exact `line` and its `source` where a site
    tells it.

    A trace names the functions, a site the lines: they are matched by own function and library
    function. Where several lines of one function synchronise, a row's `line` is the list of them.
    Rows without a site are returned unchanged.
    """
    exact = []
    for row in rows:
        names = row["where"], row.get("library", "")
        mine = [site for site in sites if (str(site.frame), str(site.library or "")) == names]
        lines = sorted({(site.frame.line, site.source) for site in mine})
        if lines:
            numbers, sources = zip(*lines, strict=True)
            line = numbers[0] if len(lines) == 1 else list(numbers)
            row = row | {"line": line, "source": " | ".join(sources)}
        exact.append(row)
    return exact
