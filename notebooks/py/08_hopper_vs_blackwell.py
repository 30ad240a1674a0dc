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
# PRO 6000 Blackwell Max-Q. On gpt-oss-120b, a mixture of experts, the workstation
# card wins, at a third of the price. The article looked inside and found the H100 idle: its host could not launch
# kernels fast enough.
#
# You have one card, or none. So this lab builds a model of a training step that says how long it takes beside any
# host on any card, tests it on steps whose time it has not seen, slows the host down on purpose to watch the winner change,
# and only then says anything about cards that are not here. What is predicted is called predicted, in every table.
#
# **After this lab you can**
# - read a data sheet without taking sparse peaks for dense ones;
# - measure what a launch takes your host, and say whether a step waits for the GPU or for the host;
# - predict a step's time from a trace, and know how far the prediction is off;
# - say at which speed of the host one card overtakes another, and what a slower host does to each of them;
# - put a card's worth as examples an hour, a night, a kilowatt hour and a yen;
# - work out what a model's weights take in 4 bits, and whether training it fits a card.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 4 minutes |
# | `full` | a GPU of 96 GB or more: the expert loop alone takes some 82 | 8 minutes |
#
# At `full` the models are Qwen3-8B and gpt-oss-20b to the last parameter, with random weights: times and memory are
# theirs, losses are not. Without a GPU, PyTorch's operators stand for kernels: there you see how the model is fed and
# tested, and the H200's results for what only a GPU can show.

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
from labutils.course import NotHere, open_lab

lab = open_lab("08", globals())

# %%
import warnings

import matplotlib.pyplot as plt
import torch

from labutils import cards, hardware, launches, plots
from labutils.doctor.facts import try_imports
from labutils.parameters import whole_numbers
from labutils.prediction import CARDS, Host, replayed_ms
from labutils.results import Run
from labutils.workloads import open_workload

plots.use_style()
warnings.filterwarnings("ignore", module="torch|transformers|peft")
on_gpu, sheet = lab.device == "cuda", hardware.spec_of(lab.machine)
steps, slower = steps or (4 if lab.scale == "tiny" else 8), [0, *whole_numbers("delays", delays)]
if not on_gpu:
    torch.set_num_threads(1)
models = {"dense": "qwen3-lora", "moe": "gpt-oss-lora"}
texts = {
    family: {kind: lab.workload(f"{name}-{kind}") for kind in ("long", "short")} for family, name in models.items()
}
lab.keep(Run("08", "machine"));

# %% [markdown]
# ## 1 · Two cards on paper
#
# **Question.** The article prints 877.9 TFLOPS for 16-bit products of its Blackwell card and 1978.9 for the H100. How
# many of those can a training step use?
#
# Tensor cores skip zeros if two of every four weights are zero, and vendors print the rate that this would give. No
# weight of a trained model is zero.
#
# **Your prediction:** the H100's dense BF16 peak, in TFLOP/s.

# %%
my_peak: float | None = None  # for example 1979

lab.predict("dense BF16 peak of the H100 (data sheet)", my_peak, "TFLOP/s")

# %%
lab.table(cards.SPEC_HEAD, *cards.spec_rows())
lab.table(
    ("", *CARDS),
    ("dense BF16, TFLOP/s", *(cards.card(name).dense["bf16"] for name in CARDS)),
    ("memory, GB/s", *(float(cards.card(name).bandwidth) for name in CARDS)),
    ("FLOP per byte where they meet", *(cards.card(name).ridge("bf16") for name in CARDS)),
    ("memory, GB as printed", *(cards.card(name).memory_gb for name in CARDS)),
    ("memory that a program finds, 10⁹ bytes", *(cards.card(name).capacity_gb for name in CARDS)),
    ("largest power, W", *(cards.card(name).tdp_w for name in CARDS)),
)
lab.keep(Run("08", "specs", metrics=cards.spec_metrics()))
lab.verdict(
    "A3.specs.fp32", "A3.specs.bf16", "A3.specs.fp8", "A3.specs.fp4",
    "A3.specs.bandwidth", "A3.specs.memory", "A3.specs.power",
);  # fmt: skip

