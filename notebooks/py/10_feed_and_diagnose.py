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
# # Lab 10 · Feed and diagnose
#
# Article A4 also advises on what feeds a training: storage, decoding, caches, threads. You time what a file costs, and say by a
# formula when that matters. Then you diagnose a script, and test what the diagnosis promised.
#
# **After this lab you can**
# - time reading and decoding apart, and choose a format;
# - keep a dataset as a memory map;
# - say from two numbers whether a faster decoder, a cache or more workers would shorten your step;
# - keep processes from getting in each other's way;
# - have a trace tell which fix to try first, and test its prediction.
#
# | scale | needs | time |
# |---|---|---|
# | `tiny` | any CPU | 1 minute |
# | `small` | a GPU of 8 GB | 3 minutes |
# | `full` | a GPU of 40 GB | 4 minutes |
#
# Without a GPU, nvJPEG and CUDA's variables are left out. Numbers in the text are *the recorded H200*'s; *ours* is an H100's, by an
# older edition with other workers, and another model in section 4. Both machines were unsteady: the same loop differs by up to a
# third. Where a change is larger than that, trust its direction, not its size.

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
rounds: int = 0  # times round the forms of section 3; 0: 2 at tiny, 8 at larger scales

# %%
from labutils.course.lab import open_lab

lab = open_lab("10", globals())

# %%
import inspect
import io
import os
import subprocess
import sys
import time
import uuid
import warnings
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from labutils.course import plots
from labutils.data import images
from labutils.labs.lab10_image_input import FormDataset, decoded, decoding, pictures
from labutils.profiling import cuda
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe, Unavailable
from labutils.results.effects import effect
from labutils.results.records import Run, reference_runs, summarise
from labutils.tools import ablations
from labutils.tools.diagnose import diagnose, report
from labutils.tools.diagnose.script import Stages, watch
from labutils.training import Benchmark, Trainer

