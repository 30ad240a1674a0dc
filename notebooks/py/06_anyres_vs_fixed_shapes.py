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
# # Lab 06 · AnyRes or fixed shapes
#
# Article A2 trains LLaVA-NeXT, a model that reads images and text, and tries what is known to help language models:
# FP8, `torch.compile`, QLoRA. Each gains less than hoped. Then it forces all images to one size, and the step takes
# half the time. It blames *AnyRes*, the way in which this model cuts images into tiles: images of different shapes give
# different numbers of tokens, so that the compiler has to start over.
#
# But forcing images to 336 × 336 does two things at once: shapes stop varying, *and* there are far fewer tokens. This
# lab measures the article's table, then takes the two apart, asks whether its loss values can be told from chance, and
# finally goes for both: images of any shape, and nothing compiled twice. It ends with the article's decision chart,
# computed from what was measured.
#
# **After this lab you can**
# - say how many tokens an image costs, and what AnyRes does with small ones;
# - read a table of methods by first step, later steps and memory, and say when a method has paid;
# - separate two changes that came together, by an experiment that makes one of them alone;
# - count recompilations, read their reasons, and get rid of them without fixing the images' shapes;
# - tell a difference of two losses from the spread of seeds;
# - choose a method for a card, a number of steps and a tolerance, and defend it.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU with a C++ compiler | 2 minutes |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 141 GB | about 14 minutes; started again, it keeps what it has measured |
#
# It is the longest lab: take it in two sittings. Sections 1 to 4 test what the article did, sections 5 to 7 go past it.
#
# At `full` the architecture is llava-v1.6-mistral-7b's. With random weights time and memory are the real model's;
# losses are not, and section 5 trains a small model to say anything about them. On a CPU there is no GPU memory to
# compare, FP8 is emulated, and 4-bit weights have no fast kernels: there you see how each question is put and answered,
# while times between formats say nothing about a GPU. The claims' tables show the H200's numbers where they are on
# record.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
batches: str = ""  # batch sizes of the table beside 1, as "2 4 8 16 24", the article's; empty: 4 at tiny, else 4 24
compile_batches: str = ""  # batch sizes of the compiled methods; empty: none at tiny, 1 at larger scales
whole_model: bool = False  # on a GPU also compile the model whole, as the article did: twice 1-2 minutes
steps: int = 0  # timed steps of a cell; 0: 2 at tiny, else 8 at batch 1, 3 up to 4 and 1 above, where one takes seconds
seeds: int = 0  # seeds of section 5; 0: 2 at tiny, 3 at larger scales

# %%
from labutils.course import open_lab

lab = open_lab("06", globals())

# %%
import os
import tempfile
import warnings
from functools import partial

import matplotlib.pyplot as plt
import torch

from labutils import advisor, plots, trials
from labutils.hardware import measured_roofline, usable_cores
from labutils.lowbit.frozen import FrozenFP8Linear
from labutils.parameters import whole_numbers
from labutils.recipe import A2_BASE, distinct_on
from labutils.results import REFERENCE, Run, read_runs
from labutils.training import train
from labutils.workloads import open_workload

plots.use_style()
warnings.filterwarnings("ignore", module="torch")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")  # so that a first step is one
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))

# %%
sizes = sorted({1, *(whole_numbers("batches", batches) or ([4] if tiny else [4, 24]))})
compiled_sizes = whole_numbers("compile_batches", compile_batches) or ([] if tiny else [1])
uniform, varied = lab.workload("llava-lora"), lab.workload("llava-lora-varied")
cells: dict[str, Run] = {}

# %% [markdown]
# ## 1 · What an image costs
#
# **Question.** LLaVA-NeXT's vision tower reads *tiles* of 336 × 336 pixels and makes 24 × 24 tokens of each. AnyRes
# shows it the whole image shrunk to one tile, and the image once more, larger, cut into a grid of tiles that suits its
# shape. How many tokens does a leaf of 500 × 500 pixels become? And one of 336 × 336, the article's fixed size, for
# which it says that AnyRes is bypassed?
#
# **Your prediction:** image tokens of a photograph of 500 × 500.

