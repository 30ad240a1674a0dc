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
# # Lab 02 · Profile a training step
#
# Article A1 runs a public LoRA training script as downloaded, and finds the GPU busy for less than half of the time. It
# profiles the script, names two bottlenecks and removes them. Two gaps remain, and it names a cause for each. In this lab
# you repeat the diagnosis on your machine, and then you check the causes. A profile shows *when* the GPU waits; it is easy
# to blame the wrong line of code for it.
#
# **After this lab you can**
# - say what one step of this training consists of, down to sizes and dtypes;
# - record a profile of a few steps, open it in a viewer, and read it without one;
# - tell apart what `nvidia-smi` calls utilisation, how long kernels really ran, and what the host did meanwhile;
# - divide a step among data, host, launches, copies, kernels and waits, so that the parts add up to the whole;
# - list the lines of a program that make the host wait for the GPU, in two independent ways;
# - test an explanation that somebody has published, instead of believing it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 2 minutes |
# | `full` | a GPU of 40 GB | 4 minutes |
#
# Without a GPU there are no kernels, and nothing waits for any. The same cells then show what the host does, which is half
# of the story, and our H200's numbers beside it. The [notebook as our H200 ran
# it](../reference/h200/02_profile_a_training_step.ipynb) has the pictures of a GPU's trace.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps that each measurement times; 0: 4 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("02", globals())

# %%
import shutil
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import torch

from labutils.course import plots
from labutils.layers.lora import count_parameters, count_trainable
from labutils.profiling.intervals import overlap, total, union
from labutils.profiling.syncs import find_syncs, with_lines
from labutils.profiling.trace import SHARES, profile
from labutils.profiling.utilization import Utilization
from labutils.recipe import STOCK
from labutils.results.records import summarise
from labutils.training import Trainer, compare, measure, train

# %%
plots.use_style()
on_gpu = lab.device == "cuda"
steps = steps or (4 if lab.scale == "tiny" else 8)
traces = lab.cache_dir / "traces" / "lab-02"  # large files: those of the last time make room
shutil.rmtree(traces, ignore_errors=True)
reference = lab.reference(experiment="stock")  # our H200's run of this lab
theirs = reference.metrics if reference else {}
no_gpu = "*No GPU work was recorded here, and no H200 run of this lab is on file to show instead.*"
if on_gpu:
    no_gpu = "*No H200 run of this lab is on file to compare with.*"

# %% [markdown]
# ## 1 · What a step consists of
#
# **Question.** What exactly are we about to profile?
#
# The course describes a way to train as a *recipe*. The recipe `STOCK` is the public diffusers script with the article's
# arguments: 512 × 512 pixels, LoRA of rank 4, fp16, and one image at a time, with gradients accumulated over four images.
# So one *optimizer step* consists of four *micro-steps*. This is what each micro-step does at scale `full`; read it once
# now, and come back to it when a phase's name turns up below:
#
# | phase | what happens | on |
# |---|---|---|
# | `data` | read a PNG of 1080 × 1080 pixels (1.3 MB), decode it, convert to RGB, scale to 512 × 512 (Lanczos), crop, to float32 [3, 512, 512] in −1..1; tokenise the caption to 77 numbers; stack to a batch of one | host |
# | `data`, at its end | accelerate copies the batch to the GPU: 3.1 MB of float32 pixels, 77 int64 tokens; from pageable memory, waiting for it | copy, host waits |
# | `encode` | pixels to fp16; VAE encoder → latents [1, 4, 64, 64], sampled from its posterior, × 0.18215; noise and a timestep drawn, noise added; CLIP text encoder → [1, 77, 768]. All fp16, no gradients | GPU |
# | `forward` | UNet (860 M frozen parameters in fp16, LoRA matrices in fp32, under autocast) predicts the noise; the loss is the mean squared error, in fp32 | GPU |
# | `log` | the loss is read into Python with `.item()`, for the average | host waits |
# | `backward` | the loss is divided by 4 and multiplied by the loss scale (`GradScaler`); backward through the UNet, down to the LoRA gradients in fp32 | GPU |
# | `log` | the loss is read with `.item()` once more, for the progress bar | host waits |
#
# The fourth micro-step does three things more, which make it an optimizer step:
#
# | phase | what happens | on |
# |---|---|---|
# | `clip` | gradients divided by the loss scale, with a note of any overflow (`found_inf`); their joint norm clipped to 1 | GPU |
# | `optimizer` | `GradScaler` reads `found_inf` with `.item()`: an overflow skips the step; AdamW (learning rate 1e-4) on the LoRA matrices; gradients dropped. (accelerate calls it in all four micro-steps, and lets only the fourth through) | GPU, host waits |
# | `log` | the average loss is written for TensorBoard and flushed to the disk | host |
#
# The training loop marks each phase with its name (`torch.profiler.record_function`), so every profile shows them. At this
# lab's scale the sizes are:

