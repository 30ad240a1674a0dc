"""LLaVA-NeXT with LoRA on its language model: article A2's workload.

One example is a photograph of a leaf, the prompt "Describe" and the leaf's class as the answer.
AnyRes cuts the image into tiles (`data.anyres`). The vision tower (CLIP ViT-L/336, its last layer
but one) and a projector of two layers turn each tile into tokens. A Mistral decoder reads them with
the text and is trained to predict the answer's tokens.

The article doesn't say which layers it adapts, nor rank or alpha: here it is all seven projections
of the decoder's blocks with alpha = 2 r, as the same authors do in article A3. Nothing before the
decoder is trained.

At `full` the architecture is llava-v1.6-mistral-7b's to the parameter. `small` has a decoder of 0.8
billion parameters, `tiny` one of two thin blocks and small tiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from labutils.data.anyres import Collate, Examples, Geometry
from labutils.data.images import leaf_images, leaf_sizes
from labutils.data.packing import Layout
from labutils.data.tokenizers import hub_tokenizer, llava_processor, llava_tokenizer
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe
from labutils.workloads.base import DTYPES, Batch, refuse, remembered
from labutils.workloads.decoder_flops import DecoderSize
from labutils.workloads.decoder_workload import (
    DecoderWorkload,
    ExampleSize,
    Published,
    Rewritten,
    built_in,
)

EXTRA_WORDS = 64
"""Rows of the embedding beyond the tokenizer's words: <image>, <pad>, and what fills it up to a
multiple of 64."""
TEXT_ROOM = 64
"""Tokens of a row that text may take: they are as many at every scale, the image's aren't."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles that AnyRes chooses from, as published."""


@dataclass(frozen=True, kw_only=True)
class Size(DecoderSize):
    """A model, and how many photographs it is trained on. `tile`: pixels of a tile's side.
    `vision`: width, layers and heads of the vision tower."""

    images: int
    tile: int
    vision: tuple[int, int, int]

    @property
    def geometry(self) -> Geometry:
        side = self.tile
        return Geometry(side, 14, tuple((rows * side, columns * side) for rows, columns in GRIDS))


SIZES = {
    "tiny": Size(64, 2, 4, 2, 16, 128, 1024, images=16, tile=112, vision=(64, 3, 4)),
    "small": Size(2048, 16, 16, 4, 128, 5504, 32064, images=64, tile=336, vision=(512, 12, 8)),
    "full": Size(
        *(4096, 32, 32, 8, 128, 14336, 32064),
        images=128,
        tile=336,
        vision=(1024, 24, 16),
        hub="llava-hf/llava-v1.6-mistral-7b-hf",
    ),
}


# -------------------------------------------------------------------------------------------------
# The model


