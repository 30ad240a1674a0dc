"""A run's name is for people: whatever runs are called, what is said of them is the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from labutils.labs import lab11_scoreboard
from labutils.results import report
from labutils.results.records import REFERENCE, read_records, read_runs, to_frame


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


def test_the_scoreboard_says_the_same(pages):
    said = []
    titles = {f"{number:02}": f"lab {number}" for number in range(11)}
    for page in pages:
        board = lab11_scoreboard.scoreboard(page.judgements)
        tables = [
            board,
            lab11_scoreboard.tally(board),
            lab11_scoreboard.on_record(page.here, page.labs_done, titles),
        ]
        whose, options = lab11_scoreboard.options_at_hand(page.here, page.reference)
        tables.append(options)
        said.append(
            (
                [table.to_csv() for table in tables],
                lab11_scoreboard.next_steps(board, page.labs_done, titles, on_gpu=True),
                whose,
            )
        )
    assert said[0] == said[1]


def test_the_ladder_and_tables_of_runs_are_the_same(pages, copy):
    ours, theirs = (report.ladder(page.here) for page in pages)
    assert len(ours) == 17 and ours.equals(theirs)
    frames = [to_frame(read_runs(file)).drop(columns="run") for file in (REFERENCE, copy)]
    assert frames[0].equals(frames[1])
