"""The instructor's guide is true: its times add up, its commands and files exist, its recipes work
as they stand.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jupytext
import nbformat
import pytest
from claim_runs import article_runs
from exercises_of import lacking, misjudged

from labutils import cli
from labutils.profiling import gpu_specs
from labutils.results import claims
from labutils.results.claims import Claim
from labutils.results.judges import CONFIRMED, JUDGES, assess
from labutils.results.records import Run, read_records, read_runs
from labutils.tools import run

HOUSE = Path(__file__).resolve().parents[2]
GUIDE = (HOUSE / "TEACHING.md").read_text(encoding="utf-8")
NUMBERS = sorted(path.stem[:2] for path in (HOUSE / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def recipe(name: str) -> str:
    (found,) = re.findall(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    return found


def tables() -> list[list[list[str]]]:
    """Each table as rows of cells, its head first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", GUIDE, re.MULTILINE)
    split = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in blocks
    ]
    return [[rows[0], *rows[2:]] for rows in split]


def timetables() -> dict[int, list[tuple[str, int]]]:
    """The minutes that each promises -> its rows."""
    found = [rows[1:] for rows in tables() if rows[0] == ["what", "minutes"]]
    promised = [
        int(minutes)
        for minutes in re.findall(r"^\*\*[^*]*, (\d+) minutes\*\*", GUIDE, re.MULTILINE)
    ]
    return {
        total: [(what, int(minutes)) for what, minutes in rows]
        for total, rows in zip(promised, found, strict=True)
    }


def test_there_are_three_timetables_and_each_adds_up():
    assert len(timetables()) == 3
    for promised, rows in timetables().items():
        assert sum(minutes for _, minutes in rows) == promised


def lab_times() -> dict[str, tuple[int, int]]:
    """Lab -> minutes in the room, and more for its exercises."""
    (table,) = [rows for rows in tables() if rows[0][0] == "lab"]
    return {
        row[0][:2]: (int(row[3].split()[0]), int(row[4].strip("+").split()[0])) for row in table[1:]
    }


def test_every_lab_has_its_time():
    assert sorted(lab_times()) == NUMBERS


def test_a_lab_with_exercises_gets_the_time_for_both():
    for rows in timetables().values():
        for what, minutes in rows:
            if found := re.match(r"lab (\d\d) with exercises", what):
                assert minutes == sum(lab_times()[found[1]]), what


def test_two_days_hold_every_lab():
    two_days = timetables()[840]
    assert (
        sorted({number for what, _ in two_days for number in re.findall(r"\blab (\d\d)", what)})
        == NUMBERS
    )


@pytest.mark.parametrize("line", re.findall(r"^\$ (.+)$", GUIDE, re.MULTILINE))
def test_a_command_is_one(line):
    words = shlex.split(re.sub(r"^flock \S+ ", "", line), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "labutils":
        cli._parser().parse_args(words[1:])  # which exits where it is wrong usage
    elif words[0] == "make":
        assert re.search(
            rf"^[a-z ]*\b{words[1]}\b[a-z ]*:", (HOUSE / "Makefile").read_text(), re.MULTILINE
        )
    else:
        assert words[0] == "mkdir"


def test_inline_commands_are_some():
    inline = re.findall(r"`(labutils [^`]+)`", GUIDE)
    assert len(inline) > 5
    for line in inline:
        cli._parser().parse_args(shlex.split(line)[1:])


def test_files_that_it_names_are_there():
    named = re.findall(r"`((?:tests|labutils|notebooks|reference)/[\w/.]+)`", GUIDE)
    named = [name for name in named if "NN" not in name and "12_" not in name]
    assert len(named) > 8
    assert [name for name in named if not (HOUSE / name).exists()] == []


def test_messages_that_it_quotes_are_said():
    code = "".join(path.read_text(encoding="utf-8") for path in (HOUSE / "labutils").rglob("*.py"))
    assert "The runs on record differ in {what}" in code
    assert "(--force runs it again)" in code


# Recipes


def test_the_lab_runs_and_its_exercise_fails_as_given_and_passes_solved(tmp_path):
    path = tmp_path / "12_sums.ipynb"
    nbformat.write(jupytext.reads(recipe("lab"), fmt="py:percent"), path)
    said: list[str] = []
    options = run.Options(scale="tiny", results=tmp_path / "results", timeout=120)
    assert run.run([str(path)], options, said.append) == run.ALL_RAN, "\n".join(said)
    assert read_records(tmp_path / "results")[-1]["status"] == "done"
    runs = read_runs(tmp_path / "results", "12")
    assert runs["12", "loop"].metric("step_ms") > runs["12", "one call"].metric("step_ms")
    executed = nbformat.read(tmp_path / "results" / "notebooks" / "12_sums.ipynb", as_version=4)
    assert not misjudged(executed)
    assert lacking(executed) == ["1 exercises are too few"]


def test_the_claim_is_judged():
    claim = eval(recipe("claim"), {"Claim": Claim})
    assert claim.judge in JUDGES and claim.id not in claims.claims()
    assert set(claim.runs) == set(claim.how.values())
    assert assess(claim, article_runs()).verdict == CONFIRMED
    nothing: dict[tuple[str, str], Run] = {}
    assert "labutils run 03" in assess(claim, nothing).why


def test_the_gpu_has_a_whole_data_sheet(monkeypatch):
    spec = eval(recipe("gpu"), vars(gpu_specs))
    assert spec.name not in {known.name for known in gpu_specs.SPECS}
    monkeypatch.setattr(gpu_specs, "SPECS", (*gpu_specs.SPECS, spec))
    assert gpu_specs.find_spec("NVIDIA RTX A6000", 51.0) is spec
    assert spec.sparse["bf16"] == 2 * spec.dense["bf16"]
    clock = spec.dense["fp32"] * 1e3 / (spec.sms * 128 * 2)
    assert 1.4 < clock < 2.7
