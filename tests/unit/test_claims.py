"""Verdicts: each judge confirms, refutes, withholds and asks for what is missing; none ever raises."""

from __future__ import annotations

import copy
import re

import pytest
from claim_runs import CPU, Runs, article_runs, spread_of, timed, untimed
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.results import claims as articles
from labutils.results import judges
from labutils.results.judges import CONFIRMED, INCONCLUSIVE, NOT_TESTABLE, REFUTED, Judgement
from labutils.results.judges.words import figures, percents
from labutils.results.records import REFERENCE, Run, read_runs, summarise

EVERY = articles.claims()
CLAIMS = {id: claim for id, claim in EVERY.items() if claim.judge != "beyond"}
EXACT = {
    "all_present",
    "becomes",
    "count",
    "lists",
    "more_with",
    "names",
    "occurs",
    "unchanged",
    "within",
}
"""Judges of what has no noise: they never withhold a verdict."""
SWEEPS = {"changes", "grows"}
"""Judges of pairs of runs: those that were not measured are left out."""
ANY_LENGTH = ("06", "same-tokens any length")


def judgement(id: str, runs: Runs) -> Judgement:
    (found,) = judges.judge(id, runs, {})
    return found


def with_runs(*changed: Run) -> Runs:
    """The article's runs with some replaced."""
    return article_runs() | {(run.lab, run.run): run for run in changed}


def with_metrics(lab: str, name: str, **metrics: object) -> Runs:
    """The article's runs with some metrics of one of them changed."""
    runs = article_runs()
    runs[lab, name].metrics.update(metrics)
    return runs


def pins(*copies: float) -> Runs:
    """The four runs of the 2x2 with these medians of host_copy_ms: neither, async alone, pinned
    alone, both.
    """
    runs = article_runs()
    names = ("pageable+blocking", "pageable+async", "pinned+blocking", "pinned+async")
    for name, ms in zip(names, copies, strict=True):
        runs["03", name].metrics["host_copy_ms"] = spread_of(ms)
    return runs


def reduced(failing: int, control: int) -> Runs:
    runs = with_metrics("04", "reduce-overhead", failed=failing)
    runs["04", "reduce-overhead, accumulation=1"].metrics.update(
        failed=control, message="RuntimeError: too"
    )
    return runs


def a2(name: str, ms: float, spread: float = 0.001, **metrics: object) -> Run:
    """A run of lab 06."""
    run = timed("06", name, ms, spread, **metrics)
    run.workload = "llava-lora"
    return run


def a4(name: str, ms: float, spread: float = 0.004) -> Run:
    """A switch of lab 09."""
    return timed("09", name, ms, spread)


def stepped(name: str, factors: list[float], tokens: list[int]) -> Run:
    """A run of lab 07 whose steps take so many ms a token."""
    steps = [factor * count for factor, count in zip(factors, tokens, strict=True)]
    run = timed("07", name, 1)
    run.metrics["step_ms"] = summarise(steps)
    run.samples = {"step_ms": steps, "useful_tokens": tokens}
    return run


UNEVEN = [1000, 2400, 1300, 2100, 1700, 1100, 2300, 1600]
"""Tokens of steps whose times overlap whatever is compared."""


@pytest.mark.parametrize(
    ("id", "before", "after"),
    [
        ("A3.qlora.slower", "lora long", "qlora long"),
        ("A3.checkpointing.slower", "lora long", "lora long, checkpointed"),
        ("A3.unsloth.long", "unsloth long", "qlora long"),
    ],
)
def test_steps_of_the_same_batches_are_compared_one_by_one(id, before, after):
    quick = stepped(before, [0.2] * 8, UNEVEN)
    slow = [stepped(after, [0.26, 0.25, 0.27, 0.26, 0.26, 0.25, 0.27, 0.26], UNEVEN)]
    slow.append(stepped(after, [0.26] * 10, [*UNEVEN, 900, 800]))  # went on for longer
    for run in slow:
        found = judgement(id, with_runs(quick, run))
        assert found.verdict == CONFIRMED and "30 %" in found.here.replace("-23 %", "30 %")
    other = stepped(after, [0.26] * 8, UNEVEN[::-1])
    assert judgement(id, with_runs(quick, other)).verdict == INCONCLUSIVE
    noisy = stepped(after, [0.15, 0.3, 0.18, 0.22, 0.15, 0.3, 0.25, 0.21], UNEVEN)
    found = judgement(id, with_runs(quick, noisy))
    assert found.verdict == INCONCLUSIVE and found.why.startswith("Step by step, the ratio is ")


def test_speed_ups_and_gains_are_judged_step_by_step():
    runs = [stepped("qlora long", [0.5] * 8, UNEVEN), stepped("unsloth long", [0.24] * 8, UNEVEN)]
    runs += [stepped("qlora short", [0.5] * 8, UNEVEN), stepped("unsloth short", [0.4] * 8, UNEVEN)]
    assert judgement("A3.unsloth.vendor-speed", with_runs(*runs)).verdict == CONFIRMED
    assert judgement("A3.unsloth.length", with_runs(*runs)).verdict == CONFIRMED
    runs[1] = stepped("unsloth long", [0.4] * 8, UNEVEN)
    assert judgement("A3.unsloth.vendor-speed", with_runs(*runs)).verdict == REFUTED


