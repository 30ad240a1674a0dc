"""Which method for my card and my plans? Article A2's decision chart, computed from runs.

Options are a DataFrame, one row a method: `first_step_s` (compilation included), `step_s`, and
`memory_gb` at the peak (10^9 bytes). The total time is a straight line, first step + steps x step
time. Of the methods that fit the memory, the one with the lowest line ends first.

    options = options_from(read_runs("results/mine"), batch=4)
    advise(options, vram_gb=24, steps=2000)

Memory is what the allocator held at its peak; CUDA's own few hundred MB come on top. The loss is
not asked: the article's, of ten steps, tell a method from a seed as little as random weights do.
"""

from __future__ import annotations

import pandas as pd

from labutils.results.records import Runs, to_frame

_STEP_S = 0.99
"""The baseline's step, which is in a figure only. Both break-even counts of BF16 give it: compiling
saves (105 - 1.48) / 950 = 0.109 s, which is 11 %; fixed shapes save (106 - 1.48) / 220 = 0.475 s,
which is within 47-53 %."""
_MEMORY_GB = 7.54 / (1 - 0.53)
"""The baseline's memory, from QLoRA's 7.54 GB being 53 % less."""
PUBLISHED = pd.DataFrame.from_dict(
    {
        "bf16": (1.48, _STEP_S, _MEMORY_GB),
        "fp8-te": (1.41, _STEP_S * (1 - 0.04), _MEMORY_GB),
        "compile": (105, _STEP_S - (105 - 1.48) / 950, _MEMORY_GB),
        "compile-fp8-te": (61, _STEP_S * (1 - 0.02), _MEMORY_GB),
        "fixed": (106, _STEP_S - (106 - 1.48) / 220, _MEMORY_GB * (1 - 0.04)),
        "fixed-fp8-te": (57, _STEP_S - (57 - 1.48) / 135, _MEMORY_GB * (1 - 0.04)),
        "qlora": (1.69, _STEP_S * (1 + 0.15), 7.54),
    },
    orient="index",
    columns=["first_step_s", "step_s", "memory_gb"],
)
"""The article's table at batch 1. Of ranges over batch sizes it has the end nearer to no change,
where batch 1 lies by the article's account."""


def options_from(runs: Runs, batch: int) -> pd.DataFrame:
    """The options that lab 06 measured at this batch size; failed runs are passed over."""
    cells = runs.select("06", experiment="methods", batch=batch, again=False).newest()
    metrics = ["method", "first_step_s", "step_ms", "peak_allocated_gb"]
    options = to_frame(run for run in cells if run.ok).reindex(columns=metrics).dropna()
    options["step_ms"] /= 1e3
    return options.set_axis(["method", *PUBLISHED.columns], axis=1).set_index("method")


def advise(options: pd.DataFrame, vram_gb: float, steps: float) -> pd.DataFrame:
    """The options that fit the memory with `total_s`, the one that ends first on top. Raises
    `ValueError` where none fits."""
    fitting = options[options["memory_gb"] <= vram_gb]
    if fitting.empty:
        raise ValueError(
            f"Of {len(options)} methods on record at this batch size none fits {vram_gb:g} GB. "
            "Allow more memory, choose a measured one, or measure: labutils run 06 -p batches N"
        )
    total_s = fitting["first_step_s"] + steps * fitting["step_s"]
    return fitting.assign(total_s=total_s).sort_values("total_s")


CHART = {"few_steps": (100, {"fp8-te", "fixed"}), "many_steps": (10_000, {"fixed"})}
CHART |= {"between": (178, {"fixed-fp8-te", "fixed"})}
"""Question of article A2's chart -> the steps it is asked at, and the methods without which there
is no answer. "between" is halfway between the article's 135 and 220."""


def guide(options: pd.DataFrame) -> dict[str, str]:
    """Whom the article's decision chart names, asked of `options`: the fastest of its methods for
    each question of `CHART`, and where QLoRA was measured the leanest: "short_of_memory"."""
    options = options[options.index.isin(PUBLISHED.index)]
    answers = {
        question: advise(options, float("inf"), steps).index[0]
        for question, (steps, needed) in CHART.items()
        if needed <= set(options.index)
    }
    if "qlora" in options.index:
        answers["short_of_memory"] = options["memory_gb"].idxmin()
    return answers
