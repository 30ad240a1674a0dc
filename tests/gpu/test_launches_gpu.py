"""The launch model on a GPU: what a trace's queue holds, what a short step tells, slower hosts."""

from __future__ import annotations

import pytest

from labutils.labs import lab08_launch_bound
from labutils.labs.lab08_launch_bound import batch_of, variants
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.step_model import HOST_DECIDES_BELOW, Program, replayed_ms
from labutils.training import Trainer
from labutils.training.free_memory import make_room
from labutils.training.one_batch import OnOneBatch
from labutils.workloads import open_workload


@pytest.fixture(scope="module")
def dense():
    yield (opened := open_workload("qwen3-lora-long", scale="small", device="cuda"))
    make_room(opened)


@pytest.fixture(scope="module")
def moe():
    yield (opened := open_workload("gpt-oss-lora-long", scale="small", device="cuda"))
    make_room(opened)


@pytest.fixture(scope="module")
def short():
    names = {"dense": "qwen3-lora-short", "moe": "gpt-oss-lora-short"}
    return {model: open_workload(name, "small", device="cuda") for model, name in names.items()}


def on_typical_texts(trainer):
    return OnOneBatch(trainer, batch_of(trainer.workload, trainer.recipe))


def test_the_queue_holds_every_kernel_of_the_trace(moe):
    with Trainer(moe, variants("moe")["loop"]) as trainer:
        there = on_typical_texts(trainer)
        there.timed(0, warmup=2)
        trace = there.traced()
    program, counted = Program.of(trace), trace.launches()
    kernels = sum(count for kind, (_, count) in program.work.items() if kind != "copy")
    # Fills count as kernels.
    assert kernels / program.steps == pytest.approx(counted["kernels"], rel=0.1)
    assert program.launches == pytest.approx(counted["launches"] + counted["copy_calls"], rel=0.1)
    assert program.waits > 10  # the loop asks which experts were chosen


def test_a_captured_step_is_a_handful_of_launches(moe):
    with Trainer(moe, variants("moe")["captured"]) as trainer:
        there = on_typical_texts(trainer)
        there.timed(0, warmup=2)
        program = Program.of(there.traced())
        assert program.launches < 30
        plain = min(there.timed(5))
        with SlowerHost(100):
            assert min(there.timed(5)) < plain + 0.2 * program.launches + 1
    # small kernels: gaps between them count
    assert replayed_ms(program, 0.005) == pytest.approx(plain, rel=0.5)


@pytest.mark.parametrize(
    ("family", "way"), [("dense", "loop"), ("moe", "grouped"), ("moe", "rewritten")]
)
def test_steps_are_predicted(family, way, dense, moe, short):
    texts = {"long": {"dense": dense, "moe": moe}[family], "short": short[family]}
    step, _ = lab08_launch_bound.study(texts, family, way, steps=8)
    metric = step.run.metric
    assert abs(metric("off_by_percent")) < 35
    short_busy = metric("short_kernels_ms") / metric("short_ms")
    assert way != "loop" or (short_busy < HOST_DECIDES_BELOW and 1 < metric("host_us") < 200)
    assert step.lanes["host"] and step.lanes["GPU"] and 0 <= metric("idle_share") < 1
    assert metric("predicted_ms") >= 0.99 * max(metric("kernels_ms"), 1e-3)


def test_a_slower_host_slows_a_step_that_it_decides(dense, short):
    with Trainer(dense, variants("dense")["loop"]) as trainer:
        there = OnOneBatch(trainer, batch_of(short["dense"], trainer.recipe))
        there.timed(0, warmup=2)
        with SlowerHost() as host:
            quick = min(there.timed(4))
        delayed = host.delayed / 4
        with SlowerHost(50):
            slow = min(there.timed(4))
    assert delayed > 500  # the backward pass, on its own thread, is seen as well
    assert slow - quick == pytest.approx(delayed * 0.05, rel=0.3)
