"""Stable Diffusion 1.5 with LoRA on the UNet's attention: article A1's workload.

One example goes: image -> VAE encoder -> latents sampled from its posterior -> noise added at a
random timestep -> UNet, which is told the caption's text embedding -> mean squared error against
the noise (DDPM; Ho et al. 2020, eq. 14). Only the LoRA matrices on the UNet's q, k, v and output
projections are trained.

At `full` the three networks are those of stable-diffusion-v1-5 to the parameter. `small` halves the
widths and the resolution, `tiny` keeps every kind of block but few and thin ones.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset, default_convert
from torch.utils.flop_counter import FlopCounterMode

from labutils.data.images import Preprocess, captioned_images, collate
from labutils.data.tokenizers import HUB_MODEL, MAX_LENGTH, VOCABULARY, clip_tokenizer
from labutils.layers.activation_checkpoint import keeping_products
from labutils.layers.cuda_graph import CHANNELS_LAST_FORMS, rewrite_layers
from labutils.layers.lora import attach_lora, count_parameters, lora_layers
from labutils.layers.lora_folded import fold, form_weights
from labutils.layers.quantization.convert import convert_base, forward_context, recomputing
from labutils.profiling.machine import usable_cores
from labutils.recipe import Recipe
from labutils.workloads.base import (
    DTYPES,
    Batch,
    Work,
    Workload,
    around_the_same,
    refuse,
    remembered,
)

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
VAE_FACTOR = 8
LATENT_CHANNELS = 4
TIMESTEPS = 1000


@dataclass(frozen=True)
class Size:
    """What differs between scales; everything else of the three networks is the same."""

    resolution: int
    images: int
    unet_channels: tuple[int, ...]
    unet_layers: int
    vae_channels: tuple[int, ...]
    vae_layers: int
    text_width: int
    text_layers: int
    heads: int


SIZES = {
    "tiny": Size(64, 16, (32, 64), 1, (16, 16, 16, 16), 1, 32, 2, 4),
    "small": Size(256, 64, (160, 320, 640, 640), 2, (64, 128, 256, 256), 2, 384, 6, 8),
    "full": Size(512, 256, (320, 640, 1280, 1280), 2, (128, 256, 512, 512), 2, 768, 12, 8),
}


class Networks(nn.Module):
    """The three networks, the noise schedule, and the kind of the frozen linear layers under the
    UNet's adapters."""

    base_linear = "published"

    def __init__(
        self, unet: nn.Module, vae: nn.Module, text_encoder: nn.Module, scheduler: Any
    ) -> None:
        super().__init__()
        self.unet, self.vae, self.text_encoder = unet, vae, text_encoder
        self.scheduler = scheduler


