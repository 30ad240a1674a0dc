"""results.jsonl: whatever happens to the file or is put into it, what was whole is read back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.results import records
from labutils.results.records import Results, Run, Runs, read_file, read_runs, to_frame
from labutils.results.schema1_migration import tags_of

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8"), max_size=20)
tags = st.one_of(words.filter(bool), st.booleans(), st.integers(-5, 5), st.floats(-1, 1))
runs = st.builds(
    Run,
    lab=st.sampled_from(["00", "03"]),
    run=words.filter(bool),
    status=st.sampled_from(["ok", "oom", "skipped: why"]),
    metrics=st.dictionaries(words, numbers, max_size=3),
    samples=st.dictionaries(words, st.lists(numbers, max_size=3), max_size=2),
    tags=st.dictionaries(words, tags, max_size=3).map(lambda tags: {"experiment": "x"} | tags),
)


def folder_with(content: list[Run]) -> Path:
    folder = Path(tempfile.mkdtemp())
    kept = Results(folder)
    for run in content:
        kept.append(run)
    return folder


# Tags


@settings(max_examples=30)
@given(st.lists(runs, max_size=4))
def test_what_is_kept_is_read_back_the_newest_winning(content):
    read = read_runs(folder_with(content))
    assert list(read) == list(Runs(content))
    assert len({(run.lab, json.dumps(run.tags, sort_keys=True)) for run in content}) >= len(read)


def test_runs_are_selected_by_their_tags():
    base = Run("06", "a", tags={"experiment": "methods", "batch": 1})
    again = Run("06", "a", tags=base.tags | {"again": True})
    four = Run("06", "b", tags=base.tags | {"batch": 4})
    other = Run("07", "c", tags=base.tags)
    kept = Runs([base, again, four, other])
    assert list(kept.select("06", experiment="methods")) == [base, again, four]
    assert list(kept.select("06", batch=1, again=False)) == [base]
    assert list(kept.select(batch=True)) == []  # True is not 1
    assert list(kept.select("06", batch=(4, 9))) == [four]
    assert kept.one("06", experiment="methods", batch=1) is base  # exactly these tags
    assert kept.one("06", batch=4) is four  # the only one that has them
    assert kept.one("06", batch=1) is kept.one("06", batch=8) is None
    assert list(to_frame(kept)["batch"]) == [1, 1, 4, 1]


def test_each_host_keeps_its_newest_run():
    def run(cpu: str, at: str) -> Run:
        return Run("04", "x", machine={"cpu": cpu}, at=at, tags={"experiment": "x"})

    kept = Runs([run("a", "1"), run("b", "2"), run("a", "3")])
    assert sorted((r.machine["cpu"], r.at) for r in kept) == [("a", "3"), ("b", "2")]
    assert kept.one(experiment="x").at == "3"


@pytest.mark.parametrize(
    ("lab", "name", "expected"),
    [
        ("08", "moe long, captured, delay 2.5 us", {"variant": "captured", "delay_us": 2.5}),
        ("10", "qwen full ddp 4 no_sync", {"trained": "full", "ranks": 4, "sync": "no_sync"}),
    ],
)
def test_names_of_schema_1_get_tags(lab, name, expected):
    assert expected.items() <= tags_of(lab, name).items()


# The file


@settings(max_examples=30)
@given(st.lists(runs, min_size=1, max_size=4), st.data())
def test_a_file_cut_anywhere_keeps_what_was_whole_and_takes_more(content, data):
    folder = folder_with(content)
    file = folder / "results.jsonl"
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    file.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n") + (cut > 0 and whole[cut : cut + 1] == b"\n")
    after = Run("04", "after", tags={"experiment": "after"})
    Results(folder).append(after)
    read = records.read_records(folder)
    assert read[:complete] == [run.record() for run in content[:complete]]
    assert read[complete:] == [after.record()]


def test_several_processes_append_to_one_file_at_once(tmp_path):
    """Long lines, so that a write has time to be cut by another; one that was killed left half a
    line."""
    (tmp_path / "results.jsonl").write_bytes(b'{"lab": "00", "run": "cut o')
    program = (
        "import sys; from labutils.results.records import Results, Run\n"
        "kept = Results(sys.argv[1])\n"
        "for at in range(40): kept.append(Run(sys.argv[2], '', tags={'at': at}, "
        "samples={'ms': [at + 0.5] * 20_000}))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, tmp_path, lab]) for lab in "01"]
    assert [writer.wait(60) for writer in writers] == [0] * 2
    lines = (tmp_path / "results.jsonl").read_text().split("\n")
    assert len(lines) == 1 + 2 * 40 + 1  # what was cut off, and nothing after the last
    read = read_runs(tmp_path)
    assert {(r.lab, *r.tags.values()) for r in read} == {
        (lab, at) for lab in "01" for at in range(40)
    }
    assert all(run.samples["ms"] == [run.tags["at"] + 0.5] * 20_000 for run in read)


LINES = (
    ('{"schema": 1, "lab": "03", "run": "workers=3"}', ""),
    ('{"schema": 3, "lab": "03", "run": "x", "tags": {"experiment": "x"}}', "schema 3"),
    ('{"schema": 2, "lab": "03", "run": "work', "cut off"),
    ("hello", "JSON"),
    ("[1, 2]", "object"),
    ('{"run": "x"}', "lab"),
    ('{"lab": "03", "run": 3}', "run"),
    ('{"lab": "03", "run": "x", "metrics": [1]}', "metrics"),
    ('{"lab": "03", "run": "x", "tags": {"experiment": []}}', "tag"),
    ('{"schema": 2, "lab": "03", "run": "x", "beside": 3}', "other labs"),
    ('{"lab": "03", "at": ' + "9" * 5000 + "}", "limits"),
    ('{"lab": "03", "metrics": {"step_ms": 1' + "0" * 400 + "}}", "limits"),
    ('{"lab": "03", "metrics": {"step_ms": NaN}}', "limits"),
    ('{"lab": "03", "metrics": {"step_ms": 1e999}}', "limits"),  # JSON's way to infinity
    ("[" * 100_000, "limits"),
    ('{"schema": 2, "lab": "03", "run": "by hand, no tags", "invented": 1}', ""),
    ('{"schema": 2, "lab": "03", "status": "done"}', ""),
)
"""A line of a results file, and the word that says what is wrong with it; "" where nothing is."""


def test_each_line_that_can_not_be_used_is_named_and_nothing_is_lost(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(line for line, _ in LINES) + "\n")
    before = file.read_bytes()
    reading = read_file(file)
    assert [r.get("run", r.get("status")) for r in reading.records] == [
        *("workers=3", "by hand, no tags", "done")
    ]
    assert {record["schema"] for record in reading.records} == {records.SCHEMA}
    assert reading.migrated == 1
    workers, by_hand = records.runs_of(reading.records)
    assert workers.tags == {"experiment": "workers", "workers": 3}
    assert by_hand.tags == {"experiment": "by hand, no tags"}
    wrong = [(at, word) for at, (_, word) in enumerate(LINES, 1) if word]
    assert [at for at, _ in reading.passed_over] == [at for at, _ in wrong]
    for (_, said), (_, word) in zip(reading.passed_over, wrong, strict=True):
        assert word in said
    told = reading.complaint()
    assert str(file) in told and "line 2 has schema 3" in told
    assert f"labutils run LAB --force --results {tmp_path}" in told
    Results(tmp_path).append(Run("03", "later", tags={"experiment": "later"}))
    assert file.read_bytes().startswith(before)
    assert read_runs(tmp_path).one(experiment="later")


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_a_line_separator_inside_a_text_does_not_end_its_record(separator):
    assert read_runs(folder_with([Run("00", f"a{separator}b")]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_lacks_is_refused_and_the_file_unharmed(tmp_path, value):
    kept = Results(tmp_path)
    with pytest.raises(ValueError):
        kept.append(Run("00", "broken", metrics={"loss": value}))
    assert kept.path.read_bytes() == b""


# What a record holds


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "oom"),
        (AssertionError("Torch not compiled with CUDA enabled"), "skipped: there is no NVIDIA GPU"),
        (RuntimeError("InvalidCxxCompiler: none\n\nSet TORCH_LOGS"), "skipped: torch.compile"),
    ],
)
def test_why_a_run_failed_is_one_line(error, status):
    assert records.status_of(error).startswith(status)
    assert "\n" not in records.status_of(error)
