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
# Article A2 trains LLaVA-NeXT, which reads images and text, with FP8, `torch.compile` and QLoRA. Compiled, and with all images
# forced to one size, a step takes half the time. The article's explanation is *AnyRes*: images of different shapes become different
# numbers of tokens, and the compiler starts over. But a small square has fewer tokens, too.
#
# **After this lab you can**
# - write a multimodal collator, and count tokens and recompilations;
# - take a speed-up apart into its causes;
# - write a packed training step that is compiled once for all images;
# - hold FP8 weights once, under LoRA;
# - choose a method by its total time.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 141 GB | 6 minutes; 18 with all of the article's batch sizes |
#
# `full` trains llava-v1.6-mistral-7b. On a first reading skip section 6's loss, and sections 7 and 8.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
batches: str = ""  # batch sizes of the table; the article's: "1 2 4 8 16 24"; empty: 4, at tiny 1
more: str = ""  # further methods of the table, as "fixed-fp8-te fp8-frozen compile-whole"
seeds: int = 0  # trainings of each method in section 8; 0: ours are shown

# %%
from labutils.course.lab import open_lab

lab = open_lab("06", globals())

# %%
import contextlib
import gc
import random
import time
import warnings
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
)

# %%
from labutils.course import plots
from labutils.course.parameters import whole_numbers
from labutils.data.anyres import Examples
from labutils.data.tokenizers import llava_processor, llava_tokenizer
from labutils.labs import lab06_advisor, lab06_anyres
from labutils.labs.ladders import A2_BASE
from labutils.layers.chunked_cross_entropy import linear_cross_entropy
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.layers.packed_attention import document_attention
from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.profiling.machine import usable_cores
from labutils.results.effects import effect
from labutils.results.records import (
    REFERENCE,
    Run,
    Runs,
    read_runs,
    reference_runs,
    summarise,
    to_frame,
)
from labutils.workloads import open_workload
from labutils.workloads.llava import SIZES, tower_flops

# %%
plots.use_style()
warnings.filterwarnings("ignore", module="torch|transformer_engine")
compile_from_nothing()  # so that a first step compiles all that it uses
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))
uniform, varied = lab.workload("llava-lora"), lab.workload("llava-lora-varied")
geometry = SIZES["full"].geometry  # the article's model's, at any scale

# %% [markdown]
# ## 1 · What an image costs
#
# **Question.** How many tokens is a photograph of 500 × 500? And the small square of 336 × 336 that is to bypass AnyRes?
#
# **Technique.** The *vision tower* turns pixels into tokens, 24 × 24 for each *tile* of 336 × 336. AnyRes gives it every image
# twice: shrunk to one tile, and scaled into a grid of tiles that suits the shape. Tokens that show only padding are dropped. Each
# line of the grid ends with a newline token.

# %%
TILE, SIDE = 336, 24  # a tile's pixels, and tokens, along a side
GRIDS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]  # tiles down, tiles across


def best_grid(height, width):
    """The grid that shows most pixels; of equals the smallest."""

    def shown(grid):
        scale = min(TILE * grid[0] / height, TILE * grid[1] / width)
        pixels = min(int(height * scale) * int(width * scale), height * width)
        return pixels, -grid[0] * grid[1]

    return max(GRIDS, key=shown)