# %%
workload = lab.workload("sd15-lora")
trainer = Trainer(workload, STOCK)
batch = next(trainer.batches)
pixels, unet = batch["pixel_values"], trainer.model.unet
trained = count_trainable(unet)
lab.table(
    ("this lab", f"scale {lab.scale}"),
    (
        "pixels of a micro-batch",
        f"{list(pixels.shape)}, {pixels.dtype}, {pixels.nbytes / 1e6:.2g} MB",
    ),
    ("tokens of a micro-batch", f"{list(batch['input_ids'].shape)}, {batch['input_ids'].dtype}"),
    (
        "UNet",
        f"{(count_parameters(unet) - trained) / 1e6:.1f} M parameters frozen, {trained / 1e6:.2f} M trained",
    ),
    ("precision", trainer.recipe.precision),  # a CPU has no fp16 matrix units; there it is fp32
    ("arithmetic of an optimizer step", f"{workload.work(trainer.recipe).flops / 1e9:,.4g} GFLOP"),
)

# %% [markdown]
# **Takeaway.** A step is more than forward, backward and optimizer. Four rows of these tables say *host waits*: keep an eye
# on them.

# %% [markdown]
# ## 2 · How long does a step take?
#
# **Question.** The article reports 290 ms "a step" on its card, and does not say whether that is a micro-step or an
# optimizer step. In this course a step is always an optimizer step, here four images. How long does one take?
#
# **Your prediction:** how many milliseconds does one take on your machine?

# %%
my_step_ms: float | None = None  # for example 500

lab.predict("time of an optimizer step", my_step_ms, "ms")

# %%
stock = train(workload, STOCK, steps=steps, name="stock")
stock.tags = {"experiment": "stock"}
lab.keep(stock)
fig, ax = plt.subplots()
plots.steps(
    ax,
    {f"stock, here ({lab.scale})": stock}
    | ({"stock, H200 (full)": reference} if reference else {}),
)
plt.show()
lab.verdict("A1.stock.step-ms");

# %% [markdown]
# (At scales other than `full` the model is smaller, so the two rows are not the same work.)
#
# **Takeaway.** Report a median and its spread, and leave the first step out of them: it also pays for loading kernels,
# choosing convolution algorithms and filling caches. A mean over a whole run mixes all of that.

# %% [markdown]
# ## 3 · Utilisation over time
#
# **Question.** The article watched the tool `nvitop` and read 44 % on average. What does such a number say? `nvitop` and
# `nvidia-smi` ask the driver, and the driver answers with the share of its last sampling period in which *any* kernel was
# running.
#
# **Your prediction:** the mean utilisation of the GPU during stock steps, in % (without a GPU: of the CPU cores).

# %%
my_utilization: float | None = None  # 0 to 100

lab.predict("utilisation", my_utilization, "%")

# %%
measure(trainer, 2)  # warm up
with Utilization(interval_s=0.05) as watched:
    measure(trainer, steps)
stock.metrics |= watched.metrics()
stock.samples["utilization"] = [round(value, 3) for value in watched.series(watched.what)[1]]
lab.keep(stock);

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.6))
when, values = watched.series(watched.what)
what = "GPU" if on_gpu else "CPU, this process's share of its cores"
# A reading speaks of the time since the one before it: the first and the last, of an instant, are left out.
plots.utilisation(ax, when[:-2], values[1:-1], what)
plt.show()
changes = sum(before != after for before, after in zip(values, values[1:], strict=False))
said = f"{len(values)} readings in {when[-1]:.1f} s, of which {changes} brought a new number."
lab.show(said if on_gpu else said + " They are of the CPU: there is no driver to ask.")
lab.verdict("A1.stock.utilization");

# %% [markdown]
# **Takeaway.** Utilisation says how often the GPU was not idle, and nothing about how well it was used: one small kernel
# that runs all the time gives 100 %. The driver renews the number only a few times a second, so it can't show what happens
# inside a step. For that we need a trace.

# %% [markdown]
# ## 4 · A profile, with the article's schedule
#
# **Question.** What does `torch.profiler` record?
#
# It writes a *trace*: a list of what ran when, on the host and on the GPU. A schedule says which iterations are recorded. The
# article uses `schedule(wait=1, warmup=1, active=5, repeat=1)`: pass over one iteration, warm the profiler up in the next,
# and record five. It calls `prof.step()` after each micro-step, so its five hold one whole optimizer step and a quarter of
# the next. We call it after each optimizer step, so that every recorded step is complete.

