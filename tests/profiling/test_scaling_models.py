"""Steps with workers and on several GPUs, predicted, against simulations; NCCL's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.profiling import ddp_model
from labutils.profiling.collectives import Link, nccl_transports, read_topology
from labutils.results.records import Run

MIB = 2**20
LINK = Link((1024.0, 2.0**20, 2.0**28), (0.02, 0.05, 2.0))


def alone(lead, sizes, **metrics):
    samples = {"lead_ms": lead, "lead_bytes": sizes}
    return Run("", "one process", metrics={"step_ms": 100.0} | metrics, samples=samples)


def test_a_link_goes_through_its_points():
    assert [LINK.all_reduce_ms(size) for size in LINK.bytes] == pytest.approx(list(LINK.ms))
    assert LINK.all_reduce_ms(1) == pytest.approx(0.02)
    assert LINK.all_reduce_ms(2.0**30) == pytest.approx(8.0)


@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=60))
def test_every_gradient_is_in_one_bucket_and_a_bucket_ends_when_it_is_full(sizes):
    buckets = ddp_model.buckets(sizes)
    assert [place for bucket in buckets for place in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(buckets):
        limit = (1 if number == 0 else 25) * MIB
        assert sum(sizes[place] for place in bucket[:-1]) < limit
        if number < len(buckets) - 1:
            assert sum(sizes[place] for place in bucket) >= limit


def simulated(lead, sizes, link):
    """Time in small steps: a bucket that is complete is sent as soon as the link is free."""
    waiting = [
        (-lead[bucket[-1]], link.all_reduce_ms(sum(sizes[place] for place in bucket)))
        for bucket in ddp_model.buckets(sizes)
    ]
    now, dt, left = -lead[0], 0.005, 0.0
    while waiting or left > 0:
        if left <= 0 and waiting and waiting[0][0] <= now:
            left = waiting.pop(0)[1]
        left -= dt
        now += dt
    return max(0.0, now)


@pytest.mark.parametrize(
    ("lead", "sizes"),
    [
        ([90, 80, 50, 20, 10, 0], [4 * MIB] * 6),
        ([5, 4, 3, 2, 1, 0], [200 * MIB] * 6),
        ([40, 0], [1000, 900 * MIB]),
        ([0], [64]),
    ],
)
def test_what_is_exposed_is_what_a_simulation_finds(lead, sizes):
    step = ddp_model.ddp(alone([float(ms) for ms in lead], sizes), LINK)
    assert step.exposed_ms == pytest.approx(simulated(lead, sizes, LINK), abs=0.05)


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOG = """
node:1:9 [0] NCCL INFO Using network Socket
node:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node:1:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node:2:9 [1] NCCL INFO Channel 00 : 1[1b000] -> 0[1a000] via SHM/direct/direct
node:2:9 [1] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0
"""


def test_nccl_s_log_tells_the_ways():
    assert nccl_transports(LOG) == {"P2P/CUMEM/read": 2, "SHM/direct/direct": 1, "NET/Socket/0": 1}


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_what_connects_gpus_is_read_by_pairs():
    assert read_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert read_topology("\tGPU0\tGPU1\nGPU0\t X \n") == {}  # cut off
