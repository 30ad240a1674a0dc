"""What every workload offers the training loop, and nothing of how it is trained."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from labutils.data.file_cache import cache_folder, reaching
from labutils.data.loader import EPOCH
from labutils.profiling.machine import default_device, machine_facts, scale_for
from labutils.recipe import SCALES, Recipe, check_choice
from labutils.workloads.lazy_imports import import_unseen

SOURCES = {"weights": ("random", "hub"), "data": ("generated", "hub")}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CLASSES = {
    "sd15-lora": ("stable_diffusion", "DiffusionLora"),
    "llava-lora": ("llava", "MultimodalLora"),
    "llava-lora-varied": ("llava", "MultimodalLora"),
    "qwen3-lora-short": ("causal_lm", "LanguageLora"),
    "qwen3-lora-long": ("causal_lm", "LanguageLora"),
    "qwen3-32b-lora-short": ("causal_lm", "LanguageLora"),
    "qwen3-32b-lora-long": ("causal_lm", "LanguageLora"),
    "gpt-oss-lora-short": ("causal_lm", "LanguageLora"),
    "gpt-oss-lora-long": ("causal_lm", "LanguageLora"),
}
"""Workload's name -> module and class; the module is imported when the workload is asked for."""

Batch = dict[str, Tensor]
Result = TypeVar("Result")


