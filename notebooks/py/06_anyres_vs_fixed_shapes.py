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
# FP8 (lab 05), `torch.compile` (lab 04), and QLoRA, which keeps the frozen weights in 4 bits (lab 07 takes it apart).
# Each gains less than hoped. Then the article forces all images to one size, and the step takes half the time. Its
# explanation is *AnyRes*, the way in which this model cuts images into tiles: images of different shapes give different
# numbers of tokens, so the compiler has to start over.
#
# But forcing images to 336 × 336 does two things at once: shapes stop varying, *and* there are far fewer tokens. This
# lab measures the article's table and then separates the two. It asks whether the article's loss values differ by more
# than chance. Then it tries to have both, images of any shape and nothing compiled twice. It ends with the article's
# decision chart, computed from what was measured.
#
# **After this lab you can**
# - say how many tokens an image costs, and what AnyRes does with small ones;
# - read a table of methods by first step, later steps and memory, and say when a method has made up for its slow start;
# - separate two changes that came together, by an experiment that makes one of them alone;
# - count recompilations, read their reasons, and get rid of them without fixing the images' shapes;
# - tell a difference of two losses from the spread of seeds;
# - choose a method for a card, a number of steps and a tolerance, and give your reasons.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU with a C++ compiler | 2 minutes |
# | `small` | a GPU of 8 GB | 5 minutes |
# | `full` | a GPU of 141 GB | 13 minutes; started again, it keeps what it has measured |
#
# This is the longest lab: take it in two sittings. Sections 1 to 4 test what the article did, sections 5 to 7 go past it.
#
# At `full` the architecture is llava-v1.6-mistral-7b's. With random weights, time and memory are the real model's.
# Losses are not, so section 5 trains a small model of its own to say something about them.
#
# **Without a GPU** you see how each question is asked and answered. Sections 1 and 4 (c) hold on any machine. Elsewhere
# the CPU's times say nothing about a GPU: FP8 is emulated, 4-bit weights have no fast kernels, and there is no GPU
# memory to compare. So our H200's table follows each of yours.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
batches: str = ""  # batch sizes of the table beside 1, as "2 4 8 16 24", the article's; empty: 4 at tiny, else 4 24
compile_batches: str = (
    ""  # batch sizes of the compiled methods; empty: none at tiny, 1 at larger scales
)
whole_model: bool = (
    False  # on a GPU also compile the model whole, as the article did: twice 1-2 minutes
)
steps: int = 0  # timed steps of a cell; 0: 2 at tiny, else 5 at batch 1, 3 up to 4, and above 1
seeds: int = 0  # seeds of section 5; 0: 2 at tiny, 3 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("06", globals())

# %%
import warnings
from functools import partial
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from labutils.course import plots
from labutils.course.goals import GOAL_HEAD, Goal, goal_rows
from labutils.course.parameters import whole_numbers
from labutils.labs import lab06_advisor, lab06_anyres
from labutils.labs.ladders import A2_BASE, A2_LADDER, climb, distinct_on, rung_rows
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.layers.quantization.convert import convert_base, forward_context
from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.profiling.machine import usable_cores
from labutils.profiling.measured_rates import measured_roofline
from labutils.results.effects import paid_after
from labutils.results.records import REFERENCE, Run, read_runs, to_frame
from labutils.training import train
from labutils.training.model_edits import prepared_for_kbit
from labutils.workloads import open_workload
from labutils.workloads.llava import SIZES

plots.use_style()
warnings.filterwarnings("ignore", module="torch")
compile_from_nothing()  # so that a first step is one
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))

# %%
sizes = sorted({1, *(whole_numbers("batches", batches) or ([4] if tiny else [4, 24]))})
compiled_sizes = whole_numbers("compile_batches", compile_batches) or ([] if tiny else [1])
uniform, varied = lab.workload("llava-lora"), lab.workload("llava-lora-varied")
cells: list[Run] = []

# %% [markdown]
# ## 1 · What an image costs
#
# **Question.** How many tokens does a photograph of 500 × 500 pixels become? And one of 336 × 336, the article's fixed
# size, of which it says that it bypasses AnyRes?
#
# LLaVA-NeXT's vision tower, the network that turns pixels into tokens, reads *tiles* of 336 × 336 pixels and makes
# 24 × 24 tokens of each. AnyRes shows it each image twice: once shrunk to a single tile, and once enlarged and cut into
# a grid of tiles that suits the image's shape.
#
# **Your prediction:** image tokens of a photograph of 500 × 500.

# %%
my_tokens: float | None = None  # for example 576

lab.predict("tokens of a 500 x 500 image", my_tokens, "tokens")

# %%
geometry = SIZES["full"].geometry  # that of the article's own model, whatever the scale
counts = {"tiles_low_resolution": geometry.tiles((224, 224))}
for height, width in ((336, 336), (500, 500), (354, 707)):
    counts[f"tiles_{height}x{width}"] = geometry.tiles((height, width))
    counts[f"tokens_{height}x{width}"] = geometry.tokens((height, width))
