"""The command line: exit codes, one clear message on stderr, and nothing heavy loaded before it is
needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from threading import TIMEOUT_MAX

import pytest
import troubled_notebooks

from labutils import __version__, cli
from labutils.results import report
from labutils.results.records import REFERENCE
from labutils.tools import doctor, run


def labutils(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "labutils.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "--timeout", "soon"], "'soon' is not a number of seconds above 0"),
        (["run", "--timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (
            ["run", "--timeout", "1e300"],
            f"'1e300' is longer than this system can wait; the limit is {TIMEOUT_MAX:.0f} s",
        ),
        (["run", "--cell-timeout", "0"], "'0' is not a number of seconds above 0"),
        (["run", "--jobs", "0"], "'0' is not a number of labs from 1 to 999"),
        (["run", "--jobs", "two"], "'two' is not a number of labs"),
        (["run", "--only", "new"], "invalid choice: 'new'"),
        (["run", "--only", "changed", "--force"], "not allowed with argument"),
        (["run", "--results", ""], "'' names no folder; type one, as in: --results results/NAME"),
        (["report", "--results", " "], "' ' names no folder"),
        (["run", "--weights", "mine"], "invalid choice: 'mine'"),
        (["run", "-p", "steps"], "expected 2 arguments"),
        (
            ["run", "08", "-p", "years", "1", "-p", "steps", "2", "-p", "years", "2"],
            "argument -p: years is given twice, as '1' and as '2'; give each parameter once",
        ),
        (["report", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_alone_it_says_what_commands_there_are_and_what_to_type_first(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["labutils"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, "")
    for command in ("doctor", "run", "report", "handouts", "diagnose"):
        assert re.search(rf"^ +{command} +\w+ .*", said.err, re.MULTILINE), f"no line on {command}"
    assert "To begin, type: labutils doctor" in said.err


def test_what_the_runner_refuses_is_one_message_and_2(tmp_path, capsys):
    path = str(troubled_notebooks.write(tmp_path, "fine"))
    assert cli.main(["run", path, "--scale", "huge"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "labutils run: scale is 'huge', but it takes one of: auto, tiny, small, full. Type --scale "
        "with one of them.\n"
    )
    assert said.out == ""


def test_options_reach_the_runner(monkeypatch, tmp_path):
    called = {}
    monkeypatch.setattr(
        run,
        "run",
        lambda labs, options, say, make_pages: called.update(labs=labs, options=options) or 1,
    )
    words = [
        "run",
        "03",
        "04",
        "--scale",
        "small",
        "--data",
        "hub",
        "--results",
        str(tmp_path),
        "--force",
        "--timeout",
        "9",
    ]
    more = ["--jobs", "2", "--cell-timeout", "3"]
    assert cli.main([*words, *more, "-p", "steps", "5", "-p", "loud", "false"]) == 1
    assert called["labs"] == ["03", "04"]
    assert called["options"] == run.Options(
        scale="small",
        data="hub",
        results=tmp_path,
        given={"steps": "5", "loud": "false"},
        force=True,
        jobs=2,
        timeout=9.0,
        cell_timeout=3.0,
    )
    cli.main(["run", "--only", "changed"])
    assert called["options"] == run.Options(only_changed=True)


@pytest.mark.parametrize("code", [0, 1])
def test_doctor_and_report_say_how_they_end(monkeypatch, tmp_path, code):
    monkeypatch.setattr(doctor, "main", lambda json: code if json else 5)
    monkeypatch.setattr(
        report,
        "main",
        lambda results, as_json: code if (results, as_json) == (tmp_path, True) else 5,
    )
    assert cli.main(["doctor", "--json"]) == code
    assert cli.main(["report", "--json", "--results", str(tmp_path)]) == code


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capsys):
    def interrupted(json: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_a_reader_that_goes_away_is_no_traceback():
    talk = "doctor.main = lambda json: [print('x' * 100) for _ in range(10**5)] and 0"
    program = (
        f"import sys; from labutils import cli, doctor; {talk}; sys.exit(cli.main(['doctor']))"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{program}" | head -n 1'],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("x" * 100 + "\n", "")


def test_version():
    assert labutils("--version").stdout == f"labutils {__version__}\n"


def test_a_lab_that_fails_is_1_and_its_message_is_on_the_page(tmp_path):
    path = troubled_notebooks.write(tmp_path, "raises")
    done = labutils("run", str(path), "--scale", "tiny", "--results", str(tmp_path / "results"))
    assert done.returncode == 1
    assert "Lab raises failed in cell [4]" in done.stdout
    assert "Traceback (most recent call last):\n  File" not in done.stdout + done.stderr
    assert "To read in a browser:" in done.stdout
    index = (tmp_path / "results" / "index.html").read_text()
    assert 'href="notebooks/raises.html"' in index and "no such shape: 3 x 4" in index
    assert (
        "ValueError: no such shape: 3 x 4"
        in (tmp_path / "results" / "notebooks" / "raises.html").read_text()
    )


@pytest.mark.parametrize("command", ["run", "report"])
def test_an_odd_folder_is_one_message_and_2(command, capsys):
    assert cli.main([command, "--results", "~nosuchuser/x"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "~nosuchuser/x lies in the home folder of a user" in said.err


def test_a_terminal_of_plain_ascii_gets_question_marks_and_no_traceback():
    done = labutils("report", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


def test_report_for_machines_is_json():
    assert json.loads(labutils("report", "--json").stdout)


def test_the_ladder_is_drawn_from_the_reference_runs(tmp_path, capsys):
    assert cli.main(["report", "--picture", str(tmp_path / "ladder.png")]) == 0
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "results", "says"),
    [
        ("gone/ladder.png", None, "folder"),
        ("ladder.xyz", None, ".png"),
        ("ladder.png", "empty", "labutils run 04"),
    ],
)
def test_a_picture_that_can_not_be_drawn_says_why(tmp_path, capsys, file, results, says):
    (tmp_path / "empty").mkdir()
    more = ["--results", str(tmp_path / results)] if results else []
    assert cli.main(["report", "--picture", str(tmp_path / file), *more]) == 2
    assert says in capsys.readouterr().err


def test_a_picture_says_which_records_it_had_to_pass_over(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    file.write_text(REFERENCE.read_text("utf-8") + "nothing\n")
    assert (
        cli.main(["report", "--picture", str(tmp_path / "ladder.png"), "--results", str(tmp_path)])
        == 0
    )
    said = capsys.readouterr()
    assert "Passed over: " in said.err and "is not JSON" in said.err
    file.write_text('{"schema": 99, "lab": "04", "run": "stock"}\n')
    assert (
        cli.main(["report", "--picture", str(tmp_path / "none.png"), "--results", str(file)]) == 2
    )
    assert "No picture: There is no record that this version can use" in capsys.readouterr().err