# %%
my_tokens: float | None = None  # for example 576

lab.predict("tokens of a 500 x 500 image", my_tokens, "tokens")

# %%
counts = trials.token_counts()
lab.keep(Run("06", "token-counts", workload="llava-lora", scale="full", metrics=counts))
lab.table(
    ("image, width × height", "tiles", "image tokens"),
    ("224 × 224", counts["tiles_low_resolution"], None),
    ("336 × 336", counts["tiles_336x336"], counts["tokens_336x336"]),
    ("500 × 500", counts["tiles_500x500"], counts["tokens_500x500"]),
    ("707 × 354, the same area", counts["tiles_354x707"], counts["tokens_354x707"]),
)
lab.verdict("A2.anyres.tokens", "A2.anyres.one-tile", "A2.fixed.no-anyres");

# %% [markdown]
# The smallest grid that the model knows is 1 × 2. So no image is ever one tile: one of 336 × 336 is shown whole, and
# once more in the middle of a canvas of two tiles, half of it padding. All three tiles go through the vision tower; the
# tokens of the padding are left out afterwards. So shape matters less to the vision tower than to the language model:
# 707 × 354 makes as many tiles as a square of the same area, and three fifths of its tokens.
#
# **Takeaway.** The article's fixed shape doesn't switch AnyRes off. It makes every image the cheapest one that AnyRes
# knows: 1,176 tokens instead of 2,928.

# %% [markdown]
# ## 2 · The article's table, without the compiler
#
# **Question.** Which of FP8 and QLoRA saves time, which saves memory, and how does that change with the batch size?
#
# Each row is a model of its own: the first step, then a few timed ones. *Has paid after* says how many steps make up
# for a slower start, if any do. *Useful* tokens are those that are no padding. Blocks are computed again in the
# backward pass (*checkpointing*) in every row. The article doesn't say so, but 7 billion weights in BF16 take 15 of its
# 16 GB at batch 1, and what is left is about what checkpoints take.
#
# | method | base weights |
# |---|---|
# | *bf16* | as they come |
# | *fp8-te* | the article's FP8 layers, of Transformer Engine |
# | *fp8-frozen* | lab 05's FP8 layer, which holds its weight once |
# | *nf4* | NF4: 4 bits a weight, unpacked to BF16 before each product |
# | *qlora* | the same, with what PEFT's `prepare_model_for_kbit_training` does besides |
#
# **Your prediction:** by how many percent is QLoRA's step longer than that of BF16 at batch 1?

# %%
my_qlora: float | None = None  # for example 20

lab.predict("QLoRA's step at batch 1, longer by", my_qlora, "%")


# %%
def measure_cells(methods: dict[str, list[int]]) -> None:
    """Measure and keep cells, except those that an interrupted start left behind; what fails says why in the table."""
    for name, batches_of_it in methods.items():
        for batch in batches_of_it:
            count = steps or (2 if tiny else 8 if batch == 1 else 3 if batch <= 4 else 1)
            measure = partial(trials.cell, uniform, name, batch, count)
            cells[f"{name} b{batch}"] = lab.measured(f"{name} b{batch}", trials.method(name, batch), measure)


pair = sorted({1, max(size for size in sizes if size <= 4)})
fp8_te = pair if on_gpu else [1]
measure_cells({"bf16": sizes, "fp8-te": fp8_te, "fp8-frozen": [1], "qlora": sorted({*pair, sizes[-1]}), "nf4": [1]})
lab.table(trials.HEAD, *trials.cell_rows(cells))
lab.show(trials.not_measured(cells) or "Every row could be measured.")

# %%
fig, ax = plt.subplots(figsize=(7.2, 3.6))
metric, label = ("peak_allocated_gb", "memory at the peak, GB") if on_gpu else ("step_ms", "ms a step")
plots.curves(ax, trials.by_batch(cells, metric, ("bf16", "fp8-te", "fp8-frozen", "qlora", "nf4")), "batch size", label)
ax.set_title("Memory at the peak" if on_gpu else "Times (a CPU has no GPU memory to compare)", pad=42)
plt.show()

