"""Tables: numbers as people read them, and nothing where there is nothing to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.course.tables import WAITS, as_table, cell, wait_rows

VALUES = st.one_of(
    st.none(), st.text(max_size=8), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.5441, "0.544"),
        (99.94, "99.9"),
        (1481.6, "1,482"),
        (-1481.6, "-1,482"),
        (0.0, "0"),
        (859520964, "859,520,964"),
        (True, "True"),
        ("a|b\nc", "a\\|b c"),
    ],
)
def test_a_cell(value, shown):
    assert cell(value) == shown


def test_what_says_nothing_is_left_out():
    rows = [("kernels", None, None, 7), ("launches", None, None, None), ("busy", 0.5, None, None)]
    assert as_table(("a step", "here", "ms", "H200"), *rows).splitlines() == [
        "| a step | here | H200 |",
        "| --- | --- | --- |",
        "| kernels | – | 7 |",
        "| busy | 0.5 | – |",
    ]


@pytest.mark.parametrize("rows", [[], [("kernels", None)]])
def test_no_table_of_nothing(rows):
    assert as_table(("a step", "here"), *rows) == ""


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=5))
def test_every_line_has_the_heads_columns(rows):
    lines = as_table(("a", "b", "c"), *rows).split("\n")
    bars = {line.replace("\\|", "").count("|") for line in lines}
    assert len(bars) == 1
    assert len(lines) in (1, 2 + sum(row[1:] != (None, None) for row in rows))


def test_a_wait_as_a_row():
    known = {
        "where": "a.py: f",
        "line": 3,
        "cause": "aten::item",
        "call": "cudaStreamSynchronize",
        "phase": "log",
    }
    unknown = {"where": "no Python stack was recorded", "call": "cudaMemcpyAsync"}
    times = {"per_step": 4.0, "ms_per_step": 0.2, "idle_ms_per_step": 0.0}
    rows = wait_rows([known | times, unknown | times])
    assert rows[0] == ("log", "a.py: f (3)", None, "`aten::item`", 4.0, 0.2, None)
    assert rows[1][:4] == (None, "no Python stack was recorded", None, "`cudaMemcpyAsync`")
    assert len(rows[0]) == len(WAITS)
