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
# # Lab 07 · QLoRA and unsloth
#
# Article A3 fine-tunes language models of 8 to 120 billion parameters in three ways: with LoRA; with QLoRA, which holds
# the frozen weights in 4 bits; and with unsloth, a library that replaces much of the training code of such models. It
# explains how numbers are held in 4 bits, and shows which method is fast and which is small.
#
# This lab first works the 4 bits out by hand. Then it trains Qwen3 as the article does, and asks what the article's
# figures leave open: of all that comes *with* 4 bits, what costs the time, what saves the memory, and can you have one
# without the other? At the end you train a small model that stops explaining and answers with a bare title.
#
# **After this lab you can**
# - quantise numbers by hand to 8 and to 4 bits, and say what blocks, NF4 and double quantisation are for;
# - take a method apart into what it changes, and switch each change alone;
# - predict the largest batch that fits on a card from two measurements;
# - say what checkpointing costs, and when it pays to send checkpoints to the host;
# - put together a recipe of your own, and compare it with a library's on the same rows of text;
# - train an adapter, show what it changed, and swap it for another.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 141 GB | 10 minutes |
#
# (On a GPU of 80 GB, *lora* runs out of memory on long texts at `full`. The lab says so and goes on, without the
# comparisons that need it.)
#
# At `full` the architecture is Qwen3-8B's, at `small` Qwen3-0.6B's. With random weights, time and memory are the real
# model's; losses are not, so section 8 trains a small model of its own.
#
# **Without a GPU** sections 1 to 3 and 8 hold as they are. In sections 4 to 7 a CPU shows how the questions are asked:
# 4-bit layers run in float32 and slowly, memory is counted tensor by tensor, and unsloth, which is written for GPUs, is
# left out. There our H200's tables stand below yours.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated texts with the datasets' lengths; hub: the real datasets
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
method_steps: int = 0  # timed steps of each method; 0: 4 at tiny, 6 at larger scales
log_every: int = 0  # steps between two lines of the memory log (the article: 10); 0: 3 at tiny, 2 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("07", globals())

# %%
import warnings
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from labutils.course import plots
from labutils.course.goals import GOAL_HEAD, goal_rows
from labutils.labs import lab07_qlora
from labutils.labs.lab07_toy_lm import Reader
from labutils.labs.ladders import distinct_on
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.layers.quantization import nf4_math
from labutils.layers.quantization.convert import convert_base
from labutils.layers.quantization.fp8_math import relative_error
from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Unavailable
from labutils.results.effects import paid_after
from labutils.results.records import Run, Runs
from labutils.training.unsloth_run import train_with_unsloth

plots.use_style()
warnings.filterwarnings("ignore", module="torch")
compile_from_nothing()  # so that a first step is one
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
method_steps, log_every = method_steps or (4 if tiny else 6), log_every or (3 if tiny else 2)

# %%
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))
torch.manual_seed(0)
texts = {length: lab.workload(f"qwen3-lora-{length}") for length in ("short", "long")}
recipes = lab07_qlora.recipes_on(lab.device)

# %% [markdown]
# ## 1 · Eight bits, and one number too many
#
# **Question.** How are numbers held in 8 bits, and what does a single outlier do to all the others?
#
# *Absmax* quantisation multiplies all numbers by one constant, chosen so that the largest becomes 127, and rounds. What
# is kept are the rounded *codes* and the constant; dividing restores the numbers, nearly. The article's example has four.

# %%
example = torch.tensor([2.50, -0.70, 0.12, 0.48])
whole = nf4_math.quantise_int(example)
constant, codes, restored = whole.constant.item(), whole.codes.flatten().tolist(), whole.restored()
absmax = Run("07", "absmax", tags={"experiment": "absmax"}, metrics={"constant": constant})
for place in range(4):
    absmax.metrics[f"code_{place}"] = codes[place]
    absmax.metrics[f"restored_{place}"] = restored[place].item()
lab.keep(absmax)
lab.table(
    (f"times {constant:.1f}, rounded", *(f"{x:.2f}" for x in example.tolist())),
    ("code", *codes),
    ("restored", *(f"{x:.4f}" for x in restored.tolist())),
)
lab.verdict("A3.int8.constant", "A3.int8.codes", "A3.int8.restored")
# %% [markdown]
# Now take a weight matrix of a million normally distributed numbers, and make one of them as large as a thousand standard
# deviations. Quantise it with one constant for all, and then in *blocks* of 64 numbers with a constant each.
#
# **Your prediction:** with one constant, what share of the other codes becomes 0, in percent?

# %%
my_zeros: float | None = None  # for example 50

lab.predict("codes that one outlier turns into 0", my_zeros, "%")

# %%
matrix = 0.02 * torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
with_outlier = matrix.clone()
with_outlier[512, 0] = 1000 * matrix.std()
others = torch.ones_like(matrix, dtype=torch.bool)
others[512, 0] = False
spoiled = {}
for name, block in (("one constant", None), ("blocks", 64)):
    quantised = nf4_math.quantise_int(with_outlier, block=block)
    codes = nf4_math.joined(quantised.codes, quantised.shape)
    spoiled[name] = {
        "zeros_share": (codes[others] == 0).float().mean().item(),
        "others_error": relative_error(quantised.restored()[others], matrix[others]),
    }
    run = Run("07", f"outlier, {name}", metrics=spoiled[name])
    run.tags = {"experiment": "outlier", "constants": name}
    lab.keep(run)

