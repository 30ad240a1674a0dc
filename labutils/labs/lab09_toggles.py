"""Article A4's advice as switches: each changes one knob of a recipe.

recipes = switches("full")                name -> recipe; each differs from its base in one thing
runs    = bench.compare(recipes, steps)   time and memory
table   = switch_table(runs.values())     against its base
errors  = numerical_effects(workload)     loss and gradient against float32's, on one batch
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.layers.cuda_graph import float32_rounded
from labutils.layers.quantization.fp8_math import relative_error
from labutils.profiling import cuda
from labutils.profiling.timing import StepTimes
from labutils.recipe import STOCK, Recipe
from labutils.results.judges.effects import time_effect
from labutils.results.records import Run, status_of, summarise
from labutils.training import child_process
from labutils.training.benchmark import REFILL_S, Candidate, empty_run
from labutils.training.child_process import MESSAGE, Child
from labutils.training.step import AUTOCAST, build_optimizer
from labutils.workloads import Workload, open_workload
from labutils.workloads.base import Batch

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
    base = Recipe(
        driver="eager",
        logging="ring-buffer",
        cache="latents+text",
        micro_batch=BATCH[scale],
        accumulation=1,
        precision="fp16",
        tf32="nothing",
    )
    recipes = {"base": base, "float32": base.but(precision="fp32")}
    for name, switch in SWITCHES.items():
        changes = (
            {"micro_batch": 1, "accumulation": base.micro_batch}
            if name == "accumulation"
            else switch.changes
        )
        recipes[name] = recipes[switch.base].but(**changes)
    return recipes


def switch_table(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a switch: what it changes, and its effects on time and memory against its base."""
    by_name = {run.tags["toggle"]: run for run in runs if not run.tags.get("again")}
    again = {run.tags["toggle"]: run for run in runs if run.tags.get("again")}
    rows = []
    for name, run in by_name.items():
        row = {"switch": name, "step, ms": run.metric("step_ms")}
        switch = SWITCHES.get(name, Switch("", {}, "where it starts"))
        row |= {"peak memory, GB": run.metric("peak_gb"), "why": switch.why}
        if base := by_name.get(switch.base):
            changes = Recipe(**run.recipe).changes_from(Recipe(**base.recipe))
            row["changes"] = ", ".join(f"{knob}={new}" for knob, (_, new) in changes.items())
            effect = time_effect(base, run, again.get(switch.base))
            row["against its base"] = effect.text() if effect else None
            peak, held = run.metric("peak_gb"), base.metric("peak_gb")
            row["memory, %"] = 100 * (peak / held - 1) if peak and held else None
        rows.append(row)
    return pd.DataFrame(rows)


def paying(runs: Mapping[str, Run], at_least: float = 0.05) -> dict[str, float]:
    """How many switches were `tried`, and how many surely shorten the step by that share
    (`helped`), or do not (`left_alone`)."""
    effects = [
        time_effect(runs[switch.base], runs[name])
        for name, switch in SWITCHES.items()
        if {name, switch.base} <= runs.keys() and runs[name].ok and runs[switch.base].ok
    ]
    known = [effect for effect in effects if effect is not None]
    helped = sum(e.direction < 0 and e.value <= 1 - at_least for e in known)
    return {"tried": len(known), "helped": helped, "left_alone": len(known) - helped}


# ----------------------------------------------------------------------------------------- numbers


class Form(NamedTuple):
    """How a forward and backward pass is computed: the frozen weights' precision, under autocast or
    not, the factor of the loss, and what float32 rounds to TF32."""

    precision: str
    autocast: bool = True
    loss_scale: float = 1.0
    tf32: str = "nothing"


FORMS = {
    "fp32": Form("fp32", autocast=False),
    "tf32": Form("fp32", autocast=False, tf32="everything"),
    "fp16, scaled loss": Form("fp16", loss_scale=2.0**16),
    "fp16, loss not scaled": Form("fp16"),
    "fp16 throughout": Form("fp16", autocast=False, loss_scale=2.0**10),
    "bf16": Form("bf16"),
    "bf16 throughout": Form("bf16", autocast=False),
}
"""Name -> form. "throughout": no autocast, so that norms, their sums and the adapters are in 16
bits as well.
"""


