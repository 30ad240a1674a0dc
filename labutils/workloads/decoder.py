"""What a language model's and a multimodal model's decoder have in common: how it is trained, and
its arithmetic.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from labutils.data.images import EPOCH, EpochOrder
from labutils.layers.activation_checkpoint import (
    Parking,
    keeping_products,
    offloading,
    recomputing_within,
)
from labutils.layers.chunked_cross_entropy import ChunkLoss, cross_entropy, linear_cross_entropy
from labutils.layers.quantization.convert import forward_context, recomputing
from labutils.profiling import compat
from labutils.recipe import Recipe, Unavailable
from labutils.workloads.base import Batch, Work, Workload, remembered

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FP8_ROWS = 16
"""FP8 layers take rows in multiples of this. Transformer Engine insists on 8, which article A2 met
as an assertion; ours fills rows up to 16, and compiled for any length needs a second graph for
lengths that must be filled up."""
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder's block: what LoRA adapts."""


class Decoder(nn.Module):
    """Embedded tokens [r, n, width] to the mean loss of the targets: the language model and its
    head.

    longest: tokens of the longest document in packed rows, for attention to count on; None: as long
    as a row.
    """

    def __init__(
        self, language: nn.Module, head: nn.Module, loss: str, longest: int | None = None
    ) -> None:
        super().__init__()
        self.language, self.head, self.kind, self.longest = language, head, loss, longest
        self.chunk_loss = ChunkLoss() if loss == "fused" else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        targets: Tensor,
        answers: Tensor,
        answer_targets: Tensor,
        boundaries: Tensor | None = None,
    ) -> Tensor:
        turns = self.language.rotary_emb(x, position_ids=positions)
        for layer in self.language.layers:
            x = layer(x, position_embeddings=turns, boundaries=boundaries, longest=self.longest)
        x = x.flatten(0, 1)
        if self.kind == "answers":
            return cross_entropy(self.language.norm(x[answers]), self.head.weight, answer_targets)
        hidden, targets = self.language.norm(x), targets.flatten()
        if self.chunk_loss is None:
            return cross_entropy(hidden, self.head.weight, targets)
        return linear_cross_entropy(hidden, self.head.weight, targets, chunk_loss=self.chunk_loss)


def projections(layers: nn.ModuleList, prefix: str) -> tuple[str, ...]:
    """Names of the linear layers of `TARGETS` in the blocks that are called `prefix`.0, `prefix`.1,
    ...
    """
    return tuple(
        f"{prefix}.{index}.{name}"
        for index, layer in enumerate(layers)
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear) and name.rpartition(".")[2] in TARGETS
    )


def around_the_same(frozen: nn.Module) -> nn.Module:
    """A copy of the modules around the same tensors: trainers side by side hold the frozen weights
    once.
    """
    shared = {id(tensor): tensor for tensor in [*frozen.parameters(), *frozen.buffers()]}
    return copy.deepcopy(frozen, memo=shared)


def checkpoint_blocks(language: nn.Module, recipe: Recipe) -> None:
    """Have the blocks of transformers' `language` model keep for the backward pass what the recipe
    says.
    """
    if recipe.checkpointing == "off":
        return
    if _recomputes_within(language, recipe):
        for layer in language.layers:
            layer.forward = recomputing_within(layer.forward)
        return
    language.gradient_checkpointing_enable()
    tokens = recipe.micro_batch * recipe.token_budget
    parking = Parking(tokens * language.config.hidden_size * DTYPES[recipe.precision].itemsize)
    for layer in language.layers:
        if recipe.checkpointing == "offload":
            compat.set_block_checkpoint(layer, offloading(layer, parking))
        elif recipe.checkpointing == "selective":
            compat.set_block_checkpoint(layer, keeping_products)
        else:
            compat.set_block_checkpoint(layer, recomputing(recipe.base_linear))


def _recomputes_within(language: nn.Module, recipe: Recipe) -> bool:
    """Whether a block's checkpoint is compiled with it.

    As published it is the library's, which runs compiled blocks once more; Transformer Engine's is
    closed to the compiler. A mixture's router must choose the same experts both times, and the
    compiler may sum it up in another order in the backward pass.
    """
    compiled = (
        recipe.compile != "off"
        and recipe.compile_scope == "blocks"
        and recipe.layers == "rewritten"
    )
    same_choice = not getattr(language.config, "num_local_experts", 0)
    return (
        compiled
        and same_choice
        and recipe.checkpointing == "blocks"
        and recipe.base_linear != "fp8-te"
    )


