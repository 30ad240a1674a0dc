"""What people and other programs hand over that is not what it should be: refused in words, with
nothing changed.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from labutils.course.lab import LabError, open_lab
from labutils.course.parameters import check, read, whole_numbers
from labutils.data import drawings
from labutils.layers.lora import CONFIG_FILE, WEIGHTS_FILE, attach_lora, load_adapter, save_adapter
from labutils.results.records import read_records
from labutils.tools import run

NAN = float("nan")


# The course


@pytest.mark.parametrize("number", [3, "3", "03"])
def test_a_labs_number_has_two_digits(number):
    assert open_lab(number, {}).number == "03"


@pytest.mark.parametrize("namespace", [None, "globals()", dict.items])
def test_open_lab_wants_the_notebooks_names(namespace):
    with pytest.raises(LabError, match=r'Write: lab = open_lab\("03", globals\(\)\)'):
        open_lab(3, namespace)


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/x", "a\0b"])
def test_a_results_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(LabError, match="Results can't be kept in .* Set results_dir"):
        open_lab("03", {"results_dir": folder, "__annotations__": {"results_dir": str}})


@pytest.mark.parametrize(
    "kinds", [{"my_guess": float | None, "xs": list[int]}, {"my_guess": "float | None", "xs": dict}]
)
def test_names_that_later_cells_annotate_are_no_parameters(kinds):
    lab = open_lab(
        "03", {"steps": 3, "my_guess": None, "xs": [], "__annotations__": {"steps": int} | kinds}
    )
    assert lab.parameters["steps"] == 3
    assert not lab.parameters.keys() & {"my_guess", "xs"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("steps", -1, "steps is -1, but it takes 0 or more. Change it in the parameters cell"),
        ("rounds", -1, "rounds is -1, but it takes 0 or more"),
        ("seeds", -1, "seeds is -1, but it takes 0 or more"),
        (
            "batches",
            "0 4",
            "batches is '0 4', but it takes whole numbers above 0, for example 1 4 24",
        ),
        ("batches", "x", "takes whole numbers above 0"),
        ("batches", "1.5", "takes whole numbers above 0"),
        ("batches", "²", "takes whole numbers above 0"),
        ("batches", "9" * 5000, "takes whole numbers above 0"),
        ("compile_batches", "-1", "compile_batches is '-1', but it takes whole numbers above 0"),
        ("delays", "20 -5", "delays is '20 -5', but it takes whole numbers above 0"),
        ("ranks", 1, "ranks is 1, but it takes 0, or more than 1"),
        ("ranks", -2, "ranks is -2, but it takes 0 or more"),
        ("years", 0.0, "years is 0.0, but it takes a number above 0"),
        ("years", -3.0, "years is -3.0, but it takes a number above 0"),
        ("hours_a_day", 24.5, "hours_a_day is 24.5, but it takes 24 or less"),
        ("yen_per_kwh", 0.0, "yen_per_kwh is 0.0, but it takes a number above 0"),
        ("h200_yen", -1.0, "h200_yen is -1.0, but it takes 0 or more"),
        ("planned_steps", 0, "planned_steps is 0, but it takes 1 or more"),
        ("memory_gb", -80.0, "memory_gb is -80.0, but it takes 0 or more"),
        ("memory_gb", NAN, "memory_gb is nan, but it takes a finite number"),
        ("years", float("inf"), "years is inf, but it takes a finite number"),
    ],
)
def test_a_labs_parameter_has_its_limits(name, value, told):
    with pytest.raises(LabError, match=told):
        open_lab("06", {name: value, "__annotations__": {name: type(value)}})


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), (" ", []), ("4", [4]), ("24 1,4  4", [1, 4, 24])]
)
def test_whole_numbers_of_a_text(text, numbers):
    assert whole_numbers("batches", text) == numbers


def test_a_lab_is_not_started_with_what_it_does_not_take(tmp_path):
    for name, word in (
        ("batches", "0 4"),
        ("compile_batches", "-1"),
        ("seeds", "-1"),
        ("steps", "-3"),
    ):
        with pytest.raises(run.UsageError, match=f"Lab 06: {name} is .* but it takes"):
            run.run(["06"], run.Options(scale="tiny", results=tmp_path / "r", given={name: word}))
    assert not (tmp_path / "r").exists()


def test_no_lab_takes_a_number_below_0_and_each_takes_its_own_defaults():
    for lab in run.find():
        for parameter in lab.parameters.values():
            assert check(parameter.name, parameter.default, parameter.kind) == parameter.default
            if parameter.kind in ("int", "float"):
                with pytest.raises(ValueError, match=f"{parameter.name} is -1"):
                    read(parameter.name, "-1", parameter.kind)


def test_what_is_not_finite_is_not_scored(capsys):
    lab = open_lab("03", {})
    for value in (NAN, float("inf"), 10**400):
        with pytest.raises(LabError, match="Write a finite number, or None"):
            lab.predict("x", value)
    lab.predict("x", 2)
    lab.done({"x": NAN})
    assert [r["status"] for r in read_records(lab.results_dir)] == ["prediction", "done"]


def test_the_last_line_can_be_typed(tmp_path, capsys):
    folder = tmp_path / "my results"
    open_lab("03", {"results_dir": str(folder), "__annotations__": {"results_dir": str}}).done()
    assert f"labutils report --results {shlex.quote(str(folder))}" in capsys.readouterr().out


# Drawn images


def test_other_files_among_the_drawn_ones_are_passed_over(tmp_path):
    drawings.draw_images(tmp_path, 1)
    for name in ("00001 (copy).png", "1.png", "0000\u0661.png"):
        (tmp_path / name).write_bytes(b"someone else's")
    metadata = tmp_path / "metadata.jsonl"
    before = metadata.stat().st_ino, metadata.read_bytes()
    drawings.draw_images(tmp_path, 1)
    assert (
        metadata.stat().st_ino,
        metadata.read_bytes(),
    ) == before  # not written again: the cache may be read-only


def test_an_image_too_large_to_open_is_not_whole(tmp_path, monkeypatch):
    Image.new("L", (64, 64)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert not drawings.is_whole(tmp_path / "x.png")


# Adapters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


@pytest.fixture
def saved(tmp_path) -> Path:
    model = Net()
    attach_lora(model, ("up", "down"), rank=2, alpha=2, kind="plain", seed=0)
    save_adapter(model, tmp_path)
    return tmp_path


def refused(folder: Path, told: str, model: nn.Module | None = None) -> None:
    model = model or Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=told):
        load_adapter(model, folder, kind="plain")
    assert before.keys() == model.state_dict().keys()
    assert all(p.requires_grad for p in model.parameters())


UP = "base_model.model.up.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"base_model.model.up.bias": torch.zeros(6)},
            "'up.bias' is neither a lora_A.weight nor a lora_B.weight",
        ),
        ({UP: None}, "'up.lora_B.weight' is there without 'up.lora_A.weight'"),
        ({UP: torch.full((2, 4), NAN)}, "'up.lora_A.weight' holds NaN or infinity"),
        (
            {UP: torch.zeros(2, 4, dtype=torch.int32)},
            "is torch.int32, where floating-point numbers belong",
        ),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(change, told, saved):
    tensors = load_file(saved / WEIGHTS_FILE) | change
    save_file(
        {key: tensor for key, tensor in tensors.items() if tensor is not None}, saved / WEIGHTS_FILE
    )
    refused(saved, told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"r": "2"}, "r is '2', where a whole number"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None, where a finite number"),
        ({"lora_alpha": NAN}, "lora_alpha is nan"),
        ({"target_modules": 3}, "target_modules is 3, where names of layers"),
        ({"target_modules": ...}, "says no target_modules"),
    ],
)
def test_a_configuration_that_is_none_is_refused(change, told, saved):
    config = json.loads((saved / CONFIG_FILE).read_text()) | change
    config = {key: value for key, value in config.items() if value is not ...}
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    refused(saved, told)


@pytest.mark.parametrize(
    ("header", "told"),
    [("[1]", "the header of"), ("3", "the header of"), ("{", "damaged"), ('{"r": 2}', "different")],
)
def test_an_odd_header_is_refused(header, told, saved):
    save_file(load_file(saved / WEIGHTS_FILE), saved / WEIGHTS_FILE, {"lora": header})
    refused(saved, told)


def test_a_layer_that_is_not_linear_is_refused(saved):
    model = Net()
    model.up = nn.Conv2d(4, 6, 1)
    refused(saved, "is for linear layers, and 'up' of this Net is a Conv2d", model)


def test_an_adapter_whose_targets_name_more_layers_is_refused(saved):
    model = Net()
    model.inner = Net()
    refused(saved, r"also name inner\.down, inner\.up", model)
