"""Recipes at work under the same random numbers, watched: what the tests of training compare."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from unittest import mock

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from labutils.layers.lora import NAME, lora_layers
from labutils.recipe import STOCK, Recipe
from labutils.training import Trainer
from labutils.workloads import Workload, open_workload
from labutils.workloads.stable_diffusion import DiffusionLora

PLAIN = STOCK.but(precision="fp32", driver="eager", adapter="plain")
"""The plain loop: what every other recipe's gradients are held against."""


def sd_workload() -> DiffusionLora:
    """Stable Diffusion whose images are decoded once for all trainers."""
    opened = open_workload("sd15-lora", scale="tiny", device="cpu")
    examples, decoded = opened.dataset, []

    def dataset(model: nn.Module | None, recipe: Recipe) -> Dataset | list[dict]:
        if recipe.cache != "nothing":
            return examples(model, recipe)
        if not decoded:
            rows = examples(None, recipe)
            decoded.extend(rows[index] for index in range(len(rows)))
        return decoded

    opened.dataset = dataset
    return opened


class SameDraws:
    """In the place of `workload.draw`: a run's k-th example gets the numbers of seed k, in whatever
    micro-batches.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.taken = 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        count = next(iter(batch.values())).shape[0]
        each = [self.example(self.taken + index) for index in range(count)]
        self.taken += count
        like = torch.empty((), device=self.workload.device, dtype=model.vae.dtype)
        drawn = {name: torch.stack([example[name] for example in each]) for name in each[0]}
        return {
            name: t.to(like) if t.is_floating_point() else t.to(like.device)
            for name, t in drawn.items()
        }

    def example(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(1000 + index)
        shape = self.workload.latent_shape
        return {
            "posterior": torch.randn(shape, generator=chance),
            "noise": torch.randn(shape, generator=chance),
            "timesteps": torch.randint(1000, (), generator=chance),
        }


@dataclass
class Watched:
    """What a run did. `gradients` has one dictionary an optimizer step, taken before clipping, and
    `seen` the micro-batches and their random numbers; the adapter's keys are
    "<layer>.lora_A.weight" and "<layer>.lora_B.weight", whatever the kind."""

    before: dict[str, Tensor]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=list)


def watch(workload: Workload, recipe: Recipe, steps: int = 1, size: float = 0.05) -> Watched:
    """`steps` optimizer steps of `recipe`, from an adapter whose B isn't zero: where it is, A has
    no gradient.
    """
    with Trainer(workload, recipe) as trainer:
        return watch_trainer(trainer, steps, size)


def watch_trainer(trainer: Trainer, steps: int, size: float = 0.05) -> Watched:
    unet = trainer.model.unet
    perturb(unet, size)
    watched = Watched(copied(adapter_state(unet)))
    keep = lambda parameters: watched.gradients.append(adapter_gradients(unet))
    with (
        mock.patch.object(trainer.workload, "draw", SameDraws(trainer.workload)),
        watching(trainer.workload, keep, watched.seen),
    ):
        for _ in range(steps):
            trainer.step()
    trainer.driver.log.flush()
    watched.after = copied(adapter_state(unet))
    watched.losses = list(trainer.losses)
    return watched


def adapter_state(module: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights under PEFT's names, "<layer>.lora_A.weight" and
    "<layer>.lora_B.weight"; not copies.
    """
    return {
        f"{plain(name)}.{half}.weight": getattr(layer, half)[NAME].weight.detach()
        for name, layer in lora_layers(module).items()
        for half in ("lora_A", "lora_B")
    }


def plain(name: str) -> str:
    """A name without what DistributedDataParallel and torch.compile put into it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


@contextmanager
def watching(
    workload: Workload, keep: Callable[[list[nn.Parameter]], object], seen: list
) -> Iterator[None]:
    """A context in which `keep` gets the parameters before their gradients are clipped, and `seen`
    the micro-batches with their random numbers."""
    clip, loss = torch.nn.utils.clip_grad_norm_, workload.loss

    def watching_clip(parameters: list[nn.Parameter], *rest: object, **options: object) -> Tensor:
        keep(parameters := list(parameters))
        return clip(parameters, *rest, **options)

    def watching_loss(model: nn.Module, batch: dict, draws: dict) -> Tensor:
        seen.append((batch, draws))
        return loss(model, batch, draws)

    with (
        mock.patch.object(workload, "loss", watching_loss),
        mock.patch.object(torch.nn.utils, "clip_grad_norm_", watching_clip),
    ):
        yield


@torch.no_grad()
def perturb(unet: nn.Module, size: float = 0.05) -> None:
    """Give every B normal numbers that depend on its name alone."""
    for name, tensor in adapter_state(unet).items():
        if name.endswith("lora_B.weight"):
            chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.copy_(size * torch.randn(tensor.shape, generator=chance))


def adapter_gradients(unet: nn.Module) -> dict[str, Tensor]:
    """The gradients, one a layer and matrix; those of folded layers cut out of their stacks'."""
    stacks = getattr(unet, "folds", [])
    places = {
        id(layer): (stack, index) for stack in stacks for index, layer in enumerate(stack.folded)
    }
    found = {}
    for name, layer in lora_layers(unet).items():
        if id(layer) in places:
            stack, index = places[id(layer)]
            rank = layer.lora_A["default"].weight.shape[0]
            a, b = stack.A.grad[index, :rank], stack.B.grad[index, :, :rank]
        else:
            a, b = layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad
        found |= {f"{plain(name)}.lora_A.weight": a, f"{plain(name)}.lora_B.weight": b}
    return copied(found)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4
) -> None:
    """Every matrix deviates by at most `rtol` of its largest element, and none is zero."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        assert largest > 0, f"{name} has no gradient"
        errors[name] = (found[name] - gradient).abs().max().item() / largest
    worst = max(errors, key=errors.get)
    assert errors[worst] <= rtol, f"{worst}: {errors[worst]:.2e} off"


def assert_same_path(found: Watched, expected: Watched, rtol: float = 5e-3) -> None:
    """All steps together moved every matrix alike: the difference's norm is within `rtol` of the
    way's.

    AdamW's step is about the sign of a gradient; where one is nearly zero its rounding shows in
    full, and rounding is the CPU's: on one model of processor the ways agree to 1e-3, on another to
    3e-3. A wrong recipe is off by 3e-2.
    """
    assert found.after.keys() == expected.after.keys()
    for name, start in expected.before.items():
        assert torch.equal(found.before[name], start), name
        way = expected.after[name] - start
        off = (found.after[name] - expected.after[name]).norm().item()
        assert off <= rtol * way.norm().item() > 0, f"{name}: {off / way.norm().item():.2e} off"


def kill_rank_1() -> None:
    """Kill the rank that this process's launch started, as soon as it has a process of its own: a
    DataLoader worker."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("RANK") == "1" and process.children():
                    return process.kill()
        time.sleep(0.1)


class Products(TorchDispatchMode):
    """Counts matrix products whose second factor has no side of `wider_than` or less."""

    supports_higher_order_operators = True

    def __init__(self, wider_than: int = 0) -> None:
        super().__init__()
        self.wider_than, self.count = wider_than, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += min(args[-1].shape) > self.wider_than
        return func(*args, **(kwargs or {}))
