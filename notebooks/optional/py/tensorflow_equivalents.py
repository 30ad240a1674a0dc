# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: notebooks/optional//ipynb,notebooks/optional/py//py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-papermill,-language_info,-widgets
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Optional page to lab 10 · The same advice in TensorFlow
#
# Article A4 gives its advice for PyTorch, and some of it for TensorFlow as well. The course uses PyTorch. This page puts the
# equivalents side by side, and measures them where TensorFlow is installed; where it isn't, each section says so and goes
# on. It is not a lab, and no lab needs it. Its results are kept as lab 10's.
#
# | what for | PyTorch | TensorFlow |
# |---|---|---|
# | mixed precision | `torch.autocast`, `torch.amp.GradScaler` | `mixed_precision.set_global_policy("mixed_float16")`: casts, and scales the loss in `compile` |
# | BF16 | `torch.autocast(dtype=torch.bfloat16)` | `set_global_policy("mixed_bfloat16")` |
# | reading in parallel | `DataLoader(num_workers=8)`: processes | `map(..., num_parallel_calls=AUTOTUNE)`: C++ threads |
# | reading ahead | `prefetch_factor=2` for each worker | `.prefetch(AUTOTUNE)` |
# | decoded data in memory | a `Dataset` that keeps them | `.cache()` |
# | GPU memory as needed | always: a caching allocator | `set_memory_growth(gpu, True)`; by default nearly all at once |
# | compiling | `torch.compile` | `tf.function(jit_compile=True)` (XLA) |
#
# It needs TensorFlow, which is none of the course's libraries: `pip install tensorflow` in an environment of its own, as it
# wants other CUDA libraries than PyTorch. It takes a minute.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # no weights are loaded here
data: str = "generated"  # generated files like the real ones
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("10", globals())

# %%
import os
import subprocess
import sys
import time
from functools import partial

import matplotlib.pyplot as plt

from labutils.course import plots
from labutils.data import generated_images
from labutils.recipe import Unavailable
from labutils.results.records import Run, summarise

plots.use_style()
tiny = lab.scale == "tiny"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # it would tell how it was built


# %%
def timed(case, step, steps=10, untimed=2):
    """The run of `steps` calls, after some that aren't timed: in the first two TensorFlow traces
    its graph, in a first epoch it fills its cache."""
    samples = []
    for _ in range(untimed + steps):
        began = time.perf_counter()
        step()
        samples.append(1e3 * (time.perf_counter() - began))
    samples = samples[untimed:]
    tags, metrics = {"experiment": "tensorflow", "case": case}, {"step_ms": summarise(samples)}
    return Run("10", case, tags=tags, samples={"step_ms": samples}, metrics=metrics)


# %% [markdown]
# ## Mixed precision
#
# **Question.** How much faster does the policy `mixed_float16` make training three dense layers?

# %%
width, batch = (256, 64) if tiny else (4096, 2048)


def three_layers(tf):
    """A model, its input and what it should say."""
    layers = [tf.keras.layers.Dense(width, activation="relu") for _ in range(3)]
    # The policy's last advice: what comes out is float32, so that the loss is computed in it.
    last = tf.keras.layers.Dense(1, dtype="float32")
    model = tf.keras.Sequential([tf.keras.Input((width,)), *layers, last])
    model.compile(optimizer="adam", loss="mse")
    return model, tf.random.normal((batch, width)), tf.random.normal((batch, 1))


