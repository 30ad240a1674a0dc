"""The peak memory of a training step: predicted from shapes, recorded as it happens, and the
largest batch that fits.

    foreseen = predicted(workload, recipe)       the step on the meta device, where tensors have shapes and no bytes
    memory   = recorded(workload, recipe)        a real step: the allocator's own record, or without a GPU a ledger
    found    = largest_batch(fits, start=9)      from a prediction, in as few tries as possible

The prediction takes two optimizer steps through the very code that trains, on tensors without
contents: whatever operations make is counted for as long as anything holds it. What no shape tells
is added by hand: autocast and fused attention as a GPU does them (`measure.memory`), the
optimizer's moments, and the libraries' workspaces.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.layers.quantization.nf4_math import BLOCK, doubled_constant_bits
from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
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
    """The memory of an optimizer step with this recipe, from shapes alone; a few seconds at any
    scale.

    on: "cuda" or "cpu", as the workload's device if not given. Of more than two micro-batches two
    are taken: the second finds the first one's gradients, as all others do. Longest examples are
    taken where they vary. For models that aren't compiled, driven in whatever way: a compiled one
    keeps less. LLaVA is taken in its rewritten form: the published one looks at its inputs'
    contents, and holds a little more. Raises `ValueError` for what it knows nothing of.
    """
    on = on or workload.device.type
    recipe = recipe.fitted_to(on)
    _check(recipe)
    if begun := _ahead.get(_asked(workload, recipe, on)):
        with suppress(Exception):  # whatever became of that process: then it is done here
            return begun.result()
    if recipe.layers == "published" and workload.name.startswith("llava"):
        recipe = recipe.but(
            layers="rewritten"
        )  # transformers' own pass looks at its inputs' contents
    twin = _twin(workload.name, workload.scale, workload.data, workload.cache_dir)
    model = _built(twin, recipe.but(base_linear="published", micro_batch=1, accumulation=1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    filled = worst_batch(workload, recipe)
    padded = "attention_mask" in filled and not bool(filled["attention_mask"].all())
    batch = {name: tensor.to("meta") for name, tensor in filled.items()}
    held = {"weights": bytes_of(tensors_of(model)) - _saved_by_format(twin, model, recipe)}
    moments = [
        moment for parameter in trained for moment in moments_of(parameter, recipe.optimizer)
    ]
    held |= {"optimizer": bytes_of(moments), "temporaries": WORKSPACES if on == "cuda" else 0}
    with (
        TensorRecord([*tensors_of(model), *moments]) as ledger,
        OnMeta(AUTOCAST.get(recipe.precision)),
    ):
        _step(ledger, functools.partial(_loss, twin, model, batch, padded), trained, recipe)
    return ledger.step(held, _logits(workload, batch))


_ahead: dict[tuple[Any, ...], Future[StepMemory]] = {}
"""Predictions that were begun by `predict_ahead`."""
_pools: list[ProcessPoolExecutor] = []
"""The one that they are made in, while there is one."""
PROCESSES = 6
CORES_EACH = 2


def predict_ahead(workloads: Iterable[tuple[Workload, Recipe]], on: str = "") -> None:
    """Begin these predictions in processes beside this one, which goes on: `predicted` then has
    them at hand.

    Each is one core's work. Where cores are few nothing is begun: `predicted` will do it in its
    time. Call `end_ahead` before anything is timed that the host has a part in.
    """
    if usable_cores() < PROCESSES * CORES_EACH:
        return
    pool = _pools[0] if _pools else ProcessPoolExecutor(PROCESSES, get_context("spawn"))
    _pools[:] = [pool]
    for workload, recipe in workloads:
        where = on or workload.device.type
        asked = _asked(workload, recipe.fitted_to(where), where)
        if asked not in _ahead:
            with suppress(BrokenExecutor):  # its processes can't be had
                _ahead[asked] = pool.submit(_predicted_there, *asked)


def end_ahead() -> None:
    """Wait for the predictions that are being made in other processes, leave those out that aren't
    begun, and end the processes."""
    for pool in _pools:
        pool.shutdown(wait=True, cancel_futures=True)
    _pools.clear()
    _ahead.clear()


def _asked(workload: Workload, recipe: Recipe, on: str) -> tuple[Any, ...]:
    """What decides a prediction, as plain data."""
    return tuple(workload.opened_as().items()), recipe, on


def _predicted_there(opened: tuple[tuple[str, str], ...], recipe: Recipe, on: str) -> StepMemory:
    """The other process's side of `predict_ahead`."""
    return predicted(open_workload(**dict(opened), device="meta"), recipe, on)


