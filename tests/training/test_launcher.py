"""Ranks that are launched: what is measured comes back, and what became of one that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from ranks_at_work import SD
from recipes_at_work import one_thread

from labutils.recipe import Unavailable
from labutils.training import Trainer, distributed, launcher
from labutils.training.checkpoint import FILE
from labutils.training.launch_worker import RankStatus, Task, Timed
from labutils.training.launcher import Ended, launch
from labutils.workloads import open_workload

DYING = SD.but(
    cache="nothing",
    num_workers=1,
    persistent_workers=True,
    adapter="plain",
    optimizer="adamw-fused",
)
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses of one process that nothing happens to."""
    with Trainer(open_workload("sd15-lora", "tiny", device="cpu"), DYING) as trainer:
        trainer.run(STEPS)
        trainer.driver.log.flush()
        return list(trainer.losses)


def train_until(fail: str, step: int, folder: Path, resume: bool = False, **changes) -> Ended:
    workload = open_workload("sd15-lora", "tiny", device="cpu").opened_as()
    recipe = DYING.but(**changes).as_dict()
    options = {"folder": str(folder), "checkpoint_every": 2, "fail": fail, "fails": (1, step)}
    task = Task("run", "train", workload, recipe, steps=STEPS, resume=resume, **options)
    return launch([task], 2, "cpu", 200)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def killed(checkpoints) -> Ended:
    return train_until("kill", 3, checkpoints, parallel="fsdp")


@pytest.fixture(scope="module")
def raised(checkpoints, killed) -> Ended:
    """On from the other's checkpoint, which FSDP wrote, with DDP, and down again."""
    return train_until("raise", 5, checkpoints, resume=True)


def test_a_rank_that_is_killed_is_named_with_its_step(killed):
    assert killed.first == 1 and killed.checkpoint_step == 2 and not killed.runs
    first, *others = killed.message.splitlines()
    assert first.startswith("Rank 1 was killed by SIGKILL in optimizer step 4 of *train*")
    assert any(line.startswith("Rank 0") for line in others)


def test_nobody_waits_for_a_rank_that_is_gone_and_nothing_of_it_stays(killed):
    """Its DataLoader worker outlives it by some seconds, and nobody has told it to end."""
    running = [psutil.Process(pid) for pid in killed.left if psutil.pid_exists(pid)]
    running += psutil.Process().children(recursive=True)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in running)


def test_a_rank_that_raises_is_the_first_and_says_what(raised):
    assert raised.first == 1 and raised.checkpoint_step == 4
    assert raised.message.startswith("Rank 1 failed in optimizer step 6 of *train*: RuntimeError")
    assert "provoked" in raised.message and "provoked" in raised.log
    with pytest.raises(RuntimeError, match="provoked"):
        raised.or_raise()


def test_one_process_goes_on_where_the_ranks_broke_off(raised, checkpoints, undisturbed):
    """The first half was FSDP's, the next step DDP's, and the last are nobody's but this one's."""
    workload = open_workload("sd15-lora", "tiny", device="cpu")
    with Trainer(workload, DYING, checkpoints, resume=True) as trainer:
        assert trainer.step_count == 4
        trainer.run(STEPS)
        trainer.driver.log.flush()
        assert trainer.losses == pytest.approx(undisturbed[4:], rel=1e-4)
    assert [path.name for path in checkpoints.glob(f"{FILE}*")] == [FILE]


def test_what_is_measured_comes_back_run_by_run():
    workload = open_workload("sd15-lora", "tiny", device="cpu").opened_as()
    told = []
    alone = SD.but(accumulation=1).as_dict()
    timed = [Timed("one", "one", alone), Timed("apart", "each", alone)]
    timed += [Timed("two", "all", SD.as_dict(), {"ranks": 2})]
    options = {"timed": [asdict(each) for each in timed], "steps": 1, "warmup": 0, "traced": 1}
    tasks = [
        Task("all-reduce", "link", sizes=(1024, 4096)),
        Task("train", "in turns", workload, **options),
        Task("run", "whole", workload, SD.as_dict(), steps=1, alone=True),
    ]
    ended = launch(tasks, 2, "cpu", 200, each=told.append).or_raise()
    names = ["link", "one", "apart", "two", "one again", "whole"]
    assert [run.run for run in told] == list(ended.runs) == names
    assert len(ended.runs["link"].samples["all_reduce_ms"]) == 2
    one, apart, two, again = (ended.runs[name] for name in names[1:5])
    assert one.metrics["ranks"] == apart.metrics["ranks"] == 1 and two.metrics["ranks"] == 2
    assert two.tags == {"ranks": 2} and again.tags == {"again": True}
    assert one.samples["lead_ms"][-1] == 0 and one.comparison == two.comparison
    assert set(two.samples["round"]) == set(apart.samples["round"]) == {0, 1}
    assert 0 <= two.metrics["communication_share"] <= 1
    assert ended.first is None


def test_a_launch_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ranks=0"):
        launch([], 0, "cpu")
    with pytest.raises(Unavailable, match="99 GPUs"):
        launch([], 99, "cuda")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"environment": {"PYTHONHOME": "/nowhere"}}, "Rank 0 ended with code 1 at start"),
        ({"timeout_s": 0.5}, "not ended after 0 s"),
    ],
)
def test_ranks_that_cannot_be_started_or_hang_are_stopped(options, told):
    ended = launch([], 2, "cpu", **options)
    assert told in ended.message
    assert all(child.status() == "zombie" for child in psutil.Process().children(recursive=True))


def test_ranks_that_start_while_the_launch_is_ended_are_ended(monkeypatch):
    def start(ranks, folder, variables):
        time.sleep(1.5)  # elastic is being imported, say
        asleep = [sys.executable, "-c", "import time; time.sleep(30)"]
        subprocess.run(asleep, env=os.environ | variables, check=False)
        return {}

    monkeypatch.setattr(launcher, "_start", start)
    began = time.monotonic()
    assert len(launch([], 1, "cpu", timeout_s=0).left) == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("codes", "first"),
    [({0: 1, 1: 1}, 1), ({0: -9, 1: 1}, 0), ({0: -15, 1: 1}, 1)],
)
def test_who_failed_first_is_whom_the_others_lost(codes, first, tmp_path):
    """Rank 1 raises, then rank 0; one that was killed was the first in any case."""
    for rank in (1, 0):
        RankStatus(rank).write(tmp_path, error="Lost: no answer")
    message, rank = launcher._account(tmp_path, 2, codes, "")
    assert rank == first and message.startswith(f"Rank {first} failed at start: Lost")


def test_a_rank_without_a_gpu_says_what_to_type(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unavailable, match="--nproc-per-node=1"):
        distributed.join()