def test_gains_on_two_workloads_are_compared_and_steps_are_not():
    """Short texts and long ones are two workloads; what is compared is the change on each."""
    runs = [stepped("qlora long", [0.5] * 8, UNEVEN), stepped("unsloth long", [0.24] * 8, UNEVEN)]
    runs += [stepped("qlora short", [0.5] * 8, UNEVEN), stepped("unsloth short", [0.4] * 8, UNEVEN)]
    for run in runs:
        run.workload = f"qwen3-lora-{run.run.rpartition(' ')[2]}"
    assert judgement("A3.unsloth.length", with_runs(*runs)).verdict == CONFIRMED
    runs[3].workload = "qwen3-lora-long"
    found = judgement("A3.unsloth.length", with_runs(*runs))
    assert found.verdict == NOT_TESTABLE and "differ in workload" in found.why
    runs[3].workload, runs[3].scale = "qwen3-lora-short", "tiny"
    assert "differ in scale" in judgement("A3.unsloth.length", with_runs(*runs)).why


def test_seconds_are_longer_and_small_shares_have_figures():
    found = judgement("A3.unsloth.first-step", article_runs())
    assert found.here.endswith(" s") and found.why == "The first step takes longer with it."
    assert [percents(share) for share in (0.0053, 0.0, 0.094, 0.0951, 0.74)] == [
        "0.53 %",
        "0 %",
        "9.4 %",
        "10 %",
        "74 %",
    ]


def test_what_was_predicted_is_never_shown_as_measured():
    every = judges.judge(None, article_runs(), {})
    predicted = [j for j in every if j.claim.predicted]
    assert len(predicted) >= 14
    assert {
        j.claim.id
        for j in every
        if "lackwell" in j.claim.statement and j.here and "specs" not in j.claim.id
    } <= {j.claim.id for j in predicted} | {"A1.blackwell.xformers", "A3.blackwell.xformers"}
    for j in predicted:
        assert j.here.endswith(" predicted") or j.verdict == NOT_TESTABLE, j.claim.id
        assert "was found" not in j.why and "Checked here" not in j.why, j.claim.id


def only_batch(batch: int) -> Runs:
    """The article's runs without those of lab 06 at other batch sizes."""
    wanted = re.compile(rf" b{batch}$")
    return {
        key: run for key, run in article_runs().items() if key[0] != "06" or wanted.search(key[1])
    }


def with_losses(method: str, loss: float, spread: float) -> Runs:
    """The article's runs with other losses over seeds of one method."""
    run = untimed("06", f"loss {method}", final_loss=spread_of(loss, spread))
    run.workload = "llava-lora"
    return with_runs(run)


def trained_on(bf16: list[float], fp8: list[float], start: float) -> Runs:
    """The article's runs with losses of the same seeds, of a model that began at `start`."""
    runs = [
        Run(
            *("06", f"loss {method}"),
            workload="llava-lora",
            scale="small",
            samples={"final_loss": losses, "start_loss": [start] * len(losses)},
            metrics={
                "final_loss": summarise(losses),
                "start_loss": summarise([start] * len(losses)),
            },
        )
        for method, losses in (
            ("bf16", bf16),
            ("fp8-te", fp8),
            ("fp8-frozen", fp8),
            ("fp8-mixed", bf16),
        )
    ]
    return with_runs(*runs)


STEADY, APART = [6.0, 6.2, 6.4], [6.0, 7.5, 9.0]
"""Losses of three seeds: close together, and far apart."""


def pretrained(runs: Runs) -> Runs:
    """The same runs as if they had been made with the real weights."""
    for run in runs.values():
        run.weights = "hub"
    return runs


