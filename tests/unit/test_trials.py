"""Lab 06's trials on tiny models: each changes what it says and nothing else, and counts what there
is to count.
"""

from __future__ import annotations

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab06_advisor, lab06_anyres
from labutils.labs.ladders import A2_BASE, distinct_on
from labutils.results.records import Run
from labutils.training import Trainer
from labutils.workloads import open_workload

QUICK = A2_BASE.but(layers="rewritten", learning_rate=3e-3, micro_batch=2)


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


# ------------------------------------------------------------------------------------ methods


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", {}),
        ("fp8-te", {"base_linear": "fp8-te"}),
        ("compile", {"compile": "default", "compile_scope": "blocks"}),
        (
            "compile-fp8-te",
            {"compile": "default", "compile_scope": "blocks", "base_linear": "fp8-te"},
        ),
        ("compile-whole", {"compile": "default"}),
        ("fixed-whole-fp8-te", {"compile": "default", "shapes": "fixed", "base_linear": "fp8-te"}),
        (
            "fixed-qlora",
            {
                "compile": "default",
                "compile_scope": "blocks",
                "shapes": "fixed",
                "base_linear": "nf4",
            },
        ),
    ],
)
def test_a_method_s_name_says_its_recipe(name, expected):
    base = A2_BASE.but(checkpointing="blocks", micro_batch=4)
    assert {
        knob: new for knob, (_, new) in lab06_anyres.method(name, 4).changes_from(base).items()
    } == expected


def test_every_method_of_the_article_s_table_is_a_recipe():
    recipes = {name: lab06_anyres.method(name) for name in lab06_advisor.PUBLISHED}
    assert len(set(recipes.values())) == len(recipes)


def test_transformer_engine_s_checkpointing_is_not_compiled_whole(uniform):
    """The compiler would pass by all blocks, and the run would be on record as compiled."""
    run = lab06_anyres.cell(uniform, "compile-whole-fp8-te", 1)
    assert run.status.startswith("skipped: Transformer Engine's checkpointing")


def test_cells_and_their_table(uniform):
    cells = {
        f"{name} b1": lab06_anyres.cell(uniform, name, 1)
        for name in ("bf16", "qlora", "fp8-frozen")
    }
    assert all(run.ok for run in cells.values())
    assert [run.metrics["bf16_weights_held"] for run in cells.values()] == [1, 0, 0]
    cells["bf16 b24"] = Run("06", "bf16 b24", status="oom")
    cells["fp8-te b1"] = cells["fp8-te b4"] = Run("06", "", status="skipped: no GPU")
    rows = lab06_anyres.cell_rows(cells)
    assert [row[0] for row in rows] == ["bf16, batch 1", "qlora, batch 1", "fp8-frozen, batch 1"]
    assert {len(row) for row in rows} == {len(lab06_anyres.HEAD)}
    told = lab06_anyres.not_measured(cells)
    assert "bf16 b24* (oom)" in told and "fp8-te b1, fp8-te b4* (skipped: no GPU)" in told


def test_break_even_counts_are_against_the_same_batch():
    cells = {}
    for name, first, ms in (
        ("bf16 b4", 1.0, 1000.0),
        ("compile b4", 51.0, 500.0),
        ("qlora b4", 1.0, 1200.0),
    ):
        metrics = {"first_step_s": first, "step_ms": {"median": ms}, "useful_tokens_per_s": 10}
        cells[name] = Run("06", name, metrics=metrics)
    bf16, compiled, qlora = lab06_anyres.cell_rows(cells)
    assert compiled[1:] == (51.0, 500.0, None, "-50 %", None, 10, "100 steps")
    assert qlora[1:] == (1.0, 1200.0, None, "+20 %", None, 10, "never")
    assert bf16[1:] == (1.0, 1000.0, None, None, None, 10, None)
    assert lab06_anyres.paid_after(cells, "compile b4") == pytest.approx(100)
    assert lab06_anyres.paid_after(cells, "qlora b4") is None
    assert lab06_anyres.longer_by(cells, "qlora b4") == pytest.approx(20)
    cells["qlora b4"].status = "oom"
    assert (
        lab06_anyres.longer_by(cells, "qlora b4")
        is None
        is lab06_anyres.paid_after(cells, "qlora b4")
    )


