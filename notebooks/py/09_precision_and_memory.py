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
# # Lab 09 · Precision, memory, and a list of advice
#
# Article A4 is a guide: set this, enable that, use those. It contains no measurement. Much of its advice helps some
# training loop, and none of it helps every loop.
#
# This lab turns each piece of advice into a switch, flips it alone, and lets a threshold decide whether it paid. On the
# way you take the memory of a training step apart, predict its peak, run out of memory on purpose and recover.
#
# **After this lab you can**
# - flip one switch at a time, and say of each what it did to time, to memory and to the numbers;
# - say what the peak memory of a step consists of, and predict it from shapes alone, without the card;
# - survive an out-of-memory error, and find the largest batch in two tries;
# - read a list of advice as a list of questions to your own loop.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1½ minutes |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 80 GB | 7 minutes |
#
# (On a GPU of 40 GB the two language models' largest recipes run out of memory at `full`. The lab says so and goes on.)
#
# **Without a GPU** sections 2 to 6 hold as they are: what rounding does, what autograd keeps, what checkpointing saves. A CPU computes in float32 here, so section 1 leaves out the switches that concern a GPU's
# precision and kernels. Our H200's tables stand below yours.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # optimizer steps timed in each round, at least; 0: 2 at tiny, 3 at larger scales
rounds: int = 0  # times round all switches; 0: 1 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("09", globals())

# %%
import math
from collections.abc import Callable, Iterable
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.utils.checkpoint
from accelerate.utils import find_executable_batch_size

from labutils.course import plots
from labutils.labs import lab09_peak_memory, lab09_toggles
from labutils.labs.ladders import distinct_on
from labutils.profiling.machine import usable_cores
from labutils.profiling.memory_model import BatchLine
from labutils.recipe import Recipe, Unavailable
from labutils.results import claims
from labutils.results.effects import time_effect
from labutils.results.records import Run, to_frame
from labutils.training import Benchmark
from labutils.training.memory_log import make_room
from labutils.workloads.stable_diffusion import on_drawn_latents

plots.use_style()

