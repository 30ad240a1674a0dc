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
# Article A1 runs a public LoRA training script as downloaded and finds the GPU busy for less than half of the time. It
# profiles the script, names two bottlenecks, removes them, and leaves two gaps open, with a cause for each. This lab
# repeats the diagnosis on your machine, and then checks the causes: a profile shows *when* the GPU waits, and it is
# easy to blame the wrong line for it.
#
# **After this lab you can**
# - say what one step of this training consists of, down to sizes and dtypes;
# - record a profile of a few steps, open it in a viewer, and read it without a viewer;
# - tell apart what `nvidia-smi` calls utilisation, how long kernels really ran, and what the host did meanwhile;
# - divide every millisecond of a step among data, host, launches, copies, kernels and waits, so that they add up;
# - list the lines of a program that make the host wait for the GPU, in two independent ways;
# - test a published attribution instead of believing it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 2 minutes |
# | `full` | a GPU of 40 GB | 4 minutes |
#
# Without a GPU there are no kernels and no waits for them. The same cells then show what the host does, which is half of
# the story, with our H200's numbers beside.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps that each measurement times; 0: 4 at tiny, 8 at larger scales

# %%
from labutils.course import open_lab

lab = open_lab("02", globals())

# %%
import shutil
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch

from labutils import plots
from labutils.adapters import count_parameters, count_trainable
from labutils.measure.intervals import overlap, total, union
from labutils.measure.syncs import find_syncs, with_lines
from labutils.measure.trace import SHARES, profile
from labutils.measure.utilization import Utilization
from labutils.recipe import STOCK
from labutils.results import summarise
from labutils.tables import WAITS, wait_rows
from labutils.training import Session, compare, measure, train

# %%
plots.use_style()
on_gpu = lab.device == "cuda"
steps = steps or (4 if lab.scale == "tiny" else 8)
traces = lab.cache_dir / "traces" / "lab-02"  # large files: those of the last time make room
shutil.rmtree(traces, ignore_errors=True)
reference = lab.reference("stock")  # our H200's run of this lab
theirs = reference.metrics if reference else {}
no_gpu = "*No GPU work was recorded here, and no H200 run of this lab is on file to show instead.*"
if on_gpu:
    no_gpu = "*No H200 run of this lab is on file to compare with.*"

# %% [markdown]
# ## 1 · What a step consists of
#
# **Question.** What exactly is it that we are about to profile?
#
# The recipe `STOCK` is the public diffusers script with the article's arguments: 512 × 512 pixels, one image at a time,
# gradients accumulated over four of them, rank 4, fp16. An *optimizer step* is therefore four *micro-steps*, and this is
# what each of them does at scale `full`:
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
# These phase names are marks (`torch.profiler.record_function`) in the course's training loop, so that every profile
# shows them. At this scale:

# %%
workload = lab.workload("sd15-lora")
session = Session(workload, STOCK)
batch = next(session.batches)
pixels, unet = batch["pixel_values"], session.model.unet
trained = count_trainable(unet)
lab.table(
    ("this lab", f"scale {lab.scale}"),
    ("pixels of a micro-batch", f"{list(pixels.shape)}, {pixels.dtype}, {pixels.nbytes / 1e6:.2g} MB"),
    ("tokens of a micro-batch", f"{list(batch['input_ids'].shape)}, {batch['input_ids'].dtype}"),
    ("UNet", f"{(count_parameters(unet) - trained) / 1e6:.1f} M parameters frozen, {trained / 1e6:.2f} M trained"),
    ("precision", session.recipe.precision),  # a CPU has no fp16 matrix units; there it is fp32
    ("arithmetic of an optimizer step", f"{workload.work(session.recipe).flops / 1e9:,.4g} GFLOP"),
)

# %% [markdown]
# ## 2 · How long does a step take?
#
# **Question.** The article gives 290 ms "a step" on its card, and does not say whether it means a micro-step or an
# optimizer step. We always mean an optimizer step: four images.
#
# **Your prediction:** how many milliseconds does one take on your machine?

# %%
my_step_ms: float | None = None  # for example 500

lab.predict("time of an optimizer step", my_step_ms, "ms")

# %%
stock = train(workload, STOCK, steps=steps, name="stock")
lab.keep(stock)
fig, ax = plt.subplots()
plots.steps(ax, {"stock": stock} | ({"stock, H200 (full)": reference} if reference else {}))
plt.show()
lab.verdict("A1.stock.step-ms");

