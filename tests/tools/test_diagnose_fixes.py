"""Fixes predicted on made-up steps of a GPU, and budgets and gains that hold for any queue."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gpu_steps import Steps
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.profiling.call_stacks import Slice
from labutils.profiling.products import Product, Rates, masks_queries, product_of
from labutils.profiling.trace import Trace
from labutils.results.records import REFERENCE, reference_runs
from labutils.tools.diagnose import budget, diagnose, fixes, report, sources, trial
from labutils.tools.diagnose.evidence import Evidence, Loader, Optimizer
from labutils.tools.diagnose.step_queue import (
    GRAPH_GAP_MS,
    PYTHON,
    READ,
    SPREAD,
    TO_DEVICE,
    TRACED_HOST,
    Piece,
    Queue,
    fitted,
)
from labutils.tools.diagnose.trace_pieces import KERNEL_GAP_MS, queue_of

CONFIG = {"threads": 1, "cuda_available": True, "world_size": 1, "launch_blocking": False}
CONFIG |= {"anomaly": False, "matmul_tf32": False, "cudnn_tf32": True}
CONFIG |= {"peak_gb": 2.0, "memory_gb": 80.0}
ADAMW = {"name": "AdamW", "tensors": 25, "form": "fused"}
BF16 = "sm80_xmma_gemm_bf16bf16_bf16f32_f32"


def batch(**changes):
    return {"examples": 32, "bytes": 1e6, "pinned": False} | changes


def of_steps(steps: Steps, data_ms=0.0, config=(), **changes) -> Evidence:
    """Evidence of a script on a GPU, as its hooks would have recorded it."""
    trace = Trace(steps.trace_events())
    record = {
        "device": "cuda",
        "step_ms": [trace.wall_ms / trace.steps] * 5,
        "data_ms": [data_ms] * 5,
        "host_step_ms": [],
        "backwards": 1.0,
        "batches": 1.0,
        "fetch_cpu_ms": data_ms,
        "calls": [],
        "sync_lines": {},
        "loader": {"num_workers": 2, "pin_memory": False},
        "batch_facts": [batch()],
        "optimizer": ADAMW,
        "config": CONFIG | dict(config),
    }
    return replace(sources.of_record(record | changes, trace), rates=Rates("cuda", here=False))


def three(body) -> Steps:
    """Three steps of what `body(steps)` does."""
    steps = Steps()
    for _ in range(3):
        steps.step()
        body(steps)
    return steps


def products(steps, count=20, gpu=500.0, name=BF16, types=("c10::BFloat16",) * 2):
    shape = {"dims": [[4096, 4096], [4096, 4096]], "types": list(types), "blocks": 8}
    for _ in range(count):
        steps.launch(name, gpu, 20, "aten::mm", **shape)


def tuned(steps):
    steps.copy_in(20, pageable=False)
    products(steps)


def test_a_tuned_loop_raises_no_alarm():
    found = diagnose(of_steps(three(tuned)))
    assert found.worth_it == () and "No fix" in report.text(found)


def test_pageable_copies_are_pinned():
    def copying(gpu, pageable):
        return three(lambda s: (s.copy_in(gpu, pageable), products(s, 50, gpu=60)))

    slow, pinned = copying(3000, True), copying(3000 * fixes.PINNED, False)
    fix = diagnose(of_steps(slow)).worth_it[0]
    assert fix.name == "pinning"
    assert fix.gain == pytest.approx(1 - pinned.lasts_ms / slow.lasts_ms, abs=0.02)
    assert diagnose(of_steps(pinned)).fix("pinning") is None


def reading(reads):
    def body(steps):
        for _ in range(20):
            products(steps, 5, gpu=30)
            if reads:
                steps.item()

    return three(body)


def test_values_read_in_every_step():
    read = {"kind": "read", "place": "/x/train.py:41", "what": ".item()"}
    calls = [read | {"per_step": 20.0, "ms": 1.0}]
    fix = diagnose(of_steps(reading(True), calls=calls)).worth_it[0]
    assert fix.name == "syncs" and fix.sources == ("/x/train.py:41",)
    assert fix.gain == pytest.approx(1 - reading(False).lasts_ms / reading(True).lasts_ms, abs=0.02)


def tiny_kernels(steps):
    for _ in range(400):
        steps.launch(gpu=2, host=10)


def test_tiny_kernels():
    found = diagnose(of_steps(three(tiny_kernels)))
    assert {fix.name for fix in found.worth_it[:2]} == {"capture", "compile"}
    assert found.fix("capture").gain > 0.7
    evidence = found.evidence
    assert sum(map(evidence.budget.get, [budget.LAUNCH, budget.HOST])) > 0.7 * evidence.step_ms


def small_kernels(blocks):
    return three(lambda s: [s.launch(BF16, 30, 10, blocks=blocks) for _ in range(60)])


def test_batches_of_one_that_fill_a_part_of_the_gpu():
    one = [batch(examples=1)]
    fix = diagnose(of_steps(small_kernels(0.1), batch_facts=one)).worth_it[0]
    assert (fix.name, fix.per) == ("batch size", "example")
    assert fix.gain == pytest.approx(1 - 1 / 8, abs=0.05)
    assert diagnose(of_steps(small_kernels(8), batch_facts=one)).fix("batch size").gain < 0.1
    no_room = of_steps(small_kernels(0.1), batch_facts=one, config={"peak_gb": 70.0})
    assert diagnose(no_room).fix("batch size") is None


class AtMost(Rates):
    """A machine of 400 TFLOP/s in every format."""

    def flops_ms(self, flops, dtype):
        return flops / 4e11


@pytest.mark.parametrize("fill", [0.2, 1.0, 3.0])
def test_a_product_timed_a_little_faster_is_never_predicted_to_jump(fill):
    """From far below the machine's rate to its rate, in steps of 1 %."""
    evidence = replace(of_steps(three(tuned)), rates=AtMost("cuda"))
    product = Product(8192, 4096, 4096, 1, "bf16")
    fastest = evidence.rates.flops_ms(product.flops, "bf16")
    left = []
    for n in range(250):
        ms = fastest * 1.01**n
        piece = Piece("GEMM", ms, product=product, fill=fill)
        left.append(fixes.grown_ms(evidence, piece, 0.6) / ms)
    assert left[0] == pytest.approx(0.6)
    assert left[-1] == pytest.approx(max(1, 0.6 * fill) / max(1, fill))
    assert all(-1e-9 < after - before < 0.02 for before, after in zip(left, left[1:], strict=False))


