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
# # Lab 08 · Hopper against Blackwell
#
# Article A3 trains two models on two cards. On the dense Qwen3-32B the H100 is two and a half times as fast as an RTX
# PRO 6000 Blackwell Max-Q. On gpt-oss-120b, a mixture of experts, the workstation card wins, at a third of the price. The
# article looked inside and found the H100 idle: its *host*, the CPU that gives the GPU its work, could not launch kernels
# fast enough.
#
# You have one card, or none. So this lab builds a model that predicts how long a training step takes with any host and
# any card. It tests the model on steps whose time the model has not seen, and slows the host down on purpose to watch the
# winner change. Only then does it say anything about cards that are not here. In every table, what is predicted is
# called predicted.
#
# **After this lab you can**
# - read a data sheet without taking sparse peaks for dense ones;
# - measure how long a launch takes your host, and say whether a step waits for the GPU or for the host;
# - predict a step's time from a trace, and know how far the prediction is off;
# - say how slow a host must be for one card to overtake another;
# - express what a card is worth as examples an hour, a night, a kilowatt hour and a yen;
# - work out what a model's weights take in 4 bits, and whether training it fits a card.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 96 GB or more: gpt-oss in the library's own form takes some 82 GB | 7 minutes |
#
# At `full` the models are Qwen3-8B and gpt-oss-20b to the last parameter, with random weights: times and memory are
# theirs, losses are not.
#
# **Without a GPU** sections 1 and 7 hold as they are. In sections 3 and 4 PyTorch's operators on the CPU stand for kernels:
# you see what the model is given and how it is tested. What only a GPU can show is taken from our H200's runs.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
steps: int = 0  # timed optimizer steps, at least; 0: 4 at tiny, 8 at larger scales
delays: str = "20"  # microseconds of section 4's slower hosts, beside 0
blackwell_yen: float = 1600000.0  # price of an RTX PRO 6000 Blackwell Max-Q (the article's)
h100_yen: float = 4700000.0  # price of an H100 (the article's, of the PCIe card)
h200_yen: float = 0.0  # price of an H200; 0: unknown
b200_yen: float = 0.0  # price of a B200; 0: unknown
years: float = 3.0  # after so many years a card is worth nothing
hours_a_day: float = 8.0  # so long it works each day until then
yen_per_kwh: float = 31.0  # price of electricity

# %%
from labutils.course.lab import open_lab

lab = open_lab("08", globals())

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, get_peft_model

from labutils.course import plots
from labutils.course.parameters import whole_numbers
from labutils.labs import lab08_large_models, lab08_launch_bound
from labutils.labs.lab08_large_models import BLACKWELL, H100
from labutils.profiling.gpu_specs import find_spec as card
from labutils.profiling.gpu_specs import spec_of
from labutils.profiling.measured_rates import probe_machine
from labutils.profiling.step_model import CARDS, Host, crossing
from labutils.recipe import Unavailable
from labutils.results import claims
from labutils.results.records import Run, to_frame
from labutils.tools.doctor import try_import
from labutils.workloads import open_workload
from labutils.workloads.causal_lm import GPT_OSS, GPT_OSS_120B, QWEN3_32B, build_lm

plots.use_style()
warnings.filterwarnings("ignore", module="torch|transformers|peft")

# %%
on_gpu, sheet = lab.device == "cuda", spec_of(lab.machine)
steps, slower = steps or (4 if lab.scale == "tiny" else 8), [0, *whole_numbers("delays", delays)]
if not on_gpu:
    torch.set_num_threads(1)
models = {"dense": "qwen3-lora", "moe": "gpt-oss-lora"}
texts = {
    family: {kind: lab.workload(f"{name}-{kind}") for kind in ("long", "short")}
    for family, name in models.items()
}
lab.keep(Run("08", "machine", tags={"experiment": "machine"}));

# %% [markdown]
# ## 1 · Two cards on paper
#
# **Question.** For products in 16 bits the article prints 877.9 TFLOP/s for its Blackwell card and 1978.9 for the H100.
# How much of that can a training step use?
#
# If two of every four weights are zero, tensor cores can skip the zeros. Vendors like to print the rate that this would
# give, *with sparsity*. In ordinary training hardly any weight is zero, and nothing is skipped.
#
# **Your prediction:** the H100's dense BF16 peak, in TFLOP/s.

# %%
my_peak: float | None = None  # for example 1979

lab.predict("dense BF16 peak of the H100 (data sheet)", my_peak, "TFLOP/s")

# %%
peaks = []
for place, name in enumerate((BLACKWELL, H100)):
    for dtype in ("fp32", "bf16", "fp8", "fp4"):
        printed = dict(enumerate(claims.claim(f"A3.specs.{dtype}").published)).get(place)
        dense, sparse = card(name).dense.get(dtype), card(name).sparse.get(dtype)
        peaks.append(
            {"": f"{name}, {dtype.upper()}", "article A3": printed, "data sheet, dense": dense}
            | {"with sparsity": sparse}
        )
lab.table(pd.DataFrame(peaks))
sheets = [card(name) for name in CARDS]
lab.table(
    ("", *CARDS),
    ("dense BF16, TFLOP/s", *(one.dense["bf16"] for one in sheets)),
    ("memory, GB/s", *(float(one.bandwidth) for one in sheets)),
    ("FLOP per byte where they meet", *(one.ridge("bf16") for one in sheets)),
    ("memory, GB as printed", *(one.memory_gb for one in sheets)),
    ("memory that a program finds, 10⁹ bytes", *(one.capacity_gb for one in sheets)),
    ("largest power, W", *(one.tdp_w for one in sheets)),
)