# %% [markdown]
# **Takeaway.** Report a median with its spread, and keep the first step apart: it pays for loading kernels, choosing
# convolution algorithms and filling caches. A single mean over a run mixes all of these.

# %% [markdown]
# ## 3 · Utilisation over time
#
# **Question.** The article watched `nvitop` and read 44 % on average. `nvitop` and `nvidia-smi` ask the driver, which
# answers with the share of its last sampling period in which *any* kernel was running.
#
# **Your prediction:** mean utilisation of the GPU (without one: of the CPU cores) during stock steps, in %?

# %%
my_utilization: float | None = None  # 0 to 100

lab.predict("utilisation", my_utilization, "%")

# %%
measure(session, 2)  # warm up
with Utilization(interval_s=0.05) as watched:
    measure(session, steps)
stock.metrics |= watched.metrics()
stock.samples["utilization"] = [round(value, 3) for value in watched.series(watched.what)[1]]
lab.keep(stock);

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.6))
when, values = watched.series(watched.what)
what = "GPU" if on_gpu else "CPU, this process's share of its cores"
# A reading speaks of the time since the one before it: the first and the last, of an instant, are left out.
plots.utilisation(ax, when[:-2], values[1:-1], what, watched.driver_samples)
plt.show()
changes = sum(before != after for before, after in zip(values, values[1:], strict=False))
said = f"{len(values)} readings in {when[-1]:.1f} s, of which {changes} brought a new number."
buffer = f" The driver's own buffer of samples (dots) has {len(watched.driver_samples)} for the same time."
lab.show(said + (buffer if on_gpu else " They are of the CPU: without a GPU there is no driver to ask."))
lab.verdict("A1.stock.utilization");

# %% [markdown]
# **Takeaway.** Utilisation says how often the GPU was not idle, not how well it was used: a single small kernel that runs
# all the time reads 100 %. The driver renews the number only a few times a second, so asking more often returns the same
# reading again, and nothing of what happens inside a step can be seen in it. For that we need a trace.

# %% [markdown]
# ## 4 · A profile, with the article's schedule
#
# **Question.** What does `torch.profiler` record, and how much of it?
#
# The article calls `prof.step()` once per iteration with `schedule(wait=1, warmup=1, active=5, repeat=1)`: one iteration
# passed over, one to warm the profiler up, five recorded. Its iteration is a micro-step, so its five hold one whole
# optimizer step and a quarter of the next. Ours is an optimizer step, so that each recorded step is complete.

# %%
beside = summarise(measure(session, steps).step_ms)  # unprofiled, just before: section 9 compares
trace = profile(session, steps=5, folder=traces, with_stack=False)
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
lanes = {name: blocks for name, blocks in trace.timeline().items() if name in ("host", "host waits")}
fig, axes = plt.subplots(1 + trace.on_gpu, sharex=True, squeeze=False, figsize=(7.2, 3 + 1.5 * trace.on_gpu))
plots.timeline(axes[0, 0], lanes, most=7)
axes[0, 0].set_title("One optimizer step")
if trace.on_gpu:
    plots.utilisation(axes[1, 0], *trace.busy_over_time(), label="kernels running")
    axes[1, 0].set_xlabel("ms")
plt.show()
lab.verdict("A1.profiler.five-steps");

# %% [markdown]
# This is the file, drawn without a viewer: one recorded step, with what the host was doing, and on a GPU, below it, how
# much of the time kernels ran. Find the four micro-steps, and what the host does where few kernels run.
#
# Thousands of kernels (or, without a GPU, of operators) don't fit a picture of a whole step. Two closer looks: a moment in
# the middle of a forward pass, and the end of the step, where the article saw a gap that it could not explain away.

# %%
forward = trace.phase_time["forward"][1]
middle = sum(forward) / 2
clip = trace.phase_time["clip"][0]
end = next((t for _, t in trace.phase_time["optimizer"] if t > clip[1]), clip[1])
margin = (end - clip[0]) / 2
closer = {
    "Inside a forward pass": (middle, middle + (2 if on_gpu else 1)),
    "Around clipping and the optimizer": (clip[0] - margin, end + margin),
}
for title, window in closer.items():
    fig, ax = plt.subplots()
    plots.timeline(ax, trace.timeline(window), most=7 if on_gpu else 5)
    ax.set_title(title)
    plt.show()

