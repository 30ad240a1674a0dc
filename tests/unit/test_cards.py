"""Lab 08's arithmetic: published numbers, formulas written out, and PyTorch's own counts as
oracles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labutils.labs import lab08_large_models
from labutils.labs.lab08_large_models import (
    BLACKWELL,
    H100,
    METHODS,
    WAYS_TO_HOLD,
    Basis,
    Method,
    Prices,
)
from labutils.labs.lab08_launch_bound import Seen
from labutils.layers.lora import count_parameters
from labutils.profiling.memory_model import saved_for_backward
from labutils.profiling.step_model import Host, Law, Program
from labutils.profiling.trace import Launch
from labutils.results.claims import a3
from labutils.results.records import Run
from labutils.workloads.base import Work
from labutils.workloads.causal_lm import GPT_OSS, GPT_OSS_120B, QWEN3, QWEN3_32B, build_lm

LAW = Law(50, 300, 50)
BASES = {"dense": Basis(Law(50, 370), 0.01), "moe": Basis(LAW, 0.02)}


def test_the_articles_peaks_of_tensor_cores_are_sparse_ones():
    which = {row[0]: row[-1] for row in lab08_large_models.spec_rows()}
    assert which.pop(f"{H100}, FP4") is None
    assert {which.pop(f"{name}, FP32") for name in (BLACKWELL, H100)} == {"the dense peak"}
    assert set(which.values()) == {"the sparse peak"}


def test_an_unknown_card_is_refused():
    with pytest.raises(ValueError, match="no data sheet"):
        lab08_large_models.card("H300")


# Weights


@pytest.mark.parametrize(
    "size", [GPT_OSS_120B, GPT_OSS["full"], QWEN3_32B, GPT_OSS["tiny"], QWEN3["small"]]
)
def test_every_parameter_has_its_part(size):
    whole = count_parameters(build_lm(size, torch.device("meta"), torch.bfloat16))
    assert sum(lab08_large_models.parameters_of(size).values()) == whole


def test_gpt_oss_120b_by_hand():
    width, layers, experts = 2880, 36, 128
    found = lab08_large_models.parameters_of(GPT_OSS_120B)
    assert found["experts"] == layers * experts * 3 * width * width
    assert found["words"] == 2 * 201088 * width
    assert found["layers"] == layers * 2 * width * (64 + 8) * 64


def test_published_checkpoints_have_the_size_that_is_worked_out():
    """OpenAI's files hold 65.25 GB (120b) and 13.76 GB (20b)."""
    for size, gb in ((GPT_OSS_120B, 65.25), (GPT_OSS["full"], 13.76)):
        assert sum(
            lab08_large_models.weight_gb(
                size, WAYS_TO_HOLD["as published: experts in MXFP4"]
            ).values()
        ) == pytest.approx(gb, abs=0.01)


def test_thirty_gb_are_not_four_bits():
    assert sum(
        lab08_large_models.weight_gb(GPT_OSS_120B, WAYS_TO_HOLD["4 bits for everything"]).values()
    ) == pytest.approx(116.829156672 / 2)


# Memory


def test_memory_grows_with_texts_but_for_weights():
    few, many = (
        lab08_large_models.memory_gb(QWEN3["small"], METHODS["LoRA"], texts) for texts in (2, 8)
    )
    assert many["weights"] == few["weights"]
    assert many["adapters"] == few["adapters"]
    assert many["activations"] == pytest.approx(4 * few["activations"])
    assert many["logits"] == pytest.approx(4 * few["logits"])


def test_a_blocks_memory_contains_what_its_shapes_demand():
    """A block of Qwen3-32B keeps, a token, at least its MLP's two inputs to the product and the
    product, in BF16.
    """
    kept, trained = lab08_large_models._block(QWEN3_32B, Method(16.0))
    assert 3 * 2 * QWEN3_32B.inner < kept < 20 * 2 * QWEN3_32B.inner
    assert 64 * trained == 67_108_864


