"""What GPUs tell each other: how fast a sum over all of them is, what part of a step it takes, by
which way it goes.

Bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md). *Algorithm bandwidth* is the
message's size over the time. *Bus bandwidth* is what each link carries: an all-reduce of n ranks
sends and receives 2 (n - 1) / n of the message at each of them. So it is the bus bandwidth that is
compared with a link's data sheet, and that carries over from one number of ranks to another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labutils.profiling import cuda
from labutils.results.records import summarise

SIZES = tuple(2**10 * 4**k for k in range(10))
"""Bytes of the messages that are timed: 1 KiB to 256 MiB."""
REPEATS = 20
WARM_UP = 2
SLOW_MS = 100
"""A message that takes longer than this is sent three times only."""


def time_all_reduce(sizes: Sequence[int], device: str, ranks: int) -> dict[str, Any]:
    """Milliseconds of summing float32 messages of `sizes` bytes over all ranks, as `metrics` and
    `samples` of a run.

    Every rank calls it with the same sizes. Samples: `bytes` and, beside each, the medians
    `all_reduce_ms` and `bus_gb_per_s`. Metrics: `latency_us` (of the quickest
    size), `bus_gb_per_s` and, with its spread, `largest_ms` (of the largest), `ranks`.
    """
    for size in sizes:  # what a connection does once, when the first messages go, is nobody's time
        _times_ms(size, device, repeats=WARM_UP)
    times = [_times_ms(size, device) for size in sizes]
    medians = [summarise(samples)["median"] for samples in times]
    factor = 2 * (ranks - 1) / ranks / 1e6
    bus = [factor * size / ms for size, ms in zip(sizes, medians, strict=True)]
    metrics = {"latency_us": min(medians) * 1e3, "bus_gb_per_s": bus[-1], "ranks": ranks}
    metrics["largest_ms"] = summarise(times[-1])
    samples = {
        "bytes": [float(size) for size in sizes],
        "all_reduce_ms": [round(ms, 5) for ms in medians],
        "bus_gb_per_s": [round(rate, 5) for rate in bus],
    }
    return {"metrics": metrics, "samples": samples}


def _times_ms(size: int, device: str, repeats: int = REPEATS) -> list[float]:
    send = partial(dist.all_reduce, torch.zeros(max(1, size // 4), device=device))
    cuda.repeated(send, 2)
    slowest = torch.tensor(min(cuda.repeated(send, 1)))  # on the host: all agree how often to send
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return cuda.repeated(send, min(3, repeats) if slowest.item() > SLOW_MS else repeats)


CONNECTIONS = r"NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS"
"""What `nvidia-smi topo -m` calls the ways from one GPU to another."""


def read_topology(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> what connects them by `nvidia-smi topo -m`: "NV18" (so many NVLinks), "PIX",
    "PHB", "NODE", "SYS"; each pair once. {} where it shows no two GPUs, or no table."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)  # it underlines its head
    lines = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines()]
    head = next((line for line in lines if not line[0] and "GPU0" in line), [])
    rows = {line[0]: dict(zip(head, line, strict=False)) for line in lines}
    gpus = [name for name in head if re.fullmatch(r"GPU[0-9]{1,3}", name) and name in rows]
    return {
        (int(one[3:]), int(other[3:])): rows[one][other]
        for one, other in itertools.combinations(gpus, 2)
        if re.fullmatch(CONNECTIONS, rows[one].get(other, ""))
    }


@dataclass(frozen=True)
class Link:
    """How long an all-reduce takes, by its bytes: measured points, and straight lines in between on
    logarithmic axes. Below the smallest it takes as long as that, above the largest it has that
    one's bandwidth."""

    bytes: tuple[float, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]]) -> Link:
        """Of an all-reduce run's samples. A message that took longer than a larger one was
        disturbed, and is taken to last as long as that."""
        slowest = list(itertools.accumulate(reversed(samples["all_reduce_ms"]), min))
        return cls(tuple(samples["bytes"]), tuple(reversed(slowest)))

    def all_reduce_ms(self, size: float) -> float:
        between = np.interp(np.log(size), np.log(self.bytes), np.log(self.ms))
        return math.exp(between) * max(1.0, size / self.bytes[-1])


# -------------------------------------------------------------------------------------------------
# What NCCL says


_TRANSPORT = r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via ([\w/-]+)"
SAY_ALL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,P2P,SHM"}
"""What has NCCL say what `nccl_transports` looks for."""


def nccl_transports(text: str) -> dict[str, int]:
    """The transports that NCCL says it takes (`SAY_ALL`), such as "P2P/CUMEM", "SHM/direct",
    "NET/Socket/0", and how many connections by each. Its wording is no interface: see the log
    itself where a number matters.
    """
    return dict(Counter(re.findall(_TRANSPORT, text)))