class DiffusionLora(Workload):
    """See the module's docstring. Batches hold pixel_values [b, 3, h, w] float32 and input_ids [b,
    77] int64, or, where the recipe caches them, moments [b, 8, h/8, w/8] and condition [b, 77,
    width] in the frozen networks' dtype."""

    libraries = (
        "diffusers.models.autoencoders.autoencoder_kl",
        "diffusers.models.unets.unet_2d_condition",
        "diffusers.schedulers.scheduling_ddpm",
        "transformers.models.clip.modeling_clip",
        "transformers.models.clip.tokenization_clip",
        "datasets",
    )
    takes = {
        "cache": ("nothing", "latents+text"),
        "checkpointing": ("off", "blocks", "selective"),
        "shapes": ("as-they-come",),
        "loss": ("logits",),
    }
    drawn_rows = 0
    """Examples whose latents and text embeddings are drawn: see `on_drawn_latents`; 0: none."""

    @property
    def size(self) -> Size:
        return SIZES[self.scale]

    @property
    def hub(self) -> str:
        return HUB_MODEL if self.scale == "full" else ""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one example's latents."""
        side = self.size.resolution // VAE_FACTOR
        return LATENT_CHANNELS, side, side

    # ---------------------------------------------------------------------------- the model

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        again = recipe.checkpointing
        refuse(
            again != "off" and (recipe.adapter == "folded" or recipe.compile != "off"),
            f"checkpointing={again!r} computes a UNet's blocks again as diffusers does it, which "
            "goes with neither adapter='folded' nor compile. Use checkpointing='off' with these.",
        )

    def build(self, recipe: Recipe) -> Networks:
        self.check(recipe)
        dtype = DTYPES[recipe.precision]
        key = (dtype, LAYOUTS[recipe.memory_format], recipe.layers, recipe.seed)
        frozen = self.shared(key, functools.partial(self._make, *key), at_most=4)
        model = around_the_same(frozen)
        if recipe.adapter == "none":
            model.unet = copy.deepcopy(frozen.unet).float().requires_grad_(True).train()
            return model
        kind = "plain" if recipe.adapter == "folded" else recipe.adapter
        attach_lora(model.unet, TARGETS, recipe.rank, recipe.rank, kind, seed=recipe.seed)
        if recipe.adapter == "folded":
            _fold(model.unet)
        model.base_linear = recipe.base_linear
        convert_base(model, self.converted(model, recipe), recipe.base_linear, dtype)
        model.unet.train()
        if recipe.checkpointing == "selective":
            model.unet.enable_gradient_checkpointing(keeping_products)
        elif recipe.checkpointing == "blocks":
            model.unet.enable_gradient_checkpointing(recomputing(recipe.base_linear))
        return model

    def trained(self, model: Networks) -> tuple[str, nn.Module]:
        return "unet", model.unet

    def blocks(self, model: Networks) -> list[nn.Module]:
        return [m for m in model.unet.modules() if type(m).__name__ in model.unet._repeated_blocks]

    def converted(self, model: Networks, recipe: Recipe) -> list[str]:
        return [f"unet.{name}.base_layer" for name in lora_layers(model.unet)]

    def units(self, model: Networks) -> list[nn.Module]:
        """The UNet's levels: most weights are in convolutions between the repeated blocks."""
        return [*model.unet.down_blocks, model.unet.mid_block, *model.unet.up_blocks]

    def _make(
        self, dtype: torch.dtype, layout: torch.memory_format, layers: str, seed: int
    ) -> Networks:
        """The three networks without adapters, every weight frozen."""
        with self.making_weights(seed):
            networks = _from_hub() if self.weights == "hub" else _networks(self.size, self.device)
        networks = networks.to(self.device, dtype, memory_format=layout).requires_grad_(False)
        if layers == "rewritten":
            rewrite_layers(networks, CHANNELS_LAST_FORMS | {GEGLU: SplitGEGLU})
        networks.scheduler.alphas_cumprod = networks.scheduler.alphas_cumprod.to(self.device)
        networks.vae.eval()
        networks.text_encoder.eval()
        return networks

    # ---------------------------------------------------------------------------- the data

    def dataset(self, model: Networks, recipe: Recipe) -> Dataset:
        if self.drawn_rows:
            return self._drawn(recipe)
        images = captioned_images(self.cache_dir, self.size.images, self.data)
        tokenizer = clip_tokenizer(self.weights)
        examples = images.with_transform(Preprocess(tokenizer, self.size.resolution))
        if recipe.cache == "nothing":
            return examples
        return self._encoded(model, examples)

    def collate(self, recipe: Recipe) -> Callable[[list], Batch]:
        # `EncodedExamples` hands over whole batches: they stay as they are.
        return collate if recipe.cache == "nothing" else default_convert

    @torch.no_grad()
    def _encoded(self, model: Networks, examples: Dataset) -> EncodedExamples:
        """Every example through the frozen encoders once. What is kept is the posterior, from which
        each step samples anew: keeping one sample of it would train on fewer distinct latents than
        the plain loop does. (An image that isn't square keeps the crop that it was read with, where
        the plain loop crops it anew each time.)"""
        started = time.perf_counter()
        workers = min(8, usable_cores() - 1) if self.device.type == "cuda" else 0
        parts = []
        # Its own generator: the noise of training is the same with and without this pass.
        own = torch.Generator()
        for batch in DataLoader(
            examples, batch_size=8, num_workers=workers, collate_fn=collate, generator=own
        ):
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            kept = {"moments": self._moments(model, batch["pixel_values"])}
            kept["condition"] = self._condition(model, batch)
            parts.append({name: tensor.cpu() for name, tensor in kept.items()})
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return EncodedExamples(whole, time.perf_counter() - started)

    def _drawn(self, recipe: Recipe) -> EncodedExamples:
        generator = torch.Generator().manual_seed(recipe.seed)
        channels, *sides = self.latent_shape
        shapes = {
            "moments": (self.drawn_rows, 2 * channels, *sides),
            "condition": (self.drawn_rows, MAX_LENGTH, self.size.text_width),
        }
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        dtype = DTYPES[recipe.precision]
        return EncodedExamples({name: tensor.to(dtype) for name, tensor in drawn.items()}, 0.0)

    # ---------------------------------------------------------------------------- the loss

    def draw(self, model: Networks, batch: Batch) -> Batch:
        examples = next(iter(batch.values())).shape[0]
        noise = functools.partial(torch.randn, examples, *self.latent_shape, device=self.device)
        dtype = model.vae.dtype
        return {
            "posterior": noise(dtype=dtype),
            "noise": noise(dtype=dtype),
            "timesteps": torch.randint(TIMESTEPS, (examples,), device=self.device),
        }

    def loss(self, model: Networks, batch: Batch, draws: Batch) -> Tensor:
        with record_function("encode"):
            latents = self._latents(model, batch, draws["posterior"])
            noisy = model.scheduler.add_noise(latents, draws["noise"], draws["timesteps"])
            condition = self._condition(model, batch)
        with record_function("forward"), forward_context(model.base_linear):
            form_weights(model.unet)
            predicted = model.unet(noisy, draws["timesteps"], condition, return_dict=False)[0]
            return F.mse_loss(predicted.float(), draws["noise"].float())

    def _latents(self, model: Networks, batch: Batch, posterior: Tensor) -> Tensor:
        """Latents [b, 4, h/8, w/8] sampled from the VAE's posterior with given normal numbers."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        moments = batch.get("moments")
        if moments is None:
            moments = self._moments(model, batch["pixel_values"])
        distribution = DiagonalGaussianDistribution(moments)
        latents = distribution.mean + distribution.std * posterior
        # In one layout, wherever they come from: a compiled network is compiled anew for every
        # other one.
        return (latents * model.vae.config.scaling_factor).contiguous()

    def _moments(self, model: Networks, pixel_values: Tensor) -> Tensor:
        """Mean and log variance of the posterior, [b, 8, h/8, w/8]."""
        return model.vae.encode(pixel_values.to(model.vae.dtype), return_dict=False)[0].parameters

    def _condition(self, model: Networks, batch: Batch) -> Tensor:
        """Text embeddings [b, 77, width]."""
        if "condition" in batch:
            return batch["condition"]
        return model.text_encoder(batch["input_ids"], return_dict=False)[0]

    # ---------------------------------------------------------------------------- counting

    def work(self, recipe: Recipe) -> Work:
        """See `Workload.work`. Low-rank products are counted as the plain adapter computes them,
        whatever the recipe's adapter does: what a faster one saves must show as time."""
        rank = 0 if recipe.adapter == "none" else recipe.rank
        flops, numbers = self._per_example(rank, recipe.cache)
        read = numbers * DTYPES[recipe.precision].itemsize
        return Work(flops * recipe.micro_batch, read) * recipe.accumulation

    @remembered
    def _per_example(self, rank: int, cache: str) -> tuple[int, int]:
        """FLOPs of one example forward and backward, counted on the meta device, and numbers that a
        pass reads; rank 0: every weight is trained."""
        meta = torch.device("meta")
        networks = _networks(self.size, meta).requires_grad_(rank == 0)
        if rank:
            attach_lora(networks.unet, TARGETS, rank, rank, "plain", seed=0)
        condition = torch.empty(1, MAX_LENGTH, self.size.text_width, device=meta)
        latents = torch.empty(1, *self.latent_shape, device=meta)
        pixels = torch.empty(1, 3, self.size.resolution, self.size.resolution, device=meta)
        numbers = 2 * count_parameters(networks.unet)  # once forward, once backward
        # Attention is counted as its two products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
            timesteps = torch.zeros(1, device=meta)
            networks.unet(latents, timesteps, condition, return_dict=False)[0].sum().backward()
            if cache == "nothing":
                networks.vae.encode(pixels)
                numbers += count_parameters(networks.vae.encoder)
                networks.text_encoder(torch.zeros(1, MAX_LENGTH, dtype=torch.long, device=meta))
                numbers += count_parameters(networks.text_encoder)
        return count.get_total_flops(), numbers


