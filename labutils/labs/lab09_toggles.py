"""Article A4's advice as switches: each changes one knob of a recipe.

runs   = flipped(workload, rounds)        every switch that the device can tell apart, interleaved
table  = switch_table(runs.values())      against its base
errors = numerical_effects(workload)      loss and gradient against float32's, on one batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from labutils.labs import lab09_peak_memory
from labutils.labs.ladders import distinct_on
from labutils.layers.cuda_graph import float32_rounded
from labutils.layers.quantization.fp8_math import relative_error
from labutils.recipe import Recipe
from labutils.results.effects import Effect, NotTestable, effect, time_effect
from labutils.results.records import Run
from labutils.training import Benchmark
from labutils.training.step import AUTOCAST
from labutils.workloads import Workload

# ---------------------------------------------------------------------------------------- switches

BATCH = {"tiny": 2, "small": 4, "full": 8}
"""Examples of a step by scale. With few, the host's launches take longer than the GPU's work in any
precision.
"""


class Switch(NamedTuple):
    """One piece of advice: what it changes of which base, and why one would."""

    base: str
    changes: dict[str, Any]
    why: str


SWITCHES = {
    "base": Switch("float32", {"precision": "fp16"}, "autocast in FP16, with a GradScaler"),
    "bf16": Switch("float32", {"precision": "bf16"}, "autocast in BF16, without one"),
    "tf32": Switch("float32", {"tf32": "everything"}, "float32 inputs rounded to 10 bits"),
    "tf32 convolutions": Switch("float32", {"tf32": "convolutions"}, "PyTorch's own setting"),
    "checkpointing": Switch("base", {"checkpointing": "blocks"}, "compute blocks again"),
    "selective checkpointing": Switch(
        "base", {"checkpointing": "selective"}, "keep products' results as well"
    ),
    "accumulation": Switch("base", {}, "the same examples one after the other"),
    "channels last": Switch("base", {"memory_format": "channels_last"}, "tensor cores' layout"),
    "cudnn.benchmark": Switch(
        "base",
        {"cudnn_benchmark": True, "tf32": "convolutions"},
        "time each shape's algorithms, keep the fastest",
    ),
    "fused optimizer": Switch("base", {"optimizer": "adamw-fused"}, "all of AdamW in one kernel"),
    "8-bit optimizer": Switch("base", {"optimizer": "adamw-8bit"}, "moments in a byte each"),
    "paged optimizer": Switch("base", {"optimizer": "adamw-paged"}, "those in pages that can move"),
}
"""Name -> switch. "base" is the article's mixed precision, itself a switch from "float32".
"accumulation" trades one knob for another: as many micro-batches of 1 as the batch had examples.
"cudnn.benchmark" turns a second one, which nothing computes with in FP16: PyTorch remembers one
algorithm for each shape, layout, format and permission to use TF32, whether it was timed or
guessed, for as long as the process lives. Under the same permission this switch would be given what
"base" was."""


def switches(scale: str) -> dict[str, Recipe]:
    """Name -> recipe of "float32" and every switch: plain loops on latents and text embeddings that
    are there already, so that no data path is in the times; no TF32."""
    examples = BATCH[scale]
    float32 = Recipe(
        driver="eager",
        logging="ring-buffer",
        cache="latents+text",
        micro_batch=examples,
        accumulation=1,
        precision="fp32",
        tf32="nothing",
    )
    recipes = {"base": float32.but(**SWITCHES["base"].changes), "float32": float32}
    for name, switch in SWITCHES.items():
        recipes[name] = recipes[switch.base].but(**switch.changes)
    recipes["accumulation"] = recipes["base"].but(micro_batch=1, accumulation=examples)
    return recipes


def flipped(workload: Workload, rounds: int | None = None) -> dict[str, Run]:
    """Name -> run of every switch, "base" twice: time, and `peak_gb` of a step; and "advice": how
    many were `tried`, and how many don't surely shorten it (`left_alone`).

    On a GPU the peak is the allocator's, on a CPU one step of tensors is recorded. A switch that
    the device can't tell from one above it is a skipped run.
    """
    recipes = switches(workload.scale)
    tags = {name: {"experiment": "toggles", "toggle": name} for name in recipes}
    with Benchmark(workload, warmup=1 if workload.scale == "tiny" else 2) as bench:
        here = distinct_on(workload.device.type, recipes)
        runs = bench.compare(here, steps=2, rounds=rounds, tags=tags)
        for name in here.keys() & bench.candidates.keys():  # a CPU counts the tensors of a step
            peak = runs[name].metric("peak_allocated_gb")
            peak = peak or lab09_peak_memory.peak_gb(bench.candidates[name].trainer)
            runs[name].metrics["peak_gb"] = peak
    why = "skipped: a CPU computes in float32, and has neither cuDNN nor pages to move"
    effects = [one for name in SWITCHES if (one := effect_on(runs, name, runs["base again"]))]
    left = {"tried": len(effects), "left_alone": sum(one.direction >= 0 for one in effects)}
    runs["advice"] = Run("09", "advice", metrics=left, tags={"experiment": "advice"})
    missing = sorted(recipes.keys() - here.keys())
    return runs | {name: Run("09", name, status=why, tags=tags[name]) for name in missing}


def effect_on(
    runs: Mapping[str, Run], name: str, again: Run | None = None, metric: str = "step_ms"
) -> Effect | None:
    """The effect of a switch on its base, against the noise of "base" and `again`; None where
    either wasn't measured."""
    start = SWITCHES[name].base if name in SWITCHES else ""
    twice = (runs["base"], again) if again and "base" in runs else None
    with contextlib.suppress(KeyError, NotTestable):
        return effect(runs[start], runs[name], twice, metric)
    return None


