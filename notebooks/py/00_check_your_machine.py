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
# # Lab 00 · Check your machine
#
# Every later lab compares a time with a limit. Here you measure the limits themselves: how fast this machine
# multiplies, how fast it moves data, and how long it takes merely to ask for work. Along the way you find out what would
# have stopped a later lab halfway.
#
# The course tests published articles, which go by short names. Two of them appear in this lab. **A1** profiles and tunes
# LoRA training of Stable Diffusion on a Blackwell workstation card; **A3** fine-tunes language models on that card and on
# an H100. The README introduces all four. Any other word that is new to you is in the [glossary](../docs/glossary.md).
#
# **After this lab you can**
# - tell whether a machine is ready for fine-tuning, and fix what is not;
# - read a data sheet without being misled by its sparse figures, and say how much of its peak you can really get;
# - place an operation on a roofline, and say what limits it before you time it;
# - tell when a loop is limited by the host's launches rather than by the GPU's work.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 1 minute |
# | `full` | a GPU of 40 GB | 1.5 minutes |
#
# You need neither a network nor a model: everything here is single operations on random numbers. Without a GPU you
# measure your CPU, and the same quantities measured on our H200 stand beside yours.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("00", globals())

# %%
from statistics import median

import matplotlib.pyplot as plt

from labutils.course import plots
from labutils.profiling import cuda
from labutils.profiling.cuda_architectures import try_unlisted_architecture
from labutils.profiling.gpu_specs import DTYPES, spec_of
from labutils.profiling.measured_rates import ITEMS, Probe, probe_machine, rate_over_time
from labutils.profiling.operations import course_operations, measure_operation, sweep_sizes
from labutils.recipe import Unavailable
from labutils.results.records import Run, summarise
from labutils.tools import doctor

plots.use_style()
on_gpu = lab.device == "cuda"
reference = lab.reference(experiment="machine")  # what this lab found on our H200
h200 = Probe("cuda", reference.samples, {}) if reference else None

# %% [markdown]
# ## 1 · Is this machine ready?
#
# **Question.** What would stop a lab halfway?
#
# The doctor checks what has stopped people before: the driver, the PyTorch build, shared memory, a compiler, and packages
# that are installed but can't be used. `fail` means that labs won't run, `warn` that one of them will suffer, and `info`
# is only good to know. Where something can be done, the finding says what to type. In a shell, the same is
# `labutils doctor`.

# %%
findings = doctor.examine()
print(doctor.render(findings, width=84))

# %% [markdown]
# **Takeaway.** Check a machine before you trust it with a long run: a missing compiler or a small `/dev/shm` costs a
# minute now, or a night later.

# %% [markdown]
# ## 2 · How fast is it really?
#
# **Question.** A data sheet promises so many TFLOP/s (10¹² floating-point operations a second). How many of them does a
# plain matrix product get?
#
# **Your prediction:** the rate of large matrix products on this machine, in TFLOP/s. On a GPU we measure bf16 (the data
# sheet of an H200 says 989, or 1979 "with sparsity"), on a CPU fp32 (one laptop core reaches 0.1 TFLOP/s at best).

# %%
predicted_tflops = None  # TFLOP/s
lab.predict("matrix products", predicted_tflops, "TFLOP/s")

# %% [markdown]
# The probe multiplies random matrices and not zeros. A product of zeros switches fewer transistors, so it draws less power
# and runs at a higher clock than training ever will. After warming up, the probe measures many times and keeps every
# sample. A result in this course is the median of its samples. Beside it stands the *p10-p90* range, which leaves out the
# lowest and the highest tenth: it says how far a result can be trusted.

# %%
measured = probe_machine()
main_dtype = "fp32" if not on_gpu else "bf16" if measured.rate("bf16") else "fp16"
machine = Run("00", "machine", tags={"experiment": "machine"}, samples=measured.samples)
machine.metrics = {item: summarise(samples) for item, samples in measured.samples.items()}
if architectures := cuda.architectures():
    machine.metrics["torch_architectures"] = architectures
lab.keep(machine);

