"""Fixes put in place in real scripts from outside, and the lines that they would change."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from labutils.results.records import REPOSITORY, Results, read_file, read_runs, runs_of
from labutils.tools.diagnose import Fix, diagnose, trial
from labutils.tools.diagnose.edits import edits
from labutils.tools.diagnose.script import Stages, watch

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
import diagnosis_table

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
FEW = Stages(warmup=2, timed=6, profiled=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are shared with other tests
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_attention_that_is_written_out_is_named_with_its_line():
    path = str(SCRIPTS / "written_out.py")
    watched = watch([sys.executable, path, "128", "64", "2", "512"], FEW)
    fix = diagnose(replace(watched.evidence, files=(path,))).fix("attention")
    assert "written out 2 times" in fix.reason
    (edit,) = edits(fix, (path,))
    line = Path(path).read_text("utf-8").splitlines()[int(edit.place.rpartition(":")[2]) - 1]
    assert "softmax" in line and "scaled_dot_product_attention(q, k, v, is_causal=True)" in edit.now
    precision = replace(fix, name="precision", facts={"best": "bf16"}, do="with autocast(): here")
    (edit,) = edits(precision, (path,))
    assert edit.now.startswith("with autocast():\n    logits = model(") and "loss = " in edit.now


def test_a_fix_is_tried_beside_the_script_as_it_is(capfd):
    path = str(SCRIPTS / "plain_loop.py")
    command = [sys.executable, path, "--device", "cpu", "--decode-ms", "5"]
    found = diagnose(watch(command, FEW).evidence)
    capfd.readouterr()
    tried = trial.tries(found, command, FEW, rounds=1)["workers"]
    assert tried.why == "" and tried.low <= tried.measured <= tried.high
    assert tried.measured > 0.3 and tried.losses.startswith("the same")
    assert capfd.readouterr().out == ""  # what the script prints goes nowhere


def test_all_fixes_go_into_a_trainer_from_outside():
    command = [sys.executable, str(SCRIPTS / "trainer_script.py"), "--use_cpu", "--batch", "2"]
    changes = {"num_workers": 1, "persistent_workers": True, "pin_memory": False}
    changes |= {"optimizer": "adamw-fused", "attention": "sdpa", "checkpointing": "off"}
    changes |= {"precision": "bf16", "logging": "ring-buffer"}
    plain, changed = (trial.run(command, what, Stages(1, 3, 1)) for what in ({}, changes))
    assert len(changed["step_ms"]) == 3 and {*changes} - {*changed["done"]} == set()
    fix, longer = Fix("all", 0.1, "", changes=changes), [1.5 * loss for loss in changed["losses"]]
    assert trial.judged(fix, [plain], [changed]).losses.startswith("the same")
    worse = changed | {"losses": longer, "step_ms": [0.0] * 3}
    assert "CHANGES" in trial.judged(fix, [plain], [worse]).losses
    assert not trial.judged(fix, [plain], [worse]).holds


def test_the_table_of_predictions_trials_and_hand_edits(tmp_path, monkeypatch):
    """On a GPU it says how good the predictions are; here, whether it can be made."""
    scripts = yaml.safe_load((SCRIPTS / "hand_edits.yaml").read_text("utf-8"))
    for name, words in scripts.items():
        script = diagnosis_table.Script(name, words, "full", tmp_path)
        for edit in script.edits:
            path = Path(script.command(edit, workers=3)[1])
            assert compile(path.read_text("utf-8"), path, "exec") and "WORKERS" not in path.name
    ends = {"as it is": (5.0, 9.0), "as it is again": (9.0, 6.0)}
    script.runs = {end: [{"step_ms": [ms]} for ms in visits] for end, visits in ends.items()}
    assert script.drift() == 1.5  # of the last visit, which went from its end to its beginning
    words = {"script": "plain_loop.py", "tiny": "--device cpu --batch 8 --decode-ms 5"}
    words["edits"] = {"workers": {"shuffle=True": "shuffle=True, num_workers=WORKERS"}}
    monkeypatch.setitem(diagnosis_table.WATCHED_BLOCKS, "plain", (1, 8))
    script = diagnosis_table.Script("plain", words, "tiny", tmp_path)
    diagnosis_table.measure([script], Results(tmp_path), rounds=1, seconds=0)
    (fix,) = read_runs(tmp_path).select("10", what="fix")
    assert fix.ok and {"predicted", "tried", "by_hand", "again"} <= fix.metrics.keys()
    assert fix.metrics["by_hand_losses"].startswith("the same")
    assert [len(ms) for ms in read_runs(tmp_path).one(what="overhead").samples.values()] == [4, 4]
    assert "of 1 steps are within 20% of" in diagnosis_table.told(read_runs(tmp_path))


def test_the_table_in_docs_is_that_of_its_records():
    found = runs_of(read_file(REPOSITORY / "reference" / "h100" / "diagnosis.jsonl").records)
    page = (REPOSITORY / "docs" / "diagnosis.md").read_text("utf-8")
    assert diagnosis_table.told(found.of_newest_host()) in page