# %%
lab.table(
    ("INT8 with an outlier", "codes that are 0, %", "relative error of the others"),
    *(
        (name, f"{100 * m['zeros_share']:.1f}", f"{m['others_error']:.2%}")
        for name, m in spoiled.items()
    ),
)
lab.verdict("A3.int8.outlier", "A3.blocks.contain")
# %% [markdown]
# **Takeaway.** The largest number sets the constant, and so the error of all the others. Blocks don't remove an outlier;
# they give it fewer neighbours to spoil: 63 instead of a million.

# %% [markdown]
# ## 2 · Four bits
#
# **Question.** With four bits there are 16 levels. Weights are roughly normally distributed: many small ones, few large
# ones. Where should the levels lie?
#
# NF4 puts them at *quantiles*: it cuts the normal distribution into 16 pieces of about equal probability and gives each
# piece a level. One level is exactly zero, so there are 8 above it and 7 below. It takes a few lines of code
# (`labutils.layers.quantization.nf4_math.nf4_levels`).
#
# **Your prediction:** by how many percent is NF4's error smaller than that of INT4's 15 evenly spaced levels, both in
# blocks of 64?

# %%
my_gain: float | None = None  # for example 30

lab.predict("NF4's error is smaller by", my_gain, "%")

# %%
levels = nf4_math.nf4_levels()
fig, ax = plt.subplots(figsize=(7.2, 2.8))
largest = (matrix.reshape(-1, 64) / matrix.reshape(-1, 64).abs().amax(1, keepdim=True)).flatten()
ax.hist(
    largest.numpy(),
    bins=120,
    density=True,
    color=plots.MIST,
    label="weights over their block's largest",
)
ax.vlines(levels, 0, 0.9, color=plots.NAVY, linewidth=2, linestyle="-", label="NF4")
ax.vlines(
    torch.arange(-7, 8) / 7,
    0.95,
    1.15,
    color=plots.RUST,
    linewidth=2,
    linestyle="-",
    label="INT4, evenly spaced",
)
ax.set(xlabel="value over the block's largest magnitude", ylabel="density", yticks=[])
ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
plt.show()

# %%
errors = nf4_math.rounding_errors(matrix)
codes = nf4_math.quantise_to(levels, matrix, 64).codes
share = nf4_math.entropy_bits(codes) / 4
for code, name in {"int4": "INT4, blocks of 64", "nf4": "NF4, blocks of 64"}.items():
    run = Run("07", f"rounding {code}", metrics={"error": errors[name]})
    run.tags = {"experiment": "rounding", "code": code}
    if code == "nf4":
        run.metrics["information_share"] = share
    lab.keep(run)
print(
    f"Relative error: INT4 {errors['INT4, blocks of 64']:.2%}, NF4 {errors['NF4, blocks of 64']:.2%}."
)
print(f"An NF4 code carries {4 * share:.2f} of its 4 bits.")
lab.verdict("A3.nf4.better", "A3.nf4.optimal")
# %% [markdown]
# The article calls NF4 information-theoretically optimal. That would mean that all 16 codes are equally frequent, so
# that no bit is wasted. They nearly are. The difference comes from the blocks: the levels are quantiles of a normal
# distribution, but what they hold is a block's numbers *divided by the largest of them*, and so each block has one
# number that is exactly 1 or −1. These are the two spikes at the edges of the picture. (Equally frequent codes don't
# give the smallest error, either: for that, more levels would have to lie in the tails.)
#
# ### The constants' price
#
# **Question.** Blocks need constants. What do these cost?
#
# A constant of 32 bits for every 64 weights is half a bit a weight, an eighth of what the codes take. *Double
# quantisation* quantises the constants as well: to 8 bits each, with one 32-bit constant for every 256 of them. Below,
# the bits a weight are worked out in two ways, for both kinds of constants: from the bytes that bitsandbytes, the
# library behind QLoRA, holds, and by arithmetic.

# %%
packed, state = quantize_4bit(matrix, quant_type="nf4", compress_statistics=False)
ours = nf4_math.quantise_nf4(matrix)
same = {
    "bytes": torch.equal(packed.flatten(), ours.packed),
    "constants": torch.equal(state.absmax, ours.absmax),
    "restored weights": torch.equal(dequantize_4bit(packed, state), ours.restored(matrix.dtype)),
}
print("Equal to bitsandbytes', bit for bit:", ", ".join(name for name in same if same[name]))

# %%
weight = torch.randn(4096, 1024).bfloat16()
packed, single = quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
_, double = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
held_bytes = {
    "bits_codes": packed.nbytes,
    "bits_float32": single.absmax.nbytes,
    "bits_doubled": double.absmax.nbytes + double.state2.absmax.nbytes,
}
held = {name: 8 * count / weight.numel() for name, count in held_bytes.items()}
held["linear_share"] = (held["bits_codes"] + held["bits_doubled"]) / 16
lab.keep(
    [
        Run("07", "constants", tags={"experiment": "constants"}, metrics=held),
        Run(
            "07",
            "weights",
            tags={"experiment": "weights"},
            metrics={"linear_share": held["linear_share"]},
        ),
    ]
)
arithmetic = {
    "bits_float32": nf4_math.constant_bits(),
    "bits_doubled": nf4_math.doubled_constant_bits(),
}
words = {"bits_float32": "constants in 32 bits", "bits_doubled": "constants doubly quantised"}
rows = [(words[name], held[name], bits) for name, bits in arithmetic.items()]
lab.table(("bits a weight", "in the bytes that bitsandbytes holds", "by arithmetic"), *rows)
lab.verdict("A3.blocks.bits", "A3.double.bits", "A3.qlora.weights")
# %%
in_blocks = nf4_math.constant_bits()  # one constant for all takes nothing to speak of
bits = {
    "INT8, one constant": 8,
    "INT8, blocks of 64": 8 + in_blocks,
    "INT4, one constant": 4,
    "INT4, blocks of 64": 4 + in_blocks,
    "FP4 E2M1, blocks of 64": 4 + in_blocks,
    "NF4, one block": 4,
    "NF4, blocks of 64": 4 + in_blocks,
    "NF4, doubly quantised": 4 + nf4_math.doubled_constant_bits(),
    "FP8 E4M3, one scale": 8,
}

