"""A run's name is for people: whatever runs are called, what is said of them is the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

from labutils.labs import lab09_toggles, lab11_distributed
from labutils.results import records, report
from labutils.results.records import REFERENCE, read_records

TABLES = {
    lab09_toggles.switch_table: {"experiment": "toggles"},
    lab11_distributed.against_prediction: {"experiment": ("training", "all-reduce")},
}


def renamed(folder: Path, seed: int) -> Path:
    """A copy of the H200's records in which every run has a random name."""
    words = random.Random(seed)
    lines = read_records(REFERENCE)
    for record in lines:
        if "run" in record:
            record["run"] = f"{words.getrandbits(64):x}"
    file = records.Results(folder).path
    file.write_text("".join(json.dumps(record) + "\n" for record in lines))
    return file


def test_report_and_tables_say_the_same(tmp_path, capsys, monkeypatch):
    said = []
    for seed in (18, 19):
        file = renamed(tmp_path / str(seed) / "h200", seed)
        monkeypatch.setattr(records, "REFERENCE", file)
        page = report.read_page([file])
        data = report.as_data(page)
        assert data.pop("results") == [str(file)]
        report.show(page)
        tables = [table(list(page.here.select(**tags))) for table, tags in TABLES.items()]
        assert all(len(table) > 3 for table in tables)
        shown = capsys.readouterr().out.replace(str(file), "FILE")
        said.append((data, shown, [table.to_csv() for table in tables]))
    assert said[0] == said[1]
