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
# # Lab 10 · Many GPUs
#
# Article A4 gives distributed training a paragraph: use NCCL, a fast network, some environment variables, a Docker
# command, ZeRO or FSDP. Without one number. Here the course's own training loop runs under `torchrun` on several GPUs,
# unchanged; you foretell its step from one GPU's and from the link between them, and check. Then you break it.
#
# Two words. A *rank* is one of the processes that train together, one a GPU. An *all-reduce* is how they agree: each
# brings a tensor, and all get the sum.
#
# **After this lab you can**
# - show that N processes compute what one does, to the last digits that float32 holds;
# - foretell the step of N GPUs from one GPU's and a link's bandwidth, for an adapter and for all weights;
# - see in a trace what communication is hidden behind the backward pass, and what isn't;
# - choose between DDP and FSDP by memory and by time, and use `no_sync` and the bucket size for what they are good for;
# - say what the article's NCCL variables and Docker flags change, on this machine;
# - lose a rank in the midst of training, and go on with those that are left.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU: two processes share its cores, gloo in NCCL's place | 2 minutes |
# | `small` | two GPUs of 8 GB or more | 5 minutes |
# | `full` | two GPUs of 80 GB or more | about 8 minutes |
#
# At `tiny` you see how each question is put and answered, and that all of it computes the same. What two processes of
# one CPU can't show is speed: they share cores, memory and caches, and what carries their messages is the same cores
# again. With one GPU there is nothing to share; at `tiny` it is left idle, at larger scales the lab shows our reference
# runs instead.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (two processes on any CPU), small and full (two GPUs or more), auto: what fits one GPU
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
ranks: int = 0  # processes; 0: as many as GPUs, 2 on a CPU
steps: int = 0  # timed steps of a run; 0: 4 at tiny, 10 at larger scales

# %%
from labutils.course import open_lab

lab = open_lab("10", globals())

# %%
import time
from functools import partial

import matplotlib.pyplot as plt
import torch

from labutils import fleet, plots
from labutils.results import Run, Unavailable
from labutils.training.launching import gpu_count, rank_variables

plots.use_style()
tiny = lab.scale == "tiny"
count = ranks or max(2, gpu_count())
timed = steps or (4 if tiny else 10)
cases = fleet.cases(lab)
alone: dict[str, Run] = {}  # what one process does
together: dict[str, Run] = {}  # what all ranks do
foretold: dict = {}

# %% [markdown]
# ## 1 · One GPU, and the link
#
# **Question.** What must be known of *one* process and of the *link* to say how long a step of several will take?
#
# `torchrun` starts the processes. Before they train together, two things are measured. First the link: all-reduces from
# 1 KiB up, with nothing else to do. *Bus bandwidth*, as NVIDIA's nccl-tests define it, is what each link really
# carries: of N ranks' all-reduce 2 (N − 1) / N of the message passes each of them. Then rank 0 trains alone while the
# others wait, four kinds of training, each the share that a rank will have: and it notes *when* in the backward pass
# each gradient is there, as from then on it could be sent.
#
# **Your prediction:** the bus bandwidth of a large message here, in GB/s. (NVLink's data sheet says 450 in one
# direction; the memory of a laptop does some 20, and both processes copy through it.)

# %%
my_bandwidth: float | None = None  # for example 100

lab.predict("bus bandwidth of a large all-reduce", my_bandwidth, "GB/s")

# %%
with lab.attempt("Several ranks on this machine", reference="all-reduce"):
    device = fleet.device_for(lab)
    tasks = [*fleet.tasks_alone(cases.values(), timed, tiny), fleet.task_same_batch(cases[""], count)]
    fleet.measured(lab, tasks, count, device, into=alone)
    print(f"{count} ranks on {device}. Each of them was given:")
    print(*(f"{name}={value}" for name, value in rank_variables(count, device).items()))

# %%
with lab.attempt("The link's picture", reference="all-reduce"):
    fleet.need(alone)
    marks = {case.title: 1e6 * alone[case.run("one process")].metrics["gradient_mb"] for case in cases.values()}
    fig, ax = plt.subplots()
    plots.link(ax, alone["all-reduce"].samples, marks)
    plt.show()

# %%
with lab.attempt("What one process does", reference="one process"):
    fleet.need(alone)
    lab.table(fleet.ALONE_HEAD, *fleet.alone_rows(cases.values(), alone))

