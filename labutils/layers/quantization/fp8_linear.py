"""A frozen linear layer whose weight is held once, in FP8: one byte a parameter, products on the
FP8 tensor cores.

LoRA's base layers compute y = x W^T forward and dX = dY W backward, and never a gradient of W. So W
can be stored in E4M3 with one float32 scale a row and nothing else kept: no copy in half precision,
no input saved for backward. Activations and gradients are quantised as they come, one scale a row
(a token), computed from that row: no history, no state, nothing to synchronise, and nothing that
the next token's outlier spoils.

Two things make the backward pass possible without a second copy of W:
- W's row scales s lie along the dimension that dX sums over, where a product's epilogue can't apply
  them. They are folded into the gradient before it is quantised: dX = (dY * s) Wq. That is exact,
  up to the rounding there is anyway.
- Hopper and consumer Blackwell multiply FP8 matrices in one layout only (both with the summed
  dimension running fastest), and dX needs the other one. Wq is transposed for each backward pass
  and let go: a byte a parameter read and written, against 2 rows FLOP a parameter of the product.

Without FP8 tensor cores the same rounding is emulated: quantise, multiply in float32, round as the
kernel's output is. Rounding both factors to 3 mantissa bits costs 3 to 4 % of a product's norm,
whatever its size (tests/equivalence/test_frozen_linears).
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.layers.quantization.fp8_math import E4M3, SMALLEST_AMAX
from labutils.profiling import compat

MULTIPLE = 16
"""The FP8 product takes inner and outer widths that are multiples of 16, as 16 bytes are what it
loads at a time.
"""
FAST_ACCUM = True
"""Let the tensor cores add up products in their own, shorter registers (about 14 bits on Hopper)
instead of moving partial sums to float32 every few terms. That error is far below the 3 bits' own
(tests/gpu/test_fp8_gpu holds it to a tenth), and the row-wise kernel is markedly slower without."""


class FrozenLinear(nn.Module):
    """y = x W^T + b with W [out, in] held in a format of its own; the base of the low-bit layers.
    A layer has `product(x)`, x W^T in x's dtype, and `restored()`, the weight that is multiplied
    with, in float32.

    x is (..., in) in float16, bfloat16 or float32 and y (..., out) in x's dtype, or autocast's
    where that is on. Any number of rows, none included. Gradients flow to x alone. Raises
    `ValueError` for what it can't hold or multiply.
    """

    kept: tuple[str, ...] = ()
    """Tensors that `model.to(torch.bfloat16)` leaves in their dtype: it is meant for the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        check_weight(weight, bias)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), False)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> FrozenLinear:
        """The low-bit form of a frozen nn.Linear, which is left as it is."""
        return cls(linear.weight, linear.bias)

    def place(self, device: torch.device) -> None:
        """Choose what depends on the device."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"The input is {tuple(x.shape)}; this layer takes (..., {self.in_features})."
            )
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn, recurse: bool = True):
        before = {name: getattr(self, name).data for name in self.kept}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                moved.data = tensor.to(moved.device)
        self.place(self.weight.device)
        return self


class FrozenFP8Linear(FrozenLinear):
    """W in E4M3 and `scale` [out, 1] in float32: W is about weight * scale. `kind` names the
    product of `PRODUCTS` that the device does."""

    kept = ("weight", "scale")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        torch.compiler.allow_in_graph(_frozen_product)  # not on import: it loads the compiler
        # As one row after the other: the forward product takes no other order, and a transposed
        # weight would keep its.
        values, inverse = quantise_rows(weight.detach().float().contiguous())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", inverse)
        self.place(weight.device)

    def place(self, device: torch.device) -> None:
        self.kind = product_kind(device)

    def product(self, x: Tensor) -> Tensor:
        return _frozen_product(x, self.weight, self.scale, self.kind)

    def restored(self) -> Tensor:
        return self.weight.float() * self.scale


def check_weight(weight: Tensor, bias: Tensor | None = None) -> None:
    """Raise `ValueError` where a linear layer's weight [out, in] and bias [out] can't become a
    frozen low-bit layer."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError(
            "This layer is trained, and a frozen layer has no gradient for its weight. Freeze it "
            "first: layer.requires_grad_(False)."
        )
    sides = [side % MULTIPLE for side in weight.shape]
    if sides != [0, 0] or not weight.is_floating_point():
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} and {weight.dtype} can't be held in low "
            f"bits: it takes a matrix of floating-point numbers, both sides multiples of "
            f"{MULTIPLE}. Leave it out: frozen_linears(model) lists those that go."
        )
    if not weight.float().isfinite().all():
        raise ValueError("This weight holds NaN or infinity. Check where it was loaded.")


