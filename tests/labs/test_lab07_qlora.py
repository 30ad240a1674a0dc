"""Lab 07's methods on tiny models; its arithmetic is PyTorch's and bitsandbytes' own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab07_qlora
from labutils.labs.ladders import A3_BASE, distinct_on
from labutils.layers.quantization import nf4_math
from labutils.recipe import Recipe
from labutils.results.records import REFERENCE, Run, Runs, read_runs
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


def test_methods_change_what_they_say():
    qlora = A3_BASE.but(base_linear="nf4", checkpointing="blocks")
    assert lab07_qlora.method("qlora", "long").recipe == qlora
    assert lab07_qlora.method("qlora", "long").change is prepared_for_kbit
    assert lab07_qlora.method("qlora", "long", "no casts").change is None
    assert lab07_qlora.method("lora", "long", "fp32 casts").change is cast_as_for_kbit
    both = lab07_qlora.method("lora", "long", "checkpointed", "fused loss")
    assert both.recipe == A3_BASE.but(checkpointing="blocks", layers="rewritten", loss="fused")
    tags = {"method": "lora", "texts": "long", "checkpointing": "blocks", "fused_loss": True}
    assert both.tags == tags
    packed = lab07_qlora.method("unsloth", "long", "packed").recipe
    assert (packed.base_linear, packed.shapes, packed.driver) == ("nf4", "packed", "eager")


def test_every_switch_is_among_the_recorded_tags():
    """A run that is made today has the tags of the one on record."""
    recorded = {frozenset(run.tags.items()) for run in read_runs(REFERENCE, "07")}
    for one in (
        lab07_qlora.method("lora", "long", "offloaded"),
        lab07_qlora.method("lora", "long", "4 bits"),
        lab07_qlora.method("lora", "long", "fp32 casts"),
        lab07_qlora.method("qlora", "long", "no casts"),
        lab07_qlora.method("qlora", "short", "batch 1"),
        *lab07_qlora.UNSLOTHS,
    ):
        assert frozenset(({"experiment": "methods"} | one.tags).items()) in recorded, one.name
    fused = lab07_qlora.method("lora", "long", "checkpointed", "fused loss")
    assert frozenset(({"experiment": "memory"} | fused.tags).items()) in recorded


def test_a_method_is_followed(texts, tmp_path):
    chosen = [lab07_qlora.method(kind, "short") for kind in ("lora", "qlora")]
    lora, run = (lab07_qlora.follow(texts, one, 4, tmp_path, every=2) for one in chosen)
    assert run.ok, run.status
    assert run.recipe["base_linear"] == "nf4"
    assert run.metrics["ms_per_1k_useful_tokens"]["n"] == len(run.samples["step_ms"])
    log = read_log(tmp_path / "qlora short.csv")
    # One, one to warm up, one to rewind, four timed.
    assert [line["step"] for line in log] == [2, 4, 6, 7]
    pairs = zip(lora.samples["useful_tokens"], run.samples["useful_tokens"], strict=False)
    assert all(mine == theirs for mine, theirs in pairs)
    curves = lab07_qlora.over_examples(tmp_path, "short", "elapsed_time_sec")
    assert list(curves["qlora"]) == [8, 16, 24, 28]
    assert curves["unsloth"] == {}


def test_casts_alone_leave_the_adapted_matrices(texts):
    model = texts["short"].build(A3_BASE.but(precision="bf16"))
    cast_as_for_kbit(model)
    frozen = {name: p.dtype for name, p in model.network.named_parameters() if not p.requires_grad}
    for name, dtype in frozen.items():
        assert dtype == (torch.bfloat16 if "base_layer" in name else torch.float32), name


@pytest.mark.parametrize("cast", [cast_as_for_kbit, prepared_for_kbit])
def test_tied_weights_stay_tied_when_they_are_cast(cast):
    tied = replace(QWEN3["tiny"], tied=True)
    lm = build_lm(tied, torch.device("cpu"), torch.bfloat16).requires_grad_(False)
    cast(lm)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert lm.lm_head.weight.dtype == torch.float32


def test_how_much_longer_steps_are():
    def run(times, tokens, status="ok"):
        return Run("07", "", status=status, samples={"step_ms": times, "useful_tokens": tokens})

    base = run([10, 30, 20, 50], [1, 3, 2, 5])
    assert lab07_qlora.longer_by(run([12, 36, 26], [1, 3, 2]), base) == pytest.approx(20)
    assert lab07_qlora.longer_by(run([12, 36, 26], [3, 1, 1]), base) is None
    assert lab07_qlora.longer_by(run([], [], "oom"), base) is None


def test_an_outlier_spoils_its_block_alone():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    whole, blocks = lab07_qlora.outlier_costs(weight, None), lab07_qlora.outlier_costs(weight, 64)
    assert whole["zeros_share"] > 0.99
    assert whole["others_error"] == pytest.approx(1, abs=0.01)
    assert blocks["others_error"] < math.sqrt(63 / 4095) + 0.02


def test_bytes_held_are_the_arithmetic():
    held = lab07_qlora.bits_held(torch.randn(1024, 1024))
    assert held["bits_codes"] == 4
    assert held["bits_float32"] == nf4_math.constant_bits()
    assert held["bits_doubled"] == nf4_math.doubled_constant_bits()
    assert held["linear_share"] == pytest.approx(4.126953125 / 16)
    assert lab07_qlora.BITS.keys() == nf4_math.ROUNDINGS.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_4_bit_layer_multiplies_the_restored_weight(dtype):
    linear = torch.nn.Linear(128, 64, bias=False, dtype=dtype).requires_grad_(False)
    errors = lab07_qlora.multiplies_restored(linear, torch.randn(8, 128, dtype=dtype))
    assert errors["multiplies_restored_weights"] == 1
    assert errors["error_to_16_bits"] > 10 * errors["error_to_restored"]


@pytest.mark.parametrize("order", ["thin first", "wide first"])
def test_both_orders_of_the_chain_give_autograds_gradients(order):
    shapes = ((5, 12), (3, 12), (7, 3))
    x, A, B = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes)
    slope = torch.randn(5, 7, dtype=torch.float64)
    y = x @ A.t() @ B.t()
    expected = (y, *torch.autograd.grad(y, (x, A, B), slope))
    for ours, wanted in zip(lab07_qlora.chain(order, x, A, B, slope), expected, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_flops_of_the_chain():
    """Six thin products of n tokens; or two thin and three wide ones, and forming the wide one."""
    shapes = lab07_qlora.decoder_shapes(QWEN3["full"]).adapted.values()
    n, r = 10, 4
    thin = sum(6 * n * r * (i + o) for i, o in shapes)
    wide = sum(4 * n * r * (i + o) + 2 * r * i * o + 4 * n * i * o for i, o in shapes)
    assert lab07_qlora.chain_flops("thin first", n, r) == thin
    assert lab07_qlora.chain_flops("wide first", n, r) == wide


def test_memory_is_a_line_over_the_batch(texts):
    plain, checkpointed = (
        lab07_qlora.memory_line(texts, lab07_qlora.method("lora", "long", *switches), (1, 2), None)
        for switches in ((), ("checkpointed",))
    )
    assert 0 < checkpointed.metrics["each_gb"] < plain.metrics["each_gb"]
    base = Run("07", "lora long", tags={"experiment": "methods", "method": "lora", "texts": "long"})
    base.samples = {"step_ms": [1.0, 2.0], "useful_tokens": [5, 6]}
    table = lab07_qlora.bundle_table([base, plain, checkpointed])
    assert list(table["method"]) == [base.label, checkpointed.label]
    assert table["GB an example"][0] == plain.metrics["each_gb"]
    assert table["against lora, step by step, %"][0] == 0
    largest = lab07_qlora.largest_table([plain, checkpointed], (0.024, 24))
    assert list(largest.columns[1:]) == ["24 MB", "24 GB"]
    assert largest["24 GB"][1] > largest["24 GB"][0]


def test_unsloths_line_is_that_of_its_padded_runs():
    runs = [Run("07", one.name, tags=one.tags) for one in lab07_qlora.UNSLOTHS[3:]]
    for run, peak in zip(runs, (7.0, 9.0), strict=True):
        run.tags = {"experiment": "methods"} | run.tags
        run.metrics["peak_allocated_gb"] = peak
    assert lab07_qlora.lines_of(runs) == {"unsloth long": pytest.approx((5.0, 1.0))}
    assert lab07_qlora.lines_of([]) == {}


def test_what_is_on_record_of_a_rung_is_of_its_recipe():
    """Under a rung's name there is no other one's run."""
    rungs = lab07_qlora.recipes_on("cuda")
    runs = read_runs(REFERENCE, "07").select(experiment="ladder")
    there = {run.tags["rung"]: run for run in runs if run.recipe}
    assert len(there) >= 5
    for name, run in there.items():
        if name in rungs:
            assert Recipe(**run.recipe) == rungs[name].fitted_to("cuda"), name


def test_rungs_are_timed_on_the_same_batches_and_rated_by_the_epoch(texts):
    recipes = lab07_qlora.recipes_on("cpu")
    assert "blocks compiled" not in distinct_on("cpu", recipes)
    chosen = {name: recipes[name] for name in ("lora", "rewritten", "packed", "4-bit weights")}
    runs = lab07_qlora.climbed_on(texts["long"], chosen, steps=2, rounds=2, warmup=0)
    assert all(run.ok for run in runs.values())
    lanes = {"lora": "article", "rewritten": "same work", "packed": "same mathematics"}
    assert {name: runs[name].lane for name in lanes} == lanes
    lora = runs["lora"]
    assert lora.samples["tokens"][:2] == runs["rewritten"].samples["tokens"][:2]
    assert runs["packed"].samples["tokens"] == runs["4-bit weights"].samples["tokens"][:4]
    work = texts["long"].work(recipes["lora"].fitted_to("cpu"))
    assert lora.metrics["useful_tokens"] == work.useful_tokens / work.tokens
    share = lab07_qlora.rungs_table([lora])["floor / step, %"][0]
    times = lora.samples["step_ms"]
    assert share == pytest.approx(100 * lora.metrics["floor_ms"] * len(times) / sum(times))


def test_a_step_by_kind(texts, tmp_path):
    packed = lab07_qlora.recipes_on("cpu")["packed"]
    run = lab07_qlora.step_by_kind(texts["long"], packed, tmp_path, steps=1)
    assert {"attention", "GEMM", "elementwise"} <= run.metrics["kernel_categories"].keys()
    shares = lab07_qlora.kinds_table([run])["% of the work"]
    assert shares.min() >= 1 and 90 < shares.sum() <= 100.001


def test_what_the_ladder_reaches():
    def rung(name, rate, peak, **tags):
        rates = {"median": rate, "p10": 0.9 * rate, "p90": 1.2 * rate, "n": 6}
        metrics = {"useful_tokens_per_s": rates, "peak_allocated_gb": peak}
        return Run("07", name, tags=tags, metrics=metrics)

    rungs = (("lora", 9e3, 50.0), ("packed", 18e3, 35.0), (lab07_qlora.LEAST_MEMORY, 13e3, 9.0))
    climbed = {name: rung(name, rate, peak) for name, rate, peak in rungs}
    unsloth = {"method": "unsloth", "texts": "long"}
    padded = rung("unsloth long", 6.5e3, 5.0, **unsloth)
    packed = rung("unsloth long, packed", 10e3, 7.5, **unsloth, rows="packed")
    metrics = lab07_qlora.reached(climbed, Runs([padded, packed]))
    medians = {m: v["median"] if isinstance(v, dict) else v for m, v in metrics.items()}
    assert medians == pytest.approx(
        {
            "useful_tokens_per_s": 18e3,
            "useful_speedup": 2,
            "small_over_unsloth_padded": 2,
            "small_over_unsloth": 1.3,
            "small_memory_over_unsloth": 1.2,
        }
    )
    assert metrics["useful_speedup"] == pytest.approx(
        {"median": 2, "p10": 1.5, "p90": 8 / 3, "n": 6}
    )
    assert lab07_qlora.reached({}, Runs([])) == {}
