"""Every lab has its exercises, and what judges them in an executed notebook (`test_labs`) can tell."""

from __future__ import annotations

import dis
import types
from pathlib import Path

import nbformat
import pytest
from exercises_of import exercises_of, lacking, misjudged
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labutils.tools import run

LABS = sorted(run.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_has_exercises_with_solutions_and_one_that_is_measured(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert not lacking(notebook)
    assert misjudged(notebook), "nothing has run, so nothing can have been told"


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_no_exercise_needs_what_only_a_solution_makes(path: Path):
    """The student edition has no solutions."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    made = {
        name
        for cell in code
        if "solution" in cell.metadata.get("tags", [])
        for name in _bound(cell.source)
        - {name for other in code if other is not cell for name in _bound(other.source)}
    }
    used = {
        name
        for cell in code
        if "solution" not in cell.metadata.get("tags", [])
        for name in _read(cell.source)
    }
    assert not made & used


def _bound(source: str) -> set[str]:
    """Names that a cell makes at its top level."""
    return {
        i.argval
        for i in dis.get_instructions(_code(source))
        if i.opname in ("STORE_NAME", "STORE_GLOBAL")
    }


def _read(source: str) -> set[str]:
    """Names that a cell reads, inside of its functions too, other than those that it makes itself."""
    found, waiting = set(), [_code(source)]
    while waiting:
        code = waiting.pop()
        found |= {
            i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_NAME", "LOAD_GLOBAL")
        }
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found - _bound(source)


def _code(source: str):
    return compile(source, "cell", "exec")


# What judges


def notebook(
    *said: tuple[str, str], measured: bool = True, numbers: tuple[int, ...] = (1, 2, 3)
) -> nbformat.NotebookNode:
    """Three exercises; `said`: what each printed as given and solved."""
    cells = [new_markdown_cell("## Exercises"), new_code_cell("import torch")]
    for number, (given, solved) in zip(numbers, said, strict=True):
        call = f"faster_than({number}, f)" if measured else "check()"
        cells.append(new_markdown_cell(f"Some words.\n\n**{number}.** Do it."))
        cells.append(_cell(f"print({call})", "exercise", given))
        cells.append(_cell(f"solved({call})", "solution", solved))
    return new_notebook(
        cells=[
            *cells,
            new_markdown_cell("## What you did\n\n**9.** Nothing."),
            new_code_cell("done()"),
        ]
    )


def _cell(source: str, tag: str, said: str) -> nbformat.NotebookNode:
    outputs = [new_output("stream", name="stdout", text=said)] if said else []
    return new_code_cell(source, metadata={"tags": [tag]}, outputs=outputs)


GOOD = [(f"Exercise {n}: not yet. Why?\n", f"Exercise {n}: right. So it is.\n") for n in (1, 2, 3)]


def test_exercises_that_fail_as_given_and_pass_solved_are_well():
    assert not misjudged(notebook(*GOOD))
    assert not lacking(notebook(*GOOD))
    assert list(exercises_of(notebook(*GOOD))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("third", "fault"),
    [
        (("Exercise 3: right: 2\n", "Exercise 3: right\n"), "3, as given: ['right: 2']"),
        (
            ("Exercise 3: inconclusive. 1 to 3\n", "Exercise 3: inconclusive. 1 to 3\n"),
            "3, solved: ['inconclusive. 1 to 3']",
        ),
        (("", "Exercise 3: right\n"), "3, as given: []"),
        (("Exercise 3: set it\n", ""), "3, solved: []"),
        (("Exercise 3: set it\n", "Exercise 2: right\n"), "3, solved: ['as exercise 2: right']"),
        (
            ("Exercise 3: set it\nExercise 3: right\n", "Exercise 3: right\n"),
            "3, as given: ['set it', 'right']",
        ),
    ],
)
def test_an_exercise_that_tells_nothing_is_found(third, fault):
    assert misjudged(notebook(*GOOD[:2], third)) == [fault]


def test_what_a_stored_notebook_lacks_is_found():
    assert lacking(notebook(*GOOD, measured=False)) == ["none is measured"]
    assert lacking(notebook(*GOOD, numbers=(1, 2, 4))) == ["not numbered from 1 on"]
    assert lacking(notebook(*GOOD[:2], numbers=(1, 2))) == ["2 exercises are too few"]
    unsolved = notebook(*GOOD)
    unsolved.cells = [cell for cell in unsolved.cells if "solved(faster_than(2" not in cell.source]
    assert lacking(unsolved) == [
        "2 has no solution cell",
        "2 has a solution that isn't checked by solved()",
    ]
