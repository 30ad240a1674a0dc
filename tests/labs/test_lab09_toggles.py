"""Advice as switches: one knob each, effects against their base, numbers against float32."""

from __future__ import annotations

import pytest
import torch

from labutils.labs import lab09_toggles as toggles
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training.step import build_optimizer
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents


@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_a_switch_changes_one_knob(scale):
    recipes = toggles.switches(scale)
    for name, switch in toggles.SWITCHES.items():
        changes = recipes[name].as_dict().items() - recipes[switch.base].as_dict().items()
        assert len(changes) == (2 if name in ("accumulation", "cudnn.benchmark") else 1), name
        assert recipes[name].examples_per_step == recipes[switch.base].examples_per_step
    # PyTorch remembers an algorithm by shape, layout, format and permission to use TF32, however it
    # was chosen: no other switch may have the timed ones' key.
    timed = recipes.pop("cudnn.benchmark")
    keys = {(r.precision, r.memory_format, r.tf32 != "nothing") for r in recipes.values()}
    assert (timed.precision, timed.memory_format, timed.tf32 != "nothing") not in keys


def toggled(name: str, ms: list[float], **tags) -> Run:
    run = Run("09", name, tags={"experiment": "toggles", "toggle": name} | tags)
    run.samples = {"step_ms": ms, "round": list(range(len(ms)))}
    run.metrics = {"step_ms": summarise(ms), "peak_gb": 400 / ms[0]}
    return run


@pytest.mark.parametrize(("noise", "steady"), [(1.0, True), (1.1, False)])
def test_the_table_holds_each_switch_against_its_base_and_the_base_again(noise, steady):
    base = [100.0, 101, 99, 100]
    runs = [toggled("base", base), toggled("checkpointing", [1.3 * ms for ms in base])]
    runs += [toggled("base", [noise * ms for ms in base], again=True)]
    rows = toggles.switch_table(runs).set_index("switch")
    assert list(rows.index) == ["base", "checkpointing", "base again"]
    assert rows.loc["checkpointing", "time"].startswith("+30")
    assert ("unsteady" in rows.loc["checkpointing", "time"]) != steady
    assert ("unsteady" in rows.loc["base again", "time"]) != steady


# ----------------------------------------------------------------------------------------- numbers


def test_fewer_bits_are_farther_off():
    workload = open_workload("sd15-lora", "tiny", device="cpu")
    runs = toggles.numerical_effects(on_drawn_latents(workload))
    error = {name: run.metrics["gradient_error"] for name, run in runs.items()}
    assert error["fp32"] == 0 < error["fp16, scaled loss"] < error["bf16"] < 0.1
    # Rounding to 10 and to 7 bits of mantissa: a factor of eight between the two, give or take.
    assert 3 < error["bf16"] / error["fp16, scaled loss"] < 20
    lost = {name: run.metrics["lost_share"] for name, run in runs.items()}
    assert lost["fp16, scaled loss"] <= lost["fp16, loss not scaled"] < 0.5
    assert lost["fp32"] == lost["bf16"] == 0


# -------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("kind", ["adamw-fused", "adamw-8bit"])
def test_every_form_of_adamw_is_adamw(kind):
    ours, exact = (torch.nn.Parameter(torch.zeros(100, 100)) for _ in range(2))
    forms = (build_optimizer([ours], Recipe(optimizer=kind)), torch.optim.AdamW([exact], lr=1e-4))
    for seed in range(3):
        ours.grad = torch.randn(100, 100, generator=torch.Generator().manual_seed(seed))
        exact.grad = ours.grad.clone()
        for optimizer in forms:
            optimizer.step()
    assert (ours - exact).norm() / exact.norm() < (0.06 if kind == "adamw-8bit" else 1e-3)
