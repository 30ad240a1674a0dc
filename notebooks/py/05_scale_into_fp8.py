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
# Article A2 replaces the linear layers of a language model by layers in FP8, numbers of 8 bits. Tensor cores multiply them at twice
# the rate of 16-bit numbers. Yet the article's step got only 4 to 7 % shorter, and its memory stayed as it was. In this lab you
# find what can take the speed away. You write a frozen layer that, compiled, was faster than BF16's on our H200, and half as large.
#
# **After this lab you can**
# - read the 8 bits of an FP8 number, and say what a cast does beyond the range and near zero;
# - choose a scale, and say what a scale from the past does to a spike;
# - compute from which width on FP8 is faster, the cost of quantising included;
# - write a frozen FP8 linear layer of one byte a parameter, forward and backward;
# - judge a format layer by layer, and say what Blackwell's block formats change.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | ¼ minute |
# | `small` | a GPU with FP8 (Ada, Hopper, Blackwell) | 2 minutes |
# | `full` | the same, 40 GB | 1 minute |
#
# A CPU computes the same numbers, but not their speed. Weights are random unless you set `weights = "hub"`.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = (
    "random"  # random: exact architecture, random weights; hub: a small trained model, too
)
data: str = "generated"  # random token ids; this lab needs no dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course.lab import open_lab

lab = open_lab("05", globals())

# %%
import math
from collections import deque

import matplotlib.pyplot as plt
import pandas as pd
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from labutils.course import plots
from labutils.labs.lab05_fp8_matmul import BF16, PRODUCT_KINDS, layer_costs, time_products
from labutils.layers.quantization import fp8_math
from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.results.records import Run, summarise

plots.use_style()
torch.manual_seed(0)
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
tensor_cores = on_gpu and torch.cuda.get_device_capability() >= (8, 9)
if not on_gpu:
    torch.set_num_threads(1)

# %% [markdown]
# ## 1 · Eight bits
#
# **Question.** 8 bits make 256 codes. Which numbers do they stand for?
#
# **Technique.** **E4M3** has a sign, 4 bits of exponent $e$ and 3 of mantissa $m$. Its value is $(1 + m/8)\cdot2^{e-7}$. Where
# $e = 0$ it is $m/8\cdot2^{-6}$ instead: these *subnormal* numbers run down to zero in even steps. The last code of either sign
# is NaN. **E5M2** has 5 bits of exponent and 2 of mantissa.

# %%
codes = torch.arange(256)
sign = 1 - 2 * (codes >> 7).float()
e, m = codes >> 3 & 0b1111, codes & 0b111
value = sign * torch.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e - 7))
value[codes & 0b1111111 == 0b1111111] = math.nan

