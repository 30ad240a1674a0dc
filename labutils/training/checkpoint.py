"""Stopping and resuming: everything a run's future depends on, in one file that is always whole.

That is the trained weights, the optimizer's moments, the loss scale, the random generators and how
many micro-batches were taken. The frozen weights come from the seed or the hub again, and the
data's order from the seed. Of several ranks the first writes the file, weights that are cut among
them gathered: it is the same file, whoever wrote it, and fewer ranks or one can go on from it.

A resumed run does what the uninterrupted one would have done, with one exception. Images that
aren't square are cropped at random by whoever reads them: workers begin their random numbers anew,
and accelerate reads a batch ahead, so that with either the crops are other ones.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labutils.training import distributed

if TYPE_CHECKING:
    from labutils.training.trainer import Trainer

FILE = "checkpoint.pt"
CONTENT = {"step", "taken", "recipe", "workload", "parameters", "optimizer", "scaler", "random"}
MUST_AGREE = (
    "seed",
    "rank",
    "adapter",
    "base_linear",
    "precision",
    "micro_batch",
    "accumulation",
    "shapes",
    "token_budget",
    "optimizer",
    "learning_rate",
    "max_grad_norm",
)
"""Knobs that a resumed run must share with the one it goes on from; the others only change its
speed.
"""


def save(trainer: Trainer) -> Path:
    """Write the trainer's state next to the old file, then put it in its place in one rename.

    Raises `NotFinite` where the loss became NaN or infinite: the last good file is not replaced by
    a bad one.
    """
    trainer.driver.log.flush()
    sharded = distributed.is_sharded(trainer.parameters)
    state = {
        "step": trainer.step_count,
        "taken": trainer.batches.taken,
        "recipe": trainer.recipe.as_dict(),
        "workload": [
            trainer.workload.name,
            trainer.workload.scale,
            trainer.workload.weights,
            trainer.workload.data,
        ],
        "parameters": distributed.whole_parameters(trainer.parameters),
        "optimizer": distributed.whole_optimizer(*_trained(trainer))
        if sharded
        else trainer.optimizer.state_dict(),
        "scaler": trainer.driver.scaler.state_dict() if trainer.driver.scaler else {},
        "random": _random_state(),
    }
    target = trainer.folder / FILE
    if trainer.ranks.rank:  # what all have gathered, the first one writes
        return target
    trainer.folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=trainer.folder, prefix=FILE)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def load(trainer: Trainer) -> None:
    """Put the trainer where its folder's checkpoint was written."""
    path = trainer.folder / FILE
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {FILE} in {trainer.folder} to resume from. Start without resume=True."
        )
    state = _read(path)
    _check(state, trainer, path)
    distributed.take_parameters(trainer.parameters, state["parameters"])
    if distributed.is_sharded(trainer.parameters):
        distributed.take_optimizer(*_trained(trainer), state["optimizer"])
    else:
        trainer.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        trainer.driver.scaler.load_state_dict(state["scaler"])
    trainer.step_count = state["step"]
    trainer.driver.log.start_at(state["step"])
    trainer.resume_data(state["taken"])
    _set_random_state(state["random"])


def step_of(folder: Path) -> int | None:
    """The optimizer step after which the folder's checkpoint was written; None where there is none
    that is whole.
    """
    try:
        return _read(folder / FILE)["step"]
    except ValueError:
        return None


def _trained(trainer: Trainer) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[str]]:
    """The trained part, its optimizer and the names of what that trains, in its order."""
    part = trainer.workload.trained(trainer.model)[1]
    names = {id(parameter): name for name, parameter in part.named_parameters()}
    return part, trainer.optimizer, [names[id(parameter)] for parameter in trainer.parameters]


def _read(path: Path) -> dict[str, Any]:
    """The checkpoint's content. Raises `ValueError` where it is damaged."""
    try:
        with zipfile.ZipFile(
            path
        ) as file:  # torch.load doesn't compare the check sums that torch.save wrote
            if damaged := file.testzip():
                raise ValueError(f"the check sum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if missing := CONTENT - state.keys():
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
    except Exception as error:  # a damaged file raises some five types of exception
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {error}): it is damaged. Delete it and "
            "start again, or put "
            "a copy back."
        ) from error
    return state


def _check(state: dict[str, Any], trainer: Trainer, path: Path) -> None:
    """Raise `ValueError` where the checkpoint is another run's, or holds what this one can't go on
    from.
    """
    if wrong := _wrong_kinds(state):
        raise _unfit(path, f"its {wrong} is not what it should be")
    workload = trainer.workload
    mine = trainer.recipe.as_dict() | {
        "workload": [workload.name, workload.scale, workload.weights, workload.data]
    }
    saved = state["recipe"] | {"workload": state["workload"]}
    for knob in ("workload", *MUST_AGREE):
        there = saved.get(knob, "nothing")
        if there != mine[knob]:
            raise ValueError(
                f"{path} was written with {knob}={there!r}; this run has {mine[knob]!r}. Resume "
                "with the same "
                "settings, or start in another folder."
            )
    there, here = (
        [tuple(p.shape) for p in found] for found in (state["parameters"], trainer.parameters)
    )
    if there != here:
        at = next(
            (i for i, pair in enumerate(zip(there, here, strict=False)) if pair[0] != pair[1]), None
        )
        raise _unfit(
            path,
            f"it has {len(there)} trained matrices, the model {len(here)}"
            if at is None
            else f"its matrix {at} is {there[at]}, the model's {here[at]}",
        )
    if wrong := _wrong_optimizer(state["optimizer"], trainer):
        raise _unfit(path, wrong)
    scaler = trainer.driver.scaler
    if state["scaler"] and (
        not scaler or not scaler.is_enabled() or scaler.state_dict().keys() - state["scaler"].keys()
    ):
        raise _unfit(path, "its loss scale is not this run's")


def _unfit(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} does not fit this run ({why}): another version wrote it, or it was changed. Start "
        "in another folder."
    )


def _wrong_kinds(state: dict[str, Any]) -> str:
    """The first of the checkpoint's fields whose kind is wrong; "" where all are right."""
    counts = {name: type(state[name]) is int and state[name] >= 0 for name in ("step", "taken")}
    tables = {
        name: isinstance(state[name], dict) for name in ("recipe", "optimizer", "scaler", "random")
    }
    right = counts | tables | {"workload": isinstance(state["workload"], list)}
    right["parameters"] = isinstance(state["parameters"], list) and all(
        map(torch.is_tensor, state["parameters"])
    )
    right["optimizer"] = right["optimizer"] and isinstance(
        state["optimizer"].get("param_groups"), list
    )
    right["optimizer"] = right["optimizer"] and isinstance(state["optimizer"].get("state"), dict)
    right["random"] = right["random"] and _is_generator(state["random"].get("cpu"))
    right["random"] = right["random"] and (
        state["random"].get("cuda") is None or _is_generator(state["random"]["cuda"])
    )
    return next((name for name, good in right.items() if not good), "")


def _is_generator(state: Any) -> bool:
    return torch.is_tensor(state) and state.dtype == torch.uint8 and state.dim() == 1


def _wrong_optimizer(saved: dict[str, Any], trainer: Trainer) -> str:
    """Why the saved optimizer isn't one of the trainer's parameters; "" where it is."""
    try:
        there = [len(group["params"]) for group in saved["param_groups"]]
    except (KeyError, TypeError):
        return "its optimizer is not what it should be"
    here = [len(group["params"]) for group in trainer.optimizer.param_groups]
    return (
        "" if there == here else f"its optimizer has {sum(there)} matrices, the model's {sum(here)}"
    )


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