# %%
fig, ax = plt.subplots(figsize=(7.2, 3.4))
formats = sorted(errors, key=lambda name: (bits[name], -errors[name]))
shown = ax.barh(
    [f"{name} ({bits[name]:.3g} bits)" for name in formats],
    [100 * errors[name] for name in formats],
    color=[plots.NAVY if bits[name] < 6 else plots.MIST for name in formats],
)
ax.bar_label(shown, fmt="%.1f %%", padding=4)
ax.set(
    xlim=(0, 22),
    xlabel="relative error of the weights, % (in brackets: bits a weight, constants included)",
)
ax.grid(axis="y", visible=False)
ax.invert_yaxis()
plt.show()

# %% [markdown]
# Compare two bars at a time to see what each idea buys. Blocks cut INT4's error by almost half, for half a bit. NF4 in place of
# INT4 saves another seventh of the error, for nothing. Double quantisation gives 0.37 bits back without making the error
# any larger. (These weights have no outlier. With one, every format with a single constant would fail as in section 1.)
#
# ### What is multiplied
#
# **Question.** Does a layer with a weight in 4 bits calculate in 4 bits?
#
# Tensor cores can't multiply NF4. So the layer must turn its weight back into 16 bits before each product. If that is
# all it does, its result equals the product with the restored weight.

# %%
bf16 = {"device": lab.device, "dtype": torch.bfloat16}
linear = torch.nn.Linear(1024, 1024, bias=False, **bf16).requires_grad_(False)
x = torch.randn(64, 1024, **bf16)
exact = F.linear(x.double(), linear.weight.double())
model = torch.nn.Sequential(linear)
convert_base(model, ["0"], "nf4", x.dtype)  # puts bitsandbytes' Linear4bit in its place
result, weight = model(x), model[0].weight
restored = dequantize_4bit(weight, weight.quant_state)
error = relative_error(result, F.linear(x.double(), restored.double()))
layer = {
    "multiplies_restored_weights": int(error < 2 * torch.finfo(x.dtype).eps),
    "error_to_restored": error,
    "error_to_16_bits": relative_error(result, exact),
}
lab.keep(Run("07", "nf4 layer", tags={"experiment": "nf4 layer"}, metrics=layer))
print(
    f"The layer's result is {layer['error_to_restored']:.2%} off the product with the restored weight,"
)
print(f"and {layer['error_to_16_bits']:.1%} off the product with the 16-bit weight.")
lab.verdict("A3.qlora.dequantised")
# %% [markdown]
# **Takeaway.** QLoRA saves storage, not arithmetic: the products are as large as before, and restoring the weights comes
# on top.

# %% [markdown]
# ## 3 · Thin matrices
#
# **Question.** LoRA adds the product of two thin matrices to each weight, $W' = W + BA$. How many numbers are trained,
# and does it matter in which order you multiply?
#
# $W$ has the shape [out, in], $A$ [r, in] and $B$ [out, r]. PyTorch's rows $x$ of inputs are multiplied from the right,
# so the adapter adds $x A^T B^T$ to the layer's result $x W^T$. It can be computed in two orders. *Wide first*,
# $x\,(BA)^T$, makes a matrix as large as $W$; *thin first*, $(x A^T)\,B^T$, never has more than r numbers a token in
# between.
#
# **Your prediction:** with r = 8, how many times as many FLOPs does *wide first* take as *thin first*, gradients
# included?

# %%
my_order: float | None = None  # for example 10

lab.predict("FLOPs, wide first against thin first", my_order, "x")

# %%
from labutils.layers import lora
from labutils.workloads.causal_lm import QWEN3, build_lm
from labutils.workloads.decoder_flops import decoder_shapes
from labutils.workloads.decoder_workload import projections

rank = 8
lm = build_lm(QWEN3["full"], torch.device("meta"), torch.bfloat16)  # shapes that take no memory
in_all = lora.count_parameters(lm)
lora.attach_lora(lm, projections(lm), rank, 2 * rank, "plain", seed=0)
adapter_bytes = sum(p.nbytes for p in lm.parameters() if p.requires_grad)
as_the_formula = [
    lora.count_trainable(layer) == lora.lora_parameters(layer.out_features, layer.in_features, rank)
    for layer in lora.lora_layers(lm).values()
]
counts = {
    "trained": lora.count_trainable(lm),
    "in_all": in_all,
    "counts_as_the_formula": int(all(as_the_formula)),
    "adapter_share": adapter_bytes / (2 * in_all),
}
kept = Run("07", "lora-counts", workload="qwen3-lora-long", scale="full", metrics=counts)
kept.tags = {"experiment": "lora-counts"}
lab.keep(kept)
print(
    f"Qwen3-8B, r = 8: {counts['trained']:,} of {counts['in_all']:,} numbers are trained. Held in float32 beside 16-bit "
    f"weights, they are {counts['adapter_share']:.2%} of the bytes."
)

