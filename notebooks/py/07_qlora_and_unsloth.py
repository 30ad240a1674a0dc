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
# Article A3 fine-tunes language models of 8 to 120 billion parameters: with LoRA, with QLoRA, which holds the frozen weights in 4
# bits, and with unsloth, a library that replaces much of the training code.
#
# **After this lab you can**
# - quantise weights to 8 and 4 bits as bitsandbytes does;
# - set up QLoRA, and say what each line changes;
# - compute what restoring 4-bit weights costs a GPU;
# - send activations to the host in six lines;
# - compare two recipes like for like;
# - train adapters and swap them.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 141 GB | 6 minutes; Qwen3-32B, 1.5 more |
#
# At `full` the model is Qwen3-8B, at `small` Qwen3-0.6B; `qwen3_32b` adds Qwen3-32B. With `weights = "hub"` weights are real,
# else random: time and memory are the real model's. unsloth needs a GPU.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated texts with the datasets' lengths; hub: the real datasets
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
qwen3_32b: bool = False  # measure Qwen3-32B as well: a minute and a half of a GPU of 96 GB

# %%
from labutils.course.lab import open_lab

lab = open_lab("07", globals())

# %%
import tempfile
import time
import warnings
from collections import Counter

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
import transformers
from bitsandbytes import functional as bnb
from torch import nn

# %%
from labutils.course import plots
from labutils.data import toy_articles
from labutils.labs import lab07_qlora
from labutils.labs.ladders import A2_BASE
from labutils.layers.cuda_graph import compile_from_nothing
from labutils.profiling.machine import usable_cores
from labutils.profiling.trace import profile
from labutils.results.effects import effect
from labutils.results.records import Run, Runs, reference_runs
from labutils.training import Benchmark, Trainer
from labutils.training.model_edits import prepared_for_kbit
from labutils.training.unsloth_run import train_with_unsloth
from labutils.workloads import open_workload