square, wide = counts["tokens_500x500"], counts["tokens_354x707"]
counts["aspect_token_ratio"] = max(square, wide) / min(square, wide)
article = open_workload("llava-lora", "full", device="cpu")
counts["vision_share"] = lab06_anyres.vision_share(article, lab06_anyres.method("bf16"))
kept = Run("06", "token-counts", workload="llava-lora", scale="full", metrics=counts)
kept.tags = {"experiment": "token-counts"}
lab.keep(kept)
lab.table(
    ("image, width × height", "tiles", "image tokens"),
    ("224 × 224", counts["tiles_low_resolution"], None),
    ("336 × 336", counts["tiles_336x336"], counts["tokens_336x336"]),
    ("500 × 500", counts["tiles_500x500"], counts["tokens_500x500"]),
    ("707 × 354, the same area", counts["tiles_354x707"], counts["tokens_354x707"]),
)
lab.verdict("A2.anyres.tokens", "A2.anyres.one-tile", "A2.fixed.no-anyres")
# %% [markdown]
# Even the smallest grid has two tiles (1 × 2), so no image is ever a single tile. One of 336 × 336 is shown once as
# it is, and once in the middle of a canvas of two tiles, half of which is padding. All three tiles go through the vision
# tower; the padding's tokens are dropped afterwards.
#
# An image of 707 × 354 might be expected in a grid of 1 × 2 tiles, 672 × 336 pixels. But it is a hair less than twice
# as wide as high, so it would be shrunk to 671 × 336 there. In the grid of 2 × 2 its width decides: it becomes
# 672 × 336, one column of pixels more, and AnyRes takes the grid that shows the most pixels. Half of that grid is padding. So
# the image costs the vision tower as many tiles as a square of the same area, but the language model only three fifths
# of the tokens.
#
# **Takeaway.** The article's fixed shape doesn't switch AnyRes off. It turns every image into one of the cheapest that
# AnyRes knows: 1,176 tokens instead of 2,928.

# %% [markdown]
# ## 2 · The article's table, without the compiler
#
# **Question.** Which of FP8 and QLoRA saves time, which saves memory, and how does that change with the batch size?
#
# | method | frozen base weights |
# |---|---|
# | *bf16* | as published |
# | *fp8-te* | the article's FP8 layers, from Transformer Engine |
# | *fp8-frozen* | lab 05's FP8 layer, which holds its weight once |
# | *nf4* | NF4: 4 bits a weight, unpacked to BF16 before each product |
# | *qlora* | *nf4*, plus what PEFT's `prepare_model_for_kbit_training` does to the rest of the model |
#
# A new model is built for each row; its first step is timed, then a few later ones. (At batch 24 a step takes so long
# that one has to do: that row is about memory.) *Has paid after* is the number of steps that make up for a
# slower start, if any do; it counts the first step alone. *Useful* tokens are those that aren't padding. (The table
# divides medians. The verdicts below it compare step with step where two methods trained on the same batches, so their
# percentages may differ by a few.)
#
# Every row uses *checkpointing*: the model's blocks keep only their inputs and are computed again in the backward pass.
# The article doesn't mention it, but its 16 GB at batch 1 hold 15 GB of weights in BF16, and what is left is about as
# much as checkpoints need.
#
# **Your prediction:** by how many percent is QLoRA's step longer than that of BF16 at batch 1?

# %%
my_qlora: float | None = None  # for example 20

lab.predict("QLoRA's step at batch 1, longer by", my_qlora, "%")


# %%
def cell(method: str, batch: int) -> Run:
    """A cell measured now; what fails says why in the table."""
    return lab06_anyres.cell(
        uniform,
        method,
        batch,
        steps or (2 if tiny else 5 if batch == 1 else 3 if batch <= 4 else 1),
    )


def measure_cells(methods: dict[str, list[int]]) -> None:
    """Measure and keep methods, each at its batch sizes, except what an interrupted start left behind."""
    for method, batches_of_it in methods.items():
        for batch in batches_of_it:
            recipe = lab06_anyres.method(method, batch)
            cells.append(lab.measured(f"{method} b{batch}", recipe, partial(cell, method, batch)))


pair = sorted({1, max(size for size in sizes if size <= 4)})
fp8_te = pair if on_gpu else [1]
measure_cells(
    {
        "bf16": sizes,
        "fp8-te": fp8_te,
        "fp8-frozen": [1],
        "qlora": sorted({*pair, sizes[-1]}),
        "nf4": [1],
    }
)
uncompiled = ("bf16", "qlora", "fp8-te", "fp8-frozen", "nf4")

# %%
cell_columns = {
    "run": "method and batch",
    "first_step_s": "first step, s",
    "step_ms": "step, ms",
    "data_ms": "of it data",
    "longer_percent": "against bf16, %",
    "peak_allocated_gb": "memory, GB",
    "useful_tokens_per_s": "useful tokens/s",
    "paid_after": "has paid after, steps",
}


def show_cells(*methods: str) -> None:
    """These methods' cells as a table, here and on the H200, and why others are not in it."""

    def table(runs: list[Run]) -> pd.DataFrame:
        frame = lab06_anyres.cell_table(runs, methods)
        return frame.reindex(columns=list(cell_columns)).rename(columns=cell_columns)

    lab.show(cells, table, experiment="methods")
    failed = [(run.label, run.status) for run in cells if not run.ok]
    lab.table(("not measured", "why"), *failed, otherwise="Every row could be measured.")


show_cells(*uncompiled)

# %% [markdown]
# How does the memory grow with the batch?

# %%
whose, shown = (
    ("this GPU", cells)
    if on_gpu
    else ("our H200 (a CPU has no GPU memory)", lab.references(experiment="methods"))
)
fig, ax = plt.subplots(figsize=(7.2, 3.6))
frame = to_frame(
    run for run in shown if run.tags["method"] in uncompiled and not run.has(again=True)
)
memory = {
    method: rows.set_index("batch")["peak_allocated_gb"].dropna().to_dict()
    for method, rows in frame.groupby("method", sort=False)
}
plots.curves(ax, memory, "batch size", "memory at the peak, GB")
ax.set_title(f"Memory at the peak on {whose}", pad=42)
plt.show()

