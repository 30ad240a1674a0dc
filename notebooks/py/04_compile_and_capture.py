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
# # Lab 04 · Compile and capture
#
# Lab 02 found the stock loop waiting for the host, and lab 03 took the images off its hands. Article A1 goes on with
# `torch.compile` and pinned memory and ends 2.96 times faster than it began. This lab climbs the same rungs, finds out
# what each is worth here, and then keeps climbing: first doing the same work with less host, then doing less work for the
# same mathematics. At the end stands a picture of the whole climb, from the stock loop down to what the hardware allows.
#
# **After this lab you can**
# - say what `torch.compile` buys, what its first step costs, and after how many steps it has paid for itself;
# - tell the difference between fewer kernels (compiling) and cheaper launches (capturing a CUDA graph);
# - remove a synchronisation from a training loop, and keep its log;
# - capture a whole optimizer step, gradient accumulation included, without wrong gradients;
# - tell an optimisation that does the same work from one that does other work with the same result, and test both.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU with a C++ compiler | 2 minutes |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 40 GB | 8 minutes, most of it compiling |
#
# With random weights every time and every byte is the real model's; the losses are not, and nothing below concludes
# anything from a loss value. On a CPU there are no kernel launches to save: there the lab shows which rungs are the
# GPU's alone, measures the others, and puts our H200's numbers beside them.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 3 at larger scales
rounds: int = 0  # times round the whole ladder at the end; 0: 1 at tiny, 2 at larger scales

# %%
from labutils.course import NotHere, open_lab

lab = open_lab("04", globals())

# %%
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import torch

from labutils import plots
from labutils.hardware import usable_cores
from labutils.recipe import A1_LADDER, STOCK, climb, distinct_on
from labutils.results import Run
from labutils.training import Bench, compile_ahead, try_isolated
from labutils.trials import rung_rows

plots.use_style()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")  # so that a first step is one
on_gpu = lab.device == "cuda"
steps, rounds = steps or (2 if lab.scale == "tiny" else 3), rounds or (1 if lab.scale == "tiny" else 2)
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))  # one half trains, the other is left to the workers
workload = lab.workload("sd15-lora")
bench = Bench(workload)

# %% [markdown]
# ## The ladder
#
# Each rung is the one below it with one thing changed (two, where neither works without the other). The lanes matter more
# than the rungs. In lane **article** stand the article's own steps. In **same work** every image still goes through every
# network each time, one by one, four to an optimizer step, in the same precision; only who drives it changes. In **same
# mathematics** the computation itself changes, and the distribution of the gradients does not.

# %%
recipes = climb(A1_LADDER)
if not on_gpu:
    # Compiling all of the UNet takes over a minute on two cores: here one rung compiles its repeated blocks. Workers
    # beyond the cores would only get in the way.
    cores = usable_cores()
    recipes = {
        name: r.but(
            compile="default" if name == "compile" else "off",
            compile_scope="blocks",
            num_workers=min(r.num_workers, cores),
        )
        for name, r in recipes.items()
    }
lanes = {rung.name: rung.lane for rung in A1_LADDER}
climbable = distinct_on(lab.device, recipes)
lab.table(("rung", "lane", "changes", "why", "here"), *rung_rows(A1_LADDER, climbable))


# %%
def of_lane(*names: str) -> dict:
    """The rungs of the named lanes that this machine can tell apart."""
    return {name: recipe for name, recipe in climbable.items() if lanes[name] in names}


def keep(runs: dict[str, Run]) -> None:
    """Keep each rung's run under its lane, and what this machine can't tell apart as skipped."""
    for name, run in runs.items():
        lab.keep(run, lane=lanes.get(name, "article"))


for name in recipes.keys() - climbable.keys():
    lab.keep(Run("04", name, lane=lanes[name], status="skipped: on a CPU this rung is no different from one below it"))

# %% [markdown]
# ## 1 · The article's rungs
#
# **Question.** The article goes from 290 to 98 ms: workers 2.06×, compilation 1.38×, pinned memory 1.04×. (Whether its
# step is a micro-step or an optimizer step, of four, it doesn't say: lab 02 compares. Ratios don't mind.) What are the
# same three steps worth here?
#
# A compiled region is traced once by Dynamo, fused by Inductor into fewer and larger kernels, and built by Triton (on a
# CPU by the C++ compiler). All that happens in the first step.
#
# **Your prediction:** by what factor does `torch.compile` alone shorten the step on this machine?

