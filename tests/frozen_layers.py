"""What the tests of the frozen low-bit layers share, on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from labutils.layers.lora import attach_lora, lora_layers


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal numbers, the same ones on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def language_model(
    adapter: str, width: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A Llama of two blocks under an adapter whose matrices B are not zero."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads)).to(device, dtype)
    attach_lora(model, ("q_proj", "v_proj", "down_proj"), 4, 8, adapter, seed=0)
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return model


class Block(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def passes(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad
