"""unsloth in its process: what it is asked and answers, and why it isn't asked. A stand-in takes
its place.
"""

from __future__ import annotations

import time

import pytest

from labutils.labs.lab07_qlora import UNSLOTH
from labutils.labs.ladders import A3_BASE
from labutils.recipe import Unavailable
from labutils.training import unsloth_run
from labutils.training.unsloth_run import Job, check_unsloth, train_with_unsloth
from labutils.workloads import open_workload

STAND_IN = """
import os, sys
assert "transformers" not in sys.modules
own = os.getcwd()
assert os.environ["TRITON_CACHE_DIR"] == os.environ["TMPDIR"] == own
assert os.environ.get("TORCHINDUCTOR_CACHE_DIR", own).startswith(own)
assert os.environ["UNSLOTH_MEGA_CACHE"] == "0"

class FastLanguageModel:
    jobs = 0

    def from_pretrained(model):
        from transformers import AutoModelForCausalLM
        return AutoModelForCausalLM.from_pretrained(model).float()

    def for_training(lm):
        FastLanguageModel.jobs += 1
        if FastLanguageModel.jobs == 3:
            sys.exit("out of patience")
        lm.train()
"""


def load(folder):
    from peft import LoraConfig, get_peft_model
    from unsloth import FastLanguageModel

    model = FastLanguageModel.from_pretrained(folder)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))


@pytest.fixture(scope="module")
def workload():
    return open_workload("qwen3-lora-short", scale="tiny", device="cpu")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(unsloth_run, "check_unsloth", lambda device: None)


def test_one_process_does_the_jobs_and_what_was_done_before_its_end_is_kept(
    workload, stand_in, tmp_path
):
    recipe, packed = (UNSLOTH[name][1] for name in ("unsloth", "unsloth, packed"))
    jobs = {
        "a": Job(workload, recipe, 1, {"method": "a"}),
        "b": Job(workload, packed, 1, {"method": "b"}),
        "c": Job(workload, packed, 1, {"method": "c"}),
    }
    done = []
    runs = train_with_unsloth(jobs, load, tmp_path, meanwhile=lambda: done.append(time.time()))
    a, b, c = runs.values()
    assert len(done) == 1
    assert a.ok and b.ok and [run.tags["method"] for run in (a, b, c)] == ["a", "b", "c"]
    assert "first_step_s" in a.metrics and "first_step_s" not in b.metrics
    assert a.metrics["loss"][0] == pytest.approx(6.93, abs=0.3)
    assert (a.recipe["driver"], b.recipe["driver"]) == ("accelerate", "eager")
    assert a.metrics["useful_tokens"] < 0.9 < b.metrics["useful_tokens"]
    assert "ms_per_1k_useful_tokens" in b.metrics and (tmp_path / "unsloth.txt").exists()
    assert c.status.endswith("out of patience") and c.recipe["shapes"] == "packed"


def test_it_is_not_asked_where_it_cant_run(workload, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="kernels are written for GPUs"):
        train_with_unsloth({"a": Job(workload, A3_BASE, 2, {})}, load, tmp_path)
    monkeypatch.setattr(unsloth_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="make unsloth"):
        check_unsloth("cuda")