def image_tokens(height, width):
    down, across = (SIDE * tiles for tiles in best_grid(height, width))
    scale = min(down / height, across / width)
    down -= 2 * ((down - int(round(height * scale, 7))) // 2)  # without the padding
    across -= 2 * ((across - int(round(width * scale, 7))) // 2)
    return SIDE**2 + down * (across + 1)


# %% [markdown]
# **Prediction.** How many tokens has the photograph? Count one tile, and a grid of 2 × 2 with its newlines.

# %%
my_tokens: float | None = None  # for example 576

lab.predict("tokens of a 500 x 500 image", my_tokens, "tokens")

# %%
random.seed(0)
for _ in range(1000):  # transformers' own functions agree
    size = random.randint(60, 1500), random.randint(60, 1500)
    assert image_tokens(*size) == geometry.tokens(size)
for height, width in ((224, 224), (336, 336), (336, 672), (336, 1008), (500, 500)):
    tiles = 1 + np.prod(best_grid(height, width))
    print(f"{height} x {width}: {tiles} tiles, {image_tokens(height, width):,} tokens")

# %%
square, wide = image_tokens(500, 500), image_tokens(336, 672)
counts = {"aspect_token_ratio": square / wide, "tiles_336x336": geometry.tiles((336, 336))}
counts |= {"tiles_low_resolution": geometry.tiles((224, 224)), "tokens_500x500": square}
article = open_workload("llava-lora", "full", device="cpu")
step_of = {name: article.work(lab06_anyres.method(name)) for name in ("bf16", "fixed")}
counts["vision_share"] = 5 * tower_flops(article.size) / step_of["bf16"].flops
lab.keep(Run("06", "token-counts", tags={"experiment": "token-counts"}, metrics=counts))
lab.verdict("A2.anyres.tokens", "A2.fixed.no-anyres")

# %% [markdown]
# The photograph has 2,928 tokens: 576, and 48 lines of 48 and a newline. The small square has 1,176: the smallest grid has two
# tiles, and the square fills half of each.
#
# **Takeaway.** The fixed shape doesn't switch AnyRes off. It makes every image small.

# %% [markdown]
# ## 2 · What a batch holds
#
# **Question.** A batch is a rectangle, and images differ. How much of it is padding?
#
# **Technique.** A *collator* makes a batch of examples. The processor cuts tiles and repeats `<image>` once for each image token.
# Only the answer gets labels. With a `length` the batch is *fixed*, as in the article: every image a small square, every row padded
# to 2,048 tokens.

# %%
processor = llava_processor(geometry, llava_tokenizer(512))  # yours: AutoProcessor.from_pretrained
PROMPT = "[INST] <image>\nDescribe [/INST]"


def collate(examples, length=None):
    """[(image, class)] -> what the model takes."""
    how = {"padding": True}
    if length:
        examples = [(image.resize((TILE, TILE)), name) for image, name in examples]
        how = {"padding": "max_length", "max_length": length, "truncation": True}
    images = [image for image, _ in examples]
    answers = [name + processor.tokenizer.eos_token for _, name in examples]
    texts = [PROMPT + answer for answer in answers]
    batch = processor(text=texts, images=images, return_tensors="pt", **how)
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for line, answer in enumerate(answers):
        ids = processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        end = batch["attention_mask"][line].nonzero().max() + 1  # padded on either side
        batch["labels"][line, end - len(ids) : end] = torch.tensor(ids)
    return batch


# %% [markdown]
# **Prediction.** Which share of a *fixed* batch's tokens is useful, that is, no padding? Text has 14.

# %%
my_useful: float | None = None  # for example 80

lab.predict("useful tokens of a fixed batch", my_useful, "%")

# %%
shapes = ((500, 500), (672, 336), (336, 1008), (700, 480))
leaves = [(Image.new("RGB", shape), "bean rust") for shape in shapes]
useful = {}
for name, length in {"AnyRes": None, "fixed": 2048}.items():
    batch = collate(leaves, length)
    useful[name] = batch["attention_mask"].float().mean().item()
    lines, longest = batch["input_ids"].shape
    print(f"{name}: {lines} x {longest:,} tokens, {useful[name]:.0%} useful; pixels", end=" ")
    print(tuple(batch["pixel_values"].shape))
course = Examples(processor).example(leaves[0][0], 1)  # the package's example
ours = collate(leaves[:1])
assert torch.equal(ours["input_ids"][0], course["input_ids"])
assert torch.equal(ours["labels"][0], course["labels"])

# %% [markdown]
# A *fixed* row has 1,176 + 14 useful tokens of 2,048, 58 %. AnyRes pads to the longest row. The article's images all have one
# shape, so it pads little there.
#
# **Takeaway.** Padding is 42 % of *fixed*, 21 % of these four mixed shapes.

# %% [markdown]
# ## 3 · The article's table
#
# **Question.** Five methods of the article's, six batch sizes: which saves time, which memory?
#
# **Technique.** All methods compute Mistral's blocks again in the backward pass.
#
# - *bf16*: weights in 16 bits.
# - *fp8-te*: Transformer Engine's FP8 in Mistral's frozen layers; weights stay in 16 bits.
# - *compile*: blocks compiled one by one; the article compiles the model.
# - *fixed*: *compile* on *fixed* batches.
# - *qlora*: weights in 4 bits, with scales 0.516 bytes (lab 07).
#
# Two are ours: *eager-fixed* isn't compiled (section 5), *fp8-frozen* holds FP8 weights once (section 7).
#
# Memory is a line over the batch: the weights, and an amount for each example. For QLoRA PEFT turns norms and embeddings into
# float32. So a number that flows from block to block takes four bytes, not two.

# %%
WIDTH, LAYERS, KEYS, INNER, WORDS = 4096, 32, 1024, 14336, 32064  # Mistral 7B's
BLOCK = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * INNER  # q, o, k, v, and gate, up, down

saved = LAYERS * BLOCK * (2 - 0.516) - 2 * WORDS * WIDTH * (4 - 2)  # NF4; embedding and head
an_example = LAYERS * 2942 * WIDTH * (4 - 2)  # a block's input for each block, in float32
print(f"saved once {saved / 1e9:.1f} GB, more for each example {an_example / 1e9:.2f} GB")

# %% [markdown]
# **Prediction.** From which batch size on does QLoRA take *more* memory than BF16?

# %%
my_crossing_batch: float | None = None  # a batch size

lab.predict("batch from which QLoRA takes more memory", my_crossing_batch)

# %% [markdown]
# You measure batch 4; the parameter `batches` changes it. *bf16, again* is the same method measured twice. Where the two can differ
# by more than 3 %, the machine is *unsteady*, and no time decides.
#
# *Step* is a median and holds *data*, the making of the batch. Rates and *MFU* use means, where one slow step shows. *Floor* and
# *MFU* count padding, but no block twice. FP8 methods have FP8's rate and peak.

# %%
METHODS = ("bf16", "fp8-te", "compile", "fixed", "qlora")  # the article's
if wrong := sorted(set(more.split()) - set(lab06_anyres.METHODS)):
    raise ValueError(f"more has {wrong}, but it takes some of: {' '.join(lab06_anyres.METHODS)}")
names = tuple(dict.fromkeys((*METHODS, "eager-fixed", "fp8-frozen", *more.split())))
if not on_gpu:
    names = ("bf16", "qlora", "eager-fixed", "fp8-frozen")
cells = {}
for batch in whole_numbers("batches", batches) or [1 if tiny else 4]:
    visits = 2 if tiny else 8 if batch == 1 else 4 if batch <= 4 else 1
    measure = partial(lab06_anyres.compared, uniform, names, batch, visits)
    cells |= lab.measured_together(lab06_anyres.cells(names, batch), measure)

# %%
columns = ("first_step_s", "step_ms", "speed-up", "floor_ms", "data_ms", "mfu")
columns += ("examples_per_s", "useful_tokens_per_s", "peak_allocated_gb")
some = {"experiment": "methods", "batch": 1 if tiny else 4}
lab.show(cells.values(), columns, **some)
lab.verdict("A2.fp8.memory", "A2.qlora.memory-growth")

# %% [markdown]
# One of BF16's eight steps took 3.5 s, so by rule no time decides. On another H200, from batch 8 on by one step each:
#

# %%
some |= {"batch": (2, 8, 16, 24), "method": METHODS}
on_record = reference_runs("06").select(**some).of_newest_host()
twice = on_record.select(again=True)
on_record = on_record.select(again=False).newest()
lab.show(on_record, lab06_anyres.side_by_side)
print("bf16 again:", {run.tags["batch"]: f"{run.metric('step_ms'):,.0f} ms" for run in twice})
memory = to_frame(on_record).pivot(index="batch", columns="method", values="peak_allocated_gb")
fig, ax = plt.subplots(figsize=(7.2, 3.4))
for name, style in {"bf16": "o-", "fixed": "s--", "qlora": "^:"}.items():
    ax.plot(memory[name], style, label=name)
ax.set(xlabel="examples in a batch", ylabel="peak memory, GB", xlim=(0, None), ylim=(0, None))
ax.set_title("another H200; compile and fp8-te lie on bf16")
ax.legend()
plt.show()

# %% [markdown]
# Making the data takes the host a different time at each visit. Take it off each step. Then batch 4 here and 8 to 24 there agree.
# Against BF16:
#
# - *fixed* saves 54 to 57 % of the time and 10 to 23 % of the memory. It trains on a third fewer useful tokens a second than
#   *compile*.
# - *compile* saves 28 to 30 % of the time, *fp8-te* 17 to 19. Neither saves memory. At batch 2 *fp8-te* takes longer.
# - *qlora* takes 16 to 18 % longer, and from batch 11 on more memory. The formula says 13: it has 0.77 GB for an example, measured
#   were 0.96.
#
# **Takeaway.** Here *fixed* leads in images a second, *compile* in useful tokens: report both. QLoRA saves 10 GB once and pays 1 GB
# an example.

# %% [markdown]
# ## 4 · How often the compiler starts over
#
# **Question.** Do varying images make the compiler start over? And did they in the article, whose images are all 500 × 500?
#
# **Technique.** Code is compiled for the sizes that it meets. A *guard* checks them at each call. If it fails, the code is compiled
# again: a *recompilation*.


# %%
class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def timeline(lengths, dynamic):
    """(start, end) of each step, and of each time the compiler was at work."""
    torch.compiler.reset()
    steps, compiling = [], []
    torch._dynamo.on_compile_start(lambda _: compiling.append([time.perf_counter()]))
    torch._dynamo.on_compile_end(lambda _: compiling[-1].append(time.perf_counter()))
    network = nn.Sequential(*(Block() for _ in range(4))).to(lab.device)
    for block in network:  # blocks of one shape share their code
        block.compile(backend="eager", dynamic=dynamic)  # leave the backend out in your script
    for n in lengths:
        began = time.perf_counter()
        network(torch.randn(n, 64, device=lab.device)).square().mean().backward()
        steps.append([began, time.perf_counter()])
    torch.compiler.reset()
    return np.array(steps) - steps[0][0], np.array(compiling) - steps[0][0]


# %%
lengths = (96, 96, 80, 112, 64, 96)
for name, dynamic in {"exact sizes": False, "any size": True, "PyTorch's default": None}.items():
    steps, compiling = timeline(lengths, dynamic)
    found = [int(sum(began <= start < end for start, _ in compiling)) for began, end in steps]
    print(f"{name}: code compiled in each step", found)
fig, ax = plt.subplots(figsize=(7.2, 1.8))
for height, spans in enumerate((compiling, steps)):
    look = {"facecolor": plots.FILLS[height][0], "edgecolor": "white", "linewidth": 1.5}
    ax.broken_barh([(1e3 * s, 1e3 * (e - s)) for s, e in spans], (height, 0.8), **look)
ax.set(yticks=(0.4, 1.4), yticklabels=("compiler", "steps"), xlabel="ms")
ax.set_title("PyTorch's default: six steps, and the compiler at work (Dynamo alone)")
plt.show()

# %% [markdown]
# With exact sizes each new length is compiled anew. By default only the second length is, in step 3: the new code takes any length.
# Each counts twice: the first block's input has no gradient, so it gets code of its own.
#
# Reading a number off the device splits the code: a *graph break*. The published model counts image tokens on the device, to check
# them. A collator can say beforehand which patch each image token shows: its *source*.

# %%
IMAGE = processor.image_token_id


def by_mask(ids, text, image):  # the published model, in short
    there = ids == IMAGE
    if there.sum() != len(image):  # the host waits for the device
        raise ValueError("image tokens and their places differ in number")
    return text.masked_scatter(there[:, None], image)


def sources_of(height, width):
    """In the collator, for each image token of an image: 0 is a newline, 1 + k patch k of its tiles."""
    down, across = best_grid(height, width)
    whole, tiles = (1 + torch.arange((1 + down * across) * SIDE**2)).tensor_split([SIDE**2])
    grid = tiles.view(down, across, SIDE, SIDE).transpose(1, 2).reshape(down * SIDE, across * SIDE)
    scale = min(len(grid) / height, grid.shape[1] / width)
    top = (len(grid) - int(round(height * scale, 7))) // 2  # what shows padding goes
    left = (grid.shape[1] - int(round(width * scale, 7))) // 2
    grid = grid[top : len(grid) - top, left : grid.shape[1] - left]
    return torch.cat([whole, F.pad(grid, (0, 1)).flatten()])  # each line ends with a newline


def by_source(sources, text, image):  # where a token is text, its source is -1
    return torch.where(sources[:, None] >= 0, image[sources.clamp(min=0)], text)


# %%
for size in ((336, 336), (500, 500), (700, 480), (336, 1008)):
    assert torch.equal(sources_of(*size), geometry.sources(size))  # the package's
ids, sources = (
    torch.tensor([1, IMAGE, IMAGE, IMAGE, 5, 6, 2]),
    torch.tensor([-1, 1, 2, 0, -1, -1, -1]),
)
text, image = torch.randn(7, 4, device=lab.device), torch.randn(3, 4, device=lab.device)
ways = {by_mask: (ids.to(lab.device), image[[1, 2, 0]]), by_source: (sources.to(lab.device), image)}
merged = [merge(where, text, image) for merge, (where, image) in ways.items()]
torch.testing.assert_close(*merged)
for merge, (where, image) in ways.items():
    told = torch._dynamo.explain(merge)(where, text, image)
    print(f"{merge.__name__}: {told.graph_count} graphs, {told.graph_break_count} breaks")
torch.compiler.reset()

# %% [markdown]
# **Prediction.** How many recompilations do six steps (`tiny`: three) on the article's images take, the published model compiled as
# a whole? Images have one token count here, answers don't. Each piece between graph breaks is compiled by itself.

# %%
my_recompilations: float | None = None  # for example 8

lab.predict("recompilations on 500 x 500 images", my_recompilations, "recompilations")

# %% [markdown]
# Only the tracer, Dynamo, runs, on the smallest model. *sources*: they come from the collator, and the forward pass checks nothing
# on the device.

# %%
small = {
    name: open_workload(name, "tiny", device=lab.device) for name in (uniform.name, varied.name)
}
rewritten = A2_BASE.but(layers="rewritten")  # sources from the collator, no checks on the device
counted = {}
for images, workload in {"uniform": uniform.name, "varied": varied.name}.items():
    for how, recipe in {"": A2_BASE, ", sources": rewritten}.items():
        run = lab06_anyres.recompilations(small[workload], recipe, 3 if tiny else 6)
        tags = {"experiment": "recompilation", "images": images}
        run.tags = tags | ({"places": "collator"} if how else {})
        run.run = f"recompiles {images}{how}"
        counted[images + how] = lab.keep(run)
        print(f"{images}{how}: tokens {run.samples['tokens']},", end=" ")
        print(f"recompilations by step {run.samples['recompilations']}")
lab.verdict("A2.anyres.recompiles", "A2.anyres.cause")

# %% [markdown]
# With varying images the published model starts over in each of six steps, 20 pieces in all. With images of one size it does so in
# two: 3 pieces in step 1 already, 9 in step 2, where the answer is a token longer. So in the article only answers could do it, at
# the start. `TORCH_LOGS=recompiles` prints each.
#
# With sources one piece is left, in step 2, also where images vary.
#
# **Takeaway.** Have the collator compute sources, and keep checks off the device. Then one compiled model takes any image.

# %% [markdown]
# ## 5 · Half the time, as a sum
#
# **Question.** The article's step got 47 to 53 % shorter. Which part is due to constant shapes?
#
# **Technique.** Compiling alone made the article's step 11 to 20 % shorter. Small squares need fewer FLOPs, which shortens only
# what compiling leaves. What remains, the *rest*, may be due to constant shapes. A frozen weight takes 2 FLOPs a token in the
# forward pass, 2 in the backward pass. The tower only runs forward.


# %%
def step_flops(n, tiles):
    """FLOPs of a step on n tokens, and on tiles that the vision tower sees once."""
    products = 4 * n * (LAYERS * BLOCK + WORDS * WIDTH)
    attention = 12 * LAYERS * WIDTH * n * n / 2
    return products + attention + 24 * 577 * 23 * 1024**2 * tiles


for name, (n, tiles) in {"bf16": (2942, 5), "fixed": (2048, 3)}.items():
    assert abs(step_flops(n, tiles) / step_of[name].flops - 1) < 0.01  # the package's count
share = step_flops(2048, 3) / step_flops(2942, 5)
parts = {}
for compiling, whole in ((11, 47), (20, 53)):
    fewer = (100 - compiling) * (1 - share)
    parts[f"article, {whole} %"] = {"compiling": compiling, "fewer FLOPs": fewer}
    parts[f"article, {whole} %"]["rest"] = whole - compiling - fewer

# %% [markdown]
# **Prediction.** A fixed step computes 68 % of the FLOPs. How much shorter is it than BF16's if compiling alone saves 20 %, and
# nothing else is gained?

# %%
my_sum: float | None = None  # in percent

lab.predict("compiling and fewer FLOPs", my_sum, "%")


# %%
def sums(found):
    """The article's sums, and those of the cells of these runs."""
    lines = dict(parts)
    for batch in sorted({run.tags["batch"] for run in found}):
        tags = {"experiment": "methods", "batch": batch}
        three = [found.one(method=name, **tags) for name in ("bf16", "compile", "fixed")]
        if all(run and run.metric("step_ms") for run in three):
            # Making the data takes the host as long compiled or not.
            bf16, compiled, fixed = (r.metric("step_ms") - r.metric("data_ms") for r in three)
            less = 1 - three[2].metric("flops_per_step") / three[0].metric("flops_per_step")
            whole, gained = 100 * (1 - fixed / bf16), 100 * (1 - compiled / bf16)
            given = {"compiling": gained, "fewer FLOPs": (100 - gained) * less}
            card = f"{three[0].machine.get('gpu') or 'CPU'}, without data"
            line = given | {"rest": whole - sum(given.values())}
            lines[f"{card}, batch {batch}: {whole:.0f} %"] = line
    return pd.DataFrame(lines).T.rename_axis("step shorter by").reset_index()


seen = cells.values() if on_gpu else lab.references(experiment="methods")
lab.table(sums(Runs([*seen, *on_record])))
pairs = {"eager": ("bf16", "eager-fixed"), "compiled": ("compile", "fixed")}
for name, two in pairs.items():
    large, few = (Runs(seen).one(method=method, batch=4, again=False) for method in two)
    if large and few and large.ok and few.ok:
        less = few.metric("flops_per_step") / large.metric("flops_per_step") - 1
        print(f"Small inputs, {name}: {effect(large, few).text()}; FLOPs {less:.0%}")
        if large.recipe["compile"] != "off":
            print("recompilations on large ones:", large.metric("recompilations"))
lab.verdict("A2.fixed.speed")

# %% [markdown]
# It is 20 + 0.8 · 32 = 46 % shorter. The article's rest is 7 points; its ranges allow 1 to 13. On our H200s it is 2 to 4, at batch
# 2 even −2.
#
# Does the rest come from constant shapes? At batch 4 it can't: *compile* had rows of one length, too, and was compiled once. Small
# inputs save more than their FLOPs in eager mode as well: 35 to 37 % of the time without data, for 32 % of the FLOPs.
#
# FLOPs without padding to 2,048:

# %%
whole = step_flops(image_tokens(672, 672) + 14, 5)  # with 14 tokens of text
for size in ((336, 336), (336, 672), (336, 1008), (672, 672)):
    n, tiles = image_tokens(*size) + 14, 1 + np.prod(best_grid(*size))
    print(f"{size[0]} x {size[1]}: {n:,} tokens, {step_flops(n, tiles) / whole:.0%} of the FLOPs")

# %% [markdown]
# **Takeaway.** Compiling and smaller inputs make nearly all of the half here, constant shapes at most the rest.

# %% [markdown]
# ## 6 · Any shape, and fast
#
# **Question.** The article wishes for kernels that take any length, so that AnyRes is as fast as fixed shapes. How fast can it be
# today?
#
# **Is one length faster by itself?** One full image a step, all rows padded to one length. *padded* is compiled for that length.
# *padded, any* runs code that met other lengths before, and takes any. No block is computed again.

# %%
uniform.release_weights()
recipes = lab06_anyres.shape_recipes(lab.scale)
shaped = lab.measured_together(
    recipes | {f"{name} again": recipes[name] for name in ("bf16", "padded")},
    partial(lab06_anyres.any_shape, varied, 2 if tiny else 4),
)
columns = ("first_step_s", "ms_per_1k_tokens", "step_ms", "floor_ms", "useful_tokens")
columns += ("examples_per_s", "useful_tokens_per_s", "peak_allocated_gb")
rows = [run for run in shaped.values() if run.tags["experiment"] == "one shape"]
lab.show(rows, columns, experiment="one shape")
lab.verdict("A2.fixed.cause")

# %% [markdown]
# For *any* nothing was compiled: its first step took 0.2 s. One length took 1 % less time a token, between 2 % less and 3 % more.
#
# **Technique.** *Packing*: several examples share a row, and a mask keeps them apart.


# %%
def packed_mask(lengths):
    """[n, n]: may token i see token j? Only of its own example, and nothing that comes later."""
    example = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(example))
    return (example[:, None] == example) & (place[:, None] >= place)


lengths = [5, 9, 2]
q, k, v = torch.randn(3, 1, 4, sum(lengths), 8)
together = F.scaled_dot_product_attention(q, k, v, attn_mask=packed_mask(lengths))
alone = [x.split(lengths, dim=2) for x in (q, k, v)]
one_by_one = [
    F.scaled_dot_product_attention(*three, is_causal=True) for three in zip(*alone, strict=True)
]
torch.testing.assert_close(together, torch.cat(one_by_one, dim=2))

ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)  # what a kernel takes instead
course, _ = document_attention(None, q, k, v, None, 8**-0.5, boundaries=ends)
torch.testing.assert_close(together, course.transpose(1, 2))

