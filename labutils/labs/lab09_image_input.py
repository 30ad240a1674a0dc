"""Training on images that are kept in different forms: what a form's decoding costs the step,
measured and foretold.

runs  = trained_from(workload, pictures, {"data: PNG": recipe, "data: PNG, 4 workers": other},
steps, rounds) model = step_over_decoding(pipeline, (0, 1, 4), up_to=80)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

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
"""Name -> (format, what of it is held in memory)."""


class Pictures:
    """The same pictures in every form, in a folder of the cache."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.resolution = workload, workload.size.resolution
        self.formats = formats(self.resolution)
        self.drawn = drawings.draw_images(
            workload.cache_dir / "images" / f"drawn-v{drawings.VERSION}-seed0", count, seed=0
        )

    def files(self, name: str) -> list[Path]:
        """The pictures as files of a format."""
        folder = self.workload.cache_dir / "images" / f"formats-v{drawings.VERSION}"
        return self.drawn if name == "PNG" else kept_as(self.drawn, folder, self.formats[name])

    def decoding(self, passes: int = 2) -> dict[str, Run]:
        """ "decode: NAME" -> one thread's times from file to pixels, in the page cache: `read_ms`,
        `decode_ms`, `both_ms`; `mb` a file."""
        runs = {}
        for name, form in self.formats.items():
            files = self.files(name)
            times = read_ms(files, form, passes)
            run = runs[f"decode: {name}"] = Run(
                "", "", samples={f"{part}_ms": t for part, t in times.items()}
            )
            run.metrics = {part: summarise(t) for part, t in run.samples.items()}
            run.metrics["mb"] = sum(file.stat().st_size for file in files) / len(files) / 1e6
        return runs

    def decoding_on_gpu(self, decode: Callable[[bytes], Tensor]) -> Run:
        """The same for JPEG files that the GPU decodes, one by one."""
        contents = [file.read_bytes() for file in self.files("JPEG")]
        samples = [
            timed(lambda content=content: decode(content), budget_s=0.02, at_least=3)[0]
            for content in contents
        ]
        return Run(
            "", "", metrics={"decode_ms": summarise(samples)}, samples={"decode_ms": samples}
        )

    def examples_ms(self, names: Iterable[str]) -> dict[str, float]:
        """Name -> the median of what one thread takes to make an example of that format, or of
        `IN_MEMORY`: example by example one of each, so that a host that is slow for a while is slow
        for all of them."""
        datasets = {name: self.dataset(name) for name in names}
        times: dict[str, list[float]] = {name: [] for name in datasets}
        for place in range(min(map(len, datasets.values()))):
            for name, dataset in datasets.items():
                began = time.perf_counter()
                dataset[place]
                times[name].append(1e3 * (time.perf_counter() - began))
        return {name: median(found) for name, found in times.items()}

    def storage(self, rounds: int = 3) -> dict[str, Run]:
        """ "files: cold" and "files: warm": `example_ms`, a PNG read and decoded by one thread,
        from the disk or from the operating system's page cache; `read_ms` of it; `still_cached`,
        what the system didn't let go of."""
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
        return {
            f"files: {state}": Run(
                "",
                "",
                metrics={
                    "read_ms": summarise(times),
                    "example_ms": summarise([t + decode for t in times]),
                    "still_cached": shares[state],
                },
                samples={"read_ms": times, "example_ms": [t + decode for t in times]},
            )
            for state, times in samples.items()
        }

    def dataset(self, name: str) -> FormatDataset:
        """Training examples of a format, or of `IN_MEMORY`."""
        kept, held = IN_MEMORY.get(name, (name, "nothing"))
        tokenizer = clip_tokenizer(self.workload.weights, self.workload.cache_dir / "hub")
        captions = [drawings.caption(place, 0) for place in range(len(self.drawn))]
        ids = tokenizer(
            captions,
            max_length=tokenizer.model_max_length,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return FormatDataset(self.files(kept), self.formats[kept], self.resolution, ids, held)


DECODING_HEAD = ("form", "MB a file", "ms to read", "ms to decode")
"""The head of a table of `decoding_rows`."""


def decoding_rows(runs: Mapping[str, Run]) -> list[tuple[Any, ...]]:
    """Rows for `DECODING_HEAD` out of runs named "decode: ..."."""
    found = {name.removeprefix("decode: "): run for name, run in runs.items() if run.ok}
    return [(name, *map(run.metric, ("mb", "read_ms", "decode_ms"))) for name, run in found.items()]


def _always(dataset: Dataset) -> Callable[..., Dataset]:
    """A trainer's `dataset` hook: these examples whatever the model and the recipe."""
    return lambda model, recipe: dataset


def trained_from(
    workload: Workload, pictures: Pictures, recipes: Mapping[str, Recipe], steps: int, rounds: int
) -> dict[str, Run]:
    """ "data: NAME" or "data: NAME, more words" -> run of that recipe on the pictures in form NAME,
    interleaved: each round goes through all of them."""
    runs: dict[str, Run] = {}
    of_form: dict[str, dict[str, Recipe]] = {}
    for name, recipe in recipes.items():
        of_form.setdefault(form_of(name), {})[name] = recipe
    with ExitStack() as stack:
        benches = {
            form: stack.enter_context(
                Benchmark(workload, warmup=1, dataset=_always(pictures.dataset(form)))
            )
            for form in of_form
        }
        for turn in range(rounds):
            for form, bench in benches.items():
                for name, run in bench.compare(of_form[form], steps, rounds=1).items():
                    run.samples["round"] = [turn] * len(run.samples.get("step_ms", []))
                    runs[name] = _joined(runs[name], run) if name in runs else run
    return runs


def form_of(name: str) -> str:
    """The form of the pictures that a run "data: ..." was trained from."""
    return name.removeprefix("data: ").partition(",")[0]


def points_of(
    runs: Mapping[str, Run], names: Iterable[str], each: Mapping[str, float]
) -> dict[str, tuple[float, tuple[float, ...]]]:
    """Form -> (ms that one thread takes for an example, its step's p10, median and p90), of those
    `names` that ran.
    """
    there = {form_of(name): runs[name].metrics["step_ms"] for name in names if runs[name].ok}
    return {
        form: (each[form], tuple(spread[part] for part in ("p10", "median", "p90")))
        for form, spread in there.items()
    }


def _joined(run: Run, more: Run) -> Run:
    """Two rounds of one run."""
    if not (run.ok and more.ok):
        return run if not run.ok else more
    for name, samples in more.samples.items():
        run.samples[name] = run.samples[name] + samples
        if name in run.metrics:
            run.metrics[name] = summarise(run.samples[name])
    return run


def pipeline_of(run: Run, cores: int, threads: int) -> Pipeline:
    """What the model of workers needs, out of a run without workers; `read_ms` is left at what it
    waited for.
    """
    recipe = Recipe(**run.recipe)
    waited = run.metric("data_ms") / recipe.accumulation
    return Pipeline(
        read_ms=waited,
        compute_ms=run.metric("step_ms") / recipe.accumulation - waited,
        cores=cores,
        threads=threads,
        accumulation=recipe.accumulation,
        prefetch_factor=recipe.prefetch_factor,
    )


def step_over_decoding(
    pipeline: Pipeline, workers: Sequence[int], micro_batch: int, up_to: float
) -> dict[int, dict[float, float]]:
    """Workers -> ms that one thread takes for an example -> ms of an optimizer step, by the model
    of lab 03.
    """
    found: dict[int, dict[float, float]] = {}
    for count in workers:
        points = {}
        for each in np.linspace(0, up_to, 25).tolist():
            law = Pipeline(**{**vars(pipeline), "read_ms": each * micro_batch})
            points[each] = law.step_ms(count)
        found[count] = points
    return found
