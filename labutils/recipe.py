"""What can be tuned about a run, and nothing about what is trained.

A recipe is frozen data, one field a knob. The defaults are article A1's starting point: the public
diffusers text-to-image LoRA script as downloaded. `recipe.but(num_workers=3)` makes the next
recipe, and `new.changes_from(old)` prints as the difference, so that every comparison in the course
shows what was changed.

A recipe says what the person asked for. `recipe.fitted_to("cpu")` says what a machine without a
CUDA device can do of it; results always hold the fitted recipe, so that what is on record is what
ran.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


def knob(
    default: Any,
    help: str,
    choices: tuple[Any, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that knows its documentation and what it accepts."""
    limits = {"at_least": at_least, "at_most": at_most, "above": above}
    return field(default=default, metadata={"help": help, "choices": choices} | limits)


@dataclass(frozen=True)
class Recipe:
    """Everything tunable about a run. Raises `ValueError` naming the knob, what it got and what it
    takes.
    """

    # the data path
    num_workers: int = knob(
        0,
        "DataLoader worker processes; 0 decodes in the training process",
        at_least=0,
        at_most=1024,
    )
    persistent_workers: bool = knob(False, "keep the workers from one epoch to the next")
    prefetch_factor: int = knob(2, "batches each worker holds ready", at_least=1)
    pin_memory: bool = knob(False, "page-lock batches on the host, so that copies need no staging")
    non_blocking: bool = knob(False, "let the host run on while a batch is copied to the device")
    cache: str = knob(
        "nothing",
        "what the frozen encoders are asked only once: VAE moments (re-sampled each step), and "
        "text embeddings; or a "
        "vision tower's features",
        ("nothing", "latents", "latents+text", "features"),
    )

    shapes: str = knob(
        "as-they-come",
        "batches of texts, with images or without. as-they-come: padded to the batch's longest; "
        "fixed: images forced "
        "to one tile's square, texts padded to token_budget; padded: to token_budget; buckets: to "
        "the next of a few "
        "lengths; packed: as many examples in a row as token_budget holds, apart from each other",
        ("as-they-come", "fixed", "padded", "buckets", "packed"),
    )
    token_budget: int = knob(
        2048,
        "tokens of a row of fixed length, at full scale (smaller scales have smaller images, or "
        "texts)",
        at_least=128,
        at_most=2**17,
    )

    # the optimizer step
    micro_batch: int = knob(
        1,
        "examples in one forward and backward pass; rows of them where shapes='packed'",
        at_least=1,
    )
    accumulation: int = knob(4, "micro-batches in one optimizer step", at_least=1)
    optimizer: str = knob(
        "adamw",
        "adamw: as PyTorch picks it; adamw-loop: tensor by tensor; adamw-foreach: all tensors in a "
        "few kernels; "
        "adamw-fused: in one; adamw-8bit: moments in 8 bits, by bitsandbytes; adamw-paged: those "
        "in pages that move to "
        "the host where the GPU is full",
        ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "adamw-8bit", "adamw-paged"),
    )
    learning_rate: float = knob(1e-4, "constant learning rate", at_least=0)
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm", above=0)

    # the adapter
    rank: int = knob(4, "rank r of the LoRA matrices", at_least=1)
    adapter: str = knob(
        "peft",
        "peft: PEFT's layers; plain: the two products written out; folded: W + BA formed once a "
        "pass; none: no LoRA, "
        "every weight of the trained network is trained, held in float32",
        ("peft", "plain", "folded", "none"),
    )
    base_linear: str = knob(
        "published",
        "how the frozen linear layers hold and multiply their weights: published: as they come; "
        "fp8-frozen: held once "
        "in FP8, a scale a row; fp8-te: Transformer Engine's te.Linear, delayed scaling; "
        "fp8-torchao: torchao's "
        "Float8Linear; nf4: 4 bits, double quantisation (QLoRA), by bitsandbytes; nf4-frozen: the "
        "same bytes unpacked "
        "inside the compiled graph; nf4-fp8: those unpacked to FP8",
        ("published", "fp8-frozen", "fp8-te", "fp8-torchao", "nf4", "nf4-frozen", "nf4-fp8"),
    )

    # how the computation is driven
    precision: str = knob(
        "fp16",
        "fp32; or frozen weights and matrix products in fp16 (autocast, loss scaling) or bf16 "
        "(autocast)",
        ("fp32", "fp16", "bf16"),
    )
    tf32: str = knob(
        "convolutions",
        "which float32 products round their inputs to TF32's 10 bits of mantissa: convolutions, as "
        "PyTorch does by "
        "default; nothing; everything: matrix products as well",
        ("nothing", "convolutions", "everything"),
    )
    driver: str = knob(
        "accelerate",
        "who drives the step: the accelerate library, plain PyTorch, or one CUDA graph of the "
        "whole optimizer step",
        ("accelerate", "eager", "graph"),
    )
    compile: str = knob(
        "off",
        "torch.compile's mode",
        ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    compile_scope: str = knob(
        "model",
        "what is compiled: the trained model, its repeated blocks one by one, or the frozen "
        "encoders as well",
        ("model", "blocks", "everything"),
    )
    dynamic: str = knob(
        "static",
        "sizes in compiled code. static: the very ones given, compiled anew for others; automatic: "
        "PyTorch's default, "
        "static until a size changes, any from then on; any: from the start",
        ("static", "automatic", "any"),
    )
    checkpointing: str = knob(
        "off",
        "what the forward pass keeps for the backward pass: everything; blocks: blocks' inputs, "
        "and blocks compute "
        "again; selective: those and the results of attention and matrix products, and the rest is "
        "computed again; "
        "offload: blocks' inputs, which wait on the host",
        ("off", "blocks", "selective", "offload"),
    )
    predict: str = knob(
        "answers",
        "what a text model is trained to predict: the answer's tokens, or everything: the prompt's "
        "as well",
        ("answers", "everything"),
    )
    loss: str = knob(
        "logits",
        "a language model's loss from whole logits; fused: chunk by chunk, none kept; answers: "
        "only where there is one",
        ("logits", "fused", "answers"),
    )
    memory_format: str = knob(
        "contiguous", "layout of images and convolution weights", ("contiguous", "channels_last")
    )
    layers: str = knob(
        "published",
        "published: as the library writes them; rewritten: the same functions in forms that "
        "compile to less work",
        ("published", "rewritten"),
    )
    attention: str = knob(
        "auto",
        "the attention kernel: PyTorch's choice, or the named one",
        ("auto", "math", "flash", "efficient", "cudnn"),
    )
    streams: int = knob(
        1,
        "micro-batches of one step that are on the GPU side by side; more than 1 needs "
        "driver='graph'",
        at_least=1,
    )
    cudnn_benchmark: bool = knob(
        False, "let cuDNN time its algorithms for each shape once and keep the fastest"
    )
    logging: str = knob(
        "synchronous",
        "synchronous: read the loss each micro-step, write each step; ring-buffer: keep it on the "
        "device, write later",
        ("synchronous", "ring-buffer"),
    )

    # several processes, where torchrun started any
    parallel: str = knob(
        "ddp",
        "how the processes that torchrun started share the training. ddp: a model each, gradients "
        "averaged; fsdp: "
        "every weight cut among them, gathered where it is used",
        ("ddp", "fsdp"),
    )
    synchronise: str = knob(
        "last",
        "when ddp averages gradients: after the last micro-batch of a step (`no_sync` before), or "
        "after each",
        ("last", "each"),
    )
    bucket_cap_mb: int = knob(
        0,
        "MiB of gradients that ddp sends at once; 0: PyTorch's 25, and 1 in the first",
        at_least=0,
        at_most=2**16,
    )
    gradient_as_bucket_view: bool = knob(
        False, "ddp: gradients live in the buckets that are sent, not beside them"
    )
    static_graph: bool = knob(
        False, "ddp: trust that every step uses the same parameters, in the same way"
    )

    seed: int = knob(0, "seed of weights, data order and noise", at_least=0, at_most=2**63 - 1)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check(spec, getattr(self, spec.name))
        if self.persistent_workers and self.num_workers == 0:
            raise ValueError(
                "persistent_workers=True needs num_workers of 1 or more: there is no worker to "
                "keep."
            )
        if self.adapter == "none" and self.base_linear != "published":
            raise ValueError(
                f"adapter='none' trains every weight, and base_linear={self.base_linear!r} holds "
                "them in a form for "
                "frozen ones. Use base_linear='published'."
            )
        if self.adapter == "folded" and self.base_linear != "published":
            raise ValueError(
                "adapter='folded' adds the low-rank update to the weights, and "
                f"base_linear={self.base_linear!r} holds "
                "them in a form that nothing can be added to. Use adapter='plain' or 'peft'."
            )
        if self.streams > 1 and self.driver != "graph":
            raise ValueError(
                f"streams={self.streams} needs driver='graph': launched from the host one by one, "
                "micro-batches on "
                "several streams would wait for the host just the same."
            )
        if self.driver == "graph" and self.optimizer in ("adamw-8bit", "adamw-paged"):
            raise ValueError(
                f"optimizer={self.optimizer!r} counts its steps on the host, which driver='graph' "
                "would record once. "
                "Use optimizer='adamw-fused'."
            )
        if self.driver == "graph" and self.logging == "synchronous":
            raise ValueError(
                "driver='graph' captures the whole optimizer step, and reading the loss inside it "
                "would need the host. "
                "Use logging='ring-buffer'."
            )
        if self.driver == "graph" and self.compile in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile={self.compile!r} makes CUDA graphs of its own, and one graph can't be "
                "captured inside "
                "another. Use compile='default' or 'max-autotune-no-cudagraphs' with "
                "driver='graph'."
            )

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some knobs set differently."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a knob of a recipe. The knobs are: "
                    f"{', '.join(sorted(known))}."
                )
        return dataclasses.replace(self, **changes)

    def changes_from(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """Knob -> (value in `other`, value here), for the knobs that differ."""
        pairs = (
            (s.name, getattr(other, s.name), getattr(self, s.name))
            for s in dataclasses.fields(self)
        )
        return {name: (before, after) for name, before, after in pairs if before != after}

    def fitted_to(self, device: str) -> Recipe:
        """What a `device` ("cuda" or "cpu") can do of this recipe.

        A CPU has no tensor cores that take fp16, no CUDA graphs or streams, no page-locked copies,
        no cuDNN: there, precision becomes fp32 without TF32, paged moments stay where they are, the
        graph driver becomes the eager one, and compilation keeps only its default mode. The frozen
        layers' format stays what it is: FP8 is emulated with the same rounding, NF4 runs, and what
        neither can be (Transformer Engine, torchao) says so when it is built.
        """
        if device == "cuda":
            return self
        return self.but(
            precision="fp32",
            tf32=type(self).tf32,
            optimizer="adamw-8bit" if self.optimizer == "adamw-paged" else self.optimizer,
            driver="eager" if self.driver == "graph" else self.driver,
            streams=1,
            cudnn_benchmark=False,
            compile="off" if self.compile == "off" else "default",
            pin_memory=False,
            non_blocking=False,
            attention="auto",
        )

    @property
    def examples_per_step(self) -> int:
        """Examples one optimizer step consumes."""
        return self.micro_batch * self.accumulation

    def as_dict(self) -> dict[str, Any]:
        """Plain data for results.jsonl."""
        return dataclasses.asdict(self)


def _check(spec: dataclasses.Field, value: Any) -> None:
    """Raise `ValueError` unless `value` has the type of the knob's default and is among what the
    knob takes.
    """
    kind = type(spec.default)
    right_type = (
        isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float
        else type(value) is kind
    )
    if not right_type:
        raise ValueError(
            f"{spec.name}={value!r} is a {type(value).__name__}; this knob takes a {kind.__name__}."
        )
    if kind is float and not is_finite(value):
        raise ValueError(
            f"{spec.name}={value!r} is not a finite number, and this knob takes one, e.g. "
            f"{spec.default}."
        )
    choices, at_least = spec.metadata["choices"], spec.metadata["at_least"]
    at_most, above = spec.metadata["at_most"], spec.metadata["above"]
    if choices and value not in choices:
        raise ValueError(
            f"{spec.name}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}."
        )
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{spec.name}={value!r} is too small: it must be {at_least} or more.")
    if above is not None and not value > above:
        raise ValueError(f"{spec.name}={value!r} is too small: it must be above {above}.")
    if at_most is not None and not value <= at_most:
        raise ValueError(f"{spec.name}={value!r} is too large: it must be {at_most} or less.")


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
