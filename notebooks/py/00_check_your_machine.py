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
# Every later lab compares a time with a limit. Here you measure the limits: how fast this machine multiplies, how fast it
# moves data, and what it costs to ask it for work.
#
# The course tests published articles. Two of them appear here. **A1** profiles and tunes LoRA training of Stable
# Diffusion on a Blackwell workstation card. **A3** fine-tunes language models on that card and on an H100. The README
# introduces all four, and the [glossary](../docs/glossary.md) any other new word.
#
# **After this lab you can**
# - time an operation on a GPU without fooling yourself;
# - say how much of a data sheet's peak a machine really reaches;
# - place an operation on a roofline, and know its least time before you run it;
# - measure what a launch costs the host, bare and inside a module, and tell when a step is launch-bound;
# - tell whether a PyTorch build runs on a card.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 1 minute |
# | `full` | a GPU of 40 GB | 1 minute |
#
# You need no network and no model: everything is single operations on random numbers. Without a GPU you measure your
# CPU. Cells that need a GPU say so and are skipped. Where our H200 has run the same cell, you see what it printed.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("00", globals())

# %%
import time
from functools import partial
from itertools import pairwise
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from labutils.course import plots
from labutils.labs.lab00_machine import machine_run, operation_runs
from labutils.profiling.cuda_architectures import try_unlisted_architecture
from labutils.profiling.gpu_specs import spec_of
from labutils.profiling.measured_rates import probe_machine
from labutils.profiling.operations import course_operations
from labutils.recipe import Unavailable
from labutils.results.records import Run, summarise
from labutils.tools import doctor

# %%
plots.use_style()
device, half, dtype = lab.device, torch.float32, "fp32"  # a CPU trains in fp32 in this course
if device == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
    half, dtype = torch.bfloat16, "bf16"
elif device == "cuda":
    half, dtype = torch.float16, "fp16"

# %% [markdown]
# ## 1 · Is this machine ready?
#
# **Question.** What would stop a later lab halfway?
#
# The doctor checks what has stopped people before: driver, PyTorch build, shared memory, compiler, packages that are
# installed but can't be used. `fail` means that labs won't run. `warn` means that one of them will suffer. In a shell the
# same is `labutils doctor`.

# %%
print(doctor.render(doctor.examine(), width=84))

# %% [markdown]
# **Takeaway.** A missing compiler or a small `/dev/shm` costs a minute now, or a night later.

# %% [markdown]
# ## 2 · Time it rightly
#
# **Question.** A GPU works while Python goes on. How do you time something that hasn't happened yet when the call
# returns?
#
# **Technique.** Warm up: the first calls load kernels and allocate memory. Put *events* into the GPU's queue, which the GPU
# stamps as it gets to them. Synchronise before you read them. Repeat, and take the median. A CPU works within the call, so
# there its own clock will do. One limit remains. The host needs microseconds to ask for a call. If the GPU ends sooner,
# events time the host. Section 5 has the cure.


# %%
def time_ms(call, repeats=20, warm_up=3):
    """Median milliseconds of one call, on the clock of the device that does the work."""
    for _ in range(warm_up):
        call()
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(time.perf_counter())
        return median(1e3 * (end - start) for start, end in pairwise(marks))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()  # goes into the queue; the GPU stamps it when it gets there
    torch.cuda.synchronize()  # the host waits until the GPU has done all
    return median(start.elapsed_time(end) for start, end in pairwise(marks))


# %% [markdown]
# What goes wrong without it? The next cell times one matrix product in four ways, and turns each time into a rate.

# %%
with lab.attempt("Timing a GPU by the host's clock"):
    a, b = (torch.randn(8192, 8192, device="cuda").to(half) for _ in range(2))

    def host_ms(wait):
        began = time.perf_counter()
        a @ b
        if wait:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    torch.cuda.synchronize()
    ways = {"the first call": host_ms(True), "without synchronising": host_ms(False)}
    torch.cuda.synchronize()
    ways |= {
        "synchronised, by the host": host_ms(True),
        "events, warmed up": time_ms(lambda: a @ b),
    }
    for way, ms in ways.items():
        print(f"{way:26} {ms:9.3f} ms, {2 * 8192**3 / ms / 1e9:9,.0f} TFLOP/s")