# %%
def chain(order, x, A, B, slope):
    """y = x Aᵀ Bᵀ in either order, and the gradients of x, A and B; slope: the gradient of y."""
    h, g = x @ A.t(), slope @ B
    if order == "thin first":
        y, dx = h @ B.t(), g @ A
    else:
        whole = B @ A
        y, dx = x @ whole.t(), slope @ whole
    return y, dx, g.t() @ x, slope.t() @ h  # without the gradient of the whole matrix


shapes = [(5, 12), (3, 12), (7, 3), (5, 7)]
x, A, B, slope = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
y = x @ A.t() @ B.t()
expected = (y, *torch.autograd.grad(y, (x, A, B), slope))
for order in ("thin first", "wide first"):
    torch.testing.assert_close(chain(order, x, A, B, slope), expected)

# %%
from torch.utils.flop_counter import FlopCounterMode


def chain_flops(order: str, tokens: int, rank: int) -> int:
    """On all seven projections of a Qwen3-8B block, counted by PyTorch on the meta device."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        for wide, out in decoder_shapes(QWEN3["full"]).adapted.values():
            shapes = ((tokens, wide), (rank, wide), (out, rank), (tokens, out))
            chain(order, *map(torch.empty, shapes))
    return counter.get_total_flops()


flops = {order: chain_flops(order, 4 * 861, rank=8) for order in ("thin first", "wide first")}
for order, n in flops.items():
    run = Run("07", f"chain: {order}", metrics={"flops": n})
    run.tags = {"experiment": "chain", "order": order}
    lab.keep(run)
ranks = [4, 8, *(4**power for power in range(2, 7))]
ratios = [chain_flops("wide first", 3444, r) / chain_flops("thin first", 3444, r) for r in ranks]
lab.table(
    ("rank r", *ranks),
    ("wide first, times the FLOPs of thin first", *(f"{ratio:.3g}" for ratio in ratios)),
)
lab.verdict("A3.lora.count", "A3.lora.small-file", "A3.unsloth.order")
# %% [markdown]
# PyTorch multiplies in the order in which the code is written. PEFT writes the thin product first, so unsloth isn't
# alone in this. The order nearly stops mattering in the last column, where the rank comes near the matrix's own width.
#
# **Takeaway.** At the ranks that are in use, multiply thin first. LoRA then adds next to no arithmetic. (It still adds
# many small kernels, each with a launch; FLOPs don't count those.)

# %% [markdown]
# ## 4 · Three methods, two lengths of text
#
# **Question.** Which method is fast on which texts, what does its first step cost, and what happens to the memory?
#
# | method | what it is |
# |---|---|
# | *lora* | PEFT's LoRA on 16-bit weights: batch 4, r = 8 on all seven matrices of a block, driven by accelerate |
# | *qlora* | QLoRA as it is usually written: 4-bit weights, and PEFT's `prepare_model_for_kbit_training` |
# | *unsloth* | unsloth's QLoRA, in a process of its own, since importing it changes the other libraries; for later sections also with rows *packed* or *padded* to full length |
#
# The seven matrices, or *projections*, are those of attention (query, key, value, output) and of the MLP (gate, up,
# down).
#
# *short* texts are instructions of 117 tokens on average, *long* ones encyclopedia texts of 861. All are padded to the
# longest in their batch. Every method gets the same batches, so that steps can be compared one by one: the longest
# batch has more than twice as many tokens as the shortest.
#
# **Your prediction:** by how many percent is QLoRA's step on long texts longer than LoRA's?

# %%
my_qlora: float | None = None  # for example 20

lab.predict("QLoRA's step on long texts, longer by", my_qlora, "%")

# %%
logs = lab.results_dir / "memory"
runs: dict[str, Run] = {}


def follow(*words: str, against: str = "") -> None:
    """Measure and keep a method, unless an interrupted start left it behind; a failure says why."""
    chosen = lab07_qlora.method(*words)
    measure = partial(
        lab07_qlora.follow, texts, chosen, method_steps, logs, log_every, runs.get(against)
    )
    runs[chosen.name] = lab.measured(chosen.name, chosen.recipe, measure)


for length in texts:
    follow("lora", length)
    follow("qlora", length, against=f"lora {length}")
follow("qlora", "short", "batch 1")

# %%
with lab.attempt(
    "unsloth in a process of its own", experiment="methods", method="unsloth", texts="long"
):
    for workload in texts.values():
        workload.release_weights()
    jobs = lab07_qlora.unsloth_jobs(texts, method_steps)
    asked = {name: job.recipe for name, job in jobs.items()}
    runs |= lab.measured_together(asked, lambda: train_with_unsloth(jobs, logs, log_every))

# %%
columns = {
    "run": "method",
    "first_step_s": "first step, s",
    "step_ms": "step, ms",
    "useful_tokens_per_s": "useful tokens/s",
    "examples_per_s": "examples/s",
    "peak_allocated_gb": "peak memory, GB",
    "peak_reserved_gb": "reserved, GB",
}
lab.show(runs.values(), columns, experiment="methods")

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), sharey=True)
seconds = {
    f"{length} texts": lab07_qlora.over_examples(logs, length, "elapsed_time_sec")
    for length in texts
}
plots.panels(axes, seconds, "examples trained on", "s since the model was built")
plt.show()

# %% [markdown]
# The article draws these curves, too: time over examples, from a log that a callback writes every few steps. (It is a CSV
# file in your results' folder `memory/`, with the article's columns.) A curve's slope is the time for an example. Where
# it starts high, setting up and the first step took long.
#
# On a GPU the same log has the memory: *allocated* is what tensors hold between two steps, *peak* the most they held so
# far, *reserved* what PyTorch has taken from the driver. The log counts as the article's does, in GiB of 2³⁰ bytes; the
# tables of this lab count in GB of 10⁹ bytes, and so show 7 % more for the same memory.

# %%
columns = {
    "memory_allocated_gb": "allocated",
    "memory_reserved_gb": "reserved",
    "peak_memory_gb": "peak so far",
}
with lab.attempt("Memory over time", experiment="methods", method="qlora", texts="long"):
    if not on_gpu:
        raise Unavailable("there is no GPU, whose memory the log would hold")
    fig, axes = plt.subplots(1, 3, figsize=(7.4, 3.2), sharey=True)
    over = {
        title: lab07_qlora.over_examples(logs, "long", column) for column, title in columns.items()
    }
    plots.panels(axes, over, "examples", "GiB")
    plt.show()

# %%
lab.verdict("A3.qlora.slower", "A3.qlora.not-all", "A3.batch.faster")
lab.verdict(
    "A3.unsloth.first-step",
    "A3.unsloth.long",
    "A3.unsloth.length",
    "A3.unsloth.memory",
    "A3.unsloth.vendor-speed",
    "A3.unsloth.vendor-memory",
)
if "unsloth long" in runs:
    paid = paid_after(runs["qlora long"], runs["unsloth long"])
    print(
        "unsloth's slower start has paid after",
        "no number of steps" if paid in (None, float("inf")) else f"{paid:.0f} steps",
    )

# %% [markdown]
# Between steps mostly weights are allocated. There QLoRA takes a good half of *lora*'s memory, and not a quarter, as its
# embedding and head are in float32. But what decides whether a card is large
# enough is the peak, and to the peak belong activations and logits, which 4-bit weights don't make any smaller. Memory
# that is reserved follows the longest batch so far, and isn't given back.
#
# **Takeaway.** "QLoRA is slower and smaller" describes several changes at once. The next section makes them one by one.

# %% [markdown]
# ## 5 · One change at a time
#
# **Question.** QLoRA, as it is usually written, changes three things at once. Which of them costs the time, and which
# saves the memory?
#
# - *4 bits*: the frozen weights are held in NF4.
# - *checkpointed*: blocks keep only their inputs and are computed again in the backward pass.
# - *fp32 casts*: embeddings, norms and head are turned into float32 (on a CPU they are anyway).
#
# Each change is made alone, starting from *lora*. A fourth, *offloaded*, is unsloth's: checkpointing that sends the
# blocks' inputs to the host, and fetches each back during the backward pass, while the block after it is being computed
# again.
#
# **Your prediction:** by how many percent do 4-bit weights alone make *lora*'s step longer? (Less than 0: shorter.)

# %%
my_bits_alone: float | None = None  # for example 15

lab.predict("step with 4-bit weights alone, longer by", my_bits_alone, "%")

# %%
alone = ["checkpointed", "4 bits", "offloaded"]
if on_gpu:  # on a CPU everything is float32 already
    alone += ["fp32 casts"]
for change in alone:
    follow("lora", "long", change)
bundle = ["lora long", *(f"lora long, {change}" for change in alone), "qlora long"]
if on_gpu:
    follow("qlora", "long", "no casts")
    bundle.insert(-1, "qlora long, no casts")
fig, ax = plt.subplots()
plots.steps(ax, {name: runs[name] for name in bundle if runs[name].ok})
plt.show()

# %% [markdown]
# (The bars' ranges mostly come from the batches' different lengths. The table below compares each step with *lora*'s on
# the same batch.)
#
# Memory is measured at two batch sizes, on texts padded to the full length. Two points make a line: how much is there
# at any batch, and how much each example adds. One more row joins here, *fused loss*: it computes the loss for a chunk
# of tokens at a time, so that the *logits*, one number for each token and each word of the vocabulary, never exist all
# at once.

# %%
room = cuda.free_memory()
memory: dict[str, Run] = {}
measured = [
    lab07_qlora.method("lora", "long"),
    lab07_qlora.method("lora", "long", "checkpointed"),
    lab07_qlora.method("lora", "long", "checkpointed", "fused loss"),
    lab07_qlora.method("lora", "long", "4 bits"),
    lab07_qlora.method("qlora", "long"),
]
for chosen in measured:
    with lab.attempt(f"memory of {chosen.name}", experiment="memory", **chosen.tags):
        tried = room if chosen.name in ("lora long", "qlora long") else None
        batches = (1, 4) if on_gpu else (1, 2)
        measure = partial(lab07_qlora.memory_line, texts, chosen, batches, tried)
        memory[chosen.name] = lab.measured(f"memory of {chosen.name}", chosen.recipe, measure)

# %%
those = [*(runs[name] for name in bundle), *memory.values()]
lab.show(those, lab07_qlora.bundle_table, texts="long")

# %%
lab.verdict("A3.qlora.cause", "A3.checkpointing.memory", "A3.checkpointing.slower")
lab.verdict("A3.offload.time", "A3.offload.memory")
# %% [markdown]
# **The time.** Add up what the three changes cost alone, and compare the sum with *qlora*. On our H200 it is far less:
# checkpointing costs most of it, 4 bits and casts next to nothing. But beside the other two the casts do cost time, as
# *qlora, no casts* shows. Effects of changes needn't add up; so also take each one *out* of the whole.
#
# **The memory.** The column *GB at any batch* shows what 4-bit weights save. (At `full` *qlora* has more there than *4 bits*: its
# embedding and head, the largest matrices of all, are turned into float32.)
#
# The column *GB an example* shows what checkpointing saves: without it, an example adds what all blocks keep. With it,
# what remains is mostly the logits, for a vocabulary of 152 thousand words (1024 at `tiny`); the row *fused loss* shows
# how much they were. So at a large batch checkpointing matters most, the loss comes second, and the format of the
# weights changes less than either in what an example adds.
#
# Sending checkpoints to the host (*offloaded*) saves the GPU memory that they take. That grows with the model's depth,
# and shows in the peak only where logits don't take more. (On a CPU the host is the device: nothing can be saved
# there.)
#
# **Takeaway.** Before you call a format slow or small, change it alone, and take it alone out of the whole.

# %% [markdown]
# ## 6 · The largest batch that fits
#
# **Question.** The article had to stop at batch 2 with one method and reached 32 with another. Can you say beforehand
# where a card will be full?
#
# The lines of the last section say where: where they reach the card's size. But that memory *is* a straight line over
# the batch is so far only assumed; two points lie on a line in any case. On a GPU the prediction for *this* card is put
# to the test, for LoRA and QLoRA: at 0.9 times the predicted batch training must run, and just above 1.1 times it must
# fail. Without a GPU there is no such test, and the line stays an assumption.

# %%
sizes = (
    (24, 48, 80, 96, 141) if on_gpu else (0.024, 0.048, 0.096)
)  # GB; a tiny model fits cards of some megabytes
every = Runs([*runs.values(), *memory.values()])
lab.table(lab07_qlora.largest_table(every, sizes))
on_record = lab.references(texts="long")
lab.show("**On our H200**, on cards of other sizes:")
lab.table(lab07_qlora.largest_table(on_record, (24, 48, 80, 96, 141)))
for name, run in memory.items():
    if "largest_batch" in run.metrics:
        outcome = "held" if run.metrics["fits"] and run.metrics["fails"] else "did not hold"
        print(
            f"{name}: the line says {run.metrics['largest_batch']} on this card ({room:.0f} GB free). It {outcome}."
        )

# %% [markdown]
# **Takeaway.** Where memory is a straight line over the batch, two points are enough to plan with. A try near the
# predicted batch shows whether it is one. Take all of these on the longest texts: it is the batch with those that
# fails.

# %% [markdown]
# ## 7 · A recipe of our own
#
# **Question.** How fast can one GPU train on the same texts, and does that need 4 bits, or unsloth?
#
# The ladder starts at *lora* of section 4. Up to the graph, each rung keeps the changes of the rungs before it:
#
# - no library around the loop, and no mask, so that PyTorch can choose its fastest attention kernel;
# - the loss computed chunk by chunk, so that the logits never exist all at once (section 5's *fused loss*);
# - rows *packed* with several texts that don't see each other, so that nothing is padding;
# - on a GPU, one block's compiled code for all blocks, and one for the loss of each chunk of tokens, whose logits then
#   never exist in float32;
# - on a GPU, the whole step replayed as one CUDA graph, now that every step has one shape.
#
# The last three rungs stand side by side on top of those. Each holds the frozen weights in its own way:
#
# - in FP8, multiplied on FP8 tensor cores;
# - in 4 bits that are restored to 16 inside the compiled block;
# - in 4 bits that are restored to FP8 and multiplied in FP8, with blocks checkpointed and without the graph, which holds
#   memory of its own. The checkpoint is compiled with its block, so that the backward pass computes again what it needs,
#   and not the block's last product, a quarter of its arithmetic. What attention gave is kept as well, in an 8B model as
#   much as the block's input. This rung changes several things at once: hold it against unsloth, which has 4-bit
#   weights and checkpoints too.
#
# How the numbers are made: rungs with the same rows are timed on the same few batches. The share of tokens that aren't
# padding is that of a whole epoch, which is known exactly; in a few batches it would vary by a tenth.
#
# **Your prediction:** how many times as many useful tokens a second as *lora* will the best BF16 rung reach?

# %%
my_best: float | None = None  # for example 2

lab.predict("useful tokens a second, best BF16 rung against lora", my_best, "x")

# %%
climbable = distinct_on(lab.device, recipes)
lanes = {rung.name: rung.lane for rung in lab07_qlora.LADDER}
how = {"steps": 2, "rounds": 1, "warmup": 0} if tiny else {"steps": 6, "rounds": 2, "warmup": 2}
climbed = lab.measured_together(
    climbable, lambda: lab07_qlora.climbed_on(texts["long"], climbable, **how)
)
climbed = {name: climbed[name] for name in climbable}
fig, ax = plt.subplots()
groups = {
    name: "other weights" if recipes[name].base_linear != "published" else lanes[name]
    for name in climbed
}
shown = [replace(run, lane=groups[name]) for name, run in climbed.items() if run.ok]
plots.ladder(ax, shown, "ms_per_1k_useful_tokens")
plt.show()

# %%
changes = {
    rung.name: ", ".join(f"`{knob}={value!r}`" for knob, value in rung.changes.items())
    for rung in lab07_qlora.LADDER
}
lab.table(
    ("rung", "lane", "changes"), *((name, groups[name], changes[name] or None) for name in climbed)
)
lab.show(climbed.values(), lab07_qlora.rungs_table, experiment="ladder")

# %%
targets = lab07_qlora.reached(climbed, Runs(runs.values()))
aims = Run(
    "07",
    "targets",
    tags={"experiment": "targets"},
    lane="same mathematics",
    workload="qwen3-lora-long",
    scale=lab.scale,
    metrics=targets,
)
lab.keep(aims)
lab.table(
    ("", *GOAL_HEAD), *goal_rows(lab07_qlora.GOALS, aims, lab.reference(experiment="targets"))
)

# %% [markdown]
# (The picture counts the padding of the batches that were timed, the tables that of an epoch. So their ratios differ a
# little, and your prediction is scored by the tables. The goals are ours, set for an H200 before it was measured.)
#
# Some rungs gain nothing. The fused loss is there for memory, not for time. A graph gains where the GPU waits for the host
# to launch kernels; once blocks are compiled, a GPU that has this much to do waits no longer. (Its *first step* is short
# because it takes the code that the rung before it had compiled.)
#
# (On a CPU nothing is compiled, nothing waits for a GPU, packed rows compute pairs of tokens only to mask them, and
# low-bit formats are emulated. The picture shows how a ladder is built; its times say nothing about a GPU.)
#
# **Mind the lanes.** *Same work* computes the same gradients from the same batches. *Same mathematics* packs rows, so a
# batch has other examples in it. Rungs with *other weights*, which are a lane of their own here, change the function that
# is trained, as QLoRA does: in 4 bits each weight is rounded once, and with FP8 every activation and every output gradient is rounded as well. Look at losses
# with real weights before you use one.
#
# **The floor** is the time that the arithmetic takes at this machine's measured rate, or that reading the weights takes,
# whichever is longer.
#
# **unsloth** appears twice in the last table. With rows packed as ours, in our loop, two ways to train the same model
# from the same 4-bit weights are compared; ours multiplies in FP8, and so rounds activations and output gradients as
# well. With its padded batches, packing counts too, which unsloth can also do itself.
#
# ### What is left above the floor?
#
# **Question.** The floor is arithmetic at the rate of one large product. Where does a step of *blocks compiled* take
# longer?
#
# *GEMM* are the products with the frozen weights, and with the head's, *thin GEMM* those with the adapters' matrices: over
# r = 8 numbers there is hardly anything to compute, yet a tensor as large as the layer's input or output is read or
# written each time. *Compiled* are the kernels that the compiler made of all that lies between the products.

# %%
def kinds(runs: list[Run]) -> pd.DataFrame:
    """Kinds of work that take a hundredth of the step's or more."""
    work = pd.DataFrame(runs[0].metrics["kernel_categories"]).T
    work["% of the work"] = 100 * work["ms"] / work["ms"].sum()
    work["count a step"] = work["count"].round().astype(int)
    named = work.rename(columns={"ms": "ms a step"}).rename_axis("kind of work").reset_index()
    columns = ["kind of work", "ms a step", "% of the work", "count a step"]
    return named.loc[named["% of the work"] >= 1, columns]


