"""What a learner writes after lab 09: a loop with switches for autocast and checkpointing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


def block():
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def train(recompute=False, dtype=None, steps=5):
    """The last loss and gradients, and the bytes that autograd keeps of a step."""
    torch.manual_seed(0)
    blocks, kept = nn.ModuleList(block() for _ in range(6)).to(device), {}
    x, y = torch.randn(2, 256, 64, device=device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def forward(x):
        for one in blocks:
            x = x + (checkpoint(one, x, use_reentrant=False) if recompute else one(x))
        return x

    def keep(tensor):
        return kept.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach())

    for _ in range(steps):
        kept.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast(device, dtype, enabled=dtype is not None):
            loss = F.mse_loss(forward(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    own = {p.data_ptr() for p in blocks.parameters()}
    size = sum(tensor.nbytes for (at, _), tensor in kept.items() if at not in own)
    return loss, torch.cat([p.grad.flatten() for p in blocks.parameters()]), size


loss, gradient, size = train()
again, again_gradient, again_size = train(recompute=True)
torch.testing.assert_close((again, again_gradient), (loss, gradient))
assert again_size < size / 3 and loss < train(steps=1)[0]
print(f"kept for the backward pass: {size / 1e6:.2f} MB, checkpointed {again_size / 1e6:.2f}")
for dtype, most in ((torch.float16, 0.01), (torch.bfloat16, 0.05)):
    found, rounded, _ = train(recompute=True, dtype=dtype)
    off = ((rounded - gradient).norm() / gradient.norm()).item()
    print(f"{dtype}: loss {found:.4f} instead of {loss:.4f}, gradient {off:.2%} off")
    assert off < most and abs(found / loss - 1) < 0.01