@functools.cache
def _twin(name: str, scale: str, data: str, cache_dir: Path) -> Workload:
    """The workload on the meta device, which holds its frozen models; they take no memory there."""
    return open_workload(name, scale, data=data, device="meta", cache_dir=cache_dir)


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
    ledger: TensorRecord, loss_of: Callable[[], Tensor], trained: list[nn.Parameter], recipe: Recipe
) -> None:
    """One optimizer step as every driver takes it: micro-batches forward and backward, the update,
    no gradients.
    """
    try:
        passes = min(2, recipe.accumulation)
        for done in range(1, passes + 1):
            loss = loss_of()
            ledger.mark("backward")
            loss.backward()
            gradients = [parameter.grad for parameter in trained]
            ledger.mark("forward" if done < passes else "update", gradients=gradients)
        clipped = [
            parameter.grad * 1 for parameter in trained
        ]  # as foreach forms of clipping and AdamW do, once each
        del clipped
    finally:
        for (
            parameter
        ) in trained:  # also of a step that failed: the next one may be given the same model
            parameter.grad = None


def _loss(workload: Workload, model: nn.Module, batch: Batch, padded: bool) -> Tensor:
    if "attention_mask" in batch:
        # transformers would look at its contents to see what it can leave out; it takes one that is
        # there already.
        rows, length = batch["attention_mask"].shape
        mask = (
            torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
            if padded
            else None
        )
        batch = batch | {
            "attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), mask)
        }
    return workload.loss(model, batch, workload.draw(model, batch))


def worst_batch(workload: Workload, recipe: Recipe) -> Batch:
    """A micro-batch of the largest examples there are, on the host."""
    if recipe.cache != "nothing":
        return _encoded_batch(workload, recipe)
    rows = workload.dataset(None, recipe)
    count = recipe.micro_batch
    if hasattr(workload, "example_sizes"):
        sizes = [example.tokens for example in workload.example_sizes(recipe)]
        largest = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        if recipe.shapes == "packed":
            return next(iter(_first_packed(workload, recipe, rows)))
    else:
        largest = list(range(len(rows)))
    chosen = [rows[largest[place % len(largest)]] for place in range(count)]
    return workload.collate(recipe)(chosen)


def _first_packed(workload: Workload, recipe: Recipe, rows: Any) -> Iterator[Batch]:
    """Packed rows are all of one size: the first will do."""
    for chosen in workload.order(rows, recipe):
        yield workload.collate(recipe)([rows[place] for place in chosen])


def _encoded_batch(workload: Workload, recipe: Recipe) -> Batch:
    """What a cache of the diffusion model's encoders would hand over: shapes alone matter."""
    if not hasattr(workload, "latent_shape"):
        raise ValueError(
            f"The prediction doesn't know what cache={recipe.cache!r} keeps of this workload."
        )
    channels, *sides = workload.latent_shape
    kept: Batch = {
        "moments": torch.zeros(recipe.micro_batch, 2 * channels, *sides, dtype=_dtype(recipe))
    }
    if recipe.cache == "latents":
        return kept | {"input_ids": torch.zeros(recipe.micro_batch, 77, dtype=torch.long)}
    return kept | {
        "condition": torch.zeros(
            recipe.micro_batch, 77, workload.size.text_width, dtype=_dtype(recipe)
        )
    }


