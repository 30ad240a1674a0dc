"""Rules, one a fix: what in the evidence calls for it, what the step would last with it, and why.

Each gain is predicted by itself, by replaying the step's queue with one thing changed (`replay`);
the gains of several don't add up, as what one has saved the next can't. A rule that has nothing to
go by returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labutils.recipe import Recipe
from labutils.tools.diagnose.evidence import Evidence, Line
from labutils.tools.diagnose.replay import (
    COPY,
    READ,
    TO_DEVICE,
    Change,
    Piece,
    Pieces,
    Product,
    Queue,
    each,
    gain,
    in_turn,
    without,
    without_phases,
    without_waits,
)


@dataclass(frozen=True)
class Fix:
    """`gain`: the predicted share of the step's time saved, 0 to 1; where `per` says so, of the
    time that an example or a useful token takes. `do`: what to type. `sources`: "file:line" of what
    is to be changed. `changes`: the fields of a `Recipe` that make it, {} where it is no knob."""

    name: str
    gain: float
    reason: str
    do: str = ""
    sources: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    per: str = "step"


Rule = Callable[[Evidence], Fix | None]


# ---------------------------------------------------------------------------------------- the data

HAND_OVER_MS = 0.3
"""What a batch that a worker has ready costs the training process, and besides
`HAND_OVER_GB_PER_S`.
"""
HAND_OVER_GB_PER_S = 4.0
MOST_WORKERS = 16
NEARLY = 0.03
"""Of two numbers of workers the smaller is proposed where its step is hardly longer."""


def workers(e: Evidence) -> Fix | None:
    """More worker processes: the wait for data is replaced by what they leave of it. More than
    there are cores are looked at only where making a batch is known to be mostly waiting, for a
    disk or a network.

    step(N) = max(step without the wait, time to make a step's batches / N, all processor time /
    cores). A starved loop takes as long as its workers make it wait, which tells how long they
    take.
    """
    if e.loader is None or e.data_ms <= 0 or not e.loader.batches:
        return None
    now, hand_over = (
        e.loader.num_workers,
        e.loader.batches * (HAND_OVER_MS + e.loader.bytes / HAND_OVER_GB_PER_S / 1e6),
    )
    if e.data_ms <= 1.2 * hand_over and now:
        return None
    fetch = e.data_ms if now == 0 else now * e.step_ms
    fed = e.queue.changed(_data_of(e, min(hand_over, e.data_ms)))
    busy = _processor_ms(e) + (
        e.loader.fetch_cpu_ms if e.loader.fetch_cpu_ms is not None else fetch
    )
    most = MOST_WORKERS if e.loader.fetch_cpu_ms is not None else min(MOST_WORKERS, max(1, e.cores))
    steps = {n: max(fed.step_ms, fetch / n, busy / e.cores) for n in range(now + 1, most + 1)}
    if not steps:
        return None
    best = min(steps.values())
    chosen = min(n for n, ms in steps.items() if ms <= (1 + NEARLY) * best)
    limit = _limit(steps[chosen], fed.step_ms, fetch / chosen, busy / e.cores)
    who = "it makes itself" if now == 0 else f"{now} worker{'s make' if now > 1 else ' makes'}"
    return Fix(
        "workers",
        _share(e, steps[chosen]),
        f"The loop waits {e.data_ms:.1f} ms a step for data, which {who}; with {chosen} {limit}.",
        f"DataLoader(num_workers={chosen}, persistent_workers=True)",
        changes={"num_workers": chosen, "persistent_workers": True},
    )


def _limit(step_ms: float, fed: float, made: float, shared: float) -> str:
    if step_ms == fed:
        return "it is made beside the training, in time"
    return "making it still takes longest" if step_ms == made else "it is the cores that run short"


def _data_of(e: Evidence, ms: float) -> Change:
    """The waits for data take `ms` a step in all."""
    factor = ms / e.queue.total("data_ms") if e.queue.total("data_ms") else 0.0
    return each(lambda piece: replace(piece, data_ms=factor * piece.data_ms))


def _processor_ms(e: Evidence) -> float:
    """Processor time of training itself: one thread that launches, or on a CPU all that compute."""
    return e.queue.total("host_ms") + (0.0 if e.on_gpu else e.threads * e.queue.device_ms)


def _share(e: Evidence, step_ms: float) -> float:
    return min(1.0, max(0.0, 1 - step_ms / e.queue.step_ms))


TO_LINES = (".to()", "to", "Tensor.to", "Tensor.cuda", "aten::to", "aten::copy_", "aten::_to_copy")
"""What lines call that copy to the GPU, by the hooks' account and by a trace's."""
PINNED = 0.45
"""How long a copy to the GPU takes from page-locked memory, of what it takes from ordinary memory:
on an H200's host 55 against 25 GB/s."""