def numerical_effects(workload: Workload, forms: Mapping[str, Form] = FORMS) -> dict[str, Run]:
    """Loss and gradients of one batch in each form, against those in float32, as runs with
    `loss_error` and `gradient_error` (relative), and `lost_share`, the share of gradients that
    became 0 and are not.

    The same weights, batch and noise for all; the adapters' B, which would be 0, is drawn as well,
    so that every gradient is one. On a CPU the 16-bit formats are computed by the CPU's own
    kernels.
    """
    exact: tuple[float, Tensor] | None = None
    runs = {}
    for name, form in forms.items():
        tags = {"experiment": "numbers", "precision": name}
        run = runs[name] = Run("09", f"numbers: {name}", workload=workload.name, tags=tags)
        run.scale, run.weights, run.data = workload.scale, workload.weights, workload.data
        if form.tf32 != "nothing" and workload.device.type != "cuda":
            run.status = "skipped: TF32 is a format of NVIDIA's tensor cores"
            continue
        loss, gradient = _gradient(workload, form)
        exact = exact or (loss, gradient)
        run.metrics = {
            "loss_error": abs(loss / exact[0] - 1),
            "gradient_error": relative_error(gradient, exact[1]),
            "lost_share": ((gradient == 0) & (exact[1] != 0)).double().mean().item(),
        }
    return runs


def _gradient(workload: Workload, form: Form) -> tuple[float, Tensor]:
    """The loss, and all adapters' gradients in a row, in float64 on the host."""
    kind, dtype = workload.device.type, AUTOCAST.get(form.precision, torch.float32)
    recipe = switches(workload.scale)["float32"].but(
        precision=form.precision, adapter="plain", micro_batch=2
    )
    model = workload.build(recipe)
    trained = _drawn(model)
    if not form.autocast:
        for parameter in trained:
            parameter.data = parameter.data.to(dtype)
    batch, draws = _same_inputs(workload, model, dtype)
    cast = torch.autocast(kind, dtype) if form.autocast else nullcontext()
    with float32_rounded(
        form.tf32
    ):  # around the backward pass as well: PyTorch's own setting is TF32 for convolutions
        with cast:
            loss = workload.loss(model, batch, draws)
        (loss * form.loss_scale).backward()
    gradient = torch.cat([p.grad.flatten().double().cpu() for p in trained]) / form.loss_scale
    return loss.item(), gradient


