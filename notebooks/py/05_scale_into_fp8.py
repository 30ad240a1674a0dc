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
# # Lab 05 · Scale into FP8
#
# Article A2 replaces the linear layers of a language model by layers in FP8, numbers of 8 bits. Tensor cores multiply 8-bit
# numbers twice as fast as 16-bit ones. Yet the article's training step got only 4 to 7 % shorter, and its memory stayed as
# it was. In this lab you take the format apart bit by bit, test what the article says about casts and scales, and find out
# where the speed and the memory went. Then you meet a layer that does get them: a frozen one that keeps its weight once.
#
# **After this lab you can**
# - read the 8 bits of an FP8 number, and say which numbers there are;
# - say what a cast does beyond the range and near zero, and why you should not rely on it;
# - choose a scale, and say what a scale from the past does to a spike;
# - tell from which matrix size on FP8 wins, with the cost of quantising counted in;
# - say what a frozen FP8 layer must keep, and write its backward pass;
# - judge a format layer by layer by the error that it makes, and say what random weights can't show.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU with FP8 (Ada, Hopper, Blackwell) | 3 minutes |
# | `full` | the same, 40 GB | 1½ minutes on an H200 |
#
# Most of this lab is mathematics and runs anywhere: on a CPU the 8-bit products are emulated with the same rounding. Their
# speed can't be emulated, so sections 5 and 6 then show what our H200 measured. Weights are random unless you set
# `weights = "hub"`; section 7 says what random weights hide.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = (
    "random"  # random: exact architecture, random weights; hub: a small language model's real ones
)
data: str = "generated"  # random token ids; this lab needs no dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("05", globals())

# %%
import math

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from labutils.course import plots
from labutils.labs import lab05_fp8_matmul
from labutils.labs.lab05_fp8_matmul import BF16, FUSED, PRODUCT_KINDS
from labutils.labs.lab05_layer_errors import layer_errors, watch_linears
from labutils.layers.lora import attach_lora
from labutils.layers.quantization import fp8_math
from labutils.layers.quantization.convert import MAKERS, transformer_engine
from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.layers.quantization.fp8_math import (
    E4M3,
    E5M2,
    DelayedScaling,
    encode,
    quantise,
    relative_error,
)
from labutils.results.records import REFERENCE, Run, read_runs, summarise, versions

plots.use_style()
torch.manual_seed(0)
on_gpu = lab.device == "cuda"
tiny = lab.scale == "tiny"
if not on_gpu:
    torch.set_num_threads(1)


# %% [markdown]
# ## 1 · Eight bits
#
# **Question.** 8 bits make 256 codes. Which numbers do they stand for?
#
# A floating-point number consists of a sign, an exponent and a mantissa. The exponent picks a power of two; the mantissa
# says how far the number is on the way to the next one. Two ways to divide 8 bits among them are in use: **E4M3** spends
# 4 bits on the exponent and 3 on the mantissa, **E5M2** spends 5 and 2. (If all bits of the exponent are 0, the rule changes:
# from there the numbers run down to zero in even steps. They are called *subnormal*.)
#
# Before you look: which of 0.1, 448 and 0.0001 does E4M3 hold exactly, which does it round, and which becomes 0?
# (`labutils.layers.quantization.fp8_math` has encoding and decoding written out, and the course's tests compare all 256 codes of both formats
# with PyTorch's.)

# %%
rows = [("number", "E4M3: sign, exponent, mantissa", "stands for", "E5M2", "stands for")]
for value, said in {
    1: "1",
    0.1: "0.1",
    -3.3: "-3.3",
    448: "448",
    0.002: "0.002",
    2**-9: "2⁻⁹",
    1e-4: "0.0001",
}.items():
    cells = [said]
    for fmt in (E4M3, E5M2):
        code = encode(torch.tensor([float(value)]), fmt)
        cells += [
            f"`{fp8_math.bits(code.item(), fmt)}`",
            f"{fp8_math.decode(code, fmt).item():.4g}",
        ]
    rows.append(tuple(cells))
lab.table(*rows)

# %%
figure, ax = plt.subplots(figsize=(7.2, 2.9))
for fmt, row, color in ((E4M3, 1, plots.NAVY), (E5M2, 0, plots.RUST)):
    numbers = fp8_math.numbers(fmt)
    numbers = numbers[numbers > 0]
    ax.vlines(numbers, row - 0.13, row + 0.13, color=color, linewidth=1)
    ends = f"{len(numbers)} numbers above zero, {fmt.smallest:.2g} to {fmt.largest:,g}"
    ax.annotate(
        f"{fmt.name}: {ends}",
        (fmt.smallest_normal, row),
        (6, 18),
        textcoords="offset points",
        fontsize=9,
    )
    ax.vlines(fmt.smallest_normal, row - 0.25, row + 0.4, color=plots.INK, linestyle=":")
ax.set(
    xscale="log",
    ylim=(-0.5, 1.6),
    xlabel="value, logarithmic (left of the dotted line: subnormal)",
    yticks=[],
)
ax.grid(axis="y", visible=False)
ax.set_title("The same 256 codes, spent on precision (E4M3) or on range (E5M2)")
plt.show()

