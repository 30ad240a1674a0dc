"""What a learner writes after lab 00: a product timed rightly, and its floor here."""

import time
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32


def time_ms(call, repeats=20, warm_up=3):
    for _ in range(warm_up):
        call()
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(time.perf_counter())
        return median(1e3 * (end - start) for start, end in pairwise(marks))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(marks))


def rates(n, count):
    """FLOP/s of a product, bytes/s of a buffer that is read and written."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    buffer = torch.randn(count, device=device)
    flops = 2 * n**3 / (time_ms(lambda: a @ b) / 1e3)
    return flops, 2 * buffer.nbytes / (time_ms(buffer.neg_) / 1e3)


rate, bandwidth = rates(8192, 2**28) if device == "cuda" else rates(768, 2**24)
ridge = rate / bandwidth
print(f"{rate / 1e12:.3g} TFLOP/s, {bandwidth / 1e9:.0f} GB/s, ridge {ridge:.1f} FLOP/byte")

tokens, width = (4096, 4096) if device == "cuda" else (512, 768)
x = torch.randn(tokens, width, device=device, dtype=dtype)
weight = torch.randn(width, width, device=device, dtype=dtype)
flops, moved = 2 * tokens * width**2, (2 * tokens * width + width**2) * dtype.itemsize
floor, ms = 1e3 * max(flops / rate, moved / bandwidth), time_ms(lambda: F.linear(x, weight))
print(f"projection: {flops / moved:.1f} FLOP/byte, floor {floor:.3f}, took {ms:.3f} ms")
assert ridge < flops / moved, "arithmetic is the limit of this product"
assert 0.3 * floor < ms < 10 * floor, (floor, ms)  # as good as the one that gave the rate

# The count is right: FLOPs as PyTorch's own counter sees them, bytes as the tensors have them.
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

with FlopCounterMode(display=False) as counter:
    y = F.linear(x, weight)
assert counter.get_total_flops() == flops
assert x.nbytes + weight.nbytes + y.nbytes == moved
# And so is the clock: it finds the length of something known.
if device == "cpu":
    slept = time_ms(lambda: time.sleep(0.01), repeats=5)
    assert 10 <= slept < 30, slept