def pinning(e: Evidence) -> Fix | None:
    """Page-locked batches and copies that don't wait: the host runs on, and the copies themselves
    get shorter.
    """
    copies = [p for p in e.queue.pieces if p.kind == COPY and p.waits == TO_DEVICE]
    if not e.on_gpu or not copies:
        return None
    pinned = bool(e.loader and e.loader.pin_memory)

    def changed(piece: Piece) -> Piece:
        if piece.kind != COPY or piece.waits != TO_DEVICE:
            return piece
        return replace(piece, waits="", ms=piece.ms * (1.0 if pinned else PINNED))

    waits = len(copies) / e.queue.steps
    return Fix(
        "pinning",
        gain(e.queue, e.queue.changed(each(changed))),
        f"{waits:.3g} copies to the GPU a step make the host wait, so that it can't launch ahead"
        + ("." if pinned else "; from memory that isn't page-locked they are slower, too."),
        'DataLoader(pin_memory=True) and .to("cuda", non_blocking=True)',
        _places(line for line in e.reads if line.what in TO_LINES),
        {"pin_memory": True, "non_blocking": True},
    )


# ------------------------------------------------------------------------------- waits and writing


def syncs(e: Evidence) -> Fix | None:
    """Values that are read each step: without the waits the host runs ahead of the GPU. On a CPU
    there is no one to wait for, and nothing is gained."""
    lines = [line for line in e.reads if line.what not in TO_LINES]
    waits = sum(p.waits == READ for p in e.queue.pieces) / e.queue.steps if e.on_gpu else 0.0
    if not lines and not waits:
        return None
    if e.on_gpu and not waits:
        return None
    phases = {p.phase for p in e.queue.pieces if p.waits == READ}
    if e.recipe and phases <= {"log"}:
        return None  # the rule for logs speaks of them
    found = gain(e.queue, e.queue.changed(without_waits(READ))) if e.on_gpu else 0.0
    count = waits or sum(line.per_step for line in lines)
    why = (
        f"The host waits for the GPU {count:.3g} times a step to read something; meanwhile it "
        "launches nothing."
        if e.on_gpu
        else f"{count:.3g} values a step are read from tensors. On a CPU that costs nothing; on a GPU each would wait."
    )
    return Fix(
        "syncs",
        found,
        why,
        "keep such values on the device, and read them every 50 steps or so",
        _places(lines),
    )


TRIFLE = 0.002
"""Writing that takes less of a step than this is no news."""