# %%
plots.use_style()
warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
on_gpu, tiny = lab.device == "cuda", lab.scale == "tiny"
torch.set_num_threads(1 if on_gpu else max(1, usable_cores() // 2))  # 1: as in a worker
sd = lab.workload("sd15-lora")
by_form = {form: pictures(sd, 8 if tiny else 32, form) for form in ("PNG", "JPEG", "WebP")}
files, side = by_form["PNG"], sd.size.resolution
folder = lab.cache_dir / "lab-10"
folder.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1 · From file to pixels
#
# **Question.** How long does one core take to turn a file into pixels, and how does that depend on the format?
#
# **Technique.** A picture of 1080 × 1080 pixels is saved in three formats, then decoded with the clock running. PNG loses nothing.
# JPEG and WebP drop what the eye hardly sees; *off* is the mean error.
#
# **Your prediction:** how many times as long does a PNG take as a JPEG?

# %%
my_formats: float | None = None  # for example 2

lab.predict("PNG against JPEG, one core", my_formats, "x")


# %%
def saved(image, **codec):
    buffer = io.BytesIO()
    image.save(buffer, **codec)
    return buffer.getvalue()


def to_pixels(content):
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def ms(function, *inputs):
    began = time.perf_counter()
    function(*inputs)
    return 1e3 * (time.perf_counter() - began)


picture = Image.open(files[0]).convert("RGB")
for form in ("PNG", "JPEG", "WEBP"):
    content = saved(picture, format=form, quality=90)  # which PNG takes no notice of
    off = np.abs(to_pixels(content).astype(int) - np.asarray(picture)).mean()
    took = median(ms(to_pixels, content) for _ in range(3))
    print(f"{form}: {len(content) / 1e6:.2f} MB, {took:.1f} ms, {off:.2f} of 255 off")
assert (to_pixels(files[0].read_bytes()) == decoded(files[0].read_bytes())).all()

# %% [markdown]
# Equal quality numbers aren't equal loss: compare *off*. Now all pictures.

# %%
decodes_here = uuid.uuid4().hex[:12]


def kept_as_one(runs):
    """Runs of one comparison: file by file."""
    for run in runs:
        run.comparison = decodes_here
    return lab.keep(runs)


decodes = kept_as_one([decoding(form, those, decoded) for form, those in by_form.items()])

# %% [markdown]
# A GPU decodes JPEG too, by the library nvJPEG. torchvision and NVIDIA's DALI call it. Neither decodes PNG, article A1's format, on
# the GPU.

# %%
with lab.attempt("JPEG decoded by the GPU", experiment="decode", format="JPEG", on_gpu=True):
    from torchvision.io import ImageReadMode, decode_jpeg

    def by_nvjpeg(content):
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return decode_jpeg(data, mode=ImageReadMode.RGB, device="cuda")

    decodes += kept_as_one(
        [
            decoding("JPEG", by_form["JPEG"], by_nvjpeg, on_gpu=True),
            decoding("JPEG", by_form["JPEG"], decoded, again=True),  # how steady is the machine?
        ]
    )

# %%
with lab.attempt("decoded and resized by DALI"):
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=8, num_threads=2, device_id=0)
    def training_images(names):
        contents, _ = fn.readers.file(files=names)
        return fn.resize(fn.decoders.image(contents, device="mixed"), size=(side, side))

    pipeline = training_images([str(file) for file in by_form["JPEG"]])
    pipeline.build()
    pipeline.run()
    took = ms(lambda: [pipeline.run() for _ in range(40)])  # some batches are made ahead
    print(f"{took / 320:.2f} ms a picture")

# %%
columns = {"run": "format", "mb": "MB a file"}
columns |= {"read_ms": "ms to read", "decode_ms": "ms to decode", "cpu_ms": "of it CPU time"}
lab.show(decodes, columns, experiment="decode")

# %% [markdown]
# A PNG took one core 9.1 times as long as a JPEG: 42.7 and 4.7 ms. WebP's files are half as large as JPEG's, and took 2.2 times as
# long. The GPU decoded a JPEG in 0.7 ms. In that time the CPU waits, busy: even so the GPU spares it 4 of 4.7 ms. Reading a cached
# file took about 1 % of a core's decoding, or less. These pictures are drawn: photographs may take other sizes and times.
#
# **Takeaway.** Where pictures may lose a little, JPEG is the fastest of the three to decode.

# %% [markdown]
# ## 2 · Page cache and memory map
#
# **Question.** Where a file isn't cached yet, how much of its reading and decoding would a faster disk save? And how do you keep
# pictures so that nothing is decoded?
#
# **Technique.** A file that was read once stays in the *page cache*, memory of the operating system. `posix_fadvise` asks it to
# forget. Reading then takes longer, by as much as a faster disk can save at most.


# %%
def forget(file):
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # what isn't written yet can't be forgotten
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


with lab.attempt("forgetting files"):
    for form, run in zip(("PNG", "JPEG"), decodes, strict=False):
        for file in by_form[form]:
            forget(file)
        cold, warm = (median(ms(file.read_bytes) for file in by_form[form]) for _ in range(2))
        decode = run.metric("decode_ms")
        print(
            f"{form}: {cold:.2f} ms from the disk, {warm:.2f} from memory, {decode:.1f} to decode"
        )
        print(f"   a faster disk saves at most {(cold - warm) / (cold + decode):.0%}")

# %% [markdown]
# A faster disk would save at most 2 %, of PNG and of JPEG: for a PNG the disk adds 0.8 ms, and decoding takes 42.7. A disk with a
# cache of its own, or a system that declines to forget, makes this percentage too small. Slow storage, the article's case, wasn't
# tested. By the same formula: at 100 MB/s a PNG of 1.25 MB takes 12.5 ms to read, of 55 in all. There a faster disk could save 22
# %.
#
# A *memory map* is a file that is addressed like memory. Here it holds pixels, decoded and resized once. The system loads a page
# when it is read.

# %%
shape = (len(files), side, side, 3)
pixels = np.lib.format.open_memmap(folder / "train.npy", "w+", np.uint8, shape)
for row, file in zip(pixels, files, strict=True):
    row[:] = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
pixels.flush()


class Mapped(Dataset):
    def __init__(self, file):
        self.pixels = np.load(file, mmap_mode="r")

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, place):
        pixels = np.array(self.pixels[place])  # here its pages are read
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


# %%
mapped, order = Mapped(folder / "train.npy"), np.random.default_rng(0).permutation(len(files))
example = median(ms(mapped.__getitem__, place) for place in order)
batch = next(iter(DataLoader(mapped, batch_size=2)))
torch.testing.assert_close(batch[0], FormDataset(files, sd)[0]["pixel_values"])
print(f"{mapped.pixels.nbytes / 1e6:.1f} MB; an example from memory: {example:.2f} ms")

