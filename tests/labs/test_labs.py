"""Every lab, from its first cell to its last, at the scale tiny, as `labutils run` does it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from exercises_of import misjudged

from labutils.results.records import read_records, read_runs
from labutils.tools import run as runner

LABS = sorted(runner.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
# a lab is made for 2 minutes on 2 idle cores; the rest is for a machine that has other things to do
LIMIT_S = 600


@pytest.fixture(scope="session")
def course_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole course, as a person would have it."""
    return tmp_path_factory.mktemp("course")


def test_the_labs_of_the_first_story_are_there():
    assert [path.stem[:2] for path in LABS][:5] == ["00", "01", "02", "03", "04"]


@pytest.mark.notebook
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_runs_to_its_end(path: Path, course_results: Path):
    said: list[str] = []
    options = runner.Options(scale="tiny", results=course_results, timeout=LIMIT_S)
    assert runner.run([path.stem], options, said.append) == runner.ALL_RAN, "\n".join(said)

    number = path.stem[:2]
    records = [record for record in read_records(course_results) if record["lab"] == number]
    assert records[-1]["status"] == "done"
    assert records[-1]["parameters"]["scale"] == "tiny"
    runs = read_runs(course_results, number)
    assert any(run.ok for run in runs.values())
    failed = {
        name: run.status
        for (_, name), run in runs.items()
        if not run.ok and not run.status.startswith("skipped: ")
    }
    assert not failed

    executed = nbformat.read(course_results / "notebooks" / path.name, as_version=4)
    assert not misjudged(executed), "an exercise fails as it is given, and passes with its solution"
