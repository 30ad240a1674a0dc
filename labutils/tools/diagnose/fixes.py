"""Rules, one a fix: what in the evidence calls for it, and what the step would last with it.

Each gain is predicted by itself, by replaying the step's queue with one thing changed. The gains of
several don't add up: what one has saved, the next can't. So the best few are replayed together as
well. A rule that has nothing to go by returns None. What the fixes say is in advice.yaml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from labutils.tools.diagnose.evidence import Evidence, Line
from labutils.tools.diagnose.step_queue import GRAPH_GAP_MS, PYTHON, READ, TO_DEVICE, Piece, Queue

Change = Callable[[Queue], Queue]


@functools.cache
def texts() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("advice.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Fix:
    """`gain`: the predicted share of the step's time saved, 0 to 1; where `per` says so, of the
    time that an example or a useful token takes. `do`: what to type. `sources`: "file:line" of what
    is to be changed. `changes`: the settings that make it, for `ablations` and `trial`; {} where
    there are none. `facts`: what its words hold. `after`: the queue with it."""

    name: str
    gain: float
    reason: str
    do: str = ""
    sources: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    per: str = "step"
    facts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    after: Change = field(default=lambda queue: queue, repr=False, compare=False)


def _fix(e: Evidence, name: str, after: Change, lines: Iterable[Line] = (), **facts: Any) -> Fix:
    """A fix with its words of advice.yaml. facts: what stands in them, and `changes` and `per`."""
    words, per = texts()[name], facts.pop("per", "step")
    changes = facts.pop("changes", words.get("changes", {}))
    reason, do = (words[part].format(**facts) for part in ("reason", "do"))
    places = tuple(dict.fromkeys(line.place for line in lines))[:5]
    return Fix(name, e.queue.gain(after(e.queue)), reason, do, places, changes, per, facts, after)


def _each(change: Callable[[Piece], Piece]) -> Change:
    return lambda queue: queue.each(change)


MOST_TOGETHER = 3


def together(e: Evidence, fixes: Sequence[Fix], worth: float) -> Fix | None:
    """The best few fixes at once: the best one, and what adds most to it. None where nothing does.

    They are put in place in the order of `RULES`: what is captured, or fed, is the mended step.
    """
    chosen: list[Fix] = []
    best, left = 0.0, [fix for fix in fixes if fix.per == "step" and fix.gain >= worth][:5]
    while left and len(chosen) < MOST_TOGETHER:
        tried = []
        for fix in left:
            ordered = sorted([*chosen, fix], key=lambda f: [*RULES].index(f.name))
            queue = functools.reduce(lambda queue, one: one.after(queue), ordered, e.queue)
            tried.append((e.queue.gain(queue), fix))
        gain, fix = max(tried, key=lambda row: row[0])
        if gain < best + worth:
            break
        best, chosen = gain, [*chosen, fix]
        left = [fix for fix in left if fix not in chosen]
    names = " + ".join(fix.name for fix in chosen)
    changes = {key: value for fix in chosen for key, value in fix.changes.items()}
    return Fix(names, best, "", changes=changes) if len(chosen) > 1 else None


# ---------------------------------------------------------------------------------------- the data

HAND_OVER_MS, HAND_OVER_MS_PER_MB, HAND_OVER_MOST_MB = 1.0, 1.3, 3.0
"""What a batch that a worker has ready costs training: taking it, and touching its shared memory
for the first time. 3 MB took 6 ms on a virtual machine of two cores, and 5 on an H200's host.
Larger batches took no longer: 1 to 5 ms for 10 to 40 MB on the first, less than 4 for 19 MB on an
H100's host."""
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
    touched = min(e.loader.bytes / 1e6, HAND_OVER_MOST_MB)
    hand_over = e.loader.batches * (HAND_OVER_MS + touched * HAND_OVER_MS_PER_MB)
    if e.data_ms <= 1.2 * hand_over and now:
        return None
    fetch = e.data_ms if now == 0 else now * e.step_ms
    wait = min(hand_over, e.data_ms)
    fed_ms = _with_data(e.queue, wait).step_ms
    # One thread launches, or on a CPU all compute.
    training = e.queue.total("host_ms") + (0.0 if e.on_gpu else e.threads * e.queue.device_ms)
    busy = training + (fetch if own_cpu_ms is None else own_cpu_ms)
    most = MOST_WORKERS if own_cpu_ms is not None else min(MOST_WORKERS, max(1, e.cores))
    least = {n: max(fetch / n, busy / e.cores) for n in range(now + 1, most + 1)}
    steps = {n: max(fed_ms, ms) for n, ms in least.items()}
    if not steps:
        return None
    chosen = min(n for n, ms in steps.items() if ms <= (1 + NEARLY) * min(steps.values()))
    facts = {"data_ms": e.data_ms, "now": now, "cores": e.cores, "step_ms": steps[chosen]}
    changes = {"num_workers": chosen, "persistent_workers": True}
    after = functools.partial(_fed, wait=wait, least_ms=least[chosen])
    return _fix(e, "workers", after, chosen=chosen, changes=changes, **facts)


