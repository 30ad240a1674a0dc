"""The memory that fine-tuning a decoder of any size takes, on paper.

Shapes come from PyTorch's meta device, where a model of any size takes no memory. What its blocks
keep for the backward pass is counted there, block by block. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from labutils.data.texts import LONGEST
from labutils.layers.grouped_moe import register_experts
from labutils.layers.lora import attach_lora
from labutils.profiling.memory_model import planned, saved_for_backward
from labutils.workloads.causal_lm import Size, build_lm
from labutils.workloads.decoder_workload import projections

META = torch.device("meta")

LOGIT_BYTES = 10
"""A logit of the plain loss at the peak of its backward pass: in float32 probability and gradient,
in BF16 another."""
CHUNK_GB = 1.0
"""What a fused loss holds of the logits at a time, at most."""


def weight_gb(size: Size, bits: float, other_bits: float) -> float:
    """10^9 bytes of the weights, with so many bits a number of the blocks' matrices, experts
    included, and of all others."""
    all_bits = 0.0
    for name, parameter in build_lm(size, META, torch.bfloat16).named_parameters():
        matrix = "layers." in name and parameter.dim() > 1
        matrix = matrix and "router" not in name and not name.endswith("_bias")
        all_bits += parameter.numel() * (bits if matrix else other_bits)
    return all_bits / 8e9


def memory_gb(
    size: Size,
    texts: int,
    bits: float = 16.0,
    wide: bool = False,
    everything: bool = False,
    unsloth: bool = False,
) -> dict[str, float]:
    """Part -> 10^9 bytes of the peak when `texts` of `LONGEST` tokens are trained on, from shapes:
    a batch is padded to its longest text, which may be as long as the article lets it.

    bits: of the blocks' matrices. wide: the stream between blocks is float32, as PEFT's preparation
    for 4-bit training makes it. everything: blocks keep all for the backward pass, else they are
    computed again. unsloth: blocks' inputs wait on the host, and the loss goes chunk by chunk.
    """
    rows, length, tokens = 2, 256, texts * LONGEST
    lm, forward = one_block(size, wide, META, rows, length, "plain" if unsloth else "peft")
    block = saved_for_backward(lm, forward, autocast=torch.bfloat16) / (rows * length)
    trained = planned(lm)
    inputs = (1 if unsloth else size.layers) * (4 if wide else 2) * size.width
    kept = size.layers * block if everything else block + inputs
    return {
        "weights": weight_gb(size, bits, 32.0 if wide else 16.0),
        "adapters": size.layers * (2 * trained.gradients + trained.optimizer) / 1e9,
        "activations": tokens * kept / 1e9,
        "logits": CHUNK_GB if unsloth else tokens * size.words * LOGIT_BYTES / 1e9,
    }


def one_block(
    size: Size, wide: bool, device: torch.device, rows: int, length: int, adapter: str
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """(a model of one block as a method trains it, its forward pass on [rows, length] tokens)."""
    lm = build_lm(replace(size, layers=1), device, torch.bfloat16).requires_grad_(False)
    attach_lora(lm, projections(lm), 8, 16, adapter, seed=0)
    lm.config._attn_implementation = "sdpa"
    if size.experts:
        register_experts()
        lm.config._experts_implementation = "frozen"
    if wide:
        for module in lm.modules():
            if module.__class__.__name__.endswith("RMSNorm"):
                module.float()
    dtype = torch.float32 if wide else torch.bfloat16
    x = torch.zeros(rows, length, size.width, device=device, dtype=dtype, requires_grad=True)
    turns = lm.model.rotary_emb(x, torch.arange(length, device=device)[None])
    return lm, lambda: lm.model.layers[0](x, position_embeddings=turns, attention_mask=None)
