"""Advice as switches: one knob each, effects with their spread, numbers against float32, and
processes of their own.
"""

from __future__ import annotations

import pytest
import torch
from claim_runs import timed

from labutils.labs import lab09_toggles
from labutils.layers.cuda_graph import float32_rounded
from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.training.step import build_optimizer
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    return on_drawn_latents(
        open_workload("sd15-lora", "tiny", device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))
    )


# ---------------------------------------------------------------------------------------- switches


@pytest.mark.parametrize("scale", ["tiny", "small", "full"])
def test_a_switch_changes_one_knob(scale):
    recipes = lab09_toggles.switches(scale)
    for name, switch in lab09_toggles.SWITCHES.items():
        changes = recipes[name].changes_from(recipes[switch.base])
        assert len(changes) == (2 if name in ("accumulation", "cudnn.benchmark") else 1), name
        assert recipes[name].examples_per_step == recipes[switch.base].examples_per_step


def test_timed_algorithms_are_not_those_that_the_base_was_given():
    """PyTorch's cache of cuDNN's algorithms tells shapes, layouts, formats and the permission to
    use TF32 apart, not whether they were timed: beside a loop with the same key the switch would
    change nothing."""
    recipes = lab09_toggles.switches("full")
    timed_ones = recipes["cudnn.benchmark"]
    others = [recipe for name, recipe in recipes.items() if name != "cudnn.benchmark"]
    key = lambda recipe: (recipe.precision, recipe.memory_format, recipe.tf32 != "nothing")
    assert timed_ones.cudnn_benchmark and key(timed_ones) not in map(key, others)
    assert timed_ones.precision == "fp16"  # in which TF32 has no say


def test_a_cpu_is_given_what_it_can_tell_apart():
    found = lab09_toggles.switches_on("cpu", "tiny")
    assert list(found)[0] == "base" and {"float32", "bf16", "tf32", "cudnn.benchmark"}.isdisjoint(
        found
    )
    assert {
        "checkpointing",
        "selective checkpointing",
        "accumulation",
        "8-bit optimizer",
    } <= found.keys()
    assert "paged optimizer" not in found
    assert list(lab09_toggles.switches_on("cuda", "full")) == list(lab09_toggles.switches("full"))


def test_what_pays_is_counted():
    runs = {
        "float32": timed("09", "float32", 200),
        "base": timed("09", "base", 100),
        "tf32": Run("09", "tf32", status="oom"),
    }
    runs |= {
        "channels last": timed("09", "c", 97),
        "fused optimizer": timed("09", "f", 94),
        "checkpointing": timed("09", "k", 140),
    }
    assert lab09_toggles.paying(runs) == {"tried": 4, "helped": 2, "left_alone": 2}


def test_rows_say_what_was_changed_and_what_failed():
    recipes = lab09_toggles.switches("full")
    runs = {
        name: timed("09", name, ms)
        for name, ms in (("base", 100), ("float32", 200), ("checkpointing", 140))
    }
    for name, run in runs.items():
        run.recipe, run.metrics["peak_gb"] = (
            recipes[name].as_dict(),
            {"base": 10.0, "float32": 18.0, "checkpointing": 5.0}[name],
        )
    runs["tf32"] = Run("09", "tf32", status="oom")
    rows = {row[0]: row for row in lab09_toggles.switch_rows(runs)}
    assert rows["checkpointing"][1:6] == ("`checkpointing='blocks'`", 140, "+40 %", 5.0, "-50")
    assert rows["base"][1:6] == ("`precision='fp16'`", 100, "-50 %", 10.0, "-44")
    assert rows["**float32**"][3] is None and "tf32: oom" in rows


def test_what_an_example_takes_alone_stands_beside_what_all_take_together():
    """Eight micro-batches take eight times as long: to a batch, its number of examples makes no
    difference.
    """
    recipes = lab09_toggles.switches("full")
    runs = {name: timed("09", name, ms) for name, ms in (("base", 100), ("accumulation", 800))}
    for name, run in runs.items():
        run.recipe = recipes[name].as_dict()
    assert lab09_toggles.one_by_one_rows(runs) == [("8", 100, pytest.approx(100))]
    assert len(lab09_toggles.ONE_BY_ONE_HEAD) == 3
    assert (
        lab09_toggles.one_by_one_rows(
            runs | {"accumulation": Run("09", "accumulation", status="oom")}
        )
        == []
    )
    assert lab09_toggles.one_by_one_rows({"base": runs["base"]}) == []


# ----------------------------------------------------------------------------------------- numbers


