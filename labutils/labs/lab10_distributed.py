"""What lab 10 tries on several GPUs: which runs, started how, and what to make of them.

A case is one kind of training ("": Stable Diffusion's LoRA, "full": all of its UNet, "qwen": an 8 B
model's LoRA, "qwen full": a small one whole). Its runs are called "one process", "ddp 2", "fsdp 2",
"ddp 2 no_sync", and so on, behind the case's name. One process does what each rank does: so N of
them should take N times the examples in the same time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labutils.labs.ladders import A3_BASE
from labutils.profiling import ddp_model
from labutils.profiling.collectives import SAY_ALL, SIZES, Link, read_nccl_log, read_topology
from labutils.recipe import STOCK, Recipe, Unavailable
from labutils.results.judges.effects import time_effect
from labutils.results.records import Run, summarise
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
"""Its examples in a micro-batch. With few, a step lasts as long as the host takes to launch it, and
on a host that several ranks share that is another time each day."""
WHOLE_BATCH = SD_BATCH | {"full": 8}
"""The same where all weights are trained, which is more work for the GPU. With many, what is
sharded would be lost among activations."""
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
"""Lab 07's plain loop on rows of one length: with rows of several, ranks would wait for whichever
has the longest.
"""
QWEN_FULL_RECIPE = QWEN_RECIPE.but(adapter="none", layers="published", loss="logits")
ACCUMULATED = 4
"""Micro-batches that a rank accumulates in the runs about `no_sync`."""
TINY_SIZES = SIZES[::3]
TURNED = ("", "full")
"""Cases whose buckets and synchronisation are tried out, and that are sharded at every scale."""


TITLES = {
    "": "SD 1.5, LoRA",
    "full": "SD 1.5, whole UNet",
    "qwen": "Qwen3, LoRA",
    "qwen full": "small Qwen3, whole",
}
"""What is trained, by the name of its case."""


@dataclass(frozen=True)
class Case:
    """One kind of training: its name in runs ("" for none), what it runs on, the recipe of one
    rank's share.
    """

    name: str
    title: str
    workload: dict[str, str]
    recipe: Recipe

    def run(self, what: str) -> str:
        """A run's name: "ddp 2" or "qwen ddp 2"."""
        return f"{self.name} {what}".strip()

    def for_ranks(self, ranks: int, micro_steps: int = 1, **changes: Any) -> Recipe:
        """The recipe of a step that `ranks` ranks share, each taking `micro_steps` micro-batches."""
        return self.recipe.but(accumulation=ranks * micro_steps, **changes)

    def task(self, what: str, recipe: Recipe, **options: Any) -> Task:
        return Task("train", self.run(what), self.workload, recipe.as_dict(), **options)


def cases(lab: Any) -> dict[str, Case]:
    """The lab's cases at its scale, by name."""

    def of(name: str, scale: str) -> dict[str, str]:
        """What `open_workload` is told in the ranks."""
        sources = {"weights": lab.weights, "data": lab.data, "cache_dir": str(lab.cache_dir)}
        return {"name": name, "scale": scale} | sources

    tiny = lab.scale == "tiny"
    sd, qwen = of("sd15-lora", lab.scale), of("qwen3-lora-long", lab.scale)
    small = of("qwen3-lora-long", "tiny" if tiny else "small")
    sd_recipe = SD_RECIPE.but(micro_batch=SD_BATCH[lab.scale])
    what = {
        "": (sd, sd_recipe),
        "full": (sd, sd_recipe.but(adapter="none", micro_batch=WHOLE_BATCH[lab.scale])),
        "qwen": (qwen, QWEN_RECIPE),
        "qwen full": (small, QWEN_FULL_RECIPE),
    }
    return {name: Case(name, TITLES[name], *found) for name, found in what.items()}


# -------------------------------------------------------------------------------------------------
# What is launched


def tasks_alone(chosen: Iterable[Case], ranks: int, steps: int, tiny: bool) -> list[Task]:
    """The link, and each case on one process: rank 0 by itself, while the others wait; behind the
    first case its whole global batch, of which the losses are wanted."""
    link = Task("all-reduce", "all-reduce", sizes=TINY_SIZES if tiny else SIZES)
    timed = {"steps": steps, "warmup": 1 if tiny else 2}
    first, *others = chosen

    def one(case: Case) -> Task:
        return case.task("one process", case.recipe, **timed, alone=True, arrivals=True)

    return [link, one(first), task_same_batch(first, ranks), *map(one, others)]


