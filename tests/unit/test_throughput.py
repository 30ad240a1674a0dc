"""The throughput model: its law, its simulated queue, and the timers that feed and check it."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.labs.lab03_dataloader import epoch_start_ms, hand_over_ms
from labutils.profiling.call_timer import CallTimer
from labutils.profiling.dataloader_model import Pipeline, off_the_model
from labutils.recipe import STOCK

COUNTS = (0, 1, 2, 3, 4, 8, 12)


def test_no_worker_means_one_after_the_other() -> None:
    pipeline = Pipeline(read_ms=80, compute_ms=155, cores=16)
    assert pipeline.step_ms(0) == pipeline.simulated_ms(0) == 4 * 235


def test_one_worker_is_enough_where_reading_is_faster_than_computing() -> None:
    pipeline = Pipeline(read_ms=80, compute_ms=155, cores=16)
    assert pipeline.enough_workers == 1
    assert [pipeline.step_ms(n) for n in COUNTS[1:]] == [4 * 155] * 6
    assert [pipeline.simulated_ms(n) for n in COUNTS[1:]] == pytest.approx([4 * 155] * 6)


def test_workers_are_needed_until_they_keep_up() -> None:
    pipeline = Pipeline(read_ms=80, compute_ms=20, cores=16, accumulation=1)
    assert pipeline.enough_workers == 4
    assert [pipeline.step_ms(n) for n in COUNTS] == [100, 80, 40, pytest.approx(80 / 3), 20, 20, 20]
    assert [pipeline.simulated_ms(n) for n in COUNTS] == pytest.approx(
        [100, 80, 40, 80 / 3, 20, 20, 20], rel=0.03
    )


def test_few_cores_share_out_all_processor_time() -> None:
    pipeline = Pipeline(read_ms=60, compute_ms=20, cores=2, accumulation=1)
    assert pipeline.step_ms(8) == 40  # (60 + 20) / 2, although 60 / 8 and 20 are both less
    assert pipeline.simulated_ms(8) == pytest.approx(40, rel=0.03)


def test_taking_a_batch_costs_training_too() -> None:
    assert Pipeline(10, 20, 16, hand_over_ms=5, accumulation=1).step_ms(2) == 25
    assert Pipeline(10, 20, 16, hand_over_ms=5, accumulation=1).step_ms(0) == 30


def test_off_the_model_is_off_by_more_than_the_spread() -> None:
    measured = {0: {"p10": 90, "p90": 95}, 1: {"p10": 90, "p90": 110}, 2: {"p10": 101, "p90": 103}}
    assert off_the_model(measured, dict.fromkeys(range(4), 100)) == {"above": [2], "below": [0]}


@settings(max_examples=150, deadline=None)
@given(
    read=st.floats(1, 200),
    compute=st.floats(1, 200),
    cores=st.integers(1, 16),
    workers=st.integers(1, 16),
    prefetch=st.integers(1, 4),
)
def test_the_simulated_queue_obeys_the_law(
    read: float, compute: float, cores: int, workers: int, prefetch: int
) -> None:
    pipeline = Pipeline(read, compute, cores, prefetch_factor=prefetch)
    law, simulated = pipeline.step_ms(workers), pipeline.simulated_ms(workers)
    assert simulated >= law * (1 - 1e-6)  # no queue beats it
    assert (
        simulated <= pipeline.step_ms(0) * max(1.0, 2 / cores) * 1.05
    )  # and none is worse than taking turns
    if cores > workers:
        assert simulated == pytest.approx(law, rel=0.1)


@pytest.fixture(scope="module")
def slow_rows():
    return SlowRows()


class SlowRows(torch.utils.data.Dataset):
    """Rows that take 20 ms to make."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        time.sleep(0.02)
        return {
            "pixel_values": torch.zeros(3, 8, 8),
            "input_ids": torch.zeros(77, dtype=torch.int64),
        }


def test_a_ready_batch_is_taken_in_no_time(slow_rows: SlowRows) -> None:
    samples = sorted(hand_over_ms(slow_rows, STOCK, read_ms=40, batches=6))
    assert len(samples) == 5
    assert 0 < samples[2] < 15


def test_an_epochs_start_waits_for_its_first_batch(slow_rows: SlowRows) -> None:
    samples = epoch_start_ms(slow_rows, STOCK.but(num_workers=2), epochs=3)
    kept = epoch_start_ms(slow_rows, STOCK.but(num_workers=2, persistent_workers=True), epochs=3)
    assert len(samples) == len(kept) == 2
    assert min(samples) > 20 and min(kept) > 20
    assert sum(kept) < sum(samples)


def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def program() -> list[float]:
    return [work(0.01) for _ in range(5)]


def test_call_timer_times_what_others_call() -> None:
    original = work
    with CallTimer(__name__, "work") as calls:
        assert program() == [0.01] * 5
    assert work is original
    assert len(calls.ms) == 5 and min(calls.ms) >= 10
    assert len(calls.per(2)) == 2 and calls.per(2)[0] == pytest.approx(sum(calls.ms[:2]))
    with pytest.raises(AttributeError, match="nowhere"):
        CallTimer(__name__, "nowhere")


def test_call_timer_lets_go_after_an_error() -> None:
    original = time.sleep
    with pytest.raises(TypeError), CallTimer("time", "sleep") as calls:
        time.sleep("long")
    assert time.sleep is original and len(calls.ms) == 1
