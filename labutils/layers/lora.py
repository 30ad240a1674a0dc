"""LoRA: W' = W + (alpha / r) B A with W frozen, written out for reading and as PEFT builds it,
behind one call.

    parameters = attach_lora(unet, ("to_q", "to_k", "to_v", "to_out.0"), rank=4, alpha=4, kind="plain", seed=0)

Whatever the kind, an adapted layer has the same anatomy, that of PEFT's layers: `base_layer`, and
for each adapter by name `lora_A[name].weight` (r x in), `lora_B[name].weight` (out x r) and
`scaling[name]`, with `merge()`, `unmerge()`, `merged` and `set_adapter(name)`. So parameters have
the same names in every kind, and initialising, saving, loading, merging and switching are written
once. A further kind is one more entry in `KINDS` that keeps to this anatomy.

LoRA weights are float32 whatever the base weights are: they are small, and in half precision a
small step of the optimizer would round to nothing. The products are computed in the dtype of the
layer's input.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.recipe import check_choice

INITS = ("gaussian", "kaiming")
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."
BEYOND_LORA = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "modules_to_save",
    "fan_in_fan_out",
)
"""Fields of PEFT's configuration which, when set, mean another computation than the one here."""


# -------------------------------------------------------------------------------------------------
# The layer


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank updates: y = base(x) + alpha/r (x A^T) B^T for the
    adapter in use.

    `base` is the nn.Linear (in -> out) that is wrapped, and stays as it is. x is (..., in), y is
    (..., out). Called under autocast or without: A and B are cast to x's dtype, and their gradients
    come back in float32.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, name: str = "default") -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged = False
        self.add_adapter(name, rank, alpha)

    def add_adapter(self, name: str, rank: int, alpha: float) -> None:
        """Add an adapter of its own rank, zero in effect (B = 0), and use it."""
        weight = self.base_layer.weight
        where = {
            "device": weight.device,
            "dtype": torch.float64 if weight.dtype == torch.float64 else torch.float32,
        }
        self.lora_A[name] = nn.Linear(self.in_features, rank, bias=False, **where)
        self.lora_B[name] = nn.Linear(rank, self.out_features, bias=False, **where)
        nn.init.zeros_(self.lora_B[name].weight)
        self.scaling[name] = alpha / rank
        self.set_adapter(name)

    def set_adapter(self, name: str) -> None:
        """Use the adapter `name`, and train it alone; a layer that hasn't got it computes what its
        base does.
        """
        self.active_adapter = name
        for products in (self.lora_A, self.lora_B):
            for other, product in products.items():
                product.weight.requires_grad_(other == name)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        name = self.active_adapter
        if self.merged or name not in self.scaling:
            return y
        A, B = (products[name].weight.to(x.dtype) for products in (self.lora_A, self.lora_B))
        scaling = self.scaling[name]
        h = F.linear(x, A)  # (..., r)
        h = h if scaling == 1 else h * scaling  # scaled where it has r columns and not `out`
        return y + F.linear(h, B)

    @torch.no_grad()
    def merge(self) -> None:
        """W <- W + alpha/r B A: from here the layer costs what its base does, and its adapter gets
        no gradient.
        """
        if not self.merged and self.active_adapter in self.scaling:
            self.base_layer.weight.add_(self._update())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """W <- W - alpha/r B A: back to the base weights, up to the rounding of their dtype."""
        if self.merged:
            self.base_layer.weight.sub_(self._update())
            self.merged = False

    def _update(self) -> Tensor:
        """The whole out x in update of the adapter in use, in the LoRA weights' own dtype."""
        name = self.active_adapter
        return self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]

    # What other code reads off an nn.Linear is the base layer's.
    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features


# -------------------------------------------------------------------------------------------------
# Attaching


