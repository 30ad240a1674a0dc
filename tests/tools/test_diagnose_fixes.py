"""The diagnosis: queues replayed, rules on made-up steps of a GPU, budgets and gains that hold for
any queue.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import traces
from gpu_steps import Steps
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.layers.cuda_graph import float32_rounded
from labutils.recipe import STOCK
from labutils.results.records import Run
from labutils.tools.diagnose import WORTH, budget, diagnose, fixes, sources, telling
from labutils.tools.diagnose.evidence import Evidence, Loader, Optimizer
from labutils.tools.diagnose.rates import Rates
from labutils.tools.diagnose.recorded import Recorded, queue_of
from labutils.tools.diagnose.replay import (
    READ,
    SPREAD,
    TO_DEVICE,
    TRACED_HOST,
    Piece,
    Product,
    Queue,
    fitted,
    gain,
    without_waits,
)

CONFIG = {
    "threads": 1,
    "cuda_available": True,
    "world_size": 1,
    "launch_blocking": False,
    "anomaly": False,
    "matmul_tf32": False,
    "cudnn_tf32": True,
    "peak_gb": 2.0,
    "memory_gb": 80.0,
}


def record(step_ms, data_ms=0.0, calls=(), batches=(), host_ms=None, **changes):
    """What the hooks would have written down of a script on a GPU."""
    return {
        "device": "cuda",
        "step_ms": [step_ms] * 5,
        "data_ms": [data_ms] * 5,
        "host_step_ms": [host_ms] * 3 if host_ms else [],
        "backwards": 1.0,
        "closures": 0.0,
        "batches_per_step": 1.0,
        "fetch_cpu_ms": data_ms,
        "calls": list(calls),
        "sync_lines": {},
        "batches": list(batches) or [batch()],
        "optimizer": {
            "name": "AdamW",
            "tensors": 10,
            "bytes": 1e6,
            "fused": True,
            "foreach": None,
            "takes_fused": True,
        },
        "config": CONFIG | changes.pop("config", {}),
    } | changes


def batch(**changes):
    facts = {"examples": 32, "bytes": 1e6, "pinned": False, "num_workers": 2, "pin_memory": False}
    return facts | {"persistent_workers": True, "batch_size": 32, "length": 100} | changes


def of_steps(steps: Steps, slowed=1.0, **changes) -> Evidence:
    """Evidence of a script whose steps took `1 / slowed` of the made-up time without the profiler."""
    trace = Recorded(steps.trace_events())
    evidence = sources.of_record(record(trace.wall_ms / trace.steps / slowed, **changes), trace)
    return replace(evidence, rates=Rates("cuda", here=False))


def products(
    steps,
    count=20,
    gpu=500.0,
    name="sm80_xmma_gemm_bf16bf16_bf16f32_f32",
    types=("c10::BFloat16",) * 2,
):
    for _ in range(count):
        steps.launch(name, gpu, 20, "aten::mm", [[4096, 4096], [4096, 4096]], list(types), blocks=8)


# -------------------------------------------------------------------------------- planted, on a GPU


def tuned():
    """Large products, batches that come in time, nothing that waits."""
    steps = Steps()
    for _ in range(3):
        steps.step()
        steps.copy_in(20, pageable=False)
        products(steps)
    return steps


def test_a_tuned_loop_raises_no_alarm():
    found = diagnose(of_steps(tuned()))
    assert found.worth_it == ()
    assert "No fix is predicted" in telling.text(found)


def test_no_pinning():
    steps = Steps()
    for _ in range(3):
        steps.step()
        steps.copy_in(3000)
        products(steps, 50, gpu=60)
    fix = diagnose(of_steps(steps)).worth_it[0]
    assert fix.name == "pinning"
    pinned = Steps()
    for _ in range(3):
        pinned.step()
        pinned.copy_in(3000 * fixes.PINNED, pageable=False)
        products(pinned, 50, gpu=60)
    assert fix.gain == pytest.approx(1 - lasts(pinned) / lasts(steps), abs=0.02)
    assert diagnose(of_steps(pinned)).fix("pinning") is None


def reading(times, reads=True):
    steps = Steps()
    for _ in range(3):
        steps.step()
        for _ in range(times):
            products(steps, 5, gpu=30)
            if reads:
                steps.item()
    return steps


def lasts(steps):
    """Milliseconds of made-up steps: until host and device are done."""
    return max(steps.now, steps.done) / 1e3


def test_values_read_in_every_step():
    read = {
        "kind": "read",
        "place": "/x/train.py:41",
        "what": ".item()",
        "per_step": 20.0,
        "ms": 1.0,
    }
    found = diagnose(of_steps(reading(20), calls=[read]))
    fix = found.fix("syncs")
    assert fix.gain == pytest.approx(
        1 - lasts(reading(20, reads=False)) / lasts(reading(20)), abs=0.02
    )
    assert "20 times a step" in fix.reason
    assert fix.sources == ("/x/train.py:41",)
    assert found.worth_it[0].name == "syncs"


def test_the_traces_function_stands_for_a_line_that_is_not_known(tmp_path):
    path = tmp_path / "x.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": reading(20).trace_events()}))
    found = diagnose(sources.of_trace(path))
    assert found.fix("syncs").sources == ("train.py: train",)
    assert "as traced" not in telling.text(found)
    assert "the profiler makes the host slower" in telling.text(found)


def tiny_kernels():
    steps = Steps()
    for _ in range(3):
        steps.step()
        for _ in range(400):
            steps.launch(gpu=2, host=10)
    return steps


def test_tiny_kernels():
    found = diagnose(of_steps(tiny_kernels()))
    assert {fix.name for fix in found.worth_it[:2]} == {"capture", "compile"}
    assert found.fix("capture").gain > 0.7
    assert found.budget[budget.LAUNCH] + found.budget[budget.HOST] > 0.7 * found.evidence.step_ms


def test_float32_products():
    steps = Steps()
    for _ in range(3):
        steps.step()
        products(steps, name="cutlass_80_simt_sgemm_128x128", types=("float", "float"))
    found = diagnose(of_steps(steps))
    assert found.worth_it[0].name == "precision"
    assert found.fix("precision").gain == pytest.approx(1 - 1 / 12, abs=0.08)
    halves = diagnose(of_steps(steps, config={"matmul_tf32": True}))
    assert "fp32" in {
        p.dtype for p in halves.evidence.queue.pieces
    }  # what the kernel's name says goes first


def test_products_in_tf32_gain_less():
    steps = Steps()
    for _ in range(3):
        steps.step()
        products(steps, name="sm90_xmma_gemm_f32f32_tf32f32_f32_tn", types=("float", "float"))
    assert diagnose(of_steps(steps)).fix("precision").gain == pytest.approx(0.45, abs=0.06)


def small_kernels(blocks):
    steps = Steps()
    for _ in range(3):
        steps.step()
        for _ in range(60):
            steps.launch("sm80_xmma_gemm_bf16bf16", 30, 10, blocks=blocks)
    return steps


def test_batches_of_one_that_fill_a_part_of_the_gpu():
    one = [batch(examples=1, batch_size=1)]
    found = diagnose(of_steps(small_kernels(0.1), batches=one))
    assert found.worth_it[0].name == "batch size"
    assert found.worth_it[0].per == "example"
    assert found.worth_it[0].gain == pytest.approx(1 - 1 / 8, abs=0.05)
    assert (
        diagnose(of_steps(small_kernels(8), batches=one)).fix("batch size").gain < 0.1
    )  # full already
    assert diagnose(of_steps(small_kernels(0.1))).fix("batch size") is None  # 32 examples


class AtMost(Rates):
    """A machine of 400 TFLOP/s in every format."""

    def flops_ms(self, flops, dtype):
        return flops / 4e11


@pytest.mark.parametrize(("ms", "shorter"), [(1.0, 0.6), (10.0, 10.0)])
def test_a_product_near_the_machines_rate_shrinks_with_its_rows_in_however_few_blocks(ms, shorter):
    evidence = replace(of_steps(tuned()), rates=AtMost("cuda"))
    large = Piece(
        "GEMM", ms, product=Product(8192, 4096, 4096, 1, "bf16"), fill=1.0
    )  # 0.69 ms at that rate
    assert fixes.grown_ms(evidence, large, 0.6) == pytest.approx(shorter)


@pytest.mark.parametrize("fill", [0.2, 1.0, 3.0])
def test_a_product_timed_a_little_faster_is_never_predicted_to_jump(fill):
    """From far below the machine's rate to its rate, in steps of 1 %."""
    evidence = replace(of_steps(tuned()), rates=AtMost("cuda"))
    product = Product(8192, 4096, 4096, 1, "bf16")
    fastest = evidence.rates.flops_ms(product.flops, "bf16")
    timed = [fastest * 1.01**n for n in range(250)]
    left = [
        fixes.grown_ms(evidence, Piece("GEMM", ms, product=product, fill=fill), 0.6) / ms
        for ms in timed
    ]
    assert left[0] == pytest.approx(0.6)
    assert left[-1] == pytest.approx(max(1, 0.6 * fill) / max(1, fill))
    assert all(-1e-9 < after - before < 0.02 for before, after in zip(left, left[1:], strict=False))


