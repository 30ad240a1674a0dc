"""What lab 07 does beyond recipes: article A3's methods by name, the arithmetic of 4-bit weights
and of LoRA's chain of products, memory as a line over the batch, and the ladder from the article's
LoRA run to our own best ones.

    method = of_name("lora long, checkpointed")                 which workload, which recipe, which change of the model
    run = follow(workload, "qlora short, batch 1", steps=12, logs=folder)
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labutils.course.goals import Goal
from labutils.labs.lab06_advisor import Option, break_even
from labutils.labs.ladders import A3_BASE, A3_LADDER, Ladder, Rung, climb, in_lanes
from labutils.layers.lora import (
    attach_lora,
    count_parameters,
    count_trainable,
    lora_layers,
    lora_parameters,
)
from labutils.layers.quantization import nf4_math
from labutils.layers.quantization.convert import convert_base
from labutils.layers.quantization.fp8_math import relative_error
from labutils.profiling import cuda
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import BatchLine
from labutils.profiling.trace import profile
from labutils.recipe import Recipe
from labutils.results.records import Run, is_out_of_memory, step_by_step
from labutils.training import Benchmark, Trainer
from labutils.training.benchmark import empty_run
from labutils.training.memory_run import followed, make_room, read_log
from labutils.training.model_edits import (
    cast_as_for_kbit,
    prepared_for_kbit,
    with_costs,
    with_epoch_rate,
)
from labutils.training.unsloth_run import Job
from labutils.workloads import Workload
from labutils.workloads.causal_lm import QWEN3, build_lm
from labutils.workloads.decoder import decoder_shapes, projections

Change = Callable[[nn.Module], None]

# ---------------------------------------------------------------------------- the article's methods


KINDS = ("lora", "qlora", "unsloth")


class Method(NamedTuple):
    """A run's texts ("short" or "long"), its recipe, and what is done to the model once it is
    built.
    """

    texts: str
    recipe: Recipe
    change: Change | None = None


OUR_LOOP = {
    "driver": "eager",
    "logging": "ring-buffer",
    "non_blocking": True,
    "optimizer": "adamw-fused",
}
"""The loop of the ladder's upper rungs, which a library's model is given where it is held against
them.
"""
SWITCHES: dict[str, dict[str, Any]] = {
    "checkpointed": {"checkpointing": "blocks"},
    "offloaded": {"checkpointing": "offload"},
    "4 bits": {"base_linear": "nf4"},
    "fp32 casts": {},
    "no casts": {},
    "batch 1": {"micro_batch": 1},
    "batch 2": {"micro_batch": 2},
    "padded": {"shapes": "padded"},
    "fused loss": {"layers": "rewritten", "loss": "fused"},
    "packed": {"shapes": "packed", "token_budget": 4096, "micro_batch": 1} | OUR_LOOP,
}
"""What may follow a method's name after a comma -> the knobs that it sets."""
AS_USUALLY_WRITTEN = {"base_linear": "nf4", "checkpointing": "blocks"}
"""QLoRA's knobs. PEFT's `prepare_model_for_kbit_training` sets the second, and casts: see
`of_name`.
"""


def of_name(name: str) -> Method:
    """The method of a run's name: "lora long", "qlora short, batch 1", "lora long, checkpointed".

    "lora" is the article's plain LoRA at batch 4. "qlora" is QLoRA as usually written: 4-bit
    weights, and what PEFT's preparation does besides, checkpointing and casts to float32; "no
    casts" leaves the casts out. "fp32 casts" does to a LoRA model what they do to QLoRA's.
    "unsloth" is QLoRA's recipe for unsloth, which brings its own.

    Raises `ValueError` for a name that isn't made of these.
    """
    head, *switches = name.split(", ")
    kind, _, texts = head.partition(" ")
    if kind not in KINDS or texts not in ("short", "long") or not set(switches) <= set(SWITCHES):
        raise ValueError(
            f'{name!r} is no method. Write "lora", "qlora" or "unsloth", then "short" or "long", then any of these, '
            f"each after a comma: {', '.join(SWITCHES)}."
        )
    recipe = A3_BASE
    if kind == "qlora":
        recipe = recipe.but(**AS_USUALLY_WRITTEN)
    if kind == "unsloth":
        recipe = recipe.but(base_linear="nf4")
    for switch in switches:
        recipe = recipe.but(**SWITCHES[switch])
    change = None
    if kind == "qlora" and "no casts" not in switches:
        change = prepared_for_kbit
    if "fp32 casts" in switches:
        change = cast_as_for_kbit
    return Method(texts, recipe, change)


