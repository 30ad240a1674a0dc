"""Places of image tokens against transformers' own, and rows filled with examples against brute
force."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.data.packing import Layout, PackedOrder, boundaries, fullest
from labutils.workloads.llava import SIZES

sides = st.integers(20, 2000)


@settings(deadline=None, max_examples=60)
@given(st.tuples(sides, sides).filter(lambda size: 1 / 8 < size[0] / size[1] < 8))
def test_places_are_where_transformers_puts_them(size):
    """Features that are their own number, packed by transformers' model."""
    from transformers.models.llava_next import modeling_llava_next as library

    geometry = SIZES["full"].geometry
    pinpoints = [list(point) for point in geometry.pinpoints]
    tiles = library.image_size_to_num_patches(size, pinpoints, geometry.tile)
    assert tiles == geometry.tiles(size)
    features = torch.arange(1.0, 1 + tiles * 576).view(1, tiles, 576, 1)
    vision = SimpleNamespace(image_size=336, patch_size=14)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints)
    packed, (count,) = library.LlavaNextModel.pack_image_features(
        SimpleNamespace(config=config),
        list(features),
        torch.tensor([size]),
        "default",
        image_newline=torch.zeros(1),
    )
    assert packed[0].flatten().long().tolist() == geometry.sources(size).tolist()
    assert count == geometry.tokens(size)


examples = st.tuples(st.integers(1, 40), st.integers(1, 5))


@given(st.lists(examples, max_size=8), st.integers(0, 120), st.integers(0, 30))
def test_rows_are_filled_as_well_as_can_be(sizes, room, most_tiles):
    lengths, tiles = [n for n, _ in sizes], [t for _, t in sizes]
    places = fullest(lengths, tiles, room, most_tiles)
    used, used_tiles = (sum(what[place] for place in places) for what in (lengths, tiles))
    assert len(set(places)) == len(places) and used <= room and used_tiles <= most_tiles
    left = [place for place in range(len(lengths)) if place not in places]
    assert not any(used + lengths[p] <= room and used_tiles + tiles[p] <= most_tiles for p in left)
    subsets = [itertools.combinations(lengths, n) for n in range(len(lengths) + 1)]
    if sum(tiles) <= most_tiles:
        sums = map(sum, itertools.chain.from_iterable(subsets))
        assert used == max(total for total in sums if total <= room)


@given(
    st.lists(st.tuples(st.integers(5, 40), st.integers(1, 5)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_packed_rows(sizes, segments, rows):
    """Rows fit and hold no more than they may; an epoch can be resumed."""
    lengths, tiles = (list(part) for part in zip(*sizes, strict=True))
    layout = Layout("packed", 60, 8, segments, longest=max(lengths))
    order = PackedOrder(lengths, tiles, layout, rows, 20, seed=1)
    batches = list(order)
    assert len(batches) == len(order) == order.length // rows
    for batch in batches:
        filled = layout.rows([lengths[i] for i in batch], [tiles[i] for i in batch])
        documents = [[lengths[batch[place]] for place in row] for row in filled]
        assert len(documents) == rows and max(map(len, documents)) <= segments
        assert all(sum(tiles[batch[place]] for place in row) <= layout.tiles for row in filled)
        marks = boundaries(documents, 60, segments, layout.longest)
        assert marks[-1] == 60 * rows and marks.diff().min() >= 0
        assert marks.diff().max() <= layout.longest
    order.go_to(0, len(batches) // 2 * rows)
    assert list(order) == batches[len(batches) // 2 :]
