"""Pictures in several forms: the same ones come back, and training sees what the script makes."""

from __future__ import annotations

import pytest
from PIL import Image

from labutils.labs import lab10_image_input as image_input
from labutils.labs.lab10_image_input import HELD, MAPPED
from labutils.recipe import Recipe
from labutils.workloads import open_workload


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    workload = open_workload("sd15-lora", "tiny", device="cpu", cache_dir=folder)
    return image_input.Pictures(workload, 2)


@pytest.mark.parametrize(
    ("form", "most"), [("PNG", 0), ("JPEG", 0.03), ("WebP", 0.03), (MAPPED, 0), (HELD, 0)]
)
def test_training_sees_what_the_script_makes_of_the_same_pictures(form, most, pictures):
    dataset = pictures.dataset(form)
    for place, path in enumerate(pictures.drawn):
        expected = dataset.preprocess.pixels(Image.open(path).convert("RGB"))
        assert (dataset[place]["pixel_values"] - expected).abs().mean() <= most


def test_a_form_is_trained_from_in_every_round(pictures):
    recipe = Recipe(driver="eager", logging="ring-buffer", micro_batch=1, accumulation=1)
    ways = {"plain": ("JPEG", recipe), "held": (HELD, recipe)}
    runs = image_input.trained_from(pictures, ways, steps=1, rounds=2)
    assert runs["held"].tags["in_memory"] and runs["plain again"].tags["again"]
    for run in runs.values():
        assert run.ok and set(run.samples["round"]) == {0, 1}