def remembered(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method of a workload that computes each result once; the workload holds the results.

    `functools.cache` would hold the workload itself as long as the process runs, and with it all
    that it holds: a model on the GPU.
    """

    @functools.wraps(method)
    def look_up(self: Workload, *arguments: Any) -> Result:
        key = (method.__qualname__, *arguments)
        if key not in self._remembered:
            self._remembered[key] = method(self, *arguments)
        return self._remembered[key]

    return look_up


@dataclass(frozen=True)
class Work:
    """What one optimizer step (or one micro-batch) takes in, and the least arithmetic and memory
    traffic that it needs.

    `flops` counts multiplications and additions of matrix products, convolutions and attention,
    forward and backward. `bytes` must at least cross the device's memory bus: the weights, once a
    pass. `tokens` are those that are computed on, `useful_tokens` those of them that aren't
    padding; 0 where a workload has no tokens.
    """

    flops: float
    bytes: float
    examples: float = 0
    tokens: float = 0
    useful_tokens: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * number for number in astuple(self)))


class Workload(ABC):
    """What is trained, at one scale on one device.

    name: a key of `CLASSES`. scale: "tiny" (CPU and CI), "small" (a GPU of 8 GB), "full" (the
    article's own architecture). weights: "random" (the exact architecture with random weights:
    speed and memory are the real model's, losses are not) or "hub". data: "generated" (files like
    the real ones) or "hub". Raises `ValueError` for anything else, and where no published model has
    this size.
    """

    libraries: ClassVar[tuple[str, ...]]
    """Modules that building it imports: see `import_unseen`."""
    epoch_length: int = EPOCH
    """The least number of examples in an epoch: see `data.loader.make_loader`."""
    steps_vary: ClassVar[bool] = False
    """Whether batches differ in what they take in: see `work_of`."""
    takes: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Knob -> the values of it that the workload can do something with, where not all of them."""

    def __init__(
        self, name: str, scale: str, weights: str, data: str, device: str, cache_dir: Path
    ) -> None:
        check_choice("scale", scale, SCALES)
        check_choice("weights", weights, SOURCES["weights"])
        check_choice("data", data, SOURCES["data"])
        self.name, self.scale, self.weights, self.data = name, scale, weights, data
        self.device = torch.device(device)
        self.cache_dir = cache_dir
        self._held: dict[Any, nn.Module] = {}
        self._remembered: dict[Any, Any] = {}
        if weights == "hub" and not self.hub:
            raise ValueError(
                f'weights="hub" has the sizes of published models, and {name} at scale={scale!r} '
                'is none. Use scale="full", or weights="random".'
            )

    def __copy__(self) -> Workload:
        """A copy is made to be changed: it holds and remembers nothing of the original's."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _held={}, _remembered={})
        return other

    def opened_as(self) -> dict[str, Any]:
        """The arguments of `open_workload` that open the same workload in another process, as plain
        data; the device is that process's own."""
        arguments = {key: getattr(self, key) for key in ("name", "scale", "weights", "data")}
        return arguments | {"cache_dir": str(self.cache_dir)}

    @property
    @abstractmethod
    def hub(self) -> str:
        """The published model of this size on the Hugging Face hub; "" where there is none."""

    def check(self, recipe: Recipe) -> None:
        """Raise `ValueError` for what the workload can't do of a recipe: a run on record must not
        claim that a knob did anything where it didn't."""
        for name, values in self.takes.items():
            value = getattr(recipe, name)
            choices = " or ".join(f"{name}={other!r}" for other in values)
            refuse(value not in values, f"{name}={value!r} is not for {self.name}. Use {choices}.")

    @abstractmethod
    def build(self, recipe: Recipe) -> nn.Module:
        """A fresh model on the device with the recipe's precision, layout and adapters; the frozen
        weights are shared. Raises as `check` does."""

    @abstractmethod
    def trained(self, model: nn.Module) -> tuple[str, nn.Module]:
        """The part of `model` that is trained, behind the attribute that holds it: what is
        compiled and wrapped."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """What the trained part repeats: regional compilation compiles these one by one."""

    @abstractmethod
    def converted(self, model: nn.Module, recipe: Recipe) -> list[str]:
        """Names in `model` of the frozen linear layers that `recipe.base_linear` holds in a format
        of its own."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The parts of the trained part whose weights FSDP gathers together."""
        return self.blocks(model)

    def called(self, model: nn.Module) -> nn.Module:
        """The module whose call uses every weight of the trained part: FSDP gathers them there."""
        return self.trained(model)[1]

    @abstractmethod
    def dataset(self, model: nn.Module, recipe: Recipe) -> Dataset:
        """Examples by index; what `recipe.cache` asks for is encoded by `model` once, here."""

    def order(self, dataset: Dataset, recipe: Recipe) -> Sampler[list[int]] | None:
        """What chooses each micro-batch's examples where their number varies; None:
        `recipe.micro_batch` at random.

        It offers `length` (rows an epoch) and `go_to(epoch, start)`, as `data.loader.EpochOrder`
        does.
        """
        return None

    @abstractmethod
    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        """What makes a micro-batch of examples; picklable."""

    @abstractmethod
    def draw(self, model: nn.Module, batch: Batch) -> Batch:
        """The random numbers of one micro-batch, from PyTorch's generators, on the device."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, draws: Batch) -> Tensor:
        """The mean loss of a micro-batch on the device for given random numbers, a scalar in
        float32."""

    @abstractmethod
    def work(self, recipe: Recipe) -> Work:
        """What one optimizer step takes, from the shapes alone; on average where they vary."""

    def work_of(self, recipe: Recipe, batch: Batch) -> Work | None:
        """What this micro-batch takes; None where all take the same, and `work` says what.

        Read on the host: a batch that is on a GPU already makes the host wait.
        """
        return None

    @contextmanager
    def making_weights(self, seed: int) -> Iterator[None]:
        """A context in which networks get their random weights from `seed`, or the hub's.

        Raises `HubOutOfReach` where those can't be had.
        """
        from_hub = reaching(self.hub, "model") if self.weights == "hub" else nullcontext()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), from_hub:
            torch.manual_seed(seed)
            yield

    def shared(self, key: Any, make: Callable[[], nn.Module], at_most: int = 1) -> nn.Module:
        """The frozen networks that depend on `key`: made once, and held for all trainers. No more
        than `at_most` are held; the one that was asked for longest ago makes room for another."""
        if key in self._held:
            self._held[key] = self._held.pop(key)
        else:
            while len(self._held) >= at_most:
                del self._held[next(iter(self._held))]
            self._held[key] = make()
        return self._held[key]

    def release_weights(self) -> None:
        """Forget the weights that trainers share. Trainers that run keep theirs; the next one makes
        them anew."""
        held = bool(self._held)
        self._held.clear()
        # On a GPU in any case: a trainer that ended before holds memory until its circles of
        # references are collected.
        if held or self.device.type == "cuda":
            gc.collect()


def around_the_same(frozen: nn.Module) -> nn.Module:
    """A copy of the modules around the same tensors: trainers side by side hold the frozen weights
    once."""
    shared = {id(tensor): tensor for tensor in [*frozen.parameters(), *frozen.buffers()]}
    return copy.deepcopy(frozen, memo=shared)


def refuse(wrong: bool, why: str) -> None:
    """Raise `ValueError` with the reason where a recipe asks for what a workload can't do."""
    if wrong:
        raise ValueError(why)


def open_workload(
    name: str,
    scale: str = "auto",
    weights: str = "random",
    data: str = "generated",
    device: str | None = None,
    cache_dir: str | Path | None = None,
) -> Any:
    """The workload of that name. `scale="auto"` takes the largest that fits this machine.

    Raises `ValueError` for an unknown name, scale or source.
    """
    check_choice("workload", name, tuple(CLASSES))
    scale = scale_for(machine_facts()) if scale == "auto" else scale
    module, kind = CLASSES[name]
    place = Path(cache_dir) if cache_dir else cache_folder()
    workload = getattr(importlib.import_module(f"labutils.workloads.{module}"), kind)
    import_unseen("peft", "bitsandbytes", *workload.libraries)
    return workload(name, scale, weights, data, device or default_device(), place)