# %%
my_compile_gain: float | None = None  # for example 1.4

lab.predict("speed-up by torch.compile", my_compile_gain, "x")

# %% [markdown]
# The article reports that the modes `reduce-overhead` and `max-autotune` raised a RuntimeError under gradient
# accumulation. Both put CUDA graphs around the compiled regions. While the article's rungs compile here, three processes
# of their own try them on a small copy of the model: with accumulation in both modes, and without as the control.
# (`max-autotune` also times dozens of kernels for each product, which takes minutes and is not what failed: here it may
# choose among the libraries' own.) Others meanwhile compile the variants that the higher rungs will need, so that the
# cache on the disk has them. That makes the first step measured here a little longer than on a machine that does nothing
# else.

# %%
LIBRARY_KERNELS = {f"TORCHINDUCTOR_MAX_AUTOTUNE_{kind}_BACKENDS": "ATEN" for kind in ("GEMM", "CONV")}
graph_modes = {
    "reduce-overhead": STOCK.but(compile="reduce-overhead"),
    "max-autotune": STOCK.but(compile="max-autotune"),
    "reduce-overhead, accumulation=1": STOCK.but(compile="reduce-overhead", accumulation=1),
}
article = of_lane("article")
bench.prepare({"stock": climbable["stock"]})  # the images are drawn before several processes want them
with ThreadPoolExecutor() as pool:
    tries = {}
    if on_gpu:
        tries = {
            name: pool.submit(try_isolated, workload, recipe, 6, "tiny", environment=LIBRARY_KERNELS)
            for name, recipe in graph_modes.items()
        }
        pool.submit(compile_ahead, workload, [r for r in climbable.values() if r.layers == "rewritten"])
    bench.prepare(article)
tried = {name: future.result() for name, future in tries.items()}

# %%
runs = bench.compare(article, steps, rounds=1 if lab.scale == "tiny" else 2)
for name in ("stock", "workers", "pinned"):
    if on_gpu and runs[name].ok:
        runs[name].metrics |= bench.watch(name)
keep(runs)

fig, ax = plt.subplots()
plots.steps(ax, runs)
plt.show()

# %%
lab.verdict("A1.compile.speedup", "A1.pin.speedup", "A1.total.speedup")
lab.verdict("A1.workers.utilization", "A1.total.utilization");

# %% [markdown]
# ### When has compiling paid?
#
# The compiled step is shorter, the first one far longer. With $f$ the first step's time and $t$ a later one's, compiling
# has paid after $n = (f_\text{compiled} - f_\text{plain}) / (t_\text{plain} - t_\text{compiled})$ steps. Compiling only
# the repeated transformer blocks (*regional compilation*) costs less at the start: blocks of one shape share their code.
# On a CPU *compile* is compiled in this way from the start. (*pinned* reuses what *compile* compiled in this process: its
# first step is no first step.)


# %%
def break_even(plain: Run, compiled: Run) -> float:
    """Optimizer steps after which the compiled run has caught up; infinity where its steps are no shorter."""
    saved_s = (plain.metric("step_ms") - compiled.metric("step_ms")) / 1e3
    return (compiled.metric("first_step_s") - plain.metric("first_step_s")) / saved_s if saved_s > 0 else float("inf")


regional = {}
if on_gpu:
    regional = bench.compare({"regional": recipes["compile"].but(compile_scope="blocks")}, steps, rounds=2)
    keep(regional)
rows = [("", "first step, s", "later steps, ms", "has paid after, steps")]
for name, run in (runs | regional).items():
    if name in ("workers", "compile", "regional") and run.ok:
        steps_needed = break_even(runs["workers"], run)
        paid = None if name == "workers" else "never" if steps_needed == float("inf") else steps_needed
        rows.append((name, run.metric("first_step_s"), run.metric("step_ms"), paid))
lab.table(*rows)

# %% [markdown]
# **Takeaway.** Compiling is an investment: ask how many steps you will train before you make it. ("Never": its
# steps are no shorter on this machine. On a CPU there was no launch cost to save.)

# %% [markdown]
# ## 2 · The modes that failed
#
# **Question.** Do `reduce-overhead` and `max-autotune` still fail under gradient accumulation, and is accumulation the
# reason?

