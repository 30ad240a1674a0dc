"""What lab 08 does with training steps: foretells each by the launch model, then measures it, then
slows the host.

    studied = study(long, short, ways("moe")["expert loop"], "moe", steps=8, delays=(0, 20))
    studied.seen["long"].run.metrics["predicted_ms"], studied.seen["long"].run.metric("step_ms")

One trainer serves several batches: four texts of the dataset's mean length, and four short ones.
Batches are fixed, as a step's time is foretold from a trace of the same work. The host's time a
launch is learnt on a light step: the same program on a thin model and one text of a few tokens. A
host's speed changes: other programs, clocks, other machines on the same processor. So the light
step is read right before and right after the step that it foretells, and the prediction is made
from both readings and the trace; of the step's own time it knows nothing.

Nothing is timed before the profiler has run. After its first trace it leaves CUPTI attached to the
process, which slows launches from then on (https://github.com/pytorch/pytorch/issues/144455); a
light step read before that and a step timed after it are beside two hosts. What the light step took
untraced is kept (`light_fresh_ms`): in the first study of a process it tells what the profiler left
behind.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""A step is repeated at least this long: a GPU's energy meter is slow, and a few short steps of a
CPU say little.
"""
THIN = 8
"""A thin model's matrices are narrower by so much; its layers and experts, and so its launches, are
the model's own.
"""
THINNEST = 64
"""The width below which no model is made thinner: tiny's."""
NEAR = 0.2
"""A prediction that is off by no more has come true."""
LIGHT_STEPS = 3
"""A light step is timed so often for a reading, at least."""
LIGHT_MS = 200
"""A reading of the light step lasts so long, at least."""
DRIFT = 0.1
"""Two readings of the light step that differ by more tell that the host's own speed changed."""
TRIES = 5
"""A light step is looked at again so often, at most, where other programs took the CPU while it was
traced.
"""
SLOWED_STEPS = 3
"""A step beside a slower host is timed so often."""
MANY = 15_000
"""Of a step of more launches one is recorded: it holds enough, and reading a trace back takes long.
"""
WARM_MS = {"cuda": 1000, "cpu": 0}
"""A step is repeated so long before it is traced: a warm GPU runs at the clock at which it is timed
later.
"""
CLOCKS = {
    "host": ("the host decides", "a real test of the model"),
    "kernels": (
        "kernels decide",
        "which shows little more than that kernels last as long with the profiler as without",
    ),
    "both": (
        "host and device share",
        "whose kernels come from a trace of the step, and whose host from a light one",
    ),
}
"""What can decide a step (`prediction.decided_by`) -> in words, and what a true prediction of such
a step shows.
"""
LANES = {"loop": "article", "expert loop": "article"}
"""Ways of the lane "article"; the others do the same work."""

ONE_BY_ONE = {"dense": "dense, rewritten", "moe": "moe, grouped"}
"""What the captured way's kernels are, launched one by one."""


def ways(family: str) -> dict[str, Recipe]:
    """How a model ("dense" or "moe") is driven: the library's loop, rewritten, captured, and
    compiled on top of that.

    The library pads texts side by side, the others pack them one behind the other: of texts as long
    as each other the same tokens. accelerate is left out: its loader would not take a batch that is
    given.
    """
    loop = A3_BASE.but(driver="eager", micro_batch=TEXTS)
    packed = {"shapes": "packed", "token_budget": ROW, "micro_batch": 1}
    rewritten = loop.but(
        layers="rewritten", logging="ring-buffer", optimizer="adamw-fused", **packed
    )
    first, second = {"dense": ("loop", "rewritten"), "moe": ("expert loop", "grouped")}[family]
    captured = rewritten.but(driver="graph")
    compiled = captured.but(
        adapter="plain", loss="fused", compile="default", compile_scope="blocks", dynamic="static"
    )
    return {first: loop, second: rewritten, "captured": captured, "compiled": compiled}


# --------------------------------------------------------------------------------------- batches