def test_a_larger_batch_has_to_fit():
    one = [batch(examples=1, batch_size=1)]
    fits = diagnose(of_steps(small_kernels(0.1), batches=one, config={"peak_gb": 30.0}))
    assert "batch_size=2" in fits.fix("batch size").do
    assert (
        diagnose(of_steps(small_kernels(0.1), batches=one, config={"peak_gb": 70.0})).fix(
            "batch size"
        )
        is None
    )


def test_synchronous_logging():
    steps = Steps()
    for _ in range(3):
        steps.step()
        products(steps, 4)
        steps.item()
        steps.host(4000)
    calls = [
        {"kind": "write", "place": "/x/train.py:7", "what": "fsync()", "per_step": 1.0, "ms": 4.0}
    ]
    found = diagnose(of_steps(steps, calls=calls))
    assert found.worth_it[0].name == "logging"
    assert found.worth_it[0].gain == pytest.approx(0.65, abs=0.1)
    assert found.worth_it[0].sources == ("/x/train.py:7",)


def waiting(data):
    steps = Steps()
    for _ in range(3):
        steps.step()
        steps.host(data, "data")
        products(steps, 10, gpu=100.0)
        steps.item()
    return steps


def test_no_workers():
    found = diagnose(
        of_steps(waiting(5000), data_ms=5.0, batches=[batch(num_workers=0)], fetch_cpu_ms=0.5)
    )
    assert found.worth_it[0].name == "workers"
    assert found.worth_it[0].gain > 0.5
    assert found.budget[budget.DATA] == pytest.approx(5.0, rel=0.1)