# %% [markdown]
# On a GPU `torch.nn.attention.varlen.varlen_attn` takes boundaries, no mask: `varlen_attn(q, k, v, ends, ends, n, n,
# window_size=(-1, 0))`, n = max(lengths), q [tokens, heads, dim]. Its default is *not* causal. `AttentionInterface.register` gives
# it to transformers: see `packed_attention.py`.
#
# **A packed training step,** compiled as a whole, with section 4's sources. It gets no mask: transformers 5 finds the boundaries
# where `position_ids` start anew. Each example's first label must be −100: another text precedes it.

# %%
tiny_ones = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
tiny_ones |= {"num_attention_heads": 2}
reads = MistralConfig(**tiny_ones, num_key_value_heads=2, vocab_size=len(processor.tokenizer) + 1)
sees = CLIPVisionConfig(**tiny_ones, image_size=TILE, patch_size=14)
grids = processor.image_processor.image_grid_pinpoints
known = {"image_token_id": processor.image_token_id, "image_grid_pinpoints": grids}
known |= {"vision_config": sees, "text_config": reads}
llava = LlavaNextForConditionalGeneration(LlavaNextConfig(**known))
language, vision = llava.model.language_model, llava.model.vision_tower.requires_grad_(False)


# %%
def packed_loss(ids, labels, sources, position_ids, tiles):
    """The model's loss on one packed row [n], without the model's own checks."""
    seen = vision(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
    newline, patches = llava.model.image_newline[None], llava.model.multi_modal_projector(seen)
    text = language.embed_tokens(ids)
    embedded = by_source(sources, text, torch.cat([newline, patches.flatten(0, 1)]))
    how = {"position_ids": position_ids[None], "labels": labels[None], "use_cache": False}
    return llava(inputs_embeds=embedded[None], **how).loss


def packed_row(batch):
    """What the collator makes of a padded batch: no padding, and where each image token comes from."""
    keep = batch["attention_mask"].bool()
    ids, labels, lengths = batch["input_ids"][keep], batch["labels"][keep], keep.sum(1).tolist()
    sources, first, tiles = [], 0, []
    for size, pixels in zip(batch["image_sizes"].tolist(), batch["pixel_values"], strict=True):
        one = sources_of(*size)
        sources.append(torch.where(one > 0, one + first * SIDE**2, 0))
        tiles.append(pixels[: 1 + np.prod(best_grid(*size))])
        first += len(tiles[-1])
    places = torch.full_like(ids, -1).masked_scatter(ids == IMAGE, torch.cat(sources))
    position_ids = torch.cat([torch.arange(n) for n in lengths])  # each example starts anew
    return ids, labels, places, position_ids, torch.cat(tiles)


# %%
compiling = []
torch._dynamo.on_compile_start(lambda _: compiling.append(step))
compiled = torch.compile(packed_loss, backend="eager", dynamic=True)  # no backend in your script
for step, photographs in enumerate((leaves[:2], leaves[2:], leaves[1:3])):
    batch = collate(photographs)
    row = packed_row(batch)
    losses = {"packed": compiled(*row), "padded": llava(**batch).loss}
    weight = language.layers[0].self_attn.q_proj.weight
    slopes = [torch.autograd.grad(loss, weight)[0] for loss in losses.values()]
    torch.testing.assert_close(*losses.values())
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-5)
    print(f"{len(row[0]):,} tokens packed, {batch['input_ids'].numel():,} padded:", end=" ")
    print("one loss, one gradient; code compiled in this step:", compiling.count(step))