# %%
columns = {"case": "run", "step_ms": "ms, median"}
runs: dict = {}
with lab.attempt("TensorFlow's mixed precision"):
    import tensorflow as tf

    for policy in ("float32", "mixed_float16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        model, x, y = three_layers(tf)
        # Each call hands its loss to the host, so it waits for the GPU.
        runs[policy] = timed(policy, partial(model.train_on_batch, x, y))
    tf.keras.mixed_precision.set_global_policy("float32")
    lab.keep(runs)
    fig, ax = plt.subplots()
    ax.barh(list(runs), [run.metric("step_ms") for run in runs.values()])
    ax.set_xlabel("ms, median")
    plt.show()
lab.verdict("A4.tensorflow.mixed-precision");
# %% [markdown]
# **Takeaway.** As in PyTorch, 16 bits help where the GPU has tensor cores and the products are large enough to keep it busy.
# A CPU gains nothing, or loses.
#
# ## The input pipeline
#
# **Question.** What do parallel reading, prefetching and a cache bring, on the pictures of lab 10?

# %%
def pipelines(tf, files: list, resolution: int, batch: int) -> dict:
    """The same pictures read one by one, by several threads and ahead, and from a cache."""

    def read(path):
        image = tf.io.decode_png(tf.io.read_file(path), channels=3)
        return tf.image.resize(image, (resolution, resolution)) / 127.5 - 1.0

    names = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    parallel = names.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    return {
        "plain input": names.map(read).batch(batch),
        "parallel, prefetched": parallel.batch(batch).prefetch(tf.data.AUTOTUNE),
        "cached": parallel.cache().batch(batch).prefetch(tf.data.AUTOTUNE),
    }


# %%
with lab.attempt("TensorFlow's input pipeline"):
    import tensorflow as tf

    folder = lab.cache_dir / "images" / f"drawn-v{generated_images.VERSION}-seed0"
    pictures = generated_images.draw_images(folder, 16 if tiny else 64)
    runs = {}
    epoch = len(pictures) // 4
    for case, pipeline in pipelines(tf, pictures, resolution=512, batch=4).items():
        batches = iter(pipeline.repeat())
        runs[case] = timed(case, partial(next, batches), steps=2 * epoch, untimed=epoch)
    lab.keep(runs)
    fig, ax = plt.subplots()
    ax.barh(list(runs), [run.metric("step_ms") for run in runs.values()])
    ax.set_xlabel("ms, median")
    plt.show()
lab.show(runs.values(), columns, experiment="tensorflow")
lab.verdict("A4.tensorflow.parallel-map", "A4.tensorflow.cache");
# %% [markdown]
# `AUTOTUNE` chooses the number of threads and the length of the queue while the pipeline runs.
#
# **Takeaway.** Lab 10's chart holds here, too: a pipeline that is faster than the training step is fast enough.
#
# ## Memory growth
#
# **Question.** How much of a GPU's memory does a process take that needs 4 MB?

# %%
TAKES = """
import sys, torch, tensorflow as tf
free = torch.cuda.mem_get_info()[0]
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, sys.argv[1] == "growing")
with tf.device("GPU:0"):
    tf.reduce_sum(tf.ones((1000, 1000))).numpy()
print((free - torch.cuda.mem_get_info()[0]) / 1e9)
"""
with lab.attempt("TensorFlow's memory growth"):
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        raise Unavailable("TensorFlow sees no GPU here")
    taken = {}
    for how in ("plain", "growing"):
        command = [sys.executable, "-c", TAKES, how]
        taken[f"{how}_gb"] = float(subprocess.check_output(command, text=True).split()[-1])
    taken["takes_less"] = int(taken["growing_gb"] < taken["plain_gb"])
    growth = {"experiment": "tensorflow", "case": "memory growth"}
    lab.keep(Run("10", "memory growth", tags=growth, metrics=taken))
    print(taken)
lab.verdict("A4.tensorflow.growth");

# %% [markdown]
# PyTorch's allocator takes memory as it needs it, and keeps what it once had (`torch.cuda.memory_reserved`). TensorFlow
# takes nearly everything at the start, unless you tell it to grow. That avoids fragmentation, but leaves nothing to other
# processes on the same card.
#
# **Takeaway.** If others share your GPU, turn memory growth on.
#
# ## Where this comes from, and what to read on
# - TensorFlow's guides: [mixed precision](https://www.tensorflow.org/guide/mixed_precision), [better performance with
#   tf.data](https://www.tensorflow.org/guide/data_performance), [limiting GPU memory
#   growth](https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth).
# - Murray et al., *tf.data: A Machine Learning Data Processing Framework* (2021,
#   [arXiv:2101.12127](https://arxiv.org/abs/2101.12127)).
