"""Lab 10's trainings on several GPUs: which are launched, and how they compare.

A case is one kind of training: Stable Diffusion's LoRA or all of its UNet, an 8 B model's LoRA or a
small one whole. One process does what each rank does: so N of them should take N times the examples
in the same time. Runs are told apart by their tags: workload, trained ("lora", "full"), strategy
("one process", "ddp", "fsdp"), ranks, and what is changed of the plain strategy.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from labutils.labs.ladders import A3_BASE
from labutils.profiling import ddp_model
from labutils.profiling.collectives import SAY_ALL, SIZES, Link, read_nccl_log, read_topology
from labutils.recipe import STOCK, Recipe, Unavailable
from labutils.results.effects import time_effect
from labutils.results.records import Run, Runs, summarise
from labutils.training.launch_worker import Task
from labutils.training.launcher import TIMEOUT_S, Ended, gpu_count, launch

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
class Planned:
    """A task of a launch, and the tags of its run."""

    task: Task
    tags: dict[str, Any]


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

    def planned(
        self, what: str, recipe: Recipe, ranks: int, tags: Mapping[str, Any], **options: Any
    ) -> Planned:
        name = f"{self.prefix} {what}".strip()
        task = Task(options.pop("kind", "train"), name, self.opened, recipe.as_dict(), **options)
        return Planned(task, self.tags | {"ranks": ranks} | dict(tags))

    def run(self, runs: Iterable[Run], strategy: str, **tags: Any) -> Run | None:
        """The run of this case that has these tags and no others, if it went well."""
        run = Runs(runs).one(**self.tags, strategy=strategy, **tags)
        return run if run is not None and run.ok else None


def cases(lab: Any) -> list[Case]:
    """The lab's cases at its scale."""

    def opened(name: str, scale: str) -> dict[str, str]:
        sources = {"weights": lab.weights, "data": lab.data, "cache_dir": str(lab.cache_dir)}
        return {"name": name, "scale": scale} | sources

    tiny = lab.scale == "tiny"
    sd, qwen = opened("sd15-lora", lab.scale), opened("qwen3-lora-long", lab.scale)
    small = opened("qwen3-lora-long", "tiny" if tiny else "small")
    lora = SD_RECIPE.but(micro_batch=SD_BATCH[lab.scale])
    whole = SD_RECIPE.but(adapter="none", micro_batch=WHOLE_BATCH[lab.scale])
    return [
        Case("SD 1.5, LoRA", "", sd, lora, "lora"),
        Case("SD 1.5, whole UNet", "full", sd, whole, "full"),
        Case("Qwen3, LoRA", "qwen", qwen, QWEN_RECIPE, "lora"),
        Case("small Qwen3, whole", "qwen full", small, QWEN_FULL_RECIPE, "full"),
    ]


# --------------------------------------------------------------------------------- what is launched


def plan_alone(chosen: Sequence[Case], ranks: int, steps: int, tiny: bool) -> list[Planned]:
    """The link, and each case on one process: rank 0 by itself, while the others wait.

    Behind the first case comes its whole global batch, of which the losses are wanted.
    """
    sizes = SIZES[::3] if tiny else SIZES
    plan = [Planned(Task("all-reduce", "all-reduce", sizes=sizes), {"experiment": "all-reduce"})]
    tags = {"strategy": "one process"}
    options = {"steps": steps, "warmup": 1 if tiny else 2, "alone": True, "arrivals": True}
    for case in chosen:
        plan.append(case.planned("one process", case.recipe, 1, tags, **options))
    first = chosen[0]
    whole = {"kind": "run", "steps": CRASH_STEPS, "alone": True}
    same, recipe = tags | {"same_batch": True}, first.for_ranks(ranks)
    plan.insert(2, first.planned("one process, same batch", recipe, 1, same, **whole))
    return plan