# %% [markdown]
# Compare each rate with the data sheet: an H200's dense peak in bf16 is 989 TFLOP/s. Without synchronising the rate lies
# far above it: this timed the call, and not the product. The first call takes longer than the others, because it also
# loads kernels and allocates memory.
#
# **Takeaway.** A rate above the data sheet's peak means that the stopwatch is wrong.

# %% [markdown]
# ## 3 · How fast is it really?
#
# **Question.** A data sheet promises a rate in TFLOP/s, 10¹² floating-point operations a second. How much of it does a
# plain matrix product get?
#
# **Your prediction:** section 2 timed one product. The course's probe measures in short bursts, with rests between them. How
# many TFLOP/s do large matrix products reach in it? A GPU is measured in bf16, where an H200's data sheet says 989, or 1,979
# "with sparsity". A CPU is measured in fp32, where one laptop core reaches about 0.1.

# %%
my_tflops = None  # TFLOP/s
lab.predict("matrix products", my_tflops, "TFLOP/s")

# %% [markdown]
# **Technique.** A product of two n × n matrices takes n³ multiplications and as many additions. For the bandwidth, take an
# operation that hardly computes, on a buffer much larger than any cache. The numbers are random and not zero: zeros
# switch fewer transistors, so the chip draws less power and keeps a higher clock than in training.

# %%
n, count = (8192, 2**28) if device == "cuda" else (1024, 2**25)
a, b = (torch.randn(n, n, device=device).to(half) for _ in range(2))
buffer = torch.randn(count, device=device)

tflops = 2 * n**3 / time_ms(lambda: a @ b) / 1e9
gb_per_s = 2 * buffer.nbytes / time_ms(buffer.neg_) / 1e6  # each byte is read and written
print(f"{tflops:.3g} TFLOP/s in {dtype}, {gb_per_s:.0f} GB/s")
del buffer

# %% [markdown]
# **Measurement.** The course's probe (`labutils/profiling/measured_rates.py`) does the same for each number format, in
# bursts of 10 ms with rests between them, and keeps all samples. A result in this course is the median of its samples.

# %%
machine = lab.keep(machine_run())
names = {"run": "", "tflops_fp32": "fp32, TFLOP/s", "tflops_bf16": "bf16, TFLOP/s"}
names |= {"tflops_fp8": "FP8, TFLOP/s", "copy_gb_per_s": "memory, GB/s", "launch_us": "a call, µs"}
lab.show([machine], names, experiment="machine")

# %%
with lab.attempt("A data sheet to compare with"):
    if not (sheet := spec_of(lab.machine)):
        raise Unavailable("no data sheet of this machine is on file")
    plots.peaks(plt.gca(), machine, sheet)

# %% [markdown]
# A data sheet quotes two peaks. The sparse one is twice the dense one. It assumes weights of which half are
# pruned in a fixed pattern. Training has no such weights, so this course compares with the **dense** peak. Article A3
# prints the sparse figures.
#
# The dense peak assumes the highest clock. Does even the burst's rate last? Here products run without a pause.

# %%
began, rates = time.perf_counter(), []
while time.perf_counter() - began < (2 if device == "cuda" else 0.4):
    rates.append(2 * n**3 / time_ms(lambda: a @ b, repeats=10, warm_up=0) / 1e9)
