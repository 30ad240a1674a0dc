"""Background readings of utilisation: true, and harmless whatever fails."""

import time

import pytest

from labutils.profiling import utilization
from labutils.profiling.machine import default_device
from labutils.profiling.sampling import Sampler
from labutils.profiling.utilization import Utilization


def burn(seconds):
    """Keep one core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


def test_a_sampler_reads_from_beginning_to_end():
    count = iter(range(1000))
    with Sampler(lambda: {"x": next(count)}, interval_s=0.01) as sampler:
        time.sleep(0.1)
    times, values = sampler.series("x")
    assert len(values) >= 3
    assert values == sorted(values)
    assert times == sorted(times)
    assert times[-1] >= 0.09
    assert sampler.series("y") == ([], [])


def test_the_first_reading_is_taken_before_the_block_whatever_it_does():
    with Sampler(dict, interval_s=60) as sampler:
        assert len(sampler.samples) == 1
    assert len(sampler.samples) == 2


def test_a_failing_reading_never_reaches_the_loop():
    def read():
        raise OSError("the driver has gone")

    with Sampler(read, interval_s=0.01) as sampler:
        time.sleep(0.03)
    assert sampler.samples == []
    assert sampler.mean("x") is None
    assert sampler.failure == "OSError: the driver has gone"


def test_an_error_of_the_loop_passes_through_and_ends_the_thread():
    sampler = Sampler(dict, interval_s=0.01)
    with pytest.raises(KeyError), sampler:
        raise KeyError
    assert not sampler._thread.is_alive()


def test_no_interval_is_refused():
    with pytest.raises(ValueError, match="above 0 seconds"):
        Sampler(dict, interval_s=0)


def test_the_mean_is_over_time_and_not_over_readings():
    sampler = Sampler(dict)
    sampler.samples = [
        {"t": 0.0, "x": 0.0},
        {"t": 1.0, "x": 1.0},
        {"t": 1.5, "x": 0.0},
        {"t": 4.0, "x": 0.5},
    ]
    assert sampler.mean("x") == pytest.approx((1 * 1.0 + 0.5 * 0.0 + 2.5 * 0.5) / 4)


@pytest.mark.skipif(default_device() == "cuda", reason="what is read without a GPU")
def test_without_a_gpu_the_cpu_is_watched():
    with Utilization(interval_s=0.05) as busy:
        burn(0.4)
    with Utilization(interval_s=0.05) as idle:
        time.sleep(0.4)
    assert busy.what == "cpu"
    assert busy.driver_samples == []
    assert busy.share > 2 * idle.share
    assert busy.metrics() == {"cpu_utilization": busy.share}
    assert 0.01 < busy.series("memory_gb")[1][0] < 1000


class FakeGpu:
    """What nvitop says of a card whose driver does not tell the power."""

    def gpu_utilization(self):
        return 44

    def memory_used(self):
        return 8_000_000_000

    def power_usage(self):
        return "N/A"

    def sm_clock(self):
        return 1980


def test_a_gpu_is_read_through_nvitop_and_what_it_does_not_say_is_absent(monkeypatch):
    buffers = iter([[(1_000_000, 0.1)], [(1_100_000, 0.4), (1_200_000, 0.6)]])
    monkeypatch.setattr(utilization, "gpu_device", FakeGpu)
    monkeypatch.setattr(utilization, "_driver_buffer", lambda device, since: next(buffers))
    with Utilization(interval_s=0.01) as watched:
        time.sleep(0.05)
    assert watched.what == "gpu"
    assert {k: v for k, v in watched.samples[0].items() if k != "t"} == {
        "gpu": pytest.approx(0.44),
        "memory_gb": 8.0,
        "sm_clock_mhz": 1980,
    }
    assert watched.metrics() == {"gpu_utilization": pytest.approx(0.44)}
    (early, low), (late, high) = watched.driver_samples
    assert (low, high) == (0.4, 0.6)
    assert late - early == pytest.approx(0.1)
