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
# Article A3 fine-tunes language models of 8 to 120 billion parameters in three ways: LoRA, QLoRA, which holds the frozen
# weights in 4 bits, and unsloth, a library that rewrites the training of such models. It explains what 4 bits are, and
# shows which method is fast and which is small.
#
# This lab works the 4 bits out by hand, number for number. Then it trains Qwen3 as the article does, and asks of each
# method what the article's figures leave open: which of the things that come *with* 4 bits costs the time, which saves
# the memory, and whether one can be had without the other. At its end a small model that you train yourself stops
# explaining and answers with a bare title.
#
# **After this lab you can**
# - quantise numbers by hand to 8 and to 4 bits, and say what blocks, NF4 and double quantisation each are for;
# - take a method apart into its side effects, and switch each one alone;
# - predict the largest batch that fits on a card from two measurements;
# - say what checkpoints cost, and when sending them to the host pays;
# - assemble a recipe of your own, and hold it against a library's on the same rows of text;
# - train an adapter, show what it changed, and swap it for another.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 141 GB | 10 minutes |
#
# (On a GPU of 80 GB *lora* runs out of memory on long texts at `full`. The lab says so and goes on, without what is
# held against it.)
#
# At `full` the architecture is Qwen3-8B's, at `small` Qwen3-0.6B's. With random weights time and memory are the real
# model's, losses are not: section 8 trains a model of its own to say anything about answers. On a CPU, bitsandbytes'
# 4-bit layers do run, in float32 and slowly. Memory is counted there tensor by tensor, and unsloth, which is written
# for GPUs, is left out.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated texts with the datasets' lengths; hub: the real datasets
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
method_steps: int = 0  # timed steps of each method; 0: 4 at tiny, 8 at larger scales
log_every: int = 0  # steps between two lines of the memory log (the article: 10); 0: 3 at tiny, 2 at larger scales

# %%
from labutils.course import NotHere, open_lab

lab = open_lab("07", globals())

# %%
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch

from labutils import hardware, methods, plots
from labutils.hardware import usable_cores
from labutils.lowbit import nf4
from labutils.recipe import distinct_on
from labutils.results import Run
from labutils.titles import Reader
from labutils.training.with_unsloth import train_with_unsloth

plots.use_style()
warnings.filterwarnings("ignore", module="torch")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")  # so that a first step is one
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
method_steps, log_every = method_steps or (4 if tiny else 8), log_every or (3 if tiny else 2)
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))
torch.manual_seed(0)
texts = {length: lab.workload(f"qwen3-lora-{length}") for length in ("short", "long")}
ladder, recipes = methods.ladder_for(lab.device)
# What section 7 runs compiled is compiled beside the arithmetic of the first three sections, where nothing is timed.
compiling = ThreadPoolExecutor().submit(methods.compile_rungs, texts["long"], list(recipes.values()))

# %% [markdown]
# ## 1 · Eight bits, and one number too many
#
# **Question.** *Absmax* quantisation multiplies numbers with a constant, so that the largest becomes 127, and rounds. The
# article's example is four numbers. What becomes of them, and what does one outlier do to the others?

# %%
example = torch.tensor([2.50, -0.70, 0.12, 0.48])
found = methods.absmax_example(example)
lab.keep(Run("07", "absmax", metrics=found))
lab.table(
    (f"times {found['constant']:.1f}, rounded", *(f"{x:.2f}" for x in example.tolist())),
    ("code", *(found[f"code_{i}"] for i in range(4))),
    ("restored", *(f"{found[f'restored_{i}']:.4f}" for i in range(4))),
)
lab.verdict("A3.int8.constant", "A3.int8.codes", "A3.int8.restored");
# %% [markdown]
# Now a weight matrix of a million normally distributed numbers, one of which is made a thousand times the standard
# deviation.
#
# **Your prediction:** which share of the other codes becomes 0, in percent?