class EncodedExamples(Dataset):
    """Examples that were encoded once, in `encode_s` seconds, and are held in memory; reading a
    batch is one gather."""

    def __init__(self, tensors: dict[str, Tensor], encode_s: float) -> None:
        self.tensors, self.encode_s = tensors, encode_s

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        return {name: tensor.index_select(0, chosen) for name, tensor in self.tensors.items()}


def on_drawn_latents(workload: DiffusionLora, rows: int = 64) -> DiffusionLora:
    """The same workload on latents and text embeddings that are drawn, and encoded from nothing: to
    compare recipes that need them by time and memory, with cache="latents+text" and no pass of all
    images through the encoders. The frozen weights are shared."""
    other = copy.copy(workload)
    other.drawn_rows, other._held = rows, workload._held
    return other


def _fold(unet: nn.Module) -> None:
    """Fold the UNet's LoRA layers, the projections of one input jointly."""
    joint = []
    for name in unet.attn_processors:
        layer = name.removesuffix(".processor")
        crosses = unet.get_submodule(layer).is_cross_attention
        of_one_input = ("to_k", "to_v") if crosses else ("to_q", "to_k", "to_v")
        joint.append(tuple(f"{layer}.{projection}" for projection in of_one_input))
    fold(unet, lora_layers(unet), joint)
    unet.set_attn_processor(JointAttention())


