"""Lab 07's methods on tiny models; its arithmetic is PyTorch's and bitsandbytes' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recipes_at_work import one_thread

from labutils.labs import lab07_qlora
from labutils.labs.ladders import A3_BASE, distinct_on
from labutils.recipe import Recipe
from labutils.results.records import REFERENCE, Run, read_runs
from labutils.training import Trainer
from labutils.training.memory_log import read_log, runs_out_of_memory
from labutils.training.model_edits import cast_as_for_kbit, prepared_for_kbit
from labutils.workloads import open_workload
from labutils.workloads.causal_lm import QWEN3, build_lm


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def texts():
    return {
        length: open_workload(f"qwen3-lora-{length}", scale="tiny", device="cpu")
        for length in ("short", "long")
    }


def test_methods_are_what_is_on_record():
    """A run that is made today has the tags of the one on record."""
    recorded = {frozenset(run.tags.items()) for run in read_runs(REFERENCE, "07")}
    alone = [lab07_qlora.method("lora", "long", x) for x in ("offloaded", "4 bits", "fp32 casts")]
    qloras = [lab07_qlora.method("qlora", *x) for x in (("long", "no casts"), ("short", "batch 1"))]
    for one in (*alone, *qloras, *lab07_qlora.UNSLOTHS):
        assert frozenset(({"experiment": "methods"} | one.tags).items()) in recorded, one.name


def test_a_method_is_followed(texts, tmp_path):
    chosen = [lab07_qlora.method(kind, "short") for kind in ("lora", "qlora")]
    lora, run = (lab07_qlora.follow(texts, one, 4, tmp_path, every=2) for one in chosen)
    assert run.ok and run.recipe["base_linear"] == "nf4", run.status
    log = read_log(tmp_path / "qlora short.csv")
    # One, one to warm up, one to rewind, four timed.
    assert [line["step"] for line in log] == [2, 4, 6, 7]
    pairs = zip(lora.samples["useful_tokens"], run.samples["useful_tokens"], strict=False)
    assert all(mine == theirs for mine, theirs in pairs)
    curves = lab07_qlora.over_examples(tmp_path, "short", "elapsed_time_sec")
    assert list(curves["qlora"]) == [8, 16, 24, 28]
    assert curves["unsloth"] == {}


def test_casts_alone_leave_the_adapted_matrices(texts):
    model = texts["short"].build(A3_BASE.but(precision="bf16"))
    cast_as_for_kbit(model)
    frozen = {name: p.dtype for name, p in model.network.named_parameters() if not p.requires_grad}
    for name, dtype in frozen.items():
        assert dtype == (torch.bfloat16 if "base_layer" in name else torch.float32), name


def test_tied_weights_stay_tied_when_they_are_cast():
    tied = replace(QWEN3["tiny"], tied=True)
    lm = build_lm(tied, torch.device("cpu"), torch.bfloat16).requires_grad_(False)
    prepared_for_kbit(lm)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert lm.lm_head.weight.dtype == torch.float32


def test_how_much_longer_steps_are():
    def run(times, tokens):
        return Run("07", "", samples={"step_ms": times, "useful_tokens": tokens})

    base = run([10, 30, 20, 50], [1, 3, 2, 5])
    assert lab07_qlora.longer_by(run([12, 36, 26], [1, 3, 2]), base) == pytest.approx(20)
    assert lab07_qlora.longer_by(run([12, 36, 26], [3, 1, 1]), base) is None
    assert lab07_qlora.longer_by(run([], []), base) is None


def test_memory_is_a_line_over_the_batch(texts):
    plain, checkpointed = (
        lab07_qlora.memory_line(texts, lab07_qlora.method("lora", "long", *switches), (1, 2), None)
        for switches in ((), ("checkpointed",))
    )
    assert 0 < checkpointed.metrics["each_gb"] < plain.metrics["each_gb"]


def test_a_step_that_runs_out_of_memory_leaves_no_gradients(texts):
    def too_large():
        trainer.parameters[0].grad = torch.ones_like(trainer.parameters[0])
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with Trainer(texts["short"], A3_BASE) as trainer:
        assert runs_out_of_memory(trainer, too_large)
        assert all(parameter.grad is None for parameter in trainer.parameters)
        assert not runs_out_of_memory(trainer, trainer.step)
        with pytest.raises(ZeroDivisionError):
            runs_out_of_memory(trainer, lambda: 1 / 0)


def test_what_is_on_record_of_a_rung_is_of_its_recipe():
    """Under a rung's name there is no other one's run."""
    rungs = lab07_qlora.recipes_on("cuda")
    runs = read_runs(REFERENCE, "07").select(experiment="ladder")
    there = {run.tags["rung"]: run for run in runs if run.recipe}
    assert len(there) >= 5
    for name, run in there.items():
        if name in rungs:
            assert Recipe(**run.recipe) == rungs[name].fitted_to("cuda"), name


def test_rungs_are_timed_on_the_same_batches_and_rated_by_the_epoch(texts):
    recipes = lab07_qlora.recipes_on("cpu")
    assert "blocks compiled" not in distinct_on("cpu", recipes)
    chosen = {name: recipes[name] for name in ("lora", "packed", "4-bit weights")}
    runs = lab07_qlora.climbed_on(texts["long"], chosen, steps=2, rounds=1, warmup=0)
    assert all(run.ok for run in runs.values())
    lanes = {"lora": "article", "packed": "same mathematics"}
    assert {name: runs[name].lane for name in lanes} == lanes
    assert runs["packed"].samples["tokens"][:2] == runs["4-bit weights"].samples["tokens"][:2]
    lora = runs["lora"]
    work = texts["long"].work(recipes["lora"].fitted_to("cpu"))
    assert lora.metrics["useful_tokens"] == work.useful_tokens / work.tokens