with lab.attempt("A step by kind", experiment="step by kind"):
    folder = lab.cache_dir / "traces" / "lab-07"
    traced = lab.measured(
        "step by kind",
        None,
        lambda: lab07_qlora.step_by_kind(texts["long"], recipes["blocks compiled"], folder),
    )
    lab.show([traced], kinds, experiment="step by kind")

# %% [markdown]
# Hold *GEMM* and *attention* together against the floor: nearly all of the floor's arithmetic is in these two, and they
# show what rate it has here, step after step. For the other rows the floor has hardly any time. (Times of kernels are
# summed up; what the GPU idles is not among them. Without a GPU these are operators of a step that nothing compiled.)
#
# **Takeaway.** Each of these techniques can be used and measured on its own: what it brings is the difference between
# its rung and the one before. Which of them make unsloth fast is not answered here, as none of its parts was switched
# off.

# %% [markdown]
# ## 8 · A bare title
#
# **Question.** Article A3 fine-tunes its model on 2500 encyclopedia texts, each with its title as the answer.
# Afterwards the model answers with a bare title where it used to explain. What has fine-tuning changed?
#
# Random weights have no habits to change. So you first train a small model from scratch, all its weights, until it
# introduces what a text is about. Its language is Japanese, as that of A3's texts is. You needn't read it; look at the
# form:
#
# | | a text about the hot spring (温泉) of Asama (浅間) is answered with |
# |---|---|
# | *introduces* | 浅間の温泉についての紹介。 "An introduction to the hot spring of Asama." |
# | *title* | 浅間温泉 "Asama Hot Spring" |
# | *place* | 浅間 "Asama" |
#
# Then these weights are frozen, and LoRA is trained on texts of the same kind with their bare titles. The questions are
# about pairs of place and thing that were in no training text.
#
# **Your prediction:** after fine-tuning, in how many percent of the questions is the answer the exact title?

