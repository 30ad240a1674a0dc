"""The one training loop: a recipe at work on a workload.

    run  = train(workload, recipe, steps=20)                        one recipe
    runs = compare(workload, {"stock": STOCK, "fast": fast}, ...)   several, interleaved in one process
    with Trainer(workload, recipe) as trainer: trainer.step()       step by step, to profile or to resume

`trainer` puts the pieces together, `batches` brings the data, `drivers` has the three ways to drive
an optimizer step, `logs` says where the losses go and writes down memory, `checkpoint` stops and
resumes, `comparing` measures, and `isolated` tries what may fail. Started by torchrun, the same
loop shares its steps with other processes: `ranks` says how, `launching` starts them from a
notebook, and `rank` is what each of them does.
"""

from labutils.training.benchmark import Benchmark, compare, measure, train
from labutils.training.memory_run import MemoryLog
from labutils.training.subprocess_run import compile_ahead, try_isolated
from labutils.training.trainer import Trainer

__all__ = [
    "Benchmark",
    "MemoryLog",
    "Trainer",
    "compare",
    "compile_ahead",
    "measure",
    "train",
    "try_isolated",
]
