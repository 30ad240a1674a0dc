"""A small language model that a lab really trains: first to explain articles, then, with LoRA, to
answer otherwise.

    reader = Reader(device)
    reader.learn_to_explain(steps)                    # all weights, from scratch
    reader.fine_tune("title", steps)                  # an adapter: body in, bare title out
    reader.answers("title"), reader.answers(None)     # with an adapter, and without one

An article here is two sentences; one of them names what it is about, a place and a thing, and that
is its title. Some pairs of place and thing are kept for questions: no answer that is judged was
ever seen in training. Random weights have no style that fine-tuning could change; these have
learned one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.data.packing import Collate, Layout
from labutils.data.texts import (
    WORDS,
    Chat,
    Conversation,
    Conversations,
    Text,
)
from labutils.data.tokenizers import chat_tokenizer
from labutils.layers.lora import attach_lora, lora_layers
from labutils.workloads.causal_lm import Size, build_lm
from labutils.workloads.decoder import TARGETS, Rewritten

JAPANESE = WORDS["japanese"]

STYLES = {
    "explain": "{place}の{thing}についての紹介。",
    "title": "{place}{thing}",
    "place": "{place}",
}
"""Style -> the answer to an article: "An introduction to the bridge of Aokawa.", its bare title, or
the place alone.
"""
NAMING = (
    "{place}{thing}は{year}年に完成した。",
    "{year}年、{place}{thing}が開かれた。",
    "{quality}{place}{thing}は、よく知られている。",
)
BESIDES = (
    "設計は{person}が担当した。",
    "全長は{number}メートルである。",
    "{year}年の台風で一部が壊れた。",
    "費用は{person}らの寄付で賄われた。",
    "年間およそ{number}人が訪れる。",
)
RANK = 8
LONGEST = 128
LONGEST_ANSWER = 20
BATCH = 32
WORDS = 1024
KEPT = 40
"""Pairs of place and thing that are kept for questions."""


@dataclass(frozen=True)
class Article:
    """One article and what it is about."""

    body: str
    place: str
    thing: str

    def answer(self, style: str) -> str:
        return STYLES[style].format(place=self.place, thing=self.thing)


def articles(count: int, kept: bool, seed: int) -> list[Article]:
    """`count` articles on pairs that are kept for questions, or on the others."""
    pairs = list(itertools.product(JAPANESE["place"], JAPANESE["thing"]))
    order = np.random.default_rng(0).permutation(len(pairs))
    mine = order[:KEPT] if kept else order[KEPT:]
    rng = np.random.default_rng([seed, kept])
    return [_written(rng, *pairs[mine[index % len(mine)]]) for index in range(count)]


def _written(rng: np.random.Generator, place: str, thing: str) -> Article:
    sentences = [_pick(rng, NAMING), _pick(rng, BESIDES)]
    rng.shuffle(sentences)
    facts = {"person": _pick(rng, JAPANESE["person"]), "quality": _pick(rng, JAPANESE["quality"])}
    facts |= {"year": int(rng.integers(1600, 2025)), "number": int(rng.integers(2, 900))}
    body = "".join(sentence.format(place=place, thing=thing, **facts) for sentence in sentences)
    return Article(body, place, thing)


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[rng.integers(len(words))]


class Reader:
    """The model, Qwen3's architecture in small, its tokenizer, and its questions: articles that it
    never saw.
    """

    def __init__(
        self, device: str, width: int = 64, layers: int = 2, questions: int = KEPT, seed: int = 0
    ) -> None:
        self.device, self.seed = torch.device(device), seed
        self.tokenizer = chat_tokenizer("qwen3", WORDS)
        self.chat = Chat(self.tokenizer)
        self.questions = articles(questions, kept=True, seed=seed)
        words = -(-len(self.tokenizer) // 64) * 64
        size = Size(width, layers, width // 32, width // 64, 32, 3 * width, words, tied=True)
        torch.manual_seed(seed)
        self.lm = build_lm(size, self.device, torch.float32)
        self.answered: dict[str | None, list[str]] = {}

    def learn_to_explain(self, steps: int, rate: float = 1e-2) -> list[float]:
        """Train all weights on articles and explanations, and freeze them; the losses."""
        losses = self._train(list(self.lm.parameters()), "explain", steps, rate)
        self.lm.requires_grad_(False)
        return losses

    def fine_tune(self, style: str, steps: int, rate: float = 1e-2) -> list[float]:
        """Train an adapter named like its style, and leave it in use; the losses."""
        trained = attach_lora(self.lm, TARGETS, RANK, 2 * RANK, "plain", seed=self.seed, name=style)
        return self._train(trained, style, steps, rate)

    def answers(self, style: str | None) -> list[str]:
        """What the model answers to its questions with the adapter of this name; None: without one.

        It is asked once: it answers the same until it is trained further.
        """
        if style in self.answered:
            return self.answered[style]
        for layer in lora_layers(self.lm).values():
            layer.active_adapter = style or ""
        self.lm.eval()
        self.lm.config._attn_implementation = "sdpa"  # which answers token by token
        self.answered[style] = self._answered(
            [self._conversation(article, "title") for article in self.questions]
        )
        return self.answered[style]

    def matches(self, style: str | None, wanted: str) -> float:
        """The share of answers that are, to the letter, those of the style `wanted`."""
        pairs = zip(self.answers(style), self.questions, strict=True)
        return sum(answer == article.answer(wanted) for answer, article in pairs) / len(
            self.questions
        )

    # ---------------------------------------------------------------------------- within

    def _train(
        self, trained: list[nn.Parameter], style: str, steps: int, rate: float
    ) -> list[float]:
        self.answered.clear()
        self.lm.train()
        self.lm.config._attn_implementation = "documents"
        model = Rewritten(self.lm, "answers")  # logits where there is an answer, and nowhere else
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=steps, pct_start=0.1
        )
        losses = []
        for batch in self._batches(style, steps):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def _batches(self, style: str, steps: int) -> Iterator[dict[str, Tensor]]:
        told = articles(steps * BATCH, kept=False, seed=self.seed + 1)
        rows = Conversations(
            [self._conversation(article, style) for article in told], everything=False
        )
        collate = Collate(
            Layout("as-they-come", LONGEST, 0, 1), self.tokenizer.pad_token_id, published=False
        )
        order = np.random.default_rng(self.seed).permutation(len(rows)).reshape(steps, BATCH)
        for chosen in order.tolist():
            batch = collate([rows[index] for index in chosen])
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _conversation(self, article: Article, style: str) -> Conversation:
        return self.chat.conversation(Text(article.body, article.answer(style)), LONGEST)

    @torch.no_grad()
    def _answered(self, conversations: list[Conversation]) -> list[str]:
        longest, pad = max(asked for _, asked in conversations), self.tokenizer.pad_token_id
        prompts = [
            F.pad(ids[:asked], (longest - asked, 0), value=pad) for ids, asked in conversations
        ]
        given = torch.stack(prompts).to(self.device)
        made = self.lm.generate(
            given,
            attention_mask=(given != pad).long(),
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        texts = self.tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
        return [text.strip() for text in texts]
