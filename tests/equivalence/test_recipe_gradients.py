"""Every recipe computes what the plain loop computes, and that is what mathematics says it is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from recipes_at_work import (
    PLAIN,
    Watched,
    assert_same_gradients,
    assert_same_path,
    sd_workload,
    watch,
    watch_trainer,
)
from torch import Tensor, nn
from torch.func import functional_call

from labutils.labs.ladders import A1_LADDER, climb
from labutils.layers.lora import lora_layers
from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.workloads import open_workload, stable_diffusion
from labutils.workloads.stable_diffusion import SIZES

STEPS = 2
CLIPPED = PLAIN.but(max_grad_norm=0.07)
"""Gradients of these two steps have norms of 0.082 and 0.068: one is clipped and one is not."""


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def workload():
    return sd_workload()


@pytest.fixture(scope="module")
def plain(workload) -> Watched:
    return watch(workload, CLIPPED, STEPS)


# -------------------------------------------------------------------------------------------------
# Gradients and steps of every recipe

MERGED = {"micro_batch": 4, "accumulation": 1}
CHANGES = {
    "folded": {"adapter": "folded"},
    "stock": {"driver": "accelerate", "adapter": "peft"},
    "channels last, rewritten": {"memory_format": "channels_last", "layers": "rewritten"},
    "fused optimizer, device log": {"optimizer": "adamw-fused", "logging": "ring-buffer"},
    "cached text": {"cache": "latents+text"},
    "workers": {"num_workers": 2, "persistent_workers": True},
    "merged, cached": MERGED | {"cache": "latents+text"},
}
LAST_RUNG = (
    list(climb(A1_LADDER).values())[-1].but(compile="off", max_grad_norm=0.07).fitted_to("cpu")
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_recipe_computes_what_the_plain_loop_does(change, workload, plain):
    found = watch(workload, CLIPPED.but(**CHANGES[change]), STEPS)
    for mine, expected in zip(found.gradients, plain.gradients, strict=True):
        assert_same_gradients(mine, expected)
    assert_same_path(found, plain)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)


def test_the_last_rung_computes_what_the_first_does(workload, plain):
    """All changes at once, as far as a CPU can make them and but for the compiler."""
    assert {"folded", "channels_last", "rewritten", "latents+text"} <= set(
        LAST_RUNG.as_dict().values()
    )
    found = watch(workload, LAST_RUNG, STEPS)
    for mine, expected in zip(found.gradients, plain.gradients, strict=True):
        assert_same_gradients(mine, expected)
    assert_same_path(found, plain)


# -------------------------------------------------------------------------------------------------
# Compiled

FEW_BLOCKS = dataclasses.replace(SIZES["tiny"], unet_channels=(32,))
"""Every kind of layer still, but few enough to compile."""
COMPILED = CLIPPED.but(compile="default", adapter="folded", memory_format="channels_last")
COMPILED = COMPILED.but(layers="rewritten", cache="latents+text")


@pytest.fixture
def few_blocks(monkeypatch):
    """A workload of its own, as one keeps its networks, and a compiler that begins anew."""
    monkeypatch.setitem(stable_diffusion.SIZES, "tiny", FEW_BLOCKS)
    torch.compiler.reset()
    yield open_workload("sd15-lora", scale="tiny", device="cpu")
    torch.compiler.reset()


def test_what_is_traced_computes_the_same(few_blocks, monkeypatch):
    """The whole UNet, by the compiler's front end and its autograd, without the code generator."""
    original, compiled = torch.compile, []

    def traced(target: object, **options: object) -> object:
        # and not what libraries compile as they load
        if isinstance(getattr(target, "__self__", target), nn.Module):
            compiled.append(target)
        return original(target, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    plain = watch(few_blocks, CLIPPED)
    found = watch(few_blocks, COMPILED.but(cache="nothing"))
    assert len(compiled) == 1
    assert_same_gradients(found.gradients[0], plain.gradients[0])
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)


def test_what_is_compiled_computes_the_same(few_blocks):
    """By the code generator too, on the blocks alone; whole networks take it a minute (see
    tests/gpu).
    """
    plain, found = (
        watch(few_blocks, CLIPPED, STEPS),
        watch(few_blocks, COMPILED.but(compile_scope="blocks"), STEPS),
    )
    for mine, expected in zip(found.gradients, plain.gradients, strict=True):
        assert_same_gradients(mine, expected)
    assert_same_path(found, plain)


# -------------------------------------------------------------------------------------------------
# The plain loop against mathematics, in float64


def test_the_gradient_is_that_of_the_written_out_loss(workload):
    with Trainer(workload, PLAIN.but(rank=3)) as trainer:
        state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        scaling = {
            name: layer.scaling["default"]
            for name, layer in lora_layers(trainer.model.unet).items()
        }
        watched = watch_trainer(trainer, 1)
    assert set(scaling.values()) == {1.0}
    expected, loss = gradient_by_hand(state, watched)
    assert_same_gradients(watched.gradients[0], expected)
    assert watched.losses == [pytest.approx(loss, rel=1e-5)]


def gradient_by_hand(state: dict[str, Tensor], watched: Watched) -> tuple[dict[str, Tensor], float]:
    """DDPM's loss, mean over the micro-batches, of a UNet whose weights are W + BA; its gradient by
    A and B.
    """
    networks = stable_diffusion._networks(SIZES["tiny"], torch.device("cpu")).double()
    base = {
        name.replace(".base_layer", ""): t.double()
        for name, t in state.items()
        if "lora_" not in name
    }
    networks.load_state_dict(base)
    matrices = {name: tensor.double().requires_grad_() for name, tensor in watched.before.items()}
    weights = {f"unet.{name}": parameter for name, parameter in networks.unet.named_parameters()}
    for layer in {name.rpartition(".lora_")[0] for name in matrices}:
        a, b = matrices[f"{layer}.lora_A.weight"], matrices[f"{layer}.lora_B.weight"]
        weights[f"unet.{layer}.weight"] = weights[f"unet.{layer}.weight"] + b @ a
    unet_weights = {name.removeprefix("unet."): weight for name, weight in weights.items()}
    kept = torch.cumprod(
        1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0
    )
    losses = []
    for batch, draws in watched.seen:
        encoded = networks.vae.quant_conv(networks.vae.encoder(batch["pixel_values"].double()))
        mean, log_variance = encoded[:, :4], encoded[:, 4:]
        latents = 0.18215 * (
            mean + torch.exp(log_variance.clamp(-30, 20) / 2) * draws["posterior"].double()
        )
        share = kept[draws["timesteps"]].view(-1, 1, 1, 1)
        noisy = share.sqrt() * latents + (1 - share).sqrt() * draws["noise"].double()
        condition = networks.text_encoder(batch["input_ids"]).last_hidden_state
        predicted = functional_call(
            networks.unet, unet_weights, (noisy, draws["timesteps"], condition)
        ).sample
        losses.append((predicted - draws["noise"].double()).square().mean())
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(matrices.values()))
    return dict(zip(matrices, (g.float() for g in gradients), strict=True)), loss.item()


def test_the_step_is_adamws_on_the_clipped_gradient(workload):
    """One step written out in float64 (Loshchilov and Hutter 2019, algorithm 2)."""
    watched = watch(workload, PLAIN.but(max_grad_norm=0.01, learning_rate=1e-3))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in watched.gradients[0].values()))
    assert norm > 0.01
    for name, start in watched.before.items():
        p, g = start.double(), watched.gradients[0][name].double() * 0.01 / norm
        first, second = 0.1 * g, 0.001 * g * g
        expected = p * (1 - 1e-3 * 0.01) - 1e-3 * (first / 0.1) / ((second / 0.001).sqrt() + 1e-8)
        torch.testing.assert_close(watched.after[name].double(), expected, rtol=1e-4, atol=2e-7)


def test_trainers_side_by_side_do_not_disturb_each_other(workload):
    """accelerate's state is the process's, the frozen weights are shared, and random numbers are
    given here.
    """
    recipes = [STOCK, STOCK.but(accumulation=2), PLAIN]
    alone = [watch(workload, recipe, 2) for recipe in recipes]
    trainers = [Trainer(workload, recipe) for recipe in recipes]
    together = [watch_trainer(trainer, 1) for trainer in trainers]
    for trainer, found, expected in zip(trainers, together, alone, strict=True):
        assert_same_gradients(found.gradients[0], expected.gradients[0], rtol=1e-6)
        trainer.close()
