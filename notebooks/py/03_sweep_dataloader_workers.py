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
# processes*. It tries 0, 1, 2, 3, 4, 8 and 12 of them. Three are best, and twelve crash. But three is the right number for
# one machine. In this lab you find the rule behind it.
#
# **After this lab you can**
# - write a Dataset and a DataLoader with workers, and say what reading one example costs;
# - predict a step's time with any number of workers from two measured times;
# - say when persistent workers and a deeper queue gain something;
# - work out how much shared memory workers need, and recognise what happens when it runs out;
# - copy a batch to the GPU without making the host wait, and say how much a step can gain from it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU with two cores | ½ minute |
# | `small` | a GPU of 8 GB | 2 minutes |
# | `full` | a GPU of 40 GB | 4 minutes |
#
# Every scale reads the same 1080 × 1080 PNG files; the model and its input shrink. Without a GPU, training and workers share the
# cores.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 3 at tiny, 1 at larger scales
rounds: int = 0  # times round all recipes; 0: 1 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("03", globals())

# %%
import math
import time
import warnings
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from labutils.course import plots
from labutils.data.images import captioned_images
from labutils.data.tokenizers import clip_tokenizer
from labutils.labs.lab03_shared_memory import needed_bytes, try_workers
from labutils.labs.lab03_sweep import sweep
from labutils.profiling.dataloader_model import Pipeline
from labutils.profiling.machine import usable_cores
from labutils.recipe import STOCK
from labutils.results.effects import time_effect
from labutils.results.records import Run, summarise
from labutils.training import Benchmark

plots.use_style()
warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores
if lab.device == "cpu":
    torch.set_num_threads(1)  # training gets one core; the others are left to the workers

# %% [markdown]
# ## 1 · What reading one example costs
#
# **Question.** A training example is a file and a caption until somebody makes tensors of them. How long does that take, and
# which part takes longest?
#
# **Technique.** A `Dataset` says how many examples there are, and makes one when asked. This one does what the public script
# does. It opens a PNG file of 1.3 MB, inflates it to 3.5 MB of pixels, scales them, maps them to −1 to 1, and looks up the
# caption's pieces in a vocabulary.