def plan_together(chosen: Sequence[Case], ranks: int, steps: int, tiny: bool) -> list[Planned]:
    """What all ranks do: DDP of all cases and what can be changed about it, then FSDP.

    At tiny, where starting takes longer than all steps, only the larger gradients are varied.
    """
    timed = {"steps": steps, "warmup": 1 if tiny else 2}
    traced = timed | {"traced": TRACED}
    fewer = timed | {"steps": max(4, steps // 2)}  # each is several times as long
    plan, sharded = [], []
    for case in chosen:
        sd = case.opened["name"] == "sd15-lora"

        def ddp(suffix: str, recipe: Recipe, options: Mapping, case: Case = case, **tags: Any):
            own = {"strategy": "ddp"} | tags
            plan.append(case.planned(f"ddp {ranks}{suffix}", recipe, ranks, own, **options))

        shared = case.for_ranks(ranks)
        ddp("", shared, traced)
        if sd and (case.trained == "full" or not tiny):
            several = case.for_ranks(ranks, 2 if tiny else ACCUMULATED)
            ddp(" bucket 1MB", shared.but(bucket_cap_mb=1), timed, bucket_mb=1)
            ddp(" no_sync", several, fewer, sync="no_sync")
            ddp(" sync each", several.but(synchronise="each"), fewer, sync="sync each")
        if sd and case.trained == "full" and not tiny:
            view = shared.but(gradient_as_bucket_view=True)
            ddp(" bucket view", view, timed, bucket_view=True)
        if not sd and case.trained == "lora" and not tiny:
            ddp(" as they come", shared.but(shapes="as-they-come"), traced, rows="as they come")
        if sd or not tiny:
            recipe, tags = shared.but(parallel="fsdp"), {"strategy": "fsdp"}
            sharded.append(case.planned(f"fsdp {ranks}", recipe, ranks, tags, **traced))
    return plan + sharded


TASK_S = 40.0
"""How long one of many tasks may take on average."""
DOWNLOADING = {"timeout_s": 7200.0, "patience_s": 3600.0}
"""How long a launch may take, and ranks wait, where checkpoints may have to be downloaded."""


def measured(
    lab: Any,
    plan: Sequence[Planned],
    ranks: int,
    device: str,
    into: list[Run],
    judge: Callable[[Run], Run] = lambda run: run,
) -> None:
    """Add the runs of a plan, each as `judge` has it, to `into`.

    They are as an interrupted lab left them, or launched now; each is kept as soon as it is there.
    A task that a rank fails in is on record with why, and another launch does those behind it.
    Raises for the first one once all is done, or two launches in a row brought nothing.
    """
    tags = {planned.task.name: planned.tags for planned in plan}
    tasks = [planned.task for planned in plan]
    recipes = {task.name: Recipe(**task.recipe) if task.recipe else None for task in tasks}
    taken = lab.take_left(recipes)
    into += taken.values()
    options = {"timeout_s": max(TIMEOUT_S, TASK_S * len(tasks))}
    if "hub" in (lab.weights, lab.data):
        options = DOWNLOADING

    def keep(run: Run) -> None:
        run.tags = tags[run.run]
        into.append(judge(run))
        lab.keep(run, lane="same work")

    ended: list[Ended] = []
    left = [task for task in tasks if task.name not in taken]
    while left and (len(ended) < 2 or ended[-1].runs or ended[-2].runs):
        ended.append(launch(left, ranks, device, each=keep, **options))
        left = [task for task in left if task.name not in ended[-1].runs]
        if ended[-1].ok:
            break
        if left:
            failed = left.pop(0)  # they are done one after the other
            status = error_of(ended[-1])
            own = {"recipe": failed.recipe, "tags": tags[failed.name]}
            lab.keep(Run("10", failed.name, status=status, **own))
    for one in ended:
        one.or_raise()


def error_of(ended: Ended) -> str:
    """What a run's status says of a launch that failed."""
    return f"error: {' '.join(ended.message.split())}"


def device_for(lab: Any) -> str:
    """Where the ranks compute: on GPUs, one each, or at `tiny`, where there are fewer, on the CPU.

    Raises `Unavailable` where neither is meant.
    """
    if (gpus := gpu_count()) > 1:
        return "cuda"
    if lab.scale == "tiny":
        return "cpu"
    raise Unavailable(
        f"several GPUs are needed at scale {lab.scale}, and this machine shows {gpus}; --scale "
        "tiny runs two processes on the CPU"
    )


# ------------------------------------------------------------------------------ what it comes to


def link_of(run: Run) -> Link:
    return Link.of(run.samples, run.metrics["ranks"])


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
            run.metrics |= {
                "predicted_step_ms": prediction.step_ms,
                "predicted_efficiency": prediction.efficiency,
                "predicted_exposed_ms": prediction.exposed_ms,
            }
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
        for plain in known.select(experiment="training", strategy="ddp", **_plain()):
            base = {key: plain.tags[key] for key in ("experiment", "workload", "trained", "ranks")}
            own = base | {"strategy": "ddp"}
            before, after = (known.one(**own | tags) for tags in (before_tags, after_tags))
            if before is None or after is None:
                continue
            # As the medians beside it: all steps, whatever they took in.
            effect = time_effect(
                *(of_times(run, run.samples["step_ms"]) for run in (before, after))
            )
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


def _plain() -> dict[str, bool]:
    """Tags that a plain DDP run doesn't have."""
    return dict.fromkeys(("sync", "bucket_mb", "bucket_view", "rows"), False)


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


NETWORKS = {
    "1 GbE": 0.125,
    "10 GbE": 1.25,
    "25 GbE": 3.1,
    "100 GbE": 12.5,
    "400G InfiniBand": 50.0,
    "NVLink": 450.0,
}
"""Name -> GB/s in one direction, as their names say (NVLink: an H100's or H200's): upper limits of
the bus bandwidth."""


def topology() -> Run:
    """What connects the GPUs by `nvidia-smi topo -m`: how many `connections`, and each one's name.

    Raises `Unavailable` without the command, or with fewer than two GPUs.
    """
    if gpu_count() < 2:
        raise Unavailable("a connection takes two GPUs, and this machine shows fewer")
    options = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], timeout=60, check=True, **options)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            "nvidia-smi topo -m, which comes with NVIDIA's driver, can't be had here "
            f"({type(error).__name__})"
        ) from error
    pairs = read_topology(shown.stdout).items()
    named = {f"GPU {one} and GPU {other}": link for (one, other), link in pairs}
    metrics = {"connections": len(named), "named": named}
    return Run("10", "topology", metrics=metrics, tags={"experiment": "topology"})