def test_workers_are_no_use_where_cores_are_short():
    evidence = of_steps(
        waiting(5000), data_ms=5.0, batches=[batch(num_workers=0)], fetch_cpu_ms=5.0
    )
    assert fixes.workers(replace(evidence, cores=1)).gain < 0.2
    assert fixes.workers(replace(evidence, cores=8)).gain > 0.5


def test_too_few_workers_need_more():
    evidence = of_steps(waiting(5000), data_ms=5.0, batches=[batch(num_workers=1)])
    assert fixes.workers(replace(evidence, cores=16)).changes["num_workers"] > 2
    assert fixes.workers(replace(evidence, cores=1)) is None


def test_padding():
    padded = [batch(tokens=1000, useful=300)]
    full = diagnose(of_steps(small_kernels(8), batches=padded))
    assert full.worth_it[0].name == "padding"
    assert full.worth_it[0].gain == pytest.approx(0.7, abs=0.05)
    assert (
        diagnose(of_steps(small_kernels(0.1), batches=padded)).fix("padding").gain < 0.1
    )  # as short with fewer tokens


def test_a_loop_optimizer():
    steps = Steps()
    for _ in range(3):
        steps.step()
        products(steps, 4)
        steps.item()
        began = steps.now
        for _ in range(300):
            steps.launch(gpu=2, host=10)
        steps.marked("optimizer", began)
    facts = {
        "name": "AdamW",
        "tensors": 25,
        "bytes": 1e6,
        "fused": None,
        "foreach": False,
        "takes_fused": True,
    }
    found = diagnose(of_steps(steps, optimizer=facts))
    assert found.fix("optimizer").gain > 0.3
    assert found.budget[budget.OPTIMIZER] > 0


