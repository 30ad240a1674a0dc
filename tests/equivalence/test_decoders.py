"""Qwen3, gpt-oss and LLaVA-NeXT: the published architectures, our forward pass against
transformers' own, the arithmetic against PyTorch's counter, and what is compiled."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from decoders_at_work import batch_of, outcome, outcome_of
from recipes_at_work import Products, adapter_gradients, assert_same_gradients, perturb
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import BatchSampler
from torch.utils.flop_counter import FlopCounterMode

from labutils.data.loader import EPOCH, EpochOrder
from labutils.data.packing import IGNORED
from labutils.labs.ladders import A3_BASE
from labutils.layers.lora import attach_lora, count_parameters, count_trainable
from labutils.profiling.recompilation import Compilation
from labutils.recipe import Unavailable
from labutils.workloads import SCALES, open_workload
from labutils.workloads.causal_lm import GPT_OSS, GPT_OSS_120B, QWEN3, QWEN3_32B, build_lm
from labutils.workloads.decoder_flops import attended_pairs
from labutils.workloads.decoder_workload import FP8_ROWS, TARGETS, projections
from labutils.workloads.llava import SIZES, build_llava

BASE = A3_BASE.but(precision="fp32", adapter="plain", driver="eager", logging="ring-buffer").but(
    predict="answers", token_budget=3072
)
OURS = BASE.but(layers="rewritten")
PACKED = OURS.but(shapes="packed", token_budget=6144)
SHAPES = {"as-they-come": BASE, "padded": BASE.but(shapes="padded"), "packed": PACKED}
TWO, FIVE = (0, 5), (7, 1, 4, 9, 2)
"""Examples of a micro-batch."""
NAMES = ("qwen3-lora-long", "gpt-oss-lora-long", "llava-lora-varied")
META = torch.device("meta")


pytestmark = pytest.mark.usefixtures("single_thread")


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
def llava():
    return opened("llava-lora-varied")


@functools.cache
def reference(name, chosen, predict="answers"):
    """transformers' own forward pass, its own mask for the padding."""
    return outcome(opened(name), BASE.but(predict=predict), chosen)


def assert_is_reference(workload, recipe, chosen, batch=None):
    expected, gradients = reference(workload.name, chosen, recipe.predict)
    batch = batch_of(workload, recipe, chosen) if batch is None else batch
    loss, ours = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(ours, gradients, rtol=1e-4)


# -------------------------------------------------------------------------------------------------
# The architectures


@pytest.mark.parametrize(
    ("build", "size", "parameters", "trained"),
    [
        (build_lm, QWEN3["small"], 596_049_920, 5_046_272),
        (build_lm, QWEN3["full"], 8_190_735_360, 21_823_488),
        (build_lm, QWEN3_32B, 32_762_123_264, 67_108_864),
        (build_lm, GPT_OSS["full"], 20_914_757_184, 3_981_312),
        (build_lm, GPT_OSS_120B, 116_829_156_672, 5_971_968),
        (build_llava, SIZES["full"], 7_566_747_648, 20_971_520),
    ],
)
def test_the_architectures_are_the_published_ones_to_the_parameter(
    build, size, parameters, trained
):
    """The hub's totals; unsloth prints the LoRA's when it trains the language models."""
    network = build(size, META, torch.bfloat16)
    assert count_parameters(network) == parameters
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    attach_lora(network, projections(network), 8, 16, "plain", seed=0)
    assert count_trainable(network) == trained


@pytest.mark.parametrize(
    ("build", "sizes"), [(build_lm, QWEN3), (build_lm, GPT_OSS), (build_llava, SIZES)]
)
def test_every_scale_has_every_kind_of_layer(build, sizes):
    models = [build(sizes[scale], META, torch.float32) for scale in SCALES]
    kinds = [{type(module).__name__ for module in model.modules()} for model in models]
    assert kinds[0] == kinds[1] == kinds[2]