# %% [markdown]
# The table is NVIDIA's own, copied rightly: every figure of the tensor cores is with sparsity, on both cards. So
# their *ratio* is right, 2.25 in 16 bits, and so is 1.87 in bandwidth. On paper the H100 wins both ways.
#
# **Takeaway.** Halve what is printed for tensor cores before you compare a step with it. And note what a data sheet
# doesn't have: how fast anybody can tell the card what to do.

# %% [markdown]
# ## 2 · A model of a step
#
# The host gives the GPU one piece of work after the other: a kernel, a copy, or a whole CUDA graph. While the GPU
# works the host goes on giving. With $K$ the kernels' time, $n$ launches and $c$ the host's time for one,
#
# $$ t = \max(K,\; n\,c) + t_\text{copies} $$
#
# if nothing makes one wait for the other in between. Plain loops do: the experts' loop asks the GPU which experts
# were chosen, and has to wait for the answer. So beside the short form stands the *replay*: the same quantities,
# launch by launch in order, where every wait costs what it costs (`labutils/prediction.py`, one page).
#
# Where do $K$, $n$ and $c$ come from? A model that is fitted to what it predicts proves nothing. Here $K$ and $n$ are
# those of a trace of the step: the profiler slows the host down, but leaves kernels nearly as they are (those of a
# graph it may stretch a little), and the step runs for a second before, so that the GPU is as warm as when it is
# timed. And $c$ comes from *another*, a light step: the shortest text, on a thin model with the same layers and
# experts and an eighth of the width. The host does for it what it does for the real one, and the kernels take little,
# so what it lasts is the host's doing. If a GPU took half of it or more, it would be refused. A launch from Python in
# a forward pass and one from C++ in a backward pass differ, so there is a $c$ for each phase.
#
# A CPU is host and device in one. It can't run ahead of itself, every piece waits, and the sum stands for the
# maximum.

# %%
probed = hardware.probe("launch_us", "graph_node_us")
launch_us, empty_ms = probed.median("launch_us"), (probed.median("graph_node_us") or 0.0) / 1e3
with lab.attempt("Timing the shortest call"):
    if launch_us is None:
        raise NotHere(f"a call could not be timed: it {probed.skipped['launch_us']}")
    print(f"The shortest call there is, x.neg_() on one number, takes the host {launch_us:.1f} µs.")

# %% [markdown]
# **Question.** A launch in a training step: does it cost the host about as much as that?
#
# **Your prediction:** the host's time for a launch in the experts' loop, in µs.

# %%
my_host: float | None = None  # for example 5

lab.predict("host's time for a launch in the experts' loop (on a thin model)", my_host, "us")

# %% [markdown]
# ## 3 · Foretold, then measured
#
# Each model is driven in several ways. *Loop* is the library's code with PEFT's adapters, for gpt-oss with its *expert
# loop*: one expert after the other. *Rewritten*, for gpt-oss *grouped*: attention in one kernel, all experts of a layer
# in one grouped product, nothing asked of the GPU. *Captured*: the same, recorded as one CUDA graph. *Compiled*, for
# gpt-oss alone: captured, with its blocks compiled, plain adapters and a loss that never forms all logits. Four texts a
# step, *long* (861 tokens on average) or *short* (117). Every step is traced and foretold before it is timed.
#
# How much of a test is that? Where the *host* decides, all of one: the time comes from a light step elsewhere. Where
# *kernels* decide, hardly any: then the prediction is the sum of the kernels in a trace of the same step. So the two
# are counted apart. One test is sharper: before the captured step is traced, it is foretold from the kernels of the
# rewritten or grouped one, as if they came in one launch.
#
# **Your prediction:** for how much of a step does the GPU idle in the expert loop on long texts, in percent?

# %%
my_idle: float | None = None  # for example 10

lab.predict("GPU idle in the expert loop", my_idle, "%")

# %%
studied: dict[str, launches.Studied] = {}


