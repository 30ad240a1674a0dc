"""What people and other programs hand over that is not what it should be: refused in words, with nothing changed."""

from __future__ import annotations

import shlex

import pytest

from labutils.course import LabError, open_lab
from labutils.recipe import STOCK
from labutils.results import read_records

NAN = float("nan")


# Recipes


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"num_workers": 1025}, "num_workers=1025 is too large: it must be 1024 or less"),
        ({"seed": 2**63}, "is too large"),
        ({"learning_rate": NAN}, "learning_rate=nan is not a finite number"),
        ({"learning_rate": 10**400}, "is not a finite number"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf is not a finite number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 is too small: it must be above 0"),
    ],
)
def test_a_knob_has_its_limits(knob, told):
    with pytest.raises(ValueError, match=told):
        STOCK.but(**knob)


def test_the_limits_themselves_are_taken():
    assert STOCK.but(num_workers=1024, seed=2**63 - 1).num_workers == 1024


# The course


@pytest.mark.parametrize("number", [3, "3", "03"])
def test_a_labs_number_has_two_digits(number):
    assert open_lab(number, {}).number == "03"


@pytest.mark.parametrize("namespace", [None, "globals()", dict.items])
def test_open_lab_wants_the_notebooks_names(namespace):
    with pytest.raises(LabError, match=r'Write: lab = open_lab\("03", globals\(\)\)'):
        open_lab(3, namespace)


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/x", "a\0b"])
def test_a_results_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(LabError, match="Results can't be kept in .* Set results_dir"):
        open_lab("03", {"results_dir": folder, "__annotations__": {"results_dir": str}})


@pytest.mark.parametrize(
    "kinds", [{"my_guess": float | None, "xs": list[int]}, {"my_guess": "float | None", "xs": dict}]
)
def test_names_that_later_cells_annotate_are_no_parameters(kinds):
    lab = open_lab("03", {"steps": 3, "my_guess": None, "xs": [], "__annotations__": {"steps": int} | kinds})
    assert lab.parameters["steps"] == 3
    assert not lab.parameters.keys() & {"my_guess", "xs"}


def test_what_is_not_finite_is_not_scored(capsys):
    lab = open_lab("03", {})
    for value in (NAN, float("inf"), 10**400):
        with pytest.raises(LabError, match="Write a finite number, or None"):
            lab.predict("x", value)
    lab.predict("x", 2)
    lab.done({"x": NAN})
    assert [r["status"] for r in read_records(lab.results_dir)] == ["prediction", "done"]


def test_the_last_line_can_be_typed(tmp_path, capsys):
    folder = tmp_path / "my results"
    open_lab("03", {"results_dir": str(folder), "__annotations__": {"results_dir": str}}).done()
    assert f"labutils report --results {shlex.quote(str(folder))}" in capsys.readouterr().out