# %% [markdown]
# A mapped example took 0.85 ms: nothing is decoded or resized any more. From the disk, and larger than memory, the map wasn't
# timed. Making it costs an epoch's decoding and resizing, once. It has 0.79 MB a picture, as pictures of 512 × 512 pixels do in any
# map; PNG and JPEG are of 1080 × 1080.
#
# Forked workers share `Mapped`'s pages. macOS, Windows and Python 3.14 don't fork by default: there workers get a pickle, which
# copies the map, and needs a class from a file. There put this into a `.py` file:
#
# ```python
# class Mapped(Dataset):
#     def __init__(self, file):
#         self.file, self.pixels = file, None
#         self.size = len(np.load(file, mmap_mode="r"))
#
#     def __len__(self):
#         return self.size
#
#     def __getitem__(self, place):
#         if self.pixels is None:  # each worker opens it
#             self.pixels = np.load(self.file, mmap_mode="r")
#         ...  # as above
# ```
#
# Don't read from it before workers start: their pickle would hold the map again.
#
# For random crops map larger pictures, and crop in `__getitem__`.
#
# **Takeaway.** On a local disk decoding takes the time, not reading. A memory map removes it.

# %% [markdown]
# ## 3 · When the format matters
#
# **Question.** When does a faster decoder, a cache or another worker shorten the step?
#
# **Technique.** Lab 03's formula. A micro-batch takes $r$ to make and $c$ to train on. Without workers a micro-step takes about
# $r + c$, less if the GPU computes while the host decodes. With $w$ workers it takes at least $\max(c, r / w)$. A faster decoder
# and a cache lower $r$. Another worker raises $w$. Nothing here lowers $c$.


# %%
def promised_ms(r, c, workers=0):
    return r + c if workers == 0 else max(c, r / workers)


for r in (160, 40, 4):
    print(f"r = {r}, c = 100: {[promised_ms(r, 100, workers) for workers in (0, 1, 2, 4)]} ms")

# %% [markdown]
# Both numbers are measured apart, before any loop runs: $r$ by asking the loader alone, $c$ by training on one batch again and
# again. Stable Diffusion, with its encoders, takes four pictures a step (`tiny`: one).

# %%
loop = Recipe(driver="eager", logging="ring-buffer", micro_batch=1 if tiny else 4, accumulation=1)
small_jpegs = [folder / f"{place}.jpeg" for place in range(len(files))]
for pixels, file in zip(mapped.pixels, small_jpegs, strict=True):
    Image.fromarray(pixels).save(file, quality=90)
kept = {"PNG": files, "JPEG": by_form["JPEG"], "resized JPEG": small_jpegs}
kept |= {"memory map": mapped.pixels, "in memory": np.array(mapped.pixels)}
sets = {form: FormDataset(those, sd) for form, those in kept.items()}
print(inspect.getsource(FormDataset.__getitem__))  # preprocess: the steps of the next cell


# %% [markdown]
# What does one core do for a picture? Form by form in turns, so that a slow moment is slow for all:

# %%
def taken_apart(one):
    """ms to read, decode, resize, and make a tensor of one picture."""
    clock = [time.perf_counter()]

    def passed(result):
        clock.append(time.perf_counter())
        return result

    content = passed(one.read_bytes() if isinstance(one, os.PathLike) else one)
    pixels = passed(decoded(content) if isinstance(content, bytes) else content)
    image = passed(images.random_crop(images.resize(Image.fromarray(pixels), side), side))
    passed(images.normalize(images.to_tensor(image)))
    return 1e3 * np.diff(clock)


apart = {form: [] for form in kept if form != "in memory"}
for place in range(len(files)):
    for form, times in apart.items():
        times.append(taken_apart(kept[form][place]))
parts = pd.DataFrame({form: np.median(times, axis=0) for form, times in apart.items()}).T
parts.columns = ("read", "decode", "resize", "to a tensor")
lab.table(parts.assign(together=parts.sum(axis=1)).rename_axis("a picture, ms").reset_index())

# %%
loaders = {
    form: DataLoader(one, loop.micro_batch, collate_fn=images.collate) for form, one in sets.items()
}
r = {}
for form, loader in loaders.items():
    batches = iter(loader)
    r[form] = median(ms(next, batches) for _ in range(len(loader)))