def waiting(steps):
    steps.host(5000, "data")
    products(steps, 10, gpu=100.0)
    steps.item()


@pytest.mark.parametrize(
    ("workers", "fetch_cpu_ms", "cores", "helps"),
    [(0, 0.5, 1, True), (0, 5.0, 1, False), (0, 5.0, 8, True), (1, 5.0, 16, True)],
)
def test_workers_help_where_cores_are_left(workers, fetch_cpu_ms, cores, helps):
    loader = {"num_workers": workers, "pin_memory": False}
    facts = {"loader": loader, "fetch_cpu_ms": fetch_cpu_ms, "batch_facts": [batch(bytes=1e5)]}
    evidence = of_steps(three(waiting), 5.0, **facts)
    assert (fixes.workers(replace(evidence, cores=cores)).gain > 0.5) == helps
    assert evidence.budget[budget.DATA] == pytest.approx(5.0, rel=0.1)


def test_padding():
    short = diagnose(of_steps(small_kernels(0.1), batch_facts=[batch(tokens=1000, useful=300)]))
    assert short.fix("padding").gain < 0.1  # as short with fewer tokens


def test_an_optimizer_in_a_loop():
    def body(steps):
        products(steps, 4)
        steps.item()
        began = steps.now
        for _ in range(300):
            steps.launch(gpu=2, host=10)
        steps.marked("optimizer", began)

    found = diagnose(of_steps(three(body), optimizer=ADAMW | {"form": "loop"}))
    assert found.fix("optimizer").gain > 0.3 and found.evidence.budget[budget.OPTIMIZER] > 0


