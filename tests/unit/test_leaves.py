"""Leaf photographs: files like the real ones, drawn once, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from labutils.data import files as files_of_a_cache
from labutils.data import leaves
from labutils.data.images import captioned_images
from labutils.data.leaves import (
    BEANS,
    CLASSES,
    VARIED,
    draw_leaves,
    image_sizes,
    leaf,
    leaf_class,
    leaf_images,
    leaf_size,
)

FILES = 12


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    leaf_images(folder, FILES)
    return folder


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("leaves/beans-*/*.jpg"))


def test_files_are_like_those_of_beans(cache):
    sizes = [path.stat().st_size for path in files(cache)]
    assert len(sizes) == FILES
    assert statistics.mean(sizes) == pytest.approx(leaves.MEAN_BYTES, rel=0.1)
    assert max(sizes) > 1.1 * min(sizes)
    for path in files(cache):
        with Image.open(path) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (500, 500), "RGB")


def test_colours_are_those_of_beans():
    """Mean and deviation of the channels, as AgML publishes them for the dataset."""
    pixels = np.concatenate(
        [np.asarray(leaf(index)).reshape(-1, 3) / 255 for index in range(FILES)]
    )
    assert np.allclose(pixels.mean(0), [0.485, 0.519, 0.311], atol=0.06)
    assert np.allclose(pixels.std(0), [0.182, 0.199, 0.169], atol=0.08)


def test_a_photograph_depends_on_sizes_seed_and_index_alone():
    assert np.array_equal(np.asarray(leaf(3)), np.asarray(leaf(3)))
    assert not np.array_equal(np.asarray(leaf(3)), np.asarray(leaf(4)))
    assert not np.array_equal(np.asarray(leaf(3)), np.asarray(leaf(3, seed=1)))
    assert leaf(3, VARIED).size == leaf_size(3, VARIED) != (500, 500)


def test_varied_sizes_are_spread():
    sizes = [leaf_size(index, VARIED) for index in range(200)]
    aspects = [width / height for width, height in sizes]
    assert min(aspects) < 0.4 and max(aspects) > 2.5
    assert all(1 / 3.1 < aspect < 3.1 for aspect in aspects)
    assert all(0.1e6 < width * height < 0.61e6 for width, height in sizes)
    small = [leaf_size(index, VARIED, tile=112) for index in range(200)]
    assert all(abs(s[i] - b[i] / 3) < 1 for s, b in zip(small, sizes, strict=True) for i in (0, 1))
    assert {leaf_size(index, BEANS) for index in range(20)} == {(500, 500)}


def test_classes_are_about_equally_frequent():
    counts = Counter(leaf_class(index) for index in range(300))
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 70


def test_columns_are_the_datasets_own(cache):
    rows = leaf_images(cache, 4)
    assert rows.column_names == ["image", "labels"]
    assert rows.features["labels"].names == list(CLASSES)
    assert isinstance(rows[0]["image"], Image.Image)
    assert [row["labels"] for row in rows] == [leaf_class(index) for index in range(4)]


def test_sizes_are_read_from_the_files_heads(tmp_path):
    rows = leaf_images(tmp_path, 5, sizes=VARIED)
    assert image_sizes(rows) == [leaf_size(index, VARIED)[::-1] for index in range(5)]


def test_what_exists_is_not_drawn_again(cache, monkeypatch):
    monkeypatch.setattr(leaves, "leaf", lambda *_: pytest.fail("drew a file that exists"))
    leaf_images(cache, FILES)
    leaf_images(cache, 3)
    leaf_images(cache, FILES)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1000], id="cut short"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(
            lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:],
            id="one bit",
        ),
    ],
)
def test_damaged_files_are_drawn_again(tmp_path, damage):
    paths = draw_leaves(tmp_path, 3, BEANS)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(damage(whole))
    draw_leaves(tmp_path, 3, BEANS)
    assert paths[1].read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b'{"00000.jpg": "x"}'])
def test_without_a_sound_manifest_files_are_drawn_again(tmp_path, content):
    (path,) = draw_leaves(tmp_path, 1, BEANS)
    whole = path.read_bytes()
    path.write_bytes(b"something else")
    (tmp_path / leaves.MANIFEST).write_bytes(content)
    draw_leaves(tmp_path, 1, BEANS)
    assert path.read_bytes() == whole
    assert list(json.loads((tmp_path / leaves.MANIFEST).read_text())) == ["00000.jpg"]


def test_an_interrupted_drawing_leaves_no_half_file(tmp_path, monkeypatch):
    def broken(index, *rest):
        if index == 2:
            raise KeyboardInterrupt
        return Image.new("RGB", (500, 500))

    monkeypatch.setattr(leaves, "leaf", broken)
    with pytest.raises(KeyboardInterrupt):
        draw_leaves(tmp_path, 4, BEANS)
    assert not (tmp_path / leaves.MANIFEST).exists()
    assert not (tmp_path / "00002.jpg").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"count": 0}, "at least 1 image"),
        ({"count": 1, "data": "mine"}, "data='mine' is not known"),
        ({"count": 1, "sizes": "huge"}, "sizes='huge' is not known"),
        ({"count": 1, "data": "hub", "sizes": VARIED}, "images of one size only"),
    ],
)
def test_what_is_not_known_is_said(tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        leaf_images(tmp_path, **asked)


def test_a_dataset_that_cant_be_had_says_what_to_type(tmp_path, monkeypatch):
    import datasets

    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ConnectionError,
        match=r'data="generated".*hf download --repo-type dataset AI-Lab-Makerere/beans',
    ):
        leaf_images(tmp_path, 1, data="hub")


# The cache


def draw(kind: str, cache: Path) -> None:
    leaf_images(cache, 2) if kind == "photographs" else captioned_images(cache, 2)


kinds = pytest.mark.parametrize("kind", ["photographs", "images"])
TOLD = r"Drawn {} can't be kept in .*{}.*({}).*export LABUTILS_CACHE=FOLDER"


@kinds
def test_a_cache_that_is_a_file_says_what_to_type(kind, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=TOLD.format(kind, "file", "Not a directory")):
        draw(kind, tmp_path / "file")


@kinds
def test_a_full_disk_says_what_to_type_and_leaves_no_part(kind, tmp_path, monkeypatch):
    """The first bytes still go to the disk."""
    room, save = Path.write_bytes, Image.Image.save

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(
            Path, "write_bytes", lambda path, content: (room(path, content[:9]), full())
        )
        patched.setattr(Image.Image, "save", save if kind == "photographs" else full)
        with pytest.raises(OSError, match=TOLD.format(kind, "v1-seed0", "No space left on device")):
            draw(kind, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    draw(kind, tmp_path)


def test_a_cache_that_may_only_be_read_serves_what_it_has(cache, monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files_of_a_cache.os, "replace", forbidden)
    monkeypatch.setattr(Path, "write_bytes", forbidden)
    leaf_images(cache, FILES)
    with pytest.raises(OSError, match=TOLD.format("photographs", "beans", "Permission denied")):
        leaf_images(cache, FILES + 1)


def test_threads_of_one_process_may_draw_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: draw_leaves(tmp_path, 4, BEANS), range(4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(p.name for p in drawn[0]),
        leaves.MANIFEST,
    ]


def test_what_died_long_ago_is_cleared_away(tmp_path):
    old, new = tmp_path / ".00000.jpg.1-1.part", tmp_path / ".00001.jpg.1-1.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    draw_leaves(tmp_path, 1, BEANS)
    assert not old.exists()
    assert new.exists()
