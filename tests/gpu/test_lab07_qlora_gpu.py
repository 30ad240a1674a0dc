"""Lab 07's methods on a GPU: unsloth trains where it is installed."""

from __future__ import annotations

import pytest

from labutils.labs import lab07_qlora
from labutils.recipe import Unavailable
from labutils.training.unsloth_run import check_unsloth, train_with_unsloth
from labutils.workloads import open_workload


def load_with_unsloth(folder):
    from unsloth import FastLanguageModel

    local = {"fix_tokenizer": False, "use_exact_model_name": True}
    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=2048, load_in_4bit=True, **local
    )
    return FastLanguageModel.get_peft_model(
        model, r=8, lora_alpha=16, use_gradient_checkpointing="unsloth", max_seq_length=2048
    )


def test_unsloth_trains(tmp_path):
    try:
        check_unsloth("cuda")
    except Unavailable as reason:
        pytest.skip(str(reason))
    small = {
        length: open_workload(f"qwen3-lora-{length}", scale="small", device="cuda")
        for length in ("short", "long")
    }
    runs = train_with_unsloth(lab07_qlora.unsloth_jobs(small), load_with_unsloth, tmp_path)
    assert all(run.ok for run in runs.values()), [run.status for run in runs.values()]
    assert all(run.metric("peak_allocated_gb") for run in runs.values())
