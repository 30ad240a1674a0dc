"""Lab 06 on tiny models: each experiment changes what it says, and counts what is there."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab06_anyres
from labutils.labs.ladders import A2_BASE
from labutils.results.records import Run
from labutils.training import Trainer
from labutils.workloads import open_workload

QUICK = A2_BASE.but(layers="rewritten", learning_rate=3e-3, micro_batch=2)
BLOCKS = QUICK.but(micro_batch=1, compile_scope="blocks")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def uniform():
    return open_workload("llava-lora", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def varied():
    return open_workload("llava-lora-varied", scale="tiny", device="cpu")


# The article's table


def test_cells_have_tags_and_hold_their_weights_as_their_method_says(uniform):
    cells = [lab06_anyres.cell(uniform, name, 1, steps=1) for name in ("bf16", "qlora", "nf4")]
    assert all(run.ok for run in cells)
    assert [run.metrics["bf16_weights_held"] for run in cells] == [1, 0, 0]
    assert cells[1].tags == {"experiment": "methods", "method": "qlora", "batch": 1}


def cell(method: str, first_step_s: float, step_s: float, **more) -> Run:
    tags = {"experiment": "methods", "method": method, "batch": 1} | more
    metrics = {"first_step_s": first_step_s, "step_ms": 1e3 * step_s}
    return Run("06", "", tags=tags, metrics=metrics)


def test_cells_stand_against_bf16_of_the_same_batch_and_hour():
    runs = [cell("bf16", 1.0, 1.0), cell("bf16", 1.0, 2.0, again=True)]
    runs += [cell("compile", 51.0, 0.5), cell("compile-whole", 151.0, 0.5)]
    runs += [cell("qlora", 1.0, 1.2), cell("compile", 5.0, 0.5, batch=4)]
    table = lab06_anyres.cell_table(runs)
    assert table["paid_after"][2] == pytest.approx(100)
    assert table["paid_after"][3] == pytest.approx(100), "against the second BF16"
    assert table["paid_after"][4] == math.inf
    assert table["longer_percent"][4] == pytest.approx(20)
    assert table["longer_percent"][[0, 5]].isna().all(), "itself, and another batch size"
    assert list(lab06_anyres.cell_table(runs, ["qlora"])["method"]) == ["qlora"]


# Altered models, other batches


def test_replays_share_tokens_or_shapes_as_their_names_say(varied):
    runs = lab06_anyres.replays(varied, QUICK.but(micro_batch=1, cache="features"), 3)
    assert [len(run.samples["ms_per_1k_tokens"]) for run in runs.values()] == [3] * 4
    assert len({frozenset(run.tags.items()) for run in runs.values()}) == 4
    tokens = {name: run.metrics["tokens"] for name, run in runs.items()}
    assert tokens["same-tokens varying"] == tokens["same-tokens any length"]
    assert tokens["static fewer-tokens"] < tokens["same-tokens static"]


# The compiler


def test_varied_images_recompile_and_uniform_ones_settle(uniform, varied):
    settled, _ = lab06_anyres.recompilations(uniform, BLOCKS, 3)
    assert settled.metrics["further_image_token_counts"] == 0
    assert settled.metrics["recompilations_after_2_steps"] == 0
    exact, why = lab06_anyres.recompilations(varied, BLOCKS, 3, dynamic=False)
    free, _ = lab06_anyres.recompilations(varied, BLOCKS, 3, dynamic=True)
    assert exact.metrics["further_image_token_counts"] > 0
    late = [sum(run.samples["recompilations"][1:]) for run in (free, exact)]
    assert late[0] == 0 < late[1]
    assert exact.metrics["recompilations"] == sum(exact.samples["recompilations"])
    assert any("size mismatch" in reason for reason in why.reasons)


def test_more_versions_than_the_compiler_allows_are_noted_not_raised(varied, capfd):
    """A trainer compiled before must not make this count stricter."""
    compiled = QUICK.but(compile="default", compile_scope="blocks", dynamic="any")
    with Trainer(varied, compiled), mock.patch.object(torch._dynamo.config, "recompile_limit", 2):
        _, compiled = lab06_anyres.recompilations(varied, BLOCKS, 5, dynamic=False)
    assert compiled.given_up and "recompile_limit" not in capfd.readouterr().err


# The ladder


# Seeds


def test_losses_by_seed(uniform):
    recipes = {"bf16": QUICK, "again": QUICK, "fp8-mixed": QUICK}
    recipes |= {"all fp8": QUICK.but(base_linear="fp8-frozen"), "no": QUICK.but(adapter="folded")}
    changes = {"fp8-mixed": lab06_anyres.fp8_but("o_proj")}
    runs = lab06_anyres.losses_over_seeds(uniform, recipes, seeds=2, steps=4, changes=changes)
    final = {run.tags["method"]: run.samples.get("final_loss") for run in runs.values()}
    base = runs["loss bf16"].samples
    assert final["again"] == base["final_loss"]
    assert len(set(base["start_loss"])) == 1, "adapters add nothing at first"
    assert len(set(base["final_loss"])) == 2, "each seed has its adapters and examples"
    assert max(base["final_loss"]) < min(base["start_loss"])
    assert final["fp8-mixed"] not in (base["final_loss"], final["all fp8"]), "o_proj is kept"
    assert runs["loss no"].status.startswith("error: ValueError")
    table = lab06_anyres.loss_table([run for run in runs.values() if run.ok])
    assert list(table["method"]) == ["bf16", "again", "fp8-mixed", "all fp8"]
