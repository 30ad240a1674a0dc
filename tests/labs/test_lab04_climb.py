"""Lab 04's climb: the rungs that a machine can tell apart."""

from __future__ import annotations

from labutils.labs import lab04_climb
from labutils.labs.ladders import A1_LADDER

RUNGS = [rung.name for rung in A1_LADDER]


def test_a_cpu_climbs_the_rungs_that_it_can_tell_apart():
    recipes = lab04_climb.rungs_on("cpu")
    assert recipes.keys() < set(RUNGS) == lab04_climb.rungs_on("cuda").keys()
    assert list(recipes)[0] == "stock" and list(recipes)[-1] == "folded LoRA"
    assert {recipe.compile for recipe in recipes.values()} == {"off"}
    assert "whole-step graph" not in recipes
