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
# # Lab 11 · Many GPUs
#
# Article A4 gives distributed training a paragraph, without a number: use NCCL, a fast network, some environment
# variables, a Docker command, ZeRO or FSDP (two ways to divide a model's memory among GPUs: section 2 explains FSDP;
# ZeRO is the DeepSpeed library's). Here the course's own training loop runs unchanged under `torchrun` on several GPUs.
# You predict its step from one GPU and the link between them, and check the prediction. Then you break it.
#
# Two words. A *rank* is one of the processes that train together, one for each GPU. An *all-reduce* is how they agree:
# each rank brings a tensor, and each gets the sum. Between GPUs NVIDIA's library *NCCL* carries such messages; between
# CPUs *gloo* does, which comes with PyTorch.
#
# **After this lab you can**
# - show that N processes compute what one process does, but for rounding;
# - predict the step of N GPUs from one GPU's step and a link's bandwidth, for an adapter and for all weights;
# - see in a trace which communication is hidden behind the backward pass, and which isn't;
# - choose between DDP and FSDP by memory and by time, and say what `no_sync` and the bucket size are for;
# - say what the article's NCCL variables and Docker flags change on this machine;
# - lose a rank in the middle of training, and continue with those that are left.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU: two processes share its cores, gloo in NCCL's place | 2 minutes |
# | `small` | two GPUs of 8 GB or more | 5 minutes |
# | `full` | two GPUs of 80 GB or more | 6½ minutes |
#
# **Without two GPUs** run it at `tiny`: two processes share the CPU. You see how each question is asked and answered,
# and that several processes compute the same as one. Speed they can't show: they share cores, memory and caches, and
# the same cores carry their messages. Our H200s' tables stand below yours. With one GPU, `auto` chooses `tiny` as well,
# and leaves the GPU idle.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (two processes on any CPU), small and full (two GPUs or more), auto: tiny without two GPUs
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
ranks: int = 0  # processes; 0: as many as GPUs, 2 on a CPU
steps: int = 0  # timed steps of a run; 0: 4 at tiny, 10 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("11", globals())

# %%
import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch

from labutils.course import plots
from labutils.labs import lab11_distributed
from labutils.profiling import cuda, ddp_model
from labutils.profiling.collectives import Link
from labutils.recipe import Unavailable
from labutils.results.records import Run, to_frame
from labutils.training.launcher import rank_variables

plots.use_style()

# %%
tiny = lab.scale == "tiny"
count = ranks or max(2, cuda.count())
timed = steps or (4 if tiny else 10)
cases = lab11_distributed.cases(lab)
if tiny:  # where starting the processes takes longest
    cases = cases[:2]
alone: list[Run] = []  # what one process does
together: list[Run] = []  # what all ranks do
predicted: dict = {}


def need(found) -> None:
    """An earlier section has measured nothing that this one could speak about."""
    if not found:
        raise Unavailable("it speaks about what an earlier section would have measured")


def link_run() -> Run | None:
    return next((run for run in alone if run.run == "all-reduce" and run.ok), None)


def one_process(case) -> Run | None:
    return case.run(alone, "one process", ranks=1)


def of_ddp(case) -> dict:
    """The tags of a case's run on all ranks."""
    return case.tags | {"strategy": "ddp", "ranks": count}

# %% [markdown]
# ## 1 · One GPU, and the link
#
# **Question.** What must you know about *one* process, and about the *link*, to predict a step of several?
#
# `torchrun` starts the processes. Before they train together, two things are measured:
#
# - **The link**: all-reduces from 1 KiB up, with nothing else to do. The result is given as *bus bandwidth*, which NVIDIA's
#   nccl-tests define: the rate at which each link carries data. (In an all-reduce of N ranks, 2 (N − 1) / N times the
#   message goes through each link.)
# - **One process**: rank 0 trains alone, with the share of the batch that each rank will have, while the others wait.
#   It notes *when* in the backward pass each gradient is ready, for from then on it could be sent. (*one process, same
#   batch* is rank 0 alone, too, but with the whole batch of all ranks. Section 3 compares its losses with theirs.)
#
# There are four cases. A run's name begins with the case:
#
# | name | what is trained |
# |---|---|
# | *ddp 2*, *fsdp 2*, ... | Stable Diffusion 1.5 with LoRA (2: the number of ranks) |
# | *full ddp 2*, ... | Stable Diffusion 1.5, the whole UNet |
# | *qwen ddp 2*, ... | Qwen3 with LoRA |
# | *qwen full ddp 2*, ... | a small Qwen3, all weights |
#
# **Your prediction:** the bus bandwidth of a large message here, in GB/s. (NVLink's data sheet says 450 in one direction.
# A laptop's memory does about 20, and both processes copy through it.)