# %%
lab.verdict(
    "A2.fp8.speed", "A2.fp8.batch", "A2.fp8.first-step", "A2.fp8.memory", "A2.fp8.held-twice"
)
# %%
lab.verdict(
    "A2.qlora.speed",
    "A2.qlora.cause",
    "A2.qlora.first-step",
    "A2.qlora.memory-small",
    "A2.qlora.memory-large",
    "A2.qlora.memory-growth",
)
# %% [markdown]
# If your GPU is fast, compare FP8 at batch 1 with FP8 at batch 4. At batch 1 the host launches kernels more slowly than
# the GPU runs them. Then layers that take more kernels than a plain product does, and FP8's and the 4-bit ones do, make
# the step longer. At batch 4 the GPU has enough to do, and FP8's faster products begin to show. (*bf16* itself may take
# more than four times as long at batch 4, as on our H200. From two texts on, the shorter are padded and masked, and with a
# mask PyTorch can't take its fastest attention kernel, which is a likely reason; section 6 takes the mask away.)
#
# In the picture each line starts at the height of the weights, and this is where QLoRA and FP8 save. Its slope is what
# each further example adds: checkpoints, and the tensors of one block at a time. If only the weights differed, all lines
# would have the same slope, and a method's saving would shrink in percent but never turn into a loss.
#
# So a line that crosses the one of *bf16* must have larger activations. For QLoRA there is a suspect: PEFT's
# preparation turns embeddings and norms into float32, and with them everything that flows from block to block. *nf4* is
# QLoRA without that preparation. At batch 1 the tables show what the preparation adds there; one batch size shows no
# slope, and lab 07 takes the two apart.
#
# **Takeaway.** What is saved on weights is a fixed number of gigabytes. At large batches activations decide.

# %% [markdown]
# ### Does the vision tower hold FP8 back?
#
# **Question.** The article blames the vision tower for FP8's small gain. The tower can't be converted, it says: an image
# has 577 rows there, and Transformer Engine wants multiples of 8. Does its layer still refuse them, and how much of the
# step's arithmetic is the tower's?

# %%
rows_577 = torch.randn(5, 577, 1024, device=lab.device, dtype=torch.bfloat16)
linear = torch.nn.Linear(1024, 1024, device=lab.device, dtype=torch.bfloat16).requires_grad_(False)
print(
    "The course's frozen FP8 layer takes them:",
    tuple(FrozenFP8Linear.from_linear(linear)(rows_577).shape),
)
print(f"The tower's share of the arithmetic of the article's step: {counts['vision_share']:.1%}")
refusal = {"experiment": "fp8-te vision"}
with lab.attempt("577 rows through te.Linear", **refusal):
    layer = torch.nn.Sequential(linear)
    convert_base(layer, ["0"], "fp8-te")
    message = ""
    try:
        with forward_context("fp8-te"):
            layer(rows_577.requires_grad_()).sum().backward()
    except (AssertionError, ValueError, RuntimeError) as error:  # which one: see its version
        message = f"{type(error).__name__}: {error}"
    metrics = {"failed": int(bool(message)), "message": message}
    lab.keep(Run("06", "fp8-te vision", tags=refusal, metrics=metrics))
    print("te.Linear:", message or "takes them, too")
lab.verdict("A2.lmm.vision-cost", "A2.fp8.vision-refuses", "A2.fp8.vision-limits")
# %% [markdown]
# **Takeaway.** Put a number to a bottleneck before you believe in it. The tower has a fiftieth of the step's
# arithmetic, so what holds FP8 back must be in the rest. Lab 05 timed single layers of the language model, and there,
# too, FP8 gained much less than the tensor cores promise: quantising around each product takes kernels and time of its
# own.

# %% [markdown]
# ## 3 · With the compiler
#
# **Question.** What does `torch.compile` gain, what does its first step cost, and after how many steps has it paid for itself?
#
# - *compile* compiles the model's *blocks*, the layers that a transformer repeats. The decoder's 32 blocks are alike and
#   share their code, so there is one to compile instead of 32.
# - *fixed* does the same on images of 336 × 336.
# - *compile-whole* and *fixed-whole*, with `-p whole_model true` on a GPU, compile the model in one piece, as the article
#   did. The article's first steps and break-even counts are judged by these two. They take minutes, so *bf16* is timed
#   once more beside them, to compare them with. (With Transformer Engine's layers the
#   blocks have its own checkpointing. In a model compiled whole, the compiler gives up on such blocks and leaves them
#   eager; so the rows with these layers are always compiled block by block.)
#
# At `tiny` nothing is compiled unless you ask for it with `-p compile_batches 1`: it takes half a minute of C++
# compilation, which lab 04 has already shown.
#
# **Your prediction:** after how many steps has compiling the blocks paid at batch 1, by its first step alone?

# %%
my_even: float | None = None  # for example 500

lab.predict("break-even of torch.compile at batch 1", my_even, "steps")

# %%
methods = {"compile": compiled_sizes}
if on_gpu and compiled_sizes:
    others = ("compile-qlora", "fixed-qlora", "compile-fp8-te", "fixed-fp8-te")
    methods |= dict.fromkeys(("fixed", "fixed-fp8-frozen"), [*compiled_sizes, 4]) | dict.fromkeys(
        others, [1]
    )
measure_cells(methods)
if on_gpu and whole_model:  # in one go: a baseline of another hour would be none
    whole = {"bf16 b1, again": "bf16", "compile-whole b1": "compile-whole"}
    whole["fixed-whole b1"] = "fixed-whole"
    asked = {label: lab06_anyres.method(method) for label, method in whole.items()}
    cells += lab.measured_together(
        asked,
        lambda: {
            label: lab06_anyres.cell(uniform, method, 1, steps or 5, again=method == "bf16")
            for label, method in whole.items()
        },
    ).values()
