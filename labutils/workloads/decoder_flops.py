"""How large a decoder is, and the work of a step on it: FLOPs and bytes, counted by hand.

The counts are held against PyTorch's own counter in tests/equivalence/test_decoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labutils.layers.quantization.convert import BYTES_READ
from labutils.recipe import Recipe
from labutils.workloads.base import DTYPES

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder's block: what LoRA adapts."""


@dataclass(frozen=True)
class DecoderSize:
    """What differs between decoders. A mixture has `experts`, `chosen` of which a token takes, and
    in every other layer a sliding `window`; `words` are the vocabulary. `hub` names the published
    model of this size, if there is one."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    words: int
    tied: bool = False
    experts: int = 0
    chosen: int = 4
    window: int = 128
    hub: str = ""


@dataclass(frozen=True)
class Shapes:
    """The matrix products of a decoder's block. `adapted`: name -> (in, out) of the layers with
    LoRA; `frozen`: weights of the other products that one token takes; `attended`: heads times
    their width."""

    adapted: Mapping[str, tuple[int, int]]
    attended: int
    frozen: int = 0


def decoder_shapes(size: DecoderSize) -> Shapes:
    """The matrix products of one block."""
    attended, keys = size.heads * size.head_width, size.kv_heads * size.head_width
    adapted = {
        "q_proj": (size.width, attended),
        "k_proj": (size.width, keys),
        "v_proj": (size.width, keys),
        "o_proj": (attended, size.width),
    }
    if size.experts:
        frozen = size.width * size.experts + size.chosen * 3 * size.width * size.inner
        return Shapes(adapted, attended, frozen)
    adapted |= {
        "gate_proj": (size.width, size.inner),
        "up_proj": (size.width, size.inner),
        "down_proj": (size.inner, size.width),
    }
    return Shapes(adapted, attended)


def attended_pairs(size: DecoderSize, documents: Sequence[int]) -> int:
    """Pairs of a token and one that it sees, itself included, over all layers. A mixture has a
    window in every other layer, from the first one on."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    whole = sum(triangle(n) for n in documents)
    if not size.experts:
        return size.layers * whole
    near = sum(triangle(n) - triangle(n - size.window) for n in documents)
    windowed = (size.layers + 1) // 2
    return windowed * near + (size.layers - windowed) * whole


def count_flops(size: DecoderSize, rank: int, tokens: int, pairs: int, predicting: int) -> int:
    """FLOPs of a forward and backward pass that trains the LoRA matrices alone.

    pairs: of a token and one that it sees, summed over the layers. predicting: tokens that have
    logits. A frozen product's backward pass is one product, the gradient of its input; a trained
    product's has a second, its own gradient. The first block's input needs no gradient, and neither
    do the products with it. What checkpointing computes again isn't counted.
    """
    shapes = decoder_shapes(size)
    frozen = sum(a * b for a, b in shapes.adapted.values()) + shapes.frozen
    low_rank = rank * sum(a + b for a, b in shapes.adapted.values())
    forward = 2 * tokens * size.layers * (frozen + low_rank) + 4 * pairs * shapes.attended
    backward = 2 * tokens * size.layers * (frozen + 2 * low_rank) + 8 * pairs * shapes.attended
    first = (shapes.adapted[name] for name in ATTENTION[:3])
    spared = 2 * tokens * sum(a * b + rank * a for a, b in first)
    return forward + backward - spared + 2 * 2 * predicting * size.width * size.words


def bytes_read(size: DecoderSize, recipe: Recipe) -> float:
    """Bytes of weights that a pass forward and one backward read: all, twice, the converted ones in
    their own form. Between them, a batch's tokens take every expert."""
    itemsize = DTYPES[recipe.precision].itemsize
    converted = size.layers * sum(a * b for a, b in decoder_shapes(size).adapted.values())
    experts = size.layers * size.width * size.experts * (1 + 3 * size.inner)
    others = experts + size.width * size.words
    return 2 * (converted * BYTES_READ.get(recipe.base_linear, itemsize) + others * itemsize)
