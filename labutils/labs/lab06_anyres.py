"""The experiments of lab 06. Each returns runs with tags.

runs = compared(workload, ("bf16", "fixed"), batch=4, rounds=3)   a column of article A2's table
run, why = recompilations(workload, recipe, batches=10)           what the compiler starts over
runs = any_shape(workload, rounds=3)                              article A2's ladder, and one shape
runs = trained_on_seeds(workload, {"bf16": a, "nf4": b}, seeds=4, steps=16)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from labutils.labs.ladders import A2_BASE, A2_LADDER, Rung, climb, distinct_on
from labutils.layers.cuda_graph import VARIANTS
from labutils.layers.quantization.convert import forget_scales
from labutils.profiling import compat, cuda
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, summarise, to_frame
from labutils.training import Benchmark, Trainer, train
from labutils.training.model_edits import prepared_for_kbit, with_costs
from labutils.workloads import Workload, open_workload

BLOCKS = {"compile": "default", "compile_scope": "blocks"}
WHOLE = {"compile": "default", "compile_scope": "model"}
FIXED = {"shapes": "fixed", "dynamic": "static"}
FORMS = {
    "": {},
    "eager-fixed": FIXED,
    "compile": BLOCKS,
    "fixed": BLOCKS | FIXED,
    "compile-whole": WHOLE,
    "fixed-whole": WHOLE | FIXED,
}
"""Form -> its changes of the recipe. The article compiles the model as one ("-whole"). Its blocks
compiled one by one have almost the same code after a fraction of the time."""
WEIGHTS = {"": "published", "fp8-te": "fp8-te", "fp8-frozen": "fp8-frozen", "qlora": "nf4"}
OPAQUE = ("fp8-te", "qlora")
"""Weights in layers that the compiler can't see through: it starts over for each of them, and is to
give up as early as it does by default."""
METHODS = {"-".join(filter(None, pair)) or "bf16": pair for pair in product(FORMS, WEIGHTS)}
"""Method of the article's table -> its form and how it holds the frozen weights."""


def method(name: str, batch: int = 1) -> Recipe:
    """The recipe of one of `METHODS` at a batch size.

    Blocks are computed again in the backward pass. Without that the article's 16 GB at batch 1
    would not hold, nor would its batch 24 fit its card.
    """
    form, weights = METHODS[name]
    recipe = A2_BASE.but(micro_batch=batch, checkpointing="blocks", base_linear=WEIGHTS[weights])
    return recipe.but(**FORMS[form] | ({"dynamic": "automatic"} if weights in OPAQUE else {}))


def cells(methods: Sequence[str], batch: int) -> dict[str, Recipe]:
    """Run's name -> recipe of the table's cells at one batch size; the first method's twice."""
    recipes = {f"{name} b{batch}": method(name, batch) for name in methods}
    return recipes | {f"{methods[0]} b{batch} again": method(methods[0], batch)}


def compared(workload: Workload, methods: Sequence[str], batch: int, rounds: int) -> dict[str, Run]:
    """Name -> run of `cells`, interleaved. What fails says why in its run's status.

    A method with 4-bit weights goes through PEFT's preparation. Each is compiled from nothing,
    while nothing else is. Metrics besides a run's own: what the compiler did.
    """
    load_libraries(workload.device.type)
    torch._dynamo.reset()  # compiled code keeps the models that it was made for
    with contextlib.suppress(Unavailable):
        forget_scales()
    recipes = cells(methods, batch)
    recipes.popitem()  # the second time
    tags = [{"experiment": "methods", "method": of, "batch": batch} for of in methods]
    by_run = dict(zip(recipes, tags, strict=True))
    compiler: dict[str, Compilation] = {}
    options: dict[str, Any] = {"warmup": int(rounds > 1), "on_model": as_its_users_prepare_it}
    # Trainers side by side share the 8 variants that PyTorch allows a function.
    more = torch._dynamo.config.patch(recompile_limit=16)
    with more, Benchmark(workload, **options) as bench:
        for name, recipe in recipes.items():
            with fresh_cache(), Compilation() as compiler[name]:
                bench.prepare({name: recipe})
        runs = bench.compare(recipes, steps=1, rounds=rounds, tags=by_run)
    for name, run in runs.items():
        if run.ok and run.recipe["compile"] != "off":
            run.metrics |= compiler[name].metrics()
    return {name: with_costs(run) for name, run in runs.items()}