@pytest.mark.parametrize("method", ["LoRA", "QLoRA, not checkpointed", "unsloth"])
@pytest.mark.parametrize("size", [QWEN3["tiny"], GPT_OSS["tiny"]], ids=["qwen3", "gpt-oss"])
def test_a_block_keeps_what_a_real_one_keeps_under_autocast(size, method):
    rows, length = 2, 256
    counted, trained = lab08_large_models._block(size, METHODS[method])
    lm, forward = lab08_large_models.one_block(
        size, METHODS[method], torch.device("cpu"), rows, length
    )
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_for_backward(lm, forward)
    assert counted == pytest.approx(kept / (rows * length), rel=0.1)
    assert trained > 0


def test_every_saving_saves():
    size = QWEN3_32B
    whole = {
        name: sum(lab08_large_models.memory_gb(size, method, 4).values())
        for name, method in METHODS.items()
    }
    assert whole["LoRA"] > whole["LoRA, checkpointed"] > whole["QLoRA"] > whole["unsloth"]
    assert whole["QLoRA, not checkpointed"] > whole["QLoRA"]


def test_memory_is_judged_by_what_a_card_holds():
    for printed, name in (("96 GB", BLACKWELL), ("80 GB", H100)):
        assert a3.FULL[printed] == round(lab08_large_models.card(name).capacity_gb)
        assert f"{lab08_large_models.card(name).memory_gb:g} GB" == printed


def test_what_the_model_of_memory_leaves_out_is_as_much_as_the_lab_says():
    one_blocks_experts = (
        lab08_large_models.parameters_of(GPT_OSS_120B)["experts"] / GPT_OSS_120B.layers
    )
    assert 2 * one_blocks_experts / 1e9 == pytest.approx(6.4, abs=0.05)
    assert 2 * 32 * GPT_OSS_120B.heads * lab08_large_models.LONGEST**2 / 1e9 == pytest.approx(
        17.2, abs=0.05
    )


def test_memory_of_the_claims():
    found = lab08_large_models.memory_metrics()
    assert set(found) == {*lab08_large_models.ASKED, "lora_120b_batch_1_gb"}
    assert found["lora_120b_batch_1_gb"] == pytest.approx(2 * 116.829, abs=0.01)
    assert 62 < found["unsloth_120b_batch_32_gb"] < 110


# The two cards


def test_dense_models_are_the_peaks_ratio_apart_and_waiting_ones_the_batches():
    found = lab08_large_models.two_cards(BASES)
    assert found["h100_dense_long"] == found["dense_long_ratio"] == pytest.approx(989.4 / 438.9)
    assert found["h100_moe_short"] == pytest.approx(1)
    assert found["h100_moe_long"] == pytest.approx(
        0.5
    )  # 16 texts against 32, and both wait for the host
    assert found["moe_long_blackwell_ratio"] == pytest.approx(2)
    assert (found["h100_gaps_longer"], found["blackwell_less_energy"]) == (1, 1)


def test_two_models_are_compared_where_their_kernels_were_measured():
    program = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)
    traced = {
        family: replace(basis, program=program, host=Host(1e-6)) for family, basis in BASES.items()
    }
    assert lab08_large_models.two_cards(traced)["moe_over_dense_long"] > 1
    assert "moe_over_dense_long" not in lab08_large_models.two_cards({"moe": traced["moe"]})
    assert "moe_over_dense_long" not in lab08_large_models.two_cards(BASES)


@pytest.mark.parametrize("family", BASES)
def test_one_family_tells_what_it_can(family):
    both, one = (
        lab08_large_models.two_cards(BASES),
        lab08_large_models.two_cards({family: BASES[family]}),
    )
    assert one.items() < both.items()
    assert f"h100_{family}_long" in one
    assert len(lab08_large_models.two_cards_rows({family: BASES[family]})) == 4


