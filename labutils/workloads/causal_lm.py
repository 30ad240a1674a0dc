"""Qwen3 and gpt-oss with LoRA on texts: article A3's workload.

One example is a conversation of a prompt and an answer: an instruction and its response (names
ending in "-short", 117 tokens on average), or an article's body and its title ("-long", 861; see
`data.texts`). Qwen3 is dense, gpt-oss a mixture of experts with attention sinks and, in every other
layer, a window of 128 tokens.

LoRA adapts all seven projections of Qwen3's blocks with alpha = 2 r, as the article does. It asks
for the same of gpt-oss and, as it found out, gets attention alone: the experts' weights are no
linear layers. The router stays frozen.

At `full` the architectures are Qwen3-8B's and gpt-oss-20b's to the parameter, or with "32b" and
"120b" in the name those of Qwen3-32B and gpt-oss-120b (which in 16 bits is larger than any GPU: its
shapes are for device="meta"). `small` is Qwen3-0.6B and a gpt-oss of 0.8 billion parameters. `tiny`
ones have two thin blocks and texts a quarter as long. `layers="published"` runs transformers' own
forward pass, gpt-oss's with eager attention and its loop over experts; `layers="rewritten"` the
same modules without masks, attention in one kernel and experts in grouped products: nothing is
asked of the device, so that blocks have static shapes and can be compiled or captured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import Dataset, Sampler

from labutils.data.images import EPOCH
from labutils.data.packing import Layout, PackedOrder, answer_room, left_over
from labutils.data.texts import (
    LONG,
    LONGEST,
    SHORT,
    Chat,
    Collate,
    Conversation,
    Conversations,
    Kind,
    from_hub,
)
from labutils.data.tokenizers import chat_tokenizer, hub_tokenizer
from labutils.layers.grouped_moe import register_experts
from labutils.layers.lora import attach_lora
from labutils.layers.packed_attention import register_attention
from labutils.layers.quantization.convert import BYTES_READ, convert_base, frozen_linears
from labutils.profiling import compat
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


@dataclass(frozen=True)
class Size:
    """What differs between models of a family. `hub` names the published one, if it is one; `texts`
    are the examples and `shorter` what their lengths are divided by; a mixture has `experts`,
    `chosen` of which a token takes, and a `window`."""

    hub: str
    texts: int
    shorter: int
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


QWEN3 = {
    "tiny": Size("", 32, 4, 64, 2, 4, 2, 32, 128, 1024),
    "small": Size("Qwen/Qwen3-0.6B", 256, 1, 1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    "full": Size("Qwen/Qwen3-8B", 1000, 1, 4096, 36, 32, 8, 128, 12288, 151936),
}
QWEN3_32B = Size("Qwen/Qwen3-32B", 1000, 1, 5120, 64, 64, 8, 128, 25600, 151936)
GPT_OSS = {
    "tiny": Size("", 32, 4, 64, 2, 4, 2, 32, 64, 1024, experts=8, chosen=2, window=16),
    "small": Size("", 256, 1, 1024, 12, 16, 4, 64, 1024, 65536, experts=16),
    "full": Size("openai/gpt-oss-20b", 1000, 1, 2880, 24, 64, 8, 64, 2880, 201088, experts=32),
}
GPT_OSS_120B = Size("openai/gpt-oss-120b", 1000, 1, 2880, 36, 64, 8, 64, 2880, 201088, experts=128)


LEFT_OUT = ("lm_head",)
"""What of the frozen linear layers is never converted, as transformers does."""
CROWDED = 3
"""Packed rows hold up to so many times as many texts as fit on average. Room for as many as there
could be of the shortest would be empty nearly always, and attention kernels pass through all of it.
"""


@dataclass(frozen=True)
class Measure:
    """What one example takes: tokens in all, and those to be predicted."""

    tokens: int
    answers: int


# -------------------------------------------------------------------------------------------------
# The model


class Published(nn.Module):
    """transformers' model and its own forward pass."""

    base_linear = "published"

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> Tensor:
        return self.lm(**batch, use_cache=False).loss


