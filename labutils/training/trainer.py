"""A recipe at work on a workload: built once, stepped as often as one likes."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.utils.data import Dataset

from labutils.data.loader import make_loader
from labutils.layers.cuda_graph import float32_rounded, timed_convolutions, variants_allowed
from labutils.recipe import Recipe
from labutils.training import checkpoint, distributed
from labutils.training.batches import Batches
from labutils.training.loss_log import own
from labutils.training.step import DRIVERS, StepContext, build_optimizer, compile_as_asked
from labutils.workloads.base import Batch, Workload

MUST_AGREE = (
    "seed",
    "rank",
    "adapter",
    "base_linear",
    "precision",
    "micro_batch",
    "accumulation",
    "shapes",
    "token_budget",
    "optimizer",
    "learning_rate",
    "max_grad_norm",
)
"""Knobs that a resumed run must share with its checkpoint. The others only change its speed."""


class Hooks(TypedDict, total=False):
    """What a caller may put in the place of the workload's own, or add to it."""

    build: Callable[[Recipe], nn.Module]
    """Makes the model; default: `workload.build`."""
    on_model: Callable[[nn.Module], None]
    """Changes the model once it is built, before it is compiled or distributed."""
    dataset: Callable[[nn.Module, Recipe], Dataset]
    """Makes the examples; default: `workload.dataset`."""
    driver: Callable[[StepContext], Any]
    """Makes what takes the steps; default: the driver that the recipe names."""


