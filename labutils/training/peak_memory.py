"""The peak memory of a training step: predicted from shapes, and recorded as it happens.

    memory = predicted(workload, recipe)         a step on the meta device: tensors without bytes
    memory, peak_gb = recorded(workload, recipe) a real step: the allocator's record, or of tensors

The prediction takes an optimizer step through the very code that trains, on tensors without
contents: whatever operations make is counted for as long as anything holds it. What no shape tells
is added: autocast and fused attention as a GPU does them (`profiling.memory_model`), the
optimizer's moments, and the libraries' workspaces.
"""

from __future__ import annotations

import functools
import gc
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from labutils.profiling import cuda
from labutils.profiling.memory import AllocatorRecord, StepMemory, TensorRecord, logit_bytes
from labutils.profiling.memory_model import OnMeta, bytes_of, tensors_of
from labutils.recipe import Recipe
from labutils.training.batches import on_device
from labutils.training.step import AUTOCAST, EagerStep, StepContext, moments_of
from labutils.training.trainer import Trainer
from labutils.workloads import Workload, open_workload
from labutils.workloads.base import Batch
from labutils.workloads.stable_diffusion import on_drawn_latents

GB = 1e9
WORKSPACES = 2 * 32 * 2**20
"""cuBLAS takes 32 MiB on Hopper from the allocator for each of its handles: the forward pass has
one, and so has the thread that the backward pass runs in."""
KNOWN = {
    "driver": ("eager", "accelerate"),
    "compile": ("off",),
    "base_linear": ("published",),
    "checkpointing": ("off", "blocks", "selective"),
    "cache": ("nothing", "latents+text"),
    "shapes": ("as-they-come", "fixed", "padded"),
}
"""Knob -> the settings that can be predicted."""

# -------------------------------------------------------------------------------------- predicted


def predicted(workload: Workload, recipe: Recipe, on: str = "") -> StepMemory:
    """The memory of an optimizer step with this recipe, from shapes alone; seconds at any scale.

    on: "cuda" or "cpu", as the workload's device if not given. Of more than two micro-batches two
    are taken: the second finds the first one's gradients, as all others do. Longest examples are
    taken where they vary. The optimizer's state is that of AdamW without compression. LLaVA is
    predicted with layers="rewritten" only: the published layers look at their inputs' contents.
    Raises `ValueError` for a setting that is not in `KNOWN`.
    """
    on = on or workload.device.type
    recipe = recipe.fitted_to(on)
    for knob, settings in KNOWN.items():
        if (setting := getattr(recipe, knob)) not in settings:
            raise ValueError(
                f"The prediction knows nothing of {knob}={setting!r}. "
                f"Use {' or '.join(map(repr, settings))}."
            )
    twin = _twin(workload.name, workload.scale, workload.data, workload.cache_dir)
    model = _built(twin, recipe.but(micro_batch=1, accumulation=1))
    model.zero_grad()  # a prediction before this one may have left gradients
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    contents = worst_batch(workload, recipe)
    padded = "attention_mask" in contents and not bool(contents["attention_mask"].all())
    batch = {name: tensor.to("meta") for name, tensor in contents.items()}
    record = TensorRecord(tensors_of(model))
    with record, OnMeta(AUTOCAST.get(recipe.precision)):
        for _ in range(min(2, recipe.accumulation)):
            record.mark("forward")
            loss = _loss(twin, model, batch, padded)
            record.mark("backward")
            loss.backward()
        gradients = [parameter.grad for parameter in trained]
        record.mark("update", gradients=gradients)
        clipped = [gradient * 1 for gradient in gradients]  # foreach clipping and AdamW do so
        del clipped
    held = {
        "weights": bytes_of(tensors_of(model)),
        "optimizer": 2 * bytes_of(trained),
        "temporaries": WORKSPACES if on == "cuda" else 0,
    }
    return record.step(held, _logits(workload, batch))


@functools.cache
def _twin(name: str, scale: str, data: str, cache_dir: Path) -> Workload:
    """The workload on the meta device, where its frozen models take no memory."""
    return open_workload(name, scale, data=data, device="meta", cache_dir=cache_dir)


