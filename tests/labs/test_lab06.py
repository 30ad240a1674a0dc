"""Lab 06 on tiny models: each experiment changes what it says, and counts what is there."""

from __future__ import annotations

import pytest

from labutils.labs import lab06_anyres
from labutils.labs.ladders import A2_BASE
from labutils.workloads import open_workload

QUICK = A2_BASE.but(layers="rewritten", learning_rate=3e-3, micro_batch=2)

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def uniform():
    return open_workload("llava-lora", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def varied():
    return open_workload("llava-lora-varied", scale="tiny", device="cpu")


# The article's table


def test_a_column_of_the_table_is_one_comparison_with_its_base_twice(uniform):
    names = ("bf16", "qlora", "eager-fixed")
    runs = lab06_anyres.compared(uniform, names, batch=2, rounds=2)
    assert list(runs) == list(lab06_anyres.cells(names, 2)) and all(r.ok for r in runs.values())
    assert len({run.comparison for run in runs.values()}) == 1
    assert runs["qlora b2"].tags == {"experiment": "methods", "method": "qlora", "batch": 2}
    assert runs["bf16 b2 again"].has(method="bf16", again=True)
    fewer = runs["eager-fixed b2"].metric("tokens_per_s") * runs["eager-fixed b2"].metric("step_ms")
    assert fewer < runs["bf16 b2"].metric("tokens_per_s") * runs["bf16 b2"].metric("step_ms")


# The compiler


def test_varied_images_recompile_and_uniform_ones_settle(uniform, varied):
    published, rewritten = A2_BASE, QUICK.but(micro_batch=1)
    settled = lab06_anyres.recompilations(uniform, published, 3)
    assert settled.metrics["further_image_token_counts"] == 0
    assert settled.samples["recompilations"][2:] == [0]
    moved = lab06_anyres.recompilations(varied, published, 3)
    assert moved.metrics["further_image_token_counts"] > 0
    assert settled.workload == moved.workload, "or their counts could not be compared"
    assert moved.metrics["recompilations"] == sum(moved.samples["recompilations"])
    assert moved.metrics["recompilations"] > settled.metrics["recompilations"]
    by_places = lab06_anyres.recompilations(varied, rewritten, 4)
    assert by_places.samples["recompilations"][2:] == [0, 0]


# Any shape


def test_one_shape_differs_from_its_rung_in_the_rows_alone():
    recipes = lab06_anyres.shape_recipes("full")
    base = recipes["blocks compiled"]
    assert base.compile == "default"
    changed = dict(recipes["padded"].as_dict().items() - base.as_dict().items())
    assert changed.keys() == {"shapes", "token_budget", "dynamic"}
    changed = dict(recipes["padded, any"].as_dict().items() - base.as_dict().items())
    assert changed.keys() == {"shapes", "token_budget"}  # so it is that rung's code
    tiny = lab06_anyres.shape_recipes("tiny")
    assert all(recipe.compile == "off" for recipe in tiny.values())
    assert {"padded", "packed", "bf16"} <= tiny.keys() < recipes.keys()


# Seeds


def test_losses_are_paired_by_seed(uniform):
    recipes = {"bf16": QUICK, "again": QUICK, "no": QUICK.but(adapter="folded")}
    recipes |= {"qlora": QUICK.but(base_linear="nf4")}
    runs = lab06_anyres.trained_on_seeds(uniform, recipes, 2, 4)
    base = runs["loss bf16"].samples
    assert runs["loss again"].samples == base and len(set(base["final_loss"])) == 2
    assert min(base["loss_drop"]) > 0
    assert runs["loss qlora"].tags == {"experiment": "losses by seed", "method": "qlora"}
    assert runs["loss qlora"].samples["final_loss"] != base["final_loss"]
    assert runs["loss no"].status.startswith("error: ValueError") and not runs["loss no"].samples