def follow(
    workloads: Mapping[str, Workload],
    name: str,
    steps: int,
    logs: Path,
    every: int = 10,
    against: Run | None = None,
) -> Run:
    """The run of a method: at least `steps` timed steps, its memory in `logs`/name.csv.

    `memory_share` is its peak over that of the run `against`, where both have one.
    """
    method = of_name(name)
    make_room(*workloads.values())
    log = logs / f"{name}.csv"
    run = followed(workloads[method.texts], method.recipe, steps, name, log, every, method.change)
    peak, other_peak = (r.metric("peak_allocated_gb") if r else None for r in (run, against))
    if peak and other_peak:
        run.metrics["memory_share"] = peak / other_peak
    return run


def unsloth_jobs(workloads: Mapping[str, Workload], steps: int) -> dict[str, Job]:
    """unsloth's runs: on both kinds of texts; on the packed rows of our own best recipes, without a
    mask, as its trainer's padding-free batches are; and a few steps on each of the two batch sizes
    of its line."""
    wanted = {"unsloth long": steps, "unsloth short": steps, UNSLOTH_PACKED: steps}
    wanted |= dict.fromkeys(UNSLOTHS_LINE.values(), 3)
    methods = {name: of_name(name) for name in wanted}
    return {name: Job(workloads[m.texts], m.recipe, wanted[name]) for name, m in methods.items()}


UNSLOTH_PACKED = "unsloth long, packed"
"""unsloth's run on the rows and in the loop of our packed rungs: what these are held against."""
UNSLOTHS_LINE = {2: "unsloth long, padded, batch 2", 4: "unsloth long, padded"}
"""Batch size -> unsloth's run on texts padded to the full length. (A batch of 1 would be compiled
anew.)
"""


def longer_by(run: Run, base: Run) -> float | None:
    """How many percent longer a run's steps are than another's of the same batches, step by step
    (the median over those that both were timed on); None where one failed or none is shared."""
    ratios = [after / before for before, after in step_by_step(base, run)]
    return 100 * (statistics.median(ratios) - 1) if run.ok and base.ok and ratios else None


def paid_after(base: Run, run: Run) -> float | None:
    """Steps after which `run` has caught up with `base`, first steps counted in; None where it
    never does or failed.
    """
    if not (base.ok and run.ok):
        return None
    return break_even(
        *(Option("", r.metric("first_step_s"), r.metric("step_ms") / 1e3, 0) for r in (base, run))
    )


METHOD_HEAD = (
    "method",
    "first step, s",
    "step, ms",
    "useful tokens/s",
    "examples/s",
    "peak memory, GB",
    "reserved, GB",
)
"""The head of a table of `method_rows`."""
METRICS = (
    "first_step_s",
    "step_ms",
    "useful_tokens_per_s",
    "examples_per_s",
    "peak_allocated_gb",
    "peak_reserved_gb",
)