# %%
my_zeros: float | None = None  # for example 50

lab.predict("codes that one outlier turns into 0", my_zeros, "%")

# %%
matrix = 0.02 * torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
spoiled = {name: methods.outlier_costs(matrix, block) for name, block in (("one constant", None), ("blocks", 64))}
lab.keep({f"outlier, {name}": Run("07", "", metrics=metrics) for name, metrics in spoiled.items()})
lab.table(
    ("INT8 with an outlier", "codes that are 0, %", "relative error of the others"),
    *((name, f"{100 * m['zeros_share']:.1f}", f"{m['others_error']:.2%}") for name, m in spoiled.items()),
)
lab.verdict("A3.int8.outlier", "A3.blocks.contain");
# %% [markdown]
# **Takeaway.** A constant is as good as the largest number that it must reach. Blocks don't remove an outlier, they give
# it fewer neighbours: 63 instead of a million.

# %% [markdown]
# ## 2 · Four bits
#
# **Question.** Four bits name 16 levels. Weights are about normally distributed: many small ones, few large. Where should
# the levels lie?
#
# NF4 puts them at *quantiles*: the normal distribution is cut into 16 pieces of about equal probability, and each gets a
# level. One level is an exact zero, so there are 8 above it and 7 below. The whole recipe is a few lines
# (`labutils.lowbit.nf4.nf4_levels`).
#
# **Your prediction:** by how many percent is NF4's error smaller than that of 15 evenly spaced levels, both in blocks of
# 64?

# %%
my_gain: float | None = None  # for example 30

lab.predict("NF4's error is smaller by", my_gain, "%")

# %%
levels = nf4.nf4_levels()
fig, ax = plt.subplots(figsize=(7.2, 2.8))
largest = (matrix.reshape(-1, 64) / matrix.reshape(-1, 64).abs().amax(1, keepdim=True)).flatten()
ax.hist(largest.numpy(), bins=120, density=True, color=plots.MIST, label="weights over their block's largest")
ax.vlines(levels, 0, 0.9, color=plots.NAVY, linewidth=2, linestyle="-", label="NF4")
ax.vlines(
    torch.arange(-7, 8) / 7, 0.95, 1.15, color=plots.RUST, linewidth=2, linestyle="-", label="INT4, evenly spaced"
)
ax.set(xlabel="value over the block's largest magnitude", ylabel="density", yticks=[])
ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
plt.show()

# %%
errors = nf4.rounding_errors(matrix)
codes = nf4.quantise_to(levels, matrix, 64).codes
share = nf4.entropy_bits(codes) / 4
lab.keep(Run("07", "rounding int4", metrics={"error": errors["INT4, blocks of 64"]}))
lab.keep(Run("07", "rounding nf4", metrics={"error": errors["NF4, blocks of 64"], "information_share": share}))
print(f"Relative error: INT4 {errors['INT4, blocks of 64']:.2%}, NF4 {errors['NF4, blocks of 64']:.2%}.")
print(f"An NF4 code carries {4 * share:.2f} of its 4 bits.")
lab.verdict("A3.nf4.better", "A3.nf4.optimal");
# %% [markdown]
# "Optimal" would mean that all 16 codes are equally frequent, so that no bit is wasted. They nearly are, not quite: the
# levels are quantiles of a normal distribution, but what they have to hold is a *block's* numbers divided by the largest
# among them, and in each block one number is ±1 by construction. And equally frequent codes are not the same as the
# smallest error: that would put more levels into the tails.
#
# ### The constants' price
#
# A constant of 32 bits for each 64 weights is half a bit a weight, an eighth of the codes. *Double quantisation* holds
# the constants in 8 bits, with a constant for each 256 of them.

