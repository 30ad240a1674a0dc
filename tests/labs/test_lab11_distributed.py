"""Lab 11's plan of launches, what is made of its runs, and a learner's script."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from labutils.labs import lab11_distributed as lab11
from labutils.recipe import Recipe
from labutils.results.records import REFERENCE, Run, read_runs, summarise


@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_the_plan_shares_one_global_batch_and_tells_its_runs_apart(scale):
    opened = {"scale": scale, "weights": "random", "data": "generated", "cache_dir": "cache"}
    tasks = lab11.plan(opened, 2, 4)
    assert tasks[0].kind == "all-reduce"
    timed = [each for task in tasks for each in task.timed]
    assert len({each["name"] for each in timed}) == len(timed)
    tags = [frozenset(each["tags"].items()) for each in timed]
    assert len(set(tags)) == len(tags)
    for each in timed:
        recipe = Recipe(**each["recipe"])
        assert (recipe.accumulation % 2 == 0) == (each["by"] == "all")
        assert (recipe.parallel == "fsdp") == (each["tags"]["strategy"] == "fsdp")
    assert {each["tags"].get("sync") for each in timed} == {None, "sync each", "no_sync"}


def timed(ms: float, strategy: str, ranks: int = 2, **samples) -> Run:
    step_ms = [ms + 0.001 * n for n in range(8)]
    metrics = {"step_ms": summarise(step_ms), "ranks": ranks, "examples_per_s": 2000 * ranks / ms}
    case = {"experiment": "training", "workload": "sd15-lora", "trained": "lora"}
    run = Run("11", strategy, workload="sd15-lora", metrics=metrics | {"gradient_mb": 1.0})
    run.samples, run.tags = {"step_ms": step_ms} | samples, case | {"strategy": strategy}
    run.tags["ranks"] = 1 if strategy == "one process" else 2
    return run


def test_company_is_told_from_messages():
    link = {"bytes": [1e3, 1e9], "all_reduce_ms": [0.02, 20.0]}
    runs = [Run("11", "link", samples=link, tags={"experiment": "all-reduce"})]
    runs += [timed(80, "one process", 1, lead_ms=[0.0], lead_bytes=[10**9])]
    runs += [timed(95, "apart", 1), timed(130, "ddp")]
    (row,) = lab11.against_prediction(runs).to_dict("records")
    assert row["predicted, ms"] == pytest.approx(100, abs=0.1)
    assert row["predicted from that, ms"] == pytest.approx(115, abs=0.1)
    assert row["efficiency, %"] == pytest.approx(100 * 80 / 130)
    (row,) = lab11.against_prediction(runs[:2] + runs[3:]).to_dict("records")
    assert row["predicted from that, ms"] is None
    assert lab11.against_prediction(runs[1:]).empty


def test_each_prediction_has_its_truth_in_the_record():
    assert None not in lab11.truths(read_runs(REFERENCE).select("11").of_newest_host()).values()


def join():
    dist.init_process_group("gloo")
    return "cpu"


def told(device):
    import atexit

    atexit.register(open, "python_ended", "w")
    return device, dist.get_world_size()


def failing(device):
    raise ValueError(f"on purpose, on a {device}")


def test_a_script_is_started_and_a_failure_is_told(tmp_path):
    assert lab11.torchrun(tmp_path, [join], [told], 2, "cpu") == [("cpu", 2)]
    assert not (tmp_path / "python_ended").exists()  # in which gloo's threads may abort it
    with pytest.raises(RuntimeError, match="(?s)on purpose, on a cpu.*exitcode  : 1"):
        lab11.torchrun(tmp_path, [join], [failing], 2, "cpu")