def test_what_is_computed_again():
    def body(steps):
        for _ in range(10):
            steps.launch("gemm_bf16", 100, 10, "aten::linear")
        began = steps.now
        for _ in range(10):
            node = steps.now
            for op in ("aten::linear", "aten::mm", "aten::mm"):
                steps.launch("gemm_bf16", 100, 10, op)
            steps.op("autograd::engine::evaluate_function: MmBackward0", node, steps.now)
        steps.marked("backward", began)

    found = diagnose(of_steps(three(body)))
    assert found.fix("checkpointing").gain == pytest.approx(0.25, abs=0.03)
    assert diagnose(of_steps(three(body), config={"peak_gb": 70.0})).fix("checkpointing") is None


@pytest.mark.parametrize(
    ("kernel", "types", "dtype"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn", "float", "tf32"),
        ("cutlass_80_tensorop_s1688gemm_128x256", "float", "tf32"),
        ("cutlass_80_simt_sgemm_128x128", "float", "fp32"),
        ("nvjet_tst_128x256_64x4_gemm", "c10::BFloat16", "bf16"),
    ],
)
def test_the_format_of_a_product_is_its_kernels_or_else_its_inputs(kernel, types, dtype):
    evidence = of_steps(three(lambda s: products(s, 2, name=kernel, types=(types,) * 2)))
    assert {fixes.format_of(evidence, p) for p in evidence.queue.pieces if p.ms} == {dtype}


HEADS, LONG, WIDE = 96, 1024, 64
SCORES, VALUES = ((LONG, WIDE), (WIDE, LONG)), ((LONG, LONG), (LONG, WIDE))


def batched(steps, sides):
    shape = {"dims": [[HEADS, *side] for side in sides], "types": ["c10::BFloat16"] * 2}
    steps.launch(BF16, 100, 10, "aten::bmm", blocks=8, **shape)


def attention(steps):
    """Forward and backward pass of one attention, written out."""

    def over_scores():
        for _ in range(3):
            steps.launch("vectorized_elementwise_kernel", 300, 10)
        steps.launch("cunn_SoftMaxForward", 300, 10)

    batched(steps, SCORES)
    over_scores()
    batched(steps, VALUES)
    products(steps, 2)
    began = steps.now
    for sides in (SCORES, VALUES):  # gradients of weights and values
        batched(steps, sides)
    over_scores()
    for sides in (VALUES, VALUES):  # of queries and keys
        batched(steps, sides)
    steps.marked("backward", began)


def test_attention_that_is_written_out_goes_into_one_call():
    steps = three(lambda s: [attention(s) for _ in range(4)])
    fix = diagnose(of_steps(steps)).worth_it[0]
    assert fix.name == "attention" and "written out 4 times" in fix.reason
    saved = 4 * 2 * 4 * 300 - 4 * 0.25 * 400  # what passes over scores, and a product once more
    assert fix.gain == pytest.approx(saved / 1e3 * 3 / steps.lasts_ms, abs=0.02)
    assert diagnose(of_steps(three(tuned))).fix("attention") is None


def test_a_mask_with_a_row_for_each_query_is_taken_to_be_causal():
    """Padding's has one row, and a position's bias differs from head to head."""
    for mask, causal in (([9, 9], 1), ([2, 1, 9, 9], 1), ([2, 1, 1, 9], 0), ([1, 4, 9, 9], 0)):
        assert masks_queries(Slice(0, 1, "aten::add", dims=[[2, 4, 9, 9], mask, []])) == causal