# %%
lab.table(("bit for bit as bitsandbytes", "equal"), *methods.same_as_bitsandbytes(matrix).items())
held = methods.bits_held(torch.randn(4096, 1024).bfloat16())
lab.keep([Run("07", "constants", metrics=held), Run("07", "weights", metrics={"linear_share": held["linear_share"]})])
arithmetic = {"bits_float32": nf4.constant_bits(), "bits_doubled": nf4.doubled_constant_bits()}
rows = [(name, held[name], bits) for name, bits in arithmetic.items()]
lab.table(("bits a weight", "in the bytes that bitsandbytes holds", "by arithmetic"), *rows)
lab.verdict("A3.blocks.bits", "A3.double.bits", "A3.qlora.weights");
# %%
fig, ax = plt.subplots(figsize=(7.2, 3.4))
for (name, error), marker in zip(errors.items(), "os^Dv*PXd", strict=True):
    family = plots.RUST if name.startswith("INT") else plots.NAVY if name.startswith("NF") else plots.TEAL
    ax.plot(methods.BITS[name], error, marker=marker, color=family, linestyle="", label=f"{name}: {error:.1%}")
ax.set(yscale="log", xlabel="bits a weight, constants included", ylabel="relative error of the norm")
ax.yaxis.set_major_formatter("{x:g}")
ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
plt.show()

# %% [markdown]
# The picture says what each idea buys. Blocks: much, for half a bit. NF4 in place of INT4: a sixth of the error, for
# nothing. Double quantisation: 0.37 bits back, at an error that can't be told from NF4's. (These weights have no outlier;
# with one, the formats with a single constant fall apart.)
#
# ### What is multiplied
#
# Tensor cores know no NF4. A layer that holds its weight in NF4 must restore it before each product.

# %%
linear = torch.nn.Linear(1024, 1024, bias=False, device=lab.device, dtype=torch.bfloat16).requires_grad_(False)
layer = methods.multiplies_restored(linear, torch.randn(64, 1024, device=lab.device, dtype=torch.bfloat16))
lab.keep(Run("07", "nf4 layer", metrics=layer))
print(f"The layer's result is {layer['error_to_restored']:.2%} off the product with the restored weight,")
print(f"and {layer['error_to_16_bits']:.1%} off the product with the 16-bit weight.")
lab.verdict("A3.qlora.dequantised");
# %% [markdown]
# **Takeaway.** QLoRA saves storage, not arithmetic: the products are as large as before, and restoring comes on top.

# %% [markdown]
# ## 3 · Thin matrices
#
# **Question.** LoRA adds two thin matrices to each weight, $W' = W + BA$. How many numbers are trained, and does it
# matter in which order they are multiplied?
#
# **Your prediction:** how many times as many FLOPs does $x\,(BA)$ take as $(x A)\,B$, gradients included?

# %%
my_order: float | None = None  # for example 10

lab.predict("FLOPs, wide first against thin first", my_order, "x")

# %%
counts = methods.lora_counts()
lab.keep(Run("07", "lora-counts", workload="qwen3-lora-long", scale="full", metrics=counts))
print(
    f"Qwen3-8B, r = 8: {counts['trained']:,} of {counts['in_all']:,} numbers, {counts['adapter_share']:.2%} in bytes."
)
flops = {order: methods.chain_flops(order, tokens=4 * 861, rank=8) for order in ("thin first", "wide first")}
lab.keep({f"chain: {order}": Run("07", "", metrics={"flops": n}) for order, n in flops.items()})
ranks = [4**power for power in range(1, 7)]
ratios = [methods.chain_flops("wide first", 3444, r) / methods.chain_flops("thin first", 3444, r) for r in ranks]
lab.table(("rank r", *ranks), ("wide first, times the FLOPs of thin first", *(f"{ratio:.2f}" for ratio in ratios)))
lab.verdict("A3.lora.count", "A3.lora.small-file", "A3.unsloth.order");
# %% [markdown]
# PyTorch computes the products in the order in which they are written, and PEFT writes the thin one first: the order is
# no secret of unsloth's. The last columns show where it stops mattering: at ranks near the matrix' own width.
#
# **Takeaway.** Thin first, always, for ranks in use. What is left of LoRA's cost is then not arithmetic: it is many small
# kernels.