# %% [markdown]
# A small message takes as long as a tiny one: that is the *latency*, of starting and of waiting for each other. A large
# one is a matter of bandwidth alone. The vertical lines are what each kind of training has to send every step: its
# gradients. LoRA's are a few megabytes where all weights' are gigabytes.
#
# (`OMP_NUM_THREADS` is each rank's share of the cores. Left alone, every rank starts as many threads as there are
# cores, and N ranks have N times as many threads as cores: the oversubscription that the article warns of. `torchrun`
# itself sets 1 where nothing is set.)
#
# **Takeaway.** Latency and bandwidth are two numbers, and a message's size says which of them counts.

# %% [markdown]
# ## 2 · Foretell first
#
# **Question.** How long will a step on all ranks take?
#
# DistributedDataParallel (*DDP*) gives each rank the whole model and a share of the batch, and averages gradients. It
# sends them in *buckets* of some 25 MiB while the backward pass still computes the gradients of earlier layers. So most
# of it is hidden. What is not is what is still on its way when the last gradient is there: the *exposed* part.
#
# > step(N) = one process's step + exposed all-reduce
#
# FSDP cuts the weights too: each rank holds 1/N of every matrix, and gathers the rest when a layer is used, forward and
# backward, one layer ahead. The model's rough account of that: hidden is what fits beside the computation.
#
# **Your prediction:** the *efficiency* of DDP for SD's LoRA: examples a second of all ranks, in percent of N times
# one's.

# %%
my_efficiency: float | None = None  # for example 90

lab.predict("efficiency of DDP for LoRA", my_efficiency, "%")

# %%
with lab.attempt("The model's predictions", reference="foretold"):
    fleet.need(alone)
    link = fleet.link_of(alone["all-reduce"])
    for case in cases.values():
        foretold |= fleet.foretold(case, alone, link)
    steps_foretold = {name: found.step_ms for name, found in foretold.items()}
    lab.measured("foretold", None, lambda: Run("10", "", metrics=steps_foretold))
    lab.table(fleet.FORETOLD_HEAD, *fleet.foretold_rows(foretold))

# %% [markdown]
# These numbers are on record now, before anything of the kind was run: the time stands beside them in `results.jsonl`.

# %% [markdown]
# ## 3 · The same loop on all ranks
#
# **Question.** Is it the same training, and does it take as long as foretold?
#
# Each of these is the loop of the other labs with one field of its recipe changed: `parallel`, `bucket_cap_mb`,
# `synchronise`. Of a step's micro-batches each rank takes every N-th, with the random numbers that one process would
# have drawn for it. Nothing else is new: a script of yours with `Session(workload, recipe).run(100)` in it does the
# same when it is started with `torchrun --standalone --nproc-per-node=2 script.py`.

# %%
with lab.attempt("Training on several ranks", reference=f"ddp {count}"):
    device = fleet.device_for(lab)
    fleet.need(alone)
    judge = partial(fleet.judged, alone=alone, foretold=foretold)
    for tasks in fleet.launches(cases.values(), count, timed, tiny):
        fleet.measured(lab, tasks, count, device, into=together, judge=judge)

# %%
with lab.attempt("The same losses", reference="losses"):
    fleet.need(together)
    one, many = (found.metrics["loss"] for found in (alone["one process, same batch"], together[f"ddp {count}"]))
    off = fleet.largest_difference(many, one)
    lab.keep(Run("10", "losses", metrics={"largest_difference": off}))
    lab.table(("step", *range(1, 5)), ("one process", *one[:4]), (f"DDP, {count} ranks", *many[:4]))
    print(f"Largest difference: {off:.1e} of the loss.")

# %% [markdown]
# Not bit by bit: a sum of two halves rounds otherwise than one sum. (On GPUs in BF16 expect the third digit, where
# several kernels add in any order.) A difference in the *first* step's loss would be a mistake in sharing the data, and
# one that begins in the second a mistake in averaging gradients.

# %%
with lab.attempt("Foretold and measured", reference=f"ddp {count}"):
    fleet.need(together)
    lab.table(fleet.HEAD, *fleet.rows(together))
    fig, ax = plt.subplots()
    plots.foretold(ax, fleet.with_prediction(together), fleet.steps_alone(cases.values(), alone, together))
    plt.show()
lab.verdict("A4.network.nccl", "A4.network.torchrun", "A4.memory.fsdp", "A4.memory.zero");

