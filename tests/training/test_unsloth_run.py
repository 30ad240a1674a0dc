"""unsloth in its process, by a stand-in: what was done before the child's end is kept."""

from labutils.labs.lab07_qlora import UNSLOTH
from labutils.training import unsloth_run
from labutils.training.unsloth_run import Job
from labutils.workloads import open_workload

STAND_IN = """
import os, sys
assert "transformers" not in sys.modules
assert os.environ["TRITON_CACHE_DIR"] == os.environ["TMPDIR"] == os.getcwd()
assert os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.getcwd()).startswith(os.getcwd())
turns = ["first", "second"]
class FastLanguageModel:
    def for_training(lm):
        turns.pop() if turns else sys.exit("out of patience")
"""


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).float()


def test_what_was_done_before_the_childs_end_is_kept(tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/parents")
    monkeypatch.setattr(unsloth_run, "check_unsloth", lambda device: None)
    workload = open_workload("qwen3-lora-short", scale="tiny", device="cpu")
    jobs = {name: Job(workload, recipe, 1, 1, 1, {}) for name, (_, recipe, _) in UNSLOTH.items()}
    done = []
    runs = unsloth_run.train_with_unsloth(jobs, load, tmp_path, lambda: done.append(1))
    assert done == [1] and (tmp_path / "unsloth.txt").exists()
    *kept, left = runs.values()
    assert all(run.ok for run in kept) and left.status.endswith("out of patience")
    assert ["first_step_s" in run.metrics for run in kept] == [True, False]
