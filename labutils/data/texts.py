"""Japanese and English texts with the token lengths of the datasets that article A3 trains on.

`japanese_alpaca_data` holds instructions with their answers; articles of Japanese Wikipedia become
examples by taking the body as the prompt and the title as the answer. The article prints one number
for each, the mean length in tokens: 117 and 861, where nothing is longer than 2048. The generated
texts have these means; that lengths are spread as a lognormal distribution (clipped) is ours. Texts
are sentences of a small grammar: what they cost is like the real ones', what they say is not.

A text is a function of (kind, index) alone. `Chat` turns texts into token ids, `Conversations`
holds them, and `data.packing.Collate` makes batches of them.
"""

from __future__ import annotations

import functools
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labutils.data.file_cache import reaching, rows_of
from labutils.data.packing import IGNORED


@dataclass(frozen=True)
class Kind:
    """One dataset. Lengths in tokens, chat form included: their `mean`, and the deviation `spread`
    of their logarithm before they are clipped. `stretched` names the part of an example that the
    length decides, "prompt" or "answer"."""

    hub: str
    subset: str | None
    mean: int
    spread: float
    stretched: str


SHORT = Kind("fujiki/japanese_alpaca_data", None, 117, 0.6, "answer")
LONG = Kind("wikimedia/wikipedia", "20231101.ja", 861, 1.0, "prompt")
LONGEST = 2048
"""Article A3's max_seq_length."""
SHORTEST = 48
GOLDEN = (5**0.5 - 1) / 2
SHUFFLE = 42
"""Article A3's seed for choosing its examples."""


@dataclass(frozen=True)
class Text:
    """One example as text."""

    prompt: str
    answer: str


def token_lengths(kind: Kind, count: int, shorter: int = 1) -> list[int]:
    """Lengths of `count` examples in tokens, evenly spread over the distribution; `shorter` divides
    all of them.

    The mean is `kind.mean` / `shorter` within rounding, whatever the count: the distribution's
    location is solved for.
    """
    normal = statistics.NormalDist()
    levels = np.array([normal.inv_cdf(((index + 0.5) * GOLDEN) % 1) for index in range(count)])
    low, high = 0.0, 12.0
    for _ in range(50):
        middle = (low + high) / 2
        mean = np.exp(middle + kind.spread * levels).clip(SHORTEST, LONGEST).mean()
        low, high = (middle, high) if mean < kind.mean else (low, middle)
    lengths = np.exp(low + kind.spread * levels).clip(SHORTEST, LONGEST) / shorter
    return lengths.round().astype(int).tolist()


@functools.cache
def expected_longest(kind: Kind, texts: int) -> int:
    """Tokens of the longest of so many texts, on average: to which a batch of them is padded."""
    lengths = sorted(token_lengths(kind, 1000))
    # the chance that all texts are among the shortest 0, 1, 2 ... of a thousand
    below = (np.arange(len(lengths) + 1) / len(lengths)) ** texts
    return round(float(np.diff(below) @ lengths))


# -------------------------------------------------------------------------- generated texts

WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))
"""What generated texts are made of: language -> kind of word, sentence or request -> all."""
IN_ENGLISH = 5
"""One text in so many is English."""


def written(kind: Kind, index: int, letters: int) -> Text:
    """Text `index` of a kind; the stretched part has at least `letters` characters."""
    rng = np.random.default_rng([0, index, kind is LONG])
    english = rng.integers(IN_ENGLISH) == 0
    language = WORDS["english" if english else "japanese"]
    words = _words(rng, language)
    title = (" ".join if english else "".join)((words["place"], words["thing"]))
    sentences, count = [], 0
    while count < letters:
        # Every other sentence is about the title's own place and thing.
        said = words if len(sentences) % 2 == 0 else _words(rng, language)
        sentences.append(_pick(rng, language["sentences"]).format(**said | _numbers(rng)))
        count += len(sentences[-1])
    body = (" " if english else "").join(sentences)
    if kind is LONG:
        return Text(body, title)
    request = _pick(rng, language["requests"]).format(**words | _numbers(rng))
    return Text(request, body)