# %%
my_bandwidth: float | None = None  # for example 100

lab.predict("bus bandwidth of a large all-reduce", my_bandwidth, "GB/s")

# %%
with lab.attempt("Several ranks on this machine", experiment="all-reduce"):
    device = lab11_distributed.device_for(lab)
    plan = lab11_distributed.plan_alone(cases, count, timed, tiny)
    lab11_distributed.measured(lab, plan, count, device, into=alone)
    print(f"{count} ranks on {device}. Each of them was given:")
    print(*(f"{name}={value}" for name, value in rank_variables(count, device).items()))

# %%
def link_table(runs: list[Run]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "the quickest message, µs": 1e3 * min(run.samples["all_reduce_ms"]),
            "bus bandwidth of the largest, GB/s": run.samples["bus_gb_per_s"][-1],
        }
        for run in runs
    )


with lab.attempt("The link's picture", experiment="all-reduce"):
    need(link_run())
    marks = {
        case.title: 1e6 * one_process(case).metrics["gradient_mb"]
        for case in cases
        if one_process(case)
    }
    fig, ax = plt.subplots()
    samples = link_run().samples
    ax.plot(samples["bytes"], samples["bus_gb_per_s"], "o-", label="measured, median")
    for (title, size), style in zip(marks.items(), (":", "--", "-.", (0, (1, 3))), strict=False):
        ax.axvline(size, color=plots.GREY, linestyle=style, label=f"gradients of {title}")
    ax.set(xscale="log", yscale="log", xlabel="bytes of the message")
    ax.set_ylabel("bus bandwidth, GB/s")
    ax.legend()
    plt.show()
lab.show([link_run()] if link_run() else [], link_table, experiment="all-reduce")

# %% [markdown]
# What can the link carry at best? `nvidia-smi topo -m`, which the article recommends, says what connects each pair of
# GPUs: *NV18* means 18 NVLinks. With what one of them carries by its data sheet (here: an H100's or H200's), that is a
# limit for the curve above.

# %%
def topology_table(runs: list[Run]) -> pd.DataFrame:
    pairs = runs[0].metrics.get("named", {}) if runs else {}
    return pd.DataFrame(pairs.items(), columns=["GPUs", "connected by"])


connected: list[Run] = []
with lab.attempt("What connects the GPUs"):
    connected = [lab.measured("topology", None, lab11_distributed.topology)]
lab.show(connected, topology_table, experiment="topology")
lab.verdict("A4.diagnosis.topology");

# %% [markdown]
# How to read the names: *NV18* are 18 NVLinks, each of 25 GB/s in one direction on an A100, H100 or H200 and of 50 on a
# B200, so 450 GB/s on an H200. *PIX* is one PCIe switch between the two, *PXB* several. *PHB* is the host's PCIe bridge,
# *NODE* several bridges of one processor, and *SYS* the link between two processors: the slowest way.

# %%
columns = {
    "run": "one process",
    "step_ms": "step, ms",
    "examples_per_s": "examples/s",
    "gradient_mb": "gradients, MB",
    "gathered_mb": "a pass's weights, MB",
    "peak_allocated_gb": "peak memory, GB",
}
by_themselves = [run for case in cases if (run := one_process(case))]
lab.show(by_themselves, columns, experiment="training", strategy="one process", same_batch=False)

# %% [markdown]
# On the left of the picture the bandwidth rises with the message's size: there a message takes about the same time however
# small it is. That time is the *latency*, of starting and of waiting for each other. To the right the curve flattens (at
# `tiny` it may still be rising): there bandwidth counts. The vertical lines show what each case has to send in every step:
# its gradients. At `full`, LoRA's are 3 megabytes for Stable Diffusion and 87 for Qwen3, and those of all weights are
# gigabytes. (Our H200s' largest message got two thirds of what 18 NVLinks carry by the data sheet. That is usual: what a
# link carries includes more than the message.)
#
# (`OMP_NUM_THREADS` is each rank's share of the cores. Without it every rank starts as many threads as there are cores:
# the oversubscription of lab 10. `torchrun` itself sets it to 1 if nobody has set it.)
#
# **Takeaway.** A link has two numbers, latency and bandwidth. The size of a message decides which of them counts.

