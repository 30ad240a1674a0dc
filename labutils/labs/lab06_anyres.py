"""The experiments of lab 06. Each returns runs with tags.

runs = compared(workload, ("bf16", "fixed"), batch=4, rounds=3)   a column of article A2's table
run = recompilations(workload, recipe, batches=10)                what the compiler starts over
runs = any_shape(workload, rounds=3)                              article A2's ladder, and one shape
runs = trained_on_seeds(workload, {"bf16": a, "nf4": b}, seeds=4, steps=16)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

from labutils.labs.ladders import A2_BASE, A2_LADDER, climb, distinct_on, in_lanes
from labutils.layers.cuda_graph import VARIANTS
from labutils.layers.quantization.convert import forget_scales
from labutils.profiling import compat
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise, to_frame
from labutils.training import Benchmark, Trainer, train
from labutils.training.model_edits import prepared_for_kbit, with_costs
from labutils.workloads import Workload
from labutils.workloads.llava import MultimodalLora

BLOCKS = {"compile": "default", "compile_scope": "blocks"}
WHOLE = BLOCKS | {"compile_scope": "model"}
FIXED = {"shapes": "fixed", "dynamic": "static"}
FORMS = {"": {}, "eager-fixed": FIXED, "compile": BLOCKS, "fixed": BLOCKS | FIXED}
FORMS |= {"compile-whole": WHOLE, "fixed-whole": WHOLE | FIXED}
"""Form -> its changes of the recipe. The article compiles the model as one ("-whole"). Its blocks
compiled one by one have almost the same code after a fraction of the time."""
WEIGHTS = {"": "published", "fp8-te": "fp8-te", "fp8-frozen": "fp8-frozen", "qlora": "nf4"}
METHODS = {"-".join(filter(None, pair)) or "bf16": pair for pair in product(FORMS, WEIGHTS)}
"""Method of the article's table -> its form and how it holds the frozen weights."""


def method(name: str, batch: int = 1) -> Recipe:
    """The recipe of one of `METHODS` at a batch size.

    Blocks are computed again in the backward pass. Without that the article's 16 GB at batch 1
    would not hold, nor would its batch 24 fit its card. The compiler can't see through layers of
    other libraries: it starts over for each of them, and is to give up as early as by default.
    """
    form, weights = METHODS[name]
    recipe = A2_BASE.but(micro_batch=batch, checkpointing="blocks", base_linear=WEIGHTS[weights])
    opaque = {"dynamic": "automatic"} if weights in ("fp8-te", "qlora") else {}
    return recipe.but(**FORMS[form] | opaque)


def cells(methods: Sequence[str], batch: int) -> dict[str, Recipe]:
    """Run's name -> recipe of the table's cells at one batch size; the first method's twice."""
    recipes = {f"{name} b{batch}": method(name, batch) for name in methods}
    return recipes | {f"{methods[0]} b{batch} again": method(methods[0], batch)}


def compared(
    workload: MultimodalLora, methods: Sequence[str], batch: int, rounds: int
) -> dict[str, Run]:
    """Name -> run of `cells`, interleaved, with tiles `cut_beforehand`. What fails says why in its
    run's status.

    A method with 4-bit weights goes through PEFT's preparation. Each is compiled from nothing,
    while nothing else is; a compiled one's metrics say what the compiler did.
    """
    torch._dynamo.reset()  # compiled code keeps the models that it was made for
    forget_scales()
    recipes = cells(methods, batch)
    recipes.popitem()  # the second time
    tags = {"experiment": "methods", "batch": batch}
    by_run = {run: tags | {"method": name} for run, name in zip(recipes, methods, strict=True)}
    compiler = {name: Compilation() for name in recipes}
    # Trainers side by side share the 8 variants that PyTorch allows a function.
    more = torch._dynamo.config.patch(recompile_limit=16)
    options = {"dataset": cut_beforehand(workload, recipes), "on_model": prepared_for_kbit}
    if workload.device.type == "cuda":  # else kernels and the compiler load in some first step
        with Trainer(workload, next(iter(recipes.values()))) as warm:
            warm.step()
        del warm
        torch.compile(F.gelu)(torch.ones(8, device="cuda", requires_grad=True)).sum().backward()
    with more, Benchmark(workload, int(rounds > 1), **options) as bench:
        for name, recipe in recipes.items():
            with fresh_cache(), compiler[name]:
                bench.prepare({name: recipe})
        runs = bench.compare(recipes, 1, rounds, by_run)
    for name, run in runs.items():
        if run.ok and run.recipe["compile"] != "off":
            run.metrics |= compiler[name].metrics()
    return {name: with_costs(run) for name, run in runs.items()}


def cut_beforehand(
    workload: MultimodalLora, recipes: Mapping[str, Recipe]
) -> Callable[[Any, Recipe], list]:
    """`dataset` of a benchmark: images in memory with their tiles cut, those of fixed shapes apart.
    How data is loaded is lab 10's question, and here would be most of the noise."""
    kept: dict[bool, list] = {}
    for recipe in recipes.values():
        if (square := recipe.shapes == "fixed") not in kept:
            cut = workload.read_once(workload.dataset(None, recipe))
            kept[square] = list(map(copy.deepcopy, cut))
    return lambda model, recipe: kept[recipe.shapes == "fixed"]


