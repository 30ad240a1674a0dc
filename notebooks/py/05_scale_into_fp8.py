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
# Article A2 replaces the linear layers of a language model by FP8 ones. Tensor cores multiply 8-bit numbers twice as
# fast as 16-bit ones, yet the article's training step got only 4 to 7 % shorter, and its memory stayed as it was. This
# lab takes the format apart bit by bit, tests what the article says of its casts and scales, looks for where the speed
# and the memory went, and reads the layer that is meant to get them: a frozen one that holds its weight once.
#
# **After this lab you can**
# - read the 8 bits of an FP8 number, and say which numbers there are;
# - say what a cast does beyond the range and near zero, and why you should not rely on it;
# - choose a scale and its granularity, and tell what a stale scale does to a spike;
# - measure from which matrix size on FP8 wins, with the cost of quantising counted in;
# - say what a frozen FP8 layer must keep, and write its backward pass;
# - judge a format layer by layer by the error that it makes, and say what random weights can't show.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | half a minute |
# | `small` | a GPU with FP8 (Ada, Hopper, Blackwell) | 3 minutes |
# | `full` | the same, 40 GB | 4 minutes |
#
# The mathematics runs anywhere: on a CPU the 8-bit products are emulated with the same rounding. Their speed can't be:
# sections 5 and 6 then show what the H200's records hold, and say what to expect. Weights are random unless you set
# `weights = "hub"`; section 7 says what that hides.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: a small language model's real ones
data: str = "generated"  # random token ids; this lab needs no dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/

# %%
from labutils.course import open_lab

lab = open_lab("05", globals())

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from labutils import plots
from labutils.adapters import attach_lora
from labutils.lowbit import fp8
from labutils.lowbit.backends import MAKERS, transformer_engine
from labutils.lowbit.fp8 import E4M3, E5M2, DelayedScaling, encode, quantise, relative_error
from labutils.lowbit.frozen import FrozenFP8Linear
from labutils.lowbit.survey import language_model, layer_errors, plant_outliers, watch_linears
from labutils.measure import products
from labutils.results import REFERENCE, Run, read_runs, summarise, versions

plots.use_style()
torch.manual_seed(0)
on_gpu = lab.device == "cuda"
tiny = lab.scale == "tiny"
if not on_gpu:
    torch.set_num_threads(1)


# %% [markdown]
# ## 1 · Eight bits
#
# **Question.** A floating-point number is a sign, an exponent that says which power of two it lies above, and a
# mantissa that says where between that power and the next. With 8 bits there are 256 codes to share out. Which numbers
# do they hold?
#
# Two formats are in use: **E4M3** spends 4 bits on the exponent and 3 on the mantissa, **E5M2** 5 and 2. Before you
# look: of 0.1, 448 and 0.0001, which does E4M3 hold exactly, and which does it lose?
#
# The stored exponent 0 is special: there the steps stay as fine as above it and run down evenly to zero (*subnormal*
# numbers). `labutils.lowbit.fp8` writes encoding and decoding out, field by field; the course's tests hold all 256
# codes of both to PyTorch's own.

# %%
rows = [("number", "E4M3: sign, exponent, mantissa", "stands for", "E5M2", "stands for")]
for value in (1.0, 0.1, -3.3, 448.0, 0.002, 2**-9, 1e-4):
    cells = [f"{value:g}"]
    for fmt in (E4M3, E5M2):
        code = encode(torch.tensor([value]), fmt)
        cells += [f"`{fp8.bits(code.item(), fmt)}`", f"{fp8.decode(code, fmt).item():.6g}"]
    rows.append(tuple(cells))
lab.table(*rows)

# %%
figure, ax = plt.subplots(figsize=(7.2, 2.9))
styles = {"E4M3": (plots.NAVY, "o", 1), "E5M2": (plots.AMBER, "s", 0)}
for fmt in (E4M3, E5M2):
    color, marker, row = styles[fmt.name]
    numbers = fp8.numbers(fmt)
    numbers = numbers[numbers > 0]
    ax.plot(numbers, [row] * len(numbers), marker, color=color, markersize=4, alpha=0.6, linestyle="none")
    ends = f"{len(numbers)} numbers above zero, {fmt.smallest:.2g} to {fmt.largest:g}"
    ax.annotate(f"{fmt.name}: {ends}", (fmt.smallest_normal, row), (6, 10), textcoords="offset points", fontsize=9)
    ax.axvline(fmt.smallest_normal, 0.12 + 0.45 * row, 0.4 + 0.45 * row, color=color, linestyle=":")
