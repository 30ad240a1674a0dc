"""Measures recipes: one alone, or several interleaved in one process. So a machine that becomes
slower becomes slower for all of them.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import operator
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

from tqdm import tqdm

from labutils.data.file_cache import HubOutOfReach
from labutils.layers.quantization.convert import PRODUCTS
from labutils.profiling import cuda
from labutils.profiling.gpu_specs import spec_of
from labutils.profiling.machine import machine_facts
from labutils.profiling.measured_rates import measured_roofline, probe_machine
from labutils.profiling.timing import StepClock, StepTimes
from labutils.profiling.trace import Trace, profile
from labutils.profiling.utilization_and_power import Utilization
from labutils.recipe import Recipe
from labutils.results.records import Run, status_of, summarise
from labutils.training import distributed
from labutils.training.distributed import bytes_here
from labutils.training.trainer import Hooks, Trainer
from labutils.workloads.base import Work, Workload

LOG = logging.getLogger(__name__)
"""Failures with their tracebacks, at the level INFO: a run's status has one line."""
ROUNDS = {"tiny": 2, "small": 8, "full": 8}
"""Rounds of a comparison by scale, unless it says otherwise. Effects are bootstrapped over rounds:
8 leave out one odd round. At tiny, where nobody judges times, 2 keep a lab short."""
ROUND_MS = {"tiny": 100, "small": 400, "full": 400}
"""A round lasts at least this long: a handful of 25 ms steps can't tell noise from drift."""
SETTLE_MS = 100
"""A recipe runs at least this long on a GPU before it is timed."""
LONG_MS = 10 * SETTLE_MS
"""A step of this length needs no settling, which would take as long again."""
WATCH_MS = 2000
"""Utilisation is watched at least this long: the driver renews it a few times a second only."""
TRIES = 3
"""How often a round is taken at most, if the compiler was at work in it."""
REFILL_S = 0.3
"""Pause after a recipe with workers: they read ahead, and would do so in the next one's steps."""
AGAIN = " again"
"""Ends the name of the run that a comparison's base gets for its second visits."""


def train(
    workload: Workload,
    recipe: Recipe,
    steps: int = 10,
    warmup: int = 2,
    name: str = "run",
    **options: Any,
) -> Run:
    """One recipe: build, first step, `warmup` more, then at least `steps` timed optimizer steps.

    Running out of memory or any other failure becomes the run's status; nothing is raised but
    Ctrl-C. options: see `Benchmark`.
    """
    with Benchmark(workload, warmup, **options) as bench:
        return bench.compare({name: recipe}, steps, rounds=1)[name]


def measure(trainer: Trainer, steps: int) -> StepTimes:
    """Time `steps` optimizer steps of a trainer, one after the other without a pause."""
    times = StepTimes()
    for _ in timed(trainer, steps, times):
        trainer.step()
    return times


def timed(trainer: Trainer, steps: int, times: StepTimes) -> Iterator[None]:
    """A loop of `steps` passes whose body takes one optimizer step each. Their times are added to
    `times` at the loop's end.

    It is a generator, so that the body stays where it is read: in `Candidate.measure`.
    """
    clock = StepClock(trainer.workload.device)
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)  # a full collection walks over all models
    try:
        trainer.batches.reset()
        clock.start()
        for _ in range(steps):
            yield
            clock.mark(*trainer.batches.reset())
        times.extend(clock.stop())
    finally:
        gc.set_threshold(young, middle, full)


