"""The launch model against queues that can be gone through by hand, and against itself where two
ways must agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import RUNS_AHEAD, TWO_STEPS, call, copy, kernel, mark, op, work

from labutils.profiling.gpu_specs import find_spec
from labutils.profiling.launch_queue import QUEUE
from labutils.profiling.step_model import Launch, Program, attainable, host_of, replayed_ms, scale
from labutils.profiling.trace import Trace

H200, BLACKWELL, H100 = (
    find_spec(name) for name in ("H200 SXM", "RTX PRO 6000 Blackwell Max-Q", "H100 SXM5")
)


def program(*works: float, waits: tuple[int, ...] = (), kind: str = "GEMM") -> Program:
    """One kernel a launch, of so many ms; the host waits after those in `waits`."""
    launches = (Launch(1.0, ((kind, ms, 1),), at in waits) for at, ms in enumerate(works))
    return Program(tuple(launches), 1)


# The queue of a trace


def test_the_queue_holds_what_the_host_launched_in_its_order():
    queue = Program.of(Trace(TWO_STEPS)).queue
    assert len(queue) == 6
    assert queue[0][1:] == ((("copy", pytest.approx(0.013), 1),), True)
    assert sum(launch.waits for launch in queue) == len(Trace(TWO_STEPS).waits)


def test_only_what_crosses_a_link_is_a_copy():
    """A fill and a copy within the GPU's memory hide as kernels do."""
    names = ("HtoD (Pinned -> Device)", "DtoD (Device -> Device)", "PtoP (Device -> Device)")
    events = [mark("ProfilerStep#1", 0, 100)]
    for place, name in enumerate(names):
        events.append(call("cudaMemcpyAsync", 10 * place, 10 * place + 1, place))
        events.append(copy(f"Memcpy {name}", 40, 50, place))
    events += [call("cudaMemsetAsync", 30, 31, 9), work("gpu_memset", "Memset (Device)", 40, 43, 9)]
    whole = Program.of(Trace(events))
    kinds = {"copy": 0.02, "casts and layout": 0.01, "elementwise": 0.003}
    assert {kind: ms for kind, (ms, _) in whole.work.items()} == pytest.approx(kinds)
    assert (whole.kernel_ms, whole.copy_ms) == (pytest.approx(0.013), pytest.approx(0.02))


# What a step takes


def test_kernels_hide_launches_or_launches_hide_kernels():
    assert replayed_ms(program(*[3.0] * 10), 1.0) == pytest.approx(30)
    assert replayed_ms(program(*[1.0] * 10), 3.0) == pytest.approx(30)
    assert replayed_ms(program(*[1.0] * 10, waits=tuple(range(10))), 3.0) == pytest.approx(40)


def test_a_wait_makes_host_and_gpu_take_turns():
    """Launched at 1, 2 and 3, done at 5, 9 and 13; then it goes on."""
    assert replayed_ms(program(4.0, 4.0, 4.0, waits=(2,)), 1.0) == pytest.approx(13)
    assert replayed_ms(program(4.0, 4.0, 4.0, waits=(0, 1, 2)), 1.0) == pytest.approx(15)


def test_the_host_runs_ahead_by_the_queue_at_most():
    """Behind one kernel of 10 s lie many empty ones: those beyond the queue are given after it is
    done.
    """
    long_queue = program(10_000.0, *[0.0] * (2 * QUEUE), waits=(2 * QUEUE,))
    assert replayed_ms(long_queue, 1.0) == pytest.approx(10_001 + QUEUE, abs=3)


# What a launch takes the host


def learnt(events, step_ms: float) -> float:
    return host_of(Program.of(Trace(events)), step_ms)


def launches(*calls: tuple[float, float], kernel_us: float, gaps_us=(2,) * 9) -> list:
    """Calls from .. to .. microseconds; kernels begin 1 after the call, or after the kernel before
    in the queue, with its gap."""
    events, free = [mark("ProfilerStep#1", 0, 1000)], -9.0
    for place, (start, end) in enumerate(calls):
        begun = max(end + 1, free + gaps_us[place])
        free = begun + kernel_us
        events += call("cudaLaunchKernel", start, end, place), kernel("nvjet_x", begun, free, place)
    return events


def test_the_hosts_time_is_learnt_from_a_step_whose_kernels_are_short():
    """The last 100 microseconds belong to the first launch of the next step."""
    learn = Program.of(Trace(launches((0, 5), (200, 205), (500, 505), (895, 900), kernel_us=2)))
    assert [launch.host_ms for launch in learn.queue] == pytest.approx([0.105, 0.2, 0.3, 0.395])
    c = host_of(learn, 0.5)  # half of what the profiler made of it
    assert (c, replayed_ms(learn, c)) == pytest.approx((0.125, 0.5), rel=1e-4)


def test_a_full_queue_and_a_wait_are_none_of_the_hosts_work():
    """But 8 microseconds between the last launch and the wait are."""
    events = launches((0, 5), (20, 25), (30, 530), (540, 542), kernel_us=2)
    events += [call("cudaStreamSynchronize", 550, 950, 9)]
    queue = Program.of(Trace(events)).queue
    assert [launch.host_ms for launch in queue] == pytest.approx([0.063, 0.02, 0.01, 0.012])


def test_the_gap_is_the_median_between_kernels_that_wait_in_the_queue():
    calls = [(10 * at, 10 * at + 5) for at in range(5)]
    queued = Program.of(Trace(launches(*calls, kernel_us=100, gaps_us=(50, 1, 9, 2, 2))))
    assert (queued.gap_ms, replayed_ms(queued, 0.001)) == pytest.approx((0.002, 0.51))
    assert Program.of(Trace(launches(*calls, kernel_us=2))).gap_ms == 0


def test_a_step_that_the_gpu_decides_tells_nothing_about_the_host():
    assert learnt(RUNS_AHEAD, 0.7) is None and learnt(RUNS_AHEAD, 1.5) is None
    assert learnt(RUNS_AHEAD, 1.7) == pytest.approx(1.7, rel=1e-3)


def test_where_host_and_device_take_turns_any_share_tells():
    """Three milliseconds of four are the operators' own: the fourth is the host's."""
    events = [op("aten::mm", 0, 1500), op("aten::mul", 1500, 3000)]
    assert learnt(events, 4.0) == pytest.approx(0.5, rel=1e-3)
    assert learnt(events, 2.5) == pytest.approx(0, abs=1e-6)  # they were interrupted


# Other cards


def test_a_kind_scales_with_what_bounds_it():
    expected = {"GEMM": 989.4 / 438.9, "attention": 989.4 / 438.9, "elementwise": 3352 / 1792}
    for kind, ratio in (expected | {"copy": 1.0}).items():
        assert scale(kind, H100, BLACKWELL, "bf16") == pytest.approx(ratio)
        assert scale(kind, BLACKWELL, H100, "bf16") == pytest.approx(1 / ratio)
    assert scale("GEMM", H100, BLACKWELL, "bf16", intensity=50) == pytest.approx(3352 / 1792)
    with pytest.raises(ValueError, match="no fp4 peak"):
        attainable(H100, "fp4")


def test_no_kernel_is_shorter_than_an_empty_one():
    one = replace(program(0.002, 1.002, kind="elementwise"), gap_ms=0.1)
    faster = one.on(find_spec("B200"), H200, "bf16", empty_ms=0.002)
    times = [piece.work[0][1] for piece in faster.queue]
    assert [*times, faster.gap_ms] == pytest.approx([0.002, 0.002 + 4.8 / 8, 0.1])