# %%
lab.verdict("A2.fp8.speed", "A2.fp8.batch", "A2.fp8.first-step", "A2.fp8.memory", "A2.fp8.held-twice")
lab.verdict(
    "A2.qlora.speed",
    "A2.qlora.cause",
    "A2.qlora.first-step",
    "A2.qlora.memory-small",
    "A2.qlora.memory-large",
    "A2.qlora.memory-growth",
);

# %% [markdown]
# What to look for. A part of the memory grows with the batch, checkpoints and the tensors of one block at a time, and
# should do so alike for all methods. The weights, where QLoRA and FP8 save, don't grow at all. So every saving of
# weights fades in percent. A method that *loses* at large batches must hold larger activations. PEFT's preparation
# could do that: it turns embeddings and norms into float32, and with them everything that flows between the blocks.
# Whether it does shows in *qlora* against *nf4*.
#
# ### Does the vision tower hold FP8 back?
#
# The article can't convert the vision tower: an image has 577 rows there, an odd number, and Transformer Engine wants
# multiples of 8. It names the tower as the limit of its gain. Two checks: does the layer still refuse, and how much of
# the step's arithmetic is the tower's?

# %%
rows_577 = torch.randn(5, 577, 1024, device=lab.device, dtype=torch.bfloat16)
linear = torch.nn.Linear(1024, 1024, device=lab.device, dtype=torch.bfloat16).requires_grad_(False)
print("The course's frozen FP8 layer takes them:", tuple(FrozenFP8Linear.from_linear(linear)(rows_577).shape))
print(f"The tower's share of the arithmetic of the article's step: {counts['vision_share']:.1%}")
with lab.attempt("577 rows through te.Linear", reference="fp8-te vision"):
    message = trials.refusal_of_te(rows_577)
    lab.keep(Run("06", "fp8-te vision", metrics={"failed": int(bool(message)), "message": message}))
    print("te.Linear:", message or "takes them, too")
lab.verdict("A2.lmm.vision-cost", "A2.fp8.vision-refuses", "A2.fp8.vision-limits");

# %% [markdown]
# **Takeaway.** A limit that is named needs a number. The tower has a fiftieth of the step's arithmetic: whatever holds
# FP8 back is in the other forty-nine. Lab 05 looks for it there: reading, casting and transposing around each product,
# and a host that launches all of it.

# %% [markdown]
# ## 3 · With the compiler
#
# **Question.** `torch.compile` of the whole model: what does it gain, what does its first step cost, when has it paid?
#
# *compile* and *fixed* compile the model's *blocks*, the layers that a transformer repeats: the decoder's 32 are alike
# and share their code, so there is one to compile instead of 32. With `-p whole_model true`, on a GPU, *compile-whole*
# and *fixed-whole* take the model as one, as the article did: see what that does to the first step, and whether it buys
# the later ones anything. First steps and break-even counts are judged on these, everything else on like with like. (With
# Transformer Engine the model can't be taken whole: its checkpointing is closed to the compiler, which would pass by all
# blocks and compile what is around them.)
#
# At `tiny` the model has few blocks, and a C++ compiler would do the GPU compiler's work, for half a minute: lab 04 has
# shown that. Here it is left out unless you ask for it with `-p compile_batches 1`.
#
# **Your prediction:** after how many steps has compiling paid at batch 1?

# %%
my_even: float | None = None  # for example 500

lab.predict("break-even of torch.compile at batch 1", my_even, "steps")

# %%
methods = {"compile": compiled_sizes}
if on_gpu and compiled_sizes:
    others = ("compile-qlora", "fixed-qlora", "compile-fp8-te", "fixed-fp8-te")
    methods |= dict.fromkeys(("fixed", "fixed-fp8-frozen"), [*compiled_sizes, 4]) | dict.fromkeys(others, [1])
if on_gpu and whole_model:
    methods |= dict.fromkeys(("compile-whole", "fixed-whole"), [1])
measure_cells(methods)
compared = {name: run for name, run in cells.items() if name.startswith(("bf16", "compile", "fixed"))}
lab.table(trials.HEAD, *trials.cell_rows(compared))
lab.show(trials.not_measured(compared) or "Every row could be measured.")

