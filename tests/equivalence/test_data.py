"""The data path: drawn files, the public script's transforms, the tokenizer, and the loader."""

import errno
import hashlib
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPTokenizer

from labutils.data import file_cache, images
from labutils.data.generated_images import (
    LEAF_BYTES,
    MEAN_BYTES,
    caption,
    draw_images,
    drawing,
    varied_size,
)
from labutils.data.images import captioned_images, leaf_images
from labutils.data.loader import EpochOrder
from labutils.data.texts import LONG, SHORT, token_lengths, written
from labutils.data.tokenizers import clip_tokenizer
from labutils.results.records import REPOSITORY

FILES = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    captioned_images(folder, FILES)
    leaf_images(folder, FILES)
    return folder


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def test_a_seed_gives_what_it_always_gave():
    """Recorded losses and batches rest on these."""
    texts = [vars(written(kind, i, 400)) for kind in (SHORT, LONG) for i in range(40)]
    lengths = [token_lengths(k, n) for k in (SHORT, LONG) for n in (7, 64, 1000)]
    order = EpochOrder(20, 53, seed=3)
    order.go_to(2, 5)
    assert digest([caption(i) for i in range(60)]) == "bf6dbc74068d6baf"
    assert digest(texts) == "2eb5f7887030085f"
    assert digest(lengths) == "c218816a9990cf4b"
    assert digest(list(order)) == "4f60bfa1598b6276"


# The drawn files


@pytest.mark.parametrize(
    ("kind", "mean", "side"), [("images", MEAN_BYTES, 1080), ("leaves", LEAF_BYTES, 500)]
)
def test_files_have_the_size_of_the_real_ones(cache, kind, mean, side):
    paths = [path for path in (cache / kind).rglob("0*.*") if path.suffix in (".png", ".jpg")]
    sizes = [path.stat().st_size for path in paths]
    assert len(sizes) == FILES
    assert statistics.mean(sizes) == pytest.approx(mean, rel=0.15)
    for path in paths:
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((side, side), "RGB")


def test_a_drawing_depends_on_its_index_alone(cache):
    same = lambda a, b: np.array_equal(np.asarray(a), np.asarray(b))
    with Image.open(next((cache / "images").rglob("00003.png"))) as stored:
        assert same(stored, drawing(3)) and not same(stored, drawing(4))
    rows = leaf_images(cache, 2, varied_for=112)
    assert [row["image"].size for row in rows] == [varied_size(i, 112) for i in range(2)]


def test_the_hub_out_of_reach_is_said_with_a_cure(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(CLIPTokenizer, "from_pretrained", unreachable)
    for ask in (captioned_images, leaf_images):
        with pytest.raises(ConnectionError, match=r"-p data .*hf download --repo-type dataset"):
            ask(tmp_path, 4, data="hub")
    with pytest.raises(ConnectionError, match=r"-p weights .*hf download --repo-type model"):
        clip_tokenizer("hub", tmp_path)


# The cache


def test_an_interrupted_drawing_leaves_no_half_file_and_goes_on(tmp_path):
    def broken(index):
        if index == 2:
            raise KeyboardInterrupt
        return b"whole"

    with pytest.raises(KeyboardInterrupt):
        file_cache.drawn_files(tmp_path, ".x", 4, broken)
    assert not (tmp_path / "00002.x").exists()
    with ThreadPoolExecutor(4) as pool:  # as several processes do
        draw = lambda _: file_cache.drawn_files(tmp_path, ".x", 4, lambda index: b"whole")
        drawn = list(pool.map(draw, range(4)))
    assert sorted(tmp_path.iterdir()) == drawn[0]
    assert [path.read_bytes() for path in drawn[0]] == [b"whole"] * 4
    nothing = lambda index: pytest.fail("drawn again")
    assert file_cache.drawn_files(tmp_path, ".x", 4, nothing) == drawn[0]


def test_a_relative_cache_is_one_folder_wherever_one_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("LABUTILS_CACHE", "my cache")
    here = file_cache.cache_folder()
    monkeypatch.chdir(tmp_path)  # as a notebook's kernel does
    assert file_cache.cache_folder() == here == REPOSITORY / "my cache"
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path))
    assert file_cache.cache_folder() == tmp_path


def test_a_cache_without_room_says_what_to_type_and_leaves_no_part(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory.*export LABUTILS_CACHE"):
        draw_images(tmp_path / "file" / "cache", 1)
    room = Path.write_bytes

    def full(path, content):
        room(path, content[:9])  # the first bytes still go to the disk
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device.*export LABUTILS_CACHE"):
            draw_images(tmp_path / "cache", 1)
    assert not list((tmp_path / "cache").iterdir())


# The transforms


def noise(width, height, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_transforms_against_numpy():
    image = noise(90, 90)
    expected = np.asarray(image.resize((48, 48), Image.Resampling.LANCZOS)).astype(np.float32) / 255
    expected = ((expected - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1)
    pixels = images.Preprocess(clip_tokenizer(), 48).pixels(image)
    assert pixels.dtype == torch.float32 and pixels.is_contiguous()
    assert np.array_equal(pixels.numpy(), expected)


@pytest.mark.parametrize(
    ("size", "mode"), [((108, 108), "RGB"), ((120, 80), "L"), ((80, 121), "RGBA")]
)
def test_transforms_are_torchvisions_bit_by_bit(size, mode):
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    theirs = transforms.Compose(
        [
            transforms.Resize(64, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.RandomCrop(64),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    image = noise(*size, mode).convert("RGB")
    torch.manual_seed(1)
    expected, after = theirs(image), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(images.Preprocess(clip_tokenizer(), 64).pixels(image), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_tokenizer_is_clips_in_all_but_its_words():
    tokenizer = clip_tokenizer()
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(tokenizer, CLIPTokenizer) and len(tokenizer) == 49408
    assert (*special, tokenizer.model_max_length) == (49406, 49407, 49407, 77)
    assert tokenizer.tokenize("A man") == ["a</w>", "m", "a", "n</w>"]
    for text in ("zebras graze", "una niña", "忍者 🦊!", "x" * 50):
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-1]) == (49406, 49407) and max(ids[1:-1]) < 49406
    ids = images.Preprocess(tokenizer, 64).token_ids(["a man", "a man with red hair " * 40])
    assert ids.shape == (2, 77) and (ids[0, 5:] == 49407).all()
    assert ids[1, 76] == 49407 and (ids[1, 1:76] != 49407).all()


# The loader


def test_order_depends_on_seed_and_epoch_alone():
    order = EpochOrder(20, seed=3)
    first = list(order)
    assert sorted(first) == list(range(20)) and first == list(order)
    order.go_to(1)
    second = list(order)
    assert sorted(second) == list(range(20)) and second != first
    order.go_to(1, start=15)
    assert list(order) == second[15:] and len(order) == 5
    assert list(EpochOrder(20, seed=4)) != first
    longer = list(EpochOrder(5, length=13))
    assert sorted(longer[:5]) == sorted(longer[5:10]) == list(range(5)) != longer[5:10]
