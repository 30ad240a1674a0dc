"""A small GPT as many write it at first: attention written out, AdamW tensor by tensor, a loss that
is printed at each step, texts made in the training process.

python written_out.py LENGTH WIDTH LAYERS WORDS
"""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, length, words):
        self.length, self.words = length, words

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self.words, (self.length,), generator=generator)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x):
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(length, length, device=x.device).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out = weights @ v
        return self.out(out.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def main():
    length, width, layers, words = map(int, sys.argv[1:])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = [Block(width, width // 32) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader = DataLoader(Texts(length, words), batch_size=8, shuffle=True)
    for step, ids in zip(range(60), loader, strict=False):
        ids = ids.to(device)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