# %% [markdown]
# The compiler first reads the Python code and turns it into *graphs* of tensor operations. What it can't read breaks a
# graph in two (a *graph break*), and Python runs in between. Each graph comes with *guards*, the conditions under which
# it holds, such as a tensor's size. Where a guard fails the code is read and compiled again: a *recompilation*.

# %%
head = ("", "compiling in all, s", "graphs", "graph breaks", "recompilations", "given up")
lab.table(head, *trials.compiler_rows(cells))
lab.verdict(
    "A2.compile.speed",
    "A2.compile.memory",
    "A2.compile.first-step",
    "A2.compile.break-even",
    "A2.fixed.speed",
    "A2.fixed.memory",
    "A2.fixed.memory-batch",
    "A2.fixed.first-step",
    "A2.fixed.break-even",
);

# %% [markdown]
# And with FP8 or 4-bit layers inside? The article found both to be black boxes to the compiler. Whether the course's
# own FP8 layer does better is the last claim.

# %%
lab.verdict(
    "A2.te.breaks-graph",
    "A2.compile.fp8-speed",
    "A2.compile.fp8-gains-less",
    "A2.compile.fp8-first-step",
    "A2.compile.fp8-compiles-faster",
    "A2.fixed.fp8-speed",
    "A2.fixed.fp8-memory",
    "A2.fixed.fp8-first-step",
    "A2.fixed.fp8-break-even",
    "A2.qlora.breaks-graph",
    "A2.qlora.no-compile",
    "A2.qlora.no-fixed",
    "A2.left.fp8-in-graph",
);

# %% [markdown]
# The article counts the first step alone. Where *compiling, in all* is much more than that, a second text length came up
# in a later step and had the compiler write its code again, for any length: a break-even count should include it.
# (Timed steps don't: a round in which something was compiled is taken again.)
#
# **Takeaway.** A break-even count divides seconds on the host by milliseconds on the GPU: it belongs to a machine and
# to a way of compiling. From a few timed steps it is rough, too: run the lab twice and compare. Before you accept a
# long first step, ask whether compiling one block would do.

# %% [markdown]
# ## 4 · Two changes that came together
#
# **Question.** The fixed shape halved the article's step. Was it that shapes no longer vary, or that there are fewer
# tokens?
#
# ### (a) As many tokens, one shape; (b) fewer tokens
#
# Take some examples of varied images and train on the same ones over and over. *varying*: one after the other, lengths
# as they come, compiled as PyTorch does by default. *any length*: the same, with code for any length from the start.
# *static*: the one of median length, as many times, so about as many tokens in one shape. *fewer*: the shortest one.
#
# If constant shapes are what helps, a thousand tokens must cost less in *static* than in *varying*. If fewer tokens are,
# a thousand cost much the same, and the step is shorter where there are fewer.
#
# On a GPU all are compiled, block by block. On a CPU they are not, so what the compiler makes of constant shapes does
# not show there.

# %%
alone = A2_BASE.but(layers="rewritten", compile="default" if on_gpu else "off", compile_scope="blocks")
uniform.let_go()  # its weights are not needed any more, and would count as memory of what follows
replayed = lab.measured_together(trials.replay_recipes(alone), partial(trials.replays, varied, alone, 5))
rows = [("", "tokens a step", "ms a step", "ms for 1000 tokens")]
for name, run in replayed.items():
    tokens, cost = run.metrics["tokens"], run.metric("ms_per_1k_tokens")
    rows.append((name, tokens, cost * tokens / 1e3, cost))
lab.table(*rows)
lab.verdict("A2.fixed.cause", "A2.fixed.memory-cause");

# %% [markdown]
# ### (c) How often does the compiler start over?
#
# Two sets of images: the article's, all of 500 × 500 (*uniform*), and one of varied sizes (*varied*). And three ways to
# compile: the model as published, whole; its *blocks*, with the places of image tokens worked out beforehand on the
# CPU; and the same with code for *any length* from the start. It is the compiler's front end that is counted, on the
# model's smallest size, so this takes seconds on any machine and holds for all of them.
#
# **Your prediction:** recompilations in the first steps on the article's own images, published model.