def steps_to_drain(recipe: Recipe, ranks: int = 1) -> int:
    """Optimizer steps that must pass untimed after a pause, or after the data was taken back.

    In the first one the loader starts. The next ones get batches that its workers made ready in the
    meantime, or began while nothing was waited for. Workers that are only a little slower than the
    steps leave some of these, and the waits after it are too short. ranks: the processes that share
    a step.
    """
    taken = max(1, recipe.accumulation // ranks)
    return 1 + math.ceil(recipe.num_workers * recipe.prefetch_factor / taken)


class Benchmark:
    """Trainers side by side in one process, built once each and compared as often as one likes.

    The frozen weights are held once. A recipe that fails drops out: the reason becomes its run's
    status, its trainer ends and gives its memory back, and the others go on. options: see
    `Candidate`.
    """

    def __init__(self, workload: Workload, warmup: int = 2, **options: Any) -> None:
        self.workload = workload
        self.same_batches = options.get("same_batches", False)
        self.options = {"warmup": warmup} | options
        self.candidates: dict[str, Candidate] = {}
        self.failed: dict[str, str] = {}
        self.known: dict[str, Recipe] = {}
        self.lead_in = 0
        probe_machine()  # now, while nothing else is on the device
        cuda.take_workspaces()

    def compare(
        self,
        recipes: Mapping[str, Recipe],
        steps: int = 5,
        rounds: int | None = None,
        tags: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Run]:
        """Name -> run. Every round visits all of `recipes`, there and back by turns, for at least
        `steps` timed optimizer steps each. `rounds`: default `ROUNDS` of the workload's scale.

        Of several recipes the first is the base. It is visited at both ends of every round, and its
        second visit is a run of its own, "<base> again", with the tag `again`: what the two differ
        by is noise. `tags`: of the runs, by name. Recipes whose name is new are prepared first; a
        name that is known keeps its trainer.
        """
        self.prepare(recipes)
        visits = {name: name for name in recipes}  # run's name -> candidate's
        if len(recipes) > 1:
            base = next(iter(recipes))
            visits[base + AGAIN] = base
        times = {run: StepTimes() for run in visits}
        able = [name for name in recipes if name in self.candidates]
        self.lead_in = max((self.candidates[name].steps_to_drain for name in able), default=0)
        round_ms = ROUND_MS[self.workload.scale]
        counts = {n: max(steps, math.ceil(round_ms / self.candidates[n].step_ms)) for n in able}
        if self.same_batches:  # the same ones for each candidate
            counts = dict.fromkeys(counts, max(counts.values(), default=steps))
        for turn in _progress(range(rounds or ROUNDS[self.workload.scale]), "measuring"):
            for run, name in list(visits.items())[:: -1 if turn % 2 else 1]:
                if name in self.candidates:
                    with self._noting(name):
                        block = self.candidates[name].measure(counts[name], self.lead_in)
                        times[run].extend(block, turn)
                    self._drop_if_failed(name)
        runs, comparison = {}, uuid.uuid4().hex[:12]
        for run_name, name in visits.items():
            run = runs[run_name] = empty_run(self.workload, self.known[name], run_name)
            run.comparison, run.tags = comparison, dict((tags or {}).get(name, {}))
            if run_name != name:
                run.tags["again"] = True
            if name in self.candidates:
                with self._noting(name):
                    self.candidates[name].report(run, times[run_name])
                self._drop_if_failed(name)
            run.status = self.failed.get(name, "ok")
        return runs

    def prepare(self, recipes: Mapping[str, Recipe]) -> None:
        """Build and warm up those of `recipes` whose name is new; what fails is noted for its run.

        Raises `ValueError`, before anything is built, where a known name comes with another recipe.
        """
        fitted = {name: r.fitted_to(self.workload.device.type) for name, r in recipes.items()}
        for name, recipe in fitted.items():
            if self.known.get(name, recipe) != recipe:
                raise ValueError(
                    f'"{name}" is already another recipe in this benchmark. Give the new one a '
                    "name of its own."
                )
        for name in _progress([name for name in fitted if name not in self.known], "preparing"):
            self.known[name] = fitted[name]
            with self._noting(name):
                self.candidates[name] = Candidate(self.workload, recipes[name], **self.options)
            self._drop_if_failed(name)
        gc.collect()  # so that the collector hardly comes by itself while steps are timed

    def watch(self, name: str, steps: int = 5) -> dict[str, float]:
        """Utilisation by the driver's account while `steps` more optimizer steps run, as metrics of
        a run. Raises `RuntimeError`, with the reason, where that recipe failed or isn't there.
        """
        candidate = self._working(name)
        candidate.settle()
        with Utilization() as utilization:
            measure(candidate.trainer, max(steps, math.ceil(WATCH_MS / candidate.step_ms)))
        return utilization.metrics()

    def profile(self, name: str, folder: Path, steps: int = 3, with_shapes: bool = False) -> Trace:
        """A trace of `steps` more optimizer steps, see `profiling.trace`.

        It settles inside the profiler, which takes a while to start: workers would make batches
        ready meanwhile. With the same batches each time, those that were timed are traced. Raises
        as `watch` does.
        """
        candidate = self._working(name)
        wait = candidate.steps_to_settle
        if self.same_batches:  # the last one of the lead-in warms the profiler up
            candidate.trainer.rewind_data(candidate.timed_from)
            wait = max(0, self.lead_in - 1)
        return profile(candidate.trainer, steps, folder, wait=wait, with_shapes=with_shapes)

    def trace_into(self, run: Run, folder: Path, steps: int) -> Trace:
        """`profile` of the recipe that `run` is of, in a folder of its name; the run's metrics get
        what the trace says."""
        trace = self.profile(run.run, folder / run.run.replace(" ", "-"), steps)
        run.metrics |= trace.metrics(run.metric("step_ms"), run.metric("data_ms"))
        run.metrics["kernel_categories"] = trace.categories()
        return trace

    def _working(self, name: str) -> Candidate:
        if name in self.failed:
            raise RuntimeError(f'"{name}" failed ({self.failed[name]}).')
        if name not in self.candidates:
            raise RuntimeError(f'"{name}" is not in this benchmark. Prepare it with compare().')
        return self.candidates[name]

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """A context that keeps the reason why a recipe failed. An error goes on where several ranks
        train: the others are in the midst of the same step, and would wait for this one. So does
        one of the hub: no other recipe would do better.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, HubOutOfReach) or not distributed.here().alone:
                raise
            self.failed[name] = status_of(error)
            LOG.info('"%s" failed', name, exc_info=True)

    def _drop_if_failed(self, name: str) -> None:
        """End a recipe that failed, and give its memory back. This must come after the `except`
        block: the exception holds the frames, and the frames hold tensors.
        """
        if name in self.failed:
            self._end(name)
            gc.collect()  # a trainer's modules and hooks refer to each other
            cuda.empty_cache()

    def _end(self, name: str) -> None:
        """End a recipe's trainer. An error in that is ignored: its runs have their status."""
        if candidate := self.candidates.pop(name, None):
            with suppress(Exception):
                candidate.close()

    def close(self) -> None:
        """End all trainers."""
        for name in list(self.candidates):
            self._end(name)

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Candidate:
    """A trainer whose first step and warm-up are done, ready to be timed round by round.

    warmup: steps after the first. same_batches: every round times the same batches, so that recipes
    whose steps differ in length can be compared step by step. hooks: the trainer's, see
    `trainer.Hooks`.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        warmup: int,
        same_batches: bool = False,
        **hooks: Unpack[Hooks],
    ) -> None:
        self.same_batches = same_batches
        if cuda.available():  # what earlier trainers left in cycles would count as held by others
            gc.collect()
        before = cuda.allocated_memory()
        self.trainer = Trainer(workload, recipe, **hooks)
        built = cuda.allocated_memory()
        cuda.reset_peak_memory()  # from here on it is training's, and not building's
        self.steps_to_drain = steps_to_drain(self.trainer.recipe, self.trainer.ranks.count)
        try:
            self.first_step_s = measure(self.trainer, 1).step_ms[0] / 1e3
            warm = measure(self.trainer, warmup)
        except BaseException:
            self.trainer.close()
            raise
        # Without a warm-up the first step has to do for an estimate, unless the compiler was at
        # work in it.
        least = ROUND_MS[workload.scale]
        first = 1e3 * self.first_step_s if recipe.compile == "off" else least
        estimate = min(warm.step_ms, default=max(least, first))
        self.step_ms = self.trainer.ranks.most(estimate)  # one number of steps for all
        self.memory = self._peak_memory(before, built)
        self.timed_from = self.trainer.batches.taken

    def _peak_memory(self, before: float | None, built: float | None) -> dict[str, float]:
        """This trainer's own peak in GB. {} without a GPU.

        before, built: memory that was allocated before and after it was built. What others held
        before isn't its own, but for the weights that it shares with them: of its model's tensors,
        those that building didn't add.
        """
        if (peak := cuda.peak_memory()) is None:
            return {}
        model = self.trainer.model
        held = sum(map(bytes_here, [*model.parameters(), *model.buffers()])) / 1e9
        shared = max(0.0, held - (built - before))
        own = {"peak_allocated_gb": peak[0] - before + shared}
        return own | ({"peak_reserved_gb": peak[1]} if before == 0 else {})

    @property
    def steps_to_settle(self) -> int:
        """Steps until the batches that workers made ready are used up and the GPU's clock has risen
        again; 0 where nothing is ready and there is no GPU, or a step is so long that the clock's
        rise is lost in it.
        """
        on_cpu = self.trainer.workload.device.type == "cpu"
        rise = 0 if on_cpu or self.step_ms > LONG_MS else math.ceil(SETTLE_MS / self.step_ms)
        drain = self.steps_to_drain if self.trainer.recipe.num_workers else 0
        return max(drain, rise)

    def settle(self) -> None:
        measure(self.trainer, self.steps_to_settle)

    def measure(self, steps: int, lead_in: int = 1) -> StepTimes:
        """A round of `steps` timed steps, settled before; with the same batches each time, rewound
        to where the first round began, and `lead_in` steps on from there: as many as the
        `steps_to_drain` of the recipe that takes most, so that all are timed on the same batches.

        It is taken once more where something was compiled in it: the second of two sizes may first
        come up here, and would be on record as a step of a minute. A recipe that never stops
        compiling shows that in its times.
        """
        if not self.same_batches:
            self.settle()
        for _ in range(TRIES):
            if self.same_batches:
                self.trainer.rewind_data(self.timed_from)
                measure(self.trainer, lead_in)
            graphs, times = graphs_so_far(), StepTimes()
            for _ in timed(self.trainer, steps, times):
                self.trainer.step()
            if not self.trainer.ranks.most(graphs_so_far() - graphs):
                break
        time.sleep(REFILL_S if self.trainer.recipe.num_workers else 0)
        return times

    def report(self, run: Run, times: StepTimes) -> None:
        """Fill in the run's metrics and samples, those against the hardware included."""
        self.report_times(run, times)
        workload, recipe = self.trainer.workload, self.trainer.recipe
        if times.work:  # steps that differ in what they take in: the mean one
            steps = len(times.work)
            work = functools.reduce(operator.add, times.work) * (1 / steps)
            step_ms = sum(times.step_ms) / steps
        else:
            work = workload.work(recipe) * (1 / self.trainer.ranks.count)
            step_ms = run.metric("step_ms")
        run.metrics |= _against_the_hardware(workload, recipe, work, step_ms)

    def report_times(self, run: Run, times: StepTimes) -> None:
        """Fill in what was measured; of several ranks, of this one, and of all together where it
        says per second.
        """
        trainer, recipe = self.trainer, self.trainer.recipe
        trainer.driver.log.flush()
        run.samples = {
            name: [round(sample, 4) for sample in getattr(times, name)]
            for name in ("step_ms", "data_ms", "wall_ms", "round")
        }
        rates = [1e3 * recipe.examples_per_step / ms for ms in times.step_ms]
        run.metrics = {
            "step_ms": summarise(times.step_ms),
            "wall_ms": summarise(times.wall_ms),
            "data_ms": summarise(times.data_ms),
            "first_step_s": self.first_step_s,
            "build_s": trainer.build_s,
            "examples_per_s": summarise(rates),
            "loss": trainer.losses,
        }
        run.metrics |= {} if trainer.encode_s is None else {"encode_s": trainer.encode_s}
        run.metrics |= self.memory | ({} if trainer.ranks.alone else {"ranks": trainer.ranks.count})
        if times.work:
            run.samples["tokens"] = [work.tokens for work in times.work]
            run.samples["useful_tokens"] = [work.useful_tokens for work in times.work]
            run.metrics |= self._rates(times)
        else:
            run.samples["examples_per_s"] = [round(rate, 4) for rate in rates]

    def _rates(self, times: StepTimes) -> dict[str, float]:
        """Rates of steps that differ in what they take in: all of it, on all ranks, over all their
        time, which a median would misjudge.
        """
        whole = functools.reduce(operator.add, times.work)
        whole = functools.reduce(operator.add, self.trainer.ranks.all(whole))
        per_s = 1e3 / sum(times.step_ms)
        rates = {
            f"{name}_per_s": getattr(whole, name) * per_s
            for name in ("examples", "tokens", "useful_tokens")
        }
        return rates | {"useful_tokens": whole.useful_tokens / whole.tokens}

    def close(self) -> None:
        self.trainer.close()


def graphs_so_far() -> int:
    """Graphs compiled in this process so far, also those that a library compiles by itself."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from labutils.profiling.recompilation import graphs_compiled  # takes a second to import

    return graphs_compiled()


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
    metrics = {
        "tflops": tflops,
        "floor_ms": measured_roofline(multiplied).floor_ms(work.flops, work.bytes),
        "flops_per_step": work.flops,
    }
    spec = spec_of(machine_facts())
    peak = spec.dense.get(multiplied.removesuffix("_rowwise")) if spec else None
    if workload.device.type == "cuda" and peak:
        metrics["mfu"] = tflops / peak
    return metrics


def _multiplied_as(recipe: Recipe) -> str:
    """The format of the frozen layers' products on this machine, which emulates FP8 where it has
    none. Where only convolutions round to TF32, their rate is the floor's.
    """
    rounded = cuda.available() and recipe.precision == "fp32" and recipe.tf32 != "nothing"
    dtype = PRODUCTS.get(recipe.base_linear, "tf32" if rounded else "")
    return dtype if dtype and probe_machine(f"tflops_{dtype}").rate(dtype) else recipe.precision


def _progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """`items` behind a progress bar where there are several. TQDM_DISABLE=1 silences it."""
    place = sys.stdout if "ipykernel" in sys.modules else None  # JupyterLab shows stderr in red
    return tqdm(items, desc=what, mininterval=10, file=place) if len(items) > 1 else items


def empty_run(workload: Workload, recipe: Recipe, name: str) -> Run:
    """A run of this name that says what it runs on and nothing else yet."""
    return Run(
        lab="",
        run=name,
        workload=workload.name,
        scale=workload.scale,
        weights=workload.weights,
        data=workload.data,
        recipe=recipe.fitted_to(workload.device.type).as_dict(),
    )