# %% [markdown]
# ## 5 · Where each millisecond goes
#
# **Question.** The article sorts what it sees into four kinds: host processing, data transfer, launches and returns,
# kernels. Can we give *every* millisecond to exactly one of them?
#
# Each moment of the recorded time belongs to the first of these that applies: a *kernel* runs; a *copy* runs; and, with
# the GPU idle, the host waits for *data*, waits in a *sync*, is inside a *launch* call, or does anything else (*host*:
# Python, the dispatcher, autograd). So they add up to the step. (Without a GPU two are left, *data* and *host*.)
#
# One correction. The profiler's own work makes the host slower and leaves GPU work as it is (section 9), so a profiled
# step shows too little GPU and too much host. The second bar is our estimate of the step that nobody watched: GPU work as
# recorded, the wait for data as section 2 timed it, and the rest in the recorded proportions.
#
# **Your prediction:** in what share of the step is the GPU idle because the next image isn't ready, in %?

# %%
my_data_share: float | None = None  # 0 to 100

lab.predict("share of the step lost to data", my_data_share, "%")

# %%
parts = {
    "as profiled": trace.partition(),
    "not profiled": trace.partition(stock.metric("step_ms"), stock.metric("data_ms")),
}
shares = {bar: {name: 100 * ms / sum(part.values()) for name, ms in part.items()} for bar, part in parts.items()}
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
    ("phase", "times a step", "host ms a step", "of which the GPU idles", "H200: host ms", "of which idle"), *rows
)
lab.verdict("A1.overheads.four", "A1.overheads.host", "A1.stock.data", "A1.stock.launches");

# %% [markdown]
# **Takeaway.** Two columns, two questions. *Host ms* says where the program spends its time, *idle* (a GPU's column) what
# that costs the GPU: the two work at the same time, so a phase with much of the first and none of the second needs no
# tuning.
#
# The same idle time, gap by gap: what did the host do for most of each one, and had a synchronisation just let the queue
# of launched work run empty?

# %%
gaps = trace.gaps()
by_cause = {}
for cause in ("data", "host", "launch", "sync"):
    mine = [gap for gap in gaps if gap.cause == cause]
    drained = [gap for gap in mine if gap.after_sync]
    by_cause[cause] = [n / trace.steps for n in (len(mine), sum(g.ms for g in mine), sum(g.ms for g in drained))]
if gaps:
    stock.metrics |= {"gaps": by_cause}
rows = by_cause if gaps else theirs.get("gaps", {})
head = "host in the gap" if gaps else "H200: host in the gap"
rows = [(cause, *row) for cause, row in rows.items()]
lab.table((head, "gaps a step", "ms a step", "of which after a wait"), *rows, otherwise=no_gpu)

# %% [markdown]
# ## 6 · What the kernels do
#
# **Question.** The article's second bottleneck is Python between "many tiny submodules". How many kernels is that, how
# long is one, and how long does it take to launch one?

# %%
stacked = profile(session, steps=1, folder=traces, with_stack=True)
kinds = stacked.categories()
stock.metrics |= {"categories_ms": {name: row["ms"] for name, row in kinds.items()}}
rows = [
    (name, row["count"], row["ms"], 1e3 * row["ms"] / row["count"], theirs.get("categories_ms", {}).get(name))
    for name, row in kinds.items()
]
what = "kernels" if stacked.on_gpu else "operators (own time)"
lab.table((what, "count a step", "ms a step", "µs each", "H200: ms a step"), *rows)

# %%
questions = {
    "kernels": "kernels_per_step",
    "launch calls": "launches_per_step",
    "ms inside launch calls": "launch_ms",
    "GPU busy: a kernel runs, share of the step": "gpu_busy",
    "the same while it was profiled": "traced_gpu_busy",
    "utilisation as the driver says it": "gpu_utilization",
    "share of the data sheet's arithmetic (MFU)": "mfu",
}
rows = [(what, stock.metrics.get(name), theirs.get(name)) for what, name in questions.items()]
lab.table(("a step", "this machine", "H200 (full)"), *rows, otherwise=no_gpu)

# %% [markdown]
# *Thin GEMM* are the products with LoRA's narrow matrices: few operations, and a launch each. *Casts and layout* is what
# autocast and changes between memory layouts cost. *foreach* are PyTorch's kernels over many small tensors at once, which
# unscale gradients, clip them and update parameters. (Without a GPU these are PyTorch's operators, each without the time
# of those that it calls.)
#
# **Takeaway.** A GPU has three measures of one step: the driver's utilisation, the share of the time in which kernels ran, and the
# share of the card's arithmetic that was used. Only the last one knows what the card could do.