# %%
my_titles: float | None = None  # for example 90

lab.predict("exact titles after fine-tuning", my_titles, "%")

# %%
reader = Reader(lab.device)
curves = {"explain, all weights": reader.learn_to_explain(160)}
before = {"explains": reader.matches(None, "explain"), "title": reader.matches(None, "title")}
curves["title, adapter"] = reader.fine_tune("title", 85)
after = reader.matches("title", "title")
style = {
    "exact_before": before["title"],
    "explained_before": before["explains"],
    "exact_after": after,
}
style["answers_with_title"] = int(after > 0.5 > before["title"] and before["explains"] > 0.5)
lab.keep(Run("07", "style", tags={"experiment": "style"}, metrics=style))
# %%
lab.table(
    ("answers that are exactly right, %", "introduces", "bare title"),
    ("before", 100 * before["explains"], 100 * before["title"]),
    ("after", 100 * reader.matches("title", "explain"), 100 * after),
)
lab.verdict("A3.120b.style")
# %%
fig, ax = plt.subplots(figsize=(7.2, 2.8))
for (name, losses), line in zip(curves.items(), ("-", "--"), strict=True):
    ax.plot(range(1, len(losses) + 1), losses, linestyle=line, label=name)
ax.set(yscale="log", xlabel="optimizer step", ylabel="loss, logarithmic")
ax.legend()
plt.show()