# %% [markdown]
# ## 2 · Predict first
#
# **Question.** How long will a step on all ranks take?
#
# DistributedDataParallel (*DDP*) gives each rank the whole model and a share of the batch, and averages the gradients. It
# sends them in *buckets* of about 25 MiB, while the backward pass is still computing the gradients of earlier layers. So
# most of the communication is hidden. Not hidden, or *exposed*, is what is still on its way when the last gradient is
# ready:
#
# > step(N) = one process's step + exposed all-reduce
#
# FSDP also shards the weights: each rank holds 1/N of every matrix, and gathers the rest shortly before a layer is used,
# in the forward and in the backward pass. For that the prediction is rough: what fits beside the computation is hidden.
#
# **Your prediction:** the *efficiency* of DDP for Stable Diffusion with LoRA: the examples a second of all ranks, in
# percent of N times one process's.

# %%
my_efficiency: float | None = None  # for example 90

lab.predict("efficiency of DDP for LoRA", my_efficiency, "%")

# %%
with lab.attempt("The model's predictions", experiment="predictions"):
    need(link_run())
    link = Link.of(link_run().samples, count)
    for case in cases:
        if one := one_process(case):
            predicted |= lab11_distributed.predictions(case, one, link)
    steps_predicted = {name: found.step_ms for name, found in predicted.items()}
    lab.keep(Run("12", "predictions", metrics=steps_predicted, tags={"experiment": "predictions"}))
    lab.table(
        (
            "run",
            "computing, ms",
            "messages",
            "sent for, ms",
            "exposed, ms",
            "step, ms",
            "efficiency, %",
        ),
        *(
            (
                name,
                f.compute_ms,
                f.messages,
                f.communication_ms,
                f.exposed_ms,
                f.step_ms,
                100 * f.efficiency,
            )
            for name, f in predicted.items()
        ),
    )

# %% [markdown]
# These predictions are on record now, with the time, before any of these runs was made: see `results.jsonl`.

# %% [markdown]
# ## 3 · The same loop on all ranks
#
# **Question.** Is it the same training, and does it take as long as predicted?
#
# Each run is the loop of the other labs with one field of its recipe changed: `parallel` (DDP or FSDP), `bucket_cap_mb`
# (the size of DDP's buckets) or `synchronise` (whether gradients are averaged after each micro-batch, or once a step;
# section 4 looks at these two). With N ranks, rank 0 takes micro-batches 0, N, 2N ..., rank 1 takes 1, N + 1 ..., and
# so on. Each micro-batch is computed with the same random numbers as in a single process. A script of yours that calls
# `Trainer(workload, recipe).run(100)` does the same when you start it with
# `torchrun --standalone --nproc-per-node=2 script.py`.
#
# What the runs' names say: *bucket 1MB* sends buckets of 1 MiB; *bucket view* has gradients lie in the buckets, where DDP
# otherwise copies them there (`gradient_as_bucket_view`); *sync each* and *no_sync* accumulate several micro-batches on each
# rank (four, or two at `tiny`), so that a step takes several times as long; *as they come* are texts of their own lengths,
# where the other runs have rows of one length.

# %%
def judge(run: Run) -> Run:
    """With its efficiency, against one process of the same case, and what was predicted."""
    tags = run.tags["workload"], run.tags["trained"]
    one = next(
        (one_process(c) for c in cases if (c.tags["workload"], c.tags["trained"]) == tags), None
    )
    return lab11_distributed.with_efficiency(run, one, predicted.get(run.run))


with lab.attempt("Training on several ranks", **of_ddp(cases[0])):
    device = lab11_distributed.device_for(lab)
    need(alone)
    plan = lab11_distributed.plan_together(cases, count, timed, tiny)
    lab11_distributed.measured(lab, plan, count, device, together, judge)

# %%
unbroken = cases[0].run(alone, "one process", ranks=1, same_batch=True)
losses: list[Run] = []
with lab.attempt("The same losses", experiment="losses"):
    need(together and unbroken)
    one, many = (
        run.metrics["loss"] for run in (unbroken, cases[0].run(together, "ddp", ranks=count))
    )
    off = max(abs(a - b) / abs(b) for a, b in zip(many, one, strict=False))
    metrics = {"largest_difference": off}
    losses = [lab.keep(Run("12", "losses", metrics=metrics, tags={"experiment": "losses"}))]
    in_full = [[f"{loss:.7f}" for loss in losses[:4]] for losses in (one, many)]
    lab.table(
        ("loss in step", *range(1, 5)),
        ("one process", *in_full[0]),
        (f"DDP, {count} ranks", *in_full[1]),
    )
lab.show(
    losses,
    {"run": "losses", "largest_difference": "largest relative difference"},
    experiment="losses",
)