# ------------------------------------------------------------------------------------ a rank dies

CRASHES = ("rank killed", "rank raises", "resumed on fewer ranks")


def crashes(case: Case, ranks: int, device: str) -> dict[str, Run]:
    """Rank 1 is killed after five steps; all go on, and it raises after seven; as many as can share
    the batch without it go on to the end. All from the same checkpoints, one every second step."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", ignore_cleanup_errors=True) as folder:

        def crash(on: int, **options: Any) -> Ended:
            options |= {"steps": CRASH_STEPS, "folder": folder, "checkpoint_every": 2}
            recipe = case.for_ranks(ranks).as_dict()  # the global batch, however many train
            task = Task("run", "crash", case.opened, recipe, **options)
            return launch([task], on, device, timeout_s=240, patience_s=60)

        killed = crash(ranks, fail="kill", fails=(1, 5))
        raised = crash(ranks, fail="raise", fails=(1, 7), resume=True)
        resumed = crash(fewer_than(ranks), resume=True)
    last = resumed.runs.get("crash") or crash_run(resumed)
    if not resumed.ok:
        last.status = error_of(resumed)
    runs = dict(zip(CRASHES, (crash_run(killed), crash_run(raised), last), strict=True))
    for event, run in runs.items():  # where the folder was is this machine's business
        run.run, run.tags = event, {"experiment": "crash", "event": event}
        run.status = run.status.replace(folder, Path(folder).name)
        if "message" in run.metrics:
            run.metrics["message"] = run.metrics["message"].replace(folder, Path(folder).name)
    return runs


def crash_run(ended: Ended) -> Run:
    """What became of a launch that was to fail: `failed`, `first_rank`, `first_exit_code`,
    `left_behind` (processes and files that had to be cleared away), `checkpoint_step`, `seconds`,
    and `message`."""
    metrics: dict[str, Any] = {"failed": int(not ended.ok), "seconds": ended.seconds}
    metrics["left_behind"] = len(ended.left)
    if ended.first:
        metrics |= dict(zip(("first_rank", "first_exit_code"), ended.first, strict=True))
    if ended.checkpoint_step is not None:
        metrics["checkpoint_step"] = ended.checkpoint_step
    return Run("10", "", metrics=metrics | {"message": ended.message})


def fewer_than(ranks: int) -> int:
    """The most ranks below `ranks` that can share its batch evenly."""
    return max(count for count in range(1, max(2, ranks)) if ranks % count == 0)


# ------------------------------------------------------------------------------ NCCL's variables

TRIALS = (
    {"NCCL_DEBUG": "INFO"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_PROTO": "LL"},
    {"NCCL_SOCKET_IFNAME": "lo"},
    {"NCCL_IB_DISABLE": "1"},
)
TRIED_SIZES = (2**10, 2**20, 2**26)


def nccl_trials(ranks: int) -> dict[str, Run]:
    """Name -> run of each of `TRIALS`. They start side by side, and work one at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(TRIALS)) as pool:
        runs = pool.map(lambda settings: nccl_trial(ranks, settings, f"{folder}/turn"), TRIALS)
        return {run.run: run for run in runs}