class Vision(nn.Module):
    """Tiles [t, 3, tile, tile] to features [t, patches, width]: the tower without the layer that
    nobody reads."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        tower = network.model.vision_tower
        self.embeddings, self.norm = tower.embeddings, tower.pre_layrnorm
        read = network.config.vision_feature_layer + 1  # -2: all but the last
        self.layers = tower.encoder.layers[:read]

    def forward(self, tiles: Tensor) -> Tensor:
        x = self.norm(self.embeddings(tiles.to(self.embeddings.class_embedding.dtype)))
        for layer in self.layers:
            x = layer(x, None)
        return x[:, 1:]


class RewrittenLlava(Rewritten):
    """Vision tower and decoder as two regions of static shapes, with one gather between them."""

    def __init__(self, network: nn.Module, loss: str, longest: int | None) -> None:
        super().__init__(network, loss, longest)
        self.vision = Vision(network)

    def forward(self, batch: Batch) -> Tensor:
        with record_function("encode"):
            x = self.embedded(batch)
        with record_function("forward"):
            return self.decoder(x, batch)

    @torch.no_grad()
    def embedded(self, batch: Batch) -> Tensor:
        """Text and image tokens in their places, [r, n, width]."""
        model = self.network.model
        features = batch["features"] if "features" in batch else self.vision(batch["pixel_values"])
        projected = model.multi_modal_projector(features).flatten(0, 1)
        image = torch.cat([model.image_newline[None], projected])
        text, sources = model.language_model.embed_tokens(batch["input_ids"]), batch["sources"]
        return torch.where((sources >= 0).unsqueeze(-1), image[sources.clamp(min=0)], text)


# -------------------------------------------------------------------------------------------------
# The workload


class MultimodalLora(DecoderWorkload):
    """See the module's docstring; for what batches hold, `data.anyres.Collate`. Photographs are all
    of 500 x 500, or of varied sizes ("llava-lora-varied"), so that AnyRes makes varying numbers of
    tiles and tokens."""

    libraries = (
        "transformers.models.llava_next.modeling_llava_next",
        "transformers.models.llava_next.processing_llava_next",
        "transformers.models.clip.modeling_clip",
        "transformers.models.mistral.modeling_mistral",
        "datasets",
    )

    sizes = SIZES
    rewrites = RewrittenLlava
    takes = DecoderWorkload.takes | {
        "cache": ("nothing", "features"),
        "predict": ("answers",),
    }

    # ---------------------------------------------------------------------------- the model

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        refuse(
            recipe.layers == "published" and recipe.cache == "features",
            "cache='features' needs layers='rewritten': transformers' own forward pass takes "
            "pixels.",
        )

    def random_network(self, dtype: torch.dtype) -> nn.Module:
        return build_llava(self.size, self.device, dtype)

    def pretrained(self, dtype: torch.dtype) -> nn.Module:
        from transformers import LlavaNextForConditionalGeneration

        return LlavaNextForConditionalGeneration.from_pretrained(self.hub, dtype=dtype)

    def left_out(self, recipe: Recipe) -> tuple[str, ...]:
        """FP8 takes the decoder's and the projector's layers as article A2 does, whose vision tower
        can't be: it has 577 tokens a tile. QLoRA leaves out the head alone, as transformers does.
        """
        tower = ("vision_tower",) if "fp8" in recipe.base_linear else ()
        return (*super().left_out(recipe), *tower)

    def units(self, model: Published | Rewritten) -> list[nn.Module]:
        return [*model.network.model.vision_tower.encoder.layers, *super().units(model)]

    # ---------------------------------------------------------------------------- the data

    def dataset(self, model: nn.Module | None, recipe: Recipe) -> Any:
        examples = self._images().with_transform(self._examples(recipe))
        return examples if recipe.cache == "nothing" else self._encoded(model, examples)

    @torch.no_grad()
    def _encoded(self, model: RewrittenLlava, examples: Any) -> EncodedTiles:
        """Every example with its tiles' features in the place of their pixels, in memory. The
        vision tower is frozen and the pixels are the same each epoch, so features are too."""
        began = time.perf_counter()
        kept = []
        for example in self.read_once(examples):
            features = model.vision(example.pop("pixel_values").to(self.device)).cpu()
            kept.append(example | {"features": features})
        encoded = EncodedTiles(kept)
        encoded.encode_s = time.perf_counter() - began
        return encoded

    def read_once(self, examples: Any) -> Iterator[dict[str, Any]]:
        """Every example in order, read by several workers beside a GPU. Its tensors lie in their
        shared memory, of which few may be held: copy those that stay."""
        workers = min(8, usable_cores() - 1) if self.device.type == "cuda" else 0
        for (example,) in DataLoader(examples, batch_size=1, num_workers=workers, collate_fn=list):
            yield example

    def collate_in(self, layout: Layout, published: bool) -> Callable[[list], Batch]:
        image = self._processor().image_token_id
        return Collate(self.size.geometry, layout, image, self.pad, published)

    @property
    def pad(self) -> int:
        return self._processor().tokenizer.pad_token_id

    def token_budget(self, recipe: Recipe) -> int:
        """The recipe's `token_budget` at this scale, where a tile may have fewer tokens."""
        patches = self.size.geometry.side**2 / SIZES["full"].geometry.side ** 2
        return TEXT_ROOM + round((recipe.token_budget - TEXT_ROOM) * patches)

    @remembered
    def example_sizes(self, recipe: Recipe) -> list[ExampleSize]:
        """What every example takes, from its image's size and its class."""
        geometry, transform, side = self.size.geometry, self._examples(recipe), self.size.tile
        examples = []
        for size, label in leaf_sizes(*self._leaves):
            size = (side, side) if recipe.shapes == "fixed" else size
            text, answer = transform.text_tokens(label)
            tokens = geometry.tokens(size) + text
            examples.append(ExampleSize(tokens, answer, geometry.tiles(size)))
        return examples

    @remembered
    def _images(self) -> Any:
        return leaf_images(*self._leaves)

    @property
    def _leaves(self) -> tuple[Any, ...]:
        """What tells the photographs: where, how many, from where, of which sizes."""
        varied_for = self.size.tile if self.name == "llava-lora-varied" else None
        return self.cache_dir, self.size.images, self.data, varied_for

    @remembered
    def _processor(self) -> Any:
        if self.weights == "hub":
            tokenizer = hub_tokenizer(self.hub)
        else:
            tokenizer = llava_tokenizer(self.size.words - EXTRA_WORDS)
        return llava_processor(self.size.geometry, tokenizer)

    def _examples(self, recipe: Recipe) -> Examples:
        return Examples(self._processor(), self.size.tile if recipe.shapes == "fixed" else 0)

    # ---------------------------------------------------------------------------- counting

    def flops_and_bytes(
        self, recipe: Recipe, documents: Sequence[int], tiles: int, predicting: int
    ) -> tuple[float, float]:
        """The decoder's, the projector's on all tiles, and the vision tower's forward pass where
        its features aren't cached."""
        size, itemsize = self.size, DTYPES[recipe.precision].itemsize
        width, layers, _ = size.vision
        flops, read = super().flops_and_bytes(recipe, documents, tiles, predicting)
        projector = (width + size.width) * size.width
        flops += 2 * size.geometry.side**2 * projector * tiles
        read += projector * itemsize
        if recipe.cache == "nothing":
            flops += tower_flops(size) * tiles
            read += (layers - 1) * 12 * width**2 * itemsize
        return flops, read

    def tiles_of(self, batch: Batch) -> int:
        if "image_sizes" in batch:  # as published
            return sum(self.size.geometry.tiles(tuple(s)) for s in batch["image_sizes"].tolist())
        return len(batch["features"] if "features" in batch else batch["pixel_values"])