# %% [markdown]
# What to look for. *Efficiency* is what the GPUs' owner pays for; *not hidden* says what of the loss
# communication is to blame for. For LoRA there is next to nothing to send, so what is lost is what DDP itself does on
# the host, some microseconds for each of hundreds of parameters. For all weights the sum of the messages is large, and
# the backward pass hides most of it: if it is long enough. FSDP pays in time for what it saves in memory: it holds 1/N
# of the weights, frozen ones too, and so it is for models that would not fit otherwise.
#
# On a CPU all three share two cores: sending takes from computing, nothing is really hidden, and the prediction, which
# takes the link as free, is too short.
#
# **Takeaway.** A model with two measured inputs says beforehand whether a second GPU pays. Where it is wrong, it says
# where to look.

# %% [markdown]
# ## 4 · Inside a step
#
# **Question.** When does communication run, and what hides it?
#
# From traces: computing above, communication below. On GPUs a kernel of NCCL also runs while it *waits* for the others,
# so that ranks out of step show as communication.
#
# **Your prediction:** what part of DDP's step, all weights trained, is communication that nothing hides, in percent?

# %%
my_exposed: float | None = None  # for example 5

lab.predict("exposed communication, all weights", my_exposed, "%")

# %%
with lab.attempt("A step's picture", reference=f"full ddp {count}"):
    fleet.need(together)
    fig, ax = plt.subplots()
    plots.beside(ax, fleet.bands(together, fleet.traced_names(count)))
    plt.show()
    lab.table(fleet.COMPARISON_HEAD, *fleet.comparisons(together, count))

# %% [markdown]
# - **`no_sync`.** A step of several micro-batches needs the sum of their gradients once, at the end. DDP would average
#   after each. `no_sync` has it wait for the last: the same gradients, a fraction of the messages. For LoRA it hardly
#   matters.
# - **The bucket size.** Small buckets begin earlier and each pays the latency; a large one waits until it is full. 25
#   MiB is a good guess where a message of that size has the link's full bandwidth: find it in section 1's picture.
# - **FSDP** gathers weights whether or not they are trained. With LoRA on a large frozen model that is nearly all it
#   sends, twice a pass.
#
# **Takeaway.** Communication costs what can't be hidden. Fewer messages, later, is for small gradients; earlier ones
# are for large.

# %% [markdown]
# ## 5 · Which network would do?
#
# **Question.** The article recommends 25, 40 or 100 GbE or InfiniBand for large models. For which training?
#
# The same model, asked about links that aren't here: one process's step and arrivals as measured, the data sheets'
# bandwidths. It is a bound, as no network reaches its name.

# %%
with lab.attempt("Other networks", reference="networks"):
    fleet.need(alone)
    needed = fleet.needed_network(cases.values(), alone, count)
    fig, ax = plt.subplots(figsize=(7.2, 3.8))
    plots.curves(ax, needed, "GB/s in one direction", f"efficiency of {count} ranks, %, foretold")
    plots.named_ticks(ax, fleet.NETWORKS)
    plt.show()
    lab.keep(Run("10", "networks", metrics=fleet.at_networks(needed)))
lab.verdict("A4.network.rdma", "A4.network.ethernet");

# %% [markdown]
# (At `tiny` the models are thin and so are their gradients: even 1 GbE would do. At `full` look at where the lines of
# LoRA and of whole models part.)
#
# **Takeaway.** "You need InfiniBand" is a statement about bytes a second of computation. LoRA's gradients would do with
# a network of the last century's; whole models want one that costs as much as the GPU.

# %% [markdown]
# ## 6 · NCCL's variables, and the Docker command
#
# **Question.** What do the article's `export NCCL_...` lines change?
#
# Each is tried in a launch of its own, as NCCL reads them once. They are not for making it faster: left alone, it
# measures and chooses. They are for finding out what it chose (`NCCL_DEBUG=INFO`), and for keeping it from a way that
# is broken.
#
# **Your prediction:** how many times slower is a message of 64 MiB when the GPUs may not write to each other's memory?

# %%
my_slower: float | None = None  # for example 3

lab.predict("64 MiB without P2P, slower by", my_slower, "x")

# %%
trials: dict[str, Run] = {}
with lab.attempt("NCCL's variables", reference="nccl NCCL_P2P_DISABLE=1"):
    if fleet.device_for(lab) != "cuda":
        raise Unavailable("NCCL is for GPUs, and gloo, which stands in for it here, knows none of these variables")
    for settings in fleet.TRIALS:
        name = fleet.trial_name(settings)
        trials[name] = lab.measured(name, None, partial(fleet.nccl_trial, count, settings))
    lab.table(fleet.NCCL_HEAD, *fleet.nccl_rows(trials))

