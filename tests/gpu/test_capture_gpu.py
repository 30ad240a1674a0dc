"""The whole optimizer step in one CUDA graph: the same training as the eager loop's, from the first
replay on.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from recipes_at_work import (
    PLAIN,
    adapter_gradients,
    adapter_state,
    assert_same_gradients,
    copied,
    perturb,
    watch,
)
from torch import Tensor

from labutils.layers.cuda_graph import WARM_UP, Captured
from labutils.recipe import Recipe
from labutils.training import Trainer
from labutils.training.loss_log import RingLog
from labutils.workloads import open_workload

STEPS = 3
EAGER = PLAIN.but(logging="ring-buffer", optimizer="adamw-fused", max_grad_norm=1e9)
"""Gradients are clipped to a norm that they never have: what is left in a graph's `.grad` is then
the gradient.
"""
GRAPH = EAGER.but(driver="graph")
MERGED = {"micro_batch": 4, "accumulation": 1}


pytestmark = pytest.mark.usefixtures("full_float32")


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cuda")


@dataclass
class Outcome:
    """Where a run with the workload's own random numbers led; `gradients` are the last step's."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float]
    state: dict[str, Tensor]


def outcome(workload, recipe: Recipe, steps: int, prepare=lambda trainer: None) -> Outcome:
    gradients: list[dict[str, Tensor]] = []
    with Trainer(workload, recipe) as running:
        unet = running.model.unet
        perturb(unet)
        prepare(running)
        if recipe.driver != "graph":
            keep_gradients(running, gradients)
        before = copied(adapter_state(unet))
        for _ in range(steps):
            running.step()
        torch.cuda.synchronize()
        running.driver.log.flush()
        if recipe.driver == "graph":
            gradients.append(adapter_gradients(unet))
        return Outcome(
            before,
            copied(adapter_state(unet)),
            gradients[-1],
            list(running.losses),
            state_of(running),
        )


def keep_gradients(running: Trainer, gradients: list[dict[str, Tensor]]) -> None:
    """The gradients as they are before the optimizer takes and drops them."""
    hook = lambda *args: gradients.append(adapter_gradients(running.model.unet))
    running.optimizer.register_step_pre_hook(hook)


def state_of(running: Trainer) -> dict[str, Tensor]:
    """What else a step changes: moments, the optimizer's count, the loss scale, the place in the
    ring, chance.
    """
    scaler, log = running.driver.scaler, running.driver.log
    found = {"chance": torch.cuda.get_rng_state()} | (
        {"place": log.place} if isinstance(log, RingLog) else {}
    )
    for index, state in enumerate(running.optimizer.state.values()):
        found |= {f"{name} {index}": tensor for name, tensor in state.items()}
    if scaler.is_enabled():
        found |= {"scale": scaler._scale, "growth": scaler._growth_tracker}
    return copied(found)


def assert_same_training(found: Outcome, expected: Outcome, rtol: float = 1e-4) -> None:
    assert_same_gradients(found.gradients, expected.gradients, rtol)
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    for name, start in expected.before.items():
        way = (expected.after[name] - start).norm().item()
        off = (found.after[name] - expected.after[name]).norm().item()
        assert off <= 20 * rtol * way > 0, f"{name}: {off / way:.2e} off"


CHANGES = {
    "4 micro-batches": {},
    "4 streams": {"streams": 4},
    "folded, streams": {"adapter": "folded", "streams": 3},
    "peft": {"adapter": "peft"},
    "pinned": {"pin_memory": True, "non_blocking": True, "num_workers": 2},
    "last rung, not compiled": MERGED
    | {
        "adapter": "folded",
        "cache": "latents+text",
        "memory_format": "channels_last",
        "layers": "rewritten",
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_graph_trains_as_the_eager_loop_does(change, workload):
    eager = EAGER.but(**{k: v for k, v in CHANGES[change].items() if k != "streams"})
    graph = GRAPH.but(**CHANGES[change])
    assert_same_training(outcome(workload, graph, STEPS), outcome(workload, eager, STEPS))


@pytest.mark.parametrize("change", ["4 micro-batches", "last rung, not compiled"])
def test_the_graph_clips_as_the_eager_loop_does(change, workload):
    change = CHANGES[change] | {"max_grad_norm": 0.02}
    found, expected = (outcome(workload, recipe.but(**change), STEPS) for recipe in (GRAPH, EAGER))
    norm = torch.cat([g.flatten() for g in found.gradients.values()]).norm().item()
    assert norm == pytest.approx(0.02, rel=1e-3)
    assert_same_training(found, expected)


def test_warming_up_leaves_no_trace(workload):
    """After one replay the moments, counts and random numbers are those of one eager step, and the
    log has one loss.
    """
    found, expected = (outcome(workload, recipe, 1) for recipe in (GRAPH, EAGER))
    assert torch.equal(found.state["chance"], expected.state["chance"])
    assert found.state["place"].item() == expected.state["place"].item() == 1
    assert len(found.losses) == 1
    for name, tensor in expected.state.items():
        if name.startswith("step"):
            assert found.state[name].item() == tensor.item() == 1
        elif name.startswith("exp_avg"):
            assert tensor.abs().max() > 0
            torch.testing.assert_close(
                found.state[name], tensor, rtol=1e-3, atol=1e-4 * tensor.abs().max().item()
            )


@pytest.mark.parametrize("change", ["4 micro-batches", "folded, streams"])
def test_half_precision_with_its_loss_scale(change, workload):
    change = CHANGES[change] | {"precision": "fp16"}
    eager = EAGER.but(**{k: v for k, v in change.items() if k != "streams"})
    found, expected = outcome(workload, GRAPH.but(**change), STEPS), outcome(workload, eager, STEPS)
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.state["scale"].item() == expected.state["scale"].item() == 2**16
    assert found.state["growth"].item() == expected.state["growth"].item() == STEPS
    assert_same_gradients(found.gradients, expected.gradients, rtol=0.05)


@pytest.mark.parametrize("recipe", [EAGER, GRAPH], ids=["eager", "graph"])
def test_a_step_that_overflows_is_skipped_and_the_scale_halved(recipe, workload):
    too_much = 2.0**60

    def prepare(running: Trainer) -> None:
        running.driver.scaler._scale.fill_(too_much)

    found = outcome(workload, recipe.but(precision="fp16"), 2, prepare)
    assert found.state["scale"].item() == too_much / 4
    assert found.state["growth"].item() == 0
    assert all(torch.equal(found.after[name], found.before[name]) for name in found.before)
    assert all(
        tensor.item() == 0 for name, tensor in found.state.items() if name.startswith("step")
    )


def test_a_recording_that_breaks_off_says_why_and_leaves_nothing_behind():
    stream, x = torch.cuda.current_stream(), torch.ones(8, device="cuda")
    times = iter(range(10))

    def asks_the_host() -> None:
        if next(times) >= WARM_UP:
            x.sum().item()

    with pytest.raises(RuntimeError, match="capturing"):
        Captured(asks_the_host, list)
    assert torch.cuda.current_stream() == stream
    torch.randn(8, device="cuda")  # as the next model's weights are drawn
    again = Captured(lambda: x.mul_(2), lambda: [x])
    again()
    assert x.tolist() == [2.0] * 8


def test_the_ring_goes_round_without_a_loss_lost(workload):
    recipe = {"cache": "latents+text", "accumulation": 1}
    steps = 75  # more than two turns of 32, and not a whole half
    found, expected = (
        outcome(workload, r.but(**recipe), steps) for r in (GRAPH, EAGER.but(logging="synchronous"))
    )
    assert len(found.losses) == steps
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)


def test_a_graph_resumes(workload, tmp_path):
    """Moments, loss scale and random numbers are loaded before the capture, and survive its
    warm-up.
    """
    for recipe in (
        GRAPH.but(cache="latents+text", precision="fp16"),
        GRAPH.but(adapter="folded", num_workers=1),
    ):
        folder = tmp_path / recipe.precision
        with Trainer(workload, recipe) as unbroken:
            unbroken.run(5)
            unbroken.driver.log.flush()
            expected, losses = copied(adapter_state(unbroken.model.unet)), list(unbroken.losses)
        with Trainer(workload, recipe, folder) as first:
            first.run(3, checkpoint_every=3)
        with Trainer(workload, recipe, folder, resume=True) as second:
            second.run(5)
            second.driver.log.flush()
            found = copied(adapter_state(second.model.unet))
            assert second.losses == pytest.approx(losses[3:], rel=1e-3)
        for name, tensor in expected.items():
            if "lora_B" in name:  # which began at zero
                assert (found[name] - tensor).norm() <= 0.02 * tensor.norm() > 0, name


def test_compiled_and_captured_it_is_still_the_same(workload):
    torch.compiler.reset()
    change = CHANGES["last rung, not compiled"]
    found = outcome(workload, GRAPH.but(**change, compile="default"), STEPS)
    assert_same_training(found, outcome(workload, EAGER.but(**change), STEPS))


def test_accelerate_and_the_plain_loop_agree_in_half_precision(workload):
    """Autocast reaches exactly as far in both, and the loss scale is the same."""
    plain, stock = (
        watch(workload, PLAIN.but(precision="fp16", driver=d), 2) for d in ("eager", "accelerate")
    )
    for mine, expected in zip(stock.gradients, plain.gradients, strict=True):
        assert_same_gradients(mine, expected, rtol=0.02)
    assert stock.losses == pytest.approx(plain.losses, rel=1e-3)
