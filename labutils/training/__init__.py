"""The one training loop: a recipe at work on a workload. It may import workloads, layers, data,
profiling, results and the recipe.

    run  = train(workload, recipe, steps=20)                         one recipe
    with Benchmark(workload) as bench:                               several, interleaved
        runs = bench.compare({"stock": STOCK, "fast": fast}, steps=5)
    with Trainer(workload, recipe) as trainer: trainer.step()        to profile or to resume

`trainer` builds and steps, `step` has the three drivers of an optimizer step, `benchmark` times.
`batches` brings the data, `loss_log` takes the losses, `checkpoint` is the file to resume from.
`distributed` shares a step with the other ranks; `launcher` starts them from a notebook, and
`launch_worker` is what each of them does. `child_process` runs something in another process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labutils.training.benchmark import Benchmark, measure, train
    from labutils.training.isolated_run import try_isolated
    from labutils.training.trainer import Trainer

__all__ = ["Benchmark", "Trainer", "measure", "train", "try_isolated"]
FILES = {"Trainer": "trainer", "try_isolated": "isolated_run"}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import PyTorch when the loop is asked for: the command line needs `child_process` alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{FILES.get(name, 'benchmark')}"), name)