# %%
beside = summarise(measure(trainer, steps).step_ms)  # unprofiled, just before: section 9 compares
trace = profile(trainer, steps=5, folder=traces, with_stack=False)
stock.metrics |= trace.metrics(stock.metric("step_ms"), stock.metric("data_ms"))
lab.keep(stock)
if on_gpu and not trace.on_gpu:
    lab.show(
        "**The profiler recorded no GPU work.** Containers often lack the right to it: `labutils doctor` has more."
    )
size = trace.path.stat().st_size / 1e6
lab.show(
    f"{trace.steps} steps, {size:,.0f} MB: `{trace.path}`. To look inside: https://ui.perfetto.dev, *Open trace file*."
)

# %%
lanes = {
    name: blocks for name, blocks in trace.timeline().items() if name in ("host", "host waits")
}
fig, axes = plt.subplots(
    1 + trace.on_gpu, sharex=True, squeeze=False, figsize=(7.2, 3 + 1.5 * trace.on_gpu)
)
plots.timeline(axes[0, 0], lanes, most=7)
axes[0, 0].set_title("One optimizer step")
if trace.on_gpu:
    plots.utilisation(axes[1, 0], *trace.busy_over_time(), label="kernels running")
    axes[1, 0].set_xlabel("ms")
plt.show()
lab.verdict("A1.profiler.five-steps");

# %% [markdown]
# This is one recorded step, drawn from the file. The bar shows what the host was doing. On a GPU, the curve below it shows
# for how much of the time kernels ran. Find the four micro-steps. What does the host do where few kernels run?
#
# A step has thousands of kernels (without a GPU: of operators), too many for one picture. So we look closer in two places:
# at a moment in the middle of a forward pass, and at the end of the step, where the article saw a gap.

# %%
start, stop = trace.phase_time["forward"][1]
width = 2 if on_gpu else 1  # ms
moments = [start + share * (stop - start) for share in (0.3, 0.4, 0.5, 0.6, 0.7)]
busiest = max(moments, key=lambda at: sum(map(len, trace.timeline((at, at + width)).values())))
clip = trace.phase_time["clip"][0]
end = next((t for _, t in trace.phase_time["optimizer"] if t > clip[1]), clip[1])
margin = (end - clip[0]) / 2
closer = {
    "Inside a forward pass": (busiest, busiest + width),
    "Around clipping and the optimizer": (clip[0] - margin, end + margin),
}
for title, window in closer.items():
    fig, ax = plt.subplots()
    plots.timeline(ax, trace.timeline(window), most=7 if on_gpu else 5)
    ax.set_title(title)
    plt.show()

# %% [markdown]
# The blank parts of the lower rows are time in which nothing is computed, although the host is busy.
#
# **Takeaway.** A trace shows what ran and when. Read it from the outside in: first the phases of a step, then a moment
# inside one of them.

# %% [markdown]
# ## 5 · Where each millisecond goes
#
# **Question.** The article sorts what it sees in the trace into four kinds: host processing, data transfer, launches and
# returns, and kernels. Can we give *every* millisecond of a step to exactly one kind?
#
# Yes, with a rule for overlaps. A moment belongs to the first of these that is true:
#
# | kind | what is true at that moment |
# |---|---|
# | *kernels* | a kernel runs on the GPU |
# | *copies* | a copy to or from the GPU runs |
# | *data* | the GPU is idle, and the host waits for the next images |
# | *sync* | the GPU is idle, and the host waits for it |
# | *launch* | the GPU is idle, and the host is inside a launch call |
# | *host* | the GPU is idle, and the host does anything else: Python, PyTorch's dispatcher, autograd |
#
# So the parts add up to the step. (Without a GPU two are left, *data* and *host*.)
#
# The profiler itself needs a correction. It slows down the host and not the GPU (section 9), so a profiled step shows too
# little GPU and too much host. The bar *not profiled* is our estimate of the same step without a profiler: kernels and
# copies as recorded, the wait for data as section 2 timed it, and the rest in the recorded proportions.
#
# **Your prediction:** for what share of the step is the GPU idle because the next image isn't ready, in %? (Without a GPU:
# for what share does training wait for images?)

# %%
my_data_share: float | None = None  # 0 to 100

lab.predict("share of the step lost to data", my_data_share, "%")

# %%
parts = {
    "as profiled": trace.partition(),
    "not profiled": trace.partition(stock.metric("step_ms"), stock.metric("data_ms")),
}
shares = {
    bar: {name: 100 * part.get(name, 0) / sum(part.values()) for name in SHARES}
    for bar, part in parts.items()
}
if theirs:
    shares["H200 (full), not profiled"] = {name: 100 * theirs[f"{name}_share"] for name in SHARES}
