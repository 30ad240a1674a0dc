"""Pictures in several forms: the same picture comes back, files are dropped from the page cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from labutils.data.images import Preprocess, resize
from labutils.labs import lab10_image_input as image_input
from labutils.recipe import Recipe
from labutils.workloads import open_workload

RESOLUTION = 64
FORMATS = image_input.formats(RESOLUTION)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("drawn"), np.random.default_rng(0)
    paths = [folder / f"{place:05d}.png" for place in range(3)]
    for path in paths:
        pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((130, 130)).save(path)
    return paths


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_same_picture_comes_back(name, drawn, tmp_path):
    form = FORMATS[name]
    files = image_input.kept_as(drawn, tmp_path, form)
    for path, file in zip(drawn, files, strict=True):
        picture = Image.open(path).convert("RGB")
        expected = resize(picture, form.side) if form.side else picture
        pixels = form.decode(file.read_bytes()).astype(int)
        off = np.abs(pixels - np.asarray(expected).astype(int)).mean()
        assert off <= (4 if name in ("JPEG", "WebP") else 0)


@pytest.mark.parametrize(("name", "held"), [("PNG", False), ("resized", False), ("resized", True)])
def test_training_sees_what_the_script_makes(name, held, drawn, tmp_path):
    form, script = FORMATS[name], Preprocess(tokenizer=None, resolution=RESOLUTION)
    files = image_input.kept_as(drawn, tmp_path, form)
    ids = torch.arange(6).view(3, 2)
    dataset = image_input.FormatDataset(files, form, script, ids, in_memory=held)
    for place, path in enumerate(drawn):
        expected = script.pixels(Image.open(path).convert("RGB"))
        assert torch.equal(dataset[place]["pixel_values"], expected)


def test_a_form_is_trained_from_in_every_round():
    workload = open_workload("sd15-lora", "tiny", device="cpu")
    recipe = Recipe(driver="eager", logging="ring-buffer", micro_batch=1, accumulation=1)
    ways = {"plain": ("JPEG", recipe), "held": ("resized in memory", recipe)}
    runs = image_input.trained_from(image_input.Pictures(workload, 2), ways, steps=1, rounds=2)
    tags = {"experiment": "image input", "format": "resized", "in_memory": True}
    assert runs["held"].tags == tags and runs["plain again"].tags["again"]
    for run in runs.values():
        assert run.ok and set(run.samples["round"]) == {0, 1}
