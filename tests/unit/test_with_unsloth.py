"""unsloth in its process: what it is asked and answers, and why it isn't asked. A stand-in takes its place."""

from __future__ import annotations

import os

import pytest

from labutils.data.texts import LONGEST
from labutils.recipe import A3_BASE
from labutils.results import Unavailable
from labutils.training import with_unsloth
from labutils.training.with_unsloth import Job, check_unsloth, train_with_unsloth
from labutils.workloads import open_workload

STAND_IN = f"""
import sys
assert "transformers" not in sys.modules

class FastLanguageModel:
    loaded = 0

    def from_pretrained(model, max_seq_length, load_in_4bit, fix_tokenizer):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        assert max_seq_length == {LONGEST} and load_in_4bit
        FastLanguageModel.loaded += 1
        assert FastLanguageModel.loaded == 1
        return AutoModelForCausalLM.from_pretrained(model).float(), AutoTokenizer.from_pretrained(model)

    def get_peft_model(lm, r, lora_alpha, target_modules, use_gradient_checkpointing, **_):
        from peft import LoraConfig, get_peft_model
        assert use_gradient_checkpointing == "unsloth"
        return get_peft_model(lm, LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules))

    def for_training(lm):
        lm.train()
"""


@pytest.fixture(scope="module")
def workload():
    return open_workload("qwen3-lora-short", scale="tiny", device="cpu")


def test_jobs_are_done_by_one_process_with_the_same_weights(workload, tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path), str(with_unsloth.REPOSITORY)])
    monkeypatch.setattr(with_unsloth, "QUIET", with_unsloth.QUIET | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(with_unsloth, "check_unsloth", lambda device: None)
    recipe = A3_BASE.but(base_linear="nf4")
    jobs = {"a": Job(workload, recipe, 2), "b": Job(workload, recipe.but(micro_batch=1), 2)}
    runs = train_with_unsloth(jobs, tmp_path, every=2)
    assert [(name, run.run, run.status) for name, run in runs.items()] == [("a", "a", "ok"), ("b", "b", "ok")]
    assert "first_step_s" in runs["a"].metrics and "first_step_s" not in runs["b"].metrics
    assert runs["a"].metrics["loss"][0] == pytest.approx(6.93, abs=0.3)
    assert (tmp_path / "a.csv").exists()


def test_a_dead_process_is_said(workload, tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text("raise SystemExit('no kernel for this GPU')")
    path = os.pathsep.join([str(tmp_path), str(with_unsloth.REPOSITORY)])
    monkeypatch.setattr(with_unsloth, "QUIET", with_unsloth.QUIET | {"PYTHONPATH": path})
    monkeypatch.setattr(with_unsloth, "check_unsloth", lambda device: None)
    with pytest.raises(RuntimeError, match="ended with code 1: no kernel for this GPU"):
        train_with_unsloth({"a": Job(workload, A3_BASE, 2)}, tmp_path)


def test_it_is_not_asked_where_it_cant_run(workload, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="kernels are written for GPUs"):
        train_with_unsloth({"a": Job(workload, A3_BASE, 2)}, tmp_path)
    monkeypatch.setattr(with_unsloth.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="make unsloth"):
        check_unsloth("cuda")