ax.set(xscale="log", ylim=(-0.5, 1.6), xlabel="value, logarithmic (dotted: subnormal numbers to the left)", yticks=[])
ax.grid(axis="y", visible=False)
ax.set_title("The same 256 codes, spent on precision (E4M3) or on range (E5M2)")
plt.show()

# %% [markdown]
# Right of the dotted lines every power of two has the same count of numbers, 8 in E4M3 and 4 in E5M2 (the codes at the
# very top stand for "not a number", and in E5M2 for infinity). So rounding costs the same *share* of any value, at most
# 1/16 in E4M3 and 1/8 in E5M2. That share, and not some absolute step, is what makes 8 bits enough. Left of the lines
# the steps stay equal, and the share grows until a number is nearer to zero than to any other.
#
# **Takeaway.** E4M3 holds 4 significant bits, the leading one implied, over some 15 powers of two, with a soft end
# below and a hard one above.

# %% [markdown]
# ## 2 · What a plain cast does
#
# **Question.** The article warns: cast as it is, 1,000 and 1,000,000 both become 448, and a weight of 0.00005 becomes
# 0. Is that what `tensor.to(torch.float8_e4m3fn)` does?
#
# **Your prediction:** which number does 1,000 become?

# %%
my_cast: float | None = None  # a number

lab.predict("1000 cast to E4M3", my_cast)

# %%
x = torch.tensor([1e3, 1e6, 5e-5], device=lab.device)
cast = dict(zip(("cast_1000", "cast_1000000", "cast_tiny"), x.to(torch.float8_e4m3fn).tolist(), strict=True))
saturates = fp8.plain_cast_saturates(lab.device)
metrics = {name: value for name, value in cast.items() if math.isfinite(value)} | {"saturates": int(saturates)}
lab.keep(Run("05", "fp8-cast", metrics=metrics))
lab.table(
    ("cast from float32", "1,000", "1,000,000", "0.00005"),
    (f"plain cast to E4M3, PyTorch {versions()['torch']} on {lab.device}", *cast.values()),
    ("clamped first, cast to E4M3", *fp8.saturating_cast(x).tolist()),
    ("plain cast to E5M2", *x.to(torch.float8_e5m2).tolist()),
)
lab.verdict("A2.fp8.range", "A2.fp8.cast-saturates", "A2.fp8.cast-flushes");

# %% [markdown]
# The answer depends on the version. E4M3 has no infinity, so up to PyTorch 2.11 an eager cast of anything above 464
# gave **NaN**, not 448, while the same line under `torch.compile` saturated; 2.13 saturates in both
# ([pytorch#178817](https://github.com/pytorch/pytorch/pull/178817),
# [ao#1912](https://github.com/pytorch/ao/issues/1912)). E5M2 has an infinity and goes there. And 0.00005 is 0 because
# it is less than half of E4M3's smallest number, 2⁻⁹ = 0.00195; E5M2 keeps it.
#
# **Takeaway.** Never leave the range to the cast. A scale that fits, or a clamp before the cast, means the same
# everywhere.

# %% [markdown]
# ## 3 · A scale
#
# **Question.** The article's example has values from −1,000 to 10,000. Its scale is $S = 448 / \mathrm{AMAX}$, with
# AMAX the largest magnitude. What becomes of the values, and how exactly does one have to hit $S$?
#
# Errors are *relative errors of the norm* from here on: $\lVert \hat x - x \rVert / \lVert x \rVert$, with $\hat x$
# what comes back from FP8.

# %%
x = torch.linspace(-1000, 10000, 1101, device=lab.device)
S = fp8.scale_for(fp8.amax(x)).item()
metrics = {"scale": S, "scaled_min": (x * S).min().item(), "scaled_max": (x * S).max().item()}
metrics["relative_error"] = relative_error(quantise(x).restored(), x)
lab.keep(Run("05", "fp8-scaling", metrics=metrics))
print(f"S = {S:.4f} takes the values to {metrics['scaled_min']:.1f} .. {metrics['scaled_max']:.1f}.")
print(f"Cast and scaled back they are {metrics['relative_error']:.1%} off.")
lab.verdict("A2.fp8.scale");