def method_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `METHOD_HEAD`, in the order of `runs`; failures have their reason in the name."""
    return [
        (name, *(run.metric(metric) for metric in METRICS))
        if run.ok
        else (f"{name}: {run.status}",) + (None,) * 6
        for name, run in runs.items()
    ]


def over_examples(logs: Path, length: str, column: str) -> dict[str, dict[float, float]]:
    """Of `KINDS` on texts of a length: kind -> examples trained on -> a column of its memory log,
    where it has one.
    """
    lines = {kind: read_log(logs / f"{kind} {length}.csv") for kind in KINDS}
    batch = A3_BASE.micro_batch
    return {
        kind: {batch * at["step"]: at[column] for at in log if column in at}
        for kind, log in lines.items()
    }


# -------------------------------------------------------------------- the arithmetic of weights


def absmax_example(values: Tensor) -> dict[str, float]:
    """The constant, the codes and the restored values of `values` in absmax INT8, as metrics."""
    whole = nf4_math.quantise_int(values)
    found = {"constant": whole.constant.item()}
    found |= {f"code_{i}": code for i, code in enumerate(whole.codes.flatten().tolist())}
    return found | {f"restored_{i}": value for i, value in enumerate(whole.restored().tolist())}


def outlier_costs(weight: Tensor, block: int | None, factor: float = 1000) -> dict[str, float]:
    """What one number of `factor` times the standard deviation does to INT8 codes of `weight`.

    `zeros_share` of the other codes become 0, and `others_error` is the relative error of the other
    numbers.
    """
    spoiled = weight.detach().float().clone().flatten()
    spoiled[spoiled.numel() // 2] = factor * spoiled.std()
    others = torch.arange(spoiled.numel(), device=spoiled.device) != spoiled.numel() // 2
    whole = nf4_math.quantise_int(spoiled, block=block)
    codes = nf4_math.joined(whole.codes, whole.shape)
    return {
        "zeros_share": (codes[others] == 0).float().mean().item(),
        "others_error": relative_error(whole.restored()[others], spoiled[others]),
    }


BITS = {
    "INT8, one constant": 8.0,
    "INT8, blocks of 64": 8 + nf4_math.constant_bits(),
    "INT4, one constant": 4.0,
    "INT4, blocks of 64": 4 + nf4_math.constant_bits(),
    "FP4 E2M1, blocks of 64": 4 + nf4_math.constant_bits(),
    "NF4, one block": 4.0,
    "NF4, blocks of 64": 4 + nf4_math.constant_bits(),
    "NF4, doubly quantised": 4 + nf4_math.doubled_constant_bits(),
    "FP8 E4M3, one scale": 8.0,
}
"""Format of `nf4.ROUNDINGS` -> its bits a parameter, constants included (a tensor's one constant is
not seen).
"""


def bits_held(weight: Tensor) -> dict[str, float]:
    """Bits a parameter of what bitsandbytes holds for `weight` in NF4, counted in bytes:
    `bits_codes`, and of the constants `bits_float32` without and `bits_doubled` with double
    quantisation; `linear_share` of 16 bits in all."""
    from bitsandbytes.functional import quantize_4bit

    packed, single = quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    _, double = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    codes = 8 * packed.nbytes / weight.numel()
    doubled = 8 * (double.absmax.nbytes + double.state2.absmax.nbytes) / weight.numel()
    return {
        "bits_codes": codes,
        "bits_float32": 8 * single.absmax.nbytes / weight.numel(),
        "bits_doubled": doubled,
        "linear_share": (codes + doubled) / 16,
    }


def same_as_bitsandbytes(weight: Tensor) -> dict[str, bool]:
    """Whether levels, bytes and restored weights of `nf4` are bitsandbytes' own, bit for bit."""
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    ours = nf4_math.quantise_nf4(weight)
    return {
        "the 16 levels": torch.equal(get_4bit_type("nf4", device="cpu"), nf4_math.nf4_levels()),
        "the packed bytes": torch.equal(packed.flatten(), ours.packed),
        "the blocks' constants": torch.equal(state.absmax, ours.absmax),
        "the restored weights": torch.equal(
            dequantize_4bit(packed, state), ours.restored(weight.dtype)
        ),
    }


def multiplies_restored(linear: nn.Linear, x: Tensor) -> dict[str, float]:
    """Whether bitsandbytes' NF4 layer gives x times the restored weight, to rounding:
    `multiplies_restored_weights`, and its result's relative errors against that product and against
    the 16-bit layer's."""
    from bitsandbytes.functional import dequantize_4bit

    exact = F.linear(x.double(), linear.weight.double())
    layer = nn.Sequential(linear)
    convert_base(layer, ["0"], "nf4", x.dtype)
    found = layer(x)
    restored = dequantize_4bit(layer[0].weight, layer[0].weight.quant_state)
    error = relative_error(found, F.linear(x.double(), restored.double()))
    return {
        "multiplies_restored_weights": int(error < 2 * torch.finfo(x.dtype).eps),
        "error_to_restored": error,
        "error_to_16_bits": relative_error(found, exact),
    }