# %% [markdown]
# ## 7 · Who makes the host wait?
#
# **Question.** As long as the host runs ahead, the GPU has a queue of work. A synchronisation stops the host until the
# queue is empty, and then the GPU idles until new work arrives. Which lines do that?
#
# **Your prediction:** how many synchronisations are there in one optimizer step (four micro-steps) of the stock loop?

# %%
my_syncs: float | None = None  # a number

lab.predict("synchronisations in an optimizer step", my_syncs, "")

# %% [markdown]
# Two witnesses. The trace with Python stacks knows each waiting CUDA call, how long it took, the operator and the Python
# functions around it, but of a function only where it begins. PyTorch's own alarm, `torch.cuda.set_sync_debug_mode`,
# knows the very line, but not how long. Put together:

# %%
sites = find_syncs(session)  # PyTorch's warnings; [] without a GPU
waits = stacked.waits if stacked.on_gpu else stacked.host_reads()
rows = with_lines(stacked.sync_table(waits), sites)

lab.table(WAITS, *wait_rows(rows))

# %%
if stacked.on_gpu:
    warned = sum(site.count for site in sites)
    flush = stacked.idle_ms_in(stacked.python_time("writer.py", "flush"))
    stock.metrics |= {"syncs": rows, "syncs_warned_of": warned, "flush_idle_ms": flush}
    lab.show(f"The trace counts {len(waits) / stacked.steps:g} waits a step, PyTorch's warnings {warned:g}.")
lab.keep(stock);

# %% [markdown]
# Without a GPU the table lists every time that Python read a tensor's value: the candidates. Those of the loss would wait
# for a GPU; those inside AdamW read step counters, which stay on the host, and would not. The number in brackets is the
# line, or, where only the trace knows the place, the line where the function begins.
#
# On a GPU the last column is how long it took until the GPU had work again. It is not the wait's fault alone: behind a
# copy in `data` the host decodes the next image. Next, the same table from our H200.

# %%
lab.table(("H200: phase", *WAITS[1:]), *wait_rows(theirs.get("syncs", [])), otherwise=no_gpu)

# %% [markdown]
# ### Is it `clip_grad_norm_`?
#
# The article saw the GPU idle between backward pass and optimizer, found the host in `accelerate`'s `clip_grad_norm_`,
# and concluded that clipping waits for the norm. But whoever runs while the GPU is idle need not be the cause. There are
# other suspects: `GradScaler`, which must know whether a gradient overflowed (`found_inf`), and the loop's own two
# `.item()`. To wait for a number one has to read it; so ask each suspect alone how often it reads a tensor's value.

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

    return len(profile(SimpleNamespace(step=step), steps=1, folder=traces, with_stack=False).host_reads())


# %%
CLIP, SCALER = "`clip_grad_norm_(parameters, 1.0)`", "`scaler.step`, `scaler.update`"
suspects = {
    "nothing after the backward pass": lambda: None,
    CLIP: lambda: clip_to_norm(layer.parameters(), 1.0),
    "the same with `error_if_nonfinite=True`": lambda: clip_to_norm(layer.parameters(), 1.0, error_if_nonfinite=True),
    "`scaler.unscale_`, which accelerate calls before it clips": lambda: (scaler.unscale_(sgd), scaler.update()),
    SCALER: lambda: (scaler.step(sgd), scaler.update()),
}
counted = {name: reads(call) for name, call in suspects.items()}
lab.table(("call", "values read"), *counted.items())

# %%
loss_reads = sum(read.phase == "log" for read in stacked.host_reads()) / stacked.steps
answer = "Yes: the host waits for the norm" if counted[CLIP] else "No: the norm is computed and used on the device"
lab.show(
    f"**Is it `clip_grad_norm_`? {answer}.** In PyTorch {torch.__version__} it reads **{counted[CLIP]}** values. Others do, "
    f"in each optimizer step of four micro-steps: `GradScaler` **{counted[SCALER]}** (`found_inf`; with fp16, which takes "
    f"a GPU), and the loop's two `.item()` of the loss **{loss_reads:g}**."
)
lab.verdict("A1.left.clip-gap", "A1.left.clip-sync");