def study(family: str, way: str, delayed: bool = False) -> None:
    """Foretell and measure one way to drive a model; what fails says why, and the H200's run is shown."""
    name = family if way in launches.LANES else f"{family}, {way}"
    with lab.attempt(f"{family}, {way}", reference=launches.named(name, "long")):
        captured = way in ("captured", "compiled")
        if captured and not (on_gpu and launch_us):
            raise NotHere("CUDA graphs need an NVIDIA GPU" if not on_gpu else "no call could be timed (see above)")
        host = Host(launch_us / 1e3) if captured else None
        recipe, hosts = launches.ways(family)[way], slower if delayed else ()
        like = studied.get(launches.ONE_BY_ONE[family]) if way == "captured" else None
        found = launches.study(texts[family], recipe, name, steps, host, hosts, like)
        runs = [seen.run for seen in found.seen.values()]
        lab.keep([*runs, *found.slowed.values()], lane=launches.LANES.get(way, "same work"))
        studied[name] = found

# %%
study("dense", "loop", delayed=True)
study("dense", "rewritten")
study("dense", "captured")
for workload in texts["dense"].values():
    workload.let_go()

# %%
study("moe", "expert loop", delayed=True)
study("moe", "grouped")
study("moe", "captured", delayed=True)
study("moe", "compiled")
for workload in texts["moe"].values():
    workload.let_go()

# %%
told_runs = [seen.run for found in studied.values() for seen in found.seen.values()]
lab.table(launches.HEAD, *launches.rows(told_runs))
accuracy = launches.accuracy(told_runs)
if accuracy:
    lab.keep(Run("08", "foretold", metrics=accuracy))
    lab.show(launches.told(accuracy))
lab.table(launches.UNSEEN_HEAD, *launches.unseen_rows(told_runs))

# %%
fig, ax = plt.subplots()
offs = {run.run: [100 * run.metrics["off"]] for run in told_runs}
plots.differences(ax, offs, (-20, 20), "within 20 %", "the replay's prediction against the measurement, %")
plt.show()
lab.verdict("A3.moe.launches", "A3.dense.busy");

# %% [markdown]
# How to read the first table. Compare *kernels* with *launches × host*: the larger one decides. Where they are close, or
# where there are many waits, the short form is too low, as host and GPU take turns; the replay sees that. A captured
# step is a handful of launches: the host has no say in it any more, and what is left is what the kernels take.
#
# What both leave out: the microsecond or so that passes between two kernels even when the next one is ready. On a CPU
# the times of operators come from a profiler that slows down what it times, and other programs want the cores as well:
# expect predictions to be off by more there.
#
# And what was it worth, to need fewer launches?

# %%
on_long = [run for run in told_runs if run.run.startswith("moe long")]
lab.table(launches.SPEED_HEAD, *launches.speed_rows(on_long, base="moe long"))

# %% [markdown]
# **Takeaway.** A step has two clocks. Before you buy a faster card, find out which of the two your step goes by.

# %% [markdown]
# ## 4 · A slower host
#
# **Question.** If the host decides, slowing it down must slow the step down, by as much as the model says, and must
# leave alone what the host doesn't decide. Does it?
#
# A dispatch mode of PyTorch is handed every operation on its way to the kernel. Ours looks at the clock until some
# microseconds are over, and then passes it on (`labutils/measure/delays.py`). Going through Python costs time even
# with a delay of 0, so that this is a slower host, too; how much slower is measured on the light step. The captured
# step calls no operation.
#
# **Your prediction:** a launch in the expert loop takes so many µs longer until this card, beside the slowed host, is
# as slow as an RTX PRO 6000 Blackwell Max-Q beside the host as it is.

# %%
my_flip: float | None = None  # for example 10

lab.predict("slower launches until the Blackwell card wins (predicted)", my_flip, "us")

# %%
rivals, flips, most = {}, {}, 10.0
with lab.attempt("A slower host", reference="flip"):
    shown = {name: found for name, found in studied.items() if found.slowed}
    names = {name: found.seen["long"].run.run for name, found in shown.items()}
    measured = {names[name]: launches.by_delay(found) for name, found in shown.items()}
    most = 1.1 * max([most, *(us for points in measured.values() for us in points)])
    foretold = {names[name]: launches.slowdown(found.seen["long"], most) for name, found in shown.items()}
    lab.table(launches.DELAY_HEAD, *(row for found in shown.values() for row in launches.delay_rows(found)))
    for name in ("dense", "moe") if on_gpu and sheet else ():  # the loops: a captured step has no host to wait for
        if name in shown:
            seen = shown[name].seen["long"]
            rival_ms = replayed_ms(seen.on(cards.card(cards.BLACKWELL), sheet, empty_ms), seen.host)
            rivals[f"{names[name]}: {cards.BLACKWELL}, predicted"] = rival_ms
            flips[f"{name}_us"] = launches.flip_us(seen, rival_ms)
    fig, ax = plt.subplots(figsize=(7.2, 4.2))
    plots.slower_hosts(ax, foretold, measured, rivals)
    ax.set_xlabel("longer for a launch, on average (from the light step), µs")
    plt.show()

