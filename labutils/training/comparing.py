"""Measuring recipes: one alone, or several interleaved in one process so that whatever drifts drifts for all of them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from tqdm import tqdm

from labutils import hardware
from labutils.measure.steps import StepClock, StepTimes
from labutils.recipe import Recipe
from labutils.results import Run, summarise
from labutils.training.session import Session
from labutils.workloads.base import Workload

ROUNDS = 3


def train(workload: Workload, recipe: Recipe, steps: int = 10, warmup: int = 2, name: str = "run") -> Run:
    """One recipe on one workload: build, first step, `warmup` more, then `steps` timed optimizer steps.

    Running out of memory or any other failure becomes the run's status; nothing is raised but Ctrl-C.
    """
    return compare(workload, {name: recipe}, steps=steps, rounds=1, warmup=warmup)[name]


def compare(
    workload: Workload, recipes: Mapping[str, Recipe], steps: int = 5, rounds: int = ROUNDS, warmup: int = 2
) -> dict[str, Run]:
    """Every recipe's run: `rounds` times round all of them, `steps` timed optimizer steps each time.

    All sessions stay open side by side (the frozen weights are held once). A recipe that fails drops out with its reason as
    the run's status; the others go on.
    """
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        measured = {}
        for name, recipe in tqdm(recipes.items(), desc="preparing", disable=len(recipes) < 2):
            runs[name] = _empty_run(workload, recipe, name)
            if contender := _attempt(runs[name], lambda recipe=recipe: Contender(workload, recipe, warmup)):
                stack.callback(contender.close)
                measured[name] = contender
        for _ in tqdm(range(rounds), desc="measuring", disable=len(recipes) < 2):
            for name in list(measured):
                if _attempt(runs[name], lambda c=measured[name]: c.measure(steps)) is None:
                    del measured[name]
        for name, contender in measured.items():
            _attempt(runs[name], lambda c=contender, run=runs[name]: c.report(run))
    return runs


def measure(session: Session, steps: int) -> StepTimes:
    """Time `steps` optimizer steps of a session that is warm. Step 0 of the block fills the pipeline and isn't counted."""
    clock = StepClock(session.workload.device)
    session.batches.reset_wait()
    clock.start()
    for _ in range(steps):
        session.step()
        clock.mark(session.batches.reset_wait())
    return clock.stop()


class Contender:
    """A session, its first step apart, and the step times it gathers round by round."""

    def __init__(self, workload: Workload, recipe: Recipe, warmup: int) -> None:
        self.times = StepTimes()
        hardware.cuda.reset_peak_memory()
        before = hardware.cuda.allocated_memory()
        self.session = Session(workload, recipe)
        self.first_step_s = self._first_step()
        measure(self.session, warmup)
        self.memory = self._peak_memory(before)

    def _first_step(self) -> float:
        began = time.perf_counter()
        self.session.step()
        if self.session.workload.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _peak_memory(self, before: float | None) -> dict[str, float]:
        """This session's own peak, in GB: what others held `before` is taken off, the frozen weights it shares are not."""
        peak = hardware.cuda.peak_memory()
        if peak is None or before is None:
            return {}
        frozen = sum(t.nbytes for t in self.session.model.parameters() if not t.requires_grad) / 1e9
        shared = min(before, frozen)  # held already when this session was built
        found = {"peak_allocated_gb": peak[0] - before + shared}
        return found | ({"peak_reserved_gb": peak[1]} if before == 0 else {})

    def measure(self, steps: int) -> StepTimes:
        """One round: steps until the batches that workers made ready while others ran are used up, then timed ones."""
        recipe = self.session.recipe
        ready = recipe.num_workers * recipe.prefetch_factor
        measure(self.session, 1 + math.ceil(ready / recipe.accumulation) if ready else 1)
        self.times.extend(measure(self.session, steps))
        return self.times

    def report(self, run: Run) -> Run:
        """Fill in the run's metrics and samples."""
        self.session.driver.log.close()
        recipe, workload = self.session.recipe, self.session.workload
        step_ms = summarise(self.times.step_ms)
        run.recipe = recipe.as_dict()
        run.samples = {"step_ms": _rounded(self.times.step_ms), "data_ms": _rounded(self.times.data_ms)}
        run.metrics = {
            "step_ms": step_ms,
            "wall_ms": summarise(self.times.wall_ms),
            "data_ms": summarise(self.times.data_ms),
            "first_step_s": self.first_step_s,
            "build_s": self.session.build_s,
            "examples_per_s": recipe.examples_per_step / step_ms["median"] * 1e3,
            "loss": self.session.losses,
        }
        run.metrics |= self.memory | _against_the_hardware(workload, recipe, step_ms["median"])
        return run

    def close(self) -> None:
        self.session.close()


def _against_the_hardware(workload: Workload, recipe: Recipe, step_ms: float) -> dict[str, float]:
    """The floor that this machine's measured rates set, the rate reached, and its share of the data sheet's dense peak."""
    dtype = recipe.precision
    work = workload.work(recipe)
    tflops = work.flops / step_ms / 1e9
    roofline = hardware.measured_roofline(dtype)
    found = {"tflops": tflops, "floor_ms": roofline.floor_ms(work.flops, work.bytes), "flops_per_step": work.flops}
    spec = hardware.find_spec(hardware.machine().get("gpu", ""))
    if workload.device.type == "cuda" and spec and (peak := spec.dense.get(dtype)):
        found["mfu"] = tflops / peak
    return found


def _empty_run(workload: Workload, recipe: Recipe, name: str) -> Run:
    fitted = recipe.fitted_to(workload.device.type).as_dict()
    return Run(
        lab="", run=name, workload=workload.name, scale=workload.scale, weights=workload.weights, data=workload.data,
        recipe=fitted,
    )  # fmt: skip


def _attempt(run: Run, action: Any) -> Any:
    """The action's result, or None with the reason in the run's status; memory is given back after a failure."""
    status = ""
    try:
        return action()
    except torch.OutOfMemoryError:
        status = "oom"
    except Exception as error:
        status = f"error: {type(error).__name__}: {error}"
    # Outside the except block: inside it the exception still holds the frames, and these the tensors.
    run.status = status
    gc.collect()
    hardware.cuda.empty_cache()
    return None


def _rounded(samples: list[float]) -> list[float]:
    return [round(sample, 4) for sample in samples]