lasts = median(rates[len(rates) // 2 :])
print(f"first ten products {rates[0]:.3g} TFLOP/s, in the second half {lasts:.3g}")
lab.keep(Run("00", "held", metrics={"tflops": lasts, "dtype": dtype}));

# %% [markdown]
# A card that draws its full power lowers its clock. A CPU that gets hot does the same. This lab reads neither power nor clock, but
# that is the likely reason. So on our H200 the first ten products, 14 ms, and a run of 2 s disagree.
#
# **Takeaway.** Compute with measured rates, and not with a data sheet's. Our H200 reached 80 % of its bf16 peak in bursts, and 68 %
# without pauses: 795 and 670 TFLOP/s. This course's floors use the burst's: a long step may take 19 % more.

# %% [markdown]
# ## 4 · What limits an operation?
#
# **Question.** Can you tell how long an operation must take before you run it?
#
# An operation does arithmetic and moves bytes, and the hardware does both at once. The slower of the two sets its **floor**:
# max(FLOPs / rate, bytes / bandwidth). FLOPs divided by bytes is its **intensity**. The intensity at which both take equally
# long is the machine's **ridge**. Below the ridge memory is the limit, above it arithmetic. A *roofline* draws the best rate
# over the intensity: it rises to the ridge, and is flat after it.
#
# **Technique.** Count, for six operations of this course's training steps. Each input is read once, each output written
# once; a multiplication and an addition are two FLOPs.

# %%
tiny = lab.scale == "tiny"
batch, channels, tokens, width = (1, 128, 512, 1024) if tiny else (4, 320, 4096, 4096)
pixels, heads, rank, size = batch * 64 * 64, 8, 8, half.itemsize
seen, long = (1024, 2048) if tiny else (4096, 16384)  # tokens of the attention, and of LoRA
trained, elements = (2**21, 2**22) if tiny else (2**24, 2**26)

work = {  # operation: (FLOPs, bytes)
    "UNet convolution": (  # 3 x 3, at Stable Diffusion's highest resolution
        2 * pixels * channels**2 * 9,
        (2 * pixels * channels + 9 * channels**2) * size,
    ),
    "Self-attention": (  # over a feature map's pixels: Q K^T, and the scores times V
        4 * batch * heads * seen**2 * 40,
        4 * batch * heads * seen * 40 * size,
    ),
    "Frozen projection": (2 * tokens * width**2, (2 * tokens * width + width**2) * size),
    "LoRA's products": (  # what an adapter adds to a projection: lab 01
        4 * long * width * rank,
        2 * (long * width + long * rank + rank * width) * size,
    ),
    "AdamW update": (14 * trained, 28 * trained),  # reads w, g, m, v in fp32; writes w, m, v
    "SiLU": (4 * elements, 2 * elements * size),  # an activation function by itself
}
counted = course_operations(lab.scale, device, dtype)
assert work == {one.name: (one.flops, one.bytes) for one in counted}

# %% [markdown]
# **Your prediction:** for how many of the six is memory the limit here? The formula is intensity < ridge, and the ridge is
# TFLOP/s · 1000 / (GB/s) of section 3. `work` above has each operation's FLOPs and bytes.

# %%
my_memory_bound = None  # how many of the six
lab.predict("operations limited by memory", my_memory_bound, "of 6")

# %% [markdown]
# **Measurement.** Each call takes other inputs than the one before, more in all than any cache holds. On a GPU the calls are
# recorded once, as a *CUDA graph*, and started together. So nothing waits for the host (`measure_operation` in
# `labutils/profiling/operations.py`).

# %%
operations = lab.keep(operation_runs(lab.scale, device, dtype))
names = {"operation": "operation", "intensity": "FLOP/byte", "floor_ms": "floor, ms"}
names |= {"alone_ms": "measured, ms", "reached": "floor / measured"}
lab.show(operations, names, experiment="operation")

# %%
roofs = {name: probe_machine().roofline(name) for name in dict.fromkeys(("fp32", dtype))}
memory_bound = sum(one.intensity < roofs[one.dtype].ridge for one in counted)
plots.roofline(plt.gca(), roofs, operations);

# %% [markdown]
# Memory limits three of them on an H200. Read the picture from the left. SiLU and AdamW do so little arithmetic on each byte that
# faster matrix units can't help them. Moving fewer bytes would: lab 04 fuses such operations. LoRA's products are the surprise.
# Their row has four times the projection's tokens. For the same tokens they have 0.4 % of its FLOPs, 9 % of its floor and 13 % of
# its time. Their intensity is low: about their rank, 8, in two bytes a number; half of that in fp32. So they wait for memory on an
# H200, while the projection beside them lies far to the right.
#
# Time can be gained where *floor / measured* is well below 1. A value above 1 means that part of the data came from a cache,
# that the operation's kernel is better than the probe's, or that another program held up the probe.
#
# **Attention takes about three times its floor on an H200. Why?** The floor counts two products. Attention also takes one
# exponential for each pair of tokens and head: 537 million at `full`. The paper on FlashAttention-3 gives an H100 3.9 · 10¹²
# of them a second. So they alone need 0.14 ms, where the products need 0.11. And the usual kernels are made for heads of
# 32, 64 or 128: a head of 40 is computed as one of 64. Test both reasons: the same FLOPs, with fewer and wider heads. The
# four take turns, so that a machine that slows down slows all of them.
#
# **Your prediction:** how many times as fast are 5 heads of 128 as 16 of 40? If exponentials take all the time: 16 / 5.

# %%
my_wide_heads = None  # times as fast
lab.predict("attention with wide heads is faster", my_wide_heads, "x")

# %%
examples, seen = (2, 4096) if device == "cuda" else (1, 512)
calls = {}
for heads, each in ((20, 32), (16, 40), (10, 64), (5, 128)):
    qkv = torch.randn(3, examples, heads, seen, each, device=device).to(half)
    calls[each] = partial(F.scaled_dot_product_attention, *qkv)
turns = [{each: time_ms(call, 5, 1) for each, call in calls.items()} for _ in range(5)]
attention = {each: median(turn[each] for turn in turns) for each in calls}
for each, ms in attention.items():
    heads = 640 // each  # heads x width is 640 in all four
    rate, us = 4 * examples * 640 * seen**2 / ms / 1e9, 1e3 * ms / heads
    print(f"{heads:2} heads of {each:3}: {ms:.3f} ms, {rate:.3g} TFLOP/s, {us:.1f} µs a head")

# %% [markdown]
# All four lines have the same products in total. Look at the last column, the time of *one* head. On an H200 a head of 32, of 40
# and of 64 takes 18 to 20 µs. Two reasons fit, and this test can't separate them. This kernel may compute 32 as 64, too. And a head
# has the same number of exponentials whatever its width. At the H100's published rate these take 9 µs, half of a head's time: at
# that rate they aren't all of it. At 128 a head takes longer. So the gain is 2, and not 16 / 5.
#
# In section 4's table the convolution reaches 60 % of its floor's rate on an H200. Two likely reasons, which this lab doesn't
# separate: 320 channels fill tiles of 128 to 83 %, and in 60 µs a kernel's start and end count.
#
# **Takeaway.** Divide an operation's FLOPs by its bytes before you optimise it. If it misses its floor, ask what the
# count leaves out.

# %% [markdown]
# ## 5 · What does a launch cost?
#
# **Question.** A GPU does nothing by itself. For each *kernel*, a program that runs on the GPU, the *host* calls the
# driver, which writes a command into the GPU's queue: a *launch*. How long does one take, and how long inside a real
# module?
#
# **Technique.** The smallest operation there is, 200 times, timed on the host, which doesn't wait. Then the same kernels
# recorded once as a CUDA graph, which the host launches all at once.

# %%
x = torch.rand(1, device=device)


def calls():
    for _ in range(200):
        x.neg_()


def host_us(call):
    """Microseconds that the host needs for `call`, without waiting for the GPU."""
    samples = []
    for _ in range(20):
        if device == "cuda":
            torch.cuda.synchronize()  # an empty queue to begin with
        began = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - began))
    return samples