def _dtype(recipe: Recipe) -> torch.dtype:
    return AUTOCAST.get(recipe.precision, torch.float32)


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
        constants = [
            torch.empty(-(-parameter.numel() // 256), device=parameter.device) for _ in range(2)
        ]
        kept = [
            torch.empty(parameter.shape, dtype=torch.uint8, device=parameter.device)
            for _ in range(2)
        ]
        paged = optimizer == "adamw-paged" and parameter.numel() >= PAGED_FROM
        return constants + ([] if paged else kept)
    return [torch.empty_like(parameter, requires_grad=False) for _ in range(2)]


# --------------------------------------------------------------------------------------- recorded


class Recorded(NamedTuple):
    """A step's memory, and the allocator's own counters of it: GB `allocated` to tensors at the
    peak, and GB that it `reserved` from the GPU to do so, None without one."""

    memory: StepMemory
    allocated: float
    reserved: float | None


def recorded(workload: Workload, recipe: Recipe, settle: int = 2) -> Recorded:
    """The memory of a real optimizer step, after `settle` others.

    Without a GPU a ledger stands in for the allocator's record, and its peak for the counter. The
    recipe's driver is replaced by the plain loop, whose phases can be told apart.
    """
    recipe = recipe.but(driver="eager", logging="ring-buffer")
    # what an earlier trainer left in circles of references would be taken for what others hold
    gc.collect()
    before = cuda.allocated_memory()
    with Trainer(workload, recipe) as trainer:
        built = cuda.allocated_memory()
        trainer.run(settle)  # the moments are there from the first step on, workspaces soon after
        batches = iter(
            [
                _on(worst_batch(workload, trainer.recipe), workload.device)
                for _ in range(recipe.accumulation)
            ]
        )
        if workload.device.type != "cuda":
            memory = _recorded_step(trainer, batches, TensorRecord(_standing(trainer)))
            return Recorded(memory, memory.peak / GB, None)
        # What others hold: all that was there before, but for frozen weights that this model shares
        # with them.
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
    recorder: TensorRecord | AllocatorRecord,
    foreign_gb: float = 0.0,
) -> StepMemory:
    """One step of the trainer, its phases marked where the driver goes on to the next, without what
    is foreign.
    """
    driver, trained = trainer.driver, trainer.parameters
    loss, update = driver.loss, driver.update

    def marked_loss(batch: Batch) -> Tensor:
        recorder.mark("forward")
        found = loss(batch)
        recorder.mark("backward")
        return found

    def marked_update() -> None:
        recorder.mark("update", gradients=[p.grad for p in trained if p.grad is not None])
        update()

    driver.loss, driver.update = marked_loss, marked_update
    try:
        with recorder:
            trainer.step(batches)
    finally:
        del driver.loss, driver.update
    weights, moments = bytes_of(tensors_of(trainer.model)), bytes_of(_moments(trainer))
    held = {"weights": weights, "optimizer": moments}
    if isinstance(recorder, AllocatorRecord):
        held["temporaries"] = max(
            0, recorder.allocated_before - round(foreign_gb * GB) - weights - moments
        )
    batch_shapes = worst_batch(trainer.workload, trainer.recipe)
    return recorder.step(held, _logits(trainer.workload, batch_shapes))


def with_peak(workload: Workload, run: Run) -> Run:
    """The run with `peak_gb`: the allocator's peak of a step, or without a GPU, where the
    comparison knows none, that of tensors, which a ledger counts in a step of its own."""
    if run.ok:
        recipe = Recipe(**run.recipe)
        run.metrics["peak_gb"] = (
            run.metric("peak_allocated_gb") or recorded(workload, recipe).allocated
        )
    return run


def foretold(workload: Workload, recipe: Recipe, name: str) -> tuple[Run, StepMemory]:
    """A recipe's run with what its step takes, predicted before it is recorded: `predicted_gb`,
    `peak_gb` (what tensors take), on a GPU `peak_reserved_gb` as well, `off`, the prediction's
    error as a share, and the kinds at the peak; and the record."""
    foreseen, found = predicted(workload, recipe), recorded(workload, recipe)
    run = Run(
        "",
        name,
        workload=workload.name,
        scale=workload.scale,
        weights=workload.weights,
        data=workload.data,
    )
    run.recipe = recipe.fitted_to(workload.device.type).as_dict()
    run.metrics = {"predicted_gb": foreseen.peak / GB, "peak_gb": found.allocated}
    run.metrics["off"] = run.metrics["predicted_gb"] / found.allocated - 1
    run.metrics |= {} if found.reserved is None else {"peak_reserved_gb": found.reserved}
    run.metrics |= {f"{kind}_gb": size / GB for kind, size in found.memory.at_peak().items()}
    run.metrics["activations_share"] = (
        found.memory.at_peak().get("activations", 0) / found.memory.peak
    )
    run.metrics["events"] = found.memory.events
    run.metrics["phases"] = [[at, name] for at, name in found.memory.phases]
    run.samples = _picture(found.memory)
    return run, found.memory


PICTURED = 600
"""Moments of a step's memory that stay on record."""


def _picture(memory: StepMemory) -> dict[str, list[float]]:
    """ "at" and, kind by kind, MB held: at that event of each of `PICTURED` equal stretches at
    which most is held.
    """
    series, totals = memory.series(), memory.totals()
    width = max(1, -(-len(totals) // PICTURED))
    chosen = [
        max(range(at, min(at + width, len(totals))), key=totals.__getitem__)
        for at in range(0, len(totals), width)
    ]
    kept = {kind: [round(levels[at] / 1e6, 2) for at in chosen] for kind, levels in series.items()}
    return {"at": [float(at) for at in chosen], **kept}


def pictured(run: Run) -> tuple[dict[str, list[float]], list[tuple[int, str]]]:
    """Kind -> bytes held after each event, and (event, name) of the phases, of a run that
    `foretold` made: between two moments on record as at the former."""
    events, at = run.metrics["events"], [int(place) for place in run.samples["at"]]
    lengths = [
        after - before for before, after in zip([0, *at[1:]], [*at[1:], events], strict=True)
    ]
    series = {
        kind: [
            1e6 * level
            for level, length in zip(levels, lengths, strict=True)
            for _ in range(length)
        ]
        for kind, levels in run.samples.items()
        if kind in KINDS
    }
    return series, [(place, name) for place, name in run.metrics["phases"]]


GRID: dict[str, Recipe] = {
    "sd15-lora": Recipe(
        driver="eager", logging="ring-buffer", cache="latents+text", micro_batch=4, accumulation=1
    ),
    "llava-lora": A2_BASE.but(layers="rewritten"),
    "qwen3-lora-long": A3_BASE.but(driver="eager", micro_batch=2),
}
"""Workload -> the recipe that the prediction is tried on, and changed as `MODES` say."""
MODES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "checkpointing": {"checkpointing": "blocks"},
    "selective": {"checkpointing": "selective"},
}


def in_mode(workload: Workload, mode: str, batch: int = 0) -> Recipe:
    """A workload's recipe of `GRID`, in one of `MODES`, with micro-batches of `batch` examples (0:
    the grid's own).
    """
    recipe = GRID[workload.name].but(**MODES[mode])
    return recipe.but(micro_batch=batch) if batch else recipe


PEAK_HEAD = ("step", "examples", "peak", *KINDS, "activations' share")
"""The head of a table of `peak_rows`."""


def peak_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `PEAK_HEAD` of runs that `foretold` made: what the peak consists of. Kinds that hold
    nothing then are left empty."""
    return [
        (
            name.removeprefix("memory: "),
            run.recipe["micro_batch"],
            in_bytes(run.metric("peak_gb")),
            *(in_bytes(held) if (held := run.metric(f"{kind}_gb")) else None for kind in KINDS),
            f"{run.metric('activations_share'):.0%}",
        )
        for name, run in runs.items()
        if run.ok
    ]


TOLD_HEAD = ("step", "examples", "predicted", "by tensors, at the peak", "off by", "reserved, GB")
"""The head of a table of `told_rows`."""


def told_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `TOLD_HEAD`."""
    return [
        (
            name,
            run.recipe["micro_batch"],
            in_bytes(run.metric("predicted_gb")),
            in_bytes(run.metric("peak_gb")),
            f"{100 * run.metric('off'):+.1f} %".replace("-0.0 %", "+0.0 %"),
            run.metric("peak_reserved_gb"),
        )
        for name, run in ((name.removeprefix("memory: "), run) for name, run in runs.items())
        if run.ok
    ]


def in_bytes(gb: float) -> str:
    """GB as one says it: "15.2 GB", "12.3 MB"."""
    return f"{gb:.1f} GB" if gb >= 1 else f"{1e3 * gb:.1f} MB"


def at_full(workload: Workload) -> Workload:
    """The same workload at its full size, to be predicted, not built."""
    return _twin(workload.name, "full", workload.data, workload.cache_dir)


# ------------------------------------------------------------------------- running out of memory


class Limited(TensorRecord):
    """A ledger that refuses what goes beyond `limit` bytes in all, `held` of which were there
    before: out of memory where there is no GPU to run out. The limit is artificial, and its message
    says so."""

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


class Fed:
    """A trainer that is fed with batches of any size, under a limit of memory if one is set.

        with Fed(workload, recipe) as fed:
            fed.limit(12.5)             GB in all
            fed.step(8)                 raises what PyTorch raises where it doesn't fit
            fed.held_gb()               what the process holds now

    On a GPU the limit is PyTorch's own (`set_per_process_memory_fraction`), which its allocator
    keeps by itself; without one it is counted, and artificial.
    """

    def __init__(self, workload: Workload, recipe: Recipe) -> None:
        self.workload = workload
        self.recipe = recipe.but(
            driver="eager", logging="ring-buffer", accumulation=1, micro_batch=1
        )
        self.on_gpu = workload.device.type == "cuda"
        self.trainer = Trainer(workload, self.recipe)
        self.recipe = self.trainer.recipe  # as it fits this device
        self.limit_gb: float | None = None
        self.tries: dict[int, bool] = {}
        self.ledger: Limited | None = None
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
        batch = _on(
            worst_batch(self.workload, self.recipe.but(micro_batch=examples)), self.workload.device
        )
        if self.on_gpu:
            cuda.reset_peak_memory()
            self.trainer.step(iter([batch]))
            cuda.synchronize()
            return cuda.peak_memory()[0]
        known = _standing(self.trainer)
        limit = float("inf") if self.limit_gb is None else self.limit_gb * GB
        self.ledger = Limited([*known, *batch.values()], bytes_of(known), limit)
        with self.ledger:
            self.trainer.step(iter([batch]))
        return self.ledger.step({"weights": bytes_of(known)}).peak / GB

    def fits(self, examples: int) -> bool:
        """Whether a step on so many examples runs; what it leaves behind where it doesn't is
        cleaned up.
        """
        try:
            self.step(examples)
            fitting = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitting = False
        # Outside the except block: inside it the exception still holds the frames, and these the
        # tensors.
        self.tries[examples] = fitting
        if not fitting:
            self.clean_up()
        return fitting

    def clean_up(self) -> None:
        """What a failed step leaves: half of the gradients, and memory that the allocator keeps in
        its cache.
        """
        for parameter in self.trainer.parameters:
            parameter.grad = None
        gc.collect()
        cuda.empty_cache()

    def held_gb(self) -> float:
        """GB that tensors hold now, the model's included."""
        if self.on_gpu:
            return cuda.allocated_memory()
        return (bytes_of(_standing(self.trainer)) + (self.ledger.now if self.ledger else 0)) / GB

    def close(self) -> None:
        """Lift the limit and end the trainer."""
        self.limit(None)
        self.trainer.close()

    def __enter__(self) -> Fed:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def run_out(fed: Fed, examples: int) -> dict[str, Any]:
    """Have a step on so many examples fail for want of memory, and look at what is held: before it,
    in the except block, after it, and once it is cleaned up, as metrics in GB; and the `message`.

    Raises `RuntimeError` where the step fits.
    """
    found: dict[str, Any] = {"before_gb": fed.held_gb()}
    try:
        fed.step(examples)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found |= {"message": " ".join(str(error).split()), "in_except_gb": fed.held_gb()}
    if "message" not in found:
        raise RuntimeError(f"A step on {examples} examples fits: nothing ran out.")
    found["after_except_gb"] = fed.held_gb()
    fed.clean_up()
    return found | {"cleaned_gb": fed.held_gb(), "runs_again": int(fed.fits(1))}


def held_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """What tensors held at the four moments of `run_out`, as a row of a table."""
    moments = ("before_gb", "in_except_gb", "after_except_gb", "cleaned_gb")
    return ("tensors hold", *(in_bytes(found[moment]) for moment in moments))


HEADROOM = 0.1
"""The share of a card that a training run should leave free: examples differ, and allocators keep
pieces unused.
"""


def foreseen_largest(workload: Workload, recipe: Recipe, room_gb: float, on: str = "") -> int:
    """The largest batch whose predicted peak stays within `room_gb`; memory is a straight line over
    the batch.
    """
    points = {
        n: predicted(workload, recipe.but(micro_batch=n, accumulation=1), on).peak / GB
        for n in (1, 3)
    }
    return BatchLine.through(points).largest(room_gb)


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch for which `fits` says True, searched from a `start` near it; 0: not even
    one fits.

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


def searched(
    fed: Fed, search: Callable[[Callable[[int], bool], int], int], start: int, foreseen: int
) -> Run:
    """What a search from `start` on found: `largest`, in how many `tries`, of which so many were
    `failures`; and what was `predicted`."""
    fed.tries.clear()
    largest = search(fed.fits, start)
    failures = sum(not fits for fits in fed.tries.values())
    metrics = {
        "largest": largest,
        "tries": len(fed.tries),
        "failures": failures,
        "predicted": foreseen,
    }
    return Run("", "", metrics=metrics)


def search_rows(searches: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows (search, predicted, largest batch, tries, failures)."""
    columns = ("predicted", "largest", "tries", "failures")
    return [(name, *(run.metrics[column] for column in columns)) for name, run in searches.items()]


def largest_by_accelerate(fits: Callable[[int], bool], start: int) -> int:
    """The batch that accelerate's `find_executable_batch_size` stops at: from `start` down, a tenth
    less each time.
    """
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        if not fits(batch_size):
            raise RuntimeError(f"CUDA out of memory. A batch of {batch_size} doesn't fit.")
        return batch_size

    return attempt()
