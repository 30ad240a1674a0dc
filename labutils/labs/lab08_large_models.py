"""Lab 08's cards and large models on paper: data sheets, weights, memory, and what models that are
not here would take.

Everything about Qwen3-32B, gpt-oss-120b and cards that are not in this machine is arithmetic:
shapes from PyTorch's meta device, where a model of any size takes no memory; peaks from data
sheets; and, learnt on this machine from smaller models of the same family, the share of the peak
that kernels reach and the host's time a launch. It is never measured, and says so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from labutils.data.texts import LONG, LONGEST, SHORT, expected_longest
from labutils.layers.lora import attach_lora
from labutils.profiling.gpu_specs import Spec, find_spec
from labutils.profiling.memory_model import saved_for_backward
from labutils.profiling.step_model import CARDS, Bulk, Host, Law, Program, crossing, replayed_ms
from labutils.results import claims
from labutils.results.records import Run
from labutils.workloads.causal_lm import (
    GPT_OSS,
    GPT_OSS_120B,
    QWEN3,
    QWEN3_32B,
    Size,
    attended_pairs,
    build_lm,
    count_flops,
)
from labutils.workloads.decoder import projections

BLACKWELL, H100 = "RTX PRO 6000 Blackwell Max-Q", "H100 SXM5"
DTYPE = "bf16"
RANK = 8
META = torch.device("meta")


def card(name: str) -> Spec:
    """The data sheet of that name; raises `ValueError` where the course has none."""
    found = find_spec(name)
    if found is None:
        raise ValueError(
            f"The course has no data sheet of {name!r}. It has those of: {', '.join(CARDS)}."
        )
    return found


# ------------------------------------------------------------------------------------------- prices

NIGHT_H = 8.0
"""Hours of a night (article A3)."""
PUBLISHED_YEN = {"RTX PRO 6000 Blackwell Max-Q": 1_600_000, "H100 PCIe": 4_700_000}
"""What article A3 found its cards to cost; for its own H100, the SXM5 one, it found no price."""


@dataclass(frozen=True)
class Prices:
    """`card_yen`: card -> yen; `yen_per_kwh` of electricity; a card is written off in `years` of
    `hours_a_day` of work.

    Raises `ValueError` for what is not above 0.
    """

    card_yen: Mapping[str, float] = field(default_factory=lambda: dict(PUBLISHED_YEN))
    yen_per_kwh: float = 31.0
    years: float = 3.0
    hours_a_day: float = NIGHT_H

    def __post_init__(self) -> None:
        given = {
            "yen_per_kwh": self.yen_per_kwh,
            "years": self.years,
            "hours_a_day": self.hours_a_day,
        }
        for name, value in (
            given | {f"the price of {card}": yen for card, yen in self.card_yen.items()}
        ).items():
            if not value > 0:
                raise ValueError(f"{name} is {value!r}, and must be above 0.")

    def told(self) -> str:
        """What goes into a yen, in a sentence."""
        return (
            f"A card is written off in {self.years:g} years of {self.hours_a_day:g} hours a day, "
            "and a kWh costs "
            f"{self.yen_per_kwh:g} yen; the machine around the card is not counted. Prices in yen: "
            + ", ".join(f"{card} {yen:,.0f}" for card, yen in self.card_yen.items())
            + "."
        )

    def yen_an_hour(self, card: str, watts: float) -> float | None:
        """What an hour of work costs: the card's share of its price, and electricity. None without
        a price.
        """
        if card not in self.card_yen:
            return None
        return (
            self.card_yen[card] / (self.years * 365 * self.hours_a_day)
            + watts / 1e3 * self.yen_per_kwh
        )


def worth(
    step_ms: float, examples: float, watts: float | None, card: str, prices: Prices
) -> dict[str, float]:
    """`examples` a step of `step_ms`, as examples an hour, a night of eight hours, a kWh and a yen.

    What can't be said (no power, no price) is absent. Raises `ValueError` for a step that takes no
    time.
    """
    if not step_ms > 0:
        raise ValueError(f"step_ms={step_ms!r}: a step takes more than 0 ms.")
    hourly = examples / step_ms * 3.6e6
    found = {"examples_per_hour": hourly, "examples_per_night": NIGHT_H * hourly}
    if watts:
        found["examples_per_kwh"] = hourly / (watts / 1e3)
        if yen := prices.yen_an_hour(card, watts):
            found["examples_per_yen"] = hourly / yen
    return found


# -------------------------------------------------------------------------------------- data sheets

_SAYS = {
    "fp32": "A3.specs.fp32",
    "bf16": "A3.specs.bf16",
    "fp8": "A3.specs.fp8",
    "fp4": "A3.specs.fp4",
}
SPEC_HEAD = ("", "article A3", "data sheet, dense", "with sparsity", "so the article's is")


def spec_rows() -> list[tuple[Any, ...]]:
    """Rows for `SPEC_HEAD`: each printed peak of the two cards beside the data sheet's dense and
    sparse ones.
    """
    rows = []
    for place, name in enumerate((BLACKWELL, H100)):
        for dtype, claim in _SAYS.items():
            printed = dict(enumerate(claims.claim(claim).published)).get(place)
            dense, sparse = card(name).dense.get(dtype), card(name).sparse.get(dtype)
            rows.append(
                (f"{name}, {dtype.upper()}", printed, dense, sparse, _which(printed, dense, sparse))
            )
    return rows


def _which(printed: float | None, dense: float | None, sparse: float | None) -> str | None:
    """Which of a data sheet's two peaks a printed one is."""
    if printed is None:
        return None
    kinds = {"the dense peak": dense, "the sparse peak": sparse}
    return next(
        (kind for kind, peak in kinds.items() if peak and abs(printed / peak - 1) < 0.01), "neither"
    )


