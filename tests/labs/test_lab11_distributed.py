"""Lab 11's plan of launches, and what is made of its runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labutils.course.lab import open_lab
from labutils.labs import lab11_distributed as lab10
from labutils.recipe import Recipe
from labutils.results.records import Run, read_runs, summarise
from labutils.results.schema1_migration import tags_of
from labutils.training.launch_worker import Task
from labutils.training.launcher import Ended


def cases(scale: str) -> list[lab10.Case]:
    lab = SimpleNamespace(scale=scale, weights="random", data="generated", cache_dir="cache")
    return lab10.cases(lab)


@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_the_plan_shares_one_global_batch_and_has_its_tags(scale):
    tiny = scale == "tiny"
    alone = lab10.plan_alone(cases(scale), 2, 4, tiny)
    together = lab10.plan_together(cases(scale), 2, 4, tiny)
    names = [task.name for task in (*alone, *together)]
    assert len(set(names)) == len(names)
    assert names[:3] == ["all-reduce", "one process", "one process, same batch"]
    for task in (*alone, *together):
        assert {"ranks": 1} | tags_of("10", task.name) == {"ranks": 1} | task.tags
    for task in together:
        recipe = Recipe(**task.recipe)
        assert recipe.accumulation % 2 == 0
        assert (recipe.parallel == "fsdp") == (task.tags["strategy"] == "fsdp")
    assert ("ddp 2 no_sync" in names) == (not tiny) and "full ddp 2 no_sync" in names
    strategies = [task.tags["strategy"] for task in together]
    assert strategies == sorted(strategies)  # DDP of all cases, then FSDP


def timed(name: str, ms: float, ranks: int = 2, **recipe) -> Run:
    samples = {"step_ms": [ms + 0.001 * n for n in range(8)]}
    metrics = {"step_ms": summarise(samples["step_ms"]), "ranks": ranks, "examples_per_s": 8.0}
    run = Run("11", name, workload="sd15-lora", metrics=metrics, samples=samples)
    run.tags, run.recipe = tags_of("10", name), recipe
    return run


def test_runs_that_differ_in_one_knob_are_compared():
    runs = [timed("ddp 2", 100), timed("ddp 2 bucket 1MB", 110), timed("fsdp 2", 200)]
    runs += [timed("full ddp 2", 300), timed("ddp 2 no_sync", 400)]
    table = lab10.comparisons(runs).set_index("one change")
    assert set(table.index) == {"buckets of 25 MiB -> of 1", "DDP -> FSDP"}
    assert table.loc["DDP -> FSDP", "step"].startswith("+100")


def test_a_micro_batch_that_sends_nothing_is_a_no_sync_steps_part():
    """Four micro-batches in 400 ms, the last of which takes the 130 of a step that sends."""
    runs = [timed("one process", 80, 1), timed("ddp 2", 130)]
    runs += [timed("ddp 2 no_sync", 400, accumulation=8)]
    (row,) = lab10.beside_others(runs).to_dict("records")
    assert row["beside others, sending nothing, ms"] == pytest.approx(90, abs=0.1)
    assert row["one process alone, ms a micro-batch"] == pytest.approx(80, abs=0.1)


def test_what_was_done_before_a_rank_failed_is_kept(monkeypatch, tmp_path):
    """The failed task and those behind it are on record, and an interrupted lab goes on."""
    recipe = lab10.SD_RECIPE.fitted_to("cpu").as_dict()
    plan = [Task("train", name, {}, recipe, tags={"experiment": name}) for name in "abc"]
    launches, failing = [], {"b"}

    def launched(tasks, *_, each, **__):
        launches.append("".join(task.name for task in tasks))
        runs = {}
        for task in tasks:
            if task.name in failing:
                return Ended(runs, f"Rank 1 failed in {task.name}")
            told = {"recipe": task.recipe, "tags": task.tags}
            runs[task.name] = Run("11", task.name, workload="sd15-lora", **told)
            each(runs[task.name])
        return Ended(runs)

    def measured() -> list[str]:
        given = {"__annotations__": {"results_dir": str}, "results_dir": str(tmp_path)}
        runs: list[Run] = []
        lab10.measured(open_lab("11", given), plan, 2, "cpu", runs)
        return sorted(run.run for run in runs)

    monkeypatch.setattr(lab10, "launch", launched)
    with pytest.raises(RuntimeError, match="Rank 1 failed in b"):
        measured()
    statuses = {run.run: run.status for run in read_runs(tmp_path)}
    assert statuses["a"] == "ok" and "failed in b" in statuses["b"] and "not run" in statuses["c"]
    failing.clear()
    for _ in range(2):  # the second time from what the first one left
        assert measured() == list("abc") and launches == ["abc", "bc"]


def test_a_crash_is_told_by_its_runs(monkeypatch):
    asked = []

    def launched(tasks, ranks, *_, **__):
        (task,) = tasks
        asked.append((task.fail, ranks, task.resume))
        if task.fail:
            return Ended({}, "Rank 1 was killed.", 1, checkpoint_step=4, left=[7])
        return Ended({task.name: Run("", task.name, metrics={"resumed_at": 6, "loss": [1.0]})})

    monkeypatch.setattr(lab10, "launch", launched)
    runs = lab10.crashes(cases("tiny")[0], 2, "cpu")
    assert asked == [("kill", 2, False), ("raise", 2, True), ("", 1, True)]
    killed = runs["rank killed"].metrics
    assert (killed["checkpoint_step"], killed["first_rank"], killed["left_behind"]) == (4, 1, 1)
    assert runs["resumed on fewer ranks"].tags["event"] == "resumed on fewer ranks"