# %%
with lab.attempt("When the Blackwell card wins", reference="flip"):
    if not rivals:
        raise NotHere("a rival is predicted from a loop that was measured here, on a GPU with a data sheet")
    lab.keep(Run("08", "flip", metrics={name: us for name, us in flips.items() if us is not None}))
    for name, us in flips.items():
        when = "at no delay up to 1 ms" if us is None else f"when a launch takes {us:.1f} µs longer"
        print(f"{name.removesuffix('_us')}: the {cards.BLACKWELL} (predicted, host as it is) draws level {when}.")

# %% [markdown]
# The points are measured, with this card, and the curves were there before them. On a GPU the lines across are the
# Blackwell card, predicted, beside a host that nobody slowed down. Left of a crossing this card wins, and right of it
# loses with the very same kernels. The dense model lies flat as long as its kernels hide the launches. On a CPU
# nothing is hidden, so every line rises from the start: the sum, not the maximum.
#
# That is one way to get the article's result: an H100 beside a slower host than its rival's. Server processors have
# more cores and lower clocks than a workstation's, and launching is the work of one core.
#
# **Takeaway.** A fast card beside a slow host is a slow card. And a captured step doesn't care.

# %% [markdown]
# ## 5 · Four cards, beside this host
#
# **Question.** What would the same steps take on an H100, an H200, the Blackwell workstation card and a B200? And
# what does a card give for its power and its price?
#
# Each kind of kernel scales with what bounds it: products and attention with the dense peak (or the bandwidth, where
# their FLOPs a byte don't suffice), everything else with bandwidth. The host is this one, for all four. Power is the
# largest that the card may draw, but measured in the last row: the driver counts the energy that this card uses.
# Compare predicted cards with the row before it, which has this card's largest power as well.
#
# A yen pays for the card's share of its price and for electricity; the machine around it comes on top. Change the
# prices, and how long and how much a card works, in the parameters cell.

# %%
with lab.attempt("Four cards", reference="four cards"):
    if not (on_gpu and sheet):
        raise NotHere("kernels are scaled from one card to another, and this machine has no GPU with a data sheet")
    told = {found.seen["long"].run.run: found.seen["long"] for found in studied.values()}
    ms = {run: cards.on_cards(seen, sheet, empty_ms) for run, seen in told.items()}
    rows = [(run, *by_card.values(), told[run].run.metric("step_ms")) for run, by_card in ms.items()]
    lab.table(("ms a step, predicted", *CARDS, f"measured here, {sheet.name}"), *rows)
    flat = {f"{run}: {name}, ms": float(f"{t:.4g}") for run, by_card in ms.items() for name, t in by_card.items()}
    lab.keep(Run("08", "four cards", metrics=flat))

# %%
if on_gpu and sheet and "moe" in studied:
    seen = studied["moe"].seen["long"]
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    plots.slower_hosts(ax, cards.beside_slower_hosts(seen, sheet, empty_ms, most), {}, {})
    ax.set_title("The expert loop on long texts, beside ever slower hosts", pad=44)
    plt.show()

# %%
with lab.attempt("What a card gives for its power and price"):
    if not (on_gpu and sheet):
        raise NotHere("it takes the steps of the table above")
    paid = {cards.BLACKWELL: blackwell_yen, cards.H100: h100_yen, "H200 SXM": h200_yen, "B200": b200_yen}
    prices = hardware.Prices({name: yen for name, yen in paid.items() if yen}, yen_per_kwh, years, hours_a_day)
    lab.show(prices.told())
    chosen = [told[run] for run in ("dense long", "moe long", "moe long, captured") if run in told]
    rows = [row for seen in chosen for row in cards.four_cards_rows(seen, sheet, empty_ms, prices)]
    lab.table(cards.FOUR_HEAD, *rows)