bare_us = median(host_us(calls)) / 200
print(f"one call of a tiny operation: {bare_us:.2f} µs of the host")

# %%
with lab.attempt("The same kernels from a CUDA graph"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for way, call in {"called from Python": calls, "replayed": graph.replay}.items():
        print(f"{way:19} {1e3 * time_ms(call) / 200:.2f} µs a kernel")

# %% [markdown]
# Called from Python, a kernel takes about as long as the host's call, and the GPU waits: 5.4 and 6.7 µs on our H200, whose
# host's speed moves. Replayed, only the GPU's own time remains. That saves 4.3 µs a kernel on our H200. Lab 04 captures a step.
#
# A training loop makes few bare calls. Most of its operations pass through a module, autocast and autograd, and the backward
# pass launches many of its kernels. So a kernel of a real step costs the host more.
#
# **Your prediction:** how many times as long as a bare launch does a module's kernel take the host?

# %%
my_module_factor = None  # times as long as a bare launch
lab.predict("a module's kernel, against a bare launch", my_module_factor, "x")

# %%
with lab.attempt("The launches of a module"):
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model, tokens = nn.TransformerEncoder(layer, 8).cuda(), torch.randn(1, 16, 64, device="cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            loss = model(tokens).square().mean()
        loss.backward()

    step()
    step_us = host_us(step)  # before the profiler, which slows down the host
    with torch.profiler.profile(acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sum(event.device_type.name == "CUDA" for event in profile.events())
    module_us = [us / kernels for us in step_us]
    machine.metrics["module_launch_us"] = summarise(module_us)
    machine.metrics["module_factor"] = median(module_us) / bare_us
    print(f"{kernels} kernels, {median(module_us):.1f} µs each; bare {bare_us:.1f} µs")
lab.keep(machine);

# %% [markdown]
# The model is tiny, so the GPU never holds up the host: what you time is the host. On our H200 a module's kernel took 22 µs. A bare
# launch took 5.0 (the probe), 5.4 (events) and 6.7 µs. So the factor is 3.3 to 4.4, and the cell's is 3.3. The bare launch is a
# host's first constant, a module's launch the second. The second depends on the kind of module, too. Lab 02 measures it again, on a
# small copy of its own loop, and predicts a real step's host time: **kernels × a module's launch**.
#
# If that is longer than the kernels themselves take, the GPU waits, and the step is **launch-bound**. A faster card won't
# shorten it. Article A3 found this with a profiler: on a mixture-of-experts model its host was the limit, and the slower
# card won by 1.3x (lab 08).
#
# **Takeaway.** Rate, bandwidth and the bare launch bound a step from below. For what the host really needs, count with a
# module's launch.

# %% [markdown]
# ## 6 · A card that PyTorch was not built for
#
# **Question.** Article A1's author put a new card (compute capability 12.0, `sm_120`) into a machine with PyTorch 2.3. PyTorch
# warned, went on, and then failed. When does a build run on a card? *PTX* is an intermediate code, which the driver can compile
# for a card that came later.
#
# | the build has | the driver | |
# |---|---|---|
# | machine code for the card's major version, and its minor version or a lower one: `sm_80` on an 8.9 | loads it | runs |
# | PTX of the card's version or an earlier one: `compute_80` on a 9.0 | compiles it once | runs, after a slow start |
# | neither | refuses the kernel when it is to be loaded | *no kernel image is available* |
#
# So PyTorch can only warn: it doesn't know yet which kernels you will need.
#
# **Technique.** One line says what a build has.

# %%
with lab.attempt("What this build runs on"):
    print("this card:", torch.cuda.get_device_capability())
    print("this build:", torch.cuda.get_arch_list())

# %% [markdown]
# **Measurement.** We give PyTorch's own check a list without this card. Then we give the driver a kernel that was compiled
# for another card. The article also reports that xformers, a library of attention kernels, refused the card as too new.

# %%
with lab.attempt("A kernel for another card", experiment="unlisted architecture"):
    tried = lab.keep(Run("00", "unlisted architecture", metrics=try_unlisted_architecture()))
    for what, value in tried.metrics.items():
        print(f"{what}: {value}")

# %%
with lab.attempt("xformers' attention on this card", experiment="xformers"):
    from xformers.ops import memory_efficient_attention

    q = torch.randn(1, 128, 8, 64, device="cuda", dtype=half)
    memory_efficient_attention(q, q, q)
    lab.keep(Run("00", "xformers", metrics={"failed": 0}))

# %%
lab.verdict("A1.blackwell.unlisted-fails", "A1.blackwell.newer-build", "A1.blackwell.xformers")

# %% [markdown]
# The article's cure was a nightly build, but its Dockerfile names the index `cu121`. CUDA 12.1 can't compile for `sm_120`;
# CUDA 12.8 is the first that can. What counts is the list above, not the date of the build. The report on xformers stays
# open: only a card of capability 12.0 can test it.
#
# **Takeaway.** "It starts" doesn't mean "it runs". Before you rent a new kind of card, look at
# `torch.cuda.get_arch_list()`.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("00.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1. Dense from sparse.** For its RTX PRO 6000 Blackwell Max-Q, article A3 prints 877.9 TFLOPS (BF16, with sparsity) and
# 1792 GB/s. At which intensity does a *dense* product on that card stop being limited by memory?

# %% tags=["exercise"]
ridge = None  # FLOP per byte
print(check("00.1", ridge))

# %% [markdown]
# **2. The floor of a backward pass.** The projection $y = xW^\top$ of section 4 is frozen, so its backward pass only turns
# the gradient of y into that of x. With x of the shape tokens × width and a square W, all in two bytes a number, write
# the function that gives its floor.


# %% tags=["exercise"]
def backward_floor_ms(tokens: int, width: int, tflops: float, gb_per_s: float) -> float | None:
    return None  # milliseconds


def check_floor(function) -> str:
    if function(4096, 4096, 800, 4000) is None:
        return "Exercise 2: fill in backward_floor_ms first."
    cases = {(4096, 4096): 0.17180, (64, 4096): 0.00865, (16384, 320): 0.00529}
    for (tokens, width), floor in cases.items():
        found = function(tokens, width, 800, 4000)
        if abs(found / floor - 1) > 0.01:
            return (
                f"Exercise 2: not yet. {tokens} tokens, width {width}: {floor} ms, not {found:.5f}."
            )
    return "Exercise 2: right. With few tokens the floor is the reading of W: that is how text is generated."


print(check_floor(backward_floor_ms))


# %% [markdown]
# **3. A fair comparison.** A machine gets slower while you measure: it heats up, or somebody starts a job. Whoever times
# all of A and then all of B blames B. Write `ratio`: how many times as long `a` takes as `b`, within 10 %, although every
# call of either is slower than the call before. The check's two functions run on the CPU.


# %% tags=["exercise"]
def ratio(a, b, rounds=9):
    """How many times as long a() takes as b()."""
    return None  # time.perf_counter() is the clock


def check_ratio(function) -> str:
    done = []

    def slowing(ms):
        def call():
            done.append(ms)
            time.sleep(1e-3 * ms * (1 + len(done) / 20))

        return call

    found = function(slowing(4), slowing(2))
    if found is None:
        return "Exercise 3: fill in ratio first."
    if done and 1.8 < found < 2.2:
        return f"Exercise 3: right. {found:.2f}, where 2 is true. This course's benchmarks take turns, too."
    return f"Exercise 3: not yet. {found:.2f}, where 2 is true. Let the two take turns."


print(check_ratio(ratio))


# %% [markdown]
# **4. Make it faster.** 256 adapters of rank 4 each multiply eight rows of their own, one after the other. That makes 256
# calls, each of them so small that calling costs more than the work. Compute the same numbers at least four times as fast.

# %% tags=["exercise"]
ADAPTERS = 256
if device == "cpu":
    torch.set_num_threads(1)  # products this small gain nothing from more


def one_by_one(rows, adapters):
    """rows [256, 8, 64], adapters [256, 64, 4] -> [256, 8, 4]"""
    return torch.stack([rows[at] @ adapters[at] for at in range(ADAPTERS)])


def together(rows, adapters):
    return one_by_one(rows, adapters)  # your code instead


def rows_and_adapters(seed: int) -> tuple:
    torch.manual_seed(seed)
    shapes = (ADAPTERS, 8, 64), (ADAPTERS, 64, 4)
    return tuple(torch.randn(shape, device=device) for shape in shapes)


print(faster_than(4, one_by_one, together, rows_and_adapters, times=4))

# %% [markdown]
# ## What to read on
# - S. Williams, A. Waterman, D. Patterson: *Roofline: An Insightful Visual Performance Model for Multicore Architectures*,
#   Communications of the ACM 52(4), 2009.
# - H. He: *[Making Deep Learning Go Brrrr From First Principles](https://horace.io/brrr_intro.html)*, 2022.
# - J. Shah and others: *[FlashAttention-3](https://arxiv.org/abs/2407.08608)*, 2024. Why exponentials count.
# - NVIDIA: *[GPU Performance Background User's
#   Guide](https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/index.html)*.
# - NVIDIA: *[CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/)*, on binary and PTX
#   compatibility.
# - PyTorch: *[CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html)*. Why a call returns early.
#
# Next: lab 01, what LoRA computes and what it saves.

# %%
factor, ours = "a module's kernel, against a bare launch", lab.reference(experiment="machine")
lab.done(
    {
        "matrix products": machine.metric(f"tflops_{dtype}"),
        "operations limited by memory": memory_bound,
        "attention with wide heads is faster": attention[40] / attention[128],
        factor: machine.metric("module_factor"),
    },
    ours={factor: ours.metric("module_factor") if ours else None},
)
