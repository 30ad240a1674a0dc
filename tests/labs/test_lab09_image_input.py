"""Pictures in several forms: the same picture comes back, files are dropped from the page cache."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image

from labutils.data.images import Preprocess
from labutils.labs import lab09_image_formats as image_formats
from labutils.labs.lab09_image_input import (
    Pictures,
    pipeline_of,
    step_over_decoding,
    trained_from,
)
from labutils.profiling.dataloader_model import Pipeline
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, summarise
from labutils.workloads import open_workload

RESOLUTION = 64
FORMATS = image_formats.formats(RESOLUTION)


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
    files = image_formats.kept_as(drawn, tmp_path, form)
    for path, file in zip(drawn, files, strict=True):
        picture = Image.open(path).convert("RGB")
        expected = image_formats.resize(picture, form.side) if form.side else picture
        pixels = form.decode(file.read_bytes()).astype(int)
        assert np.abs(pixels - np.asarray(expected).astype(int)).mean() <= (0 if form.exact else 4)


@pytest.mark.parametrize(("name", "held"), [("PNG", "files"), ("PNG", "pixels"), ("resized", "")])
def test_training_sees_what_the_script_makes(name, held, drawn, tmp_path):
    form, ids = FORMATS[name], torch.arange(6).view(2, 3)
    files = image_formats.kept_as(drawn, tmp_path, form)
    dataset = image_formats.FormatDataset(files, form, RESOLUTION, ids, held or "nothing")
    script = Preprocess(tokenizer=None, resolution=RESOLUTION)
    for place, path in enumerate(drawn):
        expected = script.pixels(Image.open(path).convert("RGB"))
        assert torch.equal(dataset[place]["pixel_values"], expected)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such advice")
def test_files_are_dropped_and_read_again(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(os.urandom(4 << 20))
    file.read_bytes()
    assert image_formats.cached_share([file]) == 1
    times, still = image_formats.cold_read_ms([file])
    assert len(times) == 1 and 0 <= still <= 1  # some file systems keep all there is
    assert image_formats.cached_share([file]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_machine_without_a_gpu_decodes_on_none():
    with pytest.raises(Unavailable, match="none here"):
        image_formats.gpu_decoder()


def test_processes_take_the_threads_they_are_told():
    settings = {"one": 1, "as they come": None}
    rates = image_formats.images_per_s(2, settings, seconds=0.2)
    assert rates["one"]["threads"] == 1 and rates["as they come"]["threads"] >= 1
    assert all(each["images_per_s"] > 0 for each in rates.values())


def test_a_form_is_trained_from_in_every_round(tmp_path):
    workload = open_workload("sd15-lora", "tiny", device="cpu", cache_dir=tmp_path)
    recipe = Recipe(driver="eager", logging="ring-buffer", micro_batch=1, accumulation=1)
    ways = {("JPEG", 0): recipe, ("resized in memory", 0): recipe}
    runs = trained_from(Pictures(workload, 4), ways, steps=1, rounds=2)
    tags = {"experiment": "image input", "format": "resized", "in_memory": True}
    assert runs["resized in memory", 0].tags == tags
    for run in runs.values():
        assert run.ok and set(run.samples["round"]) == {0, 1}


def test_the_lines_are_the_model_of_workers():
    pipeline = Pipeline(read_ms=1, compute_ms=30, cores=4, accumulation=2)
    lines = step_over_decoding(pipeline, (0, 2), micro_batch=3, up_to=40)
    assert lines[0][40.0] == pytest.approx(2 * (120 + 30))
    assert lines[2][40.0] == pytest.approx(2 * 120 / 2)


def test_a_pipeline_is_read_off_a_run():
    metrics = {"step_ms": summarise([100.0] * 3), "data_ms": summarise([60.0] * 3)}
    run = Run("09", "", recipe=Recipe(accumulation=4).as_dict(), metrics=metrics)
    pipeline = pipeline_of(run, cores=8, threads=1)
    assert (pipeline.read_ms, pipeline.compute_ms, pipeline.accumulation) == (15, 10, 4)
