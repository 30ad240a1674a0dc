"""Predicted gains against measured ones, on the course's own loop, one fix at a time.

    run = ablations(open_workload("sd15-lora"), STOCK, only=["workers", "caching"])
    run.metrics["each"]["workers"]      predicted and measured gain, round by round

A start recipe is timed, traced, and diagnosed. Only then are the recipes with one fix each built
and timed, interleaved with the start in one process. A gain is the median over rounds of what the
fix saves against the start of the same round. So neither a drift of the machine nor a round that
meets something for the first time decides it. What is predicted for these rounds comes from the
start's times in them: the first steps of all read their files for the first time, on a host that
may have been slower or faster. The trace is the first minute's, and so is what fetching takes where
the loader waits for the device.

Where batches differ in length, recipes are timed and traced on the same few batches. How much of
the tokens is padding is an epoch's, for a few batches may have twice as much.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from labutils.profiling import cuda
from labutils.profiling.machine import machine_facts
from labutils.profiling.trace import Trace
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.tools.diagnose import Fix, diagnose
from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.sources import of_record, own_ms_of
from labutils.training import Benchmark
from labutils.training.model_edits import with_epoch_rate
from labutils.workloads.base import Workload

START = "start"
TRACED = 2
PER = {"step": "", "useful token": " a useful token", "example": " an example"}


def ablations(
    workload: Workload,
    start: Recipe,
    only: Collection[str],
    steps: int = 5,
    rounds: int | None = None,
) -> Run:
    """Diagnose `start` on `workload`, then measure the fixes named in `only` against it, all side
    by side with it, each with a model and its activations.

    The run's metrics: `each` fix's row, see `_row`; of the start's step `data_ms`, the wait for
    data, and `computing_ms`, the rest. Raises `RuntimeError` where the start can't be trained.
    """
    with Benchmark(workload, same_batches=workload.steps_vary) as bench:
        run = bench.compare({START: start}, max(steps, TRACED), rounds=1)[START]
        if not run.ok:
            raise RuntimeError(f"The start can't be trained here: {run.status}.")
        idle = _from_idle_ms(bench)
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            trace = bench.profile(START, Path(folder), TRACED, with_shapes=True)

        def diagnosed(run: Run, idle_ms: list[float]) -> list[Fix]:
            fixes = diagnose(_evidence(bench, run, idle_ms, trace), only).fixes
            return [replace(fix, changes=knobs(fix, start, workload.name)) for fix in fixes]

        asked = later = diagnosed(with_epoch_rate(run, workload), idle)
        recipes, why = recipes_of(start, asked, workload.device.type)
        runs = bench.compare({START: start} | recipes, steps, rounds) if recipes else {}
        runs = {name: with_epoch_rate(run, workload) for name, run in runs.items()}
        if runs and runs[START].ok and not bench.same_batches:
            later = diagnosed(runs[START], _from_idle_ms(bench))
    each = {}
    for fix in predicted_later(asked, later):
        pair = (runs[START], runs[fix.name]) if fix.name in recipes else None
        each[fix.name] = _row(fix, pair, why.get(fix.name, ""))
    base = runs.get(START, run)
    waited = base.metric("data_ms") or 0.0
    parts = {"data_ms": waited, "computing_ms": (base.metric("step_ms") or 0.0) - waited}
    return Run("", "", metrics=parts | {"each": each})


def predicted_later(asked: Iterable[Fix], later: Iterable[Fix]) -> list[Fix]:
    """The fixes that were `asked` for, with the gains of a `later` diagnosis; 0 where it finds
    nothing to gain. Where it would turn knobs otherwise than was measured, the first gain stays.
    """
    now = {fix.name: fix for fix in later}
    known = [(fix, now.get(fix.name, replace(fix, gain=0.0))) for fix in asked]
    return [new if new.changes == fix.changes else fix for fix, new in known]


def _evidence(bench: Benchmark, run: Run, idle_ms: list[float], trace: Trace) -> Evidence:
    """The start's evidence: its run, timed without the profiler, and a trace of some steps, told as
    the hooks tell a script's."""
    recipe = Recipe(**run.recipe)
    timed = slice(TRACED if bench.same_batches else None)  # of batches that differ, those traced
    step_ms, data_ms = run.samples["step_ms"][timed], run.samples["data_ms"][timed]
    slowed = max(1.0, trace.wall_ms / trace.steps / statistics.median(step_ms))  # by the profiler
    fused, writes = recipe.optimizer == "adamw-fused", []
    if recipe.logging == "synchronous":
        line = {"kind": "write", "place": "labutils/training/loss_log.py", "what": ""}
        writes = [line | {"per_step": 1.0, "ms": own_ms_of(trace) / slowed}]
    peak_gb, useful = run.metric("peak_allocated_gb"), run.metric("useful_tokens")
    texts = {} if useful is None else {"tokens": 1.0, "useful": useful}
    config = {
        # Not `allow_tf32`, which raises where the newer of the two settings was used.
        "matmul_tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "cudnn_tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "threads": torch.get_num_threads(),
    }
    if peak_gb:
        config |= {"peak_gb": peak_gb, "memory_gb": machine_facts()["gpu_memory_gb"]}
    record = {
        "device": bench.workload.device.type,
        "step_ms": step_ms,
        "data_ms": data_ms,
        "host_step_ms": idle_ms,
        "backwards": recipe.accumulation,
        "batches": recipe.accumulation,
        "fetch_cpu_ms": None,
        "calls": writes,
        "sync_lines": {},
        "batch_facts": [{"examples": recipe.micro_batch} | texts],
        "loader": {"num_workers": recipe.num_workers, "pin_memory": recipe.pin_memory},
        "optimizer": {"name": "AdamW", "form": "fused" if fused else "foreach"},
        "config": config,
    }
    evidence = of_record(record, trace)
    recomputed = evidence.recomputed if recipe.checkpointing != "off" else 0.0
    source = f'the recipe "{run.run}"'
    return replace(evidence, source=source, recomputed=recomputed, held_in_format=True)


