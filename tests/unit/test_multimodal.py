"""LLaVA-NeXT: the published architecture, our forward pass against transformers' own, and batches
of every form.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from decoders_at_work import assert_resumes_where_it_stopped, batch_of, outcome, outcome_of
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes_at_work import assert_same_gradients, one_thread, perturb
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import BatchSampler
from torch.utils.flop_counter import FlopCounterMode

from labutils.data.loader import EPOCH, EpochOrder
from labutils.data.packing import BUCKETS, IGNORED, Layout, PackedOrder, fullest
from labutils.labs.ladders import A2_BASE, A2_LADDER, climb
from labutils.layers.lora import attach_lora, count_parameters, count_trainable, load_adapter
from labutils.layers.packed_attention import document_attention, varlen_options
from labutils.profiling.recompilation import Compilation
from labutils.training import Trainer, compare
from labutils.workloads import open_workload
from labutils.workloads.base import Work
from labutils.workloads.decoder import FP8_ROWS, TARGETS, count_flops
from labutils.workloads.llava import SIZES, build_llava

BASE = A2_BASE.but(precision="fp32", adapter="plain", logging="ring-buffer")
OURS = BASE.but(layers="rewritten")
PACKED = OURS.but(shapes="packed", token_budget=8192)
SHAPES = {
    "as-they-come": BASE,
    "padded": BASE.but(shapes="padded", token_budget=3072),
    "buckets": BASE.but(shapes="buckets", token_budget=3072),
    "packed": PACKED,
}
CHOSEN = {"one": [3], "two": [0, 5], "five": [7, 1, 4, 9, 2]}


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def workload():
    return open_workload("llava-lora-varied", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def beans():
    return open_workload("llava-lora", scale="tiny", device="cpu")


@functools.cache
def reference(workload, chosen: tuple[int, ...]):
    """transformers' own forward pass, its own mask for the padding, as the processor's batch comes."""
    return outcome(workload, BASE, chosen)


# -------------------------------------------------------------------------------------------------
# The architecture


def test_the_architecture_is_the_published_one_to_the_parameter():
    """7,566,747,648 parameters in llava-v1.6-mistral-7b-hf; rank 8 on seven projections of 32
    blocks.
    """
    llava = build_llava(SIZES["full"], torch.device("meta"), torch.bfloat16)
    assert count_parameters(llava) == 7_566_747_648
    assert {p.dtype for p in llava.parameters()} == {torch.bfloat16}
    names = tuple(
        f"model.language_model.layers.{i}.{part}.{t}" for i in range(32) for part, t in PARTS
    )
    attach_lora(llava, names, 8, 16, "plain", seed=0)
    assert count_trainable(llava) == 20_971_520
    config = llava.config
    assert (
        config.text_config.rope_parameters["rope_theta"],
        config.text_config.sliding_window,
    ) == (1e6, None)
    assert config.image_grid_pinpoints == [
        [336, 672],
        [672, 336],
        [672, 672],
        [1008, 336],
        [336, 1008],
    ]
    assert (
        config.image_token_index,
        config.text_config.vocab_size,
        config.vision_feature_layer,
    ) == (32000, 32064, -2)


PARTS = [("self_attn", name) for name in TARGETS[:4]] + [("mlp", name) for name in TARGETS[4:]]


@pytest.mark.parametrize("scale", SIZES)
def test_every_scale_has_every_kind_of_layer(scale):
    full, other = (
        build_llava(SIZES[s], torch.device("meta"), torch.float32) for s in ("full", scale)
    )
    assert {type(m).__name__ for m in other.modules()} == {type(m).__name__ for m in full.modules()}


@pytest.mark.parametrize("layers", ["published", "rewritten"])
@pytest.mark.parametrize("adapter", ["peft", "plain"])
def test_only_the_decoders_projections_are_trained(workload, layers, adapter):
    model = workload.build(BASE.but(layers=layers, adapter=adapter))
    trained = [name for name, p in model.network.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * len(TARGETS)
    assert all(
        name.startswith("model.language_model.layers.") and "lora_" in name for name in trained
    )
    assert {p.dtype for p in model.network.parameters() if p.requires_grad} == {torch.float32}


def test_sessions_share_the_frozen_weights(workload):
    first, second = workload.build(BASE), workload.build(OURS)
    embeddings = [
        m.network.model.language_model.embed_tokens.weight.data_ptr() for m in (first, second)
    ]
    assert embeddings[0] == embeddings[1]
    config = [m.network.model.language_model.config._attn_implementation for m in (first, second)]
    assert config == ["sdpa", "documents"]


def test_another_precision_takes_the_place_of_the_one_before():
    workload = open_workload("llava-lora", scale="tiny", device="cpu")
    model = workload.build(BASE.but(precision="bf16"))
    assert model.network.lm_head.weight.dtype == torch.bfloat16
    assert model.network.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    assert workload.build(BASE).network.lm_head.weight.dtype == torch.float32


# -------------------------------------------------------------------------------------------------
# Our forward pass against transformers'


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("shapes", SHAPES)
def test_loss_and_gradients_are_transformers(workload, shapes, chosen):
    recipe = SHAPES[shapes].but(layers="rewritten")
    expected, gradients = reference(workload, tuple(chosen))
    loss, found = outcome(workload, recipe, chosen)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, gradients, rtol=1e-4)


@pytest.mark.parametrize("shapes", ["padded", "buckets"])
def test_padding_changes_nothing_in_transformers_own(workload, shapes):
    chosen = CHOSEN["two"]
    expected, gradients = reference(workload, tuple(chosen))
    loss, found = outcome(workload, SHAPES[shapes], chosen)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, gradients, rtol=1e-4)


@pytest.mark.parametrize("layers", ["published", "rewritten"])
def test_fixed_is_the_same_as_images_that_were_square_before(workload, layers):
    """Article A2's fixed shapes: images resized beforehand, the text padded; against squares as
    they come.
    """
    recipe = BASE.but(shapes="fixed", layers=layers)
    side = workload.size.tile
    rows = workload.dataset(None, BASE).with_format(None)
    transform = workload._examples(BASE)
    squares = [
        transform.example(rows[i]["image"].resize((side, side), 2), rows[i]["labels"])
        for i in (0, 5)
    ]
    expected, gradients = outcome_of(workload, BASE, workload.collate(BASE)(squares))
    batch = batch_of(workload, recipe, [0, 5])
    assert batch["input_ids"].shape == (2, workload.token_budget(recipe))
    loss, found = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, gradients, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "fused"},
        {"loss": "answers"},
        {"checkpointing": "blocks"},
        {"checkpointing": "offload"},
        {"adapter": "peft"},
        {"cache": "features"},
    ],
    ids=lambda change: next(iter(change.values())),
)
@pytest.mark.parametrize("shapes", ["as-they-come", "packed"])
def test_what_makes_it_faster_or_smaller_changes_nothing(workload, shapes, change):
    recipe, chosen = SHAPES[shapes].but(layers="rewritten", **change), CHOSEN["five"]
    expected, gradients = reference(workload, tuple(chosen))
    examples = workload.dataset(workload.build(recipe), recipe)
    batch = workload.collate(recipe)([examples[index] for index in chosen])
    assert ("features" in batch) == (recipe.cache == "features")
    loss, found = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(found, gradients, rtol=1e-4)


def test_checkpointing_computes_blocks_again(workload):
    """As many forward passes of each block again as there were, and none of the vision tower."""
    counts = []
    for checkpointing in ("off", "blocks"):
        recipe = BASE.but(checkpointing=checkpointing)
        model, batch = workload.build(recipe), batch_of(workload, recipe, [0])
        calls: list[str] = []

        def note(module, args, calls=calls):
            calls.append(type(module).__name__)

        for block in workload.blocks(model):
            block.register_forward_pre_hook(note)
        workload.loss(model, batch, {}).backward()
        counts.append((calls.count("MistralDecoderLayer"), calls.count("CLIPEncoderLayer")))
    assert counts == [(2, 3), (4, 3)]


def test_the_loss_is_that_of_the_answers_tokens(workload):
    """By hand: logits of transformers' model at the places before the answer's tokens."""
    model = workload.build(BASE)
    (example,) = [workload.dataset(None, BASE)[3]]
    batch = workload.collate(BASE)([example])
    with torch.no_grad():
        logits = model.network(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
        loss = workload.loss(model, batch, {})
    answer = example["labels"][example["labels"] != IGNORED]
    assert 2 <= len(answer) <= 8
    assert answer[-1] == 2  # </s>
    expected = F.cross_entropy(logits[-len(answer) - 1 : -1], answer)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("lengths", [[5], [3, 1, 4], [1, 1, 1, 7]])
@pytest.mark.parametrize("rows", [1, 2])
def test_documents_dont_see_each_other(lengths, rows):
    """Against attention of each document alone."""
    torch.manual_seed(0)
    n = sum(lengths)
    query, key, value = (torch.randn(rows, heads, n, 8) for heads in (4, 2, 2))
    marks = [0] + torch.tensor(lengths * rows).cumsum(0).tolist()
    padded = torch.tensor([*marks, marks[-1], marks[-1]], dtype=torch.int32)
    found, _ = document_attention(None, query, key, value, None, 0.3, boundaries=padded)
    for row in range(rows):
        for start, end in zip(marks[: len(lengths)], marks[1:], strict=False):
            part = [x[row : row + 1, :, start:end] for x in (query, key, value)]
            expected = F.scaled_dot_product_attention(
                *part, is_causal=True, scale=0.3, enable_gqa=True
            )
            torch.testing.assert_close(found[row : row + 1, start:end], expected.transpose(1, 2))


@pytest.mark.parametrize("kind", ["fp8-frozen", "nf4"])
def test_converted_bases_train_and_keep_near(workload, kind):
    """Within what the format's rounding allows; the head, and for FP8 the vision tower, stay as
    published.
    """
    recipe = OURS.but(base_linear=kind)
    expected, gradients = reference(workload, (0, 5))
    model = workload.build(recipe)
    kinds = {name: type(m).__name__ for name, m in model.network.named_modules()}
    assert kinds["lm_head"] == "Linear"
    assert kinds["model.language_model.layers.1.mlp.up_proj.base_layer"] != "Linear"
    assert kinds["model.multi_modal_projector.linear_1"] != "Linear"
    assert (kinds["model.vision_tower.encoder.layers.0.mlp.fc1"] == "Linear") == (
        kind == "fp8-frozen"
    )
    batch = batch_of(workload, recipe, CHOSEN["two"])
    assert batch["input_ids"].shape[1] % (8 if kind == "fp8-frozen" else 1) == 0
    loss, found = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0.05)
    for name, gradient in gradients.items():
        assert F.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.8, name


# -------------------------------------------------------------------------------------------------
# AnyRes


sizes = st.tuples(st.integers(20, 2000), st.integers(20, 2000)).filter(
    lambda s: 1 / 8 < s[0] / s[1] < 8
)


@settings(deadline=None, max_examples=60)
@given(sizes)
def test_places_are_where_transformers_puts_them(size):
    """Features that are their own number, packed by transformers' model, against our places."""
    from transformers.models.llava_next.modeling_llava_next import (
        LlavaNextModel,
        image_size_to_num_patches,
    )

    geometry = SIZES["full"].geometry
    pinpoints = [list(point) for point in geometry.pinpoints]
    tiles = image_size_to_num_patches(size, pinpoints, geometry.tile)
    assert tiles == geometry.tiles(size) <= geometry.most_tiles
    features = torch.arange(1.0, 1 + tiles * 576).view(1, tiles, 576, 1)
    packed, (count,) = LlavaNextModel.pack_image_features(
        FakeModel(pinpoints),
        list(features),
        torch.tensor([size]),
        "default",
        image_newline=torch.zeros(1),
    )
    assert packed[0].flatten().long().tolist() == geometry.sources(size).tolist()
    assert count == geometry.tokens(size)


