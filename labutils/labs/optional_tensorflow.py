"""What the optional page on TensorFlow measures: article A4's advice for a library that is none of
the course's.

Every function takes the imported module as its first argument, so that the page can say why where
there is none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
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
            f"TensorFlow can't be imported here ({type(error).__name__}: {error}). It is not among "
            "the course's "
            "libraries; `pip install tensorflow` in an environment of its own brings it"
        ) from error
    return tensorflow


def precision_runs(tf: ModuleType, width: int, batch: int, steps: int) -> dict[str, Run]:
    """ "tensorflow: float32" and "tensorflow: mixed_float16": `step_ms` of training three layers of
    `width`.

    The first two steps, in which the graph is traced, aren't timed.
    """
    runs = {}
    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            layers = [tf.keras.layers.Dense(width, activation="relu") for _ in range(3)]
            # The policy's last advice: what comes out is float32, so that the loss is computed in
            # it.
            model = tf.keras.Sequential(
                [tf.keras.Input((width,)), *layers, tf.keras.layers.Dense(1, dtype="float32")]
            )
            model.compile(optimizer="adam", loss="mse")
            x, y = tf.random.normal((batch, width)), tf.random.normal((batch, 1))
            for _ in range(2):
                model.train_on_batch(x, y)
            samples = []
            for _ in range(steps):
                began = time.perf_counter()
                model.train_on_batch(x, y)  # it hands its loss to the host: waits for the GPU
                samples.append(1e3 * (time.perf_counter() - began))
            runs[f"tensorflow: {policy}"] = _run(policy, samples)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
    return runs


def input_runs(
    tf: ModuleType, files: Sequence[Path], resolution: int, batch: int, epochs: int = 2
) -> dict[str, Run]:
    """ "tensorflow: plain input", "... parallel, prefetched" and "... cached": `step_ms` of taking
    a batch of pictures.

    The first epoch isn't timed: it fills the cache.
    """

    def read(path: Any) -> Any:
        image = tf.io.decode_png(tf.io.read_file(path), channels=3)
        return tf.image.resize(image, (resolution, resolution)) / 127.5 - 1.0

    names = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    parallel = names.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    pipelines = {
        "plain input": names.map(read).batch(batch),
        "parallel, prefetched": parallel.batch(batch).prefetch(tf.data.AUTOTUNE),
        "cached": parallel.cache().batch(batch).prefetch(tf.data.AUTOTUNE),
    }
    each = {case: epoch_ms(pipeline, epochs) for case, pipeline in pipelines.items()}
    return {f"tensorflow: {case}": _run(case, samples) for case, samples in each.items()}


def _run(case: str, samples: list[float]) -> Run:
    tags = {"experiment": "tensorflow", "case": case}
    metrics = {"step_ms": summarise(samples)}
    name = f"tensorflow: {case}"
    return Run("09", name, tags=tags, metrics=metrics, samples={"step_ms": samples})


def epoch_ms(pipeline: Any, epochs: int) -> list[float]:
    """Milliseconds from batch to batch in every epoch but the first."""
    samples: list[float] = []
    for epoch in range(epochs + 1):
        began = time.perf_counter()
        for _ in pipeline:
            now = time.perf_counter()
            if epoch:
                samples.append(1e3 * (now - began))
            began = now
    return samples


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
