"""Tries a recipe in a process of its own. Whatever happens there, even a crash, the caller goes on.

run = try_isolated(workload, STOCK.but(compile="reduce-overhead"), steps=3)
"""

from __future__ import annotations

from collections.abc import Mapping

from labutils.recipe import Recipe
from labutils.results.records import Run
from labutils.training import child_process
from labutils.training.benchmark import empty_run, measure
from labutils.training.child_process import Child
from labutils.training.trainer import Trainer
from labutils.workloads.base import Workload, open_workload

TIMEOUT_S = 360.0


def try_isolated(
    workload: Workload,
    recipe: Recipe,
    steps: int = 3,
    scale: str = "",
    environment: Mapping[str, str] | None = None,
) -> Run:
    """The run of `steps` optimizer steps in a child process.

    scale: default: the workload's own. environment: variables beside this process's own.

    Its metrics hold `failed` (0 or 1), `message` (the exception, or how the process ended; "" where
    it went well) and, where it went well, `loss`; its samples `step_ms` from the first step on. The
    run's status is "ok" either way: the outcome of the trial is the result.
    """
    opened = workload.opened_as() | {"device": workload.device.type}
    if scale:
        opened |= {"scale": scale, "weights": "random"}  # the hub has one size only
    order = {"workload": opened, "recipe": recipe.as_dict(), "steps": steps}
    with Child(["-m", __name__], order, TIMEOUT_S, environment) as child:
        result = child.receive() or {"metrics": {"failed": 1, "message": child.failure()}}
    run = empty_run(workload, recipe, "")
    run.scale, run.weights = opened["scale"], opened["weights"]
    run.metrics, run.samples = result["metrics"], result.get("samples", {})
    return run


def _main() -> None:
    """The child's side."""
    order = child_process.order()
    try:
        with Trainer(open_workload(**order["workload"]), Recipe(**order["recipe"])) as trainer:
            times = measure(trainer, order["steps"])
        metrics = {"failed": 0, "message": "", "loss": trainer.losses}
        result = {"metrics": metrics, "samples": {"step_ms": times.step_ms}}
    except Exception as error:
        reason = " ".join(str(error).split()).partition(" Stack trace:")[0]
        message = f"{type(error).__name__}: {reason}"[:600]
        result = {"metrics": {"failed": 1, "message": message}}
    child_process.send(result)


if __name__ == "__main__":
    _main()