def test_what_is_computed_again():
    steps = Steps()
    for _ in range(3):
        steps.step()
        for _ in range(10):
            steps.launch("gemm_bf16", 100, 10, "aten::linear")
        began = steps.now
        for _ in range(10):
            node = steps.now
            steps.launch("gemm_bf16", 100, 10, "aten::linear")
            for _ in range(2):
                steps.launch("gemm_bf16", 100, 10, "aten::mm")
            steps.events.append(
                traces.op("autograd::engine::evaluate_function: MmBackward0", node, steps.now)
            )
        steps.marked("backward", began)
    found = diagnose(of_steps(steps))
    assert found.fix("checkpointing").gain == pytest.approx(0.25, abs=0.03)
    assert (
        diagnose(of_steps(steps, config={"peak_gb": 70.0})).fix("checkpointing") is None
    )  # there is no room


@pytest.mark.parametrize(
    ("kernel", "types", "found"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn", ("float",) * 2, "tf32"),
        ("cutlass_80_tensorop_s1688gemm_128x256", ("float",) * 2, "tf32"),
        ("ampere_fp16_s1688gemm_fp16_256x128", ("c10::Half",) * 2, "fp16"),
        ("cutlass_80_simt_sgemm_128x128", ("float",) * 2, "fp32"),
        ("nvjet_tst_128x256_64x4_gemm", ("c10::BFloat16",) * 2, "bf16"),
    ],
)
def test_the_format_of_a_product_is_its_kernels_or_else_its_inputs(kernel, types, found):
    steps = Steps()
    steps.step()
    products(steps, 2, name=kernel, types=types)
    evidence = of_steps(steps)
    assert {fixes.format_of(evidence, p) for p in evidence.queue.pieces if p.ms} == {found}


# -------------------------------------------------------------------------------------- the replay


def test_the_replay_is_the_launch_models():
    host_bound = Queue(tuple(Piece("GEMM", 0.01, 0.05) for _ in range(100)))
    assert host_bound.step_ms == pytest.approx(5.0, rel=0.01)
    device_bound = Queue(tuple(Piece("GEMM", 0.05, 0.01) for _ in range(100)))
    assert device_bound.step_ms == pytest.approx(5.0, rel=0.01)
    assert replace(device_bound, takes_turns=True).step_ms == pytest.approx(6.0)
    waits = Queue(tuple(Piece("GEMM", 0.05, 0.01, waits=READ) for _ in range(100)))
    assert waits.step_ms == pytest.approx(6.0, rel=0.01)
    assert gain(waits, waits.changed(without_waits(READ))) == pytest.approx(1 / 6, abs=0.01)
    assert gain(waits, waits.changed(without_waits(TO_DEVICE))) == 0


def test_a_traced_queue_has_the_traces_waits_and_reasons():
    steps = Steps()
    steps.step()
    steps.copy_in()
    products(steps, 2)
    steps.item()
    queue = queue_of(Recorded(steps.trace_events()))
    assert [piece.waits for piece in queue.pieces if piece.waits] == [TO_DEVICE, READ]
    assert [p.product for p in queue.pieces if p.product] == [
        Product(4096, 4096, 4096, 1, "bf16")
    ] * 2


def test_the_host_is_fitted_to_a_step_that_it_decides():
    traced = queue_of(Recorded(tiny_kernels().trace_events()))
    assert fitted(traced, 2.0).step_ms == pytest.approx(2.0, rel=0.02)
    assert fitted(traced, 6.0).step_ms == pytest.approx(6.0, rel=0.02)


def test_where_kernels_decide_the_idle_start_tells_the_hosts_time():
    traced = queue_of(Recorded(tuned().trace_events()))
    found = fitted(traced, traced.device_ms, from_idle_ms=0.1)
    assert found.total("host_ms") == pytest.approx(0.1, rel=0.05)
    assert fitted(traced, traced.device_ms).total("host_ms") < traced.total("host_ms")


