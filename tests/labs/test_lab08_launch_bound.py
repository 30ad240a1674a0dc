"""Lab 08's steps on tiny models: batches, predictions, measurements, slower hosts."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labutils.labs import lab08_launch_bound as lab08
from labutils.profiling.step_model import Launch, Program
from labutils.recipe import Unavailable
from labutils.training import Trainer
from labutils.training.one_batch import OnOneBatch
from labutils.workloads import open_workload

FAMILIES = {"dense": "qwen3-lora", "moe": "gpt-oss-lora"}


pytestmark = pytest.mark.usefixtures("single_thread")


@functools.cache
def texts(family: str) -> dict[str, object]:
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
    ours, theirs = (workload.work_of(r, lab08.batch_of(workload, r)) for r in (recipe, padded))
    assert ours.useful_tokens == theirs.useful_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_is_told_by_operations_which_few_tokens_need_fewer_of(family, monkeypatch):
    """Of two tokens a loop over experts skips most experts; all short texts here reach all."""
    with Trainer(texts(family)["long"], next(iter(lab08.variants(family).values()))) as trainer:
        long, short = (lab08.batch_of(each, trainer.recipe) for each in texts(family).values())
        two = {name: rows[:1, :2] for name, rows in short.items()}
        steps = [OnOneBatch(trainer, batch) for batch in (long, short, two)]
        told = [lab08.HostStep(step, steps[0]) for step in steps]
        monkeypatch.setattr(lab08.step_model, "host_of", lambda *_: 1.0)
        host_ms = [step.launch_ms(told[0].program, 9) * told[0].program.launches for step in told]
        steps[1].timed(0, warmup=40)  # tokens that chose other experts would change it
        assert lab08.operations_of(steps[1]) == told[1].operations
    more = [told[0].operations / each.operations for each in told]
    assert more[:2] == [1, 1] and (more[2] > 1.1) == (family == "moe")
    assert long["input_ids"].numel() > 2 * short["input_ids"].numel()
    wanted = [m * o.program.launches for m, o in zip(more, told, strict=True)]
    assert host_ms == pytest.approx(wanted)


def test_kernels_hide_a_slower_host_until_its_clock_overtakes_theirs():
    def program(launches, ms):
        return Program((Launch(1.0, (("GEMM", ms, 1),), False),) * launches, 1)

    told = SimpleNamespace(program=program(50, 0.01), as_long=50), program(100, 1.0)
    assert lab08.HostStep.predict(*told, 0.22, [20, 24]) == pytest.approx([100, 100])
    assert lab08.HostStep.predict(*told, 1.10, [100, 120]) == pytest.approx([100, 120], rel=0.01)


def test_rounds_go_there_and_back_beside_the_host_that_is_asked_for():
    order, now = [], _get_current_dispatch_mode

    def fake(name):
        return SimpleNamespace(timed=lambda _: order.append((name, now().delay_us)) or [len(order)])

    times = lab08.in_turns(fake("long"), SimpleNamespace(step=fake("short")), 2, 5.0)
    assert order == [("short", 5.0), ("long", 5.0), ("long", 5.0), ("short", 5.0)]
    assert times == {"short": [1, 4], "long": [2, 3]}


@pytest.fixture(scope="module")
def studied():
    return [*lab08.study(texts("moe"), "moe", "loop", steps=2, delays_us=(0.0, 400.0))]


def test_a_slower_host_slows_the_step_by_its_delays(studied):
    quick, slow = (step.run for step in studied[2:4])
    assert (quick.tags["delay_us"], slow.tags["delay_us"]) == (0, 400)
    added_ms = 0.4 * slow.metric("operations")
    for metric in ("host_ms", "predicted_ms", "step_ms"):
        assert slow.metric(metric) - quick.metric(metric) > 0.5 * added_ms > 2.5, metric


def test_rounds_whose_prediction_follows_the_step_leave_no_interval(studied):
    step, measured = studied[0], [10.0, 20.0, 40.0]
    run = replace(step.run, samples={}, metrics={})
    for predicted, ends in (([11.0, 22.0, 44.0], (10, 10)), ([30.0, 20.0, 10.0], (-75, 200))):
        lab08.describe(run, step.program, step.work, predicted, measured)
        low, high = (run.metric(f"off_{end}_percent") for end in ("low", "high"))
        assert (low, high) == pytest.approx(ends)


def test_a_study_predicts_shows_and_repeats(studied):
    pytest.raises(ValueError, lab08.variants, "MoE")
    # Slowed steps come last: what follows them isn't the host that was there before.
    assert [step.run.tags.get("delay_us") for step in studied] == [None, None, 0.0, 400.0]
    long, again = studied[0].run, studied[1].run
    low, off, high = (long.metric(f"off_{end}_percent") for end in ("low", "by", "high"))
    exact = 100 * (long.metric("predicted_ms") / long.metric("step_ms") - 1)
    assert low <= off <= high < 100 and off == pytest.approx(exact)
    assert again.tags == long.tags | {"again": True} and again.metric("step_ms") > 0
    alone = next(lab08.study(texts("moe"), "moe", "grouped", steps=1)).run
    assert alone.metric("launches") < long.metric("launches")
    with pytest.raises(KeyError, match="short"):  # a host is read from no other
        next(lab08.study({"long": texts("moe")["long"]}, "moe", "rewritten", steps=2))
    with pytest.raises(Unavailable, match="GPU"):
        next(lab08.study(texts("moe"), "moe", "captured", steps=2))