# %%
metrics = {}
for short, name in (("blackwell", BLACKWELL), ("h100", H100)):
    one = card(name)
    printed = {"fp32": one.dense["fp32"]} | one.sparse  # the article prints sparse peaks
    printed |= {"bandwidth": one.bandwidth, "memory": one.memory_gb, "power": one.tdp_w}
    metrics |= {f"{short}_{what}": value for what, value in printed.items()}
lab.keep(Run("08", "specs", metrics=metrics, tags={"experiment": "specs"}))
lab.verdict(
    "A3.specs.fp32", "A3.specs.bf16", "A3.specs.fp8", "A3.specs.fp4",
    "A3.specs.bandwidth", "A3.specs.memory", "A3.specs.power",
);  # fmt: skip

# %% [markdown]
# The article has copied NVIDIA's tables correctly, and there the figures for tensor cores are with sparsity, on both
# cards. So the *ratio* of the two cards is right: 2.25 in 16 bits, and 1.87 in bandwidth. On paper the H100 wins twice.
#
# **Takeaway.** Before you compare a step with a data sheet's figure for tensor cores, check whether it means "with
# sparsity"; if so, halve it. And notice what no data sheet says: how fast the host can tell the card what to do.

# %% [markdown]
# ## 2 · A model of a step
#
# **Question.** What decides how long a step takes: the GPU's work, or the host that hands it out?
#
# The host gives the GPU one piece of work after the other: a kernel, a copy, or a whole CUDA graph. It doesn't wait until
# the GPU is done with it, but goes on to the next. With $K$ the kernels' time, $n$ launches and $c$ the host's time for
# one launch, a step takes
#
# $$ t = \max(K,\; n\,c) + t_\text{copies} $$
#
# if neither has to wait for the other in between. This is the *short form*. Plain loops do wait. In gpt-oss a small
# router chooses for each token which *experts* (parts of the layer) compute it, and the library's code takes one expert
# after the other. This *expert loop* asks the GPU which experts were chosen, and can't go on without the answer. So
# there is also the *replay*: the same numbers launch by launch, in order, with every wait
# (`labutils/profiling/launch_queue.py`, one page).
#
# **Where do the numbers come from?** A model that was fitted to what it predicts would prove nothing.
#
# - $K$ and $n$ come from a trace of the step. The profiler slows the host down, but hardly the kernels. (The step runs for
#   a second beforehand, so that the GPU is as warm as when it is timed.)
# - $c$ comes from *another* step, the *light step*: the shortest text, on a thin model with the same layers and experts
#   and an eighth of the width. The host does the same work for it, but its kernels are so short that the step's time is
#   the host's. (If the kernels take half of the light step or more, the estimate is discarded.) Forward and backward
#   pass have a $c$ each: the one launches from Python, the other from C++.
#
# A host's speed changes from one second to the next: other programs want the processor, and so do other machines on the
# same one, where it is shared. So the light step is timed twice, right before and right after the step that it is for,
# and $c$ is halfway between. Where the two readings differ, you see by how much a prediction can be off whatever the
# model is worth. The profiler has its part in this: once it was used, launches may stay slower
# ([PyTorch issue 144455](https://github.com/pytorch/pytorch/issues/144455)). So nothing is timed before its first use.
#
# A CPU is host and device in one and can't run ahead of itself. There the two times add up.

# %%
probed = probe_machine("launch_us", "graph_node_us")
launch_us, empty_ms = probed.median("launch_us"), (probed.median("graph_node_us") or 0.0) / 1e3
with lab.attempt("Timing the shortest call"):
    if launch_us is None:
        raise Unavailable(f"a call could not be timed: it {probed.skipped['launch_us']}")
    print(f"The shortest call there is, x.neg_() on one number, takes the host {launch_us:.1f} µs.")

# %% [markdown]
# That was a call by itself. In a training step Python code, autograd and adapters stand around each call.
#
# **Your prediction:** the host's time for a launch in the expert loop, in µs.

# %%
my_host: float | None = None  # for example 5

lab.predict("host's time for a launch in the experts' loop (on a thin model)", my_host, "us")

# %% [markdown]
# ## 3 · Predicted and measured
#
# **Question.** How good is the model? No prediction knows anything of the time that it predicts.
#
# *dense* is Qwen3, *moe* is gpt-oss, a mixture of experts. Each is trained in several ways, on four texts a step, *long*
# (861 tokens on average) or *short* (117):
#
# | way | what it is |
# |---|---|
# | *loop* (gpt-oss: *expert loop*) | the library's code with PEFT's adapters; gpt-oss takes one expert after the other |
# | *rewritten* (gpt-oss: *grouped*) | attention in one kernel, all experts of a layer in one product, no questions to the GPU |
# | *captured* | the same, recorded as one CUDA graph (lab 04) |
# | *compiled*, gpt-oss only | captured, with compiled blocks, plain adapters, and a loss that never forms all logits |
#
# Is this a hard test? That depends on the step. Where the *host* decides, it is: the prediction comes from a different,
# light step. Where *kernels* decide, it isn't: the prediction is little more than the sum of the kernels in a trace of
# the same step. So the two kinds are counted separately. The hardest test is the captured step: it is predicted from the
# kernels of *rewritten* or *grouped*, as if they came in one launch, without a trace of its own.
#
# **Your prediction:** for how much of a step, in percent, is the GPU idle in the expert loop on long texts?

