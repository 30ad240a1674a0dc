"""How the optional page measures TensorFlow, a library that is none of the course's. What it
measures stands in the page's cells.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from labutils.profiling import cuda
from labutils.recipe import Unavailable
from labutils.results.records import Run, summarise
from labutils.training.child_process import MESSAGE, Child


def tensorflow() -> ModuleType:
    """The library. Raises `Unavailable` that says how to get it."""
    try:
        import tensorflow
    except Exception as error:  # a library that doesn't fit fails in several ways
        raise Unavailable(
            f"TensorFlow can't be imported here ({type(error).__name__}: {error}). It is none of "
            "the course's libraries; `pip install tensorflow` in an environment of its own does it"
        ) from error
    return tensorflow


def run_of(case: str, samples: list[float]) -> Run:
    """The run "tensorflow: CASE" with its `step_ms`."""
    tags = {"experiment": "tensorflow", "case": case}
    run = Run("10", f"tensorflow: {case}", tags=tags, samples={"step_ms": samples})
    run.metrics = {"step_ms": summarise(samples)}
    return run


def step_ms(step: Callable[[], Any], steps: int = 10, untimed: int = 2) -> list[float]:
    """Milliseconds of each of `steps` calls of `step`, after some that aren't timed: in the first
    two TensorFlow traces its graph, in a first epoch it fills its cache."""
    samples = []
    for _ in range(untimed + steps):
        began = time.perf_counter()
        step()
        samples.append(1e3 * (time.perf_counter() - began))
    return samples[untimed:]


_CHILD = f"""
import sys, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
if sys.argv[1] == "1":
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
tf.reduce_sum(tf.ones((1000, 1000))).numpy()
print("{MESSAGE}", len(gpus), flush=True)
sys.stdin.readline()
"""


def growth_run() -> Run:
    """What a process that adds up a million numbers takes of the GPU, `plain_gb`, and `growing_gb`
    with memory growth; `takes_less`: 1 if that is less. Raises `Unavailable` without a GPU that
    both libraries see."""
    if not cuda.available():
        raise Unavailable("memory growth is about a GPU's memory, and there is no GPU here")
    taken = {}
    for name, flag in (("plain_gb", "0"), ("growing_gb", "1")):
        before = cuda.free_memory()
        with Child(["-c", _CHILD, flag]) as child:
            if not child.receive():
                raise Unavailable("this TensorFlow sees no GPU: it needs a build with CUDA")
            taken[name] = before - cuda.free_memory()
    return Run("", "", metrics=taken | {"takes_less": int(taken["growing_gb"] < taken["plain_gb"])})
