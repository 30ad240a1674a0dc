"""The data path: drawn files, the script's transforms, the tokenizer, and the loader."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import statistics
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from labutils.data import drawings, images
from labutils.data.images import (
    EpochOrder,
    captioned_images,
    collate,
    decode_ms,
    image_text_dataset,
    make_loader,
)
from labutils.data.tokenizers import clip_tokenizer
from labutils.recipe import STOCK

FILES = 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    captioned_images(folder, FILES)
    return folder


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return next((cache / "images").iterdir())


@pytest.fixture(scope="module")
def examples(cache: Path):
    return image_text_dataset(captioned_images(cache, FILES), clip_tokenizer(), resolution=64)


# ----------------------------------------------------------------------------- the drawn files


def test_files_have_the_size_of_the_real_ones(folder: Path) -> None:
    sizes = [path.stat().st_size for path in folder.glob("*.png")]
    assert len(sizes) == FILES
    assert statistics.mean(sizes) == pytest.approx(drawings.MEAN_BYTES, rel=0.1)
    assert max(sizes) > 1.1 * min(sizes)
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((1080, 1080), "RGB")


def test_a_drawing_depends_on_seed_and_index_alone(folder: Path) -> None:
    with Image.open(folder / "00003.png") as stored:
        assert np.array_equal(np.asarray(stored), np.asarray(drawings.drawing(3)))
    assert not np.array_equal(np.asarray(drawings.drawing(3)), np.asarray(drawings.drawing(4)))
    assert not np.array_equal(
        np.asarray(drawings.drawing(3)), np.asarray(drawings.drawing(3, seed=1))
    )


def test_captions_have_the_length_of_real_ones() -> None:
    lengths = [len(drawings.caption(index).split()) for index in range(300)]
    assert min(lengths) >= 3 and max(lengths) <= 30
    assert 6 <= statistics.mean(lengths) <= 14
    assert drawings.caption(7) == drawings.caption(7)
    assert len({drawings.caption(index) for index in range(100)}) > 50


def test_columns_and_lazy_decoding(cache: Path) -> None:
    rows = captioned_images(cache, 4)
    assert rows.column_names == ["image", "text"] and len(rows) == 4
    assert isinstance(rows[0]["image"], Image.Image) and rows[2]["text"] == drawings.caption(2)


def test_the_folder_is_one_that_datasets_knows(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert [line["file_name"] for line in lines] == sorted(
        path.name for path in folder.glob("*.png")
    )
    assert lines[5]["text"] == drawings.caption(5)


def test_fewer_files_later_do_not_shorten_the_folders_list(cache: Path, folder: Path) -> None:
    captioned_images(cache, 3)
    assert len((folder / "metadata.jsonl").read_text().splitlines()) == FILES


def test_what_exists_is_not_drawn_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawings, "drawing", lambda *_: pytest.fail("drew a file that exists"))
    captioned_images(cache, FILES)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-40_000], id="cut short"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(
            lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
            id="one bit flipped",
        ),
        pytest.param(lambda content: b"not an image" * 1000, id="something else"),
    ],
)
def test_a_damaged_file_is_drawn_again(tmp_path: Path, damage) -> None:
    (path,) = drawings.draw_images(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert not drawings.is_whole(path)
    drawings.draw_images(tmp_path, 1)
    assert path.read_bytes() == whole


def test_an_interrupted_generation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = drawings.drawing
    drawn = []

    def interrupted(index: int, seed: int = 0) -> Image.Image:
        if index == 2:
            raise KeyboardInterrupt
        drawn.append(index)
        return draw(index, seed)

    monkeypatch.setattr(drawings, "drawing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drawings.draw_images(tmp_path, 3)
    assert not (tmp_path / "metadata.jsonl").exists()
    kept = {path.name for path in tmp_path.glob("*.png")}
    assert kept == {f"{index:05d}.png" for index in drawn} and kept

    monkeypatch.setattr(
        drawings, "drawing", lambda index, seed=0: drawn.append(index) or draw(index, seed)
    )
    paths = drawings.draw_images(tmp_path, 3)
    assert sorted(drawn) == [0, 1, 2]
    assert all(drawings.is_whole(path) for path in paths)


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    import os

    old, young = tmp_path / ".00000.png.1.part", tmp_path / ".00001.png.2.part"
    for part in (old, young):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    drawings.draw_images(tmp_path, 1)
    assert not old.exists() and young.exists()


def _draw(folder: str) -> None:
    drawings.draw_images(Path(folder), 4)


def test_two_processes_may_draw_at_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    both = [spawn.Process(target=_draw, args=(str(tmp_path),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"{i:05d}.png" for i in range(4)),
        "metadata.jsonl",
    ]
    with Image.open(tmp_path / "00003.png") as stored:
        assert np.array_equal(np.asarray(stored), np.asarray(drawings.drawing(3)))


def test_what_is_asked_wrongly_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'generated'.*'hub'"):
        captioned_images(tmp_path, 4, data="local")
    with pytest.raises(ValueError, match="at least 1"):
        captioned_images(tmp_path, 0)
    with pytest.raises(ValueError, match="'random'.*'hub'"):
        clip_tokenizer("local")


def test_the_hub_out_of_reach_is_said_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import transformers

    def unreachable(*_, **__):
        raise OSError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(transformers.CLIPTokenizer, "from_pretrained", unreachable)
    with pytest.raises(ConnectionError, match='data="generated".*hf download --repo-type dataset'):
        captioned_images(tmp_path, 4, data="hub")
    with pytest.raises(ConnectionError, match='weights="random".*hf download'):
        clip_tokenizer("hub", tmp_path)


# ----------------------------------------------------------------------------- the transforms


def _noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_transforms_against_numpy() -> None:
    image = _noise(90, 90)
    expected = np.asarray(image.resize((48, 48), Image.Resampling.LANCZOS)).astype(np.float32) / 255
    expected = ((expected - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1)
    found = images.Preprocess(clip_tokenizer(), 48).pixels(image)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((90, 60), (72, 48)), ((60, 90), (48, 72)), ((48, 100), (48, 100)), ((91, 60), (72, 48))],
)
def test_resize_keeps_the_shape(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert images.resize(_noise(*size), 48).size == expected


def test_cropping_a_square_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    assert images.random_crop(_noise(48, 48), 48).size == (48, 48)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stored", ["paths", "bytes"])
def test_images_with_several_crops_are_found_by_their_files_first_bytes(
    stored: str, tmp_path: Path
) -> None:
    """At resolution 64, 1080x1085 pixels become 64x64: only what is cropped at random counts."""
    paths = []
    for index, (width, height) in enumerate([(80, 80), (1080, 1085), (64, 64), (80, 96), (90, 64)]):
        paths.append(tmp_path / f"{index}.png")
        Image.new("RGB", (width, height)).save(paths[-1])
    values = (
        [str(path) for path in paths]
        if stored == "paths"
        else [{"bytes": p.read_bytes()} for p in paths]
    )
    whole = datasets.Dataset.from_dict({"image": values, "text": ["x"] * 5}).cast_column(
        "image", datasets.Image()
    )
    images.check_one_crop(whole.select(range(3)), 64)
    with pytest.raises(
        ValueError,
        match=r"2 of the 5 images aren't square \(one has 80x96 pixels\).*cache='nothing'",
    ):
        images.check_one_crop(whole, 64)


def test_cropping_takes_every_window() -> None:
    image = _noise(50, 48)
    whole = np.asarray(image)
    torch.manual_seed(0)
    lefts = set()
    for _ in range(40):
        window = np.asarray(images.random_crop(image, 48))
        lefts.update(
            left for left in range(3) if np.array_equal(window, whole[:, left : left + 48])
        )
    assert lefts == {0, 1, 2}


@pytest.mark.parametrize("size", [(108, 108), (64, 64), (120, 80), (80, 121)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_transforms_are_torchvisions_bit_by_bit(size: tuple[int, int], mode: str) -> None:
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    theirs = transforms.Compose(
        [
            transforms.Resize(64, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.RandomCrop(64),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    image = _noise(*size, mode).convert("RGB")
    torch.manual_seed(1)
    expected, after = theirs(image), torch.get_rng_state()
    torch.manual_seed(1)
    found = images.Preprocess(clip_tokenizer(), 64).pixels(image)
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_row_and_a_batch(examples) -> None:
    row = examples[0]
    assert row["pixel_values"].shape == (3, 64, 64) and row["pixel_values"].dtype == torch.float32
    assert row["pixel_values"].min() >= -1 and row["pixel_values"].max() <= 1
    assert row["input_ids"].shape == (77,) and row["input_ids"].dtype == torch.int64
    batch = collate([examples[0], examples[1]])
    assert set(batch) == {"pixel_values", "input_ids"}
    assert batch["pixel_values"].shape == (2, 3, 64, 64) and batch["pixel_values"].is_contiguous()
    assert batch["input_ids"].shape == (2, 77)
    assert torch.equal(batch["pixel_values"][0], row["pixel_values"])


def test_what_workers_need_can_be_pickled(examples) -> None:
    copy = pickle.loads(pickle.dumps(examples))
    assert torch.equal(copy[1]["input_ids"], examples[1]["input_ids"])


# ----------------------------------------------------------------------------- the tokenizer


def test_tokenizer_has_clips_class_size_and_special_ids() -> None:
    from transformers import CLIPTokenizer

    tokenizer = clip_tokenizer()
    assert isinstance(tokenizer, CLIPTokenizer)
    assert len(tokenizer) == 49408
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        49406,
        49407,
        49407,
    )
    assert tokenizer.model_max_length == 77


def test_tokenizer_knows_its_words_and_spells_the_others() -> None:
    tokenizer = clip_tokenizer()
    assert tokenizer.tokenize("A man with red hair") == [
        "a</w>",
        "man</w>",
        "with</w>",
        "red</w>",
        "hair</w>",
    ]
    for text in ("zebras graze", "una niña", "忍者 🦊!", "x" * 50):
        ids = tokenizer(text).input_ids
        assert ids[0] == 49406 and ids[-1] == 49407
        assert 49407 not in ids[1:-1], f"{text!r} has an unknown piece"
        assert max(ids[1:-1]) < 49406


def test_captions_are_padded_and_cut_to_77() -> None:
    preprocess = images.Preprocess(clip_tokenizer(), 64)
    ids = preprocess.token_ids(["a man", "a man with red hair " * 40])
    assert ids.shape == (2, 77)
    assert (
        ids[0, :4].tolist() == [49406, *ids[0, 1:3].tolist(), 49407] and (ids[0, 4:] == 49407).all()
    )
    assert ids[1, 76] == 49407 and (ids[1, 1:76] != 49407).all()


# ----------------------------------------------------------------------------- the loader


def test_order_depends_on_seed_and_epoch_alone() -> None:
    order = EpochOrder(20, seed=3)
    first = list(order)
    assert sorted(first) == list(range(20)) and first == list(order)
    order.go_to(1)
    second = list(order)
    assert sorted(second) == list(range(20)) and second != first
    order.go_to(1, start=15)
    assert list(order) == second[15:] and len(order) == 5
    assert list(EpochOrder(20, seed=4)) != first


def test_an_epoch_longer_than_the_data_goes_through_all_of_it() -> None:
    order = list(EpochOrder(5, length=13))
    assert len(order) == 13
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order[:5] != order[5:10]


def test_order_cannot_start_behind_its_end() -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        EpochOrder(5).go_to(0, start=5)


def test_loader_takes_the_recipes_knobs(examples) -> None:
    recipe = STOCK.but(
        num_workers=3, persistent_workers=True, prefetch_factor=4, micro_batch=2, pin_memory=True
    )
    loader = make_loader(examples, recipe)
    assert isinstance(loader, DataLoader)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (3, True, 4)
    assert (loader.batch_size, loader.pin_memory, loader.drop_last) == (2, True, True)
    assert len(loader) == images.EPOCH // 2
    assert len(make_loader(examples, STOCK, epoch_length=1)) == FILES


def test_loading_leaves_the_training_noise_alone(examples) -> None:
    state = torch.get_rng_state()
    next(iter(make_loader(examples, STOCK)))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_bring_the_same_batches(examples) -> None:
    def batches(workers: int) -> list[dict[str, torch.Tensor]]:
        loader = make_loader(examples, STOCK.but(num_workers=workers), epoch_length=1)
        loader.sampler.go_to(2, start=3)
        return list(loader)

    alone, together = batches(0), batches(2)
    assert len(alone) == len(together) == FILES - 3
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_the_parts_of_a_row_add_up(examples) -> None:
    parts = decode_ms(examples, 3)
    assert set(parts) == {*images.PARTS, "all"}
    assert all(len(samples) == 3 and min(samples) > 0 for samples in parts.values())
    for index in range(3):
        assert sum(parts[name][index] for name in images.PARTS) == pytest.approx(
            parts["all"][index]
        )
    assert statistics.median(parts["decode"]) > statistics.median(parts["tokenise"])
