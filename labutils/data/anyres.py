"""Images of any resolution as tokens, and ways to make batches of examples whose lengths differ.

AnyRes (Liu et al. 2024, LLaVA-NeXT) sees an image once as a whole and once cut into tiles: the grid
of tiles that wastes least of the image is chosen, the image scaled into it, each tile encoded, and
what lies in the padding left out again, with a newline token after each row of patches. So the
number of tiles and of tokens follows the image's shape.

`Geometry` says how many there are, and for every image token which patch of which tile it is:
computed here, on the CPU beside the training, so that no step has to ask the device for a length.
`Examples` turns photographs into token ids and tiles with the real processor. `Collate` makes a
batch of one of these forms (the recipe's `shapes`):

as-they-come   one example a row, as long as the longest one in the batch
fixed, padded  one example a row, always `budget` tokens long
packed         as many examples as fit into a row of `budget` tokens; `PackedOrder` chooses them

Padding comes after the text: under causal attention no token sees what comes after it, so one
example a row needs no mask at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labutils.data import packing
from labutils.data.generated_images import LEAF_CLASSES

PROMPT = "[INST] <image>\nDescribe [/INST]"
"""Article A2's prompt in the chat form of Mistral; the answer is the photograph's class."""
Size = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """A tile has `tile` x `tile` pixels and patches of `patch` x `patch`; `pinpoints` are the
    grids' (height, width) in pixels. Sizes of images are (height, width) throughout."""

    tile: int
    patch: int
    pinpoints: tuple[Size, ...]

    @property
    def side(self) -> int:
        """Patches along a tile's side."""
        return self.tile // self.patch

    def grid(self, size: Size) -> Size:
        """Rows and columns of tiles that an image is cut into."""
        from transformers.image_processing_utils import select_best_resolution

        height, width = select_best_resolution(size, [list(p) for p in self.pinpoints])
        return height // self.tile, width // self.tile

    def tiles(self, size: Size) -> int:
        """Tiles that the vision tower encodes for an image, the whole image's first."""
        rows, columns = self.grid(size)
        return 1 + rows * columns

    def tokens(self, size: Size) -> int:
        """Image tokens of an image."""
        return len(self.sources(size))

    @functools.lru_cache(maxsize=1024)  # noqa: B019  a frozen value with few sizes
    def sources(self, size: Size) -> Tensor:
        """Where each image token comes from, int64 [tokens]: 0 is the newline, 1 + k the k-th patch
        of the tiles.
        """
        from transformers.models.llava_next.modeling_llava_next import unpad_image

        rows, columns = self.grid(size)
        side = self.side
        patches = 1 + torch.arange((1 + rows * columns) * side * side)
        whole, tiles = patches.split([side * side, rows * columns * side * side])
        picture = (
            tiles.view(rows, columns, side, side)
            .transpose(1, 2)
            .reshape(1, rows * side, columns * side)
        )
        picture = unpad_image(picture, size)[0]
        return torch.cat([whole, F.pad(picture, (0, 1), value=0).flatten()])


# -------------------------------------------------------------------------- one example


class Examples:
    """What a row of photographs becomes when it is read, for `datasets`' with_transform: {"image":
    [PIL], "labels": [int]} to lists of "input_ids" and "labels" (int64 [tokens]), "pixel_values"
    (float32 [tiles, 3, tile, tile]) and "image_sizes" ((height, width)).

    processor: a LlavaNextProcessor. square: force images to that many pixels a side first (0: leave
    them), as article A2's fixed shapes do.
    """

    def __init__(self, processor: Callable[..., Any], square: int = 0) -> None:
        self.processor = processor
        self.square = square
        tokenizer = processor.tokenizer
        texts = [name.replace("_", " ") for name in LEAF_CLASSES]
        self.answers = [
            [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            for text in texts
        ]

    def __call__(self, rows: dict[str, list]) -> dict[str, list]:
        examples = [self.example(*row) for row in zip(rows["image"], rows["labels"], strict=True)]
        return {name: [example[name] for example in examples] for name in examples[0]}

    def example(self, image: Any, label: int) -> dict[str, Any]:
        """One photograph and its class."""
        from PIL import Image

        image = image.convert("RGB")
        if self.square:
            image = image.resize((self.square, self.square), Image.Resampling.BILINEAR)
        made = self.processor(text=PROMPT, images=image, return_tensors="pt")
        prompt, answer = made["input_ids"][0], torch.tensor(self.answers[label])
        return {
            "input_ids": torch.cat([prompt, answer]),
            "labels": torch.cat([torch.full_like(prompt, packing.IGNORED), answer]),
            "pixel_values": made["pixel_values"][0],
            "image_sizes": (image.height, image.width),
        }

    def text_tokens(self, label: int) -> tuple[int, int]:
        """Tokens of an example that aren't its image's, and how many are the answer's."""
        prompt, answer = self.processor.tokenizer(PROMPT).input_ids, self.answers[label]
        return len(prompt) - 1 + len(answer), len(answer)


# -------------------------------------------------------------------------- batches


class Collate(packing.Collate):
    """Makes a batch of examples with images in the form of `layout`; picklable. image: id of the
    image token.

    As `packing.Collate`, and besides: for the model as published, what its processor gives for a
    batch. For ours, with r rows of n tokens and t tiles: "sources" int64 [r, n] (see
    `Geometry.sources`; -1 where a token is text); "pixel_values" float32 [t, 3, tile, tile], or
    "features" of the tiles.
    """

    def __init__(
        self, geometry: Geometry, layout: packing.Layout, image: int, pad: int, published: bool
    ) -> None:
        super().__init__(layout, pad, published)
        self.geometry, self.image = geometry, image

    def tiles(self, example: dict[str, Any]) -> int:
        return len(_tiles(example))

    def as_published(self, examples: list[dict[str, Any]], length: int) -> dict[str, Tensor]:
        tiles = max(len(example["pixel_values"]) for example in examples)
        pixels = [packing.fill_up(e["pixel_values"], tiles, 0.0) for e in examples]
        sizes = torch.tensor([e["image_sizes"] for e in examples])
        images = {"pixel_values": torch.stack(pixels), "image_sizes": sizes}
        return super().as_published(examples, length) | images

    def in_rows(self, rows: list[list[dict[str, Any]]], length: int) -> dict[str, Tensor]:
        examples = [example for row in rows for example in row]
        firsts = iter(np.cumsum([0] + [self.tiles(example) for example in examples]).tolist())
        parts = [[{"sources": self._sources(e, next(firsts))} for e in row] for row in rows]
        tiles = torch.cat([_tiles(example) for example in examples])
        kind = "features" if "features" in examples[0] else "pixel_values"
        room = self.layout.batch_tiles(len(tiles), len(rows))
        batch = super().in_rows(rows, length) | packing.stack_rows(parts, length, {"sources": -1})
        return batch | {kind: packing.fill_up(tiles, room, 0.0)}

    def _sources(self, example: dict[str, Any], first_tile: int) -> Tensor:
        """Where each token of an example comes from, whose tiles begin with `first_tile`."""
        places = self.geometry.sources(tuple(example["image_sizes"]))
        places = torch.where(places > 0, places + first_tile * self.geometry.side**2, places)
        sources = torch.full_like(example["input_ids"], -1)
        sources[example["input_ids"] == self.image] = places
        return sources


def _tiles(example: dict[str, Any]) -> Tensor:
    """An example's tiles, as pixels or as features."""
    return example["features"] if "features" in example else example["pixel_values"]
