"""A training loop that is profiled: three steps of four micro-steps, read back from the trace."""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.profiler import record_function

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Flatten(), nn.LazyLinear(1)).to(device)
model(torch.zeros(1, 3, 16, 16, device=device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
waited = []


def read_image():
    began = time.perf_counter()
    time.sleep(4e-3)  # a file, decoded
    waited.append(1e3 * (time.perf_counter() - began))
    return torch.randn(1, 3, 16, 16)


def optimizer_step():
    for _ in range(4):
        with record_function("data"):
            image = read_image().to(device)
        with record_function("forward"):
            loss = model(image).square().mean()
        with record_function("backward"):
            (loss / 4).backward()
    with record_function("clip"):
        nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


with tempfile.TemporaryDirectory() as folder:
    prof = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(folder),
    )
    prof.start()
    for _ in range(5):
        optimizer_step()
        prof.step()
    prof.stop()
    (path,) = Path(folder).glob("*.pt.trace.json")
    events = json.loads(path.read_text())["traceEvents"]

took, count = Counter(), Counter()
for event in events:
    if event.get("cat") == "user_annotation":
        name = "step" if event["name"].startswith("ProfilerStep#") else event["name"]
        took[name] += event["dur"] / 1e3
        count[name] += 1

assert count["step"] == 3, "the schedule records three steps"
assert count["data"] == count["forward"] == 12 and count["clip"] == 3
by_the_clock = sum(waited[-12:])
assert abs(took["data"] - by_the_clock) < 0.15 * by_the_clock, "the trace agrees with the clock"
assert took["data"] > 0.3 * took["step"], "the loop waits for its images, and the trace says so"
for name, ms in took.most_common(5):
    print(f"{name:10} {ms / 3:6.2f} ms a step, profiled")
