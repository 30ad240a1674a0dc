"""Lab 08's large models on paper: weights, memory, and the article's two cards.

Everything about Qwen3-32B, gpt-oss-120b and cards that are not in this machine is arithmetic:
shapes from PyTorch's meta device, where a model of any size takes no memory; peaks from data
sheets; and, measured on smaller models of the same family, the share of the peak that kernels reach
and the host's time a launch. It is never measured, and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from labutils.data.texts import LONG, LONGEST, SHORT, expected_longest
from labutils.labs.lab08_launch_bound import PredictedStep
from labutils.layers.grouped_moe import register_experts
from labutils.layers.lora import attach_lora
from labutils.layers.quantization.nf4_math import doubled_constant_bits
from labutils.profiling.gpu_specs import find_spec as card
from labutils.profiling.memory_model import planned, saved_for_backward
from labutils.profiling.step_model import Bulk, Host, Law, Program, crossing
from labutils.results import claims
from labutils.workloads.base import Workload
from labutils.workloads.causal_lm import GPT_OSS_120B, QWEN3_32B, Size, build_lm
from labutils.workloads.decoder_flops import attended_pairs, count_flops
from labutils.workloads.decoder_workload import projections

BLACKWELL, H100 = "RTX PRO 6000 Blackwell Max-Q", "H100 SXM5"
RANK = 8
META = torch.device("meta")

# ------------------------------------------------------------------------------------------ weights

PARTS = ("experts", "layers", "words", "rest")
"""A model's numbers: its experts' matrices, the blocks' other matrices, embedding and head, and
biases, norms, sinks, routers."""
NF4_BITS = 4 + doubled_constant_bits()


@functools.cache
def parameters_of(size: Size) -> dict[str, int]:
    """Part -> how many numbers."""
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in build_lm(size, META, torch.bfloat16).named_parameters():
        counts[_part(name, parameter)] += parameter.numel()
    return counts


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


# ------------------------------------------------------------------------------------------- memory

LOGIT_BYTES = 10
"""A logit of the plain loss at the peak of its backward pass: in float32 probability and gradient,
in BF16 another."""
CHUNK_GB = 1.0
"""What a fused loss holds of the logits at a time, at most."""


class Method(NamedTuple):
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


def memory_gb(size: Size, method: Method, texts: int) -> dict[str, float]:
    """Part -> 10^9 bytes of the peak when `texts` of `LONGEST` tokens are trained on, from shapes:
    a batch is padded to its longest text, which may be as long as the article lets it."""
    wide = 32.0 if method.wide else 16.0
    bits = {"experts": method.bits, "layers": method.bits, "words": wide, "rest": wide}
    rows, length, tokens = 2, 256, texts * LONGEST
    lm, forward = one_block(size, method, META, rows, length)
    block = saved_for_backward(lm, forward, autocast=torch.bfloat16) / (rows * length)
    trained = planned(lm)
    inputs = (1 if method.offloaded else size.layers) * (4 if method.wide else 2) * size.width
    kept = size.layers * block if method.everything else block + inputs
    return {
        "weights": sum(weight_gb(size, bits).values()),
        "adapters": size.layers * (2 * trained.gradients + trained.optimizer) / 1e9,
        "activations": tokens * kept / 1e9,
        "logits": CHUNK_GB if method.fused else tokens * size.words * LOGIT_BYTES / 1e9,
    }


def one_block(
    size: Size, method: Method, device: torch.device, rows: int, length: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(a model of one block as the method trains it, its forward pass on [rows, length] tokens)."""
    lm = build_lm(replace(size, layers=1), device, torch.bfloat16).requires_grad_(False)
    attach_lora(lm, projections(lm), RANK, 2 * RANK, method.adapter, seed=0)
    lm.config._attn_implementation = "sdpa"
    if size.experts:
        register_experts()
        lm.config._experts_implementation = "frozen"
    dtype = torch.float32 if method.wide else torch.bfloat16
    if method.wide:
        for module in lm.modules():
            if module.__class__.__name__.endswith("RMSNorm"):
                module.float()
    x = torch.zeros(rows, length, size.width, device=device, dtype=dtype, requires_grad=True)
    turns = lm.model.rotary_emb(x, torch.arange(length, device=device)[None])
    return lm, lambda: lm.model.layers[0](x, position_embeddings=turns, attention_mask=None)


# ------------------------------------------------------------------------------------- large models

CHECKPOINTED = 1.5
"""A step that computes its blocks again takes three passes instead of two."""
TEXTS = {"short": SHORT, "long": LONG}
LARGE = {"dense": QWEN3_32B, "moe": GPT_OSS_120B}
CLAIMS = {"dense": "A3.32b.h100", "moe": "A3.120b.h100"}
"""Model -> how the ids of the claims begin that have the article's examples an hour; they end with
one of `TEXTS`."""


@dataclass(frozen=True)
class Basis:
    """What a machine knows of a family of models.

    law: operations a step. host: its time a launch. reached: the share of the data sheet's roofline
    that the step's products reach while kernels run; 1 gives a lower bound. launches: how many
    launches come on one such operation. program: of a traced step, to replay, where there is a GPU;
    without one the short form has to do.
    """

    law: Law
    host: Host
    reached: float = 1.0
    launches: float = 1.0
    program: Program | None = None

    @classmethod
    def of(cls, step: PredictedStep, law: Law, workload: Workload) -> Basis:
        """From a step of the family's smaller model, on `workload`.

        Without a GPU, operations stand for launches, and for the host's time an operation of the
        light step, work and all.
        """
        operations = law.launches(workload.size.layers, workload.size.experts)
        if "reached" not in step.run.metrics:
            return cls(law, Host(step.run.metrics["light_step_ms"] / operations))
        launches = step.program.launches / operations
        return cls(law, step.host, step.run.metrics["reached"], launches, step.program)

    @property
    def host_ms(self) -> float:
        """The host's time a launch, on average."""
        return self.host.mean_ms(self.program) if self.program else self.host.other