def test_the_best_few_are_predicted_together():
    def slow(steps):
        products(steps, 4, gpu=2700.0, name="cutlass_80_simt_sgemm", types=("float",) * 2)
        attention(steps)
        attention(steps)

    found = diagnose(of_steps(three(slow)))
    names = found.together.name.split(" + ")
    assert set(names) == {"precision", "attention"}
    alone = [found.fix(name).gain for name in names]
    assert found.together.gain == pytest.approx(sum(alone), abs=0.05)  # they share no kernel


def test_a_wait_for_the_gpu_inside_a_loader_is_no_data():
    """accelerate's loader moves the batch itself: it waits until the GPU is done."""

    def body(steps):
        products(steps, 10, gpu=900.0)
        began = steps.now
        steps.host(1000)
        steps.copy_in(100)
        steps.marked("data", began)

    evidence = of_steps(three(body), 9.0)
    assert evidence.data_ms == pytest.approx(1.0, abs=0.1)


def test_products_keep_their_layout():
    """Rows of 50,257 numbers begin at odd places, and columns of 768 do not."""
    operator = Slice(0, 1, "aten::mm", dims=[[8, 768], [768, 50257]], strides=[[768, 1], [1, 768]])
    assert product_of(operator) == Product(8, 50257, 768, turned=(False, True))


# --------------------------------------------------------------------------- reports and bad input

NASTY = "<script>alert(1)</script> [x](https://example.org) | `y` $z$"


def test_a_report_is_80_columns_wide_and_a_page_escapes_what_it_is_given():
    read = {"kind": "write", "place": "/x/train.py:41", "what": NASTY, "per_step": 1.0, "ms": 3.0}
    evidence = of_steps(three(waiting), 5.0, calls=[read], batch_facts=[batch(bytes=1e5)])
    diagnosis = diagnose(replace(evidence, source=NASTY, notes=(NASTY,)))
    tried = {diagnosis.fixes[0].name: trial.Try(0.5, 0.4, 0.6, "the same losses to 0.0%", True)}
    unsure = {fix.name: trial.Try(0.62, -1.88, 0.89) for fix in diagnosis.fixes}
    assert "Do first: nothing" in report.text(replace(diagnosis, tries=unsure)).splitlines()[0]
    diagnosis = replace(diagnosis, tries=tried)
    lines = report.text(diagnosis).splitlines()
    assert max(map(len, lines)) <= 80 and "tried: saves 50% (interval 40 to 60)" in "\n".join(lines)
    assert lines[0].startswith("A step takes ") and "Do first: " in lines[0]
    page = report.page(diagnosis)
    assert "<script" not in page and 'href="https' not in page and "50 % (40 % to 60 %)" in page
    assert page.count("data:image/png") == 2 and "default-src 'none'" in page


# --------------------------------------------------------------------------------------- the queue


@pytest.mark.parametrize("step_ms", [2.0, 6.0])
def test_the_host_is_fitted_to_a_step_that_it_decides(step_ms):
    traced = queue_of(Trace(three(tiny_kernels).trace_events()))
    assert fitted(traced, step_ms).step_ms == pytest.approx(step_ms, rel=0.02)


def test_where_kernels_decide_the_idle_start_tells_the_hosts_time():
    traced = queue_of(Trace(three(tuned).trace_events()))
    host = fitted(traced, traced.device_ms, from_idle_ms=0.1).total("host_ms")
    assert host == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("off", [0.98, 1.02])
def test_a_host_that_waits_within_the_step_is_told_by_no_time(off):
    """For data, and at the end for the device: it would take as long however fast it was."""
    kernels = [Piece("GEMM", 0.1, 0.03) for _ in range(1000)]
    ends = replace(kernels[0], data_ms=20.0), replace(kernels[-1], waits=READ)
    traced = Queue((ends[0], *kernels[1:-1], ends[1]))
    lasts = traced.lasts_ms(TRACED_HOST)
    host = fitted(traced, off * lasts, off * lasts).total("host_ms")
    assert host == pytest.approx(TRACED_HOST * 30, rel=0.01)


