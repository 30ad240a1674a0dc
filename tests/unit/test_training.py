"""One loop, many recipes: each computes what the plain loop computes, and that is what mathematics
says it is.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from recipes_at_work import (
    PLAIN,
    SameDraws,
    Watched,
    adapter_gradients,
    assert_same_gradients,
    assert_same_path,
    copied,
    one_thread,
    perturb,
    watch,
    watch_session,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from labutils import training
from labutils.data.images import EpochOrder
from labutils.labs.ladders import A1_LADDER, climb
from labutils.layers import cuda_graph
from labutils.layers.cuda_graph import attention_kernel
from labutils.layers.lora import adapter_state, lora_layers
from labutils.profiling.roofline import Roofline
from labutils.profiling.timing import StepTimes
from labutils.recipe import STOCK, Recipe
from labutils.results.records import Results
from labutils.training import Trainer, benchmark, compare, train
from labutils.training.step import GraphStep, compile_as_asked
from labutils.workloads import open_workload, stable_diffusion
from labutils.workloads.stable_diffusion import SIZES

STEPS = 2
CLIPPED = PLAIN.but(max_grad_norm=0.07)
"""Gradients of these two steps have norms of 0.082 and 0.068: one is clipped and one is not."""


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


class Remembered(Dataset):
    """Rows that are decoded once for all tests."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows
        self.known: dict[int, dict] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        if index not in self.known:
            self.known[index] = self.rows[index]
        return self.known[index]


@pytest.fixture(scope="module")
def workload():
    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    decoded, dataset = Remembered(workload.dataset(None, PLAIN)), workload.dataset
    workload.dataset = lambda model, recipe: (
        decoded if recipe.cache == "nothing" else dataset(model, recipe)
    )
    return workload


@pytest.fixture(scope="module")
def plain(workload) -> Watched:
    return watch(workload, CLIPPED, STEPS)


# -------------------------------------------------------------------------------------------------
# Gradients and steps of every recipe

