"""Pictures in several forms: the same ones come back, and training sees what the script makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from labutils.labs import lab10_image_input as image_input
from labutils.labs.lab10_image_input import CODECS, HELD, MAPPED
from labutils.recipe import Recipe
from labutils.workloads import open_workload


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    workload = open_workload("sd15-lora", "tiny", device="cpu", cache_dir=folder)
    return image_input.Pictures(workload, 2)


@pytest.mark.parametrize("form", CODECS)
def test_the_same_picture_comes_back(form, pictures):
    for path, file in zip(pictures.drawn, pictures.files(form), strict=True):
        pixels = image_input.decoded(file.read_bytes()).astype(int)
        off = np.abs(pixels - np.asarray(Image.open(path).convert("RGB"))).mean()
        assert off <= (0 if form == "PNG" else 4)


@pytest.mark.parametrize("form", ["PNG", MAPPED, HELD])
def test_training_sees_what_the_script_makes(form, pictures):
    dataset = pictures.dataset(form)
    assert len(dataset) == 2
    for place, path in enumerate(pictures.drawn):
        expected = dataset.preprocess.pixels(Image.open(path).convert("RGB"))
        assert torch.equal(dataset[place]["pixel_values"], expected)


def test_decoding_is_timed_file_by_file(pictures):
    runs = pictures.decoding()
    assert [run.tags["format"] for run in runs.values()] == list(CODECS)
    assert all(len(run.samples["decode_ms"]) == 2 for run in runs.values())
    run = pictures.decoded_by(image_input.decoded, "JPEG", on_gpu=True)
    assert run.tags == {"experiment": "decode", "format": "JPEG", "on_gpu": True}


def test_a_form_is_trained_from_in_every_round(pictures):
    recipe = Recipe(driver="eager", logging="ring-buffer", micro_batch=1, accumulation=1)
    ways = {"plain": ("JPEG", recipe), "held": (HELD, recipe)}
    runs = image_input.trained_from(pictures, ways, steps=1, rounds=2)
    tags = {"experiment": "image input", "format": "resized", "in_memory": True}
    assert runs["held"].tags == tags and runs["plain again"].tags["again"]
    for run in runs.values():
        assert run.ok and set(run.samples["round"]) == {0, 1}