pytorchs = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
assert torch.equal(value.nan_to_num(0.5), pytorchs.nan_to_num(0.5))
for number in (1.0, 0.1, 448.0, 2**-9, 0.0001):
    nearest = (value - number).abs().nan_to_num(math.inf).argmin()
    print(f"{number:<12g} {nearest.item():08b}  stands for {value[nearest].item():.4g}")

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.2))
for height, dtype in enumerate((torch.float8_e5m2, torch.float8_e4m3fn)):
    every = codes[1:128].to(torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    ax.vlines(every, height - 0.3, height + 0.3, color=plots.NAVY, linewidth=1)
ax.set(xscale="log", yticks=(0, 1), yticklabels=("E5M2", "E4M3"), xlabel="the positive numbers")
plt.show()

# %% [markdown]
# From one power of two to the next there are 8 numbers in E4M3 and 4 in E5M2. So the rounding error is at most 1/16 of the
# value in E4M3 and 1/8 in E5M2. At the left end are the subnormal numbers, and anything below half of the smallest one
# becomes 0.
#
# **Takeaway.** E4M3 is precise to a sixteenth over 15 powers of two, E5M2 to an eighth over 30.

# %% [markdown]
# ## 2 · What a plain cast does
#
# **Question.** E4M3 ends at 448. The article warns that in a plain cast 1,000 and 1,000,000 both become 448, and 0.00005
# becomes 0. Do they?
#
# **Prediction.** Which number does 1,000 become in your version of PyTorch? If you expect NaN, which is no number, write it
# down for yourself and go on.

# %%
my_cast: float | None = None  # a number; None if you expect NaN

lab.predict("1000 cast to E4M3", my_cast)

# %%
x = torch.tensor([1e3, 1e6, 5e-5], device=lab.device)
cast = x.to(torch.float8_e4m3fn).tolist()
print("plain cast to E4M3:", cast)
print("clamped first:     ", x.clamp(-448, 448).to(torch.float8_e4m3fn).tolist())
print("plain cast to E5M2:", x.to(torch.float8_e5m2).tolist())

# %%
found = dict(zip(("cast_1000", "cast_1000000", "cast_tiny"), cast, strict=True))
found = {name: value for name, value in found.items() if math.isfinite(value)}
found |= {"e4m3_max": torch.finfo(torch.float8_e4m3fn).max}
lab.keep(Run("05", "fp8-cast", tags={"experiment": "fp8-cast"}, metrics=found))
lab.verdict("A2.fp8.range", "A2.fp8.cast-saturates", "A2.fp8.cast-flushes")

# %% [markdown]
# The answer depends on the version. Our page ran PyTorch 2.11: there an eager cast of anything above 464 gives **NaN**, and a
# compiled one 448. PyTorch 2.13 gives 448 in both. The verdict is of the version that ran. E5M2 has an infinity: 1,000,000 becomes
# *inf* there, cast eagerly.
#
# **Takeaway.** Scale or clamp before you cast. That means the same in every version.

# %% [markdown]
# ## 3 · A scale
#
# **Question.** Multiply by a scale before the cast, divide by it after the product. The article has $S = 448/\mathrm{AMAX}$,
# inputs from −1,000 to 10,000, and outputs from −70,000 to 25,000. Does it come out?
#
# **Technique.** An input of 2 rows, a weight of 2 rows, one scale each. The product of the 8-bit numbers is multiplied by
# $1/(S_x S_W)$: the *descale*.

# %%
def peak(x):
    """AMAX, the largest magnitude."""
    return x.abs().max()


x = torch.tensor([[-1000.0], [10000.0]])
W = torch.tensor([[-7.0], [2.5]])
S_x, S_W = 448 / peak(x), 448 / peak(W)
x8, W8 = (x * S_x).to(torch.float8_e4m3fn), (W * S_W).to(torch.float8_e4m3fn)
product = x8.float() @ W8.float().T
print(
    f"S_x = {S_x:.4f}, S_W = {S_W:.0f}; x8 = {x8.flatten().tolist()}, W8 = {W8.flatten().tolist()}"
)
print("product", product.flatten().tolist())
print("descaled", (product / (S_x * S_W)).flatten().tolist(), "exact", (x @ W.T).flatten().tolist())

# %%
found = {"scale": S_x.item(), "scaled_min": (x * S_x).min().item(), "scaled_max": 448.0}
lab.keep(Run("05", "fp8-scaling", tags={"experiment": "fp8-scaling"}, metrics=found))
lab.verdict("A2.fp8.scale")

# %% [markdown]
# E4M3 has no −44.8: it became −44, which is 1.8 % off. How precise must $S$ be? From here an error is a *relative error*,
# $\lVert\hat x - x\rVert / \lVert x\rVert$.
#
# **Prediction.** By what factor may $S$ be *too small* before the error of normally distributed numbers doubles?

# %%
my_slack: float | None = None  # a factor, for example 2

lab.predict("factor by which a scale may be too small", my_slack, "x")


# %%
def off(found, exact):
    """Relative error."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def to_fp8_and_back(x, S, dtype=torch.float8_e4m3fn):
    most = torch.finfo(dtype).max
    return (x * S).clamp(-most, most).to(dtype).float() / S


sample = torch.randn(2**14)
S = 448 / peak(sample)
powers = torch.arange(-20, 8.01, 0.25).tolist()
errors = {
    dtype: [off(to_fp8_and_back(sample, S * 2**power, dtype), sample) for power in powers]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}
best = errors[torch.float8_e4m3fn][powers.index(0)]
slack = 2 ** -min(
    p for p, err in zip(powers, errors[torch.float8_e4m3fn], strict=True) if err < 2 * best
)
print(f"With S = 448 / AMAX the numbers come back {best:.1%} off.")

# %%
fig, ax = plt.subplots(figsize=(7.2, 3))
for line, (dtype, curve) in zip(("-", "--"), errors.items(), strict=True):
    ax.plot(powers, curve, line, label=str(dtype).removeprefix("torch."))
ax.set(yscale="log", xlabel="scale: powers of two away from 448 / AMAX", ylabel="relative error")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# In JupyterLab the slider moves the numbers through the range. The axis is log2 of the scaled magnitude. Below −10 a number
# becomes 0, above 8.8 it becomes 448.


# %%
def draw(power):
    scaled = (sample * S * 2.0**power).abs().log2().clamp(-16, 12)
    title = (
        f"scale 2^{power} times S: {off(to_fp8_and_back(sample, S * 2.0**power), sample):.1%} off"
    )
    pd.Series(scaled).plot.hist(
        bins=80, range=(-16, 12), xlabel="log2 of the scaled magnitude", title=title
    )
    plt.show()


lab.choose(draw, {"power": range(-16, 7)});

# %% [markdown]
# **Takeaway.** The F in FP8 stands for floating. Here a scale $2^{10}$ times too small costs nothing, $2^{13}$ times doesn't double
# the error. One that is too large cuts off the largest values, which count most.

# %% [markdown]
# ## 4 · Yesterday's scale
#
# **Question.** A tensor's own AMAX takes two readings: one to find it, one to cast. The article's recipe, *delayed scaling*,
# takes the scale from past steps, so one reading can cast and find the new AMAX. The article trusts that tensors change
# slowly. What if not?
#
# **Technique.** A queue of the last AMAX values; the largest of them gives the scale. The code reads twice: it shows the
# numbers, not the time.


# %%
def delayed(length):
    """Casts with the scale that the last `length` AMAX values suggest."""
    history = deque(maxlen=length)

    def cast(x):
        S = 448 / max(history, default=448.0)  # 1 at the first step
        history.append(peak(x).item())
        return to_fp8_and_back(x, S)

    return cast


course, mine = fp8_math.DelayedScaling(16), delayed(16)
for x in (sample, 3 * sample, sample / 2):
    assert abs(off(mine(x), x) - off(course(x).restored(), x)) < 1e-4

# %% [markdown]
# **Prediction.** A tensor is steady, but every 20 steps a bad batch makes it 30 times larger. How large is the relative error in
# the step of the first spike, with a history of 16?

# %%
my_spike: float | None = None  # in percent

lab.predict("error at a spike with delayed scaling", my_spike, "%")

# %%
sizes = {
    "slow drift": [1.1**step for step in range(60)],
    "shrinking": [1.5**-step for step in range(60)],
    "spikes": [30.0 if step % 20 == 10 else 1.0 for step in range(60)],
}
follow = {}
for name, factors in sizes.items():
    for length in (1024, 16):
        cast_it = delayed(length)
        curve = [off(cast_it(sample * f), sample * f) for f in factors]
        follow[name, length] = curve[1:]  # the first step has no past
spike_error = follow["spikes", 16][9]  # step 10

# %%
fig, panels = plt.subplots(1, 2, sharey=True, figsize=(7.2, 2.8))
for panel, name in zip(panels, ("shrinking", "spikes"), strict=True):
    for length, line in {1024: "-", 16: "--"}.items():
        panel.plot(range(1, 60), follow[name, length], line, label=f"history of {length}")
    panel.set(title=name, xlabel="step", yscale="log")
panels[0].set_ylabel("relative error")
panels[0].legend()
plt.show()

# %%
found = {"slow drift, delayed, of 1024 steps (the default)": summarise(follow["slow drift", 1024])}
lab.keep(Run("05", "fp8-delayed", tags={"experiment": "fp8-delayed"}, metrics=found))
lab.verdict("A2.fp8.delayed")

# %% [markdown]
# A slow drift costs nothing. At a spike, everything above the AMAX of the steps before is cut off: that step is 89 % off. A long
# history remembers the first spike when the next one comes. But a tensor that shrinks for good is lost once it is some $2^{12}$
# times smaller.
#
# Transformer Engine's default history is 1,024 steps; the course's layers of Transformer Engine, *fp8-te*, have 16, so that a
# lab's few steps fill it. Each tensor of each layer has such a history: state, which a captured step must carry along and a
# checkpoint must save.
#
# **Takeaway.** Delayed scaling is safe for what changes slowly. A scale from the tensor itself has no past to mislead it.

# %% [markdown]
# ## 5 · From which width on FP8 wins
#
# **Question.** Activations arrive in BF16 and must be *quantised* first. When does FP8 gain all the same?
#
# **Technique.** A scale for each row, computed from the row. Then one product by the tensor cores, which multiply the scales
# of rows and columns into the result. A CPU computes the same numbers in float32.


# %%
def by_row(x):
    """x [n, k] in E4M3, and what undoes each row's scale [n, 1]."""
    inverse = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-30) / 448
    return (x * inverse.reciprocal()).to(torch.float8_e4m3fn), inverse