# %%
my_recompilations: float | None = None  # for example 8

lab.predict("recompilations on 500 x 500 images", my_recompilations, "recompilations")

# %%
small_uniform, small_varied = (
    open_workload(name, "tiny", device=lab.device) for name in ("llava-lora", "llava-lora-varied")
)
blocks = A2_BASE.but(layers="rewritten", compile_scope="blocks")
count = 4 if tiny else 8
counted = {
    "uniform": trials.recompilations(small_uniform, A2_BASE, count),
    "varied": trials.recompilations(small_varied, A2_BASE, count),
    "varied, blocks": trials.recompilations(small_varied, blocks, count),
    "varied, blocks, any length": trials.recompilations(small_varied, blocks, count, dynamic=True),
}
for name, found in counted.items():
    run = Run("06", f"recompiles {name}", metrics=found.metrics(), samples={"recompilations": found.by_step})
    run.workload, run.scale = "llava-lora, counted", "tiny"
    lab.keep(run)

# %%
fig, ax = plt.subplots(figsize=(7.2, 3.2))
plots.counts(ax, {name: found.by_step for name, found in counted.items()}, "step", "recompilations")
ax.set_title("Code compiled anew, step by step", pad=42)
plt.show()
lab.table(("guards that failed", "for example", *counted), *trials.reason_rows(counted))
given_up = dict.fromkeys(f"`{name}`" for found in counted.values() for name in found.given_up)
print("Left uncompiled, after too many versions:", ", ".join(given_up) or "nothing within these steps")
lab.verdict("A2.anyres.recompiles", "A2.anyres.cause");

# %% [markdown]
# On the article's own images each has as many image tokens as the next (2,928 at `full`). All that varies is the
# answer's text, by a token or two. After the second length the compiler writes code for any, and that is the end of it.
# So whatever kept compilation from gaining more in the article, it was not AnyRes on these images.
#
# On varied images the published model does start over and over: it counts and compares image tokens on the device, in
# pieces that each want the exact size. It goes on until a function has 8 versions, PyTorch's limit, and is left
# uncompiled. With the places worked out beforehand that stops after two lengths. (What recompiles even then is no
# matter of lengths: the first block's input has no gradient and the others' has, and the vision tower's blocks see 3
# tiles or 5.)
#
# ### (d) What does padding cost?
#
# The same varied images in five forms. *Fixed* is the article's: every image shrunk to 336 × 336, every text padded.
# The others keep AnyRes: rows padded to one length, to the next of a few lengths (*buckets*), or filled with several
# examples that don't see each other (*packed*).

# %%
plain = A2_BASE.but(layers="rewritten")
forms = {
    "as they come": plain,
    "fixed, to 2048": plain.but(shapes="fixed"),
    "padded, to 3072": plain.but(shapes="padded", token_budget=3072),
    "buckets": plain.but(shapes="buckets", token_budget=3072),
    "packed, to 8192": plain.but(shapes="packed", token_budget=8192),
}
rows = [("form", "tokens/s", "useful tokens/s", "padding, %")]
for name, recipe in forms.items():
    run = lab.measured(f"form: {name}", recipe, partial(train, varied, recipe, steps or 3, warmup=1))
    padding = 100 * (1 - run.metrics["useful_tokens"]) if run.ok else None
    rows.append((name, run.metric("tokens_per_s"), run.metric("useful_tokens_per_s"), padding))
lab.table(*rows)

# %% [markdown]
# (Budgets are those of `full`; smaller scales have smaller tiles. On a CPU a packed row is dear: attention computes all
# pairs of its tokens and then masks those of different examples, where a GPU's kernel skips them.)
#
# **Takeaway.** Two changes that came together need a third run that makes only one of them. And count *useful* tokens a
# second: where two in five tokens of a fixed row are padding, the step is shorter because the images are smaller, and
# each costs more than it has to.