def _fed(queue: Queue, wait: float, least_ms: float) -> Queue:
    """The waits for data take `wait` a step, or so long that the step lasts at least `least_ms`."""
    fed = _with_data(queue, wait)
    short = least_ms - fed.step_ms
    return _with_data(queue, wait + short) if short > 0 else fed


def _with_data(queue: Queue, ms: float) -> Queue:
    """The waits for data take `ms` a step in all."""
    factor = ms / waits if (waits := queue.total("data_ms")) else 0.0
    return queue.each(lambda piece: piece.but(data_ms=factor * piece.data_ms))


TO_LINES = ("to()", "cuda()")
"""What lines call that copy to the GPU."""
PINNED = 0.45
"""How long a copy to the GPU takes from page-locked memory, of what it takes from ordinary memory:
on an H200's host 55 against 25 GB/s."""


def pinning(e: Evidence) -> Fix | None:
    """Page-locked batches and copies that don't wait: the host runs on, and copies get shorter."""
    waiting = sum(p.waits == TO_DEVICE for p in e.queue.pieces)
    if not e.on_gpu or not waiting:
        return None
    shorter = 1.0 if e.loader and e.loader.pin_memory else PINNED
    pinned = _each(lambda p: p.but(waits="", ms=shorter * p.ms) if p.waits == TO_DEVICE else p)
    lines = (line for line in e.reads if line.what in TO_LINES)
    return _fix(e, "pinning", pinned, lines, count=waiting / e.queue.steps)


# ------------------------------------------------------------------------------- waits and writing


def syncs(e: Evidence) -> Fix | None:
    """Values that are read each step: without the waits the host runs ahead of the GPU. (On a CPU
    there is no one to wait for.)"""
    reads = sum(p.waits == READ for p in e.queue.pieces)
    if not e.on_gpu or not reads:
        return None
    after = _each(lambda p: p.but(waits="") if p.waits == READ else p)
    lines = (line for line in e.reads if line.what not in TO_LINES)
    return _fix(e, "syncs", after, lines, count=reads / e.queue.steps)


TRIFLE = 0.002
"""Writing that takes less of a step than this is no news."""


def logging(e: Evidence) -> Fix | None:
    """Writing each step: its time goes, and the reads inside of a mark "log" as well."""
    reading = [p for p in e.queue.pieces if p.waits == READ and p.phase == "log"]
    if e.log_ms < TRIFLE * e.step_ms and not reading:
        return None
    without = _each(lambda p: p.but(log_ms=0.0, waits="" if p.phase == "log" else p.waits))
    lines = [line for line in e.writes if line.ms > 0.02 * e.log_ms]
    what = ", ".join(dict.fromkeys(line.what for line in lines[:3]))
    return _fix(e, "logging", without, lines, log_ms=e.log_ms, what=what and f" ({what})")


# --------------------------------------------------------------------------------------- launching

GRAPH_LAUNCH_MS = 0.05
HOST_DECIDES = 1.05
FEW_LAUNCHES = 20
OUTSIDE = ("data", "to_device", "log")
UPDATE = ("optimizer", "clip")
CASTS = "casts and layout"
HEAVY = ("reduction", "normalisation")
MERGED = ("elementwise", CASTS, *HEAVY, "foreach")
TRIFLING = 0.1
"""A kernel that takes less than this part of its longest neighbour passes over no whole tensor."""


