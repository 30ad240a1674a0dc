"""One facade for the `torch.cuda` calls that raise on a machine without a GPU or with a CPU build
of PyTorch.

Here they do nothing, or say None, instead. Timing without a GPU falls back to the host's clock.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

GB = 10**9


def available() -> bool:
    """Whether PyTorch can use a GPU. A PyTorch that can't even be imported can't."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # a broken CUDA library raises OSError, RuntimeError or ImportError
        return False


def _gpu() -> Any:
    """`torch.cuda`, or None without a GPU."""
    if not available():
        return None
    import torch

    return torch.cuda


def card() -> dict[str, Any]:
    """{gpu, gpu_memory_gb, compute_capability, cuda} of the GPU in use; {} without one."""
    if not available():
        return {}
    import torch

    with warnings.catch_warnings():  # the doctor says what an unsupported card means
        warnings.simplefilter("ignore")
        properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gb": round(properties.total_memory / GB, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def count() -> int:
    """GPUs that this process may use."""
    return gpu.device_count() if (gpu := _gpu()) else 0


def architectures() -> list[str]:
    """What this PyTorch was compiled for ("sm_90" machine code, "compute_90" PTX); [] without a
    GPU.
    """
    return list(gpu.get_arch_list()) if (gpu := _gpu()) else []


def capability() -> tuple[int, int] | None:
    """(major, minor) compute capability of the GPU in use, or None."""
    version = card().get("compute_capability")
    return tuple(int(part) for part in version.split(".")) if version else None


def synchronize() -> None:
    """Wait until the GPU has done all it was given."""
    if gpu := _gpu():
        gpu.synchronize()


def empty_cache() -> None:
    """Give memory that PyTorch keeps but does not use back to the GPU."""
    if gpu := _gpu():
        gpu.empty_cache()


def reset_peak_memory() -> None:
    """Start a new reading of `peak_memory`."""
    if gpu := _gpu():
        gpu.reset_peak_memory_stats()


def peak_memory() -> tuple[float, float] | None:
    """(allocated, reserved) GPU memory at its highest since the last reset, in 10^9 bytes; None
    without a GPU.
    """
    gpu = _gpu()
    return (gpu.max_memory_allocated() / GB, gpu.max_memory_reserved() / GB) if gpu else None


def allocated_memory() -> float | None:
    """GPU memory that this process's tensors hold now, in 10^9 bytes; None without a GPU."""
    return gpu.memory_allocated() / GB if (gpu := _gpu()) else None


def free_memory() -> float | None:
    """GPU memory that nobody uses, in 10^9 bytes; None without a GPU."""
    return gpu.mem_get_info()[0] / GB if (gpu := _gpu()) else None


def timed(
    call: Callable[[], Any],
    budget_s: float = 0.5,
    warmup: int = 3,
    at_least: int = 5,
    at_most: int = 200,
) -> list[float]:
    """Milliseconds of each of several executions of `call`, after `warmup` untimed ones.

    On a GPU these are the times between events in the stream, so `call` should keep it busy for
    longer than a launch takes (some 10 us); elsewhere the host's clock. Repeats for about
    `budget_s`, within `at_least` .. `at_most`.
    """
    for _ in range(warmup):
        call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    one = max(time.perf_counter() - start, 1e-6)
    repeats = max(at_least, min(at_most, int(budget_s / one)))
    return _timed_by_events(call, repeats) if available() else _timed_by_clock(call, repeats)


def timed_in_bursts(
    call: Callable[[], Any], bursts: int = 10, burst_s: float = 0.01
) -> list[float]:
    """`timed` with a rest before each short burst, so that a card that meets its power limit keeps
    its clock.

    Without a GPU there is no rest, and about as much time is spent as with one.
    """
    if not available():
        return timed(call, budget_s=bursts * burst_s, at_least=7)
    one = statistics.median(timed(call, budget_s=0, at_least=3)) / 1e3
    count = max(2, min(10, round(burst_s / one)))
    times = []
    for _ in range(bursts):
        time.sleep(0.05)
        times += timed(call, budget_s=0, warmup=0, at_least=count)
    return times


def _timed_by_events(call: Callable[[], Any], repeats: int) -> list[float]:
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]


def _timed_by_clock(call: Callable[[], Any], repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def graph_of(call: Callable[[], Any]) -> Callable[[], None] | None:
    """`call`'s GPU work recorded once as a CUDA graph, to be replayed without the host; None
    without a GPU.

    `call` runs three times beforehand on a side stream, as capturing wants its libraries already
    initialised.
    """
    if not available():
        return None
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
