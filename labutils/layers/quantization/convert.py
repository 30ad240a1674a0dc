"""The kinds of frozen linear layer behind the recipe's knob `base_linear`, and the swap that puts
them into a model.

    attach_lora(model, targets, ...)                              first the adapters,
    convert_base(model, frozen_linears(model), "fp8-frozen")      then the layers under them
    with forward_context("fp8-te"): loss = ...                    Transformer Engine wants to be told each pass

What each kind holds for a weight of n parameters, and multiplies with:

| kind        | held               | product                                                                |
|-------------|--------------------|------------------------------------------------------------------------|
| published   | 2n bytes           | in the weights' dtype                                                  |
| fp8-frozen  | n                  | FP8, a scale a row, from the row itself (`labutils.layers.quantization.fp8_linear`)     |
| fp8-te      | 2n, and 2n more    | FP8, a scale a tensor, from its history: Transformer Engine as in      |
|             | while it runs      | article A2. The half-precision weight stays; each pass makes an FP8    |
|             |                    | copy of it and that copy's transpose                                   |
| fp8-torchao | 2n, FP8 in passing | FP8, a scale a row, quantised anew each pass                           |
| nf4         | 0.52 n             | unpacked to the compute dtype before each product (QLoRA), by          |
|             |                    | bitsandbytes' kernels                                                  |
| nf4-frozen  | 0.52 n             | the same bytes unpacked to the input's dtype by operations that a      |
|             |                    | compiler sees (`labutils.layers.quantization.nf4_linear`)                              |
| nf4-fp8     | 0.52 n             | unpacked to FP8 with a scale a row, and multiplied as fp8-frozen does  |

A library or GPU that isn't there raises `labutils.recipe.Unavailable`, before anything is changed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from labutils.layers.quantization.fp8_linear import MULTIPLE, FrozenFP8Linear, check_weight
from labutils.layers.quantization.nf4_linear import FrozenNF4FP8Linear, FrozenNF4Linear
from labutils.recipe import Unavailable

FP8_CAPABILITY = (8, 9)
"""Compute capability from which tensor cores take FP8."""


BYTES_READ = {
    "fp8-frozen": 1.0,
    "fp8-te": 1.0,
    "nf4": 0.516,
    "nf4-frozen": 0.516,
    "nf4-fp8": 0.516,
}
"""Kind -> bytes of a converted weight, constants included, that a pass must read; others have the
model's own.
"""

PRODUCTS = {
    "fp8-frozen": "fp8_rowwise",
    "nf4-fp8": "fp8_rowwise",
    "fp8-torchao": "fp8_rowwise",
    "fp8-te": "fp8",
}
"""Kind -> what its products are multiplied as, where that isn't the recipe's precision
(`profiling.probe.RATES`).
"""


def frozen_linears(model: nn.Module, skip: Iterable[str] = ()) -> list[str]:
    """Names of the frozen nn.Linear layers that an 8-bit product takes (both widths multiples of
    16), in order.

    Names are those of the layers themselves ("...q_proj.base_layer" under an adapter). What has one
    of `skip` among the parts of its name ("lm_head", "vision_tower") is left out. Raises
    `ValueError` for one string in place of several.
    """
    _check_several("skip", skip)
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
) -> list[str]:
    """Put layers of `kind` in the place of the frozen nn.Linear layers called `names`, in place;
    returns their names.

    A name may be an adapted layer's: its base is then meant. So adapters of kind "peft" and "plain"
    stay what they are. `compute_dtype` is what "nf4" multiplies in and "fp8-te" keeps weights in.
    Layer after layer is converted and its old weight let go, so that no more than one is held
    twice; what others hold (another model around the same weights) stays in memory. "fp8-te" and
    "fp8-torchao" keep the old weights by design.

    Raises `Unavailable` where a library or the GPU is missing, `ValueError` for a kind or layer
    that doesn't go; nothing is changed then.
    """
    if kind == "published":
        return []
    if kind not in MAKERS:
        raise ValueError(
            f"kind={kind!r} is not known. Choose one of: "
            f"{', '.join(map(repr, ('published', *MAKERS)))}."
        )
    _check_several("names", names)
    places = list(dict.fromkeys(_place(model, name) for name in names))
    for place in places:
        _check_layer(model.get_submodule(place), place)
    make = MAKERS[kind](compute_dtype)
    for place in places:
        linear = model.get_submodule(place)
        model.set_submodule(place, make(linear).train(linear.training))
        del linear
    gc.collect()
    return places


def _check_several(what: str, names: Iterable[str]) -> None:
    """A string is an iterable of strings, too: of its letters."""
    if isinstance(names, str):
        raise ValueError(f"{what}={names!r} is one string. Give a list of names: [{names!r}].")


def _place(model: nn.Module, name: str) -> str:
    """Where in `model` the nn.Linear is that `name` names, itself or by its adapter."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"This {type(model).__name__} has no layer {name!r}. frozen_linears(model) lists those "
            "that go."
        ) from None
    if layer is model:
        raise ValueError(
            f"A {type(model).__name__} can't be replaced in itself. Put it into a module first: "
            'convert_base(nn.Sequential(layer), ["0"], kind).'
        )
    return f"{name}.base_layer" if hasattr(layer, "base_layer") else name