# ----------------------------------------------------------------------- the arithmetic of LoRA


def lora_counts(rank: int = 8) -> dict[str, float]:
    """LoRA of this rank on Qwen3-8B's seven projections, counted on the meta device: numbers
    trained and in all, `counts_as_the_formula` (1 if every layer trains (d + k) r), and the
    adapter's bytes over the 16-bit model's."""
    lm = build_lm(QWEN3["full"], torch.device("meta"), torch.bfloat16)
    everything = count_parameters(lm)
    attach_lora(lm, projections(lm), rank, 2 * rank, "plain", seed=0)
    layers = lora_layers(lm).values()
    right = all(
        count_trainable(x) == lora_parameters(x.out_features, x.in_features, rank) for x in layers
    )
    trained = count_trainable(lm)
    adapter = sum(p.nbytes for p in lm.parameters() if p.requires_grad)
    return {
        "trained": trained,
        "in_all": everything,
        "counts_as_the_formula": int(right),
        "adapter_share": adapter / (2 * everything),
    }


def chain(
    order: str, x: Tensor, A: Tensor, B: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LoRA's product and its gradients, y = x A^T B^T with the products taken "thin first" or "wide
    first".

    x is [n, in], A [r, in], B [out, r], slope (the gradient of y) [n, out]. Returns y and the
    gradients of x, A and B. Wide first forms B A [out, in] and multiplies with it; the gradient of
    that matrix is formed in neither order.
    """
    h, g = x @ A.t(), slope @ B
    if order == "thin first":
        y, dx = h @ B.t(), g @ A
    else:
        whole = B @ A
        y, dx = x @ whole.t(), slope @ whole
    return y, dx, g.t() @ x, slope.t() @ h


def chain_flops(order: str, tokens: int, rank: int) -> int:
    """FLOPs of `chain` on all seven projections of a Qwen3-8B block, counted by PyTorch on the meta
    device.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        for wide, out in decoder_shapes(QWEN3["full"]).adapted.values():
            chain(
                order,
                _empty(tokens, wide),
                _empty(rank, wide),
                _empty(out, rank),
                _empty(tokens, out),
            )
    return counter.get_total_flops()


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape)


# ---------------------------------------------------------------------------- memory and batch


class Filled:
    """A method's trainer fed with batches of any size, of the longest texts padded to the full
    length: the worst case.

        with Filled(workload, "qlora long") as filled:
            filled.peak(4)

    `peak` is in GB: what PyTorch's allocator reports on a GPU (the process's), elsewhere the
    weights and the tensors alive, as `profiling.memory` counts them.
    """

    def __init__(self, workload: Workload, name: str) -> None:
        method = of_name(name)
        self.change, self.lets_go = method.change, workload.release_weights
        self.recipe = method.recipe.but(shapes="padded", micro_batch=1)
        self.trainer = Trainer(workload, self.recipe, on_model=self._alone)
        self.workload = workload
        self.rows = workload.dataset(None, self.recipe)
        self.longest = sorted(range(len(self.rows)), key=lambda i: -len(self.rows[i]["input_ids"]))

    def _alone(self, model: nn.Module) -> None:
        """What the method does to the model; what is kept for other trainers would count as this
        one's.
        """
        if self.change is not None:
            self.change(model)
        self.lets_go()

    def peak(self, batch: int) -> float:
        """Peak memory of one optimizer step on `batch` examples. Raises what PyTorch raises where
        it doesn't fit.
        """
        chosen = [self.rows[self.longest[i % len(self.longest)]] for i in range(batch)]
        made = self.workload.collate(self.recipe)(chosen)
        fed = iter([{name: tensor.to(self.workload.device) for name, tensor in made.items()}])
        if self.workload.device.type != "cuda":
            model = self.trainer.model
            with TensorRecord([*model.parameters(), *model.buffers()]) as live:
                self.trainer.step(fed)
            return (weight_bytes(model) + live.peak) / 1e9
        cuda.reset_peak_memory()
        self.trainer.step(fed)
        cuda.synchronize()
        return cuda.peak_memory()[0]

    def fits(self, batch: int) -> bool:
        """Whether one optimizer step on `batch` examples runs."""
        try:
            self.peak(batch)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside the except block: inside it the exception still holds the frames, and these the
        # tensors.
        for parameter in self.trainer.parameters:
            parameter.grad = None
        gc.collect()
        cuda.empty_cache()
        return False

    def __enter__(self) -> Filled:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.trainer.close()