# %%
my_idle: float | None = None  # for example 10

lab.predict("GPU idle in the expert loop", my_idle, "%")

# %%
studied: list[lab08_launch_bound.PredictedStep] = []


def step_of(model: str, variant: str = "", texts: str = "long", **tags):
    """The step of these tags, or None where it was not measured."""
    wanted = {"variant": variant, "delay_us": "", "model": model, "texts": texts} | tags
    those = (s for s in studied if all(s.run.tags.get(k, "") == v for k, v in wanted.items()))
    return next(those, None)


def study(model: str, way: str, delayed: bool = False) -> None:
    """Predict and measure one way to train a model; what fails says why, and the H200's run is shown."""
    first, one_by_one, *_ = recipes = lab08_launch_bound.variants(model)
    tags = {"model": model} | ({} if way == first else {"variant": way})
    in_tables = lambda: lab.show("Our H200's run of it stands in the tables below.")
    with lab.attempt(f"{model}, {way}", in_tables, experiment="steps", texts="long", **tags):
        captured = way in ("captured", "compiled")
        if captured and not (on_gpu and launch_us):
            raise Unavailable(
                "CUDA graphs need an NVIDIA GPU"
                if not on_gpu
                else "no call could be timed (see above)"
            )
        host = Host(launch_us / 1e3) if captured else None
        like = step_of(model, one_by_one) if way == "captured" else None
        for step in lab08_launch_bound.study(
            texts[model],
            recipes[way],
            tags,
            steps,
            host,
            slower if delayed else (),
            like.program if like else None,
        ):
            studied.append(step)  # what was measured before a failure counts
            lab.keep(step.run, lane="article" if way == first else "same work")

# %%
study("dense", "loop", delayed=True)
study("dense", "rewritten")
study("dense", "captured")
for workload in texts["dense"].values():
    workload.release_weights()

# %%
study("moe", "expert loop", delayed=True)
study("moe", "grouped")
study("moe", "captured", delayed=True)
study("moe", "compiled")
for workload in texts["moe"].values():
    workload.release_weights()

# %%
measured_steps = [step.run for step in studied if "delay_us" not in step.run.tags]
made_from = {
    "run": "step",
    "kernels_ms": "kernels, ms",
    "launches": "launches",
    "waits": "waits",
    "host_us": "host, µs a launch",
    "light_before_ms": "light step before, ms",
    "light_after_ms": "and after, ms",
}
lab.table(to_frame(measured_steps).reindex(columns=list(made_from)).rename(columns=made_from))
lab.show("What the predictions are made from stands above, what they say below.")


def predictions(runs: list[Run]) -> pd.DataFrame:
    frame = to_frame(run for run in runs if "predicted_ms" in run.metrics and "by" in run.metrics)
    return pd.DataFrame(
        {
            "step": frame["run"],
            "kernels, ms": frame["kernels_ms"],
            "launches × host, ms": frame["launches"] * frame["host_us"] / 1e3,
            "short form, ms": frame["bound_ms"],
            "replayed, ms": frame["predicted_ms"],
            "measured, ms": frame["step_ms"],
            "replay off by, %": 100 * frame["off"],
            "decided by": frame["by"],
            "predicted without its trace, off by, %": 100 * frame.get("unseen_off", float("nan")),
        }
    )


lab.show(measured_steps, predictions, experiment="steps")

# %%
if measured_steps:
    frame = to_frame(measured_steps)
    near = frame["off"].abs() <= 0.2
    lab.table(
        ("decided by", "steps", "predicted within 20 %"),
        *((by, len(those), int(those.sum())) for by, those in near.groupby(frame["by"])),
    )
    accuracy = {
        "steps": len(frame),
        "within_20": int(near.sum()),
        "median_off": frame["off"].abs().median(),
        "worst_off": frame["off"].abs().max(),
    }
    lab.keep(Run("08", "predictions", metrics=accuracy, tags={"experiment": "predictions"}))

# %%
fig, ax = plt.subplots()
offs = {run.run: [100 * run.metrics["off"]] for run in measured_steps}
ranges = {
    run.run: tuple(
        100 * (run.metrics[end] / run.metric("step_ms") - 1)
        for end in ("predicted_low_ms", "predicted_high_ms")
    )
    for run in measured_steps
    if "predicted_low_ms" in run.metrics
}
label = "the replay's prediction against the measurement, %"
either = {"with either reading of the light step": ranges}
plots.differences(ax, offs, (-20, 20), "within 20 %", label, either)
plt.show()
lab.verdict("A3.moe.launches", "A3.dense.busy");

# %% [markdown]
# Compare *kernels* with *launches × host*: the larger one decides. Where the two are close, or where there are many
# *waits*, the short form is too low, because host and GPU take turns; the replay takes that into account. A captured step
# has a handful of launches: the host hardly matters to it any more. And compare *host, µs a launch* with the shortest call of
# section 2: what it takes more is Python, autograd and the adapters around each launch.
#
# Both forms leave something out: the microsecond or so between two kernels even when the next one is ready. On a CPU the
# profiler slows down what it times, and other programs want the cores, too; there predictions are further off.
#
# ### What are fewer launches worth?
#
# **Question.** The ways to train gpt-oss launch ever fewer kernels for the same texts. How much faster than the expert
# loop is each?