def test_a_model_compiled_whole_is_held_against_the_baseline_beside_it():
    """It takes minutes: another hour's baseline turned a break-even of 19,000 steps into one of
    4,900.
    """
    cells = {}
    for name, first, ms in (
        ("bf16 b1", 1.0, 500.0),
        ("bf16 b1, again", 1.0, 480.0),
        ("compile-whole b1", 101.0, 470.0),
    ):
        cells[name] = Run("06", name, metrics={"first_step_s": first, "step_ms": {"median": ms}})
    assert lab06_anyres.paid_after(cells, "compile-whole b1") == pytest.approx(10_000)
    assert [row[4] for row in lab06_anyres.cell_rows(cells)] == [None, None, "-2 %"]
    assert lab06_anyres.cell_rows(cells)[1][0] == "bf16, batch 1, again"
    for ms, name in ((480.0, "bf16 b1, again"), (470.0, "compile-whole b1")):
        cells[name].metrics["step_ms"] = {"median": ms, "p10": ms - 6, "p90": ms + 6}
    assert lab06_anyres.cell_rows(cells)[2][-1] == "unsure"
    del cells["bf16 b1, again"]
    assert lab06_anyres.paid_after(cells, "compile-whole b1") is None


def test_what_the_compiler_did_is_listed_where_it_was_at_work():
    counts = {"compile_s": 2.5, "graphs": 3, "graph_breaks": 1, "recompilations": 0, "given_up": 4}
    cells = {"bf16 b1": Run("06", "bf16 b1"), "compile b1": Run("06", "compile b1", metrics=counts)}
    assert lab06_anyres.compiler_rows(cells) == [("compile b1", 2.5, 3, 1, 0, 4)]


# ------------------------------------------------------------------------------- altered models


def test_preparing_for_kbit_widens_its_own_copy_alone(uniform):
    recipe = A2_BASE.but(precision="bf16")
    with Trainer(uniform, recipe, on_model=lab06_anyres.prepared_for_kbit) as trainer:
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16).requires_grad_(False)
    shared = torch.nn.Sequential(model, torch.nn.Linear(4, 4))
    weight = model.weight
    lab06_anyres.prepared_for_kbit(shared)
    assert shared[0].weight.dtype == torch.float32 and weight.dtype == torch.bfloat16
    assert torch.equal(shared[0].weight, weight.float())


def test_what_a_workload_works_out_is_worked_out_once_and_not_for_its_copies(uniform):
    """A copy may be given other texts and shapes."""
    measured = uniform.example_sizes(QUICK)
    assert uniform.example_sizes(QUICK) is measured
    assert copy.copy(uniform).example_sizes(QUICK) is not measured


def test_layers_that_are_kept_stay_as_they_were(uniform):
    model = uniform.build(QUICK)
    lab06_anyres.fp8_but("o_proj")(model)
    kinds = {
        name.rpartition(".")[2]: type(m.base_layer).__name__
        for name, m in model.named_modules()
        if _adapted(m)
    }
    assert kinds.pop("o_proj") == "Linear"
    assert set(kinds.values()) == {"FrozenFP8Linear"}


def _adapted(module) -> bool:
    return hasattr(module, "base_layer")


def test_weights_are_counted_as_they_are_held(uniform):
    plain, fp8 = (
        lab06_anyres.weights_held(uniform.build(QUICK.but(base_linear=k)))
        for k in ("published", "fp8-frozen")
    )
    assert plain["bf16_weights_held"] == 1 and fp8["bf16_weights_held"] == 0
    assert fp8["weights_gb"] < plain["weights_gb"]


