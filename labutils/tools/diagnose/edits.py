"""The lines of a script that a fix changes, and what to write in their place.

The script is read, never run or written. Calls get their arguments (fixes.yaml), lines that are
known by number something in front of them; where attention is written out, its names are found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labutils.tools.diagnose.fixes import Fix, texts

FEW = 3
"""Of so many places at most a fix shows its lines."""


class Edit(NamedTuple):
    place: str
    """ "file:line"."""
    was: str
    now: str


def edits(fix: Fix, files: Sequence[str]) -> list[Edit]:
    """What to write for `fix` in `files`; what can't be read or found is left out."""
    found: list[Edit] = []
    for file in files:
        try:
            source = Path(file).read_text("utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        rows = [*_calls(fix, tree)] or [*_statements(fix, tree, source.splitlines(), file)]
        found += [Edit(f"{file}:{line}", was, now) for line, was, now in rows if was != now]
    return found[:FEW]


Row = tuple[int, str, str]


def _calls(fix: Fix, tree: ast.Module) -> Iterator[Row]:
    """Calls that get arguments. One that makes a Trainer's arguments is known by its folder."""
    words = texts()[fix.facts["best"] if fix.facts.get("best") in texts() else fix.name]
    wanted = {
        name.format(**fix.facts): {key: code.format(**fix.facts) for key, code in given.items()}
        for name, given in words.get("calls", {}).items()
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, was = _name(call.func), ast.unparse(call)
        has = {keyword.arg for keyword in call.keywords}
        given = wanted.get("Trainer" if {"output_dir", "max_steps"} & has else name, {})
        if name == "to" and "non_blocking" in given and not (call.args and "device" in was):
            continue  # a cast
        call.keywords = [k for k in call.keywords if k.arg not in given]
        values = [
            ast.keyword(key, ast.parse(code, mode="eval").body) for key, code in given.items()
        ]
        call.keywords += values
        yield call.lineno, was, ast.unparse(call)


def _statements(fix: Fix, tree: ast.Module, lines: list[str], file: str) -> Iterator[Row]:
    """Lines that get something in front of them, or in their place."""
    best = fix.facts.get("best")
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        was = ast.unparse(node)
        if before := texts()[fix.name].get("before"):
            if any(_at(place, file, node) for place in fix.sources):
                yield node.lineno, was, before + was
        elif best == "tf32" and was == "import torch":
            yield node.lineno, was, f"{was}\n{fix.do}"
        elif best in ("bf16", "fp16") and was.partition(" = ")[0] in _losses(tree):
            yield node.lineno, was, f"{fix.do.partition(':')[0]}: {was}"
        elif fix.name == "compile" and "optim" in was and ".parameters()" in was:
            model = was.partition(".parameters()")[0].rpartition("(")[2]
            yield node.lineno, was, f"{was}\n{model}.compile()"
        elif fix.name == "attention" and "softmax(" in was:
            yield node.lineno, was, f"{fix.do}  # for both products, with is_causal or a mask"


def _at(place: str, file: str, node: ast.stmt) -> bool:
    at, _, line = place.rpartition(":")
    within = line.isdecimal() and node.lineno <= int(line) <= (node.end_lineno or 0)
    return within and Path(at).name == Path(file).name


def _losses(tree: ast.Module) -> set[str]:
    """Names whose gradients are asked for: `loss.backward()`, `accelerator.backward(loss)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of = [c.args[0] if c.args else c.func.value for c in calls if _name(c.func) == "backward"]  # type: ignore[attr-defined]
    return {ast.unparse(node) for node in of}


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))