def logging(e: Evidence) -> Fix | None:
    """Writing each step: its time goes, and with a recipe of this course the reads for it go as
    well.
    """
    reads = e.recipe is not None and any(
        p.waits == READ and p.phase == "log" for p in e.queue.pieces
    )
    if (e.log_ms < TRIFLE * e.step_ms and not reads) or (
        e.recipe and e.recipe.logging != "synchronous"
    ):
        return None
    changes = [without("log_ms")]
    if e.recipe:
        changes.append(each(lambda p: replace(p, waits="") if p.phase == "log" else p))
    lines = [line for line in e.writes if line.ms > 0.02 * e.log_ms]
    what = ", ".join(dict.fromkeys(line.what for line in lines[:3]))
    return Fix(
        "logging",
        gain(e.queue, e.queue.changed(in_turn(*changes))),
        f"Writing takes {e.log_ms:.2f} ms a step{f' ({what})' if what else ''}"
        + (", and reads losses for it." if reads else ", while nothing else is given to do."),
        "write every 50 steps or so, without flushing, or from another thread",
        _places(lines),
        {"logging": "ring-buffer"} if e.recipe else {},
    )


def _places(lines: Iterator[Line] | Sequence[Line]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.place for line in lines))[:5]


# --------------------------------------------------------------------------------------- launching

GRAPH_GAP_MS = 0.00025
"""Between two kernels of a CUDA graph: the graph of lab 04's step lasts 136.0 ms for 132.1 ms in
16,898 kernels.
"""
GRAPH_LAUNCH_MS = 0.05
HOST_DECIDES = 1.05
OUTSIDE = ("data", "to_device", "log")
HEAVY = ("reduction", "normalisation")
CASTS = "casts and layout"
MERGED = ("elementwise", CASTS, *HEAVY, "foreach")
MOST_MERGED = 64
"""The compiler merges no more than so many operations (torch._inductor.config.max_fusion_size)."""


def capture(e: Evidence) -> Fix | None:
    """The whole step as one CUDA graph: what remains is the kernels, a gap after each, and waits
    for data.
    """
    if (
        not e.on_gpu
        or e.queue.step_ms < HOST_DECIDES * e.queue.device_ms
        or len(e.queue.pieces) < 20 * e.queue.steps
    ):
        return None
    launches = len(e.queue.pieces) / e.queue.steps
    return Fix(
        "capture",
        gain(
            e.queue, e.queue.changed(in_turn(without("log_ms"), captured) if e.recipe else captured)
        ),
        f"The GPU has work for {e.queue.device_ms:.1f} of {e.step_ms:.1f} ms: the host can't "
        f"launch {launches:.0f} "
        "pieces of work a step any faster.",
        'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph around the whole step; shapes must be fixed',
        changes={"driver": "graph", "optimizer": "adamw-fused", "logging": "ring-buffer"}
        if _of_one_shape(e)
        else {},
    )


def _of_one_shape(e: Evidence) -> bool:
    """Whether a recipe's batches all have one shape, as a graph needs."""
    return e.recipe is not None and (
        e.workload.startswith("sd15") or e.recipe.shapes in ("fixed", "padded", "packed")
    )


def captured(pieces: Pieces) -> list[Piece]:
    """One piece for each stretch between two waits for data or writings: the host launches once,
    and nothing waits inside. (Left apart, its kernels would fill the queue, and the host would wait
    for room in it.)"""
    stretches: list[list[Piece]] = []
    for piece in pieces:
        if piece.data_ms or piece.log_ms or not stretches:
            stretches.append([])
        stretches[-1].append(piece)
    return [
        Piece(
            "other",
            sum(map(_in_a_graph, stretch)),
            GRAPH_LAUNCH_MS,
            stretch[0].phase,
            data_ms=stretch[0].data_ms,
            log_ms=stretch[0].log_ms,
        )
        for stretch in stretches
    ]


def _in_a_graph(piece: Piece) -> float:
    return piece.ms + (GRAPH_GAP_MS if piece.ms else 0.0)


def compiling(e: Evidence) -> Fix | None:
    """torch.compile: neighbouring operations that only pass over tensors become one."""
    if e.recipe and e.recipe.compile != "off":
        return None
    if not e.queue.takes_turns and len(e.queue.pieces) < 20 * e.queue.steps:
        return None
    after = e.queue.changed(merged)
    before, left = (len(q.pieces) / q.steps for q in (e.queue, after))
    if left > 0.95 * before:
        return None
    return Fix(
        "compile",
        gain(e.queue, after),
        f"{before - left:.0f} of {before:.0f} operations a step only pass over tensors next to "
        "others that do: merged "
        "with them, they are neither called nor go through memory.",
        "torch.compile(model)",
        changes={"compile": "default"},
    )


