"""Lab 04's climb: what is measured in which order on a GPU, without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from traces import TWO_STEPS

from labutils.labs import lab04_climb
from labutils.labs.ladders import A1_LADDER
from labutils.profiling.trace import Trace
from labutils.results.records import Run

RUNGS = [rung.name for rung in A1_LADDER]


class OnGpu:
    """A benchmark that measures nothing and notes what it is asked for."""

    def __init__(self) -> None:
        self.workload = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        self.did: list[object] = []

    def prepare(self, recipes):
        self.did.append(list(recipes))

    def compare(self, recipes, steps, rounds, tags):
        self.did.append(("compare", steps, rounds))
        runs = {
            name: Run("04", name, tags=tags[name], recipe=recipe.as_dict())
            for name, recipe in recipes.items()
        }
        for run in runs.values():
            run.metrics["step_ms"] = 1.0
        return runs

    def watch(self, name):
        return {"gpu_utilization": 0.5}

    def profile(self, name, folder, steps):
        self.did.append(("trace", name))
        return Trace(TWO_STEPS)


def test_nothing_else_compiles_while_a_first_step_is_timed_and_traces_come_last(monkeypatch):
    bench = OnGpu()

    def tried(workload, recipe, *args, **options):
        bench.did.append(("another process", recipe.compile))
        return Run("04", "", metrics={"failed": 0})

    monkeypatch.setattr(lab04_climb, "try_isolated", tried)
    runs = lab04_climb.climbed(bench, 8, Path("."))
    assert bench.did[0] == list(lab04_climb.ALONE)
    assert [one for one in bench.did if isinstance(one, list)][1] == RUNGS
    compared = bench.did.index(("compare", 1, 8))
    others = [at for at, one in enumerate(bench.did) if one[0] == "another process"]
    assert len(others) == len(lab04_climb.AHEAD) + 2 and 0 < min(others) <= max(others) < compared
    assert bench.did[compared + 1 :] == [("trace", name) for name in lab04_climb.TRACED]
    assert "compiled_regions" in runs["compile"].metrics
    assert "gpu_utilization" in runs["stock"].metrics
    assert [run.lane for run in runs.values()][: len(RUNGS)] == [rung.lane for rung in A1_LADDER]
    modes = [run.tags for run in runs.values() if run.tags["experiment"] == "compile mode"]
    mode = {"experiment": "compile mode", "mode": "reduce-overhead"}
    assert modes == [mode, mode | {"mode": "max-autotune"}]


def test_a_cpu_climbs_the_rungs_that_it_can_tell_apart():
    recipes = lab04_climb.rungs_on("cpu")
    assert recipes.keys() < set(RUNGS) == lab04_climb.rungs_on("cuda").keys()
    assert list(recipes)[0] == "stock" and list(recipes)[-1] == "folded LoRA"
    assert {recipe.compile for recipe in recipes.values()} == {"off"}
    assert "whole-step graph" not in recipes