def lines_of(memory: Mapping[str, Run], runs: Mapping[str, Run]) -> dict[str, BatchLine]:
    """Method -> its line: those of `memory`, runs of `memory_line`; unsloth's from its `runs` on
    padded texts, where these are."""
    measured = {name: run for name, run in memory.items() if "each_gb" in run.metrics}
    lines = {
        name: BatchLine(run.metrics["base_gb"], run.metrics["each_gb"])
        for name, run in measured.items()
    }
    peaks = {
        batch: runs[name].metric("peak_allocated_gb")
        for batch, name in UNSLOTHS_LINE.items()
        if name in runs
    }
    if len(peaks) == len(UNSLOTHS_LINE) and all(peaks.values()):
        lines["unsloth long"] = BatchLine.through(peaks)
    return lines


def memory_line(
    workloads: Mapping[str, Workload], name: str, batches: Iterable[int], card_gb: float | None
) -> Run:
    """A method's line over `batches` as a run: `base_gb`, `each_gb`, `largest_batch` on a card of
    `card_gb`, and whether it holds here: `fits` at nine tenths of it, `fails` at a tenth more.
    None: nothing is tried."""
    make_room(*workloads.values())
    method = of_name(name)
    workload = workloads[method.texts]
    run = Run(
        "",
        f"memory of {name}",
        workload=workload.name,
        scale=workload.scale,
        recipe=method.recipe.as_dict(),
    )
    with Filled(workload, name) as filled:
        filled.peak(1)  # the optimizer's state comes with the first step
        points = {batch: filled.peak(batch) for batch in batches}
        line = BatchLine.through(points)
        run.metrics = {"base_gb": line.base, "each_gb": line.each}
        if card_gb is not None:
            largest = line.largest(card_gb)
            run.metrics |= {
                "largest_batch": largest,
                "fits": int(filled.fits(max(1, math.floor(0.9 * largest)))),
            }
            run.metrics |= {"fails": int(not filled.fits(math.ceil(1.1 * largest) + 1))}
    return run


BUNDLE_HEAD = (
    "",
    "ms per 1,000 useful tokens",
    "against lora, step by step, %",
    "GB at any batch",
    "GB an example",
)
"""The head of a table of `bundle_rows`."""


def bundle_rows(
    names: Iterable[str], runs: Mapping[str, Run], memory: Mapping[str, Run]
) -> list[tuple[Any, ...]]:
    """Rows for `BUNDLE_HEAD`: time of `runs` and the lines of `memory` (`lines_of`), where they
    are.
    """
    lines, base, rows = lines_of(memory, runs), runs.get("lora long"), []
    for name in names:
        run, line = runs.get(name), lines.get(name, (None, None))
        longer = longer_by(run, base) if run and base else None
        cost = run.metric("ms_per_1k_useful_tokens") if run else None
        rows.append((name, cost, None if longer is None else f"{longer:+.0f}", *line))
    return rows


