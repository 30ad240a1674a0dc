"""Advice as switches: one knob each, numbers against float32, processes of their own."""

from __future__ import annotations

import pytest
import torch

from labutils.labs import lab09_toggles as toggles
from labutils.labs.ladders import distinct_on
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training.step import build_optimizer
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return on_drawn_latents(open_workload("sd15-lora", "tiny", device="cpu", cache_dir=cache))


@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_a_switch_changes_one_knob(scale):
    recipes = toggles.switches(scale)
    for name, switch in toggles.SWITCHES.items():
        changes = recipes[name].changes_from(recipes[switch.base])
        assert len(changes) == (2 if name in ("accumulation", "cudnn.benchmark") else 1), name
        assert recipes[name].examples_per_step == recipes[switch.base].examples_per_step


def test_timed_algorithms_are_not_those_that_the_base_was_given():
    """PyTorch's cache of cuDNN's algorithms tells shapes, layouts, formats and the permission to
    use TF32 apart, not whether they were timed."""
    recipes = toggles.switches("full")
    timed = recipes.pop("cudnn.benchmark")
    keys = {(r.precision, r.memory_format, r.tf32 != "nothing") for r in recipes.values()}
    assert timed.cudnn_benchmark and timed.precision == "fp16"
    assert (timed.precision, timed.memory_format, timed.tf32 != "nothing") not in keys


def test_a_cpu_is_given_what_it_can_tell_apart():
    on_cpu = distinct_on("cpu", toggles.switches("tiny"))
    assert next(iter(on_cpu)) == "base" and {"float32", "bf16", "tf32"}.isdisjoint(on_cpu)
    assert {"checkpointing", "accumulation", "8-bit optimizer"} <= on_cpu.keys()


def timed(toggle: str, ms: float, peak_gb: float) -> Run:
    samples = [ms + 0.001 * n for n in range(8)]
    run = Run("09", toggle, tags={"experiment": "toggles", "toggle": toggle})
    run.recipe = toggles.switches("full")[toggle].as_dict()
    run.metrics = {"step_ms": summarise(samples), "peak_gb": peak_gb}
    run.samples = {"step_ms": samples, "round": list(range(8))}
    return run


def test_the_table_says_what_was_changed_and_what_it_did():
    each = {"float32": (200, 18.0), "base": (100, 10.0), "checkpointing": (140, 5.0)}
    runs = {name: timed(name, *values) for name, values in each.items()}
    rows = toggles.switch_table(runs.values()).set_index("switch")
    assert rows.loc["checkpointing", "changes"] == "checkpointing=blocks"
    assert rows.loc["checkpointing", "memory, %"] == pytest.approx(-50)
    assert rows.loc["base", "against its base"].startswith("-50")
    assert toggles.paying(runs) == {"tried": 2, "helped": 1, "left_alone": 1}


# ----------------------------------------------------------------------------------------- numbers


def test_fewer_bits_are_farther_off(little):
    runs = toggles.numerical_effects(little)
    assert runs["tf32"].status.startswith("skipped")
    error = {name: run.metrics["gradient_error"] for name, run in runs.items() if run.ok}
    assert error["fp32"] == 0 < error["fp16, scaled loss"] < error["bf16"] < 0.1
    # Rounding to 10 and to 7 bits of mantissa: a factor of eight between the two, give or take.
    assert 3 < error["bf16"] / error["fp16, scaled loss"] < 20
    lost = {name: run.metrics["lost_share"] for name, run in runs.items() if run.ok}
    assert lost["fp16, scaled loss"] <= lost["fp16, loss not scaled"] < 0.5
    assert lost["fp32"] == lost["bf16"] == 0


# -------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("kind", toggles.KINDS[:4])
def test_every_form_of_adamw_is_adamw(kind):
    """Against the update written out (Loshchilov and Hutter 2019), three steps of it."""
    torch.manual_seed(0)
    start, gradient = torch.randn(100, 100), torch.randn(100, 100)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([parameter], Recipe(optimizer=kind, learning_rate=1e-2))
    expected, m, v = start.double(), torch.zeros(100, 100).double(), torch.zeros(100, 100).double()
    for step in range(1, 4):
        parameter.grad = gradient * step
        optimizer.step()
        slope = gradient.double() * step
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        update = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-2 * 1e-2) - 1e-2 * update
    moved, meant = parameter.detach().double() - start, expected - start
    assert (moved - meant).norm() / meant.norm() < (0.06 if kind == "adamw-8bit" else 1e-4)


def test_eight_bits_are_a_quarter_of_the_state():
    runs = toggles.optimizer_costs("tiny", "cpu")
    assert runs["adamw-fused"].metrics["state_bytes"] == 8
    assert 2 < runs["adamw-8bit"].metrics["state_bytes"] < 2.3
    assert runs["adamw-loop"].metrics["update_error"] == 0
    assert 0 < runs["adamw-8bit"].metrics["update_error"] < 0.1
    assert runs["adamw-paged"].status.startswith("skipped")


# ----------------------------------------------------------------------- the environment's switches


def test_a_process_of_its_own_reports_its_run(little):
    recipe = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)
    cache = little.cache_dir
    workload = open_workload("sd15-lora", "tiny", device="cpu", cache_dir=cache)
    broken = {"LABUTILS_CACHE": "x", "PYTHONPATH": "/nowhere", "PYTHONHOME": "/no"}
    environments = {"alone": {"OMP_NUM_THREADS": "1"}, "broken": broken}
    runs = toggles.trained_alone(workload, recipe, 3, environments)
    assert runs["alone"].ok and len(runs["alone"].samples["step_ms"]) >= 3
    assert runs["broken"].status.startswith("error")


def test_an_empty_list_shows_no_gpu():
    assert toggles.visible_gpus("", "") == [0, 0]
