"""Runs as the article's own machine would have recorded them: the ground on which the claims' tests
stand.
"""

from __future__ import annotations

from labutils.results.claims.a2 import BATCHES
from labutils.results.records import Run, summarise

BLACKWELL = {"gpu": "RTX PRO 6000 Blackwell", "compute_capability": "12.0"}
CPU = {"cpu": "a laptop's", "cores": 2}

Runs = dict[tuple[str, str], Run]


def timed(lab: str, name: str, ms: float, spread: float = 0.004, **metrics: object) -> Run:
    """A run at `full` on the article's card whose samples lie within `spread` (a share) of `ms`."""
    samples = [ms * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1)]
    return Run(
        lab,
        name,
        scale="full",
        workload="sd15-lora",
        recipe={"micro_batch": 1, "accumulation": 4},
        metrics={"step_ms": summarise(samples)} | metrics,
        samples={"step_ms": samples},
        machine=dict(BLACKWELL),
    )


def untimed(lab: str, name: str, **metrics: object) -> Run:
    """A run that recorded `metrics` only."""
    return Run(lab, name, scale="full", metrics=dict(metrics), machine=dict(BLACKWELL))


def spread_of(ms: float, spread: float = 0.01) -> dict[str, float]:
    """A summary around `ms`."""
    return {"median": ms, "p10": ms * (1 - spread), "p90": ms * (1 + spread), "n": 9}


def article_runs() -> Runs:
    """Every run that the claims need, with the articles' numbers."""
    return a1_runs() | a2_runs() | a3_runs() | a4_runs()


def a1_runs() -> Runs:
    """Every run that A1's claims need, with the article's numbers (an optimizer step being four of
    its steps).
    """
    sweep = {0: 290, 1: 156, 2: 144, 3: 141, 4: 148, 8: 178}
    shares = {
        "data_share": 0.45,
        "launch_share": 0.05,
        "host_share": 0.1,
        "copies_share": 0.01,
        "sync_share": 0.02,
    }
    stock = {
        "gpu_utilization": 0.44,
        "kernels_share": 0.37,
        "traced_steps": 5,
        "clip_sync": 1,
        "clip_idle_ms": 0.6,
        "optimizer_idle_ms": 0.2,
        "flush_idle_ms": 1.5,
    }
    runs = [
        untimed("00", "machine", torch_architectures=["sm_75", "sm_90", "sm_120"]),
        untimed(
            "00",
            "unlisted architecture",
            warned=1,
            failed=1,
            message="no kernel image is available",
        ),
        untimed("00", "xformers", failed=1, message="NotImplementedError: No operator found"),
        untimed("01", "lora-counts", full_d4096=4096**2, lora_d4096_r8=2 * 4096 * 8),
        untimed("01", "equivalence", base_change=0.0),
        timed("02", "stock", 4 * 290, **shares, **stock),
        timed("02", "logging=synchronous", 400),
        timed("02", "logging=ring-buffer", 360),
        *(
            timed("03", f"workers={n}", 4 * ms, data_ms=spread_of(40 if n else 620))
            for n, ms in sweep.items()
        ),
        untimed(
            "03",
            "shm=tiny",
            failed=1,
            message="RuntimeError: worker is killed by signal: Bus error",
        ),
        untimed("03", "shm=enough", failed=0),
        *(
            timed("03", name, ms, host_copy_ms=spread_of(copy))
            for name, ms, copy in (
                ("pageable+blocking", 416, 2.0),
                ("pageable+async", 416, 1.99),
                ("pinned+blocking", 416, 1.98),
                ("pinned+async", 400, 0.2),
            )
        ),
        timed("04", "stock", 4 * 290, gpu_utilization=0.44),
        timed("04", "workers", 4 * 141, gpu_utilization=0.65, kernels_per_step=16000),
        timed("04", "compile", 4 * 102, kernels_per_step=9000, compiled_regions=1),
        timed("04", "pinned", 4 * 98, gpu_utilization=0.85),
        untimed(
            "04",
            "reduce-overhead",
            failed=1,
            message="RuntimeError: accessing tensor output of CUDAGraphs",
        ),
        untimed(
            "04",
            "max-autotune",
            failed=1,
            message="RuntimeError: accessing tensor output of CUDAGraphs",
        ),
        untimed("04", "reduce-overhead, accumulation=1", failed=0),
    ]
    for run in runs:
        run.workload = "sd15-lora" if run.lab == "04" else run.workload
    return {(run.lab, run.run): run for run in runs}


