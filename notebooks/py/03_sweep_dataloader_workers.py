# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: notebooks//ipynb,notebooks/py//py:percent
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
# # Lab 03 · How many DataLoader workers?
#
# In the stock loop the GPU waits while the training process reads the next image. Article A1 gives that work to *worker
# processes* of PyTorch's DataLoader. It tries 0, 1, 2, 3, 4, 8 and 12 of them, finds that three are best and that twelve
# crash, and later adds pinned memory for another 4 %. But three is the right number for one machine only. In this lab you
# look for the rule behind it: you predict the whole curve from two short measurements, and only then measure it.
#
# **After this lab you can**
# - say what reading one training example consists of, and what each part costs;
# - predict a step's time with any number of workers from the time to read, the time to compute and the number of cores, and
#   say what such a prediction leaves out;
# - work out how much shared memory workers need, recognise the symptoms when it runs out, and cure them;
# - say what `persistent_workers` and `prefetch_factor` are for, and when they gain nothing;
# - say what pinned memory and `non_blocking` do for a copy, and why a loop may not notice.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1½ minutes |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 40 GB | 7 minutes |
#
# Images are PNG files of 1080 × 1080 pixels at every scale; only the model, and the resolution it sees, get smaller. Without
# a GPU, training and workers share the same cores, which moves the optimum, and there is no copy to a GPU. Our H200's curve
# and copies then stand beside what you measure.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 1 at larger scales
rounds: int = 0  # times round all recipes; 0: 1 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("03", globals())

# %%
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import torch

from labutils.course import plots
from labutils.data.loader import EPOCH
from labutils.labs.lab03_dataloader import PARTS, decode_ms, epoch_start_ms, hand_over_ms
from labutils.labs.lab03_pinned_memory import two_by_two
from labutils.labs.lab03_shared_memory import (
    batch_bytes,
    most_workers,
    needed_bytes,
    those_that_fit,
    try_workers,
)
from labutils.profiling.dataloader_model import Pipeline, off_the_model
from labutils.profiling.machine import usable_cores
from labutils.recipe import STOCK, Unavailable
from labutils.results.records import Run, summarise
from labutils.training import compare, train