def test_with_a_host_that_takes_no_time_the_h100_wins_everything():
    found = lab08_large_models.two_cards(
        {family: replace(basis, host_ms=1e-9) for family, basis in BASES.items()}
    )
    assert all(
        found[f"h100_{family}_{kind}"] > 1.5
        for family in ("dense", "moe")
        for kind in ("short", "long")
    )
    assert (found["h100_gaps_longer"], found["blackwell_less_energy"]) == (0, 0)


def test_the_tie_is_one():
    factor = lab08_large_models.host_for_a_tie(BASES)
    at_the_tie = {"moe": BASES["moe"].beside(factor)}
    rates = [
        lab08_large_models.hourly(name, "moe", "long", at_the_tie["moe"])
        for name in (BLACKWELL, H100)
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-3)
    assert (
        lab08_large_models.host_for_a_tie(BASES, same_batch=True) is None
    )  # the same host, the same batch: a tie at worst


def test_the_conclusion_is_the_numbers_own():
    slow = " ".join(lab08_large_models.who_wins(BASES))
    assert slow.count("the host decides") == 2
    assert "names the same winner" in slow
    assert (
        "With both cards at batch 32 the Blackwell card doesn't win, however slow the host is."
        in slow
    )
    quick = " ".join(
        lab08_large_models.who_wins(
            {family: replace(basis, host_ms=1e-5) for family, basis in BASES.items()}
        )
    )
    assert quick.count("kernels decide") == 2
    assert "does not reproduce the article" in quick
    assert f"more than {lab08_large_models.host_for_a_tie(BASES) * 20:.1f} µs" in slow
    assert (
        f"more than {lab08_large_models.host_for_a_tie(BASES) * 20:.1f} µs" in quick
    )  # the tie doesn't hang on the host here


def test_a_traced_step_is_replayed_at_the_large_models_size():
    """Long enough kernels hide every launch; then the step takes what they take."""
    program = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)
    slow = Basis(LAW, 1e-6, reached=0.5, launches=2.0, program=program, host=Host(1e-6))
    step = lab08_large_models.large_step(H100, "moe", "long", slow)
    assert step["step_ms"] == pytest.approx(step["kernels_ms"], rel=1e-3)
    assert step["launches"] == pytest.approx(1.5 * 2 * LAW.launches(36, 128))
    waiting = lab08_large_models.large_step(H100, "moe", "long", slow.beside(1e6))
    assert waiting["step_ms"] == pytest.approx(waiting["launches"] * 1.0, rel=1e-2)


def test_flops_of_a_large_step_are_three_passes_of_the_numbers_a_token_meets():
    """4 FLOPs a parameter and token for a frozen model, half as many again for what is computed
    twice; padding too.
    """
    step = lab08_large_models.bulk("dense", "long", 32, BASES["dense"])
    assert step.flops == pytest.approx(1.5 * 4 * 32.0e9 * 32 * 2045, rel=0.1)
    assert step.flops > 1.5 * 4 * 32.0e9 * 32 * 2045
    assert step.examples == 32


def test_rows_stand_beside_the_articles_counts():
    rows = lab08_large_models.two_cards_rows(BASES)
    assert [row[-1] for row in rows] == [11000, 27000, 3600, 9200, 9400, 9200, 7300, 5200]
    assert [row[2] for row in rows] == [32] * 7 + [16]
    assert [row[3] for row in rows] == pytest.approx(
        [351, 351, 2045, 2045, 351, 351, 2045, 2014], rel=0.01
    )
    assert all(len(row) == len(lab08_large_models.TWO_CARDS_HEAD) for row in rows)


# Four cards


def seen_on_an_h200():
    """A step that was traced on an H200: 100 products of 1 ms, and a host that takes 0.2 ms for
    each.
    """
    program = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)
    metrics = {"step_ms": 104.0, "idle_share": 0.04, "power_w": 500.0}
    run = Run("", "moe long", recipe={"precision": "bf16"}, metrics=metrics)
    return Seen(run, program, Host(0.2), Work(flops=1e15, bytes=1e9, examples=4))


