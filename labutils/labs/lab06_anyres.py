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
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from labutils.course.goals import Goal
from labutils.data.loader import EpochOrder
from labutils.labs.lab06_advisor import BASELINE, METHODS, break_even
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
from labutils.results.records import Run, status_of, summarise, to_frame
from labutils.training import Benchmark, Trainer, train
from labutils.training.batches import Batch, on_device
from labutils.training.benchmark import Candidate, empty_run
from labutils.training.model_edits import prepared_for_kbit, with_costs
from labutils.workloads import Workload, open_workload
from labutils.workloads.llava import SIZES, tower_flops

HELD_OUT = 4
"""One example in so many is kept from training, for losses to be measured on."""
WARM_UP = 4
"""Steps over which a training's learning rate rises to what its recipe says."""


# The cells of article A2's table

COMPILED = {"compile": "default", "compile_scope": "blocks"}
WHOLE = COMPILED | {"compile_scope": "model"}
FORMS = {
    "": {},
    "compile": COMPILED,
    "compile-whole": WHOLE,
    "fixed": COMPILED | {"shapes": "fixed"},
    "fixed-whole": WHOLE | {"shapes": "fixed"},
}
"""Form -> its changes of the recipe. The article compiles the model as one. Its blocks compiled one
by one have almost the same code after a fraction of the time."""
BASE_LINEAR = {"": "published", "qlora": "nf4"}
"""How a method holds the frozen weights -> the recipe's `base_linear`, where the two differ."""


def method(name: str, batch: int = 1) -> Recipe:
    """The recipe of a cell of the article's table: one of `METHODS` at a batch size.

    Blocks are computed again in the backward pass. Without that the article's 16 GB at batch 1
    would not hold, nor would its batch 24 fit its card.
    """
    form, weights = METHODS[name]
    base = BASE_LINEAR.get(weights, weights)
    recipe = A2_BASE.but(micro_batch=batch, checkpointing="blocks", base_linear=base)
    return recipe.but(**FORMS[form])


def cell(workload: Workload, name: str, batch: int, steps: int = 3, again: bool = False) -> Run:
    """The run of one cell: first step, `steps` timed ones, memory, what the weights take, what the
    compiler did.

    With `steps=0` the first step is all: enough for the memory of a large batch. "qlora" goes
    through `prepared_for_kbit` as well; "nf4" is the same without. A failure is the run's status.
    """
    recipe, held = method(name, batch), {}
    load_libraries(workload.device.type)
    torch._dynamo.reset()  # first: compiled code keeps the models that it was made for
    if recipe.base_linear != "published":
        workload.release_weights()
    with contextlib.suppress(Unavailable):
        forget_scales()

    def change(model: nn.Module) -> None:
        if METHODS[name][1] == "qlora":
            prepared_for_kbit(model)
        held.update(weights_held(model))

    label = f"{name} b{batch}{', again' if again else ''}"
    with _cold_cache(recipe), Compilation() as compiled:
        if steps:
            run = train(workload, recipe, steps, warmup=0, name=label, on_model=change)
        else:
            run = _first_step_of(workload, recipe, label, change)
    run.tags = {"experiment": "methods", "method": name, "batch": batch}
    run.tags |= {"again": True} if again else {}
    if run.ok:
        run.metrics |= held | (compiled.metrics() if run.recipe["compile"] != "off" else {})
    if run.ok and name == BASELINE:
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


def baseline(runs: Iterable[Run], run: Run) -> Run | None:
    """The BF16 run that a cell is compared with: of its batch size; the second one for models
    compiled whole. Compiling them takes minutes, so BF16 is timed once more beside them."""
    whole = run.recipe["compile"] != "off" and run.recipe["compile_scope"] == "model"
    wanted = {"method": BASELINE, "batch": run.tags["batch"], "again": whole}
    return next((each for each in runs if each.ok and each.has(**wanted)), None)


