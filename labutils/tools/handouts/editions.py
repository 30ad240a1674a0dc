"""The editions of an executed notebook: sanitised both, and the student's without any solution.

What isn't known to be clean is left out: of metadata only the tags and the kernel's name stay, of
outputs only text, Markdown and pictures. Papermill's traces, widget states, warnings, progress bars
and the machine's paths thereby go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

STUDENT, INSTRUCTOR = EDITIONS = ("student", "instructor")
EXECUTED = "executed"
"""What nobody gives out: a lab as it was executed, to be read where it was."""
INJECTED = "injected-parameters"
PICTURES = ("image/png", "image/svg+xml", "image/jpeg")

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PACKAGES = re.compile(r"(?:~|/)[^\s`'\"<>|,;()\[\]]*?/(?:site|dist)-packages/")
_TRACES = re.compile(r"[\w.-]+_\d+\.\d{10,}(?=\.pt\.trace\.json)")
"""A profiler's file is named by host and process."""
_PATHS = re.compile(
    r"(?<![\w:/.~…-])(?:~|/(?!(?:dev|proc|sys)/)[\w.+@-]+)(?:/[\w.+@-]+)*/([\w.+@-]+)/?"
)
"""An absolute path, or one from a home folder, down to its last name. What all Linux machines share
is no trace.
"""


def edition_of(executed: NotebookNode, edition: str) -> NotebookNode:
    """`executed` as `edition` is to have it; `executed` itself is left as it was."""
    cells = [cell for cell in executed.cells if INJECTED not in _tags(cell)]
    secret = _given_away(cells) if edition == STUDENT else set()
    kept = [
        _clean(cell, place, outputs=place not in secret)
        for place, cell in enumerate(cells)
        if edition != STUDENT or "solution" not in _tags(cell)
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return new_notebook(
        cells=kept, metadata={"kernelspec": kernel, "language_info": {"name": "python"}}
    )


def sanitised(text: str) -> str:
    """`text` without colour codes and without where things lie on the machine that wrote it."""
    text = _TRACES.sub("trace", _PACKAGES.sub("", _COLOURS.sub("", text)))
    return _PATHS.sub(r"…/\1", text)


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _clean(cell: NotebookNode, place: int, outputs: bool) -> NotebookNode:
    """The cell with its source and tags, and what of its outputs is for readers."""
    metadata = {"tags": list(_tags(cell))} if _tags(cell) else {}
    name = {"id": f"cell-{place}", "metadata": metadata}
    if cell.cell_type != "code":
        used = {
            file: data
            for file, data in cell.get("attachments", {}).items()
            if f"attachment:{file}" in cell.source
        }
        return new_markdown_cell(cell.source, **name, **({"attachments": used} if used else {}))
    shown = [clean for output in cell.outputs if outputs and (clean := _output(output)) is not None]
    if (
        len(shown) > 1
        and cell.outputs[-1].output_type == "execute_result"
        and "text/plain" in shown[-1].data
    ):
        shown.pop()  # the value of the last line, after what the cell meant to show
    return new_code_cell(cell.source, **name, outputs=list(_joined(shown)))


def _output(output: NotebookNode) -> NotebookNode | None:
    """Text, Markdown or a picture; None for what is noise in a handout."""
    if output.output_type == "stream":
        return (
            new_output("stream", name="stdout", text=sanitised(output.text))
            if output.name == "stdout"
            else None
        )
    if output.output_type == "error":
        return new_output(
            "stream", name="stdout", text=sanitised(f"{output.ename}: {output.evalue}\n")
        )
    data = output.get("data", {})
    if any(kind.startswith("application/vnd.jupyter.widget") for kind in data):
        return None
    for kind in (*PICTURES, "text/markdown", "text/plain"):
        if kind in data:
            told = data[kind] if kind in PICTURES else sanitised(data[kind])
            return new_output("display_data", data={kind: told})
    return None


def _joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Printed lines that follow one another as one output: a kernel cuts them where it happened to
    flush.
    """
    for place, output in enumerate(outputs):
        if output.output_type == "stream" and place and outputs[place - 1].output_type == "stream":
            continue
        run = [output.text] if output.output_type == "stream" else []
        for other in outputs[place + 1 :] if run else ():
            if other.output_type != "stream":
                break
            run.append(other.text)
        yield new_output("stream", name="stdout", text="".join(run)) if run else output


# What solutions give away


def _given_away(cells: list[NotebookNode]) -> set[int]:
    """Places of the cells whose outputs tell a solved answer.

    Those are the later cells that read a name which a solution set, or one which such a cell set in
    its turn; and all whose outputs repeat a line that a solution was the first to print.
    """
    solved: set[str] = set()
    told: set[str] = set()
    secret: set[str] = set()
    found = set()
    for place, cell in enumerate(cells):
        lines = set(_lines(cell))
        if "solution" in _tags(cell):
            solved |= names_in(cell)[1]
            secret |= lines - told
            continue
        read, written = names_in(cell)
        if read & solved or lines & secret:
            found.add(place)
            solved |= written
        else:
            solved -= written
            told |= lines
    return found


def _lines(cell: NotebookNode) -> list[str]:
    """What the cell's outputs say, line by line; those without a letter or figure rule a table."""
    texts = [
        o.get("text", "") or o.get("data", {}).get("text/markdown", "")
        for o in cell.get("outputs", [])
    ]
    return [line.strip() for text in texts for line in text.splitlines() if re.search(r"\w", line)]


def names_in(cell: NotebookNode) -> tuple[set[str], set[str]]:
    """(names that the cell reads before it sets them, names that it sets): none where it is no
    plain Python.
    """
    try:
        statements = ast.parse(cell.source).body if cell.cell_type == "code" else []
    except SyntaxError:  # magics; labs have none
        statements = []
    read: set[str] = set()
    written: set[str] = set()
    for statement in statements:
        targets = _targets(statement)
        read |= _loaded(statement, targets) - written
        written |= targets
    return read, written


def _loaded(statement: ast.stmt, targets: set[str]) -> set[str]:
    """Names that the statement takes from the notebook: not the variables of its comprehensions,
    functions or loops.
    """
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    binds_first = isinstance(statement, ast.For | ast.With | ast.FunctionDef | ast.ClassDef)
    inner = stored if binds_first else stored - targets
    before = targets if isinstance(statement, ast.AugAssign) else set()
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - inner | before


def _targets(statement: ast.stmt) -> set[str]:
    """Names that the statement leaves set in the notebook."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    inside = (
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
        ast.GeneratorExp,
        ast.Lambda,
        ast.FunctionDef,
        ast.ClassDef,
    )
    found: set[str] = set()
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, inside)]
    return found