# %%
with lab.attempt("CUDA graphs inside torch.compile", reference="reduce-overhead"):
    if not on_gpu:
        for name in graph_modes:
            lab.keep(Run("04", name, status="skipped: CUDA graphs need an NVIDIA GPU"))
        raise NotHere("CUDA graphs need an NVIDIA GPU")
    rows = [("mode", "outcome", "message", "losses")]
    for name, run in tried.items():
        lab.keep({name: run})
        losses = ", ".join(f"{loss:.4f}" for loss in run.metrics.get("loss", [])[:6])
        outcome = "failed" if run.metrics["failed"] else "ran"
        rows.append((name, outcome, run.metrics["message"][:160], losses))
    lab.table(*rows)
lab.verdict("A1.compile.reduce-overhead", "A1.compile.max-autotune", "A1.compile.cause");

# %% [markdown]
# **Takeaway.** Whether a mode runs is a fact about a version. Whether it runs *rightly* is another: compare its losses
# with those of mode `default` on the same seed before you trust it. These modes give each compiled region a graph of its
# own and must guess when its memory may be reused; the next section captures the whole step, where nothing is guessed.

# %% [markdown]
# ## 3 · The same work, better driven
#
# **Question.** Every image still goes through the VAE, the text encoder and the UNet, one by one. How much of the step
# was the host?
#
# - *plain loop*: the calls that accelerate wraps, called directly;
# - *device log*: the two `.item()` a micro-step each made the host wait for the GPU. The loss now goes into a ring on the
#   GPU, and half a ring at a time travels to the host while training goes on;
# - *fused optimizer*: one kernel, which reads the loss scaler's verdict on the GPU where the host used to ask for it;
# - *whole-step graph*: four micro-steps, unscaling, clipping and the update, recorded once and replayed;
# - *channels last*: the layout that tensor cores want, and layers that don't leave it;
# - *side by side*: four micro-batches are independent until their gradients are added, so the graph runs them on four
#   streams at once. One image does not fill this GPU.
#
# **Your prediction:** how many times faster than the stock loop can the same work be?

# %%
my_same_work: float | None = None  # for example 4

lab.predict("speed-up with the same work", my_same_work, "x")

# %%
same_work = bench.compare({"stock": recipes["stock"]} | of_lane("same work"), steps, rounds=1)
keep(same_work)
fig, ax = plt.subplots()
plots.steps(ax, same_work)
plt.show()

# %% [markdown]
# **Takeaway.** None of these rungs changed what is computed, up to rounding. What they removed is the host from between
# the kernels: a step that a graph replays costs what its kernels cost. Look at the spread, too: what the host launches is
# as unsteady as the host, and as slow; what the GPU replays is neither.
#
# A captured step goes wrong without a word if a gradient's memory is allocated inside the capture: the second micro-step
# then replaces the first one's gradient. Here gradients are allocated before, zeroed inside, and the course's tests hold
# the captured step to the plain loop's gradients (`tests/gpu/test_capture_gpu.py`).

# %% [markdown]
# ## 4 · The same mathematics, less work
#
# **Question.** Which of the work is done again and again with the same result?
#
# - *cached latents*: the VAE is frozen, so an image's posterior (mean and variance) never changes. It is kept, and each
#   step draws a new sample from it. (Keeping one *sample* would be another training: fewer distinct latents.)
# - *cached text*: the same for the caption's embedding;
# - *merged batch*: the mean of four micro-batches' gradients is the gradient of their mean loss, so one batch of four does
#   what four batches of one did. That holds because no layer here looks across a batch;
# - *folded LoRA*: $W' = W + BA$ is formed once, plain layers run on it, and the ordinary gradient $G$ of $W'$ is projected:
#   $\partial L/\partial A = B^\top G$, $\partial L/\partial B = G A^\top$. That replaces hundreds of thin products by a few
#   full ones. The price is that $W'$ is rounded to half precision, as in every merged adapter.
#
# **Your prediction:** how many milliseconds will four images take at the top of the ladder?

# %%
my_best_ms: float | None = None  # for example 50

lab.predict("ms a step at the top of the ladder", my_best_ms, "ms")

# %%
same_mathematics = bench.compare(of_lane("same mathematics"), steps, rounds=1)
keep(same_mathematics)
fig, ax = plt.subplots()
plots.steps(ax, same_mathematics)
plt.show()

# %% [markdown]
# Caching has its price at the start, as compiling has: every image once through the encoders, before the first step. It has
# paid when the steps since have saved as much, counted against the last rung that encodes in every step.

