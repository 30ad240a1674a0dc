"""What every workload offers the training loop, and nothing of how it is trained."""

from __future__ import annotations

import functools
import gc
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from labutils.data.images import EPOCH
from labutils.profiling.machine import default_device, machine_facts, scale_for
from labutils.recipe import SCALES, Recipe, check_choice
from labutils.workloads.lazy_imports import import_unseen

SOURCES = {"weights": ("random", "hub"), "data": ("generated", "hub")}
ROOMS = {
    "sd15-lora": ("labutils.workloads.stable_diffusion", "DiffusionLora"),
    "llava-lora": ("labutils.workloads.llava", "MultimodalLora"),
    "llava-lora-varied": ("labutils.workloads.llava", "VariedMultimodalLora"),
    "qwen3-lora-short": ("labutils.workloads.causal_lm", "Qwen3Short"),
    "qwen3-lora-long": ("labutils.workloads.causal_lm", "Qwen3Long"),
    "qwen3-32b-lora-short": ("labutils.workloads.causal_lm", "Qwen3LargeShort"),
    "qwen3-32b-lora-long": ("labutils.workloads.causal_lm", "Qwen3LargeLong"),
    "gpt-oss-lora-short": ("labutils.workloads.causal_lm", "GptOssShort"),
    "gpt-oss-lora-long": ("labutils.workloads.causal_lm", "GptOssLong"),
    "gpt-oss-120b-lora-short": ("labutils.workloads.causal_lm", "GptOssLargeShort"),
    "gpt-oss-120b-lora-long": ("labutils.workloads.causal_lm", "GptOssLargeLong"),
}
"""Workload's name -> (module, class); a room is imported when it is asked for."""

COMMON = ("peft", "bitsandbytes")
"""Libraries that come with any workload; the first stands for there having been one before."""

Batch = dict[str, Tensor]
Found = TypeVar("Found")


def remembered(method: Callable[..., Found]) -> Callable[..., Found]:
    """A method of a workload that works each thing out once; the workload holds what was found.

    `functools.cache` would hold the workload itself as long as the process runs, and so an altered
    copy with all that its changes hold on to: a model on the GPU.
    """

    @functools.wraps(method)
    def looked_up(self: Workload, *arguments: Any) -> Found:
        key = (method.__qualname__, *arguments)
        if key not in self._remembered:
            self._remembered[key] = method(self, *arguments)
        return self._remembered[key]

    return looked_up


@dataclass(frozen=True)
class Work:
    """What one optimizer step (or one micro-batch) takes in, and the arithmetic and traffic it
    can't do without.

    `flops` counts multiplications and additions of matrix products, convolutions and attention,
    forward and backward; `bytes` what must cross the device's memory bus at least: the weights,
    once a pass. `tokens` are those that are computed on, `useful_tokens` those of them that aren't
    padding; 0 where a workload has no tokens.
    """

    flops: float
    bytes: float
    examples: float = 0
    tokens: float = 0
    useful_tokens: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    def __mul__(self, times: float) -> Work:
        return Work(*(times * mine for mine in astuple(self)))