# %% [markdown]
# Every vertical line is a number. Right of the dotted line, each power of two has equally many of them: 8 in E4M3, 4 in E5M2.
# (The codes at the very top are taken: they stand for "not a number", and in E5M2 for infinity.) So rounding takes at most
# the same *share* of any value there: 1/16 in E4M3, 1/8 in E5M2. Left of the dotted line the steps stay equal, and the share
# grows, until a number is nearer to zero than to any other.
#
# **Takeaway.** E4M3 is precise to a sixteenth over some 15 powers of two, E5M2 to an eighth over twice as many. Below that
# range a number loses its precision bit by bit; above it there is no number left at all.

# %% [markdown]
# ## 2 · What a plain cast does
#
# **Question.** E4M3's largest number is 448. The article warns that in a plain cast 1,000 and 1,000,000 both become 448, and
# that a weight of 0.00005 becomes 0. Is that what `tensor.to(torch.float8_e4m3fn)` does?
#
# **Your prediction:** which number does 1,000 become?

# %%
my_cast: float | None = None  # a number

lab.predict("1000 cast to E4M3", my_cast)

# %%
x = torch.tensor([1e3, 1e6, 5e-5], device=lab.device)
cast = dict(
    zip(("cast_1000", "cast_1000000", "cast_tiny"), x.to(torch.float8_e4m3fn).tolist(), strict=True)
)
saturates = fp8_math.plain_cast_saturates(lab.device)
metrics = {name: value for name, value in cast.items() if math.isfinite(value)} | {
    "saturates": int(saturates),
    "e4m3_max": torch.finfo(torch.float8_e4m3fn).max,
}
lab.keep(Run("05", "fp8-cast", tags={"experiment": "fp8-cast"}, metrics=metrics))
lab.table(
    ("cast from float32", "1,000", "1,000,000", "0.00005"),
    (f"plain cast to E4M3, PyTorch {versions()['torch']} on {lab.device}", *cast.values()),
    ("clamped first, cast to E4M3", *fp8_math.saturating_cast(x).tolist()),
    ("plain cast to E5M2", *x.to(torch.float8_e5m2).tolist()),
)
lab.verdict("A2.fp8.range", "A2.fp8.cast-saturates", "A2.fp8.cast-flushes");

# %% [markdown]
# For large numbers the answer depends on the version of PyTorch; your table shows that of yours. E4M3 has no infinity. Up
# to PyTorch 2.11, an eager cast of anything above 464 gave **NaN** (which is what the H200's column says): the next number
# after 448 would be 480, but its code stands for NaN, and 464 is halfway to it. The same line under `torch.compile`
# *saturated*, that is, gave 448. PyTorch 2.13 saturates in both. (The lab runs one version and doesn't compile here; the
# rest is from [pytorch#178817](https://github.com/pytorch/pytorch/pull/178817) and
# [ao#1912](https://github.com/pytorch/ao/issues/1912).) E5M2 has an infinity, and 1,000,000 becomes that. At the small end
# all agree: 0.00005 becomes 0 in E4M3, because it is less than half of the smallest number, 2⁻⁹ = 0.00195. E5M2 keeps it.
#
# **Takeaway.** Don't leave numbers beyond the range to the cast. Scale them so that they fit, or clamp them first; that means
# the same in every version.

# %% [markdown]
# ## 3 · A scale
#
# **Question.** To make numbers fit, multiply them by a scale before the cast, and divide by it afterwards. The article uses
# $S = 448 / \mathrm{AMAX}$, where AMAX is the largest magnitude. Its example has values from −1,000 to 10,000. What becomes of
# them?
#
# From here on, an error is a *relative error*, $\lVert \hat x - x \rVert / \lVert x \rVert$, where $\hat x$ is what comes
# back from FP8. The double bars are the *norm* of a tensor, its size: the root of the sum of all squares.

# %%
x = torch.linspace(-1000, 10000, 1101, device=lab.device)
S = fp8_math.scale_for(fp8_math.amax(x)).item()
metrics = {"scale": S, "scaled_min": (x * S).min().item(), "scaled_max": (x * S).max().item()}
metrics["relative_error"] = relative_error(quantise(x).restored(), x)
lab.keep(Run("05", "fp8-scaling", tags={"experiment": "fp8-scaling"}, metrics=metrics))
print(
    f"S = {S:.4f} takes the values to {metrics['scaled_min']:.1f} .. {metrics['scaled_max']:.1f}."
)
print(f"Cast and scaled back they are {metrics['relative_error']:.1%} off.")
lab.verdict("A2.fp8.scale");

# %% [markdown]
# How exactly must one hit $S$? We take a tensor of normally distributed numbers, and vary $S$ over many powers of two.
#
# **Your prediction:** by what factor may $S$ be *too small* before the error has doubled?

# %%
my_slack: float | None = None  # a factor, for example 2

lab.predict("factor by which a scale may be too small", my_slack, "x")

# %%
sample = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
right = fp8_math.scale_for(fp8_math.amax(sample))


def error_at(power: float, fmt: fp8_math.Format = E4M3) -> float:
    """Relative error when `sample` is cast with 2^power times the scale that fits E4M3."""
    scale = right * 2.0**power
    return relative_error(fp8_math.saturating_cast(sample * scale, fmt).float() / scale, sample)


