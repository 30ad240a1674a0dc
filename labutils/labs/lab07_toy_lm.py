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
import operator
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from labutils.data.packing import Collate, Layout
from labutils.data.texts import WORDS, Chat, Conversation, Conversations, Text
from labutils.data.tokenizers import chat_tokenizer
from labutils.layers.lora import attach_lora, lora_layers
from labutils.workloads.causal_lm import Size, build_lm
from labutils.workloads.decoder_workload import TARGETS, Rewritten

JAPANESE, SENTENCES = WORDS["japanese"], WORDS["titles"]
STYLES = {
    "explain": "{place}の{thing}についての紹介。",
    "title": "{place}{thing}",
    "place": "{place}",
}
"""Style -> the answer to an article: "An introduction to the bridge of Aokawa.", its bare title, or
the place alone.
"""
WIDTH, LAYERS, RANK = 64, 2, 8
LONGEST = 128
LONGEST_ANSWER = 20
BATCH = 32
RATE = 1e-2
VOCABULARY = 1024
KEPT = 40
"""Pairs of place and thing that are kept for questions."""


class Article(NamedTuple):
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
    def pick(words: Sequence[str]) -> str:
        return words[rng.integers(len(words))]

    sentences = [pick(SENTENCES["naming"]), pick(SENTENCES["besides"])]
    rng.shuffle(sentences)
    facts = {"person": pick(JAPANESE["person"]), "quality": pick(JAPANESE["quality"])}
    facts |= {"year": rng.integers(1600, 2025), "number": rng.integers(2, 900)}
    return Article("".join(sentences).format(place=place, thing=thing, **facts), place, thing)


class Reader:
    """The model, Qwen3's architecture in small, its tokenizer, and its questions: articles that it
    never saw.
    """

    def __init__(self, device: str, questions: int = KEPT) -> None:
        self.device = torch.device(device)
        self.tokenizer = chat_tokenizer("qwen3", VOCABULARY)
        self.chat = Chat(self.tokenizer)
        self.questions = articles(questions, kept=True, seed=0)
        words = -(-len(self.tokenizer) // 64) * 64
        size = Size(WIDTH, LAYERS, WIDTH // 32, WIDTH // 64, 32, 3 * WIDTH, words, tied=True)
        torch.manual_seed(0)
        self.lm = build_lm(size, self.device, torch.float32)
        self.answered: dict[str | None, list[str]] = {}

    def learn_to_explain(self, steps: int) -> list[float]:
        """Train all weights on articles and explanations, and freeze them; the losses."""
        losses = self._train(list(self.lm.parameters()), "explain", steps)
        self.lm.requires_grad_(False)
        return losses

    def fine_tune(self, style: str, steps: int) -> list[float]:
        """Train an adapter named like its style, and leave it in use; the losses."""
        trained = attach_lora(self.lm, TARGETS, RANK, 2 * RANK, "plain", seed=0, name=style)
        return self._train(trained, style, steps)

    def matches(self, style: str | None, wanted: str) -> float:
        """The share of answers that are, to the letter, those of the style `wanted`."""
        wanted_answers = [article.answer(wanted) for article in self.questions]
        right = map(operator.eq, self.answers(style), wanted_answers)
        return statistics.fmean(right)

    @torch.no_grad()
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
        conversations = [self._conversation(article, "title") for article in self.questions]
        prompts = self.tokenizer.pad(
            {"input_ids": [ids[:asked].tolist() for ids, asked in conversations]},
            padding_side="left",
            return_tensors="pt",
        ).to(self.device)
        made = self.lm.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        made = made[:, prompts["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(made, skip_special_tokens=True)
        self.answered[style] = [text.strip() for text in texts]
        return self.answered[style]

    # ---------------------------------------------------------------------------- within

    def _train(self, trained: list[nn.Parameter], style: str, steps: int) -> list[float]:
        self.answered.clear()
        self.lm.train()
        self.lm.config._attn_implementation = "documents"
        model = Rewritten(self.lm, "answers")  # logits where there is an answer, and nowhere else
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=steps, pct_start=0.1
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
        conversations = [
            self._conversation(article, style)
            for article in articles(steps * BATCH, kept=False, seed=1)
        ]
        rows = Conversations(conversations, everything=False)
        layout = Layout("as-they-come", LONGEST, 0, 1)
        collate = Collate(layout, self.tokenizer.pad_token_id, published=False)
        order = np.random.default_rng(0).permutation(len(rows)).reshape(steps, BATCH)
        for chosen in order.tolist():
            batch = collate([rows[index] for index in chosen])
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _conversation(self, article: Article, style: str) -> Conversation:
        return self.chat.conversation(Text(article.body, article.answer(style)), LONGEST)