class EncodedTiles(list):
    """Examples whose tiles were encoded once, in `encode_s` seconds, and are held in memory."""

    encode_s: float


def tower_flops(size: Size) -> int:
    """FLOPs of the vision tower on one tile, forward only: all layers but the last."""
    patches, (width, layers, _) = size.geometry.side**2, size.vision
    n = patches + 1
    embedding = 2 * patches * width * 3 * size.geometry.patch**2
    layer = 2 * n * (4 * width * width + 2 * width * 4 * width) + 4 * n * n * width
    return embedding + (layers - 1) * layer


def build_llava(size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """LlavaNextForConditionalGeneration with random weights, built in `dtype` on `device`. The
    configuration is llava-v1.6-mistral-7b's but for the sizes."""
    from transformers import (
        CLIPVisionConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        MistralConfig,
    )

    width, layers, heads = size.vision
    vision = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=size.tile,
        patch_size=size.geometry.patch,
        projection_dim=768,
    )
    text = MistralConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=None,
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=size.words - EXTRA_WORDS,
        image_grid_pinpoints=[list(point) for point in size.geometry.pinpoints],
        image_seq_length=size.geometry.side**2,
        attn_implementation="sdpa",
    )
    with built_in(dtype, device):
        return LlavaNextForConditionalGeneration(config).eval()
