"""Recipes: what they accept, and what a CPU can do of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.recipe import STOCK, Recipe

KNOBS = {spec.name: spec for spec in dataclasses.fields(Recipe)}
KINDS = {bool: st.booleans(), int: st.integers(-3, 64), float: st.floats(), str: st.text()}


def values_for(name: str) -> st.SearchStrategy:
    """Values of the knob's own type, allowed or not."""
    choices = KNOBS[name].metadata["choices"]
    return st.sampled_from(choices) if choices else KINDS[type(KNOBS[name].default)]


changes = st.sets(st.sampled_from(sorted(KNOBS)), max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: values_for(name) for name in names})
)


@given(changes)
def test_a_change_is_refused_by_name_or_taken_and_survives_json_and_fitting(change):
    try:
        recipe = STOCK.but(**change)
    except ValueError as error:
        assert any(name in str(error) for name in change)
        return
    assert recipe.as_dict() == STOCK.as_dict() | change
    assert Recipe(**json.loads(json.dumps(recipe.as_dict()))) == recipe
    fitted = recipe.fitted_to("cpu")
    assert recipe.fitted_to("cuda") is recipe and fitted.fitted_to("cpu") == fitted
    assert (fitted.precision, fitted.pin_memory, fitted.driver == "graph") == ("fp32", False, False)
    assert fitted.examples_per_step == recipe.examples_per_step


@given(
    st.sampled_from(sorted(KNOBS)),
    st.one_of(st.none(), st.lists(st.integers()), st.text(), st.integers(), st.booleans()),
)
def test_a_value_of_the_wrong_type_is_refused(name, value):
    kind = type(KNOBS[name].default)
    if not (type(value) is kind or (kind is float and type(value) is int)):
        with pytest.raises(ValueError, match=name):
            STOCK.but(**{name: value})


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("num_workers", 1025),
        ("learning_rate", float("nan")),
        ("token_budget", 2**17 + 1),
        ("precision", "fp8"),
    ],
)
def test_a_knob_has_its_limits(knob, value):
    with pytest.raises(ValueError, match=f"{knob}=.*not possible"):
        STOCK.but(**{knob: value})


def test_an_unknown_knob_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'worker' is not a knob.*num_workers"):
        STOCK.but(worker=3)


FUSED_GRAPH = {"driver": "graph", "optimizer": "adamw-fused"}


@pytest.mark.parametrize(
    "change",
    [
        {"persistent_workers": True},
        {"driver": "graph", "optimizer": "adamw"},
        FUSED_GRAPH | {"logging": "synchronous"},
        {"adapter": "none", "base_linear": "nf4"},
        FUSED_GRAPH | {"logging": "ring-buffer", "compile": "reduce-overhead"},
    ],
)
def test_knobs_that_contradict_each_other_are_refused(change):
    with pytest.raises(ValueError, match=f"{[*change][-1]}="):
        STOCK.but(**change)
