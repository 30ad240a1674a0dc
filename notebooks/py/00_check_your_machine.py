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
# Every later lab compares a time with a limit. This one finds the limits: what this machine can do, what its data sheet
# promises, and what it costs just to ask for work. It also finds what would have stopped a later lab halfway.
#
# Two published articles turn up by their short names. **A1** profiles and tunes LoRA training of Stable Diffusion on a
# Blackwell workstation card; **A3** fine-tunes language models on that card and on an H100. The README says more of both.
#
# **After this lab you can**
# - tell whether a machine is ready to fine-tune on, and put right what is not;
# - read a data sheet without being misled by its sparse figures, and say which share of its peak is real;
# - place an operation on a roofline, and say what limits it before you time it;
# - tell when a loop is limited by the host's launches rather than by the GPU's work.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 1 minute |
# | `full` | a GPU of 40 GB | 1.5 minutes |
#
# No network is needed, and no model: all that runs here is single operations on random numbers.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course import open_lab

lab = open_lab("00", globals())

# %%
from statistics import median

import matplotlib.pyplot as plt

from labutils import doctor, hardware, plots
from labutils.course import NotHere
from labutils.hardware import cuda
from labutils.results import Run, summarise

plots.use_style()

# %% [markdown]
# ## 1 · Is this machine ready?
#
# The doctor looks at what has stopped people before: the driver, the PyTorch build, shared memory, a compiler, and packages
# that are installed and yet can't be used. `fail` stops the labs, `warn` spoils one of them, `info` is good to know. Each
# says what to type. From a shell: `labutils doctor`.

# %%
findings = doctor.examine()
print(doctor.render(findings))

# %% [markdown]
# ## 2 · What does it really reach?
#
# **Predict** the rate of large matrix products here, in TFLOP/s: in bf16 on a GPU (the data sheet of an H200 says 989, or
# 1979 "with sparsity"), in fp32 on a CPU (a laptop's core does some hundred billion FLOPs a second at best).

# %%
predicted_tflops = None  # TFLOP/s
lab.predict("matrix products", predicted_tflops, "TFLOP/s")

# %% [markdown]
# The probe multiplies random matrices, not zeros: a product of zeros switches fewer transistors, draws less power and runs
# at a higher clock than training ever will. It warms up, repeats, and keeps every sample.

# %%
measured = hardware.probe()
main_dtype = "fp32" if lab.device == "cpu" else "bf16" if measured.rate("bf16") else "fp16"
machine = Run("00", "machine", samples=measured.samples)
machine.metrics = {item: summarise(samples) for item, samples in measured.samples.items()}
if architectures := cuda.architectures():
    machine.metrics["torch_architectures"] = architectures
lab.keep(machine);

# %%
spec = hardware.spec_of(lab.machine)
rates = {dtype: measured.samples[f"tflops_{dtype}"] for dtype in hardware.DTYPES if measured.rate(dtype)}
fig, ax = plt.subplots()
plots.peaks(ax, rates, spec and spec.dense, spec and spec.sparse)
ax.set_title(
    f"Measured here, and the data sheet of {spec.name}" if spec else "Measured here (no data sheet is on file)"
)
plt.show()

# %% [markdown]
# The dotted marks are what sells: they count products with zeros that a pruned matrix would let the hardware skip. Training
# has no such matrices, so each share in this course is of the **dense** peak. Article A3's table of specifications prints
# the sparse column; comparing a measurement with it makes every program look half as good as it is.
#
# Even the dense peak is out of reach: it assumes the highest clock. The probe measures in bursts of 10 ms, which is how
# products come in a training step. What if they never stop?