# %% [markdown]
# ## 4 · Three methods, two lengths of text
#
# **Question.** On which texts is which method fast, what does the first step cost, and what happens to the memory?
#
# | method | what it is |
# |---|---|
# | *lora* | PEFT's LoRA on 16-bit weights, batch 4, r = 8 on all seven projections, through accelerate |
# | *qlora* | the same as QLoRA is usually written: 4-bit weights, and what PEFT's `prepare_model_for_kbit_training` does |
# | *unsloth* | unsloth's QLoRA, in a process of its own: importing it rewrites the other libraries |
#
# All take the same batches, so that their steps are compared one by one: the longest batch has more than twice the
# tokens of the shortest. *unsloth long, packed* is for section 7: several texts in a row without a mask, as unsloth's own
# trainer makes its batches.
#
# *short* texts are instructions of 117 tokens on average, *long* ones articles of 861, padded to the longest in the batch.
#
# **Your prediction:** by how many percent is QLoRA's step on long texts longer than LoRA's?

# %%
my_qlora: float | None = None  # for example 20

lab.predict("QLoRA's step on long texts, longer by", my_qlora, "%")

# %%
wait([compiling])
logs = lab.results_dir / "memory"
runs: dict[str, Run] = {}


def follow(name: str, count: int, against: str = "") -> None:
    """Measure and keep a method, unless an interrupted start left it behind; a failure says why in the table."""
    measure = partial(methods.follow, texts, name, count, logs, log_every, runs.get(against))
    runs[name] = lab.measured(name, methods.of_name(name).recipe, measure)


for length in texts:
    follow(f"lora {length}", method_steps)
    follow(f"qlora {length}", method_steps, against=f"lora {length}")
follow("qlora short, batch 1", method_steps)

# %%
with lab.attempt("unsloth in a process of its own", reference="unsloth long"):
    for workload in texts.values():
        workload.let_go()
    jobs = methods.unsloth_jobs(texts, method_steps)
    asked = {name: job.recipe for name, job in jobs.items()}
    runs |= lab.measured_together(asked, lambda: train_with_unsloth(jobs, logs, log_every))
lab.table(methods.METHOD_HEAD, *methods.method_rows(runs))

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.2))
seconds = {f"{length} texts": methods.over_examples(logs, length, "elapsed_time_sec") for length in texts}
plots.panels(axes, seconds, "examples trained on", "s")
plt.show()

# %% [markdown]
# The curves are the article's: time over examples, read off a log that a callback writes every few steps. It is a CSV
# file in your results' folder `memory/`, with the article's columns. Its clock starts once the model is built: where a
# curve starts high, setting up and the first step took long.

# %%
columns = {"memory_allocated_gb": "allocated", "memory_reserved_gb": "reserved", "peak_memory_gb": "peak so far"}
with lab.attempt("Memory over time", reference="qlora long"):
    if not on_gpu:
        raise NotHere("there is no GPU, whose memory the log would hold")
    fig, axes = plt.subplots(1, 3, figsize=(7.4, 3.2))
    over = {title: methods.over_examples(logs, "long", column) for column, title in columns.items()}
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
    paid = methods.paid_after(runs["qlora long"], runs["unsloth long"])
    print("unsloth's slower start has paid after", "no number of steps" if paid is None else f"{paid:.0f} steps")

# %% [markdown]
# Look at three things. *Allocated* is what tensors hold between steps: the weights, mostly, and there QLoRA keeps its
# promise. *Peak* is what training needs for a moment, and it decides whether a card is large enough: it is made of
# activations and logits, which 4-bit weights don't shrink. *Reserved* is what PyTorch took from the driver: it grows
# with the longest batch so far and never comes down.
#
# **Takeaway.** "QLoRA is slower and smaller" is a sentence about a bundle. The next section unties it.