def spec_metrics() -> dict[str, float]:
    """What the article's table of the two cards is held against: as it prints them, peaks of matrix
    units sparse.
    """
    found = {}
    for short, name in (("blackwell", BLACKWELL), ("h100", H100)):
        spec = card(name)
        peaks = {"fp32": spec.dense["fp32"]} | {
            d: spec.sparse[d] for d in ("tf32", "bf16", "int8", "fp8", "fp4") if d in spec.sparse
        }
        rest = {"bandwidth": spec.bandwidth, "memory": spec.memory_gb, "power": spec.tdp_w}
        found |= {f"{short}_{what}": value for what, value in (peaks | rest).items()}
    return found


# ------------------------------------------------------------------------------------------ weights

MXFP4_BITS = 4 + 8 / 32
"""OCP microscaling FP4: 4 bits a number, and for each 32 of them a scale of 8."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""NF4 with double quantisation (QLoRA)."""


@functools.cache
def parameters_of(size: Size) -> dict[str, int]:
    """Part -> how many numbers: "experts" (their matrices), "layers" (the blocks' other matrices),
    "words" (embedding and head), "rest" (biases, norms, sinks, routers)."""
    found = {"experts": 0, "layers": 0, "words": 0, "rest": 0}
    for name, parameter in build_lm(size, META, torch.bfloat16).named_parameters():
        found[_part(name, parameter)] += parameter.numel()
    return found


def _part(name: str, parameter: nn.Parameter) -> str:
    if "layers." not in name:
        return "words" if parameter.dim() == 2 else "rest"
    if parameter.dim() == 3:
        return "experts"
    matrix = parameter.dim() == 2 and not name.endswith("_bias") and "router" not in name
    return "layers" if matrix else "rest"


def weight_gb(size: Size, bits: Mapping[str, float]) -> dict[str, float]:
    """Part -> 10^9 bytes, with so many `bits` a number of each part."""
    return {part: count * bits[part] / 8e9 for part, count in parameters_of(size).items()}