def as_its_users_prepare_it(model: nn.Module) -> None:
    """PEFT's preparation for training, where a model's weights have 4 bits."""
    if model.base_linear == "nf4":
        prepared_for_kbit(model)


@functools.cache
def load_libraries(device: str) -> None:
    """Train a tiny model for a step, on a GPU compiled as well, once a process: kernels, libraries
    and the compiler take time to load, which would else be in some method's first step."""
    workload = open_workload("llava-lora", "tiny", device=device)
    for form in ("", "compile") if device == "cuda" else ("",):
        train(workload, A2_BASE.but(**FORMS[form]), steps=1, warmup=0)
    cuda.empty_cache()


def side_by_side(runs: Sequence[Run]) -> pd.DataFrame:
    """The article's table, a row a batch size, a column a method: "480 ms (floor 117), 17.2 GB"."""
    frame = to_frame(run for run in runs if run.ok and not run.has(again=True))
    numbers = frame.reindex(columns=["step_ms", "floor_ms", "peak_allocated_gb"])
    timed = "{:,.0f} ms (floor {:,.0f})"
    frame["text"] = [
        ", ".join([timed.format(ms, floor)] * (ms == ms) + [f"{gb:.1f} GB"] * (gb == gb))
        for ms, floor, gb in numbers.itertuples(index=False)
    ]
    order = frame["method"].drop_duplicates()
    return frame.pivot(index="batch", columns="method", values="text")[order].reset_index()


# The compiler


def recompilations(
    workload: Workload, recipe: Recipe, batches: int, dynamic: bool | None = None
) -> tuple[Run, Compilation]:
    """Train for `batches` steps on new micro-batches and count what has to be compiled anew.

    Only Dynamo is at work, which traces, guards and decides; its graphs then run as they are
    (backend "eager"), so that counting takes seconds. dynamic is torch.compile's: None is its
    default. `recipe.compile_scope` is observed. The run has the recompilations by step as samples;
    its caller says what they are of.
    """
    by_step: list[int] = []
    image_tokens: set[int] = set()
    torch._dynamo.reset()
    with _dynamo_quiet(), Trainer(workload, recipe.but(compile="off")) as trainer:
        in_blocks = recipe.compile_scope == "blocks"
        whole = workload.trained(trainer.model)[1]
        for module in workload.blocks(trainer.model) if in_blocks else [whole]:
            module.compile(backend="eager", dynamic=dynamic)
        with Compilation() as compiled:
            for _ in range(batches):
                batch = next(trainer.batches)
                ids, before = batch["input_ids"][0], compiled.recompilations
                image_tokens.add(int((ids == ids.mode().values).sum()))
                trainer.step(iter([batch]))
                by_step.append(compiled.recompilations - before)
    torch._dynamo.reset()
    run = Run("", "", workload="llava-lora, counted", scale=workload.scale)
    run.samples["recompilations"] = by_step
    run.metrics = compiled.metrics() | {
        "recompilations_after_2_steps": sum(by_step[2:]),
        "further_image_token_counts": len(image_tokens) - 1,
    }
    return run, compiled


@contextlib.contextmanager
def _dynamo_quiet() -> Iterator[None]:
    """Keep the compiler's warnings, of what is being counted anyway, off the page. `Compilation`
    listens at their source and still hears them."""
    with contextlib.ExitStack() as afterwards:
        for handler in logging.getLogger("torch._dynamo").handlers:
            afterwards.callback(handler.setLevel, handler.level)
            handler.setLevel(logging.ERROR)
        yield


# Any shape, and fast

LADDER = A2_LADDER.plus(
    Rung(
        "FP8 weights",
        "same mathematics",
        {"base_linear": "fp8-frozen"},
        "held once, products on FP8 tensor cores",
    )
)
ONE_SHAPE = {
    "padded": {"shapes": "padded", "token_budget": 3072, "dynamic": "static"},
    "fixed": {"shapes": "fixed", "token_budget": 2048, "dynamic": "static"},
}
"""Name -> what gives the rung "blocks compiled" one shape for good: AnyRes kept and padded to one
length, or the article's small squares."""


