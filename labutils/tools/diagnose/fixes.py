"""Rules, one a fix: what in the evidence calls for it, what the step would last with it, and why.

Each gain is predicted by itself, by replaying the step's queue with one thing changed. The gains of
several don't add up: what one has saved, the next can't. A rule that has nothing to go by returns
None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labutils.tools.diagnose.evidence import Evidence, Line
from labutils.tools.diagnose.step_queue import COPY, READ, TO_DEVICE, Piece, Queue


@dataclass(frozen=True)
class Fix:
    """`gain`: the predicted share of the step's time saved, 0 to 1; where `per` says so, of the
    time that an example or a useful token takes. `do`: what to type. `sources`: "file:line" of what
    is to be changed. `changes`: the settings that make it, for `ablations`; {} where there are
    none."""

    name: str
    gain: float
    reason: str
    do: str = ""
    sources: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    per: str = "step"


Rule = Callable[[Evidence], Fix | None]


def _places(lines: Iterable[Line]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.place for line in lines))[:5]


# ---------------------------------------------------------------------------------------- the data

HAND_OVER_MS = 0.3
"""What a batch that a worker has ready costs training, besides `HAND_OVER_GB_PER_S`."""
HAND_OVER_GB_PER_S = 4.0
MOST_WORKERS = 16
NEARLY = 0.03
"""Of two numbers of workers the smaller is proposed where its step is hardly longer."""


def workers(e: Evidence) -> Fix | None:
    """More worker processes: the wait for data is replaced by what they leave of it.

    step(N) = max(step without the wait, time to make a step's batches / N, all processor time /
    cores). A starved loop takes as long as its workers make it wait, which tells how long they
    take. More workers than cores are tried only where making a batch is mostly waiting.
    """
    if e.loader is None or e.data_ms <= 0 or not e.loader.batches:
        return None
    now, own_cpu_ms = e.loader.num_workers, e.loader.fetch_cpu_ms
    hand_over = e.loader.batches * (HAND_OVER_MS + e.loader.bytes / HAND_OVER_GB_PER_S / 1e6)
    if e.data_ms <= 1.2 * hand_over and now:
        return None
    fetch = e.data_ms if now == 0 else now * e.step_ms
    fed_ms = _with_data(e.queue, min(hand_over, e.data_ms)).step_ms
    # One thread launches, or on a CPU all compute.
    training = e.queue.total("host_ms") + (0.0 if e.on_gpu else e.threads * e.queue.device_ms)
    busy = training + (fetch if own_cpu_ms is None else own_cpu_ms)
    most = MOST_WORKERS if own_cpu_ms is not None else min(MOST_WORKERS, max(1, e.cores))
    steps = {n: max(fed_ms, fetch / n, busy / e.cores) for n in range(now + 1, most + 1)}
    if not steps:
        return None
    chosen = min(n for n, ms in steps.items() if ms <= (1 + NEARLY) * min(steps.values()))
    return Fix(
        "workers",
        min(1.0, max(0.0, 1 - steps[chosen] / e.queue.step_ms)),
        f"The loop waits {e.data_ms:.1f} ms a step for data, with {now} workers. {chosen} workers "
        f"on {e.cores} cores have it ready for a step of {steps[chosen]:.1f} ms.",
        f"DataLoader(num_workers={chosen}, persistent_workers=True)",
        changes={"num_workers": chosen, "persistent_workers": True},
    )


def _with_data(queue: Queue, ms: float) -> Queue:
    """The waits for data take `ms` a step in all."""
    waits = queue.total("data_ms")
    factor = ms / waits if waits else 0.0
    return queue.each(lambda piece: piece.but(data_ms=factor * piece.data_ms))


TO_LINES = ("to()", "cuda()", "Tensor.to", "Tensor.cuda", "aten::to", "aten::copy_")
"""What lines call that copy to the GPU, by the hooks' account and by a trace's."""
PINNED = 0.45
"""How long a copy to the GPU takes from page-locked memory, of what it takes from ordinary memory:
on an H200's host 55 against 25 GB/s."""