MERGED = {"micro_batch": 4, "accumulation": 1}
CHANGES = {
    "accelerate": {"driver": "accelerate"},
    "peft": {"adapter": "peft"},
    "folded": {"adapter": "folded"},
    "stock": {"driver": "accelerate", "adapter": "peft"},
    "channels last": {"memory_format": "channels_last"},
    "rewritten": {"layers": "rewritten"},
    "channels last, rewritten": {"memory_format": "channels_last", "layers": "rewritten"},
    "fused optimizer": {"optimizer": "adamw-fused"},
    "device log": {"logging": "ring-buffer"},
    "device log, accelerate": {"logging": "ring-buffer", "driver": "accelerate"},
    "cached latents": {"cache": "latents"},
    "cached text": {"cache": "latents+text"},
    "workers": {"num_workers": 2, "persistent_workers": True},
    "workers, accelerate": {"num_workers": 1, "driver": "accelerate"},
    "merged": MERGED,
    "merged, accelerate": MERGED | {"driver": "accelerate"},
    "half merged": {"micro_batch": 2, "accumulation": 2},
    "merged, cached": MERGED | {"cache": "latents"},
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


@pytest.mark.parametrize(
    "wrong", [{"max_grad_norm": 1.0}, {"seed": 1}, {"accumulation": 2}, {"learning_rate": 1.05e-4}]
)
def test_the_comparison_can_fail(wrong, workload, plain):
    found = watch(workload, CLIPPED.but(**wrong), STEPS)
    with pytest.raises(AssertionError):
        assert_same_path(found, plain)


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_attention_kernels_compute_the_same(kernel, workload, plain):
    with attention_kernel(kernel):
        found = watch(workload, CLIPPED)
    assert_same_gradients(found.gradients[0], plain.gradients[0])


def test_the_rank_may_be_any(workload):
    """Folded layers pad their rank to a multiple of 8, and keep the scaling of the unpadded one."""
    for rank in (3, 8, 11):
        plain, folded = (
            watch(workload, PLAIN.but(rank=rank, adapter=kind)) for kind in ("plain", "folded")
        )
        assert_same_gradients(folded.gradients[0], plain.gradients[0])


# -------------------------------------------------------------------------------------------------
# Compiled

FEW_BLOCKS = dataclasses.replace(SIZES["tiny"], unet_channels=(32,))
"""Every kind of layer still, but few enough to compile."""
COMPILED = CLIPPED.but(
    compile="default",
    adapter="folded",
    memory_format="channels_last",
    layers="rewritten",
    cache="latents",
)


@pytest.fixture
def few_blocks(monkeypatch):
    """A workload of its own, as one keeps its networks, and a compiler that begins anew."""
    monkeypatch.setitem(stable_diffusion.SIZES, "tiny", FEW_BLOCKS)
    torch.compiler.reset()
    yield open_workload("sd15-lora", scale="tiny", device="cpu")
    torch.compiler.reset()


@pytest.mark.parametrize("scope", ["model", "everything"])
def test_what_is_traced_computes_the_same(scope, few_blocks, monkeypatch):
    """Whole networks, by the compiler's front end and its autograd, without the code generator."""
    original, compiled = torch.compile, []

    def traced(target: object, **options: object) -> object:
        if isinstance(
            getattr(target, "__self__", target), nn.Module
        ):  # and not what libraries compile as they load
            compiled.append(target)
        return original(target, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    cache = "nothing" if scope == "everything" else "latents"
    plain = watch(few_blocks, CLIPPED)
    found = watch(few_blocks, COMPILED.but(compile_scope=scope, cache=cache))
    assert len(compiled) == {"model": 1, "everything": 3}[scope]
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


def test_what_needs_too_many_variants_fails_and_does_not_run_uncompiled(monkeypatch):
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda target, **options: original(target, backend="eager", dynamic=False)
    )
    model = nn.ModuleDict({"net": nn.Linear(2, 2)})
    workload = SimpleNamespace(trained=lambda model: ("net", model["net"]))
    compile_as_asked(workload, model, STOCK.but(compile="default"))
    monkeypatch.setattr(cuda_graph, "VARIANTS", 2)
    few = cuda_graph.variants_allowed("default", "static")
    with few, pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for examples in (2, 3, 4):
            model.net(torch.ones(examples, 2))
    torch.compiler.reset()


# -------------------------------------------------------------------------------------------------
# The plain loop against mathematics, in float64


def test_the_gradient_is_that_of_the_written_out_loss(workload):
    with Trainer(workload, PLAIN.but(rank=3)) as trainer:
        state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        scaling = {
            name: layer.scaling["default"]
            for name, layer in lora_layers(trainer.model.unet).items()
        }
        watched = watch_session(trainer, 1)
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


def test_accumulation_adds_the_micro_batches_gradients(workload, plain):
    """Each micro-batch alone, its gradient divided by four, summed by hand."""
    with Trainer(workload, PLAIN) as trainer:
        perturb(trainer.model.unet)
        total: dict[str, Tensor] = {}
        for batch, draws in plain.seen[:4]:
            trainer.optimizer.zero_grad()
            workload.loss(trainer.model, batch, draws).backward()
            for name, gradient in adapter_gradients(trainer.model.unet).items():
                total[name] = total.get(name, 0) + gradient / 4
    assert_same_gradients(plain.gradients[0], total, rtol=1e-5)


def test_the_step_is_adamws_on_the_clipped_gradient(workload):
    """One step written out in float64 (Loshchilov and Hutter 2019, algorithm 2)."""
    recipe = PLAIN.but(max_grad_norm=0.01, learning_rate=1e-3)
    watched = watch(workload, recipe)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in watched.gradients[0].values()))
    assert norm > 0.01
    for name, start in watched.before.items():
        p, g = start.double(), watched.gradients[0][name].double() * 0.01 / norm
        first, second = 0.1 * g, 0.001 * g * g
        step = (first / 0.1) / ((second / 0.001).sqrt() + 1e-8)
        expected = p - 1e-3 * 0.01 * p - 1e-3 * step
        torch.testing.assert_close(watched.after[name].double(), expected, rtol=1e-4, atol=2e-7)


