"""LLaVA-NeXT with LoRA on its language model: article A2's workload.

One example is a photograph of a leaf, the prompt "Describe" and the leaf's class as the answer.
AnyRes cuts the image into tiles (`data.anyres`); the vision tower (CLIP ViT-L/336, its last layer
but one) and a projector of two layers turn each tile into tokens; a Mistral decoder reads them with
the text and is trained to predict the answer's tokens.

The article doesn't say which layers it adapts, nor rank or alpha: here it is all seven projections
of the decoder's blocks with alpha = 2 r, as the same authors do in article A3. Nothing before the
decoder is trained.

At `full` the architecture is llava-v1.6-mistral-7b's to the parameter. `small` has a decoder of 0.8
billion parameters, `tiny` one of two thin blocks and small tiles. `layers="published"` runs
transformers' own forward pass. `layers="rewritten"` runs the same modules from tensors that were
made on the CPU: nothing is counted, compared or looked up on the device, so that every part has
static shapes and can be compiled or captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset, Sampler

from labutils.data.anyres import Collate, Examples, Geometry
from labutils.data.images import EPOCH
from labutils.data.leaves import BEANS, VARIED, image_sizes, leaf_images
from labutils.data.packing import Layout, PackedOrder, answer_room
from labutils.data.tokenizers import llava_processor
from labutils.layers.lora import attach_lora
from labutils.layers.packed_attention import register_attention
from labutils.layers.quantization.convert import convert_base, frozen_linears
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe
from labutils.workloads.base import Batch, Work, remembered
from labutils.workloads.decoder import (
    DTYPES,
    FP8_ROWS,
    Decoder,
    DecoderLora,
    Shapes,
    around_the_same,
    built_in,
    check_checkpointing,
    checkpoint_blocks,
    decoder_flops,
    head_flops,
    projections,
)

HUB_MODEL = "llava-hf/llava-v1.6-mistral-7b-hf"
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "published": (),
    "fp8-frozen": ("lm_head", "vision_tower"),
    "fp8-te": ("lm_head", "vision_tower"),
    "fp8-torchao": ("lm_head", "vision_tower"),
    "nf4": ("lm_head",),
    "nf4-frozen": ("lm_head",),
    "nf4-fp8": ("lm_head", "vision_tower"),
}
"""`base_linear` -> what isn't converted. FP8 takes the decoder's and the projector's layers as
article A2 does, whose vision tower can't be: it has 577 tokens a tile. QLoRA leaves out the head
alone, as transformers does."""
EXTRA_WORDS = 64
"""Rows of the embedding beyond the tokenizer's words: <image>, <pad>, and what fills it up to a
multiple of 64.
"""
TEXT_ROOM = 64
"""Tokens of a row that text may take: they are as many at every scale, the image's aren't."""


@dataclass(frozen=True)
class Scale:
    """What differs between scales; everything else of the architecture is the same."""

    images: int
    tile: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    words: int

    @property
    def geometry(self) -> Geometry:
        """Grids of 1x2, 2x1, 2x2, 3x1 and 1x3 tiles, as published."""
        grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
        return Geometry(
            self.tile, 14, tuple((rows * self.tile, columns * self.tile) for rows, columns in grids)
        )


SCALES_OF_LLAVA = {
    "tiny": Scale(16, 112, 64, 3, 4, 64, 2, 4, 2, 128, 960),
    "small": Scale(64, 336, 512, 12, 8, 2048, 16, 16, 4, 5504, 32000),
    "full": Scale(128, 336, 1024, 24, 16, 4096, 32, 32, 8, 14336, 32000),
}


@dataclass(frozen=True)
class Measure:
    """What one example takes: tokens in all, tiles, and tokens of its answer."""

    tokens: int
    tiles: int
    answers: int


# -------------------------------------------------------------------------------------------------
# The model


class Vision(nn.Module):
    """Tiles [t, 3, tile, tile] to features [t, patches, width]: the tower without the layer that
    nobody reads.
    """

    def __init__(self, llava: nn.Module) -> None:
        super().__init__()
        tower = llava.model.vision_tower
        self.embeddings, self.norm = tower.embeddings, tower.pre_layrnorm
        self.layers = tower.encoder.layers[
            : llava.config.vision_feature_layer + 1
        ]  # -2: all but the last

    def forward(self, tiles: Tensor) -> Tensor:
        x = self.norm(self.embeddings(tiles.to(self.embeddings.class_embedding.dtype)))
        for layer in self.layers:
            x = layer(x, None)
        return x[:, 1:]


class Published(nn.Module):
    """transformers' model and its own forward pass."""

    base_linear = "published"

    def __init__(self, llava: nn.Module) -> None:
        super().__init__()
        self.llava = llava

    def forward(self, batch: Batch) -> Tensor:
        return self.llava(**batch, use_cache=False).loss


