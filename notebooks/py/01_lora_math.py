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
# pretrained weight $W$ alone, and train a correction that is the product of two thin matrices, $W' = W + BA$. Here you
# write it. Then you test what follows for parameters, expressiveness, time, precision and memory.
#
# **After this lab you can**
# - write a LoRA layer, attach it to any model, merge it and swap it;
# - count what LoRA trains in a model that doesn't fit your machine;
# - say what a rank can and can't express;
# - predict what an adapter adds to a layer's time, and what full training adds;
# - say what training memory consists of, and in which phase of a step its peak lies.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | half a minute |
# | `small` | a GPU of 8 GB | 1 minute |
# | `full` | a GPU of 40 GB | 1 minute |
#
# You need no network: models are built from their published sizes.

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
from functools import partial

import matplotlib.pyplot as plt
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from labutils.course import plots
from labutils.labs.lab01_lora_costs import pass_runs, phases_runs
from labutils.layers.lora import attach_lora, count_trainable
from labutils.profiling.measured_rates import measured_roofline
from labutils.profiling.memory_model import planned, saved_for_backward
from labutils.results.records import Run

# %%
plots.use_style()
torch.manual_seed(0)
device, tiny = lab.device, lab.scale == "tiny"
half, dtype = torch.bfloat16, "bf16"
if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
    half, dtype = torch.float16, "fp16"
elif device == "cpu":
    half, dtype = torch.float32, "fp32"
    torch.set_num_threads(1)  # matrices this small gain nothing from more

# %% [markdown]
# ## 1 · A LoRA layer from scratch
#
# **Question.** A frozen layer computes $y = xW^\top$. LoRA adds $\frac{\alpha}{r}\,(xA^\top)B^\top$, where $A$ is
# $r \times k$, $B$ is $d \times r$, and the *rank* $r$ is small. Is that all?
#
# **Technique.** It is. $A$ starts random and $B$ at zero, so their product is zero, and training begins exactly at the
# pretrained model. The factor $\alpha/r$ is meant to spare you a new learning rate at each rank. With Adam the correction
# still shrinks as $r$ grows: see Kalajdzievski.