# %% [markdown]
# ## 5 · The bundle untied
#
# **Question.** QLoRA as usually written changes three things at once: weights in 4 bits; *checkpointing*, which keeps
# blocks' inputs only and computes the blocks again in the backward pass; and casts of embeddings, norms and head to
# float32. Which one costs the time? Which one saves the memory?
#
# Each is switched alone, starting from LoRA. Memory is taken apart as a line over the batch: what is there at any batch,
# and what each example adds, on texts padded to the full length.
#
# **Your prediction:** how many percent of QLoRA's extra time is due to the 4-bit weights?

# %%
my_share: float | None = None  # for example 50

lab.predict("4-bit weights' share of QLoRA's extra time", my_share, "%")

# %%
alone = ["lora long, checkpointed", "lora long, 4 bits", "lora long, offloaded"]
if on_gpu:  # on a CPU everything is float32 already
    alone += ["lora long, fp32 casts", "qlora long, no casts"]
for name in alone:
    follow(name, method_steps)
bundle = ["lora long", *alone, "qlora long"]
fig, ax = plt.subplots()
plots.steps(ax, {name: runs[name] for name in bundle if runs[name].ok})
plt.show()

# %%
room = hardware.cuda.free_memory()
memory: dict[str, Run] = {}
measured = ["lora long", "lora long, checkpointed", "lora long, checkpointed, fused loss", "lora long, 4 bits"]
for name in [*measured, "qlora long"]:
    with lab.attempt(f"memory of {name}"):
        tried = room if name in ("lora long", "qlora long") else None
        measure = partial(methods.memory_line, texts, name, (1, 4) if on_gpu else (1, 2), tried)
        memory[name] = lab.measured(f"memory of {name}", methods.of_name(name).recipe, measure)
lines = methods.lines_of(memory, runs)
rows = [("", "ms per 1,000 useful tokens", "against lora, step by step, %", "GB at any batch", "GB an example")]
for name in dict.fromkeys([*bundle, *lines]):
    run, line = runs.get(name, Run("07", name)), lines.get(name, (None, None))
    longer = methods.longer_by(run, runs["lora long"])
    rows.append((name, run.metric("ms_per_1k_useful_tokens"), None if longer is None else f"{longer:+.0f}", *line))
lab.table(*rows)

# %%
lab.verdict("A3.qlora.cause", "A3.checkpointing.memory", "A3.checkpointing.slower")
lab.verdict("A3.offload.time", "A3.offload.memory");
# %% [markdown]
# The picture's boxes are as wide as the batches' lengths differ; the table compares each step with the same batch's.
#
# Read the table by columns. *At any batch*: this is where 4-bit weights save. *qlora* has more there than *4 bits*: its
# embedding and head, the largest matrices of all, are cast to float32. *An example*: without checkpointing, that is
# what all blocks keep. With it, a block keeps its input alone, and what is left of an example is mostly its logits, a
# number for each of 152 thousand words at each token (1024 words at `tiny`). The line with the *fused loss*, which forms
# them chunk by chunk, says how much they are. So at a large batch checkpointing comes first, the loss second. The format
# of the weights moves the line up or down, and hardly tilts it.
#
# *Offloaded* sends even the blocks' inputs to the host, and fetches each while the block behind it computes, which is
# unsloth's trick. It saves what the checkpoints take, which grows with the model's depth, and shows only where logits
# take no more. (On a CPU the host is the device: nothing can be saved there.)
#
# **Takeaway.** Before you call a format slow or small, switch it alone.

# %% [markdown]
# ## 6 · The largest batch that fits
#
# **Question.** The article had to stop at batch 2 with one method and went to 32 with another. Can you say beforehand
# where a card is full?
#
# Two measurements make the line of the last section, and the line says where it meets a card's size. On a GPU the
# prediction for *this* card is tried, for LoRA and QLoRA: at nine tenths of it training must run, and at a tenth more
# it must fail.