# %%
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
steps, rounds = steps or (2 if tiny else 3), rounds or (1 if tiny else 8)
if not on_gpu:
    torch.set_num_threads(max(1, usable_cores() // 2))
stable_diffusion = lab.workload("sd15-lora")
ready = on_drawn_latents(
    stable_diffusion
)  # latents and texts that are there already: no data path in the times


def measured(
    prefix: str, names: Iterable[str], measure: Callable[[], dict[str, Run]]
) -> dict[str, Run]:
    """Name -> run, as an interrupted lab left them under `prefix` + name, or measured now."""
    keys = {f"{prefix}{name}": name for name in names}
    found = lab.measured_together(
        dict.fromkeys(keys), lambda: {f"{prefix}{name}": run for name, run in measure().items()}
    )
    return {keys[key]: run for key, run in found.items()}

# %% [markdown]
# ## 1 · One switch at a time
#
# **Question.** Which advice shortens the step, which saves memory, and what does it cost?
#
# The loop is Stable Diffusion's LoRA training as one writes it in plain PyTorch, on latents that have been computed
# beforehand, so that no image is decoded. On a GPU *base* is the article's mixed precision: autocast in FP16 with a
# `GradScaler`; *float32* is the same loop in float32: no autocast, no `GradScaler`, no TF32. Every other row changes
# one knob of one of these two, but for two rows, which can't be had by one knob:
#
# - *accumulation* changes two that belong together: as many micro-batches of one example as *base* has examples in its
#   batch.
# - *cudnn.benchmark* also permits TF32 in convolutions. In FP16 nothing computes with it. It has to be there because
#   PyTorch remembers the algorithm that it chose for a convolution, timed or guessed, as long as the process lives:
#   under *base*'s permissions the row would be given what *base* was given.
#
# **Your prediction:** by how many percent does mixed precision shorten the step, compared with float32 without TF32?
# (On a CPU *base* is float32 already, so there is nothing to compare: leave it empty.)

# %%
my_precision: float | None = None  # for example 50

lab.predict("mixed precision shortens the step by", my_precision, "%")

# %%
recipes = distinct_on(lab.device, lab09_toggles.switches(lab.scale))
tags = {name: {"experiment": "toggles", "toggle": name} for name in recipes}


def side_by_side() -> dict[str, Run]:
    with Benchmark(ready, warmup=1 if tiny else 2) as bench:
        found = bench.compare(recipes, steps, rounds, tags)
    for run in found.values():
        if run.ok:
            peak = run.metric("peak_allocated_gb")  # the allocator's; a CPU's step is recorded
            recorded = None if peak else lab09_peak_memory.recorded(ready, Recipe(**run.recipe))
            run.metrics["peak_gb"] = peak or recorded[1]["peak_gb"]
    return found


runs: dict[str, Run] = {}
with lab.attempt("One switch at a time", experiment="toggles", toggle="base"):
    again = {"base again": recipes["base"]}
    runs = lab.measured_together(recipes | again, side_by_side)
for name in lab09_toggles.switches(lab.scale).keys() - recipes.keys():
    why = "skipped: a CPU computes in float32, and has neither cuDNN nor pages to move"
    lab.keep(Run("09", name, status=why, tags={"experiment": "toggles", "toggle": name}))

# %%
fig, ax = plt.subplots()
plots.steps(ax, runs)
plt.show()
print(f"A step of {recipes['base'].examples_per_step} examples:")
lab.show(runs.values(), lab09_toggles.switch_table, experiment="toggles")

# %% [markdown]
# **Does the GPU set the pace, or the host?** The row *accumulation* tells. It gives the GPU one example at a time,
# *base* gives it all at once. If one example takes as long as all of them, the GPU's work isn't what takes time: the
# host launches the same number of kernels for either, and the GPU waits for it.

# %%
def one_by_one(runs: list[Run]) -> pd.DataFrame:
    those = {run.tags["toggle"]: run for run in runs if not run.tags.get("again")}
    if not {"base", "accumulation"} <= those.keys():
        return pd.DataFrame()
    examples = those["base"].recipe["micro_batch"]
    row = {
        "examples a step": str(examples),
        "ms, all in one batch": those["base"].metric("step_ms"),
    }
    each = those["accumulation"].metric("step_ms") / examples
    return pd.DataFrame([row | {"ms of each, one after the other": each}])


lab.show(runs.values(), one_by_one, experiment="toggles")

# %%
effects = [
    time_effect(runs[switch.base], runs[name])
    for name, switch in lab09_toggles.SWITCHES.items()
    if {name, switch.base} <= runs.keys()
]
known = [effect for effect in effects if effect is not None]
helped = sum(effect.direction < 0 and effect.value <= 0.95 for effect in known)
counted = {"tried": len(known), "helped": helped, "left_alone": len(known) - helped}
lab.keep(
    Run(
        "09",
        "advice",
        workload=ready.name,
        scale=lab.scale,
        metrics=counted,
        tags={"experiment": "advice"},
    )
)
print(
    f"Switches that shorten the step by 5 % or more, beyond the noise: {counted['helped']} of {counted['tried']}."
)
lab.verdict("A4.pytorch.mixed-precision", "A4.pytorch.cudnn-benchmark", "A4.pytorch.accumulation")
lab.verdict("A4.memory.mixed-precision", "A4.memory.checkpointing", "A4.method.measure");

# %% [markdown]
# An interval around 0 is an answer, too: if the switch matters on this loop, it matters less than the noise of so few
# steps. Look for the reason before you blame the switch:
#
# - *base*, *bf16* and the two *tf32* rows are held against *float32*. Its kernels are long enough to fill a GPU, so
#   formats that shorten them shorten the step.
# - *channels last* and *cudnn.benchmark* are held against *base*, and shorten its kernels once more. A loop that waits
#   for its host by then gains nothing from that.
# - The rows with *optimizer* make the update cheaper, or its state smaller. LoRA trains about a thousandth of the
#   weights, so there is hardly anything to gain.
# - *checkpointing* and *accumulation* trade: they pay with time (one column) for memory (the other). What they pay is
#   more than arithmetic where the host is what the loop waits for: it launches the blocks' forward passes twice, or the
#   whole pass once for each example.
#
# **Is *selective checkpointing* slower than *checkpointing*?** It computes less again, and should cost less time. On our
# H200 it costs much more. What is on record doesn't say why, so here is a hypothesis, and how to test it:
#
# - *What the code does.* PyTorch asks a function in Python about each single operation of a block whether to keep its
#   result: in the forward pass, and again when the block is computed once more (`keeping_products` in
#   `labutils/layers/activation_checkpoint.py`). The GPU has less to do, and the host much more.
# - *So* it should cost time where the step waits for its host, and save time where kernels are long: with larger
#   batches or images.
# - *What to look at.* Trace both forms as in lab 02. If the hypothesis holds, the kernels of *selective* take less time
#   in all than those of *checkpointing*, and the gaps between them take more. Compiled, the choice is made once, and the
#   cost should go.
#
# **Takeaway.** Read a list of advice as a list of questions. The answers hold for one loop as it is today: ask again after
# each change, as the next bottleneck was hidden behind the last one.

# %%
texts, photographs = lab.workload("qwen3-lora-long"), lab.workload("llava-lora")
full_size = on_drawn_latents(lab09_peak_memory.at_full(stable_diffusion))
batches = (8,) if tiny else (1, 8)
modes = {"all kept": "off", "checkpointing": "blocks", "selective": "selective"}
plain = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)

# %% [markdown]
# ## 2 · What precision does to the numbers
#
# **Question.** A step that is twice as fast is no gain if it goes in another direction. How far are loss and gradient off?
#
# The same batch, weights and noise are computed in each form and compared with float32. FP16 stores 10 bits of
# mantissa, and its smallest number is 6e-8; BF16 stores 7 bits and has float32's range. (The 1 in front of the point
# isn't stored, so numbers have one bit more: 11 and 8 significant bits.) A gradient below the smallest number becomes
# 0: it *underflows*. Multiplying the loss by a large factor beforehand, and dividing the gradients by it afterwards,
# prevents that. That is what a `GradScaler` does; it also finds the factor.
#
# The article also says that sensitive parts should stay in float32. Autocast sees to that: it runs products in 16 bits,
# but norms and long sums in float32, and the adapters' weights are float32, too. The forms called *throughout* go
# without it: there everything is in 16 bits. So compare *fp16, loss not scaled* with *fp16, scaled loss* to see what
# the scaler does, and *fp16 throughout* with *fp16, scaled loss* to see what the sensitive parts do.
#
# **Your prediction:** by how many percent is the gradient off in BF16 with autocast (norm of the difference over norm of
# the gradient)?

# %%
my_error: float | None = None  # for example 1

lab.predict("gradient off in BF16 by", my_error, "%")

# %%
numbers: dict[str, Run] = {}
with lab.attempt("One batch in each form", experiment="numbers", precision="bf16"):
    numbers = measured(
        "numbers: ", lab09_toggles.FORMS, partial(lab09_toggles.numerical_effects, ready)
    )
    fig, ax = plt.subplots()
    off = {name: run for name, run in numbers.items() if run.metric("gradient_error")}
    for what, marker in {"gradient": "o", "loss": "s"}.items():
        shares = [run.metric(f"{what}_error") or math.nan for run in off.values()]
        ax.plot(shares, list(off), marker, markersize=9, label=f"{what} off by")
    ax.set(xscale="log", xlabel="share, against float32 (each mark is a factor of ten)")
    ax.invert_yaxis()
    ax.legend()
    plt.show()
columns = {
    "precision": "form",
    "loss_error": "loss off by",
    "gradient_error": "gradient off by",
    "lost_share": "gradients that became 0",
}
lab.show(numbers.values(), columns, experiment="numbers")
lab.verdict("A4.pytorch.scaler", "A4.memory.sensitive-parts");

# %% [markdown]
# Two different things go wrong in 16 bits. *Rounding* makes every number a little wrong, up or down, which partly averages
# out. *Underflow* loses small numbers altogether, always towards 0. BF16 rounds more coarsely, but loses nothing: that is
# why it needs no scaler. (How much underflows depends on how large the gradients are. With random weights they are not
# those of a trained model.)
#
# **Takeaway.** Before you judge a format by a loss curve, look at one gradient: it takes a second, and no seed blurs it.

# %% [markdown]
# ## 3 · The optimizer alone
#
# **Question.** In section 1 the optimizer hardly matters, as LoRA trains so few weights. How much do its variants
# matter where all weights are trained?
#
# Here AdamW updates every matrix of one decoder block in float32 (at `full` one of Qwen3-8B's 36 blocks, 193 million
# numbers). *loop* launches a dozen kernels for each tensor, *foreach* a dozen for many tensors together, *fused* one for
# many tensors and all operations. *8bit* keeps each of AdamW's two moments in one byte a number, with a constant for
# every 256 (bitsandbytes). *paged* puts them into memory that the driver can move to the host when the GPU is full.

# %%
optimizers: dict[str, Run] = {}
with lab.attempt("The optimizer's forms", experiment="optimizer", optimizer="adamw-fused"):
    optimizers = measured(
        "optimizer: ",
        lab09_toggles.KINDS,
        partial(lab09_toggles.optimizer_costs, lab.scale, lab.device),
    )
columns = {
    "optimizer": "AdamW",
    "step_ms": "ms an update",
    "state_bytes": "bytes of state a number",
    "update_error": "ten updates off by",
}
lab.show(optimizers.values(), columns, experiment="optimizer")

# %% [markdown]
# An update is limited by memory bandwidth: every trained number is read and written together with its gradient and both
# moments. *loop* reads and writes them again for each operation, *fused* once.
#
# *foreach* launches less than *loop*, but reads and writes as much. So it pays where launching takes longer than
# updating: with hundreds of small tensors on a GPU. Here there are nine tensors, and nearly all numbers are in seven large
# ones. There is next to nothing to launch less, so *foreach* needn't be the faster of the two; on our H200 it is the slower.
#
# *8bit* saves 6 of 8 bytes of state, and its updates are off by a few percent, which training mostly tolerates. It is
# there to save memory: it moves fewer bytes, but has to find a constant for each 256 numbers and to round by it, and
# whether that takes more time or less the table says. (On a CPU the library's 8-bit form is correct, not fast.)
#
# **Takeaway.** Ask what share of your time and memory is the optimizer's. With LoRA both are next to nothing. With all
# weights trained, the state is twice as large as the weights: *fused* is there for the time, *8bit* for the memory.

# %% [markdown]
# ## 4 · What a step's memory consists of
#
# **Question.** The peak of a step is one number. What is in it, and when is it reached?
#
# On a GPU the picture is drawn from the allocator's own history (`torch.cuda.memory._record_memory_history`): every
# allocation and every free of one step, in order. What was kept for the backward pass counts as *activations*; what an
# operation needs only for a moment, as *temporaries*. A CPU's allocator keeps no history. There a ledger notes each tensor
# that an operation returns, for as long as anything holds it. (It doesn't see what a kernel uses internally.)
#
# **Your prediction:** for Stable Diffusion with everything kept, how many percent of the peak are activations?

# %%
my_activations: float | None = None  # for example 50

lab.predict("activations' share of the peak", my_activations, "%")

# %%
told: dict[tuple[str, str], Run] = {}


def predict_and_record(work, mode: str) -> None:
    """Predict and record a workload's step in a mode."""
    name = f"memory: {work.name}, {mode}"
    tags = {"experiment": "memory", "workload": work.name, "checkpointing": modes[mode]}
    with lab.attempt(name, **tags):
        recipe = lab09_peak_memory.GRID[work.name].but(checkpointing=modes[mode])
        told[work.name, mode] = lab.measured(
            name,
            recipe,
            lambda: lab09_peak_memory.predicted_and_recorded(work, recipe, name),
        )


def draw_timelines(work, title: str) -> None:
    """A step's memory over time, with everything kept and with checkpointing."""
    fig, axes = plt.subplots(2, 1, figsize=(7.4, 6.4), sharex=False)
    for ax, mode in zip(axes, ("all kept", "checkpointing"), strict=True):
        if run := told.get((work.name, mode)):
            timeline = lab09_peak_memory.drawn_timeline(run)
            plots.stacked_memory(ax, *timeline, plots.MEMORY_FILLS)
            ax.set_title(f"{title}, {mode}")
    plt.show()


peaks_by_kind = {"run": "step", "peak_gb": "peak, GB"}
peaks_by_kind |= {f"{kind}_gb": f"{kind}, GB" for kind in lab09_peak_memory.KINDS}
peaks_by_kind |= {"activations_share": "activations' share"}

# %%
make_room(ready)
for mode in modes:
    predict_and_record(ready, mode)
draw_timelines(ready, "Stable Diffusion")

# %%
lab.show(told.values(), peaks_by_kind, experiment="memory", workload=ready.name)

# %% [markdown]
# The last column of *all kept* answers the prediction. (The batch isn't section 1's, and so the peak isn't either:
# activations grow with the batch, weights don't. GB are 10⁹ bytes throughout the lab.)
#
# Read the first picture from left to right. The weights are there all the time. In the forward pass activations pile
# up; in the backward pass they are used and freed, block by block. The peak lies where one turns into the other. With
# *checkpointing* the pile stays low, as blocks keep only their inputs, and each hump of the backward pass is a block
# that is computed again. (A third mode was recorded, too, for section 5: *selective* checkpointing also keeps the
# results of matrix products, so that only the rest is computed again.)
#
# ### A language model
#
# **Question.** What is different in a model that predicts words?

# %%
make_room(ready)
for mode in modes:
    predict_and_record(texts, mode)
draw_timelines(texts, "Qwen3, two long texts")

# %%
of_texts = [run for (work, _), run in told.items() if work == texts.name]
lab.show(of_texts, peaks_by_kind, experiment="memory", workload=texts.name)

# %% [markdown]
# The logits: one number for each token and each word of the vocabulary, and at the worst moment three float32 copies
# exist at once: the softmax and two gradients. In both pictures the peak lies at that moment. Checkpointing can't do
# anything about them; a loss that forms them chunk by chunk can (lab 07's *fused loss*).
#
# **Takeaway.** Ask *when* the peak is reached before you ask what to save. Saving what isn't alive at that moment saves
# nothing.

# %% [markdown]
# ## 5 · The peak, predicted
#
# **Question.** Can you know the peak without running the step?
#
# A tensor's size follows from its shape. So the prediction runs one step of the same training code on PyTorch's *meta*
# device, where tensors have shapes and no contents, and keeps a ledger of what is alive. What shapes don't tell is added:
#
# - the 16-bit copies of float32 numbers that autocast makes;
# - what a fused attention kernel keeps on a GPU;
# - the optimizer's state;
# - the workspaces of cuBLAS, the library that multiplies matrices: 34 MB for each of two threads.
#
# It takes seconds, and no memory, for a model of any size. Three models, each in three modes (everything kept,
# checkpointing, and selective checkpointing), make nine predictions.
#
# **Your prediction:** by how many percent will the worst of them be off? (Predict it for a GPU. On a CPU both numbers
# come from the same ledger and agree by construction: there, leave it empty.)

# %%
my_worst: float | None = None  # for example 10

lab.predict("the worst of nine predictions is off by", my_worst, "%")

# %%
make_room(texts)
for mode in modes:
    predict_and_record(photographs, mode)
make_room(photographs)
if told:
    fig, ax = plt.subplots()
    pairs = {
        f"{work}, {mode}": (run.metric("predicted_gb"), run.metric("peak_gb"))
        for (work, mode), run in told.items()
    }
    plots.predicted_peaks(ax, pairs)
    plt.show()

# %%
def predictions(runs: list[Run]) -> pd.DataFrame:
    frame = to_frame(runs)
    return pd.DataFrame(
        {
            "step": frame["run"],
            "predicted, GB": frame["predicted_gb"],
            "by tensors at the peak, GB": frame["peak_gb"],
            "off by, %": (100 * frame["off"]).round(1),
            "reserved, GB": frame.get("peak_reserved_gb", float("nan")),
        }
    )


lab.show(told.values(), predictions, experiment="memory")
worst = max((abs(run.metric("off")) for run in told.values()), default=None)
metrics = {"worst_off": worst} if worst is not None else {}
lab.keep(Run("09", "predictor", metrics=metrics, tags={"experiment": "predictor"}));

# %% [markdown]
# On a CPU prediction and measurement must agree: both are ledgers of the same code, one without contents and one with.
# The real test is a GPU, where the measurement is the allocator's. There *reserved* is what the allocator took from the
# GPU to serve these peaks. It keeps pieces for later, some of them too small for the next request; so don't plan to use
# the last gigabyte.
#
# ### For a card that isn't here
#
# The same prediction for Stable Diffusion 1.5 at its full size, on a GPU:

# %%
def peaks_at_full_size() -> Run:
    peaks = {}
    for mode, checkpointing in modes.items():
        for batch in batches:
            start = lab09_peak_memory.GRID[full_size.name]
            recipe = start.but(checkpointing=checkpointing, micro_batch=batch)
            peak = lab09_peak_memory.predicted(full_size, recipe, on="cuda").peak
            peaks[f"{mode}, batch {batch}"] = peak / 1e9
    return Run("09", "", metrics=peaks, tags={"experiment": "peaks at full size"})


with lab.attempt("Peaks at full size"):
    peaks = lab.measured("peaks at full size", None, peaks_at_full_size).metrics
    rows = [
        (batch, *(f"{peaks[f'{mode}, batch {batch}']:.1f} GB" for mode in modes))
        for batch in batches
    ]
    lab.table(("batch", *modes), *rows)

# %% [markdown]
# **Takeaway.** Peak memory can be computed. Do it before you rent the card.

# %% [markdown]
# ## 6 · Out of memory, on purpose
#
# **Question.** What happens when memory runs out in the middle of a step, and what must you do before the next step can
# run?
#
# On a GPU the process gets only a fraction of the card (`torch.cuda.set_per_process_memory_fraction`), so that it runs out
# within a second. On a CPU the ledger raises the error at a limit of its own. The limit is artificial; what follows is
# real.

# %%
def run_out() -> Run:
    room = lab09_peak_memory.predicted(ready, plain.but(micro_batch=9)).peak / 1e9
    with lab09_peak_memory.LimitedTrainer(ready, plain) as trainer:
        trainer.limit(room)
        held = trainer.run_out(40) | {"room_gb": room}
    return Run("09", "", metrics=held, tags={"experiment": "out of memory"})


broken: dict = {}
with lab.attempt("Running out of memory", experiment="out of memory"):
    broken = lab.measured("out of memory", None, run_out).metrics
    moments = ("before_gb", "in_except_gb", "after_except_gb", "cleaned_gb")
    lab.table(
        ("", "before", "in the except block", "after it", "cleaned up"),
        ("tensors hold, GB", *(broken[moment] for moment in moments)),
    )
    print(broken["message"][:300])

# %% [markdown]
# (PyTorch's message counts in GiB, of 2³⁰ bytes, and the lab in GB, of 10⁹: 1 GiB is 1.07 GB.)
#
# Compare *in the except block* with *after it*. Inside the `except` block nothing is free yet: the exception holds the
# traceback, the traceback holds every frame of the failed step, and the frames hold its tensors.
# `torch.cuda.empty_cache()` frees nothing there. Leave the block first. Then drop the unfinished gradients, collect the
# garbage, and empty the cache:
#
# ```python
# try:
#     step()
#     fits = True
# except torch.OutOfMemoryError:
#     fits = False          # and nothing else
# if not fits:
#     optimizer.zero_grad(); gc.collect(); torch.cuda.empty_cache()
# ```
#
# ### The largest batch
#
# **Question.** How many tries does it take to find the largest batch that fits, with a tenth of the memory left free?
#
# accelerate's `find_executable_batch_size` starts where you tell it to. After each failure it multiplies the batch by
# 0.9 and drops the fraction. The other search starts at a prediction: memory is taken to be a straight line over the
# batch, and two predicted points give the line.
#
# Above, the process got as much memory as the prediction says for a batch of 9. Now a tenth of that stays free.
#
# **Your prediction:** how many tries does accelerate's search take if it starts at 16? (First ask yourself which batch
# will be the largest that fits.)

# %%
my_tries: float | None = None  # for example 3

lab.predict("tries of accelerate's search from 16 on", my_tries, "tries")

# %%
def by_accelerate(fits: Callable[[int], bool], start: int) -> int:
    """The batch that accelerate's search stops at, from `start` down."""

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        if not fits(batch_size):
            raise RuntimeError(f"CUDA out of memory. A batch of {batch_size} doesn't fit.")
        return batch_size

    return attempt()


def counted_tries(trainer, search: Callable, start: int) -> Run:
    """What a search finds, and in how many tries."""
    tries: list[bool] = []

    def fits(batch: int) -> bool:
        tries.append(trainer.fits(batch))
        return tries[-1]

    metrics = {"largest": search(fits, start), "tries": len(tries), "failures": tries.count(False)}
    return Run("09", "", metrics=metrics)


# %%
def searched() -> dict[str, Run]:
    keep = broken["room_gb"] * (1 - lab09_peak_memory.HEADROOM)
    points = {
        batch: lab09_peak_memory.predicted(ready, plain.but(micro_batch=batch)).peak / 1e9
        for batch in (1, 3)
    }
    start = BatchLine.through(points).largest(keep)
    with lab09_peak_memory.LimitedTrainer(ready, plain) as trainer:
        trainer.limit(keep)
        ours = counted_tries(trainer, lab09_peak_memory.largest_batch, start)
        theirs = counted_tries(trainer, by_accelerate, 16)
    ours.tags = {"experiment": "largest batch", "search": "from the prediction"}
    theirs.tags = {"experiment": "largest batch", "search": "accelerate", "start": 16}
    for run in (ours, theirs):
        run.metrics["predicted"] = start
    return {"from the prediction": ours, "accelerate, from 16": theirs}


# %%
searches: dict[str, Run] = {}
with lab.attempt(
    "Searching the largest batch", experiment="largest batch", search="from the prediction"
):
    if not broken:
        raise Unavailable("the limit is that of the cell before, which failed")
    searches = measured("largest batch, ", ("from the prediction", "accelerate, from 16"), searched)
    columns = {"search": "search", "predicted": "predicted", "largest": "largest batch"}
    columns |= {"tries": "tries", "failures": "of them out of memory"}
    lab.show(searches.values(), columns)

# %% [markdown]
# **Takeaway.** Every failure costs a step and a clean-up, and leaves the cache fragmented. So start at a prediction; if
# that fits, try one more.

# %% [markdown]
# ## 7 · The whole list
#
# **Question.** What became of each piece of the article's advice?
#
# Advice on several GPUs is judged by lab 11's runs, advice on TensorFlow by the optional page in `notebooks/optional`.
# Some advice can't be tested by any machine of this course; then the table says why.

# %%
lab.verdict(*claims.load_claims("A4"));

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("09.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, smaller_than

# %% [markdown]
# **1.** A model has 1 billion weights, all of them trained, in float32 with AdamW. How many GB do weights, gradients and
# the optimizer's state take together? And how many with the 8-bit optimizer (its constants not counted)? Answer with a
# pair.

# %% tags=["exercise"]
my_gb = None  # two numbers, for example (8, 5)
print(check("09.1", my_gb))

# %% [markdown]
# **2.** A step of batch 1 peaks at 20 GB, one of batch 3 at 32 GB. The card has 80 GB, and a tenth of it should stay free.
# At which batch do you start to search for the largest one?

# %% tags=["exercise"]
my_start = None  # a whole number
print(check("09.2", my_start))

# %% [markdown]
# **3. Make it smaller.** Six blocks of an MLP keep everything for the backward pass: their inputs, what goes into the
# activation, and what comes out of it. Write `less_kept`: the same result and gradients, with at most a third of the bytes
# kept.

# %% tags=["exercise"]
torch.manual_seed(0)
six_blocks = torch.nn.ModuleList(
    torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    for _ in range(6)
).to(lab.device)


def all_kept(x):
    for block in six_blocks:
        x = x + block(x)
    return x


def less_kept(x):
    return all_kept(x)  # your code instead


def some_rows(seed: int) -> tuple:
    torch.manual_seed(seed)
    return (torch.randn(512, 64, device=lab.device).requires_grad_(),)


print(smaller_than(3, all_kept, less_kept, some_rows, share=1 / 3, module=six_blocks))


# %% [markdown]
# ## What you did
# - You flipped one switch at a time, and saw what each did to time, memory and numbers.
# - You took the peak memory of a step apart, and predicted it from shapes alone.
# - You ran out of memory, cleaned up, and found the largest batch in two tries.
# - You read a list of advice as questions, and answered those that your machine can answer.
#
# ## Where this comes from, and what to read on
# - Micikevicius et al., *Mixed Precision Training* (2017, [arXiv:1710.03740](https://arxiv.org/abs/1710.03740)): loss
#   scaling, and what has to stay in float32.
# - Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training* (2019,
#   [arXiv:1905.12322](https://arxiv.org/abs/1905.12322)).
# - Dettmers et al., *8-bit Optimizers via Block-wise Quantization* (2021,
#   [arXiv:2110.02861](https://arxiv.org/abs/2110.02861)).
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174)):
#   checkpointing.
# - PyTorch's documentation: [performance tuning guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html),
#   [understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html),
#   [automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html).
# - The course's [glossary](../docs/glossary.md).

# %%
shortened = (
    time_effect(runs["float32"], runs["base"]) if {"float32", "base"} <= runs.keys() else None
)


def percent_of(found: dict, name, metric: str) -> float | None:
    value = found[name].metric(metric) if name in found else None
    return None if value is None else 100 * value


lab.done(
    {
        "mixed precision shortens the step by": 100 * (1 - shortened.value) if shortened else None,
        "gradient off in BF16 by": percent_of(numbers, "bf16", "gradient_error"),
        "activations' share of the peak": percent_of(
            told, ("sd15-lora", "all kept"), "activations_share"
        ),
        "the worst of nine predictions is off by": 100 * worst if worst is not None else None,
        "tries of accelerate's search from 16 on": searches["accelerate, from 16"].metric("tries")
        if searches
        else None,
    }
)
