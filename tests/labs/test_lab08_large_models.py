"""Lab 08's arithmetic: published numbers, formulas written out, and PyTorch's own counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labutils.labs import lab08_large_models as large
from labutils.labs.lab08_large_models import BLACKWELL, H100, METHODS, PARTS, Basis
from labutils.layers.lora import count_parameters
from labutils.profiling.memory_model import saved_for_backward
from labutils.profiling.step_model import Host, Launch, Law, Program
from labutils.results import claims
from labutils.workloads.causal_lm import GPT_OSS, GPT_OSS_120B, QWEN3, QWEN3_32B, build_lm

LAW = Law(50, 300, 50)
BASES = {"dense": Basis(Law(50, 370), Host(0.01)), "moe": Basis(LAW, Host(0.02))}
PROGRAM = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)


@pytest.mark.parametrize("size", [GPT_OSS_120B, QWEN3_32B, GPT_OSS["tiny"], QWEN3["small"]])
def test_every_parameter_has_its_part(size):
    whole = count_parameters(build_lm(size, torch.device("meta"), torch.bfloat16))
    assert sum(large.parameters_of(size).values()) == whole


def test_published_checkpoints_have_the_size_that_is_worked_out():
    """OpenAI's files hold 65.25 GB (120b) and 13.76 GB (20b); 4 bits for all would be 58.4."""
    as_published = dict.fromkeys(PARTS, 16.0) | {"experts": 4 + 8 / 32}
    four_bit = dict.fromkeys(PARTS, 4.0)
    for size, bits, gb in (
        (GPT_OSS_120B, as_published, 65.25),
        (GPT_OSS["full"], as_published, 13.76),
        (GPT_OSS_120B, four_bit, 58.41),
    ):
        assert sum(large.weight_gb(size, bits).values()) == pytest.approx(gb, abs=0.01)


@pytest.mark.parametrize("method", ["LoRA", "QLoRA, not checkpointed", "unsloth"])
@pytest.mark.parametrize("size", [QWEN3["tiny"], GPT_OSS["tiny"]], ids=["qwen3", "gpt-oss"])
def test_a_block_keeps_what_a_real_one_keeps_under_autocast(size, method):
    rows, length, kept = 2, 256, []
    for device in ("meta", "cpu"):
        lm, forward = large.one_block(size, METHODS[method], torch.device(device), rows, length)
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(saved_for_backward(lm, forward, autocast=torch.bfloat16))
    assert kept[0] == pytest.approx(kept[1], rel=0.1)


# The two cards


def test_dense_models_are_the_peaks_ratio_apart_and_waiting_ones_the_batches():
    two = large.two_cards(BASES)
    assert two["h100_dense_long"] == two["dense_long_ratio"] == pytest.approx(989.4 / 438.9)
    assert two["h100_moe_short"] == pytest.approx(1)
    assert two["h100_moe_long"] == pytest.approx(0.5)  # 16 texts against 32
    assert two["moe_long_blackwell_ratio"] == pytest.approx(2)
    assert (two["h100_gaps_longer"], two["blackwell_less_energy"]) == (1, 1)


def test_with_a_host_that_takes_no_time_the_h100_wins_everything():
    two = large.two_cards({family: replace(b, host=Host(1e-9)) for family, b in BASES.items()})
    assert min(two[f"h100_{f}_{k}"] for f in BASES for k in ("short", "long")) > 1.5
    assert (two["h100_gaps_longer"], two["blackwell_less_energy"]) == (0, 0)


def test_the_tie_is_one():
    factor = large.host_for_a_tie(BASES["moe"])
    moe = Basis(LAW, Host(0.02 * factor))
    rates = [large.large_step(name, "moe", "long", moe)["hourly"] for name in (BLACKWELL, H100)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-2)
    # The same host and the same batch: a tie at worst.
    assert large.host_for_a_tie(BASES["moe"], texts=32) is None


def test_a_traced_step_is_replayed_at_the_large_models_size():
    slow = Basis(LAW, Host(1e-6), reached=0.5, launches=2.0, program=PROGRAM)
    step = large.large_step(H100, "moe", "long", slow)
    assert step["step_ms"] == pytest.approx(step["kernels_ms"], rel=1e-3)
    waiting = large.large_step(H100, "moe", "long", replace(slow, host=Host(1)))
    assert waiting["step_ms"] == pytest.approx(1.5 * 2 * LAW.launches(36, 128), rel=1e-2)


def test_flops_of_a_large_step_are_three_passes_of_the_numbers_a_token_meets():
    """4 FLOPs a parameter and token for a frozen model, half as many again for recomputing."""
    step = large.bulk("dense", "long", 32, BASES["dense"])
    least = 1.5 * 4 * 32.0e9 * 32 * 2045
    assert least < step.flops < 1.1 * least and step.examples == 32


def test_the_bounds_of_the_claims_are_the_dense_peaks():
    flops = large.bulk("dense", "long", 32, BASES["dense"]).flops
    bounds = [
        32 * 3600 * large.card(name).dense["bf16"] * 1e12 / flops for name in (BLACKWELL, H100)
    ]
    assert claims.claim("A3.32b.h100-long").how["fastest"] == pytest.approx(bounds, rel=1e-3)