def _words(rng: np.random.Generator, language: dict[str, list[str]]) -> dict[str, str]:
    kinds = (kind for kind in ("place", "thing", "person", "quality") if kind in language)
    return {kind: _pick(rng, language[kind]) for kind in kinds}


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[rng.integers(len(words))]


def _numbers(rng: np.random.Generator) -> dict[str, int]:
    return {"year": int(rng.integers(1600, 2025)), "number": int(rng.integers(2, 9000))}


# -------------------------------------------------------------------------- real texts


def from_hub(kind: Kind, count: int, cache_dir: Path) -> list[Text]:
    """The first `count` examples of the real dataset, shuffled as in article A3. `ConnectionError`
    where it isn't.
    """
    # Wikipedia is read as far as it is needed: whole it has gigabytes.
    rows = rows_of(kind.hub, cache_dir, kind.subset, streaming=kind is LONG)
    with reaching(kind.hub):
        chosen = rows.shuffle(seed=SHUFFLE).take(count)
        return [_article(row) if kind is LONG else _instruction(row) for row in chosen]


def _article(row: dict[str, Any]) -> Text:
    """The body without its first sentence, which names the title, as article A3 does."""
    first, stop, rest = row["text"].partition("。")
    return Text(rest if rest else first + stop, row["title"])


def _instruction(row: dict[str, Any]) -> Text:
    prompt = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return Text(prompt, row["output"])


# -------------------------------------------------------------------------- token ids

Conversation = tuple[Tensor, int]
"""Token ids, int64 [tokens], and how many of them come before the answer."""


class Chat:
    """A tokenizer's chat form, taken apart: what stands before the prompt, between prompt and
    answer, and after it.

    So an example of a given length is cut inside its prompt or answer and keeps its form; article
    A3 cuts off the end of what is too long, and with it the answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        roles = {"user": "PROMPT", "assistant": "ANSWER"}
        messages = [{"role": role, "content": content} for role, content in roles.items()]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        before, _, rest = whole.partition("PROMPT")
        between, _, after = rest.partition("ANSWER")
        self.before, self.between, self.after = map(self._ids, (before, between, after))

    @property
    def form(self) -> int:
        """Tokens of an example that are neither the prompt's nor the answer's."""
        return len(self.before) + len(self.between) + len(self.after)

    def conversation(self, text: Text, length: int, stretched: str = "prompt") -> Conversation:
        """`text` in at most `length` tokens: the `stretched` part is cut to what the other part
        leaves, and that one to half of the room. Raises `ValueError` where there is no room."""
        room = length - self.form
        if room < 0:
            raise ValueError(f"{length} tokens are less than the chat form's own {self.form}.")
        prompt, answer = self._ids(text.prompt), self._ids(text.answer)
        if stretched == "prompt":
            answer = answer[: room // 2]
            prompt = prompt[: room - len(answer)]
        else:
            prompt = prompt[: room // 2]
            answer = answer[: room - len(prompt)]
        ids = [*self.before, *prompt, *self.between, *answer, *self.after]
        return torch.tensor(ids), len(self.before) + len(prompt) + len(self.between)

    def generated(self, kind: Kind, count: int, shorter: int = 1) -> list[Conversation]:
        """`count` generated examples with the lengths of the kind."""
        return [
            self._written(kind, index, length)
            for index, length in enumerate(token_lengths(kind, count, shorter))
        ]

    def _written(self, kind: Kind, index: int, length: int) -> Conversation:
        """Example `index`, of exactly `length` tokens."""
        letters = 3 * length
        while True:
            text = written(kind, index, letters)
            conversation = self.conversation(text, length, kind.stretched)
            if len(conversation[0]) == length:
                return conversation
            letters *= 2

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


class Conversations(Dataset):
    """Examples in memory: "input_ids" and "labels", int64 [tokens] each. The labels are the
    answer's tokens and what closes it, or with `everything` all tokens; -100 elsewhere."""

    def __init__(self, conversations: Sequence[Conversation], everything: bool) -> None:
        self.conversations, self.everything = conversations, everything

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, asked = self.conversations[index]
        labels = ids.clone()
        if not self.everything:
            labels[:asked] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def predicted(self, index: int) -> int:
        """Tokens of an example that are to be predicted; the first one never is."""
        ids, asked = self.conversations[index]
        return len(ids) - (1 if self.everything else asked)
