"""The command line: exit codes, one message on stderr, nothing heavy loaded too early."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
import troubled_notebooks

from labutils import __version__, cli
from labutils.tools import doctor


def labutils(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "labutils.cli", *words]
    environment = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_what_a_command_refuses_is_one_message_and_2(tmp_path, results_folder, monkeypatch, capsys):
    path = troubled_notebooks.write(tmp_path, "fine")

    def refused(line: str) -> str:
        try:
            code = cli.main(shlex.split(line))
        except SystemExit as stop:  # argparse's
            code = stop.code
        said = capsys.readouterr()
        assert code == 2 and not said.out, line
        return said.err

    for line, word in (
        ("", "labutils doctor"),
        ("walk", "walk"),
        ("run --timeout soon", "whole number"),
        ("run --results ''", "folder"),
        ("run --weights mine", "mine"),
        ("run --results ~nosuchuser/x", "--results"),
        (f"run {path} --results /proc/results", "--results"),
        (f"run {path} --results \udcff", "--results"),  # a name in an old encoding
        (f"run {path} --scale huge", "small"),
        (f"run {path} -p stepz 3", "steps"),
        (f"run {path} -p steps many", "many"),
        (f"run {path} -p loud 0", "true"),
        (f"run {path} -p scale tiny", "--scale"),
        ("handouts --results ~nosuchuser/x", "--results"),
        ("diagnose", "give a script"),
        (f"diagnose --html {tmp_path} -- true", "Is a directory"),
        (f"diagnose --html {tmp_path}/none/page.html -- true", "No such file"),
        (f"diagnose -- {__file__}", "run by Python: labutils diagnose -- python"),
    ):
        assert word in refused(line) and not results_folder.exists()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for tool in ("doctor", "run", "report", "handouts", "diagnose"):
        assert "deleted" in refused(tool)


def test_a_program_without_streams_in_an_old_locale_makes_its_pages(tmp_path):
    path = troubled_notebooks.write(tmp_path, "fine")
    words = [sys.executable, "-m", "labutils.cli", "run", path, "--scale", "tiny"]
    shell = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *words, "--results", tmp_path / "kept"]
    old = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(shell, env=old, timeout=120).returncode == 0
    page = tmp_path / "kept" / "notebooks" / "fine.html"
    assert "[A] lab &lt;meta&gt; &#183; " in page.read_text("utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_its_like_are_130_without_a_traceback(number, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "main", lambda json: signal.raise_signal(number))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's stays ignored
    assert cli.main(["doctor"]) == 130
    signal.signal(signal.SIGHUP, before)
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback():
    command = f'"{sys.executable}" -m labutils.cli report --json | head -c 1'
    assert subprocess.run(["bash", "-c", command], capture_output=True).stderr == b""


def test_report_is_plain_ascii_where_it_must_be():
    done = labutils("report", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_starting_imports_nothing_heavy():
    program = "import sys, labutils.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not {"torch", "matplotlib", "papermill", "pandas"} & set(done.stdout.split())
    assert labutils("--version").stdout == f"labutils {__version__}\n"
