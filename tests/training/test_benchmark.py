"""Measuring: what a run holds, who is visited when, and what becomes of a recipe that fails."""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import pytest
import torch
from recipes_at_work import PLAIN, sd_workload
from torch import nn

from labutils.profiling.roofline import Roofline
from labutils.recipe import Recipe
from labutils.results.records import Results, summarise
from labutils.training import Benchmark, Trainer, benchmark, train, trainer

QUICK = PLAIN.but(cache="latents+text", logging="ring-buffer")


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def shared():
    """The workload, and its examples, encoded once."""
    workload = sd_workload()
    with Trainer(workload, QUICK) as opened:
        return workload, opened.dataset


@pytest.fixture
def workload(monkeypatch, shared):
    """Short rounds, and the rates of some machine: measuring this one's takes seconds."""
    workload, encoded = shared
    monkeypatch.setattr(workload, "dataset", lambda model, recipe: encoded)
    roofline = Roofline(rate=1.0, bandwidth=100.0)
    monkeypatch.setattr(benchmark, "probe_machine", lambda *items: None)
    monkeypatch.setattr(benchmark, "measured_roofline", lambda dtype: roofline)
    monkeypatch.setitem(benchmark.ROUND_MS, "tiny", 1)
    monkeypatch.setattr(benchmark, "SETTLE_MS", 1)
    return workload


def test_no_full_collection_falls_into_a_timed_step(workload, monkeypatch):
    full, kept, limits, step = [], [], gc.get_threshold(), Trainer.step
    seen = lambda phase, info: full.append(phase) if info["generation"] == 2 else None
    with Trainer(workload, QUICK) as opened:
        littered = lambda self: kept.extend([] for _ in range(300_000)) or step(self)
        monkeypatch.setattr(Trainer, "step", littered)
        gc.callbacks.append(seen)
        try:
            benchmark.measure(opened, 2)
            assert not full and gc.get_threshold() == limits
            opened.step(), opened.step()
            assert full, "untimed, the same steps provoke one"
        finally:
            gc.callbacks.remove(seen)
        monkeypatch.setattr(Trainer, "step", lambda self: 1 / 0)
        pytest.raises(ZeroDivisionError, benchmark.measure, opened, 2)
    assert gc.get_threshold() == limits


def test_a_run_holds_what_was_measured(workload, tmp_path):
    recipe = QUICK.but(precision="fp16", num_workers=1)
    run = train(workload, recipe, steps=4, warmup=1, name="mine")
    assert run.ok and run.workload == "sd15-lora" and run.scale == "tiny"
    assert run.recipe == recipe.fitted_to("cpu").as_dict() != recipe.as_dict()
    step_ms, work = run.metrics["step_ms"], workload.work(recipe.fitted_to("cpu"))
    assert step_ms["n"] == len(run.samples["step_ms"]) == len(run.samples["data_ms"]) == 4
    rate = run.metrics["examples_per_s"]
    assert rate == pytest.approx(summarise([4e3 / ms for ms in run.samples["step_ms"]]), rel=1e-4)
    assert rate["n"] == len(run.samples["examples_per_s"]) == 4
    assert run.metrics["tflops"] == pytest.approx(work.flops / step_ms["median"] / 1e9)
    floor = max(work.flops / 1e12, work.bytes / 100e9) * 1e3
    assert run.metrics["floor_ms"] == pytest.approx(floor)
    # The first step, one of warming up, two for what the worker held ready, and four timed.
    assert len(run.metrics["loss"]) == 1 + 1 + 2 + 4
    assert run.metrics["encode_s"] > 0  # the price of a cached recipe's shorter steps
    assert not {"mfu", "peak_allocated_gb", "ranks"} & run.metrics.keys()  # absent, never 0
    Results(tmp_path).append(run)  # refuses NaN
    assert all(map(math.isfinite, run.metrics["loss"]))


def test_recipes_are_visited_there_and_back_and_the_base_twice(workload, monkeypatch):
    visits, timed = [], benchmark.timed
    recipes = {f"rank {rank}": QUICK.but(rank=rank) for rank in (2, 3, 4)}
    with Benchmark(workload, warmup=0) as bench:
        bench.prepare(recipes)
        for candidate in bench.candidates.values():
            monkeypatch.setattr(candidate, "settle", lambda: None)

        def watched(trainer, *rest):
            visits.append(trainer.recipe.rank)
            return timed(trainer, *rest)

        monkeypatch.setattr(benchmark, "timed", watched)
        runs = bench.compare(recipes, steps=2, rounds=3)
        once_more = bench.compare({"rank 2": recipes["rank 2"]}, steps=1, rounds=1)["rank 2"]
    assert len({run.comparison for run in runs.values()}) == 1
    assert once_more.comparison != runs["rank 2"].comparison
    assert visits.pop() == 2
    assert visits == [2, 3, 4, 2, 2, 4, 3, 2, 2, 3, 4, 2]
    assert list(runs) == [*recipes, "rank 2 again"]
    assert [name for name, run in runs.items() if run.tags.get("again")] == ["rank 2 again"]
    for run in runs.values():
        assert run.ok and run.metrics["wall_ms"]["n"] == 3
        assert run.samples["round"] == [0, 0, 1, 1, 2, 2]
    assert runs["rank 2"].samples["step_ms"] != runs["rank 2 again"].samples["step_ms"]


# ------------------------------------------------------------------------------ failures