torch.compiler.reset()

# %% [markdown]
# **Optional: the loss in chunks.** Each chunk's logits are computed again in the backward pass, so never do all exist at once.


# %%
def chunked_loss(hidden, weight, targets, chunk=64):
    def piece(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(checkpoint(piece, *both, use_reentrant=False) for both in pieces)
    return total / (targets != -100).sum()


hidden, weight = torch.randn(200, 32, requires_grad=True), torch.randn(1000, 32)
targets = torch.randint(1000, (200,)).masked_fill(torch.rand(200) < 0.5, -100)
losses = {
    "whole": F.cross_entropy(hidden @ weight.T, targets),
    "chunked": chunked_loss(hidden, weight, targets),
    "the course's": linear_cross_entropy(hidden, weight, targets, chunk=64),
}
for loss in losses.values():
    torch.testing.assert_close(loss, losses["whole"])
    slopes = (
        torch.autograd.grad(each, hidden)[0]
        for each in (loss, F.cross_entropy(hidden @ weight.T, targets))
    )
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)

# %% [markdown]
# **All together.** The ladder starts with the plain loop on varied images. Each rung keeps the changes above it. *no host waits*
# has sources, a forward pass without checks, the fused AdamW, and reads no loss. *answers only* computes logits of answers alone.
#
# **Prediction.** What are the last rung's useful tokens a second, divided by the plain loop's?