def switch_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a switch: its effects on time and memory against its base, if that is there too."""
    runs = [run for run in runs if run.tags["toggle"] in (*SWITCHES, "float32")]
    again = next((run for run in runs if run.tags.get("again")), None)
    by_name = {run.tags["toggle"]: run for run in runs if run is not again}
    rows = []
    for name, run in by_name.items():
        row = {"switch": name, "step, ms": run.metric("step_ms")}
        row |= {"floor, ms": run.metric("floor_ms"), "peak, GB": run.metric("peak_gb")}
        time, memory = (effect_on(by_name, name, again, m) for m in ("step_ms", "peak_gb"))
        if time:
            row["against"] = SWITCHES[name].base
            row["time"] = time.text() + ", unsteady machine" * time.unsteady
            row["memory"] = memory and memory.text()
        rows.append(row)
    if again and "base" in by_name:
        found = time_effect(by_name["base"], again)
        row = {"switch": "base again", "step, ms": again.metric("step_ms"), "against": "base"}
        rows.append(row | {"time": found.text() if found else None})
    columns = ("switch", "step, ms", "floor, ms", "against", "time", "peak, GB", "memory")
    return pd.DataFrame(rows).reindex(columns=list(columns))


# ----------------------------------------------------------------------------------------- numbers

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "autocast": False},
    "tf32": {"precision": "fp32", "autocast": False, "tf32": "everything"},
    "fp16, scaled loss": {"precision": "fp16", "loss_scale": 2.0**16},
    "fp16, loss not scaled": {"precision": "fp16"},
    "fp16 throughout": {"precision": "fp16", "autocast": False, "loss_scale": 2.0**10},
    "bf16": {"precision": "bf16"},
    "bf16 throughout": {"precision": "bf16", "autocast": False},
}
"""Name -> how a forward and backward pass is computed, as `_gradient` takes it. "throughout": no
autocast, so that norms, their sums and the adapters are in 16 bits as well.
"""


def numerical_effects(workload: Workload) -> dict[str, Run]:
    """Loss and gradients of one batch in each of `FORMS`, against those in float32, as runs with
    `loss_error` and `gradient_error` (relative), and `lost_share`, the share of gradients that
    became 0 and are not.

    The workload is on drawn latents. The same weights, batch and noise for all; the adapters' B,
    which would be 0, is drawn as well, so that every gradient is one. On a CPU the 16-bit formats
    are computed by the CPU's own kernels.
    """
    exact: tuple[float, Tensor] | None = None
    runs = {}
    for name, form in FORMS.items():
        tags = {"experiment": "numbers", "precision": name}
        run = runs[name] = Run("09", f"numbers: {name}", workload=workload.name, tags=tags)
        run.scale, run.weights, run.data = workload.scale, workload.weights, workload.data
        if "tf32" in form and workload.device.type != "cuda":
            run.status = "skipped: TF32 is a format of NVIDIA's tensor cores"
            continue
        loss, gradient = _gradient(workload, **form)
        exact = exact or (loss, gradient)
        run.metrics = {
            "loss_error": abs(loss / exact[0] - 1),
            "gradient_error": relative_error(gradient, exact[1]),
            "lost_share": ((gradient == 0) & (exact[1] != 0)).double().mean().item(),
        }
    return runs


def _gradient(
    workload: Workload,
    precision: str,
    autocast: bool = True,
    loss_scale: float = 1.0,
    tf32: str = "nothing",
) -> tuple[float, Tensor]:
    """The loss, and all adapters' gradients in a row, in float64 on the host.

    precision: of the frozen weights, and of autocast where it is on. loss_scale: the loss is
    multiplied by it before the backward pass, the gradients are divided by it afterwards. tf32:
    what float32 rounds to TF32.
    """
    device, dtype = workload.device, AUTOCAST.get(precision, torch.float32)
    recipe = switches(workload.scale)["float32"].but(precision=precision, adapter="plain")
    model = workload.build(recipe)
    generator = torch.Generator().manual_seed(0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        if not autocast:
            parameter.data = parameter.data.to(dtype)
    examples = workload.dataset(model, recipe).__getitems__([0, 1])
    batch = {name: tensor.to(device) for name, tensor in examples.items()}
    noise = torch.randn(2, 2, *workload.latent_shape, generator=generator).to(device, dtype)
    draws = {"posterior": noise[0], "noise": noise[1]}
    draws["timesteps"] = torch.tensor([100, 700], device=device)
    with float32_rounded(tf32):  # in the backward pass too: PyTorch's default is TF32 convolutions
        with torch.autocast(device.type, dtype) if autocast else contextlib.nullcontext():
            loss = workload.loss(model, batch, draws)
        (loss * loss_scale).backward()
    gradient = parameters_to_vector([p.grad.double().cpu() for p in trained.values()])
    return loss.item(), gradient / loss_scale