def test_the_vision_tower_s_share(uniform):
    assert lab06_anyres.vision_share(uniform, A2_BASE) == pytest.approx(
        lab06_anyres.vision_share(uniform, QUICK), rel=0.05
    )
    full = open_workload("llava-lora", scale="full", device="cpu")
    assert 0.01 < lab06_anyres.vision_share(full, A2_BASE) < 0.1


# -------------------------------------------------------------------------------- other batches


def test_token_counts_are_those_of_the_processor_s_formula():
    counts = lab06_anyres.token_counts()
    assert counts["tokens_500x500"] == 24 * 24 + 48 * 49  # 2 x 2 tiles, a newline after each row
    assert counts["tokens_336x336"] == 24 * 24 + 24 * 25  # 1 x 2 tiles, half of them padding
    assert counts["tiles_336x336"] == counts["tiles_low_resolution"] == 3
    assert (
        counts["tiles_500x500"] == counts["tiles_354x707"] == 5
    )  # 2 x 2, half of the latter's canvas padding
    assert counts["tokens_354x707"] == 24 * 24 + 24 * 49
    assert counts["aspect_token_ratio"] == pytest.approx(1.67, abs=0.01)
    assert counts["vision_share"] == pytest.approx(0.02, abs=0.005)


def test_a_first_step_alone_says_nothing_of_later_ones(uniform):
    run = lab06_anyres.cell(uniform, "bf16", 2, steps=0)
    assert run.ok and run.metrics["first_step_s"] > 0
    assert run.metric("step_ms") is None and run.metrics["weights_gb"] > 0
    cells = {"bf16 b2": run, "nf4 b2": run}
    assert [row[2:5] for row in lab06_anyres.cell_rows(cells)] == [(None, None, None)] * 2
    assert (
        lab06_anyres.longer_by(cells, "nf4 b2") is lab06_anyres.paid_after(cells, "nf4 b2") is None
    )
    failed = lab06_anyres.cell(uniform, "fp8-te", 2, steps=0)
    assert failed.status.startswith("skipped")


def test_copies_of_one_example_need_no_padding(varied):
    recipe = QUICK.but(cache="features", micro_batch=2)
    with Trainer(varied, recipe.but(cache="nothing")) as trainer:
        batches = lab06_anyres._of_varied_lengths(trainer, 3)
    assert all(torch.equal(*batch["input_ids"]) for batch in batches)
    assert len({lab06_anyres.tokens_of(batch) for batch in batches}) > 1


def test_replaying_trains_on_the_same_batches(varied):
    with Trainer(varied, QUICK) as trainer:
        batches = lab06_anyres.drawn(trainer, 5)
        middle = lab06_anyres.of_median_length(batches)
        lengths = sorted(lab06_anyres.tokens_of(batch) for batch in batches)
        assert lab06_anyres.tokens_of(middle) == lengths[2]
        run = lab06_anyres.replay(trainer, [middle] * 2)
    assert run.metrics["tokens"] == lengths[2]
    assert len(run.samples["ms_per_1k_tokens"]) == 3
    assert min(run.samples["ms_per_1k_tokens"]) > 0


# --------------------------------------------------------------------------------- the compiler


def test_varied_images_recompile_and_uniform_ones_settle(uniform, varied):
    blocks = QUICK.but(micro_batch=1, compile_scope="blocks")
    settled = lab06_anyres.recompilations(uniform, blocks, 4)
    assert settled.metrics()["further_image_token_counts"] == 0
    assert settled.metrics()["recompilations_after_2_steps"] == 0
    exact = lab06_anyres.recompilations(varied, blocks, 4, dynamic=False)
    free = lab06_anyres.recompilations(varied, blocks, 4, dynamic=True)
    assert exact.metrics()["further_image_token_counts"] > 0
    assert sum(free.by_step[1:]) == 0 < sum(exact.by_step[1:])
    assert any("size mismatch" in reason for reason in exact.reasons)


