"""Lab 07's measurements on tiny models; what its users write gives the course's own model."""

from __future__ import annotations

import tempfile

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from labutils.labs import lab07_qlora
from labutils.labs.lab07_qlora import COMPILED, METHODS, ON_A_CPU, PACKED, QLORA, UNSLOTH
from labutils.labs.ladders import A3_BASE
from labutils.profiling.trace import profile
from labutils.recipe import Unavailable
from labutils.results.records import REFERENCE, read_runs
from labutils.training import Benchmark, Trainer, unsloth_run
from labutils.training.model_edits import prepared_for_kbit
from labutils.workloads import open_workload
from labutils.workloads.decoder_workload import TARGETS

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def texts():
    return {
        length: open_workload(f"qwen3-lora-{length}", scale="tiny", device="cpu")
        for length in ("short", "long")
    }


def test_methods_are_what_is_on_record(texts):
    """A run that is made today has the tags of the one on record."""
    recorded = {frozenset(run.tags.items()) for run in read_runs(REFERENCE, "07")}
    for length, methods in METHODS.items():
        for name, (_, more) in methods.items():
            tags = {"experiment": "methods", "texts": length} | more
            assert frozenset(tags.items()) in recorded, name
    jobs = lab07_qlora.unsloth_jobs(texts)
    assert jobs.keys() == UNSLOTH.keys()
    assert all(frozenset(job.tags.items()) in recorded for job in jobs.values())


def test_the_courses_qlora_is_its_users(texts):
    """The same bytes, constants and dtypes from one checkpoint, and the same loss."""
    workload, bf16 = texts["short"], torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        workload.publish(folder)
        how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=bf16, **how)
        users = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=four_bits, dtype=bf16
        )
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=bf16)
    users = prepare_model_for_kbit_training(
        users, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    users = get_peft_model(users, LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS)))
    workload.make = lambda dtype, seed: plain.requires_grad_(False)
    course = workload.build(QLORA)
    prepared_for_kbit(course)
    del workload.make
    theirs = dict(users.base_model.model.named_parameters())
    ours = dict(course.network.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype, name
        if parameter.dtype == torch.uint8:
            restored = (
                bnb.dequantize_4bit(one.data, one.quant_state) for one in (parameter, theirs[name])
            )
            assert torch.equal(*restored), name
    ids = torch.arange(2, 34).view(2, 16)
    with torch.autocast("cpu", bf16):
        mine = course({"input_ids": ids, "labels": ids})
        torch.testing.assert_close(mine, users(input_ids=ids, labels=ids).loss, rtol=1e-3, atol=0)


def test_methods_and_rungs_are_timed_on_the_same_batches(texts, tmp_path):
    runs = lab07_qlora.methods(texts["long"], "long", tmp_path)
    assert all(run.ok for run in runs.values()), [run.status for run in runs.values()]
    assert runs["lora again"].tags["again"] and runs["lora again"].lane == runs["lora"].lane
    assert "ms_per_1k_useful_tokens" in runs["qlora"].metrics
    with Benchmark(texts["long"], same_batches=True) as bench:
        climbed = lab07_qlora.rungs(bench, PACKED | ON_A_CPU)
    assert all(run.ok for run in climbed.values()), [run.status for run in climbed.values()]
    tokens = [run.samples["tokens"] for run in climbed.values()]
    assert all(one == tokens[0] for one in tokens)


def test_the_large_models_steps_are_timed_and_traced(texts, tmp_path):
    runs = lab07_qlora.large(texts["long"], tmp_path)
    assert list(runs) == ["qlora", "lora"] and all(run.ok for run in runs.values())
    assert all(run.metrics["kernel_categories"]["GEMM"]["ms"] > 0 for run in runs.values())


def test_restoring_is_found_in_a_trace(texts, tmp_path):
    with Trainer(texts["short"], QLORA, on_model=prepared_for_kbit) as trainer:
        restored = lab07_qlora.restoring_kernels_ms(profile(trainer, 1, tmp_path))
    with Trainer(texts["short"], A3_BASE) as trainer:
        assert lab07_qlora.restoring_kernels_ms(profile(trainer, 1, tmp_path)) == 0 < restored


def test_the_rung_that_is_held_against_unsloth_has_its_rows_and_weights():
    ours, theirs = COMPILED[lab07_qlora.LIKE_FOR_LIKE], UNSLOTH["unsloth, packed"][1]
    for knob in ("shapes", "token_budget", "micro_batch", "rank", "predict", "optimizer"):
        assert getattr(ours, knob) == getattr(theirs, knob), knob
    assert (ours.base_linear, ours.checkpointing) == ("nf4-frozen", "blocks")


def test_unsloth_is_not_asked_where_it_cant_run(texts, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="kernels are written for GPUs"):
        unsloth_run.train_with_unsloth(lab07_qlora.unsloth_jobs(texts), print, tmp_path)
    monkeypatch.setattr(unsloth_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="make unsloth"):
        unsloth_run.check_unsloth("cuda")