def longer_by(runs: Sequence[Run], run: Run | None) -> float | None:
    """How many percent longer a cell's step is than its baseline's."""
    base = baseline(runs, run) if run else None
    if base is None or run is base or not (run.metric("step_ms") and base.metric("step_ms")):
        return None
    return 100 * (run.metric("step_ms") / base.metric("step_ms") - 1)


def paid_after(runs: Sequence[Run], run: Run | None) -> float | None:
    """Steps after which a cell has caught up with its baseline; infinite where it never does."""
    if longer_by(runs, run) is None:
        return None
    pair = (baseline(runs, run), run)
    times = [(each.metric("first_step_s"), each.metric("step_ms") / 1e3) for each in pair]
    steps = break_even(*times[0], *times[1])
    return math.inf if steps is None else max(0.0, steps)


def cell_table(runs: Sequence[Run], methods: Iterable[str] = METHODS) -> pd.DataFrame:
    """The cells of these `methods`, each against its baseline among `runs`."""
    wanted = set(methods)
    shown = [run for run in runs if run.tags.get("method") in wanted]
    frame = to_frame(shown).reindex(columns=list(CELL_COLUMNS)).rename(columns=CELL_COLUMNS)
    frame.insert(4, "against bf16, %", [longer_by(runs, run) for run in shown])
    frame["has paid after, steps"] = [paid_after(runs, run) for run in shown]
    return frame


CELL_COLUMNS = {
    "run": "method and batch",
    "first_step_s": "first step, s",
    "step_ms": "step, ms",
    "data_ms": "of it data",
    "peak_allocated_gb": "memory, GB",
    "useful_tokens_per_s": "useful tokens/s",
}
COMPILER_COLUMNS = {
    "run": "",
    "compile_s": "compiling in all, s",
    "graphs": "graphs",
    "graph_breaks": "graph breaks",
    "recompilations": "recompilations",
    "given_up": "given up",
}


def not_measured(cells: Iterable[Run]) -> str:
    """The cells that failed, each reason once; "" where there is none."""
    failed: dict[str, list[str]] = {}
    for run in cells:
        if not run.ok:
            failed.setdefault(run.status, []).append(run.label)
    return "\n\n".join(f"*Not measured: {', '.join(runs)}* ({why})" for why, runs in failed.items())


def by_batch(runs: Iterable[Run], metric: str) -> dict[str, dict[float, float]]:
    """Method -> batch size -> the metric, of methods without the compiler."""
    curves: dict[str, dict[float, float]] = {}
    for run in runs:
        if METHODS[run.tags["method"]][0] == "" and run.metric(metric) and not run.has(again=True):
            curves.setdefault(run.tags["method"], {})[run.tags["batch"]] = run.metric(metric)
    return curves


# Other models


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


# Other batches


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


