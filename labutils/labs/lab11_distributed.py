"""Lab 11's trainings on several GPUs: which are launched, and how they compare.

A case is one kind of training: Stable Diffusion's LoRA or all of its UNet, an 8 B model's LoRA or a
small one whole. One process does what each rank does: so N of them should take N times the examples
in the same time. Runs are told apart by their tags: workload, trained ("lora", "full"), strategy
("one process", "ddp", "fsdp"), ranks, and what is changed of the plain strategy.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from labutils.labs.ladders import A3_BASE
from labutils.profiling import cuda, ddp_model
from labutils.profiling.collectives import SAY_ALL, SIZES, Link, read_nccl_log, read_topology
from labutils.recipe import STOCK, Recipe, Unavailable
from labutils.results.effects import time_effect
from labutils.results.records import Run, Runs, summarise
from labutils.training.launch_worker import Task
from labutils.training.launcher import Ended, launch

SD_RECIPE = STOCK.but(
    driver="eager",
    precision="bf16",
    cache="latents+text",
    logging="ring-buffer",
    optimizer="adamw-fused",
    accumulation=1,
)
"""Lab 04's loop, eager, in BF16, from encoded examples: nothing but the UNet, and no file to wait
for. (Channels last would be faster, and `fully_shard` takes no such weights.)"""
SD_BATCH = {"tiny": 2, "small": 4, "full": 16}
"""Its examples in a micro-batch. With few, a step lasts as long as the host takes to launch it."""
WHOLE_BATCH = SD_BATCH | {"full": 8}
"""The same where all weights are trained. With many, what is sharded would be lost among
activations."""
QWEN_RECIPE = A3_BASE.but(
    driver="eager",
    adapter="plain",
    logging="ring-buffer",
    non_blocking=True,
    layers="rewritten",
    loss="fused",
    shapes="padded",
    token_budget=2048,
    micro_batch=2,
    accumulation=1,
)
"""Lab 07's plain loop on rows of one length: else ranks would wait for the longest."""
QWEN_FULL_RECIPE = QWEN_RECIPE.but(adapter="none", layers="published", loss="logits")
ACCUMULATED = 4
"""Micro-batches that a rank accumulates in the runs about `no_sync`."""
TRACED = 2
"""Optimizer steps in a trace: reading one takes a second or two."""
CRASH_STEPS = 8
"""Optimizer steps of the run that ranks die in."""


@dataclass(frozen=True)
class Case:
    """One kind of training: its title, what begins its runs' names, what `open_workload` is told in
    the ranks, the recipe of one rank's share, and whether all its weights are trained."""

    title: str
    prefix: str
    opened: dict[str, str]
    recipe: Recipe
    trained: str

    @property
    def tags(self) -> dict[str, Any]:
        workload = self.opened["name"]
        return {"experiment": "training", "workload": workload, "trained": self.trained}

    def for_ranks(self, ranks: int, micro_steps: int = 1, **changes: Any) -> Recipe:
        """The recipe of a step that `ranks` share, each taking `micro_steps` micro-batches."""
        return self.recipe.but(accumulation=ranks * micro_steps, **changes)

    def task(self, what: str, recipe: Recipe, tags: Mapping[str, Any], **options: Any) -> Task:
        """A task that times this recipe, and whose run has this case's tags and `tags`."""
        name, tags = f"{self.prefix} {what}".strip(), self.tags | dict(tags)
        return Task("train", name, self.opened, recipe.as_dict(), tags=tags, **options)

    def run(self, runs: Iterable[Run], strategy: str, **tags: Any) -> Run | None:
        """The run of this case that has these tags and no others, if it went well."""
        run = Runs(runs).one(**self.tags, strategy=strategy, **tags)
        return run if run is not None and run.ok else None


def cases(lab: Any) -> list[Case]:
    """The lab's cases at its scale."""

    def opened(name: str, scale: str) -> dict[str, str]:
        sources = {"weights": lab.weights, "data": lab.data, "cache_dir": str(lab.cache_dir)}
        return {"name": name, "scale": scale} | sources

    sd, qwen = opened("sd15-lora", lab.scale), opened("qwen3-lora-long", lab.scale)
    small = opened("qwen3-lora-long", "tiny" if lab.scale == "tiny" else "small")
    lora = SD_RECIPE.but(micro_batch=SD_BATCH[lab.scale])
    whole = SD_RECIPE.but(adapter="none", micro_batch=WHOLE_BATCH[lab.scale])
    return [
        Case("SD 1.5, LoRA", "", sd, lora, "lora"),
        Case("SD 1.5, whole UNet", "full", sd, whole, "full"),
        Case("Qwen3, LoRA", "qwen", qwen, QWEN_RECIPE, "lora"),
        Case("small Qwen3, whole", "qwen full", small, QWEN_FULL_RECIPE, "full"),
    ]


