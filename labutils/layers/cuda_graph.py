"""Taking the host out of the step: compiled regions and captured CUDA graphs.

A compiled region is a part of the model that TorchInductor turned into fewer, larger kernels; the
host still launches them one by one. A CUDA graph is a recording of launches that the GPU replays
without the host. They combine: compile for fewer kernels, capture so that launching them costs
nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda, cudnn

from labutils.profiling import compat
from labutils.profiling.cuda import float32_products, warm_up

WARM_UP = 3
"""Steps before a capture: they compile, choose algorithms and create library handles, none of which
can be recorded.
"""


def compile_from_nothing() -> None:
    """Give torch.compile an empty cache on the disk until this process ends: a first step compiles
    all that it uses.
    """
    folder = tempfile.mkdtemp(prefix="inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


DYNAMIC = {"static": False, "automatic": None, "any": True}
"""A recipe's `dynamic` -> torch.compile's."""


@contextmanager
def timed_convolutions(wanted: bool) -> Iterator[None]:
    """A context in which cuDNN times its algorithms for each shape once and keeps the fastest,
    where `wanted`.

    `torch.backends.cudnn.flags` would also put TF32 and determinism back to PyTorch's defaults,
    whatever was asked for.
    """
    before, cudnn.benchmark = cudnn.benchmark, wanted
    try:
        yield
    finally:
        cudnn.benchmark = before


def float32_rounded(what: str) -> AbstractContextManager:
    """A context in which the tensor cores round float32 inputs to TF32 as a recipe's `tf32` says.

    "convolutions" is PyTorch's own setting, and leaves everything as it is.
    """
    if what == "convolutions":
        return nullcontext()
    return float32_products((cuda.matmul, cudnn.conv), "tf32" if what == "everything" else "ieee")


VARIANTS = 64
"""Compiled variants that one function may have. Blocks of all kinds share the function that calls a
module, and so do trainers side by side: PyTorch's 8 are soon used up by what is no fault of any of
them."""


def variants_allowed(compile: str, dynamic: str) -> AbstractContextManager:
    """A context for one step of a recipe: what torch.compile does where a function needs too many
    variants.

    With dynamic="automatic" it does what it does by default: after 8 variants it goes on
    uncompiled. Otherwise it raises `FailOnRecompileLimitHit` after `VARIANTS`, as the run would be
    on record as compiled.
    """
    if compile == "off" or dynamic == "automatic":
        return nullcontext()
    return compat.variants_limited(VARIANTS)


def compile_blocks(blocks: Iterable[nn.Module], mode: str, dynamic: str) -> None:
    """Compile each block in place. Blocks of one class and shape share code, so this compiles far
    less than the whole."""
    for block in blocks:
        block.compile(mode=mode, dynamic=DYNAMIC[dynamic])


class ChannelsLastGroupNorm(nn.GroupNorm):
    """GroupNorm whose compiled form keeps images [n, c, h, w] in channels-last memory, forward and
    backward.

    The compiler takes GroupNorm apart into reductions over [n, groups, c / groups * h * w], an
    order that channels-last memory isn't in: results come out channels-first, and every convolution
    after one first copies its input. Written over [n, h, w, groups, c / groups] the same sums run
    through memory as it lies. Outside a compiled region, and without weights, it is GroupNorm.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or x.dim() != 4 or not self.affine:
            return super().forward(x)
        grouped = x.permute(0, 2, 3, 1).float().unflatten(-1, (self.num_groups, -1))
        variance, mean = torch.var_mean(grouped, dim=(1, 2, 4), correction=0, keepdim=True)
        normal = ((grouped - mean) * torch.rsqrt(variance + self.eps)).flatten(-2)
        return (normal * self.weight + self.bias).to(x.dtype).permute(0, 3, 1, 2)


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution whose 1x1 form is computed, when compiled, as what it is: one matrix product
    over the pixels.

    A weight of 1x1 is channels-first and channels-last at once, so the convolution library is left
    to guess, and where it guesses the other way it copies the whole image, forward and backward. A
    product over [n, h, w, c] leaves no choice. Any other convolution stays what it is.
    """

    def forward(self, x: Tensor) -> Tensor:
        pointwise = self.kernel_size == self.stride == (1, 1) and self.padding == (0, 0)
        if not torch.compiler.is_compiling() or not pointwise or self.groups != 1:
            return super().forward(x)
        images, _, height, width = x.shape
        # In 4 dimensions this would compile to a product for each row of the image, too thin to be
        # fast.
        pixels = x.permute(0, 2, 3, 1).reshape(images * height * width, -1)
        projected = F.linear(pixels, self.weight.flatten(1), self.bias)
        return projected.view(images, height, width, -1).permute(0, 3, 1, 2)


def rewrite_layers(module: nn.Module, forms: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Give every layer of `module` whose class is in `forms` that form instead; weights and names
    stay as they are.
    """
    for layer in module.modules():
        if form := forms.get(type(layer)):
            layer.__class__ = form


CHANNELS_LAST_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: ChannelsLastGroupNorm,
    nn.Conv2d: ChannelsLastConv2d,
}
"""Layers that leave channels-last memory when compiled -> the forms that keep it."""


def _after_a_failed_recording(stream: torch.cuda.Stream) -> None:
    """Leave PyTorch as it was before, with `stream` the current one.

    A recording that can't be ended leaves its own stream behind as the current one and the
    generator of random numbers in the recording's state: whatever draws some later, the next
    model's weights say, would fail. The end of a recording that succeeds puts the generator right.
    """
    torch.cuda.set_stream(stream)
    # Of a GPU that fails at everything from here on, the first failure tells more.
    with suppress(RuntimeError):
        torch.cuda.synchronize()
        number = torch.zeros(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            number.add_(1)


class Captured:
    """A function recorded as one CUDA graph; calling it replays the recording on whatever its
    inputs hold now.

    `function` takes no arguments, reads tensors whose addresses don't change and may change tensors
    in place. It is run `WARM_UP` times first. Those runs are real, so everything in `state` is put
    back afterwards, and PyTorch's random numbers too: the first replay is the first step. Raises
    RuntimeError where the function does what can't be recorded (reads a value on the host,
    allocates page-locked memory, ...).
    """

    def __init__(self, function: Callable[[], Any], state: Callable[[], list[Tensor]]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self._warm_up(function, state)
        self._record(function)

    def _record(self, function: Callable[[], Any]) -> None:
        """A failure is `function`'s own: ending a recording that broke off fails too, and says
        less.
        """
        here, recording = torch.cuda.current_stream(), torch.cuda.graph(self.graph)
        try:
            recording.__enter__()
            function()
            recording.__exit__(None, None, None)
        except Exception:
            with suppress(Exception):
                recording.__exit__(None, None, None)
            _after_a_failed_recording(here)
            raise

    def _warm_up(self, function: Callable[[], Any], state: Callable[[], list[Tensor]]) -> None:
        before = {id(tensor): tensor.detach().clone() for tensor in state()}
        random = torch.cuda.get_rng_state()
        warm_up(function, WARM_UP)
        torch.cuda.synchronize()
        with torch.no_grad():
            for tensor in state():
                # What did not exist before (an optimizer's moments) started from zero.
                tensor.copy_(before[id(tensor)]) if id(tensor) in before else tensor.zero_()
        torch.cuda.set_rng_state(random)

    def __call__(self) -> None:
        self.graph.replay()
