"""What can be tuned about a run, and nothing about what is trained.

A recipe is frozen data, one field a knob. The defaults are article A1's starting point: the public diffusers
text-to-image LoRA script as downloaded. `recipe.but(num_workers=3)` makes the next recipe, and `new.changes_from(old)`
prints as the difference, so that every comparison in the course shows what was changed.

A recipe says what the person asked for. `recipe.fitted_to("cpu")` says what a machine without a CUDA device can do of
it; results always hold the fitted recipe, so that what is on record is what ran.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
    """Everything tunable about a run. Raises `ValueError` naming the knob, what it got and what it takes."""

    # the data path
    num_workers: int = knob(
        0, "DataLoader worker processes; 0 decodes in the training process", at_least=0, at_most=1024
    )
    persistent_workers: bool = knob(False, "keep the workers from one epoch to the next")
    prefetch_factor: int = knob(2, "batches each worker holds ready", at_least=1)
    pin_memory: bool = knob(False, "page-lock batches on the host, so that copies need no staging")
    non_blocking: bool = knob(False, "let the host run on while a batch is copied to the device")
    cache: str = knob(
        "nothing",
        "what the frozen encoders are asked only once: VAE moments (re-sampled each step), and text embeddings; or a "
        "vision tower's features",
        ("nothing", "latents", "latents+text", "features"),
    )

    shapes: str = knob(
        "as-they-come",
        "batches of texts, with images or without. as-they-come: padded to the batch's longest; fixed: images forced "
        "to one tile's square, texts padded to token_budget; padded: to token_budget; buckets: to the next of a few "
        "lengths; packed: as many examples in a row as token_budget holds, apart from each other",
        ("as-they-come", "fixed", "padded", "buckets", "packed"),
    )
    token_budget: int = knob(
        2048,
        "tokens of a row of fixed length, at full scale (smaller scales have smaller images, or texts)",
        at_least=128,
        at_most=2**17,
    )

    # the optimizer step
    micro_batch: int = knob(
        1, "examples in one forward and backward pass; rows of them where shapes='packed'", at_least=1
    )
    accumulation: int = knob(4, "micro-batches in one optimizer step", at_least=1)
    optimizer: str = knob(
        "adamw",
        "adamw: as PyTorch picks it; adamw-loop: tensor by tensor; adamw-foreach: all tensors in a few kernels; "
        "adamw-fused: in one; adamw-8bit: moments in 8 bits, by bitsandbytes; adamw-paged: those in pages that move to "
        "the host where the GPU is full",
        ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "adamw-8bit", "adamw-paged"),
    )
    learning_rate: float = knob(1e-4, "constant learning rate", at_least=0)
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm", above=0)

    # the adapter
    rank: int = knob(4, "rank r of the LoRA matrices", at_least=1)
    adapter: str = knob(
        "peft",
        "peft: PEFT's layers; plain: the two products written out; folded: W + BA formed once a pass; none: no LoRA, "
        "every weight of the trained network is trained, held in float32",
        ("peft", "plain", "folded", "none"),
    )
    base_linear: str = knob(
        "published",
        "how the frozen linear layers hold and multiply their weights: published: as they come; fp8-frozen: held once "
        "in FP8, a scale a row; fp8-te: Transformer Engine's te.Linear, delayed scaling; fp8-torchao: torchao's "
        "Float8Linear; nf4: 4 bits, double quantisation (QLoRA), by bitsandbytes; nf4-frozen: the same bytes unpacked "
        "inside the compiled graph; nf4-fp8: those unpacked to FP8",
        ("published", "fp8-frozen", "fp8-te", "fp8-torchao", "nf4", "nf4-frozen", "nf4-fp8"),
    )

    # how the computation is driven
    precision: str = knob(
        "fp16",
        "fp32; or frozen weights and matrix products in fp16 (autocast, loss scaling) or bf16 (autocast)",
        ("fp32", "fp16", "bf16"),
    )
    tf32: str = knob(
        "convolutions",
        "which float32 products round their inputs to TF32's 10 bits of mantissa: convolutions, as PyTorch does by "
        "default; nothing; everything: matrix products as well",
        ("nothing", "convolutions", "everything"),
    )
    driver: str = knob(
        "accelerate",
        "who drives the step: the accelerate library, plain PyTorch, or one CUDA graph of the whole optimizer step",
        ("accelerate", "eager", "graph"),
    )
    compile: str = knob(
        "off",
        "torch.compile's mode",
        ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    compile_scope: str = knob(
        "model",
        "what is compiled: the trained model, its repeated blocks one by one, or the frozen encoders as well",
        ("model", "blocks", "everything"),
    )
    dynamic: str = knob(
        "static",
        "sizes in compiled code. static: the very ones given, compiled anew for others; automatic: PyTorch's default, "
        "static until a size changes, any from then on; any: from the start",
        ("static", "automatic", "any"),
    )
    checkpointing: str = knob(
        "off",
        "what the forward pass keeps for the backward pass: everything; blocks: blocks' inputs, and blocks compute "
        "again; selective: those and the results of attention and matrix products, and the rest is computed again; "
        "offload: blocks' inputs, which wait on the host",
        ("off", "blocks", "selective", "offload"),
    )
    predict: str = knob(
        "answers",
        "what a text model is trained to predict: the answer's tokens, or everything: the prompt's as well",
        ("answers", "everything"),
    )
    loss: str = knob(
        "logits",
        "a language model's loss from whole logits; fused: chunk by chunk, none kept; answers: only where there is one",
        ("logits", "fused", "answers"),
    )
    memory_format: str = knob("contiguous", "layout of images and convolution weights", ("contiguous", "channels_last"))
    layers: str = knob(
        "published",
        "published: as the library writes them; rewritten: the same functions in forms that compile to less work",
        ("published", "rewritten"),
    )
    attention: str = knob(
        "auto",
        "the attention kernel: PyTorch's choice, or the named one",
        ("auto", "math", "flash", "efficient", "cudnn"),
    )
    streams: int = knob(
        1, "micro-batches of one step that are on the GPU side by side; more than 1 needs driver='graph'", at_least=1
    )
    cudnn_benchmark: bool = knob(False, "let cuDNN time its algorithms for each shape once and keep the fastest")
    logging: str = knob(
        "synchronous",
        "synchronous: read the loss each micro-step, write each step; ring-buffer: keep it on the device, write later",
        ("synchronous", "ring-buffer"),
    )

    # several processes, where torchrun started any
    parallel: str = knob(
        "ddp",
        "how the processes that torchrun started share the training. ddp: a model each, gradients averaged; fsdp: "
        "every weight cut among them, gathered where it is used",
        ("ddp", "fsdp"),
    )
    synchronise: str = knob(
        "last",
        "when ddp averages gradients: after the last micro-batch of a step (`no_sync` before), or after each",
        ("last", "each"),
    )
    bucket_cap_mb: int = knob(
        0, "MiB of gradients that ddp sends at once; 0: PyTorch's 25, and 1 in the first", at_least=0, at_most=2**16
    )
    gradient_as_bucket_view: bool = knob(False, "ddp: gradients live in the buckets that are sent, not beside them")
    static_graph: bool = knob(False, "ddp: trust that every step uses the same parameters, in the same way")

    seed: int = knob(0, "seed of weights, data order and noise", at_least=0, at_most=2**63 - 1)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check(spec, getattr(self, spec.name))
        if self.persistent_workers and self.num_workers == 0:
            raise ValueError("persistent_workers=True needs num_workers of 1 or more: there is no worker to keep.")
        if self.adapter == "none" and self.base_linear != "published":
            raise ValueError(
                f"adapter='none' trains every weight, and base_linear={self.base_linear!r} holds them in a form for "
                "frozen ones. Use base_linear='published'."
            )
        if self.adapter == "folded" and self.base_linear != "published":
            raise ValueError(
                f"adapter='folded' adds the low-rank update to the weights, and base_linear={self.base_linear!r} holds "
                "them in a form that nothing can be added to. Use adapter='plain' or 'peft'."
            )
        if self.streams > 1 and self.driver != "graph":
            raise ValueError(
                f"streams={self.streams} needs driver='graph': launched from the host one by one, micro-batches on "
                "several streams would wait for the host just the same."
            )
        if self.driver == "graph" and self.optimizer in ("adamw-8bit", "adamw-paged"):
            raise ValueError(
                f"optimizer={self.optimizer!r} counts its steps on the host, which driver='graph' would record once. "
                "Use optimizer='adamw-fused'."
            )
        if self.driver == "graph" and self.logging == "synchronous":
            raise ValueError(
                "driver='graph' captures the whole optimizer step, and reading the loss inside it would need the host. "
                "Use logging='ring-buffer'."
            )
        if self.driver == "graph" and self.compile in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile={self.compile!r} makes CUDA graphs of its own, and one graph can't be captured inside "
                "another. Use compile='default' or 'max-autotune-no-cudagraphs' with driver='graph'."
            )

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some knobs set differently."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"{name!r} is not a knob of a recipe. The knobs are: {', '.join(sorted(known))}.")
        return dataclasses.replace(self, **changes)

    def changes_from(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """Knob -> (value in `other`, value here), for the knobs that differ."""
        pairs = ((s.name, getattr(other, s.name), getattr(self, s.name)) for s in dataclasses.fields(self))
        return {name: (before, after) for name, before, after in pairs if before != after}

    def fitted_to(self, device: str) -> Recipe:
        """What a `device` ("cuda" or "cpu") can do of this recipe.

        A CPU has no tensor cores that take fp16, no CUDA graphs or streams, no page-locked copies, no cuDNN: there,
        precision becomes fp32 without TF32, paged moments stay where they are, the graph driver becomes the eager one,
        and compilation keeps only its default mode. The frozen
        layers' format stays what it is: FP8 is emulated with the same rounding, NF4 runs, and what neither can be
        (Transformer Engine, torchao) says so when it is built.
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
    """Raise `ValueError` unless `value` has the type of the knob's default and is among what the knob takes."""
    kind = type(spec.default)
    right_type = (
        isinstance(value, int | float) and not isinstance(value, bool) if kind is float else type(value) is kind
    )
    if not right_type:
        raise ValueError(f"{spec.name}={value!r} is a {type(value).__name__}; this knob takes a {kind.__name__}.")
    if kind is float and not is_finite(value):
        raise ValueError(f"{spec.name}={value!r} is not a finite number, and this knob takes one, e.g. {spec.default}.")
    choices, at_least = spec.metadata["choices"], spec.metadata["at_least"]
    at_most, above = spec.metadata["at_most"], spec.metadata["above"]
    if choices and value not in choices:
        raise ValueError(f"{spec.name}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}.")
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
"""Article A1's starting point: the public diffusers script with its defaults, micro-batch 1, accumulation 4, fp16."""


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: what it changes of the rung below, in which lane, and why one would."""

    name: str
    lane: str
    changes: dict[str, Any]
    why: str


A1_LADDER = (
    Rung("stock", "article", {}, "the public script as downloaded"),
    Rung("workers", "article", {"num_workers": 3}, "decode images beside the training, not in it"),
    Rung("compile", "article", {"compile": "default"}, "fewer kernels, and less Python between them"),
    Rung("pinned", "article", {"pin_memory": True, "non_blocking": True}, "copy batches while the host goes on"),
    Rung("plain loop", "same work", {"driver": "eager"}, "the same calls without the library around them"),
    Rung("device log", "same work", {"logging": "ring-buffer"}, "no loss is read while training"),
    Rung("fused optimizer", "same work", {"optimizer": "adamw-fused"}, "one kernel, and it doesn't ask the host"),
    Rung(
        "more workers", "same work", {"num_workers": 8, "persistent_workers": True}, "a faster step eats images faster"
    ),
    Rung("whole-step graph", "same work", {"driver": "graph"}, "the GPU replays the step; the host launches once"),
    Rung(
        "channels last",
        "same work",
        {"memory_format": "channels_last", "layers": "rewritten", "cudnn_benchmark": True},
        "convolutions in the tensor cores' layout, and no layer that leaves it",
    ),
    Rung("encoders compiled", "same work", {"compile_scope": "everything"}, "the frozen networks launch kernels too"),
    Rung("side by side", "same work", {"streams": 4}, "one image's kernels don't fill the GPU; four images' do"),
    Rung(
        "cached latents",
        "same mathematics",
        {"cache": "latents", "num_workers": 0, "persistent_workers": False},
        "the VAE is frozen: ask it once, re-sample its answer each step",
    ),
    Rung(
        "cached text", "same mathematics", {"cache": "latents+text", "compile_scope": "model"}, "so is the text encoder"
    ),
    Rung(
        "merged batch",
        "same mathematics",
        {"micro_batch": 4, "accumulation": 1, "streams": 1},
        "the mean of four losses has the mean of their gradients",
    ),
    Rung("folded LoRA", "same mathematics", {"adapter": "folded"}, "form W + BA once, project one gradient"),
)
"""From article A1's starting point to as far as we get; each rung keeps the changes of those below it."""


