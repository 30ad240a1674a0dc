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
# Article A1 runs a public LoRA training script and finds the GPU busy for less than half of the time. It profiles the script and
# names two bottlenecks, then removes them. Two small gaps remain, and the article names a cause for each. Here you repeat the
# diagnosis, and test each cause.
#
# **After this lab you can**
# - read the script's training loop in 25 lines, and name the lines that make the host wait;
# - record a profile of a few steps, and read it in a viewer and without one;
# - estimate a step's time from two measured constants;
# - give each millisecond of a step to data, host, launches, copies, kernels or waits;
# - test a published explanation instead of believing it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 2 minutes |
# | `full` | a GPU of 40 GB | 4 minutes |
#
# Without a GPU you see the host's half of the story. The H200's numbers stand beside yours where it has run the same.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps that are timed; 0: 3 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("02", globals())

# %%
import io
import json
import linecache
import shutil
import time
import warnings
from collections import Counter
from itertools import chain, repeat
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from PIL import Image
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

# %%
from labutils.course import plots
from labutils.labs.lab02_profile import check_profiled, check_reading
from labutils.profiling.trace import SHARES, Trace, cut_to_micro_step, profile
from labutils.recipe import STOCK
from labutils.results.records import REFERENCE
from labutils.training import Benchmark
from labutils.workloads.stable_diffusion import on_drawn_latents

plots.use_style()
timed_steps = steps or (3 if lab.scale == "tiny" else 8)
traces = lab.cache_dir / "traces" / "lab-02"
shutil.rmtree(traces, ignore_errors=True)  # those of the last time: traces are large

# %% [markdown]
# ## 1 · The loop
#
# **Question.** What exactly are we about to profile?
#
# **Technique.** The public diffusers script fine-tunes Stable Diffusion with LoRA. Below is its loop without the library
# accelerate, so that every line that touches the GPU is in sight. First the parts. The UNet is diffusers' own, but thin.
# One convolution stands for the VAE, and an embedding for the text encoder.

# %%
torch.manual_seed(0)
device = lab.device
if device == "cpu":
    torch.set_num_threads(1)  # tensors this small gain nothing from more
vae, text_encoder = nn.Conv2d(3, 4, 8, stride=8).to(device), nn.Embedding(1000, 32).to(device)
unet = UNet2DConditionModel(
    sample_size=8,
    layers_per_block=1,
    block_out_channels=(32,),
    down_block_types=("CrossAttnDownBlock2D",),
    up_block_types=("CrossAttnUpBlock2D",),
    cross_attention_dim=32,
    attention_head_dim=4,
).to(device)
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
schedule = DDPMScheduler()
lora = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora, lr=1e-4)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")


# %%
class Images(Dataset):
    """Sixteen PNG files of noise, here in memory; the script reads them from the disk."""

    def __init__(self, side=256):
        self.files = [io.BytesIO() for _ in range(16)]
        for file in self.files:
            Image.effect_noise((side, side), 64).save(file, "PNG")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB").resize((64, 64), Image.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
        return pixels, torch.arange(77)  # and the caption's 77 tokens


loader = DataLoader(Images(), batch_size=1, shuffle=True)
batches = chain.from_iterable(repeat(loader))  # epoch after epoch


# %% [markdown]
# An *optimizer step* here is four *micro-steps* of one image each, whose gradients add up. `record_function` gives a
# stretch of the loop a name that the profiler will write down.


# %%
def optimizer_step():
    mean = 0.0
    for _ in range(4):
        with record_function("data"):
            pixels, tokens = (t.to(device) for t in next(batches))  # two copies: the host waits
        with record_function("encode"), torch.no_grad():
            latents, text = vae(pixels), text_encoder(tokens)
            noise, when = torch.randn_like(latents), torch.randint(1000, (1,), device=device)
            noisy = schedule.add_noise(latents, noise, when)
        with record_function("forward"), torch.autocast(device, enabled=scaler.is_enabled()):
            loss = F.mse_loss(unet(noisy, when, text).sample.float(), noise)
        with record_function("log"):
            mean += loss.item() / 4  # for the log: the host waits
        with record_function("backward"):
            scaler.scale(loss / 4).backward()
        with record_function("log"):
            loss.item()  # for the progress bar: the host waits
    with record_function("clip"):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(lora, 1.0)
    with record_function("optimizer"):
        scaler.step(optimizer)  # did a gradient overflow? The host waits
        scaler.update()
        optimizer.zero_grad()
    return mean