class _FrozenProduct(torch.autograd.Function):
    """x W^T, and for the gradient of x alone; nothing is kept for it but W itself. Plain
    operations, which a compiler sees through: it fuses the quantising with what comes before."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, product: str) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.product = product
        return scaled_product(x, weight, scale.t(), product, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        scaled = dy * scale.t()  # in float32, as the scale is
        transposed = weight.t().contiguous()
        ones = torch.ones_like(transposed[:, 0], dtype=torch.float32)[None]
        return scaled_product(scaled, transposed, ones, ctx.product, dy.dtype), None, None, None


def _frozen_product(x: Tensor, weight: Tensor, scale: Tensor, product: str) -> Tensor:
    """The function above, which the compiler's front end passes on as it is and only its back end
    takes apart: taken apart by the front end, several such layers in one block of any length make
    it fail (PyTorch 2.13)."""
    return _FrozenProduct.apply(x, weight, scale, product)


def scaled_product(
    x: Tensor, weight: Tensor, column_scale: Tensor, product: str, dtype: torch.dtype
) -> Tensor:
    """x [..., k] quantised row by row, times weight [n, k] in FP8 transposed, times column_scale
    [1, n]; in `dtype`.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    padded = max(MULTIPLE, -(-count // MULTIPLE) * MULTIPLE)
    rows = rows if padded == count else F.pad(rows, (0, 0, 0, padded - count))
    values, inverse = quantise_rows(rows)
    # Quantising keeps the order in memory of what it is given, and the product takes rows one after
    # the other.
    y = PRODUCTS[product](values.contiguous(), weight, inverse, column_scale)
    return y[:count].to(dtype).reshape(*x.shape[:-1], weight.shape[0])


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k] in E4M3 and the float32 factors [n, 1] that undo each row's scale.

    A row with NaN or infinity in it becomes NaN: it must not come out as an ordinary number.
    """
    largest = torch.linalg.vector_norm(
        x, math.inf, dim=-1, keepdim=True, dtype=torch.float32
    )  # one kernel
    inverse = largest.clamp(min=SMALLEST_AMAX) / E4M3.largest
    # Nothing is beyond the range but by a rounding, and what is within half a step of it rounds to
    # it: no clamp.
    return (x * inverse.reciprocal()).to(E4M3.dtype), inverse


# -------------------------------------------------------------------------------------------------
# The product: by the hardware, or emulated


def _rowwise(values: Tensor, weight: Tensor, inverse: Tensor, column_scale: Tensor) -> Tensor:
    """One kernel, which applies the scales of rows and columns to its sums as it writes them."""
    return compat.scaled_mm(
        values,
        weight.t(),
        scale_a=inverse,
        scale_b=column_scale.contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUM,
    )


def _emulated(values: Tensor, weight: Tensor, inverse: Tensor, column_scale: Tensor) -> Tensor:
    """The same numbers from float32 products."""
    with torch.autocast("cuda" if values.is_cuda else "cpu", enabled=False):
        y = F.linear(values.float(), weight.float())
        return (y * (inverse * column_scale)).to(torch.bfloat16)


PRODUCTS = {"rowwise": _rowwise, "emulated": _emulated}
"""Kind -> (values [m, k] in FP8, weight [n, k] in FP8, inverse [m, 1], column_scale [1, n]) -> [m,
n] in bfloat16.
"""


def product_kind(device: torch.device) -> str:
    """Which of `PRODUCTS` a device does: FP8 tensor cores came with compute capability 8.9."""
    return _cuda_product_kind(device.index or 0) if device.type == "cuda" else "emulated"


@functools.cache
def _cuda_product_kind(index: int) -> str:
    """Found by trying: not every build of PyTorch has the kernel for every card."""
    device = torch.device("cuda", index)
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "emulated"
    matrix = torch.zeros(128, 128, device=device).to(E4M3.dtype)
    scale = torch.ones(128, 1, device=device)
    try:
        _rowwise(matrix, matrix, scale, scale.t())
    except (RuntimeError, ValueError, NotImplementedError):
        return "emulated"
    return "rowwise"