# %%
plots.use_style()
warnings.filterwarnings("ignore", module="torch|transformers|peft")
transformers.utils.logging.disable_progress_bar()
compile_from_nothing()  # so that a first step compiles all that it uses
if lab.device == "cpu":
    torch.set_num_threads(max(1, usable_cores() // 2))
torch.manual_seed(0)
texts = {length: lab.workload(f"qwen3-lora-{length}") for length in ("short", "long")}
traces = lab.cache_dir / "traces" / "lab-07"

# %% [markdown]
# ## 1 · Eight bits and an outlier
#
# **Question.** How are numbers held in 8 bits, and what does one large number do to all others?
#
# **Technique.** *Absmax* multiplies all numbers by one constant, so that the largest becomes 127, and rounds them to *codes*. A
# code over the constant *restores* its number, with a rounding error.


# %%
def largest(x):
    """The largest magnitude of each row: its absmax."""
    return x.abs().amax(dim=-1, keepdim=True)


def absmax_int8(x):
    """Codes of x, and the constant of each row that it was multiplied by."""
    c = 127 / largest(x)
    return (c * x).round(), c


example = torch.tensor([[2.50, -0.70, 0.12, 0.48]])
codes, c = absmax_int8(example)
restored = codes / c
assert torch.equal(codes.to(torch.int8), bnb.int8_vectorwise_quant(example.half())[0])

# %%
found = {"constant": c.item()}
found |= {f"code_{place}": code for place, code in enumerate(codes[0].int().tolist())}
found |= {f"restored_{place}": value for place, value in enumerate(restored[0].tolist())}
lab.keep(Run("07", "absmax", metrics=found))
print(f"c = {c.item():.1f}, codes {codes.tolist()}, restored {restored.numpy().round(4)}")

# %% [markdown]
# Take a million normally distributed weights with one *outlier*. Quantise with one constant for all, and then in *blocks*: a
# constant for each 64 neighbours. A number smaller than half a step, absmax/254, becomes 0.
#
# **Prediction.** The outlier is 100 standard deviations (*sigma*) large. With one constant, what share of the other codes is 0?

# %%
my_zeros: float | None = None  # in percent

lab.predict("codes that an outlier of 100 sigma turns into 0", my_zeros, "%")


# %%
def off(found, exact):
    """Relative error."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


W = 0.02 * torch.randn(1024, 1024)
zeros = {}
for sigma in (5, 10, 20, 50, 100):
    spiky = W.clone()
    spiky[0, 0] = sigma * W.std()
    for constants, parts in {"one constant": (1, -1), "blocks": (-1, 64)}.items():
        codes, c = absmax_int8(spiky.view(parts))
        others = (codes / c).view_as(W)[1:], W[1:]  # the other weights
        share = zeros[constants, sigma] = (codes == 0).float().mean().item()
        found = {"zeros_share": share, "others_error": off(*others)}
        how = {"experiment": "outlier", "constants": constants, "sigma": sigma}
        lab.keep(Run("07", f"outlier of {sigma}, {constants}", tags=how, metrics=found))
        error = f"the others {found['others_error']:.1%} off"
        print(f"{sigma:>3} sigma, {constants:>12}: {share:.1%} of the codes are 0, {error}")

# %%
lab.verdict("A3.int8.codes", "A3.int8.outlier", "A3.blocks.contain")

# %% [markdown]
# With one constant 31 % are 0: half a step is 0.39 sigma. The others, 5 sigma at most, get codes up to 6 of 127. Beyond some 5 ·
# 254 = 1,270 sigma all are 0.
#
# **Takeaway.** The largest number sets the error of all that share its constant. Blocks leave an outlier 63 neighbours to spoil.

# %% [markdown]
# ## 2 · Four bits by hand
#
# **Question.** Four bits are 16 levels. Weights are roughly normal: many small ones, few large ones. Where should the levels lie?
#
# **Technique.** NF4's levels are *quantiles* of the normal distribution: values below which a given share of numbers lies. Share
# 0.5 is level 0. From there eight levels go up and seven down, in even steps of the share. Share 1 has an infinite quantile, so
# bitsandbytes ends at 0.9677. Then all are divided by the largest.

# %%
edge = 0.9677083  # between 1 - 1/32 and 1 - 1/30: half a share of 16, and of 15
above = torch.special.ndtri(torch.linspace(edge, 0.5, 9)[:-1].double()).flip(0)
below = -torch.special.ndtri(torch.linspace(edge, 0.5, 8)[:-1].double())
nf4 = torch.cat([below, torch.zeros(1), above]).float()
nf4 /= nf4[-1].clone()
int4 = torch.arange(-7, 8) / 7
assert torch.equal(nf4, bnb.get_4bit_type("nf4", device="cpu"))

# %%
blocks = W.view(-1, 64)
fig, ax = plt.subplots(figsize=(7.2, 2.4))
ax.hist((blocks / largest(blocks)).flatten(), 120, density=True, color=plots.MIST)
ax.vlines(nf4, 0, 0.9, color=plots.NAVY, label="NF4")
ax.vlines(int4, 0.95, 1.15, color=plots.RUST, label="INT4, evenly spaced")
ax.set(xlabel="weight over its block's largest magnitude", yticks=[])
ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
plt.show()

# %% [markdown]
# **Prediction.** INT4 has 15 even levels, from −7 to 7. In blocks of 64, by how many percent is NF4's error smaller?

# %%
my_gain: float | None = None  # for example 30

lab.predict("NF4's error is smaller by", my_gain, "%")


# %%
def nearest(levels, x):
    """Codes [n, block] of the levels nearest to x over its row's largest, and those [n, 1]."""
    peaks = largest(x)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(x * peaks.reciprocal(), middles), peaks


codes, peaks = nearest(nf4, blocks)
pairs = codes.view(-1, 2).to(torch.uint8)
packed = pairs[:, 0] << 4 | pairs[:, 1]  # two codes a byte
restored = (nf4[codes] * peaks).view_as(W)

library, state = bnb.quantize_4bit(W, quant_type="nf4", compress_statistics=False)
assert torch.equal(packed, library.flatten()) and torch.equal(peaks.flatten(), state.absmax)
assert torch.equal(restored, bnb.dequantize_4bit(library, state))
print("bytes, constants and restored weights: bitsandbytes', bit for bit")

# %% [markdown]
# A block's constant, now its absmax, takes 32/64, half a bit a weight. *Double quantisation* puts these constants in 8 bits:
# their mean is subtracted, and each 256 share one constant. The 256 levels are bitsandbytes' own format.

# %%
levels8, mean = bnb.create_dynamic_map(), peaks.mean()
codes8, peaks8 = nearest(levels8, (peaks - mean).view(-1, 256))
doubled = (levels8[codes8] * peaks8 + mean).view(-1, 1)

library, double = bnb.quantize_4bit(W, quant_type="nf4", compress_statistics=True)
assert torch.equal(peaks8.flatten(), double.state2.absmax) and mean == double.offset
print(f"{(codes8.flatten() == double.absmax).float().mean():.2%} of the codes are bitsandbytes'")
own = (levels8[double.absmax.view(-1, 256).int()] * peaks8 + mean).view(-1, 1)
assert torch.equal((nf4[codes] * own).view_as(W), bnb.dequantize_4bit(library, double))

# %%
one_codes, one_peak = nearest(int4, W.view(1, -1))
even_codes, _ = nearest(int4, blocks)
errors = {"int4": off(int4[even_codes] * peaks, blocks), "nf4": off(restored, W)}
frequent = codes.flatten().bincount() / codes.numel()
information = -(frequent * frequent.log2()).sum().item()
bits = {
    "bits_float32": 8 * state.absmax.nbytes / W.numel(),
    "bits_doubled": 8 * (double.absmax.nbytes + double.state2.absmax.nbytes) / W.numel(),
}
print(f"INT4 with one constant is {off(int4[one_codes] * one_peak, W.view(1, -1)):.1%} off,")
print(f"in blocks {errors['int4']:.1%}; NF4 {errors['nf4']:.1%},", end=" ")
print(f"doubly quantised {off(nf4[codes] * doubled, blocks):.1%}")
print(f"an NF4 code carries {information:.2f} of its 4 bits; constants take {bits}")

# %%
for code, error in errors.items():
    found = {"error": error} | ({"information_share": information / 4} if code == "nf4" else {})
    how = {"experiment": "rounding", "code": code}
    lab.keep(Run("07", f"rounding {code}", tags=how, metrics=found))
lab.keep(Run("07", "constants", metrics=bits))
lab.keep(Run("07", "weights", metrics={"linear_share": (4 + bits["bits_doubled"]) / 16}))
lab.verdict("A3.nf4.better", "A3.double.bits", "A3.qlora.weights")

# %% [markdown]
# NF4's error is 14.6 % smaller: its levels are dense where weights are many. A part of that is its sixteenth level: INT4 has 15.
#
# The article calls NF4 optimal in the sense of information theory: all codes equally frequent, with 4 bits each. They carry 3.88.
# A block's largest weight gets an end level, which stretches the levels.
#
# **Takeaway.** Blocks nearly halve INT4's error, and NF4 takes off a seventh more. With doubly quantised constants, a weight
# takes 4.127 bits.

# %% [markdown]
# ## 3 · QLoRA as its users write it
#
# **Question.** Which lines make a model QLoRA, and what does each change?
#
# **Technique.** A tiny random Qwen3 stands in for `"Qwen/Qwen3-8B"`.

# %%
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

folder = tempfile.mkdtemp()
small = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024}
Qwen3ForCausalLM(Qwen3Config(**small)).to(torch.bfloat16).save_pretrained(folder)
projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def qlora(folder):
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, dtype=torch.bfloat16, device_map=lab.device
    )
    not_reentrant = {"use_reentrant": False}  # the kind of checkpoint that PyTorch recommends
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=not_reentrant)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=projections, task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).train()