# %%
cards = (24, 48, 80, 96, 141) if on_gpu else (0.024, 0.048, 0.096)
unit, scale_by = ("GB", 1) if on_gpu else ("MB, if there were such a card", 1000)
head = ("largest batch of texts of full length", *(f"{scale_by * card:g} {unit}" for card in cards))
lab.table(head, *((name, *(line.largest(card) for card in cards)) for name, line in lines.items()))
for name, run in memory.items():
    if "largest_batch" in run.metrics:
        outcome = "held" if run.metrics["fits"] and run.metrics["fails"] else "did not hold"
        print(f"{name}: the line says {run.metrics['largest_batch']} on this card ({room:.0f} GB free). It {outcome}.")

# %% [markdown]
# **Takeaway.** Memory is a straight line over the batch. Two points are enough to plan with, if they are taken on the
# longest texts: the batch that fails is the one with the longest.

# %% [markdown]
# ## 7 · A recipe of our own
#
# **Question.** How far can one GPU be pushed on the same texts, and does that need 4 bits, or unsloth?
#
# The ladder starts at *lora* of section 4, and each rung keeps the changes of those below it. Its means: no library
# around the loop, no mask, so that the fastest attention kernel is taken; the loss computed chunk by chunk, so that
# logits of 152 thousand words are never all there; one block's compiled code for all blocks; rows *packed* with several
# texts that don't see each other, so that nothing is padding. On top come frozen weights in FP8, and in 4 bits restored
# inside the compiled block.
#
# Tokens a second are timed, all rungs on the same few batches where they have the same rows, and multiplied with the
# share of a whole epoch's tokens that aren't padding, which is known exactly: of a few batches it varies by a tenth.
#
# **Your prediction:** how many times as many useful tokens a second as *lora* will the best BF16 rung reach?

# %%
my_best: float | None = None  # for example 2

lab.predict("useful tokens a second, best BF16 rung against lora", my_best, "x")

# %%
climbable = distinct_on(lab.device, recipes)
lanes = {rung.name: rung.lane for rung in ladder}
how = {"steps": 2, "rounds": 1, "warmup": 0} if tiny else {"steps": 6, "rounds": 2, "warmup": 2}
climbed = lab.measured_together(climbable, lambda: methods.climbed_on(texts["long"], ladder, climbable, **how))
fig, ax = plt.subplots()
groups = {name: "other weights" if recipes[name].base_linear != "published" else lanes[name] for name in climbed}
shown = [replace(run, lane=groups[name]) for name, run in climbed.items() if run.ok]
plots.waterfall(ax, shown, None, log=False, metric="ms_per_1k_useful_tokens")
plt.show()

# %%
changes = {rung.name: ", ".join(f"`{knob}={value!r}`" for knob, value in rung.changes.items()) for rung in ladder}
head = ("rung", "lane", "changes", "useful tokens/s", "peak, GB", "first step, s", "floor, ms", "floor / step, %")
rows = []
for name, run in climbed.items():
    numbers = [run.metric(metric) for metric in ("useful_tokens_per_s", "peak_allocated_gb", "first_step_s")]
    rows.append((name if run.ok else f"{name}: {run.status}", groups[name], changes[name] or None, *numbers))
    rows[-1] += methods.floor_columns(run)
lab.table(head, *rows)
targets = methods.reached(climbed, runs)
lab.keep(Run("07", "targets", lane="same mathematics", workload="qwen3-lora-long", scale=lab.scale, metrics=targets))
lab.table(("", "we aimed at", "here", "H200"), *methods.goal_rows(targets, lab.reference("targets")))

