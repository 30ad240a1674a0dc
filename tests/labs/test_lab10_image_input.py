"""Pictures in several forms: the same ones come back, and training sees what the script makes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from labutils.labs import lab10_image_input as image_input
from labutils.recipe import Recipe
from labutils.training import Benchmark
from labutils.workloads import open_workload


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", "tiny", device="cpu")


def pixels(workload):
    size = (workload.size.resolution, workload.size.resolution)
    images = [Image.open(path).convert("RGB") for path in image_input.pictures(workload, 2)]
    return np.stack([np.asarray(image.resize(size, Image.Resampling.LANCZOS)) for image in images])


@pytest.mark.parametrize(("form", "most"), [("PNG", 0), ("JPEG", 0.03), ("WebP", 0.03), ("", 0)])
def test_training_sees_what_the_script_makes_of_the_same_pictures(form, most, workload):
    kept = image_input.pictures(workload, 2, form) if form else pixels(workload)
    dataset = image_input.FormDataset(kept, workload)
    for place, path in enumerate(image_input.pictures(workload, 2)):
        expected = dataset.preprocess.pixels(Image.open(path).convert("RGB"))
        assert (dataset[place]["pixel_values"] - expected).abs().mean() <= most


def test_each_trainer_reads_the_dataset_that_it_was_built_with(workload):
    recipe = Recipe(driver="eager", logging="ring-buffer", micro_batch=1, accumulation=1)
    files, made = image_input.pictures(workload, 2, "JPEG"), []
    with Benchmark(workload, warmup=1, dataset=lambda model, recipe: made[-1]) as bench:
        for name, kept in {"plain": files, "black": np.zeros_like(pixels(workload))}.items():
            made.append(image_input.FormDataset(kept, workload))
            bench.prepare({name: recipe})
        runs = bench.compare({"plain": recipe, "black": recipe}, steps=1, rounds=2)
    assert runs["black"].metrics["loss"] != runs["plain"].metrics["loss"]
    assert runs["plain again"].tags["again"]
    for run in runs.values():
        assert run.ok and set(run.samples["round"]) == {0, 1}