# %% [markdown]
# The loss falls in both trainings. But does a falling loss show that the *style* has changed? The table above does, as
# it counts answers.
#
# Now train a second adapter, which answers with the place alone. Each adapter is a tenth of the size of the one frozen
# model: to change the task, change the adapter.

# %%
reader.fine_tune("place", 40)
answers = {name: reader.answers(name) for name in (None, "title", "place")}
rows = [("text", "no adapter", "adapter *title*", "adapter *place*")]
for index in range(4):
    rows.append((reader.questions[index].body, *(given[index] for given in answers.values())))
lab.table(*rows)

# %% [markdown]
# Each row is one text, answered in three ways by the same frozen weights. What changes in every row is the form. What the
# answer is *about* isn't always right, with an adapter or without: this small model reads far from perfectly, so exact
# answers count reading and style together. Look for a row that names another place or thing than its text.
# (A � stands for bytes that form no character: the model writes bytes, and this one didn't finish.)
#
# **Takeaway.** A style is cheap: a hundred steps, and an adapter on weights that stay as they are. To show that it has
# changed, ask about what wasn't in the training, and count exact answers before and after.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("07.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** Quantise −1.3 by hand in absmax INT8, in a block whose largest magnitude is 5.2. Which code does it get?

# %% tags=["exercise"]
my_code = None  # a whole number
print(check("07.1", my_code))

