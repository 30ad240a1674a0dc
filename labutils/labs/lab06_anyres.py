"""What lab 06 tries beyond recipes: a model altered after it was built, the same batches again, the
same training on several seeds, and what the compiler makes of images whose token counts vary.

    run = cell(workload, "fixed-fp8-te", batch=4)                    one cell of article A2's table
    runs = losses_over_seeds(workload, {"bf16": a, "fp8": b}, seeds=4, steps=16)
    counted = recompilations(workload, recipe, batches=10)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from labutils.course.goals import Goal
from labutils.data.images import EpochOrder
from labutils.labs.lab06_advisor import Option, break_even
from labutils.labs.ladders import A2_BASE, A2_LADDER, Ladder, Rung, climb, in_lanes
from labutils.layers.cuda_graph import compile_blocks, variants_allowed
from labutils.layers.lora import redraw_lora
from labutils.layers.quantization.convert import (
    convert_base,
    forget_scales,
    forward_context,
    frozen_linears,
)
from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, status_of, summarise
from labutils.training import Benchmark, Trainer, train
from labutils.training.batches import Batch, on_device
from labutils.training.benchmark import Candidate, empty_run
from labutils.training.model_edits import prepared_for_kbit, with_costs
from labutils.workloads import Workload, open_workload
from labutils.workloads.llava import SIZES, tower_flops

BESIDE_WHOLE = "bf16 b1, again"
"""The baseline of models compiled whole. That takes minutes, so "bf16" is timed once more beside
them.
"""
LOW_BITS = {"fp8-te": "fp8-te", "fp8-frozen": "fp8-frozen", "qlora": "nf4", "nf4": "nf4"}
"""What a method's name ends with -> how it holds the base weights."""
HELD_OUT = 4
"""One example in so many is kept from training, for losses to be measured on."""
WARM_UP = 4
"""Steps over which a training's learning rate rises to what its recipe says."""


# --------------------------------------------------------------------------- article A2's table


def method(name: str, batch: int = 1) -> Recipe:
    """The recipe of a cell of the article's table: a method as its claims name it ("fixed-fp8-te")
    at a batch size.

    "compile" compiles, "fixed" forces images to one square and compiles: the blocks one by one, or
    with "-whole" after it the model as one, as the article does, which gives almost the same code
    after many times as long. What the name ends with says how the base weights are held. Blocks are
    computed again in the backward pass: without that the article's 16 GB at batch 1 would not hold,
    nor its batch 24 fit its card.
    """
    base = next((kind for ending, kind in LOW_BITS.items() if name.endswith(ending)), "published")
    recipe = A2_BASE.but(micro_batch=batch, checkpointing="blocks", base_linear=base)
    if name.startswith("fixed"):
        recipe = recipe.but(shapes="fixed")
    if name.startswith(("fixed", "compile")):
        recipe = recipe.but(
            compile="default", compile_scope="model" if "-whole" in name else "blocks"
        )
    return recipe


def cell(workload: Workload, name: str, batch: int, steps: int = 3) -> Run:
    """The run of one cell: first step, `steps` timed ones, memory, what the weights take, what the
    compiler did.

    With `steps=0` the first step is all, and all that is known of the time: enough for the memory
    of a large batch.

    "qlora" goes through `prepared_for_kbit` as well; "nf4" is the same without. A failure is the
    run's status.
    """
    recipe, held = method(name, batch), {}
    load_libraries(workload.device.type)
    torch._dynamo.reset()  # first: compiled code keeps the models that it was made for
    if recipe.base_linear != "published":
        workload.release_weights()
    with contextlib.suppress(Unavailable):
        forget_scales()

    def change(model: nn.Module) -> None:
        if name.endswith("qlora"):
            prepared_for_kbit(model)
        held.update(weights_held(model))

    with _cold_cache(recipe), Compilation() as compiled:
        label = f"{name} b{batch}"
        run = (
            train(workload, recipe, steps, warmup=0, name=label, on_model=change)
            if steps
            else _first_step_of(workload, recipe, label, change)
        )
    if run.ok:
        run.metrics |= held | (compiled.metrics() if run.recipe["compile"] != "off" else {})
    if run.ok and name == "bf16":
        run.metrics["vision_share"] = vision_share(workload, recipe)
    return with_costs(run)