# %%
lab.table(("variable", "for example", "what it is for"), *fleet.variable_rows())
lab.verdict("A4.network.debug", "A4.network.interface", "A4.network.no-infiniband");

# %% [markdown]
# `NCCL_SOCKET_IFNAME=eth0`, as the article has it, is right on a machine whose interface is called so and
# stops the start on any other (`ip -o addr` lists them). `NCCL_IB_DISABLE=0` is the default. And `NCCL_IB_DISABLE=1` is
# for a cloud's Ethernet where InfiniBand is found but does not work: between GPUs of one host neither changes anything.
#
# ### The article's Docker command, flag by flag
#
# `docker run --gpus all --shm-size=1g --ulimit memlock=-1 --ulimit stack=67108864 ...`, on this machine, container or
# not:

# %%
lab.table(("flag", "what it sets", "here", "without it"), *fleet.docker_rows())
lab.verdict("A4.network.shared-memory", "A4.network.ulimits");

# %% [markdown]
# And inside it `python -m torch.distributed.run --nproc_per_node=4 --nnodes=2 --node_rank=0
# --rdzv_endpoint=master:29500 train.py`: 4 processes on each of 2 hosts that meet at port 29500 of `master`. The same
# with `--node_rank=1` must be started on the other host. The container needs that port, too: `--network=host`, which
# the command leaves out.
#
# **Takeaway.** None of these makes training faster. They decide whether it runs at all; know what each is for before
# you copy it.

# %% [markdown]
# ## 7 · A rank dies
#
# **Question.** One process of many is killed in the midst of a step. Who finds out, when, and what is left?
#
# The others wait for a sum that will never be whole. gloo's connection breaks at once; NCCL's kernel waits, and without
# a limit it would wait forever. `torchrun` watches its processes: it sees one end and stops the rest. Here rank 1 is
# killed after five steps of a run that saves a checkpoint every second one.
#
# **Your prediction:** from which step on will the run go on?

# %%
my_step: float | None = None  # a number of steps

lab.predict("steps that the checkpoint holds", my_step, "steps")

# %%
crashed: dict[str, Run] = {}
with lab.attempt("A rank that is killed", reference="rank killed"):
    device = fleet.device_for(lab)
    recipes = dict(zip(fleet.CRASHES, (None, None, cases[""].for_ranks(count)), strict=True))
    crashed = lab.measured_together(recipes, partial(fleet.crashes, cases[""], count, device))
    print(crashed["rank killed"].metrics["message"])

# %% [markdown]
# And one that raises an exception, on the way: the run goes on from that checkpoint, on as many ranks as before, and
# fails again, after seven steps.

# %%
with lab.attempt("A rank that raises", reference="rank raises"):
    fleet.need(crashed)
    print(crashed["rank raises"].metrics["message"])

# %% [markdown]
# Every rank says where it was and why it stopped, the first cause first, and what there is to go on from.
# The checkpoint is written by rank 0 beside the old one and then moved into its place, so that there is always one that
# is whole.
#
# Now there are fewer ranks: of two, one. It takes the whole batch by itself, twice as many micro-batches as before, so
# that the *global* batch stays what it was, and the losses should go on as if nothing had happened.

# %%
with lab.attempt("Going on with fewer ranks", reference="resumed on fewer ranks"):
    fleet.need(crashed)
    resumed = fleet.well(crashed["resumed on fewer ranks"])
    curves = fleet.loss_curves(alone.get("one process, same batch"), resumed)
    fig, ax = plt.subplots()
    plots.curves(ax, curves, "optimizer step", "loss")
    ax.set_ylim(*fleet.around(curves))
    plt.show()

# %% [markdown]
# What a killed process can't clear away itself, its DataLoader workers, its temporary files and what it had in
# `/dev/shm`, was found by a mark in its environment and removed: *left behind* in the run's record counts them.
#
# **Takeaway.** Assume that a rank dies: checkpoints that are whole whenever you look, a time limit on waiting, a
# launcher that says who was first. And a checkpoint that knows nothing of ranks lets you go on with however many are
# left.

# %% [markdown]
# ## Exercises
#
# They rise in difficulty. Each check says what it found. The last one measures: first whether your results are the same,
# then the time, in turns with the version given, for as many rounds as the decision takes.