def pinning(e: Evidence) -> Fix | None:
    """Page-locked batches and copies that don't wait: the host runs on, and copies get shorter."""
    waiting = [p for p in e.queue.pieces if p.kind == COPY and p.waits == TO_DEVICE]
    if not e.on_gpu or not waiting:
        return None
    shorter = 1.0 if e.loader and e.loader.pin_memory else PINNED

    def pinned(piece: Piece) -> Piece:
        if piece.kind != COPY or piece.waits != TO_DEVICE:
            return piece
        return piece.but(waits="", ms=shorter * piece.ms)

    return Fix(
        "pinning",
        e.queue.gain(e.queue.each(pinned)),
        f"{len(waiting) / e.queue.steps:.3g} copies to the GPU a step make the host wait, so that "
        "it can't launch ahead.",
        'DataLoader(pin_memory=True) and .to("cuda", non_blocking=True)',
        _places(line for line in e.reads if line.what in TO_LINES),
        {"pin_memory": True, "non_blocking": True},
    )


# ------------------------------------------------------------------------------- waits and writing


def syncs(e: Evidence) -> Fix | None:
    """Values that are read each step: without the waits the host runs ahead of the GPU. (On a CPU
    there is no one to wait for.)"""
    reads = [p for p in e.queue.pieces if p.waits == READ]
    if not e.on_gpu or not reads:
        return None
    return Fix(
        "syncs",
        e.queue.gain(e.queue.each(lambda p: p.but(waits="") if p.waits == READ else p)),
        f"The host waits for the GPU {len(reads) / e.queue.steps:.3g} times a step to read "
        "something; meanwhile it launches nothing.",
        "keep such values on the device, and read them every 50 steps or so",
        _places(line for line in e.reads if line.what not in TO_LINES),
    )


TRIFLE = 0.002
"""Writing that takes less of a step than this is no news."""


def logging(e: Evidence) -> Fix | None:
    """Writing each step: its time goes, and the reads inside of a mark "log" as well."""
    reading = [p for p in e.queue.pieces if p.waits == READ and p.phase == "log"]
    if e.log_ms < TRIFLE * e.step_ms and not reading:
        return None

    def without(piece: Piece) -> Piece:
        return piece.but(log_ms=0.0, waits="" if piece.phase == "log" else piece.waits)

    lines = [line for line in e.writes if line.ms > 0.02 * e.log_ms]
    what = ", ".join(dict.fromkeys(line.what for line in lines[:3]))
    return Fix(
        "logging",
        e.queue.gain(e.queue.each(without)),
        f"Writing takes {e.log_ms:.2f} ms a step{f' ({what})' if what else ''}, while nothing else "
        "is given to do.",
        "write every 50 steps or so, without flushing, or from another thread",
        _places(lines),
        {"logging": "ring-buffer"},
    )


# --------------------------------------------------------------------------------------- launching

GRAPH_GAP_MS = 0.00025
"""Between two kernels of a CUDA graph: the graph of lab 04's step lasts 136.0 ms for 132.1 ms in
16,898 kernels."""
GRAPH_LAUNCH_MS = 0.05
HOST_DECIDES = 1.05
FEW_LAUNCHES = 20
OUTSIDE = ("data", "to_device", "log")
UPDATE = ("optimizer", "clip")
CASTS = "casts and layout"
HEAVY = ("reduction", "normalisation")
MERGED = ("elementwise", CASTS, *HEAVY, "foreach")


def capture(e: Evidence) -> Fix | None:
    """The whole step as one CUDA graph: kernels, a gap after each, and waits for data remain."""
    launches = len(e.queue.pieces) / e.queue.steps
    host_decides = e.queue.step_ms >= HOST_DECIDES * e.queue.device_ms
    if not e.on_gpu or launches < FEW_LAUNCHES or not host_decides:
        return None
    return Fix(
        "capture",
        e.queue.gain(e.queue.having(captured(e.queue.pieces))),
        f"The GPU has work for {e.queue.device_ms:.1f} of {e.step_ms:.1f} ms: the host can't "
        f"launch {launches:.0f} pieces of work a step any faster.",
        'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph around the whole step; '
        "shapes must be fixed",
        changes={"driver": "graph", "optimizer": "adamw-fused", "logging": "ring-buffer"},
    )


