"""What a learner writes after lab 09: a loop with switches for autocast and checkpointing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self, width=64, depth=6, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()).append(
                nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def train(recompute=False, dtype=None, steps=5):
    """Losses, the last gradients, and bytes kept for the first backward pass."""
    torch.manual_seed(0)
    model = Net(recompute=recompute).to(device)
    x, y = torch.randn(2, 256, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    own, kept, losses, sizes = {p.data_ptr() for p in model.parameters()}, {}, [], []

    def pack(tensor):
        return kept.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach())

    for _ in range(steps):
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast(device, dtype, enabled=dtype is not None),
        ):
            loss = F.mse_loss(model(x).float(), y)
        sizes.append(sum(t.nbytes for (at, _), t in kept.items() if at not in own))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        kept.clear()
    return losses, torch.cat([p.grad.flatten() for p in model.parameters()]), sizes[0]


losses, gradient, size = train()
again_losses, again_gradient, again_size = train(recompute=True)
torch.testing.assert_close(again_losses, losses)
torch.testing.assert_close(again_gradient, gradient)
assert again_size < size / 3, (again_size, size)
assert losses[-1] < losses[0]

for dtype, most in ((torch.float16, 0.01), (torch.bfloat16, 0.05)):
    found, rounded, _ = train(recompute=True, dtype=dtype)
    off = ((rounded - gradient).norm() / gradient.norm()).item()
    print(f"{dtype}: loss {found[-1]:.4f} instead of {losses[-1]:.4f}, gradient {off:.2%} off")
    assert off < most and abs(found[-1] / losses[-1] - 1) < 0.01
print(f"kept for the backward pass: {size / 1e6:.2f} MB, checkpointed {again_size / 1e6:.2f}")
