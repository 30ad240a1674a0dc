"""Bytes of tensors alive, against sums by hand."""

from __future__ import annotations

import torch

from labutils.profiling.live_tensors import LiveTensors

KB = 1024


def floats(count: int) -> torch.Tensor:
    return torch.zeros(count // 4)


def test_what_is_held_counts_and_what_is_let_go_does_not():
    with LiveTensors() as live:
        a = floats(4 * KB)
        b = a + 1
        assert live.now == 8 * KB
        del a
        assert live.now == 4 * KB
        c = b * 2
        del b, c
    assert (live.now, live.peak) == (0, 8 * KB)


def test_views_and_known_tensors_count_once_or_not_at_all():
    weight = floats(16 * KB)
    with LiveTensors([weight]) as live:
        view = weight.view(2, -1).t()
        a = floats(4 * KB)
        half = a[: len(a) // 2]
        del a
        assert live.now == 4 * KB  # the half holds all of it
    assert view.shape == (2048, 2)
    assert half.numel() == 512


def test_what_waits_for_the_backward_pass_is_seen_and_gone_after_it():
    x = torch.randn(KB, requires_grad=True)
    with LiveTensors([x]) as live:
        y = x.exp().sin().sum()
        assert (
            live.now == 4 * KB + 4
        )  # exp's result, which sin takes its cosine of as well; and the sum
        y.backward()
        del y
        assert live.now == 4 * KB  # the gradient
    assert live.peak > 2 * 4 * KB