# %%
class Captioned(Dataset):
    """Images with captions, made into tensors when somebody asks for one."""

    def __init__(self, pairs, tokenizer, resolution):
        self.pairs, self.tokenizer, self.resolution = pairs, tokenizer, resolution

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        pair = self.pairs[index]  # opens the file and inflates it
        size = (self.resolution, self.resolution)
        image = pair["image"].convert("RGB").resize(size, Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        words = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(pair["text"], **words).input_ids[0]
        return {"pixel_values": pixels / 127.5 - 1, "input_ids": ids}


# %% [markdown]
# `Image.open(path)` would do for `pair["image"]`; here the library *datasets* calls it. The course's own dataset, which the
# real loop trains on below, gives the same tensors:

# %%
workload = lab.workload("sd15-lora")
examples = workload.dataset(None, STOCK)
pairs = captioned_images(lab.cache_dir, workload.size.images, lab.data)
mine = Captioned(
    pairs, clip_tokenizer(lab.weights, lab.cache_dir / "hub"), workload.size.resolution
)
if lab.data == "generated":  # all of them square; the script crops what isn't
    for name, tensor in mine[0].items():
        torch.testing.assert_close(tensor, examples[0][name])

# %% [markdown]
# **Prediction.** How many milliseconds does one core need for one example?

# %%
my_read_ms: float | None = None  # for example 20

lab.predict("time to read one example", my_read_ms, "ms")


# %%
def median_ms(call, times=12):
    """Median milliseconds of call(0), call(1), and so on."""
    taken = []
    for index in range(times):
        began = time.perf_counter()
        call(index)
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


image, size = pairs[0]["image"].convert("RGB"), (workload.size.resolution,) * 2
parts = {
    "all_ms": median_ms(lambda index: mine[index]),
    "decode_ms": median_ms(lambda index: pairs[index]),
    "resize_ms": median_ms(lambda index: image.resize(size, Image.Resampling.LANCZOS)),
}
reading = lab.keep(Run("03", "reading", tags={"experiment": "reading"}, metrics=parts))
lab.show([reading], ("all_ms", "decode_ms", "resize_ms"), experiment="reading")

# %% [markdown]
# On our H200 the parts take 61 ms together, 13 % more than the whole read.
#
# **Takeaway.** Most of a read is inflating the PNG, work for one core. It comes before scaling, so it should not depend on
# the training resolution; we measured one. A set stored at 512 × 512 has (512/1080)² = 0.22 of the pixels to inflate, and
# none to scale.

# %% [markdown]
# ## 2 · A formula for the step
#
# **Question.** Can you tell how long a step takes with three workers, or eight, without trying?
#
# **Technique.** With `num_workers=0` the loop reads, then computes. With workers, other processes read, and the loop takes
# finished batches from a queue.


# %%
def loop_ms(workers, compute_ms):
    """Milliseconds a batch of a loop that takes one and computes for so long."""
    loader = DataLoader(
        Subset(mine, range(16)),
        batch_size=1,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=2 if workers else None,  # batches that each worker holds ready
        multiprocessing_context="fork" if workers else None,
    )
    batches = iter(loader)
    next(batches)  # here the workers start
    began = time.perf_counter()
    for _batch in batches:
        time.sleep(compute_ms / 1e3)  # stands for the GPU's work
    return 1e3 * (time.perf_counter() - began) / (len(loader) - 1)


# %% [markdown]
# Workers are started by *fork* here: they are copies of this process, and know the class above. Where they start afresh
# (`spawn`, on Windows and macOS), they must import the class from a file.
#
# Let $r$ be the time to read a batch, and $c$ the time to compute on it. Without workers the two add up, if your loop, like the
# stock one, waits for the GPU each time. With $w$ workers they overlap, and the slower one sets the pace: the computation, or the
# workers, who together finish a batch every $r/w$. The cores limit all of it: if computing fills a core, too, a batch takes at
# least $(r + c)/k$ on $k$ cores.


# %%
def batch_ms(workers, read, compute, cores=math.inf):
    if workers == 0:
        return read + compute
    return max(compute, read / workers, (read + compute) / cores)


read_ms = parts["all_ms"]
for workers in (0, 1, 2):
    formula = batch_ms(workers, read_ms, read_ms / 2)  # a sleep needs no core: cores are left out
    print(f"{workers} workers: {loop_ms(workers, read_ms / 2):.0f} ms, formula {formula:.0f}")
assert all(4 * batch_ms(w, 44, 97, 16) == Pipeline(44, 97, 16).step_ms(w) for w in range(13))

# %% [markdown]
# On our H200 the times are 9 to 18 % above the formula. Four things can cause that, without workers only the first. Reading may be
# slower than when timed alone. At two workers $r/w$ and $c$ are equal here, and a real queue of uneven batches then takes longer
# than either. Workers may slow each other down. Taking a ready batch costs time, too.
#
# Now fit it to the article. Two of its numbers give both: $c$ is its best step, 141 ms. Without workers a step takes
# $r + c = 290$ ms, so $r = 149$ ms.

# %%
ARTICLE = {0: 290, 1: 156, 2: 144, 3: 141, 4: 148, 8: 178}
lab.table(
    ("workers", *map(str, ARTICLE)),
    ("article, ms", *ARTICLE.values()),
    ("formula, ms", *(batch_ms(workers, 149, 141) for workers in ARTICLE)),
)

# %% [markdown]
# The formula is fitted to two of these times. It gives the others within 5 %, except at eight workers. At one worker $r/w$ and
# $c$ are nearly equal, as above. By the formula two workers are enough for the article; its third gained 3 ms. Nothing in the
# formula rises to the right: it can't explain eight.
#
# And this machine? A few steps of the real loop without workers give both numbers: the host's wait for data is $r$, the rest
# is $c$.

# %%
bench = Benchmark(workload, warmup=1)
probe = bench.compare({"workers=0": STOCK}, steps=3, rounds=1)["workers=0"]
r = probe.metric("data_ms") / STOCK.accumulation
c = probe.metric("step_ms") / STOCK.accumulation - r
print(f"One micro-batch here: r = {r:.0f} ms, c = {c:.0f} ms, {usable_cores()} cores.")

# %% [markdown]
# **Prediction.** How many times as fast is a step with three workers as one without? The formula's answer is `batch_ms(0, r, c)
# / batch_ms(3, r, c, usable_cores())`.

# %%
my_speedup: float | None = None  # for example 1.5

lab.predict("speed-up with three workers", my_speedup, "x")

# %% [markdown]
# **Takeaway.** $r/c$ workers, rounded up, are enough, if there are cores. A faster computation can raise the number.

# %% [markdown]
# ## 3 · The sweep
#
# **Question.** Does the real loop follow the formula?
#
# **Measurement.** A step is now four micro-batches; the article's 290 ms are one. The course's loop (`labutils/training/step.py`)
# takes one step with each number of workers in each round. A round gives one ratio, and the speed-up is the median of these ratios.
# So it can differ from the quotient of two times in the table. The workers that wait their turn fill their queues. Those batches
# are taken before the clock starts. The verdict asks for 0.56: three quarters of the article's gain. Zero workers come twice in a
# round: the difference between the two is noise. Where the interval of that noise reaches beyond ±3 %, the table says *unsteady
# machine*. Then no verdict is drawn from a time, however clear a speed-up looks. Sections 4 and 6 time other loops by hand. Their
# verdicts borrow this loop's noise, as a stand-in.

# %%
WORKERS = (0, 1, 3) if lab.scale == "tiny" else tuple(ARTICLE)
at_least = (3, 1) if lab.scale == "tiny" else (1, 8)
runs = lab.keep(sweep(bench, WORKERS, steps or at_least[0], rounds or at_least[1]))
bench.close()
swept = [runs[f"workers={n}"] for n in WORKERS] + [runs["workers=0 again"]]
lab.show(swept, ("step_ms", "speed-up", "data_ms"), experiment="workers")

# %% [markdown]
# The picture has $r$ and $c$ of the same rounds: the host's speed changes from minute to minute. A bar spans the 10th to the
# 90th percentile. The article's curve is scaled to start where yours does.

# %%
alone = runs["workers=0"]
r = alone.metric("data_ms") / STOCK.accumulation
c = alone.metric("step_ms") / STOCK.accumulation - r
four = STOCK.accumulation
formula = {w: four * batch_ms(w, r, c, usable_cores()) for w in range(max(WORKERS) + 1)}
scaled = {w: ms / ARTICLE[0] * alone.metric("step_ms") for w, ms in ARTICLE.items() if w in WORKERS}
fig, ax = plt.subplots()
plots.sweep(
    ax,
    WORKERS,
    swept[: len(WORKERS)],
    scaled,
    formula,
    "workers",
    published_label="article, scaled",
)
plt.show()

# %%
lab.verdict("A1.workers.three", "A1.workers.data-time", "A1.workers.more-is-worse")

# %% [markdown]
# How to read this:
#
# - **At no workers:** the formula passes through the point, because $r$ and $c$ come from it.
# - **Above the line:** processes may compete for memory bandwidth and cores, and taking a batch from a worker is not free.
# - **Below the line:** the line stands on one noisy median, the one without workers. On our H200 it ends at 602 ms. Drawn from
#   *workers 0, again*, it would end at about 548.
# - **The best number:** compare two of them by the ratios within rounds, as `time_effect(runs["workers=1"], runs["workers=8"])`
#   does. That call gave for our H200: two workers took 10 % less time than one (3 to 13 %), and eight 7 % less (0 to 21 %). The
#   noise is −9 to +8 %. Both intervals reach into it, so neither difference is established. One is enough by the formula. Keep a
#   second if it gains in your rounds, too: it costs 6 MiB (section 5). One probably beats none: the wait for data fell from 268 to
#   17 ms.
#
# On our H200 the formula says 602 ms from one worker on. Measured were 634 to 566, from 5 % more to 6 % less. That is within the
# noise, which is so large that the formula could hardly have failed: this test is weak. By the formula no number of workers takes
# the step below $c/(r+c)$, here 0.69. The article's is 0.49, as its $r$ is as large as its $c$. The wait fell from 268 to 17 ms,
# and stayed there. The rest of the step should stay the same. It was 602 ms without workers and 561 with three. But without
# workers, *again*, it was about 548, so noise alone can explain the difference. In the loop a read took 61 to 67 ms, alone 54.
#
# Workers shorten the wait, not the computation. Where $r$ is less than $c$, as beside our H200, one worker is enough by the
# formula. What remains is $c$. Lab 04 looks at what it consists of. $r$ and $c$ both belong to the host: measure both on yours.
#
# **Takeaway.** Take the fewest workers with $r/w \le c$. On our H200 one probably removes nearly all of the wait. What is left
# to gain lies in $c$.

# %% [markdown]
# ## 4 · The start of an epoch, and the depth of the queue
#
# **Question.** By default workers start anew in each epoch (`persistent_workers=False`), and each holds two batches ready
# (`prefetch_factor=2`). Is either worth changing?
#
# **Technique.** The time from the start of an epoch to its first batch, both ways:


# %%
def epoch_starts_ms(persistent, epochs=5):
    """Milliseconds to the first batch of each epoch but the first."""
    few = Subset(mine, range(2))  # a batch for each worker
    loader = DataLoader(
        few, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    taken = []
    for _ in range(epochs):
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        taken.append(1e3 * (time.perf_counter() - began))
        for _batch in batches:
            pass  # the epoch's rest
    return taken[1:]


for workers_are, persistent in {"started anew": False, "persistent": True}.items():
    taken = epoch_starts_ms(persistent)
    start = Run("03", workers_are, tags={"experiment": "epoch start", "workers": workers_are})
    start.samples, start.metrics = {"start_ms": taken}, {"start_ms": summarise(taken)}
    lab.keep(start)
    print(f"{workers_are}: {median(taken):.0f} ms to an epoch's first batch")
lab.verdict("A4.pytorch.persistent")

# %% [markdown]
# On our H200 persistent workers probably saved some 70 ms. The other 82 ms contain one read: elsewhere in this lab it took 54 to
# 67 ms. In the article's epoch of nearly three minutes, 1,221 micro-steps of 141 ms, 70 ms are nothing. In an epoch of one
# second they are a lot.
#
# Now the queue. It makes nothing faster, but evens out. Here every eighth file is slow. On average reading is fast enough:
# 13.5 ms a batch, where computing takes 15.


# %%
class Uneven(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(0.08 if index % 8 == 7 else 0.004)  # a slow disk, now and then
        return index


def epoch_s(prefetch):
    options = {"prefetch_factor": prefetch, "multiprocessing_context": "fork"}
    began = time.perf_counter()
    for _batch in DataLoader(Uneven(), num_workers=1, **options):
        time.sleep(0.015)  # the GPU's work
    return time.perf_counter() - began


for prefetch in (1, 2, 8):
    print(f"prefetch_factor={prefetch}: {epoch_s(prefetch):.2f} s; computing alone 0.48 s")

# %% [markdown]
# Eight batches bridge one slow read of 80 ms, two don't. What is left beyond the computing is probably the worker's start, some 70
# ms above, and its end. The files of this lab are alike, so a deeper queue has little to even out.
#
# **Takeaway.** Persistent workers are for short epochs, a deep queue for uneven reads. Each batch of depth takes shared memory.

# %% [markdown]
# ## 5 · When shared memory runs out
#
# **Question.** The article trained in a container, where `/dev/shm` has 64 MB unless told otherwise. With 12 workers it failed.
# Why with 12, and not with 8?
#
# **Technique.** A worker hands a batch over through a file in `/dev/shm`, a file system in memory. A batch is one micro-batch
# here. Each worker holds `prefetch_factor` of them ready, and the loop holds the one that it computes on. In the function,
# `batch` is the number of images in one.


# %%
def shm_mib(workers, prefetch=2, batch=1, resolution=512):
    """MiB of /dev/shm that float32 images of three channels take at most."""
    return (workers * prefetch + 1) * batch * 3 * resolution**2 * 4 / 2**20


print({workers: shm_mib(workers) for workers in (1, 2, 3, 4, 8, 12)})
assert abs(shm_mib(12) / (needed_bytes(STOCK.but(num_workers=12)) / 2**20) - 1) < 0.01

# %% [markdown]
# **Prediction.** How many workers fit at most into a container's 64 MiB?

# %%
my_fit: float | None = None  # a whole number

lab.predict("workers that fit in 64 MiB", my_fit, "workers")

# %% [markdown]
# **Measurement.** A child process gets a `/dev/shm` of its own of 64 MiB, loads batches with 12 workers, and then mounts 1 GiB
# and tries again. Nothing that happens to it reaches this notebook. Read it: `labutils/labs/lab03_small_shm.py`, 50 lines.

# %%
trials = lab.keep(try_workers(12))
for trial in trials.values():
    if used := trial.metric("peak_gb"):
        mib = [gb * 1e9 / 2**20 for gb in (used, trial.metric("shm_gb"))]
        print(f"{trial.run}: at most {mib[0]:.0f} of {mib[1]:.0f} MiB in use")
lab.show(trials, ("outcome", "batches", "wanted", "message"), experiment="shm")
lab.verdict("A1.workers.shm", "A1.workers.shm-cure")

# %% [markdown]
# Ten workers take 63 MiB and fit. Twelve took 75 of 1,024, as the formula says. The cell shows that the failure raises no error in
# the training loop. A background thread of the worker finds no memory, prints its `RuntimeError`, and drops the batch. The loop
# waits for it forever: **it hangs**. Our trial ends because it has a `timeout`. Two other endings are not shown here. Older
# versions of PyTorch died with *Bus error*. With PyTorch's default `collate_fn` the batch is made in shared memory at once, and the
# error is raised in the loop. The script brings its own, with `torch.stack`.
#
# | what you can do | where |
# |---|---|
# | `docker run --shm-size=1g ...` | the article's cure |
# | `sudo mount -o remount,size=8G /dev/shm` | on the machine itself |
# | fewer workers, or a smaller `prefetch_factor` | anywhere |
# | `DataLoader(timeout=60)` | turns the waiting into an error |
#
# **Takeaway.** Work it out before a run: (workers × prefetch factor + 1) × bytes of a batch. If training stands still with an
# idle GPU, look for `shared memory` in its output.

# %% [markdown]
# ## 6 · Copies that don't wait
#
# **Question.** The article sets `pin_memory=True`, and adds `non_blocking=True` to the loop's `.to(device)`. Only both together,
# it says, make the copy asynchronous. Is that so?
#
# **Technique, first half: who copies?** In the article's loop accelerate has wrapped the loader.

# %%
from accelerate import Accelerator

accelerator = Accelerator()
loader = accelerator.prepare(DataLoader(Subset(mine, range(2))))
batch = next(iter(loader))
ids = batch["input_ids"].to(accelerator.device, non_blocking=True)  # the article's edit
print(f"The batch comes on {batch['input_ids'].device}.")
print("The article's line copied something:", ids is not batch["input_ids"])

# %% [markdown]
# **The article's `non_blocking` edit does nothing.** accelerate's loader has moved the batch before the loop sees it, and `.to`
# returns the very same tensor. The switch that works is accelerate's own:
# `Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))`. The course's `non_blocking` sets that one.
#
# **Technique, second half: for how long does a copy hold the host?** A GPU can fetch by itself only from *pinned* memory, whose
# pages stay where they are. From ordinary, *pageable* memory the driver copies into a pinned buffer first, and the host waits.
#
# **Prediction.** One image has 3.1 MB. How many microseconds does a pinned, non-blocking copy of it hold the host?

# %%
my_held_us: float | None = None  # for example 100

lab.predict("a pinned, non-blocking copy holds the host", my_held_us, "us")


# %%
def held_ms(host_batch, non_blocking, queued=0, times=50):
    """Milliseconds for which each copy holds the host, with so many products queued before it."""
    big = torch.rand(2048, 2048, device="cuda")
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        for _ in range(queued):
            big @ big  # the GPU is still at work when the copy is asked for
        began = time.perf_counter()
        host_batch.to("cuda", non_blocking=non_blocking)
        taken.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return taken[5:]


# %%
held = {}
with lab.attempt("Copies from pageable and pinned memory"):
    torch.cuda.synchronize()
    pageable = torch.rand(1, 3, 512, 512)
    for memory, batch in {"pageable": pageable, "pinned": pageable.pin_memory()}.items():
        for copy in ("blocking", "async"):
            ms = held_ms(batch, non_blocking=copy == "async")
            held[memory, copy] = 1e3 * median(ms)
            tags = {"experiment": "held by copies", "memory": memory, "copy": copy}
            run = Run("03", f"{memory}, {copy}", tags=tags, samples={"held_ms": ms})
            run.metrics["held_ms"] = summarise(ms)
            lab.keep(run)
            behind = held_ms(batch, non_blocking=copy == "async", queued=20)
            print(f"{memory}, {copy}: holds the host for {1e3 * median(ms):.0f} us,", end=" ")
            print(f"behind queued work for {1e3 * median(behind):.0f} us")
lab.verdict("A1.pin.needs-both")

# %% [markdown]
# Only the pinned, non-blocking copy let the host go on: on our H200 after 7 µs, 13 behind queued work. The other three held it
# until that work was done, nearly 7 ms. Non-blocking took 25 µs off the pageable copy; the host still waited. In the verdict,
# *this* is what non-blocking changes from pageable memory, *against* what it changes from pinned memory. Its *inconclusive* comes
# from the sweep's noise, not from these copies.
#
# **Measurement.** And the step? Three workers, with and without both, in the rounds of section 3:

# %%
with lab.attempt("Pinned memory in the loop"):
    torch.cuda.synchronize()
    both = [runs["workers=3"], runs["3 workers, pinned"]]
    lab.show(both, ("step_ms", "speed-up", "data_ms"))
lab.verdict("A4.pytorch.pinned")

# %% [markdown]
# Four copies held the host for some 0.9 ms, 0.2 % of the step: little to gain. The wait for data, which contains them, fell from 18
# to 1 ms on our H200, some 3 % of the step. Probably that is so since a thread of the training process takes batches from the
# workers and pins them. The medians are 579 and 581 ms. Round by round the pinned loop took 7 % longer (2 to 10 %), the table's
# 0.94x. The sweep's noise, −9 to +8 %, is larger: whether the step got shorter or longer can't be said.
#
# **Takeaway.** Only pinned *and* non-blocking freed the host here. Find out first who copies, how large the copy's share of your
# step is, and how long the loop waits to take a batch.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("03.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** You train at 512 × 512 with micro-batches of 4, 6 workers and `prefetch_factor=4`. How many MiB of shared memory does
# that take at most? And how many workers fit into 256 MiB?

# %% tags=["exercise"]
my_mib_and_workers = None  # (MiB, workers)

print(check("03.1", my_mib_and_workers))

# %% [markdown]
# **2.** Lab 04 makes the computation shorter. A micro-step then takes 23 ms, reading 80 ms, on 16 cores. How many workers keep
# up? And how long does a step of four micro-steps take with three?

# %% tags=["exercise"]
my_workers_and_ms = None  # (workers, ms)

print(check("03.2", my_workers_and_ms))

# %% [markdown]
# **3. Tune a DataLoader.** This epoch is short: eight examples of 8 ms each, from a slow disk, and 6 ms of computing after
# each. Write the loader that makes it at least 1.3 times as fast. The check runs epoch after epoch with it.


# %% tags=["exercise"]
class SlowDisk(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.008)
        return torch.full((3,), float(index))


plain_loader = DataLoader(SlowDisk())
my_loader = DataLoader(SlowDisk())  # your options here


def epoch_over(loader):
    total = 0.0
    for batch in loader:
        time.sleep(0.006 * len(batch))
        total += batch.sum().item()
    return total


print(
    faster_than(
        3, lambda _: epoch_over(plain_loader), lambda _: epoch_over(my_loader), lambda i: (i,), 1.3
    )
)

# %% [markdown]
# **4. Make a worker faster.** Here is what somebody does with a decoded image: turn it into numbers from −1 to 1, mirror it,
# and cut out its middle. Compute the same tensor at least twice as fast.


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


# %% [markdown]
# ## What to read on
# - PyTorch: [torch.utils.data](https://docs.pytorch.org/docs/stable/data.html), on workers, prefetching and pinned memory.
# - PyTorch: *[A guide on good usage of `non_blocking` and
#   `pin_memory()`](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html)*.
# - J. Mohan and others: *Analyzing and Mitigating Data Stalls in DNN Training*, PVLDB 14(5), 2021
#   ([arXiv:2007.06775](https://arxiv.org/abs/2007.06775)).
# - Docker: [`--shm-size`](https://docs.docker.com/reference/cli/docker/container/run/).
# - The course's [glossary](../docs/glossary.md).
#
# Next: lab 04, which makes the computation itself faster.

# %%
compared = time_effect(runs["workers=0"], runs["workers=3"])
truths = {
    "time to read one example": read_ms,
    "speed-up with three workers": compared and 1 / compared.value,  # as in section 3's table
    "workers that fit in 64 MiB": (64 // 3 - 1) // 2,  # 3 MiB a batch; two a worker, one more
}
copy_held = "a pinned, non-blocking copy holds the host"
if "held" in globals():  # section 6 was not skipped
    truths[copy_held] = held.get(("pinned", "async"))
theirs = lab.reference(experiment="held by copies", memory="pinned", copy="async")
lab.done(truths, ours={copy_held: theirs and 1e3 * theirs.metric("held_ms")})