CASES = [
    (
        "A3.32b.factor",
        INCONCLUSIVE,
        with_metrics("08", "model of two cards", dense_long_ratio=2.25),
    ),
    ("A3.32b.factor", REFUTED, with_metrics("08", "model of two cards", dense_long_ratio=1.95)),
    (
        "A3.120b.factor",
        REFUTED,
        with_metrics("08", "model of two cards", moe_long_blackwell_ratio=0.75),
    ),
    ("A1.lora.count", REFUTED, with_metrics("01", "lora-counts", lora_d4096_r8=4096 * 8)),
    ("A1.lora.base-untouched", REFUTED, with_metrics("01", "equivalence", base_change=1e-7)),
    ("A1.stock.utilization", REFUTED, with_metrics("02", "stock", gpu_utilization=0.8)),
    ("A1.stock.utilization", INCONCLUSIVE, with_metrics("02", "stock", gpu_utilization=0.52)),
    ("A1.stock.data", REFUTED, with_metrics("02", "stock", data_share=0.1)),
    (
        "A1.stock.launches",
        INCONCLUSIVE,
        with_metrics("02", "stock", launch_share=0.02, host_share=0.07),
    ),
    (
        "A1.left.clip-gap",
        REFUTED,
        with_metrics("02", "stock", clip_idle_ms=0.0, optimizer_idle_ms=0.01),
    ),
    ("A1.stock.step-ms", REFUTED, with_runs(timed("02", "stock", 290 * 50))),
    ("A1.stock.step-ms", INCONCLUSIVE, with_runs(timed("02", "stock", 290 * 4 * 4))),
    ("A1.overheads.four", REFUTED, with_metrics("02", "stock", copies_share=0.0)),
    ("A1.overheads.host", REFUTED, with_metrics("02", "stock", copies_share=0.5, data_share=0.1)),
    ("A1.overheads.host", INCONCLUSIVE, with_metrics("02", "stock", copies_share=0.58)),
    ("A1.workers.three", REFUTED, with_runs(timed("03", "workers=3", 4 * 250))),
    ("A1.workers.three", REFUTED, with_runs(timed("03", "workers=3", 4 * 320))),
    ("A1.workers.three", INCONCLUSIVE, with_runs(timed("03", "workers=3", 4 * 165, spread=0.99))),
    ("A1.workers.three", INCONCLUSIVE, with_runs(timed("03", "workers=3", 4 * 170, spread=0.1))),
    ("A1.workers.shape", REFUTED, with_runs(timed("03", "workers=8", 4 * 280))),
    ("A1.workers.shape", INCONCLUSIVE, with_runs(timed("03", "workers=8", 4 * 230, spread=0.3))),
    ("A1.workers.optimum", REFUTED, with_runs(timed("03", "workers=4", 4 * 120))),
    ("A1.workers.optimum", INCONCLUSIVE, with_runs(timed("03", "workers=4", 4 * 140.8))),
    ("A1.workers.optimum", INCONCLUSIVE, with_runs(timed("03", "workers=4", 4 * 141.2))),
    ("A1.workers.more-is-worse", REFUTED, with_runs(timed("03", "workers=8", 4 * 100))),
    ("A1.workers.more-is-worse", INCONCLUSIVE, with_runs(timed("03", "workers=8", 4 * 141.5))),
    ("A1.workers.data-time", REFUTED, with_metrics("03", "workers=3", data_ms=spread_of(300))),
    (
        "A1.workers.data-time",
        INCONCLUSIVE,
        with_metrics("03", "workers=3", data_ms=spread_of(300, 1.2)),
    ),
    ("A1.compile.fewer-kernels", REFUTED, with_metrics("04", "compile", kernels_per_step=15900)),
    ("A1.compile.fewer-kernels", REFUTED, with_metrics("04", "compile", kernels_per_step=17000)),
    ("A1.workers.shm", REFUTED, with_metrics("03", "shm=tiny", failed=0)),
    (
        "A1.workers.shm",
        INCONCLUSIVE,
        with_metrics("03", "shm=tiny", message="ValueError: something else"),
    ),
    ("A1.workers.shm-cure", REFUTED, with_metrics("03", "shm=enough", failed=1)),
    ("A1.workers.shm-cure", INCONCLUSIVE, with_metrics("03", "shm=tiny", failed=0)),
    ("A1.compile.max-autotune", REFUTED, with_metrics("04", "max-autotune", failed=0)),
    ("A1.compile.cause", REFUTED, reduced(1, 1)),
    ("A1.compile.cause", REFUTED, reduced(0, 0)),
    ("A1.compile.cause", INCONCLUSIVE, reduced(0, 1)),
    ("A1.workers.utilization", REFUTED, with_metrics("04", "workers", gpu_utilization=0.46)),
    ("A1.workers.utilization", INCONCLUSIVE, with_metrics("04", "workers", gpu_utilization=0.57)),
    ("A1.pin.speedup", INCONCLUSIVE, with_runs(timed("04", "pinned", 4 * 100, spread=0.05))),
    ("A1.pin.speedup", REFUTED, with_runs(timed("04", "pinned", 4 * 102, spread=0.001))),
    ("A1.pin.needs-both", REFUTED, pins(2, 1, 2, 0.2)),
    ("A1.pin.needs-both", REFUTED, pins(2, 2, 2, 3)),
    ("A1.pin.needs-both", INCONCLUSIVE, pins(2, 2, 2, 1.99)),
    ("A1.left.clip-sync", REFUTED, with_metrics("02", "stock", clip_sync=0)),
    ("A1.left.clip-sync", INCONCLUSIVE, with_metrics("02", "stock", clip_sync=0.4)),
    ("A1.left.log-less", REFUTED, with_runs(timed("02", "logging=ring-buffer", 420))),
    ("A1.left.log-less", INCONCLUSIVE, with_runs(timed("02", "logging=ring-buffer", 399))),
    (
        "A1.blackwell.unlisted-fails",
        REFUTED,
        with_metrics("00", "unlisted architecture", warned=0, failed=0),
    ),
    (
        "A1.blackwell.unlisted-fails",
        INCONCLUSIVE,
        with_metrics("00", "unlisted architecture", failed=0),
    ),
    (
        "A1.blackwell.newer-build",
        REFUTED,
        with_metrics("00", "machine", torch_architectures=["sm_80", "sm_90"]),
    ),
    (
        "A1.blackwell.newer-build",
        NOT_TESTABLE,
        with_metrics("00", "machine", torch_architectures=[]),
    ),
    ("A1.blackwell.xformers", REFUTED, with_metrics("00", "xformers", failed=0)),
    (
        "A1.blackwell.xformers",
        INCONCLUSIVE,
        with_metrics("00", "xformers", message="ImportError: no xformers"),
    ),
    ("A2.lmm.vision-cost", REFUTED, with_metrics("06", "token-counts", vision_share=0.03)),
    ("A2.fp8.cast-saturates", REFUTED, with_metrics("05", "fp8-cast", cast_1000000=float("nan"))),
    ("A2.fp8.range", REFUTED, with_metrics("05", "fp8-cast", cast_1000000=57344.0)),
    ("A2.fp8.range", CONFIRMED, with_metrics("05", "fp8-cast", cast_1000=None, cast_1000000=None)),
    ("A2.fp8.scale", REFUTED, with_metrics("05", "fp8-scaling", scale=0.448)),
    ("A2.fp8.rate", REFUTED, with_metrics("05", "gemm", fp8_over_bf16=1.4)),
    ("A2.fp8.rate", INCONCLUSIVE, with_metrics("05", "gemm", fp8_over_bf16=1.69)),
    ("A2.fp8.rate", CONFIRMED, with_metrics("05", "gemm", fp8_over_bf16=spread_of(1.75))),
    ("A2.fp8.speed", REFUTED, with_runs(a2("fp8-te b4", 4 * 990 * 1.3))),
    ("A2.fp8.speed", REFUTED, with_runs(a2("fp8-te b4", 4 * 990 * 0.7))),
    ("A2.fp8.speed", INCONCLUSIVE, with_runs(a2("fp8-te b4", 4 * 990 * 0.88, spread=0.05))),
    ("A2.fp8.batch", REFUTED, with_runs(a2("fp8-te b24", 24 * 990))),
    ("A2.fp8.batch", INCONCLUSIVE, with_runs(a2("fp8-te b24", 24 * 990 * 0.95, spread=0.02))),
    ("A2.fp8.batch", NOT_TESTABLE, only_batch(1)),
    ("A2.fp8.memory", REFUTED, with_metrics("06", "fp8-te b8", peak_allocated_gb=10.0)),
    ("A2.fp8.first-step", REFUTED, with_metrics("06", "fp8-te b1", first_step_s=15)),
    ("A2.fp8.first-step", INCONCLUSIVE, with_metrics("06", "fp8-te b1", first_step_s=1.9)),
    ("A2.fp8.loss", REFUTED, pretrained(with_losses("fp8-te", 9.1, 0.001))),
    ("A2.fp8.loss", REFUTED, pretrained(with_losses("fp8-te", 8.0, 0.001))),
    ("A2.fp8.loss", INCONCLUSIVE, with_losses("fp8-te", 9.1, 0.001)),
    ("A2.fp8.loss", INCONCLUSIVE, with_losses("fp8-te", 10.0, 0.2)),
    ("A2.fp8.loss", REFUTED, trained_on(STEADY, [1.001 * loss for loss in STEADY], start=10)),
    ("A2.fp8.loss", INCONCLUSIVE, trained_on(STEADY, [1.001 * loss for loss in STEADY], start=6.5)),
    ("A2.fp8.loss", CONFIRMED, trained_on(STEADY, [1.14 * loss for loss in STEADY], start=10)),
    ("A2.fp8.loss", CONFIRMED, trained_on(APART, [1.14 * loss for loss in APART], start=10)),
    ("A2.fp8.loss", REFUTED, trained_on(APART, [1.001 * loss for loss in APART], start=10)),
    ("A2.fp8.loss", INCONCLUSIVE, trained_on(APART, APART[::-1], start=10)),
    ("A2.fp8.mixed", CONFIRMED, trained_on(STEADY, [1.14 * loss for loss in STEADY], start=10)),
    ("A2.fp8.mixed", INCONCLUSIVE, trained_on(APART, [1.14 * loss for loss in APART], start=10)),
    ("A2.fp8.mixed", REFUTED, with_losses("fp8-mixed", 9.9, 0.001)),
    ("A2.fp8.mixed", INCONCLUSIVE, with_losses("fp8-frozen", 9.051, 0.001)),
    ("A2.fp8.vision-limits", REFUTED, with_metrics("06", "bf16 b1", vision_share=0.1)),
    ("A2.fp8.vision-limits", INCONCLUSIVE, with_runs(a2("fp8-te b1", 1150, 0.15))),
    ("A2.compile.break-even", REFUTED, with_metrics("06", "compile-whole b1", first_step_s=30)),
    ("A2.compile.break-even", REFUTED, with_runs(a2("compile-whole b1", 1100, first_step_s=105))),
    ("A2.compile.break-even", REFUTED, with_runs(a2("bf16 b1, again", 920, first_step_s=1))),
    (
        "A2.compile.break-even",
        INCONCLUSIVE,
        with_runs(a2("bf16 b1, again", 885, 0.02, first_step_s=1)),
    ),
    (
        "A2.compile.break-even",
        CONFIRMED,
        with_runs(a2("bf16 b1", 890, first_step_s=1)),
    ),  # of another hour
    (
        "A2.compile.break-even",
        INCONCLUSIVE,
        with_runs(a2("compile-whole b1", 985, 0.02, first_step_s=105)),
    ),
    ("A2.compile.fp8-gains-less", REFUTED, with_runs(a2("compile-fp8-te b1", 500))),
    ("A2.compile.fp8-gains-less", INCONCLUSIVE, with_runs(a2("compile-fp8-te b1", 850, 0.02))),
    ("A2.te.breaks-graph", REFUTED, with_metrics("06", "compile-fp8-te b1", graph_breaks=0)),
    (
        "A2.anyres.cause",
        REFUTED,
        with_metrics("06", "recompiles uniform", further_image_token_counts=0),
    ),
    (
        "A2.fixed.cause",
        REFUTED,
        with_metrics("06", "same-tokens static", ms_per_1k_tokens=spread_of(98)),
    ),
    ("A2.anyres.recompiles", REFUTED, with_metrics("06", "recompiles varied", recompilations=1)),
    ("A2.guide.between", REFUTED, with_metrics("06", "guide", between="compile")),
    ("A2.guide.between", NOT_TESTABLE, with_metrics("06", "guide", between=3)),
    ("A2.left.dynamic", REFUTED, with_metrics(*ANY_LENGTH, ms_per_1k_tokens=spread_of(90))),
    (
        "A2.left.dynamic",
        INCONCLUSIVE,
        with_metrics(*ANY_LENGTH, ms_per_1k_tokens=spread_of(62, 0.15)),
    ),
    (
        "A2.left.dynamic",
        INCONCLUSIVE,
        with_metrics(*ANY_LENGTH, ms_per_1k_tokens=spread_of(53, 0.3)),
    ),
    ("A2.left.fp8-once", REFUTED, with_metrics("06", "fp8-frozen b1", peak_allocated_gb=14)),
    ("A2.left.fp8-once", INCONCLUSIVE, with_metrics("06", "fp8-frozen b1", peak_allocated_gb=10)),
    ("A2.left.fp8-once", CONFIRMED, with_metrics("06", "fp8-frozen b1", peak_allocated_gb=5)),
    ("A3.120b.h100-long", REFUTED, with_metrics("08", "model of two cards", h100_moe_long=2.4)),
    (
        "A3.120b.h100-long",
        INCONCLUSIVE,
        with_metrics("08", "model of two cards", h100_moe_long=1.0),
    ),
    (
        "A3.120b.h100-long",
        NOT_TESTABLE,
        with_metrics("08", "model of two cards", h100_moe_long=0.0),
    ),
    ("A3.120b.weights", REFUTED, with_metrics("08", "moe weights", four_bit_gb=61.5)),
    ("A4.memory.checkpointing", REFUTED, with_metrics("09", "checkpointing", peak_gb=9.5)),
    ("A4.memory.checkpointing", REFUTED, with_metrics("09", "checkpointing", peak_gb=11.0)),
    ("A4.memory.checkpointing", NOT_TESTABLE, with_metrics("09", "checkpointing", peak_gb=0.0)),
    ("A4.pytorch.cudnn-benchmark", INCONCLUSIVE, with_runs(a4("cudnn.benchmark", 130, 0.15))),
    ("A4.pytorch.cudnn-benchmark", REFUTED, with_runs(a4("cudnn.benchmark", 140))),
    ("A4.pytorch.mixed-precision", INCONCLUSIVE, with_runs(a4("base", 220, 0.2))),
    (
        "A4.pytorch.persistent",
        REFUTED,
        with_metrics("03", "persistent", epoch_start_persistent_ms=spread_of(170)),
    ),
    ("A4.environment.threads", REFUTED, with_metrics("09", "threads: one each", images_per_s=90.0)),
    (
        "A4.network.ethernet",
        REFUTED,
        with_metrics("10", "networks", **{"small Qwen3, whole at 100 GbE": 53.0}),
    ),
    (
        "A4.network.ethernet",
        INCONCLUSIVE,
        with_metrics("10", "networks", **{"small Qwen3, whole at 100 GbE": 81.0}),
    ),
    ("A3.nf4.optimal", REFUTED, with_metrics("07", "rounding nf4", information_share=0.971)),
    ("A3.int8.codes", REFUTED, with_metrics("07", "absmax", code_1=-35)),
    (
        "A3.32b.unsloth-batch",
        REFUTED,
        with_metrics("08", "model of memory", unsloth_32b_batch_32_gb=120.0),
    ),
]