# %%
seconds, held = zip(*hardware.rate_over_time(main_dtype), strict=True)
lab.keep(Run("00", "held", metrics={"tflops": summarise(held[len(held) // 2 :]), "dtype": main_dtype}))
fig, ax = plt.subplots(figsize=(7.2, 2.8))
ax.plot(seconds, held, marker=".", label="without a pause")
ax.axhline(measured.rate(main_dtype), color="black", linestyle=":", label="the probe's median")
ax.set(xlabel="seconds", ylabel=f"{main_dtype} TFLOP/s", ylim=(0, None), title="The rate of matrix products, held up")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# Where the curve falls within the first tenths of a second, the card has met its power limit and lowered its clock (on a
# CPU, other programs and heat do the same). That is why floors in this course are computed from a *measured* rate, and why
# a benchmark of one second and one of a minute disagree.

# %%
reference = lab.reference("machine")
theirs = reference.metric if reference else {}.get
rows = [(what, machine.metric(item), theirs(item)) for item, what in hardware.ITEMS.items()]
lab.table(("median of", "here", "H200 (ours)"), *rows)

# %% [markdown]
# **Takeaway.** Three numbers describe a machine well enough to predict most of a training step: its matrix rate, its
# memory bandwidth, and what a launch costs the host. The next two sections use one each.

# %% [markdown]
# ## 3 · What limits an operation?
#
# An operation does arithmetic and moves bytes. Both take time, and the hardware does them at once; so the slower of the two
# sets a **floor**: max(FLOPs / rate, bytes / bandwidth). FLOPs per byte is the operation's *intensity*. Where the two times
# are equal lies the *ridge*: left of it memory is the limit, right of it arithmetic.
#
# Six operations from this course's training steps:
#
# | operation | what it is |
# |---|---|
# | UNet convolution | 3x3, at Stable Diffusion's highest resolution |
# | Self-attention | over that feature map's pixels |
# | Frozen projection | a linear layer of a language model |
# | LoRA's products | what an adapter of rank 8 adds to such a layer |
# | AdamW update | the optimizer, per parameter |
# | SiLU | an activation function by itself |
#
# **Predict** how many of the six are limited by memory here.

# %%
predicted_memory_bound = None  # how many of the six
lab.predict("operations limited by memory", predicted_memory_bound, "of 6")

# %% [markdown]
# FLOPs and bytes are counted by hand (`labutils/hardware/operations.py`): every input read once, every output written once.
# Inputs are rotated through far more memory than a cache holds. On a GPU the calls are replayed from a CUDA graph, so that
# no time is spent waiting for the host.

# %%
operations = hardware.course_operations(lab.scale, lab.device, main_dtype)
timings = {operation.name: hardware.measure_operation(operation) for operation in operations}
for op in operations:
    samples = {"alone_ms": timings[op.name].alone_ms, "called_ms": timings[op.name].called_ms}
    metrics = {name: summarise(values) for name, values in samples.items()} | {"flops": op.flops, "bytes": op.bytes}
    lab.keep(Run("00", f"operation: {op.name}", metrics=metrics, samples=samples))

# %%
roofs = {"fp32": measured.roofline("fp32"), main_dtype: measured.roofline(main_dtype)}
alone = {op.name: median(timings[op.name].alone_ms) for op in operations}
fig, ax = plt.subplots(figsize=(8.2, 3.8))
plots.roofline(ax, roofs, {op.name: (op.intensity, op.flops / alone[op.name] / 1e9) for op in operations})
ax.set_title("The roofline of this machine, and where a training step's operations lie")
plt.show()

# %%
rows = []
for op in operations:
    roof = roofs[op.dtype]
    floor, limit = roof.floor_ms(op.flops, op.bytes), "memory" if op.intensity < roof.ridge else "arithmetic"
    share = f"{100 * floor / alone[op.name]:.0f} %"
    rows.append((op.name, op.intensity, limit, floor, alone[op.name], share))
lab.table(("operation", "FLOP/byte", "limit", "floor, ms", "measured, ms", "floor / measured"), *rows)
memory_bound = sum(op.intensity < roofs[op.dtype].ridge for op in operations)

# %% [markdown]
# Read the picture from the left. AdamW and SiLU do so little per byte that no faster matrix unit will ever help them; fewer
# bytes would (lab 04 fuses them into their neighbours). LoRA's products cost next to nothing in a table of FLOPs, but their
# intensity is only about their rank (twice the rank, over the bytes of a number): on a GPU that lies left of the ridge,
# while the frozen projection beside them lies far to the right. (A CPU has little arithmetic for its memory, so its ridge
# lies far to the left; few operations are limited by memory there.)
#
# A floor is a model. A share above 100 % means that the model was too strict: a cache held some of the data after all, the
# operation's kernel is better than the probe's, or another program slowed the probe alone. A share far below 100 % is
# where there is something to gain.
#
# **Takeaway.** The same GPU has two speeds, and the operation picks one. Before you optimise an operation, divide its FLOPs
# by its bytes.

# %% [markdown]
# ## 4 · What does it cost just to ask?
#
# A GPU does nothing by itself: for each kernel, Python calls PyTorch, PyTorch calls the driver, and the driver writes a
# command into the GPU's queue. The host does not wait for the result, so this costs nothing, as long as the queue never
# runs empty. If kernels are shorter than the time to launch one, it does.
#
# **Predict** how many tiny operations a millisecond one Python thread can ask for.

# %%
predicted_calls_per_ms = None  # calls a millisecond
lab.predict("tiny calls", predicted_calls_per_ms, "a ms")

# %%
sweep = hardware.sweep_sizes(lab.device, range(0, 25 if lab.device == "cpu" else 27, 2))
times = {"called from Python": {count: timing.called_ms for count, timing in sweep.items()}}
if lab.device == "cuda":
    times["replayed from a CUDA graph"] = {count: timing.alone_ms for count, timing in sweep.items()}
sizes = {f"{way}, {count}": summarise(ms) for way, curve in times.items() for count, ms in curve.items()}
lab.keep(Run("00", "size sweep", metrics=sizes))
fig, ax = plt.subplots()
plots.launch_cost(ax, times, measured.median("launch_us"))
ax.set_title("Negating an array in place: small arrays all cost the same")
plt.show()

# %% [markdown]
# The flat part is the price of asking; only to the right of the knee does the work itself decide. On a GPU, the second curve
# shows the same kernels replayed from a CUDA graph, which the host launches all at once: what is left is the GPU's own
# time, a microsecond or two even for a single number. Between the curves lies what lab 04 wins by capturing a step.
# (On a CPU there is no queue and no graph: the flat part is PyTorch's own overhead in each call.)
#
# What that means for a training step:

# %%
launch_us = measured.median("launch_us")
rows = [(count, f"{count * launch_us / 1e3:.1f} ms") for count in (1_000, 5_000, 20_000, 50_000)]
lab.table(("kernels in a step", "the host needs at least"), *rows)

# %% [markdown]
# **Takeaway.** A step with more kernels than the GPU takes launch times to finish them is **launch-bound**: a faster GPU
# leaves it exactly as slow. Lab 02 counts the kernels of a real step. Article A3 met the effect where a card of less than
# half the rate beat the faster one.

# %% [markdown]
# ## 5 · A card that PyTorch was not built for
#
# The author of article A1 put a new card (compute capability 12.0, "sm_120") into a machine with a stable PyTorch 2.3. It
# warned that the card was not among its architectures, and then failed. Why a warning first, if it can't work?
#
# PyTorch holds machine code for a list of architectures. At start it compares the list with the card, and can only warn: it
# does not know yet which kernels you will need. The driver refuses later, when a kernel without fitting code is loaded.
# Both steps can be provoked on any NVIDIA GPU, harmlessly: PyTorch's own check is given a list without this card, and the
# driver a kernel that was compiled for another one.

# %%
with lab.attempt("A kernel for another card", reference="unlisted architecture"):
    if lab.device == "cpu":
        raise NotHere("it takes an NVIDIA GPU to be refused by one")
    lab.keep(Run("00", "unlisted architecture", metrics=hardware.try_unlisted_architecture()))

# %% [markdown]
# The same article found that xformers' attention refused the card as "too new". The doctor has just tried that too, if xformers
# is installed.

# %%
xformers = doctor.this_machine().imports.get("xformers")
with lab.attempt("xformers' attention on this card", reference="xformers"):
    if lab.device == "cpu" or xformers is None or xformers.status == "missing":
        raise NotHere(f"{'there is no GPU' if lab.device == 'cpu' else 'xformers is not installed'}; no lab needs it")
    failed = int(xformers.status != "ok")
    lab.keep(Run("00", "xformers", metrics={"failed": failed, "message": xformers.message}))

# %%
lab.verdict("A1.blackwell.unlisted-fails", "A1.blackwell.newer-build", "A1.blackwell.xformers");

# %% [markdown]
# **Takeaway.** "It starts" says little about a machine. Machine code runs on cards of the same major version (code for
# 8.0 on an 8.9); only PTX, which the driver compiles itself, runs on later ones. Look at
# `torch.cuda.get_arch_list()` before you rent a new kind of card for a week.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
import torch

from labutils.exercises import faster_than, solved

# %% [markdown]
# **1. Dense from sparse.** Article A3 prints 877.9 TFLOPS (BF16) and 1792 GB/s for its RTX PRO 6000 Blackwell Max-Q. From
# which intensity on is a dense product limited by arithmetic there?

# %% tags=["exercise"]
ridge = None  # FLOP per byte


def check_ridge(answer) -> str:
    if answer is None:
        return "Exercise 1: set ridge first."
    if abs(answer - 490) <= 5:
        return "Exercise 1: that is the ridge of the sparse peak. Training multiplies no pruned matrices."
    if abs(answer - 245) < 2:
        return "Exercise 1: right. Below 245 FLOP per byte that card waits for its memory."
    return f"Exercise 1: not yet. {answer:g} is not it: dense FLOPs a second, divided by bytes a second."


print(check_ridge(ridge))

# %% tags=["solution"]
solved(check_ridge(877.9e12 / 2 / 1792e9))

# %% [markdown]
# **2. Launch-bound or not?** A step has `kernels` kernels, together `gpu_ms` long, and a launch costs the host `launch_us`.
# At best host and GPU overlap perfectly. Which share of the step is the GPU busy?


# %% tags=["exercise"]
def gpu_busy(kernels: int, gpu_ms: float, launch_us: float) -> float | None:
    return None  # 0..1


def check_gpu_busy(function) -> str:
    if function(1, 1.0, 1.0) is None:
        return "Exercise 2: fill in gpu_busy first."
    if (busy := function(1000, 100.0, 5.0)) != 1:
        return f"Exercise 2: not yet. Not {busy:g}: 1000 launches take 5 ms, and the kernels 100. The GPU never waits."
    if abs(function(20_000, 50.0, 5.0) - 0.5) > 1e-9:
        return "Exercise 2: not yet. 20,000 launches take 100 ms, twice as long as kernels of 50 ms."
    return (
        "Exercise 2: right. And a GPU twice as fast would be busy half as much, and not be done a millisecond earlier."
    )


print(check_gpu_busy(gpu_busy))

# %% tags=["solution"]
solved(check_gpu_busy(lambda kernels, gpu_ms, launch_us: gpu_ms / max(gpu_ms, kernels * launch_us / 1e3)))

# %% [markdown]
# **3. The intensity of LoRA.** An adapter of rank r adds the products (x Aᵀ) Bᵀ to a layer, with x of shape tokens x width.
# Write its FLOPs per byte for numbers of two bytes; read x and both matrices, write the result, and write and read the thin
# product between them.


# %% tags=["exercise"]
def lora_intensity(tokens: int, width: int, rank: int) -> float | None:
    return None  # FLOP per byte


def check_lora_intensity(function) -> str:
    if function(1, 1, 1) is None:
        return "Exercise 3: fill in lora_intensity first."
    adapter = next(op for op in hardware.course_operations("full", lab.device, "bf16") if op.name == "LoRA's products")
    ours, yours = adapter.intensity, function(16384, 4096, 8)
    if abs(yours / ours - 1) > 0.01:
        return f"Exercise 3: not yet. At 16384 tokens, width 4096, rank 8 it is {ours:.3f}, not {yours:.3f}."
    small = function(64, 64, 8)  # where the matrices and the thin product count as well
    if abs(small - 6.4) > 0.01:
        return f"Exercise 3: nearly, but at 64 tokens and width 64 it is 6.4, not {small:.3f}. Which bytes lack?"
    return f"Exercise 3: right. {yours:.2f}, nearly the rank: memory-bound up to a rank in the hundreds."


print(check_lora_intensity(lora_intensity))


# %% tags=["solution"]
def solved_lora_intensity(tokens, width, rank):
    flops = 2 * tokens * width * rank + 2 * tokens * rank * width
    numbers = tokens * width + 2 * tokens * rank + 2 * rank * width + tokens * width
    return flops / (2 * numbers)


solved(check_lora_intensity(solved_lora_intensity))

# %% [markdown]
# **4. Make it faster.** 256 adapters of rank 4 each multiply eight rows of their own, one after the other: 256 calls, each
# far below the size from which work outweighs its launch. Get the same numbers four times as fast.

# %% tags=["exercise"]
ADAPTERS = 256


def one_by_one(rows, adapters):
    """rows [256, 8, 64], adapters [256, 64, 4] -> [256, 8, 4]"""
    return torch.stack([rows[at] @ adapters[at] for at in range(ADAPTERS)])


def together(rows, adapters):
    return one_by_one(rows, adapters)  # your code instead


def rows_and_adapters(seed: int) -> tuple:
    torch.manual_seed(seed)
    return torch.randn(ADAPTERS, 8, 64, device=lab.device), torch.randn(ADAPTERS, 64, 4, device=lab.device)


print(faster_than(4, one_by_one, together, rows_and_adapters, times=4))

# %% tags=["solution"]
solved(faster_than(4, one_by_one, torch.bmm, rows_and_adapters, times=4))

# %% [markdown]
# ## What you did
# - You checked whether this machine is ready to fine-tune on, and know what to type where it is not.
# - You measured its peaks, and compared them with the dense column of the data sheet.
# - You placed six operations of a training step on its roofline, and said what limits each.
# - You measured what a launch costs, and can tell when a step is launch-bound.
#
# Next: lab 01, what LoRA computes, and what it saves.

# %%
lab.done(
    {
        "matrix products": measured.rate(main_dtype),
        "operations limited by memory": memory_bound,
        "tiny calls": 1e3 / launch_us,
    }
)
