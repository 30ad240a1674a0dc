"""The experiments of lab 06. Each returns runs with tags.

run = cell(workload, "fixed-fp8-te", batch=4)            one cell of article A2's table
runs = replays(workload, recipe, count=5)                one shape against fewer tokens
run, why = recompilations(workload, recipe, batches=10)  what the compiler makes of varied images
runs = losses_over_seeds(workload, {"bf16": a, "fp8": b}, seeds=4, steps=16)
runs = climbed(workload, ladder, recipes, steps=6)       article A2's ladder
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils.data import BatchSampler

from labutils.data.loader import EpochOrder
from labutils.labs.lab06_advisor import BASELINE, FORMS, METHODS, against_same_seed
from labutils.labs.ladders import A2_BASE, Ladder, Rung, in_lanes
from labutils.layers.cuda_graph import compile_blocks, variants_allowed
from labutils.layers.lora import redraw_lora
from labutils.layers.quantization.convert import convert_base, forget_scales, frozen_linears
from labutils.profiling import cuda
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Recipe, Unavailable
from labutils.results.effects import paid_after
from labutils.results.records import Run, status_of, summarise, to_frame
from labutils.training import Benchmark, Trainer, train
from labutils.training.batches import Batch, on_device
from labutils.training.benchmark import empty_run
from labutils.training.model_edits import prepared_for_kbit, with_costs
from labutils.workloads import Workload, open_workload
from labutils.workloads.llava import tower_flops

HELD_OUT = 4
"""One example in so many is kept from training, for losses to be measured on."""
WARM_UP = 4
"""Steps over which a training's learning rate rises to what its recipe says."""


# The cells of article A2's table


def method(name: str, batch: int = 1) -> Recipe:
    """The recipe of a cell of the article's table: one of `METHODS` at a batch size.

    Blocks are computed again in the backward pass. Without that the article's 16 GB at batch 1
    would not hold, nor would its batch 24 fit its card.
    """
    form, weights = METHODS[name]
    base = {"": "published", "qlora": "nf4"}.get(weights, weights)
    recipe = A2_BASE.but(micro_batch=batch, checkpointing="blocks", base_linear=base)
    return recipe.but(**FORMS[form])


def cell(workload: Workload, name: str, batch: int, steps: int = 3, again: bool = False) -> Run:
    """The run of one cell: first step, `steps` timed ones, memory, what the weights take, what the
    compiler did. A failure is the run's status.

    "qlora" goes through `prepared_for_kbit` as well; "nf4" is the same without.
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

    # What another cell compiled must not shorten this one's first step.
    cache = contextlib.nullcontext() if recipe.compile == "off" else fresh_cache()
    with cache, Compilation() as compiled:
        run = train(workload, recipe, steps, warmup=0, on_model=change)
    run.tags = {"experiment": "methods", "method": name, "batch": batch}
    run.tags |= {"again": True} if again else {}
    if run.ok:
        run.metrics |= held | (compiled.metrics() if run.recipe["compile"] != "off" else {})
    if run.ok and name == BASELINE:
        run.metrics["vision_share"] = vision_share(workload, recipe)
    return with_costs(run)


@functools.cache
def load_libraries(device: str) -> None:
    """Train a tiny model for a step, on a GPU compiled as well. It is done once a process.

    Kernels, libraries and the compiler take time to load. It would else be in the first step of
    whatever comes first, which may be any cell after an interrupted start.
    """
    workload = open_workload("llava-lora", "tiny", device=device)
    train(workload, A2_BASE, steps=1, warmup=0)
    if device == "cuda":
        train(workload, A2_BASE.but(**FORMS["compile"]), steps=1, warmup=0)
        cuda.empty_cache()


def weights_held(model: nn.Module) -> dict[str, float]:
    """Frozen weights of the language model and the projector: `weights_gb` as they are held, and
    `bf16_weights_held`, 1 if most of the blocks' matrices are still held in two bytes or more a
    number."""
    network = model.network.model
    parts = [network.language_model, network.multi_modal_projector, model.network.lm_head]
    together = nn.ModuleList(parts)  # counts a tensor that two parts share once
    tensors = [*together.parameters(), *together.buffers()]
    blocks = network.language_model.layers.parameters()
    matrices = [p for p in blocks if not p.requires_grad and p.dim() > 1]
    wide = sum(p.nbytes for p in matrices if p.itemsize > 1)
    return {
        "weights_gb": sum(t.nbytes for t in tensors if not t.requires_grad) / 1e9,
        "bf16_weights_held": int(wide > 0.5 * sum(p.nbytes for p in matrices)),
    }


def cell_table(runs: Sequence[Run], methods: Iterable[str] = METHODS) -> pd.DataFrame:
    """`to_frame` of the cells of these `methods`, with two more columns: how many percent a step is
    longer than the BF16 run's of the same batch size among `runs` ("longer_percent"), and after how
    many steps the method has caught up with it ("paid_after").

    Compiling a model whole takes minutes. So BF16 is timed once more beside such models, and they
    are compared with that second run.
    """
    bases = {(r.tags["batch"], r.has(again=True)): r for r in runs if r.has(method=BASELINE)}
    wanted = set(methods)
    shown = [run for run in runs if run.tags["method"] in wanted]
    frame = to_frame(shown)
    for row, run in enumerate(shown):
        base = bases.get((run.tags["batch"], METHODS[run.tags["method"]][0].endswith("-whole")))
        if base is not run:
            frame.loc[row, "longer_percent"] = longer_by(base, run)
            frame.loc[row, "paid_after"] = paid_after(base, run)
    return frame


def longer_by(base: Run | None, run: Run | None) -> float | None:
    """How many percent longer a run's step is than that of `base`; None where one has no time."""
    times = [one.metric("step_ms") if one else None for one in (base, run)]
    return 100 * (times[1] / times[0] - 1) if all(times) else None


