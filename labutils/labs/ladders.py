"""The ladders: from each article's starting point to as far as we get, one rung at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from labutils.recipe import STOCK, Recipe
from labutils.results.records import LANES, Run


class Rung(NamedTuple):
    """One step of a ladder: what it changes of the rung above, in which lane, and why one would."""

    name: str
    lane: str
    changes: dict[str, Any]
    why: str


class Ladder:
    """The recipe that a climb starts from, and the rungs in order. Iterates over rungs."""

    def __init__(self, start: Recipe, *rungs: Rung) -> None:
        self.start, self.rungs = start, rungs

    def __iter__(self) -> Iterator[Rung]:
        return iter(self.rungs)

    def tags(self) -> dict[str, dict[str, str]]:
        """Rung's name -> the tags of its run."""
        return {rung.name: {"experiment": "ladder", "rung": rung.name} for rung in self.rungs}


ARTICLE, WORK, MATHEMATICS = LANES
WORKERS = {"num_workers": 8, "persistent_workers": True}
NO_WORKERS = {"num_workers": 0, "persistent_workers": False}
NO_WAITS = {"logging": "ring-buffer", "optimizer": "adamw-fused"}
CHANNELS_LAST = {"memory_format": "channels_last", "layers": "rewritten", "cudnn_benchmark": True}
CACHED = {"cache": "latents+text"} | NO_WORKERS
FOLDED = {"micro_batch": 4, "accumulation": 1, "streams": 1, "adapter": "folded"} | CHANNELS_LAST
A1_LADDER = Ladder(
    STOCK,
    Rung("stock", ARTICLE, {}, "the public script as downloaded"),
    Rung("workers", ARTICLE, {"num_workers": 3}, "images are decoded beside the training"),
    Rung("compile", ARTICLE, {"compile": "default"}, "fewer kernels, less Python between them"),
    Rung("pinned", ARTICLE, {"pin_memory": True, "non_blocking": True}, "no wait for copies"),
    Rung("no host waits", WORK, {"driver": "eager"} | NO_WAITS, "no accelerate, no loss is read"),
    Rung("whole-step graph", WORK, {"driver": "graph"} | WORKERS, "one launch for four images"),
    Rung("side by side", WORK, {"streams": 4}, "one image's kernels don't fill the GPU"),
    Rung("cached encoders", MATHEMATICS, CACHED, "frozen: ask once, sample anew each step"),
    Rung("folded LoRA", MATHEMATICS, FOLDED, "one batch of four, channels last; W + BA once"),
)
"""From article A1's starting point to as far as we get; each rung keeps the changes of those above
it.
"""


A2_BASE = Recipe(accumulation=1, rank=8, precision="bf16", driver="eager", dynamic="automatic")
"""Article A2's starting point: a plain BF16 loop over images as they come, no workers, micro-batch
1.
"""


FOUR = {"micro_batch": 4, "loss": "answers"}
ROWS = {"micro_batch": 1, "shapes": "packed", "token_budget": 8192, "dynamic": "static"}
A2_LADDER = Ladder(
    A2_BASE,
    Rung("bf16", ARTICLE, {}, "the plain loop, as the article starts"),
    Rung(
        "no host waits",
        WORK,
        {"layers": "rewritten", **NO_WAITS},
        "image tokens' places from the collator, a forward pass without checks, no loss read",
    ),
    Rung(
        "blocks compiled",
        WORK,
        {"compile": "default", "compile_scope": "blocks"},
        "one block's code for all of them, from the second length on for any",
    ),
    Rung("four a batch", MATHEMATICS, FOUR, "padded batches, logits of answers only"),
    Rung("packed", MATHEMATICS, ROWS, "as many tokens without padding, in rows of one length"),
)
"""From article A2's starting point on, AnyRes and BF16 kept; each rung keeps the changes of those
above it.
"""


A3_BASE = Recipe(
    micro_batch=4,
    accumulation=1,
    rank=8,
    precision="bf16",
    driver="accelerate",
    dynamic="automatic",
    optimizer="adamw-fused",
    learning_rate=2e-4,
    max_grad_norm=0.3,
    pin_memory=True,
    predict="everything",
)
"""Article A3's starting point: its plain LoRA run of Qwen3-8B with a batch of 4.

Rank 8, alpha 16, all seven projections, these rates and BF16 are the article's. The loop is
accelerate's, as in transformers' and TRL's trainers, on whole conversations. The article asks for
`adamw_torch`; the fused AdamW is the same update in one kernel. A constant rate and a weight decay
of 0.01 are the course's. TRL turns gradient checkpointing on by default. Here it is off, and
belongs to QLoRA's preparation."""


def climb(ladder: Ladder) -> dict[str, Recipe]:
    """Rung's name -> recipe, each rung adds its changes to the one above."""
    recipe, recipes = ladder.start, {}
    for rung in ladder:
        recipe = recipes[rung.name] = recipe.but(**rung.changes)
    return recipes


def distinct_on(device: str, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Those of a ladder's `recipes` that a `device` can tell from every rung above, in order."""
    distinct: dict[Recipe, str] = {}
    for name, recipe in recipes.items():
        distinct.setdefault(recipe.fitted_to(device), name)
    return {name: recipes[name] for name in distinct.values()}


def rung_rows(ladder: Ladder, climbable: Mapping[str, Recipe]) -> list[tuple[Any, ...]]:
    """Rows (rung, lane, what it changes, why, what is to be said about it here) of a ladder."""
    return [
        (
            rung.name,
            rung.lane,
            ", ".join(f"`{knob}={value!r}`" for knob, value in rung.changes.items()) or None,
            rung.why,
            None if rung.name in climbable else "on a CPU no different from one above",
        )
        for rung in ladder
    ]


def in_lanes(runs: Mapping[str, Run], ladder: Ladder) -> dict[str, Run]:
    """Name -> run of `runs`, each put into the lane of the ladder's rung that it is tagged as; what
    is beside the ladder is the same mathematics."""
    lanes = {rung.name: rung.lane for rung in ladder}
    for run in runs.values():
        run.lane = lanes.get(run.tags.get("rung", ""), MATHEMATICS)
    return dict(runs)
