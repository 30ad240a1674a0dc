"""Three ways to drive one optimizer step; each does the same computation on the same model.

AccelerateStep   as the public script does: the accelerate library around every call
EagerStep        plain PyTorch: the same operations without the library's host work
GraphStep        the eager step recorded once as a CUDA graph and replayed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from labutils.layers.cuda_graph import Captured, compile_blocks, compile_model
from labutils.recipe import Recipe
from labutils.training.batches import Batch, Batches, on_device
from labutils.training.distributed import Ranks, ddp_options, drawn, share_of, synchronising
from labutils.training.logs import Log, RingLog, SynchronousLog, tensorboard
from labutils.workloads.base import Workload

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class TrainContext:
    """What every driver works with."""

    workload: Workload
    recipe: Recipe
    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    folder: Path
    ranks: Ranks = field(default_factory=Ranks)
    shared: nn.Module | None = None

    @property
    def micro_steps(self) -> int:
        """Micro-batches of an optimizer step that this process takes."""
        return share_of(self.recipe, self.ranks.count)


def build_optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with the script's settings. Its fused form updates all parameters in one kernel,
    unscales nothing twice and never asks the host, which is what a capture needs. bitsandbytes
    keeps moments of 4096 numbers or more in 8 bits, a scale for each 256 of them; smaller ones stay
    in float32."""
    settings = {
        "lr": recipe.learning_rate,
        "betas": (0.9, 0.999),
        "weight_decay": 1e-2,
        "eps": 1e-8,
    }
    if recipe.optimizer in ("adamw-8bit", "adamw-paged"):
        from bitsandbytes import optim

        return (optim.AdamW8bit if recipe.optimizer == "adamw-8bit" else optim.PagedAdamW8bit)(
            parameters, **settings
        )
    on_gpu = parameters[0].device.type == "cuda"
    forms = {
        "adamw": {},
        "adamw-loop": {"foreach": False},
        "adamw-foreach": {"foreach": True},
        "adamw-fused": {"fused": True, "capturable": on_gpu},
    }
    return torch.optim.AdamW(parameters, **settings, **forms[recipe.optimizer])


def compile_as_asked(workload: Workload, model: nn.Module, recipe: Recipe) -> None:
    """Compile the trained part (or its blocks, or the encoders too) in place, as the recipe says."""
    if recipe.compile == "off":
        return
    if recipe.compile_scope == "blocks":
        compile_blocks(workload.blocks(model), recipe.compile, recipe.dynamic)
        return
    name, trained = workload.trained(model)
    setattr(model, name, compile_model(trained, recipe.compile, recipe.dynamic))
    if recipe.compile_scope == "everything":
        compile_blocks(workload.frozen(model), recipe.compile, recipe.dynamic)