def nccl_trial(ranks: int, settings: Mapping[str, str], turn: str = "") -> Run:
    """The all-reduce's times with these variables, in a launch of its own: NCCL reads them once.

    `metrics` holds what it says of its ways as well. turn: see `Task`.
    """
    task = Task("all-reduce", "all-reduce", sizes=TRIED_SIZES, turn=turn)
    ended = launch([task], ranks, "cuda", 150, 90, SAY_ALL | dict(settings))
    run = ended.runs.get("all-reduce") or Run("10", "", status=error_of(ended))
    words = " ".join(f"{variable}={value}" for variable, value in settings.items())
    run.run, run.tags = f"nccl {words}", {"experiment": "nccl", "settings": words}
    said = read_nccl_log(ended.log)
    run.metrics |= {key: said[key] for key in ("channels", "network", "version") if key in said}
    run.metrics |= {"transport": ", ".join(said["transports"])} if "transports" in said else {}
    if "chosen" in said:
        run.metrics["chosen"] = said["chosen"].get(max(TRIED_SIZES), "")
    return run


def nccl_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a trial: NCCL's way, and the times of its three messages."""
    return pd.DataFrame(
        {
            "setting": run.tags["settings"],
            "way": run.metrics.get("transport"),
            "channels": run.metrics.get("channels"),
            "64 MiB goes by": run.metrics.get("chosen"),
            "1 KiB, µs": 1e3 * run.samples["all_reduce_ms"][0],
            "1 MiB, ms": run.samples["all_reduce_ms"][1],
            "64 MiB, GB/s": run.samples["bus_gb_per_s"][2],
        }
        for run in runs
    )


def slower(trials: Iterable[Run], settings: str) -> float | None:
    """How many times as long the largest message takes in that trial as with nothing set."""
    known = Runs(run for run in trials if run.ok)
    usual, other = (known.one(settings=words) for words in ("NCCL_DEBUG=INFO", settings))
    if usual is None or other is None:
        return None
    return other.samples["all_reduce_ms"][-1] / usual.samples["all_reduce_ms"][-1]
