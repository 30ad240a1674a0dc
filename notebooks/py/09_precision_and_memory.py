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
# # Lab 09 · Precision and memory
#
# Article A4 is a guide without measurements. Here parts of its advice become switches of a real training loop. You predict what
# two of them do, and measure all. Then you compute a step's peak memory without a GPU.
#
# **After this lab you can**
# - train with autocast and a GradScaler, and say what they do to the numbers;
# - say which TF32 switch is on, and what it does to memory;
# - trade time for memory by checkpointing and accumulation;
# - flip one switch at a time, and tell an effect from noise;
# - predict a step's peak memory before it runs;
# - recover from an out-of-memory error.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | ½ minute |
# | `small` | a GPU of 8 GB | 3 minutes |
# | `full` | a GPU of 80 GB | 4 minutes |
#
# A CPU has fewer switches; there the H200's tables follow your own.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
rounds: int = 0  # times round all switches; 0: 2 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("09", globals())

# %%
import math
import weakref

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from labutils.course import plots
from labutils.labs.lab09_peak_memory import GRID, predicted_and_recorded
from labutils.labs.lab09_toggles import SWITCHES, flipped, numerical_effects, switch_table
from labutils.profiling.machine import usable_cores
from labutils.profiling.memory import TensorRecord
from labutils.profiling.memory_model import saved_for_backward
from labutils.results.records import Runs
from labutils.training.free_memory import make_room
from labutils.training.peak_memory import predicted
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

# %%
plots.use_style()
device = lab.device
if device == "cpu":
    torch.set_num_threads(max(1, usable_cores() // 2))

# %% [markdown]
# ## The switches
#
# **Question.** Which advice shortens the step, which saves memory, and what does it cost?
#
# The loop is Stable Diffusion's LoRA training, on latents and text embeddings that are there already. *base* is the article's
# mixed precision, with the frozen weights in 16 bits, too. *float32* has neither that nor TF32, a rounding that section 2
# explains. Every other row changes one of these two; *tf32* turns on both of TF32's switches.

# %%
lab.table(("switch", "of", "why"), *((name, s.base, s.why) for name, s in SWITCHES.items()))

# %% [markdown]
# The next cell times all rows in one comparison. Section 1 explains its tables.


# %%
unet = on_drawn_latents(lab.workload("sd15-lora"))
runs = lab.keep(flipped(unet, rounds or None))
flips = Runs(runs.values()).select(experiment="toggles")

# %% [markdown]
# ## 1 · Half the bits
#
# **Question.** FP16 halves the bytes and uses tensor cores. What does it do to the gradient?
#
# **Technique.** `autocast` runs products and convolutions in 16 bits, and keeps norms and long sums in float32. FP16's smallest
# number is 6e-8. A gradient below half of it becomes 0: it *underflows*. So a `GradScaler` multiplies the loss by a large factor
# before the backward pass, and divides the gradients by it before the update. If a gradient has overflowed, it skips the update
# and halves the factor.

# %%
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()),
    nn.Conv2d(32, 4, 3, padding=1),
).to(device)
x, y = torch.randn(2, 8, 4, 64, 64, device=device)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler(device)
for _ in range(3):
    with torch.autocast(device, torch.float16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}, factor {scaler.get_scale():,.0f}")


# %%
def gradient(dtype=None, factor=1.0):
    """Of a small loss, for a loss is small where it is a mean over many numbers."""
    model.zero_grad()
    with torch.autocast(device, dtype, enabled=dtype is not None):
        loss = 0.01 * F.mse_loss(model(x), y)
    (factor * loss).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / factor