def _first_step_of(
    workload: Workload, recipe: Recipe, name: str, on_model: Callable[[nn.Module], None]
) -> Run:
    """The run of a first step alone: what it took, and its memory."""
    run = empty_run(workload, recipe, name)
    try:
        run.metrics = _first_step(workload, recipe, on_model)
    except Exception as error:
        run.status = status_of(error)
    gc.collect()  # outside the except block, which holds the frames, and these the tensors
    cuda.empty_cache()
    return run


def _first_step(
    workload: Workload, recipe: Recipe, on_model: Callable[[nn.Module], None]
) -> dict[str, float]:
    opened = Candidate(workload, recipe, warmup=0, on_model=on_model)
    with contextlib.closing(opened) as candidate:
        return {
            "first_step_s": candidate.first_step_s,
            "build_s": candidate.trainer.build_s,
            **candidate.memory,
        }


def _cold_cache(recipe: Recipe) -> contextlib.AbstractContextManager:
    """What another cell compiled must not shorten this one's first step."""
    if recipe.compile == "off":
        return contextlib.nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


@functools.cache
def load_libraries(device: str) -> None:
    """Train a tiny model for a few steps, once a process, on a GPU compiled as well: what kernels,
    libraries and the compiler take to load would else be in the first step of whatever comes first,
    which may be anything after an interrupted start."""
    workload = open_workload("llava-lora", "tiny", device=device)
    train(workload, A2_BASE, steps=1, warmup=0)
    if device == "cuda":
        train(workload, A2_BASE.but(compile="default", compile_scope="blocks"), steps=1, warmup=0)
        cuda.empty_cache()


HEAD = (
    "method",
    "first step, s",
    "step, ms",
    "of it data",
    "against bf16",
    "memory, GB",
    "useful tokens/s",
    "has paid after",
)
"""The head of a table of `cell_rows`."""