# %% [markdown]
# Equal in every digit is luck: a sum of two halves can round differently from a single sum. (On our H200s, in BF16, the
# losses agree to four digits or more.) Were it wrong, it would be *far* off: by percents in the first step already if the
# data were shared wrongly, and from the second step on if the gradients were averaged wrongly.
#
# ### Does it take as long as predicted?

# %%
def scaling(runs: list[Run]) -> pd.DataFrame:
    frame = to_frame(runs)
    shares = {
        "efficiency": "efficiency, %",
        "communication_share": "traced: communicating or waiting, %",
        "exposed_communication_share": "of it not hidden, % of the step",
    }
    shown = {"run": "run", "step_ms": "step, ms", "predicted_step_ms": "predicted, ms"}
    shown |= {"examples_per_s": "examples/s"} | shares
    shown |= {"peak_allocated_gb": "peak memory per GPU, GB"}
    several = frame[frame["ranks"] > 1].reindex(columns=list(shown))
    several[list(shares)] *= 100
    return several.rename(columns=shown)


with lab.attempt("Predicted and measured", **of_ddp(cases[0])):
    need(together)
    with_prediction = {
        run.run: run for run in together if run.ok and run.metric("predicted_step_ms")
    }
    # The step of one process that does what each of its ranks does.
    base = {name: predicted[name].compute_ms for name in with_prediction}
    fig, ax = plt.subplots()
    plots.predicted_steps(ax, with_prediction, base)
    plt.show()
lab.show(together, scaling, experiment="training")
lab.verdict("A4.network.nccl", "A4.network.torchrun", "A4.memory.fsdp", "A4.memory.zero");

# %% [markdown]
# *Efficiency* says how much of the GPUs you get. (Where nothing is predicted, the model has nothing to say.) The two
# columns called *traced* are of two steps under the profiler, which slows the host down: they are longer than those that
# were timed. They say in which part of them the GPU communicates **or waits for another rank**, and in which part it does
# nothing else. So they aren't the part of the efficiency that messages cost. LoRA shows that: on our H200s Stable Diffusion
# sends 3 MB, which takes a tenth of a millisecond, and yet a good part of its traced step isn't hidden.
#
# - **LoRA** has next to nothing to send, so messages can't cost much efficiency.
# - **All weights** make large messages. The backward pass hides most of them, if it is long enough.
# - **FSDP** holds 1/N of the weights, frozen ones too, and pays for that with time. It is for models that wouldn't fit
#   otherwise. (ZeRO divides the same three things: weights, gradients and optimizer state. DeepSpeed isn't among the
#   course's libraries, so the claim about ZeRO isn't tested.)
#
# On a CPU the ranks share cores and caches: each computes more slowly than one process alone, and sending slows down
# computing as well. So all steps are longer than predicted, and FSDP, which sends the most, suffers the most. (An
# efficiency above 100 % can come from a machine that was busier while the one process was measured.)
#
# ### Where the prediction is too short
#
# **Question.** Is it the messages that make a step longer than predicted?
#
# The prediction leaves out that ranks can slow each other down without sending anything: they share a host. Runs with
# `no_sync` tell, for of the micro-batches of their steps all but the last send nothing. Take one synchronised step, which
# stands for the last micro-batch, off such a step, and share out the rest: what does a micro-batch take beside other ranks
# that sends nothing? If it is as long as one process's, what is missing above is communication. If it is longer, it is the
# company.

# %%
lab.show([*alone, *together], lab11_distributed.beside_others, experiment="training")

# %% [markdown]
# On our two H200s the small Qwen3's unsent micro-batches take a third longer beside another rank, and those of Qwen3's LoRA
# don't. For the whole UNet the difference is within the spread: there it is the last micro-batch, the one that is sent,
# that takes longer. For Stable Diffusion's LoRA nothing can be concluded: a micro-batch takes 191 to 275 ms, depending on the
# run, and in the slowest of them the loop also waited for its data.
#
# What is on record doesn't say why. A hypothesis: launching is slower with two processes on the host. Where kernels are
# short, a host has little time to spare, and as soon as launching takes longer than computing, the GPU waits for it. Then
# each step takes as long as the slower of the ranks, and the wait stands in the other's trace as communication. Qwen3's
# LoRA has the longest kernels of the four. *How to test it:* start the one process on both GPUs at once, with nothing
# between them, and compare their steps; then do it with larger batches, or with the step as one CUDA graph (lab 04), which
# takes the host out.
#
# **Takeaway.** Two measurements, of one process and of the link, tell you whether a second GPU will pay. Where the
# prediction is wrong, it tells you where to look.