# %%
def speeds(runs: list[Run]) -> pd.DataFrame:
    frame = to_frame(run for run in runs if "delay_us" not in run.tags)
    loop = next((run for run in runs if not {"variant", "delay_us"} & run.tags.keys()), None)
    return pd.DataFrame(
        {
            "step": frame["run"],
            "launches": frame["launches"],
            "kernels, ms": frame["kernels_ms"],
            "step, ms": frame["step_ms"],
            "useful tokens/s": frame["useful_tokens_per_s"],
            "times the loop": frame["useful_tokens_per_s"] / loop.metric("useful_tokens_per_s")
            if loop
            else None,
        }
    )


on_long = [r for r in measured_steps if (r.tags["model"], r.tags["texts"]) == ("moe", "long")]
if on_long:
    lab.show(on_long, speeds, experiment="steps", model="moe", texts="long")

# %% [markdown]
# Read *launches* and *kernels* together. Where launches fall and the kernels' time hardly changes, what is gained was
# the host's. Where the kernels' time falls as well, as fewer and larger kernels do the work, the gain has two causes.
# (Without a GPU nothing can be captured, so only the expert loop and *grouped* are compared.)
#
# **Takeaway.** A step has two timelines, the host's and the GPU's; the longer one decides. Find out which it is before
# you buy a faster card.

# %% [markdown]
# ## 4 · A slower host
#
# **Question.** If the host decides, then slowing the host down must slow the step down, by as much as the model says. And
# where kernels decide, it must change nothing. Does it?
#
# PyTorch can hand every operation to a function of ours on its way to the kernel (a *dispatch mode*). Ours waits for some
# microseconds and passes the operation on (`labutils/profiling/host_delay.py`). Even a delay of 0 makes the host slower, as
# each operation now goes through Python. So what a launch takes longer, delay and *detour* together, is read from the
# light step beside the same slower host. The rows with a delay of 0 show the detour by itself. A captured step calls
# hardly any operation, so hardly anything of it can be delayed.
#
# **Your prediction:** by how many µs must a launch in the expert loop get slower until this card takes as long as an
# RTX PRO 6000 Blackwell Max-Q whose host nobody slowed down? (Without a GPU leave it empty: the other card's time is
# predicted from this card's kernels.)

# %%
my_flip: float | None = None  # for example 10

lab.predict("slower launches until the Blackwell card wins (predicted)", my_flip, "us")

# %%
columns = {
    "run": "step",
    "delay_us": "delay, µs",
    "delayed": "operations delayed",
    "added_us": "a launch longer by, µs",
    "predicted_ms": "replayed, ms",
    "step_ms": "measured, ms",
}
delayed_runs = [step.run for step in studied if "delay_us" in step.run.tags]
rivals, flips = {}, {}
most = 1.1 * max([10.0, *(run.metrics["added_us"] for run in delayed_runs)])
with lab.attempt("A slower host", experiment="flip"):
    predicted, measured = {}, {}
    for model, variant in (("dense", ""), ("moe", ""), ("moe", "captured")):
        step = step_of(model, variant)
        tags = step.run.tags.items() if step else ()
        those = [run for run in delayed_runs if step and tags <= run.tags.items()]
        if not variant:
            those = [run for run in those if "variant" not in run.tags]
        if those:
            predicted[step.run.run] = {us: step.beside(us) for us in np.linspace(0, most, 16)}
            measured[step.run.run] = {0.0: step.run.metric("step_ms")} | {
                run.metrics["added_us"]: run.metric("step_ms") for run in those
            }
        if those and on_gpu and sheet and not variant:  # a captured step has no host to wait for
            rival_ms = step.on(card(BLACKWELL), sheet, empty_ms)
            rivals[f"{step.run.run}: {BLACKWELL}, predicted"] = rival_ms
            flips[f"{model}_us"] = crossing(step.beside, lambda us, ms=rival_ms: ms, 0.0, 1000.0)
    fig, ax = plt.subplots(figsize=(7.2, 4.2))
    plots.slower_hosts(ax, predicted, measured, rivals)
    ax.set_xlabel("longer for a launch, on average (delay and detour), µs")
    plt.show()


def with_delays(runs: list[Run]) -> pd.DataFrame:
    frame = to_frame(run for run in runs if "delay_us" in run.tags)
    return frame.reindex(columns=list(columns)).rename(columns=columns)


lab.show(delayed_runs, with_delays, experiment="steps")

# %%
with lab.attempt("When the Blackwell card wins", experiment="flip"):
    if not rivals:
        raise Unavailable(
            "a rival is predicted from a loop that was measured here, on a GPU with a data sheet"
        )
    reached = {name: us for name, us in flips.items() if us is not None}
    lab.keep(Run("08", "flip", metrics=reached, tags={"experiment": "flip"}))
    for name, us in flips.items():
        when = "at no delay up to 1 ms" if us is None else f"when a launch takes {us:.1f} µs longer"
        print(
            f"{name.removesuffix('_us')}: the {BLACKWELL} (predicted, host as it is) draws level {when}."
        )

# %% [markdown]
# Points are measured, with this card; the curves are predicted without them. (A launch gets longer by more than the delay, as
# there is the detour, which operations take, too, that launch nothing.) On a GPU, horizontal lines show the Blackwell card
# as predicted, with a host that nobody slowed down. Left of a crossing this card wins; right of it, with the very same
# kernels, it loses. The dense model's curve stays flat as long as its kernels hide the launches. (On a CPU nothing is
# hidden, so every curve rises from the start.)
#
# This is one way to get the article's result: an H100 with a slower host than its rival's. (Background, not measured
# here: server processors usually have more cores and lower clocks than a workstation's, and launching is the work of a
# single core.)
#
# **Takeaway.** A fast card with a slow host is a slow card, unless its steps are captured.

