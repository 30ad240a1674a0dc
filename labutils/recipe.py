"""What can be tuned about a run, and nothing about what is trained.

A recipe is frozen data, one field a knob. The defaults are article A1's starting point: the public
diffusers text-to-image LoRA script as downloaded. `recipe.but(num_workers=3)` makes the next
recipe.

A recipe says what the person asked for. `recipe.fitted_to("cpu")` says what a machine without a
CUDA device can do of it; results always hold the fitted recipe, so that what is on record is what
ran.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def knob(
    default: Any,
    choices: tuple[Any, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that knows what it accepts."""
    limits = {"choices": choices, "at_least": at_least, "at_most": at_most, "above": above}
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Recipe:
    """Everything tunable about a run. Raises `ValueError` naming the knob, what it got and what it
    takes.
    """

    # the data path
    num_workers: int = knob(0, at_least=0, at_most=1024)
    """DataLoader worker processes; 0 decodes in the training process."""
    persistent_workers: bool = knob(False)
    """Keep the workers from one epoch to the next."""
    prefetch_factor: int = knob(2, at_least=1)
    """Batches each worker holds ready."""
    pin_memory: bool = knob(False)
    """Page-lock batches on the host, so that copies need no staging."""
    non_blocking: bool = knob(False)
    """Let the host run on while a batch is copied to the device."""
    cache: str = knob("nothing", ("nothing", "latents+text", "features"))
    """What the frozen encoders are asked only once: VAE moments (re-sampled each step) and text
    embeddings, or a vision tower's features."""

    shapes: str = knob("as-they-come", ("as-they-come", "fixed", "padded", "packed"))
    """Batches of texts, with images or without. as-they-come: padded to the batch's longest; fixed:
    images forced to one tile's square, texts padded to token_budget; padded: to token_budget;
    packed: as many examples in a row as token_budget holds, apart from each other."""
    token_budget: int = knob(2048, at_least=128, at_most=2**17)
    """Tokens of a row of fixed length, at full scale (smaller scales have smaller images, or
    texts)."""

    # the optimizer step
    micro_batch: int = knob(1, at_least=1)
    """Examples in one forward and backward pass; rows of them where shapes='packed'."""
    accumulation: int = knob(4, at_least=1)
    """Micro-batches in one optimizer step."""
    optimizer: str = knob("adamw", ("adamw", "adamw-fused", "adamw-8bit"))
    """adamw: as PyTorch picks it; adamw-fused: all tensors in one kernel; adamw-8bit: moments in 8
    bits, by bitsandbytes."""
    learning_rate: float = knob(1e-4, at_least=0)
    """Constant learning rate."""
    max_grad_norm: float = knob(1.0, above=0)
    """Gradients are scaled down to this norm."""

    # the adapter
    rank: int = knob(4, at_least=1)
    """Rank r of the LoRA matrices."""
    adapter: str = knob("peft", ("peft", "plain", "folded", "none"))
    """peft: PEFT's layers; plain: the two products written out; folded: W + BA formed once a pass;
    none: no LoRA, every weight of the trained network is trained, held in float32."""
    base_linear: str = knob("published", ("published", "fp8-frozen", "fp8-te", "nf4", "nf4-frozen"))
    """How the frozen linear layers hold and multiply their weights: published: as they come;
    fp8-frozen: held once in FP8, a scale a row; fp8-te: Transformer Engine's te.Linear, delayed
    scaling; nf4: 4 bits, double quantisation (QLoRA), by bitsandbytes; nf4-frozen: the same bytes
    unpacked inside the compiled graph."""

    # how the computation is driven
    precision: str = knob("fp16", ("fp32", "fp16", "bf16"))
    """fp32; or frozen weights and matrix products in fp16 (autocast, loss scaling) or bf16
    (autocast)."""
    tf32: str = knob("convolutions", ("nothing", "convolutions", "everything"))
    """Which float32 products round their inputs to TF32's 10 bits of mantissa: convolutions, as
    PyTorch does by default; nothing; everything: matrix products as well."""
    driver: str = knob("accelerate", ("accelerate", "eager", "graph"))
    """Who drives the step: the accelerate library, plain PyTorch, or one CUDA graph of the whole
    optimizer step."""
    compile: str = knob("off", ("off", "default", "reduce-overhead", "max-autotune"))
    """torch.compile's mode."""
    compile_scope: str = knob("model", ("model", "blocks"))
    """What is compiled: the trained model, or its repeated blocks one by one."""
    dynamic: str = knob("static", ("static", "automatic", "any"))
    """Sizes in compiled code. static: the very ones given, compiled anew for others; automatic:
    PyTorch's default, static until a size changes, any from then on; any: from the start."""
    checkpointing: str = knob("off", ("off", "blocks", "selective", "offload"))
    """What the forward pass keeps for the backward pass: everything; blocks: blocks' inputs, and
    blocks compute again; selective: those and the results of attention and matrix products, and the
    rest is computed again; offload: blocks' inputs, which wait on the host."""
    predict: str = knob("answers", ("answers", "everything"))
    """What a text model is trained to predict: the answer's tokens, or everything: the prompt's as
    well."""
    loss: str = knob("logits", ("logits", "fused", "answers"))
    """A language model's loss from whole logits; fused: chunk by chunk, none kept; answers: only
    where there is one."""
    memory_format: str = knob("contiguous", ("contiguous", "channels_last"))
    """Layout of images and convolution weights."""
    layers: str = knob("published", ("published", "rewritten"))
    """published: as the library writes them; rewritten: the same functions in forms that compile to
    less work."""
    streams: int = knob(1, at_least=1)
    """Micro-batches of one step that are on the GPU side by side; more than 1 needs
    driver='graph'."""
    cudnn_benchmark: bool = knob(False)
    """Let cuDNN time its algorithms for each shape once and keep the fastest."""
    logging: str = knob("synchronous", ("synchronous", "ring-buffer"))
    """synchronous: read the loss each micro-step, write each step; ring-buffer: keep it on the
    device, write later."""

    # several processes, where torchrun started any
    parallel: str = knob("ddp", ("ddp", "fsdp"))
    """How the processes that torchrun started share the training. ddp: a model each, gradients
    averaged; fsdp: every weight cut among them, gathered where it is used."""
    synchronise: str = knob("last", ("last", "each"))
    """When ddp averages gradients: after the last micro-batch of a step (`no_sync` before), or
    after each."""
    bucket_cap_mb: int = knob(0, at_least=0, at_most=2**16)
    """MiB of gradients that ddp sends at once; 0: PyTorch's 25, and 1 in the first."""

    seed: int = knob(0, at_least=0, at_most=2**63 - 1)
    """Seed of weights, data order and noise."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            if not _takes(spec, value := getattr(self, spec.name)):
                raise ValueError(f"{spec.name}={value!r} is not possible. {_range(spec)}")
        for contradicts, why in CONTRADICTIONS:
            if contradicts(self):
                raise ValueError(why.format(**self.as_dict()))

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some knobs set differently."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a knob of a recipe. They are: {', '.join(sorted(known))}."
                )
        return dataclasses.replace(self, **changes)

    def fitted_to(self, device: str) -> Recipe:
        """What a `device` ("cuda" or "cpu") can do of this recipe.

        A CPU has no tensor cores that take fp16, no CUDA graphs or streams, no page-locked copies,
        no cuDNN: there, precision becomes fp32 without TF32, the graph driver becomes the eager
        one, and compilation keeps only its default mode. The frozen layers' format stays what it
        is: FP8 is emulated with the same rounding, NF4 runs, and Transformer Engine, which can be
        neither, says so when it is built.
        """
        if device == "cuda":
            return self
        return self.but(
            precision="fp32",
            tf32=type(self).tf32,
            driver="eager" if self.driver == "graph" else self.driver,
            streams=1,
            cudnn_benchmark=False,
            compile="off" if self.compile == "off" else "default",
            pin_memory=False,
            non_blocking=False,
        )

    @property
    def examples_per_step(self) -> int:
        """Examples one optimizer step consumes."""
        return self.micro_batch * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Plain data for results.jsonl."""
        return dataclasses.asdict(self)


