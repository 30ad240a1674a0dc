"""Lab 08's steps on tiny models: batches, predictions, measurements, slower hosts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from labutils.labs import lab08_launch_bound as lab08
from labutils.profiling.gpu_specs import find_spec
from labutils.profiling.step_model import Host, Launch, Program
from labutils.recipe import Unavailable
from labutils.results.records import Run
from labutils.training import Trainer
from labutils.training.one_batch import OnOneBatch
from labutils.workloads import open_workload
from labutils.workloads.base import Work

FAMILIES = {"dense": "qwen3-lora", "moe": "gpt-oss-lora"}


pytestmark = pytest.mark.usefixtures("single_thread")


@functools.cache
def texts(family: str) -> Mapping[str, object]:
    names = {kind: f"{FAMILIES[family]}-{kind}" for kind in ("long", "short")}
    return {kind: open_workload(name, "tiny", device="cpu") for kind, name in names.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_holds_typical_texts_and_nothing_else(family):
    packed = {"layers": "rewritten", "shapes": "packed", "token_budget": lab08.ROW}
    workload, padded = texts(family)["long"], next(iter(lab08.variants(family).values()))
    recipe = padded.but(**packed, micro_batch=1)
    lengths = [len(ids) for ids, _ in workload.dataset(None, recipe).conversations]
    mean = sum(lengths) / len(lengths)
    chosen = sorted(length for length in lengths if length <= mean)[-lab08.TEXTS :]
    assert all(0.6 * mean <= length for length in chosen)
    assert lab08.batch_of(workload, recipe)["input_ids"].shape == (1, sum(chosen))
    # The library, which pads texts side by side, sees the same tokens.
    works = [workload.work_of(r, lab08.batch_of(workload, r)) for r in (recipe, padded)]
    assert works[0].useful_tokens == works[1].useful_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_is_told_by_operations_which_few_tokens_need_fewer_of(family, monkeypatch):
    """Of two tokens a loop over experts skips most experts; all short texts here reach all."""
    with Trainer(texts(family)["long"], next(iter(lab08.variants(family).values()))) as trainer:
        long, short = (lab08.batch_of(each, trainer.recipe) for each in texts(family).values())
        two = {name: rows[:1, :2] for name, rows in short.items()}
        steps = [OnOneBatch(trainer, batch) for batch in (long, short, two)]
        told = [lab08.HostStep(step, steps[0]) for step in steps]
        monkeypatch.setattr(lab08.step_model, "host_of", lambda *_: Host(1.0))
        host_ms = [step.host(told[0].program, 9).of("") * told[0].program.launches for step in told]
    assert told[0].operations_ratio == told[1].operations_ratio == 1
    assert (told[2].operations_ratio > 1.1) == (family == "moe")
    assert long["input_ids"].numel() > 2 * short["input_ids"].numel()
    assert host_ms == pytest.approx([o.operations_ratio * o.program.launches for o in told])


@pytest.fixture(scope="module")
def studied():
    return lab08.study(texts("moe"), "moe", "expert loop", steps=2, delays=(0, 100))


def test_a_slower_host_slows_the_step_by_its_delays(studied):
    quick, slow = (step.run for step in studied[1:3])
    assert (quick.tags["delay_us"], slow.tags["delay_us"]) == (0, 100)
    for metric in ("step_ms", "predicted_ms", "host_us"):
        assert slow.metric(metric) > quick.metric(metric)
    longer = slow.metric("step_ms") - quick.metric("step_ms")
    assert longer > 0.5 * 100 * 0.1  # more than a hundred operations


def test_a_study_predicts_shows_and_repeats(studied):
    long, again = studied[0], studied[-1].run
    assert long.run.has(model="moe", texts="long", variant=False)
    assert long.run.metrics["by"] == "both"
    assert abs(long.run.metric("off_by_percent")) < 100
    assert len(long.run.samples["short_ms"]) == len(long.run.samples["step_ms"])
    assert again.tags == long.run.tags | {"again": True} and again.metric("step_ms") > 0
    alone = lab08.study(texts("moe"), "moe", "grouped", steps=1)[0].run
    assert alone.metric("launches") < long.run.metric("launches")
    with pytest.raises(KeyError, match="short"):  # a host is read from no other
        lab08.study({"long": texts("moe")["long"]}, "moe", "rewritten", steps=2)
    with pytest.raises(Unavailable, match="GPU"):
        lab08.study(texts("moe"), "moe", "captured", steps=2)


def gpu_step() -> lab08.PredictedStep:
    """A step that was traced on an H200: 100 products of 1 ms, and launches of 0.2 ms."""
    program = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)
    run = Run("08", "moe long", recipe={"precision": "bf16"}, metrics={"step_ms": 100.0})
    return lab08.PredictedStep(run, program, Host(0.2), Work(flops=1e15, bytes=1e9, examples=4))


def test_a_step_on_another_card_and_beside_a_slow_host():
    """Kernels scale with the dense peak; beside a host of 5.2 ms a launch no card helps."""
    step, here = gpu_step(), find_spec("H200 SXM")
    assert (step.beside(0), step.beside(5000)) == pytest.approx((100, 520))
    for name, ms in {"RTX PRO 6000 Blackwell Max-Q": 100 * 989.4 / 438.9, "B200": 44}.items():
        assert step.on(find_spec(name), here) == pytest.approx(ms, rel=1e-2)
        assert replace(step, host=Host(5.2)).on(find_spec(name), here) == pytest.approx(520)