class Rewritten(nn.Module):
    """The same modules in two regions of static shapes, with one gather between them."""

    base_linear = "published"

    def __init__(self, llava: nn.Module, loss: str) -> None:
        super().__init__()
        self.llava = llava
        self.vision, self.decoder = (
            Vision(llava),
            Decoder(llava.model.language_model, llava.lm_head, loss),
        )

    def forward(self, batch: Batch) -> Tensor:
        with record_function("encode"):
            x = self.embedded(batch)
        given = {
            k: batch[k]
            for k in ("positions", "targets", "answers", "answer_targets", "boundaries")
            if k in batch
        }
        with record_function("forward"):
            return self.decoder(x, **given)

    @torch.no_grad()
    def embedded(self, batch: Batch) -> Tensor:
        """Text and image tokens in their places, [r, n, width]."""
        model = self.llava.model
        features = batch["features"] if "features" in batch else self.vision(batch["pixel_values"])
        image = torch.cat(
            [model.image_newline[None], model.multi_modal_projector(features).flatten(0, 1)]
        )
        text, sources = model.language_model.embed_tokens(batch["input_ids"]), batch["sources"]
        return torch.where((sources >= 0).unsqueeze(-1), image[sources.clamp(min=0)], text)


# -------------------------------------------------------------------------------------------------
# The workload