@pytest.mark.parametrize("id", CLAIMS)
def test_the_article_s_own_numbers_confirm_its_claims(id):
    found = judgement(id, article_runs())
    assert found.verdict == CONFIRMED, found.why
    assert found.here
    assert found.why


@pytest.mark.parametrize(
    ("id", "verdict", "runs"), CASES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_verdict(id, verdict, runs):
    found = judgement(id, runs)
    assert found.verdict == verdict, found.why


@pytest.mark.parametrize("judge", sorted(judges.JUDGES.keys() - {"beyond"}))
def test_each_judge_has_a_case_of_each_verdict(judge):
    reached = {verdict for id, verdict, _ in CASES if CLAIMS[id].judge == judge}
    assert reached >= ({REFUTED} if judge in EXACT else {REFUTED, INCONCLUSIVE})
    assert judge in {claim.judge for claim in CLAIMS.values()}


@pytest.mark.parametrize("id", CLAIMS)
def test_without_runs_it_says_what_to_run(id):
    found = judgement(id, {})
    assert found.verdict == NOT_TESTABLE
    assert f"labutils run {CLAIMS[id].lab}" in found.why
    assert found.here == ""


@pytest.mark.parametrize(
    ("id", "name"), [(id, name) for id, claim in CLAIMS.items() for name in claim.runs]
)
def test_without_one_of_its_runs_it_says_which(id, name):
    runs = article_runs()
    del runs[CLAIMS[id].lab, name]
    found = judgement(id, runs)
    if CLAIMS[id].judge == "optimum" and name != "workers=3":
        assert found.verdict == CONFIRMED  # the others of the sweep still answer
    elif CLAIMS[id].judge in SWEEPS and len(CLAIMS[id].how["before"]) > 1:
        assert found.verdict == CONFIRMED
    else:
        assert found.verdict == NOT_TESTABLE
        assert name in found.why or len(CLAIMS[id].runs) == 1


@pytest.mark.parametrize("id", CLAIMS)
def test_runs_that_recorded_nothing_say_nothing(id):
    runs = {
        key: Run(*key, scale="full", status="oom", machine=run.machine)
        for key, run in article_runs().items()
    }
    found = judgement(id, runs)
    if CLAIMS[id].judge not in (
        "fails",
        "cured",
        "fails_only_with",
        "fails_on_capability",
    ):  # running out is a failure too
        assert found.verdict == NOT_TESTABLE
        assert "oom" in found.why or "labutils run" in found.why
    else:
        assert found.verdict != CONFIRMED


@pytest.mark.parametrize("id", sorted(EVERY.keys() - CLAIMS.keys()))
def test_what_no_run_can_test_says_why_with_runs_and_without(id):
    for runs in ({}, article_runs()):
        found = judgement(id, runs)
        assert (found.verdict, found.here, found.why) == (NOT_TESTABLE, "", EVERY[id].note)
    row = judges.as_markdown(judges.judge(id, {}, {})).splitlines()[-1]
    assert row.count(EVERY[id].note) == 1


def test_a_skipped_run_is_no_success():
    runs = with_runs(
        Run(
            "04",
            "max-autotune",
            scale="full",
            status="skipped: no compiler",
            machine={"gpu": "any"},
        )
    )
    found = judgement("A1.compile.max-autotune", runs)
    assert found.verdict == NOT_TESTABLE
    assert "no compiler" in found.why


def test_a_failure_without_metrics_is_judged_by_its_status():
    status = "error: RuntimeError: accessing tensor output"
    runs = with_runs(Run("04", "max-autotune", scale="full", status=status, machine={"gpu": "any"}))
    assert judgement("A1.compile.max-autotune", runs).verdict == CONFIRMED


def on_a_laptop() -> Runs:
    """The article's runs as if a CPU had made them at tiny."""
    runs = article_runs()
    for run in runs.values():
        run.machine, run.scale = dict(CPU), "tiny"
    return runs


@pytest.mark.parametrize("id", CLAIMS)
def test_a_cpu_judges_what_it_can(id):
    found = judgement(id, on_a_laptop())
    if CLAIMS[id].needs == "any":
        assert found.verdict == CONFIRMED
        assert ("tiny" in found.why) is (CLAIMS[id].judge not in judges.ANY_SCALE)
    else:
        assert found.verdict == NOT_TESTABLE
        assert "GPU" in found.why


@pytest.mark.parametrize("id", CLAIMS)
def test_beside_other_labs_only_what_is_counted_is_decided(id):
    """The p10-p90 range doesn't tell of a neighbour that began halfway."""
    runs = article_runs()
    for run in runs.values():
        run.beside = 2
    found = judgement(id, runs)
    decided = CLAIMS[id].judge in judges.UNDISTURBED
    assert found.verdict == (CONFIRMED if decided else INCONCLUSIVE)
    told = f"2 other labs ran beside it, which may have shifted it. Alone: labutils run {CLAIMS[id].lab} --force"
    assert (told in found.why) is not decided
    assert found.here == judgement(id, article_runs()).here


def test_one_disturbed_run_of_several_is_enough():
    runs = article_runs()
    runs["04", "compile"].beside = 1
    assert judgement("A1.compile.speedup", runs).verdict == INCONCLUSIVE
    assert "But another lab ran beside it" in judgement("A1.compile.speedup", runs).why
    runs["04", "compile"].beside = "many"
    assert judgement("A1.compile.speedup", runs).verdict == CONFIRMED
    assert judges.JUDGES.keys() >= judges.UNDISTURBED


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", "small"), ("workload", "another"), ("machine", {"gpu": "another"}), ("data", "hub")],
)
def test_runs_that_differ_are_not_compared(field, value):
    runs = article_runs()
    setattr(runs["04", "compile"], field, value)
    found = judgement("A1.compile.speedup", runs)
    assert found.verdict == NOT_TESTABLE
    assert "can't be compared" in found.why