def attach_lora(
    module: nn.Module,
    targets: tuple[str, ...],
    rank: int,
    alpha: float,
    kind: str,
    init: str = "gaussian",
    seed: int | None = None,
    name: str = "default",
) -> list[nn.Parameter]:
    """Adapt the layers of `module` that `targets` name, freeze everything else, and return the new
    parameters.

    A target matches as in PEFT: the layer's whole name, or its end after a dot ("to_out.0" matches
    "mid_block.attn1.to_out.0"). `kind` is one of `KINDS`. A second call with another `name` puts a
    second adapter on the same layers, which is then the one in use.

    A is drawn as PEFT does: "gaussian", normal with deviation 1/r; "kaiming", uniform in
    +-1/sqrt(in); B is zero, so that training starts from the base model. Each A is drawn from
    `seed` and the layer's name alone, on the CPU: the kind, the device, the order of attaching and
    what else was drawn don't matter. Without `seed` PyTorch's CPU generator gives one.

    Raises `ValueError` for a rank below 1, an unknown kind or init, a name in use, or targets that
    match no layer.
    """
    check_choice("kind", kind, tuple(KINDS))
    check_choice("init", init, INITS)
    if rank < 1:
        raise ValueError(f"rank={rank}: a low-rank update needs a rank of 1 or more.")
    if any(name in layer.lora_A for layer in lora_layers(module).values()):
        raise ValueError(
            f"This model already has an adapter named {name!r}. Give the new one another name=."
        )
    names = matching_layers(module, targets)
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(
        devices=[]
    ):  # layers draw weights as they are built; those draws are thrown away
        KINDS[kind](module, names, rank, alpha, name, init)
    for layer in lora_layers(module).values():
        layer.set_adapter(name)
    _initialise(module, name, init, seed)
    trained = {id(p) for layer in lora_layers(module).values() for p in _matrices(layer, name)}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return [p for p in module.parameters() if id(p) in trained]


def matching_layers(module: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the layers that `targets` match by PEFT's rule, in the model's order. `ValueError`
    if none does.
    """
    if isinstance(targets, str):
        raise ValueError(
            f"targets={targets!r} is one string. Give a tuple of layer names: ({targets!r},)."
        )
    names = [
        n for n, _ in module.named_modules() if any(n == t or n.endswith("." + t) for t in targets)
    ]
    if not names:
        ends = sorted(
            {
                n.rpartition(".")[2]
                for n, layer in module.named_modules()
                if isinstance(layer, nn.Linear)
            }
        )
        raise ValueError(
            f"No layer of this {type(module).__name__} is named like "
            f"{', '.join(map(repr, targets))}. "
            f"Its linear layers end in: {', '.join(ends) or '(it has none)'}."
        )
    return names


def _attach_plain(
    module: nn.Module, names: list[str], rank: int, alpha: float, adapter: str, init: str
) -> None:
    """Put a LoRALinear in the place of each named nn.Linear, or one more adapter on the LoRALinear
    that is there.
    """
    layers = {name: module.get_submodule(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear | LoRALinear):
            raise ValueError(
                f"{name!r} is a {type(layer).__name__}; kind='plain' adapts nn.Linear layers. Use "
                "kind='peft'."
            )
    for name, layer in layers.items():
        if isinstance(layer, LoRALinear):
            layer.add_adapter(adapter, rank, alpha)
        else:
            module.set_submodule(name, LoRALinear(layer, rank, alpha, adapter))


def _attach_peft(
    module: nn.Module, names: list[str], rank: int, alpha: float, adapter: str, init: str
) -> None:
    """Have PEFT do it, through the model's own `add_adapter` where it is a diffusers or
    transformers model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=names,
        init_lora_weights="gaussian" if init == "gaussian" else True,
    )
    if hasattr(module, "add_adapter"):
        module.add_adapter(config, adapter)
    else:
        inject_adapter_in_model(config, module, adapter)
    for layer in lora_layers(module).values():
        for matrix in _matrices(layer, adapter):  # PEFT made them in the base weights' dtype
            matrix.data = matrix.data.to(
                torch.float64 if matrix.dtype == torch.float64 else torch.float32
            )


KINDS: dict[str, Callable[[nn.Module, list[str], int, float, str, str], None]] = {
    "peft": _attach_peft,
    "plain": _attach_plain,
}
"""Kind -> what attaches it: (module, names of the layers, rank, alpha, adapter's name, init); A is
drawn afterwards.
"""


@torch.no_grad()
def redraw_lora(
    module: nn.Module, seed: int, name: str = "default", init: str = "gaussian"
) -> None:
    """Put the adapter back to where a training with this `seed` starts: A drawn as by
    `attach_lora`, B zero.
    """
    for layer in lora_layers(module).values():
        if name in layer.lora_B:
            nn.init.zeros_(layer.lora_B[name].weight)
    _initialise(module, name, init, seed)