def test_more_versions_than_the_compiler_allows_are_noted_not_raised(varied):
    """Whatever ran before: a compiled trainer is stricter than this count, and once made the whole
    process so.
    """
    compiled = QUICK.but(compile="default", compile_scope="blocks", dynamic="any")
    with Trainer(varied, compiled), mock.patch.object(torch._dynamo.config, "recompile_limit", 2):
        found = lab06_anyres.recompilations(
            varied, QUICK.but(micro_batch=1, compile_scope="blocks"), 5, dynamic=False
        )
    assert found.given_up


def test_reasons_are_sorted_by_what_a_guard_was_about():
    size = "tensor 'input_ids' size mismatch at index 1. expected 349, actual 350"
    uniform = lab06_anyres.Recompiled(
        reasons=Counter({size: 4, "not args": 2, "len(args) == 1": 1})
    )
    varied = lab06_anyres.Recompiled(
        reasons=Counter({"tensor._base.stride()[0] == 64*tensor._base.size()[3]": 1, size: 2})
    )
    assert lab06_anyres.reason_rows({"uniform": uniform, "varied": varied}) == [
        ("a tensor of another size", f"`{size}`", 4, 3),
        ("the same code, called in another way", "`not args`", 3, 0),
    ]


def test_every_reason_that_really_occurs_is_of_a_known_kind(varied):
    found = lab06_anyres.recompilations(varied, A2_BASE, 2)
    assert found.reasons
    assert "something else" not in [row[0] for row in lab06_anyres.reason_rows({"varied": found})]


def test_the_ladder_of_a_cpu_compiles_nothing():
    ladder, recipes = lab06_anyres.ladder_for("cpu")
    assert {recipe.compile for recipe in recipes.values()} == {"off"}
    climbable = distinct_on("cpu", recipes)
    rows = {row[0]: row for row in lab06_anyres.rung_rows(ladder, climbable)}
    assert rows["bf16"][2] is None and rows["bf16"][4] is None
    assert rows["blocks compiled"][4] == "no different on a CPU"
    on_gpu, climbed = lab06_anyres.ladder_for("cuda")
    assert climbed[on_gpu[-1].name].base_linear == "fp8-frozen"


def rung(name: str, cost: float, base_linear: str = "published") -> Run:
    metrics = {"ms_per_1k_useful_tokens": cost, "tflops": 500.0, "useful_tokens": 0.8}
    return Run("06", name, recipe={"base_linear": base_linear}, metrics=metrics)


def test_what_the_ladder_reaches(varied):
    climbed = {
        "bf16": rung("bf16", 90),
        "top": rung("top", 30),
        "fp8": rung("fp8", 31, "fp8-frozen"),
    }
    cells = {
        name: Run("06", name, metrics={"weights_gb": weights, "peak_allocated_gb": peak})
        for name, weights, peak in (("bf16 b1", 14, 20), ("fp8-frozen b1", 7, 13))
    }
    assert lab06_anyres.best_rung(climbed) == "top"
    found = lab06_anyres.reached(varied, QUICK, climbed, cells, rate=800)
    assert found["useful_speedup"] == pytest.approx(3)
    assert found["mfu_fp8"] == found["mfu_bf16"] == pytest.approx(0.5)
    assert found["graphs"] == found["graph_breaks"] == found["compilations_after_warmup"] == 0
    assert (found["weights_share"], found["memory_share"]) == pytest.approx((0.5, 0.65))
    assert set(found) == set(lab06_anyres.GOALS)


def test_what_was_not_measured_is_not_reached(varied):
    climbed = {"bf16": rung("bf16", 90), "top": rung("top", 30)}
    climbed["bf16"].status = climbed["top"].status = "oom"
    with pytest.raises(ValueError, match="No rung of the ladder ran"):
        lab06_anyres.best_rung(climbed)
    climbed["top"].status = "ok"
    found = lab06_anyres.reached(varied, QUICK, climbed, {}, rate=800)
    assert set(found) == {"mfu_bf16", "graphs", "graph_breaks", "compilations_after_warmup"}


