"""Training the LoRA adapters of a decoder, whatever its tokens stand for.

`causal_lm` (texts) and `llava` (images and texts) say how the frozen network is made, what a batch
holds, and what comes before the decoder. The rest is here: building, adapting and converting the
network, the loss and packed rows. `decoder_flops` counts the work of a step.

`layers="published"` runs transformers' own forward pass. `layers="rewritten"` runs the same modules
without masks from tensors that were made on the CPU: nothing is counted, compared or looked up on
the device, so that every part has static shapes and can be compiled or captured.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import BatchSampler, Dataset, Sampler

from labutils.data.loader import EpochOrder
from labutils.data.packing import Layout, PackedOrder, answer_room, left_over
from labutils.layers.activation_checkpoint import (
    Parking,
    keeping_products,
    offloading,
    recomputing_within,
)
from labutils.layers.chunked_cross_entropy import ChunkLoss, cross_entropy, linear_cross_entropy
from labutils.layers.grouped_moe import register_experts
from labutils.layers.lora import attach_lora
from labutils.layers.packed_attention import register_attention
from labutils.layers.quantization.convert import (
    convert_base,
    forward_context,
    frozen_linears,
    recomputing,
)
from labutils.profiling import compat
from labutils.recipe import Recipe, Unavailable
from labutils.workloads.base import (
    DTYPES,
    Batch,
    Work,
    Workload,
    around_the_same,
    refuse,
    remembered,
)
from labutils.workloads.decoder_flops import (
    TARGETS,
    DecoderSize,
    attended_pairs,
    bytes_read,
    count_flops,
)

FP8_ROWS = 16
"""FP8 layers take rows in multiples of this. Transformer Engine insists on 8, which article A2 met
as an assertion; ours fills rows up to 16, and compiled for any length needs a second graph for
lengths that must be filled up."""

CROWDED = 3
"""Packed rows hold up to so many times as many examples as fit on average. Room for as many as
there could be of the shortest would be empty nearly always, and attention kernels pass through all
of it.
"""


@dataclass(frozen=True)
class ExampleSize:
    """What one example takes: tokens in all, those to be predicted, and tiles of an image."""

    tokens: int
    answers: int
    tiles: int = 0


# -------------------------------------------------------------------------------------------------
# The model


class Decoder(nn.Module):
    """Embedded tokens [r, n, width] and their batch (see `data.packing.Collate`) to the mean loss
    of the targets: the language model and its head.

    longest: tokens of the longest document in packed rows, for attention to count on; None: as long
    as a row.
    """

    def __init__(
        self, language: nn.Module, head: nn.Module, loss: str, longest: int | None = None
    ) -> None:
        super().__init__()
        self.language, self.head, self.kind, self.longest = language, head, loss, longest
        self.chunk_loss = ChunkLoss() if loss == "fused" else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        turns = self.language.rotary_emb(x, position_ids=batch["positions"])
        packed = {"boundaries": batch.get("boundaries"), "longest": self.longest}
        for layer in self.language.layers:
            x = layer(x, position_embeddings=turns, **packed)
        x = x.flatten(0, 1)
        if self.kind == "answers":
            hidden = self.language.norm(x[batch["answers"]])
            return cross_entropy(hidden, self.head.weight, batch["answer_targets"])
        hidden, targets = self.language.norm(x), batch["targets"].flatten()
        if self.chunk_loss is None:
            return cross_entropy(hidden, self.head.weight, targets)
        return linear_cross_entropy(hidden, self.head.weight, targets, chunk_loss=self.chunk_loss)


class Published(nn.Module):
    """transformers' model and its own forward pass."""

    base_linear = "published"

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> Tensor:
        return self.network(**batch, use_cache=False).loss


class Rewritten(nn.Module):
    """The same modules; all but the embedding is one region of static shapes."""

    base_linear = "published"

    def __init__(self, network: nn.Module, loss: str, longest: int | None = None) -> None:
        super().__init__()
        self.network = network
        self.decoder = Decoder(network.get_decoder(), network.lm_head, loss, longest)

    def forward(self, batch: Batch) -> Tensor:
        with record_function("forward"):
            return self.decoder(self.network.get_input_embeddings()(batch["input_ids"]), batch)


