"""Lab 07's methods on a GPU: memory is logged, its line holds, and unsloth answers where it is
installed.
"""

from __future__ import annotations

import gc

import pytest
import torch

from labutils.labs import lab07_qlora
from labutils.labs.ladders import A3_BASE
from labutils.profiling import cuda
from labutils.recipe import Unavailable
from labutils.training import Trainer
from labutils.training.memory_run import peak_of_step, read_log, runs_out_of_memory
from labutils.training.unsloth_run import check_unsloth, train_with_unsloth
from labutils.workloads import open_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EVERY = [
    ["lora"],
    ["lora", "checkpointed"],
    ["lora", "offloaded"],
    ["lora", "fp32 casts"],
    ["qlora"],
]


@pytest.fixture(scope="module")
def texts():
    return {
        length: open_workload(f"qwen3-lora-{length}", scale="tiny", device="cuda")
        for length in ("short", "long")
    }


@pytest.mark.parametrize("words", EVERY)
def test_every_method_trains_and_its_memory_is_on_record(texts, tmp_path, words):
    kind, *switches = words
    chosen = lab07_qlora.method(kind, "short", *switches)
    run = lab07_qlora.follow(texts, chosen, 4, tmp_path, every=2)
    assert run.ok, run.status
    assert 0 < run.metrics["peak_allocated_gb"] <= run.metrics["peak_reserved_gb"]
    (log,) = tmp_path.glob("*.csv")
    assert all(line["memory_allocated_gb"] <= line["peak_memory_gb"] for line in read_log(log))


def test_checkpointing_makes_the_line_flatter(texts):
    plain, checkpointed = (
        lab07_qlora.memory_line(texts, lab07_qlora.method("lora", "long", *words), (8, 32), None)
        for words in ((), ("checkpointed",))
    )
    assert 0 < checkpointed.metrics["each_gb"] < 0.9 * plain.metrics["each_gb"]


def test_memory_comes_back_after_a_batch_that_does_not_fit(texts):
    workload, recipe = texts["long"], A3_BASE.but(shapes="padded", micro_batch=1)
    row = workload.dataset(None, recipe)[0]
    with Trainer(workload, recipe) as trainer:

        def step(batch):
            return peak_of_step(trainer, workload.collate(recipe)([row] * batch))

        step(1)
        gc.collect()
        cuda.empty_cache()
        before = cuda.allocated_memory()
        assert runs_out_of_memory(trainer, lambda: step(10**5))
        assert cuda.allocated_memory() < before + 0.5
        assert step(2) > before


def test_unsloth_trains(texts, tmp_path):
    try:
        check_unsloth("cuda")
    except Unavailable as reason:
        pytest.skip(str(reason))
    small = {
        length: open_workload(f"qwen3-lora-{length}", scale="small", device="cuda")
        for length in texts
    }
    jobs = lab07_qlora.unsloth_jobs(small, 4)
    runs = train_with_unsloth(jobs, tmp_path, every=2)
    assert all(run.ok for run in runs.values()), [run.status for run in runs.values()]
    assert set(lab07_qlora.lines_of(runs.values())) == {"unsloth long"}