class FakeModel:
    """As much of a LlavaNextModel as packing features reads."""

    def __init__(self, pinpoints):
        vision = type("Vision", (), {"image_size": 336, "patch_size": 14})
        self.config = type(
            "Config", (), {"vision_config": vision, "image_grid_pinpoints": pinpoints}
        )


@pytest.mark.parametrize(
    ("size", "tokens", "tiles"), [((500, 500), 2928, 5), ((336, 336), 1176, 3)]
)
def test_token_counts_are_the_published_models(size, tokens, tiles):
    geometry = SIZES["full"].geometry
    assert (geometry.tokens(size), geometry.tiles(size)) == (tokens, tiles)


def test_the_processor_makes_as_many_tokens(workload):
    rows = workload.dataset(None, BASE)
    for index, measure in enumerate(workload.example_sizes(BASE)):
        example = rows[index]
        assert (len(example["input_ids"]), len(example["pixel_values"])) == (
            measure.tokens,
            measure.tiles,
        )
        assert (example["labels"] != IGNORED).sum() == measure.answers


def test_varied_images_make_varied_lengths_and_beans_one(workload, beans):
    assert len({m.tokens for m in workload.example_sizes(BASE)}) > 8
    assert {m.tiles for m in workload.example_sizes(BASE)} == {3, 4, 5}
    assert len({m.tokens - m.answers for m in beans.example_sizes(BASE)}) == 1


