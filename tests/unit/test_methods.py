"""Lab 07's methods on tiny models: names mean what they say, arithmetic is PyTorch's and
bitsandbytes' own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab07_qlora
from labutils.labs.ladders import A3_BASE, A3_OWN, distinct_on
from labutils.layers.quantization import nf4_math
from labutils.recipe import Recipe
from labutils.results.records import REFERENCE, Run, read_runs
from labutils.training import Trainer
from labutils.training.memory_run import read_log
from labutils.training.model_edits import cast_as_for_kbit, prepared_for_kbit
from labutils.workloads import open_workload
from labutils.workloads.causal_lm import QWEN3, build_lm


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def texts():
    return {
        length: open_workload(f"qwen3-lora-{length}", scale="tiny", device="cpu")
        for length in ("short", "long")
    }


# --------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "expected", "change"),
    [
        ("lora short", {}, None),
        ("lora long, checkpointed", {"checkpointing": "blocks"}, None),
        ("lora long, offloaded", {"checkpointing": "offload"}, None),
        ("lora long, 4 bits", {"base_linear": "nf4"}, None),
        ("lora long, fp32 casts", {}, cast_as_for_kbit),
        ("qlora long", {"base_linear": "nf4", "checkpointing": "blocks"}, prepared_for_kbit),
        ("qlora long, no casts", {"base_linear": "nf4", "checkpointing": "blocks"}, None),
        ("lora short, batch 1", {"micro_batch": 1}, None),
        ("lora long, fused loss", {"layers": "rewritten", "loss": "fused"}, None),
        ("unsloth long, padded", {"base_linear": "nf4", "shapes": "padded"}, None),
    ],
)
def test_a_name_says_its_recipe(name, expected, change):
    method = lab07_qlora.of_name(name)
    assert {knob: new for knob, (_, new) in method.recipe.changes_from(A3_BASE).items()} == expected
    assert method.change is change
    assert method.texts in name


def test_qlora_is_the_recipes_own():
    assert lab07_qlora.of_name("qlora long").recipe == A3_OWN["qlora"]


@pytest.mark.parametrize(
    "name", ["", "lora", "lora middle", "qlora long, faster", "lora long,checkpointed"]
)
def test_another_name_is_no_method(name):
    with pytest.raises(ValueError, match="is no method"):
        lab07_qlora.of_name(name)


# -------------------------------------------------------------------------------------- running


def test_a_method_is_followed(texts, tmp_path):
    lora = lab07_qlora.follow(texts, "lora short", 4, tmp_path, every=2)
    run = lab07_qlora.follow(texts, "qlora short", 4, tmp_path, every=2, against=lora)
    assert run.ok, run.status
    assert run.recipe["base_linear"] == "nf4"
    assert run.metrics["ms_per_1k_useful_tokens"]["n"] == len(run.samples["step_ms"])
    assert "memory_share" not in run.metrics  # nothing is known of memory here
    log = read_log(tmp_path / "qlora short.csv")
    assert [line["step"] for line in log] == [
        2,
        4,
        6,
        7,
    ]  # one, one to warm up, one to rewind, four timed
    assert log[0]["elapsed_time_sec"] < log[1]["elapsed_time_sec"]
    common = min(len(lora.samples["useful_tokens"]), len(run.samples["useful_tokens"]))
    assert lora.samples["useful_tokens"][:common] == run.samples["useful_tokens"][:common]
    curves = lab07_qlora.over_examples(tmp_path, "short", "elapsed_time_sec")
    assert list(curves["qlora"]) == [8, 16, 24, 28]
    assert curves["unsloth"] == {}
    rows = lab07_qlora.method_rows(
        {"qlora short": run, "unsloth short": Run("07", "", status="oom")}
    )
    assert [row[0] for row in rows] == ["qlora short", "unsloth short: oom"]
    assert {len(row) for row in rows} == {len(lab07_qlora.METHOD_HEAD)}


def test_a_log_is_begun_anew(texts, tmp_path):
    for _ in range(2):
        lab07_qlora.follow(texts, "lora short", 2, tmp_path, every=2)
    assert [line["step"] for line in read_log(tmp_path / "lora short.csv")] == [2, 4, 5]


def test_casts_alone_leave_the_adapted_matrices(texts):
    recipe = A3_BASE.but(precision="bf16")
    model = texts["short"].build(recipe)
    cast_as_for_kbit(model)
    found = {name: p.dtype for name, p in model.network.named_parameters() if not p.requires_grad}
    assert {dtype for name, dtype in found.items() if "base_layer" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in found.items() if "base_layer" not in name} == {torch.float32}


@pytest.mark.parametrize("cast", [cast_as_for_kbit, prepared_for_kbit])
def test_tied_weights_stay_tied_when_they_are_cast(cast):
    lm = build_lm(
        replace(QWEN3["tiny"], tied=True), torch.device("cpu"), torch.bfloat16
    ).requires_grad_(False)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    cast(lm)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert lm.lm_head.weight.dtype == torch.float32


def test_what_casts_replace_is_let_go(texts, monkeypatch, tmp_path):
    """Else embedding and head would be there twice, for a trainer that never comes."""
    held = []
    real = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self, *a: held.append(len(texts["short"]._held)) or real(self, *a)
    )
    lab07_qlora.follow(texts, "lora short, fp32 casts", 1, tmp_path)
    with lab07_qlora.Filled(texts["short"], "lora short, fp32 casts") as filled:
        filled.peak(1)
    assert len(held) > 2 and set(held) == {0}


def test_what_building_reserved_is_given_back(texts, monkeypatch, tmp_path):
    """Else 4-bit weights would have the 16-bit ones, from which they were made, in the memory
    reserved.
    """
    events = []
    step, empty_cache = Trainer.step, lab07_qlora.cuda.empty_cache
    monkeypatch.setattr(Trainer, "step", lambda self, *a: events.append("step") or step(self, *a))
    monkeypatch.setattr(
        lab07_qlora.cuda,
        "empty_cache",
        lambda: events.append("given back") or empty_cache(),
    )
    monkeypatch.setattr(
        texts["short"],
        "build",
        lambda recipe: events.append("built") or type(texts["short"]).build(texts["short"], recipe),
    )
    assert lab07_qlora.follow(texts, "qlora short, no casts", 1, tmp_path).ok
    assert events[events.index("built") :][:3] == ["built", "given back", "step"]


def test_how_much_longer_steps_are():
    def run(times, tokens, status="ok"):
        return Run("07", "", status=status, samples={"step_ms": times, "useful_tokens": tokens})

    base = run([10, 30, 20, 50], [1, 3, 2, 5])
    assert lab07_qlora.longer_by(run([12, 36, 26], [1, 3, 2]), base) == pytest.approx(20)
    assert lab07_qlora.longer_by(run([12, 36, 26], [3, 1, 1]), base) is None
    assert lab07_qlora.longer_by(run([], [], "oom"), base) is None


def test_time_to_catch_up():
    slow = Run("07", "a", metrics={"first_step_s": 1.0, "step_ms": 500})
    quick = Run("07", "b", metrics={"first_step_s": 21.0, "step_ms": 300})
    assert lab07_qlora.paid_after(slow, quick) == pytest.approx(100)
    assert lab07_qlora.paid_after(quick, slow) is None
    assert lab07_qlora.paid_after(slow, Run("07", "c", status="oom")) is None


# ----------------------------------------------------------------------------------- arithmetic


def test_the_articles_four_numbers():
    found = lab07_qlora.absmax_example(torch.tensor([2.50, -0.70, 0.12, 0.48]))
    assert [found[f"code_{i}"] for i in range(4)] == [127, -36, 6, 24]
    assert [round(found[f"restored_{i}"], 4) for i in range(4)] == [2.5, -0.7087, 0.1181, 0.4724]
    assert found["constant"] == pytest.approx(50.8)


def test_an_outlier_spoils_its_block_alone():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    whole, blocks = lab07_qlora.outlier_costs(weight, None), lab07_qlora.outlier_costs(weight, 64)
    assert whole["zeros_share"] > 0.99
    assert whole["others_error"] == pytest.approx(1, abs=0.01)
    assert blocks["others_error"] < math.sqrt(63 / 4095) + 0.02


def test_bytes_held_are_the_arithmetic():
    found = lab07_qlora.bits_held(torch.randn(1024, 1024))
    assert found["bits_codes"] == 4
    assert found["bits_float32"] == nf4_math.constant_bits()
    assert found["bits_doubled"] == nf4_math.doubled_constant_bits()
    assert found["linear_share"] == pytest.approx(4.126953125 / 16)
    assert all(lab07_qlora.same_as_bitsandbytes(torch.randn(64, 64)).values())


def test_every_format_has_its_bits():
    assert lab07_qlora.BITS.keys() == nf4_math.ROUNDINGS.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_4_bit_layer_multiplies_the_restored_weight(dtype):
    linear = torch.nn.Linear(128, 64, bias=False, dtype=dtype).requires_grad_(False)
    found = lab07_qlora.multiplies_restored(linear, torch.randn(8, 128, dtype=dtype))
    assert found["multiplies_restored_weights"] == 1
    assert found["error_to_16_bits"] > 10 * found["error_to_restored"]


@pytest.mark.parametrize("order", ["thin first", "wide first"])
def test_both_orders_of_the_chain_give_autograds_gradients(order):
    x, A, B = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 12), (3, 12), (7, 3))
    )
    slope = torch.randn(5, 7, dtype=torch.float64)
    y = x @ A.t() @ B.t()
    expected = (y, *torch.autograd.grad(y, (x, A, B), slope))
    for found, wanted in zip(lab07_qlora.chain(order, x, A, B, slope), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_flops_of_the_chain():
    """By hand: six thin products of n tokens; or two thin and three wide ones, and forming the wide
    matrix.
    """
    shapes = lab07_qlora.decoder_shapes(lab07_qlora.QWEN3["full"]).adapted.values()
    n, r = 10, 4
    assert lab07_qlora.chain_flops("thin first", n, r) == sum(
        6 * n * r * (i + o) for i, o in shapes
    )
    wide = sum(4 * n * r * (i + o) + 2 * r * i * o + 4 * n * i * o for i, o in shapes)
    assert lab07_qlora.chain_flops("wide first", n, r) == wide


# ----------------------------------------------------------------------------- memory and batch


def test_unsloths_line_is_that_of_its_padded_runs():
    peaks = {"unsloth long, padded, batch 2": 7.0, "unsloth long, padded": 9.0}
    runs = {
        name: Run("07", name, metrics={"peak_allocated_gb": peak}) for name, peak in peaks.items()
    }
    assert lab07_qlora.lines_of({}, runs)["unsloth long"] == pytest.approx((5.0, 1.0))
    assert lab07_qlora.lines_of({}, {}) == {}


# ----------------------------------------------------------------------------------- the ladder


def test_tables_of_a_results_file_are_those_of_the_lab():
    def run(name, **metrics):
        return Run(
            "07", name, metrics=metrics, samples={"step_ms": [1.0, 2.0], "useful_tokens": [5, 6]}
        )

    there = {
        "lora long": run("lora long", ms_per_1k_useful_tokens=4.0),
        "lora long, 4 bits": run("lora long, 4 bits", ms_per_1k_useful_tokens=5.0),
        "memory of lora long": run("memory of lora long", base_gb=10.0, each_gb=5.0),
        "memory of qlora long": run("memory of qlora long", base_gb=4.0, each_gb=8.0),
    }
    assert lab07_qlora.bundle_of(there) == [
        ("lora long", 4.0, "+0", 10.0, 5.0),
        ("lora long, 4 bits", 5.0, "+0", None, None),
        ("qlora long", None, None, 4.0, 8.0),
    ]
    assert lab07_qlora.largest_on(there, (24, 80)) == [("lora long", 2, 14), ("qlora long", 2, 9)]
    assert lab07_qlora.batches_head((24, 0.048))[1:] == ("24 GB", "48 MB")
    assert (
        lab07_qlora.bundle_of({})
        == lab07_qlora.largest_on({}, (24,))
        == lab07_qlora.rung_rows({})
        == []
    )


def test_the_ladder_on_a_cpu_compiles_nothing():
    ladder, recipes = lab07_qlora.ladder_for("cpu")
    assert {recipe.compile for recipe in recipes.values()} == {"off"}
    assert list(recipes) == [rung.name for rung in ladder]
    assert "blocks compiled" not in distinct_on("cpu", recipes)


def test_what_is_on_record_of_a_rung_is_of_its_recipe():
    """Every recipe on record is one that can be asked for, and under a rung's name there is no
    other one's run.
    """
    runs = {(run.lab, run.run): run for run in read_runs(REFERENCE) if run.recipe}
    recipes = {place: Recipe(**run.recipe) for place, run in runs.items()}
    assert len(recipes) > 50
    _, rungs = lab07_qlora.ladder_for("cuda")
    there = [name for name in rungs if ("07", name) in recipes]
    assert len(there) >= 5
    for name in there:
        assert recipes["07", name] == rungs[name].fitted_to("cuda"), name


def test_rungs_are_timed_on_the_same_batches_and_rated_by_the_epoch(texts):
    ladder, recipes = lab07_qlora.ladder_for("cpu")
    chosen = {name: recipes[name] for name in ("lora", "rewritten", "packed", "4-bit weights")}
    runs = lab07_qlora.climbed_on(texts["long"], ladder, chosen, steps=2, rounds=2, warmup=0)
    assert list(runs) == list(chosen) and all(run.ok for run in runs.values())
    assert [run.lane for run in runs.values()] == [
        "article",
        "same work",
        "same mathematics",
        "same mathematics",
    ]
    assert runs["lora"].samples["tokens"][:2] == runs["rewritten"].samples["tokens"][:2]
    assert runs["packed"].samples["tokens"] == runs["4-bit weights"].samples["tokens"][:4]
    work = texts["long"].work(recipes["lora"].fitted_to("cpu"))
    assert runs["lora"].metrics["useful_tokens"] == work.useful_tokens / work.tokens
    tokens, times = runs["lora"].samples["tokens"], runs["lora"].samples["step_ms"]
    rates = sorted(
        1e3 * n / ms * work.useful_tokens / work.tokens for n, ms in zip(tokens, times, strict=True)
    )
    assert rates[0] <= runs["lora"].metrics["useful_tokens_per_s"]["median"] <= rates[-1]
    assert lab07_qlora.floor_columns(runs["lora"])[1] == pytest.approx(
        100 * runs["lora"].metrics["floor_ms"] * len(times) / sum(times)
    )
    assert lab07_qlora.floor_columns(Run("07", "", status="oom")) == (None, None)


def test_a_step_by_kind(texts, tmp_path):
    """The step's attention and products are in it; rows are those that take a hundredth or more."""
    run = lab07_qlora.kinds_of(
        texts["long"], lab07_qlora.ladder_for("cpu")[1]["packed"], tmp_path, steps=1
    )
    kinds = run.metrics["kernel_categories"]
    assert {"attention", "GEMM", "elementwise"} <= kinds.keys()
    rows = lab07_qlora.kinds_rows({"step by kind": run})
    assert all(share >= 1 and ms == kinds[name]["ms"] for name, ms, share, _ in rows)
    assert 90 < sum(share for *_, share, _ in rows) <= 100.001
    assert (
        lab07_qlora.kinds_rows({})
        == lab07_qlora.kinds_rows({"step by kind": Run("07", "", status="oom")})
        == []
    )