# %%
print(f"losses: {optimizer_step():.3f}, {optimizer_step():.3f}")

# %% [markdown]
# The course's own loop does the same on the real networks, with accelerate: `AccelerateStep` in `labutils/training/step.py`.
# One line stands elsewhere in the script: it reads the loss for the progress bar after the optimizer. At `full` it reads PNG
# files of 1080 × 1080, encodes with the real VAE and CLIP, and trains 0.8 M LoRA parameters beside 860 M frozen ones, in fp16.
#
# **Takeaway.** A step is more than forward, backward and optimizer, and four of its lines make the host wait.

# %% [markdown]
# ## 2 · Record it
#
# **Question.** What does `torch.profiler` write down?
#
# **Technique.** It writes a *trace*: what ran when, on the host and on the GPU. The schedule is the article's: pass over one
# step, warm the profiler up in the next, then record. Here it records three.

# %%
prof = torch.profiler.profile(
    schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=torch.profiler.tensorboard_trace_handler(str(traces / "small")),
)
prof.start()
for _ in range(5):
    optimizer_step()
    prof.step()  # the article calls it once a micro-step
prof.stop()

# %% [markdown]
# The file is JSON: a list of events, with times in microseconds.

# %%
*_, path = sorted((traces / "small").glob("*.pt.trace.json"))
events = json.loads(path.read_text())["traceEvents"]
marks = [event for event in events if event.get("cat") == "user_annotation"]
recorded = sum(mark["name"].startswith("ProfilerStep#") for mark in marks)
phase_ms = Counter()
for mark in marks:
    phase_ms[mark["name"]] += mark["dur"] / 1e3 / recorded
for phase in ("data", "encode", "forward", "backward", "clip", "optimizer", "log"):
    print(f"{phase:10} {phase_ms[phase]:7.2f} ms a step, profiled")

same = Trace.read(path)  # the course's own reader
assert same.steps == recorded == 3
assert abs(same.host_breakdown()["forward"]["ms"] - phase_ms["forward"]) < 1e-3

# %% [markdown]
# `key_averages()` sums over all calls of a name. Compare its two totals: the host's and the GPU's. *Activity Buffer Request* is the
# profiler's own work. `with_stack=True` records Python's functions as well. Then each module is an event of its own, and the
# article saw the forward pass split into many small blocks.

# %%
inputs = (torch.randn(1, 4, 8, 8, device=device), 0, torch.randn(1, 77, 32, device=device))
unet(*inputs)  # the first call loads kernels
with torch.profiler.profile() as prof:
    unet(*inputs)
print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=6))

with torch.profiler.profile(with_stack=True) as prof:
    unet(*inputs)
prof.export_chrome_trace(str(traces / "stacks.json"))
modules = Counter()
for event in json.loads((traces / "stacks.json").read_text())["traceEvents"]:
    if event.get("name", "").startswith("nn.Module: "):
        modules[event["name"].removeprefix("nn.Module: ").rpartition("_")[0]] += 1
blocks = {name: count for name, count in modules.items() if "Block" in name}
print(f"{modules.total()} modules in a forward pass; blocks: {blocks}")

# %% [markdown]
# Now the real networks: five steps of the stock recipe, by the same call in `labutils/profiling/trace.py`. The picture is one
# of them. On a GPU the lower curve is the share of time in which kernels ran. Each peak begins with *encode*: the VAE's few,
# long kernels. Where the curve is at zero, an image is being read. accelerate enters *optimizer* after each micro-step, and
# updates only in the last.

# %%
workload = lab.workload("sd15-lora")
bench = Benchmark(workload)
bench.prepare({"stock": STOCK})
trace = bench.profile("stock", traces, steps=5)

fig, axes = plt.subplots(1 + trace.on_gpu, sharex=True, squeeze=False, figsize=(7.2, 3))
plots.timeline(axes[0, 0], {"host": trace.timeline()["host"]}, most=7)
if trace.on_gpu:
    plots.utilisation(axes[1, 0], *trace.busy_over_time(), label="kernels running")
axes[-1, 0].set_xlabel("ms, profiled")
plt.show()

# %% [markdown]
# **Takeaway.** Record few steps, after a warm-up. Read a trace from the outside in: phases first, then one moment.