def multiply(a, b, a_inverse, b_inverse):
    """a [m, k] times b [n, k] transposed, in BF16."""
    if tensor_cores:
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(a, b.T, scale_a=a_inverse, scale_b=b_inverse.T, **how)
    return (a.float() @ b.float().T * (a_inverse * b_inverse.T)).bfloat16()


x, W = torch.randn(64, 256, device=lab.device), torch.randn(128, 256, device=lab.device)
(x8, x_inverse), (W8, W_inverse) = by_row(x), by_row(W)
print(f"The product is {off(multiply(x8, W8, x_inverse, W_inverse), x @ W.T):.1%} off.")

# %% [markdown]
# Each factor is 2.6 % off. Independent errors add as squares: $\sqrt2 \times 2.6\,\% = 3.7\,\%$.
#
# Now the time. Let $R_{16}$ and $R_8$ be the rates of both formats, and $B$ the bandwidth. With $x$ of $m$ rows and $k$ columns,
# and $n$ outputs, FP8 saves $2mkn\,(1/R_{16} - 1/R_8)$ of the product's time. Quantising moves 5 bytes a number of $x$: BF16 read
# twice, FP8 written once (3 if the scale is known). That is $5mk/B$. Both contain $mk$, so only the outputs decide. FP8's time over
# BF16's is $R_{16}/R_8 + (1 - R_{16}/R_8)\,n^*/n$, with
#
# $$n^* = \frac{5}{2B\,(1/R_{16} - 1/R_8)}$$
#