def test_a_run_repeats_itself(workload):
    first, second = (weights_after(workload, PLAIN) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def weights_after(workload, recipe: Recipe, steps: int = 2) -> dict[str, Tensor]:
    """With the workload's own random numbers."""
    with Trainer(workload, recipe) as trainer:
        trainer.run(steps)
        return copied(adapter_state(trainer.model.unet))


def test_noise_does_not_depend_on_who_loads_the_data(workload):
    alone, helped = (weights_after(workload, PLAIN.but(num_workers=workers)) for workers in (0, 2))
    assert all(torch.equal(alone[name], helped[name]) for name in alone)


def test_another_seed_is_another_run(workload):
    first, second = (weights_after(workload, PLAIN.but(seed=seed)) for seed in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_sessions_side_by_side_do_not_disturb_each_other(workload):
    """accelerate's state is the process's, the frozen weights are shared, and random numbers are
    given here.
    """
    recipes = [STOCK, STOCK.but(accumulation=2), PLAIN]
    alone = [watch(workload, recipe, 2) for recipe in recipes]
    trainers = [Trainer(workload, recipe) for recipe in recipes]
    together = [watch_session(trainer, 1) for trainer in trainers]
    for trainer, found, expected in zip(trainers, together, alone, strict=True):
        assert_same_gradients(found.gradients[0], expected.gradients[0], rtol=1e-6)
        trainer.close()


def test_the_graph_driver_needs_the_fused_optimizer(workload):
    recipe = PLAIN.but(driver="graph", logging="ring-buffer")
    with pytest.raises(ValueError, match="optimizer='adamw-fused'"):
        GraphStep(dataclasses.replace(parts_of(workload), recipe=recipe))


def parts_of(workload) -> training.drivers.TrainContext:
    with Trainer(workload, PLAIN) as trainer:
        return trainer.driver.parts


# -------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("recipe", [PLAIN, STOCK, PLAIN.but(num_workers=2)])
def test_batches_go_through_epoch_after_epoch_in_the_seeds_order(recipe, workload, monkeypatch):
    short_epochs(monkeypatch, 18)
    recipe = recipe.but(micro_batch=4, cache="latents", seed=5)
    with Trainer(workload, recipe) as trainer:
        known = trainer.driver.parts.loader.dataset.tensors["moments"]
        taken = [next(trainer.batches) for _ in range(9)]
        assert trainer.batches.taken == 9
    orders = [
        list(EpochOrder(16, 18, 5)),
        list(epoch(EpochOrder(16, 18, 5), 1)),
        list(epoch(EpochOrder(16, 18, 5), 2)),
    ]
    rows = [
        *orders[0][:16],
        *orders[1][:16],
        *orders[2][:4],
    ]  # the last two of each epoch would be a short batch
    assert torch.equal(torch.cat([batch["moments"] for batch in taken]), known[rows])


def epoch(order: EpochOrder, number: int) -> EpochOrder:
    order.go_to(number)
    return order


def short_epochs(monkeypatch, length: int) -> None:
    from labutils.data.images import make_loader

    monkeypatch.setattr(
        training.trainer,
        "make_loader",
        lambda *args, **options: make_loader(*args, epoch_length=length, **options),
    )


def test_too_few_examples_are_said_to_be(workload, monkeypatch):
    short_epochs(monkeypatch, 1)
    with pytest.raises(ValueError, match="16 examples: too few for micro-batches of 17"):
        Trainer(workload, PLAIN.but(micro_batch=17, cache="latents+text"))


# -------------------------------------------------------------------------------------------------
# Measuring

QUICK = PLAIN.but(cache="latents+text", logging="ring-buffer")


@pytest.fixture(scope="module")
def encoded(workload):
    """The examples, encoded once for all tests of measuring."""
    with Trainer(workload, QUICK) as trainer:
        return trainer.driver.parts.loader.dataset


@pytest.fixture
def no_probe(monkeypatch, workload, encoded):
    """Rates of some machine: measuring this one's takes seconds and is tested elsewhere."""
    monkeypatch.setattr(workload, "dataset", lambda model, recipe: encoded)
    roofline = Roofline(rate=1.0, bandwidth=100.0)
    monkeypatch.setattr(benchmark, "probe_machine", lambda *items: None)
    monkeypatch.setattr(benchmark, "measured_roofline", lambda dtype: roofline)
    monkeypatch.setattr(benchmark, "ROUND_MS", 1)
    monkeypatch.setattr(benchmark, "SETTLE_MS", 1)


def test_a_run_tells_what_was_measured(workload, no_probe, encoded, tmp_path):
    recipe = QUICK.but(precision="fp16", num_workers=1)
    run = train(workload, recipe, steps=4, warmup=1, name="mine")
    assert run.ok and (run.run, run.workload, run.scale) == ("mine", "sd15-lora", "tiny")
    assert run.recipe == recipe.fitted_to("cpu").as_dict() != recipe.as_dict()
    assert (
        run.metrics["step_ms"]["n"]
        == len(run.samples["step_ms"])
        == len(run.samples["data_ms"])
        == 4
    )
    assert run.metrics["examples_per_s"] == pytest.approx(4e3 / run.metrics["step_ms"]["median"])
    work = workload.work(recipe.fitted_to("cpu"))
    assert run.metrics["tflops"] == pytest.approx(
        work.flops / run.metrics["step_ms"]["median"] / 1e9
    )
    assert run.metrics["floor_ms"] == pytest.approx(
        max(work.flops / 1e12, work.bytes / 100e9) * 1e3
    )
    # The first step, one of warming up, two to use up what the worker held ready (a round begins
    # so), and four timed.
    assert len(run.metrics["loss"]) == 1 + 1 + 2 + 4
    assert (
        run.metrics["encode_s"] == encoded.encode_s > 0
    )  # the price of a cached recipe's shorter steps
    assert (
        "mfu" not in run.metrics and "peak_allocated_gb" not in run.metrics
    )  # no GPU, nothing to say
    Results(tmp_path).append(run)  # refuses NaN
    assert all(math.isfinite(loss) for loss in run.metrics["loss"])


def test_a_step_is_all_its_micro_steps(workload, no_probe, monkeypatch):
    draw = workload.draw
    monkeypatch.setattr(workload, "draw", lambda *args: time.sleep(0.02) or draw(*args))
    run = train(workload, QUICK, steps=2, warmup=0)
    assert min(run.samples["step_ms"]) >= 4 * 20
    assert run.metrics["wall_ms"]["median"] == pytest.approx(
        sum(run.samples["step_ms"]) / 2, rel=0.05
    )


def test_waiting_for_data_is_the_hosts_wait(workload, no_probe, monkeypatch):
    index = stable_diffusion.EncodedExamples.__getitems__
    monkeypatch.setattr(
        stable_diffusion.EncodedExamples,
        "__getitems__",
        lambda *args: time.sleep(0.02) or index(*args),
    )
    run = train(workload, QUICK, steps=2, warmup=0)
    for waited, step in zip(run.samples["data_ms"], run.samples["step_ms"], strict=True):
        assert 4 * 20 <= waited < step


def test_a_round_is_long_enough_to_tell_noise_from_drift(workload, no_probe, monkeypatch):
    with benchmark.Benchmark(workload) as bench:
        bench.prepare({"mine": QUICK})
        bench.candidates[
            "mine"
        ].step_ms = 30  # by its warm-up; what its steps really last is the machine's business
        monkeypatch.setattr(benchmark, "ROUND_MS", 100)
        run = bench.compare({"mine": QUICK}, steps=1, rounds=1)["mine"]
    assert run.metrics["step_ms"]["n"] == 4


def test_what_is_not_cached_has_no_price_of_caching(workload):
    with Trainer(workload, PLAIN) as trainer:
        assert trainer.encode_s is None


def test_recipes_take_turns(workload, no_probe, monkeypatch):
    turns, measure = [], benchmark.Candidate.measure
    monkeypatch.setattr(
        benchmark.Candidate,
        "measure",
        lambda c, *steps: turns.append(c.trainer.recipe.rank) or measure(c, *steps),
    )
    recipes = {f"rank {rank}": QUICK.but(rank=rank) for rank in (2, 3, 4)}
    runs = compare(workload, recipes, steps=2, rounds=3, warmup=0)
    assert turns == [2, 3, 4, 4, 3, 2, 2, 3, 4]  # there and back
    assert list(runs) == list(recipes)
    assert all(run.ok and run.metrics["step_ms"]["n"] == 6 for run in runs.values())
    assert all(run.metrics["wall_ms"]["n"] == 3 for run in runs.values())


def test_a_profile_begins_when_the_ready_batches_are_used_up(workload, no_probe, tmp_path):
    """Six batches are ready: one step and then two of four micro-batches are passed over, and one
    warms up.
    """
    with benchmark.Benchmark(workload, warmup=0) as bench:
        bench.prepare({"ahead": QUICK.but(num_workers=3)})
        before = bench.candidates["ahead"].trainer.step_count
        assert bench.profile("ahead", tmp_path, steps=2).steps == 2
        assert bench.candidates["ahead"].trainer.step_count - before == 3 + 1 + 2


def failing_at(
    monkeypatch, workload, rank: int, step: int, error: type[BaseException], message: str
) -> None:
    """Sessions of that rank fail at that optimizer step; 0: when they are built. The error is a new
    one each time, as one that is kept would keep the frames it passed through."""
    build, drive, calls = workload.build, Trainer.step, itertools.count(1)

    def building(recipe: Recipe) -> nn.Module:
        if recipe.rank == rank and step == 0:
            raise error(message)
        return build(recipe)

    def driving(trainer: Trainer) -> None:
        if trainer.recipe.rank == rank and next(calls) == step:
            raise error(message)
        drive(trainer)

    monkeypatch.setattr(workload, "build", building)
    monkeypatch.setattr(Trainer, "step", driving)


@pytest.mark.parametrize(
    ("error", "status", "step"),
    [
        (torch.OutOfMemoryError, "oom", 0),
        (torch.OutOfMemoryError, "oom", 1),
        (torch.OutOfMemoryError, "oom", 4),
        (RuntimeError, "error: RuntimeError: the reason", 1),
    ],
)
def test_one_that_fails_does_not_stop_the_others(
    error, status, step, workload, no_probe, monkeypatch, tmp_path
):
    """When it is built, at its first step, and in the midst of measuring."""
    monkeypatch.setattr(training.trainer.tempfile, "tempdir", str(tmp_path))
    failing_at(monkeypatch, workload, rank=3, step=step, error=error, message="the reason")
    recipes = {"before": QUICK, "fails": QUICK.but(rank=3), "after": QUICK.but(rank=2)}
    runs = compare(workload, recipes, steps=1, rounds=2, warmup=1)
    assert [run.status for run in runs.values()] == ["ok", status, "ok"]
    assert (runs["fails"].metrics, runs["fails"].samples) == ({}, {})
    assert runs["fails"].recipe["rank"] == 3
    assert list(tmp_path.iterdir()) == []  # no trainer leaves its folder behind


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"driver": "accelerate", "adapter": "peft"},
        {"num_workers": 1, "persistent_workers": True},
    ],
)
@pytest.mark.parametrize("step", [1, 4])
def test_one_that_fails_gives_its_memory_back(
    step, change, workload, no_probe, monkeypatch, tmp_path
):
    """At once, while the others go on: at its first step (where a compiler fails), and in the midst
    of measuring.
    """
    monkeypatch.setattr(training.trainer.tempfile, "tempdir", str(tmp_path))
    failing_at(monkeypatch, workload, rank=3, step=step, error=RuntimeError, message="the reason")
    build, models = workload.build, {}

    def watched(recipe: Recipe) -> nn.Module:
        model = build(recipe)
        models[recipe.rank] = weakref.ref(model.unet)
        return model

    monkeypatch.setattr(workload, "build", watched)
    with benchmark.Benchmark(workload, warmup=1) as bench:
        runs = bench.compare(
            {"stays": QUICK, "fails": QUICK.but(rank=3, **change)}, steps=2, rounds=1
        )
        assert [run.status for run in runs.values()] == ["ok", "error: RuntimeError: the reason"]
        assert (models[QUICK.rank]() is None, models[3]() is None) == (False, True)
        assert len(list(tmp_path.iterdir())) == 1  # the trainer that stays has its folder