def test_a_captured_step_runs_while_the_host_makes_the_next_batch():
    kernels, made = [Piece("GEMM", 0.01, 0.02)] * 4000, 60.0
    queue = Queue(4 * (replace(kernels[0], data_ms=made), *kernels[1:]))
    assert queue.step_ms == pytest.approx(4 * (made + 80), rel=0.01)
    assert queue.having(fixes.captured(queue.pieces)).step_ms == pytest.approx(4 * made, rel=0.01)
    assert queue.having(()).step_ms == queue.having(()).from_idle_ms() == 0  # nothing is left


def test_a_gap_is_its_kernels():
    """Fewer kernels have fewer gaps, and within a graph, which is captured already, they are short.
    Gaps make no step longer than it was timed."""
    queue = Queue((Piece("elementwise", 0.018, 0.001, KERNEL_GAP_MS),) * 8000)
    assert queue.step_ms == pytest.approx(8000 * 0.0195)
    eighth = queue.each(lambda piece: piece.scaled(1 / 8, 1 / 8))
    assert eighth.step_ms == pytest.approx(1000 * 0.0195)
    tight = fitted(queue, 145.0)
    assert tight.step_ms == pytest.approx(145.0) and tight.device_ms == pytest.approx(144.0)
    evidence = of_steps(three(tuned))
    graph = queue.each(lambda piece: piece.but(host_ms=0.0, gap_ms=GRAPH_GAP_MS))
    assert fixes.capture(replace(evidence, queue=graph)) is None
    gain = fixes.capture(replace(evidence, queue=queue)).gain
    assert gain == pytest.approx(1.25 / 19.5, rel=0.01)
    slow = queue.each(lambda piece: piece.but(host_ms=0.025))
    assert fixes.capture(replace(evidence, queue=slow)).gain > 0.2


KINDS = ["GEMM", "elementwise", "reduction", "copy", "attention", "casts and layout", "convolution"]
pieces = st.builds(
    Piece,
    kind=st.sampled_from(KINDS),
    ms=st.floats(0, 5),
    host_ms=st.floats(0.001, 1),
    gap_ms=st.sampled_from([0.0, 0.0015]),
    phase=st.sampled_from(["", "backward", "optimizer", "clip", "encode"]),
    waits=st.sampled_from(["", "", "", READ, TO_DEVICE]),
    data_ms=st.sampled_from([0.0, 0.0, 3.0]),
    log_ms=st.sampled_from([0.0, 0.0, 2.0]),
    dtype=st.sampled_from(["", "fp32", "bf16", "tf32"]),
    fill=st.floats(0.01, 4),
)
many = st.lists(pieces, min_size=1, max_size=30).map(tuple)
queues = st.builds(Queue, many, st.integers(1, 3), st.booleans())


@st.composite
def evidences(draw):
    queue, step_ms = draw(queues), draw(st.floats(0.5, 100))
    device, queue = "cpu" if queue.takes_turns else "cuda", fitted(queue, step_ms)
    loaders = [None, Loader(0, 1.0), Loader(4, 2.0, True, fetch_cpu_ms=0.1)]
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
        loader=draw(st.sampled_from(loaders)),
        optimizer=draw(st.sampled_from([None, Optimizer("AdamW", "loop", 10)])),
        padding=draw(st.one_of(st.none(), st.floats(0, 1))),
        recomputed=draw(st.floats(0, 1)),
        memory_gb=draw(st.sampled_from([None, (10.0, 80.0), (79.0, 80.0)])),
        held_in_format=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(evidences())
