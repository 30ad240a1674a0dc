"""Two ranks: DDP, no_sync, FSDP, one timed all-reduce; and the weights of one process."""

import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS, MICRO = 2, 4


def network_and_batches():
    torch.manual_seed(0)  # the same on each rank
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(3, MICRO, 8, 64)


def train(network, batches):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    for micro_batches in batches:
        optimizer.zero_grad()
        for at, micro_batch in enumerate(micro_batches, 1):
            quiet = at < MICRO and hasattr(network, "no_sync")  # DDP sends the last one only
            with network.no_sync() if quiet else nullcontext():
                loss = (network(micro_batch) - micro_batch).square().sum(-1).mean()
                (loss / MICRO).backward()
        optimizer.step()


def check(parameters):
    network, batches = network_and_batches()
    train(network, batches)
    for one, other in zip(parameters, network.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-6)


def on_each_rank():
    dist.init_process_group("gloo")
    network, batches = network_and_batches()
    mine = batches[:, :, dist.get_rank() :: RANKS]
    train(DistributedDataParallel(network), mine)
    check(network.parameters())

    network, _ = network_and_batches()
    for part in (*network[::2], network):
        fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)))
    train(network, mine)
    shards = [parameter.to_local().numel() for parameter in network.parameters()]
    assert sum(shards) * RANKS == sum(parameter.numel() for parameter in network.parameters())
    check([parameter.full_tensor() for parameter in network.parameters()])

    message = torch.ones(2**20)
    began = time.perf_counter()
    dist.all_reduce(message)
    seconds = time.perf_counter() - began
    assert message.eq(RANKS).all()
    gb_per_s = 2 * (RANKS - 1) / RANKS * message.nbytes / seconds / 1e9
    print(f"rank {dist.get_rank()}: DDP and FSDP train as one process; {gb_per_s:.2g} GB/s")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()
    os._exit(0)  # without Python's own end, in which a thread of gloo's may abort the process


if dist.is_torchelastic_launched():
    on_each_rank()
else:  # as in a shell: torchrun --standalone --nproc-per-node=2 11_ddp_by_torchrun.py
    from torch.distributed.run import main

    main(["--standalone", f"--nproc-per-node={RANKS}", *sys.argv[:1]])