@pytest.mark.parametrize("logging", ["synchronous", "ring-buffer"])
def test_a_loss_that_is_not_finite_fails_its_run_and_no_other(logging, workload, no_probe):
    recipes = {"wild": QUICK.but(learning_rate=1e30, logging=logging), "tame": QUICK}
    runs = compare(workload, recipes, steps=1, rounds=1, warmup=1)
    assert runs["wild"].status.startswith("error: NotFinite: The loss is nan at optimizer step 2:")
    assert runs["wild"].metrics == {}
    assert runs["tame"].ok


def test_ctrl_c_is_not_a_status(workload, no_probe, monkeypatch):
    failing_at(monkeypatch, workload, rank=4, step=2, error=KeyboardInterrupt, message="")
    with pytest.raises(KeyboardInterrupt):
        train(workload, QUICK)


def test_frozen_weights_are_held_once(workload):
    with (
        Trainer(workload, PLAIN) as first,
        Trainer(workload, PLAIN.but(adapter="folded")) as second,
    ):
        mine, theirs = (
            {p.data_ptr() for p in s.model.parameters() if not p.requires_grad}
            for s in (first, second)
        )
        assert mine == theirs
        assert not {p.data_ptr() for p in first.parameters} & {
            p.data_ptr() for p in second.parameters
        }


