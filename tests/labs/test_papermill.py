"""Papermill itself runs a lab from any folder, and `labutils` need not be installed for it."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest

from labutils.results.records import REPOSITORY, read_records
from labutils.tools import run

LAB = next(run.NOTEBOOKS.glob("11_*.ipynb"))


@pytest.mark.notebook
def test_a_lab_runs_from_another_folder_with_a_file_of_parameters_and_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABUTILS_RESULTS")
    (tmp_path / "some.yaml").write_text(
        "scale: tiny\nresults_dir: mine\nplanned_steps: 500\narticle: A2\n"
    )
    said = papermill("-f", "some.yaml", "-p", "article", "A1")
    assert said.returncode == 0, said.stderr
    done = read_records(tmp_path / "mine")[-1]
    own = {name: done["parameters"][name] for name in ("scale", "planned_steps", "article")}
    assert (done["status"], own) == (
        "done",
        {"scale": "tiny", "planned_steps": 500, "article": "A1"},
    )
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    told = [
        output.data["text/markdown"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if "data" in output and "text/markdown" in output.data
    ]
    assert f"Results: `{tmp_path / 'mine'}`" in told[0]  # in full: we are not in the checkout
    assert f"labutils report --results {tmp_path / 'mine'}" in told[-1]


def papermill(*words: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "papermill",
        "--no-progress-bar",
        str(LAB),
        "out.ipynb",
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )
