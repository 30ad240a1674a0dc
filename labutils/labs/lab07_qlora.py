"""What lab 07 does beyond recipes: article A3's methods, memory as a line over the batch, and our
own recipes above the article's.

    chosen = method("lora", "long", "checkpointed")     tags, texts, recipe, change of the model
    run = follow(workloads, method("qlora", "short", "batch 1"), steps=12, logs=folder)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from labutils.course.goals import Goal
from labutils.labs.ladders import A3_BASE, A3_LADDER, Rung, climb, in_lanes
from labutils.profiling.memory_model import BatchLine
from labutils.profiling.trace import profile
from labutils.recipe import Recipe
from labutils.results.records import Run, Runs, step_by_step, to_frame
from labutils.training import Benchmark, Trainer
from labutils.training.benchmark import empty_run
from labutils.training.memory_log import (
    followed,
    make_room,
    peak_of_step,
    read_log,
    runs_out_of_memory,
)
from labutils.training.model_edits import (
    cast_as_for_kbit,
    prepared_for_kbit,
    with_costs,
    with_epoch_rate,
)
from labutils.training.unsloth_run import Job
from labutils.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd

# ---------------------------------------------------------------------------- the article's methods


class Method(NamedTuple):
    """A run's name and tags, its texts ("short" or "long"), its recipe, and what is done to the
    model once it is built."""

    name: str
    tags: dict[str, Any]
    texts: str
    recipe: Recipe
    change: Callable[[nn.Module], None] | None


METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"base_linear": "nf4", "checkpointing": "blocks"},
    "unsloth": {"base_linear": "nf4"},
}
"""Method -> the knobs that it sets. "qlora" is QLoRA as usually written: PEFT's
`prepare_model_for_kbit_training` turns checkpointing on, and casts to float32."""
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointed": ({"checkpointing": "blocks"}, {"checkpointing": "blocks"}),
    "offloaded": ({"offloaded": True}, {"checkpointing": "offload"}),
    "4 bits": ({"bits": 4}, {"base_linear": "nf4"}),
    "fp32 casts": ({"casts": "fp32"}, {}),
    "no casts": ({"casts": "no"}, {}),
    "batch 1": ({"batch": 1}, {"micro_batch": 1}),
    "batch 2": ({"batch": 2}, {"micro_batch": 2}),
    "padded": ({"rows": "padded"}, {"shapes": "padded"}),
    "fused loss": ({"fused_loss": True}, {"layers": "rewritten", "loss": "fused"}),
    "packed": (
        {"rows": "packed"},
        {
            "shapes": "packed",
            "token_budget": 4096,
            "micro_batch": 1,
            "driver": "eager",
            "logging": "ring-buffer",
            "non_blocking": True,
        },
    ),
}
"""What a method may be changed by -> the tags of that, and the knobs that it sets. "packed" has the
loop of the ladder's upper rungs as well."""


def method(kind: str, texts: str, *switches: str) -> Method:
    """One of `METHODS` on "short" or "long" texts, changed by some of `SWITCHES`.

    "no casts" leaves QLoRA's casts out; "fp32 casts" does to a LoRA model what they do to QLoRA's.
    """
    recipe, tags = A3_BASE.but(**METHODS[kind]), {"method": kind, "texts": texts}
    for switch in switches:
        more, knobs = SWITCHES[switch]
        tags |= more
        recipe = recipe.but(**knobs)
    change = prepared_for_kbit if kind == "qlora" and "no casts" not in switches else None
    if "fp32 casts" in switches:
        change = cast_as_for_kbit
    return Method(", ".join([f"{kind} {texts}", *switches]), tags, texts, recipe, change)


def follow(
    workloads: Mapping[str, Workload],
    chosen: Method,
    steps: int,
    logs: Path,
    every: int = 10,
    against: Run | None = None,
) -> Run:
    """The run of a method: at least `steps` timed steps, its memory in `logs`/name.csv.

    `memory_share` is its peak over that of the run `against`, where both have one.
    """
    make_room(*workloads.values())
    log, workload = logs / f"{chosen.name}.csv", workloads[chosen.texts]
    run = followed(workload, chosen.recipe, steps, chosen.name, log, every, chosen.change)
    run.tags = {"experiment": "methods"} | chosen.tags
    peak, other_peak = (r.metric("peak_allocated_gb") if r else None for r in (run, against))
    if peak and other_peak:
        run.metrics["memory_share"] = peak / other_peak
    return run


UNSLOTHS = (
    method("unsloth", "long"),
    method("unsloth", "short"),
    method("unsloth", "long", "packed"),
    method("unsloth", "long", "padded", "batch 2"),
    method("unsloth", "long", "padded"),
)
"""unsloth's runs: on both kinds of texts; on the packed rows of our own best recipes, in their loop
and without a mask, as its trainer's padding-free batches are; and for a few steps on each of two
batch sizes of texts padded to the full length. (A batch of 1 would be compiled anew.)"""


def unsloth_jobs(workloads: Mapping[str, Workload], steps: int) -> dict[str, Job]:
    """Name -> job of each of `UNSLOTHS`."""
    jobs = {}
    for one in UNSLOTHS:
        few = 3 if one.tags.get("rows") == "padded" else steps
        tags = {"experiment": "methods"} | one.tags
        jobs[one.name] = Job(workloads[one.texts], one.recipe, few, tags)
    return jobs


def longer_by(run: Run, base: Run) -> float | None:
    """How many percent longer a run's steps are than another's of the same batches, step by step
    (the median over those that both were timed on); None where one failed or none is shared."""
    ratios = [after / before for before, after in step_by_step(base, run)]
    return 100 * (statistics.median(ratios) - 1) if ratios else None


def over_examples(logs: Path, texts: str, column: str) -> dict[str, dict[float, float]]:
    """Of `METHODS` on texts of a length: method -> examples trained on -> a column of its memory
    log, where it has one."""
    lines = {kind: read_log(logs / f"{method(kind, texts).name}.csv") for kind in METHODS}
    batch = A3_BASE.micro_batch
    return {
        kind: {batch * at["step"]: at[column] for at in log if column in at}
        for kind, log in lines.items()
    }


# ---------------------------------------------------------------------------- memory and batch


def memory_line(
    workloads: Mapping[str, Workload],
    chosen: Method,
    batches: Iterable[int],
    card_gb: float | None,
) -> Run:
    """A method's line over `batches` of the longest texts, padded to the full length: the worst
    case.

    Metrics: `base_gb`, `each_gb`, `largest_batch` on a card of `card_gb`, and whether it holds
    here: `fits` at nine tenths of it, `fails` at a tenth more. card_gb: None: nothing is tried.
    """
    make_room(*workloads.values())
    workload, recipe = workloads[chosen.texts], chosen.recipe.but(shapes="padded", micro_batch=1)
    run = empty_run(workload, chosen.recipe, f"memory of {chosen.name}")
    run.tags = {"experiment": "memory"} | chosen.tags
    rows = sorted(workload.dataset(None, recipe), key=lambda row: -len(row["input_ids"]))

    def alone(model: nn.Module) -> None:
        if chosen.change is not None:
            chosen.change(model)
        workload.release_weights()  # kept for other trainers, they would count as this one's

    with Trainer(workload, recipe, on_model=alone) as trainer:

        def peak(batch: int) -> float:
            longest = [rows[place % len(rows)] for place in range(batch)]
            return peak_of_step(trainer, workload.collate(recipe)(longest))

        peak(1)  # the optimizer's state comes with the first step
        line = BatchLine.through({batch: peak(batch) for batch in batches})
        run.metrics = {"base_gb": line.base, "each_gb": line.each}
        if card_gb is not None:
            largest = line.largest(card_gb)
            below, above = max(1, math.floor(0.9 * largest)), math.ceil(1.1 * largest) + 1
            run.metrics |= {
                "largest_batch": largest,
                "fits": int(not runs_out_of_memory(trainer, lambda: peak(below))),
                "fails": int(runs_out_of_memory(trainer, lambda: peak(above))),
            }
    return run


def lines_of(runs: Iterable[Run]) -> dict[str, BatchLine]:
    """Name -> line of each run of `memory_line`; and unsloth's, out of its two runs on padded
    texts, where these are."""
    lines, padded = {}, {}
    for run in runs:
        if run.tags["experiment"] == "memory" and run.ok:
            lines[run.label] = BatchLine(run.metrics["base_gb"], run.metrics["each_gb"])
        elif run.tags.get("rows") == "padded" and run.metric("peak_allocated_gb"):
            batch = run.tags.get("batch", A3_BASE.micro_batch)
            padded[batch] = run.metric("peak_allocated_gb")
    if len(padded) == 2:
        lines["unsloth long"] = BatchLine.through(padded)
    return lines


def bundle_table(runs: Iterable[Run]) -> pd.DataFrame:
    """Time and memory of each change on long texts: runs of `follow` and of `memory_line`, those of
    the same method in one row."""
    import pandas as pd

    timed, memory = {}, {}
    for run in runs:
        kind = run.tags["experiment"]
        tags = frozenset(run.tags.items() - {("experiment", kind)})
        (memory if kind == "memory" else timed)[tags] = run
    base = timed.get(frozenset(method("lora", "long").tags.items()))
    rows = []
    for tags in dict.fromkeys([*timed, *memory]):
        run, line = timed.get(tags), memory.get(tags)
        rows.append(
            {
                "method": (run or line).label,
                "ms per 1,000 useful tokens": run and run.metric("ms_per_1k_useful_tokens"),
                "against lora, step by step, %": longer_by(run, base) if run and base else None,
                "GB at any batch": line and line.metric("base_gb"),
                "GB an example": line and line.metric("each_gb"),
            }
        )
    return pd.DataFrame(rows)


def largest_table(runs: Iterable[Run], cards_gb: Sequence[float]) -> pd.DataFrame:
    """A row a method: the largest batch of texts of full length that its line fits into a card."""
    import pandas as pd

    heads = [f"{card:g} GB" if card >= 1 else f"{1000 * card:g} MB" for card in cards_gb]
    lines = lines_of(runs)
    rows = [[name, *map(line.largest, cards_gb)] for name, line in lines.items()]
    return pd.DataFrame(rows, columns=["largest batch on a card of", *heads])


# ---------------------------------------------------------------------------- our own recipes

LEAST_MEMORY = "4 bits in FP8, checkpointed"
LADDER = A3_LADDER.plus(
    Rung("FP8 weights", "same mathematics", {"base_linear": "fp8-frozen"}, "FP8 tensor cores"),
    Rung("4-bit weights", "same mathematics", {"base_linear": "nf4-frozen"}, "unpacked when used"),
    Rung(
        LEAST_MEMORY,
        "same mathematics",
        # A graph holds memory of its own, and saves compiled blocks no time: 270 ms a step with one
        # on an H200, 269 without.
        {"base_linear": "nf4-fp8", "checkpointing": "blocks", "driver": "eager"},
        "unpacked to FP8, and blocks compute again: least memory",
    ),
)
"""Article A3's ladder with low-bit weights on top, each on the same rung below."""


def recipes_on(device: str) -> dict[str, Recipe]:
    """The recipes of `LADDER` as a `device` climbs it. On a CPU nothing is compiled, which takes a
    minute."""
    if device == "cuda":
        return climb(LADDER)
    plain = {"compile": "off", "compile_scope": "model", "dynamic": "automatic"}
    return {name: recipe.but(**plain) for name, recipe in climb(LADDER).items()}


def climbed_on(
    workload: Workload, recipes: Mapping[str, Recipe], steps: int, rounds: int, warmup: int
) -> dict[str, Run]:
    """The runs of the ladder's rungs, in their lanes: `rounds` times the same `steps` batches or
    more, with costs and an epoch's rates.

    Rungs that share the 16-bit weights are interleaved; those with weights of their own come after
    them, so that these aren't beside the first rung, which needs more memory than all others.
    """
    shared = {n: r for n, r in recipes.items() if r.base_linear == "published"}
    own = {n: r for n, r in recipes.items() if n not in shared}
    runs: dict[str, Run] = {}
    for rungs in filter(None, (shared, own)):
        make_room(workload)
        with Benchmark(workload, warmup, same_batches=True) as bench:
            runs |= bench.compare(rungs, steps, rounds, tags=LADDER.tags())
    return in_lanes(
        {name: with_epoch_rate(with_costs(run), workload) for name, run in runs.items()}, LADDER
    )


def step_by_kind(workload: Workload, recipe: Recipe, folder: Path, steps: int = 2) -> Run:
    """What kinds of work a step of `recipe` is made of, from a trace of `steps` steps in `folder`.

    Metric `kernel_categories`: kind -> {"ms", "count"} a step, the most time first; without a GPU,
    operators' own time.
    """
    make_room(workload)
    with Trainer(workload, recipe) as trainer:  # the first steps compile
        trace = profile(trainer, steps, folder, with_stack=False, wait=2, with_shapes=True)
    run = empty_run(workload, recipe, "step by kind")
    run.tags = {"experiment": "step by kind"}
    run.metrics["kernel_categories"] = trace.categories()
    return run


def rungs_table(runs: Iterable[Run]) -> pd.DataFrame:
    """The ladder's rungs, with the floor of each and its share of the mean step."""
    frame = to_frame(runs)
    mean = [statistics.fmean(run.samples["step_ms"]) for run in runs]
    columns = {
        "run": "rung",
        "useful_tokens_per_s": "useful tokens/s",
        "peak_allocated_gb": "peak, GB",
        "first_step_s": "first step, s",
        "floor_ms": "floor, ms",
    }
    table = frame.reindex(columns=list(columns)).rename(columns=columns)
    table["floor / step, %"] = 100 * table["floor, ms"] / mean
    return table


GOALS = {
    "useful_tokens_per_s": Goal("BF16: useful tokens/s", least=17_000),
    "useful_speedup": Goal("BF16: times the article's LoRA run", least=1.9),
    "fp8_useful_tokens_per_s": Goal("FP8 weights: useful tokens/s", least=20_000),
    "small_over_unsloth": Goal(
        f"{LEAST_MEMORY}: times unsloth's useful tokens/s, both packed", least=1.3
    ),
    "small_memory_over_unsloth": Goal("the same: times unsloth's peak memory", most=1.5),
    "small_over_unsloth_padded": Goal(
        "the same: times unsloth's useful tokens/s on padded batches"
    ),
}
"""Metric of `reached` -> what it is, and what we aimed at on an H200."""


def reached(climbed: Mapping[str, Run], runs: Runs) -> dict[str, Any]:
    """What the ladder's rungs get to, as metrics named in `GOALS`; what can't be said here is
    absent.

    Of `runs`, unsloth's are looked at: the packed one for both goals, as packing alone is worth
    more than most of what a library does; the padded one for a second number, which says what its
    usual batches would have been worth.
    """
    able = {name: run for name, run in climbed.items() if run.ok}
    metrics: dict[str, Any] = {}
    if bf16 := [able[rung.name] for rung in A3_LADDER if rung.name in able]:
        best = max(bf16, key=_rate)
        metrics["useful_tokens_per_s"] = best.metrics["useful_tokens_per_s"]
        if "lora" in able:
            metrics["useful_speedup"] = _rate(best) / _rate(able["lora"])
    if "FP8 weights" in able:
        metrics["fp8_useful_tokens_per_s"] = able["FP8 weights"].metrics["useful_tokens_per_s"]
    rivals = {"small_over_unsloth": "packed", "small_over_unsloth_padded": False}
    small = able.get(LEAST_MEMORY)
    for metric, rows in rivals.items():
        rival = runs.one(method="unsloth", texts="long", rows=rows)
        if small and rival and rival.ok:
            metrics[metric] = _rate(small) / _rate(rival)
            peaks = [run.metric("peak_allocated_gb") for run in (small, rival)]
            if rows and all(peaks):
                metrics["small_memory_over_unsloth"] = peaks[0] / peaks[1]
    return metrics


def _rate(run: Run) -> float:
    return run.metric("useful_tokens_per_s")
