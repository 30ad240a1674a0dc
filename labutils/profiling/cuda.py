"""One facade for the `torch.cuda` calls that raise on a machine without a GPU or with a CPU build
of PyTorch.

Here they do nothing, or say None, instead. Timing without a GPU falls back to the host's clock.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

GB = 10**9


def available() -> bool:
    """Whether PyTorch can use a GPU. A PyTorch that can't even be imported can't."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # a broken CUDA library raises OSError, RuntimeError or ImportError
        return False


def _torch() -> Any:
    """PyTorch, or None without a GPU."""
    if not available():
        return None
    import torch

    return torch


def card() -> dict[str, Any]:
    """{gpu, gpu_id, gpu_memory_gb, compute_capability, cuda} of the GPU in use; {} without one. The
    id tells two cards of one model apart: the beginning of the card's UUID."""
    if not (torch := _torch()):
        return {}
    with warnings.catch_warnings():  # the doctor says what an unsupported card means
        warnings.simplefilter("ignore")
        properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_id": str(getattr(properties, "uuid", ""))[:8] or None,
        "gpu_memory_gb": round(properties.total_memory / GB, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def gpu_device() -> Any:
    """What NVIDIA's driver tells of PyTorch's first GPU, as nvitop's `Device`; None where it can't
    be asked.

    nvitop is not even imported where PyTorch sees no GPU: without a driver it prints several lines
    of advice.
    """
    if not available():
        return None
    try:
        import nvitop

        devices = nvitop.Device.cuda.all()
    except Exception:  # a container may have the GPU and not the driver's management library
        return None
    return devices[0] if devices else None


def count() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if (torch := _torch()) else 0


def architectures() -> list[str]:
    """What this PyTorch was compiled for ("sm_90" machine code, "compute_90" PTX); [] without a
    GPU.
    """
    return list(torch.cuda.get_arch_list()) if (torch := _torch()) else []


def capability() -> tuple[int, int] | None:
    """(major, minor) compute capability of the GPU in use, or None."""
    version = card().get("compute_capability")
    return tuple(int(part) for part in version.split(".")) if version else None


def synchronize() -> None:
    """Wait until the GPU has done all it was given."""
    if torch := _torch():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give memory that PyTorch keeps but does not use back to the GPU."""
    if torch := _torch():
        torch.cuda.empty_cache()


def reset_peak_memory() -> None:
    """Start a new reading of `peak_memory`."""
    if torch := _torch():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> tuple[float, float] | None:
    """(allocated, reserved) GPU memory at its highest since the last reset, in 10^9 bytes; None
    without a GPU.
    """
    if not (torch := _torch()):
        return None
    return torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB


def allocated_memory() -> float | None:
    """GPU memory that this process's tensors hold now, in 10^9 bytes; None without a GPU."""
    return torch.cuda.memory_allocated() / GB if (torch := _torch()) else None


def take_workspaces() -> None:
    """Have cuBLAS take what it holds for the threads of forward and backward passes. Else the first
    trainer's peak would contain it.
    """
    if torch := _torch():
        one = torch.ones(64, 64, device="cuda", requires_grad=True)
        (one @ one).sum().backward()


def free_memory() -> float | None:
    """GPU memory that nobody uses, in 10^9 bytes; None without a GPU."""
    return torch.cuda.mem_get_info()[0] / GB if (torch := _torch()) else None


@contextmanager
def float32_products(where: Iterable[Any], rounding: str) -> Iterator[None]:
    """A context in which the PyTorch backends `where` multiply float32 inputs as they are ("ieee"),
    or rounded to TF32 ("tf32").

    It changes each backend's own setting alone. PyTorch raises where one reads the older setting
    (`allow_tf32`, `get_float32_matmul_precision`) and the two contradict each other. Compiled code
    is cached under these values: left changed, they would hide what other processes compiled.
    """
    before = [(backend, backend.fp32_precision) for backend in where]
    try:
        for backend, _ in before:
            backend.fp32_precision = rounding
        yield
    finally:
        for backend, value in before:
            backend.fp32_precision = value


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
    repeated(call, warmup)
    one_ms = max(sum(repeated(call, 1)), 1e-3)
    return repeated(call, max(at_least, min(at_most, int(1e3 * budget_s / one_ms))))


def repeated(call: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of each of so many executions of `call`, one right after the other."""
    import torch

    from labutils.profiling.timing import StepClock  # it imports PyTorch

    clock = StepClock(torch.device("cuda" if available() else "cpu"))
    clock.start()
    for _ in range(times):
        call()
        clock.mark(0.0)
    return clock.stop().step_ms


BURSTS = 10


def timed_in_bursts(call: Callable[[], Any], burst_s: float = 0.01) -> list[float]:
    """`timed` with a rest before each of `BURSTS` short bursts, so that a card that meets its power
    limit keeps its clock.

    Without a GPU there is no rest, and about as much time is spent as with one.
    """
    if not available():
        return timed(call, budget_s=BURSTS * burst_s, at_least=7)
    one = statistics.median(timed(call, budget_s=0, at_least=3)) / 1e3
    count = max(2, min(10, round(burst_s / one)))
    times = []
    for _ in range(BURSTS):
        time.sleep(0.05)
        times += timed(call, budget_s=0, warmup=0, at_least=count)
    return times


def warm_up(call: Callable[[], Any], times: int) -> None:
    """Run `call` so often on a side stream: capturing wants its libraries already initialised."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(side)


def graph_of(call: Callable[[], Any]) -> Callable[[], None] | None:
    """`call`'s GPU work recorded once as a CUDA graph, to be replayed without the host; None
    without a GPU.

    `call` runs three times beforehand, see `warm_up`.
    """
    if not (torch := _torch()):
        return None
    warm_up(call, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
