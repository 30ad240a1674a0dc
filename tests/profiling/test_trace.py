"""The trace analysis on traces whose truth can be computed by hand, and on one that PyTorch has
just written.
"""

import gzip
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import AUTOGRAD, RUNS_AHEAD, TWO_STEPS, Training, call, copy, kernel, mark, op

from labutils.profiling.call_stacks import Slice, enclosing, own_time
from labutils.profiling.intervals import total
from labutils.profiling.kernel_categories import category_of, is_thin
from labutils.profiling.trace import SHARES, Trace, cut_to_micro_step, profile


@pytest.fixture(scope="module")
def trace():
    first, *others = TWO_STEPS
    # a trace file is in no order, but its first event is the origin of time
    random.Random(0).shuffle(others)
    return Trace([first, *others])


def us(ms):
    return pytest.approx(ms / 1000, abs=1e-9)


def test_times_of_the_recorded_steps(trace):
    assert trace.steps == 2
    assert trace.step_windows == [(us(0), us(1000)), (us(1000), us(2000))]
    assert trace.wall == (us(0), us(2100))  # with the work that the steps launched
    assert total(trace.kernel_time) == us(130 + 160 + 90)
    when, busy = trace.busy_over_time(bins=4)
    assert when == [us(0), us(250), us(500), us(750)]
    assert busy == pytest.approx([0.0, 130 / 250, 10 / 250, 150 / 250])
    rows = trace.host_breakdown()
    assert rows["data"] == {"ms": us(100), "count": 0.5, "idle_ms": us(100)}
    assert rows["forward"] == {"ms": us(120), "count": 0.5, "idle_ms": us((60 + 50) / 2)}
    assert sum(row["ms"] for row in rows.values()) * 2 == pytest.approx(trace.wall_ms)


def test_counts_and_metrics_are_per_step(trace):
    made = trace.launches()  # six kernels in two steps, from four launches
    assert (made["kernels"], made["launches"], made["graph_launches"]) == (3.0, 1.5, 0.5)
    assert made["copy_calls"] == 1.0
    metrics = trace.metrics()
    assert metrics["traced_gpu_busy"] == pytest.approx(380 / 2100)
    assert (metrics["syncs_per_step"], metrics["sync_ms"]) == (1.0, us((40 + 35) / 2))
    assert (metrics["clip_sync"], metrics["log_idle_ms"]) == (0, us((100 - 5) / 2))
    json.dumps(metrics, allow_nan=False)
    assert trace.metrics(step_ms=0.1, data_ms=0.0)["gpu_busy"] == pytest.approx(190 / 199)


def test_synchronisations_are_blamed_on_the_operator(trace):
    copied, read = trace.waits
    assert (copied.phase, copied.cause, copied.ms) == ("to_device", "aten::to", us(40))
    assert (read.phase, read.cause, read.call) == ("log", "aten::item", "cudaStreamSynchronize")
    on_another_thread = [
        mark("backward", 0, 100),
        kernel("k", 5, 10, 9),
        op("aten::item", 30, 50, AUTOGRAD),
        call("cudaStreamSynchronize", 35, 45, 0, AUTOGRAD),
    ]
    (wait,) = Trace(on_another_thread).waits
    assert (wait.cause, wait.phase) == ("aten::item", "backward")


def test_every_moment_belongs_to_exactly_one_share(trace):
    shares = trace.partition()
    assert tuple(shares) == SHARES
    expected = {"kernels": 380, "copies": 18, "data": 200, "sync": 57, "launch": 35, "host": 1410}
    assert shares == {name: us(total / 2) for name, total in expected.items()}
    assert sum(shares.values()) * trace.steps == pytest.approx(trace.wall_ms)


def test_a_step_timed_without_the_profiler_keeps_the_gpus_time_and_the_measured_wait(trace):
    """Of 0.5 ms, GPU work takes 0.199 and data 0.051 as measured; the rest is shared as it was
    while profiling.
    """
    shares = trace.partition(step_ms=0.5, data_ms=0.051)
    assert shares["kernels"] + shares["copies"] == us(199)
    assert shares["data"] == us(51)
    rest = {"sync": 57, "launch": 35, "host": 1410}
    assert {k: shares[k] for k in rest} == {k: us(250 * v / 1502) for k, v in rest.items()}
    assert sum(shares.values()) == pytest.approx(0.5)
    metrics = trace.metrics(step_ms=0.5, data_ms=0.051)
    assert metrics["gpu_busy"] == metrics["kernels_share"] == pytest.approx(0.19 / 0.5)
    assert metrics["traced_gpu_busy"] == pytest.approx(380 / 2100)
    assert metrics["data_share"] == pytest.approx(0.051 / 0.5)
    assert metrics["traced_step_ms"] == us(1050)


def test_a_wait_for_data_while_a_kernel_runs_costs_nothing():
    trace = Trace(RUNS_AHEAD)
    assert trace.partition()["data"] == us(100)
    # timed without the profiler, the wait is 450 us of 950
    shares = trace.partition(step_ms=0.95, data_ms=0.45)
    assert (shares["kernels"], shares["data"]) == (us(800), us(450 * 100 / 500))
    assert sum(shares.values()) == us(950)