def test_configurations_are_the_published_ones():
    """What the shapes don't show."""
    qwen = build_lm(QWEN3["full"], META, torch.bfloat16).config
    assert (qwen.rope_parameters["rope_theta"], qwen.rms_norm_eps) == (1e6, 1e-6)
    oss = build_lm(GPT_OSS["full"], META, torch.bfloat16).config
    assert (oss.rope_parameters["rope_theta"], oss.rope_parameters["rope_type"]) == (150000, "yarn")
    assert (oss.num_experts_per_tok, oss.sliding_window, oss.rms_norm_eps) == (4, 128, 1e-5)
    assert oss.layer_types[:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    llava = build_llava(SIZES["full"], META, torch.bfloat16).config
    assert (llava.image_token_index, llava.vision_feature_layer) == (32000, -2)
    assert llava.image_grid_pinpoints[:2] == [[336, 672], [672, 336]]


def test_trainers_share_the_frozen_weights_until_they_are_released(workload):
    first, second = workload.build(BASE), workload.build(OURS)
    workload.release_weights()
    heads = [model.network.lm_head.weight for model in (first, second, workload.build(BASE))]
    assert heads[0] is heads[1] and heads[0] is not heads[2]
    assert torch.equal(heads[0], heads[2])
    half = workload.build(BASE.but(precision="bf16")).network
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert half.get_decoder().rotary_emb.inv_freq.dtype == torch.float32  # positions stay exact


# -------------------------------------------------------------------------------------------------
# Our forward pass against transformers'


@pytest.mark.parametrize("shapes", SHAPES)
def test_loss_and_gradients_are_transformers(workload, shapes):
    assert_is_reference(workload, SHAPES[shapes].but(layers="rewritten"), FIVE)


@pytest.mark.parametrize(
    "recipe",
    [
        PACKED.but(loss="fused"),
        PACKED.but(loss="answers"),
        PACKED.but(checkpointing="offload"),
        OURS.but(checkpointing="blocks"),
        OURS.but(adapter="peft"),
    ],
    ids=["fused", "answers", "offload", "blocks", "peft"],
)
def test_what_makes_it_faster_or_smaller_changes_nothing(workload, recipe):
    assert_is_reference(workload, recipe, FIVE)


def test_cached_features_change_nothing(llava):
    recipe = PACKED.but(cache="features")
    examples = llava.dataset(llava.build(recipe), recipe)
    batch = llava.collate(recipe)([examples[index] for index in FIVE])
    assert "features" in batch
    assert_is_reference(llava, recipe, FIVE, batch)


def test_fixed_is_the_same_as_images_that_were_square_before(llava):
    """Article A2's fixed shapes: images resized, the text padded."""
    recipe, side = OURS.but(shapes="fixed"), llava.size.tile
    rows, transform = llava.dataset(None, BASE).with_format(None), llava._examples(BASE)
    squares = [
        transform.example(rows[i]["image"].resize((side, side), 2), rows[i]["labels"])
        for i in (0, 5)
    ]
    expected, gradients = outcome_of(llava, BASE, llava.collate(BASE)(squares))
    batch = batch_of(llava, recipe, [0, 5])
    assert batch["input_ids"].shape == (2, llava.token_budget(recipe))
    loss, ours = outcome_of(llava, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(ours, gradients, rtol=1e-4)


def test_rows_without_padding_are_our_packed_ones(qwen3):
    """What a library is given to pack: transformers tells the texts apart by their positions."""
    chosen, library = FIVE, PACKED.but(layers="published")
    batch = batch_of(qwen3, library, chosen)
    assert set(batch) == {"input_ids", "position_ids", "labels"} and len(batch["input_ids"]) == 1
    assert_is_reference(qwen3, BASE, chosen, batch)
    assert qwen3.work_of(library, batch) == qwen3.work_of(PACKED, batch_of(qwen3, PACKED, chosen))


@pytest.mark.parametrize("predict", ["everything", "answers"])
def test_the_loss_is_that_of_the_tokens_to_be_predicted(qwen3, predict):
    """By hand: logits of transformers' model at the places before them."""
    recipe = BASE.but(predict=predict)
    model, example = qwen3.build(recipe), qwen3.dataset(None, recipe)[3]
    batch = qwen3.collate(recipe)([example])
    with torch.no_grad():
        logits = model.network(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
        loss = qwen3.loss(model, batch, {})
    wanted = example["labels"][1:] != IGNORED
    assert wanted.all() == (predict == "everything")
    expected = F.cross_entropy(logits[:-1][wanted], example["labels"][1:][wanted])
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((NAMES[0], kind) for kind in ("fp8-frozen", "nf4", "nf4-frozen")),
        (NAMES[1], "nf4-frozen"),
        (NAMES[2], "fp8-frozen"),
        (NAMES[2], "nf4"),
    ],
)
def test_converted_bases_train_and_keep_near(name, kind):
    """Within what the format's rounding allows. The head stays as published, and for FP8 the vision
    tower."""
    workload, recipe = opened(name), OURS.but(base_linear=kind)
    expected, gradients = reference(workload.name, FIVE)
    kinds = {n: type(m).__name__ for n, m in workload.build(recipe).network.named_modules()}
    assert kinds["lm_head"] == "Linear"
    assert {k for n, k in kinds.items() if n.endswith("o_proj.base_layer")} != {"Linear"}
    tower = {kind for name, kind in kinds.items() if name.endswith("mlp.fc1")}
    assert not tower or (tower == {"Linear"}) == ("fp8" in kind)
    batch = batch_of(workload, recipe, FIVE)
    assert kind != "fp8-frozen" or batch["input_ids"].shape[1] % FP8_ROWS == 0
    loss, ours = outcome_of(workload, recipe, batch)
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0.05)
    for name, gradient in gradients.items():
        assert F.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0) > 0.8, name


