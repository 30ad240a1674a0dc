"""Our recorded notebooks are the labs as they stand, and their verdicts are those of today.

After a judge or a claim has changed, `python tests/labs/test_recorded_pages.py` prints the verdict
tables anew. It touches nothing that was measured.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labutils.course.recorded import shown_runs
from labutils.course.tables import verdict_table
from labutils.results.judges import judge_all
from labutils.results.records import REFERENCE, REPOSITORY, Runs, reference_runs

PAGES = sorted(REFERENCE.parents[1].glob("*/*.ipynb"))


def verdicts(path: Path, page: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """(what a cell shows, the same by today's judges). *here* are the page's own runs, *ours* those
    of our other machines."""
    runs, here = reference_runs(), shown_runs(path.stem[:2])
    (host,) = {run.host for run in here}
    others = Runs(run for run in runs if run.host != host)
    for cell in page.cells:
        for claims in re.findall(r"lab\.verdict\(([^)]*)\)", cell.source):
            (shown,) = [one.data for one in cell.outputs if "| claim | pub" in str(one.get("data"))]
            yield shown, verdict_table(judge_all(ast.literal_eval(f"({claims},)"), here, others))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_recorded_page_is_todays_lab_with_todays_verdicts(path: Path):
    page = nbformat.read(path, as_version=4)
    lab = nbformat.read(REPOSITORY / "notebooks" / path.name, as_version=4)
    recorded = [one for one in page.cells if "injected-parameters" not in one.metadata.tags]
    assert [cell.source for cell in recorded] == [cell.source for cell in lab.cells]
    assert all(c.outputs for c in recorded if re.search(r"^lab\.(table|show)", c.source, re.M))
    tables = list(verdicts(path, page))
    assert len(tables) == sum("lab.verdict(" in cell.source for cell in lab.cells) > 0
    assert [shown["text/markdown"] for shown, _ in tables] == [table for _, table in tables]


if __name__ == "__main__":
    for place in PAGES:
        notebook = nbformat.read(place, as_version=4)
        for output, table in verdicts(place, notebook):
            output["text/markdown"] = table
        nbformat.write(notebook, place)