A2_STEP_MS, A2_MEMORY_GB = 990, 16.04
"""The baseline at batch 1: the one step time with which both of A2's break-even counts agree, and
7.54 GB / 47 %.
"""
A2_METHODS = {
    "bf16": (1.48, (0, 0), (0, 0)),
    "fp8-te": (1.41, (4, 7), (0, 0)),
    "compile": (105, (11, 20), (0, 0)),
    "compile-fp8-te": (61, (2, 6), (0, 0)),
    "compile-whole": (105, (11, 20), (0, 0)),
    "compile-whole-fp8-te": (61, (2, 6), (0, 0)),
    "fixed": (106, (48, 53), (4, 29)),
    "fixed-whole": (106, (48, 53), (4, 29)),
    "fixed-whole-fp8-te": (57, (41.5, 43), (4, 24)),
    "fixed-fp8-te": (57, (41.5, 43), (4, 24)),
    "qlora": (1.69, (-15, -19), (53, -20)),
    "nf4": (1.69, (-15, -19), (53, 0)),
    "compile-qlora": (40, (-14, -14), (53, 0)),
    "fixed-qlora": (40, (10, 10), (55, 20)),
    "fp8-frozen": (1.5, (10, 20), (45, 20)),
    "fixed-fp8-frozen": (50, (60, 65), (45, 20)),
}
"""Method -> first step in s, and by how many % it shortens the step and saves memory, at batch 1
and at batch 24.
"""


def a2_runs() -> Runs:
    """Every run that A2's claims need, with the article's numbers where it gives any."""
    runs = [a2_run(method, place) for method in A2_METHODS for place in range(len(BATCHES))]
    beside = a2_run("bf16", 0)
    beside.run = "bf16 b1, again"
    runs.append(beside)
    tracked = {run.run: run for run in runs}
    tracked["bf16 b1"].metrics["vision_share"] = 0.88
    tracked["fp8-te b1"].metrics["bf16_weights_held"] = 1
    for name, breaks in (("compile", 0), ("compile-fp8-te", 65), ("compile-qlora", 64)):
        tracked[f"{name} b1"].metrics["graph_breaks"] = breaks
    losses = {
        "bf16": 9.05,
        "fp8-te": 10.36,
        "fixed": 9.23,
        "fixed-fp8-te": 10.51,
        "qlora": 8.88,
        "fp8-frozen": 10.0,
    }
    runs += [
        untimed("05", "fp8-cast", cast_1000=448.0, cast_1000000=448.0, cast_tiny=0.0),
        untimed("05", "fp8-scaling", scale=0.0448, scaled_min=-44.0, scaled_max=448.0),
        untimed("05", "gemm", fp8_over_bf16=2.0),
        untimed(
            "05",
            "te-peft",
            failed=1,
            message="ValueError: Target module Linear() is not supported.",
        ),
        untimed(
            "06",
            "fp8-te vision",
            failed=1,
            message="AssertionError: FP8 execution requires .. divisible by 8",
        ),
        untimed(
            "06",
            "token-counts",
            aspect_token_ratio=2.4,
            tiles_low_resolution=1,
            tiles_336x336=1,
            vision_share=0.2,
        ),
        untimed("06", "recompiles uniform", recompilations=1, further_image_token_counts=3),
        untimed("06", "recompiles varied", recompilations=9),
        untimed(
            "06", "same-tokens varying", ms_per_1k_tokens=spread_of(100), peak_allocated_gb=16.0
        ),
        untimed("06", "same-tokens static", ms_per_1k_tokens=spread_of(50), peak_allocated_gb=16.0),
        untimed(
            "06", "static fewer-tokens", ms_per_1k_tokens=spread_of(51), peak_allocated_gb=14.0
        ),
        untimed("06", "same-tokens any length", ms_per_1k_tokens=spread_of(52)),
        untimed(
            "06",
            "guide",
            short_of_memory="qlora",
            few_steps="fp8-te",
            between="fixed-fp8-te",
            many_steps="fixed",
        ),
        *(
            untimed("06", f"loss {method}", final_loss=spread_of(loss, 0.001))
            for method, loss in losses.items()
        ),
        untimed("06", "loss fp8-mixed", final_loss=spread_of(9.05, 0.001)),
    ]
    for run in runs:
        run.workload = "llava-lora" if run.lab == "06" else ""
    return {(run.lab, run.run): run for run in runs}


