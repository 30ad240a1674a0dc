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
# Article A1 adds workers (lab 03), compiles the UNet, pins memory, and ends 2.96 times as fast as it began. You climb its rungs,
# and go on: first the same work with less of the host, then less work for the same gradients.
#
# **After this lab you can**
# - compile a block, and say after how many steps that has paid;
# - repair `reduce-overhead` where gradient accumulation breaks it;
# - capture a step as one CUDA graph, with right gradients;
# - keep a log and an optimizer that never ask the GPU anything;
# - leave out work whose result is known, and check that the gradients stay;
# - say of each rung of a ladder what it is worth, and whether noise could have made it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU; a C++ compiler for section 1 | 1 minute |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 40 GB | 6 minutes, nearly half of them compiling |
#
# A CPU has no launches to save. It climbs fewer rungs, and shows our record, an H200's.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
rounds: int = 0  # times round the whole ladder; 0: 1 at tiny, 6 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("04", globals())

# %%
import copy
import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from labutils.course import plots
from labutils.labs import lab04_climb
from labutils.labs.ladders import A1_LADDER, rung_rows
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.profiling.compat import ask_cpp_compiler
from labutils.profiling.machine import usable_cores
from labutils.results.effects import time_effect
from labutils.results.records import Run
from labutils.training import Benchmark