def test_a_cut_holds_the_last_micro_step_and_what_it_launched(tmp_path):
    second_data = [mark("data", 480, 490), {"ph": "s", "cat": "ac2g", "id": 5, "ts": 700, "pid": 1}]
    whole = {"traceEvents": [*TWO_STEPS, *second_data], "traceName": "/home/me/trace.json"}
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    out = cut_to_micro_step(tmp_path / "whole.json", tmp_path / "cut.json.gz")
    cut = Trace.read(out)
    assert [kernel.name[:6] for kernel in cut.kernels] == ["triton", "void a", "flash_"]
    assert list(cut.phase_time) == ["data", "backward", "log"]
    assert cut.phase_time["data"] == [(us(0), us(10))]  # from the micro-step's beginning
    assert cut.wall == (us(0), us(950 - 480)) and cut.steps == 1
    text = gzip.decompress(out.read_bytes()).decode()
    assert "/home/me" not in text and text.count('"ac2g"') == 1 and "process_name" in text


def test_kernels_are_sorted_by_kind_of_work(trace):
    kinds = {"thin GEMM": 50, "foreach": 45, "compiled": 30, "attention": 30}
    kinds |= {"GEMM": 25, "elementwise": 25}
    rows = trace.categories()
    assert {name: row["ms"] for name, row in rows.items()} == {n: us(t) for n, t in kinds.items()}
    assert next(iter(rows)) == "thin GEMM"


def test_timeline_shows_one_window_cut_to_its_edges(trace):
    lanes = trace.timeline((trace.wall[0] + 0.1, trace.wall[0] + 0.43))
    assert list(lanes) == ["host", "host waits", "launches", "GPU"]
    assert lanes["host waits"] == [(us(110), us(40), "synchronisation")]
    thin, cut = (us(220), us(100), "thin GEMM"), (us(300), us(30), "GEMM")
    assert lanes["GPU"] == [thin, cut, (us(132), us(13), "copy")]


def test_pageable_copy_to_the_host_waits_even_alone_but_one_to_the_gpu_does_not():
    events = [
        mark("ProfilerStep#1", 0, 200),
        op("aten::copy_", 0, 50),
        call("cudaMemcpyAsync", 10, 40, 1),
        copy("Memcpy HtoD (Pageable -> Device)", 20, 45, 1),
        op("aten::copy_", 60, 100),
        call("cudaMemcpyAsync", 65, 95, 2),
        copy("Memcpy DtoH (Device -> Pageable)", 70, 90, 2),
        op("aten::copy_", 110, 150),
        call("cudaMemcpyAsync", 112, 115, 3),
        copy("Memcpy DtoH (Device -> Pinned)", 120, 130, 3),
    ]
    assert [(w.call, w.start, w.ms) for w in Trace(events).waits] == [
        ("cudaMemcpyAsync", us(65), us(30))
    ]


def test_pytorchs_own_marks_serve_and_the_profilers_own_wait_is_none_of_the_loops():
    """The update begins behind what a closure computes; the last wait begins after the step."""
    events = [
        mark("ProfilerStep#1", 0, 100),
        mark("Optimizer.step#AdamW.step", 10, 120),
        mark("backward", 20, 50),
        call("cudaLaunchKernel", 60, 65, 1),
        kernel("multi_tensor_apply_kernel", 70, 300, 1),
        call("cudaDeviceSynchronize", 130, 300, 0),
    ]
    trace = Trace(events)
    assert trace.phase_time["optimizer"] == [(us(50), us(100))]
    assert (trace.phase_at(0.06), trace.phase_at(0.03)) == ("optimizer", "backward")
    assert trace.waits == []
    ((launch, ((_, category, ms),), wait),) = trace.launched()
    assert (launch.name, category, ms, wait) == ("cudaLaunchKernel", "foreach", us(230), None)


def test_without_a_gpu_what_does_not_apply_is_absent():
    host_only = [
        e for e in TWO_STEPS if e.get("cat") not in ("kernel", "gpu_memcpy", "cuda_runtime")
    ]
    trace = Trace(host_only)
    assert not trace.on_gpu
    assert trace.launches() == {}
    assert trace.waits == []
    assert trace.partition() == {"data": us(100), "host": us(900)}
    assert trace.partition(step_ms=0.8, data_ms=0.1) == {"data": us(100), "host": us(700)}
    assert set(trace.metrics()) == {"traced_step_ms", "traced_steps", "data_share", "host_share"}
    assert all("idle_ms" not in row for row in trace.host_breakdown().values())
    assert [(w.phase, w.cause) for w in trace.host_reads()] == [("log", "aten::item")]