show_cells("bf16", *(method for method in lab06_anyres.METHODS if method not in uncompiled))
if not compiled_sizes:
    lab.show("Nothing was compiled here: `-p compile_batches 1` compiles.")

# %% [markdown]
# ### What the compiler did
#
# The compiler reads the Python code and turns it into *graphs* of tensor operations. What it can't read splits a graph
# in two (a *graph break*), and Python runs in between. Each graph comes with *guards*: conditions, such as a tensor's
# size, under which it is valid. When a guard fails, the code is read and compiled again: a *recompilation*. After 8
# versions of a function PyTorch gives up and leaves it uncompiled.

# %%
compiler_columns = {
    "run": "",
    "compile_s": "compiling in all, s",
    "graphs": "graphs",
    "graph_breaks": "graph breaks",
    "recompilations": "recompilations",
    "given_up": "given up",
}
lab.show(cells, compiler_columns, experiment="methods")

# %%
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
)
# %% [markdown]
# ### FP8 and 4-bit layers under the compiler
#
# **Question.** The article found both to be black boxes to the compiler. Do they break the graph, and what is then left
# of the gain? The last claim is about the course's own FP8 layer, into which the compiler can see.

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
)
# %% [markdown]
# The article counts the first step alone. If *compiling in all* is much longer than the first step, a text of another
# length came later and was compiled for as well. A break-even count should include that. (The timed steps don't contain
# it: a round in which something was compiled is repeated.)
#
# Compare *useful tokens/s* as well, before you call *fixed* fast. Its step ends sooner because it holds fewer of an
# image's tokens: on our H200 its steps at batch 1 are two fifths shorter than *bf16*'s, and yet it trains on fewer
# useful tokens a second.
#
# **Takeaway.** A break-even count divides seconds on the host by milliseconds on the GPU, so it holds for one machine and
# one way of compiling. From a few timed steps it is also rough: run the lab twice and compare. Before you accept a long
# first step, try compiling one block instead of the whole model.

# %% [markdown]
# ## 4 · Two changes that came together
#
# **Question.** The fixed shape halved the article's step. Is that because shapes no longer vary, or because there are
# fewer tokens?
#
# ### (a) One shape, as many tokens; (b) one shape, fewer tokens
#
# Take five examples of varied sizes. There are four runs, each with the same number of steps:
#
# | run | trains on | compiled |
# |---|---|---|
# | *same-tokens varying* | all of the examples in turn, each at its own length | as PyTorch does by default |
# | *same-tokens any length* | the same | for any length from the start |
# | *same-tokens static* | only the example of median length, in every step: about as many tokens, in one shape | for that length |
# | *static fewer-tokens* | only the shortest example, in every step | for that length |
#
# If constant shapes are what helps, a thousand tokens cost less in *static* than in *varying*. If fewer tokens are what
# helps, a thousand tokens cost about the same everywhere, and the step with the fewest tokens is the shortest.
#
# At `full` a step trains on two copies of an example: with one, compiled code on a fast GPU is done before the host has
# launched it, and then a step takes as long with fewer tokens as with more. The images' features were computed
# beforehand, as only the decoder's lengths matter here.
#
# On a GPU all four are compiled block by block. On a CPU nothing is compiled, so your table shows only the second
# effect. (`layers="rewritten"`, here and below, runs the same modules on tensors that were prepared on the CPU, so that
# nothing has to be counted or looked up on the GPU. Section (c) shows what that is good for.)

# %%
alone = A2_BASE.but(
    layers="rewritten", cache="features", micro_batch=2 if lab.scale == "full" else 1
)
alone = alone.but(compile="default" if on_gpu else "off", compile_scope="blocks")
uniform.release_weights()  # its weights are not needed any more, and would count as memory of what follows
replayed = lab.measured_together(
    dict.fromkeys(lab06_anyres.REPLAYS), partial(lab06_anyres.replays, varied, alone, 5)
)
columns = {"run": "run", "tokens": "tokens a step", "ms_per_1k_tokens": "ms for 1000 tokens"}
columns["peak_allocated_gb"] = "memory, GB"
lab.show(replayed.values(), columns, experiment="replay")
lab.verdict("A2.fixed.cause", "A2.fixed.memory-cause")
# %% [markdown]
# Read the last column but one. Whatever *varying* and *static* differ by is all that constant shapes can give. The
# article's step became 47 to 53 % shorter, but that is a third change as well: its fixed shapes are compiled, and
# compared with a step that isn't, and compiling alone made the article's step 11 to 20 % shorter. What is left must come
# from the tokens, of which the fixed shape leaves two in five (1,176 of 2,928 of an image).

# %% [markdown]
# ### (c) How often does the compiler start over?
#
# **Question.** If shapes do vary, what makes the compiler start over: the images, or the model's code?
#
# There are two sets of images: the article's, all of 500 × 500 (*uniform*), and one of varied sizes (*varied*). We count
# in four cases:
#
# - *uniform*: the published model, compiled as a whole, on the article's images;
# - *varied*: the same on images of varied sizes;
# - *varied, blocks*: on those, only the model's blocks are compiled, and the places of image tokens are worked out on the
#   CPU beforehand;
# - *varied, blocks, any length*: the same, with code for any length from the start.
#
# Only the compiler's front end runs, the part that reads code and sets guards, on the smallest model. That takes seconds,
# and the counts are the same on every machine.
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
count = 3 if tiny else 6
cases = {
    "uniform": (small_uniform, A2_BASE, None, {"images": "uniform"}),
    "varied": (small_varied, A2_BASE, None, {"images": "varied"}),
}
if not tiny:  # there the last case's count has to do
    cases["varied, blocks"] = small_varied, blocks, None, {"images": "varied", "scope": "blocks"}