def captured(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each stretch between two waits for data or writings: the host launches once,
    and nothing waits inside. (Left apart, its kernels would fill the queue, and the host would wait
    for room in it.)"""
    graphs = []
    for stretch in _stretches(pieces, lambda _, piece: bool(piece.data_ms or piece.log_ms)):
        first = stretch[0]
        ms = sum(piece.ms + GRAPH_GAP_MS for piece in stretch if piece.ms)
        graph = Piece("other", ms, GRAPH_LAUNCH_MS, first.phase)
        graphs.append(graph.but(data_ms=first.data_ms, log_ms=first.log_ms))
    return graphs


def _stretches(pieces: Sequence[Piece], apart: Callable[[Piece, Piece], bool]) -> list[list[Piece]]:
    """The pieces in order, cut wherever two neighbours stand `apart`."""
    stretches: list[list[Piece]] = []
    for piece in pieces:
        if not stretches or apart(stretches[-1][-1], piece):
            stretches.append([])
        stretches[-1].append(piece)
    return stretches


def compiling(e: Evidence) -> Fix | None:
    """torch.compile: neighbouring operations that only pass over tensors become one."""
    before = len(e.queue.pieces) / e.queue.steps
    if e.on_gpu and before < FEW_LAUNCHES:
        return None
    after = e.queue.having(merged(e.queue.pieces))
    left = len(after.pieces) / e.queue.steps
    if left > 0.95 * before:
        return None
    return Fix(
        "compile",
        e.queue.gain(after),
        f"{before - left:.0f} of {before:.0f} operations a step only pass over tensors next to "
        "others that do: merged, they are neither called nor go through memory.",
        "torch.compile(model)",
        changes={"compile": "default"},
    )


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Each run of neighbours that a compiler merges becomes one piece, or as many as it has
    reductions, norms, and half as many as casts and copies: those of weights are next to others by
    chance. It takes as long as the longest of them, or as all of those together."""
    runs = _stretches(pieces, lambda last, piece: not _merge(last, piece))
    return [kernel for run in runs for kernel in _kernels(run)]


def _merge(last: Piece, piece: Piece) -> bool:
    """Whether a compiler makes one kernel of two neighbours."""
    alike = last.phase == piece.phase and {last.kind, piece.kind} <= set(MERGED)
    waits = last.waits or piece.data_ms or piece.log_ms
    return alike and not waits and piece.phase not in (*OUTSIDE, *UPDATE, "encode")


def _kernels(run: list[Piece]) -> list[Piece]:
    """What a compiler makes of neighbours that it merges."""
    if len(run) < 2:
        return run
    heavy, casts = (sum(p.kind in kinds for p in run) for kinds in (HEAVY, (CASTS,)))
    count = min(len(run), max(1, heavy + casts // 2))
    summed = sum(piece.ms for piece in run if piece.kind in (*HEAVY, CASTS))
    ms = max(summed, *(piece.ms for piece in run))
    host = sum(piece.host_ms for piece in run) / len(run)
    first = run[0].but(ms=ms / count, host_ms=host)
    kernels = [first, *[first.but(data_ms=0.0, log_ms=0.0)] * (count - 1)]
    return [*kernels[:-1], kernels[-1].but(waits=run[-1].waits)]


# ------------------------------------------------------------------------------------ computing


def precision(e: Evidence) -> Fix | None:
    """Products in another format: each of the step's own sizes takes as much less as was measured.

    Autocast also casts what goes into them. Where the model is held in the format instead, whatever
    is bound by memory moves half the bytes.
    """
    mine = [p for p in e.queue.pieces if format_of(e, p) in ("fp32", "tf32")]
    if not mine:
        return None
    gains = {}
    for dtype in ("tf32", "bf16") if e.on_gpu else ("bf16",):
        # The longest first, as the time to measure products in is short.
        for piece in sorted(mine, key=lambda p: -p.ms):
            _in_format(e, piece, dtype)
        gains[dtype] = e.queue.gain(e.queue.each(lambda p, d=dtype: _in_format(e, p, d)))
    best = "bf16" if e.held_in_format else max(gains, key=gains.__getitem__)
    share = sum(p.ms for p in mine) / e.queue.steps / e.queue.step_ms
    do = {
        "tf32": 'torch.set_float32_matmul_precision("high")',
        "bf16": f'with torch.autocast("{e.device}", torch.bfloat16): around forward pass and loss',
    }
    others = "".join(f" ({d} alone: {gain:.0%})" for d, gain in gains.items() if d != best)
    return Fix(
        "precision",
        gains[best],
        f"Products in float32 take {share:.0%} of the step; the fastest format for those sizes is "
        f"{best if gains[best] > 0.005 else 'float32'}{others}.",
        do[best],
        changes={"precision": best},
    )


def format_of(e: Evidence, piece: Piece) -> str:
    """What a product, convolution or attention computes in; "" for all else, or if not known."""
    if piece.kind not in ("GEMM", "thin GEMM", "convolution", "attention"):
        return ""
    key = "cudnn_tf32" if piece.kind == "convolution" else "matmul_tf32"
    return "tf32" if piece.dtype == "fp32" and e.on_gpu and e.config.get(key) else piece.dtype


def _in_format(e: Evidence, piece: Piece, dtype: str) -> Piece:
    """The piece with its product in another format, its casts included."""
    own, product = format_of(e, piece), piece.product
    if own not in ("fp32", "tf32"):
        moved = dtype == "bf16" and piece.kind != COPY and piece.phase not in UPDATE
        return piece.scaled(0.5) if moved and e.held_in_format else piece
    if product is None:
        return piece.scaled(e.rates.large(own, dtype))
    casts_ms = 0.0
    if dtype == "bf16" and not e.held_in_format:
        # Autocast reads four bytes a number and writes two. The weight is cast in the forward pass,
        # and its gradient back in the backward pass, which has two products for that one.
        weight = product.k * product.n
        if piece.phase == "backward":
            weight = product.n * max(product.m, product.k) / 2
        casts_ms = e.rates.moved_ms(6 * weight)
    ratio = e.rates.ratio(product.in_format(own), dtype)
    return piece.but(ms=ratio * piece.ms + casts_ms)


FEW = 4
"""Up to so many examples a batch, a larger one is tried."""
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
    peak, whole = e.memory_gb or (0.0, 1.0)
    while factor > 1 and peak * factor > MEMORY * whole:  # too careful: weights don't grow
        factor //= 2
    if factor < 2:
        return None

    def part(piece: Piece) -> Piece:
        """A piece's part for one of the former batches, when `factor` of them are one."""
        if piece.phase in UPDATE:
            return piece if merging else piece.scaled(1 / factor, 1 / factor)
        return piece.but(ms=grown_ms(e, piece, factor)).scaled(1 / factor, 1 / factor)

    device, size = "GPU" if e.on_gpu else "processor", e.examples or "few"
    return Fix(
        "batch size",
        e.queue.gain(e.queue.each(part)),
        f"Batches of {size} examples don't fill the {device}: {factor} times as many take less "
        "time each.",
        f"{factor} times the batch size" + (", and less accumulation" if merging else ""),
        changes={"batches_merged": factor} if merging else {},
        per="step" if merging else "example",
    )


PARTLY, FULL = 1 / 3, 2 / 3
"""A product that reaches the latter share of the GPU's rate fills it, in however few blocks:
Hopper's kernels start one block on each multiprocessor, which goes from tile to tile. One below the
former fills it as far as its blocks do. Between them it is taken for a mixture of both, in
proportion: no prediction may jump because a product was timed a little faster. Both bounds are
chosen, not measured."""


def grown_ms(e: Evidence, piece: Piece, factor: float) -> float:
    """Milliseconds of a piece on `factor` times as many examples.

    A product takes at least what its FLOPs take, any other kernel so many times more as it fills
    the GPU more than once. On fewer examples a kernel takes less only as far as it filled the GPU.
    On a CPU, so many times as long, or what a product's FLOPs take.
    """
    in_proportion = by_blocks = factor * piece.ms
    if e.on_gpu:
        by_blocks = piece.ms * max(1.0, factor * piece.fill) / max(1.0, piece.fill)
    if piece.product is None or not piece.ms:
        return by_blocks
    dtype = format_of(e, piece) or piece.product.dtype
    floor = e.rates.flops_ms(factor * piece.product.flops, dtype)
    if floor and factor > 1:
        return min(in_proportion, max(piece.ms, floor))
    reached = floor / in_proportion
    filled = min(1.0, max(0.0, (reached - PARTLY) / (FULL - PARTLY)))
    return filled * in_proportion + (1 - filled) * by_blocks


ROOM = 0.6
"""Checkpointing is held against a loop whose peak memory is below this part of the GPU's."""


def checkpointing(e: Evidence) -> Fix | None:
    """The backward pass without computing the forward pass again."""
    peak, whole = e.memory_gb or (0.0, 1.0)
    if e.recomputed < 0.05 or peak > ROOM * whole:
        return None
    parts = ("ms", "host_ms") if e.queue.takes_turns else ("ms",)
    forward = sum(e.queue.total(part, "", "forward") for part in parts)
    backward = sum(e.queue.total(part, "backward") for part in parts)
    if backward <= 0:
        return None
    left = max(0.2, 1 - e.recomputed * forward / backward)
    after = e.queue.each(lambda p: p.scaled(left, left) if p.phase == "backward" else p)
    room = f" {whole - peak:.0f} GB are free." if e.memory_gb else ""
    return Fix(
        "checkpointing",
        e.queue.gain(after),
        f"The backward pass computes {e.recomputed:.0%} of the forward pass again to save "
        f"memory.{room}",
        "turn activation checkpointing off, or keep it for some of the layers only",
        changes={"checkpointing": "off"},
    )


def padding(e: Evidence) -> Fix | None:
    """Without padding: as many useful tokens in fewer."""
    if not e.padding:
        return None
    useful = 1 - e.padding

    def shorter(piece: Piece) -> Piece:
        untouched = piece.phase in (*UPDATE, *OUTSIDE)
        return piece if untouched else piece.but(ms=grown_ms(e, piece, useful))

    return Fix(
        "padding",
        e.queue.gain(e.queue.each(shorter)),
        f"{e.padding:.0%} of the tokens are padding, and are computed on like the others.",
        "batch texts of like length, pad to the batch's longest only, or pack several in a row",
        changes={"shapes": "packed"},
        per="useful token",
    )


# -------------------------------------------------------------------------------------- the update

FUSED_TRAFFIC = 0.35
"""AdamW tensor by tensor or list by list moves 20 numbers a parameter, and in one kernel 7."""
FUSED_LAUNCHES = 1 / 12
PER_TENSOR_MS = 0.003
"""What remains of Python for each tensor that is updated."""


def optimizer(e: Evidence) -> Fix | None:
    """The fused form: one pass over parameters, gradients and moments instead of a dozen."""
    mine = [p for p in e.queue.pieces if p.phase == "optimizer"]
    if e.optimizer is None or e.optimizer.form in ("", "fused") or not mine:
        return None
    host = e.queue.total("host_ms", "optimizer")
    left = max(host * FUSED_LAUNCHES, min(host, PER_TENSOR_MS * e.optimizer.tensors))
    factor = left / host if host else 1.0

    def fused(piece: Piece) -> Piece:
        if piece.phase == "optimizer":
            return piece.scaled(FUSED_TRAFFIC, factor).but(waits="")
        return piece

    return Fix(
        "optimizer",
        e.queue.gain(e.queue.each(fused)),
        f"{e.optimizer.name} updates in {len(mine) / e.queue.steps:.0f} operations what one can do "
        "in one pass.",
        f"torch.optim.{e.optimizer.name}(..., fused=True)",
        changes={"optimizer": "adamw-fused"},
    )


def caching(e: Evidence) -> Fix | None:
    """What frozen encoders answer is kept, in loops that mark them as "encode"; then no picture is
    decoded either."""
    spent = e.queue.total("ms", "encode")
    if not spent:
        return None
    batches = e.loader.batches if e.loader else 1.0
    fed = _with_data(e.queue, min(e.data_ms, HAND_OVER_MS * batches))
    kept = fed.each(lambda p: p.scaled(0, 0).but(waits="") if p.phase == "encode" else p)
    return Fix(
        "caching",
        e.queue.gain(kept),
        f"Frozen encoders take {spent:.1f} ms a step, and answer the same each epoch.",
        "encode every example once, and train on what was kept",
        changes={"cache": "features"},
    )


RULES: tuple[Rule, ...] = (
    *(workers, pinning, syncs, logging, capture, compiling),
    *(precision, batch, checkpointing, padding, optimizer, caching),
)