# %%
def outputs_to_win(bf16_tflops, fp8_tflops, gb_per_s, bytes_moved=5):
    seconds_a_flop = 1 / (1e12 * bf16_tflops) - 1 / (1e12 * fp8_tflops)
    return bytes_moved / (1e9 * gb_per_s) / (2 * seconds_a_flop)


bf16, fp8 = 800, 1500  # TFLOP/s: the H200's rates as lab 00 measures them, rounded
n_star = outputs_to_win(bf16, fp8, 4250)
print(f"scales from x itself: n* = {n_star:.0f} outputs")
print(f"scale known before:   n* = {outputs_to_win(bf16, fp8, 4250, bytes_moved=3):.0f} outputs")

# %% [markdown]
# Mistral's k and v projections have 1,024 outputs, at the formula's border; q, o and down have 4,096, gate and up 14,336. Quantise
# $x$ once for q, k and v, and they share 6,144.
#
# **Prediction.** Square matrices of 512, 1,024, 2,048, 4,096: from which size on does FP8 win, compiled quantising
# included?

# %%
my_size: float | None = None  # for example 1024

lab.predict("size from which FP8 wins", my_size)


# %%
def gpu_ms(call, times=50):
    """Milliseconds of a call on the GPU alone: replayed from a CUDA graph (lab 04)."""
    for _ in range(3):  # compiles, and warms up
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


# %%
with lab.attempt("An FP8 product on the tensor cores"):
    x, W = (torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2))
    (x8, x_inverse), (W8, W_inverse) = by_row(x), by_row(W)
    fused = torch.compile(by_row)
    print(f"BF16                        {gpu_ms(lambda: x @ W.T):.3f} ms")
    print(
        f"FP8, both ready             {gpu_ms(lambda: multiply(x8, W8, x_inverse, W_inverse)):.3f} ms"
    )
    for name, quantise in {"eager": by_row, "compiled": fused}.items():

        def quantised(quantise=quantise):
            ready, inverse = quantise(x)
            return multiply(ready, W8, inverse, W_inverse)

        ms = gpu_ms(quantised)
        print(f"FP8, x quantised, {name:<9} {ms:.3f} ms")

# %% [markdown]
# **Measurement.** The same over sizes, with inputs that no cache holds (`labutils/labs/lab05_fp8_matmul.py`). *One scale*: both
# factors are ready. *On the way*: the scales come from $x$ while the clock runs. *Known before*: $x$ is only cast.

# %%
wins_here, series = None, lab.reference(experiment="gemm-times")  # our H200's
sides = [512, 1024, 2048, 4096] + [8192] * (lab.scale == "full")
ours = lambda: lab.show("The picture shows our H200's times.")
with lab.attempt("Products in FP8", instead=ours, experiment="gemm-times"):
    series, gemm = lab.keep(time_products(sides))
    wins_here = gemm.metric("fp8_wins_from_n")

# %%
gains = {
    kind: {n: series.metric(f"{BF16} {n}") / series.metric(f"{kind} {n}") for n in sides}
    for kind in PRODUCT_KINDS
}
gains["formula, H200"] = {n: 1 / (bf16 / fp8 + (1 - bf16 / fp8) * n_star / n) for n in sides}
fig, ax = plt.subplots(figsize=(7.2, 4))
ax.set_xscale("log")
plots.curves(ax, gains, "side n", "times as fast as BF16")
ax.minorticks_off()
plt.show()
lab.verdict("A2.fp8.rate")