def test_what_the_ladder_reaches():
    def rung(name, rate, peak):
        rates = {"median": rate, "p10": 0.9 * rate, "p90": 1.2 * rate, "n": 6}
        return Run("07", name, metrics={"useful_tokens_per_s": rates, "peak_allocated_gb": peak})

    def medians(found):
        return {
            metric: value["median"] if isinstance(value, dict) else value
            for metric, value in found.items()
        }

    climbed = {
        r.run: r
        for r in (
            rung("lora", 9e3, 50.0),
            rung("packed", 18e3, 35.0),
            rung(lab07_qlora.LEAST_MEMORY, 13e3, 9.0),
        )
    }
    padded, packed = rung("unsloth long", 6.5e3, 5.0), rung("unsloth long, packed", 10e3, 7.5)
    expected = {"useful_tokens_per_s": 18e3, "useful_speedup": 2, "small_over_unsloth_padded": 2}
    assert medians(lab07_qlora.reached(climbed, {padded.run: padded})) == pytest.approx(expected)
    found = lab07_qlora.reached(climbed, {padded.run: padded, packed.run: packed})
    assert medians(found) == pytest.approx(
        expected | {"small_over_unsloth": 1.3, "small_memory_over_unsloth": 1.2}
    )
    assert found["useful_speedup"] == pytest.approx({"median": 2, "p10": 1.5, "p90": 8 / 3, "n": 6})
    assert lab07_qlora.reached({}, {}) == {}
    assert found.keys() == lab07_qlora.GOALS.keys() - {"fp8_useful_tokens_per_s"}