def test_training_leaves_the_frozen_weights_alone(workload):
    with Trainer(workload, PLAIN) as trainer:
        frozen = [(p, p.clone()) for p in trainer.model.parameters() if not p.requires_grad]
        before = copy.deepcopy(copied(adapter_state(trainer.model.unet)))
        trainer.run(2)
        assert all(torch.equal(now, then) for now, then in frozen)
        after = adapter_state(trainer.model.unet)
        assert not any(
            torch.equal(after[name], before[name]) for name in before if "lora_B" in name
        )


def test_draws_are_the_same_however_examples_are_grouped(workload):
    """The oracle's own ground: what the gradient tests take for granted."""
    one, four = SameDraws(workload), SameDraws(workload)
    with Trainer(workload, PLAIN) as trainer:
        apart = [one(trainer.model, {"x": torch.zeros(1)}) for _ in range(4)]
        together = four(trainer.model, {"x": torch.zeros(4)})
    for name in together:
        assert torch.equal(torch.cat([draws[name] for draws in apart]), together[name])


@pytest.mark.parametrize(
    ("graphs", "rounds"), [([4, 4], 1), ([4, 5, 5, 5], 2), (list(range(6)), benchmark.TRIES)]
)
def test_a_round_in_which_something_was_compiled_is_taken_again(
    workload, monkeypatch, graphs, rounds
):
    taken = []
    with benchmark.Benchmark(workload, warmup=0) as bench:
        bench.prepare({"plain": PLAIN})
        candidate = bench.candidates["plain"]
        candidate.settle = lambda: None
        monkeypatch.setattr(candidate, "_graphs", iter(graphs).__next__)
        monkeypatch.setattr(
            benchmark,
            "measure",
            lambda trainer, steps, after_step: (
                taken.append(len(taken)) or StepTimes([float(len(taken))])
            ),
        )
        candidate.measure(1)
    assert len(taken) == rounds
    assert candidate.times.step_ms == [rounds]