def test_another_card_can_not_test_xformers_refusal():
    runs = article_runs()
    for key in (("00", "machine"), ("00", "xformers")):
        runs[key].machine = {"gpu": "NVIDIA H200", "compute_capability": "9.0"}
    found = judgement("A1.blackwell.xformers", runs)
    assert found.verdict == NOT_TESTABLE
    assert "12.0" in found.why and "9.0" in found.why
    del runs["00", "xformers"]
    assert judgement("A1.blackwell.xformers", runs).why == found.why


def test_few_samples_are_no_spread():
    run = timed("04", "compile", 4 * 102)
    run.metrics["step_ms"], run.samples = {"median": 408.0, "p10": 408.0, "p90": 408.0, "n": 2}, {}
    found = judgement("A1.compile.speedup", with_runs(run))
    assert found.verdict == NOT_TESTABLE
    assert "2 sample(s)" in found.why


def test_samples_stand_in_for_a_missing_summary():
    run = timed("04", "compile", 4 * 102)
    del run.metrics["step_ms"]
    assert judgement("A1.compile.speedup", with_runs(run)).verdict == CONFIRMED


def test_the_reading_of_a_step_is_named():
    micro = judgement("A1.stock.step-ms", article_runs())
    assert "a micro-step" in micro.why and micro.here == "1160 ms, 290 a micro-step"
    whole = judgement("A1.stock.step-ms", with_runs(timed("02", "stock", 300)))
    assert "an optimizer step" in whole.why


