"""Three ways to drive one optimizer step. Each does the same computation on the same model.

AccelerateStep   as the public script does: the accelerate library around every call
EagerStep        plain PyTorch: the same operations without the library's host work
GraphStep        the eager step recorded once as a CUDA graph and replayed
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from labutils.layers.cuda_graph import DYNAMIC, Captured, compile_blocks
from labutils.profiling import compat
from labutils.recipe import Recipe, Unavailable
from labutils.training.batches import Batch, Batches, on_device
from labutils.training.distributed import Ranks, share_of, synchronising
from labutils.training.loss_log import open_log, tensorboard
from labutils.workloads.base import Workload

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class StepContext:
    """What every driver works with. `shared`: what synchronises gradients, see `distribute`."""

    workload: Workload
    recipe: Recipe
    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    folder: Path
    ranks: Ranks
    shared: nn.Module | None

    @property
    def micro_steps(self) -> int:
        """Micro-batches of an optimizer step that this process takes."""
        return share_of(self.recipe, self.ranks.count)

    def loss(self, batch: Batch) -> Tensor:
        """The micro-batch's mean loss for newly drawn random numbers.

        Every rank draws all ranks' numbers and keeps its own. So a micro-batch has the numbers that
        one process would give it, all generators stay alike, and one of them in a checkpoint stands
        for all. It costs a few small kernels a rank.
        """
        draws = [self.workload.draw(self.model, batch) for _ in range(self.ranks.count)]
        return self.workload.loss(self.model, batch, draws[self.ranks.rank])


def build_optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with the script's settings.

    The fused form updates all parameters in one kernel and never asks the host, which a capture
    needs. bitsandbytes keeps moments of 4096 numbers or more in 8 bits, a scale for each 256 of
    them; smaller ones stay in float32.
    """
    settings: dict[str, Any] = {
        "lr": recipe.learning_rate,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
    }
    if recipe.optimizer == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **settings)
    if recipe.optimizer == "adamw-fused":
        settings |= {"fused": True, "capturable": parameters[0].device.type == "cuda"}
    return torch.optim.AdamW(parameters, **settings)


def compile_as_asked(workload: Workload, model: nn.Module, recipe: Recipe) -> None:
    """Compile the trained part or its blocks, in place, as the recipe says."""
    if recipe.compile == "off":
        return
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") != "0":
        raise Unavailable("TORCHDYNAMO_DISABLE is set: torch.compile would do nothing; unset it")
    if recipe.compile_scope == "blocks":
        compile_blocks(workload.blocks(model), recipe.compile, recipe.dynamic)
        return
    name, trained = workload.trained(model)
    compiled = torch.compile(trained, mode=recipe.compile, dynamic=DYNAMIC[recipe.dynamic])
    setattr(model, name, compiled)


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    state = (value for entry in optimizer.state.values() for value in entry.values())
    return [value for value in state if torch.is_tensor(value)]


class AccelerateStep:
    """The public script's loop body: `accumulate`, `backward`, `clip_grad_norm_`, `step` through
    accelerate.

    accelerate's loader moves each batch to the device itself, one batch ahead. So `non_blocking` is
    set in accelerate's own configuration.
    """

    def __init__(self, context: StepContext) -> None:
        from diffusers.optimization import get_scheduler

        self.context, recipe = context, context.recipe
        self.accelerator = self._accelerator()
        self.scaler = self.accelerator.scaler
        self.accelerator.init_trackers("labutils")
        scheduler = get_scheduler("constant", optimizer=context.optimizer)
        name, trained = context.workload.trained(context.model)
        trained, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            trained, context.optimizer, context.loader, scheduler
        )
        setattr(context.model, name, trained)
        write, device = self.accelerator.log, context.workload.device
        self.log = open_log(recipe.logging, write, context.micro_steps, device)

    def _accelerator(self) -> Any:
        from accelerate import Accelerator
        from accelerate.utils import (
            DataLoaderConfiguration,
            GradientAccumulationPlugin,
            ProjectConfiguration,
        )

        recipe = self.context.recipe
        precision = "no" if recipe.precision == "fp32" else recipe.precision
        compat.forget_other_precision(precision)
        return Accelerator(
            cpu=self.context.workload.device.type == "cpu",
            mixed_precision=precision,
            log_with="tensorboard",
            project_config=ProjectConfiguration(project_dir=str(self.context.folder)),
            dataloader_config=DataLoaderConfiguration(non_blocking=recipe.non_blocking),
            # The script lets an epoch's end cut a step short; here every step has the same work.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.context.micro_steps,
                sync_with_dataloader=False,
            ),
        )

    def step(self, batches: Batches) -> None:
        """One optimizer step of `recipe.accumulation` micro-steps."""
        context, accelerator = self.context, self.accelerator
        # Trainers side by side share accelerate's state, so each says its micro-steps anew.
        accelerator.gradient_accumulation_steps = context.micro_steps
        for _ in range(context.micro_steps):
            batch = next(batches)
            with accelerator.accumulate(context.workload.trained(context.model)[1]):
                loss = context.loss(batch)
                self.log.micro_step(accelerator.gather(loss.repeat(context.recipe.micro_batch)))
                with record_function("backward"):
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    with record_function("clip"):
                        accelerator.clip_grad_norm_(
                            context.parameters, context.recipe.max_grad_norm
                        )
                with record_function("optimizer"):
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            self.log.end_micro_step(loss)
            del batch, loss  # before the next forward pass: what they hold would add to its peak
        self.log.end_step()

    def close(self) -> None:
        try:
            self.log.close()
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()


