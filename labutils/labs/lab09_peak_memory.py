"""The peak memory of a training step: predicted from shapes, recorded as it happens, limited.

    memory = predicted(workload, recipe)      a step on the meta device: tensors without bytes
    memory = recorded(workload, recipe)       a real step: the allocator's record, or of tensors
    batch  = largest_batch(fits, start=9)     from a prediction, in as few tries as possible

The prediction takes an optimizer step through the very code that trains, on tensors without
contents: whatever operations make is counted for as long as anything holds it. What no shape tells
is added: autocast and fused attention as a GPU does them (`profiling.memory_model`), the
optimizer's moments, and the libraries' workspaces.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.layers.quantization.nf4_math import BLOCK, doubled_constant_bits
from labutils.profiling import cuda
from labutils.profiling.memory import (
    KINDS,
    AllocatorRecord,
    StepMemory,
    TensorRecord,
    logit_bytes,
)
from labutils.profiling.memory_model import BatchLine, OnMeta, bytes_of, tensors_of
from labutils.recipe import Recipe
from labutils.results.records import Run, is_out_of_memory
from labutils.training import Trainer
from labutils.training.step import AUTOCAST
from labutils.workloads import Workload, open_workload
from labutils.workloads.base import Batch

GB = 1e9
CHECKPOINTING = ("off", "blocks", "selective")
"""The modes in which each recipe of `GRID` is predicted and recorded."""
GRID: dict[str, Recipe] = {
    "sd15-lora": Recipe(
        driver="eager", logging="ring-buffer", cache="latents+text", micro_batch=4, accumulation=1
    ),
    "llava-lora": A2_BASE.but(layers="rewritten"),
    "qwen3-lora-long": A3_BASE.but(driver="eager", micro_batch=2),
}
"""Workload -> the recipe that the prediction is tried on."""

# -------------------------------------------------------------------------------------- predicted

WORKSPACES = 2 * 32 * 2**20
"""cuBLAS takes 32 MiB on Hopper from the allocator for each of its handles: the forward pass has
one, and so has the thread that the backward pass runs in."""
HELD_BITS = {
    "nf4": 4 + doubled_constant_bits(BLOCK),
    "nf4-frozen": 4 + doubled_constant_bits(BLOCK),
    "fp8-frozen": 8,
}
"""`base_linear` -> bits in which it holds a number of the frozen layers, constants included."""


def predicted(workload: Workload, recipe: Recipe, on: str = "") -> StepMemory:
    """The memory of an optimizer step with this recipe, from shapes alone; seconds at any scale.

    on: "cuda" or "cpu", as the workload's device if not given. Of more than two micro-batches two
    are taken: the second finds the first one's gradients, as all others do. Longest examples are
    taken where they vary. LLaVA is taken in its rewritten form: the published one looks at its
    inputs' contents, and holds a little more. Raises `ValueError` for what it knows nothing of.
    """
    on = on or workload.device.type
    recipe = recipe.fitted_to(on)
    _check(recipe)
    if recipe.layers == "published" and workload.name.startswith("llava"):
        recipe = recipe.but(layers="rewritten")
    twin = _twin(workload.name, workload.scale, workload.data, workload.cache_dir)
    model = _built(twin, recipe.but(base_linear="published", micro_batch=1, accumulation=1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    filled = worst_batch(workload, recipe)
    padded = "attention_mask" in filled and not bool(filled["attention_mask"].all())
    batch = {name: tensor.to("meta") for name, tensor in filled.items()}
    moments = [m for parameter in trained for m in moments_of(parameter, recipe.optimizer)]
    held = {
        "weights": bytes_of(tensors_of(model)) - _saved_by_format(twin, model, recipe),
        "optimizer": bytes_of(moments),
        "temporaries": WORKSPACES if on == "cuda" else 0,
    }
    record = TensorRecord([*tensors_of(model), *moments])
    with record, OnMeta(AUTOCAST.get(recipe.precision)):
        _step(record, functools.partial(_loss, twin, model, batch, padded), trained, recipe)
    return record.step(held, _logits(workload, batch))


@functools.cache
def _twin(name: str, scale: str, data: str, cache_dir: Path) -> Workload:
    """The workload on the meta device, where its frozen models take no memory."""
    return open_workload(name, scale, data=data, device="meta", cache_dir=cache_dir)


def at_full(workload: Workload) -> Workload:
    """The same workload at its full size, to be predicted, not built."""
    return _twin(workload.name, "full", workload.data, workload.cache_dir)


@functools.lru_cache(maxsize=2)
def _built(twin: Workload, recipe: Recipe) -> nn.Module:
    """A twin's model, which batches of all sizes share: making it takes as long as a step does."""
    with torch.random.fork_rng(devices=[]):
        return twin.build(recipe)