def off(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


exact = gradient()
for name, found in {
    "FP16": gradient(torch.float16),
    "FP16, scaled": gradient(torch.float16, 2.0**14),
    "BF16": gradient(torch.bfloat16),
}.items():
    print(f"{name}: {off(found, exact):.2%} off, {(found == 0).float().mean():.1%} became 0")
assert off(gradient(torch.float16, 2.0**14), exact) < 0.01

# %% [markdown]
# On the H200 FP16's gradient is 15 % off without a scaled loss, yet at most one of 2,404 weights got a gradient of 0. A weight's
# gradient is a sum over gradients of activations. With this small loss these are below 1e-6, where FP16 has steps of 6e-8. Some
# become 0, others are rounded coarsely. A scaled loss cures both.
#
# BF16 has float32's range and needs no scaler. But it stores 7 bits of mantissa where FP16 stores 10.
#
# **Your prediction:** in FP16 with a scaled loss the UNet's gradient is 0.14 % off on the H200. By how many percent is it off in
# BF16, with three bits fewer?

# %%
my_error: float | None = None  # for example 1

lab.predict("gradient off in BF16 by", my_error, "%")

# %% [markdown]
# **Measurement.** One batch through the UNet. Each form rounds frozen weights and the diffusion's noise, too. *Throughout* has no
# autocast: norms, sums and stored adapters are in 16 bits, too.

# %%
numbers = lab.keep(numerical_effects(unet))
columns = {"precision": "form", "gradient_error": "gradient off by, share"}
columns |= {"lost_share": "share that became 0"}
lab.show(numbers, columns, experiment="numbers")
lab.verdict("A4.pytorch.scaler", "A4.memory.sensitive-parts")

# %% [markdown]
# BF16's gradient is 1.08 % off, 7.8 times as much as FP16's: nearly $2^3$.
#
# Without a scaled loss 31 % of the adapters' gradients became 0. Those were small ones: the whole is 12 % off, and coarse
# rounding may do much of that. Autocast's error is 15 % smaller than *throughout*'s. That is one batch with random weights, and
# the loss factors differ.
#
# **The table below.** Each round timed every row once and *base* twice; every other round went backwards
# (`labutils/labs/lab09_toggles.py`).
#
# - *time*: each round divides the row's ms by its base's. You see the median and its 95 % interval. It can differ from the ratio
#   of the two steps, by which your prediction is scored.
# - *floor*: the time of the step's FLOPs, without recomputing, at your GPU's rate in the row's fastest format.
# - *base again*: *base* over itself, so noise: in this text −15 to +12 %. Beyond ±3 % the machine is *unsteady*, and verdicts on
#   time stay open. *Probably* means: the interval lies far outside the noise.
# - *here* is this run, *ours* an earlier one on our H200.
#
# **Your prediction:** by how many percent does mixed precision shorten the UNet's step, against float32 without TF32?

# %%
my_precision: float | None = None  # for example 50

lab.predict("mixed precision shortens the step by", my_precision, "%")

# %%
names = ("float32", "base", "bf16")
lab.show(flips.select(toggle=names), switch_table, experiment="toggles", toggle=names)
lab.verdict("A4.pytorch.mixed-precision")

# %% [markdown]
# Mixed precision probably shortens the H200's step by 79 %. The step is still seven times its floor, so arithmetic isn't the
# limit. Memory traffic or the *host*, the CPU that launches kernels, may be: section 3. The peak fell to less than a fifth.
# Section 2 explains why it isn't half.
#
# **Takeaway.** FP16 needs a scaled loss. BF16 doesn't, for three bits less. Compare one gradient with float32's before you trust
# a format.

# %% [markdown]
# ## 2 · TF32, and room for a convolution
#
# **Question.** Tensor cores can multiply float32 numbers if these are rounded to **TF32** first. Which switch does that, and
# what else changes?
#
# **Technique.** TF32 keeps float32's range and 10 bits of mantissa. There are two switches. By default matrix products don't use
# TF32, convolutions do.


# %%
def tf32(x):
    """float32 rounded to 10 bits of mantissa, ties to even."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


a, b = torch.randn(2, 512, 512, device=device)
exact = a @ b
products = torch.backends.cuda.matmul
default, products.fp32_precision = products.fp32_precision, "tf32"  # a CPU ignores it
print(f"by the switch: {off(a @ b, exact):.4%} off")
products.fp32_precision = default
print(f"by hand:       {off(tf32(a) @ tf32(b), exact):.4%} off")
assert ((tf32(a) - a).abs() <= 2**-11 * a.abs()).all()

# %% [markdown]
# Both are 0.0293 % off on the H200.
#
# `torch.backends.cudnn.conv.fp32_precision` is the convolutions' switch. It also decides which *algorithms* cuDNN may use. Some
# transform inputs and filters first, and need room for the result: a *workspace*. It is no tensor, so no list of tensors shows
# it. PyTorch takes the first algorithm on cuDNN's list that runs ([issue
# 49207](https://github.com/pytorch/pytorch/issues/49207)). The cell measures the workspace of five of the UNet's convolutions,
# without TF32 (*ieee*) and with it. It names the longest kernel, too: *fft* is a Fourier transform, *cf32* complex numbers.


# %%
def workspace(conv, image):
    """GB that a forward and backward pass takes beyond its tensors; its longest kernel."""
    for _ in range(2):  # the first call chooses the algorithms
        ones = torch.ones_like(conv(image))
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            out = conv(image)
            gradient = torch.autograd.grad(out, image, ones)
            torch.cuda.synchronize()
        beyond = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del out, gradient
    longest = sorted(prof.key_averages(), key=lambda kernel: kernel.self_device_time_total)[-1]
    return beyond / 1e9, longest.key[:60]


# %%
convolutions = torch.backends.cudnn.conv
default = convolutions.fp32_precision
with lab.attempt("workspaces of cuDNN"):
    shapes = [(640, 640, 64), (960, 320, 64), (1280, 1280, 32), (1920, 640, 32), (2560, 1280, 16)]
    for channels, filters, side in shapes:
        conv = nn.Conv2d(channels, filters, 3, padding=1, device="cuda").requires_grad_(False)
        image = torch.randn(8, channels, side, side, device="cuda", requires_grad=True)
        for precision in ("ieee", "tf32"):
            convolutions.fp32_precision = precision
            gb, kernel = workspace(conv, image)
            print(f"{channels} to {filters}, {side} x {side}, {precision}: {gb:.2f} GB, {kernel}")
    del conv, image  # section 5 looks at what is held
convolutions.fp32_precision = default

# %%
names = ("float32", "tf32", "tf32 convolutions", "base")
lab.show(flips.select(toggle=names), switch_table, experiment="toggles", toggle=names)
lab.verdict("A4.memory.mixed-precision")

# %% [markdown]
# The convolutions' switch probably shortens the step to 338 ms, both together to 262. It also changes memory: for the same
# tensors the H200's peak is 65.9 GB without it, and 17.5 with it.
#
# - One convolution, 1,280 channels on 32 × 32 pixels, takes a workspace of 55.7 GB, and 0.16 with TF32. Its Fourier transforms
#   turn each of 1,280 × 1,280 filters from 3 × 3 numbers into 64 × 33 complex ones of 8 bytes. That makes 27.7 GB; we didn't look
#   for the rest.
# - Against 17.5 GB, PyTorch's default, FP16 saves 6.0. Some 2 of these are the frozen weights: autocast alone leaves them in
#   float32. Against the default *base* probably takes 63 % less time, not 79.
#
# **Takeaway.** Say what you compare with. Peak memory depends on which algorithms a library may choose.

# %% [markdown]
# ## 3 · Time for memory
#
# **Question.** Activations wait in memory for the backward pass. What does it cost to keep fewer?
#
# **Technique.** `checkpoint` keeps a block's input, and computes the block again in the backward pass. *Accumulation* trains on a
# part of the batch at a time and adds up the gradients. `saved_tensors_hooks` sees what is kept.

# %%
def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


blocks = nn.ModuleList(block() for _ in range(6)).to(device)
batch_in = torch.randn(512, 64, device=device)


def forward(x, run=lambda block, x: block(x)):
    for block in blocks:
        x = x + run(block, x)
    return x.square().mean()


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


# %%
def kept_mb(function):
    """What autograd keeps beside the weights, each tensor once; and the backward pass."""
    own, found = {p.data_ptr() for p in blocks.parameters()}, {}

    def pack(tensor):
        found[tensor.data_ptr()] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = function()
    loss.backward()
    return sum(t.nbytes for pointer, t in found.items() if pointer not in own) / 1e6


def gradients():
    found = torch.cat([p.grad.flatten() for p in blocks.parameters()])
    blocks.zero_grad()
    return found


# %%
plain_mb = kept_mb(lambda: forward(batch_in))
whole = gradients()
again_mb = kept_mb(lambda: forward(batch_in, recomputed))
torch.testing.assert_close(gradients(), whole)

first, *others = batch_in.chunk(4)
part_mb = kept_mb(lambda: forward(first) / 4)
for part in others:
    (forward(part) / 4).backward()  # adds to the gradients that are there
torch.testing.assert_close(gradients(), whole, rtol=1e-4, atol=1e-7)

assert math.isclose(1e6 * plain_mb, saved_for_backward(blocks, lambda: forward(batch_in)))
print(f"kept: {plain_mb:.2f} MB; checkpointed {again_mb:.2f}; a quarter at a time {part_mb:.2f}")

# %% [markdown]
# Checkpointing keeps six inputs and the last sum, 0.92 MB. The gradients are the same.
#
# In the UNet most weights are frozen. So forward is one part of the arithmetic, backward about one more: gradients of
# activations, hardly any of weights. Computing the blocks again adds one part to two.
#
# **Your prediction:** by how many percent does checkpointing lengthen the UNet's step? If arithmetic sets its time, at most 50.

# %%
my_again: float | None = None  # for example 30

lab.predict("checkpointing lengthens the step by", my_again, "%")

# %%
names = ("base", "checkpointing", "selective checkpointing", "accumulation")
lab.show(flips.select(toggle=names), switch_table, experiment="toggles", toggle=names)
lab.verdict("A4.memory.checkpointing", "A4.pytorch.accumulation", "A3.accumulation.slower")

# %% [markdown]
# On the H200 checkpointing probably lengthens the step by 94 %, for 62 % less memory. With the noise, the interval of 52 to 117 %
# doesn't exclude arithmetic's 50. By the ratio of the two steps it is 86 %.
#
# **Who sets the pace?** *Accumulation* takes 121 ms for one example, *base* 124 for eight. An eighth of the arithmetic is hardly
# faster. The host may set the pace, or kernels too small for the GPU: a trace would tell. If it is the host, launches count, not
# FLOPs, and checkpointing launches a second forward pass from Python.
#
# *Selective* checkpointing asks a Python function for each operation: keep its result? This one keeps some matrix products:
#
# ```python
# kept = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
#
# def policy(context, operation, *args, **kwargs):
#     keep = operation in kept
#     return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
#
# contexts = partial(create_selective_checkpoint_contexts, policy)
# checkpoint(block, x, use_reentrant=False, context_fn=contexts)
# ```
#
# `partial` is in `functools`, the other helpers are in `torch.utils.checkpoint`. The table's row keeps convolutions and
# attention, too. Here it loses twice against *checkpointing*: 7.68 GB, not 4.34, and probably more time.
#
# **Takeaway.** Before you trade time for memory, ask who sets the pace. If it is the host, FLOPs don't tell the price.

# %% [markdown]
# ## 4 · The rest of the list
#
# **Question.** Layout, cuDNN's autotuner, another form of the optimizer: each is one line. Does it pay on this loop?
#
# **Technique.** Layout, autotuner and a fused AdamW may change the result by rounding only. bitsandbytes' AdamW keeps its
# *moments*, running averages of each gradient and its square, in 8 bits.

# %%
import bitsandbytes as bnb

before = model(x)
torch.backends.cudnn.benchmark = True  # times the algorithms for each new shape
model = model.to(memory_format=torch.channels_last)
after = model(x.to(memory_format=torch.channels_last))
torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
torch.backends.cudnn.benchmark = False


def moved(kind, **form):
    """By three updates."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(256, 256, device=device))
    optimizer = kind([weight], lr=1e-3, **form)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weight.detach()


plain = moved(torch.optim.AdamW)
print(f"fused:  {off(moved(torch.optim.AdamW, fused=True), plain):.4%} off")
print(f"8 bits: {off(moved(bnb.optim.AdamW8bit), plain):.2%} off")

# %%
lab.show(flips, switch_table, experiment="toggles")
tried, left = (runs["advice"].metric(name) for name in ("tried", "left_alone"))
print(f"{tried} switches tried, {left} don't show a shorter step")
lab.verdict("A4.pytorch.cudnn-benchmark", "A4.method.measure")

# %% [markdown]
# None of these four shows a shorter step. The noise hides effects of some 10 to 20 %.
#
# - *Layout* and *autotuner* aim at the kernels. If the host sets the pace, that shortens no step. Try them again on a captured
#   step (lab 04).
# - *AdamW* updates a thousandth of the weights here, so 8 bits save few bytes: the fused form, with float32 moments, has the same
#   peak. Where all weights are trained in float32, 8 bits save nearly three quarters of the moments' bytes.
#
# Four of eleven switches probably shorten the step: those to 16 bits or TF32. The three that trade time for memory probably
# lengthen it.
#
# **Takeaway.** Read a list of advice as a list of questions to your loop. Ask again after each change.

# %% [markdown]
# ## 5 · The peak, computed
#
# **Question.** What is in the peak, when is it reached, and can you know it without the GPU?
#
# **Technique.** A ledger counts the bytes of every tensor that an operation makes, for as long as anything holds it. It counts
# *storages*, the memory behind tensors: views share one. `weakref.finalize` tells when one is freed. On the *meta* device tensors
# have shapes and no contents: the same step with the same ledger takes no memory.


# %%
class Ledger(TorchDispatchMode):
    def __init__(self, known=()):
        super().__init__()
        self.seen = {t.untyped_storage()._cdata for t in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.freed, key, size).atexit = False

    def freed(self, key, size):
        self.seen.remove(key)
        self.now -= size


# %%
def peaks_by_phase(on, watch=Ledger):
    """Phase -> MB at its peak, of a first step in which all weights are trained."""
    with torch.device(on):
        network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        x = torch.randn(1024, 512)
    optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
    found = {"build": sum(p.nbytes for p in network.parameters()) / 1e6}
    with watch([*network.parameters(), x]) as ledger:
        for phase in ("forward", "backward", "first update"):
            ledger.peak = ledger.now
            if phase == "forward":
                loss = network(x).square().mean()
            elif phase == "backward":
                loss.backward()
            else:
                optimizer.step()
            found[phase] = found["build"] + ledger.peak / 1e6
    return found


here = peaks_by_phase(device)
for phase, mb in here.items():
    print(f"{phase}: {mb:.1f} MB")
for other in (peaks_by_phase("meta"), peaks_by_phase(device, TensorRecord)):
    assert all(math.isclose(other[phase], mb, rel_tol=0.01) for phase, mb in here.items())

# %% [markdown]
# The numbers on *meta* are the same within 1 %. Two peaks consist of:
#
# - *backward*: weights, 8.4 MB; eight outputs and four tensors of the loss's gradient, 2.1 each. No weight has a gradient yet.
# - *first update*: weights, gradients and two moments, 8.4 each, and 2.1 of temporaries.
#
# In the second step the moments' 16.8 MB are there from the start. After `zero_grad` the backward pass should then peak highest,
# at 33.6 + 16.8 = 50.4. So plan with the second step:
#
# $$\text{peak} = W + M + \max_t\,(G_t + A_t + T_t) + 2 \times 34\ \text{MB}$$
#
# Weights $W$ and moments $M$ stay. Gradients $G$, activations $A$ and temporaries $T$ vary with the moment $t$. The last term is
# the H200's: cuBLAS's workspaces, one for the forward pass's thread and one for autograd's.
#
# **For a model of your own:** build it on *meta* in the format in which it runs, and take two steps in `Ledger`. Under autocast
# copies in 16 bits are missing, as `autocast("cuda")` does nothing on *meta*. Attention keeps more there than a fused kernel
# does. `labutils/training/peak_memory.py` adds both: the nine predictions below are its, not your `Ledger`'s. Peaks are
# *allocated* bytes, and cuDNN's workspaces aren't predicted.
#
# **Your prediction:** three models, each with checkpointing *off*, by *blocks* and *selective*. Stable Diffusion is at batch 4
# here. By how many percent is the worst of the nine predictions off on the H200?

# %%
my_worst: float | None = None  # for example 10

lab.predict("the worst of nine predictions is off by", my_worst, "%")

# %%
told, timelines = [], {}
make_room(unet)  # of weights in other formats, which earlier sections used
for name, recipe in GRID.items():
    work = unet if name == unet.name else lab.workload(name)
    for mode in ("off", "blocks") if lab.scale == "tiny" else ("off", "blocks", "selective"):
        tags = {"experiment": "memory", "workload": name, "checkpointing": mode}
        with lab.attempt(f"memory: {name}, {mode}", **tags):
            changed = recipe.but(checkpointing=mode)
            run, timelines[name, mode] = predicted_and_recorded(work, changed)
            told.append(lab.keep(run))
    make_room(work)

# %%
pictured = {
    "Stable Diffusion, everything kept": ("sd15-lora", "off"),
    "Stable Diffusion, checkpointed": ("sd15-lora", "blocks"),
    "Qwen3, checkpointed": ("qwen3-lora-long", "blocks"),
}
fig, axes = plt.subplots(3, 1, figsize=(7.4, 9.6))
for ax, (title, one) in zip(axes, pictured.items(), strict=True):
    if one in timelines:
        timeline = timelines[one]
        plots.stacked_memory(ax, timeline.series(), timeline.phases, plots.MEMORY_FILLS)
    ax.set_title(title)
plt.show()

# %%
columns = {"workload": "model", "checkpointing": "checkpointing", "predicted_gb": "predicted, GB"}
columns |= {"peak_gb": "peak, GB", "off": "off by, share"}
columns |= {"forward_peak_gb": "in the forward pass", "backward_peak_gb": "in the backward pass"}
lab.show(told, columns, experiment="memory")
lab.verdict("A3.qlora.states-small")

# %% [markdown]
# The worst of the nine predictions is 2.6 % off: Stable Diffusion, checkpointed. That model's three are 0.1 GB too low, the
# others at most 0.3 % off. The figure and the larger of the last two columns miss up to 0.03 GB of the peak; we didn't look for
# why.
#
# The weights are always there. Gradients and moments are too thin to be seen, as only adapters have them.
#
# - *Everything kept:* activations pile up in the forward pass and go in the backward pass, so the peak lies between the two.
# - *Checkpointed:* fewer are kept. Each hump of the backward pass, drawn as temporaries, is a block computed again. In Stable
#   Diffusion one hump is the peak.
# - *Qwen3:* the peak is at the *logits*, a number for each token and each word of the vocabulary, and their float32 copies.
#   Checkpointing can't shrink them. Lab 06's chunked loss can.
#
# The next cell predicts the full-size Stable Diffusion 1.5 in section 3's batch of 8. `on="cuda"` imitates a GPU.

# %%
sd_full = open_workload("sd15-lora", "full")
for mode in ("off", "blocks"):
    there = GRID["sd15-lora"].but(checkpointing=mode, micro_batch=8)
    gb = predicted(sd_full, there, on="cuda").peak / 1e9
    print(f"checkpointing {mode}, batch 8: {gb:.1f} GB on a GPU")

# %% [markdown]
# On the H200 section 3 measured 11.5 and 4.34 GB. The second prediction is a little too high; at batch 4 it was too low, and we
# didn't look for why.
#
# So the peak is known before you rent the GPU: nine times within 3 %. cuDNN's workspaces are missing. In section 2 they took up
# to 0.2 GB with TF32, 55.7 without. In 16 bits they weren't measured. Leave room: PyTorch keeps freed memory, CUDA takes some.
#
# **Takeaway.** Ask *when* the peak is reached, then what to save. Compute it before you rent the GPU, and add room for cuDNN's
# workspaces.

# %% [markdown]
# ## 6 · Out of memory, on purpose
#
# **Question.** A step runs out of memory. When is its memory free again?
#
# **Technique.** A ledger with a limit raises the error that a full GPU raises.


# %%
class SmallCard(Ledger):
    limit = 1e6 * plain_mb / 2

    def count(self, storage):
        super().count(storage)
        if self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now / 1e6:.1f} MB of tensors: out of memory")