# %% [markdown]
# Look at the expert loop: the cards are two to five times apart on paper, and here? The slower the host, the nearer the
# lines: in the end all four wait for it. Then at the same model captured, whose launches are a handful.
#
# An example's energy follows the time only in part: a card that waits draws less than one that works, so for a step
# that the host decides the largest power overstates it.
#
# **Takeaway.** Money spent on a faster card buys nothing where the host decides. The same money is saved by launching
# less.

# %% [markdown]
# ## 6 · The article's own models
#
# **Question.** Qwen3-32B and gpt-oss-120b, on both cards, with the article's batches: 32 texts a step, and 16 where
# the H100's memory would not hold more (gpt-oss, long texts). Does the model say who wins?
#
# They are not here to be traced. FLOPs and bytes are counted from their shapes, on texts that are padded to the longest
# of their batch, as the library does: of 32 long ones, 861 tokens on average, that is nearly always the limit of 2,048,
# so that more than half of what is computed is padding. Kernels are taken to reach the same
# share of the roofline as those of their smaller siblings here (without a GPU: all of it, the floor). How many
# launches: counted on tiny models with one layer more and twice the experts, which gives a law. Blocks are computed
# twice, as unsloth does.

# %%
bases: dict[str, cards.Basis] = {}
for family, name in models.items():
    with lab.attempt(cards.LARGE[family].hub.rpartition("/")[2], reference="model of two cards"):
        if family not in studied:
            raise NotHere("the loop of its smaller sibling was not measured (see above)")
        law = launches.launch_law(open_workload(f"{name}-long", "tiny", device=lab.device), family)
        bases[family] = cards.Basis(**launches.known(studied[family], law, texts[family]["long"]))
        experts = f" + experts × {law.expert:.0f}" if law.expert else ""
        print(f"{family}: {law.constant:.0f} + layers × ({law.layer:.0f}{experts}) operations a step")
if bases:
    told = cards.two_cards(bases) | {f"{family}_host_us": 1e3 * basis.host_ms for family, basis in bases.items()}
    lab.keep(Run("08", "model of two cards", metrics=told))
    lab.table(cards.TWO_CARDS_HEAD, *cards.two_cards_rows(bases))

# %%
if "moe" in bases:
    lab.show("\n".join(f"- {sentence}" for sentence in cards.who_wins(bases)))

# %%
lab.verdict("A3.32b.h100-short", "A3.32b.h100-long", "A3.32b.factor", "A3.120b.h100-short", "A3.120b.h100-long")
lab.verdict("A3.120b.factor", "A3.120b.faster", "A3.moe.gaps-longer", "A3.120b.energy");

# %% [markdown]
# Read the lines before the verdicts closely. With the *same* host and the *same* batch the worst that can happen
# to the faster card is a tie: both wait for the host. To lose it takes something more, and the article had two things
# that could do it. Its H100 got 16 texts a step where the other card got 32. That halves what a launch is good for,
# but costs nothing as long as kernels decide. And it stood in another machine, whose host the article says nothing
# about but that it launched too slowly. If the lines ask for hosts several times as slow as yours, then the model
# explains the article's result by such a host, or by more launches than this loop makes; it can't tell which.
#
# **Takeaway.** "Card A beats card B" is a statement about two hosts, two batch sizes and a loop as well. Ask first which
# clock decided on either card: if it was the kernels on both, the cards are what was compared; if not, they aren't.

# %% [markdown]
# ## 7 · Does it fit?
#
# **Question.** The article says that gpt-oss-120b's weights take about 30 GB in 4 bits. It has 117 billion
# parameters.
#
# **Your prediction:** GB of weights with all of them in 4 bits.

# %%
my_gb: float | None = None  # for example 30

lab.predict("gpt-oss-120b in 4 bits (arithmetic)", my_gb, "GB")

# %%
large, small = cards.GPT_OSS_120B, cards.GPT_OSS["full"]
parts = ("experts", "layers", "words", "rest")
rows = [("parameters, billions", *(cards.parameters_of(large)[part] / 1e9 for part in parts), None)]
for way, bits in cards.WAYS_TO_HOLD.items():
    gb = cards.weight_gb(large, bits)
    rows.append((f"{way}, GB", *(gb[part] for part in parts), sum(gb.values())))