def test_speedups_are_shown_with_both_times():
    assert judgement("A1.total.speedup", article_runs()).here == "1160 → 392 ms (2.96x)"


def test_both_machines_are_judged():
    slow = with_runs(timed("04", "compile", 4 * 140))
    (found,) = judges.judge(["A1.compile.speedup"], slow, article_runs())
    assert (found.verdict, found.reference_verdict) == (REFUTED, CONFIRMED)
    assert (found.here, found.reference) == ("564 → 560 ms (1.01x)", "564 → 408 ms (1.38x)")
    assert found.published == "141 → 102 ms"


def test_all_claims_are_judged_in_the_article_s_order():
    assert [j.claim.id for j in judges.judge(None, {}, {})] == list(EVERY)


def test_an_unknown_claim_is_refused():
    with pytest.raises(ValueError, match="A1.workers.optimum"):
        judges.judge(["A1.workers.optimal"], {}, {})


def test_markdown_is_one_table():
    runs = with_metrics("04", "max-autotune", message="RuntimeError: a | b\nand more")
    lines = judges.as_markdown(judges.judge(None, runs, runs)).partition("\n\n")[0].splitlines()
    assert len(lines) == 2 + len(EVERY)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {6}
    (row,) = [line for line in lines if "A1.total.speedup" in line]
    assert (
        "290 → 98 ms | 1160 → 392 ms (2.96x) (confirmed) | 1160 → 392 ms (2.96x) | **confirmed**"
        in row
    )


