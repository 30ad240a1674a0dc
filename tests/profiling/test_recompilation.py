"""What the compiler did, by our account, where one knows what it does."""

from unittest import mock

import pytest
import torch

from labutils.layers.cuda_graph import variants_allowed
from labutils.profiling.recompilation import Compilation

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def doubled(x):
    return (x * 2).sum()


def run(dynamic, sizes):
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=dynamic)
    with Compilation() as counted:
        for size in sizes:
            compiled(torch.ones(size, requires_grad=True)).backward()
    return counted


@pytest.mark.parametrize(
    ("dynamic", "graphs", "recompilations"),
    [(False, 3, 2), (None, 2, 1), (True, 1, 0)],
    ids=["static", "automatic", "any"],
)
def test_three_sizes(dynamic, graphs, recompilations):
    counted = run(dynamic, (3, 4, 5, 3))
    counts = {"graphs": graphs, "graph_breaks": 0, "recompilations": recompilations}
    assert counted.metrics() == counts | {"given_up": 0}


def test_a_graph_break_is_counted():
    def branching(x):
        y = x.sin()
        return y + 1 if y.sum().item() > 0 else y - 1

    with Compilation() as counted:
        torch.compile(branching, backend="aot_eager")(torch.ones(3))
    assert (counted.graphs, counted.graph_breaks) == (2, 1)


def test_a_function_that_is_given_up_is_counted():
    limit = mock.patch.object(torch._dynamo.config, "recompile_limit", 2)
    with limit, variants_allowed("default", "automatic"):
        counted = run(False, (3, 4, 5, 6))
    assert (counted.graphs, counted.given_up) == (2, 1)


def test_what_was_compiled_before_is_not_counted():
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=False)
    compiled(torch.ones(3))
    with Compilation() as counted:
        compiled(torch.ones(3))
    assert set(counted.metrics().values()) == {0}
    with Compilation() as counted:
        compiled(torch.ones(4))
    assert (counted.graphs, counted.recompilations) == (1, 1)
