"""A frozen linear layer in FP8 with a scale for each row, against torch's own casts."""

import torch
from torch import nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def by_row(x):
    """x [n, k] in E4M3, and what undoes each row's scale [n, 1]."""
    inverse = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-30) / LARGEST
    return (x / inverse).to(torch.float8_e4m3fn), inverse


def multiply(a, b, a_inverse, b_inverse):
    """a [m, k] times b [n, k] transposed, as the tensor cores would."""
    return a.float() @ b.float().T * (a_inverse * b_inverse.T)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W8, inverse):
        ctx.save_for_backward(W8, inverse)
        x8, x_inverse = by_row(x)
        return multiply(x8, W8, x_inverse, inverse)

    @staticmethod
    def backward(ctx, dY):
        W8, inverse = ctx.saved_tensors
        dY8, dY_inverse = by_row(dY * inverse.T)
        return multiply(dY8, W8.T, dY_inverse, torch.ones(W8.shape[1], 1)), None, None


class FrozenFP8(nn.Module):
    """A frozen nn.Linear of one byte a parameter."""

    def __init__(self, linear):
        super().__init__()
        W8, inverse = by_row(linear.weight.detach())
        self.register_buffer("W8", W8)
        self.register_buffer("inverse", inverse)

    def forward(self, x):
        return Product.apply(x, self.W8, self.inverse)


def off(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=False).requires_grad_(False)
    frozen = FrozenFP8(linear)
    held = sum(buffer.nbytes for buffer in frozen.buffers())
    print(f"{held / linear.weight.numel():.2f} bytes a parameter")
    assert held < 1.05 * linear.weight.numel()

    x, dY = torch.randn(64, 256, requires_grad=True), torch.randn(64, 512)
    y, exact = frozen(x), linear(x)
    (dX,), (exact_dX,) = (torch.autograd.grad(out, x, dY) for out in (y, exact))
    print(f"y is {off(y, exact):.1%} off, dX {off(dX, exact_dX):.1%}")
    assert 0.03 < off(y, exact) < 0.045 and 0.03 < off(dX, exact_dX) < 0.045

    # The same from whole casts: what is stored is exactly what torch's cast gives.
    scale = LARGEST / linear.weight.abs().amax(dim=1, keepdim=True)
    cast = (linear.weight * scale).to(torch.float8_e4m3fn).float() / scale
    assert off(frozen.W8.float() * frozen.inverse, cast) < 1e-3