any_length = {"images": "varied", "scope": "blocks", "any_length": True}
cases["varied, blocks, any length"] = (small_varied, blocks, True, any_length)
compilers, by_step = {}, {}
for name, (images, recipe, dynamic, tags) in cases.items():
    run, compilers[name] = lab06_anyres.recompilations(images, recipe, count, dynamic)
    run.run, run.tags = f"recompiles {name}", {"experiment": "recompilation"} | tags
    by_step[name] = dict(enumerate(run.samples["recompilations"], 1))
    lab.keep(run)

# %%
fig, ax = plt.subplots(figsize=(7.2, 3.2))
plots.grouped(ax, by_step, "recompilations")
ax.set_xlabel("step")
ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
ax.set_title("Code compiled anew, step by step", pad=42)
plt.show()
rows = []
for name, compiler in compilers.items():
    rows += [(name, f"`{guard}`", times) for guard, times in compiler.reasons.most_common(2)]
lab.table(("", "guards that failed most often", "times"), *rows)
given_up = {f"`{name}`" for compiler in compilers.values() for name in compiler.given_up}
print(
    "Left uncompiled, after too many versions:", ", ".join(given_up) or "nothing within these steps"
)
lab.verdict("A2.anyres.recompiles", "A2.anyres.cause")
# %% [markdown]
# **The article's images.** All of them have the same number of image tokens (2,928 at `full`). Only the answer's text
# varies, by a token or two. At the second length the compiler writes code for any length, and from step 3 on there is
# nothing more to compile. So AnyRes can't be what kept compilation from gaining more in the article.
#
# **Varied images.** Here the published model recompiles again and again: it counts and compares image tokens on the
# device, in pieces that are compiled for one exact size each. With the places of image tokens worked out beforehand
# that ends after two steps, when a second length and a second number of tiles (3 or 5) have been seen. Compiled for *any
# length* from the start, a single one is left that has nothing to do with lengths: the first block's input has no gradient
# where the others' have one. (The table counts guards, the picture recompilations: at one recompilation several guards
# may have failed.)
#
# **Takeaway.** Most recompilations came from code that asks for sizes. Change that code, and images may have any shape.

# %% [markdown]
# ### (d) What does padding cost?
#
# **Question.** A fixed shape needs padding. How many of the tokens are then of use?
#
# The same varied images come in five forms. *Fixed* is the article's: every image shrunk to 336 × 336, every text padded
# to one length. The others keep AnyRes: examples *as they come*; *padded* to one length; padded to the next of a few
# lengths (*buckets*); or several examples in one row that don't see each other (*packed*).

# %%
plain = A2_BASE.but(layers="rewritten")
forms = {
    "as they come": plain,
    "fixed, to 2048": plain.but(shapes="fixed"),
    "padded, to 3072": plain.but(shapes="padded", token_budget=3072),
    "buckets": plain.but(shapes="buckets", token_budget=3072),
    "packed, to 8192": plain.but(shapes="packed", token_budget=8192),
}
form_tags = {
    "as they come": {"form": "as they come"},
    "fixed, to 2048": {"form": "fixed", "to": 2048},
    "padded, to 3072": {"form": "padded", "to": 3072},
    "buckets": {"form": "buckets"},
    "packed, to 8192": {"form": "packed", "to": 8192},
}


def in_form(name: str) -> Run:
    """The run of the varied images in one form."""
    run = train(varied, forms[name], steps or (1 if tiny else 3), warmup=1)
    run.tags = {"experiment": "forms"} | form_tags[name]
    return run


formed = [lab.measured(f"form: {name}", forms[name], partial(in_form, name)) for name in forms]
columns = {"run": "form", "tokens_per_s": "tokens/s", "useful_tokens_per_s": "useful tokens/s"}
columns["useful_tokens"] = "useful share of tokens"
lab.show(formed, columns, experiment="forms")

# %% [markdown]
# (The numbers in the names are token counts at `full`; smaller scales have smaller tiles. On a CPU a packed row is slow:
# attention computes all pairs of its tokens and then masks those of different examples. A GPU's kernel skips them.)
#
# **Takeaway.** When two changes came together, add a run that makes only one of them. And count *useful* tokens: in
# *fixed* at least two in five are padding. Apart from what compiling gave it, the article's step got shorter because its
# images got smaller, and every useful token costs more than it has to.

# %% [markdown]
# ## 5 · Is it the loss, or the seed?
#
# **Question.** The article compares losses after ten steps, of one run each: FP8 +14 %, fixed shapes +2 %, both
# +16 %, QLoRA −2 %, for which the article suggests regularisation. How far apart are two runs of the *same* recipe?
#
# Here a small model is trained on several seeds. All trainings start from the same frozen weights. A seed draws the
# adapters and the order of the photographs, and every method gets the same seeds. What is compared is not the last
# step's loss, which depends most on the two photographs that happen to be in it: it is the mean loss of photographs that
# no training has seen, before and after. The learning rate rises over the first four steps.
#
# *fp8-mixed* is *fp8-frozen* with two layers of each block left as published: attention's last (`o_proj`) and the MLP's
# last (`down_proj`). The article proposes to spare sensitive layers, for example attention's last; the MLP's is our
# addition. At `tiny` there are few steps, and the loss has just begun to fall.
#
# **Your prediction:** the spread of BF16's final loss over seeds (largest minus smallest), in percent of the loss.

# %%
my_spread: float | None = None  # for example 1

lab.predict("spread of the loss over seeds", my_spread, "%")