# %%
from labutils.exercises import faster_than, solved

# %% [markdown]
# **1.** A model has 860 million parameters, gradients in float32, and each of 2 GPUs computes for 600 ms a step, 400 of
# them in the backward pass. The link's bus bandwidth is 12.5 GB/s (100 GbE). Could a perfect overlap hide the
# all-reduce? Answer with its milliseconds.

# %% tags=["exercise"]
my_milliseconds = None  # your number


def check_milliseconds(answer) -> str:
    if answer is None:
        return "Exercise 1: set my_milliseconds first."
    expected = 860e6 * 4 * (2 * (2 - 1) / 2) / 12.5e9 * 1e3
    if abs(answer - expected) < 0.02 * expected:
        return "Exercise 1: right: 275 ms, less than the backward pass: a perfect overlap would hide all but the end."
    return "Exercise 1: not yet. Bytes of all gradients, times 2 (N - 1) / N, over the bus bandwidth."


print(check_milliseconds(my_milliseconds))

# %% tags=["solution"]
my_milliseconds = 860e6 * 4 / 12.5e9 * 1e3
solved(check_milliseconds(my_milliseconds))

# %% [markdown]
# **2.** Gradients arrive evenly over a backward pass of 100 ms, ten of 20 MiB each, the first after 10 ms. A message of
# 20 MiB takes 5 ms. How many milliseconds are exposed with a bucket for each? And with one bucket for all (50 ms)?
# Answer with a pair.

# %% tags=["exercise"]
my_pair = None  # two numbers, for example (1, 2)


def check_pair(answer) -> str:
    if answer is None:
        return "Exercise 2: set my_pair first."
    if tuple(answer) == (5, 50):
        return "Exercise 2: right: each is gone before the next arrives, but for the last."
    return "Exercise 2: not yet. When is the last gradient there, and what is then still to be sent?"


print(check_pair(my_pair))

# %% tags=["solution"]
my_pair = (5, 50)
solved(check_pair(my_pair))

# %% [markdown]
# **3.** A run on 8 ranks has `micro_batch=2, accumulation=8`. Two GPUs fail. On how many ranks can it go on with the
# same global batch and the same losses? Answer with the set of all numbers of 6 or less that do.

# %% tags=["exercise"]
my_ranks = None  # a set, for example {6, 3}


def check_ranks(answer) -> str:
    if answer is None:
        return "Exercise 3: set my_ranks first."
    if set(answer) == {1, 2, 4}:
        return "Exercise 3: right: 8 micro-batches can be shared by 4, 2 or 1. Six would be uneven."
    return "Exercise 3: not yet. Each rank takes as many of the 8 micro-batches as the others."


print(check_ranks(my_ranks))

# %% tags=["solution"]
my_ranks = {1, 2, 4}
solved(check_ranks(my_ranks))

# %% [markdown]
# **4. Make it faster.** Two ranks each have the gradients of four micro-batches. `over_a_slow_link` gives the mean of both
# ranks' tensors, and takes its time: it is all latency. The loop averages after each micro-batch and adds up. Get the
# same gradient in half the time.


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


# %% tags=["solution"]
def synchronised_once_solution(mine, theirs):  # what no_sync does
    return over_a_slow_link(mine.sum(0), theirs.sum(0))


solved(faster_than(4, synchronised_each, synchronised_once_solution, two_ranks_gradients, times=2))

# %% [markdown]
# ## What you did
# - You showed that several processes compute what one does.
# - You foretold steps from one process's gradients and a link's bandwidth, and checked them.
# - You saw in traces what of communication was hidden, and what was not.
# - You weighed DDP against FSDP, by time and by memory, and used `no_sync` and bucket sizes.
# - You found out what the article's variables and flags change, on your machine.
# - You lost a rank twice, and went on with one.

# %%
lab.done(
    {
        "bus bandwidth of a large all-reduce": fleet.metric_of(alone, "all-reduce", "bus_gb_per_s"),
        "efficiency of DDP for LoRA": fleet.metric_of(together, f"ddp {count}", "efficiency", 100),
        "exposed communication, all weights": fleet.metric_of(
            together, f"full ddp {count}", "exposed_communication_share", 100
        ),
        "64 MiB without P2P, slower by": fleet.slower(trials, "nccl NCCL_P2P_DISABLE=1"),
        "steps that the checkpoint holds": fleet.metric_of(crashed, "rank killed", "checkpoint_step"),
    }
)
