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
# # Lab 01 · The mathematics of LoRA
#
# Every lab after this one trains with LoRA, low-rank adaptation. Article A1 introduces it in one paragraph: leave the
# pretrained weight $W$ alone, and train a correction that is the product of two thin matrices, $W' = W + BA$. In this
# lab you test what follows from that sentence: how much there is to train, what such a correction can express, how fast
# it is, and how much memory it saves.
#
# **After this lab you can**
# - write a LoRA layer in a dozen lines, and show that it computes what PEFT's does;
# - count what LoRA trains in a model that does not fit your machine, without downloading or allocating it;
# - say what a rank can and can't express, and compare it with the best that any matrix of that rank can do;
# - choose the order of the products, and say when fewer operations do not mean less time;
# - merge an adapter, take it out again, swap two on one base, and know what rounding costs you;
# - say what training memory consists of, and which part of it LoRA saves.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 1 minute |
# | `full` | a GPU of 40 GB | 1 minute |
#
# You need no network: the models are built from their published sizes. Most of this lab is mathematics and counting, which
# hold on any machine. Where times or memory are measured, our H200's numbers stand beside yours.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("01", globals())

# %%
import copy
import tempfile
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import nn

from labutils.course import plots
from labutils.layers import lora as adapters
from labutils.layers.lora import attach_lora, count_parameters, count_trainable, lora_parameters
from labutils.profiling import cuda
from labutils.profiling.memory import measured
from labutils.profiling.memory_model import planned, saved_for_backward
from labutils.results.records import Run, summarise

plots.use_style()
torch.manual_seed(0)
tiny = lab.scale == "tiny"
d, rows = (
    (256, 256) if tiny else (4096, 4096)
)  # width of the layers that we compute with, and rows of their input
if lab.device == "cpu":
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and times are steadier

# %% [markdown]
# ## 1 · A LoRA layer from scratch
#
# **Question.** A frozen linear layer computes $y = xW^\top$. LoRA adds $\frac{\alpha}{r}\,(xA^\top)B^\top$, where $A$ has
# the shape $r \times k$, $B$ has the shape $d \times r$, and the *rank* $r$ is small. Is that all there is to it?
#
# It is: the class below is the whole method. $A$ starts random and $B$ starts at zero, so their product is zero, and
# training begins exactly at the pretrained model. The factor $\alpha/r$ is there for convenience. It is meant to keep the
# correction at about the same size when you change the rank, so that you need not tune the learning rate again.


# %%
class LoRA(nn.Module):
    """y = base(x) + alpha/r (x A^T) B^T"""

    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.A = nn.Parameter(torch.randn(r, base.in_features, device=base.weight.device) / r)
        self.B = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


# %% [markdown]
# Most training scripts take LoRA from the library PEFT. If our class is right, then its outputs and gradients agree with
# those of PEFT's layer, up to float32 rounding. We give both the same $A$, and the same $B$, which is no longer zero.

# %%
base = nn.Linear(d, d, device=lab.device)
ours, theirs = LoRA(copy.deepcopy(base), r=8, alpha=16), nn.Sequential(copy.deepcopy(base))
A, B = attach_lora(theirs, ("0",), rank=8, alpha=16, kind="peft")
with torch.no_grad():
    A.copy_(ours.A)
    B.copy_(ours.B.normal_(std=0.02))

# %%
x = torch.randn(64, d, device=lab.device)
for layer in (ours, theirs):
    layer(x).square().mean().backward()
differences = {
    "forward": (ours(x) - theirs(x)).abs().max() / theirs(x).abs().max(),
    "gradient of A": (ours.A.grad - A.grad).abs().max() / A.grad.abs().max(),
    "gradient of B": (ours.B.grad - B.grad).abs().max() / B.grad.abs().max(),
}
found = [(name, value.item()) for name, value in differences.items()]
lab.table(("LoRA from scratch against PEFT", "largest difference, relative"), *found)

# %% [markdown]
# The two agree: a difference is 0 or a few times $10^{-7}$, which is the precision of float32. In `labutils.layers.lora` you
# find this layer as the labs use it (kind `"plain"`) beside PEFT's (kind `"peft"`), and the package's tests compare the two
# over random shapes, ranks and dtypes.
#
# The article also says that $W$ stays as it was. We train for 20 steps and look for the largest change in it.

