"""The optional page on TensorFlow: it says why where there is none, and goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import papermill
import pytest

PAGE = (
    Path(__file__).resolve().parents[2] / "notebooks" / "optional" / "tensorflow_equivalents.ipynb"
)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here"
)
def test_without_tensorflow_it_says_so_and_goes_on(tmp_path):
    parameters = {"scale": "tiny", "results_dir": str(tmp_path)}
    done = papermill.execute_notebook(PAGE, tmp_path / "out.ipynb", parameters, progress_bar=False)
    said = "".join(
        str(output.get("data", "")) for cell in done.cells for output in cell.get("outputs", [])
    )
    assert said.count("No module named 'tensorflow'") >= 3