def _check(recipe: Recipe) -> None:
    if recipe.compile != "off" or recipe.driver == "graph":
        raise ValueError(
            "The prediction is for plain loops: use compile='off' and driver='eager' or "
            "'accelerate'."
        )
    if recipe.base_linear not in ("published", *HELD_BITS):
        raise ValueError(
            f"The prediction doesn't know how base_linear={recipe.base_linear!r} holds its weights."
        )
    if recipe.checkpointing == "offload":
        raise ValueError(
            "The prediction doesn't follow tensors to the host: use checkpointing='blocks'."
        )


def _step(
    record: TensorRecord, loss_of: Callable[[], Tensor], trained: list[nn.Parameter], recipe: Recipe
) -> None:
    """One optimizer step as every driver takes it: micro-batches, the update, no gradients."""
    try:
        passes = min(2, recipe.accumulation)
        for done in range(1, passes + 1):
            loss = loss_of()
            record.mark("backward")
            loss.backward()
            gradients = [parameter.grad for parameter in trained]
            record.mark("forward" if done < passes else "update", gradients=gradients)
        clipped = [parameter.grad * 1 for parameter in trained]  # foreach clipping and AdamW do so
        del clipped
    finally:  # also of a step that failed: the next one may be given the same model
        for parameter in trained:
            parameter.grad = None


def _loss(workload: Workload, model: nn.Module, batch: Batch, padded: bool) -> Tensor:
    if "attention_mask" in batch:
        # transformers would look at its contents to see what it can leave out; it takes one that is
        # there already.
        rows, length = batch["attention_mask"].shape
        mask = None
        if padded:
            mask = torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
        kinds = ("full_attention", "sliding_attention")
        batch = batch | {"attention_mask": dict.fromkeys(kinds, mask)}
    return workload.loss(model, batch, workload.draw(model, batch))


def worst_batch(workload: Workload, recipe: Recipe) -> Batch:
    """A micro-batch of the largest examples there are, on the host."""
    if recipe.cache != "nothing":
        return _encoded_batch(workload, recipe)
    rows, collate = workload.dataset(None, recipe), workload.collate(recipe)
    largest = list(range(len(rows)))
    if recipe.shapes == "packed":  # packed rows are all of one size: the first will do
        return collate([rows[place] for place in next(iter(workload.order(rows, recipe)))])
    if hasattr(workload, "example_sizes"):
        sizes = [example.tokens for example in workload.example_sizes(recipe)]
        largest.sort(key=lambda place: -sizes[place])
    return collate([rows[largest[n % len(largest)]] for n in range(recipe.micro_batch)])


def _encoded_batch(workload: Workload, recipe: Recipe) -> Batch:
    """What a cache of the diffusion model's encoders would hand over: shapes alone matter."""
    if not hasattr(workload, "latent_shape"):
        raise ValueError(
            f"The prediction doesn't know what cache={recipe.cache!r} keeps of this workload."
        )
    channels, *sides = workload.latent_shape
    dtype, rows = AUTOCAST.get(recipe.precision, torch.float32), recipe.micro_batch
    kept: Batch = {"moments": torch.zeros(rows, 2 * channels, *sides, dtype=dtype)}
    if recipe.cache == "latents":
        return kept | {"input_ids": torch.zeros(rows, 77, dtype=torch.long)}
    width = workload.size.text_width
    return kept | {"condition": torch.zeros(rows, 77, width, dtype=dtype)}


def _logits(workload: Workload, batch: Batch) -> frozenset[int]:
    """The sizes of a batch's logits; none where there is no vocabulary."""
    words = getattr(workload.size, "words", None)
    if words is None:
        return frozenset()
    rows, length = batch["input_ids"].shape
    return logit_bytes((rows * length, rows * (length - 1)), words)


def _saved_by_format(twin: Workload, model: nn.Module, recipe: Recipe) -> int:
    """Bytes that the frozen layers are smaller by which the recipe's format converts."""
    if recipe.base_linear == "published":
        return 0
    weights = [model.get_submodule(place).weight for place in twin.converted(model, recipe)]
    return sum(round(w.nbytes - w.numel() * HELD_BITS[recipe.base_linear] / 8) for w in weights)


PAGED_FROM = 100_000
"""Numbers from which bitsandbytes keeps a parameter's moments in pages."""