# %%
frozen = copy.deepcopy(ours.base.state_dict())
optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2)
losses = []
for _ in range(20):
    loss = (ours(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
change = max((p - frozen[name]).abs().max().item() for name, p in ours.base.state_dict().items())
metrics = {
    f"peft_{name.split()[-1]}_difference": value.item() for name, value in differences.items()
}
lab.keep(
    Run(
        "01",
        "equivalence",
        tags={"experiment": "equivalence"},
        metrics=metrics | {"base_change": change, "loss": losses},
    )
)
print(
    f"20 steps took the loss from {losses[0]:.3g} to {losses[-1]:.3g}; largest change of a frozen number: {change:g}"
)
lab.verdict("A1.lora.base-untouched");

# %% [markdown]
# **Takeaway.** LoRA adds a second path beside each chosen layer. The pretrained weights take part in every step but are
# never written to, so one copy of them can serve any number of adapters.

# %% [markdown]
# ## 2 · What LoRA trains
#
# **Question.** To train a $d \times k$ matrix in full means to train $dk$ numbers. LoRA trains $dr + rk = (d + k)\,r$. How
# many times fewer is that in A1's example, $d = k = 4096$ and $r = 8$?
#
# **Your prediction:** put a number in place of `None` and run the cell.

# %%
times_fewer = None  # how many times fewer parameters for d = k = 4096, r = 8
lab.predict("times fewer parameters at d = 4096, r = 8", times_fewer, "x")

# %%
full, low_rank = 4096 * 4096, lora_parameters(4096, 4096, r=8)
with torch.device("meta"):  # shapes without memory
    layer = nn.Sequential(nn.Linear(4096, 4096, bias=False))
attach_lora(layer, ("0",), rank=8, alpha=8, kind="plain")
assert (count_parameters(layer) - count_trainable(layer), count_trainable(layer)) == (
    full,
    low_rank,
)
print(f"full {full:,}, LoRA {low_rank:,}: {full / low_rank:.0f} times fewer")

# %% [markdown]
# A model has many layers, and LoRA is attached to some of them only. What is its share of a whole model?
#
# We count it in the three models that this course trains, with LoRA on the layers that each article chose. On PyTorch's
# *meta* device a model has shapes but no memory, so its size doesn't matter. Three short functions build the models from
# their published architectures; skim them.

# %%
from diffusers import UNet2DConditionModel
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def sd15_unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=64, cross_attention_dim=768
    )  # diffusers' other defaults are SD1.5's


def qwen3_8b() -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))


# %%
def llava_next_7b() -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    mistral = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 32064,
    } | heads
    eye = {
        "image_size": 336,
        "patch_size": 14,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
    }  # CLIP ViT-L/336
    eye |= {"num_attention_heads": 16, "intermediate_size": 4096, "projection_dim": 768}
    text = mistral | {"model_type": "mistral", "sliding_window": None}
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(text_config=text, vision_config=eye | {"model_type": "clip_vision_model"})
    )