def bundle_of(found: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """`bundle_rows` of runs as a results file names them: a method's own, and "memory of ..." it."""
    memory, runs = _apart(found)
    alone = [name for name in runs if not name.startswith("unsloth")]
    return bundle_rows(dict.fromkeys([*alone, *lines_of(memory, runs)]), runs, memory)


def _apart(found: Mapping[str, Run]) -> tuple[dict[str, Run], dict[str, Run]]:
    """The runs of memory by their method's name, and the others."""
    start = "memory of "
    memory = {
        name.removeprefix(start): run for name, run in found.items() if name.startswith(start)
    }
    return memory, {name: run for name, run in found.items() if not name.startswith(start)}


def batches_head(cards: Iterable[float]) -> tuple[str, ...]:
    """The head of a table of `batch_rows`, for cards of so many GB."""
    sizes = (f"{card:g} GB" if card >= 1 else f"{1000 * card:g} MB" for card in cards)
    return ("largest batch of texts of full length, on a card of", *sizes)


def batch_rows(lines: Mapping[str, BatchLine], cards: Sequence[float]) -> list[tuple[Any, ...]]:
    """A row a method: the largest batch that its line fits into each card."""
    return [(name, *(line.largest(card) for card in cards)) for name, line in lines.items()]


def largest_on(found: Mapping[str, Run], cards: Sequence[float]) -> list[tuple[Any, ...]]:
    """`batch_rows` of runs as a results file names them."""
    return batch_rows(lines_of(*_apart(found)), cards)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, and of what bitsandbytes holds beside 4-bit ones."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    states = [
        p.quant_state for p in tensors.values() if getattr(p, "quant_state", None) is not None
    ]
    constants = [
        x
        for s in states
        for x in (s.absmax, s.state2.absmax if s.nested else None)
        if x is not None
    ]
    return sum(tensor.nbytes for tensor in [*tensors.values(), *constants])


# ---------------------------------------------------------------------------- our own recipes

LEAST_MEMORY = "4 bits in FP8, checkpointed"
LOW_BIT_RUNGS = (
    Rung(
        "FP8 weights",
        "same mathematics",
        {"base_linear": "fp8-frozen"},
        "held once, products on FP8 tensor cores",
    ),
    Rung(
        "4-bit weights",
        "same mathematics",
        {"base_linear": "nf4-frozen"},
        "unpacked inside the compiled block",
    ),
    Rung(
        LEAST_MEMORY,
        "same mathematics",
        # A graph holds memory of its own, and saves compiled blocks no time: 270 ms a step with one
        # on an H200, 269 without.
        {"base_linear": "nf4-fp8", "checkpointing": "blocks", "driver": "eager"},
        "unpacked to FP8, and blocks compute again: least memory",
    ),
)


def ladder_for(device: str) -> tuple[Ladder, dict[str, Recipe]]:
    """The ladder from article A3's LoRA run on and its recipes, as a `device` climbs it.

    Low-bit weights come on top, each on the same rung below. On a CPU nothing is compiled, which
    takes a minute.
    """
    ladder = A3_LADDER.plus(*LOW_BIT_RUNGS)
    recipes = climb(ladder)
    if device != "cuda":
        plain = {"compile": "off", "compile_scope": "model", "dynamic": "automatic"}
        recipes = {name: recipe.but(**plain) for name, recipe in recipes.items()}
    return ladder, recipes


def climbed_on(
    workload: Workload,
    ladder: Iterable[Rung],
    recipes: Mapping[str, Recipe],
    steps: int,
    rounds: int,
    warmup: int,
) -> dict[str, Run]:
    """The runs of a ladder's rungs, in their lanes: `rounds` times the same `steps` batches or
    more, with costs and an epoch's rates.

    Rungs that share the 16-bit weights are interleaved; those with weights of their own come after
    them, so that these aren't beside the first rung, which needs more memory than all others.
    """
    shared = [
        {n: r for n, r in recipes.items() if (r.base_linear == "published") is one}
        for one in (True, False)
    ]
    runs: dict[str, Run] = {}
    for rungs in filter(None, shared):
        make_room(workload)
        with Benchmark(workload, warmup, same_batches=True) as bench:
            runs |= bench.compare(rungs, steps, rounds)
    return in_lanes(
        {name: with_epoch_rate(with_costs(run), workload) for name, run in runs.items()}, ladder
    )


def kinds_of(workload: Workload, recipe: Recipe, folder: Path, steps: int = 2) -> Run:
    """What kinds of work a step of `recipe` is made of, from a trace of `steps` steps in `folder`.

    Metric `kernel_categories`: kind -> {"ms", "count"} a step, the most time first; without a GPU,
    operators' own time.
    """
    make_room(workload)
    with Trainer(workload, recipe) as trainer:  # the first steps compile
        trace = profile(trainer, steps, folder, with_stack=False, wait=2, with_shapes=True)
    run = empty_run(workload, recipe, "step by kind")
    run.metrics["kernel_categories"] = trace.categories()
    return run


KINDS_HEAD = ("kind of work", "ms a step", "% of the work", "count a step")
"""The head of a table of `kinds_rows`."""


