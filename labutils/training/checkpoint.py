"""A checkpoint file: a state dict that is written atomically and read back whole.

What the state holds is the trainer's business (`Trainer.state_dict`). A run that was killed at any
moment, also while it wrote, leaves the last whole file in place.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

FILE = "checkpoint.pt"


def write(state: dict[str, Any], folder: Path) -> Path:
    """Write `state` next to the folder's checkpoint, then put it in its place in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"  # one that a killed process left is written over
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / FILE)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return folder / FILE


def read(folder: Path) -> dict[str, Any]:
    """The state of the folder's checkpoint, on the CPU.

    Raises `FileNotFoundError` where there is none, `ValueError` where the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {FILE} in {folder} to resume from. Start without resume=True."
        )
    try:
        with zipfile.ZipFile(path) as file:  # torch.load doesn't compare the check sums
            if damaged := file.testzip():
                raise ValueError(f"the check sum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise ValueError("it holds no run")
        return state
    except Exception as error:  # a damaged file raises some five types of exception
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}). Delete it and start again, or "
            "put a copy back."
        ) from error
