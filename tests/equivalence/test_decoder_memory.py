"""The memory of decoders on paper: published numbers, and PyTorch's own counts."""

from __future__ import annotations

import pytest
import torch

from labutils.layers.lora import count_parameters
from labutils.profiling.memory_model import saved_for_backward
from labutils.workloads.causal_lm import GPT_OSS, GPT_OSS_120B, QWEN3, QWEN3_32B, build_lm
from labutils.workloads.decoder_memory import one_block, weight_gb


@pytest.mark.parametrize("size", [GPT_OSS_120B, QWEN3_32B, GPT_OSS["tiny"], QWEN3["small"]])
def test_every_parameter_has_its_part(size):
    whole = count_parameters(build_lm(size, torch.device("meta"), torch.bfloat16))
    assert weight_gb(size, 8, 8) * 1e9 == pytest.approx(whole)


@pytest.mark.parametrize(("wide", "adapter"), [(False, "peft"), (True, "peft"), (False, "plain")])
@pytest.mark.parametrize("size", [QWEN3["tiny"], GPT_OSS["tiny"]], ids=["qwen3", "gpt-oss"])
def test_a_block_keeps_what_a_real_one_keeps_under_autocast(size, wide, adapter):
    rows, length, kept = 2, 256, []
    for device in ("meta", "cpu"):
        lm, forward = one_block(size, wide, torch.device(device), rows, length, adapter)
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(saved_for_backward(lm, forward, autocast=torch.bfloat16))
    assert kept[0] == pytest.approx(kept[1], rel=0.1)
