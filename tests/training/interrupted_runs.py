"""The other side of test_resume.py: training that is killed. The tests resume it, and know only the
folder.

    python interrupted_runs.py FOLDER

Every case runs in a process of its own and kills it in the midst of a step, and one more
(WHILE_SAVING) while its second checkpoint is written.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from labutils.recipe import STOCK, Recipe
from labutils.training import Trainer
from labutils.workloads import open_workload

STEPS = 6
EAGER = STOCK.but(driver="eager", adapter="plain")


@dataclass(frozen=True)
class Case:
    """`saved`: the step after which the checkpoint is written; `epoch`: its examples, of which a
    step takes 4.
    """

    recipe: Recipe
    saved: int = 3
    epoch: int = 18


CASES = {
    "stock": Case(STOCK),
    "eager, kept workers": Case(
        EAGER.but(num_workers=2, persistent_workers=True, logging="ring-buffer")
    ),
    "eager, at the epoch's end": Case(EAGER, saved=4, epoch=16),
    "folded, cached, fused": Case(
        EAGER.but(adapter="folded", cache="latents+text", optimizer="adamw-fused")
    ),
}
"""Resumed runs cross the epoch's end, or begin at it."""
WHILE_SAVING = "while saving"


def opened(case: Case, folder: Path, resume: bool = False) -> Trainer:
    """The case's trainer on one thread, with short epochs."""
    torch.set_num_threads(1)
    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    workload.epoch_length = case.epoch
    return Trainer(workload, case.recipe, folder, resume)


def final(case: Case, folder: Path, resume: bool, checkpoint_every: int | None = None) -> dict:
    """Run to the end: weights, moments, losses."""
    with opened(case, folder, resume) as running:
        running.run(STEPS, checkpoint_every=checkpoint_every)
    moments = [
        state[name]
        for state in running.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    return {
        "weights": [parameter.detach().clone() for parameter in running.parameters],
        "moments": [torch.as_tensor(moment) for moment in moments],
        "losses": running.losses,
        "step": running.step_count,
    }


def kill_in_the_midst(case: Case, folder: Path) -> None:
    """Save once, and die in the third micro-step of the second step after it."""
    with opened(case, folder) as running:
        running.run(case.saved)
        running.save()
        draw, left = running.workload.draw, iter(range(6, -1, -1))

        def fatal(*args: object) -> dict:
            return draw(*args) if next(left) else os.kill(os.getpid(), signal.SIGKILL)

        running.workload.draw = fatal
        running.run(STEPS)


def kill_while_saving(case: Case, folder: Path) -> None:
    """Save, train on, and die when the next file is written but not yet on the disk."""
    with opened(case, folder) as running:
        running.run(case.saved, checkpoint_every=case.saved)
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        running.run(STEPS, checkpoint_every=1)


def ended_by(action: partial) -> int:
    """The signal that ended a process of its own which did `action`."""
    if (child := os.fork()) == 0:
        action()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    # What every forked process would else import for itself.
    opened(CASES["stock"], folder / "imports").close()
    for name, case in CASES.items():
        print(ended_by(partial(kill_in_the_midst, case, folder / name)), flush=True)
    print(ended_by(partial(kill_while_saving, Case(EAGER), folder / WHILE_SAVING)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