@pytest.mark.parametrize(
    ("step_ms", "recipe", "steps"),
    [(6000, PLAIN, 0), (6000, PLAIN.but(num_workers=1), 3), (40, PLAIN, 3)],
)
def test_long_steps_settle_by_themselves(workload, step_ms, recipe, steps):
    """Batches that a worker has made ready are used up first, however long a step is."""
    candidate = object.__new__(benchmark.Candidate)
    alone = SimpleNamespace(count=1)
    candidate.trainer = SimpleNamespace(
        recipe=recipe.but(prefetch_factor=2, accumulation=1), ranks=alone
    )
    candidate.step_ms = step_ms
    assert candidate.steps_to_settle == steps


def test_what_a_library_compiles_is_noticed(workload, monkeypatch):
    """The recipe compiles nothing."""
    with benchmark.Benchmark(workload, warmup=0) as bench:
        bench.prepare({"plain": PLAIN})
        before = bench.candidates["plain"]._graphs()
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
        assert bench.candidates["plain"]._graphs() == before + 1
        monkeypatch.delitem(sys.modules, "torch._dynamo")
        assert bench.candidates["plain"]._graphs() == 0


@pytest.mark.parametrize(
    ("before", "built", "held", "peak", "own"),
    [
        (0.0, 15.1, 15.1, 33.0, 33.0),  # nothing was there
        (15.0, 15.1, 15.1, 33.1, 33.1),  # all frozen weights were, the adapters weren't
        (15.0, 19.1, 5.1, 25.0, 11.0),  # 1 GB is shared, the rest held anew in four bits
        (20.0, 35.1, 15.1, 53.0, 33.0),  # others' memory, nothing shared
    ],
)
def test_a_session_s_own_peak_counts_what_it_shares_once(before, built, held, peak, own):
    assert benchmark.own_peak(peak, before, built, held) == pytest.approx(own)


def test_after_step_follows_every_step_of_a_training_run(workload):
    """The first step, those to settle, and the timed ones."""
    counts = []
    run = benchmark.train(
        workload,
        PLAIN,
        steps=2,
        warmup=1,
        after_step=lambda trainer: counts.append(trainer.step_count),
    )
    assert run.ok, run.status
    assert counts == list(range(1, len(counts) + 1))
    assert len(counts) > len(run.samples["step_ms"]) + 2


def test_steps_that_find_batches_ready_are_those_of_one_rank():
    recipe = STOCK.but(num_workers=2, prefetch_factor=2, accumulation=8)
    assert [benchmark.steps_to_drain(recipe, ranks) for ranks in (1, 2, 8)] == [2, 2, 5]
    assert benchmark.steps_to_drain(recipe.but(num_workers=0)) == 1
