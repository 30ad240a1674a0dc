"""Ranks that are launched: what is measured comes back, and what became of one that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from threading import Thread

import psutil
import pytest
import torch
from ranks_at_work import SD
from recipes_at_work import kill_rank_1

from labutils.recipe import Unavailable
from labutils.training import distributed, launcher
from labutils.training.launch_worker import RankStatus, Task, Timed
from labutils.training.launcher import Ended, launch
from labutils.workloads import open_workload

pytestmark = pytest.mark.usefixtures("single_thread")


def trained(name: str, steps: int, **changes) -> Task:
    workload = open_workload("sd15-lora", "tiny", device="cpu").opened_as()
    timed = [asdict(Timed(name, "all", SD.but(**changes).as_dict()))]
    return Task("train", name, workload, timed, steps, warmup=0)


@pytest.fixture(scope="module")
def killed() -> Ended:
    """A rank is killed in the midst of endless training, which has a DataLoader worker."""
    Thread(target=kill_rank_1, daemon=True).start()
    workers = {"cache": "nothing", "num_workers": 1, "persistent_workers": True}
    return launch([trained("endless", 10**6, **workers)], 2, "cpu", 200)


def test_a_rank_that_is_killed_is_named(killed):
    first, *others = killed.message.splitlines()
    assert first == "Rank 1 was killed by SIGKILL in *endless*." and not killed.runs
    assert any(line.startswith("Rank 0") for line in others)


def test_nobody_waits_for_a_rank_that_is_gone_and_nothing_of_it_stays(killed):
    """Its DataLoader worker outlives it by some seconds, and nobody has told it to end."""
    running = [psutil.Process(pid) for pid in killed.left if psutil.pid_exists(pid)]
    running += psutil.Process().children(recursive=True)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in running)


def test_a_rank_that_raises_says_what(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('its own words')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    raised = launch([trained("wild", 2, learning_rate=1e30, logging="synchronous")], 2, "cpu", 200)
    assert "failed in *wild*: NotFinite" in raised.message and "NotFinite" in raised.log
    assert "[rank 0] its own words" in raised.log
    with pytest.raises(RuntimeError, match="NotFinite"):
        raised.or_raise()


def test_what_is_measured_comes_back_run_by_run():
    workload = open_workload("sd15-lora", "tiny", device="cpu").opened_as()
    told = []
    alone = SD.but(accumulation=1).as_dict()
    timed = [Timed("one", "one", alone), Timed("apart", "each", alone)]
    timed += [Timed("two", "all", SD.as_dict(), {"ranks": 2})]
    options = {"timed": [asdict(each) for each in timed], "steps": 1, "warmup": 0}
    tasks = [
        Task("all-reduce", "link", sizes=(1024, 4096)),
        Task("train", "in turns", workload, **options),
    ]
    ended = launch(tasks, 2, "cpu", 200, each=told.append).or_raise()
    names = ["link", "one", "apart", "two", "one again"]
    assert [run.run for run in told] == list(ended.runs) == names
    assert len(ended.runs["link"].samples["all_reduce_ms"]) == 2
    one, apart, two, again = (ended.runs[name] for name in names[1:])
    assert one.metrics["ranks"] == apart.metrics["ranks"] == 1 and two.metrics["ranks"] == 2
    assert two.tags == {"ranks": 2} and again.tags == {"again": True}
    assert one.samples["lead_ms"][-1] == 0 and one.comparison == two.comparison
    assert set(two.samples["round"]) == set(apart.samples["round"]) == {0, 1}


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
    assert told in launch([], 2, "cpu", **options).message
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
    ("codes", "first"), [({0: 1, 1: 1}, 1), ({0: -9, 1: 1}, 0), ({0: -15, 1: 1}, 1)]
)
def test_who_failed_first_is_whom_the_others_lost(codes, first, tmp_path):
    """Rank 1 raises, then rank 0; one that was killed was the first in any case."""
    for rank in (1, 0):
        RankStatus(rank).write(tmp_path, error="Lost: no answer")
    message = launcher._account(tmp_path, 2, codes, "")
    assert message.startswith(f"Rank {first} failed at start: Lost")


def test_a_rank_without_a_gpu_says_what_to_type(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unavailable, match="--nproc-per-node=1"):
        distributed.join()
