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
# Lab 02 found that the stock loop's GPU waits for the host, and lab 03 gave the reading of images to workers. Article A1
# goes on with `torch.compile` and pinned memory, and ends 2.96 times faster than it began. In this lab you climb the same
# rungs, find out what each is worth, and then go on climbing: first by doing the same work with less help from the host,
# then by doing less work for the same mathematics. At the end there is a picture of the whole climb, from the stock loop
# down to what the hardware allows.
#
# **After this lab you can**
# - say what `torch.compile` gains, what its first step costs, and after how many steps it has paid for itself;
# - tell fewer kernels (compiling) from cheaper launches (capturing a CUDA graph);
# - remove a synchronisation from a training loop, and keep its log;
# - capture a whole optimizer step, gradient accumulation included, without getting wrong gradients;
# - tell an optimisation that does the same work from one that does other work with the same result, and test both.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU with a C++ compiler | 2 minutes |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 40 GB | 8 minutes, most of it compiling |
#
# With random weights every time and every byte is the real model's, but the losses are not, so nothing below is concluded
# from a loss value. A CPU has no kernel launches to save. There you measure the rungs that make a difference on a CPU, and
# see our H200's climb beside your own.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 1 at larger scales
rounds: int = 0  # times round the whole ladder at the end; 0: 1 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("04", globals())

# %%
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import torch

from labutils.course import plots
from labutils.labs.ladders import A1_LADDER, climb, distinct_on, rung_rows
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.profiling.compat import ask_cpp_compiler
from labutils.profiling.machine import usable_cores
from labutils.recipe import STOCK, Unavailable
from labutils.results.effects import paid_after
from labutils.results.records import Run
from labutils.training import Benchmark, try_isolated