# %%
class LoRA(nn.Module):
    """y = base(x) + alpha/r (x A^T) B^T"""

    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        # PEFT's default draws A uniformly; deviation 1/r is what the diffusers script asks for
        self.A = nn.Parameter(torch.randn(r, base.in_features, **like) / r)
        self.B = nn.Parameter(torch.zeros(base.out_features, r, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


# %% [markdown]
# **Measurement.** Most scripts take LoRA from the library PEFT. If our class is right, its outputs and gradients are those
# of PEFT's layer, up to rounding. Both get the same $A$ and the same $B$, no longer zero.

# %%
d = 256 if tiny else 4096
base = nn.Linear(d, d, device=device)
ours = LoRA(copy.deepcopy(base), r=8, alpha=16)
config = LoraConfig(r=8, lora_alpha=16, target_modules=["0"])
peft = get_peft_model(nn.Sequential(copy.deepcopy(base)), config)
layer = peft.base_model.model[0]
A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
with torch.no_grad():
    A.copy_(ours.A)
    B.copy_(ours.B.normal_(std=0.02))

x = torch.randn(64, d, device=device)
for model in (ours, peft):
    model(x).square().mean().backward()
for mine, others in ((ours(x), peft(x)), (ours.A.grad, A.grad), (ours.B.grad, B.grad)):
    torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5 * others.abs().max().item())
print("Output and both gradients are PEFT's.")

# %% [markdown]
# The article also says that $W$ stays as it was. Train for 20 steps, and look for the largest change in it.

# %%
before = copy.deepcopy(ours.base.state_dict())
optimizer = torch.optim.AdamW([ours.A, ours.B], lr=1e-2)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (ours(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
change = max((p - before[name]).abs().amax().item() for name, p in ours.base.named_parameters())
print(f"loss {losses[0]:.3g} to {losses[-1]:.3g}; largest change of a frozen number: {change:g}")
lab.keep(Run("01", "equivalence", metrics={"base_change": change, "loss": losses}))
lab.verdict("A1.lora.base-untouched")

# %% [markdown]
# **Takeaway.** LoRA adds a second path beside a layer. The pretrained weights take part in every step and are never
# written to, so one copy of them serves any number of adapters.

# %% [markdown]
# ## 2 · Attach it, and count
#
# **Question.** To train a $d \times k$ matrix in full means to train $dk$ numbers. LoRA trains $(d + k)\,r$. How many times
# fewer is that in a whole model?
#
# **Your prediction:** how many times fewer are they in A1's example, $d = k = 4096$ and $r = 8$?

# %%
times_fewer = None  # how many times fewer for d = k = 4096, r = 8
lab.predict("times fewer parameters at d = 4096, r = 8", times_fewer, "x")

# %% [markdown]
# **Technique.** Freeze everything, then replace the layers whose names end as you wish. On PyTorch's *meta* device a model
# has shapes and no memory, so the size of the model doesn't matter.


# %%
def attach(model, ends, r, alpha):
    """Put LoRA on every linear layer whose name ends so, and freeze all else."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(ends):
            model.set_submodule(name, LoRA(layer, r, alpha))
    return model


def sd15_unet():  # article A1: attention only
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def qwen3_8b():  # article A3: all projections
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, vocab_size=151936))


# %%
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
counts = {"full_d4096": 4096 * 4096, "lora_d4096_r8": (4096 + 4096) * 8}
for name, build, ends, r in (
    ("sd15", sd15_unet, ATTENTION, 4),
    ("qwen3_8b", qwen3_8b, PROJECTIONS, 8),
):
    with torch.device("meta"):
        model, same = build(), build()
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in attach(model, ends, r, 2 * r).parameters() if p.requires_grad)
    attach_lora(same, ends, r, 2 * r, kind="plain")
    assert trained == count_trainable(same)
    counts |= {f"{name}_total": total, f"{name}_lora_r{r}": trained}
    print(f"{name}, r = {r}: {trained:,} of {total:,} numbers, {trained / total:.2%}")

# %%
lab.keep(Run("01", "lora-counts", metrics=counts))
lab.verdict("A1.lora.count")

# %% [markdown]
# The article's example is a single layer. LoRA trains 1/256 of its numbers. In a whole model rank and adapted layers set the
# factor. SD1.5 at rank 4, only attention: 1,078 times fewer. Qwen3-8B at rank 8, all projections: 375 times.
#
# **Takeaway.** At these ranks LoRA trains one to three of a thousand numbers of a model. Whether its share of the time or of the
# memory is as small is another question: sections 4 and 6.

# %% [markdown]
# ## 3 · What a rank can express
#
# **Question.** $BA$ has at most rank $r$. Suppose that a task needs a correction $\Delta W$ of rank 8, with eight equally
# strong directions. How close can LoRA of rank 4 come?
#
# The best approximation of rank $r$ keeps the $r$ largest singular values $\sigma_i$ (Eckart and Young, 1936). What remains
# is $\sqrt{\sum_{i>r}\sigma_i^2 / \sum_i \sigma_i^2}$ of the correction.
#
# **Your prediction:** what percentage remains at rank 4?

# %%
error_at_rank_4 = None  # percent of the correction's size
lab.predict("error of rank 4 on a correction of rank 8", error_at_rank_4, "%")

# %% [markdown]
# **Technique.** Does gradient descent get that far? The problem isn't convex in $A$ and $B$ together. With inputs whose
# covariance is the identity, the mean squared error of $y$ is the squared distance between $BA$ and $\Delta W$. So train on that.

# %%
width, ranks = (64 if tiny else 512), (1, 2, 4, 6, 8, 12)


def best_error(target, r):
    sigma = torch.linalg.svdvals(target)
    return (sigma[r:].norm() / sigma.norm()).item()


def learn(target, r, seed=0, steps=250):
    """A and B, trained from LoRA's usual start towards B A = target."""
    torch.manual_seed(seed)
    A = (torch.randn(r, width, device=device) / r).requires_grad_()
    B = torch.zeros(width, r, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([A, B], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (B @ A - target).square().sum().backward()
        optimizer.step()
        schedule.step()
    return A.detach(), B.detach()


def error(A, B, target):
    return ((B @ A - target).norm() / target.norm()).item()


# %% [markdown]
# **Measurement.** Two corrections: one with eight equal singular values, and one whose values fall off gradually.

# %%
U, V = (torch.linalg.qr(torch.randn(width, width, device=device))[0] for _ in range(2))
sigmas = {
    "eight equal singular values": (torch.arange(width, device=device) < 8).float(),
    "gradually falling ones": 1 / torch.arange(1, width + 1, device=device),
}
targets = {name: (U * s) @ V.T * (width**0.5 / s.norm()) for name, s in sigmas.items()}
errors = {}
for name, target in targets.items():
    trained = {r: 100 * error(*learn(target, r), target) for r in ranks}
    best = {r: 100 * best_error(target, r) for r in ranks}
    errors[name] = {"best of its rank (SVD)": best, "LoRA, trained": trained}

# %%
flat = {
    f"{name}, {way}, {r}": e
    for name, both in errors.items()
    for way, each in both.items()
    for r, e in each.items()
}
lab.keep(Run("01", "rank-sweep", metrics=flat))
axes = plt.subplots(1, 2, sharey=True, figsize=(7.2, 3.4))[1]
plots.panels(axes, errors, "rank r", "error, % of the correction");

# %% [markdown]
# The two lines lie on each other: training reaches the best that its rank allows. On the left, rank 4 leaves 71 % and rank 8
# nothing. More only costs parameters. On the right none of these ranks is enough: 12 still leaves 22 %.
#
# **Takeaway.** The rank limits what LoRA can learn. On this problem training reaches the limit. Full training on code or
# mathematics makes corrections of far higher rank (Biderman). Small ranks still suffice for many tasks.

# %% [markdown]
# ## 4 · What an adapter costs in time
#
# **Question.** What does an adapter add to a layer's forward and backward pass? What does training the layer itself add? And
# what does the rank do?
#
# Count first, for $n$ rows of input and a square layer. A frozen layer takes $4nd^2$ FLOPs: the output, and the gradient of
# $x$. Training it adds the gradient of $W$, $2nd^2$: 1.5 times. LoRA adds $12nrd$: at $d = 4096$ and $r = 8$ that is
# 0.6 %. Is it?
#
# Lab 00 says to look at the bytes as well. Forward, an adapter reads $x$, reads $y$, and writes $y$ with the correction.
# Backward it reads the gradient of $y$ twice, reads $x$ again, and reads and writes the gradient of $x$. That makes $8nd$
# numbers, whatever the rank. Take two bytes a number and a frozen layer that arithmetic limits: the share added is at least **4
# · ridge / d**; in fp32, double it. An H200's ridge in lab 00 is close to 190 FLOP per byte, so that is about 19 % at 4,096.
#
# That is a fused layer's price. Our class writes each product first and adds it afterwards, in both directions: $12nd$, or 28 % of
# the frozen floor. A cache makes it less, thin products that miss their floor make it more. In place, `y.addmm_(h, B.T)` saves two
# of the twelve.
#
# **Your prediction:** by how many percent does LoRA of rank 8 lengthen the wider layer's time here?

# %%
adapter_adds = None  # percent of the frozen layer's time
lab.predict("an adapter adds to a wide layer", adapter_adds, "%")

# %% [markdown]
# **Technique.** The pass that a training step makes: the gradients of the input and of whatever is trained. A layer that
# computes with $W + BA$ needs the gradient of the whole matrix: $2nd^2$ more, as in full training. Ours and PEFT multiply by
# the thin matrices one after the other.


# %%
def forward_and_backward(layer, x, upstream):
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return torch.autograd.grad(layer(x), wanted, upstream)


def layers_of(d):
    def linear():
        return nn.Linear(d, d, bias=False, device=device, dtype=half)

    return {
        "frozen": linear().requires_grad_(False),
        "LoRA, r = 8": LoRA(linear(), 8, 8),
        "LoRA, r = 64": LoRA(linear(), 64, 64),
        "all trained": linear(),
        "frozen again": linear().requires_grad_(False),
    }


def floors_ms(n, d, size, floor_ms):
    frozen = floor_ms(4 * n * d**2, (4 * n * d + 2 * d**2) * size)
    adapter = {r: floor_ms(12 * n * r * d, 8 * n * d * size) for r in (8, 64)}
    weight = floor_ms(2 * n * d**2, (2 * n * d + d**2) * size)
    return [frozen, frozen + adapter[8], frozen + adapter[64], frozen + weight, frozen]


# %% [markdown]
# **Measurement.** All take turns, nine rounds. Each round gives one ratio to the frozen layer, and the last column is their
# median. The frozen layer takes part twice: how far *frozen again* lies from 1 is noise, and a difference smaller than that
# decides nothing. On a GPU ten passes at a time are replayed from a CUDA graph, so that the host doesn't count. The narrow
# layer is SD1.5's.

# %%
cost = []
for n, d in ((512, 320), (128, 1024)) if tiny else ((16384, 320), (4096, 4096)):
    x = torch.randn(n, d, device=device, dtype=half, requires_grad=True)
    layers, upstream = layers_of(d), torch.randn_like(x)
    passes = {name: partial(forward_and_backward, one, x, upstream) for name, one in layers.items()}
    floors = floors_ms(n, d, half.itemsize, measured_roofline(dtype).floor_ms)
    cost += pass_runs(d, passes, dict(zip(layers, floors, strict=True)))
lab.keep(cost)
names = {
    "layer": "layer",
    "width": "width",
    "floor_ms": "floor, ms",
    "pass_ms": "measured, ms",
    "times": "times frozen, median of rounds",
}
lab.show(cost, names, experiment="adapter cost")

# %% [markdown]
# At 4,096 the adapter added about 45 % on the H200: *frozen again* is 4 % off. Its traffic, $12nd$, is 25 % of *frozen* as
# measured. Thin products miss their floor as well (lab 00). By its floor, rank 64 costs no more than rank 8. Measured, the two
# can't be told apart. Against full training LoRA can save at most a third of a layer's time. At 4,096 it probably saved 7 %. At 320
# the adapter made the layer 4.7 times as slow, full training 2.1 times. Their floors say 3.0 and 1.5. Probably kernels this short
# miss theirs by more (lab 00). A CPU computes slowly beside its memory, so there the FLOPs should count, and the rank with them.
#
# **Takeaway.** An adapter's price is mostly reading and writing activations: by count 25 of the 45 % here. The wider the layer, the
# smaller its share. LoRA is not chosen for speed.

# %% [markdown]
# ## 5 · Merge, take out, swap
#
# **Question.** After training, $W + \frac{\alpha}{r}BA$ can be stored in place of $W$. Then the adapter costs no time at all.
# But weights are usually stored in 16 bits. How much noise does rounding add?
#
# bf16 has 8 significant bits. Rounding a number that lies between 1 and 2 is off by at most $2^{-8}$. The root mean square of
# the error is $2^{-8}/\sqrt 3$, where the number itself is about 1.5. So the noise is about $2^{-8} / \sqrt 3 / 1.5$ of $W$.
# Suppose that the correction is 1 % of $W$ in size.
#
# **Your prediction:** how large is the noise, in percent of the *correction*?

# %%
noise_in_bf16 = None  # percent of the correction
lab.predict("noise of merging into bf16", noise_in_bf16, "%")

# %% [markdown]
# **Technique.** Merging is one line, and taking out is another.

# %%
d = 256 if tiny else 4096
W = torch.randn(d, d, device=device) / d**0.5
B, A = torch.randn(d, 8, device=device), torch.randn(8, d, device=device)
B *= 0.01 * W.norm() / (B @ A).norm()  # the correction: 1 % of W

merging = {}
for kind in (torch.float32, torch.float16, torch.bfloat16):
    stored = W.to(kind)
    merged = (stored.float() + B @ A).to(kind)  # W += B A
    back = (merged.float() - B @ A).to(kind)  # W -= B A
    got = merged.double() - stored.double()
    delta = (B @ A).double()
    noise = ((got - delta).norm() / delta.norm()).item()
    along = ((got * delta).sum() / delta.square().sum()).item()
    off = (back != stored).double().mean().item()
    merging[str(kind)] = noise
    print(f"{kind}: noise {noise:.2%}, mean effect {along:.4f}, {off:.0%} of W not as it was")
lab.keep(Run("01", "merge", metrics={f"{kind}_noise": noise for kind, noise in merging.items()}));

# %% [markdown]
# In bf16 the noise is 17 % of the correction; the formula said 15 %. On average all of it arrives; far smaller ones may be lost.
# fp16 has three bits more, and an eighth of the noise. Its effect on a model is not tested here. A layer that rounds its output to
# 16 bits adds as much noise of its own. Some weights do not come back exactly when the adapter is taken out. Where that matters,
# keep the adapter beside the weights. The course's own layer, in `labutils/layers/lora.py`, does so, and writes PEFT's files.
#
# Adapters kept beside the weights can be swapped. Train two, each on a correction of its own of rank 4.

# %%
def correction():
    return torch.randn(width, 4, device=device) @ torch.randn(4, width, device=device) / width**0.5


tasks = {"portraits": correction(), "landscapes": correction()}
adapters = {name: learn(task, r=4, steps=500) for name, task in tasks.items()}
A, B = adapters["portraits"]
adapters["no adapter"] = A, torch.zeros_like(B)
print("error on    ", *(f"{task:>11}" for task in tasks))
for name, pair in adapters.items():
    print(f"{name:12}", *(f"{error(*pair, target):11.2f}" for target in tasks.values()))

# %% [markdown]
# Each adapter has learned its own task. On the other's it is worse than no adapter at all. In a file, an adapter of rank 4 on a
# 4,096-wide layer takes $2 \cdot 4096 \cdot 4$ numbers, 512 times fewer than the layer.
#
# **Takeaway.** A merged adapter costs no time, and can't be swapped. One kept beside the weights can. The same weights can't
# give you both.

# %% [markdown]
# ## 6 · What training memory is made of
#
# **Question.** Training holds the weights, their gradients, the optimizer's state, and the *activations*. Those are results
# of the forward pass that the backward pass needs. LoRA trains one of 375 numbers of Qwen3-8B. By what factor does the
# *whole* shrink?
#
# A trained number in fp32 with AdamW takes 4 + 4 + 4 + 4 = 16 bytes: weight, gradient, two moments. In pure bf16 it takes
# 2 + 2 + 2 + 2 = 8. A frozen number takes 2 in bf16.
#
# **Your prediction:** how many times less memory does Qwen3-8B take with LoRA in bf16 than all trained in fp32? The batch is
# four texts of 861 tokens. Without activations it would be 16 / 2 = 8.

# %%
times_less_memory = None  # four texts of 861 tokens
lab.predict("less memory for Qwen3-8B with LoRA", times_less_memory, "x")

# %% [markdown]
# **Technique.** A hook sees every tensor that autograd keeps for the backward pass. What several operations share counts
# once; the weights are there anyway.


# %%
def kept_bytes(module, forward):
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that its address isn't used again
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in seen.values())


def mlp():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


tokens = torch.randn(100, 512)
for name, model in (("all trained", mlp()), ("LoRA", attach(mlp(), ("0", "2"), 8, 8))):
    forward = lambda model=model: model(tokens).square().mean()
    assert kept_bytes(model, forward) == saved_for_backward(model, forward)
    print(f"{name}: {kept_bytes(model, forward):,} bytes are kept for 100 tokens")

# %% [markdown]
# LoRA keeps slightly more. A's gradient needs the layer's input, exactly as W's does. The nonlinear parts keep theirs, too. A
# frozen model without LoRA, through which gradients pass to earlier layers, would keep half: the inputs of GELU and of the
# square.
#
# **Measurement.** The same count on all of Qwen3-8B, on the meta device, with article A3's batch of four texts of 861 tokens.
# Attention counts as a fused kernel keeps it. The model in fp32 trains under autocast, which keeps copies of the weights
# in bf16, too: they count among the activations.

# %%
def memory_of(kind, lora):
    with torch.device("meta"):
        model, ids = qwen3_8b().to(kind), torch.empty(4, 861, dtype=torch.long)
    if lora:
        attach(model, PROJECTIONS, 8, 16)
    inputs = {"labels": ids, "use_cache": False, "attention_mask": {"full_attention": None}}
    autocast = torch.bfloat16 if kind == torch.float32 else None
    return planned(model, saved_for_backward(model, lambda: model(ids, **inputs).loss, autocast))


memory = {
    "all trained, fp32": memory_of(torch.float32, lora=False),
    "all trained, bf16": memory_of(torch.bfloat16, lora=False),
    "LoRA, bf16": memory_of(torch.bfloat16, lora=True),
}

# %%
lab.keep(
    Run(
        "01",
        "memory",
        metrics={
            f"{way}, {part}": gb for way, one in memory.items() for part, gb in one.in_gb().items()
        },
    )
)
plots.breakdown(plt.gca(), {way: one.in_gb() for way, one in memory.items()}, unit="GB")
less = memory["all trained, fp32"].total / memory["LoRA, bf16"].total
fewer = counts["qwen3_8b_total"] / counts["qwen3_8b_lora_r8"]
print(f"{less:.1f} times less memory, for {fewer:.0f} times fewer trained numbers")

# %% [markdown]
# The 4.3 is 2.2 by LoRA, 42 GB against 94 in bf16, times 1.9 by the number format, 94 against 180. LoRA's activations take 25.5 GB,
# where those of full training take 28.9: frozen norms no longer keep what only their own gradient takes.
#
# When does a real step need most? Train SD1.5's UNet in fp32 on one random input, at `tiny` and `small` a narrow one, and read the
# peak of each phase. On a GPU that is `torch.cuda.reset_peak_memory_stats()` before a phase and `max_memory_allocated()` after it.

# %%
full = lab.scale == "full"
side, context = (64, 768) if full else (32, 64)
sizes = {"sample_size": side, "cross_attention_dim": context}
if not full:
    sizes |= {"block_out_channels": (32, 64, 64, 64), "norm_num_groups": 8, "layers_per_block": 1}
inputs = (torch.randn(1, 4, side, side), torch.tensor(500), torch.randn(1, 77, context))
inputs = [tensor.to(device) for tensor in inputs]


def two_steps(name, r=0, **adamw):
    with torch.device(device):
        unet = UNet2DConditionModel(**sizes)
    if r:
        attach(unet, ATTENTION, r, r)
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **adamw)
    return phases_runs(name, unet, lambda: unet(*inputs).sample.square().mean(), optimizer)


# %%
phases = [
    *two_steps("all, AdamW (foreach)", foreach=True),
    *two_steps("all, AdamW (fused)", fused=True),
    *two_steps("LoRA, r = 4", r=4, foreach=True),
    *two_steps(f"LoRA, r = {64 if full else 16}", r=64 if full else 16, foreach=True),
]
names = ("weights_gb", "forward_gb", "backward_gb", "update_gb")
lab.show(lab.keep(phases), names, experiment="memory by phase")

# %% [markdown]
# The first step misleads. Its passes run before AdamW makes its moments. From the second step on the moments stay, so the
# second step decides. With all weights trained, its forward pass needs three weights' worth and the activations. When its
# backward pass ends, there are four: weights, gradients and two moments. The *fused* update needs no more than these four.
# AdamW's *foreach* form, PyTorch's default on a GPU, needs five: it computes temporaries for all weights at once.
#
# So `fused=True` lowers the peak only where the activations take less than two weights' worth. The full UNet's take half of one.
# There *foreach* peaks in its update, at 17.3 GB, and *fused* in its backward pass, at 14.3. The narrow UNet of `tiny` and `small`
# has more activations than that: there the peak lies in the passes. With LoRA it does, too: 5.1 GB at rank 4 and 5.3 at 64, at
# `full`, against 14.3 and 17.3.
#
# **Takeaway.** LoRA saves what grows with the number of *trained* parameters, and little of what grows with the batch. For that
# there are checkpointing, fused kernels and smaller number formats.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("01.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than
from labutils.labs.lab01_lora_costs import check_conv

# %% [markdown]
# **1. Count without building.** Qwen3-8B has 32 query heads, which share 8 key and value heads; each head has 128
# numbers, and the hidden size is 4096. How many parameters does LoRA of rank 16 train on `q_proj`, `k_proj`, `v_proj` and
# `o_proj` of all 36 layers?

# %% tags=["exercise"]
my_count = None  # a whole number
print(check("01.1", my_count))

# %% [markdown]
# **2. The rank that is enough.** Write `least_rank`: the smallest rank whose best approximation of `target` leaves a
# relative error of at most `tolerance`.


# %% tags=["exercise"]
def least_rank(target: torch.Tensor, tolerance: float) -> int | None:
    return None  # torch.linalg.svdvals(target) gives the singular values, largest first


def check_least_rank(answer) -> str:
    known = torch.diag(torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0, 0.0]))  # squares: 9 + 4 + 4 + 1
    if answer(known, 0.5) is None:
        return "Exercise 2: fill in least_rank first."
    for tolerance, rank in ((1.0, 0), (0.71, 1), (0.53, 2), (0.52, 3), (0.23, 4), (0.001, 4)):
        if (got := answer(known, tolerance)) != rank:
            return f"Exercise 2: not yet. At a tolerance of {tolerance} it gave {got}; rank {rank} will do."
    falling = answer(targets["gradually falling ones"], 0.2)
    return f"Exercise 2: right. For the gradually falling target and 20 % error: rank {falling}."


print(check_least_rank(least_rank))


# %% [markdown]
# **3. LoRA on a convolution.** Write it yourself. $A$ is a convolution like the frozen one, with only $r$ output channels.
# $B$ is a 1 × 1 convolution from these to all output channels. Neither has a bias. The check merges your $BA$ into the
# frozen kernel, and compares the outputs.


# %% tags=["exercise"]
class LoRAConv(nn.Module):
    """y = base(x) + alpha/r B(A(x)), where A and B are convolutions."""

    def __init__(self, base: nn.Conv2d, r: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.A = self.B = None  # two nn.Conv2d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)  # your code


print(check_conv(LoRAConv))


# %% [markdown]
# **4. Make it faster.** Here is a backward pass by the book. It first computes the gradient of the merged weight,
# $G = (\partial L / \partial Y)^\top X$, and from it $\partial L/\partial A = B^\top G$ and $\partial L/\partial B = G A^\top$.
# Compute the same two gradients at least twice as fast.

# %% tags=["exercise"]
n, d = (4096, 4096) if device == "cuda" else (512, 1024)


def by_the_book(x, dy, A, B):
    """x [n, d], dy [n, d], A [8, d], B [d, 8] -> the gradients of A and B"""
    gradient = dy.T @ x
    return {"A's gradient": B.T @ gradient, "B's gradient": gradient @ A.T}


def backward(x, dy, A, B):
    return by_the_book(x, dy, A, B)  # your code instead


def a_batch(seed: int) -> tuple:
    torch.manual_seed(seed)
    return tuple(torch.randn(shape, device=device) for shape in ((n, d), (n, d), (8, d), (d, 8)))


print(faster_than(4, by_the_book, backward, a_batch, times=2, tolerance=1e-3))


# %% [markdown]
# ## What to read on
# - E. Hu and others: *[LoRA: Low-Rank Adaptation of Large Language Models](https://arxiv.org/abs/2106.09685)*, 2021.
#   Section 7 asks which ranks are needed.
# - C. Eckart, G. Young: *The approximation of one matrix by another of lower rank*, Psychometrika 1, 1936.
# - D. Kalajdzievski: *[A Rank Stabilization Scaling Factor for Fine-Tuning with
#   LoRA](https://arxiv.org/abs/2312.03732)*, 2023. Why $\alpha/\sqrt r$ may serve better at large ranks.
# - D. Biderman and others: *[LoRA Learns Less and Forgets Less](https://arxiv.org/abs/2405.09673)*, 2024.
# - Y. Sheng and others: *[S-LoRA: Serving Thousands of Concurrent LoRA Adapters](https://arxiv.org/abs/2311.03285)*, 2023.
# - Hugging Face: *[PEFT's documentation](https://huggingface.co/docs/peft)*, on merging and on what else can be adapted.
#
# Next: lab 02, where the time of a training step goes.

# %%
lab.done(
    {
        "times fewer parameters at d = 4096, r = 8": counts["full_d4096"] / counts["lora_d4096_r8"],
        "error of rank 4 on a correction of rank 8": errors["eight equal singular values"][
            "LoRA, trained"
        ][4],
        "an adapter adds to a wide layer": 100 * (cost[6].metric("times") - 1),
        "noise of merging into bf16": 100 * merging["torch.bfloat16"],
        "less memory for Qwen3-8B with LoRA": less,
    }
)
