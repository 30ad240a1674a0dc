"""`labutils report`: whatever results there are, it reads them, says where they come from, and fits
the page.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from labutils.results import claims, records, report
from labutils.results.judges import NOT_TESTABLE, VERDICTS
from labutils.results.records import REFERENCE, Results, Run

CLAIMS = claims.load_claims()


@pytest.fixture(autouse=True)
def no_other_results(tmp_path, monkeypatch):
    """Neither the checkout's own results nor its reference."""
    monkeypatch.setattr(report, "REPOSITORY", tmp_path / "checkout")
    monkeypatch.setattr(records, "REFERENCE", tmp_path / "reference" / "h200" / "results.jsonl")
    monkeypatch.delenv("LABUTILS_RESULTS", raising=False)


def rung(name: str, ms: float) -> Run:
    return Run("04", name, metrics={"step_ms": ms}, tags={"experiment": "ladder", "rung": name})


def write(folder: Path, *runs: Run) -> Path:
    kept = Results(folder)
    for run in runs:
        kept.append(run)
    return folder


def as_json(capsys: pytest.CaptureFixture[str], results: Path | None) -> dict:
    assert report.main(results, as_json=True) == 0
    said = capsys.readouterr().out
    assert said.isascii()
    return json.loads(said)


def as_text(capsys: pytest.CaptureFixture[str], results: Path | None) -> str:
    assert report.main(results, as_json=False) == 0
    return capsys.readouterr().out


def test_every_claim_is_listed_without_any_results(capsys):
    page = as_json(capsys, None)
    assert [claim["id"] for claim in page["claims"]] == list(CLAIMS)
    assert sum(page["verdicts"].values()) == len(CLAIMS)
    assert page["results"] == page["labs_done"] == []
    assert "labutils run" in as_text(capsys, None)


def test_the_h200_s_records_are_reported_whole(capsys):
    page = as_json(capsys, REFERENCE.parent)
    assert len(page["labs_done"]) == 12
    assert page["verdicts"].keys() <= set(VERDICTS)
    assert page["verdicts"].get(NOT_TESTABLE, 0) < len(CLAIMS) / 2
    said = as_text(capsys, REFERENCE.parent)
    assert all(id in said for id in CLAIMS)
    assert len(said.partition("\nSummary")[2].splitlines()) < 40 and "\nA4, here: " in said
    table = [line for line in said.splitlines() if line[:1] in "┃│├┏┡└"]
    assert "\x1b" not in said and max(map(len, table)) <= report.WIDTH


def test_a_file_a_folder_or_the_environment_names_the_results(tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "sets" / "a", rung("stock", 1160))
    pages = [as_json(capsys, place) for place in (folder, folder.parent, folder / "results.jsonl")]
    monkeypatch.setenv("LABUTILS_RESULTS", str(folder))
    assert [as_json(capsys, None)] * 3 == pages
    records.REFERENCE.parent.mkdir(parents=True)
    records.REFERENCE.write_text('{"lab": "04", "ru')
    assert "git checkout reference" in as_json(capsys, None)["passed_over"][0]


def test_of_each_lab_the_newest_file_counts_and_none_is_mixed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    zero, three = (Run("03", "", tags={"workers": n}, metrics={"step_ms": 1}) for n in (0, 3))
    old = write(tmp_path / "results" / "old", zero, rung("stock", 1160))
    new = write(tmp_path / "results" / "new", three)
    os.utime(old / "results.jsonl", (1, 1))
    os.utime(new / "results.jsonl", (2, 2))
    page = report.read_page(report.result_files(None))
    assert [(run.lab, run.tags.get("workers")) for run in page.here] == [("04", None), ("03", 3)]
    assert page.files == [old / "results.jsonl", new / "results.jsonl"]
    records.Results(old).append({"lab": "03", "status": "done"})  # the newer run was cut off
    os.utime(old / "results.jsonl", (1, 1))
    assert report.read_page(report.result_files(None)).files == [old / "results.jsonl"]


def test_a_lab_that_sums_up_reads_what_is_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    together = write(tmp_path / "together", rung("stock", 1), Run("12", "scoreboard"))
    assert report.files_beside(together, "12") == [together / "results.jsonl"]
    other = write(tmp_path / "results" / "other", rung("stock", 1)) / "results.jsonl"
    alone = write(tmp_path / "results" / "alone", Run("12", "scoreboard"))
    assert report.files_beside(alone, "12") == [other]
    own = alone / "results.jsonl"  # of which nobody knows what else it holds
    own.write_text(own.read_text() + '{"lab": "04", "ru')
    assert report.files_beside(alone, "12") == [other, own]