powers = torch.arange(-20, 8.01, 0.25).tolist()
errors = {fmt.name: [error_at(p, fmt) for p in powers] for fmt in (E4M3, E5M2)}
slack = 2 ** -min(p for p in powers if error_at(p) < 2 * error_at(0))
print(f"With the scale that fits, normally distributed numbers come back {error_at(0):.1%} off.")

# %%
figure, ax = plt.subplots(figsize=(7.2, 3.2))
for (name, found), color, line in zip(
    errors.items(), (plots.NAVY, plots.RUST), ("-", "--"), strict=True
):
    ax.plot(powers, found, color=color, linestyle=line, label=name)
ax.axvline(0, color=plots.GREY, linestyle=":")
ax.annotate("S = 448 / AMAX", (0, 0.6), (-6, 0), textcoords="offset points", fontsize=9, ha="right")
ax.annotate("small ones\nbecome 0", (-20, 0.1), fontsize=9, color=plots.NAVY)
ax.annotate("large ones\nare cut off", (3.4, 0.2), fontsize=9, color=plots.NAVY)
ax.set(
    yscale="log",
    ylim=(0.015, 1.5),
    xlabel="scale S: powers of two away from the one that fits E4M3",
)
ax.set_ylabel("relative error")
ax.legend(loc="lower right")
ax.set_title("A scale may be far too small, but hardly too large")
plt.show()


# %% [markdown]
# In JupyterLab there is a slider here: choose a scale, and see which numbers fall off at either end. (Elsewhere the figure
# above has to do.)


# %%
def draw(power: int) -> None:
    """The scaled numbers against E4M3's range."""
    figure, ax = plt.subplots(figsize=(7.2, 2.8))
    ax.hist(
        (sample * right * 2.0**power).abs().log2().clamp(-16, 12),
        bins=80,
        range=(-16, 12),
        color=plots.NAVY,
    )
    ax.axvspan(-16, -10, color=plots.MIST, label="become 0")
    ax.axvspan(math.log2(448), 12, color=plots.ROSE, label="become 448")
    ax.set(xlabel="log₂ of the scaled magnitude", ylabel="numbers", xlim=(-16, 12))
    ax.set_title(f"S × $2^{{{power}}}$: relative error {error_at(power):.1%}")
    figure.legend(loc="outside lower center", ncols=2)
    plt.show()


lab.choose(draw, {"power": range(-16, 7)});

# %% [markdown]
# **Takeaway.** The "F" in FP8 stands for *floating*: within the format's range the error does not depend on the scale. A scale
# that is too small by some powers of two costs nothing. One that is too large cuts off the largest values, and those count
# most in the error, which adds up squares.

# %% [markdown]
# ## 4 · Today's scale or yesterday's
#
# **Question.** To scale a tensor by its own AMAX one must read it twice, once to find the maximum and once to cast (*current
# scaling*). NVIDIA's library Transformer Engine, in the recipe that the article describes, saves one reading: it takes the
# AMAX from a history of past steps (*delayed scaling*), so that the kernel that makes a tensor can also cast it. The article
# trusts that tensors change slowly. What if they don't?
#
# We make up four sequences of 60 steps. In the first a tensor drifts by 10 % a step. In the second it grows by half in each
# step, in the third it shrinks by a third. In the fourth it is steady, but every 20 steps there is a spike of 30 times the
# size, as a bad batch causes. A *margin* of 3 makes every scale 2³ times smaller, to leave room. (The first step is left
# out of pictures and table: before it there is no past to take a scale from.)
#
# **Your prediction:** how large is the relative error in the step of the first spike, with delayed scaling, a history of 16
# steps and no margin?

# %%
my_spike: float | None = None  # in percent

lab.predict("error at a spike with delayed scaling", my_spike, "%")

# %%
steps = 60
sizes = {
    "slow drift": [1.1**i for i in range(steps)],
    "growing fast": [1.5**i for i in range(steps)],
    "shrinking fast": [1.5**-i for i in range(steps)],
    "spikes": [30.0 if i % 20 == 10 else 1.0 for i in range(steps)],
}
scalings = {
    "current": lambda: quantise,
    "delayed, of 1024 steps (the default)": DelayedScaling,
    "delayed, of 16 steps": lambda: DelayedScaling(16),
    "delayed, of 16 steps, margin 3": lambda: DelayedScaling(16, margin=3),
}
followed = {}
for name, factors in sizes.items():
    for label, make in scalings.items():
        scaling = make()
        followed[name, label] = [
            relative_error(scaling(sample * f).restored(), sample * f) for f in factors
        ]
metrics = {f"{name}, {label}": summarise(found[1:]) for (name, label), found in followed.items()}
spike_error = max(followed["spikes", "delayed, of 16 steps"][1:])
delayed = Run("05", "fp8-delayed", tags={"experiment": "fp8-delayed"})
delayed.metrics = metrics | {"spike_error": spike_error}
lab.keep(delayed);