# %% [markdown]
# ## 3 · Two constants predict the step
#
# **Question.** How long does a step take without the profiler?
#
# **Technique.** Recording slows the host down, so a trace's host times are too long. Its *counts* are right. So time the
# small loop without the profiler, take off its images, and divide by its kernels. The host needs that long for one:


# %%
def ms_each(call):
    """Median milliseconds of ten calls, without the profiler."""
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


small_ms = ms_each(optimizer_step) - 4 * ms_each(lambda: next(batches))
launches = len(same.launched()) / same.steps  # without a GPU: operators
host_us = 1e3 * small_ms / launches
print(f"the small loop: {small_ms:.0f} ms / {launches:,.0f} kernels = {host_us:.1f} us each")

# %% [markdown]
# The two constants are the time to read an image, and the host's time for one kernel. The real loop calls the same kinds of
# modules. Count its kernels, and time its images alone:

# %%
dataset = bench.candidates["stock"].trainer.dataset
image_ms = ms_each(lambda: dataset[0])
kernels = len(trace.launched()) / trace.steps
host_ms, gpu_ms = kernels * host_us / 1e3, sum(k.ms for k in trace.kernels) / trace.steps
formula_ms = 4 * image_ms + max(host_ms, gpu_ms)
print(f"host: {kernels:,.0f} x {host_us:.1f} us = {host_ms:.0f} ms, GPU: {gpu_ms:.0f} ms")
print(f"a step: 4 x {image_ms:.1f} ms of images and the longer of the two, {formula_ms:.0f} ms")

# %% [markdown]
# Reading images, launching kernels: the host does both, one after the other, while the GPU runs kernels. A kernel inside a
# module costs the host several times a bare launch, because Python, autograd and autocast take part. It is what lab 00 calls a
# host's second constant, measured anew: it belongs to these modules and this host. On our H200s it was 22 µs in lab 00 and 38
# here. Without a GPU the constant also contains the operator's arithmetic. The real network's tensors are larger, so there the
# formula may say too little.
#
# **Your prediction:** how many ms does an optimizer step take? Take the formula's number, or correct it.

# %%
my_step_ms: float | None = None

lab.predict("time of an optimizer step", my_step_ms, "ms")

# %%
tags = {"stock": {"experiment": "stock"}}
stock = bench.compare({"stock": STOCK}, timed_steps, rounds=1, tags=tags)["stock"]
stock.metrics |= {"formula_ms": formula_ms, "image_ms": image_ms}
stock.metrics |= trace.metrics(stock.metric("step_ms"), stock.metric("data_ms"))
names = {"run": "an optimizer step", "formula_ms": "formula, ms", "step_ms": "measured, ms"}
names |= {"data_ms": "of it data, ms", "traced_step_ms": "while profiled, ms"}
lab.show([lab.keep(stock)], names | {"floor_ms": "floor, ms"}, experiment="stock")
lab.verdict("A1.stock.step-ms", "A1.profiler.five-steps")

# %% [markdown]
# On our H200s' hosts a bare launch took 5 to 7 µs. The 24,000 launches of a step would then take 120 to 170 ms. So the formula
# would say: data, and some 160 ms. On this page that is some 530 ms, less than half of the measured step. The small loop's constant
# gives 5 % more than measured. On record it gave 5 and 16 % less in two other sessions, and this page's eight steps took 1,075 to
# 1,464 ms. So the test is rough: it rules out the bare launch, no more.
#
# The *floor* is the time that the step's arithmetic needs at the GPU's measured rate.
#
# **Takeaway.** While the host is far slower than the GPU, data plus kernels times the host's time for one *estimates* a step.
# When the two are close, expect more, because the loop stops to wait for the GPU. Trust a profile for counts, order and
# kernels, and a clock for the host.

# %% [markdown]
# ## 4 · What utilisation says
#
# **Question.** The article watched `nvitop` and read 44 % on average. What is that number?
#
# **Technique.** `nvitop` and `nvidia-smi` ask the driver. It answers with the share of its last sampling period in which
# *any* kernel of any process ran.

# %%
with lab.attempt("Reading nvitop"):
    torch.cuda.synchronize()
    import nvitop

    gpu, readings = nvitop.Device.cuda.all()[0], []
    for _ in range(10):
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            optimizer_step()
        readings.append(gpu.gpu_utilization())
    print(f"{readings} %: mean {sum(readings) / len(readings):.0f} %")