lab.table(("gpt-oss-120b", "experts", "other matrices", "embedding, head", "rest", "in all"), *rows)
four_bit = sum(cards.weight_gb(large, cards.WAYS_TO_HOLD["4 bits for everything"]).values())
lab.keep(Run("08", "moe weights", metrics={"four_bit_gb": four_bit}, workload="from shapes", scale="full"))
lab.verdict("A3.120b.weights");

# %% [markdown]
# 117 billion times half a byte is 58 GB: the article is off by a factor of two. (30 GB would be 2 bits.) As published
# it is more still: in MXFP4 each 32 numbers share a scale of 8 bits, a quarter of a bit for each, and what isn't an
# expert stays in BF16.
#
# Memory of a step comes on top. It is worked out from shapes: a block's saved tensors are counted on PyTorch's meta
# device, where a model of any size takes no memory. Texts are padded to 2,048 tokens: one long text in a batch
# suffices. A GB here is 10⁹ bytes; a card that is sold with "96 GB" holds 102 of them, and one with "80 GB" 85.

# %%
rows = []
asked = (
    ("LoRA", 2),
    ("LoRA", 4),
    ("LoRA, checkpointed", 4),
    ("QLoRA", 4),
    ("QLoRA, not checkpointed", 4),
    ("unsloth", 32),
)
for method, batch in asked:
    gb = cards.memory_gb(cards.QWEN3_32B, cards.METHODS[method], batch)
    rows.append((f"Qwen3-32B, {method}, batch {batch}", *gb.values(), sum(gb.values())))
for batch in (16, 32):
    gb = cards.memory_gb(large, cards.METHODS["unsloth"], batch)
    rows.append((f"gpt-oss-120b, unsloth, batch {batch}", *gb.values(), sum(gb.values())))
lab.table(("GB at the peak, predicted", "weights", "adapters", "activations", "logits", "in all"), *rows)
lab.keep(Run("08", "model of memory", metrics=cards.memory_metrics(), workload="from shapes", scale="full"));

# %%
lab.verdict("A3.32b.lora-batch", "A3.32b.qlora-batch", "A3.32b.unsloth-batch")
lab.verdict("A3.120b.too-large", "A3.120b.fits", "A3.120b.h100-batch");

# %% [markdown]
# Whether LoRA and QLoRA fit hangs on checkpointing, which the article doesn't mention. Without it, batch 4 is far
# from fitting, but so is the batch of 2 that the article ran: at nearly twice what the card holds, the model doesn't
# explain that run, whatever the verdict on batch 4. With it, both methods should have fitted at batch 4. QLoRA's verdict
# is about the method as it is usually written, with checkpointing.
#
# Nor does the model reproduce what made the article halve gpt-oss's batch: at 32 it stays below what the H100 holds.
# It is a lower bound. It leaves out memory that the allocator holds and can't use, the room in which a block's experts
# are unpacked from 4 bits (6 GB in 16 bits, if all at once), and attention that isn't one kernel, whose matrix of
# 2,048 by 2,048 for each of 64 heads and 32 texts takes 17 GB. Any of them would do.
#
# ### What gets adapters in gpt-oss?
#
# The article asked for all seven projections and found that only attention trains. PEFT, on a small gpt-oss:

# %%
adapted = cards.attention_only()
print("LoRA was attached to:", ", ".join(adapted.pop("adapted")))
lab.keep(Run("08", "moe adapters", metrics=adapted))
with lab.attempt("Importing unsloth", reference="unsloth import"):
    tried = try_imports(("unsloth",), timeout_s=90)[0]["unsloth"]
    if tried.status == "missing" or not on_gpu:
        raise NotHere(
            "unsloth needs an NVIDIA GPU" if not on_gpu else "unsloth is not installed; `make unsloth` does it"
        )
    lab.keep(Run("08", "unsloth import", metrics={"failed": int(tried.status != "ok"), "message": tried.message}))
lab.verdict("A3.120b.attention-only", "A3.blackwell.xformers");

# %% [markdown]
# **Takeaway.** Multiply before you quote. And ask what a memory figure was measured *with*: batch, padding,
# checkpointing.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
from labutils.exercises import faster_than, solved

# %% [markdown]
# **1.** A step has 8,000 launches of 12 µs and kernels of 150 ms; nothing waits. How long does it take? And on a card
# that is twice as fast? Answer with both, in ms.

