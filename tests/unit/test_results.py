"""results.jsonl: whatever happens to the file or is put into it, what was whole is read back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.results import records
from labutils.results.records import (
    Results,
    Run,
    named,
    read_records,
    read_runs,
    runs_of,
    summarise,
    versions,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8"), max_size=20)
runs = st.builds(
    Run,
    lab=st.sampled_from(["00", "03"]),
    run=words.filter(bool),
    status=st.sampled_from(["ok", "oom", "skipped: why"]),
    metrics=st.dictionaries(words, numbers, max_size=3),
    samples=st.dictionaries(words, st.lists(numbers, max_size=3), max_size=2),
)


def folder_with(content: list[Run]) -> Path:
    folder = Path(tempfile.mkdtemp())
    kept = Results(folder)
    for run in content:
        kept.append(run)
    return folder


@given(st.lists(runs, max_size=4))
def test_what_is_kept_is_read_back_the_newest_winning(content):
    assert read_runs(folder_with(content)) == {(run.lab, run.run): run for run in content}


@given(st.lists(runs, min_size=1, max_size=4), st.data())
def test_a_file_cut_anywhere_keeps_what_was_whole_and_takes_more(content, data):
    folder = folder_with(content)
    file = folder / "results.jsonl"
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    file.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n") + (cut > 0 and whole[cut : cut + 1] == b"\n")
    Results(folder).append(Run("04", "after"))
    read = read_records(folder)
    assert read[:complete] == [run.record() for run in content[:complete]]
    assert read[-1] == Run("04", "after").record()
    assert len(read) == complete + 1


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_a_line_separator_inside_a_text_does_not_end_its_record(separator):
    assert read_runs(folder_with([Run("00", f"a{separator}b")]))


def test_several_processes_append_to_one_file_at_once(tmp_path):
    """Long lines, so that a write has time to be cut by another; and one that was killed left half
    a line.
    """
    (tmp_path / "results.jsonl").write_bytes(b'{"lab": "00", "run": "cut o')
    program = (
        "import sys; from labutils.results.records import Results, Run; kept = "
        "Results(sys.argv[1])\n"
        "for place in range(40): kept.append(Run(sys.argv[2], str(place), "
        "samples={'ms': [place + 0.5] * 20_000}))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, f"{n:02}"]) for n in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    lines = (tmp_path / "results.jsonl").read_text().split("\n")
    assert len(lines) == 1 + 4 * 40 + 1  # what was cut off, and nothing after the last
    runs = read_runs(tmp_path)
    assert {(lab, run.samples["ms"][0]) for (lab, _), run in runs.items()} == {
        (f"{n:02}", place + 0.5) for n in range(4) for place in range(40)
    }
    assert all(len(run.samples["ms"]) == 20_000 for run in runs.values())


@pytest.mark.parametrize(
    ("word", "told"),
    [(None, None), ("2", 2), ('{"notebook": "a"}', {"notebook": "a"}), ("two", None)],
)
def test_what_the_runner_told_is_read(monkeypatch, word, told):
    monkeypatch.delenv(records.BESIDE, raising=False)
    if word is not None:
        monkeypatch.setenv(records.BESIDE, word)
    assert records.told(records.BESIDE) == told


def test_a_run_alone_says_nothing_of_others():
    assert "beside" not in Run("03", "workers=0").record()
    assert Run("03", "workers=0", beside=2).record()["beside"] == 2


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30), st.sampled_from([b"[1]", b"null", b'"x"', b"{}", b'{"lab": 3'])
        )
    )
)
def test_foreign_lines_are_passed_over(lines):
    folder = folder_with([Run("00", "machine")])
    with (folder / "results.jsonl").open("ab") as file:
        file.write(b"\n".join(line.replace(b"{", b"") for line in lines) + b"\n")
    assert list(read_runs(folder)) == [("00", "machine")]


@pytest.mark.parametrize(
    "line",
    [
        '{"lab": "00", "run": "huge", "at": ' + "9" * 5000 + "}",
        '{"lab": "06", "run": "b", "metrics": {"step_ms": 1' + "0" * 400 + "}}",
        "[" * 100_000,
    ],
)
def test_a_line_beyond_python_s_limits_is_passed_over(line):
    folder = folder_with([Run("00", "machine")])
    with (folder / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    assert list(read_runs(folder)) == [("00", "machine")]


def test_a_record_of_another_schema_is_passed_over_and_its_run_is_measured_again():
    folder = folder_with([Run("00", "machine")])
    with (folder / "results.jsonl").open("a") as file:
        file.write(
            '{"schema": 99, "lab": "00", "run": "machine", "status": "oom"}\n{"schema": 99, "status": "done"}\n'
        )
    assert [record["schema"] for record in read_records(folder)] == [records.SCHEMA]
    assert read_runs(folder)["00", "machine"].ok


@pytest.mark.parametrize(
    "record",
    [
        {"run": "x"},
        {"lab": 3, "run": "x"},
        {"lab": "03", "run": ["x"]},
        {"lab": "03", "run": "x", "metrics": 1},
    ],
)
def test_an_unsound_record_is_no_run(record):
    assert runs_of([record]) == {}


def test_a_path_that_can_not_be_followed_says_what_to_type(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"~nosuchuser/x lies in the home .*--results results/NAME"
    ):
        named("~nosuchuser/x")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert named(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="current folder was deleted, so x leads nowhere.*: cd "):
        named("x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_lacks_is_refused_and_the_file_unharmed(tmp_path, value):
    kept = Results(tmp_path)
    kept.append(Run("00", "machine"))
    with pytest.raises(ValueError):
        kept.append(Run("00", "broken", metrics={"loss": value}))
    assert [record["run"] for record in read_records(tmp_path)] == ["machine"]


def test_a_record_that_is_no_run_is_not_taken_for_one(tmp_path):
    kept = Results(tmp_path)
    kept.append({"lab": "03", "status": "prediction", "topic": "workers", "value": 3})
    kept.append(Run("03", "workers=3", metrics={"step_ms": {"median": 2.5}}))
    kept.done("03", seconds=1.0)
    assert list(read_runs(tmp_path)) == [("03", "workers=3")]
    assert read_runs(tmp_path, "02") == {}
    assert read_records(tmp_path)[-1]["status"] == "done"


def test_what_does_not_apply_is_absent():
    record = Run("03", "workers=0", metrics={"zero": 0}).record()
    assert record["metrics"] == {"zero": 0}
    assert not {"samples", "recipe", "machine", "workload", "commit"} & set(record)


def test_fields_of_a_later_version_are_ignored():
    known = Run("03", "workers=0").record()
    assert runs_of([known | {"invented later": 1}]) == {("03", "workers=0"): Run("03", "workers=0")}


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_summaries_are_the_usual_percentiles(samples):
    summary = summarise(samples)
    assert summary["n"] == len(samples)
    for name, percent in {"median": 50, "p10": 10, "p90": 90}.items():
        np.testing.assert_allclose(
            summary[name], np.percentile(samples, percent), rtol=1e-9, atol=1e-6
        )


def test_nothing_measured_has_no_summary():
    with pytest.raises(ValueError, match="measured nothing"):
        summarise([])


def test_a_metric_is_its_median_and_none_where_it_does_not_apply():
    run = Run("03", "workers=0", metrics={"step_ms": {"median": 5.0, "n": 3}, "loss": 0.1})
    assert (run.metric("step_ms"), run.metric("loss"), run.metric("mfu")) == (5.0, 0.1, None)


def test_a_results_folder_that_can_not_be_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Results(tmp_path / "file")
    with pytest.raises(OSError):
        Results(tmp_path / "file" / "below")


def test_versions_are_those_installed():
    import torch

    assert versions()["torch"] == torch.__version__
    json.dumps(versions())