def side_by_side(runs: Iterable[Run]) -> pd.DataFrame:
    """The article's table: a column a method, and for each batch size rows of times, of floors, of
    useful tokens a second and of memory."""
    heads = {"step_ms": "step, ms", "data_ms": "of it data, ms", "floor_ms": "floor, ms"}
    heads |= {"useful_tokens_per_s": "useful tokens/s", "peak_allocated_gb": "memory, GB"}
    frame = to_frame(runs).set_index(["batch", "method"]).reindex(columns=list(heads))
    frame = frame.rename(columns=heads)
    return frame.rename_axis(columns="").stack().unstack("method").reset_index()


# The compiler


def recompilations(workload: Workload, recipe: Recipe, batches: int) -> Run:
    """Train for `batches` steps on new micro-batches and count what has to be compiled anew.

    Only Dynamo is at work, which traces, guards and decides; its graphs then run as they are
    (backend "eager"), so that counting takes seconds. The model is compiled as a whole. Samples of
    the run, by step: `recompilations` and the `tokens` of an example. Its caller says what they are
    of.
    """
    by_step, tokens, image_tokens = [], [], set()
    torch._dynamo.reset()
    with Trainer(workload, recipe) as trainer:
        workload.called(trainer.model).compile(backend="eager")
        with Compilation() as compiled:
            for _ in range(batches):
                batch, before = next(trainer.batches), compiled.recompilations
                ids = batch["input_ids"][0]
                tokens.append(len(ids))
                image_tokens.add(int((ids == ids.mode().values).sum()))
                trainer.step(iter([batch]))
                by_step.append(compiled.recompilations - before)
    torch._dynamo.reset()
    metrics = compiled.metrics() | {"further_image_token_counts": len(image_tokens) - 1}
    found = {"samples": {"recompilations": by_step, "tokens": tokens}, "metrics": metrics}
    return Run("", "", workload="llava-lora, counted", scale=workload.scale, **found)


# Any shape, and fast

PADDED = {"shapes": "padded", "token_budget": 3072, "dynamic": "static"}
FORMS_OF_ROWS = {"padded": PADDED, "padded, any": PADDED | {"dynamic": "automatic"}}
FORMS_OF_ROWS["squares"] = FIXED | {"token_budget": 1200}
"""Rows of one length -> what gives them to the rung "blocks compiled". "padded, any" runs that
rung's code, which has met several lengths and takes any."""


def shape_recipes(scale: str) -> dict[str, Recipe]:
    """Run's name -> recipe of the ladder's rungs, and of compiled blocks on rows of one length. At
    tiny nothing is compiled, which takes a minute."""
    recipes = climb(A2_LADDER)
    compiled = recipes["blocks compiled"]
    recipes |= {name: compiled.but(**changes) for name, changes in FORMS_OF_ROWS.items()}
    if scale != "tiny":
        return recipes
    plain = {"compile": "off", "compile_scope": "model", "dynamic": "automatic"}
    return distinct_on("cpu", {name: recipe.but(**plain) for name, recipe in recipes.items()})


def any_shape(workload: MultimodalLora, rounds: int) -> dict[str, Run]:
    """Name -> run of `shape_recipes`, each in its rung's lane: the ladder interleaved, and the rows
    of one length, so that each has a base of its own.

    A recipe gets the same images in each round, which differ in length more than recipes in time.
    """
    torch._dynamo.reset()
    recipes = shape_recipes(workload.scale)
    tags = {name: {"experiment": "one shape", "form": name} for name in FORMS_OF_ROWS}
    tags |= A2_LADDER.tags()
    options = {"same_batches": True, "dataset": cut_beforehand(workload, recipes)}
    with compat.variants_limited(VARIANTS), Benchmark(workload, warmup=2, **options) as bench:
        rows = {name: recipes.pop(name) for name in FORMS_OF_ROWS if name in recipes}
        runs = bench.compare(recipes, steps=4, rounds=rounds, tags=tags)
        runs |= bench.compare(rows, steps=4, rounds=rounds, tags=tags)
    return in_lanes({name: with_costs(run) for name, run in runs.items()}, A2_LADDER)


# The loss, or the seed


def trained_on_seeds(
    workload: Workload, recipes: Mapping[str, Recipe], seeds: int, steps: int
) -> dict[str, Run]:
    """Name -> run of trainings from scratch on `seeds` seeds. A seed draws frozen weights, adapters
    and the order of the examples, the same for all recipes: their losses can be paired, step by
    step. A model with 4-bit weights goes through PEFT's preparation.

    Samples, by seed: `start_loss`, of the first step, `final_loss`, the mean of the last quarter of
    the steps, and `loss_drop`. A failure is the run's status.
    """
    runs: dict[str, Run] = {}
    for name, recipe in recipes.items():
        curves = []
        for seed in range(seeds):
            forget_scales()
            seeded = recipe.but(seed=seed)
            run = train(workload, seeded, steps - 1, warmup=0, on_model=prepared_for_kbit)
            if not run.ok:
                break
            curves.append(run.metrics["loss"][:steps])
        runs[f"loss {name}"] = run
        run.tags = {"experiment": "losses by seed", "method": name}
        losses = np.array(curves) if run.ok else np.empty((0, steps))
        starts, ends = losses[:, 0], losses[:, -max(1, steps // 4) :].mean(axis=1)
        found = {"start_loss": starts, "final_loss": ends, "loss_drop": starts - ends}
        run.samples = {metric: of.tolist() for metric, of in found.items() if run.ok}
        run.metrics = {metric: summarise(of) for metric, of in run.samples.items()}
        workload.release_weights()
    return runs
