"""Lab 08's training steps: predicted by the launch model, then measured, then beside slower hosts.

    for step in study(texts, variants("moe")["grouped"], {"model": "moe", "variant": "grouped"}, 8):
        step.run.metrics["predicted_ms"], step.run.metric("step_ms")

One trainer serves several batches: four texts of the dataset's mean length, and four short ones.
Batches are fixed, as a step's time is predicted from a trace of the same work. The host's time a
launch comes from a light step: the same program on a thin model and one text of a few tokens. A
host's speed changes, so the light step is read right before and right after the step that it
predicts, and the prediction takes the host halfway between.

Nothing is timed before the profiler has run. After its first trace CUPTI stays attached to the
process and slows launches (https://github.com/pytorch/pytorch/issues/144455): a light step read
before that and a step timed after it have two hosts.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labutils.labs.ladders import A3_BASE
from labutils.profiling.gpu_specs import Spec, spec_of
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.machine import default_device, machine_facts
from labutils.profiling.step_model import (
    Host,
    Law,
    Program,
    attainable,
    bound_ms,
    crossing,
    decided_by,
    host_of,
    idle_ms,
    interrupted,
    replayed_ms,
)
from labutils.profiling.timing import StepClock
from labutils.profiling.trace import Trace, profile
from labutils.profiling.utilization import Energy
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training import Trainer
from labutils.workloads.base import Batch, Work, Workload

TEXTS = 4
"""Texts in a batch (article A3's batch size where it compares methods)."""
ROW = 4 * 862
"""Tokens of a packed row at full scale: four texts of the mean length."""
WATCH_MS = {"cuda": 1500, "cpu": 300}
"""A step is repeated at least this long: a GPU's energy meter is slow."""
WARM_MS = {"cuda": 1000, "cpu": 0}
"""A step is repeated so long before it is traced: a warm GPU keeps the clock of a later timing."""
THIN, THINNEST = 8, 64
"""A thin model's matrices are narrower by a factor of 8, but no narrower than tiny's 64. Its layers
and experts, and so its launches, are the model's own."""
LIGHT_STEPS, LIGHT_MS = 3, 200
"""A reading of the light step has at least so many steps, and lasts at least so long."""
TRIES = 5
"""A light step is traced again so often, at most, where other programs took the CPU meanwhile."""
SLOWED_STEPS = 3
MANY = 15_000
"""Of a step of more launches one is traced: reading a trace back takes long."""


def variants(family: str) -> dict[str, Recipe]:
    """How a model ("dense" or "moe") is driven: the library's loop first, then what changes it.

    The library pads texts side by side, the others pack them one behind the other: of texts as long
    as each other the same tokens. accelerate is left out, as its loader takes no given batch.
    """
    loop = A3_BASE.but(driver="eager", micro_batch=TEXTS)
    packed = {"shapes": "packed", "token_budget": ROW, "micro_batch": 1}
    rewritten = loop.but(
        layers="rewritten", logging="ring-buffer", optimizer="adamw-fused", **packed
    )
    captured = rewritten.but(driver="graph")
    compiled = captured.but(
        adapter="plain", loss="fused", compile="default", compile_scope="blocks", dynamic="static"
    )
    first, second = {"dense": ("loop", "rewritten"), "moe": ("expert loop", "grouped")}[family]
    return {first: loop, second: rewritten, "captured": captured, "compiled": compiled}


# --------------------------------------------------------------------------------------- batches


def batch_of(workload: Workload, recipe: Recipe, chosen: Sequence[int]) -> Batch:
    """The micro-batch of these examples; a packed row is as long as they are."""
    examples, collate = workload.dataset(None, recipe), workload.collate(recipe)
    texts = [examples[index] for index in chosen]
    if collate.layout.packs:
        tokens = sum(len(text["input_ids"]) for text in texts)
        collate.layout = replace(collate.layout, budget=tokens)
    return collate(texts)


def typical(workload: Workload, recipe: Recipe, count: int = TEXTS) -> list[int]:
    """The `count` longest examples that are not longer than the mean."""
    lengths = _lengths(workload, recipe)
    mean = sum(lengths) / len(lengths)
    fitting = [index for index, length in enumerate(lengths) if length <= mean]
    return sorted(fitting, key=lambda index: -lengths[index])[:count]


def shortest(workload: Workload, recipe: Recipe) -> list[int]:
    """The shortest example."""
    lengths = _lengths(workload, recipe)
    return [min(range(len(lengths)), key=lengths.__getitem__)]


def _lengths(workload: Workload, recipe: Recipe) -> list[int]:
    return [len(ids) for ids, _ in workload.dataset(None, recipe).conversations]


def resized(workload: Workload, **size: int) -> Workload:
    """The workload with random weights of another size, and texts in that size's words."""
    other = copy.copy(workload)
    other.sizes = workload.sizes | {workload.scale: replace(workload.size, **size)}
    other.weights, other.data = "random", "generated"
    return other


def thin(workload: Workload) -> Workload:
    """The workload with a model of as many layers and experts, whose kernels take little.

    A short text isn't enough: its few tokens reach nearly all of gpt-oss-20b's experts, and reading
    their 38 GB twice takes a GPU longer than most hosts take to launch it all.
    """
    size = workload.size
    return resized(
        workload,
        width=max(THINNEST, size.width // THIN),
        inner=max(THINNEST, size.inner // THIN),
        words=min(size.words, 1024),
        texts=min(size.texts, 32),
    )


@dataclass(frozen=True)
class OnOneBatch:
    """A trainer that trains on one batch again and again."""

    trainer: Trainer
    batch: Batch

    def step(self) -> None:
        self.trainer.step(itertools.repeat(self.batch))

    def timed(self, steps: int, warmup: int = 0) -> list[float]:
        """Milliseconds of each of `steps` optimizer steps, after `warmup` more."""
        for _ in range(warmup):
            self.step()
        clock = StepClock(self.trainer.workload.device)
        clock.start()
        for _ in range(steps):
            self.step()
            clock.mark(0.0)
        return clock.stop().step_ms

    def warm_up(self, at_least_ms: float) -> float:
        """Milliseconds of a step, after two, the first of which may compile, and so long a time."""
        one = self.timed(2)[-1]
        return min(one, *self.timed(max(1, math.ceil(at_least_ms / one) - 1)))

    def traced(self, steps: int) -> Trace:
        """A trace of `steps` optimizer steps; on a GPU with shapes, which tell thin products."""
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            shapes = default_device() == "cuda"
            return profile(self, steps, folder, with_stack=False, with_shapes=shapes)

    @property
    def work(self) -> Work:
        return self.trainer.workload.work_of(self.trainer.recipe, self.batch)


# ----------------------------------------------------------------------------- predict and measure


@dataclass(frozen=True)
class PredictedStep:
    """A step that was predicted and measured: its `run`, and what predicted it."""

    run: Run
    program: Program
    host: Host
    work: Work

    def on(self, there: Spec, here: Spec, empty_ms: float = 0.0) -> Program:
        """Its program on another card."""
        intensity = self.work.flops / self.work.bytes
        return self.program.on(there, here, self.run.recipe["precision"], intensity, empty_ms)

    def slowdown(self, most_us: float, points: int = 16) -> dict[float, float]:
        """Microseconds more for each launch -> milliseconds a step, predicted."""
        added = [most_us * at / (points - 1) for at in range(points)]
        return {us: replayed_ms(self.program, self.host.plus(us / 1e3)) for us in added}

    def flip_us(self, rival_ms: float, most_us: float = 1000.0) -> float | None:
        """Microseconds more a launch with which this step lasts as long as a rival's, if any."""

        def mine(us: float) -> float:
            return replayed_ms(self.program, self.host.plus(us / 1e3))

        return crossing(mine, lambda us: rival_ms, 0.0, most_us)


class LightStep:
    """A step of a thin model on its shortest text: it tells what a launch takes the host."""

    def __init__(self, trainer: Trainer) -> None:
        """Raises `ValueError` where its kernels take too long to be light."""
        chosen = shortest(trainer.workload, trainer.recipe)
        self.step = OnOneBatch(trainer, batch_of(trainer.workload, trainer.recipe, chosen))
        self.fresh_ms = summarise(self.step.timed(LIGHT_STEPS, warmup=2))["median"]
        self.repeats = max(LIGHT_STEPS, math.ceil(LIGHT_MS / self.fresh_ms))
        self._trace()
        self.read()

    def _trace(self) -> None:
        trace = self.step.traced(1)
        self.program, self.phases = Program.of(trace), trace.host_breakdown()

    def time(self) -> float:
        """Milliseconds of a step, the median of a few, after one to come back to it."""
        return summarise(self.step.timed(self.repeats, warmup=1))["median"]

    def read(self) -> tuple[float, Host]:
        """(its milliseconds now, the host that explains them).

        A CPU's step is traced again where other programs took the CPU during the trace before.
        """
        for _ in range(TRIES):
            step_ms = self.time()
            if not interrupted(self.program, step_ms):
                break
            self._trace()
        return step_ms, host_of(self.program, self.phases, step_ms)

    def metrics(
        self, program: Program, before: tuple[float, Host], after: tuple[float, Host]
    ) -> dict[str, float]:
        """Its two readings, and what each of them alone would have predicted of a `program`."""
        low, high = sorted(replayed_ms(program, reading[1]) for reading in (before, after))
        return {
            "predicted_low_ms": low,
            "predicted_high_ms": high,
            "light_step_ms": (before[0] + after[0]) / 2,
            "light_before_ms": before[0],
            "light_after_ms": after[0],
            "light_fresh_ms": self.fresh_ms,
            "light_work_ms": self.program.kernel_ms,
        }


def study(
    texts: Mapping[str, Workload],
    recipe: Recipe,
    tags: Mapping[str, Any],
    steps: int,
    host: Host | None = None,
    delays: Iterable[float] = (),
    like: Program | None = None,
) -> Iterator[PredictedStep]:
    """Build one trainer, predict and measure its steps on typical texts of each of `texts`.

    The first of `texts` ("long", ...) builds the model; the others lend their texts. With `delays`
    (microseconds) its step is measured beside slower hosts as well. host: what a launch takes the
    host, for a captured step: it has one size, so that no light step can tell, and only the first
    texts. like: the program of the same kernels launched one by one, for a captured step. tags: of
    the runs. Each step is given when it is measured, so that a failure leaves what came before.
    """
    first = next(iter(texts))
    with contextlib.ExitStack() as opened:
        light = None
        if host is None:
            light = LightStep(opened.enter_context(Trainer(thin(texts[first]), recipe)))
        trainer = opened.enter_context(Trainer(texts[first], recipe))
        on_texts: dict[str, tuple[OnOneBatch, PredictedStep]] = {}
        for kind in [first] if host else texts:
            chosen = typical(texts[kind], trainer.recipe)
            step = OnOneBatch(trainer, batch_of(texts[kind], trainer.recipe, chosen))
            traced = 1 if light and light.program.launches > MANY else 2
            own = {"experiment": "steps"} | dict(tags) | {"texts": kind}
            measured = predict_and_measure(own, step, light or host, steps, traced, like)
            on_texts[kind] = step, measured
            yield measured
        for delay in delays:
            yield slowed(*on_texts[first], light, delay, SLOWED_STEPS)


def predict_and_measure(
    tags: Mapping[str, Any],
    step: OnOneBatch,
    host: Host | LightStep,
    steps: int,
    traced: int = 2,
    like: Program | None = None,
) -> PredictedStep:
    """Trace a step (`traced` of them), time it, and predict it from all but its time.

    host: what a launch takes, or the light step that tells it. Then `predicted_low_ms` and
    `predicted_high_ms` take the one reading of it or the other. like: a program of the same
    kernels, launched one by one. From it the step is predicted as if they came in one launch
    (`unseen_ms`, and its error `unseen_off`).
    """
    trainer, device = step.trainer, default_device()
    one_ms = step.warm_up(WARM_MS[device])
    steps = max(steps, math.ceil(WATCH_MS[device] / one_ms))
    trace = step.traced(traced)
    program, work = Program.of(trace), step.work
    light = host if isinstance(host, LightStep) else None
    gc.collect()  # a trace is a hundred thousand objects
    before = light.read() if light else (0.0, host)
    with Energy() as energy:
        samples = step.timed(steps, warmup=1)
    after = light.read() if light else before
    host = before[1].halfway_to(after[1])
    step_ms, predicted_ms = summarise(samples)["median"], replayed_ms(program, host)
    metrics = {
        "step_ms": summarise(samples),
        "predicted_ms": predicted_ms,
        "bound_ms": bound_ms(program, host),
        "predicted_idle_ms": idle_ms(program, host),
        "off": predicted_ms / step_ms - 1,
        "by": decided_by(program, host),
        "launches": program.launches,
        "waits": program.waits,
        "kernels_ms": program.kernel_ms,
        "copies_ms": program.copy_ms,
        "host_us": 1e3 * host.mean_ms(program),
        "examples": work.examples,
        "tokens": work.tokens,
        "flops": work.flops,
        "useful_tokens_per_s": work.useful_tokens / step_ms * 1e3,
        "tflops": work.flops / step_ms / 1e9,
    }
    if light:
        metrics |= light.metrics(program, before, after)
    if like:
        unseen_ms = replayed_ms(like.captured(), host)
        metrics |= {"unseen_ms": unseen_ms, "unseen_off": unseen_ms / step_ms - 1}
    if energy.watts is not None:
        metrics |= {"power_w": energy.watts, "joules_per_step": energy.watts * step_ms / 1e3}
    if device == "cuda":
        busy = trace.metrics(step_ms)["gpu_busy"]
        metrics |= {"gpu_busy_share": busy, "idle_share": 1 - busy}
        metrics |= _reached(program, work, trainer.recipe)
    run = _empty_run(trainer, tags)
    run.metrics, run.samples = metrics, {"step_ms": [round(ms, 4) for ms in samples]}
    return PredictedStep(run, program, host, work)


def _empty_run(trainer: Trainer, tags: Mapping[str, Any]) -> Run:
    workload, variant = trainer.workload, tags.get("variant")
    name = f"{tags['model']} {tags['texts']}" + (f", {variant}" if variant else "")
    run = Run("08", name, workload=workload.name, scale=workload.scale, tags=dict(tags))
    run.weights, run.data = workload.weights, workload.data
    run.recipe = trainer.recipe.as_dict()
    return run


def _reached(program: Program, work: Work, recipe: Recipe) -> dict[str, float]:
    """The share of the data sheet's roofline that the step's FLOPs reach while kernels run."""
    card = spec_of(machine_facts())
    if card is None or recipe.precision not in card.dense:
        return {}
    rate = attainable(card, recipe.precision, work.flops / work.bytes)
    return {"reached": work.flops / program.kernel_ms / 1e9 / rate}


def slowed(
    step: OnOneBatch, plain: PredictedStep, light: LightStep | None, delay_us: float, steps: int
) -> PredictedStep:
    """The step beside a host that takes `delay_us` longer for an operation, predicted and measured.

    The delay is known, and so is how many operations it holds up. What the detour through Python
    takes an operation is not: the light step beside the same slower host tells it, right before and
    right after. A captured step has no light one, and its few operations outside the graph take no
    detour to speak of. Metrics: `step_ms`, `predicted_ms`, `host_us` (a launch, delay and all),
    `added_us` (of it), `calls` of operations and `delayed` ones a step, `detour_us` of a call.
    """
    with SlowerHost(delay_us) as host:
        detours = [detour_ms(light, plain, host)] if light else []
        calls, delayed = host.calls, host.delayed
        samples = step.timed(steps, warmup=1)
        calls, delayed = (
            (host.calls - calls) / (steps + 1),
            (host.delayed - delayed) / (steps + 1),
        )
        detours += [detour_ms(light, plain, host)] if light else []
    detour = max(0.0, sum(detours) / 2)
    added = (detour * calls + delay_us / 1e3 * delayed) / plain.program.launches
    slower = plain.host.plus(added)
    predicted_ms, spread = replayed_ms(plain.program, slower), summarise(samples)
    run = replace(
        plain.run,
        run=f"{plain.run.run}, delay {delay_us:g} us",
        tags=plain.run.tags | {"delay_us": float(delay_us)},
        samples={"step_ms": samples},
        metrics={
            "step_ms": spread,
            "predicted_ms": predicted_ms,
            "off": predicted_ms / spread["median"] - 1,
            "host_us": 1e3 * slower.mean_ms(plain.program),
            "added_us": 1e3 * added,
            "calls": calls,
            "delayed": delayed,
            "detour_us": 1e3 * detour,
        },
    )
    return replace(plain, run=run, host=slower)


def detour_ms(light: LightStep, plain: PredictedStep, host: SlowerHost) -> float:
    """Milliseconds that an operation of the light step takes longer, the delay left out."""
    calls, waited = host.calls, host.waited_ms
    longer = light.time() - plain.run.metrics["light_step_ms"]
    steps = light.repeats + 1  # one of them not timed
    return (longer - (host.waited_ms - waited) / steps) / ((host.calls - calls) / steps)


def launch_law(workload: Workload, family: str) -> Law:
    """How many operations that launch work a step of a family's loop has, by layers and experts.

    Counted on a tiny model, one with one layer more, and one with twice as many experts.
    """
    recipe, layers = next(iter(variants(family).values())), workload.size.layers
    experts = workload.size.experts

    def operations(**size: int) -> int:
        with Trainer(resized(workload, **size), recipe) as trainer:
            chosen = typical(trainer.workload, trainer.recipe)
            step = OnOneBatch(trainer, batch_of(trainer.workload, trainer.recipe, chosen))
            step.timed(0, warmup=1)  # the optimizer makes its moments
            with SlowerHost() as host:
                step.step()
        return host.delayed

    base = operations()
    layer = operations(layers=layers + 1) - base
    if not experts:
        return Law(base - layers * layer, layer)
    expert = (operations(experts=2 * experts) - base) / (layers * experts)
    return Law(base - layers * layer, layer - experts * expert, expert)