TRACED = 2
"""Optimizer steps in a trace: a second or two of reading for each, and one looks like the next."""


def tasks_together(case: Case, ranks: int, steps: int, tiny: bool) -> list[Task]:
    """A case on all ranks: DDP, what can be turned at it, and FSDP. At tiny, where starting takes
    longer than all steps, it is the larger gradients that are turned at."""
    shared, timed = case.for_ranks(ranks), {"steps": steps, "warmup": 1 if tiny else 2}
    traced = timed | {"traced": TRACED}
    found = [case.task(f"ddp {ranks}", shared, **traced)]
    if case.name in TURNED[-1:] if tiny else TURNED:
        found.append(case.task(f"ddp {ranks} bucket 1MB", shared.but(bucket_cap_mb=1), **timed))
        several = case.for_ranks(ranks, 2 if tiny else ACCUMULATED)
        fewer = timed | {"steps": max(4, steps // 2)}  # each is several times as long
        found.append(case.task(f"ddp {ranks} no_sync", several, **fewer))
        found.append(case.task(f"ddp {ranks} sync each", several.but(synchronise="each"), **fewer))
    if case.name == "full" and not tiny:
        found.append(
            case.task(f"ddp {ranks} bucket view", shared.but(gradient_as_bucket_view=True), **timed)
        )
    if case.name == "qwen" and not tiny:
        found.append(
            case.task(f"ddp {ranks} as they come", shared.but(shapes="as-they-come"), **traced)
        )
    if not tiny or case.name in TURNED:
        found.append(case.task(f"fsdp {ranks}", shared.but(parallel="fsdp"), **traced))
    return found


def tasks_of_all(cases: Iterable[Case], ranks: int, steps: int, tiny: bool) -> list[Task]:
    """What all ranks do: DDP of all cases, then FSDP."""
    tasks = [task for case in cases for task in tasks_together(case, ranks, steps, tiny)]
    return sorted(
        tasks, key=lambda task: task.recipe["parallel"]
    )  # stable: cases stay in their order


TASK_S = 40.0
"""How long one of many tasks may take on average."""
DOWNLOADING = {"timeout_s": 7200.0, "patience_s": 3600.0}
"""How long a launch may take, and ranks wait for the first, where that one may have checkpoints to
download.
"""


def measured(
    lab: Any,
    tasks: Sequence[Task],
    ranks: int,
    device: str,
    into: dict[str, Run],
    judge: Callable[[str, Run], Run] = lambda name, run: run,
) -> None:
    """Put the runs of `tasks`, each as `judge` has it, into `into`: as an interrupted lab left
    them, or launched now, each kept as soon as it is there.

    A task that a rank fails in is on record with what was said of it, and another launch does those
    behind it. Raises for the first one once all is done, or two launches in a row brought nothing.
    """
    recipes = {task.name: Recipe(**task.recipe) if task.recipe else None for task in tasks}
    taken = lab.take_left(recipes)
    into |= taken
    options = (
        DOWNLOADING
        if "hub" in (lab.weights, lab.data)
        else {"timeout_s": max(TIMEOUT_S, TASK_S * len(tasks))}
    )

    def keep(run: Run) -> None:
        into[run.run] = judge(run.run, run)
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
            lab.keep(Run("", failed.name, recipe=failed.recipe, status=_error(ended[-1])))
    for one in ended:
        one.or_raise()


def _error(ended: Ended) -> str:
    """What a run's status says of a launch that failed."""
    return f"error: {' '.join(ended.message.split())}"


CRASH_STEPS = 8
"""Optimizer steps of the run that ranks die in."""


def task_same_batch(case: Case, ranks: int) -> Task:
    """One process with the whole global batch: the losses that the ranks' must equal, whatever
    happens to them.
    """
    recipe = case.for_ranks(ranks)
    return Task(
        "run",
        case.run("one process, same batch"),
        case.workload,
        recipe.as_dict(),
        CRASH_STEPS,
        alone=True,
    )


def crash(
    case: Case, batch_of: int, ranks: int, folder: Path, device: str, **options: Any
) -> Ended:
    """Train `case` with a checkpoint every second step; `options` (of `Task`) say who fails, when
    and how, or to go on from the folder's checkpoint. The global batch is that of `batch_of` ranks,
    however many train."""
    options |= {"steps": CRASH_STEPS, "folder": str(folder), "checkpoint_every": 2}
    task = Task(
        "run", case.run("crash"), case.workload, case.for_ranks(batch_of).as_dict(), **options
    )
    return launch([task], ranks, device, timeout_s=240, patience_s=60)


CRASHES = ("rank killed", "rank raises", "resumed on fewer ranks")


def crashes(case: Case, ranks: int, device: str) -> dict[str, Run]:
    """What `CRASHES` name, one after the other from the same checkpoints: rank 1 is killed after
    five steps; all go on, and it raises after seven; as many as can share the batch without it go
    on to the end."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        killed = crash(case, ranks, ranks, folder, device, fail="kill", fails=(1, 5))
        raised = crash(case, ranks, ranks, folder, device, fail="raise", fails=(1, 7), resume=True)
        resumed = crash(case, ranks, fewer_than(ranks), folder, device, resume=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = resumed.runs.get(case.run("crash")) or as_run(CRASHES[2], resumed)
    if not resumed.ok:
        last.status = _error(resumed)
    runs = as_run(CRASHES[0], killed), as_run(CRASHES[1], raised), last
    for run in runs:  # the folder is gone, and where it was is this machine's business
        run.status = run.status.replace(str(folder), folder.name)
        if "message" in run.metrics:
            run.metrics["message"] = run.metrics["message"].replace(str(folder), folder.name)
    return dict(zip(CRASHES, runs, strict=True))


def fewer_than(ranks: int) -> int:
    """The most ranks below `ranks` that can share its batch evenly."""
    return max(count for count in range(1, max(2, ranks)) if ranks % count == 0)


def device_for(lab: Any) -> str:
    """Where the ranks compute: on GPUs, one each, or at `tiny`, where there are fewer than two, on
    the CPU's cores.

    Raises `Unavailable` where neither is meant.
    """
    gpus = gpu_count()
    if gpus > 1:
        return "cuda"
    if lab.scale == "tiny":
        return "cpu"
    raise Unavailable(
        f"several GPUs are needed at scale {lab.scale}, and this machine shows {gpus}; --scale "
        "tiny runs two "
        "processes on the CPU"
    )


# -------------------------------------------------------------------------------------------------
# What it comes to


def link_of(run: Run) -> Link:
    return Link.of(run.samples, run.metrics["ranks"])


def through(cases: Iterable[Case], alone: Mapping[str, Run]) -> list[Case]:
    """The cases of which one process's run is there: a launch that failed leaves those that were
    through.
    """
    return [case for case in cases if (name := case.run("one process")) in alone and alone[name].ok]


def foretold(case: Case, alone: Mapping[str, Run], link: Link) -> dict[str, ddp_model.Foretold]:
    """Run's name -> prediction, for those runs of a case that the model speaks about."""
    one, ranks = alone[case.run("one process")], link.ranks
    found = {f"ddp {ranks}": ddp_model.ddp(one, link)}
    if case.name in TURNED:
        found[f"ddp {ranks} bucket 1MB"] = ddp_model.ddp(one, link, cap_mb=1)
    found[f"fsdp {ranks}"] = ddp_model.fsdp(one, link)
    return {case.run(what): prediction for what, prediction in found.items()}


def judged(
    name: str, run: Run, alone: Mapping[str, Run], foretold: Mapping[str, ddp_model.Foretold]
) -> Run:
    """The run with `efficiency`, `predicted_step_ms` and `predicted_efficiency` among its metrics,
    where they apply.
    """
    one = alone.get(f"{case_of(name)} one process".strip())
    if not run.ok or one is None or not one.ok:
        return run
    run.metrics["efficiency"] = ddp_model.efficiency(one, run)
    if prediction := foretold.get(name):
        run.metrics |= {
            "predicted_step_ms": prediction.step_ms,
            "predicted_efficiency": prediction.efficiency,
        }
        run.metrics["predicted_exposed_ms"] = prediction.exposed_ms
    return run


def case_of(name: str) -> str:
    """The case's name in a run's: what stands before the kind of parallelism."""
    return re.split(r"(?:^|\s)(?:ddp|fsdp|one process)\b", name)[0]


def need(found: Any) -> None:
    """Raises `Unavailable` where an earlier section has measured nothing that this one could speak
    about.
    """
    if not found:
        raise Unavailable(
            "it speaks about what an earlier section would have measured, and could not"
        )


HEAD = (
    "run",
    "step, ms",
    "predicted, ms",
    "examples/s",
    "efficiency, %",
    "traced: communicating or waiting, %",
    "of it not hidden, % of the step",
    "peak memory per GPU, GB",
)
"""The head of `rows`."""


def rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """A row for `HEAD` of each run that went well."""
    return [
        (
            name,
            run.metric("step_ms"),
            run.metric("predicted_step_ms"),
            run.metric("examples_per_s"),
            _percent(run.metric("efficiency")),
            _percent(run.metric("communication_share")),
            _percent(run.metric("exposed_communication_share")),
            run.metric("peak_allocated_gb"),
        )
        for name, run in runs.items()
        if run.ok
    ]


LINK_HEAD = ("the quickest message, µs", "bus bandwidth of the largest, GB/s")


def link_rows(runs: Mapping[str, Run]) -> list[tuple[float, float]]:
    """A row for `LINK_HEAD` out of the run "all-reduce"."""
    return [
        (1e3 * min(run.samples["all_reduce_ms"]), run.samples["bus_gb_per_s"][-1])
        for run in runs.values()
        if run.ok and run.samples.get("all_reduce_ms")
    ]


ALONE_HEAD = (
    "one process",
    "step, ms",
    "examples/s",
    "gradients, MB",
    "a pass's weights, MB",
    "peak memory, GB",
)


def alone_rows(cases: Iterable[Case], alone: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """A row for `ALONE_HEAD` of each case."""
    metrics = ("step_ms", "examples_per_s", "gradient_mb", "gathered_mb", "peak_allocated_gb")
    runs = {case.title: alone[case.run("one process")] for case in through(cases, alone)}
    return [(title, *(run.metric(name) for name in metrics)) for title, run in runs.items()]


FORETOLD_HEAD = (
    "run",
    "computing, ms",
    "messages",
    "sent for, ms",
    "exposed, ms",
    "step, ms",
    "efficiency, %",
)


def foretold_rows(foretold: Mapping[str, ddp_model.Foretold]) -> list[tuple[Any, ...]]:
    """A row for `FORETOLD_HEAD` of each prediction."""
    return [
        (
            name,
            f.compute_ms,
            f.messages,
            f.communication_ms,
            f.exposed_ms,
            f.step_ms,
            100 * f.efficiency,
        )
        for name, f in foretold.items()
    ]


def with_prediction(runs: Mapping[str, Run]) -> dict[str, Run]:
    return {name: run for name, run in runs.items() if run.ok and run.metric("predicted_step_ms")}


def steps_alone(
    cases: Iterable[Case], alone: Mapping[str, Run], runs: Iterable[str]
) -> dict[str, float]:
    """Run's name -> the step of one process that does what each of its ranks does."""
    steps = {
        case.name: alone[case.run("one process")].metric("step_ms")
        for case in through(cases, alone)
    }
    return {name: steps[case_of(name)] for name in runs if steps.get(case_of(name))}


def traced_names(ranks: int) -> tuple[str, ...]:
    """Runs whose traced steps are worth a picture."""
    return tuple(f"{case} {kind} {ranks}".strip() for kind in ("ddp", "fsdp") for case in TURNED)


def bands(
    runs: Mapping[str, Run], names: Iterable[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Run's name -> when its traced step computed, and when it communicated."""
    traced = {
        name: runs[name].samples
        for name in names
        if name in runs and runs[name].samples.get("computing_ms")
    }
    return {
        name: (samples["computing_ms"], samples["communicating_ms"])
        for name, samples in traced.items()
    }


COMPARISON_HEAD = ("one change", "from, ms", "to, ms", "step, %", "memory, from GB", "to GB")


def comparisons_of(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """`comparisons` of runs as a results file names them, on however many ranks they were made."""
    numbers = {int(found[1]) for name in runs if (found := re.search(r"\bddp (\d+)\b", name))}
    return [row for ranks in sorted(numbers) for row in comparisons(runs, ranks)]


def comparisons(runs: Mapping[str, Run], ranks: int) -> list[tuple[Any, ...]]:
    """A row for `COMPARISON_HEAD` of each pair of runs that differ in one knob."""
    pairs = (
        ("after each micro-batch -> no_sync", f"ddp {ranks} sync each", f"ddp {ranks} no_sync"),
        ("buckets of 25 MiB -> of 1", f"ddp {ranks}", f"ddp {ranks} bucket 1MB"),
        ("gradients beside buckets -> in them", f"ddp {ranks}", f"ddp {ranks} bucket view"),
        ("DDP -> FSDP", f"ddp {ranks}", f"fsdp {ranks}"),
        ("rows of one length -> as they come", f"ddp {ranks}", f"ddp {ranks} as they come"),
    )
    cases = list(dict.fromkeys(map(case_of, runs)))
    return [
        (f"{TITLES.get(case, case)}: {title}", *_changed(*found))
        for title, *names in pairs
        for case in cases
        if len(
            found := [
                runs[key] for n in names if (key := f"{case} {n}".strip()) in runs and runs[key].ok
            ]
        )
        == 2
    ]


def _changed(before: Run, after: Run) -> tuple[Any, ...]:
    times = before.metric("step_ms"), after.metric("step_ms")
    memory = before.metric("peak_allocated_gb"), after.metric("peak_allocated_gb")
    alike = (
        _of_times(run, run.samples["step_ms"]) for run in (before, after)
    )  # as the medians beside it: all steps
    effect = time_effect(*alike)
    return *times, effect and effect.text(), *memory


APART_HEAD = (
    "case",
    "one process alone, ms a micro-batch",
    "beside others, sending nothing, ms",
    "longer by",
)


def apart_of(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """A row for `APART_HEAD` of each case with a `no_sync` run: what a micro-batch takes a single
    process, and what it takes ranks side by side that send nothing after it: a `no_sync` step less
    a step of one micro-batch, which stands for the last one, that does send."""
    found = []
    for name in runs:
        names = f"{case_of(name)} one process".strip(), name.removesuffix(" no_sync"), name
        if not name.endswith(" no_sync") or not all(_timed(runs.get(each)) for each in names):
            continue
        alone, one, several = (runs[each] for each in names)
        unsent = several.recipe["accumulation"] / several.metrics["ranks"] - 1
        beside = _of_times(
            several, [(ms - one.metric("step_ms")) / unsent for ms in several.samples["step_ms"]]
        )
        title = TITLES.get(case_of(name), case_of(name))
        effect = time_effect(alone, beside)
        found.append(
            (
                title,
                alone.metric("step_ms"),
                beside.metric("step_ms"),
                effect and effect.text(),
            )
        )
    return found


def _timed(run: Run | None) -> bool:
    """Whether it is the record of a run whose steps were timed, and says on how many ranks."""
    return bool(run and run.ok and run.metrics.get("ranks") and run.samples.get("step_ms"))


def _of_times(run: Run, step_ms: Sequence[float]) -> Run:
    """The run as if its steps had taken these times, and nothing were known of what they took in."""
    return replace(run, metrics={"step_ms": summarise(step_ms)}, samples={"step_ms": list(step_ms)})


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def off_by(runs: Mapping[str, Run]) -> dict[str, float]:
    """Run's name -> by how many percent its step was longer than predicted (negative: shorter)."""
    pairs = {
        name: (run.metric("step_ms"), run.metric("predicted_step_ms"))
        for name, run in runs.items()
        if run.ok
    }
    return {
        name: 100 * (found / predicted - 1)
        for name, (found, predicted) in pairs.items()
        if found and predicted
    }


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two series' first losses, as far as both go."""
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=False))


LOSSES_HEAD = ("losses", "largest difference")


def losses_rows(runs: Mapping[str, Run]) -> list[tuple[str, str]]:
    """A row for `LOSSES_HEAD` out of the run "losses"."""
    return [
        ("one process and all ranks", f"{run.metric('largest_difference'):.1e} of the loss")
        for run in runs.values()
        if run.ok
    ]


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


NVLINK_GB_PER_S = {"8.0": 25.0, "9.0": 25.0, "10.0": 50.0}
"""Compute capability of a data-centre card -> what one of its NVLinks carries in one direction, by
its data sheet: an A100's 12 make 300, an H100's or H200's 18 make 450, a B200's 18 make 900."""


def topology() -> Run:
    """What connects the GPUs by `nvidia-smi topo -m`: `connections`, how many pairs it names one
    for, and `named`, what each is called. Raises `Unavailable` without the command, or with fewer
    than two GPUs."""
    if gpu_count() < 2:
        raise Unavailable("a connection takes two GPUs, and this machine shows fewer")
    try:
        shown = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            "nvidia-smi topo -m, which comes with NVIDIA's driver, can't be had here "
            f"({type(error).__name__})"
        ) from error
    found = read_topology(shown.stdout)
    named = {f"GPU {one} and GPU {other}": link for (one, other), link in found.items()}
    return Run("10", "topology", metrics={"connections": len(named), "named": named})


TOPOLOGY_HEAD = ("GPUs", "connected by", "which means")


def topology_rows(runs: Mapping[str, Run]) -> list[tuple[str, str, str]]:
    """Rows for `TOPOLOGY_HEAD` out of the run "topology"."""
    return [
        (pair, link, _meaning(link, run.machine.get("compute_capability", "")))
        for run in runs.values()
        for pair, link in run.metrics.get("named", {}).items()
    ]


def _meaning(link: str, capability: str) -> str:
    if re.fullmatch(r"NV[0-9]{1,3}", link):
        links, each = int(link[2:]), NVLINK_GB_PER_S.get(capability)
        carry = f" of {each:g} GB/s each: {links * each:g} GB/s in one direction" if each else ""
        return f"{links} NVLinks{carry}"
    return {
        "PIX": "one PCIe switch between them",
        "PXB": "several PCIe switches between them",
        "PHB": "the host's PCIe bridge between them",
        "NODE": "several PCIe bridges of one processor between them",
        "SYS": "the link between two processors between them: the slowest way",
    }.get(link, "see the legend that nvidia-smi prints below its table")


def needed_network(
    cases: Iterable[Case], alone: Mapping[str, Run], ranks: int
) -> dict[str, dict[float, float]]:
    """Case's title -> GB/s of a link -> the efficiency of DDP that the model foretells, in percent."""
    links = {rate: ddp_model.flat_link(ranks, rate) for rate in NETWORKS.values()}
    runs = {case.title: alone[case.run("one process")] for case in through(cases, alone)}
    return {
        title: {rate: 100 * ddp_model.ddp(run, link).efficiency for rate, link in links.items()}
        for title, run in runs.items()
    }


def at_networks(needed: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
    """ "<title> at <network>" -> efficiency in percent."""
    names = {rate: name for name, rate in NETWORKS.items()}
    return {
        f"{title} at {names[rate]}": share
        for title, at in needed.items()
        for rate, share in at.items()
    }


NETWORK_HEAD = ("efficiency at most, %", *NETWORKS)
"""The head of a table of `network_rows`."""


def network_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `NETWORK_HEAD` out of the run "networks", whose metrics `at_networks` made."""
    found: dict[str, dict[str, float]] = {}
    for run in runs.values():
        for name, share in run.metrics.items():
            title, _, network = name.rpartition(" at ")
            if title:  # a record may have other numbers as well
                found.setdefault(title, {})[network] = share
    return [(title, *(at.get(network) for network in NETWORKS)) for title, at in found.items()]


# -------------------------------------------------------------------------------------------------
# A rank dies


def as_run(name: str, ended: Ended) -> Run:
    """What became of a launch that was to fail: `failed`, `first_rank`, `first_exit_code`,
    `left_behind` (processes and files that had to be cleared away), `checkpoint_step`, `seconds`,
    and `message`."""
    metrics: dict[str, Any] = {
        "failed": int(not ended.ok),
        "seconds": ended.seconds,
        "left_behind": len(ended.left),
    }
    if ended.first:
        metrics |= dict(zip(("first_rank", "first_exit_code"), ended.first, strict=True))
    if ended.checkpoint_step is not None:
        metrics["checkpoint_step"] = ended.checkpoint_step
    return Run("", name, metrics=metrics | {"message": ended.message})


def well(run: Run) -> Run:
    """The run; raises `Unavailable` with the reason where it failed."""
    if not run.ok:
        raise Unavailable(run.status)
    return run


def loss_curves(unbroken: Run | None, resumed: Run) -> dict[str, dict[float, float]]:
    """Name -> optimizer step -> loss: the run that nothing happened to, and the one that was taken
    up.
    """
    first = resumed.metrics["resumed_at"]
    found = {"resumed on fewer ranks": dict(enumerate(resumed.metrics["loss"], first + 1))}
    if unbroken is None:
        return found
    last = first + len(resumed.metrics["loss"])
    return {"one process, undisturbed": dict(enumerate(unbroken.metrics["loss"][:last], 1))} | found


def around(curves: Mapping[str, Mapping[float, float]]) -> tuple[float, float]:
    """Limits of an axis that shows all of the curves and little else."""
    every = [y for points in curves.values() for y in points.values()]
    margin = 0.1 * (max(every) - min(every)) or 0.1
    return min(every) - margin, max(every) + margin


def metric_of(runs: Mapping[str, Run], name: str, metric: str, times: float = 1.0) -> float | None:
    """A run's metric, `times` so much; None where there is none."""
    value = runs[name].metric(metric) if name in runs else None
    return None if value is None else times * value


# -------------------------------------------------------------------------------------------------
# NCCL's variables


VARIABLES = {
    "NCCL_DEBUG": ("INFO", "says which way each channel goes"),
    "NCCL_P2P_DISABLE": (
        "1",
        "no GPU writes to another's memory: by shared memory of the host instead",
    ),
    "NCCL_SHM_DISABLE": ("1", "no shared memory of the host: matters where there is no P2P"),
    "NCCL_ALGO": ("Tree", "the only algorithm that it may choose"),
    "NCCL_PROTO": ("LL", "the only protocol: LL is for small messages, Simple for large"),
    "NCCL_SOCKET_IFNAME": ("lo", "the interface for meeting, and for sockets"),
    "NCCL_IB_DISABLE": ("1", "no InfiniBand: sockets between hosts"),
}
"""Variable -> (a value that is tried, what it is for)."""
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


def trial_name(settings: Mapping[str, str]) -> str:
    return "nccl " + " ".join(f"{variable}={value}" for variable, value in settings.items())


def nccl_trials(ranks: int) -> dict[str, Run]:
    """Name -> run of each of `TRIALS`. Their launches, which take longest to start, start side by
    side, and one at a time is at work."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(TRIALS)) as pool:
        runs = pool.map(lambda settings: nccl_trial(ranks, settings, f"{folder}/turn"), TRIALS)
        return {trial_name(settings): run for settings, run in zip(TRIALS, runs, strict=True)}


def nccl_trial(ranks: int, settings: Mapping[str, str], turn: str = "") -> Run:
    """The all-reduce's times with these variables, in a launch of its own: NCCL reads them once.
    `metrics` holds what it says of its ways (`transport`, `channels`) as well. turn: see `Task`."""
    task = Task("all-reduce", "all-reduce", sizes=TRIED_SIZES, turn=turn)
    ended = launch([task], ranks, "cuda", 150, 90, SAY_ALL | dict(settings))
    run = ended.runs.get("all-reduce") or Run("", "", status=_error(ended))
    run.run = trial_name(settings)
    said = read_nccl_log(ended.log)
    run.metrics |= {key: said[key] for key in ("channels", "network", "version") if key in said}
    run.metrics |= {"transport": ", ".join(said["transports"])} if "transports" in said else {}
    if "chosen" in said:
        run.metrics["chosen"] = said["chosen"].get(max(TRIED_SIZES), "")
    return run


LONGEST_CELL = 200
"""Letters of what became of a trial that a table has room for."""
NCCL_HEAD = (
    "setting",
    "way",
    "channels",
    "64 MiB goes by",
    "1 KiB, µs",
    "1 MiB, ms",
    "64 MiB, GB/s",
)


def nccl_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """(setting, way, channels, algorithm and protocol of 64 MiB, µs of 1 KiB, ms of 1 MiB, GB/s of
    64 MiB) of each.
    """
    found = []
    for name, run in runs.items():
        if run.ok:
            ms, bus = run.samples["all_reduce_ms"], run.samples["bus_gb_per_s"]
            said = [run.metrics.get(key) for key in ("transport", "channels", "chosen")]
            found.append((_setting(name), *said, 1e3 * ms[0], ms[1], bus[2]))
        else:
            why = textwrap.shorten(run.status, LONGEST_CELL, placeholder=" …")
            found.append((_setting(name), why, *[None] * 5))
    return found


def _setting(name: str) -> str:
    """What was set in a trial, by its run's name; the first one only has NCCL say what it does."""
    return "left alone" if name == trial_name(TRIALS[0]) else name.removeprefix("nccl ")


def variable_rows() -> list[tuple[str, str, str]]:
    """(variable, a value, what it is for)."""
    return [(variable, value, why) for variable, (value, why) in VARIABLES.items()]


def slower(trials: Mapping[str, Run], name: str) -> float | None:
    """How many times as long the largest message takes in that trial as with nothing set."""
    usual, other = trials.get("nccl NCCL_DEBUG=INFO"), trials.get(name)
    if not (usual and other and usual.ok and other.ok):
        return None
    return other.samples["all_reduce_ms"][-1] / usual.samples["all_reduce_ms"][-1]


# -------------------------------------------------------------------------------------------------
# The article's Docker command


def docker_rows() -> list[tuple[str, str, str, str]]:
    """(flag, what it sets, this machine's value, what fails without it) of the article's command."""
    return [
        (
            "--gpus all",
            "which GPUs the container sees; needs NVIDIA's container toolkit on the host",
            _gpus(),
            "torch.cuda.is_available() is False, and training runs on the CPU or not at all",
        ),
        (
            "--shm-size=1g",
            "the size of /dev/shm, 64 MB unless said",
            _shared_memory(),
            "DataLoader workers hang or die with a bus error (lab 03), and NCCL can't use shared "
            "memory",
        ),
        (
            "--ulimit memlock=-1",
            "how much memory may be page-locked",
            _limit("RLIMIT_MEMLOCK"),
            "InfiniBand can't register its buffers (ibv_reg_mr fails); CUDA's own pinned memory "
            "isn't counted",
        ),
        (
            "--ulimit stack=67108864",
            "a thread's stack, 64 MiB",
            _limit("RLIMIT_STACK"),
            "seldom anything: deep recursion in C++ (compilers, parsers) crashes at the usual 8 "
            "MiB",
        ),
        (
            "(not in it) --ulimit nofile=...",
            "open files: each rank's sockets, each worker's shared tensors",
            _limit("RLIMIT_NOFILE", bytes_=False),
            '"Too many open files", with many workers',
        ),
        (
            "(not in it) --ipc=host",
            "the host's /dev/shm and its namespace instead of --shm-size",
            "–",
            "ranks in *different* containers can't use shared memory or P2P between them",
        ),
    ]


def _gpus() -> str:
    count = gpu_count()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{count} GPUs" + (f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else "")


def _shared_memory() -> str:
    if not Path("/dev/shm").is_dir():
        return "no /dev/shm"
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.total / 1e9:.2f} GB, {usage.free / 1e9:.2f} free"


def _limit(name: str, bytes_: bool = True) -> str:
    """The soft limit as `ulimit` has it."""
    try:
        import resource
    except ImportError:  # not a Unix
        return "–"
    soft = resource.getrlimit(getattr(resource, name))[0]
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{soft / 2**20:,.3g} MiB" if bytes_ else f"{soft:,}"