def bulk(family: str, kind: str, texts: int, basis: Basis, padded: bool = True) -> Bulk:
    """A checkpointed step of the article's large model of a family, on so many texts.

    The texts of a batch are padded to the longest one, and padding is computed on like the rest;
    unless `padded`, all have their mean length.
    """
    size = LARGE[family]
    length = expected_longest(TEXTS[kind], texts) if padded else TEXTS[kind].mean
    tokens = texts * length
    pairs = attended_pairs(size, [length] * texts)
    flops = CHECKPOINTED * count_flops(size, RANK, tokens, pairs, tokens)
    looked_up = size.words * size.width  # of the embedding
    read = CHECKPOINTED * 2 * 2 * (sum(parameters_of(size).values()) - looked_up)
    launches = CHECKPOINTED * basis.launches * basis.law.launches(size.layers, size.experts)
    return Bulk(flops, flops / read, launches, texts)


def large_step(
    name: str, family: str, kind: str, basis: Basis, texts: int = 0, padded: bool = True
) -> dict[str, float]:
    """A large model's step on a card, on `texts` or the article's batch: 32, and 16 where 32 did
    not fit the H100's memory.

    `step_ms`, `kernels_ms`, `host_ms` (of all launches), `idle_us` (a launch), `examples`, `hourly`
    (examples an hour).
    """
    texts = texts or (16 if (name, family, kind) == (H100, "moe", "long") else 32)
    step = bulk(family, kind, texts, basis, padded)
    kernel_ms = step.kernel_ms(card(name), "bf16", basis.reached)
    if basis.program is None:
        step_ms = step.bound_ms(kernel_ms, basis.host_ms)
    else:
        step_ms = step.like_ms(basis.program, kernel_ms, basis.host)
    return {
        "step_ms": step_ms,
        "kernels_ms": kernel_ms,
        "host_ms": step.launches * basis.host_ms,
        "idle_us": 1e3 * max(0.0, step_ms - kernel_ms) / step.launches,
        "examples": step.examples,
        "hourly": 3.6e6 * step.examples / step_ms,
    }


def large_steps(bases: Mapping[str, Basis], padded: bool = True) -> pd.DataFrame:
    """The article's eight counts of examples an hour, predicted where there is a basis."""
    rows = []
    for family, basis in bases.items():
        for kind in TEXTS:
            counts = claims.claim(f"{CLAIMS[family]}-{kind}").published
            for name, published in zip((BLACKWELL, H100), counts, strict=True):
                row = {"model": family, "texts": kind, "card": name, "article A3": published}
                rows.append(row | large_step(name, family, kind, basis, padded=padded))
    return pd.DataFrame(rows)


def two_cards(bases: Mapping[str, Basis], padded: bool = True) -> dict[str, float]:
    """What article A3's claims about its two cards are judged by: ratios of examples an hour, for
    padded texts or those of their mean length.

    What a family without a basis would tell is absent. So is, without a GPU, how the two models
    compare: nothing says then how near to the roofline the kernels of either get.
    """
    frame = large_steps(bases, padded).set_index(["model", "texts", "card"])
    rate = frame["hourly"]
    ratio = rate.xs(H100, level="card") / rate.xs(BLACKWELL, level="card")
    metrics = {f"h100_{family}_{kind}": float(value) for (family, kind), value in ratio.items()}
    if "dense" in bases:
        metrics["dense_long_ratio"] = metrics["h100_dense_long"]
    if len(bases) == len(LARGE) and all(basis.program for basis in bases.values()):
        moe, dense = (rate[family, "long", BLACKWELL] for family in ("moe", "dense"))
        metrics["moe_over_dense_long"] = float(moe / dense)
    if "moe" in bases:
        ours, theirs = (frame.loc[("moe", "long", name)] for name in (BLACKWELL, H100))
        slower = ours.kernels_ms / ours.examples > theirs.kernels_ms / theirs.examples
        less_power = card(BLACKWELL).tdp_w < card(H100).tdp_w
        metrics |= {
            "moe_long_blackwell_ratio": 1 / metrics["h100_moe_long"],
            "h100_gaps_longer": int(slower and theirs.idle_us > ours.idle_us),
            "blackwell_less_energy": int(metrics["h100_moe_long"] < 1 and less_power),
        }
    return metrics


def host_for_a_tie(moe: Basis, texts: int = 0) -> float | None:
    """How many times as long the hosts of both cards must take for a tie on gpt-oss-120b's long
    texts; None where no factor up to 1000 makes it. texts: a batch for both cards, not the
    article's."""

    def ms_an_example(name: str, power: float) -> float:
        slower = replace(moe, host=moe.host.times(10**power))
        step = large_step(name, "moe", "long", slower, texts)
        return step["step_ms"] / step["examples"]

    each = (functools.partial(ms_an_example, name) for name in (BLACKWELL, H100))
    power = crossing(*each, -3.0, 3.0)
    return None if power is None else 10**power