# %% [markdown]
# The formula is for the red curve: quantised on the way, and compiled. It crosses 1 later: at 1,024 even yellow, without
# quantising, gains only 1.15. Green is late, too. At 8,192 red beats the formula, and green. Green has one scale for the tensor,
# red one for each row. Why red is faster is open.
#
# **Takeaway.** The product is nearly twice as fast; quantising takes that away. By bytes FP8 needs a thousand outputs. Square
# products on the H200 won from 2,048 on compiled, from 8,192 on eager.

# %% [markdown]
# ## 6 · One byte a parameter
#
# **Question.** The article's memory did not shrink: `te.Linear` keeps the BF16 weight, and makes FP8 copies of it, unless it
# was built under `te.quantized_model_init`. Under LoRA the weight is frozen. What does a frozen layer need to keep?
#
# **Technique.** $W_8$, one descale $s$ a row, and nothing else: $W \approx \mathrm{diag}(s)\,W_8$. Nobody needs $\mathrm dW$, so
# not even the input is kept. For $\mathrm dX = \mathrm dY\,\mathrm{diag}(s)\,W_8$ the scales lie along the dimension that is summed
# over, where a kernel can't apply them. They are multiplied into $\mathrm dY$ first. Hopper multiplies FP8 in one memory layout
# only, so $W_8$ is transposed for the backward pass and the copy dropped.


# %%
class FrozenFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W8, inverse):
        ctx.save_for_backward(W8, inverse)  # the layer's own tensors: nothing new is kept
        x8, x_inverse = by_row(x)
        return multiply(x8, W8, x_inverse, inverse).to(x.dtype)

    @staticmethod
    def backward(ctx, dY):
        W8, inverse = ctx.saved_tensors
        dY8, dY_inverse = by_row(dY * inverse.T)
        ones = torch.ones(W8.shape[1], 1, device=W8.device)
        return multiply(dY8, W8.T.contiguous(), dY_inverse, ones).to(dY.dtype), None, None


k, n = (256, 512) if tiny else (4096, 14336)
linear = nn.Linear(k, n, bias=False, device=lab.device).requires_grad_(False)
W8, inverse = by_row(linear.weight)
x = torch.randn(576, k, device=lab.device).requires_grad_()
dY = torch.randn(576, n, device=lab.device)
y = FrozenFP8.apply(x, W8, inverse)
(dX,) = torch.autograd.grad(y, x, dY)

# %% [markdown]
# It is the course's layer, `labutils/layers/quantization/fp8_linear.py`, without its padding and checks. That one takes any
# number of rows. The article's layer refused its vision encoder's 577 tokens. Transformer Engine wants rows in multiples of 8:
# lab 06 prints its error. Rows are what $\mathrm dW$ sums over, and a frozen layer has no $\mathrm dW$.
#
# **Prediction.** How far off is $\mathrm dX$?

# %%
my_error: float | None = None  # in percent

lab.predict("error of the frozen layer's dX", my_error, "%")

# %%
course_y = FrozenFP8Linear.from_linear(linear)(x)
(course_dX,) = torch.autograd.grad(course_y, x, dY)
assert off(y, course_y) < 0.005 and off(dX, course_dX) < 0.005
exact = linear(x)
(exact_dX,) = torch.autograd.grad(exact, x, dY)
accuracy = {"forward_error": off(y, exact), "gradient_error": off(dX, exact_dX)}
lab.keep(Run("05", "frozen-accuracy", tags={"experiment": "frozen-accuracy"}, metrics=accuracy))
print(f"y is {accuracy['forward_error']:.1%} off, dX {accuracy['gradient_error']:.1%}.")

# %% [markdown]
# **Measurement.** Three layers: the course's frozen one, Transformer Engine's, and a plain one in BF16, *published* in the
# table. On a CPU that one has float32. The table gives bytes a parameter at rest and *running*, which adds what is kept for the
# backward pass, and the milliseconds of both passes. A library's *workspace* is allocated once for all layers and stands apart.

# %%
few, dtype = (4096, torch.bfloat16) if on_gpu else (64, torch.float32)
x = torch.randn(few, k, device=lab.device, dtype=dtype)
kinds = [("published", False), ("fp8-frozen", False), ("fp8-te", False)]
kinds += [("published", True), ("fp8-frozen", True)] if on_gpu else []
costs = []
for kind, compiled in kinds:
    with lab.attempt(kind, instead=lambda: None, experiment="layer", layer=kind):
        costs.append(lab.keep(layer_costs(kind, x, n, compiled)))
lab.show(
    costs,
    ("bytes_a_parameter", "bytes_a_parameter_running", "workspace_mb", "step_ms"),
    experiment="layer",
)