def _drawn(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters, each B filled with small numbers."""
    generator = torch.Generator().manual_seed(1)
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained.append(parameter)
            if "lora_B" in name:
                parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return trained


def _same_inputs(workload: Workload, model: nn.Module, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """A batch of latents and text embeddings, and the noise of one step, drawn in float32 and
    rounded to `dtype`.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(workload.device, dtype)

    channels, *sides = workload.latent_shape
    batch = {
        "moments": normal(2 * channels, *sides),
        "condition": normal(77, workload.size.text_width),
    }
    noise = {"posterior": normal(channels, *sides), "noise": normal(channels, *sides)}
    return batch, noise | {"timesteps": torch.tensor([100, 700], device=workload.device)}


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


def optimizer_costs(scale: str, device: str, kinds: Sequence[str] = KINDS) -> dict[str, Run]:
    """One decoder's block trained in full by each form of AdamW, as runs with `step_ms` of the
    update alone, `state_bytes` for each trained number, and `update_error` of ten updates against
    the loop's.
    """
    runs, exact = {}, None
    for kind in kinds:
        recipe = Recipe(optimizer=kind)
        tags = {"experiment": "optimizer", "optimizer": kind}
        run = runs[kind] = Run("09", f"optimizer: {kind}", scale=scale, tags=tags)
        run.recipe = recipe.fitted_to(device).as_dict()
        if device == "cpu" and kind == "adamw-paged":
            run.status = "skipped: pages that move between the GPU and the host need a GPU"
            continue
        parameters = block_weights(scale, device)
        start = [parameter.detach().clone() for parameter in parameters]
        optimizer = build_optimizer(parameters, recipe)
        for _ in range(10):
            optimizer.step()
        moved = torch.cat(
            [(p.detach() - s).flatten() for p, s in zip(parameters, start, strict=True)]
        )
        exact = moved if exact is None else exact
        run.samples["step_ms"] = cuda.timed(optimizer.step, budget_s=0.3)
        state = (value for entry in optimizer.state.values() for value in entry.values())
        held = sum(
            value.nbytes for value in state if isinstance(value, Tensor) and value.numel() > 1
        )
        run.metrics = {
            "step_ms": summarise(run.samples["step_ms"]),
            "state_bytes": held / moved.numel(),
            "update_error": relative_error(moved, exact),
        }
        del parameters, optimizer, start
        gc.collect()
    return runs


# ------------------------------------------------------------------------------ loops to diagnose


class Loop(NamedTuple):
    """A loop to diagnose: its workload, its recipe, and which fixes are measured."""

    workload: str
    recipe: Recipe
    fixes: tuple[str, ...]


_RECOMPUTED = {"checkpointing": "blocks"}
LOOPS = {
    "SD1.5": Loop("sd15-lora", STOCK, ("workers", "batch size", "capture", "caching")),
    "LLaVA": Loop(
        "llava-lora", A2_BASE.but(**_RECOMPUTED), ("workers", "checkpointing", "caching")
    ),
    "Qwen3": Loop(
        "qwen3-lora-long",
        A3_BASE.but(optimizer="adamw", layers="rewritten", **_RECOMPUTED),
        ("checkpointing", "padding"),
    ),
    "Qwen3 in fp32": Loop(
        "qwen3-lora-short",
        A3_BASE.but(precision="fp32", **_RECOMPUTED),
        ("precision", "checkpointing"),
    ),
}
"""The articles' own starting points, but for choices that those had made already: products in fp32;
blocks that compute again; the optimizer as PyTorch picks it; layers that take packed rows. Fixes
were chosen before anything was predicted."""


# ----------------------------------------------------------------------- the environment's switches

IN_ITS_OWN_PROCESS = Recipe(
    driver="eager", logging="ring-buffer", num_workers=4, persistent_workers=True
)
"""A loop in which host and GPU could work side by side: nothing is read while training, images come
from workers.
"""


ALONE_S = 300.0
"""How long processes of their own may take."""
_CHILD = ("-W", "ignore", "-m", "labutils.labs.lab09_toggles")


def trained_alone(
    workload: Workload, recipe: Recipe, steps: int, environments: Mapping[str, Mapping[str, str]]
) -> dict[str, Run]:
    """Name -> a recipe's run in a process of its own, with that name's environment variables: what
    they switch is read once, when PyTorch starts. The processes get ready side by side, and are
    timed one after the other."""
    order = workload.opened_as() | {
        "device": workload.device.type,
        "recipe": recipe.as_dict(),
        "steps": steps,
    }
    with contextlib.ExitStack() as stack:
        children = {
            name: stack.enter_context(
                Child(_CHILD, order, ALONE_S, {"TQDM_DISABLE": "1"} | dict(settings))
            )
            for name, settings in environments.items()
        }
        words = {name: child.receive() for name, child in children.items()}
        return {
            name: _told_by(child, words[name], workload, recipe, name)
            for name, child in children.items()
        }


def _told_by(child: Child, word: Any, workload: Workload, recipe: Recipe, name: str) -> Run:
    """The run that a child measures once it is told to go. Its first `word` is "ready", or why it
    failed before."""
    told = word
    if word == "ready":
        child.send("go")
        told = child.receive()
    if told is None:
        return Run("", name, status=f"error: {child.failure()}")
    return replace(empty_run(workload, recipe, name), **told)


def visible_gpus(*variables: str) -> list[int]:
    """The GPUs that new processes see, one with CUDA_VISIBLE_DEVICES set to each of these."""
    program = f"import torch; print('{MESSAGE}', torch.cuda.device_count())"
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(["-c", program], environment={"CUDA_VISIBLE_DEVICES": variable})
            )
            for variable in variables
        ]
        return [child.receive() for child in children]


def _main() -> None:
    """The child's side: an order on standard input, word that all is ready on standard output, and,
    once it is told to go, the run as the last line."""
    order = child_process.order()
    recipe, steps = Recipe(**order.pop("recipe")), order.pop("steps")
    workload = open_workload(**order)
    run = empty_run(workload, recipe, "alone")
    # Not `train`, which measures what the machine reaches first: that takes longer than all steps
    # do.
    try:
        with contextlib.closing(Candidate(workload, recipe, warmup=1)) as candidate:
            time.sleep(
                REFILL_S
            )  # its workers have read ahead by then, and leave the other process alone
            child_process.send("ready")
            child_process.order()
            times = StepTimes()
            times.extend(candidate.measure(steps))
            candidate.report_times(run, times)
    except Exception as error:
        run.status = status_of(error)
    child_process.send({"status": run.status, "metrics": run.metrics, "samples": run.samples})


if __name__ == "__main__":
    _main()