class AccelerateStep:
    """The public script's loop body: `accumulate`, `backward`, `clip_grad_norm_`, `step` through
    accelerate.

    accelerate's loader moves each batch to the device itself, one batch ahead. So `non_blocking` is
    set where the copy is made, in accelerate's own configuration.
    """

    def __init__(self, parts: TrainContext) -> None:
        from accelerate import Accelerator
        from accelerate.data_loader import prepare_data_loader
        from accelerate.utils import (
            DataLoaderConfiguration,
            DistributedDataParallelKwargs,
            GradientAccumulationPlugin,
            ProjectConfiguration,
        )
        from diffusers.optimization import get_scheduler

        self.parts, recipe = parts, parts.recipe
        precision = "no" if recipe.precision == "fp32" else recipe.precision
        _forget_other_precision(precision)
        self.accelerator = Accelerator(
            cpu=parts.workload.device.type == "cpu",
            mixed_precision=precision,
            log_with="tensorboard",
            project_config=ProjectConfiguration(project_dir=str(parts.folder)),
            dataloader_config=DataLoaderConfiguration(non_blocking=recipe.non_blocking),
            # The script lets an epoch's end cut a step short; here every optimizer step has the
            # same work.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=parts.micro_steps,
                sync_with_dataloader=False,
                sync_each_batch=recipe.synchronise == "each",
            ),
            kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options(recipe))],
        )
        self.accelerator.init_trackers("labutils")
        scheduler = get_scheduler("constant", optimizer=parts.optimizer)
        name, trained = parts.workload.trained(parts.model)
        loader = parts.loader
        if (
            not parts.ranks.alone
        ):  # it hands out this rank's share already: accelerate is told of one process
            loader = prepare_data_loader(
                loader,
                self.accelerator.device,
                1,
                0,
                put_on_device=True,
                non_blocking=recipe.non_blocking,
            )
            loader._is_accelerate_prepared = True
        trained, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            trained, parts.optimizer, loader, scheduler
        )
        setattr(parts.model, name, trained)
        self.log: Log = SynchronousLog(self._write, parts.micro_steps)
        if recipe.logging == "ring-buffer":
            self.log = RingLog(
                self._write, parts.micro_steps, parts.workload.device, across=parts.ranks.mean
            )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.accelerator.scaler

    def step(self, batches: Batches) -> None:
        """One optimizer step of `recipe.accumulation` micro-steps."""
        # Sessions side by side share accelerate's state; each says anew how many micro-steps it
        # accumulates.
        self.accelerator.gradient_accumulation_steps = self.parts.micro_steps
        for _ in range(self.parts.micro_steps):
            self._micro_step(next(batches))
        self.log.end_step()

    def _micro_step(self, batch: Batch) -> None:
        parts, accelerator = self.parts, self.accelerator
        with accelerator.accumulate(parts.workload.trained(parts.model)[1]):
            draws = drawn(parts.workload, parts.model, batch, parts.ranks)
            loss = parts.workload.loss(parts.model, batch, draws)
            self.log.micro_step(accelerator.gather(loss.repeat(parts.recipe.micro_batch)))
            with record_function("backward"):
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                with record_function("clip"):
                    accelerator.clip_grad_norm_(parts.parameters, parts.recipe.max_grad_norm)
            with record_function("optimizer"):
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.log.end_micro_step(loss)

    def close(self) -> None:
        try:
            self.log.close()
        finally:
            if self.parts.ranks.alone:
                self.accelerator.end_training()
            else:  # which would also end the process group, and other trainers train in it
                for tracker in self.accelerator.trackers:
                    tracker.finish()

    def _write(self, values: dict[str, float], step: int) -> None:
        self.accelerator.log(values, step=step)


def _forget_other_precision(precision: str) -> None:
    """accelerate holds one precision a process, and refuses a second; trainers of another precision
    have ended by now."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()


def _autocast(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Run `module`, and nothing around it, under autocast, as accelerate does with what it
    prepares.

    What surrounds the trained network stays in its own precision: autocast would compute the noise
    schedule's powers in float32, and hand the network inputs of another type than the script does.
    """
    module.forward = torch.autocast(device, dtype)(module.forward)