# %% [markdown]
# Now vary $S$ over many powers of two, for a tensor of normally distributed numbers.
#
# **Your prediction:** by what factor may $S$ be *too small* before the error has doubled?

# %%
my_slack: float | None = None  # a factor, for example 2

lab.predict("factor by which a scale may be too small", my_slack, "x")

# %%
sample = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
right = fp8.scale_for(fp8.amax(sample))


def error_at(power: float, fmt: fp8.Format = E4M3) -> float:
    """Relative error when `sample` is cast with 2^power times the scale that fits E4M3."""
    scale = right * 2.0**power
    return relative_error(fp8.saturating_cast(sample * scale, fmt).float() / scale, sample)


powers = torch.arange(-20, 8.01, 0.25).tolist()
errors = {fmt.name: [error_at(p, fmt) for p in powers] for fmt in (E4M3, E5M2)}
slack = 2 ** -min(p for p in powers if error_at(p) < 2 * error_at(0))

# %%
figure, ax = plt.subplots(figsize=(7.2, 3.2))
for (name, found), color, line in zip(errors.items(), (plots.NAVY, plots.RUST), ("-", "--"), strict=True):
    ax.plot(powers, found, color=color, linestyle=line, label=name)
ax.axvline(0, color=plots.GREY, linestyle=":")
ax.annotate("S = 448 / AMAX", (0, 0.6), (-6, 0), textcoords="offset points", fontsize=9, ha="right")
ax.annotate("flushed to zero", (-20, 0.12), fontsize=9, color=plots.NAVY)
ax.annotate("cut off", (3.4, 0.2), fontsize=9, color=plots.NAVY)
ax.set(yscale="log", ylim=(0.015, 1.5), xlabel="scale S: powers of two away from the one that fits E4M3")
ax.set_ylabel("relative error, share")
ax.legend(loc="lower right")
ax.set_title("A scale may be far too small, but hardly too large")
plt.show()


# %% [markdown]
# The slider below (in JupyterLab; the figure above tells the same) draws the tensor under a scale of your choice.


# %%
def draw(power: int) -> None:
    """The scaled numbers against E4M3's range."""
    figure, ax = plt.subplots(figsize=(7.2, 2.8))
    ax.hist((sample * right * 2.0**power).abs().log2().clamp(-16, 12), bins=80, range=(-16, 12), color=plots.NAVY)
    ax.axvspan(-16, -10, color=plots.MIST, label="become 0")
    ax.axvspan(math.log2(448), 12, color=plots.ROSE, label="become 448")
    ax.set(xlabel="log₂ of the scaled magnitude", ylabel="numbers", xlim=(-16, 12))
    ax.set_title(f"S × $2^{{{power}}}$: relative error {error_at(power):.1%}")
    figure.legend(loc="outside lower center", ncols=2)
    plt.show()


lab.explore(draw, range(-16, 7), "S × 2^")

# %% [markdown]
# **Takeaway.** The "F" is for floating: within the format's range the error does not depend on the scale, so one that
# is too small by some powers of two costs nothing. One that is too large cuts off the largest values, which carry the
# norm.

# %% [markdown]
# ## 4 · Today's scale or yesterday's
#
# **Question.** To scale by a tensor's own AMAX one reads it twice: once for the maximum, once to cast it (*current
# scaling*). Transformer Engine, in the recipe that the article describes, takes the AMAX from a history of past steps
# instead (*delayed scaling*), so the cast can happen in the kernel that makes the tensor. The article trusts that
# distributions change slowly. What if they don't?
#
# Four made-up sequences of 60 steps: a slow drift of 10 % a step; growing by half and shrinking by a third each step;
# and steady but for a spike of 30 times the size every 20 steps, as a bad batch makes. A *margin* of 3 makes every
# scale 2³ times smaller, to leave room.
#
# **Your prediction:** how large is the relative error in the step of the spike, with delayed scaling and no margin?

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
        followed[name, label] = [relative_error(scaling(sample * f).restored(), sample * f) for f in factors]