# --------------------------------------------------------------------------------- what is launched


def plan_alone(chosen: Sequence[Case], ranks: int, steps: int, tiny: bool) -> list[Task]:
    """The link, and each case on one process: rank 0 by itself, while the others wait.

    Behind the first case comes its whole global batch, of which the losses are wanted.
    """
    sizes = SIZES[::3] if tiny else SIZES
    link = Task("all-reduce", "all-reduce", sizes=sizes, tags={"experiment": "all-reduce"})
    tags = {"strategy": "one process", "ranks": 1}
    options = {"steps": steps, "warmup": 1 if tiny else 2, "alone": True, "arrivals": True}
    shares = [case.task("one process", case.recipe, tags, **options) for case in chosen]
    same, whole = tags | {"same_batch": True}, chosen[0].for_ranks(ranks)
    batch = chosen[0].task("one process, same batch", whole, same, steps=CRASH_STEPS, alone=True)
    shares.insert(1, replace(batch, kind="run"))
    return [link, *shares]


def plan_together(chosen: Sequence[Case], ranks: int, steps: int, tiny: bool) -> list[Task]:
    """What all ranks do: DDP of all cases and what can be changed about it, then FSDP.

    At tiny, where starting takes longer than all steps, only the larger gradients are varied.
    """
    timed = {"steps": steps, "warmup": 1 if tiny else 2}
    traced = timed | {"traced": TRACED}
    fewer = timed | {"steps": max(4, steps // 2)}  # each is several times as long
    ddp, fsdp = {"strategy": "ddp", "ranks": ranks}, {"strategy": "fsdp", "ranks": ranks}
    plan, sharded = [], []
    for case in chosen:
        sd, whole = case.opened["name"] == "sd15-lora", case.trained == "full"
        shared, several = case.for_ranks(ranks), case.for_ranks(ranks, 2 if tiny else ACCUMULATED)
        changes = [("", shared, {}, traced)]
        if sd and (whole or not tiny):
            changes += [
                (" bucket 1MB", shared.but(bucket_cap_mb=1), {"bucket_mb": 1}, timed),
                (" no_sync", several, {"sync": "no_sync"}, fewer),
                (" sync each", several.but(synchronise="each"), {"sync": "sync each"}, fewer),
            ]
        if sd and whole and not tiny:
            view = shared.but(gradient_as_bucket_view=True)
            changes.append((" bucket view", view, {"bucket_view": True}, timed))
        if not sd and not whole and not tiny:
            uneven = shared.but(shapes="as-they-come")
            changes.append((" as they come", uneven, {"rows": "as they come"}, traced))
        for suffix, recipe, tags, options in changes:
            plan.append(case.task(f"ddp {ranks}{suffix}", recipe, ddp | tags, **options))
        if sd or not tiny:
            how = timed if tiny else traced
            sharded.append(case.task(f"fsdp {ranks}", shared.but(parallel="fsdp"), fsdp, **how))
    return plan + sharded


TIMEOUT_S = {"random": 900.0, "hub": 7200.0}
"""How long a launch may take, by where weights or data are from: the hub's are downloaded in it."""


def measured(
    lab: Any,
    tasks: Sequence[Task],
    ranks: int,
    device: str,
    into: list[Run],
    judge: Callable[[Run], Run] = lambda run: run,
) -> None:
    """Add the runs of `tasks`, each as `judge` has it, to `into`.

    They are as an interrupted lab left them, or launched now; each is kept as soon as it is there.
    A task that a rank fails in ends the launch: it is on record with the reason, and so are those
    behind it. Raises for that failure.
    """
    recipes = {task.name: Recipe(**task.recipe) if task.recipe else None for task in tasks}
    taken = lab.take_left(recipes)
    into += taken.values()

    def keep(run: Run) -> None:
        into.append(judge(run))
        lab.keep(run, lane="same work")

    left = [task for task in tasks if task.name not in taken]
    if not left:
        return
    timeout_s = TIMEOUT_S["hub" if "hub" in (lab.weights, lab.data) else "random"]
    ended = launch(left, ranks, device, timeout_s, each=keep)
    undone = [task for task in left if task.name not in ended.runs]
    for task in undone:
        status = error_of(ended)
        if task is not undone[0]:
            status = f"error: not run, as the launch ended in *{undone[0].name}*"
        lab.keep(Run("11", task.name, status=status, recipe=task.recipe, tags=task.tags))
    ended.or_raise()


def error_of(ended: Ended) -> str:
    """What a run's status says of a launch that failed."""
    return f"error: {' '.join(ended.message.split())}"


def device_for(lab: Any) -> str:
    """Where the ranks compute: on GPUs, one each, or at `tiny`, where there are fewer, on the CPU.

    Raises `Unavailable` where neither is meant.
    """
    if (gpus := cuda.count()) > 1:
        return "cuda"
    if lab.scale == "tiny":
        return "cpu"
    raise Unavailable(
        f"several GPUs are needed at scale {lab.scale}, and this machine shows {gpus}; --scale "
        "tiny runs two processes on the CPU"
    )


# ------------------------------------------------------------------------------ what it comes to


def predictions(case: Case, one: Run, link: Link) -> dict[str, ddp_model.PredictedStep]:
    """Run's name -> prediction, for those runs of a case that the model speaks about."""
    each = {f"ddp {link.ranks}": ddp_model.ddp(one, link)}
    if case.opened["name"] == "sd15-lora":
        each[f"ddp {link.ranks} bucket 1MB"] = ddp_model.ddp(one, link, cap_mb=1)
    each[f"fsdp {link.ranks}"] = ddp_model.fsdp(one, link)
    return {f"{case.prefix} {what}".strip(): prediction for what, prediction in each.items()}


def with_efficiency(run: Run, one: Run | None, prediction: ddp_model.PredictedStep | None) -> Run:
    """The run with `efficiency` against one process, and what was predicted, where they apply."""
    if run.ok and one is not None:
        run.metrics["efficiency"] = ddp_model.efficiency(one, run)
        if prediction:
            names = ("step_ms", "efficiency", "exposed_ms")
            run.metrics |= {f"predicted_{name}": getattr(prediction, name) for name in names}
    return run


PAIRS = {
    "after each micro-batch -> no_sync": ({"sync": "sync each"}, {"sync": "no_sync"}),
    "buckets of 25 MiB -> of 1": ({}, {"bucket_mb": 1}),
    "gradients beside buckets -> in them": ({}, {"bucket_view": True}),
    "DDP -> FSDP": ({}, {"strategy": "fsdp"}),
    "rows of one length -> as they come": ({}, {"rows": "as they come"}),
}
"""What is changed -> the tags of the run before and after, beside DDP's."""


def comparisons(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a pair of runs that differ in one knob."""
    known = Runs(runs)
    rows = []
    for title, (before_tags, after_tags) in PAIRS.items():
        for plain in known.select(experiment="training", strategy="ddp", **PLAIN):
            before, after = (known.one(**plain.tags | tags) for tags in (before_tags, after_tags))
            if before is None or after is None:
                continue
            # As the medians beside it: all steps, whatever they took in.
            both = [of_times(run, run.samples["step_ms"]) for run in (before, after)]
            effect = time_effect(*both)
            rows.append(
                {
                    "training": f"{plain.workload}, {plain.tags['trained']}",
                    "one change": title,
                    "from, ms": before.metric("step_ms"),
                    "to, ms": after.metric("step_ms"),
                    "step": effect.text() if effect else None,
                    "memory, from GB": before.metric("peak_allocated_gb"),
                    "to GB": after.metric("peak_allocated_gb"),
                }
            )
    return pd.DataFrame(rows)


PLAIN = {"sync": False, "bucket_mb": False, "bucket_view": False, "rows": False}
"""Tags that a plain DDP run doesn't have."""


def beside_others(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a case with a `no_sync` run: a micro-batch alone, and beside ranks, sending nothing.

    The latter is a `no_sync` step less a step of one micro-batch, which stands for the last one,
    that does send.
    """
    known, rows = Runs(runs), []
    for several in known.select(experiment="training", sync="no_sync"):
        base = {key: several.tags[key] for key in ("experiment", "workload", "trained")}
        alone = known.one(**base, ranks=1, strategy="one process")
        one = known.one(**base, ranks=several.tags["ranks"], strategy="ddp")
        if alone is None or one is None:
            continue
        unsent = several.recipe["accumulation"] / several.metrics["ranks"] - 1
        last = one.metric("step_ms")
        times = [(ms - last) / unsent for ms in several.samples["step_ms"]]
        beside = of_times(several, times)
        effect = time_effect(of_times(alone, alone.samples["step_ms"]), beside)
        rows.append(
            {
                "training": f"{several.workload}, {several.tags['trained']}",
                "one process alone, ms a micro-batch": alone.metric("step_ms"),
                "beside others, sending nothing, ms": beside.metric("step_ms"),
                "longer by": effect.text() if effect else None,
            }
        )
    return pd.DataFrame(rows)


def of_times(run: Run, step_ms: Sequence[float]) -> Run:
    """The run as if its steps had taken these times, whatever they took in."""
    return replace(run, metrics={"step_ms": summarise(step_ms)}, samples={"step_ms": list(step_ms)})


def topology() -> Run:
    """What connects the GPUs by `nvidia-smi topo -m`: how many `connections`, and each one's name.

    Raises `Unavailable` with fewer than two GPUs.
    """
    if cuda.count() < 2:
        raise Unavailable("a connection takes two GPUs, and this machine shows fewer")
    command = ["nvidia-smi", "topo", "-m"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    named = {f"GPU {a} and GPU {b}": link for (a, b), link in read_topology(shown).items()}
    metrics = {"connections": len(named), "named": named}
    return Run("11", "topology", metrics=metrics, tags={"experiment": "topology"})


# ------------------------------------------------------------------------------------ a rank dies


EVENTS = ("rank killed", "rank raises", "resumed on fewer ranks")


def crashes(case: Case, ranks: int, device: str, events: Sequence[str] = EVENTS) -> dict[str, Run]:
    """Rank 1 is killed after five steps; all go on, and it raises after seven; as many as can share
    the batch without it go on to the end. All from the same checkpoints, one every second step.
    Only those of the three that `events` names.

    Metrics of the first two: `failed`, `first_rank`, `left_behind` (processes that had to be
    ended), `checkpoint_step` and `message`.
    """
    recipe = case.for_ranks(ranks).as_dict()  # the global batch, however many train
    runs = {}
    with tempfile.TemporaryDirectory(prefix="checkpoints-", ignore_cleanup_errors=True) as folder:
        always = {"steps": CRASH_STEPS, "folder": folder, "checkpoint_every": 2}
        for event, on, options in (
            ("rank killed", ranks, {"fail": "kill", "fails": (1, 5)}),
            ("rank raises", ranks, {"fail": "raise", "fails": (1, 7), "resume": True}),
            ("resumed on fewer ranks", fewer_than(ranks), {"resume": True}),
        ):
            if event not in events:
                continue
            task = Task("run", event, case.opened, recipe, **always | options)
            ended = launch([task], on, device, timeout_s=240)
            run = runs[event] = ended.runs.get(event) or Run("11", event)
            run.tags = {"experiment": "crash", "event": event}
            if task.fail:
                run.metrics = {
                    "failed": int(bool(ended.message)),
                    "left_behind": len(ended.left),
                    "message": ended.message,
                }
                places = {"first_rank": ended.first, "checkpoint_step": ended.checkpoint_step}
                run.metrics |= {name: n for name, n in places.items() if n is not None}
            elif ended.message:
                run.status = error_of(ended)
    return runs


def fewer_than(ranks: int) -> int:
    """The most ranks below `ranks` that can share its batch evenly."""
    return max(count for count in range(1, max(2, ranks)) if ranks % count == 0)


# ------------------------------------------------------------------------------ NCCL's variables

TRIED_SIZES = (2**10, 2**20, 2**26)


def nccl_trial(ranks: int, settings: Mapping[str, str]) -> Run:
    """The all-reduce's times with these variables, in a launch of its own: NCCL reads them once.

    `metrics` holds what it says of its ways as well.
    """
    words = " ".join(f"{variable}={value}" for variable, value in settings.items())
    tags = {"experiment": "nccl", "settings": words}
    task = Task("all-reduce", f"nccl {words}", sizes=TRIED_SIZES, tags=tags)
    ended = launch([task], ranks, "cuda", 150, SAY_ALL | dict(settings))
    run = ended.runs.get(task.name) or Run("11", task.name, status=error_of(ended), tags=tags)
    said = read_nccl_log(ended.log)
    said["transport"] = ", ".join(said.pop("transports", {}))
    said["chosen"] = said.pop("chosen", {}).get(max(TRIED_SIZES))
    run.metrics |= {name: value for name, value in said.items() if value}
    return run


def slower(trials: Iterable[Run], settings: str) -> float | None:
    """How many times as long the largest message takes in that trial as with nothing set."""
    known = Runs(run for run in trials if run.ok)
    usual, other = (known.one(settings=words) for words in ("NCCL_DEBUG=INFO", settings))
    if usual is None or other is None:
        return None
    return other.metric("largest_ms") / usual.metric("largest_ms")