# %% [markdown]
# (On a CPU nothing is compiled, nothing waits for a GPU, packed rows compute what they mask, and low-bit formats are
# emulated: there the picture shows how it is put together, and its times say nothing about a GPU.)
#
# Mind the lanes. *Same work* computes the same gradients of the same batches. *Same mathematics* packs rows, so that a
# batch has other examples in it. Rungs with *other weights* are a group of their own: they change the function that is
# trained, as QLoRA does. In 4 bits weights are rounded once; the FP8 rung rounds every activation and every output
# gradient as well, in each product. Look at losses of real weights before you take one.
#
# A floor is what the arithmetic takes at this machine's measured rate of the products' format, or reading the weights
# in theirs, whichever is longer. On a GPU the first steps of compiled rungs are those of code compiled beforehand.
#
# The last table has two numbers for unsloth. On rows packed as ours, in our loop, what is compared is the two ways to
# compute a model. On its padded batches, packing is counted as well, which unsloth can do itself.
#
# **Takeaway.** Each means can be had and measured by itself: the differences between neighbouring rungs are what it
# brings on top of those below. Which of them make unsloth fast is not answered here: none of its parts was switched off.

# %% [markdown]
# ## 8 · A bare title
#
# **Question.** After 2500 articles with their titles, the article's model answers with a bare title where it explained
# before. What has fine-tuning changed?
#
# Random weights have no habits. So you train a small model from scratch first, all its weights, until it introduces what
# an article is about: 「…についての紹介。」, "an introduction to the … of …". Then its weights are frozen, and LoRA is
# trained on the same kind of articles with bare titles. It is asked about places and things in combinations that it
# never saw in training.
#
# **Your prediction:** in how many percent of the questions is the answer the exact title, after fine-tuning?

# %%
my_titles: float | None = None  # for example 90

lab.predict("exact titles after fine-tuning", my_titles, "%")

# %%
reader = Reader(lab.device)
curves = {"explain, all weights": reader.learn_to_explain(200)}
before = {"explains": reader.matches(None, "explain"), "title": reader.matches(None, "title")}
curves["title, adapter"] = reader.fine_tune("title", 100)
after = reader.matches("title", "title")
style = {"exact_before": before["title"], "explained_before": before["explains"], "exact_after": after}
style["answers_with_title"] = int(after > 0.5 > before["title"] and before["explains"] > 0.5)
lab.keep(Run("07", "style", metrics=style))
lab.table(
    ("answers to the letter, %", "introduces", "bare title"),
    ("before", 100 * before["explains"], 100 * before["title"]),
    ("after", 100 * reader.matches("title", "explain"), 100 * after),
)
lab.verdict("A3.120b.style");
# %%
fig, ax = plt.subplots(figsize=(7.2, 2.8))
for (name, losses), line in zip(curves.items(), ("-", "--"), strict=True):
    ax.plot(range(1, len(losses) + 1), losses, linestyle=line, label=name)
ax.set(yscale="log", xlabel="optimizer step", ylabel="loss, logarithmic")
ax.legend()
plt.show()

# %% [markdown]
# And a second adapter, trained to answer with the place alone. Both are a few kilobytes beside one frozen model: swapping
# a task is swapping an adapter.

# %%
reader.fine_tune("place", 40)
answers = {name: reader.answers(name) for name in (None, "title", "place")}
rows = [("article", "no adapter", "adapter *title*", "adapter *place*")]
for index in range(4):
    rows.append((reader.questions[index].body, *(given[index] for given in answers.values())))
lab.table(*rows)

# %% [markdown]
# How an article is read is in the frozen weights, how it is answered in the adapter. Not to the letter: compare the
# columns, and you will find an article or two that one of them reads otherwise than another.
#
# **Takeaway.** A style is cheap: a hundred steps, and an adapter on weights that stay as they are. Ask about what wasn't
# in the training, and count exact answers before and after: a fallen loss alone shows no change of style.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
from labutils.exercises import faster_than, solved

# %% [markdown]
# **1.** Quantise −1.3 by hand in absmax INT8, in a block whose largest magnitude is 5.2. Which code does it get?

# %% tags=["exercise"]
my_code = None  # a whole number