class EagerStep:
    """Plain PyTorch: the operations of the script's loop body and nothing around them."""

    def __init__(self, parts: TrainContext) -> None:
        self.parts, recipe = parts, parts.recipe
        self.loader = parts.loader
        device = parts.workload.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
        if self.scaler.is_enabled():
            self.scaler.scale(
                torch.zeros((), device=device)
            )  # creates the scale now: a capture must find it there
        if dtype := AUTOCAST.get(recipe.precision):
            _autocast(parts.workload.trained(parts.model)[1], device.type, dtype)
        write, self._close_writer = tensorboard(parts.folder, flush=recipe.logging == "synchronous")
        synchronous = recipe.logging == "synchronous"
        micro_steps, across = parts.micro_steps, parts.ranks.mean
        self.log: Log = (
            SynchronousLog(write, micro_steps, across)
            if synchronous
            else RingLog(write, micro_steps, device, across=across)
        )

    def step(self, batches: Batches) -> None:
        """One optimizer step of `recipe.accumulation` micro-steps."""
        parts, micro_steps = self.parts, self.parts.micro_steps
        for number in range(1, micro_steps + 1):
            with synchronising(parts.shared, parts.recipe, last=number == micro_steps):
                self.micro_step(
                    on_device(next(batches), parts.workload.device, parts.recipe.non_blocking)
                )
        self.update()
        self.parts.optimizer.zero_grad()
        self.log.end_step()

    def micro_step(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch; gradients add up in `.grad`, multiplied by the
        loss scale.
        """
        loss = self.loss(batch)
        self.log.micro_step(loss)
        with record_function("backward"):
            self.scaler.scale(loss / self.parts.micro_steps).backward()
        self.log.end_micro_step(loss)

    def loss(self, batch: Batch) -> Tensor:
        """The micro-batch's mean loss for newly drawn random numbers."""
        workload, model = self.parts.workload, self.parts.model
        return workload.loss(model, batch, drawn(workload, model, batch, self.parts.ranks))

    def update(self) -> None:
        """Clip and apply the accumulated gradients; the loss scale follows."""
        parts = self.parts
        with record_function("clip"):
            self.scaler.unscale_(parts.optimizer)
            torch.nn.utils.clip_grad_norm_(parts.parameters, parts.recipe.max_grad_norm)
        with record_function("optimizer"):
            self.scaler.step(parts.optimizer)
            self.scaler.update()

    def close(self) -> None:
        try:
            self.log.close()
        finally:
            self._close_writer()


class GraphStep(EagerStep):
    """The eager step, all micro-steps and the optimizer's update, recorded as one CUDA graph.

    A recording reads and writes fixed addresses, so batches are copied into tensors of its own, and
    gradients are allocated beforehand and zeroed inside the graph: gradients that a capture
    allocates itself are replaced, not added to, by the next micro-step's, and training goes wrong
    without a word.
    """

    def __init__(self, parts: TrainContext) -> None:
        super().__init__(parts)
        if parts.recipe.optimizer != "adamw-fused":
            raise ValueError(
                "driver='graph' needs optimizer='adamw-fused': the other form asks the host "
                "whether to step."
            )
        self.inputs: list[Batch] = []
        self.streams = [torch.cuda.Stream() for _ in range(parts.recipe.streams)]
        self.captured: Callable[[], None] | None = None

    def step(self, batches: Batches) -> None:
        """One optimizer step: copy its micro-batches in, replay. The first call warms up and
        captures.
        """
        self._take([next(batches) for _ in range(self.parts.recipe.accumulation)])
        if self.captured is None:
            for parameter in self.parts.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.captured = Captured(self._whole_step, self._state)
        self.captured()
        self.log.passed()

    def _take(self, batches: list[Batch]) -> None:
        if not self.inputs:
            self.inputs = [on_device(batch, self.parts.workload.device, False) for batch in batches]
            return
        with record_function("to_device"):
            for mine, batch in zip(self.inputs, batches, strict=True):
                for name, tensor in batch.items():
                    mine[name].copy_(tensor, non_blocking=self.parts.recipe.non_blocking)

    def _whole_step(self) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.parts.parameters])
        if self.parts.recipe.streams == 1:
            for batch in self.inputs:
                self.micro_step(batch)
        else:
            self._side_by_side()
        self.update()
        self.log.put()

    def _side_by_side(self) -> None:
        """All micro-batches, each on the next of `recipe.streams` streams. What they share is
        touched after they have met again: two streams that add to one `.grad` would lose a gradient
        now and then."""
        here = torch.cuda.current_stream()
        results = []
        for stream in self.streams:
            stream.wait_stream(here)
        for index, batch in enumerate(self.inputs):
            with torch.cuda.stream(self.streams[index % len(self.streams)]):
                loss = self.loss(batch)
                scaled = self.scaler.scale(loss / self.parts.recipe.accumulation)
                results.append((loss.detach(), torch.autograd.grad(scaled, self.parts.parameters)))
        for stream in self.streams:
            here.wait_stream(stream)
        for loss, gradients in results:
            self.log.micro_step(loss)
            torch._foreach_add_([parameter.grad for parameter in self.parts.parameters], gradients)

    def _state(self) -> list[Tensor]:
        """Everything the step changes in place."""
        moments = [
            t
            for state in self.parts.optimizer.state.values()
            for t in state.values()
            if torch.is_tensor(t)
        ]
        scale = (
            [self.scaler._scale, self.scaler._growth_tracker] if self.scaler.is_enabled() else []
        )
        return [*self.parts.parameters, *moments, *scale, *self.log.tensors]


DRIVERS: dict[str, Any] = {"accelerate": AccelerateStep, "eager": EagerStep, "graph": GraphStep}