@functools.lru_cache(maxsize=2)
def _built(twin: Workload, recipe: Recipe) -> nn.Module:
    """A twin's model, which batches of all sizes share: making it takes as long as a step does."""
    with torch.random.fork_rng(devices=[]):
        return twin.build(recipe)


def _loss(workload: Workload, model: nn.Module, batch: Batch, padded: bool) -> Tensor:
    if "attention_mask" in batch:
        # transformers would look at its contents to see what it can leave out; it takes one that is
        # there already.
        rows, length = batch["attention_mask"].shape
        mask = None
        if padded:
            mask = torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
        batch = batch | {"attention_mask": {"full_attention": mask, "sliding_attention": mask}}
    return workload.loss(model, batch, workload.draw(model, batch))


def worst_batch(workload: Workload, recipe: Recipe) -> Batch:
    """A micro-batch of the largest examples there are, on the host. Where the recipe caches latents
    and texts they are drawn: shapes alone matter."""
    if recipe.cache != "nothing":
        workload = on_drawn_latents(workload)
    rows = workload.dataset(None, recipe)
    places = list(range(len(rows)))
    if hasattr(workload, "example_sizes"):
        sizes = [example.tokens for example in workload.example_sizes(recipe)]
        places.sort(key=lambda place: -sizes[place])
    chosen = itertools.islice(itertools.cycle(places), recipe.micro_batch)
    collate = workload.collate(recipe)
    return next(iter(DataLoader(rows, batch_sampler=[list(chosen)], collate_fn=collate)))


def _logits(workload: Workload, batch: Batch) -> frozenset[int]:
    """The sizes of a batch's logits; none where there is no vocabulary."""
    words = getattr(workload.size, "words", None)
    if words is None:
        return frozenset()
    rows, length = batch["input_ids"].shape
    return logit_bytes((rows * length, rows * (length - 1)), words)


# --------------------------------------------------------------------------------------- recorded


class PhasedStep(EagerStep):
    """The plain loop's step, which marks its phases in `record`."""

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.record: TensorRecord | AllocatorRecord = TensorRecord()

    def loss(self, batch: Batch) -> Tensor:
        self.record.mark("forward")
        loss = super().loss(batch)
        self.record.mark("backward")
        return loss

    def update(self) -> None:
        gradients = [p.grad for p in self.context.parameters if p.grad is not None]
        self.record.mark("update", gradients=gradients)
        super().update()


def recorded(workload: Workload, recipe: Recipe, settle: int = 2) -> tuple[StepMemory, float]:
    """The memory of a real optimizer step, after `settle` others, and GB at its peak: of tensors,
    by the allocator's counter.

    Without a GPU a tensor record stands in for the allocator's, and its peak for the counter. The
    recipe's driver is replaced by the plain loop, whose phases can be told apart. On a GPU whatever
    else the process holds counts as temporaries: `training.free_memory.make_room` lets go of it.
    """
    on_gpu = workload.device.type == "cuda"
    recipe = recipe.but(driver="eager", logging="ring-buffer")
    gc.collect()  # what an earlier trainer left in cycles would count as this one's
    with Trainer(workload, recipe, driver=PhasedStep) as trainer:
        trainer.run(settle)  # the moments are there from the first step on, workspaces soon after
        largest = worst_batch(workload, trainer.recipe)
        batch = on_device(largest, workload.device, non_blocking=False)
        weights, moments = tensors_of(trainer.model), moments_of(trainer.optimizer)
        held = {"weights": bytes_of(weights), "optimizer": bytes_of(moments)}
        cuda.empty_cache()
        cuda.reset_peak_memory()
        record = AllocatorRecord() if on_gpu else TensorRecord([*weights, *moments])
        trainer.driver.record = record
        with record:
            trainer.step(itertools.repeat(batch))
        if on_gpu:
            held["temporaries"] = max(0, record.allocated_before - sum(held.values()))
        memory = record.step(held, _logits(workload, batch))
        return memory, cuda.peak_memory()[0] if on_gpu else memory.peak / GB


def peak_gb(trainer: Trainer) -> float:
    """GB at the peak of a trainer's next step: of its own tensors, and of those that operations
    make."""
    standing = [*tensors_of(trainer.model), *moments_of(trainer.optimizer)]
    with TensorRecord(standing) as record:
        trainer.step()
    return (bytes_of(standing) + record.peak) / GB
