"""Each private interface that labutils uses is where it was, and does what it is used for."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
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


def test_the_compilers_records_are_there():
    records, told = compat.dynamo_records(), []
    assert records.CallbackTrigger.DYNAMO
    records.callback_handler.register_start_callback(told.append)
    before = records.counters["stats"]["unique_graphs"]
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    records.callback_handler.remove_start_callback(told[0] and told.append)
    assert records.counters["stats"]["unique_graphs"] == before + 1
    assert told[0].callback_trigger == records.CallbackTrigger.DYNAMO
    assert records.graph_break_reasons is not None and records.guard_failures is not None


def test_a_backward_pass_inside_a_mode_that_watches_it():
    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.backward:
                compat.run_backward(args[0])
                return None
            return function(*args, **(kwargs or {}))

    x = torch.tensor(3.0, requires_grad=True)
    with Watching():
        (x * x).backward()
    assert x.grad == 6


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_the_storages_number(device):
    x, other = torch.ones(4, device=device), torch.ones(4, device=device)
    assert compat.storage_id(x[1:].untyped_storage()) == compat.storage_id(x.untyped_storage())
    assert compat.storage_id(x.untyped_storage()) != compat.storage_id(other.untyped_storage())


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


def test_one_warning_of_a_checkpoint_is_dropped_and_no_other(caplog):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = functools.partial(create_selective_checkpoint_contexts, [])
    compat.silence_checkpoint_warning()

    @functools.partial(torch.compile, backend="aot_eager")
    def block(x):
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)

    block(torch.ones(2, requires_grad=True))
    logging.getLogger("torch._higher_order_ops.wrap").warning("something else")
    assert [r.getMessage() for r in caplog.records if "wrap" in r.name] == ["something else"]


def test_transformers_blocks_checkpoint_by_our_function():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    widths = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, **heads, **widths)).train()
    model.gradient_checkpointing_enable()
    called = []

    def checkpoint(block, *inputs):
        called.append(block)
        return block(*inputs)

    compat.set_block_checkpoint(model.model.layers[0], checkpoint)
    model(torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    assert len(called) == 1


def test_peft_takes_four_bit_layers_of_a_marked_model():
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.bnb import Linear4bit

    model = nn.ModuleDict({"up": bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4")})
    compat.mark_as_four_bits(model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["up"]))
    assert any(isinstance(layer, Linear4bit) for layer in adapted.modules())


def test_gpt_oss_gates_its_experts_by_itself():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=4, num_local_experts=2)
    gated = compat.expert_gate(GptOssExperts(config), torch.randn(3, 8))
    assert gated.shape == (3, 4)