def test_gains_are_shares_sorted_and_the_budget_is_the_step(evidence):
    found = diagnose(evidence)
    gains = [fix.gain for fix in found.fixes]
    assert all(0 <= gain <= 1 for gain in gains) and gains == sorted(gains, reverse=True)
    assert sum(found.evidence.budget.values()) == pytest.approx(evidence.step_ms)
    best = max((fix.gain for fix in found.fixes if fix.per == "step"), default=0.0)
    assert found.together is None or found.together.gain > best
    json.dumps(report.record(found))
    assert report.text(found)


@settings(max_examples=100, deadline=None)
@given(queues, st.floats(0.5, 100))
def test_a_fitted_queue_never_lasts_longer_than_the_step(queue, step_ms):
    waits = queue.total("data_ms") + queue.total("log_ms")
    assert fitted(queue, step_ms).step_ms <= (1.001 + SPREAD) * (step_ms + waits)


def test_compiling_leaves_as_many_kernels_as_were_counted():
    """In lab 04, of the UNet's step that lab 02 traced. The host decides both steps."""
    queue = queue_of(Trace.read(REFERENCE.parent / "02_micro_step.trace.json.gz"))
    trained, rates = Optimizer("AdamW", "fused", tensors=256), Rates("cuda", here=False)
    fix = fixes.compiling(Evidence("", "cuda", queue.step_ms, queue, {}, rates, optimizer=trained))
    after = fix.after(queue)
    rungs = reference_runs("04").of_newest_host().select(experiment="ladder")
    plain, compiled = (rungs.one(rung=rung, again=False) for rung in ("workers", "compile"))
    parts = ("kernels_per_step", "kernels_ms", "step_ms")
    count, ms, lasts = (compiled.metric(part) / plain.metric(part) for part in parts)
    assert len(after.pieces) / len(queue.pieces) == pytest.approx(count, rel=0.03)
    assert after.device_ms / queue.device_ms == pytest.approx(ms, rel=0.07)
    assert 1 - fix.gain == pytest.approx(lasts, rel=0.15)


def test_the_loops_own_python_stays_beside_a_wait_for_data():
    slow = three(lambda s: (s.host(20_000), s.host(60_000, "data"), tiny_kernels(s)))
    assert fixes.capture(of_steps(slow, 60.0)).gain < 0.06


def test_the_models_python_goes_and_the_loops_own_stays():
    calls = [Piece(kind, 0.001, 0.01) for kind in ("elementwise", "elementwise", "GEMM") * 50]
    slow = [p.but(host_ms=0.2) if n % 5 == 0 else p for n, p in enumerate(calls)]
    loop = [Piece(PYTHON, 0.0, 20.0), *calls]
    evidence = replace(of_steps(three(tuned)), optimizer=None)
    for rule in (fixes.compiling, fixes.capture):
        queues = [Queue((*pieces, Piece("other", 0.001))) for pieces in (calls, slow, loop)]
        afters = [rule(replace(evidence, queue=queue)).after(queue) for queue in queues]
        short, same, own = (after.total("host_ms") for after in afters)
        assert same == pytest.approx(short) and 18 < own < 22


@settings(max_examples=60, deadline=None)
@given(queues)
def test_merging_loses_no_product_and_capturing_no_work(queue):
    def in_all(pieces, part):
        return sum(getattr(p, part) for p in pieces)

    for after in (fixes.merged(queue.pieces), fixes.captured(queue.pieces)):
        assert len(after) <= len(queue.pieces)
        for part in ("data_ms", "log_ms"):
            assert in_all(after, part) == pytest.approx(in_all(queue.pieces, part))
    assert in_all(fixes.merged(queue.pieces), "ms") <= in_all(queue.pieces, "ms") + 1e-9
    gaps = sum(min(p.gap_ms, fixes.GRAPH_GAP_MS) for p in queue.pieces)
    captured = in_all(fixes.captured(queue.pieces), "ms")
    assert captured == pytest.approx(in_all(queue.pieces, "ms") + gaps)
