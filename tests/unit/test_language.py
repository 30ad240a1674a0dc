"""Qwen3 and gpt-oss: the published architectures, our forward pass against transformers' own, and
batches of texts.
"""

from __future__ import annotations

import functools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from decoders_at_work import assert_resumes_where_it_stopped, batch_of, outcome, outcome_of
from hypothesis import given
from hypothesis import strategies as st
from recipes_at_work import Products, adapter_gradients, assert_same_gradients, one_thread, perturb
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import BatchSampler
from torch.utils.flop_counter import FlopCounterMode

from labutils.data.loader import EPOCH, EpochOrder
from labutils.data.packing import BUCKETS, IGNORED, Layout, PackedOrder, boundaries
from labutils.labs.ladders import A3_BASE, A3_LADDER, A3_OWN, climb
from labutils.layers.lora import attach_lora, count_parameters, count_trainable, load_adapter
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Unavailable
from labutils.training import MemoryLog, Trainer, benchmark, compare
from labutils.workloads import open_workload, workload_names
from labutils.workloads.base import CLASSES, around_the_same
from labutils.workloads.causal_lm import (
    GPT_OSS,
    GPT_OSS_120B,
    QWEN3,
    QWEN3_32B,
    build_lm,
)
from labutils.workloads.decoder import (
    ATTENTION,
    FP8_ROWS,
    TARGETS,
    attended_pairs,
    count_flops,
    count_full_flops,
    decoder_shapes,
    projections,
)

BASE = A3_BASE.but(precision="fp32", adapter="plain", driver="eager", logging="ring-buffer")
OURS = BASE.but(layers="rewritten")
PACKED = OURS.but(shapes="packed", token_budget=4096)
SHAPES = {
    "as-they-come": BASE,
    "padded": BASE.but(shapes="padded"),
    "buckets": BASE.but(shapes="buckets"),
    "packed": PACKED,
}
CHOSEN = {"one": [3], "two": [0, 5], "five": [7, 1, 4, 9, 2]}
NAMES = ("qwen3-lora-long", "gpt-oss-lora-long")
META = torch.device("meta")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@functools.cache
def opened(name, device="cpu", scale="tiny"):
    return open_workload(name, scale=scale, device=device)


@pytest.fixture(params=NAMES)
def workload(request):
    return opened(request.param)


@pytest.fixture
def qwen3():
    return opened("qwen3-lora-long")


@pytest.fixture
def gpt_oss():
    return opened("gpt-oss-lora-long")


@functools.cache
def reference(name, chosen: tuple[int, ...], predict: str = "everything"):
    """transformers' own forward pass, its own mask for the padding."""
    recipe = BASE.but(predict=predict)
    return outcome(opened(name), recipe, chosen)


def assert_is_reference(workload, recipe, chosen):
    expected, gradients = reference(workload.name, tuple(chosen), recipe.predict)
    loss, found = outcome(workload, recipe, chosen)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, gradients, rtol=1e-4)


# -------------------------------------------------------------------------------------------------
# The architectures


@pytest.mark.parametrize(
    ("size", "parameters", "trained"),
    [
        (QWEN3["small"], 596_049_920, 5_046_272),
        (QWEN3["full"], 8_190_735_360, 21_823_488),
        (QWEN3_32B, 32_762_123_264, 67_108_864),
        (GPT_OSS["full"], 20_914_757_184, 3_981_312),
        (GPT_OSS_120B, 116_829_156_672, 5_971_968),
    ],
    ids=lambda value: getattr(value, "hub", ""),
)
def test_the_architectures_are_the_published_ones_to_the_parameter(size, parameters, trained):
    """The hub's totals of Qwen3-0.6B, 8B, 32B, gpt-oss-20b and 120b; unsloth prints the LoRA's when
    it trains them.
    """
    lm = build_lm(size, META, torch.bfloat16)
    assert count_parameters(lm) == parameters
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    attach_lora(lm, projections(lm), 8, 16, "plain", seed=0)
    assert count_trainable(lm) == trained