def merged(pieces: Pieces) -> list[Piece]:
    """Each run of neighbours that a compiler merges becomes one piece, or as many as it has
    reductions, norms, and half as many as casts and copies: those of weights are next to others by
    chance. It takes as long as the longest of them, or as all of those together."""
    found: list[Piece] = []
    run: list[Piece] = []
    for piece in pieces:
        mergeable = piece.kind in MERGED and piece.phase not in (
            *OUTSIDE,
            "encode",
            "optimizer",
            "clip",
        )
        goes_on = (
            mergeable
            and run
            and piece.phase == run[0].phase
            and not (piece.data_ms or piece.log_ms)
        )
        if run and not (goes_on and len(run) < MOST_MERGED):
            found += _one_kernel(run)
            run = []
        if not mergeable:
            found.append(piece)
            continue
        run.append(piece)
        if piece.waits:
            found += _one_kernel(run)
            run = []
    return found + _one_kernel(run)


def _one_kernel(run: list[Piece]) -> list[Piece]:
    if len(run) < 2:
        return run
    heavy = [piece for piece in run if piece.kind in HEAVY]
    count = min(len(run), max(1, len(heavy) + sum(piece.kind == CASTS for piece in run) // 2))
    ms = max(
        max(piece.ms for piece in run),
        sum(piece.ms for piece in run if piece.kind in (*HEAVY, CASTS)),
    )
    host = sum(piece.host_ms for piece in run) / len(run)
    first = replace(run[0], ms=ms / count, host_ms=host)
    rest = [replace(first, data_ms=0.0, log_ms=0.0)] * (count - 1)
    found = [first, *rest]
    return [*found[:-1], replace(found[-1], waits=run[-1].waits)]


# ------------------------------------------------------------------------------------ computing


def precision(e: Evidence) -> Fix | None:
    """Products in another format: each of the step's own sizes takes as much less as was measured.

    Autocast also casts what goes into them; a recipe of this course holds the frozen weights in it,
    so that whatever is bound by memory moves half the bytes.
    """
    mine = [p for p in e.queue.pieces if format_of(e, p) in ("fp32", "tf32")]
    if not mine or (e.recipe and e.recipe.precision != "fp32"):
        return None
    found = {}
    for dtype in ("tf32", "bf16") if e.on_gpu else ("bf16",):
        ratios = _ratios(e, mine, dtype)
        found[dtype] = gain(
            e.queue, e.queue.changed(each(lambda p, d=dtype, r=ratios: _in_format(e, p, d, r)))
        )
    best = "bf16" if e.recipe else max(found, key=found.__getitem__)
    share = sum(p.ms for p in mine) / e.queue.steps / e.queue.step_ms
    told = {
        "tf32": 'torch.set_float32_matmul_precision("high")',
        "bf16": f'with torch.autocast("{e.device}", torch.bfloat16): around forward pass and loss',
    }
    other = "".join(
        f" ({dtype} alone: {worth:.0%})" for dtype, worth in found.items() if dtype != best
    )
    return Fix(
        "precision",
        found[best],
        f"Products in float32 take {share:.0%} of the step, and this machine does those sizes "
        f"faster in {best}{other}."
        if found[best] > 0.005
        else f"Products in float32 take {share:.0%} of the step; no other format is faster for them here.",
        told[best],
        changes={"precision": "bf16"} if e.recipe else {},
    )


def format_of(e: Evidence, piece: Piece) -> str:
    """What a product, convolution or attention computes in; "" for anything else, or where it isn't
    known.
    """
    if piece.kind not in ("GEMM", "thin GEMM", "convolution", "attention"):
        return ""
    if piece.dtype in ("bf16", "fp16", "tf32"):
        return piece.dtype
    if piece.dtype != "fp32":
        return "fp32" if e.recipe and e.recipe.precision == "fp32" else ""
    key = "cudnn_tf32" if piece.kind == "convolution" else "matmul_tf32"
    return "tf32" if e.on_gpu and e.config.get(key) else "fp32"


def _ratios(
    e: Evidence, mine: Sequence[Piece], dtype: str
) -> dict[tuple[Product | None, str], float]:
    """(product, its format) -> how many times as long it takes in `dtype`; those first that take
    most.
    """
    weight: dict[tuple[Product | None, str], float] = {}
    for piece in mine:
        key = piece.product, format_of(e, piece)
        weight[key] = weight.get(key, 0.0) + piece.ms
    found = {}
    for product, own in sorted(weight, key=lambda key: -weight[key]):
        if own == "tf32" and dtype == "tf32":
            found[product, own] = 1.0
        elif product is None:
            found[product, own] = e.rates.large(own, dtype)
        else:
            found[product, own] = e.rates.ratio(replace(product, dtype=own), dtype)
    return found


def _in_format(
    e: Evidence, piece: Piece, dtype: str, ratios: dict[tuple[Product | None, str], float]
) -> Piece:
    own = format_of(e, piece)
    if own in ("fp32", "tf32"):
        casts = 0.0
        if dtype == "bf16" and piece.product and not e.recipe:
            casts = _casts_ms(e, piece, piece.product)
        return replace(piece, ms=piece.ms * ratios[piece.product, own] + casts)
    halved = (
        e.recipe is not None
        and dtype == "bf16"
        and piece.kind != COPY
        and piece.phase not in ("optimizer", "clip")
    )
    return replace(piece, ms=0.5 * piece.ms) if halved else piece


def _casts_ms(e: Evidence, piece: Piece, product: Product) -> float:
    """What autocast adds to a product: its weight cast in the forward pass, its weight's gradient
    cast back in the backward pass, which has two products for that one."""
    if piece.phase != "backward":
        return e.rates.cast_ms(product.k * product.n, written=2 * product.k * product.n)
    weight = product.n * max(product.m, product.k)
    return e.rates.cast_ms(weight, written=4 * weight) / 2


FEW = 4
"""Up to so many examples a batch, a larger one is looked at."""
LARGER = 8
MEMORY = 0.9


def batch(e: Evidence) -> Fix | None:
    """A larger batch: whatever is done once a batch is done for more examples, and kernels that
    fill a part of the GPU fill more of it. With accumulation, its micro-batches are merged, and the
    step stays what it was."""
    merging = e.accumulation >= 1.5
    if not merging and (e.examples is None or e.examples > FEW):
        return None
    factor = round(e.accumulation) if merging else LARGER
    if e.memory_gb:
        peak, whole = e.memory_gb
        while (
            factor > 1 and peak * factor > MEMORY * whole
        ):  # more than it will take: weights don't grow
            factor //= 2
    if factor < 2:
        return None
    larger = e.queue.changed(each(lambda piece: _in_a_batch(e, piece, factor, merging)))
    changes: dict[str, Any] = {}
    if e.recipe:
        if not merging:
            return None  # another number of examples a step is another training
        changes = {
            "micro_batch": e.recipe.micro_batch * factor,
            "accumulation": max(1, e.recipe.accumulation // factor),
        }
    examples = (
        f"{e.examples} example{'s' if e.examples != 1 else ''}"
        if e.examples
        else "its micro-batches"
    )
    return Fix(
        "batch size",
        gain(e.queue, larger),
        f"A batch of {examples} doesn't fill the {'GPU' if e.on_gpu else 'processor'}: "
        + (
            f"{factor} merged take less than one after the other."
            if merging
            else f"{factor} times as many take less each."
        ),
        f"DataLoader(batch_size={(e.examples or 1) * factor})"
        + (", and less accumulation" if merging else ""),
        changes=changes,
        per="step" if merging else "example",
    )


def _in_a_batch(e: Evidence, piece: Piece, factor: int, merging: bool) -> Piece:
    """A piece's part for one of the former batches, when `factor` of them are one."""
    once = piece.phase in ("optimizer", "clip")
    if once:
        return (
            piece
            if merging
            else replace(piece, ms=piece.ms / factor, host_ms=piece.host_ms / factor)
        )
    return replace(piece, ms=grown_ms(e, piece, factor) / factor, host_ms=piece.host_ms / factor)


PARTLY, FULL = 1 / 3, 2 / 3
"""A product that reaches the latter share of the GPU's rate fills it, in however few blocks:
Hopper's kernels start one block on each multiprocessor, which goes from tile to tile. One below the
former fills it as far as its blocks do. Between them neither is sure, and it is taken for a mixture
of both, in proportion: a rate is measured to a few percent, and no prediction may jump because a
product was timed a little faster. Both bounds are chosen, not measured."""


def grown_ms(e: Evidence, piece: Piece, factor: float) -> float:
    """Milliseconds of a piece on `factor` times as many examples: of a product at least what its
    FLOPs take, of any other kernel so many times more as it fills the GPU more than once. On fewer
    examples a kernel takes less only as far as it filled the GPU. On a CPU, so many times as long,
    or what a product's FLOPs take."""
    in_proportion = factor * piece.ms
    by_blocks = (
        piece.ms * max(1.0, factor * piece.fill) / max(1.0, piece.fill)
        if e.on_gpu
        else in_proportion
    )
    if piece.product is None or not piece.ms:
        return by_blocks
    floor = e.rates.flops_ms(
        factor * piece.product.flops, format_of(e, piece) or piece.product.dtype
    )
    if floor and factor > 1:
        return min(in_proportion, max(piece.ms, floor))
    reached = floor / in_proportion
    filled = min(1.0, max(0.0, (reached - PARTLY) / (FULL - PARTLY)))
    return filled * in_proportion + (1 - filled) * by_blocks


ROOM = 0.6
"""Checkpointing is held against a loop whose peak memory is below this part of the GPU's."""


def checkpointing(e: Evidence) -> Fix | None:
    """The backward pass without computing the forward pass again."""
    if e.recomputed < 0.05 or (e.memory_gb and e.memory_gb[0] > ROOM * e.memory_gb[1]):
        return None
    forward = sum(_whole(p, e.queue) for p in e.queue.pieces if p.phase in ("", "forward"))
    backward = sum(_whole(p, e.queue) for p in e.queue.pieces if p.phase == "backward")
    if backward <= 0:
        return None
    left = max(0.2, 1 - e.recomputed * forward / backward)

    def shorter(piece: Piece) -> Piece:
        if piece.phase != "backward":
            return piece
        return replace(piece, ms=left * piece.ms, host_ms=left * piece.host_ms)

    room = f" {e.memory_gb[1] - e.memory_gb[0]:.0f} GB are free." if e.memory_gb else ""
    return Fix(
        "checkpointing",
        gain(e.queue, e.queue.changed(each(shorter))),
        f"The backward pass computes {e.recomputed:.0%} of the forward pass again to save "
        f"memory.{room}",
        "turn activation checkpointing off, or keep it for some of the layers only",
        changes={"checkpointing": "off"},
    )


def _whole(piece: Piece, queue: Queue) -> float:
    return piece.ms + (piece.host_ms if queue.takes_turns else 0.0)


def padding(e: Evidence) -> Fix | None:
    """Without padding: as many useful tokens in fewer."""
    if not e.padding or (e.recipe and e.recipe.shapes == "packed"):
        return None
    useful = 1 - e.padding
    untouched = ("optimizer", "clip", *OUTSIDE)
    shorter = each(lambda p: p if p.phase in untouched else replace(p, ms=grown_ms(e, p, useful)))
    return Fix(
        "padding",
        gain(e.queue, e.queue.changed(shorter)),
        f"{e.padding:.0%} of the tokens are padding, and are computed on like the others.",
        "batch texts of like length, pad to the batch's longest only, or pack several in a row",
        changes=_packed(e.recipe, e.workload) if e.recipe else {},
        per="useful token",
    )


def _packed(recipe: Recipe, workload: str) -> dict[str, Any]:
    """The knobs that pack a recipe's texts; {} where its layers, as published, keep no examples
    apart in a row.
    """
    if recipe.layers != "rewritten" or not workload.startswith(("qwen", "gpt", "llava")):
        return {}
    return {
        "shapes": "packed",
        "micro_batch": 1,
        "token_budget": max(2048, 1024 * recipe.micro_batch),
    }


# -------------------------------------------------------------------------------------- the update

FUSED_TRAFFIC = 0.35
"""AdamW tensor by tensor or list by list reads and writes 20 numbers a parameter, and in one kernel
7.
"""
FUSED_LAUNCHES = 1 / 12
PER_TENSOR_MS = 0.003
"""What remains of Python for each tensor that is updated."""


def optimizer(e: Evidence) -> Fix | None:
    """The fused form: one pass over parameters, gradients and moments instead of a dozen."""
    if e.optimizer is None or e.optimizer.form in ("", "fused"):
        return None
    mine = [p for p in e.queue.pieces if p.phase == "optimizer"]
    if not mine:
        return None
    host = sum(p.host_ms for p in mine) / e.queue.steps
    left = max(host * FUSED_LAUNCHES, min(host, PER_TENSOR_MS * e.optimizer.tensors))
    factor = left / host if host else 1.0

    def fused(piece: Piece) -> Piece:
        if piece.phase != "optimizer":
            return replace(piece, waits="") if piece.phase == "clip" and e.recipe else piece
        return replace(piece, ms=FUSED_TRAFFIC * piece.ms, host_ms=factor * piece.host_ms, waits="")

    return Fix(
        "optimizer",
        gain(e.queue, e.queue.changed(each(fused))),
        f"{e.optimizer.name} updates in {len(mine) / e.queue.steps:.0f} operations what one can do "
        "in one pass.",
        f"torch.optim.{e.optimizer.name}(..., fused=True)",
        changes={"optimizer": "adamw-fused"},
    )


CACHES = {"sd15": "latents+text", "llava": "features"}
"""What a frozen encoder is asked once, by the beginning of the workload's name."""


def caching(e: Evidence) -> Fix | None:
    """Recipes of this course: what frozen encoders answer is kept, so that neither they nor the
    decoding take time.
    """
    cache = next((kind for name, kind in CACHES.items() if e.workload.startswith(name)), None)
    if e.recipe is None or cache is None or e.recipe.cache != "nothing":
        return None
    spent = e.queue.of_phase("encode")
    if not spent:
        return None
    hand_over = (
        min(e.data_ms, HAND_OVER_MS * e.accumulation) if cache.startswith("latents") else e.data_ms
    )
    changes: dict[str, Any] = {"cache": cache}
    if cache.startswith("latents"):
        changes |= {"num_workers": 0, "persistent_workers": False}
    return Fix(
        "caching",
        gain(e.queue, e.queue.changed(in_turn(without_phases("encode"), _data_of(e, hand_over)))),
        f"Frozen encoders take {spent:.1f} ms a step, and answer the same each epoch.",
        "encode every example once, and train on what was kept",
        changes=changes,
    )


RULES: tuple[Rule, ...] = (
    workers,
    pinning,
    syncs,
    logging,
    capture,
    compiling,
    precision,
    batch,
    checkpointing,
    padding,
    optimizer,
    caching,
)