class Workload(ABC):
    """What is trained, at one scale on one device.

    scale: "tiny" (CPU and CI), "small" (a GPU of 8 GB), "full" (the article's own architecture).
    weights: "random" (the exact architecture with random weights: speed and memory are the real
    model's, losses are not) or "hub". data: "generated" (files like the real ones) or "hub". Raises
    `ValueError` for anything else.
    """

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    """Modules that building it imports: see `import_unseen`."""
    epoch_length: int = EPOCH
    """Examples of an epoch at least, where there are fewer: see `data.images.make_loader`."""
    steps_vary: ClassVar[bool] = False
    """Whether batches differ in what they take in: see `work_of`."""
    _held: tuple[Any, Any] | None = None
    """What trainers share, behind what it depends on."""

    def __init__(self, scale: str, weights: str, data: str, device: str, cache_dir: Path) -> None:
        check_choice("scale", scale, SCALES)
        check_choice("weights", weights, SOURCES["weights"])
        check_choice("data", data, SOURCES["data"])
        self.scale, self.weights, self.data = scale, weights, data
        self.device = torch.device(device)
        self.cache_dir = cache_dir
        self._remembered: dict[Any, Any] = {}

    def __copy__(self) -> Workload:
        """A copy is made to be changed: it begins without what the original holds and remembers."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _held=None, _remembered={})
        return other

    def opened_as(self) -> dict[str, Any]:
        """What `open_workload` is told in another process to have the same workload there, as plain
        data; the device is that process's own."""
        return {
            "name": self.name,
            "scale": self.scale,
            "weights": self.weights,
            "data": self.data,
            "cache_dir": str(self.cache_dir),
        }

    @abstractmethod
    def build(self, recipe: Recipe) -> nn.Module:
        """A fresh model on the device with the recipe's precision, layout and adapters; the frozen
        weights are shared."""

    @abstractmethod
    def trained(self, model: nn.Module) -> tuple[str, nn.Module]:
        """The part of `model` that is trained, and the attribute that holds it: what is compiled,
        wrapped and saved.
        """

    @abstractmethod
    def frozen(self, model: nn.Module) -> list[nn.Module]:
        """The encoders that only ever run forward."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """What the trained part repeats, blocks above all: what regional compilation compiles, one
        by one.
        """

    @abstractmethod
    def converted(self, model: nn.Module, recipe: Recipe) -> list[str]:
        """Names in `model` of the frozen linear layers that `recipe.base_linear` holds in a format
        of its own.
        """

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The parts of the trained part whose weights are gathered together where they are cut
        among GPUs (FSDP).
        """
        return self.blocks(model)

    def called(self, model: nn.Module) -> nn.Module:
        """The module whose call uses every weight of the trained part, and around which FSDP
        gathers them.
        """
        return self.trained(model)[1]

    @abstractmethod
    def dataset(self, model: nn.Module, recipe: Recipe) -> Dataset:
        """Examples by index; those that `recipe.cache` asks for are encoded by `model` once, here."""

    def order(self, dataset: Dataset, recipe: Recipe) -> Sampler[list[int]] | None:
        """What chooses each micro-batch's examples where their number varies; None:
        `recipe.micro_batch` at random.

        It offers `length` (rows an epoch) and `go_to(epoch, start)`, as `data.images.EpochOrder`
        does.
        """
        return None

    @abstractmethod
    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        """What makes a micro-batch of examples; picklable."""

    @abstractmethod
    def draw(self, model: nn.Module, batch: Batch) -> Batch:
        """The random numbers that one micro-batch needs, on the device, from PyTorch's generators."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, draws: Batch) -> Tensor:
        """The mean loss of a micro-batch on the device (a scalar in float32) for given random
        numbers.
        """

    @abstractmethod
    def work(self, recipe: Recipe) -> Work:
        """What one optimizer step takes, from the shapes alone; on average where they vary."""

    def work_of(self, recipe: Recipe, batch: Batch) -> Work | None:
        """What this micro-batch takes; None where all take the same (`steps_vary` is False), and
        `work` says what.

        Read on the host: a batch that is on a GPU already has it wait.
        """
        return None

    def release_weights(self) -> None:
        """Forget the weights that trainers share; they stay with trainers that run. The next that
        shares them makes them anew, and one that has its own has the room for itself."""
        held, self._held = self._held is not None, None
        # On a GPU in any case: a trainer that ended before holds memory until its circles of
        # references are found.
        if held or self.device.type == "cuda":
            gc.collect()

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the adapter in PEFT's format and the model's own."""
        from labutils.layers.lora import save_adapter

        save_adapter(self.trained(model)[1], folder)


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
    check_choice("workload", name, workload_names())
    module, kind = ROOMS[name]
    scale = scale_for(machine_facts()) if scale == "auto" else scale
    folder = Path(
        cache_dir or os.environ.get("LABUTILS_CACHE") or Path.home() / ".cache" / "labutils"
    )
    workload = getattr(importlib.import_module(module), kind)
    import_unseen(*COMMON, *workload.libraries)
    return workload(scale, weights, data, device or default_device(), folder)


def workload_names() -> tuple[str, ...]:
    return tuple(ROOMS)
