"""Training on images that are kept in different forms: what decoding costs the step.

pictures = Pictures(workload, 32)
runs     = trained_from(pictures, {("PNG", 0): recipe, ("PNG", 4): other}, steps, rounds)
model    = step_over_decoding(pipeline_of(run, cores, threads), (0, 4), micro_batch, up_to=80)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from torch import Tensor

from labutils.data import drawings
from labutils.data.tokenizers import clip_tokenizer
from labutils.labs.lab09_image_formats import FormatDataset, cold_read_ms, formats, kept_as, read_ms
from labutils.profiling.cuda import timed
from labutils.profiling.dataloader_model import Pipeline
from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.training import Benchmark
from labutils.workloads import Workload

IN_MEMORY = {"PNG in memory": ("PNG", "files"), "resized in memory": ("PNG", "pixels")}
"""Form -> (format, what of it is held in memory)."""


class Pictures:
    """The same pictures in every form, in a folder of the cache."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.resolution = workload, workload.size.resolution
        self.formats = formats(self.resolution)
        self.images = workload.cache_dir / "images"
        folder = self.images / f"drawn-v{drawings.VERSION}-seed0"
        self.drawn = drawings.draw_images(folder, count, seed=0)

    def files(self, name: str) -> list[Path]:
        """The pictures as files of a format."""
        folder = self.images / f"formats-v{drawings.VERSION}"
        return self.drawn if name == "PNG" else kept_as(self.drawn, folder, self.formats[name])

    def decoding(self, passes: int = 2) -> dict[str, Run]:
        """ "decode: NAME" -> one thread's `read_ms` and `decode_ms`; `mb` a file."""
        runs = {}
        for name, form in self.formats.items():
            files = self.files(name)
            times = read_ms(files, form, passes)
            run = Run("09", f"decode: {name}", tags={"experiment": "decode", "format": name})
            run.samples = {f"{part}_ms": t for part, t in times.items()}
            run.metrics = {part: summarise(t) for part, t in run.samples.items()}
            run.metrics["mb"] = sum(file.stat().st_size for file in files) / len(files) / 1e6
            runs[run.run] = run
        return runs

    def decoding_on_gpu(self, decode: Callable[[bytes], Tensor]) -> Run:
        """The same for JPEG files that the GPU decodes, one by one."""
        contents = [file.read_bytes() for file in self.files("JPEG")]
        samples = [
            timed(lambda content=content: decode(content), budget_s=0.02, at_least=3)[0]
            for content in contents
        ]
        tags = {"experiment": "decode", "format": "JPEG", "on_gpu": True}
        metrics = {"decode_ms": summarise(samples)}
        return Run("09", "", tags=tags, metrics=metrics, samples={"decode_ms": samples})

    def examples_ms(self, forms: Iterable[str]) -> dict[str, float]:
        """Form -> the median of what one thread takes to make an example.

        Example by example one of each, so that a slow host is slow for all of them.
        """
        datasets = {name: self.dataset(name) for name in forms}
        times: dict[str, list[float]] = {name: [] for name in datasets}
        for place in range(len(self.drawn)):
            for name, dataset in datasets.items():
                began = time.perf_counter()
                dataset[place]
                times[name].append(1e3 * (time.perf_counter() - began))
        return {name: median(samples) for name, samples in times.items()}

    def storage(self, rounds: int = 3) -> dict[str, Run]:
        """ "files: cold" and "files: warm": a PNG read by one thread from the disk or from the
        operating system's page cache (`read_ms`), and decoded (`example_ms`); `still_cached`, what
        the system didn't drop."""
        files, form = self.files("PNG"), self.formats["PNG"]
        samples: dict[str, list[float]] = {"cold": [], "warm": []}
        held = []
        for _ in range(rounds):
            cold, still = cold_read_ms(files)
            samples["cold"] += cold
            samples["warm"] += read_ms(files, form)["read"]
            held.append(still)
        decode = median(read_ms(files, form)["decode"])
        shares = {"cold": max(held), "warm": 1.0}
        runs = {}
        for state, times in samples.items():
            run = Run("09", f"files: {state}", tags={"experiment": "files", "cache": state})
            run.samples = {"read_ms": times, "example_ms": [t + decode for t in times]}
            run.metrics = {part: summarise(t) for part, t in run.samples.items()}
            run.metrics["still_cached"] = shares[state]
            runs[run.run] = run
        return runs

    def dataset(self, form: str) -> FormatDataset:
        """Training examples of a format, or of `IN_MEMORY`."""
        kept, held = IN_MEMORY.get(form, (form, "nothing"))
        tokenizer = clip_tokenizer(self.workload.weights, self.workload.cache_dir / "hub")
        ids = tokenizer(
            [drawings.caption(place, 0) for place in range(len(self.drawn))],
            max_length=tokenizer.model_max_length,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return FormatDataset(self.files(kept), self.formats[kept], self.resolution, ids, held)


def image_tags(form: str, recipe: Recipe) -> dict:
    """The tags of a run that trains on a form of the pictures."""
    name = form.removesuffix(" in memory")
    tags = {"experiment": "image input", "format": name}
    tags |= {"in_memory": True} if name != form else {}
    return tags | ({"workers": recipe.num_workers} if recipe.num_workers else {})


def trained_from(
    pictures: Pictures, recipes: Mapping[tuple[str, int], Recipe], steps: int, rounds: int
) -> dict[tuple[str, int], Run]:
    """(form, workers) -> run of that recipe on the pictures in that form, interleaved by rounds."""
    runs: dict[tuple[str, int], Run] = {}
    with ExitStack() as stack:
        benches = {}
        for form in dict.fromkeys(form for form, _ in recipes):
            dataset = pictures.dataset(form)
            bench = Benchmark(
                pictures.workload, warmup=1, dataset=lambda model, recipe, d=dataset: d
            )
            benches[form] = stack.enter_context(bench)
        for turn in range(rounds):
            for key, recipe in recipes.items():
                name = f"{key[0]}, {key[1]} workers"
                run = benches[key[0]].compare({name: recipe}, steps, rounds=1)[name]
                if "round" in run.samples:
                    run.samples["round"] = [turn] * len(run.samples["round"])
                runs[key] = _joined(runs[key], run) if key in runs else run
    for (form, _), run in runs.items():
        run.tags = image_tags(form, Recipe(**run.recipe))
        run.comparison = next(iter(runs.values())).comparison  # each round visited all of them
    return runs


def _joined(run: Run, more: Run) -> Run:
    """Two rounds of one run."""
    if not (run.ok and more.ok):
        return run if not run.ok else more
    samples = {name: run.samples[name] + values for name, values in more.samples.items()}
    summaries = {name: summarise(values) for name, values in samples.items() if name != "round"}
    return replace(run, samples=samples, metrics=run.metrics | summaries)


def pipeline_of(run: Run, cores: int, threads: int) -> Pipeline:
    """What the model of workers needs, out of a run without workers; `read_ms` is its wait."""
    accumulation = run.recipe["accumulation"]
    waited = run.metric("data_ms") / accumulation
    return Pipeline(
        read_ms=waited,
        compute_ms=run.metric("step_ms") / accumulation - waited,
        cores=cores,
        threads=threads,
        accumulation=accumulation,
    )


def step_over_decoding(
    pipeline: Pipeline, workers: Sequence[int], micro_batch: int, up_to: float
) -> dict[int, dict[float, float]]:
    """Workers -> ms that one thread takes for an example -> ms of an optimizer step, by the model
    of lab 03."""
    return {
        count: {
            each: replace(pipeline, read_ms=each * micro_batch).step_ms(count)
            for each in np.linspace(0, up_to, 25).tolist()
        }
        for count in workers
    }