# %%
encodes = list(of_lane("same work"))[-1]
rows = [("rung", "encoding all images once, s", "ms a step", "has paid after, steps")]
for name, run in same_mathematics.items():
    if run.ok and same_work[encodes].ok and (price := run.metric("encode_s")):
        saved_s = (same_work[encodes].metric("step_ms") - run.metric("step_ms")) / 1e3
        rows.append((name, price, run.metric("step_ms"), price / saved_s if saved_s > 0 else "never"))
lab.table(*rows)

# %% [markdown]
# **Takeaway.** The largest gains come from work that need not be done. They also need the most care: each of these rungs
# has a test that its gradients are the plain loop's, in float32, to four digits.

# %% [markdown]
# ## 5 · The whole climb
#
# All rungs once more, now interleaved in one process: every round goes through the whole ladder, so that a warm GPU or a
# busy neighbour hits all of them alike. The dashed line is the floor: this step's FLOPs at the measured matrix rate, or its
# bytes at the measured bandwidth, whichever takes longer.

# %%
whole = bench.compare(climbable, steps, rounds)
last = list(climbable)[-1]
for name, run in runs.items():
    whole[name].metrics |= {metric: value for metric, value in run.metrics.items() if metric == "gpu_utilization"}
keep(whole)

# %%
published = {"stock": 4 * 290, "workers": 4 * 141, "compile": 4 * 102, "pinned": 4 * 98}
fig, ax = plt.subplots()
plots.waterfall(
    ax,
    [run for run in whole.values() if run.ok],
    floor_ms=whole[last].metric("floor_ms"),
    published=published,
    published_label="article, 4 micro-steps",
)
plt.show()

# %%
anchor_ms = whole["stock"].metric("step_ms")
rows = [("rung", "lane", "ms a step", "times stock", "floor, ms")]
for name, run in whole.items():
    if run.ok:
        ms = run.metric("step_ms")
        rows.append((name, run.lane, ms, anchor_ms / ms, run.metric("floor_ms")))
lab.table(*rows)
print(f"The stock loop alone, at the start: {runs['stock'].metric('step_ms'):.0f} ms; here: {anchor_ms:.0f} ms.")
lab.verdict("A1.total.speedup", "A1.compile.speedup", "A1.pin.speedup");

# %% [markdown]
# ### What happened to the kernels?
#
# Compiling merges chains of small operations (a bias, a normalisation, an activation) into single kernels. Convolutions,
# matrix products and attention stay the library kernels they were. Capturing changes no kernel, only who launches it.
#
# The profiler comes last: what it leaves behind in the process can't lengthen any of the steps above.

# %%
traced = ["compile"] if not on_gpu else ["workers", "compile", "whole-step graph", "side by side", last]
traces = {}
for name in traced:
    if whole[name].ok:
        trace = traces[name] = bench.profile(
            name, lab.cache_dir / "traces" / "lab-04" / name.replace(" ", "-"), steps=2
        )
        whole[name].metrics |= trace.metrics(whole[name].metric("step_ms"), whole[name].metric("data_ms"))
if on_gpu and "compile" in traces:
    whole["compile"].metrics["compiled_regions"] = (
        traces["compile"].calls_of("Torch-Compiled Region") / STOCK.accumulation
    )
if on_gpu and last in traces:
    whole[last].metrics["kernel_categories"] = traces[last].categories()
keep({name: whole[name] for name in traces})
bench.close()

# %%
KERNEL_COLUMNS = {
    "kernels_per_step": "kernels a step",
    "kernels_ms": "kernel time, ms",
    "launch_ms": "host time in launches, ms",
    "syncs_per_step": "synchronisations",
    "gpu_busy": "GPU-busy",
}
rows = [(name, *(whole[name].metrics.get(metric) for metric in KERNEL_COLUMNS)) for name in traces]
lab.table(("rung", *KERNEL_COLUMNS.values()), *rows, otherwise="A CPU launches no kernels.")
lab.verdict("A1.compile.one-region", "A1.compile.fewer-kernels");

# %% [markdown]
# **What is left above the floor?** The floor assumes that every FLOP runs at the rate of a large matrix product. On the
# H200 the top rung's kernels are no such products: attention with 40 numbers a head leaves a third of each tile empty and
# is bound by its exponentials; normalisations and activations move bytes; the deep, small levels of the UNet fill only
# part of the chip.