# %%
small = open_workload("llava-lora", "small" if on_gpu else "tiny", device=lab.device)
start = A2_BASE.but(
    layers="rewritten", loss="answers", micro_batch=2, learning_rate=6e-5 if on_gpu else 2e-3
)
fixed = start.but(shapes="fixed")
recipes = {"bf16": start, "qlora": start.but(base_linear="nf4"), "fixed": fixed, "fp8-mixed": start}
recipes |= {kind: start.but(base_linear=kind) for kind in ("fp8-frozen", "fp8-te")}
recipes |= {"fixed-fp8-te": fixed.but(base_linear="fp8-te")}
changes = {
    "qlora": prepared_for_kbit,
    "fp8-mixed": lab06_anyres.fp8_but("o_proj", "down_proj"),
}
kept = lab.measured_together(
    {f"loss {name}": recipe for name, recipe in recipes.items()},
    lambda: lab06_anyres.losses_over_seeds(
        small, recipes, seeds or (2 if tiny else 3), 6 if tiny else 12, changes
    ),
)
losses = {name.removeprefix("loss "): run for name, run in kept.items()}
curve, (before, after) = (
    losses["bf16"].metrics["loss"],
    map(losses["bf16"].metric, ("start_loss", "final_loss")),
)
print(
    f"BF16, held-out photographs: the loss goes from {before:.2f} to {after:.2f} in {len(curve)} steps."
)
print("The steps' own losses, last seed:", ", ".join(f"{loss:.1f}" for loss in curve))

# %%
final = np.array(losses["bf16"].samples["final_loss"])
band = [100 * (loss / np.median(final) - 1) for loss in (final.min(), final.max())]
against = lab06_advisor.against_same_seed(losses.values())
del against["bf16"]
fig, ax = plt.subplots()
plots.differences(
    ax,
    against,
    band,
    "how far BF16's own seeds lie from their median",
    "final loss against BF16's of the same seed, %",
)
plt.show()
lab.show(kept.values(), lab06_anyres.loss_table, experiment="loss")
lab.verdict("A2.fp8.loss", "A2.fp8.mixed", "A2.fixed.loss", "A2.fixed.fp8-loss", "A2.qlora.loss")
# %% [markdown]
# Each dot compares a method with BF16 on one seed. Dots close together on one side of the line: the method makes the same
# difference on every seed. Dots on both sides of the line: chance. The band shows how far BF16 differs from itself when
# only the seed changes: a comparison of two *different* seeds means nothing inside it.
#
# On our H200 *fp8-te* ends two to three percent higher on every seed, and *fp8-frozen*, which rounds to the same formats,
# on both sides of the line. So it isn't FP8 as such that costs loss here, and keeping layers of *fp8-frozen* in BF16 has
# nothing to mend.
#
# The printed losses of single steps go up and down by more than that, without any method to blame. So do ten steps of
# one run each: the article's 14 % may be a matter of which photographs came last.
#
# **Takeaway.** One run against another can't tell an effect from a seed. Compare on the *same* seeds, where most of the
# chance cancels out, and show the spread. This model is small and its base random: whether FP8 harms a real model must be
# found out on that model, with several seeds and a proper evaluation.

# %% [markdown]
# ## 6 · Any shape, and fast
#
# **Question.** The article ends with three wishes: kernels that take any length, so that AnyRes keeps its resolution
# at the speed of fixed shapes; FP8 weights that are held once; and FP8 layers inside the compiled graph. Which of them
# can be had today?
#
# The ladder starts with the plain loop on the *varied* images, without checkpointing. Each rung keeps the changes of the
# rungs before it. The lanes are lab 04's: *same work* does the same computation with less waiting; *same mathematics*
# computes less for the same distribution of gradients. Batches differ from rung to rung, so we compare the time for a
# thousand useful tokens.
#
# **Your prediction:** how many times as many useful tokens a second does the best rung train on?

# %%
my_gain: float | None = None  # for example 2

lab.predict("useful tokens a second, against the plain loop", my_gain, "x")

# %%
ladder = A2_LADDER.plus(lab06_anyres.LOW_BIT_RUNG) if on_gpu else A2_LADDER
recipes = climb(ladder)
if not on_gpu:
    # Compiling takes a minute on two cores, and workers would only get in the way.
    on_cpu = {"num_workers": 0, "persistent_workers": False, "compile": "off"}
    on_cpu |= {"compile_scope": "model", "dynamic": "automatic"}
    recipes = {name: recipe.but(**on_cpu) for name, recipe in recipes.items()}
climbable = distinct_on(lab.device, recipes)
lab.table(("rung", "lane", "changes", "why", "here"), *rung_rows(ladder, climbable))

# %%
torch._dynamo.reset()
climbed = lab.measured_together(
    climbable, partial(lab06_anyres.climbed, varied, ladder, climbable, 4 if tiny else 6)
)
climbed = {name: climbed[name] for name in climbable}
measured = [run for run in climbed.values() if run.ok]
fig, ax = plt.subplots()
plots.ladder(ax, measured, "ms_per_1k_useful_tokens")
plt.show()
columns = {"run": "rung", "lane": "lane", "ms_per_1k_useful_tokens": "ms for 1000 useful tokens"}
columns["useful_tokens_per_s"] = "useful tokens/s"
lab.show(climbed.values(), columns, experiment="ladder")

# %% [markdown]
# Be careful when you compare across lanes. In *same mathematics* a packed row holds several examples, so the gradient is
# that of a larger batch. On a GPU, FP8 also rounds what it multiplies; section 5 asked what that does to the loss. (On a
# CPU nothing is compiled and nothing waits for a GPU: there the picture shows how a ladder is built, not what a GPU would
# gain.)
#
# The article's first wish was code for any length that is as fast as code for one. Section 4 has measured that: on the
# same number of tokens, *any length* against *static*.

