"""Several GPUs: NCCL between them, the training of one, less memory where weights are cut, and a
rank that dies.
"""

from __future__ import annotations

from dataclasses import asdict
from threading import Thread

import pytest
import torch
from recipes_at_work import kill_rank_1

from labutils.labs import lab11_distributed
from labutils.profiling import ddp_model
from labutils.profiling.collectives import SIZES, Link
from labutils.training.launch_worker import Task, Timed
from labutils.training.launcher import Ended, launch
from labutils.workloads import open_workload

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(900),
]
SD = lab11_distributed.SD_RECIPE.but(accumulation=2, micro_batch=4)
QWEN = lab11_distributed.QWEN_RECIPE.but(accumulation=2, micro_batch=1)


def case(name: str, workload: str, recipe, alone: bool = False, **changes) -> Task:
    """Of one recipe, so that each has the GPUs' memory for itself."""
    told = open_workload(workload, "small", device="cuda").opened_as()
    timed = Timed(name, "one" if alone else "all", recipe.but(**changes).as_dict())
    return Task("train", name, told, timed=[asdict(timed)], steps=5)


@pytest.fixture(scope="module")
def measured() -> Ended:
    whole = {"adapter": "none"}
    tasks = [
        Task("all-reduce", "all-reduce", sizes=SIZES),
        case("share", "sd15-lora", SD, accumulation=1, alone=True),
        case("full share", "sd15-lora", SD, accumulation=1, alone=True, **whole),
        case("alone", "sd15-lora", SD, alone=True),
        case("ddp", "sd15-lora", SD),
        case("fsdp", "sd15-lora", SD, parallel="fsdp"),
        case("full alone", "sd15-lora", SD, alone=True, **whole),
        case("full ddp", "sd15-lora", SD, **whole),
        case("full fsdp", "sd15-lora", SD, parallel="fsdp", **whole),
        case("qwen alone", "qwen3-lora-long", QWEN, alone=True),
        case("qwen ddp", "qwen3-lora-long", QWEN),
        case("qwen fsdp", "qwen3-lora-long", QWEN, parallel="fsdp"),
    ]
    ended = launch(tasks, 2, "cuda", 840)  # two thirds of it where the host is slow
    assert not ended.message, f"{ended.message}\n{ended.log[-6000:]}"
    return ended


@pytest.mark.parametrize(
    ("together", "alone"),
    [
        ("ddp", "alone"),
        ("fsdp", "alone"),
        ("full ddp", "full alone"),
        ("full fsdp", "full alone"),
        ("qwen ddp", "qwen alone"),
        ("qwen fsdp", "qwen alone"),
    ],
)
def test_two_gpus_train_as_one(together, alone, measured):
    found, expected = (measured.runs[name].metrics["loss"] for name in (together, alone))
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert found[2] == pytest.approx(expected[2], rel=3e-2)


def test_the_link_is_one(measured):
    run = measured.runs["all-reduce"]
    assert run.metrics["bus_gb_per_s"] > 5
    assert run.metrics["latency_us"] < 500


@pytest.mark.parametrize("name", ["full", "qwen"])
def test_cut_weights_take_less_memory(name, measured):
    one, two = (
        measured.runs[f"{name} {kind}"].metrics["peak_allocated_gb"] for kind in ("alone", "fsdp")
    )
    assert two < one


@pytest.mark.parametrize(("name", "share"), [("ddp", "share"), ("full ddp", "full share")])
def test_no_step_is_shorter_than_predicted(name, share, measured):
    link = Link.of(measured.runs["all-reduce"].samples)
    least = ddp_model.ddp(measured.runs[share], link).step_ms
    assert measured.runs[name].metric("step_ms") > 0.9 * least


def test_nccl_s_variables_are_taken():
    settings = ("NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE=1")
    usual, other = trials = [lab11_distributed.nccl_trial(2, words) for words in settings]
    assert usual.ok and other.ok
    assert usual.metrics["transport"] != other.metrics["transport"]
    assert lab11_distributed.truths(trials)["64 MiB without P2P, slower by"] > 1


def test_a_rank_dies_and_the_other_s_word_is_kept():
    """In the midst of NCCL's sums, with a DataLoader worker."""
    told = open_workload("sd15-lora", "small", device="cuda").opened_as()
    recipe = SD.but(cache="nothing", num_workers=1, persistent_workers=True).as_dict()
    endless = Task("train", "endless", told, [asdict(Timed("it", "all", recipe))], steps=10**6)
    Thread(target=kill_rank_1, daemon=True).start()
    first, *others = launch([endless], 2, "cuda", 200).message.splitlines()
    assert first == "Rank 1 was killed by SIGKILL in *endless*." and others