# -------------------------------------------------------------------------------------------------
# Batches


def test_forms_of_batches(workload):
    chosen = CHOSEN["five"]
    lengths = [workload.example_sizes(BASE)[i].tokens for i in chosen]
    tiles = sum(workload.example_sizes(BASE)[i].tiles for i in chosen)
    budget = workload.token_budget(SHAPES["padded"])
    forms = {
        name: (batch["input_ids"].shape[1], len(batch["pixel_values"]))
        for name, recipe in SHAPES.items()
        for batch in [batch_of(workload, recipe.but(layers="rewritten"), chosen)]
    }
    assert forms["as-they-come"] == (max(lengths), tiles)
    assert forms["padded"] == (budget, 5 * 5)
    length, count = forms["buckets"]
    assert max(lengths) <= length < max(lengths) + budget / BUCKETS
    assert tiles <= count < tiles + 1 + 25 / BUCKETS
    assert forms["packed"][0] == workload.token_budget(PACKED)


def test_a_packed_batch_says_where_examples_are(workload):
    chosen = CHOSEN["five"]
    batch = batch_of(workload, PACKED, chosen)
    marks = batch["boundaries"].tolist()
    lengths = [workload.example_sizes(BASE)[i].tokens for i in chosen]
    assert marks[:4] == [0, lengths[0], sum(lengths[:2]), sum(lengths[:3])]
    assert marks[-1] == batch["input_ids"].numel()
    assert sorted(marks) == marks
    starts = set(marks[:-1]) & set((batch["positions"].flatten() == 0).nonzero().flatten().tolist())
    assert {0, lengths[0]} <= starts
    assert batch["positions"].max() == max(lengths) - 1