# %%
lab.verdict("A2.left.dynamic", "A2.left.fp8-once")
# %% [markdown]
# ### How far the best rung gets
#
# **Question.** Is it fast, does it stay compiled, and how close is it to what this machine can do?
#
# The best rung is the one with the shortest time for a thousand useful tokens. It runs once more, with nothing compiled
# beforehand. The table says how many graphs it needs, whether anything is compiled after the first steps, how many
# times as fast as the plain loop it is, and which share it reaches of the rate at which this machine multiplies BF16
# matrices. The last two lines are about FP8 weights' memory, from section 2. Lines without a number here need a GPU.

# %%
GOALS = {
    "useful_speedup": Goal("useful tokens/s, times the plain loop's", least=2),
    "graphs": Goal("graphs compiled", most=10),
    "graph_breaks": Goal("graph breaks", most=0),
    "compilations_after_warmup": Goal("compilations after warm-up", most=0),
    "mfu_fp8": Goal("share of BF16's measured matrix rate with FP8 weights", least=0.55),
    "mfu_bf16": Goal("the same without FP8", least=0.45),
    "weights_share": Goal("bytes of FP8 weights, share of BF16's", most=0.55),
    "memory_share": Goal("memory at batch 1 with FP8 weights, share of BF16's", most=0.75),
}
top = lab06_anyres.best_rung(climbed)
rate = measured_roofline(climbable[top].fitted_to(lab.device).precision).rate
targets = lab06_anyres.reached(varied, climbable[top], climbed, cells if on_gpu else [], rate)
aims = Run("06", "targets", lane="same mathematics", metrics=targets)
aims.recipe, aims.tags = climbable[top].as_dict(), {"experiment": "targets"}
lab.keep(aims)
theirs = lab.reference(experiment="targets")
lab.table((f"rung *{top}*", *GOAL_HEAD), *goal_rows(GOALS, aims, theirs))

# %% [markdown]
# Of the three wishes, code for any length comes true above. FP8 inside the graph did in section 3, and in the rung *FP8
# weights* here. FP8 weights that are held once take half of BF16's bytes, which is still more than QLoRA's 4 bits.
#
# **Takeaway.** No image had to change its shape. On a GPU most of the gain comes from tiles that are cut beside the
# training, a host that asks the GPU for nothing, blocks compiled for any length, rows that are filled instead of padded,
# and FP8 products. What nobody needs is not computed, either, which brings little here: the *logits*, one number for each
# word of the vocabulary, at places where no word is to be predicted; and the vision tower's features of an image that it
# has seen before, which can't have changed because the tower is frozen.

# %% [markdown]
# ## 7 · Which method for me?
#
# **Question.** The article ends with a chart: short of memory, QLoRA; few steps, FP8; many steps, fixed shapes with
# compilation; from 135 to 220 steps, these two together, FP8 with fixed shapes and compilation. Does that follow from
# its own table? And from ours?
#
# A method's total time is its first step plus all later ones: a straight line over the planned steps. At any number of
# steps the lowest line wins. The winner changes where the two lowest lines cross.

# %%
theirs = lab06_advisor.published()


def total_time(options, most_steps: int) -> None:
    """Each method's time in all over the planned steps, as a share of BF16's: the lowest wins."""
    steps_planned = np.geomspace(10, most_steps, 200)
    total = {
        name: first + each * steps_planned
        for name, first, each in options[["first_step_s", "step_s"]].itertuples()
    }
    fig, ax = plt.subplots(figsize=(7.2, 3.6))
    for (name, seconds), line in zip(total.items(), cycle(("-", "--", "-.", ":"))):
        ax.plot(steps_planned, seconds / total["bf16"], linestyle=line, label=name)
    ax.set(xscale="log", xlabel="optimizer steps planned", ylabel="time in all, of BF16's")
    ax.set_ylim(0.4, 1.6)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    plt.show()


total_time(theirs, 20_000)
planned = {f"{n:,}": lab06_advisor.advise(theirs, 24, n) for n in (100, 150, 200, 700, 900, 5000)}
lab.table(("steps planned", *planned), ("finishes first", *(a.index[0] for a in planned.values())))

# %% [markdown]
# Read the lowest line from left to right. The article's regions are there. Its bounds aren't. FP8 with fixed shapes has caught up with *BF16* after 135
# steps, and fixed shapes without FP8 have after 220. But BF16 isn't the method to beat. At 135 steps FP8 alone is
# ahead, and FP8 with fixed shapes overtakes it only at about 150. At 220 steps FP8 with fixed shapes is ahead, and
# fixed shapes without FP8 overtake it only at about 770. So by the article's own numbers FP8 with fixed shapes finishes
# first from about 150 to about 770 steps, if a loss 16 % higher doesn't matter. (The article shows step times in a
# figure only. They are worked out here from its break-even counts and percentages; see `labutils/labs/lab06_advisor.py`.)
#
# ### Your choice
#
# Set your card's memory, your batch, your number of steps, and how much higher the loss may be (0.05 is 5 %; `None` is
# any). On a GPU the methods are those that you measured in sections 2 and 3. A CPU has no GPU memory to measure, so
# there they are the H200's.

# %%
my_vram_gb, my_batch, my_steps, my_tolerance = 24, 1, 2000, 0.05