# %%
my_gain: float | None = None  # for example 2

lab.predict("useful tokens a second, against the plain loop", my_gain, "x")

# %%
rungs = [run for run in shaped.values() if run.tags["experiment"] == "ladder"]
fig, ax = plt.subplots()
plots.ladder(ax, rungs, "ms_per_1k_useful_tokens")
plt.show()
columns = (
    "ms_per_1k_useful_tokens",
    "useful_tokens_per_s",
    "examples_per_s",
    "step_ms",
    "floor_ms",
)
lab.show(rungs, columns + ("mfu", "peak_allocated_gb"), experiment="ladder")
lab.verdict("A2.left.dynamic")

# %% [markdown]
# The last rung has 1.9 times the plain loop's useful tokens a second by mean rates, 1.8 by medians. Compiled blocks make most of
# it, 1.46x. *answers only* adds nothing that shows. *packed* adds 1.13x, within the noise of the loop. One image has no padding to
# remove; the row has four times the tokens, in twice the memory.
#
# **Takeaway.** Code for any length is about as fast as code for one: compile blocks.

# %% [markdown]
# ## 7 · FP8 weights, held once
#
# **Question.** The article's other wish: PEFT on FP8 weights that are held once, with as little memory as QLoRA. Can libraries do
# it?
#
# **Technique.** `quantized_model_init` has Transformer Engine build layers without a 16-bit weight. PEFT wraps such a layer in
# `lora.TeLinear`.


# %%
def fp8_only(linear):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    how = {"bias": False, "params_dtype": torch.bfloat16, "device": linear.weight.device}
    with torch.no_grad(), te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        new = te.Linear(linear.in_features, linear.out_features, **how)
        new.weight.copy_(linear.weight)  # quantised on the way
    return new.requires_grad_(False)


