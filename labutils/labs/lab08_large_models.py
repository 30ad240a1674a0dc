"""Lab 08's large models on paper: their memory, and what article A3's two cards are judged by.

Shapes come from PyTorch's meta device, where a model of any size takes no memory. What its blocks
keep for the backward pass is counted there, block by block. Nothing here is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor, nn

from labutils.data.texts import LONGEST
from labutils.layers.grouped_moe import register_experts
from labutils.layers.lora import attach_lora
from labutils.profiling.memory_model import planned, saved_for_backward
from labutils.workloads.causal_lm import Size, build_lm
from labutils.workloads.decoder_workload import projections

BLACKWELL, H100 = "RTX PRO 6000 Blackwell Max-Q", "H100 SXM5"
RANK = 8
META = torch.device("meta")

LOGIT_BYTES = 10
"""A logit of the plain loss at the peak of its backward pass: in float32 probability and gradient,
in BF16 another."""
CHUNK_GB = 1.0
"""What a fused loss holds of the logits at a time, at most."""


@functools.cache
def parameters_of(size: Size) -> tuple[int, int]:
    """How many numbers are in the blocks' matrices, experts included, and how many elsewhere."""
    counts = {True: 0, False: 0}
    for name, parameter in build_lm(size, META, torch.bfloat16).named_parameters():
        matrix = "layers." in name and parameter.dim() > 1 and "router" not in name
        counts[matrix and not name.endswith("_bias")] += parameter.numel()
    return counts[True], counts[False]


def weight_gb(size: Size, bits: float, other_bits: float) -> float:
    """10^9 bytes of the weights, with so many bits a number of the blocks' matrices and of all
    others."""
    matrices, others = parameters_of(size)
    return (matrices * bits + others * other_bits) / 8e9


def memory_gb(
    size: Size,
    texts: int,
    bits: float = 16.0,
    everything: bool = False,
    offloaded: bool = False,
    fused: bool = False,
    wide: bool = False,
) -> dict[str, float]:
    """Part -> 10^9 bytes of the peak when `texts` of `LONGEST` tokens are trained on, from shapes:
    a batch is padded to its longest text, which may be as long as the article lets it.

    bits: of the blocks' matrices. everything: blocks keep all for the backward pass, else they are
    computed again. offloaded: blocks' inputs wait on the host meanwhile. fused: a loss chunk by
    chunk. wide: the stream between blocks is float32, as PEFT's preparation for 4-bit training
    makes it.
    """
    rows, length, tokens = 2, 256, texts * LONGEST
    lm, forward = one_block(size, wide, META, rows, length, "plain" if fused else "peft")
    block = saved_for_backward(lm, forward, autocast=torch.bfloat16) / (rows * length)
    trained = planned(lm)
    inputs = (1 if offloaded else size.layers) * (4 if wide else 2) * size.width
    kept = size.layers * block if everything else block + inputs
    return {
        "weights": weight_gb(size, bits, 32.0 if wide else 16.0),
        "adapters": size.layers * (2 * trained.gradients + trained.optimizer) / 1e9,
        "activations": tokens * kept / 1e9,
        "logits": CHUNK_GB if fused else tokens * size.words * LOGIT_BYTES / 1e9,
    }


def one_block(
    size: Size, wide: bool, device: torch.device, rows: int, length: int, adapter: str
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(a model of one block as a method trains it, its forward pass on [rows, length] tokens)."""
    lm = build_lm(replace(size, layers=1), device, torch.bfloat16).requires_grad_(False)
    attach_lora(lm, projections(lm), RANK, 2 * RANK, adapter, seed=0)
    lm.config._attn_implementation = "sdpa"
    if size.experts:
        register_experts()
        lm.config._experts_implementation = "frozen"
    dtype = torch.float32 if wide else torch.bfloat16
    if wide:
        for module in lm.modules():
            if module.__class__.__name__.endswith("RMSNorm"):
                module.float()
    x = torch.zeros(rows, length, size.width, device=device, dtype=dtype, requires_grad=True)
    turns = lm.model.rotary_emb(x, torch.arange(length, device=device)[None])
    return lm, lambda: lm.model.layers[0](x, position_embeddings=turns, attention_mask=None)


def two_cards(steps: pd.DataFrame, end: str = "") -> dict[str, float]:
    """What article A3's claims about its two cards are judged by, under one reading of its
    batches, whose name is the `end` of every metric's.

    steps: a row for each "model" ("dense", "moe"), "texts" ("short", "long") and "card", with
    "examples" and "kernels, s" of a step, "step, s", "examples/h", and the article's "A3".
    `.._off` is by which factor the worse of the two cards' counts differs from the article's.
    """
    by = steps.set_index(["model", "texts", "card"])
    rate, factor = by["examples/h"], by["examples/h"] / by["A3"]
    off = factor.where(factor > 1, 1 / factor).groupby(["model", "texts"]).max()
    metrics = {f"{model}_{kind}_off": float(value) for (model, kind), value in off.items()}
    ours, theirs = (by.loc[("moe", "long", name)] for name in (BLACKWELL, H100))
    idle = by["step, s"] - by["kernels, s"]
    metrics |= {
        "dense_long_ratio": rate["dense", "long", H100] / rate["dense", "long", BLACKWELL],
        "moe_long_blackwell_ratio": ours["examples/h"] / theirs["examples/h"],
        "moe_long_blackwell_hourly": ours["examples/h"],
        "moe_over_dense_long": ours["examples/h"] / rate["dense", "long", BLACKWELL],
        "h100_gaps_longer": float(idle["moe", "long", H100] > idle["moe", "long", BLACKWELL]),
        "blackwell_less_energy": float(ours["examples/h"] > theirs["examples/h"]),
    }
    return {f"{name}{end}": float(value) for name, value in metrics.items()}
