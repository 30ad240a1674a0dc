"""Synthetic runs with known times, for the tests of whatever reads runs."""

from __future__ import annotations

from typing import Any

from labutils.results.records import REFERENCE, Run, Runs, read_runs, summarise

GPU = {"gpu": "RTX PRO 6000 Blackwell", "compute_capability": "12.0"}


def timed(lab: str, name: str, ms: float, spread: float = 0.004, **metrics: Any) -> Run:
    """A run at `full` on a GPU whose five steps lie within `spread` (a share) of `ms`."""
    samples = [ms * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1)]
    return Run(
        lab,
        name,
        scale="full",
        workload="sd15-lora",
        recipe={"micro_batch": 1, "accumulation": 4},
        metrics={"step_ms": summarise(samples)} | metrics,
        samples={"step_ms": samples},
        machine=dict(GPU),
    )


def untimed(lab: str, name: str, **metrics: Any) -> Run:
    """A run that recorded `metrics` only."""
    return Run(lab, name, scale="full", metrics=dict(metrics), machine=dict(GPU))


def article_runs() -> Runs:
    """The H200's runs, which every lab's claims need."""
    return read_runs(REFERENCE)