# %% [markdown]
# ## 5 · Is it the loss, or the seed?
#
# **Question.** The article compares losses after ten steps of one run each: FP8 +14 %, fixed shapes +2 %, both +16 %,
# QLoRA −2 %, which it explains by regularisation. How far apart are two runs of the *same* recipe?
#
# Here a small model is really trained, on several seeds: a seed sets the weights, the adapters and the order of the
# data, and is the same for all methods. At `tiny` these are 4 steps, in which the loss only begins to fall: enough to
# see how to ask, not to answer for a real model. *fp8-mixed* keeps the attention's output and the MLP's last product in
# full precision, as the article proposes.
#
# **Your prediction:** the spread of the final loss over seeds (largest less smallest), in percent of it, for BF16.

# %%
my_spread: float | None = None  # for example 1

lab.predict("spread of the loss over seeds", my_spread, "%")

# %%
small = open_workload("llava-lora", "small" if on_gpu else "tiny", device=lab.device)
start = A2_BASE.but(layers="rewritten", micro_batch=2, learning_rate=2e-3, num_workers=2 if on_gpu else 0)
fixed = start.but(shapes="fixed")
recipes = {"bf16": start, "qlora": start.but(base_linear="nf4"), "fixed": fixed, "fp8-mixed": start}
recipes |= {kind: start.but(base_linear=kind) for kind in ("fp8-frozen", "fp8-te")}
recipes |= {"fixed-fp8-te": fixed.but(base_linear="fp8-te")}
changes = {"qlora": trials.prepared_for_kbit, "fp8-mixed": trials.fp8_but("o_proj", "down_proj")}
tried = seeds or (2 if tiny else 3)
kept = lab.measured_together(
    {f"loss {name}": recipe.but(seed=tried - 1) for name, recipe in recipes.items()},
    lambda: trials.losses_over_seeds(small, recipes, tried, 4 if tiny else 20, changes),
    scale=small.scale,
)
losses = {name.removeprefix("loss "): run for name, run in kept.items()}
curve = losses["bf16"].metrics["loss"]
print(f"BF16, last seed: the loss goes from {curve[0]:.2f} to {curve[-1]:.2f} in {len(curve)} steps.")

# %%
band = trials.seed_band(losses["bf16"])
against = {name: changes for name, changes in trials.against_same_seed(losses).items() if name != "bf16"}
fig, ax = plt.subplots()
plots.differences(
    ax, against, band, "how far BF16's own seeds lie from their median", "final loss against BF16's of the same seed, %"
)
plt.show()
lab.verdict("A2.fp8.loss", "A2.fp8.mixed", "A2.fixed.loss", "A2.fixed.fp8-loss", "A2.qlora.loss");

# %% [markdown]
# A dot is one seed. Dots that lie together, off the line, are a difference that a method makes on every seed. Dots on
# both sides of the line are chance, however far from it they are. The band is what a comparison of *different* seeds
# would have to beat. (It is narrow here, as all seeds start from blind guessing; a trained model has its own band.)
#
# **Takeaway.** One run against one other can't tell an effect from a seed. Compare on the *same* seeds, where most of
# the chance cancels, and show the spread. This model is small and its base random: whether FP8 harms a real one is a
# question for its own seeds and its own evaluation.

# %% [markdown]
# ## 6 · Any shape, and fast
#
# **Question.** The article ends with three wishes: kernels that take any length, so that AnyRes keeps its resolution
# at the speed of fixed shapes; FP8 weights that are held once; and FP8 layers inside the compiled graph. What can be
# had today?
#
# The ladder starts at the plain loop on the *varied* images, without checkpointing, and every rung keeps the changes of
# those below it. Lanes are lab 04's: *same work* drives the same computation better, *same mathematics* computes less
# for the same distribution of gradients. As batches differ, the measure is the time for a thousand useful tokens.
#
# **Your prediction:** how many times as many useful tokens a second does the top rung train on?

# %%
my_gain: float | None = None  # for example 2

lab.predict("useful tokens a second, against the plain loop", my_gain, "x")

# %%
ladder, recipes = trials.ladder_for(lab.device)
climbable = distinct_on(lab.device, recipes)
lab.table(("rung", "lane", "changes", "why", "here"), *trials.rung_rows(ladder, climbable))