def check_code(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_code first."
    if answer == -32:
        return "Exercise 1: right: 127 / 5.2 = 24.42, times -1.3 is -31.75."
    return "Exercise 1: not yet. The constant is 127 over the largest magnitude; then round."


print(check_code(my_code))

# %% tags=["solution"]
my_code = round(-1.3 * 127 / 5.2)
solved(check_code(my_code))

# %% [markdown]
# **2.** Somebody holds NF4 constants of blocks of 32 in 8 bits, with a float32 constant for each 128 of them. How many
# bits a weight do the constants take?

# %% tags=["exercise"]
my_bits = None  # your sum, for example 8 / 64 + 32 / (64 * 256)


def check_bits(answer) -> str:
    if answer is None:
        return "Exercise 2: set my_bits first."
    if abs(answer - nf4.doubled_constant_bits(32, 128)) < 1e-6:
        return "Exercise 2: right: half blocks cost twice the constants."
    return "Exercise 2: not yet. 8 bits are shared by a block, 32 by all the blocks of a group."


print(check_bits(my_bits))

# %% tags=["solution"]
my_bits = 8 / 32 + 32 / (32 * 128)
solved(check_bits(my_bits))

# %% [markdown]
# **3.** A method takes 30 GB at batch 2 and 45 GB at batch 5, on texts of full length. Which batch is the largest on a card
# of 80 GB, of which 2 GB are not PyTorch's?

# %% tags=["exercise"]
my_batch = None  # a whole number


def check_batch(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_batch first."
    if answer == methods.line_through({2: 30, 5: 45}).largest(78):
        return "Exercise 3: right: 20 GB at any batch, 5 GB an example, 58 GB of room for examples."
    return "Exercise 3: not yet. What does one example add, and what is there without any?"


print(check_batch(my_batch))

# %% tags=["solution"]
my_batch = int((80 - 2 - 20) // 5)
solved(check_batch(my_batch))

# %% [markdown]
# **4. Make it faster.** In a chat only the answers are learned: one position in eight has a label, the others say
# `-100`. The plain loss forms a logit for each of 8,192 words at every position all the same. Get the same loss and the
# same gradient twice as fast.

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


# %% tags=["solution"]
def at_answers_solution(hidden, labels):
    hidden, asked = hidden.requires_grad_(), labels != -100
    loss = torch.nn.functional.cross_entropy(hidden[asked] @ head.T, labels[asked])
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, hidden)[0]}


solved(faster_than(4, at_every_position, at_answers_solution, a_chat, times=2, tolerance=1e-3))

# %% [markdown]
# ## What you did
# - You quantised numbers to 8 and 4 bits by hand, and found what blocks, quantiles and double quantisation each buy.
# - You took QLoRA apart, and found out which of its side effects costs time and which saves memory.
# - You predicted the largest batch that fits, from two points.
# - You measured what checkpoints cost, on the GPU and on the host.
# - You climbed from a library's loop to a recipe of your own, and held it against a library's on the same rows.
# - You trained an adapter that changed how a model answers, and swapped it for another.

# %%
whole = methods.longer_by(runs["qlora long"], runs["lora long"])
bits_alone = methods.longer_by(runs["lora long, 4 bits"], runs["lora long"])
lab.done(
    {
        "codes that one outlier turns into 0": 100 * spoiled["one constant"]["zeros_share"],
        "NF4's error is smaller by": 100 * (1 - errors["NF4, blocks of 64"] / errors["INT4, blocks of 64"]),
        "FLOPs, wide first against thin first": flops["wide first"] / flops["thin first"],
        "QLoRA's step on long texts, longer by": whole,
        "4-bit weights' share of QLoRA's extra time": 100 * bits_alone / whole if whole and bits_alone else None,
        "useful tokens a second, best BF16 rung against lora": targets.get("useful_speedup", {}).get("median"),
        "exact titles after fine-tuning": 100 * after,
    }
)
