"""Batches of examples whose lengths differ: padded rows, or rows that several examples fill."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labutils.data.loader import ResumableOrder

IGNORED = -100
ANSWERS = 64
"""Places for positions that have an answer to predict come in powers of two from here, so that
shapes seldom change.
"""


@dataclass(frozen=True)
class Layout:
    """The static part of a batch's form: what `shapes` asks for at one scale with one dataset.

    budget: tokens of a row that has a fixed length. tiles: tiles that a row of that length may
    bring. segments: examples that it holds at most. multiple: what all rows' lengths are a multiple
    of. longest: tokens of the longest example, which attention in packed rows counts on.
    """

    shapes: str
    budget: int
    tiles: int
    segments: int
    multiple: int = 1
    longest: int = 0

    @property
    def packs(self) -> bool:
        return self.shapes == "packed"

    def row_tokens(self, lengths: Sequence[int]) -> int:
        """How long the rows of a batch are. Raises `ValueError` where the longest example doesn't
        fit.
        """
        longest = max(lengths)
        if longest > self.budget and self.shapes != "as-they-come":
            raise ValueError(
                f"An example has {longest} tokens, and shapes={self.shapes!r} has room for "
                f"{self.budget} (token_budget as it is at this scale). Use a larger token_budget, "
                "or shapes='as-they-come'."
            )
        room = longest if self.shapes == "as-they-come" else self.budget
        return -(-room // self.multiple) * self.multiple

    def batch_tiles(self, tiles: int, rows: int) -> int:
        """How many tiles a batch of `rows` rows is given, when it has `tiles`; the others are
        empty.
        """
        return tiles if self.shapes in ("as-they-come", "fixed") else rows * self.tiles

    def rows(self, lengths: Sequence[int], tiles: Sequence[int]) -> list[list[int]]:
        """The examples of each row, in order: one each, or as many as fit and may be in it."""
        if not self.packs:
            return [[index] for index in range(len(lengths))]
        rows: list[list[int]] = []
        room = room_tiles = 0
        for index, (length, count) in enumerate(zip(lengths, tiles, strict=True)):
            if length > room or count > room_tiles or len(rows[-1]) == self.segments:
                rows.append([])
                room, room_tiles = self.budget, self.tiles
            rows[-1].append(index)
            room, room_tiles = room - length, room_tiles - count
        return rows


class PackedOrder(ResumableOrder):
    """Fills rows with examples: each entry is the list of those that `rows` rows of one micro-batch
    hold.

    Examples are drawn in a random order; a row starts with the one that waits longest and then
    takes those of the next `LOOK_AHEAD` that leave least of it empty. An epoch has `length` rows,
    as many as hold `epoch_length` examples on average; `go_to` counts rows.
    """

    LOOK_AHEAD = 32

    def __init__(
        self,
        lengths: Sequence[int],
        tiles: Sequence[int],
        layout: Layout,
        rows: int,
        epoch_length: int,
        seed: int,
    ) -> None:
        self.lengths, self.tiles, self.layout = lengths, tiles, layout
        self.rows = rows
        layout.row_tokens(lengths)
        mean = sum(lengths) / len(lengths)
        super().__init__(max(1, round(epoch_length * mean / layout.budget / rows)) * rows, seed)

    def __iter__(self) -> Iterator[list[int]]:
        stream = self._stream(self.chance)
        waiting = [next(stream) for _ in range(self.LOOK_AHEAD)]
        filled: list[int] = []
        for row in range(self.length):
            filled += self._row(waiting, stream)
            if (row + 1) % self.rows == 0:
                if row >= self.start:
                    yield filled
                filled = []

    def __len__(self) -> int:
        return (self.length - self.start) // self.rows

    def _stream(self, chance: np.random.Generator) -> Iterator[int]:
        while True:
            yield from chance.permutation(len(self.lengths)).tolist()

    def _row(self, waiting: list[int], stream: Iterator[int]) -> list[int]:
        row: list[int] = []
        room, tiles = self.layout.budget, self.layout.tiles
        places = [0]
        while places:  # what took their place may fit, too
            taken = [waiting[place] for place in places]
            waiting[:] = [example for place, example in enumerate(waiting) if place not in places]
            waiting += itertools.islice(stream, len(taken))
            row += taken
            room -= sum(self.lengths[example] for example in taken)
            tiles -= sum(self.tiles[example] for example in taken)
            places = fullest(
                [self.lengths[e] for e in waiting], [self.tiles[e] for e in waiting], room, tiles
            )
            places = places[: self.layout.segments - len(row)]
        return row


def fullest(lengths: Sequence[int], tiles: Sequence[int], room: int, most_tiles: int) -> list[int]:
    """Which of these examples fill `room` tokens best with at most `most_tiles` tiles; earlier ones
    where that is open.

    After them no other one of the examples fits any more. The subset-sum problem, its reachable
    sums as an integer's bits; of the many subsets with one sum only the one of the earliest
    examples is tried.
    """
    reachable = [1]
    for length in lengths:
        reachable.append((reachable[-1] | reachable[-1] << length) & ((2 << room) - 1))
    for total in range(reachable[-1].bit_length() - 1, -1, -1):
        if reachable[-1] >> total & 1:
            places = _summands(lengths, reachable, total)
            if sum(tiles[place] for place in places) <= most_tiles:
                break
    room, most_tiles = room - total, most_tiles - sum(tiles[place] for place in places)
    for place, (length, count) in enumerate(zip(lengths, tiles, strict=True)):
        if place not in places and length <= room and count <= most_tiles:
            places.append(place)
            room, most_tiles = room - length, most_tiles - count
    return places


def _summands(lengths: Sequence[int], reachable: Sequence[int], total: int) -> list[int]:
    """Places of lengths that add up to `total`, ascending."""
    places = []
    for place in reversed(range(len(lengths))):
        if not reachable[place] >> total & 1:  # not without this one
            places.append(place)
            total -= lengths[place]
    return places[::-1]


def left_over(left: int, longest: int) -> list[int]:
    """What is left of a row, as documents that aren't longer than the `longest` example."""
    return [min(longest, left - start) for start in range(0, left, longest)] or [0]