def kinds_rows(found: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `KINDS_HEAD` of the runs in `found`: kinds that take a hundredth of their run's work
    or more.
    """
    rows = []
    for run in found.values():
        kinds = run.metrics.get("kernel_categories", {})
        work = sum(kind["ms"] for kind in kinds.values())
        rows += [
            (name, kind["ms"], 100 * kind["ms"] / work, round(kind["count"]))
            for name, kind in kinds.items()
        ]
    return [row for row in rows if row[2] >= 1]


def floor_columns(run: Run) -> tuple[float | None, float | None]:
    """A run's floor in ms, and which share of its mean step that is, in %."""
    floor, times = run.metric("floor_ms"), run.samples.get("step_ms")
    return (floor, 100 * floor * len(times) / sum(times)) if floor and times else (None, None)


RUNG_HEAD = ("rung", "useful tokens/s", "peak, GB", "first step, s", "floor, ms", "floor / step, %")
"""The head of a table of `rung_rows`."""


def rung_rows(climbed: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `RUNG_HEAD`; a rung that failed has its reason in the name."""
    metrics = ("useful_tokens_per_s", "peak_allocated_gb", "first_step_s")
    return [
        (
            name if run.ok else f"{name}: {run.status}",
            *map(run.metric, metrics),
            *floor_columns(run),
        )
        for name, run in climbed.items()
    ]


GOALS = {
    "useful_tokens_per_s": Goal("BF16: useful tokens/s", least=17_000),
    "useful_speedup": Goal("BF16: times the article's LoRA run", least=1.9),
    "fp8_useful_tokens_per_s": Goal("FP8 weights: useful tokens/s", least=20_000),
    "small_over_unsloth": Goal(
        f"{LEAST_MEMORY}: times unsloth's useful tokens/s, both packed", least=1.3
    ),
    "small_memory_over_unsloth": Goal("the same: times unsloth's peak memory", most=1.5),
    "small_over_unsloth_padded": Goal(
        "the same: times unsloth's useful tokens/s on padded batches"
    ),
}
"""Metric of `reached` -> what it is, and what we aimed at on an H200."""


def reached(climbed: Mapping[str, Run], runs: Mapping[str, Run]) -> dict[str, Any]:
    """What the ladder's rungs get to, as metrics named in `GOALS`; what can't be said here is
    absent.

    Of `runs`, unsloth's are looked at: the packed one for both goals, as packing alone is worth
    more than most of what a library does; the padded one for a second number, which says what its
    usual batches would have been worth.
    """
    rates = {name: _rate(run) for name, run in climbed.items() if run.ok}
    found: dict[str, Any] = {}
    bf16 = [rates[rung.name] for rung in A3_LADDER if rung.name in rates]
    if bf16 and "lora" in rates:
        best = max(bf16, key=lambda rate: rate["median"])
        found |= {"useful_tokens_per_s": best, "useful_speedup": _over(best, rates["lora"])}
    if "FP8 weights" in rates:
        found["fp8_useful_tokens_per_s"] = rates["FP8 weights"]
    small = climbed.get(LEAST_MEMORY)
    if small is None or not small.ok:
        return found
    packed, padded = (
        run if run and run.ok else None
        for run in (runs.get(UNSLOTH_PACKED), runs.get("unsloth long"))
    )
    if packed:
        found["small_over_unsloth"] = _over(rates[small.run], _rate(packed))
        if small.metric("peak_allocated_gb") and packed.metric("peak_allocated_gb"):
            found["small_memory_over_unsloth"] = small.metric("peak_allocated_gb") / packed.metric(
                "peak_allocated_gb"
            )
    if padded:
        found["small_over_unsloth_padded"] = _over(rates[small.run], _rate(padded))
    return found


def _rate(run: Run) -> dict[str, float]:
    return run.metrics["useful_tokens_per_s"]


def _over(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The ratio of two summaries' medians; its p10 and p90 are the least and the most that their
    ranges allow.
    """
    return {
        "median": one["median"] / other["median"],
        "p10": one["p10"] / other["p90"],
        "p90": one["p90"] / other["p10"],
        "n": min(one["n"], other["n"]),
    }
