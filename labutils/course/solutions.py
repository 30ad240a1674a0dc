"""Solutions of the labs' exercises, kept out of sight in notebooks/solutions: a cell for each
exercise of a lab, in order.
"""

from __future__ import annotations

import copy
import re

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from labutils.results.records import REPOSITORY

FOLDER = REPOSITORY / "notebooks" / "solutions"


def solutions_of(number: str) -> list[str]:
    """The code that solves each exercise of lab `number`; [] where that lab has no solutions."""
    import jupytext

    path = FOLDER / f"{number}.py"
    if not path.is_file():
        return []
    return [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]


def with_solutions(notebook: NotebookNode, number: str) -> NotebookNode:
    """`notebook` with each solution as a cell behind its exercise, tagged "solution", and the value
    that it gives; as it is where it has such cells already. Raises `ValueError` where exercises and
    solutions don't match."""
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    solutions = solutions_of(number)
    if not solutions or any("solution" in each for each in tags):
        return notebook
    if sum("exercise" in each for each in tags) != len(solutions):
        raise ValueError("It has not as many exercises as there are solutions: an older edition?")
    solved, cells, left = copy.copy(notebook), [], iter(enumerate(solutions, 1))
    for cell, each in zip(notebook.cells, tags, strict=True):
        cells.append(cell)
        if "exercise" in each:
            place, code = next(left)
            outputs = _value_of(f"{number}.{place}")
            cells.append(new_code_cell(code, outputs=outputs, metadata={"tags": ["solution"]}))
    solved.cells = cells
    return solved


def _value_of(exercise: str) -> list[NotebookNode]:
    """What the check of an exercise ("01.2") holds to be right, and why, as an output; none where
    it measures the code."""
    from labutils.course.exercises import answers

    if not (known := answers().get(exercise)):
        return []
    right = re.sub(r"(\.\d{3})\d+", r"\1", str(known.get("set") or known["right"]))
    return [new_output("stream", name="stdout", text=f"Right: {right}. {known['why']}\n")]