with lab.attempt("Advice from measured runs"):
    source = read_runs(lab.results_dir if on_gpu else REFERENCE, "06")
    options = lab06_advisor.options_from(source, my_batch) if source else theirs
    print(
        "Asked of:",
        "this machine's runs"
        if on_gpu
        else "the H200's runs"
        if source
        else "the article's numbers",
    )
    advice = lab06_advisor.advise(options, my_vram_gb, my_steps, my_tolerance)
    lab.table(lab06_advisor.shown(advice))
    total_time(options[options.index.isin(theirs.index)], 20_000)  # the article's methods
    if on_gpu:
        answers = Run("06", "guide", tags={"experiment": "guide"})
        answers.metrics = lab06_advisor.guide(lab06_advisor.options_from(source, 1))
        lab.keep(answers)
lab.verdict("A2.guide.memory", "A2.guide.few-steps", "A2.guide.between", "A2.guide.many-steps")
# %% [markdown]
# (The picture leaves the loss aside; the table above it respects your tolerance. *Loss not measured* there means that a
# method was left out for want of a number, not that it is bad.)
#
# **Takeaway.** Advice depends on the card, the batch, the plan and the tolerance. Write it down as a function, and you
# can ask again when one of them changes.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("06.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** A method starts with 60 s and takes 0.5 s a step; another starts with 2 s and takes 0.9 s. After how many
# steps has the first caught up?

# %% tags=["exercise"]
my_crossing = None  # your number of steps
print(check("06.1", my_crossing))

# %% [markdown]
# **2.** A tile becomes 24 × 24 tokens, and the enlarged image has a newline token after each row. A photograph of
# 500 × 500 is enlarged to 2 × 2 tiles: 24 · 24 tokens for the shrunk image, 48 · (48 + 1) for the enlarged one, 2,928 in
# all. How many tokens has an image of 1008 × 336, which is enlarged to one row of three tiles?

# %% tags=["exercise"]
my_tokens_of_three = None  # your sum
print(check("06.2", my_tokens_of_three))

# %% [markdown]
# **3.** FP8's loss lies at 2.02 over three seeds (2.00, 2.02, 2.05), BF16's at 2.00 (1.98, 2.00, 2.03). The seeds are
# the same. Which of these may you say? Answer with a set of letters. (a) FP8 is worse by 1 %, beyond the spread of
# seeds. (b) On every one of these seeds FP8 is about 1 % worse. (c) The two can't be told apart at all.

# %% tags=["exercise"]
my_letters = None  # a set, for example {"a", "c"}
print(check("06.3", my_letters))

# %% [markdown]
# **4. Make it faster.** One image has 1,024 tokens and fifteen have 16 each (on a GPU four times as many, each eight times
# as wide, so that it has work to do). `padded` fills all sixteen up to the longest and sends them through a network that
# treats each token by itself; then it averages each image's tokens. Write `unpadded`: the same averages, at least twice
# as fast.

# %% tags=["exercise"]
torch.manual_seed(0)
more, width = (4, 512) if on_gpu else (1, 64)
per_token = torch.nn.Sequential(
    torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
).to(lab.device)


def padded(images):
    """images: 16 tensors [its tokens, width] -> [16, width]"""
    longest = max(len(tokens) for tokens in images)
    batch = torch.stack(
        [torch.nn.functional.pad(tokens, (0, 0, 0, longest - len(tokens))) for tokens in images]
    )
    seen = per_token(batch)
    return torch.stack([seen[at, : len(tokens)].mean(0) for at, tokens in enumerate(images)])


def unpadded(images):
    return padded(images)  # your code instead


def sixteen_images(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (
        [torch.randn(more * tokens, width, device=lab.device) for tokens in (1024, *[16] * 15)],
    )


print(faster_than(4, padded, unpadded, sixteen_images, times=2))


# %% [markdown]
# ## What you did
# - You counted what an image costs in tokens, and found that AnyRes has no single tile.
# - You measured methods by first step, later steps and memory, and worked out when each has made up for its slow start.
# - You separated fixed shapes from fewer tokens, and counted recompilations with their reasons.
# - You got rid of recompilations without fixing any shape, and of padding by packing.
# - You compared losses against the spread of seeds.
# - You turned a decision chart into a function, and found where a published one doesn't follow from its table.
#
# ## Where this comes from, and what to read on
# - Liu et al., [LLaVA-NeXT: Improved reasoning, OCR, and world knowledge](https://llava-vl.github.io/blog/2024-01-30-llava-next/)
#   (2024), where AnyRes was introduced; Liu et al., *Improved Baselines with Visual Instruction Tuning* (2023,
#   [arXiv:2310.03744](https://arxiv.org/abs/2310.03744)).
# - Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation*
#   (ASPLOS 2024): graphs, guards, and what makes `torch.compile` start over. PyTorch's documentation on
#   [dynamic shapes](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_dynamic_shapes.html).
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174)):
#   checkpointing.
# - Krell et al., *Efficient Sequence Packing without Cross-contamination* (2021,
#   [arXiv:2107.02027](https://arxiv.org/abs/2107.02027)): rows of several examples.
# - The course's [glossary](../docs/glossary.md).


# %%
def of(method: str) -> Run | None:
    """The measured cell of a method at batch 1."""
    return next((run for run in cells if run.ok and run.has(method=method, batch=1)), None)


lab.done(
    {
        "tokens of a 500 x 500 image": counts["tokens_500x500"],
        "QLoRA's step at batch 1, longer by": lab06_anyres.longer_by(of("bf16"), of("qlora")),
        "break-even of torch.compile at batch 1": paid_after(of("bf16"), of("compile")),
        "recompilations on 500 x 500 images": sum(by_step["uniform"].values()),
        "spread of the loss over seeds": band[1] - band[0],
        "useful tokens a second, against the plain loop": targets.get("useful_speedup"),
    }
)
