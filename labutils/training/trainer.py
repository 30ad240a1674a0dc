"""A recipe at work on a workload: built once, stepped as often as one likes."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch

from labutils.data.images import make_loader
from labutils.layers.cuda_graph import (
    attention_kernel,
    float32_rounded,
    timed_convolutions,
    variants_allowed,
)
from labutils.recipe import Recipe
from labutils.training import checkpoint, distributed
from labutils.training.batches import Batches
from labutils.training.logs import own
from labutils.training.step import DRIVERS, TrainContext, build_optimizer, compile_as_asked
from labutils.workloads.base import Batch, Workload


class Trainer:
    """Model, data, optimizer and driver of one recipe, and the loop over its optimizer steps.

        with Trainer(workload, recipe, folder="runs/mine") as trainer:
            trainer.run(100, checkpoint_every=50)

    folder: where logs and checkpoints go; None: a temporary one that goes with the trainer. resume:
    go on from the folder's checkpoint; raises `FileNotFoundError` where there is none, `ValueError`
    where it belongs to another recipe. `step_count` counts optimizer steps since the run's
    beginning, `recipe` is the recipe as it fits this device. Building took `build_s` seconds,
    `encode_s` of them for encoding every example once where the recipe caches them, else None.
    Started by torchrun it shares the recipe's optimizer step with the other ranks
    (`training.ranks`): every process makes the same calls.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        folder: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        self.ranks = distributed.here()
        self.workload = workload
        self.recipe = recipe.fitted_to(workload.device.type)
        # Goes with the trainer, and with one that could not be built.
        self.temporary = (
            None
            if folder
            else tempfile.TemporaryDirectory(prefix="labutils-", ignore_cleanup_errors=True)
        )
        self.folder = Path(folder or self.temporary.name)
        self.step_count = 0
        torch.manual_seed(self.recipe.seed)
        began = time.perf_counter()
        self.model = workload.build(self.recipe)
        dataset = workload.dataset(self.model, self.recipe)
        distributed.check(self.recipe, self.ranks.count, len(dataset))
        self.encode_s: float | None = getattr(dataset, "encode_s", None)
        order = workload.order(dataset, self.recipe)
        loader = make_loader(
            dataset,
            self.recipe,
            collate_fn=workload.collate(self.recipe),
            order=order,
            ranks=self.ranks.count,
        )
        compile_as_asked(workload, self.model, self.recipe)
        shared = distributed.distribute(workload, self.model, self.recipe, self.ranks)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = build_optimizer(self.parameters, self.recipe)
        parts = TrainContext(
            workload,
            self.recipe,
            self.model,
            self.parameters,
            optimizer,
            loader,
            self.folder,
            self.ranks,
            shared,
        )
        self.optimizer = optimizer
        self.driver = DRIVERS[self.recipe.driver](parts)
        alone = loader.sampler if order is None else order
        self.sampler = alone if self.ranks.alone else loader.batch_sampler
        self.resume_data(taken=0)
        self.build_s = time.perf_counter() - began
        if resume:
            checkpoint.load(self)

    def step(self, batches: Iterator[Batch] | None = None) -> None:
        """One optimizer step, accumulation included, on the next of `batches`, or else of the
        trainer's own data. On a GPU it may still be running when this returns."""
        with (
            attention_kernel(self.recipe.attention),
            timed_convolutions(self.recipe.cudnn_benchmark),
            float32_rounded(self.recipe.tf32),
            variants_allowed(self.recipe.compile, self.recipe.dynamic),
        ):
            self.driver.step(batches or self.batches)
        self.step_count += 1

    def run(
        self,
        steps: int,
        checkpoint_every: int = 0,
        after_step: Callable[[Trainer], None] | None = None,
    ) -> None:
        """Step until `steps` optimizer steps of the run are done, saving a checkpoint after every
        so many (0: none).

        `after_step` is called with the trainer after every step (`logs.MemoryLog`).
        """
        while self.step_count < steps:
            self.step()
            if after_step is not None:
                after_step(self)
            if checkpoint_every and self.step_count % checkpoint_every == 0:
                self.save()

    def save(self) -> Path:
        """Write a checkpoint to resume from, atomically; the one before is replaced only when this
        one is whole.
        """
        return checkpoint.save(self)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the LoRA weights as safetensors in PEFT's format and, for diffusion models, in
        diffusers' own.

        Of several ranks the first one writes. Raises `ValueError` where there are none, or where
        they are cut among the ranks.
        """
        if self.recipe.adapter == "none":
            raise ValueError(
                "adapter='none' trains the model's own weights: there is no adapter to save. Use "
                "save()."
            )
        if distributed.is_sharded(self.parameters):
            raise ValueError(
                "parallel='fsdp' holds a part of the adapter on each rank. Use save(), which "
                "gathers it; one process "
                "can take that up (resume=True) and save the adapter."
            )
        if self.ranks.rank == 0:
            self.workload.save(self.model, Path(folder))

    def resume_data(self, taken: int) -> None:
        """Let the data go on behind the `taken` first micro-batches of the run."""
        weigh = functools.partial(self.workload.work_of, self.recipe)
        self.batches = Batches(
            self.driver.loader,
            self.recipe.micro_batch,
            self.sampler,
            taken,
            weigh,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
        )

    @property
    def losses(self) -> list[float]:
        """The losses known on the host so far, one an optimizer step of this trainer."""
        return self.driver.log.losses

    def close(self) -> None:
        """End the workers, finish the log, drop the temporary folder."""
        try:
            self.batches.close()
            self.driver.close()
        finally:
            if self.temporary:
                self.temporary.cleanup()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.driver.log.across = (
                own  # the other ranks may be gone: nothing more is asked of them
            )
        self.close()