def test_operators_of_a_cpu():
    nested = [op("aten::linear", 0, 100), op("aten::addmm", 10, 70), op("aten::copy_", 20, 30)]
    kinds = Trace(nested).categories()
    assert kinds["GEMM"] == {"ms": us(90), "count": 2.0}
    assert kinds["casts and layout"] == {"ms": us(10), "count": 1.0}
    assert Trace(nested).timeline() == {"operators": [(us(0), us(100), "GEMM")]}
    loader = mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 40)
    events = [mark("ProfilerStep#1", 0, 100), loader]
    assert Trace(events).partition() == {"data": us(30), "host": us(70)}
    with pytest.raises(ValueError, match="no event with a duration"):
        Trace([{"ph": "M", "name": "process_name"}])


# Files


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize("content", [TWO_STEPS, {"schemaVersion": 1, "traceEvents": TWO_STEPS}])
def test_files_are_read_plain_and_gzipped(tmp_path, packed, content):
    path = tmp_path / ("a.json.gz" if packed is gzip.compress else "a.json")
    written = packed(json.dumps(content).encode())
    path.write_bytes(written)
    assert Trace.read(path).metrics() == Trace(TWO_STEPS).metrics()
    for broken, told in ((written[:-100], "whole"), (packed(b"{}"), "no profiler trace")):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=told):
            Trace.read(path)


# Names and stacks


NAMES = {
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc": "convolution",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
    "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>": "normalisation",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "foreach",
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>": "casts and layout",
    "void convertTensor_kernel<float, __half, float>": "casts and layout",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
    "autograd::engine::evaluate_function: ConvolutionBackward0": "other",
    "aten::transpose": "views and allocation",
}


def test_names_tell_the_kind_of_work():
    assert {name: category_of(name) for name in NAMES} == NAMES


def test_products_that_a_rank_makes_thin():
    assert is_thin("aten::mm", [[4096, 320], [320, 4]])
    assert is_thin("aten::mm", [[8, 4096], [4096, 320], [8, 320]])  # compiled: where to write
    assert is_thin("aten::addmm", [[320], [4096, 4], [4, 320], [], []])  # the bias comes first
    assert is_thin("aten::baddbmm", [[2, 4096, 320], [2, 4096, 8], [2, 8, 320]])
    assert not is_thin("aten::mm", [[4096, 320], [320, 640], [4096, 640]])
    assert not is_thin("aten::mm", [[1, 1280], [1280, 320]])  # a vector is not LoRA
    assert not is_thin("aten::_scaled_mm", [[4096, 320], [320, 640], [4096, 1], [1, 640], [], []])
    assert not is_thin("aten::mm", None)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_stacks_against_looking_at_every_slice(pieces, moments):
    """Nested slices: each piece is put around the pieces before it that it meets."""
    slices = []
    for start, length in pieces:
        met = [s for s in slices if s.start < start + length and start < s.end]
        low = min([start, *(s.start for s in met)])
        high = max([start + length, *(s.end for s in met)])
        slices.append(Slice(low, high, str(len(slices))))
    slices.sort(key=lambda s: (s.start, -s.end))
    moments.sort()
    for moment, stack in zip(moments, enclosing(slices, moments), strict=True):
        assert list(stack) == [s for s in slices if s.start <= moment < s.end]
    covered = len({cell for s in slices for cell in range(s.start, s.end)})
    assert sum(own for _, own in own_time(slices)) == covered


# The real profiler


def test_a_real_trace_knows_its_steps_its_phases_and_who_read_a_value(tmp_path):
    trace = profile(Training("cpu"), steps=5, folder=tmp_path)  # article A1's schedule
    assert trace.steps == trace.metrics()["traced_steps"] == 5
    assert list(tmp_path.glob("*.pt.trace.json")) == [trace.path]
    rows = trace.host_breakdown()
    counted = [name for name, row in rows.items() if row["count"] == 1]
    assert counted == ["to_device", "forward", "backward", "clip", "optimizer", "log"]
    assert sum(row["ms"] for row in rows.values()) * 5 == pytest.approx(trace.wall_ms)
    reads = [read for read in trace.host_reads() if read.phase == "log"]
    assert [read.cause for read in reads] == 2 * trace.steps * ["aten::item"]
    assert {"GEMM", "reduction"} <= set(trace.categories())


def test_a_captured_step_is_never_busier_than_its_trace():
    """40 kernels of 20 us with gaps of 5 us from one launch: 80 % busy, even beside an untraced
    step of 0.9 ms, which bounds it from above."""
    kernels = [kernel("kernel", 25 * i, 25 * i + 20, 1) for i in range(40)]
    events = [mark("ProfilerStep#2", 0, 1000), call("cudaGraphLaunch", 0, 5, 1), *kernels]
    captured = Trace(events)
    metrics = captured.metrics(step_ms=0.9)
    assert metrics["gpu_busy"] == metrics["traced_gpu_busy"] == pytest.approx(0.8)
    assert metrics["kernels_share"] == pytest.approx(0.8 / 0.9)
    assert captured.metrics(step_ms=1.2)["gpu_busy"] == pytest.approx(0.8 / 1.2)
