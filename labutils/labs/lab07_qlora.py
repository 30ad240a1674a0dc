"""What lab 07 does beyond recipes: article A3's methods, the arithmetic of 4-bit weights and of
LoRA's chain of products, memory as a line over the batch, and our own recipes above the article's.

    chosen = method("lora", "long", "checkpointed")     tags, texts, recipe, change of the model
    run = follow(workloads, method("qlora", "short", "batch 1"), steps=12, logs=folder)
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labutils.course.goals import Goal
from labutils.labs.ladders import A3_BASE, A3_LADDER, Rung, climb, in_lanes
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
from labutils.profiling.memory_model import BatchLine, tensors_of
from labutils.profiling.trace import profile
from labutils.recipe import Recipe
from labutils.results.records import Run, Runs, is_out_of_memory, step_by_step, to_frame
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

if TYPE_CHECKING:
    import pandas as pd

Change = Callable[[nn.Module], None]

# ---------------------------------------------------------------------------- the article's methods


class Method(NamedTuple):
    """A run's name and tags, its texts ("short" or "long"), its recipe, and what is done to the
    model once it is built."""

    name: str
    tags: dict[str, Any]
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
them."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"base_linear": "nf4", "checkpointing": "blocks"},
    "unsloth": {"base_linear": "nf4"},
}
"""Method -> the knobs that it sets. "qlora" is QLoRA as usually written: PEFT's
`prepare_model_for_kbit_training` turns checkpointing on, and casts to float32."""
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointed": ({"checkpointing": "blocks"}, {"checkpointing": "blocks"}),
    "offloaded": ({"offloaded": True}, {"checkpointing": "offload"}),
    "4 bits": ({"bits": 4}, {"base_linear": "nf4"}),
    "fp32 casts": ({"casts": "fp32"}, {}),
    "no casts": ({"casts": "no"}, {}),
    "batch 1": ({"batch": 1}, {"micro_batch": 1}),
    "batch 2": ({"batch": 2}, {"micro_batch": 2}),
    "padded": ({"rows": "padded"}, {"shapes": "padded"}),
    "fused loss": ({"fused_loss": True}, {"layers": "rewritten", "loss": "fused"}),
    "packed": (
        {"rows": "packed"},
        {"shapes": "packed", "token_budget": 4096, "micro_batch": 1} | OUR_LOOP,
    ),
}
"""What a method may be changed by -> the tags of that, and the knobs that it sets."""


def method(kind: str, texts: str, *switches: str) -> Method:
    """One of `METHODS` on "short" or "long" texts, changed by some of `SWITCHES`.

    "no casts" leaves QLoRA's casts out; "fp32 casts" does to a LoRA model what they do to QLoRA's.
    """
    recipe, tags = A3_BASE.but(**METHODS[kind]), {"method": kind, "texts": texts}
    for switch in switches:
        more, knobs = SWITCHES[switch]
        tags |= more
        recipe = recipe.but(**knobs)
    change = prepared_for_kbit if kind == "qlora" and "no casts" not in switches else None
    if "fp32 casts" in switches:
        change = cast_as_for_kbit
    return Method(", ".join([f"{kind} {texts}", *switches]), tags, texts, recipe, change)


def follow(
    workloads: Mapping[str, Workload],
    chosen: Method,
    steps: int,
    logs: Path,
    every: int = 10,
    against: Run | None = None,
) -> Run:
    """The run of a method: at least `steps` timed steps, its memory in `logs`/name.csv.

    `memory_share` is its peak over that of the run `against`, where both have one.
    """
    make_room(*workloads.values())
    log, workload = logs / f"{chosen.name}.csv", workloads[chosen.texts]
    run = followed(workload, chosen.recipe, steps, chosen.name, log, every, chosen.change)
    run.tags = {"experiment": "methods"} | chosen.tags
    peak, other_peak = (r.metric("peak_allocated_gb") if r else None for r in (run, against))
    if peak and other_peak:
        run.metrics["memory_share"] = peak / other_peak
    return run


UNSLOTHS = (
    method("unsloth", "long"),
    method("unsloth", "short"),
    method("unsloth", "long", "packed"),
    method("unsloth", "long", "padded", "batch 2"),
    method("unsloth", "long", "padded"),
)
"""unsloth's runs: on both kinds of texts; on the packed rows of our own best recipes, in their loop
and without a mask, as its trainer's padding-free batches are; and for a few steps on each of two
batch sizes of texts padded to the full length. (A batch of 1 would be compiled anew.)"""


def unsloth_jobs(workloads: Mapping[str, Workload], steps: int) -> dict[str, Job]:
    """Name -> job of each of `UNSLOTHS`."""
    return {
        one.name: Job(
            workloads[one.texts], one.recipe, 3 if one.tags.get("rows") == "padded" else steps
        )
        for one in UNSLOTHS
    }


def with_tags(runs: Mapping[str, Run]) -> dict[str, Run]:
    """unsloth's runs, by name, with the tags of their methods."""
    for one in UNSLOTHS:
        runs[one.name].tags = {"experiment": "methods"} | one.tags
    return dict(runs)