class Rewritten(nn.Module):
    """The same modules; all but the embedding is one region of static shapes."""

    base_linear = "published"

    def __init__(self, lm: nn.Module, loss: str, longest: int | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.decoder = Decoder(lm.model, lm.lm_head, loss, longest)

    def forward(self, batch: Batch) -> Tensor:
        given = {
            k: batch[k]
            for k in ("positions", "targets", "answers", "answer_targets", "boundaries")
            if k in batch
        }
        with record_function("forward"):
            return self.decoder(self.lm.model.embed_tokens(batch["input_ids"]), **given)


# -------------------------------------------------------------------------------------------------
# The workload


class LanguageLora(DecoderLora):
    """See the module's docstring; for what batches hold, `data.texts.Collate`."""

    family: ClassVar[str]
    sizes: ClassVar[dict[str, Size]]
    kind: ClassVar[Kind]

    @property
    def size(self) -> Size:
        return self.sizes[self.scale]

    # ---------------------------------------------------------------------------- the model

    def build(self, recipe: Recipe) -> Published | Rewritten:
        _check(recipe)
        dtype = DTYPES[recipe.precision]
        if recipe.adapter == "none":
            lm = self._made(torch.float32, recipe.seed).requires_grad_(True).train()
            checkpoint_blocks(lm.model, recipe)
            return Published(lm)
        if recipe.base_linear == "published":
            lm = around_the_same(self._frozen(dtype, recipe.seed))
        else:  # its own copy, so that converting a layer lets go of what it was
            lm = self._made(dtype, recipe.seed)
        names = projections(lm.model.layers, "model.layers")
        if (
            recipe.base_linear == "nf4"
        ):  # as it is loaded: PEFT then takes the layers that it has for 4 bits
            convert_base(lm, frozen_linears(lm, LEFT_OUT), "nf4", dtype)
            compat.mark_as_four_bits(lm)
        attach_lora(lm, names, recipe.rank, 2 * recipe.rank, recipe.adapter, seed=recipe.seed)
        if recipe.base_linear != "nf4":
            convert_base(lm, frozen_linears(lm, LEFT_OUT), recipe.base_linear, dtype)
        lm.train()
        checkpoint_blocks(lm.model, recipe)
        if recipe.layers == "published":
            model: Published | Rewritten = Published(lm)
        else:
            lm.config._attn_implementation = "documents"
            if self.size.experts:
                lm.config._experts_implementation = "frozen"
            model = Rewritten(
                lm, recipe.loss, self._longest(recipe) if recipe.shapes == "packed" else None
            )
        model.base_linear = recipe.base_linear
        return model

    def trained(self, model: Published | Rewritten) -> tuple[str, nn.Module]:
        name = "lm" if isinstance(model, Published) else "decoder"
        return name, getattr(model, name)

    def frozen(self, model: Published | Rewritten) -> list[nn.Module]:
        """None: there is nothing but the decoder."""
        return []

    def units(self, model: Published | Rewritten) -> list[nn.Module]:
        return list(model.lm.model.layers)

    def converted(self, model: Published | Rewritten, recipe: Recipe) -> list[str]:
        return [f"lm.{name}" for name in frozen_linears(model.lm, LEFT_OUT)]

    def called(self, model: Published | Rewritten) -> nn.Module:
        """All of it: the embedding is looked up outside of the part that is trained."""
        return model

    def _made(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """transformers' model without adapters, every weight frozen, built in `dtype` on the device
        itself.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            lm = (
                self._from_hub(dtype)
                if self.weights == "hub"
                else build_lm(self.size, self.device, dtype)
            )
        return lm.requires_grad_(False)

    def _from_hub(self, dtype: torch.dtype) -> nn.Module:
        from transformers import AutoModelForCausalLM, Mxfp4Config

        # gpt-oss is published with 4-bit experts; they are unpacked, as random weights come.
        unpacked = (
            {"quantization_config": Mxfp4Config(dequantize=True)} if self.size.experts else {}
        )
        register_attention()
        register_experts()
        try:
            lm = AutoModelForCausalLM.from_pretrained(
                self._hub_name(), dtype=dtype, **_ways(self.size), **unpacked
            )
        except OSError as error:
            raise ConnectionError(
                f"The weights of {self.size.hub} could not be loaded ({error}). They need the "
                "network once. Use "
                f'weights="random", or fetch them on a connected machine with `hf download {self.size.hub}`.'
            ) from error
        return lm.to(self.device)

    def _hub_name(self) -> str:
        if not self.size.hub:
            raise ValueError(
                f'weights="hub" has the sizes of published models, and {self.name} at scale={self.scale!r} is none. '
                'Use scale="full", or weights="random".'
            )
        return self.size.hub

    def save(self, model: Published | Rewritten, folder: Any) -> None:
        """Write the adapter under the names that PEFT gives it in transformers' model."""
        from labutils.layers.lora import save_adapter

        save_adapter(
            getattr(model.lm, "_orig_mod", model.lm), folder, base_model=self.size.hub or None
        )

    def publish(self, folder: Path, seed: int = 0) -> None:
        """Write the frozen model and its tokenizer as `from_pretrained` of transformers reads them,
        in 16 bits.
        """
        self._made(torch.bfloat16, seed).save_pretrained(folder)
        self._tokenizer().save_pretrained(folder)

    # ---------------------------------------------------------------------------- the data

    def dataset(self, model: nn.Module | None, recipe: Recipe) -> Conversations:
        return Conversations(self._conversations(), recipe.predict == "everything")

    def order(self, dataset: Dataset | None, recipe: Recipe) -> Sampler[list[int]] | None:
        if recipe.shapes != "packed":
            return None
        lengths = [measure.tokens for measure in self._measures(recipe)]
        epoch = max(len(lengths), EPOCH)
        return PackedOrder(
            lengths, [0] * len(lengths), self.layout(recipe), recipe.micro_batch, epoch, recipe.seed
        )

    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        layout = self.layout(recipe)
        layout.row_tokens(
            [measure.tokens for measure in self._measures(recipe)]
        )  # does all of it fit?
        return Collate(layout, self._tokenizer().pad_token_id, recipe.layers == "published")

    def layout(self, recipe: Recipe) -> Layout:
        """The form of this recipe's batches."""
        budget, lengths = (
            self.token_budget(recipe),
            [measure.tokens for measure in self._measures(recipe)],
        )
        multiple = FP8_ROWS if "fp8" in recipe.base_linear else 1
        usual = math.ceil(CROWDED * budget * len(lengths) / sum(lengths))
        return Layout(
            recipe.shapes,
            budget,
            0,
            min(budget // min(lengths), usual),
            multiple,
            self._longest(recipe),
        )

    def _longest(self, recipe: Recipe) -> int:
        return max(measure.tokens for measure in self._measures(recipe))

    def token_budget(self, recipe: Recipe) -> int:
        """The recipe's `token_budget` at this scale, where texts may be shorter."""
        return recipe.token_budget // self.size.shorter

    @remembered
    def _conversations(self) -> list[Conversation]:
        chat, size = Chat(self._tokenizer()), self.size
        if self.data == "generated":
            return chat.generated(self.kind, size.texts, size.shorter)
        texts = from_hub(self.kind, size.texts, self.cache_dir)
        return [
            chat.conversation(text, LONGEST // size.shorter, self.kind.stretched) for text in texts
        ]

    @remembered
    def _tokenizer(self) -> Any:
        if self.weights == "hub":
            return hub_tokenizer(self._hub_name(), self.cache_dir / "hub")
        return chat_tokenizer(self.family, self.size.words)

    @remembered
    def _measures(self, recipe: Recipe) -> list[Measure]:
        examples = self.dataset(None, recipe)
        return [
            Measure(len(ids), examples.predicted(i))
            for i, (ids, _) in enumerate(examples.conversations)
        ]

    # ---------------------------------------------------------------------------- counting

    def _planned(self, recipe: Recipe, measures: Sequence[Measure]) -> Work:
        """What a micro-batch of such examples takes."""
        layout, lengths = self.layout(recipe), [m.tokens for m in measures]
        rows, length = layout.rows(lengths, [0] * len(lengths)), layout.row_tokens(lengths)
        left = [left_over(length - sum(lengths[i] for i in row), layout.longest) for row in rows]
        documents = [*lengths, *itertools.chain(*left)] if layout.packs else [length] * len(rows)
        predicting = (
            answer_room(sum(m.answers for m in measures))
            if recipe.loss == "answers"
            else sum(documents)
        )
        return self._work(recipe, len(lengths), documents, sum(lengths), predicting)

    def work_of(self, recipe: Recipe, batch: Batch) -> Work:
        ids, marks = batch["input_ids"], batch.get("boundaries")
        shown = ids != self._tokenizer().pad_token_id
        starts = _starts(batch)
        examples = len(ids) if starts is None else int((starts & shown).sum())
        if recipe.layers == "published" and starts is not None:
            marks = torch.cat([starts[0].nonzero()[:, 0], torch.tensor([ids.shape[1]])])
        documents = [ids.shape[1]] * len(ids) if marks is None else marks.diff().tolist()
        predicting = len(batch["answers"]) if recipe.loss == "answers" else ids.numel()
        return self._work(recipe, examples, documents, int(shown.sum()), predicting)

    def _work(
        self, recipe: Recipe, examples: int, documents: Sequence[int], useful: int, predicting: int
    ) -> Work:
        """documents: lengths, padding included, of what attends to itself. predicting: tokens that
        have logits.
        """
        tokens = sum(documents)
        pairs = attended_pairs(self.size, documents)
        if recipe.adapter == "none":
            flops = count_full_flops(self.size, tokens, pairs, predicting)
        else:
            flops = count_flops(self.size, recipe.rank, tokens, pairs, predicting)
        read = _bytes_read(self.size, recipe)
        return Work(flops, read, examples, tokens, useful)


def _starts(batch: Batch) -> Tensor | None:
    """Where examples of a batch start, by their positions, bool [rows, n]; None where it holds
    none: then each row.
    """
    positions = batch.get("positions", batch.get("position_ids"))
    return None if positions is None else positions == 0


class Qwen3Short(LanguageLora):
    name: ClassVar[str] = "qwen3-lora-short"
    family, sizes, kind = "qwen3", QWEN3, SHORT
    libraries = ("transformers.models.qwen3.modeling_qwen3",)


class Qwen3Long(Qwen3Short):
    name: ClassVar[str] = "qwen3-lora-long"
    kind = LONG


class Qwen3LargeShort(Qwen3Short):
    name: ClassVar[str] = "qwen3-32b-lora-short"
    sizes = QWEN3 | {"full": QWEN3_32B}


class Qwen3LargeLong(Qwen3LargeShort):
    name: ClassVar[str] = "qwen3-32b-lora-long"
    kind = LONG


class GptOssShort(LanguageLora):
    name: ClassVar[str] = "gpt-oss-lora-short"
    family, sizes, kind = "gpt-oss", GPT_OSS, SHORT
    libraries = ("transformers.models.gpt_oss.modeling_gpt_oss",)


class GptOssLong(GptOssShort):
    name: ClassVar[str] = "gpt-oss-lora-long"
    kind = LONG


class GptOssLargeShort(GptOssShort):
    name: ClassVar[str] = "gpt-oss-120b-lora-short"
    sizes = GPT_OSS | {"full": GPT_OSS_120B}


class GptOssLargeLong(GptOssLargeShort):
    name: ClassVar[str] = "gpt-oss-120b-lora-long"
    kind = LONG


def _check(recipe: Recipe) -> None:
    """Raise `ValueError` for what this workload can't do of a recipe."""
    if recipe.adapter == "none" and recipe.layers == "rewritten":
        raise ValueError(
            "adapter='none' trains the library's own model here. Use layers='published' with it."
        )
    if recipe.adapter == "folded":
        raise ValueError(
            "adapter='folded' is not built for this workload. Use adapter='peft' or 'plain'."
        )
    if recipe.cache != "nothing":
        raise ValueError(
            f"cache={recipe.cache!r} needs a frozen encoder, and a language model has none."
        )
    if recipe.memory_format != "contiguous":
        raise ValueError(
            "memory_format='channels_last' is for convolutions. Use 'contiguous' with this "
            "workload."
        )
    if recipe.shapes == "fixed":
        raise ValueError(
            "shapes='fixed' is about images. Use shapes='padded' for texts of one length."
        )
    if recipe.layers == "published" and (recipe.shapes == "packed" or recipe.loss != "logits"):
        raise ValueError(
            f"shapes={recipe.shapes!r} with loss={recipe.loss!r} needs layers='rewritten': "
            "transformers' own forward "
            "pass keeps no examples of a row apart here and always forms whole logits."
        )
    if recipe.loss == "answers" and recipe.predict == "everything":
        raise ValueError(
            "loss='answers' leaves out the logits of what isn't predicted, and "
            "predict='everything' predicts all of "
            "it. Use loss='fused', or predict='answers'."
        )
    if recipe.driver == "graph" and (
        recipe.layers == "published" or recipe.shapes in ("as-they-come", "buckets")
    ):
        raise ValueError(
            "driver='graph' records one step of fixed shapes that never asks the host. Use "
            "layers='rewritten' and "
            "shapes='padded' or 'packed' with it."
        )
    check_checkpointing(recipe)


# -------------------------------------------------------------------------------------------------
# The architectures


def build_lm(size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' Qwen3ForCausalLM or GptOssForCausalLM with random weights, built in `dtype` on
    `device`.
    """
    from transformers import GptOssForCausalLM, Qwen3ForCausalLM

    register_attention()
    register_experts()
    with built_in(dtype, device):
        return GptOssForCausalLM(_gpt_oss(size)) if size.experts else Qwen3ForCausalLM(_qwen3(size))


def _ways(size: Size) -> dict[str, str]:
    """How transformers computes what it leaves open: Qwen3's attention as it does by default;
    gpt-oss's, which has only the plain form in PyTorch, and its experts one after the other."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return eager if size.experts else {"attn_implementation": "sdpa"}


def _qwen3(size: Size) -> Any:
    """The configuration as published but for the sizes."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **_common(size),
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def _gpt_oss(size: Size) -> Any:
    """The same of gpt-oss."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(size),
        num_local_experts=size.experts,
        num_experts_per_tok=size.chosen,
        sliding_window=size.window,
        swiglu_limit=7.0,
    )


def _common(size: Size) -> dict[str, Any]:
    sizes = {
        "vocab_size": size.words,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_width,
        "tie_word_embeddings": size.tied,
    }
    return sizes | _ways(size)


# -------------------------------------------------------------------------------------------------
# Arithmetic


def count_flops(size: Size, rank: int, tokens: int, pairs: int, predicting: int) -> int:
    """FLOPs of a forward and backward pass that trains the LoRA matrices alone: `decoder_flops` and
    the head's.

    pairs: of a token and one that it sees, summed over the layers. predicting: tokens that have
    logits.
    """
    return decoder_flops(decoder_shapes(size), rank, tokens, pairs) + head_flops(
        size.width, size.words, predicting
    )


def count_full_flops(size: Size, tokens: int, pairs: int, predicting: int) -> int:
    """FLOPs of a forward and backward pass that trains every weight: each product has two more in
    its backward pass, attention's two have four."""
    shapes = decoder_shapes(size)
    weights = size.layers * (sum(a * b for a, b in shapes.adapted.values()) + shapes.frozen)
    return (
        6 * tokens * weights
        + 12 * pairs * shapes.attended
        + 6 * predicting * size.width * size.words
    )


def attended_pairs(size: Size, documents: Sequence[int]) -> int:
    """Pairs of a token and one that it sees, itself included, over all layers; every other layer,
    from the first one on, has gpt-oss's window."""
    whole = sum(n * (n + 1) // 2 for n in documents)
    if not size.experts:
        return size.layers * whole
    near = sum(_triangle(n) - _triangle(n - size.window) for n in documents)
    windowed = (size.layers + 1) // 2
    return windowed * near + (size.layers - windowed) * whole


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def decoder_shapes(size: Size) -> Shapes:
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
        return Shapes(size.layers, adapted, attended, frozen)
    adapted |= {
        "gate_proj": (size.width, size.inner),
        "up_proj": (size.width, size.inner),
        "down_proj": (size.inner, size.width),
    }
    return Shapes(size.layers, adapted, attended)


def _bytes_read(size: Size, recipe: Recipe) -> float:
    """Bytes of weights that a pass forward and one backward read: all, twice, the converted ones in
    their own form. Between them, a batch's tokens take every expert."""
    itemsize = DTYPES[recipe.precision].itemsize
    converted = size.layers * sum(a * b for a, b in decoder_shapes(size).adapted.values())
    others = (
        size.layers * size.width * size.experts * (1 + 3 * size.inner) + size.width * size.words
    )
    return 2 * (converted * BYTES_READ.get(recipe.base_linear, itemsize) + others * itemsize)