def _check_layer(layer: nn.Module, name: str) -> None:
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"{name!r} is a {type(layer).__name__}; only plain nn.Linear layers are converted."
        )
    if any(parameter.requires_grad for parameter in layer.parameters()):
        raise ValueError(
            f"{name!r} is trained. Only frozen layers are converted: attach the adapters first, or "
            "freeze it with "
            "requires_grad_(False)."
        )
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        raise ValueError(
            f"{name!r} has {layer.in_features} -> {layer.out_features} features; low-bit products "
            "take multiples of "
            f"{MULTIPLE}. Leave it out: frozen_linears(model) lists those that go."
        )
    try:
        check_weight(layer.weight, layer.bias, "a low-bit layer")
    except ValueError as error:
        raise ValueError(f"{name!r} can't be converted. {error}") from None


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
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def forget_scales() -> None:
    """Begin anew with what Transformer Engine knows of AMAX values: it keeps those of every layer
    that the process has ever had, and renews the scales of all of them in each step."""
    transformer_engine()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def recomputing(kind: str) -> Callable[..., Any]:
    """What computes a block once more in the backward pass, as it did the first time: (block,
    *args) -> output.

    Transformer Engine renews its scales between the two, so it brings a function of its own that
    keeps the old ones.
    """
    checkpoint = (
        transformer_engine().checkpoint if kind == "fp8-te" else torch.utils.checkpoint.checkpoint
    )
    return functools.partial(checkpoint, use_reentrant=False)


# -------------------------------------------------------------------------------------------------
# The makers: each checks that its library is there, and gives what turns one nn.Linear into a layer
# of its kind

Make = Callable[[nn.Linear], nn.Module]


def _frozen_fp8(compute_dtype: torch.dtype) -> Make:
    return FrozenFP8Linear.from_linear


def _frozen_nf4(compute_dtype: torch.dtype) -> Make:
    return FrozenNF4Linear.from_linear


def _frozen_nf4_fp8(compute_dtype: torch.dtype) -> Make:
    return FrozenNF4FP8Linear.from_linear


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


def _torchao(compute_dtype: torch.dtype) -> Make:
    _require_fp8_gpu("torchao's Float8Linear")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except Exception as error:  # built for another PyTorch, it fails with more than ImportError
        raise Unavailable(
            f"torchao can't be imported ({type(error).__name__}: {error}). Install it with: make "
            "torchao"
        ) from error
    config = Float8LinearConfig.from_recipe_name("rowwise")
    return lambda linear: convert_to_float8_training(linear, config=config)


def _nf4(compute_dtype: torch.dtype) -> Make:
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except (
        Exception
    ) as error:  # a library that doesn't fit the driver raises OSError or RuntimeError
        raise Unavailable(
            f"bitsandbytes can't be imported ({type(error).__name__}: {error}). Install the course "
            "again: make install"
        ) from error

    def make(linear: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            layer = Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=compute_dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
        weight = Params4bit(
            linear.weight.detach(),
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            module=layer,
        )
        layer.weight = weight.to(linear.weight.device)
        layer.bias = linear.bias
        return layer

    return make


MAKERS: dict[str, Callable[[torch.dtype], Make]] = {
    "fp8-frozen": _frozen_fp8,
    "fp8-te": _transformer_engine,
    "fp8-torchao": _torchao,
    "nf4": _nf4,
    "nf4-frozen": _frozen_nf4,
    "nf4-fp8": _frozen_nf4_fp8,
}
"""Kind -> compute dtype -> what makes one such layer of a frozen nn.Linear."""


def transformer_engine() -> ModuleType:
    """The module `transformer_engine.pytorch`. Raises `Unavailable` where it or an FP8 GPU is
    missing.
    """
    _require_fp8_gpu("Transformer Engine's FP8")
    try:
        # The package itself can be imported without its PyTorch extension, and hides that this
        # failed.
        import transformer_engine.pytorch as te
    except Exception as error:  # an empty package raises RuntimeError, a missing library OSError
        raise Unavailable(
            f"Transformer Engine can't be imported ({type(error).__name__}: {_first_line(error)}). "
            "It is compiled when "
            "it is installed, with a CUDA toolkit: make te"
        ) from error
    return te


def _require_fp8_gpu(what: str) -> None:
    """Raise `Unavailable` unless the GPU has FP8 tensor cores."""
    if not torch.cuda.is_available():
        raise Unavailable(
            f"{what} needs an NVIDIA GPU with FP8 tensor cores, and there is no GPU here"
        )
    has = torch.cuda.get_device_capability()
    if has < FP8_CAPABILITY:
        raise Unavailable(
            f"{what} needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or more, and "
            "this GPU has "
            f"{has[0]}.{has[1]}"
        )


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [""])[0]