# %% [markdown]
# On record, from an earlier session, `te.Linear` held 2 bytes a parameter at rest and 4 running: the BF16 weight, and two copies in
# FP8. That weight stays, so memory can't shrink. Why the article's didn't grow isn't answered here: lab 06's model took 0.4 GB
# more. The frozen layer has half of BF16's bytes. On the H200 eager quantising and transposing cost more than FP8 saves: 1.66
# instead of 1.39 ms. Compiled, it was faster: 0.86 ms.
#
# **Technique: the article's way.** It attached LoRA first, since PEFT refused `te.Linear`, then swapped the layers. Its swap takes
# adapters, too: LoRA's A has only its rank as outputs, far below $n^*$. The course swaps frozen layers only, without the head.

# %%
with lab.attempt("Transformer Engine's layers"):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    plain = model(x)
    for name in ("0", "2"):
        old = model.get_submodule(name)
        new = te.Linear(old.in_features, old.out_features, params_dtype=torch.bfloat16)
        with torch.no_grad():
            new.weight.copy_(old.weight), new.bias.copy_(old.bias)
        model.set_submodule(name, new)
    how = DelayedScaling(fp8_format=Format.HYBRID)  # E4M3 forward, E5M2 for gradients
    for _ in range(2):  # the first step has no history
        with te.autocast(enabled=True, recipe=how):  # in older versions: te.fp8_autocast
            y = model(x)
    print(f"te.Linear is {off(y, plain):.1%} off; its weight is {new.weight.dtype}")

# %% [markdown]
# Does PEFT still refuse?

# %%
with lab.attempt("LoRA on te.Linear", experiment="te-peft"):
    import transformer_engine.pytorch as te

    refused = ""
    try:
        inject_adapter_in_model(LoraConfig(target_modules=["0"]), nn.Sequential(te.Linear(64, 64)))
    except ValueError as error:
        refused = f"ValueError: {error}"
    tried = {"failed": int(bool(refused)), "message": refused}
    lab.keep(Run("05", "te-peft", tags={"experiment": "te-peft"}, metrics=tried))
    print("PEFT:", refused or "wraps te.Linear in a layer of its own (lora.TeLinear)")

# %%
lab.verdict("A2.te.peft-refuses")

# %% [markdown]
# On record, today's PEFT accepts it, and wraps `te.Linear` in `lora.TeLinear`. For a type that PEFT does not know, "adapters first,
# then the swap" is still the way:

# %%
lora = LoraConfig(target_modules=["0"])
try:
    inject_adapter_in_model(lora, nn.Sequential(FrozenFP8Linear.from_linear(linear)))
except ValueError as error:
    print("ValueError:", str(error)[:60], "...")
model = inject_adapter_in_model(lora, nn.Sequential(nn.Linear(64, 64)))
model[0].base_layer = FrozenFP8Linear.from_linear(model[0].base_layer)
print(type(model[0]).__name__, "around", type(model[0].base_layer).__name__)

# %% [markdown]
# **Takeaway.** Which gradients are needed decides what must be kept. A frozen weight needs one copy, of one byte a parameter.

# %% [markdown]
# ## 7 · Layer by layer
#
# **Question.** One scale a tensor, a row, or a block of 32 numbers? And are gradients better in E5M2?
#
# **Technique.** Test a format on the tensors that pass through the layers. Hooks catch them in one pass.


# %%
def watch_linears(model, ids):
    """Name -> (weight, input, output's gradient) of every nn.Linear in one forward and backward pass."""
    seen = {}

    def hook(name, layer, inputs, output):
        x, W = inputs[0].detach().flatten(0, -2), layer.weight.detach()
        output.register_hook(lambda dY: seen.update({name: (W, x, dY.flatten(0, -2))}))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *of, name=name: hook(name, *of))
    model(ids, labels=ids).loss.backward()
    return seen


# %% [markdown]
# Each format rounds both factors of a product, $y = xW^\top$ and $\mathrm dX = \mathrm dY\,W$. INT8 has 255 evenly spaced
# values.


# %%
def int8(x):
    step = peak(x) / 127
    return (x / step).round() * step


def layer_errors(W, x, dY):
    """Relative errors of both products, and the share of dY that becomes 0."""
    errors = {f"forward {kind}": fp8_math.product_error(x, W, kind) for kind in fp8_math.SCALES}
    errors["forward int8"] = off(int8(x) @ int8(W).T, x @ W.T)
    for form in (fp8_math.E4M3, fp8_math.E5M2):  # of dY; W is in E4M3
        for kind in ("tensor", "row"):
            errors[f"gradient {form.name} {kind}"] = fp8_math.product_error(dY, W.T, kind, form)
            losses = fp8_math.lost(dY, fp8_math.quantise(dY, kind, form), form)
            errors[f"flushed {form.name} {kind}"] = losses["flushed"]
    return errors