def capture(e: Evidence) -> Fix | None:
    """The whole step as one CUDA graph: kernels, a gap after each, and waits for data remain."""
    launches, device_ms = len(e.queue.pieces) / e.queue.steps, e.queue.device_ms
    after = lambda queue: queue.having(captured(queue.pieces))  # noqa: E731
    fed = _with_data(e.queue, 0.0)
    if not e.on_gpu or launches < FEW_LAUNCHES or fed.step_ms < HOST_DECIDES * after(fed).step_ms:
        return None
    return _fix(e, "capture", after, launches=launches, device_ms=device_ms, step_ms=e.step_ms)


def captured(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each stretch between two waits, reads or writings: the host launches once.
    (Left apart, its kernels would fill the queue, and the host would wait for room in it.)"""
    graphs = []
    for stretch in _stretches(pieces, lambda last, p: bool(last.waits or p.data_ms or p.log_ms)):
        first = stretch[0]
        ms = sum(piece.ms + min(piece.gap_ms, GRAPH_GAP_MS) for piece in stretch)
        host = GRAPH_LAUNCH_MS + sum(piece.host_ms for piece in stretch if piece.kind == PYTHON)
        start = (first.phase, stretch[-1].waits, first.data_ms, first.log_ms)
        graphs.append(Piece("other", ms, host, 0.0, *start))
    return graphs


def _stretches(pieces: Sequence[Piece], apart: Callable[[Piece, Piece], bool]) -> list[list[Piece]]:
    """The pieces in order, cut wherever two neighbours stand `apart`."""
    stretches: list[list[Piece]] = []
    for piece in pieces:
        if not stretches or apart(stretches[-1][-1], piece):
            stretches.append([])
        stretches[-1].append(piece)
    return stretches


ENTERING = 2.0
"""Calls that the host makes for each trained tensor, to enter compiled code and to leave it: a loop
of tiny kernels with 104 tensors took 3.0 ms longer than its compiled kernels' calls."""


def compiling(e: Evidence) -> Fix | None:
    """torch.compile: neighbouring operations that only pass over tensors become one. The model's
    Python between operations goes, and the loop's own stays."""
    tensors = e.accumulation * (e.optimizer.tensors if e.optimizer else 0)

    def after(queue: Queue) -> Queue:
        pieces, call = merged(queue.pieces), queue.calling_ms
        more = ENTERING * call * tensors * queue.steps / max(1, sum(p.in_model for p in pieces))
        each = (p.but(host_ms=min(p.host_ms, call) + more) if p.in_model else p for p in pieces)
        return queue.having(each)

    before, left = (len(queue.pieces) / e.queue.steps for queue in (e.queue, after(e.queue)))
    if left > 0.95 * before or (e.on_gpu and before < FEW_LAUNCHES):
        return None
    return _fix(e, "compile", after, before=before, merged=before - left)


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Each run of neighbours that a compiler merges becomes one piece, or as many as it has
    reductions, norms, and casts or copies that follow another or begin the run, such as weights'.
    It reads what its first reads and writes what its last writes, and takes the mean of both times.

    What stands next to each other is taken to belong together. Of lab 02's traced micro-step 71 %
    of the kernels remain, and 88 % of their time; the compiler left 71 and 84 % in lab 04.
    """
    runs = _stretches(pieces, lambda last, piece: not _merge(last, piece))
    return [kernel for run in runs for kernel in _kernels(run)]


def _merge(last: Piece, piece: Piece) -> bool:
    """Whether a compiler makes one kernel of two neighbours."""
    alike = last.phase == piece.phase and {last.kind, piece.kind} <= set(MERGED)
    return alike and not (last.waits or piece.data_ms or piece.log_ms) and piece.in_model


def _kernels(run: list[Piece]) -> list[Piece]:
    """What a compiler makes of neighbours that it merges."""
    apart = [
        place
        for place, (last, piece) in enumerate(pairwise([None, *run]))
        if piece.kind in HEAVY or (piece.kind == CASTS and (not last or last.kind == CASTS))
    ]
    kernels = []
    for start, end in pairwise([0, *apart[1:], len(run)]):
        longest = max(piece.ms for piece in run[start:end])
        ends = [piece.ms for piece in run[start:end] if piece.ms >= TRIFLING * longest]
        ms, host = (ends[0] + ends[-1]) / 2, max(piece.host_ms for piece in run[start:end])
        kernels.append(run[start].but(ms=ms, host_ms=host, waits=run[end - 1].waits))
    return kernels


# ------------------------------------------------------------------------------------ computing

FAR = 24
"""So many pieces lie between the two products of an attention that is written out, at most."""


def attention(e: Evidence) -> Fix | None:
    """Attention written out: one call keeps the scores out of memory, and takes what was measured
    for it here."""
    found = written_out(e.queue.pieces)
    if not found:
        return None
    forward = [e.queue.pieces[run[0]] for run in found if len(run) == 2]
    size = 4 if format_of(e, e.queue.pieces[found[0][0]]) in ("fp32", "tf32") else 2
    scores = sum(size * p.product.count * p.product.m * p.product.n for p in forward if p.product)
    gb = scores / e.queue.steps / e.accumulation / 1e9
    facts = {"count": len(forward) / e.queue.steps, "gb": gb, "half": "", "masked": ""}
    if _causal(e.queue.pieces):
        facts |= {"half": ", is_causal=True", "masked": texts()["attention"]["masked"]}
    return _fix(e, "attention", lambda queue: _in_one_call(e, queue), **facts)


def written_out(pieces: Sequence[Piece]) -> list[list[int]]:
    """Places of batched products that are an attention's: [scores, values] of a forward pass, or
    the four of a backward pass, with a softmax between the first half and the second."""
    batched = [n for n, piece in enumerate(pieces) if piece.product and piece.product.count > 1]
    found, at = [], 0
    while at < len(batched):
        runs = [run for n in (2, 4) if _is_one(pieces, run := batched[at : at + n])]
        found += runs[:1]
        at += len(runs[0]) if runs else 1
    return found


def _is_one(pieces: Sequence[Piece], places: Sequence[int]) -> bool:
    """Whether products belong to one attention: of the same three sizes, and near each other."""
    products, half = [pieces[place].product for place in places], len(places) // 2
    if len(places) not in (2, 4) or places[-1] - places[0] > FAR * half:
        return False
    softmax = any(p.kind in HEAVY for p in pieces[places[half - 1] + 1 : places[half]])
    alike = len({product.sides for product in products}) == 1
    first, last = products[0], products[-1]
    return softmax and alike and (half == 2 or (first.m, first.n) == (last.m, last.k))


def _causal(pieces: Sequence[Piece]) -> set[tuple[int, ...]]:
    """The sides of attentions whose scores are masked before their softmax: half the work."""
    runs = [(run[0], run[-1]) for run in written_out(pieces)]
    return {pieces[a].product.sides for a, b in runs if any(p.masks for p in pieces[a:b])}


def _in_one_call(e: Evidence, queue: Queue) -> Queue:
    """Each attention that is written out as one piece, from its first product to its last."""
    pieces, causal = list(queue.pieces), _causal(queue.pieces)
    for run in reversed(written_out(pieces)):
        parts = pieces[run[0] : run[-1] + 1]
        backward = len(run) == 4
        products = [pieces[place] for place in run]
        as_is = sum(piece.ms for piece in products) * (1.25 if backward else 1.0)
        shape = products[0].product.in_format(format_of(e, products[0]) or "fp32")
        if backward:  # its products stand in any order; the head's width is the shortest side
            k, n, m = sorted((shape.m, shape.n, shape.k))
            shape = replace(shape, m=m, n=n, k=k)
        shape = replace(shape, causal=shape.sides in causal)
        ms = e.rates.attention_ms(shape, backward)
        host = 2 * sum(piece.host_ms for piece in parts) / len(parts)
        one = products[0].but(kind="attention", ms=as_is if ms is None else ms, host_ms=host)
        one = one.but(product=shape, phase="backward" if backward else one.phase)
        sums = {part: sum(getattr(p, part) for p in parts) for part in ("data_ms", "log_ms")}
        pieces[run[0] : run[-1] + 1] = [one.but(waits=parts[-1].waits, **sums)]
    return queue.having(pieces)


HALVES = ("bf16", "fp16")
AUTOCAST_MOVES = 0.75
"""What elementwise kernels move under autocast, of their bytes in float32: those between two
products half, those that add to float32 nearly all. An assumption."""
SCALED = 1.03
"""FP16 takes a gradient scaler: it is proposed where BF16 is slower by more than that."""


def precision(e: Evidence) -> Fix | None:
    """Products in another format: each of the step's own sizes takes as much less as was measured.

    Autocast also casts what goes into them. Where the model is held in the format instead, whatever
    is bound by memory moves half the bytes.
    """
    mine = [p for p in e.queue.pieces if format_of(e, p) in ("fp32", "tf32")]
    if not mine:
        return None
    after: dict[str, Change] = {}
    lasts: dict[str, float] = {}
    for dtype in ("bf16",) if e.held_in_format or not e.on_gpu else ("tf32", *HALVES):
        # The longest first, as the time to measure products in is short.
        for piece in sorted(mine, key=lambda p: -p.ms):
            _in_format(e, piece, dtype)
        after[dtype] = _each(functools.partial(_in_format, e, dtype=dtype))
        lasts[dtype] = after[dtype](e.queue).step_ms
    best = min(lasts, key=lambda d: lasts[d] * (SCALED if d == "fp16" else 1.0))
    gains = {d: max(0.0, 1 - ms / e.queue.step_ms) for d, ms in lasts.items()}
    others = "".join(f" ({d} alone: {gain:.0%})" for d, gain in gains.items() if d != best)
    facts = {"share": sum(p.ms for p in mine) / e.queue.steps / e.queue.step_ms, "others": others}
    facts |= {"line": texts()[best]["do"].format(device=e.device), "changes": {"precision": best}}
    named = best if gains[best] > 0.005 else "float32"
    return _fix(e, "precision", after[best], best=named, **facts)


def format_of(e: Evidence, piece: Piece) -> str:
    """What a product, convolution or attention computes in; "" for all else, or if not known."""
    if piece.kind not in ("GEMM", "thin GEMM", "convolution", "attention"):
        return ""
    key = "cudnn_tf32" if piece.kind == "convolution" else "matmul_tf32"
    return "tf32" if piece.dtype == "fp32" and e.on_gpu and e.config.get(key) else piece.dtype


def _in_format(e: Evidence, piece: Piece, dtype: str) -> Piece:
    """The piece with its product in another format, its casts included."""
    own, product = format_of(e, piece), piece.product
    autocast = dtype in HALVES and not e.held_in_format
    if own not in ("fp32", "tf32"):
        within = dtype in HALVES and piece.in_model
        if autocast:
            within = within and e.on_gpu and piece.kind == "elementwise"
        return piece.scaled(AUTOCAST_MOVES if autocast else 0.5) if within else piece
    if product is None:
        return piece.scaled(e.rates.large(own, dtype))
    product, backward = product.in_format(own), piece.phase == "backward"
    if piece.kind == "attention":
        ms = [e.rates.attention_ms(product.in_format(d), backward) for d in (own, dtype)]
        return piece.scaled(ms[1] / ms[0] if all(ms) else e.rates.large(own, dtype))
    piece = piece.scaled(e.rates.ratio(product, dtype))
    if not autocast:
        return piece
    # It reads four bytes a number and writes two: of what a product is given in the forward pass,
    # half of which has it already, and of gradients in the backward pass, which has two products
    # for that one. Weights and their gradients are always cast. The host gives each cast, too.
    casts, given = 1.5, product.k * product.n + product.m * product.k / 2
    if backward:
        casts, given = 0.75, product.n * max(product.m, product.k) / 2 + product.m * product.k / 4
    cast_ms = e.rates.moved_ms(6 * product.count * given)
    host_ms, gap_ms = piece.host_ms + casts * e.queue.calling_ms, (1 + casts) * piece.gap_ms
    return piece.but(ms=piece.ms + cast_ms, host_ms=host_ms, gap_ms=gap_ms)


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

    facts = {"size": e.examples or "few", "device": "GPU" if e.on_gpu else "processor"}
    facts |= {"merging": ", and less accumulation" if merging else "", "factor": factor}
    facts |= {"changes": {"batches_merged": factor} if merging else {}}
    return _fix(e, "batch size", _each(part), per="step" if merging else "example", **facts)


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
    filled = min(1.0, max(0.0, (floor / in_proportion - PARTLY) / (FULL - PARTLY)))
    return filled * in_proportion + (1 - filled) * by_blocks


ROOM = 0.6
"""Checkpointing is held against a loop whose peak memory is below this part of the GPU's."""


def checkpointing(e: Evidence) -> Fix | None:
    """The backward pass without computing the forward pass again."""
    peak, whole = e.memory_gb or (0.0, 1.0)
    parts = ("ms", "host_ms") if e.queue.takes_turns else ("ms",)
    model = e.queue.having(piece for piece in e.queue.pieces if piece.in_model)
    forward = sum(model.total(part, "", "forward") for part in parts)
    backward = sum(model.total(part, "backward") for part in parts)
    if e.recomputed < 0.05 or peak > ROOM * whole or backward <= 0:
        return None
    left = max(0.2, 1 - e.recomputed * forward / backward)
    after = _each(lambda p: p.scaled(left, left) if p.phase == "backward" else p)
    room = f" {whole - peak:.0f} GB are free." if e.memory_gb else ""
    return _fix(e, "checkpointing", after, part=e.recomputed, room=room)


def padding(e: Evidence) -> Fix | None:
    """Without padding: as many useful tokens in fewer."""
    if not e.padding:
        return None
    useful = 1 - e.padding

    def shorter(p: Piece) -> Piece:
        return p if p.phase in (*UPDATE, *OUTSIDE) else p.but(ms=grown_ms(e, p, useful))

    return _fix(e, "padding", _each(shorter), part=e.padding, per="useful token")


# -------------------------------------------------------------------------------------- the update

FUSED_TRAFFIC = 0.35
"""AdamW tensor by tensor or list by list moves 20 numbers a parameter, and in one kernel 7."""
FUSED_LAUNCHES = 1 / 12
PER_TENSOR_MS = 0.003
"""What remains of Python for each tensor that is updated."""


def optimizer(e: Evidence) -> Fix | None:
    """The fused form: one pass over parameters, gradients and moments instead of a dozen."""
    count = sum(p.phase == "optimizer" for p in e.queue.pieces)
    if e.optimizer is None or e.optimizer.form in ("", "fused") or not count:
        return None
    host = e.queue.total("host_ms", "optimizer")
    left = max(host * FUSED_LAUNCHES, min(host, PER_TENSOR_MS * e.optimizer.tensors))
    factor = left / host if host else 1.0

    def fused(p: Piece) -> Piece:
        one = p.scaled(FUSED_TRAFFIC, FUSED_LAUNCHES).but(host_ms=factor * p.host_ms, waits="")
        return one if p.phase == "optimizer" else p

    facts = {"count": count / e.queue.steps, "optimizer": e.optimizer.name}
    return _fix(e, "optimizer", _each(fused), **facts)


def caching(e: Evidence) -> Fix | None:
    """What frozen encoders answer is kept, in loops that mark them as "encode"; then no picture is
    decoded either."""
    spent = e.queue.total("ms", "encode")
    if not spent:
        return None
    left_ms = min(e.data_ms, HAND_OVER_MS * (e.loader.batches if e.loader else 1.0))
    kept = _each(lambda p: p.scaled(0, 0).but(waits="") if p.phase == "encode" else p)
    return _fix(e, "caching", lambda queue: kept(_with_data(queue, left_ms)), spent=spent)


RULES: dict[str, Callable[[Evidence], Fix | None]] = {
    "attention": attention,
    "padding": padding,
    "batch size": batch,
    "precision": precision,
    "optimizer": optimizer,
    "checkpointing": checkpointing,
    "syncs": syncs,
    "logging": logging,
    "pinning": pinning,
    "compile": compiling,
    "capture": capture,
    "caching": caching,
    "workers": workers,
}
"""In the order in which fixes are put in place together: what is captured is the mended step."""