class JointAttention:
    """Attention as diffusers computes it, but with one product for the projections that share an
    input: q, k and v of self attention, k and v of cross attention. hidden_states is [b, n,
    channels], encoder_hidden_states [b, 77, width]."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        if encoder_hidden_states is None:
            query, key, value = attn.to_q(hidden_states).chunk(3, dim=-1)
        else:
            query = attn.to_q(hidden_states)
            key, value = attn.to_k(encoder_hidden_states).chunk(2, dim=-1)
        # [b, heads, n, channels / heads]
        heads = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
        return attn.to_out[0](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


class SplitGEGLU(GEGLU):
    """GEGLU (Shazeer 2020), its two halves projected by two products when compiled.

    With one product the gradient is a concatenation, which the compiler writes as one kernel that
    computes both halves for every element and picks one: two needless erf an element, and a kernel
    bound by arithmetic that should be bound by memory. With two products there is nothing to
    concatenate.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        (value, gate), (value_bias, gate_bias) = self.proj.weight.chunk(2), self.proj.bias.chunk(2)
        opened = F.gelu(F.linear(hidden_states, gate, gate_bias))
        return F.linear(hidden_states, value, value_bias) * opened


def _from_hub() -> Networks:
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel

    return Networks(
        UNet2DConditionModel.from_pretrained(HUB_MODEL, subfolder="unet"),
        AutoencoderKL.from_pretrained(HUB_MODEL, subfolder="vae"),
        CLIPTextModel.from_pretrained(HUB_MODEL, subfolder="text_encoder"),
        DDPMScheduler.from_pretrained(HUB_MODEL, subfolder="scheduler"),
    )


def _networks(size: Size, device: torch.device) -> Networks:
    """The three networks with random weights, built on `device`."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    crossed = len(size.unet_channels) - 1  # every level but the last attends to the text
    groups = min(32, size.unet_channels[0], size.vae_channels[0])
    text = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.text_width,
        intermediate_size=4 * size.text_width,
        num_hidden_layers=size.text_layers,
        num_attention_heads=size.text_width // (64 if size.text_width >= 64 else 8),
        projection_dim=size.text_width,
        hidden_act="quick_gelu",
    )
    scheduler = DDPMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        num_train_timesteps=TIMESTEPS,
    )
    with device:
        unet = UNet2DConditionModel(
            sample_size=size.resolution // VAE_FACTOR,
            block_out_channels=size.unet_channels,
            down_block_types=("CrossAttnDownBlock2D",) * crossed + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * crossed,
            layers_per_block=size.unet_layers,
            cross_attention_dim=size.text_width,
            attention_head_dim=size.heads,
            norm_num_groups=groups,
        )
        vae = AutoencoderKL(
            block_out_channels=size.vae_channels,
            down_block_types=("DownEncoderBlock2D",) * len(size.vae_channels),
            up_block_types=("UpDecoderBlock2D",) * len(size.vae_channels),
            layers_per_block=size.vae_layers,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=groups,
            sample_size=size.resolution,
        )
        text_encoder = CLIPTextModel(text)
    return Networks(unet, vae, text_encoder, scheduler)