class EagerStep:
    """Plain PyTorch: the operations of the script's loop body and nothing around them."""

    def __init__(self, context: StepContext) -> None:
        self.context, recipe = context, context.recipe
        self.loader = context.loader
        device = context.workload.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
        if self.scaler.is_enabled():  # creates the scale now: a capture must find it there
            self.scaler.scale(torch.zeros((), device=device))
        if dtype := AUTOCAST.get(recipe.precision):
            # Only the trained network, as accelerate does. Around it autocast would compute the
            # noise schedule's powers in float32, and hand the network inputs of another type.
            trained = context.workload.trained(context.model)[1]
            trained.forward = torch.autocast(device.type, dtype)(trained.forward)
        write, self._close_writer = tensorboard(
            context.folder, flush=recipe.logging == "synchronous"
        )
        self.log = open_log(recipe.logging, write, context.micro_steps, device, context.ranks.mean)

    def step(self, batches: Batches) -> None:
        """One optimizer step of `recipe.accumulation` micro-steps. Gradients add up in `.grad`,
        multiplied by the loss scale.
        """
        context, micro_steps = self.context, self.context.micro_steps
        device, non_blocking = context.workload.device, context.recipe.non_blocking
        for number in range(1, micro_steps + 1):
            with synchronising(context.shared, context.recipe, last=number == micro_steps):
                loss = self.loss(on_device(next(batches), device, non_blocking))
                self.log.micro_step(loss)
                with record_function("backward"):
                    self.scaler.scale(loss / micro_steps).backward()
                self.log.end_micro_step(loss)
                del loss  # before the next forward pass: what it holds would add to its peak
        self.update()
        context.optimizer.zero_grad()
        self.log.end_step()

    def loss(self, batch: Batch) -> Tensor:
        return self.context.loss(batch)

    def update(self) -> None:
        """Clip and apply the accumulated gradients; the loss scale follows."""
        context = self.context
        with record_function("clip"):
            self.scaler.unscale_(context.optimizer)
            torch.nn.utils.clip_grad_norm_(context.parameters, context.recipe.max_grad_norm)
        with record_function("optimizer"):
            self.scaler.step(context.optimizer)
            self.scaler.update()

    def close(self) -> None:
        try:
            self.log.close()
        finally:
            self._close_writer()


class GraphStep(EagerStep):
    """The eager step, all micro-steps and the optimizer's update, recorded as one CUDA graph.

    A recording reads and writes fixed addresses. So batches are copied into tensors of its own, and
    gradients are allocated beforehand and zeroed inside the graph: gradients that a capture
    allocates itself are replaced, not added to, by the next micro-step's, and training goes wrong
    without a word.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.inputs: list[Batch] = []
        streams = context.recipe.streams
        self.streams = [torch.cuda.Stream() for _ in range(streams)] if streams > 1 else []
        self.captured: Callable[[], None] | None = None

    def step(self, batches: Batches) -> None:
        """Copy the step's micro-batches in and replay. The first call warms up and captures."""
        self._take([next(batches) for _ in range(self.context.recipe.accumulation)])
        if self.captured is None:
            for parameter in self.context.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.captured = Captured(self._whole_step, self._state)
        self.captured()
        self.log.passed()

    def _take(self, batches: list[Batch]) -> None:
        if not self.inputs:
            device = self.context.workload.device
            self.inputs = [on_device(batch, device, False) for batch in batches]
            return
        with record_function("to_device"):
            for mine, batch in zip(self.inputs, batches, strict=True):
                for name, tensor in batch.items():
                    mine[name].copy_(tensor, non_blocking=self.context.recipe.non_blocking)

    def _whole_step(self) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.context.parameters])
        if self.context.recipe.streams == 1:
            for batch in self.inputs:
                loss = self.loss(batch)
                self.log.micro_step(loss)
                with record_function("backward"):
                    self.scaler.scale(loss / self.context.recipe.accumulation).backward()
                del loss
        else:
            self._side_by_side()
        self.update()
        self.log.put()

    def _side_by_side(self) -> None:
        """All micro-batches, each on the next of `recipe.streams` streams.

        What they share is touched after they have met again: two streams that add to one `.grad`
        would lose a gradient now and then.
        """
        here = torch.cuda.current_stream()
        results = []
        for stream in self.streams:
            stream.wait_stream(here)
        for index, batch in enumerate(self.inputs):
            with torch.cuda.stream(self.streams[index % len(self.streams)]):
                loss = self.loss(batch)
                scaled = self.scaler.scale(loss / self.context.recipe.accumulation)
                gradients = torch.autograd.grad(scaled, self.context.parameters)
                results.append((loss.detach(), gradients))
        for stream in self.streams:
            here.wait_stream(stream)
        for loss, gradients in results:
            self.log.micro_step(loss)
            accumulated = [parameter.grad for parameter in self.context.parameters]
            torch._foreach_add_(accumulated, gradients)

    def _state(self) -> list[Tensor]:
        """Everything the step changes in place."""
        moments = moments_of(self.context.optimizer)
        scale = compat.loss_scale(self.scaler) if self.scaler.is_enabled() else []
        return [*self.context.parameters, *moments, *scale, *self.log.tensors]


DRIVERS: dict[str, Any] = {"accelerate": AccelerateStep, "eager": EagerStep, "graph": GraphStep}
