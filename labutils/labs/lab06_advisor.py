"""Which method for my card and my plans? Article A2's decision chart, computed from runs.

Options are a DataFrame, one row a method: `first_step_s` (compilation included), `step_s`,
`memory_gb` at the peak (10^9 bytes), and `loss_change` against BF16's (0.14: 14 % higher). The
total time is a straight line, first step + steps x step time. Of the methods that fit the memory
and the tolerance, the one with the lowest line at the planned number of steps ends first.

    options = options_from(read_runs("results/mine"), batch=4)
    advise(options, vram_gb=24, steps=2000, tolerance=0.05)

Memory is what the allocator held at its peak; CUDA's own few hundred MB come on top. Losses are
the article's, of ten steps: random weights, with which times are measured, have none to tell.
"""

from __future__ import annotations

import pandas as pd

from labutils.recipe import is_number
from labutils.results.records import Runs, to_frame

LAB, BASELINE = "06", "bf16"
_STEP_S = 0.99
"""The baseline's step, which is in a figure only. Both break-even counts of BF16 give it: compiling
saves (105 - 1.48) / 950 = 0.109 s, which is 11 %; fixed shapes save (106 - 1.48) / 220 = 0.475 s,
which is within 47-53 %."""
_MEMORY_GB = 7.54 / (1 - 0.53)
"""The baseline's memory, from QLoRA's 7.54 GB being 53 % less."""
PUBLISHED = {
    "bf16": (1.48, _STEP_S, _MEMORY_GB, 9.05),
    "fp8-te": (1.41, _STEP_S * (1 - 0.04), _MEMORY_GB, 10.36),
    "compile": (105, _STEP_S - (105 - 1.48) / 950, _MEMORY_GB, 9.05),
    "compile-fp8-te": (61, _STEP_S * (1 - 0.02), _MEMORY_GB, 10.36),
    "fixed": (106, _STEP_S - (106 - 1.48) / 220, _MEMORY_GB * (1 - 0.04), 9.23),
    "fixed-fp8-te": (57, _STEP_S - (57 - 1.48) / 135, _MEMORY_GB * (1 - 0.04), 10.51),
    "qlora": (1.69, _STEP_S * (1 + 0.15), 7.54, 8.88),
}
"""The article's table at batch 1: seconds of the first and of a later step, GB at the peak, loss at
step 10. Of ranges over batch sizes it has the end nearer to no change, where batch 1 lies by the
article's account. Losses of compiled runs are those of the same arithmetic."""
MEASURED = {"first_step_s": "first_step_s", "step_ms": "step_s", "peak_allocated_gb": "memory_gb"}
"""Metric of a cell -> column of the options."""


def published() -> pd.DataFrame:
    """The article's own table at batch 1 as options."""
    columns = ["first_step_s", "step_s", "memory_gb", "loss_change"]
    options = pd.DataFrame.from_dict(PUBLISHED, orient="index", columns=columns)
    options["loss_change"] = options["loss_change"] / PUBLISHED[BASELINE][-1] - 1
    return options


def options_from(runs: Runs, batch: int) -> pd.DataFrame:
    """The options that lab 06 measured at this batch size; failed runs are passed over.

    `loss_change` is the article's, NaN where it gives none. Raises `ValueError` where nothing was
    measured.
    """
    cells = runs.select(LAB, experiment="methods", batch=batch, again=False).newest()
    frame = to_frame(run for run in cells if run.ok)
    options = frame.reindex(columns=["method", *MEASURED]).set_index("method").dropna()
    options = options.rename(columns=MEASURED)
    if options.empty:
        raise ValueError(
            f"No method has time and memory on record at batch size {batch}, so there is nothing "
            f"to choose from. Measure it on a GPU: labutils run {LAB}"
        )
    options["loss_change"] = published()["loss_change"]
    return options.assign(step_s=options["step_s"] / 1e3)


def advise(
    options: pd.DataFrame, vram_gb: float, steps: float, tolerance: float | None = None
) -> pd.DataFrame:
    """The options with `total_s`, the one that ends first on top; `left_out` says why a method is
    out of the question, and such ones stand last.

    tolerance: how much higher the loss may be, a share, or None where any will do; with one,
    options whose loss is unknown are left out. Raises `ValueError` where `vram_gb` or `steps` can't
    be, and where nothing is left.
    """
    if not all(is_number(given) and given > 0 for given in (vram_gb, steps)):
        raise ValueError(f"vram_gb={vram_gb!r} and steps={steps!r} must be numbers above 0.")
    advice = options.assign(total_s=options["first_step_s"] + steps * options["step_s"])
    advice["left_out"] = ""
    if tolerance is not None:
        higher = ~(advice["loss_change"] <= tolerance)
        advice.loc[higher, "left_out"] = "loss too high"
        advice.loc[advice["loss_change"].isna(), "left_out"] = "loss not measured"
    advice.loc[advice["memory_gb"] > vram_gb, "left_out"] = "does not fit"
    if advice["left_out"].all():
        raise ValueError(
            f"No measured method fits: the leanest needs {advice['memory_gb'].min():.3g} GB. Allow "
            "more memory or a larger loss, or choose a smaller batch size."
        )
    advice["out"] = advice["left_out"] != ""
    return advice.sort_values(["out", "total_s"]).drop(columns="out")


def guide(options: pd.DataFrame) -> dict[str, str]:
    """Whom the article's decision chart names, asked of `options` of its methods.

    "short_of_memory": the leanest; "few_steps": first at 100 steps; "between": halfway between the
    article's 135 and 220; "many_steps": at 10,000. What can't be asked, as a method was not
    measured, is absent.
    """
    known = options[options.index.isin(list(PUBLISHED))]
    answers = {"short_of_memory": known["memory_gb"].idxmin()} if "qlora" in known.index else {}
    asked = {"few_steps": (100, "fp8-te"), "between": (178, "fixed-fp8-te")}
    for name, (steps, named) in (asked | {"many_steps": (10_000, "fixed")}).items():
        if named in known.index:
            answers[name] = (known["first_step_s"] + steps * known["step_s"]).idxmin()
    return answers


def shown(advice: pd.DataFrame) -> pd.DataFrame:
    """`advise`'s answer as a table for people."""
    table = advice.assign(loss_change=100 * advice["loss_change"]).reset_index()
    heads = ("method", "first step, s", "step, s", "memory, GB", "loss, %", "in all, s", "left out")
    return table.set_axis(heads, axis=1)