# %% [markdown]
# ## 4 · Inside a step
#
# **Question.** When does communication run, and what hides it?
#
# The picture is drawn from traces: computing above, communication below. (On GPUs an NCCL kernel also runs while it *waits*
# for the other ranks. So a rank that is late shows up as communication of the others. Pauses shorter than a 500th of a step
# aren't drawn. The four runs are Stable Diffusion's, and of two traced steps the picture has the one that is nearer to
# their mean.)
#
# **Your prediction:** when all weights of Stable Diffusion's UNet are trained with DDP, how many percent of a traced step are
# communication or waiting that nothing hides?

# %%
my_exposed: float | None = None  # for example 5

lab.predict("exposed communication, all weights", my_exposed, "%")

# %%
with lab.attempt("A step's picture", **of_ddp(cases[1])):
    need(together)
    traced = {
        run.run: (run.samples["computing_ms"], run.samples["communicating_ms"])
        for strategy in ("ddp", "fsdp")
        for case in cases[:2]
        if (run := case.run(together, strategy, ranks=count)) and run.samples.get("computing_ms")
    }
    fig, ax = plt.subplots()
    plots.beside(ax, traced)
    plt.show()
lab.show(together, lab11_distributed.comparisons, experiment="training")

# %% [markdown]
# - **`no_sync`.** A step of several micro-batches needs the sum of their gradients only once, at the end. By default DDP
#   averages after each micro-batch. With `no_sync` it waits for the last: the same gradients, a fraction of the messages.
# - **The bucket size.** Small buckets are sent earlier, but each pays the latency; a large bucket waits until it is full.
#   25 MiB is a good choice if a message of that size reaches the link's full bandwidth: look it up in section 1's picture.
# - **FSDP** gathers weights whether they are trained or not. With LoRA on a large frozen model, frozen weights are nearly
#   all that it sends, in the forward pass and again in the backward pass.
#
# Runs of several ranks are measured one after the other, not in turns: all ranks would have to hold all of them. A host may
# be slower in one run than in the next, and no spread tells of that. On our H200s *no_sync* seems to cost Stable
# Diffusion's LoRA time, and at `tiny` it may come out slower, too. It can't be: it does nothing more. (It only *holds* more:
# the sum of the gradients, beside the buckets. See the whole models' memory.) Where messages don't explain a difference,
# measure it again.
#
# **Takeaway.** Communication costs only what can't be hidden. So send less often, and begin as early as you can.

# %% [markdown]
# ## 5 · Which network is fast enough?
#
# **Question.** For large models the article recommends 25, 40 or 100 GbE, or InfiniBand. Which training needs which?
#
# *GbE* is gigabit Ethernet: 100 GbE carries 100 gigabits a second, or 12.5 GB/s. *InfiniBand* is a network for
# clusters. It has *RDMA*: the network card reads and writes the hosts' memory by itself, without their CPUs.
#
# The prediction of section 2 can be asked about links that aren't here: with one process's step as measured, and the
# bandwidths of data sheets. No network reaches its nominal rate, so the result is an upper bound. (The article's
# advice for large models is judged by it, as *predicted*: the fastest Ethernet that it names, 100 GbE, should leave whole
# models 80 % at least. An upper bound below that refutes it; one above it would prove little.)

# %%
networks = {  # GB/s in one direction, as their names say; NVLink: an H100's or H200's
    "1 GbE": 0.125,
    "10 GbE": 1.25,
    "25 GbE": 3.1,
    "100 GbE": 12.5,
    "400G InfiniBand": 50.0,
    "NVLink": 450.0,
}

# %%
with lab.attempt("Other networks", experiment="networks"):
    need(by_themselves)
    links = {rate: ddp_model.flat_link(count, rate) for rate in networks.values()}
    needed = {
        case.title: {
            rate: 100 * ddp_model.ddp(one_process(case), link).efficiency
            for rate, link in links.items()
        }
        for case in cases
        if one_process(case)
    }
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    plots.curves(ax, needed, "GB/s in one direction", f"predicted efficiency of {count} ranks, %")
    ax.set_ylim(0, 105)
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set_xticks([*networks.values()], [f"{name}\n{rate:g}" for name, rate in networks.items()])
    plt.show()
    lab.table(
        ("efficiency at most, %", *networks),
        *((title, *(at[rate] for rate in networks.values())) for title, at in needed.items()),
    )
    metrics = {
        f"{title} at {name}": at[rate]
        for title, at in needed.items()
        for name, rate in networks.items()
    }
    lab.keep(Run("12", "networks", metrics=metrics, tags={"experiment": "networks"}))