@pytest.mark.parametrize("scales", [QWEN3, GPT_OSS], ids=["qwen3", "gpt-oss"])
@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_every_scale_has_every_kind_of_layer(scales, scale):
    full, other = (build_lm(scales[s], META, torch.float32) for s in ("full", scale))
    assert {type(m).__name__ for m in other.modules()} == {type(m).__name__ for m in full.modules()}


def test_every_workload_has_the_name_that_it_is_opened_by():
    names = [name for name in workload_names() if CLASSES[name][0] == "causal_lm"]
    assert len(names) == 8
    assert [opened(name).name for name in names] == names


def test_configurations_are_the_published_ones():
    """What the shapes don't show."""
    qwen = build_lm(QWEN3["full"], META, torch.bfloat16).config
    assert (qwen.rope_parameters["rope_theta"], qwen.rms_norm_eps, qwen.sliding_window) == (
        1e6,
        1e-6,
        None,
    )
    oss = build_lm(GPT_OSS["full"], META, torch.bfloat16).config
    assert (oss.rope_parameters["rope_theta"], oss.rope_parameters["rope_type"]) == (150000, "yarn")
    assert (oss.num_experts_per_tok, oss.sliding_window, oss.rms_norm_eps) == (4, 128, 1e-5)
    assert oss.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("layers", ["published", "rewritten"])
@pytest.mark.parametrize("adapter", ["peft", "plain"])
def test_what_is_trained(workload, layers, adapter):
    """All seven projections of Qwen3; gpt-oss's attention alone."""
    model = workload.build(BASE.but(layers=layers, adapter=adapter))
    trained = [name for name, p in model.network.named_parameters() if p.requires_grad]
    expected = ATTENTION if workload.family == "gpt-oss" else TARGETS
    assert len(trained) == 2 * 2 * len(expected)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == set(expected)
    assert {p.dtype for p in model.network.parameters() if p.requires_grad} == {torch.float32}


def test_sessions_share_the_frozen_weights(workload):
    first, second = workload.build(BASE), workload.build(OURS)
    embeddings = [m.network.model.embed_tokens.weight.data_ptr() for m in (first, second)]
    assert embeddings[0] == embeddings[1]
    ways = [
        m.network.model.layers[0].self_attn.config._attn_implementation for m in (first, second)
    ]
    assert ways == ["eager" if workload.family == "gpt-oss" else "sdpa", "documents"]