# %% [markdown]
# ## 5 · Four cards with this host
#
# **Question.** How long would the same steps take on an H100, an H200, the Blackwell workstation card and a B200, each
# with this machine's host? And what does a card give for its power and its price?
#
# Each kernel's time is scaled by what limits it: products and attention by the dense peak (by bandwidth, where they have
# too few FLOPs a byte), everything else by bandwidth.

# %%
with lab.attempt("Four cards", experiment="four cards"):
    if not (on_gpu and sheet):
        raise Unavailable(
            "kernels are scaled from one card to another, and this machine has no GPU with a data sheet"
        )
    plain_steps = [
        s for s in studied if "delay_us" not in s.run.tags and s.run.tags["texts"] == "long"
    ]
    ms = {
        s.run.run: {name: s.on(card(name), sheet, empty_ms) for name in CARDS} for s in plain_steps
    }
    here = {f"measured here, {sheet.name}": [s.run.metric("step_ms") for s in plain_steps]}
    frame = pd.DataFrame(ms).T.rename_axis("ms a step, predicted").reset_index()
    lab.table(frame.assign(**here))
    flat = {f"{run}: {name}, ms": t for run, by_card in ms.items() for name, t in by_card.items()}
    lab.keep(Run("08", "four cards", metrics=flat, tags={"experiment": "four cards"}))

# %%
if on_gpu and sheet and step_of("moe"):  # the slower the host, the less the card matters
    with lab.attempt("Four cards beside slower hosts"):
        added = [most * place / 8 for place in range(9)]
        loop = step_of("moe")
        curves = {
            name: {us: loop.on(card(name), sheet, empty_ms, us) for us in added} for name in CARDS
        }
        fig, ax = plt.subplots(figsize=(7.2, 3.8))
        plots.slower_hosts(ax, curves, {}, {})
        ax.set_title("The expert loop on long texts, beside ever slower hosts", pad=44)
        plt.show()

# %% [markdown]
# ### For its power and its price
#
# **Question.** How many examples does a card train on for a kilowatt hour, and for a yen?
#
# The cost of an hour is the card's price spread over its working hours, plus electricity; the machine around the card
# is not counted. Change the prices, and how long and how much a card works, in the parameters cell. Predicted rows take
# the largest power that a card may draw. Two rows are measured, for this card: one at its largest power, to compare
# with the predicted ones, and one with the energy that the driver has counted.

# %%
yen = {BLACKWELL: blackwell_yen, H100: h100_yen, "H200 SXM": h200_yen, "B200": b200_yen}
worth = []
with lab.attempt("What a card gives for its power and its price"):
    if not (on_gpu and sheet):
        raise Unavailable("it takes the steps that were predicted above")
    for step in (s for s in plain_steps if s.run.tags.get("variant", "captured") == "captured"):
        rows = {name: (t, card(name).tdp_w) for name, t in ms[step.run.run].items()}
        step_ms = step.run.metric("step_ms")
        rows[f"{sheet.name}, measured, at its largest power"] = (step_ms, sheet.tdp_w)
        rows[f"{sheet.name}, measured, at the power drawn"] = (step_ms, step.run.metric("power_w"))
        for name, (t, watts) in rows.items():
            hourly = step.work.examples / t * 3.6e6
            kwh = watts / 1e3 if watts else float("nan")
            hour_yen = yen.get(name, 0.0) / (years * 365 * hours_a_day) + kwh * yen_per_kwh
            row = {"step": step.run.run, "card": name, "step, ms": t, "examples/h": hourly}
            row |= {"a night of 8 h": 8 * hourly, "a kWh": hourly / kwh}
            worth.append(row | {"a yen": hourly / hour_yen if yen.get(name) else None})
    lab.table(pd.DataFrame(worth))

# %% [markdown]
# On paper these cards are two to five times apart. How far apart are they in the expert loop? The slower the host, the
# less the card matters: in the end all four wait for it. Compare that with the captured step, which has a handful of
# launches.
#
# (Energy follows time only in part: a card that waits draws less than one that works. Where the host decides, the largest
# power overstates it.)
#
# **Takeaway.** Where the host decides, a faster card buys nothing; and fewer launches need no new card.

# %% [markdown]
# ## 6 · The article's own models
#
# **Question.** Does the model say who wins on the article's own models, Qwen3-32B and gpt-oss-120b?
#
# The batches are the article's: 32 texts a step, and 16 for gpt-oss on long texts on the H100, whose memory would not hold
# more. These models can't be traced here, so each part of the prediction is worked out:
#
# - **FLOPs and bytes** from the models' shapes. Texts are padded to the longest of their batch. Of 32 long texts that is
#   nearly always the limit of 2,048 tokens, where the average is 861: more than half of what is computed is padding.
# - **Kernels' time** follows from FLOPs and bytes, by the roofline (lab 00). No kernel gets all that the roofline
#   allows. The share that the kernels of Qwen3-8B or gpt-oss-20b got here is assumed for their larger siblings, too.
#   (Without a GPU the whole of it is assumed, so that the time is a lower bound.)
# - **Launches** are counted on three tiny models: one as it is, one with a layer more, one with twice the experts. The
#   differences tell what a layer and an expert add, and so give a formula for models of any size.
# - Blocks are computed twice, in the forward and again in the backward pass, as with unsloth's checkpointing.

