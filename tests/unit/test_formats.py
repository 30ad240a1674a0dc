"""Pictures in several forms: the same picture comes back, files are forgotten when asked, and costs
are a model's.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from labutils.data.images import Preprocess
from labutils.labs import lab09_image_formats
from labutils.labs.lab09_image_input import (
    _joined,
    form_of,
    pipeline_of,
    points_of,
    step_over_decoding,
)
from labutils.profiling.dataloader_model import Pipeline
from labutils.recipe import Recipe, Unavailable
from labutils.results.records import Run, summarise

RESOLUTION = 64


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    rng = np.random.default_rng(0)
    paths = []
    for place in range(3):
        smooth = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((130, 130))
        paths.append(folder / f"{place:05d}.png")
        smooth.save(paths[-1])
    return paths


@pytest.mark.parametrize("name", list(lab09_image_formats.formats(RESOLUTION)))
def test_the_same_picture_comes_back(name, drawn, tmp_path):
    form = lab09_image_formats.formats(RESOLUTION)[name]
    files = lab09_image_formats.kept_as(drawn, tmp_path, form)
    for path, file in zip(drawn, files, strict=True):
        picture = Image.open(path).convert("RGB")
        expected = np.asarray(
            lab09_image_formats.resize(picture, form.side) if form.side else picture
        ).astype(int)
        found = form.decode(file.read_bytes()).astype(int)
        assert found.shape == expected.shape
        assert np.abs(found - expected).mean() <= (0 if form.exact else 4)
    assert len({path.read_bytes() for path in files}) == 3
    times = [file.stat().st_mtime_ns for file in files]
    assert [
        file.stat().st_mtime_ns for file in lab09_image_formats.kept_as(drawn, tmp_path, form)
    ] == times  # not written again


@pytest.mark.parametrize(
    ("name", "held"),
    [("PNG", "nothing"), ("PNG", "files"), ("PNG", "pixels"), ("resized", "nothing")],
)
def test_training_sees_what_the_script_makes(name, held, drawn, tmp_path):
    form = lab09_image_formats.formats(RESOLUTION)[name]
    ids = torch.arange(6).view(2, 3)
    dataset = lab09_image_formats.FormatDataset(
        lab09_image_formats.kept_as(drawn, tmp_path, form), form, RESOLUTION, ids, held
    )
    script = Preprocess(tokenizer=None, resolution=RESOLUTION)
    for place, path in enumerate(drawn):
        expected = script.pixels(Image.open(path).convert("RGB"))
        assert torch.equal(dataset[place]["pixel_values"], expected)
        assert torch.equal(dataset[place]["input_ids"], ids[place % 2])


def test_times_are_parts_of_a_whole(drawn):
    times = lab09_image_formats.read_ms(
        drawn, lab09_image_formats.formats(RESOLUTION)["PNG"], passes=2
    )
    assert {len(samples) for samples in times.values()} == {6}
    for read, decode, both in zip(*times.values(), strict=True):
        assert 0 < read < both and both == pytest.approx(read + decode)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such advice")
def test_files_are_forgotten_and_found_again(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(os.urandom(4 << 20))
    file.read_bytes()
    assert lab09_image_formats.cached_share([file]) == 1
    times, still = lab09_image_formats.cold_read_ms([file])
    assert len(times) == 1 and 0 <= still <= 1  # some file systems keep all there is
    assert lab09_image_formats.cached_share([file]) == 1


def test_a_machine_without_a_gpu_decodes_on_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="none here"):
        lab09_image_formats.gpu_decoder()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "torchvision.io", None)
    with pytest.raises(Unavailable, match="torchvision"):
        lab09_image_formats.gpu_decoder()


def test_processes_take_the_threads_they_are_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = lab09_image_formats.images_per_s(2, {"one": 1, "as they come": None}, seconds=0.2)
    assert found["one"]["threads"] == 1 and found["as they come"]["threads"] >= 1
    assert all(each["images_per_s"] > 0 for each in found.values())


# ----------------------------------------------------------------------------- cost of the decoder


@given(st.floats(0, 200), st.floats(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_the_lines_are_the_model_of_workers(up_to, compute, cores, micro_batch):
    pipeline = Pipeline(read_ms=1, compute_ms=compute, cores=cores, accumulation=2)
    lines = step_over_decoding(pipeline, (0, 2), micro_batch, up_to)
    for workers, points in lines.items():
        for each, step in points.items():
            read = each * micro_batch
            busy = (
                compute + read
                if workers == 0
                else max(compute, read / workers, (read + compute) / cores)
            )
            assert step == pytest.approx(2 * busy)


def test_a_pipeline_is_read_off_a_run():
    run = Run("09", "data: PNG", recipe=Recipe(accumulation=4).as_dict())
    run.metrics = {"step_ms": summarise([100.0] * 3), "data_ms": summarise([60.0] * 3)}
    found = pipeline_of(run, cores=8, threads=1)
    assert (found.read_ms, found.compute_ms, found.accumulation, found.cores) == (15, 10, 4, 8)


def test_runs_are_put_at_what_their_form_takes():
    spread = {"p10": 1.0, "median": 2.0, "p90": 3.0}
    runs = {
        name: Run("09", name, metrics={"step_ms": spread})
        for name in ("data: PNG", "data: PNG, 4 workers")
    }
    runs["data: pixels"] = Run("09", "data: pixels", status="oom")
    assert [form_of(name) for name in runs] == ["PNG", "PNG", "pixels"]
    assert points_of(runs, runs, {"PNG": 40.0, "pixels": 1.0}) == {"PNG": (40.0, (1.0, 2.0, 3.0))}


def test_rounds_are_joined():
    rounds = [
        Run("09", "x", samples={"step_ms": ms}, metrics={"step_ms": summarise(ms)})
        for ms in ([1.0, 2.0], [3.0])
    ]
    found = _joined(*rounds)
    assert found.samples["step_ms"] == [1, 2, 3] and found.metrics["step_ms"]["median"] == 2
    assert _joined(found, Run("09", "x", status="oom")).status == "oom"
    assert _joined(Run("09", "x", status="oom"), found).status == "oom"