# %%
attention, everything = (
    ("to_q", "to_k", "to_v", "to_out.0"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
)
everything += ("gate_proj", "up_proj", "down_proj")
MODELS = {  # name -> how it is built, what is adapted and at which rank
    "sd15": (sd15_unet, attention, 4),
    "qwen3_8b": (qwen3_8b, everything, 8),
    "llava_7b": (llava_next_7b, everything, 8),
}
NAMES = {"sd15": "SD1.5 UNet", "qwen3_8b": "Qwen3-8B", "llava_7b": "LLaVA-NeXT 7B"}


# %%
def on_meta(name: str, lora: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without memory, with or without LoRA on what its article adapts."""
    build, targets, rank = MODELS[name]
    with torch.device("meta"):
        model = nn.Module.to(build(), dtype)
    if lora:
        model.requires_grad_(False)
        attach_lora(
            model.model.language_model if name == "llava_7b" else model,
            targets,
            rank,
            2 * rank,
            "plain",
        )
    return model


# %%
counts = {"full_d4096": full, "lora_d4096_r8": low_rank}
for name, (_, _, rank) in MODELS.items():
    counts[f"{name}_total"] = count_parameters(on_meta(name, lora=False))
    counts[f"{name}_lora_r{rank}"] = count_trainable(on_meta(name, lora=True))
lab.keep(Run("01", "lora-counts", tags={"experiment": "lora-counts"}, metrics=counts));

# %%
pairs = {"a layer, d = 4096, r = 8": {"all weights": full, "LoRA": low_rank}}
for name, (_, _, rank) in MODELS.items():
    both = counts[f"{name}_total"], counts[f"{name}_lora_r{rank}"]
    pairs[f"{NAMES[name]}, r = {rank}"] = dict(zip(("all weights", "LoRA"), both, strict=True))
figure, ax = plt.subplots()
pd.DataFrame(pairs).T.plot.barh(ax=ax, logx=True, color=[plots.NAVY, plots.AMBER])
ax.invert_yaxis()
ax.set_xlabel("parameters (each mark of the axis is a factor of ten)")
plt.show()
shares = [
    (name, *both.values(), f"{both['LoRA'] / both['all weights']:.3%}")
    for name, both in pairs.items()
]
lab.table(("what is trained", "parameters", "LoRA trains", "share"), *shares)
lab.verdict("A1.lora.count");

# %% [markdown]
# The article's example is a single layer. Across a whole model the share depends on which layers are adapted: about one
# thousandth in SD1.5, where only attention is, and nearly three thousandths where all projections of a language model are.
#
# **Takeaway.** LoRA trains about a thousandth of a model's numbers. Whether it therefore takes a thousandth of the time or
# of the memory is another question, which sections 4 and 6 answer.

# %% [markdown]
# ## 3 · What a rank can express
#
# **Question.** The product $BA$ has at most rank $r$. Suppose we knew the correction that a task needs: a matrix $\Delta W$
# of rank 8 with eight equally strong directions. How close can LoRA of rank 4 come to it?
#
# How close *any* matrix of rank 4 can come has been known since 1936. Eckart and Young proved that the best approximation
# of rank $r$ keeps the $r$ largest singular values $\sigma_i$ of a matrix and drops the others. So no training whatever
# can bring the relative error below $\sqrt{\sum_{i>r}\sigma_i^2 / \sum_i \sigma_i^2}$.
#
# **Your prediction:** the error that remains at rank 4, in percent of the correction's size.

# %%
error_at_rank_4 = None  # what is left over, in percent of the size of the correction
lab.predict("error of rank 4 on a correction of rank 8", error_at_rank_4, "%")

# %% [markdown]
# Does *gradient descent* get that far? That is not obvious, because the problem is not convex in $A$ and $B$ together. So
# we train adapters of several ranks on data made by $W + \Delta W$. The inputs are *white* (their covariance is the
# identity), which makes the loss exactly the squared distance between $BA$ and $\Delta W$.
#
# A second correction is closer to real ones. Its singular values fall off gradually, so that no rank is the right one.

# %%
width, steps, ranks = (64 if tiny else 512), 250, (1, 2, 4, 6, 8, 12, 16)
U, V = (torch.linalg.qr(torch.randn(width, width, device=lab.device))[0] for _ in range(2))
values = {
    "eight equal singular values": (torch.arange(width, device=lab.device) < 8).float(),
    "gradually falling ones": 1 / torch.arange(1, width + 1, device=lab.device),
}
targets = {name: (U * sigma) @ V.T * (width**0.5 / sigma.norm()) for name, sigma in values.items()}


# %%
def recover(target: torch.Tensor, rank: int, seed: int) -> float:
    """Train LoRA from its usual start towards `target`; the relative error that remains."""
    layer = nn.Sequential(nn.Linear(width, width, bias=False, device=lab.device))
    A, B = attach_lora(layer, ("0",), rank, rank, "plain", seed=seed)
    x = torch.linalg.qr(torch.randn(width, width, device=lab.device))[
        0
    ]  # white: the covariance is the identity
    y = x @ (layer[0].weight + target).T
    optimizer = torch.optim.Adam([A, B], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - y).square().sum().backward()
        optimizer.step()
        schedule.step()
    return ((B @ A - target).norm() / target.norm()).item()


# %%
found, best, sweep = {}, {}, Run("01", "rank-sweep", tags={"experiment": "rank-sweep"})
for name, target in targets.items():
    sigma = torch.linalg.svdvals(target)
    for r in ranks:
        best[name, r] = (sigma[r:].norm() / sigma.norm()).item()
        found[name, r] = [recover(target, r, seed) for seed in range(3)]
        key = f"{name.split()[0]}_r{r}"
        sweep.samples[key] = found[name, r]
        sweep.metrics |= {key: summarise(found[name, r]), f"{key}_best": best[name, r]}
lab.keep(sweep);

# %%
figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.2, 3.4))
for ax, name in zip(axes, targets, strict=True):
    ax.plot(
        ranks,
        [100 * best[name, r] for r in ranks],
        color=plots.GREY,
        label="best of its rank (SVD)",
    )
    for seed in range(3):
        errors = [100 * found[name, r][seed] for r in ranks]
        label = "LoRA, trained (3 starts)" if seed == 0 else None
        ax.plot(
            ranks,
            errors,
            "o",
            color=plots.RUST,
            markerfacecolor="none",
            markersize=5 + 2 * seed,
            label=label,
        )
    ax.set(title=name, xlabel="rank r", xticks=ranks, ylim=(-4, 104))
axes[0].set_ylabel("error, % of the correction")
axes[1].legend()
plt.show()

# %% [markdown]
# In both pictures the circles lie on the line: training reaches the theoretical optimum, from each of the three starts (or
# misses it by very little). On the left, an adapter with fewer than 8 directions is off by the weight of those it lacks,
# and one with 8 or more is not off at all. Rank 12 or 16 does no harm there; it only costs parameters.
#
# **Takeaway.** The rank limits what LoRA can learn, and training gets up to that limit. Which rank a real task needs is not
# known in advance. That small ranks do well in practice suggests that real corrections have few strong directions: they
# look like the right-hand picture with a steeper fall.

# %% [markdown]
# ## 4 · $(xA^\top)B^\top$ or $x(BA)^\top$
#
# **Question.** A product of three matrices can be computed in two orders, with the same result. The number of
# floating-point operations differs. For $n$ rows of input it is
#
# | order | forward | backward |
# |---|---|---|
# | thin: $(xA^\top)B^\top$ | $2nr(d+k)$ | $4nr(d+k)$ |
# | dense: $x(BA)^\top$ | $2ndk + 2rdk$ | $4ndk + 6rdk$ |
#
# For a square layer, thin needs about $d/2r$ times fewer: 256 times at $d = 4096$ and $r = 8$. Article A3 names this choice
# among the things that make unsloth, a training library, fast. How many times *faster* is it?
#
# **Your prediction:** forward, at the larger of the two sizes below.

# %%
times_faster = None  # forward, thin against dense, on this machine, at the larger size below
lab.predict("thin products are faster than dense ones, forward", times_faster, "x")

# %%
dtype, r = (torch.float32 if lab.device == "cpu" else torch.bfloat16), 8
sizes = {
    "like SD1.5's first level": (1024 if tiny else 16384, 320),  # rows, width
    "like a language model": (512, 1024) if tiny else (4096, 4096),
}


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=lab.device, dtype=dtype)


# %% [markdown]
# Here are both orders, forward and backward. $G$ is the gradient of the layer's output. The backward pass turns it into the
# gradients of $A$, $B$ and $x$. (The pretrained $W$ is frozen, and only passes the gradient on.)


# %%
def thin(x: torch.Tensor, G: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> dict:
    h = x @ A.T  # kept from the forward pass

    def backward() -> tuple:
        gh = G @ B
        return gh.T @ x, G.T @ h, gh @ A

    return {"forward": lambda: (x @ A.T) @ B.T, "backward": backward}


def dense(x: torch.Tensor, G: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> dict:
    def backward() -> tuple:
        gW = G.T @ x
        return B.T @ gW, gW @ A.T, G @ (B @ A)

    return {"forward": lambda: x @ (B @ A).T, "backward": backward}


# %%
times = {}
for size, (n, width) in sizes.items():
    x, G, W = random_matrix(n, width), random_matrix(n, width), random_matrix(width, width)
    A, B = random_matrix(r, width), random_matrix(width, r)
    frozen = {"forward": lambda x=x, W=W: x @ W.T, "backward": lambda G=G, W=W: G @ W}
    ways = {"frozen layer": frozen, "thin": thin(x, G, A, B), "dense": dense(x, G, A, B)}
    both = [(way["forward"](), *way["backward"]()) for way in (ways["thin"], ways["dense"])]
    for one, other in zip(*both, strict=True):  # the two orders give the same, up to rounding
        assert (one - other).norm() < 0.02 * other.norm()
    times[size] = {
        name: {d: cuda.timed(call, budget_s=0.3) for d, call in way.items()}
        for name, way in ways.items()
    }

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4))
for ax, (size, (n, width)) in zip(axes, sizes.items(), strict=True):
    fills = ((plots.MIST, ""), (plots.NAVY, ""), (plots.AMBER, "///"))
    plots.grouped(ax, times[size], "ms (median, p10-p90)", fills)
    ax.set_title(f"{size}\n{n} rows, width {width}")
figure.legend(
    *axes[0].get_legend_handles_labels(), title=f"r = {r}", loc="outside lower center", ncols=3
)
plt.show()

# %%
short, samples, metrics, lines = dict(zip(sizes, ("sd15", "llm"), strict=True)), {}, {}, []
theirs = run.metric if (run := lab.reference(experiment="order")) else {}.get
for size, (n, k) in sizes.items():
    ms = {
        name: {way: median(t) for way, t in by_pass.items()}
        for name, by_pass in times[size].items()
    }
    for name, by_pass in times[size].items():
        samples |= {
            f"{short[size]}_{name}_{way}_ms".replace(" ", "_"): t for way, t in by_pass.items()
        }
    fewer = {  # dense over thin, from the table above
        "forward": (2 * n * k**2 + 2 * r * k**2) / (4 * n * r * k),
        "backward": (4 * n * k**2 + 6 * r * k**2) / (8 * n * r * k),
    }
    for way, ratio in fewer.items():
        faster = ms["dense"][way] / ms["thin"][way]
        metrics |= {
            f"{short[size]}_{way}_flops_ratio": ratio,
            f"{short[size]}_{way}_speedup": faster,
        }
        h200 = theirs(f"{short[size]}_{way}_flops_ratio"), theirs(f"{short[size]}_{way}_speedup")
        lines.append((f"{size}, {way}", *(f and f"{f:.3g}x" for f in (ratio, faster, *h200))))
head = (
    "thin against dense",
    "fewer operations",
    "faster",
    "H200: fewer operations",
    "H200: faster",
)
lab.table(head, *lines)
metrics |= {name: summarise(t) for name, t in samples.items()}
order_run = lab.keep(
    Run("01", "order", tags={"experiment": "order"}, metrics=metrics, samples=samples)
)

# %% [markdown]
# Compare "fewer operations" with "faster". On the H200, whose sizes are larger, the thin order is several times faster at a
# language model's width, but by far less than the operations promise. At SD1.5's small width it gains next to nothing. Lab
# 00 explains why: a product with eight columns does very little arithmetic on each byte that it reads, so it waits for
# memory, and a short kernel waits for its launch as well. On a CPU, where launches are cheap and arithmetic is slow, time
# follows the operations more closely.
#
# **Takeaway.** A smaller number of operations is a promise, and only the clock proves it. At a language model's width thin
# is the right order by a wide margin. At small widths on a GPU the dense order can be as good, and lab 04 makes use of
# that.

# %% [markdown]
# ## 5 · Merge, take out, swap
#
# **Question.** After training, $W + \frac{\alpha}{r}BA$ can be added up once and stored in place of $W$. Then the adapter
# costs no time at all. But weights are usually stored in half precision. How much of the correction does rounding take, and
# how exactly can the adapter be taken out again?
#
# Suppose that the correction is one percent of the weight in size.
#
# **Your prediction:** the part of the correction that is lost by merging it into bfloat16 weights, in percent.

# %%
lost_in_bf16 = None  # how much of the correction rounding takes when it is merged into bfloat16 weights, in percent
lab.predict("part of the correction lost by merging into bf16", lost_in_bf16, "%")


# %%
def layer_with_adapter(dtype: torch.dtype) -> nn.Module:
    """A frozen layer, and on it an adapter whose correction has one percent of the weight's size."""
    model = nn.Sequential(nn.Linear(d, d, bias=False, device=lab.device, dtype=dtype))
    A, B = attach_lora(model, ("0",), rank=8, alpha=8, kind="plain", seed=1)
    with torch.no_grad():
        B.normal_()
        B.mul_(0.01 * model[0].weight.float().norm() / (B @ A).norm())
    return model


# %%
def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def merged_and_back(dtype: torch.dtype) -> tuple[float, float]:
    """What merging loses of the correction, and how far off the weights are after ten merges taken out again."""
    model = layer_with_adapter(dtype)
    before = model[0].weight.double().clone()
    update = model[0].lora_B["default"].weight @ model[0].lora_A["default"].weight
    adapters.merge(model)
    lost = relative(model[0].weight.double() - before, update)
    adapters.unmerge(model)
    for _ in range(9):
        adapters.merge(model)
        adapters.unmerge(model)
    return lost, relative(model[0].weight, before)


# %%
lines, metrics = [], {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    lost, back = merged_and_back(dtype)
    metrics |= {f"{name}_lost": lost, f"{name}_off_after_unmerge": back}
    lines.append((name, f"{lost:.2%}", f"{back:.1e}"))
lab.table(
    (
        "weights in",
        "of the correction, lost by merging",
        "weights off by, after ten merges and unmerges",
    ),
    *lines,
)

# %% [markdown]
# Rounding acts on the *sum*. Its steps are as coarse as the weight's size demands, and the correction is a hundred times
# smaller than the weight. So in `bfloat16` a good part of the correction becomes rounding noise. Where that matters, keep
# the adapter beside the weights, or merge it into float32 ones.
#
# Adapters kept beside the weights can also be swapped. We train two on one base, each on a task of its own, and look at the
# error of both on both tasks.

# %%
model = nn.Sequential(nn.Linear(d, d, bias=False, device=lab.device))
x, tasks = torch.randn(rows, d, device=lab.device), {}
for seed, name in enumerate(("portrait", "landscape")):
    change = torch.randn(d, 4, device=lab.device) @ torch.randn(4, d, device=lab.device) / d
    tasks[name] = (x @ (model[0].weight + change).T).detach()
    parameters = attach_lora(model, ("0",), rank=4, alpha=4, kind="plain", seed=seed, name=name)
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        (model(x) - tasks[name]).square().mean().backward()
        optimizer.step()

# %%
lines = []
for used in tasks:
    adapters.switch(model, used)
    lines.append(
        (f"adapter {used!r}", *((model(x) - y).square().mean().item() for y in tasks.values()))
    )
lab.table(("error of", *(f"on task {name!r}" for name in tasks)), *lines)

# %% [markdown]
# Each adapter is good at its own task and bad at the other's. How large is the file that holds one of them?

# %%
with tempfile.TemporaryDirectory() as folder:
    files = adapters.save_adapter(model, folder, "portrait")
    size = sum(Path(file).stat().st_size for file in files)
    fresh = nn.Sequential(copy.deepcopy(model[0].base_layer))
    adapters.load_adapter(fresh, folder, "portrait", kind="peft")
adapters.switch(model, "portrait")
assert torch.allclose(fresh(x), model(x), atol=1e-3)  # our layer's file, loaded back into PEFT's
print(f"adapter on disk: {size / 1e3:,.0f} kB; the layer it belongs to: {4 * d * d / 1e3:,.0f} kB")

# %% [markdown]
# What does an adapter cost at each call, beside the weights and merged into them?

# %%
calls = {"base": lambda: fresh[0].base_layer(x), "adapter beside": lambda: model(x)}
beside = {name: cuda.timed(call, budget_s=0.2) for name, call in calls.items()}
adapters.merge(model)
beside["merged"] = cuda.timed(lambda: model(x), budget_s=0.2)
adapters.unmerge(model)
samples = {f"{name.replace(' ', '_')}_ms": t for name, t in beside.items()}
lab.keep(
    Run(
        "01",
        "merge",
        tags={"experiment": "merge"},
        metrics=metrics | {k: summarise(t) for k, t in samples.items()},
        samples=samples,
    )
);

# %%
theirs = lab.reference(experiment="merge")
lines = []
for name, spread in {name: summarise(t) for name, t in beside.items()}.items():
    h200 = theirs.metric(f"{name.replace(' ', '_')}_ms") if theirs else None
    lines.append((name, spread["median"], f"{spread['p10']:.3g} to {spread['p90']:.3g}", h200))
lab.table(
    ("forward pass of the layer", "median, ms", "p10 to p90, ms", "H200, wider layer, ms"), *lines
)

# %% [markdown]
# (If your p10-p90 ranges overlap, then your machine can't tell these three apart; the H200's can.)
#
# **Takeaway.** A merged adapter costs no time. One kept beside the weights can be swapped, and hundreds of adapters take no
# more space than one model. The same weights can't give you both at once.

# %% [markdown]
# ## 6 · What training memory is made of
#
# **Question.** Training keeps four things in memory: the weights, their gradients, the optimizer's state (AdamW keeps two
# more numbers for each number trained), and the *activations*, results of the forward pass that the backward pass needs.
# LoRA trains a thousandth of the weights. By what factor does the *whole* shrink?
#
# We count it for the three models, with the batches of the articles. LoRA is in half precision throughout. For training all
# weights there are two bars: the careful way (float32, 16 bytes a parameter without activations) and the frugal one (half
# precision, 8 bytes).
#
# **Your prediction:** how many times less memory does Qwen3-8B take with LoRA than with the careful way?

# %%
times_less_memory = (
    None  # Qwen3-8B, 4 texts of 861 tokens: all weights in float32, against LoRA in bfloat16
)
lab.predict("less memory for Qwen3-8B with LoRA", times_less_memory, "x")


# %%
def loss_on_meta(name: str, model: nn.Module):
    """A training loss on inputs without memory, of the shapes that the articles train on."""
    make = {"device": "meta", "dtype": torch.half}
    if name == "sd15":  # four images of 512 pixels, as latents
        inputs = (
            torch.empty(4, 4, 64, 64, **make),
            torch.empty((), device="meta"),
            torch.empty(4, 77, 768, **make),
        )
        return lambda: model(*inputs).sample.float().square().mean()
    if name == "qwen3_8b":  # four texts of 861 tokens
        ids, mask = torch.empty(4, 861, dtype=torch.long, device="meta"), {"full_attention": None}
    else:  # the 2928 tokens of one image of 500 pixels
        ids = torch.empty(1, 2928, dtype=torch.long, device="meta")
        mask = torch.empty(1, 1, 2928, 2928, dtype=torch.bool, device="meta")
    return lambda: model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss


# %%
memory = {}
for name in MODELS:
    half = torch.float16 if name == "sd15" else torch.bfloat16
    ways = (
        ("all, float32", False, torch.float32),
        ("all, half", False, half),
        ("LoRA, half", True, half),
    )
    for way, lora, dtype in ways:
        model = on_meta(name, lora, half)
        kept = saved_for_backward(model, loss_on_meta(name, model))
        memory[name, way] = planned(
            nn.Module.to(model, dtype) if not lora else model, activations=kept
        )

# %%
figure, axes = plt.subplots(3, 1, figsize=(7.2, 6))
for ax, name in zip(axes, MODELS, strict=True):
    bars = {way: m.in_gb() for (model_name, way), m in memory.items() if model_name == name}
    plots.breakdown(ax, bars, unit="GB")
    ax.set_title(NAMES[name], pad=10 if ax is not axes[0] else 26)
    if ax is not axes[0]:
        ax.get_legend().remove()
plt.show()

# %%
less = memory["qwen3_8b", "all, float32"].total / memory["qwen3_8b", "LoRA, half"].total
fewer = counts["qwen3_8b_total"] / counts["qwen3_8b_lora_r8"]
print(f"Qwen3-8B: {less:.1f} times less memory, for {fewer:.0f} times fewer trained parameters")
gb = {
    f"{n}_{way.replace(', ', '_')}_{part}_gb": v
    for (n, way), m in memory.items()
    for part, v in m.in_gb().items()
}
lab.keep(Run("01", "memory", tags={"experiment": "memory"}, metrics=gb));

# %% [markdown]
# With LoRA, gradients and optimizer state all but vanish. The weights remain, and so do most of the activations: to train an
# adapter in the first layer, the gradient must travel back through all layers behind it, and their nonlinear parts must
# keep what they need for that. (Three notes on the count. Attention counts as a fused kernel keeps it. The activations of
# the `float32` bars are those of a half-precision forward pass, as under autocast. LLaVA's are its language model's.)
#
# So far we have only counted. Does a real training step keep what the count says?

# %%
channels = {"block_out_channels": (32, 64, 64, 64), "norm_num_groups": 8, "layers_per_block": 1}


def unet_and_loss(lora: bool) -> tuple:
    """SD1.5's UNet at the scale full, a far narrower one at the others, and a loss on one random image."""
    full = lab.scale == "full"
    size = (
        {"sample_size": 64, "cross_attention_dim": 768}
        if full
        else channels | {"cross_attention_dim": 64}
    )
    unet = UNet2DConditionModel(**size).to(lab.device)
    if lora:
        attach_lora(unet, attention, rank=4, alpha=4, kind="plain", seed=0)
    side, width = (64, 768) if full else (32, 64)
    inputs = torch.randn(1, 4, side, side), torch.tensor(500), torch.randn(1, 77, width)
    inputs = [t.to(lab.device) for t in inputs]
    return unet, lambda: unet(*inputs).sample.square().mean()


# %%
lines, metrics = [], {}
theirs = {
    way: run.metric
    for way in ("all", "LoRA")
    if (run := lab.reference(experiment="memory-measured"))
}
with lab.attempt("Training a UNet to see its memory", experiment="memory-measured"):
    for way in ("all", "LoRA"):
        unet, loss = unet_and_loss(way == "LoRA")
        plan = planned(unet, activations=saved_for_backward(unet, loss))
        cuda.reset_peak_memory()
        real = measured(
            unet, loss, torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad])
        )
        for part, counted in plan.in_gb().items():
            h200 = theirs[way](f"{way}_{part}_gb") if theirs else None
            lines.append((f"{way}: {part}", counted * 1e3, real.in_gb()[part] * 1e3, h200))
        metrics |= {f"{way}_{part}_gb": gb for part, gb in real.in_gb().items()}
        metrics[f"{way}_planned_gb"] = plan.total / 1e9
        if peak := cuda.peak_memory():
            lines.append((f"{way}: the allocator's peak", None, peak[0] * 1e3, None))
            metrics[f"{way}_peak_allocated_gb"] = peak[0]
    head = (
        "UNet, one image, float32: what is trained",
        "counted, MB",
        "after a real step, MB",
        "H200, whole UNet, GB",
    )
    lab.table(head, *lines)
    lab.keep(Run("01", "memory-measured", tags={"experiment": "memory-measured"}, metrics=metrics))

# %% [markdown]
# It does. (On a GPU the allocator's peak lies higher: it also sees what lives only within a pass, such as the gradients of
# activations.)
#
# **Takeaway.** LoRA saves what grows with the number of *trained* parameters, and next to nothing of what grows with the
# batch. So the larger the batch and the longer the text, the smaller LoRA's share in the saving, and the more you gain from
# checkpointing (computing activations again instead of keeping them), fused kernels and smaller number formats.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then times the two in turns, for
# as many rounds as it takes to decide.

# %%
from labutils.course.exercises import faster_than, solved

# %% [markdown]
# **1. Count without building.** Qwen3-8B uses grouped-query attention: 32 query heads share 8 key and value heads, each head
# has 128 numbers, and the hidden size is 4096. How many parameters does LoRA of rank 16 train on `q_proj`, `k_proj`,
# `v_proj` and `o_proj` of all 36 layers? Calculate it; the check builds the model and counts.

# %% tags=["exercise"]
my_count = None  # a whole number; lora_parameters(d, k, r) helps


def check_count(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_count first."
    with torch.device("meta"):
        model = qwen3_8b()
    attach_lora(model, ("q_proj", "k_proj", "v_proj", "o_proj"), 16, 16, "plain")
    if answer != count_trainable(model):
        return f"Exercise 1: not yet. {answer:,} is not what a count in the model gives. Is k_proj as wide as q_proj?"
    return f"Exercise 1: right. {answer:,}, which is {100 * answer / count_parameters(model):.2f} % of the model."


print(check_count(my_count))

# %% tags=["solution"]
q, k = lora_parameters(32 * 128, 4096, 16), lora_parameters(8 * 128, 4096, 16)
solved(check_count(36 * (q + k + k + q)))

# %% [markdown]
# **2. The rank that is enough.** Write `least_rank(target, tolerance)`. It returns the smallest rank whose best
# approximation of `target` leaves a relative error of at most `tolerance`. The formula is in section 3.


# %% tags=["exercise"]
def least_rank(target: torch.Tensor, tolerance: float) -> int | None:
    return None  # your code; torch.linalg.svdvals(target) gives the singular values, largest first


def check_least_rank(answer) -> str:
    known = torch.diag(
        torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    )  # squares: 9, 4, 4, 1; together 18
    if answer(known, 0.5) is None:
        return "Exercise 2: fill in least_rank first."
    for tolerance, rank in ((1.0, 0), (0.71, 1), (0.53, 2), (0.52, 3), (0.23, 4), (0.0, 4)):
        if (got := answer(known, tolerance)) != rank:
            return f"Exercise 2: not yet. At a tolerance of {tolerance} it gave {got}; rank {rank} is the least that will do."
    falling = answer(targets["gradually falling ones"], 0.2)
    return f"Exercise 2: right. For the gradually falling target and 20 % error: rank {falling}."


print(check_least_rank(least_rank))


# %% tags=["solution"]
def least_rank_solution(target: torch.Tensor, tolerance: float) -> int:
    sigma = torch.linalg.svdvals(target).double()
    left = torch.stack([sigma[r:].norm() / sigma.norm() for r in range(len(sigma) + 1)])
    return int((left <= tolerance + 1e-6).nonzero()[0])


solved(check_least_rank(least_rank_solution))

# %% [markdown]
# **3. Where the orders are even.** Take the forward pass of a square layer of width $d$ with $n$ rows of input. From which
# rank on does the thin order need *more* operations than the dense one? Write the formula in `n` and `d`, with the help of
# the table in section 4.


# %% tags=["exercise"]
def break_even_rank(n: int, d: int) -> float | None:
    return None  # your formula


def check_break_even(answer) -> str:
    if answer(1024, 1024) is None:
        return "Exercise 3: fill in break_even_rank first."
    for n, d in ((4096, 4096), (16384, 320), (100, 51)):
        at = answer(n, d)
        thin, dense = 2 * n * at * (d + d), 2 * n * d * d + 2 * at * d * d
        if abs(thin - dense) > 1e-6 * dense:
            found = f"At n = {n}, d = {d} your rank is {at:g}, where thin takes {thin:.4g} operations and dense {dense:.4g}."
            return f"Exercise 3: not yet. {found} The two should be equal."
    return f"Exercise 3: right. For 4096 rows of width 4096: rank {answer(4096, 4096):.0f}."


print(check_break_even(break_even_rank))

# %% tags=["solution"]
# 2 n r 2d = 2 n d^2 + 2 r d^2, so r (2n - d) = n d; where 2n <= d the dense order never wins
solved(check_break_even(lambda n, d: n * d / (2 * n - d)))

# %% [markdown]
# **4. Make it faster.** Here is a backward pass by the book. It first computes the gradient of the merged weight,
# $G = (\partial L / \partial Y)^\top X$, and from it $\partial L/\partial A = B^\top G$ and $\partial L/\partial B = G A^\top$.
# Compute the same two gradients at least twice as fast.

# %% tags=["exercise"]
rows, width = (4096, 4096) if lab.device == "cuda" else (512, 1024)


def by_the_book(x, dy, A, B):
    """x [rows, width], dy [rows, width], A [8, width], B [width, 8] -> the gradients of A and B"""
    gradient = dy.T @ x
    return {"A's gradient": B.T @ gradient, "B's gradient": gradient @ A.T}


def backward(x, dy, A, B):
    return by_the_book(x, dy, A, B)  # your code instead


def a_batch(seed: int) -> tuple:
    torch.manual_seed(seed)
    return tuple(
        torch.randn(shape, device=lab.device)
        for shape in ((rows, width), (rows, width), (8, width), (width, 8))
    )


print(faster_than(4, by_the_book, backward, a_batch, times=2, tolerance=1e-3))


# %% tags=["solution"]
def thin_backward(x, dy, A, B):  # width x width numbers are never formed
    return {"A's gradient": (dy @ B).T @ x, "B's gradient": dy.T @ (x @ A.T)}


solved(faster_than(4, by_the_book, thin_backward, a_batch, times=2, tolerance=1e-3))

# %% [markdown]
# ## Where this comes from, and what to read on
# - E. Hu and others: *[LoRA: Low-Rank Adaptation of Large Language Models](https://arxiv.org/abs/2106.09685)*, 2021. Short
#   and readable; section 7 asks which ranks are needed.
# - C. Eckart, G. Young: *The approximation of one matrix by another of lower rank*, Psychometrika 1, 1936.
# - D. Kalajdzievski: *[A Rank Stabilization Scaling Factor for Fine-Tuning with
#   LoRA](https://arxiv.org/abs/2312.03732)*, 2023. Why $\alpha/\sqrt r$ may serve better than $\alpha/r$ at large ranks.
# - D. Biderman and others: *[LoRA Learns Less and Forgets Less](https://arxiv.org/abs/2405.09673)*, 2024. LoRA against
#   training all weights, on real tasks.
# - Y. Sheng and others: *[S-LoRA: Serving Thousands of Concurrent LoRA Adapters](https://arxiv.org/abs/2311.03285)*, 2023.
#   Unmerged adapters at work.
# - Hugging Face: *[PEFT's documentation](https://huggingface.co/docs/peft)*, on merging and on what else can be adapted.
# - The course's [glossary](../docs/glossary.md).

# %% [markdown]
# ## What you did
# - You wrote a LoRA layer in a dozen lines and showed that it computes what PEFT's does.
# - You counted what LoRA trains in three models of up to eight billion parameters, without allocating them.
# - You saw trained LoRA reach the smallest error that its rank allows.
# - You chose the order of the products by counting, and saw the clock agree only in part.
# - You merged an adapter, took it out, swapped two on one base, and measured what rounding costs.
# - You took training memory apart, and know which part of it LoRA saves.
#
# Next: lab 02, where the time of a training step goes.

# %%
lab.done(
    {
        "times fewer parameters at d = 4096, r = 8": full / low_rank,
        "error of rank 4 on a correction of rank 8": 100
        * summarise(found["eight equal singular values", 4])["median"],
        "thin products are faster than dense ones, forward": order_run.metrics[
            "llm_forward_speedup"
        ],
        "part of the correction lost by merging into bf16": 100 * lost,
        "less memory for Qwen3-8B with LoRA": less,
    }
)
