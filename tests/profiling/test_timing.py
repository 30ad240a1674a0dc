"""Clocks, meters and watchers: that they tell the truth and disturb nothing."""

import time

import pytest
import torch

from labutils.profiling import timing
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.timing import StepClock
from labutils.profiling.utilization_and_power import Utilization

# The time of steps


def test_a_step_lasts_from_the_end_of_one_to_the_end_of_the_next(monkeypatch):
    now = iter([100.0, 0, 100.010, 100.035, 100.040, 100.060])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now) or 100.0)
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for waited in (1.0, 2.0, 0.0):
        clock.mark(waited)
    times = clock.stop()  # 20 ms after the last step: in the block's time, in no step's
    assert times.step_ms == pytest.approx([10, 25, 5])
    assert times.data_ms == [1.0, 2.0, 0.0]
    assert times.wall_ms == [pytest.approx(60 / 3)]


# What a driver tells


def test_a_failing_reading_never_reaches_the_loop():
    def read():
        raise OSError("the driver has gone")

    watched = Utilization(interval_s=0.01)
    watched._read = read
    with watched:
        time.sleep(0.03)
    assert (watched.samples, watched.share) == ([], None)
    watched = Utilization(interval_s=0.01)
    with pytest.raises(KeyError), watched:
        raise KeyError
    assert not watched._thread.is_alive()


def test_the_mean_is_over_time_and_not_over_readings():
    watched = Utilization()
    watched.samples = [
        {"t": t, "x": x} for t, x in ((0.0, 0.0), (1.0, 1.0), (1.5, 0.0), (4.0, 0.5))
    ]
    assert watched.mean("x") == pytest.approx((1 * 1.0 + 0.5 * 0.0 + 2.5 * 0.5) / 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is read without a GPU")
def test_without_a_gpu_the_cpu_is_watched():
    with Utilization(interval_s=0.05) as watched:
        sum(range(1_000_000))
    assert watched.metrics() == {"cpu_utilization": watched.share}


# A slower host


def product_and_sum(x):
    """Two products, a view between them, and a sum."""
    return (x @ x).t().matmul(x).sum()


def test_operations_are_delayed_forward_and_backward_and_views_are_not():
    x = torch.rand(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(product_and_sum(x), x)
    began = time.perf_counter()
    with SlowerHost(200) as host:
        loss = product_and_sum(x)
        forward = host.delayed
        torch.empty(3).detach()
        assert host.delayed == forward == 3
        (gradient,) = torch.autograd.grad(loss, x)
    assert host.delayed >= forward + 5  # the sum's gradient is a view; four products, an addition
    assert 1e3 * (time.perf_counter() - began) >= host.delayed * 0.2
    assert torch.equal(gradient, expected)
    with pytest.raises(ValueError, match="0 microseconds"):
        SlowerHost(-1)