plots.use_style()
if lab.device == "cpu":
    torch.set_num_threads(max(1, usable_cores() // 2))  # the others are left to the workers
    ask_cpp_compiler()
compile_from_nothing()  # so that a first step compiles all that it uses

# %% [markdown]
# ## The ladder
#
# **Question.** How far is it from the script as downloaded to what the hardware allows?
#
# Each rung adds its changes to the rung above. Where it changes several settings, its factor belongs to all of them together. There
# are three lanes. *Article*: the article's own changes. *Same work*: the same computation with less overhead. *Same mathematics*:
# gradients of the same distribution, computed otherwise. Beside each time stands its floor: the FLOPs at the measured rate, or the
# bytes at the measured bandwidth, whichever takes longer (lab 00). LoRA's products are always counted as the plain adapter computes
# them.

# %%
recipes = lab04_climb.rungs_on(lab.device)
lab.table(("rung", "lane", "changes", "why", "here"), *rung_rows(A1_LADDER, recipes))

# %% [markdown]
# One comparison measures every rung, and all sections take their numbers from it. Each round goes through the whole ladder, every
# second round backwards, and measures the stock loop at both ends: what the two differ by is noise. Where that can be more than 3
# %, the verdict on a time is *inconclusive: unsteady machine*. Tables compare with their first row, the picture with the rung
# above. A speed-up is the median of ratios, round by round.
#
# Start the cell and read on. It takes half a minute on a CPU, and nearly the whole lab's time on a GPU. There other processes
# meanwhile compile the last rung's UNet and try two modes of the compiler, so a first step may take longer than alone.

# %%
with Benchmark(lab.workload("sd15-lora")) as bench:
    folder = lab.cache_dir / "traces" / "lab-04"
    count = rounds or (1 if lab.scale == "tiny" else 6)
    runs = lab.keep(lab04_climb.climbed(bench, count, folder))

# %% [markdown]
# ## 1 · Fewer kernels
#
# **Question.** What does `torch.compile` gain a step, and when has its long first step paid?
#
# It traces the Python code once, merges chains of small operations into single kernels, and builds those. All of that happens in
# the first step. Here is a gated block with a norm written out by hand. A merged kernel reads and writes each number once, where
# the chain does so at each operation.


# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def seconds(function, *inputs, times=1):
    """Of one call, its work on the GPU included."""
    synchronize = torch.cuda.synchronize if lab.device == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    for _ in range(times):
        function(*inputs)
    synchronize()
    return (time.perf_counter() - began) / times


# %%
with lab.attempt("compiling a block"):
    gpu = lab.device == "cuda"
    rows, width, dtype = (2**18, 512, torch.bfloat16) if gpu else (2048, 64, torch.float32)
    block = Block(width).to(lab.device, dtype)
    x = torch.randn(rows, width, device=lab.device, dtype=dtype, requires_grad=True)
    compiled = torch.compile(block)

    def step(network):
        network(x).square().mean().backward()

    first_plain, first = seconds(step, block), seconds(step, compiled)
    later, plain = (seconds(step, network, times=50) for network in (compiled, block))
    torch.testing.assert_close(compiled(x), block(x), rtol=0.02, atol=0.02)  # bfloat16 rounds

    print(f"first step {first:.1f} s, later {1e3 * later:.2f} instead of {1e3 * plain:.2f} ms")
    paid = (first - first_plain) / (plain - later)
    print(f"has paid after {paid:,.0f} steps" if plain > later else "never pays here")

# %% [markdown]
# Compiling has paid after $n = (f_\text{compiled} - f_\text{plain}) / (t_\text{plain} - t_\text{compiled})$ steps, with $f$ a
# first step and $t$ a later one. On the H200 merging saved 3.3 of the block's 7.6 ms: in so large a batch the chains' bytes
# count, not launches. The UNet's kernels are small: there launches count. Where a model repeats a block, `block.compile()` on
# each costs less at first: blocks of one shape share their code. This lab gave the compiler an empty cache; your script's second
# start finds its code on disk.
#
# Of the article's ladder only ratios can be compared: its card is another, and its step is probably one image (lab 02).
#
# **Your prediction:** on our GPUs a step launches some 23,500 kernels, and some 16,600 once the UNet is compiled. If the host
# sets the pace, time falls as launches do. How many times as fast is the compiled step?

# %%
my_compile_gain: float | None = None  # for example 2

lab.predict("speed-up by torch.compile", my_compile_gain, "x")

# %%
names = ("workers", "compile")
columns = ("first_step_s", "step_ms", "speed-up", "floor_ms", "kernels_per_step", "kernels_ms")
lab.show([runs[name] for name in names], columns, experiment="ladder", rung=names)
lab.verdict("A1.compile.speedup", "A1.compile.fewer-kernels")

# %% [markdown]
# On this H200 the step fell by some 250 ms: 733 − 733 / 1.51, as 1.51 is a median of ratios. Its kernels fell from 156 to 131 ms,
# 9 to 12 % of that; the rest is probably the host's. Launches fell by 1.42x; the step's 1.42 to 1.62x fits. For the UNet,
# $n = 113 / (0.733 - 0.733 / 1.51)$, some 460 steps, 400 to 520 by the interval, and fewer where nothing else compiles. The gain
# exceeds the noise, but on an unsteady host no published time is judged.
#
# **Takeaway.** Compiling is an investment. Before you make it, ask how many steps you will train.

# %% [markdown]
# ## 2 · The mode that fails
#
# **Question.** Mode `reduce-overhead` puts a CUDA graph around each compiled region. The article: it raises a RuntimeError
# under gradient accumulation, since accelerate's branch changes the graph. Is that the cause?
#
# The loop below accumulates over four micro-batches without accelerate, so without its branch.


# %%
def trained(mode, cure=""):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
    network = torch.compile(model, mode=mode) if mode else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if cure == "own gradients":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    for micro_batches in torch.randn(3, 4, 32, 64, device="cuda"):
        if cure == "marked":  # once an optimizer step, not once a micro-step
            torch.compiler.cudagraph_mark_step_begin()
        for x in micro_batches:
            (network(x).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=cure != "own gradients")
    return model[0].weight.detach().clone()


# %%
messages = {}
with lab.attempt("reduce-overhead, provoked and cured"):
    plain = trained(mode=None)
    for cure in ("", "own gradients", "marked"):
        try:
            torch.testing.assert_close(
                trained("reduce-overhead", cure), plain, rtol=1e-3, atol=1e-4
            )
            messages[cure] = ""
        except (RuntimeError, AssertionError) as error:
            reason = " ".join(str(error).split()).partition(" Stack trace")[0]
            messages[cure] = f"{type(error).__name__}: {reason}"[:200]
        print(f"{cure or 'as it is'}: {messages[cure] or 'the same weights as without compiling'}")

# %% [markdown]
# It fails without a branch. A graph's results live in the graph's own memory, which its next run uses again. The first
# `backward()` of a step leaves its gradients there, as `.grad`. The next micro-step overwrites them, and PyTorch notices.
#
# There are two cures. *Own gradients*: allocate them yourself, and zero them in place. *Marked*: unasked, PyTorch takes each
# forward pass for a new step, and uses the last one's memory again. The mark says where a step begins: until the next mark
# micro-steps share no memory, and need more of it.
#
# The course's loop tried two modes with accelerate's branch, each in a process of its own, on a small model. The third row is the
# loop above.

# %%
tried = [run for run in runs.values() if run.tags["experiment"] == "compile mode"]
if "" in messages:
    toy = Run("04", "without accelerate", tags={**tried[0].tags, "loop": "plain"})
    toy.metrics = {"failed": int(messages[""] != ""), "message": messages[""]}
    tried.append(lab.keep(toy))
lab.show(tried, ("failed", "message"), experiment="compile mode")
lab.verdict("A1.compile.reduce-overhead", "A1.compile.cause")

# %% [markdown]
# **Takeaway.** A graph owns its results' memory. What must outlive the next replay needs memory of its own.

# %% [markdown]
# ## 3 · A loop that asks nothing
#
# **Question.** Section 4 will capture the step, and a capture can't contain a line that waits for a number from the GPU.
# Which lines do, and how do you keep your log and your optimizer without them?
#
# `loss.item()`, `.cpu()` and `if tensor:` do; `torch.cuda.set_sync_debug_mode("warn")` finds more. A ring buffer takes each loss,
# and one copy in many steps takes the ring to the host.


# %%
class LossRing:
    def __init__(self, size=16):
        self.losses = torch.zeros(size, device=lab.device)
        self.place = torch.zeros(1, dtype=torch.long, device=lab.device)
        self.on_host = torch.zeros(size, pin_memory=lab.device == "cuda")
        self.sent = torch.cuda.Event() if lab.device == "cuda" else None

    def put(self, loss):  # all on the device: a capture may contain it
        self.losses.index_copy_(0, self.place, loss.detach().view(1))
        self.place.add_(1).remainder_(len(self.losses))

    def send(self):  # queued behind the steps
        self.on_host.copy_(self.losses, non_blocking=True)
        if self.sent:
            self.sent.record()

    def read(self):  # when the next one is due, so that this one has long arrived
        if self.sent:
            self.sent.synchronize()  # the host may be many steps ahead
        return self.on_host.tolist()


# %%
ring, losses = LossRing(), torch.rand(16, device=lab.device)
matrix = torch.randn(2 * [4096 if lab.device == "cuda" else 512], device=lab.device)


def handed_over(log):
    """Seconds until the host has handed over 16 steps, whether or not the GPU has done them."""
    seconds(lambda: None)  # synchronises
    began = time.perf_counter()
    for loss in losses:
        log(loss + 0 * (matrix @ matrix).mean())
    return time.perf_counter() - began


for name, log in {"loss.item()": torch.Tensor.item, "the ring": ring.put}.items():
    handed_over(log)  # warms up
    print(f"{name}: the host is free after {1e3 * handed_over(log):.2f} ms")
ring.send()
assert ring.read() == losses.tolist()

# %% [markdown]
# With the ring our host is free in 3 ms, not 44.
#
# A GradScaler asks, too: did a gradient overflow? The fused AdamW gets the answer as a tensor. It updates all parameters in a few
# kernels, and `capturable=True` lets a graph capture it.


# %%
def updated(steps=3, **form):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 320, device=lab.device)) for _ in range(64)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, **form)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights, seconds(optimizer.step, times=steps)