# %%
torch._dynamo.reset()
climbed = lab.measured_together(climbable, partial(trials.climbed, varied, ladder, climbable, 4 if tiny else 8))
measured = [run for run in climbed.values() if run.ok]
fig, ax = plt.subplots()
plots.waterfall(ax, measured, None, log=False, metric="ms_per_1k_useful_tokens")
plt.show()

# %% [markdown]
# In lane *same mathematics* the packed rows hold several examples each, kept apart in attention, so the gradient is
# that of a larger batch; and on a GPU FP8 rounds what it multiplies, which section 5 judged. Compare with care across
# that line. On a CPU expect little: nothing is compiled, nothing waits for a GPU, and packed rows compute what they
# mask.
#
# Does code for any length keep up with code for one? That is the article's first wish, and section 4 has measured it: on
# as many tokens, *any length* against *static*.

# %%
lab.verdict("A2.left.dynamic", "A2.left.fp8-once");

# %% [markdown]
# ### Where that leaves us
#
# The best rung alone, in a compiler that knows nothing yet: how many graphs it needs, whether anything is compiled after
# the first steps, how far it is from the plain loop and from this machine's matrix rate. And what FP8 weights hold in
# memory, from section 2.

# %%
top = trials.best_rung(climbed)
rate = measured_roofline(climbable[top].fitted_to(lab.device).precision).rate
targets = trials.reached(varied, climbable[top], climbed, cells if on_gpu else {}, rate)
lab.keep(Run("06", "targets", lane="same mathematics", recipe=climbable[top].as_dict(), metrics=targets))
lab.table((f"rung *{top}*", "we aimed at", "here", "H200"), *trials.goal_rows(targets, lab.reference("targets")))

# %% [markdown]
# **Takeaway.** Nothing here fixed an image's shape. The host stops asking the GPU for lengths, a block's code takes
# any, rows are filled instead of padded, and what nobody reads (logits of tokens with nothing to predict, features of a
# frozen tower that are known already) is not computed.

# %% [markdown]
# ## 7 · Which method for me?
#
# **Question.** The article ends with a chart: short of memory, QLoRA; few steps, FP8; many steps, fixed shapes with
# compilation; 135 to 220 steps, all together. Does that follow from its own table? And from ours?
#
# A method's total time is its first step plus its later ones: a straight line over the planned steps. The winner at
# any number is the lowest line, and a change of winners is a crossing of *neighbours*.

# %%
theirs = advisor.published()
fig, ax = plt.subplots()
plots.choices(ax, advisor.chart(theirs), most_steps=20_000, most_gb=24)
ax.set_title("Who finishes first, by the article's numbers at batch 1", pad=28)
plt.show()
rows = [
    (reach.option.method, reach.start, reach.until if reach.until < 1e9 else None) for reach in advisor.envelope(theirs)
]
lab.table(("finishes first, memory aside", "from step", "to step"), *rows)

# %% [markdown]
# The corners of the chart follow. Its bounds don't: 135 and 220 are the steps after which two methods have caught up
# with *BF16*. But at 135 the rival is FP8 alone, and at 220 it is the other of the two. By the article's own numbers
# FP8 with fixed shapes finishes first from about 150 to about 770 steps. (And only if a loss 16 % higher doesn't
# matter. Its step times stand in a figure; they are worked out here from its break-even counts and percentages, see
# `labutils/articles/a2.py`.)
#
# Now yours: set your card, plan and tolerance. On a GPU the methods are those of section 2 and 3 as measured here. A
# CPU measures no GPU memory: there they are the H200's, or the article's as long as no H200 is on record.

# %%
my_vram_gb, my_batch, my_steps, my_tolerance = 24, 1, 2000, 0.05

with lab.attempt("Advice from measured runs"):
    source = read_runs(lab.results_dir if on_gpu else REFERENCE, "06")
    options = advisor.options_from(source, my_batch) if source else theirs
    print("Asked of:", "this machine's runs" if on_gpu else "the H200's runs" if source else "the article's numbers")
    lab.show(advisor.advise(options, my_vram_gb, my_steps, my_tolerance).as_markdown())
    if on_gpu:
        lab.keep(Run("06", "guide", metrics=advisor.guide(advisor.options_from(source, 1))))
    if source:
        fig, ax = plt.subplots()
        plots.choices(ax, advisor.chart(options, my_tolerance))
        plt.show()
