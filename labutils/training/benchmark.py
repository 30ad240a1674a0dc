"""Measuring recipes: one alone, or several interleaved in one process, so that what drifts drifts
for all of them.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import operator
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from labutils.layers.quantization.convert import PRODUCTS
from labutils.profiling import cuda
from labutils.profiling.gpu_specs import spec_of
from labutils.profiling.machine import machine_facts
from labutils.profiling.probe import measured_roofline, probe_machine
from labutils.profiling.timing import StepClock, StepTimes
from labutils.profiling.trace import Trace, profile
from labutils.profiling.utilization import Utilization
from labutils.recipe import Recipe
from labutils.results.records import Run, status_of, summarise
from labutils.training import distributed
from labutils.training.distributed import bytes_here
from labutils.training.trainer import Trainer
from labutils.workloads.base import Work, Workload

LOG = logging.getLogger(__name__)
"""Tells of failures with their tracebacks, to those who listen at the level INFO: a run's status
has one line.
"""
AfterStep = Callable[[Trainer], None]
Meet = Callable[[Trainer], None]
ROUNDS = 3
ROUND_MS = 400
"""A round lasts at least this long: a handful of 25 ms steps is too short to tell noise from drift.
"""


def train(
    workload: Workload,
    recipe: Recipe,
    steps: int = 10,
    warmup: int = 2,
    name: str = "run",
    after_step: AfterStep | None = None,
    same_batches: bool = False,
    meet: Meet | None = None,
) -> Run:
    """One recipe on one workload: build, first step, `warmup` more, then at least `steps` timed
    optimizer steps.

    `after_step` is called with the trainer after every step (`logs.MemoryLog`), timed or not.
    Running out of memory or any other failure becomes the run's status; nothing is raised but
    Ctrl-C. `same_batches`, `meet`: see `Benchmark`.
    """
    with Benchmark(workload, warmup, after_step, same_batches, meet) as bench:
        return bench.compare({name: recipe}, steps, rounds=1)[name]


def compare(
    workload: Workload,
    recipes: Mapping[str, Recipe],
    steps: int = 5,
    rounds: int = ROUNDS,
    warmup: int = 2,
) -> dict[str, Run]:
    """Every recipe's run, interleaved: see `Benchmark.compare`, whose trainers end here with the
    comparison.
    """
    with Benchmark(workload, warmup) as bench:
        return bench.compare(recipes, steps, rounds)


SETTLE_MS = 100
"""A recipe runs at least this long before it is timed."""
LONG_MS = 50 * SETTLE_MS
"""A step of this length needs no settling, which would take as long again."""
WATCH_MS = 2000
"""Utilisation is watched at least this long: the driver renews it a few times a second only."""
TRIES = 3
"""Rounds that are thrown away at most because the compiler was at work in them; a recipe that never
stops compiling shows that in its times, and says so by its metric `unsettled_rounds`."""
REFILL_S = 0.3
"""Pause after a recipe with workers: they go on reading ahead, and would do it during the next
recipe's steps.
"""


def steps_to_drain(recipe: Recipe, ranks: int = 1) -> int:
    """Steps that aren't timed after a pause, or after the data was taken back: in the first one the
    loader starts, and those behind it find batches that its workers made ready meanwhile. Of
    `ranks` each takes its share of a step."""
    taken = max(1, recipe.accumulation // distributed)
    return 1 + math.ceil(recipe.num_workers * recipe.prefetch_factor / taken)


class Benchmark:
    """Sessions side by side in one process, built once each and compared as often as one likes.

    The frozen weights are held once. A recipe that fails drops out with its reason as the run's
    status, its trainer is ended and its memory given back; the others go on.

    same_batches: every round times the same batches, so that recipes whose steps differ in length
    can be compared step by step (`claims` does), within one comparison, and across several with as
    many `warmup` steps and no workers. meet: called with each trainer once, after its first step,
    to show it what would be compiled later: neither timed nor in the peak memory.
    """

    def __init__(
        self,
        workload: Workload,
        warmup: int = 2,
        after_step: AfterStep | None = None,
        same_batches: bool = False,
        meet: Meet | None = None,
    ) -> None:
        self.workload = workload
        self.warmup = warmup
        self.after_step = after_step
        self.same_batches = same_batches
        self.meet = meet
        self.candidates: dict[str, Candidate] = {}
        self.failed: dict[str, str] = {}
        self.known: dict[str, Recipe] = {}
        self.stack = ExitStack()
        probe_machine()  # now, while nothing else is on the device

    def compare(
        self, recipes: Mapping[str, Recipe], steps: int = 5, rounds: int = ROUNDS
    ) -> dict[str, Run]:
        """Name -> run: `rounds` times through all of `recipes`, there and back, at least `steps`
        timed optimizer steps of each a time.

        Recipes whose name is new are prepared first; a name that is known keeps its trainer.
        """
        self.prepare(recipes)
        for name in self._able(recipes):
            self.candidates[name].times = StepTimes()
        lead_in = max(
            (self.candidates[name].steps_to_drain for name in self._able(recipes)), default=0
        )
        for turn in _progress(range(rounds), "measuring"):
            order = self._able(recipes)[
                :: -1 if turn % 2 else 1
            ]  # there and back: a drift in a round favours nobody
            count = {name: self.candidates[name].round_of(steps) for name in order}
            if self.same_batches:  # the same ones in each round
                count = dict.fromkeys(count, max(count.values(), default=steps))
            for name, timed in count.items():
                self._attempt(name, functools.partial(self._measure, name, timed, lead_in))
        return {name: self._report(name, recipe) for name, recipe in recipes.items()}

    def prepare(self, recipes: Mapping[str, Recipe]) -> None:
        """Build and warm up those of `recipes` whose name is new; what fails is noted for its run.

        Raises `ValueError`, before anything is built, where a name that is known comes with another
        recipe.
        """
        for name, recipe in recipes.items():
            fitted = recipe.fitted_to(self.workload.device.type)
            if (name in self.candidates or name in self.failed) and self.known[name] != fitted:
                raise ValueError(
                    f'"{name}" is already another recipe in this bench. Give the new one a name of its own.'
                )
        new = [name for name in recipes if name not in self.candidates and name not in self.failed]
        for name in _progress(new, "preparing"):
            self.known[name] = recipes[name].fitted_to(self.workload.device.type)
            self._attempt(name, lambda name=name: self._enter(name, recipes[name]))
        gc.collect()  # so that the collector hardly comes by itself while steps are timed

    def watch(self, name: str, steps: int = 5) -> dict[str, float]:
        """Utilisation by the driver's account while `steps` more optimizer steps run, as metrics of
        a run.
        """
        trainer, candidate = self._trainer(name), self.candidates[name]
        candidate.settle()
        with Utilization() as utilization:
            measure(trainer, max(steps, math.ceil(WATCH_MS / candidate.step_ms)))
        return utilization.metrics()

    def profile(self, name: str, folder: Path, steps: int = 3) -> Trace:
        """A trace of `steps` more optimizer steps, without Python stacks: see
        `labutils.profiling.trace`.

        It settles inside the profiler, which takes a while to start: workers would make batches
        ready meanwhile.
        """
        return profile(
            self._trainer(name),
            steps,
            folder,
            with_stack=False,
            wait=self.candidates[name].steps_to_settle,
        )

    def _trainer(self, name: str) -> Trainer:
        """The trainer of a recipe that works; raises `RuntimeError` with the reason where it
        failed.
        """
        if name in self.failed:
            raise RuntimeError(
                f'"{name}" failed ({self.failed[name]}), so there is nothing of it to watch.'
            )
        if name not in self.candidates:
            known = ", ".join(self.candidates) or "none"
            raise RuntimeError(
                f'"{name}" is not in this bench, which has: {known}. Prepare it with compare() first.'
            )
        return self.candidates[name].trainer

    def _enter(self, name: str, recipe: Recipe) -> None:
        self.candidates[name] = Candidate(
            self.workload, recipe, self.warmup, self.after_step, self.same_batches, self.meet
        )
        self.stack.callback(self._end, name)

    def _able(self, recipes: Mapping[str, Recipe]) -> list[str]:
        return [name for name in recipes if name in self.candidates]

    def _measure(self, name: str, steps: int, lead_in: int) -> None:
        """A round of a candidate, which is looked up when it runs: what fails is held by nothing
        then.
        """
        self.candidates[name].measure(steps, lead_in)

    def _report(self, name: str, recipe: Recipe) -> Run:
        run = empty_run(self.workload, recipe, name)
        if name not in self.failed:
            self._attempt(name, lambda: self.candidates[name].report(run))
        run.status = self.failed.get(name, "ok")
        return run

    def _attempt(self, name: str, action: Callable[[], Any]) -> None:
        """Do it, or note why not; memory is given back after a failure."""
        try:
            action()
            return
        except Exception as error:
            if not distributed.here().alone:
                raise  # the others are in the midst of the same step, and wait for this rank
            self.failed[name] = status_of(error)
            LOG.info('"%s" failed', name, exc_info=True)
        # Outside the except block: inside it the exception still holds the frames, and these the
        # tensors.
        self._end(name)
        gc.collect()  # a trainer's modules and hooks refer to each other
        cuda.empty_cache()

    def _end(self, name: str) -> None:
        """End a recipe's trainer and forget it. What goes wrong in that is no news: its runs have
        their status.
        """
        if candidate := self.candidates.pop(name, None):
            with suppress(Exception):
                candidate.close()

    def close(self) -> None:
        """End all trainers."""
        self.stack.close()

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def measure(trainer: Trainer, steps: int, after_step: AfterStep | None = None) -> StepTimes:
    """Time `steps` optimizer steps of a trainer, one after the other without a pause; `after_step`
    follows each.
    """
    clock = StepClock(trainer.workload.device)
    trainer.batches.reset_wait()
    trainer.batches.reset_work()
    clock.start()
    for _ in range(steps):
        trainer.step()
        clock.mark(trainer.batches.reset_wait(), trainer.batches.reset_work())
        if after_step is not None:
            after_step(trainer)
    return clock.stop()


class Candidate:
    """A trainer, its first step apart, and the step times it gathers round by round."""

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        warmup: int,
        after_step: AfterStep | None = None,
        same_batches: bool = False,
        meet: Meet | None = None,
    ) -> None:
        self.times = StepTimes()
        self.unsettled_rounds = 0
        self.after_step = after_step
        self.same_batches = same_batches
        gc.collect()  # what earlier trainers left in cycles would be counted as held by others
        before = cuda.allocated_memory()
        self.trainer = Trainer(workload, recipe)
        built = cuda.allocated_memory()
        cuda.reset_peak_memory()  # from here on it is training's, and not building's
        try:
            self.first_step_s = self._first_step()
            if meet is not None:
                meet(self.trainer)
                cuda.empty_cache()
                cuda.reset_peak_memory()
            warm = measure(self.trainer, warmup, after_step)
        except BaseException:
            self.trainer.close()
            raise
        # Without a warm-up the first step has to do for an estimate, unless the compiler was at
        # work in it.
        first = 1e3 * self.first_step_s if recipe.compile == "off" else ROUND_MS
        estimate = min(warm.step_ms, default=max(ROUND_MS, first))
        self.step_ms = self.trainer.ranks.most(estimate)  # one number of steps for all
        self.memory = self._peak_memory(before, built)
        self.timed_from = self.trainer.batches.taken

    def _first_step(self) -> float:
        began = time.perf_counter()
        self.trainer.step()
        cuda.synchronize()
        seconds = time.perf_counter() - began
        if self.after_step is not None:
            self.after_step(self.trainer)
        return seconds

    def _peak_memory(self, before: float | None, built: float | None) -> dict[str, float]:
        """This trainer's own peak, in GB: what others held `before` is taken off, the weights it
        shares with them aren't."""
        peak = cuda.peak_memory()
        if peak is None or before is None or built is None:
            return {}
        model = self.trainer.model
        held = sum(map(bytes_here, [*model.parameters(), *model.buffers()])) / 1e9
        found = {"peak_allocated_gb": own_peak(peak[0], before, built, held)}
        return found | ({"peak_reserved_gb": peak[1]} if before == 0 else {})

    @property
    def steps_to_settle(self) -> int:
        """Steps until the batches that workers made ready are used up and the GPU's clock has risen
        again.

        None where nothing is ready and a step is so long that the clock's rise is lost in it.
        """
        if not self.ready_batches and self.step_ms > LONG_MS:
            return 0
        return max(self.steps_to_drain, math.ceil(SETTLE_MS / self.step_ms))

    def settle(self) -> None:
        measure(self.trainer, self.steps_to_settle, self.after_step)

    @property
    def steps_to_drain(self) -> int:
        """See the function of that name."""
        return steps_to_drain(self.trainer.recipe, self.trainer.ranks.count)

    @property
    def ready_batches(self) -> int:
        """Batches that the workers hold ready while nobody takes any."""
        return self.trainer.recipe.num_workers * self.trainer.recipe.prefetch_factor

    def round_of(self, steps: int) -> int:
        """How many optimizer steps a round has: `steps`, or more where they are short (with workers
        the warm-up's may be shorter than those to come, as batches were ready: then a round is
        longer than need be)."""
        return max(steps, math.ceil(ROUND_MS / self.step_ms))

    def measure(self, steps: int, lead_in: int = 1) -> None:
        """One round of so many timed steps, settled before, or with the same batches each time
        rewound to `lead_in` steps before them. Once more where something was compiled in it: the
        second of two sizes may first come up here, and would be on record as a step of a minute."""
        if not self.same_batches:
            self.settle()
        for _ in range(TRIES):
            if self.same_batches:
                self.rewind(lead_in)
            before = self._graphs()
            found = measure(self.trainer, steps, self.after_step)
            if not self.trainer.ranks.most(self._graphs() - before):
                break
        else:
            self.unsettled_rounds += 1
        self.times.extend(found)
        time.sleep(REFILL_S if self.ready_batches else 0)

    def rewind(self, lead_in: int) -> None:
        """Take the data back to where the first round began, and `lead_in` steps on from there: as
        many as the `steps_to_drain` of whichever recipe takes most, so that all are timed on the
        same batches.

        Raises `ValueError` where they are too few for this recipe's workers.
        """
        least = self.steps_to_drain
        if lead_in < least:
            raise ValueError(
                f"{lead_in} untimed step(s) after the data was taken back: this recipe's workers "
                f"(num_workers={self.trainer.recipe.num_workers}) make batches for {least} ready "
                "meanwhile, and steps "
                "that find them would be timed as if data cost nothing. Call rewind with at least "
                f"{least}."
            )
        self.trainer.batches.close()
        self.trainer.resume_data(self.timed_from)
        measure(self.trainer, lead_in, self.after_step)

    def _graphs(self) -> int:
        """Graphs compiled in this process so far, whoever asked for them: a library compiles
        without the recipe.
        """
        if "torch._dynamo" not in sys.modules:
            return 0
        from labutils.profiling.recompilation import (
            graphs_compiled,
        )  # the compiler takes a second to import

        return graphs_compiled()

    def report(self, run: Run) -> None:
        """Fill in the run's metrics and samples, those against the hardware included."""
        self.report_times(run)
        trainer, recipe = self.trainer, self.trainer.recipe
        share = 1 / trainer.ranks.count
        if self.times.work:
            run.metrics |= _of_varying_steps(trainer.workload, recipe, self.times)
        else:
            work = trainer.workload.work(recipe) * share
            run.metrics |= _against_the_hardware(
                trainer.workload, recipe, work, run.metric("step_ms")
            )

    def report_times(self, run: Run) -> None:
        """Fill in what was measured; of several ranks, of this one, and of all together where it
        says per second.
        """
        trainer, recipe = self.trainer, self.trainer.recipe
        trainer.driver.log.flush()
        step_ms = summarise(self.times.step_ms)
        run.samples = {
            name: _rounded(getattr(self.times, name)) for name in ("step_ms", "data_ms", "wall_ms")
        }
        run.metrics = {
            "step_ms": step_ms,
            "wall_ms": summarise(self.times.wall_ms),
            "data_ms": summarise(self.times.data_ms),
            "first_step_s": self.first_step_s,
            "build_s": trainer.build_s,
            "examples_per_s": recipe.examples_per_step / step_ms["median"] * 1e3,
            "loss": trainer.losses,
        }
        run.metrics |= {} if trainer.encode_s is None else {"encode_s": trainer.encode_s}
        run.metrics |= {"unsettled_rounds": self.unsettled_rounds} if self.unsettled_rounds else {}
        run.metrics |= self.memory | ({} if trainer.ranks.alone else {"ranks": trainer.ranks.count})
        if self.times.work:
            run.samples["tokens"] = [work.tokens for work in self.times.work]
            run.samples["useful_tokens"] = [work.useful_tokens for work in self.times.work]
            run.metrics |= self._rates()

    def _rates(self) -> dict[str, float]:
        """Rates of steps that differ in what they take in: all of it, on all ranks, over all their
        time, which a median would misjudge."""
        whole = functools.reduce(operator.add, self.times.work)
        whole = functools.reduce(operator.add, self.trainer.ranks.all(whole))
        per_s = 1e3 / sum(self.times.step_ms)
        rates = {
            name: getattr(whole, name) * per_s for name in ("examples", "tokens", "useful_tokens")
        }
        return {f"{name}_per_s": rate for name, rate in rates.items()} | {
            "useful_tokens": whole.useful_tokens / whole.tokens
        }

    def close(self) -> None:
        self.trainer.close()