# %%
figure, axes = plt.subplots(1, 4, sharey=True, figsize=(7.4, 3.4))
looks = (
    ("-", plots.MIST, 5),
    ("--", plots.RUST, 1.8),
    (":", plots.NAVY, 2.4),
    ("-.", plots.TEAL, 1.6),
)
for ax, name in zip(axes, sizes, strict=True):
    for label, (line, color, width) in zip(scalings, looks, strict=True):
        ax.plot(
            followed[name, label][1:], linestyle=line, color=color, linewidth=width, label=label
        )
    ax.set(title=name, xlabel="step", yscale="log")
axes[0].set_ylabel("relative error")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=2)
plt.show()
worst = [(name, *(100 * max(followed[name, s][1:]) for s in scalings)) for name in sizes]
lab.table(("error in the worst step, %", *scalings), *worst)

# %% [markdown]
# Go through the pictures. A slow drift costs nothing. If a tensor grows fast, its largest values are cut off in every step. A
# spike comes back far too small: everything in it that is larger than the AMAX of the steps before is cut off there.
#
# A long history helps in one case and harms in another. The default, 1024 steps, still remembers the first spike when the
# next one comes, and so has a scale that fits it. Between the spikes that scale is far too small, but that costs nothing, as
# section 3 showed. If a tensor shrinks for good, however, the history keeps the scale of its old size for 1024 steps, and
# most of the tensor becomes 0. A margin of $m$ leaves a factor of $2^m$ more room at the large end, and takes it from the
# small end.
#
# Delayed scaling also needs *state*, a history for every tensor of every layer. A compiled or captured step must carry it
# along, and a checkpoint must save it.
#
# **Takeaway.** Delayed scaling is safe for what changes slowly. A scale that is computed from the tensor itself, or from each
# of its rows, has no past that could mislead it. Section 5 counts what that costs.

# %% [markdown]
# ## 5 · When FP8 is faster
#
# **Question.** FP8 tensor cores promise twice the rate of BF16. But the activations arrive in BF16, and must be *quantised*
# first: scaled and cast. From which matrix size on does FP8 gain all the same?
#
# **Your prediction:** the side $n$ of square matrices from which FP8, quantising included, beats BF16.

# %%
my_size: float | None = None  # for example 1024

lab.predict("size from which FP8 wins", my_size)

# %%
gemm = series = None
with lab.attempt("Products in FP8", experiment="gemm"):
    sizes_n = [512, 1024, 2048, 4096] if lab.scale != "full" else [512, 1024, 2048, 4096, 8192]
    series = lab.keep(lab05_fp8_matmul.time_products(sizes_n))
    gemm = Run("05", "gemm", tags={"experiment": "gemm"})
    bf16, one_scale = (series.samples[f"{kind} {sizes_n[-1]}"] for kind in PRODUCT_KINDS[:2])
    ratios = [a / b for a, b in zip(bf16, one_scale, strict=False)]
    gemm.metrics["fp8_over_bf16"] = summarise(ratios)
    if wins := lab05_fp8_matmul.wins_from(series, FUSED, BF16, sizes_n):
        gemm.metrics["fp8_wins_from_n"] = wins
    lab.keep(gemm)

# %%
shown = series or lab.reference(experiment="gemm-times")
if shown and shown.ok:
    figure, ax = plt.subplots(figsize=(7.2, 4.2))
    colors = (plots.INK, plots.AMBER, plots.TEAL, plots.PURPLE, plots.RUST, plots.NAVY)
    looks = zip("os^vDX", ("-", "-", "-", "--", ":", "--"), colors, strict=True)
    for kind, (marker, line, color) in zip(PRODUCT_KINDS, looks, strict=True):
        ms = {n: shown.metric(f"{kind} {n}") for n in (512, 1024, 2048, 4096, 8192)}
        rate = {n: 2 * n**3 / one / 1e9 for n, one in ms.items() if one}
        ax.plot(
            list(rate), list(rate.values()), marker=marker, linestyle=line, color=color, label=kind
        )
    ax.set(
        xscale="log",
        xlabel="side n of the square matrices",
        ylabel="TFLOP/s, the GPU's time alone",
        ylim=(0, None),
    )
    ax.set_xticks(list(rate), [str(n) for n in rate], minor=False)
    ax.minorticks_off()
    ax.set_title(f"Square products, measured on {'this machine' if series else 'our H200'}")
    figure.legend(loc="outside lower center", ncol=2)
    plt.show()
lab.verdict("A2.fp8.rate");

# %% [markdown]
# The legend's kinds differ in what is quantised while the clock runs:
#
# - solid: the product alone, in BF16 or with both matrices in FP8 beforehand, with one scale for the tensor or one per row;
# - *known before*: the input comes in BF16, and its scale is known, as in delayed scaling, so it is only cast;
# - *quantised on the way*: the input comes in BF16, its scales are computed from it, and it is cast. Once eager, once
#   compiled.
#
# In all FP8 kinds the weight is in FP8 beforehand. Lab 00 measured the largest sizes; its H200 results:

# %%
peaks = read_runs(REFERENCE).one("00", experiment="machine")
bf16 = peaks.metric("tflops_bf16")
kinds = {
    "BF16": "tflops_bf16",
    "FP8, one scale": "tflops_fp8",
    "FP8, one scale per row": "tflops_fp8_rowwise",
}
rows = [(kind, peaks.metric(metric), peaks.metric(metric) / bf16) for kind, metric in kinds.items()]
lab.table(("large products on the H200", "TFLOP/s", "times BF16's"), *rows)

# %% [markdown]
# Small products are over before the tensor cores are busy; the extra kernels for quantising then weigh most. Large products
# are limited by the tensor cores, and there the cost of quantising fades: it grows with $n^2$, the product with $n^3$.
#
# It also matters how one quantises. In eager PyTorch, to quantise row by row takes several kernels, each of which goes over the
# whole tensor (the dotted curve). Compiled, it can be one (the dashed curve with crosses), which can also merge with whatever
# made the tensor.
#
# **Takeaway.** Only the tensor core is twice as fast. What a layer gains depends on its size, and on how its input is
# quantised.

# %% [markdown]
# ## 6 · One byte a parameter
#
# **Question.** The article's memory did not shrink, because Transformer Engine's layer `te.Linear` keeps the BF16 weight and
# makes FP8 copies of it. But under LoRA the weight is frozen. What does a frozen layer really need to keep?
#
# Its forward pass is $y = xW^\top$. Its backward pass is only $\mathrm dX = \mathrm dY\,W$: no one needs $\mathrm dW$, so the
# layer needn't keep its input either. (LoRA's own matrices beside it do need it.) So the layer in `labutils.layers.quantization.fp8_linear`
# keeps $W$ in E4M3 with one scale per row, $W \approx \mathrm{diag}(s)\,W_8$, and nothing else. Its backward pass has two
# difficulties:
#
# - A kernel can apply scales to the rows and columns of a product's *result*. But in $\mathrm dX$ the scales $s$ belong to the
#   dimension that is summed over. So they are multiplied into the gradient first:
#   $\mathrm dX = (\mathrm dY\,\mathrm{diag}(s))\,W_8$, which is exactly the same.
# - Hopper multiplies FP8 in one memory layout only, and $\mathrm dX$ needs the other. So $W_8$ is transposed when it is needed,
#   and the transposed copy is dropped at once.
#
# **Your prediction:** the relative error of the layer's output against float32, in %. (Section 3 showed the error of one
# tensor; here two are multiplied.)

# %%
my_error: float | None = None  # in percent

lab.predict("error of the frozen FP8 layer", my_error, "%")

# %%
k, n = (256, 512) if tiny else (4096, 14336)
linear = nn.Linear(k, n, device=lab.device).requires_grad_(False)
layer = FrozenFP8Linear.from_linear(linear)
x = torch.randn(
    577, k, device=lab.device
).requires_grad_()  # 577: what the article's vision encoder gives an image
dy = torch.randn(577, n, device=lab.device)
y, exact = layer(x), linear(x)
(dx,), (exact_dx,) = (torch.autograd.grad(out, x, dy) for out in (y, exact))
metrics = {
    "forward_error": relative_error(y, exact),
    "gradient_error": relative_error(dx, exact_dx),
}
lab.keep(Run("05", "frozen-accuracy", tags={"experiment": "frozen-accuracy"}, metrics=metrics))
print(layer)
rows = [
    ("output y", 100 * metrics["forward_error"]),
    ("input gradient dX", 100 * metrics["gradient_error"]),
]
lab.table(("frozen FP8 layer against float32", "error, %"), *rows)

# %% [markdown]
# Each of the two factors is about 2.6 % off, as the numbers of section 3 were. Independent errors add up as squares do:
# $\sqrt2 \times 2.6\,\% = 3.7\,\%$.
#
# (The input has 577 rows, as the article's vision encoder makes them. The article's FP8 layer refused this odd number: "product
# of all dimensions except the last divisible by 8". Only the *weight* gradient, $\mathrm dY^\top x$, sums over the rows, and a
# frozen layer doesn't compute it. On a GPU, our layer pads the rows to 592 with zeros and cuts the padding off again.)
#
# The recipe's knob `base_linear` knows other layers as well. How do they compare? We make one of each kind and look at the
# bytes that it holds for each parameter at rest, at the bytes with what it keeps between forward and backward (*while
# running*), and at the time that the two passes take. The last two need a GPU.

# %%
rows, dtype = (4096, torch.bfloat16) if on_gpu else (64, torch.float32)
x = torch.randn(rows, k, device=lab.device, dtype=dtype)
kinds = [(name, False) for name in ("published", *MAKERS)]
kinds += [("published", True), ("fp8-frozen", True)] if on_gpu else []
costs = []
for name, compiled in kinds:
    tags = {"experiment": "layer", "layer": name} | ({"compiled": True} if compiled else {})
    # What the H200 measured of it stands in the table below.
    with lab.attempt(f"base_linear={name!r}", instead=lambda: None, **tags):
        costs.append(lab05_fp8_matmul.layer_costs(name, x, n, compiled))
        lab.keep(costs[-1])

# %%
columns = {"run": "base_linear", "bytes_a_parameter": "bytes a parameter"}
columns |= {"bytes_a_parameter_running": "while running", "step_ms": "both passes, ms"}
lab.show(costs, columns, experiment="layer")