# %% [markdown]
# **Your prediction:** what is the mean utilisation during stock steps, in %? Without a GPU: that of the CPU cores.

# %%
my_utilization: float | None = None  # 0 to 100

lab.predict("utilisation", my_utilization, "%")

# %%
watched = bench.watch("stock")
stock.metrics |= watched
columns = ("gpu_utilization", "cpu_utilization", "gpu_busy", "mfu")
lab.show([lab.keep(stock)], columns, experiment="stock")
lab.verdict("A1.stock.utilization")

# %% [markdown]
# On the H200 the driver said 16 %, the trace 13 %, MFU 0.9 %. *GPU-busy* is the time of the trace's kernels over the step's time by
# the clock. Why the driver says more isn't tested here. *MFU*, model FLOPs utilisation, is the share of the data sheet's arithmetic
# that the step used.
#
# **Takeaway.** Utilisation says how often the GPU was not idle, not how well it was used. MFU compares with the matrix
# units' peak. A step that memory limits has a low MFU even at its best; lab 00's roofline gives that limit.

# %% [markdown]
# ## 5 · Where each millisecond goes
#
# **Question.** Can every millisecond of a step be given to one cause?
#
# **Technique.** Several things happen at once, so a rule is needed. A moment belongs to the first of these that is true: a
# *kernel* runs; a *copy* runs; the host waits for *data*; it waits for the GPU, *sync*; it is inside a *launch* call; it does
# anything else, *host*. Each is a set of intervals. Join the sets one after the other: a cause's own time is what it adds to
# the union. You do this for the small loop; prediction and picture are of the real one.


# %%
def union_ms(spans):
    """How long at least one of `spans` (start, end) lasts."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def spans_of(*kinds, word=""):
    timed = (e for e in events if e.get("cat") in kinds and word in e["name"])
    return [(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in timed]


calls = ("cuda_runtime", "cuda_driver")
causes = {
    "kernels": spans_of("kernel"),
    "copies": spans_of("gpu_memcpy", "gpu_memset"),
    "data": spans_of("user_annotation", word="data"),
    "sync": spans_of(*calls, word="Synchronize"),
    "launch": spans_of(*calls, word="Launch"),
    "host": spans_of("user_annotation", word="ProfilerStep#"),
}

# %%
spans, before, own_ms = [], 0.0, {}
for name, of_this in causes.items():
    spans += of_this
    now = union_ms(spans)
    own_ms[name] = (now - before) / recorded
    before = now
    print(f"{name:8} {own_ms[name]:7.2f} ms a step, profiled")
partition = same.partition()  # the course's own
for name in partition.keys() & {"kernels", "data"}:
    assert abs(own_ms[name] - partition[name]) < 0.02 * sum(partition.values())

# %% [markdown]
# **Your prediction:** for what share of the real step is the GPU idle because an image isn't ready, in %? Section 3's table has
# both numbers. Without a GPU: the share in which training waits for images.

# %%
my_data_share: float | None = None  # 0 to 100

lab.predict("share of the step lost to data", my_data_share, "%")

# %%
bars = {"as profiled": trace.partition()}
bars["not profiled"] = trace.partition(stock.metric("step_ms"), stock.metric("data_ms"))
if h200 := lab.reference(experiment="stock"):
    bars["H200, not profiled"] = {name: h200.metric(f"{name}_share") for name in SHARES}
shares = {bar: {n: 100 * ms / sum(of.values()) for n, ms in of.items()} for bar, of in bars.items()}
plots.breakdown(plt.subplots()[1], shares, unit="%").set_xlabel("% of an optimizer step")
plt.show()
lab.verdict("A1.overheads.host", "A1.stock.data", "A1.stock.launches")

# %% [markdown]
# Profiling stretches the host's time between kernels. The second bar takes that out again: kernels as recorded, the wait for data
# as timed, the rest in the recorded proportions. This assumes that profiling stretches launches and Python equally. The third bar
# and *ours* are two other sessions, of 1,450 and 1,115 ms: 29 and 23 % data.
#
# **Takeaway.** A GPU idles in two ways. Four long gaps a step wait for images: lab 03. Thousands of tiny ones wait for the
# next launch: lab 04.

# %% [markdown]
# ## 6 · Read a real trace
#
# **Question.** What does a micro-step look like, kernel by kernel?
#
# A trace of five steps has hundreds of megabytes. This cuts one step's last micro-step out, clipping and update included,
# and keeps what a viewer shows. `cut_to_micro_step` is 25 lines in `labutils/profiling/trace.py`.

# %%
one = profile(bench.candidates["stock"].trainer, 1, traces / "one", with_stack=False)
mine = cut_to_micro_step(one.path, lab.results_dir / "02_micro_step.trace.json.gz")
shipped = REFERENCE.with_name(mine.name)
micro_step = Trace.read(shipped if shipped.exists() else mine)
kinds = micro_step.categories().items()
lab.table(("kind", "kernels", "ms"), *((kind, row["count"], row["ms"]) for kind, row in kinds))
print(f"{micro_step.path.stat().st_size / 1e6:.2f} MB: {micro_step.path}")

# %% [markdown]
# Open that file at [ui.perfetto.dev](https://ui.perfetto.dev), *Open trace file*. Nothing is uploaded. It is the H200's where the
# course has it; yours is in the results folder. In a trace without a GPU operators stand for kernels. Keys: `w` and `s` zoom, `a`
# and `d` move, drag to select and count. Exercise 1 asks three questions about it.
#
# *Casts and layout* is what autocast costs, and changes between memory layouts. On the H200 it is the largest kind: some 30 %
# of the kernels' time.
#
# **Takeaway.** Count first, then look: which kernels, how many, how far apart.

# %% [markdown]
# ## 7 · Who makes the host wait?
#
# **Question.** As long as the host runs ahead, the GPU has a queue of work. A *synchronisation* stops the host until that
# queue is empty. Which lines do it?
#
# **Your prediction:** how many synchronisations has one optimizer step? Count the comments in section 1.

# %%
my_syncs: float | None = None

lab.predict("synchronisations in an optimizer step", my_syncs, "")


# %% [markdown]
# **Technique.** `torch.cuda.set_sync_debug_mode("warn")` names the very line. Below: the small loop, then the course's.


# %%
def lines_that_wait(step):
    """(file, line) -> how often an operator on it made the host wait in one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waiting = (w for w in caught if "a synchronizing CUDA operation" in str(w.message))
    return Counter((w.filename, w.lineno) for w in waiting)


