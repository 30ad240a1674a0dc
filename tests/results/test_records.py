"""results.jsonl: whatever happens to the file or is put into it, what was whole is read back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import cli
from labutils.course import predictions
from labutils.course.lab import open_lab
from labutils.results import records
from labutils.results.records import REFERENCE, Results, Run, Runs, read_file, read_runs, to_frame
from labutils.results.schema1_migration import tags_of
from labutils.tools.handouts import documents
from labutils.tools.run import NOTEBOOKS

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


# Tags


def test_runs_are_selected_by_their_tags():
    base = Run("06", "a", tags={"experiment": "methods", "batch": 1})
    again = Run("06", "a", tags=base.tags | {"again": True})
    four = Run("06", "b", tags=base.tags | {"batch": 4})
    kept = Runs([base, again, four, Run("07", "c", tags=base.tags)])
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
    kept = Results(tempfile.mkdtemp())
    for run in content:
        kept.append(run)
    whole = kept.path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    kept.path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n") + (cut > 0 and whole[cut : cut + 1] == b"\n")
    after = Run("04", "after", tags={"experiment": "after"})
    kept.append(after)
    expected = [run.record() for run in (*content[:complete], after)]
    assert records.read_records(kept.path) == expected
    newest = read_runs(kept.path)
    assert list(newest) == list(Runs([*content[:complete], after]))
    assert len({(r.lab, json.dumps(r.tags, sort_keys=True)) for r in newest}) == len(newest)


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


OURS = [line for line in REFERENCE.read_text().splitlines() if '"lab": "01"' in line]
END = json.loads(OURS[-1]) | {"seconds": 30}
RUN = json.loads(OURS[0]) | {"commit": END["commit"]}
SCORE = {"lab": "01", "status": "score", "topic": "t", "value": 3, "unit": "s", "measured": 4}
LINES = [
    ('\ufeff{"schema": 1, "lab": "03", "run": "workers=3"}', ""),
    ('{"lab": "03", "run": "by\u2028hand\x85", "invented": 1}', ""),
    ('{"lab": "01", "run": "", "metrics": {"a": [null]}, "machine": {"gpu": [3]}}', ""),
    ('{"lab": "02\\u001b[2J[/]", "status": "done", "parameters": {"a": [null]}}', ""),
    ("hello", "is not JSON"),
    ("[1, 2]", "is no JSON object"),
    ('{"schema": 3, "lab": "03", "run": "x"}', "a later schema"),
    ('{"schema": "2", "lab": "03", "run": "x"}', "a schema that never was"),
    ('{"run": "x"}', "no text as its lab"),
    ('{"lab": "03", "metrics": {}}', "no text as its run"),
    ('{"lab": "03", "status": "prediction", "topic": "t"}', "no number as its value"),
    ('{"lab": "03", "run": "x", "tags": {"experiment": []}}', "a tag that is neither"),
    ('{"lab": "03", "run": "x", "beside": 3}', "other labs"),
    *((f'{{"at": {odd}}}', "limits") for odd in ("9" * 5000, "NaN", "1e999", "[" * 100_000)),
    ('{"schema": 2, "lab": "03", "tags": {"experiment": "x"}', "is cut off"),
    *(
        (json.dumps(record | {name: odd}), f"as its {name}")
        for record in (RUN, SCORE, END)
        for name in record.keys() - {"schema", "sources"}
        for odd in ("text", 7, None, True, [1], {"a": 1})
        if type(odd) is not type(record[name])
    ),
    ('{"schema": 2, "lab": "03", "run": "work', "is cut off"),
]
"""A line of a results file, and the words that say what is wrong with it; "" where nothing is."""


@pytest.fixture(params=["report", "handouts", "a verdict", "lab 12"])
def reader(request, tmp_path, monkeypatch, capsys):
    """What a reader says of these lines, without drawing a page."""
    (tmp_path / "notebooks").mkdir()
    shutil.copy(REFERENCE.with_name("01_lora_math.ipynb"), tmp_path / "notebooks")
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    for slow in ("page", "pdf", "course"):
        monkeypatch.setattr(documents, slow, lambda *_: "")

    def says(*lines: str) -> str:
        (tmp_path / "results.jsonl").write_text("\n".join(lines))
        if request.param == "lab 12":
            cells = (NOTEBOOKS / "py" / "12_scoreboard.py").read_text().split("# %%\n")
            lab = SimpleNamespace(number="12", results_dir=tmp_path, show=print)
            lab.table = lambda table, otherwise="": print(table)
            known = {"lab": lab, "read": str(tmp_path)}
            (board,) = (cell for cell in cells if "lab12_scoreboard.on_record(" in cell)
            exec(cells[2] + cells[3] + board.split("# %% [markdown]")[0], known)  # with all imports
            predictions.scores_of(known["page"].records)
        elif request.param == "a verdict":
            told = {"scale": "tiny", "results_dir": str(tmp_path)}
            lab = open_lab("01", told | {"__annotations__": dict.fromkeys(told, str)})
            lab.verdict("A1.lora.count")
        else:
            cli.main([request.param, "--results", str(tmp_path)])
        assert (tmp_path / "results.jsonl").read_text() == "\n".join(lines)
        return "".join(capsys.readouterr())

    return says


SHOWN = ("to their end: 01", "Labs: 1, student", "run to its end", "65,536 | **confirmed**")


def test_each_reader_names_each_damage_and_shows_what_is_sound(reader, tmp_path):
    said = reader("\ufeff" + OURS[0], *OURS[1:], *(line for line, _ in LINES))
    wrong = [(at, word) for at, (_, word) in enumerate(LINES, len(OURS) + 1) if word]
    assert f"{tmp_path}/results.jsonl: {len(wrong)} of {len(OURS) + len(LINES)} lines" in said
    assert not [word for _, word in wrong if word not in said] and "\x1b" not in said
    assert f"labutils run LAB --force --results {tmp_path}" in said
    assert [word for word in SHOWN if word in said]
    reading = read_file(tmp_path / "results.jsonl")
    for (line, why), (at, word) in zip(reading.passed_over, wrong, strict=True):
        assert line == at and word in why
    assert reading.migrated == 1 and {r["schema"] for r in reading.records} == {records.SCHEMA}
    workers, by_hand, _ = records.runs_of(reading.records[len(OURS) :])
    assert workers.tags == {"experiment": "workers", "workers": 3}
    assert by_hand.tags == {"experiment": "by\u2028hand\x85"}


def test_a_later_schema_takes_a_newer_labutils(reader):
    later = [line.replace('"schema": 2', '"schema": 3') for line in OURS]
    for lines in (later, [*OURS[:-1], later[-1]]):
        said = reader(*lines)
        assert "git pull && make install" in said
        # A verdict asks for no end: what was measured before it is judged all the same.
        assert not [word for word in ("--force", *SHOWN[:3]) if word in said]


@pytest.mark.parametrize("tool", ["report", "handouts", "run"])
def test_what_can_be_no_results_file_is_said(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"pipe": "not a regular file", "folder": "directory", "loop": "symbolic links"}
    for name in words:
        os.mkdir(name)
    os.mkfifo("pipe/results.jsonl")
    os.mkdir("folder/results.jsonl")
    os.symlink("results.jsonl", "loop/results.jsonl")
    if tool != "run":  # which makes what is not there
        words |= {"nothing": "No such file", "x" * 300: "too long", "pipe/results.jsonl": "a pipe"}
    for place, word in words.items():
        assert cli.main([tool, "--results", place]) == 2
        said = capsys.readouterr()
        assert not said.out and place in said.err and word in said.err and "--results " in said.err


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