def _from_idle_ms(bench: Benchmark) -> list[float]:
    """Milliseconds until the host has given a step of the start to an idle GPU, three times."""
    times: list[float] = []
    for _ in range(3 if bench.workload.device.type == "cuda" else 0):
        cuda.synchronize()
        began = time.perf_counter()
        bench.candidates[START].trainer.step()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def recipes_of(
    start: Recipe, fixes: Iterable[Fix], device: str
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Fix -> its recipe, and fix -> why it has none: refused, or the same as the start here."""
    recipes: dict[str, Recipe] = {}
    refused: dict[str, str] = {}
    for fix in fixes:
        try:
            recipe = start.but(**fix.changes)
        except ValueError as error:
            refused[fix.name] = str(error)
            continue
        if recipe.fitted_to(device) == start.fitted_to(device):
            refused[fix.name] = "here it is the same as the start"
        else:
            recipes[fix.name] = recipe
    return recipes, refused


def knobs(fix: Fix, start: Recipe, workload: str) -> dict[str, Any]:
    """The fields of the start that make a fix; {} where it is no knob of a recipe."""
    if fix.name == "batch size" and fix.changes:
        merged = fix.changes["batches_merged"]
        accumulation = max(1, start.accumulation // merged)
        return {"micro_batch": merged * start.micro_batch, "accumulation": accumulation}
    if fix.name == "caching" and workload.startswith("sd15"):
        return {"cache": "latents+text", "num_workers": 0, "persistent_workers": False}
    if fix.name == "padding":
        budget = max(2048, 1024 * start.micro_batch)
        return {"shapes": "packed", "micro_batch": 1, "token_budget": budget}
    return fix.changes


def _row(fix: Fix, pair: tuple[Run, Run] | None, why: str) -> dict[str, Any]:
    """A fix on record: `changes`, gains as `predicted` and `measured` (shares of the time), the
    times `before` and `after` in each round, and by how much the predicted step is longer than the
    measured one (`off`); without a measurement `why`."""
    row = {"changes": fix.changes, "per": fix.per, "predicted": fix.gain, "why": why}
    row |= {"measured": None, "off": None, "before": [], "after": []}
    if pair is None:
        return row
    if failed := [run.status for run in pair if not run.ok]:
        return row | {"why": failed[0]}
    before, after = (round_costs(run, fix.per) for run in pair)
    measured = statistics.median(1 - b / a for a, b in zip(before, after, strict=True))
    off = (1 - fix.gain) / (1 - measured) - 1
    return row | {"measured": measured, "off": off, "before": before, "after": after}


def round_costs(run: Run, per: str = "step") -> list[float]:
    """Milliseconds a step, by the host's clock, in each round of a run.

    per: "useful token" divides by the round's tokens, and the share of an epoch's that are useful.
    """
    walls = run.samples["wall_ms"]
    if per != "useful token":
        return list(walls)
    rounds = np.reshape(run.samples["tokens"], (len(walls), -1))
    return list(np.divide(walls, run.metrics["useful_tokens"] * rounds.mean(axis=1)))


def fix_table(loops: Mapping[str, Run]) -> pd.DataFrame:
    """One row a fix of each loop: gains in percent, with the rounds' range."""
    return pd.DataFrame(
        {
            "loop": loop,
            "fix": name,
            "what changes": ", ".join(f"{knob}={new}" for knob, new in row["changes"].items()),
            "predicted": f"{row['predicted']:.0%}" + PER[row["per"]],
            "measured": _with_range(row),
            "step off by": "" if row["off"] is None else f"{row['off']:+.0%}",
        }
        for loop, run in loops.items()
        for name, row in run.metrics.get("each", {}).items()
    )


def _with_range(row: Mapping[str, Any]) -> str:
    """ "48% (46 to 51)": the median of the rounds, the least and the most."""
    if row["measured"] is None:
        return row["why"] or "not here"
    times = zip(row["before"], row["after"], strict=True)
    shown = [round(100 * (1 - after / before)) for before, after in times]
    spread = f" ({min(shown)} to {max(shown)})" if len(set(shown)) > 1 else ""
    return f"{round(100 * row['measured'])}%{spread}"
