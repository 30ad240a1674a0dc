"""Tokenizers: the real ones, or ones of the same kind and size that need no download."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labutils.data.file_cache import reaching
from labutils.data.texts import LONG, SHORT, written

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import CLIPTokenizer, LlavaNextProcessor, PreTrainedTokenizerFast

    from labutils.data.anyres import Geometry

HUB_MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
VOCABULARY = 49408
START, END = "<|startoftext|>", "<|endoftext|>"
MAX_LENGTH = 77


def clip_tokenizer(weights: str = "random", _: object = None) -> CLIPTokenizer:
    """The tokenizer of Stable Diffusion 1.5's text encoder. Recorded notebooks name a folder, too:
    what comes from the hub lies in the hub's own cache, as the models do.

    `weights="hub"` loads it; `weights="random"` makes one that knows single letters: the same
    class, algorithm, special ids (49406, 49407), length (77 tokens) and vocabulary size, hence the
    same cost, but other ids. Raises `ConnectionError` where the hub's can't be had.
    """
    from transformers import CLIPTokenizer

    if weights == "random":
        return _clip_like()
    with reaching(HUB_MODEL, "model"):
        return CLIPTokenizer.from_pretrained(HUB_MODEL, subfolder="tokenizer")


@functools.cache
def _clip_like() -> CLIPTokenizer:
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += [f"unused{index}</w>" for index in range(len(tokens), VOCABULARY - 2)]
    vocabulary = {token: index for index, token in enumerate([*tokens, START, END])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=MAX_LENGTH)


# -------------------------------------------------------------------------- LLaVA-NeXT's

IMAGE, PAD = "<image>", "<pad>"


@functools.cache
def llava_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with the special tokens of llava-v1.6-mistral: `words` ids, then
    <image> and <pad>.

    <unk>, <s> and </s> are 0, 1 and 2 as in Mistral's. Its merges are learned from the prompts and
    answers of the leaf data, so these take about as many tokens as with the real one; ids are other
    ones.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_pairs(LLAVA_TEXTS, min(words, 512), ("<unk>", "<s>", "</s>"), unk="<unk>")
    tokenizer.add_tokens([f"unused{index}" for index in range(tokenizer.get_vocab_size(), words)])
    tokenizer.add_special_tokens([IMAGE, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
    )


def _byte_pairs(
    texts: Iterable[str], words: int, special: Sequence[str], unk: str | None = None, **how: Any
) -> Tokenizer:
    """A byte-level tokenizer of at most `words` ids, its merges learned from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        **how,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


LLAVA_TEXTS = (
    "[INST] \nDescribe [/INST]",
    "angular leaf spot bean rust healthy angular_leaf_spot bean_rust",
)


def llava_processor(geometry: Geometry, tokenizer: Any) -> LlavaNextProcessor:
    """The real processor class with the image processor that needs no torchvision, for tiles of
    that geometry."""
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": geometry.tile},
        crop_size={"height": geometry.tile, "width": geometry.tile},
        image_grid_pinpoints=[list(point) for point in geometry.pinpoints],
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=geometry.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def hub_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model of the hub. Raises `ConnectionError` where it can't be had."""
    from transformers import AutoTokenizer

    with reaching(model, "model"):
        return AutoTokenizer.from_pretrained(model, padding_side="right")


# -------------------------------------------------------------------------- chat models'


@dataclass(frozen=True)
class ChatForm:
    """How a family of models writes a conversation. `special`: its marks, the first one fills rows
    up; `end`: what closes an answer; `template`: a chat template (Jinja)."""

    special: tuple[str, ...]
    end: str
    template: str


CHAT_FORMS = {
    "qwen3": ChatForm(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    ),
    "gpt-oss": ChatForm(
        ("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|return|>",
        "{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}<|return|>"
        "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}",
    ),
}
CHAT_WORDS = 4096
"""Words that a chat tokenizer made here has at most: its texts are of a small vocabulary."""


@functools.cache
def chat_tokenizer(family: str, words: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with the marks and the chat form of a `family` of models, learned from
    generated texts.

    It has at most `words` ids, all of them below the models' vocabulary sizes.
    """
    from transformers import PreTrainedTokenizerFast

    form = CHAT_FORMS[family]
    texts = (written(kind, index, 400) for kind in (SHORT, LONG) for index in range(150))
    parts = (
        part for text in texts for part in (text.prompt, text.answer, "user\nassistant\nfinal")
    )
    # in bytes: a real vocabulary's Japanese words have some four letters at most
    tokenizer = _byte_pairs(parts, min(words, CHAT_WORDS), form.special, max_token_length=12)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right",
        pad_token=form.special[0],
        eos_token=form.end,
        additional_special_tokens=list(form.special),
        chat_template=form.template,
    )