# %% [markdown]
# `clip_grad_norm_` reads a value only when asked to raise an error. What must know a value on the host is
# `GradScaler.step`: it skips the optimizer if any gradient overflowed, and decides that in Python, with `.item()`, right
# behind the clipping; in a picture the two are neighbours. And twice in every micro-step, the loop itself reads the loss.
#
# So is it the scaler's read that makes the gap? Compare, in the phases concerned, how long the GPU idled with how long
# the host stood in a wait. (Without a GPU only the host's time is left of the table.)

# %%
stuck = {phase: sum(wait.ms for wait in trace.waits if wait.phase == phase) / trace.steps for phase in phases}
if trace.on_gpu:
    stock.metrics |= {f"{phase}_wait_ms": stuck[phase] for phase in ("log", "clip", "optimizer")}
    lab.keep(stock)
rows = []
for phase in ("log", "clip", "optimizer"):
    h200 = theirs.get("phases_ms", {}).get(phase), theirs.get(f"{phase}_idle_ms"), theirs.get(f"{phase}_wait_ms")
    wait_ms = stuck[phase] if trace.on_gpu else None
    rows.append((phase, phases[phase]["ms"], phases[phase].get("idle_ms"), wait_ms, *h200))
lab.table(("phase", "host ms a step", "GPU idle", "host in a wait", "H200: host ms", "GPU idle", "in a wait"), *rows)

# %% [markdown]
# Where the idle time is long and the wait short, the host was not held up: it was busy itself, launching many small
# operations more slowly than the GPU works them off. A wait can only cost what the host would otherwise be ahead, and a
# loop like this one is not ahead. The cure for such a gap is fewer launches, not fewer waits. (When the host *is* ahead,
# in lab 04, the same read of one number stops everything.)
#
# ### A line that did nothing
#
# There is more to it. In the public script the parameters to train are a `filter` object, handed first to the optimizer
# and later to the clipping. A toy of ours does the same:

# %%
toy = torch.nn.Linear(8, 8)
trained = filter(lambda p: p.requires_grad, toy.parameters())
optimizer = torch.optim.AdamW(trained)  # goes through the filter once, to its end
(1e3 * toy(torch.ones(1, 8))).sum().backward()
through_filter = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
through_list = torch.nn.utils.clip_grad_norm_(list(toy.parameters()), 1.0).item()
lab.table(("parameters given as", "norm found"), ("the used-up filter", through_filter), ("a list", through_list))

# %% [markdown]
# A `filter` can be gone through once. The optimizer did, so the clipping is given nothing, finds a norm of 0, and warns of
# nothing either. The published script never clips. Our stock recipe does, with the norm of 1 that the script asks for:
# here we follow its intention rather than its letter.
#
# **Takeaway.** The place where a gap shows is where the host *was*, not why the GPU had nothing to do. Look for the last
# wait before the gap.

# %% [markdown]
# ## 8 · What does logging cost?
#
# **Question.** The article's other open gap is TensorBoard's flush; its cure is to log less often. Logging here is three
# things: two `.item()` a micro-step, one write, one flush. The recipe's knob `logging="ring-buffer"` keeps the losses on
# the device and writes them many steps later, so the host never waits for one.