with SmallCard([*blocks.parameters(), batch_in]) as ledger:
    try:
        forward(batch_in).backward()
    except torch.OutOfMemoryError as error:
        print(error)
        print(f"in the except block {ledger.now / 1e6:.2f} MB")
print(f"after it {ledger.now / 1e6:.2f} MB")
assert ledger.now < 0.1 * ledger.peak

# %% [markdown]
# It is free after the `except` block. Inside nothing is: the exception holds the traceback, that holds the failed step's frames,
# and those hold its tensors. `torch.cuda.empty_cache()` can't free them. So leave the block first:
#
# ```python
# try:
#     step()
#     fits = True
# except torch.OutOfMemoryError:
#     fits = False  # and nothing else
# if not fits:
#     optimizer.zero_grad(); gc.collect(); torch.cuda.empty_cache()
# ```
#
# **Takeaway.** Note the failure in the `except` block, and clean up after it.

# %% [markdown]
# ## Exercises
#
# Each cell checks itself. `lab.solution("09.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, smaller_than

# %% [markdown]
# **1.** A model has 1 billion weights, all of them trained, in float32 with AdamW. How many GB do weights, gradients and
# the optimizer's state take together? And how many with the 8-bit optimizer, its constants not counted?

# %% tags=["exercise"]
my_gb = None  # two numbers, for example (8, 5)
print(check("09.1", my_gb))