def cell_rows(cells: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `HEAD`: changes and break-even counts are against "bf16" at the same batch size, or
    beside it (`BESIDE_WHOLE`). Failures are left out: `not_measured` names them."""
    rows: list[tuple[Any, ...]] = []
    for name, run in cells.items():
        label, _, batch = name.rpartition(" b")
        base = cells.get(_baseline(name))
        if run.ok:
            rows.append(
                (f"{label}, batch {batch}", *_numbers(run, base if base and base.ok else None))
            )
    return rows


def not_measured(cells: Mapping[str, Run]) -> str:
    """The cells that failed, each reason once, as a paragraph; "" where there is none."""
    failed: dict[str, list[str]] = {}
    for name, run in cells.items():
        if not run.ok:
            failed.setdefault(run.status, []).append(name)
    return "".join(
        f"*Not measured: {', '.join(names)}* ({status}).\n\n" for status, names in failed.items()
    )


def compiler_rows(cells: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """(cell, seconds of compiling, graphs, graph breaks, recompilations, functions given up) of
    each compiled cell.
    """
    counted = ("compile_s", "graphs", "graph_breaks", "recompilations", "given_up")
    compiled = {name: run for name, run in cells.items() if "graphs" in run.metrics}
    return [(name, *(run.metrics[metric] for metric in counted)) for name, run in compiled.items()]


def longer_by(cells: Mapping[str, Run], name: str) -> float | None:
    """How many percent longer a cell's step is than "bf16"'s at its batch size; None where either
    is missing.
    """
    pair = _with_base(cells, name)
    return 100 * (pair[1].metric("step_ms") / pair[0].metric("step_ms") - 1) if pair else None


def paid_after(cells: Mapping[str, Run], name: str) -> float | None:
    """Steps after which a cell has caught up with "bf16" at its batch size; None where it never
    does or is missing.
    """
    pair = _with_base(cells, name)
    return _break_even(*pair) if pair else None


def _with_base(cells: Mapping[str, Run], name: str) -> tuple[Run, Run] | None:
    """A cell's baseline, and the cell; None unless both were timed."""
    pair = cells.get(_baseline(name)), cells.get(name)
    return pair if all(run and run.ok and run.metric("step_ms") for run in pair) else None


def _baseline(name: str) -> str:
    """What a cell is compared with: "bf16" at its batch size, or for a model compiled whole the one
    beside it.
    """
    return BESIDE_WHOLE if "-whole" in name else f"bf16 b{name.rpartition(' b')[2]}"


def by_batch(
    cells: Mapping[str, Run], metric: str, methods: Iterable[str]
) -> dict[str, dict[float, float]]:
    """Method -> batch size -> the metric, where it was measured; a second time ("bf16 b1, again")
    isn't counted.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in methods}
    for name, run in cells.items():
        label, _, batch = name.rpartition(" b")
        if label in found and batch.isdecimal() and run.metric(metric):
            found[label][int(batch)] = run.metric(metric)
    return found


def _numbers(run: Run, base: Run | None) -> tuple[Any, ...]:
    change = paid = None
    timed = base is not None and run.metric("step_ms") and base.metric("step_ms")
    if timed and base is not run:
        change = f"{100 * (run.metric('step_ms') / base.metric('step_ms') - 1):+.0f} %"
        steps = _break_even(base, run)
        paid = "never" if steps is None else "at once" if steps < 1 else f"{steps:,.0f} steps"
        paid = "unsure" if _overlap(base, run) else paid
    times = [run.metric(metric) for metric in ("first_step_s", "step_ms", "data_ms")]
    return *times, change, run.metric("peak_allocated_gb"), run.metric("useful_tokens_per_s"), paid


def _overlap(base: Run, run: Run) -> bool:
    """Whether the ranges of two runs' steps overlap, so that nobody knows which is the shorter."""
    ends = [found.metrics["step_ms"] for found in (base, run)]
    if not all(isinstance(end, Mapping) and "p10" in end for end in ends):
        return False
    (low, high), (its_low, its_high) = ((end["p10"], end["p90"]) for end in ends)
    return low <= its_high and its_low <= high


def _break_even(base: Run, run: Run) -> float | None:
    return break_even(
        *(Option("", r.metric("first_step_s"), r.metric("step_ms") / 1e3, 0) for r in (base, run))
    )


# ---------------------------------------------------------------------------------- other models


def fp8_but(*kept: str) -> Callable[[nn.Module], None]:
    """A change that puts FP8 layers under the adapters, except where a part of the layer's name is
    in `kept`.
    """

    def change(model: nn.Module) -> None:
        convert_base(model, frozen_linears(model, ("lm_head", "vision_tower", *kept)), "fp8-frozen")

    return change


def refusal_of_te(rows: torch.Tensor) -> str:
    """What Transformer Engine's FP8 layer says to `rows` (..., features) in training; "" where it
    takes them.

    Raises `Unavailable` where it can't be used at all.
    """
    width = rows.shape[-1]
    layer = nn.Sequential(
        nn.Linear(width, width, device=rows.device, dtype=rows.dtype).requires_grad_(False)
    )
    convert_base(layer, ["0"], "fp8-te")
    try:
        with forward_context("fp8-te"):
            layer(rows.requires_grad_()).sum().backward()
    except (
        AssertionError,
        ValueError,
        RuntimeError,
    ) as error:  # which of them differs between its versions
        return f"{type(error).__name__}: {error}"
    return ""


def weights_held(model: nn.Module) -> dict[str, float]:
    """Frozen weights of the language model and the projector: `weights_gb` as they are held, and
    `bf16_weights_held`, 1 if most of the blocks' matrices are still held in two bytes or more a
    number."""
    parts = [
        model.network.model.language_model,
        model.network.model.multi_modal_projector,
        model.network.lm_head,
    ]
    frozen = {
        id(t): t
        for part in parts
        for t in [*part.parameters(), *part.buffers()]
        if not t.requires_grad
    }
    held = sum(tensor.nbytes for tensor in frozen.values())
    matrices = [
        p
        for p in model.network.model.language_model.layers.parameters()
        if not p.requires_grad and p.dim() > 1
    ]
    wide = sum(p.nbytes for p in matrices if p.itemsize > 1)
    return {
        "weights_gb": held / 1e9,
        "bf16_weights_held": int(wide > 0.5 * sum(p.nbytes for p in matrices)),
    }


def vision_share(workload: Workload, recipe: Recipe) -> float:
    """The vision tower's part of an optimizer step's FLOPs."""
    tiles = workload.size.geometry.tiles((500, 500)) * recipe.examples_per_step
    return tower_flops(workload.size) * tiles / workload.work(recipe).flops


# ----------------------------------------------------------------------------------- other batches


def token_counts() -> dict[str, float]:
    """What AnyRes, as published, makes of image sizes: tiles of small images, and tokens by shape
    at one area; and `vision_share` of the article's step. Arithmetic on the article's own model,
    whatever the scale."""
    geometry = SIZES["full"].geometry
    own = open_workload("llava-lora", scale="full", device="cpu")
    square, wide = geometry.tokens((500, 500)), geometry.tokens((354, 707))
    return {
        "tiles_low_resolution": geometry.tiles((224, 224)),
        "tiles_336x336": geometry.tiles((336, 336)),
        "tiles_500x500": geometry.tiles((500, 500)),
        "tiles_354x707": geometry.tiles((354, 707)),
        "tokens_336x336": geometry.tokens((336, 336)),
        "tokens_500x500": square,
        "tokens_354x707": wide,
        "aspect_token_ratio": max(square, wide) / min(square, wide),
        "vision_share": vision_share(own, method("bf16")),
    }


def drawn(trainer: Trainer, count: int) -> list[Batch]:
    """The next `count` micro-batches."""
    return [next(trainer.batches) for _ in range(count)]


def tokens_of(batch: Batch) -> int:
    """Tokens that the model computes on, padding included."""
    return batch["input_ids"].numel()


def of_median_length(batches: Iterable[Batch]) -> Batch:
    """The batch with as many tokens as the median of them."""
    ordered = sorted(batches, key=tokens_of)
    return ordered[len(ordered) // 2]


def replays(workload: Workload, recipe: Recipe, count: int) -> dict[str, Run]:
    """Name -> run of what separates constant shapes from fewer tokens, on `count` examples of
    varied lengths.

    "same-tokens varying": one length after the other, compiled as by default; "same-tokens any
    length": the same with code for any length; "same-tokens static": the one of median length, as
    many times; "static fewer-tokens": the shortest one. A micro-batch is `recipe.micro_batch`
    copies of one example, so that nothing is padded.

    All four share one model. What is compiled are the decoder's blocks but the first, whose input
    has no gradient and would take code of its own; the images' features are at hand
    (`cache="features"`), so that no tower is compiled.
    """
    load_libraries(workload.device.type)
    torch._dynamo.reset()
    gc.collect()
    asked, runs = replay_recipes(recipe), {}
    with Trainer(workload, recipe.but(compile="off", cache="nothing")) as trainer:
        examples = _of_varied_lengths(trainer, count)
        passes = dict.fromkeys(asked, examples)
        passes["same-tokens static"] = [of_median_length(examples)] * count
        passes["static fewer-tokens"] = [min(examples, key=tokens_of)] * count
        for name, its in asked.items():
            fitted = its.fitted_to(workload.device.type)
            torch._dynamo.reset()
            if fitted.compile != "off":
                compile_blocks(
                    trainer.model.network.model.language_model.layers[1:],
                    fitted.compile,
                    fitted.dynamic,
                )
            with variants_allowed(fitted.compile, fitted.dynamic):
                runs[name] = replay(trainer, passes[name])
            runs[name].recipe = fitted.as_dict()
    return runs


@torch.no_grad()
def _of_varied_lengths(trainer: Trainer, count: int) -> list[Batch]:
    """A micro-batch of each of the trainer's first `count` examples: copies of it, with the
    features of its tiles.
    """
    workload, recipe = trainer.workload, trainer.recipe
    dataset, collate, batches = (
        workload.dataset(trainer.model, recipe),
        workload.collate(recipe),
        [],
    )
    for place in itertools.islice(trainer.sampler, count):
        example = dict(dataset[place])
        example["features"] = trainer.model.vision(
            example.pop("pixel_values").to(workload.device)
        ).cpu()
        batches.append(collate([example] * recipe.micro_batch))
    return batches


def replay_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Name -> recipe of the runs of `replays`."""
    any_length, static = recipe.but(dynamic="any"), recipe.but(dynamic="static")
    return {
        "same-tokens varying": recipe,
        "same-tokens any length": any_length,
        "same-tokens static": static,
        "static fewer-tokens": static,
    }


REPLAY_HEAD = ("run", "tokens a step", "ms a step", "ms for 1000 tokens", "memory, GB")
"""The head of a table of `replay_rows`."""


def replay_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `REPLAY_HEAD` out of the runs of `replays`; failed runs are left out."""
    rows = []
    for name, run in runs.items():
        tokens, cost = run.metric("tokens"), run.metric("ms_per_1k_tokens")
        if tokens and cost:
            rows.append(
                (name, round(tokens), cost * tokens / 1e3, cost, run.metric("peak_allocated_gb"))
            )
    return rows


FORM_HEAD = ("form", "tokens/s", "useful tokens/s", "padding, %")
"""The head of a table of `form_rows`."""


def form_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `FORM_HEAD` out of runs named "form: ..."; a failed one's numbers are None."""
    rows = []
    for name, run in runs.items():
        useful = run.metric("useful_tokens")
        padding = None if useful is None else f"{100 * (1 - useful):.0f}"
        rates = run.metric("tokens_per_s"), run.metric("useful_tokens_per_s")
        rows.append((name.removeprefix("form: "), *rates, padding))
    return rows


def replay(trainer: Trainer, batches: Sequence[Batch], passes: int = 3) -> Run:
    """Train on these same batches over and over: each twice to warm up, then `passes` timed passes
    over all.

    Metrics: `ms_per_1k_tokens` over the passes, `tokens`, the mean of a step, `peak_allocated_gb`
    on a GPU (frozen weights included, other trainers' tensors not), and what was compiled in the
    timed passes.
    """
    steps = -(-len(batches) // trainer.recipe.accumulation)
    tokens = sum(map(tokens_of, batches)) / len(batches) * trainer.recipe.accumulation

    def one_pass(over: Sequence[Batch], steps: int) -> float:
        feed = itertools.cycle(over)
        cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step(feed)
        cuda.synchronize()
        return 1e6 * (time.perf_counter() - began) / (steps * tokens)

    distinct = list({id(batch): batch for batch in batches}.values())
    one_pass(distinct, 2 * len(distinct))  # the second length has the compiler write code for any
    cuda.reset_peak_memory()
    with Compilation() as late:
        samples = [one_pass(batches, steps) for _ in range(passes)]
    run = Run(
        "",
        "",
        workload=trainer.workload.name,
        scale=trainer.workload.scale,
        recipe=trainer.recipe.as_dict(),
    )
    run.samples["ms_per_1k_tokens"] = samples
    run.metrics = {"ms_per_1k_tokens": summarise(samples), "tokens": tokens}
    run.metrics |= {"recompilations": late.recompilations, "given_up": len(late.given_up)}
    if peak := cuda.peak_memory():
        run.metrics["peak_allocated_gb"] = peak[0]
    return run


# ------------------------------------------------------------------------------------- the compiler


@dataclass
class Recompiled:
    """What the compiler did step by step: recompilations in each step, graphs in all, and the
    guards that failed.

    `given_up` names functions that needed too many versions and are left uncompiled, `image_tokens`
    are the different counts of image tokens that an example had.
    """

    by_step: list[int] = field(default_factory=list)
    graphs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    given_up: list[str] = field(default_factory=list)
    image_tokens: set[int] = field(default_factory=set)

    def metrics(self) -> dict[str, float]:
        return {
            "recompilations": sum(self.by_step),
            "recompilations_after_2_steps": sum(self.by_step[2:]),
            "graphs": self.graphs,
            "given_up": len(self.given_up),
            "further_image_token_counts": len(self.image_tokens) - 1,
        }


def recompilations(
    workload: Workload, recipe: Recipe, batches: int, dynamic: bool | None = None
) -> Recompiled:
    """Train for `batches` steps on new micro-batches and count what has to be compiled anew.

    Only Dynamo is at work, which traces, guards and decides; its graphs then run as they are
    (backend "eager"), so that counting takes seconds. dynamic is torch.compile's: None is its
    default. `recipe.compile_scope` is observed.
    """
    torch._dynamo.reset()
    found = Recompiled()
    with _dynamo_quiet(), Trainer(workload, recipe.but(compile="off")) as trainer:
        for module in _compiled_parts(workload, trainer.model, recipe):
            module.compile(backend="eager", dynamic=dynamic)
        for batch in drawn(trainer, batches):
            ids = batch["input_ids"][0]
            found.image_tokens.add(int((ids == ids.mode().values).sum()))
            with Compilation() as compiled:
                trainer.step(iter([batch]))
            found.by_step.append(compiled.recompilations)
            found.graphs += compiled.graphs
            found.reasons += compiled.reasons
            found.given_up += compiled.given_up
    torch._dynamo.reset()
    return found


KINDS_OF_GUARDS = {
    "a tensor of another size": r"size mismatch|size\(\)|stride\(\)|^___stack0\[",
    "with a gradient or without": r"requires_grad",
    "the same code, called in another way": r"args|key ==",
    "something else": r"",
}
"""What a failed guard was about -> how its text shows it; the first that fits counts."""


def reason_rows(counted: Mapping[str, Recompiled]) -> list[tuple[Any, ...]]:
    """Rows (what guards were about, an example, then for each of `counted` how many failed),
    without empty kinds.
    """
    sorted_out = {name: {kind: Counter() for kind in KINDS_OF_GUARDS} for name in counted}
    for name, found in counted.items():
        for reason, times in found.reasons.items():
            kind = next(
                kind for kind, pattern in KINDS_OF_GUARDS.items() if re.search(pattern, reason)
            )
            sorted_out[name][kind][reason] += times
    rows = []
    for kind in KINDS_OF_GUARDS:
        every = sum((kinds[kind] for kinds in sorted_out.values()), Counter())
        if every:
            example = every.most_common(1)[0][0]
            rows.append(
                (kind, f"`{example}`", *(kinds[kind].total() for kinds in sorted_out.values()))
            )
    return rows


@contextlib.contextmanager
def _dynamo_quiet() -> Iterator[None]:
    """Keep Dynamo's warnings, of what is being counted anyway, off the page; those who listen still
    hear them.
    """
    handlers = [
        handler
        for name in ("torch", "torch._dynamo")
        for handler in logging.getLogger(name).handlers
    ]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def steady(workload: Workload, recipe: Recipe, warmup: int, steps: int) -> dict[str, float]:
    """Graphs that a recipe compiles in `warmup` steps and the `steps` after them, its graph breaks,
    and what it still compiles in the latter alone, as metrics."""
    torch._dynamo.reset()
    with Trainer(workload, recipe) as trainer:
        with Compilation() as early:
            trainer.run(warmup)
        with Compilation() as late:
            trainer.run(warmup + steps)
    return {
        "graphs": early.graphs + late.graphs,
        "graph_breaks": early.breaks.total() + late.breaks.total(),
        "compilations_after_warmup": late.compilations,
    }


# ------------------------------------------------------------------------------------- the ladder


LOW_BIT_RUNG = Rung(
    "FP8 weights",
    "same mathematics",
    {"base_linear": "fp8-frozen"},
    "held once, products on FP8 tensor cores",
)


def ladder_for(device: str) -> tuple[Ladder, dict[str, Recipe]]:
    """Article A2's ladder and its recipes as a `device` climbs it.

    On a GPU frozen FP8 weights come on top. On a CPU nothing is compiled, which takes a minute on
    two cores, and there are no workers, which would only get in the way.
    """
    if device == "cuda":
        ladder = A2_LADDER.plus(LOW_BIT_RUNG)
        return ladder, climb(ladder)
    plain = {
        "num_workers": 0,
        "persistent_workers": False,
        "compile": "off",
        "compile_scope": "model",
    }
    return A2_LADDER, {
        name: recipe.but(**plain, dynamic="automatic") for name, recipe in climb(A2_LADDER).items()
    }


def climbed(
    workload: Workload, ladder: Iterable[Rung], recipes: Mapping[str, Recipe], steps: int
) -> dict[str, Run]:
    """Name -> run of the ladder's recipes, in one process, each in its rung's lane, with its cost a
    token.
    """
    load_libraries(workload.device.type)
    with Benchmark(workload, warmup=2) as bench:
        runs = bench.compare(recipes, steps, rounds=1)
    return in_lanes({name: with_costs(run) for name, run in runs.items()}, ladder)


CLIMBED_HEAD = ("rung", "lane", "ms for 1000 useful tokens", "useful tokens/s")
"""The head of a table of `climbed_rows`."""


def climbed_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `CLIMBED_HEAD`, of the rungs that could be measured."""
    metrics = ("ms_per_1k_useful_tokens", "useful_tokens_per_s")
    return [(name, run.lane, *map(run.metric, metrics)) for name, run in runs.items() if run.ok]


def rung_rows(ladder: Iterable[Rung], climbable: Mapping[str, Recipe]) -> list[tuple[Any, ...]]:
    """Rows (rung, lane, what it changes, why, what is to be said about it here) of a ladder."""
    return [
        (
            rung.name,
            rung.lane,
            ", ".join(f"`{knob}={value!r}`" for knob, value in rung.changes.items()) or None,
            rung.why,
            None if rung.name in climbable else "no different on a CPU",
        )
        for rung in ladder
    ]


GOALS = {
    "useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2),
    "graphs": Goal("graphs compiled", most=10),
    "graph_breaks": Goal("graph breaks", most=0),
    "compilations_after_warmup": Goal("compilations after warm-up", most=0),
    "mfu_fp8": Goal(
        "share of the measured BF16 matrix rate with FP8 weights, padding not counted", least=0.55
    ),
    "mfu_bf16": Goal("the same without FP8", least=0.45),
    "weights_share": Goal(
        "FP8 weights of language model and projector, share of BF16's", most=0.55
    ),
    "memory_share": Goal("memory at batch 1 with FP8 weights, share of BF16 LoRA's", most=0.75),
}
"""Metric of `reached` -> what it is, and what it is meant to be."""


def best_rung(climbed: Mapping[str, Run]) -> str:
    """The rung with the shortest time for a thousand useful tokens (`with_costs`), of those that
    ran.

    Raises `ValueError` where none did.
    """
    costs = {name: run.metric("ms_per_1k_useful_tokens") for name, run in climbed.items() if run.ok}
    if not costs:
        raise ValueError(
            "No rung of the ladder ran, so there is no best one. Each run's status says why."
        )
    return min(costs, key=lambda name: costs[name])


def reached(
    varied: Workload, top: Recipe, climbed: Mapping[str, Run], cells: Mapping[str, Run], rate: float
) -> dict[str, float]:
    """What the ladder gets to, as metrics named in `GOALS`; what was not measured is absent.

    top: the best rung's recipe, which is compiled once more on `varied`. climbed: the ladder's runs
    with their costs. cells: section 2's, where the same images give FP8 and BF16 weights the same
    tokens. rate: the measured matrix rate in TFLOP/s that shares are taken of; what is computed for
    padding is of no use.
    """
    found = steady(varied, top, warmup=6, steps=10)
    naive, best = climbed["bf16"], climbed[best_rung(climbed)]
    if naive.ok:
        cost = "ms_per_1k_useful_tokens"
        found["useful_speedup"] = naive.metric(cost) / best.metric(cost)
    for metric, base_linear in {"mfu_fp8": "fp8-frozen", "mfu_bf16": "published"}.items():
        useful = [
            run.metrics["tflops"] * run.metrics["useful_tokens"]
            for run in climbed.values()
            if run.ok and run.recipe["base_linear"] == base_linear
        ]
        if useful:
            found[metric] = max(useful) / rate
    for metric, part in {
        "weights_share": "weights_gb",
        "memory_share": "peak_allocated_gb",
    }.items():
        held = [
            cells[name].metric(part)
            for name in ("fp8-frozen b1", "bf16 b1")
            if name in cells and cells[name].ok
        ]
        if len(held) == 2 and all(held):
            found[metric] = held[0] / held[1]
    return found


def _compiled_parts(workload: Workload, model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    return (
        workload.blocks(model) if recipe.compile_scope == "blocks" else [workload.trained(model)[1]]
    )


# --------------------------------------------------------------------------------------- more seeds


def losses_over_seeds(
    workload: Workload,
    recipes: Mapping[str, Recipe],
    seeds: int,
    steps: int,
    changes: Mapping[str, Callable[[nn.Module], None]] | None = None,
) -> dict[str, Run]:
    """Train each recipe on `seeds` seeds for `steps` steps; measure what that does to the loss of
    held-out examples.

    All start from the same frozen weights, those of the recipe's own seed. A seed draws the
    adapters and the order of the training examples, the same for all recipes. The loss before and
    after training is the mean over the same held-out examples, one in `HELD_OUT`, which no training
    sees: a training step's own loss says more about which two photographs were in it. `changes`
    alters the models of the recipes that it names.

    Runs are named after the recipes: "loss bf16". Metrics: `start_loss` and `final_loss` of the
    held-out examples over seeds, and `loss`, the training losses of the last seed. Samples are by
    seed. What fails becomes the run's status.
    """
    photographs, runs = _Photographs(workload), {}
    for name, recipe in recipes.items():
        hooks = {"on_model": changes[name]} if name in (changes or {}) else {}
        runs[f"loss {name}"] = _over_seeds(workload, recipe, name, seeds, steps, photographs, hooks)
        gc.collect()  # a trainer's modules refer to each other
        cuda.empty_cache()
    return runs


def _over_seeds(
    workload: Workload,
    recipe: Recipe,
    name: str,
    seeds: int,
    steps: int,
    photographs: _Photographs,
    hooks: Mapping[str, Any],
) -> Run:
    """The run of one recipe of `losses_over_seeds`."""
    run = empty_run(workload, recipe, name)
    try:
        trained = [
            _trained_once(workload, recipe, seed, steps, photographs, hooks)
            for seed in range(seeds)
        ]
    except Exception as error:
        run.status = status_of(error)
        return run
    start, final, curves = zip(*trained, strict=True)
    run.samples = {"start_loss": list(start), "final_loss": list(final)}
    run.metrics = {metric: summarise(losses) for metric, losses in run.samples.items()} | {
        "loss": curves[-1]
    }
    return run


def _trained_once(
    workload: Workload,
    recipe: Recipe,
    seed: int,
    steps: int,
    photographs: _Photographs,
    hooks: Mapping[str, Any],
) -> tuple[float, float, list[float]]:
    """Held-out loss before and after `steps` steps with one seed's adapters and examples; the
    steps' own losses.

    The learning rate rises over the first `WARM_UP` steps: Adam's first updates have their full
    size whatever the gradients', and the larger the model, the more such steps in all matrices at
    once change what it computes.
    """
    if recipe.base_linear == "fp8-te":
        forget_scales()
    with Trainer(workload, recipe, **hooks) as trainer:
        redraw_lora(trainer.model, seed)
        learn, held_out = photographs.split(trainer.recipe)
        collate = workload.collate(trainer.recipe)
        order = EpochOrder(len(learn), steps * recipe.examples_per_step, seed)
        chosen = BatchSampler(order, recipe.micro_batch, drop_last=True)
        feed = (collate([learn[at] for at in places]) for places in chosen)
        asked = [collate(held_out[at : at + 2]) for at in range(0, len(held_out), 2)]
        before = _mean_loss(trainer, asked)
        for step in range(steps):
            for group in trainer.optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / WARM_UP)
            trainer.step(feed)
        trainer.driver.log.flush()
        return before, _mean_loss(trainer, asked), trainer.losses[:steps]


@torch.no_grad()
def _mean_loss(trainer: Trainer, batches: Sequence[Batch]) -> float:
    """The mean of the batches' losses."""
    workload, model = trainer.workload, trainer.model
    losses = [
        workload.loss(model, on_device(batch, workload.device, False), {}) for batch in batches
    ]
    return float(torch.stack(losses).mean())


class _Photographs:
    """A workload's examples, decoded once for each form of its images, and not once for each
    training.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.read: dict[bool, list[dict[str, Any]]] = {}

    def split(self, recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Examples to learn from, and those that are held out."""
        fixed = recipe.shapes == "fixed"
        if fixed not in self.read:
            self.read[fixed] = self._decoded(recipe)
        every = self.read[fixed]
        held_out = every[::HELD_OUT]
        return [example for at, example in enumerate(every) if at % HELD_OUT], held_out

    def _decoded(self, recipe: Recipe) -> list[dict[str, Any]]:
        workers = min(8, usable_cores() - 1) if self.workload.device.type == "cuda" else 0
        examples = self.workload.dataset(None, recipe)
        return [
            example
            for (example,) in DataLoader(
                examples, batch_size=1, num_workers=workers, collate_fn=list
            )
        ]


def against_same_seed(runs: Mapping[str, Run], baseline: str = "bf16") -> dict[str, list[float]]:
    """Method -> its final loss against the baseline's of the same seed, in %, seed by seed; failed
    runs left out.
    """
    base = runs[baseline].samples["final_loss"]
    return {
        name: [
            100 * (mine / other - 1)
            for mine, other in zip(run.samples["final_loss"], base, strict=True)
        ]
        for name, run in runs.items()
        if run.ok
    }


LOSS_HEAD = ("method", "final loss, median of seeds", "against bf16, seed by seed, %")
"""The head of a table of `loss_rows`."""


def loss_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `LOSS_HEAD` out of runs named "loss ..."; [] where BF16's is not among them."""
    found = {name.removeprefix("loss "): run for name, run in runs.items() if run.ok}
    changes = against_same_seed(found) if "bf16" in found else {}
    return [
        (name, found[name].metric("final_loss"), ", ".join(f"{change:+.2f}" for change in by_seed))
        for name, by_seed in changes.items()
    ]


def seed_band(run: Run) -> tuple[float, float]:
    """How far the final losses of a run's seeds lie below and above their median, in %."""
    losses, middle = run.samples["final_loss"], run.metric("final_loss")
    return 100 * (min(losses) / middle - 1), 100 * (max(losses) / middle - 1)