def test_steady_tells_warm_up_from_what_follows(uniform):
    found = lab06_anyres.steady(uniform, QUICK, warmup=1, steps=1)
    assert found == {"graphs": 0, "graph_breaks": 0, "compilations_after_warmup": 0}


# --------------------------------------------------------------------------------------- seeds


def test_replays_are_those_of_their_recipes(varied):
    recipe = QUICK.but(micro_batch=1, cache="features")
    runs, recipes = lab06_anyres.replays(varied, recipe, 3), lab06_anyres.replay_recipes(recipe)
    assert {name: run.recipe for name, run in runs.items()} == {
        name: r.fitted_to("cpu").as_dict() for name, r in recipes.items()
    }
    tokens = {name: run.metrics["tokens"] for name, run in runs.items()}
    assert tokens["same-tokens varying"] == tokens["same-tokens any length"]
    assert tokens["static fewer-tokens"] < tokens["same-tokens static"]
    assert all(run.metrics["recompilations"] == 0 for run in runs.values())  # nothing is compiled


def test_a_climb_keeps_each_rung_s_lane(varied):
    ladder, recipes = lab06_anyres.ladder_for("cpu")
    few = {name: recipes[name] for name in ("bf16", "answers only")}
    runs = lab06_anyres.climbed(varied, ladder, few, steps=1)
    assert {name: run.lane for name, run in runs.items()} == {
        "bf16": "article",
        "answers only": "same mathematics",
    }
    assert all(run.metrics["ms_per_1k_useful_tokens"]["median"] > 0 for run in runs.values())


def test_losses_by_seed(uniform):
    recipes = {
        "bf16": QUICK,
        "again": QUICK,
        "fp8-mixed": QUICK,
        "broken": QUICK.but(adapter="folded"),
    }
    runs = lab06_anyres.losses_over_seeds(
        uniform, recipes, seeds=2, steps=4, changes={"fp8-mixed": lab06_anyres.fp8_but("o_proj")}
    )
    base = runs["loss bf16"]
    assert base.samples["final_loss"] == runs["loss again"].samples["final_loss"]
    assert len(set(base.samples["start_loss"])) == 1, (
        "every seed starts from the same model, as adapters add nothing"
    )
    assert len(set(base.samples["final_loss"])) == 2, "and sees other examples, with other adapters"
    assert max(base.samples["final_loss"]) < min(base.samples["start_loss"])
    assert runs["loss fp8-mixed"].samples["final_loss"] != base.samples["final_loss"]
    assert base.metrics["final_loss"]["n"] == 2
    assert len(base.metrics["loss"]) == 4
    assert base.recipe == QUICK.fitted_to("cpu").as_dict()
    assert runs["loss broken"].status.startswith("error: ValueError")
    assert "final_loss" not in runs["loss broken"].metrics


def test_seeds_spread_the_held_out_loss_by_a_few_percent_only(uniform):
    """Single steps' losses spread much wider: a comparison of methods by these would compare
    photographs.
    """
    (run,) = lab06_anyres.losses_over_seeds(uniform, {"bf16": QUICK}, seeds=3, steps=6).values()
    low, high = lab06_anyres.seed_band(run)
    assert high - low < 5


def test_held_out_photographs_are_in_no_training(uniform):
    photographs = lab06_anyres._Photographs(uniform)
    learn, held_out = photographs.split(QUICK)
    seen = [example["pixel_values"] for example in learn]
    assert len(learn) == 3 * len(held_out)
    assert not any(
        torch.equal(example["pixel_values"], other) for example in held_out for other in seen
    )
    assert photographs.split(QUICK)[1][0] is held_out[0], "decoded once"
    assert (
        photographs.split(QUICK.but(shapes="fixed"))[1][0]["pixel_values"].shape
        != held_out[0]["pixel_values"].shape
    )