metrics = {f"{name}, {label}": summarise(found[1:]) for (name, label), found in followed.items()}
spike_error = max(followed["spikes", "delayed, of 16 steps"][1:])
lab.keep(Run("05", "fp8-delayed", metrics=metrics | {"spike_error": spike_error}));

# %%
figure, axes = plt.subplots(1, 4, sharey=True, figsize=(7.4, 3.4))
looks = (("-", plots.MIST, 5), ("--", plots.RUST, 1.8), (":", plots.NAVY, 2.4), ("-.", plots.TEAL, 1.6))
for ax, name in zip(axes, sizes, strict=True):
    for label, (line, color, width) in zip(scalings, looks, strict=True):
        ax.plot(followed[name, label][1:], linestyle=line, color=color, linewidth=width, label=label)
    ax.set(title=name, xlabel="step", yscale="log")
axes[0].set_ylabel("relative error, share")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=2)
plt.show()
worst = [(name, *(100 * max(followed[name, s][1:]) for s in scalings)) for name in sizes]
lab.table(("error in the worst step, %", *scalings), *worst)

# %% [markdown]
# Slow drift costs nothing. Growth cuts the largest values off in every step; a spike loses most of itself, as all of it
# is cut off at the old AMAX. (The default's history of 1024 steps remembers the first spike and meets the next ones
# prepared; then it casts with that small scale for 1024 steps, which section 3 showed to be free.) The same memory is
# fatal where a tensor shrinks for good: with the scale of its old size it ends at zero. A margin of $m$ keeps $2^m$ in
# hand at one end and takes it from the other.
#
# The other price of delayed scaling is state: a history for every tensor of every layer, updated each step, which a
# compiled or captured step must carry along and a checkpoint must save.
#
# **Takeaway.** Delayed scaling is safe for what changes slowly. A scale a row, computed from that row in the kernel
# that casts it, has no history to be wrong; section 5 counts what reading it costs.

# %% [markdown]
# ## 5 · When FP8 is faster
#
# **Question.** FP8 tensor cores promise twice the BF16 rate. From which matrix size on does a product really gain, once
# the activations have to be quantised as well?
#
# **Your prediction:** the side $n$ of square matrices from which FP8, quantising included, beats BF16.

# %%
my_size: float | None = None  # for example 1024

lab.predict("size from which FP8 wins", my_size)

# %%
gemm = series = None
with lab.attempt("Products in FP8", reference="gemm"):
    sizes_n = [512, 1024, 2048, 4096] if lab.scale != "full" else [512, 1024, 2048, 4096, 8192]
    times = products.sweep_products(sizes_n)
    gemm, series = Run("05", "gemm"), Run("05", "gemm-times")
    for kind, by_size in times.items():
        series.samples |= {f"{kind} {n}": timing.alone_ms for n, timing in by_size.items()}
    series.metrics = {name: summarise(ms) for name, ms in series.samples.items()}
    lab.keep(series)
    bf16, one_scale = (series.samples[f"{kind} {sizes_n[-1]}"] for kind in (products.BF16, products.ONE_SCALE))
    gemm.metrics["fp8_over_bf16"] = summarise([a / b for a, b in zip(bf16, one_scale, strict=False)])
    if wins := products.wins_from(times[products.FUSED], times[products.BF16]):
        gemm.metrics["fp8_wins_from_n"] = wins
    lab.keep(gemm)

# %%
shown = series or lab.reference("gemm-times")
if shown and shown.ok:
    figure, ax = plt.subplots(figsize=(7.2, 4.2))
    looks = zip("os^vDX", ("-", "-", "-", "--", ":", "--"), plots.FILLS, strict=False)
    for kind, (marker, line, (color, _)) in zip(products.PRODUCT_KINDS, looks, strict=True):
        ms = {n: shown.metric(f"{kind} {n}") for n in (512, 1024, 2048, 4096, 8192)}
        rate = {n: 2 * n**3 / one / 1e9 for n, one in ms.items() if one}
        ax.plot(list(rate), list(rate.values()), marker=marker, linestyle=line, color=color, label=kind)
    ax.set(xscale="log", xlabel="side n of the square matrices", ylabel="TFLOP/s, the GPU's time alone", ylim=(0, None))
    ax.set_xticks(list(rate), [str(n) for n in rate], minor=False)
    ax.minorticks_off()
    figure.legend(loc="outside lower center", ncol=2)
    plt.show()