fused = {"fused": True, "capturable": lab.device == "cuda"}
for one, other in zip(updated()[0], updated(**fused)[0], strict=True):
    torch.testing.assert_close(one, other)
for name, form in {"a loop": {"foreach": False}, "as PyTorch picks it": {}, "fused": fused}.items():
    print(f"AdamW, {name}: {1e3 * updated(50, **form)[1]:.2f} ms")


# %%
names = ("pinned", "no host waits")
shown = ("pinned" if lab.device == "cuda" else "workers", "no host waits")
columns = ("step_ms", "speed-up", "floor_ms")
lab.show([runs[name] for name in shown], columns, experiment="ladder", rung=names)

# %% [markdown]
# *No host waits* leaves accelerate out, and has ring and fused AdamW. Against *pinned* it is 1.04 times as fast here, 0.99 and
# 1.15 on two other H200s, 0.92 on the H100: within noise. The host is the slower one here, so it hardly waits. The rung's worth
# is that section 4 can capture it.
#
# **Takeaway.** While the host is the slower one, its waits cost little. But a step with a wait can't be captured.

# %% [markdown]
# ## 4 · One launch for the whole step
#
# **Question.** The host launches some 16,600 kernels a step, one by one. Can it hand them over in one go?
#
# A CUDA graph captures what a stream is given, and replays it with a single launch. Skip the `Tape` if you have a GPU: it
# imitates a graph on a CPU. It writes down each operation with its very tensors, and repeats them.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


