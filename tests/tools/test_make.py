"""`make` leaves strangers' folders alone, and mends its own; a container keeps what one did."""

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", "-C", HOUSE, *words], capture_output=True, text=True)


def test_a_folder_that_make_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    made = make("venv", f"VENV={tmp_path}")
    assert made.returncode != 0 and str(tmp_path) in made.stderr
    assert "it stays" in make("clean-venv", f"VENV={tmp_path}").stdout
    spaced = make("venv", f"VENV={tmp_path} {tmp_path / 'other'}")
    assert spaced.returncode != 0 and "without spaces" in spaced.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_environment_that_was_interrupted_copied_or_renamed_is_made_anew(tmp_path):
    venv, copied, renamed = (tmp_path / name for name in ("venv", "copied", "renamed"))
    (venv / "bin").mkdir(parents=True)
    (venv / ".made-by-make").touch()
    made = make("venv", f"VENV={venv}")
    assert made.returncode == 0 and "anew" in made.stdout
    assert make("venv", f"VENV={venv}").stdout.count("anew") == 0
    shutil.copytree(venv, copied, symlinks=True)
    for folder in (copied, venv.rename(renamed)):  # with no Python to make it of, it stays
        assert "There is no no-python" in make("venv", f"VENV={folder}", "PYTHON=no-python").stderr


def test_a_python_that_is_too_old_or_missing_is_said(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.18;; *) exit 1;; esac\n')
    old.chmod(0o755)
    for python, word in ((old, "3.9.18"), ("no-python", "no-python")):
        made = make("venv", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
        assert made.returncode != 0 and word in made.stderr
        assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("file", ["Dockerfile", "docs/installing.md"])
def test_what_a_container_keeps_is_on_a_volume(file):
    """Answers are written into the notebooks, all else into results; --rm removes the rest."""
    (home,) = re.findall(r"^WORKDIR (.+)", (HOUSE / "Dockerfile").read_text(), re.M)
    text = re.sub(r"\\\n#? *", "", (HOUSE / file).read_text())
    commands = re.findall(r"docker run .*gpu-finetuning-lab.*", text)
    assert commands
    for words in (shlex.split(command, comments=True) for command in commands):
        kept = {word.split(":")[1] for flag, word in pairwise(words) if flag == "-v"}
        answers = set() if "course" in words else {f"{home}/notebooks"}
        assert kept == {f"{home}/results"} | answers, words


@pytest.mark.parametrize("code", ["0", "1"])
def test_an_installation_is_quiet_unless_it_fails(tmp_path, code, monkeypatch):
    (tmp_path / "bin").mkdir()
    pip = '#!/bin/sh\ncase "$*" in *requirements*) seq -f "Collecting %g" 480; exit $CODE; esac\n'
    for name in ("python", "pip"):
        (tmp_path / "bin" / name).write_text(pip + 'echo "pip 26 from / (python 3)"')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("CODE", code)
    made = make("install", f"VENV={tmp_path}")
    assert (made.returncode == 0) == (made.stdout.count("\n") < 20) == (code == "0")
