"""A slower host: what is delayed, by how much, and that nothing else changes."""

from __future__ import annotations

import time

import pytest
import torch
from torch.profiler import record_function

from labutils.profiling.host_delay import SlowerHost


def work(x):
    """Two products, a view between them, and a backward pass."""
    return (x @ x).t().matmul(x).sum()


def test_operations_are_delayed_forward_and_backward_and_views_are_not():
    x = torch.rand(4, 4, requires_grad=True)
    with SlowerHost() as host:
        loss = work(x)
        forward = host.delayed, host.calls
        loss.backward()
    assert forward[0] == 3
    assert forward[1] > 3
    assert (
        host.delayed >= forward[0] + 5
    )  # the sum's gradient is a view; four products and an addition


@pytest.mark.parametrize("delay_us", [200, 1000])
def test_a_step_lasts_longer_by_the_delay_of_each_operation(delay_us):
    x = torch.rand(4, 4)
    with SlowerHost(delay_us) as host:
        began = time.perf_counter()
        for _ in range(20):
            x @ x
        took_ms = (time.perf_counter() - began) * 1e3
    assert host.delayed == 20
    assert host.waited_ms >= 20 * delay_us / 1e3
    assert took_ms >= host.waited_ms


def test_results_are_the_same():
    x = torch.rand(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(work(x), x)
    with SlowerHost(1):
        (found,) = torch.autograd.grad(work(x), x)
    assert torch.equal(found, expected)


def test_a_view_that_is_not_called_one_is_not_delayed():
    """A product with a batch is folded into one of matrices and unfolded by `_unsafe_view`, which
    launches nothing.
    """
    with SlowerHost() as host:
        torch.rand(2, 3, 4) @ torch.rand(4, 5)
    assert host.delayed == 3  # two draws and one product


def test_allocations_and_the_profilers_marks_launch_nothing():
    with SlowerHost(1) as host, record_function("forward"):
        torch.empty(3).detach()
    assert host.delayed == 0


def test_the_delay_ends_with_the_context():
    host = SlowerHost(1)
    with host:
        torch.ones(2) + 1
    counted = host.calls
    torch.ones(2) + 1
    assert host.calls == counted > 0


@pytest.mark.parametrize("delay_us", [-1, float("nan")])
def test_a_delay_that_cannot_be_is_refused(delay_us):
    with pytest.raises(ValueError, match="0 microseconds or more"):
        SlowerHost(delay_us)