A2_BASE = Recipe(
    accumulation=1,
    rank=8,
    precision="bf16",
    driver="eager",
    dynamic="automatic",
)
"""Article A2's starting point: a plain BF16 loop over images as they come, no workers, micro-batch 1."""

A2_LADDER = (
    Rung("bf16", "article", {}, "the plain loop, as the article starts"),
    Rung(
        "workers",
        "same work",
        {"num_workers": 2, "persistent_workers": True, "pin_memory": True, "non_blocking": True},
        "tiles are cut and copied beside the training",
    ),
    Rung(
        "no host waits",
        "same work",
        {"layers": "rewritten", "logging": "ring-buffer"},
        "places of image tokens are computed before, on the CPU, and no loss is read while training",
    ),
    Rung("fused optimizer", "same work", {"optimizer": "adamw-fused"}, "one kernel for all adapters"),
    Rung(
        "blocks compiled",
        "same work",
        {"compile": "default", "compile_scope": "blocks", "dynamic": "any"},
        "one block's code for all of them, and for any length",
    ),
    Rung(
        "packed",
        "same mathematics",
        {"shapes": "packed", "token_budget": 8192, "dynamic": "static", "loss": "fused"},
        "no padding, one shape, enough tokens for the GPU, and never all of their logits at once",
    ),
    Rung("answers only", "same mathematics", {"loss": "answers"}, "most tokens have nothing to predict"),
    Rung(
        "cached features",
        "same mathematics",
        {"cache": "features", "num_workers": 0, "persistent_workers": False},
        "the vision tower is frozen: ask it once",
    ),
)
"""From article A2's starting point on, AnyRes and BF16 kept; each rung keeps the changes of those below it."""