def test_peft_adapts_4_bits_with_its_own_layer(qwen3):
    from peft.tuners.lora.bnb import Linear4bit

    recipes = {a: BASE.but(base_linear="nf4", adapter=a) for a in ("peft", "plain")}
    layers = [m for m in qwen3.build(recipes["peft"]).modules() if hasattr(m, "base_layer")]
    assert len(layers) == 2 * len(TARGETS) and {type(layer) for layer in layers} == {Linear4bit}
    outcomes = [outcome(qwen3, recipe, TWO) for recipe in recipes.values()]
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0])
    assert_same_gradients(outcomes[0][1], outcomes[1][1], rtol=1e-4)


# -------------------------------------------------------------------------------------------------
# Batches


def test_forms_of_batches(workload):
    lengths = [workload.example_sizes(BASE)[index].tokens for index in FIVE]
    budget, shape = workload.token_budget(BASE), {}
    for name, recipe in SHAPES.items():
        ids = batch_of(workload, recipe.but(layers="rewritten"), FIVE)["input_ids"]
        assert (ids != workload.pad).sum() == sum(lengths)
        shape[name] = ids.shape
    assert shape["as-they-come"] == (5, max(lengths)) and shape["padded"] == (5, budget)
    assert shape["packed"][0] < 5 and shape["packed"][1] == workload.token_budget(PACKED)


def test_an_example_that_does_not_fit_is_refused(workload):
    with pytest.raises(ValueError, match="token_budget"):
        workload.collate(PACKED.but(token_budget=512))


def test_the_processor_makes_as_many_tokens(llava):
    for example, size in zip(llava.dataset(None, BASE), llava.example_sizes(BASE), strict=True):
        counted = len(example["input_ids"]), len(example["pixel_values"])
        assert counted == (size.tokens, size.tiles)
        assert (example["labels"] != IGNORED).sum() == size.answers


# -------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize(("shapes", "loss"), [("as-they-come", "answers"), ("padded", "logits")])
def test_flops_are_those_that_pytorch_counts(workload, shapes, loss):
    """Attention by products computes all pairs of a row, which we add here. The rotary embedding's
    angles, a product of width 1, are no work of ours. PyTorch doesn't count grouped products, so
    gpt-oss's experts are transformers' loop here."""
    recipe = SHAPES[shapes].but(layers="rewritten", loss=loss)
    model, size = workload.build(recipe), workload.size
    model.network.config._experts_implementation = "eager"
    batch = batch_of(workload, recipe, TWO)
    rows, length = batch["input_ids"].shape
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        workload.loss(model, batch, {}).backward()
    pairs = size.layers * (rows * length * (rows * length + 1 if size.experts else length))
    unseen = pairs - attended_pairs(size, [length] * rows)
    predicting = len(batch["answers"]) if loss == "answers" else rows * length
    tiles, angles = workload.tiles_of(batch), 2 * rows * length * size.head_width // 2
    ours, _ = workload.flops_and_bytes(recipe, [length] * rows, tiles, predicting)
    unseen_flops = 12 * unseen * size.heads * size.head_width
    assert ours + unseen_flops + angles == counter.get_total_flops()


@pytest.mark.parametrize("name", ["qwen3-lora-long", "gpt-oss-lora-long"])
@pytest.mark.parametrize("lengths", [[5], [100, 3, 17]])
def test_pairs_are_what_the_masks_let_through(name, lengths):
    size, tokens = opened(name).size, torch.arange(sum(lengths))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    whole = (document[:, None] == document) & (tokens[:, None] >= tokens)
    near = whole & (tokens[:, None] - tokens < size.window)
    expected = whole.sum() + (near.sum() if size.experts else whole.sum())
    assert attended_pairs(size, lengths) == expected  # of two layers


