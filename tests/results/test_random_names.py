"""A run's name is for people: whatever runs are called, what is said of them is the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from labutils.labs import (
    lab09_toggles,
    lab11_distributed,
    lab12_scoreboard,
)
from labutils.results import report
from labutils.results.records import REFERENCE, read_records, to_frame


def renamed(folder: Path, seed: int) -> Path:
    """A copy of the H200's records in which every run has a random name."""
    words = random.Random(seed)
    records = read_records(REFERENCE)
    for record in records:
        if "run" in record:
            record["run"] = f"{words.getrandbits(64):x}"
    folder.mkdir()
    file = folder / "results.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return renamed(tmp_path_factory.mktemp("renamed") / "h200", seed=18)


@pytest.fixture(scope="module")
def pages(copy):
    return [report.read_page([file], file) for file in (REFERENCE, copy)]


def test_the_report_says_the_same(pages, copy, capsys):
    said = []
    for page, file in zip(pages, (REFERENCE, copy), strict=True):
        data = report.as_data(page)
        assert data.pop("results") == [str(file)]
        report.show(page)
        said.append((data, capsys.readouterr().out.replace(str(file), "FILE")))
    assert said[0] == said[1]






@pytest.mark.parametrize(
    ("lab", "table", "tags"),
    [
        ("09", lab09_toggles.switch_table, {"experiment": "toggles"}),
        ("11", lab11_distributed.against_prediction, {"experiment": ("training", "all-reduce")}),
    ],
)
def test_tables_of_labs_say_the_same(pages, lab, table, tags):
    ours, theirs = (table(list(page.here.select(lab, **tags))) for page in pages)
    assert len(ours) > 3 and ours.to_csv() == theirs.to_csv()