plots.use_style()
on_gpu = lab.device == "cuda"
if not on_gpu:
    torch.set_num_threads(
        max(1, usable_cores() // 2)
    )  # one half trains, the other is left to the workers
    ask_cpp_compiler()
compile_from_nothing()  # so that a first step is one
steps, rounds = (
    steps or (2 if lab.scale == "tiny" else 1),
    rounds or (1 if lab.scale == "tiny" else 8),
)
workload = lab.workload("sd15-lora")
bench = Benchmark(workload)
recorded = [*lab.references(experiment="ladder"), *lab.references(experiment="compile mode")]
h200 = {run.tags.get("rung", run.run): run for run in recorded if run.ok}

# %% [markdown]
# ## The ladder
#
# **Question.** In how many steps does one get from the stock loop to the limit of the hardware?
#
# In these. Each rung of the ladder is the rung before it with one thing changed (or a few that belong together). The rungs
# stand in three *lanes*, and the lane says what a rung's time may be compared with:
#
# - **article**: the article's own steps;
# - **same work**: every image still goes through every network in every step, one by one, four to an optimizer step, in the
#   same precision. Only the way in which the work is driven changes;
# - **same mathematics**: the computation itself changes, and the distribution of the gradients does not.

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
tags = A1_LADDER.tags() | {"regional": {"experiment": "ladder", "rung": "regional"}}


def of_lane(*names: str) -> dict:
    """The rungs of the named lanes that this machine can tell apart."""
    return {name: recipe for name, recipe in climbable.items() if lanes[name] in names}


def keep(runs: dict[str, Run]) -> None:
    """Keep each rung's run under its lane, and what this machine can't tell apart as skipped."""
    for run in runs.values():
        lab.keep(run, lane=lanes.get(run.tags["rung"], "article"))


for name in recipes.keys() - climbable.keys():
    lab.keep(
        Run(
            "04",
            name,
            lane=lanes[name],
            tags=tags[name],
            status="skipped: on a CPU this rung is no different from one below it",
        )
    )

# %% [markdown]
# ## 1 · The article's rungs
#
# **Question.** The article gets from 290 to 98 ms with three changes: workers (2.06×), compilation (1.38×) and pinned memory
# (1.04×). What are the same three worth here? (The article's "step" may be a micro-step or an optimizer step; see lab 02.
# For ratios it makes no difference.)
#
# `torch.compile` has three stages. Dynamo traces the Python code once, Inductor fuses what it finds into fewer and larger
# kernels, and Triton builds these (on a CPU, the C++ compiler does). All that happens in the first step.
#
# **Your prediction:** how many times faster does `torch.compile` alone make the step on this machine?

# %%
my_compile_gain: float | None = None  # for example 1.4

lab.predict("speed-up by torch.compile", my_compile_gain, "x")

# %% [markdown]
# The next cell compiles, and that takes a while. On a GPU it uses the time for two more things, which sections 2 and 3 need:
#
# - Three processes try two other modes of `torch.compile`, `reduce-overhead` and `max-autotune`, on a small copy of the
#   model. (`max-autotune` would also time dozens of kernels for each product. That takes minutes and is not what we ask, so
#   here it may choose only among the libraries' kernels.)
# - Others compile what the higher rungs will need, so that it is in the cache on the disk.
#
# So the first step measured here is a little longer than it would be on a machine that does nothing else.

# %%
LIBRARY_KERNELS = {
    f"TORCHINDUCTOR_MAX_AUTOTUNE_{kind}_BACKENDS": "ATEN" for kind in ("GEMM", "CONV")
}
graph_modes = {
    "reduce-overhead": STOCK.but(compile="reduce-overhead"),
    "max-autotune": STOCK.but(compile="max-autotune"),
    "reduce-overhead, accumulation=1": STOCK.but(compile="reduce-overhead", accumulation=1),
}
mode_tags = {
    name: {"experiment": "compile mode", "mode": recipe.compile}
    for name, recipe in graph_modes.items()
}
mode_tags["reduce-overhead, accumulation=1"]["accumulation"] = 1
article = of_lane("article")
bench.prepare(
    {"stock": climbable["stock"]}
)  # the images are drawn before several processes want them
with ThreadPoolExecutor() as pool:
    tries = {}
    if on_gpu:
        tries = {
            name: pool.submit(
                try_isolated, workload, recipe, 6, "tiny", environment=LIBRARY_KERNELS
            )
            for name, recipe in graph_modes.items()
        }
        # What the other rungs compile is among what these three do.
        for rung in ("encoders compiled", "merged batch", "folded LoRA"):
            pool.submit(try_isolated, workload, climbable[rung], 1)
    bench.prepare(article)
tried = {name: future.result() for name, future in tries.items()}
for name, run in tried.items():
    run.tags = mode_tags[name]

# %%
runs = bench.compare(article, steps, rounds, tags)
for name in ("stock", "workers", "pinned"):
    if on_gpu and runs[name].ok:
        runs[name].metrics |= bench.watch(name)
keep(runs)

fig, ax = plt.subplots()
plots.steps(ax, runs)
plt.show()

# %%
lab.verdict("A1.compile.speedup", "A1.pin.speedup", "A1.total.speedup")
lab.verdict("A1.workers.utilization", "A1.total.utilization")

# %% [markdown]
# ### When has compiling paid?
#
# **Question.** A compiled step is shorter, but the first one is far longer. How many steps must you train before it pays?
#
# Let $f$ be the time of the first step and $t$ that of a later one. Compiling has paid for itself after
# $n = (f_\text{compiled} - f_\text{plain}) / (t_\text{plain} - t_\text{compiled})$ steps.
#
# One can also compile only the transformer blocks, which are repeated (*regional compilation*, the row *regional*). That
# costs less at the start, because blocks of the same shape share their code. (On a CPU the rung *compile* does just that,
# as compiling the whole UNet would take too long.)


# %%
regional = {}
if on_gpu:
    regional = bench.compare(
        {"regional": recipes["compile"].but(compile_scope="blocks")}, steps, rounds, tags
    )
    keep(regional)
rows = [("", "first step, s", "later steps, ms", "has paid after, steps")]
for place, found in (("here", runs | regional), ("H200", h200)):
    for name in ("workers", "compile", "regional"):
        if name in found and found[name].ok:
            times = [found[name].metric(metric) for metric in ("first_step_s", "step_ms")]
            paid = None if name == "workers" else paid_after(found["workers"], found[name])
            rows.append((f"{name}, {place}", *times, "never" if paid == float("inf") else paid))
lab.table(*rows)

# %% [markdown]
# ("Never" means that the compiled steps are no shorter on this machine. On a CPU that is common, as there are no launches to
# save.)
#
# **Takeaway.** Compiling is an investment. Before you make it, ask how many steps you will train.

# %% [markdown]
# ## 2 · The modes that failed
#
# **Question.** The article reports that the modes `reduce-overhead` and `max-autotune` raised a RuntimeError under gradient
# accumulation. Do they still, and is accumulation the reason?
#
# Both modes put CUDA graphs around the compiled regions: the GPU records the kernels of a region once, and then replays
# them. The processes of section 1 tried both modes with accumulation, and one of them without, as the control.


# %%
def show_outcomes(tried: dict[str, Run], whose: str) -> None:
    rows = [(f"mode, {whose}", "outcome", "message", "losses")]
    for name, run in tried.items():
        losses = ", ".join(f"{loss:.4f}" for loss in run.metrics.get("loss", [])[:6])
        outcome = "failed" if run.metrics["failed"] else "ran"
        rows.append((name, outcome, run.metrics.get("message", "")[:160] or "–", losses or "–"))
    lab.table(*rows)


def show_reference() -> None:
    show_outcomes({name: h200[name] for name in graph_modes if name in h200}, "on our H200")


# %%
with lab.attempt(
    "CUDA graphs inside torch.compile", show_reference, **mode_tags["reduce-overhead"]
):
    if not on_gpu:
        for name in graph_modes:
            skipped = "skipped: CUDA graphs need an NVIDIA GPU"
            lab.keep(Run("04", name, status=skipped, tags=mode_tags[name]))
        raise Unavailable("CUDA graphs need an NVIDIA GPU")
    lab.keep(tried)
    show_outcomes(tried, "here")
lab.verdict("A1.compile.reduce-overhead", "A1.compile.max-autotune", "A1.compile.cause")
# %% [markdown]
# These modes give each compiled region a graph of its own, and must guess when a graph's memory may be used again. On the H200
# the guess was wrong under accumulation: a second micro-step overwrote what the first had left, and the message says so. The
# next section captures the whole step, and nothing is guessed.
#
# **Takeaway.** Whether a mode runs depends on the version. Whether it computes the *right* thing is a second question: before
# you trust it, compare its losses with those of the mode `default` from the same seed.

# %% [markdown]
# ## 3 · The same work, better driven
#
# **Question.** How much faster does the same work get if the host gets out of the way?
#
# Every image still goes through the VAE, the text encoder and the UNet, one by one. The rungs are:
#
# - *plain loop*: what the library accelerate wraps is called directly;
# - *device log*: the two `.item()` of each micro-step made the host wait for the GPU. Now the loss goes into a ring buffer on
#   the GPU, and half of the ring at a time is copied to the host while training goes on;
# - *fused optimizer*: the update is one kernel. It reads on the GPU whether a gradient overflowed, so the host needn't ask;
# - *more workers*: a faster step uses up images faster (lab 03);
# - *whole-step graph*: four micro-steps, unscaling, clipping and the update are recorded once as a CUDA graph, and replayed;
# - *channels last*: the memory layout that tensor cores want, and layers that don't leave it;
# - *encoders compiled*: the frozen networks launch kernels too;
# - *side by side*: four micro-batches are independent until their gradients are added, so the graph runs them on four
#   streams at once. One image doesn't fill a large GPU.
#
# **Your prediction:** how many times faster than the stock loop can the same work be?

# %%
my_same_work: float | None = None  # for example 4

lab.predict("speed-up with the same work", my_same_work, "x")

# %%
same_work = bench.compare({"stock": recipes["stock"]} | of_lane("same work"), steps, 1, tags)
keep(same_work)


def show_lane(found: dict[str, Run], lane: str) -> None:
    """The steps of one lane's rungs, and on a CPU those of our H200 in a picture of their own."""
    fig, ax = plt.subplots()
    plots.steps(ax, found)
    plt.show()
    names = [name for name in lanes if name in h200 and (name in found or lanes[name] == lane)]
    theirs = {f"H200, {name}": h200[name] for name in names}
    if theirs and not on_gpu:
        fig, ax = plt.subplots()
        plots.steps(ax, theirs)
        plt.show()


show_lane(same_work, "same work")

# %% [markdown]
# None of these rungs changed what is computed, up to rounding. In the H200's picture, look where the time falls: from
# *whole-step graph* on, the host no longer stands between the kernels, and a replayed step takes as long as its kernels do.
# The spread falls with it. What the host launches is as unsteady as the host; what the GPU replays is not. (A CPU has no
# launches, so there these rungs bring little, and more workers only take cores away from training.)
#
# One warning. A captured step can go wrong without a word. If a gradient's memory is allocated inside the capture, then the
# second micro-step replaces the first one's gradient instead of adding to it. Here gradients are allocated before and zeroed
# inside, and the course's tests compare the captured step's gradients with the plain loop's
# (`tests/gpu/test_capture_gpu.py`).
#
# **Takeaway.** If the host sets the pace, faster kernels don't help. Take the host out of the loop first.

# %% [markdown]
# ## 4 · The same mathematics, less work
#
# **Question.** What of this work need not be done, because its result is already known or can be had for less?
#
# - *cached latents*: the VAE is frozen, so what it says of an image, a mean and a variance, never changes. They are kept, and
#   each step draws a new sample from them. (To keep one *sample* instead would be a different training, with fewer distinct
#   inputs.)
# - *cached text*: the same for the caption's embedding;
# - *merged batch*: the mean of four micro-batches' gradients is the gradient of their mean loss, so one batch of four does
#   what four batches of one did. That is true as long as no layer mixes the examples of a batch;
# - *folded LoRA*: $W' = W + BA$ is formed once a step, plain layers run on it, and the ordinary gradient $G$ of $W'$ is
#   projected: $\partial L/\partial A = B^\top G$ and $\partial L/\partial B = G A^\top$. A few full products replace hundreds
#   of thin ones, which are slow at these widths (lab 01, section 4). The price is that $W'$ is rounded to half precision, as
#   in every merged adapter.
#
# **Your prediction:** how many milliseconds do four images take at the top of the ladder?

# %%
my_best_ms: float | None = None  # for example 50

lab.predict("ms a step at the top of the ladder", my_best_ms, "ms")

# %%
same_mathematics = bench.compare(of_lane("same mathematics"), steps, 1, tags)
keep(same_mathematics)
show_lane(same_mathematics, "same mathematics")

# %% [markdown]
# Like compiling, caching has a price at the start: every image goes through the encoders once before the first step. It has
# paid for itself when the steps since then have saved as much, compared with the last rung that encodes in every step.


# %%
def show_price(found: dict[str, Run], encodes: str, whose: str) -> None:
    rows = []
    for name, run in found.items():
        if run.ok and found[encodes].ok and (price := run.metric("encode_s")):
            saved_s = (found[encodes].metric("step_ms") - run.metric("step_ms")) / 1e3
            rows.append(
                (
                    name,
                    price,
                    run.metric("step_ms"),
                    round(price / saved_s) if saved_s > 0 else "never",
                )
            )
    lab.table((whose, "encoding all images once, s", "ms a step", "has paid after, steps"), *rows)


show_price(same_work | same_mathematics, list(of_lane("same work"))[-1], f"here ({lab.scale})")
if h200:
    show_price(h200, "side by side", "H200 (full)")

# %% [markdown]
# **Takeaway.** The cheapest work is work that need not be done. Leaving work out also needs the most care: for each of these
# rungs a test checks that its gradients are the plain loop's, in float32, to four digits.

# %% [markdown]
# ## 5 · The whole climb
#
# **Question.** How far did all rungs together bring us, and how much is left?
#
# We measure all of them once more, taking turns in one process: every round goes through the whole ladder, so that a warm
# GPU or a busy neighbour affects all rungs alike. The dashed line is the floor of the top rung (lab 00): its FLOPs at the
# measured matrix rate, or its bytes at the measured bandwidth, whichever takes longer.

# %%
whole = bench.compare(climbable, steps, rounds, tags)
last = list(climbable)[-1]
for name, run in runs.items():
    whole[name].metrics |= {
        metric: value for metric, value in run.metrics.items() if metric == "gpu_utilization"
    }
keep(whole)

# %%
published = {"stock": 4 * 290, "workers": 4 * 141, "compile": 4 * 102, "pinned": 4 * 98}


def show_climb(found: dict[str, Run], top: str, title: str) -> None:
    fig, ax = plt.subplots()
    label = "article, 4 micro-steps"
    plots.waterfall(
        ax,
        found.values(),
        found[top].metric("floor_ms"),
        published=published,
        published_label=label,
    )
    ax.set_title(title, pad=24)
    plt.show()


show_climb(
    {name: run for name, run in whole.items() if run.ok and name in climbable},
    last,
    f"The climb on this machine, scale {lab.scale}",
)
if h200 and not on_gpu:
    show_climb(
        {name: h200[name] for name in recipes if name in h200},
        "folded LoRA",
        "The climb on our H200, scale full",
    )

# %%
anchor_ms, theirs_ms = (
    found["stock"].metric("step_ms") if found else None for found in (whole, h200)
)
rows = []
for name in recipes:
    ms, h200_ms = (
        found[name].metric("step_ms") if name in found else None for found in (whole, h200)
    )
    times = [
        f"{anchor / ms:.2f}x" if ms else None
        for anchor, ms in ((anchor_ms, ms), (theirs_ms, h200_ms))
    ]
    floor_ms = whole[name].metric("floor_ms") if name in whole else None
    rows.append((name, lanes[name], ms, times[0], floor_ms, h200_ms, times[1]))
lab.table(
    (
        "rung",
        "lane",
        "ms a step",
        "faster than stock",
        "floor, ms",
        "H200, ms",
        "H200: faster than stock",
    ),
    *rows,
)
print(
    f"The stock loop alone, at the start: {runs['stock'].metric('step_ms'):.0f} ms; here: {anchor_ms:.0f} ms."
)
lab.verdict("A1.total.speedup", "A1.compile.speedup", "A1.pin.speedup")
# %% [markdown]
# (A bar's length means nothing on a logarithmic axis; compare where the bars end.)
#
# **Takeaway.** The article stopped where it had reached its own machine's next limit, the host. Most of what can be gained
# lies behind that.

# %% [markdown]
# ### What happened to the kernels?
#
# **Question.** Compiling and capturing both shorten a step. Do they do it in the same way?
#
# No. Compiling merges chains of small operations (a bias, a normalisation, an activation) into single kernels; convolutions,
# matrix products and attention remain the library kernels that they were. Capturing changes no kernel at all, only the way
# in which it is launched. The profiler can show both. (It comes last, so that what it leaves behind in the process can't
# lengthen any of the steps above.)

# %%
traced = (
    ["compile"] if not on_gpu else ["workers", "compile", "whole-step graph", "side by side", last]
)
traces = {}
for name in traced:
    if whole[name].ok:
        trace = traces[name] = bench.profile(
            name, lab.cache_dir / "traces" / "lab-04" / name.replace(" ", "-"), steps=2
        )
        whole[name].metrics |= trace.metrics(
            whole[name].metric("step_ms"), whole[name].metric("data_ms")
        )
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
rows += [
    (f"{name}, H200", *(run.metrics.get(metric) for metric in KERNEL_COLUMNS))
    for name, run in h200.items()
]
lab.table(("rung", *KERNEL_COLUMNS.values()), *rows)
lab.verdict("A1.compile.one-region", "A1.compile.fewer-kernels")
# %% [markdown]
# Go down the H200's rows. From *workers* to *compile* a third of the kernels disappear, but GPU-busy hardly changes: the
# host is still too slow. The *whole-step graph* has about as many kernels as *compile*, almost no synchronisations, and a GPU
# that is nearly always busy.
#
# ### What is left above the floor?
#
# The floor assumes that every FLOP runs at the rate of a large matrix product. On the H200 the top rung's kernels are not
# like that. Attention with 40 numbers a head leaves a third of each tile empty and is bound by its exponentials;
# normalisations and activations move bytes; and the deep, small levels of the UNet fill only part of the chip.

# %%
for run, whose in ((whole[last], "here"), (h200.get("folded LoRA", whole[last]), "on our H200")):
    categories = run.metrics.get("kernel_categories", {})
    rows = [(name, row["ms"], row["count"]) for name, row in categories.items()]
    lab.table((f"kernels at the top of the ladder, {whose}", "ms a step", "count"), *rows)

# %% [markdown]
# **Takeaway.** First the data, then the host, then the work itself, and last the kernels: what a rung is worth shows only
# when the slower thing before it is out of the way.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then times the two in turns, for
# as many rounds as it takes to decide.

# %%
from labutils.course.exercises import check, faster_than, solved

# %% [markdown]
# **1. Does it pay?** A colleague compiles. Her first step then takes 95 s, and each later one 250 ms instead of 340 ms. She
# trains 800 steps in all. How many seconds does she gain by compiling? (If she loses, the number is negative. Without
# compiling, her first step takes as long as the others.)

# %% tags=["exercise"]
gained_s = None  # your number
print(check("04.1", gained_s))

# %% tags=["solution"]
gained_s = 800 * 0.34 - (95 + 799 * 0.25)
solved(check("04.1", gained_s))

# %% [markdown]
# **2. The size of a cache.** For each image, caching keeps a mean and a variance (2 × 4 × 64 × 64 numbers at `full`) and the
# caption's embedding (77 × 768 numbers), all in float16. How many megabytes (10⁶ bytes) do the real dataset's 1221 images
# take?

# %% tags=["exercise"]
cache_mb = None  # your number
print(check("04.2", cache_mb))

# %% tags=["solution"]
cache_mb = 1221 * (2 * 4 * 64 * 64 + 77 * 768) * 2 / 1e6
solved(check("04.2", cache_mb))

# %% [markdown]
# **3. What must not be in the model.** *Merged batch* works because no layer mixes the examples of a batch. With which of these
# layers would one batch of four have a different distribution of gradients than four batches of one? Answer with a set of
# their names: GroupNorm, LayerNorm, BatchNorm, Dropout, attention over tokens.

# %% tags=["exercise"]
breaks_it = (
    None  # a set out of {"GroupNorm", "LayerNorm", "BatchNorm", "Dropout", "attention over tokens"}
)
print(check("04.3", breaks_it))

# %% tags=["solution"]
breaks_it = {"BatchNorm"}
solved(check("04.3", breaks_it))

# %% [markdown]
# **4. Make it faster.** Here are eight micro-steps by the book. Each image goes through a frozen encoder and a trained head,
# and its share of the gradient is added. Compute the same gradients at least three times as fast. Section 4 shows how.

# %% tags=["exercise"]
torch.manual_seed(0)
encoder = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
).to(lab.device)
encoder.requires_grad_(False)
head = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.GroupNorm(8, 64), torch.nn.Linear(64, 64)
).to(lab.device)


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
# ## Where this comes from, and what to read on
# - J. Ansel and others: *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS 2024 ([doi:10.1145/3620665.3640366](https://doi.org/10.1145/3620665.3640366)). Dynamo and Inductor,
#   by their authors.
# - PyTorch: the documentation of [torch.compile](https://docs.pytorch.org/docs/stable/generated/torch.compile.html), with its
#   modes, and the tutorial on [regional
#   compilation](https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
# - PyTorch: *[Accelerating PyTorch with CUDA Graphs](https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/)*, 2021.
# - PyTorch: *[Channels Last Memory Format in
#   PyTorch](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html)*.
# - R. Rombach and others: *[High-Resolution Image Synthesis with Latent Diffusion
#   Models](https://arxiv.org/abs/2112.10752)*, 2022. What the VAE, the text encoder and the UNet are for.
# - meta-pytorch: *[gpt-fast](https://github.com/meta-pytorch/gpt-fast)*, the same way of working, one named speed-up at a
#   time, for text generation.
# - The course's [glossary](../docs/glossary.md).

# %% [markdown]
# ## What you did
# - You measured what `torch.compile` gains, what it costs at first, and when it has paid for itself.
# - You told fewer kernels from cheaper launches.
# - You removed synchronisations from a loop and kept its log.
# - You captured an optimizer step with its accumulation (or saw what that does on our H200), and know how it can go wrong.
# - You told the same work from the same mathematics, and know the test for each.
#
# Next: lab 05, numbers of 8 bits.


# %%
def gain_of(name: str) -> float | None:
    run = whole.get(name)
    return whole["stock"].metric("step_ms") / run.metric("step_ms") if run and run.ok else None


same_work_rungs = list(of_lane("same work"))
lab.done(
    {
        "speed-up by torch.compile": runs["workers"].metric("step_ms")
        / runs["compile"].metric("step_ms")
        if runs["compile"].ok
        else None,
        "speed-up with the same work": gain_of(same_work_rungs[-1]),
        "ms a step at the top of the ladder": whole[last].metric("step_ms"),
    }
)