# %% [markdown]
# The kinds are:
#
# | kind | what it keeps |
# |---|---|
# | *published* | the weight as it comes (float32 on a CPU, BF16 on a GPU) |
# | *fp8-te* | Transformer Engine's layer, the article's way: the BF16 weight, and FP8 copies on top of it while it runs |
# | *fp8-torchao* | torchao's layer: the BF16 weight, quantised anew in each pass, one scale per row |
# | *fp8-frozen* | the layer above: 8 bits a parameter and nothing else |
# | *nf4* | 4 bits a parameter (lab 07), unpacked to BF16 before each product |
# | *nf4-frozen* | the same 4 bits, unpacked by operations that `torch.compile` can see into |
# | *nf4-fp8* | the same 4 bits, unpacked to FP8 and multiplied in FP8 |
#
# On the H200, *fp8-frozen* has half the bytes of *published*, but in eager PyTorch it is slower: quantising takes several
# kernels, as in section 5. Compiled, it is both smaller and faster.
#
# ### Does PEFT refuse `te.Linear`?
#
# **Question.** The article had to swap the layers *after* attaching LoRA, because PEFT raised `ValueError: Target module
# Linear() is not supported`. Does it still?
#
# PEFT chooses a LoRA layer by the type of the layer that it wraps, and refuses types that it doesn't know. Our own layer is
# such a type:

# %%
try:
    attach_lora(nn.Sequential(FrozenFP8Linear.from_linear(linear)), ("0",), 8, 8, "peft")
except ValueError as error:
    print(f"ValueError: {str(error)[:130]} ...")
swapped = nn.Sequential(nn.Linear(64, 64))
attach_lora(swapped, ("0",), 8, 8, "peft")
swapped[0].base_layer = FrozenFP8Linear.from_linear(swapped[0].base_layer)
print(
    "Swapped afterwards it works:",
    tuple(swapped(torch.randn(3, 64)).shape),
    "out of",
    swapped[0].base_layer,
)

# %% [markdown]
# And Transformer Engine's?

# %%
with lab.attempt("PEFT around te.Linear", experiment="te-peft"):
    te = transformer_engine()
    message = ""
    try:
        attach_lora(
            nn.Sequential(te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")),
            ("0",),
            8,
            8,
            "peft",
        )
    except ValueError as error:
        message = f"ValueError: {error}"
    tried = Run("05", "te-peft", tags={"experiment": "te-peft"})
    tried.metrics = {"failed": int(bool(message)), "message": message}
    lab.keep(tried)
    print(
        f"PEFT {versions()['peft']}:",
        message or "wraps te.Linear in a layer of its own (lora.TeLinear)",
    )
lab.verdict("A2.te.peft-refuses");

# %% [markdown]
# PEFT 0.19 and later have a LoRA layer for Transformer Engine's types, so there the refusal is history. For any type that PEFT
# doesn't know, "first the adapters, then the swap" is still the way.
#
# **Takeaway.** Which gradients are needed decides what must be kept. A frozen weight needs a single copy, of one byte a
# parameter. Libraries that are made for training all weights keep more, and have to.

# %% [markdown]
# ## 7 · A model, layer by layer
#
# **Question.** How many scales does a network need: one for each tensor, for each row, or for each block of 32 numbers? And
# should gradients be in E5M2, whose range is wider?
#
# We let a model with the shape of Mistral compute one loss, catch the input and the output gradient of every linear layer, and
# quantise them in each way.
#
# There is a catch. Trained language models have *outliers*: in a few channels, activations are tens of times larger than
# elsewhere (Dettmers and others, 2022). Random weights have none. So we look twice: at the model with its random weights as
# drawn, and at the same model after we have **planted** outliers, by making three entries in the weight of each
# normalisation layer (RMSNorm) 60 times larger. Planted outliers imitate the real ones, and no more than that;
# `weights = "hub"` adds a trained model.

# %%
width, depth, tokens = (256, 3, (2, 96)) if tiny else (1024, 6, (2, 512))
mistral = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": depth}
mistral |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}


