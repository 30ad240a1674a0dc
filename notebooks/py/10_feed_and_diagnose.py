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
# # Lab 10 · Feed and diagnose
#
# Article A4 also advises on what feeds a training: storage, decoding, threads. And it advises to look before you change.
# Here you find out when it matters how images are stored and decoded, and have a program predict from one trace what each
# fix would save.
#
# **After this lab you can**
# - say from two numbers whether a faster decoder, a cache or more workers would shorten your step;
# - keep processes from getting in each other's way;
# - say where your own loop's time goes, and which fix to try first.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | ½ minute |
# | `small` | a GPU of 8 GB | 3 minutes |
# | `full` | a GPU of 80 GB | 5 minutes |
#
# **Without a GPU** all of it holds but CUDA's variables.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 3 at larger scales
rounds: int = 0  # times round all switches; 0: 1 at tiny, 8 at larger scales
every_loop: bool = False  # section 3 also tests 3 more loops (its question is about SD1.5's): 3-4 minutes more at full

# %%
from labutils.course.lab import open_lab

lab = open_lab("10", globals())

# %%
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import torch

from labutils.course import plots
from labutils.labs import lab09_toggles, lab10_image_input
from labutils.labs.lab10_image_input import Pictures
from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.profiling.dataloader_model import Pipeline
from labutils.profiling.machine import usable_cores
from labutils.recipe import STOCK, Recipe, Unavailable
from labutils.results.records import Run, summarise
from labutils.tools.diagnose import ablations
from labutils.training import try_isolated
from labutils.training.memory_log import make_room

plots.use_style()
warnings.filterwarnings("ignore", message="This DataLoader will create")  # on purpose

# %%
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
steps, rounds = steps or (2 if tiny else 3), rounds or (1 if tiny else 8)
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))
stable_diffusion = lab.workload("sd15-lora")

# %% [markdown]
# ## 1 · From file to training step
#
# **Question.** How long does one core take to turn a file into pixels, and how does that depend on the file's format?
#
# *PNG*, *JPEG* and *WebP* are compressed. *pixels* is the decoded picture as it is. *resized* is decoded and resized to the
# training resolution: what you would have after one pass over the dataset.
#
# **Your prediction:** how many times as long does a PNG take to decode as a JPEG of the same picture?

# %%
my_formats: float | None = None  # for example 2

lab.predict("PNG against JPEG, one core", my_formats, "x")

# %%
pictures = Pictures(stable_diffusion, 8 if tiny else 32)
decoding: dict[str, Run] = {}
with lab.attempt("Reading and decoding", experiment="decode", format="PNG"):
    decoding = lab.measured_together(
        {f"decode: {name}": None for name in pictures.formats}, pictures.decoding
    )
    fig, ax = plt.subplots()
    parts = {
        run.tags["format"]: {"read": run.metric("read_ms"), "decode": run.metric("decode_ms")}
        for run in decoding.values()
    }
    plots.breakdown(ax, parts)
    plt.show()
on_the_gpu = "decode: JPEG, GPU"
with lab.attempt("JPEG decoded on the GPU", experiment="decode", format="JPEG", on_gpu=True):
    decoding[on_the_gpu] = lab.measured(on_the_gpu, None, pictures.decoding_on_gpu)
columns = {"run": "form", "mb": "MB a file", "read_ms": "ms to read", "decode_ms": "ms to decode"}
lab.show(decoding.values(), columns, experiment="decode")

# %% [markdown]
# (JPEG and WebP lose some of the picture. These pictures are drawn, and compress better than photographs.)
#
# ### Is it the disk?
#
# **Question.** How much of that time would a faster disk save?
#
# A file that was read once stays in the operating system's *page cache* as long as there is room. *Cold*: the system was
# asked to forget the files (`posix_fadvise`); *still cached* says how many of them it kept all the same. *Warm*: they
# come from memory, and no disk can be faster than that.

# %%
with lab.attempt("The page cache", experiment="files", cache="cold"):
    storage = lab.measured_together(dict.fromkeys(("files: cold", "files: warm")), pictures.storage)
    columns = {
        "cache": "page cache",
        "read_ms": "ms to read a file",
        "example_ms": "ms to read and decode it",
        "still_cached": "share still cached",
    }
    lab.show(storage.values(), columns)
lab.verdict("A4.data.storage", "A4.data.gpu-decoding");

# %% [markdown]
# ### When does it matter?
#
# **Question.** When does a faster decoder shorten the step?
#
# Lab 03's model says when. If making a micro-batch takes $r$ and training on it takes $c$, a micro-step takes $r + c$
# without workers and $\max(c, r / w)$ with $w$ workers, as long as there are cores for them. (An optimizer step is one
# micro-step, or several with accumulation.) So a faster decoder, a cache and more workers all do the same thing, and
# none of them gets a micro-step below $c$.