def longer_by(run: Run, base: Run) -> float | None:
    """How many percent longer a run's steps are than another's of the same batches, step by step
    (the median over those that both were timed on); None where one failed or none is shared."""
    ratios = [after / before for before, after in step_by_step(base, run)]
    return 100 * (statistics.median(ratios) - 1) if run.ok and base.ok and ratios else None


METHOD_COLUMNS = {
    "run": "method",
    "first_step_s": "first step, s",
    "step_ms": "step, ms",
    "useful_tokens_per_s": "useful tokens/s",
    "examples_per_s": "examples/s",
    "peak_allocated_gb": "peak memory, GB",
    "peak_reserved_gb": "reserved, GB",
}
"""Columns of a table of methods."""


def over_examples(logs: Path, texts: str, column: str) -> dict[str, dict[float, float]]:
    """Of `METHODS` on texts of a length: method -> examples trained on -> a column of its memory
    log, where it has one."""
    lines = {kind: read_log(logs / f"{method(kind, texts).name}.csv") for kind in METHODS}
    batch = A3_BASE.micro_batch
    return {
        kind: {batch * at["step"]: at[column] for at in log if column in at}
        for kind, log in lines.items()
    }


# -------------------------------------------------------------------- the arithmetic of weights


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
    length: the worst case. `trainer` is to be closed.

    `peak` is in GB: what PyTorch's allocator reports on a GPU (the process's), elsewhere the
    weights and the tensors alive, as `profiling.memory` counts them.
    """

    def __init__(self, workload: Workload, chosen: Method) -> None:
        def alone(model: nn.Module) -> None:
            if chosen.change is not None:
                chosen.change(model)
            workload.release_weights()  # kept for other trainers, they would count as this one's

        self.recipe = chosen.recipe.but(shapes="padded", micro_batch=1)
        self.trainer = Trainer(workload, self.recipe, on_model=alone)
        self.workload = workload
        rows = workload.dataset(None, self.recipe)
        self.rows = sorted(rows, key=lambda row: -len(row["input_ids"]))

    def peak(self, batch: int) -> float:
        """Peak memory of one optimizer step on `batch` examples. Raises what PyTorch raises where
        it doesn't fit.
        """
        chosen = [self.rows[i % len(self.rows)] for i in range(batch)]
        made = self.workload.collate(self.recipe)(chosen)
        feed = iter([{name: tensor.to(self.workload.device) for name, tensor in made.items()}])
        if self.workload.device.type != "cuda":
            model = self.trainer.model
            with TensorRecord([*model.parameters(), *model.buffers()]) as live:
                self.trainer.step(feed)
            return (sum(tensor.nbytes for tensor in tensors_of(model)) + live.peak) / 1e9
        cuda.reset_peak_memory()
        self.trainer.step(feed)
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


def memory_line(
    workloads: Mapping[str, Workload],
    chosen: Method,
    batches: Iterable[int],
    card_gb: float | None,
) -> Run:
    """A method's line over `batches` as a run: `base_gb`, `each_gb`, `largest_batch` on a card of
    `card_gb`, and whether it holds here: `fits` at nine tenths of it, `fails` at a tenth more.
    None: nothing is tried."""
    make_room(*workloads.values())
    run = empty_run(workloads[chosen.texts], chosen.recipe, f"memory of {chosen.name}")
    run.tags = {"experiment": "memory"} | chosen.tags
    filled = Filled(workloads[chosen.texts], chosen)
    with filled.trainer:
        filled.peak(1)  # the optimizer's state comes with the first step
        line = BatchLine.through({batch: filled.peak(batch) for batch in batches})
        run.metrics = {"base_gb": line.base, "each_gb": line.each}
        if card_gb is not None:
            largest = line.largest(card_gb)
            run.metrics["largest_batch"] = largest
            run.metrics["fits"] = int(filled.fits(max(1, math.floor(0.9 * largest))))
            run.metrics["fails"] = int(not filled.fits(math.ceil(1.1 * largest) + 1))
    return run


def lines_of(runs: Iterable[Run]) -> dict[str, BatchLine]:
    """Name -> line of each run of `memory_line`; and unsloth's, out of its two runs on padded
    texts, where these are."""
    lines, padded = {}, {}
    for run in runs:
        if run.tags["experiment"] == "memory" and run.ok:
            lines[run.label] = BatchLine(run.metrics["base_gb"], run.metrics["each_gb"])
        elif run.tags.get("rows") == "padded" and run.metric("peak_allocated_gb"):
            batch = run.tags.get("batch", A3_BASE.micro_batch)
            padded[batch] = run.metric("peak_allocated_gb")
    if len(padded) == 2:
        lines["unsloth long"] = BatchLine.through(padded)
    return lines


def bundle_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Time and memory of each change on long texts: runs of `follow` and of `memory_line`, those of
    the same method in one row."""
    import pandas as pd

    timed, memory = (
        {
            frozenset(run.tags.items() - {("experiment", kind)}): run
            for run in runs
            if kind == run.tags["experiment"]
        }
        for kind in ("methods", "memory")
    )
    base = timed.get(frozenset(method("lora", "long").tags.items()))
    rows = []
    for tags in dict.fromkeys([*timed, *memory]):
        run, line = timed.get(tags), memory.get(tags)
        rows.append(
            {
                "method": (run or line).label,
                "ms per 1,000 useful tokens": run and run.metric("ms_per_1k_useful_tokens"),
                "against lora, step by step, %": longer_by(run, base) if run and base else None,
                "GB at any batch": line and line.metric("base_gb"),
                "GB an example": line and line.metric("each_gb"),
            }
        )
    return pd.DataFrame(rows)


