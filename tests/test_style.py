"""How the course is written: short functions, notebooks clean and paired. Ruff sees to the rest."""

import ast
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

HOUSE = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((HOUSE / "notebooks").glob("**/*.ipynb"))
MOST_LINES_A_FUNCTION, MOST_LINES_A_CELL = 60, 40


def test_functions_are_at_most_60_lines_long():
    long = []
    for path in (HOUSE / "labutils").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_A_FUNCTION:
                    long.append(f"{path.relative_to(HOUSE)}: {node.name} has {lines}")
    assert not long, long


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_agrees_with_its_text(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "jupytext"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "lines_to_next_cell"}
        assert not cell.get("outputs") and cell.get("execution_count") is None
    text = jupytext.read(path.parent / "py" / f"{path.stem}.py")
    halves = [
        [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in half.cells]
        for half in (notebook, text)
    ]
    assert halves[0] == halves[1], "out of step: make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_enough_to_be_read_and_words_are_few(path: Path):
    long, cells = {}, nbformat.read(path, as_version=4).cells
    for cell in cells:
        lines = cell.source.splitlines()
        exercise = {"exercise", "solution"} & set(cell.metadata.get("tags", []))
        if cell.cell_type == "code" and not exercise and len(lines) > MOST_LINES_A_CELL:
            long[lines[0]] = len(lines)
    assert not long
    assert sum(len(one.source.split()) for one in cells if one.cell_type == "markdown") <= 2500


def test_pages_lead_where_they_say():
    for page in [HOUSE / "README.md", HOUSE / "TEACHING.md", *(HOUSE / "docs").glob("*.md")]:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        missing = [target for target in targets if not (page.parent / target).exists()]
        assert not missing, f"{page.name}: {missing}"