@pytest.mark.parametrize("shapes", ["padded", "buckets", "packed"])
def test_an_example_that_doesnt_fit_is_refused_with_what_to_type(workload, shapes):
    recipe = OURS.but(shapes=shapes, token_budget=1024)
    with pytest.raises(
        ValueError, match=r"has room for \d+ .*Use a larger token_budget, or shapes='as-they-come'"
    ):
        Trainer(workload, recipe)


def test_what_workers_need_can_be_pickled(workload):
    for recipe in (BASE, PACKED):
        made = pickle.loads(pickle.dumps(workload.collate(recipe)))
        examples = pickle.loads(pickle.dumps(workload.dataset(None, recipe)))
        batch = made([examples[index] for index in (1, 2)])
        expected = batch_of(workload, recipe, (1, 2))
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), max_size=8),
    st.integers(0, 120),
    st.integers(0, 30),
)
def test_rows_are_filled_as_well_as_can_be(examples, room, most_tiles):
    lengths, tiles = [n for n, _ in examples], [t for _, t in examples]
    places = fullest(lengths, tiles, room, most_tiles)
    used, used_tiles = (sum(what[place] for place in places) for what in (lengths, tiles))
    assert len(set(places)) == len(places) and used <= room and used_tiles <= most_tiles
    left = [place for place in range(len(lengths)) if place not in places]
    assert not any(used + lengths[p] <= room and used_tiles + tiles[p] <= most_tiles for p in left)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(lengths, n) for n in range(len(lengths) + 1)
    )
    if sum(tiles) <= most_tiles:
        assert used == max(total for total in map(sum, subsets) if total <= room)