# %%
bases: dict[str, lab08_large_models.Basis] = {}
for family, name in models.items():
    with lab.attempt(lab08_large_models.LARGE[family].hub.rpartition("/")[2]):
        if step_of(family) is None:
            raise Unavailable("the loop of its smaller sibling was not measured (see above)")
        tiny = open_workload(f"{name}-long", "tiny", device=lab.device)
        law = lab08_launch_bound.launch_law(tiny, family)
        bases[family] = lab08_large_models.Basis.of(step_of(family), law, texts[family]["long"])
        experts = f" + experts × {law.expert:.0f}" if law.expert else ""
        print(
            f"{family}: {law.constant:.0f} + layers × ({law.layer:.0f}{experts}) operations a step"
        )
if bases:
    with lab.attempt("The article's own models", experiment="model of two cards"):
        two = lab08_large_models.two_cards(bases)
        mean = lab08_large_models.two_cards(bases, padded=False)  # texts of their mean length
        two |= {f"{metric}_mean": value for metric, value in mean.items()}
        two |= {f"{family}_host_us": 1e3 * basis.host_ms for family, basis in bases.items()}
        name = "model of two cards"
        lab.keep(Run("08", name, metrics=two, tags={"experiment": name}))
        frame = lab08_large_models.large_steps(bases)
        for part in ("kernels", "host", "step"):
            frame[f"{part}, s"] = frame[f"{part}_ms"] / 1e3
        wanted = ["model", "texts", "card", "examples", "kernels, s", "host, s", "step, s"]
        shown = frame.assign(
            model=frame["model"].map({"dense": "Qwen3-32B", "moe": "gpt-oss-120b"})
        )
        lab.table(
            shown[[*wanted, "hourly", "article A3"]].rename(
                columns={"examples": "batch", "hourly": "examples/h"}
            )
        )

# %%
if "moe" in bases:
    with lab.attempt("Who wins"):
        moe = bases["moe"]
        host_us = 1e3 * moe.host_ms
        print(f"A launch of the expert loop takes this host {host_us:.1f} µs. With such a host:")
        for name in (BLACKWELL, H100):
            step = lab08_large_models.large_step(name, "moe", "long", moe)
            decides = "the host" if step["step_ms"] > 1.1 * step["kernels_ms"] else "the kernels"
            print(
                f"- {name}, batch {step['examples']}: {decides} decide, "
                f"{step['kernels_ms'] / 1e3:.2f} s of kernels in {step['step_ms'] / 1e3:.2f} s"
            )
        ahead = two["moe_long_blackwell_ratio"]
        print(f"- the Blackwell card makes {ahead:.2f} times as many examples an hour as the H100")
        for batches, count in {"the article's batches": 0, "batch 32 on both": 32}.items():
            factor = lab08_large_models.host_for_a_tie(moe, count)
            when = "at no host" if factor is None else f"at {factor * host_us:.1f} µs a launch"
            print(f"- with {batches} the two draw level {when}")

# %%
lab.verdict(
    "A3.32b.h100-short",
    "A3.32b.h100-long",
    "A3.32b.factor",
    "A3.120b.h100-short",
    "A3.120b.h100-long",
)
lab.verdict("A3.120b.factor", "A3.120b.faster", "A3.moe.gaps-longer", "A3.120b.energy");

# %% [markdown]
# Suppose that both cards have the *same* host and the *same* batch. Then the faster card can't lose: if both wait for
# the host, they tie. So in the article something else must have differed, and two things did:
#
# - **The batch.** The H100 got 16 texts a step, the other card 32. Where the host decides, a step takes as long with 16
#   texts as with 32, so the H100 made half as many examples an hour. (Where kernels decide, half the batch takes about
#   half the time.)
# - **The host.** The H100 was in another machine. Of its host the article says only that it launched too slowly.
#
# How slow must a host be for the H100 to lose? The list above says it. If the answer is several times your host's time,
# then either the article's host was that slow, or its loop made more launches than this one. The model can't tell
# which.
#
# (On a CPU, the host's time for a launch is a CPU operator's, several times a GPU's launch. These verdicts then show how a
# claim is judged by a prediction; they don't say much about the cards.)
#
# **Takeaway.** "Card A beats card B" is also a statement about two hosts, two batch sizes and a loop. Ask what decided
# on each card, the kernels or the host. If it was the kernels on both, the cards were compared; if not, something else
# was.

# %% [markdown]
# ## 7 · Does it fit?
#
# **Question.** The article says that gpt-oss-120b's weights take about 30 GB in 4 bits. The model has 117 billion
# parameters. Can that be?
#
# **Your prediction:** how many GB all of them take in 4 bits.

# %%
my_gb: float | None = None  # for example 30

lab.predict("gpt-oss-120b in 4 bits (arithmetic)", my_gb, "GB")

