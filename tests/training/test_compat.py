"""Private interfaces that labutils uses are where they were, and do what they are used for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from labutils.profiling import compat


def test_accelerate_takes_a_second_precision():
    from accelerate import Accelerator

    for precision in ("no", "bf16"):
        compat.forget_other_precision(precision)
        assert Accelerator(cpu=True, mixed_precision=precision).mixed_precision == precision
    compat.forget_other_precision("no")


@pytest.mark.parametrize("wrapped", [False, True])
def test_persistent_workers_end_when_told_to(wrapped):
    loader = DataLoader(torch.arange(4), num_workers=1, persistent_workers=True)
    next(iter(loader))
    workers = loader._iterator._workers
    compat.end_workers(SimpleNamespace(base_dataloader=loader) if wrapped else loader)
    assert not any(worker.is_alive() for worker in workers)


def test_a_scaler_has_its_two_tensors():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scale, growth = compat.loss_scale(scaler)
    assert scale.item() == 2**16 and growth.item() == 0


def test_too_many_variants_are_an_error():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with compat.variants_limited(2), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for size in (2, 3, 4):
            compiled(torch.ones(size))
    torch.compiler.reset()


def test_inductor_asks_the_compiler_where_it_did(monkeypatch):
    from torch._inductor import cpu_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    def refused() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", refused)
    compat.ask_cpp_compiler()


@pytest.mark.gpu
def test_cublas_gives_its_workspaces_back():
    one = torch.ones(64, 64, device="cuda")
    held = (one @ one, torch.cuda.memory_allocated())[1]
    compat.release_workspaces()
    assert torch.cuda.memory_allocated() < held


@pytest.mark.gpu
def test_the_allocators_history_has_its_events():
    compat.record_memory_history()
    kept = torch.ones(2**20, device="cuda")
    history = compat.memory_history()
    compat.stop_memory_history()
    assert any(e["action"] == "alloc" and e["size"] >= kept.nbytes for e in history)


def test_operators_have_their_names():
    assert callable(torch.cuda._utils._cuda_load_module)
    assert callable(torch.cuda._check_capability)
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        assert "query" in str(getattr(torch.ops.aten, name).default._schema)
    assert "scale_a" in str(torch.ops.aten._scaled_mm.default._schema)
    query = torch.randn(1, 2, 5, 8)
    expected = nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(compat.flash_attention_for_cpu(query, query, query), expected)
    assert compat.flash_attention_for_cpu(*[query.to("meta")] * 3).shape == query.shape
