"""The mathematics of FP8: the scales that bring tensors into the range of 8 bits, and the errors.

Written out for reading and checking, on any device. `labutils.layers.quantization.fp8_linear` is
where it is made fast.

    q = quantise(x, "row")         q.values in FP8, q.inverse to undo the scale, q.restored()
    q = DelayedScaling()(x)        the scale comes from the steps before

Scales follow Transformer Engine and article A2: S multiplies a tensor before the cast, S = 448 /
AMAX, so that its largest magnitude just fits; 1/S brings results back. Formats: Micikevicius et al.
2022, "FP8 formats for deep learning". E8M0 block scales: OCP Microscaling Formats (MX)
specification 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labutils.recipe import check_choice

BLOCK = 32
"""Neighbours in a row that share one scale in the MX formats."""
SMALLEST_AMAX = 2.0**-100
"""Tensors whose largest magnitude is below this count as zero: their scale would overflow float32.
"""


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format; `largest` is its largest finite number."""

    name: str
    largest: float
    dtype: torch.dtype


E4M3 = Format("E4M3", 448.0, torch.float8_e4m3fn)
"""Range 448, 3 mantissa bits. No infinity, and one NaN a sign: their codes hold numbers ("fn" in
PyTorch's name).
"""
E5M2 = Format("E5M2", 57344.0, torch.float8_e5m2)
"""Range 57344, 2 mantissa bits, infinity and NaN as in IEEE 754: the upper half of a float16."""


# -------------------------------------------------------------------------------------------------
# Casting


def saturating_cast(x: Tensor, fmt: Format = E4M3) -> Tensor:
    """x in FP8; what is beyond the range becomes the largest number of its sign. NaN stays NaN."""
    return x.clamp(-fmt.largest, fmt.largest).to(fmt.dtype)


# -------------------------------------------------------------------------------------------------
# Scaling


@dataclass(frozen=True)
class Quantised:
    """A tensor in FP8 and the factor that undoes its scale: x is about `values * inverse`.

    `inverse` is float32 and broadcasts against `values`; with blocks the last dimension of both is
    split in two.
    """

    values: Tensor
    inverse: Tensor
    shape: torch.Size

    def restored(self) -> Tensor:
        """The tensor in float32, as what is multiplied with it sees it."""
        return (self.values.float() * self.inverse).reshape(self.shape)


def amax(x: Tensor, granularity: str = "tensor") -> Tensor:
    """The largest magnitude (float32, dimensions kept): of the whole "tensor", each "row", or each
    "block" of 32 neighbours, for which the last dimension must be split beforehand."""
    magnitude = x.float().abs()
    return magnitude.amax() if granularity == "tensor" else magnitude.amax(dim=-1, keepdim=True)


def scale_for(largest: Tensor, fmt: Format = E4M3) -> Tensor:
    """S = format's largest number / AMAX in float32; 1 for a tensor of zeros."""
    scale = fmt.largest / largest.float().clamp(min=SMALLEST_AMAX)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def e8m0_scale_for(largest: Tensor, fmt: Format = E4M3) -> Tensor:
    """The largest power of two that keeps every value within the format's range: 1/S has an
    exponent and no mantissa.

    Its inverse fits the 8 bits of float8_e8m0fnu. The MX specification rounds the other way, so
    that values in the upper eighth of the range saturate; training recipes round as here. A block
    with infinity in it has the scale NaN, which E8M0 has.
    """
    scale = torch.exp2(torch.floor(torch.log2(scale_for(largest, fmt)))).clamp(2.0**-127, 2.0**127)
    return torch.where(largest.isinf(), torch.nan, scale)


def quantise(x: Tensor, granularity: str = "tensor", fmt: Format = E4M3) -> Quantised:
    """x in FP8 with scales from its own largest magnitudes ("current scaling"): one reads x twice.

    granularity: "tensor" (one scale), "row" (one for each row along the last dimension), "block"
    (an E8M0 scale for each 32 neighbours in a row, as in MXFP8). What shares a scale with NaN or
    infinity becomes NaN or zero. Raises `ValueError` for another granularity.
    """
    check_choice("granularity", granularity, tuple(SCALES))
    parts = x.float().unflatten(-1, (-1, BLOCK)) if granularity == "block" else x.float()
    scale = SCALES[granularity](amax(parts, granularity), fmt)
    return Quantised(saturating_cast(parts * scale, fmt), 1 / scale, x.shape)


SCALES: dict[str, Callable[[Tensor, Format], Tensor]] = {
    "tensor": scale_for,
    "row": scale_for,
    "block": e8m0_scale_for,
}


class DelayedScaling:
    """Per-tensor scaling with the scale that the steps before suggest, so that a tensor is read
    once.

    As Transformer Engine's DelayedScaling recipe: S starts at 1; each call casts with the S that
    stands, records the tensor's AMAX, and sets S = largest / amax of the history for the next call.
    An AMAX of zero, NaN or infinity leaves S as it is.
    """

    def __init__(self, history_length: int = 1024) -> None:
        self.history_length = history_length
        self.history: list[Tensor] = []  # oldest first
        self.scale = torch.tensor(1.0)

    def __call__(self, x: Tensor) -> Quantised:
        values = saturating_cast(x.float() * self.scale)
        quantised = Quantised(values, 1 / self.scale, x.shape)
        self.record(amax(x))
        return quantised

    def record(self, largest: Tensor) -> None:
        """Take up one step's AMAX, and renew the scale."""
        self.history = [*self.history, largest][-self.history_length :]
        chosen = torch.stack(self.history).max()
        if chosen.isfinite() and chosen > 0:
            scale = E4M3.largest / chosen
            self.scale = scale.clamp(max=torch.finfo(torch.float32).max)


# -------------------------------------------------------------------------------------------------
# Errors


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """||approximate - exact|| / ||exact||, in float64."""
    exact = exact.double()
    return ((approximate.double() - exact).norm() / exact.norm()).item()


def lost(x: Tensor, quantised: Quantised, fmt: Format = E4M3) -> dict[str, float]:
    """Shares of x's nonzero numbers that the cast flushed to zero ("flushed") or cut off at the
    range ("saturated")."""
    restored, nonzero = quantised.restored(), x != 0
    limit = (quantised.inverse * fmt.largest).expand_as(quantised.values).reshape(x.shape)
    count = max(1, nonzero.sum().item())
    return {
        "flushed": ((restored == 0) & nonzero).sum().item() / count,
        "saturated": (x.float().abs() > limit * (1 + 1e-6)).sum().item() / count,
    }


def product_error(x: Tensor, weight: Tensor, granularity: str, fmt: Format = E4M3) -> float:
    """Relative error of x W^T when both are quantised along the dimension that is summed over."""
    exact = F.linear(x.double(), weight.double())
    factors = quantise(x, granularity, fmt), quantise(weight, granularity)
    return relative_error(F.linear(*(factor.restored() for factor in factors)), exact)
