"""What a learner writes after lab 01: LoRA put on a model, its gradients checked, merged."""

import copy

import torch
from torch import nn

torch.manual_seed(0)


class LoRA(nn.Module):
    """y = base(x) + alpha/r (x A^T) B^T"""

    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.A = nn.Parameter(torch.randn(r, base.in_features) / r)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


def attach(model, ends, r, alpha):
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(ends):
            model.set_submodule(name, LoRA(layer, r, alpha))
    return model


@torch.no_grad()
def merge(model):
    """W += alpha/r B A, and the plain layer back in its place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoRA):
            layer.base.weight += layer.scale * layer.B @ layer.A
            model.set_submodule(name, layer.base)
    return model


plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
model = attach(copy.deepcopy(plain), ("0", "2"), r=4, alpha=8)
x, y = torch.randn(128, 32), torch.randn(128, 16)
assert torch.equal(model(x), plain(x))  # B is zero: training starts at the pretrained model
trained = [p for p in model.parameters() if p.requires_grad]
assert sum(p.numel() for p in trained) == 4 * (32 + 64) + 4 * (64 + 16)

# The gradients, by the book: of W through the whole model, then by the chain rule to A and B.
for layer in (model[0], model[2]):
    nn.init.normal_(layer.B, std=0.1)
merged = merge(copy.deepcopy(model)).requires_grad_(True)
(merged(x) - y).square().mean().backward()
(model(x) - y).square().mean().backward()
for layer, whole in ((model[0], merged[0]), (model[2], merged[2])):
    G = whole.weight.grad
    torch.testing.assert_close(layer.A.grad, layer.scale * layer.B.T @ G)
    torch.testing.assert_close(layer.B.grad, layer.scale * G @ layer.A.T)
    assert layer.base.weight.grad is None

optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
assert torch.equal(model[0].base.weight, plain[0].weight)  # the pretrained weights are untouched
expected = model(x)
torch.testing.assert_close(merge(model)(x), expected, rtol=1e-4, atol=1e-5)
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
