"""Article A4's advice as switches: each changes one knob of a recipe.

recipes = switches("full")                name -> recipe; each differs from its base in one thing
runs    = bench.compare(recipes, steps)   time and memory
table   = switch_table(runs.values())     against its base
errors  = numerical_effects(workload)     loss and gradient against float32's, on one batch
costs   = optimizer_costs(scale, device)  each form of AdamW, alone
rates   = images_per_s(8, threads=1)      processes that resize pictures at the same time
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from labutils.layers.cuda_graph import float32_rounded
from labutils.layers.quantization.fp8_math import relative_error
from labutils.profiling import cuda
from labutils.recipe import Recipe
from labutils.results.effects import time_effect
from labutils.results.records import Run, summarise
from labutils.training.child_process import MESSAGE, Child
from labutils.training.step import AUTOCAST, build_optimizer
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


HALF = "half the bytes, tensor cores; a loss scaled against underflow"
SWITCHES = {
    "base": Switch("float32", {"precision": "fp16"}, HALF),
    "bf16": Switch("float32", {"precision": "bf16"}, "the same without scaling"),
    "tf32": Switch("float32", {"tf32": "everything"}, "float32 inputs rounded to 10 bits"),
    "tf32 convolutions": Switch("float32", {"tf32": "convolutions"}, "PyTorch's own setting"),
    "channels last": Switch("base", {"memory_format": "channels_last"}, "tensor cores' layout"),
    "cudnn.benchmark": Switch(
        "base",
        {"cudnn_benchmark": True, "tf32": "convolutions"},
        "time each shape's algorithms, keep the fastest",
    ),
    "optimizer loop": Switch("base", {"optimizer": "adamw-loop"}, "a dozen kernels a tensor"),
    "foreach optimizer": Switch("base", {"optimizer": "adamw-foreach"}, "all tensors in a dozen"),
    "fused optimizer": Switch("base", {"optimizer": "adamw-fused"}, "all of AdamW in one kernel"),
    "8-bit optimizer": Switch("base", {"optimizer": "adamw-8bit"}, "moments in a byte each"),
    "paged optimizer": Switch("base", {"optimizer": "adamw-paged"}, "those in pages that can move"),
    "checkpointing": Switch("base", {"checkpointing": "blocks"}, "compute blocks again"),
    "selective checkpointing": Switch(
        "base", {"checkpointing": "selective"}, "keep products' results as well"
    ),
    "accumulation": Switch("base", {}, "the same examples one after the other"),
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


def switch_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a switch: what it changes, and its effects on time and memory against its base."""
    again = {run.tags["toggle"]: run for run in runs if run.tags.get("again")}
    by_name = {run.tags["toggle"]: run for run in runs if not run.tags.get("again")}
    rows = []
    for name, run in by_name.items():
        switch = SWITCHES.get(name, Switch("", {}, "where it starts"))
        peak = run.metric("peak_gb")
        row = {"switch": name, "step, ms": run.metric("step_ms"), "peak memory, GB": peak}
        row["why"] = switch.why
        if base := by_name.get(switch.base):
            changes = Recipe(**run.recipe).changes_from(Recipe(**base.recipe))
            row["changes"] = ", ".join(f"{knob}={new}" for knob, (_, new) in changes.items())
            effect = time_effect(base, run, again.get(switch.base))
            row["against its base"] = effect.text() if effect else None
            if peak and base.metric("peak_gb"):
                row["memory, %"] = 100 * (peak / base.metric("peak_gb") - 1)
        rows.append(row)
    return pd.DataFrame(rows)


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


# -------------------------------------------------------------------------------------- optimizers

KINDS = ("adamw-loop", "adamw-foreach", "adamw-fused", "adamw-8bit", "adamw-paged")
WIDE = {"tiny": 128, "small": 1024, "full": 4096}
"""Width of the decoder's block whose weights are all trained: at `full` that of Qwen3-8B."""


def block_weights(scale: str, device: str) -> list[nn.Parameter]:
    """The matrices and norms of one decoder's block, to be trained in float32, each with a
    gradient.
    """
    width = WIDE[scale]
    shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    shapes += [(3 * width, width), (3 * width, width), (width, 3 * width), (width,), (width,)]
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02)
        parameter.grad = torch.randn(shape, generator=generator, device=device) * 1e-3
        parameters.append(parameter)
    return parameters


def optimizer_costs(scale: str, device: str) -> dict[str, Run]:
    """One decoder's block trained in full by each form of AdamW, as runs with `step_ms` of the
    update alone, `state_bytes` for each trained number, and `update_error` of ten updates against
    the loop's.
    """
    runs, exact = {}, None
    for kind in KINDS:
        recipe = Recipe(optimizer=kind)
        tags = {"experiment": "optimizer", "optimizer": kind}
        run = runs[kind] = Run("09", f"optimizer: {kind}", scale=scale, tags=tags)
        run.recipe = recipe.fitted_to(device).as_dict()
        if device == "cpu" and kind == "adamw-paged":
            run.status = "skipped: pages that move between the GPU and the host need a GPU"
            continue
        parameters = block_weights(scale, device)
        start = parameters_to_vector(parameters).detach()
        optimizer = build_optimizer(parameters, recipe)
        for _ in range(10):
            optimizer.step()
        moved = parameters_to_vector(parameters).detach() - start
        exact = moved if exact is None else exact
        run.samples["step_ms"] = cuda.timed(optimizer.step, budget_s=0.3)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        held = sum(v.nbytes for v in state if isinstance(v, Tensor) and v.numel() > 1)
        run.metrics = {
            "step_ms": summarise(run.samples["step_ms"]),
            "state_bytes": held / moved.numel(),
            "update_error": relative_error(moved, exact),
        }
    return runs


# ----------------------------------------------------------------------------- a variable's switch

_RESIZER = f"""
import sys, time, torch, torch.nn.functional as F
image = torch.rand(1, 3, 1080, 1080)
F.interpolate(image, size=(512, 512), mode="bicubic", antialias=True)
print("{MESSAGE}", torch.get_num_threads(), flush=True)
sys.stdin.readline()
end, count = time.perf_counter() + float(sys.argv[1]), 0
while time.perf_counter() < end:
    F.interpolate(image, size=(512, 512), mode="bicubic", antialias=True)
    count += 1
print("{MESSAGE}", count, flush=True)
"""


def images_per_s(processes: int, threads: int | None, seconds: float = 1.0) -> dict[str, float]:
    """How many pictures of 1080 x 1080 so many processes resize in a second together, each with
    OMP_NUM_THREADS set to `threads`, and the `threads` that each one took.

    None leaves the variable unset: then each process takes as many threads as there are cores.
    Raises `RuntimeError` where a process fails.
    """
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = dict.fromkeys(variables, None if threads is None else str(threads))
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(["-c", _RESIZER, str(seconds)], environment=environment))
            for _ in range(processes)
        ]
        taken = [child.receive() for child in children]  # all are ready
        for child in children:
            child.send("go")
        counts = [child.receive() for child in children]
        if None in counts:
            failure = children[counts.index(None)].failure()
            raise RuntimeError(f"A process that resizes pictures failed: {failure}")
    return {"images_per_s": sum(counts) / seconds, "threads": taken[0]}