def largest_table(runs: Iterable[Run], cards_gb: Sequence[float]) -> pd.DataFrame:
    """A row a method: the largest batch of texts of full length that its line fits into a card."""
    import pandas as pd

    heads = [f"{card:g} GB" if card >= 1 else f"{1000 * card:g} MB" for card in cards_gb]
    lines = lines_of(runs)
    rows = [[name, *map(line.largest, cards_gb)] for name, line in lines.items()]
    return pd.DataFrame(rows, columns=["largest batch on a card of", *heads])


# ---------------------------------------------------------------------------- our own recipes

LEAST_MEMORY = "4 bits in FP8, checkpointed"
LADDER = A3_LADDER.plus(
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
"""Article A3's ladder with low-bit weights on top, each on the same rung below."""


def recipes_on(device: str) -> dict[str, Recipe]:
    """The recipes of `LADDER` as a `device` climbs it. On a CPU nothing is compiled, which takes a
    minute."""
    if device == "cuda":
        return climb(LADDER)
    plain = {"compile": "off", "compile_scope": "model", "dynamic": "automatic"}
    return {name: recipe.but(**plain) for name, recipe in climb(LADDER).items()}


def climbed_on(
    workload: Workload, recipes: Mapping[str, Recipe], steps: int, rounds: int, warmup: int
) -> dict[str, Run]:
    """The runs of the ladder's rungs, in their lanes: `rounds` times the same `steps` batches or
    more, with costs and an epoch's rates.

    Rungs that share the 16-bit weights are interleaved; those with weights of their own come after
    them, so that these aren't beside the first rung, which needs more memory than all others.
    """
    shared = {n: r for n, r in recipes.items() if r.base_linear == "published"}
    own = {n: r for n, r in recipes.items() if n not in shared}
    runs: dict[str, Run] = {}
    for rungs in filter(None, (shared, own)):
        make_room(workload)
        with Benchmark(workload, warmup, same_batches=True) as bench:
            runs |= bench.compare(rungs, steps, rounds, tags=LADDER.tags())
    return in_lanes(
        {name: with_epoch_rate(with_costs(run), workload) for name, run in runs.items()}, LADDER
    )


def step_by_kind(workload: Workload, recipe: Recipe, folder: Path, steps: int = 2) -> Run:
    """What kinds of work a step of `recipe` is made of, from a trace of `steps` steps in `folder`.

    Metric `kernel_categories`: kind -> {"ms", "count"} a step, the most time first; without a GPU,
    operators' own time.
    """
    make_room(workload)
    with Trainer(workload, recipe) as trainer:  # the first steps compile
        trace = profile(trainer, steps, folder, with_stack=False, wait=2, with_shapes=True)
    run = empty_run(workload, recipe, "step by kind")
    run.tags = {"experiment": "step by kind"}
    run.metrics["kernel_categories"] = trace.categories()
    return run


def kinds_table(runs: Iterable[Run]) -> pd.DataFrame:
    """Kinds of work that take a hundredth of their step's or more."""
    import pandas as pd

    rows = []
    for run in runs:
        kinds = run.metrics["kernel_categories"]
        work = sum(kind["ms"] for kind in kinds.values())
        rows += [
            {
                "kind of work": name,
                "ms a step": kind["ms"],
                "% of the work": 100 * kind["ms"] / work,
                "count a step": round(kind["count"]),
            }
            for name, kind in kinds.items()
            if kind["ms"] >= work / 100
        ]
    return pd.DataFrame(rows)


def rungs_table(runs: Iterable[Run]) -> pd.DataFrame:
    """The ladder's rungs, with the floor of each and its share of the mean step."""
    frame = to_frame(runs)
    mean = [statistics.fmean(run.samples["step_ms"]) for run in runs]
    columns = {
        "run": "rung",
        "useful_tokens_per_s": "useful tokens/s",
        "peak_allocated_gb": "peak, GB",
        "first_step_s": "first step, s",
        "floor_ms": "floor, ms",
    }
    table = frame.reindex(columns=list(columns)).rename(columns=columns)
    table["floor / step, %"] = 100 * table["floor, ms"] / mean
    return table


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


def reached(climbed: Mapping[str, Run], runs: Runs) -> dict[str, Any]:
    """What the ladder's rungs get to, as metrics named in `GOALS`; what can't be said here is
    absent.

    Of `runs`, unsloth's are looked at: the packed one for both goals, as packing alone is worth
    more than most of what a library does; the padded one for a second number, which says what its
    usual batches would have been worth.
    """
    rates = {name: _rate(run) for name, run in climbed.items() if run.ok}
    metrics: dict[str, Any] = {}
    bf16 = [rates[rung.name] for rung in A3_LADDER if rung.name in rates]
    if bf16 and "lora" in rates:
        best = max(bf16, key=lambda rate: rate["median"])
        metrics |= {"useful_tokens_per_s": best, "useful_speedup": _over(best, rates["lora"])}
    if "FP8 weights" in rates:
        metrics["fp8_useful_tokens_per_s"] = rates["FP8 weights"]
    if LEAST_MEMORY not in rates:
        return metrics
    small, peak = rates[LEAST_MEMORY], climbed[LEAST_MEMORY].metric("peak_allocated_gb")
    unsloth = runs.select(method="unsloth", texts="long")
    packed, usual = unsloth.one(rows="packed"), unsloth.one(rows=False)
    if packed and packed.ok:
        metrics["small_over_unsloth"] = _over(small, _rate(packed))
        if peak and packed.metric("peak_allocated_gb"):
            metrics["small_memory_over_unsloth"] = peak / packed.metric("peak_allocated_gb")
    if usual and usual.ok:
        metrics["small_over_unsloth_padded"] = _over(small, _rate(usual))
    return metrics


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
