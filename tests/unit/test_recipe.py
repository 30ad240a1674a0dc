"""Recipes: what they accept, how they differ, and what a CPU can do of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.recipe import STOCK, Recipe

KNOBS = {spec.name: spec for spec in dataclasses.fields(Recipe)}


def values_for(name: str) -> st.SearchStrategy:
    """Values of the knob's own type, allowed or not."""
    spec = KNOBS[name]
    if choices := spec.metadata["choices"]:
        return st.sampled_from(choices)
    return {bool: st.booleans(), int: st.integers(-3, 64), float: st.floats(), str: st.text()}[
        type(spec.default)
    ]


changes = st.sets(st.sampled_from(sorted(KNOBS)), max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: values_for(name) for name in names})
)


def made(change: dict) -> Recipe | None:
    """The stock recipe with the change, or None where it is refused."""
    try:
        return STOCK.but(**change)
    except ValueError as error:
        assert any(name in str(error) for name in change), f"the message names no knob: {error}"
        return None


@given(changes)
def test_a_change_is_taken_or_refused_by_name(change):
    recipe = made(change)
    if recipe is not None:
        assert recipe.changes_from(STOCK) == {
            name: (getattr(STOCK, name), value)
            for name, value in change.items()
            if value != getattr(STOCK, name)
        }


@given(changes)
def test_a_recipe_survives_json(change):
    recipe = made(change)
    if recipe is not None:
        assert Recipe(**json.loads(json.dumps(recipe.as_dict()))) == recipe


@given(changes)
def test_what_a_cpu_runs_needs_no_gpu_and_is_the_same_when_fitted_again(change):
    recipe = made(change)
    if recipe is None:
        return
    fitted = recipe.fitted_to("cpu")
    assert recipe.fitted_to("cuda") is recipe
    assert fitted.fitted_to("cpu") == fitted
    assert (fitted.precision, fitted.pin_memory, fitted.driver == "graph") == ("fp32", False, False)
    assert fitted.examples_per_step == recipe.examples_per_step


@given(
    st.sampled_from(sorted(KNOBS)),
    st.one_of(st.none(), st.lists(st.integers()), st.text(), st.integers(), st.booleans()),
)
def test_a_value_of_the_wrong_type_is_refused(name, value):
    kind = type(KNOBS[name].default)
    right = type(value) is kind or (kind is float and type(value) is int)
    if not right:
        with pytest.raises(ValueError, match=name):
            STOCK.but(**{name: value})


def test_an_unknown_knob_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'worker' is not a knob.*num_workers"):
        STOCK.but(worker=3)


@pytest.mark.parametrize("rate", [float("nan"), -1.0])
def test_a_learning_rate_must_be_a_positive_number(rate):
    with pytest.raises(ValueError, match="learning_rate"):
        STOCK.but(learning_rate=rate)


@pytest.mark.parametrize(
    "change",
    [
        {"persistent_workers": True},
        {"driver": "graph"},
        {"driver": "graph", "logging": "ring-buffer", "compile": "reduce-overhead"},
    ],
)
def test_knobs_that_contradict_each_other_are_refused(change):
    with pytest.raises(ValueError, match="needs|Use"):
        STOCK.but(**change)


def test_every_knob_is_documented_and_its_default_is_the_articles():
    assert all(spec.metadata["help"] for spec in KNOBS.values())
    assert (STOCK.micro_batch, STOCK.accumulation, STOCK.rank, STOCK.learning_rate) == (
        1,
        4,
        4,
        1e-4,
    )
    assert (STOCK.num_workers, STOCK.precision, STOCK.compile, STOCK.driver) == (
        0,
        "fp16",
        "off",
        "accelerate",
    )