# %% [markdown]
# Trained language models have *outliers*: a few channels whose activations are tens of times larger. Random weights have none.
# So we **plant** some: three entries of the two RMSNorm weights in each block are made 60 times larger. The last norm, before
# *lm_head*, stays.

# %%
width, depth = (256, 2) if tiny else (1024, 6)
mistral = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": depth}
mistral |= {
    "num_attention_heads": width // 64,
    "num_key_value_heads": width // 128,
    "vocab_size": 2048,
}


def small_mistral(times):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**mistral))
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[[7, 77, 177]] *= times
    return model


models = {"as drawn": lambda: small_mistral(1), "with planted outliers": lambda: small_mistral(60)}
if lab.weights == "hub":
    models["SmolLM2-135M"] = lambda: AutoModelForCausalLM.from_pretrained(
        "HuggingFaceTB/SmolLM2-135M"
    )

# %%
ids = torch.randint(2048, (2, 64 if tiny else 512), device=lab.device)
for name, build in models.items():
    seen = watch_linears(build().float().to(lab.device), ids)
    errors = pd.DataFrame({layer: layer_errors(*tensors) for layer, tensors in seen.items()}).T
    survey = Run("05", f"survey {name}", tags={"experiment": "survey", "weights": name})
    survey.samples, survey.metrics = errors.to_dict("list"), errors.median().to_dict()
    lab.keep(survey)
    by_type = 100 * errors.groupby(lambda layer: layer.rpartition(".")[2]).median()
    chosen = [f"forward {kind}" for kind in ("tensor", "row", "int8")]
    chosen += ["gradient E4M3 row", "gradient E5M2 row"]
    chosen += [f"flushed {kind}" for kind in ("E4M3 tensor", "E4M3 row", "E5M2 tensor")]
    lab.show(f"**{name}**, medians by kind of layer, %")
    lab.table(by_type[chosen].rename_axis("layer").reset_index())

# %% [markdown]
# In FP8 the number of scales hardly matters: 3.7 to 3.8 % with one scale for the tensor, since each number brings its own exponent.
# Blocks of 32, on record, gave 3.8 %. INT8 has one step size for a tensor, so compare it with *forward tensor*: it is better on
# even tensors, worse on outliers. Inputs of *o_proj* and *lm_head* have no planted outlier. *down_proj* has some of its own: its
# input is a product of two activations. Rows look better with outliers, in two layers' gradients too, only by our planting: the
# outlier is each row's maximum, which 448 holds exactly.
#
# From which size of outlier on is INT8 worse? One layer, three of 1,024 channels made larger. The output calls this factor
# *sigma*:


# %%
x, W = torch.randn(128, 1024), torch.randn(256, 1024)
for sigma in (1, 5, 10, 20, 50, 100):
    spiky = x.clone()
    spiky[:, :3] *= sigma
    exact = spiky @ W.T
    fp8 = to_fp8_and_back(spiky, 448 / peak(spiky)) @ to_fp8_and_back(W, 448 / peak(W)).T
    print(
        f"{sigma:>3} sigma: INT8 {off(int8(spiky) @ int8(W).T, exact):.1%} off, E4M3 {off(fp8, exact):.1%}"
    )

# %% [markdown]
# Between 5 and 10 INT8 falls behind. *5 sigma* means here: the channel's standard deviation is 5 times the others'. The largest
# of its numbers is about three times that. So the border is a *value* of 15 to 30 sigma. LLM.int8(), below, reports such values
# in trained models.
#
# Too few scales cost FP8 *range*, not precision: gradients far below the tensor's largest become 0 (*flushed*). A scale for each
# row flushes fewer, because a row is one token, and tokens' gradients differ in size. On record, with planted outliers, it flushes
# 0.02 instead of 0.38 %, and the error is 3.70 instead of 3.74 %. That hardly matters. E5M2 is no better for gradients here: it
# flushes almost nothing, but is mostly 5.8 % off. The course's frozen layer has E4M3 both ways, and quantises each row by itself.
# *lm_head*'s gradient is nearly one number a row, at the right token. Both formats hold that number, and what is left is the
# weight's error.
#
# Random weights can't say whether 3.7 % a layer harm training. Lab 06 compares losses over seeds.
#
# **Takeaway.** Test a format on the tensors that it is to hold, and count what becomes zero.

# %% [markdown]
# ## 8 · Blocks: MXFP8 and NVFP4
#
# **Question.** Blackwell's tensor cores multiply formats with a scale for each block. What do they cost and hold?
#
# **Technique.** MXFP8: E4M3, and for each 32 neighbours a power of two in 8 bits. NVFP4: eight magnitudes, and for each 16
# neighbours a scale in E4M3.

