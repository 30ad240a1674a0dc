"""The clock of steps, against a clock of our own."""

from __future__ import annotations

import pytest
import torch

from labutils.profiling import step_timer
from labutils.profiling.step_timer import StepClock, StepTimes


@pytest.fixture
def now(monkeypatch):
    """A host clock that moves when told to, in seconds."""
    clock = {"now": 100.0}
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: clock["now"])

    def pass_(seconds: float) -> None:
        clock["now"] += seconds

    return pass_


def test_a_step_lasts_from_the_end_of_one_to_the_end_of_the_next(now):
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for duration, waited in ((0.010, 1.0), (0.025, 2.0), (0.005, 0.0)):
        now(duration)
        clock.mark(waited)
    now(0.020)  # after the last step: in the block's time, in no step's
    times = clock.stop()
    assert times.step_ms == pytest.approx([10, 25, 5])
    assert times.data_ms == [1.0, 2.0, 0.0]
    assert times.wall_ms == [pytest.approx(60 / 3)]


def test_a_clock_starts_anew(now):
    clock = StepClock(torch.device("cpu"))
    blocks = []
    for duration in (0.010, 0.020):
        clock.start()
        now(duration)
        clock.mark(0.0)
        blocks.append(clock.stop())
        now(5)
    assert [block.step_ms for block in blocks] == [[pytest.approx(10)], [pytest.approx(20)]]
    assert blocks[0].data_ms is not blocks[1].data_ms


def test_no_step_is_no_time(now):
    clock = StepClock(torch.device("cpu"))
    clock.start()
    now(1)
    assert clock.stop() == StepTimes([], [], [])


def test_blocks_add_up():
    times = StepTimes([1.0], [0.1], [1.1])
    times.extend(StepTimes([2.0, 3.0], [0.2, 0.3], [2.6]))
    assert times == StepTimes([1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [1.1, 2.6])


def test_on_a_gpu_the_host_waits_only_before_and_after_the_block(monkeypatch):
    """With CUDA's events played by our own: the times are theirs, the wall clock's is the host's."""
    waits, recorded = [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)
            self.at = 7.0 * len(recorded)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(len(recorded)))
    clock = StepClock(torch.device("cuda"))
    clock.start()
    for _ in range(3):
        clock.mark(0.5)
    times = clock.stop()
    assert times.step_ms == [7.0, 7.0, 7.0]
    assert waits == [0, 4]