fig, ax = plt.subplots()
plots.breakdown(ax, shares, unit="%")
ax.set_xlabel("% of an optimizer step")
plt.show()

# %%
phases = trace.host_breakdown()
stock.metrics |= {"phases_ms": {name: row["ms"] for name, row in phases.items()}}
rows = []
for name, row in phases.items():
    h200 = theirs.get("phases_ms", {}).get(name), theirs.get(f"{name}_idle_ms")
    rows.append((name, row["count"] or None, row["ms"], row.get("idle_ms"), *h200))
lab.table(
    (
        "phase",
        "times a step",
        "host, ms a step",
        "GPU idle meanwhile, ms",
        "H200: host, ms",
        "H200: GPU idle, ms",
    ),
    *rows,
)
lab.verdict("A1.overheads.four", "A1.overheads.host", "A1.stock.data", "A1.stock.launches");

# %% [markdown]
# Two columns answer two questions. *Host* says where the program spends its time, and *GPU idle* what that costs the GPU.
# The two work at the same time, so a phase with much of the first and little of the second (on the H200, *encode*) needs no
# tuning.
#
# Now the same idle time again, gap by gap. What did the host do during most of each gap? And had a wait just before it let
# the queue of launched work run empty?

# %%
gaps = trace.gaps()
by_cause = {}
for cause in ("data", "host", "launch", "sync"):
    mine = [gap for gap in gaps if gap.cause == cause]
    drained = [gap for gap in mine if gap.after_sync]
    by_cause[cause] = [
        n / trace.steps for n in (len(mine), sum(g.ms for g in mine), sum(g.ms for g in drained))
    ]
if gaps:
    stock.metrics |= {"gaps": by_cause}
rows = by_cause if gaps else theirs.get("gaps", {})
head = "host in the gap" if gaps else "H200: host in the gap"
rows = [(cause, *row) for cause, row in rows.items()]
lab.table((head, "gaps a step", "ms a step", "of these after a wait, ms"), *rows, otherwise=no_gpu)

# %% [markdown]
# On the H200 the *data* gaps are few and long. The *host* gaps are thousands and tiny: the host can't
# launch kernels as fast as the GPU works them off.
#
# **Takeaway.** A GPU idles for two different reasons: it waits long for something big, or it waits briefly, again and again,
# for the next small piece of work. The two need different cures, in labs 03 and 04.

# %% [markdown]
# ## 6 · What the kernels do
#
# **Question.** The article's second bottleneck is the Python between "many tiny submodules". How many kernels does a step
# have, how long is one, and what are they for?

# %%
stacked = profile(trainer, steps=1, folder=traces, with_stack=True)
kinds = stacked.categories()
stock.metrics |= {"categories_ms": {name: row["ms"] for name, row in kinds.items()}}
what = "kernels here" if stacked.on_gpu else "operators here, own time"
rows = [
    (name, row["count"], row["ms"], 1e3 * row["ms"] / row["count"]) for name, row in kinds.items()
]
lab.table((what, "count a step", "ms a step", "µs each"), *rows)
lab.table(("kernels on the H200 (full)", "ms a step"), *theirs.get("categories_ms", {}).items())

# %% [markdown]
# *Thin GEMM* are the products with LoRA's narrow matrices: few operations, and a launch for each. *Casts and layout* is what
# autocast costs, and changes between memory layouts. *foreach* are kernels that work on many small tensors at once: they
# unscale gradients, clip them and update parameters. (Without a GPU the first table lists PyTorch's operators, each without
# the time of those that it calls.)
#
# In all, how busy was the GPU? There are three ways to say it:

# %%
questions = {
    "kernels": "kernels_per_step",
    "launch calls": "launches_per_step",
    "ms inside launch calls": "launch_ms",
    "GPU-busy: share of the step in which a kernel runs": "gpu_busy",
    "the same while it was profiled": "traced_gpu_busy",
    "utilisation, by the driver": "gpu_utilization",
    "MFU: share of the data sheet's arithmetic": "mfu",
}
rows = [(what, stock.metrics.get(name), theirs.get(name)) for what, name in questions.items()]
lab.table(("a step", "this machine", "H200 (full)"), *rows, otherwise=no_gpu)

# %% [markdown]
# **Takeaway.** *Utilisation* is what the driver says, *GPU-busy* is the share of the time in which kernels really ran, and
# *MFU* (model FLOPs utilisation) is the share of the card's arithmetic that was used. Only MFU knows what the card could
# do, and on the H200 it is a small part of the other two.

# %% [markdown]
# ## 7 · Who makes the host wait?
#
# **Question.** As long as the host runs ahead, the GPU has a queue of work. A *synchronisation* is a call that stops the
# host until the GPU has finished what was asked of it. By then the queue is empty, and the GPU idles until new work
# arrives. The usual case is reading a number from the GPU, as in `loss.item()`. Which lines of this loop do it?
#
# **Your prediction:** how many synchronisations are there in one optimizer step (four micro-steps) of the stock loop?