@pytest.mark.parametrize(
    ("shapes", "layers"), [*((s, "rewritten") for s in SHAPES), ("as-they-come", "published")]
)
def test_work_planned_is_the_work_of_the_batches(workload, shapes, layers):
    recipe = SHAPES[shapes].but(layers=layers, micro_batch=2)
    epoch = EpochOrder(len(workload.example_sizes(recipe)), EPOCH, recipe.seed)
    order = workload.order(None, recipe) or BatchSampler(epoch, 2, drop_last=True)
    for _, chosen in zip(range(3), order, strict=False):
        examples = [workload.example_sizes(recipe)[index] for index in chosen]
        work = workload.work_of(recipe, batch_of(workload, recipe, chosen))
        assert workload._planned(recipe, examples) == work


def test_what_work_counts(workload):
    lengths = [workload.example_sizes(OURS)[i].tokens for i in TWO]
    work = workload.work_of(OURS, batch_of(workload, OURS, TWO))
    assert (work.examples, work.tokens, work.useful_tokens) == (2, 2 * max(lengths), sum(lengths))
    plain, packed = workload.work(OURS), workload.work(PACKED.but(token_budget=16384))
    assert plain.useful_tokens / plain.tokens < 0.9 < packed.useful_tokens / packed.tokens


# -------------------------------------------------------------------------------------------------
# What is compiled


def test_one_blocks_code_serves_all_blocks_and_all_lengths(llava, nothing_compiled):
    """Blocks compiled for any size: two graphs of the decoder's, whose first block has an input
    that needs no gradient, and one of the vision tower's."""
    model = llava.build(OURS)
    for block in llava.blocks(model):
        block.compile(backend="aot_eager", dynamic=True)
    with Compilation() as compiled:
        for chosen in ([0], [1], [2]):
            llava.loss(model, batch_of(llava, OURS, chosen), {}).backward()
    assert (compiled.graphs, compiled.graph_breaks) == (3, 0)


@pytest.mark.parametrize("name", NAMES[1:])
def test_packed_rows_compile_once(name, nothing_compiled):
    """The whole decoder, loss included, as one graph of one shape; the mixture's experts, too."""
    workload, recipe = opened(name), PACKED.but(loss="fused")
    model = workload.build(recipe)
    model.decoder.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    with Compilation() as compiled:
        for chosen in ([0], [3], [5]):
            workload.loss(model, batch_of(workload, recipe, chosen), {}).backward()
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


WITHIN = {"checkpointing": "blocks", "compile": "default", "compile_scope": "blocks"}


@pytest.mark.parametrize("base", ["published", "nf4-frozen"])
def test_a_compiled_checkpoint_computes_again_what_is_needed(qwen3, nothing_compiled, base):
    """The same gradients; of the 21 products of a block's forward pass, all but the last layer's
    own and its adapter's second are there once more in a backward pass."""
    recipe = PACKED.but(base_linear=base)
    models = [qwen3.build(recipe), qwen3.build(recipe.but(**WITHIN))]
    for block in qwen3.units(models[1]):
        block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    gradients, products = [], []
    for model in models:
        perturb(model.network)
        loss = qwen3.loss(model, batch_of(qwen3, recipe, [3]), {})
        with Products() as counted:
            loss.backward()
        products.append(counted.count)
        gradients.append(adapter_gradients(model.network))
    assert_same_gradients(gradients[1], gradients[0], rtol=1e-4)
    assert products[1] - products[0] == len(qwen3.units(models[0])) * (21 - 2)


# -------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2]])
@pytest.mark.parametrize(
    "change",
    [
        {"shapes": "packed"},
        {"cache": "features"},
        {"adapter": "none"},
        {"predict": "everything", "layers": "rewritten", "loss": "answers"},
        {"driver": "graph", "optimizer": "adamw-fused"},
        {"checkpointing": "offload", "compile": "default"},
        {"checkpointing": "offload", "base_linear": "fp8-te"},
        {"checkpointing": "selective", "base_linear": "nf4"},
        {"checkpointing": "offload", "driver": "graph", "layers": "rewritten", "shapes": "packed"},
    ],
)
def test_what_it_cant_do_is_said(name, change):
    """In a message that names a knob which was turned."""
    with pytest.raises(ValueError, match="|".join(f"{knob}=" for knob in change)):
        opened(name).build(BASE.but(**change))


def test_blocks_that_the_compiler_would_leave_out_are_said(qwen3):
    with pytest.raises(Unavailable, match="compile_scope='blocks'"):
        qwen3.build(OURS.but(base_linear="fp8-te", checkpointing="blocks", compile="default"))
