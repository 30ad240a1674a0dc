"""Losses on their way to the host: none lost, none changed, and NaN stops the run with the step
named.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.training.loss_log import NotFinite, RingLog, SynchronousLog

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
    for log, late in ((SynchronousLog(Written(), 1), 0), (RingLog(Written(), 1, CPU, half=4), 8)):
        with pytest.raises(NotFinite, match=rf"{bad} at optimizer step {at}:"):
            feed(log, losses, accumulation=1)
        assert log.step <= at + late
        assert log.losses[:-1] == [1.0] * (at - 1)
        assert len(log.write) == at  # the bad one is on record too
        log.close()  # the first finding stands: nothing is raised again
        assert len(log.write) == at