def a2_run(method: str, place: int) -> Run:
    """One cell of A2's table: the method at the batch size of that place, its gains growing evenly."""
    first_s, faster, less_memory = A2_METHODS[method]
    batch, growth = BATCHES[place], place / (len(BATCHES) - 1)
    gain, saved = (low + (high - low) * growth for low, high in (faster, less_memory))
    return timed(
        "06",
        f"{method} b{batch}",
        A2_STEP_MS * batch * (1 - gain / 100),
        spread=0.001,
        first_step_s=first_s,
        peak_allocated_gb=(14 + 2.04 * batch) * (1 - saved / 100),
    )


def a3_runs() -> Runs:
    """Every run that A3's claims need, with the article's numbers where it gives any."""
    absmax = {"constant": 50.8, "code_0": 127, "code_1": -36, "code_2": 6, "code_3": 24}
    absmax |= {
        "restored_0": 2.5,
        "restored_1": -0.70866,
        "restored_2": 0.11811,
        "restored_3": 0.47244,
    }
    blackwell = {
        "fp32": 109.7,
        "bf16": 877.9,
        "fp8": 1755.7,
        "bandwidth": 1792,
        "memory": 96,
        "power": 300,
        "fp4": 3511.4,
    }
    h100 = {
        "fp32": 66.9,
        "bf16": 1978.9,
        "fp8": 3957.8,
        "bandwidth": 3352,
        "memory": 80,
        "power": 700,
    }
    training = [
        timed("07", "lora short", 150),
        timed("07", "qlora short", 190, ms_per_1k_useful_tokens=400.0),
        timed("07", "qlora short, batch 1", 120, ms_per_1k_useful_tokens=1000.0),
        timed("07", "unsloth short", 185),
        timed("07", "lora long", 373, peak_allocated_gb=50.5),
        timed("07", "lora long, checkpointed", 480, peak_allocated_gb=27.0),
        timed("07", "lora long, offloaded", 480 * 1.019, peak_allocated_gb=27.0 * 0.7),
        timed("07", "qlora long", 639, peak_allocated_gb=24.5, first_step_s=1.5, memory_share=0.49),
        timed("07", "qlora long, no casts", 600, peak_allocated_gb=20.0),
        timed("07", "unsloth long", 319, peak_allocated_gb=7.3, first_step_s=23.0),
    ]
    for run in training:
        run.workload = "qwen3-long"
    runs = [
        *training,
        untimed("07", "lora-counts", counts_as_the_formula=1, adapter_share=0.003),
        untimed("07", "weights", linear_share=0.258),
        untimed("07", "nf4 layer", multiplies_restored_weights=1),
        untimed("07", "absmax", **absmax),
        untimed("07", "outlier, one constant", zeros_share=0.99, others_error=1.0),
        untimed("07", "outlier, blocks", others_error=0.01),
        untimed("07", "constants", bits_float32=0.5, bits_doubled=0.126953125),
        untimed("07", "rounding int4", error=0.108),
        untimed("07", "rounding nf4", error=0.092, information_share=1.0),
        untimed("07", "chain: thin first", flops=2e9),
        untimed("07", "chain: wide first", flops=5e11),
        untimed("07", "style", answers_with_title=1),
        untimed("08", "machine"),
        untimed(
            "08",
            "unsloth import",
            failed=1,
            message="Unsloth: Xformers does not work in RTX 50X, Blackwell GPUs",
        ),
        untimed("08", "specs", **_of("blackwell", blackwell), **_of("h100", h100)),
        untimed("08", "moe adapters", attention_only=1),
        untimed("08", "moe weights", four_bit_gb=30.0),
        untimed("08", "moe long", idle_share=0.4),
        untimed("08", "dense long", gpu_busy_share=0.99),
        untimed(
            "08",
            "model of memory",
            lora_32b_batch_4_gb=130.0,
            qlora_32b_batch_4_gb=110.0,
            unsloth_32b_batch_32_gb=80.0,
            lora_120b_batch_1_gb=240.0,
            unsloth_120b_batch_32_gb=93.5,
        ),
        untimed(
            "08",
            "model of two cards",
            h100_dense_short=27 / 11,
            h100_dense_long=92 / 36,
            h100_moe_short=92 / 94,
            h100_moe_long=52 / 73,
            moe_over_dense_long=73 / 36,
            dense_long_ratio=2.6,
            moe_long_blackwell_ratio=73 / 52,
            h100_gaps_longer=1,
            blackwell_less_energy=1,
        ),
    ]
    return {(run.lab, run.run): run for run in runs}