# %%
def show_peaks(probe: Probe, machine: dict, whose: str) -> None:
    """Measured matrix rates beside the machine's data sheet."""
    spec = spec_of(machine)
    rates = {dtype: probe.samples[f"tflops_{dtype}"] for dtype in DTYPES if probe.rate(dtype)}
    fig, ax = plt.subplots()
    plots.peaks(ax, rates, spec and spec.dense, spec and spec.sparse)
    ax.set_title(
        f"{whose}, and the data sheet of {spec.name}"
        if spec
        else f"{whose} (no data sheet is on file)"
    )
    plt.show()


show_peaks(measured, lab.machine, "Measured here")
if h200 and not on_gpu:
    show_peaks(h200, reference.machine, "Measured on our H200")

# %% [markdown]
# A GPU's data sheet has two peaks. The dotted marks are the advertised one: it also counts products with zeros, which the
# hardware can skip if half of a matrix is pruned in a fixed pattern. Weights in training are not pruned like that, so this
# course always takes shares of the **dense** peak, the solid marks. Article A3 prints the sparse figures in its table of
# specifications; measured against those, every program looks half as good as it is.
#
# The bars end before the solid marks, because the dense peak assumes the highest clock. And they come from bursts of
# 10 ms, which is how products come in a training step. What happens if the products never pause?

