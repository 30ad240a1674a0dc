"""Japanese and English texts with the token lengths of the datasets that article A3 trains on.

`japanese_alpaca_data` holds instructions with their answers; articles of Japanese Wikipedia become
examples by taking the body as the prompt and the title as the answer. The article prints one number
for each, the mean length in tokens: 117 and 861, where nothing is longer than 2048. The generated
texts have these means; that lengths are spread as a lognormal distribution (clipped) is ours. Texts
are sentences of a small grammar: what they cost is like the real ones', what they say is not.

A text is a function of (kind, seed, index) alone. `Chat` turns texts into token ids,
`Conversations` holds them, and `Collate` makes batches of them in the forms of `data.packing`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from labutils.data.hub import reaching
from labutils.data.packing import IGNORED, Layout, answer_places, boundaries, fill_up, left_over


@dataclass(frozen=True)
class Kind:
    """One dataset. Lengths in tokens, chat form included: their `mean`, and the deviation `spread`
    of their logarithm before they are clipped. `stretched` names the part of an example that the
    length decides, "prompt" or "answer"."""

    name: str
    hub: str
    subset: str | None
    mean: int
    spread: float
    stretched: str


SHORT = Kind("instructions", "fujiki/japanese_alpaca_data", None, 117, 0.6, "answer")
LONG = Kind("articles", "wikimedia/wikipedia", "20231101.ja", 861, 1.0, "prompt")
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
    below = [
        (place / len(lengths)) ** texts for place in range(len(lengths) + 1)
    ]  # chance that all are among these
    return round(
        sum(length * (b - a) for length, a, b in zip(lengths, below, below[1:], strict=False))
    )


# -------------------------------------------------------------------------- generated texts

PLACES = (
    "青川",
    "北原",
    "大沢",
    "東浜",
    "小諸",
    "三国",
    "白石",
    "高森",
    "西条",
    "豊岡",
    "長瀬",
    "松島",
    "黒部",
    "和田",
    "美山",
    "富沢",
    "竹原",
    "浅間",
    "湯沢",
    "石狩",
)
THINGS = (
    "鉄橋",
    "駅",
    "ダム",
    "城",
    "神社",
    "図書館",
    "高校",
    "温泉",
    "港",
    "トンネル",
    "美術館",
    "銀行",
    "祭り",
    "街道",
    "製鉄所",
    "灯台",
    "動物園",
    "運河",
)
PEOPLE = (
    "佐藤",
    "鈴木",
    "高橋",
    "田中",
    "伊藤",
    "渡辺",
    "山本",
    "中村",
    "小林",
    "加藤",
    "吉田",
    "山田",
)
QUALITIES = ("古い", "静かな", "大規模な", "有名な", "珍しい", "重要な", "近代的な", "小さな")
JAPANESE = (
    "{place}{thing}は、{year}年に完成した{quality}施設である。",
    "設計は{person}が担当し、工事には{number}人が参加した。",
    "{year}年の台風で一部が壊れたが、翌年には修復された。",
    "現在は年間およそ{number}人が訪れ、地域の経済を支えている。",
    "全長は{number}メートルで、完成した当時は国内で最も長かった。",
    "周辺には{place}の市街地が広がり、{thing}や学校が並んでいる。",
    "{person}の研究によれば、その起源は{year}年以前にさかのぼる。",
    "地元では{quality}建物として知られ、写真集にも取り上げられた。",
    "管理は{place}市が行い、費用の一部は寄付によって賄われている。",
    "{year}年には{person}らの提案で保存運動が始まった。",
    "なお、同じ名前の{thing}が{place}にもあるが、関係はない。",
    "第{number}回の調査では、{quality}資料が多数見つかっている。",
)
ENGLISH_PLACES = (
    "Northfield",
    "Harbour Bay",
    "Stonebridge",
    "Eastwick",
    "Lake Arlen",
    "Redhill",
    "Marston",
    "Oakley",
)
ENGLISH_THINGS = (
    "bridge",
    "station",
    "library",
    "harbour",
    "festival",
    "museum",
    "canal",
    "lighthouse",
    "school",
)
ENGLISH = (
    "The {place} {thing} was opened in {year} and rebuilt twice since then.",
    "About {number} visitors come each year, most of them in early autumn.",
    "Its {thing} is run by the town of {place}, which pays for half of the repairs.",
    "A survey in {year} counted {number} objects of historical interest.",
    "The architect had worked on a {thing} in {place} before.",
    "Local newspapers described it as too large for a town of {number} people.",
    "After the flood of {year} the lower part was closed for several months.",
    "It is not to be confused with the {thing} of the same name near {place}.",
)
REQUESTS = (
    "{place}の{thing}について、{quality}点を中心に説明してください。",
    "次の{thing}の紹介文を書いてください。場所は{place}、完成は{year}年です。",
    "{person}さんに{place}を案内する計画を立ててください。",
    "なぜ{place}には{thing}が多いのですか。理由を挙げてください。",
)
ENGLISH_REQUESTS = (
    "Describe the {thing} of {place} in a few sentences.",
    "Why was the {place} {thing} rebuilt after {year}?",
)
IN_ENGLISH = 5
"""One text in so many is English."""


def written(kind: Kind, index: int, letters: int, seed: int = 0) -> Text:
    """Text `index` of a kind; the stretched part has at least `letters` characters."""
    rng = np.random.default_rng([seed, index, kind is LONG])
    english = rng.integers(IN_ENGLISH) == 0
    words = _words(rng, english)
    title = (" ".join if english else "".join)((words["place"], words["thing"]))
    sentences, count = [], 0
    while count < letters:
        templates = ENGLISH if english else JAPANESE
        # Every other sentence is about the title's own place and thing.
        told = words if len(sentences) % 2 == 0 else _words(rng, english)
        sentences.append(_pick(rng, templates).format(**told | _numbers(rng)))
        count += len(sentences[-1])
    body = (" " if english else "").join(sentences)
    if kind is LONG:
        return Text(body, title)
    request = _pick(rng, ENGLISH_REQUESTS if english else REQUESTS).format(**words | _numbers(rng))
    return Text(request, body)


def _words(rng: np.random.Generator, english: bool) -> dict[str, str]:
    if english:
        return {"place": _pick(rng, ENGLISH_PLACES), "thing": _pick(rng, ENGLISH_THINGS)}
    lists = {"place": PLACES, "thing": THINGS, "person": PEOPLE, "quality": QUALITIES}
    return {name: _pick(rng, words) for name, words in lists.items()}


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[rng.integers(len(words))]


def _numbers(rng: np.random.Generator) -> dict[str, int]:
    return {"year": int(rng.integers(1600, 2025)), "number": int(rng.integers(2, 9000))}


# -------------------------------------------------------------------------- real texts


def from_hub(kind: Kind, count: int, cache_dir: Path) -> list[Text]:
    """The first `count` examples of the real dataset, shuffled as in article A3. `ConnectionError`
    where it isn't.
    """
    import datasets

    with reaching(kind.hub):
        # Wikipedia is read as far as it is needed: whole it has gigabytes.
        rows = datasets.load_dataset(
            kind.hub,
            kind.subset,
            split="train",
            streaming=kind is LONG,
            cache_dir=str(cache_dir / "hub"),
        )
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
        asked, answered = (
            {"role": "user", "content": "PROMPT"},
            {"role": "assistant", "content": "ANSWER"},
        )
        whole = tokenizer.apply_chat_template([asked, answered], tokenize=False)
        before, _, rest = whole.partition("PROMPT")
        between, _, after = rest.partition("ANSWER")
        self.before, self.between, self.after = (
            self._ids(text) for text in (before, between, after)
        )

    @property
    def form(self) -> int:
        """Tokens of an example that are neither the prompt's nor the answer's."""
        return len(self.before) + len(self.between) + len(self.after)

    def conversation(self, text: Text, length: int, stretched: str = "prompt") -> Conversation:
        """`text` in at most `length` tokens: the `stretched` part is cut to what the other part
        leaves, and that one to half of the room."""
        room = length - self.form
        prompt, answer = self._ids(text.prompt), self._ids(text.answer)
        if stretched == "prompt":
            answer = answer[: room // 2]
            prompt = prompt[: room - len(answer)]
        else:
            prompt = prompt[: room // 2]
            answer = answer[: room - len(prompt)]
        ids = [*self.before, *prompt, *self.between, *answer, *self.after]
        return torch.tensor(ids), len(self.before) + len(prompt) + len(self.between)

    def generated(
        self, kind: Kind, count: int, shorter: int = 1, seed: int = 0
    ) -> list[Conversation]:
        """`count` generated examples with the lengths of the kind."""
        return [
            self._written(kind, index, length, seed)
            for index, length in enumerate(token_lengths(kind, count, shorter))
        ]

    def _written(self, kind: Kind, index: int, length: int, seed: int) -> Conversation:
        """Example `index`, of exactly `length` tokens."""
        letters = 3 * length
        while True:
            conversation = self.conversation(
                written(kind, index, letters, seed), length, kind.stretched
            )
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


class Collate:
    """Makes a batch of examples in the form of `layout`; picklable. pad: id of the token that fills
    rows up.

    For the model as published: "input_ids", "attention_mask" and "labels", padded on the right; or
    packed, as libraries take batches without padding: no mask but "position_ids" that start anew at
    0 in each example, whose first label is -100, and all rows behind one another in a single one
    (what fills a row up is one more example). For ours, rows of n tokens: "input_ids", "positions"
    (from 0 in each example) and "targets" (the next token where it is to be predicted, -100
    elsewhere), all int64 [rows, n]; "answers" and "answer_targets" as in `packing.answer_places`;
    packed batches have "boundaries" as well.
    """

    def __init__(self, layout: Layout, pad: int, published: bool) -> None:
        self.layout, self.pad, self.published = layout, pad, published

    def __call__(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        lengths = [len(example["input_ids"]) for example in examples]
        length = self.layout.row_tokens(lengths)
        if self.published and self.layout.packs:
            return self._in_one_row(examples, lengths, length)
        if self.published:
            parts = [
                [example | {"attention_mask": torch.ones_like(example["input_ids"])}]
                for example in examples
            ]
            return _filled(
                parts, length, {"input_ids": self.pad, "attention_mask": 0, "labels": IGNORED}
            )
        rows = self.layout.rows(lengths, [0] * len(examples))
        parts = [[_with_targets(examples[index]) for index in row] for row in rows]
        batch = _filled(parts, length, {"input_ids": self.pad, "positions": 0, "targets": IGNORED})
        batch |= answer_places(batch["targets"])
        if self.layout.packs:
            documents = [[lengths[index] for index in row] for row in rows]
            batch["boundaries"] = boundaries(
                documents, length, self.layout.segments, self.layout.longest
            )
        return batch

    def _in_one_row(
        self, examples: list[dict[str, Tensor]], lengths: list[int], length: int
    ) -> dict[str, Tensor]:
        parts = []
        for row in self.layout.rows(lengths, [0] * len(examples)):
            left = length - sum(lengths[index] for index in row)
            parts += [_apart(examples[index]) for index in row]
            parts += [_apart(self._filling(rest)) for rest in left_over(left, self.layout.longest)]
        return {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}

    def _filling(self, length: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.full((length,), self.pad),
            "labels": torch.full((length,), IGNORED),
        }


def _apart(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """An example whose first token is not to be predicted from what stands before it."""
    labels = example["labels"].clone()
    labels[:1] = IGNORED
    return {
        "input_ids": example["input_ids"],
        "position_ids": torch.arange(len(labels)),
        "labels": labels,
    }


def _with_targets(example: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = example["input_ids"]
    targets = F.pad(example["labels"][1:], (0, 1), value=IGNORED)
    return {"input_ids": ids, "positions": torch.arange(len(ids)), "targets": targets}


def _filled(
    rows: list[list[dict[str, Tensor]]], length: int, fills: dict[str, int]
) -> dict[str, Tensor]:
    """Each row's parts one behind the other, filled up."""
    return {
        name: torch.stack(
            [fill_up(torch.cat([part[name] for part in row]), length, value) for row in rows]
        )
        for name, value in fills.items()
    }