def a4_runs() -> Runs:
    """Every run that A4's claims need beside those of the others, as if all advice paid: it gives
    no numbers.
    """
    switches = {"float32": (260, 18.0), "base": (140, 10.0), "cudnn.benchmark": (120, 10.0)}
    switches |= {"accumulation": (500, 4.0), "checkpointing": (190, 5.0)}
    runs = [
        *(timed("09", name, ms, peak_gb=gb) for name, (ms, gb) in switches.items()),
        untimed("09", "numbers: fp16, loss not scaled", lost_share=0.1, gradient_error=0.003),
        untimed("09", "numbers: fp16, scaled loss", lost_share=0.0, gradient_error=0.003),
        untimed("09", "numbers: fp16 throughout", lost_share=0.0, gradient_error=0.005),
        *(timed("09", f"tensorflow: {name}", ms) for name, ms in TENSORFLOW.items()),
        untimed("09", "tensorflow: memory growth", takes_less=1),
        untimed("09", "files: cold", example_ms=spread_of(40)),
        untimed("09", "files: warm", example_ms=spread_of(30)),
        timed("09", "data: PNG", 100),
        timed("09", "data: resized in memory", 60),
        untimed("09", "decode: JPEG", decode_ms=spread_of(5)),
        untimed("09", "decode: JPEG, GPU", decode_ms=spread_of(1)),
        untimed("09", "visible devices", as_asked=1),
        timed("09", "launches overlap", 100),
        timed("09", "launches block", 150),
        untimed("09", "threads: as they come", images_per_s=100.0),
        untimed("09", "threads: one each", images_per_s=190.0),
        untimed("09", "advice", left_alone=7),
        timed("10", "one process", 100, examples_per_s=40.0),
        timed("10", "ddp 2", 105, examples_per_s=76.0),
        timed("10", "full ddp 2", 120, examples_per_s=66.0, peak_allocated_gb=30.0),
        timed("10", "full fsdp 2", 130, examples_per_s=60.0, peak_allocated_gb=17.0),
        timed("10", "full one process", 110, examples_per_s=40.0),
        untimed("10", "nccl NCCL_DEBUG=INFO", channels=24, largest_ms=spread_of(0.5)),
        untimed("10", "nccl NCCL_SOCKET_IFNAME=lo", largest_ms=spread_of(0.4)),
        untimed("10", "nccl NCCL_IB_DISABLE=1", largest_ms=spread_of(0.4)),
        untimed("10", "topology", connections=1),
        untimed("10", "networks", **{"small Qwen3, whole at 100 GbE": 95.0}),
        timed("03", "prefetch=1", 640),
        timed("03", "prefetch=2", 560),
        untimed(
            "03",
            "persistent",
            epoch_start_ms=spread_of(170),
            epoch_start_persistent_ms=spread_of(60),
        ),
        timed("07", "lora long, 4 bits", 500, peak_allocated_gb=38.0),
    ]
    for run in runs:
        run.workload = {"07": "qwen3-long", "10": "sd15-lora"}.get(run.lab, "sd15-lora")
    return {(run.lab, run.run): run for run in runs}


TENSORFLOW = {
    "float32": 100,
    "mixed_float16": 50,
    "plain input": 100,
    "parallel, prefetched": 50,
    "cached": 30,
}


def _of(card: str, facts: dict[str, float]) -> dict[str, float]:
    return {f"{card}_{name}": value for name, value in facts.items()}
