"""Every lab and its exercises, from first cell to last at tiny, as `labutils run` does it.

Each solution is put behind its exercise, so one run shows each exercise as given and solved.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labutils.course.solutions import with_solutions
from labutils.results.records import REPOSITORY, read_records
from labutils.tools import run as runner

LABS = sorted(runner.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
SAID = re.compile(r"^Exercise (\d+): (\w+)", re.MULTILINE)
LIMIT_S = 600
"""A lab is made for 2 minutes on 2 idle cores; a busy machine may take longer."""


@pytest.mark.notebook
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_runs_to_its_end(path: Path, tmp_path: Path):
    said: list[str] = []
    options = runner.Options(scale="tiny", results=tmp_path, timeout=LIMIT_S)
    solved = with_solutions(nbformat.read(path, as_version=4), path.stem[:2])
    nbformat.write(solved, tmp_path / path.name)
    words = [str(tmp_path / path.name)]
    assert runner.run(words, options, said.append) == runner.ALL_RAN, "\n".join(said)

    records = read_records(tmp_path)
    assert records[-1]["status"] == "done"
    assert records[-1]["parameters"]["scale"] == "tiny"
    statuses = {record["run"]: str(record["status"]) for record in records if record.get("run")}
    assert not {
        name: status
        for name, status in statuses.items()
        if status != "ok" and not status.startswith("skipped")
    }
    executed = nbformat.read(tmp_path / "notebooks" / path.name, as_version=4)
    assert_exercises_are_judged(executed)
    (tmp_path / "notebooks" / path.name).with_suffix(".html").read_text()


def assert_exercises_are_judged(executed: NotebookNode) -> None:
    """Every exercise fails as it is given, and passes with its solution."""
    given, solved = (words_said(executed, tag) for tag in ("exercise", "solution"))
    assert len(given) >= 3 and given.keys() == solved.keys(), (given, solved)
    assert not [words for words in given.values() if "right" in words], given
    assert not [words for words in solved.values() if words - {"right", "inconclusive"}], solved


def words_said(executed: NotebookNode, tag: str) -> dict[str, set[str]]:
    """Exercise's number -> the first words of what its cells of this tag printed about it."""
    said: dict[str, set[str]] = {}
    for cell in executed.cells:
        if tag in cell.metadata.get("tags", []):
            text = "".join(output.get("text", "") for output in cell.outputs)
            for number, word in SAID.findall(text):
                said.setdefault(number, set()).add(word)
    return said


@pytest.mark.notebook
def test_papermill_alone_runs_a_lab_from_another_folder(tmp_path, monkeypatch):
    """`labutils` need not be installed for it, and parameters may come from a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABUTILS_RESULTS")
    (tmp_path / "some.yaml").write_text("scale: tiny\nresults_dir: mine\n")
    lab = str(next(path for path in LABS if path.stem.startswith("12")))
    words = ["--no-progress-bar", lab, "out.ipynb", "-f", "some.yaml", "-p", "article", "A1"]
    done = subprocess.run(
        [sys.executable, "-m", "papermill", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    record = read_records(tmp_path / "mine")[-1]
    assert (record["status"], record["parameters"]["article"]) == ("done", "A1")


@pytest.mark.notebook
@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_without_tensorflow_its_page_says_so_and_goes_on(tmp_path):
    page = runner.NOTEBOOKS / "optional" / "tensorflow_equivalents.ipynb"
    assert runner.run([str(page)], runner.Options(scale="tiny", results=tmp_path)) == runner.ALL_RAN
    cells = nbformat.read(tmp_path / "notebooks" / page.name, as_version=4).cells
    assert str([cell.get("outputs") for cell in cells]).count("No module named 'tensorflow'") >= 3