with Trainer(sd, loop, dataset=lambda model, recipe: sets["in memory"]) as trainer:
    batch = next(iter(loaders["in memory"]))

    def step():
        trainer.step(iter([batch]))  # copies it to the GPU, too
        cuda.synchronize()

    c = median([ms(step) for _ in range(10)][2:])
print("r:", {form: f"{one:.1f} ms" for form, one in r.items()}, f"c: {c:.1f} ms")

# %% [markdown]
# **Measurement.** Now train. Without workers pictures come from PNG, JPEG, the map or memory; with one or two workers from PNG,
# with one from JPEG. A worker keeps one batch ready.
#
# **Your prediction:** by how many percent does the memory map shorten the step, against PNG without workers?

# %%
my_map: float | None = None  # for example 50

lab.predict("the memory map shortens the step by", my_map, "%")

# %%
beside = loop.but(num_workers=1, persistent_workers=True, prefetch_factor=1)
ways = {form: (loop, form) for form in kept}  # the first is measured again
ways |= {f"{form}, workers 1": (beside, form) for form in ("JPEG", "PNG")}
ways["PNG, workers 2"] = (beside.but(num_workers=2), "PNG")


def tags_of(recipe, form):
    told = {"format": "resized", "in_memory": True} if form == "in memory" else {"format": form}
    workers = {"workers": recipe.num_workers} if recipe.num_workers else {}
    return {"experiment": "image input"} | told | workers


# %%
made = []  # the dataset of the loop that is being built
with Benchmark(sd, warmup=1, dataset=lambda model, recipe: made[-1]) as bench:
    for name, (recipe, form) in ways.items():
        made.append(sets[form])
        bench.prepare({name: recipe})
    tags = {name: tags_of(*way) for name, way in ways.items()}
    recipes = {name: recipe for name, (recipe, _) in ways.items()}
    trained = lab.keep(bench.compare(recipes, 3, rounds or None, tags))  # in turns, by rounds

# %%
columns = {
    "run": "form",
    "step_ms": "step, ms",
    "floor_ms": "floor, ms",
    "data_ms": "of it waiting, ms",
}
lab.show(trained, columns | {"speed-up": "speed-up"}, experiment="image input")
lab.verdict("A4.data.gpu-decoding", "A4.data.cache")

# %%
with lab.attempt("the formula beside what was measured"):
    rows, points = [], {0: {}, 1: {}, 2: {}}
    for name, run in trained.items():
        recipe, form = ways[name.removesuffix(" again")]
        promised, workers = promised_ms(r[form], c, recipe.num_workers), recipe.num_workers
        row = {"": name, "by the formula, ms": promised, "measured, ms": run.metric("step_ms")}
        rows.append(row | {"longer by, %": 100 * (run.metric("step_ms") / promised - 1)})
        spread = tuple(run.metrics["step_ms"][part] for part in ("p10", "median", "p90"))
        if not name.endswith(" again"):
            points[workers][form] = (r[form], spread)
    lab.table(pd.DataFrame(rows))
    reads = np.linspace(0, 1.15 * r["PNG"], 100)
    lines = {w: {read: promised_ms(read, c, w) for read in reads} for w in points}
    fig, ax = plt.subplots(figsize=(7.4, 4.2))
    plots.over_decoding(ax, lines, points, "r: ms that one core takes to make a micro-batch")
    plt.show()