# %%
model = qlora(folder)
block = model.base_model.model.model.layers[0]
layer = block.self_attn.q_proj
print(type(layer).__module__, "around", type(layer.base_layer).__module__)
print("weight:", layer.base_layer.weight.dtype, tuple(layer.base_layer.weight.shape))
print("norms:", block.input_layernorm.weight.dtype, "adapters:", layer.lora_A.default.weight.dtype)
print("blocks are computed again:", block.gradient_checkpointing)

# %% [markdown]
# Two calls do. `BitsAndBytesConfig` asks for NF4, double quantisation and BF16 products. `prepare_model_for_kbit_training` casts
# embedding, norms and head to float32. It also turns *checkpointing* on: only a block's input is kept, a *checkpoint*, and the
# backward pass computes the block again. So "QLoRA against LoRA" is three changes: format, checkpoints, float32. The course's
# loop trains the same layers:


# %%
def four_bit_layers(model):
    return Counter(type(part) for part in model.modules() if "4bit" in type(part).__name__)


recipe = lab07_qlora.QLORA.fitted_to(lab.device)
course = open_workload("qwen3-lora-long", scale="tiny", device=lab.device).build(recipe)
assert four_bit_layers(course) == four_bit_layers(model)

x = torch.randn(1024, 64, device=lab.device, dtype=torch.bfloat16).requires_grad_()
frozen = layer.base_layer
restored = bnb.dequantize_4bit(frozen.weight.data, frozen.weight.quant_state)
difference = off(frozen(x), F.linear(x, restored))
same = {"multiplies_restored_weights": int(difference < torch.finfo(x.dtype).eps)}
lab.keep(Run("07", "nf4 layer", metrics=same))
print(f"The layer is {difference:.2%} off the product with its restored weight.")

# %% [markdown]
# Nothing is multiplied in 4 bits. The weight is restored to 16 bits before each product: forward, backward, and when a checkpoint
# repeats the forward pass.
#
# Our loop, then TRL's trainer, on one batch:

# %%
tokens = torch.randint(2, 1024, (4, 64), device=lab.device)
torch.manual_seed(0)
model, losses = qlora(folder), []
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
for _ in range(8):
    with torch.autocast(lab.device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
print("our loop:  ", [f"{loss:.3f}" for loss in losses])

# %%
with lab.attempt("SFTTrainer"):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import SFTConfig, SFTTrainer  # make trl

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    update = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "weight_decay": 0.01}
    update |= {"max_steps": 8, "per_device_train_batch_size": 4, "max_grad_norm": 0.3, "bf16": True}
    quiet = {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    how = SFTConfig(output_dir=folder, use_cpu=lab.device == "cpu", **update, **quiet)
    torch.manual_seed(0)
    model = qlora(folder)
    one_batch = Dataset.from_dict({"input_ids": tokens.tolist()})
    trainer = SFTTrainer(model, how, train_dataset=one_batch, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    said = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("SFTTrainer:", [f"{loss:.3f}" for loss in said])
    torch.testing.assert_close(torch.tensor(said), torch.tensor(losses), rtol=0.01, atol=0)

# %% [markdown]
# On our H200 the losses agree to 0.001.
#
# How many numbers does LoRA train? On the *meta* device tensors have shapes only.

# %%
qwen3_8b = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
qwen3_8b |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
with torch.device("meta"):
    model = Qwen3ForCausalLM(Qwen3Config(**qwen3_8b, head_dim=128, tie_word_embeddings=False))
    in_all = sum(p.numel() for p in model.parameters())
    model = get_peft_model(model, LoraConfig(r=8, target_modules=projections))
trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
matrices = [m for name, m in model.named_modules() if name.endswith("base_layer")]
by_formula = sum((m.in_features + m.out_features) * 8 for m in matrices)
share = 4 * sum(trained.values()) / (2 * in_all)  # in float32, beside 16 bits
print(f"{sum(trained.values()):,} of {in_all:,} are trained, {share:.2%} of the bytes")
found = {"counts_as_the_formula": int(sum(trained.values()) == by_formula), "adapter_share": share}
lab.keep(Run("07", "lora-counts", metrics=found))
lab.verdict("A3.lora.count", "A3.qlora.dequantised")

# %% [markdown]
# LoRA trains 21.8 million numbers. QLoRA converts 6.95 of the 8.19 billion frozen ones. With the others in float32, 16.4 GB
# shrink to 8.6, not to a quarter.
#
# **Takeaway.** 4 bits save storage, not arithmetic.

# %% [markdown]
# ## 4 · What 4 bits alone cost
#
# **Question.** The article blames dequantising for QLoRA's longer step. How long does it take, on the GPU and on the host?
#
# **Technique.** *Dequantising* is restoring. For $n$ weights it reads 4.127 bits each and writes 16, at the rate $B$ of
# bitsandbytes' kernel on one large weight:
#
# $$t = \text{uses} \cdot n \cdot (4.127/8 + 2) / B$$
#
# Next you measure $B$, and the host's extra time to launch a 4-bit layer.


# %%
def seconds(call, times=20):
    """Of one call: until the device has done it, and until the host is free again."""
    wait = torch.cuda.synchronize if lab.device == "cuda" else lambda: None
    call(), wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    free = time.perf_counter()
    wait()
    return (time.perf_counter() - began) / times, (free - began) / times


# %%
on_gpu = lab.device == "cuda"
dtype, written = (torch.bfloat16, 2) if on_gpu else (torch.float32, 4)
shape = (8 * 12288, 4096) if on_gpu else (1024, 512)  # large enough that the host keeps up
weight = torch.randn(shape, device=lab.device, dtype=dtype)
packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
took, _ = seconds(lambda: bnb.dequantize_4bit(packed, state))
bandwidth = weight.numel() * (4.127 / 8 + written) / took


def restoring_ms(parameters, uses):
    return 1e3 * uses * parameters * (4.127 / 8 + written) / bandwidth


parameters = sum(m.in_features * m.out_features for m in matrices)  # Qwen3-8B's, from section 3
print(f"restored at {bandwidth / 1e9:,.3g} GB/s; at this rate {parameters:,} parameters", end=" ")
print(f"take {restoring_ms(parameters, 2):,.1f} ms, forward and backward")

# %%
x = torch.randn(1024, 64, device=lab.device, dtype=torch.bfloat16).requires_grad_()
plain = nn.Linear(64, 64, bias=False, device=lab.device, dtype=torch.bfloat16)
host_s = seconds(lambda: frozen(x), 200)[1] - seconds(lambda: plain(x), 200)[1]
print(f"the host takes {1e6 * host_s:.0f} us more to hand over a 4-bit layer")

# %% [markdown]
# *Packed* rows have 4,096 tokens, nearly all useful. *Long* are four texts, padded to 8,192 tokens. Over an epoch 54 % of their
# tokens are useful, of *short* texts' 60.
#
# **Prediction.** On packed rows of 4,096 tokens the H200 takes 394 ms a step with 16-bit weights. How many percent longer is it
# with 4 bits? If the host were the limit, two calls of each of 252 layers, 100 µs each, would add 50 ms.

# %%
my_bits: float | None = None  # for example 20

lab.predict("4 bits alone make a step on packed rows longer by", my_bits, "%")

# %% [markdown]
# **Measurement.** Two recipes differ in the format of the frozen weights alone (`lab07_qlora.PACKED`). Neither has checkpoints or
# casts to float32, so each weight is restored twice. A trace of lab 06's LLaVA, with checkpoints, tests the formula with three
# uses.

# %%
with Benchmark(texts["long"], lab07_qlora.WARM_UP, same_batches=True) as bench:
    pair = lab07_qlora.rungs(bench, lab07_qlora.PACKED)
    traced = [bench.trace_into(pair[name], traces, steps=1) for name in lab07_qlora.PACKED]
climbed = lab.keep(pair, lane="same mathematics")
columns = ("step_ms", "speed-up", "floor_ms", "kernels_ms", "gpu_busy", "peak_allocated_gb")
lab.show(climbed, columns, experiment="ladder", rung=tuple(lab07_qlora.PACKED))

# %%
llava = lab.workload("llava-lora")
recipe = A2_BASE.but(checkpointing="blocks", base_linear="nf4")
with Trainer(llava, recipe, on_model=prepared_for_kbit) as trainer:
    llava_trace = profile(trainer, 1, traces, with_stack=False)
restoring = [lab07_qlora.restoring_kernels_ms(one) for one in (traced[1], llava_trace)]
llava.release_weights()
n, n_llava = map(lab07_qlora.frozen_weights, (texts["long"], llava))
pair = [climbed[name] for name in lab07_qlora.PACKED]
longer = {}
for metric in ("kernels_ms", "step_ms"):
    plain, four_bits = (run.metric(metric) for run in pair)
    longer[metric] = four_bits - plain if plain and four_bits else None
lab.table(
    ("4 bits cost, ms a step", "by the formula", "restoring", "all kernels", "the whole step"),
    ("Qwen3, packed, 2 uses", restoring_ms(n, 2), restoring[0], *longer.values()),
    ("LLaVA, batch 1, 3 uses", restoring_ms(n_llava, 3), restoring[1], None, None),
)

# %%
calls = 3 * 7 * 32  # uses, layers of a block, blocks of LLaVA's decoder
if on_gpu:
    print(f"this host needs {1e3 * calls * host_s:.0f} ms more to launch LLaVA's {calls} layers")
lab.verdict("A3.qlora.cause")

# %% [markdown]
# On the H200 4 bits alone made the step 6 % longer, with an interval of 4 to 9. That is 22 ms.
#
# - *GPU:* restoring takes 17 ms, 8 % more than by the formula. On LLaVA it is 10 % more. We didn't look for why.
# - *Host:* at most some 5 of its 50 ms show, as it launches while the GPU computes. The GPU is busy for 95 % of the step. One of
#   our four other H200 hosts lost 14 %.
#
# **Takeaway.** With the GPU busy, 4 bits alone cost 6 % of a step, mostly for restoring, and save 10 GB.

# %% [markdown]
# ## 5 · What comes with QLoRA
#
# **Question.** What does each of QLoRA's three changes cost? And what does sending checkpoints to the host save, as unsloth does?
# The article: 30 % less memory, 1.9 % more time.
#
# **Technique.** PyTorch lets you say how a tensor is kept for the backward pass. Six lines send it to the host.

# %%
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as checkpointed


def to_host(tensor):
    return tensor.device, tensor.to("cpu", copy=True)


def back(kept):
    device, tensor = kept
    return tensor.to(device)


stack = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
stack.to(lab.device)


def gradient(x, hooks=None):
    h = x
    with saved_tensors_hooks(*hooks) if hooks else torch.enable_grad():
        for block in stack:
            h = checkpointed(block, h, use_reentrant=False)
    return torch.autograd.grad(h.square().sum(), x)[0]


# %%
x = torch.randn(512, 256, device=lab.device, requires_grad=True)
sent = []
counting = (lambda tensor: sent.append(tensor.nbytes) or to_host(tensor), back)
torch.testing.assert_close(gradient(x, counting), gradient(x))
print(f"{len(sent)} tensors, {sum(sent) / 1e6:.1f} MB, waited on the host; same gradient")

# %% [markdown]
# 4.2 MB are eight blocks' inputs; the H200's other eight tensors are empty. Here training waits for each copy. The course's
# `Parking` (`labutils/layers/activation_checkpoint.py`), *offloaded* below, copies while the GPU computes.
#
# **Prediction.** LoRA, the base, keeps all activations; QLoRA has checkpoints. Frozen weights need no gradient: products take the
# same backward as forward. Checkpoints make two passes three. Add restoring and float32. By how many percent is QLoRA's step on
# long texts longer than LoRA's?

# %%
my_qlora: float | None = None  # for example 20

lab.predict("QLoRA's step on long texts, longer by", my_qlora, "%")

# %%
by_texts = {
    length: lab.keep(lab07_qlora.methods(texts[length], length, traces)) for length in texts
}
columns = ("step_ms", "speed-up", "floor_ms", "kernels_ms", "gpu_busy", "peak_allocated_gb")
lab.show(by_texts["long"], columns, experiment="methods", texts="long", method=("lora", "qlora"))
lab.verdict("A3.qlora.slower", "A3.checkpointing.slower", "A3.offload.memory")

# %% [markdown]
# Kernels of the two steps with checkpoints, by kind:

# %%
long = {"experiment": "methods", "texts": "long"}
found = Runs(by_texts["long"].values()) if on_gpu else lab.references(**long)
kinds = {}
for name, tags in {
    "LoRA": {"method": "lora", "checkpointing": "blocks"},
    "QLoRA": {"method": "qlora"},
}.items():
    by_kind = found.one(**long, **tags).metrics.get("kernel_categories", {})
    kinds[f"{name}, ms"] = {kind: of["ms"] for kind, of in by_kind.items()}
lab.table(pd.DataFrame(kinds).rename_axis("kernels").reset_index())

# %% [markdown]
# On the H200 QLoRA's step is 64 % longer than LoRA's. The 581 ms are:
#
# - *Checkpoints* cost 360 ms, 39 %, and save 68 GB. Three equal passes would be 50 %; head and loss aren't repeated.
# - *4 bits* cost 26 ms of kernels that restore, *other* in the trace, and save 10 GB. By section 4's 105 µs, launching 756 layers
#   takes the host up to 79 ms more.
# - *float32* probably costs 154 ms, of elementwise kernels and casts. By computation it takes 4.9 GB, as checkpoints, embedding
#   and head double.
# - *The rest* is 41 ms without a kernel, perhaps those launches, and 1.3 GB.
#
# Offloading saved 7 % of the memory, not 30: all checkpoints are 2.4 of 34.1 GB. No cost in time shows.
#
# **Takeaway.** Of QLoRA's 581 ms more, 360 are checkpointing. Against LoRA with checkpoints it takes 17 % longer and saves 4 GB.
# The article doesn't say which it had.

# %% [markdown]
# ## 6 · unsloth
#
# **Question.** What does unsloth change, and what is it worth on short and on long texts?
#
# **Technique.** Its users replace two calls. Importing it changes transformers and PEFT: Triton kernels, a backward pass by hand,
# a loss by chunks, checkpoints on the host. So the course calls this function in another process, and trains with its own loop on
# the same batches.


# %%
def load_with_unsloth(folder):
    from unsloth import FastLanguageModel  # before transformers

    local = {"fix_tokenizer": False, "use_exact_model_name": True}  # it is not from the hub
    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=2048, load_in_4bit=True, **local
    )
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    return FastLanguageModel.get_peft_model(
        model,
        r=8,
        lora_alpha=16,
        target_modules=attention + mlp,
        use_gradient_checkpointing="unsloth",  # to the host, as in section 5
        random_state=0,
        max_seq_length=2048,
    )


# %% [markdown]
# PEFT multiplies in the order $(xA^\top)B^\top$. In $x(BA)^\top$, $BA$ is as large as the weight.
#
# **Prediction.** Take 3,444 tokens, $r = 8$ and a block's matrices: two 4,096 × 4,096, two 4,096 × 1,024, three 4,096 × 12,288.
# Forward and backward, how many times the FLOPs of $(xA^\top)B^\top$ does $x(BA)^\top$ take? In both, A's and B's gradients need
# thin products only.

# %%
my_order: float | None = None  # for example 10

lab.predict("FLOPs, wide first against thin first", my_order, "x")


# %%
from torch.utils.flop_counter import FlopCounterMode


def chain_flops(order, tokens, k, n, r=8):
    """Forward and backward: the gradients of x [tokens, k], A [r, k] and B [n, r]."""
    thin = 2 * tokens * r * (k + n)  # one way through both thin matrices
    if order == "thin first":
        return 3 * thin
    return 2 * thin + 2 * n * r * k + 4 * tokens * k * n


x, A, B = (torch.randn(size, requires_grad=True) for size in ((64, 32), (8, 32), (48, 8)))
with FlopCounterMode(display=False) as counted:
    (x @ A.T @ B.T).sum().backward()
assert counted.get_total_flops() == chain_flops("thin first", 64, 32, 48)

block_of_8b = {(4096, 4096): 2, (4096, 1024): 2, (4096, 12288): 3}  # q and o, k and v, the MLP's
flops = {
    order: sum(count * chain_flops(order, 3444, *kn) for kn, count in block_of_8b.items())
    for order in ("thin first", "wide first")
}
for order, count in flops.items():
    how = {"experiment": "chain", "order": order}
    lab.keep(Run("07", f"chain: {order}", tags=how, metrics={"flops": count}))
print(f"wide first takes {flops['wide first'] / flops['thin first']:.0f} times the FLOPs")

# %% [markdown]
# 213 times: its two wide products are as large as the frozen weight's own.
#
# **Measurement.** unsloth's first step, on record for one run, builds its kernels. Meanwhile the course compiles, which may
# lengthen it.

# %%
bench = Benchmark(texts["long"], lab07_qlora.WARM_UP, same_batches=True)
recipes = lab07_qlora.COMPILED if on_gpu else lab07_qlora.ON_A_CPU
with lab.attempt("unsloth", experiment="methods", method="unsloth", texts="long"):
    jobs, folder = lab07_qlora.unsloth_jobs(texts), lab.results_dir / "unsloth"
    by_texts["unsloth"] = lab.measured_together(
        {name: job.recipe for name, job in jobs.items()},
        lambda: train_with_unsloth(
            jobs, load_with_unsloth, folder, meanwhile=lambda: bench.prepare(recipes)
        ),
    )

# %%
unsloths = by_texts.get("unsloth", {})
usual = [by_texts["long"]["qlora"], *by_texts["short"].values()]
columns = ("first_step_s", "step_ms", "floor_ms", "gpu_busy", "useful_tokens_per_s")
columns += ("peak_allocated_gb",)
lab.show([*usual, *unsloths.values()], columns, experiment="methods", method=("qlora", "unsloth"))
lab.verdict("A3.unsloth.long", "A3.unsloth.length", "A3.unsloth.memory")

# %% [markdown]
# Against the usual QLoRA:
#
# - On long texts unsloth is twice as fast, in less than a third of the memory.
# - On short texts it is 2.7 times as fast, in half the memory. So here it gains more on short ones, against the article. QLoRA's
#   kernels take 206 of 714 ms there: the host sets the pace. Other hosts left it open.
#
# QLoRA takes 21 GB more on long texts. By computation, two or three float32 copies of all *logits*, a number for each token and
# word, are 10 to 15 of them. Float32 checkpoints are 4.8, and embedding and head in float32 are 2.5 more than in 16 bits.
#
# **Takeaway.** Loss by chunks, 16 bits and checkpoints on the host can explain unsloth's memory. Which change brings the time,
# these runs don't separate.

# %% [markdown]
# ## 7 · Like for like
#
# **Question.** With the same 4 bits, checkpoints and rows, how near to unsloth does plain PyTorch come?
#
# **Technique.** Two parts are new; the others are from labs 04 and 06. bitsandbytes' kernel is closed to the compiler, so the
# weight is restored by look-ups in PyTorch (`labutils/layers/quantization/nf4_linear.py`). And the checkpoint is compiled *with*
# its block: the compiler sees what the backward pass needs, and leaves out the rest.

# %%
torch.manual_seed(0)
up, down = (torch.randn(256, 256, device=lab.device) / 16 for _ in range(2))  # frozen
A, B = (nn.Parameter(torch.randn(n, device=lab.device) / 16) for n in ((256, 8), (8, 256)))


def block(h):
    g = F.gelu(h @ up)
    return h + g @ down + (g @ A) @ B


def around(h):
    return checkpointed(block, h, use_reentrant=False)


x, counts = torch.randn(512, 256, device=lab.device, requires_grad=True), []
within = torch.compile(around, backend="aot_eager")  # builds no code: enough to count
for run in (around, within):
    loss = run(x).square().sum()
    with FlopCounterMode(display=False) as counted:
        gradients = torch.autograd.grad(loss, (x, A, B))
    counts.append(counted.get_total_flops() / 1e6)
    plain = torch.autograd.grad(block(x).square().sum(), (x, A, B))
    torch.testing.assert_close(gradients, plain, rtol=1e-3, atol=1e-3)
print("MFLOP of the backward pass: {:.0f} around the block, {:.0f} within".format(*counts))

# %% [markdown]
# The 67 MFLOP between them are one product, `g @ down`. The backward pass doesn't need its result.
#
# **The recipes.** *qlora* and *4 bits, compiled, checkpointed* have 4 bits and checkpoints. The latter adds packed rows, compiled
# blocks, *plain* adapters without casts, a *rewritten* forward pass, a *fused* loss by chunks, and look-ups, *nf4-frozen*. Under
# *base_linear*, *published* means 16-bit weights, elsewhere the library's code:

# %%
compared = {name: recipe for name, (recipe, _) in lab07_qlora.METHODS["long"].items()}
compared |= lab07_qlora.PACKED | lab07_qlora.COMPILED
fields = ("base_linear", "checkpointing", "adapter", "layers", "loss", "compile", "shapes")
lines = ((name, *(getattr(one, field) for field in fields)) for name, one in compared.items())
lab.table(("recipe", *fields), *lines)

# %% [markdown]
# **Prediction.** On the H200 unsloth trains 9,600 useful tokens a second on packed rows. How many times as many does the recipe
# *4 bits, compiled, checkpointed* train?

# %%
my_ratio: float | None = None  # for example 1.1

lab.predict("useful tokens a second, like for like", my_ratio, "x")

# %%
climbed |= lab.keep(lab07_qlora.rungs(bench, recipes), lane="same mathematics")
columns = ("step_ms", "floor_ms", "useful_tokens_per_s", "peak_allocated_gb")
rungs = (*lab07_qlora.PACKED, *lab07_qlora.COMPILED)
lab.show(climbed, columns, experiment="ladder", rung=rungs)

# %%
here = Runs([*by_texts["long"].values(), *unsloths.values(), *climbed.values(), *usual])
drawn = {"experiment": ("methods", "ladder"), "texts": ("long", False), "rung": (*rungs, False)}
drawn |= {"rows": ("packed", False)} | dict.fromkeys(("again", "bits", "casts"), False)
fig, ax = plt.subplots(figsize=(7.2, 4))
runs = (here if on_gpu else lab.references()).select(**drawn)
plots.frontier(ax, runs, lab07_qlora.kind_of)
plt.show()

# %%
ours = climbed[lab07_qlora.LIKE_FOR_LIKE]
rival = unsloths.get("unsloth, packed")
if rival and rival.ok and ours.ok:
    for metric in ("ms_per_1k_useful_tokens", "peak_allocated_gb"):
        print(f"{metric}, ours against unsloth's: {effect(rival, ours, None, metric).text()}")

# %% [markdown]
# Up and to the left is better.
#
# - *Speed:* our recipe trains 1.15 times as many as unsloth. It takes 13 % less time a token, interval 6 to 22. unsloth was timed
#   on two of our three rows a round; on these two it is 13 %, too. On five H200 hosts our step took 369 to 378 ms, unsloth's 403
#   to 699. We didn't look for why.
# - *Memory:* ours takes 1.5 GB more. By computation 1.2 are checkpoints: unsloth's wait on the host.
# - *FP8* has faster products, so a lower floor. It also rounds activations and gradients.
#
# Quality, and 16 bits with compiled checkpoints, weren't measured.
#
# **Takeaway.** Our compiled recipe trains 3.7 times as many useful tokens a second as the usual QLoRA on padded rows, in 30 % of
# its memory. Against unsloth on packed rows it is 1.07 to 1.9 times, by host, in 20 % more memory. Compiled 16 bits in 40 GB
# train 38 % more.

# %% [markdown]
# ## 8 · Qwen3-32B
#
# **Question.** The article had to stop at batch 2 for the 32B with LoRA and QLoRA, in 96 GB. What does batch 4 take?
#
# **Prediction.** QLoRA holds $31.2 \cdot 10^9$ of $32.8 \cdot 10^9$ parameters in 4.127 bits, and embedding and head in float32.
# Add two to three copies of the logits, each of 4 × 2,048 × 152,000 numbers, and 64 checkpoints, each of 4 × 2,048 × 5,120. All
# are float32. How many GB does QLoRA peak at?

# %%
print(f"16 bits: {2 * 32.76:.1f} GB; 4 bits: {31.21 * 4.127 / 8 + 4 * 1.556:.1f} GB")
my_32b: float | None = None  # in GB

lab.predict("Qwen3-32B, QLoRA at batch 4", my_32b, "GB")

# %%
bench.close()  # to give its memory back
larger = {}
if qwen3_32b:
    big = lab.workload("qwen3-32b-lora-long")
    larger = lab.keep(lab07_qlora.large(big, traces / "32b"))
columns = ("step_ms", "floor_ms", "kernels_ms", "gpu_busy", "peak_allocated_gb", "examples_per_h")
on_record = reference_runs("07").select(experiment="qwen3-32b").of_newest_host().newest()
lab.show([*larger.values()] or on_record, columns)

# %% [markdown]
# - **Memory:** with checkpoints, batch 4 took 50 GB with QLoRA on the H200, and 86 with LoRA: both are below 96, without
#   PyTorch's reserve. QLoRA's sum is 43 to 48, without temporary tensors.
# - **Time:** QLoRA's two steps took 7.5 and 5.1 s: too unsteady for a percentage.
#
# **Takeaway.** Weights are a constant. Logits and checkpoints grow with the batch; 4 bits don't shrink those.

# %% [markdown]
# ## 9 · A bare title
#
# **Question.** The article trains on 2,500 encyclopedia texts with their titles as answers. Afterwards its model answers with a
# bare title where it used to explain. What has changed, and can you change it back?
#
# **Technique.** First you train a small Qwen3 from scratch to introduce what a text is about: 浅間の温泉についての紹介。, "An introduction to
# the hot spring (温泉) of Asama (浅間)." Questions are about pairs of place and thing that no training text had.

# %%
steps, batch = 160, 32
told = toy_articles.articles(steps * batch, kept=False)
asked = toy_articles.articles(40, kept=True)
letters = toy_articles.Letters(told + asked)


def train(model, style, steps, rate=1e-2):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    for step in range(steps):
        some = told[step * batch :][:batch]
        model.train()(**letters.batch(some, style, lab.device)).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()


# %%
@torch.no_grad()
def answers(model):
    questions = letters.batch(asked, device=lab.device)
    given = {name: questions[name] for name in ("input_ids", "attention_mask")}
    said = model.eval().generate(**given, max_new_tokens=20, eos_token_id=2, pad_token_id=0)
    return [letters.text(row) for row in said[:, given["input_ids"].shape[1] :].tolist()]


def exact(said, style):
    """Percent of answers that are, to the letter, those of a style."""
    return 100 * sum(a == of.answer(style) for a, of in zip(said, asked, strict=True)) / len(asked)


# %%
torch.manual_seed(0)
tiny = small | {"vocab_size": len(letters.letters), "tie_word_embeddings": True}
reader = Qwen3ForCausalLM(Qwen3Config(**tiny)).to(lab.device)
train(reader, "introduces", steps)
before = answers(reader)
print(f"{exact(before, 'introduces'):.0f} % of the answers introduce their text rightly")

# %% [markdown]
# **Prediction.** Now these weights are frozen, and an adapter is trained on bare titles. What percentage of answers is the exact
# title?

# %%
my_titles: float | None = None  # for example 90

lab.predict("exact titles after fine-tuning", my_titles, "%")

# %%
adapters = LoraConfig(r=8, lora_alpha=16, target_modules=projections)
model = get_peft_model(reader, adapters, adapter_name="title")
train(model, "title", 80)
model.add_adapter("place", adapters)
model.set_adapter("place")
train(model, "place", 40)

said = {}
with model.disable_adapter():
    said["no adapter"] = answers(model)
for name in ("title", "place"):
    model.set_adapter(name)
    said[name] = answers(model)
assert said["no adapter"] == before
lab.table(
    ("the text", *said),
    *((asked[n].body, *(given[n] for given in said.values())) for n in range(3)),
)
print(
    f"{exact(said['title'], 'title'):.0f} % are the exact title, {exact(said['place'], 'place'):.0f} % the place"
)

# %% [markdown]
# 88 %, as many as the introductions that were right before. To change it back, switch the adapter off: not a letter differs from
# before.
#
# **Takeaway.** The adapter learnt the form of the answers; the frozen weights kept the old one.

# %% [markdown]
# ## Exercises
#
# Each cell checks itself. `lab.solution("07.1")` shows how the first can be solved.

# %%
from unittest.mock import patch

from labutils.course.exercises import check, smaller_than

# %% [markdown]
# **1.** Quantise −1.3 by hand in absmax INT8, in a block whose largest magnitude is 5.2. Which code does it get?

# %% tags=["exercise"]
my_code = None  # a whole number
print(check("07.1", my_code))

# %% [markdown]
# **2.** Somebody uses NF4 in blocks of 32 weights. Their constants are held in 8 bits, with a float32 constant for every 128 of
# them. How many bits a weight do all these constants take?

# %% tags=["exercise"]
my_bits_a_weight = None  # your sum, for example 8 / 64 + 32 / (64 * 256)
print(check("07.2", my_bits_a_weight))

# %% [markdown]
# **3.** QLoRA of Qwen3-32B with checkpoints: 31.2 billion weights are restored three times a step. Suppose that the kernel
# reaches 3,000 GB/s; section 4's reached 2,200 on our H200. How many ms of a step is that?

# %% tags=["exercise"]
my_ms = None  # your number
print(check("07.3", my_ms))

# %% [markdown]
# **4. Write QLoRA's layer.** `restoring` lets bitsandbytes restore the weight, and autograd keeps it until the backward pass.
# Write `lean`: the same result and gradient, with at most a tenth of the bytes kept. A checkpoint would keep `x`, too much: write
# a `torch.autograd.Function`. Restore the weight yourself, doubly quantised constants included: bitsandbytes' own function is
# locked. What the layer holds is not counted.

# %% tags=["exercise"]
four_bit = nn.Module()
packed, state = bnb.quantize_4bit(torch.randn(512, 256), quant_type="nf4", compress_statistics=True)
held = {"packed": packed.flatten(), "codes8": state.absmax, "absmax8": state.state2.absmax}
held |= {"levels8": state.state2.code, "mean": state.offset, "levels": state.code}
for name, tensor in held.items():
    four_bit.register_buffer(name, tensor)


def restoring(x):
    """x [64, 256] -> [64, 512]"""
    return x @ bnb.dequantize_4bit(packed, state).T


@patch.object(bnb, "dequantize_4bit", None)  # leave this line
def lean(x):
    """Fill this in. four_bit.packed [65536], four_bit.codes8 [2048] and the rest are there."""


def some_inputs(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(64, 256).requires_grad_(),)


print(smaller_than(4, restoring, lean, some_inputs, share=0.1, module=four_bit))


# %% [markdown]
# ## What to read on
# - T. Dettmers and others: *[QLoRA](https://arxiv.org/abs/2305.14314)*, 2023.
# - T. Dettmers and others: *[LLM.int8()](https://arxiv.org/abs/2208.07339)*, 2022.
# - D. Yoshida: *[NF4 Isn't Information Theoretically Optimal (and that's Good)](https://arxiv.org/abs/2306.06965)*, 2023.
# - E. Hu and others: *[LoRA](https://arxiv.org/abs/2106.09685)*, 2021.
# - The documentation of [bitsandbytes](https://huggingface.co/docs/bitsandbytes), [PEFT](https://huggingface.co/docs/peft),
#   [TRL](https://huggingface.co/docs/trl) and [unsloth](https://docs.unsloth.ai).
#
# Next: lab 08, a faster card that loses.

# %%
def truths(runs):
    def ratio(metric, one, other):
        values = [
            run and run.ok and run.metric(metric) for run in (runs.one(**one), runs.one(**other))
        ]
        return values[0] / values[1] if all(values) else None

    long, rung = {"experiment": "methods", "texts": "long"}, {"experiment": "ladder"}
    mine = rung | {"rung": lab07_qlora.LIKE_FOR_LIKE}
    unsloth = long | {"method": "unsloth", "rows": "packed"}
    qlora = ratio("step_ms", long | {"method": "qlora"}, long | {"method": "lora"})
    bits = ratio("step_ms", rung | {"rung": "packed, 4 bits"}, rung | {"rung": "packed"})
    big = runs.one(experiment="qwen3-32b", method="qlora")
    return {
        "4 bits alone make a step on packed rows longer by": bits and 100 * (bits - 1),
        "QLoRA's step on long texts, longer by": qlora and 100 * (qlora - 1),
        "useful tokens a second, like for like": ratio("useful_tokens_per_s", mine, unsloth),
        "Qwen3-32B, QLoRA at batch 4": big and big.metric("peak_allocated_gb"),
    }


# %%
exact_here = {
    "codes that an outlier of 100 sigma turns into 0": 100 * zeros["one constant", 100],
    "NF4's error is smaller by": 100 * (1 - errors["nf4"] / errors["int4"]),
    "FLOPs, wide first against thin first": flops["wide first"] / flops["thin first"],
    "exact titles after fine-tuning": exact(said["title"], "title"),
}
measured = truths(Runs([*here, *larger.values()])) if lab.device == "cuda" else {}
lab.done(exact_here | measured, truths(Runs([*lab.references(), *on_record])))