with lab.attempt("PyTorch's warnings of synchronisations"):
    for step in (optimizer_step, bench.candidates["stock"].trainer.step):
        for (file, line), times in lines_that_wait(step).items():
            print(f"{times} x {linecache.getline(file, line).strip()}")

# %% [markdown]
# The trace is the second witness. It knows how long each wait took, and also waits outside of PyTorch's operators. Without a
# GPU nothing waits; then these are the places where Python reads a tensor's value. AdamW's step counters stay on the host
# and would not wait on a GPU.

# %%
waits = trace.waits if trace.on_gpu else trace.host_reads()
times = Counter(wait.phase for wait in waits)
ms = {phase: sum(w.ms for w in waits if w.phase == phase) / trace.steps for phase in times}
rows = ((phase, count / trace.steps, ms[phase]) for phase, count in times.items())
lab.table(("phase", "waits a step", "ms, profiled"), *rows)

# %% [markdown]
# On the H200 both witnesses count 17: eight copies, eight losses, and one read of `found_inf`, by which `GradScaler` learns
# whether a gradient overflowed. Look at their time in the table: about 2 ms of a profiled step there. The host was not ahead of
# the GPU, so waiting cost it next to nothing.
#
# **Takeaway.** A wait costs the lead that the host has over the GPU. In our H200's stock loop it has almost none. Section 8's loop
# has some: its GPU is 90 % busy.

# %% [markdown]
# ## 8 · The two gaps that remain
#
# **Question.** In its tuned loop the article still sees the GPU idle in two places. It blames `clip_grad_norm_`, which is
# said to wait for the norm, and TensorBoard's flush. Is it right?
#
# **Technique.** To wait for the norm, the host must read it. Run each suspect alone, and count the reads.