# %% [markdown]
# **2.** Somebody uses NF4 in blocks of 32 weights. The blocks' constants are held in 8 bits, with one float32 constant for
# every 128 of them. How many bits a weight do all these constants take?

# %% tags=["exercise"]
my_bits = None  # your sum, for example 8 / 64 + 32 / (64 * 256)
print(check("07.2", my_bits))

# %% [markdown]
# **3.** A method takes 30 GB at batch 2 and 45 GB at batch 5, on texts of full length. Which batch is the largest on a card
# of 80 GB, of which 2 GB are not PyTorch's?

# %% tags=["exercise"]
my_batch = None  # a whole number
print(check("07.3", my_batch))

# %% [markdown]
# **4. Make it faster.** In a chat only the answers are learned: here one position in eight has a label, the others have
# `-100`. The plain loss forms logits for 8,192 words at every position all the same. Write `at_answers`: the same loss
# and the same gradient, at least twice as fast.

# %% tags=["exercise"]
torch.manual_seed(0)
positions, width = (8192, 1024) if lab.device == "cuda" else (1024, 64)
head = 0.1 * torch.randn(8192, width, device=lab.device)


def at_every_position(hidden, labels):
    """hidden [positions, width], labels [positions] -> the loss, and the gradient of hidden"""
    hidden = hidden.requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ head.T, labels, ignore_index=-100)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, hidden)[0]}


def at_answers(hidden, labels):
    return at_every_position(hidden, labels)  # your code instead


def a_chat(seed: int) -> tuple:
    torch.manual_seed(seed)
    labels = torch.randint(len(head), (positions,), device=lab.device)
    labels[torch.arange(positions, device=lab.device) % 8 != 0] = -100
    return torch.randn(positions, width, device=lab.device), labels


print(faster_than(4, at_every_position, at_answers, a_chat, times=2, tolerance=1e-3))


# %% [markdown]
# ## What you did
# - You quantised numbers to 8 and 4 bits by hand, and found what blocks, quantiles and double quantisation each buy.
# - You took QLoRA apart, and found out which of its changes costs time and which saves memory.
# - You predicted the largest batch that fits, from two points.
# - You measured what checkpointing costs, with checkpoints on the device and on the host.
# - You climbed from a library's loop to a recipe of your own, and compared it with a library's on the same rows.
# - You trained an adapter that changed how a model answers, and swapped it for another.
#
# ## Where this comes from, and what to read on
# - Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models* (2021,
#   [arXiv:2106.09685](https://arxiv.org/abs/2106.09685)).
# - Dettmers et al., *QLoRA: Efficient Finetuning of Quantized LLMs* (2023,
#   [arXiv:2305.14314](https://arxiv.org/abs/2305.14314)): NF4, double quantisation, paged optimizers.
# - Dettmers et al., *LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale* (2022,
#   [arXiv:2208.07339](https://arxiv.org/abs/2208.07339)): outliers, and what to do about them.
# - Yoshida, *NF4 Isn't Information Theoretically Optimal (and that's Good)* (2023,
#   [arXiv:2306.06965](https://arxiv.org/abs/2306.06965)): section 2's finding, with a proof.
# - The documentation of [bitsandbytes](https://huggingface.co/docs/bitsandbytes),
#   [PEFT](https://huggingface.co/docs/peft) and [unsloth](https://docs.unsloth.ai).
# - The course's [glossary](../docs/glossary.md).

# %%
whole = lab07_qlora.longer_by(runs["qlora long"], runs["lora long"])
bits_alone = lab07_qlora.longer_by(runs["lora long, 4 bits"], runs["lora long"])
lab.done(
    {
        "codes that one outlier turns into 0": 100 * spoiled["one constant"]["zeros_share"],
        "NF4's error is smaller by": 100
        * (1 - errors["NF4, blocks of 64"] / errors["INT4, blocks of 64"]),
        "FLOPs, wide first against thin first": flops["wide first"] / flops["thin first"],
        "QLoRA's step on long texts, longer by": whole,
        "step with 4-bit weights alone, longer by": bits_alone,
        "useful tokens a second, best BF16 rung against lora": targets.get("useful_speedup"),
        "exact titles after fine-tuning": 100 * after,
    }
)