def test_losses_are_compared_seed_by_seed():
    runs = {}
    for name, losses in (("bf16", [2.0, 4.0, 3.0]), ("fp8", [2.2, 4.0, 2.7])):
        runs[name] = Run(
            "06", name, samples={"final_loss": losses}, metrics={"final_loss": {"median": 3.0}}
        )
    runs["fp8-te"] = Run("06", "fp8-te", status="skipped: not here")
    found = lab06_anyres.against_same_seed(runs)
    assert list(found) == ["bf16", "fp8"]
    assert found["bf16"] == [0, 0, 0]
    assert found["fp8"] == pytest.approx([10, 0, -10])
    assert lab06_anyres.seed_band(runs["bf16"]) == pytest.approx((-100 / 3, 100 / 3))


def test_points_by_batch():
    cells = {"bf16 b1": 3.0, "bf16 b24": 9.0, "fixed-fp8-te b1": 1.0}
    runs = {
        name: Run("06", name, metrics={"peak_allocated_gb": value}) for name, value in cells.items()
    }
    runs["bf16 b8"] = Run("06", "bf16 b8", status="oom")
    runs["bf16 b1, again"] = Run("06", "bf16 b1, again", metrics={"peak_allocated_gb": 3.1})
    assert lab06_anyres.by_batch(runs, "peak_allocated_gb", ["bf16", "qlora"]) == {
        "bf16": {1: 3.0, 24: 9.0},
        "qlora": {},
    }


def test_costs_are_counted_step_by_step():
    run = lab06_anyres.with_costs(
        Run("06", "a", samples={"step_ms": [100, 300], "useful_tokens": [1000, 2000]})
    )
    assert run.samples["ms_per_1k_useful_tokens"] == [100, 150]
    assert run.metric("ms_per_1k_useful_tokens") == 125
    assert lab06_anyres.with_costs(Run("06", "a", status="oom")).metrics == {}


# Tables of a results file


def test_tables_of_the_reference_runs_are_made_of_their_metrics():
    replayed = Run("06", "same-tokens static", metrics={"tokens": 2000.0, "ms_per_1k_tokens": 80.0})
    assert lab06_anyres.replay_rows({"same-tokens static": replayed}) == [
        ("same-tokens static", 2000, 160.0, 80.0, None)
    ]
    form = Run(
        "06",
        "form: fixed",
        metrics={"tokens_per_s": 70.0, "useful_tokens_per_s": 40.0, "useful_tokens": 0.58},
    )
    assert lab06_anyres.form_rows({"form: fixed": form}) == [("fixed", 70.0, 40.0, "42")]
    rung = Run("06", "packed", lane="same mathematics", metrics={"ms_per_1k_useful_tokens": 50.0})
    failed = Run("06", "other", status="oom")
    assert lab06_anyres.climbed_rows({"packed": rung, "other": failed}) == [
        ("packed", "same mathematics", 50.0, None)
    ]
    base, fp8 = (
        Run(
            "06",
            f"loss {name}",
            metrics={"final_loss": {"median": loss}},
            samples={"final_loss": [loss, 2 * loss]},
        )
        for name, loss in (("bf16", 2.0), ("fp8", 2.2))
    )
    assert lab06_anyres.loss_rows({"loss bf16": base, "loss fp8": fp8})[1] == (
        "fp8",
        2.2,
        "+10.00, +10.00",
    )
    assert (
        lab06_anyres.loss_rows({"loss fp8": fp8})
        == lab06_anyres.replay_rows({"other": failed})
        == []
    )


def test_libraries_are_loaded_before_whatever_is_measured_first(varied, monkeypatch):
    """A lab that was interrupted goes on anywhere: a ladder's first step once held a minute of
    loading the compiler.
    """
    loaded = []
    monkeypatch.setattr(lab06_anyres, "load_libraries", loaded.append)
    lab06_anyres.climbed(varied, (), {}, 1)
    with (
        mock.patch.object(lab06_anyres, "Trainer", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        lab06_anyres.replays(varied, lab06_anyres.method("bf16"), 1)
    assert loaded == ["cpu", "cpu"]
