"""What the compiler did, by our account, where one knows what it does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from labutils.layers.cuda_graph import VARIANTS, variants_allowed
from labutils.profiling.recompilation import Compilation

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def doubled(x):
    return (x * 2).sum()


def run(dynamic: bool | None, sizes: tuple[int, ...]) -> Compilation:
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=dynamic)
    with Compilation() as found:
        for size in sizes:
            compiled(torch.ones(size, requires_grad=True)).backward()
    return found


@pytest.mark.parametrize(
    ("dynamic", "graphs", "recompilations"),
    [(False, 3, 2), (None, 2, 1), (True, 1, 0)],
    ids=["static", "automatic", "any"],
)
def test_three_sizes(dynamic, graphs, recompilations):
    found = run(dynamic, (3, 4, 5, 3))
    assert (found.graphs, found.compilations, found.recompilations) == (
        graphs,
        graphs,
        recompilations,
    )
    assert found.breaks.total() == 0
    assert found.seconds > 0
    assert found.metrics() == {
        "graphs": graphs,
        "graph_breaks": 0,
        "recompilations": recompilations,
        "given_up": 0,
        "compile_s": found.seconds,
    }


def test_a_recompilation_says_why():
    found = run(False, (3, 4))
    assert list(found.reasons) == ["tensor 'x' size mismatch at index 0. expected 3, actual 4"]


def test_a_graph_break_is_counted_with_its_reason():
    def branching(x):
        y = x.sin()
        return y + 1 if y.sum().item() > 0 else y - 1

    with Compilation() as found:
        torch.compile(branching, backend="aot_eager")(torch.ones(3))
    assert found.breaks.total() == 1
    assert "item()" in next(iter(found.breaks))
    assert found.graphs == 2


def test_a_function_that_is_given_up_is_named():
    with (
        mock.patch.object(torch._dynamo.config, "recompile_limit", 2),
        variants_allowed("default", "automatic"),
    ):
        found = run(False, (3, 4, 5, 6))
    assert (found.graphs, found.given_up) == (2, ["doubled"])


def test_elsewhere_too_many_versions_are_an_error(monkeypatch):
    monkeypatch.setattr("labutils.layers.cuda_graph.VARIANTS", 2)
    with variants_allowed("default", "static"), pytest.raises(Exception, match="recompile"):
        run(False, (3, 4, 5, 6))


def test_other_sessions_variants_do_not_count_against_a_recipe():
    """PyTorch's own 8 are passed, and what was allowed is forgotten afterwards: others still get
    the default.
    """
    config = torch._dynamo.config
    before = config.recompile_limit, config.fail_on_recompile_limit_hit
    with variants_allowed("default", "any"):
        assert run(False, tuple(range(2, 14))).graphs == 12 < VARIANTS
    assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == before
    with variants_allowed("off", "static"):
        assert config.recompile_limit == before[0]


def test_what_was_compiled_before_is_not_counted():
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=False)
    compiled(torch.ones(3))
    with Compilation() as found:
        compiled(torch.ones(3))
    assert set(found.metrics().values()) == {0}
    with Compilation() as found:
        compiled(torch.ones(4))
    assert (found.graphs, found.recompilations) == (1, 1)
    with Compilation() as found:
        compiled(torch.ones(4))
    assert found.graphs == 0