WAYS_TO_HOLD = {
    "4 bits for everything": dict.fromkeys(("experts", "layers", "words", "rest"), 4.0),
    "as published: experts in MXFP4": {
        "experts": MXFP4_BITS,
        "layers": 16.0,
        "words": 16.0,
        "rest": 16.0,
    },
    "NF4, all matrices of the blocks": {
        "experts": NF4_BITS,
        "layers": NF4_BITS,
        "words": 16.0,
        "rest": 16.0,
    },
    "16 bits": dict.fromkeys(("experts", "layers", "words", "rest"), 16.0),
}


# ------------------------------------------------------------------------------------------- memory

ADAPTER_BYTES = 16
"""A trained number: itself, its gradient and AdamW's two moments, in float32."""
LOGIT_BYTES = 10
"""A logit of the plain loss at the peak of its backward pass: in float32 probability and gradient,
in BF16 another.
"""
CHUNK_GB = 1.0
"""What a fused loss holds of the logits at a time, at most."""


@dataclass(frozen=True)
class Method:
    """What memory depends on: `bits` of the blocks' matrices; whether blocks keep `everything` for
    the backward pass or are computed again; where blocks' inputs wait then (`offloaded`: on the
    host); a `fused` loss; a `wide` stream between the blocks, which PEFT's preparation for 4-bit
    training casts to float32; and the `adapter` layers."""

    bits: float
    everything: bool = False
    offloaded: bool = False
    fused: bool = False
    wide: bool = False
    adapter: str = "peft"


METHODS = {
    "LoRA": Method(16.0, everything=True),
    "LoRA, checkpointed": Method(16.0),
    "QLoRA": Method(NF4_BITS, wide=True),
    "QLoRA, not checkpointed": Method(NF4_BITS, everything=True, wide=True),
    "unsloth": Method(NF4_BITS, offloaded=True, fused=True, adapter="plain"),
}
"""Article A3's methods as they are usually written, and with checkpointing switched."""


def memory_gb(size: Size, method: Method, texts: int, tokens: int = LONGEST) -> dict[str, float]:
    """Part -> 10^9 bytes of the peak when `texts` of `tokens` tokens are trained on, from shapes
    alone.

    One text as long as the article lets them be suffices for a batch to be padded to it.
    """
    wide = 32.0 if method.wide else 16.0
    blocks = dict.fromkeys(("experts", "layers"), method.bits)
    weights = sum(weight_gb(size, blocks | {"words": wide, "rest": wide}).values())
    block, trained = _block(size, method)
    stream = (4 if method.wide else 2) * size.width
    inputs = (1 if method.offloaded else size.layers) * stream
    kept = size.layers * block if method.everything else block + inputs
    rows = texts * tokens
    logits = CHUNK_GB if method.fused else rows * size.words * LOGIT_BYTES / 1e9
    adapters = size.layers * trained * ADAPTER_BYTES / 1e9
    return {
        "weights": weights,
        "adapters": adapters,
        "activations": rows * kept / 1e9,
        "logits": logits,
    }


def _block(size: Size, method: Method) -> tuple[float, int]:
    """(bytes that one block keeps for its backward pass, a token; numbers that are trained in it).

    Counted on the meta device on a block of the real shapes, attention and experts as fused kernels
    keep them.
    """
    rows, length = 2, 256
    lm, forward = one_block(size, method, META, rows, length)
    kept = saved_for_backward(lm, forward, autocast=torch.bfloat16)
    return kept / (rows * length), sum(p.numel() for p in lm.parameters() if p.requires_grad)