def failing_at(monkeypatch, workload, step: int, error: type[BaseException]) -> None:
    """Trainers of rank 3 fail at that optimizer step; 0: when they are built. The error is a new
    one each time: one that is kept would keep the frames it passed through.
    """
    build, drive, calls = workload.build, Trainer.step, itertools.count(1)

    def building(recipe: Recipe) -> nn.Module:
        if recipe.rank == 3 and step == 0:
            raise error("the reason")
        return build(recipe)

    def driving(self: Trainer) -> None:
        if self.recipe.rank == 3 and next(calls) == step:
            raise error("the reason")
        drive(self)

    monkeypatch.setattr(workload, "build", building)
    monkeypatch.setattr(Trainer, "step", driving)


PEFT = {"driver": "accelerate", "adapter": "peft"}
WORKER = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(
    ("error", "step", "change"),
    [
        (torch.OutOfMemoryError, 0, {}),
        (RuntimeError, 1, PEFT),  # where a compiler fails
        (torch.OutOfMemoryError, 4, WORKER),
    ],
)
def test_one_that_fails_gives_its_memory_back_and_does_not_stop_the_others(
    error, step, change, workload, monkeypatch, tmp_path
):
    """When it is built, at its first step, and in the midst of measuring."""
    monkeypatch.setattr(trainer.tempfile, "tempdir", str(tmp_path))
    failing_at(monkeypatch, workload, step, error)
    models = []
    watch = lambda model: models.append(weakref.ref(model.unet))
    with Benchmark(workload, warmup=1, on_model=watch) as bench:
        recipes = {
            "before": QUICK,
            "fails": QUICK.but(rank=3, **change),
            "after": QUICK.but(rank=2),
        }
        runs = bench.compare(recipes, steps=1, rounds=2)
        assert [model() is None for model in models] == [False, *[True] * (step > 0), False]
    status = "oom" if error is torch.OutOfMemoryError else "error: RuntimeError: the reason"
    assert [run.status for run in runs.values()] == ["ok", status, "ok", "ok"]
    assert (runs["fails"].metrics, runs["fails"].samples) == ({}, {})
    assert runs["fails"].recipe["rank"] == 3
    assert list(tmp_path.iterdir()) == []  # no trainer leaves its folder behind


def test_a_compiled_recipe_is_skipped_where_nothing_would_be_compiled(workload, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    recipes = {"compiled": QUICK.but(compile="default"), "eager": QUICK}
    with Benchmark(workload, warmup=1) as bench:
        runs = bench.compare(recipes, steps=1, rounds=1)
    assert runs["compiled"].status.startswith("skipped: TORCHDYNAMO_DISABLE is set")
    assert runs["eager"].ok


def test_ctrl_c_is_not_a_status(workload, monkeypatch):
    failing_at(monkeypatch, workload, 2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(workload, QUICK.but(rank=3))


def test_a_cpu_out_of_memory_is_no_other_error(workload):
    build = lambda recipe: torch.empty(2**58, dtype=torch.uint8)
    assert train(workload, QUICK, build=build).status == "oom"


def test_a_name_in_a_benchmark_is_one_recipe(workload):
    with Benchmark(workload, warmup=1) as bench:
        bench.prepare({"a": QUICK})
        bench.prepare({"a": QUICK.but(precision="bf16")})  # on a CPU it is the same
        with pytest.raises(ValueError, match="already another recipe"):
            bench.compare({"b": QUICK, "a": QUICK.but(rank=3)})
        assert set(bench.candidates) == {"a"}
        assert bench.candidates["a"].steps_to_settle == 0  # no workers, no clock that must rise
        with pytest.raises(RuntimeError, match='"b" is not in'):
            bench.watch("b")
        bench.failed["c"] = "oom"
        with pytest.raises(RuntimeError, match=r'"c" failed \(oom\)'):
            bench.profile("c", None)


# ------------------------------------------------------------------------------ rounds


@pytest.mark.parametrize(
    ("graphs", "rounds"), [([4, 4], 1), ([4, 5, 5, 5], 2), (list(range(6)), benchmark.TRIES)]
)
def test_a_round_in_which_something_was_compiled_is_taken_again(
    workload, monkeypatch, graphs, rounds
):
    with Benchmark(workload, warmup=0) as bench:
        bench.prepare({"plain": QUICK})
        candidate = bench.candidates["plain"]
        candidate.settle = lambda: None
        monkeypatch.setattr(benchmark, "graphs_so_far", iter(graphs).__next__)
        before = candidate.trainer.step_count
        assert len(candidate.measure(1).step_ms) == 1
        assert candidate.trainer.step_count - before == rounds


def test_what_a_library_compiles_is_noticed():
    import torch._dynamo

    before = benchmark.graphs_so_far()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
    assert benchmark.graphs_so_far() == before + 1


def test_the_same_batches_are_timed_in_every_round_and_traced(workload, monkeypatch, tmp_path):
    seen, step = [], Trainer.step
    watching = lambda trainer: (step(trainer), seen.append(trainer.batches.taken))
    monkeypatch.setattr(Trainer, "step", watching)
    with Benchmark(workload, warmup=0, same_batches=True) as bench:
        bench.compare({"one": QUICK}, steps=2, rounds=2)
        bench.profile("one", tmp_path, steps=2)
    assert seen[1:4] == seen[4:7] == seen[7:]