def as_drawn() -> nn.Module:
    """A small model of Mistral's architecture with random weights, the same ones each time."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**mistral, vocab_size=2048))


def with_planted_outliers() -> nn.Module:
    """The same, with three channels whose activations are 60 times larger."""
    model = as_drawn()
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.data[[7, 77, 177]] *= 60
    return model


models = {"as drawn": as_drawn, "with planted outliers": with_planted_outliers}
if lab.weights == "hub":
    hub = "HuggingFaceTB/SmolLM2-135M"
    models["SmolLM2-135M"] = lambda: AutoModelForCausalLM.from_pretrained(hub)

# %%
surveys = {}
for name, build in models.items():
    survey = Run("05", f"survey {name}", tags={"experiment": "survey", "weights": name})
    with lab.attempt(survey.run, **survey.tags):
        model = build().float().to(lab.device)
        ids = torch.randint(2048, tokens, generator=torch.Generator().manual_seed(0)).to(lab.device)
        seen = watch_linears(model, lambda model=model, ids=ids: model(ids, labels=ids).loss)
        surveys[name] = {layer: layer_errors(one) for layer, one in seen.items()}
        survey.samples = pd.DataFrame(surveys[name].values()).to_dict("list")
        survey.metrics = {kind: summarise(errors) for kind, errors in survey.samples.items()}
        lab.keep(survey)
        del model, seen

# %%
figure, axes = plt.subplots(1, len(surveys), sharey=True, squeeze=False, figsize=(7.4, 3.6))
looks = {
    "tensor": ("o", plots.NAVY),
    "row": ("^", plots.TEAL),
    "block": ("s", plots.AMBER),
    "int8": ("x", plots.RUST),
}
for ax, (name, layers) in zip(axes[0], surveys.items(), strict=True):
    for kind, (marker, color) in looks.items():
        found = [100 * errors[f"forward {kind}"] for errors in layers.values()]
        label = "INT8, one scale per tensor" if kind == "int8" else f"E4M3, one scale per {kind}"
        ax.plot(found, marker=marker, color=color, markersize=4.5, linestyle="none", label=label)
    ax.set(title=name, xlabel="linear layer, in the model's order")
axes[0][0].set_ylim(0)
axes[0][0].set_ylabel("error of the layer's output, %")
figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=2)
plt.show()

# %% [markdown]
# And the gradients? The table has medians over the layers, and in its last column the worst layer.

# %%
head = ("error of dX, %", "numbers of dY that become 0, %", "the same in the worst layer, %")
for name, layers in surveys.items():
    rows = [(f"*{name}*: gradients dY in", *head)]
    for kind in ("E4M3 tensor", "E4M3 row", "E4M3 block", "E5M2 tensor", "E5M2 row"):
        flushed = [100 * errors[f"flushed {kind}"] for errors in layers.values()]
        error = summarise([100 * errors[f"gradient {kind}"] for errors in layers.values()])[
            "median"
        ]
        rows.append((kind, error, summarise(flushed)["median"], max(flushed)))
    lab.table(*rows)

# %% [markdown]
# **What this shows.** In FP8 the number of scales hardly changes the error of a product. It is about 3.7 %, with or without
# outliers: that is the price of three mantissa bits, and each number brings its own exponent. (One scale per row does
# better where one outlier carries most of a row, because that outlier becomes exactly 448.) INT8 is different. It has one
# step size for a whole tensor, so it is better than FP8 as long as a tensor is even, and worse once there are outliers.
#
# What FP8 pays for too few scales is *range*: a gradient far smaller than the largest one in its tensor becomes exactly
# zero. E5M2 keeps it, but has one mantissa bit less, which doubles the rounding error of all other gradients. In dX, where
# the error of the weight, still in E4M3, comes on top, that makes the error about 1.6 times larger. One scale per row keeps
# nearly all small gradients as well, because a row is one token and has a range of its own. That is why this course's
# frozen layer uses E4M3 with one scale per row, forward and backward.
#
# **What it can't show** is whether an error of 3.7 % in each layer harms training. Errors of random sign average out over layers
# and steps. The article's loss was 14 % higher after ten steps, but ten steps of a single run say little, and random weights
# can't say it at all. Lab 06 trains a small model, and shows how to compare losses over several seeds.
#
# **Takeaway.** Test a format on the tensors that it is to hold. And count what a relative error hides, such as small numbers
# that become zero.

# %% [markdown]
# ## Exercises
#
# The exercises get harder from one to the next. Run an exercise's cell: its check says what is still missing. The last one
# measures your code: it first compares your results with those of the version given, and then counts the bytes that are kept
# for the backward pass.

# %%
from labutils.course.exercises import smaller_than, solved

# %% [markdown]
# **1. A scale with a margin.** A tensor's largest magnitude is 3.5. What is its scale $S$ for E4M3 with a margin of 2?

# %% tags=["exercise"]
my_S = None  # your number


def check_scale(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_S first."
    if abs(answer - 32) < 1e-6:
        return "Exercise 1: right. The scaled values reach 112, and may grow fourfold before they are cut off."
    if abs(answer - 128) < 1e-6:
        return "Exercise 1: not yet. That is the scale without a margin."
    return "Exercise 1: not yet. Start from 448 / AMAX; section 4 says what a margin does to it."


print(check_scale(my_S))

# %% tags=["solution"]
my_S = 448 / 3.5 / 2**2
solved(check_scale(my_S))

# %% [markdown]
# **2. The backward pass.** A frozen layer has its 8-bit weight `W8` [n, k] (here cast to float32, but not yet scaled) and its
# row scales `s` [n, 1]. Its forward pass is `x @ (s * W8).T`. Write its input gradient, without forming `s * W8`, which would
# be a second weight.


# %% tags=["exercise"]
def input_gradient(dY, W8, s):
    """dY [m, n] -> dX [m, k]"""
    return None


def check_gradient(function) -> str:
    dY, W8, s = (
        1e-30 * torch.randn(5, 6),
        3e38 * torch.randn(6, 4).sign(),
        torch.rand(6, 1) + 1.5,
    )  # s * W8 overflows
    found, formed = function(dY, W8, s), (dY.double() @ (s.double() * W8.double())).float()
    if found is None:
        return "Exercise 2: fill in input_gradient first."
    if found.shape == formed.shape and torch.allclose(found, formed, rtol=1e-4, atol=1e4):
        return "Exercise 2: right. The scales belong to the dimension that is summed over, so either factor can take them."
    if not found.isfinite().all():
        return "Exercise 2: nearly. You formed s * W8, which is too large for float32 here. Where else can s go?"
    return "Exercise 2: not yet. Which dimension of dY does s belong to?"


print(check_gradient(input_gradient))


# %% tags=["solution"]
def input_gradient(dY, W8, s):
    return (dY * s.t()) @ W8


solved(check_gradient(input_gradient))

# %% [markdown]
# **3. Two ways to convert.** A model of 7 billion parameters takes 14 GB in BF16 and 7 GB in FP8. You can (a) build all FP8
# layers beside the BF16 model and then drop that, or (b) drop each layer's BF16 weight as soon as its FP8 form is there. What is
# the peak of memory, in GB, in (a) and in (b)? (A single layer is small enough to be ignored.)

# %% tags=["exercise"]
my_peaks = None  # two numbers: (a, b)


def check_peaks(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_peaks first."
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "Exercise 3: not yet. Two numbers are asked for, (a, b), for example (20, 10)."
    if tuple(answer) == (21, 14):
        return "Exercise 3: right. The course converts as in (b); what that saves shows only afterwards."
    return "Exercise 3: not yet. In (a), what is in memory just before the BF16 model is dropped? In (b), what at the start?"


print(check_peaks(my_peaks))

# %% tags=["solution"]
my_peaks = (14 + 7, 14)
solved(check_peaks(my_peaks))

# %% [markdown]
# **4. Make it smaller.** This layer is frozen in 8 bits, but used in the plain way: autograd keeps the restored weight, four
# bytes a parameter, until the backward pass. Compute the same result and the same gradient of `x`, and keep at most a tenth of
# those bytes. (What the layer itself holds is not counted.)

# %% tags=["exercise"]
frozen_layer = nn.Module()
frozen_layer.register_buffer("W8", torch.randn(512, 256, device=lab.device).to(torch.float8_e4m3fn))
frozen_layer.register_buffer("s", torch.rand(512, 1, device=lab.device) + 0.5)


def restoring(x):
    """x [64, 256] -> [64, 512]"""
    return x @ (frozen_layer.s * frozen_layer.W8.float()).T


def lean(x):
    return restoring(x)  # your code instead; in a torch.autograd.Function you decide what is kept


def some_rows(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(64, 256, device=lab.device).requires_grad_(),)


print(smaller_than(4, restoring, lean, some_rows, share=0.1, module=frozen_layer))


# %% tags=["solution"]
class Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W8, s):
        ctx.save_for_backward(W8, s)
        return x @ (s * W8.float()).T

    @staticmethod
    def backward(ctx, dY):
        W8, s = ctx.saved_tensors
        return (dY * s.T) @ W8.float(), None, None


def lean_solution(x):
    return Lean.apply(x, frozen_layer.W8, frozen_layer.s)


solved(smaller_than(4, restoring, lean_solution, some_rows, share=0.1, module=frozen_layer))

# %% [markdown]
# ## Where this comes from, and what to read on
# - P. Micikevicius and others: *[FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)*, 2022. Defines E4M3 and
#   E5M2.
# - NVIDIA: *[Transformer Engine's documentation](https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/)*, on FP8
#   and its recipes for scaling.
# - T. Dettmers and others: *[LLM.int8(): 8-bit Matrix Multiplication for Transformers at
#   Scale](https://arxiv.org/abs/2208.07339)*, 2022. On outliers, and what INT8 does about them.
# - A. Kuzmin and others: *[FP8 Quantization: The Power of the Exponent](https://arxiv.org/abs/2208.09225)*, 2022. When FP8
#   beats INT8, and when not.
# - B. Rouhani and others: *[Microscaling Data Formats for Deep Learning](https://arxiv.org/abs/2310.10537)*, 2023. A scale for
#   each block of 32 numbers.
# - PyTorch: *[torchao](https://github.com/pytorch/ao)*, training in FP8.
# - The course's [glossary](../docs/glossary.md).

# %% [markdown]
# ## What you did
# - You read the 8 bits of FP8 numbers, and saw which numbers there are.
# - You found out what a cast does beyond the range and near zero, and that it depends on the version.
# - You chose scales, and saw what a scale from the past does to a spike.
# - You saw what decides from which size on FP8 wins, quantising included, and measured it if you have a GPU.
# - You took apart a frozen FP8 layer of one byte a parameter, and wrote its backward pass.
# - You judged formats layer by layer by their errors, and know what random weights don't show.
#
# Next: lab 06, where FP8 meets images of any shape.

# %%
wins_from = gemm.metrics.get("fp8_wins_from_n") if gemm else None
lab.done(
    {
        "1000 cast to E4M3": cast["cast_1000"] if math.isfinite(cast["cast_1000"]) else None,
        "factor by which a scale may be too small": slack,
        "error at a spike with delayed scaling": 100 * spike_error,
        "size from which FP8 wins": wins_from,
        "error of the frozen FP8 layer": 100 * relative_error(y, exact),
    }
)
