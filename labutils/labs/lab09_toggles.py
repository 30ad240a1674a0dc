"""Article A4's advice as switches: each changes one knob of a recipe.

runs   = flipped(workload, rounds)        every switch that the device can tell apart, interleaved
table  = switch_table(runs.values())      against its base
errors = numerical_effects(workload)      gradients against float32's, on one batch
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from labutils.labs.ladders import distinct_on
from labutils.layers.cuda_graph import float32_rounded
from labutils.layers.quantization.fp8_math import relative_error
from labutils.recipe import Recipe
from labutils.results.effects import Effect, NotTestable, effect
from labutils.results.records import Run
from labutils.training import Benchmark
from labutils.training.peak_memory import peak_gb
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


AGAIN = "base again"
TIMED = {"cudnn_benchmark": True, "tf32": "convolutions"}
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
    "cudnn.benchmark": Switch("base", TIMED, "time each shape's algorithms, keep the fastest"),
    "fused optimizer": Switch("base", {"optimizer": "adamw-fused"}, "all of AdamW in one kernel"),
    "8-bit optimizer": Switch("base", {"optimizer": "adamw-8bit"}, "moments in a byte each"),
}
"""Name -> switch. "base" is the article's mixed precision, itself a switch from "float32".
"accumulation" trades one knob for another: as many micro-batches of 1 as the batch had examples.
"cudnn.benchmark" turns a second one, which nothing computes with in FP16: PyTorch remembers one
algorithm for each shape, layout, format and permission to use TF32, whether it was timed or
guessed, for as long as the process lives. Under the same permission this switch would be given what
"base" was."""


TRACED = ("base", "accumulation", "checkpointing")


def switches(scale: str) -> dict[str, Recipe]:
    """Name -> recipe of "float32" and every switch: plain loops on latents and text embeddings that
    are there already, so that no data path is in the times; no TF32."""
    plain = {"driver": "eager", "logging": "ring-buffer", "cache": "latents+text"}
    float32 = Recipe(
        **plain, micro_batch=BATCH[scale], accumulation=1, precision="fp32", tf32="nothing"
    )
    recipes = {"base": float32.but(**SWITCHES["base"].changes), "float32": float32}
    for name, switch in SWITCHES.items():
        recipes[name] = recipes[switch.base].but(**switch.changes)
    recipes["accumulation"] = recipes["base"].but(micro_batch=1, accumulation=BATCH[scale])
    return recipes


def flipped(workload: Workload, rounds: int | None = None) -> dict[str, Run]:
    """Name -> run of every switch, "base" twice: time, and `peak_gb` of a step; and "advice": how
    many were `tried`, how many don't surely shorten it (`left_alone`), and on a steady machine how
    many surely `lengthen` it.

    On a GPU the peak is the allocator's, and some are traced afterwards: how busy are they? On a
    CPU one step of tensors is recorded. A switch that the device can't tell from one above it is
    left out.
    """
    here = distinct_on(workload.device.type, switches(workload.scale))
    tags = {name: {"experiment": "toggles", "toggle": name} for name in here}
    with Benchmark(workload, warmup=1 if workload.scale == "tiny" else 2) as bench:
        runs = bench.compare(here, steps=2, rounds=rounds, tags=tags)
        for name, candidate in bench.candidates.items():
            peak = runs[name].metric("peak_allocated_gb")
            runs[name].metrics["peak_gb"] = peak or peak_gb(candidate.trainer)
        if workload.device.type == "cuda":
            with tempfile.TemporaryDirectory(prefix="labutils-") as folder:
                for name in TRACED:
                    bench.trace_into(runs[name], Path(folder), 2)
    effects = [one for name, one in effects_of(runs.values()).items() if one and name != AGAIN]
    left = {"tried": len(effects), "left_alone": sum(one.direction >= 0 for one in effects)}
    if not any(one.unsteady for one in effects):
        left["lengthen"] = sum(one.direction > 0 for one in effects)
    runs["advice"] = Run("09", "advice", metrics=left, tags={"experiment": "advice"})
    return runs


def effects_of(runs: Iterable[Run]) -> dict[str, Effect | None]:
    """Switch -> its effect on the time of its base's step, against the noise of "base again"; None
    where either wasn't measured. "base again" is in it, too: a switch that does nothing."""
    known = {run.tags["toggle"]: run for run in runs if not run.tags.get("again")}
    again = next((run for run in runs if run.tags.get("again")), None)
    bases = {name: switch.base for name, switch in SWITCHES.items()} | {AGAIN: "base"}
    twice = (known["base"], again) if again and "base" in known else None
    found: dict[str, Effect | None] = {}
    for name, run in (known | ({AGAIN: again} if again else {})).items():
        with contextlib.suppress(KeyError, NotTestable):
            found[name] = effect(known[bases[name]], run, twice)
    return found