# %%
my_syncs: float | None = None  # a number

lab.predict("synchronisations in an optimizer step", my_syncs, "")

# %% [markdown]
# We ask two witnesses. A trace with Python stacks knows every CUDA call that waits, how long it took, and which functions
# it was called from, though of a function only the line where it begins. PyTorch's own alarm,
# `torch.cuda.set_sync_debug_mode`, knows the exact line, but not how long the wait took. Together they say:

# %%
sites = find_syncs(trainer)  # PyTorch's warnings; [] without a GPU
waits = stacked.waits if stacked.on_gpu else stacked.host_reads()
rows = with_lines(stacked.sync_table(waits), sites)


def table_of_waits(rows: list[dict]) -> pd.DataFrame:
    """Each place that waits: where, called by what, how often and how long a step."""
    names = {"library": "in", "per_step": "a step", "ms_per_step": "ms a step"}
    columns = ["phase", "where", "line", "library", "builtin", "cause", "call", *list(names)[1:]]
    table = pd.DataFrame(rows).reindex(columns=[*columns, "idle_ms_per_step"])
    table["by"] = table["builtin"].fillna(table["cause"]).fillna(table["call"])
    table["idle_ms_per_step"] = table["idle_ms_per_step"].replace(0, None)
    table = table.drop(columns=["builtin", "cause", "call"])
    return table.rename(columns=names | {"idle_ms_per_step": "then the GPU idles, ms"})


lab.table(table_of_waits(rows))

# %%
if stacked.on_gpu:
    warned = sum(site.count for site in sites)
    flush = stacked.idle_ms_in_function("writer.py", "flush")
    stock.metrics |= {"syncs": rows, "syncs_warned_of": warned, "flush_idle_ms": flush}
    lab.show(
        f"The trace counts {len(waits) / stacked.steps:g} waits a step, PyTorch's warnings {warned:g}."
    )
lab.keep(stock);

# %% [markdown]
# Where only the trace knows the place, the line is the one where the function begins.
#
# On a GPU, the last column is how long it took afterwards until the GPU had work again. Don't blame the wait alone for it:
# behind a copy in `data`, for example, the host decodes the next image.
#
# Without a GPU nothing waits. The table then lists the candidates, every read of a tensor's value by Python. Those of the
# loss would wait for a GPU. Those inside AdamW would not, because its step counters stay on the host.
#
# Our H200's table:

# %%
lab.table(table_of_waits(theirs.get("syncs", [])), otherwise=no_gpu)

# %% [markdown]
# ### Is it `clip_grad_norm_`?
#
# The article saw the GPU idle between the backward pass and the optimizer. In the trace the host was then in `accelerate`'s
# `clip_grad_norm_`, so the article concluded that clipping waits for the norm of the gradients. But the function that runs
# while the GPU is idle need not be the cause.
#
# There are other suspects. `GradScaler` (which fp16 needs) must know whether a gradient overflowed, and keeps that in
# `found_inf`. And the loop itself reads the loss twice with `.item()`. To wait for a number one has to read it. So we run
# each suspect alone, and count how often it reads a tensor's value.