def _takes(spec: dataclasses.Field, value: Any) -> bool:
    """Whether `value` has the type of the knob's default and lies within the knob's limits."""
    kind, limits = type(spec.default), spec.metadata
    return (
        (is_number(value) if kind is float else type(value) is kind)
        and (not limits["choices"] or value in limits["choices"])
        and (limits["at_least"] is None or value >= limits["at_least"])
        and (limits["at_most"] is None or value <= limits["at_most"])
        and (limits["above"] is None or value > limits["above"])
    )


def _range(spec: dataclasses.Field) -> str:
    """What a knob takes, in words."""
    limits = {name: limit for name, limit in spec.metadata.items() if limit not in (None, ())}
    if choices := limits.pop("choices", ()):
        return f"Choose one of: {', '.join(map(repr, choices))}."
    words = [f"{name.replace('_', ' ')} {value}" for name, value in limits.items()]
    return f"It takes a finite {type(spec.default).__name__}{', '.join(['', *words])}."


CONTRADICTIONS: tuple[tuple[Callable[[Recipe], bool], str], ...] = (
    (
        lambda r: r.persistent_workers and r.num_workers == 0,
        "persistent_workers=True needs num_workers of 1 or more: there is no worker to keep.",
    ),
    (
        lambda r: r.adapter in ("none", "folded") and r.base_linear != "published",
        "adapter={adapter!r} changes the weights themselves, and base_linear={base_linear!r} holds "
        "them in a form for frozen ones. Use base_linear='published', or another adapter.",
    ),
    (
        lambda r: r.streams > 1 and r.driver != "graph",
        "streams={streams} needs driver='graph': launched from the host one by one, micro-batches "
        "on several streams would wait for the host just the same.",
    ),
    (
        lambda r: r.driver == "graph" and r.optimizer != "adamw-fused",
        "optimizer={optimizer!r} asks the host whether to step or counts there, which "
        "driver='graph' would record once. Use optimizer='adamw-fused'.",
    ),
    (
        lambda r: r.driver == "graph" and r.logging == "synchronous",
        "driver='graph' captures the whole optimizer step, and reading the loss inside it would "
        "need the host. Use logging='ring-buffer'.",
    ),
    (
        lambda r: r.driver == "graph" and r.compile in ("reduce-overhead", "max-autotune"),
        "compile={compile!r} makes CUDA graphs of its own, and one graph can't be captured inside "
        "another. Use compile='default' with driver='graph'.",
    ),
)
"""Knobs that contradict each other: what must not be asked for together, and why."""


def is_finite(value: float) -> bool:
    """Whether a number is neither NaN nor infinite, nor too large a whole number for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


STOCK = Recipe()
"""Article A1's starting point: the public diffusers script with its defaults, micro-batch 1,
accumulation 4, fp16.
"""


SCALES = ("tiny", "small", "full")  # from the smallest


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` where `value` is none of `choices`; `what` names it."""
    if value not in choices:
        raise ValueError(
            f"{what}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}."
        )


class Unavailable(RuntimeError):
    """Something that this machine lacks (a library, a kind of GPU); the message says what, and how
    to get it.
    """