def switch_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a switch: its time and memory, and its effect on the time of its base's step, if that
    is there too."""
    runs = [run for run in runs if run.tags["toggle"] in (*SWITCHES, "float32")]
    runs.sort(key=lambda run: bool(run.tags.get("again")))
    effects, rows = effects_of(runs), []
    for run in runs:
        name = AGAIN if run.tags.get("again") else run.tags["toggle"]
        row = {"switch": name, "peak, GB": run.metric("peak_gb")}
        row |= {"step, ms": run.metric("step_ms"), "floor, ms": run.metric("floor_ms")}
        row["GPU-busy"] = run.metric("gpu_busy")
        if found := effects.get(name):
            row["against"] = SWITCHES[name].base if name in SWITCHES else "base"
            row["time"] = found.text() + ", unsteady machine" * found.unsteady
        rows.append(row)
    columns = ["switch", "step, ms", "floor, ms", "GPU-busy", "against", "time", "peak, GB"]
    return pd.DataFrame(rows, columns=columns)


# ----------------------------------------------------------------------------------------- numbers

FORMS = {
    "fp32": ("fp32", False, 1.0),
    "fp16, scaled loss": ("fp16", True, 2.0**16),
    "fp16, loss not scaled": ("fp16", True, 1.0),
    "fp16 throughout": ("fp16", False, 2.0**10),
    "bf16": ("bf16", True, 1.0),
}
"""Name -> precision, autocast and loss scale of a forward and backward pass. "throughout": no
autocast, so that norms, their sums and the adapters are in 16 bits as well.
"""


def numerical_effects(workload: Workload) -> dict[str, Run]:
    """The gradients of one batch in each of `FORMS`, against those in float32, as runs with
    `gradient_error` (relative), and `lost_share`, the share of gradients that became 0 and are not.

    The workload is on drawn latents. The same weights, batch and noise for all; the adapters' B,
    which would be 0, is drawn as well, so that every gradient is one. On a CPU the 16-bit formats
    are computed by the CPU's own kernels.
    """
    found = {name: _gradient(workload, *form) for name, form in FORMS.items()}
    exact, runs = found["fp32"], {}
    for name, gradient in found.items():
        tags = {"experiment": "numbers", "precision": name}
        lost = ((gradient == 0) & (exact != 0)).double().mean().item()
        metrics = {"gradient_error": relative_error(gradient, exact), "lost_share": lost}
        runs[name] = Run("09", f"numbers: {name}", tags=tags, metrics=metrics)
    return runs


def _gradient(workload: Workload, precision: str, autocast: bool, loss_scale: float) -> Tensor:
    """All adapters' gradients in a row, in float64 on the host.

    precision: of the frozen weights, and of autocast where it is on. loss_scale: the loss is
    multiplied by it before the backward pass, the gradients are divided by it afterwards.
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
    with float32_rounded("nothing"):  # in the backward pass too: PyTorch's default rounds to TF32
        with torch.autocast(device.type, dtype) if autocast else contextlib.nullcontext():
            loss = workload.loss(model, batch, draws)
        (loss * loss_scale).backward()
    gradient = parameters_to_vector([p.grad.double().cpu() for p in trained.values()])
    return gradient / loss_scale
