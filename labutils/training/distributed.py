"""The processes that train together: who this one is, and how it shares an optimizer step with the
others.

torchrun starts the processes, the *ranks*, and tells each its number; `torch.distributed` carries
tensors between them (NCCL between GPUs, gloo between processes on a CPU); DistributedDataParallel
and `fully_shard` decide when. This module says which micro-batches each rank takes, with which
random numbers, and how losses are averaged.

The step is the recipe's, whoever computes it: of its `accumulation` micro-batches each of N ranks
takes every N-th, with the random numbers that one process would draw for it. So losses and
gradients are those of one process, a checkpoint knows nothing of ranks, and a run can go on with
fewer of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labutils.recipe import Recipe, Unavailable
from labutils.workloads.base import Workload

# The knob's new name came with PyTorch 2.13, and 2.11 doesn't know it.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")

PATIENCE_S = 120.0
"""How long a rank waits for the others before it gives up. It must exceed what they may lag behind:
building, compiling, writing a checkpoint."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together: `rank` of `count`, `local` on its machine."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks of each element, on all of them; another tensor unless alone."""
        if self.alone:
            return values
        mean = values.detach().clone() / self.count
        dist.all_reduce(mean)
        return mean

    def most(self, value: float) -> float:
        """The largest of the ranks' numbers, on all of them: for decisions that all must make
        alike.
        """
        return max(self.all(value))

    def all(self, value: Any) -> list[Any]:
        """The ranks' objects, in order, on all of them."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values


_by_itself = False


def here() -> Ranks:
    """Who this process is. Under torchrun, the first call makes the ranks known to each other."""
    if _by_itself or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if not dist.is_initialized():
        join()
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))


@contextmanager
def by_itself() -> Iterator[None]:
    """A context in which this rank trains as if there were no others, to be compared with."""
    global _by_itself
    before, _by_itself = _by_itself, True
    try:
        yield
    finally:
        _by_itself = before


def join(patience_s: float = PATIENCE_S) -> None:
    """Meet the other ranks that torchrun started: NCCL where there are GPUs, one for each rank,
    gloo on a CPU.

    Raises `Unavailable` where this rank would have no GPU of its own. The process group for CPU
    tensors exists in any case: what the ranks tell each other beside gradients must not keep a GPU
    waiting.
    """
    if on_gpu := torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise Unavailable(
                f"rank {os.environ['RANK']} has no GPU: this machine shows {gpus}, and torchrun "
                f"started {os.environ['LOCAL_WORLD_SIZE']} processes. Use --nproc-per-node={gpus}, "
                "or let CUDA_VISIBLE_DEVICES show more"
            )
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=patience_s)
    )


def leave() -> None:
    """End what `join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------
# The recipe's step, shared


def share_of(recipe: Recipe, ranks: int) -> int:
    """Micro-batches of an optimizer step that each of `ranks` ranks takes. Raises `ValueError`
    where they can't be shared evenly."""
    if recipe.accumulation % ranks:
        lower = recipe.accumulation - recipe.accumulation % ranks
        fitting = " or ".join(str(count) for count in (lower, lower + ranks) if count)
        raise ValueError(
            f"{ranks} ranks can't share accumulation={recipe.accumulation} micro-batches evenly. "
            f"Use accumulation={fitting}, or a number of ranks that divides it."
        )
    return recipe.accumulation // ranks


FSDP_NEEDS: dict[str, tuple[str, ...]] = {
    "precision": ("bf16", "fp32"),  # in fp16 each rank would see its own shard's overflows alone
    "base_linear": ("published",),  # it cuts plain weights
    "adapter": ("none", "plain", "peft"),  # folded ones read weights before they are gathered
    "memory_format": ("contiguous",),  # it cuts contiguous weights
}
"""Knob -> the values that parallel='fsdp' can do."""


