"""Two real processes train as one: same gradients, losses and weights; and what becomes of them
when one dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_at_work
import torch
from ranks_at_work import CASES, SD, opened, perturbed

from labutils.recipe import STOCK
from labutils.training import Trainer, distributed

HERE = Path(__file__).parent


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> Path:
    """Every case on two ranks, in one launch: starting takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--local-addr=127.0.0.1", "--nproc-per-node=2", HERE / "ranks_at_work.py", folder]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    options = {"env": os.environ | own, "capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run([*torchrun, *ranks], **options)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def workloads() -> dict:
    return {name: opened(name) for name in ("sd15-lora", "qwen3-lora-short")}


# -------------------------------------------------------------------------------------------------
# The same training


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_process_does(case, on_two_ranks, workloads):
    name, recipe = CASES[case]
    alone = ranks_at_work.train(workloads[name], recipe)
    found = torch.load(on_two_ranks / f"{case}.pt")
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(found["before"], alone["before"], strict=True)
    )
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert len(set(alone["losses"])) == ranks_at_work.STEPS
    # The first step's; later ones are those of weights that AdamW has moved by the signs of
    # gradients near zero.
    for mine, other in zip(found["gradients"][0], alone["gradients"][0], strict=True):
        assert other.abs().max() > 0
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()
    for mine, other, start in zip(found["after"], alone["after"], alone["before"], strict=True):
        assert (mine - other).norm() <= 5e-3 * (other - start).norm()


@pytest.mark.parametrize("case", ["ddp", "fsdp, no_sync", "whole, fsdp"])
def test_gradients_are_those_of_one_large_batch(case, on_two_ranks, workloads):
    """An oracle that knows of no micro-batches, drivers or ranks: all examples of the step at once,
    and autograd.
    """
    name, recipe = CASES[case]
    workload, seen = workloads[name], []
    ranks_at_work.train(workload, recipe, steps=1, seen=seen)
    assert len(seen) == recipe.accumulation
    batch, draws = (
        {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*seen, strict=True)
    )
    model = workload.build(recipe)
    perturbed(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(workload.loss(model, batch, draws), trained)
    found = torch.load(on_two_ranks / f"{case}.pt")["gradients"][0]
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


def test_one_process_goes_on_where_ranks_that_cut_the_weights_broke_off(on_two_ranks, workloads):
    workload = workloads["sd15-lora"]
    undisturbed = ranks_at_work.train(workload, SD, steps=6)["losses"]
    with Trainer(workload, SD, on_two_ranks, resume=True) as trainer:
        assert trainer.step_count == 4
        trainer.run(6)
        trainer.driver.log.flush()
        assert trainer.losses == pytest.approx(undisturbed[4:], rel=1e-4)


# -------------------------------------------------------------------------------------------------
# What can't be


EAGER_FSDP = {"parallel": "fsdp", "driver": "eager", "precision": "bf16"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"accumulation": 3}, "Use accumulation=2 or 4"),
        ({"driver": "accelerate"}, "driver='eager'"),
        (EAGER_FSDP | {"adapter": "folded"}, "Use adapter='none' or"),
        (EAGER_FSDP | {"compile": "default"}, "compile_scope='blocks'"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        distributed.check(STOCK.but(**changes), 2)
    distributed.check(STOCK.but(**changes), 1)  # one process has nothing to share