def tokens_of(batch: Batch) -> int:
    """Tokens that the model computes on, padding included."""
    return batch["input_ids"].numel()


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
        by_length = sorted(examples, key=tokens_of)
        passes["same-tokens static"] = [by_length[count // 2]] * count
        passes["static fewer-tokens"] = [by_length[0]] * count
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
            runs[name].tags = {"experiment": "replay"} | REPLAYS[name]
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


REPLAYS = {
    "same-tokens varying": {"tokens": "same", "lengths": "varying"},
    "same-tokens any length": {"tokens": "same", "lengths": "any length"},
    "same-tokens static": {"tokens": "same", "lengths": "static"},
    "static fewer-tokens": {"tokens": "fewer", "lengths": "static"},
}
"""Name -> tags of the runs of `replays`."""


def replay_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Name -> recipe of the runs of `replays`."""
    dynamic = {"varying": recipe.dynamic, "any length": "any", "static": "static"}
    return {name: recipe.but(dynamic=dynamic[tags["lengths"]]) for name, tags in REPLAYS.items()}


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


# The compiler


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
        in_blocks = recipe.compile_scope == "blocks"
        whole = workload.trained(trainer.model)[1]
        for module in workload.blocks(trainer.model) if in_blocks else [whole]:
            module.compile(backend="eager", dynamic=dynamic)
        for batch in itertools.islice(trainer.batches, batches):
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


def guard_table(counted: Mapping[str, Recompiled]) -> pd.DataFrame:
    """What guards were about, an example, and how many of each failed in each of `counted`."""
    rows = []
    left = {name: Counter(recompiled.reasons) for name, recompiled in counted.items()}
    for kind, pattern in KINDS_OF_GUARDS.items():
        mine = {
            name: Counter({text: n for text, n in reasons.items() if re.search(pattern, text)})
            for name, reasons in left.items()
        }
        every = sum(mine.values(), Counter())
        if every:
            row = {"guards that failed": kind, "for example": f"`{every.most_common(1)[0][0]}`"}
            rows.append(row | {name: reasons.total() for name, reasons in mine.items()})
        left = {name: reasons - mine[name] for name, reasons in left.items()}
    return pd.DataFrame(rows)


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


# The ladder


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
    workload: Workload, ladder: Ladder, recipes: Mapping[str, Recipe], steps: int
) -> dict[str, Run]:
    """Name -> run of the ladder's recipes, in one process, each in its rung's lane, with its cost a
    token.
    """
    load_libraries(workload.device.type)
    with Benchmark(workload, warmup=2) as bench:
        runs = bench.compare(recipes, steps, rounds=1, tags=ladder.tags())
    return in_lanes({name: with_costs(run) for name, run in runs.items()}, ladder)


GOALS = {
    "useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2),
    "graphs": Goal("graphs compiled", most=10),
    "graph_breaks": Goal("graph breaks", most=0),
    "compilations_after_warmup": Goal("compilations after warm-up", most=0),
    "mfu_fp8": Goal("share of BF16's measured matrix rate with FP8 weights", least=0.55),
    "mfu_bf16": Goal("the same without FP8", least=0.45),
    "weights_share": Goal("bytes of FP8 weights, share of BF16's", most=0.55),
    "memory_share": Goal("memory at batch 1 with FP8 weights, share of BF16's", most=0.75),
}
"""Metric of `reached` -> what it is, and what it is meant to be. Shares of a rate count useful
tokens only, not padding. Weights are those of language model and projector."""


def best_rung(climbed: Mapping[str, Run]) -> str:
    """The rung that ran and has the shortest time for a thousand useful tokens.

    Raises `ValueError` where none ran.
    """
    costs = {name: run.metric("ms_per_1k_useful_tokens") for name, run in climbed.items() if run.ok}
    if not costs:
        raise ValueError("No rung of the ladder ran. Each run's status says why.")
    return min(costs, key=lambda name: costs[name])


def reached(
    varied: Workload, top: Recipe, climbed: Mapping[str, Run], cells: Iterable[Run], rate: float
) -> dict[str, float]:
    """What the ladder gets to, as metrics named in `GOALS`; what was not measured is absent.

    top: the best rung's recipe, which is compiled once more on `varied`. climbed: the ladder's runs
    with their costs. cells: section 2's, where the same images give FP8 and BF16 weights the same
    tokens. rate: the measured matrix rate in TFLOP/s that shares are taken of.
    """
    metrics = steady(varied, top, warmup=6, steps=10)
    naive, best = climbed["bf16"], climbed[best_rung(climbed)]
    if naive.ok:
        cost = "ms_per_1k_useful_tokens"
        metrics["useful_speedup"] = naive.metric(cost) / best.metric(cost)
    for metric, base_linear in {"mfu_fp8": "fp8-frozen", "mfu_bf16": "published"}.items():
        alike = [r for r in climbed.values() if r.ok and r.recipe["base_linear"] == base_linear]
        if alike:
            useful = max(run.metrics["tflops"] * run.metrics["useful_tokens"] for run in alike)
            metrics[metric] = useful / rate
    alone = {run.tags["method"]: run for run in cells if run.ok and run.has(batch=1, again=False)}
    for metric, part in {
        "weights_share": "weights_gb",
        "memory_share": "peak_allocated_gb",
    }.items():
        held = [alone[name].metric(part) for name in ("fp8-frozen", BASELINE) if name in alone]
        if len(held) == 2 and all(held):
            metrics[metric] = held[0] / held[1]
    return metrics


# More seeds


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

    Runs are named after the recipes: "loss bf16". Metrics: `start_loss`, `final_loss` and
    `loss_drop`, what training changed, of the held-out examples over seeds, and `loss`, the
    training losses of the last seed. Samples are by seed. What fails becomes the run's status.
    """
    decoded: dict[str, list[dict[str, Any]]] = {}  # once for each form, not for each training
    runs = {}
    for name, recipe in recipes.items():
        if recipe.shapes not in decoded:
            decoded[recipe.shapes] = _decoded(workload, recipe)
        examples = decoded[recipe.shapes]
        hooks = {"on_model": changes[name]} if name in (changes or {}) else {}
        run = empty_run(workload, recipe, f"loss {name}")
        run.tags = {"experiment": "loss", "method": name}
        runs[run.run] = run
        try:
            trained = [
                _trained_once(workload, recipe, seed, steps, examples, hooks)
                for seed in range(seeds)
            ]
            start, final, curves = zip(*trained, strict=True)
            drop = [early - late for early, late in zip(start, final, strict=True)]
            run.samples = {"start_loss": list(start), "final_loss": list(final), "loss_drop": drop}
            run.metrics = {metric: summarise(losses) for metric, losses in run.samples.items()}
            run.metrics["loss"] = curves[-1]
        except Exception as error:
            run.status = status_of(error)
        gc.collect()  # outside the except block, which holds the frames, and these the tensors
        cuda.empty_cache()
    return runs


def _decoded(workload: Workload, recipe: Recipe) -> list[dict[str, Any]]:
    """All examples of a workload."""
    workers = min(8, usable_cores() - 1) if workload.device.type == "cuda" else 0
    examples = workload.dataset(None, recipe)
    loader = DataLoader(examples, batch_size=1, num_workers=workers, collate_fn=list)
    return [example for (example,) in loader]


def _trained_once(
    workload: Workload,
    recipe: Recipe,
    seed: int,
    steps: int,
    examples: Sequence[dict[str, Any]],
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
        held_out = examples[::HELD_OUT]
        learn = [example for at, example in enumerate(examples) if at % HELD_OUT]
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


def against_same_seed(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Method -> its final loss against BF16's of the same seed, in %, seed by seed."""
    base = runs[BASELINE].samples["final_loss"]
    ratios = {
        name: zip(run.samples["final_loss"], base, strict=True)
        for name, run in runs.items()
        if run.ok
    }
    return {name: [100 * (mine / its - 1) for mine, its in pairs] for name, pairs in ratios.items()}


def loss_table(runs: Iterable[Run]) -> pd.DataFrame:
    """The final loss of each method of `losses_over_seeds`, and its changes against BF16's."""
    losses = {run.tags["method"]: run for run in runs if run.ok}
    changes = against_same_seed(losses) if BASELINE in losses else {}
    rows = [
        (name, losses[name].metric("final_loss"), ", ".join(f"{each:+.2f}" for each in by_seed))
        for name, by_seed in changes.items()
    ]
    head = ("method", "final loss, median of seeds", "against bf16, seed by seed, %")
    return pd.DataFrame(rows, columns=head)


def seed_band(run: Run) -> tuple[float, float]:
    """How far the final losses of a run's seeds lie below and above their median, in %."""
    losses, middle = run.samples["final_loss"], run.metric("final_loss")
    return 100 * (min(losses) / middle - 1), 100 * (max(losses) / middle - 1)