def test_fewer_bits_are_farther_off(little):
    found = lab09_toggles.numerical_effects(little)
    assert found["tf32"].status.startswith("skipped")
    error = {name: run.metrics["gradient_error"] for name, run in found.items() if run.ok}
    assert error["fp32"] == 0 < error["fp16, scaled loss"] < error["bf16"] < 0.1
    # Rounding to 10 and to 7 bits of mantissa: a factor of eight between the two, give or take.
    assert 3 < error["bf16"] / error["fp16, scaled loss"] < 20
    lost = {name: run.metrics["lost_share"] for name, run in found.items() if run.ok}
    assert lost["fp16, scaled loss"] <= lost["fp16, loss not scaled"] < 0.5
    assert lost["fp32"] == lost["bf16"] == 0


def test_the_backward_pass_is_rounded_as_the_forward_pass_is(little, monkeypatch):
    """PyTorch's own setting has convolutions in TF32: of a float32 gradient that would be half."""
    seen, loss = [], little.loss

    def watched(*args):
        found = loss(*args)
        found.register_hook(lambda _: seen.append(torch.backends.cudnn.conv.fp32_precision))
        return found

    monkeypatch.setattr(little, "loss", watched)
    for name in ("fp32", "bf16"):
        lab09_toggles._gradient(little, lab09_toggles.FORMS[name])
    assert seen == ["ieee", "ieee"]


def test_tf32_is_put_back():
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    for what, expected in (("everything", "tf32"), ("nothing", "ieee")):
        with pytest.raises(KeyError), float32_rounded(what):
            assert (
                torch.backends.cuda.matmul.fp32_precision
                == torch.backends.cudnn.conv.fp32_precision
                == expected
            )
            raise KeyError
        assert (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,
        ) == before
    with float32_rounded("convolutions"):
        assert (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,
        ) == before


# -------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    "kind", ["adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "adamw-8bit"]
)
def test_every_form_of_adamw_is_adamw(kind):
    """Against the update written out (Loshchilov and Hutter 2019), three steps of it."""
    torch.manual_seed(0)
    start, gradient = torch.randn(100, 100, dtype=torch.float32), torch.randn(100, 100)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([parameter], Recipe(optimizer=kind, learning_rate=1e-2))
    expected, m, v = start.double(), torch.zeros(100, 100).double(), torch.zeros(100, 100).double()
    for step in range(1, 4):
        parameter.grad = gradient * step
        optimizer.step()
        slope = gradient.double() * step
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        expected = expected * (1 - 1e-2 * 1e-2) - 1e-2 * (m / (1 - 0.9**step)) / (
            (v / (1 - 0.999**step)).sqrt() + 1e-8
        )
    moved, meant = parameter.detach().double() - start, expected - start
    assert (moved - meant).norm() / meant.norm() < (0.06 if kind == "adamw-8bit" else 1e-4)


def test_eight_bits_are_a_quarter_of_the_state():
    found = lab09_toggles.optimizer_costs("tiny", "cpu")
    assert found["adamw-fused"].metrics["state_bytes"] == 8
    assert 2 < found["adamw-8bit"].metrics["state_bytes"] < 2.3
    assert (
        found["adamw-loop"].metrics["update_error"]
        == 0
        < found["adamw-8bit"].metrics["update_error"]
        < 0.1
    )
    assert found["adamw-paged"].status.startswith("skipped")
    assert len(lab09_toggles.optimizer_rows(found)) == len(found)


def test_paged_moments_stay_where_they_are_on_a_cpu():
    assert Recipe(optimizer="adamw-paged").fitted_to("cpu").optimizer == "adamw-8bit"
    with pytest.raises(ValueError, match="adamw-fused"):
        Recipe(driver="graph", logging="ring-buffer", optimizer="adamw-8bit")


# ----------------------------------------------------------------------- the environment's switches


BROKEN = {"LABUTILS_CACHE": "x", "PYTHONPATH": "/nowhere", "PYTHONHOME": "/no"}


def test_a_process_of_its_own_reports_its_run(little):
    recipe = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)
    work = open_workload("sd15-lora", "tiny", device="cpu", cache_dir=little.cache_dir)
    runs = lab09_toggles.trained_alone(
        work, recipe, 3, {"alone": {"OMP_NUM_THREADS": "1"}, "broken": BROKEN}
    )
    assert list(runs) == ["alone", "broken"]
    run = runs["alone"]
    assert (
        run.ok
        and run.run == "alone"
        and run.metric("step_ms") > 0
        and len(run.samples["step_ms"]) >= 3
    )
    assert runs["broken"].status.startswith("error: the process ended with code")
    refused = lab09_toggles.trained_alone(
        work, recipe.but(base_linear="fp8-te"), 3, {"refused": {}}
    )["refused"]
    assert refused.status.startswith(("error: ValueError", "skipped: "))


def test_an_empty_list_shows_no_gpu():
    assert lab09_toggles.visible_gpus("", "") == [0, 0]