# %%
categories = whole[last].metrics.get("kernel_categories", {})
rows = [(name, row["ms"], row["count"]) for name, row in categories.items()]
lab.table(
    ("kernels at the top of the ladder", "ms a step", "count"),
    *rows,
    otherwise="No kernels on a CPU; `reference/h200/04_compile_and_capture.ipynb` shows the H200's.",
)

# %% [markdown]
# **Takeaway.** First the data, then the host, then the work itself, and last the kernels: each rung only shows once the
# one below it is out of the way.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
from labutils.exercises import check, faster_than, solved

# %% [markdown]
# **1.** A colleague compiles for 95 s to bring a step from 340 to 250 ms. She trains 800 steps. How many seconds does she
# gain (or lose) by compiling? Positive: gained. (The plain first step takes as long as the others.)

# %% tags=["exercise"]
gained_s = None  # your number
print(check("04.1", gained_s))

# %% tags=["solution"]
gained_s = 800 * 0.34 - (95 + 799 * 0.25)
solved(check("04.1", gained_s))

# %% [markdown]
# **2.** Caching keeps, for each image, the posterior's mean and log variance (2 × 4 × 64 × 64 numbers at `full`) and the
# caption's embedding (77 × 768), both in float16. How many megabytes (10⁶ bytes) do the real dataset's 1221 images take?

# %% tags=["exercise"]
cache_mb = None  # your number
print(check("04.2", cache_mb))

# %% tags=["solution"]
cache_mb = 1221 * (2 * 4 * 64 * 64 + 77 * 768) * 2 / 1e6
solved(check("04.2", cache_mb))

# %% [markdown]
# **3.** *Merged batch* relied on no layer looking across the batch. Which of these layers would have broken it, so that
# one batch of four gives other gradients than four of one? Answer with a set of names.

# %% tags=["exercise"]
breaks_it = None  # a set out of {"GroupNorm", "LayerNorm", "BatchNorm", "Dropout", "attention over tokens"}
print(check("04.3", breaks_it))

# %% tags=["solution"]
breaks_it = {"BatchNorm"}
solved(check("04.3", breaks_it))

# %% [markdown]
# **4. Make it faster.** Eight micro-steps by the book: each image goes through a frozen encoder and a trained head, and its
# share of the gradient is added. Get the same gradients three times as fast, by what section 4 did to the ladder.

# %% tags=["exercise"]
torch.manual_seed(0)
encoder = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(lab.device)
encoder.requires_grad_(False)
head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GroupNorm(8, 64), torch.nn.Linear(64, 64)).to(lab.device)


def by_micro_steps(images, targets):
    """images [8, 64], targets [8, 64] -> the gradients of the head's parameters"""
    head.zero_grad()
    for image, target in zip(images, targets, strict=True):
        loss = (head(encoder(image[None])) - target[None]).square().mean()
        (loss / len(images)).backward()
    return [parameter.grad.clone() for parameter in head.parameters()]


def at_once(images, targets):
    return by_micro_steps(images, targets)  # your code instead


def eight_images(seed: int) -> tuple:
    torch.manual_seed(seed)
    return torch.randn(8, 64, device=lab.device), torch.randn(8, 64, device=lab.device)


print(faster_than(4, by_micro_steps, at_once, eight_images, times=3, tolerance=1e-3))


# %% tags=["solution"]
def at_once_solution(images, targets):
    head.zero_grad()
    (head(encoder(images)) - targets).square().mean().backward()
    return [parameter.grad.clone() for parameter in head.parameters()]


solved(faster_than(4, by_micro_steps, at_once_solution, eight_images, times=3, tolerance=1e-3))

# %% [markdown]
# ## What you did
# - You measured what `torch.compile` buys, what it costs at first, and when it has paid.
# - You told fewer kernels from cheaper launches.
# - You removed synchronisations from a loop and kept its log.
# - You captured an optimizer step with its accumulation, and know how that goes wrong.
# - You told the same work from the same mathematics, and know the test for each.


# %%
def gain_of(name: str) -> float | None:
    run = whole.get(name)
    return whole["stock"].metric("step_ms") / run.metric("step_ms") if run and run.ok else None


same_work_rungs = list(of_lane("same work"))
lab.done(
    {
        "speed-up by torch.compile": runs["workers"].metric("step_ms") / runs["compile"].metric("step_ms")
        if runs["compile"].ok
        else None,
        "speed-up with the same work": gain_of(same_work_rungs[-1]),
        "ms a step at the top of the ladder": whole[last].metric("step_ms"),
    }
)