def projections(network: nn.Module) -> tuple[str, ...]:
    """Names in transformers' `network` of the `TARGETS` in its decoder's blocks."""
    decoder = network.get_decoder()
    prefix = next(name for name, module in network.named_modules() if module is decoder)
    return tuple(
        f"{prefix}.layers.{name}"
        for name, part in decoder.layers.named_modules()
        if isinstance(part, nn.Linear) and name.rpartition(".")[2] in TARGETS
    )


@contextmanager
def built_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """A context in which modules are made in `dtype` on `device` itself: no copy in another dtype
    or place exists."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def checkpoint_blocks(language: nn.Module, recipe: Recipe) -> None:
    """Have the blocks of transformers' `language` model keep for the backward pass what the recipe
    says."""
    if recipe.checkpointing == "off":
        return
    # A block's checkpoint is compiled with it where it can be. As published it is the library's,
    # which runs compiled blocks once more. Transformer Engine's is closed to the compiler. A
    # mixture's router must choose the same experts both times, and the compiler may sum it up in
    # another order in the backward pass.
    if (
        (recipe.checkpointing, recipe.layers) == ("blocks", "rewritten")
        and (recipe.compile != "off" and recipe.compile_scope == "blocks")
        and recipe.base_linear != "fp8-te"
        and not getattr(language.config, "num_local_experts", 0)
    ):
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


# -------------------------------------------------------------------------------------------------
# The workload


class DecoderWorkload(Workload):
    """What training a decoder's adapters is. LoRA adapts `TARGETS` of every block with alpha = 2 r;
    everything else is frozen.

    A workload of its own says in `random_network` and `pretrained` how the frozen network is made,
    in `rewrites` what comes before the decoder, and in the methods below what its examples are.
    """

    steps_vary: ClassVar[bool] = True
    takes = {"adapter": ("peft", "plain"), "memory_format": ("contiguous",)}
    rewrites: ClassVar[type[Rewritten]] = Rewritten
    """The model around an adapted network for layers="rewritten"."""

    sizes: Mapping[str, DecoderSize]
    """Scale -> the decoder's size, and what else differs between scales."""

    @property
    def size(self) -> Any:
        return self.sizes[self.scale]

    @property
    def hub(self) -> str:
        return self.size.hub

    @abstractmethod
    def random_network(self, dtype: torch.dtype) -> nn.Module:
        """transformers' model with random weights, built in `dtype` on the device itself."""

    @abstractmethod
    def pretrained(self, dtype: torch.dtype) -> nn.Module:
        """The same from the hub."""

    def left_out(self, recipe: Recipe) -> tuple[str, ...]:
        """Parts of the network whose linear layers `recipe.base_linear` doesn't convert: the head,
        as transformers does."""
        return ("lm_head",)

    @abstractmethod
    def example_sizes(self, recipe: Recipe) -> Sequence[ExampleSize]:
        """What every example takes, in the dataset's order."""

    @abstractmethod
    def token_budget(self, recipe: Recipe) -> int:
        """The recipe's `token_budget` at this scale, where examples may be shorter."""

    @abstractmethod
    def collate_in(self, layout: Layout, published: bool) -> Callable[[list], Batch]:
        """What makes a micro-batch in that form, for the model as published or as rewritten."""

    @property
    @abstractmethod
    def pad(self) -> int:
        """The id of the token that fills rows up."""

    # ---------------------------------------------------------------------------- the model

    def build(self, recipe: Recipe) -> Published | Rewritten:
        self.check(recipe)
        dtype = DTYPES[recipe.precision]
        make = functools.partial(self.make, dtype, recipe.seed)
        # One frozen network at a time: two of 7 billion parameters would fill what training needs.
        # To convert one takes a copy, so that each layer lets go of what it was.
        shares = recipe.base_linear == "published"
        network = around_the_same(self.shared((dtype, recipe.seed), make)) if shares else make()
        loads_4_bits = recipe.base_linear == "nf4"
        if loads_4_bits:  # before the adapters, as from_pretrained does: PEFT has layers for these
            convert_base(network, self.converted(network, recipe), "nf4", dtype)
            compat.mark_as_four_bits(network)
        names = projections(network)
        attach_lora(network, names, recipe.rank, 2 * recipe.rank, recipe.adapter, seed=recipe.seed)
        if not loads_4_bits:
            convert_base(network, self.converted(network, recipe), recipe.base_linear, dtype)
        language = network.eval().get_decoder().train()
        checkpoint_blocks(language, recipe)
        if recipe.layers == "published":
            model: Published | Rewritten = Published(network)
        else:
            register_attention()
            language.config._attn_implementation = "documents"
            if self.size.experts:
                register_experts()
                network.config._experts_implementation = "frozen"
            longest = self.layout(recipe).longest if recipe.shapes == "packed" else None
            model = self.rewrites(network, recipe.loss, longest)
        model.base_linear = recipe.base_linear
        return model

    def check(self, recipe: Recipe) -> None:
        """Raise `ValueError` for what no decoder can do of a recipe, `Unavailable` for what a
        library can't."""
        super().check(recipe)
        published, kind = recipe.layers == "published", recipe.checkpointing
        whole = recipe.compile != "off" and recipe.compile_scope != "blocks"
        refuse(
            published and (recipe.shapes == "packed" or recipe.loss != "logits"),
            f"shapes={recipe.shapes!r} with loss={recipe.loss!r} needs layers='rewritten': "
            "transformers' own forward pass keeps no examples of a row apart here and always forms "
            "whole logits.",
        )
        refuse(
            recipe.driver == "graph" and (published or recipe.shapes == "as-they-come"),
            "driver='graph' records one step of fixed shapes that never asks the host. Use "
            "layers='rewritten' and shapes='padded' or 'packed' with it.",
        )
        refuse(
            kind == "selective" and recipe.base_linear != "published",
            "checkpointing='selective' keeps the results of PyTorch's own products, and "
            f"base_linear={recipe.base_linear!r} has others. Use checkpointing='blocks'.",
        )
        refuse(
            kind == "offload"
            and (whole or recipe.driver == "graph" or recipe.base_linear == "fp8-te"),
            "checkpointing='offload' copies between blocks that the host starts: with neither "
            "driver='graph', base_linear='fp8-te' nor a compile_scope other than 'blocks'. Use "
            "checkpointing='blocks'.",
        )
        if recipe.base_linear == "fp8-te" and kind == "blocks" and whole:
            raise Unavailable(
                "Transformer Engine's checkpointing is closed to the compiler. Compile the blocks "
                "one by one: compile_scope='blocks'"
            )

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """transformers' model without adapters, every weight frozen, in `dtype` on the device."""
        new_network = self.pretrained if self.weights == "hub" else self.random_network
        with self.making_weights(seed):
            network = new_network(dtype)
        return network.to(self.device).requires_grad_(False)

    def trained(self, model: Published | Rewritten) -> tuple[str, nn.Module]:
        name = "network" if isinstance(model, Published) else "decoder"
        return name, getattr(model, name)

    def called(self, model: Published | Rewritten) -> nn.Module:
        """All of it: the embedding is looked up outside of the part that is trained."""
        return model

    def units(self, model: Published | Rewritten) -> list[nn.Module]:
        return list(model.network.get_decoder().layers)

    def blocks(self, model: Published | Rewritten) -> list[nn.Module]:
        """The units, and the loss of a chunk of tokens, which runs several times a pass as well."""
        chunk_loss = model.decoder.chunk_loss if isinstance(model, Rewritten) else None
        return self.units(model) if chunk_loss is None else [*self.units(model), chunk_loss]

    def converted(self, model: nn.Module, recipe: Recipe) -> list[str]:
        return frozen_linears(model, self.left_out(recipe))

    # ---------------------------------------------------------------------------- the loss

    def draw(self, model: nn.Module, batch: Batch) -> Batch:
        """Nothing is random but the data's order."""
        return {}

    def loss(self, model: nn.Module, batch: Batch, draws: Batch) -> Tensor:
        with forward_context(model.base_linear):
            return model(batch)

    # ---------------------------------------------------------------------------- the data

    def layout(self, recipe: Recipe) -> Layout:
        """The form of this recipe's batches."""
        examples, budget = self.example_sizes(recipe), self.token_budget(recipe)
        tokens, tiles = [e.tokens for e in examples], [e.tiles for e in examples]
        most = max(tiles)
        if recipe.shapes == "packed":  # a tenth more tiles than a row of average images has
            most = max(most, round(1.1 * budget * sum(tiles) / sum(tokens)))
        usual = math.ceil(CROWDED * budget * len(tokens) / sum(tokens))
        segments = min(budget // min(tokens), usual)
        multiple = FP8_ROWS if "fp8" in recipe.base_linear else 1
        return Layout(recipe.shapes, budget, most, segments, multiple, max(tokens))

    def order(self, dataset: Dataset | None, recipe: Recipe) -> Sampler[list[int]] | None:
        if recipe.shapes != "packed":
            return None
        examples = self.example_sizes(recipe)
        lengths, tiles = [e.tokens for e in examples], [e.tiles for e in examples]
        epoch = max(len(examples), self.epoch_length)
        return PackedOrder(
            lengths, tiles, self.layout(recipe), recipe.micro_batch, epoch, recipe.seed
        )

    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        layout = self.layout(recipe)
        layout.row_tokens([e.tokens for e in self.example_sizes(recipe)])  # does all of it fit?
        return self.collate_in(layout, recipe.layers == "published")

    # ---------------------------------------------------------------------------- counting

    def flops_and_bytes(
        self, recipe: Recipe, documents: Sequence[int], tiles: int, predicting: int
    ) -> tuple[float, float]:
        """FLOPs of a micro-batch forward and backward, and bytes of the weights that it reads.

        documents: lengths, padding included, of what attends to itself. predicting: tokens that
        have logits.
        """
        tokens, pairs = sum(documents), attended_pairs(self.size, documents)
        flops = count_flops(self.size, recipe.rank, tokens, pairs, predicting)
        return flops, bytes_read(self.size, recipe)

    def work(self, recipe: Recipe) -> Work:
        """The mean over the first epoch's optimizer steps, from the examples' sizes alone."""
        return self._mean_work(recipe) * recipe.accumulation

    @remembered
    def _mean_work(self, recipe: Recipe) -> Work:
        examples, order = self.example_sizes(recipe), self.order(None, recipe)
        if order is None:
            order = BatchSampler(
                EpochOrder(len(examples), self.epoch_length, recipe.seed),
                recipe.micro_batch,
                drop_last=True,
            )
        works = [self._planned(recipe, [examples[index] for index in chosen]) for chosen in order]
        return functools.reduce(Work.__add__, works) * (1 / len(works))

    def _planned(self, recipe: Recipe, examples: Sequence[ExampleSize]) -> Work:
        """What a micro-batch of such examples takes."""
        layout, lengths = self.layout(recipe), [e.tokens for e in examples]
        tiles, answers = sum(e.tiles for e in examples), sum(e.answers for e in examples)
        rows, length = layout.rows(lengths, [e.tiles for e in examples]), layout.row_tokens(lengths)
        left = [left_over(length - sum(lengths[i] for i in row), layout.longest) for row in rows]
        documents = [*lengths, *itertools.chain(*left)] if layout.packs else [length] * len(rows)
        if recipe.layers == "rewritten":
            tiles = layout.batch_tiles(tiles, len(rows))
        predicting = answer_room(answers) if recipe.loss == "answers" else sum(documents)
        flops, read = self.flops_and_bytes(recipe, documents, tiles, predicting)
        return Work(flops, read, len(examples), sum(documents), sum(lengths))

    def work_of(self, recipe: Recipe, batch: Batch) -> Work:
        ids, boundaries = batch["input_ids"], batch.get("boundaries")
        shown = ids != self.pad
        positions = batch.get("positions", batch.get("position_ids"))
        examples = len(ids) if positions is None else int(((positions == 0) & shown).sum())
        if "position_ids" in batch:  # packed as published: all rows behind one another
            starts = (positions[0] == 0).nonzero()[:, 0]
            boundaries = torch.cat([starts, torch.tensor([ids.shape[1]])])
        documents = [ids.shape[1]] * len(ids) if boundaries is None else boundaries.diff().tolist()
        predicting = len(batch["answers"]) if recipe.loss == "answers" else ids.numel()
        flops, read = self.flops_and_bytes(recipe, documents, self.tiles_of(batch), predicting)
        return Work(flops, read, examples, sum(documents), int(shown.sum()))

    def tiles_of(self, batch: Batch) -> int:
        """Tiles of the images in a batch."""
        return 0