def moments_of(parameter: Tensor, optimizer: str) -> list[Tensor]:
    """AdamW's state of a parameter, as tensors of the sizes that the optimizer keeps on the GPU."""
    if optimizer in ("adamw-8bit", "adamw-paged") and parameter.numel() >= 4096:
        device, constants = parameter.device, -(-parameter.numel() // 256)
        kept = [torch.empty(constants, device=device) for _ in range(2)]
        if optimizer == "adamw-paged" and parameter.numel() >= PAGED_FROM:
            return kept
        shape = parameter.shape
        return kept + [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2)]
    return [torch.empty_like(parameter, requires_grad=False) for _ in range(2)]


# --------------------------------------------------------------------------------------- recorded


class Recorded(NamedTuple):
    """A step's memory, and the allocator's own counters: GB `allocated` to tensors at the peak, and
    GB that it `reserved` from the GPU to do so, None without one."""

    memory: StepMemory
    allocated: float
    reserved: float | None


def recorded(workload: Workload, recipe: Recipe, settle: int = 2) -> Recorded:
    """The memory of a real optimizer step, after `settle` others.

    Without a GPU a tensor record stands in for the allocator's, and its peak for the counter. The
    recipe's driver is replaced by the plain loop, whose phases can be told apart.
    """
    recipe = recipe.but(driver="eager", logging="ring-buffer")
    gc.collect()  # what an earlier trainer left in cycles would be taken for what others hold
    before = cuda.allocated_memory()
    with Trainer(workload, recipe) as trainer:
        built = cuda.allocated_memory()
        trainer.run(settle)  # the moments are there from the first step on, workspaces soon after
        batch = _on(worst_batch(workload, trainer.recipe), workload.device)
        batches = iter([batch] * recipe.accumulation)
        if workload.device.type != "cuda":
            memory = _recorded_step(trainer, batches, TensorRecord(_standing(trainer)))
            return Recorded(memory, memory.peak / GB, None)
        # Others hold all that was there before, but for frozen weights that this model shares.
        held = bytes_of(tensors_of(trainer.model)) / GB
        foreign = before - max(0.0, held - (built - before))
        cuda.empty_cache()
        cuda.reset_peak_memory()
        memory = _recorded_step(trainer, batches, AllocatorRecord(), foreign)
        return Recorded(memory, *(peak - foreign for peak in cuda.peak_memory()))