@torch.no_grad()
def _initialise(module: nn.Module, adapter: str, init: str, seed: int) -> None:
    """Draw every A from the seed and its layer's name; B is zero already."""
    for layer_name, layer in lora_layers(module).items():
        if adapter not in layer.lora_A or layer.lora_A[adapter].weight.is_meta:
            continue
        matrix = layer.lora_A[adapter].weight
        digest = hashlib.blake2s(f"{seed}/{layer_name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        rank, width = matrix.shape
        if init == "gaussian":
            drawn = torch.randn(rank, width, generator=generator) / rank
        else:
            drawn = (2 * torch.rand(rank, width, generator=generator) - 1) / math.sqrt(width)
        matrix.copy_(drawn)


# -------------------------------------------------------------------------------------------------
# What is attached


def lora_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> adapted layer, of whatever kind, in the model's order."""
    return {
        _layer_name(name): layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def adapter_state(module: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """The adapter's weights under PEFT's names, "<layer>.lora_A.weight" and
    "<layer>.lora_B.weight"; not copies.

    Raises `ValueError` where the model has no adapter of that name.
    """
    state = {}
    for layer_name, layer in _layers_with(module, name).items():
        state[f"{layer_name}.lora_A.weight"] = layer.lora_A[name].weight.detach()
        state[f"{layer_name}.lora_B.weight"] = layer.lora_B[name].weight.detach()
    return state


def switch(module: nn.Module, name: str) -> None:
    """Use the adapter `name` in the whole model, and train it alone: layers that haven't got it are
    as their base is.

    Raises `ValueError` where no layer has it, and while an adapter is merged.
    """
    _layers_with(module, name)
    layers = lora_layers(module)
    if any(layer.merged for layer in layers.values()):
        raise ValueError(
            "An adapter is merged into the base weights. Call unmerge(module) before switching to "
            "another."
        )
    for layer in layers.values():
        layer.set_adapter(name)


def merge(module: nn.Module) -> None:
    """W <- W + alpha/r B A in every adapted layer, in place; layers that are merged already are
    left alone.

    The base weights keep their dtype: half-precision weights round the sum, so that `unmerge`
    brings them back only to within that rounding. Raises `ValueError` for base weights that can't
    be added to (quantised ones).
    """
    layers = lora_layers(module)
    for layer_name, layer in layers.items():
        dtype = layer.base_layer.weight.dtype
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f"The base weights of {layer_name!r} are {dtype}: an update can't be added to them "
                "in place."
            )
    for layer in layers.values():
        if not layer.merged:
            layer.merge()


def unmerge(module: nn.Module) -> None:
    """Take merged updates out of the base weights again; layers that aren't merged are left alone."""
    for layer in lora_layers(module).values():
        if layer.merged:
            layer.unmerge()


def lora_parameters(d: int, k: int, r: int) -> int:
    """Trainable parameters of a rank-r update of a d x k matrix: B has d r, A has r k. The matrix
    itself has d k.
    """
    return (d + k) * r


def count_parameters(module: nn.Module) -> int:
    """All parameters of the model; a model on the meta device, which has shapes and no memory,
    counts the same.
    """
    return sum(p.numel() for p in module.parameters())


def count_trainable(module: nn.Module) -> int:
    """The parameters that get a gradient; on the meta device too."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# -------------------------------------------------------------------------------------------------
# Files


def save_adapter(
    module: nn.Module, folder: str | Path, name: str = "default", base_model: str | None = None
) -> list[Path]:
    """Write the adapter as PEFT does (safetensors and JSON), and a diffusers UNet's also as its
    pipelines load it.

    `base_model` is the name or path of the model it belongs to, for those who load it. Each file is
    written beside its place and moved there whole: a save that is cut off leaves the last one.
    Returns the paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.contiguous().cpu() for key, tensor in adapter_state(module, name).items()}
    config = _config_of(module, name, base_model)
    text = json.dumps(config, indent=2)
    files = {
        folder / WEIGHTS_FILE: _safetensors(
            {PEFT_PREFIX + k: v for k, v in state.items()}, {"lora": text}
        )
    }
    if (prefix := _diffusers_component(module)) is not None:
        files[folder / DIFFUSERS_FILE] = _diffusers_bytes(state, config, prefix)
    files[folder / CONFIG_FILE] = (text + "\n").encode()
    for path, content in files.items():
        _write_whole(path, content)
    return list(files)


def load_adapter(
    module: nn.Module, folder: str | Path, name: str = "default", kind: str = "peft"
) -> list[nn.Parameter]:
    """Load a saved adapter into the adapter `name`, attached first (as `kind`) where the model
    hasn't got it.

    Everything is checked before anything is changed. Returns the adapter's parameters. Raises
    `FileNotFoundError` for a missing file, `ValueError` for a damaged one, another rank or alpha,
    or an adapter that was made for another model.
    """
    folder = Path(folder)
    state, config = _read_adapter(folder)
    _check_fits(module, state, config, folder)
    if not any(name in layer.lora_A for layer in lora_layers(module).values()):
        targets = tuple(sorted({_layer_of(key) for key in state}))
        if beyond := sorted(set(matching_layers(module, targets)) - set(targets)):
            raise ValueError(
                f"The adapter in {folder} was made for another model: its targets also name "
                f"{', '.join(beyond)} of "
                f"this {type(module).__name__}, for which it has no weights. Load it into the "
                "model it was made for."
            )
        attach_lora(module, targets, config["r"], config["lora_alpha"], kind, seed=0, name=name)
    _check_same_adapter(module, state, config, name, folder)
    own = adapter_state(module, name)
    with torch.no_grad():
        for key, tensor in state.items():
            own[key].copy_(tensor)
    return [p for layer in _layers_with(module, name).values() for p in _matrices(layer, name)]


def _config_of(module: nn.Module, name: str, base_model: str | None) -> dict[str, Any]:
    """What adapter_config.json says: PEFT's fields, of which those that are left out have PEFT's
    defaults.
    """
    layers = _layers_with(module, name)
    shapes = {
        (layer.lora_A[name].weight.shape[0], float(layer.scaling[name]))
        for layer in layers.values()
    }
    if len(shapes) > 1:
        raise ValueError(
            f"The layers of adapter {name!r} differ in rank or alpha: {sorted(shapes)}. One file "
            "holds one."
        )
    ((rank, scaling),) = shapes
    alpha = scaling * rank
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(layers),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _diffusers_component(module: nn.Module) -> str | None:
    """The prefix that diffusers' pipelines give the weights of this model in a LoRA file; None for
    other models.
    """
    return (
        "unet"
        if any(c.__name__ == "UNet2DConditionModel" for c in type(_unwrapped(module)).__mro__)
        else None
    )


def _diffusers_bytes(state: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str) -> bytes:
    """The file of `StableDiffusionPipeline.save_lora_weights`; its header carries alpha, which the
    tensors don't.
    """
    from diffusers.utils import convert_state_dict_to_diffusers

    tensors = {
        f"{prefix}.{key}": tensor
        for key, tensor in convert_state_dict_to_diffusers(dict(state)).items()
    }
    header = {f"{prefix}.{key}": value for key, value in config.items()}
    return _safetensors(tensors, {"lora_adapter_metadata": json.dumps(header)})


def _safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    from safetensors.torch import save

    return save(dict(tensors), {"format": "pt"} | metadata)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there once it is on the disk: what is there is
    never half a file.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are their owner's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors under PEFT's names and the configuration of a saved adapter."""
    from safetensors import SafetensorError, safe_open

    for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        if not file.exists():
            raise FileNotFoundError(
                f"{folder} holds no {file.name}, so it is not a saved adapter. save_adapter writes "
                "one."
            )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            written_with = json.loads((file.metadata() or {}).get("lora", "null"))
            state = {_layer_name(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"The adapter in {folder} is damaged ({error}): it was cut off or changed. Save it "
            "again."
        ) from error
    missing = {"r", "lora_alpha", "target_modules"} - (
        config.keys() if isinstance(config, dict) else set()
    )
    if missing or not state:
        raise ValueError(
            f"The adapter in {folder} says no {', '.join(sorted(missing)) or 'weights'}. Save it "
            "again."
        )
    if special := [f"{key}={config[key]!r}" for key in BEYOND_LORA if config.get(key)]:
        raise ValueError(
            f"The adapter in {folder} is more than LoRA ({', '.join(special)}). Load it with PEFT "
            "itself."
        )
    _check_config(config, folder)
    _check_tensors(state, folder)
    if written_with is not None and not isinstance(written_with, dict):
        raise _changed(folder, f"the header of {WEIGHTS_FILE} says lora={written_with!r}")
    if written_with and any(
        written_with.get(key) != config[key] for key in ("r", "lora_alpha", "target_modules")
    ):
        raise ValueError(
            f"{CONFIG_FILE} and {WEIGHTS_FILE} in {folder} belong to two different adapters: a "
            "save was cut off "
            "between them. Save it again."
        )
    return state, config


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Raise `ValueError` unless rank, alpha and targets are of the right kinds."""
    rank, alpha, targets = config["r"], config["lora_alpha"], config["target_modules"]
    if type(rank) is not int or rank < 1:
        raise _changed(folder, f"r is {rank!r}, where a whole number of 1 or more belongs")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) < float("inf")
    ):
        raise _changed(folder, f"lora_alpha is {alpha!r}, where a finite number belongs")
    if not isinstance(targets, str) and not (
        isinstance(targets, list) and all(isinstance(t, str) for t in targets)
    ):
        raise _changed(folder, f"target_modules is {targets!r}, where names of layers belong")


