"""unsloth in its process: what it is asked and answers, and why it isn't asked. A stand-in takes
its place.
"""

from __future__ import annotations

import os

import pytest

from labutils.data.texts import LONGEST
from labutils.labs.lab07_qlora import SWITCHES
from labutils.labs.ladders import A3_BASE
from labutils.recipe import Unavailable
from labutils.results.records import REPOSITORY
from labutils.training import unsloth_run
from labutils.training.unsloth_run import Job, check_unsloth, train_with_unsloth
from labutils.workloads import open_workload

STAND_IN = f"""
import os, sys
assert "transformers" not in sys.modules
own = os.path.dirname(os.getcwd())
for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION"):
    folder = os.environ[variable]
    assert os.path.dirname(folder) == own and os.path.isdir(folder)
assert os.environ["UNSLOTH_MEGA_CACHE"] == "0"

class FastLanguageModel:
    loaded = 0

    def from_pretrained(model, max_seq_length, load_in_4bit, fix_tokenizer, use_exact_model_name):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        assert max_seq_length == {LONGEST} and load_in_4bit and use_exact_model_name
        FastLanguageModel.loaded += 1
        if FastLanguageModel.loaded > 1 and "STAND_IN_ENDS" in os.environ:
            sys.exit("out of patience")
        assert FastLanguageModel.loaded == 1
        tokenizer = AutoTokenizer.from_pretrained(model)
        return AutoModelForCausalLM.from_pretrained(model).float(), tokenizer

    def get_peft_model(lm, r, lora_alpha, target_modules, use_gradient_checkpointing, **_):
        from peft import LoraConfig, get_peft_model
        assert use_gradient_checkpointing == "unsloth"
        config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules)
        return get_peft_model(lm, config)

    def for_training(lm):
        lm.train()
"""


@pytest.fixture(scope="module")
def workload():
    return open_workload("qwen3-lora-short", scale="tiny", device="cpu")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    monkeypatch.setattr(
        unsloth_run, "QUIET", unsloth_run.QUIET | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    )
    monkeypatch.setattr(unsloth_run, "check_unsloth", lambda device: None)


def test_jobs_are_done_by_one_process_with_the_same_weights(workload, stand_in, tmp_path):
    recipe = A3_BASE.but(base_linear="nf4")
    jobs = {
        "a": Job(workload, recipe, 2),
        "b": Job(workload, recipe.but(**SWITCHES["packed"][1]), 2),
    }
    runs = train_with_unsloth(jobs, tmp_path, every=2)
    assert [(name, run.run, run.status) for name, run in runs.items()] == [
        ("a", "a", "ok"),
        ("b", "b", "ok"),
    ]
    assert "first_step_s" in runs["a"].metrics and "first_step_s" not in runs["b"].metrics
    assert runs["a"].metrics["loss"][0] == pytest.approx(6.93, abs=0.3)
    assert runs["a"].recipe["driver"] == "accelerate" and runs["b"].recipe["driver"] == "eager"
    assert runs["a"].metrics["useful_tokens"] < 0.9 < runs["b"].metrics["useful_tokens"]
    assert (tmp_path / "a.csv").exists()


def test_what_was_done_before_the_end_is_kept(workload, stand_in, tmp_path, monkeypatch):
    """The second job ends the process."""
    jobs = {
        name: Job(workload, A3_BASE.but(base_linear="nf4", seed=seed), 2)
        for seed, name in enumerate("ab")
    }
    monkeypatch.setenv("STAND_IN_ENDS", "1")
    runs = train_with_unsloth(jobs, tmp_path)
    assert [run.ok for run in runs.values()] == [True, False]
    assert runs["b"].status.endswith("out of patience")
    assert runs["b"].workload == workload.name and runs["b"].recipe["seed"] == 1


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_batches_of_other_lengths(workload, micro_batch):
    recipe = A3_BASE.but(micro_batch=micro_batch)
    lengths = sorted(len(row["input_ids"]) for row in workload.dataset(None, recipe))
    longest, odd, short = (
        batch["input_ids"].shape for batch in unsloth_run._of_other_lengths(workload, recipe)
    )
    assert longest == (micro_batch, lengths[-1])
    assert odd[1] % 2 == 1 and short[1] < odd[1] < longest[1]
    assert short == (micro_batch, lengths[micro_batch - 1])
    assert unsloth_run._of_other_lengths(workload, recipe.but(shapes="padded")) == []


def test_a_model_that_cannot_be_loaded_ends_the_process_once(workload, stand_in, tmp_path):
    broken = (tmp_path / "unsloth.py").read_text()
    broken = broken.replace("assert max_seq_length", 'raise OSError("no such layer") #')
    (tmp_path / "unsloth.py").write_text(broken)
    jobs = {name: Job(workload, A3_BASE.but(base_linear="nf4"), 2) for name in "ab"}
    with pytest.raises(RuntimeError, match="no such layer"):
        train_with_unsloth(jobs, tmp_path)
    assert "Traceback" in (tmp_path / unsloth_run.PRINTED).read_text()


def test_it_is_not_asked_where_it_cant_run(workload, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="kernels are written for GPUs"):
        train_with_unsloth({"a": Job(workload, A3_BASE, 2)}, tmp_path)
    monkeypatch.setattr(unsloth_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="make unsloth"):
        check_unsloth("cuda")