def vision_share(workload: Workload, recipe: Recipe) -> float:
    """The vision tower's part of an optimizer step's FLOPs, for images of 500 x 500 pixels."""
    tiles = workload.size.geometry.tiles((500, 500)) * recipe.examples_per_step
    return tower_flops(workload.size) * tiles / workload.work(recipe).flops


# One shape, or fewer tokens

REPLAYS = {
    "same-tokens varying": {"tokens": "same", "lengths": "varying"},
    "same-tokens any length": {"tokens": "same", "lengths": "any length"},
    "same-tokens static": {"tokens": "same", "lengths": "static"},
    "static fewer-tokens": {"tokens": "fewer", "lengths": "static"},
}
"""Name -> tags of the runs of `replays`."""


def replays(workload: Workload, recipe: Recipe, count: int) -> dict[str, Run]:
    """Name -> run of what separates constant shapes from fewer tokens, on `count` examples of
    varied lengths.

    "same-tokens varying": one length after the other, compiled as by default; "same-tokens any
    length": the same with code for any length; "same-tokens static": the one of median length, as
    many times; "static fewer-tokens": the shortest one. A micro-batch is `recipe.micro_batch`
    copies of one example, so that nothing is padded.

    All four share one model. What is compiled are the decoder's blocks but the first, whose input
    has no gradient and would take code of its own. `recipe` has `cache="features"`: the images'
    features are computed before, so that no tower is compiled.
    """
    load_libraries(workload.device.type)
    torch._dynamo.reset()
    gc.collect()
    dynamic, runs = {"varying": recipe.dynamic, "any length": "any", "static": "static"}, {}
    with Trainer(workload, recipe.but(compile="off")) as trainer:
        collate, places = workload.collate(recipe), itertools.islice(trainer.sampler, count)
        copies = ([trainer.dataset[place]] * recipe.micro_batch for place in places)
        examples = [collate(copied) for copied in copies]
        by_length = sorted(examples, key=lambda batch: batch["input_ids"].numel())
        for name, tags in REPLAYS.items():
            batches = examples
            if tags["lengths"] == "static":
                batches = [by_length[0 if tags["tokens"] == "fewer" else count // 2]] * count
            own = recipe.but(dynamic=dynamic[tags["lengths"]]).fitted_to(workload.device.type)
            torch._dynamo.reset()
            if own.compile != "off":
                blocks = trainer.model.network.model.language_model.layers[1:]
                compile_blocks(blocks, own.compile, own.dynamic)
            run = runs[name] = empty_run(workload, own, name)
            run.tags = {"experiment": "replay"} | tags
            with variants_allowed(own.compile, own.dynamic):
                _replay(run, trainer, batches)
    return runs


def _replay(run: Run, trainer: Trainer, batches: Sequence[Batch], passes: int = 3) -> None:
    """Train on these same batches over and over, one a step: two passes to warm up, then `passes`
    timed ones.

    Metrics of the run: `ms_per_1k_tokens` over the passes, padding included; `tokens`, the mean of
    a step; `peak_allocated_gb` on a GPU (frozen weights included, other trainers' tensors not); and
    what was compiled in the timed passes.
    """
    sizes = [batch["input_ids"].numel() for batch in batches]

    def one_pass() -> float:
        """Milliseconds for a thousand tokens."""
        feed = iter(batches)
        cuda.synchronize()
        began = time.perf_counter()
        for _ in batches:
            trainer.step(feed)
        cuda.synchronize()
        return 1e6 * (time.perf_counter() - began) / sum(sizes)

    for _ in range(2):  # the second length has the compiler write code for any
        one_pass()
    cuda.reset_peak_memory()
    with Compilation() as late:
        samples = [one_pass() for _ in range(passes)]
    run.samples = {"ms_per_1k_tokens": samples}
    run.metrics = {"ms_per_1k_tokens": summarise(samples), "tokens": sum(sizes) / len(sizes)}
    run.metrics |= {"recompilations": late.recompilations, "given_up": len(late.given_up)}
    if peak := cuda.peak_memory():
        run.metrics["peak_allocated_gb"] = peak[0]


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
    run = Run("", "", workload=f"{workload.name}, counted", scale=workload.scale)
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


# The loss, or the seed


def fp8_but(*kept: str) -> Callable[[nn.Module], None]:
    """A change that puts FP8 layers under the adapters, except where a part of the layer's name is
    in `kept`.
    """

    def change(model: nn.Module) -> None:
        convert_base(model, frozen_linears(model, ("lm_head", "vision_tower", *kept)), "fp8-frozen")

    return change


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
            decoded[recipe.shapes] = list(workload.dataset(None, recipe))
        examples = decoded[recipe.shapes]
        hooks = {"on_model": changes[name]} if name in (changes or {}) else {}
        run = runs[f"loss {name}"] = empty_run(workload, recipe, f"loss {name}")
        run.tags = {"experiment": "loss", "method": name}
        run.samples = {"start_loss": [], "final_loss": [], "loss_drop": []}
        try:
            for seed in range(seeds):
                if recipe.base_linear == "fp8-te":
                    forget_scales()
                with Trainer(workload, recipe, **hooks) as trainer:
                    start, final, curve = _train_on_seed(trainer, seed, steps, examples)
                for metric, loss in zip(run.samples, (start, final, start - final), strict=True):
                    run.samples[metric].append(loss)
            run.metrics = {metric: summarise(losses) for metric, losses in run.samples.items()}
            run.metrics["loss"] = curve
        except Exception as error:
            run.status, run.samples = status_of(error), {}
        gc.collect()  # outside the except block, which holds the frames, and these the tensors
        cuda.empty_cache()
    return runs


def _train_on_seed(
    trainer: Trainer, seed: int, steps: int, examples: Sequence[Mapping[str, Any]]
) -> tuple[float, float, list[float]]:
    """Held-out loss before and after `steps` steps with one seed's adapters and examples; the
    steps' own losses.

    The learning rate rises over the first `WARM_UP` steps: Adam's first updates have their full
    size whatever the gradients', and the larger the model, the more such steps in all matrices at
    once change what it computes.
    """
    recipe, collate = trainer.recipe, trainer.workload.collate(trainer.recipe)
    redraw_lora(trainer.model, seed)
    held_out = examples[::HELD_OUT]
    learn = [example for at, example in enumerate(examples) if at % HELD_OUT]
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
    moved = (on_device(batch, workload.device, False) for batch in batches)
    losses = [workload.loss(model, batch, {}) for batch in moved]
    return float(torch.stack(losses).mean())


def loss_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The final loss of each method of `losses_over_seeds`, and its changes against BF16's."""
    by_seed = against_same_seed(runs)
    frame = to_frame(runs).reindex(columns=["method", "final_loss"])
    changes = {name: ", ".join(f"{one:+.2f}" for one in by_seed[name]) for name in by_seed}
    frame["change"] = frame["method"].map(changes)
    head = ("method", "final loss, median of seeds", "against bf16, seed by seed, %")
    return frame.set_axis(head, axis=1)


# The ladder


LOW_BIT_RUNG = Rung(
    "FP8 weights",
    "same mathematics",
    {"base_linear": "fp8-frozen"},
    "held once, products on FP8 tensor cores",
)


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


def best_rung(climbed: Mapping[str, Run]) -> str:
    """The rung that ran and has the shortest time for a thousand useful tokens.

    Raises `ValueError` where none ran.
    """
    costs = {name: run.metric("ms_per_1k_useful_tokens") for name, run in climbed.items() if run.ok}
    if not costs:
        raise ValueError("No rung of the ladder ran. Each run's status says why.")
    return min(costs, key=costs.get)


def reached(
    varied: Workload, top: Recipe, climbed: Mapping[str, Run], cells: Iterable[Run], rate: float
) -> dict[str, float]:
    """What the ladder gets to, as metrics; what was not measured is absent. Shares of a rate count
    useful tokens only, not padding. Weights are those of language model and projector.

    top: the best rung's recipe, which is compiled once more on `varied`. climbed: the ladder's runs
    with their costs. cells: section 2's, where the same images give FP8 and BF16 weights the same
    tokens. rate: the measured matrix rate in TFLOP/s that shares are taken of.
    """
    metrics = steady(varied, top, warmup=6, steps=10)
    plain, best = climbed["bf16"], climbed[best_rung(climbed)]
    if plain.ok:
        cost = "ms_per_1k_useful_tokens"
        metrics["useful_speedup"] = plain.metric(cost) / best.metric(cost)
    for run in climbed.values():
        share = "mfu_fp8" if run.recipe["base_linear"] == "fp8-frozen" else "mfu_bf16"
        if run.ok:
            useful = run.metrics["tflops"] * run.metrics["useful_tokens"] / rate
            metrics[share] = max(useful, metrics.get(share, 0))
    alone = {run.tags["method"]: run for run in cells if run.ok and run.has(batch=1, again=False)}
    if {"fp8-frozen", BASELINE} <= alone.keys():
        for share, part in (("weights_share", "weights_gb"), ("memory_share", "peak_allocated_gb")):
            metrics[share] = alone["fp8-frozen"].metric(part) / alone[BASELINE].metric(part)
    return metrics


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