# %% [markdown]
# Large differences come as the formula says. Without workers JPEG helps, the map helps more, and two workers on PNG do about as
# well as the map. With one worker JPEG is hidden, PNG is not: 89 is less than $c$, and 224.5 more. On the map a worker would save 9
# ms at most, for $c$ is left. Where promises are near each other they don't tell the order: PNG with one worker was promised 225,
# JPEG without workers 238, and measured they are the other way round.
#
# By rounds the map shortened the step by 61 %, JPEG by 38. Two workers shortened it by 57 %, one by 27, which the noise can hide.
# *Speed-up* is the median of ratios, round by round, so it differs a little from the ratio of two medians.
#
# Every step took longer than promised, by 9 to 45 %, for neither number stays the same:
#
# - $r$: alone 224 ms, in PNG's loop 263, in *again* 343. One worker's step, 296 ms, lies between these two.
# - $c$: alone 149 ms. *Step* less *waiting* is 155 to 174 in the loops without workers, 180 to 185 with them. So workers, which
#   share the host's cores and memory, seem to lengthen $c$. Something else does, too: *again* has no workers, and 197 ms.
#
# *PNG, again* is the first loop repeated, in the same rounds, and took a quarter longer, 7 to 34 % by its interval. So by the
# course's rule the machine is *unsteady*, and verdicts on a time are *inconclusive* in this lab. Each says whether the change is
# larger than the noise: then its direction is clear, its size isn't. The figure's bars are the 10th to the 90th percentile; *again*
# isn't drawn.
#
# Why does JPEG save less than the map?
#
# | a picture, ms | $r$ / 4 | decoding | the rest |
# |---|---|---|---|
# | PNG | 56.1 | 42.7 | 13.4 |
# | JPEG | 22.3 | 4.7 | 17.6 |
# | memory map | 2.3 | none | 2.3 |
#
# A faster decoder can't remove the rest. Resizing belongs to it: by itself, at another moment, it took 26.9 ms, more than the whole
# rest, so we can't tell its share. The map's pictures go through the same code (`FormDataset`), but needn't be resized. JPEGs saved
# at 512 × 512 needn't either, and are smaller than the map: we didn't time them.
#
# By the formula you need at least $r / c$ workers: here 224 / 149, so two. If $r / c$ is more than your cores, also decode and
# resize once. What is left is $c$, here ten times the *floor*, the least time for the arithmetic: lab 04 lowers it.
#
# **Takeaway.** Measure $r$ and $c$. Without workers all that lowers $r$ shortens the step. Once workers hide the wait, only a
# smaller $c$ does.

# %% [markdown]
# ## 4 · Switches in the environment
#
# **Question.** The article sets `OMP_NUM_THREADS`, which "prevents oversubscription". What happens without it?
#
# **Technique.** PyTorch's operations on a CPU use up to as many threads as there are cores. Eight processes may then start many
# more threads than cores, which compete: *oversubscription*. DataLoader sets PyTorch to one thread in its workers. Processes that
# you start yourself keep all of theirs.

# %%
RESIZER = """
import sys, time, torch, torch.nn.functional as F
image = torch.rand(1, 3, 1080, 1080)
resize = lambda: F.interpolate(image, size=(512, 512), mode="bicubic", antialias=True)
resize()
print(torch.get_num_threads(), flush=True)
for go in sys.stdin:
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < float(go):
        resize()
        count += 1
    print(count / passed, flush=True)
"""


# %%
def started(code, count, **variables):
    """Processes that each wait for lines; None takes a variable out."""
    given = {name: value for name, value in (os.environ | variables).items() if value is not None}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": given}
    return [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(count)]


def answers(processes, line=None):
    """What all answer to a line, or say at the start: one number each."""
    for process in processes if line else ():
        process.stdin.write(f"{line}\n"), process.stdin.flush()
    return [float(process.stdout.readline()) for process in processes]


def in_rounds(experiment, tag, metric, groups, visit, rounds):
    """Visit groups of processes in turns, the first twice in each round: runs of one comparison."""
    samples = {name: [] for name in (*groups, "again")}
    for _ in range(rounds):
        for name, found in samples.items():
            found.append(visit(groups.get(name) or next(iter(groups.values()))))
    comparison, first = uuid.uuid4().hex[:12], next(iter(groups))
    for name, found in samples.items():
        again = {"again": True} if name == "again" else {}
        tags = {"experiment": experiment, tag: first if again else name} | again
        run = Run("10", f"{experiment} {name}", tags=tags)
        run.comparison, run.samples = comparison, {metric: found, "round": list(range(rounds))}
        run.metrics[metric] = summarise(found)
        print(f"{experiment} {name}: {median(found):.4g} ({min(found):.4g} to {max(found):.4g})")
        lab.keep(run)
    for process in (process for group in groups.values() for process in group):
        process.communicate()


