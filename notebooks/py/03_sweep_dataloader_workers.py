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
# In the stock loop the GPU waits while the training process reads the next image. Article A1 hands that work to worker
# processes, tries 0, 1, 2, 3, 4, 8 and 12 of them, finds three best and twelve fatal, and later adds page-locked memory
# for another 4 %. Three is a number that belongs to its machine. This lab looks for the rule behind it: you predict the
# whole curve from two short measurements, and only then measure it.
#
# **After this lab you can**
# - say what reading one training example consists of, and what each part costs;
# - predict a step's time with any number of workers from read time, compute time and cores, and know what that leaves out;
# - work out how much shared memory workers need, recognise what it looks like when it runs out, and cure it;
# - say what `persistent_workers` and `prefetch_factor` are for, and when they do nothing;
# - say what pinned memory and `non_blocking` do for a copy, and why a loop may not notice.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1½ minutes |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 40 GB | 7 minutes |
#
# Images are PNG files of 1080 × 1080 pixels at every scale; the model and the resolution it sees shrink. Without a GPU,
# training and workers share the same cores, which moves the optimum, and there is no copy to be pinned.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 3 at larger scales
rounds: int = 0  # times round all recipes; 0: 1 at tiny, 2 at larger scales

# %%
from labutils.course import NotHere, open_lab

lab = open_lab("03", globals())

# %%
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import torch

from labutils import plots
from labutils.data.images import EPOCH, PARTS, decode_ms
from labutils.data.sharedmemory import batch_bytes, most_workers, needed_bytes, those_that_fit, try_workers
from labutils.data.throughput import Pipeline, epoch_start_ms, hand_over_ms, off_the_model
from labutils.hardware import usable_cores
from labutils.pinning import two_by_two
from labutils.recipe import STOCK
from labutils.results import Run, summarise
from labutils.training import compare, train

