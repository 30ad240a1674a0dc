"""Qwen3 and gpt-oss with LoRA on texts: article A3's workload.

One example is a conversation of a prompt and an answer: an instruction and its response (names
ending in "-short", 117 tokens on average), or an article's body and its title ("-long", 861; see
`data.texts`). Qwen3 is dense, gpt-oss a mixture of experts with attention sinks and, in every other
layer, a window of 128 tokens.

LoRA adapts all seven projections of Qwen3's blocks with alpha = 2 r, as the article does. It asks
for the same of gpt-oss and gets attention alone: the experts' weights are no linear layers. The
router stays frozen.

At `full` the architectures are Qwen3-8B's (with "32b" in the name Qwen3-32B's) and gpt-oss-20b's to
the parameter. `small` is Qwen3-0.6B and a gpt-oss of 0.8 billion parameters. `tiny` ones have two
thin blocks and texts a quarter as long. As published, gpt-oss runs with eager attention and a loop
over its experts; rewritten, with attention in one kernel and experts in grouped products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labutils.data.packing import Collate, Layout
from labutils.data.texts import LONG, LONGEST, SHORT, Chat, Conversation, Conversations, from_hub
from labutils.data.tokenizers import chat_tokenizer, hub_tokenizer
from labutils.layers.packed_attention import register_attention
from labutils.recipe import Recipe
from labutils.workloads.base import Batch, refuse, remembered
from labutils.workloads.decoder_flops import DecoderSize
from labutils.workloads.decoder_workload import DecoderWorkload, ExampleSize, built_in


@dataclass(frozen=True, kw_only=True)
class Size(DecoderSize):
    """A model, and its texts: how many, and what their lengths are divided by."""

    texts: int = 1000
    shorter: int = 1


QWEN3 = {
    "tiny": Size(64, 2, 4, 2, 32, 128, 1024, texts=32, shorter=4),
    "small": Size(1024, 28, 16, 8, 128, 3072, 151936, tied=True, texts=256, hub="Qwen/Qwen3-0.6B"),
    "full": Size(4096, 36, 32, 8, 128, 12288, 151936, hub="Qwen/Qwen3-8B"),
}
QWEN3_32B = Size(5120, 64, 64, 8, 128, 25600, 151936, hub="Qwen/Qwen3-32B")
GPT_OSS = {
    "tiny": Size(64, 2, 4, 2, 32, 64, 1024, experts=8, chosen=2, window=16, texts=32, shorter=4),
    "small": Size(1024, 12, 16, 4, 64, 1024, 65536, experts=16, texts=256),
    "full": Size(2880, 24, 64, 8, 64, 2880, 201088, experts=32, hub="openai/gpt-oss-20b"),
}
GPT_OSS_120B = Size(2880, 36, 64, 8, 64, 2880, 201088, experts=128, hub="openai/gpt-oss-120b")
"""In 16 bits it is larger than any GPU: its shapes are for device="meta"."""

VARIANTS = {
    "qwen3-lora-short": (QWEN3, SHORT),
    "qwen3-lora-long": (QWEN3, LONG),
    "qwen3-32b-lora-short": (QWEN3 | {"full": QWEN3_32B}, SHORT),
    "qwen3-32b-lora-long": (QWEN3 | {"full": QWEN3_32B}, LONG),
    "gpt-oss-lora-short": (GPT_OSS, SHORT),
    "gpt-oss-lora-long": (GPT_OSS, LONG),
}
"""Workload's name -> sizes by scale, and the kind of its texts."""


class LanguageLora(DecoderWorkload):
    """See the module's docstring; for what batches hold, `data.packing.Collate`."""

    libraries = (
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.gpt_oss.modeling_gpt_oss",
    )
    takes = DecoderWorkload.takes | {
        "cache": ("nothing",),
        "shapes": ("as-they-come", "padded", "packed"),
    }

    def __init__(self, name: str, *where: Any) -> None:
        self.sizes, self.kind = VARIANTS[name]
        super().__init__(name, *where)

    # ---------------------------------------------------------------------------- the model

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        refuse(
            recipe.loss == "answers" and recipe.predict == "everything",
            "loss='answers' leaves out the logits of what isn't predicted, and "
            "predict='everything' predicts all of it. Use loss='fused', or predict='answers'.",
        )

    def random_network(self, dtype: torch.dtype) -> nn.Module:
        return build_lm(self.size, self.device, dtype)

    def pretrained(self, dtype: torch.dtype) -> nn.Module:
        from transformers import AutoModelForCausalLM, Mxfp4Config

        options = _implementations(self.size)
        if self.size.experts:  # published with 4-bit experts; unpacked, as random weights come
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(self.hub, dtype=dtype, **options)

    def publish(self, folder: Path, seed: int = 0) -> None:
        """Write the frozen model and its tokenizer as `from_pretrained` of transformers reads them,
        in 16 bits."""
        self.make(torch.bfloat16, seed).save_pretrained(folder)
        self._tokenizer().save_pretrained(folder)

    # ---------------------------------------------------------------------------- the data

    def dataset(self, model: nn.Module | None, recipe: Recipe) -> Conversations:
        return Conversations(self._conversations(), recipe.predict == "everything")

    def collate_in(self, layout: Layout, published: bool) -> Callable[[list], Batch]:
        return Collate(layout, self.pad, published)

    @property
    def pad(self) -> int:
        return self._tokenizer().pad_token_id

    def token_budget(self, recipe: Recipe) -> int:
        """The recipe's `token_budget` at this scale, where texts may be shorter."""
        return recipe.token_budget // self.size.shorter

    @remembered
    def example_sizes(self, recipe: Recipe) -> list[ExampleSize]:
        examples = self.dataset(None, recipe)
        return [
            ExampleSize(len(ids), examples.predicted(index))
            for index, (ids, _) in enumerate(examples.conversations)
        ]

    @remembered
    def _conversations(self) -> list[Conversation]:
        chat, size = Chat(self._tokenizer()), self.size
        if self.data == "generated":
            return chat.generated(self.kind, size.texts, size.shorter)
        texts, longest = from_hub(self.kind, size.texts, self.cache_dir), LONGEST // size.shorter
        return [chat.conversation(text, longest, self.kind.stretched) for text in texts]

    @remembered
    def _tokenizer(self) -> Any:
        if self.weights == "hub":
            return hub_tokenizer(self.hub)
        return chat_tokenizer("gpt-oss" if self.size.experts else "qwen3", self.size.words)


# -------------------------------------------------------------------------------------------------
# The architectures


def build_lm(size: Size, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' Qwen3ForCausalLM or GptOssForCausalLM with random weights, built in `dtype` on
    `device`. The configurations are the published ones but for the sizes."""
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

    register_attention()
    sizes: dict[str, Any] = {
        "vocab_size": size.words,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_width,
        "tie_word_embeddings": size.tied,
    } | _implementations(size)
    if size.experts:
        sizes |= {"num_local_experts": size.experts, "num_experts_per_tok": size.chosen}
        config = GptOssConfig(**sizes, sliding_window=size.window, swiglu_limit=7.0)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config = Qwen3Config(
            **sizes, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters=rope
        )
    with built_in(dtype, device):
        return GptOssForCausalLM(config) if size.experts else Qwen3ForCausalLM(config)


def _implementations(size: Size) -> dict[str, Any]:
    """How transformers computes what it leaves open: Qwen3's attention as it does by default;
    gpt-oss's, which has only the plain form in PyTorch, and its experts one after the other."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return eager if size.experts else {"attn_implementation": "sdpa"}
