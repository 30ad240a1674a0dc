"""What people and other programs hand over that is not what it should be: refused in words, with
nothing changed.
"""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from recipes_at_work import one_thread
from safetensors.torch import load_file, save_file
from torch import nn

from labutils.course.lab import LabError, open_lab
from labutils.course.parameters import check, read, whole_numbers
from labutils.data import drawings
from labutils.layers.lora import CONFIG_FILE, WEIGHTS_FILE, attach_lora, load_adapter, save_adapter
from labutils.recipe import STOCK
from labutils.results.records import read_records
from labutils.tools import run
from labutils.training import Trainer
from labutils.training.benchmark import Benchmark
from labutils.training.checkpoint import FILE, load
from labutils.workloads import open_workload

NAN = float("nan")


# Recipes


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"num_workers": 1025}, "num_workers=1025 is too large: it must be 1024 or less"),
        ({"seed": 2**63}, "is too large"),
        ({"learning_rate": NAN}, "learning_rate=nan is not a finite number"),
        ({"learning_rate": 10**400}, "is not a finite number"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf is not a finite number"),
        (
            {"token_budget": 2**17 + 1},
            "token_budget=131073 is too large: it must be 131072 or less",
        ),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 is too small: it must be above 0"),
    ],
)
def test_a_knob_has_its_limits(knob, told):
    with pytest.raises(ValueError, match=told):
        STOCK.but(**knob)


def test_the_limits_themselves_are_taken():
    assert STOCK.but(num_workers=1024, seed=2**63 - 1).num_workers == 1024


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


# Training

QUICK = STOCK.but(driver="eager", adapter="plain", cache="latents+text")


@pytest.fixture(scope="module")
def workload():
    with one_thread():
        yield open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.mark.parametrize("knob", [{"shapes": "packed"}, {"loss": "fused"}])
def test_a_knob_that_would_do_nothing_is_refused(knob, workload):
    ((name, value),) = knob.items()
    told = f"{name}='{value}' is for language models. Use {name}='{getattr(STOCK, name)}' with this workload"
    with pytest.raises(ValueError, match=told):
        Trainer(workload, QUICK.but(**knob))
    with pytest.raises(
        ValueError, match="memory_format='channels_last' is for convolutions. Use 'contiguous'"
    ):
        Trainer(
            open_workload("llava-lora", "tiny", device="cpu"),
            QUICK.but(cache="nothing", memory_format="channels_last"),
        )


def test_a_cpu_out_of_memory_is_no_other_error(workload):
    def build(recipe):
        return torch.empty(2**58, dtype=torch.uint8)

    full = copy.copy(workload)
    full.build = build
    with Benchmark(full) as bench:
        assert bench.compare({"a": QUICK})["a"].status == "oom"


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (
            "InvalidCxxCompiler: No working C++ compiler\n\nSet TORCH_LOGS",
            "skipped: torch.compile builds C++ here",
        ),
        ("first line\n\n  second line", "error: RuntimeError: first line second line"),
    ],
)
def test_why_a_recipe_failed_is_one_line(message, status, workload):
    def build(recipe):
        raise RuntimeError(message)

    broken = copy.copy(workload)
    broken.build = build
    with Benchmark(broken) as bench:
        found = bench.compare({"a": QUICK})["a"].status
        assert found.startswith(status)
        assert "\n" not in found


def test_a_name_in_a_bench_is_one_recipe(workload):
    with Benchmark(workload, warmup=1) as bench:
        bench.prepare({"a": QUICK})
        bench.prepare({"a": QUICK.but(precision="bf16")})  # on a CPU it is the same
        with pytest.raises(
            ValueError, match='"a" is already another recipe in this bench. Give the new one a name'
        ):
            bench.compare({"b": QUICK, "a": QUICK.but(rank=3)})
        assert set(bench.candidates) == {"a"}


def test_what_failed_in_a_bench_is_not_watched(workload, tmp_path):
    with Benchmark(workload) as bench:
        bench.failed["a"] = "oom"
        for look in (lambda: bench.watch("a"), lambda: bench.profile("a", tmp_path)):
            with pytest.raises(RuntimeError, match=r'"a" failed \(oom\)'):
                look()
        with pytest.raises(RuntimeError, match='"b" is not in this bench'):
            bench.watch("b")


@pytest.fixture(scope="module")
def trainer(workload, tmp_path_factory):
    with Trainer(workload, QUICK, tmp_path_factory.mktemp("run")) as trainer:
        trainer.run(1)
        yield trainer


@pytest.fixture(scope="module")
def checkpoint(trainer):
    return torch.load(trainer.save())


@pytest.mark.parametrize(
    "change",
    [
        {"step": "1"},
        {"step": -1},
        {"taken": True},
        {"recipe": [1]},
        {"workload": "sd15-lora"},
        {"parameters": {}},
        {"parameters": []},
        {"parameters": [torch.zeros(2)]},
        {"optimizer": {}},
        {"optimizer": {"state": {}, "param_groups": [1]}},
        {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
        {"scaler": None},
        {"scaler": {"scale": 1.0}},
        {"random": {}},
        {"random": {"cpu": 3}},
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(
    change, checkpoint, trainer
):
    changed = [p + 1 if p.is_floating_point() else p for p in checkpoint["parameters"]]
    torch.save(checkpoint | {"parameters": changed} | change, trainer.folder / FILE)
    with pytest.raises(ValueError, match="does not fit this run .*Start in another folder"):
        load(trainer)
    assert all(
        torch.equal(p, old)
        for p, old in zip(trainer.parameters, checkpoint["parameters"], strict=True)
    )


def test_a_checkpoint_without_a_knob_is_another_recipes(checkpoint, workload, tmp_path):
    recipe = {knob: value for knob, value in checkpoint["recipe"].items() if knob != "rank"}
    torch.save(checkpoint | {"recipe": recipe}, tmp_path / FILE)
    with pytest.raises(ValueError, match="was written with rank='nothing'; this run has 4"):
        Trainer(workload, QUICK, tmp_path, resume=True)


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
