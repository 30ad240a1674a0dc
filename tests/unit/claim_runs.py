"""Runs as the article's own machine would have recorded them: the ground on which the claims' tests stand."""

from __future__ import annotations

from labutils.results import Run, summarise

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
    """Every run that A1's claims need, with the article's numbers (an optimizer step being four of its steps)."""
    sweep = {0: 290, 1: 156, 2: 144, 3: 141, 4: 148, 8: 178}
    shares = {"data_share": 0.45, "launch_share": 0.05, "host_share": 0.1, "copies_share": 0.01, "sync_share": 0.02}
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
        untimed("00", "unlisted architecture", warned=1, failed=1, message="no kernel image is available"),
        untimed("00", "xformers", failed=1, message="NotImplementedError: No operator found"),
        untimed("01", "lora-counts", full_d4096=4096**2, lora_d4096_r8=2 * 4096 * 8),
        untimed("01", "equivalence", base_change=0.0),
        timed("02", "stock", 4 * 290, **shares, **stock),
        timed("02", "logging=synchronous", 400),
        timed("02", "logging=ring-buffer", 360),
        *(timed("03", f"workers={n}", 4 * ms, data_ms=spread_of(40 if n else 620)) for n, ms in sweep.items()),
        untimed("03", "shm=tiny", failed=1, message="RuntimeError: worker is killed by signal: Bus error"),
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
        untimed("04", "reduce-overhead", failed=1, message="RuntimeError: accessing tensor output of CUDAGraphs"),
        untimed("04", "max-autotune", failed=1, message="RuntimeError: accessing tensor output of CUDAGraphs"),
        untimed("04", "reduce-overhead, accumulation=1", failed=0),
    ]
    for run in runs:
        run.workload = "sd15-lora" if run.lab == "04" else run.workload
    return {(run.lab, run.run): run for run in runs}