def tensors(result):
    several = result if isinstance(result, tuple | list) else [result]
    return [one for one in several if isinstance(one, torch.Tensor)]


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                old.copy_(new)  # where the captured result lies


# %% [markdown]
# One micro-step is captured, and replayed for four micro-batches, in two ways. In which are the gradients those of the plain
# loop?

# %%
def capture(function):
    graph = torch.cuda.CUDAGraph() if lab.device == "cuda" else Tape()
    with torch.cuda.graph(graph) if lab.device == "cuda" else graph:
        function()
    return graph


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).to(lab.device)
micro_batches = torch.randn(4, 32, 256, device=lab.device)
x = torch.empty_like(micro_batches[0])  # a graph reads the same memory at every replay


def micro_step():
    (model(x).square().mean() / 4).backward()


def accumulated(step):
    """The gradients of four micro-batches, by one `step` for each."""
    for p in model.parameters():
        p.grad.zero_()
    for micro_batch in micro_batches:
        x.copy_(micro_batch)
        step()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
micro_step()  # warms up, and allocates the gradients
plain, found = accumulated(micro_step), {}
for p in model.parameters():
    p.grad = None
found["allocated inside the capture"] = accumulated(capture(micro_step).replay)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
found["allocated before"] = accumulated(capture(micro_step).replay)

for name, gradients in found.items():
    print(f"gradients {name}: {(gradients - plain).norm() / plain.norm():.1%} off")
assert torch.allclose(found["allocated before"], plain, rtol=1e-4, atol=1e-6)

# %% [markdown]
# One of the two is silently wrong. A `backward()` that finds no gradient *stores* its result; only one that finds a gradient
# *adds*. A graph that was captured without gradients repeats the storing, and each replay overwrites the one before. So
# allocate gradients first, and zero them in place.
#
# `GraphStep` in `labutils/training/step.py` captures the whole step. In short:
#
# ```python
# for p in parameters: p.grad = torch.zeros_like(p)
# # warm up with whole steps; put back parameters, adamw, scaler, ring, random state
# with torch.cuda.graph(graph):
#     for p in parameters: p.grad.zero_()
#     for x in inputs:  # four micro-batches, at fixed addresses
#         loss = loss_of(x)
#         ring.put(loss)
#         scaler.scale(loss / 4).backward()
#     scaler.unscale_(adamw)
#     nn.utils.clip_grad_norm_(parameters, 1.0)
#     scaler.step(adamw); scaler.update()  # fused: the GPU handles an overflow
# # each step: copy the batches into inputs, then graph.replay()
# ```
#
# Four rules. Warm up on a stream of its own: all compiling must be over before the capture. Put state back by `copy_`: the graph
# knows only addresses. Shapes are fixed. A learning rate that changes must be a tensor. PyTorch's generator gives each replay new
# random numbers.
#
# **Your prediction:** the compiled step's kernels take 131 ms on the H200; on a GPU section 1's table has yours. How many
# milliseconds does the captured step take?

# %%
my_captured_ms: float | None = None  # for example 200

lab.predict("a captured step", my_captured_ms, "ms")

# %%
names = ("compile", "no host waits", "whole-step graph")
columns = ("step_ms", "speed-up", "floor_ms", "kernels_ms", "kernels_per_step", "gpu_busy")
lab.show([runs[name] for name in names], columns, experiment="ladder", rung=names)

# %% [markdown]
# The captured step takes little more than its kernels. It takes 136 ms on three H200s, with hosts whose stock loops took 777,
# 1,036 and 1,166: the GPU sets the pace now. A slower CPU should cost little, if its workers, eight on this rung, keep up.
# Tracing adds gaps, so its *GPU-busy* reads too low.
#
# **Takeaway.** Compiling makes fewer kernels; capturing makes launches free. Uncompiled kernels take 156 ms: capture alone would
# probably take little more.

