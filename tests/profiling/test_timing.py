"""Clocks, meters and watchers: that they tell the truth and disturb nothing."""

import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from labutils.profiling import timing
from labutils.profiling.call_stacks import Frame
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.syncs import SyncSite, find_syncs, sites_of, watch_syncs, with_lines
from labutils.profiling.timing import StepClock
from labutils.profiling.utilization import Energy, Utilization

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
    with Energy() as energy:
        pass
    assert energy.joules is None and energy.seconds > 0


# Synchronisations


@pytest.fixture
def fake_gpu(monkeypatch):
    """A torch.cuda that has a GPU and remembers its synchronisation debug mode."""
    state = {"mode": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: state.update(mode=mode))
    return state


def read_value():
    warnings.warn("called a synchronizing CUDA operation (...)", UserWarning, stacklevel=1)


def test_the_very_line_is_named(fake_gpu):
    (site,) = find_syncs(SimpleNamespace(step=lambda: [read_value(), read_value()]), steps=3)
    line = read_value.__code__.co_firstlineno + 1
    assert (site.frame.line, site.count, site.library) == (line, 2.0, None)
    assert site.source.startswith("warnings.warn(")


def test_mode_and_other_warnings_are_left_as_they_were(fake_gpu):
    with pytest.warns(UserWarning, match="something else"), watch_syncs() as seen:
        assert fake_gpu["mode"] == "warn"
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert (fake_gpu["mode"], seen) == (0, [])
    with pytest.raises(RuntimeError), watch_syncs():
        raise RuntimeError
    assert fake_gpu["mode"] == 0


def test_a_traces_rows_get_the_exact_line():
    own = Frame("/home/me/labutils/training.py", 77, "step")
    scaler = Frame("/v/lib/python3.12/site-packages/torch/amp/grad_scaler.py", 351, "<genexpr>")
    sites = sites_of([(own, scaler), (own, scaler), (own,)])
    assert [(s.frame, s.library, s.count) for s in sites] == [(own, scaler, 2), (own, None, 1)]
    where = {"where": "labutils/training.py: step", "library": str(scaler)}
    rows = [where, {"where": "labutils/training.py: log"}, {"where": "labutils/training.py: other"}]
    logs = [SyncSite(Frame("labutils/training.py", n, "log"), None, f"{n}", 1) for n in (95, 93)]
    found = with_lines(rows, [SyncSite(own, scaler, "scaler.step()", 1), *logs])
    assert found[0] == rows[0] | {"line": 77, "source": "scaler.step()"}
    assert found[1] == rows[1] | {"line": [93, 95], "source": "93 | 95"}
    assert found[2] == rows[2]


# A slower host


def product_and_sum(x):
    """Two products, a view between them, and a sum."""
    return (x @ x).t().matmul(x).sum()


def test_operations_are_delayed_forward_and_backward_and_views_are_not():
    x = torch.rand(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(product_and_sum(x), x)
    with SlowerHost(200) as host:
        loss = product_and_sum(x)
        forward = host.delayed
        torch.empty(3).detach()
        assert host.delayed == forward == 3 < host.calls
        (gradient,) = torch.autograd.grad(loss, x)
    assert host.delayed >= forward + 5  # the sum's gradient is a view; four products, an addition
    assert host.waited_ms >= host.delayed * 0.2
    assert torch.equal(gradient, expected)
    with pytest.raises(ValueError, match="0 microseconds"):
        SlowerHost(-1)