# %%
recipes = {"logging=synchronous": STOCK, "logging=ring-buffer": STOCK.but(logging="ring-buffer")}
session.close()
logging = lab.keep(compare(workload, recipes, steps=max(3, steps // 2), rounds=2))
fig, ax = plt.subplots()
plots.steps(ax, logging)
plt.show()
lab.verdict("A1.left.tensorboard", "A1.left.log-less");

# %% [markdown]
# **Takeaway.** A wait costs what the GPU loses by it. While the GPU idles for want of data or launches anyway, the host
# has no lead that a wait could take from it. Labs 03 and 04 remove those limits; measure the same change again there.

# %% [markdown]
# ## 9 · What the profiler itself costs
#
# **Question.** A profiler that writes down every Python call takes time to do so. How far can its times be trusted?

# %%
times = {
    "not profiled": beside["median"],
    "profiled": trace.wall_ms / trace.steps,
    "profiled, with Python stacks": stacked.wall_ms / stacked.steps,
}
lab.table(("optimizer step", "ms", "times the first"), *((k, ms, ms / beside["median"]) for k, ms in times.items()))
if times["profiled"] <= beside["p90"]:
    lab.show(
        f"Unprofiled steps vary from {beside['p10']:.3g} to {beside['p90']:.3g} ms here (p10-p90), by more than profiling "
        "adds: its cost can't be told from the noise. On an idle machine it can."
    )
stock.metrics |= {"stacked_step_ms": times["profiled, with Python stacks"]}
lab.keep(stock);

# %% [markdown]
# The profiler's own work is host work. It makes a loop that waits for its host look worse than it is, and leaves kernels'
# durations as they are. So trust what a trace says about kernels, counts and causes; take times of the host without stacks,
# and shares of the step only after the correction of section 5.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
import math

from labutils.exercises import faster_than, solved

# %% [markdown]
# **1.** GPU-busy by hand. `kernels` are (start, end) of kernels on two streams, in ms; the step took 10 ms. For what share
# of it was the GPU busy? Mind the overlaps. (`union`, `overlap` and `total` from `labutils.measure.intervals` are here.)

# %% tags=["exercise"]
kernels = [(0.5, 2.0), (1.5, 3.0), (4.0, 4.5), (4.2, 4.4), (8.0, 11.0), (2.9, 3.5)]
my_busy: float | None = None  # 0 to 1


def check_busy(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_busy first."
    if not 0 <= answer <= 1:
        return f"Exercise 1: {answer:g} is no share: it lies between 0 and 1."
    cells = {n for start, end in kernels for n in range(round(start * 10), round(end * 10))} & set(range(100))
    if abs(answer - sum(end - start for start, end in kernels) / 10) < 1e-6:
        return "Exercise 1: not yet. That counts overlaps twice."
    if abs(answer - len(cells) / 100) > 1e-6:
        return f"Exercise 1: not yet. Not {answer:.3f}. What lies behind 10 ms is not of this step."
    return f"Exercise 1: right: {100 * answer:.0f} %."


print(check_busy(my_busy))

# %% tags=["solution"]
solved(check_busy(total(overlap(union(kernels), [(0, 10)])) / 10))

# %% [markdown]
# **2.** Suppose that worker processes prepared every image in time, so that no moment of the step were lost to data, and
# nothing else changed. How many times faster would *your* step be, at most? Use the measured `data_share`. (Lab 03
# finds out how much of it you really get.)

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
# **3.** This loop reads the loss after every micro-step. Rewrite it as `quiet_loop`, so that it returns the same mean but
# reads a value from the device only once. The check profiles both.

# %% tags=["exercise"]
inputs = [torch.full((4, 64), float(n), device=lab.device) for n in range(4)]


def noisy_loop() -> float:
    seen = 0.0
    for x in inputs:
        loss = layer(x).square().mean()
        seen += loss.item()
    return seen / len(inputs)


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
# **4. Make it faster.** A step that somebody wrote in a hurry. Find out what it spends its time on (`profile` as above, or
# by reading), and get the same loss and the same gradient three times as fast.

# %% tags=["exercise"]
POSITIONS = 48


def hurried_step(x):
    """x [8, 48, 64] -> the loss, and the gradient of `layer`'s weight"""
    table = [[math.sin(at / 10_000 ** (column / 64)) for column in range(64)] for at in range(POSITIONS)]
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
TABLE = [[math.sin(at / 10_000 ** (column / 64)) for column in range(64)] for at in range(POSITIONS)]
TABLE = torch.tensor(TABLE, device=lab.device)


def calm_step_solution(x):
    hidden = layer(x + TABLE)
    loss = hidden.square().mean()
    assert loss.isfinite(), "NaN or Inf"  # one read; any NaN in it makes the mean one
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, layer.weight)[0]}


solved(faster_than(4, hurried_step, calm_step_solution, hidden_states, times=3))

# %% [markdown]
# ## What you did
# - You took a step of the public script apart, phase by phase, with sizes and dtypes.
# - You recorded a profile with the article's schedule and read it, in a viewer or without.
# - You saw utilisation, GPU-busy and MFU of the same step, and know what each one leaves out.
# - You divided the step's time among data, host, launches, copies, kernels and waits, and it added up.
# - You listed the lines that make the host wait, from a trace and from PyTorch's own warnings.
# - You tested what the article said about `clip_grad_norm_`, and found a line of the script that did nothing.

# %%
measured = {
    "time of an optimizer step": stock.metric("step_ms"),
    "utilisation": 100 * watched.share if watched.share is not None else None,
    "share of the step lost to data": 100 * stock.metrics["data_share"],
    "synchronisations in an optimizer step": stock.metrics.get("syncs_per_step", theirs.get("syncs_per_step")),
}
lab.done(measured)