# %%
parts, nf4 = lab08_large_models.PARTS, lab08_large_models.NF4_BITS
mxfp4 = 4 + 8 / 32  # OCP microscaling FP4: 4 bits a number, and for each 32 of them a scale of 8
all_16 = dict.fromkeys(parts, 16.0)
ways = {
    "4 bits for everything": dict.fromkeys(parts, 4.0),
    "as published: experts in MXFP4": all_16 | {"experts": mxfp4},
    "NF4, all matrices of the blocks": all_16 | {"experts": nf4, "layers": nf4},
    "16 bits": all_16,
}
held = {way: lab08_large_models.weight_gb(GPT_OSS_120B, bits) for way, bits in ways.items()}
counts = lab08_large_models.parameters_of(GPT_OSS_120B)
lab.table(
    ("gpt-oss-120b", "experts", "other matrices", "embedding, head", "rest", "in all"),
    ("parameters, billions", *(counts[part] / 1e9 for part in parts), None),
    *((f"{way}, GB", *gb.values(), sum(gb.values())) for way, gb in held.items()),
)
four_bit = sum(held["4 bits for everything"].values())
from_shapes = {"workload": "from shapes", "scale": "full"}
tags = {"experiment": "moe weights"}
lab.keep(Run("08", "moe weights", metrics={"four_bit_gb": four_bit}, tags=tags, **from_shapes))
lab.verdict("A3.120b.weights");

# %% [markdown]
# 117 billion times half a byte is 58 GB: the article is off by a factor of two. (30 GB would be 2 bits.) The model as it
# is published takes even more. In MXFP4, 32 numbers share a scale of 8 bits, which is a quarter of a bit for each; and
# what isn't an expert stays in BF16.
#
# ### What a step needs besides
#
# **Question.** Which methods fit which card, and at which batch?
#
# Memory is worked out from shapes. A block's saved tensors are counted on PyTorch's meta device, where a model of any size
# takes no memory. Texts are padded to 2,048 tokens, as a single long text makes it so. A GB here is 10⁹ bytes: a card sold
# with "96 GB" has 102 of them, one with "80 GB" has 85.

# %%
cases = [
    ("Qwen3-32B", "LoRA", 2, ""),
    ("Qwen3-32B", "LoRA", 4, "lora_32b_batch_4_gb"),
    ("Qwen3-32B", "LoRA, checkpointed", 4, "lora_32b_batch_4_checkpointed_gb"),
    ("Qwen3-32B", "QLoRA", 4, "qlora_32b_batch_4_gb"),
    ("Qwen3-32B", "QLoRA, not checkpointed", 4, "qlora_32b_batch_4_kept_gb"),
    ("Qwen3-32B", "unsloth", 32, "unsloth_32b_batch_32_gb"),
    ("gpt-oss-120b", "QLoRA", 1, "qlora_120b_batch_1_gb"),
    ("gpt-oss-120b", "unsloth", 16, ""),
    ("gpt-oss-120b", "unsloth", 32, "unsloth_120b_batch_32_gb"),
]
sizes, methods = {"Qwen3-32B": QWEN3_32B, "gpt-oss-120b": GPT_OSS_120B}, lab08_large_models.METHODS
rows, metrics = [], {"lora_120b_batch_1_gb": sum(held["16 bits"].values())}  # its weights alone
with lab.attempt("What a step needs besides", experiment="model of memory"):
    for model, method, batch, metric in cases:
        gb = lab08_large_models.memory_gb(sizes[model], methods[method], batch)
        rows.append((f"{model}, {method}, batch {batch}", *gb.values(), sum(gb.values())))
        if metric:  # a claim is about it
            metrics[metric] = sum(gb.values())
    lab.table(
        ("GB at the peak, predicted", "weights", "adapters", "activations", "logits", "in all"),
        *rows,
    )
    tags = {"experiment": "model of memory"}
    lab.keep(Run("08", "model of memory", metrics=metrics, tags=tags, **from_shapes))

# %%
lab.verdict("A3.32b.lora-batch", "A3.32b.qlora-batch", "A3.32b.unsloth-batch")
lab.verdict("A3.120b.too-large", "A3.120b.fits", "A3.120b.h100-batch");

# %% [markdown]
# **Qwen3-32B.** Whether LoRA and QLoRA fit depends on checkpointing, which the article doesn't mention. Without it, batch
# 4 is far too large. But so is the batch of 2 that the article ran: it would need nearly twice what the card has, so this
# model doesn't explain that run. With checkpointing, both methods should have fitted at batch 4. (QLoRA is judged as it
# is usually written, with checkpointing.)
#
# **gpt-oss-120b.** The article had to halve the batch on the H100. By this model it need not have: 32 texts stay below
# what the card holds. But the model is a lower bound. It leaves out memory that the allocator holds and can't use; the
# room in which a block's experts are unpacked from 4 bits, 6 GB if all at once; and the matrix of an attention that isn't
# a single kernel, 17 GB for 64 heads and 32 texts. Any of these would explain it.
#
# ### What gets adapters in gpt-oss?
#
# **Question.** The article asked for adapters on all seven projections (lab 07), and found that only attention got
# them. Why?
#
# The next cell asks PEFT for the same on a small gpt-oss, and prints what it found. The cell after it
# is about another statement of the article's: on its Blackwell card, unsloth said that xformers doesn't work there and
# must be built from source. Only a card of that kind (compute capability 12.0) can tell, so only there unsloth is
# imported, in a process of its own.

# %%
asked = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lm = build_lm(GPT_OSS["tiny"], torch.device("cpu"), torch.float32)
model = get_peft_model(lm, LoraConfig(r=8, lora_alpha=16, target_modules=asked))
trained = [name for name, p in model.named_parameters() if p.requires_grad]
print("LoRA was attached to:", ", ".join(n for n in asked if any(f".{n}." in t for t in trained)))
attention_only = {"attention_only": int(all(".self_attn." in name for name in trained))}
lab.keep(Run("08", "moe adapters", metrics=attention_only, tags={"experiment": "moe adapters"}))