def in_fp8():
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    return te.autocast(enabled=True, recipe=Float8CurrentScaling())


# %% [markdown]
# The article left out the vision tower: Transformer Engine's FP8 takes multiples of 8 rows. A tile has 577: 24 · 24 and the class
# token.

# %%
refusal = {"experiment": "fp8-te vision"}
with lab.attempt("577 rows through te.Linear", **refusal):
    x = torch.randn(577, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = fp8_only(nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16))
    with in_fp8():
        layer(x[:576]).sum().backward()
    print("576 rows: forward and backward pass went well")
    message = ""
    try:
        with in_fp8():
            layer(x)
    except (AssertionError, ValueError, RuntimeError) as error:  # which one: see its version
        message = f"{type(error).__name__}: {error}"
    metrics = {"failed": int(bool(message)), "message": message}
    lab.keep(Run("06", "fp8-te vision", tags=refusal, metrics=metrics))
    print("577 rows:", message or "taken")
tower = nn.Linear(1024, 1024, device=lab.device).requires_grad_(False)
taken = FrozenFP8Linear.from_linear(tower)(torch.randn(577, 1024, device=lab.device))
print("577 rows through the frozen layer:", tuple(taken.shape))

# %% [markdown]
# Lab 05's frozen layer pads rows itself. It is *fp8-frozen* below, in four blocks with LoRA on all projections. *te* is Transformer
# Engine's layer: as it is, with transposed weights dropped after each step, or with *o_proj*, which the article calls sensitive,
# and *down_proj* in BF16.

# %%
width, blocks, length = (2048, 2, 512) if on_gpu else (256, 2, 128)
if lab.scale == "full":
    width, blocks, length = 4096, 4, 2048
mistral = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": blocks}
mistral |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 256}
mistral |= {"vocab_size": 512}
SENSITIVE = ("o_proj", "down_proj")


# %%
def with_lora(before=None, after=None, spared=()):
    """Four blocks whose layers are replaced `before` PEFT wraps them, or `after`."""
    torch.manual_seed(0)
    with torch.device(lab.device):
        model = MistralForCausalLM(MistralConfig(**mistral)).requires_grad_(False)
    model.to(torch.bfloat16 if on_gpu else torch.float32)
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    names.remove("lm_head")
    chosen = [name for name in names if not name.endswith(spared)]
    for name in chosen if before else ():
        model.set_submodule(name, before(model.get_submodule(name)))
    torch.manual_seed(1)  # the same adapters, whatever drew random numbers before
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=names), model)
    for name in chosen if after else ():
        layer = model.get_submodule(name)
        layer.base_layer = after(layer.base_layer)
    return model


# %%
def held(model):
    """Bytes on the GPU; on a CPU, of the model's tensors."""
    gc.collect()
    if on_gpu:
        return torch.cuda.memory_allocated()
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def drop_transposes(model):
    """Have Transformer Engine's FP8 weights keep one layout."""
    for layer in model.modules():
        if hasattr(getattr(layer, "weight", None), "update_usage"):
            layer.weight.update_usage(rowwise_usage=True, columnwise_usage=False)


# %%
def stepper(model, around=contextlib.nullcontext, dropping=False):
    """What trains on one text for a step, and returns the loss when all is done."""
    ids = (torch.arange(length, device=lab.device) * 7 % 512)[None]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step():
        with around():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dropping:
            drop_transposes(model)
        return loss.item()  # waits for the GPU

    return step


# %% [markdown]
# **Prediction.** Hopper's FP8 products take operands in one layout only, so the backward pass needs the weight transposed. How many
# bytes a parameter does Transformer Engine hold after some steps?

# %%
my_bytes: float | None = None  # for example 1

lab.predict("bytes a parameter after training, Transformer Engine", my_bytes)

# %%
makes = {"BF16": {}, "fp8-frozen": {"after": FrozenFP8Linear.from_linear}}
makes |= dict.fromkeys(("te, FP8 only", "te, transposes dropped"), {"before": fp8_only})
makes |= {"te, sensitive in BF16": {"before": fp8_only, "spared": SENSITIVE}}
steps, by_layer = {}, {}
for name, make in makes.items():
    if name.startswith("te, ") and len(steps) == 2 and name != "te, FP8 only":
        continue  # the first of them failed
    tags = {"experiment": "fp8 weights", "layer": name}
    with lab.attempt(name, instead=lambda: None, **tags):
        model = None  # of a make that failed
        empty, count = held(nn.Module()), blocks * 13 * width**2  # frozen parameters
        model = with_lora(**make)
        at_rest = held(model) - empty
        around = in_fp8 if "before" in make else contextlib.nullcontext
        step = stepper(model, around, dropping="dropped" in name)
        losses = [step() for _ in range(19)]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses.append(step())
        found = {"bytes_a_parameter": at_rest / count, "loss_drop": losses[0] - losses[-1]}
        found |= {"bytes_a_parameter_after": (held(model) - empty) / count}
        peak = torch.cuda.max_memory_allocated() - empty if on_gpu else None
        found |= {"peak_allocated_gb": peak / 1e9} if on_gpu else {}
        steps[name], by_layer[name] = step, Run("06", name, tags=tags, metrics=found)

# %%
by_layer["BF16 again"] = Run("06", "", tags=by_layer["BF16"].tags | {"again": True})
ms = {name: [] for name in by_layer}
turns, each = (2, 1) if tiny else (6, 5)
for turn in range(turns):
    for name in list(by_layer)[:: -1 if turn % 2 else 1]:
        step = steps[name.removesuffix(" again")]
        step()  # untimed: the one before had other shapes
        for _ in range(each):
            began = time.perf_counter()
            step()
            ms[name].append(1e3 * (time.perf_counter() - began))
for name, run in by_layer.items():
    run.samples = {
        "step_ms": ms[name],
        "round": [turn for turn in range(turns) for _ in range(each)],
    }
    run.metrics["step_ms"] = summarise(ms[name])
columns = ("bytes_a_parameter", "bytes_a_parameter_after", "peak_allocated_gb", "step_ms")
columns += ("speed-up", "loss_drop")
lab.show(lab.keep(by_layer), columns, experiment="fp8 weights")
lab.verdict("A2.left.fp8-once")
steps = model = None

