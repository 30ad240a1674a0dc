"""Lab 08's training steps: predicted by the replay, then measured, then beside slower hosts.

    for step in study(texts["moe"], "moe", "grouped", steps=8):
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
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labutils.labs.ladders import A3_BASE
from labutils.profiling import step_model
from labutils.profiling.gpu_specs import Spec, spec_of
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.machine import default_device, machine_facts
from labutils.profiling.measured_rates import measured_roofline, probe_machine
from labutils.profiling.step_model import Host, Program, replayed_ms
from labutils.profiling.timing import StepTimes
from labutils.profiling.trace import Trace, profile
from labutils.profiling.utilization import Energy
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, summarise
from labutils.training import Trainer
from labutils.training.benchmark import empty_run, timed
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
SLOWED_STEPS = 2
MANY = 15_000
"""Of a step of more launches one is traced: reading a trace back takes long."""
SHOWN_FROM, SHOWN_MS = 0.3, 2.0
"""Of a traced step so many milliseconds are shown, from this part of it on: its forward pass."""


def variants(family: str) -> dict[str, Recipe]:
    """How a model ("dense" or "moe") is driven: the library's loop first, then what changes it.

    The library pads texts side by side, the others pack them one behind the other: of texts as long
    as each other the same tokens. accelerate is left out, as its loader takes no given batch.
    """
    loop = A3_BASE.but(driver="eager", micro_batch=TEXTS)
    if family == "dense":
        return {"loop": loop}
    packed = {"shapes": "packed", "token_budget": ROW, "micro_batch": 1}
    grouped = loop.but(layers="rewritten", logging="ring-buffer", optimizer="adamw-fused", **packed)
    captured = grouped.but(driver="graph")
    blocks = {"compile": "default", "compile_scope": "blocks", "dynamic": "static"}
    compiled = captured.but(adapter="plain", loss="fused", **blocks)
    return {"expert loop": loop, "grouped": grouped, "captured": captured, "compiled": compiled}


def tags_of(family: str, way: str, kind: str = "long") -> dict[str, Any]:
    """The tags of a way's step on such texts; the library's loop is no variant."""
    tags = {"experiment": "steps", "model": family, "texts": kind}
    return tags if way == next(iter(variants(family))) else tags | {"variant": way}


# --------------------------------------------------------------------------------------- batches


def typical(lengths: Sequence[int]) -> list[int]:
    """The places of the longest `TEXTS` examples that are not longer than the mean."""
    mean = sum(lengths) / len(lengths)
    fitting = [place for place, length in enumerate(lengths) if length <= mean]
    return sorted(fitting, key=lambda place: -lengths[place])[:TEXTS]


def shortest(lengths: Sequence[int]) -> list[int]:
    """The place of the shortest example."""
    return [lengths.index(min(lengths))]


def batch_of(
    workload: Workload, recipe: Recipe, choose: Callable[[Sequence[int]], list[int]] = typical
) -> Batch:
    """The micro-batch of the examples that `choose` takes, by their lengths in tokens; a packed row
    is as long as they are."""
    lengths = [example.tokens for example in workload.example_sizes(recipe)]
    chosen, collate = choose(lengths), workload.collate(recipe)
    if collate.layout.packs:
        collate.layout = replace(collate.layout, budget=sum(lengths[place] for place in chosen))
    examples = workload.dataset(None, recipe)
    return collate([examples[place] for place in chosen])


def thin(workload: Workload) -> Workload:
    """The workload with a model of as many layers and experts, whose kernels take little, and with
    texts in its words.

    A short text isn't enough: its few tokens reach nearly all of gpt-oss-20b's experts, and reading
    their 38 GB twice takes a GPU longer than most hosts take to launch it all.
    """
    size, other = workload.size, copy.copy(workload)
    widths = {name: max(THINNEST, getattr(size, name) // THIN) for name in ("width", "inner")}
    few = {"words": min(size.words, 1024), "texts": min(size.texts, 32)}
    other.sizes = workload.sizes | {workload.scale: replace(size, **widths, **few)}
    other.weights, other.data = "random", "generated"
    return other


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
        times = StepTimes()
        for _ in timed(self.trainer, steps, times):
            self.step()
        return times.step_ms

    def warm_up(self, at_least_ms: float) -> float:
        """Milliseconds of a step, after two, the first of which may compile, and so long a time."""
        one = self.timed(2)[-1]
        return min(one, *self.timed(max(1, math.ceil(at_least_ms / one) - 1)))

    def traced(self, steps: int) -> Trace:
        """A trace of `steps` optimizer steps; on a GPU with shapes, which tell thin products."""
        with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
            on_gpu = default_device() == "cuda"
            return profile(self, steps, folder, with_stack=False, with_shapes=on_gpu)


# ----------------------------------------------------------------------------- predict and measure


@dataclass(frozen=True)
class PredictedStep:
    """A step that was predicted and measured: its `run`, what predicted it, and some milliseconds
    of its trace as `plots.timeline` draws them."""

    run: Run
    program: Program
    host: Host
    work: Work
    lanes: dict[str, list] = field(default_factory=dict)

    def beside(self, added_us: float) -> float:
        """Milliseconds a step, predicted, where each launch takes the host so many microseconds
        longer."""
        return replayed_ms(self.program, self.host.plus(added_us / 1e3))

    def on(self, there: Spec, here: Spec, empty_ms: float = 0.0) -> float:
        """The same on the card `there`, with this host; it was traced on the card `here`, where a
        kernel takes `empty_ms` at least."""
        dtype, intensity = self.run.recipe["precision"], self.work.flops / self.work.bytes
        return replayed_ms(self.program.on(there, here, dtype, intensity, empty_ms), self.host)


class LightStep:
    """A step of a thin model on its shortest text: it tells what a launch takes the host."""

    def __init__(self, trainer: Trainer) -> None:
        """Raises `ValueError` where its kernels take too long to be light."""
        self.step = OnOneBatch(trainer, batch_of(trainer.workload, trainer.recipe, shortest))
        some_ms = self.step.timed(LIGHT_STEPS, warmup=2)
        self.repeats = max(LIGHT_STEPS, math.ceil(LIGHT_MS / statistics.median(some_ms)))
        self._trace()
        self.read()

    def _trace(self) -> None:
        trace = self.step.traced(1)
        self.program, self.phases = Program.of(trace), trace.host_breakdown()

    def time(self) -> float:
        """Milliseconds of a step, the median of a few, after one to come back to it."""
        return statistics.median(self.step.timed(self.repeats, warmup=1))

    def read(self) -> tuple[float, Host]:
        """(its milliseconds now, the host that explains them).

        A CPU's step is traced again where other programs took the CPU during the trace before.
        """
        for _ in range(TRIES):
            step_ms = self.time()
            if not step_model.interrupted(self.program, step_ms):
                break
            self._trace()
        return step_ms, step_model.host_of(self.program, self.phases, step_ms)


def study(
    texts: Mapping[str, Workload], family: str, way: str, steps: int, delays: Iterable[float] = ()
) -> list[PredictedStep]:
    """Build one trainer, predict and measure its steps on typical texts of each of `texts`.

    The first of `texts` ("long", ...) builds the model; the others lend their texts. With `delays`
    (microseconds) its step is measured beside slower hosts as well. A captured step has one size,
    so only the first texts, and no light step: the host takes what the shortest call takes. Raises
    `Unavailable` for a captured step without a GPU.
    """
    first, recipe = next(iter(texts)), variants(family)[way]
    with contextlib.ExitStack() as opened:
        if recipe.driver == "graph":
            if default_device() != "cuda":
                raise Unavailable("CUDA graphs need an NVIDIA GPU")
            host: Host | LightStep = Host(probe_machine("launch_us").median("launch_us") / 1e3)
        else:
            host = LightStep(opened.enter_context(Trainer(thin(texts[first]), recipe)))
        trainer = opened.enter_context(Trainer(texts[first], recipe))
        found = []
        for kind in list(texts)[::-1] if isinstance(host, LightStep) else [first]:
            step = OnOneBatch(trainer, batch_of(texts[kind], trainer.recipe))
            found.insert(0, predict_and_measure(tags_of(family, way, kind), step, host, steps))
        return found + [slowed(step, found[0], host, delay) for delay in delays]


def measured_again(texts: Mapping[str, Workload], family: str, way: str, steps: int) -> Run:
    """The step on the first texts by a trainer of its own, timed once more: what it differs by from
    the first time is noise."""
    kind, recipe = next(iter(texts)), variants(family)[way]
    with Trainer(texts[kind], recipe) as trainer:
        step = OnOneBatch(trainer, batch_of(texts[kind], trainer.recipe))
        step.warm_up(WARM_MS[default_device()])
        run = empty_run(trainer.workload, trainer.recipe, f"{family} {kind} again")
        run.samples = {"step_ms": step.timed(steps)}
    run.tags = tags_of(family, way, kind) | {"again": True}
    run.metrics = {"step_ms": summarise(run.samples["step_ms"])}
    return run


def predict_and_measure(
    tags: Mapping[str, Any], step: OnOneBatch, host: Host | LightStep, steps: int
) -> PredictedStep:
    """Trace a step, time it, and predict it from all but its time.

    host: what a launch takes, or the light step that tells it. Then `error_bar_percent` is the
    prediction's error bar: half of what the two readings of the light step make of difference.
    `reached`: the share of the data sheet's roofline that its FLOPs reach while kernels run.
    """
    trainer, device, precision = step.trainer, default_device(), step.trainer.recipe.precision
    light = host if isinstance(host, LightStep) else None
    steps = max(steps, math.ceil(WATCH_MS[device] / step.warm_up(WARM_MS[device])))
    trace = step.traced(1 if light and light.program.launches > MANY else 2)
    program, lanes = Program.of(trace), _shown(trace)
    work = trainer.workload.work_of(trainer.recipe, step.batch)
    gc.collect()  # a trace is a hundred thousand objects
    before_ms, before = light.read() if light else (None, host)
    with Energy() as energy:
        samples = step.timed(steps, warmup=1)
    after_ms, after = light.read() if light else (None, host)
    host = before.halfway_to(after)
    step_ms, predicted_ms = statistics.median(samples), replayed_ms(program, host)
    run = empty_run(trainer.workload, trainer.recipe, " ".join(map(str, tags.values())))
    run.tags, run.samples = dict(tags), {"step_ms": [round(ms, 4) for ms in samples]}
    run.metrics = {
        "step_ms": summarise(samples),
        "floor_ms": measured_roofline(precision).floor_ms(work.flops, work.bytes),
        "predicted_ms": predicted_ms,
        "off_by_percent": 100 * (predicted_ms / step_ms - 1),
        "by": step_model.decided_by(program, host),
        "launches": program.launches,
        "waits": program.waits,
        "kernels_ms": program.kernel_ms,
        "host_us": 1e3 * host.mean_ms(program),
        "useful_tokens_per_s": work.useful_tokens / step_ms * 1e3,
    }
    if light:
        moved_ms = abs(replayed_ms(program, before) - replayed_ms(program, after))
        run.metrics["error_bar_percent"] = 50 * moved_ms / predicted_ms
        run.metrics["light_step_ms"] = (before_ms + after_ms) / 2
    card = spec_of(machine_facts())
    if device == "cuda":
        busy = trace.metrics(step_ms)["gpu_busy"]
        run.metrics |= {"gpu_busy_share": busy, "idle_share": 1 - busy}
        run.metrics |= {"power_w": energy.watts} if energy.watts else {}
    if card and precision in card.dense:
        rate = step_model.attainable(card, precision, work.flops / work.bytes)
        run.metrics["reached"] = work.flops / program.kernel_ms / 1e9 / rate
    return PredictedStep(run, program, host, work, lanes)


def _shown(trace: Trace) -> dict[str, list]:
    """`SHOWN_MS` of a trace in two rows: what the host does for the GPU, and the GPU; on a CPU its
    operators."""
    start, end = trace.step_windows[0]
    start += SHOWN_FROM * (end - start)
    lanes = trace.timeline((start, start + SHOWN_MS))
    if not trace.on_gpu:
        return {"operators": lanes.get("operators", [])}
    host = lanes.get("launches", []) + lanes.get("host waits", [])
    return {"host": host, "GPU": lanes.get("GPU", [])}


def slowed(
    step: OnOneBatch, plain: PredictedStep, host: Host | LightStep, delay_us: float
) -> PredictedStep:
    """The step beside a host that takes `delay_us` longer for an operation, predicted and measured.

    What an operation takes longer, delay and the detour through Python together, is read from the
    light step beside the same slower host, right before and right after. A captured step has no
    light one, and its few operations outside the graph take no detour to speak of. Metrics:
    `step_ms`, `predicted_ms`, `delayed` operations a step, and `added_us`, which a launch takes
    longer: not every operation makes one launch, so that it is the operations' time shared out.
    """
    light = host if isinstance(host, LightStep) else None
    with SlowerHost(delay_us) as slower:
        light_ms = [light.time()] if light else []
        of_light = slower.delayed
        samples = step.timed(SLOWED_STEPS, warmup=1)
        delayed = (slower.delayed - of_light) / (SLOWED_STEPS + 1)
        light_ms += [light.time()] if light else []
    longer_ms = delay_us / 1e3  # an operation
    if light:
        longer_ms = statistics.mean(light_ms) - plain.run.metrics["light_step_ms"]
        longer_ms *= (light.repeats + 1) / of_light
    added_us = 1e3 * max(0.0, longer_ms) * delayed / plain.program.launches
    predicted_ms, tags = plain.beside(added_us), plain.run.tags | {"delay_us": float(delay_us)}
    off_by_percent = 100 * (predicted_ms / statistics.median(samples) - 1)
    metrics = {"step_ms": summarise(samples), "predicted_ms": predicted_ms}
    metrics |= {"off_by_percent": off_by_percent, "added_us": added_us, "delayed": delayed}
    run = replace(plain.run, tags=tags, samples={"step_ms": samples}, metrics=metrics)
    return replace(plain, run=run, host=plain.host.plus(added_us / 1e3))