def own_peak(peak: float, before: float, built: float, held: float) -> float:
    """A trainer's own part of a `peak`: `before` it was built so much was allocated, `built` after
    it, and its model's tensors take `held`. What of `held` is not new was there before: weights
    that it shares with other trainers."""
    return peak - before + max(0.0, held - (built - before))


def _against_the_hardware(
    workload: Workload, recipe: Recipe, work: Work, step_ms: float
) -> dict[str, float]:
    """The floor that this machine's measured rates set, the rate reached, its share of the data
    sheet's dense peak.

    Both are those of the frozen layers' products, which are nearly all there is: where these are
    FP8 the rest, the adapters, attention and head, is taken to be as fast, so that no step can be
    below the floor.
    """
    tflops = work.flops / step_ms / 1e9
    multiplied = _multiplied_as(recipe)
    roofline = measured_roofline(multiplied)
    found = {
        "tflops": tflops,
        "floor_ms": roofline.floor_ms(work.flops, work.bytes),
        "flops_per_step": work.flops,
    }
    spec = spec_of(machine_facts())
    if (
        workload.device.type == "cuda"
        and spec
        and (peak := spec.dense.get(multiplied.removesuffix("_rowwise")))
    ):
        found["mfu"] = tflops / peak
    return found


def _multiplied_as(recipe: Recipe) -> str:
    """The format of the frozen layers' products on this machine, which emulates FP8 where it has
    none.
    """
    found = PRODUCTS.get(recipe.base_linear)
    return found if found and probe_machine(f"tflops_{found}").rate(found) else recipe.precision


def _of_varying_steps(workload: Workload, recipe: Recipe, times: StepTimes) -> dict[str, float]:
    """Steps that differ in what they take in, against the hardware: the mean one."""
    whole, whole_ms, steps = (
        functools.reduce(operator.add, times.work),
        sum(times.step_ms),
        len(times.work),
    )
    return _against_the_hardware(workload, recipe, whole * (1 / steps), whole_ms / steps)


def _progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """`items` behind a progress bar where there are several. TQDM_DISABLE=1 in the environment
    silences it.
    """
    return tqdm(items, desc=what, mininterval=10) if len(items) > 1 else items


def empty_run(workload: Workload, recipe: Recipe, name: str) -> Run:
    """A run of this name that nothing is known of yet but what it runs on."""
    return Run(
        lab="",
        run=name,
        workload=workload.name,
        scale=workload.scale,
        weights=workload.weights,
        data=workload.data,
        recipe=recipe.fitted_to(workload.device.type).as_dict(),
    )


def _rounded(samples: list[float]) -> list[float]:
    return [round(sample, 4) for sample in samples]
