"""Two clocks through the launches of a step: those of an H200 on record, and one here."""

import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
RECORDED = {  # kernels' ms, launches, µs of the host for each, waits; and the ms that were measured
    "Qwen3-8B's loop": ((368, 11_998, 24.6, 7), 406),
    "gpt-oss-20b's loop over experts": ((494, 59_479, 21.1, 5_036), 1_417),
    "experts grouped": ((440, 8_723, 20.1, 7), 467),
    "captured": ((234, 7, 5.4, 6), 234),
}


def replay(launches):
    """launches: (host's ms, kernel's ms, whether the host then waits) -> ms"""
    host = gpu = 0.0
    for c, k, waits in launches:
        host += c
        gpu = max(gpu, host) + k
        if waits:
            host = gpu
    return gpu


def alike(kernels_ms, launches, host_us, waits):
    """A queue of launches that are all the same, with the waits spread over them."""
    for at in range(launches):
        yield host_us / 1e3, kernels_ms / launches, at * waits % launches < waits


def queue_of(profiler):
    """[kernel's ms, whether the host then waits] of each operation; a CPU's waits for itself."""
    queue = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        us = event.self_cpu_time_total if not ON_GPU else sum(k.duration for k in event.kernels)
        if us and event.name.startswith("aten::"):  # the profiler's own events have kernels, too
            queue.append([us / 1e3, not ON_GPU])
        elif queue and "Synchronize" in event.name:
            queue[-1][1] = True
    return queue


def studied(width):
    """(queue, ms) of a step through 24 layers."""
    device = "cuda" if ON_GPU else "cpu"
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24))).to(device)
    x, times = torch.randn(128, width, device=device), []

    def step():
        model(x).square().mean().backward()
        x.sum().item()  # waits

    for _ in range(12):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    with torch.profiler.profile() as profiler:
        step()
    return queue_of(profiler), sorted(times)[6]


for name, (step, measured_ms) in RECORDED.items():
    predicted = replay(alike(*step))
    assert 0.8 < predicted / measured_ms < 1.2, name
    print(f"{name}: predicted {predicted:.0f}, measured {measured_ms} ms")

light, light_ms = studied(width=16)
c = (light_ms - sum(k for k, waits in light if waits and not ON_GPU)) / len(light)
queue, measured_ms = studied(width=256)
predicted = replay((c, k, waits) for k, waits in queue)
assert len(queue) > 24 and predicted > 0
print(f"here: predicted {predicted:.1f}, measured {measured_ms:.1f} ms")