layouts = st.builds(
    lambda budget, tiles: Layout("packed", budget, tiles, budget),
    st.integers(50, 400),
    st.integers(5, 20),
)


@given(
    layouts,
    st.lists(st.tuples(st.integers(5, 50), st.integers(1, 5)), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_packed_rows(layout, examples, rows):
    """Rows fit, collating finds them again, an example waits no longer than the look-ahead, an
    epoch can resume.
    """
    lengths, tiles = (list(part) for part in zip(*examples, strict=True))
    order = PackedOrder(lengths, tiles, layout, rows, 60, seed=1)
    batches = list(order)
    assert len(batches) == len(order) == order.length // rows
    for batch in batches:
        found = layout.rows([lengths[i] for i in batch], [tiles[i] for i in batch])
        assert len(found) == rows
        for row in found:
            assert 0 < sum(lengths[batch[i]] for i in row) <= layout.budget
            assert sum(tiles[batch[i]] for i in row) <= layout.tiles
    assert list(PackedOrder(lengths, tiles, layout, rows, 60, seed=1)) == batches
    taken = len(batches) // 2
    order.go_to(0, taken * rows)
    assert list(order) == batches[taken:]
    order.go_to(1)
    assert len(list(order)) == len(batches)


def test_packing_leaves_little_empty(workload):
    work = workload.work(PACKED.but(token_budget=16384))
    assert work.useful_tokens / work.tokens > 0.9
    plain = workload.work(OURS.but(micro_batch=4))
    assert plain.useful_tokens / plain.tokens < 0.9


def test_every_example_comes_as_often_when_packed(workload):
    order = workload.order(None, PACKED)
    counts = torch.bincount(
        torch.tensor([index for batch in order for index in batch]), minlength=16
    )
    assert counts.max() - counts.min() <= 6 + 1
    assert counts.sum() == pytest.approx(EPOCH, rel=0.1)


# -------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize("loss", ["logits", "answers"])
@pytest.mark.parametrize("cache", ["nothing", "features"])
@pytest.mark.parametrize("shapes", ["as-they-come", "padded"])
def test_flops_are_those_that_pytorch_counts(workload, shapes, cache, loss):
    """Of a real forward and backward pass, to the last operation. Its attention by products
    computes all pairs, which we count as such here: otherwise only those that a causal model needs.
    The angles of the rotary embedding, which the library computes as a product of width 1, are no
    work of ours."""
    recipe = SHAPES[shapes].but(layers="rewritten", cache=cache, loss=loss)
    model = workload.build(recipe)
    examples = workload.dataset(model, recipe)
    batch = workload.collate(recipe)([examples[index] for index in CHOSEN["two"]])
    rows, length = batch["input_ids"].shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        workload.loss(model, batch, {}).backward()
    tiles = len(batch["features" if cache == "features" else "pixel_values"])
    predicting = 64 if loss == "answers" else rows * length
    size = workload.size
    ours, _ = workload.flops_and_bytes(recipe, [length] * rows, tiles, predicting)
    hidden = rows * length * (length - 1) // 2
    ours += 12 * size.layers * size.width * hidden
    angles = 2 * rows * length * (workload.size.width // workload.size.heads // 2)
    assert ours + angles == counter.get_total_flops()


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("layers", ["published", "rewritten"])
@pytest.mark.parametrize("loss", ["logits", "answers"])
def test_work_planned_is_the_work_of_the_batches(workload, shapes, layers, loss):
    if layers == "published" and (shapes == "packed" or loss == "answers"):
        pytest.skip("transformers' own forward pass can't")
    recipe = SHAPES[shapes].but(layers=layers, loss=loss, micro_batch=2)
    order = workload.order(None, recipe) or BatchSampler(
        EpochOrder(16, EPOCH, recipe.seed), 2, drop_last=True
    )
    for _, chosen in zip(range(3), order, strict=False):
        measures = [workload.example_sizes(recipe)[index] for index in chosen]
        assert workload._planned(recipe, measures) == workload.work_of(
            recipe, batch_of(workload, recipe, chosen)
        )


def test_what_work_counts(workload):
    batch = batch_of(workload, OURS, CHOSEN["two"])
    lengths = [workload.example_sizes(OURS)[i].tokens for i in CHOSEN["two"]]
    work = workload.work_of(OURS, batch)
    assert (work.examples, work.tokens, work.useful_tokens) == (2, 2 * max(lengths), sum(lengths))
    packed = workload.work_of(PACKED, batch_of(workload, PACKED, CHOSEN["two"]))
    assert packed.useful_tokens == work.useful_tokens
    assert workload.work(OURS.but(accumulation=4)) == workload.work(OURS) * 4
    assert workload.work(OURS.but(cache="features")).flops < workload.work(OURS).flops
    assert workload.work(OURS.but(checkpointing="blocks")).flops == workload.work(OURS).flops


def test_the_full_models_arithmetic_is_about_four_flops_a_weight():
    """A frozen decoder takes two FLOPs a weight and token forward, and two backward."""
    size = SIZES["full"]
    flops = count_flops(size, 8, 2048, 32 * 2048 * 2049 // 2, 2048)
    assert flops == pytest.approx(4 * 7.11e9 * 2048, rel=0.07)


def test_works_add_up():
    assert Work(1, 2, 3, 4, 5) + Work(10, 20, 30, 40, 50) == Work(11, 22, 33, 44, 55)
    assert Work(1, 2) * 3 == Work(3, 6)


# -------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize(
    "changes", [{}, {"shapes": "fixed"}, {"base_linear": "nf4", "checkpointing": "blocks"}]
)
def test_article_variants_train(beans, changes):
    with Trainer(beans, A2_BASE.but(**changes)) as trainer:
        trainer.run(3)
    assert len(trainer.losses) == 3
    assert trainer.losses[0] == pytest.approx(
        6.93, abs=0.3
    )  # log of the vocabulary: nothing is known yet


def test_a_ladder_ends_where_it_trains(workload):
    recipes = climb(A2_LADDER)
    last = recipes[A2_LADDER.rungs[-1].name].but(compile="off")
    with Trainer(workload, last) as trainer:
        trainer.run(2)
    assert len(recipes) == len(A2_LADDER.rungs)
    assert trainer.recipe.precision == "fp32"


def test_rates_are_of_what_was_really_run(workload):
    recipe = OURS.but(micro_batch=2, accumulation=2)
    run = compare(workload, {"ours": recipe}, steps=4, rounds=2)["ours"]
    assert run.ok, run.status
    seconds, metrics = sum(run.samples["step_ms"]) / 1e3, run.metrics
    steps = len(run.samples["step_ms"])
    assert metrics["examples_per_s"] == pytest.approx(4 * steps / seconds, rel=1e-3)
    assert metrics["useful_tokens"] == pytest.approx(
        metrics["useful_tokens_per_s"] / metrics["tokens_per_s"]
    )
    assert 0.7 < metrics["useful_tokens"] < 1
    assert metrics["tflops"] == pytest.approx(
        metrics["flops_per_step"] * steps / seconds / 1e12, rel=1e-3
    )
    assert metrics["flops_per_step"] == pytest.approx(workload.work(recipe).flops, rel=0.3)
    assert metrics["floor_ms"] > 0


@pytest.mark.parametrize("driver", ["eager", "accelerate"])
def test_a_packed_run_resumes_where_it_stopped(workload, tmp_path, driver):
    assert_resumes_where_it_stopped(workload, PACKED.but(driver=driver, accumulation=2), tmp_path)


def test_a_saved_adapter_has_pefts_names(workload, tmp_path):
    from safetensors.torch import load_file

    model = workload.build(OURS)
    perturb(model.network)
    workload.save(model, tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names
    other = copy.deepcopy(workload._frozen(torch.float32, 0))
    load_adapter(other, tmp_path, kind="plain")
    batch = batch_of(workload, BASE, [1])
    with torch.no_grad():
        found = other(**batch).loss
        expected = workload.loss(model, batch_of(workload, OURS, [1]), {})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_blocks_code_serves_all_blocks_and_all_lengths(workload, nothing_compiled):
    """Blocks compiled for any size: one graph for the vision tower's, and two for the decoder's,
    whose first block has an input that needs no gradient."""
    model = workload.build(OURS)
    for block in workload.blocks(model):
        block.compile(backend="aot_eager", dynamic=True)
    with Compilation() as compiled:
        for chosen in ([0], [1], [2], [3]):
            workload.loss(model, batch_of(workload, OURS, chosen), {}).backward()
    assert compiled.graphs == 3
    assert compiled.breaks.total() == 0


def test_one_graph_serves_any_length_in_fp8_too(workload, nothing_compiled):
    """The frozen FP8 layer fills rows up to a multiple of 16, which would be a graph of its own:
    lengths are ones.
    """
    recipe = OURS.but(base_linear="fp8-frozen")
    model = workload.build(recipe)
    for block in model.network.model.language_model.layers:
        block.compile(backend="aot_eager", dynamic=True)
    with Compilation() as compiled:
        for chosen in ([0], [1], [2]):
            batch = batch_of(workload, recipe, chosen)
            assert batch["input_ids"].shape[1] % FP8_ROWS == 0
            workload.loss(model, batch, {}).backward()
    assert compiled.graphs == 2


@pytest.mark.parametrize(
    ("known", "options"),
    [
        ({"is_causal"}, {"is_causal": True}),
        ({"window_size"}, {"window_size": (-1, 0)}),
        ({"window_size", "enable_gqa"}, {"window_size": (-1, 0), "enable_gqa": True}),
    ],
)
def test_every_pytorch_is_told_causal_in_its_words(known, options):
    assert varlen_options(known) == options


def test_shared_weights_that_are_let_go_stay_with_those_who_use_them(workload):
    held = workload.build(OURS)
    workload.release_weights()
    other = workload.build(OURS)
    pairs = list(zip(held.network.parameters(), other.network.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(a is b for a, b in pairs)


def test_packed_rows_compile_once_without_marks(workload, nothing_compiled):
    """The whole decoder, loss included, as one graph of one shape."""
    recipe = PACKED.but(loss="fused")
    model = workload.build(recipe)
    model.decoder.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    with Compilation() as compiled:
        for chosen in ([0, 1, 2], [3, 4], [5, 6, 7]):
            workload.loss(model, batch_of(workload, recipe, chosen), {}).backward()
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


# -------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": "packed"}, "needs layers='rewritten'"),
        ({"loss": "fused"}, "needs layers='rewritten'"),
        ({"cache": "features"}, "needs layers='rewritten'"),
        ({"cache": "latents"}, "is for diffusion models"),
        ({"predict": "everything"}, "is for texts alone"),
        ({"checkpointing": "offload", "base_linear": "fp8-te"}, "Transformer Engine's scales"),
        ({"adapter": "folded"}, "not built for this workload"),
        ({"driver": "graph", "optimizer": "adamw-fused"}, "fixed shapes that never asks the host"),
    ],
)
def test_what_it_cant_do_is_said(workload, change, message):
    with pytest.raises(ValueError, match=message):
        workload.build(BASE.but(**change))


def test_the_hubs_weights_have_one_size():
    workload = open_workload("llava-lora", scale="tiny", weights="hub", device="cpu")
    with pytest.raises(ValueError, match='weights="hub" has the sizes of scale="full"'):
        workload.build(BASE)