def batch_of(workload: Workload, recipe: Recipe, chosen: Sequence[int]) -> Batch:
    """The micro-batch of these examples, all of them, in the recipe's form; a packed row is as long
    as they are.
    """
    examples, collate = workload.dataset(None, recipe), workload.collate(recipe)
    texts = [examples[index] for index in chosen]
    if collate.layout.packs:
        collate.layout = replace(
            collate.layout, budget=sum(len(text["input_ids"]) for text in texts)
        )
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


def resized(workload: Workload, size: Any) -> Workload:
    """The workload with random weights of another size, and texts in that size's words."""
    other = copy.copy(workload)
    other.sizes, other.weights, other.data = (
        workload.sizes | {workload.scale: size},
        "random",
        "generated",
    )
    return other


def thin(workload: Workload) -> Workload:
    """The workload with a model that has as many layers and experts and so little in them that
    kernels take little.

    A short text isn't enough: the few tokens of one reach nearly all of gpt-oss-20b's experts, and
    reading their 38 GB twice takes a GPU longer than most hosts take to launch it all.
    """
    size = workload.size
    narrow = {
        "width": max(THINNEST, size.width // THIN),
        "inner": max(THINNEST, size.inner // THIN),
    }
    return resized(
        workload, replace(size, **narrow, words=min(size.words, 1024), texts=min(size.texts, 32))
    )


def _lengths(workload: Workload, recipe: Recipe) -> list[int]:
    return [len(ids) for ids, _ in workload.dataset(None, recipe).conversations]


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

    def warmed(self, at_least_ms: float) -> float:
        """Step two times, the first of which may compile and capture, and then for so long;
        milliseconds of a step.
        """
        one = self.timed(2)[-1]
        return min(one, *self.timed(max(1, math.ceil(at_least_ms / one) - 1)))

    def traced(self, steps: int) -> Trace:
        """A trace of `steps` optimizer steps, without Python stacks; on a GPU with shapes, which
        tell thin products.
        """
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            return profile(
                self, steps, folder, with_stack=False, with_shapes=default_device() == "cuda"
            )

    @property
    def work(self) -> Work:
        return self.trainer.workload.work_of(self.trainer.recipe, self.batch)


# ----------------------------------------------------------------------- foretelling and measuring


@dataclass(frozen=True)
class Seen:
    """A step that was foretold and measured: its `run`, the `program` and `host` that foretold it,
    and its `work`.
    """

    run: Run
    program: Program
    host: Host
    work: Work

    def on(self, there: Spec, here: Spec, empty_ms: float = 0.0) -> Program:
        """Its program on another card."""
        intensity = self.work.flops / self.work.bytes
        return self.program.on(there, here, self.run.recipe["precision"], intensity, empty_ms)


@dataclass(frozen=True)
class Reading:
    """The light step at one moment: the milliseconds that it takes, and the host that explains
    them.
    """

    step_ms: float
    host: Host


@dataclass
class Light:
    """A light step: `there` a thin model on its shortest text, its `program`, how its `phases`
    share the host's time, and `fresh_ms`, which it took before it was traced."""

    there: OnOneBatch
    fresh_ms: float
    program: Program
    phases: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, trainer: Trainer) -> Light:
        """That of a trainer on a `thin` workload. Raises `ValueError` where its kernels take too
        long for that.
        """
        workload = trainer.workload
        there = OnOneBatch(
            trainer, batch_of(workload, trainer.recipe, shortest(workload, trainer.recipe))
        )
        fresh_ms = summarise(there.timed(LIGHT_STEPS, warmup=2))["median"]
        light = cls(there, fresh_ms, Program((), 1), {})
        light.look()
        light.read()
        return light

    def look(self) -> None:
        """Trace it."""
        trace = self.there.traced(1)
        self.program, self.phases = Program.of(trace), trace.host_breakdown()

    def read(self) -> Reading:
        """What it takes now. A CPU's is traced again where other programs took the CPU from the
        trace before.
        """
        for _ in range(TRIES):
            step_ms = self.time()
            if not interrupted(self.program, step_ms):
                break
            self.look()
        return Reading(step_ms, host_of(self.program, self.phases, step_ms))

    def time(self) -> float:
        """Milliseconds of a step, the median of a few, after one to come back to it."""
        return summarise(self.there.timed(self.repeats, warmup=1))["median"]

    @property
    def repeats(self) -> int:
        """How many steps of it are timed for a reading."""
        return max(LIGHT_STEPS, math.ceil(LIGHT_MS / self.fresh_ms))

    def metrics(self, first: Reading, second: Reading) -> dict[str, float]:
        """How light it was, and how steady between two readings."""
        return {
            "light_step_ms": (first.step_ms + second.step_ms) / 2,
            "light_before_ms": first.step_ms,
            "light_after_ms": second.step_ms,
            "light_fresh_ms": self.fresh_ms,
            "light_launches": self.program.launches,
            "light_work_ms": self.program.kernel_ms,
        }


def foretell_and_measure(
    name: str,
    there: OnOneBatch,
    host: Host | Light,
    steps: int,
    traced: int = 2,
    like: Program | None = None,
) -> Seen:
    """Trace a step (`traced` of them), time it, and foretell it from all but its time.

    host: what a launch takes, or the light step that tells it, read right before and right after
    the step is timed; the prediction takes the host halfway between, `predicted_low_ms` and
    `predicted_high_ms` the one reading or the other. like: a program of the same kernels, launched
    one by one. From it the step is foretold without its own trace, as if they came in one launch
    (`unseen_ms`, and `unseen_off` by how much of the measurement that is off).
    """
    trainer, on_gpu = there.trainer, default_device() == "cuda"
    one = there.warmed(WARM_MS[default_device()])
    steps = max(steps, math.ceil(WATCH_MS[default_device()] / one))
    trace = there.traced(traced)
    program, work = Program.of(trace), there.work
    run = Run(
        "",
        name,
        workload=trainer.workload.name,
        scale=trainer.workload.scale,
        recipe=trainer.recipe.as_dict(),
    )
    run.weights, run.data = trainer.workload.weights, trainer.workload.data
    light = host if isinstance(host, Light) else None
    # a trace is a hundred thousand objects, which else the collector might look through meanwhile
    gc.collect()
    before = light.read() if light else Reading(0.0, host)
    with Energy() as energy:
        samples = there.timed(steps, warmup=1)
    after = light.read() if light else before
    host = before.host.halfway_to(after.host)
    predicted = {"predicted_ms": replayed_ms(program, host), "bound_ms": bound_ms(program, host)}
    predicted["predicted_idle_ms"] = idle_ms(program, host)
    if light:
        ends = sorted(replayed_ms(program, reading.host) for reading in (before, after))
        predicted |= {"predicted_low_ms": ends[0], "predicted_high_ms": ends[1]} | light.metrics(
            before, after
        )
    step_ms = summarise(samples)["median"]
    run.samples = {"step_ms": [round(ms, 4) for ms in samples]}
    run.metrics = {
        "step_ms": summarise(samples),
        **predicted,
        "off": predicted["predicted_ms"] / step_ms - 1,
    }
    run.metrics |= {"bound_off": predicted["bound_ms"] / step_ms - 1} | _counted(
        program, host, work
    )
    run.metrics |= {"by": decided_by(program, host), "kernels_off": program.kernel_ms / step_ms - 1}
    if like:
        unseen_ms = replayed_ms(like.captured(), host)
        run.metrics |= {"unseen_ms": unseen_ms, "unseen_off": unseen_ms / step_ms - 1}
    run.metrics |= {
        "useful_tokens_per_s": work.useful_tokens / step_ms * 1e3,
        "tflops": work.flops / step_ms / 1e9,
    }
    if energy.watts is not None:
        run.metrics |= {"power_w": energy.watts, "joules_per_step": energy.watts * step_ms / 1e3}
    if on_gpu:
        busy = trace.metrics(step_ms)["gpu_busy"]
        run.metrics |= {"gpu_busy_share": busy, "idle_share": 1 - busy} | _reached(
            program, work, trainer.recipe
        )
    return Seen(run, program, host, work)


def _counted(program: Program, host: Host, work: Work) -> dict[str, float]:
    return {
        "launches": program.launches,
        "waits": program.waits,
        "kernels_ms": program.kernel_ms,
        "copies_ms": program.copy_ms,
        "host_us": 1e3 * host.mean_ms(program),
        "examples": work.examples,
        "tokens": work.tokens,
        "flops": work.flops,
    }


def _reached(program: Program, work: Work, recipe: Recipe) -> dict[str, float]:
    """The share of the data sheet's roofline that the step's FLOPs reach while kernels run."""
    card = spec_of(machine_facts())
    if card is None or recipe.precision not in card.dense:
        return {}
    rate = attainable(card, recipe.precision, work.flops / work.bytes)
    return {"reached": work.flops / program.kernel_ms / 1e9 / rate}


@dataclass
class Studied:
    """What a trainer showed: steps by batch ("long", "short") and, by delay in microseconds, steps
    beside a slower host."""

    seen: dict[str, Seen] = field(default_factory=dict)
    slowed: dict[float, Run] = field(default_factory=dict)


def study(
    texts: Mapping[str, Workload],
    recipe: Recipe,
    name: str,
    steps: int,
    host: Host | None = None,
    delays: Iterable[float] = (),
    like: Studied | None = None,
    found: Studied | None = None,
) -> Studied:
    """Build one trainer and foretell and measure its steps on the typical texts of each of `texts`
    ("long", ...).

    The first of `texts` builds the model; the others lend their texts, of the same tokenizer. host:
    what a launch takes the host, for a captured step: it has one size, so that no light step can
    tell, and only the first texts. Runs are named "`name` long" or, with a way, "moe long,
    grouped"; with `delays`, the first step is measured beside slower hosts too. like: the study of
    the same kernels launched one by one, for a captured step. found: filled as steps are measured
    and returned, so that a failure leaves what came before it.
    """
    first = next(iter(texts))
    found = Studied() if found is None else found
    with contextlib.ExitStack() as opened:
        light = (
            Light.of(opened.enter_context(Trainer(thin(texts[first]), recipe)))
            if host is None
            else None
        )
        trainer = opened.enter_context(Trainer(texts[first], recipe))
        there: dict[str, OnOneBatch] = {}
        for kind in [first] if host else texts:
            chosen = typical(texts[kind], trainer.recipe)
            there[kind] = OnOneBatch(trainer, batch_of(texts[kind], trainer.recipe, chosen))
            program = like.seen[kind].program if like else None
            traced = 1 if light and light.program.launches > MANY else 2
            found.seen[kind] = foretell_and_measure(
                named(name, kind), there[kind], light or host, steps, traced, program
            )
        for delay in delays:
            found.slowed[delay] = slowed(
                there[first], found.seen[first], light, delay, SLOWED_STEPS
            )
    return found


def named(name: str, kind: str) -> str:
    """ "moe, grouped" and "long" -> "moe long, grouped"."""
    family, comma, way = name.partition(",")
    return f"{family} {kind}{comma}{way}"


def slowed(there: OnOneBatch, seen: Seen, light: Light | None, delay_us: float, steps: int) -> Run:
    """The step of `seen` beside a host that takes `delay_us` longer for an operation, foretold and
    measured.

    The delay is known, and so is how many operations it holds up. What the detour through Python
    takes an operation is not: it is learnt from the light step beside the same slower host, right
    before and right after. A captured step has no light one, and its few operations outside the
    graph take no detour to speak of. Metrics: `step_ms`, `predicted_ms`, `host_us` (a launch, delay
    and all), `added_us` (of it), `calls` of operations and `delayed` ones a step, and `detour_us`
    of a call.
    """
    with SlowerHost(delay_us) as host:
        detours = [detour_ms(light, seen, host)] if light else []
        calls, delayed = host.calls, host.delayed
        samples = there.timed(steps, warmup=1)
        calls, delayed = (
            (now - before) / (steps + 1)
            for now, before in ((host.calls, calls), (host.delayed, delayed))
        )
        detours += [detour_ms(light, seen, host)] if light else []
    detour = max(0.0, sum(detours) / 2)
    added = (detour * calls + delay_us / 1e3 * delayed) / seen.program.launches
    slower = seen.host.plus(added)
    run = replace(
        seen.run, run=f"{seen.run.run}, delay {delay_us:g} us", samples={"step_ms": samples}
    )
    run.metrics = {
        "step_ms": summarise(samples),
        "predicted_ms": replayed_ms(seen.program, slower),
        "host_us": 1e3 * slower.mean_ms(seen.program),
        "added_us": 1e3 * added,
        "calls": calls,
        "delayed": delayed,
        "detour_us": 1e3 * detour,
    }
    run.metrics["off"] = run.metrics["predicted_ms"] / run.metric("step_ms") - 1
    return run


def detour_ms(light: Light, seen: Seen, host: SlowerHost) -> float:
    """Milliseconds that an operation of the light step takes longer beside the slower `host`, the
    delay left out.
    """
    calls, waited = host.calls, host.waited_ms
    longer = light.time() - seen.run.metric("light_step_ms")
    steps = light.repeats + 1  # one of them not timed
    return (longer - (host.waited_ms - waited) / steps) / ((host.calls - calls) / steps)


def launch_law(workload: Workload, family: str) -> Law:
    """How many operations that launch work a step of a family's loop has, by layers and experts.

    Counted on a tiny model with one layer more, and twice as many experts, of all of which some
    token takes each.
    """
    size, recipe = workload.size, next(iter(ways(family).values()))
    layers, experts = size.layers, size.experts
    base = _operations(workload, recipe, size)
    layer = _operations(workload, recipe, replace(size, layers=layers + 1)) - base
    if not experts:
        return Law(base - layers * layer, layer)
    expert = (_operations(workload, recipe, replace(size, experts=2 * experts)) - base) / (
        layers * experts
    )
    return Law(base - layers * layer, layer - experts * expert, expert)


def known(studied: Studied, law: Law, workload: Workload) -> dict[str, Any]:
    """What a study of a model tells about larger ones of its family, as the fields of
    `cards.Basis`.

    Without a GPU, operations stand for launches, and for the host's time an operation of the light
    step, work and all.
    """
    operations = law.launches(workload.size.layers, workload.size.experts)
    first = next(iter(studied.seen.values()))
    if "reached" not in first.run.metrics:
        return {"law": law, "host_ms": first.run.metric("light_step_ms") / operations}
    return {
        "law": law,
        "host_ms": first.host.mean_ms(first.program),
        "reached": first.run.metrics["reached"],
        "launches": first.program.launches / operations,
        "program": first.program,
        "host": first.host,
    }


def _operations(workload: Workload, recipe: Recipe, size: Any) -> int:
    """Operations that launch work in a step of the workload with a model of another size."""
    with Trainer(resized(workload, size), recipe) as trainer:
        other = trainer.workload
        there = OnOneBatch(trainer, batch_of(other, trainer.recipe, typical(other, trainer.recipe)))
        there.timed(0, warmup=1)  # the optimizer makes its moments
        with SlowerHost() as host:
            there.step()
    return host.delayed


# ----------------------------------------------------------------------------------------- tables


GIVEN_HEAD = (
    "step",
    "kernels, ms",
    "launches",
    "waits",
    "host, µs a launch",
    "light step before → after, ms",
    "its kernels, %",
)
"""The head of a table of `given_rows`."""
HEAD = (
    "step",
    "kernels, ms",
    "launches × host, ms",
    "short form, ms",
    "replayed, ms",
    "measured, ms",
    "replay off by",
    "decided by",
)
"""The head of a table of `rows`."""


def given_rows(runs: Iterable[Run]) -> list[tuple[Any, ...]]:
    """Rows for `GIVEN_HEAD`: what each prediction was made from."""
    rows = []
    for run in _foretold(runs):
        m, light = run.metric, run.metric("light_step_ms")
        share = (
            100 * m("light_work_ms") / light if light else None
        )  # a captured step's host is probed
        ends = m("light_before_ms"), m("light_after_ms")
        readings = " → ".join(f"{end:.4g}" for end in ends) if all(ends) else None
        rows.append(
            (run.run, m("kernels_ms"), m("launches"), m("waits"), m("host_us"), readings, share)
        )
    return rows


def steadiness(runs: Iterable[Run]) -> str:
    """What the two readings of the light step, before and after each of `runs`, say about the host,
    in a sentence.
    """
    read = [
        run
        for run in runs
        if run.ok and run.metric("light_before_ms") and run.metric("light_after_ms")
    ]
    ends = {run.run: (run.metric("light_before_ms"), run.metric("light_after_ms")) for run in read}
    moved = {name: pair for name, pair in ends.items() if max(pair) > (1 + DRIFT) * min(pair)}
    most = sorted(moved, key=lambda name: -max(moved[name]) / min(moved[name]))[:3]
    if not ends:
        return ""
    if not moved:
        return f"The host was steady: around each step, the light step took the same within {100 * DRIFT:.0f} %."
    told = "; ".join(
        f"*{name}* ({moved[name][0]:.4g} ms before, {moved[name][1]:.4g} after)" for name in most
    )
    return (
        f"The host's own speed changed by more than {100 * DRIFT:.0f} % while {len(moved)} of "
        f"{len(ends)} steps were "
        f"measured, as the light step tells; most around {told}. Predictions take the middle, and "
        "can't be surer."
    )


def rows(runs: Iterable[Run]) -> list[tuple[Any, ...]]:
    """Rows for `HEAD` out of runs of `foretell_and_measure`, which may come from a results file."""
    rows = []
    for run in _foretold(runs):
        m = run.metric
        times = (
            m("kernels_ms"),
            m("launches") * m("host_us") / 1e3,
            m("bound_ms"),
            m("predicted_ms"),
            m("step_ms"),
        )
        rows.append((run.run, *times, _off(run), run.metrics.get("by")))
    return rows


def rows_of(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """`rows` of runs by name, as a results file gives them."""
    return rows(runs.values())


def ranges(runs: Iterable[Run]) -> dict[str, tuple[float, float]]:
    """Run -> by how many % of the measurement it is off with the quicker reading of the host, and
    with the slower.
    """
    ends = ("predicted_low_ms", "predicted_high_ms")
    read = [run for run in runs if run.ok and all(end in run.metrics for end in ends)]
    return {
        run.run: tuple(100 * (run.metrics[end] / run.metric("step_ms") - 1) for end in ends)
        for run in read
    }


def _foretold(runs: Iterable[Run]) -> list[Run]:
    return [
        run for run in runs if run.ok and run.metric("predicted_ms") and "launches" in run.metrics
    ]


UNSEEN_HEAD = (
    "captured step, predicted from kernels launched one by one",
    "predicted, ms",
    "measured, ms",
    "off by",
)


def unseen_rows(runs: Iterable[Run]) -> list[tuple[Any, ...]]:
    """Rows for `UNSEEN_HEAD`: captured steps that were foretold from another one's trace."""
    runs = [run for run in runs if run.ok and "unseen_ms" in run.metrics]
    return [
        (run.run, run.metric("unseen_ms"), run.metric("step_ms"), _off(run, "unseen_off"))
        for run in runs
    ]


DELAY_HEAD = (
    "step",
    "delay, µs",
    "operations delayed",
    "a launch longer by, µs",
    "replayed, ms",
    "measured, ms",
    "off by",
)
"""The head of a table of `delay_rows`."""


def delay_rows(studied: Studied) -> list[tuple[Any, ...]]:
    """Rows for `DELAY_HEAD`, the step without any delay first."""
    plain = next(iter(studied.seen.values())).run
    rows = [
        (
            plain.run,
            None,
            None,
            None,
            plain.metric("predicted_ms"),
            plain.metric("step_ms"),
            _off(plain),
        )
    ]
    for delay, run in studied.slowed.items():
        m = run.metric
        rows.append(
            (
                plain.run,
                delay,
                m("delayed"),
                m("added_us"),
                m("predicted_ms"),
                m("step_ms"),
                _off(run),
            )
        )
    return rows


def slowed_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `DELAY_HEAD` of runs as a results file names them: "dense long, delay 20 us"."""
    rows = []
    for name, run in runs.items():
        step, _, delay = name.removesuffix(" us").rpartition(", delay ")
        if run.ok and step:
            m = run.metric
            rows.append(
                (
                    step,
                    float(delay),
                    m("delayed"),
                    m("added_us"),
                    m("predicted_ms"),
                    m("step_ms"),
                    _off(run),
                )
            )
    return rows


def by_delay(studied: Studied) -> dict[float, float]:
    """Microseconds more for a launch -> the measured milliseconds a step."""
    plain = next(iter(studied.seen.values())).run
    slowed = {run.metric("added_us"): run.metric("step_ms") for run in studied.slowed.values()}
    return {0.0: plain.metric("step_ms")} | slowed


def _off(run: Run, metric: str = "off") -> str:
    return f"{round(100 * run.metrics[metric]):+d} %"  # an integer has no -0


def flip_us(seen: Seen, rival_ms: float, most_us: float = 1000.0) -> float | None:
    """Microseconds more a launch with which this card's step lasts as long as a rival's; None: none
    up to most.
    """
    return crossing(
        lambda us: replayed_ms(seen.program, seen.host.plus(us / 1e3)),
        lambda us: rival_ms,
        0.0,
        most_us,
    )


def slowdown(seen: Seen, most_us: float, points: int = 16) -> dict[float, float]:
    """Microseconds more for each launch -> milliseconds a step, foretold."""
    steps = [most_us * at / (points - 1) for at in range(points)]
    return {us: replayed_ms(seen.program, seen.host.plus(us / 1e3)) for us in steps}


SPEED_HEAD = ("step", "launches", "kernels, ms", "step, ms", "useful tokens/s", "times the loop")


def speed_rows(runs: Iterable[Run], base: str) -> list[tuple[Any, ...]]:
    """Rows for `SPEED_HEAD` out of runs on the same texts, compared with the one named `base`, if
    it is there.
    """
    runs = [run for run in runs if run.ok]
    rates = {run.run: run.metric("useful_tokens_per_s") for run in runs}
    measured = ("launches", "kernels_ms", "step_ms", "useful_tokens_per_s")
    return [
        (
            run.run,
            *map(run.metric, measured),
            rates[run.run] / rates[base] if base in rates else None,
        )
        for run in runs
    ]


def accuracy(runs: Iterable[Run]) -> dict[str, float]:
    """How far the predictions are off in size, over all of `runs`: `steps`, `within_20`,
    `median_off`, `worst_off`; the first two also of the steps that each clock decides
    (`host_steps`, ..).

    Several steps of one recipe share its host: `recipes` counts a model driven in one way once, and
    `recipes_within_20` those all of whose steps are.
    """
    runs = [run for run in runs if run.ok and "off" in run.metrics]
    if not runs:
        return {}
    offs = sorted(abs(run.metrics["off"]) for run in runs)
    found = {**_within(runs), "median_off": summarise(offs)["median"], "worst_off": offs[-1]}
    for clock in CLOCKS:
        found |= {
            f"{clock}_{what}": n
            for what, n in _within(r for r in runs if r.metrics.get("by") == clock).items()
        }
    recipes: dict[str, list[bool]] = {}
    for run in runs:
        recipes.setdefault(_recipe(run.run), []).append(abs(run.metrics["off"]) <= NEAR)
    return found | {"recipes": len(recipes), "recipes_within_20": sum(map(all, recipes.values()))}


def _within(runs: Iterable[Run]) -> dict[str, int]:
    near = [abs(run.metrics["off"]) <= NEAR for run in runs]
    return {"steps": len(near), "within_20": sum(near)}


def _recipe(run_name: str) -> str:
    """ "moe long, grouped" -> "moe, grouped": what `named` was given."""
    model, comma, way = run_name.partition(",")
    return f"{model.partition(' ')[0]}{comma}{way}"


def told(found: Mapping[str, float]) -> str:
    """`accuracy` in words."""
    parts = [
        f"{found[f'{clock}_within_20']} of {found[f'{clock}_steps']} steps that {who} ({what})"
        for clock, (who, what) in CLOCKS.items()
        if found[f"{clock}_steps"]
    ]
    return (
        f"Predicted within 20 %: {'; '.join(parts)}. Half of the {found['steps']} predictions are "
        "off by at most "
        f"{100 * found['median_off']:.0f} %, the worst by {100 * found['worst_off']:.0f} %. "
        "Counted by pairs of a "
        f"model and a way to train it: of {found['recipes']}, {found['recipes_within_20']} had all "
        "of their steps "
        "within 20 %."
    )
