"""A room of machines: which seats are ready, what the others lack, and no seat passed over."""

from __future__ import annotations

import dataclasses
import json

import pytest

from labutils import cli
from labutils.tools import doctor
from labutils.tools.doctor.checks import FAIL, INFO, OK, WARN, Finding
from labutils.tools.doctor.seats import all_ready, read_seats, render_seats

GPU = Finding("GPU", OK, "an H100 of 80 GB")
SHM = Finding("Shared memory", FAIL, "64 MB", "too small", "docker run --shm-size=8g")
COMPILER = Finding("Compiler", WARN, "none", "no torch.compile", "sudo apt install g++")


@pytest.fixture
def room(tmp_path):
    """Write seats: name -> findings, or the text of the file."""

    def write(**seats):
        for name, said in seats.items():
            text = (
                said
                if isinstance(said, str)
                else json.dumps([dataclasses.asdict(one) for one in said])
            )
            (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_what_the_doctor_says_as_json_is_what_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: [GPU, SHM])
    cli.main(["doctor", "--json"])
    (tmp_path / "me.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_seats(tmp_path) == {"me": [GPU, SHM]}


def test_each_seat_has_a_line_and_each_trouble_its_seats_and_cure(room, capsys):
    folder = room(
        a=[GPU],
        b=[GPU, COMPILER],
        c=[GPU, SHM, COMPILER],
        d=[Finding("GPU", INFO, "none"), SHM],
        e='[{"check": "GP',
    )
    assert cli.main(["doctor", "--seats", str(folder)]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[:5] == [
        "a  ready    an H100 of 80 GB",
        "b  limited  an H100 of 80 GB",
        "c  fails    an H100 of 80 GB",
        "d  fails    none",
        "e  unknown  e.json holds no findings (JSONDecodeError): run the doctor there again",
    ]
    assert "fail  Shared memory, 2 of 5: c, d\n      -> docker run --shm-size=8g" in said
    assert "warn  Compiler, 2 of 5: b, c\n      -> sudo apt install g++" in said
    assert said.index("Shared memory") < said.index("Compiler")
    assert said.endswith("2 of 5 seats can run the labs.\n")


def test_a_room_is_ready_when_nothing_fails(room, capsys):
    assert cli.main(["doctor", "--seats", str(room(a=[GPU], b=[GPU, COMPILER]))]) == 0
    assert "2 of 2 seats can run the labs." in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '[{"check": 1}]', '[{"odd": 1}]', "null"])
def test_a_seat_that_says_nothing_is_not_ready(room, text):
    seats = read_seats(room(a=[GPU], b=text))
    assert isinstance(seats["b"], str) and not all_ready(seats)
    assert "b  unknown  b.json holds no findings" in render_seats(seats)


def test_a_folder_without_seats_says_how_to_fill_it(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["doctor", "--seats", str(folder)]) == 2
        assert f"labutils doctor --json > {folder}/$(hostname).json" in capsys.readouterr().err


def test_forty_seats_fit_the_page(room):
    seats = read_seats(room(**{f"seat-{n:02}": [GPU, SHM] for n in range(40)}))
    assert max(map(len, render_seats(seats).splitlines())) <= 110