lab.verdict("A4.network.rdma", "A4.network.ethernet");

# %% [markdown]
# (At `tiny` 1 GbE would do for LoRA; the whole UNet needs more, as its step is short. At `full`, look where the lines of
# LoRA and of whole models part. And mind what the model leaves out: for NVLink it promises nearly 100 %, and section 3
# measured less.)
#
# **Takeaway.** Whether you need InfiniBand depends on how many bytes of gradients there are for each second of
# computation. An adapter's megabytes need far less than a whole model's gigabytes.

# %% [markdown]
# ## 6 · NCCL's variables, and the Docker command
#
# **Question.** What do the article's `export NCCL_...` lines change?
#
# NCCL reads its variables once, so each is tried in a launch of its own. They aren't there to make NCCL faster: left alone,
# it chooses a way by itself. They are for finding out what it chose (`NCCL_DEBUG=INFO`), and for keeping it from a way
# that is broken.
#
# **Your prediction:** how many times slower is a message of 64 MiB if the GPUs may not write to each other's memory
# directly (*P2P*)?

# %%
my_slower: float | None = None  # for example 3

lab.predict("64 MiB without P2P, slower by", my_slower, "x")

# %%
settings = (
    {"NCCL_DEBUG": "INFO"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_PROTO": "LL"},
    {"NCCL_SOCKET_IFNAME": "lo"},
    {"NCCL_IB_DISABLE": "1"},
)
trials: list[Run] = []
with lab.attempt("NCCL's variables"):
    if lab11_distributed.device_for(lab) != "cuda":
        raise Unavailable(
            "NCCL is for GPUs, and gloo, which stands in for it here, knows none of these variables"
        )
    for each in settings:
        name = "nccl " + " ".join(f"{variable}={value}" for variable, value in each.items())
        trial = partial(lab11_distributed.nccl_trial, count, each)
        trials.append(lab.measured(name, None, trial))

# %%
columns = {
    "settings": "setting",
    "transport": "way",
    "channels": "channels",
    "chosen": "64 MiB goes by",
    "latency_us": "the quickest message, µs",
    "largest_ms": "64 MiB, ms",
    "bus_gb_per_s": "64 MiB, GB/s",
}
lab.show(trials, columns, experiment="nccl")

# %% [markdown]
# | variable | for example | what it is for |
# |---|---|---|
# | `NCCL_DEBUG` | `INFO` | says which way each channel goes |
# | `NCCL_P2P_DISABLE` | `1` | no GPU writes to another's memory: shared memory of the host instead |
# | `NCCL_SHM_DISABLE` | `1` | no shared memory of the host: matters where there is no P2P |
# | `NCCL_ALGO` | `Tree` | the only algorithm that it may choose |
# | `NCCL_PROTO` | `LL` | the only protocol: LL is for small messages, Simple for large |
# | `NCCL_SOCKET_IFNAME` | `lo` | the interface for meeting, and for sockets |
# | `NCCL_IB_DISABLE` | `1` | no InfiniBand: sockets between hosts |

# %%
lab.verdict("A4.network.debug", "A4.network.interface", "A4.network.no-infiniband");

# %% [markdown]
# The article's `NCCL_SOCKET_IFNAME=eth0` is right on a machine that has an interface of this name; on any other, training
# doesn't start (`ip -o addr` lists the names). `NCCL_IB_DISABLE=0` is the default. `NCCL_IB_DISABLE=1` is for machines
# where InfiniBand is found but doesn't work. Between GPUs of one host none of the three changes anything in the last column.
# (`NCCL_DEBUG=INFO` is the row to compare with: there NCCL was only asked to say what it does. Short messages take up to twice as
# long in one launch as in the next, so look at the last column, and not at a few percent there either.)
#
# ### The article's Docker command
#
# **Question.** `docker run --gpus all --shm-size=1g --ulimit memlock=-1 --ulimit stack=67108864 ...`: what is each flag
# for?
#
# | flag | what it sets | without it |
# |---|---|---|
# | `--gpus all` | which GPUs the container sees; needs NVIDIA's container toolkit on the host | `torch.cuda.is_available()` is False, and training runs on the CPU or not at all |
# | `--shm-size=1g` | the size of `/dev/shm`, 64 MB unless said | DataLoader workers hang or die with a bus error (lab 03), and NCCL can't use shared memory |
# | `--ulimit memlock=-1` | how much memory may be page-locked | InfiniBand can't register its buffers (`ibv_reg_mr` fails); CUDA's own pinned memory isn't counted |
# | `--ulimit stack=67108864` | a thread's stack, 64 MiB | seldom anything: deep recursion in C++ (compilers, parsers) crashes at the usual 8 MiB |
# | not in it: `--ulimit nofile=...` | open files: each rank's sockets, each worker's shared tensors | "Too many open files", with many workers |
# | not in it: `--ipc=host` | the host's `/dev/shm` and its namespace instead of `--shm-size` | ranks in *different* containers can't use shared memory or P2P between them |
#
# What this machine has without them: `df -h /dev/shm` and `ulimit -a` tell.

# %%
lab.verdict("A4.network.shared-memory", "A4.network.ulimits");

# %% [markdown]
# In the container the article starts
# `python -m torch.distributed.run --nproc_per_node=4 --nnodes=2 --node_rank=0 --rdzv_endpoint=master:29500 train.py`: 4
# processes on each of 2 hosts, which meet at port 29500 of `master`. On the other host the same command must be started
# with `--node_rank=1`. The container also needs access to that port, for example by `--network=host`, which the
# article's command leaves out.
#
# **Takeaway.** None of these makes training faster. They decide whether it runs at all. Know what a flag is for before you
# copy it.

# %% [markdown]
# ## 7 · A rank dies
#
# **Question.** One of several processes is killed in the middle of a step. Who notices, when, and what is left?
#
# The other ranks wait for a sum that will never be complete. With gloo the connection breaks at once. With NCCL a
# kernel waits, forever if there is no time limit. `torchrun` watches its processes: it sees one end, and stops the
# rest.
#
# Here rank 1 is killed after five steps of a run that saves a checkpoint after every second step. (A *checkpoint* is
# here a file to continue from, with weights, optimizer state and the step's number. It has nothing to do with the
# checkpointing of activations in labs 01, 07 and 09.)
#
# **Your prediction:** which step does the last complete checkpoint hold?

# %%
my_step: float | None = None  # a number of steps

lab.predict("steps that the checkpoint holds", my_step, "steps")

# %%
crashed: dict[str, Run] = {}
with lab.attempt("A rank that is killed", experiment="crash", event="rank killed"):
    device = lab11_distributed.device_for(lab)
    recipes = {"rank killed": None} | ({} if tiny else {"rank raises": None})
    recipes["resumed on fewer ranks"] = cases[0].for_ranks(count)
    crashed = lab.measured_together(
        recipes, partial(lab11_distributed.crashes, cases[0], count, device, list(recipes))
    )
    print(crashed["rank killed"].metrics["message"])

# %% [markdown]
# ### A rank that raises an exception
#
# The run continues from that checkpoint, on as many ranks as before. After seven steps one of them raises an exception.

# %%
with lab.attempt("A rank that raises", experiment="crash", event="rank raises"):
    need(crashed)
    if tiny:
        raise Unavailable("at tiny, where a start takes longest, only the kill is tried")
    print(crashed["rank raises"].metrics["message"])

# %% [markdown]
# Every rank that still can says where it was and why it stopped, the first cause first; and you learn from which checkpoint
# to continue. (Here it lay in a temporary folder, which is gone when the lab has used it. A rank may be a step further than
# the one that failed: its host had already given the GPU the next step's work.)
# Rank 0 writes a checkpoint beside the old one and then moves it into the old one's place. So there is always one that is
# complete.
#
# ### Fewer ranks
#
# **Question.** Now a GPU is gone for good. Can the others continue as if nothing had happened?
#
# As many ranks go on as can share the batch evenly: of two ranks one, of four two. Half as many ranks take twice as
# many micro-batches each, so the *global* batch stays the same. Then the losses must be those of a run that nothing
# happened to.

# %%
with lab.attempt("Going on with fewer ranks", experiment="crash", event="resumed on fewer ranks"):
    need(crashed)
    resumed = crashed["resumed on fewer ranks"]
    if not resumed.ok:
        raise Unavailable(resumed.status)
    first, losses = resumed.metrics["resumed_at"], resumed.metrics["loss"]
    curves = {"resumed on fewer ranks": dict(enumerate(losses, first + 1))}
    if unbroken:
        until = first + len(losses)
        whole = dict(enumerate(unbroken.metrics["loss"][:until], 1))
        curves = {"one process, undisturbed": whole} | curves
    fig, ax = plt.subplots()
    plots.curves(ax, curves, "optimizer step", "loss")
    every = [loss for points in curves.values() for loss in points.values()]
    margin = 0.1 * (max(every) - min(every)) or 0.1
    ax.set_ylim(min(every) - margin, max(every) + margin)
    plt.show()

# %% [markdown]
# (A killed process can't clean up after itself: its DataLoader workers go on for some seconds. The course's launcher marks
# its processes by an environment variable, finds those that the dead rank left, and ends them; *left behind* in the run's
# record counts them.)
#
# **Takeaway.** Plan for a rank to die: checkpoints that are complete at any moment, a time limit on waiting, a launcher
# that says who failed first. If a checkpoint doesn't depend on the number of ranks, you can continue with any number that
# is left.

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("11.1")` shows how the first can be solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** A model has 860 million parameters and gradients in float32. Each of 2 GPUs computes for 600 ms a step, 400 ms of
# it in the backward pass. The link's bus bandwidth is 12.5 GB/s (100 GbE). How many milliseconds does the all-reduce take?
# (Then decide for yourself: could the backward pass hide it?)

# %% tags=["exercise"]
my_milliseconds = None  # your number
print(check("11.1", my_milliseconds))

# %% [markdown]
# **2.** A backward pass takes 100 ms. Every 10 ms one of ten gradients becomes ready, each of 20 MiB; the last is ready
# at the end. Sending 20 MiB takes 5 ms. How many milliseconds of communication are exposed if each gradient is a bucket
# of its own? And how many if one bucket holds them all, which takes 50 ms to send? Answer with a pair.

# %% tags=["exercise"]
my_pair = None  # two numbers, for example (1, 2)
print(check("11.2", my_pair))

# %% [markdown]
# **3.** A run on 8 ranks has `micro_batch=2, accumulation=8`: 8 micro-batches a step, one for each rank. Two GPUs fail. On
# how many ranks can the run continue with the same global batch and the same losses? Answer with the set of all possible
# numbers.

# %% tags=["exercise"]
my_ranks = None  # a set, for example {6, 3}
print(check("11.3", my_ranks))

# %% [markdown]
# **4. Make it faster.** Each of two ranks has the gradients of four micro-batches. `over_a_slow_link` gives the mean of both
# ranks' tensors; it takes 10 ms, however small they are. `synchronised_each` averages after each micro-batch and adds up.
# Write `synchronised_once`: the same gradient, at least twice as fast.


# %% tags=["exercise"]
def over_a_slow_link(mine, theirs):
    """The mean of two ranks' tensors, over a link that takes 10 ms to begin, whatever the message's size."""
    time.sleep(0.010)
    return (mine + theirs) / 2


def synchronised_each(mine, theirs):
    """mine, theirs [micro-batches, numbers] -> the step's gradient [numbers]"""
    return sum(over_a_slow_link(a, b) for a, b in zip(mine, theirs, strict=True))


def synchronised_once(mine, theirs):
    return synchronised_each(mine, theirs)  # your code instead


def two_ranks_gradients(seed: int) -> tuple:
    torch.manual_seed(seed)
    return torch.randn(4, 1000), torch.randn(4, 1000)


print(faster_than(4, synchronised_each, synchronised_once, two_ranks_gradients, times=2))


# %% [markdown]
# ## What you did
# - You showed that several processes compute what one does.
# - You predicted steps from one process's gradients and a link's bandwidth, and checked the predictions.
# - You saw in traces which communication was hidden, and which was not.
# - You compared DDP with FSDP by time and by memory, and used `no_sync` and bucket sizes.
# - You found out what the article's variables and flags change on your machine.
# - You lost a rank twice, and continued with fewer ranks.
#
# ## Where this comes from, and what to read on
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (2020,
#   [arXiv:2006.15704](https://arxiv.org/abs/2006.15704)): buckets, overlap and `no_sync`.
# - Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2019,
#   [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)); Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded
#   Data Parallel* (2023, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277)).
# - NVIDIA, nccl-tests, [performance](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): what bus
#   bandwidth is; NCCL's [environment
#   variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
# - PyTorch's documentation of [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
# - The course's [glossary](../docs/glossary.md).

# %%
def metric_of(run: Run | None, name: str, times: float = 1.0) -> float | None:
    value = run.metric(name) if run else None
    return None if value is None else times * value


lora, whole = (case.run(together, "ddp", ranks=count) for case in cases[:2])
lab.done(
    {
        "bus bandwidth of a large all-reduce": metric_of(link_run(), "bus_gb_per_s"),
        "efficiency of DDP for LoRA": metric_of(lora, "efficiency", 100),
        "exposed communication, all weights": metric_of(whole, "exposed_communication_share", 100),
        "64 MiB without P2P, slower by": lab11_distributed.slower(trials, "NCCL_P2P_DISABLE=1"),
        "steps that the checkpoint holds": metric_of(crashed.get("rank killed"), "checkpoint_step"),
    }
)
