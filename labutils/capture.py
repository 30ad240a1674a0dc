"""Taking the host out of the step: compiled regions and captured CUDA graphs.

A compiled region is a part of the model that TorchInductor turned into fewer, larger kernels; the host still launches
them one by one. A CUDA graph is a recording of launches that the GPU replays without the host. They combine: compile for
fewer kernels, capture so that launching them costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WARM_UP = 3
"""Steps before a capture: they compile, choose algorithms and create library handles, none of which can be recorded."""


def attention_kernel(name: str) -> Any:
    """A context in which scaled_dot_product_attention uses the named kernel; "auto" leaves the choice to PyTorch."""
    return nullcontext() if name == "auto" else sdpa_kernel(KERNELS[name])


def compile_model(module: nn.Module, mode: str) -> nn.Module:
    """`module` compiled as one region, with torch.compile's `mode`."""
    return torch.compile(module, mode=mode)


def compile_blocks(blocks: Iterable[nn.Module], mode: str) -> None:
    """Compile each block in place. Blocks of one class and shape share code, so this compiles far less than the whole."""
    for block in blocks:
        block.compile(mode=mode)


class Captured:
    """A function recorded as one CUDA graph; calling it replays the recording on whatever its inputs hold now.

    `function` takes no arguments, reads tensors whose addresses don't change and may change tensors in place. It is run
    `WARM_UP` times first. Those runs are real, so everything in `state` is put back afterwards, and PyTorch's random
    numbers too: the first replay is the first step. Raises RuntimeError where the function does what can't be recorded
    (reads a value on the host, allocates page-locked memory, ...).
    """

    def __init__(self, function: Callable[[], Any], state: Callable[[], list[Tensor]]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self._warm_up(function, state)
        with torch.cuda.graph(self.graph):
            function()

    def _warm_up(self, function: Callable[[], Any], state: Callable[[], list[Tensor]]) -> None:
        before = {id(tensor): tensor.detach().clone() for tensor in state()}
        random = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.no_grad():
            for tensor in state():  # what did not exist before (an optimizer's moments) started from zero
                tensor.copy_(before[id(tensor)]) if id(tensor) in before else tensor.zero_()
        torch.cuda.set_rng_state(random)

    def __call__(self) -> None:
        self.graph.replay()