def _check_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `ValueError` unless there is an A and a B of finite numbers for every layer, and
    nothing else.
    """
    halves = (".lora_A.weight", ".lora_B.weight")
    for key, tensor in state.items():
        half = next((half for half in halves if key.endswith(half)), None)
        if half is None:
            raise _changed(folder, f"{key!r} is neither a lora_A.weight nor a lora_B.weight")
        other = key.removesuffix(half) + halves[1 - halves.index(half)]
        if other not in state:
            raise _changed(folder, f"{key!r} is there without {other!r}")
        if not tensor.is_floating_point():
            raise _changed(
                folder, f"{key!r} is {tensor.dtype}, where floating-point numbers belong"
            )
        if not tensor.float().isfinite().all():
            raise _changed(folder, f"{key!r} holds NaN or infinity")


def _changed(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"The adapter in {folder} can't be loaded: {what}. Another program wrote it, or it was "
        "changed. Save it again."
    )


def _check_fits(
    module: nn.Module, state: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path
) -> None:
    """Raise `ValueError` unless every tensor has its layer in `module`, of the right width."""
    adapted = lora_layers(module)
    layers = {_layer_name(n): layer for n, layer in module.named_modules()} | adapted
    for key, tensor in state.items():
        layer = layers.get(_layer_of(key))
        if layer is None:
            raise ValueError(
                f"The adapter in {folder} was made for another model: this {type(module).__name__} "
                "has no layer "
                f"{_layer_of(key)!r}."
            )
        out_features, in_features = (
            getattr(layer, side, None) for side in ("out_features", "in_features")
        )
        if type(out_features) is not int or type(in_features) is not int:
            raise ValueError(
                f"The adapter in {folder} is for linear layers, and {_layer_of(key)!r} of this "
                f"{type(module).__name__} "
                f"is a {type(layer).__name__}. Load it into the model it was made for, or with "
                "PEFT itself."
            )
        expected = (config["r"], in_features) if ".lora_A." in key else (out_features, config["r"])
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"The adapter in {folder} doesn't fit this {type(module).__name__}: {key} is "
                f"{tuple(tensor.shape)}; "
                f"rank {config['r']} on this layer of {in_features} -> {out_features} needs "
                f"{expected}."
            )


def _check_same_adapter(
    module: nn.Module,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    name: str,
    folder: Path,
) -> None:
    """Raise `ValueError` unless the attached adapter has the saved one's rank, alpha and layers."""
    for layer_name, layer in _layers_with(module, name).items():
        rank = layer.lora_A[name].weight.shape[0]
        for what, here, there in (
            ("rank", rank, config["r"]),
            ("alpha", layer.scaling[name] * rank, config["lora_alpha"]),
        ):
            if not math.isclose(here, there):
                raise ValueError(
                    f"The adapter in {folder} has {what} {there}, the model's adapter {name!r} has "
                    f"{here:g} "
                    f"(on {layer_name}). Attach it with {what}={there}, or load it under another "
                    "name=."
                )
    if odd := state.keys() ^ adapter_state(module, name).keys():
        raise ValueError(
            f"The adapter in {folder} is on other layers than the model's adapter {name!r}: "
            f"{len(odd)} matrices are in "
            f"one of them only, such as {min(odd)!r}. Attach it to the same targets, or load it "
            "under another name=."
        )


# -------------------------------------------------------------------------------------------------
# Small helpers


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and DistributedDataParallel."""
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return getattr(inner, "_orig_mod", inner)


def _layer_name(name: str) -> str:
    """A name without what wrappers (DistributedDataParallel, torch.compile, PeftModel) put into it."""
    return name.removeprefix("module.").replace("_orig_mod.", "").removeprefix(PEFT_PREFIX)


def _layer_of(key: str) -> str:
    """The layer that a tensor of PEFT's naming belongs to."""
    return key.rpartition(".lora_")[0]


def _layers_with(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """The layers that have the adapter `name`. Raises `ValueError` where none has."""
    layers = lora_layers(module)
    having = {layer_name: layer for layer_name, layer in layers.items() if name in layer.lora_A}
    if not having:
        known = sorted({adapter for layer in layers.values() for adapter in layer.lora_A})
        raise ValueError(
            f"No adapter {name!r} is attached to this model. It has: {', '.join(known) or 'none'}."
        )
    return having


def _matrices(layer: nn.Module, name: str) -> list[nn.Parameter]:
    """A and B of one adapter on one layer; [] where the layer hasn't got it."""
    return [layer.lora_A[name].weight, layer.lora_B[name].weight] if name in layer.lora_A else []