def test_markdown_marks_what_is_absent():
    (_, _, row) = judges.as_markdown(judges.judge("A1.total.speedup", {}, {})).splitlines()
    assert "| – | – | **not testable here**: No run on record. Type: labutils run 04 |" in row


def test_markdown_says_once_why_several_claims_can_t_be_tested():
    ids = ["A2.compile.speed", "A2.fixed.speed", "A1.total.speedup"]
    table, *below = judges.as_markdown(judges.judge(ids, {}, {})).split("\n\n")
    first, second, other = table.splitlines()[2:]
    assert "**not testable here** (1)" in first and "**not testable here** (1)" in second
    assert "**not testable here**: No run on record. Type: labutils run 04" in other
    assert below == ["(1) No run on record. Type: labutils run 06"]


def test_a_lab_that_was_run_without_a_claims_runs_is_not_said_to_be_unrun():
    lacking = {("06", "other"): Run("06", "other", machine={"cpu": "a CPU"})}
    assert judges.judge("A2.compile.fp8-speed", lacking, {})[0].why.startswith(
        "It is a statement about a GPU"
    )
    with_gpu = {("06", "other"): Run("06", "other", machine={"gpu": "a GPU"})}
    told = judges.judge("A2.compile.fp8-speed", with_gpu, {})[0]
    assert told.verdict == judges.NOT_TESTABLE
    assert (
        told.why.startswith("Lab 06 has made none of the runs that it takes (")
        and "parameters cell" in told.why
    )


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (
            1.3,
            "The opposite of what was published at b4, by more than the spread: -10 to -1 % is "
            "meant",
        ),
        (0.7, "Larger than published at b4, by more than the spread"),
        (0.995, "Smaller than published at b4, by more than the spread"),
    ],
)
def test_a_miss_says_which_way_it_misses(factor, told):
    """4 to 7 % shorter was published, 1 to 10 % is meant."""
    found = judgement("A2.fp8.speed", with_runs(a2("fp8-te b4", 4 * 990 * factor)))
    assert found.verdict == REFUTED and found.why.startswith(told)


def test_several_misses_are_told_apart():
    runs = with_runs(a2("fp8-te b4", 4 * 990 * 1.3), a2("fp8-te b8", 8 * 990 * 0.7))
    found = judgement("A2.fp8.speed", runs)
    assert found.why.startswith(
        "The opposite of what was published at b4, larger than published at b8, by more"
    )


def test_a_change_where_none_was_published_is_called_one():
    """Whichever way: of nothing there is no larger and no smaller, and no opposite."""
    for peak in (0.5, 100.0):
        found = judgement("A2.fp8.memory", with_metrics("06", "fp8-te b8", peak_allocated_gb=peak))
        assert found.why.startswith(
            "Changed, where no change was published at b8, by more than the spread: "
        )


def test_a_miss_within_the_spread_says_which_way_too():
    found = judgement("A2.fp8.speed", with_runs(a2("fp8-te b4", 4 * 990 * 0.88, spread=0.05)))
    assert found.verdict == INCONCLUSIVE and found.why.startswith(
        "Larger than published at b4, but within the spread"
    )