def one_block(
    size: Size, method: Method, device: torch.device, rows: int, length: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(a model of one block as the method trains it, the block's forward pass on [rows, length]
    tokens).
    """
    lm = build_lm(replace(size, layers=1), device, torch.bfloat16).requires_grad_(False)
    attach_lora(
        lm, projections(lm.model.layers, "model.layers"), RANK, 2 * RANK, method.adapter, seed=0
    )
    lm.config._attn_implementation = "sdpa"
    if size.experts:
        lm.config._experts_implementation = "frozen"
    dtype = torch.float32 if method.wide else torch.bfloat16
    if method.wide:
        for module in lm.modules():
            if module.__class__.__name__.endswith("RMSNorm"):
                module.float()
    x = torch.zeros(rows, length, size.width, device=device, dtype=dtype, requires_grad=True)
    turns = lm.model.rotary_emb(x, torch.arange(length, device=device)[None])
    return lm, lambda: lm.model.layers[0](x, position_embeddings=turns, attention_mask=None)


ASKED = {
    "lora_32b_batch_4_gb": (QWEN3_32B, "LoRA", 4),
    "qlora_32b_batch_4_gb": (QWEN3_32B, "QLoRA", 4),
    "unsloth_32b_batch_32_gb": (QWEN3_32B, "unsloth", 32),
    "unsloth_120b_batch_32_gb": (GPT_OSS_120B, "unsloth", 32),
}
"""Metric -> the model, the method and the batch that a claim is about."""


def memory_metrics() -> dict[str, float]:
    """The peaks that the article's claims are about; of gpt-oss-120b in 16 bits the weights alone."""
    found = {
        name: sum(memory_gb(size, METHODS[method], texts).values())
        for name, (size, method, texts) in ASKED.items()
    }
    return found | {
        "lora_120b_batch_1_gb": sum(weight_gb(GPT_OSS_120B, WAYS_TO_HOLD["16 bits"]).values())
    }


# ------------------------------------------------------------------------------------- large models

CHECKPOINTED = 1.5
"""A step that computes its blocks again takes three passes instead of two."""
ARTICLE_TEXTS = {"short": SHORT, "long": LONG}
LARGE = {"dense": QWEN3_32B, "moe": GPT_OSS_120B}
SMALLER = {"dense": QWEN3, "moe": GPT_OSS}
BATCHES = {(H100, "moe", "long"): 16}
"""The article's batch: 32, but for what did not fit the H100's memory."""


def batch(name: str, family: str, kind: str) -> int:
    """How many texts the article trained on at a time."""
    return BATCHES.get((name, family, kind), 32)


@dataclass(frozen=True)
class Basis:
    """What a machine knows of a family of models.

    law: operations a step. launches: how many launches come on one such operation. host_ms: the
    host's time a launch. reached: the share of the data sheet's roofline that the step's products
    reach while kernels run; 1 takes the floor. program and host: of a traced step, to replay, where
    there is a GPU; without one the short form has to do.
    """

    law: Law
    host_ms: float
    reached: float = 1.0
    launches: float = 1.0
    program: Program | None = None
    host: Host | None = None

    def beside(self, factor: float) -> Basis:
        """The same with a host that takes `factor` times as long."""
        slower = self.host.times(factor) if self.host else None
        return replace(self, host_ms=factor * self.host_ms, host=slower)


def bulk(family: str, kind: str, texts: int, basis: Basis) -> Bulk:
    """A step of the article's large model of a family, on so many texts, checkpointed.

    Its library pads the texts of a batch to the longest one, and computes on the padding as on
    anything else.
    """
    size, length = LARGE[family], expected_longest(ARTICLE_TEXTS[kind], texts)
    tokens = texts * length
    pairs = attended_pairs(size, [length] * texts)
    flops = CHECKPOINTED * count_flops(size, RANK, tokens, pairs, tokens)
    parts = parameters_of(size)
    read = (
        CHECKPOINTED * 2 * 2 * (sum(parts.values()) - size.words * size.width)
    )  # the embedding is looked up
    launches = CHECKPOINTED * basis.launches * basis.law.launches(size.layers, size.experts)
    return Bulk(flops, flops / read, launches, texts)


def large_step(name: str, family: str, kind: str, basis: Basis, texts: int = 0) -> dict[str, float]:
    """`step_ms`, `kernels_ms`, `idle_us` (a launch), `examples` and `launches` of a large model's
    step on a card, on as many texts as the article's, or `texts`."""
    step = bulk(family, kind, texts or batch(name, family, kind), basis)
    kernel_ms = step.kernel_ms(card(name), DTYPE, basis.reached)
    if basis.program is None or basis.host is None:
        step_ms = step.bound_ms(kernel_ms, basis.host_ms)
    else:
        step_ms = step.like_ms(basis.program, kernel_ms, basis.host)
    found = {
        "step_ms": step_ms,
        "kernels_ms": kernel_ms,
        "launches": step.launches,
        "examples": step.examples,
    }
    return found | {"idle_us": 1e3 * max(0.0, step_ms - kernel_ms) / step.launches}


def hourly(name: str, family: str, kind: str, basis: Basis) -> float:
    """Examples an hour of a large model's step on a card."""
    step = large_step(name, family, kind, basis)
    return 3.6e6 * step["examples"] / step["step_ms"]


TWO_CARDS_HEAD = (
    "model, texts",
    "card",
    "batch",
    "tokens, padded",
    "kernels, s",
    "host, s",
    "step, s",
    "examples/h",
    "article A3",
)
_PUBLISHED = {
    ("dense", "short"): "A3.32b.h100-short",
    ("dense", "long"): "A3.32b.h100-long",
    ("moe", "short"): "A3.120b.h100-short",
    ("moe", "long"): "A3.120b.h100-long",
}


def _known(bases: Mapping[str, Basis]) -> dict[tuple[str, str], str]:
    return {
        (family, kind): claim for (family, kind), claim in _PUBLISHED.items() if family in bases
    }


def two_cards_rows(bases: Mapping[str, Basis]) -> list[tuple[Any, ...]]:
    """Rows for `TWO_CARDS_HEAD`: the article's eight counts of examples an hour, foretold where
    there is a basis.
    """
    rows = []
    for (family, kind), claim in _known(bases).items():
        for name, published in zip((BLACKWELL, H100), claims.claim(claim).published, strict=True):
            step = large_step(name, family, kind, bases[family])
            host_s = step["launches"] * bases[family].host_ms / 1e3
            what = f"{LARGE[family].hub.rpartition('/')[2]}, {kind}"
            rows.append(
                (what, name, step["examples"], expected_longest(ARTICLE_TEXTS[kind], step["examples"]),
                 step["kernels_ms"] / 1e3, host_s, step["step_ms"] / 1e3,
                 3.6e6 * step["examples"] / step["step_ms"], published)
            )  # fmt: skip
    return rows


def two_cards(bases: Mapping[str, Basis]) -> dict[str, float]:
    """The predictions that article A3's claims about its two cards are judged by; ratios of
    examples an hour.

    What a family without a basis would tell is absent, and, without a GPU, how the two models
    compare: nothing says then how near to the roofline the kernels of either get.
    """
    rate = {
        (n, f, k): hourly(n, f, k, bases[f]) for n in (BLACKWELL, H100) for f, k in _known(bases)
    }
    found = {f"h100_{f}_{k}": rate[H100, f, k] / rate[BLACKWELL, f, k] for f, k in _known(bases)}
    if "dense" in bases:
        found["dense_long_ratio"] = found["h100_dense_long"]
    if len(bases) == len(LARGE) and all(basis.program for basis in bases.values()):
        found["moe_over_dense_long"] = (
            rate[BLACKWELL, "moe", "long"] / rate[BLACKWELL, "dense", "long"]
        )
    return found | (_of_the_sparse(bases["moe"], found["h100_moe_long"]) if "moe" in bases else {})


def _of_the_sparse(moe: Basis, h100_ratio: float) -> dict[str, float]:
    """The same of gpt-oss-120b alone, on long texts; h100_ratio: the H100's examples an hour over
    the other card's.
    """
    ours, theirs = (large_step(name, "moe", "long", moe) for name in (BLACKWELL, H100))
    watts = {name: card(name).tdp_w for name in (BLACKWELL, H100)}
    each = {
        name: s["kernels_ms"] / s["examples"] for name, s in ((BLACKWELL, ours), (H100, theirs))
    }
    return {
        "moe_long_blackwell_ratio": 1 / h100_ratio,
        "h100_gaps_longer": int(
            each[H100] < each[BLACKWELL] and theirs["idle_us"] > ours["idle_us"]
        ),
        "blackwell_less_energy": int(h100_ratio < 1 and watts[BLACKWELL] < watts[H100]),
    }


def host_for_a_tie(
    bases: Mapping[str, Basis], kind: str = "long", same_batch: bool = False
) -> float | None:
    """How many times as long the hosts of both cards must take, as this machine's does, for the
    Blackwell card to draw level with the H100 on gpt-oss-120b; None where no factor up to 1000
    makes it.

    same_batch: both cards at the batch of 32.
    """
    texts = 32 if same_batch else 0

    def on(name: str) -> Callable[[float], float]:
        def ms_an_example(power: float) -> float:
            step = large_step(name, "moe", kind, bases["moe"].beside(10**power), texts)
            return step["step_ms"] / step["examples"]

        return ms_an_example

    found = crossing(on(BLACKWELL), on(H100), -3.0, 3.0)
    return None if found is None else 10**found


def who_wins(bases: Mapping[str, Basis]) -> list[str]:
    """gpt-oss-120b on long texts, beside this machine's host, in sentences: what decides on each
    card, whether the article's winner wins, and beside which hosts it would."""
    moe = bases["moe"]
    here_us = 1e3 * moe.host_ms
    found = [
        f"A launch of the expert loop takes this host {here_us:.1f} µs. With such a host, on long "
        "texts:"
    ]
    for name in (BLACKWELL, H100):
        step = large_step(name, "moe", "long", moe)
        clock = (
            "the host decides" if step["step_ms"] > 1.1 * step["kernels_ms"] else "kernels decide"
        )
        found.append(
            f"On the {name}, at batch {step['examples']}, **{clock}**: kernels take "
            f"{step['kernels_ms'] / 1e3:.2f} s "
            f"of the step's {step['step_ms'] / 1e3:.2f} s."
        )
    ahead = hourly(BLACKWELL, "moe", "long", moe) / hourly(H100, "moe", "long", moe)
    slower, quicker = claims.claim("A3.120b.h100-long").published[::-1]
    found.append(
        f"So the Blackwell card makes {ahead:.2f} times as many examples an hour as the H100; the "
        "article's made "
        f"{quicker / slower:.2f} times as many. With this machine's host the model **"
        + ("names the same winner**." if ahead > 1 else "does not reproduce the article**.")
    )
    for batches, same in {"the article's batches": False, "both cards at batch 32": True}.items():
        factor = host_for_a_tie(bases, same_batch=same)
        found.append(
            f"With {batches} the Blackwell card doesn't win, however slow the host is."
            if factor is None
            else f"With {batches} it wins if the host takes more than {factor * here_us:.1f} µs for a launch, "
            f"{factor:.2g} times as long as this one."
        )
    return found


# --------------------------------------------------------------------------------------- four cards

FOUR_HEAD = (
    "step",
    "card",
    "step, ms",
    "GPU idle, %",
    "examples/h",
    "a night of 8 h",
    "a kWh",
    "a yen",
)


def on_cards(seen: Any, here: Spec, empty_ms: float) -> dict[str, float]:
    """Card -> milliseconds of a step that was traced on the card `here`, beside its host. `seen`: a
    `launches.Seen`.
    """
    return {name: replayed_ms(seen.on(card(name), here, empty_ms), seen.host) for name in CARDS}


def beside_slower_hosts(
    seen: Any, here: Spec, empty_ms: float, most_us: float
) -> dict[str, dict[float, float]]:
    """Card -> microseconds more for each launch -> milliseconds of a step that was traced on the
    card `here`.
    """
    programs = {name: seen.on(card(name), here, empty_ms) for name in CARDS}
    added = [most_us * place / 8 for place in range(9)]
    return {
        name: {us: replayed_ms(program, seen.host.plus(us / 1e3)) for us in added}
        for name, program in programs.items()
    }


def four_cards_rows(
    seen: Any, here: Spec, empty_ms: float, prices: Prices
) -> list[tuple[Any, ...]]:
    """Rows for `FOUR_HEAD`: a traced step on each of `CARDS`, at the largest power of each; and as
    it was measured, at this card's largest power and at what it drew."""
    rows = []
    for name in CARDS:
        program = seen.on(card(name), here, empty_ms)
        step_ms = replayed_ms(program, seen.host)
        idle = round(max(0.0, 100 * (1 - (program.kernel_ms + program.copy_ms) / step_ms)), 1)
        found = _worth(step_ms, seen.work.examples, card(name).tdp_w, name, prices)
        rows.append((seen.run.run, _bought(name, prices), step_ms, idle, *found))
    run, step_ms = seen.run, seen.run.metric("step_ms")
    idle = round(100 * run.metrics["idle_share"], 1)
    for label, watts in (
        ("at its largest power", here.tdp_w),
        ("at the power drawn", run.metric("power_w")),
    ):
        measured = _worth(step_ms, seen.work.examples, watts, here.name, prices)
        rows.append((run.run, f"{here.name}, measured, {label}", step_ms, idle, *measured))
    return rows


def _worth(
    step_ms: float, examples: float, watts: float | None, name: str, prices: Prices
) -> tuple[Any, ...]:
    found = worth(step_ms, examples, watts, name, prices)
    return tuple(found.get(f"examples_per_{unit}") for unit in ("hour", "night", "kwh", "yen"))


def recorded_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Step, and its milliseconds on each of `CARDS`, out of the run "four cards" of a results file."""
    return [
        (step, *(by_card.get(name) for name in CARDS)) for step, by_card in _recorded(runs).items()
    ]


def recorded_worth(
    runs: Mapping[str, Run], steps: Sequence[str], examples: int, prices: Prices
) -> list[tuple[Any, ...]]:
    """Rows for `FOUR_HEAD` of those `steps`, out of the run "four cards", which doesn't say how
    idle the GPU is.
    """
    on_record = _recorded(runs)
    rows = []
    for step, name in itertools.product(steps, CARDS):
        if step_ms := on_record.get(step, {}).get(name):
            found = _worth(step_ms, examples, card(name).tdp_w, name, prices)
            rows.append((step, _bought(name, prices), step_ms, None, *found))
    return rows


def _recorded(runs: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """Step -> card -> milliseconds: the metrics "moe long: B200, ms" of the run "four cards"."""
    found: dict[str, dict[str, float]] = {}
    for name, ms in runs["four cards"].metrics.items() if "four cards" in runs else ():
        step, _, on = name.removesuffix(", ms").rpartition(": ")
        found.setdefault(step, {})[on] = ms
    return found


def _bought(name: str, prices: Prices) -> str:
    """A card's name, and whose price it has been given where that is another's."""
    pcie = name == H100 and prices.card_yen.get(H100) == PUBLISHED_YEN["H100 PCIe"]
    return f"{name} (PCIe's price)" if pcie else name


def attention_only() -> dict[str, Any]:
    """What PEFT finds in a small gpt-oss when it is asked for all seven projections:
    `attention_only` is 1 if nothing but attention's, and `adapted` their names."""
    from peft import LoraConfig, get_peft_model

    asked = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lm = build_lm(GPT_OSS["tiny"], torch.device("cpu"), torch.float32)
    model = get_peft_model(lm, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=asked))
    parts = {
        name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name
    }
    adapted = sorted({part.rpartition(".")[2] for part in parts})
    return {
        "attention_only": int(bool(parts) and all("self_attn" in part for part in parts)),
        "adapted": adapted,
    }