def test_a_step_on_four_cards_and_as_it_was_measured():
    prices = Prices({BLACKWELL: 1.6e6, H100: 4.7e6})
    rows = lab08_large_models.four_cards_rows(
        seen_on_an_h200(), lab08_large_models.card("H200 SXM"), 0.0, prices
    )
    ms = {name.removesuffix(" (PCIe's price)"): step_ms for _, name, step_ms, *_ in rows}
    assert {name: ms[name] for name in lab08_large_models.CARDS} == lab08_large_models.on_cards(
        seen_on_an_h200(), lab08_large_models.card("H200 SXM"), 0.0
    )
    assert ms[H100] == pytest.approx(100)
    assert ms[BLACKWELL] == pytest.approx(100 * 989.4 / 438.9)
    assert ms["B200"] == pytest.approx(100 * 989.4 / 2250, rel=1e-3)
    assert (
        ms["H200 SXM, measured, at the power drawn"]
        == ms["H200 SXM, measured, at its largest power"]
        == 104
    )
    assert all(len(row) == len(lab08_large_models.FOUR_HEAD) for row in rows)
    priced = [row[1] for row in rows if row[-1] is not None]
    assert priced == [f"{H100} (PCIe's price)", BLACKWELL]
    assert rows[-1][4] == pytest.approx(4 * 3.6e6 / 104)
    assert rows[-1][6] == pytest.approx(4 * 3.6e6 / 104 / 0.5)
    assert rows[-2][6] == pytest.approx(4 * 3.6e6 / 104 / 0.7)


def test_cards_are_told_from_what_is_on_record():
    """What a reader without a GPU sees: the steps that the reference's run predicts, at the
    reader's own prices.
    """
    prices = Prices({BLACKWELL: 1.6e6, H100: 4.7e6})
    seen, here = seen_on_an_h200(), lab08_large_models.card("H200 SXM")
    kept = {
        f"moe long, captured: {name}, ms": ms
        for name, ms in lab08_large_models.on_cards(seen, here, 0.0).items()
    }
    runs = {"four cards": Run("08", "four cards", metrics=kept)}
    assert lab08_large_models.recorded_rows(runs) == [("moe long, captured", *kept.values())]
    measured = lab08_large_models.four_cards_rows(seen, here, 0.0, prices)[
        : len(lab08_large_models.CARDS)
    ]
    rows = lab08_large_models.recorded_worth(runs, ("dense long", "moe long, captured"), 4, prices)
    assert [(row[1:3], row[4:]) for row in rows] == [(row[1:3], row[4:]) for row in measured]
    assert (
        lab08_large_models.recorded_rows({})
        == lab08_large_models.recorded_worth({}, ("moe long",), 4, prices)
        == []
    )


def test_what_a_yen_pays_for_is_said():
    told = Prices({H100: 4.7e6}, yen_per_kwh=30, years=2, hours_a_day=24).told()
    assert "2 years of 24 hours a day" in told
    assert "the machine around the card is not counted" in told
    assert f"{H100} 4,700,000" in told


def test_cards_beside_ever_slower_hosts_end_in_a_tie():
    curves = lab08_large_models.beside_slower_hosts(
        seen_on_an_h200(), lab08_large_models.card("H200 SXM"), 0.0, most_us=5000
    )
    first, last = ({name: curve[us] for name, curve in curves.items()} for us in (0.0, 5000.0))
    assert first == lab08_large_models.on_cards(
        seen_on_an_h200(), lab08_large_models.card("H200 SXM"), 0.0
    )
    assert all(ms == pytest.approx(520) for ms in last.values())


def test_peft_finds_attention_alone():
    assert lab08_large_models.attention_only() == {
        "attention_only": 1,
        "adapted": ["k_proj", "o_proj", "q_proj", "v_proj"],
    }