# %%
layer, x = nn.Linear(64, 64, device=device), torch.ones(8, 64, device=device)
sgd = torch.optim.SGD(layer.parameters(), lr=1e-3)
used_up = filter(lambda p: p.requires_grad, layer.parameters())  # as the public script has it:
torch.optim.AdamW(used_up)  # given to the optimizer first, and to the clipping afterwards
norms = {}
suspects = {
    "clip_grad_norm_(list)": lambda s: nn.utils.clip_grad_norm_(list(layer.parameters()), 1.0),
    "clip_grad_norm_(used filter)": lambda s: nn.utils.clip_grad_norm_(used_up, 1.0),
    "scaler.unscale_": lambda s: s.unscale_(sgd),
    "scaler.step": lambda s: s.step(sgd),
}
for name, suspect in suspects.items():
    fresh = torch.amp.GradScaler(device, init_scale=2.0)
    sgd.zero_grad()
    fresh.scale(layer(x).sum()).backward()
    with torch.profiler.profile() as prof:
        norms[name] = suspect(fresh)
    reads = Counter(event.name for event in prof.events())["aten::_local_scalar_dense"]
    print(f"{name:30} reads {reads} values")
print({name: float(norm) for name, norm in norms.items() if "clip" in name})

# %% [markdown]
# By default `clip_grad_norm_` reads nothing: norm and factor stay on the device. `scaler.step`, right behind it, does read.
#
# The public script has a surprise besides. Its parameters are a `filter` object. The optimizer goes through it to the end, and
# nothing is left for the clipping: its norm is 0, without a warning. If the article clips what the script clips, there was **no
# norm to wait for**. What the host did there is `scaler.unscale_`, which accelerate calls first: a Python loop over 256
# gradients.
#
# And what does a flush cost?

# %%
from torch.utils.tensorboard import SummaryWriter

writer, flush_ms = SummaryWriter(str(traces / "board")), []
for number in range(50):
    began = time.perf_counter()
    writer.add_scalar("loss", 0.5, number)
    writer.flush()
    flush_ms.append(1e3 * (time.perf_counter() - began))
writer.close()
print(f"a value written and flushed: {median(flush_ms):.2f} ms")

# %% [markdown]
# **Measurement.** The article saw both gaps with its GPU busy for 85 % of the time. Its card is slower than an H200. So give
# the H200 more work for the same launches: 24 random latents a micro-step, instead of one image. Look at GPU-busy first. Far
# below 85 % the host still sets the pace: then a wait costs nothing, and the speed-up tests nothing. Two loops take turns.
# *Synchronous* reads each loss and flushes each step. *Ring-buffer* keeps losses on the device and writes them later. The
# synchronous loop runs twice in each round. Where its two times may differ by more than 3 %, the table says *unsteady machine*,
# and no verdict is drawn from a time. A speed-up is the median of the rounds' ratios.

# %%
images = 24 if lab.scale == "full" else 8
paced = STOCK.but(micro_batch=images, cache="latents+text")
recipes = {"every loss is read": paced, "none is read": paced.but(logging="ring-buffer")}
tags = {name: {"experiment": "gaps", "logging": recipes[name].logging} for name in recipes}
with lab.attempt("Two gaps where the GPU sets the pace"):
    torch.cuda.synchronize()
    with Benchmark(on_drawn_latents(workload)) as pair:
        gaps = pair.compare(recipes, steps=1, tags=tags)
        for name, run in list(gaps.items())[:2]:
            seen = pair.profile(name, traces / name, steps=2)
            waited = sum(wait.ms for wait in seen.waits if wait.phase == "optimizer") / seen.steps
            run.metrics |= seen.metrics(run.metric("step_ms")) | {"optimizer_wait_ms": waited}
    columns = ("step_ms", "speed-up", "floor_ms", "gpu_busy", "clip_idle_ms", "optimizer_idle_ms")
    lab.show(lab.keep(gaps), (*columns, "optimizer_wait_ms"), experiment="gaps")
lab.verdict("A1.left.clip-gap", "A1.left.clip-sync", "A1.left.log-less")

# %% [markdown]
# All times of idling and waiting here are profiled ones. The *optimizer wait* is how long the host stood in the scaler's
# read. Were clipping a synchronisation, the host would stand in the clipping instead. A long wait in the read means that the
# host was ahead. Then the GPU has work during the clipping, and runs out of it at the read. After the read it idles while the
# host launches AdamW.
#
# On our H200 the host stood in the read for 25 ms. The GPU idled for 0.2 ms in the clipping, and for 8 ms behind the read. So the
# gap lies behind the read, and clipping is not its cause. Probably AdamW is launched slowly into an empty queue. A flush took 0.08
# ms, too little for a gap of milliseconds. In the trace the GPU idles for 227 ms of a step, 175 of them in forward and backward.
#
# This pair doesn't isolate logging. The table leaves out `data_ms`: the ring buffer's loop waits 128 ms per step for data, the
# synchronous one 20. So its waits probably moved to the batch's copies. Besides, the machine was unsteady. Whether less logging
# helps can't be said.
#
# **Takeaway.** A trace shows where the host *was* during a gap. That need not be *why* the GPU idled. First test a suspect
# alone.

