"""Faults at random, for a short time; and damaged input, which is one message on every command."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from labutils import cli
from labutils.results.records import REFERENCE

NOTEBOOK = json.loads(REFERENCE.with_name("01_lora_math.ipynb").read_text())
ODD = (None, "x", 3, [1], {"a": {"b": 1}}, 10**400)
CELL = {"cell_type": "code", "metadata": {"tags": 3}, "source": ["a", 3], "outputs": None}
LONE = {**CELL, "metadata": {}, "source": "\ud800", "outputs": []}
RAW = (b"", b"\0" * 4096, b"\xe9" * 50, b"[" * 100_000, b'{"cells":' * 50_000, b"9" * 10_000)
RAW += (b"NaN", b"[1e999]", b'"x"', b"3", b"[]", b"{}", b"\x1b[2J", b"\x80\x04\x95", b"PK\3\4")
FAULTS = Path(__file__).parents[1] / "faults.py"


def files() -> list[bytes]:
    """Damaged files: no JSON, and notebooks with one odd part."""
    broken = [NOTEBOOK | {key: odd} for key in ("cells", "metadata", "nbformat") for odd in ODD]
    broken += [NOTEBOOK | {"cells": [cell, *NOTEBOOK["cells"]]} for cell in (None, {}, CELL, LONE)]
    return [*RAW, *(json.dumps(part).encode() for part in broken)]


def test_damaged_input_is_one_message_on_every_command(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    record, notebook = tmp_path / "results.jsonl", tmp_path / "notebooks" / "01_lora_math.ipynb"
    for data in files():
        record.write_bytes(data)
        notebook.write_bytes(data)
        for words in (
            ("report", "--results", tmp_path),
            ("handouts", "--results", tmp_path, "--out", tmp_path / "out"),
            ("run", notebook, "--scale", "huge"),
        ):
            code = cli.main(list(map(str, words)))
            said = capsys.readouterr()
            assert code in (0, 1, 2) and (said.out if code == 0 else said.err), (words, data[:80])


@pytest.mark.parametrize("words", [("run", "01"), ("handouts", "01"), ("doctor",)])
def test_no_room_for_temporary_files_is_said(tmp_path, monkeypatch, words):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    folder = REFERENCE.parent if words[0] == "handouts" else tmp_path
    monkeypatch.setenv("LABUTILS_RESULTS", str(folder))
    command = [sys.executable, "-m", "labutils.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode and "df -h" in done.stderr and "Traceback" not in done.stderr


def test_nothing_is_lost_or_torn_by_faults_at_random():
    """The short form of tests/faults.py, which forks: in a process that no other test has used."""
    words = [sys.executable, FAULTS, "8", "killed_run", "full_disk"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