lab.verdict("A2.fp8.rate");

# %% [markdown]
# Lab 00 measured the ends of these curves: large products alone, with nothing to quantise. Here is what it has on
# record for the H200.

# %%
peaks = read_runs(REFERENCE, "00")["00", "machine"]
bf16 = peaks.metric("tflops_bf16")
kinds = {"BF16": "tflops_bf16", "FP8, a scale a tensor": "tflops_fp8", "FP8, a scale a row": "tflops_fp8_rowwise"}
rows = [(kind, peaks.metric(metric), peaks.metric(metric) / bf16) for kind, metric in kinds.items()]
lab.table(("large products on the H200", "TFLOP/s", "times BF16's"), *rows)

# %% [markdown]
# What to look for. Small products are bound by launching and by memory, where half the bytes help a little and the
# extra kernels hurt. Large ones are bound by the tensor cores, and there the cost of quantising fades: it grows with
# $n^2$ and the product with $n^3$. Called from eager PyTorch, quantising a row is three or four kernels over the whole
# tensor; compiled, it can be one, which merges with whatever made the tensor.
#
# **Takeaway.** "Twice the rate" is the tensor core's. What a layer gets depends on its size and on who quantises.

# %% [markdown]
# ## 6 · One byte a parameter
#
# **Question.** The article's memory did not shrink: `te.Linear` keeps the BF16 weight and makes FP8 copies of it. But
# under LoRA the weight is frozen. What does a frozen layer need to keep?
#
# Forward, $y = xW^\top$. Backward only $\mathrm dX = \mathrm dY\,W$: nobody asks for $\mathrm dW$, so this layer
# needn't save its input either. (LoRA's own matrices, beside it, still do.) `labutils.lowbit.frozen` keeps $W$ in E4M3
# with one scale $s$ a row, $W \approx \mathrm{diag}(s)\,W_8$, and nothing else. Its backward pass takes two thoughts:
#
# - $s$ lies along the dimension that $\mathrm dX$ sums over, where a product's epilogue can't apply it. So it is folded into
#   the gradient before that is quantised: $\mathrm dX = (\mathrm dY\,\mathrm{diag}(s))\,W_8$. Exactly the same product.
# - Hopper multiplies FP8 in one layout only, and $\mathrm dX$ needs the other. $W_8$ is transposed on the fly and dropped.
#
# **Your prediction:** the relative error of its output against float32. (Section 3 showed the error of one tensor; here
# two are multiplied.)

# %%
my_error: float | None = None  # in percent

lab.predict("error of the frozen FP8 layer", my_error, "%")

# %%
k, n = (256, 512) if tiny else (4096, 14336)
linear = nn.Linear(k, n, device=lab.device).requires_grad_(False)
layer = FrozenFP8Linear.from_linear(linear)
x = torch.randn(577, k, device=lab.device).requires_grad_()  # 577: what the article's vision encoder gives an image
dy = torch.randn(577, n, device=lab.device)
y, exact = layer(x), linear(x)
(dx,), (exact_dx,) = (torch.autograd.grad(out, x, dy) for out in (y, exact))
metrics = {"forward_error": relative_error(y, exact), "gradient_error": relative_error(dx, exact_dx)}
lab.keep(Run("05", "frozen-accuracy", metrics=metrics))
print(layer)
rows = [("output y", 100 * metrics["forward_error"]), ("input gradient dX", 100 * metrics["gradient_error"])]
lab.table(("frozen FP8 layer against float32", "error, %"), *rows)

# %% [markdown]
# Each factor is about 2.6 % off, and independent errors add up as squares: $\sqrt2 \times 2.6\,\% = 3.7\,\%$.
#
# The layer takes the 577 rows, an odd number, that the article's FP8 layer refused ("product of all dimensions except
# the last divisible by 8"). Only the *weight* gradient, $\mathrm dY^\top x$, sums over the rows, and a frozen layer
# computes none. On a GPU ours pads them to 592 with zeros, on the safe side of every kernel, and cuts what comes of
# those off again.
#
# Here are all the layer kinds behind the recipe's knob `base_linear`, one layer each: the bytes that it holds for a
# parameter at rest, those with what it keeps between forward and backward (*while running*), and the time of both.
# Memory and time are a GPU's: on a CPU only the first column is left.