def check_checkpointing(recipe: Recipe) -> None:
    """Raise `ValueError` where a recipe's checkpointing doesn't go with the rest of it,
    `Unavailable` where a library's doesn't."""
    if (
        recipe.base_linear == "fp8-te"
        and recipe.checkpointing == "blocks"
        and recipe.compile != "off"
        and recipe.compile_scope != "blocks"
    ):
        raise Unavailable(
            "Transformer Engine's checkpointing is closed to the compiler, so that of a model "
            "compiled whole its "
            "blocks would be left out. Compile the blocks one by one: compile_scope='blocks'"
        )
    if recipe.checkpointing == "selective" and recipe.base_linear != "published":
        raise ValueError(
            "checkpointing='selective' keeps the results of PyTorch's own products, and "
            "base_linear="
            f"{recipe.base_linear!r} has others. Use checkpointing='blocks'."
        )
    if recipe.checkpointing != "offload":
        return
    if recipe.driver == "graph":
        raise ValueError(
            "checkpointing='offload' copies to the host, which driver='graph' can't record. Use "
            "'blocks'."
        )
    if recipe.base_linear == "fp8-te":
        raise ValueError(
            "checkpointing='offload' doesn't know of Transformer Engine's scales, which are "
            "renewed between a block's "
            "two passes. Use checkpointing='blocks' with base_linear='fp8-te'."
        )
    if recipe.compile != "off" and recipe.compile_scope != "blocks":
        raise ValueError(
            "checkpointing='offload' works between compiled blocks. Use compile_scope='blocks' "
            "with it."
        )


@contextmanager
def built_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """A context in which modules are made in `dtype` on `device` itself: no copy in another dtype
    or place exists.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


# -------------------------------------------------------------------------------------------------
# Arithmetic


@dataclass(frozen=True)
class Shapes:
    """The matrix products of a decoder's block. `adapted`: name -> (in, out) of the layers with
    LoRA; `frozen`: weights of the other products that one token takes; `attended`: heads times
    their width."""

    layers: int
    adapted: Mapping[str, tuple[int, int]]
    attended: int
    frozen: int = 0


def decoder_flops(shapes: Shapes, rank: int, tokens: int, pairs: int) -> int:
    """FLOPs of a forward and backward pass through all blocks that trains the LoRA matrices alone.

    pairs: of a token and one that it sees, itself included, summed over the layers. A frozen
    product's backward pass is one product, the gradient of its input; a trained product's has a
    second, its own gradient. The first block's input needs no gradient, and neither do the products
    with it. What checkpointing computes again isn't counted.
    """
    frozen = sum(a * b for a, b in shapes.adapted.values()) + shapes.frozen
    low_rank = rank * sum(a + b for a, b in shapes.adapted.values())
    forward = 2 * tokens * shapes.layers * (frozen + low_rank) + 4 * pairs * shapes.attended
    backward = 2 * tokens * shapes.layers * (frozen + 2 * low_rank) + 8 * pairs * shapes.attended
    spared = (
        2
        * tokens
        * sum(a * b + rank * a for a, b in (shapes.adapted[name] for name in ATTENTION[:3]))
    )
    return forward + backward - spared


def head_flops(width: int, words: int, predicting: int) -> int:
    """FLOPs of the logits of `predicting` tokens, forward and backward."""
    return 2 * 2 * predicting * width * words


class DecoderLora(Workload):
    """What training a decoder's adapters is, whatever its tokens stand for: the loss, and the work
    of a mean step.

    A kind of it says how the frozen model is made, how large its examples are, and what a
    micro-batch of such takes.
    """

    steps_vary: ClassVar[bool] = True

    @abstractmethod
    def _made(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """The model without adapters, every weight frozen, in `dtype` on the device."""

    @abstractmethod
    def _measures(self, recipe: Recipe) -> Sequence[Any]:
        """The sizes of the examples, in the dataset's order."""

    @abstractmethod
    def _planned(self, recipe: Recipe, measures: Sequence[Any]) -> Work:
        """What a micro-batch of such examples takes."""

    @abstractmethod
    def units(self, model: nn.Module) -> list[nn.Module]:
        """The blocks: the decoder's, and where there is one the vision tower's."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """These, and the loss of a chunk of tokens, which runs several times a pass as well."""
        chunk_loss = (
            model.decoder.chunk_loss if hasattr(model, "decoder") else None
        )  # as published there is neither
        return self.units(model) if chunk_loss is None else [*self.units(model), chunk_loss]

    def _frozen(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """The frozen model, one at a time: two of 7 billion parameters would fill what training
        needs.
        """
        if self._held is None or self._held[0] != (dtype, seed):
            self._held = None
            self._held = (dtype, seed), self._made(dtype, seed)
        return self._held[1]

    def draw(self, model: nn.Module, batch: Batch) -> Batch:
        """Nothing is random but the data's order."""
        return {}

    def loss(self, model: nn.Module, batch: Batch, draws: Batch) -> Tensor:
        with forward_context(model.base_linear):
            return model(batch)

    def work(self, recipe: Recipe) -> Work:
        """The mean over the first epoch's optimizer steps, from the examples' sizes alone."""
        return self._mean_work(recipe) * recipe.accumulation

    @remembered
    def _mean_work(self, recipe: Recipe) -> Work:
        measures, order = self._measures(recipe), self.order(None, recipe)
        if order is None:
            order = BatchSampler(
                EpochOrder(len(measures), EPOCH, recipe.seed), recipe.micro_batch, drop_last=True
            )
        works = [self._planned(recipe, [measures[index] for index in chosen]) for chosen in order]
        return functools.reduce(Work.__add__, works) * (1 / len(works))