lab.verdict("A2.guide.memory", "A2.guide.few-steps", "A2.guide.between", "A2.guide.many-steps");

# %% [markdown]
# **Takeaway.** Advice is a function of card, batch, plan and tolerance. Written down as a function it can be asked
# again when one of them changes.

# %% [markdown]
# ## Exercises
#
# **1.** A method starts with 60 s and takes 0.5 s a step; another starts with 2 s and takes 0.9 s. After how many
# steps has the first caught up?

# %% tags=["exercise"]
my_crossing = None  # your number


def check_crossing(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_crossing first."
    if abs(answer - (60 - 2) / (0.9 - 0.5)) < 1:
        return "Exercise 1: right: 58 s to make up, 0.4 s a step."
    return "Exercise 1: not yet. Extra seconds at the start over seconds saved a step."


print(check_crossing(my_crossing))

# %% tags=["solution"]
my_crossing = (60 - 2) / (0.9 - 0.5)
assert check_crossing(my_crossing).startswith("Exercise 1: right"), check_crossing(my_crossing)

# %% [markdown]
# **2.** An image of 500 × 500 becomes five tiles in a grid of 2 × 2, 24 × 24 tokens each, with a newline token after
# each row of the enlarged image. Work out its 2,928 tokens from that, as a sum.

# %% tags=["exercise"]
my_sum = None  # your sum, for example 24 * 24 + 1


def check_sum(answer) -> str:
    if answer is None:
        return "Exercise 2: set my_sum first."
    if answer == 2928:
        return "Exercise 2: right: 576 for the whole image, and 48 rows of 48 tokens and a newline."
    if answer == 5 * 576:
        return "Exercise 2: nearly. Where are the newlines?"
    return "Exercise 2: not yet. The whole image is 24 × 24; the enlarged one has 48 rows."


print(check_sum(my_sum))

# %% tags=["solution"]
my_sum = 24 * 24 + 48 * (48 + 1)
assert check_sum(my_sum).startswith("Exercise 2: right"), check_sum(my_sum)

# %% [markdown]
# **3.** FP8's loss lies at 2.02 over three seeds (2.00, 2.02, 2.05), BF16's at 2.00 (1.98, 2.00, 2.03). The seeds are
# the same. Which of these may you say? Answer with a set of letters. (a) FP8 is worse by 1 %, beyond the spread of
# seeds. (b) On every one of these seeds FP8 is about 1 % worse. (c) The two can't be told apart at all.

# %% tags=["exercise"]
my_letters = None  # a set, for example {"a", "c"}


def check_letters(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_letters first."
    if set(answer) == {"b"}:
        return "Exercise 3: right. Paired by seed the difference is steady, though smaller than what a seed does."
    if "c" in answer:
        return "Exercise 3: compare them seed by seed."
    return "Exercise 3: not yet. How large is the spread over seeds, and how large the difference?"


print(check_letters(my_letters))

# %% tags=["solution"]
my_letters = {"b"}
assert check_letters(my_letters).startswith("Exercise 3: right"), check_letters(my_letters)

# %% [markdown]
# ## What you did
# - You counted what an image costs in tokens, and found that AnyRes has no single tile.
# - You measured methods by first step, later steps and memory, and worked out when each has paid.
# - You separated fixed shapes from fewer tokens, and counted recompilations with their reasons.
# - You got rid of recompilations without fixing any shape, and of padding by packing.
# - You compared losses against the spread of seeds.
# - You turned a decision chart into a function, and found where a published one doesn't follow from its table.

# %%
lab.done(
    {
        "tokens of a 500 x 500 image": counts["tokens_500x500"],
        "QLoRA's step at batch 1, longer by": trials.longer_by(cells, "qlora b1"),
        "break-even of torch.compile at batch 1": trials.paid_after(cells, "compile b1"),
        "recompilations on 500 x 500 images": counted["uniform"].metrics()["recompilations"],
        "spread of the loss over seeds": band[1] - band[0],
        "useful tokens a second, against the plain loop": targets.get("useful_speedup"),
    }
)
