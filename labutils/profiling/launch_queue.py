"""The queue between a host and a GPU, gone through launch by launch.

The host launches one piece of work after the other. Each launch takes the host a while, and its
work takes the GPU a while. The two run side by side: work begins when it has been launched and the
work before it is done. Where the host waits for the GPU, it goes on when all work is done. It runs
ahead of the GPU by `QUEUE` launches at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

QUEUE = 1024
"""Launches that CUDA holds ready for a GPU; a host that is farther ahead waits."""
HALVINGS = 20
"""Steps of a search: each replays a queue, and 20 leave a millionth of the stretch."""


Launch = tuple[float, float, bool]
"""Milliseconds of the host until it is made, milliseconds of the GPU's work, and whether the host
then waits until the GPU has caught up. It has no names, as a search makes millions of them."""


def replay(launches: Sequence[Launch], rounds: int = 2) -> list[tuple[float, float]]:
    """(host's clock, GPU's clock) in milliseconds after each launch, for so many rounds of them.

    The first round begins with an idle GPU.
    """
    hosts, begun = _replayed(launches, rounds)
    ends = [start + launches[at % len(launches)][1] for at, start in enumerate(begun)]
    return list(zip(hosts, ends, strict=True))


def _replayed(launches: Sequence[Launch], rounds: int) -> tuple[list[float], list[float]]:
    """The host's clock after each launch, and when its work begins. A queue has ten thousands of
    launches and a curve needs many replays, hence the plain loop, which makes no pair a launch."""
    host = gpu = 0.0
    hosts, begun = [], []
    for _ in range(rounds):
        for host_ms, gpu_ms, waits in launches:
            host += host_ms
            if len(begun) >= QUEUE and begun[-QUEUE] > host:
                host = begun[-QUEUE]
            start = host if host > gpu else gpu
            begun.append(start)
            gpu = start + gpu_ms
            if waits:
                host = gpu
            hosts.append(host)
    return hosts, begun


def steady_ms(launches: Sequence[Launch]) -> float:
    """Milliseconds of a round once the queue is filled: the second one."""
    _, begun = _replayed(launches, rounds=2)
    # The last launch's work is the same in both.
    return begun[-1] - begun[len(launches) - 1] if begun else 0.0


def root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises from `low` to `high` is 0; the nearer end where it nowhere is.

    By halving the stretch, to a 2**`HALVINGS`th of it.
    """
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