@pytest.mark.parametrize("data_ms", [0.0, 20.0, 50.0])
@pytest.mark.parametrize("step", [0.98, 1.0, 1.02])
@pytest.mark.parametrize("from_idle", [0.98, 1.0, 1.02])
def test_a_host_that_waits_within_the_step_is_told_by_neither_time(data_ms, step, from_idle):
    """For data, and at the end for the device: it would take as long however fast it was."""
    kernels = [Piece("GEMM", 0.1, 0.03) for _ in range(1000)]
    traced = Queue(
        (replace(kernels[0], data_ms=data_ms), *kernels[1:-1], replace(kernels[-1], waits=READ))
    )
    lasts = traced.lasts_ms(TRACED_HOST)
    found = fitted(traced, step * lasts, from_idle * lasts)
    assert found.total("host_ms") == pytest.approx(TRACED_HOST * 30, rel=0.01)
    as_traced = fitted(traced, step * lasts, untold=1.0)
    assert as_traced.total("host_ms") == pytest.approx(30, rel=0.01)


pieces = st.builds(
    Piece,
    kind=st.sampled_from(
        ["GEMM", "elementwise", "reduction", "copy", "attention", "casts and layout", "convolution"]
    ),
    ms=st.floats(0, 5),
    host_ms=st.floats(0.001, 1),
    phase=st.sampled_from(["", "backward", "optimizer", "clip", "encode"]),
    waits=st.sampled_from(["", "", "", READ, TO_DEVICE]),
    data_ms=st.sampled_from([0.0, 0.0, 3.0]),
    log_ms=st.sampled_from([0.0, 0.0, 2.0]),
    dtype=st.sampled_from(["", "fp32", "bf16", "tf32"]),
    fill=st.floats(0.01, 4),
)
queues = st.builds(
    Queue,
    st.lists(pieces, min_size=1, max_size=30).map(tuple),
    st.integers(1, 3),
    st.booleans(),
)


@st.composite
def evidences(draw):
    queue = draw(queues)
    device = "cpu" if queue.takes_turns else "cuda"
    step_ms = draw(st.floats(0.5, 100))
    queue = fitted(queue, step_ms)
    workers = draw(st.integers(0, 4))
    return Evidence(
        source="any",
        device=device,
        step_ms=step_ms,
        queue=queue,
        budget=budget.of_cpu(queue, step_ms),
        rates=Rates(device, here=False),
        data_ms=queue.total("data_ms"),
        log_ms=queue.total("log_ms"),
        cores=draw(st.integers(1, 16)),
        accumulation=draw(st.integers(1, 4)),
        examples=draw(st.sampled_from([None, 1, 32])),
        loader=draw(
            st.sampled_from(
                [None, Loader(workers, 1.0), Loader(workers, 2.0, True, fetch_cpu_ms=0.1)]
            )
        ),
        optimizer=draw(st.sampled_from([None, Optimizer("AdamW", "loop", 10, 1e6)])),
        padding=draw(st.one_of(st.none(), st.floats(0, 1))),
        recomputed=draw(st.floats(0, 1)),
        memory_gb=draw(st.sampled_from([None, (10.0, 80.0), (79.0, 80.0)])),
        recipe=draw(st.sampled_from([None, STOCK, STOCK.but(precision="fp32", accumulation=1)])),
        workload=draw(st.sampled_from(["", "sd15-lora", "qwen3-lora-long"])),
    )


@settings(max_examples=60, deadline=None)
@given(evidences())
def test_gains_are_shares_sorted_and_the_budget_is_the_step(evidence):
    found = diagnose(evidence)
    gains = [fix.gain for fix in found.fixes]
    assert all(0 <= gain <= 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)
    assert len({fix.name for fix in found.fixes}) == len(gains)
    assert sum(found.budget.values()) == pytest.approx(evidence.step_ms)
    assert all(ms >= 0 for ms in found.budget.values())
    assert (*found.worth_it, *found.not_worth_it) == found.fixes
    json.dumps(telling.record(found))
    assert telling.text(found)