# %% [markdown]
# Transformer Engine holds 2 bytes a parameter, as many as BF16: the weight and its transpose. With transposes dropped it holds 1.03
# between steps, as *fp8-frozen* does. Without FP8 in the two sensitive layers it holds 2 as well.
#
# QLoRA's memory isn't reached at batch 1: on another H200 *fp8-frozen* took 10.4 GB, *qlora* 8.1, as the verdict says. At batch 4
# it is: 16.3 GB against 16.9, as *qlora* pays in float32 for each example.
#
# FP8 took 1.4 to 1.7 times as long as BF16 here. Probably the host sets the pace: at the GPU's peak BF16's products take some 7 of
# the 26.4 ms, and FP8's layers launch more operations. In section 3's longer steps *fp8-frozen* took as long as BF16.
#
# **Takeaway.** Libraries can hold FP8 weights once between steps, if you drop the transposes. At batch 1 QLoRA takes less memory,
# at batch 4 no less.

# %% [markdown]
# ## 8 · The loss, or the seed?
#
# **Question.** The article compares losses after ten steps of one run each: FP8 +14 %, fixed shapes +2 %, QLoRA −2 %. How far apart
# are two seeds of *one* recipe?
#
# **Technique.** Pair the runs: one seed draws the same weights and data for both.


# %%
def final_loss(seed, rate):
    torch.manual_seed(seed)
    x, true, guess = torch.randn(64, 8), torch.randn(8, 1), torch.zeros(8, 1)
    for _ in range(20):
        off = x @ (guess - true)
        guess -= rate * 2 * x.T @ off / len(x)
    return off.square().mean().item()


one, other = (np.array([final_loss(seed, rate) for seed in range(5)]) for rate in (0.05, 0.051))
print(f"one recipe, five seeds: {one.min():.4f} to {one.max():.4f}")
print("the other against it, seed by seed:", [f"{change:+.1%}" for change in other / one - 1])

# %% [markdown]
# Paired, the toy's effect has one sign.
#
# **Prediction.** What is the spread of BF16's final loss over seeds, largest over smallest, in percent?

# %%
my_spread: float | None = None  # for example 5

lab.predict("spread of the loss over seeds", my_spread, "%")

# %%
start = A2_BASE.but(layers="rewritten", loss="answers", micro_batch=2)
start = start.but(learning_rate=6e-5 if lab.weights == "hub" else 2e-3)
trainings = {"bf16": start, "qlora": start.but(base_linear="nf4")}
trainings |= {"fixed": start.but(shapes="fixed"), "fp8-te": start.but(base_linear="fp8-te")}
by_seed = reference_runs("06").select(experiment="losses by seed").of_newest_host()
if seeds:
    scale_of_losses = lab.scale if lab.weights == "hub" else "tiny"
    learning = open_workload("llava-lora", scale_of_losses, lab.weights, lab.data, lab.device)
    trained = lab06_anyres.trained_on_seeds(learning, trainings, seeds, 4 if tiny else 10)
    by_seed = Runs(lab.keep(trained).values())
base = np.array(by_seed.one(method="bf16").samples["final_loss"])
for run in list(by_seed)[1:]:
    against = np.array(run.samples["final_loss"]) / base - 1
    print(f"{run.tags['method']}, against BF16 seed by seed:", [f"{x:+.2%}" for x in against])
lab.table(to_frame(by_seed)[["method", "start_loss", "final_loss"]])

# %% [markdown]
# Three seeds of BF16 end 3.8 % apart. Paired, each method is within 0.12 % of BF16. Here a seed also draws the base; a real base is
# one for all. So this only shows how to compare.
#
# **Takeaway.** Pair runs by seed before you believe a difference.

# %% [markdown]
# ## 9 · Which method for me?
#
# **Question.** The article's chart says: few steps, FP8; 135 to 220 steps, FP8 with fixed shapes, compiled; more, fixed shapes.
# Does that follow?
#
# **Technique.** A method's total time is a line over steps: its first step, then the same for each later one. `lab06_advisor.py`
# has the article's step times, computed from its percentages and break-evens.
#
# **Prediction.** Fixed shapes start with 106 s and take 0.515 s a step; with FP8 as well, 57 and 0.579. From which step on is the
# one without FP8 ahead?

# %%
my_overtaking: float | None = None  # for example 220

lab.predict("steps until fixed shapes beat fixed shapes with FP8", my_overtaking, "steps")


# %%
def crossings(methods):
    """[(steps, who was fastest, who is from there on)] of name -> (first step, later steps) in s."""
    found, now = [], min(methods, key=lambda name: methods[name][0])
    while True:
        first, each = methods[now]
        ahead = {
            other: (start - first) / (each - later)
            for other, (start, later) in methods.items()
            if later < each
        }
        if not ahead:
            return found
        after = min(ahead, key=ahead.get)
        found.append((ahead[after], now, after))
        now = after


published = lab06_advisor.PUBLISHED
article_says = crossings({name: tuple(line) for name, *line, _ in published.itertuples()})
for steps, before, after in article_says:
    print(f"{steps:5,.0f} steps: {before} gives way to {after}")


# %%
def drawn(options, title):
    """Total time of each method as a share of BF16's, with the crossings of the lowest line."""
    methods = {name: (first, each) for name, first, each, *_ in options.itertuples()}

    def share(name, n):
        (first, each), (of_first, of_each) = methods[name], methods["bf16"]
        return (first + each * n) / (of_first + of_each * n)

    n = np.geomspace(1, 10_000, 200)
    fig, ax = plt.subplots(figsize=(7.2, 3.4))
    for name in methods:
        color, style = looks[name]
        ax.plot(n, share(name, n), style, color=color, label=name)
    for steps, _, after in crossings(methods):
        ax.plot(steps, share(after, steps), "o", color=plots.INK)
    ax.set(xscale="log", xlabel="steps", ylabel="total time, of BF16's", title=title)
    ax.set(xlim=(1, 10_000), ylim=(0.3, 2))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


looks = {"bf16": ("C0", "-"), "fp8-te": ("C1", "--"), "qlora": (plots.INK, "-.")}
looks |= {"compile": ("C2", "-."), "compile-fp8-te": ("C3", ":")}
looks |= {"fixed": ("C4", "-"), "fixed-fp8-te": ("grey", "--")}
drawn(published, "by the article's numbers")

# %% [markdown]
# The chart doesn't follow. FP8 alone is fastest until about 150 steps, FP8 with fixed shapes until about 770. The chart's limits,
# 135 and 220, are break-evens with *BF16*.

# %%
my_vram_gb, my_batch, my_steps = 48, 4, 2000

