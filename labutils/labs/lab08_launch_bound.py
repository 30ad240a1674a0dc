"""Lab 08's training steps: predicted by the replay, then measured, then beside slower hosts.

    for step in study(texts["moe"], "moe", "rewritten", steps=8):
        step.run.metrics["predicted_ms"], step.run.metric("step_ms")

One trainer serves two batches: four texts of the dataset's mean length, and four short ones.
Batches are fixed, as a step's time is predicted from a trace of the same work. The host's time
comes from the step on short texts, which the host decides. A host's speed changes from one second
to the next, so steps on short and on long texts take turns.

Nothing is timed before the profiler has run. After its first trace CUPTI stays attached to the
process and slows launches (https://github.com/pytorch/pytorch/issues/144455): a step read before
that and a step timed after it have two hosts.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labutils.labs.ladders import A3_BASE
from labutils.profiling import step_model
from labutils.profiling.gpu_specs import Spec, spec_of
from labutils.profiling.host_delay import SlowerHost
from labutils.profiling.machine import machine_facts
from labutils.profiling.measured_rates import measured_roofline, probe_machine
from labutils.profiling.step_model import Host, Program, replayed_ms
from labutils.profiling.trace import Trace
from labutils.recipe import Recipe, Unavailable
from labutils.results.effects import interval
from labutils.results.records import Run, summarise
from labutils.training import Trainer
from labutils.training.benchmark import empty_run
from labutils.training.one_batch import OnOneBatch
from labutils.workloads.base import Batch, Work, Workload

TEXTS = 4
"""Texts in a batch (article A3's batch size where it compares methods)."""
ROW = 4 * 862
"""Tokens of a packed row at full scale: four texts of the mean length."""
SLOWED_STEPS = 6
SHOWN_MS = 2.0
"""Of a traced step so many milliseconds are shown: some in which the GPU is as busy, and the host
waits as often, as in all of it."""


def variants(family: str) -> dict[str, Recipe]:
    """How a model ("dense" or "moe") is driven: the library's loop first, then what changes it.

    The library pads texts side by side, the others pack them one behind the other: of texts as long
    as each other the same tokens. "grouped" is the library's loop with its own grouped experts, see
    `study`. accelerate is left out, as its loader takes no given batch.
    """
    loop = A3_BASE.but(driver="eager", micro_batch=TEXTS)
    if family == "dense":
        return {"loop": loop}
    packed = {"shapes": "packed", "token_budget": ROW, "micro_batch": 1}
    ours = loop.but(layers="rewritten", logging="ring-buffer", optimizer="adamw-fused", **packed)
    captured = ours.but(driver="graph")
    blocks = {"compile": "default", "compile_scope": "blocks", "dynamic": "static"}
    compiled = captured.but(adapter="plain", loss="fused", **blocks)
    ways = {"expert loop": loop, "grouped": loop, "rewritten": ours}
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


class HostStep:
    """A step that the host decides: the same model on short texts. It tells what a launch of the
    `long` step takes the host. An operation takes it the same in both. They differ in launches an
    operation, and a loop over experts skips those that no token of a short text has chosen."""

    def __init__(self, step: OnOneBatch, long: OnOneBatch) -> None:
        self.step = step
        step.timed(0, warmup=3)
        trace = step.traced()
        self.program, self.phases = Program.of(trace), trace.host_breakdown()
        self.operations_ratio = operations_of(long) / operations_of(step)

    def host(self, program: Program, step_ms: float) -> Host | None:
        """What a launch of the long step, which is `program`, takes where this one takes `step_ms`.
        None where the GPU decides even this one."""
        host = step_model.host_of(self.program, self.phases, step_ms)
        return host and host.times(self.operations_ratio * self.program.launches / program.launches)


def operations_of(step: OnOneBatch) -> int:
    """Operations that compute in one such step, see `host_delay`."""
    with SlowerHost() as host:
        step.step()
    return host.delayed


def study(
    texts: Mapping[str, Workload], family: str, way: str, steps: int, delays: Sequence[float] = ()
) -> list[PredictedStep]:
    """Build one trainer, and predict and measure its step on typical "long" texts of `texts`. The
    "short" ones tell what a launch takes the host.

    With `delays` (microseconds) the step is measured beside slower hosts as well, and after them
    once more as it was: what that differs by is noise. A captured step has one size, so that no
    other tells about the host. Raises `Unavailable` for a captured step without a GPU.
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
        plain = predict_and_measure(tags_of(family, way), step, short, steps)
        found = [plain]
        for delay in delays:
            tags = plain.run.tags | {"delay_us": float(delay)}
            with SlowerHost(delay):
                found.append(predict_and_measure(tags, step, short, SLOWED_STEPS, plain))
        if delays:
            tags = plain.run.tags | {"again": True}
            found.append(predict_and_measure(tags, step, short, steps, plain))
        return found


def typical_stretch(trace: Trace) -> dict[str, list[tuple[float, float, str]]]:
    start, end = trace.step_windows[0]
    places, busy = trace.busy_over_time(math.ceil((end - start) / SHOWN_MS))
    waits = Counter(int((wait.start - start) / (end - start) * len(places)) for wait in trace.waits)
    counts = busy, [waits[part] for part in range(len(places))]

    def off(part: int) -> float:
        return sum(abs(of[part] * len(of) / max(sum(of), 1) - 1) for of in counts)

    if places:
        start += places[min(range(len(places)), key=off)]
    return trace.timeline((start, start + SHOWN_MS))


def in_turns(step: OnOneBatch, short: HostStep | None, steps: int) -> dict[str, list[float]]:
    """Milliseconds of so many steps, and of as many on short texts, each right before one of them:
    the host changes its speed from one second to the next."""
    turns = {"short_ms": short.step, "step_ms": step} if short else {"step_ms": step}
    rounds = [{name: each.timed(1)[0] for name, each in turns.items()} for _ in range(steps + 1)]
    return {name: [times[name] for times in rounds[1:]] for name in turns}  # the first warms up


def predict_and_measure(
    tags: dict[str, Any],
    step: OnOneBatch,
    short: HostStep | None,
    steps: int,
    traced: PredictedStep | None = None,
) -> PredictedStep:
    """Trace a step, time it, and predict it from all but its time.

    short: tells what a launch takes the host, `host_us`; `error_bar_percent` is half of what the
    95 % interval of its time makes of difference to the prediction. Without it a launch takes what
    the shortest call takes, which is too little. `reached`: the share of the data sheet's roofline
    that the step's FLOPs reach while kernels run. traced: the same step, traced before.
    """
    workload, recipe = step.trainer.workload, step.trainer.recipe
    run = empty_run(workload, recipe, " ".join(map(str, tags.values())))
    if traced is None:
        steps, watts = step.warm_up(steps)
        run.metrics = {"power_w": watts} if watts else {}
        trace = step.traced()
        program, lanes = Program.of(trace), typical_stretch(trace)
        work = workload.work_of(recipe, step.batch)
        del trace
        gc.collect()  # a trace is a hundred thousand objects
    else:
        program, work, lanes = traced.program, traced.work, traced.lanes
    run.tags, run.samples = tags, in_turns(step, short, steps)
    run.metrics |= {name: summarise(times) for name, times in run.samples.items()}
    host, moved = None, 0.0
    if short:
        short_ms, low_ms, high_ms = interval(run, "short_ms")
        host = short.host(program, short_ms)
        run.metrics |= {
            "short_kernels_ms": short.program.kernel_ms,
            "operations_ratio": short.operations_ratio,
            "launches_ratio": program.launches / short.program.launches,
        }
    if host:
        run.metrics["host_us"] = 1e3 * host.mean_ms(program)
        moved = (high_ms - low_ms) / short_ms / 2
    host = host or Host(probe_machine("launch_us").median("launch_us") / 1e3)
    predicted_ms = replayed_ms(program, host)
    low_ms, high_ms = (replayed_ms(program, host.times(1 + by)) for by in (-moved, moved))
    run.metrics |= {
        "floor_ms": measured_roofline(recipe.precision).floor_ms(work.flops, work.bytes),
        "predicted_ms": predicted_ms,
        "off_by_percent": 100 * (predicted_ms / run.metric("step_ms") - 1),
        "error_bar_percent": 50 * (high_ms - low_ms) / predicted_ms,
        "by": step_model.decided_by(program, host),
        "launches": program.launches,
        "waits": program.waits,
        "kernels_ms": program.kernel_ms,
    }
    if not program.takes_turns:
        busy = min(1.0, program.kernel_ms / run.metric("step_ms"))
        run.metrics |= {"gpu_busy_share": busy, "idle_share": 1 - busy}
    if (card := spec_of(machine_facts())) and recipe.precision in card.dense:
        rate = step_model.attainable(card, recipe.precision, work.flops / work.bytes)
        run.metrics["reached"] = work.flops / program.kernel_ms / 1e9 / rate
    return PredictedStep(run, program, host, work, lanes)