# %%
processes = min(usable_cores(), 8)
shares = {"one each": "1", "shared out": str(usable_cores() // processes), "as they come": None}
groups = {
    name: started(RESIZER, processes, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    for name, threads in shares.items()
}
alone = started(RESIZER, 1, OMP_NUM_THREADS=None, MKL_NUM_THREADS=None)
print("threads:", {name: int(sum(answers(group))) for name, group in groups.items()})
all_threads, seconds = answers(alone)[0], 0.2 if tiny else 0.3
print(f"one process, {all_threads:.0f} threads: {answers(alone, seconds)[0]:.0f} images/s")
alone[0].communicate()
visit = lambda group: sum(answers(group, seconds))
in_rounds("threads", "threads", "images_per_s", groups, visit, rounds=3 if tiny else 16)
lab.verdict("A4.environment.threads")

# %% [markdown]
# Eight processes that take all threads they can, 128 on 16 cores, resized some 68 images a second: an eighth of what one process
# alone did, 580. With one thread each they resized 488. But then half of the cores had no thread. With two threads each, one for
# each core, they resized 730. Where between 16 threads and 128 the fall begins wasn't tested.
#
# **Question.** What do CUDA's two variables do, and what does the first cost?
#
# **Technique.** `CUDA_LAUNCH_BLOCKING=1` makes the host wait for every kernel. An error then names the line that caused it.
# `CUDA_VISIBLE_DEVICES` hides GPUs. Both are read once, when a process first uses CUDA, so each value has a process of its own. The
# step is a forward and a backward pass of a transformer of BERT's size, on 128 tokens: many short kernels.

# %%
PASSES = """
import sys, time, torch
to = {"device": "cuda", "dtype": torch.bfloat16}
layer = torch.nn.TransformerEncoderLayer(768, 12, batch_first=True, norm_first=True, **to)
network = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
tokens = torch.randn(1, 128, 768, **to)
def step_ms():
    torch.cuda.synchronize()
    began = time.perf_counter()
    network(tokens).square().mean().backward()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)
print(min(step_ms() for step in range(10)), flush=True)
for steps in sys.stdin:
    print(sorted(step_ms() for step in range(int(steps)))[int(steps) // 2], flush=True)
"""


# %%
with lab.attempt("CUDA's variables", experiment="launches", launches="block"):
    if not on_gpu:
        raise Unavailable("there is no GPU whose launches could overlap")
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    counting = [
        subprocess.Popen(
            count, env=os.environ | {"CUDA_VISIBLE_DEVICES": devices}, stdout=subprocess.PIPE
        )
        for devices in ("", "0")
    ]
    seen = [int(process.communicate()[0]) for process in counting]
    found = {"as_asked": int(seen == [0, 1])}
    lab.keep(Run("10", "visible devices", metrics=found, tags={"experiment": "visible devices"}))
    groups = {
        "overlap": started(PASSES, 1, CUDA_LAUNCH_BLOCKING="0"),
        "block": started(PASSES, 1, CUDA_LAUNCH_BLOCKING="1"),
    }
    for group in groups.values():
        answers(group)  # they have chosen their kernels
    visit = lambda group: answers(group, 9)[0]  # the median of 9 steps
    in_rounds("launches", "launches", "step_ms", groups, visit, rounds=40)
lab.verdict("A4.environment.launch-blocking", "A4.environment.visible-devices")

# %% [markdown]
# `CUDA_LAUNCH_BLOCKING=1` made the step 45 % longer, 21.8 ms for 15.0: launching and computing no longer overlap, and each launch
# ends in a wait. Kernels here are short; long ones should lose less. An empty `CUDA_VISIBLE_DEVICES` hid all GPUs. That `0` showed
# one means nothing on a machine that has one.
#
# **Takeaway.** One thread for each core, over all processes, was best of what we tried. Unset `CUDA_LAUNCH_BLOCKING` before you
# measure anything.

# %% [markdown]
# ## 5 · Diagnose a script
#
# **Question.** You have a script that is too slow. Can one look tell which change pays?
#
# **Technique.** Here is one that knows nothing of this course.

# %%
SCRIPT = """
import sys, time, numpy as np, torch
from pathlib import Path
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    files, pixels = sorted(Path("FOLDER").glob("*.png")), None
    def __init__(self, mapped):
        if mapped:
            np.save("FOLDER/small.npy", np.stack([self.made(n) for n in range(len(self.files))]))
            self.pixels = np.load("FOLDER/small.npy", mmap_mode="r")
    def made(self, n):
        return np.array(Image.open(self.files[n]).convert("RGB").resize((128, 128)))
    def __len__(self):
        return 4096
    def __getitem__(self, place):
        n = place % len(self.files)
        one = self.made(n) if self.pixels is None else np.array(self.pixels[n])
        return torch.from_numpy(one).permute(2, 0, 1) / 127.5 - 1
def ms_a_step(data, workers):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = max(18, 6 * workers) if data.pixels is None or device == "cpu" else 600
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.SiLU(), nn.Conv2d(32, 3, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ends = []
    for _, images in zip(range(steps), DataLoader(data, 2, num_workers=workers)):
        loss = model(images.to(device)).square().mean()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        loss.item()  # for the log
        ends.append(time.perf_counter())
    return 1e3 * (ends[-1] - ends[steps // 3 - 1]) / (steps - steps // 3)
if __name__ == "__main__":
    for how in sys.argv[1:] or ["0"]:
        ms = ms_a_step(Pictures(how == "map"), 0 if how == "map" else int(how))
        print(f"{ms:.1f} ms a step")
"""

# %% [markdown]
# `labutils diagnose -- python train.py` runs it for some twenty steps, and times and traces some of them. It replays the traced
# step with one thing changed, for example without the wait for data, and ranks what that saves. For workers this is section 3's
# formula: $r$ is the wait for data, $c$ the rest of the step.

# %%
script = folder / "train.py"
script.write_text(SCRIPT.replace("FOLDER", str(files[0].parent)))
watched = watch([sys.executable, str(script)], Stages(warmup=2, timed=6, profiled=2))
diagnosis = diagnose(watched.evidence)
print(report.text(diagnosis))

# %% [markdown]
# The traced step, and section 3's formula by hand, with the wait as $r$:

# %%
evidence = watched.evidence
fig, ax = plt.subplots(figsize=(7.4, 2.4))
plots.timeline(ax, evidence.timeline)
plt.show()
waits = evidence.data_ms
for w in (0, 1, 2, 4, 8, 16):
    print(f"{w} workers: {promised_ms(waits, evidence.step_ms - waits, w):.1f} ms a step")

# %% [markdown]
# **Your prediction:** the script gets the workers that the diagnosis proposes. How many milliseconds does its step really take?

# %%
my_script: float | None = None  # for example 50

lab.predict("the script's step with workers", my_script, "ms")

# %%
fix = diagnosis.fix("workers")
workers, promised = (fix.changes["num_workers"], fix.gain) if fix else (1, 0.0)
counts = [workers] if tiny else sorted({max(1, workers // 4), max(1, workers // 2), workers})
turns = [0, *counts, "map"]
told = [
    subprocess.check_output([sys.executable, str(script), *map(str, turns)], text=True)
    for _ in range(1 if tiny else 2)  # so that a slow moment is slow for all
]
times = pd.DataFrame([[float(line.split()[0]) for line in one.splitlines()] for one in told])
times.columns = pd.Index(turns, name="workers")
lab.table(times.T.add_prefix("ms a step, turn ").reset_index())
measured = median(1 - times[workers] / times[0])
found = {"predicted": promised, "measured": measured}
lab.keep(Run("10", "train.py", metrics=found, tags={"experiment": "script", "fix": "workers"}))
print(f"{workers} workers save: predicted {promised:.0%}, measured {measured:.0%}")

# %% [markdown]
# One look found a change that pays: 16 workers saved 92 % of the step, where 94 % were promised. But so near to 100 % a percentage
# hides much. The promised step takes 6.1 ms; both measured ones took 9.5, 56 % longer. A third of that is $r$ again: these turns'
# own $r / w$ is 7.0 and 7.2. The rest we can't explain: sixteen workers and the loop have sixteen cores.
#
# More workers than cores won't help. So lower $r$ instead: from a map, without a worker, the step took 1.5 and 1.6 ms. The tool
# doesn't propose a map. $r$ and $c$ do.
#
# **Question.** Does the predicted order hold on a real training loop?
#
# **Measurement.** On record are loops of the course: *SD1.5*, article A1's stock script, with four micro-batches of one image;
# LLaVA; Qwen3. Each was diagnosed, then each fix alternated with the unchanged loop (`labutils/tools/ablations.py`). These records
# are of 23 and 26 November, on other machines. The H100's predictions were calculated afterwards, from times of the rounds in which
# the fixes were measured. We chose the fixes before measuring. *Measured* is the rounds' median, with the least and the most, in
# percent of the step saved; for *padding*, of the time per useful token. *Capture* changes three things at once. *Step off by* −20
# %: the predicted step is 20 % shorter than the measured one.

# %%
ours = reference_runs("10").select(experiment="diagnosis")
lab.table(ablations.fix_table({f"{run.tags['script']}, {run.machine['gpu']}": run for run in ours}))

# %% [markdown]
# In SD1.5's loop capture and batch size saved more than caching and workers, as ranked, on both GPUs. On the H100 caching and
# workers changed places, within their ranges. LLaVA's order holds, and Qwen3's in 16 bits: checkpointing changes no tokens, so its
# 29 % are of a useful token, too. Qwen3 in float32 doesn't let us judge: a range is too wide. Predicted steps are off by −20 to +17
# %; that of *precision* by +32 %. Gains don't add up: the first four predictions sum to 185 %.
#
# **Takeaway.** On the H200, whose predictions came first, the fix ranked first was the best of two to four in three loops of four.
# In the fourth a range is too wide. The tool didn't propose the map: so also calculate with $r$ and $c$, change one thing, measure
# again.

# %% [markdown]
# ## Exercises
#
# Each cell checks itself. `lab.solution("10.1")` shows how the first is solved.

# %%
from labutils.course.exercises import check, faster_than

# %% [markdown]
# **1.** Micro-batches are of one example. One core takes 40 ms to make it, training on it takes 25 ms, and you have 4 workers on 16
# cores. How many percent of a micro-step would you save if making the example took half as long?

# %% tags=["exercise"]
my_saving = None  # percent
print(check("10.1", my_saving))

# %% [markdown]
# **2. Decode once.** `by_file` makes an epoch from PNG files. Fill in `prepared`, and call it once with `folder / "exercise.npy"`.
# Then fill in `by_map`: the same tensors, at least ten times as fast. Keep the pixels in a memory map.

# %% tags=["exercise"]
to_tensor = lambda pixels: torch.from_numpy(np.array(pixels)).permute(2, 0, 1) / 127.5 - 1
resized = lambda file: Image.open(file).convert("RGB").resize((64, 64))


def by_file(seed):
    order = np.random.default_rng(seed).permutation(3)
    return torch.stack([to_tensor(resized(files[place])) for place in order])


def prepared(file):
    """Writes the map, and opens it for reading."""


def by_map(seed):
    return by_file(seed)  # your code instead


print(faster_than(2, by_file, by_map, lambda seed: (seed,), times=10))

# %% [markdown]
# **3. Decode less.** A JPEG's decoder can return a picture at a half, a quarter or an eighth of its size, for less work.
# `Image.draft` asks it to, before the pixels are read. Fill in `drafted`: the pixels of `whole` within 5 %, three times as fast.

# %% tags=["exercise"]
jpegs = by_form["JPEG"][:4]


def whole(seed):
    small = [Image.open(file).convert("RGB").resize((64, 64)) for file in jpegs]
    return torch.stack([torch.from_numpy(np.array(image)).float() for image in small])


def drafted(seed):
    return whole(seed)  # your code instead


print(faster_than(3, whole, drafted, lambda seed: (seed,), times=3, tolerance=0.05))

# %% [markdown]
# ## What to read on
# - Mohan and others: *[Analyzing and Mitigating Data Stalls in DNN Training](https://arxiv.org/abs/2007.06775)*, 2021.
# - Murray and others: *[tf.data: A Machine Learning Data Processing Framework](https://arxiv.org/abs/2101.12127)*, 2021.
# - NVIDIA: [DALI](https://docs.nvidia.com/deeplearning/dali/user-guide/docs/). PyTorch: [torchvision's
#   decoders](https://docs.pytorch.org/vision/stable/io.html), [performance tuning
#   guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
# - [The same advice in TensorFlow](optional/tensorflow_equivalents.ipynb), an optional page.
# - Other tools that article A4 names: Nsight Systems (`nsys profile python train.py`), `perf`, `top` and `iostat`.
# - The course's [glossary](../docs/glossary.md).
#
# Next: lab 11, many GPUs.


# %%
def truths(decode, feed):
    png, jpeg, *_ = decode
    fed = {r.tags["format"]: r for r in feed if r.tags.keys() == {"experiment", "format"} and r.ok}
    both = [fed[form] for form in ("PNG", "memory map") if form in fed]
    return {
        "PNG against JPEG, one core": png.metric("decode_ms") / jpeg.metric("decode_ms"),
        "the memory map shortens the step by": 100 * (1 - effect(*both).value)
        if len(both) == 2
        else None,
        "the script's step with workers": median(times[workers]),
    }


lab.done(truths(decodes, trained.values()))
