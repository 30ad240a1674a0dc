"""Lab 10's launches: what was through before a rank failed is kept, and crashes are runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labutils.course.lab import open_lab
from labutils.labs import lab10_distributed
from labutils.recipe import STOCK, Unavailable
from labutils.results.records import Run, read_runs
from labutils.training import launcher
from labutils.training.launch_worker import Task

SD = STOCK.but(driver="eager", logging="ring-buffer", cache="latents+text")


@pytest.mark.parametrize(("ranks_", "fewer"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (5, 1)])
def test_those_that_are_left_can_share_the_batch(ranks_, fewer):
    assert lab10_distributed.fewer_than(ranks_) == fewer


def at(scale: str) -> dict[str, lab10_distributed.Case]:
    return lab10_distributed.cases(
        SimpleNamespace(scale=scale, weights="random", data="generated", cache_dir="cache")
    )


def test_what_was_through_before_a_rank_failed_is_kept(monkeypatch, tmp_path):
    """What it failed in is on record, what comes after it is done, and an interrupted lab goes on
    where it was.
    """
    case = at("tiny")[""]
    tasks = [
        *(case.task(name, SD, steps=1) for name in "abc"),
        Task("all-reduce", "link", sizes=(4,)),
    ]
    launches, failing = [], {"b"}

    def launched(asked, *_, each, **__):
        launches.append("".join(task.name[0] for task in asked))
        runs = {}
        for task in asked:
            if task.name in failing:
                return launcher.Ended(runs, f"Rank 1 failed in {task.name}")
            runs[task.name] = Run(
                "", task.name, workload="sd15-lora", recipe=SD.fitted_to("cpu").as_dict()
            )
            each(runs[task.name])
        return launcher.Ended(runs)

    monkeypatch.setattr(lab10_distributed, "launch", launched)
    opened = lambda: open_lab(
        "10", {"__annotations__": {"results_dir": str}, "results_dir": str(tmp_path)}
    )
    found = {}
    with pytest.raises(RuntimeError, match="Rank 1 failed in b"):
        lab10_distributed.measured(opened(), tasks, 2, "cpu", found)
    assert (
        launches == ["abcl", "cl"]
        and set(found) == {"a", "c", "link"}
        and found["a"].lane == "same work"
    )
    assert {run.run: run.status for run in read_runs(tmp_path)} == {
        "a": "ok",
        "b": "error: Rank 1 failed in b",
        "c": "ok",
        "link": "ok",
    }
    failing.clear()
    for _ in range(2):  # the second time from what the first one left
        found = {}
        lab10_distributed.measured(opened(), tasks, 2, "cpu", found, judge=lambda name, run: run)
        assert set(found) == {"a", "b", "c", "link"} and launches == ["abcl", "cl", "b"]


def test_a_machine_that_brings_nothing_is_given_up(monkeypatch, tmp_path):
    tasks = [at("tiny")[""].task(name, SD) for name in "abcd"]
    asked = []
    monkeypatch.setattr(
        lab10_distributed,
        "launch",
        lambda left, *_, **__: asked.append(left) or launcher.Ended({}, "no way"),
    )
    lab = open_lab("10", {"__annotations__": {"results_dir": str}, "results_dir": str(tmp_path)})
    with pytest.raises(RuntimeError, match="no way"):
        lab10_distributed.measured(lab, tasks, 2, "cpu", {})
    assert [len(left) for left in asked] == [4, 3]


def test_a_crash_is_told_by_its_runs(monkeypatch):
    asked = []

    def launched(tasks, ranks, *_, **__):
        (task,) = tasks
        asked.append((task.fail, ranks, task.resume))
        if task.fail:
            return launcher.Ended(
                {}, "Rank 1 was killed.", (1, -9), checkpoint_step=4, left=["process 7"]
            )
        return launcher.Ended({"crash": Run("", "crash", metrics={"resumed_at": 6, "loss": [1.0]})})

    monkeypatch.setattr(lab10_distributed, "launch", launched)
    runs = lab10_distributed.crashes(at("tiny")[""], 2, "cpu")
    assert asked == [("kill", 2, False), ("raise", 2, True), ("", 1, True)]
    assert tuple(runs) == lab10_distributed.CRASHES
    killed = runs["rank killed"].metrics
    assert (killed["checkpoint_step"], killed["first_exit_code"], killed["left_behind"]) == (
        4,
        -9,
        1,
    )
    assert lab10_distributed.well(runs["resumed on fewer ranks"]).metrics["resumed_at"] == 6
    monkeypatch.setattr(
        lab10_distributed, "launch", lambda *_, **__: launcher.Ended({}, "no such file")
    )
    with pytest.raises(Unavailable, match="no such file"):
        lab10_distributed.well(
            lab10_distributed.crashes(at("tiny")[""], 2, "cpu")["resumed on fewer ranks"]
        )