# %% tags=["exercise"]
my_steps = None  # two numbers, for example (200, 100)


def check_steps(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_steps first."
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "Exercise 1: two numbers are asked for, (this card, the faster one), for example (200, 100)."
    if all(abs(mine - right) < 0.5 for mine, right in zip(answer, (150, 96), strict=True)):
        return "Exercise 1: right. The host's 96 ms hide behind 150 ms of kernels, and come out behind 75."
    return "Exercise 1: not yet. Work out launches × host first; then take the larger of the two, for each card."


print(check_steps(my_steps))

# %% tags=["solution"]
my_steps = (max(150, 8000 * 12 / 1e3), max(150 / 2, 8000 * 12 / 1e3))
solved(check_steps(my_steps))

# %% [markdown]
# **2.** Card A's kernels take 2.25 times as long as card B's, for the same batch. Host and launches are the same for
# both. B's memory only holds half of A's batch. In a step that the host decides on both cards, how many times as many
# examples an hour does A give?

# %% tags=["exercise"]
my_ratio = None  # your number


def check_ratio(answer) -> str:
    if answer is None:
        return "Exercise 2: set my_ratio first."
    if abs(answer - 2) < 0.01:
        return "Exercise 2: right: steps last equally long, and A's hold twice as many."
    return "Exercise 2: not yet. How long is a step on either card, if the host decides?"


print(check_ratio(my_ratio))

# %% tags=["solution"]
my_ratio = 2
solved(check_ratio(my_ratio))

# %% [markdown]
# **3.** gpt-oss-20b has 19.11 billion numbers in its experts and 1.80 billion elsewhere. How many GB do its weights
# take with experts in MXFP4 and the rest in BF16?

# %% tags=["exercise"]
my_weights = None  # GB


def check_weights(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_weights first."
    right = sum(cards.weight_gb(small, cards.WAYS_TO_HOLD["as published: experts in MXFP4"]).values())
    if abs(answer - right) < 0.1:
        return f"Exercise 3: right: {right:.2f} GB."
    return "Exercise 3: not yet. 4 bits and a 32nd of 8 for each of the first, 16 bits for each of the others."


print(check_weights(my_weights))

# %% tags=["solution"]
my_weights = 19.11 * (4 + 8 / 32) / 8 + 1.80 * 2
solved(check_weights(my_weights))

# %% [markdown]
# **4. Make it faster.** The loop over experts in small: each of 64 experts looks for its tokens, multiplies them, and adds
# them to the result, five launches an expert and a wait for the count. Get the same result twice as fast.

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
    return torch.randn(256, 32, device=lab.device), torch.randint(len(experts), (256,), device=lab.device)


print(faster_than(4, expert_by_expert, all_experts, routed_tokens, times=2, tolerance=1e-3))


# %% tags=["solution"]
def all_experts_solution(tokens, chosen):  # copies 256 small matrices; for large ones: sort, and a grouped GEMM
    return torch.bmm(tokens[:, None], experts[chosen])[:, 0]


solved(faster_than(4, expert_by_expert, all_experts_solution, routed_tokens, times=2, tolerance=1e-3))

# %% [markdown]
# ## What you did
# - You told dense peaks from sparse ones in two cards' tables.
# - You measured what a launch takes your host, and saw which steps wait for it.
# - You predicted steps from traces of them and a host learnt elsewhere, and know how far the predictions were off.
# - You slowed a host down and found where one card overtakes another.
# - You put cards' worth as examples an hour, a night, a kilowatt hour and a yen.
# - You worked out weights in 4 bits and the memory of a step, and corrected a published figure.

# %%
expert_loop = studied["moe"].seen["long"].run if "moe" in studied else None
lab.done(
    {
        "dense BF16 peak of the H100 (data sheet)": cards.card(cards.H100).dense["bf16"],
        "host's time for a launch in the experts' loop (on a thin model)": expert_loop.metric("host_us")
        if expert_loop
        else None,
        "GPU idle in the expert loop": 100 * expert_loop.metrics["idle_share"] if expert_loop and on_gpu else None,
        "slower launches until the Blackwell card wins (predicted)": flips.get("moe_us"),
        "gpt-oss-120b in 4 bits (arithmetic)": four_bit,
    }
)