# %%
rows, dtype = (4096, torch.bfloat16) if on_gpu else (64, torch.float32)
kinds = dict.fromkeys(("published", *MAKERS), False)
kinds |= {"published, compiled": True, "fp8-frozen, compiled": True} if on_gpu else {}
listed = [("base_linear", "bytes a parameter", "while running", "forward + input gradient, ms")]
for name, compiled in kinds.items():
    run = Run("05", "te-linear" if name == "fp8-te" else f"layer {name}")
    with lab.attempt(f"base_linear={name!r}", reference=run.run):
        run.metrics = products.layer_costs(name.removesuffix(", compiled"), rows, k, n, lab.device, dtype, compiled)
        if samples := run.metrics.pop("step_ms", []):
            run.samples["step_ms"], run.metrics["step_ms"] = samples, summarise(samples)
        lab.keep(run)
        numbers = [run.metric(m) for m in ("bytes_a_parameter", "bytes_a_parameter_running", "step_ms")]
        listed.append((name, *numbers))
lab.table(*listed)

# %% [markdown]
# **Reading it.** *published* are the weights as they come (float32 on a CPU, BF16 on a GPU). *fp8-frozen* is the layer
# above. *nf4* has 4 bits a parameter and is unpacked to BF16 before each product. Two kinds need a GPU: *fp8-te*,
# Transformer Engine's and the article's way, keeps the old weight at rest and makes FP8 copies that come on top while
# it runs; *fp8-torchao* also keeps the old weight. (`labutils doctor` says what a kind needs.)
#
# ### Does PEFT refuse `te.Linear`?
#
# The article swapped the layers *after* attaching LoRA, as PEFT raised `ValueError: Target module Linear() is not
# supported`. PEFT chooses a LoRA layer by the type of what it wraps, so any type that it doesn't know is refused. Ours:

# %%
try:
    attach_lora(nn.Sequential(FrozenFP8Linear.from_linear(linear)), ("0",), 8, 8, "peft")
except ValueError as error:
    print(f"ValueError: {str(error)[:130]} ...")
swapped = nn.Sequential(nn.Linear(64, 64))
attach_lora(swapped, ("0",), 8, 8, "peft")
swapped[0].base_layer = FrozenFP8Linear.from_linear(swapped[0].base_layer)
print("Swapped afterwards it works:", tuple(swapped(torch.randn(3, 64)).shape), "out of", swapped[0].base_layer)