def check(recipe: Recipe, ranks: int) -> None:
    """Raise `ValueError` for what several ranks can't do of a recipe."""
    if ranks == 1:
        return
    share_of(recipe, ranks)
    if recipe.driver != "eager":
        raise ValueError(
            f"driver={recipe.driver!r} is for one process. Use driver='eager' on several ranks."
        )
    if recipe.parallel != "fsdp":
        return
    for knob, values in FSDP_NEEDS.items():
        if (value := getattr(recipe, knob)) not in values:
            uses = " or ".join(f"{knob}={allowed!r}" for allowed in values)
            raise ValueError(f"parallel='fsdp' can't do {knob}={value!r}. Use {uses}.")
    if recipe.compile != "off" and recipe.compile_scope != "blocks":
        raise ValueError(
            "parallel='fsdp' gathers weights between blocks. Use compile_scope='blocks'."
        )


def distribute(
    workload: Workload, model: nn.Module, recipe: Recipe, ranks: Ranks
) -> nn.Module | None:
    """Have the trained part of `model` share its work with the other ranks, in place; what then
    synchronises gradients.

    None where nothing was done: alone.
    """
    if ranks.alone:
        return None
    if recipe.parallel == "fsdp":
        return _shard(workload, model, recipe, ranks)
    name, trained = workload.trained(model)
    devices = [ranks.local] if workload.device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(
        trained,
        device_ids=devices,
        broadcast_buffers=False,  # none is trained
        bucket_cap_mb=recipe.bucket_cap_mb or None,
    )
    setattr(model, name, wrapped)
    return wrapped


def _shard(workload: Workload, model: nn.Module, recipe: Recipe, ranks: Ranks) -> nn.Module:
    """FSDP2: cut every weight of the trained part among the ranks, frozen or not, unit by unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(workload.device.type, (ranks.count,))
    # Weights that are trained are float32; they are gathered in the precision that they are
    # multiplied in.
    lower = recipe.adapter == "none" and recipe.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if lower else MixedPrecisionPolicy()
    )
    for unit in workload.units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    root = fully_shard(workload.called(model), mesh=mesh, mp_policy=policy)
    # The whole weights, held for later trainers, would fill the memory that sharding saved.
    workload.release_weights()
    return root


@contextmanager
def synchronising(shared: nn.Module | None, recipe: Recipe, last: bool) -> Iterator[None]:
    """A context for one micro-step: unless it is the step's last, or the recipe says after each,
    nothing is sent.

    shared: what `distribute` gave.
    """
    wait = not last and recipe.synchronise == "last"
    if isinstance(shared, nn.parallel.DistributedDataParallel) and wait:
        with shared.no_sync():
            yield
        return
    if hasattr(shared, "set_requires_gradient_sync"):  # FSDP: whole gradients add up until the last
        shared.set_requires_gradient_sync(not wait)
    yield


# -------------------------------------------------------------------------------------------------
# State, whole again


def whole_parameters(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parameters' values on the host; those that are cut among the ranks are gathered, by all
    ranks together.
    """
    return [_whole(parameter.detach()).cpu() for parameter in parameters]


def bytes_here(tensor: Any) -> int:
    """What a tensor takes on this device: of one that is cut among the ranks, this rank's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


@torch.no_grad()
def take_parameters(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Set the parameters to whole `values`; of those that are cut, each rank takes its part.

    Raises `ValueError` where the shapes differ, before anything changes.
    """
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (parameters, values)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The checkpoint holds {len(values)} tensors that don't fit the {len(parameters)} "
            "trained ones of this run. Resume with the same settings, or start in another folder."
        )
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(_part(value, parameter))


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as one process has it: what is cut among the ranks is gathered, by
    all ranks together.
    """
    state = optimizer.state_dict()
    whole = {
        number: {name: _whole(value) for name, value in moments.items()}
        for number, moments in state["state"].items()
    }
    return state | {"state": whole}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `optimizer_state` gave; of moments that are to be cut, each rank takes its part."""
    optimizer.load_state_dict(state)
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if torch.is_tensor(moment) and moment.shape == parameter.shape:
                moments[name] = _part(moment, parameter)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor


def _part(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Of a whole value of a parameter that is cut among the ranks, this rank's part."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    layout = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), *layout)
