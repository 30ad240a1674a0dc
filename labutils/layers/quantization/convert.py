"""The kinds of frozen linear layer behind the recipe's knob `base_linear`, and the swap that puts
them into a model.

    attach_lora(model, targets, ...)                           first the adapters,
    convert_base(model, frozen_linears(model), "fp8-frozen")   then the layers under them
    with forward_context("fp8-te"): loss = ...                 Transformer Engine is told each pass

What each kind holds for a weight of n parameters, and multiplies with:

- published: 2n bytes, in the weights' dtype.
- fp8-frozen: n bytes, FP8, a scale a row, from the row itself (`fp8_linear`).
- fp8-te: 2n bytes, and 2n more while it runs; FP8, a scale a tensor, from its history: Transformer
  Engine as in article A2. Each pass makes an FP8 copy of the weight and that copy's transpose.
- nf4: 0.52 n bytes, unpacked to the compute dtype before each product (QLoRA), by bitsandbytes.
- nf4-frozen: the same bytes, unpacked by operations that a compiler sees (`nf4_linear`).

A library or GPU that isn't there raises `labutils.recipe.Unavailable`, before anything is changed.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from labutils.layers.quantization.fp8_linear import MULTIPLE, FrozenFP8Linear
from labutils.layers.quantization.nf4_linear import FrozenNF4Linear
from labutils.recipe import Unavailable, check_choice

BYTES_READ = {"fp8-frozen": 1.0, "fp8-te": 1.0, "nf4": 0.516, "nf4-frozen": 0.516}
"""Kind -> bytes of a converted weight, constants included, that a pass must read; others have the
model's own.
"""

PRODUCTS = {"fp8-frozen": "fp8_rowwise", "fp8-te": "fp8"}
"""Kind -> what its products are multiplied as, where that isn't the recipe's precision
(`profiling.measured_rates.ITEMS`).
"""


def frozen_linears(model: nn.Module, skip: Iterable[str] = ()) -> list[str]:
    """Names of the frozen nn.Linear layers that an 8-bit product takes (both widths multiples of
    16), in order.

    Names are those of the layers themselves ("...q_proj.base_layer" under an adapter). What has one
    of `skip` among the parts of its name ("lm_head", "vision_tower") is left out.
    """
    skipped = {"lora_A", "lora_B", *skip}
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and not layer.weight.requires_grad
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        and not skipped & set(name.split("."))
    ]


def convert_base(
    model: nn.Module, names: Iterable[str], kind: str, compute_dtype: torch.dtype = torch.bfloat16
) -> None:
    """Put layers of `kind` in the place of the frozen nn.Linear layers called `names`, in place;
    adapters around them stay what they are.

    `compute_dtype` is what "nf4" multiplies in and "fp8-te" keeps weights in. Layer after layer is
    converted and its old weight let go, so that no more than one is held twice; what others hold
    (another model around the same weights) stays in memory. "fp8-te" keeps the old weights by
    design.

    Raises `Unavailable` where a library or the GPU is missing, before anything is changed;
    `ValueError` for an unknown kind, or a layer that doesn't go.
    """
    if kind == "published":
        return
    check_choice("kind", kind, tuple(MAKERS))
    make = MAKERS[kind](compute_dtype)
    for name in names:
        linear = model.get_submodule(name)
        model.set_submodule(name, make(linear).train(linear.training))
        del linear
    gc.collect()


def forward_context(kind: str) -> AbstractContextManager:
    """The context that a forward pass through layers of `kind` needs: Transformer Engine's autocast
    for "fp8-te".

    Outside it te.Linear multiplies in half precision without a word. Scales are renewed as the
    context is left.
    """
    if kind != "fp8-te":
        return nullcontext()
    te = transformer_engine()
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    return te.autocast(enabled=True, recipe=recipe)


def forget_scales() -> None:
    """Begin anew with what Transformer Engine knows of AMAX values: it keeps those of every layer
    that the process has ever had, and renews the scales of all of them in each step. Where it was
    not imported, it knows nothing."""
    if known := sys.modules.get("transformer_engine.pytorch.quantization"):
        known.FP8GlobalStateManager.reset()


def recomputing(kind: str) -> Callable[..., Any]:
    """What computes a block once more in the backward pass, as it did the first time: (block,
    *args) -> output.

    Transformer Engine renews its scales between the two, so it brings a function of its own that
    keeps the old ones.
    """
    library = transformer_engine() if kind == "fp8-te" else torch.utils.checkpoint
    return functools.partial(library.checkpoint, use_reentrant=False)


# -------------------------------------------------------------------------------------------------
# The makers: each checks that its library is there, and gives what turns one nn.Linear into a layer
# of its kind

Make = Callable[[nn.Linear], nn.Module]


def _transformer_engine(compute_dtype: torch.dtype) -> Make:
    te = transformer_engine()

    def make(linear: nn.Linear) -> nn.Module:
        layer = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=compute_dtype,
            device=linear.weight.device,
        )
        with torch.no_grad():
            layer.weight.copy_(linear.weight)
            if linear.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer.requires_grad_(False)

    return make


def _bitsandbytes(compute_dtype: torch.dtype) -> Make:
    with _installed_by("make install", "bitsandbytes"):
        from bitsandbytes.nn import Linear4bit, Params4bit
    stored: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}

    def make(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features
        with torch.device("meta"):
            layer = Linear4bit(*sizes, bias=False, compute_dtype=compute_dtype, **stored)
        weight = linear.weight.detach()
        layer.weight = Params4bit(weight, requires_grad=False, module=layer, **stored).to(
            weight.device
        )
        layer.bias = linear.bias
        return layer

    return make


def _frozen_nf4(compute_dtype: torch.dtype) -> Make:
    with _installed_by("make install", "bitsandbytes"):
        import bitsandbytes  # noqa: F401  it makes the bytes
    return FrozenNF4Linear.from_linear


MAKERS: dict[str, Callable[[torch.dtype], Make]] = {
    "fp8-frozen": lambda compute_dtype: FrozenFP8Linear.from_linear,
    "fp8-te": _transformer_engine,
    "nf4": _bitsandbytes,
    "nf4-frozen": _frozen_nf4,
}
"""Kind -> compute dtype -> what makes one such layer of a frozen nn.Linear."""


def transformer_engine() -> ModuleType:
    """The module `transformer_engine.pytorch`. Raises `Unavailable` where it or an FP8 GPU is
    missing."""
    _require_fp8_gpu("Transformer Engine's FP8")
    with _installed_by("make te", "Transformer Engine"):
        # The package itself can be imported without its PyTorch extension, and hides that this
        # failed.
        import transformer_engine.pytorch as te
    return te


@contextmanager
def _installed_by(command: str, library: str) -> Iterator[None]:
    """A context that imports `library`, and raises `Unavailable` where that fails.

    What is built for another PyTorch or driver raises more than `ImportError`.
    """
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise Unavailable(
            f"{library} can't be imported ({type(error).__name__}: {reason}). Install it with: "
            f"{command}"
        ) from error


def _require_fp8_gpu(what: str) -> None:
    """Raise `Unavailable` unless the GPU has FP8 tensor cores: compute capability 8.9 or more."""
    if not torch.cuda.is_available():
        raise Unavailable(f"{what} needs an NVIDIA GPU, and there is none here")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise Unavailable(
            f"{what} needs compute capability 8.9 or more, and this GPU has {major}.{minor}"
        )
