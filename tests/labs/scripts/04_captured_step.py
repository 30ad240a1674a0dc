"""Four micro-steps, their log and their zeroing in one graph: the weights of the plain loop."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, MICRO = 5, 4


def tensors(result):
    several = result if isinstance(result, tuple | list) else [result]
    return [one for one in several if isinstance(one, torch.Tensor)]


class Tape(TorchDispatchMode):
    """What a CUDA graph does, by hand: for a CPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                old.copy_(new)


def capture(function):
    graph = torch.cuda.CUDAGraph() if DEVICE == "cuda" else Tape()
    with torch.cuda.graph(graph) if DEVICE == "cuda" else graph:
        function()
    return graph


def train(model, batches, captured):
    """The losses of `STEPS` optimizer steps, each of `MICRO` micro-batches."""
    inputs, losses = torch.empty_like(batches[0]), torch.zeros(STEPS, device=DEVICE)
    place = torch.zeros(1, dtype=torch.long, device=DEVICE)
    for p in model.parameters():  # before the capture: it must add, not store
        p.grad = torch.zeros_like(p)

    def gradients():
        for p in model.parameters():
            p.grad.zero_()
        total = torch.zeros(1, device=DEVICE)
        for micro_batch in inputs:
            loss = model(micro_batch).square().mean() / MICRO
            loss.backward()
            total += loss.detach()
        losses.index_copy_(0, place, total)
        place.add_(1).remainder_(STEPS)

    inputs.copy_(batches[0])
    gradients()  # warms up
    step = capture(gradients).replay if captured else gradients
    place.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for batch in batches:
        inputs.copy_(batch)
        step()
        optimizer.step()
    return losses.tolist()  # the only line that waits


torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
recorded = copy.deepcopy(plain)
batches = torch.randn(STEPS, MICRO, 16, 64, device=DEVICE)
expected, found = train(plain, batches, captured=False), train(recorded, batches, captured=True)

assert len(set(expected)) == STEPS
torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-6)
for one, other in zip(recorded.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
print(f"on {DEVICE}: the losses {[f'{loss:.4f}' for loss in found]} and weights of the plain loop")