def test_whatever_is_more_is_told_of_both_runs():
    """Of a count as of a share, and of what isn't more."""
    share = judgement("A4.pytorch.scaler", article_runs())
    assert share.why == (
        "Lost share: a higher number in 'numbers: fp16, loss not scaled' than in 'numbers: fp16, "
        "scaled loss'."
    )
    none = judgement("A2.te.breaks-graph", with_metrics("06", "compile-fp8-te b1", graph_breaks=0))
    assert none.why == "Graph breaks: no higher number in 'compile-fp8-te b1' than in 'compile b1'."


def test_found_numbers_have_no_senseless_digits():
    assert [
        figures(value) for value in (2.66935e12, 1234.0, 58.41459, -0.708661, 1755.71, 3.0)
    ] == [
        *("2.67e+12", "1,234", "58.41", "-0.7087", "1,755.7", "3"),
    ]


# ---------------------------------------------------------------------------- for whatever runs


anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
)
summaries = st.dictionaries(st.sampled_from(["median", "p10", "p90", "n"]), anything)
METRIC_KEYS = ("metric", "metrics", "heavier", "lighter", "share")
named = [claim.how[key] for claim in CLAIMS.values() for key in METRIC_KEYS if key in claim.how]
metric_names = sorted(
    {"step_ms", "failed", "message"}.union(*([n] if isinstance(n, str) else n for n in named))
)
metrics_of = st.dictionaries(st.sampled_from(metric_names), anything | summaries)
partial_runs = st.builds(
    Run,
    lab=st.just("lab"),
    run=st.just("run"),
    scale=st.sampled_from(["tiny", "full"]),
    status=st.sampled_from(["ok", "oom", "skipped: why", "error: RuntimeError"]),
    metrics=metrics_of | st.none(),
    samples=st.dictionaries(
        st.sampled_from(["step_ms", "data_ms"]), st.lists(anything, max_size=4)
    ),
    machine=st.sampled_from([{}, {"gpu": "any", "compute_capability": "12.0"}]),
    recipe=st.dictionaries(st.just("accumulation"), anything),
)


@settings(deadline=None)
@given(st.data())
def test_no_judge_raises_on_partial_runs(data):
    claim = data.draw(st.sampled_from(list(CLAIMS.values())))
    names = data.draw(st.sets(st.sampled_from(claim.runs)))
    runs = {(claim.lab, name): data.draw(partial_runs) for name in names}
    found = judges.assess(claim, runs)
    assert found.verdict in judges.VERDICTS
    assert found.why
    assert bool(found.shown) is (found.verdict != NOT_TESTABLE)


@settings(deadline=None)
@given(
    st.floats(0.01, 100),
    st.sampled_from(
        ["A1.workers.three", "A1.workers.shape", "A1.workers.optimum", "A1.total.speedup"]
    ),
)
def test_a_faster_machine_changes_no_verdict_on_ratios(factor, id):
    runs = copy.deepcopy(article_runs())
    for run in runs.values():
        if "step_ms" in run.metrics:
            run.metrics["step_ms"] = {
                k: v if k == "n" else v * factor for k, v in run.metrics["step_ms"].items()
            }
    assert judgement(id, runs).verdict == CONFIRMED


@settings(deadline=None)
@given(st.floats(1.01, 4), st.floats(0, 0.3))
def test_overlapping_spreads_never_confirm_a_speedup(ratio, spread):
    before, after = timed("04", "stock", 100 * ratio, spread), timed("04", "pinned", 100, spread)
    low, high = before.metrics["step_ms"]["p10"], after.metrics["step_ms"]["p90"]
    found = judgement("A1.total.speedup", with_runs(before, after))
    assert low > high or found.verdict != CONFIRMED
    assert ratio < 1 + 1.96 * 0.75 or found.verdict != REFUTED


def test_a_cpu_is_named_as_the_reason_though_a_rung_was_left_out_there():
    """A rung that a CPU can't tell apart is kept without a workload, which is not why the claim
    can't be tested.
    """
    runs = with_runs(Run("04", "pinned", status="skipped: on a CPU this rung is no different"))
    for run in runs.values():
        run.machine = CPU
    assert runs["04", "stock"].workload
    assert "statement about a GPU" in judgement("A1.total.speedup", runs).why


def test_the_reference_says_what_it_says_in_its_units():
    """Limits of times are told in milliseconds, and changes of times are step by step where steps
    can be paired.
    """
    reference = read_runs(REFERENCE)
    units = {"_ms": " ms", "_ratio": "x", "_gb": " GB"}
    told = 0
    for claim in CLAIMS.values():
        found = judges.assess(claim, reference)
        if claim.judge == "limit" and found.shown:
            metric = claim.how["metrics"][0]
            shown = found.shown.removesuffix(" predicted")
            assert shown.endswith(units.get("_" + metric.rpartition("_")[2], " %")), (
                claim.id,
                found.shown,
            )
            told += 1
    assert told > 3
    speed = judges.assess(CLAIMS["A2.fp8.speed"], reference)
    ratio = judges.Evidence(CLAIMS["A2.fp8.speed"], reference).ratio("bf16 b1", "fp8-te b1")
    assert ratio.paired
    assert f"b1: {100 * (ratio.middle - 1):+.0f} %" in speed.shown