# %%
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # the magnitudes of E2M1


def mxfp8(x):
    blocks = x.unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def nvfp4(x):
    blocks = x.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    nearest = (blocks.abs() / scale).unsqueeze(-1).sub(GRID).abs().argmin(-1)
    return (GRID[nearest] * blocks.sign() * scale).flatten(-2)


x = torch.randn(64, 1024)
torch.testing.assert_close(mxfp8(x), fp8_math.quantise(x, "block").restored())
print(f"MXFP8: {8 + 8 / 32} bits a number, {off(mxfp8(x), x):.1%} off")
print(f"NVFP4: {4 + 8 / 16} bits a number, {off(nvfp4(x), x):.1%} off")

# %% [markdown]
# The scales lie *along* the summed dimension, and the tensor core applies them as it adds. Section 6's detour, scales folded into
# $\mathrm dY$, is not needed. But a transposed matrix has other blocks. Unless blocks are square, even a frozen weight then needs
# two copies, one each way, or a new quantisation in each backward pass. FP4 doubles the rate again (3,511 against 1,756 TFLOP/s in
# article A3's data sheet, both with sparsity).
#
# **Takeaway.** A block's scale costs a quarter to half a bit a number. Four bits cost three to four times the error of eight.

# %% [markdown]
# ## Exercises
#
# The easiest first. Each cell checks itself. `lab.solution("05.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, smaller_than

# %% [markdown]
# **1.** A tensor's largest magnitude is 3.5. What is its scale for E4M3 with a *margin* of 2, which leaves two powers of two
# free at the top?

# %% tags=["exercise"]
my_S = None

print(check("05.1", my_S))

# %% [markdown]
# **2.** An RTX PRO 6000 has dense peaks of 439 TFLOP/s in BF16 and 878 in FP8, and 1,792 GB/s. From how many outputs on does
# FP8 win there, with scales from $x$ itself? Take the peaks for measured rates.

# %% tags=["exercise"]
my_outputs = None

print(check("05.2", my_outputs))

# %% [markdown]
# **3.** A model of 7 billion parameters: 14 GB in BF16, 7 GB in FP8. Convert it (a) by building all FP8 layers beside the BF16
# model, which is then dropped, or (b) layer by layer, dropping each BF16 weight at once. What is the peak of memory in GB?

# %% tags=["exercise"]
my_peaks = None  # (a, b)

print(check("05.3", my_peaks))

# %% [markdown]
# **4. Write a frozen layer.** This one has a scale for each *input*, $s$ [1, k]. It is used in the plain way: autograd keeps the
# restored weight until the backward pass. Give the same result and the same gradient of `x`, and keep at most a tenth of those
# bytes. What the layer itself holds is not counted.

# %% tags=["exercise"]
frozen_layer = nn.Module()
frozen_layer.register_buffer("W8", torch.randn(512, 256, device=lab.device).to(torch.float8_e4m3fn))
frozen_layer.register_buffer("s", torch.rand(1, 256, device=lab.device) + 0.5)


def restoring(x):
    """x [64, 256] -> [64, 512]"""
    return x @ (frozen_layer.W8.float() * frozen_layer.s).T


def lean(x):
    return restoring(x)  # your code instead; in a torch.autograd.Function you decide what is kept


def some_inputs(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(64, 256, device=lab.device).requires_grad_(),)


print(smaller_than(4, restoring, lean, some_inputs, share=0.1, module=frozen_layer))


# %% [markdown]
# ## What to read on
# - P. Micikevicius and others: *[FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)*, 2022.
# - NVIDIA: *[Transformer Engine's documentation](https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/)*.
# - T. Dettmers and others: *[LLM.int8()](https://arxiv.org/abs/2208.07339)*, 2022, on outliers.
# - B. Rouhani and others: *[Microscaling Data Formats](https://arxiv.org/abs/2310.10537)*, 2023.
# - Casts above 448: [pytorch#178817](https://github.com/pytorch/pytorch/pull/178817),
#   [ao#1912](https://github.com/pytorch/ao/issues/1912).
#
# Next: lab 06, where FP8 meets images of any shape.

# %%
there = lab.reference(experiment="gemm")
lab.done(
    {
        "1000 cast to E4M3": cast[0] if math.isfinite(cast[0]) else None,
        "factor by which a scale may be too small": slack,
        "error at a spike with delayed scaling": 100 * spike_error,
        "size from which FP8 wins": wins_here,
        "error of the frozen layer's dX": 100 * accuracy["gradient_error"],
    },
    ours={"size from which FP8 wins": there and there.metric("fp8_wins_from_n")},
)