# %%
with lab.attempt("PEFT around te.Linear", reference="te-peft"):
    te = transformer_engine()
    message = ""
    try:
        attach_lora(nn.Sequential(te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")), ("0",), 8, 8, "peft")
    except ValueError as error:
        message = f"ValueError: {error}"
    lab.keep(Run("05", "te-peft", metrics={"failed": int(bool(message)), "message": message}))
    print(f"PEFT {versions()['peft']}:", message or "wraps te.Linear in a layer of its own (lora.TeLinear)")
lab.verdict("A2.te.peft-refuses");

# %% [markdown]
# PEFT 0.19 and later bring a LoRA layer for Transformer Engine's types, so the refusal is history there. The order
# "adapters first, then swap" still is the way for every type that PEFT doesn't know.
#
# **Takeaway.** Which gradients a step needs decides what it must keep of a weight. A frozen one needs a single copy, in
# one byte a parameter; libraries made for training all weights keep more, and rightly so.

# %% [markdown]
# ## 7 · A model, layer by layer
#
# **Question.** Which scale does a real network need: one a tensor, a row, or a block of 32? And should gradients be in
# E5M2, whose range is wider?
#
# We let a Mistral-shaped model compute one loss, catch the input and the output gradient of every linear layer, and
# quantise them in every way. Trained language models have a few channels whose activations are tens of times larger
# than the rest (Dettmers et al. 2022, "LLM.int8()"). Random weights have none. So we look twice: at the model as it is
# drawn, and with such channels **planted** by making three entries of each norm's weight 60 times larger. That is a
# model of the phenomenon and not the phenomenon; `weights = "hub"` adds a trained one.

# %%
width, depth, tokens = (256, 3, (2, 96)) if tiny else (1024, 6, (2, 512))
models = {
    "as drawn": lambda: language_model(width, depth),
    "with planted outliers": lambda: plant_outliers(language_model(width, depth)),
}
if lab.weights == "hub":
    models["SmolLM2-135M"] = lambda: AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")

# %%
surveys = {}
for name, build in models.items():
    with lab.attempt(f"survey {name}"):
        model = build().float().to(lab.device)
        ids = torch.randint(2048, tokens, generator=torch.Generator().manual_seed(0)).to(lab.device)
        seen = watch_linears(model, lambda model=model, ids=ids: model(ids, labels=ids).loss)
        surveys[name] = {layer: layer_errors(one) for layer, one in seen.items()}
        every = next(iter(surveys[name].values()))
        samples = {kind: [errors[kind] for errors in surveys[name].values()] for kind in every}
        lab.keep(Run("05", f"survey {name}", metrics={k: summarise(v) for k, v in samples.items()}, samples=samples))
        del model, seen

# %%
figure, axes = plt.subplots(1, len(surveys), sharey=True, squeeze=False, figsize=(7.4, 3.6))
looks = {"tensor": ("o", plots.NAVY), "row": ("^", plots.TEAL), "block": ("s", plots.AMBER), "int8": ("x", plots.RUST)}
for ax, (name, layers) in zip(axes[0], surveys.items(), strict=True):
    for kind, (marker, color) in looks.items():
        found = [100 * errors[f"forward {kind}"] for errors in layers.values()]
        label = "INT8, a scale a tensor" if kind == "int8" else f"E4M3, a scale a {kind}"
        ax.plot(found, marker=marker, color=color, markersize=4.5, linestyle="none", label=label)
    ax.set(title=name, xlabel="linear layer, in the model's order")
axes[0][0].set_ylim(0)
axes[0][0].set_ylabel("error of the layer's output, %")
figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=2)
plt.show()

# %%
head = ("error of dX, %", "numbers of dY that become 0, %", "the same, worst layer")
for name, layers in surveys.items():
    rows = [(f"*{name}*: gradients dY in", *head)]
    for kind in ("E4M3 tensor", "E4M3 row", "E4M3 block", "E5M2 tensor", "E5M2 row"):
        flushed = [100 * errors[f"flushed {kind}"] for errors in layers.values()]
        error = summarise([100 * errors[f"gradient {kind}"] for errors in layers.values()])["median"]
        rows.append((kind, error, summarise(flushed)["median"], max(flushed)))
    lab.table(*rows)

# %% [markdown]
# Numbers are medians over the layers, where the head doesn't say otherwise.
#
# **What this shows.** With FP8 the granularity hardly changes the error of a product: about 3.7 % is what three
# mantissa bits cost, outliers or not, as each number brings its own exponent. (It is less where one outlier carries
# most of a row: that one is scaled to 448 exactly.) INT8 has one step size for all, so it is better as long as a tensor
# is even and falls behind where outliers are. What a coarse scale does cost is range: a gradient whose magnitude is far
# below its tensor's largest becomes exactly zero. E5M2 keeps it, at 1.6 times the error for all the others; a scale a
# row keeps nearly all of it as well, as a row is one token and has its own range. That is why this course's frozen
# layer takes E4M3 with a scale a row, forward and backward.
#
# **What it can't show.** Whether 3.7 % a layer harms training. Errors of random sign average out over layers and steps;
# the article's loss was 14 % higher after ten steps, but ten steps of one run tell little. Random weights have no
# answer to that. Lab 06 trains a small model and shows how to compare losses over several seeds.
#
# **Takeaway.** Measure the format on the tensors that it is to hold. Errors that a norm hides (small numbers that
# become zero) need a count of their own.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then what is kept for the backward pass, in bytes.

# %%
from labutils.exercises import smaller_than, solved

# %% [markdown]
# **1.** A tensor's largest magnitude is 3.5. What is its scale $S$ for E4M3 with a margin of 2?

# %% tags=["exercise"]
my_S = None  # your number


def check_scale(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_S first."
    if abs(answer - 32) < 1e-6:
        return "Exercise 1: right. The scaled values reach 112, and may grow fourfold before they are cut off."
    if abs(answer - 128) < 1e-6:
        return "Exercise 1: that is the scale without a margin."
    return "Exercise 1: not yet. 448 / AMAX, and two powers of two less."


print(check_scale(my_S))

# %% tags=["solution"]
my_S = 448 / 3.5 / 2**2
solved(check_scale(my_S))

# %% [markdown]
# **2.** Write the input gradient of a frozen layer from its 8-bit weight `W8` [n, k] (already restored to float32) and
# row scales `s` [n, 1], without forming `s * W8`, a second weight.


# %% tags=["exercise"]
def input_gradient(dY, W8, s):
    """dY [m, n] -> dX [m, k]"""
    return None


def check_gradient(function) -> str:
    dY, W8, s = 1e-30 * torch.randn(5, 6), 3e38 * torch.randn(6, 4).sign(), torch.rand(6, 1) + 1.5  # s * W8 overflows
    found, formed = function(dY, W8, s), (dY.double() @ (s.double() * W8.double())).float()
    if found is None:
        return "Exercise 2: fill in input_gradient first."
    if found.shape == formed.shape and torch.allclose(found, formed, rtol=1e-4, atol=1e4):
        return "Exercise 2: right. The scale sits on the dimension that is summed over, so it can go to either factor."
    if not found.isfinite().all():
        return "Exercise 2: nearly. You formed s * W8, which is too large for float32 here. Where else can s go?"
    return "Exercise 2: not yet. Which dimension of dY does s belong to?"


print(check_gradient(input_gradient))


# %% tags=["solution"]
def input_gradient(dY, W8, s):
    return (dY * s.t()) @ W8


solved(check_gradient(input_gradient))

# %% [markdown]
# **3.** A model of 7 billion parameters takes 14 GB in BF16 and 7 GB in FP8. Two ways to convert it: (a) build the FP8
# layers beside the BF16 model, then drop that; (b) drop each layer's BF16 weight as soon as its FP8 form is there. What
# is the peak of memory, in GB, of (a) and of (b)? (A layer is small.)

# %% tags=["exercise"]
my_peaks = None  # two numbers: (a, b)


def check_peaks(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_peaks first."
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "Exercise 3: two numbers are asked for, (a, b), for example (20, 10)."
    if tuple(answer) == (21, 14):
        return "Exercise 3: right. `convert_base` does (b); what it saves shows after the conversion, not during it."
    return "Exercise 3: not yet. What is in memory just before the first BF16 weight is dropped, and what at the start?"


print(check_peaks(my_peaks))

# %% tags=["solution"]
my_peaks = (14 + 7, 14)
solved(check_peaks(my_peaks))

# %% [markdown]
# **4. Make it smaller.** A layer that is frozen in 8 bits, used in the plain way: autograd keeps the restored weight, four
# bytes a parameter, until the backward pass. Get the same result and the same gradient of `x`, and keep at most a tenth of
# that. (What the layer holds anyway isn't counted.)

# %% tags=["exercise"]
frozen_layer = nn.Module()
frozen_layer.register_buffer("W8", torch.randn(512, 256, device=lab.device).to(torch.float8_e4m3fn))
frozen_layer.register_buffer("s", torch.rand(512, 1, device=lab.device) + 0.5)


def restoring(x):
    """x [64, 256] -> [64, 512]"""
    return x @ (frozen_layer.s * frozen_layer.W8.float()).T


def lean(x):
    return restoring(x)  # your code instead; a torch.autograd.Function may keep what it likes


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
# ## What you did
# - You read the 8 bits of FP8 numbers, and saw which numbers there are.
# - You found out what a cast does beyond the range and near zero, and that it depends on the version.
# - You chose scales, and saw what a stale one does to a spike.
# - You saw what decides from which size on FP8 wins, quantising included, and measured it if you have a GPU.
# - You took a frozen FP8 layer of one byte a parameter apart, and wrote its backward pass.
# - You judged formats layer by layer by their errors, and know what random weights don't show.

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