A3_BASE = Recipe(
    micro_batch=4,
    accumulation=1,
    rank=8,
    precision="bf16",
    driver="accelerate",
    dynamic="automatic",
    optimizer="adamw-fused",
    learning_rate=2e-4,
    max_grad_norm=0.3,
    pin_memory=True,
    predict="everything",
)
"""Article A3's starting point, its plain LoRA run of Qwen3-8B with a batch of 4: accelerate's loop as the trainers have
it, on whole conversations, with the fused AdamW that transformers takes from PyTorch 2.8 on. It names rank 8, alpha 16,
all seven projections and these rates. (TRL's configurations turn gradient checkpointing on by default as well; here it
is a method of its own, as it is one of the things that QLoRA brings along.)"""

A3_OWN = {
    "lora": A3_BASE,
    "qlora": A3_BASE.but(base_linear="nf4", checkpointing="blocks"),
    "qlora + offload": A3_BASE.but(base_linear="nf4", checkpointing="offload"),
}
"""Article A3's methods by name, in the lane "article". QLoRA's preparation turns checkpointing on; the last one sends
what is kept to the host, as unsloth's checkpointing does, with the library's layers otherwise."""

A3_LADDER = (
    Rung("lora", "article", {}, "accelerate's loop, as the article starts"),
    Rung("plain loop", "same work", {"driver": "eager"}, "the same calls without the library around them"),
    Rung(
        "plain adapters, device log",
        "same work",
        {"adapter": "plain", "logging": "ring-buffer", "non_blocking": True},
        "two thin products and nothing around them, and a host that waits for neither a loss nor a batch",
    ),
    Rung(
        "rewritten",
        "same work",
        {"layers": "rewritten"},
        "no mask, so the fastest attention kernel; experts in grouped products",
    ),
    Rung("fused loss", "same work", {"loss": "fused"}, "logits of 152 thousand words are never all there"),
    Rung(
        "packed",
        "same mathematics",
        {"shapes": "packed", "token_budget": 4096, "micro_batch": 1},
        "no padding, and every step of one shape",
    ),
    Rung(
        "blocks compiled",
        "same mathematics",
        {"compile": "default", "compile_scope": "blocks", "dynamic": "static"},
        "one block's code for all of them, for that shape, and one for the loss of a chunk of tokens",
    ),
    Rung("whole-step graph", "same mathematics", {"driver": "graph"}, "one shape can be replayed: a launch a step"),
)
"""From article A3's LoRA run on; each rung keeps the changes of those below it."""


def climb(ladder: tuple[Rung, ...], start: Recipe = STOCK) -> dict[str, Recipe]:
    """Rung's name -> recipe, each rung's changes on top of the one below."""
    recipes = {}
    for rung in ladder:
        start = start.but(**rung.changes)
        recipes[rung.name] = start
    return recipes


def distinct_on(device: str, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Those of a ladder's `recipes` that a `device` can tell from every rung below, in order."""
    found: dict[str, Recipe] = {}
    below: set[Recipe] = set()
    for name, recipe in recipes.items():
        fitted = recipe.fitted_to(device)
        if fitted not in below:
            found[name] = recipe
        below.add(fitted)
    return found
