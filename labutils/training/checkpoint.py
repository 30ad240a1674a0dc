"""Stopping and resuming: everything a run's future depends on, in one file that is always whole.

That is the trained weights, the optimizer's moments, the loss scale, the random generators and how many micro-batches
were taken. The frozen weights come from the seed or the hub again, and the data's order from the seed.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from labutils.training.session import Session

FILE = "checkpoint.pt"
CONTENT = {"step", "taken", "recipe", "workload", "parameters", "optimizer", "scaler", "random"}
MUST_AGREE = (
    "seed",
    "rank",
    "adapter",
    "precision",
    "micro_batch",
    "accumulation",
    "optimizer",
    "learning_rate",
    "max_grad_norm",
)
"""Knobs that a resumed run must share with the one it goes on from; the others only change its speed."""


def save(session: Session) -> Path:
    """Write the session's state next to the old file, then put it in its place in one rename.

    Raises `NotFinite` where the loss became NaN or infinite: the last good file is not replaced by a bad one.
    """
    session.driver.log.flush()
    state = {
        "step": session.step_count,
        "taken": session.batches.taken,
        "recipe": session.recipe.as_dict(),
        "workload": [session.workload.name, session.workload.scale, session.workload.weights, session.workload.data],
        "parameters": [p.detach().cpu() for p in session.parameters],
        "optimizer": session.optimizer.state_dict(),
        "scaler": session.driver.scaler.state_dict() if session.driver.scaler else {},
        "random": _random_state(),
    }
    session.folder.mkdir(parents=True, exist_ok=True)
    target = session.folder / FILE
    handle, name = tempfile.mkstemp(dir=session.folder, prefix=FILE)
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


def load(session: Session) -> None:
    """Put the session where its folder's checkpoint was written."""
    path = session.folder / FILE
    if not path.exists():
        raise FileNotFoundError(f"There is no {FILE} in {session.folder} to resume from. Start without resume=True.")
    state = _read(path)
    _check(state, session, path)
    with torch.no_grad():
        for parameter, saved in zip(session.parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
    session.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        session.driver.scaler.load_state_dict(state["scaler"])
    session.step_count = state["step"]
    session.driver.log.start_at(state["step"])
    session.resume_data(state["taken"])
    _set_random_state(state["random"])


def _read(path: Path) -> dict[str, Any]:
    """The checkpoint's content. Raises `ValueError` where it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load doesn't compare the check sums that torch.save wrote
            if damaged := file.testzip():
                raise ValueError(f"the check sum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if missing := CONTENT - state.keys():
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
    except Exception as error:  # a damaged file raises some five types of exception
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {error}): it is damaged. Delete it and start again, or put "
            "a copy back."
        ) from error
    return state


def _check(state: dict[str, Any], session: Session, path: Path) -> None:
    """Raise `ValueError` where the checkpoint is another run's."""
    workload = session.workload
    mine = session.recipe.as_dict() | {"workload": [workload.name, workload.scale, workload.weights, workload.data]}
    saved = state["recipe"] | {"workload": state["workload"]}
    for knob in ("workload", *MUST_AGREE):
        if saved[knob] != mine[knob]:
            raise ValueError(
                f"{path} was written with {knob}={saved[knob]!r}; this run has {mine[knob]!r}. Resume with the same "
                "settings, or start in another folder."
            )


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
