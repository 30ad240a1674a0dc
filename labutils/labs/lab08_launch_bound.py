"""Lab 08's training steps: predicted by the replay, then measured, then beside slower hosts.

    for step in study(texts["moe"], "moe", "rewritten", steps=8):
        step.run.metrics["predicted_ms"], step.run.metric("step_ms")

One trainer serves two batches: four texts of the dataset's mean length, and four short ones.
Batches are fixed and nothing is learned, as a step's time is predicted from a trace of the same
work: with a learning rate tokens of gpt-oss soon choose other experts, and a loop over experts then
has other operations (on an H200 from 38,065 to 44,637 in 20 steps of short texts; at rate 0 always
43,206). The host's time comes from the step on short texts, which the host decides. A host's speed
changes within seconds, so steps on short and on long texts take turns: a drift meets both.

Nothing is timed before the profiler has run. Unless the environment says `TEARDOWN_CUPTI=1`, CUPTI
stays attached to the process after the first trace and slows launches
(https://github.com/pytorch/pytorch/issues/144455): a step read before that and a step timed after
it have two hosts.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from labutils.labs.ladders import A3_BASE
from labutils.profiling import step_model
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.measured_rates import measured_roofline, probe_machine
from labutils.profiling.step_model import Program, replayed_ms
from labutils.recipe import Recipe, Unavailable
from labutils.results.effects import FEWEST_SAMPLES, RESAMPLES
from labutils.results.records import Run, summarise
from labutils.training import Trainer
from labutils.training.benchmark import empty_run
from labutils.training.one_batch import OnOneBatch
from labutils.workloads.base import Batch, Work, Workload

TEXTS = 4
"""Texts in a batch (article A3's batch size where it compares methods)."""
ROW = 4 * 862
"""Tokens of a packed row at full scale: four texts of the mean length."""


def variants(family: str) -> dict[str, Recipe]:
    """How a model ("dense" or "moe") is driven: the library's loop first, then what changes it.

    The library pads texts side by side, the others pack them one behind the other: of texts as long
    as each other the same tokens. "grouped" is the library's training loop with its own grouped
    experts, see `study`. accelerate is left out, as its loader takes no given batch.
    """
    loop = A3_BASE.but(driver="eager", micro_batch=TEXTS, learning_rate=0.0)
    if family == "dense":
        return {"loop": loop}
    if family != "moe":
        raise ValueError(f"No family {family!r}. There are: dense, moe.")
    packed = {"shapes": "packed", "token_budget": ROW, "micro_batch": 1}
    ours = loop.but(layers="rewritten", logging="ring-buffer", optimizer="adamw-fused", **packed)
    captured = ours.but(driver="graph")
    blocks = {"compile": "default", "compile_scope": "blocks", "dynamic": "static"}
    compiled = captured.but(adapter="plain", loss="fused", **blocks)
    ways = {"loop": loop, "grouped": loop, "rewritten": ours}
    return ways | {"captured": captured, "compiled": compiled}


def tags_of(family: str, way: str) -> dict[str, Any]:
    """The tags of a way's step on long texts; the library's loop is no variant."""
    tags = {"experiment": "steps", "model": family, "texts": "long"}
    return tags if way == next(iter(variants(family))) else tags | {"variant": way}


def batch_of(workload: Workload, recipe: Recipe) -> Batch:
    """The micro-batch of the longest `TEXTS` examples that are not longer than the mean. A packed
    row is as long as they are."""
    lengths = [example.tokens for example in workload.example_sizes(recipe)]
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    mean = statistics.mean(lengths)
    chosen = [place for place in order if lengths[place] <= mean][:TEXTS]
    collate = workload.collate(recipe)
    if collate.layout.packs:
        collate.layout = replace(collate.layout, budget=sum(lengths[place] for place in chosen))
    examples = workload.dataset(None, recipe)
    return collate([examples[place] for place in chosen])


# ----------------------------------------------------------------------------- predict and measure


@dataclass(frozen=True)
class PredictedStep:
    """A step that was predicted and measured: its `run`, what predicted it, and another such step
    as `plots.timeline` draws it. `launch_ms` is the host's time for a launch."""

    run: Run
    program: Program
    launch_ms: float
    work: Work
    lanes: dict[str, list] = field(default_factory=dict)


class HostStep:
    """A step that the host decides: the same model on short texts. It tells what a launch of the
    `long` step takes the host. An operation takes it the same in both. They differ in launches an
    operation, and a loop over experts skips those that no token of a short text has chosen."""

    def __init__(self, step: OnOneBatch, long: OnOneBatch) -> None:
        self.step = step
        step.timed(0, warmup=3)
        self.program = Program.of(step.traced())
        self.operations, self.long_operations = operations_of(step), operations_of(long)
        # Had the long step this one's launches an operation, it would have so many.
        self.as_long = self.program.launches * self.long_operations / self.operations

    def launch_ms(self, program: Program, step_ms: float) -> float | None:
        """What a launch of the long step, which is `program`, takes where this one takes `step_ms`.
        None where the GPU decides even this one."""
        launch_ms = step_model.host_of(self.program, step_ms)
        return launch_ms and launch_ms * self.as_long / program.launches

    def predict(self, program: Program, launch_ms: float, short_ms: Sequence[float]) -> list[float]:
        """Milliseconds of the long step beside each of these short ones, whose median `launch_ms`
        was read from: between replays of both."""
        ends = np.array([0.9 * min(short_ms), 1.1 * max(short_ms)]) / statistics.median(short_ms)
        hosts = launch_ms * np.linspace(*ends, 17)
        back = program.launches / self.as_long
        short = [replayed_ms(self.program, each * back) for each in hosts]
        long = [replayed_ms(program, each) for each in hosts]
        return np.interp(short_ms, short, long).tolist()


def operations_of(step: OnOneBatch) -> int:
    """Operations that compute in one such step, see `host_delay`."""
    with SlowerHost() as host:
        step.step()
    return host.delayed


def study(
    texts: Mapping[str, Workload],
    family: str,
    way: str,
    steps: int,
    delays_us: Sequence[float] = (),
) -> Iterator[PredictedStep]:
    """Build one trainer, and predict and measure its step on typical "long" texts of `texts`. The
    "short" ones tell what a launch takes the host. Each step comes as soon as it is measured.

    The library's loop, and a step with delays, is measured twice: what the second differs by is
    noise. For each of `delays_us` it is measured once more, beside a host that waits for so many
    microseconds before each operation; at 0 it takes the detour through a dispatch mode. A captured
    step has one size, so that no other tells about the host. Raises `Unavailable` for one without a
    GPU.
    """
    recipe = variants(family)[way]
    with Trainer(texts["long"], recipe) as trainer:
        if way == "grouped":  # transformers 5 has it so by default
            trainer.model.network.set_experts_implementation("grouped_mm")
        if recipe.driver != trainer.recipe.driver:
            raise Unavailable("CUDA graphs need an NVIDIA GPU")
        short, step = None, OnOneBatch(trainer, batch_of(texts["long"], trainer.recipe))
        if recipe.driver != "graph":
            short = HostStep(OnOneBatch(trainer, batch_of(texts["short"], trainer.recipe)), step)
        tags = tags_of(family, way)
        yield (plain := predict_and_measure(tags, step, short, steps))
        if delays_us or "variant" not in tags:
            yield predict_and_measure(tags | {"again": True}, step, short, steps, plain)
        for delay_us in delays_us:
            slowed = tags | {"delay_us": delay_us}
            yield predict_and_measure(slowed, step, short, steps, plain)


def in_turns(
    step: OnOneBatch, short: HostStep | None, rounds: int, delay_us: float | None
) -> dict[str, list[float]]:
    """Milliseconds of a warm "long" step and of the "short" one in so many rounds, there and back,
    beside a host of such a delay (microseconds an operation; None: the plain host)."""
    turns = ({"short": short.step} if short else {}) | {"long": step}
    times: dict[str, list[float]] = {name: [] for name in turns}
    with nullcontext() if delay_us is None else SlowerHost(delay_us):
        for number in range(rounds):
            for name in list(turns)[:: -1 if number % 2 else 1]:
                times[name] += turns[name].timed(1)
    return times


def predict_and_measure(
    tags: dict[str, Any],
    step: OnOneBatch,
    short: HostStep | None,
    steps: int,
    traced: PredictedStep | None = None,
) -> PredictedStep:
    """Trace a step, time it beside the host that `tags` name, and predict it from all but its time.

    short: tells what a launch takes the host; without it, or where the GPU decides that step, a
    launch takes what the shortest call takes, which is too little. traced: the same step, traced
    before. A trace is followed by one step that nothing times.
    """
    workload, recipe = step.trainer.workload, step.trainer.recipe
    if traced is None:
        step.timed(0, warmup=3)
        trace = step.traced()
        program = Program.of(trace)
        lanes = step.lanes()
        work = workload.work_of(recipe, step.batch)
        del trace
        gc.collect()  # a trace is a hundred thousand objects
        step.timed(0, warmup=1)
    else:
        program, work, lanes = traced.program, traced.work, traced.lanes
    times = in_turns(step, short, max(steps, FEWEST_SAMPLES), tags.get("delay_us"))
    run = empty_run(workload, recipe, " ".join(map(str, tags.values())))
    run.tags = tags
    read = short and short.launch_ms(program, statistics.median(times["short"]))
    launch_ms = read or probe_machine("launch_us").median("launch_us") / 1e3
    predicted_ms = [replayed_ms(program, launch_ms)] * len(times["long"])
    if short:
        run.samples = {"short_ms": times["short"]}
        run.metrics["short_kernels_ms"] = short.program.kernel_ms
        run.metrics |= {"short_operations": short.operations, "operations": short.long_operations}
    if short and read:
        predicted_ms = short.predict(program, read, times["short"])
        run.metrics |= {"host_us": 1e3 * read, "host_ms": read * program.launches}
    describe(run, program, work, predicted_ms, times["long"])
    return PredictedStep(run, program, launch_ms, work, lanes)


def describe(
    run: Run, program: Program, work: Work, predicted_ms: list[float], step_ms: list[float]
) -> None:
    """Put into `run` what was predicted and measured in each round, and what that says. By how much
    the median prediction is off the median step has a 95 % interval from rounds drawn anew."""
    run.samples |= {"predicted_ms": predicted_ms, "step_ms": step_ms}
    run.metrics |= {name: summarise(values) for name, values in run.samples.items()}
    drawn = np.random.default_rng(0).integers(0, len(step_ms), (RESAMPLES, len(step_ms)))
    predicted, measured = (np.median(np.array(ms)[drawn], axis=1) for ms in (predicted_ms, step_ms))
    low, high = np.quantile(100 * (predicted / measured - 1), (0.025, 0.975)).tolist()
    run.metrics |= {
        "off_by_percent": 100 * (run.metric("predicted_ms") / run.metric("step_ms") - 1),
        "off_low_percent": low,
        "off_high_percent": high,
        "flops_per_step": work.flops,
        "floor_ms": measured_roofline(run.recipe["precision"]).floor_ms(work.flops, work.bytes),
        "launches": program.launches,
        "waits": program.waits,
        "kernels_ms": program.kernel_ms,
    }
    if not program.takes_turns:
        busy = min(1.0, program.kernel_ms / run.metric("step_ms"))
        run.metrics |= {"gpu_busy_share": busy, "idle_share": 1 - busy}