# %%
layer = torch.nn.Linear(64, 64, device=lab.device)
sgd = torch.optim.SGD(layer.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(lab.device, init_scale=2.0)
clip_to_norm = torch.nn.utils.clip_grad_norm_


def reads(call) -> float:
    """How often one call of `call` reads a tensor's value, after a backward pass of a scaled loss."""

    def step() -> None:
        sgd.zero_grad()
        scaler.scale(layer(torch.ones(8, 64, device=lab.device)).sum()).backward()
        call()

    return len(
        profile(SimpleNamespace(step=step), steps=1, folder=traces, with_stack=False).host_reads()
    )


# %%
CLIP, SCALER = "`clip_grad_norm_(parameters, 1.0)`", "`scaler.step`, `scaler.update`"
suspects = {
    "nothing after the backward pass": lambda: None,
    CLIP: lambda: clip_to_norm(layer.parameters(), 1.0),
    "the same with `error_if_nonfinite=True`": lambda: clip_to_norm(
        layer.parameters(), 1.0, error_if_nonfinite=True
    ),
    "`scaler.unscale_`, which accelerate calls before it clips": lambda: (
        scaler.unscale_(sgd),
        scaler.update(),
    ),
    SCALER: lambda: (scaler.step(sgd), scaler.update()),
}
counted = {name: reads(call) for name, call in suspects.items()}
lab.table(("call", "values read"), *counted.items())

# %%
loss_reads = sum(read.phase == "log" for read in stacked.host_reads()) / stacked.steps
answer = (
    "Yes: the host waits for the norm"
    if counted[CLIP]
    else "No: the norm is computed and used on the device"
)
lab.show(
    f"**Is it `clip_grad_norm_`? {answer}.** In PyTorch {torch.__version__} it reads **{counted[CLIP]}** values. Others do, "
    f"in each optimizer step of four micro-steps: `GradScaler` **{counted[SCALER]}** (`found_inf`; with fp16, which takes "
    f"a GPU), and the loop's two `.item()` of the loss **{loss_reads:g}**."
)
lab.verdict("A1.left.clip-gap", "A1.left.clip-sync");

# %% [markdown]
# `clip_grad_norm_` reads a value only if it is asked to raise an error. `GradScaler.step` does have to know one: it skips
# the optimizer if any gradient overflowed, and decides that in Python, with `.item()`. It comes right after the clipping,
# so in a picture the two are neighbours.
#
# Is it then the scaler's read that makes the gap? Compare, phase by phase, how long the GPU idled with how long the host
# stood in a wait. (Without a GPU, only the first column is yours.)

# %%
stuck = {
    phase: sum(wait.ms for wait in trace.waits if wait.phase == phase) / trace.steps
    for phase in phases
}
if trace.on_gpu:
    stock.metrics |= {f"{phase}_wait_ms": stuck[phase] for phase in ("log", "clip", "optimizer")}
    lab.keep(stock)
rows = []
for phase in ("log", "clip", "optimizer"):
    h200 = (
        theirs.get("phases_ms", {}).get(phase),
        theirs.get(f"{phase}_idle_ms"),
        theirs.get(f"{phase}_wait_ms"),
    )
    wait_ms = stuck[phase] if trace.on_gpu else None
    rows.append((phase, phases[phase]["ms"], phases[phase].get("idle_ms"), wait_ms, *h200))
head = (
    "ms a step",
    "host",
    "GPU idle",
    "host in a wait",
    "H200: host",
    "H200: GPU idle",
    "H200: host in a wait",
)
lab.table(head, *rows)

# %% [markdown]
# On the H200 the GPU idled for milliseconds in *clip* and *optimizer*, while the host stood in a wait for almost none of
# that time. So no wait made the gap. The host was busy: it launched many small operations more slowly than the GPU works
# them off. A wait can only cost the lead that the host has over the GPU, and this host has none. The cure for such a gap is
# fewer launches, not fewer waits. (In lab 04 the host *is* ahead, and then the same read of one number stops everything.)
#
# ### A line that did nothing
#
# The clipping of the public script holds a surprise. Its parameters are a `filter` object, which is given first to the
# optimizer and later to the clipping. This toy does the same:

# %%
toy = torch.nn.Linear(8, 8)
trained = filter(lambda p: p.requires_grad, toy.parameters())
optimizer = torch.optim.AdamW(trained)  # goes through the filter once, to its end
(1e3 * toy(torch.ones(1, 8))).sum().backward()
through_filter = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
through_list = torch.nn.utils.clip_grad_norm_(list(toy.parameters()), 1.0).item()
lab.table(
    ("parameters given as", "norm found"),
    ("the used-up filter", through_filter),
    ("a list", through_list),
)

# %% [markdown]
# A `filter` object can be gone through only once. The optimizer has done so, and nothing is left for the clipping: it finds
# a norm of 0, without any warning. The published script never clips its gradients. Our stock recipe does clip, to the norm
# of 1 that the script asks for, because we follow the script's intention.
#
# **Takeaway.** A trace shows where the host *was* during a gap, and that need not be *why* the GPU had nothing to do. Test a
# suspect alone before you blame it.

# %% [markdown]
# ## 8 · What does logging cost?
#
# **Question.** The article's other open gap is TensorBoard's flush (writing what is buffered to the disk), and its cure is to
# log less often. How much does that bring?
#
# Logging here means two `.item()` in each micro-step, and one write and one flush in each optimizer step. With the recipe's
# knob `logging="ring-buffer"` the losses stay on the device and are written many steps later, so the host never waits for
# one.

# %%
recipes = {kind: STOCK.but(logging=kind) for kind in ("synchronous", "ring-buffer")}
trainer.close()
logging = compare(workload, recipes, steps=max(3, steps // 2), rounds=2)
for run in logging.values():
    run.tags |= {"experiment": "logging", "logging": run.recipe["logging"]}
lab.keep(logging)
fig, ax = plt.subplots()
plots.steps(ax, logging)
plt.show()
lab.verdict("A1.left.tensorboard", "A1.left.log-less");

# %% [markdown]
# If the two ranges overlap, as they do on the H200, then this measurement can't tell the two apart.
#
# **Takeaway.** A wait costs only what the GPU loses by it. As long as the GPU idles anyway, for lack of images or of
# launches, removing a wait gains nothing. Lab 04 comes back to the same waits when those limits are gone.

# %% [markdown]
# ## 9 · What the profiler itself costs
#
# **Question.** A profiler that writes down every operator, or even every Python call, takes time to do so. How far can you
# trust its times?

# %%
times = {
    "not profiled": beside["median"],
    "profiled": trace.wall_ms / trace.steps,
    "profiled, with Python stacks": stacked.wall_ms / stacked.steps,
}
h200 = [theirs.get(name) for name in ("step_ms", "traced_step_ms", "stacked_step_ms")]
h200[0] = reference.metric("step_ms") if reference else None
rows = [
    (*row, f"{row[1] / beside['median']:.2f}x", ms)
    for row, ms in zip(times.items(), h200, strict=True)
]
lab.table(("an optimizer step", "here, ms", "times the first", "H200, ms"), *rows)
if times["profiled"] <= beside["p90"]:
    lab.show(
        f"Unprofiled steps vary from {beside['p10']:.3g} to {beside['p90']:.3g} ms here (p10-p90), by more than profiling "
        "adds: its cost can't be told from the noise. On an idle machine it can."
    )
stock.metrics |= {"stacked_step_ms": times["profiled, with Python stacks"]}
lab.keep(stock);

# %% [markdown]
# The profiler's own work is done by the host. It leaves the durations of kernels as they are, but makes a loop that waits
# for its host look worse than it is.
#
# **Takeaway.** Trust what a trace says about kernels, about counts, and about what came after what. For times of the host,
# record without stacks; for shares of a step, correct as in section 5.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then times the two in turns, for
# as many rounds as it takes to decide.

# %%
import math

from labutils.course.exercises import faster_than, solved

# %% [markdown]
# **1. GPU-busy by hand.** `kernels` holds (start, end) of the kernels on two streams, in ms. The step lasted from 0 to 10 ms.
# For what share of it was the GPU busy? Kernels may overlap, and the last one runs on into the next step. (You may use
# `union`, `overlap` and `total`, imported above from `labutils.profiling.intervals`.)

# %% tags=["exercise"]
kernels = [(0.5, 2.0), (1.5, 3.0), (4.0, 4.5), (4.2, 4.4), (8.0, 11.0), (2.9, 3.5)]
my_busy: float | None = None  # 0 to 1


def check_busy(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_busy first."
    if not 0 <= answer <= 1:
        return f"Exercise 1: not yet. {answer:g} is not a share; a share lies between 0 and 1."
    cells = {n for start, end in kernels for n in range(round(start * 10), round(end * 10))} & set(
        range(100)
    )
    if abs(answer - sum(end - start for start, end in kernels) / 10) < 1e-6:
        return "Exercise 1: not yet. That counts overlaps twice."
    if abs(answer - len(cells) / 100) > 1e-6:
        return f"Exercise 1: not yet. It is not {answer:.3f}. Count overlaps once, and nothing after 10 ms."
    return f"Exercise 1: right: {100 * answer:.0f} %."


print(check_busy(my_busy))

# %% tags=["solution"]
solved(check_busy(total(overlap(union(kernels), [(0, 10)])) / 10))

# %% [markdown]
# **2. What is there to gain?** Suppose that worker processes had every image ready in time, so that no part of the step is
# lost to data, and nothing else changes. How many times faster can *your* step get? The measured share is
# `stock.metrics["data_share"]`. (Lab 03 finds out how much of it you really get.)

# %% tags=["exercise"]
my_speedup: float | None = None


def check_speedup(answer) -> str:
    if answer is None:
        return "Exercise 2: set my_speedup first."
    step = stock.metric("step_ms")
    lost = step * stock.metrics["data_share"]
    if abs(answer - step / (step - lost)) > 0.02 * abs(answer):
        return f"Exercise 2: not yet. Of {step:.4g} ms, {lost:.4g} go to data. What is left?"
    return f"Exercise 2: right: {answer:.2f} times, from {step:.4g} to {step - lost:.4g} ms."


print(check_speedup(my_speedup))

# %% tags=["solution"]
solved(check_speedup(1 / (1 - stock.metrics["data_share"])))

# %% [markdown]
# **3. Read once.** `noisy_loop` reads the loss after every micro-step. Write `quiet_loop`, which returns the same mean but
# reads a value from the device only once. The check profiles both and counts the reads.

# %%
inputs = [torch.full((4, 64), float(n), device=lab.device) for n in range(4)]


def noisy_loop() -> float:
    seen = 0.0
    for x in inputs:
        loss = layer(x).square().mean()
        seen += loss.item()
    return seen / len(inputs)


# %% tags=["exercise"]
def quiet_loop() -> float | None:
    return None  # your code


def check_loop(loop) -> str:
    if loop() is None:
        return "Exercise 3: fill in quiet_loop first."
    if abs(loop() - noisy_loop()) > 1e-4 * noisy_loop():
        return "Exercise 3: not yet. It returns another mean than noisy_loop."
    counts = []
    for body in (noisy_loop, loop):
        recorded = profile(SimpleNamespace(step=body), steps=1, folder=traces, with_stack=False)
        counts.append(len(recorded.host_reads()))
    if counts[1] != 1:
        return f"Exercise 3: not yet. It reads {counts[1]} values; noisy_loop reads {counts[0]}."
    return f"Exercise 3: right: {counts[0]} reads have become 1."


print(check_loop(quiet_loop))


# %% tags=["solution"]
def quiet_loop_solution() -> float:
    seen = torch.zeros((), device=lab.device)
    for x in inputs:
        seen += layer(x).square().mean().detach()
    return seen.item() / len(inputs)


solved(check_loop(quiet_loop_solution))

# %% [markdown]
# **4. Make it faster.** Somebody wrote this step in a hurry. Find out what it spends its time on (with `profile`, as in the
# check above, or by reading), and compute the same loss and the same gradient at least three times as fast.

# %% tags=["exercise"]
POSITIONS = 48


def hurried_step(x):
    """x [8, 48, 64] -> the loss, and the gradient of `layer`'s weight"""
    table = [
        [math.sin(at / 10_000 ** (column / 64)) for column in range(64)] for at in range(POSITIONS)
    ]
    hidden = layer(x + torch.tensor(table, device=x.device))
    norms = [row.norm().item() for row in hidden.flatten(0, 1)]
    assert all(math.isfinite(norm) for norm in norms), "NaN or Inf"
    loss = hidden.square().mean()
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, layer.weight)[0]}


def calm_step(x):
    return hurried_step(x)  # your code instead; what never changes may be made once, outside


def hidden_states(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(8, POSITIONS, layer.in_features, device=lab.device),)


print(faster_than(4, hurried_step, calm_step, hidden_states, times=3))

# %% tags=["solution"]
TABLE = [
    [math.sin(at / 10_000 ** (column / 64)) for column in range(64)] for at in range(POSITIONS)
]
TABLE = torch.tensor(TABLE, device=lab.device)


def calm_step_solution(x):
    hidden = layer(x + TABLE)
    loss = hidden.square().mean()
    assert loss.isfinite(), "NaN or Inf"  # one read; any NaN in it makes the mean one
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, layer.weight)[0]}