# %%
several = min(4, max(2, usable_cores() // 2))
loop = Recipe(
    driver="eager",
    logging="ring-buffer",
    micro_batch=1 if tiny else 4,
    accumulation=2 if tiny else 1,
)
beside = loop.but(num_workers=several, persistent_workers=True)
forms = ("PNG", "JPEG", "resized", "resized in memory") + (() if tiny else ("WebP",))
ways = {f"data: {form}": (form, loop) for form in forms}
by_workers = ("PNG",) if tiny else ("PNG", "JPEG", "resized")
ways |= {f"data: {form}, {several} workers": (form, beside) for form in by_workers}
trained: dict[str, Run] = {}
with lab.attempt("Training on each form", experiment="image input", format="PNG"):
    trained = lab.measured_together(
        {name: recipe for name, (_, recipe) in ways.items()} | {"data: PNG again": loop},
        partial(lab10_image_input.trained_from, pictures, ways, steps, min(rounds, 4)),
    )

# %%
threads = 1 if on_gpu else torch.get_num_threads()
with lab.attempt("The model of the data path"):
    without = trained["data: resized in memory"]
    wait, step = (without.metric(ms) / loop.accumulation for ms in ("data_ms", "step_ms"))
    base = Pipeline(
        wait, step - wait, usable_cores(), threads=threads, accumulation=loop.accumulation
    )
    each = pictures.examples_ms(forms)
    model = {
        workers: {
            ms: replace(base, read_ms=ms * loop.micro_batch).step_ms(workers)
            for ms in np.linspace(0, 1.15 * max(each.values()), 25).tolist()
        }
        for workers in (0, 1, several)
    }
    points: dict[int, dict] = {0: {}, several: {}}
    for name, (form, recipe) in ways.items():
        if trained[name].ok:
            step_ms = trained[name].metrics["step_ms"]
            spread = tuple(step_ms[part] for part in ("p10", "median", "p90"))
            points[recipe.num_workers][form] = (each[form], spread)
    fig, ax = plt.subplots(figsize=(7.4, 4.2))
    plots.over_decoding(ax, model, points, "ms that one core takes to make an example")
    plt.show()
lab.verdict("A4.data.cache", "A4.pytorch.workers", "A4.pytorch.prefetch", "A4.pytorch.persistent");

# %% [markdown]
# Follow the line of your number of workers. Left of its bend a micro-step takes $c$ whatever the format is, and work on
# the data path gains nothing. Right of it the step waits for data. (Points far above their line: on a machine with few
# cores, workers and training compete for them. The claims about workers are judged by lab 03's runs, if you have made
# them.)
#
# **Takeaway.** Two numbers decide: $r / w$ and $c$. Measure both before you convert a dataset.

# %% [markdown]
# ## 2 · Switches in the environment
#
# **Question.** The article sets `OMP_NUM_THREADS=4`, which "prevents oversubscription". What happens without it?
#
# On a CPU, PyTorch's operations use as many threads as there are cores. For one process that is right. But if there is a
# process for each of 8 cores, and each starts 8 threads, 64 threads compete for 8 cores. (DataLoader workers are safe:
# PyTorch gives them one thread each. Processes that you start yourself are not.)
#
# The article's 4 suits a machine with four cores for each process. Here there is a process for each core, but 8 at most,
# so the lab compares the variable unset with 1: one thread each. (With one thread each, cores beyond the eighth have
# nothing to do. If that is faster all the same, oversubscription costs more than those cores bring.)

# %%
processes = min(usable_cores(), 8)
settings = {"as they come": None, "one each": 1}
seconds = 0.5 if tiny else 1.0


def resizing() -> dict[str, Run]:
    found = {}
    for word, threads in settings.items():
        metrics = lab09_toggles.images_per_s(processes, threads, seconds)
        tags = {"experiment": "threads", "threads": word}
        found[f"threads: {word}"] = Run("10", "", metrics=metrics, tags=tags)
    return found


with lab.attempt("Threads and processes", experiment="threads", threads="as they come"):
    tried = [f"threads: {word}" for word in settings]
    resized = lab.measured_together(dict.fromkeys(tried), resizing)
    counts = (usable_cores(), processes)
    rows = [
        (name, *counts, int(run.metric("threads")), run.metric("images_per_s"))
        for name, run in resized.items()
    ]
    lab.table(
        ("", "cores", "processes", "threads of each", "images resized a second, in all"), *rows
    )
lab.verdict("A4.environment.threads");

# %% [markdown]
# ### CUDA's variables
#
# **Question.** What do `CUDA_LAUNCH_BLOCKING` and `CUDA_VISIBLE_DEVICES` do?
#
# `CUDA_LAUNCH_BLOCKING=1` makes the host wait for every kernel. An error then names the line that caused it, but host and
# GPU no longer work at the same time. `CUDA_VISIBLE_DEVICES` hides GPUs from a process. Both are read once, when a process
# starts, so each value is tried in a process of its own.

# %%
alone = Recipe(driver="eager", logging="ring-buffer", num_workers=4, persistent_workers=True)
blocking = {"launches overlap": "0", "launches block": "1"}


def gpus_seen(visible: str) -> int:
    """How many GPUs a new process sees with CUDA_VISIBLE_DEVICES set to this."""
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    return int(subprocess.check_output(count, env=environment, text=True))


def in_processes() -> dict[str, Run]:
    """A loop that waits for no loss, with images from workers: the host could run ahead."""
    found = {}
    for name, value in blocking.items():
        environment = {"CUDA_LAUNCH_BLOCKING": value}
        run = try_isolated(stable_diffusion, alone, steps=11, environment=environment)
        if run.metrics["failed"]:
            raise RuntimeError(run.metrics["message"])
        run.samples["step_ms"] = run.samples["step_ms"][5:]  # workers and libraries start before
        run.metrics = {"step_ms": summarise(run.samples["step_ms"])}
        run.tags = {"experiment": "launches", "launches": name.removeprefix("launches ")}
        found[name] = run
    return found


# %%
with lab.attempt("CUDA's variables", experiment="launches", launches="block"):
    if not on_gpu:
        skipped = {"status": "skipped: there is no GPU"}
        overlap = {"experiment": "launches", "launches": "overlap"}
        lab.keep(Run("10", "launches overlap", tags=overlap, **skipped))
        lab.keep(Run("10", "visible devices", tags={"experiment": "visible devices"}, **skipped))
        raise Unavailable("there is no GPU whose launches could overlap")
    seen = {"none": gpus_seen(""), "one": gpus_seen("0")}
    metrics = seen | {"as_asked": int(seen == {"none": 0, "one": 1})}
    tags = {"experiment": "visible devices"}
    lab.keep(Run("10", "visible devices", metrics=metrics, tags=tags))
    lab.measured_together(dict.fromkeys(blocking, alone), in_processes)
lab.verdict("A4.environment.launch-blocking", "A4.environment.visible-devices");

# %% [markdown]
# **Takeaway.** Set `CUDA_LAUNCH_BLOCKING` to find an error, and make sure that it is unset before you measure anything.

# %% [markdown]
# ## 3 · Which of it pays on this loop?
#
# **Question.** You flipped one switch after another, and most did nothing. Could a single look at the loop have told you
# which one pays?
#
# `labutils diagnose -- python train.py` looks at any training script as it is: it times a few steps, profiles a few more,
# says where the time goes, and ranks what to change. It predicts each gain by replaying the traced step with one thing
# changed, for example without the wait for data. Here it looks at the loop that article A1 starts with, *SD1.5* in the
# tables. Then it is put to the test: after the predictions are made, each fix is measured alone, taking turns with the
# loop as it was.
#
# **Which fixes are measured?** Four, chosen beforehand and not by what is predicted of them: *workers*, *batch size*,
# *capture* and *caching*. Each names another part of the loop as the culprit, and each is a setting of the course's own
# loop, so that nobody has to rewrite anything. (*capture* takes a GPU: on a CPU there are three.) Two kinds of fixes aren't
# measured: compiling, as it takes longer to build than all others to measure (lab 04 does it); and small matters such as
# the log or the optimizer's form, whose gain the spread would hide. (With `every_loop=True` three more loops are looked
# at, each with the fixes that it may call for: *LLaVA*, article A2's; *Qwen3*, A3's on long texts; and *Qwen3 in fp32*, on
# short ones, whose products have no faster format. Our H200's tables have all four. The question stays SD1.5's.)
#
# **A fix may change several knobs.** A CUDA graph can't hold an optimizer that asks the host whether to step, nor a log
# that waits for the loss, so *capture* changes these two as well. *caching* leaves nothing for workers to load, and goes
# without them. The column *what changes* lists the knobs. What is measured is such a bundle: its gain isn't the graph's
# alone.
#
# **Your prediction:** how many percent of that loop's step does the best single one of these fixes save?

# %%
my_best: float | None = None  # for example 40

lab.predict("the best single fix saves", my_best, "%")

# %%
recomputed = A3_BASE.but(checkpointing="blocks")
loops = {
    "SD1.5": ("sd15-lora", STOCK, ("workers", "batch size", "capture", "caching")),
    "LLaVA": (
        "llava-lora",
        A2_BASE.but(checkpointing="blocks"),
        ("workers", "checkpointing", "caching"),
    ),
    "Qwen3": (
        "qwen3-lora-long",
        recomputed.but(optimizer="adamw", layers="rewritten"),
        ("checkpointing", "padding"),
    ),
    "Qwen3 in fp32": (
        "qwen3-lora-short",
        recomputed.but(precision="fp32"),
        ("precision", "checkpointing"),
    ),
}  # the articles' own starting points, and which fixes are measured

# %%
diagnosed: dict[str, Run] = {}


def tested(work, start: Recipe, fixes: Sequence[str], **tags: str) -> Run:
    """What the diagnosis of a loop says, and what its fixes bring."""
    run = ablations.ablations(
        work, start, steps, rounds=1 if tiny else 3, only=fixes[:1] if tiny else fixes
    )
    run.tags = tags
    return run


for name in loops if every_loop else ("SD1.5",):
    about = {"experiment": "diagnosis", "script": name}
    with lab.attempt(f"A diagnosis of the loop {name}", **about):
        room, start, fixes = loops[name]
        work = lab.workload(room)
        measure = partial(tested, work, start, fixes, **about)
        diagnosed[name] = lab.measured(f"diagnosis: {name}", None, measure)
        make_room(work)
print(next((run.metrics["told"] for run in diagnosed.values()), ""))

# %%
looks = ablations.look_table(diagnosed)
lab.table(ablations.fix_table(diagnosed))
lab.table(looks)
count = {
    name: sum(run.metrics[name] for run in diagnosed.values())
    for name in ("fixes_telling", "fixes_close")
}
first_was_best = sum(row["ranked first"] == row["best"] for _, row in looks.iterrows())
print(
    f"Loops on which the fix ranked first was the best: {first_was_best} of {len(looks)}. Of "
    f"{count['fixes_telling']} fixes with something to gain, {count['fixes_close']} were predicted within 20 % of the step."
)
recorded = {loop: lab.reference(experiment="diagnosis", script=loop) for loop in loops}
recorded = {loop: run for loop, run in recorded.items() if run is not None}
lab.show("**The same on our H200**, of all four loops:")
lab.table(ablations.fix_table(recorded))
lab.table(ablations.look_table(recorded))
rows = diagnosed["SD1.5"].metrics["each"].values() if "SD1.5" in diagnosed else ()
saved = [row["measured"] for row in rows if row["per"] == "step" and ablations.is_test(row)]

# %% [markdown]
# *Measured* is the middle of three rounds, with the least and the most in brackets (at `tiny` there is one round). *Step
# off by* compares the predicted step with the measured one (+10%: it was predicted a tenth longer than it was). *A useful
# token*: there it is the time of a token that isn't padding, not that of a step, that was predicted and measured. Shares
# are of the loop's step in the same rounds, which needn't last as long as the one that was looked at. Each gain was measured with that fix alone. They don't add
# up: what one fix has saved, the next can't save again. (A range can reach far down where a fix meets something for the
# first time: on our H200 *precision* of *Qwen3 in fp32* was slower than the start in its first round, and then more than
# twice as fast. What it met isn't on record. A likely guess is the lengths of the texts: for a size that it hasn't seen, a
# library has to choose a kernel and load it. If so, a real epoch pays that for each length once.)
#
# (A negative gain is a loss. On a CPU that is busy with other things, two runs of the *same* recipe can differ by more
# than a fifth; there the table shows how a prediction is tested, not how good it is.)
#
# The second table holds the article's last piece of advice against the first one: profile, change one thing, and
# measure again. *Ranked first* is, of the fixes that were measured, the one that the look put first, and what it saved;
# *best* is what you know once all are measured. Where the two differ, measuring again found what the look had missed.
# *Said to pay, and paid* counts the fixes that were predicted to save 5 % or more, and how many of them did.
#
# **Takeaway.** A look at the trace tells where to begin; only a measurement tells what it brought. So profile first, change
# one thing, measure again. `labutils diagnose` looks at your loop in the same way.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("10.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check

# %% [markdown]
# **1.** Micro-batches are of one example. One core takes 40 ms to make it, training on it takes 25 ms, and you have 4
# workers on 16 cores. How many percent of a micro-step would you save if making the example took half as long?

# %% tags=["exercise"]
my_saving = None  # percent
print(check("10.1", my_saving))


# %%
lab.done(
    {
        "the best single fix saves": 100 * max(saved) if saved else None,
        "PNG against JPEG, one core": median(decoding["decode: PNG"].samples["decode_ms"])
        / median(decoding["decode: JPEG"].samples["decode_ms"])
        if "decode: PNG" in decoding
        else None,
    }
)