@settings(max_examples=150, deadline=None)
@given(queues, st.floats(0.5, 100))
def test_a_fitted_queue_never_lasts_longer_than_the_step(queue, step_ms):
    waits = queue.total("data_ms") + queue.total("log_ms")
    assert fitted(queue, step_ms).step_ms <= (1.001 + SPREAD) * (step_ms + waits)


@settings(max_examples=100, deadline=None)
@given(queues)
def test_merging_loses_no_product_and_capturing_no_work(queue):
    def kept(pieces):
        return [p for p in pieces if p.kind in ("GEMM", "attention", "convolution", "copy")]

    def in_all(pieces, part):
        return sum(getattr(p, part) for p in pieces)

    merged, captured = fixes.merged(queue.pieces), fixes.captured(queue.pieces)
    assert len(kept(merged)) == len(kept(queue.pieces))
    for after in (merged, captured):
        assert len(after) <= len(queue.pieces)
        for part in ("data_ms", "log_ms"):
            assert in_all(after, part) == pytest.approx(in_all(queue.pieces, part))
    assert in_all(merged, "ms") <= in_all(queue.pieces, "ms") + 1e-9
    gaps = fixes.GRAPH_GAP_MS * sum(p.ms > 0 for p in queue.pieces)
    assert in_all(captured, "ms") == pytest.approx(in_all(queue.pieces, "ms") + gaps)


def test_a_captured_step_runs_while_the_host_makes_the_next_batch():
    kernels = [Piece("GEMM", 0.01, 0.02) for _ in range(4000)]
    made = 60.0
    queue = Queue(
        tuple(replace(p, data_ms=made if i % 4000 == 0 else 0.0) for i, p in enumerate(4 * kernels))
    )
    assert queue.step_ms == pytest.approx(4 * (made + 80), rel=0.01)
    assert queue.changed(fixes.captured).step_ms == pytest.approx(4 * made, rel=0.01)


# ------------------------------------------------------------------------------ traces and runs


def test_a_budget_of_a_gpus_trace_adds_up():
    for steps in (tuned(), reading(5), tiny_kernels(), waiting(3000)):
        evidence = of_steps(steps, slowed=1.3, data_ms=0.5)
        assert sum(evidence.budget.values()) == pytest.approx(evidence.step_ms)


def run(**metrics):
    recipe = STOCK.but(accumulation=1).as_dict()
    return Run(
        "04", "stock", workload="sd15-lora", recipe=recipe, metrics={"step_ms": 100.0} | metrics
    )


def test_a_run_that_was_profiled():
    metrics = {
        "data_ms": 40.0,
        "kernels_ms": 20.0,
        "launches_per_step": 2000.0,
        "syncs_per_step": 3.0,
    }
    shares = {
        "kernels_share": 0.2,
        "data_share": 0.4,
        "launch_share": 0.1,
        "host_share": 0.25,
        "sync_share": 0.05,
    }
    found = diagnose(sources.of_run(run(**metrics, **shares)))
    assert {fix.name for fix in found.worth_it[:2]} == {"workers", "capture"}
    assert found.budget["waiting for data"] == pytest.approx(40.0)
    assert found.fix("workers").changes["num_workers"] >= 1


def test_a_run_that_was_only_timed():
    found = diagnose(sources.of_run(run(data_ms=60.0)))
    assert [fix.name for fix in found.worth_it] == ["workers"]
    assert "was not profiled" in found.evidence.notes[0]


def test_a_run_without_a_step_time_is_refused():
    failed = Run("04", "x", status="oom")
    with pytest.raises(ValueError, match='its status is "oom"'):
        sources.of_run(failed)


def test_the_worth_of_a_fix_is_a_number_that_can_be_told_from_nothing():
    assert 0.01 < WORTH < 0.1
    assert math.isfinite(WORTH)


def test_settings_are_read_whichever_way_they_were_set():
    """PyTorch has two ways to allow TF32, and reading the older one raises where the newer was
    used.
    """
    before = sources._settings()
    with float32_rounded("everything"):
        found = sources._settings()
    assert found["matmul_tf32"] and found["cudnn_tf32"]
    assert sources._settings() == before
