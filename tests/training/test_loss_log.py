"""Losses on their way to the host: none lost, none changed, and NaN stops the run with the step
named.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.training.loss_log import NotFinite, RingLog, SynchronousLog
from labutils.training.memory_log import MemoryLog, read_log

CPU = torch.device("cpu")
ACCUMULATION = 3


class Written(list):
    def __call__(self, values: dict[str, float], step: int) -> None:
        self.append((step, values["train_loss"]))


def feed(
    log: SynchronousLog | RingLog, losses: list[float], accumulation: int = ACCUMULATION
) -> None:
    """Optimizer steps of these mean losses; the micro-batches' own lie around the mean."""
    for mean in losses:
        for index in range(accumulation):
            loss = torch.tensor(mean + (index - (accumulation - 1) / 2) / 8)
            log.micro_step(loss)
            log.end_micro_step(loss)
        log.end_step()


steps = st.lists(st.integers(-50, 50).map(float), max_size=40)


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(1, 5), st.integers(0, 1000), st.sets(st.integers(0, 40), max_size=3))
def test_both_logs_tell_the_same(losses, half, first, flushed):
    """However often the ring goes round, wherever the run began, and whenever it is flushed."""
    synchronous, ring = (written := [Written(), Written()])
    logs = [SynchronousLog(synchronous, ACCUMULATION), RingLog(ring, ACCUMULATION, CPU, half)]
    for log in logs:
        log.start_at(first)
        for index, loss in enumerate(losses):
            feed(log, [loss])
            if index in flushed:
                log.flush()
                assert len(log.losses) == index + 1
        log.close()
        log.close()
    expected = [(first + index + 1, loss) for index, loss in enumerate(losses)]
    for found, log in zip(written, logs, strict=True):
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx(losses, abs=1e-5) == log.losses


def test_the_ring_reads_no_loss_between_its_halves():
    """What it is for: a loss on the device, never asked for by the host while steps run."""

    class Unreadable(torch.Tensor):
        def item(self) -> float:
            raise AssertionError("the host read a loss")

    log = RingLog(Written(), 1, CPU, half=16)
    log.total, log.ring = (tensor.as_subclass(Unreadable) for tensor in (log.total, log.ring))
    feed(log, [1.0] * 40, accumulation=1)
    assert len(log.losses) == 16


@pytest.mark.parametrize(("bad", "at"), [(math.nan, 1), (math.inf, 4), (-math.inf, 11)])
def test_the_run_stops_with_the_step_named(bad, at):
    losses = [1.0] * 20
    losses[at - 1] = bad
    message = rf"{bad} at optimizer step {at}:"
    for log, late in ((SynchronousLog(Written(), 1), 0), (RingLog(Written(), 1, CPU, half=4), 8)):
        with pytest.raises(NotFinite, match=message):
            feed(log, losses, accumulation=1)
        assert log.step <= at + late
        assert log.losses[:-1] == [1.0] * (at - 1)
        assert len(log.write) == at  # the bad one is on record too
        log.close()  # the first finding stands: nothing is raised again
        assert len(log.write) == at


# ------------------------------------------------------------------------------ memory


def running(steps: int) -> SimpleNamespace:
    """As much of a trainer as the log reads: 4 micro-batches an epoch, 2 a step."""
    return SimpleNamespace(step_count=steps, batches=SimpleNamespace(taken=2 * steps, per_epoch=4))


def test_memory_is_logged_every_so_many_steps_and_at_the_last(tmp_path):
    path = tmp_path / "new" / "memory.csv"
    for _ in range(2):  # the second run writes behind the first
        log = MemoryLog(path, steps=25)
        for step in range(1, 26):
            log(running(step))
    lines = read_log(path)
    assert [line["step"] for line in lines] == [10, 20, 25, 10, 20, 25]
    assert [line["epoch"] for line in lines[:3]] == [5, 10, 12.5]
    assert [line["progress_ratio"] for line in lines[:3]] == [0.4, 0.8, 1]
    assert path.read_text().splitlines()[0] == ",".join(MemoryLog.COLUMNS)
    for line in lines:
        assert ("peak_memory_gb" in line) == torch.cuda.is_available()  # absent, never 0
    assert read_log(tmp_path / "none.csv") == []