class Trainer:
    """Model, data, optimizer and driver of one recipe, and the loop over its optimizer steps.

        with Trainer(workload, recipe, folder="runs/mine") as trainer:
            trainer.run(100, checkpoint_every=50)

    folder: for logs and checkpoints; none given: a temporary one that goes with the trainer.
    resume: go on from the folder's checkpoint. Raises `FileNotFoundError` where there is none,
    `ValueError` where it is damaged or belongs to another recipe.
    hooks: see `Hooks`.

    `step_count` counts optimizer steps since the run's beginning. `recipe` is the recipe as it fits
    this device. `build_s` is what building took in seconds; `encode_s` the part of it that encoded
    the examples, None where the recipe caches nothing. Started by torchrun, the trainer shares each
    optimizer step with the other ranks (`training.distributed`); all make the same calls.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        folder: str | Path | None = None,
        resume: bool = False,
        **hooks: Unpack[Hooks],
    ) -> None:
        self.ranks = distributed.here()
        self.workload = workload
        self.recipe = recipe = recipe.fitted_to(workload.device.type)
        self.temporary = None  # removed with the trainer, and with one that could not be built
        if not folder:
            self.temporary = tempfile.TemporaryDirectory(
                prefix="labutils-", ignore_cleanup_errors=True
            )
        self.folder = Path(folder or self.temporary.name)
        self.step_count = 0
        torch.manual_seed(recipe.seed)
        began = time.perf_counter()
        self.model = hooks.get("build", workload.build)(recipe)
        if "on_model" in hooks:
            hooks["on_model"](self.model)
        self.dataset = hooks.get("dataset", workload.dataset)(self.model, recipe)
        self.encode_s: float | None = getattr(self.dataset, "encode_s", None)
        distributed.check(recipe, self.ranks.count)
        self.driver = self._driver(hooks.get("driver", DRIVERS[recipe.driver]))
        self.batches = self._batches(taken=0)
        self.build_s = time.perf_counter() - began
        if resume:
            self.load_state_dict(checkpoint.read(self.folder))

    def _driver(self, kind: Callable[[StepContext], Any]) -> Any:
        workload, recipe, ranks = self.workload, self.recipe, self.ranks
        order = workload.order(self.dataset, recipe)
        loader = make_loader(
            self.dataset,
            recipe,
            collate_fn=workload.collate(recipe),
            epoch_length=workload.epoch_length,
            order=order,
            ranks=ranks.count,
        )
        self.sampler = loader.sampler if order is None else order
        if not ranks.alone:
            self.sampler = loader.batch_sampler
        compile_as_asked(workload, self.model, recipe)
        shared = distributed.distribute(workload, self.model, recipe, ranks)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.parameters, recipe)
        context = StepContext(
            workload,
            recipe,
            self.model,
            self.parameters,
            self.optimizer,
            loader,
            self.folder,
            ranks,
            shared,
        )
        return kind(context)

    def _batches(self, taken: int) -> Batches:
        return Batches(
            self.driver.loader,
            self.recipe.micro_batch,
            self.sampler,
            taken,
            functools.partial(self.workload.work_of, self.recipe),
            rank=self.ranks.rank,
            ranks=self.ranks.count,
        )

    def step(self, batches: Iterator[Batch] | None = None) -> None:
        """One optimizer step, accumulation included, on the next of `batches` (default: the
        trainer's own data). On a GPU it may still be running when this returns.
        """
        with (
            timed_convolutions(self.recipe.cudnn_benchmark),
            float32_rounded(self.recipe.tf32),
            variants_allowed(self.recipe.compile, self.recipe.dynamic),
        ):
            self.driver.step(batches or self.batches)
        self.step_count += 1

    def run(self, steps: int, checkpoint_every: int = 0) -> None:
        """Step until the run has done `steps` optimizer steps.

        checkpoint_every: save after every so many steps; 0: never.
        """
        while self.step_count < steps:
            self.step()
            if checkpoint_every and self.step_count % checkpoint_every == 0:
                self.save()

    @property
    def losses(self) -> list[float]:
        """The losses known on the host so far, one an optimizer step of this trainer."""
        return self.driver.log.losses

    # ------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything the run's future depends on: trained weights, the optimizer's moments, the
        loss scale, random generators, and how many micro-batches were taken.

        Frozen weights come from the seed or the hub again, and the data's order from the seed.
        Weights that are cut among ranks are gathered by all ranks together, so the state is the
        same whatever wrote it. Raises `NotFinite` where the loss became NaN or infinite.
        """
        self.driver.log.flush()
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return {
            "step": self.step_count,
            "taken": self.batches.taken,
            "recipe": self.recipe.as_dict(),
            "workload": self._identity,
            "parameters": distributed.whole_parameters(self.parameters),
            "optimizer": distributed.optimizer_state(self.optimizer),
            "scaler": self.driver.scaler.state_dict() if self.driver.scaler else {},
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the run where `state` was taken; what follows is what the unbroken run would do.

        One exception: images that aren't square are cropped at random by whoever reads them, and
        workers begin their random numbers anew. Raises `ValueError` where the state is another
        recipe's or workload's, before anything changes.
        """
        saved = state["recipe"] | {"workload": state["workload"]}
        mine = self.recipe.as_dict() | {"workload": self._identity}
        for knob in ("workload", *MUST_AGREE):
            if saved.get(knob) != mine[knob]:
                raise ValueError(
                    f"The checkpoint was written with {knob}={saved.get(knob)!r}; this run has "
                    f"{mine[knob]!r}. Resume with the same settings, or start in another folder."
                )
        distributed.take_parameters(self.parameters, state["parameters"])
        distributed.load_optimizer_state(self.optimizer, state["optimizer"])
        if state["scaler"]:
            self.driver.scaler.load_state_dict(state["scaler"])
        self.step_count = state["step"]
        self.driver.log.start_at(state["step"])
        self.rewind_data(state["taken"])
        torch.set_rng_state(state["random"]["cpu"])
        if state["random"]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"]["cuda"])

    @property
    def _identity(self) -> list[str]:
        return [getattr(self.workload, name) for name in ("name", "scale", "weights", "data")]

    def save(self) -> Path:
        """Write a checkpoint to resume from, atomically. Of several ranks the first one writes."""
        state = self.state_dict()
        if self.ranks.rank:
            return self.folder / checkpoint.FILE
        return checkpoint.write(state, self.folder)

    def rewind_data(self, taken: int) -> None:
        """Let the data go on behind the first `taken` micro-batches of the run."""
        self.batches.close()
        self.batches = self._batches(taken)

    # ------------------------------------------------------------------------------ end

    def close(self) -> None:
        """End the workers, finish the log, remove the temporary folder."""
        try:
            self.batches.close()
            self.driver.close()
        finally:
            if self.temporary:
                self.temporary.cleanup()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.driver.log.across = own  # the other ranks may be gone: ask nothing more of them
        self.close()