# %%
plots.use_style()
warnings.filterwarnings(
    "ignore", message="This DataLoader will create"
)  # more workers than cores: on purpose
warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # plain progress bars survive batch runs
steps, rounds = (
    steps or (2 if lab.scale == "tiny" else 1),
    rounds or (1 if lab.scale == "tiny" else 8),
)
MIB = 2**20
if lab.device == "cpu":
    torch.set_num_threads(
        max(1, usable_cores() // 2)
    )  # one half trains, the other is left to the workers

# %% [markdown]
# ## 1 · What reading one example costs
#
# **Question.** A worker's job is to turn a file and a caption into two tensors. How long does that take, and which part of
# it takes longest?
#
# The stock script opens a PNG file of about 1.3 MB and inflates (decompresses) it to 3.5 MB of pixels. It scales them to
# the training resolution with a Lanczos filter, turns them into float32 numbers between −1 and 1, and looks up the
# caption's pieces in a vocabulary.
#
# **Your prediction:** how many milliseconds does all that take for one image, on one core?

# %%
my_read_ms: float | None = None  # for example 20

lab.predict("time to read one image", my_read_ms, "ms")

# %%
workload = lab.workload("sd15-lora")
examples = workload.dataset(None, STOCK)
reading = lab.keep(decode_ms(examples, 16))
read_ms = reading.metric("all_ms")

# %%
names = {
    "decode": "inflate the PNG",
    "convert": "to RGB",
    "resize": "scale",
    "tensor": "to float32",
    "tokenise": "tokenise",
}
bars = {"this machine": {names[part]: reading.metric(f"{part}_ms") for part in PARTS}}
if theirs := lab.reference(experiment="reading"):
    bars["H200's host (full)"] = {names[part]: theirs.metric(f"{part}_ms") for part in PARTS}
fig, ax = plt.subplots()
plots.breakdown(ax, bars)
plt.show()

# %% [markdown]
# **Takeaway.** Most of a read is inflating the PNG. That is work for one core, no GPU helps with it, and it takes as long at
# any training resolution. What you store on the disk decides what you pay in every epoch. (Exercise 3 comes back to this.)

# %% [markdown]
# ## 2 · A prediction before the measurement
#
# **Question.** Can you tell how long a step takes with three workers, or twelve, without trying it?
#
# Let $r$ be the time to read a micro-batch, and $c$ the time to compute on it. Without workers one follows the other. With
# $w$ workers the two overlap, and the slower of them sets the pace: either the computation, or the workers, who finish a
# batch every $r / w$. And if cores are few, all the work of both must still fit on them. As a formula, the time for one
# micro-batch is
#
# $$t(0) = r + c, \qquad t(w) = \max\left(c,\; \frac{r}{w},\; \frac{r + c}{\text{cores}}\right)$$
#
# We know $r$ from section 1. Two short measurements give the rest: a few stock steps without workers for $c$ (their time
# less the wait for data), and the time that training needs to take a finished batch from a worker, which adds to $c$.

# %%
probe = train(workload, STOCK, steps=max(3, steps), name="probe")
taking = hand_over_ms(examples, STOCK, read_ms)
pipeline = Pipeline(
    read_ms=read_ms,
    compute_ms=(probe.metric("step_ms") - probe.metric("data_ms")) / STOCK.accumulation,
    cores=usable_cores(),
    hand_over_ms=median(taking),
    threads=1 if lab.device == "cuda" else torch.get_num_threads(),
)
probe.tags = {"experiment": "probe"}
lab.keep(probe);

# %%
lab.table(
    ("of one micro-batch", "ms"),
    ("read it, one core", pipeline.read_ms),
    ("compute on it", pipeline.compute_ms),
    ("take it from a worker", pipeline.hand_over_ms),
    ("cores this process may use", pipeline.cores),
)

# %% [markdown]
# The formula is a bound: no step can be shorter. A real queue may come out longer near the bend, because batches are handed
# over in order.
#
# **Your prediction:** what is the smallest number of workers with which your step is as short as it gets?

# %%
my_workers: float | None = None  # 0 to 12

lab.predict("fewest workers for the shortest step", my_workers, "workers")

# %%
WORKERS = (0, 1, 2, 3, 4, 8, 12)
predicted = {n: pipeline.step_ms(n) for n in range(13)}
lab.table(
    ("workers", *map(str, WORKERS)),
    ("the formula, ms a step", *(predicted[n] for n in WORKERS)),
)
lab.show(
    f"A micro-batch takes {pipeline.read_ms:.3g} ms to read and {pipeline.busy_ms:.3g} ms to train on. If there are cores to "
    f"spare, **{pipeline.enough_workers}** workers are enough to keep up."
)

# %% [markdown]
# **Takeaway.** The number of workers that is enough is the time to read over the time to compute, rounded up. So it grows
# when you make the computation faster, as the next lab does. Today's answer is not the answer for good.

# %% [markdown]
# ## 3 · The sweep
#
# **Question.** Does the real loop follow the prediction?
#
# All seven recipes take turns in one process, so that if the machine slows down, it does so for all of them. Before a
# recipe's steps are timed, it uses up the batches that its workers made while it was not its turn; they would look like a
# gain. And workers that don't fit into shared memory are left out, because they would not fail but hang (section 5).

# %%
resolution = workload.size.resolution
sweep = {f"workers={n}": STOCK.but(num_workers=n) for n in WORKERS}
tags = {f"workers={n}": {"experiment": "workers", "workers": n} for n in WORKERS}
fitting = those_that_fit(sweep, resolution)
runs = compare(workload, fitting, steps, rounds, tags, warmup=1)
too_large = "skipped: it does not fit in /dev/shm beside the others (docker run --shm-size=1g)"
for name in sweep.keys() - fitting.keys():
    runs[name] = Run("03", name, status=too_large, tags=tags[name])
lab.keep(runs);

# %% [markdown]
# The article's times belong to another machine and to another "step". So we scale its curve: its 290 ms without workers are
# made equal to our time without workers, and only the shape is compared. The wide line is the formula of section 2.

# %%
ARTICLE = {0: 290, 1: 156, 2: 144, 3: 141, 4: 148, 8: 178, 12: None}
measured = {n: runs[f"workers={n}"].metric("step_ms") for n in WORKERS}
ours = measured[0] or predicted[0]
scaled = {n: ms and ms * ours / ARTICLE[0] for n, ms in ARTICLE.items()}
fig, ax = plt.subplots()
in_order = [runs[f"workers={n}"] for n in WORKERS]
plots.sweep(ax, WORKERS, in_order, scaled, predicted, "workers", published_label="article, scaled")
plt.show()

# %%
theirs = {n: lab.reference(experiment="workers", workers=n) for n in WORKERS}
lab.table(
    ("workers", *map(str, WORKERS)),
    ("article, ms", *ARTICLE.values()),
    ("the formula, ms", *(predicted[n] for n in WORKERS)),
    ("measured here, ms", *measured.values()),
    ("here, waiting for data, ms", *(runs[f"workers={n}"].metric("data_ms") for n in WORKERS)),
    ("H200 (full), ms", *(run and run.metric("step_ms") for run in theirs.values())),
    ("H200, waiting for data, ms", *(run and run.metric("data_ms") for run in theirs.values())),
)
lab.verdict("A1.workers.one", "A1.workers.three", "A1.workers.shape", "A1.workers.data-time");

# %% [markdown]
# Where does the measurement leave the formula by more than its own spread?

# %%
known = {n: runs[f"workers={n}"].metrics["step_ms"] for n in WORKERS if measured[n]}
off = off_the_model(known, predicted)
lab.table(
    ("against the formula, by more than p10-p90", "workers"),
    ("slower than it", ", ".join(map(str, off["above"])) or "none"),
    ("faster than it", ", ".join(map(str, off["below"])) or "none"),
)

# %% [markdown]
# How to read this:
#
# - **Off without workers.** There is no queue at 0 workers; the model only adds up the measurements of section 2. If that
#   point is off, the machine itself has become slower or faster since (other programs, heat), and all other points are off
#   for the same reason. Run the notebook again from section 2 on when the machine is idle.
# - **Slower with workers.** Something takes time that the model does not know: processes compete for memory bandwidth and
#   caches, the operating system does not share cores evenly, and workers interrupt the training process.
# - **Faster.** No queue beats the model with the same $r$ and $c$, so one of the two was measured while something else held
#   up the machine. Run section 2 once more.
#
# One thing the model can't do at all is rise again to the right. The article's curve does rise, by a quarter from 3 to 8
# workers, and the article's guess is that the workers get in each other's way. Does yours rise?

# %%
fastest = min(known.values(), key=lambda spread: spread["median"])
best = min(n for n, spread in known.items() if spread["p10"] <= fastest["p90"])
lab.show(
    f"The smallest number of workers that can't be told from the fastest (p10-p90 ranges overlap): **{best}**."
)
if best == 0:
    lab.show(
        "So no number of workers shortens the step by more than it varies anyway. Either other programs were using the "
        "machine meanwhile, or training and workers share too few cores."
    )
lab.verdict("A1.workers.optimum", "A1.workers.more-is-worse");

# %% [markdown]
# **Takeaway.** Once there are enough workers, more of them gain nothing: what remains is the computation itself. The "best"
# number on such a plateau is noise. Before you report an optimum, ask whether the spread can tell it from its neighbours.

# %% [markdown]
# ## 4 · Starting workers, and keeping batches ready
#
# **Question.** Workers have two more knobs. By default they are started anew in each epoch (`persistent_workers=False`), and
# each keeps two batches ready (`prefetch_factor=2`). Is either worth changing?
#
# To start a worker, the training process is copied (*forked*); then training waits for the first batch. That happens once an
# epoch, and an epoch of the real dataset has 1221 examples, which is 305 optimizer steps.

# %%
starts = {}
for workers in (1, 3):
    for kept in (False, True):
        recipe = STOCK.but(num_workers=workers, persistent_workers=kept)
        starts[workers, kept] = epoch_start_ms(examples, recipe, epochs=6)
restart = Run("03", "persistent", tags={"experiment": "persistent"})
restart.recipe = STOCK.but(num_workers=3).as_dict()
restart.samples = {"epoch_start_ms": starts[3, False], "epoch_start_persistent_ms": starts[3, True]}
restart.metrics = {name: summarise(samples) for name, samples in restart.samples.items()} | {
    "epoch_steps": EPOCH // 4
}
lab.keep(restart);

# %%
epoch_ms = EPOCH // 4 * (measured.get(3) or predicted[3])
rows = []
for workers in (1, 3):
    anew, kept = median(starts[workers, False]), median(starts[workers, True])
    rows.append((f"{workers}, here", anew, kept, f"{(anew - kept) / epoch_ms:.2%}"))
if (h200 := lab.reference(experiment="persistent")) and theirs[3]:
    anew, kept = h200.metric("epoch_start_ms"), h200.metric("epoch_start_persistent_ms")
    rows.append(
        ("3, H200", anew, kept, f"{(anew - kept) / (EPOCH // 4 * theirs[3].metric('step_ms')):.2%}")
    )
lab.table(
    (
        "workers",
        "first batch of an epoch, ms",
        "with persistent workers, ms",
        "saved, share of an epoch",
    ),
    *rows,
)

# %% [markdown]
# Workers that persist needn't be started, but an epoch's first batch still has to be made: the buffers are empty at its
# beginning.
#
# `prefetch_factor` is the size of a buffer. It makes nothing faster. It lets workers run ahead, so that one slow file or one
# long step does not hold up the other side. If both keep a steady pace, there is nothing to even out.

# %%
prefetches = {f"prefetch={n}": STOCK.but(num_workers=3, prefetch_factor=n) for n in (1, 2, 4)}
tags = {f"prefetch={n}": {"experiment": "prefetch", "prefetch": n} for n in (1, 2, 4)}
fitting = those_that_fit(prefetches, resolution)
buffered = compare(workload, fitting, steps, rounds, tags, warmup=1)
lab.keep(buffered)
fig, ax = plt.subplots()
plots.steps(ax, buffered)
plt.show()

# %% [markdown]
# **Takeaway.** `persistent_workers=True` costs nothing and saves one pause an epoch. That is much if your epochs are short,
# and next to nothing here. A larger `prefetch_factor` helps only with uneven data, and each batch more of it takes shared
# memory.

# %% [markdown]
# ## 5 · When shared memory runs out
#
# **Question.** The article trained in a container, whose `/dev/shm` has 64 MB by default. With 12 workers its run failed. Why
# with 12, and not with 8?
#
# A worker hands over a batch through a file in `/dev/shm`, a file system that lies in memory. One image of 512 × 512 in
# float32 takes 3 × 512 × 512 × 4 bytes = 3.1 MB, which is 3 MiB (of 2²⁰ bytes each, as memory is counted). Each worker keeps
# `prefetch_factor` batches there, and training holds one more.
#
# **Your prediction:** how many workers fit into a container with 64 MB, at 512 × 512, batch 1 and prefetch factor 2?

# %%
my_fit: float | None = None  # a whole number

lab.predict("workers that fit in 64 MB", my_fit, "workers")

# %%
small, enough = (
    64 * MIB,
    1024 * MIB,
)  # what a container's "64 MB" and "1 GB" mean: 67 and 1,074 million bytes
needed = [needed_bytes(STOCK.but(num_workers=n)) for n in WORKERS]
lab.table(
    ("workers", *map(str, WORKERS)),
    ("shared memory they need, MiB", *(n / MIB for n in needed)),
    ("fit in 64 MiB", *("yes" if n <= small else "**no**" for n in needed)),
)
fit = most_workers(small, STOCK)
lab.show(f"{fit} workers fit, with batches of {batch_bytes() / MIB:.3g} MiB; {fit + 1} don't.")

# %% [markdown]
# Now we try it. A child process gets a `/dev/shm` of its own, of 64 MB, loads images with 12 workers, and is watched. A
# second one gets 1 GB. Whatever happens to them can't reach this notebook.

# %%
sizes = {"tiny": small, "enough": enough}
with ThreadPoolExecutor() as pool:
    tried = pool.map(lambda size: try_workers(lab.cache_dir, 12, size), sizes.values())
    trials = dict(zip(sizes, tried, strict=True))
for name, trial in trials.items():
    trial.run, trial.tags["shm"] = f"shm={name}", name
lab.keep(trials);

# %%
columns = {"run": "12 workers and a /dev/shm", "shm_gb": "of, GB", "outcome": "what happened"}
columns |= {"batches": "batches that arrived", "wanted": "of", "peak_gb": "most in use, GB"}
lab.show(trials.values(), columns, experiment="shm")
said = trials["tiny"].metrics.get("message") or trials["tiny"].status
lab.show(f"What the first one said:\n```\n{said}\n```")
lab.verdict("A1.workers.shm", "A1.workers.shm-cure");

# %% [markdown]
# What the failure looks like depends on PyTorch's version. Older versions wrote into memory that was not there, and the
# worker died with *Bus error*. Today the memory is reserved first, and the worker gets an exception instead. But it gets the
# exception in a background thread, which prints it, drops the batch and goes on. The training loop then waits for a batch
# that will never come: **it hangs**, with a message far up in its output. `DataLoader(timeout=60)` turns such a silence into
# an error.
#
# | what you can type | where |
# |---|---|
# | `docker run --shm-size=1g ...` | the article's cure |
# | `sudo mount -o remount,size=8G /dev/shm` | on the machine itself |
# | fewer workers, or a smaller `prefetch_factor` | anywhere |
# | `labutils doctor` | tells how many workers fit, before you train |
#
# **Takeaway.** Before a run, work out workers × prefetch factor × bytes of a batch. And if training stands still with an idle
# GPU, scroll up and look for `shared memory`.

# %% [markdown]
# ## 6 · Pinned memory, and copies that don't wait
#
# **Question.** The article sets `pin_memory=True` and `non_blocking=True` together, and says that neither helps alone. Is that
# so?
#
# A GPU can fetch data from host memory by itself, but only from *pinned* memory, whose pages the operating system may not
# move. From ordinary, *pageable* memory the driver first copies the data into a pinned buffer of its own, and the host waits
# meanwhile. From pinned memory the host waits as well, unless it is told not to (`non_blocking`). That makes four recipes.
# Beside the step's time we measure the mechanism itself: for how long the copies of one step hold up the host.
#
# (A detail of the stock script: accelerate's loader has already moved the batch to the GPU when the loop gets it, so a
# `.to(device, non_blocking=True)` in the loop moves nothing. The copy is accelerate's, which has a setting of its own.)

# %%
def show_two_by_two(found: dict[str, Run]) -> None:
    fig, ax = plt.subplots()
    plots.steps(ax, found)
    plt.show()
    lab.table(
        ("an optimizer step", *found),
        ("step, ms", *(run.metric("step_ms") for run in found.values())),
        ("host held up by copies, ms", *(run.metric("host_copy_ms") for run in found.values())),
        ("waiting for data, ms", *(run.metric("data_ms") for run in found.values())),
    )


def show_reference(ahead: bool) -> None:
    """The four recipes as our H200 ran them."""
    theirs = lab.references(experiment="copies", ahead=ahead, again=False)
    if theirs:
        show_two_by_two({f"H200, {run.run}": run for run in theirs})


# %%
three = STOCK.but(num_workers=3)
no_copy = "a CPU trains on the memory that the data is in, so there is no copy; our H200's four runs follow"
last = {"experiment": "copies", "memory": "pinned", "copy": "async"}
with lab.attempt("Pinned memory in the stock loop", lambda: show_reference(False), **last):
    if lab.device == "cpu":
        raise Unavailable(no_copy)
    stock_loop = two_by_two(workload, three, steps, rounds)
    lab.keep(stock_loop)
    show_two_by_two(stock_loop)
lab.verdict("A1.pin.needs-both", "A1.pin.step-needs-both");

# %% [markdown]
# Look at the second row of the table first. On the H200, pinned memory shortens the time for which copies hold up the host,
# even if the copies are blocking, and `non_blocking` alone hardly does. The first row, the step itself, varies by far more
# than the few milliseconds at stake.
#
# But perhaps this loop can't use what it saves: it reads the loss in every micro-step, and so waits for the GPU anyway. We
# try the same four in a loop that never waits. It is plain PyTorch with a fused optimizer, and losses stay on the device.

# %%
ahead = three.but(driver="eager", optimizer="adamw-fused", logging="ring-buffer")
last |= {"ahead": True}
with lab.attempt("Pinned memory in a loop that runs ahead", lambda: show_reference(True), **last):
    if lab.device == "cpu":
        raise Unavailable(no_copy)
    free_loop = two_by_two(workload, ahead, steps, rounds, ahead=True)
    lab.keep(free_loop, lane="same work")
    show_two_by_two(free_loop)

# %% [markdown]
# **Takeaway.** Pinning makes the copy shorter; `non_blocking` lets the host go on meanwhile, if the memory is pinned. Whether
# the *step* notices is another question: one image has 3 MB, and at 20 GB/s they take 0.16 ms. Turn both on, since they cost
# next to nothing, and don't expect much of them in a loop like this one.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then times the two in turns, for
# as many rounds as it takes to decide.

# %%
from labutils.course.exercises import faster_than, solved

# %% [markdown]
# **1. Shared memory.** You train at 512 × 512 with micro-batches of 4, 6 workers and `prefetch_factor=4`. How many megabytes
# (10⁶ bytes) of shared memory does that need at most? And with these settings, how many workers fit into 256 MiB at most?
# Use the rule of section 5, or call the functions that it called.

# %% tags=["exercise"]
my_megabytes: float | None = None
my_most_workers: int | None = None


def check_memory(megabytes, workers) -> str:
    if megabytes is None or workers is None:
        return "Exercise 1: set my_megabytes and my_most_workers first."
    recipe = STOCK.but(micro_batch=4, num_workers=6, prefetch_factor=4)
    right = needed_bytes(recipe) / 1e6
    if abs(megabytes - right) > 0.03 * right:
        return f"Exercise 1: not yet. {megabytes} MB? 6 × 4 batches wait, and training holds one. How large is one batch?"
    if workers != most_workers(256 * MIB, recipe):
        return f"Exercise 1: not yet. The megabytes are right. Do {workers} workers fit, and would one more not?"
    return f"Exercise 1: right. {right:.0f} MB for 6 workers, and {workers} fit in 256 MiB."


print(check_memory(my_megabytes, my_most_workers))

# %% tags=["solution"]
wide = STOCK.but(micro_batch=4, num_workers=6, prefetch_factor=4)
solved(check_memory(needed_bytes(wide) / 1e6, most_workers(256 * MIB, wide)))

# %% [markdown]
# **2. A faster computation.** The next lab makes the computation much shorter. Suppose that a micro-step then takes 23 ms,
# that reading takes 80 ms, and that there are 16 cores. How many workers are needed to keep up? And how long would an
# optimizer step of four micro-steps take with 3 workers?

# %% tags=["exercise"]
my_enough: int | None = None
my_starved_ms: float | None = None


def check_starved(workers, starved_ms) -> str:
    if workers is None or starved_ms is None:
        return "Exercise 2: set my_enough and my_starved_ms first."
    faster = Pipeline(read_ms=80, compute_ms=23, cores=16)
    if workers != faster.enough_workers:
        found = (
            f"{workers} workers make a batch every {80 / workers:.3g} ms"
            if workers > 0
            else "Somebody must read"
        )
        return f"Exercise 2: not yet. {found}. Is that in time, and with as few as can be?"
    if abs(starved_ms - faster.step_ms(3)) > 1:
        return f"Exercise 2: not yet. {starved_ms} ms? How many batches do three workers make in that time?"
    return f"Exercise 2: right. It takes {workers}; with 3 a step takes {starved_ms:.0f} ms, and the GPU waits for data again."


print(check_starved(my_enough, my_starved_ms))

# %% tags=["solution"]
solved(check_starved(4, 4 * 80 / 3))

# %% [markdown]
# **3. Smaller files.** Suppose you scale all images to 512 × 512 once, and store them like that. A file then has (512/1080)²
# of the pixels to inflate, and nothing to scale. Write `smaller_files`, which takes the measured parts of section 1 and the
# pipeline of section 2, and returns the pipeline with the new time to read. (Inflating and converting are proportional to
# the pixels.) How many workers are enough now?


# %% tags=["exercise"]
def smaller_files(parts: dict[str, float], now: Pipeline) -> Pipeline | None:
    """parts: median ms of "decode", "convert", "resize", "tensor", "tokenise". Return the pipeline with smaller files."""
    return None  # your pipeline here; replace(now, read_ms=...) makes one


def check_smaller(answer) -> str:
    parts = {part: reading.metric(f"{part}_ms") for part in PARTS}
    result = answer(parts, pipeline)
    if result is None:
        return "Exercise 3: fill in smaller_files first; it returns a Pipeline."
    share = (512 / 1080) ** 2
    right = share * (parts["decode"] + parts["convert"]) + parts["tensor"] + parts["tokenise"]
    if abs(result.read_ms - right) > 1e-6 * right:
        return (
            f"Exercise 3: not yet. {result.read_ms:.3g} ms: which parts remain, and which shrink?"
        )
    if result.compute_ms != pipeline.compute_ms:
        return "Exercise 3: not yet. Computing takes as long as before."
    return (
        f"Exercise 3: right. Reading takes {result.read_ms:.3g} ms instead of {pipeline.read_ms:.3g}. Without workers a step "
        f"would take {result.step_ms(0):.4g} ms instead of {pipeline.step_ms(0):.4g}. Workers that are enough: "
        f"{result.enough_workers}."
    )


print(check_smaller(smaller_files))


# %% tags=["solution"]
def smaller_files_solution(parts: dict[str, float], now: Pipeline) -> Pipeline:
    share = (512 / 1080) ** 2
    left = share * (parts["decode"] + parts["convert"]) + parts["tensor"] + parts["tokenise"]
    return replace(now, read_ms=left)


solved(check_smaller(smaller_files_solution))

# %% [markdown]
# **4. Make it faster.** Here is what somebody does with a decoded image: turn it into numbers from -1 to 1, mirror it, and cut
# out its middle. Every one of these steps is needed. Compute the same tensor at least twice as fast.


# %% tags=["exercise"]
def transformed(image):
    """image uint8 [1080, 1080, 3] -> float32 [3, 512, 512], contiguous"""
    numbers = image.float() / 127.5 - 1
    mirrored = numbers.flip(1)
    return mirrored[284:796, 284:796].permute(2, 0, 1).contiguous()


def reordered(image):
    return transformed(image)  # your code instead


def an_image(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randint(256, (1080, 1080, 3), dtype=torch.uint8),)


print(faster_than(4, transformed, reordered, an_image, times=2))


# %% tags=["solution"]
def reordered_solution(
    image,
):  # first the pixels that remain, in one byte a number; the floats last
    middle = image[284:796, 284:796].flip(1).permute(2, 0, 1)
    return middle.float().contiguous() / 127.5 - 1


solved(faster_than(4, transformed, reordered_solution, an_image, times=2))

# %% [markdown]
# ## Where this comes from, and what to read on
# - PyTorch: the documentation of [torch.utils.data](https://docs.pytorch.org/docs/stable/data.html), on workers, prefetching
#   and pinned memory.
# - PyTorch: *[A guide on good usage of `non_blocking` and `pin_memory()` in
#   PyTorch](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html)*.
# - J. Mohan and others: *Analyzing and Mitigating Data Stalls in DNN Training*, PVLDB 14(5), 2021
#   ([arXiv:2007.06775](https://arxiv.org/abs/2007.06775)). How much training waits for data, and a way to tell by replacing
#   one part at a time.
# - Docker: the option [`--shm-size`](https://docs.docker.com/reference/cli/docker/container/run/).
# - The course's [glossary](../docs/glossary.md).

# %% [markdown]
# ## What you did
# - You took the reading of one example apart, and found where its time goes.
# - You predicted a whole curve from two short measurements, and saw where the model ends.
# - You worked out the shared memory that workers need, watched it run out without harm, and saw the cure.
# - You put a number on what `persistent_workers` and `prefetch_factor` bring, small numbers included.
# - You separated pinned memory from `non_blocking`, in a loop that waits and in one that doesn't.
#
# Next: lab 04, which makes the computation itself faster.

# %%
lab.done(
    {
        "time to read one image": read_ms,
        "fewest workers for the shortest step": best,
        "workers that fit in 64 MB": fit,
    }
)