measured = read_runs(lab.results_dir if on_gpu else REFERENCE, "06")
with lab.attempt("advice from measured runs"):
    options = lab06_advisor.options_from(measured, my_batch)
    advice = lab06_advisor.advise(options, my_vram_gb, my_steps).reset_index()
    lab.table(advice.set_axis(["", "first step, s", "step, s", "memory, GB", "in all, s"], axis=1))
    chosen = options[options.index.isin(published.index)]
    if "bf16" in chosen.index:
        drawn(chosen, f"measured {'here' if on_gpu else 'on our H200'}")

# %%
answers = lab06_advisor.guide(lab06_advisor.options_from(measured, 4))
if on_gpu and answers:
    tags = {"experiment": "guide", "batch": 4}
    lab.keep(Run("06", "guide", tags=tags, metrics=answers))
lab.verdict("A2.guide.memory", "A2.guide.few-steps")

# %% [markdown]
# Here *fixed* overtakes BF16 after six steps: blocks compile in 9 s, the article's model in 106.
#
# **Takeaway.** First decide: full images or small squares? GB are allocated; a card needs more:
#
# | you need | take |
# |---|---|
# | small squares | *fixed*; its padding could go, too |
# | full images, 28 GB | section 6's *blocks compiled*, batch 1, no block twice |
# | full images, 17 GB | *fp8-frozen* at batch 4: 16.3 GB; of the article's methods *qlora*: 16.9 GB, slower |

# %% [markdown]
# ## Exercises
#
# The easiest first. `lab.solution("06.1")` shows how.

# %%
from labutils.course.exercises import check, faster_than, smaller_than

# %% [markdown]
# **1. Caught up.** A method starts with 60 s and takes 0.5 s a step, another starts with 2 s and takes 0.9 s. After how many steps
# has the first caught up?

# %% tags=["exercise"]
my_crossing = None  # your number of steps
print(check("06.1", my_crossing))

# %% [markdown]
# **2. Useful tokens.** On another H200 BF16 trains on 2,942 useful tokens in 480 ms. A fixed example has 2,048 tokens, 1,190 of
# them useful. How short must its step be for as many useful tokens a second?

# %% tags=["exercise"]
my_step_ms = None  # your number of milliseconds
print(check("06.2", my_step_ms))

# %% [markdown]
# **3. Pack.** `one_by_one` runs attention on 128 short examples, one after another. Write `packed`: the same outputs from one call,
# at least twice as fast.

# %% tags=["exercise"]
torch.manual_seed(0)
to_qkv = torch.randn(64, 3 * 64, device=lab.device) / 8


def attended(x, mask=None):
    """x [n, 64] -> [n, 64]"""
    q, k, v = (x @ to_qkv).chunk(3, dim=-1)
    how = {"attn_mask": mask, "is_causal": mask is None}
    return F.scaled_dot_product_attention(q[None], k[None], v[None], **how)[0]


def one_by_one(examples):
    """128 tensors [n, 64] -> one of [all tokens, 64]"""
    return torch.cat([attended(x) for x in examples])


def packed(examples):
    return one_by_one(examples)  # your code instead


def short_examples(seed: int) -> tuple:
    torch.manual_seed(seed)
    return ([torch.randn(2 + n % 3, 64, device=lab.device) for n in range(128)],)


print(faster_than(3, one_by_one, packed, short_examples, times=2, tolerance=1e-3))

# %% [markdown]
# **4. Answers only.** Of 512 tokens 16 have a target. `from_all` computes logits for all. Write `from_answers`: the same loss and
# gradient, and at most a tenth of the bytes kept for the backward pass.

# %% tags=["exercise"]
head = nn.Linear(64, 2000, bias=False, device=lab.device).requires_grad_(False)


def from_all(hidden, targets):
    """hidden [512, 64], targets [512], -100 where there is none -> the mean loss"""
    return F.cross_entropy(head(hidden), targets)


def from_answers(hidden, targets):
    return from_all(hidden, targets)  # your code instead


def few_targets(seed: int) -> tuple:
    torch.manual_seed(seed)
    targets = torch.full((512,), -100, device=lab.device)
    targets[torch.randperm(512)[:16]] = torch.randint(2000, (16,), device=lab.device)
    return torch.randn(512, 64, device=lab.device).requires_grad_(), targets


print(smaller_than(4, from_all, from_answers, few_targets, share=0.1, module=head))

# %% [markdown]
# ## What to read on
# - H. Liu and others: *[LLaVA-NeXT](https://llava-vl.github.io/blog/2024-01-30-llava-next/)*, 2024, where AnyRes comes from.
# - PyTorch: [dynamic shapes](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_dynamic_shapes.html),
#   guards and recompilations.
# - M. Krell and others: *[Efficient Sequence Packing without Cross-contamination](https://arxiv.org/abs/2107.02027)*, 2021.
#
# Next: lab 07, four bits.


# %%
def truths(runs):
    """What takes a GPU: where two lines of memory cross, useful tokens gained, bytes held."""
    frame = to_frame(runs.select(experiment="methods", again=False))
    frame = frame.reindex(columns=["batch", "method", "peak_allocated_gb"]).dropna()
    peaks = frame.pivot(index="batch", columns="method", values="peak_allocated_gb")
    more_gb = peaks.reindex(columns=["bf16", "qlora"]).diff(axis=1)["qlora"].dropna()
    slope, start = np.polyfit(more_gb.index, more_gb, 1) if len(more_gb) > 1 else (0, 0)
    rungs = runs.select(experiment="ladder", again=False)
    speed = [run.metric("useful_tokens_per_s") for run in rungs if run.ok]
    plain = runs.select(experiment="ladder", rung="bf16")  # measured twice
    plain = [run.metric("useful_tokens_per_s") for run in plain if run.ok]
    by_te = runs.one(experiment="fp8 weights", layer="te, FP8 only")
    held_by_te = by_te.metric("bytes_a_parameter_after") if by_te else None
    return {
        "batch from which QLoRA takes more memory": -start / slope if slope else None,
        "useful tokens a second, against the plain loop": max(speed) / np.mean(plain)
        if plain
        else None,
        "bytes a parameter after training, Transformer Engine": held_by_te,
    }


# %%
here = truths(Runs([*cells.values(), *shaped.values(), *by_layer.values()]))
here |= {
    "tokens of a 500 x 500 image": square,
    "useful tokens of a fixed batch": 100 * useful["fixed"],
    "recompilations on 500 x 500 images": sum(counted["uniform"].samples["recompilations"]),
    "compiling and fewer FLOPs": sum(
        parts["article, 53 %"][name] for name in ("compiling", "fewer FLOPs")
    ),
    "spread of the loss over seeds": 100 * (base.max() / base.min() - 1),
    "steps until fixed shapes beat fixed shapes with FP8": article_says[-1][0],
}
lab.done(here, truths(Runs([*lab.references(), *on_record])))