def shape_recipes(device: str) -> dict[str, Recipe]:
    """Run's name -> recipe of the ladder's rungs, the first one's twice, and of its compiled blocks
    on rows of one shape. On a CPU nothing is compiled, which takes a minute on two cores."""
    recipes = climb(LADDER)
    one_shape = {name: recipes["blocks compiled"].but(**more) for name, more in ONE_SHAPE.items()}
    if device == "cpu":
        del recipes["FP8 weights"]  # emulated
        plain = {"num_workers": 0, "persistent_workers": False, "compile": "off"}
        plain |= {"compile_scope": "model", "dynamic": "automatic"}
        every = {name: recipe.but(**plain) for name, recipe in (recipes | one_shape).items()}
        return distinct_on("cpu", every) | {"bf16 again": every["bf16"]}
    return recipes | one_shape | {"bf16 again": recipes["bf16"]}


def any_shape(workload: Workload, rounds: int) -> dict[str, Run]:
    """Name -> run of `shape_recipes`, interleaved, each in its rung's lane.

    Metrics besides a run's own: `ms_per_1k_tokens`, padding included, and
    `ms_per_1k_useful_tokens`.
    """
    load_libraries(workload.device.type)
    torch._dynamo.reset()
    recipes = shape_recipes(workload.device.type)
    del recipes["bf16 again"]
    tags = {name: {"experiment": "ladder", "rung": name} for name in recipes}
    tags |= {name: {"experiment": "one shape", "form": name} for name in ONE_SHAPE}
    with compat.variants_limited(VARIANTS), Benchmark(workload, warmup=2) as bench:
        runs = bench.compare(recipes, steps=4, rounds=rounds, tags=tags)
    lanes = {rung.name: rung.lane for rung in LADDER}
    for run in runs.values():
        run.lane = lanes.get(run.tags.get("rung", ""), "same mathematics")
        if run.ok:
            costs = 1e3 * np.divide(run.samples["step_ms"], run.samples["tokens"])
            run.samples["ms_per_1k_tokens"] = costs.tolist()
            run.metrics["ms_per_1k_tokens"] = summarise(costs)
    return {name: with_costs(run) for name, run in runs.items()}


# The loss, or the seed


def trained_on_seeds(
    workload: Workload,
    recipes: Mapping[str, Recipe],
    seeds: int,
    steps: int,
    changes: Mapping[str, Callable[[nn.Module], None]],
) -> dict[str, Run]:
    """Name -> run of trainings from scratch on `seeds` seeds. A seed draws frozen weights, adapters
    and the order of the examples, the same for all recipes: their losses can be paired, step by
    step. `changes` alters the models of the recipes that it names.

    Samples, by seed: `start_loss`, of the first step, `final_loss`, the mean of the last quarter of
    the steps, and `loss_drop`. A failure is the run's status.
    """
    runs: dict[str, Run] = {}
    for name, recipe in recipes.items():
        found = []
        for seed in range(seeds):
            if recipe.base_linear == "fp8-te":
                with contextlib.suppress(Unavailable):
                    forget_scales()
            hooks = {"on_model": changes[name]} if name in changes else {}
            found.append(train(workload, recipe.but(seed=seed), steps - 1, warmup=0, **hooks))
        run = runs[f"loss {name}"] = found[0]
        run.tags = {"experiment": "losses by seed", "method": name}
        run.status = next((one.status for one in found if not one.ok), "ok")
        curves = np.array([one.metrics["loss"][:steps] for one in found if run.ok] or [[0.0]])
        starts, ends = curves[:, 0], curves[:, -max(1, steps // 4) :].mean(axis=1)
        losses = {"start_loss": starts, "final_loss": ends, "loss_drop": starts - ends}
        run.samples = {name: of.tolist() for name, of in losses.items() if run.ok}
        run.metrics = {metric: summarise(losses) for metric, losses in run.samples.items()}
        workload.release_weights()
        gc.collect()
    return runs