# %%
seconds, held = zip(*rate_over_time(main_dtype), strict=True)
lab.keep(
    Run(
        "00",
        "held",
        tags={"experiment": "held"},
        metrics={"tflops": summarise(held[len(held) // 2 :]), "dtype": main_dtype},
    )
)
fig, ax = plt.subplots(figsize=(7.2, 2.8))
ax.plot(seconds, held, marker=".", label="without a pause")
ax.axhline(
    measured.rate(main_dtype), color="black", linestyle=":", label="the probe's median, in bursts"
)
ax.set(
    xlabel="seconds",
    ylabel=f"{main_dtype} TFLOP/s",
    ylim=(0, 1.1 * max(*held, measured.rate(main_dtype))),
)
ax.set_title("Matrix products without a pause: does the rate last?")
ax.legend(loc="lower right")
plt.show()

# %%
theirs = lab.reference(experiment="held")
rows = [("here", main_dtype, measured.rate(main_dtype), median(held[len(held) // 2 :]))]
if h200 and theirs:
    rows.append(
        (
            "H200 (ours)",
            theirs.metrics["dtype"],
            h200.rate(theirs.metrics["dtype"]),
            theirs.metric("tflops"),
        )
    )
rows = [(*row, f"{row[3] / row[2]:.0%}") for row in rows]
lab.table(
    ("matrix products", "dtype", "in bursts, TFLOP/s", "without a pause, TFLOP/s", "what lasts"),
    *rows,
)

# %% [markdown]
# If the rate of a GPU falls within the first tenths of a second, as the H200's did, the card has reached its power limit
# and lowered its clock. (On a CPU, heat does the same, and other programs take their share.) This is why a benchmark of
# one second and one of a minute disagree, and why this course computes with *measured* rates and not with the data sheet's.
#
# Here is everything that the probe measured:

# %%
theirs = reference.metric if reference else {}.get
rows = [(what, machine.metric(item), theirs(item)) for item, what in ITEMS.items()]
lab.table(("median of", "here", "H200 (ours)"), *rows)

# %% [markdown]
# **Takeaway.** Three of these numbers are enough to predict most of a training step: the matrix rate, the memory
# bandwidth, and what one call costs the host. Section 3 uses the first two, section 4 the third.

# %% [markdown]
# ## 3 · What limits an operation?
#
# **Question.** Given an operation, can you tell how long it must take before you run it?
#
# An operation does arithmetic and moves bytes. Both take time, and the hardware does both at once. So the slower of the
# two sets a **floor**, a time below which the operation can't finish: max(FLOPs / rate, bytes / bandwidth).
#
# Divide the operation's FLOPs by its bytes and you have its **intensity**. If the intensity is low, memory sets the
# floor; if it is high, arithmetic does. The intensity at which both take equally long is the **ridge**. A picture of the
# best possible rate over the intensity is called a **roofline**, after its shape.
#
# We take six operations from this course's training steps:
#
# | operation | what it is |
# |---|---|
# | UNet convolution | 3x3, at Stable Diffusion's highest resolution |
# | Self-attention | over that feature map's pixels |
# | Frozen projection | a linear layer of a language model |
# | LoRA's products | what an adapter of rank 8 adds to such a layer (lab 01) |
# | AdamW update | the optimizer's arithmetic on each trained number |
# | SiLU | an activation function by itself |
#
# **Your prediction:** how many of the six are limited by memory on this machine?

# %%
predicted_memory_bound = None  # how many of the six
lab.predict("operations limited by memory", predicted_memory_bound, "of 6")

# %% [markdown]
# FLOPs and bytes are counted by hand (`labutils/profiling/operations.py`): each input is read once, each output written
# once. To keep caches from helping, the timed calls take turns on inputs that together are far larger than a cache. On a
# GPU the calls are replayed from a CUDA graph (lab 04 explains it), so that no time is spent waiting for the host.

# %%
operations = course_operations(lab.scale, lab.device, main_dtype)
timings = {operation.name: measure_operation(operation) for operation in operations}
for op in operations:
    samples = {"alone_ms": timings[op.name].alone_ms, "called_ms": timings[op.name].called_ms}
    metrics = {name: summarise(values) for name, values in samples.items()} | {
        "flops": op.flops,
        "bytes": op.bytes,
    }
    lab.keep(
        Run(
            "00",
            op.name,
            tags={"experiment": "operation", "operation": op.name},
            metrics=metrics,
            samples=samples,
        )
    )

# %%
def show_operations(
    roofs: dict, found: dict[str, tuple[str, float, float, float]], where: str
) -> None:
    """A roofline with its operations, name -> (dtype, FLOPs, bytes, ms), and the same as a table."""
    fig, ax = plt.subplots(figsize=(8.2, 3.8))
    plots.roofline(
        ax,
        roofs,
        {name: (flops / size, flops / ms / 1e9) for name, (_, flops, size, ms) in found.items()},
    )
    ax.set_title(f"The roofline of {where}, and where a training step's operations lie")
    plt.show()
    rows = []
    for name, (dtype, flops, size, ms) in found.items():
        floor, limit = (
            roofs[dtype].floor_ms(flops, size),
            "memory" if flops / size < roofs[dtype].ridge else "arithmetic",
        )
        rows.append((name, flops / size, limit, floor, ms, f"{floor / ms:.0%}"))
    lab.table((where, "FLOP/byte", "limit", "floor, ms", "measured, ms", "floor / measured"), *rows)


# %%
roofs = {"fp32": measured.roofline("fp32"), main_dtype: measured.roofline(main_dtype)}
found = {
    op.name: (op.dtype, op.flops, op.bytes, median(timings[op.name].alone_ms)) for op in operations
}
show_operations(roofs, found, "this machine")
memory_bound = sum(op.intensity < roofs[op.dtype].ridge for op in operations)

# %% [markdown]
# On our H200 the picture was this one. (On a GPU, the first picture is your own card's, to compare.)

# %%
if h200:
    dtypes = {op.name: op.dtype for op in course_operations("full", lab.device, "bf16")}
    kept = {name: lab.reference(experiment="operation", operation=name) for name in dtypes}
    theirs = {
        name: (dtypes[name], *map(run.metric, ("flops", "bytes", "alone_ms")))
        for name, run in kept.items()
    }
    show_operations({dtype: h200.roofline(dtype) for dtype in ("fp32", "bf16")}, theirs, "our H200")

# %% [markdown]
# Read a picture from the left. AdamW and SiLU do so little arithmetic for each byte that a faster matrix unit can't help
# them. Moving fewer bytes would (lab 04 fuses such operations into their neighbours).
#
# LoRA's products are the surprise. Counted in FLOPs they are nearly free. But their intensity is about as small as their
# rank, 8, and on the H200 that puts them left of the ridge, while the frozen projection beside them lies far to the
# right. A CPU has little arithmetic for its memory, so its ridge lies far to the left, and there memory limits fewer of
# the six.
#
# A floor is a model, and the last column tests it. A share well below 100 % is where time can be gained. A share above
# 100 % says that the model was too strict: a cache held some of the data after all, the operation's kernel is better than
# the probe's, or another program slowed down the probe and not the operation.
#
# **Takeaway.** A machine has two speeds, that of its arithmetic and that of its memory, and each operation gets the slower
# of the two. Before you optimise an operation, divide its FLOPs by its bytes.

# %% [markdown]
# ## 4 · What does it cost merely to ask for work?
#
# **Question.** A GPU does nothing by itself. For each *kernel* (a program that runs on the GPU), Python calls PyTorch,
# PyTorch calls the driver, and the driver writes a command into the GPU's queue: a *launch*. The program that does this,
# on the CPU, is called the *host*. How long does it take?
#
# The host does not wait for a kernel to finish. So launching costs no time as long as the queue never runs empty. But if
# kernels are shorter than a launch, the GPU empties the queue faster than the host can fill it.
#
# **Your prediction:** how many tiny operations can one Python thread ask for in a millisecond?

# %%
predicted_calls_per_ms = None  # calls a millisecond
lab.predict("tiny calls", predicted_calls_per_ms, "a ms")

# %%
sweep = sweep_sizes(lab.device, range(0, 25 if lab.device == "cpu" else 27, 2))
CALLED, REPLAYED = "called from Python", "replayed from a CUDA graph"
times = {CALLED: {count: timing.called_ms for count, timing in sweep.items()}}
if on_gpu:
    times[REPLAYED] = {count: timing.alone_ms for count, timing in sweep.items()}
sizes = {
    f"{way}, {count}": summarise(ms) for way, curve in times.items() for count, ms in curve.items()
}
lab.keep(Run("00", "size sweep", tags={"experiment": "size sweep"}, metrics=sizes));

# %%
theirs = lab.reference(experiment="size sweep")
if theirs and not on_gpu:
    for way in (CALLED, REPLAYED):
        curve = {
            name.rpartition(", ")[2]: ms
            for name, ms in theirs.metrics.items()
            if name.startswith(way)
        }
        times[f"H200: {way}"] = {int(count): ms for count, ms in curve.items()}
fig, ax = plt.subplots(figsize=(7.2, 4.2))
plots.launch_cost(ax, times, measured.median("launch_us"))
ax.set_title("Negating an array in place: small arrays all cost the same")
plt.show()

# %% [markdown]
# On the left every curve is flat: calling costs the same however little there is to do. Only to the right of the knee does
# the work itself decide.
#
# Compare a GPU's two curves. In the lower one the same kernels are replayed from a CUDA graph, which the host launches all
# at once. What remains is the GPU's own time, about a microsecond even for a single number. The gap between the two curves
# is what lab 04 gains by capturing a step. (A CPU has no queue and no graph. There the flat part is PyTorch's own work in
# each call.)
#
# What does that mean for a training step?

# %%
launch_us = measured.median("launch_us")
theirs = h200.median("launch_us") if h200 else None
rows = []
for count in (1_000, 5_000, 20_000, 50_000):
    rows.append((count, *(us and f"{count * us / 1e3:.1f} ms" for us in (launch_us, theirs))))
lab.table(("kernels in a step", "this host needs at least", "our H200's host"), *rows)

# %% [markdown]
# **Takeaway.** If launching a step's kernels takes the host longer than running them takes the GPU, the step is
# **launch-bound**, and a faster GPU won't shorten it by a millisecond. Lab 02 counts the kernels of a real step. Article A3
# met the effect without naming it: a card with less than half the rate beat the faster one (lab 08).

# %% [markdown]
# ## 5 · A card that PyTorch was not built for
#
# **Question.** The author of article A1 put a new card (compute capability 12.0, "sm_120") into a machine with PyTorch
# 2.3. PyTorch warned that it was not built for this card, went on, and then failed. Why only a warning, if it can't work?
#
# PyTorch carries machine code for a list of GPU architectures. When it starts, it compares the list with the card, and can
# do no more than warn, because it does not know yet which kernels you will need. The refusal comes later, from the driver,
# when a kernel without fitting code is to be loaded.
#
# Both steps can be provoked on any NVIDIA GPU without harm. We give PyTorch's own check a list without this card, and the
# driver a kernel that was compiled for another card.

# %%
with lab.attempt("A kernel for another card", experiment="unlisted architecture"):
    if not on_gpu:
        raise Unavailable("only an NVIDIA GPU can refuse a kernel")
    lab.keep(
        Run(
            "00",
            "unlisted architecture",
            tags={"experiment": "unlisted architecture"},
            metrics=try_unlisted_architecture(),
        )
    )

# %% [markdown]
# The article also reports that attention from xformers, a library of fast kernels, refused the card as "too new". If
# xformers is installed here, the doctor of section 1 has already tried it.

# %%
xformers = doctor.try_import("xformers")
with lab.attempt("xformers' attention on this card", experiment="xformers"):
    if not on_gpu or xformers.status == "missing":
        raise Unavailable(
            f"{'xformers is not installed' if on_gpu else 'there is no GPU'}; no lab needs it"
        )
    failed = int(xformers.status != "ok")
    lab.keep(
        Run(
            "00",
            "xformers",
            tags={"experiment": "xformers"},
            metrics={"failed": failed, "message": xformers.message},
        )
    )

# %%
lab.verdict("A1.blackwell.unlisted-fails", "A1.blackwell.newer-build", "A1.blackwell.xformers");

# %% [markdown]
# **Takeaway.** "It starts" doesn't mean "it runs". Machine code runs on cards of the same major version (code for 8.0 runs
# on an 8.9), and only PTX, an intermediate code that the driver compiles itself, runs on later generations. Before you rent
# a new kind of card for a week, look at `torch.cuda.get_arch_list()`.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then times the two in turns, for
# as many rounds as it takes to decide.

# %%
import torch

from labutils.course.exercises import check, faster_than, solved

# %% [markdown]
# **1. Dense from sparse.** For its RTX PRO 6000 Blackwell Max-Q, article A3 prints 877.9 TFLOPS (BF16, with sparsity) and
# 1792 GB/s. At which intensity does a *dense* product on that card stop being limited by memory?

# %% tags=["exercise"]
ridge = None  # FLOP per byte
print(check("00.1", ridge))

# %% tags=["solution"]
ridge = 877.9e12 / 2 / 1792e9
solved(check("00.1", ridge))

# %% [markdown]
# **2. Launch-bound or not?** A step has `kernels` kernels, which take the GPU `gpu_ms` milliseconds in all. One launch
# costs the host `launch_us` microseconds. If host and GPU overlap perfectly, for what share of the step is the GPU busy?


# %% tags=["exercise"]
def gpu_busy(kernels: int, gpu_ms: float, launch_us: float) -> float | None:
    return None  # 0..1


def check_gpu_busy(function) -> str:
    if function(1, 1.0, 1.0) is None:
        return "Exercise 2: fill in gpu_busy first."
    if (busy := function(1000, 100.0, 5.0)) != 1:
        return f"Exercise 2: not yet. Not {busy:g}: 1000 launches take 5 ms, and the kernels 100. The GPU never waits."
    if abs(function(20_000, 50.0, 5.0) - 0.5) > 1e-9:
        return (
            "Exercise 2: not yet. 20,000 launches take 100 ms, twice as long as kernels of 50 ms."
        )
    return "Exercise 2: right. In the second case a GPU twice as fast would be busy half as much, and finish no earlier."


print(check_gpu_busy(gpu_busy))

# %% tags=["solution"]
solved(
    check_gpu_busy(
        lambda kernels, gpu_ms, launch_us: gpu_ms / max(gpu_ms, kernels * launch_us / 1e3)
    )
)

# %% [markdown]
# **3. The intensity of LoRA.** An adapter of rank r adds the products (x Aᵀ) Bᵀ to a layer, where x has the shape tokens ×
# width, A is rank × width, and B is width × rank. Write a function that gives their FLOPs per byte. A number has two bytes.
# Count reading x and both matrices, writing the result, and writing and then reading the thin product x Aᵀ.


# %% tags=["exercise"]
def lora_intensity(tokens: int, width: int, rank: int) -> float | None:
    return None  # FLOP per byte


def check_lora_intensity(function) -> str:
    if function(1, 1, 1) is None:
        return "Exercise 3: fill in lora_intensity first."
    adapter = next(
        op for op in course_operations("full", lab.device, "bf16") if op.name == "LoRA's products"
    )
    ours, yours = adapter.intensity, function(16384, 4096, 8)
    if abs(yours / ours - 1) > 0.01:
        return f"Exercise 3: not yet. At 16384 tokens, width 4096, rank 8 it is {ours:.3f}, not {yours:.3f}."
    small = function(64, 64, 8)  # where the matrices and the thin product count as well
    if abs(small - 6.4) > 0.01:
        return f"Exercise 3: nearly, but at 64 tokens and width 64 it is 6.4, not {small:.3f}. Which bytes are missing?"
    return f"Exercise 3: right. It is {yours:.2f}, nearly the rank, so it is memory-bound up to ranks in the hundreds."


print(check_lora_intensity(lora_intensity))


# %% tags=["solution"]
def solved_lora_intensity(tokens, width, rank):
    flops = 2 * tokens * width * rank + 2 * tokens * rank * width
    numbers = tokens * width + 2 * tokens * rank + 2 * rank * width + tokens * width
    return flops / (2 * numbers)


solved(check_lora_intensity(solved_lora_intensity))

# %% [markdown]
# **4. Make it faster.** 256 adapters of rank 4 each multiply eight rows of their own, one after the other. That makes 256
# calls, each of them so small that calling costs more than the work. Compute the same numbers at least four times as fast.

# %% tags=["exercise"]
ADAPTERS = 256


def one_by_one(rows, adapters):
    """rows [256, 8, 64], adapters [256, 64, 4] -> [256, 8, 4]"""
    return torch.stack([rows[at] @ adapters[at] for at in range(ADAPTERS)])


def together(rows, adapters):
    return one_by_one(rows, adapters)  # your code instead


def rows_and_adapters(seed: int) -> tuple:
    torch.manual_seed(seed)
    return torch.randn(ADAPTERS, 8, 64, device=lab.device), torch.randn(
        ADAPTERS, 64, 4, device=lab.device
    )


print(faster_than(4, one_by_one, together, rows_and_adapters, times=4))

# %% tags=["solution"]
solved(faster_than(4, one_by_one, torch.bmm, rows_and_adapters, times=4))

# %% [markdown]
# ## Where this comes from, and what to read on
# - S. Williams, A. Waterman, D. Patterson: *Roofline: An Insightful Visual Performance Model for Multicore Architectures*,
#   Communications of the ACM 52(4), 2009. The picture of section 3.
# - H. He: *[Making Deep Learning Go Brrrr From First Principles](https://horace.io/brrr_intro.html)*, 2022. Arithmetic,
#   memory and overhead, the three limits of this lab, explained with PyTorch.
# - NVIDIA: *[GPU Performance Background User's
#   Guide](https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/index.html)*. Intensity, and
#   which operations are limited by what.
# - NVIDIA: *[CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/)*, on compute capabilities,
#   binary and PTX compatibility (section 5).
# - PyTorch: *[CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html)*. Why a call returns before the GPU has
#   done its work.
# - The course's [glossary](../docs/glossary.md).

# %% [markdown]
# ## What you did
# - You checked whether this machine is ready for fine-tuning, and know what to type if it is not.
# - You measured its peaks, and know why to compare them with the dense column of a data sheet.
# - You placed six operations of a training step on a roofline, and said what limits each.
# - You measured what a launch costs, and can tell when a step is launch-bound.
#
# Next: lab 01, what LoRA computes and what it saves.

# %%
lab.done(
    {
        "matrix products": measured.rate(main_dtype),
        "operations limited by memory": memory_bound,
        "tiny calls": 1e3 / launch_us,
    }
)