# %%
with lab.attempt("Importing unsloth"):
    if lab.machine.get("compute_capability") != "12.0":
        raise Unavailable(
            "it takes a Blackwell card of compute capability 12.0 to see what unsloth says on one"
        )
    imported = try_import("unsloth", timeout_s=90)
    if imported.status == "missing":
        raise Unavailable("unsloth is not installed; `make unsloth` does it")
    metrics = {"failed": int(imported.status != "ok"), "message": imported.message}
    tags = {"experiment": "unsloth import"}
    lab.keep(Run("08", "unsloth import", metrics=metrics, tags=tags))
lab.verdict("A3.120b.attention-only", "A3.blackwell.xformers");

# %% [markdown]
# PEFT looks for *modules* with the names that it is given. In Qwen3 each projection is a linear layer, and so a module.
# In gpt-oss that is true of attention only: the matrices of all experts of a layer lie in two large tensors,
# `gate_up_proj` and `down_proj`, which are parameters and no modules. So four of the seven names are found, and nothing
# says that three are missing. Print what was adapted before you train.
#
# **Takeaway.** Check a figure by multiplying before you pass it on. And ask under which conditions memory was measured:
# batch, padding, checkpointing.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("08.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** A step has 8,000 launches of 12 µs and kernels of 150 ms, and nothing waits. How many ms does it take? And how many
# on a card that is twice as fast? Answer with a pair.

# %% tags=["exercise"]
my_steps = None  # (this card, the faster one), for example (200, 100)
print(check("08.1", my_steps))

# %% [markdown]
# **2.** Card A's kernels take 2.25 times as long as card B's, for the same batch. Host and launches are the same for
# both. B's memory holds only half of A's batch. If the host decides on both cards, how many times as many examples an
# hour does A give?

# %% tags=["exercise"]
my_ratio = None  # your number
print(check("08.2", my_ratio))

# %% [markdown]
# **3.** gpt-oss-20b has 19.11 billion numbers in its experts and 1.80 billion elsewhere. How many GB do its weights
# take with the experts in MXFP4 and the rest in BF16?

# %% tags=["exercise"]
my_weights = None  # GB
print(check("08.3", my_weights))

# %% [markdown]
# **4. Make it faster.** Here is the expert loop in small: each of 64 experts looks for its tokens, multiplies them, and
# adds them to the result. That makes five operations an expert, each with a launch or more: compare the choices with
# the expert's number, find the places (`nonzero`), gather the tokens, multiply, and add (`index_add_`). `nonzero` also
# waits for the GPU, as the host must know how many tokens there are. Write `all_experts`: the same result, at least
# twice as fast.

# %% tags=["exercise"]
torch.manual_seed(0)
experts = torch.randn(64, 32, 32, device=lab.device)


def expert_by_expert(tokens, chosen):
    """tokens [256, 32], chosen [256]: the expert of each -> [256, 32]"""
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        mine = (chosen == number).nonzero().squeeze(1)
        result.index_add_(0, mine, tokens[mine] @ expert)
    return result


def all_experts(tokens, chosen):
    return expert_by_expert(tokens, chosen)  # your code instead


def routed_tokens(seed: int) -> tuple:
    torch.manual_seed(seed)
    return torch.randn(256, 32, device=lab.device), torch.randint(
        len(experts), (256,), device=lab.device
    )


print(faster_than(4, expert_by_expert, all_experts, routed_tokens, times=2, tolerance=1e-3))


# %% [markdown]
# ## What you did
# - You told dense peaks from sparse ones in two cards' tables.
# - You measured how long a launch takes your host, and saw which steps wait for it.
# - You predicted steps from their traces and a host measured on other steps, and know how far the predictions were off.
# - You slowed a host down and saw how that changes which card is faster.
# - You expressed what a card is worth as examples an hour, a night, a kilowatt hour and a yen.
# - You worked out weights in 4 bits and the memory of a step, and corrected a published figure.
#
# ## Where this comes from, and what to read on
# - NVIDIA, *H100 Tensor Core GPU Architecture* (2022) and *RTX Blackwell PRO GPU Architecture* (2025), white papers: dense and
#   sparse peaks side by side.
# - Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures*
#   (Communications of the ACM, 2009, [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785)).
# - He, [Making Deep Learning Go Brrrr From First Principles](https://horace.io/brrr_intro.html) (2022): compute, bandwidth
#   and overhead.
# - OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card* (2025, [arXiv:2508.10925](https://arxiv.org/abs/2508.10925)); Open
#   Compute Project, *OCP Microscaling Formats (MX) Specification* (2023), which defines MXFP4.
# - Zhu, Phanishayee and Pekhimenko, *Daydream: Accurately Estimating the Efficacy of Optimizations for DNN Training*
#   (USENIX ATC 2020): what a change is worth, predicted from a trace.
# - The course's [glossary](../docs/glossary.md).

# %%
loop = step_of("moe")
lab.done(
    {
        "dense BF16 peak of the H100 (data sheet)": card(H100).dense["bf16"],
        "host's time for a launch in the experts' loop (on a thin model)": (
            loop.run.metrics["host_us"] if loop else None
        ),
        "GPU idle in the expert loop": (
            100 * loop.run.metrics["idle_share"] if loop and on_gpu else None
        ),
        "slower launches until the Blackwell card wins (predicted)": flips.get("moe_us"),
        "gpt-oss-120b in 4 bits (arithmetic)": four_bit,
    }
)
