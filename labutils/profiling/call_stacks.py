"""Who called whom at a moment: slices of time on one thread nest like the calls they stand for.

The profiler records Python functions and PyTorch operators as slices (start, end, name). The slices
of one thread that hold a moment, from the longest to the shortest, are the call stack of that
moment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_LIBRARY = re.compile(
    r"torch|torchvision|accelerate|diffusers|transformers|peft|datasets|bitsandbytes|trl|"
    r"transformer_engine|unsloth|unsloth_zoo|triton|safetensors|huggingface_hub|numpy|PIL|"
    r"tensorboard|tqdm|nvitop|ipykernel|IPython|papermill|pytest|_pytest|pluggy"
)
_NOTEBOOK = re.compile(r"ipykernel_\d+|<ipython-input")
_PACKAGES_FOLDER = re.compile(r"^.*?(site-packages|dist-packages|lib/python\d[\d.]*)/")
_FUNCTION = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILTIN = re.compile(r"<built-in \w+ (?P<name>\S+?)(?: of (?P<owner>\S+) object)?(?: at \S+)?>")


class Slice(NamedTuple):
    """Something that took time, in ms: on a host thread, or on a GPU stream (`thread` either way).

    `correlation` ties a CUDA call to the GPU work that it caused. `blocks` are a kernel's thread
    blocks for each multiprocessor. `dims`, `types` and `strides` are an operator's inputs'. Each is
    None where it was not recorded.
    """

    start: float
    end: float
    name: str
    thread: Any = None
    correlation: int | None = None
    blocks: float | None = None
    dims: Any = None
    types: Any = None
    strides: Any = None

    @property
    def ms(self) -> float:
        return self.end - self.start


class Frame(NamedTuple):
    """A Python function on a stack: `line` is where it begins in a trace, and the very line in a
    live stack.
    """

    file: str
    line: int
    function: str

    @property
    def own(self) -> bool:
        """Whether it is the learner's or the course's code, not a library's or Python's."""
        parts = self.file.split("/")
        if _NOTEBOOK.search(self.file) or "labutils" in parts:
            return True
        if _PACKAGES_FOLDER.match(self.file) or self.file.startswith("<"):
            return False
        top = parts[0].removesuffix(".py")
        return not any(map(_LIBRARY.fullmatch, parts)) and top not in sys.stdlib_module_names

    @property
    def short_file(self) -> str:
        """The file as a person names it: from its package on; "this notebook" for a cell."""
        if _NOTEBOOK.search(self.file):
            return "this notebook"
        file = _PACKAGES_FOLDER.sub("", self.file)
        parts = file.split("/")
        for place, part in enumerate(parts):
            if part == "labutils" or _LIBRARY.fullmatch(part):
                return "/".join(parts[place:])
        return parts[-1] if file.startswith("/") else file

    def __str__(self) -> str:
        return f"{self.short_file}: {self.function}"


def blamed_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of one's own code, or else the innermost, of a stack from the outermost
    frame in; None for no frames.
    """
    innermost = frames[-1] if frames else None
    return next((frame for frame in reversed(frames) if frame.own), innermost)


def enclosing(slices: Sequence[Slice], moments: Sequence[float]) -> list[tuple[Slice, ...]]:
    """For each of `moments` (ascending), the slices that hold it, the outermost first.

    `slices` are of one thread, sorted by start and, for equal starts, the longest first.
    """
    stacks, stack, at = [], [], 0
    for moment in moments:
        while at < len(slices) and slices[at].start <= moment:
            while stack and stack[-1].end <= slices[at].start:
                stack.pop()
            stack.append(slices[at])
            at += 1
        stack = [s for s in stack if s.end > moment]
        stacks.append(tuple(stack))
    return stacks


def own_time(slices: Sequence[Slice]) -> Iterator[tuple[Slice, float]]:
    """(slice, its duration less that of the slices directly inside it), the innermost first;
    `slices` as for `enclosing`.
    """
    stack: list[tuple[Slice, list[float]]] = []
    ends = float("inf")
    for item in [*slices, Slice(ends, ends, "")]:
        while stack and stack[-1][0].end <= item.start:
            done, inside = stack.pop()
            yield done, done.end - done.start - sum(inside)
        if stack:
            stack[-1][1].append(item.end - item.start)
        stack.append((item, []))


def blamed_operator(ops: Sequence[Slice]) -> str:
    """The operator to blame for what happens inside `ops` (outermost first); "" outside any.

    That is the outermost of the aten operators that end the stack: "aten::item", not the
    "aten::_local_scalar_dense" that it calls.
    """
    blamed = ""
    for op in reversed(ops):
        if blamed and not op.name.startswith("aten::"):
            break
        blamed = op.name
    return blamed


def python_stack(slices: Sequence[Slice]) -> tuple[tuple[Frame, ...], str]:
    """(Python frames from the outermost in, the C function called last such as "Tensor.item") of
    recorded functions.
    """
    frames: list[Frame] = []
    builtin = ""
    for entry in slices:
        if parts := _FUNCTION.match(entry.name):
            frames.append(Frame(parts["file"], int(parts["line"]), parts["function"]))
            builtin = ""
        elif parts := _BUILTIN.match(entry.name):
            owner = (parts["owner"] or "").split(".")[-1]
            builtin = f"{owner}.{parts['name']}" if owner else parts["name"]
    return tuple(frames), builtin