def _on(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _standing(trainer: Trainer) -> list[Tensor]:
    """What a trainer holds between two steps."""
    return [*tensors_of(trainer.model), *_moments(trainer)]


def _moments(trainer: Trainer) -> list[Tensor]:
    state = (value for entry in trainer.optimizer.state.values() for value in entry.values())
    return [value for value in state if isinstance(value, Tensor)]


def _recorded_step(
    trainer: Trainer,
    batches: Iterator[Batch],
    record: TensorRecord | AllocatorRecord,
    foreign_gb: float = 0.0,
) -> StepMemory:
    """One step of the trainer, its phases marked, without what is foreign."""
    driver, trained = trainer.driver, trainer.parameters
    loss, update = driver.loss, driver.update

    def marked_loss(batch: Batch) -> Tensor:
        record.mark("forward")
        result = loss(batch)
        record.mark("backward")
        return result

    def marked_update() -> None:
        record.mark("update", gradients=[p.grad for p in trained if p.grad is not None])
        update()

    driver.loss, driver.update = marked_loss, marked_update
    try:
        with record:
            trainer.step(batches)
    finally:
        del driver.loss, driver.update
    weights, moments = bytes_of(tensors_of(trainer.model)), bytes_of(_moments(trainer))
    held = {"weights": weights, "optimizer": moments}
    if isinstance(record, AllocatorRecord):
        rest = record.allocated_before - round(foreign_gb * GB) - weights - moments
        held["temporaries"] = max(0, rest)
    return record.step(
        held, _logits(trainer.workload, worst_batch(trainer.workload, trainer.recipe))
    )


def with_peak(workload: Workload, run: Run) -> Run:
    """The run with `peak_gb`: the allocator's, or without a GPU that of a step's tensors."""
    if run.ok:
        peak = run.metric("peak_allocated_gb")
        run.metrics["peak_gb"] = peak or recorded(workload, Recipe(**run.recipe)).allocated
    return run


def predicted_and_recorded(workload: Workload, recipe: Recipe, name: str) -> Run:
    """A recipe's run with what its step takes, predicted before it is recorded.

    `predicted_gb`, `peak_gb` (of tensors), on a GPU `peak_reserved_gb`, `off` (the prediction's
    error as a share), GB of each kind at the peak, and `activations_share`. Samples: the timeline.
    """
    prediction, (memory, allocated, reserved) = (
        predicted(workload, recipe),
        recorded(workload, recipe),
    )
    tags = {"workload": workload.name, "checkpointing": recipe.checkpointing}
    run = Run("09", name, workload=workload.name, tags={"experiment": "memory"} | tags)
    run.scale, run.weights, run.data = workload.scale, workload.weights, workload.data
    run.recipe = recipe.fitted_to(workload.device.type).as_dict()
    at_peak = memory.at_peak()
    run.metrics = {
        "predicted_gb": prediction.peak / GB,
        "peak_gb": allocated,
        "off": prediction.peak / GB / allocated - 1,
        "activations_share": at_peak.get("activations", 0) / memory.peak,
        "events": memory.events,
        "phases": [[at, phase] for at, phase in memory.phases],
    }
    run.metrics |= {f"{kind}_gb": size / GB for kind, size in at_peak.items()}
    run.metrics |= {} if reserved is None else {"peak_reserved_gb": reserved}
    run.samples = timeline(memory)
    return run


MOMENTS = 600
"""Moments of a step's memory that stay on record."""


def timeline(memory: StepMemory) -> dict[str, list[float]]:
    """ "at" and, kind by kind, MB held: at the fullest event of each of `MOMENTS` stretches."""
    series, totals = memory.series(), memory.totals()
    width = max(1, -(-len(totals) // MOMENTS))
    stretches = (range(at, min(at + width, len(totals))) for at in range(0, len(totals), width))
    chosen = [max(stretch, key=totals.__getitem__) for stretch in stretches]
    kept = {kind: [round(levels[at] / 1e6, 2) for at in chosen] for kind, levels in series.items()}
    return {"at": [float(at) for at in chosen], **kept}


def drawn_timeline(run: Run) -> tuple[dict[str, list[float]], list[tuple[int, str]]]:
    """Kind -> bytes held after each event, and (event, phase), of `predicted_and_recorded`'s run.

    Between two moments on record it is as at the former.
    """
    at = [int(place) for place in run.samples["at"]]
    spans = zip([0, *at[1:]], [*at[1:], run.metrics["events"]], strict=True)
    counts = [after - before for before, after in spans]
    series = {
        kind: [1e6 * level for level, n in zip(levels, counts, strict=True) for _ in range(n)]
        for kind, levels in run.samples.items()
        if kind in KINDS
    }
    return series, [(place, name) for place, name in run.metrics["phases"]]


# ------------------------------------------------------------------------- running out of memory


class LimitedRecord(TensorRecord):
    """A tensor record that refuses what goes beyond `limit` bytes, `held` of which were there.

    Out of memory where there is no GPU to run out; the error's message says that it is artificial.
    """

    def __init__(self, known: list[Tensor], held: int, limit: float) -> None:
        super().__init__(known)
        self.held, self.limit = held, limit

    def _count(self, storage: torch.UntypedStorage) -> None:
        before = self.now
        super()._count(storage)
        if self.now > before and self.held + self.now > self.limit:
            raise torch.OutOfMemoryError(
                "An artificial limit: out of memory. Tried to allocate "
                f"{(self.now - before) / 1e6:.2f} MB; the limit is {self.limit / 1e6:.1f} MB, of "
                f"which {(self.held + before) / 1e6:.1f} MB are in use."
            )


class LimitedTrainer:
    """A trainer that takes batches of any size, under a limit of memory if one is set.

        with LimitedTrainer(workload, recipe) as trainer:
            trainer.limit(12.5)             GB in all
            trainer.step(8)                 raises what PyTorch raises where it doesn't fit
            trainer.held_gb()               what the process holds now

    On a GPU the limit is PyTorch's own (`set_per_process_memory_fraction`), which its allocator
    keeps by itself; without one it is counted, and artificial.
    """

    def __init__(self, workload: Workload, recipe: Recipe) -> None:
        plain = recipe.but(driver="eager", logging="ring-buffer", accumulation=1, micro_batch=1)
        self.workload, self.on_gpu = workload, workload.device.type == "cuda"
        self.trainer = Trainer(workload, plain)
        self.recipe = self.trainer.recipe  # as it fits this device
        self.limit_gb: float | None = None
        self.tries: dict[int, bool] = {}
        self.record: LimitedRecord | None = None
        self.step(1)  # the moments come with the first step

    def limit(self, gb: float | None) -> None:
        """Give this process so many GB, everything that it holds included; None: all there is."""
        self.limit_gb = gb
        if self.on_gpu:
            cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory / GB
            torch.cuda.set_per_process_memory_fraction(min(1.0, gb / total) if gb else 1.0)

    def step(self, examples: int) -> float:
        """One optimizer step on so many examples; GB at its peak."""
        largest = worst_batch(self.workload, self.recipe.but(micro_batch=examples))
        batch = _on(largest, self.workload.device)
        if self.on_gpu:
            cuda.reset_peak_memory()
            self.trainer.step(iter([batch]))
            cuda.synchronize()
            return cuda.peak_memory()[0]
        known = _standing(self.trainer)
        limit = float("inf") if self.limit_gb is None else self.limit_gb * GB
        self.record = LimitedRecord([*known, *batch.values()], bytes_of(known), limit)
        with self.record:
            self.trainer.step(iter([batch]))
        return self.record.step({"weights": bytes_of(known)}).peak / GB

    def fits(self, examples: int) -> bool:
        """Whether a step on so many examples runs; a failed step is cleaned up."""
        try:
            self.step(examples)
            fitting = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitting = False
        # Outside the except block: inside it the exception still holds the frames and tensors.
        self.tries[examples] = fitting
        if not fitting:
            self.clean_up()
        return fitting

    def clean_up(self) -> None:
        """Drop what a failed step leaves: gradients, and memory in the allocator's cache."""
        for parameter in self.trainer.parameters:
            parameter.grad = None
        gc.collect()
        cuda.empty_cache()

    def held_gb(self) -> float:
        """GB that tensors hold now, the model's included."""
        if self.on_gpu:
            return cuda.allocated_memory()
        return (bytes_of(_standing(self.trainer)) + (self.record.now if self.record else 0)) / GB

    def run_out(self, examples: int) -> dict[str, Any]:
        """Have a step on so many examples run out of memory, and look at what is held.

        GB before it, in the except block, after it, and once it is cleaned up, as metrics; and the
        `message`. Raises `RuntimeError` where the step fits.
        """
        held: dict[str, Any] = {"before_gb": self.held_gb()}
        try:
            self.step(examples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = " ".join(str(error).split())
            held |= {"message": message, "in_except_gb": self.held_gb()}
        if "message" not in held:
            raise RuntimeError(f"A step on {examples} examples fits: nothing ran out.")
        held["after_except_gb"] = self.held_gb()
        self.clean_up()
        return held | {"cleaned_gb": self.held_gb(), "runs_again": int(self.fits(1))}

    def searched(
        self, search: Callable[[Callable[[int], bool], int], int], start: int, tags: Mapping
    ) -> Run:
        """What a search from `start` on found: `largest`, in how many `tries` and `failures`."""
        self.tries.clear()
        largest = search(self.fits, start)
        failures = sum(not fits for fits in self.tries.values())
        metrics = {"largest": largest, "tries": len(self.tries), "failures": failures}
        return Run("09", "", metrics=metrics, tags={"experiment": "largest batch"} | dict(tags))

    def __enter__(self) -> LimitedTrainer:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lift the limit and end the trainer."""
        self.limit(None)
        self.trainer.close()


HEADROOM = 0.1
"""The share of a card that a training run should leave free."""


def predicted_largest(workload: Workload, recipe: Recipe, room_gb: float, on: str = "") -> int:
    """The largest batch whose predicted peak stays within `room_gb`: memory is a line over it."""
    sizes = {n: recipe.but(micro_batch=n, accumulation=1) for n in (1, 3)}
    points = {n: predicted(workload, each, on).peak / GB for n, each in sizes.items()}
    return BatchLine.through(points).largest(room_gb)


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch for which `fits` says True, searched from a `start` near it, or 0.

    It walks away from the start, in steps that double, until it has one that fits and one that
    doesn't, and then halves what is between. A good start costs two tries, one of which fails.
    """
    low, high = 0, 0  # the largest known to fit, the smallest known not to
    at, stride = max(1, start), 1
    while not high or (low == 0 and high > 1):
        if fits(at):
            low = max(low, at)
            if high:
                break
            at += stride
        else:
            high = at
            if low:
                break
            at = max(1, at - stride)
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_by_accelerate(fits: Callable[[int], bool], start: int) -> int:
    """The batch that accelerate's `find_executable_batch_size` stops at, from `start` down."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        if not fits(batch_size):
            raise RuntimeError(f"CUDA out of memory. A batch of {batch_size} doesn't fit.")
        return batch_size

    return attempt()