def test_shared_weights_that_are_let_go_stay_with_those_who_use_them(qwen3):
    held = qwen3.build(OURS)
    qwen3.release_weights()
    other = qwen3.build(OURS)
    pairs = list(zip(held.network.parameters(), other.network.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(a is b for a, b in pairs)


def test_positions_stay_exact_in_half_precision(workload):
    """Built in bfloat16, the rotary embedding's frequencies are those of a model that is built in
    float32.
    """
    exact, half = (
        build_lm(workload.size, torch.device("cpu"), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(half.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


# -------------------------------------------------------------------------------------------------
# Our forward pass against transformers'


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("shapes", SHAPES)
def test_loss_and_gradients_are_transformers(workload, shapes, chosen):
    assert_is_reference(workload, SHAPES[shapes].but(layers="rewritten"), chosen)


@pytest.mark.parametrize("shapes", ["padded", "buckets"])
def test_padding_changes_nothing_in_transformers_own(workload, shapes):
    assert_is_reference(workload, SHAPES[shapes], CHOSEN["two"])


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "fused"},
        {"loss": "answers", "predict": "answers"},
        {"checkpointing": "blocks"},
        {"checkpointing": "offload"},
        {"adapter": "peft"},
    ],
    ids=lambda change: next(iter(change.values())),
)
@pytest.mark.parametrize("shapes", ["as-they-come", "packed"])
def test_what_makes_it_faster_or_smaller_changes_nothing(workload, shapes, change):
    assert_is_reference(workload, SHAPES[shapes].but(layers="rewritten", **change), CHOSEN["five"])


@pytest.mark.parametrize("checkpointing", ["blocks", "offload"])
def test_transformers_own_can_be_checkpointed(workload, checkpointing):
    assert_is_reference(workload, BASE.but(checkpointing=checkpointing), CHOSEN["two"])


def test_short_texts_are_the_same_model(workload):
    short = opened(workload.name.replace("long", "short"))
    assert_is_reference(short, PACKED.but(predict="answers"), (0, 1, 2))


@pytest.mark.parametrize("checkpointing", ["off", "blocks", "offload"])
def test_checkpointing_computes_blocks_again(workload, checkpointing):
    recipe = BASE.but(checkpointing=checkpointing)
    model, batch = workload.build(recipe), batch_of(workload, recipe, [0])
    calls: list[str] = []
    for block in workload.blocks(model):
        block.register_forward_pre_hook(lambda module, args: calls.append(type(module).__name__))
    workload.loss(model, batch, {}).backward()
    assert len(calls) == (2 if checkpointing == "off" else 4)


@pytest.mark.parametrize("predict", ["everything", "answers"])
def test_the_loss_is_that_of_the_tokens_to_be_predicted(workload, predict):
    """By hand: logits of transformers' model at the places before them."""
    recipe = BASE.but(predict=predict)
    model = workload.build(recipe)
    (example,) = [workload.dataset(None, recipe)[3]]
    with torch.no_grad():
        logits = model.lm(input_ids=example["input_ids"][None]).logits[0]
        loss = workload.loss(model, workload.collate(recipe)([example]), {})
    wanted = example["labels"][1:] != IGNORED
    assert wanted.all() == (predict == "everything")
    torch.testing.assert_close(
        loss, F.cross_entropy(logits[:-1][wanted], example["labels"][1:][wanted])
    )


@pytest.mark.parametrize("kind", ["fp8-frozen", "nf4", "nf4-frozen", "nf4-fp8"])
def test_converted_bases_train_and_keep_near(workload, kind):
    """Within what the format's rounding allows; the head, and gpt-oss's experts, stay as published."""
    recipe = OURS.but(base_linear=kind)
    expected, gradients = reference(workload.name, (0, 5))
    model = workload.build(recipe)
    kinds = {name: type(m).__name__ for name, m in model.network.named_modules()}
    assert kinds["lm_head"] == "Linear"
    assert kinds["model.layers.1.self_attn.o_proj.base_layer"] != "Linear"
    batch = batch_of(workload, recipe, CHOSEN["two"])
    assert batch["input_ids"].shape[1] % (FP8_ROWS if "fp8" in kind else 1) == 0
    loss, found = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0.05)
    for name, gradient in gradients.items():
        assert F.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.8, name


def test_peft_adapts_4_bits_with_its_own_layer(qwen3):
    from peft.tuners.lora.bnb import Linear4bit

    base = BASE.but(base_linear="nf4", adapter="peft")
    models = {adapter: qwen3.build(base.but(adapter=adapter)) for adapter in ("peft", "plain")}
    layers = [m for m in models["peft"].network.modules() if hasattr(m, "base_layer")]
    assert len(layers) == 2 * len(TARGETS) and {type(layer) for layer in layers} == {Linear4bit}
    losses = {}
    for adapter, model in models.items():
        perturb(model.network, 0.2)
        loss = qwen3.loss(model, batch_of(qwen3, base, CHOSEN["two"]), {})
        loss.backward()
        losses[adapter] = loss.detach(), adapter_gradients(model.network)
    torch.testing.assert_close(losses["peft"][0], losses["plain"][0])
    assert_same_gradients(losses["peft"][1], losses["plain"][1], rtol=1e-4)


# -------------------------------------------------------------------------------------------------
# Batches


def test_forms_of_batches(workload):
    chosen = CHOSEN["five"]
    lengths = [workload.example_sizes(BASE)[i].tokens for i in chosen]
    budget = workload.token_budget(BASE)
    batches = {
        name: batch_of(workload, recipe.but(layers="rewritten"), chosen)
        for name, recipe in SHAPES.items()
    }
    assert batches["as-they-come"]["input_ids"].shape == (5, max(lengths))
    assert batches["padded"]["input_ids"].shape == (5, budget)
    assert batches["buckets"]["input_ids"].shape[1] in {
        -(-budget * k // BUCKETS) for k in range(1, BUCKETS + 1)
    }
    rows = batches["packed"]["input_ids"]
    assert rows.shape[0] < 5
    assert rows.shape[1] == workload.token_budget(PACKED) == 1024
    for batch in batches.values():
        assert (batch["input_ids"] != workload._tokenizer().pad_token_id).sum() == sum(lengths)


def test_what_a_packed_batch_holds(workload):
    batch = batch_of(workload, PACKED, CHOSEN["five"])
    rows, marks = workload.dataset(None, PACKED), batch["boundaries"].tolist()
    flat, positions = batch["input_ids"].flatten(), batch["positions"].flatten()
    found = [flat[a:b] for a, b in zip(marks, marks[1:], strict=False) if b > a]
    for index in CHOSEN["five"]:
        ids = rows[index]["input_ids"]
        assert any(torch.equal(ids, document) for document in found)
    starts = [mark for mark in marks[:-1] if mark < len(flat)]
    assert (positions[starts] == 0).all()
    layout = workload.layout(PACKED)
    assert layout.longest == max(len(row["input_ids"]) for row in rows)
    assert len(marks) == 1 + len(batch["input_ids"]) * (
        layout.segments + 2
    )  # a row is two longest documents long
    assert max(b - a for a, b in zip(marks, marks[1:], strict=False)) <= layout.longest


@pytest.mark.parametrize("shapes", ["packed", "padded"])
def test_attention_knows_the_longest_document_of_packed_rows(workload, shapes):
    recipe, told = SHAPES[shapes].but(layers="rewritten"), []
    model = workload.build(recipe)
    for layer in model.network.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: told.append(given["longest"]), with_kwargs=True
        )
    workload.loss(model, batch_of(workload, recipe, CHOSEN["two"]), {})
    assert told == [workload.layout(recipe).longest if shapes == "packed" else None] * 2


@given(
    st.lists(st.integers(5, 40), min_size=2, max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_crowded_rows_hold_no_more_than_they_may(lengths, segments, rows, seed):
    layout = Layout("packed", 60, 0, segments, longest=max(lengths))
    order = PackedOrder(lengths, [0] * len(lengths), layout, rows, 20, seed)
    for chosen in order:
        filled = layout.rows([lengths[i] for i in chosen], [0] * len(chosen))
        documents = [[lengths[chosen[place]] for place in row] for row in filled]
        assert len(documents) == rows and max(map(len, documents)) <= segments
        marks = boundaries(documents, 60, segments, layout.longest)
        assert len(marks) == 1 + rows * (segments + math.ceil(60 / layout.longest))
        assert (
            marks[-1] == 60 * rows
            and marks.diff().min() >= 0
            and marks.diff().max() <= layout.longest
        )


def test_rows_without_padding_are_our_packed_ones(qwen3):
    """What a library is given to pack: transformers' own forward pass tells the texts apart by
    their positions.
    """
    batch = batch_of(qwen3, PACKED.but(layers="published"), CHOSEN["five"])
    assert set(batch) == {"input_ids", "position_ids", "labels"} and len(batch["input_ids"]) == 1
    model = qwen3.build(BASE)
    perturb(model.network, 0.2)
    loss = qwen3.loss(model, batch, {})
    loss.backward()
    expected, gradients = reference(qwen3.name, tuple(CHOSEN["five"]))
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(adapter_gradients(model.network), gradients, rtol=1e-4)
    both = (PACKED, PACKED.but(layers="published"))
    ours, theirs = (
        qwen3.work_of(recipe, batch_of(qwen3, recipe, CHOSEN["five"])) for recipe in both
    )
    assert ours == theirs


def test_packed_rows_are_full(workload):
    recipe = PACKED.but(micro_batch=1)
    work = workload.work(recipe)
    assert work.useful_tokens / work.tokens > 0.9
    plain = workload.work(OURS)
    assert plain.useful_tokens / plain.tokens < 0.7


def test_batches_can_be_made_in_workers(workload):
    for recipe in SHAPES.values():
        rows = pickle.loads(pickle.dumps(workload.dataset(None, recipe)))
        made = pickle.loads(pickle.dumps(workload.collate(recipe)))([rows[0], rows[1]])
        assert len(made["input_ids"]) >= 1


def test_a_text_that_does_not_fit_is_said(workload):
    with pytest.raises(ValueError, match="Use a larger token_budget"):
        workload.collate(BASE.but(shapes="padded", token_budget=1024))


# -------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize("loss", ["logits", "answers"])
@pytest.mark.parametrize("shapes", ["as-they-come", "padded"])
def test_flops_are_those_that_pytorch_counts(workload, shapes, loss):
    """Of a real forward and backward pass, to the last operation. Its attention by products
    computes all pairs of the batch, gpt-oss's with the sink as one more; we count as such here what
    otherwise is only what a causal model needs. The angles of the rotary embedding, which the
    library computes as a product of width 1, are no work of ours. PyTorch doesn't count grouped
    products, so the experts are transformers' loop here."""
    recipe = SHAPES[shapes].but(layers="rewritten", loss=loss, predict="answers")
    model, size = workload.build(recipe), workload.size
    model.network.config._experts_implementation = "eager"
    batch = batch_of(workload, recipe, CHOSEN["two"])
    rows, length = batch["input_ids"].shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        workload.loss(model, batch, {}).backward()
    tokens = rows * length
    pairs = size.layers * (tokens * (tokens + 1) if size.experts else tokens * length)
    predicting = len(batch["answers"]) if loss == "answers" else tokens
    ours = count_flops(size, recipe.rank, tokens, pairs, predicting)
    assert ours + 2 * tokens * size.head_width // 2 == counter.get_total_flops()


def test_flops_of_training_every_weight_are_those_that_pytorch_counts():
    workload = open_workload("qwen3-lora-short", scale="tiny", device="cpu")
    recipe = BASE.but(adapter="none")
    model, size = workload.build(recipe), workload.size
    batch = batch_of(workload, recipe, CHOSEN["two"])
    rows, length = batch["input_ids"].shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        workload.loss(model, batch, {}).backward()
    tokens = rows * length
    ours = count_full_flops(size, tokens, size.layers * tokens * length, tokens)
    assert ours + 2 * length * size.head_width // 2 == counter.get_total_flops()


def test_flops_of_the_full_model_on_the_meta_device():
    """Qwen3-8B with shapes alone: as PyTorch counts them, and about four FLOPs a weight and token."""
    workload = opened("qwen3-lora-long", "meta", "full")
    model, size = workload.build(OURS), workload.size
    texts = torch.zeros(1, 512, dtype=torch.long, device="meta")
    batch = dict.fromkeys(("input_ids", "positions", "targets"), texts)
    batch |= dict.fromkeys(("answers", "answer_targets"), texts[0])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        workload.loss(model, batch, {}).backward()
    ours = count_flops(size, 8, 512, size.layers * 512 * 512, 512)
    assert ours + 2 * 512 * 64 == counter.get_total_flops()
    assert ours == pytest.approx(4 * 8.19e9 * 512, rel=0.1)


@pytest.mark.parametrize("lengths", [[5], [16, 40], [100, 3, 17]])
def test_pairs_are_what_the_masks_let_through(workload, lengths):
    size, n = workload.size, sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = torch.arange(n)
    whole = (document[:, None] == document) & (tokens[:, None] >= tokens)
    near = whole & (tokens[:, None] - tokens < size.window)
    expected = whole.sum() + (near.sum() if size.experts else whole.sum())
    assert attended_pairs(size, lengths) == expected  # of two layers


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("layers", ["published", "rewritten"])
@pytest.mark.parametrize("loss", ["logits", "answers"])
def test_work_planned_is_the_work_of_the_batches(workload, shapes, layers, loss):
    if layers == "published" and loss == "answers":
        pytest.skip("transformers' own forward pass can't")
    recipe = SHAPES[shapes].but(layers=layers, loss=loss, micro_batch=2, predict="answers")
    order = workload.order(None, recipe) or BatchSampler(
        EpochOrder(32, EPOCH, recipe.seed), 2, drop_last=True
    )
    for _, chosen in zip(range(3), order, strict=False):
        measures = [workload.example_sizes(recipe)[index] for index in chosen]
        assert workload._planned(recipe, measures) == workload.work_of(
            recipe, batch_of(workload, recipe, chosen)
        )


def test_weights_are_read_in_the_form_that_they_are_held_in(qwen3):
    size, work = (
        qwen3.size,
        {base: qwen3.work(BASE.but(base_linear=base)) for base in ("published", "nf4", "fp8-te")},
    )
    blocks = size.layers * sum(a * b for a, b in decoder_shapes(size).adapted.values())
    head = 2 * 4 * size.width * size.words
    assert work["published"].bytes == pytest.approx(2 * 4 * blocks + head)
    assert work["nf4"].bytes == pytest.approx(2 * 0.516 * blocks + head)
    assert work["fp8-te"].bytes == pytest.approx(2 * blocks + head)


@pytest.mark.parametrize(("has", "expected"), [(400.0, "fp8_rowwise"), (None, "fp32")])
def test_fp8_products_have_the_rate_of_fp8_where_there_is_one(monkeypatch, has, expected):
    monkeypatch.setattr(
        benchmark, "probe_machine", lambda item: SimpleNamespace(rate=lambda dtype: has)
    )
    assert benchmark._multiplied_as(BASE.but(base_linear="fp8-frozen")) == expected
    assert benchmark._multiplied_as(BASE.but(base_linear="nf4-frozen")) == "fp32"


def test_what_work_counts(workload):
    batch = batch_of(workload, OURS, CHOSEN["two"])
    lengths = [workload.example_sizes(OURS)[i].tokens for i in CHOSEN["two"]]
    work = workload.work_of(OURS, batch)
    assert (work.examples, work.tokens, work.useful_tokens) == (2, 2 * max(lengths), sum(lengths))
    assert workload.work(OURS.but(accumulation=4)) == workload.work(OURS) * 4
    assert workload.work(OURS.but(checkpointing="offload")).flops == workload.work(OURS).flops


# -------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("method", A3_OWN)
def test_article_methods_train(workload, method):
    with Trainer(workload, A3_OWN[method]) as trainer:
        trainer.run(3)
    assert len(trainer.losses) == 3
    assert trainer.losses[0] == pytest.approx(
        6.93, abs=0.3
    )  # log of the vocabulary: nothing is known yet


def test_a_run_logs_its_memory(qwen3, tmp_path):
    with Trainer(qwen3, BASE.but(micro_batch=1)) as trainer:
        trainer.run(4, after_step=MemoryLog(tmp_path / "memory.csv", steps=4, every=2))
    lines = (tmp_path / "memory.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "2", "4"]
    assert float(lines[2].split(",")[1]) == pytest.approx(4 / EPOCH, abs=1e-4)


def test_titles_are_learned(qwen3):
    """The loss of a few texts falls, trained on their titles."""
    recipe = PACKED.but(
        micro_batch=1,
        predict="answers",
        loss="answers",
        learning_rate=2e-2,
        optimizer="adamw-fused",
    )
    with Trainer(qwen3, recipe) as trainer:
        trainer.run(12)
        trainer.driver.log.flush()
    assert max(trainer.losses[-3:]) < trainer.losses[0] - 0.3


def test_a_ladder_ends_where_it_trains(workload):
    recipes = climb(A3_LADDER)
    last = recipes[A3_LADDER.rungs[-1].name].but(compile="off")
    with Trainer(workload, last) as trainer:
        trainer.run(2)
    assert len(recipes) == len(A3_LADDER.rungs)
    assert trainer.recipe.precision == "fp32"


def test_rounds_of_the_same_batches(qwen3, monkeypatch):
    """Round after round and recipe after recipe, whatever either was shown before."""
    monkeypatch.setattr(benchmark, "ROUND_MS", 1)
    met = []
    recipes = {"library": A3_BASE.but(precision="fp32"), "ours": OURS.but(micro_batch=4)}
    with benchmark.Benchmark(qwen3, warmup=1, same_batches=True, meet=met.append) as bench:
        runs = bench.compare(recipes, steps=3, rounds=2)
        assert met == [bench.candidates[name].trainer for name in recipes]
    taken = [run.samples["useful_tokens"] for run in runs.values()]
    assert taken[0] == taken[1] == 2 * taken[0][:3]
    assert len(set(taken[0][:3])) == 3


def test_rates_are_of_what_was_really_run(workload):
    run = compare(workload, {"ours": OURS.but(micro_batch=2)}, steps=4, rounds=2)["ours"]
    assert run.ok, run.status
    metrics = run.metrics
    assert metrics["useful_tokens"] == pytest.approx(
        metrics["useful_tokens_per_s"] / metrics["tokens_per_s"]
    )
    assert 0.3 < metrics["useful_tokens"] < 1
    assert metrics["floor_ms"] > 0


def test_a_packed_run_resumes_where_it_stopped(qwen3, tmp_path):
    assert_resumes_where_it_stopped(qwen3, PACKED, tmp_path)


def test_a_saved_adapter_has_pefts_names(workload, tmp_path):
    from safetensors.torch import load_file

    model = workload.build(OURS)
    perturb(model.network)
    workload.save(model, tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    other = around_the_same(workload._frozen(torch.float32, 0))
    load_adapter(other, tmp_path, kind="plain")
    with torch.no_grad():
        found = other(**batch_of(workload, BASE, [1])).loss
        expected = workload.loss(model, batch_of(workload, OURS, [1]), {})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_blocks_code_serves_all_blocks_and_all_lengths(qwen3, nothing_compiled):
    """Blocks compiled for any size: two graphs, since the first block has an input that needs no
    gradient.
    """
    model = qwen3.build(OURS)
    for block in qwen3.blocks(model):
        block.compile(backend="aot_eager", dynamic=True)
    with Compilation() as compiled:
        for chosen in ([0], [1], [2], [3]):
            qwen3.loss(model, batch_of(qwen3, OURS, chosen), {}).backward()
    assert compiled.graphs == 2
    assert compiled.breaks.total() == 0


def test_the_loss_of_a_chunk_is_compiled_as_a_block_is(workload):
    """It has no weights that a GPU could gather, so it is none of FSDP's units."""
    model, logits = (workload.build(PACKED.but(loss=loss)) for loss in ("fused", "logits"))
    assert workload.blocks(model) == [*workload.units(model), model.decoder.chunk_loss]
    assert model.decoder.chunk_loss not in workload.units(model)
    assert workload.blocks(logits) == workload.units(logits)


@pytest.mark.parametrize("checkpointing", ["blocks", "offload"])
def test_blocks_that_run_twice_have_one_code(qwen3, nothing_compiled, checkpointing):
    """One graph for both passes and all blocks: under checkpointing, transformers has the first
    input need a gradient as well."""
    recipe = PACKED.but(checkpointing=checkpointing)
    model = qwen3.build(recipe)
    for block in qwen3.blocks(model):
        block.compile(backend="aot_eager", dynamic=False)
    with Compilation() as compiled:
        qwen3.loss(model, batch_of(qwen3, recipe, [3]), {}).backward()
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


WITHIN = {"checkpointing": "blocks", "compile": "default", "compile_scope": "blocks"}


@pytest.mark.parametrize("base", ["published", "fp8-frozen", "nf4-frozen", "nf4-fp8"])
def test_a_compiled_checkpoint_computes_again_what_is_needed(qwen3, nothing_compiled, base):
    """The same gradients; of the 21 products of a block's forward pass, all but the last layer's
    own and its adapter's second are there once more in a backward pass, and attention isn't."""
    recipe = PACKED.but(base_linear=base)
    compiled = recipe.but(**WITHIN)
    models = [qwen3.build(recipe), qwen3.build(compiled)]
    batch = batch_of(qwen3, recipe, [3])
    for block in qwen3.units(models[1]):
        block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    found, products = [], []
    for model in models:
        perturb(model.network)
        loss = qwen3.loss(model, batch, {})
        with Products() as counted:
            loss.backward()
        products.append(counted.count)
        assert counted.attended == 0
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for ours, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert products[1] - products[0] == len(qwen3.units(models[0])) * (21 - 2)


@pytest.mark.parametrize(
    ("name", "change", "within"),
    [
        ("qwen3-lora-long", {}, True),
        ("qwen3-lora-long", {"compile": "off"}, False),
        (
            "qwen3-lora-long",
            {"compile_scope": "model"},
            False,
        ),  # the compiler sees the library's checkpoint there
        ("qwen3-lora-long", {"layers": "published", "loss": "logits"}, False),
        ("gpt-oss-lora-long", {}, False),
    ],
)
def test_whose_checkpoint_is_compiled_with_the_block(name, change, within):
    model = opened(name).build(OURS.but(**(WITHIN | change)))
    for layer in model.network.model.layers:
        assert ("forward" in vars(layer), layer.gradient_checkpointing) == (within, not within)


def test_packed_rows_compile_once(workload, nothing_compiled):
    """The whole decoder, loss included, as one graph of one shape; the mixture's experts, too."""
    recipe = PACKED.but(loss="fused")
    model = workload.build(recipe)
    model.decoder.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    with Compilation() as compiled:
        for chosen in ([0], [3], [5]):
            workload.loss(model, batch_of(workload, recipe, chosen), {}).backward()
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


# -------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": "packed"}, "needs layers='rewritten'"),
        ({"loss": "fused"}, "needs layers='rewritten'"),
        ({"loss": "answers", "layers": "rewritten"}, "leaves out the logits"),
        ({"cache": "features"}, "needs a frozen encoder"),
        ({"shapes": "fixed"}, "is about images"),
        ({"adapter": "folded"}, "not built for this workload"),
        ({"driver": "graph", "optimizer": "adamw-fused"}, "fixed shapes that never asks the host"),
        ({"memory_format": "channels_last"}, "is for convolutions"),
        ({"checkpointing": "offload", "compile": "default"}, "works between compiled blocks"),
        ({"checkpointing": "offload", "base_linear": "fp8-te"}, "Transformer Engine's scales"),
        (
            {
                "checkpointing": "offload",
                "driver": "graph",
                "layers": "rewritten",
                "shapes": "packed",
            },
            "can't record",
        ),
    ],
)
def test_what_it_cant_do_is_said(qwen3, change, message):
    with pytest.raises(ValueError, match=message):
        qwen3.build(BASE.but(**change))


@pytest.mark.parametrize("name", ["qwen3-lora-long", "llava-lora"])
def test_blocks_that_the_compiler_would_leave_out_are_said(name):
    recipe = OURS.but(
        base_linear="fp8-te", checkpointing="blocks", compile="default", predict="answers"
    )
    with pytest.raises(Unavailable, match="compile_scope='blocks'"):
        opened(name).build(recipe)


def test_the_hubs_weights_have_published_sizes():
    workload = open_workload("qwen3-lora-long", scale="tiny", weights="hub", device="cpu")
    with pytest.raises(ValueError, match='weights="hub" has the sizes of published models'):
        workload.build(BASE)