# %% [markdown]
# ## Exercises
#
# The easiest first. Each cell checks itself. `lab.solution("02.1")` shows how the first can be solved.

# %%
import math

from labutils.course.exercises import check, faster_than

torch.set_num_threads(1)  # tensors this small gain nothing from more

# %% [markdown]
# **1. Three questions to a trace.** All are about the file of section 6. How many kernels are in it? What is the longest time
# without a kernel or a copy? How long is `forward`, in µs, divided by the launches that begin in it? If the trace has no GPU in it,
# count operators instead.

# %% tags=["exercise"]
my_kernels: float | None = None
my_longest_gap_ms: float | None = None
my_us_a_launch: float | None = None

my_reading = {"kernels": my_kernels, "longest_gap_ms": my_longest_gap_ms}
print(check_reading(micro_step, **my_reading, us_a_launch=my_us_a_launch))

# %% [markdown]
# **2. Profile a loop.** Write `profiled`. It records `step` by the schedule wait 1, warm-up 1, active 3, and returns the
# milliseconds a step of each `record_function` mark, as a dictionary. The check runs it on a step whose times it knows by
# the clock.


# %% tags=["exercise"]
def profiled(step, folder):
    return None  # your code: {"name of a mark": ms a step, ...}


print(check_profiled(profiled))


# %% [markdown]
# **3. Micro-step or optimizer step?** The article never says what its "step" is. Section 3's verdict takes it for a
# micro-step. Check that. Tuned, it took 98 ms at 85 % utilisation. How many milliseconds of GPU work are that? How many per
# image, if the step held four? On record an H200 needs 39 ms of kernels per image, and 33 compiled, as the article's tuned
# loop is. It has 2.7 times the bandwidth and 2.3 times the matrix rate of the article's card. So which of the two is it?

# %% tags=["exercise"]
my_gpu_ms: float | None = None
my_gpu_ms_of_four: float | None = None
my_step = ""  # "micro-step" or "optimizer step"

print(check("02.3", (my_gpu_ms, my_gpu_ms_of_four, my_step) if my_gpu_ms else None))

# %% [markdown]
# **4. Make it faster.** This step was written in a hurry. Find out what it spends its time on, with your `profiled` or by
# reading. Compute the same loss and gradient at least three times as fast.

# %% tags=["exercise"]
POSITIONS = 48


def hurried_step(x):
    """x [4, 48, 64] -> the loss, and the gradient of `layer`'s weight"""
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
    return (torch.randn(4, POSITIONS, layer.in_features, device=device),)


print(faster_than(4, hurried_step, calm_step, hidden_states, times=3))

# %% [markdown]
# ## What to read on
# - The script of this lab: `examples/text_to_image/train_text_to_image_lora.py` of [Hugging Face's
#   diffusers](https://github.com/huggingface/diffusers/tree/main/examples/text_to_image).
# - PyTorch: *[Profiler recipe](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html)*,
#   [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html), *[Performance Tuning
#   Guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)*, *[Automatic Mixed
#   Precision](https://docs.pytorch.org/docs/stable/amp.html)*.
# - [Perfetto](https://perfetto.dev/docs/), the viewer.
# - A. Chowdhery and others: *[PaLM](https://arxiv.org/abs/2204.02311)*, 2022, introduces MFU.
# - The course's [glossary](../docs/glossary.md). For a script of yours: `labutils diagnose -- python train.py`.
#
# Next: lab 03 moves the image reading to other processes.

# %%
truths = {
    "time of an optimizer step": stock.metric("step_ms"),
    "utilisation": 100 * watched[f"{'gpu' if trace.on_gpu else 'cpu'}_utilization"],
    "share of the step lost to data": 100 * stock.metric("data_share"),
    "synchronisations in an optimizer step": stock.metric("syncs_per_step"),
}
waits_there = h200 and h200.metric("syncs_per_step")
lab.done(truths, ours={"synchronisations in an optimizer step": waits_there})