class MultimodalLora(DecoderLora):
    """See the module's docstring; for what batches hold, `data.anyres.Collate`. Photographs are all
    of 500 x 500.
    """

    name: ClassVar[str] = "llava-lora"
    libraries: ClassVar[tuple[str, ...]] = (
        "transformers.models.llava_next.modeling_llava_next",
        "transformers.models.llava_next.processing_llava_next",
        "transformers.models.clip.modeling_clip",
        "transformers.models.mistral.modeling_mistral",
        "datasets",
    )
    sizes: ClassVar[str] = BEANS

    @property
    def size(self) -> Scale:
        return SCALES_OF_LLAVA[self.scale]

    # ---------------------------------------------------------------------------- the model

    def build(self, recipe: Recipe) -> Published | Rewritten:
        _check(recipe)
        dtype = DTYPES[recipe.precision]
        if recipe.base_linear == "published":
            llava = around_the_same(self._frozen(dtype, recipe.seed))
        else:  # its own copy, so that converting a layer lets go of what it was
            llava = self._made(dtype, recipe.seed)
        names = projections(llava.model.language_model.layers, "model.language_model.layers")
        attach_lora(llava, names, recipe.rank, 2 * recipe.rank, recipe.adapter, seed=recipe.seed)
        convert_base(llava, _converted(llava, recipe), recipe.base_linear, dtype)
        llava.eval()
        llava.model.language_model.train()
        checkpoint_blocks(llava.model.language_model, recipe)
        if recipe.layers == "published":
            model: Published | Rewritten = Published(llava)
        else:
            llava.model.language_model.config._attn_implementation = "documents"
            model = Rewritten(llava, recipe.loss)
        model.base_linear = recipe.base_linear
        return model

    def trained(self, model: Published | Rewritten) -> tuple[str, nn.Module]:
        name = "llava" if isinstance(model, Published) else "decoder"
        return name, getattr(model, name)

    def frozen(self, model: Published | Rewritten) -> list[nn.Module]:
        """The vision tower; as published it is part of what is trained, one module."""
        return [] if isinstance(model, Published) else [model.vision]

    def units(self, model: Published | Rewritten) -> list[nn.Module]:
        inner = model.llava.model
        return [*inner.vision_tower.encoder.layers, *inner.language_model.layers]

    def converted(self, model: Published | Rewritten, recipe: Recipe) -> list[str]:
        return [f"llava.{name}" for name in _converted(model.llava, recipe)]

    def _made(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """transformers' model without adapters, every weight frozen, built in `dtype` on the device
        itself.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            llava = (
                self._from_hub(dtype)
                if self.weights == "hub"
                else build_llava(self.size, self.device, dtype)
            )
        return llava.requires_grad_(False)

    def _from_hub(self, dtype: torch.dtype) -> nn.Module:
        from transformers import LlavaNextForConditionalGeneration

        if self.scale != "full":
            raise ValueError(
                f'weights="hub" has the sizes of scale="full"; {self.scale!r} has other ones.'
            )
        try:
            llava = LlavaNextForConditionalGeneration.from_pretrained(HUB_MODEL, dtype=dtype)
        except OSError as error:
            raise ConnectionError(
                f"The weights of {HUB_MODEL} could not be loaded ({error}). They need the network "
                "once. Use "
                f'weights="random", or fetch them on a connected machine with `hf download {HUB_MODEL}`.'
            ) from error
        return llava.to(self.device)

    def save(self, model: Published | Rewritten, folder: Any) -> None:
        """Write the adapter under the names that PEFT gives it in transformers' model."""
        from labutils.layers.lora import save_adapter

        save_adapter(getattr(model.llava, "_orig_mod", model.llava), folder, base_model=HUB_MODEL)

    # ---------------------------------------------------------------------------- the data

    def dataset(self, model: nn.Module | None, recipe: Recipe) -> Dataset:
        examples = self._images().with_transform(self._examples(recipe))
        return examples if recipe.cache == "nothing" else self._encoded(model, examples)

    @torch.no_grad()
    def _encoded(self, model: Rewritten, examples: Dataset) -> EncodedTiles:
        """Every example with its tiles' features in the place of their pixels, in memory. The
        vision tower is frozen and the pixels are the same each epoch, so features are too."""
        began = time.perf_counter()
        workers = min(8, usable_cores() - 1) if self.device.type == "cuda" else 0
        kept = []
        for (example,) in DataLoader(examples, batch_size=1, num_workers=workers, collate_fn=list):
            features = model.vision(example.pop("pixel_values").to(self.device)).cpu()
            kept.append(example | {"features": features})
        return EncodedTiles(kept, time.perf_counter() - began)

    def order(self, dataset: Dataset, recipe: Recipe) -> Sampler[list[int]] | None:
        if recipe.shapes != "packed":
            return None
        measures = self._measures(recipe)
        lengths, tiles = [m.tokens for m in measures], [m.tiles for m in measures]
        return PackedOrder(
            lengths,
            tiles,
            self.layout(recipe),
            recipe.micro_batch,
            max(len(lengths), EPOCH),
            recipe.seed,
        )

    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        self.layout(recipe).row_tokens(
            [measure.tokens for measure in self._measures(recipe)]
        )  # does all of it fit?
        processor = self._processor()
        image, pad = processor.image_token_id, processor.tokenizer.pad_token_id
        return Collate(
            self.size.geometry, self.layout(recipe), image, pad, recipe.layers == "published"
        )

    def layout(self, recipe: Recipe) -> Layout:
        """The form of this recipe's batches."""
        measures = self._measures(recipe)
        budget, most = self.token_budget(recipe), max(m.tiles for m in measures)
        if recipe.shapes == "packed":
            # A tenth more tiles than a row of average images has.
            most = max(
                most,
                round(
                    1.1 * budget * sum(m.tiles for m in measures) / sum(m.tokens for m in measures)
                ),
            )
        multiple = FP8_ROWS if recipe.base_linear.startswith("fp8") else 1
        return Layout(
            recipe.shapes, budget, most, budget // min(m.tokens for m in measures), multiple
        )

    def token_budget(self, recipe: Recipe) -> int:
        """The recipe's `token_budget` at this scale, where a tile may have fewer tokens."""
        patches = self.size.geometry.side**2 / SCALES_OF_LLAVA["full"].geometry.side ** 2
        return TEXT_ROOM + round((recipe.token_budget - TEXT_ROOM) * patches)

    @remembered
    def _images(self) -> Any:
        return leaf_images(self.cache_dir, self.size.images, self.data, self.sizes, self.size.tile)

    @remembered
    def _processor(self) -> Any:
        hub = (
            {"hub": HUB_MODEL, "cache_dir": self.cache_dir / "hub"} if self.weights == "hub" else {}
        )
        return llava_processor(self.size.geometry, self.size.words, **hub)

    def _examples(self, recipe: Recipe) -> Examples:
        return Examples(self._processor(), self.size.tile if recipe.shapes == "fixed" else 0)

    @remembered
    def _measures(self, recipe: Recipe) -> list[Measure]:
        """What every example takes, from its image's size and its class."""
        geometry, examples = self.size.geometry, self._examples(recipe)
        square = [(self.size.tile, self.size.tile)] * self.size.images
        sizes = square if recipe.shapes == "fixed" else image_sizes(self._images())
        found = []
        for size, label in zip(sizes, self._images().with_format(None)["labels"], strict=True):
            text, answer = examples.text_tokens(label)
            found.append(Measure(geometry.tokens(size) + text, geometry.tiles(size), answer))
        return found

    # ---------------------------------------------------------------------------- counting

    def _planned(self, recipe: Recipe, measures: Sequence[Measure]) -> Work:
        """What a micro-batch of such examples takes."""
        layout, lengths, tiles = (
            self.layout(recipe),
            [m.tokens for m in measures],
            [m.tiles for m in measures],
        )
        rows, length = layout.rows(lengths, tiles), layout.row_tokens(lengths)
        left = [length - sum(lengths[i] for i in row) for row in rows]
        documents = [*lengths, *left] if layout.packs else [length] * len(rows)
        shown = (
            sum(tiles)
            if recipe.layers == "published"
            else layout.batch_tiles(sum(tiles), len(rows))
        )
        predicting = (
            answer_room(sum(m.answers for m in measures))
            if recipe.loss == "answers"
            else sum(documents)
        )
        return self._work(recipe, len(lengths), documents, sum(lengths), shown, predicting)

    def work_of(self, recipe: Recipe, batch: Batch) -> Work:
        ids = batch["input_ids"]
        pad = self._processor().tokenizer.pad_token_id
        useful = int((ids != pad).sum())
        if recipe.layers == "published":
            tiles = sum(
                self.size.geometry.tiles(tuple(size)) for size in batch["image_sizes"].tolist()
            )
            examples = len(ids)
        else:
            tiles = len(batch["features" if recipe.cache == "features" else "pixel_values"])
            examples = int(((batch["positions"] == 0) & (ids != pad)).sum())
        marks = batch.get("boundaries")
        documents = [ids.shape[1]] * len(ids) if marks is None else marks.diff().tolist()
        predicting = len(batch["answers"]) if recipe.loss == "answers" else ids.numel()
        return self._work(recipe, examples, documents, useful, tiles, predicting)

    def _work(
        self,
        recipe: Recipe,
        examples: int,
        documents: Sequence[int],
        useful: int,
        tiles: int,
        predicting: int,
    ) -> Work:
        """documents: lengths, padding included, of what attends to itself. predicting: tokens that
        have logits.
        """
        tokens = sum(documents)
        pairs = sum(n * (n + 1) // 2 for n in documents)
        seen = 0 if recipe.cache == "features" else tiles
        flops = count_flops(self.size, recipe.rank, tokens, pairs, seen, tiles, predicting)
        read = _weights_read(self.size, bool(seen)) * DTYPES[recipe.precision].itemsize
        return Work(flops, read, examples, tokens, useful)


class EncodedTiles(Dataset):
    """Examples whose tiles were encoded once, in `encode_s` seconds, and are held in memory."""

    def __init__(self, examples: list[dict[str, Any]], encode_s: float) -> None:
        self.examples = examples
        self.encode_s = encode_s

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.examples[index]


class VariedMultimodalLora(MultimodalLora):
    """The same on photographs of varied sizes, so that AnyRes makes varying numbers of tiles and
    tokens.
    """

    name: ClassVar[str] = "llava-lora-varied"
    sizes: ClassVar[str] = VARIED


def _converted(llava: nn.Module, recipe: Recipe) -> list[str]:
    return frozen_linears(llava, LEFT_OUT[recipe.base_linear])


def _check(recipe: Recipe) -> None:
    """Raise `ValueError` for what this workload can't do of a recipe, `Unavailable` for what a
    library can't.
    """
    if recipe.adapter == "none":
        raise ValueError(
            "adapter='none' is not built for this workload: 7 billion trained weights fill no one "
            "GPU."
        )
    if recipe.adapter == "folded":
        raise ValueError(
            "adapter='folded' is not built for this workload. Use adapter='peft' or 'plain'."
        )
    if recipe.cache not in ("nothing", "features"):
        raise ValueError(
            f"cache={recipe.cache!r} is for diffusion models. Use cache='features' with this "
            "workload."
        )
    if recipe.memory_format != "contiguous":
        raise ValueError(
            "memory_format='channels_last' is for convolutions. Use 'contiguous' with this "
            "workload."
        )
    if recipe.layers == "published" and recipe.cache == "features":
        raise ValueError(
            "cache='features' needs layers='rewritten': transformers' own forward pass takes "
            "pixels."
        )
    if recipe.layers == "published" and (recipe.shapes == "packed" or recipe.loss != "logits"):
        raise ValueError(
            f"shapes={recipe.shapes!r} with loss={recipe.loss!r} needs layers='rewritten': "
            "transformers' own forward "
            "pass keeps no examples of a row apart and always forms whole logits."
        )
    if recipe.predict != "answers":
        raise ValueError(
            f"predict={recipe.predict!r} is for texts alone: most of a prompt here is an image."
        )
    check_checkpointing(recipe)
    if recipe.driver == "graph" and (
        recipe.layers == "published" or recipe.shapes in ("as-they-come", "buckets")
    ):
        raise ValueError(
            "driver='graph' records one step of fixed shapes that never asks the host. Use "
            "layers='rewritten' and "
            "shapes='fixed', 'padded' or 'packed' with it."
        )


def build_llava(size: Scale, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """LlavaNextForConditionalGeneration with random weights, built in `dtype` on `device`: no copy
    in another dtype or place ever exists."""
    from transformers import LlavaNextForConditionalGeneration

    register_attention()
    with built_in(dtype, device):
        return LlavaNextForConditionalGeneration(llava_config(size)).eval()


def llava_config(size: Scale) -> Any:
    """The architecture's configuration, as published for llava-v1.6-mistral-7b but for the sizes."""
    from transformers import CLIPVisionConfig, LlavaNextConfig, MistralConfig

    vision = CLIPVisionConfig(
        hidden_size=size.vision_width,
        intermediate_size=4 * size.vision_width,
        num_hidden_layers=size.vision_layers,
        num_attention_heads=size.vision_heads,
        image_size=size.tile,
        patch_size=size.geometry.patch,
        projection_dim=768,
    )
    text = MistralConfig(
        vocab_size=size.words + EXTRA_WORDS,
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
    return LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=size.words,
        image_grid_pinpoints=[list(point) for point in size.geometry.pinpoints],
        image_seq_length=size.geometry.side**2,
        attn_implementation="sdpa",
    )


# -------------------------------------------------------------------------------------------------
# Arithmetic


def count_flops(
    size: Scale, rank: int, tokens: int, pairs: int, seen: int, tiles: int, predicting: int
) -> int:
    """FLOPs of a forward and backward pass that trains the LoRA matrices alone.

    tokens: what the decoder computes on. pairs: of a token and one that it sees, itself included.
    seen: tiles that the vision tower encodes, tiles: those whose features are projected.
    predicting: tokens that have logits. A frozen product's backward pass is one product, the
    gradient of its input; before the first trained layer there is none; a trained product's has a
    second, its own gradient. What checkpointing computes again isn't counted.
    """
    vision = _tower_flops(size) * seen + _projector_flops(size) * tiles
    return vision + _decoder_flops(size, rank, tokens, pairs) + _head_flops(size, predicting)


def _tower_flops(size: Scale) -> int:
    """Of one tile, forward only: all layers but the last."""
    patches, width = size.geometry.side**2, size.vision_width
    n = patches + 1
    embedding = 2 * patches * width * 3 * size.geometry.patch**2
    layer = 2 * n * (4 * width * width + 2 * width * 4 * width) + 4 * n * n * width
    return embedding + (size.vision_layers - 1) * layer


def _projector_flops(size: Scale) -> int:
    return 2 * size.geometry.side**2 * (size.vision_width + size.width) * size.width


def _decoder_flops(size: Scale, rank: int, tokens: int, pairs: int) -> int:
    return decoder_flops(
        Shapes(size.layers, _projections(size), size.width), rank, tokens, size.layers * pairs
    )


def _head_flops(size: Scale, predicting: int) -> int:
    return head_flops(size.width, size.words + EXTRA_WORDS, predicting)


def _projections(size: Scale) -> dict[str, tuple[int, int]]:
    """Input and output width of a decoder block's projections."""
    width, keys = size.width, size.width // size.heads * size.kv_heads
    attention = {
        "q_proj": (width, width),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (width, width),
    }
    return attention | {
        "gate_proj": (width, size.inner),
        "up_proj": (width, size.inner),
        "down_proj": (size.inner, width),
    }


def _weights_read(size: Scale, tower: bool) -> int:
    """Weights that one pass forward and one backward read: the decoder's twice, the projector's and
    tower's once.
    """
    decoder = size.layers * sum(a * b for a, b in _projections(size).values()) + size.width * (
        size.words + EXTRA_WORDS
    )
    layers = (size.vision_layers - 1) * 12 * size.vision_width**2 if tower else 0
    return 2 * decoder + layers + (size.vision_width + size.width) * size.width