# %% [markdown]
# **2.** A step of batch 1 peaks at 20 GB, one of batch 3 at 32 GB. Memory is linear in the batch. The GPU has 80 GB, and a tenth
# of it should stay free. Which batch is the largest?

# %% tags=["exercise"]
my_start = None  # a whole number
print(check("09.2", my_start))

# %% [markdown]
# **3. Write checkpointing.** Fill in `Again` without `torch.utils.checkpoint`: keep the block's input, compute the block again in
# the backward pass. `by_hand` must have `all_kept`'s result and gradient of `x`, and keep at most a third of the bytes. `block`
# is an argument without a gradient, so `backward` returns `None` for it. You need `ctx.save_for_backward`,
# `detach().requires_grad_()`, `torch.enable_grad` and the result's own `backward(slope)`.

# %% tags=["exercise"]
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, slope):
        raise NotImplementedError


def all_kept(x):
    for block in blocks:
        x = x + block(x)
    return x


def by_hand(x):
    return all_kept(x)  # use Again instead


def some_rows(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(512, 64, device=device).requires_grad_(),)


print(smaller_than(3, all_kept, by_hand, some_rows, share=1 / 3, module=blocks))

# %% [markdown]
# ## What to read on
# - Micikevicius and others: *[Mixed Precision Training](https://arxiv.org/abs/1710.03740)*, 2017. Loss scaling.
# - Kalamkar and others: *[A Study of BFLOAT16 for Deep Learning Training](https://arxiv.org/abs/1905.12322)*, 2019.
# - Chen and others: *[Training Deep Nets with Sublinear Memory Cost](https://arxiv.org/abs/1604.06174)*, 2016. Checkpointing.
# - Dettmers and others: *[8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861)*, 2021.
# - PyTorch: [performance tuning guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html),
#   [automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html), [TF32 and other notes on
#   CUDA](https://docs.pytorch.org/docs/stable/notes/cuda.html), [understanding CUDA memory
#   usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
# - The course's [glossary](../docs/glossary.md).
#
# Next: lab 10, what feeds the loop, and what a look at it tells.


# %%
def truths(toggles, forms, memory):
    ms = {r.tags.get("toggle"): r.metric("step_ms") for r in toggles if not r.tags.get("again")}
    share = {r.tags["precision"]: r.metric("gradient_error") for r in forms if r.ok}
    offs = sorted(abs(run.metric("off")) for run in memory)
    found = {}
    if "bf16" in share:
        found["gradient off in BF16 by"] = 100 * share["bf16"]
    if ms.get("float32"):
        found["mixed precision shortens the step by"] = 100 * (1 - ms["base"] / ms["float32"])
    if ms.get("checkpointing"):
        found["checkpointing lengthens the step by"] = 100 * (ms["checkpointing"] / ms["base"] - 1)
    return found | ({"the worst of nine predictions is off by": 100 * offs[-1]} if offs else {})


theirs = (lab.references(experiment=name) for name in ("toggles", "numbers", "memory"))
lab.done(truths(flips, numbers.values(), told if device == "cuda" else []), truths(*theirs))
