"""Killed and resumed, a run ends where an unbroken one does; what it saves is whole, checked, and
loads elsewhere.
"""

from __future__ import annotations

import copy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interrupted_runs import CASES, EAGER, STEPS, WHILE_SAVING, Case, final, opened
from recipes_at_work import adapter_state, copied
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from labutils.labs.ladders import A2_BASE
from labutils.training import Trainer
from labutils.training.checkpoint import FILE
from labutils.training.loss_log import NotFinite
from labutils.workloads import open_workload

QUICK = EAGER.but(cache="latents+text")


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder for every case, as a process that was killed left it."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, Path(__file__).parent / "interrupted_runs.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == [str(int(signal.SIGKILL))] * (len(CASES) + 1), done.stderr
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_where_an_unbroken_one_does(name, killed, tmp_path):
    """Weights, moments and losses are the same to the last bit, and the log goes on counting."""
    resumed = final(CASES[name], killed / name, resume=True)
    unbroken = final(CASES[name], tmp_path, resume=False)
    assert resumed["step"] == unbroken["step"] == STEPS
    assert all(map(torch.equal, resumed["weights"], unbroken["weights"]))
    assert all(map(torch.equal, resumed["moments"], unbroken["moments"]))
    assert resumed["losses"] == unbroken["losses"][CASES[name].saved :]
    assert len(set(unbroken["losses"])) == STEPS
    events = {}
    for file in (killed / name).rglob("events.out.tfevents.*"):
        for event in EventAccumulator(str(file)).Reload().Scalars("train_loss"):
            events[event.step] = event.value
    logged = [events[step + 1] for step in range(CASES[name].saved, STEPS)]
    assert logged == pytest.approx(resumed["losses"])


def test_a_save_that_is_killed_leaves_the_last_one(killed):
    folder = killed / WHILE_SAVING
    assert len(list(folder.glob(f"{FILE}*"))) == 2  # the good one, and what was being written
    with opened(Case(EAGER), folder, resume=True) as trainer:
        assert trainer.step_count == Case(EAGER).saved
        trainer.save()
    assert [path.name for path in folder.glob(f"{FILE}*")] == [FILE]  # written over


# -------------------------------------------------------------------------------------------------
# What is refused


@pytest.fixture(scope="module")
def workload():
    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    with Trainer(workload, QUICK) as trainer:  # encode the examples once for all tests
        examples = trainer.dataset
    workload.dataset = lambda model, recipe: examples
    return workload


@pytest.fixture(scope="module")
def saved(workload, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Trainer(workload, QUICK, folder) as trainer:
        trainer.run(1)
        trainer.save()
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    shutil.copy(saved / FILE, tmp_path)
    return tmp_path


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(torch.load(path)["parameters"][0].numpy().tobytes())] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
def test_a_damaged_checkpoint_is_refused(damage, workload, folder):
    damage(folder / FILE)
    with pytest.raises(ValueError, match="is damaged"):
        Trainer(workload, QUICK, folder, resume=True)


@pytest.mark.parametrize("change", [{"seed": 1}, {"adapter": "folded"}, {"accumulation": 2}])
def test_another_recipes_checkpoint_is_refused_by_the_knobs_name(change, workload, folder):
    with pytest.raises(ValueError, match=f"{[*change][0]}="):
        Trainer(workload, QUICK.but(**change), folder, resume=True)


def test_another_workloads_checkpoint_is_refused_before_anything_changes(workload, folder):
    with Trainer(workload, QUICK) as trainer:
        before = copied(adapter_state(trainer.model.unet))
        state = trainer.state_dict()
        state["parameters"] = [p + 1 for p in state["parameters"]]
        for change in ({"workload": ["other", "tiny"]}, {"recipe": state["recipe"] | {"rank": 3}}):
            with pytest.raises(ValueError, match="was written with"):
                trainer.load_state_dict(state | change)
        with pytest.raises(ValueError, match="fit"):
            trainer.load_state_dict(state | {"parameters": [p[:1] for p in state["parameters"]]})
        after = adapter_state(trainer.model.unet)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_knobs_of_speed_may_change(workload, folder):
    """Whoever drives, it is the same training: the resumed steps have the same losses."""
    with Trainer(workload, QUICK, folder, resume=True) as trainer:
        assert (trainer.step_count, trainer.batches.taken) == (1, 4)
        trainer.run(3)
    faster = QUICK.but(logging="ring-buffer", num_workers=1, memory_format="channels_last")
    with Trainer(workload, faster.but(driver="accelerate"), folder, resume=True) as other:
        other.run(3)
    assert other.losses == pytest.approx(trainer.losses, rel=1e-4)


def test_there_is_nothing_to_resume_in_an_empty_folder(workload, tmp_path):
    with pytest.raises(FileNotFoundError, match="resume"):
        Trainer(workload, QUICK, tmp_path, resume=True)


def test_weights_that_went_wrong_do_not_replace_good_ones(workload, folder):
    good = (folder / FILE).read_bytes()
    with (
        pytest.raises(NotFinite, match="step 2"),
        Trainer(workload, QUICK.but(logging="ring-buffer"), folder, resume=True) as trainer,
    ):
        next(iter(adapter_state(trainer.model.unet).values()))[0, 0] = float("nan")
        trainer.run(4, checkpoint_every=1)
    assert (folder / FILE).read_bytes() == good


# -------------------------------------------------------------------------------------------------
# A model that reads images and text


PACKED = {"shapes": "packed", "token_budget": 8192, "micro_batch": 1, "loss": "answers"}


def test_a_resumed_llava_run_ends_where_an_unbroken_one_does(tmp_path):
    varied = open_workload("llava-lora-varied", scale="tiny", device="cpu")
    always = {"layers": "rewritten", "learning_rate": 1e-2, "micro_batch": 2, "num_workers": 1}
    recipe = A2_BASE.but(**always | PACKED)
    with Trainer(varied, recipe, tmp_path) as trainer:
        trainer.run(2)
        trainer.save()
        trainer.run(4)
        whole, losses = copy.deepcopy(adapter_state(trainer.model.network)), trainer.losses
    with Trainer(varied, recipe, tmp_path, resume=True) as trainer:
        trainer.run(4)
        resumed = adapter_state(trainer.model.network)
        assert trainer.losses == losses[2:]
    assert all(torch.equal(resumed[name], matrix) for name, matrix in whole.items())
