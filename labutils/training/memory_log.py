"""A training run whose memory is logged as it goes: article A3's way of looking at a method.

run = followed(workload, recipe, steps=40, name="qlora long", log=folder / "qlora long.csv")
lines = read_log(folder / "qlora long.csv")
"""

from __future__ import annotations

import csv
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import bytes_of, tensors_of
from labutils.recipe import Recipe
from labutils.results.records import Run, is_out_of_memory
from labutils.training.batches import on_device
from labutils.training.benchmark import steps_to_drain, train
from labutils.training.model_edits import with_costs, with_epoch_rate
from labutils.training.trainer import Trainer
from labutils.workloads.base import Batch, Workload

WARM_UP = 3
"""Steps between the first one and those timed: a library compiles for a second length, and for any,
in them.
"""


def followed(
    workload: Workload,
    recipe: Recipe,
    steps: int,
    name: str,
    log: Path,
    every: int = 10,
    change: Callable[[nn.Module], None] | None = None,
    build: Callable[[Recipe], nn.Module] | None = None,
) -> Run:
    """Train at least `steps` timed optimizer steps, of the same batches in each run of a workload.

    log: gets a line every `every` steps; its clock starts once the model is built, and what the
    file held before is lost. change: alters the model once it is built. build: see
    `trainer.Hooks`.

    Memory is that of the whole process, in the log as in the metrics `peak_allocated_gb` and
    `peak_reserved_gb`, over all steps. So weights that the workload shares between trainers are
    released here, and the caller releases what else is on the GPU. `useful_tokens_per_s` is a whole
    epoch's: see `model_edits.with_epoch_rate`. A failure is the run's status.
    """
    log.unlink(missing_ok=True)
    workload.collate(recipe)  # so that texts are made before the clock starts
    make_room(workload)
    logs: list[MemoryLog] = []
    warm_up = WARM_UP if cuda.available() else 1  # without a GPU nothing is compiled here
    logged = 1 + warm_up + steps_to_drain(recipe) + steps

    def begin(model: nn.Module) -> None:
        if change is not None:
            change(model)
            # Replaced weights are kept for later trainers, and would count as this one's.
            workload.release_weights()
        # The 16-bit weights that low-bit ones were made from would count as reserved, too.
        cuda.empty_cache()
        logs.append(MemoryLog(log, logged, every))

    def write(trainer: Trainer) -> None:
        if trainer.step_count <= logged:
            logs[-1](trainer)

    run = train(
        workload,
        recipe,
        steps,
        warm_up,
        name,
        after_step=write,
        same_batches=True,
        on_model=begin,
        build=build or workload.build,
    )
    if run.ok and (peak := cuda.peak_memory()):
        run.metrics |= {"peak_allocated_gb": peak[0], "peak_reserved_gb": peak[1]}
    make_room(workload)
    return with_epoch_rate(with_costs(run), workload)


def make_room(*workloads: Workload) -> None:
    """Release the weights that `workloads` share, and the memory of trainers that have ended.
    Reference cycles hold a model until they are collected, and its memory would be read as the next
    one's.
    """
    for workload in workloads:
        workload.release_weights()
    cuda.empty_cache()


def peak_of_step(trainer: Trainer, batch: Batch, record: TensorRecord | None = None) -> float:
    """GB at the peak of one optimizer step on `batch`, which may have any size.

    On a GPU it is the process's, as PyTorch's allocator reports it. Elsewhere it is the model's
    tensors and those that `record` counts (default: all that operations make). Raises what PyTorch
    raises where the step doesn't fit.
    """
    feed = iter([on_device(batch, trainer.workload.device, non_blocking=False)])
    if trainer.workload.device.type == "cuda":
        cuda.reset_peak_memory()
        trainer.step(feed)
        cuda.synchronize()
        return cuda.peak_memory()[0]
    standing = tensors_of(trainer.model)
    record = record or TensorRecord(standing)
    with record:
        trainer.step(feed)
    return (bytes_of(standing) + record.peak) / 1e9


def runs_out_of_memory(trainer: Trainer, step: Callable[[], Any]) -> bool:
    """Whether `step()`, an optimizer step of `trainer`, runs out of memory.

    What a failed step leaves is dropped: gradients, and memory in the allocator's cache.
    """
    try:
        step()
        return False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: inside it the exception still holds the frames, and these the
    # tensors.
    for parameter in trainer.parameters:
        parameter.grad = None
    gc.collect()
    cuda.empty_cache()
    return True


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a `MemoryLog`'s file, column -> number; what is empty there is left out. []
    without a file.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: float(text) for name, text in line.items() if text}
            for line in csv.DictReader(file)
        ]


class MemoryLog:
    """A CSV file of GPU memory, one line every so many optimizer steps and one at the last: article
    A3's callback.

        trainer.run(250, after_step=MemoryLog("memory.csv", steps=250))

    Columns and units are the article's: `step`, `epoch` (with its fraction), `elapsed_time_sec`
    since the log was made, `progress_ratio`, and memory in 1024^3 bytes: what tensors hold
    (`memory_allocated_gb`), what PyTorch holds for them (`memory_reserved_gb`), the most that
    tensors held so far (`peak_memory_gb`). Without a GPU these three are empty. Lines are flushed
    as they are written, behind those of a run that went before.
    """

    COLUMNS = (
        "step",
        "epoch",
        "elapsed_time_sec",
        "progress_ratio",
        "memory_allocated_gb",
        "memory_reserved_gb",
        "peak_memory_gb",
    )

    def __init__(self, path: str | Path, steps: int, every: int = 10) -> None:
        self.path, self.steps, self.every = Path(path), steps, every
        self.began = time.perf_counter()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._write(self.COLUMNS)

    def __call__(self, trainer: Trainer) -> None:
        """Write a line where one is due."""
        step = trainer.step_count
        if step % self.every and step != self.steps:
            return
        epoch = trainer.batches.taken / trainer.batches.per_epoch
        elapsed = time.perf_counter() - self.began
        self._write(
            [step, f"{epoch:.4f}", f"{elapsed:.3f}", f"{step / self.steps:.4f}", *_memory_gib()]
        )

    def _write(self, values: Iterable[Any]) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(values)


def _memory_gib() -> list[str]:
    """Allocated, reserved and peak memory in 1024^3 bytes; empty texts without a GPU."""
    if not cuda.available():
        return [""] * 3
    now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return [f"{size / 1024**3:.4f}" for size in (*now, torch.cuda.max_memory_allocated())]