def boundaries(rows: Sequence[Sequence[int]], length: int, segments: int, longest: int) -> Tensor:
    """Where each document of a batch of flattened rows starts and ends, int32 [rows * (segments +
    rest) + 1].

    rows: the lengths of each row's documents, at most `segments`; what is left of a row of `length`
    tokens makes more, at most `rest` of them, as none may be longer than the `longest` example.
    Empty ones at the end make up for those that aren't there, so that the shape stays the same.
    """
    documents = [[*row, *left_over(length - sum(row), longest)] for row in rows]
    marks = list(itertools.accumulate(itertools.chain(*documents), initial=0))
    wanted = 1 + len(rows) * (segments + math.ceil(length / longest))
    return torch.tensor(marks + [marks[-1]] * (wanted - len(marks)), dtype=torch.int32)


def answer_room(answers: int) -> int:
    """Places that a batch with so many answers' tokens has for them."""
    return max(ANSWERS, 1 << max(0, answers - 1).bit_length())


def answer_places(targets: Tensor) -> dict[str, Tensor]:
    """The places that have a target, filled up with place 0 and target -100."""
    flat = targets.flatten()
    (places,) = (flat != IGNORED).nonzero(as_tuple=True)
    room = answer_room(len(places))
    return {
        "answers": fill_up(places, room, 0),
        "answer_targets": fill_up(flat[places], room, IGNORED),
    }


def fill_up(tensor: Tensor, length: int, value: float) -> Tensor:
    """`tensor` made `length` long in its first dimension with `value`."""
    others = [0, 0] * (tensor.dim() - 1)  # the last dimension comes first
    return F.pad(tensor, [*others, 0, length - len(tensor)], value=value)


def stack_rows(
    rows: Sequence[Sequence[Mapping[str, Tensor]]], length: int, fills: Mapping[str, float]
) -> dict[str, Tensor]:
    """name -> [rows, length]: each row's parts behind one another, filled up with `fills[name]`."""
    return {
        name: torch.stack(
            [fill_up(torch.cat([part[name] for part in row]), length, value) for row in rows]
        )
        for name, value in fills.items()
    }


class Collate:
    """Makes a batch of examples ("input_ids" and "labels", int64 [tokens] each) in the form of
    `layout`; picklable. pad: id of the token that fills rows up.

    For the model as published: "input_ids", "attention_mask" and "labels", padded on the right; or
    packed, as libraries take batches without padding: no mask but "position_ids" that start anew at
    0 in each example, whose first label is -100, and all rows behind one another in a single one
    (what fills a row up is one more example). For ours, rows of n tokens: "input_ids", "positions"
    (from 0 in each example) and "targets" (the next token where it is to be predicted, -100
    elsewhere), all int64 [rows, n]; "answers" and "answer_targets" as in `answer_places`; packed
    batches have "boundaries" as well.
    """

    def __init__(self, layout: Layout, pad: int, published: bool) -> None:
        self.layout, self.pad, self.published = layout, pad, published

    def __call__(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        lengths = [len(example["input_ids"]) for example in examples]
        length = self.layout.row_tokens(lengths)
        if self.published and not self.layout.packs:
            return self.as_published(examples, length)
        places = self.layout.rows(lengths, [self.tiles(example) for example in examples])
        rows = [[examples[place] for place in row] for row in places]
        return self.in_one_row(rows, length) if self.published else self.in_rows(rows, length)

    def tiles(self, example: dict[str, Tensor]) -> int:
        """Tiles of an example's image."""
        return 0

    def as_published(self, examples: list[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
        parts = [[e | {"attention_mask": torch.ones_like(e["input_ids"])}] for e in examples]
        fills = {"input_ids": self.pad, "attention_mask": 0, "labels": IGNORED}
        return stack_rows(parts, length, fills)

    def in_one_row(self, rows: list[list[dict[str, Tensor]]], length: int) -> dict[str, Tensor]:
        ids, labels = [], []
        for row in rows:
            left = length - sum(len(example["input_ids"]) for example in row)
            for example in row:
                ids.append(example["input_ids"])
                labels.append(F.pad(example["labels"][1:], (1, 0), value=IGNORED))
            for rest in left_over(left, self.layout.longest):
                ids.append(torch.full((rest,), self.pad))
                labels.append(torch.full((rest,), IGNORED))
        positions = [torch.arange(len(part)) for part in ids]
        parts = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {name: torch.cat(tensors)[None] for name, tensors in parts.items()}

    def in_rows(self, rows: list[list[dict[str, Tensor]]], length: int) -> dict[str, Tensor]:
        parts = [[_with_targets(example) for example in row] for row in rows]
        fills = {"input_ids": self.pad, "positions": 0, "targets": IGNORED}
        batch = stack_rows(parts, length, fills)
        batch |= answer_places(batch["targets"])
        if self.layout.packs:
            documents = [[len(example["input_ids"]) for example in row] for row in rows]
            segments, longest = self.layout.segments, self.layout.longest
            batch["boundaries"] = boundaries(documents, length, segments, longest)
        return batch


def _with_targets(example: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = example["input_ids"]
    targets = F.pad(example["labels"][1:], (0, 1), value=IGNORED)
    return {"input_ids": ids, "positions": torch.arange(len(ids)), "targets": targets}
