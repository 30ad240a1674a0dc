"""The lines of a script that a fix changes, and what to write in their place.

The script is read, never run or written. Calls get their arguments (advice.yaml), lines that are
known by number something in front of them; where attention is written out, its names are found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labutils.tools.diagnose.fixes import HALVES, Fix, texts

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
    for file in files if fix.name in texts() else ():
        try:
            tree = ast.parse(Path(file).read_text("utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        mine = Path(file).name
        here = [p.rpartition(":")[2] for p in fix.sources if Path(p).name.startswith(mine)]
        named = {int(line) for line in here if line.isdecimal()}
        rows = [*_calls(fix, tree, named)] or [*_statements(fix, tree, named)]
        found += [Edit(f"{file}:{line}", was, now) for line, was, now in rows]
    return found[:FEW]


def _calls(fix: Fix, tree: ast.Module, named: set[int]) -> Iterator[tuple[int, str, str]]:
    """Calls that get arguments. One that makes a Trainer's arguments is known by its folder."""
    words = texts()[fix.facts["best"] if fix.facts.get("best") in texts() else fix.name]
    wanted = {
        name.format(**fix.facts): {key: code.format(**fix.facts) for key, code in given.items()}
        for name, given in words.get("calls", {}).items()
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, was = _name(call.func), ast.unparse(call)
        has = {keyword.arg for keyword in call.keywords}
        given = wanted.get("TRAINER" if {"output_dir", "max_steps"} & has else name, {})
        if name == "to" and call.lineno not in named:
            continue  # of a model, or a cast
        call.keywords = [k for k in call.keywords if k.arg not in given]
        call.keywords += [ast.keyword(key, ast.Name(code)) for key, code in given.items()]
        if (now := ast.unparse(call)) != was:
            yield call.lineno, was, now


def _statements(fix: Fix, tree: ast.Module, named: set[int]) -> Iterator[tuple[int, str, str]]:
    """Statements that get something around them, behind them, or in their place."""
    best, before = fix.facts.get("best"), texts()[fix.name].get("before")
    parts = ((node, name) for node in ast.walk(tree) for name in ("body", "orelse", "finalbody"))
    bodies = (getattr(node, name, None) for node, name in parts)
    for body in (body for body in bodies if isinstance(body, list)):
        for place, node in enumerate(body):
            was = ast.unparse(node)
            if hasattr(node, "body"):
                continue
            if before and named & {*range(node.lineno, node.end_lineno + 1)}:
                yield node.lineno, was, before + was
            elif best == "tf32" and was == "import torch":
                yield node.lineno, was, f"{was}\n{fix.do}"
            elif best in HALVES and was.startswith(tuple(f"{loss} = " for loss in _losses(tree))):
                first = _first_of(body, place)
                lines = [ast.unparse(one) for one in body[first : place + 1]]
                now = [fix.do.partition(":")[0] + ":", *(f"    {line}" for line in lines)]
                yield body[first].lineno, "\n".join(lines), "\n".join(now)
            elif fix.name == "compile" and "optim" in was and ".parameters()" in was:
                model = was.partition(".parameters()")[0].rpartition("(")[2]
                yield node.lineno, was, f"{was}\n{model}.compile()"
            elif fix.name == "attention" and "softmax(" in was:
                yield node.lineno, was, f"{fix.do}; in the place of both products"


def _first_of(body: list[ast.stmt], place: int) -> int:
    """Where the assignments begin that lead to the one at `place`, copies to a device apart."""
    needed = _names(body[place], ast.Load)
    for before in reversed(body[:place]):
        leads = isinstance(before, ast.Assign) and needed & _names(before, ast.Store)
        if not leads or ".to(" in ast.unparse(before):
            break
        place -= 1
        needed |= _names(before, ast.Load)
    return place


def _names(node: ast.AST, used: type) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, used)}


def _losses(tree: ast.Module) -> set[str]:
    """Names whose gradients are asked for: `loss.backward()`, `accelerator.backward(loss)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = [call for call in calls if _name(call.func) == "backward"]
    return {ast.unparse(c.args[0] if c.args else c.func.value) for c in asked}  # type: ignore


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))