solved(faster_than(4, hurried_step, calm_step_solution, hidden_states, times=3))

# %% [markdown]
# ## Where this comes from, and what to read on
# - The script of this lab: `examples/text_to_image/train_text_to_image_lora.py` of [Hugging Face's
#   diffusers](https://github.com/huggingface/diffusers/tree/main/examples/text_to_image).
# - PyTorch: *[Profiler recipe](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html)*, and the
#   documentation of [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html).
# - PyTorch: *[Performance Tuning Guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)*, which also
#   says how to avoid synchronisations; and
#   *[Automatic Mixed Precision](https://docs.pytorch.org/docs/stable/amp.html)* on `GradScaler`.
# - [Perfetto](https://perfetto.dev/docs/), the viewer for traces.
# - A. Chowdhery and others: *[PaLM: Scaling Language Modeling with Pathways](https://arxiv.org/abs/2204.02311)*, 2022.
#   Introduces MFU, in its section on training efficiency.
# - The course's [glossary](../docs/glossary.md). And `labutils diagnose` does what this lab did to any script of yours.

# %% [markdown]
# ## What you did
# - You took a step of the public script apart, phase by phase, with sizes and dtypes.
# - You recorded a profile with the article's schedule and read it, in a viewer or without.
# - You saw utilisation, GPU-busy and MFU of the same step, and know what each one leaves out.
# - You divided a step among data, host, launches, copies, kernels and waits, and the parts added up.
# - You listed the lines that make the host wait, from a trace and from PyTorch's own warnings.
# - You tested what the article says about `clip_grad_norm_`, and found a line of the script that does nothing.
#
# Next: lab 03, which takes the images off the training process's hands.

# %%
measured = {
    "time of an optimizer step": stock.metric("step_ms"),
    "utilisation": 100 * watched.share if watched.share is not None else None,
    "share of the step lost to data": 100 * stock.metrics["data_share"],
    "synchronisations in an optimizer step": stock.metrics.get(
        "syncs_per_step", theirs.get("syncs_per_step")
    ),
}
lab.done(measured)