# %%
plots.use_style()
warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
warnings.filterwarnings("ignore", message="IProgress not found")  # plain progress bars survive batch runs
steps, rounds = steps or (2 if lab.scale == "tiny" else 3), rounds or (1 if lab.scale == "tiny" else 2)
MIB = 2**20
if lab.device == "cpu":
    torch.set_num_threads(max(1, usable_cores() // 2))  # one half trains, the other is left to the workers

# %% [markdown]
# ## 1 · What reading one example costs
#
# **Question.** A worker's job is to turn a file and a caption into two tensors. How long does that take, and what takes
# the time?
#
# The stock script opens a PNG of about 1.3 MB, inflates it to 3.5 MB of pixels, scales these to the training resolution
# with a Lanczos filter, turns them into float32 between −1 and 1, and looks the caption's pieces up in a vocabulary.
#
# **Your prediction:** how many milliseconds does all that take for one image, on one core?

# %%
my_read_ms: float | None = None  # for example 20

lab.predict("time to read one image", my_read_ms, "ms")

# %%
workload = lab.workload("sd15-lora")
examples = workload.dataset(None, STOCK)
reading = decode_ms(examples, 16)
read_ms = median(reading["all"])
reading_run = Run("03", "reading", metrics={f"{part}_ms": summarise(reading[part]) for part in reading})
lab.keep(reading_run);

# %%
names = {
    "decode": "inflate the PNG",
    "convert": "to RGB",
    "resize": "scale",
    "tensor": "to float32",
    "tokenise": "tokenise",
}
bars = {"this machine": {names[part]: median(reading[part]) for part in PARTS}}
if theirs := lab.reference("reading"):
    bars["H200's host (full)"] = {names[part]: theirs.metric(f"{part}_ms") for part in PARTS}
fig, ax = plt.subplots()
plots.breakdown(ax, bars)
plt.show()

# %% [markdown]
# **Takeaway.** Most of a read is inflating the PNG: work for one core that no GPU helps with, and the same for every
# training resolution. What you keep on the disk decides what you pay in every epoch. (Exercise 2 comes back to this.)

# %% [markdown]
# ## 2 · A prediction before the measurement
#
# **Question.** Can the whole curve be known from what happens without any worker?
#
# Let $r$ be the time to read a micro-batch and $c$ the time to compute on it. Without workers one follows the other,
# $r + c$. With $w$ workers they overlap and the slower one sets the pace; and where cores are few, all processor time of
# a step must fit on them:
#
# $$t(0) = r + c, \qquad t(w) = \max\left(c,\; \frac{r}{w},\; \frac{r + c}{\text{cores}}\right)$$
#
# Two short measurements give what is missing: a few stock steps without workers for $c$ (their time less the wait for
# data), and what it costs training to take a finished batch from a worker, which adds to $c$.

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
# The formula is a bound. A small simulation of the queue (`Pipeline.simulated_ms`: prefetching, batches handed over in
# order, running threads sharing the cores evenly) shows how closely a real queue can come to it.
#
# **Your prediction:** what is the fewest workers with which your step is as short as it gets?

# %%
my_workers: float | None = None  # 0 to 12

lab.predict("fewest workers for the shortest step", my_workers, "workers")

# %%
WORKERS = (0, 1, 2, 3, 4, 8, 12)
predicted = {n: pipeline.simulated_ms(n) for n in range(13)}
lab.table(
    ("workers", *map(str, WORKERS)),
    ("the formula, ms a step", *(pipeline.step_ms(n) for n in WORKERS)),
    ("the simulated queue, ms a step", *(predicted[n] for n in WORKERS)),
)
lab.show(
    f"With cores to spare, workers needed to keep up: **{pipeline.enough_workers}**. Each micro-batch takes "
    f"{pipeline.read_ms:.3g} ms to read and {pipeline.busy_ms:.3g} ms to train on."
)

# %% [markdown]
# **Takeaway.** The number of workers that is enough is read time over compute time, rounded up. It grows when you make
# the computation faster, which is what the next lab does: the answer you find here does not stay the answer.

# %% [markdown]
# ## 3 · The sweep
#
# **Question.** What does the real loop say?
#
# All seven recipes train in this process, round after round, so that whatever drifts drifts for all. Before the timed
# steps of a round each uses up the batches that its workers had made while others trained: they would look like a gain.
# First a look at the shared memory, which section 5 is about: workers that don't fit in it would not fail but hang.

# %%
resolution = workload.size.resolution
sweep = {f"workers={n}": STOCK.but(num_workers=n) for n in WORKERS}
fitting = those_that_fit(sweep, resolution)
runs = compare(workload, fitting, steps=steps, rounds=rounds, warmup=1)
too_large = "skipped: it does not fit in /dev/shm beside the others (docker run --shm-size=1g)"
runs |= {name: Run("03", name, status=too_large) for name in sweep.keys() - fitting.keys()}
lab.keep(runs);

# %% [markdown]
# The article's times are of another machine and of its own "step", so its curve is drawn to our scale: its 290 ms without
# workers are laid on our own time without workers. The wide line is the simulated queue of section 2.

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
lab.table(
    ("workers", *map(str, WORKERS)),
    ("article, ms", *ARTICLE.values()),
    ("measured here, ms", *measured.values()),
    ("simulated, ms", *(predicted[n] for n in WORKERS)),
    ("waiting for data here, ms", *(runs[f"workers={n}"].metric("data_ms") for n in WORKERS)),
)
lab.verdict("A1.workers.one", "A1.workers.three", "A1.workers.shape", "A1.workers.data-time");

# %%
known = {n: runs[f"workers={n}"].metrics["step_ms"] for n in WORKERS if measured[n]}
off = off_the_model(known, predicted)
lab.table(
    ("against the simulated queue, by more than p10-p90", "workers"),
    ("slower than it", ", ".join(map(str, off["above"])) or "none"),
    ("faster than it", ", ".join(map(str, off["below"])) or "none"),
)

# %% [markdown]
# Three ways to be off, and what each says:
#
# - **Without workers** there is no queue. The model's value there is the two short measurements of section 2, put together
#   again: a point off it means that the machine has changed since, and then all the other points are off for that reason
#   first.
# - **Slower** than the model with workers: something takes time that the model does not know. Processes compete for memory
#   bandwidth and caches, an operating system does not share cores evenly, workers hold up the training process whenever
#   they wake.
# - **Faster**: no queue beats the model with the same $r$ and $c$, so one of the two was measured too long. Another
#   program, or a processor that had not yet raised its clock, is enough. Run section 2 once more.
#
# The formula alone has no way to rise again to the right. The article's curve does, by a quarter from 3 to 8 workers, and
# contention is its guess; see what yours does.

# %%
fastest = min(known.values(), key=lambda spread: spread["median"])
best = min(n for n, spread in known.items() if spread["p10"] <= fastest["p90"])
lab.show(f"The fewest workers whose p10-p90 range meets that of the fastest: **{best}**.")
if best == 0:
    lab.show(
        "That is, none: no number of workers shortens the step by more than it varies from one to the next. Either other "
        "programs were using the machine meanwhile, or training and workers share too few cores."
    )
lab.verdict("A1.workers.optimum", "A1.workers.more-is-worse");

# %% [markdown]
# **Takeaway.** From *enough* on, the curve is flat as long as there are cores, and an optimum on a plateau is noise: ask
# whether the spread can tell its neighbours apart before you report it. What does not come back with more workers is the
# computation itself.

# %% [markdown]
# ## 4 · Starting workers, and keeping batches ready
#
# **Question.** Two more knobs belong to the workers. By default they are started anew every epoch
# (`persistent_workers=False`), and each keeps two batches ready (`prefetch_factor=2`). Is either worth a change?
#
# Starting a worker forks the training process; then the first batch has to be read while training waits. The cost comes
# once an epoch, and the real dataset has 1221 examples, 305 optimizer steps.

# %%
starts = {}
for workers in (1, 3):
    for kept in (False, True):
        starts[workers, kept] = epoch_start_ms(examples, STOCK.but(num_workers=workers, persistent_workers=kept), 3)
restart = Run("03", "persistent", recipe=STOCK.but(num_workers=3).as_dict())
restart.samples = {"epoch_start_ms": starts[3, False], "epoch_start_persistent_ms": starts[3, True]}
restart.metrics = {name: summarise(samples) for name, samples in restart.samples.items()} | {"epoch_steps": EPOCH // 4}
lab.keep(restart);

# %%
epoch_ms = EPOCH // 4 * (measured.get(3) or predicted[3])
rows = []
for workers in (1, 3):
    anew, kept = median(starts[workers, False]), median(starts[workers, True])
    rows.append((workers, anew, kept, f"{(anew - kept) / epoch_ms:.2%}"))
lab.table(("workers", "first batch of an epoch, ms", "with persistent workers, ms", "saved, share of an epoch"), *rows)

# %% [markdown]
# `prefetch_factor` is a buffer. It can't make anything faster; it lets workers run ahead, so that one slow file or one
# long step does not stop the other side. Where both keep a steady pace there is nothing for it to even out.

# %%
prefetches = {f"prefetch={n}": STOCK.but(num_workers=3, prefetch_factor=n) for n in (1, 2, 4)}
buffered = compare(workload, those_that_fit(prefetches, resolution), steps=steps, rounds=rounds, warmup=1)
lab.keep(buffered)
fig, ax = plt.subplots()
plots.steps(ax, buffered)
plt.show()

# %% [markdown]
# **Takeaway.** `persistent_workers=True` costs nothing and saves a pause an epoch: much if your epochs are short, next to
# nothing here. A larger `prefetch_factor` helps with uneven data only, and is paid in shared memory, batch by batch.

# %% [markdown]
# ## 5 · When shared memory runs out
#
# **Question.** The article's run with 12 workers failed, in a container whose `/dev/shm` has the default 64 MB. Why 12, and
# not 8?
#
# A worker hands a batch over through a file in `/dev/shm`, which is memory. One image of 512 × 512 in float32 takes
# 3 × 512 × 512 × 4 bytes = 3.1 MB, which is 3 MiB (of 2²⁰ bytes, as memory is counted). Each worker keeps
# `prefetch_factor` batches there, and training holds one.
#
# **Your prediction:** how many workers can a container with 64 MB feed, at 512 × 512, batch 1, prefetch factor 2?

# %%
my_fit: float | None = None  # a whole number

lab.predict("workers that fit in 64 MB", my_fit, "workers")

# %%
small, enough = 64 * MIB, 1024 * MIB  # what a container's "64 MB" and "1 GB" mean: 67 and 1,074 million bytes
needed = [needed_bytes(STOCK.but(num_workers=n)) for n in WORKERS]
lab.table(
    ("workers", *map(str, WORKERS)),
    ("shared memory they need, MiB", *(n / MIB for n in needed)),
    ("fit in 64 MiB", *("yes" if n <= small else "**no**" for n in needed)),
)
fit = most_workers(small, STOCK)
lab.show(f"{fit} workers fit, with batches of {batch_bytes() / MIB:.3g} MiB; {fit + 1} don't.")

# %% [markdown]
# Now for real. A child process gets a `/dev/shm` of its own, of 64 MB, loads with 12 workers, and is watched; a second one
# gets 1 GB. Nothing that happens to them can reach this notebook.

# %%
sizes = {"shm=tiny": small, "shm=enough": enough}
with ThreadPoolExecutor() as pool:
    trials = dict(zip(sizes, pool.map(lambda size: try_workers(lab.cache_dir, 12, size), sizes.values()), strict=True))
for name, trial in trials.items():
    status = f"skipped: {trial.message}" if trial.outcome == "not possible" else "ok"
    lab.keep(Run("03", name, status=status, metrics=trial.metrics()))

# %%
rows = []
for t in trials.values():
    rows.append((f"{t.shm_bytes // MIB:,} MiB", t.outcome, f"{t.batches} of {t.wanted}", t.peak_bytes / MIB))
lab.table(("12 workers and a /dev/shm of", "what happened", "batches that arrived", "most of it in use, MiB"), *rows)
lab.show(f"What the first one said:\n```\n{trials['shm=tiny'].message or 'nothing'}\n```")
lab.verdict("A1.workers.shm", "A1.workers.shm-cure");

# %% [markdown]
# Two things about this failure have changed with PyTorch's versions. Older ones wrote into memory that was not there, and
# the worker died with *Bus error*; today the memory is reserved first, and the worker gets an exception. But it gets it in
# a background thread, prints it, drops the batch, and goes on. The training loop then waits for a batch that nobody will
# bring: **it hangs**, with a message far up in its output. `DataLoader(timeout=60)` turns the silence into an error.
#
# | what you can type | where |
# |---|---|
# | `docker run --shm-size=1g ...` | the article's cure |
# | `sudo mount -o remount,size=8G /dev/shm` | on the machine itself |
# | fewer workers, or a smaller `prefetch_factor` | anywhere |
# | `labutils doctor` | tells how many workers fit, before you train |
#
# **Takeaway.** Workers × prefetch factor × batch size in bytes: work it out before the run. When training stands still and
# the GPU is idle, scroll up and look for `shared memory`.

# %% [markdown]
# ## 6 · Pinned memory, and copies that don't wait
#
# **Question.** The article sets `pin_memory=True` and `non_blocking=True` together and says that neither helps alone. Four
# recipes can tell.
#
# A GPU fetches from host memory by itself only if the pages can't move: if they are *pinned*. From ordinary, *pageable*
# memory the driver first copies into a pinned buffer of its own, while the host waits. And a copy from pinned memory
# still makes the host wait, unless it is asked not to (`non_blocking`). Besides the step's time we therefore look at the
# mechanism: how long the host is held by the copies of one step.
#
# A detail of the stock script: accelerate's loader has already moved the batch to the GPU when the loop sees it, so that
# a `.to(device, non_blocking=True)` in the loop moves nothing. The copy is accelerate's, and it has a setting of its own.

# %%
def show_two_by_two(found: dict[str, Run]) -> None:
    fig, ax = plt.subplots()
    plots.steps(ax, found)
    plt.show()
    lab.table(
        ("an optimizer step", *found),
        ("step, ms", *(run.metric("step_ms") for run in found.values())),
        ("host held by its copies, ms", *(run.metric("host_copy_ms") for run in found.values())),
        ("waiting for data, ms", *(run.metric("data_ms") for run in found.values())),
    )


# %%
three = STOCK.but(num_workers=3)
no_copy = "a CPU trains on the memory that the data is in, so there is no copy to be pinned; a GPU has one"
with lab.attempt("Pinned memory in the stock loop", reference="pinned+async"):
    if lab.device == "cpu":
        raise NotHere(no_copy)
    stock_loop = two_by_two(workload, three, steps, rounds)
    lab.keep(stock_loop)
    show_two_by_two(stock_loop)
lab.verdict("A1.pin.needs-both", "A1.pin.step-needs-both");

# %% [markdown]
# The stock loop reads the loss on the host in every micro-step, so that it waits for the GPU anyway, and a host that is
# free a few milliseconds earlier has nothing to do with them. The same four once more in a loop that never waits: plain
# PyTorch, a fused optimizer, losses kept on the device. Now the host is ahead of the GPU when it comes to the copy.

# %%
ahead = three.but(driver="eager", optimizer="adamw-fused", logging="ring-buffer")
with lab.attempt("Pinned memory in a loop that runs ahead", reference="ahead: pinned+async"):
    if lab.device == "cpu":
        raise NotHere(no_copy)
    free_loop = two_by_two(workload, ahead, steps, rounds, prefix="ahead: ")
    lab.keep(free_loop, lane="same work")
    show_two_by_two(free_loop)

# %% [markdown]
# **Takeaway.** Pinning makes the copy itself shorter; `non_blocking` lets the host go on meanwhile, and has nothing to let
# go of unless the memory is pinned. Whether the *step* notices depends on the loop around it: 3 MB at 20 GB/s take 0.16
# ms, and a loop that stops for the GPU anyway can't use what it saves.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
from labutils.exercises import faster_than, solved

# %% [markdown]
# **1.** You train with micro-batches of 4, 6 workers and `prefetch_factor=4`, at 512 × 512. How many megabytes (10⁶ bytes)
# of shared memory does that need at most? And what is the largest number of workers that fits in 256 MiB with these
# settings? Use the section's rule, or call what it called.

# %% tags=["exercise"]
my_megabytes: float | None = None
my_most_workers: int | None = None


def check_memory(megabytes, workers) -> str:
    if megabytes is None or workers is None:
        return "Exercise 1: set my_megabytes and my_most_workers first."
    recipe = STOCK.but(micro_batch=4, num_workers=6, prefetch_factor=4)
    right = needed_bytes(recipe) / 1e6
    if abs(megabytes - right) > 0.03 * right:
        return f"Exercise 1: not yet. {megabytes} MB: 6 × 4 batches wait, training holds one. How large is one?"
    if workers != most_workers(256 * MIB, recipe):
        return f"Exercise 1: not yet. {workers} workers: does one more fit? Do they fit themselves?"
    return f"Exercise 1: right. {right:.0f} MB for 6 workers, and {workers} fit in 256 MiB."


print(check_memory(my_megabytes, my_most_workers))

# %% tags=["solution"]
wide = STOCK.but(micro_batch=4, num_workers=6, prefetch_factor=4)
solved(check_memory(needed_bytes(wide) / 1e6, most_workers(256 * MIB, wide)))

# %% [markdown]
# **2.** The next lab makes the computation much shorter. Suppose that a micro-step takes 23 ms, reading takes 80 ms, and 16
# cores are there. How many workers are needed to keep up, and what would an optimizer step of four micro-steps take with
# 3 workers instead?

# %% tags=["exercise"]
my_enough: int | None = None
my_starved_ms: float | None = None


def check_starved(workers, starved_ms) -> str:
    if workers is None or starved_ms is None:
        return "Exercise 2: set my_enough and my_starved_ms first."
    faster = Pipeline(read_ms=80, compute_ms=23, cores=16)
    if workers != faster.enough_workers:
        found = f"{workers} workers make a batch every {80 / workers:.3g} ms" if workers > 0 else "Somebody must read"
        return f"Exercise 2: not yet. {found}. Is that in time, and with as few as can be?"
    if abs(starved_ms - faster.step_ms(3)) > 1:
        return f"Exercise 2: not yet. {starved_ms} ms: how many batches do three workers make in that time?"
    return f"Exercise 2: right. {workers} workers; with 3 a step takes {starved_ms:.0f} ms, and the GPU waits for data again."


print(check_starved(my_enough, my_starved_ms))

# %% tags=["solution"]
solved(check_starved(4, 4 * 80 / 3))

# %% [markdown]
# **3.** Suppose you scale all images to 512 × 512 once and store them so: a file then has (512/1080)² of the pixels to
# inflate and none to scale. Write `smaller_files`: the pipeline of section 2 with the read time that this leaves, from the
# measured parts of section 1 (take inflating and converting as proportional to the pixels). How many workers are enough now?


# %% tags=["exercise"]
def smaller_files(parts: dict[str, float], now: Pipeline) -> Pipeline | None:
    """parts: median ms of "decode", "convert", "resize", "tensor", "tokenise". Return the pipeline with smaller files."""
    return None  # your pipeline here; replace(now, read_ms=...) makes one


def check_smaller(answer) -> str:
    parts = {part: median(reading[part]) for part in PARTS}
    result = answer(parts, pipeline)
    if result is None:
        return "Exercise 3: fill in smaller_files first; it returns a Pipeline."
    share = (512 / 1080) ** 2
    right = share * (parts["decode"] + parts["convert"]) + parts["tensor"] + parts["tokenise"]
    if abs(result.read_ms - right) > 1e-6 * right:
        return f"Exercise 3: not yet. {result.read_ms:.3g} ms: which parts remain, and which shrink?"
    if result.compute_ms != pipeline.compute_ms:
        return "Exercise 3: not yet. Computing takes as long as before."
    return (
        f"Exercise 3: right. {result.read_ms:.3g} ms instead of {pipeline.read_ms:.3g} to read one. Without workers a step "
        f"would take {result.step_ms(0):.4g} ms instead of {pipeline.step_ms(0):.4g}; {result.enough_workers} worker(s) "
        "would be enough."
    )


print(check_smaller(smaller_files))


# %% tags=["solution"]
def smaller_files_solution(parts: dict[str, float], now: Pipeline) -> Pipeline:
    share = (512 / 1080) ** 2
    left = share * (parts["decode"] + parts["convert"]) + parts["tensor"] + parts["tokenise"]
    return replace(now, read_ms=left)


solved(check_smaller(smaller_files_solution))

# %% [markdown]
# **4. Make it faster.** What comes after decoding, by somebody's `transforms`: the image in numbers from -1 to 1, mirrored,
# and its middle cut out. Not one of these steps need be left out: get the same tensor twice as fast.


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
def reordered_solution(image):  # first the pixels that remain, in one byte a number; the floats last
    middle = image[284:796, 284:796].flip(1).permute(2, 0, 1)
    return middle.float().contiguous() / 127.5 - 1


solved(faster_than(4, transformed, reordered_solution, an_image, times=2))

# %% [markdown]
# ## What you did
# - You took the reading of one example apart, and found where its time goes.
# - You predicted a whole curve from two short measurements, and saw where the model ends.
# - You worked out the shared memory that workers need, saw it run out without harm, and saw the cure.
# - You put a number on what `persistent_workers` and `prefetch_factor` bring, small numbers included.
# - You separated pinned memory from `non_blocking`, in a loop that waits and in one that doesn't.

# %%
lab.done(
    {
        "time to read one image": read_ms,
        "fewest workers for the shortest step": best,
        "workers that fit in 64 MB": fit,
    }
)