# %% [markdown]
# ## 5 · Kernels that fit the GPU
#
# **Question.** The GPU is busy now, and the step is still nine times its floor. Which of its work is only there because of how it
# is laid out or cut up?
#
# Pieces first, then layout, which only the last rung uses.
#
# One image of 512 × 512 doesn't fill a large GPU. Micro-batches are independent until their gradients are added, so a graph may
# run them on four streams side by side. Each backward operation runs on its forward's stream.

# %%
with lab.attempt("micro-batches side by side"):
    conv = nn.Conv2d(640, 640, 3, padding=1).cuda().half()
    images = torch.randn(4, 1, 640, 16, 16, device="cuda", dtype=torch.half)
    streams = [torch.cuda.Stream() for _ in images]

    def gradient(image):
        return torch.autograd.grad(conv(image).float().square().sum(), conv.weight)[0]

    def one_by_one():
        return sum(gradient(image) for image in images)

    def side_by_side():
        here, found = torch.cuda.current_stream(), []
        for stream, image in zip(streams, images, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found.append(gradient(image))
        for stream in streams:
            here.wait_stream(stream)
        return sum(found)  # only now: two streams that add to one tensor lose gradients

    torch.testing.assert_close(side_by_side(), one_by_one(), rtol=1e-2, atol=0.1)
    for work in (one_by_one, side_by_side):
        print(f"{work.__name__}: {1e3 * seconds(capture(work).replay, times=100):.3f} ms")

# %%
names = ("whole-step graph", "side by side")
columns = ("step_ms", "speed-up", "floor_ms")
lab.show([runs[name] for name in names], columns, experiment="ladder", rung=names)

# %% [markdown]
# Four streams take 52 of 136 ms away.
#
# Tensor cores want the channels of a pixel side by side. `channels_last` stores them so, and the convolution library need
# not rearrange them at each call.

# %%
on_gpu = lab.device == "cuda"
channels, side, dtype = (320, 64, torch.float16) if on_gpu else (64, 32, torch.float32)
conv = nn.Conv2d(channels, channels, 3, padding=1, device=lab.device, dtype=dtype)
image = torch.randn(4, channels, side, side, device=lab.device, dtype=dtype)
conv_last = copy.deepcopy(conv).to(memory_format=torch.channels_last)
image_last = image.to(memory_format=torch.channels_last)

with torch.no_grad():
    torch.testing.assert_close(conv_last(image_last), conv(image), rtol=1e-2, atol=1e-2)
    for layer, x in ((conv, image), (conv_last, image_last)):
        replay = capture(partial(layer, x)).replay  # so that launches don't count
        print(f"strides {x.stride()}: {1e3 * seconds(replay, times=50):.3f} ms")

# %% [markdown]
# A layer that leaves the layout reduces a model's gain: compiled GroupNorm does, and the convolutions after it copy.
# `ChannelsLastGroupNorm` in `labutils/layers/cuda_graph.py` stays in it. What channels last gains in the UNet isn't measured alone.
#
# **Takeaway.** When the GPU is busy, ask whether its kernels fill it.

# %% [markdown]
# ## 6 · Less work for the same gradients
#
# **Question.** What need not be computed, because its result is known or can be had for less?
#
# The VAE is frozen, so what it says of an image never changes: a mean and a variance. Keep these, and draw a new sample in each
# step. Whoever keeps one *sample*, or one random crop, trains on fewer inputs.

# %%
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

encoder = nn.Conv2d(3, 8, 8, stride=8, device=lab.device).requires_grad_(False)  # a VAE in small
images = torch.randn(4, 3, 64, 64, device=lab.device)
noises = torch.randn(100, 4, 4, 8, 8, device=lab.device)


def sampled(moments, noise):
    mean, log_variance = moments.chunk(2, dim=1)
    return mean + torch.exp(0.5 * log_variance) * noise


moments = encoder(images)  # once, before training
anew = torch.stack([sampled(encoder(images), noise) for noise in noises])
cached = torch.stack([sampled(moments, noise) for noise in noises])
torch.testing.assert_close(cached, anew, rtol=1e-3, atol=1e-3)
library = DiagonalGaussianDistribution(moments)  # what diffusers' VAE returns
torch.testing.assert_close(cached[0], library.mean + library.std * noises[0])
print(f"spread of a latent over steps: {cached.std(0).mean():.2f}; of one sample kept: 0")

# %% [markdown]
# At width 320 LoRA took longer than full training (lab 01). *Folded*, no activation passes through the thin products: form $W' = W
# + BA$ once a step, run the plain layer on it, and project its gradient $G$: $\partial L/\partial A = B^\top G$ and $\partial
# L/\partial B = G A^\top$. Lab 01's factor $\alpha/r$ goes before $BA$, and before both projections. The price: $W'$ is rounded to
# half precision, with the same error for every token, and $G$ costs a full weight gradient, in FLOPs as well.
# `labutils/layers/lora_folded.py` does it for all layers of a shape at once.

# %%
torch.manual_seed(0)
W, A, B = (torch.randn(shape, device=lab.device) / 8 for shape in ((64, 32), (4, 32), (64, 4)))
x = torch.randn(16, 32, device=lab.device)

A.requires_grad_(), B.requires_grad_()
(x @ W.T + (x @ A.T) @ B.T).square().mean().backward()  # the plain layer

with torch.no_grad():
    folded = W + B @ A
folded.requires_grad_()
(x @ folded.T).square().mean().backward()
G = folded.grad
with torch.no_grad():
    torch.testing.assert_close(B.T @ G, A.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(G @ A.T, B.grad, rtol=1e-3, atol=1e-5)
print("projected gradients: those of the plain layer")

# %% [markdown]
# The rung *folded LoRA* also uses section 5's layout, and one batch of four instead of four of one. You write that batch in
# exercise 3.
#
# **Your prediction:** the floor of four images without VAE and text encoder is about 9 ms on the H200; your own stands in the
# table below. How many milliseconds do they take on the last rung?

# %%
my_best_ms: float | None = None  # for example 50

lab.predict("the last rung", my_best_ms, "ms")

# %%
names = ("side by side", "cached encoders", "folded LoRA")
shown = names if lab.device == "cuda" else ("no host waits", *names[1:])
columns = ("step_ms", "speed-up", "floor_ms", "encode_s", "gpu_busy")
lab.show([runs[name] for name in shown], columns, experiment="ladder", rung=names)

# %% [markdown]
# Encoding costs its seconds before the first step. On the H200 our 256 images took 3.6 s. A step saves 28 ms, so caching pays
# after about 130 steps, some two passes over the images. The last rung is 2.3 times as fast as *cached encoders*. Folding alone
# isn't measured: seven settings changed. One batch of four runs a layer's kernels once; four streams run them four times.
# Gradients are compared on the small layer above, and in `tests/equivalence` on a small UNet, in float32.
#
# **Takeaway.** The cheapest work is work that need not be done. It also takes the most care: assert that the gradients stay.

# %% [markdown]
# ## 7 · The whole climb
#
# **Question.** What is each rung worth, and what is left above the floor?

# %%
published = {"stock": 290, "workers": 141, "compile": 102, "pinned": 98}
rungs = [run for run in runs.values() if run.tags["experiment"] == "ladder"]
h200 = lab.references(experiment="ladder")
h200 = [run for run in h200 if run.comparison == h200[-1].comparison]  # the newest climb
for found in (rungs, h200) if lab.device == "cpu" and h200 else (rungs,):
    fig, ax = plt.subplots()
    theirs = published if found[0].scale == "full" else None
    plots.ladder(ax, found, published=theirs, whose="A1, RTX PRO 6000")
    ax.set_title(f"{found[0].machine.get('gpu') or 'This CPU'}, scale {found[0].scale}")
    plt.show()
lab.verdict("A1.pin.speedup", "A1.total.speedup", "A1.total.utilization")

# %% [markdown]
# From the first rung to the last the step probably became 47 times as fast on this H200 (35 to 49), 41 and 31 times on the two
# others (34 to 44, 29 to 36), and 34 times on the H100 (31 to 41). The last rung takes 25 ms on all three H200s, 2.7 to 2.8 times
# its floor. So the slower the host, the larger the factor.
#
# A hollow rung's interval reaches below 1.25x, the noise on this H200: the interval of the stock loop, measured again in the same
# rounds, is 21 % less to 25 % more time. A filled rung exceeds it, but verdicts on times stay *inconclusive*.
#
# What is left on the last rung is kernels: below they add up to 24.1 of 24.8 ms. Which kind is farthest from its floor isn't
# measured.

# %%
def kinds(found):
    return pd.DataFrame(found[0].metrics.get("kernel_categories", {})).T.reset_index(
        names="kernels"
    )


lab.show([runs["folded LoRA"]], kinds, experiment="ladder", rung="folded LoRA")

# %% [markdown]
# **Takeaway.** A rung's worth depends on where it stands. With the host as the limit, compiling gained some 250 ms and paid after
# 460 steps. In a captured step it would probably save the kernels' 25 ms, and pay after some 4,500 steps. When the bottleneck
# moves, measure again.

# %% [markdown]
# ## Exercises
#
# The easiest first. Each cell checks itself. `lab.solution("04.1")` shows how the first can be solved.

# %%
from unittest.mock import patch

from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1. Does it pay?** Compiled, a first step takes 95 s and each later one 250 ms instead of 340. How many seconds are gained in 800
# steps? Without compiling, the first step takes as long as the others.

# %% tags=["exercise"]
gained_s = None  # your number
print(check("04.1", gained_s))

# %% [markdown]
# **2. What must not be in the model.** One batch of four has the gradients of four batches of one, unless a layer mixes the
# examples of a batch. Which of these change the gradients' distribution: GroupNorm, LayerNorm, BatchNorm, Dropout, attention
# over tokens? Answer with a set of names.

# %% tags=["exercise"]
breaks_it = None  # a set such as {"GroupNorm", "Dropout"}
print(check("04.2", breaks_it))

# %% [markdown]
# **3. Less work.** Eight micro-steps by the book: each image goes through a frozen encoder and a trained head. Compute the
# same gradients at least three times as fast.

# %% tags=["exercise"]
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(lab.device)
encoder.requires_grad_(False)
head = nn.Sequential(nn.Linear(64, 64), nn.GroupNorm(8, 64), nn.Linear(64, 64)).to(lab.device)


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


print(faster_than(3, by_micro_steps, at_once, eight_images, times=3, tolerance=1e-3))


# %% [markdown]
# **4. One launch.** Now leave the eight micro-steps as they are, and capture all of them, with zeroing, as one graph of a head
# of your own. A replay runs no Python of a model: `replayed` may call no layer. On a GPU it must be three times as fast. A
# CPU's tape saves nothing, so there 0 times is enough.

# %% tags=["exercise"]
mine = copy.deepcopy(head)  # the plain loop drops the gradients of `head`
my_images, my_targets = eight_images(0)  # what the graph reads


def no_layer(*inputs):
    raise RuntimeError("replayed() calls a layer. Capture before it, and only replay in it.")


@patch.object(nn.Linear, "forward", no_layer)  # leave this line
def replayed(images, targets):
    """Fill the graph's inputs, replay it, and return copies of the gradients."""


three_times = 3 if lab.device == "cuda" else 0
print(faster_than(4, by_micro_steps, replayed, eight_images, three_times, tolerance=1e-3))

# %% [markdown]
# ## What to read on
# - J. Ansel and others: *PyTorch 2*, ASPLOS 2024 ([doi:10.1145/3620665.3640366](https://doi.org/10.1145/3620665.3640366)).
# - PyTorch: [torch.compile](https://docs.pytorch.org/docs/stable/generated/torch.compile.html), [regional
#   compilation](https://docs.pytorch.org/tutorials/recipes/regional_compilation.html), [CUDA graph
#   trees](https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html), [CUDA graphs in
#   training](https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/), [channels
#   last](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html).
# - R. Rombach and others: *[Latent Diffusion Models](https://arxiv.org/abs/2112.10752)*, 2022.
# - meta-pytorch: *[gpt-fast](https://github.com/meta-pytorch/gpt-fast)*. One named speed-up at a time, for text generation.
# - The course's [glossary](../docs/glossary.md).
#
# Next: lab 05, numbers of 8 bits.


# %%
def truths(found):
    by_rung = {run.tags["rung"]: run for run in found if "again" not in run.tags}
    compiled = time_effect(by_rung["workers"], by_rung["compile"])
    return {
        "speed-up by torch.compile": compiled and 1 / compiled.value,  # as in section 1's table
        "a captured step": by_rung["whole-step graph"].metric("step_ms"),
        "the last rung": by_rung["folded LoRA"].metric("step_ms"),
    }


lab.done(truths(rungs), ours=truths(h200) if h200 else None)
